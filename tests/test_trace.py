"""Where each document came from: the origins of a build, and from a batch of a past run back to its documents."""

import gzip
import hashlib
import json
import os
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.commands import refused, refuses, succeeds
from support.data import WORDS, build
from support.disk import flip, published, without_origins
from support.sources import as_jsonl, as_parquet, zstd

import bertdata
from bertdata.format.origins import Origins, origins_of
from bertdata.format.verify import verify
from bertdata.tokenize.load import load
from bertrain.commands.trace import main, parts_of, stream_of

SMALL = {"shard_size": 3000, "validation": 0.2}


def texts(count, *, seed):
    """Documents of one to six lines, all different, some of which hold no token."""
    draw = random.Random(seed)
    line = lambda: " ".join(draw.choices([*WORDS, "Häuser", "水"], k=draw.randint(1, 20)))  # noqa: E731
    return [
        "\n".join([f"Document {seed} {number}.", *(line() for _ in range(draw.randint(1, 6)))])
        for number in range(count)
    ]


def write_texts(path, texts):
    path.write_text("\n\n".join(texts), encoding="utf-8")
    return path


def origins_in(dataset):
    """The name of the input and the place of each document."""
    origins = Origins.read(dataset.path, dataset.manifest)
    return [origins.input_and_place(number) for number in range(len(dataset))]


@pytest.mark.parametrize("form", ["txt", "txt.gz", "jsonl", "jsonl.zst"])
def test_a_place_is_the_byte_where_the_document_begins(tmp_path, vocab, form):
    some = texts(60, seed=1)
    content = as_jsonl(some) if "jsonl" in form else "\n\n".join(some).encode()
    packed = {"gz": gzip.compress, "zst": zstd}.get(form.rpartition(".")[2], bytes)(content)
    path = tmp_path / f"a.{form}"
    path.write_bytes(packed)
    dataset = build(path, tmp_path / "out", tokenizer=vocab, validation=0, shard_size=3000, workers=2).dataset
    assert len(dataset.splits["train"]) > 2
    places = [place for name, place in origins_in(dataset) if name == str(path)]
    begins = [content.index(f"Document 1 {number}.".encode()) for number in range(60)]
    assert places == [content.rindex(b"{", 0, begin) if "jsonl" in form else begin for begin in begins]


def test_every_document_has_the_place_where_it_begins(tmp_path, vocab):
    (tmp_path / "a.txt").write_bytes(b"\n\n  one stone\n\xf0\x9f\n\n\n\ntwo\r\n\r\nthree")
    (tmp_path / "b.parquet").write_bytes(as_parquet(["first", None, "", "fourth"]))
    paths = [tmp_path / "a.txt", tmp_path / "b.parquet"]
    dataset = build(paths, tmp_path / "out", tokenizer=vocab, validation=0, on_error="skip").dataset
    first, second = map(str, paths)
    assert origins_in(dataset) == [(first, 2), (first, 20), (first, 27), (second, 1), (second, 4)]
    named = Origins.read(dataset.path, dataset.manifest).named_inputs
    assert named[0].size == (tmp_path / "a.txt").stat().st_size


def test_origins_are_no_part_of_the_dataset(tmp_path, vocab):
    """One text in two forms is one dataset, and without its origins it is sound."""
    some = texts(30, seed=3)
    write_texts(tmp_path / "a.txt", some)
    (tmp_path / "b.jsonl").write_bytes(as_jsonl(some))
    made = [build(tmp_path / name, tmp_path / f"{name}.out", tokenizer=vocab).dataset for name in ("a.txt", "b.jsonl")]
    assert made[0].dataset_id == made[1].dataset_id
    assert without_origins(made[0].path) == without_origins(made[1].path)
    shutil.rmtree(made[0].path / "origins")
    assert verify(made[0].path) == []
    assert Origins.read(made[0].path, made[0].manifest) is None
    shutil.copytree(made[1].path / "origins", made[0].path / "origins")  # of the same dataset, from the other input
    assert {name for name, _ in origins_in(made[0])} == {str(tmp_path / "b.jsonl")}


def test_names_that_no_input_can_have_are_damage(tmp_path, vocab, corpus):
    dataset = build(corpus, tmp_path / "out", tokenizer=vocab, validation=0).dataset
    for name in ("a\0b", "\ud800"):
        lines = (json.dumps([name, 1, 1]) + "\n").encode()
        (dataset.path / "origins" / "inputs.jsonl").write_bytes(lines)
        inputs = {"number": 1, "bytes": len(lines), "sha256": hashlib.sha256(lines).hexdigest()}
        record = replace(Origins.read(dataset.path, dataset.manifest), inputs=inputs)
        for size in (len(lines), 1 << 50, 1 << 70):  # no more is read than is there
            with refuses("damaged"):
                _ = replace(record, inputs=inputs | {"bytes": size}).named_inputs


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


# ----------------------------------------------------------------------------------------------- batches of past runs


def test_a_place_has_the_bits_that_the_inputs_leave():
    found = origins_of(np.array([0, 1, 2]), np.array([5 << 40, 0, 6 << 40]), 3)
    assert [divmod(int(each), 1 << 62) for each in found] == [(0, 5 << 40), (1, 0), (2, 6 << 40)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples": "documents"},
        {"samples": "packed"},
        {"samples": "pairs", "split": "validation"},
        {"shuffle": "blocks", "samples": "packed"},
        {"variants": 2},
    ],
    ids=str,
)
def test_the_parts_of_documents_are_the_tokens_of_the_row(tmp_path, vocab, options):
    path = write_texts(tmp_path / "a", texts(100, seed=2))
    dataset = build(path, tmp_path / "out", tokenizer=vocab, sentences="line", **SMALL).dataset
    loader = bertdata.Loader(dataset, length=20, masking=None, seed=5, **options)
    positions = np.random.default_rng(0).integers(0, 3 * loader.num_samples, 200)
    rows = [[] for _ in positions]
    for part in parts_of(loader, positions):
        ids = dataset.document(part.document)
        assert part.num_tokens == ids.size
        rows[part.row] += ids[part.start : part.stop].tolist()
    special = np.array(dataset.special_tokens.special_ids)
    special = special[special != dataset.special_tokens.unk]
    for row, expected in zip(loader.read(positions).input_ids, rows, strict=True):
        assert row[~np.isin(row, special)].tolist() == expected


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
        {"step": 7} | state(dataset, 28, 6),
        {"step": 7} | state(dataset, 28, 8),  # the run was resumed here
        {"step": 10, "loss": 1.0},
    )
    assert [stream_of(run, step)["position"] for step in (1, 2, 7, 8, 9, 10)] == [0, 4, 24, 28, 36, 44]
    assert [stream_of(run, step)["global_batch_size"] for step in (7, 8)] == [4, 8]
    for step in (0, -1, 11):
        with refuses("out-of-range", "step"):
            stream_of(run, step)


def test_a_run_that_cannot_be_traced_is_refused_in_a_sentence(tmp_path, dataset):
    with refuses("not-a-run", "run"):
        stream_of(tmp_path / "none", 1)
    with refuses("out-of-range", "step", says="has no step"):
        stream_of(log(tmp_path / "old", {"step": 1, "loss": 1.0}), 1)
    resumed = log(tmp_path / "resumed", {"step": 1}, {"step": 5} | state(dataset, 20, 4), {"step": 6})
    with refuses("out-of-range", "step", says="has steps 6 to 6"):
        stream_of(resumed, 5)
    run = log(tmp_path / "run", {"step": 0} | state(dataset, 0, 4, dataset_id="0" * 64), {"step": 1})
    arguments = [run, "--data", dataset.path, "--step", 1]
    refused(main, *arguments, kind="other-dataset", option="data")
    refused(main, *arguments, "--row", 4, kind="out-of-range", option="row")
    for content in (None, "[1]", '{"resolved": {"phases": [{"sources": 1}]}}'):
        if content:
            (run / "run.json").write_text(content)
        refused(main, run, "--step", 1, kind="not-a-run", option="data")


def test_the_command_prints_places_and_texts(tmp_path, dataset, corpus):
    run = log(tmp_path / "run", {"step": 0} | state(dataset, 0, 4), {"step": 3})
    phases = [{"sources": [[str(dataset.path), 1.0]]}]
    (run / "run.json").write_text(json.dumps({"config": {"average": 0.5}, "resolved": {"phases": phases}}))
    shown = succeeds(main, run, "--step", 2, "--row", 1).stdout.splitlines()
    loader = bertdata.Loader(dataset, length=16, masking=None)
    part = next(parts_of(loader, np.array([5])))
    name, place = origins_in(dataset)[part.document]
    assert name == str(corpus)
    document = f"document {part.document} of {dataset.path} ({name}, byte {place})"
    assert shown[0] == f"row 1: {document}, tokens {part.start} to {part.stop} of {part.num_tokens}"
    ids = dataset.document(part.document)[part.start : part.stop].tolist()
    assert shown[1] == f"  {load(str(dataset.path)).decode(ids)}"
