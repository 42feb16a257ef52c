"""Labels of complete texts: one class, a number, or several labels."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from bertdata.support import UsageError
from bertrain.lab.tables import text_of
from bertrain.lab.tasks import metrics
from bertrain.lab.tasks.base import Data, Example, Task, ordered, rows_of, same_label

LARGEST = 1e18  # largest number to learn: in float32 the sum of squares of a batch is finite


class _Texts(Task):
    """A text, or a pair of texts, and its label. A subclass defines the labels."""

    head = AutoModelForSequenceClassification

    def examples(self, part: Any, place: str) -> list[Example]:
        other = text_of(part["other"]) if "other" in self.roles else None
        return [Example(text_of(part["text"]), other, part["label"], place)]

    def encode(self, tokenizer: Any, examples: list[Example], length: int) -> tuple[Data, list[str]]:
        texts, others, *_ = (list(column) for column in zip(*examples, strict=True))
        encoded = tokenizer(texts, None if others[0] is None else others, truncation=True, max_length=length)
        labels = torch.tensor([self.number(example) for example in examples])
        return Data(rows_of(encoded), labels, labels), []

    def number(self, example: Example) -> Any:
        """Return a label as a number, or several. Raises UsageError, naming the place, for an unknown label."""
        return self.number_of(str(example.label), example.place)

    def number_of(self, label: str, place: str) -> int:
        """Return the number of a label."""
        names = self.names or []
        try:
            return names.index(label) if label in names else [*map(same_label, names)].index(same_label(label))
        except ValueError:
            sentence = f"{place}: label {label!r} is not in --train, which has {', '.join(names)}"
            raise UsageError(f"{sentence}; correct it, or add rows that have it", "bad-row") from None


class Classification(_Texts):
    """One of several classes."""

    main, problem_type = "accuracy", "single_label_classification"

    def learn(self, train: list[Example]) -> None:
        self.names = ordered(example.label for example in train)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels)  # labels: numbers [B], or a teacher's probabilities [B, classes]

    def taught(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)

    def score(self, answers: list[torch.Tensor], gold: Any) -> dict[str, float]:
        logits = torch.stack(answers)
        names = self.names or []
        second = names.index(ordered(names)[1]) if len(names) == 2 else 1  # for any order of an existing head
        return metrics.classification(logits.argmax(-1).numpy(), gold.numpy(), logits.shape[1], second)


class Pairs(Classification):
    """One of several classes for a pair of texts: classification that requires the second text."""

    second = "1"


class Regression(_Texts):
    """A number."""

    main, problem_type = "pearson", "regression"

    def number(self, example: Example) -> float:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if abs(number := float(example.label)) <= LARGEST:  # false for NaN
                return number
        sentence = f"{example.place}: --task regression needs labels from -1e18 to 1e18, not {example.label!r}"
        raise UsageError(f"{sentence}; correct it, or give a different --task", "bad-row")

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(logits.squeeze(-1), labels)

    def taught(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.squeeze(-1)

    def score(self, answers: list[torch.Tensor], gold: torch.Tensor) -> dict[str, float]:
        return metrics.regression(torch.stack(answers).squeeze(-1).numpy(), gold.numpy())


class Multilabel(_Texts):
    """Any number of labels, including none. A label is predicted if its probability is above one half."""

    main, problem_type, unlabelled = "micro_f1", "multi_label_classification", True
    expected = 'several labels must have separators between them, or be a JSON list such as ["a", "b"]'

    def examples(self, part: Any, place: str) -> list[Example]:
        """Return the examples of a part. A label is a list, a JSON list, or names with separators between them."""
        labels = part["label"]
        if isinstance(labels, str) and not labels.lstrip().startswith("["):
            labels = [label.strip() for label in labels.split(self.separator) if label.strip()]
        labels = json.loads(labels) if isinstance(labels, str) else labels
        labels = labels if isinstance(labels, list) else [labels]
        return super().examples(part | {"label": [*map(str, labels)]}, place)

    def learn(self, train: list[Example]) -> None:
        self.names = ordered(label for example in train for label in example.label)
        if not self.names:
            sentence = f"{train[0].place}, and all lines after it, have no label; give rows that have some"
            raise UsageError(sentence, "empty")

    def number(self, example: Example) -> list[float]:
        numbers = [0.0] * len(self.names or ())
        for label in example.label:
            numbers[self.number_of(label, example.place)] = 1.0
        return numbers

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels)

    def taught(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid()

    def score(self, answers: list[torch.Tensor], gold: torch.Tensor) -> dict[str, float]:
        return metrics.multilabel((torch.stack(answers) > 0).numpy(), (gold > 0).numpy())
