"""Compare our ids with those of `tokenizers`. Print each difference, and end with exit code 1 if there is one.

python tools/any_tokenizer.py parts --count 2000 --seed 0     tokenizers put together at random
python tools/any_tokenizer.py neighbours [tokenizer.json ...]   each code point; a minute for a normalizer or file
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from bertdata.errors import TokenizerError
from bertdata.tokenize.cutting import GPT2_RULE, LLAMA3_RULE
from bertdata.tokenize.forms import _cluster_rules
from bertdata.tokenize.tokenizer import LoadedTokenizer

LISTS = json.loads((Path(__file__).parent.parent / "tests" / "word_lists.json").read_text(encoding="utf-8"))
WORDS = LISTS["any_tokenizer"]
SPACES = [" ", " ", " ", " ", "  ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", ""]
SPLITS = [
    r"\s+",
    r"\d{1,3}",
    r"\p{L}+|\p{N}+",
    r"[^\s\p{L}\p{N}]+",
    r" ?\p{L}+| ?\p{N}+|\s+",
    r"\s+(?!\S)|\s+",
    "[0-9]",
    "'",
    r"\w+",
    GPT2_RULE,
    LLAMA3_RULE,
]
NEIGHBOURS = ["\u00a0", "²", "ﬁ", " ", "\n", "▁", "a", "é", "e\u0301", "\u1100\u1161", "🙂\u200d", "<x>"]
CHUNK = 256  # code points of a text
NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFD": normalizers.NFD(),
    "NFKC": normalizers.NFKC(),
    "NFKD": normalizers.NFKD(),
    "Nmt": normalizers.Nmt(),
    "Precompiled": normalizers.Precompiled(_cluster_rules()),
    "BertNormalizer": normalizers.BertNormalizer(),
    "Lowercase": normalizers.Lowercase(),
    "StripAccents": normalizers.StripAccents(),
    "Replace": normalizers.Sequence([normalizers.Replace("é", "e"), normalizers.Replace("²", "")]),
    "Strip": normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]),
    "spaces": normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFKC()]),
    "accents": normalizers.Sequence([normalizers.Lowercase(), normalizers.NFD(), normalizers.StripAccents()]),
}
KINDS = ["bpe", "bpe", "wordpiece", "unigram", "wordlevel"]
BEHAVIORS = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]


def nasty_text(draw: random.Random, most: int = 40) -> str:
    """A text of words and spaces, many of them unusual."""
    return "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(draw.randrange(most)))


def _normalizer(draw: random.Random) -> Any:
    texts = [("a", "b"), (" ", "▁"), ("``", '"'), ("é", "e"), ("q", "")]
    patterns = [" {2,}", r"\s+", "[0-9]", r"\p{P}"]
    kinds = {name: lambda fixed=fixed: fixed for name, fixed in NORMALIZERS.items()} | {
        "strip": lambda: normalizers.Strip(draw.random() < 0.7, draw.random() < 0.7),
        "bert": lambda: normalizers.BertNormalizer(*(draw.random() < 0.5 for _ in range(4))),
        "replace": lambda: normalizers.Replace(*draw.choice(texts)),
        "regex": lambda: normalizers.Replace(Regex(draw.choice(patterns)), draw.choice(" ▁0")),
        "prepend": lambda: normalizers.Prepend("▁"),
    }
    parts = [kinds[draw.choice([*kinds])]() for _ in range(draw.choice([0, 0, 1, 1, 1, 2, 2, 3]))]
    return normalizers.Sequence(parts) if parts else None


def _pre_tokenizer(draw: random.Random) -> Any:
    modes = ["always", "first", "never"]
    kinds = {
        "bert": pre_tokenizers.BertPreTokenizer,
        "words": pre_tokenizers.Whitespace,
        "metaspace": lambda: pre_tokenizers.Metaspace("▁", draw.choice(modes), draw.random() < 0.8),
        "spaces": pre_tokenizers.WhitespaceSplit,
        "split": lambda: pre_tokenizers.Split(Regex(draw.choice(SPLITS)), draw.choice(BEHAVIORS), draw.random() < 0.3),
        "punctuation": lambda: pre_tokenizers.Punctuation(draw.choice(BEHAVIORS)),
        "digits": lambda: pre_tokenizers.Digits(draw.random() < 0.5),
    }
    parts = [kinds[draw.choice([*kinds])]() for _ in range(draw.choice([0, 1, 1, 1, 2, 2, 3]))]
    if draw.random() < 0.4:
        parts.append(pre_tokenizers.ByteLevel(draw.random() < 0.3, use_regex=draw.random() < 0.5))
    return pre_tokenizers.Sequence(parts) if parts else None


def _model(draw: random.Random, kind: str, letters: list[str]) -> tuple[Any, Any]:
    """A model without a vocabulary, and what trains it."""
    special: dict[str, Any] = {"special_tokens": ["<unk>", "</s>"], "show_progress": False}
    special["vocab_size"] = len(letters) + draw.randrange(60, 400)
    unk: dict[str, Any] = {"unk_token": "<unk>"}
    if kind == "bpe":
        model = models.BPE(**unk if draw.random() < 0.6 else {}, fuse_unk=draw.random() < 0.3)
        suffix: dict[str, Any] = draw.choice([{}, {}, {}, {"end_of_word_suffix": "</w>"}])
        return model, trainers.BpeTrainer(**special, **suffix, initial_alphabet=letters, min_frequency=1)
    if kind == "wordpiece":
        model = models.WordPiece(**unk, max_input_chars_per_word=draw.choice([5, 20, 100]))
        return model, trainers.WordPieceTrainer(**special)
    if kind == "unigram":
        return models.Unigram(), trainers.UnigramTrainer(**special, **unk, initial_alphabet=letters)
    return models.WordLevel(**unk), trainers.WordLevelTrainer(**special)


def made(draw: random.Random) -> str | None:
    """The JSON of a tokenizer, None if its parts cannot be trained together."""
    kind, normalizer, pre_tokenizer = draw.choice(KINDS), _normalizer(draw), _pre_tokenizer(draw)
    letters = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in str(pre_tokenizer) else []
    model, trainer = _model(draw, kind, letters)
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    try:
        tokenizer.train_from_iterator([nasty_text(draw) for _ in range(30)], trainer)
        tokenizers.Tokenizer.from_str(tokenizer.to_str())  # a score may be no number
    except Exception:  # noqa: BLE001  (what the library raises)
        return None
    added = [
        AddedToken(
            draw.choice(["<tag>", "|||", "[MASK]", "  ", "x x", "Café", "ab", "the"]),
            single_word=draw.random() < 0.1,
            lstrip=draw.random() < 0.1,
            rstrip=draw.random() < 0.1,
            normalized=draw.random() < 0.4,
        )
        for _ in range(draw.choice([0, 0, 0, 1, 2]))
    ]
    tokenizer.add_tokens(added)
    tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=draw.random() < 0.3)] if draw.random() < 0.5 else [])
    content = json.loads(tokenizer.to_str())
    if kind == "bpe" and draw.random() < 0.2:
        content["model"]["ignore_merges"] = True
    return json.dumps(content)


def differences(spelled: str, texts: list[str]) -> Iterator[tuple[str, list[int], list[int]]]:
    """The texts for which our ids are others, with ours and those of the library."""
    ours = LoadedTokenizer(spelled)
    encoded = [text.encode() + b"\n" for text in texts]
    block = b"".join(encoded), np.append(0, np.cumsum([len(text) for text in encoded]))
    try:
        wanted = ours._encode_by_library(*block, sentences=False)
    except TokenizerError as error:
        if error.kind != "tokenizer-lacks-token":
            raise
        wanted = None
    try:
        found = ours.encode(*block, sentences=False)
    except TokenizerError:  # a special id, and no unknown one
        assert wanted is None  # noqa: S101
        return
    assert wanted is not None  # noqa: S101
    ids, theirs = (np.split(each.ids, each.documents[1:-1]) for each in (found, wanted))
    for text, one, other in zip(texts, ids, theirs, strict=True):
        if one.tolist() != other.tolist():
            yield text, one.tolist(), other.tolist()


def code_points() -> list[str]:
    """Every code point that a text may have; of ideographs, unassigned and private ones every 16th."""
    kinds = {chr(n): unicodedata.category(chr(n)) for n in range(0x110000) if not 0xD800 <= n < 0xE000}
    many = [c for c, kind in kinds.items() if kind in ("Cn", "Co") or unicodedata.name(c, "").startswith("CJK UNIFIED")]
    new = {c for c in many if ord(c) < 0x3400 or 0xA000 <= ord(c) < 0xAC00 or 0x10000 <= ord(c) < 0x1FB00}
    return sorted((kinds.keys() - set(many)) | new | set(many[::16]))


def of_bytes(normalizer: normalizers.Normalizer) -> str:
    """The JSON of a tokenizer that gives the bytes of normal forms."""
    vocabulary = {"▁": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    library.normalizer, library.pre_tokenizer = normalizer, pre_tokenizers.Metaspace()
    library.add_tokens([AddedToken("<x>", normalized=False)])
    return library.to_str()


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("files", nargs=-1)
def neighbours(files: tuple[str, ...]) -> None:
    """Compare every code point beside difficult neighbours, for files or for each normalizer of `tokenizers`."""
    contents = {path: Path(path).read_text(encoding="utf-8") for path in files}
    contents = contents or {name: of_bytes(normalizer) for name, normalizer in NORMALIZERS.items()}
    wrong = 0
    for name, content in contents.items():
        points, found = code_points(), list[tuple[str, str]]()
        for neighbour in NEIGHBOURS:
            texts = [f"a{neighbour}{c}b {c}{neighbour} " for c in points]
            joined = ["".join(texts[k : k + CHUNK]) for k in range(0, len(texts), CHUNK)]
            if any(differences(content, joined)):
                single = {text for text, *_ in differences(content, texts)}
                found += [
                    (f"U+{ord(c):04X}", neighbour) for c, text in zip(points, texts, strict=True) if text in single
                ]
        click.echo(
            f"{name}: {len(points)} code points × {len(NEIGHBOURS)} neighbours, {len(found)} differ {found[:20]}"
        )
        wrong += bool(found)
    raise SystemExit(wrong > 0)


@main.command()
@click.option("--count", type=int, default=2000, show_default=True, help="Of tokenizers.")
@click.option("--seed", type=int, default=0, show_default=True, help="What is drawn.")
@click.option("--texts", type=int, default=40, show_default=True, help="For each tokenizer.")
def parts(count: int, seed: int, texts: int) -> None:
    """Compare tokenizers put together at random: any parts, in any order."""
    engines: Counter[str] = Counter()
    wrong = 0
    for number in range(count):
        draw = random.Random(f"{seed} {number}")  # noqa: S311
        spelled = made(draw)
        if spelled is None:
            engines["cannot be trained"] += 1
            continue
        try:
            found = next(differences(spelled, [nasty_text(draw) for _ in range(texts)]), None)
        except TokenizerError:
            engines["the library fails"] += 1
            continue
        engines[LoadedTokenizer(spelled).engine.name or "none"] += 1
        if found:
            wrong += 1
            click.echo(f"seed {seed} number {number}: {found[0]!r} ours {found[1]} theirs {found[2]}\n{spelled[:600]}")
    click.echo(f"{dict(engines)}; {wrong} differ")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
