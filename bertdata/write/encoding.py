"""A block of text → its encoded documents, ready to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import FailedTextError, LongTextError, TextError
from bertdata.format.origins import origins_of
from bertdata.options import Shares, TextFormat, function_of
from bertdata.sources.blocks import Block
from bertdata.sources.documents import BadRow, Documents, Skipped
from bertdata.sources.plan import Plan, find_blocks, source_of
from bertdata.tokenize.tokenizer import Encoded, LoadedTokenizer, WordSplitter
from bertdata.write.kernels import count_literals, count_words, literals
from bertdata.write.staging import Tally
from bertdata.write.units import SPLITS_BY_HASH, EncodedDocuments, special_counts, splits_of


def functions_of(form: TextFormat) -> list[str]:
    """Return the user's functions."""
    return [*form.maps, *([form.words] if form.words else [])]


class TextEncoder:
    """Encoder of blocks of text: all work on a block except writing it. Several threads may use it at once."""

    def __init__(
        self, tokenizer: LoadedTokenizer, shares: Shares, plan: Plan, duplicates: NDArray[np.uint64] | None = None
    ) -> None:
        """duplicates: origins of the documents to leave out, ascending."""
        form = plan.form
        self.tokenizer, self.shares, self.plan, self.form, self.duplicates = tokenizer, shares, plan, form, duplicates
        self.word_splitter: WordSplitter | None = function_of(form.words, "--words") if form.words else None
        self.sentences, self.shard_size, self.keeps_empty = form.sentences == "line", form.shard_size, False
        self._spellings = literals(tokenizer.spellings)

    def find(self, units: range, finished: Container[int]) -> Iterator[Block]:
        return find_blocks(self.plan, lambda unit: unit not in finished, units)

    def encode(self, block: Block) -> EncodedDocuments:
        """Return a block in the form that will be written.

        Raises InputError like `block.decode`, and TokenizerError for a text that cannot be encoded.
        """
        some, num_inputs = block.decode(), len(self.plan.files)
        if self.duplicates is not None:
            some = _without_duplicates(some, self.duplicates, num_inputs)
        some, encoded, word_starts = self._tokenized(some)
        text, offsets = some.text, some.offsets
        spelled = np.zeros(len(self.tokenizer.spellings), np.int64)
        count_literals(text, some.num_bytes, self._spellings, spelled)
        words, splits = np.empty(some.starts.size, np.int64), splits_of(self.shares, text, offsets, 1)
        count_words(text, offsets, 1, words)
        of_split = np.bincount(splits, words, len(SPLITS_BY_HASH))
        counts = {
            **{f"{split}_words": int(count) for split, count in zip(SPLITS_BY_HASH, of_split, strict=True)},
            **special_counts(self.tokenizer, spelled),
            "special_ids_replaced": encoded.special_ids_replaced,
            "skipped_rows": len(some.bad),
            "removed_documents": some.num_removed,
            "duplicate_documents": some.num_duplicates,
            "text_bytes": some.num_bytes - some.starts.size,
        }
        first: dict[str, Any] = {
            "replaced": some.first_replaced,
            "skipped": min(((each.input, each.place, str(each.why)) for each in some.bad), default=None),
        }
        return EncodedDocuments(
            unit=block.unit,
            ids=encoded.ids,
            offsets=encoded.documents,
            sentences=encoded.sentences,
            word_starts=word_starts,
            origins=origins_of(some.inputs, some.starts, num_inputs),
            splits=splits,
            has_ids=encoded.documents[1:] - encoded.documents[:-1] > (self.tokenizer.special.separator is not None),
            replaced=some.replaced,
            tally=Tally(Counter(counts), {name: place for name, place in first.items() if place}),
            bytes_read=block.bytes_read,
        )

    def _tokenized(self, some: Documents) -> tuple[Documents, Encoded, NDArray[np.bool_] | None]:
        """Return documents, their ids, and, if requested, whether each id begins a word.

        With --on-error skip, documents that the tokenizer cannot encode become bad rows.
        """
        try:
            return some, *self._ids(some)
        except TextError:
            if self.form.on_error == "fail":
                raise
        return self._tokenized(self._without_refused(some))

    def _ids(self, some: Documents) -> tuple[Encoded, NDArray[np.bool_] | None]:
        def place(number: int) -> str:
            if self.form.on_error == "skip":  # nobody sees the line, and finding it reads the file again
                return ""
            return source_of(self.plan.files[some.inputs[number]], self.form).place(int(some.starts[number]))

        encoded = self.tokenizer.encode(some.text, some.offsets, sentences=self.sentences, name=place)
        if not self.word_splitter:
            return encoded, None
        given = some.text, some.offsets, encoded.documents, self.word_splitter
        return encoded, self.tokenizer.word_starts(*given, name=place)

    def _without_refused(self, some: Documents) -> Documents:
        """Return the documents that the tokenizer can encode; all other documents become bad rows.

        Each error names at least one document. The rest is then encoded in two halves, so many bad documents cost at
        most n log n.
        """
        kept, bad, left = list[NDArray[np.int64]](), [*some.bad], [np.arange(some.starts.size)]
        while left:
            numbers = left.pop()
            part = some.chosen(numbers)
            try:
                self._ids(part)
                kept.append(numbers)
            except TextError as error:
                gone, why = np.isin(np.arange(numbers.size), error.documents), _reason(error)
                bad += map(Skipped, part.inputs[gone].tolist(), part.starts[gone].tolist(), repeat(why))
                left += [half for half in np.array_split(numbers[~gone], 2) if half.size]
        return replace(some.chosen(np.sort(np.concatenate([np.zeros(0, np.int64), *kept]))), bad=bad)

    @property
    def why_slow(self) -> str | None:
        """The reason why `tokenizers` encodes the text, as a clause; None if an engine does."""
        engine = self.tokenizer.engine
        if engine.refusal:
            return f"there is no engine for this tokenizer, because {engine.refusal}"
        if engine.why_slow:
            return engine.why_slow
        if self.word_splitter:
            return "--words needs the offsets of tokens in the text"
        if self.sentences and not self.tokenizer.engine_gives_lines:
            return f"the engine for {engine.name} does not find sentences (--sentences line)"
        return None


def _reason(error: TextError) -> BadRow:
    if isinstance(error, LongTextError):
        return BadRow(f"{error.given:,} bytes of its text, such as one word, reach `tokenizers` in one piece")
    if isinstance(error, FailedTextError):
        return BadRow(f"`tokenizers` fails on its text: {error.given}")
    return BadRow(f"text spells the special token {error.given!r}, and the tokenizer has no unknown token")


def _without_duplicates(some: Documents, duplicates: NDArray[np.uint64], num_inputs: int) -> Documents:
    """Remove and count the documents whose origins are in `duplicates`, uint64 [n], ascending."""
    if not duplicates.size:
        return some
    origins = origins_of(some.inputs, some.starts, num_inputs)
    indices = np.searchsorted(duplicates, origins)
    gone = duplicates[np.minimum(indices, duplicates.size - 1)] == origins
    return replace(some.chosen(np.flatnonzero(~gone)), num_duplicates=int(gone.sum()))
