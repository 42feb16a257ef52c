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
