"""Build a model with random weights from a preset or a configuration, or load one from a checkpoint or the hub."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from bertdata import BertdataError, Dataset, SpecialTokens, key
from bertdata.support import (
    ROLE_SPELLINGS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    LoadedTokenizer,
    TokenizerError,
    UsageError,
    give_same_ids,
    is_out_of_memory,
    lacks_template,
    load_tokenizer,
)
from bertrain.models.encoder import Encoder
from bertrain.models.families import PRESETS, auto_class, family_of, first_position, freeze, has_token_types, preset

HUB_TIMEOUT_S = 10
COMPARED = 8  # row length in tokens for comparing a family's head with the model's own forward pass
TRIED = 64  # row length in tokens for testing a model whose attention supports any length
UNBOUNDED = 1 << 20  # longest row in tokens of a model without a limit in its configuration
MISSPELT = 0.85  # similarity (difflib) from which a setting is probably misspelt
VOCABULARY_PADDING = 128  # limit of unused ids in a vocabulary, which make matrix products faster
OF_FILES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Entries of a configuration that are unrelated to the model."""
HARMLESS: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True, "attn_implementation": None}
"""Options of from_pretrained for untrusted models: no code, no pickle, and no attention kernel from the hub, which
config.json can name."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # a model on the hub has one of these files

transformers.utils.logging.disable_progress_bar()  # the trainer reports progress itself
transformers.utils.logging.set_verbosity_error()  # missing and unused weights are reported here


@contextlib.contextmanager
def refusing(name: str, option: str | None, expected: str) -> Iterator[None]:
    """Turn any exception of transformers into an error that names the model."""
    try:
        yield
    except Exception as error:  # transformers raises many types for damaged files
        if isinstance(error, BertdataError) or is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        reason = f"transformers does not know {reason}" if isinstance(error, KeyError) else reason
        given = f"--{option} {name}" if option else name
        sentence = f"{given} is not {expected}: {reason}; correct it, or give a different one"
        raise UsageError(sentence, "model-unreadable", option=option, given=name) from None


# ------------------------------------------------------------------------------------------------------------- the hub


def must_download(name: str, option: str, files: Iterable[str], instead: str) -> bool:
    """Return whether the local cache has none of these files of a model on the hub.

    Queries the hub once, for at most HUB_TIMEOUT_S: transformers would try for 20 seconds. Raises UsageError if the hub
    has no such model. instead: what else the option accepts.
    """
    try:
        if any(isinstance(huggingface_hub.try_to_load_from_cache(name, file), str) for file in files):
            return False
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # from the hub or the network, or for an invalid name
        reason = str(error).partition("\n")[0] or type(error).__name__
        sentence = (
            f"--{option} {name} does not exist here, and {huggingface_hub.constants.ENDPOINT} does not give it "
            f"({reason}); give {instead}, or set HF_TOKEN for a private model"
        )
        raise UsageError(sentence, "model-not-found", option=option, given=name) from None
    return True


# -------------------------------------------------------------------------------------------------------------- checks


def max_length(config: PreTrainedConfig) -> int:
    """Return the longest row in tokens that a model's positions allow."""
    return getattr(config, "max_position_embeddings", UNBOUNDED) - first_position(config)


def check_length(length: int, config: PreTrainedConfig, named: object) -> None:
    """Raise UsageError for rows that are longer than a model supports. named: the model's name in the message."""
    if length > (most := max_length(config)):
        sentence = f"--length {length} is more than the {most} positions of {named}; give at most {most}"
        raise UsageError(sentence, "too-long", option="length", given=length)


def check_runs(model: PreTrainedModel, *, length: int) -> list[str]:
    """Run a model on one row, and compare its family's head with it. Return a warning for a family outside FAMILIES.

    Raises UsageError if the model does not turn token ids into logits of the vocabulary, or if the head returns other
    logits. The row has `length` tokens, or TRIED if the family supports packed documents and so any length.
    """
    family, config, was_training = family_of(model), model.config, model.training
    ids = torch.arange(min(length, TRIED) if family.isolation else length)[None] % config.vocab_size
    with torch.no_grad(), refusing(config.model_type, None, "a model that predicts tokens from token ids"):
        logits = model.eval()(input_ids=ids).logits
        if logits.shape != (*ids.shape, config.vocab_size):
            raise ValueError(f"{ids.numel()} ids give logits of shape {list(logits.shape)}")
        compared = Encoder(model).logits(input_ids=ids, masked_positions=torch.arange(ids.numel())[None, :COMPARED])
        if not torch.allclose(compared, logits[:, :COMPARED], rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ValueError("the head in FAMILIES gives different logits than the model (docs/extending.md)")
        ids[0, 1] += 1
        if family.decoder and torch.equal(model(input_ids=ids).logits[:, 0], logits[:, 0]):
            raise ValueError(f"transformers {transformers.__version__} does not let it attend to both sides")
    model.train(was_training)
    unlisted = f"{config.model_type} is not in the table of families: training is slower (docs/models.md)"
    return [unlisted] if family.dense else []


def check_fits(directory: Path | str, shards: Dataset, model: PreTrainedModel) -> None:
    """Raise UsageError if a checkpoint has a different tokenizer than the shards, or if its vocabulary is too small."""
    path = Path(directory) / TOKENIZER
    stated = shards.manifest.tokenizer[TOKENIZER]
    same = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == stated
    if not same:
        try:
            own = load_tokenizer(str(directory)).files[TOKENIZER]  # in the form that a build writes
            same = give_same_ids(own, shards.tokenizer_file(TOKENIZER))
        except TokenizerError:
            if path.exists():  # a damaged file
                raise
            same = True  # without a tokenizer, only the sizes of the vocabularies can be compared
    if not same or model.config.vocab_size < shards.special_tokens.vocab_size:
        sentence = (
            f"{directory} has a different tokenizer, or a smaller vocabulary, than {shards.path}; use shards built "
            f"with --tokenizer {directory}, and for missing tokens with --roles, not --special-tokens"
        )
        raise UsageError(sentence, "tokenizer-differs", given=str(directory))


def as_encoder(config: PreTrainedConfig) -> bool:
    """Let a decoder attend to both sides, through its configuration. Return whether its attention was causal.

    Raises ValueError for a model that cannot be used as an encoder that predicts masked tokens.
    """
    if family_of(config).decoder:
        config.use_cache = False
        was_causal = getattr(config, "is_causal", not getattr(config, "use_bidirectional_attention", False))
        if was_causal:  # only then: windows of Gemma 3 with use_bidirectional_attention would change
            config.is_causal = False
        return was_causal
    is_decoder = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    if is_decoder or type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        sentence = f"a {config.model_type} is neither an encoder that predicts masked tokens, such as a bert,"
        raise ValueError(f"{sentence} nor one of the decoders of docs/models.md")
    return False


# ------------------------------------------------------------------------------------------------------ trained models


def load_model(directory: Path | str, *, nsp: bool | None = False) -> PreTrainedModel:
    """Load a complete checkpoint of transformers, or a model on the hub, in float32.

    nsp: with the head for next sentences; None: if the checkpoint has one. Prints a warning for a decoder that was
    never trained with attention to both sides. Raises UsageError if transformers cannot load it, if it is not a masked
    language model, or if weights are missing.
    """
    local = Path(directory).is_dir()
    model, info = _from_pretrained(str(directory), nsp=nsp, complete=True, local_files_only=local)
    if info["was_causal"]:
        click.echo(f"warning: {directory} is a decoder that was not trained to attend to both sides, as here", err=True)
    return model


def start_from(
    spec: str, shards: Dataset, *, length: int, nsp: bool = False, complete: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Load a checkpoint directory or a model on the hub for training on shards. Return the model and warnings.

    Missing heads get random weights, with a warning. Raises UsageError if the vocabulary is not that of the shards, if
    rows are too long, or if weights of the encoder are missing; with `complete`, also if weights of heads are missing.
    """
    local = Path(spec).is_dir() or not must_download(spec, "init", _WEIGHTS, "a run, or a directory with weights")
    model, info = _from_pretrained(spec, nsp=nsp, complete=complete, local_files_only=local, option="init")
    check_fits(spec, shards, model)
    if family_of(model).decoder:  # often missing; only heads for tasks need it
        embeddings: Any = model.get_input_embeddings()
        model.config.pad_token_id = embeddings.padding_idx = shards.special_tokens.pad
    check_length(length, model.config, f"--init {spec}")
    missing, unexpected = (", ".join(sorted(info[name])) for name in ("missing_keys", "unexpected_keys"))
    warnings = [f"--init {spec} has no weights for {missing}, which start at random"] if missing else []
    if unexpected:
        warnings.append(f"--init {spec} has weights that are not used: {unexpected}")
    return model, warnings


def needed_weights(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the names of weights that an encoder must have. The pooler and weights that never train are optional."""
    encoder = f"{model.base_model_prefix}."
    spare = tuple(f"{encoder}{part}." for part in ("pooler", *family_of(model).untrained))
    return [name for name in names if name.startswith(encoder) and not name.startswith(spare)]


def _from_pretrained(
    spec: str, *, nsp: bool | None, complete: bool, local_files_only: bool, option: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model, transformers' loading info, and the result of `as_encoder`.

    option: the option that named the model; others: see `load_model`.
    """
    options: dict[str, Any] = {"local_files_only": local_files_only}
    more: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "adapter_kwargs": options}
    with refusing(spec, option, "a masked language model that transformers can load"):
        config = AutoConfig.from_pretrained(spec, trust_remote_code=False, **options)
        was_causal = as_encoder(config)
        kind: Any = family_of(config).next_sentence
        has_nsp = kind and (kind.__name__ in (config.architectures or ()) if nsp is None else nsp)
        auto: Any = kind if has_nsp else auto_class(config)
        model, info = auto.from_pretrained(spec, config=config, dtype=torch.float32, **options, **more, **HARMLESS)
        if info["mismatched_keys"]:
            name, stored, wanted = min(info["mismatched_keys"])
            raise ValueError(f"{name} has shape {list(stored)}, but config.json says {list(wanted)}")
    missing = sorted(info["missing_keys"])
    if needed := missing if complete else needed_weights(model, missing):
        given = f"--{option} {spec}" if option else spec
        sentence = f"{given} has no weights for {needed[0]}; give a complete checkpoint"
        raise UsageError(sentence, "weights-missing", option=option, given=spec)
    for tensor in (*model.parameters(), *model.buffers()):
        # The alignment of a loaded tensor depends on the file, and matrix products round differently by alignment. A
        # resumed run must be bitwise identical, so each tensor is copied to memory of torch's allocator.
        tensor.data = tensor.data.clone()
    return freeze(model), info | {"was_causal": was_causal}


# ---------------------------------------------------------------------------------------------------------- new models


def new_model(
    name: str,
    special: SpecialTokens,
    *,
    length: int,
    seed: int,
    nsp: bool = False,
    configure: Callable[[PreTrainedConfig], None] = lambda config: None,
) -> tuple[PreTrainedModel, list[str]]:
    """Return a model with random weights, the same on every rank, and warnings.

    name: a preset, a configuration (JSON), a directory with a config.json, or a model on the hub. The configuration is
    changed to fit the vocabulary and rows of `length` tokens, with a warning. nsp: with a head for next sentences.
    configure: changes the configuration before the model is built. Raises UsageError for an invalid name.
    """
    warnings: list[str] = []
    if name in PRESETS:
        config = preset(name, special, length=length)
    else:
        config, values = _read_config(name)
        config._attn_implementation = None  # noqa: SLF001  (see HARMLESS)
        warnings += [f"--model {name}: {question}" for question in _misspelt(config, values)]
        if changes := _fit(config, values, special, length=length, nsp=nsp, name=name):
            warnings.append(f"--model {name} is changed to fit the data: {', '.join(changes)}")
    family = family_of(config)
    if nsp and family.next_sentence is None:
        sentence = f"--objective nsp does not support a {config.model_type}; give --model bert-base, for example"
        raise UsageError(sentence, "unsupported", option="objective", given="nsp")
    configure(config)
    torch.manual_seed(key(seed, "init") >> 1)
    with refusing(name, "model", "a model that transformers can build"):
        if nsp and family.next_sentence:
            return family.next_sentence(config), warnings
        return freeze(auto_class(config).from_config(config, dtype=torch.float32)), warnings


def model_identity(name: str) -> str:
    """Return the digest of the configuration that --model or --init names, or the name of a preset or hub model.

    Raises UsageError for a file that cannot be read.
    """
    path = _config_file(name)
    if name in PRESETS or not path.is_file():
        return name
    with refusing(name, None, "a configuration of transformers"):
        content = {key: value for key, value in json.loads(path.read_bytes()).items() if key not in OF_FILES}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"a configuration of SHA-256 {digest[:16]}"


def _config_file(name: str) -> Path:
    path = Path(name)
    return path / "config.json" if path.is_dir() else path


def _read_config(name: str) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return a configuration object and the values in its file."""
    path = _config_file(name)
    with refusing(name, "model", "a configuration of a masked language model"):
        if path.is_file():
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict) or values.get("model_type") not in transformers.CONFIG_MAPPING:
                raise ValueError("it has no model_type that transformers knows")
            config = AutoConfig.for_model(**values)
        else:
            instead = f"a preset ({', '.join(PRESETS)}), a configuration file, or a directory with a config.json"
            local = not must_download(name, "model", ["config.json"], instead)
            config = AutoConfig.from_pretrained(name, local_files_only=local, trust_remote_code=False)
            values = config.to_dict()
        as_encoder(config)
    return config, values


def _misspelt(config: PreTrainedConfig, values: dict[str, Any]) -> list[str]:
    """Return a question for each probably misspelt setting in a file, because transformers accepts any name."""
    usual = type(config)()
    known = {*usual.to_dict(), *config.attribute_map} - values.keys()
    unknown = [name for name in values if not hasattr(usual, name)]
    pairs = [(name, near) for name in unknown for near in difflib.get_close_matches(name, known, 1, MISSPELT)]
    return [f"{name} is not a setting of a {config.model_type}; is {near} meant?" for name, near in pairs]


def _fit(
    config: PreTrainedConfig, values: dict[str, Any], special: SpecialTokens, *, length: int, nsp: bool, name: str
) -> list[str]:
    """Set the vocabulary size, special ids and positions of a configuration. Return the changes to `values`."""
    changes = []

    def change(setting: str, value: int | None) -> None:
        if setting in values and values[setting] != value:
            changes.append(f"{setting} {values[setting]} → {value}")
        setattr(config, setting, value)

    family = family_of(config)
    if (family.positions_after_padding and special.pad is None) or family.padding_id not in (None, special.pad):
        needed = "a padding token" if family.padding_id is None else f"the padding id {family.padding_id}"
        sentence = (
            f"--model {name}, a {config.model_type}, needs {needed}, but the shards have {special.pad} as padding id; "
            "give a different model, or shards of a different tokenizer"
        )
        raise UsageError(sentence, "unsupported", option="model", given=name)
    size = config.attribute_map.get("vocab_size", "vocab_size")
    is_padded = size in values and special.vocab_size <= config.vocab_size < special.vocab_size + VOCABULARY_PADDING
    if not is_padded:
        change(size, special.vocab_size)
    roles = special.roles()
    unset: dict[str, int | None] = dict.fromkeys(("pad", "cls", "sep", "mask", "unk"))
    ids = {"bos": roles.get("cls"), "eos": roles.get("sep"), **unset, **roles}
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


def tokenizer_files(file_of: Callable[[str], bytes], model: PreTrainedModel, max_length: int) -> dict[str, bytes]:
    """Return the tokenizer files of a checkpoint. file_of: file name → content.

    tokenizer_config.json gets the model's length, so that truncation=True cuts text to the rows of the model, and the
    model's inputs: token_type_ids only if the model uses them. If tokenizer.json adds no [CLS] and [SEP], as in older
    datasets, the file that is returned adds them.
    """
    config = json.loads(file_of(TOKENIZER_CONFIG)) | {"model_max_length": max_length}
    config["model_input_names"] = ["input_ids", *(["token_type_ids"] * has_token_types(model)), "attention_mask"]
    content = json.dumps(config, ensure_ascii=False, indent=1).encode() + b"\n"
    tokenizer = file_of(TOKENIZER)
    roles = {role: config[f"{role}_token"] for role in ROLE_SPELLINGS if f"{role}_token" in config}
    if lacks_template(json.loads(tokenizer), roles):
        tokenizer = LoadedTokenizer(tokenizer.decode(), roles).files[TOKENIZER]
    return {TOKENIZER: tokenizer, TOKENIZER_CONFIG: content}
