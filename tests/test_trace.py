"""Where the text of each document was: the origins of a build, and from a batch of a past run back to its documents."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import WORDS, make_text
from helpers import flip, published, refuses, succeeds, without_origins
from sources import as_arrow_file, as_jsonl, as_parquet, as_tsv, build_parts, zstd

import bertdata
from bertdata.cli import main
from bertdata.errors import StateError
from bertdata.format.origins import Record, array_name, origins_of
from bertdata.format.verify import verify
from bertdata.look import trace as look
from bertdata.look.trace import documents_of, stream_of, trace, with_texts
from bertdata.tokenize.load import load
from bertdata.write import build, finish

SMALL = {"shard_size": 3000, "validation": 0.2}
ANYWHERE = ["/"]


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
        (folder / "c.tsv.gz").write_bytes(gzip.compress(as_tsv(more).replace(b"\n", b"\n60\n", 1)))
        return [folder / "b.arrow", folder / "a.parquet", folder / "c.tsv.gz"], {"on_error": "skip"}
    assert form == "latin-1"
    (folder / "a.txt").write_text("\n\n".join(some).replace("水", "ä"), encoding="latin-1")
    (folder / "b.txt").write_text("\n\n".join(more).replace("水", "é"), encoding="latin-1")
    return [folder / "a.txt", folder / "b.txt"], {"encoding": "latin-1"}


FORMS = ["blank", "line", "file", "jsonl", "tables", "latin-1"]


@pytest.fixture(scope="module")
def built(tmp_path_factory, vocab):
    """Form → a dataset of it, built in two parts by two threads, with sentences."""
    made = {}

    def of(form):
        if form not in made:
            folder = tmp_path_factory.mktemp("trace")
            named, options = inputs(folder / "text", form)
            options |= SMALL | {"tokenizer": vocab, "sentences": "line", "workers": 2}
            build_parts(named, folder / "out", 2, **options)
            made[form] = finish(folder / "out").dataset
        return made[form]

    return of


def write_texts(path, texts):
    path.write_text("\n\n".join(texts), encoding="utf-8")
    return path


def traced(dataset):
    """The documents of all rows of 32 tokens, with their texts."""
    loader = bertdata.Loader(dataset, length=32, masking=None)
    return with_texts(dataset, documents_of(loader, np.arange(loader.num_samples)), inputs=ANYWHERE)


def assert_sources_are_right(loader, positions=None, inputs=ANYWHERE):
    """The documents have the tokens of the rows in their order, and their texts have the ids of the documents."""
    if positions is None:
        positions = np.random.default_rng(0).integers(0, 3 * loader.num_samples, 200)
    dataset = loader.shards
    found = with_texts(dataset, documents_of(loader, positions), inputs=inputs)
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
    found = assert_sources_are_right(loader)
    assert len({each.input for each in found}) > 1
    assert {each.unit for each in found} == ({"row"} if form == "tables" else {"byte"})
    assert len(dataset.splits["train"].shards) > 2


@pytest.mark.parametrize(
    "options",
    [
        {"samples": "documents"},
        {"samples": "packed"},
        {"samples": "pairs"},
        {"samples": "pairs", "split": "validation"},
        {"shuffle": "blocks", "samples": "packed"},
        {"variants": 2},
    ],
    ids=str,
)
def test_rows_of_every_kind_are_traced(built, options):
    loader = bertdata.Loader(built("jsonl"), length=20, masking=None, seed=5, **options)
    assert_sources_are_right(loader)


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
    write_texts(tmp_path / "a.txt", some)
    (tmp_path / "b.jsonl").write_bytes(as_jsonl(some))
    made = [build(tmp_path / name, tmp_path / f"{name}.out", tokenizer=vocab).dataset for name in ("a.txt", "b.jsonl")]
    assert made[0].dataset_id == made[1].dataset_id
    assert without_origins(made[0].path) == without_origins(made[1].path)
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
        write_texts(path, some)
    dataset = build(paths, tmp_path / "out", tokenizer=vocab).dataset
    (tmp_path / "moved").rename(tmp_path / "elsewhere")
    write_texts(tmp_path / "changed", [text.replace("Document", "Monument") for text in some])
    (tmp_path / "short").write_text("\n\n".join(some)[:200], encoding="utf-8")
    write_texts(tmp_path / "kept", [*some, "and a document more"])
    found = traced(dataset)
    why = {os.path.basename(each.input): each.no_text for each in found}
    assert why["kept"] is None
    assert "moved cannot be read: No such file or directory" in why["moved"]
    assert why["changed"] == "the text at this place is another one now"
    assert why["short"] == "the input has no document at this place any more"
    by_name = {name: [e for e in found if os.path.basename(e.input) == name] for name in why}
    assert all(e.text is None for name in ("moved", "changed") for e in by_name[name])
    assert all(e.text in some for e in by_name["kept"])


def test_no_input_is_opened_but_those_that_the_user_names(tmp_path, vocab, monkeypatch):
    """A dataset may name any file or URL that its user can read."""
    for folder in ("text", "secret", "text-2"):
        (tmp_path / folder).mkdir()
        write_texts(tmp_path / folder / "a.txt", texts(9, seed=7))
    (tmp_path / "text" / "link.txt").symlink_to(tmp_path / "secret" / "a.txt")
    names = ["text/a.txt", "text/../secret/a.txt", "text/link.txt", "text-2/a.txt"]
    dataset = build([f"{tmp_path}/{name}" for name in names], tmp_path / "out", tokenizer=vocab).dataset
    places = documents_of(bertdata.Loader(dataset, length=32, masking=None), np.arange(9))
    places = [replace(places[0], input=f"{tmp_path}/{name}") for name in names]
    urls = ["s3://bucket/text/a", "s3://bucket/text-2/a", "s3://bucket/text/../a", "s3://bucket/text/%2e%2e/a"]
    places += [replace(places[0], input=url) for url in urls]
    opened = []
    monkeypatch.setattr(look, "_now", lambda name: opened.append(name) or 1 / 0)
    with_texts(dataset, places)
    assert opened == []
    for directory in (tmp_path / "text", "s3://bucket/text/"):
        for place in places:
            with suppress(ZeroDivisionError):
                with_texts(dataset, [place], inputs=[directory])
    assert opened == [f"{tmp_path}/text/a.txt", "s3://bucket/text/a"]


def test_names_that_no_input_can_have_are_damage(tmp_path, vocab, corpus):
    dataset = build(corpus, tmp_path / "out", tokenizer=vocab, validation=0).dataset
    for name in ("a\0b", "\ud800"):
        lines = (json.dumps([name, 1, 1]) + "\n").encode()
        (dataset.path / "origins" / "inputs.jsonl").write_bytes(lines)
        inputs = {"number": 1, "bytes": len(lines), "sha256": hashlib.sha256(lines).hexdigest()}
        record = replace(Record.read(dataset.path, dataset.manifest), inputs=inputs)
        for size in (len(lines), 1 << 50, 1 << 70):  # no more is read than is there
            with refuses("damaged"):
                replace(record, inputs=inputs | {"bytes": size}).named_inputs(dataset.path)


def test_an_input_that_was_named_twice_is_traced(tmp_path, vocab):
    path = write_texts(tmp_path / "a", texts(10, seed=5))
    dataset = build([path, path], tmp_path / "out", tokenizer=vocab, validation=0).dataset
    found = traced(dataset)
    assert {each.document for each in found} == set(range(20))
    assert all(each.text for each in found)


def test_what_came_through_a_pipe_is_named(tmp_path, vocab, monkeypatch):
    content = io.BufferedReader(io.BytesIO(make_text(20).encode()))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    found = traced(build("-", tmp_path / "out", tokenizer=vocab).dataset)
    assert {(each.input, each.text) for each in found} == {("-", None)}
    assert all("pipe" in each.no_text for each in found)


def test_a_build_in_place_of_another_leaves_no_origins_of_it(tmp_path, vocab):
    """Nor is anything removed or written through a link in their place."""
    paths = [write_texts(tmp_path / f"{seed}", texts(40, seed=seed)) for seed in (1, 2)]
    origins = tmp_path / "out" / "origins"
    build(paths[0], tmp_path / "out", tokenizer=vocab, **SMALL)
    assert len(os.listdir(origins)) > 4
    build(paths[1], tmp_path / "out", tokenizer=vocab, overwrite=True, validation=0)
    assert sorted(os.listdir(origins)) == ["inputs.jsonl", "origins.json", "train-00000.npy"]
    assert verify(tmp_path / "out") == []
    origins.rename(tmp_path / "elsewhere")
    origins.symlink_to(tmp_path / "elsewhere")
    before = published(tmp_path / "elsewhere")
    build(paths[0], tmp_path / "out", tokenizer=vocab, overwrite=True)
    assert published(tmp_path / "elsewhere") == before
    assert not origins.is_symlink()


def test_verify_finds_damaged_origins(tmp_path, vocab, corpus):
    dataset = build(corpus, tmp_path / "out", tokenizer=vocab, validation=0.2).dataset
    folder = dataset.path / "origins"
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        flip(path, -1)
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
    found = assert_sources_are_right(loader, np.arange(loader.num_samples), [bucket.url])
    assert {each.input for each in found} == {f"{bucket.url}/dump/a.txt", f"{bucket.url}/dump/b.txt.gz"}
    assert {each.text for each in found} == set(some)


def log(folder, *entries):
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / "log.jsonl").write_bytes(
        lines.encode() + b"[1]\n\xff\n" + b"[" * 100_000 + b'\n{"step": 9'
    )  # power and process failed
    return folder


def state(dataset, position, rows, **more):
    loader = bertdata.Loader(dataset, length=16, masking=None)
    return {"stream": loader.state_dict() | {"position": position, "global_batch_size": rows} | more}


def test_the_position_of_a_step_follows_from_the_last_change_before_it(tmp_path, dataset):
    run = log(
        tmp_path / "run",
        {"step": 0} | state(dataset, 0, 4),
        {"step": 5, "loss": 2.0},
        *({"step": 5, "stream": damaged} for damaged in (None, {"position": 5}, {"global_batch_size": 4})),
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
    traced = trace(dataset, run, 8, inputs=ANYWHERE)
    assert traced == with_texts(dataset, documents_of(loader, np.arange(28, 36)), inputs=ANYWHERE)
    assert [each for each in traced if each.row == 3] == trace(dataset, run, 8, row=3, inputs=ANYWHERE)


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
    assert {json.loads(line)["text"] for line in succeeds(main, *arguments, "--json").stdout.splitlines()} == {None}
    arguments += ["--inputs", corpus.parent]
    shown = succeeds(main, *arguments)
    first, *_ = trace(dataset, run, 2, row=1, inputs=[corpus])
    place = f"row 1: {corpus}, byte {first.place}: tokens {first.start} to {first.stop} of {first.num_tokens}"
    assert f"{place} of document {first.document}\n" in shown.stdout
    assert corpus.read_bytes()[first.place :].startswith(first.text.split("\n")[0].encode())
    lines = [json.loads(line) for line in succeeds(main, *arguments, "--json").stdout.splitlines()]
    assert lines[0]["text"] == first.text
    assert lines[0]["place"] == first.place
    assert shown.stdout.split("\n  ")[1] in first.text


def same(text):
    return text


def test_a_place_has_the_bits_that_the_inputs_leave():
    found = origins_of(np.array([0, 1, 2]), np.array([5 << 40, 0, 6 << 40]), 3)
    assert [divmod(int(each), 1 << 62) for each in found] == [(0, 5 << 40), (1, 0), (2, 6 << 40)]


def test_rows_of_a_format_that_was_named_are_traced(tmp_path, vocab):
    path = tmp_path / "rows"
    path.write_bytes(b"n,text\n1,the stone\n2\n3,river of light\n")
    report = build(path, tmp_path / "out", tokenizer=vocab, validation=0, format="csv", on_error="skip")
    assert report.first_skipped.startswith(f"{path}, row 2: ")
    found = {(each.unit, each.place, each.text) for each in traced(report.dataset)}
    assert found == {("row", 1, "the stone"), ("row", 3, "river of light")}


def test_the_command_runs_a_function_that_it_is_given(tmp_path, vocab):
    path = write_texts(tmp_path / "a", texts(9, seed=8))
    dataset = build(path, tmp_path / "out", tokenizer=vocab, validation=0, map=["test_trace:same"]).dataset
    run = log(tmp_path / "run", {"step": 0} | state(dataset, 0, 4), {"step": 3})
    arguments = ["trace", dataset.path, "--run", run, "--step", 2, "--inputs", tmp_path, "--json"]
    for more, is_shown in (([], False), (["--map", "test_trace:same"], True)):
        lines = succeeds(main, *arguments, *more).stdout.splitlines()
        assert {json.loads(line)["text"] is not None for line in lines} == {is_shown}


def test_a_run_whose_masks_repeat_is_traced(tmp_path, dataset):
    loader = bertdata.Loader(dataset, length=16, masking=None, variants=1)
    first = 3 * loader.num_samples
    run = log(tmp_path / "run", {"step": 0} | state(dataset, first, 4, variants=1), {"step": 1})
    assert trace(dataset, run, 1) == with_texts(dataset, documents_of(loader, np.arange(first, first + 4)))


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_row_that_has_no_text_any_more_is_not_shown(tmp_path, vocab, form):
    path, row = tmp_path / f"a.{form}", {"jsonl": '{{"text": "the stone {}"}}\n', "csv": "{},the stone\n"}[form]
    rows = ["n,text\n"] * (form == "csv") + [row.format(number) for number in range(9)]
    path.write_text("".join(rows))
    dataset = build(path, tmp_path / "out", tokenizer=vocab, validation=0).dataset
    rows[4] = rows[4].replace("text", "body").replace(",", ";")
    path.write_text("".join(rows))
    assert [each.text is None for each in traced(dataset)].count(True) == 1
