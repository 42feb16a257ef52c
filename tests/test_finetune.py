"""Fine-tuning: tables are read or named, metrics are those of the textbooks, weights come from the checkpoint."""

import json
import statistics

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from training import train
from transformers import AutoModelForNextSentencePrediction, AutoModelForSequenceClassification

from bertdata.errors import DatasetError, UsageError
from bertrain import finetune, plot, tables
from bertrain.models import build
from bertrain.tasks import TASKS, Columns, metrics

GOOD, BAD = ["river light", "the bread of morning", "light"], ["salt stone", "wind under stone", "salt"]


@pytest.fixture(scope="module")
def checkpoint(dataset, tmp_path_factory):
    run = tmp_path_factory.mktemp("finetune") / "run"
    train(dataset.path, run, model="bert-tiny", steps=2)
    return run


def write_tsv(path, *, repeat=6, header=False):
    rows = [(text, label) for label, texts in ((1, GOOD), (0, BAD)) for text in texts] * repeat
    lines = ["sentence\tlabel"] * header + [f"{text}\t{label}" for text, label in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def classes(*names):
    task = TASKS["classification"](Columns("0", "", "-1"))
    task.names = [*names]
    return task


def invoke(*arguments):
    result = CliRunner().invoke(finetune.main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


class Follows(TASKS["pairs"]):
    """A task from outside, whose head transformers gives no use on the hub."""

    head = AutoModelForNextSentencePrediction


@pytest.fixture
def follows(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "follows", Follows)
    lines = [f"{text}\t{other}\t{label}" for text, other, label in
             (("the river", "the stone", "yes"), ("a wind", "the stone", "no")) * 8]  # fmt: skip
    (tmp_path / "data.tsv").write_text("\n".join(lines) + "\n")
    return ["--task", "follows", "--train", str(tmp_path / "data.tsv"), "--dev", str(tmp_path / "data.tsv"),
            "--out", str(tmp_path / "out"), "--epochs", "1", "--seeds", "1"]  # fmt: skip


def test_a_task_from_outside_is_trained_and_has_a_card(checkpoint, follows, tmp_path):
    assert invoke("--checkpoint", checkpoint, *follows).exit_code == 0
    AutoModelForNextSentencePrediction.from_pretrained(tmp_path / "out" / "seed-0")
    card = (tmp_path / "out" / "seed-0" / "README.md").read_text()
    assert "AutoModelForNextSentencePrediction" in card
    assert "pipeline_tag" not in card
    done = invoke("--checkpoint", checkpoint, "--task", "precedes", *follows[2:])
    assert (done.exit_code, "--task precedes is unknown; give one of classification, " in done.output) == (2, True)


def test_a_loss_that_is_not_finite_ends_a_seed(checkpoint, follows, tmp_path, monkeypatch):
    monkeypatch.setattr(Follows, "loss", lambda self, logits, labels: logits.sum() * float("nan"))
    done = invoke("--checkpoint", checkpoint, *follows)
    assert done.exit_code == 1
    assert "seed 0: the loss is nan in epoch 1; lower --lr 5e-05" in done.output
    assert not (tmp_path / "out" / "seed-0" / "seed.json").exists()


def test_a_task_is_learned_and_the_best_epoch_kept(checkpoint, tmp_path):
    data = write_tsv(tmp_path / "train.tsv")
    done = invoke("--checkpoint", checkpoint, "--train", data, "--dev", data, "--test", data, "--out", tmp_path / "out",
                  "--seeds", 2, "--epochs", 6, "--lr", 1e-3, "--batch-size", 4, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "seed 0: loaded 37 of 39 encoder tensors from" in done.output
    result = json.loads(done.output.splitlines()[-1])
    assert result["dev_accuracy"]["min"] == result["test_accuracy"]["median"] == 1.0
    assert result["dev_mcc"]["max"] == result["dev_f1"]["max"] == 1.0
    kept = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [run["seed"] for run in kept["runs"]] == [0, 1]
    for run in kept["runs"]:
        accuracies = [point["dev"]["accuracy"] for point in run["curve"]]
        assert run["best_epoch"] == 1 + accuracies.index(max(accuracies))
        assert run["dev"] == run["curve"][run["best_epoch"] - 1]["dev"]
        assert run["curve"][-1]["train_loss"] < run["curve"][0]["train_loss"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "seed-1")
    assert model.config.id2label == {0: "0", 1: "1"}
    drawn = CliRunner().invoke(plot.main, [str(tmp_path / "out"), "--out", str(tmp_path / "tuned.png")])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "tuned.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_model(checkpoint, tmp_path):
    data = write_tsv(tmp_path / "train.tsv")
    for out, precision in (("a", "fp32"), ("b", "fp32"), ("c", "bf16")):
        done = invoke("--checkpoint", checkpoint, "--train", data, "--dev", data, "--out", tmp_path / out,
                      "--seeds", 1, "--precision", precision)  # fmt: skip
        assert done.exit_code == 0, done.output
    one, same, other = (load_file(tmp_path / out / "seed-0" / "model.safetensors") for out in ("a", "b", "c"))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    torch.testing.assert_close(one, other, rtol=0.1, atol=0.01)


def test_batches_hold_every_example_once_and_those_of_one_are_about_as_long():
    rows = [{"input_ids": [0] * (3 + i * 7919 % 101)} for i in range(1000)]
    batches = finetune._batches(rows, 8, np.random.default_rng(0))
    assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
    lengths = [[len(rows[i]["input_ids"]) for i in batch] for batch in batches]
    assert statistics.median(max(batch) - min(batch) for batch in lengths) <= 4
    assert max(len(batch) for batch in batches) == 8
    assert [b.tolist() for b in batches] != [b.tolist() for b in finetune._batches(rows, 8, np.random.default_rng(1))]


def test_weights_are_those_of_the_checkpoint_unless_told_otherwise(checkpoint):
    saved = load_file(sorted(checkpoint.glob("step-*"))[-1] / "model.safetensors")
    encoder = [name for name in saved if name.startswith("bert.")]
    assert len(encoder) > 30
    for from_scratch in (False, True):
        source = sorted(checkpoint.glob("step-*"))[-1]
        model, loaded = finetune._model(source, classes("a", "b"), from_scratch=from_scratch)
        assert loaded == (0 if from_scratch else 37)
        same = [torch.equal(model.state_dict()[name], saved[name]) for name in encoder if name.endswith("query.weight")]
        assert all(same) != from_scratch
        assert any(same) != from_scratch


def test_a_head_for_other_labels_is_replaced(checkpoint, tmp_path):
    """A model that was fine-tuned for two classes is fine-tuned for three, as from MNLI to RTE."""
    data, tuned = write_tsv(tmp_path / "train.tsv", repeat=1), tmp_path / "tuned"
    done = invoke(
        "--checkpoint", checkpoint, "--train", data, "--dev", data, "--out", tuned, "--seeds", 1, "--epochs", 1
    )
    assert done.exit_code == 0, done.output
    saved = load_file(tuned / "seed-0" / "model.safetensors")
    same, _ = finetune._model(tuned / "seed-0", classes("a", "b"), from_scratch=False)
    other, loaded = finetune._model(tuned / "seed-0", classes("a", "b", "c"), from_scratch=False)
    assert torch.equal(same.classifier.weight, saved["classifier.weight"])
    assert other.classifier.weight.shape == (3, saved["classifier.weight"].shape[1])
    assert loaded == 39  # the pooler too
    names = [name for name in saved if name.startswith("bert.")]
    assert len(names) == 39
    assert all(torch.equal(other.state_dict()[name], saved[name]) for name in names)
    with pytest.raises(DatasetError, match="has no head that predicts masked tokens, as after fine-tuning; give"):
        build.load(tuned / "seed-0")
    config = json.loads((tuned / "seed-0" / "config.json").read_text())
    (tuned / "seed-0" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    with pytest.raises(UsageError, match="lacks 1 weights of the encoder, such as bert.embeddings.word_embeddings"):
        finetune._model(tuned / "seed-0", classes("a", "b"), from_scratch=False)


def test_a_full_disk_is_one_sentence(checkpoint, tmp_path, full_disk):
    data, out = write_tsv(tmp_path / "train.tsv", repeat=1), tmp_path / "out"
    arguments = ["--checkpoint", checkpoint, "--train", data, "--dev", data, "--out", out, "--seeds", 1, "--epochs", 1]
    with full_disk(100_000):
        done = invoke(*arguments)
    assert done.exit_code == 1
    assert "seed-0 cannot be written (" in done.output
    assert "make room and run the same command again" in done.output
    assert not (out / "seed-0" / "seed.json").exists()
    assert invoke(*arguments).exit_code == 0


def test_dropout_is_everywhere(checkpoint):
    source = sorted(checkpoint.glob("step-*"))[-1]
    model, _ = finetune._model(source, classes("a", "b"), from_scratch=False, dropout=0.25)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}
    assert model.config.attention_probs_dropout_prob == 0.25


def test_weights_that_are_not_there_are_not_made_up(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    source = sorted(checkpoint.glob("step-*"))[-1]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((source / name).read_bytes())
    weights = load_file(source / "model.safetensors")
    from safetensors.torch import save_file

    save_file({k: v for k, v in weights.items() if "layer.1." not in k}, broken / "model.safetensors", {"format": "pt"})
    data = write_tsv(tmp_path / "train.tsv")
    done = invoke("--checkpoint", broken, "--train", data, "--dev", data, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "weights of the encoder, such as bert.encoder.layer.1." in done.output
    (broken / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:1000])
    done = invoke("--checkpoint", broken, "--train", data, "--dev", data, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "broken cannot be fine-tuned: Error while deserializing header" in done.output
    (broken / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    (broken / "tokenizer.json").unlink()
    done = invoke("--checkpoint", broken, "--train", data, "--dev", data, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "broken has no tokenizer that can be read (" in done.output


def test_regression(checkpoint, tmp_path):
    rows = [{"a": text, "b": other, "score": 5.0 * (text in GOOD) + len(other) / 20}
            for text in GOOD + BAD for other in GOOD]  # fmt: skip
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = invoke("--checkpoint", checkpoint, "--train", path, "--dev", path, "--out", tmp_path / "out", "--task",
                  "regression", "--text", "a", "--other", "b", "--label", "score", "--seeds", 1, "--epochs", 20,
                  "--lr", 2e-3, "--batch-size", 6, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(done.output.splitlines()[-1])
    assert result["dev_pearson"]["median"] > 0.5
    assert result["dev_spearman"]["median"] > 0.5


# ------------------------------------------------------------------------------------------------------------ metrics


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_binary_metrics_are_those_of_their_definitions(pairs):
    predicted, labels = (np.array(side) for side in zip(*pairs, strict=True))
    tp, tn = ((predicted == x) & (labels == x) for x in (1, 0))
    tp, tn = tp.sum(), tn.sum()
    fp, fn = ((predicted == 1) & (labels == 0)).sum(), ((predicted == 0) & (labels == 1)).sum()
    found = metrics.classification(predicted, labels, 2)
    assert found["accuracy"] == pytest.approx((tp + tn) / len(pairs))
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn) if tp else 0.0)
    below = float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert found["mcc"] == pytest.approx((tp * tn - fp * fn) / below if below else 0.0)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30))
def test_correlations_are_those_of_their_definitions(pairs):
    a, b = (np.array(side, float) for side in zip(*pairs, strict=True))
    found = metrics.regression(a, b)
    rank = [[sum(y < x for y in side) + (sum(y == x for y in side) + 1) / 2
             for x in side] for side in (a.tolist(), b.tolist())]  # fmt: skip
    for name, (x, y) in {"pearson": (a, b), "spearman": map(np.array, rank)}.items():
        constant = np.ptp(x) == 0 or np.ptp(y) == 0
        assert found[name] == pytest.approx(0.0 if constant else np.corrcoef(x, y)[0, 1], abs=1e-9)


# ------------------------------------------------------------------------------------------------------------- tables


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
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"sentence": texts, "label": labels}), path)
    assert tables.read(str(path), text="0", other="", label="-1") == tables.Examples(texts, None, labels)
    if kind != "tsv":
        assert tables.read(str(path), text="sentence", other="", label="label").texts == texts


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tsv", "", "holds no examples"),
        ("a.tsv", "one\t1\ntwo\n", "line 2 has 1 columns and should have 2"),
        ("a.csv", "text,label\nx,1,2\n", "line 2 has 3 columns and should have 2"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "y"}\n', "line 2 has no value for column 'label'"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{bad\n', r"line 2 is not JSON \(Expecting .* at column 2\); give one"),
        ("a.json", '[\n{"text": "x", "label": 1}\n]\n', "line 1 is not JSON .*; give one JSON object in each line"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": "y", "text": "z", "label": 0}\n',
            "line 2 has two columns 'text'; give one of them another name, or remove it",
        ),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": "\\ud83d", "label": 0}\n',
            r"line 2 has half a character, \\ud83d; write its other half beside it, or remove it",
        ),
        ("a.tsv", "text\tnote\tnote\tlabel\nx\t1\t2\t1\n", "a.tsv, line 1 has two columns 'note'"),
        ("a.csv", "\ntext,text,label\nx,y,1\n", "a.csv, line 2 has two columns 'text'"),
        ("a.xml", "<x/>", "has an unknown ending"),
        ("a.parquet", "no parquet", "a.parquet cannot be read"),
    ],
)
def test_bad_tables_are_named(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said) as caught:
        tables.read(str(tmp_path / name), text="0", other="", label="-1")
    assert ("cannot be read" in str(caught.value)) == ("cannot be read" in said)


def test_columns_without_a_name_and_names_inside_objects_may_be_equal(tmp_path):
    """A spreadsheet leaves empty names behind its last column; the names of a nested object are no columns."""
    (tmp_path / "a.csv").write_text("text,label,,\nx,1,,\n")
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": 1, "more": {"a": 1, "a": 2}}\n')
    for name in ("a.csv", "a.jsonl"):
        found = tables.read(str(tmp_path / name), text="text", other="", label="label")
        assert ([str(label) for label in found.labels], len(found.texts)) == (["1"], 1)


def test_two_columns_of_parquet_with_one_name_are_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [pa.array(["x"]), pa.array(["y"]), pa.array([1])]
    pq.write_table(pa.table(columns, names=["text", "text", "label"]), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="a.parquet has two columns 'text'"):
        tables.read(str(tmp_path / "a.parquet"), text="0", other="", label="-1")


def test_a_header_is_told_by_a_name_that_is_asked_for(tmp_path):
    path = tmp_path / "reviews.tsv"
    path.write_text("review\tsentiment\ngood\tpos\n")
    assert tables.read(str(path), text="review", other="", label="sentiment").labels == ["pos"]
    assert tables.read(str(path), text="0", other="", label="sentiment").texts == ["good"]


@pytest.mark.parametrize("option", ["--text", "--label"])
def test_a_column_without_a_name_is_one_sentence(tmp_path, option):
    columns = {"text": "0", "other": "", "label": "1"} | {option[2:]: ""}
    write_tsv(tmp_path / "a.tsv")
    with pytest.raises(UsageError, match=f"{option} is empty; give a column of .*a.tsv, by its name or its number"):
        tables.read(str(tmp_path / "a.tsv"), **columns)


def test_files_of_another_encoding_are_named(tmp_path):
    (tmp_path / "a.csv").write_bytes("text,label\nna\xefve,1\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"a.csv, line 2 is not UTF-8 text; save the file as UTF-8"):
        tables.read(str(tmp_path / "a.csv"), text="0", other="", label="-1")


def test_columns_and_labels_that_do_not_fit_are_named(checkpoint, tmp_path):
    data, other = write_tsv(tmp_path / "train.tsv", header=True), tmp_path / "dev.tsv"
    other.write_text("light\t7\n")
    arguments = ["--checkpoint", checkpoint, "--train", data, "--out", tmp_path / "out"]
    for more, said in (
        (["--dev", data, "--text", "body"], "has no column 'body', only sentence, label"),
        (["--dev", data, "--text", "7"], "has no column '7', only sentence, label"),
        (["--dev", tmp_path / "none.tsv"], "none.tsv cannot be read: No such file"),
        (["--dev", other], "label '7' is not in --train, which has 0, 1; correct it"),
        (["--dev", data, "--task", "regression", "--text", "label", "--label", "sentence"], "needs numbers as labels"),
        (["--dev", data, "--checkpoint", tmp_path], "holds no checkpoint"),
        (["--dev", data, "--checkpoint", tmp_path / "gone"], "gone is no directory here, and the hub does not give it"),
        (
            ["--dev", data, "--out", data],
            "train.tsv cannot be made, because a file is in its place; give another --out",
        ),
        (["--dev", data, "--out", data / "cola"], "cola cannot be made, because a file is in its place"),
    ):
        done = invoke(*arguments, *more)
        assert done.exit_code == 2
        assert said in done.output
