"""transformers' masked language models, from a preset, a config file or a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
)

from bertdata import Dataset, SpecialTokens, key
from bertdata.errors import DatasetError, TokenizerError, UsageError
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.tokenize.tokenizer import TOKENIZER

transformers.utils.logging.disable_progress_bar()  # one bar is enough

_BERT = {  # layers, width; Turc et al., 2019, and Devlin et al., 2019
    "bert-tiny": (2, 128),
    "bert-mini": (4, 256),
    "bert-small": (4, 512),
    "bert-base": (12, 768),
    "bert-large": (24, 1024),
}
_MODERN = {  # layers, width, feed-forward width; base is Warner et al., 2024
    "modernbert-tiny": (2, 128, 256),
    "modernbert-small": (6, 384, 576),
    "modernbert-base": (22, 768, 1152),
}
PRESETS = (*_BERT, *_MODERN)
SHORT = 512  # tokens of a row up to which attention in bf16 is faster on CPUs as plain products: its kernel's backward
_CLASSES = {"bert": (BertConfig, BertForMaskedLM), "modernbert": (ModernBertConfig, ModernBertForMaskedLM)}
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "embedding_dropout",
    "mlp_dropout",
    "attention_dropout",
)


def build(name: str, special: SpecialTokens, *, length: int, seed: int, nsp: bool = False) -> PreTrainedModel:
    """A freshly initialised model for a vocabulary and row length, the same on every rank.

    name: a preset (without dropout), or a JSON config file of a BERT or ModernBERT, which is taken as it is but for the
    vocabulary. nsp: with a head for next sentence prediction, which only BERT has. Raises UsageError if it is neither,
    or too small for the vocabulary or the length.
    """
    if name in _BERT:
        layers, width = _BERT[name]
        config: Any = BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            max_position_embeddings=max(512, length),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **_vocabulary(special),
        )
    elif name in _MODERN:
        layers, width, feed_forward = _MODERN[name]
        small = name != "modernbert-base"  # every layer sees the whole row, which is shorter than a local window
        config = ModernBertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=width // 64,
            intermediate_size=feed_forward,
            max_position_embeddings=max(8192, length),
            layer_types=["full_attention"] * layers if small else None,
            cls_token_id=special.cls,
            sep_token_id=special.sep,
            classifier_pooling="mean",  # as its authors' checkpoints have it: masked words do not train [CLS]
            **_vocabulary(special),
        )
    else:
        config = _from_file(name, special)
    if length > config.max_position_embeddings:
        raise UsageError(f"--length {length} is more than the {config.max_position_embeddings} places of model {name}")
    if nsp and config.model_type != "bert":
        raise UsageError(f"--objective mlm+nsp needs a BERT, and --model {name} is a {config.model_type}")
    torch.manual_seed(key(seed, "init") >> 1)
    try:
        return BertForPreTraining(config) if nsp else _CLASSES[config.model_type][1](config)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise UsageError(f"--model {name} describes no model that can be built: {error}") from None


def _vocabulary(special: SpecialTokens) -> dict[str, Any]:
    ids = {"pad_token_id": special.pad, "bos_token_id": special.bos, "eos_token_id": special.eos}
    return {"vocab_size": special.vocab_size} | ids


def _from_file(name: str, special: SpecialTokens) -> Any:
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"--model {name} is neither a config file nor a preset ({', '.join(PRESETS)})")
    try:
        values = json.loads(path.read_bytes())
        config = _CLASSES[values.get("model_type")][0](**{"vocab_size": special.vocab_size, **values})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(
            f"--model {name} is not a transformers config of model_type bert or modernbert: {error}"
        ) from None
    if config.vocab_size < special.vocab_size:
        raise UsageError(
            f"--model {name} has vocab_size {config.vocab_size}, and the shards hold ids up to {special.vocab_size - 1}"
        )
    return config


def load(directory: Path | str, *, nsp: bool = False) -> PreTrainedModel:
    """A checkpoint as transformers wrote it, in float32. Raises DatasetError if it is not whole, or of another kind."""
    model, info = _loaded(directory, nsp=nsp, local_files_only=True)
    if model.config.model_type not in _CLASSES:
        raise DatasetError(f"{directory} is a {model.config.model_type}; only bert and modernbert are known here")
    if info["missing_keys"]:
        raise DatasetError(
            f"{directory} lacks {len(info['missing_keys'])} weights, such as {min(info['missing_keys'])}"
        )
    return model


def start_from(spec: str, shards: Dataset, *, length: int, nsp: bool = False) -> tuple[PreTrainedModel, list[str]]:
    """The model of a checkpoint directory or hub name, to go on training on some shards; and what to warn of.

    Raises UsageError if its vocabulary is not that of the shards, if rows do not fit, or if it lacks weights of the
    encoder. Heads that are missing begin at random, and are named, as are weights that are not used.
    """
    local = Path(spec).is_dir()
    if not local and (spec.startswith((".", "/", "~")) or spec.count("/") > 1):
        raise UsageError(f"--init {spec} is no directory; give one with config.json and weights, or a hub name")
    model, info = _loaded(spec, nsp=nsp, local_files_only=local)
    if model.config.model_type not in _CLASSES:
        raise UsageError(f"--init {spec} is a {model.config.model_type}; only bert and modernbert are trained here")
    check_fits(spec, shards, model)
    if length > model.config.max_position_embeddings:
        raise UsageError(f"--length {length} is more than the {model.config.max_position_embeddings} places of {spec}")
    heads = ("cls.", "head.", "decoder.", f"{model.base_model_prefix}.pooler.")
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if lacking := [name for name in missing if not name.startswith(heads)]:
        raise UsageError(f"--init {spec} lacks {len(lacking)} weights of the encoder, such as {lacking[0]}")
    warnings = [f"--init {spec} has no weights for {', '.join(missing)}, which begin at random"] if missing else []
    if unexpected:
        warnings.append(f"--init {spec} has weights that are not used: {', '.join(unexpected)}")
    return model, warnings


def _loaded(spec: Path | str, *, nsp: bool, local_files_only: bool) -> tuple[PreTrainedModel, dict[str, Any]]:
    of: Any = BertForPreTraining if nsp else AutoModelForMaskedLM
    options = {"dtype": torch.float32, "local_files_only": local_files_only, "output_loading_info": True}
    options["trust_remote_code"] = False
    try:
        model, info = of.from_pretrained(spec, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise DatasetError(f"{spec} holds no masked language model that transformers can load: {reason}") from None
    for tensor in (*model.parameters(), *model.buffers()):
        # Loaded tensors lie where they lay in the file. Matrix products round differently by alignment, and a resumed
        # run is to give the same bits.
        tensor.data = tensor.data.clone()
    return model, info


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of the weights, in hex: of each in order of name, its name, shape and float32 bytes. About 1 GB/s."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name}{list(tensor.shape)}".encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def choose_attention(model: PreTrainedModel, *, bf16: bool, on_gpu: bool, length: int) -> None:
    """Plain products where they are faster than the library's kernel: bf16 on CPUs, rows of at most 512 tokens."""
    if bf16 and not on_gpu and length <= SHORT:
        model.set_attn_implementation("eager")


def has_dropout(model: PreTrainedModel) -> bool:
    return any(getattr(model.config, name, 0.0) for name in DROPOUTS)


def keep_few_activations(model: PreTrainedModel) -> None:
    """Layers compute their activations anew in the backward pass (Chen et al., 2016)."""
    model.config.use_cache = False  # of a decoder; transformers would warn in each call, which no compiler takes
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


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
            f"the tokenizer of {directory} is not the one {shards.path} was built with (SHA-256 {stated[:16]}…); use "
            f"shards built with --tokenizer {directory}"
        )
    if model.config.vocab_size < shards.special_tokens.vocab_size:
        raise UsageError(
            f"{directory} has a vocabulary of {model.config.vocab_size}, and {shards.path} one of "
            f"{shards.special_tokens.vocab_size}"
        )
