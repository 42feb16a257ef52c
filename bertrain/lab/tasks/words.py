"""Tags of words: parts of speech, or entities.

A file is CoNLL-like (a word per line, columns between tabs or spaces, a blank line between sentences; also compressed),
or JSON lines or Parquet with a list of words and a list of tags in a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification

from bertdata import IGNORE_INDEX
from bertdata.support import UsageError, counted
from bertrain.commands import reading
from bertrain.lab.tasks import metrics
from bertrain.lab.tasks.base import Data, Example, Task, ordered, rows_of

_MARKER = "-DOCSTART-"  # the word between documents in CoNLL-2003
_LETTER = "(?P<letter>[BIESLUMW])"
_FORMS = (
    re.compile(_LETTER + "[-_:./|](?P<kind>.+)", re.IGNORECASE),  # B-LOC
    re.compile("(?P<kind>.+)[-_:./|]" + _LETTER, re.IGNORECASE),  # LOC-B
    re.compile(_LETTER + "(?P<kind>)", re.IGNORECASE),  # B
    re.compile("(?P<letter>)(?P<kind>.+)"),  # LOC
)
"""The possible forms of entity tags. All tags of a file have the same form."""
_LETTERS = {"": "I", "L": "E", "U": "S", "M": "I", "W": "S"}
"""A letter of BILOU or BMEW → the letter of BIOES with the same meaning."""


class Words(Task):
    """A tag for each word, which is learned and predicted at the word's first token.

    An example is a sentence: `text` is a list of words, `label` a list of tags.
    """

    head = AutoModelForTokenClassification
    expected = "--text and --label must be a list of words and one of as many tags, none empty"
    layout = "--text and --label must be the numbers of the columns of words and tags"

    def parts(self, path: str) -> Iterable[tuple[Any, str]]:
        is_table = re.search(r"\.(jsonl|json|parquet)(\.(gz|gzip|bgz|bz2|xz|zst|zstd))?$", path.lower())
        return super().parts(path) if is_table else _lines(path, self.roles["text"], self.roles["label"])

    def examples(self, part: Any, place: str) -> list[Example]:
        words, tags = part["text"], part["label"]
        are_lists = isinstance(words, list) and isinstance(tags, list) and len(words) == len(tags) > 0
        if not are_lists or not all(words) or any(tag in (None, "") for tag in tags):
            raise ValueError
        return [Example([str(word) for word in words], None, [str(tag) for tag in tags], place)]

    def learn(self, train: list[Example]) -> None:
        self.names = ordered({tag for sentence in train for tag in sentence.label})
        self.form = _form_of(train, self.names)
        self.main = "entity_f1" if self.form else "accuracy"

    def encode(self, tokenizer: Any, examples: list[Example], length: int) -> tuple[Data, list[str]]:
        tokenizer.padding_side = "right"  # because labels are padded on the right
        texts = [" ".join(sentence.text) for sentence in examples]
        encoded = tokenizer(texts, truncation=True, max_length=length, return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")
        rows = rows_of(encoded)
        first_tokens = [_first_tokens(s.text, o) for s, o in zip(examples, offsets, strict=True)]
        numbers = {name: number for number, name in enumerate(self.names or ())}
        labels = torch.full((len(rows), max(len(row["input_ids"]) for row in rows)), IGNORE_INDEX)
        for row, sentence, firsts in zip(labels, examples, first_tokens, strict=True):
            for word, place in firsts.items():
                row[place] = numbers.get(sentence.label[word], IGNORE_INDEX)
        num_words, warnings = sum(len(sentence.text) for sentence in examples), []
        if num_cut := num_words - sum(map(len, first_tokens)):
            what = f"{num_cut:,} of {num_words:,} words are beyond --length {length} or have no token"
            path = examples[0].place.rpartition(", ")[0]
            warnings.append(f"warning: {path}: {what}; they are not trained on, and count as wrong")
        if unknown := [(s.place, tag) for s in examples for tag in s.label if tag not in numbers]:
            what = f"the sentence has the tag {unknown[0][1]!r}, which is never trained on"
            words = counted(len(unknown), "word")
            warnings.append(f"warning: {unknown[0][0]}: {what}; such tags count as wrong, here those of {words}")
        return Data(rows, labels, (examples, first_tokens)), warnings

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = labels[:, : logits.shape[1]]  # [B, T]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        return total / (labels != IGNORE_INDEX).sum().clamp(min=1)

    def answer(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def score(self, answers: list[torch.Tensor], gold: Any) -> dict[str, float]:
        """Return measures. gold: the sentences, and for each row word number → index of its first token."""
        predicted, tags, names = [], [sentence.label for sentence in gold[0]], self.names or []
        num_right = 0
        for answer, theirs, firsts in zip(answers, tags, gold[1], strict=True):
            of_token = answer.tolist()
            mine = {word: names[of_token[place]] for word, place in firsts.items()}
            num_right += sum(theirs[word] == tag for word, tag in mine.items())
            predicted.append([mine.get(word, "O") for word in range(len(theirs))])
        accuracy = {"accuracy": num_right / sum(map(len, tags))}
        if not self.form:
            return accuracy
        sides = ([[_bioes(tag, self.form) for tag in each] for each in side] for side in (predicted, tags))
        return metrics.entity_f1(*sides) | accuracy


def _form_of(train: list[Example], names: list[str]) -> re.Pattern[str] | None:
    """Return the form of entity tags; None if the tags are not entity tags.

    Raises UsageError, which names the sentence, if only some tags have a letter such as B.
    """
    inside = [name for name in names if name.upper() != "O"]
    for form in _FORMS[:-1] if inside else ():
        if all(form.fullmatch(name) for name in inside):
            return form
    begin = "[BI][-_:./|]" if len(inside) < len(names) else "[BI]-"  # without O, they may be parts of speech
    if any(re.match(begin, name, re.IGNORECASE) for name in inside):
        wrong = {name for name in inside if not _FORMS[0].fullmatch(name)}
        tag, place = next((tag, s.place) for s in train for tag in s.label if tag in wrong)
        sentence = f"{place}: the sentence has the tag {tag!r}, and others have a letter such as B- before a kind"
        raise UsageError(f"{sentence}; write it as O, or as a letter of BIOES or BILOU and a kind", "bad-row")
    return _FORMS[-1] if len(inside) < len(names) else None


def _bioes(tag: str, form: re.Pattern[str]) -> str:
    """Return an entity tag in the form of `metrics.entities`; a tag of a different form is unchanged."""
    if tag.upper() == "O" or not (match := form.fullmatch(tag)):
        return {"o": "O"}.get(tag, tag)
    letter = match["letter"].upper()
    return f"{_LETTERS.get(letter, letter)}-{match['kind']}"


def _first_tokens(words: list[str], offsets: list[tuple[int, int]]) -> dict[int, int]:
    """Return word number → index of its first token, for words joined by spaces.

    offsets: the characters of each token. A token belongs to the word of its last character, as a token of a byte-level
    tokenizer may begin with the space before a word. Words that were cut off are omitted.
    """
    word_of = []  # word number of each character; −1: a space
    for number, word in enumerate(words):
        word_of += [number] * len(word) + [-1]
    first: dict[int, int] = {}
    for place, (begin, end) in enumerate(offsets):
        if end > begin and word_of[end - 1] >= 0:
            first.setdefault(word_of[end - 1], place)
    return first


def _lines(path: str, text: str, label: str) -> Iterator[tuple[Any, str]]:
    """Yield the sentences of a file with a word in each line, and their locations.

    Files named .conllu have comments, ranges of words and empty words, which are skipped.
    """
    numbers, is_universal = [int(text), int(label)], ".conllu" in Path(path).name.lower()
    part, place = {"text": list[str](), "label": list[str]()}, ""
    for number, line in enumerate([*re.split("\r{,2}\n|\r", reading.text(path)), ""], 1):
        cells = line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]
        cells = [cell.strip(" ") for cell in cells]  # other white space is part of a word
        if is_universal and (line.startswith("#") or (any(cells) and not cells[0].isdigit())):
            continue
        if not any(cells) or _MARKER in cells:
            if place:
                yield part, place
            part, place = {"text": [], "label": []}, ""
            continue
        word, tag = (cells[column] if -len(cells) <= column < len(cells) else "" for column in numbers)
        if not word or not tag or len(cells) < 2:
            sentence = f"{path}, line {number} has {len(cells)} columns, so no word for --text {text} or no tag for "
            raise UsageError(f"{sentence}--label {label}; give each line a word, its columns and its tag", "bad-row")
        place = place or f"{path}, line {number}"
        part["text"].append(word)
        part["label"].append(tag)
