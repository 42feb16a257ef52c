"""The base class of tasks: file → examples → rows → logits → measures."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import torch

from bertdata.support import UsageError, counted
from bertrain.lab import tables


class Columns(NamedTuple):
    """The columns of a file, as names or numbers, and the separator of several labels in one cell."""

    text: str = "0"
    other: str = ""  # "": there is no second text
    label: str = "-1"
    separator: str = ","
    skip: bool = False  # skip invalid rows, which some official files have


DEFAULT = Columns()


class Example(NamedTuple):
    """One item to learn, from a part of a file such as a row of a table. Tasks may define other types of its fields."""

    text: Any  # a text
    other: Any  # a second text, or None
    label: Any  # value in the file
    place: str  # "file, line n"


class Data(NamedTuple):
    """Examples as rows of ids. A row is one example, or one window of its text."""

    rows: list[dict[str, list[int]]]  # inputs of tokenizer.pad
    labels: torch.Tensor  # [N, …], one entry for each row
    gold: Any  # the second argument of `score`


def same_label(label: Any) -> str:
    """Return the text of a label; whole numbers lose their decimals: "1" for 1.0."""
    return re.sub(r"^([-+]?\d+)\.0+$", r"\1", str(label))


def integer(value: Any) -> int:
    """Return the integer in a text, a float such as 1.0, or a bool. Raises ValueError for any other value."""
    return int(same_label(int(value) if isinstance(value, bool) else value))


def ordered(labels: Iterable[Any]) -> list[str]:
    """Return the different labels as texts: first numbers, by value, then other texts. 1 and 1.0 are one label."""

    def place(name: str) -> tuple[bool, Decimal, str]:
        is_number = re.fullmatch(r"[-+]?\d+(\.\d+)?([eE][-+]?\d{1,9})?", name)
        return not is_number, Decimal(name if is_number else 0), name

    longest_first = sorted({str(label) for label in labels}, key=len, reverse=True)
    return sorted({same_label(name): name for name in longest_first}.values(), key=place)


def rows_of(encoded: Mapping[str, list[Any]]) -> list[dict[str, list[int]]]:
    """Return a list of rows from a tokenizer's output for several texts."""
    return [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]


@contextlib.contextmanager
def _naming(place: str, kind: str, expected: str) -> Iterator[None]:
    """Turn the errors of reading an unexpected format into a UsageError that names the place."""
    try:
        yield
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        sentence = f"{place} does not fit --task: {expected}; correct it, or give other columns or a different --task"
        raise UsageError(sentence, kind) from None


def _plain(name: str) -> str:
    return re.sub(r"^label_(?=\d+$)", "", same_label(name).casefold())


class Task:
    """A kind of labels. A subclass overrides the methods below, and an entry of TASKS names it."""

    head: Any  # the class of transformers that adds the head, such as AutoModelForSequenceClassification
    main: str  # the measure on dev that chooses the best epoch
    names: list[str] | None = None  # names of the labels, set by `learn`; None if labels have no names
    num_labels = 1  # if there are no names
    problem_type: str | None = None  # the name in transformers of the kind of labels of texts
    unlabelled = False  # whether an empty label is valid
    expected = "each row needs a text and a label, and as many columns as the first row"  # for errors
    layout = expected  # expected format of a file that is not a table, for errors
    second = ""  # default column of the second text
    fixed: Mapping[str, str] = {}  # role → column, for columns that the format of files determines
    taught: Callable[[torch.Tensor], torch.Tensor] | None = None
    """A teacher's logits → labels for `loss`. None: this kind of labels cannot come from a teacher."""

    def __init__(self, columns: Columns = DEFAULT) -> None:
        text, other, label, self.separator, self.skip = columns
        others = {"other": other or self.second} if (other or self.second) and not self.fixed else {}
        self.roles = {"text": text} | others | {"label": label} | {**self.fixed}
        """The columns of a table that must have values, by their role: the name of an option, or of the column."""

    def files(self, path: str) -> list[str]:
        """Return the files that `read` reads for a path."""
        return [path]

    def parts(self, path: str) -> Iterable[tuple[Any, str]]:
        """Return the parts of a file, for `examples`, each with its location: "file, line n".

        A part of a table is a row: role → value.
        """
        return tables.read(path, self.roles, only=True).parts()

    def examples(self, part: Any, place: str) -> list[Example]:
        """Return the examples of a part of a file. Raises an error for an invalid part."""
        raise NotImplementedError

    def read(self, path: str) -> tuple[list[Example], list[str]]:
        """Return the examples of a file, and warnings. Raises UsageError, naming file and line, for an invalid part.

        With `skip`, invalid parts are skipped instead, unless no part is valid.
        """
        error = UsageError(f"{path} holds no examples; give a file that has some", "empty", given=path)
        examples, num_left = list[Example](), 0
        with _naming(path, "not-of-format", self.layout):
            parts = [*self.parts(path)]
        for part, place in parts:
            try:
                examples += self.checked(part, place)
            except UsageError as fault:
                if not self.skip:
                    raise
                num_left, error = num_left + 1, fault
        if not examples:
            raise error
        left = f"warning: {path}: {counted(num_left, 'row')} left out, without a text or a label, or damaged"
        return examples, [left] * bool(num_left)

    def checked(self, part: Any, place: str) -> list[Example]:
        """Return the examples of a part. Raises UsageError, naming the place, if the part is invalid.

        A part needs a value for each role. With `skip` an empty text is missing, and so is the label "-", which means
        that the annotators did not agree.
        """
        with _naming(place, "bad-row", self.expected):
            for role in self.roles:
                is_label, value = role == "label" and not self.unlabelled, part.get(role)
                empty = ("", "-") if self.skip and is_label else ("",) if self.skip or is_label else ()
                if value is None or (str(value).strip() if is_label else value) in empty:
                    raise ValueError
            return self.examples(part, place)

    def learn(self, train: list[Example]) -> None:
        """Set the names of the labels from the training examples."""

    def config(self) -> dict[str, Any]:
        """Return the entries of the model's configuration about the labels."""
        labels = dict(enumerate(self.names or [f"LABEL_{number}" for number in range(self.num_labels)]))
        return {"problem_type": self.problem_type, "id2label": labels, "label2id": {v: k for k, v in labels.items()}}

    def keeps(self, known: Sequence[str]) -> bool:
        """Return whether a head for these labels is usable for this task, and adopt their order if it is.

        Letter case is ignored, and LABEL_0, the name by default, is the label 0.
        """
        if self.names is None:
            return len(known) == self.num_labels
        if sorted(map(str, known)) == sorted(self.names):  # two may differ only in letter case
            self.names = [*map(str, known)]
            return True
        own = {_plain(name): name for name in self.names}
        plain = [_plain(name) for name in known]
        is_same = sorted(plain) == sorted(own) and len(own) == len(self.names)
        self.names = [own[name] for name in plain] if is_same else self.names
        return is_same

    def encode(self, tokenizer: Any, examples: list[Example], length: int) -> tuple[Data, list[str]]:
        """Return rows of at most `length` tokens, and warnings."""
        raise NotImplementedError

    def logits(self, output: Any) -> torch.Tensor:
        """Return the model's logits of a batch: float32 [B, …]."""
        return output.logits.float()

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch. labels: those of its rows, from `encode`."""
        raise NotImplementedError

    def answer(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the part of a batch's logits that `score` needs, [B, …]."""
        return logits

    def score(self, answers: list[torch.Tensor], gold: Any) -> dict[str, float]:
        """Return measures from the answers to all rows, on the CPU. gold: from `encode`."""
        raise NotImplementedError
