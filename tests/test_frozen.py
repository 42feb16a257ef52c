"""Builds give the bytes and short runs the losses that they gave before the code was last moved (tools/freeze.py)."""

import json
import sys
from pathlib import Path

import pytest
from training import train  # noqa: F401  (one thread)

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))
import freeze  # noqa: E402

FROZEN = json.loads((ROOT / "tests" / "golden" / "frozen.json").read_bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="module")
def digests(folder):
    return freeze.builds(folder)


@pytest.mark.parametrize("build", ["wordpiece", "bpe", "chinese"])
def test_a_build_gives_the_same_arrays_as_ever(digests, build):
    def arrays(files):  # how the tokenizers library writes a tokenizer.json is not ours
        return {name: digest for name, digest in files.items() if name.endswith(".npy")}

    assert arrays(digests[build]) == arrays(FROZEN["builds"][build])
    assert digests[build].keys() == FROZEN["builds"][build].keys()


@pytest.mark.slow
def test_runs_give_the_same_losses_as_ever_but_for_rounding(digests, folder):
    found = freeze.losses(folder)
    assert found.keys() == FROZEN["losses"].keys()
    for run, steps in FROZEN["losses"].items():
        for step, (now, before) in enumerate(zip(found[run], steps, strict=True)):
            for value, known in zip(now, before, strict=True):
                assert value == (known if known is None else pytest.approx(known, rel=0.02, abs=0.002)), (run, step)
    assert found["resumed"] == found["relations"]
