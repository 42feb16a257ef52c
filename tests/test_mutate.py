"""tools/mutate.py and the faults of tools/injected.py."""

import injected
import mutate
import pytest
from conftest import ROOT


def test_what_changes_speed_or_types_alone_is_no_mutation():
    plain, compiled = "@jit(nogil=True, cache=False)\ndef f(x: Literal[1] = 2): ...", "@cache(size=4)\ndef f(): ..."
    assert [(each.old, each.new) for each in mutate.mutations_in("a.py", plain)] == [("2", "3")]
    assert {each.kind for each in mutate.mutations_in("a.py", compiled)} == {"ignored option", "bound"}
    assert mutate.lines_of_kernels(plain) == {2}
    assert mutate.lines_of_kernels(compiled) == set()


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
