"""Datasets of both format versions, one by one and in tables, are read as they were when they were written."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import bertdata
from bertdata import Loader
from bertdata.format.manifest import VERSIONS as KNOWN
from bertdata.format.origins import Origins
from bertdata.format.verify import verify

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = [f"v{number}" for number in KNOWN]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_dataset_is_read_as_it_was_written(version):
    expected = json.loads((GOLDEN / f"{version}.json").read_bytes())
    assert verify(GOLDEN / version) == []
    dataset = bertdata.open(GOLDEN / version)
    assert dataset.dataset_id == expected["dataset_id"]
    assert {name: [s.num_documents, s.num_tokens] for name, s in dataset.splits.items()} == expected["splits"]
    assert {index: dataset[int(index)].tolist() for index in expected["documents"]} == expected["documents"]
    origins = Origins.read(dataset.path, dataset.manifest)
    assert [[*origins.input_and_place(number), number] for *_, number in expected["origins"]] == expected["origins"]
    batch = next(Loader(dataset, **expected["loader"])).arrays()
    assert batch.keys() == expected["batch"].keys()
    for name, values in expected["batch"].items():
        assert np.array_equal(batch[name], values), name


def test_golden_files_are_never_written_again():
    before = {path: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}
    tool = runpy.run_path(str(GOLDEN.parent.parent / "tools" / "golden.py"))
    with pytest.raises(SystemExit, match="golden files never change"):
        tool["main"]()
    assert {path: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()} == before
