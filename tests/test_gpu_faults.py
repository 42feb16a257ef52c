"""tools/gpu_faults.py knows where it plants its faults by the source as it is now."""

import click
import gpu_faults
import pytest
from conftest import ROOT


@pytest.fixture
def copy(tmp_path):
    for file in {fault.file for fault in gpu_faults.FAULTS.values()}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    return tmp_path


@pytest.mark.parametrize("name", gpu_faults.FAULTS)
def test_every_fault_changes_the_source_and_a_test_looks_for_it(copy, name):
    fault = gpu_faults.FAULTS[name]
    gpu_faults.planted(fault, copy)
    changed = (copy / fault.file).read_text()
    assert changed != (ROOT / fault.file).read_text()
    compile(changed, fault.file, "exec")
    file, function = fault.test.split("[")[0].split("::")
    assert f"def {function}(" in (ROOT / file).read_text()


def test_a_text_that_is_not_there_is_refused(copy):
    fault = next(iter(gpu_faults.FAULTS.values()))
    gpu_faults.planted(fault, copy)
    with pytest.raises(click.ClickException, match="correct FAULTS"):
        gpu_faults.planted(fault._replace(old="no such text"), copy)
