"""Text → token ids, exactly as the `tokenizers` library gives them, and a tokenizer's identity.

Everything about tokenizers is here: where one comes from, what its special tokens are, how one is trained, what is
published beside the shards. Ids come from our engine where it takes the tokenizer, else from `tokenizers` batch calls:
some hundred MB/s of English a thread, or 3.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertdata.errors import TokenizerError, UsageError
from bertdata.tokenize.bpe import ByteLevelBPE
from bertdata.tokenize.engine import Engine
from bertdata.tokenize.wordpiece import WordPiece
from bertdata.types import SpecialTokens

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ROLE_SPELLINGS = {  # of each role, in the order they are tried
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("<s>", "[BOS]", "<|startoftext|>"),
    "eos": ("</s>", "[EOS]", "<|endoftext|>"),
}
Segment = Callable[[str], Iterable[str]]
"""A text → its words, which joined are the text."""


@dataclass(frozen=True)
class Encoded:
    """The ids of a block's documents, each followed by the separator if the tokenizer has one."""

    ids: NDArray[Any]  # [n] of the tokenizer's token_dtype
    documents: NDArray[np.int64]  # [num_documents + 1] half-open offsets into ids
    sentences: NDArray[np.int64] | None  # where sentences begin in ids, ascending; None if not asked for
    special_ids_replaced: int  # special ids the model gave for plain text, stored as the unknown id


class Tokenizer:
    """A tokenizer with its special tokens named. `files` is what a dataset publishes of it."""

    def __init__(self, tokenizer_json: str, roles: dict[str, str] | None = None) -> None:
        """roles: special tokens by role, such as {"mask": "[MASK]"}, where they are known; the rest are looked up."""
        try:
            content = json.loads(tokenizer_json)
            content["truncation"] = content["padding"] = None  # a dataset holds whole documents
            tokenizer_json = json.dumps(content, ensure_ascii=False, indent=1)
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"not a tokenizer the tokenizers library can read: {error}") from None
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError("the tokenizer's vocabulary is empty")
        added = self._tokenizer.get_added_tokens_decoder()
        spelled = {token_id: token.content for token_id, token in added.items() if token.special}
        names = {
            role: next((s for s in spellings if s in vocabulary), None) for role, spellings in ROLE_SPELLINGS.items()
        }
        names["unk"] = getattr(self._tokenizer.model, "unk_token", None) or names["unk"]
        names |= roles or {}
        found = {role: name for role, name in names.items() if name in vocabulary}
        spelled |= {vocabulary[name]: name for name in found.values()}
        self.special = SpecialTokens(
            vocab_size=max(vocabulary.values()) + 1,
            special_ids=tuple(sorted(spelled)),
            **{role: vocabulary[name] for role, name in found.items()},
        )
        self.spellings = tuple(spelled[token_id] for token_id in sorted(spelled))
        """Of the special tokens. In a corpus they are text, and are counted."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {f"{role}_token": name for role, name in found.items()}
        self.files = {
            TOKENIZER: tokenizer_json.encode() + b"\n",
            TOKENIZER_CONFIG: json.dumps(config, ensure_ascii=False, indent=1).encode() + b"\n",
        }
        forbidden = np.zeros(self.special.vocab_size, np.bool_)
        forbidden[list(self.special.special_ids)] = True
        if self.special.unk is not None:
            forbidden[self.special.unk] = False
        self._forbidden = forbidden
        self._preparing = threading.Lock()
        self._engine: Engine | Literal[False] | None = None  # None: not prepared; False: there is none

    @property
    def token_dtype(self) -> str:
        return "<u2" if self.special.vocab_size <= 1 << 16 else "<u4"

    def spell(self, token_id: int) -> str:
        """The token of an id as the vocabulary has it."""
        return self._tokenizer.id_to_token(token_id) or f"<{token_id}>"

    def decode(self, ids: list[int]) -> str:
        """Text that the ids may have come from, special tokens shown."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def prepare(self) -> None:
        """Makes the engine, if there is one for this kind of tokenizer, and loads its kernels.

        Compiling them takes some seconds, once on a machine; loading them about a tenth of one.
        """
        with self._preparing:
            if self._engine is None:
                content = json.loads(self.files[TOKENIZER])
                found = (kind.of(self._tokenizer, content, self.special) for kind in (WordPiece, ByteLevelBPE))
                self._engine = next((engine for engine in found if engine), False)

    def encode(self, data: bytes, offsets: NDArray[np.int64], *, sentences: bool) -> Encoded:
        """The ids of documents data[offsets[i] : offsets[i + 1] - 1], which are valid UTF-8 and end in newlines.

        A sentence begins at the first id whose text starts in a new line of its document. Releases the GIL for most of
        its time: call it from several threads.
        """
        self.prepare()
        separator = self.special.separator
        if self._engine and (self._engine.takes_lines or not sentences):
            text, bounds = np.frombuffer(data, np.uint8), offsets
            if sentences:
                bounds = np.append(offsets[0], np.flatnonzero(text[: offsets[-1]] == ord("\n")) + 1)
            separators = np.isin(bounds[1:], offsets[1:]) & (separator is not None)
            found = self._engine.encode(text, bounds, separators, separator or 0)
            if found:
                ids, documents = found
                starts = None
                if sentences:
                    starts = documents[:-1][np.diff(documents) > separators]
                    documents = documents[np.searchsorted(bounds, offsets)]
                return Encoded(ids, documents, starts, 0)
        return self._encode_by_library(data, offsets, sentences=sentences)

    def word_starts(
        self, data: bytes, offsets: NDArray[np.int64], documents: NDArray[np.int64], segment: Segment
    ) -> NDArray[np.bool_]:
        """For each id of `encode`, whether it begins a word: bool [num_ids].

        data, offsets: as for `encode`; documents: what it gave. segment: a text → its words, all of the text in order.
        Asks the library for the places of its tokens, so this takes as long as tokenizing by the library, and segment's
        own time. Raises UsageError if the words do not make up a text.
        """
        texts = [data[start : stop - 1].decode() for start, stop in pairwise(offsets.tolist())]
        found = np.ones(int(documents[-1]), np.bool_)
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, encoding, first in zip(texts, encodings, documents.tolist(), strict=False):
            words = list(segment(text))
            if "".join(words) != text:
                raise UsageError(f"the words of the segmenter do not make up the text that begins {text[:40]!r}")
            ends = np.cumsum([len(word) for word in words])
            word = np.searchsorted(ends, [start for start, _ in encoding.offsets], side="right")
            found[first : first + word.size] = np.diff(word, prepend=-1) != 0
        return found

    def _encode_by_library(self, data: bytes, offsets: NDArray[np.int64], *, sentences: bool) -> Encoded:
        texts = [data[start : stop - 1].decode() for start, stop in pairwise(offsets.tolist())]
        encode = self._tokenizer.encode_batch if sentences else self._tokenizer.encode_batch_fast  # fast: no offsets
        try:
            encodings = encode(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"the tokenizer fails on this text: {error}") from None
        documents = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(encoding) for encoding in encodings], out=documents[1:])
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), self.token_dtype, int(documents[-1]))
        starts = None
        if sentences:
            lines = zip(texts, encodings, documents.tolist(), strict=False)
            starts = np.fromiter(chain.from_iterable(_line_starts(*line) for line in lines), np.int64)
        replaced = np.flatnonzero(self._forbidden[ids])
        if replaced.size:
            if self.special.unk is None:
                token = self._tokenizer.id_to_token(int(ids[replaced[0]]))
                raise TokenizerError(
                    f"the text spells the special token {token!r} and this tokenizer has no unknown token to store for "
                    "it; remove it from the text"
                )
            ids[replaced] = self.special.unk
        if self.special.separator is not None:
            if starts is not None:
                starts = starts + np.searchsorted(documents[1:], starts, side="right")
            ids = np.insert(ids, documents[1:], self.special.separator)
            documents += np.arange(documents.size)
        return Encoded(ids, documents, starts, int(replaced.size))


def _line_starts(text: str, encoding: tokenizers.Encoding, first: int) -> Iterator[int]:
    line_end = -1
    for index, (start, _) in enumerate(encoding.offsets):
        if start >= line_end:
            yield first + index
            line_end = text.find("\n", start)
            line_end = line_end + 1 if line_end >= 0 else len(text) + 1
