"""Tasks of SuperGLUE (Wang et al., 2019) and CLUE (Xu et al., 2020) in files that no other task reads: JSON lines."""

from __future__ import annotations

import re
from typing import Any

import torch

from bertdata.support import UsageError
from bertrain.lab.tables import text_of
from bertrain.lab.tasks.base import Data, Example, whole
from bertrain.lab.tasks.choices import QUESTION, Choices
from bertrain.lab.tasks.texts import Classification

_ASKED = {"cause": "What was the cause?", "effect": "What happened then?"}


class Causes(Choices):
    """Which of two sentences is the cause, or the effect, of a text: files of COPA (Roemmele et al., 2011)."""

    fixed = {"text": "premise", "other": "question", "label": "label"}
    needs_all_columns = True

    def examples(self, part: Any, place: str) -> list[Example]:
        if (question := str(part["question"])) not in _ASKED:
            sentence = f"{place}: the question is {question!r}; give cause or effect, as COPA asks for these"
            raise UsageError(sentence, "bad-row")
        choices = [part.get("choice1"), part.get("choice2")]
        return super().examples(part | {QUESTION: _ASKED[question], "other": choices}, place)


class _Marked(Classification):
    """Classes of texts with marks around some words. A copy with other words would have these elsewhere."""

    taught = None  # type: ignore[assignment]

    def marked(self, text: str, spans: list[tuple[int, int, str]]) -> str:
        """Return a text with two marks around each span, (begin, end, marks)."""
        ends = [end for begin, last, marks in spans for end in ((begin, 1, marks[0]), (last, 0, marks[1]))]
        for where, _, mark in sorted(ends, reverse=True):  # from the end, so that places stay true
            text = text[:where] + mark + text[where:]
        return text


class Senses(_Marked):
    """Whether a word means the same in two sentences: files of WiC (Pilehvar and Camacho-Collados, 2019).

    The model reads both sentences with [marks] around the word.
    """

    fixed = {"text": "sentence1", "other": "sentence2", "label": "label"}
    needs_all_columns = True

    def examples(self, part: Any, place: str) -> list[Example]:
        marked = []
        for side in "12":
            text, begin, end = str(part[f"sentence{side}"]), part.get(f"start{side}"), part.get(f"end{side}")
            if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin < end <= len(text)):
                sentence = f"{place}: start{side} and end{side} must be the first character of a word of sentence{side}"
                raise UsageError(f"{sentence} and the one behind it, as in WiC; correct them", "bad-row")
            marked.append(self.marked(text, [(begin, end, "[]")]))
        return [Example(marked[0], marked[1], part["label"], place)]


class Coreference(_Marked):
    """Whether a pronoun means a noun of its text: files of CLUEWSC (Xu et al., 2020), and of SuperGLUE's WSC.

    The column `target` says where both are: span1_text at span1_index is the noun, span2_… the pronoun. CLUEWSC counts
    characters, and SuperGLUE words between spaces. The model reads the text with _marks_ around the noun and [marks]
    around the pronoun.
    """

    fixed = {"other": "target"}

    def examples(self, part: Any, place: str) -> list[Example]:
        text, target = text_of(part["text"]), part["other"]
        firsts = dict(enumerate(match.start() for match in re.finditer(r"\S+", text)))  # of words
        try:
            words = [str(target[f"{span}_text"]) for span in ("span1", "span2")]
            indices = [whole(target[f"{span}_index"]) for span in ("span1", "span2")]
        except (KeyError, TypeError, ValueError):
            words, indices = ["", ""], [-1, -1]
        for starts in ([firsts.get(index, -1) for index in indices], indices):
            spans = [(begin, begin + len(word)) for begin, word in zip(starts, words, strict=True)]
            found = [text[begin:end].lower() if begin >= 0 else "" for begin, end in spans]  # WSC has other capitals
            if all(words) and found == [word.lower() for word in words]:
                marks = [(*span, mark) for span, mark in zip(spans, ("__", "[]"), strict=True)]
                return [Example(self.marked(text, marks), None, part["label"], place)]
        sentence = f"{place}: target needs span1_text at span1_index of the text and span2_text at span2_index, as in "
        raise UsageError(f"{sentence}CLUEWSC, counted in characters or in words; correct the row", "bad-row")


class Answers(Classification):
    """Which of several answers to a question about a text are right, any number of them: files of MultiRC.

    (Khashabi et al., 2018.) A row is the text, and a question with one answer. exact_match: the share of questions
    whose answers are all judged rightly.
    """

    main = "f1"
    fixed = {"text": "passage", "label": "idx"}
    taught = None  # type: ignore[assignment]  # a row of the file is many examples

    def examples(self, part: Any, place: str) -> list[Example]:
        examples = []
        try:
            passage = part["text"]
            for number, asked in enumerate(passage["questions"], 1):
                for answer in asked["answers"]:
                    pair = str(passage["text"]), f"{asked['question']} {answer['text']}"
                    examples.append(Example(*pair, whole(answer["label"]), f"{place}, question {number}"))
        except (KeyError, TypeError, ValueError):
            sentence = f"{place}: passage needs text and questions, each with question and answers, and these with text"
            raise UsageError(f"{sentence} and label, as in MultiRC; correct the row", "bad-row") from None
        return examples

    def encode(self, tokenizer: Any, examples: list[Example], length: int) -> tuple[Data, list[str]]:
        data, warnings = super().encode(tokenizer, examples, length)
        return data._replace(gold=(data.labels, [example.place for example in examples])), warnings

    def score(self, answers: list[torch.Tensor], gold: Any) -> dict[str, float]:
        labels, questions = gold  # int64 [N], and what each belongs to
        is_right = torch.stack(answers).argmax(-1) == labels
        missed = {question for question, right in zip(questions, is_right.tolist(), strict=True) if not right}
        return super().score(answers, labels) | {"exact_match": 1 - len(missed) / len({*questions})}
