"""Where the text of each document was: the origins of a build, and from a batch of a past run back to its documents."""

import gzip
import io
import json
import os
import random
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import WORDS, make_text
from helpers import refuses, succeeds
from sources import as_arrow_file, as_parquet, zstd

import bertdata
from bertdata.cli import main
from bertdata.errors import StateError
from bertdata.format.origins import Record, array_name
from bertdata.format.verify import verify
from bertdata.look.trace import documents_of, stream_of, trace, with_texts
from bertdata.tokenize.load import load
from bertdata.write import build, finish

SMALL = {"shard_size": 3000, "validation": 0.2}


def texts(count, *, seed):
    """Documents of one to six lines, all different, some of which hold no token."""
    draw = random.Random(seed)
    line = lambda: " ".join(draw.choices([*WORDS, "Häuser", "水"], k=draw.randint(1, 20)))  # noqa: E731
    return [
        "\n".join([f"Document {seed} {number}.", *(line() for _ in range(draw.randint(1, 6)))])
        for number in range(count)
    ]


def inputs(folder, form):
    """Writes documents in a form. Returns what a build is given, and its options."""
    folder.mkdir()
    some, more = texts(60, seed=1), texts(40, seed=2)
    rows = ["".join(json.dumps({"body": text}) + "\r\n" for text in each) for each in (some, more)]
    if form == "blank":
        (folder / "a.txt").write_text("\n \t\n" + "\n\n".join(some) + "\n", newline="\r\n", encoding="utf-8")
        (folder / "b.txt").write_bytes(b"\xff\xfe bad bytes\n\n" + "\n\n\n".join(more).encode())
        return [folder / "a.txt", folder / "b.txt"], {}
    if form == "line":
        (folder / "a.txt").write_text("\n".join(text.replace("\n", " ") for text in some), encoding="utf-8")
        (folder / "b.txt.gz").write_bytes(gzip.compress("\n \n".join(t.replace("\n", " ") for t in more).encode()))
        return [folder / "a.txt", folder / "b.txt.gz"], {"documents": "line"}
    if form == "file":
        for number, text in enumerate([*some, *more]):
            (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
        return [folder], {"documents": "file"}
    if form == "jsonl":
        (folder / "a.jsonl").write_text(rows[0] + '{"body": null}\n', encoding="utf-8")
        (folder / "b.jsonl.zst").write_bytes(zstd(rows[1].encode()))
        return [folder / "a.jsonl", folder / "b.jsonl.zst"], {"text_key": "body", "on_error": "skip"}
    if form == "tables":
        rows = [*some[:40], None, *some[41:]]
        (folder / "a.parquet").write_bytes(as_parquet(rows, group=17))
        (folder / "b.arrow").write_bytes(as_arrow_file(rows[3:]))
        return [folder / "b.arrow", folder / "a.parquet"], {"on_error": "skip"}
    assert form == "latin-1"
    (folder / "a.txt").write_text("\n\n".join(some).replace("水", "ä"), encoding="latin-1")
    (folder / "b.txt").write_text("\n\n".join(more).replace("水", "é"), encoding="latin-1")
    return [folder / "a.txt", folder / "b.txt"], {"encoding": "latin-1"}


FORMS = ["blank", "line", "file", "jsonl", "tables", "latin-1"]


@pytest.fixture(scope="module")
def built(tmp_path_factory, vocab):
    """Form → a dataset of it, built in three parts by two threads, with sentences."""
    made = {}

    def of(form):
        if form not in made:
            folder = tmp_path_factory.mktemp("trace")
            named, options = inputs(folder / "text", form)
            options |= SMALL | {"tokenizer": vocab, "sentences": "line", "workers": 2}
            for part in range(3):
                build(named, folder / "out", part=(part, 3), **options)
            made[form] = finish(folder / "out").dataset
        return made[form]

    return of


def random_rows(loader, count, *, seed=0):
    return np.random.default_rng(seed).integers(0, 3 * loader.num_samples, count)


def assert_sources_are_right(loader, positions):
    """The documents have the tokens of the rows in their order, and their texts have the ids of the documents."""
    dataset, traced = loader.shards, documents_of(loader, positions)
    found = with_texts(dataset, traced)
    ids = loader.read(positions).input_ids
    special = np.array(dataset.special_tokens.special_ids)
    special = special[special != dataset.special_tokens.unk]
    tokenizer = load(str(dataset.path))._tokenizer
    by_row = [[] for _ in positions]
    for each in found:
        assert each.text is not None, each
        text_ids = tokenizer.encode(each.text, add_special_tokens=False).ids
        assert text_ids == dataset.document(each.document).tolist()
        assert each.num_tokens == len(text_ids)
        by_row[each.row] += text_ids[each.start : each.stop]
    for row, expected in zip(ids, by_row, strict=True):
        assert row[~np.isin(row, special)].tolist() == expected
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_text_at_the_place_of_each_document_gives_its_ids(built, form):
    dataset = built(form)
    assert verify(dataset.path) == []
    loader = bertdata.Loader(dataset, length=24, masking=None)
    found = assert_sources_are_right(loader, random_rows(loader, 200))
    assert len({each.input for each in found}) > 1
    assert {each.unit for each in found} == ({"row"} if form == "tables" else {"byte"})
    assert len(dataset.splits["train"].shards) > 2


@pytest.mark.parametrize(
    "options",
    [{"samples": "documents"}, {"samples": "packed"}, {"samples": "pairs"}, {"samples": "pairs", "split": "validation"},
     {"shuffle": "blocks", "samples": "packed"}, {"variants": 2}],
    ids=str,
)  # fmt: skip
def test_rows_of_every_kind_are_traced(built, options):
    loader = bertdata.Loader(built("jsonl"), length=20, masking=None, seed=5, **options)
    assert_sources_are_right(loader, random_rows(loader, 200))


def test_every_document_has_the_place_where_it_begins(tmp_path, vocab):
    (tmp_path / "a.txt").write_bytes(b"\n\n  one stone\n\xf0\x9f\n\n\n\ntwo\r\n\r\nthree")
    (tmp_path / "b.parquet").write_bytes(as_parquet(["first", None, "", "fourth"]))
    paths = [tmp_path / "a.txt", tmp_path / "b.parquet"]
    dataset = build(paths, tmp_path / "out", tokenizer=vocab, validation=0, on_error="skip").dataset
    record = Record.read(dataset.path, dataset.manifest)
    shards = dataset.splits["train"].shards
    numbers = [np.load(dataset.path / array_name(shard.name)).tolist() for shard in shards]
    places = [[record.input_and_place(number) for number in each] for each in numbers]
    assert places == [[(0, 2), (0, 20), (0, 27)], [(1, 1), (1, 4)]]
    named = record.named_inputs(dataset.path)
    assert [each.name for each in named] == [str(tmp_path / "a.txt"), str(tmp_path / "b.parquet")]
    assert named[0].size == (tmp_path / "a.txt").stat().st_size


def test_origins_are_no_part_of_the_dataset(tmp_path, vocab):
    """One text in two forms is one dataset, and without its origins it is sound, and traces nothing."""
    some = texts(30, seed=3)
    (tmp_path / "a.txt").write_text("\n\n".join(some), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some), encoding="utf-8")
    made = [build(tmp_path / name, tmp_path / f"{name}.out", tokenizer=vocab).dataset for name in ("a.txt", "b.jsonl")]
    assert made[0].dataset_id == made[1].dataset_id
    files = [{path.name: path.read_bytes() for path in each.path.iterdir() if path.is_file()} for each in made]
    assert files[0] == files[1]
    shutil.rmtree(made[0].path / "origins")
    assert verify(made[0].path) == []
    loader = bertdata.Loader(bertdata.open(made[0].path), length=16, masking=None)
    with refuses("not-stored", "shards"):
        documents_of(loader, np.arange(2))
    shutil.copytree(made[1].path / "origins", made[0].path / "origins")  # of the same dataset, from the other input
    assert {each.input for each in documents_of(loader, np.arange(9))} == {str(tmp_path / "b.jsonl")}


def test_a_text_that_is_not_there_any_more_is_not_shown(tmp_path, vocab):
    some = texts(40, seed=4)
    paths = [tmp_path / name for name in ("kept", "moved", "changed", "short")]
    for path in paths:
        path.write_text("\n\n".join(some), encoding="utf-8")
    dataset = build(paths, tmp_path / "out", tokenizer=vocab).dataset
    (tmp_path / "moved").rename(tmp_path / "elsewhere")
    (tmp_path / "changed").write_text("\n\n".join(some).replace("Document", "Monument"), encoding="utf-8")
    (tmp_path / "short").write_text("\n\n".join(some)[:200], encoding="utf-8")
    (tmp_path / "kept").write_text("\n\n".join([*some, "and a document more"]), encoding="utf-8")
    loader = bertdata.Loader(dataset, length=32, masking=None)
    found = with_texts(dataset, documents_of(loader, np.arange(loader.num_samples)))
    why = {os.path.basename(each.input): each.no_text for each in found}
    assert why["kept"] is None
    assert "moved cannot be read: No such file or directory" in why["moved"]
    assert why["changed"] == "the text at this place is another one now"
    assert why["short"] == "the input has no document at this place any more"
    by_name = {name: [e for e in found if os.path.basename(e.input) == name] for name in why}
    assert all(e.text is None for name in ("moved", "changed") for e in by_name[name])
    assert all(e.text in some for e in by_name["kept"])


def test_an_input_that_was_named_twice_is_traced(tmp_path, vocab):
    (tmp_path / "a").write_text("\n\n".join(texts(10, seed=5)), encoding="utf-8")
    dataset = build([tmp_path / "a", tmp_path / "a"], tmp_path / "out", tokenizer=vocab, validation=0).dataset
    loader = bertdata.Loader(dataset, length=32, masking=None)
    found = with_texts(dataset, documents_of(loader, np.arange(loader.num_samples)))
    assert {each.document for each in found} == set(range(20))
    assert all(each.text for each in found)


def test_what_came_through_a_pipe_is_named(tmp_path, vocab, monkeypatch):
    content = io.BufferedReader(io.BytesIO(make_text(20).encode()))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    dataset = build("-", tmp_path / "out", tokenizer=vocab).dataset
    loader = bertdata.Loader(dataset, length=32, masking=None)
    found = with_texts(dataset, documents_of(loader, np.arange(3)))
    assert {(each.input, each.text) for each in found} == {("-", None)}
    assert all("pipe" in each.no_text for each in found)


def test_a_build_in_place_of_another_leaves_no_origins_of_it(tmp_path, vocab):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).write_text(make_text(60, seed=seed), encoding="utf-8")
    first = build(tmp_path / "a", tmp_path / "out", tokenizer=vocab, **SMALL).dataset
    names = {path.name for path in (first.path / "origins").iterdir()}
    second = build(tmp_path / "b", tmp_path / "out", tokenizer=vocab, overwrite=True, validation=0).dataset
    assert len(names) > 4
    left = {path.name for path in (second.path / "origins").iterdir()}
    assert left == {"origins.json", "inputs.jsonl", "train-00000.npy"}
    assert verify(second.path) == []


def test_nothing_is_written_through_a_link(tmp_path, vocab, corpus):
    build(corpus, tmp_path / "out", tokenizer=vocab)
    shutil.rmtree(tmp_path / "out" / "origins")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").write_text("")
    (tmp_path / "out" / "origins").symlink_to(tmp_path / "elsewhere")
    build(corpus, tmp_path / "out", tokenizer=vocab, overwrite=True)
    assert os.listdir(tmp_path / "elsewhere") == ["thesis.tex"]
    assert not (tmp_path / "out" / "origins").is_symlink()


def test_verify_finds_damaged_origins(tmp_path, vocab, corpus):
    dataset = build(corpus, tmp_path / "out", tokenizer=vocab, validation=0.2).dataset
    folder = dataset.path / "origins"
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (fault,) = verify(dataset.path)
        assert str(path) in fault
        path.unlink()
        assert str(path) in " ".join(verify(dataset.path)) or path.name == "origins.json"
        path.write_bytes(content)
    assert verify(dataset.path) == []


def test_texts_under_urls_are_traced(bucket, tmp_path, vocab):
    some = texts(30, seed=6)
    bucket.put("dump/a.txt", "\n\n".join(some).encode())
    bucket.put("dump/b.txt.gz", gzip.compress("\n\n".join(some).encode()))
    dataset = build(f"{bucket.url}/dump", tmp_path / "out", tokenizer=vocab, validation=0).dataset
    loader = bertdata.Loader(dataset, length=64, masking=None)
    found = assert_sources_are_right(loader, np.arange(loader.num_samples))
    assert {each.input for each in found} == {f"{bucket.url}/dump/a.txt", f"{bucket.url}/dump/b.txt.gz"}
    assert {each.text for each in found} == set(some)


# ------------------------------------------------------------------------------------------------------ steps of a run


def log(folder, *entries):
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / "log.jsonl").write_bytes(lines.encode() + b'[1]\n\xff\n{"step": 9')  # power and process failed
    return folder


def state(dataset, position, rows, **more):
    loader = bertdata.Loader(dataset, length=16, masking=None)
    return {"stream": loader.state_dict() | {"position": position, "global_batch_size": rows} | more}


def test_the_position_of_a_step_follows_from_the_last_change_before_it(tmp_path, dataset):
    run = log(
        tmp_path / "run",
        {"step": 0} | state(dataset, 0, 4),
        {"step": 5, "loss": 2.0},
        {"step": 7} | state(dataset, 28, 6),
        {"step": 7} | state(dataset, 28, 8),  # the run was resumed here
        {"step": 10, "loss": 1.0},
    )
    assert [stream_of(run, step)["position"] for step in (1, 2, 7, 8, 9, 10)] == [0, 4, 24, 28, 36, 44]
    assert [stream_of(run, step)["global_batch_size"] for step in (7, 8)] == [4, 8]
    for step in (0, -1, 11):
        with refuses("out-of-range", "step"):
            stream_of(run, step)
    loader = bertdata.Loader(dataset, length=16, masking=None)
    traced = trace(dataset, run, 8)
    assert traced == with_texts(dataset, documents_of(loader, np.arange(28, 36)))
    assert [each for each in traced if each.row == 3] == trace(dataset, run, 8, row=3)


def test_a_run_that_cannot_be_traced_is_refused_in_a_sentence(tmp_path, dataset):
    with refuses("not-a-run", "run"):
        stream_of(tmp_path / "none", 1)
    with refuses("other-version", "run"):
        stream_of(log(tmp_path / "old", {"step": 1, "loss": 1.0}), 1)
    run = log(tmp_path / "run", {"step": 0} | state(dataset, 0, 4, dataset_id="0" * 64), {"step": 1})
    with refuses("other-dataset", "shards", error=StateError):
        trace(dataset, run, 1)
    resumed = log(tmp_path / "resumed", {"step": 1}, {"step": 5} | state(dataset, 20, 4), {"step": 6})
    with refuses("other-version", "step"):
        stream_of(resumed, 5)
    run = log(tmp_path / "run", {"step": 0} | state(dataset, 0, 4), {"step": 1})
    with refuses("out-of-range", "row"):
        trace(dataset, run, 1, row=4)


def test_the_command_prints_places_and_texts(tmp_path, dataset, corpus):
    run = log(tmp_path / "run", {"step": 0} | state(dataset, 0, 4), {"step": 3})
    arguments = ["trace", str(dataset.path), "--run", str(run), "--step", "2", "--row", "1"]
    shown = succeeds(main, *arguments)
    first, *_ = trace(dataset, run, 2, row=1)
    place = f"row 1: {corpus}, byte {first.place}: tokens {first.start} to {first.stop} of {first.num_tokens}"
    assert f"{place} of document {first.document}\n" in shown.stdout
    assert corpus.read_bytes()[first.place :].startswith(first.text.split("\n")[0].encode())
    lines = [json.loads(line) for line in succeeds(main, *arguments, "--json").stdout.splitlines()]
    assert lines[0]["text"] == first.text
    assert lines[0]["place"] == first.place
    assert shown.stdout.split("\n  ")[1] in first.text
