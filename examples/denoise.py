"""Fill in hidden tokens round by round, as masked diffusion generates text (LLaDA, Nie et al., 2025).

    bertrain pretrain --data shards/ --objective diffusion --masking uniform --out run/ --steps 10000
    python examples/denoise.py run/step-00010000 shards/

Half of the tokens of a held-out row are hidden. Each of four rounds fills in the quarter whose predictions are the
surest.
"""

import math
import sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import bertdata

ROUNDS = 4


@torch.no_grad()
def main(checkpoint: str, data: str) -> None:
    """Print the row, and what it is after each round."""
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    masking = bertdata.Masking(probability=0.5, mask_fraction=1.0, random_fraction=0.0)
    loader = bertdata.Loader(bertdata.open(data), length=64, split="validation", global_batch_size=1, masking=masking)
    batch = next(loader)
    ids = torch.from_numpy(batch.input_ids)[0]
    padding = None if batch.attention_mask is None else torch.from_numpy(batch.attention_mask)
    for done in range(ROUNDS + 1):
        print(f"round {done}: {tokenizer.decode(ids)}")
        hidden = ids == tokenizer.mask_token_id
        if done < ROUNDS:
            logits = model(input_ids=ids[None], attention_mask=padding).logits[0]
            sureness, best = logits.softmax(-1).max(-1)
            count = math.ceil(int(hidden.sum()) / (ROUNDS - done))
            surest = sureness.where(hidden, -1.0).topk(count).indices
            ids[surest] = best[surest]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/denoise.py CHECKPOINT SHARDS")
    main(sys.argv[1], sys.argv[2])
