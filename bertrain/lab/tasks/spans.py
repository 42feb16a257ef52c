"""Answers to questions, as spans of a text: files of SQuAD v1 and v2 (Rajpurkar et al., 2016 and 2018).

A text that is longer than a row is cut into windows that overlap by a third of --length. The answer is the best span of
all windows of a question. If some training questions have no answer, "no answer" is a span too: the first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForQuestionAnswering

from bertdata.support import UsageError
from bertrain.commands import reading
from bertrain.lab.tasks import metrics
from bertrain.lab.tasks.base import Data, Example, Task, rows_of

LONGEST_QUESTION = 64  # tokens; longer questions are cut, at half a row for --length below 128
LONGEST_ANSWER = 30  # tokens in a predicted answer
BEST = 20  # starts and ends to try in each window
SHORTEST_ROW = 32


class Window(NamedTuple):
    """A row: a question and a part of its context, which may be too long for one row."""

    question: int  # number of the question
    spans: np.ndarray  # int64 [T, 2]: characters [first, stop) of each context token; 0, 0 for others


class Spans(Task):
    """The first and the last token of an answer.

    In an example, `other` is the context, and `label` the answers, each with the offset of its first character.
    """

    head, main = AutoModelForQuestionAnswering, "f1"
    num_labels = 2  # a start and an end
    expected = layout = "SQuAD's JSON has data, paragraphs, context, qas, question, answers, answer_start and text"
    may_be_none = False  # whether a question may have no answer

    def parts(self, path: str) -> Iterator[tuple[Any, str]]:
        for article in reading.parsed(reading.text(path), path)["data"]:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    answers = [] if entry.get("is_impossible") else entry.get("answers")
                    part = {"text": entry["question"], "other": paragraph["context"], "label": answers}
                    yield part, f"{path}, question {entry.get('id', part['text'])!r}"

    def examples(self, part: Any, place: str) -> list[Example]:
        context = part["other"]
        answers = [(answer["answer_start"], answer["text"]) for answer in part["label"]]
        for begin, text in answers:
            if begin < 0 or not text or not context.startswith(text, begin):
                sentence = f"{place}: the answer {text!r} is not at character {begin} of the text"
                raise UsageError(f"{sentence}; correct its answer_start, or remove the question", "bad-row")
        return [Example(part["text"].strip(), context + "", answers, place)]

    def learn(self, train: list[Example]) -> None:
        self.may_be_none = any(not question.label for question in train)

    def encode(self, tokenizer: Any, examples: list[Example], length: int) -> tuple[Data, list[str]]:
        if length < SHORTEST_ROW:
            sentence = f"--length {length} is too short for a question and a text; give at least {SHORTEST_ROW}"
            raise UsageError(sentence, "out-of-range", option="length", given=length)
        tokenizer.padding_side = "right"  # token positions of answers count from the left
        texts, contexts, *_ = (list(column) for column in zip(*examples, strict=True))
        most = min(LONGEST_QUESTION, length // 2)
        cut = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        texts = [t[: o[most - 1][1]] if len(o) > most else t for t, o in zip(texts, cut, strict=True)]
        windowed = {"stride": length // 3, "return_overflowing_tokens": True, "return_offsets_mapping": True}
        encoded = tokenizer(texts, contexts, truncation="only_second", max_length=length, **windowed)
        numbers, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        windows = []
        for row, (number, spans) in enumerate(zip(numbers, offsets, strict=True)):
            inside = np.array([part == 1 for part in encoded.sequence_ids(row)])
            windows.append(Window(number, np.where(inside[:, None], np.array(spans), 0)))
        labels = _labels(windows, examples)
        learned = {window.question for window, label in zip(windows, labels, strict=True) if label != (0, 0)}
        lost = [question.place for number, question in enumerate(examples) if question.label and number not in learned]
        said = f"no row holds the whole answer; answers that are not learned: {len(lost):,}"
        warnings = [f"warning: {place}: {said}" for place in lost[:1]]
        return Data(rows_of(encoded), torch.tensor(labels), (examples, windows)), warnings

    def logits(self, output: Any) -> torch.Tensor:
        return torch.stack([output.start_logits, output.end_logits], -1).float()  # [B, T, 2]

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(logits[..., 0], labels[:, 0]) + F.cross_entropy(logits[..., 1], labels[:, 1])) / 2

    def score(self, answers: list[torch.Tensor], gold: tuple[list[Example], list[Window]]) -> dict[str, float]:
        questions, windows = gold
        best = [(-np.inf, "")] * len(questions)
        nothing = np.full(len(questions), np.inf)
        for logits, (number, spans) in zip(answers, windows, strict=True):
            scores = logits.numpy().astype(np.float64)[: len(spans)]
            nothing[number] = min(nothing[number], scores[0].sum())  # "no answer" must win in all windows
            score, first, last = best_span(scores, spans)
            answer = questions[number].other[spans[first, 0] : spans[last, 1]]
            best[number] = max(best[number], (score, answer), key=lambda pair: pair[0])
        results = []
        for question, (score, answer), none in zip(questions, best, nothing, strict=True):
            predicted = "" if self.may_be_none and none > score else answer
            results.append(metrics.answer(predicted, [text for _, text in question.label]))
        exact, f1 = np.array(results).mean(0)
        return {"exact_match": float(exact), "f1": float(f1)}


def best_span(scores: np.ndarray, spans: np.ndarray) -> tuple[float, int, int]:
    """Return the best sum of a start and an end score, and their tokens; −∞ if no token belongs to the context.

    scores: float64 [T, 2]. Only the BEST starts and ends are tried, and a span has 1 to LONGEST_ANSWER tokens.
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


def _labels(windows: list[Window], questions: list[Example]) -> list[tuple[int, int]]:
    """Return the first and last token of each window's first answer; 0, 0 if the window lacks some of its tokens.

    Characters without a token, such as white space and soft hyphens, may be at both ends of an answer. White space
    there never counts, as tokens may begin with the space before a word.
    """
    places: list[tuple[int, int]] = []
    ends: dict[int, tuple[int, int]] = {}  # question → character span of its answer's tokens
    for number, spans in windows:
        begin, text = (questions[number].label or [(0, "")])[0]
        begin, end = begin + len(text) - len(text.lstrip()), begin + len(text.rstrip())
        (inside,) = np.nonzero(np.minimum(spans[:, 1], end) > np.maximum(spans[:, 0], begin))
        places.append((int(inside[0]), int(inside[-1])) if inside.size else (0, 0))
        if inside.size:
            first, last = ends.get(number, (len(questions[number].other), 0))
            ends[number] = min(first, spans[inside[0], 0]), max(last, spans[inside[-1], 1])
    return [
        (first, last) if (spans[first, 0], spans[last, 1]) == ends.get(number) else (0, 0)
        for (number, spans), (first, last) in zip(windows, places, strict=True)
    ]
