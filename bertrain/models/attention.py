"""How a model computes attention, and which kernels of torch a training step may run for it.

On GPUs torch chooses among four kernels by shapes, masks and number formats. The choice must be the same in the forward
pass and in the backward pass, which computes the former again with --gradient-checkpointing. An evaluation has no
backward pass, and leaves the choice to torch. Documents in packed rows and windows of local layers (isolation.py) have
a kernel of their own on GPUs, which the choice does not touch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from bertdata.errors import UsageError, is_out_of_memory
from bertrain.models import isolation
from bertrain.models.encoder import Encoder
from bertrain.models.families import family_of
from bertrain.runtime import feed

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPUS = ("flash", "math")
LAST_FAULTY = (2, 13)
"""The newest torch whose cuDNN attention is left out: its backward pass may give NaN (pytorch #196678, since 2.11, for
masks and some lengths on H100 and H200; diffusers #9768 of 2.5). Raise it, or not, when a newer one was tried."""
SHORT = 512  # tokens of a row up to which bf16 attention on CPUs is faster as plain products than torch's kernel
PROBED = 64  # tokens of the row that shows whether a kernel can run


def kernels(choice: str, encoder: Encoder, device: torch.device) -> tuple[str, ...]:
    """The kernels that --attention lets a model run; what transformers calls its attention if it has no such kernel."""
    own = str(encoder.model.config._attn_implementation)  # noqa: SLF001
    if own not in ("sdpa", isolation.NAME, isolation.WHOLE_ROWS):
        return (own,)
    if choice == "flash" and device.type != "cpu":
        return "flash", "efficient"  # rows with padding have masks, which flash does not take there
    if choice != "auto":
        return (choice,)
    if device.type == "cpu":
        return ON_CPUS
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return tuple(name for name in KERNELS if name != "cudnn" or version > LAST_FAULTY)


def limited(names: tuple[str, ...]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that makes the context in which only these kernels run."""
    some = [KERNELS[name] for name in names if name in KERNELS]
    return lambda: sdpa_kernel(some) if some else contextlib.nullcontext()


def require(
    choice: str, encoder: Encoder, device: torch.device, autocast: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """Raises UsageError if a model cannot run with the kernel that --attention names; auto always can.

    Calls the model on one row of PROBED tokens, as training would.
    """
    if choice == "auto":
        return
    own, kind = kernels(choice, encoder, device), encoder.model.config.model_type
    positions = torch.arange(PROBED)[None]
    piece = {"input_ids": positions % encoder.model.config.vocab_size, "masked_positions": positions[:, :1]}
    if encoder.isolate:
        piece["position_ids"] = positions
        piece |= {"cu_seqlens": feed.cu_seqlens_of(positions)} if feed.has_kernel(device) else {}
    try:
        if own[0] != choice:
            raise RuntimeError(f"the model computes attention by itself: {own[0]}")
        with autocast(), limited((choice,))():  # alone: a full row has no mask
            encoder.logits(**{name: tensor.to(device) for name, tensor in piece.items()})
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        sentence = f"--attention {choice} cannot run for a {kind} on {device.type} ({reason}); give another, or auto"
        raise UsageError(sentence, "unsupported", option="attention", given=choice) from None


def choose_attention(model: PreTrainedModel, *, bf16: bool, on_gpu: bool, length: int) -> None:
    """Sets plain products where they are faster than torch's kernels: bf16 on CPUs, rows of at most 512 tokens."""
    if bf16 and not on_gpu and length <= SHORT:
        model.set_attn_implementation("eager")


def leave_out_masks(model: PreTrainedModel, *, in_windows: bool) -> None:
    """Lets a model compute rows without padding without a mask of all pairs of tokens, where it can.

    in_windows: whether the device has a kernel for layers that attend to a window, as GPUs have in half precision. If
    not, a model with such layers keeps its masks.
    """
    is_local = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    can = family_of(model).isolation == "kernel" and model.config._attn_implementation == "sdpa"  # noqa: SLF001
    if can and (in_windows or not is_local):
        model.set_attn_implementation(isolation.WHOLE_ROWS)
