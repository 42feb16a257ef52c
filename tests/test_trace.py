"""Where each document came from: the origins of a build, and from a batch of a past run back to its documents."""

import json
import shutil

import numpy as np
import pytest
from support.commands import refused, refuses, succeeds
from support.data import build, faults_of, make_text
from support.disk import published, put, reseal, sha256, unsealed, without_origins, write
from support.encoding import load
from support.sources import as_jsonl, made

import bertdata
from bertdata.format.origins import Origins, origins_of
from bertrain.commands.trace import loader_of, parts_of, stream_of


def origins_in(dataset):
    """The name of the input and the place of each document."""
    origins = Origins.read(dataset.path, dataset.manifest)
    return [origins.input_and_place(number) for number in range(len(dataset))]


def test_a_place_is_the_byte_or_the_row_where_the_document_begins(tmp_path, vocab):
    rows, expected = make_text(60).split("\n\n"), []
    for number, kind in enumerate(["text", "gzip", "jsonl", "parquet"]):
        path, documents = made(tmp_path, number, kind, ["", *rows[:30], " ", *rows[30:]])
        first = int(kind == "parquet")  # rows are counted from 1
        expected += [(str(path), first + begin) for begin, text in documents if text.strip()]
    options = {"tokenizer": vocab, "validation": 0, "shard_size": 3000, "workers": 2, "documents": "line"}
    paths = list(dict.fromkeys(name for name, _ in expected))
    dataset = build(paths, tmp_path / "out", **options).dataset
    assert len(dataset.splits["train"]) > 2
    assert origins_in(dataset) == expected
    assert Origins.read(dataset.path, dataset.manifest).named_inputs[-1].size == path.stat().st_size
    large = origins_of(np.array([0, 1, 2]), np.array([5 << 40, 0, 6 << 40]), 3)  # which duplicates are told apart by
    assert [divmod(int(each), 1 << 62) for each in large] == [(0, 5 << 40), (1, 0), (2, 6 << 40)]


def test_origins_are_no_part_of_the_dataset(tmp_path, vocab):
    """One text in two forms is one dataset, and without its origins it is sound."""
    (tmp_path / "a.txt").write_text(make_text(30))
    (tmp_path / "b.jsonl").write_bytes(as_jsonl(make_text(30).rstrip().split("\n\n")))
    made = [build(tmp_path / name, tmp_path / f"{name}.out", tokenizer=vocab).dataset for name in ("a.txt", "b.jsonl")]
    assert made[0].dataset_id == made[1].dataset_id
    assert without_origins(made[0].path) == without_origins(made[1].path)
    shutil.rmtree(made[0].path / "origins")
    assert faults_of(made[0].path) == []
    assert Origins.read(made[0].path, made[0].manifest) is None
    shutil.copytree(made[1].path / "origins", made[0].path / "origins")  # of the same dataset, from the other input
    assert {name for name, _ in origins_in(made[0])} == {str(tmp_path / "b.jsonl")}


def test_sealed_origins_that_break_a_rule_are_damage(tmp_path, dataset, limit):
    """The last origin is of an input that there is not, or the eighth is above the ninth."""
    limit(verified_together=8)
    origins = shutil.copytree(dataset.path, tmp_path / "copy") / "origins"
    file, record = origins / "train-00000.npy", unsealed(origins / "origins.json")
    good = file.read_bytes()
    for content in (good[:-8] + b"\xff" * 8, good[:184] + good[192:200] + good[184:192] + good[200:]):
        put(file, content)
        record["shards"]["train-00000"] = sha256(content)
        reseal(origins / "origins.json", record)
        assert [str(file) in fault for fault in faults_of(origins.parent)] == [True]
    for name in ("a\0b", "\ud800"):
        line = json.dumps([name, 1, 1]).encode()
        put(origins / "inputs.jsonl", line)
        for size in (len(line), 1 << 50, 1 << 70):  # no more is read than is there
            record["inputs"] = {"number": 1, "bytes": size, "sha256": sha256(line)}
            reseal(origins / "origins.json", record)
            with refuses("damaged"):
                _ = Origins.read(origins.parent, dataset.manifest).named_inputs


def test_a_build_in_place_of_another_leaves_no_origins_of_it(tmp_path, vocab, corpus, dataset):
    """Nor is anything removed or written through a link in their place."""
    origins = shutil.copytree(dataset.path, tmp_path / "out") / "origins"
    build(corpus, tmp_path / "out", tokenizer=vocab, overwrite=True, validation=0)
    assert {path.name for path in origins.iterdir()} == {"inputs.jsonl", "origins.json", "train-00000.npy"}
    origins.rename(tmp_path / "elsewhere")
    origins.symlink_to(tmp_path / "elsewhere")
    before = published(tmp_path / "elsewhere")
    build(corpus, tmp_path / "out", tokenizer=vocab, overwrite=True)
    assert published(tmp_path / "elsewhere") == before
    assert not origins.is_symlink()


@pytest.mark.parametrize(
    ("is_mix", "options"),
    [
        (False, {}),
        (False, {"samples": "documents"}),
        (False, {"samples": "packed", "split": "validation"}),
        (False, {"samples": "pairs", "short_seq_prob": 0.5, "variants": 2}),
        (True, {"shuffle": "blocks", "samples": "packed"}),
        (True, {"starts": [12, 0]}),
    ],
)
def test_the_parts_of_documents_are_the_tokens_of_the_row(dataset, other, is_mix, options):
    """By a loader that follows from a state."""
    shards = [(dataset, 0.7), (other, 0.3)] if is_mix else dataset
    loader = bertdata.Loader(shards, length=20, masking=None, seed=5, **options)
    positions = np.random.default_rng(0).integers(0, 3 * loader.num_samples, 200)
    rows = [[] for _ in positions]
    for part in parts_of(loader_of(loader.state_dict(), [dataset.path, other.path]), positions):
        ids = loader.sources[part.source].dataset.document(part.document)
        assert part.num_tokens == ids.size
        rows[part.row] += ids[part.start : part.stop].tolist()
    special = np.array(dataset.special_tokens.special_ids)
    special = special[special != dataset.special_tokens.unk]
    for row, expected in zip(loader.read(positions).input_ids, rows, strict=True):
        assert row[~np.isin(row, special)].tolist() == expected


def log(folder, *entries):
    """A run whose log ends where power and process failed."""
    lines = [*(json.dumps(entry).encode() for entry in entries), b"[1]", b"\xff", b"[" * 100_000, b'{"step": 9']
    return put(folder / "log.jsonl", b"\n".join(lines)).parent


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
    streams = [stream_of(run, step) for step in (1, 2, 7, 8, 9, 10)]
    assert [each["position"] for each in streams] == [0, 4, 24, 28, 36, 44]
    assert [each["global_batch_size"] for each in streams] == [4, 4, 4, 8, 8, 8]


def test_a_run_that_cannot_be_traced_is_refused_in_a_sentence(tmp_path, dataset):
    run = log(tmp_path / "run", {"step": 5} | state(dataset, 0, 4, dataset_id="0" * 64), {"step": 6})
    no_streams = log(tmp_path / "old", {"step": 1, "loss": 1.0})
    data = ["--data", dataset.path]
    for arguments, kind, option, says in (
        ([tmp_path / "none", "--step", 1], "not-a-run", "run", ""),
        ([no_streams, "--step", 1], "out-of-range", "step", "has no step"),
        *[([run, "--step", step], "out-of-range", "step", "has steps 6 to 6") for step in (-1, 0, 5, 7)],
        ([run, "--step", 6, *data], "other-dataset", "data", ""),
        ([run, "--step", 6, "--row", 4, *data], "out-of-range", "row", ""),
        ([run, "--step", 6], "not-a-run", "data", ""),
    ):
        refused("bertrain", "trace", *arguments, kind=kind, option=option, says=says)


def test_the_command_prints_places_and_texts(tmp_path, dataset, other, corpus):
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=16, masking=None)
    run = log(tmp_path / "run", {"step": 0, "stream": loader.state_dict() | {"global_batch_size": 40}}, {"step": 3})
    phases = [{"sources": [[str(dataset.path), 0.7], [str(other.path), 0.3]]}]
    write(run / "run.json", json.dumps({"config": {"average": 0.5}, "resolved": {"phases": phases}}))
    places, expected, tokenizer = [origins_in(dataset), origins_in(other)], [], load(dataset.path)
    for part in parts_of(loader, np.arange(40, 80)):
        data, (name, place) = (dataset, other)[part.source], places[part.source][part.document]
        assert part.source or name == str(corpus)
        document = f"document {part.document} of {data.path} ({name}, byte {place})"
        expected.append(f"row {part.row}: {document}, tokens {part.start} to {part.stop} of {part.num_tokens}")
        expected.append("  " + tokenizer.decode(data.document(part.document)[part.start : part.stop].tolist()))
    trace = "bertrain", "trace", run, "--step", 2
    assert succeeds(*trace).stdout.splitlines() == expected
    first = next(number for number, line in enumerate(expected) if line.startswith("row 5:"))
    assert succeeds(*trace, "--row", 5).stdout.splitlines()[:2] == expected[first : first + 2]
