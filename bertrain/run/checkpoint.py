"""Checkpoints: ordinary Hugging Face directories, complete or not there at all.

    run/run.json                    the options and what they amount to
    run/log.jsonl                   what happened
    run/step-00000020/              config.json, model.safetensors, tokenizer: AutoModelForMaskedLM loads it
        optimizer.pt  trainer.json  what only this library reads: the optimizer's moments; the state (`state`)
        beside.pt                   parameters of objectives; often absent
        …                           what methods export
        README.md                   a model card, of which no other file knows: it may be edited
        checkpoint.json             written last: size and SHA-256 of every other file

A checkpoint is written under a temporary name, fsynced and renamed; `writer` does it beside training. Seeds of a
fine-tuning are written and checked in the same way. `rundir` chooses among the checkpoints of a run.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from bertdata.errors import BuildError, DatasetError, is_out_of_memory
from bertdata.files import fsync_directory, make_directory, write_file
from bertdata.format.arrays import digest
from bertdata.tokenize.tokenizer import ROLE_SPELLINGS, TOKENIZER, TOKENIZER_CONFIG, LoadedTokenizer, lacks_template
from bertrain.methods import Method
from bertrain.models.families import add_names_of_4, has_token_types
from bertrain.objectives import Learner
from bertrain.run import card

INDEX, OPTIMIZER, BESIDE = "checkpoint.json", "optimizer.pt", "beside.pt"


class Content(NamedTuple):
    """What a checkpoint holds, beside the model's configuration: tensors that may still change, or a copy of them."""

    weights: Mapping[str, torch.Tensor]  # the state dict of a model
    objects: Mapping[str, Any]  # by file name: what torch.save writes
    files: Mapping[str, bytes]


class WriteAbandoned(Exception):
    """A write was left off because the run ends at once."""


def write(
    target: Path,
    model: PreTrainedModel,
    content: Content,
    *,
    leaving: threading.Event | None = None,
    methods: Sequence[Method] = (),
) -> None:
    """Writes a directory that AutoModelForMaskedLM loads, as `whole` does.

    model: of which the weights are, and whose configuration is written. methods: which make ordinary weights of them,
    and write further files.
    """
    with whole(target, leaving=leaving) as temporary:
        weights = content.weights
        for method in methods:
            weights = method.plain_weights(model, weights)
        add_names_of_4(model.config)
        model.save_pretrained(temporary, state_dict=dict(weights))
        for method in methods:
            method.export(model, {**content.weights, **content.objects.get(BESIDE, {})}, temporary)
        for name, saved in content.objects.items():
            _raise_if(leaving)
            torch.save(saved, temporary / name)
        for name, data in content.files.items():
            (temporary / name).write_bytes(data)


@contextmanager
def whole(target: Path, *, leaving: threading.Event | None = None) -> Iterator[Path]:
    """Gives a temporary directory to write a model into; then syncs it, adds the index, and renames it to `target`.

    Raises OSError or BuildError if there is no room, and WriteAbandoned once `leaving` is set. After an error before
    the renaming, a directory of this name is as it was.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        make_directory(target.parent)  # also that of a run, should somebody have removed it
        temporary.mkdir()
        yield temporary
        _seal(temporary, leaving)
        _raise_if(leaving)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        fsync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not (isinstance(error, SafetensorError | RuntimeError) or type(error) is Exception):
            raise  # else it is what safetensors, torch and tokenizers make of a disk that fails
        reason = str(error).partition("\n")[0]
        sentence = f"{target} cannot be written ({reason}); make room and run the same command again"
        raise BuildError(sentence, "unwritable", option="out", given=str(target)) from None


def _seal(directory: Path, leaving: threading.Event | None) -> None:
    """Syncs all files of a directory, then writes the index, which has the size and the digest of each."""
    files, paths, directories = {}, list[Path](), list[Path]()
    mode = (directory / "config.json").stat().st_mode  # safetensors writes for its owner alone
    for root, _, names in os.walk(directory, onerror=_fail):
        directories.append(Path(root))
        paths += [Path(root, name) for name in names]
    for path in sorted(paths):
        _raise_if(leaving)
        path.chmod(mode)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        if path != directory / card.CARD:
            name = path.relative_to(directory).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": digest(path)[0]}
    for path in directories:
        fsync_directory(path)
    write_file(directory / INDEX, json.dumps({"files": files}, indent=1).encode())


def _fail(error: OSError) -> None:
    raise error  # which os.walk and Path.glob would pass over


def _raise_if(leaving: threading.Event | None) -> None:
    if leaving and leaving.is_set():
        raise WriteAbandoned


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint. Raises DatasetError for an error that says nothing of what is on disk."""
    try:
        files = json.loads((path / INDEX).read_bytes())["files"]
        if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
            return f"{INDEX} names no weights"
        for name, stated in files.items():
            if (path / name).stat().st_size != stated["bytes"] or digest(path / name)[0] != stated["sha256"]:
                return f"{name} is not what {INDEX} says"
    except DatasetError as error:  # a link, or no ordinary file
        return str(error)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    except OSError as error:
        raise DatasetError(
            f"checkpoint {path} cannot be read: {error.strerror}; nothing was changed, so run the same command again "
            "when it can be read",
            "unreadable",
            given=str(path),
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{INDEX} is not readable"
    return None


def _loaded(path: Path, *members: str) -> dict[str, Any]:
    """What torch.save wrote: a dictionary with these members. Never unpickles: weights_only.

    Raises DatasetError for anything else, and OSError if it cannot be read.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if not (isinstance(saved, dict) and saved.keys() >= {*members}):
            raise ValueError(f"it is not a dictionary with {' and '.join(members) or 'tensors'}")
    except Exception as error:  # what torch makes of any bytes
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0].rstrip(".")
        sentence = f"{path} is damaged: {reason}; give another checkpoint, or its weights alone with --init"
        raise DatasetError(sentence, "damaged", given=str(path)) from None
    return saved


def read_optimizer(path: Path, optimizer: torch.optim.Optimizer, learner: Learner) -> None:
    """Loads the optimizer's moments and the parameters of objectives; its settings stay those of this run.

    Raises DatasetError if they are of other parameters, or damaged.
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        if learner.objective_tensors():
            beside = _loaded(path / BESIDE)
            if beside.keys() != learner.objective_tensors().keys():
                raise ValueError(f"objectives had {', '.join(beside)}")
            learner.load_state_dict(beside, strict=False)
        optimizer.load_state_dict(_loaded(path / OPTIMIZER, "state", "param_groups"))
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        reason = str(error).partition(" state_dict for Learner:")[2].strip() or str(error)  # what follows that heading
        reason = reason.partition("\n")[0].rstrip(".")
        sentence = (
            f"{path} was written by a run with other parameters ({reason}); give the same --objective and "
            "methods, or another --out"
        )
        raise DatasetError(sentence, "other-settings", option="objective", given=reason) from None
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        group.update(given)


def plain_tokenizer(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a tokenizer as transformers 4 and 5, and other programs, read them.

    A file has other bytes only if it holds truncation or padding of an earlier use, or what transformers 5 alone knows.
    """
    written, before = dict(files), json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    config = {name: value for name, value in before.items() if name not in ("backend", "is_local", "local_files_only")}
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config != before:
        written[TOKENIZER_CONFIG] = json.dumps(config, ensure_ascii=False, indent=1).encode()
    content = json.loads(files.get(TOKENIZER, b"{}"))
    if content.get("truncation") or content.get("padding"):
        content |= {"truncation": None, "padding": None}
        written[TOKENIZER] = json.dumps(content, ensure_ascii=False, indent=1).encode()
    return written


def tokenizer_files(file_of: Callable[[str], bytes], model: PreTrainedModel, max_length: int) -> dict[str, bytes]:
    """What a checkpoint holds of a tokenizer. file_of: the contents of its files by name.

    tokenizer_config.json gets the model's length, so that truncation=True cuts text to what the model takes, and the
    model's inputs: token_type_ids only if it has them. A tokenizer.json that adds no [CLS] and [SEP], as in older
    datasets, adds them here.
    """
    config = json.loads(file_of(TOKENIZER_CONFIG)) | {"model_max_length": max_length}
    config["model_input_names"] = ["input_ids", *(["token_type_ids"] * has_token_types(model)), "attention_mask"]
    content = json.dumps(config, ensure_ascii=False, indent=1).encode() + b"\n"
    tokenizer = file_of(TOKENIZER)
    roles = {role: config[f"{role}_token"] for role in ROLE_SPELLINGS if f"{role}_token" in config}
    if lacks_template(json.loads(tokenizer), roles):
        tokenizer = LoadedTokenizer(tokenizer.decode(), roles).files[TOKENIZER]
    return {TOKENIZER: tokenizer, TOKENIZER_CONFIG: content}
