"""Threads that share tasks: results in order, the first error of the text, and no thread left."""

import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertdata.errors import InputError
from bertdata.write.machines import LARGE, Crew


def results_of(sizes, workers, bad_items, bad_work, large):
    """Task → what it gave before it ended; the error of the crew. A task squares as many items as its size.

    A large item is alone: those before it are done, and the next one is made after its result was used.
    """
    results, made = {}, Counter()

    def make(task, in_order):
        number, size = task
        results[number] = []

        def checked(item, places):
            if (number, item) in places:
                raise InputError(f"{number}, {item}", "bad-row")
            return item

        def items():
            for item in range(size):
                made[number] += 1
                yield checked(item, bad_items)

        def work(item):
            if (number, item) in large:
                assert (made[number], len(results[number])) == (item + 1, item)
            return checked(item, bad_work) ** 2

        for result in in_order(work, items(), lambda item: ((number, item) in large) * 2 * LARGE):
            assert (number, len(results[number])) not in large or made[number] == len(results[number]) + 1
            results[number].append(result)

    try:
        Crew(workers).run(make, list(enumerate(sizes)))
    except InputError as error:
        return results, str(error)
    return results, None


PLACES = st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 5), PLACES, PLACES, PLACES)
def test_results_are_in_order_and_the_error_is_that_of_one_thread_alone(sizes, workers, bad_items, bad_work, large):
    """Whichever thread meets an error first, the first in the order of the text is raised."""
    before = {*threading.enumerate()}
    results, error = results_of(sizes, workers, bad_items, bad_work, large)
    places = [place for place in bad_items | bad_work if place[1] < dict(enumerate(sizes)).get(place[0], 0)]
    first = min(places, default=None)
    assert error == (first and f"{first[0]}, {first[1]}")
    num_whole = len(sizes) if first is None else first[0]
    for number, size in enumerate(sizes[:num_whole]):
        assert results[number] == [item * item for item in range(size)]
    if first is not None:
        begun = results[first[0]]
        assert begun == [item * item for item in range(min(len(begun), first[1]))]
    assert {*threading.enumerate()} <= before


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
