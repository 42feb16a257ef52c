"""Tags of words: parts of speech, or entities.

A file is CoNLL-like (a word a line, columns between tabs or spaces, a blank line between sentences; also compressed),
or JSON lines or Parquet with a list of words and a list of tags in a row.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification

from bertdata import IGNORE_INDEX
from bertdata.support import UsageError, counted
from bertrain.commands import reading
from bertrain.lab import tables
from bertrain.lab.tasks import metrics
from bertrain.lab.tasks.base import Data, Task, ordered, rows_of

SHOWN = 5  # tags that a message lists
_MARKER = "-DOCSTART-"  # the word of CoNLL-2003 that stands between documents


_FORMS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<letter>[BIESLUMW])[-_:./|](?P<kind>.+)",  # B-LOC
        r"(?P<kind>.+)[-_:./|](?P<letter>[BIESLUMW])",  # LOC-B
        r"(?P<letter>[BIESLUMW])(?P<kind>)",  # B
        r"(?P<letter>)(?P<kind>.+)",  # LOC
    )
)
"""How the tags of entities may be written. A file has one of these forms."""
_LETTERS = {"": "I", "L": "E", "U": "S", "M": "I", "W": "S"}
"""A letter of BILOU or BMEW → the letter of BIOES with the same meaning."""


class Sentence(NamedTuple):
    """The words of a sentence, and a tag for each."""

    words: list[str]
    tags: list[str]
    place: str  # "file, line n" of its first word


class Gold(NamedTuple):
    """What predictions are compared with: the sentences, and where their words are in the rows."""

    sentences: list[Sentence]
    places: list[dict[int, int]]  # of each row: a word's number → the place of its first token


class Words(Task):
    """A tag for each word. It is learned and predicted at the word's first token."""

    head = AutoModelForTokenClassification

    def read(self, path: str) -> tuple[list[Sentence], list[str]]:
        is_table = re.search(r"\.(jsonl|json|parquet)(\.(gz|gzip|bgz|bz2|xz|zst|zstd))?$", path.lower())
        sentences = (_lists if is_table else _lines)(path, self.columns.text, self.columns.label)
        if not sentences:
            sentence = f"{path} holds no sentences; give a word a line, and a blank line behind each sentence"
            raise UsageError(sentence, "empty", given=path)
        return sentences, []

    def learn(self, train: list[Sentence]) -> list[str]:
        self.names = ordered({tag for sentence in train for tag in sentence.tags})
        self.form = _form_of(train, self.names)
        self.main = "entity_f1" if self.form else "accuracy"
        path = train[0].place.rpartition(", ")[0]
        if self.form is None:
            listed = ", ".join(self.names[:SHOWN])
            return [f"{path}: the tags ({listed}) are not entity tags such as B-LOC, so only accuracy is measured"]
        if self.form is _FORMS[-1] and self.names not in (["O"], ["o"]):
            return [f"{path}: the tags have no B- or I-, so neighbouring words with the same tag count as one entity"]
        return []

    def encode(self, tokenizer: Any, examples: list[Sentence], length: int) -> tuple[Data, list[str]]:
        assert self.names is not None  # noqa: S101  (learn came before)
        tokenizer.padding_side = "right"  # as labels are padded
        texts = [" ".join(sentence.words) for sentence in examples]
        encoded = tokenizer(texts, truncation=True, max_length=length, return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")
        rows = rows_of(encoded)
        gold = Gold(examples, [_first_tokens(s.words, o) for s, o in zip(examples, offsets, strict=True)])
        numbers = {name: number for number, name in enumerate(self.names)}
        labels = torch.full((len(rows), max(len(row["input_ids"]) for row in rows)), IGNORE_INDEX)
        for row, sentence, places in zip(labels, examples, gold.places, strict=True):
            for word, place in places.items():
                row[place] = numbers.get(sentence.tags[word], IGNORE_INDEX)
        return Data(rows, labels, gold), self._warnings(gold, length)

    def _warnings(self, gold: Gold, length: int) -> list[str]:
        """Of words that were cut off, and of tags that the model cannot know."""
        num_words = sum(len(sentence.words) for sentence in gold.sentences)
        num_cut = num_words - sum(map(len, gold.places))
        warnings, path = [], gold.sentences[0].place.rpartition(", ")[0]
        if num_cut:
            warnings.append(
                f"warning: {path}: {num_cut:,} of {num_words:,} words are beyond --length {length} or have no token; "
                "they are not trained on, and count as wrong"
            )
        unknown = [(s.place, tag) for s in gold.sentences for tag in s.tags if tag not in self.names]  # type: ignore[operator]  # learned before
        if unknown:
            warnings.append(
                f"warning: {unknown[0][0]}: the sentence has the tag {unknown[0][1]!r}, which is never trained on; "
                f"such tags count as wrong, in this file those of {counted(len(unknown), 'word')}"
            )
        return warnings

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = labels[:, : logits.shape[1]]  # [B, T]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        return total / (labels != IGNORE_INDEX).sum().clamp(min=1)

    def answer(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def score(self, answers: list[torch.Tensor], gold: Gold) -> dict[str, float]:
        assert self.names is not None  # noqa: S101  (learn came before)
        predicted, tags = [], [sentence.tags for sentence in gold.sentences]
        num_right = num_words = 0
        for answer, theirs, places in zip(answers, tags, gold.places, strict=True):
            of_token = answer.tolist()
            mine = {word: self.names[of_token[place]] for word, place in places.items()}
            num_right, num_words = num_right + sum(theirs[w] == tag for w, tag in mine.items()), num_words + len(theirs)
            predicted.append([mine.get(word, "O") for word in range(len(theirs))])
        accuracy = {"accuracy": num_right / num_words}
        if form := self.form:
            sides = ([[_bioes(tag, form) for tag in each] for each in side] for side in (predicted, tags))
            return metrics.entity_f1(*sides) | accuracy
        return accuracy


def _form_of(train: list[Sentence], names: list[str]) -> re.Pattern[str] | None:
    """How tags of entities are written; None if they are not tags of entities.

    Raises UsageError, which names the sentence, for a tag without a letter among tags with one.
    """
    inside = [name for name in names if name.upper() != "O"]
    for form in _FORMS[:-1] if inside else ():
        if all(form.fullmatch(name) for name in inside):
            return form
    begin = "[BI][-_:./|]" if len(inside) < len(names) else "[BI]-"  # without O they may be parts of speech
    if any(re.match(begin, name, re.IGNORECASE) for name in inside):
        wrong = {name for name in inside if not _FORMS[0].fullmatch(name)}
        tag, place = next((tag, s.place) for s in train for tag in s.tags if tag in wrong)
        sentence = (
            f"{place}: the sentence has the tag {tag!r}, and others are like {min({*inside} - wrong, default='B-LOC')}"
        )
        raise UsageError(f"{sentence}; write it as O, or as a letter of BIOES or BILOU and a kind", "bad-row")
    return _FORMS[-1] if len(inside) < len(names) else None


def _bioes(tag: str, form: re.Pattern[str]) -> str:
    """A tag of an entity as `metrics.entities` reads it; one of another form as it is."""
    if tag.upper() == "O":
        return "O"
    if not (match := form.fullmatch(tag)):
        return tag
    letter = match["letter"].upper()
    return f"{_LETTERS.get(letter, letter)}-{match['kind']}"


def _first_tokens(words: list[str], offsets: list[tuple[int, int]]) -> dict[int, int]:
    """A word's number → the place of its first token, in the words joined by spaces.

    offsets: the characters of each token. A token belongs to the word that its last character is in, as the token of a
    byte-level tokenizer may begin with the space before a word. Words that were cut off are left out.
    """
    word_of = []  # of each character; −1: a space
    for number, word in enumerate(words):
        word_of += [number] * len(word) + [-1]
    first: dict[int, int] = {}
    for place, (begin, end) in enumerate(offsets):
        if end > begin and word_of[end - 1] >= 0:
            first.setdefault(word_of[end - 1], place)
    return first


def _lists(path: str, text: str, label: str) -> list[Sentence]:
    table = tables.table(path, {"text": text, "label": label})
    sentences = []
    for words, tags, place in zip(table.values("text"), table.values("label"), table.places, strict=True):
        are_lists = isinstance(words, list) and isinstance(tags, list)
        if not are_lists or not words or not all(words) or any(tag in (None, "") for tag in tags):
            raise UsageError(
                f"{place}: the columns of --text and --label must be lists of words and of tags, and none "
                "empty; correct the row, or name other columns",
                "wrong-column-type",
            )
        if len(words) != len(tags):
            raise UsageError(f"{place} has {len(words)} words and {len(tags)} tags; give each word one tag", "bad-row")
        sentences.append(Sentence([str(word) for word in words], [str(tag) for tag in tags], place))
    return sentences


def _lines(path: str, text: str, label: str) -> list[Sentence]:
    """A word a line. Files named .conllu have comments, ranges of words and empty words, which are left out."""
    for option, column in (("text", text), ("label", label)):
        if not tables.is_number(column):
            sentence = f"--{option} {column}: the columns of {path} have no names; give the number, from 0"
            raise UsageError(sentence, "malformed", option=option, given=column)
    lines = re.split("\r{,2}\n|\r", reading.text(path))
    is_universal = ".conllu" in Path(path).name.lower()
    sentences: list[Sentence] = []
    inside = False
    for number, line in enumerate([*lines, ""], 1):
        cells = line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]
        cells = [cell.strip(" ") for cell in cells]  # any other space is part of a word
        if is_universal and (line.startswith("#") or (any(cells) and not cells[0].isdigit())):
            continue
        if not any(cells) or _MARKER in cells:
            inside = False
            continue
        try:
            word, tag = cells[int(text)], cells[int(label)]
        except IndexError:
            raise UsageError(
                f"{path}, line {number} has {len(cells)} columns, so no column {text} for --text or {label} for "
                "--label; give columns that every line has",
                "no-column",
            ) from None
        if not word or not tag or len(cells) < 2:
            raise UsageError(
                f"{path}, line {number} has no word or no tag; give a line a word, its columns and its tag", "bad-row"
            )
        if not inside:
            sentences.append(Sentence([], [], f"{path}, line {number}"))
            inside = True
        sentences[-1].words.append(word)
        sentences[-1].tags.append(tag)
    return sentences
