"""Loads a tokenizer from a file, a directory, or the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bertdata.errors import TokenizerError, UsageError, install
from bertdata.tokenize.tokenizer import ESM_ROLES, ROLE_SPELLINGS, TOKENIZER, TOKENIZER_CONFIG, LoadedTokenizer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
RESIDUES = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]  # ESM-2's
VOCABULARY = "vocab.txt"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # SentencePiece models
FILES = (TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, *SENTENCEPIECE)
"""Those that make a directory one of a tokenizer."""
MOST_BYTES = 1 << 27  # of a file; the largest on the hub has 34 MB
_HUB_TIMEOUT_S = 5.0  # for the hub's answer to the first question


def load(spec: str) -> LoadedTokenizer:
    """Loads a tokenizer. `spec` is a tokenizer.json or vocab.txt of any name, a directory of one, or a hub name.

    A directory with a SentencePiece model and neither of these, or that model, is converted by transformers.

    Raises UsageError if `spec` is empty, and TokenizerError, which says what was looked for, if it is none of these.
    """
    path = Path(spec)
    if not spec:
        raise UsageError(
            "--tokenizer is empty; give a path or a hub name, or leave --tokenizer out to train one",
            "missing",
            option="tokenizer",
            given=spec,
        )
    try:
        if path.is_dir():
            return _load_directory(path)
        if path.name in SENTENCEPIECE and path.exists():
            return _convert(str(path.parent))
        if path.exists():
            return _load_file(path, {})
    except OSError as error:
        raise TokenizerError(
            f"{spec} cannot be read: {error.strerror}", "unreadable", option="tokenizer", given=spec
        ) from None
    if spec.startswith((".", "/", "~")) or spec.endswith((".json", ".txt", ".model", "/")) or spec.count("/") > 1:
        raise TokenizerError(
            f"tokenizer {spec} does not exist; give a tokenizer.json, a vocab.txt or their directory",
            "tokenizer-not-found",
            option="tokenizer",
            given=spec,
        )
    return _load_hub(spec)


def name_of(spec: str) -> str | None:
    """The name of a tokenizer that `load` takes: of its directory or on the hub. None: a file that is named freely."""
    path = Path(spec)
    if path.is_dir():
        return path.resolve().name
    if path.exists():
        return path.resolve().parent.name if path.name == TOKENIZER else None
    return spec


def _load_directory(path: Path) -> LoadedTokenizer:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG):
        if (path / name).is_file():
            try:
                config |= json.loads((path / name).read_bytes())
            except (ValueError, TypeError, RecursionError):
                raise TokenizerError(
                    f"{path / name} is not a JSON object; correct it or remove it",
                    "tokenizer-unreadable",
                    option="tokenizer",
                    given=path,
                ) from None
    for name in (TOKENIZER, VOCABULARY):
        if (path / name).is_file():
            return _load_file(path / name, config)
    if any((path / name).is_file() for name in SENTENCEPIECE):
        return _convert(str(path))
    raise TokenizerError(
        f"directory {path} has neither a {TOKENIZER} nor a vocab.txt; give one that has",
        "tokenizer-not-found",
        option="tokenizer",
        given=path,
    )


def _load_file(path: Path, config: dict[str, Any]) -> LoadedTokenizer:
    """config: the content of tokenizer_config.json, if there is one."""
    if path.stat().st_size > MOST_BYTES:
        raise TokenizerError(
            f"{path} has more than {MOST_BYTES >> 20} MiB, which no {TOKENIZER} has; give another file",
            "too-large",
            option="tokenizer",
            given=path,
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise TokenizerError(
            f"{path} is neither a {TOKENIZER} nor a vocab.txt: it is not UTF-8 text",
            "tokenizer-unreadable",
            option="tokenizer",
            given=path,
        ) from None
    roles = {}
    for role in ROLE_SPELLINGS:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            roles[role] = token
    try:
        is_json = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_json = False
    try:
        if is_json:
            return LoadedTokenizer(text, roles, config.get("model_input_names"))
        lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
        if "[UNK]" in lines and len(set(lines)) == len(lines):
            lower = config.get("do_lower_case")
            if lower is None:  # a cased vocabulary has capital letters in tokens that are not special
                lower = not any(any("A" <= c <= "Z" for c in line) and line[:1] + line[-1:] != "[]" for line in lines)
            wordpiece = {token: number for number, token in enumerate(lines)}
            tokenizer = bert_tokenizer(wordpiece, lowercase=bool(lower))
            return LoadedTokenizer(tokenizer.to_str(), roles, config.get("model_input_names"))
        if lines == RESIDUES:
            return LoadedTokenizer(esm_tokenizer().to_str(), ESM_ROLES | roles, config.get("model_input_names"))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}", "tokenizer-unreadable", option="tokenizer", given=path) from None
    raise TokenizerError(
        f"{path} is neither a {TOKENIZER} (a JSON object) nor a vocab.txt (one token a line, all different, [UNK] "
        "among them; or that of ESM-2)",
        "tokenizer-unreadable",
        option="tokenizer",
        given=path,
    )


def _load_hub(name: str) -> LoadedTokenizer:
    """From the local Hugging Face cache, else from the hub, which is first asked whether it has the repository.

    The cache may have one file of several, as other programs need less. Then the hub is asked too, if it answers.
    """
    path = _from_hub(name, only_cache=True)
    if path is None or not _knows_all(name):
        try:
            _require_on_hub(name)
            path = _from_hub(name, only_cache=False)
        except TokenizerError:
            if path is None:
                raise
    return _load_directory(path.parent) if path else _convert(name)


def _knows_all(name: str) -> bool:
    """Whether the cache has both files of a tokenizer, or knows of each that it lacks that the hub has none."""
    from huggingface_hub import try_to_load_from_cache

    return None not in (try_to_load_from_cache(name, file) for file in (TOKENIZER, TOKENIZER_CONFIG))


def _from_hub(name: str, *, only_cache: bool) -> Path | None:
    """The tokenizer.json or vocab.txt of a repository, with tokenizer_config.json beside it if there is one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    def download(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(name, file, local_files_only=only_cache))
        except (EntryNotFoundError, HFValidationError):  # not there, or not in the cache
            return None

    path = download(TOKENIZER) or download(VOCABULARY)
    if path:
        download(TOKENIZER_CONFIG)
    return path


def _convert(name: str) -> LoadedTokenizer:
    """A tokenizer whose directory or repository has neither file, as transformers converts it, as of SentencePiece."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerError(
            f"tokenizer {name} has no {TOKENIZER}, and transformers, which could convert it, is not installed; "
            f"{install('train')}",
            "not-installed",
            option="tokenizer",
            given=name,
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise TokenizerError(
            f"transformers cannot convert the tokenizer {name}: {_first(error)}; a SentencePiece model needs the "
            "packages sentencepiece and protobuf",
            "tokenizer-unreadable",
            option="tokenizer",
            given=name,
        ) from None
    if not getattr(tokenizer, "backend_tokenizer", None):
        raise TokenizerError(
            f"tokenizer {name} has no {TOKENIZER}, and transformers cannot make one; give another tokenizer",
            "tokenizer-unreadable",
            option="tokenizer",
            given=name,
        )
    roles = {role: getattr(tokenizer, f"{role}_token", None) for role in ROLE_SPELLINGS}
    present = {role: token for role, token in roles.items() if token}
    return LoadedTokenizer(tokenizer.backend_tokenizer.to_str(), present, tokenizer.model_input_names)


def _require_on_hub(name: str) -> None:
    """Asks the hub once, without retries, whether it has the repository.

    A download retries for half a minute where no hub can be reached. huggingface_hub honours HF_ENDPOINT,
    HF_HUB_OFFLINE, HF_TOKEN and the proxy variables. Raises TokenizerError if the hub does not answer, or not with yes.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    hub, options = constants.ENDPOINT, {"option": "tokenizer", "given": name}
    nowhere = f"tokenizer {name} is not a file or directory, nor in the local Hugging Face cache, and"
    try:
        get_hf_file_metadata(hf_hub_url(name, TOKENIZER), timeout=_HUB_TIMEOUT_S)
    except EntryNotFoundError:
        pass  # the repository is there; its tokenizer may have other files, such as a vocab.txt
    except OfflineModeIsEnabled:
        raise TokenizerError(
            f"{nowhere} HF_HUB_OFFLINE is set; unset it, or give a local path", "tokenizer-not-found", **options
        ) from None
    except GatedRepoError:
        raise TokenizerError(
            f"{nowhere} {hub} gives it only to users who were granted access; log in with an access token (HF_TOKEN)",
            "access-denied",
            **options,
        ) from None
    except RepositoryNotFoundError:
        raise TokenizerError(
            f"{nowhere} {hub} has no repository of this name, or a private one; check the name, or set HF_TOKEN",
            "tokenizer-not-found",
            **options,
        ) from None
    except HFValidationError as error:
        raise TokenizerError(
            f"{nowhere} it cannot be a name on the hub ({_first(error)}); give a path or the name of a repository",
            "tokenizer-not-found",
            **options,
        ) from None
    except Exception as error:  # the HTTP library's own errors differ between versions of huggingface_hub
        raise TokenizerError(
            f"{nowhere} {hub} cannot be reached ({_first(error)}); check the network, HTTPS_PROXY and HF_ENDPOINT, or "
            "give a local path",
            "server-failed",
            **options,
        ) from None


def _first(error: Exception) -> str:
    """The first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def bert_tokenizer(vocabulary: dict[str, int], *, lowercase: bool) -> tokenizers.Tokenizer:
    """A tokenizer like BERT's, with the vocabulary token → id."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    add_roles(tokenizer)
    return tokenizer


def esm_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer of ESM-2 (Lin et al., 2023), which is published as a vocab.txt and code: a letter is a token."""
    vocabulary = {token: number for number, token in enumerate(RESIDUES)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), letters])
    tokenizer.decoder = decoders.Fuse()
    specials = ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <eos>",
        pair="<cls> $A <eos> $B <eos>",
        special_tokens=[(token, vocabulary[token]) for token in ("<cls>", "<eos>")],
    )
    return tokenizer


def add_roles(tokenizer: tokenizers.Tokenizer, *, mask_takes_space: bool = False) -> None:
    """Makes those of SPECIALS that are in the vocabulary special tokens, and puts [CLS] and [SEP] around a text.

    mask_takes_space: [MASK] takes the space before it, as is usual where spaces are part of tokens.
    """
    present = [token for token in SPECIALS if tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, lstrip=mask_takes_space and token == "[MASK]", normalized=False, special=True)
            for token in present
        ]
    )
    if "[CLS]" in present and "[SEP]" in present:
        ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
