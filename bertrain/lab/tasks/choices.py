"""Multiple choice, and other tasks of SuperGLUE (Wang et al., 2019) and CLUE (Xu et al., 2020).

Choices are in JSON lines or Parquet, or in files of C3 (Sun et al., 2020); the other tasks have JSON lines.

Each choice becomes a separate row, a text and the choice, with a score for whether it is right. The choice with the
highest score is the answer. So questions may have any number of choices, and every classification model works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from bertrain.commands import reading
from bertrain.lab.tables import text_of
from bertrain.lab.tasks.base import Data, Example, Task, integer, rows_of
from bertrain.lab.tasks.texts import Classification


class Choices(Task):
    """One of the choices of a question. In an example, `other` has the choices, and the label is the right number."""

    head, main = AutoModelForSequenceClassification, "accuracy"
    problem_type = "multi_label_classification"  # each score is a separate probability
    expected = "--other must be a list of two or more texts, and --label one of them or its number from 0"
    layout = "a list in a .json file must be that of C3; any other file has one JSON object in each line"

    def files(self, path: str) -> list[str]:
        """Return the path and, for the dialogues of C3 (d-train.json), also its other texts (m-train.json)."""
        file = Path(path)
        other = file.with_name(f"m{file.name[1:]}") if file.name.startswith("d-") and _is_list(path) else file
        return [path, *([str(other)] if other != file and other.is_file() else [])]

    def parts(self, path: str) -> Iterable[tuple[Any, str]]:
        return (part for file in self.files(path) for part in _of_c3(file)) if _is_list(path) else super().parts(path)

    def examples(self, part: Any, place: str) -> list[Example]:
        choices, answer = part["other"], part["label"]
        choices = json.loads(choices) if isinstance(choices, str) else choices
        if not isinstance(choices, list) or len(choices) < 2 or {*map(type, choices)} != {str}:
            raise ValueError
        number = choices.index(answer) if answer in choices else range(len(choices)).index(integer(answer))
        asked = [f"{part.get('question', '')} {choice}".strip() for choice in choices]
        return [Example(text_of(part["text"]), asked, number, place)]

    def encode(self, tokenizer: Any, examples: list[Example], length: int) -> tuple[Data, list[str]]:
        rows = [
            (each.text, choice, number == each.label) for each in examples for number, choice in enumerate(each.other)
        ]
        texts, others, right = (list(side) for side in zip(*rows, strict=True))
        encoded = tokenizer(texts, others, truncation=True, max_length=length)  # shortens the longer text of a pair
        return Data(rows_of(encoded), torch.tensor(right, dtype=torch.float32), examples), []

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels)

    def score(self, answers: list[torch.Tensor], gold: list[Example]) -> dict[str, float]:
        scores = torch.cat(answers).split([len(each.other) for each in gold])
        right = [int(mine.argmax()) == each.label for mine, each in zip(scores, gold, strict=True)]
        return {"accuracy": sum(right) / len(right)}


def _is_list(path: str) -> bool:
    """Return whether a JSON file is one list, as in C3, and not one row per line."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return path.lower().endswith(".json") and file.read(1000).lstrip().startswith("[")
    except (OSError, ValueError):
        return False  # tables.read reports the error


def _of_c3(path: str) -> Iterator[tuple[Any, str]]:
    """Yield the questions in a file of C3, a list of [lines of the text, questions, name]."""
    texts = reading.parsed(reading.text(path), path)
    for number, (lines, entry) in enumerate(((lines, entry) for lines, asked, *_ in texts for entry in asked), 1):
        part = {"question": entry["question"].strip(), "other": entry["choice"], "label": entry["answer"]}
        yield {"text": "\n".join([] + lines), **part}, f"{path}, question {number:,}"


# --------------------------------------------------------------------------------------------------- suites

_ASKED = {"cause": "What was the cause?", "effect": "What happened then?"}


class Causes(Choices):
    """Which of two sentences is the cause, or the effect, of a text: files of COPA (Roemmele et al., 2011)."""

    fixed = {"text": "premise", "other": "question", "label": "label", "choice1": "choice1", "choice2": "choice2"}
    expected = "question must be cause or effect, choice1 and choice2 texts, and label 0 or 1, as in COPA"

    def examples(self, part: Any, place: str) -> list[Example]:
        choices = [part["choice1"], part["choice2"]]
        return super().examples(part | {"question": _ASKED[part["other"]], "other": choices}, place)


class _Marked(Classification):
    """Classes of texts with marks around some words. Copies with replaced words would move the marks."""

    taught = None  # type: ignore[assignment]

    def marked(self, text: str, spans: list[tuple[int, int, str]]) -> str:
        """Return a text with two marks around each span (begin, end, marks)."""
        ends = [end for begin, last, marks in spans for end in ((begin, 1, marks[0]), (last, 0, marks[1]))]
        for where, _, mark in sorted(ends, reverse=True):  # from the end, so that earlier offsets stay valid
            text = text[:where] + mark + text[where:]
        return text


class Senses(_Marked):
    """Whether a word means the same in two sentences: files of WiC (Pilehvar and Camacho-Collados, 2019).

    The model reads both sentences with [marks] around the word.
    """

    fixed = {"text": "sentence1", "other": "sentence2", "label": "label"}
    fixed |= {name: name for name in ("start1", "end1", "start2", "end2")}
    expected = "start1 and end1 must be the first character of a word of sentence1 and the one behind it, as in WiC"

    def examples(self, part: Any, place: str) -> list[Example]:
        marked = []
        for side, role in (("1", "text"), ("2", "other")):
            text, begin, end = str(part[role]), part[f"start{side}"], part[f"end{side}"]
            if not 0 <= begin < end <= len(text):
                raise ValueError
            marked.append(self.marked(text, [(begin, end, "[]")]))
        return [Example(marked[0], marked[1], part["label"], place)]


class Coreference(_Marked):
    """Whether a pronoun means a noun of its text: files of CLUEWSC (Xu et al., 2020), and of SuperGLUE's WSC.

    The column `target` has the position of both: span1_text at span1_index is the noun, span2_… the pronoun. CLUEWSC
    counts characters, and SuperGLUE words between spaces. The model reads the text with _marks_ around the noun and
    [marks] around the pronoun.
    """

    fixed = {"other": "target"}
    expected = "target needs span1_text at span1_index of the text, and span2_text at span2_index, as in CLUEWSC"

    def examples(self, part: Any, place: str) -> list[Example]:
        text, target = text_of(part["text"]), part["other"]
        firsts = dict(enumerate(match.start() for match in re.finditer(r"\S+", text)))  # word number → offset
        words = [str(target[f"{span}_text"]) for span in ("span1", "span2")]
        indices = [integer(target[f"{span}_index"]) for span in ("span1", "span2")]
        for starts in ([firsts.get(index, -1) for index in indices], indices):
            spans = [(begin, begin + len(word)) for begin, word in zip(starts, words, strict=True)]
            there = [text[begin:end].lower() if begin >= 0 else "" for begin, end in spans]  # WSC has other letter case
            if all(words) and there == [word.lower() for word in words]:
                marks = [(*span, mark) for span, mark in zip(spans, ("__", "[]"), strict=True)]
                return [Example(self.marked(text, marks), None, part["label"], place)]
        raise ValueError


class Answers(Classification):
    """Which answers to a question about a text are right, any number of them: files of MultiRC (Khashabi et al., 2018).

    A row is the text, and a question with one answer. exact_match: the share of questions for which the model judges
    all answers correctly.
    """

    main = "f1"
    fixed = {"text": "passage", "label": "idx"}
    taught = None  # type: ignore[assignment]  # a row of the file is many examples
    expected = "passage needs text and questions, each with question and answers, and these with text and label"

    def examples(self, part: Any, place: str) -> list[Example]:
        passage, examples = part["text"], []
        for number, asked in enumerate(passage["questions"], 1):
            for answer in asked["answers"]:
                pair = str(passage["text"]), f"{asked['question']} {answer['text']}"
                examples.append(Example(*pair, integer(answer["label"]), f"{place}, question {number}"))
        return examples

    def encode(self, tokenizer: Any, examples: list[Example], length: int) -> tuple[Data, list[str]]:
        data, warnings = super().encode(tokenizer, examples, length)
        return data._replace(gold=(data.labels, [example.place for example in examples])), warnings

    def score(self, answers: list[torch.Tensor], gold: Any) -> dict[str, float]:
        labels, questions = gold  # int64 [N], and the question of each
        is_right = torch.stack(answers).argmax(-1) == labels
        missed = {question for question, right in zip(questions, is_right.tolist(), strict=True) if not right}
        return super().score(answers, labels) | {"exact_match": 1 - len(missed) / len({*questions})}
