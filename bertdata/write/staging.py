"""The directory of an unfinished build: its locks, its plan, the records of its finished units, attempts at others."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bertdata.errors import BuildError, InputError, counted
from bertdata.files import TEMPORARY, locked, make_directory, naming, write_file
from bertdata.format.manifest import MANIFEST, SPLITS
from bertdata.sources.inputs import Input, now
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertdata.write.state import PLAN, BuildPlan, FinishedUnits, finished_units

Progress = Callable[[int, int], None]
"""Called now and then with the bytes of input that are done, and of all input."""
STAGING = ".build"
ATTEMPTS = "attempts-"  # what the name of the directory begins with in which the tasks on a cluster write


_OURS = re.compile(  # names in a staging directory; NFS gives .nfs… to what was removed while it was open
    rf"(\.nfs.+|(.+\.)?lock|(plan|replaced|tokenizer(_config|_name)?)\.json|(unit-[0-9]+|part-[0-9]+-of-[0-9]+)\.json|"
    rf"duplicates|hashes-[0-9]+|(removed-)?{ATTEMPTS}.*|"
    rf"({'|'.join(SPLITS)})-[0-9]{{5,}}\.(json|[a-z0-9_-]+\.npy))({TEMPORARY})?"
)


@contextmanager
def staging_directory(directory: Path, *, overwrite: bool, part: tuple[int, int] | None = None) -> Iterator[Path]:
    """The .build of a dataset's directory, which is made and locked. Parts share it; each part has a lock of its own.

    A failure removes what it made, unless a unit or a part is finished or a publication has begun. Raises BuildError if
    another process holds the lock, or if the directory holds a dataset (without `overwrite`) or other files.
    """
    staging = directory / STAGING
    require_usable(directory, overwrite=overwrite, is_new=not staging.exists())
    created = not directory.exists()
    busy, advice = f"{directory} is being built", "wait for it"
    with ExitStack() as locks:
        while True:  # until the directory is not the one that a build, which has just ended, removed
            is_new = not staging.exists()
            make_directory(staging)
            with suppress(FileNotFoundError):
                locks.enter_context(locked(staging / "lock", busy, advice, shared=part is not None))
                break
        if part is not None:
            lock_of_part = staging / part_name(*part).replace(".json", ".lock")
            locks.enter_context(locked(lock_of_part, f"part {part[0] + 1}/{part[1]} of {busy}", advice))
        try:
            require_usable(directory, overwrite=overwrite, is_new=is_new)  # again: a build may have ended, a pull begun
            with naming(directory):
                yield staging
        except Exception:  # not KeyboardInterrupt, after which the build can continue
            is_begun = any(staging.glob("unit-*")) or any(staging.glob("part-*.json"))  # a part may have no units
            # Without .build, files that a killed build has moved would be taken for somebody else's.
            is_moved = not (directory / MANIFEST).exists() and any(path != staging for path in directory.iterdir())
            if part is None and not is_begun and (is_new or not is_moved):
                with suppress(OSError):
                    remove_staging(staging)
                if created and not any(directory.iterdir()):
                    directory.rmdir()
            raise


def remove_staging(staging: Path) -> None:
    """Removes the directory of a build whose lock this process holds.

    The lock goes last, because another process may begin there as soon as it is gone. Then the directory stays.
    """
    for path in sorted(staging.iterdir(), key=lambda path: path.name == "lock"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    try:
        staging.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def require_usable(directory: Path, *, overwrite: bool, is_new: bool) -> None:
    """Raise BuildError if a directory holds a dataset (without `overwrite`) or files that no build wrote.

    is_new: no build was there before, so other files are not what one has moved.
    """
    staging, why = directory / STAGING, None
    if directory.exists() and not directory.is_dir():
        why = f"{directory} is a file"
    elif staging.is_symlink() or (staging.exists() and not staging.is_dir()):
        why = f"{staging} is not a directory that a build made"
    elif foreign := next((path for path in staging.glob("*") if not _OURS.fullmatch(path.name)), None):
        why = f"a build would remove {foreign}, which no build wrote"
    elif (directory / MANIFEST).exists():
        if not overwrite and not (staging / PLAN).exists():
            why = f"{directory} already holds a dataset, and there is no --overwrite"
    elif is_new and directory.exists() and any(path != staging for path in directory.iterdir()):
        why = f"{directory} holds other files and no dataset"
    if why:
        raise BuildError(f"{why}; give an --out that does not exist yet", "out-exists", option="out", given=directory)


def continue_or_start(staging: Path, plan: BuildPlan, *, overwrite: bool, is_part: bool = False) -> None:
    """Keeps an unfinished build with the same plan, or else removes it and writes the new plan.

    Removes it in any case if an input is a pipe, or with `overwrite` an iterable, whose plans are all equal. Raises
    BuildError if the plans differ, without `overwrite`.
    """
    for left in staging.glob(f"{ATTEMPTS}*"):  # of a command that was killed
        gone = left.with_name(f"removed-{left.name}")
        os.replace(left, gone)  # at once, so that what still writes there fails
        shutil.rmtree(gone, ignore_errors=True)
    try:
        old = BuildPlan.read(staging)
    except BuildError:
        if not overwrite:
            raise
        old = None
    if old is not None and old.as_json() == json.loads(json.dumps(plan.as_json())):
        if not any(file.is_pipe or (overwrite and file.is_stream) for file in plan.inputs):
            return
    elif old is not None and not overwrite:
        raise _other_settings(staging.parent, old, plan, is_part=is_part)
    # first: without a plan nobody goes on with what a kill leaves of the rest
    (staging / PLAN).unlink(missing_ok=True)
    for leftover in staging.iterdir():
        if leftover.suffix != ".lock" and leftover.name != "lock" and not leftover.is_dir():
            leftover.unlink()
    plan.write(staging)


def _other_settings(directory: Path, old: BuildPlan, new: BuildPlan, *, is_part: bool) -> BuildError:
    """What to say of an unfinished build in a directory whose plan is another one."""
    both = {name: (old.settings.get(name), new.settings.get(name)) for name in {**old.settings, **new.settings}}
    differing = [f"{name} was {before!r} and is {after!r}" for name, (before, after) in both.items() if before != after]
    if old.inputs != new.inputs:
        before, after = (", ".join(f"{each} ({each.size} bytes)" for each in plan.inputs) for plan in (old, new))
        differing.append(f"the input was {before} and is {after}" if before != after else f"{after} was changed since")
    discard = "use --overwrite to discard it"
    if is_part:  # others may be made now
        discard = f"remove {directory / STAGING} once no part is being made, and make all parts again"
    changes = "; ".join(differing)
    sentence = f"{directory} holds an unfinished build with other settings: {changes}; finish that build, or {discard}"
    return BuildError(sentence, "other-settings", option="out", given=directory)


def write_tokenizer(staging: Path, tokenizer: LoadedTokenizer, say: Callable[[str], None]) -> None:
    """Write the files of a tokenizer, and print its notes and which roles no token has."""
    for name, content in tokenizer.files.items():
        write_file(staging / name, content)
    for note in tokenizer.notes:
        say(note)
    if roles := tokenizer.missing_roles:
        names = ", ".join(f"[{role.upper()}]" for role in roles)
        kind, effect = "warning", "the Loader refuses this dataset for masked language modelling"
        if list(roles) == ["pad"]:
            kind, effect = "note", "padding has the id 0"
        say(f"{kind}: the tokenizer has no {names}, so {effect}; --special-tokens adds what is missing")


def kept_units(staging: Path, plan: BuildPlan, say: Callable[[str], None]) -> FinishedUnits:
    """The units that an earlier run finished. Says how many there are."""
    units = finished_units(staging)
    for items in filter(None, (file.items for file in plan.inputs)):
        items.expect(units.checksums)
    if units.numbers:
        say(f"continuing: keeping {counted(len(units.numbers), 'finished unit')} of an earlier run")
    return units


def require_unchanged(files: Sequence[Input], advice: str) -> None:
    """Raises InputError if an input is not what it was when the build began."""
    files = [file for file in files if not file.is_stream]  # a pipe may be gone
    if changed := [file.name for file, later in zip(files, now(files), strict=True) if file != later]:
        sentence = f"{changed[0]} changed while it was read; {advice} when nobody changes it"
        raise InputError(sentence, "changed", option="inputs", given=changed[0])


def part_name(number: int, total: int) -> str:
    """The file that lists the units of part `number`, counted from 0."""
    return f"part-{number + 1}-of-{total}.json"
