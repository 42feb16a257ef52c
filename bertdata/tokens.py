"""Text → token ids, exactly as the `tokenizers` library gives them, and a tokenizer's identity.

Everything about tokenizers is here: where one comes from, what its special tokens are, how one is trained, what is
published beside the shards. Ids come from our engine where it takes the tokenizer, else from `tokenizers` batch calls:
some hundred MB/s of English a thread, or 3.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bertdata import engine
from bertdata.errors import TokenizerError, UsageError
from bertdata.types import SpecialTokens

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPELLINGS = {  # of each role, in the order they are tried
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
        names = {role: next((s for s in spellings if s in vocabulary), None) for role, spellings in _SPELLINGS.items()}
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
        self._preparing = Lock()
        self._engine: engine.Engine | Literal[False] | None = None  # None: not prepared; False: there is none

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
                self._engine = engine.of(self._tokenizer, json.loads(self.files[TOKENIZER]), self.special) or False

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


def load(spec: str) -> Tokenizer:
    """A tokenizer.json or vocab.txt under any name, a directory with one of them, or a name on the hub.

    Raises TokenizerError, saying what was looked for, if it is none of these.
    """
    path = Path(spec)
    if not spec:
        raise UsageError("--tokenizer is empty; give a path or a name, or leave it out to train one")
    try:
        if path.is_dir():
            return _load_directory(path)
        if path.exists():
            return _load_file(path, {})
    except OSError as error:
        raise TokenizerError(f"{spec} cannot be read: {error.strerror}") from None
    if spec.startswith((".", "/", "~")) or spec.endswith((".json", ".txt")) or spec.count("/") > 1:
        raise TokenizerError(f"tokenizer {spec} does not exist; give a tokenizer.json, a vocab.txt or their directory")
    return _load_hub(spec)


def _load_directory(path: Path) -> Tokenizer:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG):
        if (path / name).is_file():
            try:
                config |= json.loads((path / name).read_bytes())
            except (ValueError, TypeError):
                raise TokenizerError(f"{path / name} is not a JSON object") from None
    for name in (TOKENIZER, "vocab.txt"):
        if (path / name).is_file():
            return _load_file(path / name, config)
    raise TokenizerError(f"directory {path} has neither a {TOKENIZER} nor a vocab.txt")


def _load_file(path: Path, config: dict[str, Any]) -> Tokenizer:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise TokenizerError(f"{path} is neither a {TOKENIZER} nor a vocab.txt: it is not UTF-8 text") from None
    roles = {}
    for role in _SPELLINGS:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            roles[role] = token
    try:
        is_json = isinstance(json.loads(text), dict)
    except ValueError:
        is_json = False
    try:
        if is_json:
            return Tokenizer(text, roles)
        lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
        if "[UNK]" in lines and len(set(lines)) == len(lines):
            lower = config.get("do_lower_case")
            if lower is None:  # a cased vocabulary has capitals beside its special tokens
                lower = not any(any("A" <= c <= "Z" for c in line) and line[:1] + line[-1:] != "[]" for line in lines)
            wordpiece = {token: number for number, token in enumerate(lines)}
            return Tokenizer(_bert(wordpiece, lowercase=bool(lower)).to_str(), roles)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    raise TokenizerError(
        f"{path} is neither a {TOKENIZER} (a JSON object) nor a vocab.txt (one token a line, all different, [UNK] "
        "among them)"
    )


def _load_hub(name: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerError(
            f"tokenizer {name} is no file or directory; to look it up on the hub, install bertdata[train]"
        ) from None
    try:
        found = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception:  # whatever it is, the hub may know better
        host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
        try:
            socket.create_connection((host, 443), timeout=5).close()
            found = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:
            reason = f"{host} cannot be reached" if isinstance(error, socket.gaierror | TimeoutError) else str(error)
            reason = (reason.splitlines() or [type(error).__name__])[0]
            raise TokenizerError(
                f"tokenizer {name} is no file or directory here, and the hub does not give it: {reason}"
            ) from None
    if not getattr(found, "backend_tokenizer", None):
        raise TokenizerError(f"tokenizer {name} has no tokenizer.json, and the slow kind is not supported")
    roles = {role: getattr(found, f"{role}_token", None) for role in _SPELLINGS}
    return Tokenizer(found.backend_tokenizer.to_str(), {role: token for role, token in roles.items() if token})


def _bert(vocabulary: dict[str, int], *, lowercase: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in SPECIALS if token in vocabulary])
    if "[CLS]" in vocabulary and "[SEP]" in vocabulary:
        ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    return tokenizer


def train_wordpiece(texts: list[str], vocab_size: int) -> Tokenizer:
    """A lower-casing WordPiece vocabulary of at most `vocab_size` tokens (Wu et al., 2016; trained as BPE is).

    The same texts give the same vocabulary: ids are the five specials, then the tokens in order of their UTF-8 bytes.
    About 2 MB/s. Raises UsageError if vocab_size leaves no room for letters.
    """
    if vocab_size < 2 * len(SPECIALS):
        raise UsageError(f"a vocabulary of {vocab_size} has no room for words; give at least {2 * len(SPECIALS)}")
    blank = _bert({"[UNK]": 0}, lowercase=True)
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(blank.normalizer.normalize_str(text))
    # The trainer breaks ties by the number a symbol has, and numbers "##x" symbols in the order a hash table gives
    # them. So we number them: the frequent characters, then "##x" for those that can continue a word.
    ranked = sorted((c for c in characters if not c.isspace()), key=lambda c: (-characters[c], c))
    alphabet = sorted(ranked[: min(1000, max(1, (vocab_size - len(SPECIALS)) // 2))])
    joins = [
        c for c in alphabet if len(blank.pre_tokenizer.pre_tokenize_str(blank.normalizer.normalize_str("a" + c))) == 1
    ]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *alphabet, *("##" + c for c in joins)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    scratch = _bert({"[UNK]": 0}, lowercase=True)
    scratch.train_from_iterator(texts, trainer)
    learned = sorted(
        scratch.get_vocab(with_added_tokens=False).keys() - set(SPECIALS), key=lambda token: token.encode()
    )
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *learned])}
    return Tokenizer(_bert(vocabulary, lowercase=True).to_str())
