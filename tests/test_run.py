"""What a run can be told besides the usual: objectives, weights to begin with, time, longer rows, signals, checks."""

import functools
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import write_dataset
from training import SMALL, end_of, entries, flags, launch, learner, losses, on_ranks, start_ranks, train
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

import bertdata
from bertdata import Masking
from bertdata.errors import DatasetError, UsageError
from bertdata.look.trace import stream_of
from bertdata.torch import tensors
from bertdata.write import build
from bertrain import doctor, evaluate, feed, plot, pretrain
from bertrain import run as runs
from bertrain.config import Config
from bertrain.models import build as model
from bertrain.plan import Plan
from bertrain.run import Run
from bertrain.runtime import checkpoint, clock, rates, stop, watch, writer
from bertrain.runtime.dist import World

CPU = torch.device("cpu")


def last_checkpoint(run):
    return sorted(run.glob("step-*"))[-1]


# -------------------------------------------------------------------------------------------------------- objectives


def test_next_sentences_are_predicted_and_logged_apart(dataset, tmp_path):
    run = tmp_path / "run"
    log = train(dataset.path, run, model="bert-tiny", objective="mlm+nsp", steps=6, lr=1e-3)
    steps = [entry for entry in log if "lr" in entry]
    assert all(0.3 < entry["nsp_loss"] < 1.5 and 0 <= entry["nsp_accuracy"] <= 1 for entry in steps)
    saved = last_checkpoint(run)
    assert BertForPreTraining.from_pretrained(saved).config.architectures == ["BertForPreTraining"]
    AutoModelForMaskedLM.from_pretrained(saved)
    for name in ("a", "b"):  # stopped and resumed to the same bits
        train(dataset.path, tmp_path / name, model="bert-tiny", objective="mlm+nsp", steps=6, lr=1e-3)
    assert [e["nsp_loss"] for e in entries(tmp_path / "a") if "lr" in e] == [e["nsp_loss"] for e in steps]


def test_losses_of_pairs_are_those_of_transformers(dataset):
    batch = next(bertdata.Loader(dataset, length=32, samples="pairs", global_batch_size=5))
    weights = model.build("bert-tiny", dataset.special_tokens, length=32, seed=0, nsp=True)[0]
    losses = learner(weights, "mlm", "nsp")(**next(feed.micro_batches(batch, size=5, count=1, device=CPU)))
    given = tensors(batch)
    theirs = weights(**given)
    targets = feed.num_targets(batch)
    torch.testing.assert_close(losses["mlm"].sum / targets + losses["nsp"].sum / 5, theirs.loss)
    assert (
        losses["nsp"].num_correct == (theirs.seq_relationship_logits.argmax(-1) == given["next_sentence_label"]).sum()
    )


def test_next_sentences_need_a_bert(dataset, tmp_path):
    with pytest.raises(UsageError, match="nsp needs a model with a head for next sentences"):
        model.build("modernbert-tiny", dataset.special_tokens, length=32, seed=0, nsp=True)[0]


@pytest.mark.parametrize("name", ["bert-tiny", "modernbert-tiny"])
def test_isolated_documents_train_evaluate_and_load(dataset, tmp_path, name):
    run = tmp_path / "run"
    log = train(dataset.path, run, model=name, isolate_documents=True, steps=4)
    assert all(math.isfinite(entry["loss"]) for entry in log if "lr" in entry)
    assert json.loads((last_checkpoint(run) / "trainer.json").read_text())["loader"]["samples"] == "packed"
    done = CliRunner().invoke(evaluate.main, ["--checkpoint", str(run), "--data", str(dataset.path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loss"] == pytest.approx([e for e in log if "validation_loss" in e][-1]["validation_loss"], rel=1e-6)
    assert AutoModelForMaskedLM.from_pretrained(last_checkpoint(run)).config._attn_implementation != "bertrain_isolated"


# ------------------------------------------------------------------------------------------------ weights to begin with


def test_a_run_begins_with_given_weights(dataset, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    train(dataset.path, first, model="bert-tiny", steps=30, lr=3e-3, save_every=30)
    given = str(last_checkpoint(first))
    weights, warnings = model.start_from(given, dataset, length=32)
    assert warnings == []
    saved = model.load(last_checkpoint(first)).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.state_dict().items())
    train(dataset.path, second, init=given, steps=2, lr=1e-5, save_every=1)
    before = [e["loss"] for e in entries(first) if "lr" in e]
    after = [e["loss"] for e in entries(second) if "lr" in e]
    assert after[0] < before[0] - 0.5
    capsys.readouterr()
    train(dataset.path, second, init=given, steps=3, lr=1e-5)  # goes on from its own checkpoint
    assert "resumed after step 2" in capsys.readouterr().out


def test_heads_that_are_missing_are_named(dataset, tmp_path):
    train(dataset.path, tmp_path / "run", model="bert-tiny", steps=1)
    _, warnings = model.start_from(str(last_checkpoint(tmp_path / "run")), dataset, length=32, nsp=True)
    assert len(warnings) == 1
    assert "has no weights for bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship" in warnings[0]


def test_weights_that_do_not_fit_are_refused(dataset, corpus, tmp_path, vocab):
    train(dataset.path, tmp_path / "run", model="bert-tiny", steps=1)
    given = str(last_checkpoint(tmp_path / "run"))
    build([corpus], tmp_path / "other", vocab_size=60)
    with pytest.raises(UsageError, match="is not the one .* was built with"):
        model.start_from(given, bertdata.open(tmp_path / "other"), length=32)
    with pytest.raises(UsageError, match="--length 600 is more than the 512 positions"):
        model.start_from(given, dataset, length=600)
    with pytest.raises(UsageError, match="is no directory"):
        model.start_from("./nothing", dataset, length=32)
    with pytest.raises(DatasetError, match="holds no masked language model"):
        model.start_from(str(tmp_path), dataset, length=32)


# ----------------------------------------------------------------------------------------------------- time and length


def test_a_budget_of_time_ends_a_run_and_the_rate_with_it(dataset, tmp_path):
    log = [e for e in train(dataset.path, tmp_path / "run", budget="4s", eval_every=0, save_every=10**6) if "lr" in e]
    assert 3.9 < log[-1]["seconds"] < 30
    rates = [entry["lr"] for entry in log]
    assert max(rates) <= 3e-3
    assert rates[-1] < 0.2 * max(rates)
    assert rates.index(max(rates)) < 0.5 * len(rates)
    saved = checkpoint.read_trainer(last_checkpoint(tmp_path / "run"))
    assert saved["spent_s"] >= 4
    before = len(log)
    assert (
        len([e for e in train(dataset.path, tmp_path / "run", budget="4s") if "lr" in e]) == before
    )  # nothing is left


@pytest.fixture
def seconds(monkeypatch):
    """The time of clocks, which stands still unless a test moves it."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


def test_a_budget_is_of_training_alone(dataset, tmp_path, monkeypatch, capsys, seconds):
    """A step takes 1 second, an evaluation 100, its predictions 30, and a copy for a checkpoint 1,000."""

    def costs(owner, name, cost):
        method = getattr(owner, name)

        def called(*arguments, **options):
            seconds.now += cost
            return method(*arguments, **options)

        monkeypatch.setattr(owner, name, called)

    costs(runs.Run, "next_batch", 1)
    costs(runs, "evaluate", 100)
    costs(runs, "predictions", 30)
    costs(writer.Memory, "copy", 1000)
    log = train(dataset.path, tmp_path / "run", budget="5s", eval_every=3, save_every=4)
    steps = [entry for entry in log if "lr" in entry]
    assert [entry["trained_s"] for entry in steps] == [0, 1, 2, 3, 4, 5, 6]  # the first may compile; 5 is read late
    assert [entry["compiled_s"] for entry in steps] == [1] * 7
    assert [entry["evaluated_s"] for entry in steps] == [0, 0, 0, 130, 130, 130, 260]
    assert [entry["waited_s"] for entry in steps] == [0, 0, 0, 0, 1000, 1000, 1000]
    assert [entry["validation_s"] for entry in log if "validation_s" in entry] == [130] * 3
    assert (
        "trained 6.0 s, compiled 1.0 s, evaluated 390.0 s, waited for checkpoints 2000.0 s" in capsys.readouterr().out
    )
    times = json.loads((tmp_path / "run" / "run.json").read_text())["clock"]
    assert times == {"trained_s": 6, "compiled_s": 1, "evaluated_s": 390, "waited_s": 2000}
    more = [entry for entry in train(dataset.path, tmp_path / "run", budget="8s", eval_every=0) if "lr" in entry]
    assert [entry["trained_s"] for entry in more[7:]] == [6, 7, 8, 9]


def test_a_step_that_compiles_is_not_training(seconds):
    def step(length):
        seconds.now += 1
        found.lap_of_step(length)
        return found.seconds["trained"], found.seconds["compiled"]

    found = clock.Clock({"trained": 10.0})
    assert [step(32), step(32), step(80), step(80)] == [(10, 1), (11, 1), (11, 2), (12, 2)]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert [step(80), step(80)] == [(12, 3), (13, 3)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "soon"}, "--budget soon is not a time; write it like 90s, 30m or 24h"),
        ({"budget": "0h"}, "--budget 0h is not a time"),
        ({"budget": "1h", "steps": 3}, "--steps 3 and --budget 1h were given"),
        ({"budget": "1h", "warmup": 10}, "--warmup 10 is a number of steps"),
        (
            {"budget": "1h", "teacher_cache": "c", "mlm_probability": "0.3:0.15"},
            "--mlm-probability 0.3:0.15 changes with the time of a --budget",
        ),
        ({"mlm_probability": "0.3:1.5"}, "--mlm-probability is 0.3:1.5"),
        ({"mlm_probability": "0.3@0.5"}, "--mlm-probability is 0.3@0.5; give one value, or values for the parts"),
        ({"mlm_probability": "0.3:0.15@1"}, "--mlm-probability is 0.3:0.15@1"),
        ({"mlm_probability": "0.3:0.15@nan"}, "--mlm-probability is 0.3:0.15@nan"),
        ({"mlm_probability": "0.3:nan"}, "--mlm-probability is 0.3:nan"),
        ({"global_batch_size": "64:"}, "--global-batch-size is 64:; give one value"),
        ({"global_batch_size": "64:0"}, "--global-batch-size is 64:0; give at least 1"),
        ({"global_batch_size": "8:16@0.5:32@0.5"}, "--global-batch-size is 8:16@0.5:32@0.5"),
        ({"decay_share": 0.5}, "--decay-share 0.5 needs --schedule wsd"),
        ({"schedule": "wsd", "decay_share": 0.0}, "--decay-share is 0.0"),
        ({"average": 1.0}, "--average is 1.0"),
        ({"long_length": 32}, "--long-length 32 must be more than --length 32"),
        ({"long_share": 1.0}, "--long-share is 1.0"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, said):
    with pytest.raises(UsageError, match=said):
        Config(data="x", out="y", length=32, **options)


def test_the_last_part_of_a_run_has_longer_rows(dataset, tmp_path):
    options = {"steps": 6, "long_length": 80, "long_share": 0.4, "global_batch_size": 6, "micro_batch_size": 3}
    whole = train(dataset.path, tmp_path / "whole", **options)
    tokens = [entry["tokens"] for entry in whole if "lr" in entry]
    assert np.diff([0, *tokens]).tolist() == [6 * 32] * 4 + [6 * 80] * 2
    assert json.loads((last_checkpoint(tmp_path / "whole") / "trainer.json").read_text())["loader"]["length"] == 80
    plan = Plan.of(Config(data="x", out="y", length=32, **options), num_samples=100, world_size=1)
    rows = plan.rows(0)
    assert (plan.micro_batches(32, rows), plan.micro_batches(80, rows)) == ((3, 2), (1, 6))
    for last in (2, 4, 5):  # before, at and after the change
        for step in range(last + 1, 7):
            path = tmp_path / "whole" / f"step-{step:08d}"
            path.rename(tmp_path / f"{path.name}-{last}")
        (tmp_path / "whole" / "log.jsonl").write_text("".join(
            json.dumps(e) + "\n" for e in whole if e["step"] <= last))  # fmt: skip
        again = train(dataset.path, tmp_path / "whole", **options)
        assert [e["loss"] for e in again if "lr" in e] == [e["loss"] for e in whole if "lr" in e], last


def test_batches_and_masks_change_along_a_run(dataset, tmp_path):
    options = {"steps": 6, "global_batch_size": "2:4:6@0.67", "mlm_probability": "0.4:0.1", "length": 32}
    whole = train(dataset.path, tmp_path / "run", **options)
    tokens = [entry["tokens"] for entry in whole if "lr" in entry]
    assert np.diff([0, *tokens]).tolist() == [2 * 32] * 2 + [4 * 32] * 2 + [6 * 32] * 2
    state = json.loads((last_checkpoint(tmp_path / "run") / "trainer.json").read_text())["loader"]
    assert (state["masking"]["probability"], state["masking"]["later"]) == (0.4, [[12, 0.1]])  # of 24 rows
    for last in (1, 2, 3, 4):
        for step in range(last + 1, 7):
            shutil.rmtree(tmp_path / "run" / f"step-{step:08d}")
        again = train(dataset.path, tmp_path / "run", **options)
        assert losses(again) == losses(whole), last
    with pytest.raises(SystemExit):  # other masks than the checkpoint's
        train(dataset.path, tmp_path / "run", **options | {"mlm_probability": "0.4:0.2", "steps": 7})


def test_a_plan_counts_the_rows_of_a_run():
    config = Config(data="x", out="y", steps=100, global_batch_size="8:16@0.25:32@0.5")
    plan = Plan.of(config, num_samples=1000, world_size=2)
    assert [plan.rows(step) for step in (0, 24, 25, 49, 50, 99)] == [8, 8, 16, 16, 32, 32]
    for steps in (0, 1, 24, 25, 26, 50, 51, 100):
        assert plan.samples(steps) == sum(plan.rows(step) for step in range(steps))
    assert [plan.micro_batches(128, rows) for rows in (8, 16, 32)] == [(4, 1), (8, 1), (16, 1)]
    once = Config(data="x", out="y", global_batch_size="8:16@0.25:32@0.5")
    steps = Plan.of(once, num_samples=1000, world_size=2).steps
    assert Plan.of(once, num_samples=1000, world_size=2).samples(steps) == pytest.approx(1000, abs=40)


def test_time_changes_what_a_run_with_a_budget_reads(dataset, tmp_path):
    def start():
        config = Config(
            data=str(dataset.path), out=str(tmp_path / "run"), budget="10s", length=32, long_length=48, long_share=0.2,
            global_batch_size="4:6", mlm_probability="0.4:0.2@0.3:0.1@0.6",
        )  # fmt: skip
        run = Run(config, World(0, 1, torch.device("cpu")), checkpoint.choose(tmp_path / "run"))
        with run.watch:  # which closes its log
            run.watch.stream = lambda step, loader: None
            return run

    def read(run, seconds):
        run.spent = run.clock.seconds["trained"] = seconds
        batch, _ = run.next_batch()
        run.step += 1
        return *batch.input_ids.shape, batch.targets.shape[1]

    run = start()
    slots = {share: Masking(probability=share).num_slots(32) for share in (0.4, 0.2, 0.1)}
    assert [read(run, 0.0), read(run, 2.9)] == [(4, 32, slots[0.4])] * 2
    assert [read(run, 3.1), read(run, 4.9)] == [(4, 32, slots[0.2])] * 2
    run.save(required=True)
    again = start()
    assert again.loader.state_dict() == run.loader.state_dict()
    assert again.loader.masking.later == ((8, 0.2),)
    for each in (run, again):
        assert read(each, 5.1) == (6, 32, slots[0.2])
        assert read(each, 7.0) == (6, 32, slots[0.1])
        assert each.loader.masking.later == ((8, 0.2), (22, 0.1))
        assert read(each, 8.5) == (6, 48, Masking(probability=0.1).num_slots(48))
        assert each.loader.position == 6
    run.save(required=True)
    assert start().loader.state_dict() == run.loader.state_dict()


@pytest.mark.parametrize(
    ("first", "then", "later"),
    [
        ({"steps": 6}, {"steps": 12}, [[18, 0.1], [24, 0.4], [36, 0.1]]),  # it was less for 6 rows, and is more again
        ({"steps": 12}, {"steps": 6}, [[24, 0.1]]),
        ({"steps": 6}, {"budget": "20m"}, [[18, 0.1], [24, 0.4]]),
    ],
)
def test_a_run_that_gets_longer_keeps_the_masks_that_it_has_had(dataset, tmp_path, first, then, later):
    """Four steps of six rows are done when its length changes."""
    options = {"global_batch_size": 6, "mlm_probability": "0.4:0.1", "eval_every": 0}
    train(dataset.path, tmp_path / "run", **options, **first)
    for step in range(5, 13):
        shutil.rmtree(tmp_path / "run" / f"step-{step:08d}", ignore_errors=True)
    config = Config(data=str(dataset.path), out=str(tmp_path / "run"), **SMALL | options | then)
    run = Run(config, World(0, 1, CPU), checkpoint.choose(tmp_path / "run"))
    with run.watch:
        run.spent = 0.0
        run.next_batch()
        run.step += 1
        assert run.loader.position == 30
        assert [list(pair) for pair in run.loader.masking.later] == later
        run.save(required=True)
        again = Run(config, World(0, 1, CPU), checkpoint.choose(tmp_path / "run"))
        with again.watch:
            assert again.loader.state_dict() == run.loader.state_dict()


def test_a_shorter_run_than_was_made_is_done(dataset, tmp_path, capsys):
    train(dataset.path, tmp_path / "run", steps=5)
    capsys.readouterr()
    train(dataset.path, tmp_path / "run", steps=3)
    assert "done: " in capsys.readouterr().out


def test_flags_beside_a_configuration_turn_things_off_too(dataset, tmp_path):
    train(dataset.path, tmp_path / "a", steps=1, isolate_documents=True)
    arguments = ["--config", str(tmp_path / "a" / "run.json"), "--out", str(tmp_path / "b"), "--no-isolate-documents"]
    assert CliRunner().invoke(pretrain.main, arguments).exit_code == 0
    assert json.loads((tmp_path / "b" / "run.json").read_text())["config"]["isolate_documents"] is False


# ------------------------------------------------------------------------------------------------- precision and speed


def test_an_overflow_of_fp16_is_passed_over(dataset, tmp_path, monkeypatch):
    """The scale is lowered and training goes on; without a scaler the same gradient ends the run."""
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**127))
    log = [e for e in train(dataset.path, tmp_path / "run", steps=8, model="bert-tiny", precision="fp16") if "lr" in e]
    assert log[0]["grad_norm"] is None
    assert all(math.isfinite(entry["loss"]) for entry in log)


def test_weights_that_are_not_finite_are_never_saved(dataset, tmp_path, monkeypatch):
    norms = iter([torch.tensor(1.0)] * 3 + [torch.tensor(float("nan"))] * 9)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a, **k: next(norms))
    with pytest.raises(SystemExit):
        train(dataset.path, tmp_path / "run", steps=8, log_every=100, save_every=2, eval_every=0)
    assert [path.name for path in sorted((tmp_path / "run").glob("step-*"))] == ["step-00000002"]


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16"}, {"gradient_checkpointing": True}])
def test_other_precisions_and_checkpointing_learn_the_same(dataset, tmp_path, options):
    plain = [e["loss"] for e in train(dataset.path, tmp_path / "a", steps=5, model="bert-tiny") if "lr" in e]
    other = [e["loss"] for e in train(dataset.path, tmp_path / "b", steps=5, model="bert-tiny", **options) if "lr" in e]
    assert other == pytest.approx(plain, rel=2e-2)
    assert (other == plain) == ("precision" not in options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["bert-tiny", "modernbert-tiny"])
def test_the_step_is_one_graph(dataset, name, recompute):
    """torch.compile sees forward and loss whole, as --compile on asks; with --gradient-checkpointing too."""
    torch.compiler.reset()
    weights = model.build(name, dataset.special_tokens, length=32, seed=0)[0]
    if recompute:
        model.recompute_activations(weights)
    plain, batch = learner(weights).train(), bertdata.Loader(dataset, length=32).read(np.arange(6))
    piece = next(feed.micro_batches(batch, size=6, count=1, device=CPU))
    expected = plain(**piece)
    compiled = torch.compile(plain, backend="eager", fullgraph=True, dynamic=False)
    found = compiled(**piece)
    torch.testing.assert_close(found["mlm"].sum, expected["mlm"].sum)
    assert torch.equal(found["mlm"].num_correct, expected["mlm"].num_correct)
    found["mlm"].sum.backward()


def test_operations_of_a_step_are_counted():
    """Of BERT-base at length 128, by hand: 6 x (85 M weights + 2 x 768 x 128 x 12) a token, the head for 19 places."""
    config = BertConfig(vocab_size=30522)
    per_row = 6 * (128 * (12 * 12 * 768**2 + 12 * 2 * 768 * 128) + 19 * (768**2 + 768 * 30522))
    with torch.device("meta"):
        assert rates.Operations.of(BertForMaskedLM(config)).of_step(rows=3, length=128, slots=19) == 3 * per_row
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "cls_token_id": 2, "sep_token_id": 3}
    sizes = {"vocab_size": 100, "num_hidden_layers": 4, "local_attention": 8, "global_attn_every_n_layers": 2}
    modern = ModernBertConfig(**sizes, **special)
    width, inner = modern.hidden_size, modern.intermediate_size
    seen = [128 if kind == "full_attention" else 9 for kind in modern.layer_types]
    per_token = 4 * (4 * width**2 + 3 * width * inner) + 2 * width * sum(seen)
    with torch.device("meta"):
        found = rates.Operations.of(ModernBertForMaskedLM(modern)).of_step(rows=1, length=128, slots=0)
    assert found == 6 * 128 * per_token
    assert rates.peak_flops(CPU, "bf16") is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_the_peak_is_of_the_gpu_that_is_named(name, teraflops):
    assert rates.peak_of(name) == (teraflops and teraflops * 1e12)


# ------------------------------------------------------------------------------------------------------------- signals


def wait_for_steps(run, alive):
    log, deadline = run / "log.jsonl", time.monotonic() + 180
    while not (log.exists() and log.stat().st_size):
        assert time.monotonic() < deadline
        assert alive()
        time.sleep(0.05)


ENDLESS = {"steps": 100_000, "save_every": 10**6, "eval_every": 0}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_ends_a_run_with_a_checkpoint(dataset, tmp_path, name):
    ranks = start_ranks(1, "bertrain.pretrain", flags(dataset.path, tmp_path / "run", **ENDLESS), tmp_path)
    wait_for_steps(tmp_path / "run", ranks[0].is_alive)
    os.kill(ranks[0].pid, getattr(signal, name))
    code, out, err = end_of(ranks, tmp_path)
    assert code == 0, err
    step = entries(tmp_path / "run")[-1]["step"]
    assert f"stopped by {name} after step {step}; its newest checkpoint is of step {step}" in out
    assert last_checkpoint(tmp_path / "run").name == f"step-{step:08d}"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_torchrun_leaves_a_checkpoint(dataset, tmp_path, name):
    """As the README has it: torchrun hands on what --signals-to-handle names, which by default is not SIGUSR1."""
    more = [] if name == "SIGTERM" else ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    job = launch(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "run", **ENDLESS), before=more)
    wait_for_steps(tmp_path / "run", lambda: job.poll() is None)
    job.send_signal(getattr(signal, name))
    job.communicate(timeout=90)
    assert last_checkpoint(tmp_path / "run").name == f"step-{entries(tmp_path / 'run')[-1]['step']:08d}"


@pytest.mark.dist
@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all(dataset, tmp_path):
    ranks = start_ranks(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "run", **ENDLESS), tmp_path)
    wait_for_steps(tmp_path / "run", ranks[0].is_alive)
    os.kill(ranks[-1].pid, signal.SIGTERM)
    code, out, err = end_of(ranks, tmp_path)
    assert code == 0, err
    assert "stopped by " in out
    assert last_checkpoint(tmp_path / "run")


# ------------------------------------------------------------------------------------- checkpoints beside training


class Held:
    """Holds back the end of the first write of a checkpoint, until `go` is set."""

    def __init__(self, monkeypatch):
        self.begun, self.go, write = threading.Event(), threading.Event(), checkpoint.write_file

        def held(path, content):
            if path.name == checkpoint.INDEX and not self.begun.is_set():
                self.begun.set()
                assert self.go.wait(120)
            write(path, content)

        monkeypatch.setattr(checkpoint, "write_file", held)


def before_batch(monkeypatch, action):
    """Calls action(run) before each batch."""
    next_batch = runs.Run.next_batch
    monkeypatch.setattr(runs.Run, "next_batch", lambda run: (action(run), next_batch(run))[1])


def test_steps_go_on_while_a_checkpoint_is_written_which_holds_its_own_step(dataset, tmp_path, monkeypatch):
    options = {"model": "bert-tiny", "steps": 6, "save_every": 3, "eval_every": 0}
    whole = train(dataset.path, tmp_path / "whole", **options)
    said = []

    def look(run):
        if run.step in (4, 5):
            assert held.begun.wait(120)
            said.append((run.describe_newest(), (tmp_path / "run" / "step-00000003").exists()))
        if run.step == 5:
            held.go.set()

    held = Held(monkeypatch)
    before_batch(monkeypatch, look)
    assert losses(train(dataset.path, tmp_path / "run", **options)) == losses(whole)
    assert said == [("it has no checkpoint yet", False)] * 2
    for name in ("step-00000003/model.safetensors", "step-00000003/optimizer.pt", "step-00000006/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_second_ctrl_c_leaves_off_the_write_of_a_checkpoint(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stop, "REPEAT_S", 0.0)
    leave = writer.Writer.__exit__
    held = Held(monkeypatch)

    def interrupt_twice(run):
        if run.step == 3:
            assert held.begun.wait(120)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    def left(self, *exception):
        threading.Thread(target=lambda: (self.leaving.wait(120), held.go.set())).start()
        leave(self, *exception)

    monkeypatch.setattr(writer.Writer, "__exit__", left)
    before_batch(monkeypatch, interrupt_twice)
    with pytest.raises(SystemExit) as ended:
        train(dataset.path, tmp_path / "run", steps=9, save_every=2, eval_every=0)
    assert ended.value.code == 130
    assert "interrupted at step 3; it has no checkpoint yet" in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("*step*"))


@pytest.mark.dist
@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_older_one(dataset, tmp_path):
    out, options = tmp_path / "run", {"steps": 6, "save_every": 2, "eval_every": 0}
    whole = train(dataset.path, tmp_path / "whole", **options)
    ranks = start_ranks(1, "faulty", ["kill", "4", *flags(dataset.path, out, **options)], tmp_path)
    assert end_of(ranks, tmp_path)[0] == -signal.SIGKILL
    assert (out / ".step-00000004.tmp" / "optimizer.pt").exists()
    assert checkpoint.newest(out) == (out / "step-00000002", [])
    assert losses(train(dataset.path, out, **options)) == losses(whole)
    assert sorted(path.name for path in out.glob("*step*")) == [f"step-{step:08d}" for step in (2, 4, 6)]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_a_write_that_fails_on_rank_0_ends_both_ranks_only_if_it_is_the_last(dataset, tmp_path, step):
    arguments = ["full", str(step), *flags(dataset.path, tmp_path / "run", steps=3, eval_every=0)]
    code, out, err = on_ranks(2, "faulty", arguments)
    kept = [f"step-{number:08d}" for number in (1, 2, 3) if number != step]
    assert sorted(path.name for path in (tmp_path / "run").glob("*step*")) == kept
    if step == 2:
        assert code == 0, err
        assert out.count("warning: no checkpoint of step 2 was written, and training continues: [Errno 28]") == 1
    else:
        assert code == 1
        assert err.count("No space left on device") == 1


def test_a_copy_shares_memory_where_the_state_does_and_keeps_its_numbers():
    tied, memory = torch.arange(6.0), writer.Memory()
    state = {"a": tied, "b": tied.view(2, 3), "c": [torch.tensor(3), (torch.zeros(0), 7)], "d": tied.bfloat16()}
    found = memory.copy(state)
    assert found["b"].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()
    tied.zero_()
    assert found["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["d"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (found["c"][0].item(), found["c"][1][0].numel(), found["c"][1][1]) == (3, 0, 7)
    again = memory.copy(state | {"e": torch.ones(9)})  # in the same memory, and more
    assert again["a"].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()
    assert (again["a"].sum(), again["e"].sum()) == (0, 9)


# ------------------------------------------------------------------------------------------------------------- seeing


def test_a_collapse_and_a_plateau_are_said_once(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watch, "COLLAPSE_STEPS", 2)
    monkeypatch.setattr(watch, "PLATEAU_STEPS", 2)
    monkeypatch.setattr(watch, "COLLAPSED", 0.0)
    monkeypatch.setattr(watch, "PLATEAU_NATS", 100.0)
    train(dataset.path, tmp_path / "run", steps=6, eval_every=2)
    shown = capsys.readouterr().out
    assert shown.count("the model learns little") == 1
    assert shown.count("of all predictions are the token") == 1


def test_an_evaluation_keeps_what_was_predicted_at_the_same_places(dataset, tmp_path):
    log = train(dataset.path, tmp_path / "run", steps=2, eval_every=1)
    first, last = (entry["predictions"] for entry in log if "validation_loss" in entry)
    assert [row[:2] for row in first] == [row[:2] for row in last]
    assert 0 < len(first) <= 8
    for around, target, guess in first:
        assert re.search(r">\S+<", around)
        assert target
        assert guess


def test_tensorboard_holds_what_the_log_does(dataset, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = train(dataset.path, tmp_path / "run", steps=4, log_to=["tensorboard"])
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([e["loss"] for e in log if "lr" in e])
    assert "validation/loss" in board.Tags()["scalars"]
    shutil.rmtree(tmp_path / "run" / "step-00000004")
    train(dataset.path, tmp_path / "run", steps=4, log_to=["tensorboard"])  # goes on after step 3, which stays
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4]


def test_runs_are_drawn(dataset, tmp_path):
    for name in ("a", "b"):
        train(dataset.path, tmp_path / name, steps=3)
    with open(tmp_path / "a" / "log.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # cut off
    done = CliRunner().invoke(plot.main, [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "x.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.png").stat().st_size > 10_000
    for wrong, said in ((tmp_path / "none", "is not a run directory"), (tmp_path / "a", "cannot be drawn")):
        done = CliRunner().invoke(plot.main, [str(wrong), "--out", str(tmp_path / "x.nothing")])
        assert done.exit_code == 2
        assert said in done.output


@pytest.mark.parametrize("isolate", [False, True])
def test_long_rows_are_evaluated_fewer_at_a_time_to_the_same_numbers(dataset, tmp_path, monkeypatch, isolate):
    train(dataset.path, tmp_path / "run", steps=1, isolate_documents=isolate)
    arguments = ["--checkpoint", str(tmp_path / "run"), "--data", str(dataset.path), "--split", "train", "--json"]
    found = []
    for places in (evaluate.PLACES, 5 * 32, 1):
        monkeypatch.setattr(evaluate, "PLACES", places)
        found.append(json.loads(CliRunner().invoke(evaluate.main, arguments).output.splitlines()[-1]))
    for other in found[1:]:
        assert other["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)
        assert (other["targets"], other["samples"]) == (found[0]["targets"], found[0]["samples"])


def test_bits_per_byte_are_bits_a_token_times_tokens_a_byte(dataset, tmp_path):
    train(dataset.path, tmp_path / "run", steps=1)
    done = CliRunner().invoke(
        evaluate.main, ["--checkpoint", str(tmp_path / "run"), "--data", str(dataset.path), "--json"]
    )
    found = json.loads(done.output.splitlines()[-1])
    tokens = dataset.num_tokens - dataset.num_documents
    expected = found["loss"] / math.log(2) * tokens / dataset.manifest.counts["text_bytes"]
    assert found["bits_per_byte"] == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------------------- doctor


def examine(*arguments):
    done = CliRunner().invoke(doctor.main, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return (
        done.exit_code,
        {line.split()[1]: line for line in done.output.splitlines() if line[4:6] == "  "},
        done.output,
    )


def test_the_doctor_finds_nothing_wrong(dataset, tmp_path):
    options = ["--length", 32, "--global-batch-size", 6, "--nproc", 2]
    code, found, _ = examine("--data", dataset.path, "--out", tmp_path / "run", *options)
    assert code == 0
    assert found.keys() == {
        "shards",
        "samples",
        "batch",
        "warm-up",
        "masks",
        "model",
        "devices",
        "memory",
        "disk",
        "run",
    }
    assert all(line.startswith(("PASS", "WARN  devices")) for line in found.values())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "thing", "verdict", "said"),
    [
        ({"global_batch_size": 100_000}, "batch", "WARN", "sees each of the"),
        ({"global_batch_size": 3, "nproc": 8}, "batch", "WARN", "some ranks are idle"),
        ({"global_batch_size": 9, "nproc": 8}, "batch", "WARN", "make the batch a multiple of the ranks"),
        ({"steps": 10, "warmup": 50}, "warm-up", "WARN", "longer than the run"),
        ({"mlm_probability": "0.3:0.01"}, "samples", "FAIL", "0.01 of rows of 32 is not one place"),
        ({"model": "bert-huge"}, "model", "FAIL", "neither a preset"),
        ({"model": "bert-base", "micro_batch_size": 10**5, "global_batch_size": 10**6}, "memory", "FAIL",
         "give a smaller --micro-batch-size"),
        ({"model": "bert-base", "keep": 10**9}, "disk", "FAIL", "make room or lower --keep"),
    ],
)  # fmt: skip
def test_the_doctor_finds_what_is_wrong(dataset, tmp_path, options, thing, verdict, said):
    options = {"data": dataset.path, "out": tmp_path / "run", "length": 32} | options
    arguments = [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), value)]
    code, found, output = examine(*arguments)
    assert found[thing].startswith(verdict), output
    assert said in found[thing]
    assert code == (verdict == "FAIL")


def test_the_doctor_counts_the_mean_of_the_weights_on_disk(dataset, tmp_path):
    common = ["--data", dataset.path, "--out", tmp_path / "run", "--length", 32, "--model", "bert-base", "--keep", 10]
    needed = [float(re.search(r"need ([\d.]+) GB", examine(*common, *more)[1]["disk"])[1])
              for more in ((), ("--average", 0.5))]  # fmt: skip
    assert needed[0] < needed[1]


def test_the_doctor_counts_the_activations_of_all_sub_networks(dataset, tmp_path):
    common = ["--data", dataset.path, "--out", tmp_path / "run", "--length", 128, "--model", "bert-tiny",
              "--micro-batch-size", 512, "--global-batch-size", 512, "--elastic", "layers=1:2"]  # fmt: skip
    needed = [
        float(re.search(r"about ([\d.]+) GB", examine(*common, "--sub-networks", number)[1]["memory"])[1])
        for number in (1, 2, 4)
    ]
    assert needed[2] - needed[1] == pytest.approx(2 * (needed[1] - needed[0]), abs=0.2)
    assert needed[2] > 3 * needed[0]


def test_the_doctor_finds_a_place_that_cannot_be_written(dataset, tmp_path, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *mode, **more: path != tmp_path and access(path, *mode, **more))
    code, found, _ = examine("--data", dataset.path, "--out", tmp_path / "far" / "run", "--length", 32)
    assert code == 1
    assert found["run"].startswith("FAIL")
    assert f"run cannot be written, as {tmp_path} gives no permission; give another --out" in found["run"]


def test_the_doctor_finds_damaged_shards_and_runs(dataset, tmp_path):
    code, found, _ = examine("--data", tmp_path / "nothing", "--out", tmp_path / "run")
    assert (code, list(found)) == (1, ["shards"])
    damaged = write_dataset(tmp_path / "damaged", [([7, 3], [2], None)])
    with open(damaged / "train-00000.tokens.npy", "r+b") as file:
        file.seek(128)
        file.write(b"\x09")
    code, found, _ = examine("--data", damaged, "--out", tmp_path / "run")
    assert code == 1
    assert found["shards"].startswith("FAIL")
    train(dataset.path, tmp_path / "run", steps=1)
    common = ["--data", dataset.path, "--out", tmp_path / "run", "--length", 32, "--optimizer", "adamw"]
    assert "continues from step-00000001" in examine(*common)[1]["run"]
    assert "give another --out" in examine(*common, "--resume", "no")[1]["run"]
    assert "was trained with --model modernbert-tiny" in examine(*common, "--model", "bert-tiny")[1]["run"]
    assert "was trained with no --lr-scale" in examine(*common, "--lr-scale", "norm=2")[1]["run"]
    assert "seed was 0 and is 1" in examine(*common, "--seed", "1")[1]["run"]
    assert "masking was {'policy': 'exact'}" in examine(*common, "--masking", "span")[1]["run"]


@pytest.mark.slow
@pytest.mark.parametrize("duration", [{"steps": 12}, {"budget": "4s"}], ids=str)
def test_every_step_of_a_run_can_be_traced(dataset, tmp_path, monkeypatch, duration):
    """The log gives the batch of each step, also where batch, length and masks change, and after a resumption."""
    read, real = {}, Run.next_batch

    def next_batch(run):
        batch, waited = real(run)
        read[run.step + 1] = run.loader.length, batch.sample_ids.tolist()
        return batch, waited

    options = {"global_batch_size": "4:8@0.3:6@0.6", "long_length": 48, "mlm_probability": "0.3:0.15", "log_every": 5}
    monkeypatch.setattr(Run, "next_batch", next_batch)
    train(dataset.path, tmp_path / "run", **options, **duration)
    checkpoints = sorted((tmp_path / "run").glob("step-*"))
    kept = len(checkpoints) // 2
    for later in checkpoints[kept:]:
        shutil.rmtree(later)
    resumed = int(checkpoints[kept - 1].name.removeprefix("step-"))
    for step in [step for step in read if step > resumed]:  # with a budget, they may not come again
        del read[step]
    train(dataset.path, tmp_path / "run", **options, **duration)
    loaders = {length: bertdata.Loader(dataset, length=length) for length in (32, 48)}
    assert {length for length, _ in read.values()} == {32, 48}
    assert len({len(sample_ids) for _, sample_ids in read.values()}) == 3
    for step, (length, sample_ids) in read.items():
        stream = stream_of(tmp_path / "run", step)
        positions = stream["position"] + np.arange(stream["global_batch_size"])
        assert stream["length"] == length
        assert loaders[length].read(positions).sample_ids.tolist() == sample_ids, step
