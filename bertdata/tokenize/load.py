"""Load a tokenizer from a file, a directory, or the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bertdata.errors import TokenizerError, UsageError, install
from bertdata.tokenize.beside import BESIDE, Beside
from bertdata.tokenize.source import NotAnObject
from bertdata.tokenize.tokenizer import (
    ESM_ROLES,
    ROLE_SPELLINGS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    LoadedTokenizer,
    give_same_ids,
    template,
)

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
RESIDUES = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]  # ESM-2's
VOCABULARY = "vocab.txt"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
FILES = (TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, *SENTENCEPIECE)
"""A directory with one of these files is a tokenizer."""
MOST_BYTES = 1 << 27  # bytes of a file; the largest one on the hub has 34 MB
_WHITE_SPACE = " \t\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Characters that `tokenizers` strips from the end of a line of vocab.txt."""
_HUB_TIMEOUT_S = 5.0  # seconds to wait for the first response of the hub


def load(spec: str) -> LoadedTokenizer:
    """Load a tokenizer. `spec`: a tokenizer.json or vocab.txt with any file name, a directory with one, or a hub name.

    transformers converts a SentencePiece model, or a directory with such a model and neither of these files.

    Raises UsageError if `spec` is empty, and TokenizerError, which lists the searched names, if nothing is found.
    """
    path = Path(spec)
    if not spec:
        sentence = "--tokenizer is empty; give a path or a hub name, or leave --tokenizer out to train one"
        raise UsageError(sentence, "missing", option="tokenizer", given=spec)
    try:
        if path.is_dir():
            return _load_directory(path)
        if path.name in SENTENCEPIECE and path.exists():
            return _convert(str(path.parent))
        if path.exists():
            loaded = _load_file(path, Beside())
            if path.name == VOCABULARY and not _is_as_in_directory(loaded, path.parent):
                loaded.notes.append(
                    f"warning: {path} alone gives other ids than its directory, whose settings are not read; give the "
                    "directory to use them"
                )
            return loaded
    except OSError as error:
        sentence = f"{spec} cannot be read: {error.strerror}"
        raise TokenizerError(sentence, "unreadable", option="tokenizer", given=spec) from None
    if spec.startswith((".", "/", "~")) or spec.endswith((".json", ".txt", ".model", "/")) or spec.count("/") > 1:
        sentence = f"tokenizer {spec} does not exist; give a tokenizer.json, a vocab.txt or their directory"
        raise TokenizerError(sentence, "tokenizer-not-found", option="tokenizer", given=spec)
    return _load_hub(spec)


def _is_as_in_directory(loaded: LoadedTokenizer, directory: Path) -> bool:
    """Return whether a vocab.txt alone gives the same ids as its directory, as far as the directory can be loaded."""
    try:
        return give_same_ids(loaded.files[TOKENIZER], _load_directory(directory).files[TOKENIZER])
    except TokenizerError:
        return True


def name_of(spec: str) -> str | None:
    """Return the name of a tokenizer for `load`: of its directory or on the hub; None for a file of any name."""
    path = Path(spec)
    if path.is_dir():
        return path.resolve().name
    if path.exists():
        return path.resolve().parent.name if path.name == TOKENIZER else None
    return spec


def _load_directory(path: Path) -> LoadedTokenizer:
    beside = Beside(path)
    if (path / TOKENIZER).is_file():
        return _load_file(path / TOKENIZER, beside)
    if (path / VOCABULARY).is_file() and (beside.is_bert or beside.kind == "esm"):
        return _load_file(path / VOCABULARY, beside)
    if any((path / name).is_file() for name in (VOCABULARY, *SENTENCEPIECE, "merges.txt")):
        return _convert(str(path))
    sentence = f"directory {path} has neither a {TOKENIZER} nor a vocab.txt; give one that has"
    raise TokenizerError(sentence, "tokenizer-not-found", option="tokenizer", given=path)


def _load_file(path: Path, beside: Beside) -> LoadedTokenizer:
    """beside: the settings in the directory of the file, if they apply."""
    if path.stat().st_size > MOST_BYTES:
        sentence = f"{path} has more than {MOST_BYTES >> 20} MiB, which no {TOKENIZER} has; give another file"
        raise TokenizerError(sentence, "too-large", option="tokenizer", given=path)
    spelled, roles, input_names = path.read_bytes(), beside.roles, beside.values.get("model_input_names")
    try:
        with suppress(NotAnObject):
            loaded = LoadedTokenizer(spelled, roles, input_names)
            ask = lambda: {"names": beside.differences(loaded.source)}  # noqa: E731
            if names := loaded.source.kept(f"differences {beside.kind} {beside.values}", ask)["names"]:
                more = f", and {len(names) - 3} more" * (len(names) > 3)
                loaded.notes.append(
                    f"warning: settings beside {path} ({', '.join(names[:3])}{more}) make AutoTokenizer give other "
                    f"ids; these are the ids of {TOKENIZER}"
                )
            return loaded
        text = spelled.decode("utf-8-sig")
        # A line of "##" and white space matches no text; it stays unchanged, so that datasets keep their ids.
        lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
        lines = [line if line.rstrip(_WHITE_SPACE) in ("", "##") else line.rstrip(_WHITE_SPACE) for line in lines]
        if lines == RESIDUES:
            return LoadedTokenizer(esm_tokenizer().to_str(), ESM_ROLES | roles, input_names)
        if beside.is_bert and roles.get("unk", "[UNK]") in lines:
            return LoadedTokenizer(_bert_of(lines, beside).to_str(), roles, input_names)
    except UnicodeDecodeError:
        sentence = f"{path} is neither a {TOKENIZER} nor a vocab.txt: it is not UTF-8 text"
        raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer", given=path) from None
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}", "tokenizer-unreadable", option="tokenizer", given=path) from None
    if not beside.is_bert:  # a vocab.txt of EsmTokenizer whose tokens differ from ESM-2's
        return _convert(str(path.parent))
    sentence = f"{path} is neither a {TOKENIZER} (a JSON object) nor a vocab.txt (one token a line, [UNK] among them)"
    raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer", given=path)


def _bert_of(lines: list[str], beside: Beside) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocab.txt of BERT's kind. Raises TokenizerError for an invalid token or setting."""
    vocabulary = dict[str, int]()
    for number, token in enumerate(lines):
        if (first := vocabulary.setdefault(token, number)) != number:
            sentence = f"line {number + 1} has the token {token!r} of line {first + 1}; give each line its own token"
            raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer")
    lower = beside.flag("do_lower_case")
    if lower is None:  # a cased vocabulary has capital letters in tokens that are not special
        lower = not any(any("A" <= c <= "Z" for c in line) and line[:1] + line[-1:] != "[]" for line in lines)
        if not lower and beside.is_known:
            sentence = f"it has capital letters, but no {TOKENIZER_CONFIG} beside it; set do_lower_case there"
            raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer")
    chinese = beside.flag("tokenize_chinese_chars") is not False
    flags = {"strip_accents": beside.flag("strip_accents"), "handle_chinese_chars": chinese}
    roles = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"} | beside.roles
    tokenizer = bert_tokenizer(vocabulary, lowercase=lower, unk=roles["unk"], added=beside.tokens(), **flags)
    if not beside.is_known:
        add_roles(tokenizer)  # like the roles of a vocab.txt alone
    add_template(tokenizer, roles["cls"], roles["sep"])
    return tokenizer


def _load_hub(name: str) -> LoadedTokenizer:
    """Load from the local Hugging Face cache, else from the hub, after checking that the repository exists.

    The cache may have only some of the files, because other programs need fewer. Then tries the hub, too.
    """
    from huggingface_hub import try_to_load_from_cache

    path = _from_hub(name, only_cache=True)
    if path is None or None in (try_to_load_from_cache(name, file) for file in (TOKENIZER, *BESIDE)):
        try:
            _require_on_hub(name)
            path = _from_hub(name, only_cache=False)
        except TokenizerError:
            if path is None:
                raise
    return _load_directory(path.parent) if path else _convert(name)


def _from_hub(name: str, *, only_cache: bool) -> Path | None:
    """Return the tokenizer.json or vocab.txt of a repository, and its files among BESIDE."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    def download(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(name, file, local_files_only=only_cache))
        except (EntryNotFoundError, HFValidationError):  # missing on the hub or in the cache
            return None

    path = download(TOKENIZER) or download(VOCABULARY)
    for file in BESIDE if path else ():
        download(file)
    return path


def _convert(name: str) -> LoadedTokenizer:
    """Convert a tokenizer, such as SentencePiece's, from a directory or repository with transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        sentence = f"tokenizer {name} has no {TOKENIZER}, and transformers would convert it; {install('train')}"
        raise TokenizerError(sentence, "not-installed", option="tokenizer", given=name) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of exceptions
        advice = "correct tokenizer_class in tokenizer_config.json, and install sentencepiece and protobuf"
        sentence = f"transformers cannot convert the tokenizer {name}: {_first(error)}; {advice}"
        raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer", given=name) from None
    present = [file for file in (VOCABULARY, *SENTENCEPIECE, "merges.txt") if (Path(name) / file).is_file()]
    reads_nothing = present == [VOCABULARY] and VOCABULARY not in tokenizer.vocab_files_names.values()
    if reads_nothing or not getattr(tokenizer, "backend_tokenizer", None):
        kind = type(tokenizer).__name__
        sentence = f"tokenizer {name} has no {TOKENIZER}, and transformers makes none of its {kind}; give another"
        raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer", given=name)
    given = {role: token for role in ROLE_SPELLINGS if (token := getattr(tokenizer, f"{role}_token", None))}
    return LoadedTokenizer(tokenizer.backend_tokenizer.to_str(), given, tokenizer.model_input_names)


def _require_on_hub(name: str) -> None:
    """Check once, without retries, whether the hub has the repository.

    If the hub is unreachable, a download retries for half a minute. huggingface_hub honours HF_ENDPOINT,
    HF_HUB_OFFLINE, HF_TOKEN and the proxy variables. Raises TokenizerError for a missing repository or no response.
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
        pass  # the repository exists; its tokenizer may have other files, such as a vocab.txt
    except OfflineModeIsEnabled:
        sentence = f"{nowhere} HF_HUB_OFFLINE is set; unset it, or give a local path"
        raise TokenizerError(sentence, "tokenizer-not-found", **options) from None
    except GatedRepoError:
        sentence = f"{nowhere} {hub} gives it only to users who were granted access; log in with a token (HF_TOKEN)"
        raise TokenizerError(sentence, "access-denied", **options) from None
    except RepositoryNotFoundError:
        sentence = f"{nowhere} {hub} has no repository of this name, or a private one; check the name, or set HF_TOKEN"
        raise TokenizerError(sentence, "tokenizer-not-found", **options) from None
    except HFValidationError as error:
        sentence = f"{nowhere} it cannot be a name on the hub ({_first(error)}); give a path or a repository"
        raise TokenizerError(sentence, "tokenizer-not-found", **options) from None
    except Exception as error:  # the HTTP library's own errors differ between versions of huggingface_hub
        reason = _first(error)
        sentence = f"{nowhere} {hub} cannot be reached ({reason}); check the network, HTTPS_PROXY and HF_ENDPOINT"
        raise TokenizerError(sentence, "server-failed", **options) from None


def _first(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .:")


def bert_tokenizer(
    vocabulary: dict[str, int],
    *,
    lowercase: bool,
    unk: str = "[UNK]",
    added: Sequence[AddedToken] | None = None,
    **flags: Any,
) -> tokenizers.Tokenizer:
    """Return a tokenizer like BERT's, with the vocabulary token → id.

    added: tokens that are never split; None: the SPECIALS in the vocabulary, with [CLS] and [SEP] around a text. flags:
    options of the normalizer.
    """
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unk, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, **flags)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if added is None:
        add_roles(tokenizer)
    else:
        tokenizer.add_tokens([*added])
    return tokenizer


def esm_tokenizer() -> tokenizers.Tokenizer:
    """Return the tokenizer of ESM-2 (Lin et al., 2023), published as a vocab.txt and code. Each letter is a token."""
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
    """Make the SPECIALS in the vocabulary special tokens, and put [CLS] and [SEP] around a text.

    mask_takes_space: [MASK] includes the space before it, as usual if spaces are part of tokens.
    """
    present = [token for token in SPECIALS if tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, lstrip=mask_takes_space and token == "[MASK]", normalized=False, special=True)
            for token in present
        ]
    )
    add_template(tokenizer, "[CLS]", "[SEP]")


def add_template(tokenizer: tokenizers.Tokenizer, cls: str, sep: str) -> None:
    """Put two tokens around a text if special tokens are requested and the vocabulary has both."""
    if None not in map(tokenizer.token_to_id, (cls, sep)):
        tokenizer.post_processor = template(tokenizer, cls, sep)
