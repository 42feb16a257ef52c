"""bertdata.Tokenizer gives the ids of AutoTokenizer as arrays for many texts."""

import json
import os
import pickle
import signal

import numpy as np
import pyarrow as pa
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import refuses
from support.data import make_text, train_tokenizer
from support.disk import put, write_all
from support.sources import INVALID
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

import bertdata
from bertdata.tokenize.tokenizer import give_same_ids

TEXT = make_text(40) + " don't café 水火 12345 e\u0301 ﬁ"
SPELLED = "[MASK] [SEP]x [CLS][PAD] <mask>"
TEXTS = st.lists(st.sampled_from([*TEXT.split(), *SPELLED.split(), " ", "\n", "🙂", "\0"]), max_size=30).map(" ".join)


@pytest.fixture(scope="module", params=["wordpiece", "bpe", "unigram"])
def both(request, tmp_path_factory):
    """The tokenizer of transformers, and ours, of the same files."""
    folder = tmp_path_factory.mktemp("kinds")
    ours = train_tokenizer(put(folder / "text", TEXT), folder, type=request.param, vocab_size=400)
    return transformers.AutoTokenizer.from_pretrained(folder), ours


@settings(deadline=None)
@given(st.lists(TEXTS | st.text(max_size=9), max_size=9), st.booleans(), st.integers(1, 3))
def test_ids_of_many_texts(both, texts, add_special_tokens, workers):
    theirs, ours = both
    library = Library.from_str(theirs.backend_tokenizer.to_str())
    expected = [each.ids for each in library.encode_batch(texts, add_special_tokens=add_special_tokens)]
    options = {"add_special_tokens": add_special_tokens, "workers": workers}
    arrow = pa.chunked_array([pa.array(texts[:2], pa.string()), pa.array(texts[2:], pa.string())])
    for given_texts in (texts, [text.encode() for text in texts], pa.array(["", *texts], pa.large_string())[1:], arrow):
        ids, offsets = ours.encode_batch(given_texts, **options)
        assert [ids[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)] == expected
        assert (ids.dtype, offsets.dtype) == (np.uint16, np.int64)
    if not add_special_tokens:
        assert ours.count(texts).tolist() == [*map(len, expected)]


def test_a_pickle_and_a_forked_process_have_threads_of_their_own(both):
    """And tables: what the process encodes does not change the words that are known here."""
    theirs, ours = both
    texts, new = ["the river"] * 64, ["zqxjkvzqxjkv wvzqjxkvzqjxk"]
    expected = ours.encode_batch(texts)[0].tolist()
    assert pickle.loads(pickle.dumps(ours)).encode_batch(texts, workers=2)[0].tolist() == expected
    if not (pid := os.fork()):
        signal.alarm(20)
        ours.encode_batch(new)
        os._exit(ours.encode_batch(texts, workers=2)[0].tolist() != expected)
    assert os.waitpid(pid, 0)[1] == 0
    assert ours.encode_batch(new)[0].tolist() == theirs(new[0], add_special_tokens=False).input_ids


def test_tables_in_the_cache_give_the_same_ids_whatever_happens_to_them(both, tmp_path, cache, monkeypatch, limit):
    theirs, ours = both
    write_all(tmp_path, ours.loaded.files)
    expected = theirs([TEXT, SPELLED], add_special_tokens=False).input_ids

    def kept_after_encoding():
        ids, offsets = bertdata.Tokenizer.load(tmp_path).encode_batch([TEXT, SPELLED])
        assert [ids[: offsets[1]].tolist(), ids[offsets[1] :].tolist()] == expected
        return {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}

    kept = kept_after_encoding()
    written = [path.stat().st_mtime_ns for path in kept]
    assert kept_after_encoding() == kept
    assert [path.stat().st_mtime_ns for path in kept] == written != []  # they are not made again
    for damaged in (lambda content: content[:-1], lambda content: content[:-1] + bytes([content[-1] ^ 1])):
        for path, content in kept.items():
            path.write_bytes(damaged(content))
        assert kept_after_encoding() == kept
    first, old, older = next(iter(kept)), cache / "tokenizers" / "z", cache / "tokenizers" / "0"
    for time, path in enumerate((older, old)):  # which are the first to go
        put(path, "ab")
        os.utime(path, (time, time))
    limit(kept_bytes=sum(map(len, kept.values())) + 2)
    first.unlink()
    assert kept_after_encoding() == kept | {old: b"ab"}
    limit(kept_bytes=0)
    first.unlink()
    assert kept_after_encoding() == {}
    monkeypatch.setenv("BERTDATA_CACHE", str(tmp_path / "tokenizer.json"))  # a file
    assert kept_after_encoding() == {}


BAD_TEXTS = {
    "a text alone": ("abc", "malformed"),
    "bytes alone": (b"abc", "malformed"),
    "a generator": ((text for text in "abc"), "malformed"),
    "None": (["a", None], "not-text"),
    "half of a pair": (["a", "\ud800"], "not-text"),
    "not UTF-8": ([b"a", b"\xff"], "not-text"),
    "a character in two texts": (["é".encode()[:1], "é".encode()[1:]], "not-text"),
    "invalid bytes in pyarrow": (INVALID, "not-text"),
    "a null": (pa.array(["a", None]), "wrong-column-type"),
    "numbers": (pa.array([1, 2]), "wrong-column-type"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_what_is_no_text_is_refused(both, name):
    texts, kind = BAD_TEXTS[name]
    with refuses(kind, "texts"):
        both[1].encode_batch(texts)


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    library = Library(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing("$A <s> $A", special_tokens=[("<s>", 1)])
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    tokenizer = bertdata.Tokenizer.load(tmp_path)
    with refuses("unsupported", "add_special_tokens"):
        tokenizer.encode_batch(["a"], add_special_tokens=True)
    with refuses("out-of-range", "workers"):
        tokenizer.encode_batch(["a"], workers=0)


def test_a_tokenizer_that_transformers_saved_again_is_the_same(both, tmp_path):
    first = both[1].loaded.files["tokenizer.json"]
    both[0].save_pretrained(tmp_path)
    again = (tmp_path / "tokenizer.json").read_bytes()
    assert again != first
    assert give_same_ids(first, again)
    content = json.loads(again)
    content["normalizer"] = {"type": "Lowercase"}
    assert not give_same_ids(first, json.dumps(content).encode())
    assert not give_same_ids(first, b"{}")
