"""Ids are exactly those of the `tokenizers` library, wherever a tokenizer comes from."""

import hashlib
import io
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support.commands import python, refuses
from support.data import SPECIALS, build, built, byte_level_bpe, faults_of, ids_of, joined
from support.disk import put
from support.encoding import load, loaded
from support.families import fast
from support.limits import limits
from support.servers import Handler, serving
from support.sources import PACK, counting_reads
from tokenizers import models, pre_tokenizers

import bertdata
from bertdata import Loader
from bertdata.options import TextFormat
from bertdata.sources.inputs import local
from bertdata.tokenize import engine
from bertdata.write import vocabulary


def text_dataset(tmp_path, text, tokenizer, **options):
    """One file of this text as a dataset of one split."""
    (tmp_path / "t").write_bytes(tokenizer.files["tokenizer.json"])
    return built(tmp_path, text, tokenizer=str(tmp_path / "t"), validation=0.0, **options)


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level BPE with one special token, as GPT-2 is made."""
    return loaded(byte_level_bpe(400, ["<|endoftext|>"]))


def word_level(vocabulary, **options):
    """A tokenizer that looks whole words up, so that text can spell its special tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([token for token in vocabulary if token in SPECIALS])
    return loaded(tokenizer)


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
        lambda: loaded(byte_level_bpe(400, ["<|endoftext|>"])),
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
    for name in ("tokenizer.json", "vocab.txt"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 40)
        with mock.patch.object(Path, "read_bytes", side_effect=AssertionError), refuses("too-large", "tokenizer"):
            load(str(tmp_path / name))


def test_a_panic_of_the_library_is_an_error_of_the_tokenizer_and_an_interrupt_is_not():
    """Its Rust code panics for some added tokens beside white space of several bytes."""
    ours = word_level([*SPECIALS, "hello"], unk_token="<none>")  # which no engine takes
    with refuses("tokenizer-failed", "tokenizer", says="document 1: "):
        ours.encode(*joined(["hello", "hello nobody", "nobody"]), sentences=False)
    with refuses("tokenizer-failed", "tokenizer", says="text 2: "):
        bertdata.Tokenizer(ours).encode_batch(["hello", "hello", "nobody"], workers=2)
    panic = type("PanicException", (BaseException,), {})
    failed, stopped = refuses("tokenizer-failed", "tokenizer"), pytest.raises(KeyboardInterrupt)
    for error, expected in ((panic, failed), (KeyboardInterrupt, stopped)):
        ours.source.library = mock.Mock(encode_batch_fast=mock.Mock(side_effect=error("not a char boundary")))
        with expected:
            ours.encode(*joined(["hello"]), sentences=False)


# -------------------------------------------------------------------------------------------------------- where from


@given(st.lists(st.integers(0, 40), max_size=12))
def test_the_library_gets_few_bytes_at_a_time_and_gives_all_ids(sizes):
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    watched, texts = mock.Mock(wraps=library), ["é" * (size // 3) + "a" * size for size in sizes]
    with limits(texts_together=25):
        found = engine.ids_by(watched, texts)
    assert [ids.tolist() for ids in found] == [library.encode(text).ids for text in texts]
    together = [[len(text.encode()) for text in call.args[0]] for call in watched.encode_batch_fast.call_args_list]
    assert all(sum(some) <= 25 or len(some) == 1 for some in together)


def roles_of(*vocabulary, **named):
    words = {token: number for number, token in enumerate(vocabulary)}
    return loaded(tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>")), named).special.roles()


def test_the_special_tokens_of_esm_have_roles_where_nothing_else_has_them():
    common = {"pad": 0, "unk": 1, "mask": 2}
    some = ("<pad>", "<unk>", "<mask>", "A")
    assert roles_of(*some, "<cls>", "<eos>") == common | {"cls": 4, "sep": 5, "eos": 5}
    assert roles_of(*some, "<eos>", "<bos>") == common  # as in Gemma
    assert roles_of(*some, "<cls>", "<bos>") == common
    assert roles_of(*some, "<cls>", "<eos>", "</s>") == common | {"sep": 6, "eos": 6}
    assert roles_of(*some, "<cls>", "<eos>", cls="A") == common | {"cls": 3}


@pytest.mark.parametrize("vocabulary", [{}, {"[UNK]": 0, "a": 1 << 24}, {"[UNK]": 0, "a": (1 << 32) - 1}])
def test_a_vocabulary_that_is_empty_or_has_an_id_that_is_never_stored_is_refused(vocabulary):
    with refuses("tokenizer-unreadable", "tokenizer"):
        loaded(tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")))
    loaded(tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": (1 << 24) - 1}, unk_token="[UNK]")))


@pytest.mark.parametrize("spec", ["./no", "/no/such", "no.json", "no/vocab.txt", "a/b/c", "no/", "a/no/", "x" * 5000])
def test_a_path_that_does_not_exist_is_not_looked_up(spec):
    known = {"kind": "tokenizer-not-found", "says": "does not exist"} if len(spec) < 100 else {"kind": "unreadable"}
    with refuses(**known, option="tokenizer"):
        load(spec)


@pytest.fixture
def hub(bert):
    """A hub, or a proxy in front of one, with bert-base-uncased as `some-model`: its address, and what it is asked."""
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

    with serving(Hub) as address:
        yield f"http://{address}", asked


def from_hub(*names, **environment):
    """What loading by name gives in a process of its own without transformers: vocabulary size, or kind of error."""
    program = (
        "import sys; sys.modules['transformers'] = None; from bertdata.tokenize.load import load, TokenizerError\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(load(name).special.vocab_size)\n"
        "    except TokenizerError as error: print(error.kind)"
    )
    variables = {"HF_HUB_OFFLINE": "0", "NO_PROXY": "", "no_proxy": ""} | environment
    return python("-c", program, *names, environment=variables, timeout=20).split()


def test_a_hub_gives_a_tokenizer_or_says_that_it_has_none(hub, tmp_path):
    (address, asked), names = hub, ["some-model", "no-such-model", "some-model"]
    found = from_hub(*names, HF_HOME=str(tmp_path), HF_ENDPOINT=address)
    assert found == ["30522", "tokenizer-not-found", "30522"]
    assert "no-such-model" in asked[-1]  # and not some-model again: it is in the cache
    asked.clear()
    proxied = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": address, "http_proxy": address}
    assert from_hub("some-model", HF_HOME=str(tmp_path / "proxied"), **proxied) == ["30522"]
    assert asked
    assert all(path.startswith("http://hub.invalid/") for path in asked)


def test_without_a_hub_the_answer_comes_at_once(tmp_path):
    """The library itself would try for half a minute; the process is given 20 s."""
    assert from_hub("no-such-model", HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9") == ["server-failed"]
    for name in ("no-such-model", "nobody/no-such-model"):  # tests are offline
        with refuses("tokenizer-not-found", "tokenizer", given=name, says="HF_HUB_OFFLINE"):
            load(name)


def test_special_tokens_that_are_missing_can_be_added(byte_level, tmp_path):
    from transformers import AutoTokenizer

    before, size = byte_level.special, byte_level.special.vocab_size
    assert (before.roles(), before.separator) == ({"eos": 0}, 0)
    text = "the river\tof  bread\n\n[MASK] and <|endoftext|> are text\n\n" * 20
    dataset = text_dataset(tmp_path, text, byte_level, special_tokens=True)
    added = {"pad": size, "cls": size + 1, "sep": size + 2, "mask": size + 3}
    assert dataset.special_tokens.roles() == added | {"eos": 0}
    assert dataset.special_tokens.separator == added["sep"]
    assert dataset.special_tokens.vocab_size == size + 4
    assert dataset.manifest.counts["special_literals"] == {"<|endoftext|>": 20, "[MASK]": 20}
    texts = ["the river\tof  bread", "[MASK] and <|endoftext|> are text"]
    assert [document.tolist() for document in dataset][:2] == ids_of(byte_level, texts)
    batch = Loader(dataset, length=16).read(np.array([0]))
    assert (batch.input_ids[0, 0], batch.input_ids[0, -1]) == (added["cls"], added["sep"])
    theirs = AutoTokenizer.from_pretrained(dataset.path)
    names = [theirs.pad_token, theirs.cls_token, theirs.sep_token, theirs.mask_token]
    assert names == ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    expected = [added["cls"], *ids_of(byte_level, ["the river "])[0], added["mask"], added["sep"]]
    assert theirs("the river [MASK]")["input_ids"] == expected
    again = load(str(dataset.path))
    assert again.files == load(str(dataset.path)).with_special_tokens().files
    assert again.engine.name
    assert faults_of(dataset.path) == []


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


def sizes_read(paths, **options):
    """The texts that are sampled, and how many bytes were read for that."""
    with counting_reads() as sizes:
        texts = vocabulary._sample([local(path) for path in paths], TextFormat(documents="line", **options))
    return texts, sum(sizes)


@pytest.fixture
def small_sample(limit):
    """As if a sample were 500 kB, in stretches of 5 kB, read in blocks and pieces of 5 kB."""
    limit(sample_bytes=500_000, stretch_bytes=5_000, block_bytes=5_000, chunk=5_000)


RANDOM = random.Random(0)
LINES = [f"line {number:06} {RANDOM.randbytes(43).hex()} " for number in range(50_000)]  # 100 bytes each


def content_of(lines):
    return "".join(f"{line}\n" for line in lines).encode()


SAMPLES = [(number, name, {}) for number in (1, 2500, 4995) for name in ("a", "a.gz")]
SAMPLES += [(9000, "-", {}), (9000, "a", {"max_documents": 8000})]


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize(("number", "name", "options"), SAMPLES)
def test_a_sample_is_all_of_little_text_or_the_beginning(tmp_path, monkeypatch, number, name, options):
    """Little text is read once. The beginning is that of a pipe, or of as many documents as are wanted."""
    content = content_of(LINES[:number])
    path = put(tmp_path / name, PACK[name[1:]](content))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content))))
    texts, num_read = sizes_read(["-" if name == "-" else path], **options)
    found = [text for text in texts if text]
    assert found == LINES[: len(found)]
    if number < 5000:
        assert (len(found), num_read) == (number, len(content))
    else:
        assert 5000 <= len(found) < 5200


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("ending", fast(["", ".xz", ".jsonl", ".parquet", "100 .gz"], among=["", ".xz", "100 .gz"]))
def test_a_sample_of_much_text_is_spread_over_it_and_the_rest_is_not_read(tmp_path, ending):
    """A tenth of all lines; of each tenth of the text, and of each of many files, about as many."""
    files = 100 if ending == "100 .gz" else 1
    paths = [tmp_path / f"text{number or ''}{ending}" for number in range(files)]
    for number, path in enumerate(paths):
        lines = LINES[number * len(LINES) // files :][: len(LINES) // files]
        if ending == ".parquet":
            pq.write_table(pa.table({"text": lines}), path)
        else:
            rows = [json.dumps({"text": line}) for line in lines] if ending == ".jsonl" else lines
            path.write_bytes(PACK[ending.removeprefix(".jsonl").removeprefix("100 ")](content_of(rows)))
    texts, num_read = sizes_read(paths)
    numbers = [int(text[5:11]) for text in texts if text]
    assert numbers == sorted(numbers)
    assert 4250 <= len(numbers) <= 5500
    assert np.histogram(numbers, bins=10, range=(0, len(LINES)))[0].min() >= 350
    if ending in ("", ".jsonl"):
        assert num_read < 2_500_000
        assert texts == sizes_read(paths)[0]
