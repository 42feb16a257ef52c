"""A digest of the weights of a model, by which methods know it again, wherever it is."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel, *, without: Collection[str] = ()) -> str:
    """SHA-256 of the weights in hex: of each tensor, by name, its name, shape and float32 bytes. About 1 GB/s.

    without: names of tensors that do not count.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name in without:
            continue
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
