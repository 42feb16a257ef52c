"""The mean of a model's weights over the last part of a run (Izmailov et al., 2018; Hägele et al., 2024)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

EVERY = 10  # steps between the weights that are averaged


class Average:
    """The mean of the weights that `add` has seen: float32, one more copy of them, on their device."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self._means: dict[str, torch.Tensor] = {}
        self._device = next(iter(self._weights.values())).device
        self._count = torch.zeros((), dtype=torch.float64, device=self._device)
        self.since: tuple[str, float] = "steps", 0.0
        """How far the run was at the first weights: steps, or seconds of training if it is by time."""

    @property
    def count(self) -> int:
        """How many weights are in the mean; the host waits for the device."""
        return int(self._count)

    @torch.no_grad()
    def add(self, taken: tuple[str, float], skipped: torch.Tensor | None = None) -> None:
        """Takes the weights as they are into the mean. skipped: float32 [], 1 where their step was; then it stays.

        taken: how far the run is, as `since` has it.
        """
        weights: list[torch.Tensor] = [*self._weights.values()]
        number = 1 - (torch.zeros((), device=self._device) if skipped is None else skipped).double()
        self._count = self._count + number
        if not self._means:
            self.since = taken
            self._means = {name: weight.detach().clone() for name, weight in self._weights.items()}
        share: Any = (number / self._count.clamp(min=1)).float()  # 0 leaves a mean as it is
        torch._foreach_lerp_(list(self._means.values()), weights, [share] * len(weights))

    def begin_anew(self) -> None:
        self._means, self._count = {}, torch.zeros_like(self._count)

    @contextlib.contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Puts the mean into the module, and its weights back at the end."""
        kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._set(self._means)
        try:
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: dict[str, torch.Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])

    def weights(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The state dict of a module, with the means of the weights that are averaged."""
        means = {id(weight): self._means[name] for name, weight in self._weights.items()}
        return {name: means.get(id(value), value.detach()) for name, value in module.state_dict(keep_vars=True).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "means": self._means, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the means are of other weights."""
        if state["means"].keys() != self._weights.keys():
            raise ValueError("the means are of other weights")
        self._count = torch.tensor(state["count"], dtype=torch.float64, device=self._device)
        unit, number = state["since"]
        self.since = str(unit), float(number)
        self._means = {name: state["means"][name].to(weight.device) for name, weight in self._weights.items()}
