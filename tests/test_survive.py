"""The campaigns of tools/survive.py and tools/damage.py, short. tests/test_dist.py kills ranks and their launcher."""

import json
import random
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import python

import bertdata

pytestmark = pytest.mark.slow

TOOL = Path(bertdata.__file__).parents[1] / "tools" / "survive.py"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["builds", "--count", "6"], {"kills": 6}),
        (["checkpoints", "--count", "3"], {"kills": 3, "runs": 1}),
        (["soak", "--minutes", "0.5"], {"minutes": 0.5}),
        (["large", "--gigabytes", "0.1"], {}),
    ],
)
def test_a_campaign_breaks_nothing(arguments, expected):
    result = json.loads(python(TOOL, *arguments, timeout=900))
    assert result["campaign"] == arguments[0]
    assert {name: result[name] for name in expected} == expected


def test_every_flip_of_some_bytes_is_detected():
    """Every 40th byte of a small dataset; the campaign takes them all."""
    assert json.loads(python(TOOL.with_name("damage.py"), "flips", "--every", 40))["flips_detected"] > 300


def test_the_fuzzer_watches_what_opens_a_dataset(tmp_path, monkeypatch):
    """atheris, which is not installed for the tests, would begin where this stops."""
    watched = []

    def instrument(function):
        watched.append(f"{function.__module__}.{function.__name__}")
        return function

    def stop(arguments, one):
        raise InterruptedError

    monkeypatch.setitem(sys.modules, "atheris", SimpleNamespace(instrument_func=instrument, Setup=stop))
    monkeypatch.syspath_prepend(TOOL.parent)
    with pytest.raises(InterruptedError):
        import_module("damage").fuzz(tmp_path, random.Random(0), 1)
    names = {"manifest.read_manifest", "table.read_tables", "shard.open_shard", "verify.verify"}
    assert {f"bertdata.format.{name}" for name in names} <= set(watched)
