"""Tasks of fine-tuning: files are read or named, measures are those of known programs, seeds are shared and kept."""

import gzip
import json
import math
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from reference import entities as slow
from safetensors.torch import load_file
from training import on_ranks, train
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification, AutoTokenizer

from bertdata.errors import UsageError
from bertdata.files import locked
from bertrain import finetune
from bertrain.tasks import TASKS, Columns, metrics, spans
from bertrain.tasks.words import Sentence

GOOD, BAD = ["river light", "the bread of morning", "light"], ["salt stone", "wind under stone", "salt"]


@pytest.fixture(scope="module")
def checkpoint(dataset, tmp_path_factory):
    run = tmp_path_factory.mktemp("tasks") / "run"
    train(dataset.path, run, model="bert-tiny", steps=2)
    return run


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(sorted(checkpoint.glob("step-*"))[-1])


def invoke(*arguments, command=finetune.main):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def tuned(*arguments, **options):
    """The result of a command that ends well."""
    done = invoke(*arguments, "--json", **options)
    assert done.exit_code == 0, done.output
    return json.loads(done.output.splitlines()[-1])


def task(name, text="0", other="", label="-1", **more):
    return TASKS[name](Columns(text, other, label, **more))


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def refused(name, path, said, **columns):
    with pytest.raises(UsageError, match=said):
        task(name, **columns).read(str(path))


# ----------------------------------------------------------------------------------------------------------- measures


def rows(*of, least=1):
    return st.lists(st.tuples(*of), min_size=least, max_size=30)


@given(rows(st.integers(0, 3), st.integers(0, 3)))
def test_classification_is_measured_as_scikit_learn_does(pairs):
    from sklearn.metrics import f1_score, matthews_corrcoef

    predicted, labels = (np.array(side) for side in zip(*pairs, strict=True))
    found = metrics.classification(predicted, labels, 4)
    assert found["accuracy"] == pytest.approx((predicted == labels).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single label
        assert found["mcc"] == pytest.approx(matthews_corrcoef(labels, predicted))
        f1 = f1_score(labels, predicted, labels=range(4), average="macro", zero_division=0)
    assert found["f1"] == pytest.approx(f1)


@given(st.lists(st.tuples(*[st.booleans()] * 6), min_size=1, max_size=20))
def test_several_labels_are_measured_as_scikit_learn_does(cells):
    from sklearn.metrics import accuracy_score, f1_score

    predicted, labels = np.array(cells)[:, :3], np.array(cells)[:, 3:]
    found = metrics.multilabel(predicted, labels)
    for average in ("micro", "macro"):
        expected = f1_score(labels, predicted, average=average, zero_division=0)
        assert found[f"{average}_f1"] == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, predicted))


@given(rows(st.integers(-3, 3), st.integers(-3, 3), least=3))
def test_correlations_are_those_of_scipy(pairs):
    from scipy.stats import pearsonr, spearmanr

    a, b = (np.array(side, float) for side in zip(*pairs, strict=True))
    found = metrics.regression(a, b)
    for name, theirs in (("pearson", pearsonr), ("spearman", spearmanr)):
        constant = np.ptp(a) == 0 or np.ptp(b) == 0
        assert found[name] == pytest.approx(0.0 if constant else theirs(a, b).statistic, abs=1e-9)


TAGS = ["O", *(f"{letter}-{kind}" for letter in "BIES" for kind in ("PER", "LOC"))]


@given(st.lists(st.sampled_from(TAGS), max_size=12))
def test_entities_are_those_of_the_rules_of_conlleval(tags):
    assert metrics.entities(tags) == slow.entities(tags)


def test_entities_are_counted_whole():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG", "I-ORG"]]
    mine = [["B-PER", "I-PER", "O", "B-PER"], ["O", "B-ORG", "O"]]
    found = metrics.entity_f1(mine, gold)
    assert found == {"entity_f1": pytest.approx(1 / 3), "precision": 1 / 3, "recall": 1 / 3}
    assert metrics.entity_f1(gold, gold)["entity_f1"] == 1.0
    assert metrics.entity_f1([["O"]], [["O"]])["entity_f1"] == 0.0


@pytest.mark.parametrize(
    ("predicted", "answers", "exact", "f1"),
    [
        ("The Norman  conquest!", ["norman conquest"], 1, 1),
        ("Norman conquest of 1066", ["the Norman conquest", "1066"], 0, 2 / 3),
        ("a cat", ["dog"], 0, 0),
        ("", [], 1, 1),
        ("something", [], 0, 0),
        ("", ["something"], 0, 0),
        ("北京大学", ["北京"], 0, 2 / 3),
    ],
)
def test_answers_are_compared_as_squad_does(predicted, answers, exact, f1):
    assert metrics.answer(predicted, answers) == (exact, pytest.approx(f1))


# ------------------------------------------------------------------------------------------------- one and many labels


def test_pairs_are_classification_of_two_texts(checkpoint, tmp_path):
    data = write(tmp_path / "a.tsv", *(f"{a}\t{b}\t{int(a in GOOD)}" for a in GOOD + BAD for b in GOOD))
    common = ["--checkpoint", checkpoint, "--train", data, "--dev", data, "--seeds", 1, "--epochs", 1]
    one = tuned(*common, "--out", tmp_path / "pairs", "--task", "pairs")
    same = tuned(*common, "--out", tmp_path / "classes", "--other", 1)
    assert one["dev_accuracy"] == same["dev_accuracy"]
    one, same = (load_file(tmp_path / out / "seed-0" / "model.safetensors") for out in ("pairs", "classes"))
    assert all(torch.equal(one[name], same[name]) for name in one)


def test_several_labels_are_learned(checkpoint, tmp_path):
    texts = {text: [name for name in ("light", "stone", "river") if name in text] for text in GOOD + BAD}
    tsv = write(tmp_path / "a.tsv", *(f"{text}\t{'; '.join(labels)}" for text, labels in texts.items()))
    jsonl = write(tmp_path / "a.jsonl", *(json.dumps({"t": t, "l": labels}) for t, labels in texts.items()))
    result = tuned("--checkpoint", checkpoint, "--train", tsv, "--dev", jsonl, "--out", tmp_path / "out", "--seeds", 1,
                   "--task", "multilabel", "--separator", ";", "--epochs", 60, "--lr", 3e-3,
                   "--batch-size", 3)  # fmt: skip
    assert result["dev_micro_f1"]["median"] > 0.9
    assert set(result) >= {"dev_macro_f1", "dev_accuracy"}
    read, _ = task("multilabel", separator=";").read(str(tsv))
    assert read.labels == list(texts.values())
    assert task("multilabel").read(str(jsonl))[0].labels == list(texts.values())


def test_labels_that_do_not_fit_are_named_by_line(tmp_path):
    data = write(tmp_path / "a.tsv", "x\ta,b", "y\t", 'z\t["b", "c"]')
    several = task("multilabel")
    examples, _ = several.read(str(data))
    assert examples.labels == [["a", "b"], [], ["b", "c"]]
    several.names = ["a", "b"]
    with pytest.raises(UsageError, match=r"a.tsv, line 3: label 'c' is not in --train, which has a, b; correct it"):
        several.numbers(examples)
    for cell in ("[a", "[" * 100_000):
        refused(
            "multilabel", write(tmp_path / "b.tsv", "x\ta", f"y\t{cell}"), r"b.tsv, line 2: the labels '\[.* are no"
        )
    examples, _ = task("regression").read(str(write(tmp_path / "c.tsv", "x\t1.5", "y\tnan")))
    with pytest.raises(UsageError, match=r"c.tsv, line 2: --task regression needs numbers as labels, .* 'nan'"):
        task("regression").numbers(examples)
    with pytest.raises(UsageError, match="no label"):
        several.learn(several.read(str(write(tmp_path / "d.tsv", "x\t", "y\t")))[0])


# --------------------------------------------------------------------------------------------------------------- tags

CONLL = """-DOCSTART- -X- O

river NN B-PLACE
light NN I-PLACE

# HASH O
salt NN B-THING
"""


def test_files_of_words_and_tags(tmp_path):
    path = write(tmp_path / "a.txt", CONLL)
    expected = [
        Sentence(["river", "light"], ["B-PLACE", "I-PLACE"], f"{path}, line 3"),
        Sentence(["#", "salt"], ["O", "B-THING"], f"{path}, line 6"),
    ]
    assert task("token").read(str(path))[0] == expected
    lists = write(tmp_path / "a.jsonl", *(json.dumps({"words": s.words, "tags": s.tags}) for s in expected))
    assert [s[:2] for s in task("token").read(str(lists))[0]] == [s[:2] for s in expected]
    universal = ("# text = x\n1-2\tdon't\t_\t_\n1\tdo\tdo\tAUX\n2\tn't\tnot\tPART\n2.1\tgo\tgo\tVERB\n"
                 "3\tNew York\tNY\tPROPN\n\n# text = y\n1\t#\t#\tSYM\n")  # fmt: skip
    path = write(tmp_path / "a.conllu", universal)
    found, _ = task("token", "1", label="3").read(str(path))
    assert [s[:2] for s in found] == [(["do", "n't", "New York"], ["AUX", "PART", "PROPN"]), (["#"], ["SYM"])]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "river NN\nlight\n", "a.txt, line 2 has no word or no tag"),
        ("a.txt", "\n\n", "a.txt holds no sentences"),
        ("a.txt.gz", "river NN\n", "a.txt.gz is not a complete gzip file .*; get the file again"),
        ("a.txt", b"river NN\nna\xefve NN\n", "a.txt, line 2 is not UTF-8 text; save the file as UTF-8"),
        ("a.txt.gz", gzip.compress(b"river NN\nna\xefve NN\n", mtime=0), "a.txt.gz, line 2 is not UTF-8 text"),
        ("a.txt.gz", gzip.compress(b"river NN\n", mtime=0)[:-9], "a.txt.gz is not a complete gzip file"),
        ("b.txt", None, "b.txt"),
        ("a.jsonl", '{"w": ["a", "b"], "t": ["X"]}\n', "a.jsonl, line 1 has 2 words and 1 tags; give each word one"),
        ("a.jsonl", '{"w": "a b", "t": "X Y"}\n', "a.jsonl, line 1: --text and --label must be lists"),
    ],
)
def test_words_and_tags_that_do_not_fit_are_named(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    refused("token", tmp_path / name, said)


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfriver NN\n")
    assert task("token").read(str(tmp_path / "a.txt"))[0][0].words == ["river"]


def test_columns_of_words_are_numbers_that_the_file_has(tmp_path):
    path = write(tmp_path / "a.txt", "river NN")
    refused("token", path, r"--text word: the columns of .*a.txt have no names; give the number", text="word")
    refused("token", path, r"line 1 has 2 columns, so no column 0 for --text or 5 for --label", label="5")
    for column in ("--1", "²"):  # neither is a number
        refused("token", path, f"--text {column}: the columns of .*a.txt have no names", text=column)
        refused("classification", write(tmp_path / "a.tsv", "x\t1"), f"has no column '{column}'", text=column)


def test_a_tag_is_at_the_first_token_of_its_word_and_what_is_cut_counts_as_wrong(tokenizer, tmp_path):
    tags = task("token")
    path = write(tmp_path / "a.txt", "rivers A", "x-ray B", "\u200b A", "salt B", "stone A")
    examples, _ = tags.read(str(path))
    assert tags.learn(examples) == []
    data, warned = tags.encode(tokenizer, examples, 64)
    tokens = tokenizer.convert_ids_to_tokens(data.rows[0]["input_ids"])
    labelled = {tokens[i]: tags.names[n] for i, n in enumerate(data.labels[0].tolist()) if n >= 0}
    assert labelled == {"river": "A", "x": "B", "salt": "B", "stone": "A"}
    assert "1 of 5 words are beyond --length 64 or have no token" in warned[0]
    answer = torch.where(data.labels[0] < 0, 0, data.labels[0])
    assert tags.score([answer], data.gold) == {"accuracy": 4 / 5}
    data, warned = tags.encode(tokenizer, examples, 8)
    assert "of 5 words are beyond --length 8" in warned[0]
    assert data.labels.shape == (1, 8)


def test_tags_that_are_never_trained_on_count_as_wrong_and_are_said(tokenizer, tmp_path):
    tags = task("token")
    tags.learn(tags.read(str(write(tmp_path / "a.txt", "river A", "salt B")))[0])
    data, warned = tags.encode(tokenizer, tags.read(str(write(tmp_path / "b.txt", "river A", "salt C")))[0], 64)
    assert "b.txt, line 1: the sentence has the tag 'C', which is never trained on; 1 words" in warned[0]
    assert tags.score([torch.zeros(4, dtype=torch.int64)], data.gold) == {"accuracy": 1 / 2}


def test_entities_are_learned(checkpoint, tmp_path):
    data = write(tmp_path / "a.txt", "the O", "river B-X", "light I-X", "", "salt B-Y", "of O", "stone B-Y", "")
    result = tuned("--checkpoint", checkpoint, "--train", data, "--dev", data, "--test", data, "--out",
                   tmp_path / "out", "--task", "token", "--seeds", 1, "--epochs", 60, "--lr", 3e-3,
                   "--batch-size", 2)  # fmt: skip
    assert result["test_entity_f1"]["median"] == result["test_accuracy"]["median"] == 1.0
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "out" / "seed-0")
    assert set(model.config.id2label.values()) == {"O", "B-X", "I-X", "B-Y"}


# ------------------------------------------------------------------------------------------------------------ answers


def squad(path, *questions):
    """questions: (text, context, the answer or None)."""
    entries = [
        {"context": context, "qas": [{"id": str(i), "question": question, "is_impossible": answer is None,
         "answers": [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]}]}
        for i, (question, context, answer) in enumerate(questions)
    ]  # fmt: skip
    path.write_text(json.dumps({"version": "2.0", "data": [{"title": "x", "paragraphs": entries}]}))
    return path


LONG = "the stone of the river under the light of morning " * 6 + "salt bread " + "the wind of the house " * 6


def test_the_answer_is_where_its_window_says(tokenizer, tmp_path):
    answers = task("qa")
    path = squad(tmp_path / "a.json", ("the salt " * 40, LONG, "salt bread"), ("the house", "river light", None))
    examples, _ = answers.read(str(path))
    answers.learn(examples)
    assert answers.may_be_none
    data, _ = answers.encode(tokenizer, examples, 48)
    assert max(len(row["input_ids"]) for row in data.rows) == 48
    assert len(data.rows) > 4
    covered = np.zeros(len(LONG), bool)
    for window in data.gold.windows[:-1]:
        for begin, end in window.spans:
            covered[begin:end] = True
    assert all(covered[i] or LONG[i] == " " for i in range(len(LONG)))
    found = 0
    for row, (first, last) in zip(data.rows, data.labels.tolist(), strict=True):
        if first:
            found += 1
            assert tokenizer.decode(row["input_ids"][first : last + 1]) == "salt bread"
    assert found >= 1
    # Logits that are sure of the labels give all answers, also that there is none.
    sure = [torch.zeros(48, 2) for _ in data.rows]
    for logits, (first, last) in zip(sure, data.labels.tolist(), strict=True):
        logits[first, 0] = logits[last, 1] = 9.0
    assert answers.score(sure, data.gold) == {"exact_match": 1.0, "f1": 1.0}


@given(st.integers(0, 2**32 - 1), st.integers(1, 18))
def test_the_best_span_is_the_best_of_all(seed, length):
    draw = np.random.default_rng(seed)
    scores, inside = draw.normal(size=(length, 2)), draw.random(length) < 0.7
    tokens = np.stack([np.arange(length), np.arange(length) + 1], 1) * inside[:, None]
    allowed = [(scores[i, 0] + scores[j, 1], i, j) for i in range(length) for j in range(i, length)
               if inside[i] and inside[j]]  # fmt: skip
    found = spans.best_span(scores, tokens)
    assert found == (max(allowed) if allowed else (-math.inf, 0, 0))


def test_an_answer_is_not_longer_than_it_may_be():
    scores, tokens = np.zeros((60, 2)), np.stack([np.arange(60), np.arange(60) + 1], 1)
    scores[0, 0] = scores[59, 1] = 9.0
    _, first, last = spans.best_span(scores, tokens)
    assert last - first < spans.LONGEST_ANSWER


@pytest.mark.slow
def test_answers_are_learned(checkpoint, tmp_path):
    pairs = [(f"the {a}", f"{a} river {b} stone", a) for a in ("salt", "light", "bread") for b in ("wind", "house")]
    data = squad(tmp_path / "a.json", *pairs)
    result = tuned("--checkpoint", checkpoint, "--train", data, "--dev", data, "--out", tmp_path / "out", "--task",
                   "qa", "--seeds", 1, "--epochs", 40, "--lr", 3e-3, "--batch-size", 3, "--length", 32)  # fmt: skip
    assert result["dev_exact_match"]["median"] > 0.9
    AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out" / "seed-0")


def test_questions_that_do_not_fit_are_named(tokenizer, tmp_path):
    wrong = json.loads(squad(tmp_path / "a.json", ("a", "river light", "light")).read_text())
    wrong["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 7
    (tmp_path / "b.json").write_text(json.dumps(wrong))
    refused("qa", tmp_path / "b.json", r"b.json, question '0': the answer 'light' is not at character 7 of the text")
    with pytest.raises(UsageError, match="holds no questions"):
        task("qa", skip=True).read(str(tmp_path / "b.json"))
    refused("qa", tmp_path / "none.json", "none.json")
    examples, _ = task("qa").read(str(tmp_path / "a.json"))
    with pytest.raises(UsageError, match="--length 16 leaves no room for a question and a text; give at least 32"):
        task("qa").encode(tokenizer, examples, 16)


ASKED = {"id": "q7", "question": "a", "answers": [{"answer_start": 6, "text": "light"}]}
SHAPE = "give JSON with data, paragraphs, context, qas, question, answers, answer_start and text"


def of_squad(context="river light", **changed):
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [ASKED | changed]}]}]}, indent=1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"data": []}', "c.json holds no questions"),
        ("{}", f"c.json is not as in a file of SQuAD: it needs data, a list; {SHAPE}"),
        ('{"data": "abc"}', "c.json is not as in a file of SQuAD: it needs data, a list"),
        ('{"data": [{"title": "x"}]}', "c.json, article 1 is not as in a file of SQuAD: it needs paragraphs, a list"),
        (of_squad(context=5), "c.json, article 1 is not as in a file of SQuAD: it needs context, a string"),
        (of_squad(question=None), "c.json, article 1 is not as in a file of SQuAD: it needs question, a string"),
        (of_squad(answers=None), "c.json, question 'q7' is not as in a file of SQuAD: it needs answers, a list"),
        (of_squad(answers={"text": ["light"]}), "question 'q7' is not as in a file of SQuAD: it needs answers, a list"),
        (of_squad(answers=["light"]), "question 'q7' is not as in a file of SQuAD: it needs answer_start, a whole num"),
        (of_squad(answers=[{"answer_start": "6", "text": "light"}]), "question 'q7' is .* it needs answer_start, a wh"),
        (of_squad(answers=[{"answer_start": 6}]), "question 'q7' is not as in a file of SQuAD: it needs text, a strin"),
        (
            of_squad().replace('"a"', '"\\ud83d"'),
            r"c.json, line 10 has half a character, \\ud83d; write its other half",
        ),
        (of_squad()[:-20], r"c.json, line 1\d is not JSON \(Expecting .* at column \d\); correct it"),
        ("[" * 100_000, "c.json, line 1 is not JSON .it is nested too deeply"),
        (of_squad().replace("river", "na\xefve").encode("latin-1"), "c.json, line 6 is not UTF-8 text; save the file"),
    ],
)
def test_a_file_that_is_not_squad_is_named_with_the_place(tmp_path, content, said):
    (tmp_path / "c.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("qa", tmp_path / "c.json", said)


# ------------------------------------------------------------------------------------------------ choices and pronouns


def asked(path, *questions):
    return write(path, *(json.dumps({"text": t, "choices": c, "label": a}) for t, c, a in questions))


def test_a_choice_has_a_row_and_the_highest_score_answers(tokenizer, tmp_path):
    choices = task("choice", text="text", other="choices", label="label")
    path = asked(
        tmp_path / "a.jsonl", ("the river", ["salt", "light", "wind"], 1), ("the house", ["stone", "1"], "stone")
    )
    examples, warnings = choices.read(str(path))
    assert (warnings, [question.answer for question in examples]) == ([], [1, 0])
    data, _ = choices.encode(tokenizer, examples, 32)
    texts = [tokenizer.decode(row["input_ids"]) for row in data.rows]
    pairs = [(question.text, choice) for question in examples for choice in question.choices]
    assert texts == [f"[CLS] {text} [SEP] {choice} [SEP]" for text, choice in pairs]
    assert data.labels.tolist() == [0, 1, 0, 1, 0]
    sure = [torch.tensor([score]) for score in data.labels]
    assert choices.score(sure, data.gold) == {"accuracy": 1.0}
    assert choices.score([*sure[:3], sure[4], sure[3]], data.gold) == {"accuracy": 0.5}
    long, _ = choices.encode(tokenizer, [examples[0]._replace(text="stone " * 90)], 16)
    assert [len(row["input_ids"]) for row in long.rows] == [16] * 3
    assert tokenizer.decode(long.rows[1]["input_ids"]).endswith("[SEP] light [SEP]")  # the longer part is cut


@pytest.mark.slow
def test_choices_are_learned(checkpoint, tmp_path):
    words = ["salt", "light", "wind", "house"]
    questions = ((f"the {word} of stone", words[:size], word) for size in (2, 3, 4) for word in words[:size])
    path = asked(tmp_path / "a.jsonl", *questions)
    result = tuned("--checkpoint", checkpoint, "--train", path, "--dev", path, "--out", tmp_path / "out", "--task",
                   "choice", "--text", "text", "--other", "choices", "--label", "label", "--seeds", 1, "--epochs", 60,
                   "--lr", 3e-3, "--batch-size", 3, "--dropout", 0)  # fmt: skip
    assert result["dev_accuracy"]["median"] == 1.0


def test_both_files_of_c3_are_read_and_watched(checkpoint, tmp_path):
    for kind, text, answer in (("d", ["男：水", "女：light"], "salt"), ("m", ["river"], "light")):
        entry = [text, [{"question": "what", "choice": ["salt", "light"], "answer": answer}], "1"]
        (tmp_path / f"{kind}-train.json").write_text(json.dumps([entry]))
    examples, _ = task("choice").read(str(tmp_path / "d-train.json"))
    assert [(q.text, q.question, q.answer) for q in examples] == [
        ("男：水\n女：light", "what", 0),
        ("river", "what", 1),
    ]
    path = tmp_path / "d-train.json"
    common = ["--task", "choice", "--checkpoint", checkpoint, "--train", path, "--dev", path, "--seeds", 1,
              "--epochs", 1, "--out", tmp_path / "out"]  # fmt: skip
    invoke(*common)
    assert "finished before" in invoke(*common).output
    other = tmp_path / "m-train.json"
    other.write_text(other.read_text().replace("river", "wind"))
    assert (
        "was trained otherwise: the content of --train changed; the content of --dev changed; give"
        in invoke(*common).output
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a", "choices": ["b", "c"], "label": 2}', "line 1: the answer 2 is none of the 2 choices; give one"),
        ('{"text": "a", "choices": ["b", "c"], "label": "d"}', "line 1: the answer 'd' is none of the 2 choices"),
        ('{"text": "a", "choices": ["b"], "label": 0}', "line 1: a question needs a list of two choices or more"),
        ('{"text": "a", "choices": "b", "label": 0}', "line 1: a question needs a list of two choices or more"),
        ('[["a", 1]]', "is not a file of C3, as its text 1 shows; give a list of texts"),
        ('[{"text": "a"}]', "is not a file of C3, as its text 1 shows"),
        ('[[["a"], []], ["abc", [{"question": "b", "choice": ["c", "d"], "answer": "c"}]]]', "C3, as its text 2 shows"),
        ('[[["a"], [{"question": 5, "choice": ["c", "d"], "answer": "c"}]]]', "is not a file of C3, as its text 1"),
        ('[\n[["a"],\n[{"question":', r"a.json, line 3 is not JSON \(Expecting value at column 14\); correct it"),
        (b'[\n[["na\xefve"],[]]]', "a.json, line 2 is not UTF-8 text; save the file as UTF-8"),
        ("[]", "holds no questions"),
    ],
)
def test_choices_that_do_not_fit_are_named(tmp_path, content, said):
    (tmp_path / "a.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("choice", tmp_path / "a.json", said, text="text", other="choices", label="label")


def test_rows_that_do_not_fit_are_left_out_where_a_suite_says_so(tmp_path):
    rows = wsc("床上有书，它很软", "床", "它"), wsc("床上有书", "床", "书", span1_index=2)
    examples, warnings = task("coreference", text="text", label="label", skip=True).read(
        str(write(tmp_path / "a.json", *rows))
    )
    assert (len(examples.texts), len(warnings)) == (1, 1)
    for name, content in (
        ("b.jsonl", '{"text": "a", "choices": ["b", "c"], "label": 1}\n{"text": "a", "choices": ["b"], "label": 0}\n'),
        ("c.json", json.dumps([[["a"], [{"question": "b", "choice": ["c", "d"], "answer": x} for x in "ce"], "1"]])),
    ):
        (tmp_path / name).write_text(content)
        read = task("choice", text="text", other="choices", label="label", skip=True).read(str(tmp_path / name))
        assert [len(part) for part in read] == [1, 1]
        assert "1 rows were left out" in read[1][0]


def test_a_file_may_have_a_name_of_one_letter(tmp_path):
    for name in ("x", ".", "d-", "m-a.jsonl"):
        assert task("choice").files(name) == [name]


def test_choices_need_the_column_that_has_them(tmp_path):
    refused("choice", asked(tmp_path / "a.jsonl", ("a", ["b", "c"], 0)), "needs --other, the column with the list")


def wsc(text, noun, pronoun, label="true", **more):
    target = {
        "span1_text": noun,
        "span1_index": text.find(noun),
        "span2_text": pronoun,
        "span2_index": text.find(pronoun),
    }
    return json.dumps({"text": text, "label": label, "target": target | more})


def test_noun_and_pronoun_are_marked_where_they_stand(tmp_path):
    path = write(tmp_path / "a.json", wsc("床上有书，它很软", "床", "它"), wsc("他说老王来了", "老王", "他", "false"))
    examples, _ = task("coreference", text="text", label="label").read(str(path))
    assert examples.texts == ["_床_上有书，[它]很软", "[他]说_老王_来了"]
    assert examples.labels == ["true", "false"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (wsc("床上有书", "床", "书", span1_index=2), "line 1: span1_text '床' is not at character 2 of the text"),
        (wsc("床上有书", "床", "书", span2_index=-1), "line 1: span2_text '书' is not at character -1 of the text"),
        (wsc("床上有书", "床", "书", span2_index="x"), "line 1: target needs span1_text, span1_index"),
        (json.dumps({"text": "a", "target": "b", "label": 1}), "line 1: target needs span1_text, span1_index"),
        (json.dumps({"text": "a", "label": 1}), "has no column 'target'"),
    ],
)
def test_pronouns_that_do_not_fit_are_named(tmp_path, row, said):
    refused("coreference", write(tmp_path / "a.json", row), said, text="text", label="label")


# ------------------------------------------------------------------------------------------------------ seeds, patience


def arguments(checkpoint, tmp_path, *more):
    data = write(tmp_path / "a.tsv", *(f"{text}\t{int(text in GOOD)}" for text in GOOD + BAD))
    return ["--checkpoint", checkpoint, "--train", data, "--dev", data, "--epochs", 2, "--json", *more]


def test_a_seed_that_is_finished_is_neither_run_again_nor_replaced(checkpoint, tmp_path):
    common = arguments(checkpoint, tmp_path, "--out", tmp_path / "out")
    tuned(*common, "--seeds", 1)
    again = invoke(*common, "--seeds", 2)
    assert "seed 0: finished before, in " in again.output
    assert "seed 0: loaded" not in again.output
    assert "seed 1: loaded" in again.output
    result = json.loads(again.output.splitlines()[-1])
    assert result["dev_accuracy"]["median"] in (result["dev_accuracy"]["min"], np.mean(
        [result["dev_accuracy"]["min"], result["dev_accuracy"]["max"]]).round(5))  # fmt: skip
    place, newest = tmp_path / "out" / "seed-0", finetune.resolved(str(checkpoint))
    same = invoke(*common, "--seeds", 2, "--checkpoint", newest)  # by another path
    assert same.output.count("finished before") == 2
    files = {path: path.read_bytes() for path in place.parent.rglob("*.*") if path.is_file() and path.name != ".lock"}
    assert {place / "model.safetensors", place.parent / "result.json"} <= {*files}
    shutil.copytree(newest, tmp_path / "other")
    (tmp_path / "other" / "note.json").write_text("{}")
    (tmp_path / "b.tsv").write_bytes((tmp_path / "a.tsv").read_bytes() + b"light\t0\n")
    for more, said in (
        (["--lr", 1e-4], "--lr was 5e-05 and is 0.0001"),
        (["--test", tmp_path / "b.tsv"], "the content of --test is new"),
        (["--from-scratch"], "--from-scratch is new"),
        (["--train", tmp_path / "b.tsv", "--epochs", 3], "--epochs was 2 and is 3; the content of --train changed"),
        (["--task", "regression"], "--task was classification and is regression; the measure was accuracy and is p"),
        (
            ["--checkpoint", tmp_path / "other"],
            f"--checkpoint was {newest} and is {tmp_path / 'other'}; the content of --checkpoint changed",
        ),
    ):
        done = invoke(*common, *more)
        assert (done.exit_code, f"Error: {place} was trained otherwise: {said}" in done.output) == (2, True), (
            done.output
        )
        assert done.output.endswith("; give the same again, or another --out\n")
    assert all(path.read_bytes() == content for path, content in files.items())
    (place / "seed.json").write_text("{}")  # no whole one
    assert "seed 0: loaded" in invoke(*common, "--seeds", 1).output


def test_results_of_another_command_or_process_are_kept(checkpoint, tmp_path):
    common = arguments(checkpoint, tmp_path, "--out", tmp_path / "out", "--seeds", 1)
    (tmp_path / "out").mkdir()
    kept = json.dumps({"suite": "glue", "tasks": {}})
    (tmp_path / "out" / "result.json").write_text(kept)
    done = invoke(*common)
    assert (done.exit_code, "out holds results of bertrain suite glue; give another --out" in done.output) == (2, True)
    assert (tmp_path / "out" / "result.json").read_text() == kept
    with locked(tmp_path / "out" / ".lock", "busy", "wait"):
        done = invoke(*common)
    assert (done.exit_code, "is in use by process" in done.output) == (1, True), done.output


def test_a_seed_that_gets_no_better_ends(checkpoint, tmp_path):
    common = arguments(checkpoint, tmp_path, "--seeds", 1, "--epochs", 9, "--lr", 1e-9)
    tuned(*common, "--out", tmp_path / "out", "--patience", 2)
    (run,) = json.loads((tmp_path / "out" / "result.json").read_text())["runs"]
    assert len(run["curve"]) == run["best_epoch"] + 2 < 9


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_share_out_the_seeds_and_give_the_bits_of_one(checkpoint, tmp_path):
    common = arguments(checkpoint, tmp_path, "--seeds", 3, "--precision", "fp32")
    alone = tuned(*common, "--out", tmp_path / "one")
    code, said, err = on_ranks(2, "bertrain.finetune", [str(a) for a in [*common, "--out", tmp_path / "two"]])
    assert code == 0, err
    assert json.loads(said) == alone
    for seed in range(3):
        one, same = (load_file(tmp_path / out / f"seed-{seed}" / "model.safetensors") for out in ("one", "two"))
        assert all(torch.equal(one[name], same[name]) for name in one)


@pytest.mark.dist
def test_an_error_is_said_once_by_ranks(checkpoint, tmp_path):
    common = arguments(checkpoint, tmp_path, "--text", "7", "--out", tmp_path / "out")
    code, _, err = on_ranks(2, "bertrain.finetune", [str(a) for a in common])
    assert (code, err.count("has no column '7'")) == (2, 1), err


# ---------------------------------------------------------------------------------------------------------------- page


PAGE = (Path(__file__).parent.parent / "docs" / "finetuning.md").read_text()


def test_the_page_names_every_task():
    assert all(f"| `{name}` |" in PAGE for name in TASKS)
