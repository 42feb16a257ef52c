"""Tasks of fine-tuning: what files give, what is wrong in them, rows and labels, measures as known programs, suites."""

import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn
from support.commands import json_of, refused, refuses, succeeds
from support.data import BAD, GOOD, byte_level_bpe
from support.disk import before_rename, put, write
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bertrain.__main__ import main
from bertrain.lab import tables
from bertrain.lab.suite import SUITES
from bertrain.lab.tasks import TASKS, Columns, Example, metrics, spans


@pytest.fixture(scope="module")
def tokenizer(bert_run):
    return AutoTokenizer.from_pretrained(bert_run / "step-00000002")


def written(path, content):
    """Writes text, bytes, a table of Arrow, or nothing for None; returns the path."""
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    elif content is not None:
        put(path, content)
    return str(path)


# ----------------------------------------------------------------------------------------------------------- measures


def of_classes(draw):
    size, num_labels = int(draw.integers(1, 12)), int(draw.integers(2, 5))
    predicted, labels = draw.integers(0, num_labels, (2, size))
    f1 = sklearn.f1_score(labels, predicted, zero_division=0, average="binary" if num_labels == 2 else "macro")
    mcc = sklearn.matthews_corrcoef(labels, predicted)
    theirs = {"accuracy": sklearn.accuracy_score(labels, predicted), "f1": f1, "mcc": mcc}
    return metrics.classification(predicted, labels, num_labels), theirs


def of_labels(draw):
    predicted, labels = draw.random((2, int(draw.integers(1, 9)), 3)) < draw.random()
    f1 = {f"{a}_f1": sklearn.f1_score(labels, predicted, average=a, zero_division=0) for a in ("micro", "macro")}
    return metrics.multilabel(predicted, labels), f1 | {"accuracy": sklearn.accuracy_score(labels, predicted)}


def of_numbers(draw):
    a, b = draw.integers(-3, 4, (2, int(draw.integers(3, 12)))).astype(float)
    is_constant, kinds = np.ptp(a) == 0 or np.ptp(b) == 0, {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    return metrics.regression(a, b), {n: 0.0 if is_constant else kind(a, b).statistic for n, kind in kinds.items()}


def of_entities(draw):
    seqeval = pytest.importorskip("seqeval.metrics")
    tags = np.array(["O", *(f"{letter}-{kind}" for letter in "BIES" for kind in ("PER", "LOC"))])
    mine, true = ([tags[draw.integers(0, len(tags), size)].tolist() for size in (3, 6)] for _ in "ab")
    kinds = {"entity_f1": seqeval.f1_score, "precision": seqeval.precision_score, "recall": seqeval.recall_score}
    return metrics.entity_f1(mine, true), {name: kind(true, mine, zero_division=0) for name, kind in kinds.items()}


@pytest.mark.parametrize("measured", [of_classes, of_labels, of_numbers, of_entities])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning", "ignore:A single label was found")
def test_measures_are_those_of_known_programs(measured):
    draw = np.random.default_rng(0)
    for number in range(200):
        ours, theirs = measured(draw)
        assert ours == pytest.approx(theirs, abs=1e-9), number


def test_answers_are_compared_as_squad_does():
    for predicted, answers, exact, f1 in (
        ("The Norman  conquest!", ["norman conquest"], 1, 1),
        ("a cat", ["dog"], 0, 0),
        ("", [], 1, 1),
        ("Norman conquest of 1066", ["the Norman conquest", "1066"], 0, 2 / 3),
        ("something", [], 0, 0),
        ("", ["something"], 0, 0),
        ("北京大学", ["北京"], 0, 2 / 3),
    ):
        assert metrics.answer(predicted, answers) == (exact, pytest.approx(f1)), predicted


SEQEVAL = [  # tags, predicted tags; numbers of right, predicted and true entities by the rules of seqeval, or an error
    ("B-X I-X O B-Y", "B-X I-X O B-X", 1, 2, 2),
    ("I-X I-X B-X O I-Y", "I-X I-X I-X O I-Y", 1, 2, 3),  # IOB1
    ("I-X I-Y O I-X", "I-X I-Y O O", 2, 2, 3),
    ("B-X I-X E-X S-Y O", "B-X I-X E-X O S-Y", 1, 2, 2),
    ("E-X I-X S-X I-X E-X B-X E-Y", "E-X I-X S-X I-X I-X B-X E-X", 4, 5, 6),
    ("B-X I-X L-X U-Y U-Y O", "B-X I-X L-X U-Y O U-Y", 2, 3, 3),  # BILOU
    ("B-X M-X E-X W-Y S-Y O", "B-X M-X E-X W-Y O S-Y", 2, 3, 3),
    ("b-x i-x o B-x", "B-x i-x o b-x", 2, 2, 2),
    ("X-B X-I O Y-B", "X-B X-I Y-B O", 1, 2, 2),
    ("B_X I_X O B_X-Y", "B_X I_X B_X-Y O", 1, 2, 2),
    ("B I O B", "B I B O", 1, 2, 2),
    ("B M E S B E", "B M E S S S", 2, 4, 3),
    ("LOC LOC O PER", "LOC LOC O LOC", 1, 2, 2),
    ("loc loc o per", "loc loc o loc", 1, 2, 2),
    *((f"B{c}X I{c}X O B{c}Y", f"B{c}X I{c}X O B{c}X", 1, 2, 2) for c in ":./|"),
    ("O O", "O O", 0, 0, 0),
    ("NN VB DT", "NN VB DT", None),
    ("0 1 2 10", "0 1 2 10", None),
    ("B-X LOC O O", "", "'LOC'"),
    ("b-x i-x B- O", "", "'B-'"),
    ("B- I- O", "", "'B-'"),
    ("B-X I-X _", "", "'_'"),
    ("B_X I_X LOC O", "", "'LOC'"),
    ("B-X I-X 0 0", "", "'0'"),
]


@pytest.mark.parametrize(("gold", "mine", "expected"), [(gold, mine, more) for gold, mine, *more in SEQEVAL])
def test_the_forms_of_tags_are_measured_as_seqeval_does(gold, mine, expected):
    tags, (true, predicted) = TASKS["token"](), (side.split() for side in (gold, mine))
    sentence = Example(true, None, true, "a.txt, line 7")
    if isinstance(expected[0], str):
        with refuses("bad-row", says="a.txt, line 7") as caught:
            tags.learn([sentence])
        assert expected[0] in str(caught.value)
        return
    tags.learn([sentence])
    answer = torch.tensor([tags.names.index(tag) for tag in predicted])
    scores = tags.score([answer], ([sentence], [{i: i for i in range(len(true))}]))
    assert scores.pop("accuracy") == sum(a == b for a, b in zip(true, predicted, strict=True)) / len(true)
    assert (scores == {}) == (expected[0] is None) == (tags.main == "accuracy")
    if scores:
        right, num_predicted, num_true = expected
        precision, recall = right / max(1, num_predicted), right / max(1, num_true)
        f1 = 2 * right / max(1, num_predicted + num_true)
        assert scores == pytest.approx({"entity_f1": f1, "precision": precision, "recall": recall})


# -------------------------------------------------------------------------------------------------------------- files


def tagged(sentence):
    """An example of words and their tags, from word/tag word/tag, in which _ stands for a space."""
    words, tags = zip(*(part.replace("_", " ").split("/") for part in sentence.split(" ")), strict=True)
    return [*words], None, [*tags]


def rows(*values):
    """JSON lines, with a blank line after each."""
    return "".join(json.dumps(value) + "\n\n" for value in values)


def wsc(text, noun, pronoun, label="true", **more):
    places = {"span1_text": noun, "span1_index": text.find(noun), "span2_index": text.find(pronoun)}
    return {"text": text, "label": label, "target": places | {"span2_text": pronoun} | more}


COPA = {"premise": "salt", "choice1": "river", "choice2": "light", "question": "cause", "label": 0}
WIC = {
    "sentence1": "light it",
    "sentence2": "the light",
    "start1": 0,
    "end1": 5,
    "start2": 4,
    "end2": 9,
    "label": False,
}


def multirc(*labels):
    answers = [{"text": f"salt {number}", "label": label} for number, label in enumerate(labels)]
    return {"idx": 0, "passage": {"text": "the river", "questions": [{"question": "what", "answers": answers}]}}


def c3(text, answer):
    return json.dumps([[text, [{"question": " what ", "choice": ["salt", "light"], "answer": answer}], "1"]])


TEXTS, CLASSES = ['say "no", twice', "plain", "naïve 水"], ["b", "a", "b"]
PLAIN = "".join(f"{text}\t{label}\n" for text, label in zip(TEXTS, CLASSES, strict=True))
OF_CLASSES = {
    ".tsv": PLAIN,
    "header.tsv": f"sentence\tlabel\n{PLAIN}",
    ".csv": 'sentence,label\n"say ""no"", twice",b\nplain,a\nnaïve 水,b\n',
    ".jsonl": rows(*({"sentence": text, "label": label} for text, label in zip(TEXTS, CLASSES, strict=True))),
    ".parquet": pa.table({"sentence": [text.encode() for text in TEXTS], "label": CLASSES}),
}
BY_COLUMN = {}, {"text": "-2", "label": "1"}, {"text": "sentence", "label": "label"}
TIMES = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))  # which Python does not have
TIMED = pa.table({"when": TIMES, "text": ["x"], "kind": ["y"]})
CONLL = "-DOCSTART- -X- O\n\nriver NN B-P\nlight NN I-P\n\n# HASH O\nsalt NN B-T\n"
UNIVERSAL = (
    "# x\n1-2\tdon't\t_\t_\n1\tdo\t_\tAUX\n2\tn't\t_\tPART\n2.1\tgo\t_\tX\n3\tNew York\t_\tPROPN\n\n# y\n1\t#\t_\tSYM\n"
)
SECOND = {"text": "1", "label": "2"}
CHOICE = {"text": "text", "other": "choices", "label": "label"}
LISTED = [("x", None, ["a", "b"]), ("y", None, []), ("z", None, ["b", "c"])]
ASKED = [{"text": "a", "choices": ["b", "c"], "label": label} for label in (1.0, True, "b")]
OF_BOARD = wsc("The board met him. he left", "the board", "he", span1_index=0, span2_index=4)
CAUSES = ["What was the cause? river", "What was the cause? light"]
EFFECTS = ["What happened then? river", "What happened then? light"]
OF_RIVER = [("the river", "what salt 0", 0), ("the river", "what salt 1", 1), ("the river", "what salt 0", 1)]
GOOD_FILES = [  # task, end of the file's name, columns, contents, examples as (text, other, label)
    *(
        ("classification", end, columns, content, *zip(TEXTS, [None] * 3, CLASSES, strict=True))
        for end, content in OF_CLASSES.items()
        for columns in BY_COLUMN[: 2 if end == ".tsv" else 3]
    ),
    ("classification", ".parquet", {"text": "text", "label": "kind"}, TIMED, ("x", None, "y")),
    ("classification", ".parquet", {"text": "1"}, TIMED, ("x", None, "y")),
    ("classification", ".tsv", {"label": "mood"}, "review\tmood\ngood\tpos\n", ("good", None, "pos")),
    ("classification", ".jsonl", {}, '{"text": ["a", 5], "label": 1}', ("a 5", None, 1)),
    ("pairs", ".tsv", {}, "a\tb\tyes\n", ("a", "b", "yes")),
    ("pairs", ".csv", {"text": "two", "other": "one", "label": "label"}, "one,two,label\na,b,no\n", ("b", "a", "no")),
    ("multilabel", ".tsv", {}, 'x\ta,b\ny\t\nz\t["b", "c"]\n', *LISTED),
    ("multilabel", ".jsonl", {"separator": ";"}, rows({"t": "x", "l": "a, b; c "}), ("x", None, ["a, b", "c"])),
    ("multilabel", ".jsonl", {}, rows({"t": "x", "l": [1, "b"]}), ("x", None, ["1", "b"])),
    ("token", ".txt", {}, CONLL, "river/B-P light/I-P", "#/O salt/B-T"),
    ("token", ".txt", {}, "-DOCSTART- O\nriver X\n-DOCSTART-\nlight Y\n", "river/X", "light/Y"),
    ("token", ".tsv", SECOND, "1\t-DOCSTART-\tO\n1\triver\tX\n \n1\tsalt \t Y\r\n", "river/X", "salt/Y"),
    ("token", ".txt", {}, "river X\rlight Y\r\rsalt Z\r", "river/X light/Y", "salt/Z"),
    ("token", ".txt", {}, b"\xef\xbb\xbfriver NN\n", "river/NN"),  # a byte order mark is not part of a word
    ("token", ".txt", {}, "river X\r\r\nlight Y\r\r\n\r\r\nsalt Z\r\r\n", "river/X light/Y", "salt/Z"),
    ("token", ".conllu", {"text": "1", "label": "3"}, UNIVERSAL, "do/AUX n't/PART New_York/PROPN", "#/SYM"),
    ("token", ".jsonl", {"label": "1"}, '{"w": ["#", "salt"], "t": ["O", "B-T"]}', "#/O salt/B-T"),
    *(
        (
            "token",
            ".txt",
            {"label": column},
            f"10{space}000{by}CD{by}O\n{space}a{space}{by}NN{by}O",
            ([f"10{space}000", f"{space}a{space}"], None, tags),
        )
        for space in "\u00a0\u202f\u2009\u3000\u0085\u2028\x1c\x1f\x0b\x0c"
        for by, column, tags in ((" ", "1", ["CD", "NN"]), ("\t", "-1", ["O", "O"]))
    ),
    ("choice", ".jsonl", CHOICE, rows(*ASKED), *(("a", ["b", "c"], number) for number in (1, 1, 0))),
    ("choice", ".json", {}, c3(["男：水", "女：light"], "salt"), ("男：水\n女：light", ["what salt", "what light"], 0)),
    ("coreference", ".json", CHOICE, rows(wsc("床上有书，它很软", "床", "它")), ("_床_上有书，[它]很软", None, "true")),
    ("coreference", ".json", CHOICE, rows(wsc("他说老王来了", "老王", "他", "x")), ("[他]说_老王_来了", None, "x")),
    ("coreference", ".jsonl", CHOICE, rows(OF_BOARD), ("_The board_ met him. [he] left", None, "true")),
    ("copa", ".jsonl", {}, rows(COPA), ("salt", CAUSES, 0)),
    ("copa", ".jsonl", {}, rows(COPA | {"question": "effect", "label": 1}), ("salt", EFFECTS, 1)),
    ("wic", ".jsonl", {}, rows(WIC), ("[light] it", "the [light]", False)),
    ("multirc", ".jsonl", {}, rows(multirc(0, True), multirc(1.0)), *OF_RIVER),
]


@pytest.mark.parametrize("row", GOOD_FILES, ids=lambda row: f"{row[0]} {row[1]}")
def test_files_give_these_examples(tmp_path, row):
    name, end, columns, content, *expected = row
    examples, warnings = TASKS[name](Columns(**columns)).read(written(tmp_path / f"a{end}", content))
    expected = [tagged(each) if isinstance(each, str) else each for each in expected]
    assert ([example[:3] for example in examples], warnings) == (expected, [])
    if content is CONLL:
        assert [example.place for example in examples] == [f"{tmp_path}/a.txt, line {line}" for line in (3, 6)]


def test_the_second_file_of_c3_is_read_too(tmp_path):
    """One of them begins with a byte order mark. The second one is read alone."""
    written(tmp_path / "d-train.json", c3(["a"], "salt").encode("utf-8-sig"))
    written(tmp_path / "m-train.json", c3(["b"], "light"))
    for name, texts in (("d", ["a", "b"]), ("m", ["b"])):
        path, choice = tmp_path / f"{name}-train.json", TASKS["choice"]()
        assert [example.text for example in choice.read(str(path))[0]] == texts
        assert choice.files(str(path)) == [str(tmp_path / f"{each}-train.json") for each in "dm"[2 - len(texts) :]]


QUESTION = {"id": "q7", "question": "a", "answers": [{"answer_start": 6, "text": "light"}]}


def squad_of(context="river light", **changed):
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [QUESTION | changed]}]}]}, indent=1)


NO_NUMBERS = "--1", "²"
FIRST = '{"text": "x", "label": 1}\n'
ASK = '{"question": %s, "choice": ["c", "d"], "answer": "c"}'
NO_ANSWERS = [{"text": ["light"]}, ["light"], [{"answer_start": 6}], [{"answer_start": "6", "text": "light"}], None]
NO_CHOICES = [
    *(f'["b", "c"], "label": {n}' for n in ("2", '"d"', "1e999", "0.5")),
    '["b"], "label": 0',
    '"b", "label": 0',
]
NO_WORDS = {"start1": "0"}, {"end2": 10}, {"start1": 5}
NO_PLACES = [{"span1_index": 2}, *({"span2_index": place} for place in (-1, "x", math.inf))]
TWICE = pa.table([["x"], ["y"], [1]], names=["text", "text", "label"])
BAD_FILES = [  # task, end of the name, columns, kind of error and option, place or part of the sentence, contents
    ("classification", ".tsv", {}, "bad-row", "line 2", "one\t1\ntwo\n", "one\t1\ntwo\t\n", "one\t1\ntwo\t1\t1\n"),
    ("classification", ".csv", {}, "not-text", "line 2", b"text,label\nna\xefve,1\n"),
    ("classification", ".jsonl", {}, "bad-row", "line 2", f'{FIRST}{{"text": "y"}}', f"{FIRST}5"),
    ("classification", ".jsonl", {}, "bad-row", "line 2", f'{FIRST}{{"text": "\\ud83d", "label": 0}}'),
    ("classification", ".jsonl", {}, "not-of-format", "line 2", f"{FIRST}{{bad"),
    ("classification", ".jsonl", {}, "not-of-format", "'text' twice", f'{FIRST}{{"text": "y", "text": "z"}}'),
    ("classification", ".csv", {}, "not-of-format", "'text' twice", "\ntext,text,label\nx,y,1\n"),
    ("classification", ".parquet", {}, "not-of-format", "'text' twice", TWICE),
    ("classification", ".xml", {}, "unknown-format", "", "<x/>"),
    ("classification", ".parquet", {"text": "body"}, "no-column text", "give one of when, text, kind", TIMED),
    *(
        ("classification", ".tsv", {"text": name}, "no-column text", "", "x\t1\n")
        for name in ("", "2", "-3", "--1", "²")
    ),
    ("pairs", ".tsv", {"text": "b", "label": "label"}, "conflict other", "", "a\tb\tlabel\n0\ta\tyes\n"),
    ("multilabel", ".tsv", {}, "bad-row", "line 2", "x\ta\ny\t[a\n", f"x\ta\ny\t{'[' * 100_000}\n"),
    ("token", ".txt", {}, "bad-row", "line 2", "river NN\nlight\n"),
    ("token", ".txt", {}, "empty", "", "\n\n"),
    *((name, ".json", {}, "not-found", "", None) for name in ("classification", "token", "qa", "choice")),
    *(("token", ".txt", {"text": name}, "not-of-format", "", "river NN\n") for name in ("word", *NO_NUMBERS)),
    ("token", ".txt", {"label": "5"}, "bad-row", "line 1", "river NN\n"),
    ("token", ".txt", {"other": "2"}, "bad-row", "line 1", "river NN\n"),
    ("token", ".txt.gz", {}, "cut-short", "", "river NN\n", gzip.compress(b"river NN\n", mtime=0)[:-9]),
    ("token", ".txt.gz", {}, "not-text", "line 2", gzip.compress(b"river NN\nna\xefve NN\n", mtime=0)),
    ("token", ".jsonl.gz", {}, "unknown-format", "", '{"w": ["a"], "t": ["X"]}\n'),  # not taken for a word a line
    ("token", ".jsonl", {}, "bad-row", "line 1", '{"w": ["a", "b"], "t": ["X"]}\n'),
    ("token", ".jsonl", {}, "bad-row", "line 1", *(f'{{"w": ["a"], "t": {t}}}' for t in ('"X"', '[""]', "[null]"))),
    ("qa", ".json", {}, "empty", "", '{"data": []}'),
    ("qa", ".json", {}, "not-of-format", "", "{}", '{"data": "abc"}', '{"data": [{"title": "x"}]}'),
    ("qa", ".json", {}, "bad-row", "question 'q7'", squad_of(5), squad_of(context=None), squad_of(question=None)),
    ("qa", ".json", {}, "bad-row", "question 'q7'", *(squad_of(answers=answers) for answers in NO_ANSWERS)),
    ("qa", ".json", {}, "bad-row", "answers", squad_of().replace('"answers"', '"answer"')),
    *(("qa", ".json", {"skip": skip}, "bad-row", "question 'q7'", squad_of("riverlight")) for skip in (False, True)),
    ("qa", ".json", {}, "bad-row", "line 10", squad_of().replace('"a"', '"\\ud83d"')),
    ("choice", ".json", CHOICE, "bad-row", "line 1", *(f'{{"text": "a", "choices": {row}}}' for row in NO_CHOICES)),
    ("choice", ".json", {}, "bad-row", "--other", '{"text": "a", "choices": ["b", "c"], "label": 0}'),
    ("choice", ".json", {}, "not-of-format", "C3", '[["a", 1]]', '[{"text": "a"}]', f"[{rows(*ASKED[:1]).strip()}]"),
    ("choice", ".json", {}, "not-of-format", "C3", f'[[["a"], []], ["abc", [{ASK % 5}]]]', f'[[["a"], [{ASK % 5}]]]'),
    ("choice", ".json", {}, "not-of-format", "line 3", '[\n[["a"],\n[{"question":'),
    ("choice", ".json", {}, "empty", "", "[]"),
    ("coreference", ".json", CHOICE, "bad-row", "line 1", '{"text": "a", "target": "b", "label": 1}'),
    ("coreference", ".json", CHOICE, "bad-row", "line 1", *(rows(wsc("床上有书", "床", "书", **x)) for x in NO_PLACES)),
    ("coreference", ".json", CHOICE, "bad-row", "line 1", rows(wsc("xab c", "ab", "c", span1_index=9, span2_index=1))),
    ("copa", ".jsonl", {}, "bad-row", "line 1", *(rows(COPA | x) for x in ({"question": "why"}, {"choice2": None}))),
    ("copa", ".jsonl", {}, "bad-row", "line 1", rows(COPA | {"label": 2})),
    ("wic", ".jsonl", {}, "bad-row", "line 1", *(rows(WIC | x) for x in NO_WORDS)),
    ("multirc", ".jsonl", {}, "bad-row", "line 1", *(rows(multirc(x)) for x in ("x", math.inf, 0.5))),
    ("multirc", ".jsonl", {}, "bad-row", "line 1", '{"idx": 0, "passage": "a"}'),
    ("multirc", ".jsonl", {}, "empty", "", '{"idx": 0, "passage": {"text": "a", "questions": []}}'),
]


@pytest.mark.parametrize("row", BAD_FILES, ids=lambda row: f"{row[0]} {row[1]} {row[3]}")
def test_files_that_do_not_fit_are_named_with_the_place(tmp_path, row):
    name, end, columns, error, where, *contents = row
    for number, content in enumerate(contents):
        path = written(tmp_path / f"{number}{end}", content)
        with refuses(*error.split(), says=path) as caught:
            TASKS[name](Columns(**columns)).read(path)
        assert where in str(caught.value)


def test_rows_that_a_table_leaves_out_and_rows_that_a_task_does_are_counted_together(tmp_path):
    unlabelled, choice, pronoun = {"label": "-"}, ASKED[0], wsc("床上有书，它很软", "床", "它")
    for name, wrong in (
        ("copa", [COPA, COPA | unlabelled, COPA | {"question": "why"}]),
        ("wic", [WIC, WIC | unlabelled, WIC | {"start1": None}]),
        ("choice", [choice, choice | unlabelled, choice | {"choices": []}]),
        ("coreference", [pronoun, pronoun | unlabelled, pronoun | {"target": {}}]),
        ("classification", [choice, choice | unlabelled, choice | {"text": ""}]),
    ):
        columns = CHOICE | ({} if name == "choice" else {"other": ""})
        path = written(tmp_path / f"{name}.jsonl", rows(*wrong))
        read, (warning,) = TASKS[name](Columns(**columns, skip=True)).read(path)
        assert "2 rows left out" in warning
        assert len(read) == 1


CONTENTS = {
    "tsv": 'say "no"\t7\t1\nnaïve 水\t\t0\n',
    "csv": 'text,more,label\n"say ""no"", twice",7,1\n"two\nlines",,0\n',
    "jsonl": '{"text": "naïve 水", "more": [1, null], "label": 1.5}\n{"text": "b", "label": 0, "x": {}}\n',
    "parquet": pa.table({"text": ["a", "b"], "more": [[1], None], "label": [1.5, 2.0]}),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_files_keep_their_format_and_columns(tmp_path, kind):
    path, out = Path(written(tmp_path / f"a.{kind}", CONTENTS[kind])), tmp_path / f"b.{kind}"
    roles = {"text": "0", "label": "label" if kind == "jsonl" else "-1"}
    table = tables.read(str(path), roles)
    tables.write(out, table, (row for _, row in table.rows))
    assert out.read_bytes() == path.read_bytes() or kind == "parquet"
    assert tables.read(str(out), roles).rows == table.rows
    if kind == "parquet":
        assert pq.read_schema(out) == pq.read_schema(path)


# ------------------------------------------------------------------------------------------------------------- labels

ORDERS = [  # labels to train on, their names in order, and the number of each
    ([*range(11)], "0 1 2 3 4 5 6 7 8 9 10", [*range(11)]),
    (["10", "9", "-1", "1e1", "0.5"], "-1 0.5 9 10 1e1", [3, 2, 0, 4, 1]),
    ([1.0, "1", "0.0", 2], "0.0 1 2", [1, 1, 0, 2]),
    (["b", "10", "9", "a"], "9 10 a b", [3, 1, 0, 2]),
    (["1.10", "1.1", "01", "1"], "01 1 1.1 1.10", [3, 2, 0, 1]),
    ([True, False], "False True", [1, 0]),
    (["1e99999999999999999999", "2"], "2 1e99999999999999999999", [1, 0]),
]


@pytest.mark.parametrize(("labels", "names", "numbers"), ORDERS)
def test_numbers_are_sorted_as_numbers(labels, names, numbers):
    classes, several, tags = (TASKS[kind]() for kind in ("classification", "multilabel", "token"))
    examples = [Example("x", None, label, "a.tsv, line 1") for label in labels]
    classes.learn(examples)
    several.learn([Example("x", None, [label], "a.tsv, line 1") for label in labels])
    tags.learn([Example(labels, None, [*map(str, labels)], "a.tsv, line 1")])
    assert classes.names == several.names == tags.names == names.split()
    assert [*map(classes.number, examples)] == numbers


def test_labels_that_cannot_be_learned_are_named_by_line():
    """The square of a number beyond 1e18 would make the loss infinite."""
    several = TASKS["multilabel"]()
    with refuses("empty", says="a.tsv, line 2"):
        several.learn([Example("x", None, [], "a.tsv, line 2")])
    several.names = ["a", "b"]
    wrong = ["1e19", -1e30, "1e39", "1e300", 10**400, "-inf", "nan", "five"]
    for task, label in [(several, ["b", "c"]), *((TASKS["regression"](), label) for label in wrong)]:
        with refuses("bad-row", says="a.tsv, line 2"):
            task.number(Example("x", None, label, "a.tsv, line 2"))


@pytest.mark.parametrize("name", ["classification", "regression", "multilabel"])
def test_a_teacher_that_is_sure_is_worth_its_labels(name):
    task = TASKS[name]()
    logits, student = torch.tensor([[40.0, -40.0], [-40.0, 40.0], [-40.0, 40.0]]), torch.randn(3, 2)
    labels = torch.tensor([0, 1, 1])
    if name == "regression":
        logits, student, labels = logits[:, :1], student[:, :1], logits[:, 0]
    if name == "multilabel":
        labels = torch.eye(2)[labels]
    torch.testing.assert_close(task.loss(student, task.taught(logits)), task.loss(student, labels))


# --------------------------------------------------------------------------------------------------------------- rows


def test_a_tag_is_at_the_first_token_of_its_word_and_what_is_cut_or_not_known_counts_as_wrong(tokenizer, tmp_path):
    tags = TASKS["token"]()
    examples, _ = tags.read(str(write(tmp_path / "a.txt", "rivers A", "x-ray B", "\u200b A", "salt B", "stone A")))
    tags.learn(examples)
    data, warned = tags.encode(tokenizer, examples, 64)
    tokens = tokenizer.convert_ids_to_tokens(data.rows[0]["input_ids"])
    labelled = {tokens[i]: tags.names[n] for i, n in enumerate(data.labels[0].tolist()) if n >= 0}
    assert labelled == {"river": "A", "x": "B", "salt": "B", "stone": "A"}
    assert "1 of 5" in warned[0]
    answer = torch.where(data.labels[0] < 0, 0, data.labels[0])
    assert tags.score([answer], data.gold) == {"accuracy": 4 / 5}
    data, warned = tags.encode(tokenizer, examples, 8)
    assert "3 of 5" in warned[0]
    assert data.labels.shape == (1, 8)
    data, warned = tags.encode(tokenizer, tags.read(str(write(tmp_path / "b.txt", "river A", "salt C")))[0], 64)
    assert all(part in warned[0] for part in ("b.txt, line 1", "'C'"))
    assert tags.score([torch.zeros(4, dtype=torch.int64)], data.gold) == {"accuracy": 1 / 2}


def asking(text, context, answer):
    """A question of SQuAD; answer None: it has none."""
    return Example(text, context, [] if answer is None else [(context.index(answer), answer)], "a.json, question '0'")


LONG = "the stone of the river under the light of morning " * 6 + "salt bread " + "the wind of the house " * 6


def test_the_answer_is_where_its_window_says(tokenizer):
    answers = TASKS["qa"]()
    examples = [asking("the salt " * 40, LONG, "salt bread the"), asking("the house", "river light", None)]
    answers.learn(examples)
    with refuses("out-of-range", "length"):
        answers.encode(tokenizer, examples, 16)
    data, _ = answers.encode(tokenizer, examples, 48)
    assert max(len(row["input_ids"]) for row in data.rows) == 48
    assert data.rows[0]["input_ids"].index(tokenizer.sep_token_id) == 1 + 24  # the question is cut to half a row
    _, windows = data.gold
    first, second = (window.spans[window.spans[:, 1] > 0] for window in windows[:2])
    assert first[-16:].tolist() == second[:16].tolist()  # they overlap by a third of a row
    covered = {at for window in windows[:-1] for begin, end in window.spans for at in range(begin, end)}
    assert all(at in covered or LONG[at] == " " for at in range(len(LONG)))
    pairs = zip(data.rows, data.labels.tolist(), strict=True)
    found = [tokenizer.decode(row["input_ids"][first : last + 1]) for row, (first, last) in pairs if first]
    assert {*found} == {"salt bread the"}
    # Logits that are sure of the labels give all answers, also that there is none.
    sure, nothing = torch.zeros(2, len(data.rows), 48, 2)
    for logits, (first, last) in zip(sure, data.labels.tolist(), strict=True):
        logits[first, 0] = logits[last, 1] = 9.0
    nothing[:, 0] = 9.0
    assert answers.score([*sure], data.gold) == {"exact_match": 1.0, "f1": 1.0}
    assert answers.score([*nothing], data.gold)["exact_match"] == 0.5
    answers.learn(examples[:1])  # all questions to train on have an answer
    assert answers.score([*nothing], data.gold)["exact_match"] == 0.0


ENDS = ("", " ", "\n", "\t", "\u00a0", "\u3000", "\u200b", "\u00ad", "\ufe0f", " \u200b\n")
ANSWERED = [  # text, answer, its tokens in the first row and in the last one; "[CLS]": a row that does not hold it
    ("salt.river.light", "river", "river", "river"),  # no token that only touches it
    *((f"salt {end}river{end} light", f"{end}river{end}", "river", "river") for end in ENDS),
    *((f"{end}river{end}", f"{end}river{end}", "river", "river") for end in ENDS),
    ("salt " * 60 + " \u200briver \u00ad", " \u200briver \u00ad", "[CLS]", "river"),
    ("salt \u200b light", " \u200b ", "[CLS]", "[CLS]"),  # no token
    ("salt river light", "river ", " river", " river"),  # tokens with the space before a word
    ("salt river light", " river", " river", " river"),
    ("salt river light", " ", "[CLS]", "[CLS]"),
    ("river " * 60, "river " * 60, "[CLS]", "[CLS]"),  # longer than a row
]


@pytest.mark.parametrize(("text", "answer", "in_first", "in_last"), ANSWERED)
def test_an_answer_is_its_tokens(tokenizer, text, answer, in_first, in_last):
    if in_first[0] == " ":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(500, ["[CLS]", "[PAD]"]), pad_token="[PAD]")
    data, warnings = TASKS["qa"]().encode(tokenizer, [asking("the house", text, answer)], 32)
    assert bool(warnings) == (in_first == in_last == "[CLS]")
    rows = [row["input_ids"][a : b + 1] for row, (a, b) in zip(data.rows, data.labels.tolist(), strict=True)]
    assert [tokenizer.decode(rows[0]), tokenizer.decode(rows[-1])] == [in_first, in_last]


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0, 28, 29, 30]))
def test_the_best_span_is_the_best_that_may_be(seed, more, far):
    """Of the 20 best starts and ends, and of 30 tokens at most, also where one of about so many would be better."""
    draw, length = np.random.default_rng(seed), more + far
    scores, inside = draw.normal(size=(length, 2)), draw.random(length) < 0.7
    scores[0, 0] = scores[far, 1] = 9.0
    inside[[0, far]] |= far > 0
    tokens = np.stack([np.arange(length), np.arange(length) + 1], 1) * inside[:, None]
    starts, ends = (sorted(np.flatnonzero(inside), key=lambda i: -scores[i, side])[:20] for side in (0, 1))
    allowed = [(scores[i, 0] + scores[j, 1], i, j) for i in starts for j in ends if 0 <= j - i < 30]
    assert spans.best_span(scores, tokens) == (max(allowed) if allowed else (-math.inf, 0, 0))


def test_a_choice_has_a_row_and_the_highest_score_answers(tokenizer):
    choices = TASKS["choice"]()
    examples = [Example("the river", ["salt", "light", "wind"], 1, ""), Example("the house", ["stone", "1"], 0, "")]
    data, _ = choices.encode(tokenizer, examples, 32)
    texts = [tokenizer.decode(row["input_ids"]) for row in data.rows]
    assert texts == [f"[CLS] {each.text} [SEP] {choice} [SEP]" for each in examples for choice in each.other]
    assert data.labels.tolist() == [0, 1, 0, 1, 0]
    sure = [torch.tensor([score]) for score in data.labels]
    assert choices.score(sure, data.gold) == {"accuracy": 1.0}
    assert choices.score([*sure[:3], sure[4], sure[3]], data.gold) == {"accuracy": 0.5}
    long, _ = choices.encode(tokenizer, [Example("stone " * 90, *examples[0][1:])], 16)
    assert [len(row["input_ids"]) for row in long.rows] == [16] * 3
    assert tokenizer.decode(long.rows[1]["input_ids"]).endswith("[SEP] light [SEP]")  # the longer part is cut


def test_a_question_with_several_answers_is_right_if_all_of_them_are(tmp_path, tokenizer):
    answers = TASKS["multirc"]()
    examples, _ = answers.read(written(tmp_path / "a.jsonl", rows(multirc(0, True), multirc(1, 1.0), multirc(0))))
    answers.learn(examples)
    data, _ = answers.encode(tokenizer, examples, 16)
    logits = [torch.eye(2)[label] for label in (0, 1, 1, 0, 0)]  # one of five is wrong
    scores = answers.score(logits, data.gold)
    assert (scores["accuracy"], scores["exact_match"]) == (pytest.approx(4 / 5), pytest.approx(2 / 3))
    assert scores["f1"] == pytest.approx(4 / 5)  # two of three right answers are found, and nothing else


# ------------------------------------------------------------------------------------------------------------- suites


def tuning_of(checkpoint, data, out):
    """The arguments of a suite, of one seed and one epoch."""
    return ["--checkpoint", checkpoint, "--data", data, "--out", out, "--seeds", 1, "--epochs", 1]


ENTAILED = {"premise": "the river", "hypothesis": "a river", "label": "neutral"}
SUPERGLUE = {"BoolQ": {"question": "is it", "passage": "the river", "label": True}, "CB": ENTAILED, "COPA": COPA}
SUPERGLUE |= {"MultiRC": multirc(1, 0), "RTE": ENTAILED, "WiC": WIC, "WSC": OF_BOARD}
CLUE = {
    "csl_public": {"id": 1, "abst": "river light", "keyword": ["salt", "水"], "label": "1"},
    "cluewsc2020": wsc("床，它很软", "床", "它"),
}
PARTS = {"superglue": ("train.jsonl", "val.jsonl"), "clue": ("train.json", "dev.json")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row_of"), [("superglue", SUPERGLUE), ("clue", CLUE | {"c3": None})])
def test_a_suite_of_json_runs_in_its_own_layout(bert_run, tmp_path, name, row_of):
    data = tmp_path / name
    for folder, row in row_of.items():
        for part in PARTS[name]:
            for start in ("",) if row else ("d-", "m-"):
                put(data / folder / f"{start}{part}", rows(row, row) if row else c3(["the river"], "light"))
    result = json_of(main, "suite", name, *tuning_of(bert_run, data, tmp_path / "out"))
    assert list(result["tasks"]) == [folder.lower().removesuffix("_public") for folder in row_of]
    for task, measures in result["tasks"].items():
        assert all(f"dev_{metric}" in measures for metric in SUITES[name][task].metrics.split())


def test_a_suite_runs_what_is_there_in_its_own_layout(bert_run, tmp_path):
    """And holds its directory until its results are written."""
    data, out, busy = tmp_path / "glue", tmp_path / "out", {"kind": "busy", "given": str(os.getpid())}
    for split in ("train", "dev"):
        write(data / "cola" / f"{split}.tsv", *[f"gj04\t{int(text in GOOD)}\t\t{text}" for text in GOOD + BAD])
        rows = [f"{number}\tlight\t{text}\t{text in GOOD}" for number, text in enumerate(GOOD + BAD)]
        write(data / "RTE" / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *rows)
    rows = "0\tlight\tsalt\tx\tneutral", "1\tsalt\tsalt\tx\tno", "2\tsalt"
    write(data / "MNLI" / "train.tsv", "index\tsentence1\tsentence2\tlabel1\tgold_label", *rows)
    for part in ("matched", "mismatched"):
        rows = "0\tlight\tsalt\tneutral", "1\tlight\tsalt\t-"
        write(data / "MNLI" / f"dev_{part}.tsv", "index\tsentence1\tsentence2\tgold_label", *rows)
    write(data / "wnli", "a file, not a directory, of this name")
    arguments, sentences = ["suite", "glue", *tuning_of(bert_run, data, out)], []
    with before_rename("out/result.json", lambda: sentences.append(refused(main, *arguments, **busy))):
        done = succeeds(main, *arguments)
    assert [sentence.partition(" by ")[0] for sentence in sentences] == [f"{out} is in use"]
    for name in ("cola mcc", "rte accuracy", "mnli accuracy", "mnli mismatched accuracy", "sst2, mrpc, stsb, qqp"):
        assert name in done.output
    assert all(f"{name}: 1 row" in done.stderr for name in ("MNLI/train.tsv", "dev_matched.tsv"))
    result = json_of(main, *arguments)
    assert json.loads((out / "result.json").read_bytes()) == result
    assert list(result["tasks"]) == ["cola", "mnli", "rte"]
    assert result["missing"] == ["sst2", "mrpc", "stsb", "qqp", "qnli", "wnli"]
    assert set(result["tasks"]["cola"]["dev_mcc"]) == {"median", "min", "max"}
    refused(main, "suite", "clue", *arguments[2:], kind="out-exists", option="out")
    seed = out / "cola" / "seed-0"
    assert json.loads((seed / "seed.json").read_text())["of"]["the measure"] == "mcc"
    assert set(json.loads((seed / "config.json").read_text())["label2id"]) == {"0", "1"}
