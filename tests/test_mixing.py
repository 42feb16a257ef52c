"""Training on a mix: the command line, losses by source, resuming, ranks, evaluation, and the page that explains it."""

import json
import re
import shutil
from unittest.mock import patch

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import make_text
from training import entries, flags, losses, on_ranks, train

import bertdata
from bertdata.errors import UsageError
from bertdata.look.trace import trace
from bertdata.write import build
from bertrain import config, doctor
from bertrain import pretrain as pretraining
from bertrain.config import Config
from bertrain.evaluate import main as evaluate_main
from bertrain.objectives.losses import classification
from bertrain.runtime.watch import _flat

STEPS = {"steps": 6, "global_batch_size": 7, "micro_batch_size": 3, "log_every": 4}


@pytest.fixture(scope="module")
def other(tmp_path_factory, vocab):
    """A small dataset with the tokenizer of `dataset`."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "text").write_text(make_text(40, seed=5), encoding="utf-8")
    build([folder / "text"], folder / "shards", tokenizer=vocab, sentences="line", validation=0.2)
    return bertdata.open(folder / "shards")


@pytest.fixture
def mix(dataset, other):
    return [[str(dataset.path), 0.7], [str(other.path), 0.3]]


def words(mix):
    return [str(word) for path, weight in mix for word in ("--data", path, weight)]


def without_last(out, *steps):
    for step in steps:
        shutil.rmtree(out / f"step-{step:08d}")


# -------------------------------------------------------------------------------------------------------------- a run


def test_losses_by_source_make_up_the_loss(mix, dataset, other, tmp_path):
    log = [entry for entry in train(mix, tmp_path / "run", **STEPS) if "loss" in entry]
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=32, global_batch_size=7)
    names, tokens, first = [path for path, _ in mix], np.zeros(2), 0
    assert [entry["step"] for entry in log] == [4, 6]
    for entry in log:
        targets = np.zeros(2)
        for _ in range(entry["step"] - first):
            batch = next(loader)
            for source in (0, 1):
                mine = batch.sources == source
                tokens[source] += 32 * mine.sum()
                targets[source] += (batch.targets[mine] != bertdata.IGNORE_INDEX).sum()
        first = entry["step"]
        assert list(entry["sources"]) == names
        found = [entry["sources"][name] for name in names]
        assert [part["tokens"] for part in found] == tokens.tolist()
        assert sum(tokens) == entry["tokens"]
        rows = tokens / 32
        assert [part["epochs"] for part in found] == [
            round(n / source.num_samples, 4) for n, source in zip(rows, loader.sources, strict=True)
        ]
        assert np.dot([part["loss"] for part in found], targets) / targets.sum() == pytest.approx(entry["loss"])
        assert found[0]["loss"] != found[1]["loss"]


def test_the_loss_of_a_row_is_that_of_its_targets():
    logits, targets = torch.randn(6, 9, requires_grad=True), torch.tensor([1, -100, 3, -100, -100, -100])
    plain, told = classification(logits, targets), classification(logits, targets, num_rows=3)
    assert plain.rows is None
    assert torch.equal(plain.sum, told.sum)
    by_hand = torch.nn.functional.cross_entropy(logits, targets, reduction="none").view(3, 2).sum(1)
    assert torch.allclose(told.rows, torch.stack([by_hand, torch.tensor([1.0, 1.0, 0.0])], 1))
    assert not told.rows.requires_grad
    gradients = [torch.autograd.grad(loss.sum, logits)[0] for loss in (plain, told)]
    assert torch.equal(*gradients)
    compiled = torch.compile(classification, backend="eager", fullgraph=True)(logits, targets, num_rows=3)
    assert torch.allclose(compiled.rows, told.rows)
    assert torch.allclose(torch.autograd.grad(compiled.sum, logits)[0], gradients[0])


def test_one_dataset_with_a_weight_is_an_ordinary_run(mix, dataset, tmp_path):
    plain = train(dataset.path, tmp_path / "plain", **STEPS)
    assert losses(train(mix[:1], tmp_path / "run", **STEPS)) == losses(plain)
    assert not any("sources" in entry or "validation_sources" in entry for entry in plain)


def test_pairs_have_a_loss_of_both_objectives_by_source(mix, tmp_path):
    log = train(mix, tmp_path / "run", **STEPS | {"model": "bert-tiny", "objective": "mlm+nsp"})
    for part in next(entry["sources"] for entry in log if "sources" in entry).values():
        assert part.keys() == {"loss", "nsp_loss", "tokens", "epochs"}


def test_a_teacher_that_runs_along_teaches_on_a_mix(mix, dataset, tmp_path):
    quick = {"model": "bert-tiny", "steps": 2, "eval_every": 0, "isolate_documents": True}
    train(dataset.path, tmp_path / "big", **quick)
    log = train(mix, tmp_path / "run", **quick, teacher=str(tmp_path / "big"), micro_batch_size=2)
    entry = next(entry for entry in log if "distil_loss" in entry)
    assert entry["distil_loss"] > 0
    assert all(part["loss"] > 0 for part in entry["sources"].values())


def test_the_rows_of_each_dataset_can_be_traced(mix, dataset, other, tmp_path):
    train(mix, tmp_path / "run", **STEPS)
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=32, masking=None)
    batch, found = loader.read(np.arange(14, 21)), []
    for source, shards in enumerate((dataset, other)):
        traced = trace(shards, tmp_path / "run", 3)
        found.append({each.row for each in traced})
        assert found[-1] == set(np.flatnonzero(batch.sources == source).tolist())
        for each in traced:
            part = " ".join(map(str, shards.document(each.document)[each.start : each.stop]))
            assert f" {part} " in " ".join(map(str, batch.input_ids[each.row]))
    with pytest.raises(UsageError, match="is from another dataset of the mix than"):
        trace(dataset, tmp_path / "run", 3, row=min(found[1]))


def test_longer_rows_add_to_the_tokens_of_each_source(mix, tmp_path):
    options = {"steps": 4, "long_length": 64, "long_share": 0.5, "log_every": 1}
    log = [entry for entry in train(mix, tmp_path / "run", **options) if "loss" in entry]
    for entry in log:
        assert sum(part["tokens"] for part in entry["sources"].values()) == entry["tokens"]
    out = tmp_path / "run"
    without_last(out, 4)
    assert [entry.get("sources") for entry in train(mix, out, **options) if "loss" in entry] == [
        entry["sources"] for entry in log
    ]


# ----------------------------------------------------------------------------------------------- resuming and ranks


@pytest.fixture
def finished(mix, tmp_path):
    train(mix, tmp_path / "run", **STEPS)
    return tmp_path / "run"


def test_a_stopped_run_goes_on_to_the_same_bits(mix, finished):
    whole = entries(finished)
    without_last(finished, 3, 4, 5, 6)
    log = train(mix, finished, **STEPS)
    assert losses(log) == losses(whole)
    assert [entry.get("sources") for entry in log] == [entry.get("sources") for entry in whole]


def test_run_json_repeats_a_mix(mix, finished, tmp_path):
    written = json.loads((finished / "run.json").read_text())
    assert written["config"]["data"] == mix
    assert written["resolved"]["dataset_id"] == [bertdata.open(path).dataset_id for path, _ in mix]
    again = tmp_path / "again"
    pretraining.main(["--config", str(finished / "run.json"), "--out", str(again)], standalone_mode=False)
    assert losses(entries(again)) == losses(entries(finished))


def test_another_mix_does_not_resume(mix, finished, capsys):
    without_last(finished, 6)
    (first, _), (second, _) = mix
    for changed in ([[first, 0.6], [second, 0.4]], [[second, 0.3], [first, 0.7]], first):
        with pytest.raises(SystemExit) as ended:
            train(changed, finished, **STEPS)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert "was trained with other options: this state belongs to another stream: " in said
        assert said.endswith("; give the same, or another --out\n")
        assert "sources was [[" in said
        assert ", 7], [" in said
        assert len(said.splitlines()) == 1
    train([[first, 7], [second, 3]], finished, **STEPS)
    assert f"note: --data was {mix!r} and is" in capsys.readouterr().out


@pytest.mark.dist
def test_two_ranks_have_the_losses_of_one(mix, finished, tmp_path):
    options = [word for word in flags("", tmp_path / "two", **STEPS) if word not in ("--data", "")]
    code, _, err = on_ranks(2, "bertrain.pretrain", [*words(mix), *options])
    assert code == 0, err
    for ours, theirs in zip(entries(finished), entries(tmp_path / "two"), strict=True):
        for name, part in ours.get("sources", {}).items():
            assert theirs["sources"][name] == pytest.approx(part, rel=2e-5)


# --------------------------------------------------------------------------------------------------------- evaluation


def test_each_source_is_evaluated_as_if_it_were_alone(mix, dataset, other, tmp_path, capsys):
    log = train(mix, tmp_path / "run", **STEPS | {"average": 0.5, "steps": 22})
    entry = log[-1]
    assert (
        f"; {mix[0][0]} {entry['validation_sources'][mix[0][0]]['loss']:.4f}, {mix[1][0]} " in capsys.readouterr().out
    )

    for path, _ in mix:
        arguments = ["--checkpoint", str(tmp_path / "run" / "step-00000022"), "--data", path, "--json"]
        alone = json.loads(CliRunner().invoke(evaluate_main, arguments).stdout.splitlines()[-1])
        found = entry["validation_sources"][path]
        assert found == pytest.approx({name: alone[name] for name in ("loss", "accuracy", "targets")}, rel=1e-5)
    parts = [entry["validation_sources"][path] for path, _ in mix]
    for name in ("loss", "accuracy"):
        assert entry[f"validation_{name}"] == pytest.approx(0.7 * parts[0][name] + 0.3 * parts[1][name])
    assert entry["validation_targets"] == parts[0]["targets"] + parts[1]["targets"]
    assert entry["average_loss"] != entry["validation_loss"]


def test_a_source_without_a_validation_split_is_left_out(mix, tmp_path, vocab, capsys):
    (tmp_path / "text").write_text(make_text(20, seed=9), encoding="utf-8")
    build([tmp_path / "text"], tmp_path / "shards", tokenizer=vocab, validation=0)
    log = train([mix[0], [str(tmp_path / "shards"), 1]], tmp_path / "run", **STEPS)
    assert list(log[-1]["validation_sources"]) == [mix[0][0]]
    assert log[-1]["validation_loss"] == pytest.approx(log[-1]["validation_sources"][mix[0][0]]["loss"])
    assert f"{tmp_path / 'shards'} has no validation split, so nothing is evaluated on it" in capsys.readouterr().out


def test_the_loss_by_frequency_is_that_of_the_mix(mix, dataset, other, finished):
    counts = [item.token_counts("train").astype(float) for item in (dataset, other)]
    for each in counts:
        each[list(dataset.special_tokens.special_ids)] = 0
    shares = 0.7 * counts[0] / counts[0].sum() + 0.3 * counts[1] / counts[1].sum()
    shares = shares[shares > 0]
    stated = json.loads((finished / "run.json").read_text())["resolved"]["reference_loss"]["unigram"]
    assert stated == pytest.approx(-(shares * np.log(shares)).sum())


# ------------------------------------------------------------------------------------------------------ command line


def test_the_doctor_says_how_often_each_source_is_read(mix, dataset, other, tmp_path):
    loader = bertdata.Loader([(dataset, 0.7), (other, 0.3)], length=32)
    arguments = [*words(mix), "--out", tmp_path / "run", "--length", 32, "--global-batch-size", 10, "--steps", 100]
    said = CliRunner().invoke(doctor.main, [str(argument) for argument in arguments]).stdout
    for (path, weight), count, source in zip(mix, (700, 300), loader.sources, strict=True):
        n = source.num_samples
        line = f"{path}: {weight} of the rows, {n:,} samples an epoch, read {count / n:.2g} times"
        assert f"PASS  mix        {line}\n" in said
        assert re.search(rf"PASS  shards     {path}: \d+ documents", said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "A", "--data", "B"], "--data A has no weight; give each one its weight: --data a/ 0.7 --data b/"),
        (["--data", "A", "0.7", "--data", "B"], "--data B has no weight"),
        (["--data", "A", "0", "--data", "B", "1"], "each with a weight above 0"),
        (["--data", "A", "nan", "--data", "B", "1"], "each with a weight above 0"),
    ],
)
def test_what_is_no_mix_is_refused(arguments, said):
    result = CliRunner().invoke(pretraining.main, [*arguments, "--out", "nowhere"])
    assert result.exit_code == 2
    assert re.search(said, result.stderr)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "stray"),
    [
        (["A"], "A"),
        (["--data", "A", "x"], "x"),
        (["--data", "A", "--global-batch-size", "64", "128"], "128"),
        (["--data", "A", "--data", "B", "0.3", "--grow-at", "0.2", "0.5"], "0.5"),
    ],
)
def test_a_word_that_follows_no_data_is_no_weight(arguments, stray):
    result = CliRunner().invoke(pretraining.main, [*arguments, "--out", "nowhere"])
    assert result.exit_code == 2
    assert f"unexpected extra argument ({stray})" in result.stderr


@pytest.mark.parametrize("first", [["--data", "A", "0.7"], ["--data=A", "0.7"]])
def test_a_weight_follows_its_data(first):
    with patch.object(pretraining, "pretrain") as run:
        command = config.command(run)
        done = CliRunner().invoke(command, [*first, "--out", "x", "--data", "B", ".3", "--lr", "1e-3"])
    assert done.exit_code == 0, done.stderr
    assert run.call_args.args[0].data == [["A", 0.7], ["B", 0.3]]


def test_a_mix_and_a_teachers_cache_are_refused(mix):
    with pytest.raises(
        UsageError, match="--teacher-cache holds answers to the rows of one dataset, and --data names 2"
    ):
        Config(data=mix, out="y", teacher_cache="answers")


def test_a_run_json_with_anything_else_for_data_is_refused():
    for data in ([], 3, [["a"]], [["a", 1], "b"], [["", 1]], {"a": 1}):
        with pytest.raises(UsageError, match="--data is "):
            Config(data=data, out="y")
    assert Config(data=[["a", 7]], out="y").data == "a"


def test_tensorboard_gets_the_numbers_of_each_source():
    entry = {"step": 1, "loss": 2.0, "sources": {"a": {"loss": 3.0}, "b": {"loss": None}}}
    assert dict(_flat(entry)) == {"step": 1, "loss": 2.0, "sources/a/loss": 3.0, "sources/b/loss": None}
