"""What the time of a run went to: training, and apart from it compiling, evaluation and waits for checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

KINDS = ("trained", "compiled", "evaluated", "waited")


class Clock:
    """Adds up seconds by what they went to. `lap` ends a stretch of time that began where the one before ended.

    A step that compiled counts as compiling, with all its time: every one in which torch.compile made a graph on this
    rank and, where code is compiled at all, the first of each row length in a process.
    """

    def __init__(self, before: Mapping[str, float], *, compiles: bool) -> None:
        """before: seconds by kind of the same run in other processes. compiles: False on CPUs without torch.compile."""
        self.seconds = dict.fromkeys(KINDS, 0.0) | dict(before)
        self._compiles, self._lengths = compiles, set[int]()
        self.start()

    def start(self) -> None:
        """What was before does not count."""
        self._since, self._graphs = time.perf_counter(), _num_graphs()

    def lap(self, kind: str) -> None:
        end = time.perf_counter()
        self.seconds[kind] += end - self._since
        self._since = end

    def lap_of_step(self, length: int) -> None:
        """Ends the stretch of a training step with rows of `length`."""
        graphs = _num_graphs()
        compiled = graphs != self._graphs or (self._compiles and length not in self._lengths)
        self._lengths.add(length)
        self._graphs = graphs
        self.lap("compiled" if compiled else "trained")

    def entry(self) -> dict[str, float]:
        """trained_s, compiled_s, evaluated_s, waited_s: since the run began, also in earlier processes."""
        return {f"{kind}_s": round(seconds, 3) for kind, seconds in self.seconds.items()}


def _num_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
