"""A new model for a run: of a preset or a configuration."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from bertdata import SpecialTokens, key
from bertdata.errors import UsageError, is_out_of_memory
from bertrain.models.checks import check_is_encoder, max_length
from bertrain.models.families import PRESETS, family_of, first_position, freeze, preset
from bertrain.models.hub import must_download

MISSPELT = 0.85  # how alike two names of settings are, by difflib, if one is probably the other
VOCABULARY_PADDING = 128  # a configuration may have fewer ids than this beyond the shards', for faster products
OF_FILES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Entries of a configuration that are not of the model."""


def build(
    name: str,
    special: SpecialTokens,
    *,
    length: int,
    seed: int,
    nsp: bool = False,
    configure: Callable[[PreTrainedConfig], None] = lambda config: None,
) -> tuple[PreTrainedModel, list[str]]:
    """A freshly initialised model for a vocabulary and rows of `length` tokens, the same on every rank; and warnings.

    name: a preset, a transformers configuration (JSON), a directory with a config.json, or a name on the hub. What must
    fit the data in a configuration is changed to fit, and a warning says so. nsp: with a head for next sentence
    prediction. configure: changes the configuration, before the model is built. Raises UsageError if the name is none
    of these, or is no masked language model.
    """
    warnings: list[str] = []
    if name in PRESETS:
        config = preset(name, special, length=length)
    else:
        config, values = _read_config(name)
        config._attn_implementation = None  # noqa: SLF001  (as HARMLESS has it)
        check_is_encoder(config, name, "model")
        warnings += [f"--model {name}: {fault}" for fault in _misspelt(config, values)]
        if changes := _fit(config, values, special, length=length, nsp=nsp, name=name):
            warnings.append(f"--model {name} is changed to fit the data: {', '.join(changes)}")
    family = family_of(config)
    if nsp and family.next_sentence is None:
        sentence = (
            f"--objective nsp needs a model with a head for next sentences, such as bert-base; --model {name} is a "
            f"{config.model_type}"
        )
        raise UsageError(sentence, "unsupported", option="objective", given="nsp")
    configure(config)
    torch.manual_seed(key(seed, "init") >> 1)
    try:
        if nsp and family.next_sentence:
            return family.next_sentence(config), warnings
        return freeze(AutoModelForMaskedLM.from_config(config, dtype=torch.float32)), warnings
    except (ValueError, TypeError, RuntimeError, AssertionError, AttributeError, ImportError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        reason = f"transformers does not know {reason}" if isinstance(error, KeyError) else reason
        sentence = f"--model {name} describes no model that can be built: {reason}; correct it"
        raise UsageError(sentence, "model-unreadable", option="model", given=name) from None


def identity(name: str) -> str:
    """What --model or --init names, for comparison: the digest of a configuration, wherever it is; else the name.

    Presets and names on the hub are compared by name. Raises OSError for a file that cannot be read.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if name in PRESETS or not path.is_file():
        return name
    try:
        values = json.loads(path.read_bytes())
        content = {key: value for key, value in values.items() if key not in OF_FILES}
    except (ValueError, AttributeError, RecursionError):
        return name  # what reads it says what is wrong
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"a configuration of SHA-256 {digest[:16]}"


def _read_config(name: str) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """A configuration, and the values that its file states."""
    path = Path(name)
    instead = f"give a preset ({', '.join(PRESETS)}), a configuration file, or a directory with a config.json"
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            sentence = f"--model {name} is a directory without a config.json; {instead}"
            raise UsageError(sentence, "model-not-found", option="model", given=name)
    try:
        if path.is_file():
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict):
                raise ValueError("it is no JSON object")
            if values.get("model_type") not in CONFIG_MAPPING:
                raise ValueError(f"its model_type is {values.get('model_type')}, which transformers does not know")
            return AutoConfig.for_model(**values), values
        local = not must_download(name, "model", instead, ["config.json"])
        config = AutoConfig.from_pretrained(name, local_files_only=local, trust_remote_code=False)
        return config, config.to_dict()
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, StrictDataclassError) as error:
        if isinstance(error, UsageError):
            raise
        known = {UnicodeDecodeError: "it is not UTF-8 text", RecursionError: "it is nested too deeply"}
        reason = known.get(type(error), " ".join(str(error).split()))
        sentence = f"--model {name} is not a transformers configuration: {reason}; correct it, or give another"
        raise UsageError(sentence, "model-unreadable", option="model", given=name) from None


def _misspelt(config: PreTrainedConfig, values: dict[str, Any]) -> list[str]:
    """A question for each setting in a file whose name a configuration of this type does not have, but nearly.

    transformers takes any name without a word.
    """
    usual = type(config)()
    known = {*usual.to_dict(), *config.attribute_map}
    faults = []
    for name in values:
        near = difflib.get_close_matches(name, known - values.keys(), 1, MISSPELT)
        if near and name not in known and not hasattr(usual, name):
            faults.append(f"{name} is no setting of a {config.model_type}; is {near[0]} meant?")
    return faults


def _fit(
    config: PreTrainedConfig, values: dict[str, Any], special: SpecialTokens, *, length: int, nsp: bool, name: str
) -> list[str]:
    """Gives a configuration the vocabulary's size and special ids, and positions enough. Returns what was changed.

    values: what its file states; a default is changed without a word. name: of --model.
    """
    changes = []

    def change(setting: str, value: int | None) -> None:
        if setting in values and values[setting] != value:
            changes.append(f"{setting} {values[setting]} → {value}")
        setattr(config, setting, value)

    family = family_of(config)
    if family.positions_after_padding and special.pad is None:
        sentence = (
            f"--model {name} is of type {config.model_type}, whose positions begin after the padding id, and the "
            "tokenizer of the shards has no padding token; give another model, or shards of a tokenizer with a padding "
            "token"
        )
        raise UsageError(sentence, "unsupported", option="model", given=name)
    if family.padding_id is not None and special.pad != family.padding_id:
        sentence = (
            f"--model {name} is of type {config.model_type}, whose padding id is always {family.padding_id}, and that "
            f"of the shards is {special.pad}; give another model, or shards of a tokenizer with this padding id"
        )
        raise UsageError(sentence, "unsupported", option="model", given=name)
    size = config.attribute_map.get("vocab_size", "vocab_size")
    is_padded = size in values and special.vocab_size <= config.vocab_size < special.vocab_size + VOCABULARY_PADDING
    if not is_padded:
        change(size, special.vocab_size)
    roles = special.roles()
    ids: dict[str, int | None] = dict.fromkeys(("pad", "cls", "sep", "mask", "unk"))
    ids = {"bos": roles.get("cls"), "eos": roles.get("sep"), **ids, **roles}
    for role, value in ids.items():
        for setting in (f"{role}_token_id", f"{role}_index"):  # the second in XLM and FlauBERT
            is_needed = role in ("pad", "mask") and hasattr(config, setting)
            if is_needed or getattr(config, setting, None) is not None:
                change(setting, value)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > max_length(config):
        change("max_position_embeddings", length + first_position(config))
    if nsp and getattr(config, "type_vocab_size", 2) < 2:
        change("type_vocab_size", 2)
    return changes
