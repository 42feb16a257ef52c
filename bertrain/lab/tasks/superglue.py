"""Tasks of SuperGLUE (Wang et al., 2019) in files that no other task reads: JSON lines, as the suite gives them out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bertdata.support import UsageError
from bertrain.lab import tables
from bertrain.lab.tasks.base import Data, examples_of, left_out, whole
from bertrain.lab.tasks.choices import Choices, Question, question_of
from bertrain.lab.tasks.texts import Classification

_ASKED = {"cause": "What was the cause?", "effect": "What happened then?"}


class Causes(Choices):
    """Which of two sentences is the cause, or the effect, of a text: files of COPA (Roemmele et al., 2011)."""

    def read(self, path: str) -> tuple[list[Question], list[str]]:
        columns = {"text": "premise", "other": "question", "label": "label"}
        table = tables.table(path, columns, self.columns.skip)
        rows = zip(table.rows, table.places, strict=True)
        questions, num_left = examples_of(_cause, rows, skip=self.columns.skip)
        return questions, left_out(path, table.num_left + num_left)


def _cause(row: dict[str, Any], place: str) -> Question:
    """Raises UsageError, naming the place, for a row without two choices or with another question."""
    if str(row["question"]) not in _ASKED:
        sentence = f"{place}: the question is {row['question']!r}; COPA asks for cause or effect, so give one of these"
        raise UsageError(sentence, "bad-row")
    choices = [row.get("choice1"), row.get("choice2")]
    return question_of(str(row["premise"]), _ASKED[row["question"]], choices, row["label"], place)


class Senses(Classification):
    """Whether a word means the same in two sentences: files of WiC (Pilehvar and Camacho-Collados, 2019).

    The model reads both sentences with [marks] around the word.
    """

    taught = None  # type: ignore[assignment]  # a copy with other words would have its word elsewhere

    def read(self, path: str) -> tuple[tables.Examples, list[str]]:
        columns = {"text": "sentence1", "other": "sentence2", "label": "label"}
        table = tables.table(path, columns, self.columns.skip)
        rows = zip(table.rows, table.places, strict=True)
        pairs, num_left = examples_of(_sense, rows, skip=self.columns.skip)
        texts, others, labels, places = ([pair[i] for pair in pairs] for i in range(4))
        return tables.Examples(texts, others, labels, places), left_out(path, table.num_left + num_left)


def _sense(row: dict[str, Any], place: str) -> tuple[str, str, Any, str]:
    """Both sentences with marks around the word; the label and the place. Raises UsageError where no word can be."""
    marked = []
    for side in "12":
        text, start, end = str(row[f"sentence{side}"]), row.get(f"start{side}"), row.get(f"end{side}")
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text)):
            raise UsageError(
                f"{place}: start{side} and end{side} must be the first character of a word of sentence{side} and the "
                "one behind it, as in WiC; correct them",
                "bad-row",
            )
        marked.append(f"{text[:start]}[{text[start:end]}]{text[end:]}")
    return marked[0], marked[1], row["label"], place


class Gold(NamedTuple):
    """What answers are compared with: the label of each, and the question that it belongs to."""

    labels: torch.Tensor  # [N]
    questions: list[str]


class Answers(Classification):
    """Which of several answers to a question about a text are right, any number of them: files of MultiRC.

    (Khashabi et al., 2018.) A row is the text, and a question with one answer. exact_match: the share of questions
    whose answers are all judged rightly.
    """

    main = "f1"
    taught = None  # type: ignore[assignment]  # a row of the file is many examples

    def read(self, path: str) -> tuple[tables.Examples, list[str]]:
        table = tables.table(path, {"text": "passage", "label": "idx"}, self.columns.skip)
        passages = zip(table.values("text"), table.places, strict=True)
        answers, num_left = examples_of(lambda *row: [*_answers(*row)], passages, skip=self.columns.skip)
        rows = [*itertools.chain.from_iterable(answers)]
        if not rows:
            raise UsageError(f"{path} holds no answers; give a file that has some", "empty", given=path)
        texts, others, labels, places = ([row[i] for row in rows] for i in range(4))
        return tables.Examples(texts, others, labels, places), left_out(path, table.num_left + num_left)

    def encode(self, tokenizer: Any, examples: tables.Examples, length: int) -> tuple[Data, list[str]]:
        data, warnings = super().encode(tokenizer, examples, length)
        return data._replace(gold=Gold(data.labels, examples.places)), warnings

    def score(self, answers: list[torch.Tensor], gold: Any) -> dict[str, float]:
        is_right = torch.stack(answers).argmax(-1) == gold.labels
        missed = {question for question, right in zip(gold.questions, is_right.tolist(), strict=True) if not right}
        exact = 1 - len(missed) / len(set(gold.questions))
        return super().score(answers, gold.labels) | {"exact_match": exact}


def _answers(passage: Any, place: str) -> Iterator[tuple[str, str, int, str]]:
    """The text, a question with an answer, whether that is right, and the question's place.

    Raises UsageError, naming the place, for what is no passage of MultiRC.
    """
    try:
        for number, asked in enumerate(passage["questions"], 1):
            for answer in asked["answers"]:
                text = f"{asked['question']} {answer['text']}"
                yield str(passage["text"]), text, whole(answer["label"]), f"{place}, question {number}"
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"{place}: passage needs text and questions, each with question and answers, and these with text and "
            "label, as in MultiRC; correct the row",
            "bad-row",
        ) from None
