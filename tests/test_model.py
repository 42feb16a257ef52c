import dataclasses
import json
import re
from pathlib import Path
from unittest.mock import Mock, call

import huggingface_hub
import pytest
import torch
from support.commands import refuses
from support.data import SPECIAL
from support.disk import put, write
from support.families import model_of
from support.runs import TINY
from transformers import GPT2Config, GPT2LMHeadModel

from bertrain.models import families
from bertrain.models.load import HUB_TIMEOUT_S, load_model, max_length, new_model, start_from

ONE_LAYER = json.loads(Path(TINY).read_bytes()) | {"num_hidden_layers": 1}
del ONE_LAYER["hidden_dropout_prob"]


def test_a_config_file_makes_a_model_and_a_misspelt_setting_is_named(dataset, tmp_path):
    path, unused = tmp_path / "config.json", {"gradient_checkpointing": False, "_name_or_path": "x", "task": None}
    path.write_text(json.dumps(ONE_LAYER | unused | {"hiden_dropout_prob": 0.0}))
    built, warnings = new_model(str(path), dataset.special_tokens, length=32, seed=0)
    assert built.config.vocab_size == dataset.special_tokens.vocab_size
    assert built.config.num_hidden_layers == 1
    assert built.config.hidden_dropout_prob > 0
    assert len(warnings) == 1
    assert re.search("hiden_dropout_prob.*hidden_dropout_prob", warnings[0])


def test_what_must_fit_the_data_is_changed_and_said(dataset, tmp_path):
    special = dataset.special_tokens
    without = dataclasses.replace(special, pad=None)
    stated = {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    stated |= {"max_position_embeddings": 20, "type_vocab_size": 1}
    path = write(tmp_path / "roberta.json", json.dumps(ONE_LAYER | stated | {"model_type": "roberta"}))
    with refuses("unsupported", "model", given=str(path)):
        new_model(str(path), without, length=32, seed=0)
    weights, warnings = new_model(str(path), special, length=32, seed=0)
    (warning,) = warnings
    config = json.loads(weights.config.to_json_string(use_diff=False))
    expected = {"vocab_size": special.vocab_size, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    for name, value in (expected | {"max_position_embeddings": 33}).items():
        assert f"{name} {stated[name]} → {value}" in warning
        assert config[name] == value
    assert max_length(weights.config) == 32
    assert weights.roberta.embeddings.word_embeddings.padding_idx == weights.config.pad_token_id == 0
    for more, kept in ((46, 46), (127, 127), (128, 0)):  # the first is a multiple of 128
        path.write_text(json.dumps(ONE_LAYER | {"vocab_size": special.vocab_size + more}))
        weights, warnings = new_model(str(path), special, length=32, seed=0)
        assert (len(warnings), weights.config.vocab_size) == (not kept, special.vocab_size + kept)


def test_a_name_of_the_hub_is_read_from_the_cache_of_transformers(dataset, tmp_path, monkeypatch):
    """As huggingface_hub lays it out; this machine has no network."""
    repository = tmp_path / "models--org--small"
    put(repository / "refs" / "main", "0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    write(snapshot / "config.json", json.dumps(ONE_LAYER | {"vocab_size": 30522}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    weights, warnings = new_model("org/small", dataset.special_tokens, length=32, seed=0)
    assert weights.config.hidden_size == 32
    assert "vocab_size 30522 → " in warnings[0]
    asked = Mock(side_effect=ConnectionError("no route to host"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", asked)
    with refuses("model-not-found", "init"):  # the weights are not there
        start_from("org/small", dataset, length=32)
    weights.save_pretrained(snapshot)
    started, _ = start_from("org/small", dataset, length=32)
    assert torch.equal(started.get_input_embeddings().weight, weights.get_input_embeddings().weight)
    asked.assert_called_once()


def test_a_model_that_does_not_exist_is_refused(dataset, tmp_path, monkeypatch):
    """The hub is asked once, for a short time, about names that it can have."""
    monkeypatch.chdir(tmp_path)
    asked = Mock(side_effect=ConnectionError("no route to host"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", asked)
    for name in ("nothere/", "./nothere", "a/b/nothere", "bert-huge", "org/other"):
        with refuses("model-not-found", "model", given=name):
            new_model(name, dataset.special_tokens, length=32, seed=0)
        with refuses("model-not-found", "init", given=name):
            start_from(name, dataset, length=32)
        may_be = name in ("bert-huge", "org/other")
        assert asked.mock_calls == [call(name, timeout=HUB_TIMEOUT_S)] * 2 * may_be
        asked.reset_mock()


def test_what_only_the_hub_has_is_downloaded(dataset, monkeypatch):
    downloads = Mock(side_effect=OSError("stopped"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", Mock())
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", downloads)
    with refuses("model-unreadable", "model"):
        new_model("org/other", dataset.special_tokens, length=32, seed=0)
    with refuses("model-unreadable", "init"):
        start_from("org/other", dataset, length=32)
    assert [each.kwargs["local_files_only"] for each in downloads.mock_calls] == [False, False]


def test_a_run_starts_from_a_directory_and_from_nothing_else(dataset, tmp_path):
    """Weights may have other shapes than their configuration says, or another vocabulary than the shards."""
    weights = model_of("bert-tiny", dataset)
    for name in ("bert", "shapes"):
        weights.save_pretrained(tmp_path / name)
    started, _ = start_from(str(tmp_path / "bert"), dataset, length=32)
    assert torch.equal(started.cls.predictions.bias, weights.cls.predictions.bias)
    path = tmp_path / "shapes" / "config.json"
    write(path, json.dumps(json.loads(path.read_bytes()) | {"intermediate_size": 256}))
    small = dataclasses.replace(dataset.special_tokens, vocab_size=dataset.special_tokens.vocab_size - 1)
    new_model("bert-tiny", small, length=32, seed=0)[0].save_pretrained(tmp_path / "small")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=90)).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "empty").mkdir()
    for given, kind, option in (
        ("bert-tiny", "model-not-found", "init"),  # a preset has no weights
        (tmp_path / "bert" / "model.safetensors", "model-not-found", "init"),
        *((tmp_path / name, "model-unreadable", "init") for name in ("gpt2", "empty", "shapes")),
        (tmp_path / "small", "tokenizer-differs", None),
    ):
        with refuses(kind, option):
            start_from(str(given), dataset, length=32)
    with refuses("too-long", "length"):
        start_from(str(tmp_path / "bert"), dataset, length=513)
    with refuses("model-not-found", "model"):
        new_model(str(tmp_path / "empty"), dataset.special_tokens, length=32, seed=0)


def test_a_model_with_two_heads_is_loaded_with_one_in_silence(dataset, tmp_path, capfd):
    new_model("bert-tiny", dataset.special_tokens, length=32, seed=0, nsp=True)[0].save_pretrained(tmp_path)
    assert not hasattr(load_model(tmp_path).cls, "seq_relationship")
    started, warnings = start_from(str(tmp_path), dataset, length=32)
    assert "cls.seq_relationship.weight" in warnings[0]
    assert hasattr(load_model(tmp_path, nsp=True).cls, "seq_relationship")
    assert capfd.readouterr() == ("", "")


BERTS = (2, 128, 512), (4, 256, 1024), (4, 512, 2048), (12, 768, 3072), (24, 1024, 4096)
MODERNBERTS = (2, 128, 256), (6, 384, 576), (22, 768, 1152)
SIZES = dict(zip(families.PRESETS, BERTS + MODERNBERTS, strict=True))  # layers, width, feed-forward width


@pytest.mark.parametrize("name", families.PRESETS)
def test_a_preset_has_positions_for_long_rows_and_the_settings_of_its_family(name):
    config, is_modern = families.preset(name, SPECIAL, length=32), name.startswith("modern")
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == SIZES[name]
    assert config.num_attention_heads == config.hidden_size // 64
    assert config.max_position_embeddings == (8192 if is_modern else 512)
    assert families.preset(name, SPECIAL, length=9000).max_position_embeddings == 9000
    if is_modern:
        assert (config.cls_token_id, config.sep_token_id, config.classifier_pooling) == (2, 3, "mean")
        assert ("sliding_attention" in config.layer_types) == (name == "modernbert-base")
