"""Where text contains added tokens: tokens that are cut out before the rules and the model see the text.

`tokenizers` cuts at the leftmost token, and there at the longest. A token is searched for in the text as it stands or
in its normal form. The second kind is taken only if no other text has the token as its normal form, or if the few texts
that do can be told apart; `tokenizers` encodes those.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, normalizers

from bertdata.tokenize.forms import Forms
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.added import find_added, find_hazards
from bertdata.tokenize.kernels.records import Added
from bertdata.tokenize.models import trie_of
from bertdata.tokenize.rules import Unsupported
from bertdata.tokenize.source import Source

_MARKS = [
    chr(n) for n in (*range(0x300, 0x370), 0x653, 0x654, 0x655, 0x93C, 0x9BE, 0x9D7, 0x3099, 0x309A, 0x1161, 0x11A8)
]


class Cuts(NamedTuple):
    """Text cut at added tokens: arrays over the pieces between them, as in records.Text."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    tails: NDArray[np.int64]
    begins: NDArray[np.bool_]
    left_out: NDArray[np.bool_]
    """[num_pieces]: pieces that are empty here, because `tokenizers` must encode the text that the caller gave."""
    source_piece: NDArray[np.int64]
    """[num_pieces]: the number of the caller's piece."""


class AddedTokens:
    """The added tokens of a tokenizer that text may contain. May be used by several threads at once."""

    def __init__(self, source: Source, forms: Forms, forbidden: NDArray[np.bool_]) -> None:
        """forbidden: bool [vocab_size], ids that text may not give.

        Raises Unsupported for tokens whose places in a text the normalizer blurs.
        """
        added = source.added
        are_text = source.special_is_text  # special tokens in a text
        self._forms, self._lock = forms, threading.Lock()
        self._hazards: dict[int, int] = {}
        self._searches: list[tuple[Added, bool]] = []  # and whether other text may have a token as its normal form
        # Of the tokens that are searched for in the normal form of a text: the number of each character, and which two
        # of them stand side by side in a token
        self._numbers: dict[str, int] = {}
        self._adjacent = np.zeros((256, 256), np.bool_)
        for normalized in (False, True):
            chosen = [(n, token) for n, token in added.items() if token.normalized == normalized and token.content]
            if all(token.special and are_text for _, token in chosen):
                continue
            contents = [token.content for _, token in chosen if not (token.special and are_text)] if normalized else []
            # What takes long with many tokens; if _check raises, nothing is kept
            kept = source.kept(f"added {normalized} {are_text}", partial(self._checked_trie, contents, chosen))
            if normalized:
                # The numbers of find_hazards, from 3 on; if there are too many characters, many share the last
                characters = sorted({c for content in contents for c in content})
                self._numbers = {c: min(number, 255) for number, c in enumerate(characters, 3)}
                for a, b in (pair for content in contents for pair in pairwise(content)):
                    self._adjacent[self._numbers[a], self._numbers[b]] = True
            # id; -1: the token stays text; -2: leave the whole text to `tokenizers`
            ids = [
                -1
                if token.special and are_text
                else -2
                if token.lstrip or token.rstrip or token.single_word or forbidden[n]
                else n
                for n, token in chosen
            ]
            begins: NDArray[np.bool_] = np.zeros((256, 256), np.bool_)
            for _, token in chosen:
                spelling = token.content.encode()
                begins[spelling[0], spelling[1] if len(spelling) > 1 else slice(None)] = True
            blurs = normalized and not forms.is_identity
            watched = np.array([b >= 0xC0 or (blurs and b < 128 and self._hazard(b) > 0) for b in range(256)])
            search = Added(
                trie=kept["trie"],
                ids=np.array(ids, np.int64),
                begins=begins.ravel(),
                first=ranges_of(np.any(begins, axis=1)),
                second=ranges_of(np.any(begins, axis=0)),
                watched=ranges_of(watched),
            )
            self._searches.append((search, blurs))

    def __bool__(self) -> bool:
        return bool(self._searches)

    def _checked_trie(self, contents: list[str], chosen: list[tuple[int, AddedToken]]) -> dict[str, Any]:
        """Return the trie of the tokens. Raises Unsupported as `_check` does."""
        self._check(contents)
        return {"trie": trie_of({token.content.encode(): k for k, (_, token) in enumerate(chosen)})}

    def _check(self, contents: list[str]) -> None:
        forms = self._forms
        if contents and (forms.strips or forms.prepended or forms.collapses):
            raise Unsupported("it searches the normal form of a text for added tokens")
        for content in contents:
            last = content[-1]
            made = {c for _, by, _ in forms.strings for c in by}
            replaced = [string for string, _, _ in forms.strings]
            if forms.composes:
                made |= {c for c in content if normalizers.NFD().normalize_str(c) != c}
            if not made.isdisjoint(content) or any(
                last in string[:-1] or content[0] in string[1:] for string in replaced
            ):
                raise Unsupported(f"its normalizer may make the added token {content!r} of other text")
            if any(forms.normal(c) != c for c in content) or forms.normal(content) != content:
                raise Unsupported(f"its normalizer changes the added token {content!r}")
            if any(forms.normal(last + mark) != last + forms.normal(mark) for mark in _MARKS):
                raise Unsupported(f"its normalizer may change the end of the added token {content!r}")

    def _hazard(self, point: int) -> int:
        """0: harmless; 1: the code point has an empty normal form; 2: its normal form has characters of a token."""
        if point not in self._hazards:
            form = self._forms.normal(chr(point))
            blurs = form != chr(point) and not self._numbers.keys().isdisjoint(form)
            self._hazards[point] = 1 if not form else 2 if blurs else 0
        return self._hazards[point]

    def cut(
        self, text: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], tails: NDArray[np.int64]
    ) -> Cuts:
        """Cut pieces of text, text[starts[i] : stops[i]], at the added tokens. tails: as in records.Text."""
        cuts = Cuts(
            starts,
            stops,
            tails,
            np.ones(starts.size, np.bool_),
            np.zeros(starts.size, np.bool_),
            np.arange(starts.size),
        )
        for search, blurs in self._searches:
            left_out = np.zeros(starts.size, np.bool_)
            seen = np.zeros(0x110000 // 64 if blurs else 0, np.uint64)
            room = np.empty((1024, 4), np.int64)
            found = find_added(text, cuts.starts, cuts.stops, search, seen, room)
            while found > room.shape[0]:
                room, seen[:] = np.empty((found, 4), np.int64), 0
                found = find_added(text, cuts.starts, cuts.stops, search, seen, room)
            if blurs:
                self._leave_out_blurred(text, cuts, search, seen, left_out)
            cuts = _apply(cuts, room[:found], left_out, tails)
        return cuts

    def _leave_out_blurred(
        self,
        text: NDArray[np.uint8],
        cuts: Cuts,
        search: Added,
        seen: NDArray[np.uint64],
        left_out: NDArray[np.bool_],
    ) -> None:
        """Mark the pieces in which other text than a token may have the token as its normal form."""
        points = np.flatnonzero(np.unpackbits(seen.view(np.uint8), bitorder="little")).tolist()
        with self._lock:
            hazards = {point: hazard for point in points if (hazard := self._hazard(point))}
        if hazards:
            table = np.zeros(0x110000, np.uint8)
            for point, hazard in hazards.items():
                table[point] = hazard
            table[[ord(c) for c in self._numbers]] = list(self._numbers.values())
            harmed = np.zeros(cuts.starts.size, np.bool_)
            find_hazards(text, cuts.starts, cuts.stops, table, self._adjacent, search.watched, harmed)
            left_out[cuts.source_piece[harmed]] = True


def ranges_of(are_in: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """uint8 [RANGES, 2]: ranges of bytes, as in records.Added, that hold the bytes that are in, and as few others."""
    chosen = np.flatnonzero(are_in)
    gaps = np.diff(chosen)
    widest = np.argsort(gaps)[::-1][: records.RANGES - 1]
    parts = np.split(chosen, np.sort(widest) + 1)
    parts += [parts[0]] * (records.RANGES - len(parts))
    return np.array([(part[0], part[-1] - part[0]) for part in parts], np.uint8)


def _apply(cuts: Cuts, found: NDArray[np.int64], left_out: NDArray[np.bool_], source_tails: NDArray[np.int64]) -> Cuts:
    """Cut pieces at the tokens found: rows (piece, start, stop, id).

    left_out: bool, over the caller's pieces; those with a token of id -2 are left out too. source_tails: their tails.
    """
    left_out[cuts.source_piece[found[found[:, 3] == -2, 0]]] = True
    left_out[cuts.source_piece[cuts.left_out]] = True
    found = found[~left_out[cuts.source_piece[found[:, 0]]]]
    if not found.size and not left_out.any():
        return cuts
    piece, start, stop, token_id = found.T
    order = np.argsort(np.append(np.arange(cuts.starts.size), piece), kind="stable")
    # Each piece is followed by its tokens: a piece ends where its first token begins, a token's text is a new piece.
    cut_piece = np.append(np.arange(cuts.starts.size), piece)[order]
    starts = np.append(cuts.starts, stop)[order]
    is_token = np.append(np.zeros(cuts.starts.size, np.bool_), np.ones(piece.size, np.bool_))[order]
    next_start = np.append(np.append(cuts.starts, start)[order][1:], 0)
    next_id = np.append(np.append(cuts.tails, token_id)[order][1:], 0)
    followed = np.append(is_token[1:], False)
    stops = np.where(followed, next_start, cuts.stops[cut_piece])
    tails = np.where(followed, next_id, cuts.tails[cut_piece])
    begins = cuts.begins[cut_piece] & ~is_token
    source_piece = cuts.source_piece[cut_piece]
    out = left_out[source_piece]
    first = np.append(True, source_piece[1:] != source_piece[:-1])  # of a piece that is left out one piece stays, empty
    keep = ~out | first
    stops = np.where(out, starts, stops)
    tails = np.where(out, source_tails[source_piece], tails)
    return Cuts(starts[keep], stops[keep], tails[keep], begins[keep], out[keep], source_piece[keep])
