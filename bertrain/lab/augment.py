"""More rows for fine-tuning: copies of labelled rows with some words replaced, as in TinyBERT.

    bertrain augment --checkpoint run/ --train train.tsv --out augmented.tsv
    torchrun --nproc-per-node 8 -m bertrain augment --vectors glove.6B.300d.txt --checkpoint run/ ...

A word of one token is replaced by a prediction of the masked language model, a word of several tokens by one of its
nearest words in a table of vectors (Jiao et al., 2020, algorithm 1). docs/tasks.md has the rules.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import re
import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import bertdata
from bertdata.support import OneSentence, UsageError, continuing, local, opened, write_file
from bertrain import checkpoint
from bertrain.cli import flags_of
from bertrain.commands import reading
from bertrain.config import DIRECTORY, pick
from bertrain.lab import tables
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.heads import tokenizer_of
from bertrain.lab.options import from_flags
from bertrain.lab.tasks import TASKS, Columns
from bertrain.models.encoder import PLACES, Encoder
from bertrain.models.load import load_model, max_length
from bertrain.options import COUNT, COUNT_OR_0, SHARE, TEXT, Options, option
from bertrain.ranks import LONGEST_WAIT, World, world

_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"
_MARKS = "".join(each for each in map(chr, range(0x300, 0x10000)) if unicodedata.category(each)[0] == "M")
WORD = re.compile(rf"[{_HAN}]|(?<![\w'’{_MARKS}])[^\W\d_{_HAN}](?:[^\W\d_{_HAN}]|[{_MARKS}])*(?![\w'’{_MARKS}])")
"""Words that may be replaced: a Chinese character; or a run of letters and their marks, such as the vowels of Hindi,
unless a digit, underscore, apostrophe or Chinese character is next to it. So neither half of don't is a word.
"""
MOST_VECTORS = 100_000  # words to read from a file of vectors, which begins with the most frequent words
LONGEST_LINE = 1 << 20  # bytes: a word and its numbers
TEXTS = 1024  # different texts in one part; finished parts are kept after a stop
QUERIES = 256  # words to compare with all vectors at once


@dataclass(frozen=True, kw_only=True)
class Augmentation(Options):
    """Options: which words of which rows to replace, and how often."""

    checkpoint: str = option("", TEXT, required=True)
    """A run directory, a checkpoint, or a hub name."""
    train: str = option("", TEXT, required=True)
    """Labelled examples: TSV, CSV, JSON lines or Parquet, as for finetune."""
    out: str = option("", DIRECTORY, required=True)
    """New file for the examples and their copies, in the format of --train."""
    task: str = option("classification", TEXT)
    """What labels are, as for finetune: classification, regression, multilabel or pairs."""
    text: str = option("0", TEXT)
    """Column of the text: its name, or its number from 0, as for finetune."""
    other: str = option("", TEXT)
    """Column of the second text, for pairs of texts. Default: none; 1 for pairs."""
    label: str = option("-1", TEXT)
    """Column of the label: its name or number; -1 is the last."""
    vectors: str = option("", TEXT)
    """File of word vectors in GloVe's format, for words of several tokens. Default: embeddings of the model."""
    keep: str = option("", TEXT)
    """File of words that are never replaced, separated by white space."""
    copies: int = option(30, COUNT)
    """Number of copies of a row; duplicates are left out."""
    candidates: int = option(15, COUNT)
    """Number of words that may replace a word."""
    share: float = option(0.4, SHARE)
    """Probability that a word of a copy is replaced."""
    seed: int = option(0, COUNT_OR_0)
    """Random seed for the choice of words."""


@np.errstate(over="ignore")  # an overflow to infinity is an error
def read_vectors(path: str) -> tuple[list[str], torch.Tensor]:
    """Return words and their vectors, [words, width], scaled to length 1, so that dot products are cosines.

    Reads the first MOST_VECTORS lines of a file in GloVe's format: a word and its numbers, separated by spaces. The
    file may be compressed, and may begin with a line of two counts, as in word2vec and fastText. Words with characters
    other than letters, such as spaces, are skipped. Raises UsageError, which names the line, for an invalid file.
    """
    words, rows = list[str](), list[np.ndarray]()
    with opened(local(path)) as stream:
        for number, line in zip(range(1, MOST_VECTORS + 1), _lines(stream, path), strict=False):
            text = line.decode("utf-8", "replace").removeprefix("\ufeff").rstrip()
            word, *values = text.rsplit(" ", len(rows[0]) if rows else -1)
            if (number == 1 and len(values) == 1) or not WORD.fullmatch(word):
                continue
            row = np.array([], np.float32)
            with contextlib.suppress(ValueError):
                row = np.array(values, np.float32)
            if not row.size or not np.isfinite(row).all() or (rows and row.shape != rows[0].shape):
                expected = f"{len(rows[0])} numbers" if rows else "numbers"
                sentence = f"--vectors {path}, line {number}: there must be {expected} after {word!r}; correct the line"
                raise UsageError(sentence, "bad-row", option="vectors", given=path)
            words.append(word)
            rows.append(row)
    if not rows:
        sentence = f"--vectors {path} has no words; give lines of a word and its numbers, as GloVe's files have"
        raise UsageError(sentence, "empty", option="vectors", given=path)
    return words, F.normalize(torch.tensor(np.stack(rows)), dim=1)


def _lines(stream: Any, path: str) -> Iterator[bytes]:
    rest = b""
    while block := stream.read(1 << 17):
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > LONGEST_LINE:
            sentence = f"--vectors {path} has a line of more than {LONGEST_LINE >> 20} MiB; correct it"
            raise UsageError(sentence, "too-large", option="vectors", given=path)
        yield from lines
    yield rest


class Proposer:
    """Proposes replacements for the words of a text.

    words: the list that proposals index: first the tokens of the model, then the words of `vectors`, if given. It also
    has words that are never proposed. most: number of proposals for a word. kept: words without proposals, in lower
    case. Raises UsageError for a checkpoint without a mask token.
    """

    def __init__(
        self, directory: str, device: torch.device, *, most: int, kept: frozenset[str], vectors: Any = None
    ) -> None:
        model = load_model(directory)
        self.tokenizer = tokenizer_of(directory)
        size, self._longest = model.config.vocab_size, max_length(model.config)
        if self.tokenizer.mask_token_id is None or len(self.tokenizer) > size:
            sentence = f"--checkpoint {directory} has a tokenizer without a mask token, or of more than {size:,} tokens"
            instead = "give one with the tokenizer that it was trained with"
            raise UsageError(f"{sentence}; {instead}", "tokenizer-differs", option="checkpoint", given=directory)
        backend = self.tokenizer.backend_tokenizer
        spelled = backend.decode_batch([[token] for token in range(len(self.tokenizer))], skip_special_tokens=False)
        self.words = [text.strip() for text in spelled] + [""] * (size - len(spelled))
        continues = continuing(json.loads(backend.to_str()), size, rule=1)
        self._special, self._most, self._kept = {*self.tokenizer.all_special_ids}, most, kept
        self._is_word = [
            bool(WORD.fullmatch(word)) and not continues[token] and token not in self._special
            for token, word in enumerate(self.words)
        ]
        self.digest = hashlib.sha256(f"{fingerprint(model)} {backend.to_str()} {most} {sorted(kept)}".encode())
        self._encoder, self._device = Encoder(model).to(device).eval(), device
        self._rows: torch.Tensor = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
        self._ids = torch.tensor([token for token, is_word in enumerate(self._is_word) if is_word])
        self._index: dict[str, int] | None = None
        if vectors:
            words, units = vectors
            self.words, self._ids = self.words + words, size + torch.arange(len(words))
            self._index = {word: number for number, word in reversed([*enumerate(words)])}
            self.digest.update("\n".join(words).encode() + units.numpy().tobytes())
        else:
            units = F.normalize(self._rows[self._ids.to(device)].float(), dim=1)
        self._units = units.to(device)

    @torch.no_grad()
    def propose(self, texts: Sequence[str]) -> np.ndarray:
        """Return proposals for all words of the texts (WORD), in order: int32 [words, most].

        Rows are filled up with -1. Words beyond the longest row, and words that begin or end inside a token, have no
        proposals. Each different masked row goes through the model once. Rows of one length form a batch, so there is
        no padding.
        """
        words, masked, others = self._grouped(texts)
        proposals = np.full((len(words), self._most), -1, np.int32)

        def keep(numbers: list[int], best: list[int]) -> None:
            for number in numbers:
                chosen = [index for index in best if self.words[index].lower() != words[number].lower()][: self._most]
                proposals[number, : len(chosen)] = chosen

        is_other = ~torch.tensor(self._is_word, device=self._device)
        for length, rows in itertools.groupby(sorted(masked, key=lambda row: len(row[0])), lambda row: len(row[0])):
            for part in _parts([*rows], max(1, PLACES // (length + 1))):
                ids = torch.tensor([self._masked(ids, place) for ids, place, _ in part], device=self._device)
                places = torch.tensor([[place] for _, place, _ in part], device=self._device)
                logits = self._encoder.logits(input_ids=ids, masked_positions=places).squeeze(1).float()
                scores, best = logits.masked_fill(is_other, -torch.inf).topk(min(self._most + 2, len(logits[0])))
                for (*_, numbers), values, indices in zip(part, scores.tolist(), best.tolist(), strict=True):
                    keep(numbers, [i for i, value in zip(indices, values, strict=True) if value > -torch.inf])
        known = [(vector, numbers) for query, numbers in others.items() if (vector := self._vector(*query)) is not None]
        for part in _parts(known, QUERIES):
            nearest = torch.stack([vector for vector, _ in part]) @ self._units.T
            best = self._ids[nearest.topk(min(self._most + 2, nearest.shape[1])).indices.cpu()]
            for (_, numbers), indices in zip(part, best.tolist(), strict=True):
                keep(numbers, indices)
        return proposals

    def _grouped(self, texts: Sequence[str]) -> tuple[list[str], list[tuple[Any, ...]], dict[Any, list[int]]]:
        """Return the words of texts, and the numbers of words that share a lookup, in two forms.

        The first: (ids of a row, position of the mask, numbers). The second: (word, its tokens) → numbers.
        """
        encoded = self.tokenizer(texts, truncation=True, max_length=self._longest, return_offsets_mapping=True)
        words: list[str] = []
        masked: dict[bytes, tuple[list[int], int, list[int]]] = {}  # digest of the masked row → its group
        others: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            begins, ends = _bounds(text, offsets)
            for word in WORD.finditer(text):
                number, first, last = len(words), begins.get(word.start()), ends.get(word.end())
                words.append(word[0])
                if word[0].lower() in self._kept or first is None or last is None:
                    continue
                pieces = ids[first : last + 1]
                if len(pieces) == 1 and self._is_word[pieces[0]]:
                    row = np.array([*self._masked(ids, first), first])
                    digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
                    masked.setdefault(digest, (ids, first, []))[2].append(number)
                else:
                    others.setdefault((word[0], tuple(pieces)), []).append(number)
        return words, [*masked.values()], others

    def _masked(self, ids: list[int], place: int) -> list[int]:
        return [*ids[:place], self.tokenizer.mask_token_id, *ids[place + 1 :]]

    def _vector(self, word: str, pieces: tuple[int, ...]) -> torch.Tensor | None:
        """Return the vector of a word, or the mean of the embeddings of its tokens; None for an unknown word."""
        if self._index is not None:
            number = self._index.get(word, self._index.get(word.lower()))
            return None if number is None else self._units[number]
        if self._special & {*pieces}:
            return None
        return F.normalize(self._rows[[*pieces]].float().mean(0), dim=0)


def _bounds(text: str, offsets: list[tuple[int, int]]) -> tuple[dict[int, int], dict[int, int]]:
    """Return character → first token that starts there, and character → last token that ends before it."""
    begins, ends = dict[int, int](), dict[int, int]()
    for token, (start, end) in enumerate(offsets):
        start += len(text[start:end]) - len(text[start:end].lstrip())  # offsets may include the space before a word
        if start < end:
            begins.setdefault(start, token)
            ends[end] = token
    return begins, ends


def _parts(items: Sequence[Any], size: int) -> Iterator[Any]:
    return (items[first : first + size] for first in range(0, len(items), size))


def replaced(text: str, proposals: np.ndarray, words: list[str], share: float, draw: np.random.Generator) -> str:
    """Return a text in which each word with proposals, int [words, most], is replaced with probability `share`."""
    chances, choices = draw.random((2, len(proposals)))
    counts = (proposals != -1).sum(1)
    parts, end = [], 0
    for number, word in enumerate(WORD.finditer(text)):
        if counts[number] and chances[number] < share:
            parts += [text[end : word.start()], words[proposals[number, int(choices[number] * counts[number])]]]
            end = word.end()
    return "".join([*parts, text[end:]])


class _Rows:
    """The rows, their texts, and the proposals so far, which are stored in a directory next to --out."""

    def __init__(self, ranks: World, directory: str, options: Augmentation) -> None:
        kinds = {name: kind for name, kind in TASKS.items() if kind.taught}  # tasks with labels of complete texts
        task = pick(kinds, options.task, "--task", "docs/tasks.md")(Columns(options.text, options.other, options.label))
        self.options, self.out = options, Path(options.out)
        suffix = Path(options.train).suffix
        if self.out.suffix.lower() != suffix.lower():
            sentence = f"--out {self.out} must end in {suffix}, as it has the format of --train"
            raise UsageError(sentence, "malformed", option="out", given=options.out)
        checkpoint.require_new(options.out)
        self.directory = self.out.with_name(self.out.name + ".parts")
        self.table = tables.read(options.train, task.roles)
        self.columns = [name for role, name in self.table.columns.items() if role != "label"]
        examples = [example for part, place in self.table.parts() for example in task.checked(part, place)]
        self.texts_of_rows = [[example.text, example.other][: len(self.columns)] for example in examples]
        self.texts = [*dict.fromkeys(text for texts in self.texts_of_rows for text in texts)]
        self.numbers = {text: number for number, text in enumerate(self.texts)}
        self.ends = np.cumsum([0, *(len(WORD.findall(text)) for text in self.texts)])  # offsets of each text's words
        kept = frozenset(reading.text(options.keep, "keep").lower().split()) if options.keep else frozenset[str]()
        vectors, most = read_vectors(options.vectors) if options.vectors else None, options.candidates
        self.proposer = Proposer(directory, ranks.device, most=most, kept=kept, vectors=vectors)
        self.proposer.digest.update("\0".join(self.texts).encode(errors="replace"))
        self.parts = [self.directory / f"{number:06d}.npy" for number in range(-(-len(self.texts) // TEXTS))]

    def clear(self) -> None:
        """Remove parts of other options, files or weights from the directory for parts. The caller holds its lock."""
        checkpoint.require_new(str(self.out))
        known, digest = self.directory / "of", self.proposer.digest.hexdigest().encode()
        if not known.exists() or known.read_bytes() != digest:
            for path in self.directory.glob("*.npy"):
                path.unlink()
            write_file(known, digest)

    def propose(self, ranks: World) -> None:
        """Compute the missing parts, divided among the ranks."""
        mine = range(len(self.parts))[ranks.rank :: ranks.world_size]
        missing = [number for number in mine if not self.parts[number].exists()]
        for number in tqdm(missing, desc="propose", unit="part", leave=False, disable=ranks.rank > 0 or None):
            content = io.BytesIO()
            np.save(content, self.proposer.propose(self.texts[TEXTS * number : TEXTS * (number + 1)]))
            write_file(self.parts[number], content.getvalue())

    def write(self) -> None:
        """Write --out, and remove the parts. Print a summary."""
        parts, options = [np.lib.format.open_memmap(path, mode="r") for path in self.parts], self.options
        num_known, num_copies = sum(int((part[:, 0] != -1).sum()) for part in parts), 0

        def proposals(text: str) -> np.ndarray:
            number = self.numbers[text]
            first, end = self.ends[number : number + 2] - self.ends[number // TEXTS * TEXTS]
            return parts[number // TEXTS][first:end]

        def rows() -> Iterator[dict[Any, Any]]:
            nonlocal num_copies
            shown = tqdm(self.table.rows, desc="write", unit="row", unit_scale=True, leave=False, disable=None)
            for number, ((_, row), texts) in enumerate(zip(shown, self.texts_of_rows, strict=True)):
                known, different = [(text, proposals(text)) for text in texts], {tuple(texts): None}  # in their order
                for copy in range(options.copies):
                    draw = np.random.default_rng(bertdata.key(options.seed, "augment", number, copy))
                    words, share = self.proposer.words, options.share
                    different[tuple(replaced(text, some, words, share, draw) for text, some in known)] = None
                num_copies += len(different) - 1
                yield from (row | dict(zip(self.columns, new, strict=True)) for new in different)

        tables.write(self.out, self.table, rows())
        shutil.rmtree(self.directory)
        share = num_known / max(1, int(self.ends[-1]))
        counts = f"{len(self.table.rows):,} rows and {num_copies:,} copies of them"
        click.echo(f"{self.out}: {counts}; {share:.0%} of the words can be replaced")


@click.command(
    cls=OneSentence,
    params=flags_of(Augmentation),
    epilog="\b\nExample:\n  bertrain augment --checkpoint run/ --train train.tsv --out more.tsv",
)
def main(**flags: Any) -> None:
    """Add copies with replaced words to labelled examples. Runs alone, or under torchrun on several ranks.

    --out has each row of --train, followed by its copies, with the same label and other columns.
    """
    with world(LONGEST_WAIT) as ranks, contextlib.ExitStack() as stack:
        options = ranks.together(lambda: from_flags(Augmentation, flags))
        directory = ranks.from_first(lambda: checkpoint.resolved(options.checkpoint))
        rows = ranks.together(lambda: _Rows(ranks, directory, options))
        ranks.on_first(lambda: stack.enter_context(checkpoint.lock(rows.directory)))
        ranks.on_first(rows.clear)
        ranks.together(lambda: rows.propose(ranks))
        ranks.on_first(rows.write)
