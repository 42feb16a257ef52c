"""A model for a run: a new one of a preset or a configuration, or a trained one of a checkpoint or of the hub."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from bertdata import Dataset, SpecialTokens, key
from bertdata.support import (
    TOKENIZER,
    DatasetError,
    TokenizerError,
    UsageError,
    give_same_ids,
    is_out_of_memory,
    load_tokenizer,
)
from bertrain.models.encoder import Encoder
from bertrain.models.families import PRESETS, family_of, first_position, freeze, preset

HUB_TIMEOUT_S = 10


def may_be_on_hub(name: str) -> bool:
    """Whether a model can have this name: not nothere/, ./nothere or nothere.json."""
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.endswith(".json")


def must_download(name: str, option: str, instead: str, files: Iterable[str]) -> bool:
    """Whether this machine has none of these files of a model of the hub yet. Asks the hub once, and not for long.

    Raises UsageError, which ends in `instead`, if there is no such model, or nobody can say so.
    """
    hub = huggingface_hub.constants.ENDPOINT
    if not may_be_on_hub(name):
        sentence = f"--{option} {name} does not exist; {instead}, or a name on the hub"
        raise UsageError(sentence, "model-not-found", option=option, given=name)
    if any(isinstance(huggingface_hub.try_to_load_from_cache(name, file), str) for file in files):
        return False
    try:
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        sentence = f"{hub} gives --{option} {name} only to users who were granted access; set HF_TOKEN, or {instead}"
        raise UsageError(sentence, "access-denied", option=option, given=name) from None
    except RepositoryNotFoundError:
        sentence = (
            f"--{option} {name} exists neither here nor on {hub}, or is private there; {instead}, or set HF_TOKEN"
        )
        raise UsageError(sentence, "model-not-found", option=option, given=name) from None
    except Exception as error:  # of the network
        reason = str(error).partition("\n")[0] or type(error).__name__
        sentence = (
            f"--{option} {name} does not exist here, and {hub} cannot be asked ({reason}); {instead}, or connect to "
            "the hub"
        )
        raise UsageError(sentence, "server-failed", option=option, given=name) from None
    return True


COMPARED = 8  # tokens of a row for which the head of a family is compared with the model's own
TRIED = 64  # tokens of the row that a model is tried with, if its attention takes any number of them
UNBOUNDED = 1 << 20  # tokens of a row, where a configuration does not say how many positions there are


def check_is_encoder(config: PreTrainedConfig, name: str, option: str | None) -> None:
    """Raises UsageError for a configuration of anything but an encoder with a masked language model.

    name: of the model, as it was given; option: for what, if it is known.
    """
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder and a decoder"
    elif getattr(config, "is_decoder", False) or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        is_decoder = getattr(config, "is_decoder", False) or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind = "a decoder" if is_decoder else "no masked language model"
    else:
        return
    sentence = (
        f"{named(name, option)} is {kind} ({config.model_type}); give an encoder that predicts masked tokens, such "
        "as a bert, a modernbert or a roberta"
    )
    raise UsageError(sentence, "unsupported", option=option, given=name)


def named(name: str, option: str | None) -> str:
    """A model with the option that it was given for, if it is known."""
    return f"--{option} {name}" if option else name


def max_length(config: PreTrainedConfig) -> int:
    """The longest row, in tokens, that a model has positions for."""
    return getattr(config, "max_position_embeddings", UNBOUNDED) - first_position(config)


def check_length(length: int, config: PreTrainedConfig, named: object) -> None:
    """Raises UsageError for rows of more tokens than a model has positions. named: the model, in the sentence."""
    if length > (most := max_length(config)):
        sentence = f"--length {length} is more than the {most} positions of {named}; give at most {most}"
        raise UsageError(sentence, "too-long", option="length", given=length)


def check_runs(model: PreTrainedModel, *, length: int) -> None:
    """Calls a model on one row. Raises UsageError if it does not turn ids alone into logits of the vocabulary.

    Or if the head that its family has in FAMILIES gives other logits at the first positions. The row has `length`
    tokens. It is shorter for families that keep packed documents apart, whose attention takes any number of tokens.
    """
    length = min(length, TRIED) if family_of(model).isolation else length
    was_training, ids = model.training, torch.arange(length)[None] % model.config.vocab_size
    try:
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits
        if logits.shape != (1, length, model.config.vocab_size):
            raise ValueError(f"{length} ids give logits of shape {list(logits.shape)}")
    except Exception as error:  # of any code
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        sentence = f"{model.config.model_type} cannot predict tokens from tokens alone ({reason}); give another model"
        raise UsageError(sentence, "unsupported", option="model", given=model.config.model_type) from None
    if not family_of(model).dense:
        _check_head(model, ids, logits[:, :COMPARED])
    model.train(was_training)


def _check_head(model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor) -> None:
    """expected: the model's own logits [1, K, V] at the first K positions."""
    try:
        with torch.no_grad():
            logits = Encoder(model).logits(input_ids=ids, masked_positions=torch.arange(expected.shape[1])[None])
        if logits.shape != expected.shape:
            raise ValueError(f"it gives logits of shape {list(logits.shape)} instead of {list(expected.shape)}")
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ValueError("it gives other logits")
    except Exception as error:  # of any code
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        sentence = (
            f"the head that FAMILIES has for {model.config.model_type} is not that of the model's own forward pass "
            f"({reason}); correct the entry, or leave it out (docs/extending.md)"
        )
        raise UsageError(sentence, "bad-entry", given=model.config.model_type) from None


def slower(model: PreTrainedModel) -> list[str]:
    """A warning for a model of a family that is not in FAMILIES, else nothing."""
    if not family_of(model).dense:
        return []
    return [
        f"{model.config.model_type} is not in the table of families (docs/models.md), so training is slower: every "
        "token of a row goes through the vocabulary projection, not the masked ones alone; and the operations a second "
        "are estimated from the number of parameters"
    ]


transformers.utils.logging.disable_progress_bar()  # the trainer shows its own

HARMLESS: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True, "attn_implementation": None}
"""Options of from_pretrained for models of strangers: none of their code, no pickle, and no kernel for attention from
the hub, which config.json can name.
"""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # a model of the hub has one of them


def load_model(directory: Path | str, *, nsp: bool = False) -> PreTrainedModel:
    """A checkpoint as transformers wrote it, in float32. directory: of it, or its name on the hub.

    Raises DatasetError if transformers cannot load the checkpoint or it lacks weights, and UsageError if it is no
    masked language model.
    """
    model, info = _from_pretrained(directory, nsp=nsp, local_files_only=Path(directory).is_dir())
    if missing := info["missing_keys"]:
        if any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
            sentence = f"{directory} lacks weights of its model, such as {min(missing)}; give a complete checkpoint"
            raise DatasetError(sentence, "weights-missing", given=str(directory))
        sentence = (
            f"{directory} has no head that predicts masked tokens ({min(missing)}), as after fine-tuning; give a "
            "checkpoint of pre-training"
        )
        raise DatasetError(sentence, "weights-missing", given=str(directory))
    return model


def load_complete(directory: Path) -> PreTrainedModel:
    """A checkpoint as `load` has it, with its head for next sentences if it has one."""
    model = load_model(directory)
    kind = family_of(model).next_sentence
    has_head = kind is not None and kind.__name__ in (model.config.architectures or ())
    return load_model(directory, nsp=True) if has_head else model


def start_from(
    spec: str, shards: Dataset, *, length: int, nsp: bool = False, frozen_by: str | None = None
) -> tuple[PreTrainedModel, list[str]]:
    """The model of a checkpoint directory or hub name, to continue training on some shards; and warnings.

    Raises UsageError if its vocabulary is not that of the shards, if rows do not fit, or if it lacks weights of the
    encoder. Heads that it lacks are initialised at random; a warning names them, and weights that are not used.
    frozen_by: the option that freezes the model; without its heads it raises UsageError then, as nothing trains them.
    """
    path = Path(spec)
    if path.is_file() and path.name == "config.json":
        path, spec = path.parent, str(path.parent)
    instead = "give a run, or a directory with config.json and weights"
    if path.is_file():
        raise UsageError(f"--init {spec} is a file; {instead}", "wrong-file-type", option="init", given=spec)
    if spec in PRESETS and not path.is_dir():
        sentence = f"--init {spec} is a preset of --model, which has no weights; {instead}, or --model {spec}"
        raise UsageError(sentence, "model-not-found", option="init", given=spec)
    local = path.is_dir() or not must_download(spec, "init", instead, _WEIGHTS)
    model, info = _from_pretrained(spec, nsp=nsp, local_files_only=local, option="init")
    check_fits(spec, shards, model)
    check_length(length, model.config, f"--init {spec}")
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if lacking := [name for name in needed_weights(model, missing) if name.startswith(f"{model.base_model_prefix}.")]:
        sentence = f"--init {spec} lacks weights of the encoder, such as {lacking[0]}; give a complete checkpoint"
        raise UsageError(sentence, "weights-missing", option="init", given=spec)
    if frozen_by and (lacking := needed_weights(model, missing)):
        sentence = (
            f"--init {spec} has no weights for {lacking[0]}, and {frozen_by} would not train them; train some steps "
            f"without {frozen_by} first"
        )
        raise UsageError(sentence, "weights-missing", option="init", given=spec)
    warnings = [f"--init {spec} has no weights for {', '.join(missing)}, which begin at random"] if missing else []
    if unexpected:
        warnings.append(f"--init {spec} has weights that are not used: {', '.join(unexpected)}")
    return model, warnings


def needed_weights(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Of names of weights, those that a pre-trained checkpoint must have: not of poolers and what nobody trains."""
    spare = tuple(f"{model.base_model_prefix}.{part}." for part in ("pooler", *family_of(model).untrained))
    return [name for name in names if not name.startswith(spare)]


def check_fits(directory: Path | str, shards: Dataset, model: PreTrainedModel) -> None:
    """Raises UsageError if a checkpoint was made with another tokenizer than the shards were."""
    path = Path(directory) / TOKENIZER
    stated = shards.manifest.tokenizer[TOKENIZER]
    same = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == stated
    if not same:
        try:
            own = load_tokenizer(str(directory)).files[TOKENIZER]  # as a build would write it
            same = give_same_ids(own, shards.tokenizer_file(TOKENIZER))
        except TokenizerError:
            if path.exists():  # and damaged
                raise
            same = True  # weights alone: only the vocabulary's size can be compared
    if not same:
        sentence = (
            f"the tokenizer of {directory} is not the one that {shards.path} was built with; use shards built with "
            f"--tokenizer {directory}"
        )
        raise UsageError(sentence, "tokenizer-differs", given=str(directory))
    if model.config.vocab_size < shards.special_tokens.vocab_size:
        sentence = (
            f"{directory} has a vocabulary of {model.config.vocab_size} tokens, and {shards.path} one of "
            f"{shards.special_tokens.vocab_size}; use shards built with the tokenizer of the model"
        )
        raise UsageError(sentence, "tokenizer-differs", given=str(directory))


def _from_pretrained(
    spec: Path | str, *, nsp: bool, local_files_only: bool, option: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model, and what transformers says about its loading. option: what it was given for, if that is known."""
    options: dict[str, Any] = {"local_files_only": local_files_only}
    more: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "adapter_kwargs": options}
    given = named(str(spec), option)
    try:
        config = AutoConfig.from_pretrained(spec, trust_remote_code=False, **options)
        check_is_encoder(config, str(spec), option)
        auto: Any = (nsp and family_of(config).next_sentence) or AutoModelForMaskedLM
        with _without_warnings():
            model, info = auto.from_pretrained(spec, dtype=torch.float32, **options, **more, **HARMLESS)
    except Exception as error:  # of transformers, for files of any bytes
        if isinstance(error, UsageError) or is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        sentence = (
            f"{given} holds no masked language model that transformers can load ({reason}); give another checkpoint"
        )
        raise DatasetError(sentence, "model-unreadable", option=option, given=str(spec)) from None
    if info["mismatched_keys"]:
        name, stored, wanted = min(info["mismatched_keys"])
        sentence = (
            f"{given} has {name} of shape {list(stored)}, and its config.json asks for {list(wanted)}; give a "
            "checkpoint whose files belong together"
        )
        raise DatasetError(sentence, "model-unreadable", option=option, given=str(spec))
    for tensor in (*model.parameters(), *model.buffers()):
        # A loaded tensor lies where it lay in the file. Matrix products round differently by alignment, and a resumed
        # run must give the same bits, so each gets memory of torch's allocator.
        tensor.data = tensor.data.clone()
    return freeze(model), info


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Keeps transformers from printing tables of weights that are missing or not used: `start_from` names them.

    `load` need not name the head for next sentences, which is not used where masked tokens alone are predicted.
    """
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


MISSPELT = 0.85  # how alike two names of settings are, by difflib, if one is probably the other
VOCABULARY_PADDING = 128  # a configuration may have fewer ids than this beyond the shards', for faster products
OF_FILES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Entries of a configuration that are not of the model."""


def new_model(
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


def model_identity(name: str) -> str:
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
