"""A run is a list of phases: where they begin, what holds in them, and how streams go on across a border."""

import json
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import keys
from reference import phases as reference
from support.commands import refused, refuses
from support.data import assert_same
from support.disk import write
from support.families import model_of
from support.runs import (
    ALONE,
    QUIET,
    changing,
    config_of,
    refused_run,
    remove_after,
    seal,
    train,
    train_twice,
    weights_in,
)
from test_golden import VECTORS

import bertdata
from bertrain import pretrain, state
from bertrain.data import Stream, build_loader
from bertrain.models.encoder import set_rotary_bases
from bertrain.plan import Plan, resolve

SIZES = SimpleNamespace(samples=lambda paths, length: 1000 * len(paths), tokens=lambda path: len(path) * 10**6)
DEFAULT = config_of()
SET = ("length", "global_batch_size", "lr", "lr_end", "schedule", "decay_share", "warmup")
RUN = {name: getattr(DEFAULT, name) for name in SET}


def table_of(phases):
    """For each step of the schedule: the number of its phase, its rows, and its learning rate."""
    return [
        (phase.number, phase.rows_at(step), phase.curve.rate(step))
        for phase in phases
        for step in range(phase.start, phase.stop)
    ]


def require_same(found, expected):
    assert [line[:2] for line in found] == [tuple(line[:2]) for line in expected]
    assert [line[2] for line in found] == pytest.approx([line[2] for line in expected], rel=1e-12)


# ---------------------------------------------------------------------------------------------- where phases begin


@pytest.mark.parametrize("vector", VECTORS["phases"], ids=str)
def test_phases_are_those_of_the_specification(vector):
    run = {"lr": 1e-3} | vector["run"]
    phases = resolve(config_of(**run, phase=vector["phase"]), SIZES)
    assert [0, *(phase.stop for phase in phases)] == vector["borders"]
    made = table_of(phases)
    require_same(made, reference.table(RUN | run, vector["phase"]))
    require_same([made[step] for step in vector["steps"]], vector["table"])


ROWS = st.one_of(st.integers(1, 40), st.builds("{}..{}".format, st.integers(1, 40), st.integers(1, 40)))
SETS = st.fixed_dictionaries(
    {},
    optional={
        "length": st.sampled_from([16, 32, 48]),
        "global_batch_size": ROWS,
        "lr": st.sampled_from([1e-3, 0.5]),
        "lr_end": st.sampled_from([0.0, 0.1, 1.0]),
        "schedule": st.sampled_from(["constant", "linear", "cosine", "1-sqrt", "wsd"]),
        "warmup": st.sampled_from([0.0, 0.1, 0.55]),
    },
)
DURATION = st.one_of(
    st.integers(1, 9).map(lambda steps: {"steps": steps}),
    st.sampled_from(["900", "4K", "0.01M"]).map(lambda tokens: {"tokens": tokens}),
    st.sampled_from([0.01, 0.1]).map(lambda epochs: {"epochs": epochs}),
)


@st.composite
def phased(draw):
    """Options of a run, and its phases, which have durations of their own, or shares of it."""
    shares = draw(st.sampled_from([[], [1.0], [0.5, 0.5], [0.25, 0.35, 0.4], [0.1, 0.2, 0.3, 0.4]]))
    if not shares:
        return {}, [draw(DURATION) | draw(SETS) for _ in range(draw(st.integers(1, 4)))]
    phases = [{"share": share} | draw(SETS) for share in shares]
    if draw(st.booleans()):
        del phases[-1]["share"]
    return draw(st.sampled_from([{"steps": 37}, {"steps": 100}, {"epochs": 1.5}, {"tokens": "70K"}, {}])), phases


@settings(max_examples=8 * settings().max_examples)
@given(phased())
def test_steps_rows_and_rates_are_those_of_the_reference(drawn):
    run, phases = drawn
    config, expected = config_of(**run, phase=phases), reference.table(RUN | run, phases)
    if {number for number, *_ in expected} != set(range(1, len(phases) + 1)):
        with refuses("out-of-range", "phase"):
            resolve(config, SIZES)
        return
    made = resolve(config, SIZES)
    require_same(table_of(made), expected)
    assert sum(phase.samples() for phase in made) == sum(rows for _, rows, _ in expected)


BY_SIZE = {"data": ["x", "x" * 40], "steps": 3}
ROTARY = {"rope_base": 10.0, "rope_base_local": 2.0, "trains": "h", "masking": "uniform", "objective": "diffusion"}
WSD = {"steps": 100, "warmup": 0, "schedule": "wsd", "decay_share": 0.07, "lr": 1.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (BY_SIZE | {"mix_temperature": 0.5}, ": x 158114, " + "x" * 40 + " 1e+06, 256 rows"),
        ({"steps": 40, "warmup_steps": 40, "lr": 1.0}, "rate 2.44e-02 to 9.76e-01, peak 9.76e-01 (linear)\n"),
        (ROTARY, ", any share masked, rate 5.00e-04 to 1.25e-04"),
        (ROTARY | {"phase": [{"layers": 1}], "steps": 4}, "(linear), layers 1, trains h, rotary base 10 and 2\n"),
        ({"steps": 40, "warmup_steps": 41, "lr": 1.0}, "rate 2.00e-01 to 2.78e-02"),
        (WSD, ": x, 256 rows of 128 tokens, 15% masked, rate 1.00e+00 to 7.42e-02"),  # 7 steps decay, not 8
        ({"phase": [{}, {"steps": 3}]}, ("conflict", "phase")),
        ({"phase": [{"steps": 3}, {"share": 0.5}]}, ("conflict", "phase")),
        ({"phase": [{"share": 0.5}, {"share": 0.4}]}, ("conflict", "phase")),
        ({"share": 0.5}, ("conflict", "phase")),
        ({"phase": [{"steps": 3, "optimizer": "muon"}]}, ("unknown", "optimizer")),
        ({"phase": [{"steps": 3, "decay_share": 0.5}]}, ("needs-option", "decay_share")),
        ({"phase": [{"steps": 3, "rope_base": 1e4}, {"steps": 3}]}, ("conflict", "rope_base")),
        ({"elastic": "layers=1:3", "phase": [{"steps": 3, "trains": "layer"}]}, ("conflict", "elastic")),
        ({"steps": 1 << 62}, ("out-of-range", None)),
    ],
    ids=str,
)
def test_plans(options, expected):
    """expected: a part of the lines of the plan, or kind and option of the error."""
    config = {"data": "x"} | options
    if isinstance(expected, tuple):
        with refuses(*expected):
            resolve(config_of(**config), SIZES)
        return
    plan = Plan.make(config_of(**config), SIZES, world_size=1)
    assert expected in "".join(f"{plan.line(phase)}\n" for phase in plan.phases)


def test_an_option_that_a_phase_sets_is_refused_beside_the_file(tmp_path):
    lines = "steps = 2", "length = 16", "warmup = 0.5"
    path = write(tmp_path / "run.toml", 'data = "x"', "[[phase]]", *lines)
    for option in ("length", "steps", "warmup_steps"):
        given = f"--{option.replace('_', '-')}", 1
        refused(pretrain.main, "--config", path, *given, kind="conflict", option=option)
    given = ["--data", "x", "--recipe", "bert-base-nvidia", "--optimizer", "adamw"]  # its phases set rates of its own
    refused(pretrain.main, *given, kind="conflict", option="optimizer")


# ------------------------------------------------------------------------------------------------- streams and borders


@pytest.fixture
def mixed(dataset, other):
    """Phases that go back and forth between datasets and lengths; [1] and [2] are one mix, [5] is another."""
    one, two = str(dataset.path), str(other.path)
    both = {"data": [one, two], "weights": [7, 3]}
    return [
        {"steps": 2, "data": one, "length": 32},
        {"steps": 3, "length": 32} | both,
        {"steps": 2, "length": 32, "mlm_probability": 0.3} | both,
        {"steps": 2, "data": one, "length": 48},
        {"steps": 2, "data": two, "length": 32},
        {"steps": 3, "length": 32, "data": [two, one], "weights": [1, 1]},
        {"steps": 1, "data": one, "length": 48},
    ]


def batches_of(phases, *, rank=0, world_size=1):
    config = config_of(phase=phases, global_batch_size=7)
    return Stream(config, replace(ALONE, rank=rank, world_size=world_size))


def steps_of(batches, stop=15):
    """Yields the rows of the steps before one, as a run takes them."""
    while batches.step < stop:
        while batches.plan.phase_at(batches.step).number > batches.phase.number:
            batches.enter(batches.plan.phases[batches.phase.number])
        yield batches.next_batch()


def test_streams_go_on_where_they_were(mixed, dataset, other):
    """By a plain list of what was read of each dataset in rows of each length."""
    batches, datasets = batches_of(mixed), {str(each.path): each for each in (dataset, other)}
    read, position, before = Counter(), 0, None
    for batch in steps_of(batches):
        phase, length = batches.phase, batches.phase.options.length
        position = position if (phase.sources, length) == before else 0
        before = phase.sources, length
        for row in range(7):
            source, _ = keys.mixed(position, weights=[int(weight) for _, weight in phase.sources], seed=0)
            path, _ = phase.sources[source]
            loader = bertdata.Loader(datasets[path], length=length, masking=phase.masking)
            alone = loader.read(np.array([read[path, length]]))
            position, read[path, length] = position + 1, read[path, length] + 1
            assert np.array_equal(batch.input_ids[row], alone.input_ids[0])
            assert np.array_equal(batch.targets[row], alone.targets[0])
            assert batch.sources is None or batch.sources[row] == source
        for path, numbers in batches.read_by_source().items():
            assert numbers["tokens"] == sum(count * length for (of, length), count in read.items() if of == path)
    expected = {f"{datasets[path].dataset_id} {length}": count for (path, length), count in read.items() if count}
    assert batches.positions == expected


@pytest.mark.parametrize("stop", range(1, 15))
def test_a_state_restores_the_rows_of_every_step(mixed, tmp_path, stop):
    """Rank 0 saves the state, and the second of two ranks continues with it, or the only one."""
    ranks = 1 + stop % 2
    first, whole, then = (batches_of(mixed, rank=rank, world_size=ranks) for rank in (0, ranks - 1, ranks - 1))
    assert len([*steps_of(first, stop)]) == stop
    where = {"step": stop, "phase": first.phase.number, "phases": first.saved_phases()}
    saved = state.TrainState(**where, loader=first.loader.state_dict(), streams=first.positions)
    then.resume(tmp_path, state.TrainState(**json.loads(saved.content())), {})
    for one, two in zip([*steps_of(whole)][stop:], steps_of(then), strict=True):
        assert_same(one, two)
    assert then.read_by_source() == whole.read_by_source()


def test_what_options_and_phases_set_reaches_the_step(dataset, tmp_path):
    """A decay of 1 / rate leaves only the last update of a matrix. A phase with all layers does not grow the model."""
    phases = [
        {"steps": 2, "lr": 1e-3, "schedule": "constant", "weight_decay": 0.0, "layers": 2},
        {"steps": 2, "lr": 2e-3, "schedule": "constant", "weight_decay": 500.0, "trains": r"layer\.1"},
    ]
    log = train(dataset.path, tmp_path / "run", **QUIET, phase=phases, warmup=0, log_every=1, eval_masking=0.6)
    loader = bertdata.Loader(dataset, length=32, split="validation", masking=bertdata.Masking(probability=0.6))
    assert log[-1]["validation_targets"] == (loader.read(np.arange(loader.num_samples)).targets >= 0).sum()
    assert [entry["lr"] for entry in log if "lr" in entry] == [1e-3, 1e-3, 2e-3, 2e-3]
    assert not any("change" in entry for entry in log)
    before, after = (weights_in(tmp_path / "run" / f"step-{step:08d}") for step in (2, 4))
    for name in before:
        assert torch.equal(before[name], after[name]) == ("layer.1" not in name)
        assert not name.endswith("LayerNorm.weight") or after[name].min() > 0.5
        is_decayed = "layer.1" in name and before[name].ndim > 1
        assert (after[name].abs().max() < 0.02) == is_decayed or before[name].ndim == 1


def test_bases_of_rotary_positions_are_those_of_a_new_model(configs):
    """Also in a model that has others already, of which one stays."""
    weights = model_of(configs["modernbert"])
    for bases in ((5e5, 2e4), (None, 1e4)):
        set_rotary_bases(weights, *bases)
        kinds = {kind: part["rope_theta"] for kind, part in weights.config.rope_parameters.items()}
        assert kinds == {"full_attention": 5e5, "sliding_attention": bases[1]}
        buffers, expected = (dict(model.named_buffers()) for model in (weights, type(weights)(weights.config)))
        assert any("inv_freq" in name for name in buffers)
        for name, buffer in buffers.items():
            assert torch.equal(buffer, expected[name])


# --------------------------------------------------------------------------------------------- going on with a new file


def saved(phases):
    """Phases as a checkpoint has them."""
    return json.loads(json.dumps([phase.saved() for phase in resolve(config_of(phase=phases), SIZES)]))


FIRST = [{"steps": 4, "lr": 1e-3}, {"steps": 4, "lr": 2e-3}, {"steps": 4, "lr": 3e-3}]


@pytest.mark.parametrize(
    ("now", "option", "named"),
    [
        (FIRST, None, ""),
        ([FIRST[0], {"steps": 9, "lr": 2e-3, "schedule": "wsd"}], None, ""),  # the phase under way gets longer
        ([*FIRST[:2], {"steps": 1, "lr": 7.0, "length": 48}], None, ""),
        ([FIRST[0] | {"layers": None}, *FIRST[1:]], None, ""),  # of a method that the run did not have
        ([FIRST[0] | {"layers": 1}, *FIRST[1:]], "layers", "phase 1 layers None → 1"),
        ([FIRST[0], FIRST[1] | {"lr": 1.0, "global_batch_size": 8}], "lr", "phase 2 global_batch_size"),
        ([FIRST[0] | {"steps": 5, "mask_fraction": 0.3}, FIRST[1]], "mask_fraction", ", phase 1 steps 4 → 5"),
        ([FIRST[0] | {"data": ["x", "y"], "weights": [1, 2]}, *FIRST[1:]], "data", "phase 1 data"),
        (FIRST[:1], "phase", "phase 2 → 1, --steps 6 → 4"),
        ([FIRST[0], {"steps": 1, "lr": 2e-3}], "steps", "steps 6 → 5"),
    ],
)
def test_phases_that_have_begun_stay_as_they_were(now, option, named, tmp_path):
    before, after = state.TrainState(step=6, phase=2, phases=saved(FIRST)), state.TrainState(phases=saved(now))
    with refuses("other-settings", option, says=named) if option else nullcontext():
        state.require_same(before, after, tmp_path)


def test_a_run_continues_with_other_phases(dataset, tmp_path):
    """A path may be written differently. A model that was trained gets no more positions."""
    out, begun = tmp_path / "run", {"steps": 1, "data": str(dataset.path)}
    train(dataset.path, out, phase=[begun], **QUIET)
    log = train(f"{dataset.path}/", out, phase=[{"steps": 1}, {"steps": 1, "lr": 1e-4}], **QUIET)
    assert log[-1]["step"] == 2
    longer = [begun, {"steps": 1, "lr": 1e-4}, {"steps": 1, "length": 1024}]
    refused_run(dataset.path, out, **QUIET, phase=longer, kind="too-long", option="length")


# ------------------------------------------------------------------------------------ copied checkpoints and milestones


def as_version_1(path, *, with_phases):
    """Make the state of a checkpoint that of a branch of version 0.1.0, whose phases some of these wrote."""
    saved = json.loads((path / state.TRAINER).read_bytes())
    del saved["options"]
    saved |= {"version": 1, "since_entry": {}, "made_with": saved["made_with"] | {"model": "that of x"}}
    saved |= {"streams": saved["streams"] | {"another 32": 5}, "phases": saved["phases"] if with_phases else []}
    for each in (saved["loader"], *saved["phases"]):
        del each["masking"]["rule"]
        each["masking"]["random_from"] = "ordinary"
        each.get("rate", {}).pop("warmup", None)
    (path / state.TRAINER).write_text(json.dumps(saved))
    seal(path)


PLAIN = QUIET | {"schedule": "wsd", "decay_share": 0.5, "warmup_steps": 1, "save_every": 1, "keep": 20}


@pytest.mark.parametrize("last", [None, *(pytest.param(last, marks=pytest.mark.slow) for last in (3, 4))])
def test_a_copied_checkpoint_is_the_first_part_of_another_run(dataset, other, tmp_path, last):
    """To the bit: of one that decays earlier, or of phases, of which the first ends at the checkpoint or later.

    The last two are of version 0.1.0, and their masks follow rule 1 in all phases. They do not name their model.
    """
    train(dataset.path, tmp_path / "plain", **PLAIN, steps=12)
    first = {"steps": last, "schedule": "constant", "warmup_steps": 1}
    added = [{"steps": 2, "length": 48, "schedule": "1-sqrt"}, {"steps": 1, "data": str(other.path)}]
    options = PLAIN | ({"phase": [first, *added]} if last else {"steps": 6})
    out, name = tmp_path / "out", "step-00000003"
    shutil.copytree(tmp_path / "plain" / name, out / name)
    if last:
        as_version_1(out / name, with_phases=last == 4)
        (out / "log.jsonl").write_text('{"step": 3, "validation_loss": 5.0, "validation_accuracy": 0.1}\n')
    given = options | ({"model": "modernbert-tiny"} if last else {})
    train_twice(dataset.path, out, *((6, 4, 3) if last == 4 else (5, 3)), **given)
    train(dataset.path, tmp_path / "whole", **options)
    one, two = (run / "last" / "model.safetensors" for run in (out, tmp_path / "whole"))
    assert one.read_bytes() == two.read_bytes()
    log = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    assert {entry["stream"]["masking"]["rule"] for entry in log if "stream" in entry} == {1 if last else 2}


@pytest.mark.parametrize(("pattern", "more"), [("embeddings", {"lr_scale": ["embeddings=0"]}), ("nomatch", {})])
def test_a_phase_that_trains_nothing_is_refused_at_every_start(dataset, tmp_path, pattern, more):
    options, known = QUIET | more, {"kind": "no-match", "option": "trains"}
    phases = [{"steps": 1}, {"steps": 1, "trains": pattern}]
    refused_run(dataset.path, tmp_path / "run", phase=phases, **options, **known)
    train(dataset.path, tmp_path / "run", phase=phases[:1], **options)
    refused_run(dataset.path, tmp_path / "run", phase=phases, **options, **known)


def saved_in(run):
    """The steps of the checkpoints of a run."""
    return sorted(int(path.name[5:]) for path in run.glob("step-*/"))


def test_milestones_stay(dataset, tmp_path):
    """A step reads 192 tokens, and words in the share of the epoch that it reads."""
    words = dataset.manifest.counts["words"]["train"]
    samples = build_loader(config_of(data=str(dataset.path)), dataset, length=32).num_samples
    marks = ["tokens=384,900", f"words={words * 19 // samples + 1}"]  # the end of step 2, and step 5; within step 4
    options = QUIET | {"steps": 8, "save_at": marks, "keep": 1, "save_every": 3}
    for _ in range(2):
        train(dataset.path, tmp_path / "run", **options)
        assert saved_in(tmp_path / "run") == [2, 4, 5, 8]
        stated = json.loads((tmp_path / "run" / "step-00000005" / "trainer.json").read_text())["milestones"]
        assert stated == ["tokens=900"]
        remove_after(tmp_path / "run", 4)
    write(tmp_path / "later" / "step-00000002", "in the way")  # so the next checkpoint is the milestone
    train(dataset.path, tmp_path / "later", **options)
    assert saved_in(tmp_path / "later") == [3, 4, 5, 8]


def test_what_no_run_can_do_is_refused_before_the_first_step(dataset, other, tmp_path, configs):
    one, many = str(dataset.path), [str(dataset.path), str(other.path)]
    first, third = {"steps": 1, "data": [one]}, [0.3333333333, 0.6666666667]
    grown = {"phase": changing(0.5, layers=[1, None])}
    late = {"layers": [1, 1, None], "trains": ["", r"layer\.1\.", ""]}
    for options, kind, option in (
        ({"rope_base_local": 1e4, "model": "modernbert-tiny"}, "unsupported", "rope_base_local"),
        ({"phase": [first, first | {"data": many, "weights": third}]}, "malformed", "shards"),
        ({"phase": [first, first | {"data": [one, one], "weights": [1, 2]}]}, "conflict", "shards"),
        ({"phase": changing(0.5, layers=[1, 1])}, "out-of-range", "layers"),
        ({"phase": changing(0.3, 0.6, layers=[2, 1, None])}, "out-of-range", "layers"),
        ({"phase": changing(0.3, 0.6, layers=[1, 5, None])}, "out-of-range", "layers"),
        ({"phase": changing(0.3, 0.6, **late), "steps": 4}, "no-match", "trains"),
        *((grown | {"model": configs[name]}, "unsupported", "layers") for name in ("albert", "esm")),
    ):
        refused_run(one, tmp_path / "run", **QUIET | options, kind=kind, option=option)
        assert not (tmp_path / "run" / "log.jsonl").exists()
