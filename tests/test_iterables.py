"""Python iterables of texts and of ids: they give the dataset of a file that has the same, or one error."""

import importlib
import json
import os
import re
import shutil
import subprocess

import pytest
from support import writers
from support.commands import refuses
from support.data import ROOT, build, faults_of, import_ids, make_text, stored
from support.disk import put
from support.sources import stop_after_units, units_in

import bertdata

TEXTS = [
    *make_text(150, seed=3).split("\n\n"),
    "",
    "é水\n\n\ttwo\r\nlines",
    'a "quoted"\0\\',
    "river " * 50_000,
    "salt",
    "an invalid byte \udcff in bytes",
    "a lone surrogate \ud800 in a string",
]
SMALL = {"shard_size": 4000, "validation": 0.2, "test": 0.1}
DOCUMENTS = [[], [10, 11, 3], [], [12], [13, 14, 15, 16, 17, 3], [], *([20 + number % 60, 3] for number in range(90))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"words": "support.data:in_pairs", "sentences": "line"},
        {"map": ["bertdata.prepare:length(20, 200)"], "workers": 3},
        {"max_documents": 60},
    ],
)
def test_texts_give_the_dataset_of_a_file_of_json_lines(tmp_path, vocab, options):
    lines = (json.dumps({"text": text}, ensure_ascii="\ud800" in text) + "\n" for text in TEXTS)
    path = put(tmp_path / "texts.jsonl", "".join(lines).encode(errors="surrogateescape"))
    given = (text.encode(errors="surrogateescape") if number % 2 else text for number, text in enumerate(TEXTS))
    expected = build(path, tmp_path / "file", tokenizer=vocab, **SMALL, **options).dataset
    report = build(given, tmp_path / "out", tokenizer=vocab, **SMALL, **options)
    found = report.dataset
    assert found.dataset_id == expected.dataset_id
    assert found.manifest.counts == expected.manifest.counts
    assert report.first_replaced == ("item 156 of the iterable" if "max_documents" not in options else None)
    assert len(found.splits["train"]) > 2
    assert faults_of(found.path) == []
    for origins in (tmp_path / "file" / "origins").glob("*.npy"):
        assert (tmp_path / "out" / "origins" / origins.name).read_bytes() == origins.read_bytes()


@pytest.mark.parametrize("function", [build, import_ids])
def test_other_items_do_not_continue_a_build_that_was_stopped(tmp_path, vocab, limit, function):
    limit(block_ids=7)
    items, size = (TEXTS, 4000) if function is build else (DOCUMENTS, 40)
    call = lambda given, **more: function(given, tmp_path / "out", tokenizer=vocab, shard_size=size, **more)  # noqa: E731
    one = iter(items)
    with pytest.raises(KeyboardInterrupt, match="continue" if function is build else None):
        call(one, progress=stop_after_units(tmp_path / "out", 2))
    kept = units_in(tmp_path / "out")
    for given in (one, iter([]), items[:2], items[2:], [items[-1], *items[1:]]):
        with refuses("other-settings", "inputs"):
            call(iter(given))
        assert units_in(tmp_path / "out") == kept
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    made = call(iter(items[2:]), overwrite=True)
    again = function(iter(items), tmp_path / "again", tokenizer=vocab, shard_size=size)
    assert function is import_ids or again.reused_units == len(kept) > 1
    for each, given in ((made, items[2:]), (again, items)):
        whole = function(iter(given), tmp_path / f"whole {len(given)}", tokenizer=vocab, shard_size=size)
        assert getattr(each, "dataset", each).dataset_id == getattr(whole, "dataset", whole).dataset_id


@pytest.mark.parametrize(
    "error", [ValueError(), OSError(5, ""), InterruptedError(4, ""), EOFError(), KeyboardInterrupt()]
)
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
