"""Functions on the text of documents: bertdata.prepare and --map."""

import unicodedata
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import refuses
from support.data import build, stored
from support.disk import before_rename, put
from support.sources import as_jsonl, counting_reads

from bertdata import prepare

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


def test_the_first_of_equal_texts_is_kept(tmp_path, vocab, limit):
    """After the functions, in one pass also if the build is stopped, with few hashes at a time in memory."""
    limit(hashes_together=1)
    contents = [TEXTS, [*(f"\t{text}" for text in reversed(TEXTS)), *["stone"] * 9, "salt"]]
    paths = [rows(tmp_path / f"{number}.jsonl", texts) for number, texts in enumerate(contents)]
    options = {"tokenizer": vocab, "validation": 0.3, "shard_size": 900, "workers": 3}
    once = options | {"dedup": True, "map": ["bertdata.prepare:clean"]}
    with before_rename("manifest.json", Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        build(paths, tmp_path / "out", **once)
    assert not [*(tmp_path / "out" / ".build").glob("*hashes*")]
    with counting_reads() as sizes:
        dataset = build(paths, tmp_path / "out", **once).dataset
    assert sizes == []
    first = rows(tmp_path / "first.jsonl", dict.fromkeys(map(prepare.clean, sum(contents, []))))
    assert stored(dataset) == stored(build(first, tmp_path / "first", **options).dataset)
    assert dataset.manifest.counts["duplicate_documents"] == len(TEXTS) + 8
    assert dataset.manifest.settings["dedup"] is True


RULES = """import time
running = []
def f(text): running.append(text); time.sleep(1e-4); assert [running.pop(), *running] == [text]; return text
"""


def test_a_module_that_lies_here_needs_its_directory_on_the_path(tmp_path, vocab, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "my_rules.py", RULES)
    given, options = rows(tmp_path / "a.jsonl", TEXTS), {"tokenizer": vocab, "map": ["my_rules:f"], "shard_size": 300}
    with refuses("bad-function", "map", says="PYTHONPATH=. "):
        build(given, tmp_path / "out", **options)
    monkeypatch.syspath_prepend(tmp_path)
    build(given, tmp_path / "out", workers=4, **options)  # one thread at a time runs a function
