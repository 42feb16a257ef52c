"""What the tests of training share: a run in this process, a run of several, and what it wrote down."""

import json
import os
import subprocess
import sys

import torch

from bertrain.config import Config
from bertrain.pretrain import pretrain

torch.set_num_threads(1)  # the same bits again need the same number of threads

SMALL = {
    "model": "modernbert-tiny",
    "length": 32,
    "global_batch_size": 6,
    "lr": 3e-3,
    "log_every": 1,
    "eval_every": 3,
    "save_every": 1,
    "keep": 100,
}


def train(data, out, **options):
    """Pre-trains in this process; returns the entries of log.jsonl."""
    pretrain(Config(data=str(data), out=str(out), **SMALL | options))
    return entries(out)


def flags(data, out, **options):
    pairs = {"data": data, "out": out} | SMALL | options
    return [item for name, value in pairs.items() for item in ("--" + name.replace("_", "-"), str(value))]


def launch(num_ranks, module, arguments, **more):
    """Starts a module under torchrun; each rank has one thread."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += [
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "-m",
        module,
        *arguments,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **streams | more)


def torchrun(num_ranks, module, arguments):
    """Runs a module under torchrun to its end; returns exit code, stdout and stderr."""
    with launch(num_ranks, module, arguments) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def entries(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(log):
    """Step and loss of every entry, training and validation, exactly as logged."""
    return [(entry["step"], entry.get("loss"), entry.get("validation_loss"), entry.get("grad_norm")) for entry in log]
