"""A step whose loss or gradient is not finite changes nothing, is counted, and ends a run after ten in a row."""

import itertools
import math

import pytest
import torch
from support.runs import QUIET, entries, flags, last_checkpoint, on_ranks, refused_run, train, weights_in

from bertrain.objectives import OBJECTIVES, LossSum, Objective
from bertrain.optim import optimizers
from bertrain.report import PATIENCE
from bertrain.trainer import Trainer


def wild_at(monkeypatch, *steps, rank=None):
    """Makes the losses of some steps, numbered from 1, NaN on their way to the gradients: on one rank, or on all."""
    plain, seed, now = Trainer.add_gradients, Trainer._seed, []

    def _seed(self, step):
        now[:] = [step + 1]
        seed(self, step)

    def add_gradients(self, module, piece, scale, *, is_last):
        is_wild = now[0] in steps and rank in (None, self.ranks.rank)
        return plain(self, module, piece, scale * (math.nan if is_wild else 1), is_last=is_last)

    monkeypatch.setattr(Trainer, "_seed", _seed)
    monkeypatch.setattr(Trainer, "add_gradients", add_gradients)


def state_after(out, step):
    """The weights of a checkpoint and its moments."""
    folder = out / f"step-{step:08d}"
    found = weights_in(folder)
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    found |= {f"{number}.{name}": value for number, of_one in state.items() for name, value in of_one.items()}
    return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


RUNS = {
    "adamw": {"micro_batch_size": 4},
    "muon": {"optimizer": "muon"},
    "stableadamw": {"optimizer": "stableadamw"},
    "lamb": {"optimizer": "lamb"},
    "fp16": {"precision": "fp16"},
    "lora": {"lora": "r=2,alpha=6"},
    "lora, muon": {"lora": "r=2,alpha=6", "optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_after_a_skipped_step(dataset, bert_run, tmp_path, monkeypatch, name):
    """Also where the first step of all is skipped, which makes the state. sgd knows nothing of steps that are."""
    plain = lambda module, config: torch.optim.SGD(module.parameters(), momentum=0.9)  # noqa: E731
    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", plain)
    wild_at(monkeypatch, 1, 3)
    options = QUIET | RUNS[name] | {"steps": 5, "save_every": 1}
    if "lora" in options:
        options["init"] = str(bert_run)
    log = train(dataset.path, tmp_path / "run", **options)
    states = [state_after(tmp_path / "run", step) for step in range(1, 6)]
    assert [equal(one, other) for one, other in itertools.pairwise(states)] == [False, True, False, False]
    assert not any(value.any() for key, value in states[0].items() if key[0].isdigit())
    assert all(value.isfinite().all() for value in states[-1].values())
    entry = next(entry for entry in log if entry["step"] == 3 and "grad_norm" in entry)
    assert (entry["skipped"], entry["not_finite"]) == (1, ["grad_norm"])
    assert (entry["loss"], entry["grad_norm"]) == (None, None)
    assert [entry["step"] for entry in log if "skipped" in entry] == [1, 3]


@pytest.mark.parametrize("ranks", [None, 2])
def test_all_ranks_skip_together_and_the_log_has_the_mean_of_what_was_learned(dataset, tmp_path, monkeypatch, ranks):
    """Sums leave out the losses of skipped steps, and their count."""
    options = QUIET | {"steps": 4, "micro_batch_size": 2, "global_batch_size": 8, "ranks": ranks}
    plain = train(dataset.path, tmp_path / "plain", **options | {"save_every": 1})
    expected = [entry["loss"] for entry in plain if "grad_norm" in entry][:2]
    wild_at(monkeypatch, 3, 4, rank=ranks and 1)
    log = train(dataset.path, tmp_path / "run", **options | {"log_every": 4})
    assert equal(state_after(tmp_path / "run", 4), state_after(tmp_path / "plain", 2))
    (entry,) = (entry for entry in log if "grad_norm" in entry)
    assert (entry["skipped"], entry["not_finite"]) == (2, ["grad_norm"])
    assert entry["loss"] == pytest.approx(sum(expected) / 2, rel=0.01)


def test_an_infinite_loss_of_finite_gradients_is_skipped_too(dataset, tmp_path):
    class Wild(Objective):
        def count(self, batch):
            return len(batch.sample_ids)

        def forward(self, encoder, outputs, piece):
            return LossSum(outputs.logits.mean() + math.inf, torch.tensor(0))

    OBJECTIVES["wild"] = Wild
    options = QUIET | {"objective": "mlm+wild", "steps": 3}
    refused_run(dataset.path, tmp_path / "run", **options, kind="not-finite", option="lr", says="wild_loss")


def test_ten_skipped_steps_in_a_row_end_a_run_on_all_ranks(dataset, tmp_path, monkeypatch):
    """Nine do not. The weights of the newest checkpoint are finite."""
    wild_at(monkeypatch, *range(3, 3 + PATIENCE - 1), *range(14, 40), rank=1)
    out, options = tmp_path / "run", QUIET | {"steps": 40, "save_every": 12, "global_batch_size": 4}
    _, said = on_ranks(2, "bertrain.pretrain", flags(dataset.path, out, **options), code=1)
    assert ("Traceback" in said, said.count("Error: "), said.count("were skipped")) == (False, 1, 1)
    assert last_checkpoint(out).name == "step-00000012"
    assert all(value.isfinite().all() for value in state_after(out, 12).values())
    assert entries(out)[-1]["step"] == 13 + PATIENCE
