"""A tokenizer of `tokenizers` together with the engine that gives its ids, if there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.tokenize.added import AddedTokens
from bertdata.tokenize.engine import Engine, forbidden_ids, padded
from bertdata.tokenize.forms import Forms
from bertdata.tokenize.kernels.records import Text
from bertdata.tokenize.rules import Unsupported
from bertdata.tokenize.source import Source
from bertdata.tokenize.words import Words
from bertdata.types import SpecialTokens

_TOO_DEEP = "its rules have too many alternatives, or too many parentheses inside others"


class Encoder:
    """Pieces of text → ids. May be used by several threads at once."""

    engine: Engine | None = None
    refusal: str | None = None
    """One clause that says why there is no engine."""

    def __init__(self, source: Source, special: SpecialTokens) -> None:
        """special: its special ids are those that text may not give.

        Loading kernels takes about 0.1 s;
        compiling them takes some seconds, once on a machine.
        """
        try:
            engine = Words(source, special)
            # What the engine does not see
            self._added = AddedTokens(source, Forms(source.outline["normalizer"]), forbidden_ids(special))
            self.engine = engine
        except Unsupported as refusal:
            self.refusal = str(refusal)
        except RecursionError:
            self.refusal = _TOO_DEEP
        source.forget()

    @property
    def why_slow(self) -> str | None:
        """One clause that says why `tokenizers` encodes all text, or usual text; None: an engine encodes it."""
        return self.refusal or (self.engine.why_slow if self.engine else None)

    def encode(
        self, text: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], tails: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64], int] | None:
        """The ids of the pieces text[starts[i] : stops[i]], their offsets, and how many special ids were replaced.

        text: valid UTF-8; it is copied if fewer than PADDING bytes follow the last piece. tails: an id that is written
        after the ids of each piece, -1 for none. None: there is no engine, or the text gives a special id and there is
        no unknown id to replace it.
        """
        if self.engine is None:
            return None
        text = padded(text, int(stops.max(initial=0)))
        try:
            return self._encode(self.engine, text, starts, stops, tails)
        except (Unsupported, RecursionError) as refusal:  # only this text shows that the rules need too much
            self.engine, self.refusal = None, str(refusal) if isinstance(refusal, Unsupported) else _TOO_DEEP
            return None

    def _encode(
        self,
        engine: Engine,
        text: NDArray[np.uint8],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        tails: NDArray[np.int64],
    ) -> tuple[NDArray[Any], NDArray[np.int64], int] | None:
        if not self._added:
            return engine.encode(Text(text, starts, stops, tails, np.ones(tails.size, np.bool_)))
        cuts = self._added.cut(text, starts, stops, tails)
        sources = cuts.source_piece[cuts.left_out]
        left_out = np.stack([np.flatnonzero(cuts.left_out), starts[sources], stops[sources]], 1)
        encoded = engine.encode(Text(text, cuts.starts, cuts.stops, cuts.tails, cuts.begins), left_out)
        if encoded is None:
            return None
        ids, pieces, replaced = encoded
        bounds = np.append(np.searchsorted(cuts.source_piece, np.arange(tails.size)), cuts.source_piece.size)
        return ids, pieces[bounds], replaced
