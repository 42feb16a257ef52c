"""Training on a mix: the command line, the log, resuming, ranks, evaluation, and the page that explains it."""

import json
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
from support.commands import invoke, json_of, refused, succeeds
from support.data import built, make_text
from support.runs import QUIET, changing, entries, flags, remove_after, train

import bertdata
from bertrain import pretrain as pretraining
from bertrain.cli import command
from bertrain.commands import doctor
from bertrain.commands.evaluate import main as evaluate_main
from bertrain.commands.trace import loader_of, main, parts_of, stream_of
from bertrain.config import Config

STEPS = {"model": "bert-tiny", "steps": 6, "global_batch_size": 7, "micro_batch_size": 3, "log_every": 4}
QUICK = {"model": "bert-tiny", "steps": 1, "eval_every": 0}


@pytest.fixture(scope="module")
def mix(dataset, other):
    return [[str(dataset.path), 0.7], [str(other.path), 0.3]]


@pytest.fixture(scope="module")
def mixed(once, mix):
    """The directory of a run of six steps on the mix. Tests must not change its files."""
    return once("mixed", lambda folder: train(mix, folder / "run", **STEPS)) / "run"


@pytest.fixture
def finished(mixed, tmp_path):
    """A copy of `mixed`."""
    return shutil.copytree(mixed, tmp_path / "run")


def test_the_log_has_the_tokens_and_epochs_of_each_source(mix, mixed, dataset, other):
    log = [entry for entry in entries(mixed) if "loss" in entry]
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=32, global_batch_size=7)
    names, tokens, first = [path for path, _ in mix], np.zeros(2), 0
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5, 6]
    for entry in log:
        for _ in range(entry["step"] - first):
            batch = next(loader)
            for source in (0, 1):
                tokens[source] += 32 * (batch.sources == source).sum()
        first = entry["step"]
        assert list(entry["sources"]) == names
        parts = [entry["sources"][name] for name in names]
        assert [part["tokens"] for part in parts] == tokens.tolist()
        assert sum(tokens) == entry["tokens"]
        rows = tokens / 32
        epochs = [round(n / source.num_samples, 4) for n, source in zip(rows, loader.sources, strict=True)]
        assert [part["epochs"] for part in parts] == epochs


def test_a_dataset_that_a_phase_leaves_out_keeps_its_epochs_in_the_log(mix, tmp_path):
    (one, _), (other, _) = mix
    phases = changing(0.5, data=[[str(one), str(other)], [str(other)]], weights=["1,1", None])
    log = train([*mix], tmp_path / "run", **QUIET | {"steps": 4, "phase": phases})
    entries = [entry["sources"] for entry in log if "loss" in entry]
    assert [round(entries[n][str(one)]["epochs"], 4) for n in (1, 2, 3)] == [entries[1][str(one)]["epochs"]] * 3
    assert entries[1][str(one)]["epochs"] > 0


def test_a_teacher_that_runs_along_teaches_on_a_mix(mix, bert_run, tmp_path):
    log = train(mix, tmp_path / "run", **QUICK, teacher=str(bert_run), micro_batch_size=2, isolate_documents=True)
    entry = next(entry for entry in log if "distil_loss" in entry)
    assert entry["distil_loss"] > 0


def assert_traced(datasets, run, step, batch):
    """The trace of a step names the rows of each dataset, and the pieces of documents that they have."""
    stream = stream_of(run, step)
    loader = loader_of(stream, [shards.path for shards in datasets])
    parts = [*parts_of(loader, stream["position"] + np.arange(stream["global_batch_size"]))]
    assert {part.row for part in parts} == {*range(len(batch.sources))}
    for part in parts:
        assert part.source == batch.sources[part.row]
        ids = " ".join(map(str, datasets[part.source].document(part.document)[part.start : part.stop]))
        assert f" {ids} " in " ".join(map(str, batch.input_ids[part.row]))


def test_the_rows_of_each_dataset_can_be_traced(mixed, dataset, other):
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=32, masking=None)
    assert_traced((dataset, other), mixed, 3, loader.read(np.arange(14, 21)))
    shown = succeeds(main, mixed, "--step", 3).stdout
    assert all(f" of {shards.path} (" in shown for shards in (dataset, other))


def test_rows_of_a_mix_that_begins_later_are_traced(mix, dataset, other, tmp_path):
    """Its datasets have been read before, each so far."""
    paths = [path for path, _ in mix]
    phases = [{"steps": 2, "data": paths[0], "weights": []}, {"steps": 2, "data": paths, "weights": [0.7, 0.3]}]
    train(mix, tmp_path / "run", phase=phases, **{name: QUICK[name] for name in ("model", "eval_every")})
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=32, masking=None, starts=[12, 0])
    assert_traced((dataset, other), tmp_path / "run", 4, loader.read(np.arange(6, 12)))


def test_longer_rows_add_to_the_tokens_of_each_source(mix, tmp_path):
    options = QUICK | {"steps": 4, "phase": changing(0.5, length=[32, 64])}
    log = [entry for entry in train(mix, tmp_path / "run", **options) if "loss" in entry]
    for entry in log:
        assert sum(part["tokens"] for part in entry["sources"].values()) == entry["tokens"]
    remove_after(tmp_path / "run", 3)
    again = [entry for entry in train(mix, tmp_path / "run", **options) if "loss" in entry]
    assert [entry["sources"] for entry in again] == [entry["sources"] for entry in log]


def test_another_mix_does_not_resume(mix, finished):
    remove_after(finished, 5)
    (first, _), (second, _) = mix
    for changed in ([[first, 0.6], [second, 0.4]], [[second, 0.3], [first, 0.7]], [[first, 1]]):
        given = flags(changed, finished, **STEPS)
        refused(pretraining.main, *given, kind="other-settings", option="data")


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one(mix, mixed, tmp_path):
    for ours, theirs in zip(entries(mixed), train(mix, tmp_path / "two", ranks=2, **STEPS), strict=True):
        for name, part in ours.get("sources", {}).items():
            assert theirs["sources"][name] == pytest.approx(part, rel=2e-5)


def test_each_source_is_evaluated_as_if_it_were_alone(mix, tmp_path):
    log = train(mix, tmp_path / "run", steps=3, eval_every=0, save_every=3, model="bert-tiny")
    entry = log[-1]
    for path, _ in mix:
        arguments = ["--checkpoint", tmp_path / "run" / "step-00000003", "--data", path]
        alone = json_of(evaluate_main, *arguments)
        expected = {name: alone[name] for name in ("loss", "accuracy", "targets")}
        assert entry["validation_sources"][path] == pytest.approx(expected, rel=1e-5)
    parts = [entry["validation_sources"][path] for path, _ in mix]
    for name in ("loss", "accuracy"):
        assert entry[f"validation_{name}"] == pytest.approx(0.7 * parts[0][name] + 0.3 * parts[1][name])
    assert entry["validation_targets"] == parts[0]["targets"] + parts[1]["targets"]


def test_a_source_without_a_validation_split_is_left_out(mix, tmp_path, vocab, capsys):
    built(tmp_path, make_text(20, seed=9), tokenizer=vocab, validation=0)
    log = train([mix[0], [str(tmp_path / "shards"), 1]], tmp_path / "run", steps=1, model="bert-tiny")
    assert list(log[-1]["validation_sources"]) == [mix[0][0]]
    assert log[-1]["validation_loss"] == pytest.approx(log[-1]["validation_sources"][mix[0][0]]["loss"])
    assert f"warning: {tmp_path / 'shards'} " in capsys.readouterr().out


def test_the_loss_by_frequency_is_that_of_the_mix(dataset, other, mixed):
    counts = [item.token_counts("train").astype(float) for item in (dataset, other)]
    for each in counts:
        each[list(dataset.special_tokens.special_ids)] = 0
    shares = 0.7 * counts[0] / counts[0].sum() + 0.3 * counts[1] / counts[1].sum()
    shares = shares[shares > 0]
    stated = json.loads((mixed / "run.json").read_text())["resolved"]["reference_loss"]["unigram"]
    assert stated == pytest.approx(-(shares * np.log(shares)).sum())


def test_the_doctor_says_how_often_each_source_is_read(mix, dataset, other, tmp_path):
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=32)
    options = {"length": 32, "global_batch_size": 10, "steps": 100, "model": "bert-tiny"}
    lines = invoke(doctor.main, *flags(mix, tmp_path / "run", **options)).stdout.splitlines()
    for number, ((path, weight), count, source) in enumerate(zip(mix, (700, 300), loader.sources, strict=True)):
        line = [line for line in lines if line.startswith("PASS  mix ")][number]
        for value in (f"{path}: ", f" {weight} ", f"{source.num_samples:,} ", f" {count / source.num_samples:.2g} "):
            assert value in line
        assert [line for line in lines if line.startswith("PASS  shards ")][number].split()[2] == f"{path}:"


def test_a_word_behind_a_dataset_is_refused():
    result = invoke(pretraining.main, "--data", "A", "0.7", "--out", "nowhere")
    assert result.exit_code == 2
    assert "(0.7)" in result.stderr


def test_weights_are_in_the_order_of_the_datasets():
    run = Mock()
    succeeds(command(run), "--data", "A", "--weights=0.7,.3", "--out", "x", "--data", "B", "--lr", "1e-3")
    assert (run.call_args.args[0].data, run.call_args.args[0].weights) == (("A", "B"), (0.7, 0.3))
    assert Config.make(data="a").data == Config.make(data=["a"]).data == ("a",)
