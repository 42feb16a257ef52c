"""A recipe is a file of options: it is taken by name, it is printed, and what is given wins."""

import json
import tomllib
from pathlib import Path

import pytest
from helpers import refused, succeeds

from bertrain import recipes
from bertrain.config import Config
from bertrain.flags import command


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
    assert config == Config(data="d", out="o", **options_in(name))
    for option, value in options_in(name).items():
        assert f"--{option.replace('_', '-')} {value}" in said or option == "phase"
    assert ("phases" in said) == ("phase" in options_in(name))


def test_the_default_recipe_is_taken_where_nothing_chooses_another(options_of):
    assert options_of() == options_of("--recipe", "tiny")
    said, config = options_of("--lr", 1e-3, "--mlm-probability", "0.2")
    assert (config.lr, config.mlm_probability, config.optimizer) == (1e-3, 0.2, "muon")
    assert "--lr" not in said
    assert "--mlm-probability" not in said


@pytest.mark.parametrize(
    "given",
    [("--optimizer", "adamw"), ("--init", "run"), ("--teacher-cache", "answers"), ("--model", "modernbert-tiny")],
)
def test_model_init_optimizer_and_a_cache_change_nothing_else(options_of, given):
    said, config = options_of(*given)
    assert said == ""
    option = given[0][2:].replace("-", "_")
    assert config == Config(data="d", out="o", **{option: given[1]})


def test_another_model_or_optimizer_beside_a_recipe(options_of):
    _, config = options_of("--recipe", "tiny", "--model", "bert-tiny")
    assert config == Config(data="d", out="o", **options_in("tiny") | {"model": "bert-tiny"})
    _, config = options_of("--recipe", "tiny", "--optimizer", "adamw")
    assert (config.lr, config.muon_rate, config.global_batch_size) == (Config.lr, Config.muon_rate, 64)
    _, config = options_of("--recipe", "tiny", "--optimizer", "muon")
    assert {name: getattr(config, name) for name in options_in("tiny")} == options_in("tiny")


def test_an_option_replaces_what_says_the_same_in_a_file_whatever_its_value(options_of, tmp_path):
    saved = {"data": ["a", "b"], "weights": [1, 2], "warmup_steps": 9, "init": "run"}
    (tmp_path / "run.json").write_text(json.dumps({"config": saved}))
    default = Config(data="d")
    given = ["--config", tmp_path / "run.json", "--warmup", default.warmup, "--model", default.model]
    assert options_of(*given)[1] == Config(data="d", out="o")


def test_a_file_of_options_is_read_alone(options_of, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"config": {"model": "modernbert-small", "lr": 0.5}}))
    (tmp_path / "mine.toml").write_text('model = "modernbert-small"\nlr = 0.5\n')
    for name in ("run.json", "mine.toml"):
        said, config = options_of("--config", tmp_path / name)
        assert (config.optimizer, config.lr, said) == ("adamw", 0.5, "")


@pytest.mark.parametrize(
    ("content", "kind", "option"),
    [("lr = ", "malformed", "config"), ("lrr = 1", "other-version", "config"), ('lr = "x"', "malformed", "lr"),
     ("\xff", "not-a-run", "config")],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, content, kind, option):
    (tmp_path / "mine.toml").write_bytes(content.encode("latin-1"))
    refused(command(print), "--data", "d", "--config", tmp_path / "mine.toml", kind=kind, option=option)


def test_a_recipe_is_named_alone_and_by_its_name(tmp_path):
    refused(command(print), "--recipe", "huge", kind="unknown", option="recipe", given="huge")
    file = Path(__file__)
    refused(command(print), "--recipe", "tiny", "--config", file, kind="conflict", option="recipe", given="tiny")


def test_only_the_first_rank_says_it(options_of, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert options_of()[0] == ""
