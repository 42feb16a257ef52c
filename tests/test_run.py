"""What a run can do besides the usual: objectives, weights to begin with, time, longer rows, signals, checks."""

import functools
import json
import math
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import runs
from support.commands import invoke, json_of, refuses, waited
from support.disk import flip, step_of_index, syncing
from support.runs import (
    QUIET,
    SMALL,
    TINY,
    at_step,
    changing,
    entries,
    flags,
    last_checkpoint,
    losses,
    remove_after,
    steps_of,
    train,
    train_twice,
)
from transformers import (
    AutoModelForMaskedLM,
    BertForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

import bertdata
from bertdata.torch import tensors
from bertrain import checkpoint, speed, state
from bertrain import evaluate as evaluation
from bertrain import trainer as trainer_module
from bertrain.commands import doctor, evaluate
from bertrain.config import Config
from bertrain.data import Stream, micro_batches
from bertrain.models.load import new_model
from bertrain.objectives import num_targets
from bertrain.plan import Plan
from bertrain.ranks import world
from bertrain.speed import Clock, flops_of_row, peak_flops
from bertrain.trainer import Trainer, recompute_activations


def loader_state(run):
    return state.read(last_checkpoint(run)).loader


# -------------------------------------------------------------------------------------------------------- objectives


def test_next_sentences_are_predicted_and_logged_apart(dataset, tmp_path):
    run, options = tmp_path / "run", {"model": TINY, "objective": "mlm+nsp", "steps": 3, "lr": 1e-3}
    log = steps_of(train(dataset.path, run, **options))
    assert all(0.3 < entry["nsp_loss"] < 1.5 and 0 <= entry["nsp_accuracy"] <= 1 for entry in log)
    saved = last_checkpoint(run)
    assert BertForPreTraining.from_pretrained(saved).config.architectures == ["BertForPreTraining"]
    AutoModelForMaskedLM.from_pretrained(saved)
    remove_after(run, 1)  # stopped and resumed to the same bits
    assert [e["nsp_loss"] for e in steps_of(train(dataset.path, run, **options))] == [e["nsp_loss"] for e in log]


def test_losses_of_pairs_are_those_of_transformers(dataset):
    batch = next(bertdata.Loader(dataset, length=32, samples="pairs", global_batch_size=5))
    weights = new_model("bert-tiny", dataset.special_tokens, length=32, seed=0, nsp=True)[0]
    (piece,) = micro_batches(batch, size=5, count=1, device=runs.CPU)
    sums = runs.learner(weights, "mlm", "nsp")(**piece)
    given = tensors(batch)
    theirs = weights(**given)
    torch.testing.assert_close(sums["mlm"].sum / num_targets(batch) + sums["nsp"].sum / 5, theirs.loss)
    right = theirs.seq_relationship_logits.argmax(-1) == given["next_sentence_label"]
    assert sums["nsp"].num_correct == right.sum()


def test_isolated_documents_train_evaluate_and_load(dataset, tmp_path):
    run = tmp_path / "run"
    log = train(dataset.path, run, isolate_documents=True, steps=2)
    assert all(math.isfinite(entry["loss"]) for entry in steps_of(log))
    assert loader_state(run)["samples"] == "packed"
    stated = json_of(evaluate.main, "--checkpoint", run, "--data", dataset.path)
    assert stated["loss"] == pytest.approx([e for e in log if "validation_loss" in e][-1]["validation_loss"], rel=1e-6)
    tokens = dataset.num_tokens - dataset.num_documents
    bits_per_byte = stated["loss"] / math.log(2) * tokens / dataset.manifest.counts["text_bytes"]
    assert stated["bits_per_byte"] == pytest.approx(bits_per_byte)
    plain = AutoModelForMaskedLM.from_pretrained(last_checkpoint(run))
    assert plain(input_ids=torch.arange(5, 25)[None]).logits.isfinite().all()
    assert "isolated" not in (last_checkpoint(run) / "config.json").read_text()


# ------------------------------------------------------------------------------------------------ weights to begin with


# ----------------------------------------------------------------------------------------------------- time and length


@pytest.fixture
def seconds(monkeypatch):
    """The time of clocks, which stands still unless a test moves it."""
    time = SimpleNamespace(s=0.0)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: time.s))
    return time


@pytest.fixture
def costs(monkeypatch, seconds):
    """costs(owner, name, s): from now on a function takes so many seconds."""

    def add(owner, name, cost):
        method = getattr(owner, name)

        def called(*arguments, **options):
            seconds.s += cost
            return method(*arguments, **options)

        monkeypatch.setattr(owner, name, called)

    return add


def test_the_log_says_what_the_time_went_to(dataset, tmp_path, monkeypatch, capsys, costs):
    """A step takes 1 second, an evaluation 100, its predictions 30, and a copy for a checkpoint 1,000.

    The third step makes a graph. Only steps count in the speed.
    """
    costs(Stream, "next_batch", 1)
    costs(evaluation, "evaluate", 100)
    costs(evaluation, "samples", 30)
    costs(checkpoint.StateDictStager, "stage", 1000)
    at_step(monkeypatch, "next_batch", 2, lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)))
    out, options = tmp_path / "run", {"eval_every": 3, "save_every": 4, "model": TINY}
    log = train(dataset.path, out, steps=6, **options)
    steps = steps_of(log)
    assert [entry["trained_s"] for entry in steps] == [1, 2, 2, 3, 4, 5]
    assert [entry["compiled_s"] for entry in steps] == [0, 0, 1, 1, 1, 1]
    assert [entry["evaluated_s"] for entry in steps] == [0, 0, 0, 130, 130, 130]
    assert [entry["waited_s"] for entry in steps] == [0, 0, 0, 0, 1000, 1000]
    assert {entry["tokens_per_s"] for entry in steps} == {6 * 32}
    assert [entry["validation_s"] for entry in log if "validation_s" in entry] == [130] * 2
    assert "compiled" in capsys.readouterr().out
    times = json.loads((out / "run.json").read_text())["clock"]
    assert times == {"trained_s": 5, "compiled_s": 1, "evaluated_s": 260, "waited_s": 2000}
    more = steps_of(train(dataset.path, out, steps=8, **options))
    assert [entry["trained_s"] for entry in more[6:]] == [6, 7]


def test_rows_batches_and_masks_change_along_a_run(dataset, tmp_path):
    out = tmp_path / "run"
    rows = [2, 4, 4, 6, 6]
    shares, length = [0.4, 0.4, 0.1, 0.1, 0.1], [32, 32, 32, 32, 80]
    planned = changing(0.33, 0.5, 0.67, 0.8, global_batch_size=rows, mlm_probability=shares, length=length)
    options = {"steps": 6, "phase": planned, "model": TINY, "micro_batch_size": 3, "eval_every": 0}
    complete = train_twice(dataset.path, out, 5, 4, 2, 1, **options)  # before, at and after the changes
    tokens = [entry["tokens"] for entry in steps_of(complete)]
    assert np.diff([0, *tokens]).tolist() == [2 * 32] * 2 + [4 * 32] * 2 + [6 * 32] + [6 * 80]
    assert loader_state(out)["length"] == 80
    saved = state.read(out / "step-00000005")
    assert (saved.loader["masking"]["probability"], saved.loader["position"]) == (0.1, 18)
    assert [*saved.streams.values()] == [18]
    planned = Plan.make(Config.make(data="x", **SMALL | options), OF_100, world_size=1)
    assert (planned.micro_batches(32, 6), planned.micro_batches(80, 6)) == ((3, 2), (1, 6))
    assert planned.first_micro_batches() == (2, 1)


@pytest.mark.parametrize(("length", "rows"), [(128, 256), (512, 64), (1024, 32), (8192, 4), (65_536, 1)])
def test_a_pass_on_a_gpu_has_a_limit_of_tokens(length, rows):
    """Unless its rows are given; a pass on a CPU has one of rows."""
    config = Config.make(data="x", length=length, global_batch_size=300)
    assert Plan.make(config, OF_100, world_size=1, on_gpu=True).micro_batch_size == rows
    assert Plan.make(config, OF_100, world_size=1).micro_batch_size == 64
    given = Config.make(data="x", length=length, micro_batch_size=100)
    assert Plan.make(given, OF_100, world_size=1, on_gpu=True).micro_batch_size == 100


OF_100 = SimpleNamespace(samples=lambda paths, length: 100)  # datasets of 100 samples, whatever their length


def test_a_step_may_have_all_samples_and_one_row_for_each_rank():
    for rows, num_ranks, number in ((100, 1, 0), (101, 1, 1), (4, 4, 0), (3, 4, 1)):
        planned = Plan.make(Config.make(data="x", steps=2, global_batch_size=rows), OF_100, world_size=num_ranks)
        assert len(planned.warnings) == number, rows


# ------------------------------------------------------------------------------------------------- precision and speed


def test_a_plan_counts_the_rows_of_a_run():
    given = changing(0.25, 0.5, global_batch_size=[8, 16, "32..8"])
    planned = Plan.make(Config.make(data="x", steps=100, phase=given), OF_100, world_size=2)
    rows = [planned.phase_at(step).rows_at(step) for step in range(100)]
    assert [rows[step] for step in (0, 24, 25, 49, 50, 99)] == [8, 8, 16, 16, 32, 8]
    assert planned.samples() == sum(rows)
    assert [planned.micro_batches(128, rows) for rows in (8, 16, 32)] == [(4, 1), (8, 1), (16, 1)]
    epoch = Plan.make(Config.make(data="x", phase=given), OF_100, world_size=2)
    assert epoch.samples() == pytest.approx(100, abs=40)


def test_an_overflow_of_fp16_is_passed_over(dataset, tmp_path, monkeypatch):
    """The scale is lowered and training goes on, and the log counts the step as any that is skipped."""
    begins = functools.partial(torch.amp.GradScaler, init_scale=2.0**127, backoff_factor=2.0**-112)
    monkeypatch.setattr(torch.amp, "GradScaler", begins)
    options = QUIET | {"steps": 4, "precision": "fp16", "save_every": 2}
    log = steps_of(train_twice(dataset.path, tmp_path / "run", 2, **options))  # which keeps the scale
    assert [entry.get("skipped") for entry in log] == [1, None, None, None]
    assert (log[0]["loss"], log[0]["grad_norm"]) == (None, None)
    assert all(math.isfinite(entry["loss"]) for entry in log[1:])


def test_other_precisions_and_checkpointing_learn_the_same(dataset, tmp_path, monkeypatch):
    asked, real = [], recompute_activations
    monkeypatch.setattr(trainer_module, "recompute_activations", lambda model: asked.append(model) or real(model))
    plain, bf16, fp16, recomputed = (
        [entry["loss"] for entry in steps_of(train(dataset.path, tmp_path / f"{more}", steps=3, **QUIET | more))]
        for more in ({}, {"precision": "bf16"}, {"precision": "fp16"}, {"gradient_checkpointing": True})
    )
    assert recomputed == plain
    assert len(asked) == 1
    for other in (bf16, fp16):
        assert other == pytest.approx(plain, rel=2e-2)
        assert other != plain
    assert bf16 != fp16


@pytest.mark.parametrize("local", [8, 400])
def test_operations_are_counted_within_windows(local):
    """By hand: layers, local and global, and the head of the masked positions."""
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "cls_token_id": 2, "sep_token_id": 3}
    sizes = {"vocab_size": 100, "num_hidden_layers": 4, "local_attention": local, "global_attn_every_n_layers": 2}
    modern = ModernBertConfig(**sizes, **special)
    width, inner = modern.hidden_size, modern.intermediate_size
    seen = [128 if kind == "full_attention" else min(128, local + 1) for kind in modern.layer_types]
    per_token = 4 * (4 * width**2 + 3 * width * inner) + 2 * width * sum(seen)
    with torch.device("meta"):
        model = ModernBertForMaskedLM(modern)
    assert flops_of_row(model, 128, 20) == 6 * (128 * per_token + 20 * width * (width + 100))


def test_operations_of_a_model_that_needs_numbers_are_estimated(configs, dataset):
    weights = new_model(configs["longformer"], dataset.special_tokens, length=32, seed=0)[0]
    assert flops_of_row(weights, 32, 5) == 6 * 32 * sum(parameter.numel() for parameter in weights.parameters())


def test_rates_are_of_all_ranks_since_the_last_entry(dataset, monkeypatch, seconds):
    weights = new_model(TINY, dataset.special_tokens, length=32, seed=0)[0]
    monkeypatch.setattr(speed, "peak_flops", lambda device, precision: 1e7)
    clock = Clock({"trained": 10.0}, runs.CPU, "bf16")
    seconds.s += 5
    clock.start(weights, 32, 5)
    for kind, wait in (("evaluated", 0.5), ("waited", 1.5)):
        seconds.s += 4
        clock.end_step(rows=3, waited=wait)
        seconds.s += 100
        clock.lap(kind)
    flops, rates = 2 * 3 * flops_of_row(weights, 32, 5) / 8, clock.rates(4)
    assert rates.pop("memory_bytes") > 10**8
    expected = {"tokens_per_s": 96.0, "data_wait": 0.25, "flops_per_s": round(flops), "mfu": round(flops / 1e7, 4)}
    assert rates == expected
    assert clock.rates(4)["tokens_per_s"] == 0


def test_the_peak_is_of_the_gpu_that_is_named(monkeypatch):
    gpu, names = (
        torch.device("cuda"),
        {
            "NVIDIA H100 80GB HBM3": 989e12,
            "NVIDIA H100 PCIe": 756e12,
            "NVIDIA A100-SXM4-80GB": 312e12,
            "NVIDIA GeForce RTX 4090": 165e12,
            "NVIDIA L40": 181e12,
            "NVIDIA A10G": None,
        },
    )
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(gpu, "fp16") == peak
        for has_bf16 in (True, False):
            monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
            assert peak_flops(gpu, "bf16") == (peak if has_bf16 else None)
    assert peak_flops(runs.CPU, "bf16") is peak_flops(gpu, "fp32") is None


# ------------------------------------------------------------------------------------------------------------- signals


ENDLESS = QUIET | {"steps": 100_000, "save_every": 10**6}


def wait_for_steps(run, alive):
    log = run / "log.jsonl"
    waited(lambda: not alive() or log.exists() and log.stat().st_size, 400)
    assert alive()


def has_saved_its_last_step(run):
    return last_checkpoint(run).name == f"step-{entries(run)[-1]['step']:08d}"


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(dataset, tmp_path):
    ranks = runs.start_ranks(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "run", **ENDLESS), tmp_path)
    wait_for_steps(tmp_path / "run", ranks[0].is_alive)
    os.kill(ranks[-1].pid, signal.SIGTERM)
    code, out, err = runs.end_of(ranks, tmp_path)
    assert code == 0, err
    assert "done: " not in out
    assert has_saved_its_last_step(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_torchrun_leaves_a_checkpoint(dataset, tmp_path, name):
    """As the README has it: torchrun hands on what --signals-to-handle names, which by default is not SIGUSR1."""
    more = [] if name == "SIGTERM" else ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    job = runs.launch(1, "bertrain.pretrain", flags(dataset.path, tmp_path / "run", **ENDLESS), before=more)
    wait_for_steps(tmp_path / "run", lambda: job.poll() is None)
    job.send_signal(getattr(signal, name))
    job.communicate(timeout=90)
    assert has_saved_its_last_step(tmp_path / "run")


# ------------------------------------------------------------------------------------- checkpoints beside training


def test_steps_go_on_while_a_checkpoint_is_written_which_holds_its_own_step(dataset, tmp_path, monkeypatch):
    options = QUIET | {"steps": 6, "save_every": 3}
    complete = train(dataset.path, tmp_path / "complete", **options)
    begun, go, saved = threading.Event(), threading.Event(), []

    def hold(path):
        if step_of_index(path) == 3:
            begun.set()
            assert go.wait(120)

    def look():
        assert begun.wait(120)
        saved.append((tmp_path / "run" / "step-00000003").exists())

    at_step(monkeypatch, "next_batch", 4, look)
    at_step(monkeypatch, "next_batch", 5, lambda: (look(), go.set()))
    with syncing(hold):
        assert losses(train(dataset.path, tmp_path / "run", **options)) == losses(complete)
    assert saved == [False, False]
    for name in ("step-00000003/model.safetensors", "step-00000003/optimizer.pt", "step-00000006/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "complete" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_a_write_that_fails_on_rank_0_ends_both_ranks_only_if_it_is_the_last(dataset, tmp_path, step):
    arguments = [str(step), *flags(dataset.path, tmp_path / "run", model=TINY, steps=3, eval_every=0)]
    out, err = runs.on_ranks(2, "support.faulty", arguments, code=int(step == 3))
    kept = [f"step-{number:08d}" for number in (1, 2, 3) if number != step]
    assert sorted(path.name for path in (tmp_path / "run").glob("*step*")) == kept
    assert (err if step == 3 else out).count("No space left on device") == 1


# ------------------------------------------------------------------------------------------------------------- seeing


def test_tensorboard_holds_what_the_log_does(dataset, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"steps": 3, "log_to": ["tensorboard"], "model": TINY}
    log = train(dataset.path, tmp_path / "run", **options)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([e["loss"] for e in steps_of(log)])
    assert "validation/loss" in board.Tags()["scalars"]
    remove_after(tmp_path / "run", 2)
    train(dataset.path, tmp_path / "run", **options)  # goes on after step 2, which stays
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3]


@pytest.mark.parametrize("isolate", [False, True])
def test_long_rows_are_evaluated_fewer_at_a_time_to_the_same_numbers(dataset, tmp_path, monkeypatch, limit, isolate):
    train(dataset.path, tmp_path / "run", steps=1, isolate_documents=isolate, **QUIET)
    arguments = ["--checkpoint", tmp_path / "run", "--data", dataset.path, "--split", "train", "--max-samples", 24]
    results, rows, real = [], [], micro_batches

    def counted(*given, **more):
        for piece in real(*given, **more):
            rows.append(len(piece["input_ids"]))
            yield piece

    monkeypatch.setattr(evaluation, "micro_batches", counted)
    for tokens, most in ((evaluation.PLACES, evaluation.ROWS), (5 * 32, 5), (1, 1)):
        limit(evaluated_places=tokens)
        rows.clear()
        results.append(json_of(evaluate.main, *arguments))
        assert max(rows) == min(24, most)
    for other in results[1:]:
        assert other["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
        assert (other["targets"], other["samples"]) == (results[0]["targets"], results[0]["samples"])


# ------------------------------------------------------------------------------------------------------------- doctor


def examine(data, out, **options):
    """The exit code of the doctor, and its lines by the name of the check."""
    options = {"data": data, "out": out, "length": 32} | options
    result = invoke(doctor.main, *(word for name in options for word in (f"--{name.replace('_', '-')}", options[name])))
    lines = (line for line in result.output.splitlines() if line[4:6] == "  ")  # not those about defaults
    return result.exit_code, {line.split()[1]: line for line in lines}


def test_the_doctor_finds_nothing_wrong(dataset, tmp_path):
    code, lines = examine(dataset.path, tmp_path / "run", global_batch_size=6, nproc=2)
    assert code == 0
    checks = ["phase", "shards", "samples", "batch", "model", "devices", "run", "memory", "disk", "time"]
    assert list(lines) == checks
    assert all(line.startswith(("PASS", "WARN  devices", "WARN  time")) for line in lines.values())
    assert not (tmp_path / "run").exists()


TWO = [{"steps": 10, "global_batch_size": "4..8"}, {"tokens": "4800", "global_batch_size": 10}]


@pytest.mark.parametrize(
    ("options", "check", "verdict", "value"),
    [
        ({"phase": TWO}, "phase", "PASS", "steps 10 to 25"),
        ({"phase": TWO}, "samples", "PASS", "25 steps, 6,720 tokens"),
        ({"global_batch_size": 200}, "plan", "WARN", "190 samples"),
        ({"global_batch_size": 3, "nproc": 8}, "plan", "WARN", "idle"),
        ({"steps": 10, "warmup_steps": 50, "global_batch_size": 8}, "plan", "WARN", "--warmup-steps 50"),
        ({"steps": 4, "phase": changing(0.5, mlm_probability=[0.3, 0.01])}, "run", "FAIL", "0.01"),
        ({"model": "bert-huge"}, "run", "FAIL", "bert-huge"),
        ({"model": "bert-tiny", "keep": 10**9}, "disk", "FAIL", "--keep"),
    ],
    ids=str,
)
def test_the_doctor_finds_what_is_wrong(dataset, tmp_path, options, check, verdict, value):
    if phases := options.get("phase"):
        file = runs.toml(tmp_path / "run.toml", phase=phases)
        options = {name: given for name, given in options.items() if name != "phase"} | {"config": file}
    code, lines = examine(dataset.path, tmp_path / "run", **options)
    assert lines[check].startswith(verdict)
    assert value in lines[check]
    assert code == (verdict == "FAIL")


def test_the_doctor_measures_how_long_a_run_takes(dataset, tmp_path, limit, costs):
    """A step takes 1 second, an evaluation 130, and a checkpoint 10."""
    limit(warmup_steps=5, timed_steps=20)
    costs(Stream, "next_batch", 1)
    costs(evaluation, "evaluate", 100)
    costs(evaluation, "samples", 30)
    costs(checkpoint.StateDictStager, "stage", 10)
    few = {"model": TINY, "global_batch_size": 6, "steps": 1000, "eval_every": 500, "save_every": 250}
    code, lines = examine(dataset.path, tmp_path / "run", **few, hours=1)
    spent = "about 0:21:40: training 1,000.0 s, evaluations 260.0 s, checkpoints at most 40.0 s, compiling 0.0 s"
    assert (code, lines["time"]) == (0, f"PASS  time       {spent}")
    assert lines["hours"].endswith(f"--steps {1000 * 3420 // 1300} fit into 95 % of 1 hours")
    assert not [*tmp_path.iterdir()]
    line = examine(dataset.path, tmp_path / "run", **few, nproc=2)[1]["time"]
    assert line == f"WARN  time       {spent}; communication between the 2 ranks counts only under torchrun"


def test_the_doctor_measures_each_length_batch_size_and_number_of_layers_once(dataset, tmp_path, monkeypatch, seconds):
    """A step takes a second for each token of a row."""
    taken, real = [], Trainer.step

    def step(trainer, module, batch, *place):
        rows, length = batch.input_ids.shape
        taken.append((length, rows, trainer.learner.model.config.num_hidden_layers))
        seconds.s += length
        return real(trainer, module, batch, *place)

    monkeypatch.setattr(Trainer, "step", step)
    phases = changing(0.625, 0.9375, length=[16, 32, 32], layers=[1, None, None], mlm_probability=[0.3, 0.3, 0.15])
    options = runs.SMALL | {"data": str(dataset.path), "out": str(tmp_path / "run"), "model": TINY, "steps": 160}
    config = Config.make(**options, phase=phases)
    plan = doctor.build(config, 2).stream.plan
    *_, (name, (verdict, line)) = doctor.estimate(config, plan, 2, None)  # without GPUs one process takes all rows
    assert taken == [(16, 6, 1)] * 2 + [(32, 6, 2)] * 2
    assert (name, verdict) == ("time", "WARN")
    assert "training 3,520.0 s" in line
    config = Config.make(**options | {"phase": [{"steps": 100}], "steps": None, "eval_every": 0, "length": 19})
    *_, (name, (verdict, line)) = doctor.estimate(config, doctor.build(config, 1).stream.plan, 1, 1)
    assert line == "durations of the phases times 1.8 fit into 95 % of 1 hours"


def test_the_doctor_that_a_signal_stops_prints_no_time(dataset, tmp_path, monkeypatch):
    at_step(monkeypatch, "next_batch", 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    code, lines = examine(dataset.path, tmp_path / "run", model=TINY, hours=1)
    assert (code, [*lines][-1]) == (0, "run")


def test_the_doctor_finds_damaged_shards_and_runs_and_where_it_cannot_write(dataset, tmp_path, finished, monkeypatch):
    code, lines = examine(tmp_path / "nothing", tmp_path / "run")
    assert (code, list(lines)) == (1, ["run"])
    damaged = shutil.copytree(dataset.path, tmp_path / "damaged")
    flip(damaged / "train-00000.tokens.npy", 128)
    code, lines = examine(damaged, tmp_path / "run")
    assert (code, lines["shards"][:4]) == (1, "FAIL")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *mode, **more: path != tmp_path and access(path, *mode, **more))
    code, lines = examine(dataset.path, tmp_path / "far" / "run")
    assert (code, lines["run"][:4], f" {tmp_path} " in lines["run"]) == (1, "FAIL", True)
    for options, verdict, value in (
        ({}, "PASS", "step-00000006"),
        ({"resume": "no"}, "FAIL", "--out"),
        ({"seed": 1}, "FAIL", "seed 0 → 1"),
    ):
        same = {"optimizer": "adamw", "steps": 6, "lr": 3e-3, "global_batch_size": 6}
        line = examine(dataset.path, finished, **same | options)[1]["run"]
        assert line.startswith(verdict), line
        assert value in line


def as_on_gpus(monkeypatch, *free, bf16=True):
    """torch says what it would say on a machine with GPUs, each with so much memory free of 80 GB."""
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(free),
        "is_bf16_supported": lambda **_: bf16,
        "mem_get_info": lambda number: (free[number], 80 * 10**9),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def test_the_doctor_wants_a_gpu_for_each_rank(monkeypatch):
    as_on_gpus(monkeypatch, 1, 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100")
    assert [doctor._devices(nproc)[0] for nproc in (1, 2, 3)] == ["PASS", "PASS", "FAIL"]
    assert "--nproc 2" in doctor._devices(3)[1]
    for name, value in (("LOCAL_WORLD_SIZE", "3"), ("LOCAL_RANK", "2")):  # also a run
        with monkeypatch.context() as environment, refuses("out-of-range", "nproc_per_node", given=3):
            environment.setenv(name, value)
            world().__enter__()
