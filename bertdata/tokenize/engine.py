"""The fast way from text to ids, for the two kinds of tokenizers that have a kernel: BERT's WordPiece, byte-level BPE.

An engine learns about a tokenizer by asking it. When a code point first occurs in a text, `tokenizers` normalizes and
splits all code points of its page of 256, and the kernel uses the results. A result that depends on neighbouring
characters fits no table. Such a run is *hard*, and `tokenizers` encodes it.

Threads. Kernels run without the GIL, so nothing that a running kernel reads may change. What all threads share is
written once, before any thread sees it, and is marked read-only: the constant tables, and the pages in
`Engine._pages`, which a lock guards. What changes belongs to one thread: its table of code points, its tables of runs.
A kernel that meets a code point without an entry returns; then its thread copies the page into its own table and calls
the kernel again. So no result depends on the order in which a processor's stores become visible. The table of code
points takes 18 MB of addresses a thread, but only 4 KB of memory for each page in use.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertdata.tokenize import kernels
from bertdata.tokenize.kernels import Output, RunTables, Text

PAGE = 256  # code points that the tokenizer is asked about at a time
NUM_CODE_POINTS = 0x110000
SHORT_SLOTS, LONG_SLOTS = 1 << 18, 1 << 17  # of the tables of runs; each table takes 4 MB a thread
WORD_BYTES = 4096  # of a normalized word; a longer word is hard, unless it is unknown
HARD_SHARE = 256  # bytes of text for each hard run; with more hard runs `tokenizers` encodes the whole text


class Engine:
    """What the engines have in common. All methods may be called from several threads at once."""

    name: str  # of the kind of tokenizer
    takes_lines: bool  # whether the ids of a text are the ids of its lines, one after the other

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._pages: dict[int, NDArray[Any]] = {}  # number of a page → entries of its code points, read-only
        self._probing = threading.Lock()  # held while _pages is read or written
        self._of_thread = threading.local()  # .tables, .runs: what the kernel reads and writes in this thread

    def _new_tables(self) -> Any:
        """The kernel's tables with the constant fields shared, and a new `points` in which no code point is known."""
        raise NotImplementedError

    def _entries(self, first: int) -> NDArray[Any]:
        """Asks the tokenizer about the page of code points that begins with `first`. Returns its part of `points`."""
        raise NotImplementedError

    def _run(self, text: Text, tables: Any, runs: RunTables, output: Output) -> int:
        """Calls the kernel and returns its code."""
        raise NotImplementedError

    def _warm(self) -> None:
        """Loads the kernel from numba's cache, or compiles it."""
        self.encode(np.zeros(kernels.PADDING, np.uint8), np.zeros(1, np.int64), np.zeros(0, np.bool_), 0)

    def encode(
        self, text: NDArray[np.uint8], bounds: NDArray[np.int64], separators: NDArray[np.bool_], separator: int
    ) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
        """The ids of pieces of text, and their offsets int64 [num_pieces + 1]. None: let `tokenizers` encode the text.

        The arguments are those of kernels.Text; a text with too few bytes after bounds[-1] is copied.
        """
        if text.size < bounds[-1] + kernels.PADDING:
            text = np.concatenate([text[: bounds[-1]], np.zeros(kernels.PADDING, np.uint8)])
        pieces = Text(text, bounds, separators, separator)
        output = Output(
            ids=np.empty(bounds[-1] + 4, self._dtype),
            bounds=np.zeros(bounds.size, np.int64),
            hard=np.empty((16 + int(bounds[-1]) // HARD_SHARE, 3), np.int64),
            state=np.zeros(5, np.int64),
        )
        output.state[kernels.BYTE] = bounds[0]
        thread = self._of_thread
        if not hasattr(thread, "tables"):
            thread.tables, thread.runs = self._new_tables(), _new_runs()
        while (code := self._run(pieces, thread.tables, thread.runs, output)) == kernels.UNKNOWN_CODE_POINT:
            page = int(output.state[kernels.CODE_POINT]) // PAGE
            thread.tables.points[page * PAGE : (page + 1) * PAGE] = self._page(page)
        if code == kernels.TOO_MANY_HARD:
            return None
        ids = output.ids[: output.bounds[-1]]
        num_hard = int(output.state[kernels.NUM_HARD])
        return self._with_hard(pieces, ids, output.bounds, output.hard[:num_hard]) if num_hard else (ids, output.bounds)

    def _page(self, number: int) -> NDArray[Any]:
        """The entries of 256 code points, which never change."""
        with self._probing:
            if number not in self._pages:
                self._pages[number] = read_only(self._entries(number * PAGE))
            return self._pages[number]

    def _with_hard(
        self, pieces: Text, ids: NDArray[Any], bounds: NDArray[np.int64], hard: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Encodes the hard runs by `tokenizers` and inserts their ids."""
        runs = [pieces.data[start:stop].tobytes().decode() for start, stop in hard[:, :2].tolist()]
        encodings = self._tokenizer.encode_batch_fast(runs, add_special_tokens=False)
        inserted = [np.array(encoding.ids, ids.dtype) for encoding in encodings]
        sizes = [of_run.size for of_run in inserted]
        ids = np.insert(ids, np.repeat(hard[:, 2], sizes), np.concatenate(inserted))
        piece_of_run = np.searchsorted(pieces.bounds, hard[:, 0], side="right") - 1
        more = np.bincount(piece_of_run, sizes, bounds.size - 1).astype(np.int64)
        return ids, bounds + np.append(0, np.cumsum(more))


def _new_runs() -> RunTables:
    """Empty tables of runs, for one thread."""
    return RunTables(
        short=np.full(2 * SHORT_SLOTS, kernels.EMPTY),
        long=np.full(4 * LONG_SLOTS, kernels.EMPTY),
        used=np.zeros(2, np.int64),
        word=np.empty(WORD_BYTES, np.uint8),
        ids=np.empty(WORD_BYTES, np.int64),
    )


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """The array, after making it read-only. numba refuses to compile a kernel that writes to such an array."""
    array.flags.writeable = False
    return array


def added_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The tokens that were added to the vocabulary and are not special, so that text may contain them."""
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
