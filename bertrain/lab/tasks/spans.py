"""Answers to questions, which stand in a text: files of SQuAD v1 and v2 (Rajpurkar et al., 2016 and 2018).

A text that is longer than a row is cut into windows that overlap by a third of --length. The answer is the best span of
all windows of a question. Where some questions to train on have no answer, "no answer" is a span too: the first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForQuestionAnswering

from bertdata.support import UsageError, counted
from bertrain.commands import reading
from bertrain.lab.tasks import metrics
from bertrain.lab.tasks.base import Data, Task, examples_of, left_out, rows_of

T = TypeVar("T")

LONGEST_QUESTION = 64  # tokens; longer ones are cut, and in rows of less than 128 those of more than half a row
LONGEST_ANSWER = 30  # tokens of an answer that is predicted
BEST = 20  # starts and ends of a window that are tried
SHORTEST_ROW = 32


class Question(NamedTuple):
    """A question about a text, its context, and the answers in this text."""

    text: str
    context: str
    answers: list[tuple[int, str]]  # each with its first character in the context; none: there is no answer
    place: str  # "file, question id"


class Window(NamedTuple):
    """A row: a question and a part of its context, which may be too long for one row."""

    question: int  # its number
    spans: np.ndarray  # int64 [T, 2]: the characters of the context in each token; 0, 0 where it is none


class Gold(NamedTuple):
    """What predictions are compared with: the questions, and of which one each row is."""

    questions: list[Question]
    windows: list[Window]


class Spans(Task):
    """The first and the last token of an answer."""

    head, main = AutoModelForQuestionAnswering, "f1"
    num_labels = 2  # a start and an end
    may_be_none = False  # whether a question may have no answer

    def read(self, path: str) -> tuple[list[Question], list[str]]:
        questions, num_left = examples_of(_question, _entries(path), skip=self.columns.skip)
        if not questions:
            raise UsageError(f"{path} holds no questions; give a file that has some", "empty", given=path)
        return questions, left_out(path, num_left)

    def learn(self, train: list[Question]) -> list[str]:
        self.may_be_none = any(not question.answers for question in train)
        return []

    def encode(self, tokenizer: Any, examples: list[Question], length: int) -> tuple[Data, list[str]]:
        if length < SHORTEST_ROW:
            sentence = f"--length {length} is too short for a question and a text; give at least {SHORTEST_ROW}"
            raise UsageError(sentence, "out-of-range", option="length", given=length)
        tokenizer.padding_side = "right"  # as the places of answers are counted from the left
        texts = [question.text for question in examples]
        most = min(LONGEST_QUESTION, length // 2)
        cut = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        texts = [t[: o[most - 1][1]] if len(o) > most else t for t, o in zip(texts, cut, strict=True)]
        encoded = tokenizer(
            texts,
            [question.context for question in examples],
            truncation="only_second",
            max_length=length,
            stride=length // 3,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        numbers, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        rows = rows_of(encoded)
        in_context = [[part == 1 for part in encoded.sequence_ids(i)] for i in range(len(numbers))]
        windows = [
            Window(n, np.where(np.array(inside)[:, None], np.array(spans), 0))
            for n, spans, inside in zip(numbers, offsets, in_context, strict=True)
        ]
        labels = _labels(windows, examples)
        return Data(rows, torch.tensor(labels), Gold(examples, windows)), _warnings(windows, examples, labels)

    def logits(self, output: Any) -> torch.Tensor:
        return torch.stack([output.start_logits, output.end_logits], -1).float()  # [B, T, 2]

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(logits[..., 0], labels[:, 0]) + F.cross_entropy(logits[..., 1], labels[:, 1])) / 2

    def score(self, answers: list[torch.Tensor], gold: Gold) -> dict[str, float]:
        best = [(-np.inf, "")] * len(gold.questions)
        nothing = np.full(len(gold.questions), np.inf)
        for logits, window in zip(answers, gold.windows, strict=True):
            number, scores = window.question, logits.numpy().astype(np.float64)[: len(window.spans)]
            nothing[number] = min(nothing[number], scores[0].sum())  # all windows must say that there is none
            score, first, last = best_span(scores, window.spans)
            if score > best[number][0]:
                begin, end = window.spans[first, 0], window.spans[last, 1]
                best[number] = score, gold.questions[number].context[begin:end]
        results = []
        for question, (score, answer), none in zip(gold.questions, best, nothing, strict=True):
            predicted = "" if self.may_be_none and none > score else answer
            results.append(metrics.answer(predicted, [text for _, text in question.answers]))
        exact, f1 = np.array(results).mean(0)
        return {"exact_match": float(exact), "f1": float(f1)}


def best_span(scores: np.ndarray, spans: np.ndarray) -> tuple[float, int, int]:
    """The best sum of a start and an end, and their tokens. scores: float64 [T, 2]. −∞ if no token is of the context.

    Only the BEST starts and ends are tried, and a span has 1 to LONGEST_ANSWER tokens.
    """
    (places,) = np.nonzero(spans[:, 1] > spans[:, 0])
    starts, ends = (places[np.argsort(-scores[places, side], kind="stable")[:BEST]] for side in (0, 1))
    sums = scores[starts, 0][:, None] + scores[ends, 1]
    size = ends - starts[:, None]
    sums[(size < 0) | (size >= LONGEST_ANSWER)] = -np.inf
    if not sums.size:
        return -np.inf, 0, 0
    row, column = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[row, column]), int(starts[row]), int(ends[column])


def _entries(path: str) -> Iterator[tuple[str, str, str, Any]]:
    """What _question takes of each question of a file."""
    text = reading.text(path)
    articles = _part(reading.parsed(text, path), "data", list, path)
    reading.refuse_halves(text, path)
    for number, article in enumerate(articles, 1):
        place = f"{path}, article {number:,}"
        for paragraph in _part(article, "paragraphs", list, place):
            context = _part(paragraph, "context", str, place)
            for entry in _part(paragraph, "qas", list, place):
                yield path, place, context, entry


def _question(path: str, place: str, context: str, entry: Any) -> Question:
    """A question with its answers. Raises UsageError, naming the question, for answers that are not in the text.

    place: of the article that it is of.
    """
    text = _part(entry, "question", str, place)
    place = f"{path}, question {entry.get('id', text)!r}"
    listed = [] if entry.get("is_impossible") else _part(entry, "answers", list, place)
    answers = [(_part(answer, "answer_start", int, place), _part(answer, "text", str, place)) for answer in listed]
    for begin, answer in answers:
        if not answer or begin < 0 or context[begin : begin + len(answer)] != answer:
            raise UsageError(
                f"{place}: the answer {answer!r} is not at character {begin} of the text; correct its answer_start, or "
                "remove the question",
                "bad-row",
            )
    return Question(text.strip(), context, answers, place)


def _part(parent: Any, name: str, kind: type[T], place: str) -> T:
    """A part of an object of JSON. Raises UsageError, which names the place, if it is missing or of another kind."""
    part = parent.get(name) if isinstance(parent, dict) else None
    if type(part) is not kind:
        what = {list: "a list", str: "a string", int: "an integer"}[kind]
        raise UsageError(
            f"{place} is not as in a file of SQuAD: it needs {name}, {what}; give JSON with data, paragraphs, context, "
            "qas, question, answers, answer_start and text",
            "not-of-format",
        )
    return part


def _labels(windows: list[Window], questions: list[Question]) -> list[tuple[int, int]]:
    """Return the first and the last token of each window's first answer; 0, 0 if it does not hold all of its tokens.

    Characters without a token, such as white space and soft hyphens, may be at both ends of an answer. White space
    there never counts, as tokens may begin with the space before a word.
    """
    places: list[Any] = []
    ends: dict[int, tuple[int, int]] = {}  # of a question → the characters from its first token to its last one
    for window in windows:
        begin, text = (questions[window.question].answers or [(0, "")])[0]
        begin, end = begin + len(text) - len(text.lstrip()), begin + len(text.rstrip())
        firsts, lasts = window.spans.T
        (inside,) = np.nonzero(np.minimum(lasts, end) > np.maximum(firsts, begin))
        places.append(inside)
        if inside.size:
            first, last = ends.get(window.question, (len(questions[window.question].context), 0))
            ends[window.question] = min(first, firsts[inside[0]]), max(last, lasts[inside[-1]])
    return [
        (int(inside[0]), int(inside[-1]))
        if inside.size and (window.spans[inside[0], 0], window.spans[inside[-1], 1]) == ends[window.question]
        else (0, 0)
        for window, inside in zip(windows, places, strict=True)
    ]


def _warnings(windows: list[Window], questions: list[Question], labels: list[tuple[int, int]]) -> list[str]:
    """Of answers that are not learned."""
    learned = {window.question for window, label in zip(windows, labels, strict=True) if label != (0, 0)}
    lost = [question for number, question in enumerate(questions) if question.answers and number not in learned]
    if not lost:
        return []
    num_lost = counted(len(lost), "answer")
    sentence = f"no row holds all of the answer, or it has no token; the file has {num_lost} that cannot be learned"
    return [f"warning: {lost[0].place}: {sentence}"]
