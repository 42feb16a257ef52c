"""A checkpoint with a head for a task, and its tokenizer: loading, with an error message if they do not fit."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from bertdata.support import UsageError
from bertrain.commands.reading import plain_tokenizer
from bertrain.lab.tasks import Task
from bertrain.lab.transplant import growing
from bertrain.models.encoder import PLACES
from bertrain.models.families import family_of
from bertrain.models.load import HARMLESS, as_encoder, check_length, max_length, must_download, needed_weights, refusing
from bertrain.speed import has_bf16

LENGTH = 128  # default row length in tokens
ROWS = 64  # largest number of rows in a batch for evaluation
_DROPOUT = re.compile(
    r"((attention|classifier|cls|embedding|mlp|qa|seq_classif|summary_(fir|la)st)_)?dropout"
    r"|(attention_probs|classifier|hidden)_dropout_prob|(embd|resid)_pdrop"
)
"""The names of dropout probabilities of encoders and classification heads, in configurations of all families."""


class Reader(NamedTuple):
    """A model with a head for a task, and its tokenizer."""

    model: Any
    tokenizer: Any
    task: Task
    order: list[int] | slice = slice(None)  # index of the model's logit for each label of the task

    def logits(self, rows: Sequence[dict[str, list[int]]]) -> torch.Tensor:
        """Return the logits of rows, as one batch."""
        inputs = self.tokenizer.pad(rows, return_tensors="pt").to(self.model.device, non_blocking=True)
        return self.task.logits(self.model(**inputs))[..., self.order]

    def all_logits(self, rows: Sequence[dict[str, list[int]]]) -> Iterator[torch.Tensor]:
        """Yield the logits of any number of rows, batch by batch. Batches are smaller if the longest row is long."""
        longest = max((len(row["input_ids"]) for row in rows), default=1)
        size = max(1, min(ROWS, PLACES // longest))
        for first in range(0, len(rows), size):
            yield self.logits(rows[first : first + size])


def load(directory: str, task: Task, *, from_scratch: bool, dropout: float = 0.0) -> PreTrainedModel:
    """Return the model with a head for the task.

    If the checkpoint has a head for the same labels, it is kept, with their order; a head for other labels is replaced
    by a new one. Raises UsageError if weights other than those of heads are missing.
    """
    config = _config(directory)
    is_same = task.keeps(_labels(directory, task))
    settings = task.config() | {name: dropout for name in dir(config) if _DROPOUT.fullmatch(name)}
    model, missing = _with_head(directory, task, "checkpoint", ignore_mismatched_sizes=True, **settings)
    if lacking := needed_weights(model, missing):
        sentence = f"--checkpoint {directory} has no weights for {lacking[0]}; give a complete checkpoint"
        raise UsageError(sentence, "weights-missing", option="checkpoint", given=directory)
    if from_scratch:
        return task.head.from_config(copy.deepcopy(model.config))
    if is_same or not all(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        return model
    of_labels, name = growing(model, "num_labels"), model.name_or_path  # a complete head for other labels
    weights = {key: weight for key, weight in model.state_dict().items() if key not in of_labels}
    model = type(model).from_pretrained(None, config=model.config, state_dict=weights, trust_remote_code=False)
    model.name_or_path = name
    return model


def _labels(directory: str, task: Task) -> list[str]:
    """Return the labels of a checkpoint's head for this kind of task, in order; empty if there is no such head.

    The class of the model, such as BertForTokenClassification, shows the kind of its head; without it, the weights do.
    """
    config, kind = _config(directory), task.head.__name__.removeprefix("AutoModel")
    if config.architectures:
        has_head = any(kind in name for name in config.architectures)
    else:
        model, missing = _with_head(directory, task, "checkpoint", ignore_mismatched_sizes=True)
        has_head = all(name.startswith(f"{model.base_model_prefix}.") for name in missing)
    return [name for _, name in sorted(config.id2label.items())] if has_head else []  # a file has them in any order


def take_order(directory: str, task: Task) -> list[str]:
    """Set the order of a task's labels to that of a checkpoint. Return lines about a new head and a decoder."""
    config, known, lines = _config(directory), _labels(directory, task), []
    if known and not task.keeps(known):
        lines = [f"{directory} has a head for other labels, such as {known[0]}; a new head replaces it"]
    if family_of(config).decoder and as_encoder(config):
        lines.append(f"warning: {directory} is a decoder: tokens attend to the left only; pretrain --init adapts it")
    return lines


def ends_warning(directory: str) -> list[str]:
    """Return a warning if the tokenizer of a checkpoint adds no special tokens to texts."""
    tokenizer = tokenizer_of(directory)
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    is_plain = cls and sep and not tokenizer.num_special_tokens_to_add(pair=True)
    effect = f"puts no {cls} and {sep} around texts, so the two texts of a pair run together"
    return [f"warning: the tokenizer.json of {directory} {effect}; add a TemplateProcessing to it"] * bool(is_plain)


def _with_head(directory: str, task: Task, option: str, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """Return a model with a head for a task, and its missing or mismatched weights. option: names the checkpoint."""
    config, has_head = _config(directory, option), f"a model with an {task.head.__name__} in transformers"
    with refusing(directory, option, has_head):
        kind = task.head._model_mapping.get(type(config), None)  # noqa: SLF001
        if kind is None or (family_of(config).decoder and kind.base_model_prefix != "model"):
            raise ValueError(f"{config.model_type} has no such head")  # or a class that reads only its own checkpoints
    with refusing(directory, option, "a model that transformers can load"):
        options |= HARMLESS
        model, info = task.head.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **options)
        return model, sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})


def _config(directory: str, option: str = "checkpoint") -> Any:
    """Return the configuration of a checkpoint. option: names it in the UsageError if it cannot be read."""
    if not Path(directory).is_dir():
        must_download(directory, option, ["config.json"], "a run or a checkpoint")
    with refusing(directory, option, "a model that transformers can load"):
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def length_of(directory: str, length: int | None) -> int:
    """Return the row length: the given one, else LENGTH, or the model's number of positions if this is smaller.

    Raises UsageError if the given length is above the model's number of positions.
    """
    check_length(length or 0, config := _config(directory), directory)
    return length or min(LENGTH, max_length(config))


def is_bf16(model: PreTrainedModel, precision: str, device: torch.device) -> bool:
    """Return whether matrix products are in bfloat16. Some families compute only in fp32."""
    can = device.type == "cuda" and has_bf16(device) if precision == "auto" else precision == "bf16"
    return can and family_of(model).half


def tokenizer_of(directory: str, option: str = "checkpoint") -> Any:
    """Return the tokenizer of a checkpoint that an option names. Raises UsageError if it cannot be read or cannot pad.

    Rows of different lengths need its padding token.
    """
    with refusing(directory, option, "a directory with a tokenizer that transformers can load"):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        sentence = f"--{option} {directory} has a tokenizer without a padding token; add one to tokenizer_config.json"
        raise UsageError(sentence, "tokenizer-lacks-token", option=option, given=directory)
    return tokenizer


def tokenizer_files(directory: str, tokenizer: Any) -> dict[str, bytes]:
    """Return the tokenizer files of a checkpoint, as changed by `plain_tokenizer`."""
    more = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    names = {*tokenizer.vocab_files_names.values(), *more}
    paths = {name: cached_file(directory, name, _raise_exceptions_for_missing_entries=False) for name in names}
    return plain_tokenizer({name: Path(path).read_bytes() for name, path in paths.items() if path})


def teacher(directory: str, task: Task, name: str) -> Reader:
    """Load a fine-tuned model whose predictions become labels. Raises UsageError if it was trained for another task.

    name: the name of the task.
    """
    model, missing = _with_head(directory, task, "teacher")
    known, several = [name for _, name in sorted((model.config.id2label or {}).items())], "multi_label_classification"
    wanted = task.names or known[: task.num_labels]  # the label of a regression may have any name
    is_other = (model.config.problem_type == several) != (task.problem_type == several)
    if missing or sorted(known) != sorted(wanted) or is_other:
        sentence = (
            f"--teacher {directory} was not fine-tuned for --task {name} and the labels of --train "
            f"({', '.join(wanted) if task.names else 'numbers'}); give a seed of bertrain finetune that was"
        )
        raise UsageError(sentence, "unsupported", option="teacher", given=directory)
    return Reader(model, tokenizer_of(directory, "teacher"), task, [known.index(name) for name in wanted])
