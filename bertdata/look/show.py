"""The output of `bertdata show`: the samples of a Loader as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from bertdata.choices import MaskingPolicy
from bertdata.errors import require
from bertdata.format.dataset import Dataset
from bertdata.read.loader import Loader
from bertdata.types import IGNORE_INDEX, Masking


def shown(dataset: Dataset, *, sample: int, count: int, policy: MaskingPolicy | None, **options: Any) -> str:
    """Return samples as text. With a masking policy, each sample is a table of inputs, targets and kinds of mask.

    sample: the stream position of the first sample, in the first epoch. policy: None for rows without masks. options:
    samples, split, length and seed of the Loader. Raises UsageError for a split or a position that does not exist.
    """
    from bertdata.tokenize.spelling import spelled
    from bertdata.tokenize.tokenizer import TOKENIZER, LoadedTokenizer

    tokenizer = LoadedTokenizer(dataset.tokenizer_file(TOKENIZER).decode(errors="replace"))
    token_of = spelled(tokenizer)
    masking = Masking(policy=policy) if policy else None
    loader = Loader(dataset, masking=masking, **options)
    require(0 <= sample < loader.num_samples, "sample", sample, f"a position from 0 to {loader.num_samples - 1}")
    blocks = []
    for position in range(sample, min(sample + count, loader.num_samples)):
        batch = loader.read(np.array([position]))
        ids = batch.input_ids[0]
        ids = ids if batch.attention_mask is None else ids[batch.attention_mask[0] == 1]
        split, seed = options["split"], options["seed"]
        lines = [f"sample {position} of {split} (id {batch.sample_ids[0]}), {ids.size} positions, seed {seed}"]
        if batch.next_sentence_label is not None:
            follows = "is from another document" if batch.next_sentence_label[0] else "follows the first"
            lines[0] += f"; the second segment {follows}"
        if masking:
            labels = batch.labels[0]
            lines.append(f"  {'position':>8}  {'input':<20}{'target':<20}mask")
            for place, token in enumerate(ids):
                target = labels[place]
                target_token = token_of(int(target)) if target != IGNORE_INDEX else ""
                kind = "" if target == IGNORE_INDEX else _kind(int(token), int(target), dataset.special_tokens.mask)
                lines.append(f"  {place:>8}  {token_of(int(token)):<20}{target_token:<20}{kind}".rstrip())
        else:
            lines.append(tokenizer.decode(ids.tolist()))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _kind(token: int, target: int, mask_id: int | None) -> str:
    """Return the effect of the mask on a selected token."""
    if token == mask_id:
        return "masked"
    return "kept" if token == target else "random"
