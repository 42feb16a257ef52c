"""The commands that tools/crash.py disturbs: their lines, what of them is finished, and what their results differ in.

Each reads from in/ and writes to out/, and to the cache. All inputs are tiny, as a command is run thousands of times.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import shlex
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import campaign
from soak import WORDS, write_text, write_vocab

import bertdata
from bertdata.errors import BertdataError
from bertdata.format.arrays import digest
from bertdata.format.manifest import MANIFEST, REPLACED
from bertdata.format.records import read_record
from bertdata.format.verify import verify
from bertdata.remote import stores
from bertdata.write.staging import PLAN, STAGING, UnitRecord
from bertrain import checkpoint
from bertrain.lab.distillation import answers
from bertrain.models.load import load_model

WHOLE = 1000  # what is finished of a result that is complete
LOCKS = re.compile(r"(.*\.)?lock")  # names of files that say nothing
BUILD = "--tokenizer in/vocab.txt --sentences line --shard-size 1500 --validation 0.2 --workers 1"
RUN = "--length 16 --global-batch-size 4 --lr 1e-2 --log-every 1 --eval-every 0 --seed 3 --optimizer adamw"
TUNE = "--checkpoint in/run --epochs 1 --batch-size 8 --length 16"
BUCKET = "s3://crash"
Finished = Callable[[Path, Path], int]
"""finished(out, whole): how much of a result a reader takes as finished. Raises Half if something of it is not."""
Differences = Callable[[Path, Path], list[str]]


class Half(Exception):
    """A reader would take for whole what is not."""


# ----------------------------------------------------------------------------------------------------- what is finished


def digests(directory: Path) -> dict[str, str]:
    """Path → digest of each file below a directory; "" for a directory. Without locks."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in directory.rglob("*")
        if not LOCKS.fullmatch(path.name)
    }


def differing_files(whole: Path, found: Path) -> list[str]:
    """Files that are not the same. What a kill left of a build's directory, after it was published, is nothing."""
    one, two = digests(whole), digests(found)
    left = [path for path in found.rglob(STAGING) if not (path / PLAN).exists()]
    names = tuple(str(path.relative_to(found)) for path in left)
    two = {name: sha256 for name, sha256 in two.items() if not name.startswith(names)}
    return [
        f"{name} {'differs' if name in one and name in two else 'is missing' if name in one else 'is left over'}"
        for name in sorted({*one, *two})
        if one.get(name) != two.get(name)
    ]


def _require_arrays(record: dict[str, str], places: list[Path], what: str) -> None:
    for name, sha256 in record.items():
        path = next((place / name for place in places if (place / name).exists()), None)
        if path is None or digest(path)[0] != sha256:
            raise Half(f"{what} names {name}, which is {'not there' if path is None else 'not whole'}")


def of_dataset(name: str, staging: str = ".build") -> Finished:
    """The finished units, or WHOLE of a dataset. What is being replaced counts: its readers wait."""

    def finished(out: Path, whole: Path) -> int:
        directory = out / name
        if (directory / MANIFEST).exists():
            if faults := verify(directory):
                raise Half(f"the dataset has faults: {faults[0]}")
            return WHOLE
        if (directory / REPLACED).exists():
            return WHOLE
        units = sorted((directory / staging).glob("unit-*.json"))
        for path in units:
            record = UnitRecord.read(path)
            named = {
                f"{shard.name}.{array}.npy": entry["sha256"]
                for shard in record.shards.values()
                for array, entry in shard.arrays.items()
            }
            _require_arrays(named, [directory / staging, directory], path.name)
        return len(units)

    return finished


def of_cache(out: Path, whole: Path) -> int:
    """The finished units of a teacher's cache."""
    directory = out / "new" / "answers"
    if (directory / answers.CACHE).exists():
        if faults := [*answers.verify(directory)]:
            raise Half(f"the cache has faults: {faults[0]}")
        return WHOLE
    units = sorted(directory.glob("unit-*.json"))
    for path in units:
        named = {f"{path.stem}.{name}.npy": entry["sha256"] for name, entry in read_record(path)["arrays"].items()}
        _require_arrays(named, [directory], path.name)
    return len(units)


def of_checkpoints(pattern: str, results: str = "") -> Finished:
    """The finished models. results: pattern of files of JSON beside them."""

    def finished(out: Path, whole: Path) -> int:
        number = 0
        for path in sorted(out.glob(pattern)):
            if fault := checkpoint.fault_of(path):
                raise Half(f"{path.relative_to(out)}: {fault}")
            number += 1
        for path in out.glob(results) if results else ():
            try:
                json.loads(path.read_bytes())
            except ValueError:
                raise Half(f"{path.relative_to(out)} is no JSON") from None
            number += 100
        return number

    return finished


def of_run(out: Path, whole: Path) -> int:
    """The step of the newest checkpoint. Older ones may be on their way out."""
    newest = max((out / "new" / "run").glob("step-*"), default=None)
    if newest and (fault := checkpoint.fault_of(newest)):
        raise Half(f"{newest.relative_to(out)}: {fault}")
    return int(newest.name[5:]) if newest else 0


def of_files(pattern: str) -> Finished:
    """The files of a result, each of which must be whole if it is there."""

    def finished(out: Path, whole: Path) -> int:
        found = sorted(path for path in out.rglob(pattern) if not path.name.endswith(".tmp") and path.is_file())
        for path in found:
            if path.read_bytes() != (whole / path.relative_to(out)).read_bytes():
                raise Half(f"{path.relative_to(out)} is not whole")
        return len(found)

    return finished


def differing_runs(whole: Path, found: Path) -> list[str]:
    """What two runs differ in, without what tells the time.

    An old checkpoint, and a card that could not be renamed, may be left over until the next start.
    """
    lines = campaign.differences(whole / "new" / "run", found / "new" / "run", is_asked=False)
    later = ("checkpoints are kept", "README.md.tmp is only in the stopped one")
    return [f"{line}: one is left over" if line.endswith(later) else line for line in lines]


# --------------------------------------------------------------------------------------------------------------- server


def _objects() -> dict[str, bytes]:
    """What is in the bucket."""
    import obstore

    store = stores.store_of(BUCKET)
    paths = [meta["path"] for some in obstore.list(store) for meta in some]
    return {path: bytes(obstore.get(store, path).bytes()) for path in paths}


def server() -> str:
    """Its address."""
    return os.environ["AWS_ENDPOINT_URL"]


def of_bucket(out: Path, whole: Path) -> int:
    """Whether the dataset in the bucket has its manifest. All of it must then be there."""
    objects, source = _objects(), out.parent / "in" / "shards"
    if f"pushed/{MANIFEST}" not in objects:
        return 0
    for path in source.rglob("*"):
        if path.is_file() and objects.get(f"pushed/{path.relative_to(source)}") != path.read_bytes():
            raise Half(f"the bucket has {MANIFEST} and not all of {path.name}")
    return WHOLE


def differing_objects(whole: Path, found: Path) -> list[str]:
    names = {key.removeprefix("pushed/") for key in _objects() if key.startswith("pushed/")}
    source = found.parent / "in" / "shards"
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    return [f"{name} is {'missing' if name in expected else 'left over'}" for name in sorted(names ^ expected)]


# ---------------------------------------------------------------------------------------------------------------- table


class Command(NamedTuple):
    """One command, or several that belong together."""

    lines: tuple[str, ...]
    finished: Finished
    differences: Differences = differing_files
    before: tuple[str, ...] = ()  # made before, undisturbed
    server: str = ""  # what the command does with the server: "reads" or "writes"
    kernels: bool = False  # whether its compiled loops can be loaded by running it, because it starts no other library


NEW = "out/new"  # two directories deep, as the names of new directories can be lost, too
COMMANDS: dict[str, Command] = {
    "build": Command(
        (f"bertdata build in/text.txt --out {NEW}/shards {BUILD}",), of_dataset("new/shards"), kernels=True
    ),
    "overwrite": Command(
        (f"bertdata build in/text.txt --out {NEW}/shards --overwrite {BUILD}",),
        of_dataset("new/shards"),
        before=(f"bertdata build in/other.txt --out {NEW}/shards {BUILD}",),
        kernels=True,
    ),
    "dedup": Command(
        (f"bertdata build in/text.txt in/other.txt --out {NEW}/shards --dedup {BUILD}",),
        of_dataset("new/shards"),
        kernels=True,
    ),
    "parts": Command(
        (
            f"bertdata build in/text.txt --out {NEW}/shards --part 1/2 {BUILD}",
            f"bertdata build in/text.txt --out {NEW}/shards --part 2/2 {BUILD}",
            f"bertdata build --out {NEW}/shards --finish",
        ),
        of_dataset("new/shards"),
        kernels=True,
    ),
    "import": Command(
        (f"bertdata import in/ids --tokenizer in/vocab.txt --out {NEW}/imported --shard-size 1500 --validation 0.2",),
        of_dataset("new/imported"),
        kernels=True,
    ),
    "export": Command((f"bertdata export in/shards --out {NEW}/rows",), of_files("*.parquet")),
    "push": Command((f"bertdata push in/shards {BUCKET}/pushed",), of_bucket, differing_objects, server="writes"),
    "pull": Command((f"bertdata pull {BUCKET}/served {NEW}/copy",), of_dataset("new/copy"), server="reads"),
    "pull-plain": Command((f"bertdata pull {BUCKET}/plain {NEW}/copy",), of_dataset("new/copy"), server="reads"),
    "pretrain": Command(
        (
            f"bertrain pretrain --data in/shards --model in/tiny.json --out {NEW}/run --steps 3 --save-every 1 "
            f"--keep 2 --isolate-documents {RUN}",
        ),
        of_run,
        differing_runs,
    ),
    "teacher": Command(
        (
            f"bertrain teacher --model in/run --data in/shards --out {NEW}/answers --top-k 4 --max-samples 24 "
            "--unit-samples 8 --batch-size 8 --length 16 --seed 3",
        ),
        of_cache,
    ),
    "finetune": Command(
        (f"bertrain finetune {TUNE} --train in/train.tsv --dev in/dev.tsv --out {NEW}/tuned --seeds 2",),
        of_checkpoints("new/tuned/seed-*", "new/tuned/result.json"),
    ),
    "suite": Command(
        (f"bertrain suite glue --data in/glue --out {NEW}/suite --seeds 1 {TUNE}",),
        of_checkpoints("new/suite/*/seed-*", "new/suite/**/result.json"),
    ),
    "augment": Command(
        (
            "bertrain augment --checkpoint in/run --train in/train.tsv --copies 2 --candidates 2 "
            "--out out/augmented.tsv",
        ),
        of_files("augmented.tsv"),
    ),
    "extract": Command(
        (f"bertrain extract --checkpoint in/elastic --layers 1 --out {NEW}/small",), of_checkpoints("new/small")
    ),
    "merge": Command(
        (f"bertrain merge in/run/step-00000001 in/run/step-00000002 --out {NEW}/merged",), of_checkpoints("new/merged")
    ),
}
INPUTS = {
    "shards": f"bertdata build text.txt --out shards {BUILD.replace('in/', '')}",
    "ids": "bertdata export shards --out ids",
    "run": f"bertrain pretrain --data shards --model tiny.json --out run --steps 2 --save-every 1 --keep 9 {RUN}",
    "elastic": f"bertrain pretrain --data shards --model tiny.json --out elastic --steps 1 --elastic layers=1:2 {RUN}",
}
"""What is made of the text, in this order; all are made of shards."""


def make_inputs(folder: Path, names: list[str]) -> None:
    """Writes what commands read into the present folder: text, labelled examples, and what they need of INPUTS."""
    write_text(folder / "text.txt", 4200)
    write_text(folder / "other.txt", 2000, seed=1)
    size = len(write_vocab(folder / "vocab.txt").read_text().splitlines())
    sizes = {"vocab_size": size, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    Path("tiny.json").write_text(json.dumps({"model_type": "bert"} | sizes | no_dropout))
    Path("glue/CoLA").mkdir(parents=True, exist_ok=True)
    for name, number in (("train.tsv", 12), ("dev.tsv", 6)):
        rows = [" ".join(WORDS[(row + at) % len(WORDS)] for at in range(5)) for row in range(number)]
        Path(name).write_text("".join(f"{row}\t{'river' in row}\n" for row in rows))
        Path("glue/CoLA", name).write_text("".join(f"x\t{int('river' in row)}\t\t{row}\n" for row in rows))
    needed = {name for command in names for line in COMMANDS[command].lines for name in re.findall(r"in/(\w+)", line)}
    needed |= {"shards"} if needed & INPUTS.keys() or any(COMMANDS[name].server for name in names) else set()
    for name, line in INPUTS.items():
        if name in needed:
            program, *words = shlex.split(line)
            command = importlib.import_module("bertdata.cli" if program == "bertdata" else "bertrain.__main__").main
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                command(words, standalone_mode=False)


def load_kernels(folder: Path) -> None:
    """Loads the compiled loops of reading, which a command of bertrain uses, and what transformers makes once."""
    for kind in ("windows", "packed"):
        next(bertdata.Loader(bertdata.open(folder / "shards"), samples=kind, length=16, global_batch_size=4))
    for path in (folder / "run").glob("step-*"):
        load_model(path)


def put_dataset(address: str, shards: Path) -> None:
    """Empties the server, and puts a dataset there, with origins and without, which is pulled."""
    requests = [("POST", "/moto-api/reset", b""), ("PUT", "/crash", b"")]
    files = {str(path.relative_to(shards)): path.read_bytes() for path in sorted(shards.rglob("*")) if path.is_file()}
    requests += [("PUT", f"/crash/served/{name}", content) for name, content in files.items()]
    requests += [("PUT", f"/crash/plain/{name}", files[name]) for name in files if not name.startswith("origins/")]
    kind = {"Content-Type": "application/octet-stream"}  # else it takes the content for a form
    for method, path, content in requests:
        asked = urllib.request.Request(address + path, content, kind, method=method)
        urllib.request.urlopen(asked).close()


def checked(finished: Finished, out: Path, whole: Path) -> tuple[int, str]:
    """How much is finished, and what is wrong with it, if something is."""
    try:
        return finished(out, whole), ""
    except (Half, BertdataError) as error:
        return 0, str(error)
