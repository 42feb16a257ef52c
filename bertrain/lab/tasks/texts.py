"""Labels of complete texts: one class, a number, or several labels."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from bertdata.support import UsageError
from bertrain.lab import tables
from bertrain.lab.tasks import metrics
from bertrain.lab.tasks.base import Columns, Data, Task, examples_of, left_out, ordered, rows_of, same_label, whole

LARGEST = 1e18  # number to learn; in float32 a batch has a finite sum of squares
MANY_LABELS = 20  # a table with more, in over half of its rows, is likely not one of classes


class _Texts(Task):
    """A text, or two, and its label. A subclass says what labels are."""

    head = AutoModelForSequenceClassification

    unlabelled = False  # whether an empty label is one

    def read(self, path: str) -> tuple[tables.Examples, list[str]]:
        text, other, label, _, skip = self.columns
        examples = tables.read(path, text=text, other=other, label=label, skip=skip, unlabelled=self.unlabelled)
        return examples, left_out(path, examples.num_left)

    def encode(self, tokenizer: Any, examples: tables.Examples, length: int) -> tuple[Data, list[str]]:
        encoded = tokenizer(examples.texts, examples.others, truncation=True, max_length=length)
        labels = torch.tensor(self.numbers(examples))
        return Data(rows_of(encoded), labels, labels), []

    def numbers(self, examples: tables.Examples) -> list[Any]:
        """The labels as numbers. Raises UsageError, naming the file and the line, for one that is not known."""
        raise NotImplementedError


def _number(names: list[str], label: str, place: str) -> int:
    try:
        return names.index(label) if label in names else [*map(same_label, names)].index(same_label(label))
    except ValueError:
        raise UsageError(
            f"{place}: label {label!r} is not in --train, which has {', '.join(names)}; correct it, or add rows that "
            "have it",
            "bad-row",
        ) from None


class Classification(_Texts):
    """One of several classes."""

    main, problem_type = "accuracy", "single_label_classification"

    def learn(self, train: tables.Examples) -> list[str]:
        self.names = ordered(train.labels)
        num_labels, num_rows = len(self.names), len(train.labels)
        if num_labels <= MANY_LABELS or num_labels <= num_rows / 2:
            return []
        path = train.places[0].rpartition(", ")[0]
        return [
            f"warning: {path} has {num_labels:,} different labels in {num_rows:,} rows; is --label "
            f"{self.columns.label} the column of the label, or --task regression meant?"
        ]

    def numbers(self, examples: tables.Examples) -> list[int]:
        assert self.names is not None  # noqa: S101  (learn came before)
        labels = zip(examples.labels, examples.places, strict=True)
        return [_number(self.names, str(label), place) for label, place in labels]

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels)  # of numbers [B], or a teacher's probabilities [B, classes]

    def taught(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)

    def score(self, answers: list[torch.Tensor], gold: torch.Tensor) -> dict[str, float]:
        logits = torch.stack(answers)
        names = self.names or []
        second = names.index(ordered(names)[1]) if len(names) == 2 else 1  # whatever the order of a kept head
        return metrics.classification(logits.argmax(-1).numpy(), gold.numpy(), logits.shape[1], second)


class Pairs(Classification):
    """One of several classes, of two texts: classification that needs the second."""

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns._replace(other=columns.other or "1"))


class Coreference(Classification):
    """Whether a pronoun means a noun of its text: files of CLUEWSC (Xu et al., 2020), and of SuperGLUE's WSC.

    The column `target` says where both are: span1_text at span1_index is the noun, span2_… the pronoun. CLUEWSC counts
    characters, and SuperGLUE words between spaces. The model reads the text with _marks_ around the noun and [marks]
    around the pronoun.
    """

    taught = None  # type: ignore[assignment]  # a copy with other words would have its noun elsewhere

    def read(self, path: str) -> tuple[tables.Examples, list[str]]:
        text, _, label, _, skip = self.columns
        table = tables.table(path, {"text": text, "other": "target", "label": label}, skip)
        columns = table.texts("text"), table.values("other"), table.values("label"), table.places
        rows, num_left = examples_of(_marked, zip(*columns, strict=True), skip=skip)
        texts, labels, places = ([row[i] for row in rows] for i in range(3))
        return tables.Examples(texts, None, labels, places), left_out(path, table.num_left + num_left)


def _marked(text: str, target: Any, label: Any, place: str) -> tuple[str, Any, str]:
    """A text with marks around noun and pronoun; its label and place as they are.

    Raises UsageError, naming the place, where noun or pronoun are not there.
    """
    try:
        spans = [(str(target[f"{span}_text"]), whole(target[f"{span}_index"])) for span in ("span1", "span2")]
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"{place}: target needs span1_text, span1_index, span2_text and span2_index, as in CLUEWSC; correct the "
            "row",
            "bad-row",
        ) from None
    words = dict(enumerate(match.start() for match in re.finditer(r"\S+", text)))
    counts = [words.get(index, -1) for _, index in spans], [index for _, index in spans]
    starts = next((starts for starts in counts if _are_at(text, starts, spans)), None)
    if starts is None:
        said = " and ".join(f"{word!r} at {index}" for word, index in spans)
        sentence = f"{place}: {said} are not in the text, counted in characters or in words; correct span1_ and span2_"
        raise UsageError(sentence, "bad-row")
    ends = []
    for first, (word, _), marks in zip(starts, spans, ("__", "[]"), strict=True):
        ends += [(first, 1, marks[0]), (first + len(word), 0, marks[1])]
    for where, _, mark in sorted(ends, reverse=True):  # from the end, so that places stay true
        text = text[:where] + mark + text[where:]
    return text, label, place


def _are_at(text: str, starts: list[int], spans: list[tuple[str, int]]) -> bool:
    """Whether each word begins at its character, in small or capital letters, as these differ in some rows of WSC."""
    return all(
        word and first >= 0 and text[first : first + len(word)].lower() == word.lower()
        for first, (word, _) in zip(starts, spans, strict=True)
    )


class Regression(_Texts):
    """A number."""

    main, problem_type = "pearson", "regression"

    def learn(self, train: tables.Examples) -> list[str]:
        return []

    def numbers(self, examples: tables.Examples) -> list[float]:
        numbers = []
        for label, place in zip(examples.labels, examples.places, strict=True):
            try:
                numbers.append(float(label))
            except (TypeError, ValueError, OverflowError):
                numbers.append(math.nan)
            if not abs(numbers[-1]) <= LARGEST:  # also NaN
                raise UsageError(
                    f"{place}: --task regression needs numbers from -1e18 to 1e18 as labels, not {label!r}; correct "
                    "it, or give another --task",
                    "bad-row",
                )
        return numbers

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(logits.squeeze(-1), labels)

    def taught(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.squeeze(-1)

    def score(self, answers: list[torch.Tensor], gold: torch.Tensor) -> dict[str, float]:
        return metrics.regression(torch.stack(answers).squeeze(-1).numpy(), gold.numpy())


class Multilabel(_Texts):
    """Any number of labels, also none. A label is predicted where its probability is above one half."""

    main, problem_type, unlabelled = "micro_f1", "multi_label_classification", True

    def read(self, path: str) -> tuple[tables.Examples, list[str]]:
        examples, warnings = super().read(path)
        for i, place in enumerate(examples.places):
            examples.labels[i] = _split(examples.labels[i], self.columns.separator, place)
        return examples, warnings

    def learn(self, train: tables.Examples) -> list[str]:
        self.names = ordered(label for labels in train.labels for label in labels)
        if not self.names:
            raise UsageError(
                f"{train.places[0]}, and all lines after it, have no label; give rows that have some", "empty"
            )
        return []

    def numbers(self, examples: tables.Examples) -> list[list[float]]:
        assert self.names is not None  # noqa: S101  (learn came before)
        numbers = [[0.0] * len(self.names) for _ in examples.labels]
        for row, labels, place in zip(numbers, examples.labels, examples.places, strict=True):
            for label in labels:
                row[_number(self.names, label, place)] = 1.0
        return numbers

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels)

    def taught(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid()

    def score(self, answers: list[torch.Tensor], gold: torch.Tensor) -> dict[str, float]:
        return metrics.multilabel((torch.stack(answers) > 0).numpy(), (gold > 0).numpy())


def _split(cell: Any, separator: str, place: str) -> list[str]:
    """The labels of one cell: a list, a JSON list, or names with separators between them."""
    if isinstance(cell, str) and not cell.lstrip().startswith("["):
        return [label.strip() for label in cell.split(separator) if label.strip()]
    try:
        labels = json.loads(cell) if isinstance(cell, str) else cell
    except (ValueError, RecursionError):
        raise UsageError(
            f'{place}: the labels {cell[:80]!r} are no JSON list; write them like ["a", "b"], or with {separator!r} '
            "between them",
            "bad-row",
        ) from None
    return [str(label) for label in (labels if isinstance(labels, list) else [labels])]
