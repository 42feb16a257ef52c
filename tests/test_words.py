"""The engine for words gives the ids of the `tokenizers` library, whatever the text and the kind of tokenizer."""

import itertools
import json
import re
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference.merges import merged
from support.commands import refuses
from support.data import as_kernel, code_points, ids_of, joined, make_text, plain, word_list
from support.families import fast
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from bertdata.errors import TokenizerError
from bertdata.tokenize import engine
from bertdata.tokenize.cutting import GPT2_RULE, LLAMA3_RULE
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.begins import find_words
from bertdata.tokenize.kernels.merges import add_pairs, merge
from bertdata.tokenize.kernels.splits import cut_word
from bertdata.tokenize.models import BYTE_LETTERS, model_tables, trie_of
from bertdata.tokenize.rules import CLASSES, Rules, Unsupported, parse
from bertdata.tokenize.tokenizer import TOKENIZER
from bertdata.tokenize.tokenizer import LoadedTokenizer as Ours

cut_word, find_words, merge = map(as_kernel, (cut_word, find_words, merge))

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


def json_of(model, pre_tokenizer, normalizer=None, *, texts=(), edit=None, **options):
    """The JSON of a tokenizer, which is trained if there are texts. options: of the trainer, edit: changes the JSON."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    if texts:
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(show_progress=False, **options))
    else:
        tokenizer.add_special_tokens(options["special_tokens"])
    content = json.loads(tokenizer.to_str())
    if edit:
        edit(content)
    return content


def byte_level(pre_tokenizer, normalizer=None, *, edit=None, **suffix):
    options = {"vocab_size": 700, "special_tokens": ["<|endoftext|>"], "initial_alphabet": BYTE_LETTERS, **suffix}
    content = json_of(models.BPE(**suffix), pre_tokenizer, normalizer, texts=[TEXT], **options)
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
    content["added_tokens"][0]["id"] = content["model"]["vocab"]["<|endoftext|>"]


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
    content = json_of(model, META, texts=TEXT.splitlines(), vocab_size=900, special_tokens=special)
    content["added_tokens"] = content["added_tokens"][:3]
    content["normalizer"], content["pre_tokenizer"] = normalizer, pre_tokenizer
    with_added(*added, normalized=False)(content)
    return content


def unigram(normalizer, pre_tokenizer, *, fallback=False, added=()):
    words = word_list("unigram") + sorted(set(re.sub(r"[\s水ß]", "", TEXT)))
    scores = {word: -2.0 - 0.25 * (number % 7) for number, word in enumerate(words)}
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), *((token, -9.0) for token in BYTES * fallback), *scores.items()]
    model, edit = models.Unigram(vocabulary, 0, byte_fallback=fallback), with_added(*added, normalized=False)
    return json_of(model, pre_tokenizer, normalizer, special_tokens=["<s>", "</s>", "<unk>"], edit=edit)


def wordpiece(normalizer, pre_tokenizer, *, model=models.WordPiece, edit=None):
    letters = sorted(set(re.sub(r"\s", "", TEXT.lower())) - {"z"})
    words = dict.fromkeys([*word_list("wordpiece"), *letters, *("##" + c for c in letters)])
    made = model({token: number for number, token in enumerate(words)}, unk_token="[UNK]")
    return json_of(made, pre_tokenizer, normalizer, special_tokens=["[UNK]", "[MASK]"], edit=edit)


def characters():
    options = {"vocab_size": 300, "special_tokens": ["[UNK]"], "limit_alphabet": 40}
    content = json_of(models.BPE(unk_token="[UNK]"), pre_tokenizers.Whitespace(), texts=[TEXT], **options)
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
    "WordPiece at spaces": lambda: wordpiece(BERT, SPLIT),
    "BERT of normal forms": lambda: wordpiece(in_turn(BERT, NFKC), pre_tokenizers.BertPreTokenizer()),
    "BERT as it is": lambda: wordpiece(normalizers.BertNormalizer(False, False, True, False), SPLIT),
    "WordPiece by GPT-2's rule": lambda: wordpiece(None, *isolated(GPT2_RULE)),
    "WordPiece, two rules": lambda: wordpiece(None, pre_tokenizers.Sequence([SPLIT, pre_tokenizers.Punctuation()])),
    "WordLevel": lambda: wordpiece(normalizers.NFD(), pre_tokenizers.BertPreTokenizer(), model=models.WordLevel),
    "characters": characters,
    "words added to BERT's": lambda: wordpiece(
        normalizers.BertNormalizer(lowercase=False),
        pre_tokenizers.BertPreTokenizer(),
        edit=with_added("01.52", "англ.", "иййо", "river bank", "1a", normalized=True),
    ),
}

PIECES = [*word_list("words"), "river" * 2, "x" * 63, "x" * 65, "-" * 5, PREFIX, PREFIX[:-3]]
TEXTS = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


@pytest.fixture(scope="module")
def kinds():
    """name → a tokenizer, made when it is first asked for."""
    made = {}

    def get(name):
        if name not in made:
            tokenizer = Ours(json.dumps(KINDS[name]()))
            assert tokenizer.engine.name, (name, tokenizer.engine.why_slow)
            made[name] = tokenizer
        return made[name]

    return get


def assert_exact(tokenizer, texts, *, sentences=False):
    ways = tokenizer.encode, tokenizer._encode_by_library
    try:
        ours, theirs = (plain(way(*joined(texts), sentences=sentences)) for way in ways)
    except TokenizerError as error:  # a special token in the text, and no unknown one
        if error.kind != "tokenizer-lacks-token":
            raise
        for way in ways:
            with refuses("tokenizer-lacks-token", "tokenizer", error=TokenizerError):
                way(*joined(texts), sentences=sentences)
        return
    assert ours == theirs


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
@example(texts=["\u0301\U00017307\n\nx", "=\u0338\n\ni", ".\u200d", "\u0f73\u2581", "\x1f"], sentences=True)
def test_ids_are_those_of_the_library(kinds, name, texts, sentences):
    assert_exact(kinds(name), texts, sentences=sentences)


def test_a_code_point_met_for_the_first_time_behind_what_begins_a_text():
    content = json.dumps(unigram(in_turn(STRIP, normalizers.Replace("q", "")), META))
    # the kernel stops there, asks, and goes on
    for text in ("q\u2003a\u6c34", "q\x85a\u6c34", " q \u6c34 ", "q\x85e\u0301"):
        tokenizer = Ours(content)
        assert_exact(tokenizer, [text, "x", text])
        assert tokenizer.engine.name


@pytest.mark.parametrize("name", ["T5", "XLM-R"])
def test_marks_of_a_newer_unicode_go_with_the_letter_before(kinds, name):
    marks = ["\u1acf", "\u1ae0", "\u1aeb", "\U00010efa", "\U00011b60", "\U0001e6e3"]
    prefixed = [f"{mark}\u00a0a" for mark in ["\u0600", "\U00011a3a"]]
    assert_exact(kinds(name), [f"a{c}{mark} b" for c in ["\u00a0", "½", "ﬁ", "\u00ad"] for mark in marks] + prefixed)


@pytest.mark.parametrize("name", fast(KINDS, among=["WordPiece at spaces", "BERT as it is"]))
def test_code_points_alone_and_among_others(kinds, name):
    points = code_points()
    if len(points) < 1 << 17:  # an eighth, another one for each kind
        points = points[list(KINDS).index(name) % 8 :: 8]
    texts = ["".join(f"{c} {c}a1{c}" for c in points[k : k + 4096]) for k in range(0, len(points), 4096)]
    texts += ["".join(f"e{c}\u0301 `{c}` \u0600{c}" for c in points[k : k + 4096]) for k in range(0, len(points), 4096)]
    assert_exact(kinds(name), texts)


BY_RULE = "WordPiece by GPT-2's rule"
LONG = ["GPT-2", "OLMo", "Llama 2", "T5", "XLM-R", "StarCoder", "WordPiece at spaces", BY_RULE, "CLIP"]


@pytest.mark.parametrize("name", fast(LONG, among=["OLMo", "Llama 2", "T5", "WordPiece at spaces", BY_RULE]))
def test_words_of_any_length(kinds, name):
    tokenizer = kinds(name)
    longest = 1 << 16 if name == BY_RULE else 5000
    for length in (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 63, 64, 65, 300, 4079, 4080, 4081, longest):
        texts = [f"{c * length} {c * length}e\u0301 b{c * length}." for c in ("a", "é", "水", "ab", " ")]
        assert_exact(tokenizer, [text + " x" for text in texts])


def test_words_that_do_not_fit_the_tables(kinds, limit):
    limit(near_lines=8, far_lines=8, pooled_ids=64, spelled_bytes=256, stable_slots=8)
    for name in ("GPT-2", "OLMo", "T5", "WordPiece at spaces"):
        small = Ours(kinds(name).files[TOKENIZER].decode())
        for length in (1, 8, 16, 17, 65, 300):
            words = [chr(97 + (k * length) % 26) * length + "\u0323\u0301"[: k % 3] for k in range(40)]
            assert_exact(small, [" ".join(words), " ".join(words[::-1])])


@given(
    pairs=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), unique=True, max_size=40),
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=80),
)
@example(pairs=[(0, 0), (1, 0)], ids=[0] * 33)
def test_merges(pairs, ids):
    merges = {rank: (left, right, 6 + rank % 6) for rank, (left, right) in enumerate(pairs)}
    table, results = np.full(128, records.EMPTY), np.array([each for _, _, each in merges.values()], np.int32)
    add_pairs(*np.array([*pairs], np.int64).reshape(-1, 2).T.copy(), np.arange(len(pairs)), table)
    tables = namedtuple("Tables", ["pairs", "merged"])(table, results)
    found = np.array(ids)
    ranks = np.full(found.size + 1, -7)
    assert found[: merge(found.size, tables.pairs, tables.merged, found, ranks)[0]].tolist() == merged(ids, merges)
    assert ranks[-1] == -7  # it is no place of its own


def bpe_of(choices):
    """The JSON of a BPE model of all bytes, and its vocabulary. Each pair of numbers chooses two tokens to merge."""
    tokens, merges = [*"abc"], {}
    for left, right in choices:
        pair = tokens[left % len(tokens)], tokens[right % len(tokens)]
        if pair not in merges and len("".join(pair)) <= 12:
            merges[pair] = None
            tokens.append("".join(pair))
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*reversed(tokens), *BYTE_LETTERS]))}
    return {"type": "BPE", "vocab": vocabulary, "merges": [*merges]}, vocabulary


def merged_bytes(word, model, vocabulary):
    ranks = {pair: rank for rank, pair in enumerate(model["merges"])}
    merges = {rank: (*(vocabulary[part] for part in pair), vocabulary["".join(pair)]) for pair, rank in ranks.items()}
    return merged([vocabulary[letter] for letter in word], merges)


def cut(word, model, vocabulary):
    """The ids of a word, None if the kernel leaves it to merging."""
    fields = model_tables(model, vocabulary, byte_level=True)
    chain, dead = np.zeros(len(word) + 1, np.int64), np.zeros(len(word) // 64 + 1, np.uint64)
    spelled = bytes(map(BYTE_LETTERS.index, word))
    text = np.frombuffer(spelled + b"a", np.uint8)  # the letter after the word does not count
    tables = {name: fields[name] for name in ("trie", "symbols", "pairs")}
    count = cut_word(text, len(word), namedtuple("Tables", tables)(**tables), chain, dead)
    return fields["symbol_ids"][chain[:count]].tolist() if count else None


WORDS_OF_ABC = st.text("abc", min_size=1, max_size=20) | st.text("ab", min_size=60, max_size=140)
CHOICES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=40)


@settings(max_examples=10 * settings().max_examples)
@given(choices=CHOICES, word=WORDS_OF_ABC, order=st.none() | st.randoms(use_true_random=False))
@example(choices=[(0, 0), (3, 0), (3, 3)], word="aaaaaaa", order=None)
@example(choices=[(0, 1), (1, 2), (3, 2), (0, 4)], word="abcabcbc", order=None)
def test_words_are_cut_where_merging_leaves_them_apart_or_left_to_merging(choices, word, order):
    model, vocabulary = bpe_of(choices)
    if order:
        order.shuffle(model["merges"])
    found, expected = cut(word, model, vocabulary), merged_bytes(word, model, vocabulary)
    made = {vocabulary["".join(pair)] for pair in model["merges"]}
    assert found == expected or (found is None and not made.isdisjoint(expected))


def test_no_word_is_left_to_merging_if_tokens_are_made_in_order(kinds):
    model = json.loads(kinds("GPT-2").files[TOKENIZER])["model"]
    for word in {"".join(BYTE_LETTERS[byte] for byte in word.encode()) for word in TEXT.split()}:
        expected = merged_bytes(word, model | {"merges": [*map(tuple, model["merges"])]}, model["vocab"])
        assert cut(word, model, model["vocab"]) == expected


SPELLINGS = st.tuples(st.binary(min_size=1, max_size=6) | st.text("ab", min_size=1).map(str.encode), st.integers(0, 1))


def in_trie(trie, spelling, root):
    """The id of a token, -1 if the trie does not have it."""
    entry = int(trie[root])
    for byte in spelling:
        child = int(trie[(entry >> 16 & 0xFFFFFF) ^ byte])
        if child & 0x1FF != byte:
            return -1
        entry = child
    return (entry >> 40) - 1


@given(tokens=st.lists(SPELLINGS, max_size=60), others=st.lists(SPELLINGS, max_size=20))
@example(tokens=[(bytes([a, b]), 0) for a in range(256) for b in range(0, 256, 51)], others=[(b"a", 0)])
def test_a_trie_holds_its_tokens_and_no_others(tokens, others):
    ids = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    trie = trie_of(*({spelling: n for (spelling, r), n in ids.items() if r == root} for root in (0, 1)))
    for spelling, root in [*tokens, *others]:
        for end in range(1, len(spelling) + 1):
            assert in_trie(trie, spelling[:end], root) == ids.get((spelling[:end], root), -1)


@pytest.mark.parametrize("vocab_size", [65_536, 65_537, 300_000])
def test_large_vocabularies(vocab_size):
    content = byte_level(bytes_of(regex=True), edit=ignoring_merges)
    numbers = range(vocab_size - 300, vocab_size)
    content["model"]["vocab"] |= {f"Ġ{number}": number for number in numbers}
    tokenizer = Ours(json.dumps(content))
    assert tokenizer.token_dtype == ("<u2" if vocab_size <= 1 << 16 else "<u4")
    texts = [" " + " ".join(map(str, numbers)), f" {vocab_size - 1}"]
    assert_exact(tokenizer, [*texts, TEXT])
    assert tokenizer.engine.name
    assert ids_of(tokenizer, texts) == [[*numbers], [vocab_size - 1]]


@pytest.mark.parametrize(
    ("largest", "refusal"),
    [
        ((1 << 20) - 2, None),
        ((1 << 20) - 1, "its vocabulary has the id 1,048,575"),
        (1 << 20, "its vocabulary has ids of 1,048,576 or more"),
    ],
)
def test_ids_too_large_are_left_to_the_library(largest, refusal):
    content = byte_level(bytes_of(regex=True))
    content["model"]["vocab"]["q"] = largest
    tokenizer = Ours(json.dumps(content))
    assert_exact(tokenizer, [TEXT, "qq q"])
    assert tokenizer.engine.why_slow == refusal


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
    tokenizer = Ours(json.dumps(content()))
    assert tokenizer.engine.name is None
    assert tokenizer.engine.why_slow
    theirs = tokenizer.library.encode("the river", add_special_tokens=False).ids
    if not json.loads(tokenizer.files[TOKENIZER])["model"].get("dropout"):
        assert ids_of(tokenizer, ["the river"]) == [theirs]


def test_a_text_that_needs_too_many_classes_of_characters_is_left_to_the_library(kinds, limit):
    tokenizer = Ours(kinds("GPT-2 in lower case").files[TOKENIZER].decode())
    assert_exact(tokenizer, [TEXT])
    limit(classes=4)
    assert_exact(tokenizer, [TEXT, "\u1e00\u4e00"])
    assert tokenizer.engine.name is None
    assert tokenizer.engine.why_slow == "its regular expression tells too many classes of characters apart"
    assert_exact(tokenizer, [TEXT])


# -------------------------------------------------------------------------------------------------------------- rules


def splits(rules, text):
    """The words of a text by the table of a rule, with the obvious loop. Text between words is left out."""
    keys = [(matches, 0) for matches in rules.matches(text)]
    classes = rules.classes(keys) if keys else []
    steps, words, start = rules.steps.reshape(-1, CLASSES), [], 0
    while start < len(text):
        state, stop = int(rules.starts[0]), None
        for place in range(start, len(text) + 1):
            step = int(steps[state, classes[place] if place < len(text) else 0])
            if step & int(records.ENDED):
                stop = place
            state = step & int(records.STATES)
            if state == 0:
                break
        if stop is None:
            start += 1
        else:
            words.append((start, stop))
            start = stop
    return words


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
@given(PATTERNS, st.lists(st.text("abAB \n水", max_size=14), min_size=1, max_size=4))
@example(GPT2_RULE, ["it's  a  \n b", "don't   "])
@example(LLAMA3_RULE, ["it'S  a \n\n b12345", "a\r\n  \n c  "])
def test_rules_find_what_the_library_finds(pattern, texts):
    try:
        rules = Rules([parse(pattern)])
    except Unsupported:
        return
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    for text in texts:
        theirs = [place for word, place in split.pre_tokenize_str(text) if word]
        assert splits(rules, text) == theirs, (pattern, text)


@given(st.text("ab \n'", max_size=8), st.text("ab \n'", max_size=8))
def test_text_can_be_cut_where_the_rules_say(before, after):
    """Where the table says so, the words of a text are those of its two halves."""
    rules = Rules([parse(GPT2_RULE)])
    text = before + after
    classes = rules.classes([(matches, 0) for matches in rules.matches(text)]) if text else []
    for place in range(1, len(text)):
        if rules.cuts[classes[place - 1] * CLASSES + classes[place]]:
            halves = splits(rules, text[:place]) + [(a + place, b + place) for a, b in splits(rules, text[place:])]
            assert splits(rules, text) == halves


# -------------------------------------------------------------------------------- rules that need no automaton

# A character of each kind that these rules tell apart, of one byte and of several
CHARACTERS = [*"astremdlvS'! \n\r\t17", "é", "²", "€", "\u00a0", "\u3000", "ſ", "🙂", "\0"]


@pytest.fixture(scope="module", params=["GPT-2", "cl100k"])
def ends_of_words(request, kinds):
    """Text → the places at which words end, by the kernel and by the automaton of its rule.

    Those that the kernel leaves to the automaton are taken from it.
    """
    made = kinds(request.param).engine.words
    rules = Rules([parse(GPT2_RULE if request.param == "GPT-2" else LLAMA3_RULE)])
    tables, runs = made.with_page(0), engine.new_runs(engine.NEAR_LINES)

    def both(text):
        sizes = np.append(0, np.cumsum([len(character.encode()) for character in text])).tolist()
        by_automaton = [sizes[stop] for _, stop in splits(rules, text)]
        data = np.frombuffer(text.encode() + bytes(records.PADDING), np.uint8).copy()
        end, i, ends, state = sizes[-1], 0, [], np.zeros(records.NUM_STATES, np.int64)
        while i < end:
            count, slow_stop = find_words(data, i, end, tables, runs, state)
            if count < 0:
                made.with_page(int(state[records.CODE_POINT]) // engine.PAGE, tables)
                continue
            ends += [i + place for place in runs.places[:count].tolist()]
            i = ends[-1] if count else i
            while i < slow_stop:
                i = next(place for place in by_automaton if place > i)
                ends.append(i)
        return ends, by_automaton

    return both


@pytest.mark.parametrize(
    ("number", "before"),
    [(2, 0), (2, 61), (2, 62), (2, 63), *(pytest.param(3, at, marks=pytest.mark.slow) for at in (0, 62))],
)
def test_characters_of_any_kinds_are_cut_as_by_the_automaton(ends_of_words, number, before):
    """All pairs, and all triples, also across two blocks of 64 bytes."""
    for characters in itertools.product(CHARACTERS, repeat=number):
        text = ("!\n" * 32)[:before] + "".join(characters) + "a"
        by_kernel, by_automaton = ends_of_words(text)
        assert by_kernel == by_automaton, text


CHOSEN = st.lists(st.sampled_from([*CHARACTERS, "'s", "'LL", "'ve", "  ", "\n\n", "12", "a" * 60]), max_size=90)


@settings(max_examples=4 * settings().max_examples)
@given(CHOSEN.map("".join))
@example("a" * 3000 + " b" + "c" * 1021)
@example("'" * 62 + "'ſs" + " 'll")
def test_any_text_is_cut_as_by_the_automaton(ends_of_words, text):
    by_kernel, by_automaton = ends_of_words(text)
    assert by_kernel == by_automaton


@pytest.mark.parametrize("name", ["GPT-2", "Llama 3"])
def test_a_word_with_a_zero_byte_may_end_in_the_next_window(kinds, name):
    words = ["a b ", "\0", "'s\0", " !\0\0", "\0a"]
    sizes = range(records.WINDOW - 70, records.WINDOW + 4)
    assert_exact(kinds(name), ["ab" * (size // 2) + "1" * (size % 2) + word + " b" for size in sizes for word in words])


def test_special_ids_are_counted_in_pieces_of_either_kind():
    """Those that are their own normal form, and others."""
    tokenizer = Ours(json.dumps(KINDS["OLMo"]()), {"unk": "<|endoftext|>", "mask": "Ġriver"})
    texts = ["a river", "cafe\u0301 river"]
    assert_exact(tokenizer, texts)
    assert tokenizer.encode(*joined(texts), sentences=False).special_ids_replaced == 2


def word_level(pre_tokenizer, *words, normalizer=None, added=()):
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return json.loads(tokenizer.to_str())


def test_a_token_of_a_role_that_is_not_marked_as_special_becomes_the_unknown_token():
    ours = Ours(json.dumps(word_level(SPLIT, "a", "b", added=["[MASK]", "<tag>"])))
    found = ours.encode(*joined(["a [MASK]<tag> b"]), sentences=False)
    assert (ours.special.mask, ours.engine.name) == (3, "WordLevel")
    assert (found.ids.tolist(), found.special_ids_replaced) == ([1, 0, 4, 2], 1)


NUMBERS = isolated(r"\p{N}+")[0]
