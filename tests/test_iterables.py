"""Python iterables of texts and of ids: they give the dataset of a file that has the same, or one error."""

import importlib
import json
import os
import re
import subprocess
from functools import partial
from itertools import cycle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import writers
from support.commands import refuses
from support.data import ROOT, build, import_ids, make_text, stored
from support.disk import put
from support.sources import stop_after_units, units_in

import bertdata
from bertdata.format.verify import verify

TEXTS = [
    *make_text(150, seed=3).split("\n\n"),
    "",
    "é水\n\n\ttwo\r\nlines",
    'a "quoted"\0\\',
    "river " * 50_000,
    "salt",
]
SMALL = {"shard_size": 4000, "validation": 0.2, "test": 0.1}
DOCUMENTS = [[], [10, 11, 3], [], [12], [13, 14, 15, 16, 17, 3], [], *([20 + number % 60, 3] for number in range(90))]


def lines_of(texts):
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def as_given(texts):
    """A generator; every second text is bytes."""
    return (text.encode() if number % 2 else text for number, text in enumerate(texts))


OPTIONS = [
    {"words": "support.data:in_pairs", "sentences": "line"},
    {"map": ["bertdata.prepare:length(20, 200)"], "workers": 3},
    {"max_documents": 60},
]


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_texts_give_the_dataset_of_a_file_of_json_lines(tmp_path, vocab, options):
    path = put(tmp_path / "texts.jsonl", lines_of(TEXTS))
    expected = build(path, tmp_path / "file", tokenizer=vocab, **SMALL, **options).dataset
    found = build(as_given(TEXTS), tmp_path / "out", tokenizer=vocab, **SMALL, **options).dataset
    assert found.dataset_id == expected.dataset_id
    assert len(found.splits["train"]) > 2
    assert verify(found.path) == []
    for origins in (tmp_path / "file" / "origins").glob("*.npy"):
        assert (tmp_path / "out" / "origins" / origins.name).read_bytes() == origins.read_bytes()


def test_invalid_text_is_counted_as_in_a_file(tmp_path, vocab):
    path = put(tmp_path / "texts.jsonl", b'{"text": "a\xffb"}\n{"text": "x\\ud800y"}\n')
    expected = build(path, tmp_path / "file", tokenizer=vocab, validation=0).dataset
    found = build(iter([b"a\xffb", "x\ud800y"]), tmp_path / "out", tokenizer=vocab, validation=0)
    assert found.dataset.dataset_id == expected.dataset_id
    assert found.dataset.manifest.counts == expected.manifest.counts
    assert found.first_replaced == "item 1 of the iterable"


@pytest.mark.parametrize("block", [7, 1 << 19])
def test_ids_give_the_dataset_of_rows(tmp_path, vocab, limit, block):
    limit(block_ids=block)
    pq.write_table(pa.table({"input_ids": DOCUMENTS}), tmp_path / "rows.parquet")
    types = [list, tuple, *(partial(np.array, dtype=dtype) for dtype in (np.uint16, np.int64, np.uint64))]
    items = [make(ids) for make, ids in zip(cycle(types), DOCUMENTS, strict=False)]
    for number, options in enumerate(({"validation": 0, "shard_size": 40}, SMALL | {"shard_size": 40})):
        expected = import_ids(tmp_path / "rows.parquet", tmp_path / f"file-{number}", tokenizer=vocab, **options)
        for given in (iter(items), items):
            found = import_ids(given, tmp_path / f"out-{number}", tokenizer=vocab, overwrite=True, **options)
            assert found.dataset_id == expected.dataset_id
            assert verify(found.path) == []


def test_a_build_that_was_stopped_reads_again_and_skips_finished_units(tmp_path, vocab):
    options = {"tokenizer": vocab, "workers": 1} | SMALL
    expected = build(iter(TEXTS), tmp_path / "whole", **options).dataset
    with pytest.raises(KeyboardInterrupt, match="continue"):
        build(iter(TEXTS), tmp_path / "out", progress=stop_after_units(tmp_path / "out", 2), **options)
    done = units_in(tmp_path / "out")
    report = build(iter(TEXTS), tmp_path / "out", **options)
    assert report.reused_units == len(done) > 1
    assert report.dataset.dataset_id == expected.dataset_id


@pytest.mark.parametrize("function", [build, import_ids])
def test_other_items_do_not_continue_a_build_that_was_stopped(tmp_path, vocab, limit, function):
    limit(block_ids=7)
    items, size = (TEXTS, 4000) if function is build else (DOCUMENTS, 40)
    call = lambda given, **more: function(given, tmp_path / "out", tokenizer=vocab, shard_size=size, **more)  # noqa: E731
    one = iter(items)
    with pytest.raises(KeyboardInterrupt):
        call(one, progress=stop_after_units(tmp_path / "out", 2))
    kept = units_in(tmp_path / "out")
    for given in (one, iter([]), items[:2], items[2:], [items[-1], *items[1:]]):
        with refuses("other-settings", "inputs"):
            call(iter(given))
        assert units_in(tmp_path / "out") == kept
    made = call(iter(items[2:]), overwrite=True)
    expected = function(iter(items[2:]), tmp_path / "whole", tokenizer=vocab, shard_size=size)
    ids = [getattr(each, "dataset", each).dataset_id for each in (made, expected)]
    assert ids[0] == ids[1]


ERRORS = [ValueError("mine"), OSError(5, "mine"), InterruptedError(4, "mine"), EOFError("mine")]


@pytest.mark.parametrize("error", [*ERRORS, KeyboardInterrupt("mine")])
@pytest.mark.parametrize("function", [build, import_ids])
@pytest.mark.parametrize("after", [0, 120])
def test_an_error_of_the_iterable_passes_and_publishes_nothing(tmp_path, vocab, error, function, after):
    items = TEXTS if function is build else DOCUMENTS * 2

    def failing():
        yield from items[:after]
        raise error

    with pytest.raises(type(error)) as caught:
        function(failing(), tmp_path / "out", tokenizer=vocab, shard_size=2000)
    assert caught.value is error or isinstance(error, KeyboardInterrupt)
    assert getattr(error, "filename", None) is None
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert function(iter(items), tmp_path / "out", tokenizer=vocab, shard_size=2000)


@pytest.mark.outside
@pytest.mark.parametrize("library", ["streaming", "litdata"])
def test_the_blocks_of_the_page_import_what_the_library_writes(tmp_path, vocab, library, monkeypatch):
    """The version of benchmarks/environments.py, in an environment that is made if it is not there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    python = importlib.import_module("environments").python_of(library, ROOT / ".bench")
    (block,) = re.findall(rf"```python\n(from {library} .*?)```", (ROOT / "docs" / "import.md").read_text(), re.DOTALL)
    documents = [ids for ids in DOCUMENTS if ids]
    put(tmp_path / "block.py", block.replace("tokenizer/", str(vocab)))
    run = "import environments; environments.without_pictures(); import block"
    for words, given in (([writers.__file__, library], json.dumps(documents)), (["-c", run], "")):
        around = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}:{tmp_path}"}
        command = [python, "-s", *words]
        subprocess.run(command, input=given, cwd=tmp_path, env=around, text=True, check=True, capture_output=True)
    (out,) = tmp_path.glob("from-*")
    assert sorted(stored(bertdata.open(out))) == sorted(documents)
