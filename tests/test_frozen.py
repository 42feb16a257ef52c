"""Builds give the bytes and short runs the figures that they gave when frozen.json was written (tools/freeze.py)."""

import contextlib

import freeze
import pytest

BUILDS = "wordpiece", "bpe", "chinese"
RUNS = "bert", "nsp", "packed", "lengths", "mix", "muon-bert", "grow", "elastic", "lora", "relations", "logits"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs scenarios by name, once each, in one folder; returns their results, name → result."""
    folder, results = tmp_path_factory.mktemp("frozen"), {}
    freeze.write_inputs(folder)
    lines = {name: line for stage in freeze.scenarios() for name, line in stage.items()}

    def results_of(*names):
        with contextlib.chdir(folder):
            for name in names:
                results[name] = results.get(name) or freeze.scenario(lines[name])
        return {name: results[name] for name in names}

    return results_of


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_gives_the_same_arrays_as_ever(run, build):
    assert freeze.beyond(run(build)) == []


@pytest.mark.slow
def test_runs_give_the_same_figures_as_ever_but_for_rounding(run):
    run("wordpiece", "jsonl", "dedup", "bert", "modernbert")  # what the others read
    assert freeze.beyond(run(*RUNS)) == []
    assert run("relations, resumed")["relations, resumed"] == run("relations")["relations"]
