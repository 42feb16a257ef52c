"""What a newcomer tries: Ctrl-C, other options at a resume, the wrong column, a directory or a hub that is gone."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from click.testing import CliRunner
from training import SMALL, entries, flags, on_ranks, train
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bertdata.errors import DatasetError, UsageError
from bertdata.write import build
from bertrain import assemble, evaluate, finetune, pretrain, teacher
from bertrain import plan as plans
from bertrain.config import Config, read_options
from bertrain.models import build as models
from bertrain.objectives import OBJECTIVES
from bertrain.optim import OPTIMIZERS
from bertrain.run import Run
from bertrain.runtime import checkpoint, stop, watch
from bertrain.runtime.dist import World

DROPOUT = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
           "intermediate_size": 64, "hidden_dropout_prob": 0.3}  # fmt: skip


def at_step(monkeypatch, name, step, action):
    """Calls `action` before method `name` of a run, at a step."""
    method = getattr(Run, name)

    def called(self, *arguments, **options):
        if self.step == step:
            action()
        return method(self, *arguments, **options)

    monkeypatch.setattr(Run, name, called)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def wait_for(path):
    """Until a checkpoint is there, which is written beside training."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_saves_and_says_what_was_saved(dataset, tmp_path, monkeypatch, capsys):
    at_step(monkeypatch, "next_batch", 3, interrupt)
    with pytest.raises(SystemExit) as ended:
        train(dataset.path, tmp_path / "run", steps=9, save_every=100, eval_every=0)
    assert ended.value.code == 130
    shown = capsys.readouterr().out
    assert "stopped by SIGINT after step 4; its newest checkpoint is of step 4, and the same command continues" in shown
    assert checkpoint.newest(tmp_path / "run")[0].name == "step-00000004"


def test_a_second_ctrl_c_leaves_at_once_and_says_what_is_lost(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stop, "REPEAT_S", 0.0)
    saved = tmp_path / "run" / "step-00000002"
    at_step(monkeypatch, "next_batch", 3, lambda: (wait_for(saved), interrupt(), time.sleep(0.01), interrupt()))
    with pytest.raises(SystemExit) as ended:
        train(dataset.path, tmp_path / "run", steps=9, save_every=2, eval_every=0)
    assert ended.value.code == 130
    assert "interrupted at step 3; its newest checkpoint is of step 2" in capsys.readouterr().out
    assert checkpoint.newest(tmp_path / "run")[0].name == "step-00000002"


def test_one_ctrl_c_that_torchrun_repeats_at_once_is_one(dataset, tmp_path, monkeypatch):
    at_step(monkeypatch, "next_batch", 1, lambda: (interrupt(), interrupt()))
    with pytest.raises(SystemExit):
        train(dataset.path, tmp_path / "run", steps=9, save_every=100, eval_every=0)
    assert checkpoint.newest(tmp_path / "run")[0].name == "step-00000002"


@pytest.mark.parametrize("save_every", [2, 100])
def test_a_signal_during_an_evaluation_ends_it_and_the_checkpoint_is_there(dataset, tmp_path, monkeypatch, save_every):
    """Saved before the evaluation, or after it was left; the next start evaluates what was left out."""
    out, options = tmp_path / "run", {"steps": 4, "eval_every": 2, "save_every": save_every}
    whole = train(dataset.path, tmp_path / "whole", **options)
    with monkeypatch.context() as patched:
        at_step(patched, "evaluate", 2, lambda: interrupt(signal.SIGTERM))
        train(dataset.path, out, **options)
    assert checkpoint.newest(out)[0].name == "step-00000002"
    assert not any("validation_loss" in entry for entry in entries(out))
    again = train(dataset.path, out, **options)
    names = ("step", "loss", "validation_loss")
    assert [[e.get(name) for name in names] for e in again] == [[e.get(name) for name in names] for e in whole]


def test_a_checkpoint_that_was_begun_before_the_evaluation_is_there_after_its_error(dataset, tmp_path, monkeypatch):
    at_step(monkeypatch, "evaluate", 2, lambda: (_ for _ in ()).throw(MemoryError("too much")))
    with pytest.raises(SystemExit):
        train(dataset.path, tmp_path / "run", steps=4, eval_every=2, save_every=2)
    assert checkpoint.newest(tmp_path / "run")[0].name == "step-00000002"


# --------------------------------------------------------------------------------------------------------------- time


@pytest.mark.slow
def test_a_first_step_that_compiles_uses_up_no_budget(dataset, tmp_path, monkeypatch):
    at_step(monkeypatch, "next_batch", 0, lambda: time.sleep(3))
    log = train(dataset.path, tmp_path / "run", budget="6s", warmup=0.5, eval_every=0, save_every=10**6)
    rates = [entry["lr"] for entry in log if "lr" in entry]
    assert rates[1] < 0.1 * SMALL["lr"]  # half a warm-up would be over
    assert rates[-1] < 0.1 * SMALL["lr"]


def test_a_budget_has_no_last_step(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "BUDGET_STEPS", 4)
    log = train(dataset.path, tmp_path / "run", budget="2s", eval_every=0, save_every=10**6)
    assert log[-1]["step"] > 4


# -------------------------------------------------------------------------------------------------------------- ranks


def test_a_rank_that_sees_another_checkpoint_than_rank_0_is_refused(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "STALE_S", 0)
    train(dataset.path, tmp_path / "run", steps=1)
    choice = checkpoint.choose(tmp_path / "run")
    choice.check()
    for other in (choice._replace(index_sha256="0" * 64), choice._replace(path=tmp_path / "run" / "step-00000002")):
        with pytest.raises(DatasetError, match="another rank does not see the same checkpoint"):
            other.check()


def test_a_checkpoint_that_another_machine_sees_late_is_waited_for(dataset, tmp_path):
    """As on a network file system, whose clients remember for up to a minute that a name does not exist."""
    train(dataset.path, tmp_path / "run", steps=1)
    choice = checkpoint.choose(tmp_path / "run")
    choice.path.rename(tmp_path / "later")
    appears = threading.Timer(0.2, lambda: (tmp_path / "later").rename(choice.path))
    appears.start()
    choice.check()
    appears.join()


@pytest.mark.dist
@pytest.mark.slow
def test_rank_0_chooses_the_checkpoint_and_dropout_is_said_to_depend_on_ranks(dataset, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DROPOUT))
    options = {"model": tmp_path / "config.json", "eval_every": 0}
    for steps in (1, 2):
        code, out, err = on_ranks(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "run", steps=steps, **options))
        assert code == 0, err
        assert "the model has dropout, so another number of ranks would give another run" in out
    assert "resumed after step 1" in out


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("model", "length"), [("bert-tiny", 512), ("modernbert-tiny", 8192)])
def test_the_tokenizer_of_a_checkpoint_cuts_text_to_what_the_model_takes(dataset, tmp_path, model, length):
    train(dataset.path, tmp_path / "run", steps=1, model=model)
    directory = tmp_path / "run" / "step-00000001"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encoded = tokenizer("river " * 9000, truncation=True, return_tensors="pt")
    assert encoded["input_ids"].shape == (1, length)
    if model == "bert-tiny":
        AutoModelForMaskedLM.from_pretrained(directory)(**encoded)
        pair = tokenizer("the river", "the stone")
        assert set(pair["token_type_ids"]) == {0, 1}


def test_a_removed_run_directory_is_made_again_with_all_that_was_in_the_log(dataset, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    at_step(monkeypatch, "next_batch", 3, lambda: (wait_for(out / "step-00000002"), shutil.rmtree(out)))
    log = train(dataset.path, out, steps=5, eval_every=0, save_every=2)
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 5]
    assert checkpoint.newest(out)[0].name == "step-00000005"
    assert json.loads((out / "run.json").read_text())["config"]["steps"] == 5
    assert "was removed during the run" in capsys.readouterr().out


def test_a_resumed_run_says_what_changed_and_keeps_the_history(dataset, tmp_path, capsys):
    out = tmp_path / "run"
    train(dataset.path, out, steps=2, lr=1e-3)
    train(dataset.path, out, steps=3, lr=2e-3, global_batch_size=5)
    shown = capsys.readouterr().out
    assert "note: --lr was 0.001 and is 0.002 after step 2" in shown
    assert "note: --steps was 2 and is 3 after step 2" in shown
    assert "note: --global-batch-size was 6 and is 5 after step 2" in shown
    train(dataset.path, out, steps=4, lr=2e-3, global_batch_size=5)
    history = json.loads((out / "run.json").read_text())["history"]
    assert [start["after_step"] for start in history] == [2, 3]
    assert history[0]["changed"] == {"lr": [0.001, 0.002], "steps": [2, 3], "global_batch_size": [6, 5]}
    assert history[1]["changed"] == {"steps": [3, 4]}


def test_unknown_options_in_a_run_json_are_named(tmp_path):
    (tmp_path / "run.json").write_text('{"config": {"data": "x", "out": "y", "lrr": 1, "batch": 2}}')
    done = CliRunner().invoke(pretrain.main, ["--config", str(tmp_path / "run.json")])
    assert done.exit_code == 2
    assert "has options that do not exist: batch, lrr; remove them" in done.output


# -------------------------------------------------------------------------------------------------- models and the hub


def test_a_directory_with_a_configuration_is_a_model(dataset, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DROPOUT))
    built, _ = models.build(str(tmp_path), dataset.special_tokens, length=32, seed=0)
    assert built.config.hidden_size == 32
    with pytest.raises(UsageError, match="nor a directory with a config.json"):
        models.build(str(tmp_path / "none"), dataset.special_tokens, length=32, seed=0)


def test_weights_of_a_hub_that_does_not_answer_are_one_sentence_after_one_question(dataset, monkeypatch):
    asked = []

    def unreachable(self, name, timeout):
        asked.append((name, timeout))
        raise ConnectionError("no route to host")

    monkeypatch.setattr(models.huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(UsageError, match=r"--init org/model is no directory here, and .* does not give it \(no route"):
        models.start_from("org/model", dataset, length=32)
    assert asked == [("org/model", models.HUB_TIMEOUT_S)]


# ------------------------------------------------------------------------------------------------------------ warnings


def test_a_young_model_that_predicts_one_token_is_not_called_collapsed(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch, "COLLAPSED", 0.0)
    train(dataset.path, tmp_path / "run", steps=2, eval_every=1)
    assert "collapsed" not in capsys.readouterr().out
    monkeypatch.setattr(watch, "COLLAPSE_STEPS", 1)
    train(dataset.path, tmp_path / "late", steps=1)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "collapsed" in line]
    token = line.split("are the token ")[1].split("'")[1]
    assert token in json.loads((dataset.path / "tokenizer.json").read_text())["model"]["vocab"]


def test_a_corpus_without_a_validation_split_is_said_to_be_one(tmp_path, vocab, capsys):
    (tmp_path / "corpus.txt").write_text("the stone under the river and the light of morning\n")
    build([tmp_path / "corpus.txt"], tmp_path / "shards", tokenizer=vocab)
    capsys.readouterr()
    train(tmp_path / "shards", tmp_path / "run", steps=1)
    assert "has no validation split, so nothing is evaluated; build it with a larger --validation" in (
        capsys.readouterr().out
    )


# ------------------------------------------------------------------------------------------- labels, progress, results


def write_examples(path, rows):
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    return str(path)


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("promises") / "run"
    train(dataset.path, out, model="bert-tiny", steps=1)
    return out


def tune(run, tmp_path, data, *more):
    arguments = ["--checkpoint", run, "--train", data, "--dev", data, "--out", tmp_path / "out", "--seeds", 1]
    arguments += ["--epochs", 1, *more]
    return CliRunner().invoke(finetune.main, [str(argument) for argument in arguments])


def test_labels_that_are_none_are_refused_and_many_are_warned_of(run, tmp_path):
    good = write_examples(tmp_path / "good.tsv", [("the river", n % 2) for n in range(8)])
    done = tune(run, tmp_path, good, "--label", "0")
    assert (done.exit_code, "--text and --label are the same column, 0" in done.output) == (2, True), done.output
    empty = write_examples(tmp_path / "empty.tsv", [("the river", 1), ("the stone", ""), ("light", 0)])
    done = tune(run, tmp_path, empty)
    assert (done.exit_code, "line 2 has no value for column 1" in done.output) == (2, True), done.output
    many = write_examples(tmp_path / "many.tsv", [("the river", f"text {n}") for n in range(30)])
    assert "has 30 different labels in 30 rows; is --label -1 the column" in tune(run, tmp_path, many).output
    assert "different labels" not in tune(run, tmp_path, good).output


class Bar:
    """Stands for tqdm, and remembers."""

    made: list = []

    def __init__(self, *, total, **options):
        self.total, self.n = total, 0
        Bar.made.append(self)

    def update(self, count=1):
        self.n += count

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def test_long_commands_show_progress_and_end_in_a_table(run, dataset, tmp_path, monkeypatch):
    good = write_examples(tmp_path / "good.tsv", [("the river", n % 2) for n in range(40)])
    for module in (evaluate, finetune, teacher):
        monkeypatch.setattr(module, "tqdm", Bar)
    Bar.made.clear()
    common = ["--checkpoint", str(run), "--data", str(dataset.path)]
    done = CliRunner().invoke(evaluate.main, common)
    assert done.exit_code == 0, done.output
    for word in ("loss ", "nats a token", "accuracy", "perplexity", "bits per byte"):
        assert word in done.stdout
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(done.stdout.splitlines()[-1])
    assert json.loads(CliRunner().invoke(evaluate.main, [*common, "--json"]).stdout)["loss"] > 0
    tuned = tune(run, tmp_path, good, "--batch-size", 10)
    assert "dev accuracy" in tuned.stdout
    assert "median" in tuned.stdout
    assert not tuned.stdout.rstrip().endswith("}")
    arguments = ["--model", run, "--data", dataset.path, "--out", tmp_path / "logits", "--length", 32]
    arguments += ["--max-samples", 50, "--unit-samples", 20, "--top-k", 4]
    assert CliRunner().invoke(teacher.main, [str(argument) for argument in arguments]).exit_code == 0
    assert len(Bar.made) == 4
    assert all(bar.n == bar.total > 0 for bar in Bar.made), [(bar.n, bar.total) for bar in Bar.made]
    assert [bar.total for bar in Bar.made[2:]] == [4, 3]


def test_help_groups_the_options(tmp_path):
    shown = CliRunner().invoke(pretrain.main, ["--help"]).output
    places = [shown.index(f"\n{name}:") for name in ("Data", "Model", "Schedule and optimizer", "Distillation",
                                                     "Speed and memory", "Checkpoints and log", "Other")]  # fmt: skip
    assert places == sorted(places)
    for option in ("weight-decay", "beta1", "beta2", "epsilon", "clip-norm", "data-seed", "optimizer"):
        assert f"--{option} " in shown


def test_the_doctor_builds_what_pretraining_does(dataset, tmp_path, monkeypatch):
    """Options, the teacher and objectives included, are refused by both alike."""
    from bertrain import doctor

    arguments = flags(dataset.path, tmp_path / "run", teacher=tmp_path / "nothing", steps=1)
    for option in ("save_every", "eval_every", "log_every", "keep"):
        with contextlib.suppress(ValueError):
            at = arguments.index("--" + option.replace("_", "-"))
            del arguments[at : at + 2]
    done = CliRunner().invoke(doctor.main, [str(argument) for argument in arguments])
    assert done.exit_code == 1
    assert "holds no checkpoint" in done.output
    wrong = CliRunner().invoke(doctor.main, flags(dataset.path, tmp_path / "run", steps=1, schedule="none"))
    assert "--schedule none is unknown" in wrong.output
    assert wrong.exit_code == 1


def test_old_checkpoints_are_resumed(dataset, tmp_path):
    """Those of before objectives had names: one list of sums, and a projection without a prefix."""
    out, options = tmp_path / "run", {"model": "bert-tiny", "steps": 3, "log_every": 2}
    whole = train(dataset.path, tmp_path / "whole", **options)
    train(dataset.path, out, **options)
    for name in ("step-00000002", "step-00000003"):
        shutil.rmtree(out / name)
    trainer = out / "step-00000001" / "trainer.json"
    content = json.loads(trainer.read_text())
    assert content["since_entry"].keys() == {"mlm"}
    content["since_entry"] = [*content["since_entry"]["mlm"], 0.0, 0.0, 6.0]
    del content["optimizer"]
    trainer.write_text(json.dumps(content))
    index = json.loads((out / "step-00000001" / "checkpoint.json").read_text())
    index["files"]["trainer.json"] = {"bytes": trainer.stat().st_size, "sha256": checkpoint.digest(trainer)[0]}
    (out / "step-00000001" / "checkpoint.json").write_text(json.dumps(index))
    assert [e.get("loss") for e in train(dataset.path, out, **options)] == [e.get("loss") for e in whole]


def test_a_projection_without_a_prefix_is_read(dataset, tmp_path):
    train(dataset.path, tmp_path / "big", model="bert-tiny", steps=1)
    out, options = tmp_path / "run", {"model": "bert-tiny", "teacher": str(tmp_path / "big"), "distil": "hidden"}
    train(dataset.path, out, steps=1, **options)
    beside = torch.load(out / "step-00000001" / checkpoint.BESIDE, weights_only=True)
    assert beside.keys() == {f"objectives.distil.projection.{name}" for name in ("weight", "bias")}
    whole = train(dataset.path, out, steps=2, **options)
    shutil.rmtree(out / "step-00000002")
    path = out / "step-00000001" / checkpoint.BESIDE
    torch.save({name.removeprefix("objectives.distil."): tensor for name, tensor in beside.items()}, path)
    index = json.loads((out / "step-00000001" / "checkpoint.json").read_text())
    index["files"][checkpoint.BESIDE] = {"bytes": path.stat().st_size, "sha256": checkpoint.digest(path)[0]}
    (out / "step-00000001" / "checkpoint.json").write_text(json.dumps(index))
    assert [e.get("distil_loss") for e in train(dataset.path, out, steps=2, **options)] == [
        e.get("distil_loss") for e in whole
    ]


def test_a_run_with_other_parameters_is_not_resumed_into(dataset, tmp_path, monkeypatch):
    train(dataset.path, tmp_path / "run", model="bert-tiny", steps=1)
    monkeypatch.setitem(OPTIMIZERS, "other", OPTIMIZERS["adamw"])
    done = CliRunner().invoke(
        pretrain.main, [str(x) for x in flags(dataset.path, tmp_path / "run", model="bert-tiny", optimizer="other")]
    )
    assert done.exit_code == 2
    assert "--optimizer adamw, and --optimizer other was given" in done.output


@pytest.mark.parametrize("model", ["bert-tiny", "modernbert-tiny"])
def test_a_model_takes_what_the_tokenizer_of_its_checkpoint_gives(dataset, tmp_path, model):
    """ModernBERT has no token types, whatever the tokenizer of the dataset names."""
    train(dataset.path, tmp_path / "run", steps=1, model=model)
    directory = tmp_path / "run" / "step-00000001"
    encoded = AutoTokenizer.from_pretrained(directory)("the river", "the stone", return_tensors="pt")
    assert ("token_type_ids" in encoded) == (model == "bert-tiny")
    AutoModelForMaskedLM.from_pretrained(directory)(**encoded)


# ------------------------------------------------------------------------------------------------- ends and objectives


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stopped_run_is_not_said_to_be_done(dataset, tmp_path, monkeypatch, capsys, number):
    at_step(monkeypatch, "next_batch", 1, lambda: interrupt(number))
    train(dataset.path, tmp_path / "run", steps=9, eval_every=0)
    shown = capsys.readouterr().out
    assert f"stopped by {number.name} after step 2" in shown
    assert "done: " not in shown


def test_a_finished_run_reads_its_last_checkpoint_no_more(dataset, tmp_path, monkeypatch, capsys):
    """Only rank 0 knows --out, and it has just written what it names."""
    monkeypatch.setattr(checkpoint, "find", lambda path: pytest.fail("read again"))
    train(dataset.path, tmp_path / "run", steps=2, eval_every=0)
    assert f"done: {tmp_path / 'run' / 'step-00000002'}" in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.slow
def test_an_objective_that_needs_no_logits_trains_on_two_ranks_as_on_one(dataset, tmp_path):
    options = {"objective": "nsp", "model": "bert-tiny", "steps": 3, "eval_every": 0, "micro_batch_size": 2}
    alone = train(dataset.path, tmp_path / "alone", **options)
    code, out, err = on_ranks(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "two", **options))
    assert code == 0, err
    assert "unigram" not in out.split("step 3/3")[1]  # no loss of tokens
    for ours, theirs in zip(entries(tmp_path / "two"), alone, strict=True):
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"objective": "mlm+mlm"}, "names an objective twice"),
        ({"objective": "half"}, "torch does not allow this name"),
        ({"lr": None}, "--lr is None, which is not a number"),
        ({"objective": None}, "--objective is None, which is not a text"),
        ({"steps": 5.5}, "--steps is 5.5, which is not a whole number"),
        ({"isolate_documents": 1}, "--isolate-documents is 1, which is not true or false"),
        ({"seed": True}, "--seed is True, which is not a whole number"),
    ],
)
def test_options_of_another_type_or_name_are_one_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        assemble.check_names(Config(data="x", out="y", **options))


def test_older_names_of_options_are_read(tmp_path):
    (tmp_path / "run.json").write_text('{"config": {"data": "x", "out": "y", "log": "tensorboard"}}')
    assert read_options(tmp_path / "run.json") == {"data": "x", "out": "y", "log_to": ["tensorboard"]}
    (tmp_path / "run.json").write_text('{"config": {"data": "x", "out": "y", "tensorboard": false}}')
    assert read_options(tmp_path / "run.json") == {"data": "x", "out": "y"}


@pytest.mark.parametrize("content", [b"[]", b"\xff", b'{"config": null}', b"[" * 100_000])
def test_what_is_no_run_json_is_one_sentence(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"--config .*run.json is not a run.json that bertrain pretrain wrote"):
        read_options(tmp_path / "run.json")
    (tmp_path / "run.json").write_text('{"config": {"log": ["tensorboard"]}}')  # an older name, of no older value
    assert read_options(tmp_path / "run.json") == {}


def test_attention_is_chosen_for_the_longest_rows_of_a_run(dataset, tmp_path):
    for long_length, attention in ((None, "eager"), (1024, "sdpa")):
        config = Config(data=str(dataset.path), out="nowhere", precision="bf16", long_length=long_length)
        weights, _ = assemble.model(config, dataset)
        assemble.learner(config, weights, dataset, World(0, 1, torch.device("cpu")), "bf16")
        assert weights.config._attn_implementation == attention


def test_a_teacher_keeps_the_weights_of_objectives_in_proportion(dataset, tmp_path, monkeypatch):
    train(dataset.path, tmp_path / "big", model="bert-tiny", steps=1)
    monkeypatch.setattr(OBJECTIVES["mlm"], "weight", 0.5)
    config = Config(data=str(dataset.path), out="nowhere", model="bert-tiny", teacher=str(tmp_path / "big"), alpha=0.2)
    weights, _ = assemble.model(config, dataset)
    made = assemble.learner(config, weights, dataset, World(0, 1, torch.device("cpu")), "fp32")
    assert [round(objective.weight, 6) for objective in made.objectives.values()] == [0.4, 0.2]


def test_parameters_that_a_checkpoint_lacks_are_not_random(dataset, tmp_path):
    train(dataset.path, tmp_path / "big", model="bert-tiny", steps=1)
    out, options = tmp_path / "run", {"model": "bert-tiny", "teacher": str(tmp_path / "big"), "distil": "hidden"}
    train(dataset.path, out, steps=1, **options)
    path = out / "step-00000001" / checkpoint.BESIDE
    tensors = torch.load(path, weights_only=True)
    torch.save({name.replace("projection", "map"): tensor for name, tensor in tensors.items()}, path)
    index = json.loads((out / "step-00000001" / "checkpoint.json").read_text())
    index["files"][checkpoint.BESIDE] = {"bytes": path.stat().st_size, "sha256": checkpoint.digest(path)[0]}
    (out / "step-00000001" / "checkpoint.json").write_text(json.dumps(index))
    done = CliRunner().invoke(pretrain.main, [str(x) for x in flags(dataset.path, out, steps=2, **options)])
    assert done.exit_code == 1
    assert "was written by a run with other parameters" in done.output
