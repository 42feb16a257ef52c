"""The directory of an unfinished build: its locks, its plan, the records of its finished units, attempts at others."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bertdata.errors import BuildError
from bertdata.files import locked, make_directory, naming, open_plain, write_file
from bertdata.format.manifest import MANIFEST
from bertdata.format.records import read_record
from bertdata.sources.split import UNIT_RULE

STAGING, PLAN = ".build", "plan.json"
ATTEMPTS = "attempts-"  # what the name of the directory begins with in which the tasks on a cluster write


@contextmanager
def staging_directory(directory: Path, *, overwrite: bool, part: tuple[int, int] | None = None) -> Iterator[Path]:
    """The .build of a dataset's directory, which is made and locked. Parts share it; each part has a lock of its own.

    A failure removes what it made, unless a unit is finished. Raises BuildError if another process holds the lock, or
    if the directory holds a dataset (without `overwrite`) or other files.
    """
    staging = directory / STAGING
    _require_free(directory, overwrite=overwrite)
    created = not directory.exists()
    busy, advice = f"{directory} is being built", "wait for it"
    with ExitStack() as locks:
        while True:  # until the directory is not the one that a build, which has just ended, removed
            make_directory(staging)
            with suppress(FileNotFoundError):
                locks.enter_context(locked(staging / "lock", busy, advice, shared=part is not None))
                break
        if part is not None:
            lock_of_part = staging / part_name(*part).replace(".json", ".lock")
            locks.enter_context(locked(lock_of_part, f"part {part[0] + 1}/{part[1]} of {busy}", advice))
        try:
            _require_free(directory, overwrite=overwrite)  # again: another build may have just ended
            with naming(directory):
                yield staging
        except Exception:  # not KeyboardInterrupt, after which the build can continue
            if part is None and not any(staging.glob("unit-*")):
                shutil.rmtree(staging, ignore_errors=True)
                if created and not any(directory.iterdir()):
                    directory.rmdir()
            raise


def _require_free(directory: Path, *, overwrite: bool) -> None:
    """Raises BuildError if a directory holds a dataset (without `overwrite`) or what no build wrote."""
    staging = directory / STAGING
    if directory.exists() and not directory.is_dir():
        sentence = f"{directory} is a file; give an empty directory, or one that does not exist yet"
        raise BuildError(sentence, "out-exists", option="out", given=directory)
    if staging.is_symlink() or (staging.exists() and not staging.is_dir()):
        sentence = f"{staging} is not a directory that a build made; remove it, or give another --out"
        raise BuildError(sentence, "wrong-file-type", option="out", given=staging)
    if (directory / MANIFEST).exists():
        if not overwrite and not (staging / PLAN).exists():
            sentence = f"{directory} already holds a dataset; use --overwrite to replace it, or give another --out"
            raise BuildError(sentence, "out-exists", option="out", given=directory)
    elif directory.exists() and not staging.exists() and any(directory.iterdir()):
        sentence = (
            f"{directory} holds other files and no dataset; give an empty directory, or one that does not exist yet"
        )
        raise BuildError(sentence, "out-exists", option="out", given=directory)


@contextmanager
def planning(staging: Path) -> Iterator[None]:
    """A context that one process at a time is in; the others wait."""
    with open_plain(staging / "planning.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def continue_or_start(staging: Path, plan: dict[str, Any], *, overwrite: bool, start_over: bool) -> None:
    """Keeps an unfinished build with the same plan, or else removes it and writes the new plan.

    start_over: remove it in any case, because an input can be read only once. Raises BuildError if the plans differ,
    without `overwrite`.
    """
    for left in staging.glob(f"{ATTEMPTS}*"):  # of a command that was killed
        gone = left.with_name(f"removed-{left.name}")
        os.replace(left, gone)  # at once, so that what still writes there fails
        shutil.rmtree(gone, ignore_errors=True)
    path = staging / PLAN
    try:
        old = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        old = None
    if old == plan and not start_over:
        return
    if old is not None and old != plan and not overwrite:
        settings, inputs = old["settings"], old["inputs"]
        require_rule(staging, old)
        differing = [
            f"{name} was {settings.get(name)!r} and is {plan['settings'].get(name)!r}"
            for name in settings | plan["settings"]
            if settings.get(name) != plan["settings"].get(name)
        ]
        if inputs != plan["inputs"]:
            before, after = (", ".join(f"{e['path']} ({e['bytes']} bytes)" for e in p["inputs"]) for p in (old, plan))
            differing.append(
                f"the input was {before} and is {after}" if before != after else f"{after} was changed since"
            )
        sentence = (
            f"{staging.parent} holds an unfinished build with other settings: {'; '.join(differing)}; run the old "
            "command to finish it, or use --overwrite to discard it"
        )
        raise BuildError(sentence, "other-settings", option="out", given=staging.parent)
    path.unlink(missing_ok=True)  # first: without a plan nobody goes on with what a kill leaves of the rest
    for leftover in staging.iterdir():
        if leftover.suffix != ".lock" and leftover.name != "lock" and not leftover.is_dir():
            leftover.unlink()
    write_file(path, json.dumps(plan).encode())


def require_rule(staging: Path, plan: dict[str, Any]) -> None:
    """Raises BuildError for the plan of a build whose units follow another rule."""
    if plan.get("unit_rule") != UNIT_RULE:
        sentence = (
            f"{staging.parent} holds an unfinished build of another version of bertdata, which divides inputs into "
            "units by another rule; finish it with that version, or use --overwrite to discard it"
        )
        raise BuildError(sentence, "other-version", option="out", given=plan.get("unit_rule"))


def finished_units(staging: Path) -> dict[int, dict[str, Any]]:
    """Number → record of each finished unit. Raises DatasetError if a record is damaged."""
    units = {}
    for path in staging.glob("unit-*.json"):
        units[int(path.stem.removeprefix("unit-"))] = read_record(path)
    return units


def part_name(number: int, total: int) -> str:
    """The file that lists the units of part `number`, counted from 0."""
    return f"part-{number + 1}-of-{total}.json"
