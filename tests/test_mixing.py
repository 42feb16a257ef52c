"""Training on a mix: the command line, the log, resuming, ranks, evaluation, and the page that explains it."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from support.commands import invoke, json_of, succeeds
from support.data import built, make_text
from support.runs import entries, flags, train

import bertdata
from bertrain.cli import command
from bertrain.commands import doctor
from bertrain.commands.evaluate import main as evaluate_main
from bertrain.config import Config


@pytest.fixture(scope="module")
def mix(dataset, other):
    return [[str(dataset.path), 0.7], [str(other.path), 0.3]]


@pytest.fixture(scope="module")
def mixed(once, mix):
    """The directory of a run of six steps on the mix. Tests must not change its files."""
    options = {"model": "bert-tiny", "steps": 6, "global_batch_size": 7, "micro_batch_size": 3}
    return once("mixed", lambda folder: train(mix, folder / "run", **options)) / "run"


def test_the_log_has_the_tokens_and_epochs_of_each_source(mix, mixed, dataset, other):
    log = [entry for entry in entries(mixed) if "loss" in entry]
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=32)
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5, 6]
    for entry in log:
        counts, expected = loader.counts(7 * entry["step"]), {}
        for (path, _), count, source in zip(mix, counts, loader.sources, strict=True):
            expected[path] = {"tokens": 32 * count, "epochs": round(count / source.num_samples, 4)}
        assert entry["sources"] == expected
        assert entry["tokens"] == 32 * sum(counts)


def test_each_source_with_a_validation_split_is_evaluated_as_if_it_were_alone(mix, tmp_path, vocab, capsys):
    built(tmp_path, make_text(20, seed=9), tokenizer=vocab, validation=0)
    data = [[mix[0][0], 7], [mix[1][0], 3], [str(tmp_path / "shards"), 1]]
    log = train(data, tmp_path / "run", steps=3, save_every=3, model="bert-tiny")
    assert f"warning: {tmp_path / 'shards'} " in capsys.readouterr().out
    entry = log[-1]
    assert list(entry["validation_sources"]) == [path for path, _ in mix]
    for path, _ in mix:
        arguments = ["--checkpoint", tmp_path / "run" / "step-00000003", "--data", path]
        alone = json_of(evaluate_main, *arguments)
        expected = {name: alone[name] for name in ("loss", "accuracy", "targets")}
        assert entry["validation_sources"][path] == pytest.approx(expected, rel=1e-5)
    parts = [entry["validation_sources"][path] for path, _ in mix]
    for name in ("loss", "accuracy"):
        assert entry[f"validation_{name}"] == pytest.approx(0.7 * parts[0][name] + 0.3 * parts[1][name])
    assert entry["validation_targets"] == parts[0]["targets"] + parts[1]["targets"]


def test_the_loss_by_frequency_is_that_of_the_mix(dataset, other, mixed):
    counts = [item.token_counts("train").astype(float) for item in (dataset, other)]
    for each in counts:
        each[list(dataset.special_tokens.special_ids)] = 0
    shares = 0.7 * counts[0] / counts[0].sum() + 0.3 * counts[1] / counts[1].sum()
    shares = shares[shares > 0]
    stated = json.loads((mixed / "run.json").read_text())["resolved"]["reference_loss"]["unigram"]
    assert stated == pytest.approx(-(shares * np.log(shares)).sum())


def test_the_doctor_says_how_often_each_source_is_read(mix, dataset, other, tmp_path):
    options = {"length": 32, "global_batch_size": 10, "steps": 100, "model": "bert-tiny"}
    lines = invoke(doctor.main, *flags(mix, tmp_path / "run", **options)).stdout.splitlines()
    lines = [line for line in lines if line.startswith("PASS  mix ")]
    for line, (path, weight), count, data in zip(lines, mix, (700, 300), (dataset, other), strict=True):
        n = bertdata.Loader(data, length=32).num_samples
        assert all(value in line for value in (f"{path}: ", f" {weight} ", f"{n:,} ", f" {count / n:.2g} "))


def test_weights_are_in_the_order_of_the_datasets_and_not_behind_them():
    run = Mock()
    result = invoke(command(run), "--data", "A", "0.7", "--out", "nowhere")
    assert (result.exit_code, "(0.7)" in result.stderr) == (2, True)
    succeeds(command(run), "--data", "A", "--weights=0.7,.3", "--out", "x", "--data", "B", "--lr", "1e-3")
    assert (run.call_args.args[0].data, run.call_args.args[0].weights) == (("A", "B"), (0.7, 0.3))
    assert Config.make(data="a").data == Config.make(data=["a"]).data == ("a",)
