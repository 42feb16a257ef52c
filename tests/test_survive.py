"""Short runs of soak.py, damage.py and fuzz.py in tools/."""

import json
from pathlib import Path

import pytest
from support.commands import python

import bertdata

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
