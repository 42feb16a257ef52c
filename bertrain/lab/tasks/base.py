"""What a task is: how its files are read and become rows, its head, its loss and its measures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import torch

from bertdata.support import UsageError


class Columns(NamedTuple):
    """What stands where in a file: names or numbers of columns, and what separates several labels of one cell."""

    text: str
    other: str  # "": there is no second text
    label: str
    separator: str = ","
    skip: bool = False  # leave out rows that do not fit, as official files have some


class Data(NamedTuple):
    """Examples as rows of ids. A row is one example, or one window of its text."""

    rows: list[dict[str, list[int]]]  # what tokenizer.pad takes
    labels: torch.Tensor  # [N, …], of each row
    gold: Any  # what `score` compares answers with


def whole(value: Any) -> int:
    """An integer, also one that stands as text. Raises ValueError for any other value, such as 1.7 or infinity."""
    try:
        number = int(value)
    except (TypeError, OverflowError):
        raise ValueError("not an integer") from None
    if not isinstance(value, str) and number != value:
        raise ValueError("not an integer")
    return number


def same_label(label: Any) -> str:
    """Return the text of a label, without the zeros of a whole number: "1" for 1.0."""
    return re.sub(r"^([-+]?\d+)\.0+$", r"\1", str(label))


def ordered(labels: Iterable[Any]) -> list[str]:
    """Return the different labels as texts: numbers by their value, then the others. 1 and 1.0 are one label."""

    def place(name: str) -> tuple[bool, Decimal, str]:
        is_number = re.fullmatch(r"[-+]?\d+(\.\d+)?([eE][-+]?\d{1,9})?", name)
        return not is_number, Decimal(name if is_number else 0), name

    longest_first = sorted({str(label) for label in labels}, key=len, reverse=True)
    return sorted({same_label(name): name for name in longest_first}.values(), key=place)


def rows_of(encoded: Mapping[str, list[Any]]) -> list[dict[str, list[int]]]:
    """What a tokenizer gave for several texts, a row for each."""
    return [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]


def left_out(path: str, count: int) -> list[str]:
    """The warning of rows that Columns.skip left out, if there are any."""
    if not count:
        return []
    rows = "row was" if count == 1 else "rows were"
    return [f"warning: {path}: {count:,} {rows} left out, without a text or a label, or damaged"]


def examples_of(make: Callable[..., Any], rows: Iterable[tuple[Any, ...]], *, skip: bool) -> tuple[list[Any], int]:
    """What `make` gives of each row, and how many rows were left out: with skip, those it raises UsageError for.

    If it raises for all of them, its error about the first one is raised.
    """
    examples, num_left, first = [], 0, None
    for row in rows:
        try:
            examples.append(make(*row))
        except UsageError as error:
            if not skip:
                raise
            num_left, first = num_left + 1, first or error
    if first is not None and not examples:
        raise first
    return examples, num_left


def _plain(name: str) -> str:
    return re.sub(r"^label_(?=\d+$)", "", same_label(name).casefold())


class Task:
    """One kind of labels. A subclass gives the methods below, and an entry of TASKS names it."""

    head: Any  # the class of transformers that adds the head, such as AutoModelForSequenceClassification
    main: str  # the measure on dev that chooses the best epoch
    names: list[str] | None = None  # of the labels, once `learn` has seen them; None: there are none
    num_labels = 1  # without names
    problem_type: str | None = None  # as transformers calls a kind of labels of texts
    taught: Callable[[torch.Tensor], torch.Tensor] | None = None
    """A teacher's logits → labels that `loss` takes. None: a teacher cannot give labels of this kind."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def files(self, path: str) -> list[str]:
        """The files that `read` reads for one that is named."""
        return [path]

    def read(self, path: str) -> tuple[Any, list[str]]:
        """The examples of a file, and warnings. Raises UsageError, naming file and line, for what does not fit."""
        raise NotImplementedError

    def learn(self, train: Any) -> list[str]:
        """Takes the names of the labels from the examples to train on. Returns warnings."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """What the configuration of the model says of the labels."""
        numbered = dict(enumerate(self.names or [f"LABEL_{number}" for number in range(self.num_labels)]))
        names = {"id2label": numbered, "label2id": {v: k for k, v in numbered.items()}}
        return {"num_labels": len(numbered), "problem_type": self.problem_type, **names}

    def keeps(self, known: Sequence[str]) -> bool:
        """Return whether a head for these labels is one for the labels of this task, and take their order if it is.

        Capital and small letters are not told apart, and LABEL_0, the name by default, is the label 0.
        """
        if self.names is None:
            return len(known) == self.num_labels
        if sorted(map(str, known)) == sorted(self.names):  # which may differ in capitals alone
            self.names = [*map(str, known)]
            return True
        own = {_plain(name): name for name in self.names}
        plain = [_plain(name) for name in known]
        is_same = sorted(plain) == sorted(own) and len(own) == len(self.names)
        self.names = [own[name] for name in plain] if is_same else self.names
        return is_same

    def encode(self, tokenizer: Any, examples: Any, length: int) -> tuple[Data, list[str]]:
        """Rows of at most `length` tokens, and warnings."""
        raise NotImplementedError

    def logits(self, output: Any) -> torch.Tensor:
        """What the model gives for a batch → float32 [B, …]."""
        return output.logits.float()

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch. `labels` are those of its rows, as `encode` gave them."""
        raise NotImplementedError

    def answer(self, logits: torch.Tensor) -> torch.Tensor:
        """What `score` needs of the logits of a batch, [B, …]."""
        return logits

    def score(self, answers: list[torch.Tensor], gold: Any) -> dict[str, float]:
        """Measures, of the answer to each row, on the CPU."""
        raise NotImplementedError
