"""WRITERS: commands of bertrain that write models, caches and rows × a loss of power, calls that fail and a full disk.

A command that fails publishes nothing, and the same command then ends in the same bytes. tools/crash.py fails every
call; pretrain is in test_pretrain.py and test_promises.py.
"""

import errno
import os
from typing import NamedTuple

import pytest
from support.commands import invoke, succeeds, tuning
from support.data import write_labelled
from support.disk import contents, failing, recorded

from bertrain.__main__ import main


class Given(NamedTuple):
    run: object
    data: object
    rows: object
    vocab: str


@pytest.fixture
def given(bert_run, dataset, vocab, tmp_path):
    return Given(bert_run / "step-00000002", dataset.path, write_labelled(tmp_path / "rows.tsv"), vocab)


def ask(given):
    return ["--model", given.run, "--data", given.data, "--max-samples", 9, "--length", 32, "--top-k", 4]


WRITERS = {  # command → its arguments but --out; the name that makes it visible
    "finetune": (lambda given: tuning(given.run, given.rows, "x", "--seeds", 2), "result.json"),
    "teacher": (lambda given: [*ask(given), "--unit-samples", 4], "cache.json"),
    "augment": (lambda given: ["--checkpoint", given.run, "--train", given.rows, "--copies", 2], "out.tsv"),
    "merge": (lambda given: [given.run, given.run.with_name("step-00000001")], "out.tsv"),
    "extract": (lambda given: ["--checkpoint", given.run, "--layers", 1], "out.tsv"),
    "transplant": (lambda given: ["--checkpoint", given.run, "--tokenizer", given.vocab], "out.tsv"),
}
every_writer = pytest.mark.parametrize("name", WRITERS)


def command(name, given, folder):
    """The arguments of a command that writes to folder/out.tsv, a file or a directory."""
    return [name, *WRITERS[name][0](given), "--out", folder / "out.tsv"]


@every_writer
def test_a_name_is_visible_after_what_it_names_is_on_disk(name, given, tmp_path):
    with recorded(tmp_path) as disk:
        succeeds(main, *command(name, given, tmp_path / "new"))
    assert disk.renames[-1].name == WRITERS[name][1]
    assert not disk.pending or name == "augment"  # whose parts may come back


@every_writer
def test_what_fails_publishes_nothing_and_the_next_command_ends_in_the_same_bytes(name, given, tmp_path):
    with failing(-1, None) as calls:
        succeeds(main, *command(name, given, tmp_path / "complete"))
    expected = contents(tmp_path / "complete")
    for part in (0.1, 0.4, 0.7):
        folder, number = tmp_path / f"at {part}", int(part * len(calls))
        error = [KeyboardInterrupt, lambda: OSError(errno.EIO, os.strerror(errno.EIO))][part == 0.4]
        with failing(number, error):
            assert invoke(main, *command(name, given, folder)).exit_code == (1 if part == 0.4 else 130)
        assert WRITERS[name][1] not in (path.name for path in folder.rglob("*") if path.parent.name[0] != ".")
        succeeds(main, *command(name, given, folder))
        assert contents(folder) == expected


@every_writer
@pytest.mark.parametrize("num_bytes", [100, 2000])
def test_a_full_disk_is_one_sentence_and_the_next_command_continues(name, given, tmp_path, full_disk, num_bytes):
    with full_disk(100 if name == "augment" else num_bytes):
        result = invoke(main, *command(name, given, tmp_path / "new"))
    assert result.exit_code in (1, 2)
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert str(tmp_path / "new" / "out.tsv") in result.stderr
    assert ".tmp" not in result.stderr
    succeeds(main, *command(name, given, tmp_path / "new"))
