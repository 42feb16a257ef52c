"""Masked diffusion: losses of an independent loop, ranks, resuming, and filling in a text round by round."""

import numpy as np
import pytest
import torch
from conftest import built, make_text
from helpers import succeeds
from training import QUIET, assert_near, last_checkpoint, refused_run, run_of, train, train_twice

import bertdata
from bertrain.commands import denoise, evaluate
from bertrain.models import pretrained
from bertrain.models.encoder import Encoder
from bertrain.options.config import Config
from bertrain.run import assemble

OPTIONS = QUIET | {"objective": "diffusion", "masking": "uniform", "steps": 4, "save_every": 2}


def test_ten_steps_have_the_losses_of_transformers(dataset, tmp_path):
    given = OPTIONS | {
        "steps": 10,
        "schedule": "constant",
        "warmup": 0.0,
        "weight_decay": 0.0,
        "clip_norm": 1e6,
        "optimizer": "adamw",
        "lr": 1e-3,
        "save_every": 100,
    }
    log = train(dataset.path, tmp_path / "run", **given)
    ours = [(entry["loss"], entry["accuracy"]) for entry in log if "loss" in entry]
    config = Config.of(data=str(dataset.path), out=str(tmp_path / "again"), length=32, global_batch_size=6, **given)
    run = run_of(config)
    run.watch.close()
    model, special = run.learner.model.train(), dataset.special_tokens
    adamw = torch.optim.AdamW(
        model.parameters(), lr=1e-3, eps=config.epsilon, betas=(config.beta1, config.beta2), weight_decay=0.0
    )
    loader, expected = assemble.loader(config, dataset), []
    for _ in range(10):
        batch = next(loader)
        labels = torch.from_numpy(batch.labels)
        ids = torch.from_numpy(batch.input_ids)
        text = ids.where(labels == bertdata.IGNORE_INDEX, labels)
        may_be_masked = ~torch.isin(text, torch.tensor([*special.special_ids, special.unk]))
        assert (ids[labels != bertdata.IGNORE_INDEX] == special.mask).all()
        total, right = torch.zeros(()), torch.zeros(())
        for row in range(len(ids)):
            output = model(input_ids=ids[None, row], labels=labels[None, row])  # the mean over the masked tokens
            total = total + output.loss * may_be_masked[row].sum()
            is_masked = labels[row] != bertdata.IGNORE_INDEX
            is_right = (output.logits[0].argmax(-1) == labels[row])[is_masked].float()
            right = right + is_right.mean() * may_be_masked[row].sum()
        loss = total / may_be_masked.sum()
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        expected.append((loss.item(), (right / may_be_masked.sum()).item()))
    assert np.allclose(ours, expected, rtol=0, atol=1e-5)


def test_a_run_is_killed_and_goes_on_to_the_same_bits(dataset, tmp_path):
    train_twice(dataset.path, tmp_path / "run", 2, **OPTIONS)


def test_two_ranks_have_the_losses_of_one(dataset, tmp_path):
    one = train(dataset.path, tmp_path / "one", **OPTIONS, micro_batch_size=2)
    two = train(dataset.path, tmp_path / "two", ranks=2, **OPTIONS, micro_batch_size=2)
    assert_near(one, two, "accuracy", rel=1e-4)


def test_a_mix_has_the_loss_of_each_source(dataset, vocab, tmp_path):
    second = built(tmp_path, make_text(60), tokenizer=vocab, validation=0)
    log = train([(dataset.path, 0.5), (second.path, 0.5)], tmp_path / "run", **OPTIONS)
    for entry in (entry for entry in log if "sources" in entry):
        losses = [part["loss"] for part in entry["sources"].values()]
        assert min(losses) <= entry["loss"] <= max(losses)


def test_other_masks_are_refused(dataset, tmp_path):
    refused_run(dataset.path, tmp_path / "run", **OPTIONS | {"masking": "exact"}, kind="needs-option", option="masking")


# --------------------------------------------------------------------------------------------------------- filling in


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A run of a few steps. Tests must not change it."""
    out = tmp_path_factory.mktemp("diffusion") / "run"
    train(dataset.path, out, **OPTIONS)
    return out


def plain_rounds(model, ids, hidden, number):
    """One row: at each round the surest of the hidden places are filled in, by transformers alone."""
    ids, hidden, most = list(ids), sorted(hidden), len(hidden)
    found = [list(ids)]
    for done in range(1, number + 1):
        with torch.no_grad():
            shares = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        hidden.sort(key=lambda place: (-float(shares[place].max()), place))
        fill = len(hidden) - most * (number - done) // number
        for place in hidden[:fill]:
            ids[place] = int(shares[place].argmax())
        hidden = hidden[fill:]
        found.append(list(ids))
    return found


def test_rounds_fill_in_the_surest_places_first(dataset, run):
    encoder = Encoder(pretrained.load(last_checkpoint(run))).eval()
    batch = next(bertdata.Loader(dataset, length=32, masking=denoise.HALF, global_batch_size=3))
    piece = {name: torch.from_numpy(array) for name, array in batch.arrays().items()}
    vocab_size = dataset.special_tokens.vocab_size
    for number in (1, 4):
        states = list(denoise.rounds(encoder, piece, vocab_size=vocab_size, number=number))
        assert not states[-1][1].any()
        for row in range(3):
            hidden = np.flatnonzero(batch.labels[row] != bertdata.IGNORE_INDEX).tolist()
            expected = plain_rounds(encoder.model, batch.input_ids[row].tolist(), hidden, number)
            assert [ids[row].tolist() for ids, _ in states] == expected


def test_evaluate_prints_each_round(dataset, run):
    arguments = ["--checkpoint", run, "--data", dataset.path, "--length", 32, "--max-samples", 2, "--denoise", 2]
    shown = succeeds(evaluate.main, *arguments).stdout
    assert shown.count("sample ") == 2
    for done in range(denoise.ROUNDS + 1):
        assert shown.count(f"  round {done}: ") == 2
    first, *_, last = (line for line in shown.splitlines() if "  round " in line.split(":")[0] + ":")
    assert "[MASK]" in first
    assert "[MASK]" not in last
    samples = bertdata.Loader(dataset, length=32, split="validation").num_samples
    shown = succeeds(evaluate.main, *arguments[:-1], samples + 9).stdout
    assert f"sample {samples} of {samples}:" in shown
    assert shown.count("  round 0: ") == samples
