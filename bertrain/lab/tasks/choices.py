"""The right one of several choices: rows of JSON lines or Parquet, and files of C3 (Sun et al., 2020).

Each choice becomes a row of its own, a text and the choice, with a score: whether it is the right one. The choice with
the highest score is the answer. So questions may have any number of choices, and every model that classifies fits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from bertdata.support import UsageError
from bertrain.commands import reading
from bertrain.lab.tables import text_of
from bertrain.lab.tasks.base import Data, Example, Task, rows_of, whole

QUESTION = ("question",)
"""The key of a question that stands before each choice; no column has such a name."""


class Choices(Task):
    """One of the choices of a question. An example has these in `other`, and as label the number of the right one."""

    head, main = AutoModelForSequenceClassification, "accuracy"
    problem_type = "multi_label_classification"  # each score is a probability of its own

    def files(self, path: str) -> list[str]:
        """Of C3, the name of the dialogues (d-train.json) stands for the other texts (m-train.json), too."""
        file = Path(path)
        other = file.with_name(f"m{file.name[1:]}") if file.name.startswith("d-") and _is_list(path) else file
        return [path, *([str(other)] if other != file and other.is_file() else [])]

    def parts(self, path: str) -> Iterable[tuple[Any, str]]:
        return (part for file in self.files(path) for part in _of_c3(file)) if _is_list(path) else super().parts(path)

    def examples(self, part: Any, place: str) -> list[Example]:
        choices, answer, number = part.get("other"), part["label"], -1
        with contextlib.suppress(ValueError, RecursionError):
            choices = json.loads(choices) if isinstance(choices, str) else choices
            if isinstance(choices, list) and len(choices) > 1 and all(isinstance(choice, str) for choice in choices):
                number = choices.index(answer) if answer in choices else whole(answer)
        if not 0 <= number < len(choices or ()):
            sentence = f"{place}: --other must be a list of two or more texts, and --label one of them or its number "
            raise UsageError(f"{sentence}from 0, not {answer!r}; correct the row", "bad-row")
        asked = [f"{part.get(QUESTION, '')} {choice}".strip() for choice in choices]
        return [Example(text_of(part["text"]), asked, number, place)]

    def encode(self, tokenizer: Any, examples: list[Example], length: int) -> tuple[Data, list[str]]:
        rows = [
            (each.text, choice, number == each.label) for each in examples for number, choice in enumerate(each.other)
        ]
        texts, others, right = (list(side) for side in zip(*rows, strict=True))
        encoded = tokenizer(texts, others, truncation=True, max_length=length)  # cuts the longer of the two
        return Data(rows_of(encoded), torch.tensor(right, dtype=torch.float32), examples), []

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels)

    def score(self, answers: list[torch.Tensor], gold: list[Example]) -> dict[str, float]:
        scores = torch.cat(answers).split([len(each.other) for each in gold])
        right = [int(mine.argmax()) == each.label for mine, each in zip(scores, gold, strict=True)]
        return {"accuracy": sum(right) / len(right)}


def _is_list(path: str) -> bool:
    """Return whether a file of JSON is one list, as those of C3 are, and not a row a line."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return path.lower().endswith(".json") and file.read(1000).lstrip().startswith("[")
    except (OSError, ValueError):
        return False  # tables.read says what is wrong


def _of_c3(path: str) -> Iterator[tuple[Any, str]]:
    """Yield the questions of a file of C3, a list of [lines of the text, questions, name]."""
    text, count = reading.text(path), 0
    texts = reading.parsed(text, path)
    reading.refuse_halves(text, path)
    try:
        for lines, asked, *_ in texts:
            for entry in asked:
                count += 1
                part = {QUESTION: entry["question"].strip(), "other": entry["choice"], "label": entry["answer"]}
                yield {"text": "\n".join([] + lines), **part}, f"{path}, question {count:,}"
    except (ValueError, KeyError, TypeError, AttributeError):
        sentence = f"{path} is not a file of C3 after {count:,} questions; give a list of texts, each a list of lines"
        raise UsageError(f"{sentence} and one of questions with question, choice and answer", "not-of-format") from None
