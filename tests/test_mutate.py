"""tools/mutate.py knows the mutations that no test can see by the source as it is now."""

import click
import mutate
import pytest


def test_what_no_test_can_see_is_in_the_source():
    assert len(mutate.equivalent()) >= len(mutate.EQUIVALENT)


def test_a_name_of_no_mutation_is_refused(monkeypatch):
    (change, line), *_ = mutate.EQUIVALENT
    monkeypatch.setitem(mutate.EQUIVALENT, (change, f"{line}  # edited"), "")
    with pytest.raises(click.ClickException) as caught:
        mutate.equivalent()
    _, *names = caught.value.message.splitlines()
    assert names == [f"{change} in {line}  # edited"]


def test_what_changes_speed_or_types_alone_is_no_mutation():
    plain, compiled = "@jit(nogil=True, cache=False)\ndef f(x: Literal[1] = 2): ...", "@cache(size=4)\ndef f(): ..."
    assert [(each.old, each.new) for each in mutate.mutations_of("a.py", plain)] == [("2", "3")]
    assert {each.kind for each in mutate.mutations_of("a.py", compiled)} == {"ignored option", "bound"}
    assert mutate.lines_of_kernels(plain) == {2}
    assert mutate.lines_of_kernels(compiled) == set()
