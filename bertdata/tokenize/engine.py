"""Pieces of text → ids, with the kernels and, for runs that fit no table, with `tokenizers`.

An engine learns the behaviour of a tokenizer by probing it. When a code point first occurs in a text, the engine runs
`tokenizers` on all code points of its page of 256, and the kernel uses the results. If a result depends on neighbouring
characters in a way that fits no table, the run is *hard*: `tokenizers` encodes it. The tables of runs store short hard
runs.

Threads. Kernels run without the GIL, so data must not change while a kernel reads it. Data that all threads share is
written once, before any thread sees it, and is marked read-only: the constant tables, and the pages in `Words._pages`,
which a lock guards. Data that changes belongs to one thread: its table of code points, its tables of runs. At a code
point without an entry, a kernel returns; its thread copies the page into its own table and calls the kernel again. So
no result depends on the order in which a processor's stores become visible.

Memory of a thread: tables of code points, 19 MB of address space, but only 5 KB of memory for each page in use; tables
of runs, 13 MB, or 21 MB for BERT's WordPiece; and up to 24 MB more, as needed, for longer runs and for runs with more
than three ids.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertdata.errors import FailedTextError, LongTextError
from bertdata.tokenize.added import AddedTokens
from bertdata.tokenize.forms import Forms
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.begins import NUM_BITS, NUM_CARRIES
from bertdata.tokenize.kernels.records import Output, RunTables, Text
from bertdata.tokenize.kernels.runs import keep_pair, keep_runs
from bertdata.tokenize.kernels.words import encode_words
from bertdata.tokenize.models import read_only
from bertdata.tokenize.rules import Unsupported
from bertdata.tokenize.source import Source, is_failure
from bertdata.tokenize.words import PAGE, WORD_BYTES, Words, replace_special
from bertdata.types import SpecialTokens

NEAR_LINES, FAR_LINES = 1 << 17, 1 << 16  # lines of 64 bytes in the tables of runs; two make a set
SPELLED_BYTES, POOLED_IDS, STABLE_SLOTS = 1 << 23, 1 << 22, 1 << 14
HARD_RUNS = 1 << 10  # hard runs that the kernel collects before `tokenizers` encodes them
LONGEST_PIECE = 1 << 24  # bytes of text that `tokenizers` may get in one piece; it needs 100 to 220 bytes for each
_TOGETHER = 1 << 20  # most bytes of texts in one call of it; a longer text is passed by one thread at a time
_RESOLVED = 1 << 24  # approximate bytes of hard runs in memory at a time


_Inserted = list[tuple[int, int, NDArray[Any]]]
"""Ids of hard runs: the start of each run in the text, the index where its ids are inserted, and its ids."""


class Engine:
    """Pieces of text → ids, for tokenizers that the kernels support. Thread-safe."""

    words: Words
    """Tables of the kernels. Not set if the tokenizer is not supported."""
    refusal: str | None = None
    """The reason, as a clause, why the tokenizer, or a text for it, is not supported."""

    def __init__(self, source: Source, special: SpecialTokens) -> None:
        """special: the special ids are the ids that text must not become.

        Loading the kernels takes about 0.1 s; compiling them takes some seconds, once on a machine.
        """
        self._local = threading.local()  # .tables, .runs: data that the kernel reads and writes in this thread
        try:
            self.words = Words(source, special)
            # For text that the engine cannot encode
            self._added = AddedTokens(source, Forms(source.outline["normalizer"]), self.words.special)
        except (Unsupported, RecursionError) as refusal:
            self._refuse(refusal)
        self.encode(np.zeros(0, np.uint8), *[np.zeros(0, np.int64)] * 3)  # loads the kernels
        source.forget()

    def _refuse(self, refusal: Exception) -> None:
        too_deep = "its rules have too many alternatives, or too many parentheses inside others"
        self.refusal = str(refusal) if isinstance(refusal, Unsupported) else too_deep

    @property
    def name(self) -> str | None:
        """Kind of tokenizer that the engine supports; None: `tokenizers` encodes all text."""
        return None if self.refusal else self.words.name

    @property
    def why_slow(self) -> str | None:
        """The reason, as a clause, why `tokenizers` encodes all text or typical text; None: an engine encodes it."""
        return self.refusal or self.words.why_slow

    def encode(
        self, text: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], tails: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64], int] | None:
        """Return the ids of pieces text[starts[i] : stops[i]], their offsets, and the number of replaced special ids.

        text: valid UTF-8; copied if fewer than PADDING bytes follow the last piece. tails: an id to append to the ids
        of each piece, -1 for none. Returns None if the tokenizer is not supported, or if the text becomes a special id
        and there is no unknown id to replace it. Raises LongTextError for text of more than LONGEST_PIECE bytes that
        `tokenizers` must encode in one piece, and FailedTextError.
        """
        if self.refusal:
            return None
        size = int(stops.max(initial=0))
        if text.size < size + records.PADDING:
            text = np.concatenate([text[:size], np.zeros(records.PADDING, np.uint8)])
        text = read_only(text.view())  # kernels are compiled for one type of array
        pieces = Text(text, starts, stops, tails, np.ones(tails.size, np.bool_))
        try:
            if not self._added:
                ids, bounds, replaced = self._encode(pieces)
            else:
                cut, sources, left_out = self._added.cut(pieces)
                rows = np.stack([np.searchsorted(sources, left_out), starts[left_out], stops[left_out]], 1)
                ids, bounds, replaced = self._encode(cut, rows)
                bounds = bounds[np.searchsorted(sources, np.arange(tails.size + 1))]
        except (Unsupported, RecursionError) as refusal:  # the characters of this text need too many states
            self._refuse(refusal)
            return None
        return None if replaced and self.words.unk is None else (ids, bounds, replaced)

    def _encode(
        self, text: Text, left_out: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[Any], NDArray[np.int64], int]:
        """Return the result of `encode` for pieces without added tokens.

        left_out: int64 [n, 3], rows (piece, start, stop): these pieces are empty, and `tokenizers` encodes
        data[start:stop] instead. Special ids without a replacement are only counted.
        """
        words, thread = self.words, self._local
        output = Output(
            ids=np.empty(int((text.stops - text.starts).sum()) + 4 * text.starts.size + 4, words.dtype),
            bounds=np.zeros(text.starts.size + 1, np.int64),
            hard=np.empty((HARD_RUNS, 4), np.int64),
            state=np.zeros(records.NUM_STATES, np.int64),
        )
        if not hasattr(thread, "tables"):
            thread.tables, thread.runs = words.with_page(0), new_runs(words.near_factor * NEAR_LINES)
        inserted: _Inserted = []
        code = -1
        while code != records.DONE:
            code = encode_words(text, thread.tables, thread.runs, output)
            point = int(output.state[records.CODE_POINT])
            if code == records.UNKNOWN_CODE_POINT:
                thread.tables = words.with_page(point // PAGE, thread.tables)
            elif code == records.UNKNOWN_PAIR:
                before = int(output.state[records.BEFORE])
                keep_pair(before, point, words.is_stable(before, point), thread.runs)
            elif output.state[records.NUM_HARD]:
                self._resolve(text, output.hard[: output.state[records.NUM_HARD]], thread.runs, output, inserted)
                output.state[records.NUM_HARD] = 0
        if left_out is not None and left_out.size:
            piece, start, stop = left_out.T
            rows = np.stack([start, stop, output.bounds[piece], np.full_like(piece, records.AT_BEGIN)], axis=1)
            self._resolve(text, rows, thread.runs, output, inserted)
        words.keep_pages()
        ids, bounds = _insert(output.ids[: output.bounds[-1]], text.starts, output.bounds, inserted)
        return ids, bounds, int(output.state[records.REPLACED])

    def _resolve(
        self, text: Text, hard: NDArray[np.int64], runs: RunTables, output: Output, inserted: _Inserted
    ) -> None:
        """Encode hard runs, rows of Output.hard."""
        sizes, kinds = hard[:, 1] - hard[:, 0], hard[:, 3]
        if (is_too_long := sizes > LONGEST_PIECE).any():
            raise long_text(int(sizes[is_too_long][0]), places=hard[is_too_long, 0].tolist())
        groups = np.stack([np.cumsum(sizes) // _RESOLVED, kinds], axis=1)
        for group in np.unique(groups, axis=0):
            rows, where = hard[(groups == group).all(axis=1)], int(group[1])
            spelled = [text.data[start:stop].tobytes() for start, stop in rows[:, :2].tolist()]
            numbers = {run: k for k, run in enumerate(dict.fromkeys(spelled))}
            number_of_row = [numbers[run] for run in spelled]
            try:
                encoded = ids_by(*self.words.for_library([*map(bytes.decode, numbers)], where))
            except FailedTextError as error:
                error.places = (int(rows[number_of_row.index(error.documents[0]), 0]),)
                raise
            replaced = np.array([replace_special(ids, self.words.special, self.words.unk).size for ids in encoded])
            output.state[records.REPLACED] += replaced[number_of_row].sum()
            own = [encoded[number].astype(self.words.dtype) for number in number_of_row]
            inserted += zip(rows[:, 0].tolist(), rows[:, 2].tolist(), own, strict=True)
            if where == records.IN_MIDDLE:
                first = np.unique(number_of_row, return_index=True)[1]  # the row of the first occurrence of each run
                kept = np.flatnonzero(replaced == 0)
                ids = np.concatenate([np.zeros(0, np.int64), *(encoded[number] for number in kept)])
                bounds = np.append(0, np.cumsum([encoded[number].size for number in kept], dtype=np.int64))
                keep_runs(text.data, rows[first[kept]], ids, bounds, output.ids, runs)


def _insert(
    ids: NDArray[Any], starts: NDArray[np.int64], bounds: NDArray[np.int64], inserted: _Inserted
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Insert the ids of hard runs. Return all ids, and their bounds. starts: starts of the pieces of text."""
    if not inserted:
        return ids, bounds
    begins, places = np.array([row[:2] for row in inserted]).T
    sizes, parts, done = np.array([own.size for _, _, own in inserted]), [], 0
    for k in np.argsort(begins, kind="stable").tolist():
        parts += [ids[done : places[k]], inserted[k][2]]
        done = places[k]
    more = np.bincount(np.searchsorted(starts, begins, side="right") - 1, sizes, bounds.size - 1).astype(np.int64)
    return np.concatenate([*parts, ids[done:]], dtype=ids.dtype), bounds + np.append(0, np.cumsum(more))


def encoded_by(
    library: tokenizers.Tokenizer, texts: Sequence[str], *, with_places: bool = False
) -> Iterator[tokenizers.Encoding]:
    """Yield the library's encodings of texts, one after the other. Do not keep them: each needs much memory.

    with_places: also return the offsets of tokens in the text, which is slower. Raises FailedTextError if the library
    fails, e.g. by a panic of its Rust code, and LongTextError for a text longer than LONGEST_PIECE.
    """
    encode = library.encode_batch if with_places else library.encode_batch_fast
    sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
    too_long = [number for number, size in enumerate(sizes) if size > LONGEST_PIECE]
    if too_long:
        raise long_text(sizes[too_long[0]], documents=too_long)
    first = 0
    while first < len(texts):
        stop, size = first + 1, sizes[first]
        while stop < len(texts) and size + sizes[stop] <= _TOGETHER:
            size, stop = size + sizes[stop], stop + 1
        with _one_at_a_time() if size > _TOGETHER else nullcontext():
            try:
                encodings = encode(texts[first:stop], add_special_tokens=False)
            except BaseException as error:
                if not is_failure(error):
                    raise
                raise _failed(encode, texts, range(first, stop), error) from None
            yield from encodings
            del encodings
        first = stop


def _failed(encode: Any, texts: Sequence[str], numbers: range, error: BaseException) -> FailedTextError:
    """Return the error for the first text on which the library fails.

    If the library fails only on several texts together, the error names the first of them.
    """
    first = numbers[0]
    for number in numbers if len(numbers) > 1 else ():
        try:
            encode([texts[number]], add_special_tokens=False)
        except BaseException as alone:
            if not is_failure(alone):
                raise
            first, error = number, alone
            break
    sentence = f"`tokenizers` fails on the text that begins with {texts[first][:40]!r}: {error}; leave the text out"
    failed = FailedTextError(sentence, "tokenizer-failed", option="tokenizer", given=str(error))
    failed.documents = (first,)
    return failed


@cache
def _one_at_a_time() -> threading.Lock:
    """Return the lock to hold while `tokenizers` encodes a text of more than _TOGETHER bytes."""
    return threading.Lock()


_one_at_a_time()  # creates it: two threads with the first call could get two locks


def ids_by(library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Return the ids of each text from `encoded_by`."""
    return [np.array(encoding.ids, np.int64) for encoding in encoded_by(library, texts)]


def long_text(size: int, *, documents: Sequence[int] = (), places: Sequence[int] = ()) -> LongTextError:
    """Return the error for a text of so many bytes. documents, places: attributes of the error."""
    sentence = f"{size:,} bytes of text, such as one word, reach `tokenizers` in one piece; split the text"
    error = LongTextError(sentence, "too-large", option="tokenizer", given=size)
    error.documents, error.places = tuple(documents), tuple(places)
    return error


def new_runs(near_lines: int) -> RunTables:
    """Return empty tables of runs, for one thread."""
    memory = _huge_pages(64 * (near_lines + FAR_LINES))
    return RunTables(
        near=memory[: 8 * near_lines],
        far=memory[8 * near_lines :][: 8 * FAR_LINES],
        used=np.zeros(2, np.int64),
        spelled=np.empty(SPELLED_BYTES, np.uint8),
        pool=np.empty(POOLED_IDS, np.uint32),
        stable=np.zeros(STABLE_SLOTS, np.int64),
        word=np.empty(WORD_BYTES, np.uint8),
        ids=np.empty(WORD_BYTES, np.int64),
        ranks=np.empty((2, WORD_BYTES), np.int64),
        best=np.empty(WORD_BYTES, np.float64),
        keys=np.empty(4 * (records.WINDOW + 72), np.uint64),
        places=np.empty(records.WINDOW + 136, np.uint16),
        bits=np.empty(NUM_BITS, np.uint64),
        carry=np.empty(NUM_CARRIES, np.uint64),
        dead=np.empty(WORD_BYTES // 64 + 1, np.uint64),
    )


def _huge_pages(size: int) -> NDArray[np.uint64]:
    """Return `size` zero bytes, in pages of 2 MB if available, because accesses to the tables of runs are random.

    The array is aligned to a cache line.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint64)
