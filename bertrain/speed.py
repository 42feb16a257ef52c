"""How fast a run is, and what its time went to."""

from __future__ import annotations

import functools
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Embedding, Module
from transformers import PreTrainedModel

from bertrain.models.families import family_of, layers_of, projections_of

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


PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Dense bf16 and fp16 operations a second, from the makers' data sheets."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations that a device does at best in a second; None where that is not known, as on CPUs."""
    if device.type != "cuda" or precision == "fp32" or (precision == "bf16" and not has_bf16(device)):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """By the words of a GPU's name: "NVIDIA A100-SXM4-80GB" is an A100, and an A10G is not an A10."""
    words = set(name.replace("-", " ").split())
    longest_first = sorted(PEAK_FLOPS, key=len, reverse=True)
    return next((PEAK_FLOPS[part] for part in longest_first if words.issuperset(part.split())), None)


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bf16 in hardware; older GPUs emulate it in float32."""
    return device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What a model multiplies, counted from its modules once. Units: multiply-adds of a forward pass."""

    token: float  # for each token, by linear maps and convolutions of the encoder
    target: float  # for each masked token, by the head
    width: float  # for each token and each vector that it is multiplied with in attention
    scores: Callable[[int], float]  # tokens that a token attends to → the number of those vectors in a layer
    windows: tuple[int | None, ...]  # by layer, how many tokens a token attends to at most

    @classmethod
    def of(cls, model: PreTrainedModel) -> Operations:
        """Of a family that is not in FAMILIES: one for each parameter and token (Kaplan et al., 2020)."""
        config, family = model.config, family_of(model)
        if family.dense:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            return cls(token=parameters, target=0, width=0, scores=float, windows=())
        layers = layers_of(model)
        runs = Counter(id(layer) for layer in layers)  # a module that stands for several layers
        parts = [part for name, part in model.base_model.named_children() if name not in family.untrained]
        outside = [part for part in model.children() if part is not model.base_model]
        head = sum(_weights(part, runs) for part in outside)
        shapes = [weight.shape for part in outside for weight in part.parameters() if weight.dim() > 1]
        if config.vocab_size not in {shape[0] for shape in shapes}:
            head += config.vocab_size * config.hidden_size  # it multiplies by the embeddings themselves
        projections = projections_of(layers[0]) if layers else []
        width = _rows(projections[0]) // (3 if len(projections) == 1 else 1) if projections else None
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        window = 2 * config.sliding_window + 1 if getattr(config, "sliding_window", None) else None
        return cls(
            token=sum(_weights(part, runs) for part in parts),
            target=head,
            width=width or config.hidden_size,
            scores=functools.partial(family.scores, config),
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        )

    def of_step(self, *, rows: float, length: int, slots: int) -> float:
        """Floating point operations of a forward and backward pass.

        A multiply-add is 2 operations, and the backward pass counts twice the forward pass. Only `slots` tokens of a
        row go through the head. What is computed twice to save memory is not counted, as it is not in the usual
        definition of MFU (Chowdhery et al., 2022).
        """
        reach = (length if window is None else min(length, window) for window in self.windows)
        attention = self.width * sum(self.scores(tokens) for tokens in reach)
        return 6 * rows * (length * (self.token + attention) + slots * self.target)


def _rows(module: Module) -> int:
    """How many numbers a linear map gives for a token; its weight may be packed."""
    linear: Any = module
    return getattr(linear, "out_features", None) or linear.weight.shape[0]


def _weights(module: Module, runs: Mapping[int, int]) -> float:
    """How many weights one token is multiplied by in a module. runs: how often it runs, by id; else once."""
    own = dict(module.named_parameters(recurse=False)).get("weight")  # a wrapper shows that of the part inside
    number = own.numel() if own is not None and own.dim() > 1 and not isinstance(module, Embedding) else 0
    return runs.get(id(module), 1) * (number + sum(_weights(part, runs) for part in module.children()))


class Rates:
    """Tokens a second, MFU, the share of time spent waiting for data, and memory, since the last `take`."""

    def __init__(self, model: PreTrainedModel, device: torch.device, precision: str) -> None:
        self._operations, self._device = Operations.of(model), device
        self._peak = peak_flops(device, precision)
        self._begin()

    def _begin(self) -> None:
        self._since, self._tokens, self._flops, self._waited = time.perf_counter(), 0.0, 0.0, 0.0

    def add(self, *, rows: float, length: int, slots: int, waited: float) -> None:
        """What one rank has done in a step. rows: its share of the step."""
        self._tokens += rows * length
        self._flops += self._operations.of_step(rows=rows, length=length, slots=slots)
        self._waited += waited

    def leave_out(self, seconds: float) -> None:
        """Does not count seconds in which no step was taken."""
        self._since += seconds

    def take(self, world_size: int) -> dict[str, float]:
        """tokens_per_s of all ranks; flops_per_s, mfu (where the peak is known) and memory of one."""
        seconds = max(1e-9, time.perf_counter() - self._since)
        rates = {
            "tokens_per_s": round(self._tokens * world_size / seconds, 1),
            "data_wait": round(self._waited / seconds, 5),
            "flops_per_s": round(self._flops / seconds),
        }
        if self._peak:
            rates["mfu"] = round(self._flops / seconds / self._peak, 4)
        if self._device.type == "cuda":
            rates["memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
        else:
            rates["memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._begin()
        return rates
