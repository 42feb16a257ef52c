"""Rows of token ids as a model takes them: special tokens around texts, texts cut to a length, rows padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertdata.errors import UsageError

Part = tuple[NDArray[Any], NDArray[np.int64]]
"""The ids of texts, and the offsets of each."""
_PROBES = ("a", "A", "0", "the", "水")  # texts of which each tokenizer gives at least one an id


@dataclass(frozen=True)
class Template:
    """What a post-processor puts around a text or two."""

    items: tuple[tuple[int, int, int], ...]
    """(number of the text or -1 for a special token, id of the special token, type id), in their order."""

    @property
    def num_special(self) -> int:
        """How many special tokens it adds."""
        return sum(text < 0 for text, _, _ in self.items)

    @classmethod
    def of(cls, library: tokenizers.Tokenizer, is_pair: bool, add_special_tokens: bool) -> Template:  # noqa: FBT001
        """Asks the tokenizer what it does with a short text. Raises UsageError if it is more than adding tokens."""
        probe = next(text for text in _PROBES if library.encode(text, add_special_tokens=False).ids)
        alone = library.encode(probe, add_special_tokens=False).ids
        found = library.encode(probe, probe if is_pair else None, add_special_tokens=add_special_tokens)
        items: list[tuple[int, int, int]] = []
        kept: list[list[int]] = [[], []]
        for text, token_id, kind in zip(found.sequence_ids, found.ids, found.type_ids, strict=True):
            if text is None:
                items.append((-1, token_id, kind))
                continue
            kept[text].append(token_id)
            if not items or items[-1] != (text, 0, kind):
                items.append((text, 0, kind))
        if any(ids != alone for ids in kept[: 1 + is_pair]) or sum(text >= 0 for text, _, _ in items) != 1 + is_pair:
            raise UsageError(
                "this tokenizer changes texts when it adds special tokens; use AutoTokenizer of transformers, or leave "
                "add_special_tokens out",
                "unsupported",
                option="add_special_tokens",
                given=add_special_tokens,
            )
        return cls(tuple(items))

    def rows(self, parts: list[Part], dtype: Any) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
        """The ids of rows of one or two texts each, the offsets of the rows, and their type ids."""
        sizes = [np.diff(bounds) for _, bounds in parts]
        bounds = np.append(0, np.cumsum(sum(sizes) + self.num_special))
        ids, kinds = np.zeros(bounds[-1], dtype), np.zeros(bounds[-1], np.int64)
        at = bounds[:-1].copy()
        for text, token_id, kind in self.items:
            if text < 0:
                ids[at], kinds[at] = token_id, kind
                at += 1
                continue
            of_text, places = parts[text][0], _spread(at, sizes[text])
            ids[places], kinds[places] = of_text[parts[text][1][0] : parts[text][1][-1]], kind
            at += sizes[text]
        return ids, bounds, kinds


def _spread(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers starts[i], ..., starts[i] + sizes[i] - 1 for each i, one after the other."""
    before = np.append(0, np.cumsum(sizes))
    return np.arange(before[-1]) + np.repeat(starts - before[:-1], sizes)


def truncated(parts: list[Part], length: int, strategy: str, side: str) -> list[Part]:
    """Texts cut so that each row has at most `length` ids of texts. strategy, side: as in transformers.

    Raises UsageError if the text that is to be cut is too short for that.
    """
    sizes = [np.diff(bounds) for _, bounds in parts]
    rest = np.maximum(sum(sizes) - length, 0)
    if length < 0:
        raise UsageError(
            "max_length is smaller than the number of special tokens around a text; give a larger one",
            "out-of-range",
            option="max_length",
            given=length,
        )
    if strategy == "longest_first" and len(parts) == 2:
        kept = _longest_first(sizes[0], sizes[1], length)
    else:
        number = int(strategy == "only_second")
        longest = sizes[number] if number < len(parts) else 0
        if ((longest <= rest) & (rest > 0)).any():
            raise UsageError(
                f"truncation is {strategy!r}, and that text is not longer than what must go; give True, or a larger "
                "max_length",
                "conflict",
                option="truncation",
                given=strategy,
            )
        kept = [size - rest * (k == number) for k, size in enumerate(sizes)]
    return [_cut(part, size, at_left=side == "left") for part, size in zip(parts, kept, strict=True)]


def _longest_first(first: NDArray[np.int64], second: NDArray[np.int64], length: int) -> list[NDArray[np.int64]]:
    """How many ids of two texts stay, by the rule of `tokenizers`: the longer one is cut, then both to halves."""
    short, long = np.minimum(first, second), np.maximum(first, second)
    long = np.where(short > length, short, np.maximum(short, length - short))
    both = short + long > length
    short, long = np.where(both, length // 2, short), np.where(both, length // 2 + length % 2, long)
    is_cut, swapped = first + second > length, first > second
    return [
        np.where(is_cut, np.where(swapped, long, short), first),
        np.where(is_cut, np.where(swapped, short, long), second),
    ]


def _cut(part: Part, sizes: NDArray[np.int64], *, at_left: bool) -> Part:
    ids, bounds = part
    starts = bounds[1:] - sizes if at_left else bounds[:-1]
    return ids[_spread(starts, sizes)], np.append(0, np.cumsum(sizes))


def padded(
    values: NDArray[np.int64], bounds: NDArray[np.int64], edges: NDArray[np.int64], fill: int, *, left: bool
) -> NDArray[np.int64]:
    """Rows at `edges`, each as wide as its row of `values` at `bounds` or wider, with `fill` behind or before it."""
    sizes = np.diff(bounds)
    flat = np.full(edges[-1], fill, np.int64)
    flat[_spread(edges[:-1] + (np.diff(edges) - sizes if left else 0), sizes)] = values
    return flat


def as_lists(values: NDArray[Any], bounds: NDArray[np.int64]) -> list[list[int]]:
    """Rows of different sizes as lists."""
    flat, edges = values.tolist(), bounds.tolist()
    return [flat[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]
