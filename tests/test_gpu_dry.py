"""What a CPU shows of the path on GPUs, before a GPU runs it.

    make gpu-dry

Models have their published sizes where tensors are fake (dry.py): nothing is computed, but what needs a number of a
tensor, or two devices, is an error. Where numbers count, models are small, and torch's kernel for sequences of unequal
length runs on the CPU. `make gpu-dry` runs the files test_step.py and test_finite.py too.
"""

import functools
import itertools
import json
import os
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch
from support.data import ROOT, write_dataset
from support.dry import (
    GPU,
    LENGTHS,
    ROWS,
    Squares,
    apart,
    config_of,
    fakes,
    give_cpus_the_kernel,
    micro_batch,
    training_of,
)
from support.runs import CPU, QUIET, assert_near, learner, train
from test_step import Waits
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForMaskedLM, masking_utils

import bertdata
from bertdata import Loader
from bertrain import data as data_module
from bertrain import evaluate as evaluation
from bertrain import pretrain
from bertrain import trainer as trainer_module
from bertrain.config import MICRO_BATCH_TOKENS
from bertrain.models import encoder as encoder_module
from bertrain.models.encoder import WHOLE_ROWS, Encoder, cu_seqlens_of
from bertrain.models.families import FAMILIES
from bertrain.ranks import World
from bertrain.report import Report
from bertrain.trainer import DistributedDataParallel, LossSums

sys.path.append(str(ROOT / "benchmarks"))

CASES = {
    f"{name}-{kind}": (name, packed)
    for name in LENGTHS
    for packed, kind in ((False, "windows"), (True, "packed"))
    if not packed or FAMILIES[config_of(name).model_type].isolation
}
"""Models, and whether their rows are packed, by name."""


def marks_of(name):
    """Two models are quick tests; a larger one of a family that is tried already is for `make gpu-dry`."""
    if name.endswith("-large"):
        return pytest.mark.dry
    return () if name in ("bert-base", "modernbert-base") else pytest.mark.slow


EVERY_CASE = pytest.mark.parametrize(
    ("name", "packed"), [pytest.param(*case, id=id, marks=marks_of(case[0])) for id, case in CASES.items()]
)
EVERY_MODEL = pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in LENGTHS])


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """Documents with lengths as those of the web, 400 tokens in the middle, for rows without padding."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(400), 1.0, 8000), 8, None).astype(np.uint64)
    tokens = draw.integers(5, 300, int(lengths.sum()))
    out = tmp_path_factory.mktemp("tailed") / "shards"
    return bertdata.open(write_dataset(out, [(tokens, np.cumsum(lengths), None)]))


# ------------------------------------------------------------------------------------- a step of a model of real size


@EVERY_CASE
def test_a_forward_pass_on_a_gpu(web, monkeypatch, name, packed):
    """Every tensor is on the GPU, none is read, and none is a square of a row: a mask of all pairs of tokens."""
    masks = []

    def attend(query, key, value, attn_mask=None, **options):
        """Stands for the kernels of GPUs, of which torch has none here."""
        masks.append(attn_mask)
        return torch.empty_like(query)

    with fakes(monkeypatch, GPU):
        training = training_of(name, web, GPU, isolate_documents=packed)
        module = training.learner.requires_grad_(False)  # autograd has no GPU here
        piece = micro_batch(name, web, GPU, packed=packed)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        sums = LossSums(["mlm"], GPU)
        sums.begin_step(torch.empty(1, dtype=torch.float64, device=GPU))
        with Squares(LENGTHS[name]) as squares, training.autocast():
            losses = module(**module.prepare(piece))
        total = module.total(losses, torch.empty(1, device=GPU))
        sums.add(losses)
        assert {total.device, losses["mlm"].num_correct.device} == {GPU}
        assert (total.dtype, losses["mlm"].num_correct.dtype) == (torch.float32, torch.int64)
    assert set(masks) <= {None}
    if name == "deberta-v3-base":  # which computes attention by itself
        assert squares.found
    else:
        assert squares.found == []


def step_of(name, data, monkeypatch, **options):
    """Takes a step of fake tensors on a CPU that is taken for a GPU. Returns the dtypes of the gradients."""
    with fakes(monkeypatch, CPU):
        training = training_of(name, data, CPU, **options)
        training._has_buckets = True
        piece = micro_batch(name, data, CPU, packed="isolate_documents" in options)
        sums = LossSums(["mlm"], CPU)
        sums.begin_step(torch.empty(1, dtype=torch.float64))
        losses = training.add_gradients(training.learner, piece, torch.empty(1), is_last=True)
        gradients = {p.grad.dtype for p in training.learner.parameters() if p.grad is not None}
        sums.add(losses)
        training.update(1e-4)
        sums.end_step(training.skipped, World(0, 1, CPU))
    return gradients


@EVERY_CASE
def test_a_step_needs_no_number(web, monkeypatch, name, packed):
    """Forward and backward pass, clipping and update, in half precision; weights have gradients in float32."""
    options = {"isolate_documents": True} if packed else {}
    assert step_of(name, web, monkeypatch, **options) == {torch.float32}


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "muon"},
        *(pytest.param({"optimizer": name}, marks=pytest.mark.slow) for name in ("stableadamw", "lamb")),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_kind_of_step_needs_a_number(web, monkeypatch, options):
    assert step_of("modernbert-base", web, monkeypatch, **options) == {torch.float32}


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
    positions = torch.cat([torch.arange(n) for n in packing(2 * length, length)]).view(2, length)
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


def packing(total, length):
    """Lengths of documents that fill rows of `length`: of one token, of nearly a row, and between."""
    draw, lengths = np.random.default_rng(length), []
    while total > sum(lengths):
        left = length - sum(lengths) % length
        lengths.append(min(left, int(draw.choice([1, 2, 9, length // 3, length - 3]))))
    return lengths


VARLEN = [
    pytest.param(kind, packed, length, marks=pytest.mark.dry if length > 64 else () if packed else pytest.mark.slow)
    for kind, packed in (("bert", True), ("modernbert", True), ("modernbert", False), ("ultrabert", False))
    for length in (64, 192, 1024)
]


@pytest.mark.parametrize(("kind", "packed", "length"), VARLEN)
def test_the_kernel_of_gpus_gives_what_masks_give(configs, kind, packed, length):
    """Loss and gradients. Both are computed in float64, but for the logits, so a window that is wider would be seen."""
    config = AutoConfig.from_pretrained(configs[kind], vocab_size=99, pad_token_id=0, max_position_embeddings=length)
    expected, loss, distance, graphs, calls = apart(both_ways, config, length, packed=packed)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert distance < 1e-6
    assert graphs == 1
    assert calls == (2 if packed else config.layer_types.count("sliding_attention")) > 0


@pytest.mark.parametrize("length", [512, 1024])
def test_documents_of_packed_rows_have_few_shapes(web, length):
    """Each shape of cu_seqlens is a graph. 1,000 micro-batches have at most two."""
    rows = MICRO_BATCH_TOKENS // length
    loader = Loader(web, length=length, global_batch_size=rows, samples="packed", masking=None)
    batches = itertools.islice(loader, 1000)
    shapes = {cu_seqlens_of(torch.from_numpy(batch.position_ids)).shape for batch in batches}
    assert len(shapes) <= 2


def graphs_of(name, web, packed):
    """Compiles the forward pass of a model of real size. Returns the graphs, and the operations that give a square."""
    squares = []

    def record(graph, inputs):
        for node in graph.graph.nodes:
            given = node.meta.get("example_value")
            if node.op.startswith("call_") and getattr(given, "shape", ())[-2:] == (LENGTHS[name],) * 2:
                squares.append(str(node.target))
        return graph.forward

    with pytest.MonkeyPatch.context() as patch, fakes(patch, CPU):
        patch.setattr(masking_utils, "is_torchdynamo_exporting", lambda: True)  # as torch 2.11 says
        training = training_of(name, web, CPU, isolate_documents=packed)
        training.learner.compile(fullgraph=True, dynamic=False, backend=record)
        for number in range(4):
            piece = micro_batch(name, web, CPU, packed=packed)
            if packed and number == 2:  # the other shape
                piece["cu_seqlens"] = piece["cu_seqlens"].new_empty(2 * len(piece["cu_seqlens"]) - 1)
            with training.autocast():
                training.learner(**training.learner.prepare(piece))
    return counters["stats"]["unique_graphs"], squares


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case == "modernbert-base-windows" else pytest.mark.dry)
        for case in CASES
    ],
)
def test_a_model_is_one_graph(web, case):
    """And one more for each other shape of cu_seqlens; none holds a mask of all pairs of tokens."""
    name, packed = CASES[case]
    graphs, squares = apart(graphs_of, name, web, packed)
    assert graphs == 1 + packed
    assert bool(squares) == (name == "deberta-v3-base")


# ----------------------------------------------------------------------------------------- memory and operations

SAVED = {
    "bert-base": 32_000,
    "bert-large": 42_500,
    "modernbert-base": 28_500,
    "modernbert-large": 46_500,
    "xlm-roberta-base": 32_000,
    "deberta-v3-base": 149_000,
    "esm-2": 36_700,
}
"""At most so many bytes a token and layer are kept for the backward pass, without what a compiler saves."""


def bytes_saved(name, web):
    """What a forward pass of the encoder keeps, a token and layer. Weights are not counted."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[id(storage)] = (storage.nbytes(), storage)
        return tensor

    with pytest.MonkeyPatch.context() as patch, fakes(patch, CPU):
        training = training_of(name, web, CPU)
        module = training.learner
        weights = {id(parameter.untyped_storage()) for parameter in module.parameters()}
        piece = micro_batch(name, web, CPU)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), training.autocast():
            module.encode(piece["input_ids"])
    total = sum(size for name, (size, _) in kept.items() if name not in weights)
    return total / (ROWS * LENGTHS[name] * module.model.config.num_hidden_layers)


@EVERY_MODEL
def test_what_is_kept_for_the_backward_pass(web, name):
    assert 0.9 * SAVED[name] < bytes_saved(name, web) < SAVED[name]


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


PATIENCE_S = 100  # so long a rank waits for the other, which does not call the same


class Split(DistributedDataParallel):
    """With buckets so small that a small model has several, and its graph is split between them."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, bucket_cap_mb=0.02, **options)


RUNS = {
    "windows": {},
    "packed": {"isolate_documents": True},
    "packed, recomputed": {"isolate_documents": True, "gradient_checkpointing": True},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way == "packed" else pytest.mark.dry) for way in RUNS]
)
def test_compiled_ranks_learn_what_one_does(dataset, configs, tmp_path, monkeypatch, on_cpus, way):
    """Two ranks that add up gradients of several passes, with a graph that is split where buckets end."""
    monkeypatch.setattr(pretrain, "world", functools.partial(pretrain.world, timedelta(seconds=PATIENCE_S)))
    monkeypatch.setattr(trainer_module, "DistributedDataParallel", Split)
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 4_000)
    shapes, finish, bounds_of = set(), Report.finish, cu_seqlens_of

    def bounds(positions):
        bounds = bounds_of(positions)
        if torch.is_grad_enabled():  # an evaluation is not compiled
            shapes.add(bounds.shape)
        return bounds

    def finished(records):
        found = {"graphs": counters["stats"]["unique_graphs"], "shapes": len(shapes)}
        found |= {"parts": counters["dry"]["parts"], "breaks": len(counters["graph_break"])}
        (tmp_path / f"counters-{os.environ.get('RANK')}.json").write_text(json.dumps(found))
        finish(records)

    monkeypatch.setattr(data_module, "cu_seqlens_of", bounds)
    monkeypatch.setattr(Report, "finish", finished)
    options = QUIET | {"model": configs["modernbert"], "precision": "bf16", "steps": 4, "global_batch_size": 8}
    options |= RUNS[way]
    one = train(dataset.path, tmp_path / "one", **options)
    shapes.clear()
    two = train(dataset.path, tmp_path / "two", ranks=2, **options, micro_batch_size=2, compile="on")
    assert_near(one, two, rel=2e-3)
    for rank in range(2):
        found = json.loads((tmp_path / f"counters-{rank}.json").read_text())
        assert found["graphs"] == max(1, found["shapes"])
        assert found["parts"] > 2 * found["graphs"]
        assert found["breaks"] == 0


def test_no_step_of_packed_rows_waits_for_the_device(dataset, configs, tmp_path, monkeypatch, on_cpus):
    """With the kernel of GPUs. What `feed` does is on the CPU there too."""
    plain = cu_seqlens_of

    def unseen(positions):
        with torch.utils._python_dispatch._disable_current_modes():
            return plain(positions)

    monkeypatch.setattr(data_module, "cu_seqlens_of", unseen)
    options = QUIET | {"model": configs["modernbert"], "precision": "bf16", "isolate_documents": True}
    with Waits(monkeypatch) as waits:
        train(dataset.path, tmp_path / "run", **options | {"steps": 7, "log_every": 2, "micro_batch_size": 2})
    assert waits.found == []


def test_an_evaluation_in_bf16_goes_to_the_kernel_of_gpus(dataset, configs, tmp_path, monkeypatch, on_cpus):
    """Each pass of each of its layers, of packed rows; in fp32 none does. The losses are about the same."""
    calls, losses, passes = [], [], []
    logits = Encoder.logits

    def counted(*given, **more):
        passes.append(torch.is_autocast_enabled("cpu"))  # predictions to look at are in fp32
        return logits(*given, **more)

    monkeypatch.setattr(Encoder, "logits", counted)

    def evaluated(*arguments, plain=evaluation.evaluate, **options):
        before = counters["dry"]["calls"]
        passes.clear()
        result = plain(*arguments, **options)
        calls.append(counters["dry"]["calls"] - before)
        losses.append(result["loss"])
        return result

    monkeypatch.setattr(evaluation, "evaluate", evaluated)
    options = QUIET | {"model": configs["modernbert"], "isolate_documents": True, "steps": 1}
    for precision in ("fp32", "bf16"):
        train(dataset.path, tmp_path / precision, **options, eval_precision=precision)
    assert calls[0] == 0
    assert calls[1] == 2 * sum(passes) > 0
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
