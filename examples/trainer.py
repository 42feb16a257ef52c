"""Pre-trains with the Trainer of transformers, on masked batches of bertdata.

Takes a dataset, a directory and a number of steps. Run again, it goes on.
    python examples/trainer.py shards/ trained/ 200
    torchrun --nproc-per-node 2 examples/trainer.py shards/ trained/ 200
"""

import json
import sys
from pathlib import Path

from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

import bertdata
from bertdata.torch import BatchDataset

LENGTH, ROWS = 64, 32  # tokens of a row; rows of a step, over all processes
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
STATE = "loader.json"


class BatchTrainer(Trainer):
    def get_train_dataloader(self):  # the batches are in order, masked, and those of this process alone
        return DataLoader(self.train_dataset, batch_size=None)


class KeepPosition(TrainerCallback):
    """Puts the state of the loader into each checkpoint: one integer, and which stream it belongs to."""

    def __init__(self, batches: BatchDataset, first_step: int) -> None:
        self.batches, self.first_step = batches, first_step

    def on_save(self, args, state, control, **more):
        place = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
        if state.is_world_process_zero:
            place.write_text(json.dumps(self.batches.state_dict(state.global_step - self.first_step)))


if len(sys.argv) != 4:
    sys.exit(__doc__)
path, out, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
arguments = TrainingArguments(
    str(out), max_steps=steps, learning_rate=5e-4, warmup_steps=20, logging_steps=20, save_steps=100,
    per_device_train_batch_size=ROWS, ignore_data_skip=True, seed=0,
)  # fmt: skip
shards = bertdata.open(path)
ranks = {"rank": arguments.process_index, "world_size": arguments.world_size}
batches = BatchDataset(bertdata.Loader(shards, length=LENGTH, global_batch_size=ROWS, **ranks))
first_step = max((int(state.parent.name.rpartition("-")[2]) for state in out.glob(f"checkpoint-*/{STATE}")), default=0)
last = str(out / f"checkpoint-{first_step}") if first_step else None
if last:
    batches.load_state_dict(json.loads((Path(last) / STATE).read_text()))
model = BertForMaskedLM(BertConfig(vocab_size=shards.special_tokens.vocab_size, **SIZES))
keep = KeepPosition(batches, first_step)
trainer = BatchTrainer(model=model, args=arguments, train_dataset=batches, callbacks=[keep])
trainer.train(resume_from_checkpoint=last)
