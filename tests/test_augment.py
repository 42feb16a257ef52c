"""Copies of labelled rows: the right words are replaced by the right ones, nothing else changes. Teachers of tasks."""

import gzip
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.commands import invoke, json_of, refused, refuses, succeeds, tuning
from support.data import BAD, GOOD, write_labelled
from support.disk import recorded, write
from support.runs import on_ranks
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bertdata.sources.streams import InputStream
from bertrain.checkpoint import resolved
from bertrain.commands import reading
from bertrain.lab import augment, finetune, heads, tables
from bertrain.lab.tasks import TASKS, Columns


@pytest.fixture(scope="module")
def checkpoint(bert_run):
    return resolved(str(bert_run))


def augmented(checkpoint, data, out, *more):
    said = succeeds(augment.main, "--checkpoint", checkpoint, "--train", data, "--out", out, *more).stdout
    assert not out.with_name(out.name + ".parts").exists()
    return said


def proposer(checkpoint, *, most=5, kept=(), vectors=None):
    return augment.Proposer(checkpoint, torch.device("cpu"), most=most, kept=frozenset(kept), vectors=vectors)


def proposed(made, text):
    """The words of a text with their proposals."""
    rows = made.propose([text])
    return {
        word: [made.words[i] for i in row if i != augment.NONE]
        for word, row in zip(augment.WORD.findall(text), rows, strict=True)
    }


# --------------------------------------------------------------------------------------------------------------- copies


def test_words_are_letters_that_touch_no_digit_and_no_apostrophe():
    words = augment.WORD.findall("Don't re-run x2 the naïve 水河 test's end, (ok) it ’s")
    assert " ".join(words) == "re run the naïve 水 河 end ok it"


def test_copies_change_words_alone_and_keep_the_rest(checkpoint, tmp_path):
    data = write(tmp_path / "a.tsv", "The river, light & 12 stones!\tx\t1", "don't stop\ty\t0", "12\tz\t0")
    augmented(checkpoint, data, tmp_path / "b.tsv", "--copies", 8)
    rows = [line.split("\t") for line in (tmp_path / "b.tsv").read_text().splitlines()]
    groups = {name: [row for row in rows if row[1] == name] for name in "xyz"}
    assert [row[1] for row in rows] == [*"x" * len(groups["x"]), *"y" * len(groups["y"]), "z"]
    assert [groups[name][0][0] for name in "xyz"] == ["The river, light & 12 stones!", "don't stop", "12"]
    texts = [row[0] for row in groups["x"]]
    assert 4 < len(texts) == len(set(texts)) <= 9
    assert {row[2] for row in groups["x"]} == {"1"}
    assert all(re.fullmatch(r"\w+ \w+, \w+ & 12 \w+!", text) for text in texts)
    assert all(re.fullmatch(r"don't \w+", row[0]) for row in groups["y"])
    made = proposer(checkpoint, most=15)
    for word, choices in zip(("The", "river", "light", "stones"), proposed(made, texts[0]).values(), strict=True):
        place = augment.WORD.findall(texts[0]).index(word)
        assert {augment.WORD.findall(text)[place] for text in texts} <= {word, *choices}


def test_fewer_copies_are_the_first_ones_and_another_seed_gives_others(checkpoint, tmp_path):
    data = write(tmp_path / "a.tsv", "the river and the light of the morning wind\t1")
    for name, *more in (("2", "--copies", 2), ("9", "--copies", 9), ("seed", "--copies", 2, "--seed", 1)):
        augmented(checkpoint, data, tmp_path / f"{name}.tsv", *more)
    two, nine, seed = ((tmp_path / f"{name}.tsv").read_text().splitlines() for name in ("2", "9", "seed"))
    assert nine[: len(two)] == two
    assert seed[1:] != two[1:]


def test_both_texts_of_a_pair_change_and_words_are_kept(checkpoint, tmp_path):
    data = write(tmp_path / "a.csv", "one,two,label", '"the river, light","say ""not"" salt",1')
    keep = write(tmp_path / "keep.txt", "Not the", "say")
    columns = ["--task", "pairs", "--text", "one", "--other", "two", "--label", "label"]
    said = augmented(checkpoint, data, tmp_path / "b.csv", *columns, "--keep", keep, "--share", 1)
    _, *rows = tables.read(str(tmp_path / "b.csv"), {"text": "one", "other": "two", "label": "label"}).rows
    assert len(rows) > 10
    assert f" {len(rows)} copies of them; 50% of" in said  # three of six words are kept
    for one, two in ((row["one"], row["two"]) for _, row in rows):
        assert re.fullmatch(r"the (?!river)\w+, (?!light)\w+", one)
        assert re.fullmatch(r'say "not" (?!salt)\w+', two)


# ------------------------------------------------------------------------------------------------------------ proposals


def test_proposals_are_the_most_probable_whole_words_in_the_place(checkpoint):
    model, tokenizer = (kind.from_pretrained(checkpoint) for kind in (AutoModelForMaskedLM, AutoTokenizer))
    text = "the wind under stone, river light"
    made = proposer(checkpoint)
    found = proposed(made, text)
    assert [*found] == ["the", "wind", "under", "stone", "river", "light"]
    for word, place in (("wind", 2), ("light", 7)):
        ids = tokenizer(text, return_tensors="pt").input_ids
        ids[0, place] = tokenizer.mask_token_id
        order = model(ids).logits[0, place].argsort(descending=True).tolist()
        tokens = tokenizer.convert_ids_to_tokens(order)
        assert found[word] == [token for token in tokens if token.isalpha() and token != word][:5]


def test_each_row_with_a_mask_goes_through_the_model_once(checkpoint, monkeypatch):
    made, rows = proposer(checkpoint), []
    logits = made._encoder.logits
    monkeypatch.setattr(
        made._encoder, "logits", lambda **given: rows.append(len(given["input_ids"])) or logits(**given)
    )
    both = made.propose(["the river", "the light", "salt"])
    assert (sum(rows), both.shape) == (4, (5, 5))  # "the [MASK]" is one row
    monkeypatch.setattr(augment, "PLACES", 4)
    assert np.array_equal(both, made.propose(["the river", "the light", "salt"]))


def test_a_word_of_several_tokens_gets_its_nearest_neighbours(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(augment, "MOST_VECTORS", 9)
    draw, words = np.random.default_rng(0), ["stones", "rivers", "salty", "x2", "breads", "the", "Stones"]
    table = draw.normal(size=(len(words), 4))
    lines = (" ".join(map(str, [word, *row])) for word, row in zip(words, table, strict=True))
    file = write(tmp_path / "glove.txt", "7 4", *lines, "at name@domain.com 1 2 3 4", "beyond 1 2 3 4")
    vectors = augment.read_vectors(str(file))
    assert vectors[0] == ["stones", "rivers", "salty", "breads", "the", "Stones"]
    found = proposed(proposer(checkpoint, most=3, vectors=vectors), "Rivers winds the")
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    order = [words[i] for i in (-units @ units[1]).argsort()]
    assert found["Rivers"] == [word for word in order if word not in ("rivers", "x2")][:3]
    assert found["winds"] == []  # is not in the file
    assert len(found["the"]) == 3  # one token: the model proposes
    without = proposed(proposer(checkpoint, most=3), "Rivers")["Rivers"]
    assert len(without) == 3
    assert all(word.isalpha() for word in without)


def test_candidates_do_not_depend_on_other_texts_and_none_are_beyond_the_longest_row(checkpoint, tmp_path, monkeypatch):
    longest = 24
    monkeypatch.setattr(augment, "max_length", lambda config: longest)
    file = write(tmp_path / "glove.txt", "rivers 1 2", "stones 2 1", "salty 1 1")
    for vectors in (None, augment.read_vectors(str(file))):
        made = proposer(checkpoint, most=2, vectors=vectors)
        long = "the " * longest + "rivers"
        rows = made.propose([long, "rivers the"])
        assert np.array_equal(rows[-2:], made.propose(["rivers the"]))
        assert (rows[-2:] != augment.NONE).all()
        assert (rows[0] != augment.NONE).all()
        assert (rows[longest:][:-2] == augment.NONE).all()


def test_vectors_that_cannot_be_read_are_named(tmp_path):
    for lines, kind, where in (
        (None, "not-found", "v.txt"),
        (["the 1 2", "of 1"], "bad-row", "line 2"),
        (["the 1 x"], "bad-row", "line 1"),
        (["the 1 nan"], "bad-row", "line 1"),
        (["the 1 1e39"], "bad-row", "line 1"),  # too large for float32
        (["12 1 2"], "empty", "v.txt"),
    ):
        if lines:
            write(tmp_path / "v.txt", *lines)
        with refuses(kind, "vectors" if lines else None, says=where):
            augment.read_vectors(str(tmp_path / "v.txt"))


# -------------------------------------------------------------------------------------------------- files, interruption


def test_files_that_unpack_to_no_end_are_named(tmp_path, monkeypatch):
    """What a line has is looked at a piece at a time, and never all of it."""
    monkeypatch.setattr(augment, "LONGEST_LINE", 1 << 18)
    monkeypatch.setattr(reading, "MOST_BYTES", 1 << 18)
    path, reads = tmp_path / "v.txt.gz", []
    path.write_bytes(gzip.compress(b"a 1 2\n") + gzip.compress(b"a" * (1 << 20)) * 50)
    read = InputStream.read
    monkeypatch.setattr(InputStream, "read", lambda self, size=-1: reads.append(read(self, size)) or reads[-1])
    with refuses("too-large", "vectors", given=str(path)):
        augment.read_vectors(str(path))
    with refuses("too-large", "keep", given=str(path)):
        reading.text(str(path), "keep")
    assert sum(map(len, reads)) < 1 << 20


def test_a_killed_command_goes_on_and_ends_in_the_same_bytes(checkpoint, tmp_path, monkeypatch):
    data = write_labelled(tmp_path / "a.tsv")
    augmented(checkpoint, data, tmp_path / "whole.tsv")
    monkeypatch.setattr(augment, "TEXTS", 2)
    propose, calls = augment.Proposer.propose, []

    def killed(self, texts):
        calls.append(texts)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return propose(self, texts)

    monkeypatch.setattr(augment.Proposer, "propose", killed)
    common = ["--checkpoint", checkpoint, "--train", data, "--out", tmp_path / "b.tsv"]
    assert invoke(augment.main, *common).exit_code == 130
    assert not (tmp_path / "b.tsv").exists()
    succeeds(augment.main, *common)
    assert len(calls) == 4  # two of three parts were there
    assert (tmp_path / "b.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()
    (tmp_path / "b.tsv").unlink()
    calls.clear()
    assert invoke(augment.main, *common).exit_code == 130
    calls[:] = [[]] * 3
    augmented(checkpoint, data, tmp_path / "b.tsv", "--candidates", 3)  # parts of other options are not used
    assert len(calls) == 6


@pytest.fixture
def interrupted(checkpoint, tmp_path, monkeypatch):
    """The arguments of a command that has made all its parts, and was interrupted then."""
    monkeypatch.setattr(augment, "TEXTS", 32)
    data = write(tmp_path / "a.tsv", *(f"light {'salt ' * (n % 7)}wind {n} stone\t{n % 2}" for n in range(70)))
    command = ["--checkpoint", checkpoint, "--train", data, "--copies", 2, "--out", tmp_path / "b.tsv"]
    with monkeypatch.context() as patched:
        patched.setattr(augment._Rows, "write", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert invoke(augment.main, *command).exit_code == 130
    assert len(list((tmp_path / "b.tsv.parts").glob("*.npy"))) == 3
    return command


def test_a_second_job_changes_nothing_of_the_first(interrupted, tmp_path, monkeypatch):
    parts, write_out = tmp_path / "b.tsv.parts", augment._Rows.write

    def written(work):
        before = {path: path.read_bytes() for path in parts.iterdir()}
        refused(augment.main, *interrupted, "--candidates", 3, kind="busy")
        assert {path: path.read_bytes() for path in parts.iterdir()} == before
        write_out(work)

    monkeypatch.setattr(augment._Rows, "write", written)
    succeeds(augment.main, *interrupted)
    assert (tmp_path / "b.tsv").exists()
    refused(augment.main, *interrupted, "--candidates", 3, kind="out-exists", option="out")


@pytest.mark.slow
def test_ranks_share_out_the_texts_and_write_the_bytes_of_one(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(augment, "TEXTS", 32)
    data = write(tmp_path / "a.tsv", *(f"light {'salt ' * (n % 7)}wind {n} stone\t{n % 2}" for n in range(100)))
    common = ["--checkpoint", checkpoint, "--train", data, "--copies", 2, "--out"]
    augmented(checkpoint, data, tmp_path / "one.tsv", "--copies", 2)
    said, _ = on_ranks(2, "bertrain", ["augment", *common, tmp_path / "two.tsv"])
    assert said.count("100 rows and") == 1
    assert (tmp_path / "one.tsv").read_bytes() == (tmp_path / "two.tsv").read_bytes()


TEXTS = {
    "tsv": 'say "no"\t7\t1\nnaïve 水\t\t0\n',
    "csv": 'text,more,label\n"say ""no"", twice",7,1\n"two\nlines",,0\n',
    "jsonl": '{"text": "naïve 水", "more": [1, null], "label": 1.5}\n{"text": "b", "label": 0, "x": {}}\n',
}


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "parquet"])
def test_files_keep_their_format_and_columns(tmp_path, kind):
    path, out = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": ["a", "b"], "more": [[1], None], "label": [1.5, 2.0]}), path)
    else:
        path.write_text(TEXTS[kind])
    roles = {"text": "0", "label": "label" if kind == "jsonl" else "-1"}
    table = tables.read(str(path), roles)
    with recorded(tmp_path) as disk:
        tables.write(out, table, (row for _, row in table.rows))
    assert (disk.renames, disk.pending) == ([out], set())
    assert out.read_bytes() == path.read_bytes() or kind == "parquet"
    assert tables.read(str(out), roles).rows == table.rows
    if kind == "parquet":
        assert pq.read_schema(out) == pq.read_schema(path)
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".tmp"] == []


def test_what_cannot_be_augmented_is_refused(checkpoint, tmp_path):
    data, single = write_labelled(tmp_path / "a.tsv"), write(tmp_path / "single.tsv", "river", "light")
    empty = write(tmp_path / "empty.tsv", "river\t1", "light\t")
    older, latin = write(tmp_path / "older.tsv", "kept"), tmp_path / "latin.txt"
    latin.write_bytes(b"not\nna\xefve\n")
    out = ["--out", tmp_path / "b.tsv"]
    for arguments, kind, option, given in (
        (["--train", data, "--out", tmp_path / "b.csv"], "malformed", "out", str(tmp_path / "b.csv")),
        (["--train", data, "--out", data], "out-exists", "out", str(data)),
        (["--train", data, "--out", older], "out-exists", "out", str(older)),
        (["--train", empty, *out], "bad-row", None, None),
        (["--train", data, *out, "--keep", tmp_path / "none"], "not-found", "keep", str(tmp_path / "none")),
        (["--train", data, *out, "--keep", latin], "not-text", None, None),
        (["--train", data, *out, "--task", "pairs"], "conflict", "label", "-1"),
        (["--train", single, *out], "conflict", "label", "-1"),
        (["--train", data, *out, "--task", "qa"], "unknown", "task", "qa"),
    ):
        refused(augment.main, "--checkpoint", checkpoint, *arguments, kind=kind, option=option, given=given)
    assert older.read_text() == "kept\n"
    succeeds(augment.main, "--checkpoint", checkpoint, "--train", empty, *out, "--task", "multilabel")


# ------------------------------------------------------------------------------------------------------------- teachers


TUNING = ["--epochs", 4, "--lr", 2e-3, "--batch-size", 4]


@pytest.fixture(scope="module")
def teacher(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    data = write_labelled(folder / "a.tsv", repeat=4)
    result = json_of(finetune.main, *tuning(checkpoint, data, folder / "tuned", *TUNING))
    assert result["dev_accuracy"]["min"] == 1.0
    return folder / "tuned" / "seed-0"


def test_a_student_learns_what_its_teacher_says_and_not_the_labels(checkpoint, teacher, tmp_path):
    data = write(tmp_path / "a.tsv", *[f"{text}\t{int(text in BAD)}" for text in GOOD + BAD] * 4)
    more = ["--dev", write_labelled(tmp_path / "dev.tsv"), "--teacher", teacher]
    result = json_of(finetune.main, *tuning(checkpoint, data, tmp_path / "out", *more, *TUNING))
    assert result["dev_accuracy"]["min"] == 1.0
    assert result["teacher"] == str(teacher)
    task, said = TASKS["classification"](Columns("0", "", "-1")), []
    for task.names in (["0", "1"], ["1", "0"]):  # the labels may have another order than those of the teacher
        said.append(heads.teacher(str(teacher), task, "classification").logits([{"input_ids": [7, 8, 9]}]))
    assert torch.equal(said[0], said[1].flip(-1))


@pytest.mark.parametrize("name", ["classification", "regression", "multilabel"])
def test_a_teacher_that_is_sure_is_worth_its_labels(name):
    task = TASKS[name](Columns("0", "", "-1"))
    logits, student = torch.tensor([[40.0, -40.0], [-40.0, 40.0], [-40.0, 40.0]]), torch.randn(3, 2)
    labels = torch.tensor([0, 1, 1])
    if name == "regression":
        logits, student, labels = logits[:, :1], student[:, :1], logits[:, 0]
    if name == "multilabel":
        labels = torch.eye(2)[labels]
    torch.testing.assert_close(task.loss(student, task.taught(logits)), task.loss(student, labels))


def test_a_teacher_of_something_else_is_refused(checkpoint, teacher, tmp_path):
    """Also of another kind of task whose labels have the same names."""
    data, same = write(tmp_path / "a.tsv", "river\tyes", "salt\tno"), write_labelled(tmp_path / "same.tsv")
    succeeds(finetune.main, *tuning(checkpoint, same, tmp_path / "several", "--task", "multilabel"))
    several = tmp_path / "several" / "seed-0"
    common = tuning(checkpoint, data, tmp_path / "out", "--teacher")
    for more, kind in (
        ([teacher], "unsupported"),
        ([teacher, "--task", "token"], "conflict"),
        ([checkpoint], "unsupported"),
        ([tmp_path / "none"], "model-not-found"),
        ([several, "--train", same, "--dev", same], "unsupported"),
    ):
        assert refused(finetune.main, *common, *more, kind=kind, option="teacher").given == str(more[0])
    succeeds(finetune.main, *common, several, "--task", "multilabel", "--train", same, "--dev", same)
