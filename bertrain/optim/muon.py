"""Muon (Jordan et al., 2024): the update of a matrix is its momentum, made orthogonal.

Muon trains the hidden matrices; AdamW trains embeddings, heads, norms and biases. Newton–Schulz iterations are
expensive, so they run on all matrices of one shape at once, and each rank computes a part of the matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from bertrain.models.families import FUSED, layers_of
from bertrain.optim.adam import commit, is_skipped

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # coefficients of the polynomial that moves singular values to 1
ITERATIONS = 5
RMS = 0.2  # root mean square of an update, about the same as in AdamW (Liu et al., 2025)
_EPSILON = 1e-7


def orthogonal(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrices, approximately, in `dtype`.

    matrices: [n, rows, columns], rows ≤ columns. After five Newton–Schulz iterations, singular values of at least 1/200
    of the norm are between 0.68 and 1.21, and smaller ones are below. Costs 20 n rows² (columns + rows / 2) operations.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """An optimizer: Muon for groups with "momentum", AdamW for the other groups.

    matrices: the parameters for Muon, each with the number of its stacked matrices, such as 3 for fused queries, keys
    and values. others: groups for AdamW. dtype: dtype of the iterations. All ranks must have the same gradients.
    """

    _step_supports_amp_scaling = True  # torch's flag for optimizers that support `found_inf`

    def __init__(
        self,
        matrices: Iterable[tuple[torch.Tensor, int]],
        others: list[dict[str, Any]],
        *,
        momentum: float,
        weight_decay: float,
        rate_scale: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        by_shape = sorted(matrices, key=lambda pair: _shape(*pair))
        first = {
            "params": [parameter for parameter, _ in by_shape],
            "weight_decay": weight_decay,
            "decays": True,
            "momentum": momentum,
            "rate_scale": rate_scale,
        }
        self._adamw = torch.optim.AdamW(others, lr=0.0, betas=betas, eps=eps, fused=True)
        super().__init__([first, *self._adamw.param_groups], {"lr": 0.0})
        self._parts, self._dtype = dict(by_shape), dtype
        self._share_state()

    def _share_state(self) -> None:
        """Make AdamW use the state of this optimizer."""
        self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_state()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        self._adamw.param_groups = [group for group in self.param_groups if "momentum" not in group]
        self._adamw.found_inf = getattr(self, "found_inf", None)  # type: ignore[attr-defined]
        self._adamw.step()
        skipped = is_skipped(self)
        for group in self.param_groups:
            if "momentum" in group:
                self._step_matrices(group, skipped)

    def _step_matrices(self, group: dict[str, Any], skipped: torch.Tensor) -> None:
        pairs = [(parameter, self._parts[parameter]) for parameter in group["params"] if parameter.grad is not None]
        for (rows, columns), same in groupby(pairs, key=lambda pair: _shape(*pair)):
            some = list(same)
            gradients = [parameter.grad for parameter, _ in some]
            for parameter, _ in some:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[parameter]["momentum"] for parameter, _ in some]
            commit(momenta, torch._foreach_lerp(momenta, gradients, 1 - group["momentum"]), skipped)
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov momentum
            pieces = [update.view(parts, -1, update.shape[1]) for update, (_, parts) in zip(updates, some, strict=True)]
            stacked = torch.cat([piece if piece.shape[1] == rows else piece.mT for piece in pieces])
            orthogonals = self._orthogonal(stacked).split([parts for _, parts in some])
            factor = -group["lr"] * RMS * columns**0.5
            for (parameter, parts), piece in zip(some, orthogonals, strict=True):
                value = parameter * (1 - group["lr"] * group["weight_decay"])
                matrix = value.view(parts, -1, parameter.shape[1])
                matrix.add_(piece if matrix.shape[1] == rows else piece.mT, alpha=factor)
                commit([parameter], [value], skipped)

    def _orthogonal(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return `orthogonal` of the matrices. Each rank computes a part of it."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks == 1:
            return orthogonal(matrices, self._dtype)
        share = -(-len(matrices) // ranks)
        first = min(dist.get_rank() * share, len(matrices))
        mine = matrices.new_zeros((share, *matrices.shape[1:]), dtype=self._dtype)
        some = matrices[first : first + share]
        mine[: len(some)] = orthogonal(some, self._dtype)
        every = mine.new_empty((ranks * share, *matrices.shape[1:]))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(every, mine)
        return every[: len(matrices)]


def _shape(parameter: torch.Tensor, parts: int) -> tuple[int, int]:
    """Return the shorter and the longer side of the matrices in a parameter."""
    rows, columns = parameter.shape
    short, long = sorted((rows // parts, columns))
    return short, long


def hidden_matrices(model: PreTrainedModel) -> list[tuple[torch.Tensor, int]]:
    """Return the trainable weights of linear maps in a model's layers, each with the number of its stacked matrices."""
    parts = list(layers_of(model)) or [model.base_model]  # without pooler and head, if layers are known
    tied = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {
        module.weight: FUSED.get(name.rpartition(".")[2], 1)
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad and module.weight not in tied
    }
    return list(matrices.items())
