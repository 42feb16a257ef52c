"""The examples of docs/extending.md run, and are short; additions from outside need no change of the package."""

import contextlib
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from training import SMALL, entries, flags

from bertrain import optim
from bertrain.config import Config
from bertrain.models.families import FAMILIES, Family
from bertrain.objectives import OBJECTIVES, Learner, LossSum, Objective
from bertrain.pretrain import main

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
EXAMPLES = {
    re.search(r"python (\w+)\.py", code)[1]: code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
}
TABLES = (OBJECTIVES, optim.OPTIMIZERS, optim.SCHEDULES, FAMILIES)
LONGFORMER = {"model_type": "longformer", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
              "intermediate_size": 64, "attention_window": 8, "hidden_dropout_prob": 0.0,
              "attention_probs_dropout_prob": 0.0}  # fmt: skip


@pytest.fixture(autouse=True)
def _tables_as_they_were():
    before = [dict(table) for table in TABLES]
    yield
    for table, entries_before in zip(TABLES, before, strict=True):
        table.clear()
        table.update(entries_before)


def run(dataset, out, **options):
    main(flags(dataset.path, out, **{"eval_every": 0, "steps": 3} | options), standalone_mode=False)
    return [entry for entry in entries(out) if "loss" in entry]


def test_there_are_four_examples_of_at_most_25_lines():
    assert EXAMPLES.keys() == {"focal", "nadam", "inverse_sqrt", "longformer"}
    for code in EXAMPLES.values():
        assert len([line for line in code.splitlines() if line.strip()]) <= 25


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_and_resumes(dataset, tmp_path, capsys, name):
    config = tmp_path / "longformer.json"
    config.write_text(json.dumps(LONGFORMER))
    options = {
        "focal": {"objective": "focal"},
        "nadam": {"optimizer": "nadam"},
        "inverse_sqrt": {"schedule": "inverse_sqrt", "warmup": 1},
        "longformer": {"model": str(config)},
    }[name]
    without = tmp_path / "without"
    if name == "longformer":  # before it is added
        dense = run(dataset, without, **options)
        assert "so training is slower" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit) as refused:
            run(dataset, without, **options)
        assert refused.value.code == 2
    exec(compile(EXAMPLES[name], f"{name}.py", "exec"), {"__name__": name})  # noqa: S102
    log = run(dataset, tmp_path / "run", **options, steps=2)
    assert [entry["step"] for entry in log] == [1, 2]
    assert all(0 < entry["loss"] < 10 for entry in log)
    if name == "longformer":
        assert "slower" not in capsys.readouterr().out
        assert log[0]["loss"] == pytest.approx(dense[0]["loss"], rel=1e-5)
    if name == "inverse_sqrt":
        assert log[1]["lr"] == pytest.approx(SMALL["lr"])
    assert [entry["step"] for entry in run(dataset, tmp_path / "run", **options)] == [1, 2, 3]


class Halves(Objective):
    """A toy with a parameter of its own: whether a row's first token is in the lower half of the vocabulary."""

    accuracy_name = "halves_right"

    def __init__(self, model, config):
        super().__init__(model, config)
        self.head = torch.nn.Linear(model.config.hidden_size, 2)

    def count(self, batch):
        return batch.sample_ids.size

    def forward(self, encoder, outputs, piece):
        logits, rows = self.head(outputs.hidden[:, 1]), piece["sample_ids"] >= 0
        labels = (piece["input_ids"][:, 1] < encoder.model.config.vocab_size // 2).long()
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none") * rows
        return LossSum(losses.sum(), ((logits.argmax(-1) == labels) & rows).sum())


def test_a_toy_objective_optimizer_schedule_and_family_train_together(dataset, tmp_path):
    """All four at once, with a second objective that has parameters; stopped and resumed to the same bits."""
    for name in ("nadam", "inverse_sqrt", "longformer"):
        exec(compile(EXAMPLES[name], f"{name}.py", "exec"), {"__name__": name})  # noqa: S102
    OBJECTIVES["halves"] = Halves
    config = tmp_path / "longformer.json"
    config.write_text(json.dumps(LONGFORMER))
    options = {"objective": "mlm+halves", "optimizer": "nadam", "schedule": "inverse_sqrt", "model": str(config)}
    whole = run(dataset, tmp_path / "whole", **options, steps=4)
    assert all(entry["halves_loss"] > 0 and 0 <= entry["halves_right"] <= 1 for entry in whole)
    run(dataset, tmp_path / "part", **options, steps=4, save_every=2)
    for path in sorted((tmp_path / "part" / "step-00000004").iterdir(), reverse=True):
        path.unlink()
    (tmp_path / "part" / "step-00000004").rmdir()
    again = run(dataset, tmp_path / "part", **options, steps=4, save_every=2)
    assert [(e["loss"], e["halves_loss"]) for e in again] == [(e["loss"], e["halves_loss"]) for e in whole]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Family(head=lambda model, hidden: model.lm_head(hidden) * 2), "ValueError: it gives other logits"),
        (Family(head=lambda model, hidden: model.lm_head(hidden)[..., :7]), "instead of [1, 8, "),
        (Family(head=lambda model, hidden: model.cls(hidden)), "AttributeError: "),
        (Family(), "is not that of the model's own forward pass"),  # a longformer needs a head
    ],
)
def test_a_head_that_is_not_the_models_own_is_refused(dataset, tmp_path, capsys, entry, reason):
    config = tmp_path / "longformer.json"
    config.write_text(json.dumps(LONGFORMER))
    FAMILIES["longformer"] = entry
    with pytest.raises(SystemExit) as refused:
        run(dataset, tmp_path / "run", model=config, steps=1)
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert "the head that FAMILIES has for longformer" in error
    assert reason in error


class Targets(Objective):
    """A loss that is right, for faults to change one method of."""

    def count(self, batch):
        return batch.sample_ids.size

    def forward(self, encoder, outputs, piece):
        return LossSum(outputs.logits.mean(), 0)


FAULTS = {
    "a_name": ("Targets", "its entry in OBJECTIVES is 'Targets'; give a subclass of Objective"),
    "no_count": (type("Bare", (Objective,), {"forward": Targets.forward}), "Bare has no count; define it"),
    "count": ({"count": lambda self, batch: None}, "its count gives 'NoneType'; it must give a number"),
    "prepare": ({"prepare": lambda self, piece: None}, "its prepare gives 'NoneType'; it must give a dict"),
    "tensor": (
        {"forward": lambda self, encoder, outputs, piece: outputs.logits},
        "its forward gives a tensor of shape",
    ),
    "rows": (
        {"forward": lambda self, encoder, outputs, piece: LossSum(outputs.logits.mean((1, 2)), 0)},
        "its forward gives a tensor of shape [6]; it must give a LossSum whose sum is a tensor of one number",
    ),
    "correct": (
        {"forward": lambda self, encoder, outputs, piece: LossSum(outputs.logits.mean(), outputs.logits[0, 0])},
        "it must give a LossSum whose num_correct is a number",
    ),
    "nan": (
        {"forward": lambda self, encoder, outputs, piece: LossSum(outputs.logits.mean() * torch.nan, 0)},
        "Error: nan_loss is nan and the gradient norm is nan at step 1; lower --lr",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_an_objective_is_one_sentence_that_names_it(dataset, tmp_path, capsys, name):
    fault, sentence = FAULTS[name]
    OBJECTIVES[name] = type("Faulty", (Targets,), fault) if isinstance(fault, dict) else fault
    with pytest.raises(SystemExit):
        run(dataset, tmp_path / "run", objective=f"mlm+{name}", model="bert-tiny", steps=1)
    assert sentence in capsys.readouterr().err


def test_a_compiled_loss_that_is_none_is_one_sentence_too(dataset, tmp_path, capsys, monkeypatch):
    """Compiling, which on CPUs takes a minute, is left out, but for the graph that it needs."""
    compiled = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(Learner, "compile", compiled)
    OBJECTIVES["whole"] = type("Faulty", (Targets,), FAULTS["rows"][0])
    with pytest.raises(SystemExit):
        run(dataset, tmp_path / "run", objective="mlm+whole", model="bert-tiny", steps=1, compile="on")
    assert FAULTS["rows"][1] in capsys.readouterr().err


def test_a_buffer_that_grows_with_the_layers_is_refused(dataset, tmp_path, capsys):
    class Layers(Targets):
        def __init__(self, model, config):
            super().__init__(model, config)
            self.register_buffer("of_layers", torch.zeros(model.config.num_hidden_layers))

    OBJECTIVES["layers"] = Layers
    with pytest.raises(SystemExit):
        run(dataset, tmp_path / "run", objective="layers", model="bert-tiny", grow="1,2", grow_at=0.5, steps=2)
    assert (
        "--grow cannot keep the buffer objectives.layers.of_layers, which was [1] and is [2]" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("table", "entry", "sentence"),
    [
        (optim.OPTIMIZERS, lambda module, config: None, "--optimizer own: its entry in OPTIMIZERS gives 'NoneType'"),
        (optim.SCHEDULES, lambda step, steps, warmup_steps: None, "--schedule own gives None at step 0 of 1"),
        (optim.SCHEDULES, lambda step, steps, warmup_steps: -0.5, "--schedule own gives -0.5 at step 0 of 1"),
        (optim.SCHEDULES, lambda step, steps, warmup_steps: torch.ones(()), "it must give a number of 0 or more"),
    ],
)
def test_a_fault_of_an_optimizer_or_a_schedule_is_one_sentence(dataset, tmp_path, capsys, table, entry, sentence):
    table["own"] = entry
    option = "optimizer" if table is optim.OPTIMIZERS else "schedule"
    with pytest.raises(SystemExit) as refused:
        run(dataset, tmp_path / "run", **{option: "own"}, model="bert-tiny", steps=1, warmup=0)
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err


def test_buffers_of_an_objective_are_kept_at_a_growth_and_in_checkpoints(dataset, tmp_path):
    class Counter(Targets):
        def __init__(self, model, config):
            super().__init__(model, config)
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

        def forward(self, encoder, outputs, piece):
            self.passes += 1
            return super().forward(encoder, outputs, piece)

    OBJECTIVES["counter"] = Counter
    options = {"objective": "counter", "model": "bert-tiny", "grow": "1,2", "grow_at": 0.5}
    run(dataset, tmp_path / "run", **options, steps=4)
    beside = torch.load(tmp_path / "run" / "step-00000004" / "beside.pt", weights_only=True)
    assert beside["objectives.counter.passes"] == 4


def test_an_objective_without_predictions_trains_sub_networks(dataset, tmp_path):
    OBJECTIVES["targets"] = Targets
    log = run(dataset, tmp_path / "run", objective="targets", model="bert-tiny", steps=1, elastic="layers=1:2")
    assert log[0]["accuracy"] == 0


def test_parameters_of_an_objective_come_from_the_seed_also_with_init(dataset, tmp_path):
    OBJECTIVES["halves"] = Halves
    run(dataset, tmp_path / "first", steps=1, model="bert-tiny")
    start = {"model": "bert-tiny", "init": tmp_path / "first", "objective": "mlm+halves", "steps": 1}
    losses = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)  # whatever a program did before
        losses.append(run(dataset, tmp_path / str(number), **start, seed=seed, data_seed=0)[0]["halves_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_a_resumed_objective_of_another_shape_is_named(dataset, tmp_path, capsys):
    class Other(Halves):
        def __init__(self, model, config):
            super().__init__(model, config)
            self.head = torch.nn.Linear(model.config.hidden_size, 3)

    options = {"objective": "mlm+halves", "model": "bert-tiny"}
    for steps, kind in ((1, Halves), (2, Other)):
        OBJECTIVES["halves"] = kind
        with pytest.raises(SystemExit) if kind is Other else contextlib.nullcontext():
            run(dataset, tmp_path / "run", **options, steps=steps)
    assert "with other parameters (size mismatch for objectives.halves.head.weight: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"objective": "mlm+sop"},
            "--objective sop is unknown; give one of mlm, nsp, or run the file that adds your own",
        ),
        ({"objective": "mlm+"}, "--objective without a name is unknown; give one of mlm, nsp"),
        ({"optimizer": "lamb"}, "--optimizer lamb is unknown; give one of adamw, muon"),
        ({"schedule": "step"}, "--schedule step is unknown; give one of linear, cosine, wsd"),
        ({"objective": "mlm+nsp", "isolate_documents": ""}, "needs rows of packed and of pairs"),
    ],
)
def test_names_that_there_are_not_are_one_sentence(dataset, tmp_path, capsys, options, sentence):
    arguments = [item for item in flags(dataset.path, tmp_path / "run", steps=1, **options) if item]
    with pytest.raises(SystemExit) as refused:
        main(arguments, standalone_mode=False)
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err


def test_weight_decay_betas_epsilon_and_clipping_are_options_and_stand_in_run_json(dataset, tmp_path, monkeypatch):
    given = {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-7, "clip_norm": 0.5}
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, norm: norms.append(norm) or clip(p, norm))
    run(dataset, tmp_path / "run", steps=1, model="bert-tiny", **given)
    saved = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert {name: saved[name] for name in given} == given
    assert norms == [0.5]
    module = torch.nn.Linear(2, 2)
    decayed, plain = optim.build(module, Config(data="x", out="y", **given)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert (decayed["betas"], decayed["eps"]) == ((0.8, 0.95), 1e-7)


def test_a_run_resumes_with_its_own_settings_not_those_of_the_checkpoint(dataset, tmp_path):
    run(dataset, tmp_path / "run", steps=1, model="bert-tiny", weight_decay=0.5)
    run(dataset, tmp_path / "run", steps=2, model="bert-tiny", weight_decay=0.0)
    run(dataset, tmp_path / "plain", steps=1, model="bert-tiny", weight_decay=0.5)
    state = torch.load(tmp_path / "run" / "step-00000002" / "optimizer.pt", weights_only=True)
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.0, 0.0]


def test_the_data_seed_decides_order_and_masks_and_the_seed_the_weights(dataset, tmp_path):
    first = {}
    for name, seeds in {"a": (0, 0), "b": (1, 0), "c": (0, 1), "d": (0, None)}.items():
        more = {} if seeds[1] is None else {"data_seed": seeds[1]}
        run(dataset, tmp_path / name, steps=1, model="bert-tiny", seed=seeds[0], **more)
        trainer = json.loads((tmp_path / name / "step-00000001" / "trainer.json").read_text())
        first[name] = (entries(tmp_path / name)[0]["loss"], trainer["loader"]["seed"])
    assert first["a"] == first["d"]
    assert first["b"][1] == 0
    assert first["c"][1] == 1
    assert len({loss for loss, _ in first.values()}) == 3
