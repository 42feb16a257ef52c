"""A model for a run: built from a preset or a configuration, or loaded from a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from bertdata import Dataset, SpecialTokens, key
from bertdata.errors import DatasetError, TokenizerError, UsageError
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.tokenize.tokenizer import TOKENIZER
from bertrain.models.families import DROPOUTS, FAMILIES, PRESETS, family_of, preset

transformers.utils.logging.disable_progress_bar()  # the trainer shows its own

SHORT = 512  # tokens of a row up to which bf16 attention on CPUs is faster as plain products than torch's kernel
HUB_TIMEOUT_S = 10


def build(name: str, special: SpecialTokens, *, length: int, seed: int, nsp: bool = False) -> PreTrainedModel:
    """A freshly initialised model for a vocabulary and rows of `length` tokens, the same on every rank.

    name: a preset, a transformers configuration (JSON), or a directory with a config.json. A configuration is used as
    it is, except for the vocabulary's size where it does not give one. nsp: with a head for next sentence prediction.
    Raises UsageError if the name is none of these, or the model is too small for the vocabulary or the length.
    """
    config = preset(name, special, length=length) if name in PRESETS else _read_config(name, special)
    if length > max_length(config):
        raise UsageError(f"--length {length} is more than the {max_length(config)} positions of --model {name}")
    family = family_of(config)
    if nsp and family.next_sentence is None:
        raise UsageError(
            f"--objective nsp needs a model with a head for next sentences, such as bert-base; --model {name} is a "
            f"{config.model_type}"
        )
    torch.manual_seed(key(seed, "init") >> 1)
    try:
        return family.next_sentence(config) if nsp and family.next_sentence else family.model(config)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise UsageError(f"--model {name} describes no model that can be built: {error}") from None


def _read_config(name: str, special: SpecialTokens) -> PreTrainedConfig:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f"--model {name} is neither a preset ({', '.join(PRESETS)}), nor a configuration file, nor a directory "
            "with a config.json"
        )
    try:
        values = json.loads(path.read_bytes())
        config = FAMILIES[values.get("model_type")].config(**{"vocab_size": special.vocab_size, **values})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(
            f"--model {name} is not a transformers configuration with model_type {' or '.join(FAMILIES)}: {error}"
        ) from None
    if config.vocab_size < special.vocab_size:
        raise UsageError(
            f"--model {name} has vocab_size {config.vocab_size}, and the shards hold ids up to {special.vocab_size - 1}"
        )
    return config


def load(directory: Path | str, *, nsp: bool = False) -> PreTrainedModel:
    """A checkpoint as transformers wrote it, in float32.

    Raises DatasetError if the checkpoint is not whole, UsageError if it belongs to no family in FAMILIES.
    """
    model, info = _from_pretrained(directory, nsp=nsp, local_files_only=True)
    family_of(model)
    if missing := info["missing_keys"]:
        raise DatasetError(f"{directory} lacks {len(missing)} weights, such as {min(missing)}")
    return model


def start_from(spec: str, shards: Dataset, *, length: int, nsp: bool = False) -> tuple[PreTrainedModel, list[str]]:
    """The model of a checkpoint directory or hub name, to continue training on some shards; and warnings.

    Raises UsageError if its vocabulary is not that of the shards, if rows do not fit, or if it lacks weights of the
    encoder. Heads that it lacks are initialised at random; a warning names them, and weights that are not used.
    """
    local = Path(spec).is_dir()
    if not local and (spec.startswith((".", "/", "~")) or spec.count("/") > 1):
        raise UsageError(f"--init {spec} is no directory; give one with config.json and weights, or a hub name")
    local = local or not _must_download(spec)
    model, info = _from_pretrained(spec, nsp=nsp, local_files_only=local)
    family_of(model)
    check_fits(spec, shards, model)
    if length > max_length(model.config):
        raise UsageError(f"--length {length} is more than the {max_length(model.config)} positions of --init {spec}")
    encoder, pooler = f"{model.base_model_prefix}.", f"{model.base_model_prefix}.pooler."
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if lacking := [name for name in missing if name.startswith(encoder) and not name.startswith(pooler)]:
        raise UsageError(f"--init {spec} lacks {len(lacking)} weights of the encoder, such as {lacking[0]}")
    warnings = [f"--init {spec} has no weights for {', '.join(missing)}, which begin at random"] if missing else []
    if unexpected:
        warnings.append(f"--init {spec} has weights that are not used: {', '.join(unexpected)}")
    return model, warnings


def _must_download(name: str) -> bool:
    """Whether a model of the hub is not on this machine yet. Asks the hub once, and not for long.

    Raises UsageError if the hub does not answer or does not have it.
    """
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return False
    try:
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # of the network, of the hub, or of the name
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"--init {name} is no directory here, and {hub} does not give it ({reason}); give a directory with "
            "config.json and weights, or connect to the hub"
        ) from None
    return True


def _from_pretrained(spec: Path | str, *, nsp: bool, local_files_only: bool) -> tuple[PreTrainedModel, dict[str, Any]]:
    options: dict[str, Any] = {"local_files_only": local_files_only, "trust_remote_code": False}
    try:
        auto: Any = AutoModelForMaskedLM
        if nsp:
            auto = family_of(transformers.AutoConfig.from_pretrained(spec, **options)).next_sentence or auto
        model, info = auto.from_pretrained(spec, dtype=torch.float32, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, UsageError):
            raise
        reason = str(error).partition("\n")[0]
        raise DatasetError(f"{spec} holds no masked language model that transformers can load: {reason}") from None
    for tensor in (*model.parameters(), *model.buffers()):
        # A loaded tensor lies where it lay in the file. Matrix products round differently by alignment, and a resumed
        # run must give the same bits, so each gets memory of torch's allocator.
        tensor.data = tensor.data.clone()
    return model, info


def max_length(config: PreTrainedConfig) -> int:
    """The longest row, in tokens, that a model has positions for."""
    return family_of(config).max_length(config)


def check_fits(directory: Path | str, shards: Dataset, model: PreTrainedModel) -> None:
    """Raises UsageError if a checkpoint was made with another tokenizer than the shards were."""
    stated = shards.manifest.tokenizer[TOKENIZER]
    own = Path(directory) / TOKENIZER
    same = own.is_file() and hashlib.sha256(own.read_bytes()).hexdigest() == stated
    if not same:
        try:
            written = load_tokenizer(str(directory)).files[TOKENIZER]  # as a build would write it
        except TokenizerError:  # weights alone: only the vocabulary's size can be compared
            written = None
        same = written is None or hashlib.sha256(written).hexdigest() == stated
    if not same:
        raise UsageError(
            f"the tokenizer of {directory} is not the one that {shards.path} was built with (SHA-256 {stated[:16]}…); "
            f"use shards built with --tokenizer {directory}"
        )
    if model.config.vocab_size < shards.special_tokens.vocab_size:
        raise UsageError(
            f"{directory} has a vocabulary of {model.config.vocab_size}, and {shards.path} one of "
            f"{shards.special_tokens.vocab_size}"
        )


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of the weights in hex: of each tensor, by name, its name, shape and float32 bytes. About 1 GB/s."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def choose_attention(model: PreTrainedModel, *, bf16: bool, on_gpu: bool, length: int) -> None:
    """Sets plain products where they are faster than torch's kernel: bf16 on CPUs, rows of at most 512 tokens."""
    if bf16 and not on_gpu and length <= SHORT:
        model.set_attn_implementation("eager")


def has_dropout(model: PreTrainedModel) -> bool:
    return any(getattr(model.config, name, 0.0) for name in DROPOUTS)


def recompute_activations(model: PreTrainedModel) -> None:
    """Layers keep no activations and compute them again in the backward pass (Chen et al., 2016)."""
    model.config.use_cache = False  # of a decoder; transformers would warn in each call, which no compiler takes
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
