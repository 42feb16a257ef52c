"""Our own tokenizing, exact for the tokenizers it takes: BERT's WordPiece and byte-level BPE.

An engine knows a tokenizer by asking it: `tokenizers` normalizes and splits every code point once, 256 at a time, when
one first occurs in the text, and kernels go by those answers. What no table can answer (characters that change with
their neighbours) is left to `tokenizers` itself, run by run.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertdata.tokenize import kernels

PAGE = 256  # code points probed at a time
SHORT_SLOTS, LONG_SLOTS = 1 << 18, 1 << 17  # of the run tables; 4 MB each
WORD_BYTES = 4096  # of a normalized word; a longer one that is no unknown is left to the tokenizer
HARD_SHARE = 256  # bytes of text for each run that is left to the tokenizer, before all of it is


class Engine:
    """What engines share. Thread-safe; each thread has run tables of its own."""

    takes_lines: bool  # whether the ids of a text are those of its lines one after the other

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._probing = threading.Lock()
        self._of_thread = threading.local()

    def _run(self, text: Any, bounds: Any, separators: Any, separator: int, tables: Any, results: Any) -> int:
        """The kernel's answer."""
        raise NotImplementedError

    def _is_probed(self, first: int) -> bool:
        raise NotImplementedError

    def _fill(self, first: int) -> None:
        """Asks the tokenizer about code points first, first + 1, ..., first + PAGE - 1."""
        raise NotImplementedError

    def _warm(self) -> None:
        """Loads the kernel."""
        self.encode(np.zeros(kernels.PADDING, np.uint8), np.zeros(1, np.int64), np.zeros(0, np.bool_), 0)

    def encode(
        self, text: NDArray[np.uint8], bounds: NDArray[np.int64], separators: NDArray[np.bool_], separator: int
    ) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
        """The ids of pieces of text and their offsets, as kernels.wordpiece has them; None: ask the tokenizer."""
        if text.size < bounds[-1] + kernels.PADDING:
            text = np.concatenate([text[: bounds[-1]], np.zeros(kernels.PADDING, np.uint8)])
        tables = self._tables()
        out = np.empty(bounds[-1] + 4, self._dtype)
        out_bounds = np.zeros(bounds.size, np.int64)
        hard = np.empty((16 + int(bounds[-1]) // HARD_SHARE, 3), np.int64)
        state = np.zeros(5, np.int64)
        state[1] = bounds[0]
        while True:
            answer = self._run(text, bounds, separators, separator, tables, (out, out_bounds, hard, state))
            if answer == kernels.TOO_MANY_HARD:
                return None
            if answer == kernels.DONE:
                break
            self._probe(int(state[4]) // PAGE)
        out = out[: out_bounds[-1]]
        return self._with_hard(text, bounds, out, out_bounds, hard[: state[3]]) if state[3] else (out, out_bounds)

    def _probe(self, page: int) -> None:
        """Fills the tables for 256 code points."""
        with self._probing:
            if not self._is_probed(page * PAGE):
                self._fill(page * PAGE)

    def _tables(self) -> tuple[Any, ...]:
        if not hasattr(self._of_thread, "tables"):
            short = np.full(2 * SHORT_SLOTS, kernels.EMPTY)
            long = np.full(4 * LONG_SLOTS, kernels.EMPTY)
            word = np.empty(WORD_BYTES, np.uint8)
            self._of_thread.tables = short, long, np.zeros(2, np.int64), word, np.empty(WORD_BYTES, np.int64)
        return self._of_thread.tables  # type: ignore[no-any-return]

    def _with_hard(self, text: Any, bounds: Any, out: Any, out_bounds: Any, hard: Any) -> tuple[Any, Any]:
        """Puts the ids of hard runs where they belong."""
        runs = [text[start:stop].tobytes().decode() for start, stop in hard[:, :2].tolist()]
        found = [np.array(e.ids, out.dtype) for e in self._tokenizer.encode_batch_fast(runs, add_special_tokens=False)]
        out = np.insert(out, np.repeat(hard[:, 2], [ids.size for ids in found]), np.concatenate(found))
        pieces = np.searchsorted(bounds, hard[:, 0], side="right") - 1
        more = np.bincount(pieces, [ids.size for ids in found], bounds.size - 1).astype(np.int64)
        return out, out_bounds + np.append(0, np.cumsum(more))


def added_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The tokens that were added to a vocabulary and are not special: text may spell them."""
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
