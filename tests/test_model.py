import dataclasses
import json

import huggingface_hub
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from training import learner
from transformers import GPT2Config, GPT2LMHeadModel

import bertdata
from bertdata.errors import UsageError
from bertrain import feed, optim
from bertrain.config import Config
from bertrain.evaluate import evaluate
from bertrain.models import build as model
from bertrain.runtime.dist import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


@pytest.mark.parametrize("name", ["bert-tiny", "modernbert-tiny"])
def test_loss_of_masked_places_is_that_of_transformers_over_all_places(name, dataset):
    batch = next(bertdata.Loader(dataset, length=24, global_batch_size=5, seed=3))
    module = learner(model.build(name, dataset.special_tokens, length=24, seed=0)[0])
    loss, right, _ = module(**next(feed.micro_batches(batch, size=5, count=1, device=CPU)))["mlm"]
    ours = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    logits = module.model(input_ids=torch.from_numpy(batch.input_ids)).logits
    labels = torch.from_numpy(batch.labels)
    dense = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    theirs = torch.autograd.grad(dense, list(module.parameters()))
    torch.testing.assert_close(loss, dense)
    assert right == (logits.argmax(-1) == labels).sum()
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_one, theirs_one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_is_inert(dataset, attention):
    """What stands in padded places changes no loss, also in the attention that bf16 has on CPUs."""
    loader = bertdata.Loader(dataset, length=64, global_batch_size=256, epochs=1)
    batch = next(b for b in loader if b.attention_mask is not None)
    module = learner(model.build("modernbert-tiny", dataset.special_tokens, length=64, seed=0)[0]).eval()
    module.model.set_attn_implementation(attention)
    piece = next(feed.micro_batches(batch, size=1024, count=1, device=CPU))
    before = module(**piece)["mlm"].sum
    piece["input_ids"] = torch.where(piece["attention_mask"] == 0, 7, piece["input_ids"])
    torch.testing.assert_close(module(**piece)["mlm"].sum, before)


def test_pieces_hold_every_row_once_and_the_rest_have_no_targets(dataset):
    batch = next(bertdata.Loader(dataset, length=24, global_batch_size=5))
    pieces = list(feed.micro_batches(batch, size=2, count=4, device=CPU))
    assert [len(piece["input_ids"]) for piece in pieces] == [2, 2, 1, 1]
    assert torch.equal(torch.cat([p["input_ids"] for p in pieces[:3]]), torch.from_numpy(batch.input_ids))
    assert (pieces[3]["targets"] == bertdata.IGNORE_INDEX).all()
    module = learner(model.build("bert-tiny", dataset.special_tokens, length=24, seed=0)[0])
    assert module(**pieces[3])["mlm"].sum.item() == 0.0


def test_one_sample_with_a_fixed_mask_is_learned_by_heart(dataset):
    batch = bertdata.Loader(dataset, length=32).read(np.array([0]))
    module = learner(model.build("bert-tiny", dataset.special_tokens, length=32, seed=0)[0])
    optimizer = optim.build(module, Config(data="x", out="y"))
    optim.set_learning_rate(optimizer, 3e-3)
    count = feed.num_targets(batch)
    assert count == 5
    found = []
    for _ in range(60):
        loss = module(**next(feed.micro_batches(batch, size=1, count=1, device=CPU)))["mlm"].sum
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        found.append(loss.item() / count)
    assert found[0] > 3
    assert found[-1] < 0.01


def test_same_seed_same_weights_and_another_seed_others(dataset):
    def weights(seed):
        built = model.build("bert-tiny", dataset.special_tokens, length=32, seed=seed)[0]
        return torch.cat([p.flatten() for p in built.parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


def test_a_config_file_makes_a_model(dataset, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    built = model.build(str(path), dataset.special_tokens, length=32, seed=0)[0]
    assert built.config.vocab_size == dataset.special_tokens.vocab_size
    assert built.config.num_hidden_layers == 1
    assert model.has_dropout(built)


TINY = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
        "intermediate_size": 64}  # fmt: skip


def test_a_misspelt_setting_of_a_configuration_is_named(dataset, tmp_path):
    path, unused = tmp_path / "config.json", {"gradient_checkpointing": False, "_name_or_path": "x", "task": None}
    path.write_text(json.dumps(TINY | unused | {"hiden_dropout_prob": 0.0}))
    _, warnings = model.build(str(path), dataset.special_tokens, length=32, seed=0)
    assert f"--model {path}: hiden_dropout_prob is no setting of a bert; is hidden_dropout_prob meant?" in warnings
    assert not any(name in warning for name in unused for warning in warnings)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "gpt2"}, r"is a decoder \(gpt2\); give an encoder that predicts masked tokens, such as a bert"),
        ({"model_type": "t5"}, r"is an encoder and a decoder \(t5\); give"),
        ({"model_type": "bart"}, r"is an encoder and a decoder \(bart\); give"),
        (TINY | {"is_decoder": True}, r"is a decoder \(bert\); give"),
        ({"model_type": "vit"}, r"is no masked language model \(vit\); give"),
        ({"model_type": "berd"}, "its model_type is berd, which transformers does not know"),
        ({"config": {"data": "shards"}}, "its model_type is None"),
        ("not json", "not a transformers configuration"),
        ([1, 2], "not a transformers configuration: it is no JSON object"),
        ("[" * 100_000, "not a transformers configuration: it is nested too deeply"),
        (b"\xff{}", "not a transformers configuration: it is not UTF-8 text"),
        (TINY | {"num_attention_heads": 3}, "describes no model that can be built"),
        (TINY | {"hidden_act": "geluu"}, "describes no model that can be built: transformers does not know 'geluu'"),
        (TINY | {"hidden_size": "wide"}, "not a transformers configuration"),
        (TINY | {"model_type": "mpnet"}, "whose padding id is always 1, and that of the shards is 0"),
    ],
)
def test_what_is_no_masked_language_model_is_refused(dataset, tmp_path, content, said):
    path = tmp_path / "config.json"
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UsageError, match=f"^--model {path} .*{said}"):
        model.build(str(path), dataset.special_tokens, length=32, seed=0)


def test_a_roberta_needs_a_padding_token(dataset, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "roberta"}))
    without = dataclasses.replace(dataset.special_tokens, pad=None)
    with pytest.raises(UsageError, match="positions begin after the padding id, and .* has no padding token"):
        model.build(str(tmp_path), without, length=32, seed=0)


def test_what_must_fit_the_data_is_changed_and_said(dataset, tmp_path):
    special = dataset.special_tokens
    stated = {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    path = tmp_path / "roberta.json"
    path.write_text(json.dumps(TINY | stated | {"model_type": "roberta", "max_position_embeddings": 20}))
    weights, warnings = model.build(str(path), special, length=32, seed=0)
    assert warnings == [
        f"--model {path} is changed to fit the data: vocab_size 50265 → {special.vocab_size}, bos_token_id 0 → 2, "
        "eos_token_id 2 → 3, pad_token_id 1 → 0, max_position_embeddings 20 → 33"
    ]
    assert model.max_length(weights.config) == 32
    assert weights.roberta.embeddings.word_embeddings.padding_idx == weights.config.pad_token_id == 0
    path.write_text(json.dumps(TINY | {"vocab_size": special.vocab_size + 46}))  # a multiple of 128
    weights, warnings = model.build(str(path), special, length=32, seed=0)
    assert warnings == []
    assert weights.config.vocab_size == special.vocab_size + 46


def test_a_name_of_the_hub_is_read_from_the_cache_of_transformers(dataset, tmp_path, monkeypatch):
    """As huggingface_hub lays it out; this machine has no network."""
    place = tmp_path / "models--org--small"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    snapshot = place / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(TINY | {"vocab_size": 30522}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    weights, warnings = model.build("org/small", dataset.special_tokens, length=32, seed=0)
    assert weights.config.hidden_size == 32
    assert "vocab_size 30522 → " in warnings[0]
    with pytest.raises(UsageError, match=r"^--model org/other is neither a preset .* does not give it \(.*\); give"):
        model.build("org/other", dataset.special_tokens, length=32, seed=0)


def test_weights_are_a_start_from_a_directory_or_its_configuration_and_nothing_else_is(dataset, tmp_path):
    """A preset has no weights, and a decoder predicts no masked tokens."""
    weights = model.build("bert-tiny", dataset.special_tokens, length=32, seed=0)[0]
    weights.save_pretrained(tmp_path / "bert")
    for given in (tmp_path / "bert", tmp_path / "bert" / "config.json"):
        started, _ = model.start_from(str(given), dataset, length=32)
        assert torch.equal(started.cls.predictions.bias, weights.cls.predictions.bias)
    with pytest.raises(UsageError, match="--init bert-tiny is no directory"):
        model.start_from("bert-tiny", dataset, length=32)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=90)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UsageError, match=r"is a decoder \(gpt2\)"):
        model.start_from(str(tmp_path / "gpt2"), dataset, length=32)


def test_a_preset_that_does_not_exist_is_named_with_those_that_do(dataset):
    with pytest.raises(UsageError, match=r"bert-huge.*bert-base"):
        model.build("bert-huge", dataset.special_tokens, length=32, seed=0)


def test_an_untrained_model_is_as_good_as_guessing(dataset):
    module = learner(model.build("bert-tiny", dataset.special_tokens, length=32, seed=0)[0])
    result = evaluate(module, dataset, ALONE, split="validation", length=32)
    assert result["loss"] == pytest.approx(np.log(dataset.special_tokens.vocab_size), rel=0.1)
    assert result["samples"] == bertdata.Loader(dataset, length=32, split="validation").num_samples
    assert module.training
