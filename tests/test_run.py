"""What a run can do besides the usual: objectives, time, precisions, signals, checks."""

import errno
import functools
import json
import math
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from support import runs
from support.commands import invoke, refuses, waited
from support.disk import flip, full_at, syncing
from support.families import model_of
from support.runs import (
    QUIET,
    TINY,
    at_step,
    changing,
    entries,
    flags,
    last_checkpoint,
    losses,
    steps_of,
    train,
    train_twice,
)
from transformers import ModernBertConfig, ModernBertForMaskedLM

import bertdata
from bertdata.torch import tensors
from bertrain import checkpoint, ranks, speed
from bertrain import evaluate as evaluation
from bertrain.__main__ import main
from bertrain.commands import doctor
from bertrain.config import Config
from bertrain.data import Stream, micro_batches
from bertrain.models.load import new_model
from bertrain.objectives import num_targets
from bertrain.plan import Plan
from bertrain.trainer import Trainer


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


# --------------------------------------------------------------------------------------------------- time and plans


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


OF_100 = SimpleNamespace(samples=lambda paths, length: 100)  # datasets of 100 samples, whatever their length


def test_a_plan_counts_rows_and_passes_and_warns_of_too_many_or_too_few_rows():
    """A pass has a limit of tokens on a GPU, and one of rows on a CPU, unless its rows are given."""
    for length, rows in ((128, 256), (512, 64), (1024, 32), (8192, 4), (65_536, 1)):
        for given, on_gpu, expected in ((None, True, rows), (None, False, 64), (100, True, 100)):
            config = Config.make(data="x", length=length, global_batch_size=300, micro_batch_size=given)
            assert Plan.make(config, OF_100, world_size=1, on_gpu=on_gpu).micro_batch_size == expected
    given = changing(0.25, 0.5, global_batch_size=[8, 16, "32..8"])
    planned = Plan.make(Config.make(data="x", steps=100, phase=given), OF_100, world_size=2)
    rows = [planned.phase_at(step).rows_at(step) for step in range(100)]
    assert [rows[step] for step in (0, 24, 25, 49, 50, 99)] == [8, 8, 16, 16, 32, 8]
    assert planned.samples() == sum(rows)
    assert [planned.micro_batches(128, rows) for rows in (8, 16, 32)] == [(4, 1), (8, 1), (16, 1)]
    epoch = Plan.make(Config.make(data="x", phase=given), OF_100, world_size=2)
    assert epoch.samples() == pytest.approx(100, abs=40)
    longer = changing(0.5, length=[32, 80], global_batch_size=[2, 6])
    planned = Plan.make(Config.make(data="x", steps=4, micro_batch_size=3, phase=longer), OF_100, world_size=1)
    assert (planned.micro_batches(32, 6), planned.micro_batches(80, 6)) == ((3, 2), (1, 6))
    assert planned.first_micro_batches() == (2, 1)
    for rows, num_ranks, number in ((100, 1, 0), (101, 1, 1), (4, 4, 0), (3, 4, 1)):
        planned = Plan.make(Config.make(data="x", steps=2, global_batch_size=rows), OF_100, world_size=num_ranks)
        assert len(planned.warnings) == number, rows


# ------------------------------------------------------------------------------------------------- precision and speed


def test_an_overflow_of_fp16_is_passed_over(dataset, tmp_path, monkeypatch):
    """The scale is lowered and training goes on, and the log counts the step as any that is skipped."""
    begins = functools.partial(torch.amp.GradScaler, init_scale=2.0**127, backoff_factor=2.0**-112)
    monkeypatch.setattr(torch.amp, "GradScaler", begins)
    options = QUIET | {"steps": 4, "precision": "fp16", "save_every": 2}
    log = steps_of(train_twice(dataset.path, tmp_path / "run", 2, **options))  # which keeps the scale
    assert [entry.get("skipped") for entry in log] == [1, None, None, None]
    assert (log[0]["loss"], log[0]["grad_norm"]) == (None, None)
    assert all(math.isfinite(entry["loss"]) for entry in log[1:])


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
    assert speed.flops_of_row(model, 128, 20) == 6 * (128 * per_token + 20 * width * (width + 100))


def test_operations_of_a_model_that_needs_numbers_are_estimated(configs, dataset):
    weights = model_of(configs["longformer"], dataset)
    assert speed.flops_of_row(weights, 32, 5) == 6 * 32 * sum(parameter.numel() for parameter in weights.parameters())


def test_rates_are_of_all_ranks_since_the_last_entry(dataset, monkeypatch, seconds):
    weights = model_of(TINY, dataset)
    monkeypatch.setattr(speed, "peak_flops", lambda device, precision: 1e7)
    clock = speed.Clock({"trained": 10.0}, runs.CPU, "bf16")
    seconds.s += 5
    clock.start(weights, 32, 5)
    for kind, wait in (("evaluated", 0.5), ("waited", 1.5)):
        seconds.s += 4
        clock.end_step(rows=3, waited=wait)
        seconds.s += 100
        clock.lap(kind)
    flops, rates = 2 * 3 * speed.flops_of_row(weights, 32, 5) / 8, clock.rates(4)
    assert rates.pop("memory_bytes") > 10**8
    expected = {"tokens_per_s": 96.0, "data_wait": 0.25, "flops_per_s": round(flops), "mfu": round(flops / 1e7, 4)}
    assert rates == expected
    assert clock.rates(4)["tokens_per_s"] == 0


def test_the_peak_is_of_the_gpu_that_is_named(monkeypatch):
    gpu, peaks = torch.device("cuda"), {"80GB HBM3": 989e12, "PCIe": 756e12}
    names = {f"NVIDIA H100 {rest}": peak for rest, peak in peaks.items()}
    names |= {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA L40": 181e12, "NVIDIA A10G": None}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert speed.peak_flops(gpu, "fp16") == peak
        for has_bf16 in (True, False):
            monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
            assert speed.peak_flops(gpu, "bf16") == (peak if has_bf16 else None)
    assert speed.peak_flops(runs.CPU, "bf16") is speed.peak_flops(gpu, "fp32") is None


# ------------------------------------------------------------------------------------- checkpoints beside training


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(dataset, tmp_path):
    def stop(processes):
        waited(lambda: not processes[0].is_alive() or (out / "log.jsonl").exists() and entries(out), 400)
        os.kill(processes[-1].pid, signal.SIGTERM)

    out, endless = tmp_path / "run", QUIET | {"steps": 100_000, "save_every": 10**6}
    printed, _ = runs.on_ranks(2, "bertrain.pretrain", flags(dataset.path, out, **endless), meanwhile=stop)
    assert "done: " not in printed
    assert last_checkpoint(out).name == f"step-{entries(out)[-1]['step']:08d}"


def test_steps_go_on_while_a_checkpoint_is_written_which_holds_its_own_step(dataset, tmp_path, monkeypatch):
    options = QUIET | {"steps": 6, "save_every": 3}
    complete = train(dataset.path, tmp_path / "complete", **options)
    begun, go, saved = threading.Event(), threading.Event(), []

    def hold(path, step):
        if step == 3:
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


def test_a_write_that_fails_ends_all_ranks_only_if_it_is_the_last(dataset, tmp_path):
    with full_at(2, 3):
        arguments = flags(dataset.path, tmp_path / "run", **QUIET | {"steps": 3, "save_every": 1})
        said = runs.on_ranks(2, "bertrain.pretrain", arguments, code=1)
    assert [text.count(os.strerror(errno.ENOSPC)) for text in said] == [1, 1]
    assert [path.name for path in (tmp_path / "run").glob("*step*")] == ["step-00000001"]


@pytest.mark.parametrize("isolate", [False, True])
def test_long_rows_are_evaluated_fewer_at_a_time_to_the_same_numbers(dataset, limit, isolate):
    encoder, rows, results = runs.learner(model_of(TINY, dataset), isolate=isolate), [], []
    note = lambda module, _, given: rows.append(len(given["input_ids"]))  # noqa: E731
    encoder.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    for tokens, most in ((evaluation.PLACES, evaluation.ROWS), (5 * 32, 5), (1, 1)):
        limit(evaluated_places=tokens)
        rows.clear()
        some = {"split": "train", "length": 32, "max_samples": 24}
        found = evaluation.evaluate(encoder, dataset, runs.ALONE, **some)
        results.append([found[name] for name in ("loss", "accuracy", "targets", "samples")])
        assert (max(rows), encoder.training) == (min(24, most), True)
        assert results[-1] == pytest.approx(results[0], rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- doctor


def examine(data, out, **options):
    """The exit code of the doctor, and its lines by the name of the check."""
    options = {"data": data, "out": out, "length": 32} | options
    words = (word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value))
    result = invoke(main, "doctor", *words)
    lines = (line for line in result.output.splitlines() if line[4:6] == "  ")  # not those about defaults
    return result.exit_code, {line.split()[1]: line for line in lines}


SAME = {"out": True, "optimizer": "adamw", "steps": 6, "lr": 3e-3, "global_batch_size": 6}  # options of `finished`
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
        (SAME, "run", "PASS", "step-00000006"),
        (SAME | {"resume": "no"}, "run", "FAIL", "--out"),
        (SAME | {"seed": 1}, "run", "FAIL", "seed 0 → 1"),
        ({"model": "bert-tiny", "keep": 10**9}, "disk", "FAIL", "--keep"),
    ],
    ids=str,
)
def test_the_doctor_finds_what_is_wrong(dataset, finished, tmp_path, options, check, verdict, value):
    given = {name: each for name, each in options.items() if name not in ("phase", "out")}
    if "phase" in options:
        given["config"] = runs.toml(tmp_path / "run.toml", phase=options["phase"])
    code, lines = examine(dataset.path, finished if "out" in options else tmp_path / "run", **given)
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
    checks = ["phase", "shards", "samples", "batch", "model", "devices", "run", "memory", "disk", "time", "hours"]
    assert [*lines] == checks
    assert all(line.startswith(("PASS", "WARN  devices")) for line in lines.values())
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


def test_the_doctor_finds_damaged_shards_and_where_it_cannot_write(dataset, tmp_path, monkeypatch):
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


def test_the_doctor_wants_a_gpu_for_each_rank(monkeypatch):
    """And so does a run. torch says what it would say on a machine with two GPUs."""
    answers = {"is_available": True, "device_count": 2, "get_device_name": "H100"}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert [doctor._devices(nproc)[0] for nproc in (1, 2, 3)] == ["PASS", "PASS", "FAIL"]
    assert "--nproc 2" in doctor._devices(3)[1]
    for name, value in (("LOCAL_WORLD_SIZE", "3"), ("LOCAL_RANK", "2")):
        with monkeypatch.context() as environment, refuses("out-of-range", "nproc_per_node", given=3):
            environment.setenv(name, value)
            ranks.world().__enter__()
