"""The examples of docs/extending.md run; additions from outside need no change of the package."""

import json
import re
import runpy
from dataclasses import dataclass, make_dataclass

import pytest
import torch
from support.commands import refused, succeeds
from support.data import ROOT
from support.disk import write
from support.families import LONGFORMER
from support.runs import (
    QUIET,
    TINY,
    changing,
    config_of,
    losses,
    refused_run,
    remove_after,
    steps_of,
    train,
    train_twice,
)

from bertrain import optim
from bertrain.data import build_loader
from bertrain.methods import METHODS, Method
from bertrain.models.families import FAMILIES, Family
from bertrain.objectives import OBJECTIVES, LossSum, Objective
from bertrain.options import FROM_0, INTEGER, Either, Needs, Options
from bertrain.options import option as declared
from bertrain.trainer import build_model

PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = {name: code for code, name in re.findall(r'```python\n("""python (\w+)\.py.*?)```', PAGE, re.DOTALL)}
pytestmark = pytest.mark.usefixtures("tables_as_they_were")


@pytest.fixture
def longformer(tmp_path):
    return str(write(tmp_path / "longformer.json", json.dumps(LONGFORMER)))


def run(dataset, out, **options):
    """The entries of a run's log that are of steps."""
    return steps_of(train(dataset.path, out, **QUIET | {"steps": 1} | options))


def add(*names):
    """Runs examples of the page, which add to the tables."""
    for name in names:
        exec(compile(EXAMPLES[name], f"{name}.py", "exec"), {"__name__": name})  # noqa: S102


def test_the_example_of_a_family_trains_as_it_did_without_its_head(dataset, tmp_path, longformer):
    config = config_of(model=longformer, length=32)
    (dense,) = run(dataset, tmp_path / "dense", model=longformer)
    assert build_model(config, dataset)[1]  # a warning that it is slower
    add("longformer")
    assert build_model(config, dataset)[1] == []
    assert run(dataset, tmp_path / "run", model=longformer)[0]["loss"] == pytest.approx(dense["loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["lr", "recipe", "file", "nproc", "methods"])
def test_an_option_of_a_method_with_a_name_that_a_command_or_config_takes_is_refused(name):
    own = make_dataclass("Own", [(name, int, declared(0, INTEGER))], bases=(Options,), frozen=True, kw_only=True)
    METHODS["mine"] = type("Mine", (Method,), {"options_type": own})
    refused("bertrain", "pretrain", kind="bad-entry", option=name, given="mine")


@dataclass(frozen=True, kw_only=True)
class NoisyOptions(Options):
    noise: float = declared(0.0, FROM_0)
    """Standard deviation of what is added to a bias."""
    noise_scale: float = declared(1.0, FROM_0, phase=True)
    """Factor on --noise."""
    rules = (
        Needs(("noise_scale",), lambda c: c.noise, "--noise"),
        Either(("noise", "lora"), "an adapter hides noise"),
        Either(("noise_scale", "init"), "why not"),
    )


class Noisy(Method):
    """Notes what each phase asks for."""

    options_type = NoisyOptions

    asked = []

    def begin_step(self, step, phase, learner):
        self.asked.append(phase.options.method_options(NoisyOptions).noise_scale)


@pytest.mark.slow
def test_phases_set_options_of_a_method_from_outside_and_it_resumes(dataset, tmp_path):
    own = make_dataclass("Own", [("after", int, declared(0, INTEGER))], bases=(Options,), frozen=True, kw_only=True)
    hooks = {"options_type": own, "begin_step": lambda self, *_: Noisy.asked.append(self.name)}
    METHODS.update(noisy=Noisy, after=type("After", (Method,), hooks))
    Noisy.asked.clear()
    phases = [{"steps": 2, "noise_scale": 2.0}, {"steps": 1, "noise_scale": 1.0}, {"steps": 1}]
    options = QUIET | {"noise": 0.1, "after": 1, "phase": phases, "save_every": 1}
    log = train(dataset.path, tmp_path / "run", **options)
    assert Noisy.asked == [2.0, "after", 2.0, "after", 1.0, "after", 1.0, "after"]
    remove_after(tmp_path / "run", 3)
    assert losses(train(dataset.path, tmp_path / "run", **options)) == losses(log)
    assert Noisy.asked[8:] == [1.0, "after"]


def test_options_of_a_method_from_outside_are_checked_for_the_whole_run(tmp_path):
    METHODS["noisy"] = Noisy
    for options, kind, option in (
        ({"noise_scale": 2.0}, "needs-option", "noise_scale"),
        ({"noise": 0.1, "init": "x", "lora": "r=2,alpha=4"}, "conflict", "noise"),
        ({"noise": 0.1, "init": "x", "phase": [{"steps": 1, "noise_scale": 2.0}]}, "conflict", "noise_scale"),
        ({"noise": 0.1, "phase": [{"steps": 1, "noise": 0.2}]}, "unknown", "noise"),
        ({"noise": "much"}, "malformed", "noise"),
    ):
        refused_run("d", tmp_path / "run", kind=kind, option=option, **options)
    made = config_of(noise=0.1, phase=[{"steps": 1, "noise_scale": 2.0}, {"steps": 1}])
    assert config_of(**made.flat()) == made


@pytest.mark.slow
def test_the_example_of_a_method_trains_and_resumes_to_the_same_bits(dataset, tmp_path):
    runpy.run_path(str(ROOT / "examples" / "structured_embeddings.py"))
    table = write(tmp_path / "table.tsv", "a\tvowel\nb\tother\tearly\nc\tother\tearly\n")
    options = {"model": TINY, "steps": 4, "eval_every": 0}
    log = train_twice(dataset.path, tmp_path / "run", 2, structures=str(table), **options)
    plain = losses(train(dataset.path, tmp_path / "plain", **options))
    assert losses(log)[0] == plain[0]
    assert losses(log)[2:] != plain[2:]


class Halves(Objective):
    """A toy with a parameter and a buffer: whether a row's first token is in the lower half of the vocabulary."""

    accuracy_name, num_classes = "halves_right", 2

    def __init__(self, model, config):
        super().__init__(model, config)
        self.head = torch.nn.Linear(model.config.hidden_size, self.num_classes)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def count(self, batch):
        return batch.sample_ids.size

    def forward(self, encoder, outputs, piece):
        self.passes += 1
        logits, rows = self.head(outputs.hidden[:, 1]), piece["sample_ids"] >= 0
        labels = (piece["input_ids"][:, 1] < encoder.model.config.vocab_size // 2).long()
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none") * rows
        return LossSum(losses.sum(), ((logits.argmax(-1) == labels) & rows).sum())


@pytest.mark.slow
def test_the_examples_train_together_and_resume_with_an_objective_that_has_parameters(dataset, tmp_path, longformer):
    """Without the option of their method a run is as before. What a resumed run must not change is named."""

    class Other(Halves):
        num_classes = 3

    class More(Halves):
        def __init__(self, model, config):
            super().__init__(model, config)
            self.map = self.head

    add(*EXAMPLES)
    OBJECTIVES["halves"] = Halves
    options = {"objective": "focal+halves", "optimizer": "nadam", "schedule": "inverse_sqrt", "model": longformer}
    options |= {"lr": 2e-3, "steps": 4, "warmup_steps": 1, "eval_every": 0, "save_every": 2, "unsure": 0.5}
    log = train_twice(dataset.path, tmp_path / "run", 2, **options)
    steps, plain = steps_of(log), steps_of(train(dataset.path, tmp_path / "plain", **options | {"unsure": 0.0}))
    assert all(0 < entry["loss"] < 10 and entry["halves_loss"] > 0 > entry["entropy_loss"] for entry in steps)
    assert all(0 <= entry["halves_right"] <= 1 for entry in steps)
    assert steps[1]["lr"] == pytest.approx(2e-3)
    assert (plain[0]["loss"] == steps[0]["loss"], plain[3]["loss"] == steps[3]["loss"]) == (True, False)
    assert "entropy_loss" not in plain[0]
    assert "  --unsure FLOAT" in succeeds("bertrain", "pretrain", "--help").output
    shape = {"option": "objective", "says": "objectives.halves.head.weight"}
    for unsure, objective, named in (
        (0.25, Halves, {"option": "unsure"}),
        (0.0, Halves, {"option": "unsure"}),
        (0.5, Other, shape),
        (0.5, More, shape),
    ):
        OBJECTIVES["halves"] = objective
        other = options | {"unsure": unsure, "steps": 6}
        refused_run(dataset.path, tmp_path / "run", **other, kind="other-settings", **named)


@pytest.mark.parametrize(
    "head",
    [
        lambda model, hidden: model.lm_head(hidden) * 2,  # other logits
        lambda model, hidden: model.lm_head(hidden)[..., :7],  # too few of them
        None,  # which a longformer needs
    ],
)
def test_a_wrong_head_is_refused(dataset, tmp_path, longformer, head):
    FAMILIES["longformer"] = Family(head=head)
    wrong = {"kind": "model-unreadable", "says": "longformer"}
    refused_run(dataset.path, tmp_path / "run", model=longformer, steps=2, **wrong)


@pytest.mark.parametrize(
    "factor", [-0.5, *(pytest.param(each, marks=pytest.mark.slow) for each in (None, torch.ones(())))]
)
def test_a_wrong_factor_of_a_schedule_is_refused(dataset, tmp_path, factor):
    optim.SCHEDULES["own"] = lambda *steps: factor
    wrong = {"kind": "bad-entry", "option": "schedule", "says": "own"}
    refused_run(dataset.path, tmp_path / "run", **QUIET, schedule="own", steps=2, warmup=0, **wrong)


def test_buffers_of_an_objective_are_kept_at_a_growth_and_in_checkpoints(dataset, tmp_path):
    OBJECTIVES["halves"] = Halves
    run(dataset, tmp_path / "run", objective="mlm+halves", phase=changing(0.5, layers=[1, None]), steps=4)
    beside = torch.load(tmp_path / "run" / "step-00000004" / "beside.pt", weights_only=True)
    assert beside["objectives.halves.passes"] == 4


def test_parameters_of_an_objective_come_from_the_seed_also_with_init(dataset, bert_run, tmp_path):
    OBJECTIVES["halves"] = Halves
    start = {"init": str(bert_run), "objective": "mlm+halves", "data_seed": 0}
    losses = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)  # whatever a program did before
        losses.append(run(dataset, tmp_path / str(number), **start, seed=seed)[0]["halves_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_the_data_seed_decides_order_and_masks_and_the_seed_the_weights(dataset):
    def parts(**seeds):
        config = config_of(model="bert-tiny", **seeds)
        weights = build_model(config, dataset)[0].get_input_embeddings().weight
        return build_loader(config, dataset).seed, weights.sum().item()

    assert parts(seed=0) == parts(seed=0, data_seed=0)
    assert parts(seed=1, data_seed=0) == (0, parts(seed=1)[1])
    assert parts(seed=0, data_seed=1) == (1, parts(seed=0)[1])
    assert parts(seed=1)[1] != parts(seed=0)[1]
