"""What one step does on any device: where it computes in half precision, by which kernels, and that it never waits."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from support.commands import refuses
from support.families import model_of
from support.runs import ALONE, QUIET, TINY, changing, learner, losses, train
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from bertrain import ranks
from bertrain import report as report_module
from bertrain import trainer as trainer_module
from bertrain.config import Config
from bertrain.data import Stream
from bertrain.models.encoder import attention_kernels, limit_kernels
from bertrain.objectives import OBJECTIVES, LossSum, Objective
from bertrain.pretrain import Pretraining
from bertrain.report import Report
from bertrain.trainer import Trainer, _over_ranks, resolve_precision

SEEN = {}


def in_half():
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class Watching(Objective):
    """Keeps to which dtype autocast converted in each part of a step."""

    def count(self, batch):
        return len(batch.sample_ids)

    def prepare(self, piece):
        SEEN["prepare"] = in_half()
        return piece

    def forward(self, encoder, outputs, piece):
        SEEN["forward"] = in_half()
        outputs.logits.register_hook(lambda gradient: SEEN.update(backward=in_half()))
        return LossSum(outputs.logits.float().square().mean(), torch.tensor(0))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_only_the_forward_pass_is_in_autocast(dataset, tmp_path, precision, dtype):
    """Neither the backward pass, as torch advises, nor what a teacher computes without gradients."""
    OBJECTIVES["watching"] = Watching
    SEEN.clear()
    options = QUIET | {"objective": "mlm+watching", "precision": precision, "steps": 1, "micro_batch_size": 2}
    train(dataset.path, tmp_path / "run", **options)
    assert {"prepare": None, "forward": dtype, "backward": None} == SEEN


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluations_have_a_precision_of_their_own(dataset, tmp_path, precision):
    """On CPUs fp32 unless another is given; run.json and the card of a checkpoint name it."""
    losses = {}
    for choice, expected in (("auto", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")):
        out, options = tmp_path / choice, {"steps": 1, "precision": precision, "eval_precision": choice}
        losses[choice] = train(dataset.path, out, **QUIET | options)[-1]["validation_loss"]
        assert json.loads((out / "run.json").read_text())["resolved"]["eval_precision"] == expected
        assert f"in {expected}" in (out / "step-00000001" / "README.md").read_text()
    assert losses["auto"] == losses["fp32"] != losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)


@pytest.mark.parametrize(("bf16", "expected"), [(True, "bf16"), (False, "fp16")])
def test_evaluations_on_gpus_are_as_training(configs, monkeypatch, bf16, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bf16)

    def resolved(model="bert", **options):
        weights = SimpleNamespace(config=AutoConfig.from_pretrained(configs[model]))
        given = Config.make(data="x", **options), torch.device("cuda"), weights
        return resolve_precision(*given, option="eval_precision")

    assert resolved() == expected
    assert resolved(precision="fp32") == "fp32"
    assert resolved(precision="fp32", eval_precision="bf16") == "bf16"
    assert resolved("deberta") == "fp32"
    with refuses("unsupported", "eval_precision", given="bf16"):
        resolved("deberta", eval_precision="bf16")


# --------------------------------------------------------------------------------------------------------- --attention


def enabled():
    """The kernels that torch may choose among, by name."""
    answers = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return tuple(name for name, is_enabled in answers.items() if is_enabled)


@pytest.mark.parametrize(
    ("choice", "version", "expected"),
    [
        ("auto", "2.13.0+cu130", ("flash", "efficient", "math")),
        ("auto", "2.6.0", ("flash", "efficient", "math")),
        ("auto", "2.14.0a0+git1", ("flash", "cudnn", "efficient", "math")),
        ("auto", "3.0.1", ("flash", "cudnn", "efficient", "math")),
        ("cudnn", "2.13.0", ("cudnn",)),
        ("flash", "2.13.0", ("flash", "efficient")),
        ("math", "2.13.0", ("math",)),
    ],
)
def test_kernels_on_gpus(dataset, monkeypatch, choice, version, expected):
    """auto leaves cuDNN out where it has known faults; what is asked for is given."""
    encoder = learner(model_of(TINY, dataset))
    monkeypatch.setattr(torch, "__version__", version)
    names = attention_kernels(choice, encoder, torch.device("cuda"))
    assert names == expected
    before = enabled()
    with limit_kernels(names)():
        assert enabled() == expected
    assert enabled() == before


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


def test_a_model_that_attends_by_itself_has_no_choice(configs, dataset):
    assert attention_kernels("auto", learner(model_of(configs["deberta"], dataset)), ALONE.device) == ("eager",)


def test_compiled_models_are_kept_apart_by_the_kernels_that_may_run(dataset, monkeypatch):
    """torch's cache on disk holds the kernel that was chosen, and its key does not."""
    tags = []
    for choice in ("auto", "flash", "math"):
        monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
        config = Config.make(data=str(dataset.path), out="x", model=TINY, attention=choice, compile="on", length=32)
        Trainer(config, dataset, ALONE, [], None, model_of(TINY, dataset))
        tags.append(torch.compiler.config.cache_key_tag)
    assert len({*tags, ""}) == 4


# ------------------------------------------------------------------------------------------------- waits for the device

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal"}
"""Operations for which the host must wait for a GPU, as it needs what is in a tensor: item, bool, float and int of one,
and shapes that follow from numbers."""


class Waits(TorchDispatchMode):
    """Lists what would make the host wait for a GPU, in the steps of a run but the first, and in entries of the log.

    What goes through `Reading` is not counted: on GPUs it is read one step late.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.found, self._counts = [], False

        def patch(owner, name, before):
            plain = getattr(owner, name)

            def called(this, *arguments, **options):
                before(this)
                return plain(this, *arguments, **options)

            monkeypatch.setattr(owner, name, called)

        patch(Stream, "next_batch", lambda stream: setattr(self, "_counts", stream.step > 0))
        for name in ("save", "_evaluate", "_enter"):
            patch(Pretraining, name, lambda _: setattr(self, "_counts", False))
        for name in ("tolist", "numpy", "cpu"):  # which are no operations, or also copies
            patch(torch.Tensor, name, lambda _, name=name: self.found.extend([name] * self._counts))
        monkeypatch.setattr(ranks.Reading, "take", lambda reading: [0.0] * len(reading._numbers))

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in arguments[1]
        )
        if self._counts and (name in WAITING or by_mask or str(function) == "aten.repeat_interleave.Tensor"):
            self.found.append(name)
        return function(*arguments, **(options or {}))


class Reading(Objective):
    """Looks at its loss in the step."""

    def count(self, batch):
        return len(batch.sample_ids)

    def forward(self, encoder, outputs, piece):
        loss = outputs.logits.square().mean()
        return LossSum(loss if loss > 0 else -loss, torch.tensor(0))


STEPS = {
    "adamw": {"micro_batch_size": 4},
    "modernbert": {"model": "modernbert-tiny", "gradient_checkpointing": True},
    "packed": {"model": "modernbert-tiny", "isolate_documents": True},
    "muon": {"optimizer": "muon", "model": "modernbert-tiny"},
    "stableadamw": {"optimizer": "stableadamw"},
    "lamb": {"optimizer": "lamb"},
    "fp16": {"precision": "fp16"},
    "fp16, muon": {"precision": "fp16", "optimizer": "muon"},
    "teacher": {"teacher": True, "distil": "logits"},
    "grown": {"phase": changing(0.5, layers=(1, None))},
    "reading": {"objective": "mlm+reading"},
}


@pytest.mark.parametrize("name", STEPS)
def test_no_step_waits_for_the_device_unless_it_reads_a_number(dataset, bert_run, tmp_path, monkeypatch, name):
    OBJECTIVES["reading"] = Reading
    options = QUIET | {"steps": 7, "log_every": 2} | STEPS[name]
    if "teacher" in options:
        options["teacher"] = str(bert_run)
    with Waits(monkeypatch) as waits:
        train(dataset.path, tmp_path / "run", **options)
    assert waits.found == ["_local_scalar_dense"] * (6 if name == "reading" else 0)


class Late(ranks.Reading):
    """As on a GPU, where the host has not waited for the numbers yet."""

    begun, late_by = [], []  # batches, and how many of them came between the making of each of these and its reading

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
    on_time, plain = train(dataset.path, tmp_path / "on-time", **options), Stream.next_batch
    monkeypatch.setattr(report_module, "Reading", Late)
    monkeypatch.setattr(Stream, "next_batch", lambda stream: Late.begun.append(stream) or plain(stream))
    late = train(dataset.path, tmp_path / "late", **options)
    assert losses(late) == losses(on_time)
    for name in ("tokens", "lr", "accuracy"):
        assert [entry.get(name) for entry in late] == [entry.get(name) for entry in on_time]
    assert Late.late_by == [1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0]


# --------------------------------------------------------------------------------------------------- graphs, buffers


def test_a_run_compiles_one_graph(dataset, tmp_path, monkeypatch):
    """Whatever is masked, and for all passes of a step.

    In a process of its own: one that has compiled is not safe to fork, as tests of several ranks do.
    """
    compiled = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")  # without the compiler of kernels
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    counters.clear()  # of the tests before
    found, finish = tmp_path / "counters.json", Report.finish
    monkeypatch.setattr(
        Report, "finish", lambda report: (found.write_text(json.dumps(counters["stats"])), finish(report))
    )
    options = QUIET | {"model": "modernbert-tiny", "masking": "bernoulli", "micro_batch_size": 3, "compile": "on"}
    train(dataset.path, tmp_path / "run", ranks=1, **options | {"steps": 5})
    assert json.loads(found.read_text())["unique_graphs"] == 1


class Counting(Reading):
    """Counts its passes in a buffer."""

    def __init__(self, model, config):
        super().__init__(model, config)
        self.register_buffer("passes", torch.zeros(()))


@pytest.mark.parametrize(
    ("name", "objectives", "expected"),
    [("bert", (), False), ("modernbert", (), False), ("bert", ("mlm", "counting"), True), ("roc_bert", (), True)],
)
def test_buffers_that_change_are_copied_between_ranks(configs, dataset, monkeypatch, name, objectives, expected):
    """roc_bert is not in the table of families, so its buffers may change."""
    OBJECTIVES["counting"] = Counting
    distributed = SimpleNamespace(register_comm_hook=lambda *arguments: None)
    monkeypatch.setattr(trainer_module, "DistributedDataParallel", lambda learner, **options: distributed)
    _over_ranks(learner(model_of(configs[name], dataset), *objectives))
    assert distributed.broadcast_buffers == expected
