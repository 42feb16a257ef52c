"""More rows to fine-tune on: copies of labelled rows with some words replaced, as TinyBERT makes them.

    bertrain augment --checkpoint run/ --train train.tsv --out augmented.tsv
    torchrun --nproc-per-node 8 -m bertrain augment --vectors glove.6B.300d.txt --checkpoint run/ ...

A word of one token is replaced by a word that the masked language model proposes in its place, a word of several tokens
by one of the nearest words in a table of vectors (Jiao et al., 2020, algorithm 1). docs/finetuning.md has the rules.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import bertdata
from bertdata.support import (
    InputError,
    OneSentence,
    UsageError,
    continuing,
    local,
    opened,
    write_file,
)
from bertrain import checkpoint
from bertrain.commands import reading
from bertrain.config import pick
from bertrain.lab import tables
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.heads import tokenizer_of
from bertrain.lab.tasks import TASKS, Columns
from bertrain.models.encoder import PLACES, Encoder
from bertrain.models.load import load_model, max_length
from bertrain.options import Output
from bertrain.ranks import LONGEST_WAIT, World, world

_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"
WORD = re.compile(rf"[{_HAN}]|(?<![\w'’])[^\W\d_{_HAN}]+(?![\w'’])")
"""What may be replaced: a Chinese character; or a run of letters, unless a digit, an underscore, an apostrophe or a
Chinese character touches it. So neither half of don't is a word.
"""
MOST_VECTORS = 100_000  # words of a file of vectors that are read; such files begin with the most frequent words
LONGEST_LINE = 1 << 20  # bytes: a word and its numbers
TEXTS = 1024  # different texts whose words are looked up together; what is finished of them is kept
QUERIES = 256  # words that are compared with all vectors at a time
NONE = -1


class Vectors(NamedTuple):
    """Words and where they lie. Cosines of unit vectors say how near two of them are."""

    words: list[str]
    units: torch.Tensor  # [words, width], each of length 1


def read_vectors(path: str) -> Vectors:
    """The words of the first MOST_VECTORS lines of a file in GloVe's format: a word and its numbers, spaces between.

    The file may be compressed, and may begin with a line of two counts, as those of word2vec and fastText. Words that
    are not letters alone, such as those with a space inside, are left out. Raises UsageError, which names the line, for
    anything else.
    """
    words, rows = list[str](), list[np.ndarray]()
    try:
        with opened(local(path)) as stream:
            for number, line in zip(range(1, MOST_VECTORS + 1), _lines(stream, path), strict=False):
                text = line.decode("utf-8", "replace").removeprefix("\ufeff").rstrip()
                word, *values = text.rsplit(" ", len(rows[0]) if rows else -1)
                if (number == 1 and len(values) == 1) or not WORD.fullmatch(word):
                    continue
                try:
                    with np.errstate(over="ignore"):  # it becomes infinite, which is refused below
                        row = np.array(values, np.float32)
                except ValueError:
                    row = np.array([], np.float32)
                expected = f"{len(rows[0])} numbers" if rows else "numbers"
                if not row.size or not np.isfinite(row).all() or (rows and row.shape != rows[0].shape):
                    sentence = (
                        f"--vectors {path}, line {number}: there must be {expected} after {word!r}; correct the line"
                    )
                    raise UsageError(sentence, "bad-row", option="vectors", given=path)
                words.append(word)
                rows.append(row)
    except InputError as error:
        raise UsageError(f"--vectors: {error}", error.kind, option="vectors", given=path) from None
    if not rows:
        sentence = f"--vectors {path} has no words; give lines of a word and its numbers, as GloVe's files have"
        raise UsageError(sentence, "empty", option="vectors", given=path)
    return Vectors(words, F.normalize(torch.tensor(np.stack(rows)), dim=1))


def _lines(stream: Any, path: str) -> Iterator[bytes]:
    rest, number = b"", 0
    while block := stream.read(1 << 17):
        *lines, rest = (rest + block).split(b"\n")
        number += len(lines)
        if len(rest) > LONGEST_LINE:
            sentence = f"--vectors {path}, line {number + 1} has more than {LONGEST_LINE >> 20} MiB; correct the line"
            raise UsageError(sentence, "too-large", option="vectors", given=path)
        yield from lines
    if rest:
        yield rest


class Proposer:
    """Says which words may stand in place of the words of a text.

    words: all that it proposes, and others; a proposal is an index of this list. First come the tokens of the model,
    and then the words of `vectors`, if they are given. most: proposals for a word. kept: words that get none, in small
    letters. Raises UsageError for a checkpoint without a mask token.
    """

    def __init__(
        self, directory: str, device: torch.device, *, most: int, kept: frozenset[str], vectors: Vectors | None
    ) -> None:
        model = load_model(directory)
        self.tokenizer = tokenizer_of(directory)
        size, self._longest = model.config.vocab_size, max_length(model.config)
        if self.tokenizer.mask_token_id is None or len(self.tokenizer) > size:
            sentence = (
                f"--checkpoint {directory} has a tokenizer without a mask token, or of more than the {size:,} tokens "
                "of the model; give one with the tokenizer that it was trained with"
            )
            raise UsageError(sentence, "tokenizer-differs", option="checkpoint", given=directory)
        backend = self.tokenizer.backend_tokenizer
        spelled = backend.decode_batch([[token] for token in range(len(self.tokenizer))], skip_special_tokens=False)
        self.words = [text.strip() for text in spelled] + [""] * (size - len(spelled))
        continues = continuing(json.loads(backend.to_str()), size, rule=1)
        special = {*self.tokenizer.all_special_ids}
        self._is_word = [
            bool(WORD.fullmatch(word)) and not continues[token] and token not in special
            for token, word in enumerate(self.words)
        ]
        self.digest = hashlib.sha256(f"{fingerprint(model)} {backend.to_str()} {most} {sorted(kept)}".encode())
        self._is_other = ~torch.tensor(self._is_word, device=device)
        self._special, self._most, self._kept = special, most, kept
        self._encoder, self._device = Encoder(model).to(device).eval(), device
        embeddings: Any = model.get_input_embeddings()
        self._rows: torch.Tensor = embeddings.weight.detach()
        self._index: dict[str, int] | None = None
        if vectors:
            self._first, units = size, vectors.units
            self.words += vectors.words
            self._index = {word: number for number, word in reversed([*enumerate(vectors.words)])}
            self.digest.update("\n".join(vectors.words).encode() + units.numpy().tobytes())
        else:
            self._ids = torch.tensor([token for token, is_word in enumerate(self._is_word) if is_word])
            units = F.normalize(self._rows[self._ids.to(device)].float(), dim=1)
        self._units = units.to(device)

    def _masked(self, ids: list[int], place: int) -> list[int]:
        """A row with a mask at a place, and then the place."""
        return [*ids[:place], self.tokenizer.mask_token_id, *ids[place + 1 :], place]

    @torch.no_grad()
    def propose(self, texts: list[str], advance: Callable[[int], Any] = lambda words: None) -> np.ndarray:
        """Proposals for the words of texts, as WORD finds them, one text after the other: int32 [words, most].

        NONE fills up a row. Words that are beyond the longest row, and words that begin or end inside a token,
        get none. advance: called with a number of words that are done. Each different row with a mask goes through the
        model once. Rows of one length go together, so none is padded.
        """
        encoded = self.tokenizer(texts, truncation=True, max_length=self._longest, return_offsets_mapping=True)
        words: list[str] = []
        masked: dict[bytes, tuple[list[int], int, list[int]]] = {}  # a row's digest → ids, place, numbers of words
        others: dict[tuple[str, tuple[int, ...]], list[int]] = {}  # a word and its tokens → numbers of words
        for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            begins, ends = _bounds(text, offsets)
            for word in WORD.finditer(text):
                number, first, last = len(words), begins.get(word.start()), ends.get(word.end())
                words.append(word[0])
                if word[0].lower() in self._kept or first is None or last is None:
                    advance(1)
                    continue
                pieces = ids[first : last + 1]
                if len(pieces) == 1 and self._is_word[pieces[0]]:
                    digest = hashlib.blake2b(np.array(self._masked(ids, first)).tobytes(), digest_size=16).digest()
                    masked.setdefault(digest, (ids, first, []))[2].append(number)
                else:
                    others.setdefault((word[0], tuple(pieces)), []).append(number)
        proposals = np.full((len(words), self._most), NONE, np.int32)

        def keep(numbers: list[int], best: list[int]) -> None:
            for number in numbers:
                own = words[number].lower()
                chosen = [index for index in best if self.words[index].lower() != own][: self._most]
                proposals[number, : len(chosen)] = chosen
            advance(len(numbers))

        by_length: dict[int, list[bytes]] = {}
        for digest, (ids, *_) in masked.items():
            by_length.setdefault(len(ids) + 1, []).append(digest)
        for length, digests in by_length.items():
            for part in _parts(digests, max(1, PLACES // length)):
                rows = torch.tensor([self._masked(*masked[digest][:2]) for digest in part], device=self._device)
                logits = self._encoder.logits(input_ids=rows[:, :-1], masked_positions=rows[:, -1:]).squeeze(1).float()
                scores, best = logits.masked_fill(self._is_other, -torch.inf).topk(min(self._most + 2, len(logits[0])))
                for digest, score, indices in zip(part, scores.tolist(), best.tolist(), strict=True):
                    keep(masked[digest][2], [i for i, value in zip(indices, score, strict=True) if value > -torch.inf])
        for part in _parts([*others], QUERIES):
            known = {query: vector for query in part if (vector := self._vector(*query)) is not None}
            advance(sum(len(others[query]) for query in part if query not in known))
            if known:
                nearest = torch.stack([*known.values()]) @ self._units.T
                best = nearest.topk(min(self._most + 2, nearest.shape[1])).indices.cpu()
                best = best + self._first if self._index is not None else self._ids[best]
                for query, indices in zip(known, best.tolist(), strict=True):
                    keep(others[query], indices)
        return proposals

    def _vector(self, word: str, pieces: tuple[int, ...]) -> torch.Tensor | None:
        """Where a word lies: its own vector, else the mean of the embeddings of its tokens; None where unknown."""
        if self._index is not None:
            number = self._index.get(word, self._index.get(word.lower()))
            return None if number is None else self._units[number]
        if self._special & {*pieces}:
            return None
        return F.normalize(self._rows[[*pieces]].float().mean(0), dim=0)


def _bounds(text: str, offsets: list[tuple[int, int]]) -> tuple[dict[int, int], dict[int, int]]:
    """Characters at which tokens begin → the first such token; characters before which they end → the last."""
    begins, ends = dict[int, int](), dict[int, int]()
    for token, (start, end) in enumerate(offsets):
        while start < end and text[start].isspace():  # some tokenizers count the space before a word as its own
            start += 1
        if start < end:
            begins.setdefault(start, token)
            ends[end] = token
    return begins, ends


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def replaced(text: str, proposals: np.ndarray, words: list[str], share: float, draw: np.random.Generator) -> str:
    """A text, each word of which that has proposals, int [words, most], is one of them with probability `share`."""
    chances, choices = draw.random((2, len(proposals)))
    counts = (proposals != NONE).sum(1)
    parts, end = [], 0
    for number, word in enumerate(WORD.finditer(text)):
        if counts[number] and chances[number] < share:
            parts += [text[end : word.start()], words[proposals[number, int(choices[number] * counts[number])]]]
            end = word.end()
    return "".join([*parts, text[end:]])


class _Work:
    """The rows, the texts in them, and what is known of these so far, in a directory beside --out."""

    def __init__(
        self,
        ranks: World,
        directory: str,
        *,
        train: str,
        out: str,
        task: str,
        text: str,
        other: str,
        label: str,
        vectors: str | None,
        keep: str | None,
        candidates: int,
    ) -> None:
        of_texts = {name: kind for name, kind in TASKS.items() if kind.taught}  # whose labels belong to complete texts
        kind = pick(of_texts, task, "--task", "docs/finetuning.md")(Columns(text, other, label))
        self.out = Path(out)
        if self.out.suffix.lower() != Path(train).suffix.lower():
            sentence = (
                f"--out {out} must end as --train {train} does, {Path(train).suffix}, as it is of the same format"
            )
            raise UsageError(sentence, "malformed", option="out", given=out)
        self.parts = self.out.with_name(self.out.name + ".parts")
        if not self.parts.exists():  # else `clear` refuses it
            self._refuse_out()
        columns = {"text": kind.columns.text, "other": kind.columns.other, "label": kind.columns.label}
        self.table = tables.table(train, columns, unlabelled=getattr(kind, "unlabelled", False))
        self.roles = [role for role in tables.TEXTS if role in self.table.columns]
        self.columns = [self.table.texts(role) for role in self.roles]
        self.numbers: dict[str, int] = {}
        for text in (text for row in zip(*self.columns, strict=True) for text in row):
            self.numbers.setdefault(text, len(self.numbers))
        self.texts = [*self.numbers]
        counts = [len(WORD.findall(text)) for text in self.texts]
        self.ends = np.cumsum([0, *counts])  # where the words of each text begin, of all words
        kept = reading.text(keep, "keep").split() if keep else []
        self.proposer = Proposer(
            directory,
            ranks.device,
            most=candidates,
            kept=frozenset(word.lower() for word in kept),
            vectors=read_vectors(vectors) if vectors else None,
        )
        self.proposer.digest.update("\0".join(self.texts).encode(errors="replace"))

    def _refuse_out(self) -> None:
        if os.path.lexists(self.out):
            sentence = f"--out {self.out} exists; give a new file, or remove the old one"
            raise UsageError(sentence, "out-exists", option="out", given=str(self.out))

    def clear(self) -> None:
        """Removes parts of other options, files or weights from the directory for parts, whose lock is held."""
        if os.path.lexists(self.out):  # which a job has written that held the lock before, or was killed then
            shutil.rmtree(self.parts)
        self._refuse_out()
        made_of, digest = self.parts / "of", self.proposer.digest.hexdigest().encode()
        if not made_of.exists() or made_of.read_bytes() != digest:
            for path in self.parts.glob("*.npy"):
                path.unlink()
            write_file(made_of, digest)

    def _part(self, number: int) -> Path:
        return self.parts / f"{number:06d}.npy"

    def _is_made(self, number: int) -> bool:
        """Whether a part is there, with proposals for as many words as its texts have."""
        first, end = TEXTS * number, min(TEXTS * (number + 1), len(self.texts))
        try:
            part = np.lib.format.open_memmap(self._part(number), mode="r")
        except FileNotFoundError:
            return False
        except OSError:  # which may pass
            raise
        except Exception:  # what numpy makes of any bytes
            return False
        return part.dtype == np.int32 and part.ndim == 2 and len(part) == self.ends[end] - self.ends[first]

    def propose(self, ranks: World) -> None:
        """Makes the parts that are missing; ranks share them out."""
        count = -(-len(self.texts) // TEXTS)
        mine = [number for number in range(ranks.rank, count, ranks.world_size) if not self._is_made(number)]
        firsts = [(TEXTS * number, min(TEXTS * (number + 1), len(self.texts))) for number in mine]
        total = sum(int(self.ends[end] - self.ends[first]) for first, end in firsts)
        hidden = None if ranks.rank == 0 else True
        with tqdm(total=total, desc="propose", unit="word", unit_scale=True, leave=False, disable=hidden) as bar:
            for number, (first, end) in zip(mine, firsts, strict=True):
                content = io.BytesIO()
                np.save(content, self.proposer.propose(self.texts[first:end], bar.update))
                write_file(self._part(number), content.getvalue())

    def write(self, *, copies: int, share: float, seed: int) -> str:
        """Writes --out, and removes the parts. Returns what there is to say."""
        parts = [
            np.lib.format.open_memmap(self._part(number), mode="r") for number in range(-(-len(self.texts) // TEXTS))
        ]
        known = sum(int((part[:, 0] != NONE).sum()) for part in parts)
        num_copies = 0

        def proposals(text: str) -> np.ndarray:
            number = self.numbers[text]
            begin = self.ends[number // TEXTS * TEXTS]
            return parts[number // TEXTS][self.ends[number] - begin : self.ends[number + 1] - begin]

        def rows() -> Iterator[dict[Any, Any]]:
            nonlocal num_copies
            shown = tqdm(self.table.rows, desc="write", unit="row", unit_scale=True, leave=False, disable=None)
            for number, (row, *texts) in enumerate(zip(shown, *self.columns, strict=True)):
                seen, rows_of_texts = [texts], [proposals(text) for text in texts]
                for copy in range(copies):
                    draw = np.random.default_rng(bertdata.key(seed, "augment", number, copy))
                    pairs = zip(texts, rows_of_texts, strict=True)
                    new = [replaced(text, some, self.proposer.words, share, draw) for text, some in pairs]
                    seen += [new] if new not in seen else []
                for new in seen:
                    yield row | {self.table.columns[r]: text for r, text in zip(self.roles, new, strict=True)}
                num_copies += len(seen) - 1

        tables.write(self.out, self.table, rows())
        shutil.rmtree(self.parts)
        return (
            f"{self.out}: {len(self.table.rows):,} rows and {num_copies:,} copies of them; "
            f"{known / max(1, int(self.ends[-1])):.0%} of the words can be replaced"
        )


@click.command(
    cls=OneSentence, epilog="\b\nExample:\n  bertrain augment --checkpoint run/ --train train.tsv --out more.tsv"
)
@click.option("--checkpoint", "start", required=True, help="A run directory, a checkpoint, or a hub name.")
@click.option("--train", required=True, help="Labelled examples: TSV, CSV, JSON lines or Parquet, as for finetune.")
@click.option(
    "--out", required=True, type=Output(), help="New file for the examples and their copies, in the format of --train."
)
@click.option(
    "--task",
    default="classification",
    help="What labels are, as for finetune: classification, regression, multilabel or pairs.",
)
@click.option("--text", default="0", help="Column of the text: its name, or its number from 0, as for finetune.")
@click.option(
    "--other",
    default="",
    show_default=False,
    help="Column of the second text, for pairs of texts. Default: none; 1 for pairs.",
)
@click.option("--label", default="-1", help="Column of the label: its name or number; -1 is the last.")
@click.option(
    "--vectors",
    help="File of word vectors in GloVe's format, for words of several tokens. Default: embeddings of the model.",
)
@click.option("--keep", help="File of words that are never replaced, separated by white space.")
@click.option(
    "--copies", default=30, type=click.IntRange(min=1), help="Number of copies of a row; duplicates are left out."
)
@click.option("--candidates", default=15, type=click.IntRange(min=1), help="Number of words that may replace a word.")
@click.option(
    "--share",
    default=0.4,
    type=click.FloatRange(0, 1, min_open=True),
    help="Probability that a word of a copy is replaced.",
)
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Random seed for the choice of words.")
def main(start: str, copies: int, share: float, seed: int, **options: Any) -> None:
    """Add copies with replaced words to labelled examples. Runs alone, or under torchrun on several ranks.

    --out has each row of --train, followed by its copies, with the same label and other columns.
    """
    with world(LONGEST_WAIT) as ranks, contextlib.ExitStack() as stack:
        directory = ranks.from_first(lambda: checkpoint.resolved(start))
        work = ranks.together(lambda: _Work(ranks, directory, **options))
        ranks.on_first(lambda: stack.enter_context(checkpoint.lock(work.parts)))
        ranks.on_first(work.clear)
        ranks.together(lambda: work.propose(ranks))
        ranks.on_first(lambda: click.echo(work.write(copies=copies, share=share, seed=seed)))


if __name__ == "__main__":
    main()
