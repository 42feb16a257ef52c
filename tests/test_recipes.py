"""Presets bring defaults; what is given wins, and where they do not belong they stay away."""

import json

import click
import pytest
from click.testing import CliRunner

from bertrain.config import Config, command
from bertrain.recipes import RECIPES, recipe


@pytest.fixture
def options_of():
    """Runs the command line without training; returns its output and the options of the run that would begin."""
    made = []

    def call(*arguments):
        result = CliRunner().invoke(command(made.append), ["--data", "d", "--out", "o", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.output, made.pop()

    return call


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_brings_its_recipe_and_says_so(options_of, name):
    said, config = options_of("--model", name)
    assert {option: getattr(config, option) for option in RECIPES[name]} == RECIPES[name]
    assert said.startswith(f"{name} brings --optimizer muon ")
    for value in RECIPES[name].values():
        assert str(value) in said


def test_every_recipe_is_of_options_that_exist_and_pass_the_checks():
    for options in RECIPES.values():
        Config(data="d", out="o", **options)


def test_the_default_model_brings_its_recipe_too(options_of):
    _, config = options_of()
    assert config.optimizer == RECIPES[Config.model]["optimizer"]


def test_what_is_given_wins(options_of):
    said, config = options_of("--lr", 1e-3, "--mlm-probability", "0.2")
    assert (config.lr, config.mlm_probability) == (1e-3, 0.2)
    assert config.optimizer == "muon"
    assert "--lr" not in said
    assert "--mlm-probability" not in said


@pytest.mark.parametrize(
    "given",
    [("--optimizer", "adamw"), ("--init", "run"), ("--teacher", "run"), ("--teacher-cache", "answers"),
     ("--model", "bert-tiny"), ("--model", "modernbert-base")],
)  # fmt: skip
def test_without_it_the_defaults_are_those_of_every_model(options_of, given):
    said, config = options_of(*given)
    assert said == ""
    plain = Config(data="d", out="o")
    assert [getattr(config, name) for name in ("optimizer", "lr", "mlm_probability", "global_batch_size")] == [
        getattr(plain, name) for name in ("optimizer", "lr", "mlm_probability", "global_batch_size")
    ]


def test_a_recipe_in_a_file_of_options_is_not_mixed_with_that_of_the_model(options_of, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": {"model": "modernbert-small", "optimizer": "adamw", "lr": 0.5}}))
    said, config = options_of("--config", file)
    assert (config.optimizer, config.lr, said) == ("adamw", 0.5, "")


def test_only_the_first_rank_says_it(options_of, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert options_of()[0] == ""


def test_the_options_of_a_recipe_are_options_of_the_command():
    flags = {parameter.name for parameter in command(lambda config: None).params if isinstance(parameter, click.Option)}
    assert all(options.keys() <= flags for options in RECIPES.values())
    assert recipe({"model": "none of these"}) == {}
