"""The page of plot --html: what it says is what the runs logged, however their logs ended."""

import json
import os
import re
from pathlib import Path

import pytest
from support.commands import refused, succeeds
from support.data import data_of
from support.disk import put
from support.runs import entries

from bertrain.__main__ import main
from bertrain.commands import report

GOLDEN = Path(__file__).parent / "golden" / "curves"


def page(*runs):
    return data_of(report.report([Path(run) for run in runs]))


def write(run, log, *, end=""):
    put(run / "log.jsonl", "".join(f"{json.dumps(entry)}\n" for entry in log) + end)
    return run


def step(number, loss, **more):
    return {"step": number, "loss": loss, "lr": 0.1, "tokens": 10 * number} | more


def test_the_page_has_the_numbers_and_predictions_of_the_log(finished):
    log, (found,) = entries(finished), page(finished)["runs"]
    steps, evaluations = ([entry for entry in log if name in entry] for name in ("lr", "validation_loss"))
    for name in ("step", "tokens", "loss", "accuracy", "lr", "tokens_per_s", "grad_norm"):
        assert found["points"][name] == pytest.approx([entry[name] for entry in steps], rel=1e-5)
    for name in ("loss", "accuracy"):
        expected = [entry[f"validation_{name}"] for entry in evaluations]
        assert [one[name] for one in found["evaluations"]] == pytest.approx(expected, rel=1e-5)
    kept = {entry["step"]: entry["predictions"] for entry in log if "predictions" in entry}
    assert {one["step"]: one["rows"] for one in found["predictions"]} == kept
    assert kept.keys() == {3, 6}


def test_the_page_of_three_runs_is_the_one_that_was_worked_out():
    """one: a change, a loss that rises, waits and skipped steps. two/b: numbers that are not finite, a process that was
    resumed and killed. odd: damaged lines. Of the warnings page.json has the numbers."""
    data = page(*(GOLDEN / name for name in ("one", "two/b", "odd")))
    data["warnings"] = [re.findall(r"[\d.]*\d%?", line) for line in data["warnings"]]
    assert data == json.loads((GOLDEN / "page.json").read_text())
    assert [run["name"] for run in page(GOLDEN / "one", GOLDEN / "one")["runs"]] == [str(GOLDEN / "one")] * 2


@pytest.mark.parametrize(
    ("names", "has_one"),
    [(["one", "one"], True), (["two/b", "odd"], True), (["one", "two/b"], False), (["one", "odd"], False)],
)
def test_losses_of_runs_with_different_tokenizers_are_not_ranked(names, has_one):
    """Their files differ, or the losses by guessing, where both are known."""
    runs = [GOLDEN / name for name in names]
    alone = sum(len(page(run)["warnings"]) for run in runs)
    assert (page(*runs)["has_one_tokenizer"], len(page(*runs)["warnings"])) == (has_one, alone + (not has_one))


def test_a_run_without_an_evaluation_or_options_is_drawn_and_one_without_a_step_is_refused(tmp_path):
    (found,) = (data := page(write(tmp_path / "run", [step(1, 3.0)])))["runs"]
    assert (found["evaluations"], found["best"], found["predictions"], data["options"]) == ([], None, [], [])
    assert len(data["warnings"]) == 2
    empty = write(tmp_path / "empty", [{"step": 0, "stream": {"length": 8}}])
    for wrong, kind in ((empty, "empty"), (tmp_path / "none", "not-a-run")):
        refused(main, "plot", wrong, "--html", tmp_path / "x.html", kind=kind, option="runs", given=str(wrong))


def test_long_logs_keep_their_peaks_and_the_page_stays_small(tmp_path):
    log = [step(n, 3.0 + 1e-5 * n, grad_norm=n / 7, tokens_per_s=n / 3) for n in range(1, 4001)]
    log[3210]["loss"] = 99.0
    evaluated = {"validation_loss": 3.0, "predictions": [["a >b< c", "b", "c"]] * 8}
    log += [{"step": n} | evaluated for n in range(1, 4001, 4)]
    runs = [write(tmp_path / f"run{n}", log) for n in range(2)]
    data = page(*runs)
    for found in data["runs"]:
        points = found["points"]
        assert 900 < len(points["step"]) <= 1000
        assert (points["step"][0], points["step"][-1]) == (1, 4000)
        assert points["loss"][points["step"].index(3211)] == 99.0
        assert sorted(points["step"]) == points["step"]
        assert [one["step"] for one in found["evaluations"]][:: len(found["evaluations"]) - 1] == [1, 3997]
    assert sum(len(found["predictions"]) for found in data["runs"]) <= 200


def test_a_picture_and_a_page_are_both_written_of_any_path(tmp_path):
    """A path that is not UTF-8, and is markup; lines of a damaged log."""
    name = os.fsdecode(b"<img src=x onerror=alert(1)>\xff<!--")
    evaluated = {"step": 1, "validation_loss": 1.0, "predictions": [["</script>"] * 3]}
    odd = [{"loss": "x", "lr": [], "validation_loss": {}}, {"change": 5}, {"change": {"lr": 5}}]
    odd += [{"stream": {"masking": 5}}]
    log = [step(1, 3.0), evaluated, *({"step": 7} | entry for entry in odd)]
    run = write(tmp_path / name, log, end="[" * 100_000)
    picture, html = tmp_path / "curves.png", tmp_path / "runs.html"
    for about in ("[" * 100_000, "", "5", json.dumps({"config": {"data": name}})):
        (run / "run.json").write_text(about)
        assert succeeds(main, "plot", run, "--out", picture, "--html", html).output == f"{html}\n{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert html.read_text().startswith("<!doctype html>")
    assert "<img" not in html.read_text()
    data = data_of(html.read_text())
    assert data["runs"][0]["name"].endswith("/<img src=x onerror=alert(1)>?<!--")
    assert data["options"][0]["values"] == ["<img src=x onerror=alert(1)>?<!--"]
