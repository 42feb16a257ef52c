"""Replaced token detection and masked diffusion: losses of independent loops, draws, checkpoints, an example."""

import json
import math
import runpy
import sys

import numpy as np
import pytest
import torch
from reference import keys
from support.commands import invoke
from support.data import ROOT
from support.families import LISTED, assert_isolated, fast, packed_rows, pieces_of
from support.runs import QUIET, TINY, flags, last_checkpoint, refused_run, run_of, train
from transformers import AutoModel, AutoTokenizer, ElectraForPreTraining

import bertdata
from bertrain.config import Config
from bertrain.data import build_loader

ELECTRA = LISTED["electra"] | {"model_type": "electra", "embedding_size": 32, "hidden_size": 48, "num_hidden_layers": 3}
DEBERTA = LISTED["deberta-v2"] | {"model_type": "deberta-v2"}


@pytest.fixture
def options(tmp_path):
    """A function: the configuration of a discriminator and more → options of a run."""

    def make(settings=ELECTRA, **more):
        path = tmp_path / f"{settings['model_type']}.json"
        path.write_text(json.dumps(settings))
        return QUIET | {"discriminator": str(path), "steps": 4, "save_every": 2} | more

    return make


def config_of(dataset, out, **given):
    return Config.make(**{"data": str(dataset.path), "out": str(out), "length": 32, "global_batch_size": 6} | given)


def plain_losses(config, shards, num_steps):
    """The two losses of each step, by a loop of torch and transformers with the weights that a run begins with."""
    learner = run_of(config).trainer.learner
    generator, state = learner.model.train(), learner.state_dict()
    electra = ElectraForPreTraining(learner.objectives["discriminator"].encoder.model.config).train()
    own, name, sharing = {}, "electra.embeddings.word_embeddings.weight", config.flat()["share_embeddings"]
    for ours, theirs in (("encoder.model.", "electra."), ("head.", "discriminator_predictions.")):
        prefix = f"objectives.discriminator.{ours}"
        some = {n.removeprefix(prefix): each for n, each in state.items() if n.startswith(prefix)}
        own |= {theirs + n: each.clone().requires_grad_() for n, each in some.items() if each.is_floating_point()}
    shared = generator.get_input_embeddings().weight
    if sharing == "tied":
        del own[name]
    adamw = torch.optim.AdamW([*generator.parameters(), *own.values()], 1e-3, (0.9, 0.98), 1e-6, weight_decay=0.0)
    loader, found = build_loader(config, shards), []
    for step in range(num_steps):
        batch = next(loader)
        (piece,) = pieces_of(batch)
        inputs = {n: piece[n] for n in ("input_ids", "attention_mask") if n in piece}
        labels = torch.from_numpy(batch.labels)
        output = generator(**inputs, labels=labels)
        text = piece["input_ids"].where(labels == bertdata.IGNORE_INDEX, labels)
        corrupted, key = text.clone(), bertdata.key(config.seed, "replace", step)
        for row, place in (labels != bertdata.IGNORE_INDEX).nonzero().tolist():
            number = int(batch.sample_ids[row]) * 2**32 + place
            draw = (keys.draw(key, number % 2**64) >> 40) / 2**24
            ends = output.logits[row, place, : shards.special_tokens.vocab_size].detach().double().softmax(-1).cumsum(0)
            corrupted[row, place] = int((ends <= draw).sum())
        weights = {name: shared} | own
        if sharing == "difference":
            weights[name] = own[name] + shared.detach()
        given = {"input_ids": corrupted, "labels": (corrupted != text).long()}
        given |= {"attention_mask": inputs.get("attention_mask", torch.ones_like(text))}
        discriminated = torch.func.functional_call(electra, weights, (), given)
        adamw.zero_grad()
        (output.loss + config.flat()["discriminator_weight"] * discriminated.loss).backward()
        torch.nn.utils.clip_grad_norm_([*generator.parameters(), *own.values()], config.clip_norm)
        adamw.step()
        found.append((output.loss.item(), discriminated.loss.item()))
    return found


@pytest.mark.parametrize("sharing", fast(["difference", "tied", "none"], among=["difference"]))
def test_ten_steps_have_the_losses_of_transformers_and_the_discriminator_is_an_electra(
    dataset, tmp_path, options, sharing
):
    width = {"embedding_size": 16} if sharing == "none" else {}  # which need not be that of the generator
    plain = {"schedule": "constant", "warmup": 0.0, "weight_decay": 0.0, "clip_norm": 0.5, "lr": 1e-3, "epsilon": 1e-6}
    given = options(ELECTRA | width, share_embeddings=sharing, save_every=100, steps=10, **plain)
    log = train(dataset.path, tmp_path / "run", **given)
    config = config_of(dataset, tmp_path / "again", **given)
    ours = [(entry["loss"], entry["discriminator_loss"]) for entry in log if "loss" in entry]
    assert np.allclose(ours, plain_losses(config, dataset, 10), rtol=0, atol=1e-5)
    directory = last_checkpoint(tmp_path / "run") / "discriminator"
    model, info = ElectraForPreTraining.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert len(AutoTokenizer.from_pretrained(directory)) == dataset.special_tokens.vocab_size
    learner = run_of(config_of(dataset, tmp_path / "run", **given)).trainer.learner.eval()
    objective, ids = learner.objectives["discriminator"], torch.arange(5, 25)[None]
    logits = objective.head(objective.encoder.encode(input_ids=ids))
    assert torch.allclose(model.eval()(input_ids=ids).logits, logits, atol=1e-6)


def test_a_discriminator_of_another_family_is_an_ordinary_encoder(dataset, tmp_path, options):
    train(dataset.path, tmp_path / "run", **options(DEBERTA))
    directory = last_checkpoint(tmp_path / "run") / "discriminator"
    model, info = AutoModel.from_pretrained(directory, output_loading_info=True)
    assert type(model).__name__ == "DebertaV2Model"
    assert not info["missing_keys"] | info["unexpected_keys"]
    again = options(discriminator=TINY, steps=6)
    refused_run(dataset.path, tmp_path / "run", **again, kind="other-settings", option="discriminator")
    dropping = options(ELECTRA | {"attention_probs_dropout_prob": 0.1}, attention="flash")
    arguments = flags(dataset.path, tmp_path / "flash", **dropping)
    assert invoke("bertrain", "pretrain", *arguments).exit_code == 2  # flash drops nothing


def test_options_of_the_generator_hold_for_the_discriminator(dataset, tmp_path, options):
    """Documents of packed rows are apart, the rotary base is another, and activations are computed again."""
    given = options(LISTED["modernbert"] | {"model_type": "modernbert"}, isolate_documents=True)
    given |= {"model": given["discriminator"], "gradient_checkpointing": True, "rope_base": 777.0}
    run = run_of(config_of(dataset, tmp_path / "run", **given))
    for method in run.trainer.methods:
        method.begin_step(0, run.stream.phase, run.trainer.learner)
    encoder, (ids, positions) = run.trainer.learner.objectives["discriminator"].encoder.eval(), packed_rows()
    assert encoder.model.config.rope_parameters["full_attention"]["rope_theta"] == 777.0
    assert any(getattr(module, "gradient_checkpointing", False) for module in encoder.model.modules())
    with torch.no_grad():
        assert_isolated(lambda ids: encoder.encode(input_ids=ids, position_ids=positions), ids)


DIFFUSION = QUIET | {"objective": "diffusion", "masking": "uniform", "steps": 4}


def test_a_step_of_masked_diffusion_has_the_loss_and_the_gradient_of_transformers(dataset, tmp_path):
    entry = train(dataset.path, tmp_path / "run", **DIFFUSION)[0]
    config = config_of(dataset, tmp_path / "x", **DIFFUSION)
    model, special = run_of(config).trainer.learner.model.train(), dataset.special_tokens
    batch = next(build_loader(config, dataset))
    ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
    is_masked = labels != bertdata.IGNORE_INDEX
    assert (ids[is_masked] == special.mask).all()
    may_be_masked = ~torch.isin(ids.where(~is_masked, labels), torch.tensor([*special.special_ids, special.unk]))
    total = right = torch.zeros(())
    for row, places in enumerate(may_be_masked.sum(1)):
        output = model(input_ids=ids[None, row], labels=labels[None, row])  # the mean over the masked tokens
        total = total + output.loss * places
        right = right + (output.logits[0].argmax(-1) == labels[row])[is_masked[row]].float().mean() * places
    (total / may_be_masked.sum()).backward()
    expected = [each.item() / may_be_masked.sum().item() for each in (total, right)]
    expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
    assert [entry[name] for name in ("loss", "accuracy", "grad_norm")] == pytest.approx(expected, rel=1e-4)


def test_the_example_of_masked_diffusion_fills_in_half_of_a_row(dataset, tmp_path, monkeypatch, capsys):
    train(dataset.path, tmp_path / "run", **DIFFUSION | {"length": 64})
    monkeypatch.setattr(sys, "argv", ["denoise", str(last_checkpoint(tmp_path / "run")), str(dataset.path)])
    runpy.run_path(str(ROOT / "examples" / "denoise.py"), run_name="__main__")
    hidden = [line.count("[MASK]") for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert hidden == sorted(hidden, reverse=True)
    assert (len(hidden), hidden[0] > 9, hidden[-1]) == (5, True, 0)
