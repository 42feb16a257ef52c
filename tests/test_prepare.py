"""Functions on the text of documents: bertdata.prepare and --map."""

import tempfile
import unicodedata
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import refuses
from support.data import build, stored
from support.disk import before_rename, put
from support.limits import limits
from support.sources import as_jsonl, counting_reads

from bertdata import prepare
from bertdata.format.origins import Origins
from bertdata.write import duplicates

TEXTS = [f"The  stone {number}\tunder the river {'x' * (number % 7)}" for number in range(120)]


def rows(path, texts):
    return put(path, as_jsonl(texts))


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_clean_text_has_no_control_characters_and_single_spaces(text):
    lines = prepare.clean(text).split("\n")
    assert all(unicodedata.category(each) != "Cc" for line in lines for each in line)
    assert all(line == " ".join(line.split()) for line in lines)
    assert "".join("".join(lines).split()) == "".join(
        each for each in text if unicodedata.category(each) != "Cc" and not each.isspace()
    )
    assert lines == [""] or all(lines)


@given(st.text(st.sampled_from("aé 　\n。龍漢かカ한ｶ𠀀")), st.sampled_from([0, 0.25, 0.5, 1]))
def test_the_share_of_chinese_japanese_and_korean(text, least):
    characters = [each for each in text if not each.isspace()]
    names = [unicodedata.name(each).split()[0] for each in characters]
    count = sum(name in ("CJK", "HIRAGANA", "KATAKANA", "HANGUL") for name in names)
    assert prepare.cjk(least)(text) == (text if count >= least * len(characters) else None)


def test_bounds_of_length():
    assert [prepare.length(2, 3)(text) for text in ("a", "ab", "abc", "abcd")] == [None, "ab", "abc", None]
    assert prepare.length(2)("abcd") == "abcd"
    assert (prepare.nfc("e\u0301"), prepare.nfkc("Ａ")) == ("é", "A")


def test_the_dataset_is_that_of_the_changed_texts(tmp_path, vocab):
    changed = [text for text in map(prepare.clean, TEXTS) if len(text) <= 33]
    options = {"tokenizer": vocab, "validation": 0.2, "shard_size": 3000}
    maps = ["bertdata.prepare:clean", "bertdata.prepare:length(0, 33)"]
    dataset = build(rows(tmp_path / "a.jsonl", TEXTS), tmp_path / "a", map=maps, **options).dataset
    expected = build(rows(tmp_path / "b.jsonl", changed), tmp_path / "b", **(options | {"shard_size": 1 << 30})).dataset
    assert stored(dataset) == stored(expected)
    counts = dataset.manifest.counts
    assert counts["removed_documents"] == len(TEXTS) - len(changed) > 20
    assert counts["documents"] == len(changed)
    assert counts["text_bytes"] == sum(map(len, changed))
    assert dataset.manifest.settings["map"] == maps
    assert dataset.dataset_id != expected.dataset_id


@settings(max_examples=settings().max_examples // 10)
@given(st.data())
def test_the_first_of_equal_texts_is_kept(tmp_path_factory, vocab, data):
    folder = tmp_path_factory.mktemp("dedup")
    texts = st.lists(st.sampled_from(["stone", "river", "the stone", "bread of light", "Stone", "x"]), min_size=1)
    inputs = data.draw(st.lists(texts, min_size=1, max_size=3))
    files = [rows(folder / f"{number}.jsonl", each) for number, each in enumerate(inputs)]
    options = {"tokenizer": vocab, "validation": 0.3, "workers": data.draw(st.integers(1, 3))}
    size = data.draw(st.sampled_from([40, 1000]))
    dataset = build(files, folder / "a", dedup=True, shard_size=size, **options).dataset
    first = list(dict.fromkeys(sum(inputs, [])))
    expected = build(rows(folder / "first.jsonl", first), folder / "b", **options).dataset
    assert stored(dataset) == stored(expected)
    counts = dataset.manifest.counts
    assert counts["documents"] + counts["duplicate_documents"] == sum(map(len, inputs))
    assert dataset.manifest.settings["dedup"] is True


@given(st.lists(st.integers(0, 5), max_size=60))
def test_duplicates_among_many_equal_texts_are_found_some_rows_at_a_time(numbers):
    """One text may be that of most documents; then its hashes are in one file."""
    rows = np.array([[n % 2, n // 2, origin] for origin, n in enumerate(numbers)], np.uint64).reshape(-1, 3)
    with tempfile.TemporaryDirectory() as folder, limits(hashes_together=4):
        rows.tofile(Path(folder) / "hashes")
        with patch.object(np, "lexsort", wraps=np.lexsort) as sort:
            found = duplicates._later_ones(Path(folder) / "hashes")
    assert sorted(found.tolist()) == [n for n, number in enumerate(numbers) if number in numbers[:n]]
    assert all(call.args[0].shape[1] <= 4 + 6 + 6 for call in sort.call_args_list)


def test_duplicates_are_found_once_and_after_the_functions(tmp_path, vocab):
    path = rows(tmp_path / "a.jsonl", [text + " " * (number % 2) for number, text in enumerate(TEXTS * 2)])
    options = {"tokenizer": vocab, "dedup": True, "map": ["bertdata.prepare:clean"]}
    with before_rename("manifest.json", Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        build(path, tmp_path / "out", **options)
    assert sorted(each.name for each in (tmp_path / "out" / ".build").glob("*hashes*")) == []
    with counting_reads() as sizes:
        dataset = build(path, tmp_path / "out", **options).dataset
    assert sizes == []  # the text is not read again
    assert (dataset.num_documents, dataset.manifest.counts["duplicate_documents"]) == (len(TEXTS), len(TEXTS))
    origins = Origins.read(dataset.path, dataset.manifest)
    places = [origins.input_and_place(number)[1] for number in range(len(dataset))]
    assert max(places) < path.stat().st_size / 2


def test_a_module_that_lies_here_needs_its_directory_on_the_path(tmp_path, vocab, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "my_rules.py", "def f(text):\n    return text\n")
    with refuses("bad-function", "map", says="PYTHONPATH=. "):
        build(rows(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", tokenizer=vocab, map=["my_rules:f"])
