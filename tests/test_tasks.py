"""Tasks of fine-tuning: what files give, what is wrong in them, rows and labels, measures as known programs, suites."""

import gzip
import json
import math
import os
from contextlib import nullcontext

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

from bertrain.lab import tables
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
    a, b = draw.integers(-3, 4, (2, int(draw.integers(3, 12))))
    far, kind_of_ours = (2.0**30, np.float64) if draw.random() < 0.5 else (2.0**20, np.float32)  # far from 0
    ours = metrics.regression(*((side + far).astype(kind_of_ours) for side in (a, b)))
    is_constant, kinds = np.ptp(a) == 0 or np.ptp(b) == 0, {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    return ours, {n: 0.0 if is_constant else kind(a, b).statistic for n, kind in kinds.items()}


@pytest.mark.parametrize("measured", [of_classes, of_labels, of_numbers])
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


FORMS = [(f"{{0}}{mark}{{1}}", "BIES") for mark in "-_:./|"]  # a tag of a letter and a kind, and the letters
FORMS += [("{0}-{1}", letters) for letters in ("BILU", "BMEW", "bies")]
FORMS += [("{1}-{0}", "BIES"), ("{0}", "BIES"), ("{1}", "")]


@pytest.mark.parametrize(("form", "letters"), FORMS)
def test_entities_are_measured_as_seqeval_does_in_each_form_of_tags(form, letters):
    seqeval, draw, task = pytest.importorskip("seqeval.metrics"), np.random.default_rng(0), TASKS["token"]()
    own = dict(zip("BIES", letters, strict=True)) if "{0}" in form else {"I": ""}
    kinds = ["PER", "LOC"] if "{1}" in form else [""]
    spelled = {f"{letter}-{kind}": form.format(own[letter], kind) for letter in own for kind in kinds}
    spelled["O"] = "o" if letters.islower() else "O"
    task.learn([Example(None, None, [*spelled.values()], "")])
    for _ in range(50):
        true, mine = draw.choice([*spelled], (2, 3, 6)).tolist()
        gold = [Example(None, None, [spelled[tag] for tag in sentence], "") for sentence in true]
        answers = [torch.tensor([task.names.index(spelled[tag]) for tag in sentence]) for sentence in mine]
        scores = task.score(answers, (gold, [{i: i for i in range(6)}] * 3))
        assert scores.pop("accuracy") == pytest.approx(np.mean(np.array(true) == mine))
        theirs = {"entity_f1": seqeval.f1_score, "precision": seqeval.precision_score, "recall": seqeval.recall_score}
        assert scores == pytest.approx({name: kind(true, mine, zero_division=0) for name, kind in theirs.items()})


NO_ENTITIES = {"NN VB DT": None, "0 1 2 10": None, "B-X LOC O O": "'LOC'", "b-x i-x B- O": "'B-'", "B- I- O": "'B-'"}
NO_ENTITIES |= {"B-X I-X _": "'_'", "B_X I_X LOC O": "'LOC'", "B-X I-X 0 0": "'0'"}


@pytest.mark.parametrize(("tags", "wrong"), NO_ENTITIES.items())
def test_other_tags_are_no_entities_and_one_that_is_none_among_them_is_named(tags, wrong):
    task = TASKS["token"]()
    with refuses("bad-row", says=f"a.txt, line 7: the sentence has the tag {wrong}") if wrong else nullcontext():
        task.learn([Example(None, None, tags.split(), "a.txt, line 7")])
        assert task.main == "accuracy"


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
WIC = {"sentence1": "light it", "sentence2": "the light", "label": False}
WIC |= {"start1": 0, "end1": 5, "start2": 4, "end2": 9}


def multirc(*labels):
    answers = [{"text": f"salt {number}", "label": label} for number, label in enumerate(labels)]
    return {"idx": 0, "passage": {"text": "the river", "questions": [{"question": "what", "answers": answers}]}}


def c3(text, answer):
    return json.dumps([[text, [{"question": " what ", "choice": ["salt", "light"], "answer": answer}], "1"]])


QUESTION = {"id": "q7", "question": "a", "answers": [{"answer_start": 6, "text": "light"}]}


def squad_of(context="river light", **changed):
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [QUESTION | changed]}]}]}, indent=1)


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
SPACED = [f"{space}10{space}0" for space in "\u00a0\u202f\u2009\u3000\u0085\u2028\x1c\x1f\x0b\x0c"]
TWICE = [word for word in SPACED for _ in range(2)]
CHOICE = {"text": "text", "other": "choices", "label": "label"}
LISTED = [("x", None, ["a", "b"]), ("y", None, []), ("z", None, ["b", "c"])]
ASKED = [{"text": "a", "choices": ["b", "c"], "label": label} for label in (1.0, True, "b")]
SKIP, NO_LABEL = {"skip": True}, {"label": "-"}
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
    ("classification", ".tsv", {"label": "mood"}, "review\tmood\ngood\tpos\n", ("good", None, "pos")),
    ("pairs", ".tsv", {}, "a\tb\tyes\n", ("a", "b", "yes")),
    ("pairs", ".csv", {"text": "two", "other": "one", "label": "label"}, "one,two,label\na,b,no\n", ("b", "a", "no")),
    ("multilabel", ".tsv", {}, 'x\ta,b\ny\t\nz\t["b", "c"]\n', *LISTED),
    ("multilabel", ".jsonl", {"separator": ";"}, rows({"t": "x", "l": "a, b; c "}), ("x", None, ["a, b", "c"])),
    ("multilabel", ".jsonl", {}, rows({"t": "x", "l": [1, "b"]}), ("x", None, ["1", "b"])),
    ("token", ".txt", {}, CONLL, "river/B-P light/I-P", "#/O salt/B-T"),
    ("token", ".tsv", SECOND, "1\t-DOCSTART-\tO\n1\triver\tX\n \n1\tsalt \t Y\r\n", "river/X", "salt/Y"),
    ("token", ".txt", {}, "river X\rlight Y\r\rsalt Z\r", "river/X light/Y", "salt/Z"),
    ("token", ".txt", {}, b"\xef\xbb\xbfriver NN\n", "river/NN"),  # a byte order mark is not part of a word
    ("token", ".txt", {}, "river X\r\r\nlight Y\r\r\n\r\r\nsalt Z\r\r\n", "river/X light/Y", "salt/Z"),
    ("token", ".conllu", {"text": "1", "label": "3"}, UNIVERSAL, "do/AUX n't/PART New_York/PROPN", "#/SYM"),
    ("token", ".jsonl", {"label": "1"}, '{"w": ["#", "salt"], "t": ["O", "B-T"]}', "#/O salt/B-T"),
    ("token", ".txt", {}, "".join(f"{word} X\n{word}\tX\n" for word in SPACED), (TWICE, None, ["X"] * len(TWICE))),
    ("qa", ".json", {}, squad_of(), ("a", "river light", [(6, "light")])),
    ("choice", ".jsonl", CHOICE, rows(*ASKED), *(("a", ["b", "c"], number) for number in (1, 1, 0))),
    ("choice", ".json", {}, c3(["男：水", "女：light"], "salt"), ("男：水\n女：light", ["what salt", "what light"], 0)),
    ("coreference", ".json", CHOICE, rows(wsc("床上有书，它很软", "床", "它")), ("_床_上有书，[它]很软", None, "true")),
    ("coreference", ".json", CHOICE, rows(wsc("他说老王来了", "老王", "他", "x")), ("[他]说_老王_来了", None, "x")),
    ("coreference", ".jsonl", CHOICE, rows(OF_BOARD), ("_The board_ met him. [he] left", None, "true")),
    ("copa", ".jsonl", {}, rows(COPA | {"question": "effect", "label": 1}), ("salt", EFFECTS, 1)),
    ("multirc", ".jsonl", {"other": "x"}, rows(multirc(0, True), multirc(1.0)), *OF_RIVER),
    ("copa", ".jsonl", SKIP, rows(COPA, COPA | NO_LABEL, COPA | {"question": "why"}), ("salt", CAUSES, 0)),
    ("wic", ".jsonl", SKIP, rows(WIC, WIC | NO_LABEL, WIC | {"start1": None}), ("[light] it", "the [light]", False)),
    ("choice", ".jsonl", CHOICE | SKIP, rows(ASKED[0] | {"choices": []}, *ASKED[:1], NO_LABEL), ("a", ["b", "c"], 1)),
    ("classification", ".jsonl", SKIP, rows(*({"text": text, "label": 1} for text in ("", "x", ""))), ("x", None, 1)),
]


@pytest.mark.parametrize("row", GOOD_FILES, ids=lambda row: f"{row[0]} {row[1]}")
def test_files_give_these_examples(tmp_path, row):
    name, end, columns, content, *expected = row
    examples, warnings = TASKS[name](Columns(**columns)).read(written(tmp_path / f"a{end}", content))
    assert [example[:3] for example in examples] == [tagged(x) if isinstance(x, str) else x for x in expected]
    assert ["2 rows left out" in warning for warning in warnings] == [True] * ("skip" in columns)
    if content is CONLL:
        assert [example.place for example in examples] == [f"{tmp_path}/a.txt, line {line}" for line in (3, 6)]


def test_the_second_file_of_c3_is_read_too(tmp_path):
    """One of them begins with a byte order mark. The second one is read alone."""
    first = written(tmp_path / "d-train.json", c3(["a"], "salt").encode("utf-8-sig"))
    second = written(tmp_path / "m-train.json", c3(["b"], "light"))
    for path, files, texts in ((first, [first, second], ["a", "b"]), (second, [second], ["b"])):
        choice = TASKS["choice"]()
        assert (choice.files(path), [example.text for example in choice.read(path)[0]]) == (files, texts)


FIRST = '{"text": "x", "label": 1}\n'
NO_CHOICES = '["b", "c"], "label": 2', '["b", "c"], "label": "d"', '["b"], "label": 0', '"b", "label": 0'
NO_PLACES = [{"span1_index": 2}, *({"span2_index": place} for place in (-1, "x", math.inf))]
BAD_FILES = [  # task, end of the name, columns, kind of error and option, place or part of the sentence, contents
    ("classification", ".tsv", {}, "bad-row", "line 2", "one\t1\ntwo\n", "one\t1\ntwo\t\n", "one\t1\ntwo\t1\t1\n"),
    ("classification", ".csv", {}, "not-text", "line 2", b"text,label\nna\xefve,1\n"),
    ("classification", ".jsonl", {}, "bad-row", "line 2", f'{FIRST}{{"text": "y"}}', f"{FIRST}5"),
    ("classification", ".jsonl", {}, "bad-row", "line 2", f'{FIRST}{{"text": "\\ud83d", "label": 0}}'),
    ("classification", ".jsonl", {}, "not-of-format", "line 2", f"{FIRST}{{bad"),
    ("classification", ".jsonl", {}, "not-of-format", "'text' twice", f'{FIRST}{{"text": "y", "text": "z"}}'),
    ("classification", ".csv", {}, "not-of-format", "'text' twice", "text,text,label\nx,y,1\n"),
    ("classification", ".parquet", {}, "not-of-format", "'when' twice", TIMED.append_column("when", TIMED["text"])),
    ("classification", ".xml", {}, "unknown-format", "", "<x/>"),
    ("classification", ".parquet", {"text": "body"}, "no-column text", "give one of when, text, kind", TIMED),
    *(("classification", ".tsv", {"text": name}, "no-column text", "", "x\t1\n") for name in ("", "2", "-3", "²")),
    ("pairs", ".tsv", {"text": "b", "label": "label"}, "conflict other", "", "a\tb\tlabel\n0\ta\tyes\n"),
    ("multilabel", ".tsv", {}, "bad-row", "line 2", "x\ta\ny\t[a\n", f"x\ta\ny\t{'[' * 100_000}\n"),
    ("token", ".txt", {}, "bad-row", "line 2", "river NN\nlight\n"),
    ("token", ".txt", {}, "empty", "", "\n\n"),
    *((name, ".json", {}, "not-found", "", None) for name in ("classification", "token", "qa", "choice")),
    *(("token", ".txt", {"text": name}, "not-of-format", "", "river NN\n") for name in ("word", "--1", "²")),
    ("token", ".txt.gz", {}, "cut-short", "", "river NN\n", gzip.compress(b"river NN\n", mtime=0)[:-9]),
    ("token", ".txt.gz", {}, "not-text", "line 2", gzip.compress(b"river NN\nna\xefve NN\n", mtime=0)),
    ("token", ".jsonl.gz", {}, "unknown-format", "", '{"w": ["a"], "t": ["X"]}\n'),  # not taken for a word a line
    ("token", ".jsonl", {}, "bad-row", "line 1", *(f'{{"w": ["a"], "t": {t}}}' for t in ('"X"', '[""]', '["X", "Y"]'))),
    ("qa", ".json", {}, "empty", "", '{"data": []}'),
    ("qa", ".json", {}, "not-of-format", "", "{}", '{"data": "abc"}', '{"data": [{"title": "x"}]}'),
    ("qa", ".json", {}, "bad-row", "question 'q7'", squad_of(5), squad_of(context=None), squad_of(question=None)),
    ("qa", ".json", {}, "bad-row", "question 'q7'", *(squad_of(answers=answers) for answers in (["light"], None))),
    *(("qa", ".json", {"skip": skip}, "bad-row", "question 'q7'", squad_of("riverlight")) for skip in (False, True)),
    ("choice", ".json", CHOICE, "bad-row", "line 1", *(f'{{"text": "a", "choices": {row}}}' for row in NO_CHOICES)),
    ("choice", ".json", {}, "bad-row", "--other", '{"text": "a", "choices": ["b", "c"], "label": 0}'),
    ("choice", ".json", {}, "not-of-format", "C3", '[["a", 1]]', '[{"text": "a"}]', f"[{rows(*ASKED[:1]).strip()}]"),
    ("coreference", ".json", CHOICE, "bad-row", "line 1", *(rows(wsc("床上有书", "床", "书", **x)) for x in NO_PLACES)),
    ("coreference", ".json", CHOICE, "bad-row", "line 1", rows(wsc("xab c", "ab", "c", span1_index=9, span2_index=1))),
    ("copa", ".jsonl", {}, "bad-row", "line 1", *(rows(COPA | x) for x in ({"question": "why"}, {"label": 2}))),
    ("wic", ".jsonl", {}, "bad-row", "line 1", *(rows(WIC | x) for x in ({"end2": 10}, {"start1": 5}))),
    ("multirc", ".jsonl", {}, "bad-row", "line 1", *(rows(multirc(x)) for x in ("x", math.inf, 0.5))),
]


@pytest.mark.parametrize("row", BAD_FILES, ids=lambda row: f"{row[0]} {row[1]} {row[3]}")
def test_files_that_do_not_fit_are_named_with_the_place(tmp_path, row):
    name, end, columns, error, where, *contents = row
    for number, content in enumerate(contents):
        path = written(tmp_path / f"{number}{end}", content)
        with refuses(*error.split(), says=path) as caught:
            TASKS[name](Columns(**columns)).read(path)
        assert where in str(caught.value)


WRITTEN = OF_CLASSES | {"more.parquet": pa.table({"text": ["x"], "more": [[1]], "label": pa.array([1.5], "f4")})}


@pytest.mark.parametrize("end", WRITTEN)
def test_a_table_is_written_as_it_was_read(tmp_path, end):
    path, out, roles = tmp_path / f"a{end}", tmp_path / f"b{end}", {"text": "0", "label": "-1"}
    table = tables.read(written(path, WRITTEN[end]), roles)
    tables.write(out, table, (row for _, row in table.rows))
    assert [row for _, row in tables.read(str(out), roles).rows] == [row for _, row in table.rows]
    if end == "more.parquet":  # whose text needs no other type
        assert pq.read_table(out).equals(WRITTEN[end])
    assert out.read_bytes() == path.read_bytes() or end.endswith((".jsonl", ".parquet"))
    assert end != ".jsonl" or out.read_text().splitlines()[2] == '{"sentence": "naïve 水", "label": "b"}'


# ------------------------------------------------------------------------------------------------------------- labels

ORDERS = [  # labels to train on, their names in order, and the number of each
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


SURE = [  # task, a teacher's logits, and the labels that they mean
    ("classification", [[40.0, -40.0], [-40.0, 40.0]], [0, 1]),
    ("multilabel", [[40.0, -40.0], [-40.0, 40.0]], [[1.0, 0.0], [0.0, 1.0]]),
    ("regression", [[40.0], [-40.0]], [40.0, -40.0]),
]


@pytest.mark.parametrize(("name", "logits", "labels"), SURE)
def test_a_teacher_that_is_sure_is_worth_its_labels(name, logits, labels):
    task, logits = TASKS[name](), torch.tensor(logits)
    student = torch.randn(logits.shape)
    torch.testing.assert_close(task.loss(student, task.taught(logits)), task.loss(student, torch.tensor(labels)))


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
    logits, known = torch.randn(1, data.labels.shape[1], 2), data.labels >= 0
    mean = -logits.log_softmax(-1)[known].gather(1, data.labels[known][:, None]).mean()
    torch.testing.assert_close(tags.loss(logits, data.labels), mean)
    answer = torch.where(data.labels[0] < 0, 0, data.labels[0])
    assert tags.score([answer], data.gold) == {"accuracy": 4 / 5}
    assert "3 of 5" in tags.encode(tokenizer, examples, 8)[1][0]
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
    assert answers.encode(tokenizer, examples, 256)[0].rows[0]["input_ids"].index(tokenizer.sep_token_id) == 1 + 64
    spans = [window.spans[window.spans[:, 1] > 0] for window in data.gold[1]]
    assert spans[0][-16:].tolist() == spans[1][:16].tolist()  # windows overlap by a third of a row
    covered = {at for window in spans[:-1] for begin, end in window for at in range(begin, end)}
    assert all(at in covered or LONG[at] == " " for at in range(len(LONG)))
    pairs = [*zip(data.rows, data.labels.tolist(), strict=True)]
    found = [tokenizer.decode(row["input_ids"][first : last + 1]) for row, (first, last) in pairs if first]
    assert {*found} == {"salt bread the"}
    # Logits that are sure of the labels give all answers, also that there is none.
    sure, nothing = torch.zeros(2, len(data.rows), 48, 2)
    for logits, (_, (first, last)) in zip(sure, pairs, strict=True):
        logits[first, 0] = logits[last, 1] = 9.0 if first else 10.0  # a window without an answer hides no other
    nothing[..., 0], nothing[:, 0, 1] = 2.0**26, 1.0  # the sum of the two has more bits than either
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
    torch.testing.assert_close(data.labels, torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]))
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
    data, _ = answers.encode(tokenizer, examples, 7)
    assert {len(row["input_ids"]) for row in data.rows} == {7}
    logits = [torch.eye(2)[label] for label in (0, 1, 1, 0, 0)]  # one of five is wrong
    scores = answers.score(logits, data.gold)
    assert (scores["accuracy"], scores["exact_match"]) == (pytest.approx(4 / 5), pytest.approx(2 / 3))
    assert scores["f1"] == pytest.approx(4 / 5)  # two of three right answers are found, and nothing else


# ------------------------------------------------------------------------------------------------------------- suites


ONCE = ["--seeds", 1, "--epochs", 1]
ENTAILED = {"premise": "the river", "hypothesis": "a river", "label": "neutral"}
SUPERGLUE = {"BoolQ": {"question": "is it", "passage": "the river", "label": True}, "CB": ENTAILED, "COPA": COPA}
SUPERGLUE |= {"MultiRC": multirc(1, 0), "RTE": ENTAILED, "WiC": WIC, "WSC": OF_BOARD}
CLUE = {"csl_public": {"id": 1, "abst": "river light", "keyword": ["salt", "水"], "label": "1"}}
CLUE |= {"cluewsc2020": wsc("床，它很软", "床", "它")}
JSON = [("superglue", "train.jsonl", "val.jsonl", SUPERGLUE), ("clue", "train.json", "dev.json", CLUE)]


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "train", "dev", "row_of"), JSON)
def test_a_suite_of_json_runs_in_its_own_layout(bert_run, tmp_path, suite, train, dev, row_of):
    for task, row in row_of.items():
        for name in (train, dev):
            put(tmp_path / "data" / task / name, rows(row, row))
    given = ["--checkpoint", bert_run, "--data", tmp_path / "data", "--out", tmp_path / "out", *ONCE]
    succeeds("bertrain", "suite", suite, *given)  # which prints all measures of each task
    names = [task.lower().removesuffix("_public") for task in row_of]
    assert [*json.loads((tmp_path / "out" / "result.json").read_bytes())["tasks"]] == names


def test_a_suite_runs_what_is_there_in_its_own_layout(bert_run, tmp_path):
    """And holds its directory until its results are written."""
    data, out, busy = tmp_path / "glue", tmp_path / "out", {"kind": "busy", "given": str(os.getpid())}
    for split in ("train", "dev"):
        write(data / "cola" / f"{split}.tsv", *[f"gj04\t{int(text in GOOD)}\t\t{text}" for text in GOOD + BAD])
        lines = [f"{text}\t{text in GOOD}" for text in GOOD + BAD]
        write(data / "SST-2" / f"{split}.tsv", "sentence\tlabel", *lines)
    header = "sentence1\tsentence2\tgold_label"
    for name in ("train", "dev_matched", "dev_mismatched"):
        write(data / "MNLI" / f"{name}.tsv", header, "light\tsalt\tneutral", "salt\tsalt\tno", "light\tsalt\t-")
    write(data / "wnli", "a file, not a directory, of this name")
    arguments, sentences = ["suite", "glue", "--checkpoint", bert_run, "--data", data, "--out", out, *ONCE], []
    with before_rename("out/result.json", lambda: sentences.append(refused("bertrain", *arguments, **busy))):
        done = succeeds("bertrain", *arguments)
    assert len(sentences) == 1
    for name in ("cola mcc", "sst2 accuracy", "mnli accuracy", "mnli mismatched accuracy", "mrpc, stsb, qqp"):
        assert name in done.output
    assert all(f"{name}: 1 row" in done.stderr for name in ("MNLI/train.tsv", "dev_matched.tsv"))
    result = json_of("bertrain", *arguments)
    assert json.loads((out / "result.json").read_bytes()) == result
    assert list(result["tasks"]) == ["cola", "sst2", "mnli"]
    assert result["missing"] == ["mrpc", "stsb", "qqp", "qnli", "rte", "wnli"]
    refused("bertrain", "suite", "clue", *arguments[2:], kind="out-exists", option="out")
    assert json.loads((out / "cola" / "seed-0" / "seed.json").read_text())["of"]["the measure"] == "mcc"
