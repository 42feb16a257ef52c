"""bertdata.Tokenizer gives the ids of AutoTokenizer as arrays for many texts."""

import json
import os
import pickle
import signal
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import refuses
from support.data import make_text, train_tokenizer
from support.disk import put, write_all
from support.limits import limits
from support.sources import INVALID
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

import bertdata
from bertdata.errors import UsageError
from bertdata.tokenize import engine
from bertdata.tokenize.kernels.records import PADDING
from bertdata.tokenize.source import Source
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


def test_kernels_get_no_text_without_the_bytes_that_they_read_behind_it(both, monkeypatch):
    """They read words of 8 and 64 bytes. A buffer of pyarrow may end with its text."""
    (theirs, ours), run, room = both, engine.encode_words, []

    def watched(text, *more):
        room.append(text.data.size - text.stops.max(initial=0))
        return run(text, *more)

    monkeypatch.setattr(engine, "encode_words", watched)
    for length in range(130):
        text = "a" * length + ("", "é", "水", "\U0001f600")[length % 4]
        assert ours.encode_batch(pa.array([text]))[0].tolist() == theirs(text, add_special_tokens=False).input_ids
    assert len(room) > 100
    assert min(room) >= PADDING


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
    assert ours.count(texts).tolist() == [
        len(each.ids) for each in library.encode_batch(texts, add_special_tokens=False)
    ]


def test_a_tokenizer_that_no_engine_takes_says_why_and_gives_the_same(both, tmp_path):
    content = json.loads(both[1].loaded.files["tokenizer.json"])
    arrow = {"type": "Replace", "pattern": {"String": "T"}, "content": "↑t"}  # is more than one character
    for normalizer, cut, reason in ((None, "UnicodeScripts", "UnicodeScripts"), (arrow, "Whitespace", "'T'")):
        changed = {"normalizer": normalizer, "pre_tokenizer": {"type": cut}}
        write_all(tmp_path, {"tokenizer.json": json.dumps(content | changed).encode()})
        ours, library = bertdata.Tokenizer.load(tmp_path), Library.from_str(json.dumps(content | changed))
        assert (reason in ours.why_slow, ours.engine is None) == (True, cut == "UnicodeScripts")
        expected = library.encode(TEXT, add_special_tokens=False).ids
        assert ours.encode_batch([TEXT, "", TEXT], workers=2)[0].tolist() == expected * 2
    assert (both[1].engine is None, both[1].why_slow) == (False, None)


def test_a_forked_process_has_threads_of_its_own(both):
    _, ours = both
    texts = ["the river"] * 64
    expected = [ids.tolist() for ids in ours.encode_batch(texts, workers=2)]
    if not (pid := os.fork()):
        signal.alarm(20)
        os._exit([ids.tolist() for ids in ours.encode_batch(texts, workers=2)] != expected)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_tokenizer_can_be_pickled(both):
    again = pickle.loads(pickle.dumps(both[1]))
    assert again.encode_batch([TEXT])[0].tolist() == both[1].encode_batch([TEXT])[0].tolist()


@pytest.mark.parametrize("damage", [None, "flipped", "shorter", "no directory"])
def test_tables_in_the_cache_give_the_same_ids_whatever_happens_to_them(both, tmp_path, cache, damage):
    write_all(tmp_path, both[1].loaded.files)
    texts = [TEXT, SPELLED] if damage else [make_text(40)]  # that no engine leaves to the library
    expected = [both[0](text, add_special_tokens=False).input_ids for text in texts]

    def encoded():
        return [ids.tolist() for ids in bertdata.Tokenizer.load(tmp_path).encode_batch(texts)]

    place = tmp_path / "tokenizer.json" if damage == "no directory" else cache
    with patch.dict(os.environ, BERTDATA_CACHE=str(place)):
        assert encoded() == expected
        kept = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
        for path, content in kept.items():
            half = len(content) // 2
            changed = {"flipped": bytes([content[half] ^ 1]), "shorter": b""}.get(damage or "")
            if changed is not None:
                path.write_bytes(content[:half] + changed + content[half + 1 :] * (damage == "flipped"))
        with patch.object(Source, "content", None) if damage is None else nullcontext():  # is not parsed again
            assert encoded() == expected
    assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == kept
    with limits(kept_bytes=0):
        Source(both[1].loaded.files["tokenizer.json"]).keep("new", {"of": 1})
    assert not [path for path in cache.rglob("*") if path.is_file()]


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
    with refuses(kind, "texts", error=UsageError):
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
