"""A trained model: of a checkpoint, or of the hub."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

from bertdata import Dataset
from bertdata.errors import DatasetError, TokenizerError, UsageError, is_out_of_memory
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.tokenize.tokenizer import TOKENIZER, give_same_ids
from bertrain.models.checks import check_is_encoder, check_length, spelled
from bertrain.models.families import PRESETS, family_of, freeze
from bertrain.models.hub import must_download

transformers.utils.logging.disable_progress_bar()  # the trainer shows its own

HARMLESS: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True, "attn_implementation": None}
"""Options of from_pretrained for models of strangers: none of their code, no pickle, and no kernel for attention from
the hub, which config.json can name.
"""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # a model of the hub has one of them


def load(directory: Path | str, *, nsp: bool = False) -> PreTrainedModel:
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
    model = load(directory)
    kind = family_of(model).next_sentence
    has_head = kind is not None and kind.__name__ in (model.config.architectures or ())
    return load(directory, nsp=True) if has_head else model


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
    if lacking := [name for name in needed(model, missing) if name.startswith(f"{model.base_model_prefix}.")]:
        sentence = f"--init {spec} lacks weights of the encoder, such as {lacking[0]}; give a complete checkpoint"
        raise UsageError(sentence, "weights-missing", option="init", given=spec)
    if frozen_by and (lacking := needed(model, missing)):
        sentence = (
            f"--init {spec} has no weights for {lacking[0]}, and {frozen_by} would not train them; train some steps "
            f"without {frozen_by} first"
        )
        raise UsageError(sentence, "weights-missing", option="init", given=spec)
    warnings = [f"--init {spec} has no weights for {', '.join(missing)}, which begin at random"] if missing else []
    if unexpected:
        warnings.append(f"--init {spec} has weights that are not used: {', '.join(unexpected)}")
    return model, warnings


def needed(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
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
    given = spelled(str(spec), option)
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
