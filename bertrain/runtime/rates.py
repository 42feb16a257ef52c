"""How fast a run is: tokens a second, floating point operations, their share of what the device can do, memory."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from bertrain.models.families import family_of

PEAK_FLOPS = {
    "H200": 989e12, "H100": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "A100": 312e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "4090": 165e12, "3090": 71e12,
}  # fmt: skip
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


def step_flops(config: Any, *, rows: float, length: int, slots: int) -> float:
    """Floating point operations of a forward and backward pass: matrix products and attention.

    A multiply-add is 2 operations, and the backward pass counts twice the forward pass. Only `slots` places of a row go
    through the head. What is computed twice to save memory is not counted, as it is not in the usual definition of MFU
    (Chowdhery et al., 2022).
    """
    inner_name, matrices = family_of(config).feed_forward
    width, layers, inner = config.hidden_size, config.num_hidden_layers, getattr(config, inner_name)
    weights = layers * (4 * width**2 + matrices * width * inner)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = 2 * (getattr(config, "sliding_window", None) or length) + 1
    reach = [min(length, window) if kind == "sliding_attention" else length for kind in kinds]
    attention = 2 * width * sum(reach)
    head = slots * (width**2 + width * config.vocab_size)
    return 6 * rows * (length * (weights + attention) + head)


class Rates:
    """Tokens a second, MFU, the share of time spent waiting for data, and memory, since the last `take`."""

    def __init__(self, model: Any, device: torch.device, precision: str) -> None:
        self._config, self._device = model.config, device
        self._peak = peak_flops(device, precision)
        self._begin()

    def _begin(self) -> None:
        self._since, self._tokens, self._flops, self._waited = time.perf_counter(), 0.0, 0.0, 0.0

    def add(self, *, rows: float, length: int, slots: int, waited: float) -> None:
        """What one rank has done in a step. rows: its share of the step."""
        self._tokens += rows * length
        self._flops += step_flops(self._config, rows=rows, length=length, slots=slots)
        self._waited += waited

    def take(self, world_size: int) -> dict[str, float]:
        """tokens_per_s of all ranks; flops_per_s, mfu (where the peak is known) and memory of one."""
        seconds = time.perf_counter() - self._since
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
