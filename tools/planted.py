"""Faults for tools/crash.py to find: one sync, name, check, lock or bound of the product is left out at a time.

`python tools/crash.py faults` plants one after the other in the source as it is imported; no file changes.
"""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from types import CodeType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """A text in a file of the product, and the text in its place. campaign, command: what should find it."""

    what: str
    file: str
    old: str
    new: str
    campaign: str
    command: str


SYNC = "os.fsync(file.fileno())"
FAULTS = [
    # syncs
    Fault("sync of a record", "bertdata/files.py", SYNC, "pass", "states", "build"),
    Fault(
        "sync of a new directory",
        "bertdata/files.py",
        "        fsync_directory(directory.parent)\n",
        "",
        "states",
        "build",
    ),
    Fault(
        "sync of the names of records", "bertdata/files.py", "    fsync_directory(path.parent)\n", "", "states", "build"
    ),
    Fault(
        "sync of an array", "bertdata/format/arrays.py", "os.fsync(self._file.fileno())\n", "pass\n", "states", "build"
    ),
    Fault(
        "sync before the manifest",
        "bertdata/write/publish.py",
        "    fsync_directory(directory)\n    manifest.write",
        "    manifest.write",
        "states",
        "build",
    ),
    Fault(
        "sync of the old manifest's new name",
        "bertdata/write/publish.py",
        "        fsync_directory(directory)\n    for table",
        "    for table",
        "states",
        "overwrite",
    ),
    Fault("sync of an exported file", "bertdata/write/exporting.py", SYNC, "pass", "states", "export"),
    Fault(
        "sync of temporary names of an export",
        "bertdata/write/exporting.py",
        "                fsync_directory(directory)",
        "                pass",
        "states",
        "export",
    ),
    Fault(
        "sync after an export",
        "bertdata/write/exporting.py",
        "        raise\n    fsync_directory(directory)\n",
        "        raise\n",
        "states",
        "export",
    ),
    Fault(
        "sync of a pulled file",
        "bertdata/transfer/pulling.py",
        "        os.fsync(copy.fileno())\n",
        "",
        "states",
        "pull",
    ),
    Fault(
        "sync of a pull's lock",
        "bertdata/transfer/pulling.py",
        "            fsync_directory(target)  #",
        "            #",
        "states",
        "pull",
    ),
    Fault(
        "sync before a pulled manifest",
        "bertdata/transfer/pulling.py",
        "        is_over.set()\n    fsync_directory(target)\n",
        "        is_over.set()\n",
        "states",
        "pull-plain",
    ),
    Fault(
        "sync of a unit of answers",
        "bertdata/format/answers.py",
        "    fsync_directory(directory)\n    record =",
        "    record =",
        "states",
        "teacher",
    ),
    Fault("sync of a checkpoint's files", "bertrain/run/checkpoint.py", SYNC, "pass", "states", "merge"),
    Fault(
        "sync of a checkpoint's name",
        "bertrain/run/checkpoint.py",
        "        fsync_directory(target.parent)\n",
        "",
        "states",
        "merge",
    ),
    Fault("sync of the log", "bertrain/run/writer.py", "            self._sync_log()\n", "", "states", "pretrain"),
    Fault("sync of augmented rows", "bertrain/lab/tables.py", SYNC, "pass", "states", "augment"),
    # names and their order
    Fault(
        "temporary name of a record",
        "bertdata/files.py",
        "path.with_name(path.name + TEMPORARY)",
        "path",
        "states",
        "build",
    ),
    Fault(
        "a checkpoint appears at once",
        "bertrain/run/checkpoint.py",
        "os.replace(temporary, target)",
        "shutil.copytree(temporary, target)",
        "states",
        "merge",
    ),
    Fault(
        "the manifest last",
        "bertdata/write/publish.py",
        "    prepare_directory(directory, origins)\n",
        "    manifest.write(directory)\n    prepare_directory(directory, origins)\n",
        "states",
        "build",
    ),
    Fault(
        "the old manifest until the new one is there",
        "bertdata/write/publish.py",
        "    manifest.write(directory)\n    (directory / REPLACED).unlink(missing_ok=True)",
        "    (directory / REPLACED).unlink(missing_ok=True)\n    manifest.write(directory)",
        "states",
        "overwrite",
    ),
    Fault(
        "the plan of answers goes last",
        "bertdata/format/answers.py",
        "    write_record(directory / CACHE, header",
        "    (directory / PLAN).unlink()\n    write_record(directory / CACHE, header",
        "states",
        "teacher",
    ),
    # checks
    Fault(
        "where a killed publication moved a file",
        "bertdata/write/publish.py",
        ' or (may_be_moved and exists(f"{directory}/{name}"))',
        "",
        "states",
        "build",
    ),
    Fault(
        "a build that tidies up beside its manifest goes on",
        "bertdata/write/staging.py",
        "if not overwrite and not (staging / PLAN).exists():",
        "if not overwrite:",
        "states",
        "build",
    ),
    Fault(
        "an error of the system is one sentence",
        "bertdata/cli.py",
        "    except OSError as error:",
        "    except ZeroDivisionError as error:",
        "calls",
        "export",
    ),
    Fault(
        "an error of a write ends the command",
        "bertdata/files.py",
        "file.write(content)\n                file.flush()\n",
        "with suppress(OSError):\n                    os.write(file.fileno(), content)\n",
        "calls",
        "build",
    ),
    # locks and bounds
    Fault(
        "the lock of a pull",
        "bertdata/transfer/pulling.py",
        'with locked(target / LOCK, f"{target} is being filled", "wait for it"):',
        "if True:",
        "states",
        "pull",
    ),
    Fault(
        "how many checkpoints stay",
        "bertrain/run/rundir.py",
        "others[keep - 1 :]",
        "others[keep:]",
        "states",
        "pretrain",
    ),
]


def plant(fault: Fault) -> None:
    """From now on the file is imported with the fault."""
    path, real = str(ROOT / fault.file), importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if loader.path != path:
            return real(loader, name)
        source = Path(path).read_text(encoding="utf-8")
        assert source.count(fault.old) >= 1, f"{fault.file} has not {fault.old!r}"
        return compile(source.replace(fault.old, fault.new), path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
