"""The page of inspect --html: what it says is what the dataset holds, and it needs nothing else to be shown."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.commands import refused, succeeds
from support.data import built, byte_level_bpe, data_of, import_ids, make_text, write_dataset

import bertdata
from bertdata.choices import MASKING_POLICIES
from bertdata.look.facts import report

OPTIONS = {"length": 32, "global_batch_size": 8, "world_size": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory, vocab):
    """A dataset with duplicates, a document without a token and words that the vocabulary lacks; its page."""
    folder = tmp_path_factory.mktemp("report")
    lines = [f"the cat sat {'on the mat ' * (number % 7)}" for number in range(60)]
    lines += ["\u200b", f"水 </script> [MASK] the 水 {'z' * 150}", "the cat sat", "<b>cat</b>"]
    options = {"tokenizer": vocab, "validation": 0.2, "dedup": True, "sentences": "line"}
    dataset = built(folder, "\n\n".join(lines), **options)
    html = report(dataset, **OPTIONS)
    return dataset, html, data_of(html)


def test_the_page_is_the_one_that_was_worked_out(made):
    """Of lines of text golden/report.json has the numbers, each with the word after it."""
    data, found = made[2], {name: made[2][name] for name in ("flow", "lengths", "tokens", "rows", "unknown")}
    found["flow"] = {name: value for name, value in data["flow"].items() if name != "text"}
    found["about"] = {name: data["about"][name] for name in ("splits", "steps_for", "tokens_per_document", "counts")}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    _, _, *lines = succeeds("bertdata", "inspect", made[0].path, *options, "--samples=packed").stdout.splitlines()
    found["inspect"] = [line for line in lines if str(made[0].path) not in line]
    for name, lines in (("text", data["flow"]["text"]), ("warnings", data["warnings"])):
        found[name] = [re.findall(r"[\d.,]*\d%?(?: \w+)?", line) for line in lines]
    assert found == json.loads((Path(__file__).parent / "golden" / "report.json").read_text())
    for row, kind in product(found["rows"], ("documents", "packed")):
        loader = bertdata.Loader(made[0], length=row["length"], samples=kind, masking=None)
        assert row[kind] == pytest.approx(loader.facts["pad_share"], abs=0.01)


@pytest.mark.parametrize("kind", ["windows", "documents", "packed"])
def test_samples_and_their_number_are_those_of_the_loader(made, kind):
    data = data_of(report(made[0], **OPTIONS, samples=kind))
    samples, options = data["samples"], {"length": 32, "samples": kind}
    assert samples["policies"] == list(MASKING_POLICIES)
    assert data["about"]["steps_for"]["samples"] == samples["kind"] == kind
    for seed in range(2):
        plain = bertdata.Loader(made[0], seed=seed, masking=None, **options)
        assert data["about"]["splits"]["train"]["samples_per_epoch"] == plain.num_samples
        for policy in samples["policies"]:
            loader = bertdata.Loader(made[0], seed=seed, masking=bertdata.Masking(policy=policy), **options)
            for epoch, rows in enumerate(samples["rows"][seed]):
                positions = epoch * plain.num_samples + np.arange(len(rows))
                batch, text = loader.read(positions), plain.read(positions)
                for row, ids, labels, found in zip(text.input_ids, batch.input_ids, batch.labels, rows, strict=True):
                    assert found["ids"] == row[: len(found["ids"])].tolist()
                    assert not row[len(found["ids"]) :].any()
                    places = np.flatnonzero(labels >= 0)
                    assert found["masks"][policy] == np.stack([places, ids[places]], 1).tolist()
                    assert all(str(token) in samples["spellings"] for token in [*found["ids"], *ids[places].tolist()])


def test_long_rows_make_no_larger_page(made, tmp_path):
    long = built(tmp_path, "the cat sat on the mat " * 11_000, tokenizer=str(made[0].path))
    html = report(long, length=8192, global_batch_size=8, world_size=1)
    samples, counted = data_of(html)["samples"], data_of(html)["tokens"]["counted"]
    rows = [row for seed in samples["rows"] for epoch in seed for row in epoch]
    assert (samples["length"], samples["shown"], len(rows), counted) == (8192, 512, 8 * 3 * 2, long.num_tokens)
    assert {len(row["ids"]) for row in rows} == {512}
    assert max(place for row in rows for masks in row["masks"].values() for place, _ in masks) < 512
    assert len(html.encode()) < 500_000


def test_the_command_writes_the_page_and_no_paths_but_that_of_the_dataset(made, tmp_path):
    arguments = ["--html", tmp_path / "page.html", "--length", 32, "--global-batch-size", 8, "--world-size", 2]
    assert succeeds("bertdata", "inspect", made[0].path, *arguments).stdout == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text() == made[1]
    without = write_dataset(tmp_path / "shards", [([7, 8, 3], [3], None)])
    refused(
        "bertdata", "inspect", without, "--html", tmp_path / "none.html", kind="tokenizer-not-found", option="tokenizer"
    )
    about = data_of((tmp_path / "page.html").read_text())["about"]
    assert about["tokenizer"].keys() == {"name", "kind", "vocab_size", "special_tokens"}


def test_a_dataset_without_rows_has_a_page_that_says_so(tmp_path):
    byte_level_bpe(260, ["<end>"]).save(str(tmp_path / "tokenizer.json"))
    np.array([1, 2, 0, 3, 0] * 20, np.uint16).tofile(tmp_path / "ids.bin")
    given = {"tokenizer": str(tmp_path / "tokenizer.json"), "end_token": "<end>"}
    import_ids(tmp_path / "ids.bin", tmp_path / "shards", **given)
    data = data_of(report(bertdata.open(tmp_path / "shards"), **OPTIONS))
    assert data["samples"] is None
    assert any("--special-tokens" in line for line in data["warnings"])
    assert "200 bytes of ids" in data["flow"]["text"][0]


def test_a_split_of_one_document_hides_no_pairs_of_the_others(tmp_path, vocab):
    dataset = built(tmp_path, make_text(10), tokenizer=vocab, validation=0.97, sentences="line")
    assert dataset.splits["train"].num_documents == 1
    options = {"length": 32, "global_batch_size": 4, "world_size": 1, "samples": "pairs"}
    data = data_of(report(dataset, **options))
    numbers = {name: split["samples_per_epoch"] for name, split in data["about"]["splits"].items()}
    assert numbers["validation"] > numbers["train"] == 0
    assert data["samples"]["split"] == "validation"
