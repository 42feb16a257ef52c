"""The right one of several choices: rows of JSON lines or Parquet, and files of C3 (Sun et al., 2020).

Each choice becomes a row of its own, a text and the choice, with a score: whether it is the right one. The choice with
the highest score is the answer. So questions may have any number of choices, and every model that classifies fits.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from bertdata.support import UsageError
from bertrain.commands import reading
from bertrain.lab import tables
from bertrain.lab.tasks.base import Data, Task, examples_of, left_out, rows_of, whole


class Question(NamedTuple):
    """A question and its choices, one of which is right."""

    text: str
    question: str  # "": the text has it
    choices: list[str]
    answer: int  # the number of the right choice


class Choices(Task):
    """One of the choices of a question."""

    head, main = AutoModelForSequenceClassification, "accuracy"
    problem_type = "multi_label_classification"  # each score is a probability of its own

    def files(self, path: str) -> list[str]:
        """Of C3, the name of the dialogues (d-train.json) stands for the other texts (m-train.json), too."""
        name = Path(path).name
        if not (name.startswith("d-") and name.endswith(".json")):
            return [path]
        other = Path(path).with_name("m" + name[1:])
        return [path, str(other)] if other.is_file() and _is_list(path) else [path]

    def read(self, path: str) -> tuple[list[Question], list[str]]:
        text, choices, label, _, skip = self.columns
        if path.lower().endswith(".json") and _is_list(path):
            rows_of_c3 = (row for file in self.files(path) for row in _of_c3(file))
            questions, num_left = examples_of(question_of, rows_of_c3, skip=skip)
            return questions, left_out(path, num_left)
        if not choices:
            raise UsageError(
                "--task choice needs --other, the column with the list of choices; name it", "missing", option="other"
            )
        table = tables.table(path, {"text": text, "other": choices, "label": label}, skip)
        columns = table.texts("text"), table.values("other"), table.values("label"), table.places
        rows = ((text, "", *row) for text, *row in zip(*columns, strict=True))
        questions, num_left = examples_of(question_of, rows, skip=skip)
        return questions, left_out(path, table.num_left + num_left)

    def learn(self, train: list[Question]) -> list[str]:
        return []

    def encode(self, tokenizer: Any, examples: list[Question], length: int) -> tuple[Data, list[str]]:
        rows = [(q.text, f"{q.question} {choice}".strip()) for q in examples for choice in q.choices]
        texts, others = (list(side) for side in zip(*rows, strict=True))
        encoded = tokenizer(texts, others, truncation=True, max_length=length)  # cuts the longer of the two
        right = [float(number == q.answer) for q in examples for number in range(len(q.choices))]
        return Data(rows_of(encoded), torch.tensor(right), examples), []

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels)

    def score(self, answers: list[torch.Tensor], gold: list[Question]) -> dict[str, float]:
        scores = torch.cat(answers).split([len(question.choices) for question in gold])
        right = [int(mine.argmax()) == question.answer for mine, question in zip(scores, gold, strict=True)]
        return {"accuracy": sum(right) / len(right)}


def question_of(text: str, question: str, choices: Any, answer: Any, place: str) -> Question:
    """Raises UsageError, with the place, for choices that are not a list and an answer that is not one of them."""
    if isinstance(choices, str):
        try:
            choices = json.loads(choices)
        except (ValueError, RecursionError):
            choices = None
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise UsageError(
            f"{place}: a question needs a list of two choices or more, which are texts; correct the row", "bad-row"
        )
    number = -1
    with contextlib.suppress(ValueError):
        number = choices.index(answer) if answer in choices else whole(answer)
    if not 0 <= number < len(choices):
        raise UsageError(
            f"{place}: the answer {answer!r} is not one of the {len(choices)} choices; give one, or its number from 0",
            "bad-row",
        )
    return Question(text, question, choices, number)


def _is_list(path: str) -> bool:
    """Whether a file of JSON is one list, as those of C3 are, and not a row a line."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read(1000).lstrip().startswith("[")
    except (OSError, ValueError):
        return False  # tables.read says what is wrong


def _of_c3(path: str) -> list[tuple[str, str, Any, Any, str]]:
    """What question_of takes of a file of C3, a list of [lines of the text, questions, name]."""
    questions: list[tuple[str, str, Any, Any, str]] = []
    text = reading.text(path)
    texts = reading.parsed(text, path)
    reading.refuse_halves(text, path)
    for number, part in enumerate(texts, 1):
        try:
            lines, asked, *_ = part
            if not isinstance(lines, list):
                raise TypeError
            for entry in asked:
                place = f"{path}, question {len(questions) + 1:,}"
                parts = [entry["question"].strip(), entry["choice"], entry["answer"]]
                questions.append(("\n".join(lines), *parts, place))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{path} is not a file of C3, as its text {number:,} shows; give a list of texts, each a list of its "
                "lines and a list of its questions with question, choice and answer; or JSON lines",
                "not-of-format",
            ) from None
    if not questions:
        raise UsageError(f"{path} holds no questions; give a file that has some", "empty", given=path)
    return questions
