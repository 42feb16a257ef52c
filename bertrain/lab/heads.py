"""A checkpoint with a head for a task, and its tokenizer: loaded, or refused in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from bertdata.support import UsageError, is_out_of_memory
from bertrain.commands.reading import plain_tokenizer
from bertrain.lab import seeds
from bertrain.lab.tasks import Task
from bertrain.lab.transplant import growing
from bertrain.models.encoder import PLACES
from bertrain.models.families import family_of
from bertrain.models.load import HARMLESS, check_length, max_length, needed_weights
from bertrain.speed import has_bf16

LENGTH = 128  # tokens of a row, if neither the user nor the model wants another number
SHOWN = 5  # labels that a message lists
ROWS = 64  # of a batch that is scored, at most
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "embedding_dropout",
    "mlp_dropout",
    "attention_dropout",
    "dropout",
    "classifier_dropout",
    "classifier_dropout_prob",
    "seq_classif_dropout",
    "cls_dropout",
    "summary_last_dropout",
    "summary_first_dropout",
)
"""The names that configurations of all families give to dropout probabilities of encoders and classification heads."""


class Reader(NamedTuple):
    """A model with a head for a task, which reads rows by its own tokenizer."""

    model: Any
    tokenizer: Any
    task: Task
    order: list[int] | slice = slice(None)  # of the model's logits, for each label of the task

    def logits(self, rows: Sequence[dict[str, list[int]]]) -> torch.Tensor:
        """Return the logits of rows, as one batch."""
        inputs = self.tokenizer.pad(rows, return_tensors="pt").to(self.model.device)
        return self.task.logits(self.model(**inputs))[..., self.order]

    def all_logits(self, rows: Sequence[dict[str, list[int]]]) -> Iterator[torch.Tensor]:
        """Yield the logits of any number of rows, batch by batch."""
        size = rows_at_once(rows)
        for first in range(0, len(rows), size):
            yield self.logits(rows[first : first + size])


def rows_at_once(rows: Sequence[dict[str, list[int]]]) -> int:
    """Return how many rows are scored as one batch: fewer if the longest is long."""
    longest = max((len(row["input_ids"]) for row in rows), default=1)
    return max(1, min(ROWS, PLACES // longest))


def load(directory: Path | str, task: Task, *, from_scratch: bool, dropout: float = 0.0) -> tuple[PreTrainedModel, int]:
    """Return the model with a head for the task, and how many tensors of its encoder the checkpoint had.

    A head that was trained for the same labels is kept, with their order; one for others is replaced by a new one.
    Raises UsageError if anything but heads was not in it.
    """
    config = _config(directory)
    is_same = task.keeps(_labels(config, task))
    labels = task.config()
    if is_same and task.names is None:
        del labels["id2label"], labels["label2id"]
    labels |= {name: dropout for name in DROPOUTS if hasattr(config, name)}
    try:
        model, info = _with_head(directory, task, ignore_mismatched_sizes=True, **labels)
    except Exception as error:  # of transformers, for files of any bytes
        if is_out_of_memory(error):
            raise
        raise _unloadable(directory, error) from None
    encoder = f"{model.base_model_prefix}."
    missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    lacking = [name for name in needed_weights(model, missing) if name.startswith(encoder)]
    if lacking:
        sentence = (
            f"--checkpoint {directory} lacks {len(lacking)} weights of the encoder, such as {lacking[0]}; give one "
            "that is complete"
        )
        raise UsageError(sentence, "weights-missing", option="checkpoint", given=str(directory))
    if from_scratch:
        return task.head.from_config(copy.deepcopy(model.config)), 0
    if not is_same and all(name.startswith(encoder) for name in missing):  # a complete head for other labels
        model = _with_new_head(model)
    return model, len({encoder + name for name in model.base_model.state_dict()} - set(missing))


def _with_new_head(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model whose weights for labels are new, as if its checkpoint did not have them."""
    of_labels, name = growing(model, "num_labels"), model.name_or_path
    weights = {key: weight for key, weight in model.state_dict().items() if key not in of_labels}
    model = type(model).from_pretrained(None, config=model.config, state_dict=weights, trust_remote_code=False)
    model.name_or_path = name
    return model


def _labels(config: Any, task: Task) -> list[str]:
    """Return the labels of the head for such a task that a checkpoint has, in their order; none if it has no such head.

    The class of a model, such as BertForTokenClassification, says which head it has.
    """
    kind, classes = task.head.__name__.removeprefix("AutoModel"), config.architectures or [task.head.__name__]
    return [*(config.id2label or {}).values()] if any(kind in name for name in classes) else []


def take_order(directory: str, task: Task) -> list[str]:
    """Give a task the order of the labels that a checkpoint has. Return a line if its head is for others."""
    config = _config(directory)
    known = _labels(config, task)
    if not known or task.keeps(known) or not (config.architectures or _has_head(directory, task)):
        return []
    listed = ", ".join([*known[:SHOWN], *["..."] * (len(known) > SHOWN)])
    return [f"{directory} has a head for other labels ({listed}); a new head replaces it"]


def _has_head(directory: str, task: Task) -> bool:
    """Return whether a checkpoint has all weights of a head for such a task; False for one that `load` refuses."""
    try:
        model, info = _with_head(directory, task)
    except Exception:  # of transformers, for files of any bytes
        return False
    return all(name.startswith(f"{model.base_model_prefix}.") for name in info["missing_keys"])


def _with_head(directory: Path | str, task: Task, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model with a head for a task, and what transformers says about its loading. May raise anything."""
    return task.head.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **HARMLESS, **options)


def _config(directory: Path | str) -> Any:
    """Return the configuration of a checkpoint. Raises UsageError if it cannot be read."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # of transformers, for a file of any bytes
        raise _unloadable(directory, error) from None


def _unloadable(directory: Path | str, error: Exception, option: str = "checkpoint") -> UsageError:
    """Return the error for a model that transformers cannot load. option: names it."""
    reason = str(error).partition("\n")[0]
    if Path(directory).exists():
        sentence = f"--{option} {directory} cannot be loaded ({reason}); give another"
        return UsageError(sentence, "model-unreadable", option=option, given=str(directory))
    sentence = f"--{option} {directory} does not exist here, and the hub does not give it; give a run or a checkpoint"
    return UsageError(sentence, "model-not-found", option=option, given=str(directory))


def length_of(directory: str, length: int | None) -> int:
    """Return the row length: the given one, else LENGTH or the positions of the model if these are fewer.

    Raises UsageError for one of more tokens than the model has positions.
    """
    config = _config(directory)
    check_length(length or 0, config, directory)
    return length or min(LENGTH, max_length(config))


def is_bf16(model: PreTrainedModel, precision: str, device: torch.device) -> bool:
    """Return whether matrix products are in bfloat16. Raises UsageError for a model that cannot compute in it."""
    half = family_of(model).half
    if precision == "bf16" and not half:
        sentence = f"{model.config.model_type} computes in fp32 alone; give --precision fp32"
        raise UsageError(sentence, "unsupported", option="precision", given=precision)
    return precision == "bf16" or (precision == "auto" and half and device.type == "cuda" and has_bf16(device))


def tokenizer_of(directory: Path | str) -> Any:
    """Return the tokenizer of a checkpoint. Raises UsageError if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # of transformers and tokenizers, for files of any bytes
        reason = str(error).strip().partition("\n")[0].rstrip(": ")
        sentence = (
            f"{directory} has no tokenizer that can be read ({reason}); put the tokenizer.json and "
            "tokenizer_config.json of the pre-training there"
        )
        raise UsageError(sentence, "tokenizer-unreadable", given=str(directory)) from None


def tokenizer_files(directory: Path | str, tokenizer: Any) -> dict[str, bytes]:
    """Return the files of the tokenizer of a checkpoint, as `plain_tokenizer` changes them."""
    more = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    files = {}
    for name in {*tokenizer.vocab_files_names.values(), *more}:
        if path := cached_file(directory, name, _raise_exceptions_for_missing_entries=False):
            files[name] = Path(path).read_bytes()
    return plain_tokenizer(files)


def ends_warning(directory: Path | str) -> list[str]:
    """Return a warning if the tokenizer of a checkpoint adds no special tokens to texts."""
    tokenizer = tokenizer_of(directory)
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    if not (cls and sep) or tokenizer.num_special_tokens_to_add(pair=True):
        return []
    return [
        f"warning: the tokenizer.json of {directory} has no post_processor that puts {cls} and {sep} around texts, so "
        "texts of a pair are not kept apart; add a TemplateProcessing, as `tokenizers` has it"
    ]


def padding_tokenizer(directory: Path | str, option: str) -> Any:
    """Return the tokenizer of a checkpoint that an option names. Raises UsageError if it cannot pad rows."""
    tokenizer = tokenizer_of(directory)
    if tokenizer.pad_token_id is None:
        sentence = (
            f"--{option} {directory} has a tokenizer without a padding token; give its tokenizer_config.json a "
            "pad_token, or another checkpoint"
        )
        raise UsageError(sentence, "tokenizer-lacks-token", option=option, given=str(directory))
    return tokenizer


def _refuse_other_kind(directory: str, problem_type: str | None, task: Task, name: str) -> None:
    """Raise UsageError for a teacher of a different kind of task, whose labels may have the same names."""
    taught, several = seeds.task_of(Path(directory)), "multi_label_classification"
    one, other = ("classification" if kind == "pairs" else kind for kind in (taught or name, name))
    if one != other or (problem_type == several) != (task.config()["problem_type"] == several):
        what = f"--task {taught}" if taught else problem_type or "one label of a text"
        sentence = f"--teacher {directory} was fine-tuned for {what}; give one that was fine-tuned for --task {name}"
        raise UsageError(sentence, "unsupported", option="teacher", given=directory)


def teacher(directory: str, task: Task, name: str) -> Reader:
    """Load a fine-tuned model whose predictions become labels. Raises UsageError if it has different labels.

    name: of the task.
    """
    try:
        model, info = _with_head(directory, task)
    except Exception as error:  # of transformers, for files of any bytes
        if is_out_of_memory(error):
            raise
        raise _unloadable(directory, error, "teacher") from None
    known = [*(model.config.id2label or {}).values()]
    wanted = task.names or known[: task.num_labels]  # a number may have any name
    if info["missing_keys"] or sorted(known) != sorted(wanted):
        what = "has no head" if info["missing_keys"] else f"was fine-tuned for the labels {', '.join(known)}"
        sentence = (
            f"--teacher {directory} {what}, and --train has {', '.join(wanted) if task.names else 'numbers'}; give the "
            "directory of a seed that bertrain finetune trained on the same labels"
        )
        raise UsageError(sentence, "unsupported", option="teacher", given=directory)
    _refuse_other_kind(directory, model.config.problem_type, task, name)
    return Reader(model, padding_tokenizer(directory, "teacher"), task, [known.index(name) for name in wanted])
