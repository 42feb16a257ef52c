"""RUNS: what a run trains × stopped and resumed, in micro-batches, on two ranks, evaluated, and read by transformers.

A row: options of a run of four steps. A model is a preset or a name of support/families.py, each of which is a row;
`init` and `teacher` stand for a trained BERT, `teacher_cache` for its answers, and `data` for a mix of two datasets.
With `ranks`, it has so many processes.
"""

import json

import pytest
import torch
from support.commands import json_of, succeeds
from support.disk import write
from support.families import EVERY, SIZES, fast, four_rows, pieces_of
from support.runs import QUIET, TINY, assert_near, changing, entries, last_checkpoint, learner, train, train_twice

from bertrain.models import families, load

GROWN = {"phase": changing(0.5, layers=[1, None])}
LORA = {"init": True, "lora": "r=2,alpha=6", "lr": 2e-2}
LOSSES = ("nsp_loss", "nsp_accuracy", "loss_before", "loss_after", "layers", "distil_loss")
LOSSES += ("discriminator_loss", "discriminator_accuracy")
RUNS = {
    "windows": {},
    "one short row a step": {"global_batch_size": 1, "length": 7},  # so that the second of two ranks has none
    "pairs": {"objective": "mlm+nsp"},
    "pairs alone": {"objective": "nsp", "model": "bert"},  # which needs no logits
    "packed": {"model": "modernbert", "isolate_documents": True, "masking": "bernoulli"},
    "blocks of spans": {"masking": "span", "shuffle": "blocks"},
    "mix": {"data": True},
    "dropout": {"model": "dropout"},
    "recomputed": {"model": "modernbert", "gradient_checkpointing": True},
    "electra": {"model": "electra"},
    "untied": {"model": "bert untied"},  # whose head has a bias that nothing uses
    "longformer": {"model": "longformer"},  # parts of whose encoder get no gradient
    "muon": {"optimizer": "muon", "muon_rate": 4.0, "model": "modernbert-tiny"},
    "stableadamw": {"optimizer": "stableadamw"},
    "lamb": {"optimizer": "lamb", "lr_scale": ["embeddings=0", "Norm=2"]},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "phases": {"phase": changing(0.5, length=[32, 48], global_batch_size=[4, 6], mlm_probability=[0.3, 0.15])},
    "rotary bases": {"model": "modernbert", "phase": changing(0.5, rope_base=[1e4, 1.6e5], length=[32, 48])},
    "growth": GROWN,
    "growth, fresh": GROWN | {"grow_by": "fresh"},
    "growth, muon": GROWN | {"optimizer": "muon", "model": "modernbert-tiny"},
    "growth, stableadamw": GROWN | {"optimizer": "stableadamw", "model": "modernbert-tiny"},
    "growth, lamb": GROWN | {"optimizer": "lamb", "model": "modernbert-tiny"},
    "lora": LORA,
    "lora, muon": LORA | {"optimizer": "muon", "lr_scale": ["lora_B=4", "layer.0=0"]},
    "lora, targets": LORA | {"lora": "r=2,alpha=6,target=query|dense"},
    "elastic": {"elastic": "layers=1:2,heads=1:2", "model": "bert"},
    "replaced": {"discriminator": TINY},
    "replaced, tied": {"discriminator": TINY, "share_embeddings": "tied"},
    "replaced, apart": {"discriminator": TINY, "share_embeddings": "none"},
    "diffusion": {"objective": "diffusion", "masking": "uniform"},
    "cached": {"teacher_cache": True},
    "logits": {"teacher": True, "distil": "logits", "model": "modernbert-tiny"},
    "relations": {"teacher": True, "distil": "relations"},
    "hidden": {"teacher": True, "distil": "hidden"},
}
OTHER_WAYS = [name for name in RUNS if name not in ("dropout", "bf16", "fp16")]
RUNS |= {name: {"model": name} for name in EVERY if name not in RUNS}
RUNS |= {f"{name}, ranks": RUNS[name] | {"ranks": 2} for name in ("mix", "growth, muon")}
FAST = ["pairs", "packed", "dropout", "growth, muon", "lora, muon", "hidden", "cached", "replaced, tied", "diffusion"]
FAST += ["deberta-v2"]


@pytest.fixture
def run_of(name, dataset, roberta_dataset, other, bert_run, configs, once, tmp_path):
    """The datasets of a row, and its options."""

    def answer(folder):
        ask = ["--model", bert_run, "--data", dataset.path, "--max-samples", 24, "--length", 32, "--top-k", 8]
        succeeds("bertrain", "teacher", *ask, "--out", folder / "cache")

    data = (roberta_dataset if name == "mpnet" else dataset).path  # MPNet knows no other padding id
    options = QUIET | {"steps": 4, "save_every": 2, "global_batch_size": 6} | RUNS[name]
    if options.pop("data", False):
        data = [[str(dataset.path), 0.7], [str(other.path), 0.3]]
    options |= {option: str(bert_run) for option in ("init", "teacher") if option in options}
    if "teacher_cache" in options:
        options["teacher_cache"] = str(once("answers", answer) / "cache")
    dropout = SIZES | {"model_type": "bert", "hidden_dropout_prob": 0.3}
    named = configs | {"dropout": str(write(tmp_path / "dropout.json", json.dumps(dropout)))}
    return data, options | {"model": named.get(options["model"], options["model"])}


@pytest.mark.parametrize("name", fast(RUNS, among=FAST))
def test_a_stopped_run_ends_in_the_same_bits_and_transformers_reads_its_checkpoint(run_of, dataset, tmp_path):
    data, options = run_of
    log = train_twice(data, tmp_path / "run", 2, **options)
    if not isinstance(data, list):
        stated = json_of("bertrain", "evaluate", "--checkpoint", tmp_path / "run", "--data", data)
        assert stated["loss"] == pytest.approx(log[-1]["validation_loss"], rel=1e-4)
    last, (batch, piece) = last_checkpoint(tmp_path / "run"), four_rows(dataset)
    ours = learner(load.load_model(last)).eval()
    with torch.no_grad():
        theirs = families.auto_class(ours.model).from_pretrained(last).eval()(input_ids=piece["input_ids"]).logits
        expected = theirs[torch.arange(4)[:, None], piece["masked_positions"]]
        torch.testing.assert_close(ours.logits(**piece), expected, rtol=1e-5, atol=1e-5)
        batch.targets[0] = -100  # unused slots, which `flat` leaves out
        [flat] = pieces_of(batch, flat=True)
        torch.testing.assert_close(ours.logits(**flat)[0], expected[1:].flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [{"micro_batch_size": 2}, pytest.param({"ranks": 2}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", fast(OTHER_WAYS, among=FAST))
def test_micro_batches_and_ranks_learn_what_one_batch_does(run_of, once, name, tmp_path, way):
    data, options = run_of
    alone = once(f"alone, {name}", lambda folder: train(data, folder / "run", **options)) / "run"
    assert_near(train(data, tmp_path / "run", **options, **way), entries(alone), *LOSSES, rel=5e-4)
