"""What a CPU shows of the path on GPUs, before a GPU runs it.

    make gpu-dry

Models have their published sizes where tensors are fake (dry.py): nothing is computed, but what needs a number of a
tensor, or two devices, is an error. Where numbers count, models are small, and torch's kernel for sequences of unequal
length runs on the CPU. `make gpu-dry` runs test_step.py too.
"""

import functools
import json
import os

import numpy as np
import pytest
import torch
from support.data import write_dataset
from support.dry import GPU, LENGTH_OF, ROWS, Squares, apart, fakes, give_cpus_the_kernel, micro_batch, training_of
from support.families import model_of
from support.runs import ALONE, CPU, QUIET, assert_near, at_step, learner, train
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForMaskedLM

import bertdata
from bertrain import data as data_module
from bertrain import trainer as trainer_module
from bertrain.evaluate import evaluate
from bertrain.models import encoder as encoder_module
from bertrain.models.encoder import WHOLE_ROWS, cu_seqlens_of
from bertrain.models.families import FAMILIES
from bertrain.trainer import LossSums, autocast_of


def marks_of(name):
    """One model is a fast test; a larger one of a family that is tried already is for `make gpu-dry`."""
    if name.endswith("-large"):
        return pytest.mark.dry
    return () if name == "modernbert-base" else pytest.mark.slow


SAVED = {"bert-base": 32_000, "bert-large": 42_500, "modernbert-base": 28_500}
"""At most so many bytes a token and layer are kept for the backward pass, without what a compiler saves."""
CASES = [
    pytest.param(name, packed, id=f"{name}-{'packed' if packed else 'windows'}", marks=marks_of(name))
    for name in LENGTH_OF
    for packed in (False, True)
    if not packed or FAMILIES[name.rpartition("-")[0] if name in SAVED else name].isolation
]


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """Documents with lengths as those of the web, 400 tokens in the middle, for rows without padding."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(400), 1.0, 8000), 8, None).astype(np.uint64)
    tokens = draw.integers(5, 300, int(lengths.sum()))
    out = tmp_path_factory.mktemp("tailed") / "shards"
    return bertdata.open(write_dataset(out, [(tokens, np.cumsum(lengths), None)]))


# ------------------------------------------------------------------------------------- a step of a model of real size


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_a_forward_pass_on_a_gpu(web, configs, monkeypatch, name, packed):
    """Every tensor is on the GPU, none is read, and none is a square of a row: a mask of all pairs of tokens."""
    masks = []

    def attend(query, key, value, attn_mask=None, **options):
        """Stands for the kernels of GPUs, of which torch has none here."""
        masks.append(attn_mask)
        return torch.empty_like(query)

    with fakes(monkeypatch, GPU):
        training = training_of(name, configs, web, GPU, isolate_documents=packed)
        module = training.learner.requires_grad_(False)  # autograd has no GPU here
        piece = micro_batch(name, web, GPU, packed=packed)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        sums = LossSums(["mlm"], GPU)
        sums.begin_step(torch.empty(1, dtype=torch.float64, device=GPU))
        with Squares(LENGTH_OF[name]) as squares, training.autocast():
            losses = module(**module.prepare(piece))
        total = module.total(losses, torch.empty(1, device=GPU))
        sums.add(losses)
        assert {total.device, losses["mlm"].num_correct.device} == {GPU}
        assert (total.dtype, losses["mlm"].num_correct.dtype) == (torch.float32, torch.int64)
    assert set(masks) <= {None}
    assert bool(squares.found) == (name == "deberta-v2")  # which computes attention by itself


OTHER_STEPS = {name: {"optimizer": name} for name in ("muon", "stableadamw", "lamb")}
OTHER_STEPS |= {"recomputed": {"gradient_checkpointing": True}}
STEPS = [pytest.param(*case.values, {}, id=case.id, marks=case.marks) for case in CASES]
STEPS += [
    pytest.param("modernbert-base", False, options, id=name, marks=pytest.mark.slow)
    for name, options in OTHER_STEPS.items()
]


@pytest.mark.parametrize(("name", "packed", "options"), STEPS)
def test_a_step_needs_no_number(web, configs, monkeypatch, name, packed, options):
    """Forward and backward pass, clipping and update, in half precision; weights have gradients in float32.

    What is kept for the backward pass has a limit, in which weights are not counted.
    """
    kept = {}

    def keep(tensor):
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with fakes(monkeypatch, CPU):
        training = training_of(name, configs, web, CPU, isolate_documents=packed, **options)
        weights = {id(parameter.untyped_storage()) for parameter in training.learner.parameters()}
        piece = micro_batch(name, web, CPU, packed=packed)
        sums = LossSums(["mlm"], CPU)
        sums.begin_step(torch.empty(1, dtype=torch.float64))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = training.add_gradients(training.learner, piece, torch.empty(1), is_last=True)
        assert {p.grad.dtype for p in training.learner.parameters() if p.grad is not None} == {torch.float32}
        sums.add(losses)
        training.update(1e-4)
        sums.end_step(training.skipped, ALONE)
    if name in SAVED and not packed and not options:
        total = sum(storage.nbytes() for number, storage in kept.items() if number not in weights)
        places = ROWS * LENGTH_OF[name] * training.learner.model.config.num_hidden_layers
        assert 0.9 * SAVED[name] < total / places < SAVED[name]


# ------------------------------------------------------------------------------------------- masks and their graphs


def gradients_of(module, piece):
    """The loss of a micro-batch, and the whole gradient."""
    loss = module(**piece)["mlm"].sum
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def both_ways(config, length, *, packed):
    """A step of two rows with masks of all pairs of tokens, and compiled with the kernel of GPUs, in float64.

    Returns the losses, by how much the gradients differ, relative to their size, the number of graphs, and how often
    the kernel was called.
    """
    give_cpus_the_kernel()
    torch.manual_seed(0)
    weights = AutoModelForMaskedLM.from_config(config, dtype=torch.float64)
    lengths = [1, 2, length // 3, length - length // 3 - 3], [length - 9, 9]  # of documents in each row
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    piece = {
        "input_ids": torch.randint(5, 90, (2, length)),
        "masked_positions": torch.arange(length).expand(2, -1),
        "targets": torch.randint(5, 90, (2, length)),
    } | ({"position_ids": positions} if packed else {})
    plain = gradients_of(learner(weights, isolate=packed), piece)
    weights.zero_grad()
    module = learner(weights, isolate=packed)
    if packed:
        piece["cu_seqlens"] = cu_seqlens_of(positions)
    else:
        weights.set_attn_implementation(WHOLE_ROWS)
    module.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    compiled = gradients_of(module, piece)
    distance = (compiled[1] - plain[1]).norm() / plain[1].norm()
    return plain[0], compiled[0], distance.item(), counters["stats"]["unique_graphs"], counters["dry"]["calls"]


PACKED = [(name, True) for name in ("bert", "modernbert", "esm")]
VARLEN = [
    pytest.param(*kind, length, marks=pytest.mark.dry if length > 64 else pytest.mark.slow)
    for kind in (*PACKED, ("modernbert", False), ("ultrabert", False))
    for length in (64, 192, 1024)
]


@pytest.mark.parametrize(("kind", "packed", "length"), VARLEN)
def test_the_kernel_of_gpus_gives_what_masks_give(configs, kind, packed, length):
    """Loss and gradients. Both are computed in float64, but for the logits, so a window that is wider would be seen."""
    sizes = {"vocab_size": 99, "pad_token_id": 0, "mask_token_id": 7, "max_position_embeddings": length}
    config = AutoConfig.from_pretrained(configs[kind], **sizes)
    expected, loss, distance, graphs, calls = apart(both_ways, config, length, packed=packed)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert distance < 1e-6
    assert graphs == 1
    assert calls == (2 if packed else config.layer_types.count("sliding_attention")) > 0


# ------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def on_cpus(monkeypatch):
    """CPUs are taken for GPUs: rows go to their kernel, and models are compiled, without the compiler of kernels."""
    give_cpus_the_kernel()
    counters.clear()  # of the tests before
    for module in (data_module, encoder_module):
        monkeypatch.setattr(module, "has_kernel", lambda device: True)
    compiled = functools.partialmethod(torch.nn.Module.compile, backend=counting)
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)


def counting(graph, inputs):
    counters["dry"]["parts"] += 1
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Split(DistributedDataParallel):
    """With buckets so small that a small model has several, and its graph is split between them."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, bucket_cap_mb=0.02, **options)


OF_DOCUMENTS = {"isolate_documents": True}
RUNS = [
    pytest.param({}, 1, id="windows", marks=pytest.mark.dry),
    pytest.param(OF_DOCUMENTS, 2, id="packed", marks=pytest.mark.slow),
    pytest.param(OF_DOCUMENTS | {"gradient_checkpointing": True}, 2, id="packed, recomputed", marks=pytest.mark.dry),
]


@pytest.mark.parametrize(("more", "shapes"), RUNS)
def test_compiled_ranks_learn_what_one_does(dataset, configs, tmp_path, monkeypatch, on_cpus, more, shapes):
    """Two ranks that add up gradients of several passes, with a graph that is split where buckets end.

    There is one graph for each shape of bounds.
    """
    monkeypatch.setattr(trainer_module, "DistributedDataParallel", Split)
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 4_000)

    def keep():
        found = counters["stats"]["unique_graphs"], counters["dry"]["parts"], len(counters["graph_break"])
        (tmp_path / f"counters-{os.environ.get('RANK')}.json").write_text(json.dumps(found))

    at_step(monkeypatch, "evaluate", 4, keep)
    options = QUIET | {"model": configs["modernbert"], "precision": "bf16", "steps": 4, "global_batch_size": 8}
    one = train(dataset.path, tmp_path / "one", **options, **more)
    two = train(dataset.path, tmp_path / "two", ranks=2, **options, **more, micro_batch_size=2, compile="on")
    assert_near(one, two, rel=2e-3)
    for rank in range(2):
        graphs, parts, breaks = json.loads((tmp_path / f"counters-{rank}.json").read_text())
        assert 1 <= graphs <= shapes
        assert (parts > 2 * graphs, breaks) == (True, 0)


def test_an_evaluation_in_bf16_goes_to_the_kernel_of_gpus(dataset, configs, on_cpus):
    """In each of its layers, of packed rows; in fp32 none does. The losses are about the same."""
    module, losses, calls = learner(model_of(configs["modernbert"], dataset), isolate=True), [], []
    for precision in ("fp32", "bf16"):
        counters.clear()
        options = {"split": "validation", "length": 32, "autocast": autocast_of(CPU, precision)}
        losses.append(evaluate(module, dataset, ALONE, **options)["loss"])
        calls.append(counters["dry"]["calls"])
    assert calls[0] == 0 < calls[1]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
