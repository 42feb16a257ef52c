"""When checkpoints are due that stay: after so many tokens or words were read (--save-at)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bertrain.run.batches import Batches


class Milestones:
    """Which milestones each step passes. There is no state: both ends of a step follow from what was read."""

    def __init__(self, numbers: Mapping[str, Sequence[int]], batches: Batches, tokens: int) -> None:
        """numbers: of "tokens" and "words". tokens: read so far. Raises UsageError for words that were not counted."""
        self._numbers, self._batches = numbers, batches
        if numbers["words"]:
            batches.check_words()
        self.passed: list[str] = []
        """Those that the last step has passed."""
        self._read = self._amounts(tokens)

    def advance(self, tokens: int) -> None:
        """After a step. tokens: read so far."""
        before, self._read = self._read, self._amounts(tokens)
        self.passed = [
            f"{unit}={number}"
            for unit, numbers in self._numbers.items()
            for number in numbers
            if before[unit] < number <= self._read[unit]
        ]

    def _amounts(self, tokens: int) -> dict[str, float]:
        return {"tokens": tokens, "words": self._batches.words() if self._numbers["words"] else 0.0}
