"""What a GPU itself does: matrix products of the sizes of a step, copies, and each kernel of attention.

    python benchmarks/gpu_facts.py --out benchmarks/results/gpu_facts.jsonl

Needs this repository and a GPU, takes half a minute, and writes a line of --out for each fact at once. If --out has
facts of this GPU, it does nothing. Times are medians of 10 calls by events of the GPU, after 3 that are not measured.
Operands are random, in bf16.

product     [m, k] x [k, n]: floating point operations a second
copy        bytes read and written a second, of 1 GiB
attention   forward and backward, 12 heads of 64, 32,768 tokens; the error of the output and of the worst gradient,
            relative to its norm, beside float32 by the plain formula, for 4 rows; ms is None where the kernel does not
            run. With a mask 10 % of the places of a row are padding, and hidden. "varlen" is the kernel of packed rows,
            here with documents of `length` tokens; window: how far a token sees to each side, -1: everywhere.
"""

# ruff: noqa: E402  (bertrain need not be installed)
from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import torch
from common import machine
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from bertrain.models.encoder import KERNELS

TOKENS, HEADS, WIDTH = 32_768, 12, 64
PRODUCTS = [(8192, 8192, 8192), (TOKENS, 768, 768), (TOKENS, 768, 3072), (TOKENS, 3072, 768), (768, TOKENS, 3072),
            (5120, 768, 30522), (5120, 768, 30528), (TOKENS, 1024, 4096), (TOKENS, 4096, 1024)]  # fmt: skip
LENGTHS = (64, 128, 192, 512, 1024)
Tensors = tuple[torch.Tensor, ...]


def milliseconds(call: Callable[[], Any], calls: int = 10) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def products() -> Any:
    for m, k, n in PRODUCTS:
        a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        passed = milliseconds(lambda a=a, b=b: a @ b)
        yield {"fact": "product", "m": m, "k": k, "n": n, "tflops": round(2 * m * k * n / passed / 1e9, 1)}


def copy() -> Any:
    source = torch.randint(0, 100, (1 << 30,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    passed = milliseconds(lambda: target.copy_(source))
    yield {"fact": "copy", "tb_per_s": round(2 * source.numel() / passed / 1e9, 3)}


def operands(rows: int, length: int, masked: bool) -> tuple[Tensors, torch.Tensor | None]:
    """Query, key, value and the gradient of the output, bf16 [rows, heads, length, width], and what is not padding."""
    tensors = tuple(
        torch.randn(rows, length, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    seen = (torch.arange(length, device="cuda") < length - length // 10)[None, None, None].expand(rows, 1, length, -1)
    return tensors, seen if masked else None


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) / WIDTH**0.5
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1) @ value


def both_ways(attend: Callable[..., torch.Tensor], given: Tensors) -> Tensors:
    """The output, and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, given[3]))


def errors(attend: Callable[..., torch.Tensor], expected: Callable[..., torch.Tensor], given: Tensors) -> Any:
    exact = both_ways(expected, tuple(tensor.float() for tensor in given))
    found = both_ways(attend, given)
    relative = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    finite = all(tensor.isfinite().all().item() for tensor in found)
    return {"output_error": round(relative[0], 5), "gradient_error": round(max(relative[1:]), 5), "finite": finite}


def attention() -> Any:
    for length in LENGTHS:
        for masked in (False, True):
            small, seen = operands(4, length, masked)
            large, seen_large = operands(TOKENS // length, length, masked)
            for name, kernel in KERNELS.items():
                line = {"fact": "attention", "kernel": name, "length": length, "masked": masked}
                try:
                    with sdpa_kernel(kernel):
                        line |= errors(
                            lambda *given, seen=seen: F.scaled_dot_product_attention(*given, attn_mask=seen),
                            lambda *given, seen=seen: plain(*given, seen),
                            small,
                        )
                        passed = milliseconds(
                            lambda large=large, seen=seen_large: both_ways(
                                lambda *given: F.scaled_dot_product_attention(*given, attn_mask=seen), large
                            )
                        )
                    yield line | {"ms": round(passed, 3)}
                except RuntimeError as error:
                    yield line | {"ms": None, "why": str(error).splitlines()[0][:200]}


def unequal() -> Any:
    """The kernel of packed rows, without and with windows."""
    from torch.nn.attention.varlen import varlen_attn

    for length in (128, 512, 1024):
        ends = torch.arange(0, TOKENS + 1, length, device="cuda", dtype=torch.int32)
        for reach in (-1, 64):

            def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
                bounds = ends[: query.shape[0] + 1]  # noqa: B023
                flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
                out = varlen_attn(*flat, bounds, bounds, length, length, window_size=(reach, reach))  # noqa: B023
                return out.unflatten(0, (query.shape[0], -1)).transpose(1, 2)

            places = torch.arange(length, device="cuda")
            near = (places[:, None] - places[None]).abs() <= reach if reach >= 0 else None
            small, large = operands(4, length, False)[0], operands(TOKENS // length, length, False)[0]
            line = {"fact": "attention", "kernel": "varlen", "length": length, "masked": False, "window": reach}
            line |= errors(attend, lambda *given, near=near: plain(*given, near), small)
            yield line | {"ms": round(milliseconds(lambda large=large: both_ways(attend, large)), 3)}  # noqa: B023


def software() -> Any:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        yield {"fact": "driver", "driver, clock, power": subprocess.run(command, capture_output=True, text=True).stdout}
    properties = torch.cuda.get_device_properties(0)
    yield {"fact": "machine", "bytes": properties.total_memory, "cuda": torch.version.cuda,
           "cudnn": torch.backends.cudnn.version(), **machine()}  # fmt: skip


@click.command()
@click.option("--out", type=Path, required=True, help="File of JSON lines, to which facts are added.")
def main(out: Path) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("torch finds no GPU here; run this on a machine that has one")
    gpu = {"GPU": torch.cuda.get_device_name()}
    if out.exists() and any(gpu.items() <= json.loads(line).items() for line in out.read_text().splitlines()):
        return
    for facts in (software, products, copy, attention, unequal):
        try:
            for line in facts():
                with open(out, "a") as file:
                    file.write(json.dumps(gpu | line) + "\n")
                print(*(f"{name} {value}" for name, value in line.items()), flush=True)
        except Exception as error:  # noqa: BLE001  (one fact that cannot be had must not hide the others)
            print(f"{facts.__name__}: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
