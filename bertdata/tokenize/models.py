"""The model of a tokenizer (BPE, Unigram, WordPiece, WordLevel) as arrays for the kernel."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.tokenize.forms import SPACE
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.merges import LONGEST_TOKEN, SUFFIX, add_pairs, mark_reached
from bertdata.tokenize.kernels.splits import LEFT, LENGTH, NUM_BYTES, RIGHT, fill_shorter, mark_sorted
from bertdata.tokenize.kernels.tries import NO_BYTE, grow_trie
from bertdata.tokenize.rules import Unsupported

MOST_IDS = 1 << 20  # a value has 20 bits for an id
MOST_ENTRIES = 1 << 24  # an entry of a trie has 24 bits for an index
_BYTES_OF_UTF8 = [byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]
_UNK_PENALTY = 10.0  # subtracted from the lowest score of a token, for an unknown character (SentencePiece)


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = sorted({*range(256)} - _PRINTABLE)
BYTE_LETTERS = [chr(byte) if byte in _PRINTABLE else chr(0x100 + _OTHERS.index(byte)) for byte in range(256)]
"""The character that represents each byte in byte-level vocabularies (Radford et al., 2019).

A printable byte represents itself. All other bytes are U+0100, U+0101, ... in order.
"""
_BYTES_OF_LETTERS = codecs.charmap_build("".join(BYTE_LETTERS))


def model_tables(model: dict[str, Any], vocabulary: dict[str, int], *, byte_level: bool) -> dict[str, Any]:
    """Return the fields of records.WordTables that depend on the model, and two more.

    "characters": token → id, for tokens of one character (BPE: also with its suffix); "has_space": whether SPACE is
    one. model: its JSON. vocabulary: token → id. byte_level: whether the model gets words as letters that represent
    bytes. Raises Unsupported for unknown options.
    """
    if max(vocabulary.values(), default=0) >= MOST_IDS:
        raise Unsupported(f"its vocabulary has ids of {MOST_IDS:,} or more")
    kind = kind_of(model)
    fields: dict[str, Any] = {
        "characters": {token: n for token, n in vocabulary.items() if len(token) == 1},
        "has_space": SPACE in vocabulary,
        "byte_ids": np.full((1, 256), -1, np.int64),
        "pairs": np.full(1, records.EMPTY),
        "merged": np.zeros(1, np.int32),
        "symbols": np.zeros((1, 4), np.int32),
        "symbol_ids": np.zeros(1, np.int32),
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
    tokens = {token.encode(): n for token, n in vocabulary.items()}
    if kind == "Unigram":
        return fields | {"trie": trie_of(tokens)} | _unigram(model, vocabulary)
    if fields["unk"] < 0:
        raise Unsupported("its unknown token is not in the vocabulary")
    if kind == "WordLevel":
        return fields | {"model": records.WHOLE_WORD, "trie": trie_of(tokens)}
    most, prefix = model["max_input_chars_per_word"], model["continuing_subword_prefix"]
    trie = trie_of(tokens, {t.removeprefix(prefix).encode(): n for t, n in vocabulary.items() if t.startswith(prefix)})
    return fields | {"model": records.WORD_PIECE, "max_chars": min(most, 1 << 62), "trie": trie}


def kind_of(model: dict[str, Any]) -> str:
    """Return the type of a model, given as JSON; files of older versions do not store it."""
    kinds = {"merges": "BPE", "unk_id": "Unigram", "continuing_subword_prefix": "WordPiece"}  # by a member each has
    return model.get("type") or next((kind for member, kind in kinds.items() if member in model), "WordLevel")


def merges_of(model: dict[str, Any]) -> list[list[str]]:
    """Return the pairs of tokens that a BPE model, given as JSON, merges."""
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]


_Merges = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]


def _merges(model: dict[str, Any], vocabulary: dict[str, int]) -> _Merges:
    """Return a BPE model's merges as left ids, right ids and ranks, and the resulting id of each rank.

    Raises Unsupported for options that no kernel supports.
    """
    if model.get("dropout"):
        raise Unsupported("its merges are random (dropout)")
    if model.get("continuing_subword_prefix"):
        raise Unsupported("its BPE model marks the tokens that continue a word")
    if model.get("byte_fallback") and model.get("end_of_word_suffix"):
        raise Unsupported("its BPE model gives the bytes of unknown characters, and marks the ends of words")
    if model.get("unk_token") and model["unk_token"] not in vocabulary:
        raise Unsupported("its unknown token is not in the vocabulary")
    if max(vocabulary.values(), default=0) == MOST_IDS - 1:  # all bits set marks a free slot of the table of merges
        raise Unsupported(f"its vocabulary has the id {MOST_IDS - 1:,}")
    pairs, id_of = merges_of(model), vocabulary.__getitem__
    if len(pairs) >= MOST_ENTRIES:
        raise Unsupported(f"it has {MOST_ENTRIES:,} merges or more")
    left, right = (np.array([*map(id_of, map(itemgetter(side), pairs))], np.int64) for side in (0, 1))
    merged = np.array([*map(id_of, map("".join, pairs)), 0], np.int32)
    rank = np.argsort(left << 20 | right, kind="stable")
    is_last = np.diff(left[rank], append=-1) | np.diff(right[rank], append=-1)  # of equal merges the last one applies
    rank = rank[is_last != 0]
    return left[rank], right[rank], rank, merged


def _bpe(model: dict[str, Any], vocabulary: dict[str, int], *, byte_level: bool) -> dict[str, Any]:
    merges = _merges(model, vocabulary)
    suffix, fallback = model.get("end_of_word_suffix") or "", bool(model.get("byte_fallback"))
    if byte_level:
        if fallback:
            raise Unsupported("its byte-level BPE model has a fallback for unknown characters")
        return {"model": records.BYTE_BPE} | _symbols(model, vocabulary, merges, suffix)
    if model.get("ignore_merges"):
        raise Unsupported("its BPE model of characters looks up whole words first")
    byte_ids = np.array([_fallback_ids(vocabulary) if fallback else [-1] * 256], np.int64)
    inner = {token: n for token, n in vocabulary.items() if len(token) == 1}
    last = {t: n for t, n in vocabulary.items() if t.endswith(suffix) and len(t.removesuffix(suffix)) == 1}
    trie = trie_of(
        {token.encode(): n for token, n in inner.items()},
        {token.removesuffix(suffix).encode(): n for token, n in last.items()},
    )
    fields = {"model": records.CHARACTER_BPE, "characters": inner | last, "byte_ids": byte_ids, "trie": trie}
    return fields | {"merged": merges[3], "pairs": _table(*merges[:3])}


def _symbols(model: dict[str, Any], vocabulary: dict[str, int], merges: _Merges, suffix: str) -> dict[str, Any]:
    """Return the fields of records.WordTables for a byte-level BPE model. See kernels.splits."""
    byte_ids = np.array([[vocabulary.get(c + end, -1) for c in BYTE_LETTERS] for end in dict.fromkeys(["", suffix])])
    if (byte_ids[:, _BYTES_OF_UTF8] < 0).any() and model.get("unk_token"):
        raise Unsupported("its vocabulary lacks bytes, and it has a token for unknown ones")
    if suffix and model.get("ignore_merges"):
        raise Unsupported("its BPE model marks the ends of words, and looks up whole words first")
    if suffix and any(len(b) <= len(suffix) and (a + b).endswith(suffix) for a, b in merges_of(model)):
        raise Unsupported("its BPE model marks the ends of words with what a text can spell")
    tokens = _spelled(vocabulary, suffix)
    if max(map(len, tokens), default=0) > LONGEST_TOKEN:
        raise Unsupported(f"it has a token of more than {LONGEST_TOKEN:,} bytes")
    left, right, rank, merged = merges
    is_reached, num_bytes = np.zeros(merged.size, np.bool_), byte_ids.size
    mark_reached(*_joined(tokens), byte_ids, _table(left, right, rank), merged, is_reached)
    kept = np.sort(rank[is_reached[rank]])  # a small table stays in the processor cache
    sides = np.zeros((2, merged.size), np.int64)
    sides[:, rank] = left, right
    ids = np.append(byte_ids, merged[kept])
    symbol_of = np.full(max(vocabulary.values(), default=0) + 1, -1, np.int64)
    symbol_of[ids[num_bytes:]] = np.arange(num_bytes, ids.size)
    symbol_of[byte_ids[byte_ids >= 0]] = np.flatnonzero(byte_ids >= 0)
    symbols, is_sorted = np.full((ids.size, 4), -1, np.int32), np.ones(ids.size, np.bool_)
    symbols[num_bytes:, [LEFT, RIGHT]] = symbol_of[sides[:, kept]].T
    mark_sorted(symbols, num_bytes, is_sorted)
    spelling_of = dict(zip(tokens.values(), tokens, strict=True))
    spellings = [bytes([byte, SUFFIX][: 1 + end]) for end in range(len(byte_ids)) for byte in range(NUM_BYTES)]
    spellings += map(spelling_of.__getitem__, ids[num_bytes:].tolist())
    text, bounds = _joined(spellings)
    symbols[:, LENGTH] = np.diff(bounds)
    in_trie = {spellings[k]: k for k in np.flatnonzero(is_sorted).tolist() if k != SUFFIX or not suffix}
    if model.get("ignore_merges"):
        made = {*ids[is_sorted].tolist()}
        unmade = [n for n in spelling_of if n not in made]
        in_trie |= {spelling_of[n]: ids.size + k for k, n in enumerate(unmade)}
        ids = np.append(ids, np.array(unmade, np.int64))
    trie = trie_of(in_trie)
    fill_shorter(text, bounds, trie, symbols)
    ranks = np.arange(symbols.shape[0], dtype=np.int32)
    return {
        "byte_ids": byte_ids,
        "pairs": _table(symbols[num_bytes:, LEFT], symbols[num_bytes:, RIGHT], ranks[num_bytes:]),
        "merged": ranks,
        "symbols": symbols,
        "symbol_ids": ids.astype(np.int32),
        "trie": trie,
    }


def _spelled(vocabulary: dict[str, int], suffix: str) -> dict[bytes, int]:
    """Return bytes → id, for tokens of letters that represent bytes. SUFFIX represents the suffix."""
    spelled, encode = dict[bytes, int](), codecs.charmap_encode
    for token, token_id in vocabulary.items():
        text, end = (token.removesuffix(suffix), bytes([SUFFIX])) if suffix and token.endswith(suffix) else (token, b"")
        try:  # noqa: SIM105  (contextlib.suppress takes four times as long)
            spelled[encode(text, "strict", _BYTES_OF_LETTERS)[0] + end] = token_id
        except UnicodeEncodeError:
            pass
    if suffix:  # a byte that never occurs in text
        spelled = {text: n for text, n in spelled.items() if SUFFIX not in text[:-1] and text != bytes([SUFFIX])}
    spelled.pop(b"", None)
    return spelled


def _fallback_ids(vocabulary: dict[str, int]) -> list[int]:
    """Return the ids of bytes, for unknown characters."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if not vocabulary.keys() >= set(names):
        raise Unsupported("its vocabulary lacks tokens of bytes")
    return [vocabulary[name] for name in names]


def _joined(spellings: Iterable[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the concatenated spellings, and their bounds."""
    spellings = [*spellings]
    bounds = np.append(0, np.cumsum([*map(len, spellings)], dtype=np.int64))
    return np.frombuffer(b"".join(spellings) or b"\0", np.uint8), bounds


def _table(left: NDArray[Any], right: NDArray[Any], rank: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the hash table of merges for `add_pairs`."""
    slots, is_full = 2 << rank.size.bit_length(), True
    while is_full:
        table = np.full(slots, records.EMPTY)
        is_full = not add_pairs(left.astype(np.int64), right.astype(np.int64), rank.astype(np.int64), table)
        slots *= 2
    return read_only(table)


def _unigram(model: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    if model.get("unk_id") is None:
        raise Unsupported("its Unigram model has no unknown token")
    scores = np.array([score for _, score in model["vocab"]], np.float64)
    return {
        "model": records.UNIGRAM,
        "byte_ids": np.array([_fallback_ids(vocabulary) if model.get("byte_fallback") else [-1] * 256], np.int64),
        "scores": scores,
        "unk_score": float(scores.min()) - _UNK_PENALTY,
        "unk": model["unk_id"],
        "fuse_unk": 1,
    }


def trie_of(*roots: dict[bytes, int]) -> NDArray[np.uint64]:
    """Return a trie for the kernels. roots: spelling → id for each root. Raises Unsupported if it is too large."""
    spelled = [sorted(filter(None, root)) for root in roots]
    text, bounds = _joined(chain(*spelled))
    numbers = np.repeat(np.arange(len(roots)), [*map(len, spelled)])
    ids = np.array([root[token] for root, tokens in zip(roots, spelled, strict=True) for token in tokens], np.int64)
    room, size = 512 + int(bounds[-1]) // 256 * 256, 0
    while not size:
        if room > MOST_ENTRIES:
            raise Unsupported("its tokens have too many bytes for a table")
        trie = np.full(room, NO_BYTE)
        size, room = int(grow_trie(text, bounds, numbers, ids, trie)), 2 * room
    return read_only(trie[:size].copy())


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Make the array read-only and return it. numba does not compile a kernel that writes to such an array."""
    array.flags.writeable = False
    return array
