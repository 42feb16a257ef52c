"""Pre-trains in a loop of accelerate, on masked batches of bertdata.

Takes a dataset, a directory and a number of steps. Run again, it continues. Needs the extra accelerate.
    python examples/accelerate_loop.py shards/ trained/ 200
    accelerate launch --num_processes 2 examples/accelerate_loop.py shards/ trained/ 200
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

import bertdata
from bertdata.torch import BatchDataset

LENGTH, ROWS, SAVE_EVERY = 64, 32, 100  # tokens of a row; rows of a step, over all processes; steps
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}


class Position:  # the steps taken, and the state of the loader after them; accelerate keeps it with the weights
    def __init__(self, batches: BatchDataset) -> None:
        self.batches, self.step = batches, 0

    def state_dict(self):
        return {"step": self.step, "batches": self.batches.state_dict()}

    def load_state_dict(self, state):
        self.step = state["step"]
        self.batches.load_state_dict(state["batches"])


if len(sys.argv) != 4:
    sys.exit(__doc__)
path, out, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
set_seed(0)
accelerator, shards = Accelerator(), bertdata.open(path)
ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
batches = BatchDataset(bertdata.Loader(shards, length=LENGTH, global_batch_size=ROWS, **ranks))
model = BertForMaskedLM(BertConfig(vocab_size=shards.special_tokens.vocab_size, **SIZES))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-4))
accelerator.register_for_checkpointing(position := Position(batches))
if last := max(out.glob("step-*"), default=None):
    accelerator.load_state(last)
stream = iter(DataLoader(batches, batch_size=None))
while position.step < steps:
    loss = model(**send_to_device(next(stream), accelerator.device)).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    position.step += 1
    if position.step % SAVE_EVERY == 0 or position.step == steps:
        accelerator.print(f"step {position.step}: loss {loss.item():.4f}")
        accelerator.save_state(out / "unfinished")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (out / "unfinished").rename(out / f"step-{position.step:08d}")
