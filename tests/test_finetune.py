"""Fine-tuning: what is learned and kept, weights and labels of the checkpoint, finished seeds, teachers, refusals."""

import json
import shutil

import pytest
import torch
from support.commands import json_of, refused, succeeds, tuning
from support.data import BAD, GOOD, write_labelled
from support.disk import contents, recorded, write
from support.runs import cannot_read, on_ranks, weights_in
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from bertrain.lab import heads, seeds
from bertrain.lab.tasks import TASKS


@pytest.fixture(scope="module")
def source(bert_run):
    """The newest checkpoint of a run."""
    return bert_run / "step-00000002"


@pytest.fixture
def command(bert_run, tmp_path):
    """A fine-tuning of one seed into tmp_path/out."""
    return ["finetune", *tuning(bert_run, write_labelled(tmp_path / "train.tsv"), tmp_path / "out")]


def tuned(*arguments):
    """The result of a fine-tuning, whose arguments are those of `tuning`."""
    return json_of("bertrain", "finetune", *tuning(*arguments))


def classes(*names):
    task = TASKS["classification"]()
    task.names = [*names]
    return task


# ------------------------------------------------------------------------------------------------------------ learning


def test_a_task_is_learned_and_the_best_epoch_kept(bert_run, source, tmp_path):
    data = write_labelled(tmp_path / "train.tsv", repeat=4)
    options = ["--test", data, "--seeds", 2, "--epochs", 4, "--lr", 2e-3, "--batch-size", 4]
    result = tuned(bert_run, data, tmp_path / "out", *options)
    assert result["length"] == 128
    assert result["dev_accuracy"]["min"] == result["test_accuracy"]["median"] == 1.0
    kept = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [run["seed"] for run in kept["runs"]] == [0, 1]
    for run in kept["runs"]:
        accuracies = [point["dev"]["accuracy"] for point in run["curve"]]
        assert run["best_epoch"] == 1 + accuracies.index(max(accuracies))
        assert run["dev"] == run["curve"][run["best_epoch"] - 1]["dev"]
        assert run["curve"][-1]["train_loss"] < run["curve"][0]["train_loss"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / "seed-1" / name).read_bytes() == (source / name).read_bytes()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "seed-1")
    assert model.config.id2label == {0: "0", 1: "1"}
    assert model.config.hidden_dropout_prob == 0.1  # the default of --dropout; the checkpoint was trained without


def asked(word):
    """A paragraph of SQuAD, in which a word is the answer to a question."""
    entry = {"id": word, "question": f"the {word}", "answers": [{"text": word, "answer_start": 0}]}
    return {"context": f"{word} river stone", "qas": [entry]}


SQUAD = json.dumps({"data": [{"paragraphs": [*map(asked, ("salt", "light", "bread"))]}]})
LEARNED = {  # task: name of a file, its lines; the measure, and a value that it exceeds
    "regression": ("a.tsv", [f"{text}\t{5.0 * (text in GOOD)}" for text in GOOD + BAD], "pearson", 0.5),
    "multilabel": ("a.tsv", [f"{text}\t{text.replace(' ', ',')}" for text in GOOD + BAD], "micro_f1", 0.9),
    "qa": ("a.json", [SQUAD], "exact_match", 0.9),
}


@pytest.mark.parametrize("name", ["regression", "multilabel", pytest.param("qa", marks=pytest.mark.slow)])
def test_other_tasks_are_learned(bert_run, tmp_path, name):
    file, lines, measure, least = LEARNED[name]
    given = ["--task", name, "--lr", 3e-3, "--batch-size", 3, "--epochs", 30, "--length", 32]
    result = tuned(bert_run, write(tmp_path / file, *lines), tmp_path / "out", *given)
    assert result[f"dev_{measure}"]["median"] > least


def test_precisions_give_about_the_same_model(bert_run, tmp_path):
    data = write_labelled(tmp_path / "train.tsv", repeat=3)
    for precision in ("fp32", "bf16"):
        tuned(bert_run, data, tmp_path / precision, "--precision", precision)
    one, other = (weights_in(tmp_path / precision / "seed-0") for precision in ("fp32", "bf16"))
    assert any(not torch.equal(one[name], other[name]) for name in one)
    torch.testing.assert_close(one, other, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("batch_size", [2, 99])  # the loss is not finite, or only what comes after the last step
def test_a_seed_that_diverges_ends(command, tmp_path, batch_size):
    wrong = ["--lr", 1e38, "--batch-size", batch_size]
    refused("bertrain", *command, *wrong, kind="not-finite", option="lr", given=1e38)
    assert not (tmp_path / "out" / "seed-0" / "seed.json").exists()


def test_a_seed_that_gets_no_better_ends_with_its_best_weights(command, tmp_path):
    for patience in (1, 2):
        more = "--epochs", 9, "--lr", 1e-8, "--patience", patience, "--out", tmp_path / f"out-{patience}"
        succeeds("bertrain", *command, *more)
        (run,) = json.loads((tmp_path / f"out-{patience}" / "result.json").read_text())["runs"]
        assert len(run["curve"]) == run["best_epoch"] + patience < 9
    one, other = (weights_in(tmp_path / f"out-{patience}" / "seed-0") for patience in (1, 2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_words_beyond_the_length_are_said_once(bert_run, tmp_path):
    data = write(tmp_path / "a.txt", *["river A", "salt B"] * 10)
    command = tuning(bert_run, data, tmp_path / "out", "--task", "token", "--text", 0, "--length", 8, "--seeds", 2)
    assert succeeds("bertrain", "finetune", *command).stderr.count("14 of 20") == 2  # of --train and of --dev


@pytest.mark.slow
def test_ranks_share_out_the_seeds_and_give_the_bits_of_one(command, tmp_path):
    common = [*command, "--seeds", 3, "--precision", "fp32", "--out"]
    alone = json_of("bertrain", *common, tmp_path / "one")
    out, _ = on_ranks(2, "bertrain", [*common, tmp_path / "two", "--json"])
    assert json.loads(out) == alone
    for seed in range(3):
        one, same = (weights_in(tmp_path / out / f"seed-{seed}") for out in ("one", "two"))
        assert all(torch.equal(one[name], same[name]) for name in one)


# ------------------------------------------------------------------------------------- weights, labels and a tokenizer


def test_tokenizer_files_of_transformers_5_are_written_for_every_program(source, tmp_path):
    tokenizer = heads.tokenizer_of(str(source))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    tokenizer("river", truncation=True, max_length=8, padding="max_length")
    tokenizer.save_pretrained(tmp_path)
    files = heads.tokenizer_files(str(tmp_path), tokenizer)
    config, content = (json.loads(files[name]) for name in ("tokenizer_config.json", "tokenizer.json"))
    assert (config["tokenizer_class"], config["additional_special_tokens"]) == ("PreTrainedTokenizerFast", ["<x>"])
    assert not config.keys() & {"backend", "extra_special_tokens", "is_local", "local_files_only"}
    assert content == json.loads((tmp_path / "tokenizer.json").read_bytes()) | {"truncation": None, "padding": None}


def test_from_scratch_no_weight_is_that_of_the_checkpoint(source):
    model, saved = heads.load(str(source), classes("a", "b"), from_scratch=True, dropout=0.25), weights_in(source)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}
    queries = {name: weight for name, weight in model.state_dict().items() if name.endswith("query.weight")}
    assert {torch.equal(weight, saved[name]) for name, weight in queries.items()} == {False}


def test_a_dropout_of_a_head_is_set_too(tmp_path):
    config = AutoConfig.for_model("distilbert", dim=8, n_layers=1, n_heads=1, hidden_dim=8, vocab_size=9)
    AutoModelForQuestionAnswering.from_config(config).save_pretrained(tmp_path)
    model = heads.load(str(tmp_path), TASKS["qa"](), from_scratch=False, dropout=0.25)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


def test_frozen_weights_stay_and_the_head_learns(source, tmp_path):
    data, out = write_labelled(tmp_path / "train.tsv", repeat=4), tmp_path / "out"
    tuned(source, data, out, "--lr", 2e-2, "--batch-size", 4, "--epochs", 4, "--freeze", "all")
    curve = json.loads((out / "result.json").read_text())["runs"][0]["curve"]
    assert curve[-1]["train_loss"] < 0.9 * curve[0]["train_loss"]
    before, after = weights_in(source), weights_in(out / "seed-0")
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("bert."))


@pytest.mark.parametrize("name", ["classification", "regression", "qa"])
@pytest.mark.parametrize(("before", "labels"), [("multilabel", "ab"), ("classification", ["LABEL_0", "LABEL_1"])])
def test_what_a_head_was_trained_for_before_is_forgotten(source, tmp_path, before, labels, name):
    several, other = (TASKS[kind]() for kind in (before, name))
    several.names = [*labels]
    other.names = ["a", "b"] if name == "classification" else None
    heads.load(str(source), several, from_scratch=False).save_pretrained(tmp_path / "several")
    config = heads.load(str(tmp_path / "several"), other, from_scratch=False).config
    kinds = {"classification": "single_label_classification", "regression": "regression", "qa": None}
    assert config.problem_type == kinds[name]
    assert list(config.id2label.values()) == (other.names or ["LABEL_0", "LABEL_1"][: config.num_labels])


HEADS = [  # labels of a head, labels to train on, and the order that the kept head gives them; None: it is new
    ("ba", "ab", "ba"),
    (["NOT", "Yes"], ["not", "yes"], ["not", "yes"]),
    (["LABEL_0", "LABEL_1"], "01", "01"),
    ("01", ["0.0", "1.0"], ["0.0", "1.0"]),
    ("aA", "Aa", "aA"),
    ("ab", "ac", None),
    ("ab", "abc", None),  # as from MNLI to RTE
    (["LABEL_0", "LABEL_1"], "ab", None),
]


def test_a_head_for_other_labels_is_replaced(source, command, tmp_path):
    seed = tmp_path / "out" / "seed-0"
    succeeds("bertrain", *command)
    saved, config = weights_in(seed), json.loads((seed / "config.json").read_text())
    names = [name for name in saved if name.startswith("bert.")]
    for known, wanted, order in HEADS:
        known = dict(reversed([*enumerate(known)]))  # a file may have any order
        (seed / "config.json").write_text(json.dumps(config | {"id2label": known, "label2id": {}}))
        model = heads.load(str(seed), classes(*wanted), from_scratch=False)
        assert torch.equal(model.classifier.weight, saved["classifier.weight"]) == (order is not None)
        assert [*model.config.id2label.values()] == [*(order or wanted)]
        assert all(torch.equal(model.state_dict()[name], saved[name]) for name in names)
        assert len(heads.take_order(str(seed), classes(*wanted))) == (order is None)
    (tags := TASKS["token"]()).names = [*known.values()]
    model = heads.load(str(seed), tags, from_scratch=False)  # its head has the same names and sizes
    assert not torch.equal(model.classifier.weight, saved["classifier.weight"])
    assert heads.take_order(str(seed), tags) == heads.take_order(str(source), tags) == []


# -------------------------------------------------------------------------------------------------- seeds that are kept


def test_a_seed_that_is_finished_is_neither_run_again_nor_replaced(bert_run, command, tmp_path):
    succeeds("bertrain", *command)
    first, newest = tmp_path / "out" / "seed-0", bert_run / "step-00000002"
    before = (first / "model.safetensors").stat().st_mtime_ns
    same = ["--seeds", 2, "--checkpoint", newest]  # by another path
    numbers = json_of("bertrain", *command, *same)["dev_accuracy"]
    assert numbers["median"] == pytest.approx((numbers["min"] + numbers["max"]) / 2, abs=1e-5)
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    files = contents(first.parent)
    write(shutil.copytree(newest, tmp_path / "other") / "note.json", "{}")
    (tmp_path / "b.tsv").write_bytes((tmp_path / "train.tsv").read_bytes() + b"light\t0\n")
    for more, named in (
        (["--lr", 1e-4], "--lr 5e-05 → 0.0001"),
        (["--test", tmp_path / "b.tsv"], "--test"),
        (["--train", tmp_path / "b.tsv", "--from-scratch"], "--from-scratch"),
        (["--task", "regression"], "--task classification → regression"),
        (["--teacher", tmp_path / "other"], "the content of --teacher"),
        (["--checkpoint", tmp_path / "other"], f"--checkpoint {newest} → {tmp_path / 'other'}"),
    ):
        refused("bertrain", *command, *more, kind="other-settings", option="out", says=named)
    assert contents(first.parent) == files


def test_a_teacher_of_the_hub_is_its_name_and_the_data_of_c3_are_both_files(source, tmp_path):
    def key(**more):
        return seeds.settings_key(seeds.Job(checkpoint=str(source), out="x", **more), TASKS["choice"]())

    assert key(teacher="org/a") != key(teacher="org/b")
    first, second = (write(tmp_path / f"{name}-train.json", "[]") for name in "dm")
    before = key(train=str(first))
    write(second, "[1]")
    assert key(train=str(first)) != before


def test_a_damaged_seed_is_named_and_trained_again(command, tmp_path):
    def others():
        """What is there besides the seeds that were set aside."""
        return {path: content for path, content in contents(out).items() if not path.startswith("damaged")}

    succeeds("bertrain", *command)
    out, seed = tmp_path / "out", tmp_path / "out" / "seed-0"
    complete = contents(out)
    weights = complete["seed-0/model.safetensors"]
    damages = {
        "model.safetensors": weights[:-1] + bytes([weights[-1] ^ 1]),
        "tokenizer.json": complete["seed-0/tokenizer.json"][:-1],
        "seed.json": b"{}",
        "checkpoint.json": b"[" * 100_000,
    }
    for turn, (name, damage) in enumerate(damages.items(), start=1):
        (seed / name).write_bytes(damage)
        damaged, aside = contents(seed), out / ("damaged-seed-0" if turn == 1 else f"damaged-seed-0-{turn}")
        said = succeeds("bertrain", *command).stderr
        assert all(str(part) in said for part in (seed, name, aside))
        assert (contents(aside), others()) == (damaged, complete)
    with pytest.MonkeyPatch.context() as patch:  # what cannot be read now is not trained again
        cannot_read(patch, seed / "model.safetensors")
        refused("bertrain", *command, kind="unreadable")
    (seed / "model.safetensors").unlink()
    refused("bertrain", *command, "--lr", 1e-4, kind="other-settings", option="out")  # and nothing is renamed
    assert others() == {path: content for path, content in complete.items() if content != weights}
    with recorded(tmp_path) as disk:
        assert seeds.finished(seed) is None
    assert not disk.pending


BROKEN = [  # a file of a checkpoint, what is changed in it, or None for no file; and the kind of error
    ("config.json", {"num_hidden_layers": 3}, "weights-missing"),
    ("tokenizer.json", None, "model-unreadable"),
    ("tokenizer_config.json", {"pad_token": None}, "tokenizer-lacks-token"),
]


@pytest.mark.parametrize(("name", "changed", "kind"), BROKEN)
def test_a_checkpoint_that_is_not_complete_is_refused(source, tmp_path, name, changed, kind):
    broken = shutil.copytree(source, tmp_path / "broken", ignore=shutil.ignore_patterns("checkpoint.json", name))
    if changed:
        write(broken / name, json.dumps(json.loads((source / name).read_bytes()) | changed))
    arguments = tuning(broken, write_labelled(tmp_path / "train.tsv"), tmp_path / "out")
    refused("bertrain", "finetune", *arguments, kind=kind, option="checkpoint", given=str(broken))


# ------------------------------------------------------------------------------------------------------------- teachers

TUNING = ["--epochs", 4, "--lr", 2e-3, "--batch-size", 4]


@pytest.fixture(scope="module")
def teacher(source, once):
    def make(folder):
        data = write_labelled(folder / "a.tsv", repeat=4)
        assert tuned(source, data, folder / "tuned", *TUNING)["dev_accuracy"]["min"] == 1.0

    return once("teacher of a task", make) / "tuned" / "seed-0"


def test_a_student_learns_what_its_teacher_says_and_not_the_labels(source, teacher, tmp_path):
    data = write(tmp_path / "a.tsv", *[f"{text}\t{int(text in BAD)}" for text in GOOD + BAD] * 4)
    more = ["--dev", write_labelled(tmp_path / "dev.tsv"), "--teacher", teacher]
    result = tuned(source, data, tmp_path / "out", *more, *TUNING)
    assert result["dev_accuracy"]["min"] == 1.0
    assert result["teacher"] == str(teacher)
    tasks = (classes(*order) for order in ("01", "10"))  # the labels may have another order than those of the teacher
    said = [heads.teacher(str(teacher), task, "x").logits([{"input_ids": [7, 8, 9]}]) for task in tasks]
    assert torch.equal(said[0], said[1].flip(-1))


def test_a_teacher_of_something_else_is_refused(source, teacher, tmp_path):
    """Also of another kind of task whose labels have the same names."""
    data, same = write(tmp_path / "a.tsv", "river\tyes", "salt\tno"), write_labelled(tmp_path / "same.tsv")
    tuned(source, same, tmp_path / "several", "--task", "multilabel")
    several = tmp_path / "several" / "seed-0"
    common = ["finetune", *tuning(source, data, tmp_path / "out", "--teacher")]
    for more, kind in (
        ([teacher], "unsupported"),
        ([teacher, "--task", "token"], "conflict"),
        ([source], "unsupported"),
        ([tmp_path / "none"], "model-not-found"),
        ([several, "--train", same, "--dev", same], "unsupported"),
    ):
        refused("bertrain", *common, *more, kind=kind, option="teacher", given=str(more[0]))
    succeeds("bertrain", *common, several, "--task", "multilabel", "--train", same, "--dev", same)
