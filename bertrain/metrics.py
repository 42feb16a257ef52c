"""What is written down about a run: JSON lines, entropies to compare a loss with, rates, and rows to look at."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertdata import IGNORE_INDEX, Batch, Dataset
from bertdata.files import write_file
from bertdata.tokenize.tokenizer import Tokenizer


class Log:
    """Appends one JSON object a line to log.jsonl. A resumed run first drops what lies after its checkpoint.

    What a full disk does not take is kept and tried again with the next entry, and at the end.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:  # cut off as the process died
                    break
                if entry.get("step", 0) > after_step:
                    break
                kept.append(line + "\n")
        write_file(path, "".join(kept).encode())
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (lives as long as the run)
        self._waiting = b""

    def write(self, entry: dict[str, Any]) -> str | None:
        """Returns why it could not be written, if so."""
        self._waiting += json.dumps(entry).encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            return error.strerror
        return None

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        with self._file, contextlib.suppress(*([OSError] if kind else [])):
            self._flush()
            os.fsync(self._file.fileno())


def means(
    loss: float, right: float, targets: float, nsp_loss: float = 0.0, nsp_right: float = 0.0, rows: float = 0.0,
    distil_loss: float = 0.0, agreed: float = 0.0, taught: float = 0.0,
) -> dict[str, float | None]:  # fmt: skip
    """Loss and accuracy a target, None where there was no target; of next sentences, and of a teacher, if there are.

    Each loss is the mean over what it is of, before any share that it has in what is learned from.
    """
    found = {"loss": loss / targets if targets else None, "accuracy": right / targets if targets else None}
    found |= {"nsp_loss": nsp_loss / rows, "nsp_accuracy": nsp_right / rows} if nsp_loss else {}
    return found | ({"distil_loss": distil_loss / taught, "agreement": agreed / taught} if taught else {})


PEAK_FLOPS = {  # dense bf16 and fp16, of the makers' data sheets
    "H200": 989e12, "H100": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "A100": 312e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "4090": 165e12, "3090": 71e12,
}  # fmt: skip


def peak_flops(device: torch.device, precision: str) -> float | None:
    """What a GPU can do at best in a second; None where it is not known, as on CPUs."""
    if device.type != "cuda" or precision == "fp32" or (precision == "bf16" and not has_bf16(device)):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """By the words of a GPU's name: "NVIDIA A100-SXM4-80GB" is an A100, and an A10G is not an A10."""
    words = set(name.replace("-", " ").split())
    known = sorted(PEAK_FLOPS, key=len, reverse=True)
    return next((PEAK_FLOPS[part] for part in known if words.issuperset(part.split())), None)


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bf16 itself; older GPUs do it in float32."""
    return device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


def step_flops(config: Any, *, rows: float, length: int, slots: int) -> float:
    """Floating point operations of forward and backward: matrix products and attention, 2 a multiply-add, 3 passes.

    Only `slots` places of a row go through the head. What is computed twice to save memory is not counted, as it is not
    in the usual definition of MFU (Chowdhery et al., 2022).
    """
    width, layers, inner = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    is_bert = config.model_type == "bert"
    weights = layers * (4 * width**2 + (2 if is_bert else 3) * width * inner)
    seen = [length] * layers
    if not is_bert:
        reach = 2 * config.sliding_window + 1
        seen = [min(length, reach) if kind == "sliding_attention" else length for kind in config.layer_types]
    attention = 2 * width * sum(seen)
    head = slots * (width**2 + width * config.vocab_size)
    return 6 * rows * (length * (weights + attention) + head)


class Rates:
    """Tokens a second, MFU, and the share of time spent waiting for data, since the last `take`; and memory."""

    def __init__(self, model: Any, device: torch.device, precision: str) -> None:
        self._config, self._device = model.config, device
        self._peak = peak_flops(device, precision)
        self._begin()

    def _begin(self) -> None:
        self._since, self._tokens, self._flops, self._waited = time.perf_counter(), 0.0, 0.0, 0.0

    def add(self, *, rows: float, length: int, slots: int, waited: float) -> None:
        """What one rank has done: rows is its share of a step."""
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


def reference_losses(shards: Dataset, split: str) -> dict[str, float]:
    """What a loss is to be compared with, in nats: guessing evenly, and guessing by frequency alone.

    The unigram entropy is that of the split's tokens without special ids, over at most ten million of them.
    """
    counts = shards.token_counts(split)
    counts[list(shards.special_tokens.special_ids)] = 0
    shares = counts[counts > 0] / max(1, counts.sum())
    unigram = max(0.0, -float(np.sum(shares * np.log(shares))))
    return {"uniform": math.log(shards.special_tokens.vocab_size), "unigram": unigram}


def table(tokenizer: Tokenizer, batch: Batch, predicted: np.ndarray, *, context: int = 5) -> list[str]:
    """One line for each masked place: the tokens around it | target | predicted. predicted int64 [B, K]."""
    lines = [f"{'Input':<76} | {'Target':<16} | Predicted"]
    for row, ids in enumerate(batch.input_ids):
        for slot, place in enumerate(batch.masked_positions[row]):
            target = int(batch.targets[row, slot])
            if target == IGNORE_INDEX:
                continue
            first = max(0, place - context)
            around = [tokenizer.spell(int(token)) for token in ids[first : place + context + 1]]
            around[place - first] = f">{around[place - first]}<"
            text = " ".join(around)
            guess = int(predicted[row, slot])
            mark = "" if guess == target else "  x"
            lines.append(f"{text[:76]:<76} | {tokenizer.spell(target):<16} | {tokenizer.spell(guess)}{mark}")
    return lines
