"""Functions on the text of documents: bertdata.prepare and --map."""

import json
import os
import unicodedata
from unittest.mock import patch

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_build import published

import bertdata
from bertdata import prepare
from bertdata.cli import main
from bertdata.errors import InputError, UsageError
from bertdata.look.trace import documents_of, with_texts
from bertdata.sources.maps import function_of
from bertdata.write import build, finish

TEXTS = [f"The  stone {number}\tunder the river {'x' * (number % 7)}" for number in range(300)]


def shout(text):
    return text.upper()


def no_sevens(text):
    return None if "7" in text else text


def failing(text):
    raise KeyError("stone")


def number(text):
    return 7


def half(text):
    return "\ud800"


def rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def arrays(directory):
    return {
        name: content
        for name, content in published(directory).items()
        if name.endswith(".npy") and "origins" not in name
    }


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
    changed = [text.upper() for text in map(no_sevens, TEXTS) if text]
    options = {"tokenizer": vocab, "validation": 0.2, "shard_size": 3000}
    maps = ["test_prepare:shout", "test_prepare:no_sevens"]
    found = build(rows(tmp_path / "a.jsonl", TEXTS), tmp_path / "a", map=maps, **options).dataset
    expected = build(rows(tmp_path / "b.jsonl", changed), tmp_path / "b", **(options | {"shard_size": 1 << 30})).dataset
    for split in ("train", "validation"):
        each = [[np.concatenate([dataset.array(s.name, "tokens") for s in dataset.splits[split].shards]).tolist()]
                for dataset in (found, expected)]  # fmt: skip
        assert each[0] == each[1]
    counts = found.manifest.counts
    assert counts["removed_documents"] == len(TEXTS) - len(changed) > 50
    assert counts["documents"] == len(changed)
    assert counts["text_bytes"] == sum(map(len, changed))
    assert found.manifest.settings["map"] == maps
    assert found.dataset_id != expected.dataset_id


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_threads_and_parts_give_the_same_bytes(tmp_path, vocab, kind):
    path = rows(tmp_path / "a.jsonl", TEXTS)
    if kind == "txt":
        path = tmp_path / "a.txt"
        path.write_text("\n\n".join(TEXTS))
    options = {"tokenizer": vocab, "map": ["bertdata.prepare:clean", "test_prepare:no_sevens"], "shard_size": 3000}
    build(path, tmp_path / "one", workers=1, **options)
    build(path, tmp_path / "three", workers=3, **options)
    for part in range(2):
        build(path, tmp_path / "parts", part=(part, 2), **options)
    finish(tmp_path / "parts")
    assert published(tmp_path / "one") == published(tmp_path / "three") == published(tmp_path / "parts")


def test_a_changed_text_is_traced(tmp_path, vocab):
    path = rows(tmp_path / "a.jsonl", TEXTS)
    dataset = build(path, tmp_path / "out", tokenizer=vocab, validation=0, map=[
        "test_prepare:no_sevens", "bertdata.prepare:clean"]).dataset  # fmt: skip
    loader = bertdata.Loader(dataset, length=64, samples="documents", masking=None)
    places = documents_of(loader, np.arange(loader.num_samples))
    traced = with_texts(dataset, places, maps=["test_prepare:no_sevens"])
    assert sorted(each.text for each in traced) == sorted(prepare.clean(text) for text in TEXTS if no_sevens(text))
    rows(path, ["7" * len(text) for text in TEXTS])
    assert {each.text for each in with_texts(dataset, places, maps=["test_prepare:no_sevens"])} == {None}


def test_a_function_that_a_dataset_names_is_run_only_if_the_user_names_it_too(tmp_path, vocab, monkeypatch):
    path = rows(tmp_path / "a.jsonl", TEXTS)
    dataset = build(path, tmp_path / "out", tokenizer=vocab, validation=0, map=["test_prepare:no_sevens"]).dataset
    places = documents_of(bertdata.Loader(dataset, length=64, masking=None), np.arange(3))
    monkeypatch.setattr("bertdata.sources.maps.importlib", None)
    function_of.cache_clear()
    (why,) = {each.no_text for each in with_texts(dataset, places)}
    assert why.endswith("by --map test_prepare:no_sevens; give the same --map to run this function here")


def test_a_vocabulary_is_trained_on_the_changed_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(TEXTS))
    changed = tmp_path / "b.txt"
    changed.write_text("\n\n".join(text for text in TEXTS if no_sevens(text)))
    options = {"vocab_size": 60, "validation": 0.0}
    build(path, tmp_path / "a", map=["test_prepare:no_sevens"], **options)
    build(changed, tmp_path / "b", **options)
    assert arrays(tmp_path / "a") == arrays(tmp_path / "b")


# ---------------------------------------------------------------------------------------------------------- duplicates


def tokens(dataset):
    """Split → ids of its documents."""
    return {name: [dataset.array(shard.name, "tokens").tolist() for shard in split.shards]
            for name, split in dataset.splits.items()}  # fmt: skip


@given(st.data())
@settings(max_examples=25)
def test_the_first_of_equal_texts_is_kept(tmp_path_factory, vocab, data):
    folder = tmp_path_factory.mktemp("dedup")
    texts = st.lists(st.sampled_from(["stone", "river", "the stone", "bread of light", "Stone", "x"]), min_size=1)
    files = [rows(folder / f"{number}.jsonl", data.draw(texts)) for number in range(data.draw(st.integers(1, 3)))]
    every = [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]
    options = {"tokenizer": vocab, "validation": 0.3, "workers": data.draw(st.integers(1, 3))}
    found = build(files, folder / "a", dedup=True, shard_size=data.draw(st.sampled_from([40, 1000])), **options).dataset
    expected = build(rows(folder / "first.jsonl", dict.fromkeys(every)), folder / "b", **options).dataset
    joined = [{split: sum(each, []) for split, each in tokens(dataset).items()} for dataset in (found, expected)]
    assert joined[0] == joined[1]
    counts = found.manifest.counts
    assert counts["documents"] + counts["duplicate_documents"] == len(every)
    assert found.manifest.settings["dedup"] is True


def test_duplicates_are_found_once_and_after_the_functions(tmp_path, vocab):
    path = rows(tmp_path / "a.jsonl", [text + " " * (number % 2) for number, text in enumerate(TEXTS * 2)])
    seen = []
    options = {"tokenizer": vocab, "dedup": True, "map": ["bertdata.prepare:clean"], "say": seen.append}
    with patch("bertdata.write.dataset.publish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        build(path, tmp_path / "out", **options)
    assert sorted(each.name for each in (tmp_path / "out" / ".build").glob("*hashes*")) == []
    with patch("bertdata.write.duplicates.in_order", None):  # the text is not read again
        dataset = build(path, tmp_path / "out", **options).dataset
    assert seen.count("300 documents have the text of an earlier one and are left out") == 2
    assert (dataset.num_documents, dataset.manifest.counts["duplicate_documents"]) == (300, 300)
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")]).stdout
    assert "  duplicates   300 documents whose text came before, left out\n" in shown
    loader = bertdata.Loader(dataset, length=64, samples="documents", masking=None)
    places = {each.place for each in documents_of(loader, np.arange(loader.num_samples))}
    assert max(places) < path.stat().st_size / 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"part": (0, 2)}, "--dedup does not go with --part, because it compares all documents"),
        ({"ray": "local"}, "--dedup does not go with --ray, because it compares all documents"),
    ],
)
def test_what_does_not_go_with_dedup_is_refused(tmp_path, corpus, vocab, options, said):
    with pytest.raises(UsageError, match=said):
        build(corpus, tmp_path / "out", tokenizer=vocab, dedup=True, **options)


def test_a_pipe_has_no_duplicates_removed(tmp_path, vocab):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="--dedup does not go with a pipe, because it reads the text twice"):
        build(tmp_path / "pipe", tmp_path / "out", tokenizer=vocab, dedup=True)


# ------------------------------------------------------------------------------------------ functions that are none


def test_a_module_that_lies_here_needs_its_directory_on_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rules.py").write_text("def f(text):\n    return text\n")
    with pytest.raises(
        UsageError, match="begin the command with PYTHONPATH=. to find the my_rules.py of this directory"
    ):
        function_of("my_rules:f", "--map")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nothing", "--map nothing is not a function"),
        ("json:nothing", "--map json:nothing is not a function"),
        ("nowhere:f", "--map nowhere:f is not a function"),
        ("bertdata.prepare:length(1", "a parenthesis is not closed"),
        ("bertdata.prepare:length(x)", "is not a function"),
        ("bertdata.prepare:length()", "is not a function"),
        ("math:pi", "--map math:pi is of type float and not a function; give module:function"),
    ],
)
def test_what_is_no_function_is_refused(tmp_path, corpus, vocab, spec, said):
    with pytest.raises(UsageError, match=said):
        build(corpus, tmp_path / "out", tokenizer=vocab, map=[spec])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("failing", r"a.jsonl, line 3: --map test_prepare:failing failed \(KeyError: 'stone'\); fix the function or"),
        (
            "number",
            r"line 3: --map test_prepare:number failed \(TypeError: it gave a value of type int, and not a text or",
        ),
        ("half", r"line 3: --map test_prepare:half failed \(UnicodeEncodeError"),
    ],
)
def test_a_function_that_fails_is_named_with_the_place(tmp_path, vocab, name, said):
    path = rows(tmp_path / "a.jsonl", TEXTS)
    path.write_text("\n\n" + path.read_text())
    with pytest.raises(InputError, match=said):
        build(path, tmp_path / "out", tokenizer=vocab, map=[f"test_prepare:{name}"], on_error="skip")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_documents_that_are_all_left_out(tmp_path, vocab):
    with pytest.raises(InputError, match="no document to build from: 300 documents were left out by --map"):
        build(rows(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", tokenizer=vocab, map=["bertdata.prepare:cjk(0.5)"])


def test_documents_that_are_all_left_out_train_no_vocabulary(tmp_path):
    with pytest.raises(InputError, match="no document to build from: --map left out all documents"):
        build(rows(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", map=["bertdata.prepare:cjk(0.5)"])


def test_the_command_says_what_was_left_out(tmp_path, vocab):
    path, out = str(rows(tmp_path / "a.jsonl", TEXTS)), str(tmp_path / "out")
    options = ["--tokenizer", vocab, "--map", "test_prepare:no_sevens", "--map", "bertdata.prepare:length(2)"]
    done = CliRunner().invoke(main, ["build", path, "--out", out, *options])
    num_removed = sum("7" in text for text in TEXTS)
    assert f", {num_removed} removed by --map" in done.stdout
    assert f"  removed      {num_removed} documents by --map\n" in CliRunner().invoke(main, ["inspect", out]).stdout
