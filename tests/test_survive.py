"""Short runs of soak.py, damage.py and fuzz.py in tools/."""

import json
import os
import signal
from importlib import import_module
from pathlib import Path

import pytest
from helpers import python

import bertdata
from bertdata.errors import BertdataError

pytestmark = pytest.mark.slow

TOOL = Path(bertdata.__file__).parents[1] / "tools" / "soak.py"


@pytest.mark.parametrize("arguments", [["batches", "--minutes", "0.2"], ["build", "--gigabytes", "0.1"]])
def test_memory_stays_below_its_bound(arguments):
    assert json.loads(python(TOOL, *arguments, timeout=900))["what"] == arguments[0]


def test_every_flip_of_some_bytes_is_detected():
    """Every 40th byte of a small dataset; the campaign takes them all."""
    assert json.loads(python(TOOL.with_name("damage.py"), "flips", "--every", 40))["flips_detected"] > 300


def test_no_changed_file_of_others_is_a_traceback(tmp_path):
    output = python(TOOL.with_name("fuzz.py"), "--count", 2000, "--seed", 1, "--keep", tmp_path, timeout=900)
    counts = {line[:16].strip(): json.loads(line[16:]) for line in output.splitlines()}
    assert (counts["all"]["inputs"], counts["all"]["faults"]) == (2000, 0)
    unused = {kind for kind, each in counts.items() if not each["used"]}
    assert unused <= {"megatron.idx"}  # one change of a hundred leaves its numbers consistent
    assert not any(tmp_path.iterdir())


def test_the_fuzzer_keeps_what_ends_in_anything_else(tmp_path, monkeypatch):
    def refuse():
        raise BertdataError("refused", "damaged")

    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    ends = [int, int, refuse, lambda: 1 // 0, end, int, end, int, int]  # each process first uses the sound file
    uses = tmp_path / "uses"

    def use():
        with uses.open("ab") as file:
            file.write(b".")
        ends[uses.stat().st_size - 1]()

    monkeypatch.syspath_prepend(TOOL.parent)
    (tmp_path / "file").write_bytes(b"sound")
    fuzz = import_module("fuzz")
    target = fuzz.Target(tmp_path / "file", use, ends=lambda content: uses.stat().st_size == 7)
    assert fuzz.tried("kind", target, 6, 0, tmp_path) == {"inputs": 6, "used": 2, "faults": 2}
    assert {path.name for path in tmp_path.glob("kind*")} == {"kind.2", "kind.3"}
    assert (tmp_path / "file").read_bytes() == b"sound"
