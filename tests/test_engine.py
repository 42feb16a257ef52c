"""Our engines give the ids that the `tokenizers` library gives, whatever the text, the tokenizer and the history."""

import itertools
import json
import random
import sys
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import any_tokenizer
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.commands import refuses
from support.data import SPECIALS, joined, plain, word_list
from support.families import fast
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bertdata.errors import FailedTextError
from bertdata.tokenize import engine
from bertdata.tokenize.kernels import records
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.tokenize.tokenizer import LoadedTokenizer as Tokenizer

FLAGS = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
EVERY_FLAG = [
    dict(zip(FLAGS, values, strict=True))
    for values in itertools.product((True, False), (True, False), (None, True, False), (True, False))
]
LETTERS = "abcdefghijklmnoprstuvwxyABCDEFGHITX0123456789"  # neither q nor z
VOCABULARY = [*SPECIALS, *LETTERS, *("##" + c for c in LETTERS), *"#.,-|=`", *word_list("bert")]
VOCABULARY += ["a" * 63, "a" * 64, "##" + "a" * 64, "a" * 101]
ODD, MARKS = "".join(word_list("odd")), "".join(word_list("marks"))
PIECES = st.one_of(
    st.text(max_size=6),
    st.text(ODD, max_size=5),
    st.text(MARKS + " ", max_size=6),
    st.sampled_from(VOCABULARY),
    st.text(" \n\t\r.,'-|#", min_size=1, max_size=3),
    st.characters(min_codepoint=0x80, max_codepoint=0x2FFFF),
)
TEXTS = st.lists(
    st.lists(PIECES, max_size=14).map("".join) | st.text(MARKS + "a b\n水", max_size=60), min_size=1, max_size=6
)


def random_texts(seed, count):
    """Texts of a hundred words and spaces."""
    return [any_tokenizer.nasty_text(random.Random(f"{seed} {number}"), 100) for number in range(count)]


def load(vocabulary, *, special=SPECIALS, roles=None, edit=lambda content: None, flags=None, **model):
    """A WordPiece tokenizer. edit: changes its JSON."""
    if not isinstance(vocabulary, dict):
        vocabulary = {token: number for number, token in enumerate(vocabulary)}
    model = {"unk_token": "[UNK]", "max_input_chars_per_word": 100} | model
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, **model))
    tokenizer.normalizer = normalizers.BertNormalizer(**(flags or {}))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in special if token in vocabulary])
    content = json.loads(tokenizer.to_str())
    edit(content)
    return Tokenizer(json.dumps(content), roles)


def by_engine(tokenizer, data, offsets, **options):
    assert tokenizer.engine.name
    with mock.patch.object(tokenizer, "_encode_by_library", side_effect=AssertionError("not by the engine")):
        return tokenizer.encode(data, offsets, **options)


def by_either(tokenizer, data, offsets, **options):
    return tokenizer.encode(data, offsets, **options)


def check(tokenizer, texts, *said, encode=by_engine):
    check_part(tokenizer, *joined(texts), *said, encode=encode)


def check_part(tokenizer, data, offsets, *said, encode=by_engine):
    for sentences in (False, True):
        expected = tokenizer._encode_by_library(data, offsets, sentences=sentences)
        assert plain(encode(tokenizer, data, offsets, sentences=sentences)) == plain(expected), (sentences, *said)


@pytest.fixture(scope="module")
def every_kind():
    """A tokenizer for each choice of flags, all of one vocabulary."""
    return [(flags, load(VOCABULARY, flags=flags)) for flags in EVERY_FLAG]


@pytest.fixture(scope="module")
def uncased(bert):
    return load_tokenizer(str(bert))


# -------------------------------------------------------------------------------------------------------------- texts


@settings(max_examples=10)
@given(TEXTS)
@example(["\u302e\U0001d165\u0334\u0345\u0301", "a\u302e\U0001d165b \u0345a\u0334"])
@example(["", "", "\n", " ", "\0", "\u0301", "\n\u302e\U0001d165\n\u302e\n\na"])
@example(["水\u302ea\u0301水水", "≠\u302e\U0001d165=\u0338", "a\0b\x01\xadc", "İstanbul ΑΣ ß"])
@example([bytes(range(256)).decode("utf-8", "replace"), "", "\n\n", "", " \n\t", "\0"])
@example([])
@example([""])
@example(["\n"])
@example(["a" * 63 + ".", "a" * 64, "a" * 65 + "é", "é" * 32, "b" * 100, "b" * 101])
def test_ids_are_those_of_the_library_for_every_choice_of_flags(every_kind, texts):
    for flags, tokenizer in every_kind:
        check(tokenizer, texts, flags)


@pytest.mark.parametrize("strip", [True, False])
def test_marks_in_a_row_are_put_in_the_order_of_the_library(strip):
    tokenizer = load(VOCABULARY, flags={"strip_accents": strip, "lowercase": False})
    points = [chr(point) for point in range(0x20000)]  # no mark is beyond
    marks = [c for c in points if unicodedata.combining(c)]
    marks += [c for c in points if unicodedata.combining(unicodedata.normalize("NFD", c)[-1])][::7]
    others = "\u0301\u0334\u0345\u302e\U0001d165\U0001d15e\u0f73\u034f水\0"
    for k, other in enumerate(others):
        some = " ".join(f"a{c}{other}b {other}{c} {c}{other}\u302e" for c in marks[k % 2 :: 2])
        check(tokenizer, [some], hex(ord(other)))


def test_only_the_documents_of_the_offsets_are_encoded(every_kind):
    texts = ["before\nit", "", "the \u302e\n\nriver\n", "水 a", "x", "\n", "after " * 30]
    data, offsets = joined(texts)
    for _, tokenizer in every_kind[::9]:
        for first, last in itertools.combinations(range(len(texts) + 1), 2):
            part = offsets[first : last + 1]
            check_part(tokenizer, bytearray(data), part, first, last)


def test_a_text_that_lies_at_the_very_end_of_its_memory(uncased):
    """The kernel reads words of 8 and 64 bytes."""
    run, read = engine.encode_words, []

    def checked(text, *more):
        stop = text.stops.max(initial=0)
        assert text.data.size >= stop + records.PADDING
        read.append(stop)
        return run(text, *more)

    with mock.patch.object(engine, "encode_words", checked):
        for length in range(130):
            for end in ("", "é", "水", "\U0001f600")[length % 2 :: 2]:
                check(uncased, ["a" * length + end])
    assert max(read) > 130


# --------------------------------------------------------------------------------------------------------- tokenizers


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
    tokenizer = load(
        vocabulary, flags=flags, unk_token=unk, continuing_subword_prefix=prefix, max_input_chars_per_word=longest
    )
    check(tokenizer, texts, encode=by_engine if unk in SPECIALS else by_either)


@pytest.mark.parametrize("longest", fast([0, 1, 8, 17, 100, 5000, 2**64 - 1], among=[0, 17, 5000]))
def test_words_too_long_are_unknown(longest):
    def edit(content):
        content["model"]["max_input_chars_per_word"] = longest

    tokenizer = load(VOCABULARY, edit=edit)
    short, long = [1, 2, 7, 8, 9, 16, 17, 18, 99, 100, 101, 102], [4080, 4081, 4097, 5001]
    texts = [f"{some * length}. {some * length} b" for length in short for some in ("a", "é", "ß", "가", "\U0001f600")]
    texts += [f"x{'a' * length} b" for length in long]  # of pieces of a hundred letters:
    if longest <= 100:  # where words have many pieces, the library takes the cube of their number
        texts += [f"{some * length}. {'ab' * length}" for length in long for some in ("é", "ab", "x\u302e", "b\u0301")]
    check(tokenizer, texts)
    for text in texts[-4:]:
        check(tokenizer, [text])


PLACES = [(0, "[UNK]"), (1, "a"), (60, "##a"), (65_535, "水"), (65_536, "[SEP]"), (2**20 - 1, "nothing at all")]


@pytest.mark.parametrize(("place", "unk"), PLACES)
def test_the_unknown_token_may_be_anything_anywhere(place, unk):
    words = [token for token in [*VOCABULARY, "nothing at all"] if token != unk]
    vocabulary = {token: number + (number >= place) for number, token in enumerate(words)} | {unk: place}
    tokenizer = load(vocabulary, unk_token=unk)
    check(tokenizer, ["a aa 水 zz zebra, \u0301 éq q水q \u302e", "[UNK] [SEP] nothing at all", *random_texts(4, 2)])


@pytest.mark.parametrize(
    ("special", "separator"),
    [(["[SEP]", "[UNK]"], 0), (["[UNK]"], None), (["</s>", "[UNK]"], 0), (["[UNK]", "<s>", "</s>"], 2)],
)
def test_separators_of_every_kind(special, separator):
    tokenizer = load([*special, *VOCABULARY[len(SPECIALS) :]], special=special)
    assert tokenizer.special.separator == separator
    check(tokenizer, ["a", "", "\n\na\n水\n\n\u302e\n", "", "</s> <s>", "\n", "the"])
    check(tokenizer, [""])


def test_an_unknown_token_named_beside_the_tokenizer_is_not_the_models():
    """Then the model's is a special token like others, which text must not give."""
    tokenizer = load(VOCABULARY, roles={"unk": "[MASK]"})
    check(tokenizer, ["a zz 水 q", "b"], encode=by_either)


WORDS_AS_TOKENS = word_list("special")


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(WORDS_AS_TOKENS), min_size=1, max_size=2, unique=True),
    st.sampled_from(EVERY_FLAG),
    st.booleans(),
)
@example(["##pad", "水"], EVERY_FLAG[0], True)
@example(["[", "##]"], EVERY_FLAG[0], False)
def test_special_tokens_that_text_spells_are_replaced_and_counted(special, flags, by_role):
    roles, more = ({"mask": special[0]}, special[1:]) if by_role else (None, special)
    vocabulary = list(dict.fromkeys([*VOCABULARY, *WORDS_AS_TOKENS]))
    tokenizer = load(vocabulary, special=[*SPECIALS, *more], roles=roles, flags=flags)
    texts = [" ".join(WORDS_AS_TOKENS), "a".join(WORDS_AS_TOKENS), "apad 水水 火水 x7 [水] ##", *random_texts(3, 1)]
    check(tokenizer, texts, encode=by_either)


# ------------------------------------------------------------------------------------------------------------- tables


def test_a_run_that_the_library_fails_on_is_named_by_its_document():
    tokenizer, marks = load(VOCABULARY), "\u302e\U0001d165"  # which NFD sorts

    def fail(library, texts):
        error = FailedTextError("it fails", "tokenizer-failed")
        error.documents = (texts.index(f"bb{marks}"),)
        raise error

    with mock.patch.object(engine, "ids_by", fail), refuses("tokenizer-failed", says="document 2: "):
        by_engine(tokenizer, *joined(["a", f"a{marks} b", f"b bb{marks}", f"bb{marks}"]), sentences=False)


SCRIPTS = ["абвгд жизнь", "ελληνικά", "עברית", "العربية", "हिन्दी", "ไทย", "한국어", "日本語 カナ", "ქართული", "ትግርኛ"]


@pytest.mark.parametrize(("near", "far"), [(128, 32), (engine.NEAR_LINES, engine.FAR_LINES)])
def test_threads_that_begin_together_give_exact_ids(limit, near, far):
    """Four with a new engine, which knows no page but the first, each with the texts in another order."""
    limit(near_lines=near, far_lines=far)
    vocabulary = list(dict.fromkeys([*VOCABULARY, *(c for text in SCRIPTS for c in text if c != " ")]))
    texts = [[text * 3, f"x{text}y", text[::-1], *random_texts(seed, 2)] for seed, text in enumerate(SCRIPTS)]
    blocks = [joined(some) for some in texts]
    expected = [plain(load(vocabulary)._encode_by_library(*some, sentences=True)) for some in blocks]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for turn in range(3):
            tokenizer, together = load(vocabulary), threading.Barrier(4)

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
    tokenizer = load(VOCABULARY)
    mine = tokenizer.engine._local.tables
    with ThreadPoolExecutor(1) as pool:
        pool.submit(by_engine, tokenizer, *joined(SCRIPTS), sentences=False).result()
        theirs = pool.submit(lambda: tokenizer.engine._local.tables).result()
    assert theirs.points[ord("ж"), 0] != 0 == mine.points[ord("ж"), 0]
    shared = [array for a in mine for array in theirs if isinstance(a, np.ndarray) and np.may_share_memory(a, array)]
    shared += tokenizer.engine.words._pages.values()
    assert len(shared) > 10
    assert not any(array.flags.writeable for array in shared)
