"""The speed of a run, and how it uses its time."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, PreTrainedModel

from bertrain.models.encoder import Encoder

KINDS = ("trained", "compiled", "evaluated", "waited")


class Clock:
    """A clock that adds up seconds by kind of work, and measures the speed of steps.

    `lap` ends an interval that began at the previous lap. If torch.compile made a graph on this rank during a step, all
    time of the step counts as compiling.
    """

    def __init__(self, before: Mapping[str, float], device: torch.device, precision: str) -> None:
        """before: seconds by kind from earlier processes of the same run."""
        self.seconds = dict.fromkeys(KINDS, 0.0) | dict(before)
        self._device, self._peak = device, peak_flops(device, precision)
        self._since = time.perf_counter()

    def start(self, model: PreTrainedModel, length: int, slots: int) -> None:
        """Begin the steps of a phase, and ignore the time before. slots: masked positions in a row."""
        self._length, self._row_flops = length, flops_of_row(model, length, slots)
        self._since, self._graphs = time.perf_counter(), torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self._begin_entry()

    def lap(self, kind: str) -> None:
        """Count the time since the last lap as one of KINDS."""
        end = time.perf_counter()
        self.seconds[kind] += end - self._since
        self._since = end

    def end_step(self, *, rows: float, waited: float) -> None:
        """Count the time of a training step. rows: this rank's share of the step. waited: seconds for the batch."""
        before, self._graphs = self._graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.lap("trained" if before == self._graphs else "compiled")
        self._rows += rows
        self._waited += waited

    def entry(self) -> dict[str, float]:
        """Return trained_s, compiled_s, evaluated_s and waited_s since the run began, including earlier processes."""
        return {f"{kind}_s": round(seconds, 3) for kind, seconds in self.seconds.items()}

    def rates(self, world_size: int) -> dict[str, float]:
        """Return tokens_per_s of all ranks, and data_wait, flops_per_s, mfu (of a known GPU) and memory of this rank.

        They cover the steps since the last call or `start`, without evaluations and waits for checkpoints.
        """
        import resource  # unavailable on Windows

        before, rows, waited = self._before, self._rows, self._waited
        self._begin_entry()
        seconds = max(1e-9, self._before - before)
        flops, on_gpu = rows * self._row_flops / seconds, self._device.type == "cuda"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        rates = {
            "tokens_per_s": round(rows * self._length * world_size / seconds, 1),
            "data_wait": round(waited / seconds, 5),
            "flops_per_s": round(flops),
            "memory_bytes": torch.cuda.max_memory_allocated(self._device) if on_gpu else memory,
        }
        return rates | ({"mfu": round(flops / self._peak, 4)} if self._peak else {})

    def _begin_entry(self) -> None:
        self._before, self._rows, self._waited = self.seconds["trained"] + self.seconds["compiled"], 0.0, 0.0


PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
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
"""Dense bf16 and fp16 operations per second, from data sheets. The first matching name is used."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak number of operations per second of a GPU; None for unknown GPUs and for CPUs.

    The words of the GPU's name decide: "NVIDIA A100-SXM4-80GB" is an A100, and an A10G is not an A10.
    """
    if device.type != "cuda" or precision == "fp32" or (precision == "bf16" and not has_bf16(device)):
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    return next((peak for name, peak in PEAK_FLOPS.items() if words.issuperset(name.split())), None)


def has_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies bf16 in hardware. Older GPUs emulate it in float32."""
    return device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


COUNTED = "bertrain_counted"
COUNTED_ROWS = 64  # rows of one pass: DeBERTa multiplies its tables of relative positions once per pass, not per row


@functools.lru_cache(maxsize=1)
@torch.no_grad()
def flops_of_row(model: PreTrainedModel, length: int, slots: int) -> float:
    """Return the floating point operations of a forward and backward pass of one row.

    torch counts the forward pass on a copy of the model with fake tensors; the backward pass counts twice as much. Only
    `slots` positions go through the head. Recomputed activations do not count (Chowdhery et al., 2022). A model that
    cannot run with fake tensors counts 6 for each parameter and token (Kaplan et al., 2020).
    """
    tensors, counter = [*model.parameters(), *model.buffers()], FlopCounterMode(display=False)
    with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True), counter:
        fakes = {id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors}
        copied: Any = copy.deepcopy(model, fakes).eval()
        copied.config._attn_implementation = COUNTED  # noqa: SLF001
        for module in copied.modules():  # hooks of objectives would keep its tensors
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        ids = torch.zeros((COUNTED_ROWS, length), dtype=torch.int64)
        Encoder(copied).logits(input_ids=ids, masked_positions=ids[:, :slots])
        return 3 * counter.get_total_flops() / COUNTED_ROWS
    return 6 * length * sum(parameter.numel() for parameter in model.parameters())


def _multiply(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: Any, **more: Any) -> Any:
    """Multiply as attention does: each query with all keys, or with the keys in its window."""
    seen = 2 * window - 1 if (window := more.get("sliding_window")) else key.shape[2]
    sharing = query.shape[1] // key.shape[1]
    key, value = (tensor[:, :, :seen].repeat_interleave(sharing, 1) for tensor in (key, value))
    return (query @ key.mT @ value).transpose(1, 2), None


AttentionInterface.register(COUNTED, _multiply)
