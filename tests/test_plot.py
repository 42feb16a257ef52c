"""The page of plot --html: what it says is what the runs logged, however their logs ended."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.commands import refused, succeeds
from support.data import data_of

from bertrain.commands import plot, report


def page(*runs):
    return data_of(report.report([Path(run) for run in runs]))


def write(run, entries, about=None, *, end="\n"):
    run.mkdir(parents=True)
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, entries)) + end)
    if about:
        (run / "run.json").write_text(json.dumps(about))
    return run


def step(number, loss, **more):
    return {"step": number, "loss": loss, "lr": 0.1, "tokens": 10 * number} | clock(2.0 * number) | more


def clock(seconds):
    """What an entry says of the time of a run, if it trained for all but a second of it."""
    return {"trained_s": seconds - 1, "compiled_s": 0.0, "evaluated_s": 1.0, "waited_s": 0}


def events_of(data):
    return [(event["step"], event["text"]) for event in data["runs"][0]["events"]]


def test_the_page_has_the_numbers_and_predictions_of_the_log(finished):
    log = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    steps, evaluations = ([entry for entry in log if name in entry] for name in ("lr", "validation_loss"))
    (found,) = page(finished)["runs"]
    for entry in steps:
        entry["seconds"] = sum(entry[f"{kind}_s"] for kind in ("trained", "compiled", "evaluated", "waited"))
    for name in ("step", "tokens", "seconds", "loss", "accuracy", "lr", "tokens_per_s", "grad_norm"):
        assert found["points"][name] == pytest.approx([entry[name] for entry in steps], rel=1e-5)
    assert [one["step"] for one in found["evaluations"]] == [3, 6]
    for one, entry in zip(found["evaluations"], evaluations, strict=True):
        (at,) = (each for each in steps if each["step"] == entry["step"])
        assert one["loss"] == pytest.approx(entry["validation_loss"], rel=1e-5)
        assert (one["tokens"], one["seconds"]) == pytest.approx((at["tokens"], at["seconds"]), rel=1e-5)
    best = min(evaluations, key=lambda entry: entry["validation_loss"])
    assert found["best"] == {"loss": pytest.approx(best["validation_loss"], rel=1e-5), "step": best["step"]}
    assert found["steps"] == 6
    assert found["parameters"] == json.loads((finished / "run.json").read_text())["resolved"]["parameters"]
    kept = {entry["step"]: entry["predictions"] for entry in log if "predictions" in entry}
    assert {one["step"]: one["rows"] for one in found["predictions"]} == kept
    assert kept.keys() == {3, 6}


def test_logs_that_end_anywhere_are_drawn(tmp_path):
    cut = write(tmp_path / "cut", [step(1, 3.0), step(2, 2.0)], end='\n{"step": 3, "lo')
    (found,) = (data := page(cut))["runs"]
    assert found["points"]["step"] == [1, 2]
    assert (found["evaluations"], found["best"], found["predictions"], data["options"]) == ([], None, [], [])
    assert len(data["warnings"]) == 3  # a line that is cut, no run.json, no evaluation
    odd = write(tmp_path / "odd", [[1], "text", {"loss": 2.0}, {"step": "x"}, step(5, 1.0)])
    assert any("odd: 4 invalid lines" in line for line in page(cut, odd)["warnings"])
    (odd / "run.json").write_text('{"config": 3, "resolved": {"steps": 9}, "history": [1]}')
    assert any("step 5 of 9" in line for line in page(odd)["warnings"])
    assert page(odd)["runs"][0]["points"]["step"] == [5]
    empty = write(tmp_path / "empty", [{"step": 0, "stream": {"length": 8}}])
    for wrong, kind in ((empty, "empty"), (tmp_path / "none", "not-a-run")):
        assert refused(plot.main, wrong, "--html", tmp_path / "x.html", kind=kind, option="runs").given == str(wrong)


def test_losses_that_are_not_finite_are_left_out_and_skipped_steps_said(tmp_path):
    entries = [
        step(1, 3.0),
        step(2, float("nan"), skipped=2),
        step(3, float("inf"), tokens_per_s=float("nan")),
        step(4, None, skipped=1),
    ]
    entries += [{"step": 4, "validation_loss": float("nan"), "validation_accuracy": 0.5}]
    data = page(write(tmp_path / "run", entries))
    assert data["runs"][0]["points"]["loss"] == [3.0, None, None, None]
    assert data["runs"][0]["evaluations"][0] | {"accuracy": 0.5} == data["runs"][0]["evaluations"][0]
    assert data["runs"][0]["best"] is None
    assert any("skipped 3 steps" in line for line in data["warnings"])


def test_long_logs_keep_their_peaks_and_the_page_stays_small(tmp_path):
    entries = [step(n, 3.0 + 1e-5 * n, grad_norm=n / 7, tokens_per_s=n / 3) for n in range(1, 4001)]
    entries[3210]["loss"] = 99.0
    evaluated = {"validation_loss": 3.0, "predictions": [["a >b< c", "b", "c"]] * 8}
    entries += [{"step": n} | evaluated for n in range(1, 4001, 4)]
    runs = [write(tmp_path / f"run{n}", entries) for n in range(2)]
    data = page(*runs)
    for found in data["runs"]:
        points = found["points"]
        assert 900 < len(points["step"]) <= 1000
        assert (points["step"][0], points["step"][-1]) == (1, 4000)
        assert points["loss"][points["step"].index(3211)] == 99.0
        assert sorted(points["step"]) == points["step"]
        assert [one["step"] for one in found["evaluations"]][:: len(found["evaluations"]) - 1] == [1, 3997]
    assert sum(len(found["predictions"]) for found in data["runs"]) <= 200


def test_seconds_of_a_resumed_run_go_on(tmp_path):
    """Of a process that logged until its second 3, and of one that logged first in its second 5."""
    steps = [step(1, 3.0, seconds=1.0, **clock(1.0)), step(2, 3.0, seconds=3.0, **clock(3.0))]
    steps += [step(3, 3.0, seconds=4.0, trained_s=None), step(4, 3.0, seconds=5.0, **clock(8.0))]
    steps.insert(2, {"step": 2, "validation_loss": 2.0})
    data = page(write(tmp_path / "run", steps))
    (found,) = data["runs"]
    assert found["points"]["seconds"] == [1.0, 3.0, None, 8.0]
    assert found["seconds"] == 8.0
    assert found["evaluations"][0]["seconds"] == 3.0


def test_changes_along_a_run_are_events(tmp_path):
    stream = {"length": 64, "global_batch_size": 8, "masking": {"probability": 0.3}, "position": 0}
    entries = [
        {"step": 0, "stream": stream},
        *[step(n, 3.0) for n in (1, 2)],
        {"step": 2, "change": {"layers": [2, 4]}},
        {"step": 2, "stream": stream | {"length": 128, "masking": {"probability": 0.15}, "position": 16}},
        step(3, 2.0),
    ]
    about = {"config": {"lr": 0.2}, "resolved": {"steps": 8}}
    data = page(write(tmp_path / "run", entries, about))
    at_two = [(2, text) for text in ("layers 2 → 4", "length 64 → 128", "probability 0.3 → 0.15")]
    assert events_of(data) == at_two
    assert [event["tokens"] for event in data["runs"][0]["events"]] == [20, 20, 20]
    assert any("step 3 of 8" in line for line in data["warnings"])


def test_what_differs_between_runs_is_said(tmp_path):
    one = write(tmp_path / "one", [step(1, 3.0)], {"config": {"lr": 0.1, "out": "one", "steps": None, "seed": 0}})
    about = {"config": {"lr": 0.2, "out": "two", "steps": None, "seed": 0}, "resolved": {"steps": 7}}
    two = write(tmp_path / "two" / "b", [step(1, 3.0)], about)
    assert [run["name"] for run in page(one, two)["runs"]] == ["one", "two/b"]
    assert [run["name"] for run in page(one, one)["runs"]] == [str(one)] * 2
    rows = {row["name"]: (row["values"], row["differs"]) for row in page(one, two)["options"]}
    assert rows.pop("steps, in effect") == (["", "7"], True)
    assert rows == {"lr": (["0.1", "0.2"], True), "steps": (["–", "–"], False), "seed": (["0", "0"], False)}


def test_losses_of_runs_with_different_tokenizers_are_not_ranked(tmp_path):
    def run(name, tokenizer=None, uniform=None):
        about = {"resolved": {"reference_loss": {"uniform": uniform, "unigram": 1.0}}} if uniform else {}
        path = write(tmp_path / name, [step(1, 3.0), {"step": 1, "validation_loss": 2.0}], about)
        if tokenizer:
            (path / "step-00000001").mkdir()
            (path / "step-00000001" / "tokenizer.json").write_text(tokenizer)
        return path

    a, same, other, unknown = run("a", "A"), run("same", "A"), run("other", "B"), run("unknown")
    few, many = run("few", uniform=4.0), run("many", uniform=8.0)
    for runs, has_one in (((a, same, unknown), True), ((a, other), False), ((few, many), False), ((few, a), True)):
        alone = sum(len(page(run)["warnings"]) for run in runs)
        assert (page(*runs)["has_one_tokenizer"], len(page(*runs)["warnings"])) == (has_one, alone + (not has_one))


def test_a_picture_and_a_page_are_both_written_of_any_path(tmp_path):
    """Which is not UTF-8, and is markup."""
    name = os.fsdecode(b"<img src=x onerror=alert(1)>\xff<!--")
    evaluated = {"step": 1, "validation_loss": 1.0, "predictions": [["</script>"] * 3]}
    run = write(tmp_path / name, [step(1, 3.0), evaluated], {"config": {"data": name}})
    picture, html = tmp_path / "curves.png", tmp_path / "runs.html"
    assert succeeds(plot.main, run, "--out", picture, "--html", html).output == f"{html}\n{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert html.read_text().startswith("<!doctype html>")
    assert "<img" not in html.read_text()
    data = data_of(html.read_text())
    assert data["runs"][0]["name"].endswith("/<img src=x onerror=alert(1)>?<!--")
    assert data["options"][0]["values"] == ["<img src=x onerror=alert(1)>?<!--"]


@pytest.mark.parametrize(("option", "name"), [("--html", "x.html"), ("--out", "x.png")])
def test_a_damaged_log_is_drawn_without_its_bad_lines(finished, tmp_path, option, name):
    run = shutil.copytree(finished, tmp_path / "run")
    with open(run / "log.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
        for odd in (
            {"loss": "x", "lr": [], "validation_loss": {}},
            {"change": 5},
            {"change": {"lr": 5}},
            {"stream": {"masking": 5}},
        ):
            file.write(json.dumps({"step": 7} | odd) + "\n")
    for content in ("[" * 100_000, "", "5"):
        (run / "run.json").write_text(content)
        succeeds(plot.main, run, option, tmp_path / name)


def test_a_page_warns_of_a_loss_that_rose_of_an_early_end_and_of_waiting(tmp_path):
    def warnings(name, *losses, steps=2, data_wait=0.1, lengths=(64, 64)):
        entries = [step(number, 3.0, data_wait=data_wait) for number in (1, 2)]
        for number, (loss, length) in enumerate(zip(losses, lengths, strict=False), 1):
            entries += [{"step": number - 1, "stream": {"length": length, "dataset_id": "0"}}]
            entries += [{"step": number, "validation_loss": loss}]
        return page(write(tmp_path / name, entries, {"config": {}, "resolved": {"steps": steps}}))["warnings"]

    assert warnings("well", 2.0, 2.01) == []
    assert warnings("longer", 2.0, 2.1, lengths=(64, 128)) == []  # losses of other rows are not compared
    for name, said, losses, more in (
        ("rose", "2.0000 at step 1 to 2.1000", (2.0, 2.1), {}),
        ("ended", "step 2 of 3", (2.0,), {"steps": 3}),
        ("waited", "20%", (2.0,), {"data_wait": 0.2}),
    ):
        (line,) = warnings(name, *losses, **more)
        assert said in line
