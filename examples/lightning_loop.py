"""Pre-trains with Lightning (pip install lightning), on masked batches of bertdata.

Takes a dataset, a directory and a number of steps. Run again, it goes on.
    python examples/lightning_loop.py shards/ trained/ 200
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

import bertdata
from bertdata.torch import BatchDataset

LENGTH, ROWS = 64, 32  # tokens of a row; rows of a step, over all processes
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}


class Batches(lightning.LightningDataModule):  # whose state is in the checkpoints
    first_step = 0

    def setup(self, stage):
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        self.batches = BatchDataset(bertdata.Loader(shards, length=LENGTH, global_batch_size=ROWS, **ranks))

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    def state_dict(self):  # Lightning asks for a batch ahead, so the steps are counted, not the batches
        step = self.trainer.global_step
        return {"step": step, "batches": self.batches.state_dict(step - self.first_step)}

    def load_state_dict(self, state):
        self.first_step = state["step"]
        self.batches.load_state_dict(state["batches"])


class Model(lightning.LightningModule):
    def configure_model(self):
        self.bert = BertForMaskedLM(BertConfig(vocab_size=shards.special_tokens.vocab_size, **SIZES))

    def training_step(self, batch, number):
        return self.bert(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-4)


if len(sys.argv) != 4:
    sys.exit(__doc__)
path, out, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
lightning.seed_everything(0)
shards, last = bertdata.open(path), out / "last.ckpt"
keep = ModelCheckpoint(out, save_last=True, every_n_train_steps=100)
trainer = lightning.Trainer(max_steps=steps, callbacks=[keep], use_distributed_sampler=False, logger=False)
trainer.fit(Model(), Batches(), ckpt_path=last if last.exists() else None)
