"""Runs of the trainer in this process: what they write, what they resume, what they refuse."""

import errno
import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from training import SMALL, entries, flags, losses, train
from transformers import AutoModelForMaskedLM, AutoTokenizer

import bertdata
from bertdata.look.trace import stream_of
from bertdata.write import build
from bertrain.evaluate import main as evaluate_main
from bertrain.pretrain import main as pretrain_main
from bertrain.runtime import checkpoint


def invoke(command, arguments):
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_run_writes_its_configuration_its_log_and_checkpoints(finished, dataset):
    written = json.loads((finished / "run.json").read_text())
    assert written["config"]["length"] == 32
    assert written["resolved"]["steps"] == 6
    assert written["resolved"]["dataset_id"] == dataset.dataset_id
    log = entries(finished)
    assert [e["step"] for e in log if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in log if "validation_loss" in e] == [3, 6]
    assert all(0 <= e["data_wait"] <= 1 and e["tokens_per_s"] > 0 for e in log if "loss" in e)
    assert log[-2]["tokens"] == 6 * 6 * 32
    assert sorted(p.name for p in finished.glob("step-*")) == [f"step-{k:08d}" for k in range(1, 7)]
    assert not list(finished.glob(".step*"))


def test_a_checkpoint_is_an_ordinary_hugging_face_directory_with_the_same_loss(finished, dataset):
    directory = finished / "step-00000006"
    model = AutoModelForMaskedLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "the stone under the river"
    assert tokenizer(text)["input_ids"][1:] == bertdata_ids(dataset, text)  # [SEP] is stored after each document
    assert tokenizer.mask_token_id == dataset.special_tokens.mask
    total = count = 0
    for batch in bertdata.Loader(dataset, length=32, global_batch_size=16, split="validation", epochs=1):
        labels = torch.from_numpy(batch.labels)
        mask = None if batch.attention_mask is None else torch.from_numpy(batch.attention_mask)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(batch.input_ids), attention_mask=mask).logits
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += int((labels != -100).sum())
    result = invoke(
        evaluate_main, ["--checkpoint", str(finished), "--data", str(dataset.path), "--show", "2", "--json"]
    )
    assert "Target" in result.stdout
    stated = json.loads(result.stdout.splitlines()[-1])
    assert stated["checkpoint"] == str(directory)
    assert stated["targets"] == count
    assert stated["loss"] == pytest.approx(total / count, rel=1e-4)
    assert entries(finished)[-1]["validation_loss"] == pytest.approx(total / count, rel=1e-4)


def bertdata_ids(dataset, text):
    from bertdata.tokenize.load import load

    data = text.encode() + b"\n"
    return load(str(dataset.path)).encode(data, bertdata_offsets(data), sentences=False).ids.tolist()


def bertdata_offsets(data):
    import numpy as np

    return np.array([0, len(data)])


@pytest.mark.parametrize("stopped_after", [1, 2, 3, 4, 5])
def test_stopped_at_any_step_and_resumed_the_losses_are_the_same_bits(finished, dataset, tmp_path, stopped_after):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    for later in range(stopped_after + 1, 7):
        shutil.rmtree(out / f"step-{later:08d}")
    assert losses(train(dataset.path, out, steps=6)) == losses(entries(finished))


def test_entries_over_several_steps_are_the_same_after_a_stop_between_them(dataset, tmp_path):
    options = {"steps": 7, "log_every": 3, "save_every": 2, "eval_every": 0}
    whole = train(dataset.path, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for later in (6, 7):
        shutil.rmtree(tmp_path / "part" / f"step-{later:08d}")
    assert losses(train(dataset.path, tmp_path / "part", **options)) == losses(whole)
    assert [entry["step"] for entry in whole if "loss" in entry] == [3, 6, 7]


def test_a_finished_run_has_nothing_to_do(finished, dataset, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    assert losses(train(dataset.path, out, steps=6)) == losses(entries(finished))
    assert "step-00000006" in capsys.readouterr().out


def test_the_newest_whole_checkpoint_counts_and_damaged_ones_are_named(finished, dataset, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    weights = out / "step-00000006" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    (out / "step-00000005" / "optimizer.pt").unlink()
    (out / "step-00000004" / "checkpoint.json").write_text("{")
    (out / "step-00000003" / "trainer.json").rename(out / "elsewhere")
    (out / "step-00000003" / "trainer.json").symlink_to(out / "elsewhere")
    found, passed_over = checkpoint.newest(out)
    assert found == out / "step-00000002"
    names = ["model.safetensors", "optimizer.pt", "checkpoint.json", "trainer.json"]
    for line, name in zip(passed_over, names, strict=True):
        assert name in line
    assert losses(train(dataset.path, out, steps=6)) == losses(entries(finished))
    assert capsys.readouterr().out.count("damaged and skipped") == 4
    assert checkpoint.newest(out)[1] == []


def test_a_damaged_newer_checkpoint_does_not_push_out_a_whole_one(dataset, tmp_path):
    out = tmp_path / "run"
    train(dataset.path, out, steps=3, keep=1)
    (out / "step-00000003" / "model.safetensors").write_bytes(b"")
    train(dataset.path, out, steps=2, keep=1)
    assert checkpoint.newest(out) == (out / "step-00000002", [])
    assert [path.name for path in out.glob("step-*")] == ["step-00000002"]


def test_only_the_newest_checkpoints_are_kept(dataset, tmp_path):
    train(dataset.path, tmp_path / "run", steps=5, save_every=2, keep=2)
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-00000004", "step-00000005"]


def test_an_old_checkpoint_that_cannot_be_removed_stays(dataset, tmp_path, monkeypatch, capsys):
    def refuse(path, **options):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path, **o: None if o else refuse(path))
    train(dataset.path, tmp_path / "run", steps=2, save_every=1, keep=1)
    shown = capsys.readouterr().out
    assert "a checkpoint that is not needed any more stays: " in shown
    assert "step-00000001 cannot be removed: Device or resource busy" in shown
    assert f"done: {tmp_path / 'run' / 'step-00000002'}" in shown


def test_a_log_with_bytes_that_a_crash_left_is_read_up_to_them(dataset, tmp_path):
    out = tmp_path / "run"
    whole = train(dataset.path, out, steps=2, eval_every=0)
    with open(out / "log.jsonl", "ab") as log:
        log.write(b"17\n\xff\xfe\x00")
    assert stream_of(out, 1)["position"] == 0
    again = train(dataset.path, out, steps=3, eval_every=0)
    assert [entry for entry in again if entry["step"] < 3] == whole


def test_accumulation_does_not_change_the_losses(finished, dataset, tmp_path):
    log = train(dataset.path, tmp_path / "run", steps=6, micro_batch_size=2)
    for ours, whole in zip(losses(log), losses(entries(finished)), strict=True):
        assert [x or 0 for x in ours] == pytest.approx([x or 0 for x in whole], rel=1e-4)


def test_a_run_can_be_repeated_from_its_configuration(finished, tmp_path):
    out = tmp_path / "again"
    result = invoke(pretrain_main, ["--config", str(finished / "run.json"), "--out", str(out), "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert entries(out)[0]["loss"] == pytest.approx(entries(finished)[0]["loss"])
    assert [e["step"] for e in entries(out) if "loss" in e] == [1, 2, 3]


def test_warm_up_longer_than_the_run_is_clamped_with_a_warning(dataset, tmp_path, capsys):
    log = train(dataset.path, tmp_path / "run", steps=3, warmup=10000)
    assert "warning: --warmup 10000 is longer than the run of 3 steps; using 1" in capsys.readouterr().out
    assert [e["lr"] for e in log if "loss" in e] == pytest.approx([1.5e-3, 3e-3, 1.5e-3])


@pytest.mark.parametrize("model", ["bert-tiny", "modernbert-tiny"])
def test_epochs_are_counted_in_whole_steps(dataset, tmp_path, model):
    log = train(dataset.path, tmp_path / "run", epochs=0.05, model=model, eval_every=0)
    assert bertdata.Loader(dataset, length=32).num_samples == 190
    assert log[-1]["step"] == 2  # 9.5 samples, 6 a step


def test_a_model_with_dropout_resumes_to_the_same_bits(dataset, tmp_path):
    config = tmp_path / "config.json"
    values = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    config.write_text(json.dumps(values | {"intermediate_size": 64, "hidden_dropout_prob": 0.3}))
    whole = train(dataset.path, tmp_path / "whole", steps=4, model=str(config))
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for later in (3, 4):
        shutil.rmtree(tmp_path / "part" / f"step-{later:08d}")
    assert losses(train(dataset.path, tmp_path / "part", steps=4, model=str(config))) == losses(whole)


def test_one_short_document_trains(tmp_path, vocab):
    (tmp_path / "corpus.txt").write_text("the stone under the river and the light of morning\n")
    build([tmp_path / "corpus.txt"], tmp_path / "shards", tokenizer=vocab, validation=0)
    log = train(tmp_path / "shards", tmp_path / "run", steps=2)
    assert all(entry["loss"] > 0 for entry in log)


def test_flags_override_a_configuration_also_where_one_replaces_another(finished, tmp_path):
    arguments = ["--config", str(finished / "run.json"), "--out", str(tmp_path / "again"), "--epochs", "0.05"]
    assert invoke(pretrain_main, arguments).exit_code == 0
    assert entries(tmp_path / "again")[-1]["step"] == 2
    (tmp_path / "run.json").write_text('{"config": {"data": "x", "out": "y", "steps": "three"}}')
    assert "--steps is 'three', which is not a whole number" in refused(["--config", str(tmp_path / "run.json")], 2)


def refused(arguments, code):
    result = invoke(pretrain_main, arguments)
    assert result.exit_code == code
    assert "Traceback" not in result.output
    return result.output.strip().splitlines()[-1]


def test_rows_with_nothing_to_predict_are_refused(tmp_path, vocab):
    (tmp_path / "corpus.txt").write_text("stone\n")
    build([tmp_path / "corpus.txt"], tmp_path / "shards", tokenizer=vocab, validation=0)
    said = refused(flags(tmp_path / "shards", tmp_path / "run", mlm_probability=0.05), 1)
    assert "nothing to predict" in said
    assert "1 samples" in said
    assert "ranks 1" in said
    assert "batch 6" in said


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"data": "nowhere"}, 1, "nowhere does not exist"),
        ({"model": "bert-huge"}, 2, "bert-huge is neither"),
        ({"mlm_probability": 0}, 2, "--mlm-probability is 0.0"),
        ({"lr": -1}, 2, "--lr is -1.0"),
        ({"length": 2}, 2, "length is 2"),
        ({"steps": 0}, 2, "--steps is 0"),
        ({"epochs": "nan"}, 2, "--epochs is nan"),
        ({"warmup": "inf"}, 2, "--warmup is inf"),
        ({"steps": 1, "epochs": 1}, 2, "one of them"),
        ({"seed": -1}, 2, "seed is -1"),
        ({"config": "nowhere.json"}, 2, "nowhere.json cannot be read"),
    ],
)
def test_wrong_options_end_in_one_sentence(dataset, tmp_path, options, code, said):
    data = options.pop("data", dataset.path)
    assert said in refused(flags(data, tmp_path / "run", **options), code)


def test_another_dataset_model_or_seed_is_not_resumed_into(finished, dataset, tmp_path, vocab):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    assert "seed was 0 and is 1" in refused(flags(dataset.path, out, seed=1, steps=9), 2)
    assert "--model modernbert-tiny" in refused(flags(dataset.path, out, model="bert-tiny", steps=9), 2)
    assert "already holds checkpoints" in refused(flags(dataset.path, out, resume="no", steps=9), 2)
    (tmp_path / "corpus.txt").write_text("the stone under the river\n")
    build([tmp_path / "corpus.txt"], tmp_path / "shards", tokenizer=vocab, validation=0)
    assert "dataset_id was" in refused(flags(tmp_path / "shards", out, steps=9), 2)


def test_a_run_directory_in_use_is_refused(dataset, tmp_path):
    with checkpoint.locked(tmp_path / "run"):
        assert "is in use by process" in refused(flags(dataset.path, tmp_path / "run"), 1)


def test_a_checkpoint_of_another_tokenizer_is_not_evaluated(finished, corpus, tmp_path):
    build([corpus], tmp_path / "shards", vocab_size=120, validation=0.2)
    result = invoke(evaluate_main, ["--checkpoint", str(finished), "--data", str(tmp_path / "shards")])
    assert result.exit_code == 2
    assert "is not the one" in result.output
    assert "Traceback" not in result.output


def test_a_damaged_checkpoint_is_not_evaluated(finished, dataset, tmp_path):
    directory = tmp_path / "checkpoint"
    shutil.copytree(finished / "step-00000006", directory)
    (directory / "model.safetensors").write_bytes(b"\0" * 100)
    for said in ("model.safetensors is not what", "can load"):
        result = invoke(evaluate_main, ["--checkpoint", str(directory), "--data", str(dataset.path)])
        assert (result.exit_code, said in result.output) == (1, True), result.output
        (directory / "checkpoint.json").unlink(missing_ok=True)


def test_evaluation_of_longer_rows_than_the_model_has_places_for_is_refused(finished, dataset):
    arguments = ["--checkpoint", str(finished), "--data", str(dataset.path), "--length", "9000"]
    result = invoke(evaluate_main, arguments)
    assert (result.exit_code, "--length 9000" in result.output) == (2, True), result.output


def test_evaluate_needs_a_checkpoint_and_a_split(finished, dataset, tmp_path):
    result = invoke(evaluate_main, ["--checkpoint", str(tmp_path), "--data", str(dataset.path)])
    assert (result.exit_code, "holds no checkpoint" in result.output) == (2, True)
    result = invoke(evaluate_main, ["--checkpoint", str(finished), "--data", str(dataset.path), "--split", "dev"])
    assert (result.exit_code, "no split 'dev'" in result.output) == (2, True)


def test_a_full_disk_while_saving_keeps_the_last_checkpoint(finished, dataset, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "step-00000006")

    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "optimizer.pt")

    monkeypatch.setattr(torch, "save", full)
    result = invoke(pretrain_main, flags(dataset.path, out, steps=6))
    assert result.exit_code == 1
    assert "Error: optimizer.pt: No space left on device; make room" in result.output
    assert not list(out.glob(".step*"))
    assert checkpoint.newest(out) == (out / "step-00000005", [])


def test_every_option_has_help():
    result = invoke(pretrain_main, ["--help"])
    for name in [*SMALL, "epochs", "steps", "warmup", "schedule", "resume", "config", "seed", "micro_batch_size"]:
        assert "--" + name.replace("_", "-") in result.output
