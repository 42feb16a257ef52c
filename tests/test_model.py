import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from training import learner

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
    module = learner(model.build(name, dataset.special_tokens, length=24, seed=0))
    loss, right = module(**next(feed.micro_batches(batch, size=5, count=1, device=CPU)))["mlm"]
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
    module = learner(model.build("modernbert-tiny", dataset.special_tokens, length=64, seed=0)).eval()
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
    module = learner(model.build("bert-tiny", dataset.special_tokens, length=24, seed=0))
    assert module(**pieces[3])["mlm"].sum.item() == 0.0


def test_one_sample_with_a_fixed_mask_is_learned_by_heart(dataset):
    batch = bertdata.Loader(dataset, length=32).read(np.array([0]))
    module = learner(model.build("bert-tiny", dataset.special_tokens, length=32, seed=0))
    optimizer = optim.build(module, Config(data="x", out="y"))
    optim.set_learning_rate(optimizer, 3e-3)
    count = feed.num_targets(batch)
    assert count == 5
    found = []
    for _ in range(60):
        loss, _ = module(**next(feed.micro_batches(batch, size=1, count=1, device=CPU)))["mlm"]
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        found.append(loss.item() / count)
    assert found[0] > 3
    assert found[-1] < 0.01


def test_same_seed_same_weights_and_another_seed_others(dataset):
    def weights(seed):
        built = model.build("bert-tiny", dataset.special_tokens, length=32, seed=seed)
        return torch.cat([p.flatten() for p in built.parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


def test_a_config_file_makes_a_model(dataset, tmp_path):
    path = tmp_path / "config.json"
    values = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    path.write_text(json.dumps(values | {"intermediate_size": 64}))
    built = model.build(str(path), dataset.special_tokens, length=32, seed=0)
    assert built.config.vocab_size == dataset.special_tokens.vocab_size
    assert built.config.num_hidden_layers == 1
    assert model.has_dropout(built)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"model_type": "gpt2"}', "model_type bert or modernbert"),
        ("not json", "not a transformers configuration"),
        ('{"model_type": "bert", "vocab_size": 7}', "vocab_size 7"),
        ('{"model_type": "bert", "max_position_embeddings": 16}', "16 positions"),
        ('{"model_type": "modernbert", "pad_token_id": 50283}', "describes no model that can be built"),
    ],
)
def test_a_config_file_that_does_not_fit_is_refused(dataset, tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        model.build(str(path), dataset.special_tokens, length=32, seed=0)


def test_a_preset_that_does_not_exist_is_named_with_those_that_do(dataset):
    with pytest.raises(UsageError, match=r"bert-huge.*bert-base"):
        model.build("bert-huge", dataset.special_tokens, length=32, seed=0)


def test_an_untrained_model_is_as_good_as_guessing(dataset):
    module = learner(model.build("bert-tiny", dataset.special_tokens, length=32, seed=0))
    result = evaluate(module, dataset, ALONE, split="validation", length=32)
    assert result["loss"] == pytest.approx(np.log(dataset.special_tokens.vocab_size), rel=0.1)
    assert result["samples"] == bertdata.Loader(dataset, length=32, split="validation").num_samples
    assert module.training
