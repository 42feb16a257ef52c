"""Fine-tuning: tables are read or named, metrics are those of the textbooks, weights come from the checkpoint."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from support.commands import json_of, refused, refuses, succeeds, tuning
from support.data import BAD, GOOD, write_labelled
from support.disk import contents, recorded, write
from support.runs import cannot_read, weights_in
from transformers import AutoModelForNextSentencePrediction, AutoModelForSequenceClassification

from bertrain.commands import plot
from bertrain.lab import finetune, heads, seeds
from bertrain.lab.tasks import TASKS, Columns
from bertrain.models.load import load_model


@pytest.fixture(scope="module")
def source(bert_run):
    """The newest checkpoint of a run."""
    return bert_run / "step-00000002"


def classes(*names):
    task = TASKS["classification"](Columns("0", "", "-1"))
    task.names = [*names]
    return task


class Follows(TASKS["pairs"]):
    """A task from outside, whose head transformers gives no use on the hub."""

    head = AutoModelForNextSentencePrediction


@pytest.fixture
def follows(bert_run, tmp_path, monkeypatch):
    """A fine-tuning for this task into tmp_path/out."""
    monkeypatch.setitem(TASKS, "follows", Follows)
    data = write(tmp_path / "data.tsv", *["the river\tthe stone\tyes", "a wind\tthe stone\tno"] * 8)
    return tuning(bert_run, data, tmp_path / "out", "--task", "follows")


def test_a_task_from_outside_is_trained_and_has_a_card(follows, tmp_path):
    succeeds(finetune.main, *follows)
    AutoModelForNextSentencePrediction.from_pretrained(tmp_path / "out" / "seed-0")
    card = (tmp_path / "out" / "seed-0" / "README.md").read_text()
    assert "AutoModelForNextSentencePrediction" in card
    refused(finetune.main, *follows, "--task", "precedes", kind="unknown", option="task", given="precedes")


@pytest.mark.parametrize("when", ["in a loss", "in the last step"])
def test_a_seed_that_diverges_ends(follows, tmp_path, monkeypatch, when):
    score = finetune._score

    def diverged(reader, data):
        next(reader.model.parameters()).fill_(float("nan"))
        return score(reader, data)

    if when == "in a loss":
        monkeypatch.setattr(Follows, "loss", lambda self, logits, labels: logits.sum() * float("nan"))
    else:
        monkeypatch.setattr(finetune, "_score", torch.no_grad()(diverged))
    refused(finetune.main, *follows, kind="not-finite", option="lr", given=5e-5)
    assert not (tmp_path / "out" / "seed-0" / "seed.json").exists()


def test_a_task_is_learned_and_the_best_epoch_kept(bert_run, tmp_path):
    data = write_labelled(tmp_path / "train.tsv", repeat=4)
    options = ["--test", data, "--seeds", 2, "--epochs", 4, "--lr", 2e-3, "--batch-size", 4]
    result = json_of(finetune.main, *tuning(bert_run, data, tmp_path / "out", *options))
    assert result["length"] == 128
    assert result["dev_accuracy"]["min"] == result["test_accuracy"]["median"] == 1.0
    assert result["dev_mcc"]["max"] == result["dev_f1"]["max"] == 1.0
    kept = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [run["seed"] for run in kept["runs"]] == [0, 1]
    for run in kept["runs"]:
        accuracies = [point["dev"]["accuracy"] for point in run["curve"]]
        assert run["best_epoch"] == 1 + accuracies.index(max(accuracies))
        assert run["dev"] == run["curve"][run["best_epoch"] - 1]["dev"]
        assert run["curve"][-1]["train_loss"] < run["curve"][0]["train_loss"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / "seed-1" / name).read_bytes() == (bert_run / "step-00000002" / name).read_bytes()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "seed-1")
    assert model.config.id2label == {0: "0", 1: "1"}
    assert model.config.hidden_dropout_prob == 0.1  # the default of --dropout; the checkpoint was trained without
    succeeds(plot.main, tmp_path / "out", "--out", tmp_path / "tuned.png")
    assert (tmp_path / "tuned.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_same_seed_gives_the_same_model(bert_run, tmp_path):
    data = write_labelled(tmp_path / "train.tsv", repeat=3)
    for out, precision in (("a", "fp32"), ("b", "fp32"), ("c", "bf16")):
        succeeds(finetune.main, *tuning(bert_run, data, tmp_path / out, "--precision", precision))
    one, same, other = (weights_in(tmp_path / out / "seed-0") for out in ("a", "b", "c"))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    torch.testing.assert_close(one, other, rtol=0.1, atol=0.01)


def test_weights_are_those_of_the_checkpoint_unless_it_is_from_scratch(source):
    saved = weights_in(source)
    encoder = [name for name in saved if name.startswith("bert.")]
    assert len(encoder) > 30
    for from_scratch in (False, True):
        model = heads.load(str(source), classes("a", "b"), from_scratch=from_scratch, dropout=0.25)
        assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}
        same = [torch.equal(model.state_dict()[name], saved[name]) for name in encoder if name.endswith("query.weight")]
        assert all(same) != from_scratch
        assert any(same) != from_scratch


def test_frozen_weights_stay_and_the_head_learns(source, tmp_path):
    data, out = write_labelled(tmp_path / "train.tsv", repeat=4), tmp_path / "out"
    given = tuning(source, data, out, "--lr", 2e-2, "--batch-size", 4, "--epochs", 4, "--freeze", "all")
    succeeds(finetune.main, *given)
    curve = json.loads((out / "result.json").read_text())["runs"][0]["curve"]
    assert curve[-1]["train_loss"] < 0.9 * curve[0]["train_loss"]
    before, after = weights_in(source), weights_in(out / "seed-0")
    encoder = [name for name in before if name.startswith("bert.")]
    assert len(encoder) > 30
    assert all(torch.equal(before[name], after[name]) for name in encoder)
    refused(finetune.main, *given, "--lora", "r=2,alpha=2", kind="conflict", option="lora")


@pytest.mark.parametrize("name", ["classification", "regression", "qa"])
def test_what_a_head_was_trained_for_before_is_forgotten(source, tmp_path, name):
    several, other = (TASKS[kind](Columns("0", "", "-1")) for kind in ("multilabel", name))
    several.names = ["a", "b"]
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
    (["LABEL_0", "0"], ["0", "LABEL_0"], ["LABEL_0", "0"]),
    ("ab", "ac", None),
    (["LABEL_0", "LABEL_1"], "ab", None),
]


def test_a_head_for_other_labels_is_replaced(bert_run, tmp_path):
    """A model that was fine-tuned for two classes is fine-tuned for three, as from MNLI to RTE."""
    data, seed = write_labelled(tmp_path / "train.tsv"), tmp_path / "tuned" / "seed-0"
    succeeds(finetune.main, *tuning(bert_run, data, tmp_path / "tuned"))
    saved, config = weights_in(seed), json.loads((seed / "config.json").read_text())
    names = [name for name in saved if name.startswith("bert.")]
    for known, wanted, order in HEADS:
        known = dict(enumerate(known))
        (seed / "config.json").write_text(json.dumps(config | {"id2label": known, "label2id": {}}))
        model = heads.load(str(seed), classes(*wanted), from_scratch=False)
        assert torch.equal(model.classifier.weight, saved["classifier.weight"]) == (order is not None)
        assert [*model.config.id2label.values()] == [*(order or wanted)]
        assert all(torch.equal(model.state_dict()[name], saved[name]) for name in names)
        assert len(heads.take_order(str(seed), classes(*wanted))) == (order is None)
    (tags := TASKS["token"](Columns("0", "", "-1"))).names = [*known.values()]
    model = heads.load(str(seed), tags, from_scratch=False)  # its head has the same names and sizes
    assert not torch.equal(model.classifier.weight, saved["classifier.weight"])
    assert heads.take_order(str(seed), tags) == heads.take_order(str(bert_run / "step-00000002"), tags) == []
    model = heads.load(str(seed), classes("a", "b", "c"), from_scratch=False)
    assert model.classifier.weight.shape == (3, saved["classifier.weight"].shape[1])
    assert all(torch.equal(model.state_dict()[name], saved[name]) for name in names)  # the pooler too
    with refuses("weights-missing"):
        load_model(seed)
    (seed / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    with refuses("weights-missing", "checkpoint"):
        heads.load(str(seed), classes("a", "b"), from_scratch=False)


def test_a_full_disk_is_one_sentence(command, tmp_path, full_disk):
    seed = tmp_path / "out" / "seed-0"
    with full_disk(100_000):
        refused(finetune.main, *command, kind="unwritable", option="out", given=str(seed))
    assert not (seed / "seed.json").exists()
    succeeds(finetune.main, *command)


# --------------------------------------------------------------------------------------------------- a seed is kept


@pytest.fixture
def command(bert_run, tmp_path):
    """A fine-tuning of one seed into tmp_path/out."""
    return tuning(bert_run, write_labelled(tmp_path / "train.tsv"), tmp_path / "out")


def test_a_seed_survives_a_loss_of_power(command, tmp_path):
    with recorded(tmp_path) as disk:
        succeeds(finetune.main, *command)
    seed = tmp_path / "out" / "seed-0"
    files = [path for path in seed.rglob("*") if path.is_file()]
    assert {seed / "model.safetensors", seed / "seed.json", seed / "tokenizer.json"} <= {*files}
    assert all(map(disk.holds, files))
    assert disk.renames[-2:] == [seed, tmp_path / "out" / "result.json"]
    assert not disk.pending
    (seed / "model.safetensors").write_bytes(b"")
    with recorded(tmp_path) as disk:
        assert seeds.finished(tmp_path / "out" / "seed-0") is None
    assert (seed.with_name("damaged-seed-0") / "seed.json").exists()
    assert not disk.pending


def test_a_damaged_seed_is_named_and_trained_again(command, tmp_path):
    succeeds(finetune.main, *command)
    out, seed = tmp_path / "out", tmp_path / "out" / "seed-0"
    whole = contents(out)
    weights = whole["seed-0/model.safetensors"]
    damages = [
        ("model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1])),
        ("tokenizer.json", whole["seed-0/tokenizer.json"][:-1]),
        ("seed.json", b"{}"),
        ("seed.json", b"[" * 100_000),
        ("checkpoint.json", b"[" * 100_000),
        ("checkpoint.json", None),  # as if it was never written
    ]
    for turn, (name, damage) in enumerate(damages, start=1):
        (seed / name).unlink()
        if damage is not None:
            (seed / name).write_bytes(damage)
        damaged = {path.name: path.read_bytes() for path in seed.iterdir()}
        said = succeeds(finetune.main, *command).stderr
        aside = out / ("damaged-seed-0" if turn == 1 else f"damaged-seed-0-{turn}")
        (line,) = (line for line in said.splitlines() if " is damaged: " in line)
        assert all(str(part) in line for part in (seed, name, aside))
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == damaged
        assert {path: known for path, known in contents(out).items() if not path.startswith("damaged")} == whole
        assert " is damaged: " not in succeeds(finetune.main, *command).stderr
    (seed / "model.safetensors").write_bytes(b"")
    refused(finetune.main, *command, "--lr", 1e-4, kind="other-settings", option="out")  # and nothing is renamed
    assert (seed / "model.safetensors").read_bytes() == b""


def test_a_seed_that_cannot_be_read_now_is_not_trained_again(command, tmp_path, monkeypatch):
    succeeds(finetune.main, *command)
    before = contents(tmp_path / "out")
    cannot_read(monkeypatch, tmp_path / "out" / "seed-0" / "model.safetensors")
    refused(finetune.main, *command, kind="unreadable")
    monkeypatch.undo()
    assert contents(tmp_path / "out") == before
    succeeds(finetune.main, *command)


def test_weights_that_are_not_there_are_not_made_up(source, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((source / name).read_bytes())
    weights = weights_in(source)
    save_file({k: v for k, v in weights.items() if "layer.1." not in k}, broken / "model.safetensors", {"format": "pt"})
    arguments = tuning(broken, write_labelled(tmp_path / "train.tsv"), tmp_path / "out")
    refused(finetune.main, *arguments, kind="weights-missing", option="checkpoint", says="bert.encoder.layer.1.")
    (broken / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:1000])
    refused(finetune.main, *arguments, kind="model-unreadable", option="checkpoint")
    (broken / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    (broken / "tokenizer.json").unlink()
    refused(finetune.main, *arguments, kind="model-unreadable", option="checkpoint", given=str(broken))


def test_a_tokenizer_that_cannot_pad_is_refused(source, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(source, bare, ignore=shutil.ignore_patterns("checkpoint.json"))
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": None}))
    arguments = tuning(bare, write_labelled(tmp_path / "train.tsv"), tmp_path / "out")
    refused(finetune.main, *arguments, kind="tokenizer-lacks-token", option="checkpoint", given=str(bare))


def test_regression(bert_run, tmp_path):
    rows = [
        {"a": text, "b": other, "score": 5.0 * (text in GOOD) + len(other) / 20}
        for text in GOOD + BAD
        for other in GOOD
    ]
    path = write(tmp_path / "pairs.jsonl", *map(json.dumps, rows))
    columns = ["--task", "regression", "--text", "a", "--other", "b", "--label", "score"]
    options = ["--epochs", 8, "--lr", 2e-3, "--batch-size", 6]
    result = json_of(finetune.main, *tuning(bert_run, path, tmp_path / "out", *columns, *options))
    assert result["dev_pearson"]["median"] > 0.5
    assert result["dev_spearman"]["median"] > 0.5


# ------------------------------------------------------------------------------------------------------------- tables


def read(path, text="0", other="", label="-1"):
    """The texts and the labels of a file."""
    examples, _ = TASKS["classification"](Columns(text, other, label)).read(str(path))
    return [example.text for example in examples], [example.label for example in examples]


@pytest.mark.parametrize("kind", ["tsv", "tsv with header", "csv", "jsonl", "parquet"])
def test_the_same_examples_from_any_file(tmp_path, kind):
    texts, labels = ['say "no", twice', "plain", "naïve 水"], ["b", "a", "b"]
    path = tmp_path / f"data.{kind.split()[0]}"
    if kind.startswith("tsv"):
        lines = ["sentence\tlabel"] * ("header" in kind) + [f"{t}\t{x}" for t, x in zip(texts, labels, strict=True)]
        path.write_text("\n".join(lines) + "\n")
    elif kind == "csv":
        path.write_text('sentence,label\n"say ""no"", twice",b\nplain,a\nnaïve 水,b\n')
    elif kind == "jsonl":
        rows = [{"sentence": text, "label": label} for text, label in zip(texts, labels, strict=True)]
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        pq.write_table(pa.table({"sentence": [text.encode() for text in texts], "label": labels}), path)
    assert read(path) == read(path, "-2", "", "1") == (texts, labels)
    if kind != "tsv":
        assert read(path, "sentence", "", "label") == (texts, labels)


FIRST = '{"text": "x", "label": 1}\n'


@pytest.mark.parametrize(
    ("name", "content", "kind", "where"),
    [
        ("a.tsv", "one\t1\ntwo\n", "bad-row", "line 2"),
        ("a.csv", "text,label\nx,1,2\n", "bad-row", "line 2"),
        ("a.csv", b"text,label\nna\xefve,1\n", "not-text", "line 2"),
        ("a.jsonl", FIRST + '{"text": "y"}\n', "bad-row", "line 2"),
        ("a.jsonl", FIRST + "{bad\n", "not-of-format", "line 2"),
        ("a.json", f"[\n{FIRST}]\n", "not-of-format", "line 1"),
        ("a.jsonl", FIRST + '{"text": "y", "text": "z"}\n', "not-of-format", "line 2"),
        ("a.jsonl", FIRST + '{"text": "\\ud83d", "label": 0}\n', "bad-row", "line 2"),
        ("a.tsv", "text\tnote\tnote\tlabel\nx\t1\t2\t1\n", "not-of-format", "'note'"),
        ("a.csv", "\ntext,text,label\nx,y,1\n", "not-of-format", "'text'"),
        ("a.xml", "<x/>", "unknown-format", ""),
    ],
)
def test_bad_tables_are_named(tmp_path, name, content, kind, where):
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with refuses(kind, says=str(tmp_path / name)) as caught:
        read(tmp_path / name)
    assert where in str(caught.value)


def test_columns_of_parquet_that_are_not_needed_may_have_any_type(tmp_path):
    times = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))  # Python has none of these
    pq.write_table(pa.table({"when": times, "text": ["x"], "kind": ["y"]}), tmp_path / "a.parquet")
    for text, label in (("text", "kind"), ("1", "-1")):
        assert read(tmp_path / "a.parquet", text, "", label) == (["x"], ["y"])
    with refuses("no-column", "text", says="give one of when, text, kind"):
        read(tmp_path / "a.parquet", "body")
    columns = [pa.array(["x"]), pa.array(["y"]), pa.array([1])]
    pq.write_table(pa.table(columns, names=["text", "text", "label"]), tmp_path / "a.parquet")
    with refuses("not-of-format", says="two columns 'text'"):
        read(tmp_path / "a.parquet")


def test_a_header_is_told_by_a_name_that_is_asked_for(tmp_path):
    path = write(tmp_path / "reviews.tsv", "review\tsentiment", "good\tpos")
    assert read(path, "review", "", "sentiment") == read(path, "0", "", "sentiment") == (["good"], ["pos"])
    for option, value in (("text", ""), ("label", ""), ("text", "2"), ("text", "-3")):
        with refuses("no-column", option):
            read(path, **{option: value})


def test_options_that_do_not_fit_are_refused(bert_run, tmp_path):
    data = write_labelled(tmp_path / "train.tsv", header=["sentence\tlabel"])
    other, gone, none = write(tmp_path / "dev.tsv", "light\t7"), tmp_path / "gone", tmp_path / "none.tsv"
    arguments = tuning(bert_run, data, tmp_path / "out")
    for more, kind, option, value in (
        (["--text", "body"], "no-column", "text", "body"),
        (["--text", "7"], "no-column", "text", "7"),
        (["--dev", none], "not-found", None, str(none)),
        (["--dev", other], "bad-row", None, None),
        (["--task", "regression", "--text", "label", "--label", "sentence"], "bad-row", None, None),
        (["--task", "multilabel", "--separator", ""], "missing", "separator", ""),
        (["--length", 600], "too-long", "length", 600),
        (["--lora", "r=2,alpha=2", "--from-scratch"], "conflict", "lora", "r=2,alpha=2"),
        (["--checkpoint", tmp_path], "not-a-run", "checkpoint", str(tmp_path)),
        (["--checkpoint", gone], "model-not-found", "checkpoint", str(gone)),
        (["--out", data], "out-exists", "out", str(data)),
        (["--out", data / "cola"], "out-exists", "out", str(data / "cola")),
    ):
        assert refused(finetune.main, *arguments, *more, kind=kind, option=option).given == value
