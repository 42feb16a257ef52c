"""Threads that share tasks: results in order, the first error of the text, and no thread left."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertdata.errors import InputError
from bertdata.write.threads import LARGE, Crew


def failing_at(number, places):
    """Squares; an InputError that names task and item at some places."""

    def work(item):
        if (number, item) in places:
            raise InputError(f"{number}, {item}", "bad-row")
        return item * item

    return work


def results_of(sizes, workers, *, bad_items=frozenset(), bad_work=frozenset()):
    """Task → what it gave before it ended; the error of the crew. A task has as many items as its size."""
    results = {}

    def make(task, in_order):
        number, size = task
        results[number] = []

        def items():
            for item in range(size):
                if (number, item) in bad_items:
                    raise InputError(f"{number}, {item}", "bad-row")
                yield item

        for result in in_order(failing_at(number, bad_work), items()):
            results[number].append(result)

    try:
        Crew(workers).run(make, list(enumerate(sizes)))
    except InputError as error:
        return results, str(error)
    return results, None


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 5))
def test_every_task_gives_its_results_in_order(sizes, workers):
    before = {*threading.enumerate()}
    results, error = results_of(sizes, workers)
    assert error is None
    assert results == {number: [item * item for item in range(size)] for number, size in enumerate(sizes)}
    assert {*threading.enumerate()} <= before


PLACES = st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)


@given(st.integers(1, 4), PLACES, PLACES)
def test_the_error_is_that_of_one_thread_alone(workers, bad_items, bad_work):
    """Whichever thread meets an error first, the first in the order of the text is raised."""
    results, error = results_of([10] * 5, workers, bad_items=bad_items, bad_work=bad_work)
    first = min(bad_items | bad_work, default=None)
    assert error == (first and f"{first[0]}, {first[1]}")
    for number in range(5 if first is None else first[0]):
        assert results[number] == [item * item for item in range(10)]
    if first is not None:
        assert results[first[0]] == [item * item for item in range(first[1])]


def test_a_large_item_is_alone():
    """Others are done before it is worked on, and the next one is made after its result was used."""
    made, done = [], []

    def work(item):
        time.sleep(0.002)
        if item % 5 == 3:
            assert (len(made), len(done)) == (item + 1, item)
        return item

    def make(task, in_order):
        items = (made.append(item) or item for item in range(50))
        for result in in_order(work, items, lambda item: (item % 5 == 3) * 2 * LARGE):
            if result % 5 == 3:
                assert len(made) == result + 1
            done.append(result)

    Crew(4).run(make, [None])
    assert done == list(range(50))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_of_another_kind_ends_all_tasks_soon(error):
    reached = []

    def make(task, in_order):
        for result in in_order(lambda item: item, range(10_000)):
            if (task, result) == (1, 3):
                raise error
            time.sleep(0.001)
            reached.append(result)

    before = {*threading.enumerate()}
    with pytest.raises(error):
        Crew(2).run(make, [0, 1, 2])
    assert len(reached) < 200
    assert {*threading.enumerate()} <= before
