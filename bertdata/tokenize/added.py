"""Find added tokens in text: tokens that are cut out before the rules and the model process the text.

`tokenizers` cuts at the leftmost token; of several tokens there, at the longest. It searches for a token either in the
raw text or in its normal form. An engine supports the second kind only if no different text has the token as its normal
form, or if the few such texts can be detected; `tokenizers` encodes these.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, normalizers

from bertdata.tokenize.forms import Forms
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.added import find_added, find_hazards
from bertdata.tokenize.kernels.records import Added, Text
from bertdata.tokenize.models import trie_of
from bertdata.tokenize.rules import Unsupported
from bertdata.tokenize.source import Source

_MARKS = [
    chr(n) for n in (*range(0x300, 0x370), 0x653, 0x654, 0x655, 0x93C, 0x9BE, 0x9D7, 0x3099, 0x309A, 0x1161, 0x11A8)
]


class AddedTokens:
    """The added tokens of a tokenizer that text may contain. Thread-safe."""

    def __init__(self, source: Source, forms: Forms, forbidden: NDArray[np.bool_]) -> None:
        """forbidden: bool [vocab_size], ids that text must not become.

        Raises Unsupported for tokens whose places in the text are unclear after the normalizer.
        """
        added = source.added
        are_text = source.special_is_text  # special tokens in a text
        self._forms, self._lock = forms, threading.Lock()
        self._hazards: dict[int, int] = {}
        self._searches: list[tuple[Added, bool]] = []  # and whether different text may have a token as its normal form
        # For tokens that are searched for in the normal form of a text: an index for each character, and which two
        # characters are adjacent in a token
        self._numbers: dict[str, int] = {}
        self._adjacent = np.zeros((256, 256), np.bool_)
        for normalized in (False, True):
            chosen = [(n, token) for n, token in added.items() if token.normalized == normalized and token.content]
            is_text = np.array([token.special and are_text for _, token in chosen], np.bool_)
            if is_text.all():
                continue
            searched = [token.content for (_, token), stays in zip(chosen, is_text, strict=True) if not stays]
            contents = searched if normalized else []
            # These are slow with many tokens.
            kept = source.kept(f"added {normalized} {are_text}", partial(self._checked_trie, contents, chosen))
            if normalized:
                # The numbers for find_hazards, from 3 on; if there are too many characters, many share the last one
                characters = sorted({c for content in contents for c in content})
                self._numbers = {c: min(number, 255) for number, c in enumerate(characters, 3)}
                for a, b in (pair for content in contents for pair in pairwise(content)):
                    self._adjacent[self._numbers[a], self._numbers[b]] = True
            is_hard = [token.lstrip or token.rstrip or token.single_word or forbidden[n] for n, token in chosen]
            begins: NDArray[np.bool_] = np.zeros((256, 256), np.bool_)
            for _, token in chosen:
                spelling = token.content.encode()
                begins[spelling[0], spelling[1] if len(spelling) > 1 else slice(None)] = True
            blurs = normalized and not forms.is_identity
            watched = np.array([b >= 0xC0 or (blurs and b < 128 and self._hazard(b) > 0) for b in range(256)])
            search = Added(
                trie=kept["trie"],
                ids=np.where(is_text, -1, np.where(is_hard, -2, [n for n, _ in chosen])),
                begins=begins.ravel(),
                first=ranges_of(np.any(begins, axis=1)),
                second=ranges_of(np.any(begins, axis=0)),
                watched=ranges_of(watched),
            )
            self._searches.append((search, blurs))

    def __bool__(self) -> bool:
        return bool(self._searches)

    def _checked_trie(self, contents: list[str], chosen: list[tuple[int, AddedToken]]) -> dict[str, Any]:
        """Return the trie of the tokens. Raises Unsupported like `_check`."""
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
        """Return 1 for a code point whose normal form is empty, 2 if it has characters of a token, else 0."""
        if point not in self._hazards:
            form = self._forms.normal(chr(point))
            blurs = form != chr(point) and not self._numbers.keys().isdisjoint(form)
            self._hazards[point] = 1 if not form else 2 if blurs else 0
        return self._hazards[point]

    def cut(self, text: Text) -> tuple[Text, NDArray[np.int64], NDArray[np.int64]]:
        """Cut pieces of text at the added tokens.

        Return the pieces between the tokens, the index of the caller's piece for each, int64, and the indices of the
        caller's pieces that `tokenizers` must encode, int64: each of these becomes one empty piece.
        """
        cut, sources = text, np.arange(text.starts.size)
        left_out = np.zeros(sources.size, np.bool_)
        for search, blurs in self._searches:
            seen, room = np.zeros(0x110000 // 64 if blurs else 0, np.uint64), np.empty((1024, 4), np.int64)
            num_found = find_added(text.data, cut.starts, cut.stops, search, seen, room)
            if num_found > room.shape[0]:
                room = np.empty((num_found, 4), np.int64)
                find_added(text.data, cut.starts, cut.stops, search, seen, room)
            found = room[:num_found]
            left_out[sources[found[found[:, 3] == -2, 0]]] = True
            if blurs:
                left_out[sources[self._are_blurred(cut, search, seen)]] = True
            found = found[~left_out[sources[found[:, 0]]]]
            if found.size:
                cut, sources = _cut_at(found, cut, sources)
            if left_out.any():
                is_out = left_out[sources]
                stops = np.where(is_out, cut.starts, cut.stops)
                tails = np.where(is_out, text.tails[sources], cut.tails)
                # A piece for `tokenizers` keeps its first part, which becomes empty.
                keep = ~is_out | (np.diff(sources, prepend=-1) > 0)
                cut = Text(text.data, *(each[keep] for each in (cut.starts, stops, tails, cut.begins)))
                sources = sources[keep]
        return cut, sources, np.flatnonzero(left_out)

    def _are_blurred(self, text: Text, search: Added, seen: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which pieces may have text that differs from a token but has it as normal form: bool [num_pieces].

        seen: from `find_added`.
        """
        points = np.flatnonzero(np.unpackbits(seen.view(np.uint8), bitorder="little")).tolist()
        with self._lock:
            hazards = {point: hazard for point in points if (hazard := self._hazard(point))}
        harmed = np.zeros(text.starts.size, np.bool_)
        if hazards:
            table = np.zeros(0x110000, np.uint8)
            for point, hazard in hazards.items():
                table[point] = hazard
            table[[ord(c) for c in self._numbers]] = list(self._numbers.values())
            find_hazards(text.data, text.starts, text.stops, table, self._adjacent, search.watched, harmed)
        return harmed


def _cut_at(found: NDArray[np.int64], text: Text, sources: NDArray[np.int64]) -> tuple[Text, NDArray[np.int64]]:
    """Cut pieces at tokens, rows (piece, start, stop, id). sources: a number for each piece, copied to its parts."""
    piece, start, stop, token_id = found.T
    starts = np.insert(text.starts, piece + 1, stop)
    stops = np.insert(text.stops, piece, start)
    tails = np.insert(text.tails, piece, token_id)
    begins = np.insert(text.begins, piece + 1, np.zeros(piece.size, np.bool_))
    return Text(text.data, starts, stops, tails, begins), np.insert(sources, piece, sources[piece])


def ranges_of(are_in: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return ranges that cover the given bytes and few other bytes: uint8 [RANGES, 2], as in records.Added."""
    chosen = np.flatnonzero(are_in)
    gaps = np.diff(chosen)
    widest = np.argsort(gaps)[::-1][: records.RANGES - 1]
    parts = np.split(chosen, np.sort(widest) + 1)
    parts += [parts[0]] * (records.RANGES - len(parts))
    return np.array([(part[0], part[-1] - part[0]) for part in parts], np.uint8)
