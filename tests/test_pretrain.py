"""Runs of the trainer in this process: what they write, what they resume, what they refuse."""

import errno
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import json_of, refused, refuses, succeeds
from support.data import SPECIALS, built
from support.disk import contents, recorded, write
from support.encoding import load
from support.runs import (
    QUIET,
    TINY,
    cannot_read,
    changing,
    config_of,
    entries,
    flags,
    last_checkpoint,
    refused_run,
    remove_after,
    seal,
    train,
)
from transformers import AutoModelForMaskedLM, AutoTokenizer

import bertdata
from bertdata.torch import tensors
from bertrain import card, checkpoint, state
from bertrain.commands.trace import stream_of


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of `finished`."""
    return shutil.copytree(finished, tmp_path / "run")


def names(run, pattern="step-*"):
    return sorted(path.name for path in run.glob(pattern))


def test_a_run_writes_its_configuration_its_log_and_checkpoints(finished, dataset):
    resolved = json.loads((finished / "run.json").read_text())["resolved"]
    assert (resolved["steps"], resolved["dataset_id"]) == (6, dataset.dataset_id)
    log = entries(finished)
    assert [e["step"] for e in log if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in log if "validation_loss" in e] == [3, 6]
    assert all(0 <= e["data_wait"] <= 1 and e["tokens_per_s"] > 0 for e in log if "loss" in e)
    assert log[-2]["tokens"] == 6 * 6 * 32
    assert names(finished, "*step-*") == [f"step-{k:08d}" for k in range(1, 7)]
    assert (finished / "last").readlink() == Path("step-00000006")
    assert state.read(finished / "last").versions == card.versions()
    for name in ("run.json", "last/trainer.json", "last/checkpoint.json", "last/tokenizer_config.json"):
        text = (finished / name).read_text().rstrip("\n")  # of lines, for people
        assert text == json.dumps(json.loads(text), indent=1)


def test_a_checkpoint_is_an_ordinary_hugging_face_directory_with_the_same_loss(finished, dataset):
    model = AutoModelForMaskedLM.from_pretrained(finished / "last").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "last")
    text = "the stone under the river"
    ids = load(dataset.path).encode(text.encode() + b"\n", np.array([0, len(text) + 1]), sentences=False).ids
    assert tokenizer(text)["input_ids"][1:] == ids.tolist()  # [SEP] is stored after each document
    assert tokenizer.mask_token_id == dataset.special_tokens.mask
    total = count = 0
    for batch in bertdata.Loader(dataset, length=32, global_batch_size=16, split="validation", epochs=1):
        given = tensors(batch)
        number = int((given["labels"] != -100).sum())
        with torch.no_grad():
            total, count = total + model(**given).loss.item() * number, count + number
    stated = json_of("bertrain", "evaluate", "--checkpoint", finished, "--data", dataset.path)
    assert (stated["checkpoint"], stated["length"]) == (str(finished / "step-00000006"), 32)
    assert stated["reference"]["uniform"] == pytest.approx(np.log(dataset.special_tokens.vocab_size))
    assert stated["targets"] == count
    assert stated["loss"] == pytest.approx(total / count, rel=1e-4)
    tokens, text_bytes = dataset.num_tokens - dataset.num_documents, dataset.manifest.counts["text_bytes"]
    assert stated["bits_per_byte"] == pytest.approx(stated["loss"] / np.log(2) * tokens / text_bytes)
    assert entries(finished)[-1]["validation_loss"] == pytest.approx(total / count, rel=1e-4)


def test_a_checkpoint_is_complete_if_its_index_lists_all_of_it_and_none_is_a_link(copied):
    """Others are named and kept. What a kill left is removed, as its step may never be saved again."""
    for step, name in ((6, "config.json"), (5, "model.safetensors")):
        index = copied / f"step-0000000{step}" / "checkpoint.json"
        files = json.loads(index.read_bytes())["files"]
        del files[name]
        index.write_text(json.dumps({"files": files}))
    before = contents(copied / "step-00000006")
    (copied / "step-00000004" / "trainer.json").rename(copied.parent / "elsewhere")
    (copied / "step-00000004" / "trainer.json").symlink_to(copied.parent / "elsewhere")
    (copied / "damaged-00000004").mkdir()
    with recorded(copied.parent) as disk:
        newest, warnings = checkpoint.choose(copied)
    assert (newest, not disk.pending) == (copied / "step-00000003", True)
    assert ["trainer.json" in line for line in warnings] == [False, False, True]
    assert names(copied, "damaged-*") == [f"damaged-0000000{each}" for each in ("4", "4-2", "5", "6")]
    assert contents(copied / "damaged-00000006") == before
    newest.rename(copied / "step-100000006")  # any number of digits
    (copied / "step-00000002").rename(copied / "step-99999999")
    write(copied / ".step-100000009.tmp" / "model.safetensors", "unfinished")
    assert (checkpoint.choose(copied), names(copied, ".*.tmp")) == ((copied / "step-100000006", []), [])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("name", ["checkpoint.json", "optimizer.pt"])
def test_an_error_of_reading_that_may_pass_ends_a_run_and_changes_nothing(dataset, copied, monkeypatch, number, name):
    """A run takes such a checkpoint for no damaged one, and goes on from it once it can be read."""
    before = contents(copied)
    cannot_read(monkeypatch, copied / "step-00000006" / name, number)
    refused("bertrain", "pretrain", *flags(dataset.path, copied, steps=6), kind="unreadable")
    monkeypatch.undo()
    assert contents(copied) == before
    assert checkpoint.choose(copied) == (copied / "step-00000006", [])


def test_a_run_can_be_repeated_from_its_configuration(finished, tmp_path):
    """Flags beside it replace what says the same, as --epochs does --steps, and turn things off too."""
    out, record = tmp_path / "again", json.loads((finished / "run.json").read_bytes())
    record["config"]["isolate_documents"] = True
    (tmp_path / "run.json").write_text(json.dumps(record))
    given = ["--config", tmp_path / "run.json", "--out", out, "--epochs", "0.01", "--no-isolate-documents"]
    succeeds("bertrain", "pretrain", *given)
    assert entries(out)[0]["loss"] == entries(finished)[0]["loss"]
    assert entries(out)[-1]["step"] == 1


@pytest.mark.parametrize("masking", ["exact", "whole_word", "span"])
def test_a_run_whose_rows_lack_targets_stops_before_its_first_step(tmp_path, vocab, masking):
    """Nine of ten tokens are [UNK], so a row has two candidates of the five that it should have."""
    shards = built(tmp_path, "水 " * 270 + "the " * 30, tokenizer=vocab, validation=0).path
    refused_run(shards, tmp_path / "run", masking=masking, kind="too-short-to-mask", option="masking", given=masking)


def test_text_that_the_tokenizer_of_the_model_does_not_know_is_refused_for_the_tokenizer(finished, tmp_path):
    """Nothing of such a dataset can be predicted, as nearly all of its tokens are [UNK]."""
    vocabulary = write(tmp_path / "vocab.txt", *SPECIALS, "水")
    shards = built(tmp_path, "the stone\n\nthe river\n\n" * 20, tokenizer=str(vocabulary), validation=0).path
    given = {"init": last_checkpoint(finished), "model": ""}
    refused_run(shards, tmp_path / "run", **given, kind="tokenizer-differs")
    refused("bertrain", "evaluate", "--checkpoint", finished, "--data", shards, kind="tokenizer-differs")
    refused_run(shards, tmp_path / "run", kind="too-short-to-mask", option="mlm_probability")


def test_what_a_resumed_run_must_have_again_is_listed(dataset, other, copied, capsys):
    train(dataset.path, copied, steps=6, data_seed=0)  # as --seed
    assert capsys.readouterr().out.startswith("the run is complete, with step 6; ")
    assert names(copied)[-1] == "step-00000006"
    for options, kind, option, says in (
        ({"steps": 5}, "other-settings", "steps", ""),
        ({"seed": 1}, "other-settings", "seed", "seed 0 → 1"),
        ({"seed": 1, "data_seed": 0, "beta2": 0.9}, "other-settings", "beta2", "--beta2 0.98 → 0.9, --seed 0 → 1;"),
        ({"length": 16, "lr": 1.0}, "other-settings", "length", "length 32 → 16, lr 0.003 → 1.0"),
        ({"global_batch_size": 24, "steps": None, "tokens": "40K"}, "other-settings", "global_batch_size", "[24, 24]"),
        ({"model": "bert-tiny"}, "other-settings", "model", "modernbert-tiny → bert-tiny"),
        ({"shuffle": "blocks"}, "other-settings", "shuffle", ""),
        ({"resume": "no"}, "out-exists", "out", ""),
    ):
        given = {name: value for name, value in ({"steps": 9} | options).items() if value is not None}
        refused_run(dataset.path, copied, **given, kind=kind, option=option, says=says)
    refused_run(other.path, copied, steps=9, kind="other-settings", option="data")


def test_a_removed_option_is_ignored_at_its_default_and_named_otherwise(dataset, copied):
    """In run.json beside a checkpoint of version 1, whose weights can still be read. A run with --branch resumes."""
    file, last = copied / "run.json", copied / "step-00000006"
    config, saved = json.loads(file.read_bytes())["config"], json.loads((last / "trainer.json").read_bytes())
    del saved["options"]
    made_with = saved["made_with"] | {"optimizer": "adamw", "lr-scale": "", "seed": "0"}
    saved |= {"version": 1, "phases": [], "since_entry": {}, "made_with": made_with}
    (last / "trainer.json").write_text(json.dumps(saved))
    seal(last)
    for option, value in {"budget": "9s", "beta1": 0.5, "lr": 0.5, "average": 0.5}.items():
        file.write_text(json.dumps({"config": config | {option: value}}))
        refused_run(dataset.path, copied, steps=9, kind="other-settings", option=option)
    refused("bertrain", "pretrain", "--config", file, kind="unknown", option="average", given=0.5)
    file.write_text(json.dumps({"config": config | {"average": 0.0, "branch": "base"}}))
    train(dataset.path, copied, steps=9)


def test_a_run_directory_in_use_is_refused_and_so_is_one_of_others(dataset, tmp_path):
    with checkpoint.lock(tmp_path / "run"):
        refused("bertrain", "pretrain", *flags(dataset.path, tmp_path / "run"), kind="busy")
        assert (tmp_path / "run" / ".lock").exists()
    for name in ("notes.txt", "slurm-1.out", ".hidden", "mine.toml"):
        (tmp_path / "run" / name).touch()
    refused_run(dataset.path, tmp_path / "run", kind="out-exists", option="out", says="(notes.txt)")
    (tmp_path / "run" / "notes.txt").unlink()
    train(dataset.path, tmp_path / "run", steps=1, **QUIET)


def test_a_run_without_out_gets_a_new_directory_and_the_line_that_resumes_it(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--data", dataset.path, "--model", TINY, "--length", 32, "--global-batch-size", 6]
    first, *_ = succeeds("bertrain", "pretrain", *given, "--steps", 1).stdout.splitlines()
    resuming = shlex.split(first.partition("; ")[2].removesuffix(" resumes this run"))
    assert "the run is complete" in succeeds("bertrain", *resuming[1:]).stdout
    config = config_of(data=str(dataset.path), out="", model=TINY)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    made = [checkpoint.directory_of(config) for _ in range(2)]
    assert made[0] != made[1]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert checkpoint.directory_of(config) in made
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert checkpoint.directory_of(config) not in made


def test_a_damaged_checkpoint_is_named_and_one_of_others_is_not_compared(finished, tmp_path):
    directory = shutil.copytree(finished / "step-00000006", tmp_path / "step-00000001")
    (directory / "model.safetensors").write_bytes(b"\0" * 100)
    for path in (directory, tmp_path):
        with refuses("damaged", "checkpoint", says="model.safetensors"):
            checkpoint.find(path)
    (directory / "checkpoint.json").unlink()
    assert checkpoint.find(directory) == directory


def test_a_model_is_compared_by_its_content_not_by_its_path(dataset, tmp_path):
    """The same configuration elsewhere is the same model; another one in its place is not."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_bytes(Path(TINY).read_bytes())
    train(dataset.path, tmp_path / "run", steps=1, **QUIET | {"model": str(one)})
    values = json.loads(one.read_text()) | {"_name_or_path": "x", "transformers_version": "0"}
    two.write_text(json.dumps(dict(reversed(values.items()))))
    train(dataset.path, tmp_path / "run", steps=2, **QUIET | {"model": str(two)})
    assert entries(tmp_path / "run")[-1]["step"] == 2
    one.write_text(json.dumps(json.loads(one.read_text()) | {"num_hidden_layers": 1}))
    options = QUIET | {"model": str(one), "steps": 3}
    refused_run(dataset.path, tmp_path / "run", **options, kind="other-settings", option="model")


@pytest.mark.slow
def test_a_step_of_a_resumed_run_can_be_traced(dataset, tmp_path):
    run, phases = tmp_path / "run", changing(0.4, 0.7, length=[32, 48, 32], global_batch_size=[4, 6, 5])
    options = QUIET | {"steps": 10, "phase": phases, "seed": 3, "save_every": 1}
    before = train(dataset.path, run, **options)
    streams = [stream_of(run, step) for step in range(1, 11)]
    for step in (1, 5, 8):  # the stream of the next one is that of the loader, whose state is saved
        assert state.read(run / f"step-{step:08d}").loader.items() <= streams[step].items()
    remove_after(run, 4)
    train(dataset.path, run, **options)
    assert [stream_of(run, step) for step in range(1, 11)] == streams
    tokens = [entry["tokens"] for entry in before if "lr" in entry]
    assert np.diff([0, *tokens]).tolist() == [4 * 32] * 4 + [6 * 48] * 3 + [5 * 32] * 3
    assert [stream["position"] for stream in streams] == [0, 4, 8, 12, 0, 6, 12, 16, 21, 26]
