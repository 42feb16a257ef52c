"""What a run can do besides the usual: objectives, time, precisions, signals, checks."""

import errno
import json
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from support.commands import invoke, refuses, waited
from support.disk import flip, full_at, syncing
from support.families import four_rows, model_of
from support.runs import (
    ALONE,
    QUIET,
    TINY,
    at_step,
    changing,
    config_of,
    entries,
    flags,
    last_checkpoint,
    learner,
    losses,
    on_ranks,
    steps_of,
    toml,
    train,
)
from transformers import ModernBertConfig, ModernBertForMaskedLM

import bertdata
from bertdata.torch import tensors
from bertrain import checkpoint, ranks, speed
from bertrain import evaluate as evaluation
from bertrain.commands import doctor
from bertrain.data import Stream
from bertrain.plan import Plan


def test_losses_of_pairs_are_those_of_transformers(dataset):
    batch, piece = four_rows(dataset, samples="pairs")
    weights = model_of("bert-tiny", dataset, nsp=True)
    sums, given = learner(weights, "mlm", "nsp")(**piece), tensors(batch)
    theirs, num_targets = weights(**given), int((given["labels"] != -100).sum())
    torch.testing.assert_close(sums["mlm"].sum / num_targets + sums["nsp"].sum / 4, theirs.loss)
    right = theirs.seq_relationship_logits.argmax(-1) == given["next_sentence_label"]
    assert sums["nsp"].num_correct == right.sum()


# --------------------------------------------------------------------------------------------------- time and plans


@pytest.fixture
def costs(monkeypatch):
    """costs(owner, name, s): from now on a function takes so many seconds, or s(its result). Nothing else takes any."""
    now = [0.0]
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def add(owner, name, cost):
        method = getattr(owner, name)

        def called(*arguments, **options):
            result = method(*arguments, **options)
            now[0] += cost(result) if callable(cost) else cost
            return result

        monkeypatch.setattr(owner, name, called)

    return add


def test_the_log_says_what_the_time_went_to(dataset, tmp_path, monkeypatch, costs):
    """A step takes 1 second, an evaluation 100, its predictions 30, and a copy for a checkpoint 1,000.

    The third step makes a graph. Only steps count in the speed.
    """
    costs(Stream, "next_batch", 1)
    costs(evaluation, "evaluate", 100)
    costs(evaluation, "samples", 30)
    costs(checkpoint.StateDictStager, "stage", 1000)
    monkeypatch.setattr(speed, "peak_flops", lambda device, precision: 1e8)
    at_step(monkeypatch, "next_batch", 2, lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)))
    out, options = tmp_path / "run", {"eval_every": 3, "save_every": 4, "model": TINY}
    log = train(dataset.path, out, steps=6, **options)
    steps = steps_of(log)
    assert [entry["trained_s"] for entry in steps] == [1, 2, 2, 3, 4, 5]
    assert [entry["compiled_s"] for entry in steps] == [0, 0, 1, 1, 1, 1]
    assert [entry["evaluated_s"] for entry in steps] == [0, 0, 0, 130, 130, 130]
    assert [entry["waited_s"] for entry in steps] == [0, 0, 0, 0, 1000, 1000]
    masking = bertdata.Masking(probability=config_of().mlm_probability)
    slots = bertdata.Loader(dataset, length=32, masking=masking).num_slots
    flops = 6 * speed.flops_of_row(model_of(TINY, dataset), 32, slots)
    assert {(entry["tokens_per_s"], entry["flops_per_s"]) for entry in steps} == {(6 * 32, round(flops))}
    assert {entry["mfu"] for entry in steps} == {round(flops / 1e8, 4)}
    assert all(entry["memory_bytes"] % 1024 == 0 and entry["memory_bytes"] > 1 << 27 for entry in steps)
    assert [entry["validation_s"] for entry in log if "validation_s" in entry] == [130] * 2
    times = json.loads((out / "run.json").read_text())["clock"]
    assert times == {"trained_s": 5, "compiled_s": 1, "evaluated_s": 260, "waited_s": 2000}
    more = steps_of(train(dataset.path, out, steps=8, **options))
    assert [entry["trained_s"] for entry in more[6:]] == [6, 7]


OF_100 = SimpleNamespace(samples=lambda paths, length: 100)  # datasets of 100 samples, whatever their length


def test_a_plan_counts_rows_and_passes_and_warns_of_too_many_or_too_few_rows():
    """A pass has a limit of tokens on a GPU, and one of rows on a CPU, unless its rows are given."""
    for length, rows in ((128, 256), (512, 64), (1024, 32), (8192, 4), (65_536, 1)):
        for given, on_gpu, expected in ((None, True, rows), (None, False, 64), (100, True, 100)):
            config = config_of(length=length, global_batch_size=300, micro_batch_size=given)
            assert Plan.make(config, OF_100, world_size=1, on_gpu=on_gpu).micro_batch_size == expected
    given = changing(0.25, 0.5, global_batch_size=[8, 16, "32..8"])
    planned = Plan.make(config_of(steps=100, phase=given), OF_100, world_size=2)
    rows = [planned.phase_at(step).rows_at(step) for step in range(100)]
    assert [rows[step] for step in (0, 24, 25, 49, 50, 99)] == [8, 8, 16, 16, 32, 8]
    assert planned.samples() == sum(rows)
    assert [planned.micro_batches(128, rows) for rows in (8, 16, 32)] == [(4, 1), (8, 1), (16, 1)]
    longer = changing(0.5, length=[32, 80], global_batch_size=[2, 6])
    planned = Plan.make(config_of(steps=4, micro_batch_size=3, phase=longer), OF_100, world_size=1)
    assert (planned.micro_batches(32, 6), planned.micro_batches(80, 6)) == ((3, 2), (1, 6))
    assert planned.first_micro_batches() == (2, 1)
    for rows, num_ranks, number in ((100, 1, 0), (101, 1, 1), (4, 4, 0), (3, 4, 1)):
        planned = Plan.make(config_of(steps=2, global_batch_size=rows), OF_100, world_size=num_ranks)
        assert len(planned.warnings) == number, rows


# --------------------------------------------------------------------------------------------------------------- speed


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
    assert speed.flops_of_row(torch.nn.Linear(2, 3), 5, 1) == 6 * 5 * 9  # which is no model of transformers


# ------------------------------------------------------------------------------------- checkpoints beside training


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(dataset, tmp_path):
    def stop(processes):
        waited(lambda: not processes[0].is_alive() or (out / "log.jsonl").exists() and entries(out), 400)
        os.kill(processes[-1].pid, signal.SIGTERM)

    out, endless = tmp_path / "run", QUIET | {"steps": 100_000, "save_every": 10**6}
    printed, _ = on_ranks(2, "bertrain.pretrain", flags(dataset.path, out, **endless), meanwhile=stop)
    assert "done: " not in printed
    assert last_checkpoint(out).name == f"step-{entries(out)[-1]['step']:08d}"


def test_steps_go_on_while_a_checkpoint_is_written_which_holds_its_own_step(dataset, tmp_path, monkeypatch):
    options = QUIET | {"steps": 6, "save_every": 3}
    complete = train(dataset.path, tmp_path / "complete", **options)
    go, saved = threading.Event(), []

    def hold(path, step):
        if step == 3:
            assert go.wait(120)

    def look():
        saved.append((tmp_path / "run" / "step-00000003").exists())
        go.set()

    at_step(monkeypatch, "next_batch", 5, look)
    with syncing(hold):
        assert losses(train(dataset.path, tmp_path / "run", **options)) == losses(complete)
    assert saved == [False]
    for name in ("step-00000003/model.safetensors", "step-00000003/optimizer.pt", "step-00000006/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "complete" / name).read_bytes()


@pytest.mark.slow
def test_a_write_that_fails_ends_all_ranks_only_if_it_is_the_last(dataset, tmp_path):
    with full_at(2, 3):
        arguments = flags(dataset.path, tmp_path / "run", **QUIET | {"steps": 3, "save_every": 1})
        said = on_ranks(2, "bertrain.pretrain", arguments, code=1)
    assert [text.count(os.strerror(errno.ENOSPC)) for text in said] == [1, 1]
    assert [path.name for path in (tmp_path / "run").glob("*step*")] == ["step-00000001"]


@pytest.mark.parametrize("isolate", [False, True])
def test_long_rows_are_evaluated_fewer_at_a_time_to_the_same_numbers(dataset, limit, isolate):
    encoder, rows, results = learner(model_of(TINY, dataset), isolate=isolate), [], []
    note = lambda module, _, given: rows.append(len(given["input_ids"]))  # noqa: E731
    encoder.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    for tokens, most in ((evaluation.PLACES, evaluation.ROWS), (5 * 32, 5), (1, 1)):
        limit(evaluated_places=tokens)
        rows.clear()
        some = {"split": "train", "length": 32, "max_samples": 24}
        found = evaluation.evaluate(encoder, dataset, ALONE, **some)
        results.append([found[name] for name in ("loss", "accuracy", "targets", "samples")])
        assert (max(rows), encoder.training) == (min(24, most), True)
        assert results[-1] == pytest.approx(results[0], rel=1e-6)
    total = found["loss"] * found["targets"]  # the losses of rows are added in float64
    assert total != pytest.approx(torch.tensor(total).item(), rel=1e-12)


# ------------------------------------------------------------------------------------------------------------- doctor


def examine(data, out, *, phase=(), **options):
    """The exit code of the doctor, and its lines by the name of the check."""
    options |= {"data": data, "out": out}
    if phase:
        options["config"] = toml(out.with_name("run.toml"), phase=phase)
    words = (word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value))
    result = invoke("bertrain", "doctor", *words)
    lines = (line for line in result.output.splitlines() if line[4:6] == "  ")  # not those about defaults
    return result.exit_code, {line.split()[1]: line for line in lines}


SAME = {"out": "finished", "optimizer": "adamw", "steps": 6, "lr": 3e-3, "global_batch_size": 6}
TWO = [{"steps": 10, "global_batch_size": "4..8"}, {"tokens": "4800", "global_batch_size": 10}]


@pytest.mark.parametrize(
    ("options", "check", "verdict", "value"),
    [
        ({"phase": TWO}, "phase", "PASS", "steps 10 to 25"),
        ({"phase": TWO}, "samples", "PASS", "25 steps, 6,720 tokens"),
        ({"steps": 10, "warmup_steps": 50, "global_batch_size": 8}, "plan", "WARN", "--warmup-steps 50"),
        ({"steps": 4, "phase": changing(0.5, mlm_probability=[0.3, 0.01])}, "run", "FAIL", "0.01"),
        ({"model": "bert-huge"}, "run", "FAIL", "bert-huge"),
        (SAME, "run", "PASS", "step-00000006"),
        (SAME | {"resume": "no"}, "run", "FAIL", "--out"),
        (SAME | {"seed": 1}, "run", "FAIL", "seed 0 → 1"),
        ({"model": "bert-tiny", "keep": 10**9}, "disk", "FAIL", "--keep"),
        ({"out": "below a file"}, "run", "FAIL", TINY),
        ({"data": "nothing"}, "run", "FAIL", "nothing"),
        ({"data": "damaged"}, "shards", "FAIL", "train-00000"),
    ],
    ids=str,
)
def test_the_doctor_finds_what_is_wrong(dataset, finished, tmp_path, options, check, verdict, value):
    flip(shutil.copytree(dataset.path, tmp_path / "damaged") / "train-00000.tokens.npy", 128)
    folders = {"finished": finished, "below a file": f"{TINY}/run", "run": tmp_path / "run"}
    data = tmp_path / options["data"] if "data" in options else dataset.path
    given = {"length": 32} | options | {"data": data, "out": folders[options.get("out", "run")]}
    code, lines = examine(**given)
    assert lines[check].startswith(verdict)
    assert value in lines[check]
    assert code == (verdict == "FAIL")


def test_the_doctor_measures_each_kind_of_step_once_and_how_long_a_run_takes(dataset, tmp_path, costs):
    """A step takes a second for each token of a row, an evaluation 130, and a checkpoint 10."""
    taken = []
    costs(Stream, "next_batch", lambda batch: taken.append(batch.input_ids.shape) or batch.input_ids.shape[1])
    costs(evaluation, "evaluate", 100)
    costs(evaluation, "samples", 30)
    costs(checkpoint.StateDictStager, "stage", 10)
    few = {"model": TINY, "global_batch_size": 6, "hours": 2}
    phases = changing(0.25, 0.5, 0.75, length=[16, 32, 32, 32], layers=[1, 1, None, None], weight_decay=[0, 0, 0, 0.1])
    options = few | {"phase": phases, "steps": 160, "eval_every": 80, "save_every": 40}
    code, lines = examine(dataset.path, tmp_path / "run", **options)
    assert taken == [(6, 16)] * 2 + [(6, 32)] * 4  # the last two phases have one kind of step
    spent = "about 1:19:40: training 4,480.0 s, evaluations 260.0 s, checkpoints at most 40.0 s, compiling 0.0 s"
    assert (code, lines["time"]) == (0, f"PASS  time       {spent}")
    checks = ["phase", "shards", "samples", "batch", "model", "devices", "run", "memory", "disk", "time", "hours"]
    assert [*lines] == checks
    assert all(line.startswith(("PASS", "WARN  devices")) for line in lines.values())
    assert lines["hours"].endswith(f"--steps {160 * 6840 // 4780} fit into 95 % of 2 hours")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    line = examine(dataset.path, tmp_path / "run", **options, nproc=2)[1]["time"]
    assert line == f"WARN  time       {spent}; communication between the 2 ranks counts only under torchrun"
    options = few | {"phase": [{"steps": 100, "length": 18}], "eval_every": 0}
    line = examine(dataset.path, tmp_path / "run", **options)[1]["hours"]
    assert "times 3.53 fit" in line  # into 6840 seconds: 100 × 18, 130 at the end, and a checkpoint


def test_the_doctor_wants_a_gpu_for_each_rank_and_so_does_a_run(monkeypatch):
    """torch says what it would say on a machine with two GPUs."""
    for name, answer in {"is_available": True, "device_count": 2, "get_device_name": "H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert [doctor._devices(nproc)[0] for nproc in (1, 2, 3)] == ["PASS", "PASS", "FAIL"]
    for name, value in (("LOCAL_WORLD_SIZE", "3"), ("LOCAL_RANK", "2")):
        with monkeypatch.context() as environment, refuses("out-of-range", "nproc_per_node", given=3):
            environment.setenv(name, value)
            ranks.world().__enter__()
