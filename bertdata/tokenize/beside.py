"""The settings beside a vocabulary: flags, special tokens and added tokens, as AutoTokenizer reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from bertdata.errors import TokenizerError
from bertdata.tokenize.forms import library_tokenizer
from bertdata.tokenize.source import Source
from bertdata.tokenize.tokenizer import ROLE_SPELLINGS, TOKENIZER_CONFIG

_MAP, _ADDED, _MODEL = "special_tokens_map.json", "added_tokens.json", "config.json"
BESIDE = (TOKENIZER_CONFIG, _MAP, _ADDED, _MODEL)
_NAMED = {"bos": None, "eos": None, "unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
"""Role → default token of BERT's tokenizer, in the order in which AutoTokenizer adds them."""
_ANY = {"", "pretrained", "tokenizersbackend", "ernie", "megatronbert", "retribert"}
"""Kinds of tokenizers whose flags transformers ignores."""
_LIKE_BERT = {"bert", "convbert", "distilbert", "electra", "layoutlm", "lxmert", "mobilebert", "squeezebert"}
_LIKE_BERT |= {"dprreader", "dprcontextencoder", "dprquestionencoder"}
_OTHERS = {"esm", "funnel", "mpnet", "prophetnet", "roformer", "splinter", "tapas", "xlm-roberta"}  # with a vocab.txt
_LIKE_GPT2 = {"bart", "deberta", "gpt2", "led", "longformer", "mvp", "roberta"}
_PARTS: dict[str, list[str | None]] = dict.fromkeys(_LIKE_BERT, ["BertNormalizer", "BertPreTokenizer", "WordPiece"])
_PARTS |= dict.fromkeys(_LIKE_GPT2, [None, "ByteLevel", "BPE"])
"""Kind → the normalizer, pre-tokenizer and model that transformers gives it, whatever a tokenizer.json has."""


class Beside:
    """The settings beside a vocabulary.

    values: the members of tokenizer_config.json and special_tokens_map.json.
    kind: the class of the tokenizer, or else the type of the model, such as "bert"; "" if unknown.
    is_bert: whether a vocab.txt belongs to a tokenizer like BERT's, as far as known.
    is_known: whether transformers knows a value for every setting.
    roles: role → token, for the named roles.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """directory: the directory of the files; None: no files. Raises TokenizerError for a file that is not JSON."""
        found = {name: _object(directory / name) for name in BESIDE if directory and (directory / name).is_file()}
        config, names, model = (found.get(name, {}) for name in (TOKENIZER_CONFIG, _MAP, _MODEL))
        own_code = "AutoTokenizer" in str(config.get("auto_map"))
        named = config.get("tokenizer_class") or model.get("tokenizer_class") or ("its own code" if own_code else None)
        kind = str(named or _class_of(str(model.get("model_type", "")))).lower()
        self.kind = kind.removesuffix("fast").removesuffix("tokenizer")
        self.is_known, self.is_bert = self.kind not in _ANY, self.kind in _ANY | _LIKE_BERT
        has_decoder = "added_tokens_decoder" in config
        self.values = ({} if self.is_known else names) | config if has_decoder else config | names
        tokens = {role: self.values.get(f"{role}_token") for role in ROLE_SPELLINGS}
        contents = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
        self.roles = {role: content for role, content in contents.items() if isinstance(content, str)}
        if _ADDED in found and not has_decoder:
            extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
            named = [*self.roles.values(), *(extra if isinstance(extra, list) else ())]
            self.values["added_tokens_decoder"] = {
                str(number): {"content": token, "normalized": token not in named, "special": token in named}
                for token, number in found[_ADDED].items()
            }

    def flag(self, name: str) -> bool | None:
        """Return a boolean setting; None if it is missing. Raises TokenizerError for any other value."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return value
        sentence = f"the settings beside it have {name}: {value!r}; correct it to true or false"
        raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer")

    def tokens(self) -> list[AddedToken]:
        """Return the tokens that AutoTokenizer adds, in its order. Raises TokenizerError for an invalid token."""
        try:
            special = {token.content: token for token in self._special_tokens()}
            decoder = self.values.get("added_tokens_decoder") or {}
            given = [_token(decoder[number]) for number in sorted(decoder, key=int)]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            sentence = f"the settings beside it have a token that cannot be read ({error}); correct it"
            raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer") from None
        for token in given:
            token.special = special.pop(token.content, token).special or token.special
        return [*given, *special.values()]

    def _special_tokens(self) -> Iterator[AddedToken]:
        """Yield the tokens of roles, then other named tokens, then tokens without a name."""
        defaults = _NAMED if self.kind in _LIKE_BERT else dict.fromkeys(_NAMED)
        values = {f"{role}_token": token for role, token in defaults.items()} | self.values
        others = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
        if not isinstance(others, list | dict):
            raise TypeError(f"{others!r} is not a list of tokens")
        if isinstance(others, dict):
            values, others = values | others, []
        for token in (*(values[name] for name in values if name.endswith("_token")), *others):
            if isinstance(token, str | dict):
                yield _token(token, special=True)

    def differences(self, source: Source) -> list[str]:
        """Return the settings with which AutoTokenizer changes the tokenizer of the tokenizer.json next to them."""
        content, normalizer = source.outline, library_tokenizer(normalizer=source.outline["normalizer"]).normalizer
        parts = [(content[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
        a, e, chinese = ((normalizer.normalize_str(text) if normalizer else text) for text in "Aé东")
        is_so: dict[str, Any] = {"tokenizer_class": parts, "do_lower_case": a == "a", "strip_accents": e == "e"}
        is_so["tokenize_chinese_chars"] = chinese == " 东 "
        if parts[1] == "ByteLevel":
            is_so["add_prefix_space"] = content["pre_tokenizer"]["add_prefix_space"]
        wanted = {name: self.values.get(name) for name in is_so if self.is_known}
        if self.kind in _LIKE_BERT:
            lower = wanted["do_lower_case"] is not False
            defaults = {"do_lower_case": True, "strip_accents": lower, "tokenize_chinese_chars": True}
        else:
            defaults = {"add_prefix_space": False} if self.kind in _LIKE_GPT2 else {}
        wanted = {name: defaults.get(name) if value is None else value for name, value in wanted.items()}
        wanted["tokenizer_class"] = _PARTS.get(self.kind)
        added = {token.content for token in source.added.values()}
        try:
            names = [f"the token {token.content!r}" for token in self.tokens() if token.content not in added]
        except TokenizerError:
            names = ["a token that cannot be read"]
        return [*(name for name, value in wanted.items() if value not in (None, is_so[name])), *names]


def _class_of(model_type: str) -> str:
    """Return the class of the tokenizer that AutoTokenizer makes for a type of model; "" if unknown."""
    classes: dict[str, Any] = {kind: kind for kind in (*_PARTS, *_OTHERS)}
    with suppress(ImportError):
        if model_type:  # importing transformers, if it is installed, takes some seconds
            from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES as classes
    return classes.get(model_type) or ""


def _token(token: str | dict[str, Any], **special: bool) -> AddedToken:
    """Return a token in the form of the settings."""
    given: dict[str, Any] = {"content": token, "normalized": False} if isinstance(token, str) else token
    flags = {name: value for name, value in given.items() if name not in ("content", "__type", "id")}
    return AddedToken(given["content"], **flags | special)


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} for a different model's configuration. Raises TokenizerError if invalid."""
    try:
        return {} | json.loads(path.read_bytes())
    except (ValueError, TypeError, RecursionError):
        if path.name == _MODEL:
            return {}
        sentence = f"{path} is not a JSON object; correct it or remove it"
        raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer", given=path.parent) from None
