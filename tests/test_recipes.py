"""A recipe is a file of options: it is taken by name, it is printed, and what is given wins."""

import json
import math
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import refused, succeeds
from support.runs import QUIET, train

from bertrain import plan, recipes
from bertrain.cli import command
from bertrain.config import Config
from bertrain.plan import resolve


@pytest.fixture
def options_of():
    """Runs the command line without training; returns its output and the options of the run that would begin."""
    configs = []

    def call(*arguments):
        return succeeds(command(configs.append), "--data", "d", "--out", "o", *arguments).output, configs.pop()

    return call


def options_in(name):
    return tomllib.loads(recipes.file_of(name).read_text())


@pytest.mark.parametrize("name", recipes.NAMES)
def test_a_run_has_the_options_of_its_recipe_and_prints_them(options_of, name):
    said, config = options_of("--recipe", name)
    assert config == Config.make(data="d", out="o", **options_in(name))
    for option, value in options_in(name).items():
        assert f"--{option.replace('_', '-')} {value}" in said or option == "phase"
    assert ("bertrain doctor" in said) == ("phase" in options_in(name))


def test_a_large_file_is_named_and_a_recipe_is_printed_by_the_first_rank_alone(options_of, tmp_path, monkeypatch):
    for file in (tmp_path / "run.toml", tmp_path / "run.json"):  # too large, which is named before it is parsed
        file.touch()
        os.truncate(file, 1 << 40)
        refused(command(print), "--data", "d", "--config", file, kind="malformed", option="config", given=str(file))
    (tmp_path / "mine.toml").write_text("lr = 0.5\n")
    said, config = options_of("--config", tmp_path / "mine.toml")
    assert (config.optimizer, config.lr, said) == ("adamw", 0.5, "")
    monkeypatch.setenv("RANK", "1")
    assert options_of("--recipe", "tiny")[0] == ""


# ---------------------------------------------------------------------------------------------------- published recipes


PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
SIZES = SimpleNamespace(samples=lambda paths, length: 10**9, tokens=lambda path: 10**12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plan_of_a_recipe_is_what_was_published(name):
    """tests/published.json has the numbers of their authors, and where they stand."""
    config, stated = Config.make(data="d", **options_in(name)), PUBLISHED[name]
    for option, value in stated["run"].items():
        if option == "clip_norm" and value is None:
            assert config.clip_norm == 1e9
        elif option not in ("source", "weight_decay"):
            assert getattr(config, option) == value, option
    phases = resolve(config, SIZES)
    for phase, options, there in zip(phases, plan.options_of(config), stated["phases"], strict=True):
        require_published(phase, options, there, config.optimizer, phases[0].curve.peak)


def require_published(phase, options, there, optimizer, highest):
    within = there.get("within", 1e-9)
    mean_places = there.get("row_tokens", there["length"]) / there["length"]  # of theirs, which do not count padding
    rows = [rows * mean_places / there.get("rows_divided_by", 1) for rows in there["rows"]]
    assert [phase.rows[0], phase.rows[-1]] == pytest.approx(rows, rel=max(within, 1e-9))
    assert (options.length, phase.curve.peak, phase.curve.schedule) == (there["length"], there["lr"], there["schedule"])
    assert phase.curve.end == there.get("lr_end", 0.0)
    share = there["mlm_probability"]
    assert phase.masking.probability == pytest.approx(sum(share) / 2 if isinstance(share, list) else share, abs=1e-4)
    decay = options.weight_decay * (highest if optimizer == "stableadamw" else 1)  # theirs is that at the highest rate
    assert decay == pytest.approx(there["weight_decay"])
    for option in ("rope_base", "rope_base_local", "mix_temperature"):
        assert getattr(options, option) == there.get(option)
    shorter = there.get("steps_divided_by", 1)
    if "steps" in there:
        assert phase.steps == pytest.approx(there["steps"] / shorter, rel=within)
    if "tokens" in there:
        assert phase.samples() * options.length == pytest.approx(there["tokens"], rel=1e-3)
    warmup = phase.curve.warmup_steps if phase.start == phase.curve.start else 0
    if steps := there.get("warmup_steps"):
        assert warmup == steps / shorter
    if tokens := there.get("warmup_tokens"):
        read = sum(phase.rows_at(step) * options.length for step in range(warmup))
        assert read == pytest.approx(tokens, rel=0.002)
    if not (there.get("warmup_steps") or there.get("warmup_tokens")):
        assert warmup == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_runs_at_the_size_of_a_tiny_model(dataset, configs, tmp_path, name):
    """Six steps a phase, with rows and lengths in about the same ratios."""
    options = options_in(name)
    kind = {"bert-base": "bert", "facebook/esm2_t6_8M_UR50D": "esm"}.get(options["model"], "modernbert")
    given, drop = options.pop("phase"), {"tokens", "warmup_steps"}
    phases = [{name: phase[name] for name in phase.keys() - drop} for phase in given]
    lengths = sorted({phase.length for phase in plan.options_of(Config.make(data="d", **options_in(name)))})
    for phase in phases:
        rows = "2..4" if ".." in str(phase.get("global_batch_size")) else 4
        length = 32 + 16 * lengths.index(phase.get("length", lengths[0]))
        phase |= {"length": length, "global_batch_size": rows, "steps": 6}
    options.pop("warmup_steps", None)
    options |= QUIET | {"phase": phases, "model": configs[kind], "global_batch_size": 4}
    log = [entry["loss"] for entry in train(dataset.path, tmp_path / "run", **options) if "loss" in entry]
    assert (len(log), all(map(math.isfinite, log))) == (6 * len(phases), True)
