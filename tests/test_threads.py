"""Threads that share tasks: results in order, the first error of the text, and no thread left."""

import threading
import time
from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertdata import BertdataError
from bertdata.write.machines import LARGE, Crew

PLACES = st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 5), PLACES, PLACES, PLACES)
def test_results_are_in_order_and_the_error_is_that_of_one_thread_alone(sizes, workers, bad_items, bad_work, large):
    """A task squares as many items as its size. Whichever thread fails first, the first error of the text is raised.

    A large item is alone: those before it are done, and the next one is made after its result was used.
    """
    results, made, before = {}, Counter(), {*threading.enumerate()}
    bad = {place for place in bad_items | bad_work if place[1] < dict(enumerate(sizes)).get(place[0], 0)}

    def make(task, in_order):
        number, size = task
        results[number] = []

        def checked(item, places):
            if (number, item) in places:
                raise BertdataError(f"{number}, {item}", "bad-row")
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

    number, size = min(bad, default=(len(sizes), 0))
    with pytest.raises(BertdataError, match=f"^{number}, {size}$") if bad else nullcontext():
        Crew(workers).run(make, list(enumerate(sizes)))
    for task, num_items in enumerate(sizes[:number]):
        assert results[task] == [item**2 for item in range(num_items)]
    begun = results.get(number, [])
    assert begun == [item**2 for item in range(size)][: len(begun)]
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
