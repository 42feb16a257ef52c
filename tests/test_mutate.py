"""tools/mutate.py and the faults of tools/injected.py."""

import injected
import pytest
from support.data import ROOT


@pytest.mark.parametrize("fault", [*injected.CRASH, *injected.GPU], ids=lambda fault: fault.what)
def test_every_fault_changes_the_source_and_something_should_find_it(fault):
    source = (ROOT / fault.file).read_text()
    changed = fault.inject(source)
    assert changed != source
    compile(changed, fault.file, "exec")
    if "::" in fault.finder:
        file, function = fault.finder.split("[")[0].split("::")
        assert f"def {function}(" in (ROOT / file).read_text()
    with pytest.raises(AssertionError, match="correct tools/injected.py"):
        fault._replace(old="no such text").inject(source)
