"""How fast a run should be on a GPU that is not here: a model, made of published figures and some of one H100.

A step takes the time of its matrix products, of attention, of what its layers and its head move through memory, and of
its optimizer, one after another. Each is divided by what the GPU does at best times a share of that. The shares are the
same for all GPUs and models. docs/gpu.md compares this with runs that others published, and with runs of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from bertrain.run.rates import PEAK_FLOPS, Operations


@dataclass(frozen=True)
class Gpu:
    """What a GPU does at best. Numbers a second are of bf16."""

    peak: float  # floating point operations a second, of the data sheet, which MFU refers to
    product: float  # the same in the fastest matrix product that was measured
    bandwidth: float  # bytes a second of its memory, of the data sheet
    link: float  # bytes a second to another GPU of the machine, in one direction, of the data sheet
    memory: float  # bytes


GPUS = {
    "h200": Gpu(PEAK_FLOPS["H200"], 792.1e12, 4.8e12, 450e9, 141e9),
    "h100": Gpu(PEAK_FLOPS["H100"], 792.1e12, 3.35e12, 450e9, 80e9),
    "a100": Gpu(PEAK_FLOPS["A100"], 267.9e12, 2.039e12, 300e9, 80e9),
    "l4": Gpu(PEAK_FLOPS["L4"], 91.4e12, 0.3e12, 32e9, 24e9),
    "4090": Gpu(PEAK_FLOPS["4090"], 178.5e12, 1.008e12, 32e9, 24e9),
}
"""H100 and H200 are the SXM versions, A100 that of 80 GB. The fastest products are those of the table of
github.com/mag-/gpu_benchmark; it has no H200, which has the cores of an H100."""

PRODUCTS, ATTENTION = 0.65, 0.35  # shares of the fastest product that a model's own products and its attention reach
BANDWIDTH = 0.8  # share of the data sheet's that kernels and links reach
WIDTHS, INNER = 28, 7  # so many times its width and inner width a layer moves, forward and backward, in bf16 numbers
ROTARY = 20  # so many times its width more, if it turns queries and keys
AROUND = 256  # tokens around a window whose products a kernel computes in vain, as it works on blocks
LOGIT, PARAMETER = 12, 46  # bytes that the loss moves a logit, and clipping and AdamW a parameter
BACKWARD = 2 / 3  # share of a pass in which gradients can be added up over GPUs meanwhile


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the time of a step depends on, of a model."""

    operations: Operations
    trained: int  # parameters
    width: int
    inner: int
    layers: int
    vocab_size: int
    rotary: bool = False  # whether positions are given to attention by turning queries and keys

    @classmethod
    def of(cls, model: PreTrainedModel) -> Sizes:
        config: Any = model.config
        width = getattr(config, "hidden_size", 0)
        return cls(
            operations=Operations.of(model),
            trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            width=width,
            inner=getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", None) or 4 * width,
            layers=getattr(config, "num_hidden_layers", 0),
            vocab_size=config.vocab_size,
            rotary=bool(getattr(config, "rope_parameters", None))
            or getattr(config, "position_embedding_type", None) == "rotary"
            or config.model_type == "roformer",
        )


def seconds_of_step(sizes: Sizes, gpu: Gpu, *, rows: float, length: int, slots: int, passes: int, gpus: int) -> float:
    """A step of AdamW in bf16. rows: of one GPU, in so many passes. slots: masked tokens of a row."""
    tokens, operations = rows * length, sizes.operations
    around = replace(operations, windows=tuple(None if one is None else one + AROUND for one in operations.windows))
    products = 6 * rows * (length * operations.token + slots * operations.target)
    attention = around.of_step(rows=rows, length=length, slots=slots) - products
    moved = 2 * tokens * sizes.layers * ((WIDTHS + ROTARY * sizes.rotary) * sizes.width + INNER * sizes.inner)
    moved += LOGIT * rows * slots * sizes.vocab_size
    bandwidth = BANDWIDTH * gpu.bandwidth
    computing = products / (PRODUCTS * gpu.product) + attention / (ATTENTION * gpu.product) + moved / bandwidth
    summing = 2 * (gpus - 1) / gpus * 4 * sizes.trained / (BANDWIDTH * gpu.link)
    return computing + PARAMETER * sizes.trained / bandwidth + max(0.0, summing - BACKWARD * computing / passes)
