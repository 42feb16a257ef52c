"""Fills in hidden tokens round by round, as masked diffusion generates text: `bertrain evaluate --denoise 2`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import bertdata
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.tokenize.spelling import Spelling
from bertdata.tokenize.tokenizer import TOKENIZER
from bertrain.models.encoder import Encoder
from bertrain.run.evaluate import loader_for
from bertrain.runtime import feed

HALF = bertdata.Masking(probability=0.5, mask_fraction=1.0, random_fraction=0.0)
ROUNDS = 4


@torch.no_grad()
def rounds(
    encoder: Encoder, piece: feed.MicroBatch, *, vocab_size: int, number: int = ROUNDS
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of a micro-batch as they are at first, and after each round: ids int64 [B, T], and what is hidden, bool.

    A round fills in an equal share of the hidden places of each row, those whose best token is the surest (LLaDA, Nie
    et al., 2025, "low-confidence remasking"). After the last round nothing is hidden.
    """
    ids, places = piece["input_ids"], piece["masked_positions"]
    is_left = piece["targets"] != bertdata.IGNORE_INDEX
    counts = is_left.sum(1)
    for done in range(number + 1):
        hidden = torch.zeros_like(ids).scatter_add(1, places, is_left.long()) > 0
        yield ids, hidden
        if done == number:
            return
        sureness, best = encoder.logits(**piece | {"input_ids": ids})[..., :vocab_size].float().softmax(-1).max(-1)
        surest_first = sureness.masked_fill(~is_left, -1.0).argsort(stable=True, dim=1, descending=True)
        to_fill = is_left.sum(1) - counts * (number - done - 1) // number
        is_early = torch.arange(places.shape[1], device=ids.device) < to_fill[:, None]
        is_chosen = torch.zeros_like(is_left).scatter(1, surest_first, is_early)
        ids = ids.scatter(1, places.where(is_chosen, 0), best.where(is_chosen, ids[:, :1]))  # at 0 is [CLS], and stays
        is_left = is_left & ~is_chosen


def rounds_as_text(
    encoder: Encoder, shards: bertdata.Dataset, device: torch.device, *, split: str, length: int, rows: int
) -> str:
    """The first rows that `evaluate` sees with half of their tokens hidden, and each round; >new< tokens."""
    batch = next(loader_for(encoder, shards, rows=rows, split=split, length=length, masking=HALF))
    rows = len(batch.input_ids)
    piece = next(feed.micro_batches(batch, size=rows, count=1, device=device))
    tokenizer = load_tokenizer(str(shards.path))
    spelling = Spelling(tokenizer.files[TOKENIZER])
    was_training = encoder.training
    encoder.eval()
    blocks = [[f"sample {number} of {rows}:"] for number in range(1, rows + 1)]
    before = None
    for done, (ids, hidden) in enumerate(rounds(encoder, piece, vocab_size=shards.special_tokens.vocab_size)):
        for number in range(rows):
            size = length if batch.attention_mask is None else int(batch.attention_mask[number].sum())
            tokens = [tokenizer.spell(token) for token in ids[number, :size].tolist()]
            filled = hidden[number] if before is None else before[number] & ~hidden[number]
            new = filled.nonzero().flatten().tolist()
            blocks[number].append(f"  round {done}: {spelling.text(tokens, new)}")
        before = hidden
    encoder.train(was_training)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"
