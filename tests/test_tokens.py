"""Ids are exactly those of the `tokenizers` library, wherever a tokenizer comes from."""

import gzip
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
from hypothesis import example, given
from hypothesis import strategies as st
from support.commands import python, refuses
from support.data import SPECIALS, build, built, byte_level_bpe, ids_of, joined, word_list
from support.families import fast
from support.limits import limits
from support.servers import Handler, serving
from support.sources import PACK, counting_reads
from tokenizers import models, pre_tokenizers

import bertdata
from bertdata import Loader
from bertdata.errors import TokenizerError
from bertdata.format.records import read_record
from bertdata.format.verify import verify
from bertdata.options import TextFormat
from bertdata.sources.inputs import local
from bertdata.tokenize import engine
from bertdata.tokenize.load import load
from bertdata.tokenize.tokenizer import TOKENIZER
from bertdata.tokenize.tokenizer import LoadedTokenizer as Tokenizer
from bertdata.write import vocabulary

WORDS = [*word_list("tokens"), "x" * 101]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join))


def encode(tokenizer, texts, *, sentences=False):
    return tokenizer.encode(*joined(texts), sentences=sentences)


def text_dataset(tmp_path, text, tokenizer, **options):
    """One file of this text as a dataset of one split. tokenizer: its spec, its JSON or a Tokenizer."""
    if isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer.files["tokenizer.json"].decode()
    if tokenizer.startswith("{"):
        (tmp_path / "t").write_text(tokenizer)
        tokenizer = str(tmp_path / "t")
    return built(tmp_path, text, tokenizer=tokenizer, validation=0.0, **options)


@pytest.fixture(scope="module")
def uncased(bert):
    """bert-base-uncased as we load it, and as the library does."""
    library = tokenizers.Tokenizer.from_file(str(bert / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return load(str(bert / "tokenizer.json")), library


@pytest.fixture(scope="module")
def byte_level():
    """The JSON of a byte-level BPE with one special token, as GPT-2 is made."""
    return byte_level_bpe(400, ["<|endoftext|>"]).to_str()


def word_level(vocabulary, **options):
    """A tokenizer that looks whole words up, so that text can spell its special tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([token for token in vocabulary if token in SPECIALS])
    return Tokenizer(tokenizer.to_str())


# -------------------------------------------------------------------------------------------------------------- ids


@given(st.lists(TEXTS, min_size=1, max_size=4))
@example(["one\n\ntwo\r\nthree", "\n\na", "", "x\ny\n"])
@example(["[MASK] [CLS]", "", " \n", "a[SEP]b"])
def test_ids_are_those_of_the_library_and_a_sentence_begins_at_each_line_that_gives_ids(uncased, texts):
    ours, library = uncased
    assert ids_of(ours, texts) == [library.encode(text, add_special_tokens=False).ids for text in texts]
    starts, at = [], 0
    for text in texts:
        for line in text.split("\n"):
            length = len(library.encode(line, add_special_tokens=False).ids)
            starts += [at] * (length > 0)
            at += length
        at += 1  # the separator
    found = encode(ours, texts, sentences=True)
    assert found.ids.size == at
    assert found.sentences.tolist() == starts
    assert (found.documents[0], found.special_ids_replaced) == (0, 0)
    assert np.array_equal(encode(ours, texts).ids, found.ids)


def test_nothing_is_cut_or_padded_by_what_stands_in_the_file(bert, tmp_path):
    """The file of this model asks for rows of 128 ids, padded."""
    content = json.loads((bert / "tokenizer.json").read_bytes())
    assert content["truncation"] is not None
    assert content["padding"] is not None
    tokenizer = load(str(bert / "tokenizer.json"))
    (tmp_path / "t").write_bytes(tokenizer.files["tokenizer.json"])
    for each in (tokenizer, load(str(tmp_path / "t"))):
        assert list(map(len, ids_of(each, ["word " * 1000]))) == [1000]


def test_a_special_id_given_for_text_is_stored_as_unknown_and_counted(tmp_path):
    ours = word_level([*SPECIALS, "hello"], unk_token="[UNK]")
    found = encode(ours, ["hello [MASK] nobody", "[SEP] [UNK] hello"])
    assert found.ids.tolist() == [5, 1, 1, 3, 1, 1, 5, 3]
    assert found.special_ids_replaced == 2
    dataset = text_dataset(tmp_path, "hello [MASK] nobody\n\n[SEP] [UNK] hello", ours)
    assert dataset.manifest.counts["special_ids_replaced"] == 2
    assert [document.tolist() for document in dataset] == [[5, 1, 1], [1, 1, 5]]


def test_a_tokenizer_without_an_unknown_token_says_so():
    ours = word_level(["hello", "[MASK]"])
    assert ids_of(ours, ["hello hello"]) == [[0, 0]]
    with refuses("tokenizer-lacks-token", "tokenizer", given="[MASK]"):
        encode(ours, ["hello [MASK]"])


@pytest.mark.parametrize("sentences", ["none", "line"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_skips_such_text_where_it_may(tmp_path, sentences, workers):
    tokenizer, text = tmp_path / "tokenizer.json", tmp_path / "text.txt"
    tokenizer.write_bytes(word_level(["hello", "[MASK]", "you"]).files[TOKENIZER])
    text.write_text("hello\nyou\n\n[MASK] hello\n\nyou\nhello [MASK]\n\nyou hello\n\n")
    options = {"tokenizer": str(tokenizer), "validation": 0, "on_error": "skip", "shard_size": 2}
    report = build(text, tmp_path / "out", sentences=sentences, workers=workers, **options)
    counts = report.dataset.manifest.counts
    assert [document.tolist() for document in report.dataset] == [[0, 2], [2, 0]]
    assert (counts["skipped_rows"], counts["documents"], counts["dropped_documents"]) == (2, 2, 0)
    assert report.first_skipped.startswith(f"{text}, line 4: ")
    assert verify(report.dataset.path) == []


def test_a_tokenizer_that_is_too_large_is_named_before_it_is_read(tmp_path):
    for name in (TOKENIZER, "vocab.txt"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 40)
        with mock.patch.object(Path, "read_bytes", side_effect=AssertionError), refuses("too-large", "tokenizer"):
            load(str(tmp_path / name))


def test_text_that_a_tokenizer_fails_on_is_named_or_skipped(tmp_path):
    """Its unknown token is none of its tokens, and only the library takes such a tokenizer."""
    ours = word_level([*SPECIALS, "hello"], unk_token="<none>")
    with refuses("tokenizer-failed", "tokenizer", says="document 1: "):
        encode(ours, ["hello", "hello nobody", "nobody"])
    (tmp_path / "tokenizer.json").write_bytes(ours.files[TOKENIZER])
    with refuses("tokenizer-failed", "tokenizer", says="text 2: "):
        bertdata.Tokenizer.load(tmp_path / "tokenizer.json").encode_batch(["hello", "hello", "nobody"], workers=2)
    with refuses("tokenizer-failed", "tokenizer", says=f"{tmp_path / 'text'}, line 3: "):
        text_dataset(tmp_path, "hello\n\nhello nobody\n\nhello\n\nnobody\n", ours)
    options = {"tokenizer": str(tmp_path / "tokenizer.json"), "validation": 0, "on_error": "skip"}
    report = build(tmp_path / "text", tmp_path / "skipped", **options)
    assert [document.tolist() for document in report.dataset] == [[5], [5]]
    assert report.dataset.manifest.counts["skipped_rows"] == 2
    (tmp_path / "text").write_text("hello\n\n" + "nobody\n\n" * 1500 + "hello\n")  # more than Python may recurse
    report = build(tmp_path / "text", tmp_path / "skipped", **options, overwrite=True)
    assert report.first_skipped.startswith(f"{tmp_path / 'text'}, line 3: ")
    assert (len(report.dataset), report.dataset.manifest.counts["skipped_rows"]) == (2, 1500)


def test_a_panic_of_the_library_is_an_error_of_the_tokenizer_and_an_interrupt_is_not(monkeypatch):
    """Its Rust code panics for some added tokens beside white space of several bytes."""
    ours = word_level([*SPECIALS, "hello"])
    for error, expected in ((type("PanicException", (BaseException,), {}), TokenizerError), (KeyboardInterrupt,) * 2):
        library = mock.Mock(encode_batch_fast=mock.Mock(side_effect=error("not a char boundary")))
        monkeypatch.setattr(ours.source, "library", library)
        monkeypatch.setattr(ours, "_engine", SimpleNamespace(name=None))
        with pytest.raises(expected):
            encode(ours, ["hello"])


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


@pytest.mark.parametrize("options", [{}, {"words": "builtins:list"}, {"sentences": "line"}])
def test_a_text_that_is_too_long_for_the_library_is_named_or_skipped(byte_level, tmp_path, options):
    """A word of more than 4 KiB goes there; with --words and --sentences all of a text does."""
    texts = ["the stone", "x" * 6000, "é" * 4000, "stone " * 10, "ab" * 9000, "the river"]
    (tmp_path / "text").write_text("\n".join(texts))
    (tmp_path / "t.json").write_text(byte_level)
    fixed = {"tokenizer": str(tmp_path / "t.json"), "documents": "line", "validation": 0, **options}
    with limits(longest_piece=7_000):
        with refuses("too-large", "tokenizer", given=8000, says=f"{tmp_path / 'text'}, line 3: 8,000 bytes"):
            build([tmp_path / "text"], tmp_path / "out", **fixed)
        report = build([tmp_path / "text"], tmp_path / "out", **fixed, on_error="skip")
    kept = [text for text in texts if len(text.encode()) <= 7_000]
    assert read_record(tmp_path / "out" / "manifest.json")["counts"]["skipped_rows"] == len(texts) - len(kept)
    special, library = report.dataset.special_tokens, tokenizers.Tokenizer.from_str(byte_level)
    ends = [] if special.separator is None else [special.separator]
    expected = [i for text in kept for i in [*library.encode(text).ids, *ends]]
    assert report.dataset.tokens("train", 0).tolist() == expected


def roles_of(*vocabulary, **named):
    words = {token: number for number, token in enumerate(vocabulary)}
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>")).to_str(), named).special.roles()


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
        Tokenizer(tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).to_str())
    Tokenizer(tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": (1 << 24) - 1}, unk_token="[UNK]")).to_str())


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


def test_a_tokenizer_without_masks_builds_and_is_refused_by_the_loader(byte_level, tmp_path):
    text, said = "the river\tof  bread\n  light 水\n\n<|endoftext|> is text\n", []
    dataset = text_dataset(tmp_path, text, byte_level, say=said.append)
    assert "[PAD], [CLS], [SEP], [MASK]" in said[-1]
    assert "--special-tokens" in said[-1]
    (tmp_path / "again.txt").write_text(text)
    of_a_part = []
    build([tmp_path / "again.txt"], tmp_path / "part", tokenizer=str(dataset.path), part=(0, 1), say=of_a_part.append)
    assert of_a_part[-1] == said[-1]
    assert dataset.special_tokens.roles() == {"eos": 0}
    assert dataset.special_tokens.separator == 0
    decode = load(str(dataset.path)).decode
    assert [decode(document.tolist()) for document in dataset] == text.removesuffix("\n").split("\n\n")
    with refuses("tokenizer-lacks-token", "shards"):
        Loader(dataset)


def test_special_tokens_that_are_missing_can_be_added(byte_level, tmp_path):
    from transformers import AutoTokenizer

    plain = Tokenizer(byte_level)
    size = plain.special.vocab_size
    text = "the river\tof  bread\n\n[MASK] and <|endoftext|> are text\n\n" * 20
    dataset = text_dataset(tmp_path, text, byte_level, special_tokens=True)
    added = {"pad": size, "cls": size + 1, "sep": size + 2, "mask": size + 3}
    assert dataset.special_tokens.roles() == added | {"eos": 0}
    assert dataset.special_tokens.separator == added["sep"]
    assert dataset.special_tokens.vocab_size == size + 4
    assert dataset.manifest.counts["special_literals"] == {"<|endoftext|>": 20, "[MASK]": 20}
    texts = ["the river\tof  bread", "[MASK] and <|endoftext|> are text"]
    assert [document.tolist() for document in dataset][:2] == ids_of(plain, texts)
    batch = Loader(dataset, length=16).read(np.array([0]))
    assert (batch.input_ids[0, 0], batch.input_ids[0, -1]) == (added["cls"], added["sep"])
    theirs = AutoTokenizer.from_pretrained(dataset.path)
    names = [theirs.pad_token, theirs.cls_token, theirs.sep_token, theirs.mask_token]
    assert names == ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    ids = ids_of(plain, ["the river", " of bread"])
    cls, sep = added["cls"], added["sep"]
    assert theirs("the river [MASK]")["input_ids"] == [cls, *ids_of(plain, ["the river "])[0], added["mask"], sep]
    pair = theirs("the river", " of bread")
    assert pair["input_ids"] == [cls, *ids[0], sep, *ids[1], sep]
    assert pair["token_type_ids"] == [0] * (len(ids[0]) + 2) + [1] * (len(ids[1]) + 1)
    again = load(str(dataset.path))
    assert again.files == load(str(dataset.path)).with_special_tokens().files
    assert again.engine.name
    assert verify(dataset.path) == []


def test_special_tokens_that_are_there_are_kept(tmp_path, vocab, dataset):
    tokenizer = load(vocab)
    assert tokenizer.with_special_tokens() is tokenizer
    said = []
    kept = text_dataset(tmp_path, "the river", vocab, special_tokens=True, say=said.append)
    assert said == []
    assert kept.manifest.tokenizer == dataset.manifest.tokenizer
    some = word_level(["[CLS]", "<s>", "</s>", "a"], unk_token="a").with_special_tokens()
    assert some.special.roles() == {"unk": 3, "cls": 0, "sep": 2, "bos": 1, "eos": 2, "pad": 4, "mask": 5}


def test_a_tokenizer_without_any_special_token(tmp_path):
    dataset = text_dataset(tmp_path, "a b\na\n\nb b b", word_level(["a", "b"]), sentences="line")
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


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("options", [{}, {"max_documents": 8000}])
def test_a_sample_of_a_pipe_or_below_a_limit_is_the_beginning(tmp_path, monkeypatch, options):
    path = tmp_path / "text"
    path.write_bytes(content_of(LINES[:9000]))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(path.read_bytes()))))
    texts, _ = sizes_read([path if options else "-"], **options)
    found = [text for text in texts if text]
    assert found == LINES[: len(found)]
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


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("number", [1, 2500, 4995])
def test_less_text_than_a_sample_is_read_once_and_taken_as_a_whole(tmp_path, number):
    content = content_of(LINES[:number])
    for name, packed in (("a.txt", content), ("a.txt.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(packed)
        texts, num_read = sizes_read([tmp_path / name])
        assert [text for text in texts if text] == LINES[:number]
        assert num_read == len(content)
