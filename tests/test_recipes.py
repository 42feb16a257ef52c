"""A recipe is a file of options: it is taken by name, it is printed, and what is given wins."""

import json
import math
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.commands import refused, succeeds
from support.families import fast
from support.runs import QUIET, config_of, train

from bertrain import plan, recipes
from bertrain.cli import command


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
    assert config == config_of(data="d", out="o", **options_in(name))
    for option, value in options_in(name).items():
        assert f"--{option.replace('_', '-')} {value}" in said or option == "phase"
    assert ("bertrain doctor" in said) == ("phase" in options_in(name))


def test_a_large_file_is_named_and_a_recipe_is_printed_by_the_first_rank_alone(options_of, tmp_path, monkeypatch):
    for file in (tmp_path / "run.toml", tmp_path / "run.json"):  # too large, which is named before it is parsed
        file.touch()
        os.truncate(file, 1 << 40)
        how = {"kind": "malformed", "option": "config", "given": str(file), "says": "(more than 16 MiB)"}
        refused(command(print), "--data", "d", "--config", file, **how)
    (tmp_path / "mine.toml").write_text("lr = 0.5\n")
    said, config = options_of("--config", tmp_path / "mine.toml")
    assert (config.optimizer, config.lr, said) == ("adamw", 0.5, "")
    monkeypatch.setenv("RANK", "1")
    assert options_of("--recipe", "tiny")[0] == ""


PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
SIZES = SimpleNamespace(samples=lambda paths, length: 10**9, tokens=lambda path: 10**12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plan_of_a_recipe_is_what_was_published(name):
    """tests/published.json has the numbers of their authors, and where they stand."""
    config, stated = config_of(**options_in(name)), PUBLISHED[name]
    for option in stated["run"].keys() - {"source", "weight_decay"}:
        expected = stated["run"][option]
        assert getattr(config, option) == (1e9 if (option, expected) == ("clip_norm", None) else expected), option
    phases = plan.resolve(config, SIZES)
    for phase, there in zip(phases, stated["phases"], strict=True):
        highest = phases[0].curve.peak if config.optimizer == "stableadamw" else 1  # the rate by which they multiply it
        assert phase.options.weight_decay * highest == pytest.approx(there["weight_decay"])
        require_published(phase, there)


def require_published(phase, there):
    within, curve, length = there.get("within", 1e-9), phase.curve, there["length"]
    mean_places = there.get("row_tokens", length) / length  # of theirs, which do not count padding
    rows = [rows * mean_places / there.get("rows_divided_by", 1) for rows in there["rows"]]
    assert [phase.rows[0], phase.rows[-1]] == pytest.approx(rows, rel=within)
    assert (phase.options.length, curve.peak, curve.schedule) == (length, there["lr"], there["schedule"])
    assert curve.end == there.get("lr_end", 0.0)
    assert phase.masking.probability == pytest.approx(np.mean(there["mlm_probability"]), abs=1e-4)
    for option in ("rope_base", "rope_base_local", "mix_temperature"):
        assert getattr(phase.options, option) == there.get(option)
    shorter, warmup = there.get("steps_divided_by", 1), curve.warmup_steps if phase.start == curve.start else 0
    read = sum(phase.rows_at(step) * length for step in range(phase.start, phase.start + warmup))
    for found, name, near in (
        (phase.steps * shorter, "steps", within),
        (phase.samples() * length, "tokens", 1e-3),
        (warmup * shorter, "warmup_steps", 1e-9),
        (read, "warmup_tokens", 0.002),
    ):
        assert not there.get(name) or found == pytest.approx(there[name], rel=near), name
    assert bool(warmup) == bool(there.get("warmup_steps") or there.get("warmup_tokens"))


@pytest.mark.parametrize("name", fast(PUBLISHED, among=["gpt-bert", "esm2-8m"]))
def test_a_recipe_runs_at_the_size_of_a_tiny_model(dataset, configs, tmp_path, name):
    """Six steps a phase, the first of which has shorter rows."""
    options = options_in(name)
    kind = {"bert-base": "bert", "facebook/esm2_t6_8M_UR50D": "esm"}.get(options["model"], "modernbert")
    options.pop("warmup_steps", None)
    phases = []
    for given in options["phase"]:
        phase = {option: value for option, value in given.items() if option not in ("tokens", "warmup_steps")}
        rows = "2..4" if ".." in str(phase.get("global_batch_size")) else 4
        phases.append(phase | {"length": 48 if phases else 32, "global_batch_size": rows, "steps": 6})
    options |= QUIET | {"phase": phases, "model": configs[kind], "global_batch_size": 4}
    log = [entry["loss"] for entry in train(dataset.path, tmp_path / "run", **options) if "loss" in entry]
    assert (len(log), all(map(math.isfinite, log))) == (6 * len(phases), True)
