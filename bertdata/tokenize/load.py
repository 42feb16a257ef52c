"""Where a tokenizer comes from: a file, a directory, a vocabulary, or the hub."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bertdata.errors import TokenizerError, UsageError
from bertdata.tokenize.tokenizer import ROLE_SPELLINGS, TOKENIZER, TOKENIZER_CONFIG, Tokenizer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


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
    for role in ROLE_SPELLINGS:
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
            return Tokenizer(bert_tokenizer(wordpiece, lowercase=bool(lower)).to_str(), roles)
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
    roles = {role: getattr(found, f"{role}_token", None) for role in ROLE_SPELLINGS}
    return Tokenizer(found.backend_tokenizer.to_str(), {role: token for role, token in roles.items() if token})


def bert_tokenizer(vocabulary: dict[str, int], *, lowercase: bool) -> tokenizers.Tokenizer:
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
