"""Training runs of options drawn at random, killed twice and resumed: each must end as if nothing had happened.

    python tools/campaign.py --count 200 --seed 0 --out campaign/
    python tools/campaign.py --count 5000 --minutes 60 --ranks 3,4 --steps 12 --out campaign/
    python tools/campaign.py --seed 0 --only 17 --out campaign/        the 17th of these runs again

A run draws its options from DIMENSIONS and `_changes`, the number of its ranks, and two stops: a signal, the ranks that
get it, and when. It is made once undisturbed, and once stopped twice and started three times. Then the last checkpoint,
the mean of the weights and log.jsonl must be the same to the bit, except for what tells the time. It prints a line for
each run, and for one that differs what differs and the command line that draws it again. The directories of such a run
stay in --out. Exit code 1 if there is one.

A process of one thread imports everything once, and is forked for each rank, so that a start takes half a second. What
is drawn is the same each time, but the machine decides what a stop hits. Linux.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1, Signals
from typing import Any, NamedTuple

import click
import freeze

from bertdata.cli import one_sentence
from bertdata.errors import UsageError
from bertdata.files import locked

Options = dict[str, Any]  # of Config
Entry = dict[str, Any]  # of log.jsonl

LIMIT_S = 180  # of a start; a rank that takes longer hangs
GRACE_S = 2  # so long after a rank has failed the others are killed, as torchrun does
ENDING_S = 10  # the same for a rank that ended as Ctrl-C ends it: the others end by themselves, unless they begin
POLL_S = 0.002
FORKS = multiprocessing.get_context("fork")

SIZES = {
    "vocab_size": 100,
    "max_position_embeddings": 80,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DIMS = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 80, "vocab_size": 100}
MODELS: dict[str, Options] = {
    "plain": {"model_type": "bert"} | NO_DROPOUT,
    "dropout": {"model_type": "bert", "hidden_dropout_prob": 0.2},
    "modernbert": {"model_type": "modernbert", "local_attention": 8, "global_attn_every_n_layers": 2},
    "modern-dropout": {"model_type": "modernbert", "attention_dropout": 0.1, "mlp_dropout": 0.2},
    "distilbert": {"model_type": "distilbert", "tie_word_embeddings": False} | DIMS,
    "albert": {"model_type": "albert", "embedding_size": 16} | NO_DROPOUT,
    "electra": {"model_type": "electra", "embedding_size": 16},
    "deberta": {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "type_vocab_size": 0,
    },
}

BASE: Options = {
    "data": ["english"],
    "model": "plain.json",
    "optimizer": "adamw",
    "precision": "fp32",
    "length": 32,
    "global_batch_size": 6,
    "lr": 3e-3,
    "log_every": 1,
    "eval_every": 0,
    "save_every": 1,
    "keep": 9,
}
"""What a run has unless something else is drawn."""


def _half(*alternatives: Options) -> list[Options]:
    """One of these in half of the runs."""
    return [*alternatives, *[{}] * len(alternatives)]


_CACHED = {"data": ["english"], "masking": "exact", "shuffle": "full", "data_seed": 3, "alpha": 0.5}
_SIZES = "layers=1:2,width=16:32:16,heads=1:2,feed_forward=24:48:24"
DIMENSIONS: list[list[Options]] = [
    [{"model": f"{name}.json"} for name in [*MODELS, "plain", "dropout", "modernbert", "modern-dropout"]],
    [{}] * 6 + [{"init": "teacher"}, {"init": "teacher", "lora": "r=4,alpha=8"}],
    [
        {},
        {},
        {"data": ["part"]},
        {"data": ["small"]},
        {"data": ["english", "part"], "weights": "0.7,0.3"},
        {"data": ["small", "english"], "weights": "0.6,0.4"},
    ],
    [{}] * 5 + [{"data_seed": 5}],
    [{}] * 3 + [{"objective": "mlm+nsp", "model": "dropout.json"}],
    [{}] * 2 + [{"isolate_documents": True}],
    _half({"masking": "bernoulli"}, {"masking": "whole_word"}, {"masking": "span"}),
    [{}, {"shuffle": "blocks"}],
    [{"global_batch_size": size} for size in (3, 5, 6, 8)],
    _half({"micro_batch_size": 1}, {"micro_batch_size": 2}, {"micro_batch_size": 3}),
    [{}, {}, {"precision": "bf16"}, {"precision": "fp16"}],
    [
        {},
        {"beta1": 0.8, "weight_decay": 0.3},
        {"optimizer": "muon", "muon_rate": 2.0},
        {"optimizer": "muon", "muon_momentum": 0.9},
        {"optimizer": "stableadamw"},
        {"optimizer": "lamb"},
    ],
    [{}, {"schedule": "cosine", "warmup": 0.0}, {"schedule": "wsd", "decay_share": 0.5, "warmup_steps": 2}],
    [{}] * 3 + [{"clip_norm": 0.1}],
    [{}] * 4
    + [{"lr_scale": ["embeddings=0.1"]}, {"lr_scale": ["orm=0", "embeddings=0.5"]}, {"lr_scale": ["embeddings=0"]}],
    [{}] * 4 + [{"elastic": "layers=1:2"}, {"elastic": _SIZES, "sub_networks": 3}],
    [{}] * 8
    + [
        {"teacher": "teacher", "distil": "logits", "temperature": 2.0, "alpha": 0.7},
        {"teacher": "teacher", "distil": "relations"},
        {"teacher": "teacher", "distil": "hidden", "alpha": 0.3},
        {"teacher": "teacher", "distil": "hidden", "distil_layers": "last"},
        {"teacher_cache": "answers"} | _CACHED,
        {"teacher_cache": "answers-again"} | _CACHED | {"data": ["small"]},
    ],
    [{}] * 3 + [{"gradient_checkpointing": True}],
    [{"save_every": number} for number in (1, 1, 1, 2, 3, 1000)],
    [{"keep": number} for number in (1, 2, 9)],
    [{"log_every": number} for number in (1, 1, 2, 3)],
    [{"eval_every": number} for number in (0, 0, 1, 2, 3)],
]
"""Each is drawn from independently of the others, but what does not go with something drawn before is left out."""

CACHES = {"answers": ["--max-samples", "200"], "answers-again": ["--data", "small", "--variants", "1"]}

EXCLUDES = [
    ("elastic", "gradient_checkpointing"),
    ("elastic", "lora"),
    ("objective", "isolate_documents"),
    ("teacher_cache", "objective"),
    ("teacher_cache", "isolate_documents"),
    ("teacher_cache", "phase"),
    ("teacher_cache", "weights"),
    ("init", "model"),
    ("lora", "lr_scale"),
    ("warmup_steps", "phase"),
]
"""Pairs of options that are not drawn together. What bertrain refuses besides is drawn, and counted."""


def _changes(draw: random.Random) -> list[Options]:
    """One to three phases, in which anything that a phase may set may change."""
    if draw.random() < 0.5:
        return []
    shares = draw.choice([[0.5, 0.5], [0.3, 0.7], [0.7, 0.3], [0.4, 0.2, 0.4], [0.2, 0.5, 0.3]])
    phases: list[Options] = [{"share": share} for share in shares]
    growth = [1, *draw.choices([1, 2], k=len(shares) - 2), None] if draw.random() < 0.25 else [None] * len(shares)
    for phase, layers in zip(phases, growth, strict=True):
        for alternatives in _OF_PHASES:
            phase |= draw.choice(alternatives)
        if layers:
            phase["layers"] = layers
    if draw.random() < 0.2:
        phases = [{"steps": draw.randint(1, 3)} | phase for phase in phases]
        for phase in phases:
            del phase["share"]
        return [{"phase": phases, "steps": None}]
    return [{"phase": phases}]


_OF_PHASES: list[list[Options]] = [
    [{}, {}, {"length": 32}, {"length": 48}, {"length": 64}],
    [{}, {}, {"global_batch_size": 4}, {"global_batch_size": 7}, {"global_batch_size": "2..6"}],
    [{}, {}, {"mlm_probability": 0.3}, {"mask_fraction": 0.5, "random_fraction": 0.5}, {"masking": "span"}],
    [{}, {}, {"lr": 1e-3}, {"schedule": "constant", "lr": 2e-3}, {"schedule": "1-sqrt", "lr_end": 0.1, "warmup": 0.3}],
    [{}, {}, {"weight_decay": 0.3}],
    [{}, {}, {}, {"trains": "layer|attention"}],
    [
        {},
        {},
        {},
        {"data": ["part"]},
        {"data": ["small", "english"], "weights": [0.6, 0.4]},
        {"data": ["english", "part", "small"], "mix_temperature": 0.5},
    ],
]


class Stop(NamedTuple):
    """A signal to ranks of a run, as a user, a scheduler or a lack of memory sends it."""

    signal: Signals
    rank: int | None  # None: to all
    steps: int | None  # sent when the log or a checkpoint has so many steps more than before; None: by time
    after: float  # seconds later; of a stop by time, a share of the seconds of the undisturbed run
    patience: float | None = None  # seconds after which all ranks get SIGKILL; None: they have all time

    def __str__(self) -> str:
        whom = "" if self.rank is None else f" to rank {self.rank}"
        when = f"{self.after:.0%}" if self.steps is None else f"{self.steps} steps"
        return f"{self.signal.name}{' and SIGKILL' * (self.patience is not None)}{whom} after {when}"


class Run(NamedTuple):
    """What is drawn."""

    options: Options
    ranks: int
    stops: tuple[Stop, ...]

    @property
    def steps(self) -> int:
        """The steps of the run, or of its phases together."""
        return self.options.get("steps") or sum(phase["steps"] for phase in self.options["phase"])

    def __str__(self) -> str:
        drawn = {name: value for name, value in self.options.items() if BASE.get(name) != value}
        shown = (
            f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}" for name, value in drawn.items()
        )
        return f"ranks={self.ranks} {' '.join(shown)}; {', '.join(map(str, self.stops))}"


class Verdict(NamedTuple):
    """How a run went."""

    word: str  # equal, DIFFERS or refused
    lines: list[str]  # what differs, or why it was refused
    resumed: list[int]  # from the checkpoint of which step each start went on


def drawn(draw: random.Random, ranks: list[int], steps: int) -> Run:
    """A run of at most so many steps, on one of these numbers of ranks."""
    options: Options = {}
    alternatives = [draw.choice(dimension) for dimension in DIMENSIONS] + _changes(draw)
    draw.shuffle(alternatives)
    for alternative in alternatives:
        if _go_together(options, alternative):
            options |= alternative
    options = BASE | {"steps": draw.randint(min(3, steps), steps), "seed": draw.randrange(10)} | options
    if options["steps"] is None:  # the phases have steps
        del options["steps"]
    run = Run(options, draw.choice(ranks), ())
    first = draw.randrange(1, max(2, run.steps - 1))
    second = draw.randrange(max(1, run.steps - first))
    return run._replace(stops=(_stop(draw, run.ranks, first), _stop(draw, run.ranks, second)))


def _go_together(options: Options, more: Options) -> bool:
    clash = any(options.get(name, value) != value for name, value in more.items())
    pairs = [*EXCLUDES, *((other, one) for one, other in EXCLUDES)]
    return not clash and not any(one in options and other in more for one, other in pairs)


def _stop(draw: random.Random, ranks: int, steps: int) -> Stop:
    number = draw.choice([SIGKILL, SIGKILL, SIGKILL, SIGTERM, SIGINT, SIGUSR1])
    rank = draw.randrange(ranks) if draw.random() < 0.3 else None
    patience = draw.uniform(0, 0.06) if number != SIGKILL and draw.random() < 0.3 else None
    if draw.random() < 0.2:
        return Stop(number, rank, None, draw.random(), patience)
    return Stop(number, rank, steps, draw.choice([0.0, draw.uniform(0, 0.02)]), patience)


# --------------------------------------------------------------------------------------------------------------- ranks


class Ended(NamedTuple):
    """How the ranks of a start ended."""

    codes: list[int]
    seconds: float
    is_stop_due: bool  # whether the run trained when a signal came that asks it to end with a checkpoint
    hangs: bool


def _rank(target: Callable[[], None], folder: Path, said: Path, environment: dict[str, str]) -> None:
    """A forked process: its directory, its streams, and signals as a shell would give them to it."""
    import torch

    os.chdir(folder)
    os.environ.update(environment)
    sys.stdout = sys.stderr = open(said, "a", buffering=1)  # noqa: SIM115
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    faulthandler.enable(sys.stderr)
    signal.signal(SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # a signal loses nothing that a disk has not yet
    gc.unfreeze = lambda: None  # what `prepare` has frozen stays so
    target()


def start(target: Callable[[], None], ranks: int, folder: Path, said: Path) -> list[BaseProcess]:
    """Forks ranks as torchrun describes them; they end with this process."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_RUN_ID": "campaign",
    }
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(FORKS.Process(target=_rank, args=(target, folder, said, environment), daemon=True))
        processes[-1].start()
    return processes


def _free_port() -> int:
    """Below those that the system gives to connections, so that none takes it before the ranks meet."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as asking, contextlib.suppress(OSError):
            asking.bind(("127.0.0.1", port))
            return port


def watched(processes: list[BaseProcess], out: Path, stop: Stop | None, whole_s: float) -> Ended:
    """Waits for ranks of a run in `out`, and sends them a signal when it is due.

    whole_s: seconds of the undisturbed run.
    """
    never = float("inf")
    began, failed_at, log, saved = time.monotonic(), never, _inode(out / "log.jsonl"), _saved(out)
    due_at = began + stop.after * whole_s if stop and stop.steps is None else never
    kill_at = never
    is_stop_due = hangs = False
    try:
        while any(process.is_alive() for process in processes):
            now = time.monotonic()
            if stop:
                taken = _reached(out) - saved if _inode(out / "log.jsonl") != log else -1  # steps of this start
                if stop.steps is not None and taken >= stop.steps:
                    due_at = min(due_at, now + stop.after)
                if now >= due_at:
                    kill_at = never if stop.patience is None else now + stop.patience
                    is_stop_due = stop.signal != SIGKILL and stop.patience is None and taken > 0
                    for process in processes if stop.rank is None else [processes[stop.rank]]:
                        if process.is_alive():
                            os.kill(process.pid or 0, stop.signal)
                    stop = None
            codes = {process.exitcode for process in processes} - {None, 0}
            failed_at = min(failed_at, now) if codes else never
            hangs = now > began + LIMIT_S
            if hangs or now >= kill_at or now > failed_at + (ENDING_S if codes == {130} else GRACE_S):
                break
            time.sleep(POLL_S)
    finally:
        for process in processes:
            if hangs and process.is_alive():
                os.kill(process.pid or 0, signal.SIGABRT)  # then it says where it is
                process.join(GRACE_S)
            process.kill()
            process.join()
    return Ended([process.exitcode or 0 for process in processes], time.monotonic() - began, is_stop_due, hangs)


def _inode(path: Path) -> int:
    """A start writes the log anew, as another file."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _reached(out: Path) -> int:
    """The last step that the log or a checkpoint has."""
    with contextlib.suppress(OSError):
        steps = re.findall(rb'^{"step": (\d+)[,}]', (out / "log.jsonl").read_bytes(), re.MULTILINE)
        return max([0, *map(int, steps), _saved(out)])
    return 0


def _saved(out: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in out.glob("step-*")), default=0)


# --------------------------------------------------------------------------------------------------------- differences

TIMES = re.compile(r".*_s|seconds|data_wait|memory_bytes|mfu|apart_s")
"""Numbers in log.jsonl and trainer.json that depend on time or on the machine."""
OWN = {"step", "lr", "grad_norm", "tokens"}  # what of an entry of the log is of its step alone


def differences(whole: Path, stopped: Path, *, is_asked: bool) -> Iterator[str]:
    """What the last checkpoints and logs of two runs differ in.

    is_asked: whether a signal asked the second one to end after a step. Such a run has an entry of that step, too, and
    the next one is about fewer steps.
    """
    yield from _differences_of_logs(whole, stopped, is_asked=is_asked)
    one, two = (max(run.glob("step-*"), default=None) for run in (whole, stopped))
    if (one and one.name) != (two and two.name):
        yield f"{one and one.name} -> {two and two.name}"
    elif one and two:
        yield from _differences_of_directories(one, two)
    yield from (f"{path.name} is in the run" for path in [*stopped.glob("damaged-*"), *stopped.glob(".*.tmp")])
    facts = json.loads((stopped / "run.json").read_bytes())
    if (number := len(list(stopped.glob("step-*")))) > facts["config"]["keep"]:
        yield f"{number} checkpoints are kept"


def _entries(run: Path) -> list[Entry]:
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [_without_times(entry) for entry in entries if "stream" not in entry]


def _without_times(value: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in value.items() if not TIMES.fullmatch(name)}


def _differences_of_logs(whole: Path, stopped: Path, *, is_asked: bool) -> Iterator[str]:
    expected, found = _entries(whole), _entries(stopped)
    if is_asked:
        expected, found = _without_early_ends(expected, found)
    for one, two in zip(expected, found, strict=False):
        names = [name for name in one | two if _bits(one.get(name)) != _bits(two.get(name))]
        if names:
            yield f"step {one['step']}: " + ", ".join(f"{name} {one.get(name)} -> {two.get(name)}" for name in names)
            return
    if len(expected) != len(found):
        steps = [[entry["step"] for entry in entries] for entries in (expected, found)]
        yield f"entries of the log: {steps[0]} -> {steps[1]}"


def _without_early_ends(expected: list[Entry], found: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Leaves out the entries of steps after which a run was asked to end, and the means of the entries that follow."""
    known = {entry["step"] for entry in expected if "lr" in entry}
    kept, shorter, is_early = [], set(), False
    for entry in found:
        if "lr" in entry and entry["step"] not in known:
            is_early = True
            continue
        kept.append(entry)
        if "lr" in entry:
            shorter |= {entry["step"]} if is_early else set()
            is_early = False

    def comparable(entry: Entry) -> Entry:
        is_shorter = "lr" in entry and entry["step"] in shorter
        return {name: value for name, value in entry.items() if name in OWN} if is_shorter else entry

    return list(map(comparable, expected)), list(map(comparable, kept))


def _differences_of_directories(one: Path, two: Path) -> Iterator[str]:
    """The files of two checkpoints that differ; of those with tensors by the names of these. Not the cards."""
    names = [{str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} for run in (one, two)]
    for name in sorted((names[0] | names[1]) - {"README.md", "checkpoint.json"}):
        first, second = one / name, two / name
        if not (first.exists() and second.exists()):
            yield f"{one.name}/{name} is only in {'one' if first.exists() else 'the stopped one'}"
        elif first.read_bytes() != second.read_bytes():
            parts, others = _parts(first), _parts(second)
            apart = [where for where in parts | others if parts.get(where) != others.get(where)]
            if apart or not parts:
                yield f"{one.name}/{name}: {', '.join(apart[:8])}" + f" and {len(apart) - 8} more" * (len(apart) > 8)


def _parts(path: Path) -> dict[str, Any]:
    """The tensors and values in a file, by where they are; nothing for a file of another kind."""
    import torch
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return _flat(load_file(path))
    if path.suffix == ".pt":
        return _flat(torch.load(path, weights_only=True))
    return _flat(_without_times(json.loads(path.read_bytes()))) if path.name == "trainer.json" else {}


def _flat(value: Any, where: str = "") -> dict[str, Any]:
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, part in pairs for name, leaf in _flat(part, f"{where}{key}.").items()}
    return {where.rstrip("."): _bits(value)}


def _bits(value: Any) -> Any:
    """A value that is equal to another one only if all bits are."""
    if hasattr(value, "untyped_storage"):
        import torch

        flat = value.contiguous().flatten()
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return repr(value)


# ------------------------------------------------------------------------------------------------------------ campaign


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _pretrain(*arguments: str) -> Callable[[], None]:
    from bertrain import pretrain

    return lambda: pretrain.main([*map(str, arguments)])


def made(run: Run, inputs: Path, folder: Path) -> Verdict:
    """Makes a run undisturbed, and once more with its stops, in a new folder. inputs: of `make_inputs`."""
    from bertrain.config import Config

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        Config.make(**run.options)
    except UsageError as error:
        return Verdict("refused", [str(error)], [])
    file = folder / "options.toml"
    file.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in run.options.items()), encoding="utf-8")
    steps, resumed, is_asked = run.steps, list[int](), False

    def once(out: Path, said: Path, stop: Stop | None, whole_s: float = 0) -> tuple[Ended, str]:
        """A start, and why it ended as no start may."""
        target = _pretrain("--config", str(file), "--out", str(out))
        ended = watched(start(target, run.ranks, inputs, said), out, stop, whole_s)
        is_done = (out / f"step-{steps:08d}" / "checkpoint.json").exists()
        fault = "hangs" if ended.hangs else ""
        if stop is None and (any(ended.codes) or not is_done):
            fault = fault or f"ends with {ended.codes}"
        elif ended.is_stop_due and not is_done and not set(ended.codes) <= {0, 130}:
            fault = fault or f"ends with {ended.codes} after {stop}"
        return ended, fault and f"{fault}: {_tail(said)}"

    whole, stopped = folder / "whole", folder / "stopped"
    ended, fault = once(whole, folder / "whole.said", None)
    said = (folder / "whole.said").read_text(errors="replace")
    if 2 in ended.codes and (sentences := re.findall("^Error: (.*)", said, re.MULTILINE)):
        return Verdict("refused", [sentences[0]], [])
    if fault:
        return Verdict("DIFFERS", [f"the undisturbed run {fault}"], [])
    whole_s = ended.seconds
    for number, stop in enumerate([*run.stops, None], 1):
        resumed.append(_saved(stopped))
        ended, fault = once(stopped, folder / "stopped.said", stop, whole_s)
        is_asked = is_asked or (stop is not None and stop.signal != SIGKILL)
        if fault:
            return Verdict("DIFFERS", [f"start {number} {fault}"], resumed)
    lines = list(differences(whole, stopped, is_asked=is_asked))
    return Verdict("DIFFERS" if lines else "equal", lines, resumed)


def _tail(said: Path) -> str:
    return " / ".join(said.read_text(errors="replace").splitlines()[-4:])[-600:]


def _in_child(target: Callable[[], None], folder: Path, said: Path) -> None:
    """Does something in a forked process, because it may start threads."""
    (process,) = start(target, 1, folder, said)
    process.join()
    if process.exitcode:
        raise click.ClickException(f"the inputs cannot be made: {_tail(said)}")


def make_inputs(folder: Path) -> None:
    """Datasets of one vocabulary, configurations of models, a trained teacher and its answers."""
    folder.mkdir(parents=True)

    def write() -> None:
        from bertdata.options import build_arguments
        from bertdata.write import build

        freeze.write_inputs(folder)
        for name, values in MODELS.items():
            (folder / f"{name}.json").write_text(json.dumps(SIZES | values))
        kinds: dict[str, Options] = {
            "english": {"sentences": "line", "shard_size": 20_000, "validation": 0.05},
            "part": {"sentences": "line", "max_documents": 150, "validation": 0.1},
            "small": {"sentences": "line", "max_documents": 25, "validation": 0.0},
        }
        for name, options in kinds.items():
            build(["english.txt"], name, **build_arguments({"tokenizer": "vocab.txt"} | options))

    def answer() -> None:
        from bertrain.lab.distillation import teacher

        for name, options in CACHES.items():
            given = ["--model", "teacher", "--data", "english", "--out", name, "--top-k", "8", "--length", "32"]
            teacher.main([*given, "--seed", "3", "--yes", *options], standalone_mode=False)

    options = BASE | {"seed": 3, "steps": 4}
    (folder / "teacher.toml").write_text("".join(f"{name} = {_toml(value)}\n" for name, value in options.items()))
    for step in (write, _pretrain("--config", "teacher.toml", "--out", "teacher"), answer):
        _in_child(step, folder, folder / "said")


def prepare(inputs: Path) -> None:
    """Imports what a run imports, and loads the compiled loops, so that forks have both."""
    from bertrain.config import Config  # noqa: F401

    def collect() -> None:
        with contextlib.suppress(SystemExit):
            _pretrain("--config", "teacher.toml", "--out", "warm")()
        Path("modules").write_text("\n".join(sorted(sys.modules)))

    shutil.rmtree(inputs / "warm", ignore_errors=True)
    _in_child(collect, inputs, inputs / "said")
    for name in [*(inputs / "modules").read_text().split("\n"), "peft", "bertrain.lab.distillation.objective"]:
        if name.partition(".")[0] in ("bertdata", "bertrain", "torch", "transformers", "numba", "peft", "scipy"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    import bertdata

    shards = bertdata.open(inputs / "english")
    for samples in ("windows", "pairs", "packed"):
        for policy in ("exact", "bernoulli", "whole_word", "span"):
            masking = bertdata.Masking(probability=0.15, policy=policy)
            next(bertdata.Loader(shards, length=32, global_batch_size=4, samples=samples, masking=masking))
    gc.collect()
    gc.freeze()  # to look at all that is imported takes longer than some steps


@click.command()
@click.option("--count", default=200, show_default=True, help="Runs.")
@click.option("--seed", default=0, show_default=True, help="What is drawn.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory of inputs, and of what differs.")
@click.option("--minutes", type=float, help="Draw no more runs after so long.")
@click.option("--ranks", default="1,2,3,4", show_default=True, help="Numbers of ranks to draw from.")
@click.option("--steps", default=6, type=click.IntRange(3), show_default=True, help="Most steps of a run.")
@click.option("--only", type=int, help="Make this run alone, and keep its directories.")
def main(count: int, seed: int, out: Path, minutes: float | None, ranks: str, steps: int, only: int | None) -> None:
    """Training runs of options drawn at random, killed twice and resumed, compared with undisturbed ones to the bit."""
    os.environ |= freeze.QUIET
    out = out.resolve()
    os.environ["BERTDATA_CACHE"] = str(out / "cache")
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with one_sentence():
            held.enter_context(locked(out / ".lock", f"{out} is in use", "give another --out"))
        num_differ = _campaign(count, seed, out, minutes, ranks, steps, only)
    raise SystemExit(num_differ > 0)


def _campaign(count: int, seed: int, out: Path, minutes: float | None, ranks: str, steps: int, only: int | None) -> int:
    """Makes the runs, prints how they went, and returns how many differ."""
    began, inputs = time.monotonic(), out / "inputs"
    if only is None or not (inputs / "modules").exists():
        shutil.rmtree(inputs, ignore_errors=True)
        make_inputs(inputs)
    prepare(inputs)
    again = [sys.executable, *sys.argv[:1], "--seed", seed, "--ranks", ranks, "--steps", steps, "--out", out, "--only"]
    words, of_ranks, hits = Counter[str](), Counter[int](), Counter[str]()
    prepared = time.monotonic()
    for number in range(count) if only is None else [only]:
        if minutes is not None and time.monotonic() > began + 60 * minutes:
            break
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
        run = drawn(random.Random(f"{seed} {number}"), [*map(int, ranks.split(","))], steps)
        run_began = time.monotonic()
        verdict = made(run, inputs, out / f"{number}")
        words[verdict.word] += 1
        of_ranks[run.ranks] += verdict.word != "refused"
        ends = {0: "the beginning", run.steps: "the end"}
        hits.update(ends.get(step, "a step between") for step in verdict.resumed[1:])
        resumed = f", resumed from {' and '.join(map(str, verdict.resumed[1:]))}" if verdict.resumed else ""
        click.echo(f"{number}: {run}{resumed}, {time.monotonic() - run_began:.1f} s: {verdict.word}")
        for line in verdict.lines:
            click.echo(f"    {line}")
        if verdict.word == "DIFFERS":
            click.echo(f"    {shlex.join([*map(str, again), str(number)])}")
        elif only is None:
            shutil.rmtree(out / f"{number}")
    num_made, seconds = sum(of_ranks.values()), time.monotonic() - prepared
    by_ranks = ", ".join(f"{of_ranks[number]} on {number}" for number in sorted(of_ranks))
    resumed = ", ".join(f"{name} {number} times" for name, number in hits.items())
    click.echo(
        f"{num_made} runs ({by_ranks} ranks) in {seconds:.0f} s, {seconds / max(1, num_made):.1f} s each; resumed from "
        f"{resumed}; {words['refused']} refused; {words['DIFFERS']} differ"
    )
    return words["DIFFERS"]


if __name__ == "__main__":
    main()
