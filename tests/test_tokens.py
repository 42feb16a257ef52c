"""Ids are exactly those of the `tokenizers` library, wherever a tokenizer comes from."""

import hashlib
import io
import json
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
import pytest
import tokenizers
from support.commands import python, refuses
from support.data import SPECIALS, build, built, byte_level_bpe, faults_of, ids_of, joined
from support.disk import put
from support.encoding import load, loaded
from support.families import fast
from support.servers import Handler, serving
from support.sources import PACK, as_jsonl, as_parquet, counting_reads
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

import bertdata
from bertdata import TextFormat
from bertdata.sources.inputs import local
from bertdata.write import vocabulary


def text_dataset(tmp_path, text, tokenizer, **options):
    """One file of this text as a dataset of one split."""
    (tmp_path / "t").write_bytes(tokenizer.files["tokenizer.json"])
    return built(tmp_path, text, tokenizer=str(tmp_path / "t"), validation=0.0, **options)


BYTE_LEVEL = byte_level_bpe(400, ["<|endoftext|>"])  # as GPT-2's


def word_level(vocabulary, roles=None, **options):
    """A tokenizer that looks whole words up, so that text can spell its special tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([token for token in vocabulary if token in SPECIALS])
    return loaded(tokenizer, roles)


# -------------------------------------------------------------------------------------------------------------- ids


def test_nothing_is_cut_or_padded_by_what_stands_in_the_file(bert):
    """The file of this model asks for rows of 128 ids, padded."""
    content = json.loads((bert / "tokenizer.json").read_bytes())
    assert None not in (content["truncation"], content["padding"])
    tokenizer, texts = load(str(bert / "tokenizer.json")), ["word " * 1000, "word"]
    stored = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"]).encode_batch(texts)
    assert [*map(len, ids_of(tokenizer, texts))] == [len(each) - 2 for each in stored] == [1000, 1]


def test_a_special_id_given_for_text_is_stored_as_unknown_and_counted(tmp_path):
    tokenizer = word_level([*SPECIALS, "hello"], unk_token="[UNK]")
    dataset = text_dataset(tmp_path, "hello [MASK] nobody\n\n[SEP] [UNK] hello", tokenizer)
    assert dataset.manifest.counts["special_ids_replaced"] == 2
    assert [document.tolist() for document in dataset] == [[5, 1, 1], [1, 1, 5]]


UNTAKEN = {  # a tokenizer, texts, which of them it can take, and the error for the others
    "special, and no unknown token": (
        lambda: word_level(["hello", "[MASK]", "you"]),
        ["hello\nyou", "[MASK] hello", "you\nhello [MASK]", "you hello"],
        [0, 3],
        ("tokenizer-lacks-token", "[MASK]"),
    ),
    "the library fails": (  # its unknown token is none of its tokens; more texts than Python may recurse
        lambda: word_level([*SPECIALS, "hello"], unk_token="<none>"),
        ["hello", "hello nobody", *["nobody"] * 1500, "hello"],
        [0, 1502],
        ("tokenizer-failed", ...),
    ),
    "too long": (  # a word of more than 4 KiB goes to the library; with --words and --sentences all of a text does
        lambda: loaded(BYTE_LEVEL),
        ["the stone", "x" * 6000, "é" * 4000, "stone " * 10, "ab" * 9000, "the river"],
        [0, 1, 3, 5],
        ("too-large", 8000),
    ),
}


@pytest.mark.parametrize("options", [{}, {"workers": 1}, {"sentences": "line"}, {"words": "builtins:list"}], ids=str)
@pytest.mark.parametrize("name", UNTAKEN)
def test_text_that_a_tokenizer_cannot_take_is_named_or_skipped(tmp_path, limit, name, options):
    make, texts, taken, (kind, given) = UNTAKEN[name]
    (tmp_path / "t.json").write_bytes(make().files["tokenizer.json"])
    path = put(tmp_path / "text", "\n\n".join(texts))
    options = {"tokenizer": str(tmp_path / "t.json"), "validation": 0, "shard_size": 30} | options
    first = next(number for number in range(len(texts)) if number not in taken)
    line = "".join(f"{text}\n\n" for text in texts[:first]).count("\n") + 1
    limit(longest_piece=7_000)
    with refuses(kind, "tokenizer", given=given, says=f"{path}, line {line}"):
        build(path, tmp_path / "out", **options)
    report = build(path, tmp_path / "skipped", on_error="skip", **options)
    expected = [make().library.encode(texts[number], add_special_tokens=False).ids for number in taken]
    assert [document.tolist() for document in report.dataset] == expected
    counts = [report.dataset.manifest.counts[each] for each in ("skipped_rows", "documents", "dropped_documents")]
    assert counts == [len(texts) - len(taken), len(taken), 0]
    assert report.first_skipped.startswith(f"{path}, line {line}: ")
    assert faults_of(report.dataset.path) == []


def test_a_tokenizer_that_is_too_large_is_named_before_it_is_read(tmp_path):
    for name, size in (("tokenizer.json", 1 << 40), ("vocab.txt", (1 << 27) + 1)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
        too_large = refuses("too-large", "tokenizer", says=" more than 128 MiB")
        with mock.patch.object(Path, "read_bytes", side_effect=AssertionError), too_large:
            load(str(tmp_path / name))


def test_a_panic_of_the_library_is_an_error_that_names_its_text_and_an_interrupt_is_not(vocab):
    """Its Rust code panics for some added tokens beside white space of several bytes."""
    marks, panic = "\u302e\U0001d165", type("PanicException", (BaseException,), {})  # which NFD sorts
    ours, nobody = load(vocab), word_level([*SPECIALS, "hello"], unk_token="<none>")
    encode = ours.library.encode_batch_fast

    def failing(error, texts, **options):
        if any(f"b{marks}" in text for text in texts):
            raise error("not a char boundary")
        return encode(texts, **options)

    named, stopped = refuses("tokenizer-failed", "tokenizer", says="document 2: "), pytest.raises(KeyboardInterrupt)
    for error, expected in ((panic, named), (KeyboardInterrupt, stopped)):
        ours.source.library = mock.Mock(wraps=ours.library, encode_batch_fast=partial(failing, error))
        with expected:
            ours.encode(*joined(["a", f"a{marks} a{marks} b", f"b b{marks}", f"b{marks}"]), sentences=False)
    long = "nobody " * 9
    begin = f"text 2: `tokenizers` fails on the text that begins with {long[:40]!r}: "
    with refuses("tokenizer-failed", "tokenizer", says=begin):
        bertdata.Tokenizer(nobody).encode_batch(["hello", "hello", long], workers=2)


# -------------------------------------------------------------------------------------------------------- where from


def test_the_special_tokens_of_esm_have_roles_where_nothing_else_has_them():
    common, esm = {"pad": 0, "unk": 1, "mask": 2}, ["<cls>", "<eos>"]
    for more, given, roles in (
        (esm, None, {"cls": 4, "sep": 5, "eos": 5}),
        (["<eos>", "<bos>"], None, {}),  # as in Gemma
        (["<cls>", "<bos>"], None, {}),
        ([*esm, "</s>"], None, {"sep": 6, "eos": 6}),
        (esm, {"cls": "A"}, {"cls": 3}),
    ):
        tokenizer = word_level(["<pad>", "<unk>", "<mask>", "A", *more], given, unk_token="<unk>")
        assert tokenizer.special.roles() == common | roles


def test_the_unknown_token_of_unigram_has_any_name():
    assert loaded(tokenizers.Tokenizer(models.Unigram([("a", -1.0), ("<no>", 0.0)], 1))).special.roles() == {"unk": 1}


@pytest.mark.parametrize("vocabulary", [{}, {"[UNK]": 0, "a": 1 << 24}, {"[UNK]": 0, "a": (1 << 32) - 1}])
def test_a_vocabulary_that_is_empty_or_has_an_id_that_is_never_stored_is_refused(vocabulary):
    says = f"the id {1 << 24}, and ids up to {(1 << 24) - 1} can " if vocabulary.get("a") == 1 << 24 else "is empty"
    with refuses("tokenizer-unreadable", "tokenizer", says=says):
        loaded(tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")))
    loaded(tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": (1 << 24) - 1}, unk_token="[UNK]")))


@pytest.mark.parametrize("spec", ["./no", "/no/such", "no.json", "no/vocab.txt", "a/b/c", "no/", "a/no/", "x" * 5000])
def test_a_path_that_does_not_exist_is_not_looked_up(spec):
    known = {"kind": "tokenizer-not-found", "says": "does not exist"} if len(spec) < 100 else {"kind": "unreadable"}
    with refuses(**known, option="tokenizer"):
        load(spec)


FROM_HUB = """
import sys; sys.modules["transformers"] = None; import bertdata
for name in sys.argv[1:]:
    try: print(bertdata.Tokenizer.load(name).loaded.special.vocab_size)
    except bertdata.BertdataError as error: print(error.kind)
"""


def test_a_hub_gives_a_tokenizer_or_says_that_it_has_none(bert, tmp_path):
    """In a process without transformers: the size of the vocabulary, or the kind of the error."""
    files, asked = {name: (bert / name).read_bytes() for name in ("tokenizer.json", "config.json")}, []

    class Hub(Handler):
        def do_HEAD(self):
            asked.append(self.path)
            repository, _, name = urlsplit(self.path).path.removeprefix("/").partition("/resolve/main/")
            content = files.get(name, b"") if repository == "some-model" else b""
            headers = {"X_Repo_Commit": "a" * 40, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            if not content:
                headers["X_Error_Code"] = "EntryNotFound" if "/some-model" in self.path else "RepoNotFound"
            self.answer(200 if content else 404, content, **headers)

        do_GET = do_HEAD

    def found(*names, folder="cache", **environment):
        environment |= {"HF_HOME": str(tmp_path / folder), "HF_HUB_OFFLINE": "0", "NO_PROXY": "", "no_proxy": ""}
        return python("-c", FROM_HUB, *names, environment=environment, timeout=20).split()

    with serving(Hub) as hub:
        sizes = found("some-model", "no-such-model", "some-model", HF_ENDPOINT=f"http://{hub}")
        assert sizes == ["30522", "tokenizer-not-found", "30522"]
        assert "no-such-model" in asked[-1]  # and not some-model again: it is in the cache
        asked.clear()
        proxied = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": f"http://{hub}", "http_proxy": f"http://{hub}"}
        assert found("some-model", folder="proxied", **proxied) == ["30522"]
        assert {path.startswith("http://hub.invalid/") for path in asked} == {True}
    # The library itself would try for half a minute
    assert found("no-such-model", HF_ENDPOINT="http://127.0.0.1:9") == ["server-failed"]
    for name in ("no-such-model", "nobody/no-such-model"):  # tests are offline
        with refuses("tokenizer-not-found", "tokenizer", given=name, says="HF_HUB_OFFLINE"):
            load(name)


def test_special_tokens_that_are_missing_can_be_added(tmp_path):
    byte_level = loaded(BYTE_LEVEL)
    before, size = byte_level.special, byte_level.special.vocab_size
    assert (before.roles(), before.separator) == ({"eos": 0}, 0)
    text = "the river\tof  bread\n\n[MASK] and <|endoftext|> are text\n\n" * 20
    dataset = text_dataset(tmp_path, text, byte_level, special_tokens=True)
    special, added = dataset.special_tokens, {"pad": size, "cls": size + 1, "sep": size + 2, "mask": size + 3}
    assert (special.roles(), special.separator, special.vocab_size) == (added | {"eos": 0}, added["sep"], size + 4)
    assert dataset.manifest.counts["special_literals"] == {"<|endoftext|>": 20, "[MASK]": 20}
    texts = ["the river\tof  bread", "[MASK] and <|endoftext|> are text"]
    assert [document.tolist() for document in dataset][:2] == ids_of(byte_level, texts)
    batch = bertdata.Loader(dataset, length=16).read(np.array([0]))
    assert (batch.input_ids[0, 0], batch.input_ids[0, -1]) == (added["cls"], added["sep"])
    theirs = AutoTokenizer.from_pretrained(dataset.path)
    assert theirs.pad_token == "[PAD]"
    expected = [added["cls"], *ids_of(byte_level, ["the river "])[0], added["mask"], added["sep"]]
    assert theirs("the river [MASK]")["input_ids"] == expected
    again = load(str(dataset.path))
    assert again.files == load(str(dataset.path)).with_special_tokens().files
    assert again.engine.name


def test_special_tokens_that_are_there_are_kept(vocab):
    tokenizer = load(vocab)
    assert tokenizer.with_special_tokens() is tokenizer
    some = word_level(["[CLS]", "<s>", "</s>", "a"], unk_token="a").with_special_tokens()
    assert some.special.roles() == {"unk": 3, "cls": 0, "sep": 2, "bos": 1, "eos": 2, "pad": 4, "mask": 5}


def test_a_tokenizer_without_any_special_token(tmp_path):
    said = []
    dataset = text_dataset(tmp_path, "a b\na\n\nb b b", word_level(["a", "b"]), sentences="line", say=said.append)
    assert any("[PAD], [CLS], [SEP], [MASK]" in line for line in said)
    assert dataset.special_tokens.separator is None
    assert [document.tolist() for document in dataset] == [[0, 1, 0], [1, 1, 1]]
    assert dataset.num_tokens == 6
    assert dataset.array("train-00000", "sentences").tolist() == [0, 2, 3, 6]


# ----------------------------------------------------------------------------------------------------------- training


RANDOM = random.Random(0)
LINES = [f"line {number:06} {RANDOM.randbytes(43).hex()} " for number in range(50_000)]  # 100 bytes each


def as_lines(lines):
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.fixture
def sampled(limit):
    """The numbers of the lines that are sampled, and how many bytes were read for that.

    As if a sample were 500 kB, in stretches of 5 kB, read in blocks and pieces of 5 kB.
    """
    limit(sample_bytes=500_000, stretch_bytes=5_000, block_bytes=5_000, chunk=5_000)

    def sample(paths, **options):
        with counting_reads() as sizes:
            texts = vocabulary._sample([local(path) for path in paths], TextFormat(documents="line", **options))
        return [int(text[5:11]) for text in texts if text], sum(sizes)

    return sample


@pytest.mark.parametrize(
    ("number", "name", "options"),
    [(1, "a", {}), (2500, "a.gz", {}), (4995, "a", {}), (9000, "-", {}), (9000, "a", {"max_documents": 8000})],
)
def test_a_sample_is_all_of_little_text_or_the_beginning(sampled, tmp_path, monkeypatch, number, name, options):
    """Little text is read once. The beginning is that of a pipe, or of as many documents as are wanted."""
    content = as_lines(LINES[:number])
    path = put(tmp_path / name, PACK[name[1:]](content))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content))))
    found, num_read = sampled(["-" if name == "-" else path], **options)
    if number < 5000:
        assert (found, num_read) == ([*range(number)], len(content))
    else:
        assert found == [*range(len(found))]
        assert 5000 <= len(found) < 5200


SPREAD = {  # number of files, their ending, and what makes each
    "text": (1, "", as_lines),
    "xz": (1, ".xz", lambda lines: PACK[".xz"](as_lines(lines))),
    "JSON lines": (1, ".jsonl", as_jsonl),
    "Parquet": (1, ".parquet", lambda lines: as_parquet(lines, group=len(lines))),
    "many files": (100, ".gz", lambda lines: PACK[".gz"](as_lines(lines))),
}


@pytest.mark.parametrize("name", fast(SPREAD, among=["text", "xz", "many files"]))
def test_a_sample_of_much_text_is_spread_over_it_and_the_rest_is_not_read(sampled, tmp_path, name):
    """A tenth of all lines; of each tenth of the text, and of each of many files, about as many."""
    num_files, ending, make = SPREAD[name]
    parts = np.array_split(LINES, num_files)
    paths = [put(tmp_path / f"{number:03}{ending}", make(part.tolist())) for number, part in enumerate(parts)]
    numbers, num_read = sampled(paths)
    assert numbers == sorted(numbers)
    assert 4250 <= len(numbers) <= 5500
    assert np.histogram(numbers, bins=10, range=(0, len(LINES)))[0].min() >= 350
    if ending in ("", ".jsonl"):
        assert num_read < 2_500_000
        assert sampled(paths) == (numbers, num_read)
