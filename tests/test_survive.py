"""The campaigns of tools/survive.py and tools/damage.py, short."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bertdata

pytestmark = pytest.mark.slow

TOOL = Path(bertdata.__file__).parents[1] / "tools" / "survive.py"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["builds", "--count", "6"], {"kills": 6}),
        (["checkpoints", "--count", "4"], {"kills": 4, "runs": 1}),
        (["ranks", "--count", "2"], {"kills": {"rank": 1, "launcher": 1}, "orphans": 0}),
        (["soak", "--minutes", "1"], {"minutes": 1.0}),
        (["large", "--gigabytes", "0.2"], {}),
    ],
)
def test_a_campaign_breaks_nothing(arguments, expected):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["campaign"] == arguments[0]
    assert {name: found[name] for name in expected} == expected


def test_every_flip_of_some_bytes_is_found():
    """Every 40th byte of a small dataset; the campaign takes them all."""
    done = subprocess.run(
        [sys.executable, str(TOOL.with_name("damage.py")), "flips", "--every", "40"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["flips_detected"] > 300
