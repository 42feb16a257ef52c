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

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

import bertdata
from bertdata.support import (
    ROLE_SPELLINGS,
    TEMPORARY,
    TOKENIZER,
    TOKENIZER_CONFIG,
    BuildError,
    DatasetError,
    LoadedTokenizer,
    UsageError,
    digest,
    fsync_directory,
    is_out_of_memory,
    lacks_template,
    locked,
    make_directory,
    naming,
    write_file,
)
from bertrain import card, state
from bertrain.methods import Method
from bertrain.models.families import add_names_of_4, has_token_types
from bertrain.objectives import Learner

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


STEP = "step-"  # what the name of a directory to resume from begins with; the number of the step follows
DAMAGED, KEPT_DAMAGED = "damaged-", 2  # what a directory that cannot be used is called; how many of them stay
STALE_S = 65.0  # for so long a machine may not see what another wrote to a directory that they share (NFS: 60)


class Lock:
    """Keeps a second job out of a run directory, from entering until leaving, for as long as this process lives."""

    def __init__(self, run: Path) -> None:
        self._run, self._held = run, ExitStack()
        self._file: os.stat_result | None = None

    def __enter__(self) -> Lock:
        run = self._run
        try:
            if run.exists() and not run.is_dir():
                raise FileExistsError
            make_directory(run)
        except (FileExistsError, NotADirectoryError):
            sentence = f"--out {run} cannot be made, because a file has this name; give another --out"
            raise UsageError(sentence, "out-exists", option="out", given=str(run)) from None
        self._held.enter_context(locked(run / ".lock", f"{run} is in use", "give another --out"))
        self._file = (run / ".lock").stat()
        return self

    def require(self) -> None:
        """Takes the lock again if somebody removed its file. Raises BuildError if another job has taken it since."""
        with suppress(FileNotFoundError):
            if self._file and os.path.samestat((self._run / ".lock").stat(), self._file):
                return
        self._held.close()
        self.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._held.close()


def require_new(out: str) -> Path:
    """The directory of --out. Raises UsageError if there is anything in it, or if it is a file."""
    target = Path(out).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        sentence = f"--out {out} is not an empty directory; give a new one"
        raise UsageError(sentence, "out-exists", option="out", given=out)
    return target


def _checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the newest first. Raises OSError if they cannot be listed."""
    try:
        names = os.listdir(run)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [run / name for name in names if re.fullmatch(STEP + r"\d{8}", name)]
    return sorted((path for path in found if path.is_dir()), reverse=True)


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, if there is one, and a warning for each newer one that is damaged.

    Raises DatasetError if one cannot be read now, and OSError if the directory cannot be listed.
    """
    warnings: list[str] = []
    for path in _checkpoints(run):
        fault = fault_of(path)
        if fault is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged: {fault}")
    return None, warnings


class Choice(NamedTuple):
    """The checkpoint that a run resumes from, as rank 0 chose it for all ranks."""

    path: Path | None  # None: the run is new
    index_sha256: str  # of its checkpoint.json
    warnings: tuple[str, ...]

    def check(self) -> None:
        """Raises DatasetError unless this rank sees the same checkpoint, or sees it after a while."""
        if self.path is None:
            return
        end = time.monotonic() + STALE_S
        while (seen := self._seen(self.path)) != self.index_sha256:
            if time.monotonic() > end:
                sentence = (
                    f"rank 0 resumes from {self.path}, and another rank does not see the same checkpoint there "
                    f"({seen[:40]}); give an --out that all machines share"
                )
                raise DatasetError(sentence, "other-stream", option="out", given=str(self.path.parent))
            time.sleep(1)

    @staticmethod
    def _seen(path: Path) -> str:
        """The digest of a checkpoint's index, or why it cannot be read."""
        try:
            os.listdir(path.parent)  # a network file system then asks its server what is there
            return hashlib.sha256((path / INDEX).read_bytes()).hexdigest()
        except OSError as error:
            return str(error.strerror)


def choose(run: Path, say: Callable[[str], None]) -> Choice:
    """The newest complete checkpoint of a run, whose lock is held. Reads every byte of it. Removes unfinished ones.

    Newer ones, which are damaged, get another name. say: is told of those that are removed, before. Raises DatasetError
    if no checkpoint is complete, or one cannot be read now: a run never starts anew beside checkpoints.
    """
    path, warnings = newest(run)
    if warnings and path is None:
        raise DatasetError(
            f"{warnings[0]}, and --out has no other that is complete; move its step-* directories away to begin again, "
            "or give another --out",
            "damaged",
            option="out",
            given=str(run),
        )
    named = zip(warnings, _checkpoints(run), strict=False)
    warnings = [f"{warning}; it is now {set_aside(damaged)}" for warning, damaged in named]
    if warnings:
        fsync_directory(run)
        _remove_damaged(run, say)
    _remove_unfinished(run)
    index = hashlib.sha256((path / INDEX).read_bytes()).hexdigest() if path else ""
    return Choice(path, index, tuple(warnings))


def set_aside(damaged: Path) -> Path:
    """Renames a checkpoint to damaged-XXXXXXXX, or damaged-XXXXXXXX-2 and so on, and returns the new path.

    seed-0 of a fine-tuning becomes damaged-seed-0.
    """
    first = damaged.with_name(DAMAGED + damaged.name.removeprefix(STEP))
    paths = chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2)))
    return damaged.rename(next(path for path in paths if not path.exists()))


def _remove_damaged(run: Path, say: Callable[[str], None]) -> None:
    """Removes all but the newest KEPT_DAMAGED of what `set_aside` has made. say: is told of each before."""
    found = [match for name in os.listdir(run) if (match := re.fullmatch(DAMAGED + r"(\d{8})(?:-(\d+))?", name))]
    for old in sorted(found, key=lambda match: (match[1], int(match[2] or 1)))[:-KEPT_DAMAGED]:
        say(f"{run / old[0]}, a damaged checkpoint, is removed; the newest {KEPT_DAMAGED} stay")
        shutil.rmtree(run / old[0])


def _remove_unfinished(run: Path) -> None:
    """Removes what a killed process was writing, also a card: the run may never save this step again."""
    for path in run.glob(f"{STEP}*/{card.CARD}{TEMPORARY}"):
        with suppress(OSError):
            path.unlink()
    for path in run.glob(".*.tmp"):
        if re.fullmatch(rf"\.{STEP}\d{{8}}\.tmp", path.name):
            shutil.rmtree(path, ignore_errors=True)


def remove_others(target: Path, *, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints of a run, of which `target` stays, and milestones.

    Raises the first OSError, after it has tried all.
    """
    others = [path for path in _checkpoints(target.parent) if path != target and not _stays(path)]
    failures = []
    for old in others[keep - 1 :]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _stays(path: Path) -> bool:
    """Whether a checkpoint is a milestone of --save-at, or may be one, as its state cannot be read."""
    try:
        return bool(state.read(path).milestones)
    except FileNotFoundError:
        return False
    except (OSError, DatasetError):
        return True


def find(path: Path, option: str = "checkpoint") -> Path:
    """A directory with a model in it: the path itself, or the newest complete checkpoint of a run.

    option: the option that names it, for errors. Raises UsageError if there is none, DatasetError if it is damaged.
    """
    if (path / "config.json").is_file():
        if (path / INDEX).exists() and (fault := fault_of(path)):
            sentence = f"checkpoint {path} is damaged: {fault}; give the run's directory to use another"
            raise DatasetError(sentence, "damaged", option=option, given=str(path))
        return path
    checkpoint, warnings = newest(path)
    if checkpoint is None:
        if warnings:
            sentence = f"{warnings[0]}, and {path} has no other that is complete; give another run, or a checkpoint"
            raise DatasetError(sentence, "damaged", option=option, given=str(path))
        if not path.exists():
            sentence = f"{path} does not exist; give the directory of a run or of a checkpoint"
            raise UsageError(sentence, "not-found", option=option, given=str(path))
        sentence = f"{path} holds no checkpoint; give the directory of a run, or one with config.json and weights"
        raise UsageError(sentence, "not-a-run", option=option, given=str(path))
    return checkpoint


def resolved(spec: str, option: str = "checkpoint") -> str:
    """The directory of a model, and of a run that of its newest checkpoint; a name on the hub, or none, as it is.

    option: as `find` has it, which raises the same errors.
    """
    return str(find(Path(spec), option)) if spec and Path(spec).is_dir() else spec


T = TypeVar("T")


class Memory:
    """Host memory for a copy of a state, kept from one copy to the next: new pages cost more time than the copy.

    Takes as many bytes as the tensors of the state: with AdamW in float32, 12 for each parameter. Copies of tensors on
    a GPU are in pinned memory.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def reserve(self, state: object) -> None:
        """Gets the memory for a copy of a state, whose tensors are not read."""
        for number, storage in enumerate(_storages(state)):
            self._block(number, storage)

    def copy(self, state: T) -> T:
        """A deep copy. Tensors that share memory do so in the copy. The next `copy` overwrites its tensors."""
        blocks, on_gpu = {}, False
        for number, storage in enumerate(_storages(state)):
            block = self._block(number, storage)
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            block.copy_(source, non_blocking=True)
            blocks[storage.data_ptr()] = block.untyped_storage()
            on_gpu = on_gpu or storage.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        memo: dict[int, Any] = {}
        for tensor in _tensors(state):
            if tensor.untyped_storage().nbytes():
                storage = blocks[tensor.untyped_storage().data_ptr()]
                view = torch.empty(0, dtype=tensor.dtype)
                memo[id(tensor)] = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return copy.deepcopy(state, memo)

    def _block(self, number: int, storage: torch.UntypedStorage) -> torch.Tensor:
        """The memory of the storage with this number: uint8 [bytes]."""
        size = storage.nbytes()
        if number == len(self._blocks) or self._blocks[number].numel() != size:
            pinned = storage.device.type == "cuda"
            self._blocks[number : number + 1] = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_()]
        return self._blocks[number]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _storages(state: object) -> list[torch.UntypedStorage]:
    """The memory that the tensors of a state are in, each once: tied weights share theirs."""
    storages = (tensor.untyped_storage() for tensor in _tensors(state))
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


class Writer:
    """Writes the checkpoints of a run, one after the other. Enter it while the run trains; only rank 0 saves.

    At the end it waits for the write that is under way, also after an error. After a KeyboardInterrupt it leaves the
    write off, as soon as the file that is being written is complete, and nothing of it stays.
    """

    def __init__(
        self,
        run: Path,
        *,
        keep: int,
        saved: Path | None,
        warn: Callable[[str], None],
        methods: Sequence[Method] = (),
    ) -> None:
        """saved: the checkpoint that the run resumes from. warn: shows a line. methods: of the run."""
        self.run, self.keep, self.warn, self._methods = run, keep, warn, methods
        self.saved = saved
        """The newest checkpoint to resume from that is on disk."""
        self.leaving = threading.Event()
        self._memory = Memory()
        self._thread: threading.Thread | None = None
        self._name = ""
        self._failure: Exception | None = None
        self._not_removed: str | None = None

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint on disk."""
        return int(self.saved.name.removeprefix(STEP)) if self.saved else None

    def describe(self) -> str:
        """Return a sentence about what a stopped run has saved."""
        saved = f"Step {self.saved_step} is saved" if self.saved else "Nothing is saved yet"
        return f"{saved}; run the same command to continue."

    def reserve(self, content: Content) -> None:
        """Gets memory for such content, beside training, so that the first save takes no longer than others."""

        def reserve() -> None:
            with contextlib.suppress(RuntimeError, MemoryError):  # then the first save says so
                self._memory.reserve(content)

        self._start(reserve)

    def save(self, target: Path, model: PreTrainedModel, content: Content, *, required: bool) -> None:
        """Copies the content of a checkpoint, and begins to write it into the directory `target`.

        First waits for the write before. A write that fails leaves the earlier checkpoints unchanged; a warning says so
        with the next call. required: waits for the end, and raises OSError or BertdataError if it fails.
        """
        self.wait()
        copied = self._memory.copy(content)
        self._name = target.name

        def save() -> None:
            self._sync_log()
            with naming(target):
                write(target, model, copied, leaving=self.leaving, methods=self._methods)
            self.saved = target
            self.remove_others(target)

        self._start(save)
        if required:
            self.wait(required=True)

    def remove_others(self, saved: Path) -> None:
        """Removes the oldest checkpoints that are too many. `saved` stays. A warning follows if one stays."""
        try:
            remove_others(saved, keep=self.keep)
        except OSError as error:
            self._not_removed = f"{error.filename} cannot be removed: {error.strerror}"

    def _sync_log(self) -> None:
        """Makes the entries of the log survive a loss of power before the checkpoint that follows them does."""
        path = self.run / "log.jsonl"
        with contextlib.suppress(FileNotFoundError), naming(path), open(path, "rb") as log:  # the next entry writes it
            os.fsync(log.fileno())

    def _start(self, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except Exception as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, *, required: bool = False) -> None:
        """Until nothing is being written. Warns if the write failed; required: raises the error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        if self._not_removed:
            self.warn(f"a checkpoint that is not needed any more stays: {self._not_removed}")
            self._not_removed = None
        if failure is None or self.leaving.is_set():
            return
        if required or not isinstance(failure, OSError | bertdata.BertdataError):
            raise failure
        step = int(self._name.rpartition("-")[2])
        self.warn(f"no checkpoint of step {step} was written, and training continues: {failure}")

    def poll(self) -> None:
        """Warns of a write that has failed, without waiting for one that is under way."""
        if self._thread and not self._thread.is_alive():
            self.wait()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.leaving.set()
        self.wait()
