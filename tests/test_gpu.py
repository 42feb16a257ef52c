"""What only a GPU shows: its kernels, half precision, torch.compile, and a loop that never makes it wait for the host.

    make gpu                                            (measurements, then these)
    python -m pytest -m gpu tests/test_gpu.py

GPU_TESTS_ON=cpu runs the same code on a CPU, to find mistakes of its own. What a GPU computes is compared with float32
on the CPU; the tolerances are those of the precision.
"""

import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from support.commands import json_of, succeeds, tuning
from support.data import built, make_text, write_labelled
from support.families import LISTED, assert_isolated, four_rows, hidden_one_by_one, model_of, packed_rows
from support.runs import ALONE, CPU, at_step, config_of, entries, flags, launch, learner, learner_of, steps_of, train
from transformers import CONFIG_MAPPING, AutoModelForMaskedLM

from bertrain import evaluate as evaluation
from bertrain.data import samples_of
from bertrain.models.encoder import cu_seqlens_of, has_kernel
from bertrain.models.families import FAMILIES
from bertrain.trainer import autocast_of, build_model

DEVICE = torch.device(os.environ.get("GPU_TESTS_ON", "cuda"))
ON_GPU = DEVICE.type == "cuda"
RANKS = 2 if not ON_GPU or torch.cuda.device_count() > 1 else 1
KNOWN = [name for name in LISTED if name in CONFIG_MAPPING]  # an older transformers has fewer families
PRECISIONS = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 1e-1), "fp16": (5e-4, 1e-2)}
"""How far a loss and a gradient may be from those of float32 on a CPU, relative to their size."""
QUIET = {"log_every": 1000, "save_every": 1000, "eval_every": 0}  # a log entry and a checkpoint at the end alone

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # drivers and kinds of GPUs have their own


@pytest.fixture(scope="module")
def dataset(roberta_dataset):
    return roberta_dataset


@pytest.fixture(scope="session", autouse=True)
def _gpu():
    if ON_GPU and not torch.cuda.is_available():
        pytest.exit("torch finds no GPU here; run these tests on a machine that has one", returncode=1)


@pytest.fixture(scope="module")
def big(dataset, configs, tmp_path_factory):
    """The directory of a run of the small bert."""
    out = tmp_path_factory.mktemp("gpu") / "big"
    train(dataset.path, out, model=configs["bert"], steps=4, precision="fp32", compile="off", **QUIET)
    return out


def step(config, dataset, device, precision, samples):
    """The losses of four rows by objective, and the whole gradient as float32 [N] on the CPU."""
    weights, _ = build_model(config, dataset)
    module = learner_of(config, weights, dataset, precision, device)
    _, piece = four_rows(dataset, 40, device=device, samples=samples)
    with autocast_of(device, precision)():
        losses = module(**module.prepare(piece))
    sum(loss.sum for loss in losses.values()).backward()
    gradient = torch.cat([p.grad.float().cpu().flatten() for p in module.parameters() if p.grad is not None])
    return {name: loss.sum.item() for name, loss in losses.items()}, gradient


# -------------------------------------------------------------------------------------------------------------- steps


CASES = {name: {"model": name, "isolate_documents": FAMILIES[name].isolation is not None} for name in KNOWN}
CASES |= {name: {"model": name} for name in ("bert-mini", "modernbert-small")}
CASES["padded modernbert"] = {"model": "modernbert", "isolate_documents": False}
CASES |= {f"windows of {name}": {"model": name} for name in ("modernbert", "ultrabert")}
CASES |= {f"distilled {name}": {"model": "modernbert", "distil": name} for name in ("logits", "relations", "hidden")}


@pytest.fixture
def calls(monkeypatch):
    """Has an item for each call of the kernel for sequences of unequal length."""
    made, kernel = [], torch.nn.attention.varlen.varlen_attn
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", lambda *a, **k: made.append(1) or kernel(*a, **k))
    return made


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, each)
        for name in CASES
        for each in PRECISIONS
        if each == "fp32" or name not in KNOWN or FAMILIES[name].half
    ],
)
def test_a_step_is_that_of_the_cpu(configs, dataset, big, calls, name, precision):
    """Of packed rows where a family takes them, else of padded ones. Windows of local layers, in half precision, are
    computed by the kernel for sequences of unequal length."""
    options = CASES[name] | {"model": configs.get(CASES[name]["model"], name), "length": 32, "seed": 1}
    if "distil" in options:
        options |= {"teacher": str(big), "distil_layers": "uniform"}
    config = config_of(**options)
    samples = "documents" if options.get("isolate_documents") is False else samples_of(config)
    plain, exact = step(config, dataset, CPU, "fp32", samples)
    assert calls == []
    losses, gradient = step(config, dataset, DEVICE, precision, samples)
    assert losses == pytest.approx(plain, rel=PRECISIONS[precision][0])
    assert (gradient - exact).norm() < PRECISIONS[precision][1] * exact.norm()
    if name.startswith("windows"):
        assert bool(calls) == (precision != "fp32" and has_kernel(DEVICE))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in KNOWN if FAMILIES[name].isolation == "kernel"])
def test_packed_documents_do_not_see_each_other(configs, dataset, calls, name, precision):
    """In the kernel for sequences of unequal length: near to what they are apart, and to the bit without the others."""
    weights, (ids, positions) = model_of(configs[name], dataset).eval(), packed_rows()
    apart = hidden_one_by_one(weights, ids)
    module = learner(weights, isolate=True).to(DEVICE)
    bounds = {"cu_seqlens": cu_seqlens_of(positions).to(DEVICE)} if has_kernel(DEVICE) else {}

    @torch.no_grad()
    def encode(ids):
        with autocast_of(DEVICE, precision)():
            return module.encode(ids.to(DEVICE), position_ids=positions.to(DEVICE), **bounds).float().cpu()

    together = encode(ids)
    assert len(calls) == (2 if bounds else 0)
    assert (together - apart).norm() < 2e-2 * apart.norm()
    assert_isolated(encode, ids)


# ---------------------------------------------------------------------------------------------------------------- runs


STEPS = 12
WAYS = {
    "compiled": {"model": "bert-tiny", "compile": "on"},
    "compiled, fp16": {"model": "modernbert-tiny", "compile": "on", "precision": "fp16"},
    "compiled, packed": {"compile": "on", "isolate_documents": True, "global_batch_size": 32},
    "compiled, recomputed": {"model": "bert-tiny", "compile": "on", "gradient_checkpointing": True},
    "compiled, with a teacher": {"model": "bert-tiny", "compile": "on", "distil": "relations"},
    "compiled, mixed": {"model": "bert-tiny", "compile": "on"},
    "packed": {"compile": "off", "isolate_documents": True},
    "in pieces": {"model": "bert-tiny", "compile": "off", "micro_batch_size": 2},
    "muon": {"model": "bert-tiny", "compile": "off", "optimizer": "muon"},
    "stableadamw": {"model": "bert-tiny", "compile": "off", "optimizer": "stableadamw"},
    "lamb": {"model": "bert-tiny", "compile": "off", "optimizer": "lamb"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_host_never_waits_for_the_gpu_and_nothing_is_compiled_again(dataset, big, tmp_path, monkeypatch, way):
    """From the third step on every call that waits is an error, also where a step is logged."""
    options = {"steps": STEPS, **QUIET, "log_every": 5, **WAYS[way]}
    options |= {"teacher": str(big)} if "distil" in options else {}
    other = built(tmp_path, make_text(40, seed=5), tokenizer=str(dataset.path), validation=0)
    data = [[str(dataset.path), 0.7], [str(other.path), 0.3]] if "mixed" in way else dataset.path
    counters, graphs = torch._dynamo.utils.counters, []
    torch.compiler.reset()
    counters.clear()

    def waiting(mode):
        graphs.append(counters["stats"]["unique_graphs"])
        if ON_GPU:
            torch.cuda.set_sync_debug_mode(mode)

    with monkeypatch.context() as patch:
        at_step(patch, "next_batch", 2, lambda: waiting("error"))
        at_step(patch, "next_batch", STEPS - 1, lambda: waiting("default"))
        try:
            *_, entry = steps_of(train(data, tmp_path / "run", **options))
        finally:
            waiting("default")
    assert (len(graphs), len({*graphs}), graphs[0] > 0) == (3, 1, options["compile"] == "on")
    assert not counters["graph_break"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options |= {"precision": "fp32", "compile": "off", "gradient_checkpointing": False}
    *_, plain = steps_of(train(data, tmp_path / "plain", **options))
    names = [name for name in entry if name.endswith("loss")]
    assert [entry[name] for name in names] == pytest.approx([plain[name] for name in names], rel=2e-2)


@pytest.mark.parametrize("more", [{"compile": "on"}, {"compile": "off", "optimizer": "muon"}])
def test_a_resumed_run_goes_on_as_it_would_have(dataset, tmp_path, more):
    """Not to the bit, as gradients are added with atomic operations; the first loss is that of the same weights."""
    options = {"model": "bert-tiny", "steps": 6, "save_every": 3, "eval_every": 3, **more}
    straight = [entry["loss"] for entry in steps_of(train(dataset.path, tmp_path / "run", **options))]
    shutil.rmtree(tmp_path / "run" / "step-00000006")
    again = [entry["loss"] for entry in steps_of(train(dataset.path, tmp_path / "run", **options))]
    assert again[:4] == pytest.approx(straight[:4], rel=1e-5)
    assert again[4:] == pytest.approx(straight[4:], rel=2e-3)


ON_RANKS = [{"compile": "off"}, {"compile": "on"}, {"compile": "on", "gradient_checkpointing": True}]


@pytest.mark.parametrize("options", ON_RANKS[: 3 if RANKS > 1 else 1])
def test_all_gpus_learn_what_one_does(dataset, tmp_path, options):
    """Two ranks where there are two GPUs, else one under torchrun."""
    options = {"model": "bert-tiny", "steps": 3, "precision": "fp32", **QUIET, "log_every": 1, **options}
    with launch(RANKS, "bertrain.pretrain", flags(dataset.path, tmp_path / "ranks", **options)) as process:
        try:
            _, err = process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, err
    train(dataset.path, tmp_path / "alone", **options)
    logs = (steps_of(entries(tmp_path / out)) for out in ("ranks", "alone"))
    together, alone = ([(entry["loss"], entry["grad_norm"]) for entry in log] for log in logs)
    assert len(together) == 3
    np.testing.assert_allclose(together, alone, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ other commands


@pytest.mark.parametrize("options", [{}, {"isolate_documents": True}])
def test_evaluation_is_that_of_the_cpu(dataset, tmp_path, options):
    train(dataset.path, tmp_path / "run", steps=2, compile="off", eval_precision="fp32", **options)
    command = ["--checkpoint", tmp_path / "run", "--data", dataset.path, "--show", 1]
    result = json_of("bertrain", "evaluate", *command)
    weights = learner(AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "step-00000002"), isolate=bool(options))
    plain = evaluation.evaluate(weights, dataset, ALONE, split="validation", length=32)
    assert result["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert (result["targets"], result["samples"]) == (plain["targets"], plain["samples"])


def test_a_task_is_learned(big, tmp_path):
    data = write_labelled(tmp_path / "train.tsv", repeat=4)
    options = ["--epochs", 12, "--lr", 3e-3, "--batch-size", 4]
    result = json_of("bertrain", "finetune", *tuning(big, data, tmp_path / "out", *options))
    assert result["dev_accuracy"]["min"] == 1.0


def test_a_cache_of_answers_is_made_and_learned_from(configs, dataset, big, tmp_path):
    arguments = ["--model", big, "--data", dataset.path, "--out", tmp_path / "cache", "--length", 32]
    succeeds("bertrain", "teacher", *arguments, "--max-samples", 12, "--top-k", 20)
    log = steps_of(train(dataset.path, tmp_path / "run", steps=2, teacher_cache=str(tmp_path / "cache")))
    assert [entry["step"] for entry in log] == [1, 2]
    assert all(0 < entry["distil_loss"] < 5 for entry in log)
