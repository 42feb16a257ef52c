"""What one step does on any device: its precision and kernels, that it never waits, and when it changes nothing."""

import functools
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from support.commands import refuses
from support.families import fast, model_of
from support.runs import (
    QUIET,
    at_step,
    changing,
    config_of,
    entries,
    flags,
    last_checkpoint,
    learner,
    losses,
    on_ranks,
    refused_run,
    run_of,
    train,
    train_twice,
    weights_in,
)
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from bertrain import objectives, optim, ranks, report, trainer
from bertrain.models.encoder import attention_kernels

STEPS = {
    "adamw": {"micro_batch_size": 4},
    "muon": {"optimizer": "muon", "model": "modernbert-tiny"},
    "stableadamw": {"optimizer": "stableadamw"},
    "lamb": {"optimizer": "lamb"},
    "fp16": {"precision": "fp16"},
    "fp16, muon": {"precision": "fp16", "optimizer": "muon"},
    "lora": {"lora": "r=2,alpha=6", "init": True},
    "lora, muon": {"lora": "r=2,alpha=6", "init": True, "optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},  # which knows nothing of steps that are skipped
    "modernbert": {"model": "modernbert-tiny", "gradient_checkpointing": True},
    "packed": {"model": "modernbert-tiny", "isolate_documents": True},
    "teacher": {"teacher": True, "distil": "logits"},
    "grown": {"phase": changing(0.5, layers=(1, None))},
    "reading": {"objective": "mlm+reading"},
}
FAST = ["adamw", "muon", "fp16"]


@pytest.fixture
def options(name, bert_run):
    """The options of a row of STEPS."""
    return QUIET | {key: str(bert_run) if key in ("init", "teacher") else value for key, value in STEPS[name].items()}


def objective_of(loss):
    """An objective whose loss is a function of the logits."""

    class Given(objectives.Objective):
        def count(self, batch):
            return len(batch.sample_ids)

        def forward(self, encoder, outputs, piece):
            return objectives.LossSum(loss(outputs.logits), torch.tensor(0))

    return Given


@pytest.fixture(autouse=True)
def _additions(tables_as_they_were):
    objectives.OBJECTIVES["reading"] = objective_of(
        lambda logits: logits.square().mean() * (2 if logits.sum() > 0 else 1)
    )
    objectives.OBJECTIVES["infinite"] = objective_of(lambda logits: logits.mean() + math.inf)
    objectives.OBJECTIVES["watching"] = Watching
    optim.OPTIMIZERS["sgd"] = lambda module, config: torch.optim.SGD(module.parameters(), momentum=0.9)


# ----------------------------------------------------------------------------------------------------------- precision

SEEN = {}  # part of a step → the dtype to which autocast converts in it
MANY = 1 << 24  # in float32 it is the same as the next number


def note(part):
    SEEN[part] = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def watched(logits):
    note("forward")
    logits.register_hook(lambda gradient: note("backward"))
    return logits.float().mean() * 0 + MANY


class Watching(objective_of(watched)):
    def count(self, batch):
        return MANY + 1

    def prepare(self, piece):
        note("prepare")
        return piece


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_only_the_forward_pass_is_in_autocast(dataset, tmp_path, monkeypatch, precision, dtype):
    """Neither the backward pass, as torch advises, nor what a teacher computes without gradients. Counts are exact."""
    SEEN.clear()
    products, plain = set(), torch.baddbmm
    note = lambda *matrices, **factors: products.add(matrices[0].dtype) or plain(*matrices, **factors)  # noqa: E731
    monkeypatch.setattr(torch, "baddbmm", note)
    options = QUIET | {"objective": "mlm+watching", "precision": precision, "steps": 1, "micro_batch_size": 2}
    log = train(dataset.path, tmp_path / "run", **options, optimizer="muon")
    assert {"prepare": None, "forward": dtype, "backward": None} == SEEN
    assert products == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert log[0]["watching_loss"] == pytest.approx(3 * MANY / (MANY + 1), rel=1e-9)  # of three passes


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_evaluations_have_a_precision_of_their_own(dataset, tmp_path, precision):
    """On CPUs fp32 unless another is given; run.json and the card of a checkpoint name it."""
    losses = {}
    for choice, expected in (("auto", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")):
        out, options = tmp_path / choice, {"steps": 1, "precision": precision, "eval_precision": choice}
        losses[choice] = train(dataset.path, out, **QUIET | options)[-1]["validation_loss"]
        assert json.loads((out / "run.json").read_text())["resolved"]["eval_precision"] == expected
        assert f"in {expected}" in (out / "step-00000001" / "README.md").read_text()
    assert losses["auto"] == losses["fp32"] != losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)


def test_evaluations_on_gpus_are_as_training(configs, monkeypatch):
    def resolved(model="bert", **options):
        weights = SimpleNamespace(config=AutoConfig.from_pretrained(configs[model]))
        given = config_of(**options)
        return trainer.resolve_precision(given, torch.device("cuda"), weights, option="eval_precision")

    for has_bf16, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
        assert resolved() == expected
    assert resolved(precision="fp32") == resolved("deberta") == "fp32"
    assert resolved(precision="fp32", eval_precision="bf16") == "bf16"
    with refuses("unsupported", "eval_precision", given="bf16"):
        resolved("deberta", eval_precision="bf16")


# --------------------------------------------------------------------------------------------------------- --attention


@pytest.mark.parametrize(
    ("model", "choice", "version", "expected"),
    [
        ("bert", "auto", "2.13.0+cu130", ("flash", "efficient", "math")),
        ("bert", "auto", "2.14.0a0+git1", ("flash", "cudnn", "efficient", "math")),
        ("bert", "auto", "3.0.1", ("flash", "cudnn", "efficient", "math")),
        ("bert", "cudnn", "2.13.0", ("cudnn",)),
        ("bert", "flash", "2.13.0", ("flash", "efficient")),
        ("deberta", "auto", "2.13.0", ("eager",)),  # which attends by itself
    ],
)
def test_kernels_on_gpus(configs, dataset, monkeypatch, model, choice, version, expected):
    """auto leaves cuDNN out where it has known faults; what is asked for is given."""
    encoder = learner(model_of(configs[model], dataset))
    monkeypatch.setattr(torch, "__version__", version)
    assert attention_kernels(choice, encoder, torch.device("cuda")) == expected


def enabled():
    """The kernels that torch may choose among, by name."""
    names = {"flash": "flash", "cudnn": "cudnn", "efficient": "mem_efficient", "math": "math"}
    return tuple(name for name, each in names.items() if getattr(torch.backends.cuda, f"{each}_sdp_enabled")())


@pytest.mark.parametrize("choice", ["auto", "flash", "math"])
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"isolate_documents": True}], ids=str)
def test_a_step_has_the_kernels_that_are_asked_for(dataset, tmp_path, monkeypatch, choice, more):
    """In each forward pass, also in that of the backward pass; the evaluation and what comes after have all of them."""
    seen, plain = [], torch.nn.functional.scaled_dot_product_attention

    def attend(*arguments, **options):
        seen.append((torch.is_grad_enabled(), enabled()))
        return plain(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    before, expected = enabled(), ("flash", "math") if choice == "auto" else (choice,)
    train(dataset.path, tmp_path / "run", **QUIET | {"steps": 2, "attention": choice, **more})
    assert {*seen} == {(True, expected), (False, before)}
    assert sum(is_trained for is_trained, _ in seen) == 4 * (1 + ("gradient_checkpointing" in more))
    assert enabled() == before
    resolved = json.loads((tmp_path / "run" / "run.json").read_text())["resolved"]
    assert tuple(resolved["attention"]) == expected


# ------------------------------------------------------------------------------------------------- waits for the device

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal"}
"""Operations for which the host must wait for a GPU, as it needs what is in a tensor: item, bool, float and int of one,
and shapes that follow from numbers."""


class Waits(TorchDispatchMode):
    """Lists what would make the host wait for a GPU, in steps of a run and in entries of the log.

    Not in the first step, nor in those before the border of phases and before the end of a run of 8.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.found, self._counts = [], False
        for step in range(8):
            at_step(monkeypatch, "next_batch", step, lambda step=step: setattr(self, "_counts", step not in (0, 3, 7)))
        for method in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):  # no operations, or also copies

            def called(tensor, *arguments, method=method, **options):
                self.found.extend([method.__name__] * self._counts)
                return method(tensor, *arguments, **options)

            monkeypatch.setattr(torch.Tensor, method.__name__, called)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in arguments[1]
        )
        if self._counts and (name in WAITING or by_mask or str(function) == "aten.repeat_interleave.Tensor"):
            self.found.append(name)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    "name", fast((name for name in STEPS if name != "sgd"), *FAST, among=["grown", "teacher", "reading"])
)
def test_no_step_waits_for_the_device_unless_it_reads_a_number(dataset, options, tmp_path, monkeypatch, name):
    """The numbers of an entry are read by one `tolist`: on GPUs, of a copy that is made during the next step."""
    with Waits(monkeypatch) as waits:
        train(dataset.path, tmp_path / "run", **options | {"steps": 8, "log_every": 2})
    assert sorted(waits.found) == ["_local_scalar_dense"] * (5 if name == "reading" else 0) + ["tolist"] * 2


class Late(ranks.Reading):
    """As on a GPU, where the host has not waited for the numbers yet."""

    begun, late_by = [], []  # steps, and how many of them came between the making of each of these and its reading

    def __init__(self, numbers):
        super().__init__(numbers)
        self.is_here, self._copied, self._made = False, SimpleNamespace(synchronize=lambda: None), len(self.begun)

    def take(self):
        self.late_by.append(len(self.begun) - self._made)
        return super().take()


def test_an_entry_that_is_read_one_step_late_is_the_same(dataset, tmp_path, monkeypatch):
    """It does not wait another step where an evaluation, a checkpoint, a border or the end comes next."""
    options = QUIET | {"save_every": 3, "eval_every": 4, "global_batch_size": "2..8"}
    options |= {"phase": [{"steps": 6}, {"steps": 5, "mlm_probability": 0.3}]}
    on_time = train(dataset.path, tmp_path / "on-time", **options)
    monkeypatch.setattr(report, "Reading", Late)
    for step in range(11):
        at_step(monkeypatch, "next_batch", step, lambda step=step: Late.begun.append(step))
    late = train(dataset.path, tmp_path / "late", **options)
    assert losses(late) == losses(on_time)
    for name in ("tokens", "lr", "accuracy"):
        assert [entry.get(name) for entry in late] == [entry.get(name) for entry in on_time]
    assert Late.late_by == [1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0]


# --------------------------------------------------------------------------------------------------- graphs, buffers


@pytest.mark.slow
def test_a_run_compiles_one_graph(dataset, tmp_path, monkeypatch):
    """Whatever is masked, and for all passes of a step. torch's cache of graphs keeps those of other kernels apart.

    In a process of its own: one that has compiled is not safe to fork, as tests of several ranks do.
    """
    compiled = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")  # without the compiler of kernels
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    counters.clear()  # of the tests before
    found = tmp_path / "found.json"

    def keep():
        found.write_text(json.dumps([counters["stats"]["unique_graphs"], torch.compiler.config.cache_key_tag]))

    at_step(monkeypatch, "next_batch", 4, keep)
    options = QUIET | {"model": "modernbert-tiny", "masking": "bernoulli", "micro_batch_size": 3, "compile": "on"}
    train(dataset.path, tmp_path / "run", ranks=1, **options | {"steps": 5, "attention": "math"})
    assert json.loads(found.read_text()) == [1, "attention by math"]


@pytest.mark.parametrize(("model", "expected"), [("bert", False), ("modernbert", False), ("roc_bert", True)])
def test_buffers_that_change_are_copied_between_ranks(configs, dataset, tmp_path, monkeypatch, model, expected):
    """roc_bert is not in the table of families, so its buffers may change, as those of any objective."""
    distributed = SimpleNamespace(register_comm_hook=lambda *arguments: None)
    monkeypatch.setattr(trainer, "DistributedDataParallel", lambda learner, **options: distributed)
    options = {"data": str(dataset.path), "out": str(tmp_path), "model": configs[model], "length": 32}
    run = run_of(config_of(**options), world_size=2)
    assert run.trainer.enter(run.stream.phase).broadcast_buffers == expected
    run.trainer.learner.objectives["mlm"].register_buffer("passes", torch.zeros(()))
    assert run.trainer.enter(run.stream.phase).broadcast_buffers


# ----------------------------------------------------------------------- steps whose loss or gradient is not finite


def wild_at(monkeypatch, *steps, rank=None):
    """Makes a gradient of some steps, numbered from 1, NaN: on one rank, or on all."""
    plain = trainer.Trainer.step

    def step(this, module, batch, number, *rest):
        is_wild = number + 1 in steps and rank in (None, this.ranks.rank)
        weight = next(weight for weight in this.learner.parameters() if weight.requires_grad)
        hook = weight.register_hook(lambda gradient: gradient * (math.nan if is_wild else 1))
        plain(this, module, batch, number, *rest)
        hook.remove()

    monkeypatch.setattr(trainer.Trainer, "step", step)


def state_after(out, step):
    """The weights of a checkpoint and its moments."""
    folder = out / f"step-{step:08d}"
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    moments = {f"{number}.{name}": value for number, of_one in state.items() for name, value in of_one.items()}
    return weights_in(folder) | moments


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", fast([*FAST, "stableadamw", "lamb", "lora", "lora, muon", "sgd"], among=FAST))
def test_a_run_goes_on_after_a_skipped_step(dataset, options, tmp_path, monkeypatch):
    """Also where the first step of all is skipped, which makes the state, and after a stop."""
    wild_at(monkeypatch, 1, 3)
    log = train_twice(dataset.path, tmp_path / "run", 3, **options | {"steps": 5, "save_every": 1})
    states = [state_after(tmp_path / "run", step) for step in range(1, 6)]
    assert [equal(one, other) for one, other in itertools.pairwise(states)] == [False, True, False, False]
    assert not any(value.any() for key, value in states[0].items() if key[0].isdigit())
    assert all(value.isfinite().all() for value in states[-1].values())
    entry = next(entry for entry in log if entry["step"] == 3 and "grad_norm" in entry)
    assert (entry["skipped"], entry["not_finite"]) == (1, ["grad_norm"])
    assert (entry["loss"], entry["grad_norm"]) == (None, None)
    assert [entry["step"] for entry in log if "skipped" in entry] == [1, 3]


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.slow)])
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
    options = QUIET | {"objective": "mlm+infinite", "steps": 3}
    refused_run(dataset.path, tmp_path / "run", **options, kind="not-finite", option="lr", says="infinite_loss")


@pytest.mark.slow
def test_ten_skipped_steps_in_a_row_end_a_run_on_all_ranks(dataset, tmp_path, monkeypatch):
    """Nine do not. The weights of the newest checkpoint are finite."""
    wild_at(monkeypatch, *range(3, 3 + report.PATIENCE - 1), *range(14, 40), rank=1)
    out, options = tmp_path / "run", QUIET | {"steps": 40, "save_every": 12, "global_batch_size": 4}
    _, said = on_ranks(2, "bertrain.pretrain", flags(dataset.path, out, **options), code=1)
    assert ("Traceback" in said, said.count("Error: "), said.count("were skipped")) == (False, 1, 1)
    assert last_checkpoint(out).name == "step-00000012"
    assert all(value.isfinite().all() for value in state_after(out, 12).values())
    assert entries(out)[-1]["step"] == 13 + report.PATIENCE
