"""Checkpoints: ordinary Hugging Face directories, whole or not there at all.

    run/run.json                    the resolved configuration
    run/log.jsonl                   what happened
    run/step-00000020/              config.json, model.safetensors, tokenizer: AutoModelForMaskedLM loads it
        optimizer.pt  trainer.json  what only we read: AdamW's moments; step, loader state, seed of all draws, versions
        beside.pt                   what is trained beside the model, such as a distillation's projection; often absent
        checkpoint.json             written last: size and SHA-256 of every other file

A checkpoint is written under a temporary name, fsynced and renamed. The newest one whose files are what its
checkpoint.json says is the one that counts; damaged ones are passed over and named.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors import SafetensorError

import bertdata
from bertdata.errors import BuildError, DatasetError, UsageError
from bertdata.files import fsync_directory, make_directory, write_file
from bertdata.files import locked as hold
from bertdata.format.arrays import digest
from bertrain.loss import MaskedLM

INDEX, TRAINER, OPTIMIZER, BESIDE = "checkpoint.json", "trainer.json", "optimizer.pt", "beside.pt"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def locked(run: Path) -> AbstractContextManager[None]:
    """Keeps a second job out of a run directory for as long as this process lives."""
    if run.exists() and not run.is_dir():
        raise UsageError(f"--out {run} is a file; give a directory for the run")
    make_directory(run)
    return hold(run / ".lock", f"{run} is in use", "give another --out")


def save(
    run: Path,
    *,
    step: int,
    module: MaskedLM,
    optimizer: torch.optim.Optimizer,
    trainer: dict[str, Any],
    tokenizer: dict[str, bytes],
    keep: int,
) -> Path:
    """Writes run/step-XXXXXXXX and removes all but the newest `keep`. OSError leaves the earlier ones as they were."""
    target = run / f"step-{step:08d}"
    temporary = run / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        module.model.save_pretrained(temporary)
        if beside := _beside(module):
            torch.save(beside, temporary / BESIDE)
        for name, content in tokenizer.items():
            (temporary / name).write_bytes(content)
        torch.save(optimizer.state_dict(), temporary / OPTIMIZER)
        write_file(temporary / TRAINER, json.dumps(trainer | {"step": step, "versions": versions()}, indent=1).encode())
        files = {}
        mode = (temporary / TRAINER).stat().st_mode  # safetensors writes for its owner alone
        for path in sorted(temporary.iterdir()):
            path.chmod(mode)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)[0]}
        write_file(temporary / INDEX, json.dumps({"files": files}, indent=1).encode())
        shutil.rmtree(target, ignore_errors=True)  # a damaged one of the same step
        os.replace(temporary, target)
        fsync_directory(run)
    except (SafetensorError, RuntimeError) as error:  # what the libraries make of a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        reason = str(error).partition("\n")[0]
        raise BuildError(f"{target} cannot be written ({reason}); make room and run the same command again") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    others = [path for path in _steps(run) if path != target]
    newer = [path for path in others if path.name > target.name]  # damaged: else the run had gone on from there
    for old in newer + others[len(newer) + keep - 1 :]:
        shutil.rmtree(old)
    return target


def versions() -> dict[str, str]:
    return {
        "bertdata": bertdata.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
    }


def _steps(run: Path) -> list[Path]:
    """Checkpoint directories, the newest first."""
    return sorted((path for path in run.glob("step-" + "[0-9]" * 8) if path.is_dir()), reverse=True)


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, if there is one, and a sentence for each damaged one above it."""
    passed_over = []
    for path in _steps(run):
        fault = _fault(path)
        if fault is None:
            return path, passed_over
        passed_over.append(f"checkpoint {path} is damaged and passed over: {fault}")
    return None, passed_over


def _fault(path: Path) -> str | None:
    try:
        files = json.loads((path / INDEX).read_bytes())["files"]
        for name, stated in files.items():
            if (path / name).stat().st_size != stated["bytes"] or digest(path / name)[0] != stated["sha256"]:
                return f"{name} is not what {INDEX} says"
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else path.name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} is not readable"
    return None


def read_trainer(path: Path) -> dict[str, Any]:
    return json.loads((path / TRAINER).read_bytes())


def read_optimizer(path: Path, optimizer: torch.optim.Optimizer, module: MaskedLM) -> None:
    """Loads AdamW's moments, and what is trained beside the model. Never unpickles: weights_only."""
    if _beside(module):
        module.load_state_dict(torch.load(path / BESIDE, map_location="cpu", weights_only=True), strict=False)
    optimizer.load_state_dict(torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True))


def _beside(module: MaskedLM) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if not name.startswith("model.")}


def find(path: Path) -> Path:
    """A directory with a model in it: the path itself, or the newest whole checkpoint of a run."""
    if (path / "config.json").is_file():
        if (path / INDEX).exists() and (fault := _fault(path)):
            raise DatasetError(f"checkpoint {path} is damaged: {fault}; give the run's directory to use another")
        return path
    found, passed_over = newest(path)
    if found is None:
        if passed_over:
            raise DatasetError(passed_over[0])
        raise UsageError(f"{path} holds no checkpoint; give a run directory, or one with config.json and weights")
    return found
