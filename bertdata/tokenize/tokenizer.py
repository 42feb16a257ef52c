"""Text → token ids, identical to those of the `tokenizers` library; and special tokens and files of a tokenizer.

If an engine supports the tokenizer, it encodes 60 to 500 MB/s of English text in one thread. Otherwise `tokenizers`
encodes 1 to 5 MB/s. docs/benchmarks.md has the measurements.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, models, processors

from bertdata.errors import FailedTextError, LongTextError, TextError, TokenizerError, UsageError
from bertdata.tokenize.engine import Engine, encoded_by
from bertdata.tokenize.forms import flat, library_tokenizer
from bertdata.tokenize.models import kind_of
from bertdata.tokenize.source import Source
from bertdata.tokenize.words import forbidden_ids, replace_special
from bertdata.types import LARGEST_VOCABULARY, SpecialTokens

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ROLE_SPELLINGS = {  # role → spellings of its token, in the order of lookup
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("<s>", "[BOS]", "<|startoftext|>"),
    "eos": ("</s>", "[EOS]", "<|endoftext|>"),
}
ESM_ROLES = {"cls": "<cls>", "sep": "<eos>", "eos": "<eos>"}  # if a vocabulary has both, and no token named above
ROW_ROLES = ("pad", "cls", "sep", "mask")  # special tokens in rows of a masked language model
WordSplitter = Callable[[str], Iterable[str]]
"""A text → its words. The concatenated words must equal the text."""


@dataclass(frozen=True)
class Encoded:
    """The ids of a block's documents, each followed by the separator if the tokenizer has one."""

    ids: NDArray[Any]  # [n] of the tokenizer's token_dtype
    documents: NDArray[np.int64]  # [num_documents + 1] half-open offsets into ids
    sentences: NDArray[np.int64] | None  # starts of sentences in ids, ascending; None if not requested
    special_ids_replaced: int  # number of special ids that the model gave for plain text; they became the unknown id


def _roles_in(vocabulary: dict[str, int], given: Mapping[str, str], *, unk: str | None) -> dict[str, str]:
    """Return the roles of a vocabulary: as given, else by usual spellings. unk: the unknown token of the model."""
    names = {role: next((s for s in spellings if s in vocabulary), None) for role, spellings in ROLE_SPELLINGS.items()}
    if not given and names["cls"] is names["sep"] is None and vocabulary.keys() >= set(ESM_ROLES.values()):
        names |= ESM_ROLES
    names["unk"] = unk or names["unk"]
    names |= given
    return {role: name for role, name in names.items() if name in vocabulary}


def _facts(source: Source, roles: dict[str, str], input_names: Sequence[str] | None) -> dict[str, Any]:
    """Return the facts of a tokenizer file for LoadedTokenizer. Raises TokenizerError if it is not supported."""
    library, content = source.parse(), source.content
    added = library.get_added_tokens_decoder()
    source.added = added
    # The library may number added tokens differently from the file
    given = content.get("added_tokens")
    if given is None or {token.content: n for n, token in added.items()} != {t["content"]: t["id"] for t in given}:
        content["added_tokens"], source.is_as_stored = json.loads(library.to_str())["added_tokens"], False
    vocabulary = source.vocabulary(with_added=True)
    if not vocabulary:
        raise TokenizerError("the tokenizer's vocabulary is empty", "tokenizer-unreadable", option="tokenizer")
    if (largest := max(vocabulary.values())) >= LARGEST_VOCABULARY:
        sentence = f"the tokenizer has the id {largest}, and ids up to {LARGEST_VOCABULARY - 1} can be stored"
        raise TokenizerError(f"{sentence}; give smaller ids", "tokenizer-unreadable", option="tokenizer")
    unk = getattr(library.model, "unk_token", None)
    if (number := content["model"].get("unk_id")) is not None:  # of Unigram
        unk = next((name for name, each in vocabulary.items() if each == number), None)
    roles = _roles_in(vocabulary, roles, unk=unk)
    if lacks_template(content, roles):
        content["post_processor"] = _with_template(content.get("post_processor"), library, roles)
        source.is_as_stored = False
    source.unused += [library] * source.is_as_stored
    if input_names is None:
        has_types = _gives_type_ids(content.get("post_processor"))
        input_names = ["input_ids", *(["token_type_ids"] * has_types), "attention_mask"]
    if not isinstance(input_names, list | tuple) or not all(isinstance(name, str) for name in input_names):
        sentence = f"model_input_names is {input_names!r}; give a list of names"
        raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"model_input_names": list(input_names)} | {f"{role}_token": name for role, name in roles.items()}
    spelled = {number: token.content for number, token in added.items() if token.special}
    spelled |= {vocabulary[name]: name for name in roles.values()}
    model = {name: value for name, value in content["model"].items() if name not in ("vocab", "merges")}
    model["type"] = kind_of(content["model"])
    parts = {part: content.get(part) for part in ("normalizer", "pre_tokenizer")}
    spelled_today = json.loads(library_tokenizer(**parts).to_str())
    return {
        "outline": content | {part: spelled_today[part] for part in parts} | {"model": model},
        "added": [[number, token.content, _flags(token)] for number, token in added.items()],
        "special": {role: vocabulary[name] for role, name in roles.items()}
        | {"vocab_size": largest + 1, "special_ids": sorted(spelled)},
        "spellings": [spelled[number] for number in sorted(spelled)],
        "roles": roles,
        "is_as_stored": source.is_as_stored,
        "config": config,
    }


def _flags(token: AddedToken) -> dict[str, bool]:
    return {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}


def _spelled(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"


class LoadedTokenizer:
    """A tokenizer whose special tokens have known roles."""

    special: SpecialTokens
    spellings: tuple[str, ...]
    """Special tokens in the order of their ids. In a text they are plain text, and are counted."""
    notes: list[str]
    """Lines that a build prints about the tokenizer."""

    def __init__(
        self,
        tokenizer_json: str | bytes,
        roles: dict[str, str] | None = None,
        input_names: Sequence[str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """roles: role → special token, such as {"mask": "[MASK]"}; missing roles are looked up.

        input_names: the arguments that AutoTokenizer prepares for a model; None: input_ids, attention_mask, and
        token_type_ids if the post-processor distinguishes the two texts of a pair. Raises TokenizerError for JSON that
        is not a tokenizer.
        """
        spelled = tokenizer_json.encode() if isinstance(tokenizer_json, str) else tokenizer_json
        self.source = source = Source(spelled, roles, input_names)
        facts = source.kept("facts", lambda: _facts(source, roles or {}, input_names))
        source.outline, source.is_as_stored = facts["outline"], facts["is_as_stored"]
        source.added = {number: AddedToken(content, **flags) for number, content, flags in facts["added"]}
        self.special = SpecialTokens(**facts["special"] | {"special_ids": tuple(facts["special"]["special_ids"])})
        self.spellings, self._roles = tuple(facts["spellings"]), facts["roles"]
        self._has_lines = any("\n" in token.content for token in source.added.values())  # tokens that contain a newline
        self._config, self._given_names, self.notes = facts["config"], input_names, [*notes]
        self._forbidden = forbidden_ids(self.special)
        self._preparing = threading.Lock()
        self._engine: Engine | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadedTokenizer, (self.files[TOKENIZER].decode(), self._roles, self._given_names)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """File name → content, for a dataset and for AutoTokenizer.from_pretrained."""
        spelled = self.source.kept("file", lambda: {"bytes": np.frombuffer(_spelled(self.source.content), np.uint8)})
        return {TOKENIZER: spelled["bytes"].tobytes(), TOKENIZER_CONFIG: _spelled(self._config)}

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The tokenizer of `tokenizers`."""
        return self.source.library

    @property
    def engine(self) -> Engine:
        """The engine that encodes text. It is made, and its kernels are loaded, on first use.

        Compiling the kernels takes some seconds, once on a machine. Loading them takes about 0.1 s.
        """
        with self._preparing:
            self._engine = self._engine or Engine(self.source, self.special)
            return self._engine

    @property
    def engine_gives_lines(self) -> bool:
        """Whether the engine also finds the starts of sentences."""
        return bool(self.engine.name and self.engine.words.takes_lines and not self._has_lines)

    @property
    def missing_roles(self) -> list[str]:
        """The roles of ROW_ROLES without a token."""
        return [role for role in ROW_ROLES if role not in self._roles]

    def with_special_tokens(self) -> LoadedTokenizer:
        """Return this tokenizer with [PAD], [CLS], [SEP] and [MASK] added for roles without a token.

        The ids of the new tokens follow the vocabulary. If [CLS] or [SEP] is new, the tokenizer also puts them around a
        text if special tokens are requested, like BERT's.
        """
        missing = {role: ROLE_SPELLINGS[role][0] for role in self.missing_roles}
        if not missing:
            return self
        content, library = self.source.content, self.source.parse()
        library.add_special_tokens(list(missing.values()))
        roles = self._roles | missing
        if missing.keys() & {"cls", "sep"}:
            content = content | {"post_processor": _with_template(content.get("post_processor"), library, roles)}
        content = content | {"added_tokens": json.loads(library.to_str())["added_tokens"]}
        return LoadedTokenizer(json.dumps(content), roles, self._given_names, self.notes)

    def with_roles(self, given: Mapping[str, str]) -> LoadedTokenizer:
        """Return this tokenizer with roles for some of its tokens. given: role → token.

        If it then has [CLS] and [SEP], it also puts them around a text if special tokens are requested.
        """
        content, roles = dict(self.source.content), self._roles | given
        if {"cls", "sep"} <= roles.keys():
            content["post_processor"] = _with_template(content.get("post_processor"), self.source.parse(), roles)
        return LoadedTokenizer(json.dumps(content), roles, self._given_names, self.notes)

    @property
    def token_dtype(self) -> str:
        """The dtype of stored ids, as a NumPy string."""
        return "<u2" if self.special.vocab_size <= 1 << 16 else "<u4"

    def spell(self, token_id: int) -> str:
        """Return the token of an id."""
        return self.library.id_to_token(token_id) or f"<{token_id}>"

    def decode(self, ids: list[int]) -> str:
        """Return a text with these ids, including special tokens."""
        return self.library.decode(ids, skip_special_tokens=False)

    def encode(
        self,
        data: bytes | NDArray[np.uint8],
        offsets: NDArray[np.int64],
        *,
        sentences: bool,
        name: Callable[[int], str] = "document {}".format,
    ) -> Encoded:
        """Return the ids of documents. Document i is data[offsets[i] : offsets[i + 1] - 1], followed by a newline.

        data: valid UTF-8. sentences: whether to find the starts of sentences: the first id whose text starts in a new
        line of its document. name: the word for a document in errors. Thread-safe; releases the GIL most of the time.
        Raises FailedTextError for a text on which `tokenizers` fails; TextError if there is no unknown token to replace
        special ids of texts; LongTextError for texts with pieces that are too long for `tokenizers`.
        """
        with naming_texts(offsets, name, ", or use --on-error skip"):
            separator, engine = self.special.separator, self.engine
            if engine.name and (self.engine_gives_lines or not sentences):
                text, bounds = np.frombuffer(data, np.uint8), offsets
                ends = np.full(offsets.size - 1, separator is not None)  # pieces before a separator
                if sentences:
                    line_ends = np.flatnonzero(text[offsets[0] : offsets[-1]] == ord("\n"))
                    bounds = np.append(offsets[0], offsets[0] + line_ends + 1)
                    ends = np.isin(bounds[1:], offsets[1:]) & (separator is not None)
                encoded = engine.encode(text, bounds[:-1], bounds[1:] - 1, np.where(ends, separator or 0, -1))
                if encoded:
                    ids, documents, replaced = encoded
                    starts = None
                    if sentences:
                        starts = documents[:-1][np.diff(documents) > ends]
                        documents = documents[np.searchsorted(bounds, offsets)]
                    return Encoded(ids, documents, starts, replaced)
            return self._encode_by_library(data, offsets, sentences=sentences, name=name)

    def word_starts(
        self,
        data: bytes | NDArray[np.uint8],
        offsets: NDArray[np.int64],
        documents: NDArray[np.int64],
        word_splitter: WordSplitter,
        name: Callable[[int], str] = "document {}".format,
    ) -> NDArray[np.bool_]:
        """Return whether each id of `encode` begins a word: bool [num_ids].

        data, offsets, name: the arguments of `encode`. documents: its result. word_splitter: a text → its words, in
        order. Raises UsageError if word_splitter fails or its concatenated words differ from the text, and
        LongTextError like `encode`. As slow as `tokenizers`, which computes the offsets of tokens, plus
        `word_splitter`.
        """
        with naming_texts(offsets, name, ", or use --on-error skip"):
            texts = _texts(data, offsets)
            begins_word = np.ones(int(documents[-1]), np.bool_)
            encodings = encoded_by(self.library, texts, with_places=True)
            for text, encoding, first in zip(texts, encodings, documents.tolist(), strict=False):
                try:
                    words = list(word_splitter(text))
                    joined = "".join(words)
                except Exception as error:  # any exception of the user's function
                    reason = f"{type(error).__name__}: {error}"
                    sentence = f"--words failed ({reason}) on the text that begins with {text[:40]!r}; fix the function"
                    raise UsageError(sentence, "function-failed", option="words", given=text) from None
                if joined != text:
                    sentence = f"the words of --words lack characters of the text that begins {text[:40]!r}; keep all"
                    raise UsageError(sentence, "bad-function", option="words", given=text)
                ends = np.cumsum([len(word) for word in words])
                word = np.searchsorted(ends, [start for start, _ in encoding.offsets], side="right")
                begins_word[first : first + word.size] = np.diff(word, prepend=-1) != 0
            return begins_word

    def _encode_by_library(
        self,
        data: bytes | NDArray[np.uint8],
        offsets: NDArray[np.int64],
        *,
        sentences: bool,
        name: Callable[[int], str] = "document {}".format,
    ) -> Encoded:
        texts = _texts(data, offsets)
        documents, parts, begins = np.zeros(len(texts) + 1, np.int64), list[NDArray[Any]](), list[NDArray[np.int64]]()
        encodings = encoded_by(self.library, texts, with_places=sentences)
        for number, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
            first = int(documents[number])
            documents[number + 1] = first + len(encoding)
            parts.append(np.array(encoding.ids, self.token_dtype))
            if sentences:
                begins.append(np.fromiter(_line_starts(text, encoding, first), np.int64))
        ids = np.concatenate([np.zeros(0, self.token_dtype), *parts])
        starts = np.concatenate([np.zeros(0, np.int64), *begins]) if sentences else None
        replaced = replace_special(ids, self._forbidden, self.special.unk)
        if replaced.size and self.special.unk is None:
            token = self.library.id_to_token(int(ids[replaced[0]]))
            numbers = np.unique(np.searchsorted(documents, replaced, side="right") - 1).tolist()
            place = name(numbers[0])
            sentence = f"{place} spells {token!r}, and the tokenizer has no unknown token; use --on-error skip"
            error = TextError(sentence, "tokenizer-lacks-token", option="tokenizer", given=token)
            error.documents = tuple(numbers)
            raise error
        if self.special.separator is not None:
            if starts is not None:
                starts = starts + np.searchsorted(documents[1:], starts, side="right")
            ids = np.insert(ids, documents[1:], self.special.separator)
            documents += np.arange(documents.size)
        return Encoded(ids, documents, starts, int(replaced.size))


def give_same_ids(first: bytes, second: bytes) -> bool:
    """Return whether two tokenizer.json give the same ids for every text, as far as their contents show it.

    transformers writes a file differently when it saves it again, and may add a post-processor.
    """

    def what_gives_ids(spelled: bytes) -> list[Any]:
        content = json.loads(tokenizers.Tokenizer.from_buffer(spelled).to_str())
        return [content[part] for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")]

    try:
        return first == second or what_gives_ids(first) == what_gives_ids(second)
    except Exception:  # the library raises plain Exception for an invalid tokenizer
        return False


@contextmanager
def naming_texts(offsets: NDArray[np.int64], name: Callable[[int], str], advice: str = "") -> Iterator[None]:
    """Add the affected texts, and advice, to an error. offsets: as in `LoadedTokenizer.encode`."""
    try:
        yield
    except (FailedTextError, LongTextError) as error:
        numbers = np.searchsorted(offsets, error.places, side="right") - 1 if error.places else error.documents
        error.documents = tuple(np.unique(numbers).tolist())
        error.args = (f"{name(error.documents[0])}: {error}{advice}", *error.args[1:])
        raise


def lacks_template(content: dict[str, Any], roles: Mapping[str, str]) -> bool:
    """Return whether a tokenizer has [CLS] and [SEP], but no post-processor that puts them around a pair of texts.

    content: of tokenizer.json. roles: role → token. A template for a single text may exist, if it is the one of rows.
    """

    def adds_tokens(part: dict[str, Any]) -> bool:
        pair, single = (
            [piece.get("SpecialToken", {}).get("id") for piece in part.get(name, [])] for name in ("pair", "single")
        )
        is_template = any(pair) or (any(single) and single != row_template)
        return is_template or part.get("type") in ("BertProcessing", "RobertaProcessing")

    row_template = [roles.get("cls"), None, roles.get("sep")]
    parts = flat(content.get("post_processor"), "processors")
    return {"cls", "sep"} <= roles.keys() and not any(map(adds_tokens, parts))


def _with_template(
    old: dict[str, Any] | None, library: tokenizers.Tokenizer, roles: Mapping[str, str]
) -> dict[str, Any]:
    """Return a post-processor, as JSON: a template of the roles that keeps the byte-level part of `old`."""
    with_template = tokenizers.Tokenizer(models.BPE())
    with_template.post_processor = template(library, roles["cls"], roles["sep"])
    byte_level = [part for part in flat(old, "processors") if part.get("type") == "ByteLevel"]
    return {"type": "Sequence", "processors": [*byte_level, json.loads(with_template.to_str())["post_processor"]]}


def template(library: tokenizers.Tokenizer, cls: str, sep: str) -> processors.TemplateProcessing:
    """Return a post-processor that makes [CLS] text [SEP] and [CLS] text [SEP] text [SEP], like rows."""
    ends = [(token, library.token_to_id(token)) for token in (cls, sep)]
    return processors.TemplateProcessing(
        single=[cls, "$A", sep], pair=[cls, "$A", sep, "$B:1", f"{sep}:1"], special_tokens=ends
    )


def _gives_type_ids(post_processor: dict[str, Any] | None) -> bool:
    """Return whether a post-processor, given as JSON, sets the type id 1 for the second text of a pair."""
    parts = flat(post_processor, "processors")
    values = [value for part in parts for piece in part.get("pair", []) for value in piece.values()]
    return any(part.get("type") == "BertProcessing" for part in parts) or any(each["type_id"] == 1 for each in values)


def _texts(data: bytes | NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[str]:
    """Return the documents of `LoadedTokenizer.encode`, without the newline after each."""
    view = np.frombuffer(data, np.uint8).data
    return [str(view[start : stop - 1], "utf-8") for start, stop in pairwise(offsets.tolist())]


def _line_starts(text: str, encoding: tokenizers.Encoding, first: int) -> Iterator[int]:
    """Yield the indices of the first ids of lines. The ids of the text are numbered from `first` on."""
    line_end = -1
    for index, (start, _) in enumerate(encoding.offsets):
        if start >= line_end:
            yield first + index
            line_end = text.find("\n", start)
            line_end = line_end + 1 if line_end >= 0 else len(text) + 1
