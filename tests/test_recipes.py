"""Presets have defaults; what is given wins, and where they do not belong they do not apply."""

import json

import pytest
from helpers import succeeds

from bertrain.config import Config, command
from bertrain.recipes import RECIPES, recipe


@pytest.fixture
def options_of():
    """Runs the command line without training; returns its output and the options of the run that would begin."""
    configs = []

    def call(*arguments):
        return succeeds(command(configs.append), "--data", "d", "--out", "o", *arguments).output, configs.pop()

    return call


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_has_its_recipe_and_says_so(options_of, name):
    said, config = options_of("--model", name)
    Config(data="d", **RECIPES[name])
    assert {option: getattr(config, option) for option in RECIPES[name]} == RECIPES[name]
    for option, value in RECIPES[name].items():
        assert f"--{option.replace('_', '-')} {value}" in said


def test_the_default_model_has_its_recipe_too_and_what_is_given_wins(options_of):
    assert options_of()[1].optimizer == RECIPES[Config.model]["optimizer"]
    assert recipe({"model": "none of these"}) == {}
    said, config = options_of("--lr", 1e-3, "--mlm-probability", "0.2")
    assert (config.lr, config.mlm_probability, config.optimizer) == (1e-3, 0.2, "muon")
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
    plain = Config(data="d")
    for name in ("optimizer", "lr", "mlm_probability", "global_batch_size"):
        assert getattr(config, name) == getattr(plain, name)


@pytest.mark.parametrize("name", RECIPES)
def test_help_says_which_presets_have_other_defaults(name):
    options = {option.name: option.help for option in command(lambda config: None).params}
    for option, value in RECIPES[name].items():
        assert f"{name}: {value}" in options[option]


def test_a_recipe_in_a_file_of_options_is_not_mixed_with_that_of_the_model(options_of, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": {"model": "modernbert-small", "optimizer": "adamw", "lr": 0.5}}))
    said, config = options_of("--config", file)
    assert (config.optimizer, config.lr, said) == ("adamw", 0.5, "")


def test_only_the_first_rank_says_it(options_of, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert options_of()[0] == ""
