"""What the fast ways from text to ids have in common.

An engine learns about a tokenizer by asking it. When a code point first occurs in a text, `tokenizers` says what it
does with all code points of its page of 256, and the kernel uses the results. Where a result depends on neighbouring
characters in a way that fits no table, the run is *hard*: `tokenizers` encodes it. Short ones are kept in the tables of
runs.

Threads. Kernels run without the GIL, so nothing that a running kernel reads may change. What all threads share is
written once, before any thread sees it, and is marked read-only: the constant tables, and the pages in
`Engine._pages`, which a lock guards. What changes belongs to one thread: its table of code points, its tables of runs.
A kernel that meets a code point without an entry returns; then its thread copies the page into its own table and calls
the kernel again. So no result depends on the order in which a processor's stores become visible.

Memory of a thread: 19 MB of addresses for tables of code points, of which 5 KB for each page in use are memory, and
13 MB for the tables of runs, 21 MB for BERT's WordPiece. Up to 24 MB more hold longer runs and those of more than three
ids, as they are met.
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
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.begins import NUM_BITS, NUM_CARRIES
from bertdata.tokenize.kernels.records import Output, RunTables, Text, WordTables
from bertdata.tokenize.kernels.runs import keep_pair, keep_runs
from bertdata.tokenize.kernels.words import encode_words
from bertdata.tokenize.models import read_only
from bertdata.tokenize.rules import Rules
from bertdata.tokenize.source import Source, is_failure
from bertdata.types import SpecialTokens

PAGE = 256  # code points that the tokenizer is asked about at a time
NUM_CODE_POINTS = 0x110000
NEAR_LINES, FAR_LINES = 1 << 17, 1 << 16  # of 64 bytes in the tables of runs; two make a set
SPELLED_BYTES, POOLED_IDS, STABLE_SLOTS = 1 << 23, 1 << 22, 1 << 14
WORD_BYTES = 1 << 14  # of a normalized word, at most; a word of a quarter of it or more is hard
HARD_RUNS = 1 << 10  # that the kernel finds before `tokenizers` encodes them
LONGEST_PIECE = 1 << 24  # bytes of text that `tokenizers` may get in one piece; it takes 100 to 220 bytes for each
_TOGETHER = 1 << 20  # bytes of texts that it gets at a time, and of a text that several threads may give it at once
_RESOLVED = 1 << 24  # bytes of hard runs that are in memory together, more or less


_Inserted = list[tuple[int, int, NDArray[Any]]]
"""Ids of hard runs: where a run begins in the text, the place of its ids among the others, and the ids."""


class Engine:
    """All methods may be called from several threads at once."""

    name: str
    """What kind of tokenizer it takes."""
    takes_lines: bool
    """Whether the ids of a text are the ids of its lines, one after the other."""
    _rules: Rules
    why_slow: str | None = None
    """One clause that says why usual text is hard."""
    near_factor = 1
    """How many times NEAR_LINES lines its table of runs has."""

    def __init__(self, source: Source, special: SpecialTokens) -> None:
        self._source, self._special, self._unk = source, forbidden_ids(special), special.unk
        self._dtype = np.uint16 if special.vocab_size <= 1 << 16 else np.uint32
        self._pages: dict[int, NDArray[Any]] = {}  # number of a page → entries of its code points, read-only
        self._kept, self._num_kept = f"pages: {special}", 0  # name in the cache, and pages there
        self._probing = threading.Lock()  # held while the tokenizer is asked, and while _pages is read or written
        self._local = threading.local()  # .tables, .runs: what the kernel reads and writes in this thread

    def _new_tables(self) -> WordTables:
        """The kernel's tables with the constant fields shared, and new entries, in which no code point is known."""
        raise NotImplementedError

    def _with_page(self, tables: WordTables, number: int) -> WordTables:
        """The tables of a thread with the entries of a page of code points."""
        raise NotImplementedError

    def _entries(self, first: int) -> NDArray[Any]:
        """Ask the tokenizer about the page of code points that begins with `first`. Return its entries."""
        raise NotImplementedError

    def _is_stable(self, before: int, point: int) -> bool:
        """Whether two code points side by side leave each other alone."""
        raise NotImplementedError

    def _encode_hard(self, texts: Sequence[str], where: int) -> list[NDArray[np.int64]]:
        """The ids of hard runs. where: the last column of records.Output.hard."""
        raise NotImplementedError

    def _warm(self) -> None:
        """Load the kernel from numba's cache, or compile it."""
        nothing = np.zeros(0, np.int64)
        self.encode(Text(np.zeros(records.PADDING, np.uint8), nothing, nothing, nothing, np.zeros(0, np.bool_)))

    def encode(
        self, text: Text, left_out: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[Any], NDArray[np.int64], int] | None:
        """The ids of pieces of text, their offsets int64 [num_pieces + 1], and how many special ids were replaced.

        left_out: int64 [n, 3], rows (piece, start, stop): these pieces are empty, and `tokenizers` encodes
        data[start:stop] in their place. None if the text gives a special id, and there is no unknown id to replace it.
        PADDING bytes follow the last piece. Raises LongTextError for what `tokenizers` must encode in one piece and is
        longer than LONGEST_PIECE, and FailedTextError.
        """
        left_out = np.zeros((0, 3), np.int64) if left_out is None else left_out
        text = text._replace(data=read_only(text.data.view()))  # kernels are compiled for one kind of array
        output = Output(
            ids=np.empty(int((text.stops - text.starts).sum()) + 4 * text.starts.size + 4, self._dtype),
            bounds=np.zeros(text.starts.size + 1, np.int64),
            hard=np.empty((HARD_RUNS, 4), np.int64),
            state=np.zeros(records.NUM_STATES, np.int64),
        )
        thread = self._thread()
        inserted: _Inserted = []
        code = -1
        while code != records.DONE:
            code = encode_words(text, thread.tables, thread.runs, output)
            point = int(output.state[records.CODE_POINT])
            if code == records.UNKNOWN_CODE_POINT:
                thread.tables = self._with_page(thread.tables, point // PAGE)
            elif code == records.UNKNOWN_PAIR:
                before = int(output.state[records.BEFORE])
                with self._probing:
                    is_stable = self._is_stable(before, point)
                keep_pair(before, point, is_stable, thread.runs)
            else:
                hard = output.hard[: output.state[records.NUM_HARD]].copy()
                output.state[records.NUM_HARD] = 0
                if code == records.GIVES_SPECIAL or not self._resolve(text, hard, thread.runs, output, inserted):
                    return None
        if left_out.size:
            piece, start, stop = left_out.T
            rows = np.stack([start, stop, output.bounds[piece], np.full_like(piece, records.AT_BEGIN)], axis=1)
            if not self._resolve(text, rows, thread.runs, output, inserted):
                return None
        if len(self._pages) > self._num_kept * 9 // 8:
            self._keep_pages()
        ids, bounds = _insert(output.ids[: output.bounds[-1]], text.starts, output.bounds, inserted)
        return ids, bounds, int(output.state[records.REPLACED])

    def _thread(self) -> Any:
        """What belongs to this thread: .tables and .runs."""
        thread = self._local
        if not hasattr(thread, "tables"):
            thread.tables, thread.runs = self._new_tables(), new_runs(self.near_factor * NEAR_LINES)
        return thread

    def _page(self, number: int) -> NDArray[Any]:
        """Return the entries of 256 code points, which never change. The caller holds the lock."""
        if not self._pages and (kept := self._source.read(self._kept)):
            self._rules.classes([(int(matches), flags) for matches, flags in kept["classes"]])
            self._pages |= zip(kept["numbers"].tolist(), kept["entries"], strict=True)
            self._num_kept = len(self._pages)
        if number not in self._pages:
            self._pages[number] = read_only(self._entries(number * PAGE))
        return self._pages[number]

    def _keep_pages(self) -> None:
        """Write the pages to the cache."""
        with self._probing:
            self._num_kept, classes = len(self._pages), [[str(m), flags] for m, flags in self._rules.class_keys]
            values = {"numbers": np.array([*self._pages]), "entries": np.stack([*self._pages.values()])}
            self._source.keep(self._kept, values | {"classes": classes})

    def _resolve(
        self, text: Text, hard: NDArray[np.int64], runs: RunTables, output: Output, inserted: _Inserted
    ) -> bool:
        """Encode hard runs, rows of Output.hard. False if they give a special id that nothing can replace."""
        if not hard.size:
            return True
        too_long = hard[hard[:, 1] - hard[:, 0] > LONGEST_PIECE]
        if too_long.size:
            raise long_text(int(too_long[0, 1] - too_long[0, 0]), places=too_long[:, 0].tolist())
        together = np.cumsum(hard[:, 1] - hard[:, 0]) // _RESOLVED
        parts = np.split(hard, np.flatnonzero(np.diff(together)) + 1)
        return all(self._resolve_some(text, part, runs, output, inserted) for part in parts)

    def _resolve_some(
        self, text: Text, hard: NDArray[np.int64], runs: RunTables, output: Output, inserted: _Inserted
    ) -> bool:
        """Do what `_resolve` does, for some rows."""
        for where in np.unique(hard[:, 3]).tolist():
            rows = hard[hard[:, 3] == where]
            spelled = [text.data[start:stop].tobytes() for start, stop in rows[:, :2].tolist()]
            numbers = {run: k for k, run in enumerate(dict.fromkeys(spelled))}
            number_of_row = [numbers[run] for run in spelled]
            try:
                encoded = self._encode_hard([*map(bytes.decode, numbers)], where)
            except FailedTextError as error:
                error.places = (int(rows[number_of_row.index(error.documents[0]), 0]),)
                raise
            replaced = [int(self._special[ids].sum()) for ids in encoded]
            if any(replaced) and self._unk is None:
                return False
            for ids in encoded:
                ids[self._special[ids]] = self._unk or 0
            output.state[records.REPLACED] += sum(replaced[number] for number in number_of_row)
            own = [encoded[number].astype(self._dtype) for number in number_of_row]
            inserted += zip(rows[:, 0].tolist(), rows[:, 2].tolist(), own, strict=True)
            if where == records.IN_MIDDLE:
                first = np.unique(number_of_row, return_index=True)[1]  # the row in which each run occurs first
                kept = np.flatnonzero(np.array(replaced) == 0)
                ids = np.concatenate([np.zeros(0, np.int64), *(encoded[number] for number in kept)])
                bounds = np.append(0, np.cumsum([encoded[number].size for number in kept], dtype=np.int64))
                keep_runs(text.data, rows[first[kept]], ids, bounds, output.ids, runs)
        return True


def _insert(
    ids: NDArray[Any], starts: NDArray[np.int64], bounds: NDArray[np.int64], inserted: _Inserted
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the ids with those of hard runs inserted, and their bounds. starts: where the pieces of text start."""
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
    """What the library gives for texts, one after the other. Keep none of them: each takes much memory.

    with_places: also the places of tokens in the text, which takes longer. Raises FailedTextError if the library fails,
    as for a panic of its Rust code, and LongTextError for a text that is longer than LONGEST_PIECE.
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
    """The error for the first text that the library fails on.

    If it fails on several texts only together, the error names the first of them.
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
    """Held while `tokenizers` has a text of more than _TOGETHER."""
    return threading.Lock()


def ids_by(library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """The ids of each text, as `encoded_by` gives them."""
    return [np.array(encoding.ids, np.int64) for encoding in encoded_by(library, texts)]


def long_text(size: int, *, documents: Sequence[int] = (), places: Sequence[int] = ()) -> LongTextError:
    """The error for a text of so many bytes. documents, places: as the error has them."""
    sentence = f"{size:,} bytes of text, such as one word, reach `tokenizers` in one piece; split the text"
    error = LongTextError(sentence, "too-large", option="tokenizer", given=size)
    error.documents, error.places = tuple(documents), tuple(places)
    return error


def padded(text: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The text, copied if fewer than PADDING bytes follow its first `size`, as kernels read so far."""
    if text.size >= size + records.PADDING:
        return text
    return np.concatenate([text[:size], np.zeros(records.PADDING, np.uint8)])


def forbidden_ids(special: SpecialTokens) -> NDArray[np.bool_]:
    """bool [vocab_size], read-only: the ids that text may not give; the unknown id is stored in their place."""
    forbidden = np.zeros(special.vocab_size, np.bool_)
    forbidden[list(set(special.special_ids) - {special.unk})] = True
    return read_only(forbidden)


def new_runs(near_lines: int) -> RunTables:
    """Empty tables of runs, for one thread."""
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
    """Zeros, `size` bytes of them, in pages of 2 MB if the system has some: a word is anywhere in the tables of runs.

    They begin where a line of a processor's cache does.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint64)
