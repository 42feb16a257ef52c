"""The commands that tools/crash.py disturbs: their lines, what of them is finished, and what their results differ in.

Each reads from in/ and writes to out/, and to the cache. All inputs are tiny, as a command is run thousands of times.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import campaign
from forks import digests, run
from inputs import write_inputs

import bertdata
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
SHARDS = "--shard-size 1500 --validation 0.2"
BUILD = f"--tokenizer in/vocab.txt --sentences line --workers 1 {SHARDS}"
RUN = "--data in/shards --model in/plain.json --length 16 --global-batch-size 4 --lr 1e-2 --log-every 1 --eval-every 0 "
RUN += "--seed 3 --optimizer adamw"
TUNE = "--checkpoint in/run --epochs 1 --batch-size 24 --length 16"
BUCKET = "s3://crash"
Finished = Callable[[Path, Path], int]
"""finished(out, whole): how much of a result a reader takes as finished. Raises Half if something of it is not."""
Differences = Callable[[Path, Path], list[str]]


class Half(Exception):
    """A reader would take for whole what is not."""


# ----------------------------------------------------------------------------------------------------- what is finished


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


def _require_arrays(arrays: dict[str, Any], places: list[Path], what: str) -> None:
    for name, entry in arrays.items():
        path = next((place / name for place in places if (place / name).exists()), None)
        if path is None or digest(path)[0] != entry["sha256"]:
            raise Half(f"{what} names {name}, which is {'not there' if path is None else 'not whole'}")


def of_dataset(out: Path, whole: Path) -> int:
    """The finished units, or WHOLE of a dataset. What is being replaced counts: its readers wait."""
    directory = out / "new" / "it"
    if (directory / MANIFEST).exists():
        if faults := verify(directory):
            raise Half(f"the dataset has faults: {faults[0]}")
        return WHOLE
    if (directory / REPLACED).exists():
        return WHOLE
    units = sorted((directory / STAGING).glob("unit-*.json"))
    for path in units:
        shards = UnitRecord.read(path).shards.values()
        arrays = {f"{shard.name}.{name}.npy": entry for shard in shards for name, entry in shard.arrays.items()}
        _require_arrays(arrays, [directory / STAGING, directory], path.name)
    return len(units)


def of_cache(out: Path, whole: Path) -> int:
    """The finished units of a teacher's cache."""
    directory = out / "new" / "it"
    if (directory / answers.CACHE).exists():
        if faults := [*answers.verify(directory)]:
            raise Half(f"the cache has faults: {faults[0]}")
        return WHOLE
    units = sorted(directory.glob("unit-*.json"))
    for path in units:
        arrays = {f"{path.stem}.{name}.npy": entry for name, entry in read_record(path)["arrays"].items()}
        _require_arrays(arrays, [directory], path.name)
    return len(units)


def of_checkpoints(pattern: str, results: str = "") -> Finished:
    """The finished models. results: pattern of files of JSON beside them."""

    def finished(out: Path, whole: Path) -> int:
        found = sorted((out / "new").glob(pattern))
        for path in found:
            if fault := checkpoint.fault_of(path):
                raise Half(f"{path.relative_to(out)}: {fault}")
        others = [json.loads(path.read_bytes()) for path in (out / "new").glob(results)] if results else []
        return len(found) + 100 * len(others)

    return finished


def of_run(out: Path, whole: Path) -> int:
    """The step of the newest checkpoint. Older ones may be on their way out."""
    newest = max((out / "new" / "it").glob("step-*"), default=None)
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
    lines = campaign.differences(whole / "new" / "it", found / "new" / "it", is_asked=False)
    later = ("checkpoints are kept", "README.md.tmp is only in the stopped one")
    return [f"{line}: one is left over" if line.endswith(later) else line for line in lines]


# --------------------------------------------------------------------------------------------------------------- server


def _objects() -> dict[str, bytes]:
    """What is in the bucket."""
    import obstore

    store = stores.store_of(BUCKET)
    paths = [meta["path"] for some in obstore.list(store) for meta in some]
    return {path: bytes(obstore.get(store, path).bytes()) for path in paths}


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

    lines: str
    finished: Finished
    differences: Differences = differing_files
    before: str = ""  # made before, undisturbed
    server: str = ""  # what the command does with the server: "reads" or "writes"
    kernels: bool = False  # whether its compiled loops can be loaded by running it, because it starts no other library


NEW = "out/new/it"  # two directories deep, as the names of new directories can be lost, too
TO = f"--out {NEW}"
COMMANDS: dict[str, Command] = {
    "build": Command(f"bertdata build in/english.txt {TO} {BUILD}", of_dataset, kernels=True),
    "overwrite": Command(
        f"bertdata build in/english.txt {TO} --overwrite {BUILD}",
        of_dataset,
        before=f"bertdata build in/pages {TO} --documents file {BUILD}",
        kernels=True,
    ),
    "dedup": Command(f"bertdata build in/english.txt in/pages {TO} --dedup {BUILD}", of_dataset, kernels=True),
    "parts": Command(
        f"bertdata build in/english.txt {TO} --part 1/2 {BUILD} ; "
        f"bertdata build in/english.txt {TO} --part 2/2 {BUILD} ; bertdata build {TO} --finish",
        of_dataset,
        kernels=True,
    ),
    "import": Command(
        f"bertdata import in/tokens.idx --tokenizer in/vocab.txt {TO} {SHARDS}", of_dataset, kernels=True
    ),
    "export": Command(f"bertdata export in/shards {TO}", of_files("*.parquet")),
    "push": Command(f"bertdata push in/shards {BUCKET}/pushed", of_bucket, differing_objects, server="writes"),
    "pull": Command(f"bertdata pull {BUCKET}/served {NEW}", of_dataset, server="reads"),
    "pull-plain": Command(f"bertdata pull {BUCKET}/plain {NEW}", of_dataset, server="reads"),
    "pretrain": Command(
        f"bertrain pretrain {RUN} {TO} --steps 3 --save-every 1 --keep 2 --isolate-documents", of_run, differing_runs
    ),
    "teacher": Command(
        f"bertrain teacher --model in/run --data in/shards {TO} --top-k 4 --max-samples 24 --unit-samples 8 "
        "--batch-size 8 --length 16 --seed 3",
        of_cache,
    ),
    "finetune": Command(
        f"bertrain finetune {TUNE} --train in/train.tsv --dev in/dev.tsv {TO} --seeds 2",
        of_checkpoints("it/seed-*", "it/result.json"),
    ),
    "suite": Command(
        f"bertrain suite glue --data in/glue {TO} --seeds 1 {TUNE}", of_checkpoints("it/*/seed-*", "it/**/result.json")
    ),
    "augment": Command(
        "bertrain augment --checkpoint in/run --train in/dev.tsv --copies 2 --candidates 2 --out out/augmented.tsv",
        of_files("augmented.tsv"),
    ),
    "extract": Command(f"bertrain extract --checkpoint in/elastic --layers 1 {TO}", of_checkpoints("it")),
    "merge": Command(f"bertrain merge in/run/step-00000001 in/run/step-00000002 {TO}", of_checkpoints("it")),
}
INPUTS = {
    "shards": f"bertdata build in/english.txt --out in/shards {BUILD}",
    "run": f"bertrain pretrain {RUN} --out in/run --steps 2 --save-every 1 --keep 9",
    "elastic": f"bertrain pretrain {RUN} --out in/elastic --steps 1 --elastic layers=1:2",
}
"""What is made of the text, in this order; all are made of shards."""


def make_inputs(names: list[str]) -> int:
    """Writes what commands read to in/: text, labelled examples, and what they need of INPUTS."""
    write_inputs(Path("in"), 20)
    Path("in/glue/CoLA").mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        rows = [line.split("\t") for line in Path("in", name).read_text().splitlines()]
        texts = [f"x\t{int(label == 'True')}\t\t{text}\n" for text, label in rows]
        Path("in/glue/CoLA", name).write_text("".join(texts))
    needed = {input for name in names for input in re.findall(r"in/(\w+)", COMMANDS[name].lines)}
    needed |= {"shards"} if needed & INPUTS.keys() or any(COMMANDS[name].server for name in names) else set()
    return run(" ; ".join(line for name, line in INPUTS.items() if name in needed))


def load_kernels(folder: Path) -> None:
    """Loads the compiled loops of reading, which a command of bertrain uses, and what transformers makes once."""
    for kind in ("windows", "packed"):
        next(bertdata.Loader(bertdata.open(folder / "shards"), samples=kind, length=16, global_batch_size=4))
    for path in (folder / "run").glob("step-*"):
        load_model(path)


def put_dataset(shards: Path) -> None:
    """Empties the server, and puts a dataset there, with origins and without, which is pulled."""
    requests = [("POST", "/moto-api/reset", b""), ("PUT", "/crash", b"")]
    files = {str(path.relative_to(shards)): path.read_bytes() for path in sorted(shards.rglob("*")) if path.is_file()}
    requests += [("PUT", f"/crash/served/{name}", content) for name, content in files.items()]
    requests += [("PUT", f"/crash/plain/{name}", files[name]) for name in files if not name.startswith("origins/")]
    kind = {"Content-Type": "application/octet-stream"}  # else it takes the content for a form
    for method, path, content in requests:
        asked = urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + path, content, kind, method=method)
        urllib.request.urlopen(asked).close()
