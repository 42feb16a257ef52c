"""The model of a tokenizer (BPE, Unigram, WordPiece, WordLevel) as arrays for the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.merges import LONGEST_TOKEN, add_pairs, keep_whole, mark_reached
from bertdata.tokenize.kernels.splits import LEFT, LENGTH, NUM_BYTES, RIGHT, fill_shorter, mark_sorted
from bertdata.tokenize.kernels.tries import NO_BYTE, grow_trie
from bertdata.tokenize.rules import Unsupported

MOST_IDS = 1 << 20  # a value holds ids of 20 bits
MOST_ENTRIES = 1 << 24  # an entry of a trie holds places of 24 bits
_BYTES_OF_UTF8 = [byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]
_UNK_PENALTY = 10.0  # an unknown character scores so much less than the least probable token (SentencePiece)


def byte_letters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (Radford et al., 2019).

    A printable byte stands for itself. The others are U+0100, U+0101, ... in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


def model_tables(model: dict[str, Any], vocabulary: dict[str, int], *, byte_level: bool) -> dict[str, Any]:
    """The fields of records.WordTables that a model decides.

    model: its JSON. vocabulary: token → id. byte_level: whether words reach the model as letters that stand for bytes.
    Raises Unsupported for options that the kernel does not know.
    """
    require_small_ids(vocabulary)
    kind = kind_of(model)
    fields: dict[str, Any] = {
        "byte_ids": np.full((2, 256), -1, np.int64),
        "pairs": np.full(1, records.EMPTY),
        "merged": np.zeros(1, np.int32),
        "whole": 0,
        "scores": np.zeros(1),
        "unk_score": 0.0,
        "unk": vocabulary.get(model.get("unk_token") or "", -1),
        "fuse_unk": int(bool(model.get("fuse_unk"))),
        "max_chars": 0,
    }
    if byte_level and kind != "BPE":
        raise Unsupported(f"it gives the bytes of words to a {kind} model")
    if kind == "BPE":
        return fields | _bpe(model, vocabulary, byte_level=byte_level)
    if kind == "Unigram":
        return fields | _unigram(model, vocabulary)
    if fields["unk"] < 0:
        raise Unsupported("its unknown token is not in the vocabulary")
    if kind == "WordLevel":
        trie = trie_of([(token.encode(), 0, n) for token, n in vocabulary.items()])
        return fields | {"model": records.WHOLE_WORD, "trie": trie}
    return fields | _wordpiece(model, vocabulary)


def byte_symbols(model: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    """The fields of records.ByteTables that a byte-level BPE model decides. The arguments are those of model_tables.

    Raises Unsupported if kernels.splits cannot cut words for it.
    """
    require_small_ids(vocabulary)
    if kind_of(model) != "BPE":
        raise Unsupported(f"it gives the bytes of words to a {kind_of(model)} model")
    pairs, merged = _merges(model, vocabulary)
    if model.get("end_of_word_suffix"):
        raise Unsupported("its model marks the ends of words")
    number = {letter: byte for byte, letter in enumerate(byte_letters())}
    byte_ids = np.array([vocabulary.get(letter, -1) for letter in number], np.int64)
    if (byte_ids[_BYTES_OF_UTF8] < 0).any():
        raise Unsupported("its vocabulary lacks bytes")
    letters = {n: token for token, n in vocabulary.items() if number.keys() >= set(token)}
    spelled = {n: bytes(map(number.__getitem__, token)) for n, token in letters.items()}
    if max(map(len, spelled.values())) > LONGEST_TOKEN:
        raise Unsupported(f"it has a token of more than {LONGEST_TOKEN:,} bytes")
    left, right, rank = _reached(pairs, merged, [*spelled.values()], byte_ids)
    order = np.argsort(rank)
    left, right, ids = left[order], right[order], np.append(byte_ids, merged[rank[order]])
    symbol_of = np.full(max(vocabulary.values()) + 1, -1, np.int64)
    symbol_of[ids[NUM_BYTES:]] = NUM_BYTES + np.arange(rank.size)
    symbol_of[byte_ids[byte_ids >= 0]] = np.flatnonzero(byte_ids >= 0)
    symbols, is_sorted = np.full((ids.size, 4), -1, np.int32), np.ones(ids.size, np.bool_)
    symbols[NUM_BYTES:, LEFT], symbols[NUM_BYTES:, RIGHT] = symbol_of[left], symbol_of[right]
    mark_sorted(symbols, is_sorted)
    spellings = [bytes([byte]) for byte in range(NUM_BYTES)] + [spelled[n] for n in ids[NUM_BYTES:].tolist()]
    symbols[:, LENGTH] = [len(spelling) for spelling in spellings]
    in_trie = [(spelling, 0, k) for k, spelling in enumerate(spellings) if is_sorted[k]]
    if model.get("ignore_merges"):
        is_whole = ~np.isin(list(spelled), ids[is_sorted])
        more = [n for n, whole in zip(spelled, is_whole.tolist(), strict=True) if whole]
        in_trie += [(spelled[n], 0, ids.size + k) for k, n in enumerate(more)]
        ids = np.append(ids, np.array(more, np.int64))
    table = _table(symbol_of[left], symbol_of[right], NUM_BYTES + np.arange(rank.size))
    trie = trie_of(in_trie)
    text = np.frombuffer(b"".join(spellings), np.uint8)
    bounds = np.append(0, np.cumsum([len(spelling) for spelling in spellings], dtype=np.int64))
    fill_shorter(text, bounds, trie, symbols)
    merged = np.arange(symbols.shape[0], dtype=np.int32)
    return {"pairs": table, "merged": merged, "symbols": symbols, "ids": ids.astype(np.int32), "trie": trie}


def kind_of(model: dict[str, Any]) -> str:
    """What kind a model is, given as JSON; files of older versions do not say it."""
    kinds = {"merges": "BPE", "unk_id": "Unigram", "continuing_subword_prefix": "WordPiece"}  # by a member each has
    return model.get("type") or next((kind for member, kind in kinds.items() if member in model), "WordLevel")


def require_small_ids(vocabulary: dict[str, int]) -> None:
    """Raises Unsupported if an id has more bits than the tables have room for."""
    if max(vocabulary.values(), default=0) >= MOST_IDS:
        raise Unsupported(f"its vocabulary has ids of {MOST_IDS:,} or more")


def _merges(model: dict[str, Any], vocabulary: dict[str, int]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """The table of a BPE model's merges with their ranks, see `add_pairs`, and the id that each rank gives.

    Raises Unsupported for options that no kernel knows.
    """
    if model.get("dropout"):
        raise Unsupported("its merges are random (dropout)")
    if model.get("continuing_subword_prefix"):
        raise Unsupported("its BPE model marks the tokens that continue a word")
    if model.get("byte_fallback") and model.get("end_of_word_suffix"):
        raise Unsupported("its BPE model gives the bytes of unknown characters, and marks the ends of words")
    if model.get("unk_token") and model["unk_token"] not in vocabulary:
        raise Unsupported("its unknown token is not in the vocabulary")
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    ranked = {pair: rank for rank, pair in enumerate(merges)}  # of equal merges the last one counts
    if max(vocabulary.values(), default=0) == MOST_IDS - 1:  # all ones mark a free slot of the table of merges
        raise Unsupported(f"its vocabulary has the id {MOST_IDS - 1:,}")
    if len(merges) >= MOST_ENTRIES:
        raise Unsupported(f"it has {MOST_ENTRIES:,} merges or more")
    lefts, rights = [vocabulary[left] for left, _ in ranked], [vocabulary[right] for _, right in ranked]
    merged, ranks = np.zeros(len(merges) + 1, np.int32), np.array([*ranked.values()], np.int64)
    merged[ranks] = [vocabulary[left + right] for left, right in ranked]
    return _table(np.array(lefts), np.array(rights), ranks), read_only(merged)


def _bpe(model: dict[str, Any], vocabulary: dict[str, int], *, byte_level: bool) -> dict[str, Any]:
    pairs, merged = _merges(model, vocabulary)
    suffix, fallback = model.get("end_of_word_suffix") or "", bool(model.get("byte_fallback"))
    ignores_merges = bool(model.get("ignore_merges"))
    fields: dict[str, Any] = {"pairs": pairs, "merged": merged, "whole": int(byte_level)}
    byte_ids = np.full((2, 256), -1, np.int64)
    tokens: list[tuple[bytes, int, int]] = []
    if byte_level:
        letters = byte_letters()
        for row, end in enumerate(("", suffix)):
            byte_ids[row] = [vocabulary.get(letter + end, -1) for letter in letters]
        if (byte_ids[:, _BYTES_OF_UTF8] < 0).any() and (fallback or model.get("unk_token")):
            raise Unsupported("its vocabulary lacks bytes, and it has a token for unknown ones")
        number, end = {letter: byte for byte, letter in enumerate(letters)}, "" if ignores_merges else suffix
        if not suffix:
            spelled = [bytes(map(number.__getitem__, token)) for token in vocabulary if number.keys() >= set(token)]
            fields["pairs"] = pairs = _table(*_reached(pairs, merged, spelled, byte_ids[0]))
        tokens = [
            (bytes(map(number.__getitem__, token.removesuffix(end))), 0, n)
            for token, n in vocabulary.items()
            if token.endswith(end) and token != end and number.keys() >= set(token.removesuffix(end))
        ]
        if not ignores_merges:
            tokens = _whole(tokens, byte_ids, pairs, merged)
    else:
        if fallback:
            byte_ids[:] = _fallback_ids(vocabulary)
        if ignores_merges:
            raise Unsupported("its BPE model of characters looks up whole words first")
        tokens = [(token.encode(), 0, n) for token, n in vocabulary.items() if len(token) == 1]
        tokens += [
            (token.removesuffix(suffix).encode(), 1, n)
            for token, n in vocabulary.items()
            if token.endswith(suffix) and len(token.removesuffix(suffix)) == 1
        ]
    kind = records.BYTE_BPE if byte_level else records.CHARACTER_BPE
    return fields | {"model": kind, "byte_ids": byte_ids, "trie": trie_of(tokens)}


def _fallback_ids(vocabulary: dict[str, int]) -> list[int]:
    """The ids of the bytes of unknown characters."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if not vocabulary.keys() >= set(names):
        raise Unsupported("its vocabulary lacks tokens of bytes")
    return [vocabulary[name] for name in names]


def _reached(
    pairs: NDArray[np.uint64], merged: NDArray[np.int32], spelled: list[bytes], byte_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The merges that can happen in a word, as left ids, right ids and ranks: fewer stay in the processor's caches.

    spelled: the bytes of all tokens.
    """
    text = np.frombuffer(b"".join(spelled) or b"\0", np.uint8)
    bounds = np.append(0, np.cumsum([len(token) for token in spelled], dtype=np.int64))
    is_reached = np.zeros(merged.size, np.bool_)
    if not mark_reached(text, bounds, byte_ids, pairs, merged, is_reached):
        is_reached[:] = True
    entries = pairs[pairs != records.EMPTY]
    left, right, rank = ((entries >> np.uint64(bit)).astype(np.int64) for bit in (44, 24, 0))
    right, rank = right & 0xFFFFF, rank & 0xFFFFFF
    kept = is_reached[rank]
    return left[kept], right[kept], rank[kept]


def _table(left: NDArray[Any], right: NDArray[Any], rank: NDArray[Any]) -> NDArray[np.uint64]:
    """The hash table of merges, see `add_pairs`."""
    slots, is_full = 2 << rank.size.bit_length(), True
    while is_full:
        table = np.full(slots, records.EMPTY)
        is_full = not add_pairs(left.astype(np.int64), right.astype(np.int64), rank.astype(np.int64), table)
        slots *= 2
    return read_only(table)


def _whole(
    tokens: list[tuple[bytes, int, int]],
    byte_ids: NDArray[np.int64],
    pairs: NDArray[np.uint64],
    merged: NDArray[np.int32],
) -> list[tuple[bytes, int, int]]:
    """The tokens that merging their bytes gives. Others are never the ids of a word."""
    text = np.frombuffer(b"".join(spelling for spelling, _, _ in tokens) or b"\0", np.uint8)
    bounds = np.append(0, np.cumsum([len(spelling) for spelling, _, _ in tokens], dtype=np.int64))
    ids, is_whole = np.array([token_id for _, _, token_id in tokens], np.int64), np.zeros(len(tokens), np.bool_)
    keep_whole(text, bounds, byte_ids, ids, pairs, merged, is_whole)
    return [token for token, kept in zip(tokens, is_whole.tolist(), strict=True) if kept]


def _unigram(model: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    if model.get("unk_id") is None:
        raise Unsupported("its Unigram model has no unknown token")
    scores = np.array([score for _, score in model["vocab"]], np.float64)
    byte_ids = np.full((2, 256), -1, np.int64)
    if model.get("byte_fallback"):
        byte_ids[:] = _fallback_ids(vocabulary)
    return {
        "model": records.UNIGRAM,
        "byte_ids": byte_ids,
        "scores": scores,
        "unk_score": float(scores.min()) - _UNK_PENALTY,
        "unk": model["unk_id"],
        "fuse_unk": 1,
        "trie": trie_of([(token.encode(), 0, n) for token, n in vocabulary.items() if token]),
    }


def _wordpiece(model: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    trie = wordpiece_trie(vocabulary, model["continuing_subword_prefix"])
    return {"model": records.WORD_PIECE, "max_chars": min(model["max_input_chars_per_word"], 1 << 62), "trie": trie}


def wordpiece_trie(vocabulary: dict[str, int], prefix: str) -> NDArray[np.uint64]:
    """The trie of a vocabulary. Tokens that begin a word are under root 0, the others under root 1."""
    begins = [(token.encode(), 0, n) for token, n in vocabulary.items() if token]
    continues = [(t.removeprefix(prefix).encode(), 1, n) for t, n in vocabulary.items() if t.startswith(prefix)]
    return trie_of(begins + continues)


def trie_of(tokens: Iterable[tuple[bytes, int, int]]) -> NDArray[np.uint64]:
    """A trie for the kernels. tokens: (spelling, number of the root, id). Raises Unsupported if it gets too large."""
    ordered = sorted((root, spelling, token_id) for spelling, root, token_id in tokens if spelling)
    text = np.frombuffer(b"".join(spelling for _, spelling, _ in ordered) or b"\0", np.uint8)
    bounds = np.append(0, np.cumsum([len(spelling) for _, spelling, _ in ordered], dtype=np.int64))
    roots = np.array([root for root, _, _ in ordered], np.int64)
    ids = np.array([token_id for _, _, token_id in ordered], np.int64)
    room, size = 512 + int(bounds[-1]) // 256 * 256, 0
    while not size:
        if room > MOST_ENTRIES:
            raise Unsupported("its tokens have too many bytes for a table")
        trie = np.full(room, NO_BYTE)
        size, room = int(grow_trie(text, bounds, roots, ids, trie)), 2 * room
    return read_only(trie[:size].copy())


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """The array, after making it read-only. numba refuses to compile a kernel that writes to such an array."""
    array.flags.writeable = False
    return array
