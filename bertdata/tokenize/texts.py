"""A tokenizer by itself: texts → arrays of ids at the speed of a build, or what AutoTokenizer gives."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertdata.errors import UsageError
from bertdata.tokenize.encoder import Encoder
from bertdata.tokenize.engine import ids_by
from bertdata.tokenize.kernels.records import PADDING
from bertdata.tokenize.load import load
from bertdata.tokenize.rows import Part, Template, as_lists, padded, truncated
from bertdata.tokenize.tokenizer import TOKENIZER, LoadedTokenizer, naming_texts

Texts = Sequence[str] | Sequence[bytes] | Any
"""Texts as str, as bytes in UTF-8, or as a pyarrow array of strings."""
_UNLIMITED = 10**20  # a model_max_length of more, as transformers writes it, is none


class Tokenizer:
    """Texts → ids, exactly as the `tokenizers` library gives them, and many times as fast if there is an engine.

        tokenizer = bertdata.Tokenizer.load("bert-base-uncased")
        ids, offsets = tokenizer.encode_batch(texts)   # the ids of text i are ids[offsets[i] : offsets[i + 1]]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")

    May be used from several threads at once, and can be pickled.
    """

    def __init__(self, loaded: LoadedTokenizer) -> None:
        self.loaded = loaded
        """Its files, special tokens and settings."""
        self._lock = threading.Lock()
        self._encoders: dict[bool, Encoder] = {}  # split_special_tokens → encoder
        self._libraries: dict[bool, tokenizers.Tokenizer] = {}
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
        """Process, which has no threads of the one that was forked, and workers → threads, whose caches stay warm."""
        self._templates: dict[tuple[bool, bool], Template] = {}  # (is a pair, add_special_tokens)

    @classmethod
    def load(cls, path_or_name: str) -> Tokenizer:
        """A tokenizer from a tokenizer.json, a vocab.txt, a SentencePiece model, a directory of one, or the hub.

        Raises TokenizerError, which says what was looked for, if it is none of these.
        """
        return cls(load(str(path_or_name)))

    def __reduce__(self) -> tuple[Callable[..., Tokenizer], tuple[Any, ...]]:
        return _again, self.loaded.parts()

    @property
    def engine(self) -> str | None:
        """What kind of tokenizer our engine takes this one for; None: `tokenizers` itself gives the ids."""
        engine = self._encoder(False).engine
        return engine.name if engine else None

    @property
    def why_slow(self) -> str | None:
        """One clause that says why there is no engine for this tokenizer; None if there is one."""
        return self._encoder(False).refusal

    def encode_batch(
        self,
        texts: Texts,
        *,
        workers: int = 1,
        add_special_tokens: bool = False,
        split_special_tokens: bool = False,
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of texts, uint16 or uint32 [N], and where those of each begin, int64 [num_texts + 1].

        texts: str or bytes in UTF-8 each, or a pyarrow array of strings, which are copied only if they are alone in
            their buffer.
        workers: threads, which share the texts.
        add_special_tokens: whether each text gets those around it that a model expects, such as [CLS] and [SEP].
        split_special_tokens: whether a special token that a text spells is text like any other. If not, it becomes the
            special token, as in transformers.

        Raises UsageError for a text that is no text, and LongTextError or FailedTextError for one that `tokenizers`
        would take too much memory for, or fails on.
        """
        if workers < 1:
            raise UsageError(
                f"workers is {workers}; give 1 or more threads", "out-of-range", option="workers", given=workers
            )
        data, offsets = _joined(texts)
        ids, bounds = self._encoded(data, offsets, workers, split_special_tokens)
        if add_special_tokens:
            template = self._template(is_pair=False, add_special_tokens=True)
            ids, bounds, _ = template.rows([(ids, bounds)], self.loaded.token_dtype)
        return ids, bounds

    def count(self, texts: Texts, *, workers: int = 1) -> NDArray[np.int64]:
        """How many ids each text has without special tokens around it: int64 [num_texts]. See `encode_batch`."""
        return np.diff(self.encode_batch(texts, workers=workers)[1])

    def __call__(
        self,
        text: str | Texts,
        text_pair: str | Texts | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_tensors: Literal["np", "pt"] | None = None,
    ) -> dict[str, Any]:
        """What AutoTokenizer gives for these arguments, whose documentation in transformers holds here too.

        Returns input_ids, and token_type_ids and attention_mask if the model takes them: lists for each text (a list
        of numbers for a single one), or int64 arrays [num_texts, width] of numpy or torch. Raises UsageError for
        arguments that do not fit each other or the tokenizer; also for a max_length below the number of special tokens,
        with which transformers does not cut at all.
        """
        is_single = isinstance(text, str | bytes)
        parts = self._parts(text, text_pair)
        pads_to, cuts_to, strategy = self._limits(padding, truncation, max_length)
        template = self._template(is_pair=len(parts) == 2, add_special_tokens=add_special_tokens)
        side = self.loaded.settings.get("truncation_side", "right")
        if strategy:
            parts = truncated(parts, cuts_to - template.num_special, strategy, side)
        ids, bounds, kinds = template.rows(parts, np.int64)
        rows = {"input_ids": ids, "token_type_ids": kinds, "attention_mask": np.ones_like(ids)}
        names = [name for name in rows if name in self.loaded.input_names]
        widths = np.diff(bounds)
        if pads_to is not None:
            widths = np.maximum(widths, pads_to or widths.max(initial=0))
        if return_tensors is not None and len({*widths.tolist()}) > 1:
            raise UsageError(
                "the texts have different numbers of tokens, which make no tensor; give padding=True",
                "needs-option",
                option="padding",
            )
        fill = {"input_ids": self.loaded.special.pad or 0, "token_type_ids": 0, "attention_mask": 0}
        left = self.loaded.settings.get("padding_side", "right") == "left"
        edges = np.append(0, np.cumsum(widths))
        flat = {name: padded(rows[name], bounds, edges, fill[name], left=left) for name in names}
        if return_tensors is None:
            lists = {name: as_lists(each, edges) for name, each in flat.items()}
            return {name: each[0] for name, each in lists.items()} if is_single else lists
        arrays = {name: each.reshape(widths.size, widths.max(initial=0)) for name, each in flat.items()}
        if return_tensors == "pt":
            import torch

            return {name: torch.from_numpy(each) for name, each in arrays.items()}
        return arrays

    def _parts(self, text: str | Texts, text_pair: str | Texts | None) -> list[Part]:
        """The ids of the texts, and of those of text_pair if there is one. Raises UsageError if they do not fit."""
        is_single = isinstance(text, str | bytes)
        has_pair = text_pair is not None and not (is_single and not text_pair)  # an empty one alone is none
        if has_pair and isinstance(text_pair, str | bytes) != is_single:
            raise UsageError(
                "text_pair must be one text if text is one, and a list of as many texts if text is a list",
                "malformed",
                option="text_pair",
                given=type(text_pair).__name__,
            )
        given: list[Any] = [text, text_pair] if has_pair else [text]
        parts: list[Part] = [self.encode_batch([each] if is_single else each) for each in given]
        if len(parts) == 2 and parts[0][1].size != parts[1][1].size:
            raise UsageError(
                f"text has {parts[0][1].size - 1} texts and text_pair {parts[1][1].size - 1}; give as many of both",
                "malformed",
                option="text_pair",
                given=parts[1][1].size - 1,
            )
        return parts

    def _limits(
        self, padding: bool | str, truncation: bool | str | None, max_length: int | None
    ) -> tuple[int | None, int, str | None]:
        """The width that shorter rows get (None: none; 0: that of the longest), the longest row, and how texts are cut.

        The last is None if they are not cut. The rules are those of transformers: max_length alone cuts; without it,
        model_max_length is taken.
        """
        if max_length is not None and padding is False and truncation is None:
            truncation = "longest_first"
        pads = padding if isinstance(padding, str) else "longest" if padding else "do_not_pad"
        strategy = truncation if isinstance(truncation, str) else "longest_first" if truncation else "do_not_truncate"
        for option, value, known in (
            ("padding", pads, ("do_not_pad", "longest", "max_length")),
            ("truncation", strategy, ("do_not_truncate", "longest_first", "only_first", "only_second")),
        ):
            if value not in known:
                raise UsageError(
                    f"{option} is {value!r}; give True, False or one of {', '.join(known)}",
                    "unknown",
                    option=option,
                    given=value,
                )
        limit = self.loaded.settings.get("model_max_length", _UNLIMITED + 1) if max_length is None else max_length
        is_limited = limit <= _UNLIMITED
        if pads == "max_length" and not is_limited:
            pads = "do_not_pad"
        if pads != "do_not_pad" and self.loaded.special.pad is None:
            raise UsageError(
                "the tokenizer has no token to pad with; leave padding out, or give a tokenizer that has one",
                "unsupported",
                option="padding",
                given=padding,
            )
        pads_to = {"do_not_pad": None, "longest": 0, "max_length": limit}[pads]
        return pads_to, limit, strategy if strategy != "do_not_truncate" and is_limited else None

    def _encoder(self, split: bool) -> Encoder:  # noqa: FBT001
        with self._lock:
            if split not in self._encoders:
                spelled = self.loaded.files[TOKENIZER].decode()
                library = tokenizers.Tokenizer.from_str(spelled)
                library.encode_special_tokens = split
                allowing_all = replace(self.loaded.special, special_ids=())
                self._libraries[split] = library
                self._encoders[split] = Encoder(library, json.loads(spelled), allowing_all)
            return self._encoders[split]

    def _encoded(
        self,
        data: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        workers: int,
        split: bool,  # noqa: FBT001
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        encoder = self._encoder(split)
        edges = np.searchsorted(offsets, np.linspace(offsets[0], offsets[-1], workers + 1))  # of texts, by their bytes
        edges[0], edges[-1] = 0, offsets.size - 1

        def part(first: int, stop: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
            bounds = offsets[first : stop + 1]
            with naming_texts(bounds, lambda number: f"text {first + number}"):
                encoded = encoder.encode(data, bounds[:-1], bounds[1:], np.full(bounds.size - 1, -1))
                return encoded[:2] if encoded else self._by_library(data, bounds, split)

        if workers == 1:
            ids, bounds = part(0, offsets.size - 1)
            return np.ascontiguousarray(ids), bounds
        with self._lock:
            pool = self._pools.setdefault((os.getpid(), workers), ThreadPoolExecutor(workers, "tokenizer"))
        parts = [*pool.map(lambda edge: part(*edge), pairwise(edges.tolist()))]
        counts = np.concatenate([np.diff(bounds) for _, bounds in parts])
        return np.concatenate([ids for ids, _ in parts]), np.append(0, np.cumsum(counts))

    def _by_library(
        self,
        data: NDArray[np.uint8],
        bounds: NDArray[np.int64],
        split: bool,  # noqa: FBT001
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        texts = [str(data[start:stop].data, "utf-8") for start, stop in pairwise(bounds.tolist())]
        encoded = ids_by(self._libraries[split], texts)
        bounds = np.append(0, np.cumsum([each.size for each in encoded], dtype=np.int64))
        ids = np.concatenate([np.zeros(0, np.int64), *encoded])
        return ids.astype(self.loaded.token_dtype), bounds

    def _template(self, *, is_pair: bool, add_special_tokens: bool) -> Template:
        key = is_pair, add_special_tokens
        if key not in self._templates:
            self._encoder(False)
            self._templates[key] = Template.of(self._libraries[False], *key)
        return self._templates[key]


def _again(*parts: Any) -> Tokenizer:
    return Tokenizer(LoadedTokenizer(*parts))


def _joined(texts: Texts) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Texts one after the other in UTF-8, with PADDING bytes behind, and the offsets of each."""
    if isinstance(texts, str | bytes) or not hasattr(texts, "__len__"):
        kind = type(texts).__name__
        raise UsageError(f"texts is a {kind}; give a list of texts", "malformed", option="texts", given=kind)
    if type(texts).__module__.partition(".")[0] == "pyarrow":
        return _of_arrow(texts)
    encoded = [*map(_bytes_of, texts, range(len(texts)))]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(each) for each in encoded], out=offsets[1:])
    data = np.frombuffer(b"".join([*encoded, bytes(PADDING)]), np.uint8)
    if not all(isinstance(text, str) for text in texts):
        _require_text(data, offsets)
    return data, offsets


def _bytes_of(text: Any, number: int) -> bytes:
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError:
            problem = "has half of a surrogate pair, which is no character"
    else:
        problem = f"is a {type(text).__name__}"
    raise UsageError(
        f"text {number} {problem}; give texts as str, or as bytes in UTF-8", "not-text", option="texts", given=number
    )


def _require_text(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
    """Raises UsageError if a text is not UTF-8."""
    for number, (start, stop) in enumerate(pairwise(offsets.tolist())):
        try:
            str(data[start:stop].data, "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"text {number} is not UTF-8 at byte {error.start}; decode it, or leave it out",
                "not-text",
                option="texts",
                given=number,
            ) from None


def _of_arrow(array: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if hasattr(array, "combine_chunks"):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    kind = {"string": np.int32, "large_string": np.int64}.get(str(array.type))
    if kind is None or array.null_count:
        problem = f"{array.null_count} values that are null" if array.null_count else f"the type {array.type}"
        raise UsageError(
            f"texts is a pyarrow array with {problem}; give one of strings, none of them null",
            "wrong-column-type",
            option="texts",
            given=str(array.type),
        )
    _, bounds, values = array.buffers()
    if len(array) == 0 or values is None:
        return np.zeros(PADDING, np.uint8), np.zeros(len(array) + 1, np.int64)
    offsets = np.frombuffer(bounds, kind, len(array) + 1, array.offset * np.dtype(kind).itemsize).astype(np.int64)
    return np.frombuffer(values, np.uint8), offsets
