"""What the tests of training share: a run in this process, a run of several, and what it wrote down."""

import builtins
import errno
import importlib
import io
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertdata.format.arrays import digest
from bertrain import checkpoint, evaluate, methods, objectives, pretrain, ranks, trainer
from bertrain.config import Config
from bertrain.data import Stream
from support.commands import refused
from support.limits import limits

torch.set_num_threads(1)  # the same bits again need the same number of threads
limits(warmup_steps=1, timed_steps=1)

CPU = torch.device("cpu")
ALONE = ranks.World(0, 1, CPU)
SMALL = {
    "model": "modernbert-tiny",
    "optimizer": "adamw",
    "length": 32,
    "global_batch_size": 6,
    "lr": 3e-3,
    "log_every": 1,
    "eval_every": 3,
    "save_every": 1,
    "keep": 100,
}
TINY = str(Path(__file__).parents[1] / "tiny.json")  # a BERT without dropout, of two layers and 32 dimensions
QUIET = {"model": TINY, "eval_every": 0, "save_every": 1000}  # the quickest run: one checkpoint, no evaluation but one


def config_of(**options):
    """The options of a run, in a test that needs no data or no output."""
    return Config.make(**{"data": "x", "out": "x"} | options)


def train(data, out, *, ranks=None, **options):
    """Pre-trains in this process, or on so many ranks; returns the entries of log.jsonl. data: as `mixing` has it."""
    if ranks:
        on_ranks(ranks, "bertrain.pretrain", flags(data, out, **options))
    else:
        pretrain.pretrain(Config.make(**mixing(data), out=str(out), **chosen(options)))
    return entries(out)


def chosen(options):
    """Options of a small run with others in their place; no model beside weights to start from."""
    return {name: value for name, value in (SMALL | options).items() if name != "model" or not options.get("init")}


def learner(weights, *names, isolate=False):
    """The module that is trained, for objectives by name; masked tokens without any."""
    losses = {name: objectives.OBJECTIVES[name](weights, None) for name in names or ("mlm",)}
    return objectives.Learner(weights, losses, isolate=isolate)


def learner_of(config, weights, shards, precision="fp32", device=CPU):
    """The module that a run with these options trains, on one device."""
    world = replace(ALONE, device=device)
    return trainer.build_learner(config, weights, shards, world, precision, methods.methods_of(config))


def train_twice(data, out, *steps, **options):
    """Pre-trains, and again from the checkpoint of each step, to the same losses and weights; returns the entries."""
    log = train(data, out, **options)
    weights = (last_checkpoint(out) / "model.safetensors").read_bytes()
    for step in steps:
        remove_after(out, step)
        assert losses(train(data, out, **options)) == losses(log)
        assert resumed_from(out) == f"step-{step:08d}"
        assert (last_checkpoint(out) / "model.safetensors").read_bytes() == weights
    return log


def resumed_from(out):
    """The name of the checkpoint that a run went on from."""
    return Path(json.loads((out / "run.json").read_text())["resolved"]["resumed_from"] or "none").name


def changing(*begins, **options):
    """Phases that begin at shares of a run, the first one at 0. options: name → its value in each phase, or None."""
    ends = [*map(Decimal, map(str, begins)), 1]
    phases = []
    for number, end in enumerate(ends):
        sets = {name: values[number] for name, values in options.items() if values[number] is not None}
        phases.append(sets | ({"share": float(end - (ends[number - 1] if number else 0))} if end < 1 else {}))
    return phases


def run_of(config, **world):
    """The parts of a run in this process, from its newest checkpoint. world: what it is told of its ranks."""
    return pretrain.Pretraining(config, replace(ALONE, **world), *checkpoint.newest(Path(config.out)))


def mixing(data):
    """--data and --weights: of one dataset, or of (path, weight) of several."""
    pairs = data if isinstance(data, list) else [(data, 1)]
    weights = {"weights": ",".join(str(weight) for _, weight in pairs)} if len(pairs) > 1 else {}
    return {"data": [str(path) for path, _ in pairs]} | weights


def toml(path, *, phase=(), **options):
    """Writes a file of options, and returns its path."""
    tables = [options, *phase]
    lines = [[f"{name} = {json.dumps(value, default=str)}" for name, value in table.items()] for table in tables]
    path.write_text("\n[[phase]]\n".join("\n".join(table) for table in lines) + "\n")
    return path


def flags(data, out, **options):
    """The arguments of a run. A list is an option that is given several times, True one that has no value.

    With phases all options are in a file: beside the run, unless that is a file.
    """
    pairs = mixing(data) | {"out": out} | chosen(options)
    if "phase" in pairs:
        return ["--config", toml(Path(out).with_name(f"{Path(out).name}.toml"), **pairs)]
    lists = {name: value if isinstance(value, list) else [value] for name, value in pairs.items()}
    return [
        item
        for name, values in lists.items()
        for value in values
        for item in ("--" + name.replace("_", "-"), *([] if value is True else [str(value)]))
    ]


def refused_run(data, out, *, kind, option=None, given=..., says="", **options):
    """Pre-trains in this process, which must be refused as `commands.refused` says; returns the sentence."""
    return refused(pretrain.main, *flags(data, out, **options), kind=kind, option=option, given=given, says=says)


def launch(num_ranks, module, arguments, *, before=(), port=0, **more):
    """Starts a module under torchrun, with options of torchrun's before it.

    port: where the agents of several nodes meet.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *before, "--nproc-per-node", str(num_ranks)]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "-m", module]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *arguments], **streams | more)


FORKS = multiprocessing.get_context("fork")  # of this process, which has imported the trainer already


def _rank(module, arguments, environment, folder):
    os.environ |= environment
    for name in ("stdout", "stderr"):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, getattr(sys, name).fileno())
    torch.set_num_threads(1)
    importlib.import_module("bertrain.__main__" if module == "bertrain" else module).main(arguments)


def on_ranks(num_ranks, module, arguments, *, code=0, meanwhile=lambda ranks: None):
    """Runs a module on ranks as torchrun describes them, which must all end with this exit code; returns its output.

    meanwhile: called with the processes.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(num_ranks)}
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(num_ranks):
            given = module, [*map(str, arguments)], shared | {"RANK": str(rank)}, folder
            ranks.append(FORKS.Process(target=_rank, args=given, daemon=True))
            ranks[-1].start()
        meanwhile(ranks)
        for rank in ranks:
            rank.join(300)
            rank.kill()
            rank.join()
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert {rank.exitcode for rank in ranks} == {code}, err
    return out, err


def entries(out):
    """The entries of log.jsonl about steps and evaluations, without those that say what was read."""
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [entry for entry in log if "stream" not in entry]


def steps_of(log):
    """The entries of a log about training steps."""
    return [entry for entry in log if "lr" in entry]


def losses(log):
    """Step and loss of every entry, training and validation, exactly as logged."""
    return [(entry["step"], entry.get("loss"), entry.get("validation_loss"), entry.get("grad_norm")) for entry in log]


def assert_near(one, other, *names, rel):
    """Entries of two logs have about the same losses and norms of gradients, and numbers of these names."""
    names = ("step", "loss", "validation_loss", "grad_norm", *names)
    logs = ([{name: e[name] for name in names if e.get(name) is not None} for e in log] for log in (one, other))
    for ours, theirs in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs, rel=rel)


def at_step(monkeypatch, name, step, action):
    """Calls `action` before a run reads the rows of the step after `step`, or before its evaluation there."""
    owner = evaluate.Evaluator if name == "evaluate" else Stream
    method = getattr(owner, name)

    def called(self, *arguments, **options):
        if (self if owner is Stream else self._stream).step == step:
            action()
        return method(self, *arguments, **options)

    monkeypatch.setattr(owner, name, called)


def last_checkpoint(run):
    return max(run.glob("step-*"))


def weights_in(directory):
    """Name → tensor of the weights of a checkpoint."""
    return load_file(directory / "model.safetensors")


def remove_after(run, step):
    """Removes the checkpoints of a run after a step, as if it had been stopped there."""
    for path in run.glob("step-*"):
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)


def cannot_read(patch, path, number=errno.EIO):
    """Opening a file fails for a while, as on a disk that is asked again later."""
    real = open

    def opened(file, *arguments, **options):
        if file == path:
            raise OSError(number, os.strerror(number), str(file))
        return real(file, *arguments, **options)

    for module in (builtins, io):
        patch.setattr(module, "open", opened)


def seal(directory):
    """Makes checkpoint.json state what the files are."""
    index = directory / checkpoint.INDEX
    files = json.loads(index.read_bytes())["files"]
    for name in files:
        files[name] = {"bytes": (directory / name).stat().st_size, "sha256": digest(directory / name)[0]}
    index.write_text(json.dumps({"files": files}))
