"""Compares the ids of every code point beside difficult neighbours with those of `tokenizers`.

    python tools/neighbours.py [tokenizer.json ...]

Without files, it tries each normalizer of `tokenizers` with a vocabulary of bytes, so that ids show normal forms. It
takes about a minute for each normalizer or file, prints the code points that differ, and exits with 1 if there are any.
"""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from bertdata.tokenize.forms import _cluster_rules
from bertdata.tokenize.tokenizer import LoadedTokenizer

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


def code_points() -> list[str]:
    """Every code point that a text may have; of ideographs, unassigned and private ones every 16th."""
    kinds = {chr(n): unicodedata.category(chr(n)) for n in range(0x110000) if not 0xD800 <= n < 0xE000}
    many = [c for c, kind in kinds.items() if kind in ("Cn", "Co") or unicodedata.name(c, "").startswith("CJK UNIFIED")]
    new = {c for c in many if ord(c) < 0x3400 or 0xA000 <= ord(c) < 0xAC00 or 0x10000 <= ord(c) < 0x1FB00}
    return sorted((kinds.keys() - set(many)) | new | set(many[::16]))


def tokenizer_of(normalizer: normalizers.Normalizer) -> str:
    """The JSON of a tokenizer that gives the bytes of normal forms."""
    vocabulary = {"▁": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    library = Library(BPE(vocabulary, [], byte_fallback=True))
    library.normalizer, library.pre_tokenizer = normalizer, pre_tokenizers.Metaspace()
    library.add_tokens([AddedToken("<x>", normalized=False)])
    return library.to_str()


def differ(tokenizer: LoadedTokenizer, texts: list[str]) -> bool:
    data = "".join(f"{text}\n" for text in texts).encode()
    offsets = np.append(0, np.cumsum([len(text.encode()) + 1 for text in texts])).astype(np.int64)
    ours = tokenizer.encode(data, offsets, sentences=False)
    theirs = tokenizer._encode_by_library(data, offsets, sentences=False)
    return not (np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.documents, theirs.documents))


def check(name: str, content: str) -> bool:
    """Prints the code points of a tokenizer whose ids differ. Returns whether there are none."""
    tokenizer = LoadedTokenizer(content)
    tokenizer.prepare()
    if not tokenizer.engine:
        print(f"{name}: no engine, {tokenizer.why_slow}")
        return True
    points, found = code_points(), []
    for neighbour in NEIGHBOURS:
        texts = [f"a{neighbour}{c}b {c}{neighbour} " for c in points]
        joined = ["".join(texts[k : k + CHUNK]) for k in range(0, len(texts), CHUNK)]
        if differ(tokenizer, joined):
            found += [
                (f"U+{ord(c):04X}", neighbour)
                for c, text in zip(points, texts, strict=True)
                if differ(tokenizer, [text])
            ]
    print(f"{name}: {len(points)} code points × {len(NEIGHBOURS)} neighbours, {len(found)} differ {found[:20]}")
    return not found


if __name__ == "__main__":
    contents = {path: Path(path).read_text(encoding="utf-8") for path in sys.argv[1:]}
    contents = contents or {name: tokenizer_of(normalizer) for name, normalizer in NORMALIZERS.items()}
    sys.exit(not all([check(name, content) for name, content in contents.items()]))  # noqa: C419  (all are wanted)
