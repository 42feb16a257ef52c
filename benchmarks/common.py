"""What the benchmarks share."""

from __future__ import annotations

import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# For every program that is compared: glibc keeps freed memory, as bertrain tells it by itself.
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2147483647"}


def machine() -> dict[str, Any]:
    names = ("bertrain", "numpy", "numba", "tokenizers", "transformers", "torch")
    packages = {}
    for name in names:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "?")
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()} | packages


def has_bf16() -> bool:
    """Whether the processor multiplies in bf16. Others take a hundred times as long for it as for fp32."""
    with open("/proc/cpuinfo") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    return bool({"avx512_bf16", "amx_bf16"} & set(flags))


def steps_in(seconds: float, said: str) -> int:
    """Return how many steps of training fit into seconds. said: by `bertrain doctor --steps 1000`."""
    measured = re.search(r"training ([\d,.]+) s", said)
    assert measured, said  # noqa: S101
    return max(1, int(1000 * seconds / float(measured[1].replace(",", ""))))


def report(question: str, regime: str, result: dict[str, Any]) -> None:
    """Prints the JSON object that a benchmark ends with; results/ keeps such lines."""
    print(json.dumps({"question": question, "regime": regime, "result": result, "machine": machine()}))


def small_modernbert(tokenizer: str) -> dict[str, Any]:
    """The configuration of a ModernBERT of 6 layers and width 256 for a tokenizer: a directory or a dataset.

    Every second layer sees eight tokens on each side alone.
    """
    from bertdata.tokenize.load import load

    special = load(tokenizer).special
    return {
        "model_type": "modernbert", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
        "intermediate_size": 384, "max_position_embeddings": 512, "local_attention": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "classifier_pooling": "mean",
        "bos_token_id": None, "eos_token_id": None, "vocab_size": special.vocab_size,
        "pad_token_id": special.pad, "cls_token_id": special.cls, "sep_token_id": special.sep,
    }  # fmt: skip
