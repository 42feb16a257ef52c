"""Tasks of fine-tuning: files are read or named, measures are those of known programs, seeds are shared and kept."""

import gzip
import json
import math
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn
from support import commands
from support.commands import json_of, refuses, tuning
from support.data import BAD, GOOD, byte_level_bpe, write_labelled
from support.disk import write
from support.runs import on_ranks, weights_in
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, PreTrainedTokenizerFast

from bertrain import checkpoint
from bertrain.lab import finetune, seeds
from bertrain.lab.seeds import Job
from bertrain.lab.tasks import TASKS, Columns, Example, metrics, spans


@pytest.fixture(scope="module")
def tokenizer(bert_run):
    return AutoTokenizer.from_pretrained(bert_run / "step-00000002")


tuned = partial(json_of, finetune.main)


def learned(run, tmp_path, data, name, *more):
    """The result of a fine-tuning of one seed on small batches."""
    return tuned(*tuning(run, data, tmp_path / "out", "--task", name, "--lr", 3e-3, "--batch-size", 3, *more))


def task(name, text="0", other="", label="-1", **more):
    return TASKS[name](Columns(text, other, label, **more))


def refused(name, path, kind, where="", *, option=None, **columns):
    """Reading the file must end in an error of this kind, which names the file and where in it."""
    with refuses(kind, option, says=f"{path}{where}"):
        task(name, **columns).read(str(path))


# ----------------------------------------------------------------------------------------------------------- measures

INPUTS = pytest.mark.parametrize("inputs", [200, pytest.param(10_000, marks=pytest.mark.slow)])


@INPUTS
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning", "ignore:A single label was found")
def test_measures_of_classes_are_those_of_scikit_learn(inputs):
    draw = np.random.default_rng(0)
    for number in range(inputs):
        size, num_labels = int(draw.integers(1, 12)), int(draw.integers(2, 5))
        predicted, labels = draw.integers(0, num_labels, (2, size))
        found = metrics.classification(predicted, labels, num_labels)
        average = {"average": "binary" if num_labels == 2 else "macro"}
        f1 = sklearn.f1_score(labels, predicted, zero_division=0, **average)
        mcc = sklearn.matthews_corrcoef(labels, predicted)
        expected = {"accuracy": sklearn.accuracy_score(labels, predicted), "f1": f1, "mcc": mcc}
        assert found == pytest.approx(expected, abs=1e-9), (number, predicted, labels)


@INPUTS
def test_measures_of_several_labels_are_those_of_scikit_learn(inputs):
    draw = np.random.default_rng(0)
    for number in range(inputs):
        predicted, labels = draw.random((2, int(draw.integers(1, 9)), 3)) < draw.random()
        f1 = {kind: sklearn.f1_score(labels, predicted, average=kind, zero_division=0) for kind in ("micro", "macro")}
        expected = {f"{kind}_f1": value for kind, value in f1.items()}
        expected["accuracy"] = sklearn.accuracy_score(labels, predicted)
        assert metrics.multilabel(predicted, labels) == pytest.approx(expected, abs=1e-9), number


@INPUTS
def test_correlations_are_those_of_scipy(inputs):
    draw = np.random.default_rng(0)
    for number in range(inputs):
        a, b = draw.integers(-3, 4, (2, int(draw.integers(3, 12)))).astype(float)
        is_constant = np.ptp(a) == 0 or np.ptp(b) == 0
        theirs = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
        expected = {name: 0.0 if is_constant else kind(a, b).statistic for name, kind in theirs.items()}
        assert metrics.regression(a, b) == pytest.approx(expected, abs=1e-9), number


@INPUTS
def test_entities_are_those_of_seqeval(inputs):
    seqeval = pytest.importorskip("seqeval.metrics")
    draw = np.random.default_rng(0)
    tags = np.array(["O", *(f"{letter}-{kind}" for letter in "BIES" for kind in ("PER", "LOC"))])
    for number in range(inputs):
        sides = [[tags[draw.integers(0, len(tags), size)].tolist() for size in (3, 6)] for _ in "ab"]
        kinds = {"entity_f1": seqeval.f1_score, "precision": seqeval.precision_score, "recall": seqeval.recall_score}
        expected = {name: kind(sides[1], sides[0], zero_division=0) for name, kind in kinds.items()}
        assert metrics.entity_f1(*sides) == pytest.approx(expected), number


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


# ------------------------------------------------------------------------------------------------- one and many labels


def test_pairs_are_classification_of_two_texts(bert_run, tmp_path):
    data = write(tmp_path / "a.tsv", *(f"{a}\t{b}\t{int(a in GOOD)}" for a in GOOD + BAD for b in GOOD))
    one = tuned(*tuning(bert_run, data, tmp_path / "pairs", "--task", "pairs"))
    same = tuned(*tuning(bert_run, data, tmp_path / "classes", "--other", 1))
    assert one["dev_accuracy"] == same["dev_accuracy"]
    one, same = (weights_in(tmp_path / out / "seed-0") for out in ("pairs", "classes"))
    assert all(torch.equal(one[name], same[name]) for name in one)


def test_several_labels_are_learned(bert_run, tmp_path):
    texts = {text: [name for name in ("light", "stone", "river") if name in text] for text in GOOD + BAD}
    tsv = write(tmp_path / "a.tsv", *(f"{text}\t{'; '.join(labels)}" for text, labels in texts.items()))
    jsonl = write(tmp_path / "a.jsonl", *(json.dumps({"t": t, "l": labels}) for t, labels in texts.items()))
    more = ["--dev", jsonl, "--separator", ";", "--epochs", 30]
    result = learned(bert_run, tmp_path, tsv, "multilabel", *more)
    assert result["dev_micro_f1"]["median"] > 0.9
    assert set(result) >= {"dev_macro_f1", "dev_accuracy"}
    for kind, path in ((task("multilabel", separator=";"), tsv), (task("multilabel"), jsonl)):
        assert [example.label for example in kind.read(str(path))[0]] == list(texts.values())


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
    classes, several, tags = (task(kind) for kind in ("classification", "multilabel", "token"))
    examples = [Example("x", None, label, "a.tsv, line 1") for label in labels]
    classes.learn(examples)
    several.learn([example._replace(label=[example.label]) for example in examples])
    tags.learn([Example(labels, None, [*map(str, labels)], "a.tsv, line 1")])
    assert classes.names == several.names == tags.names == names.split()
    assert [*map(classes.number, examples)] == numbers


def test_labels_that_do_not_fit_are_named_by_line(tmp_path):
    several = task("multilabel")
    examples, _ = several.read(str(write(tmp_path / "a.tsv", "x\ta,b", "y\t", 'z\t["b", "c"]')))
    assert [example.label for example in examples] == [["a", "b"], [], ["b", "c"]]
    several.names = ["a", "b"]
    with refuses("bad-row", says="a.tsv, line 3"):
        several.number(examples[2])
    for cell in ("[a", "[" * 100_000):
        refused("multilabel", write(tmp_path / "b.tsv", "x\ta", f"y\t{cell}"), "bad-row", ", line 2")
    with refuses("empty"):
        several.learn(several.read(str(write(tmp_path / "d.tsv", "x\t", "y\t")))[0])


# --------------------------------------------------------------------------------------------------------------- tags

CONLL = """-DOCSTART- -X- O

river NN B-PLACE
light NN I-PLACE

# HASH O
salt NN B-THING
"""


UNIVERSAL = (
    "# x\n1-2\tdon't\t_\t_\n1\tdo\t_\tAUX\n2\tn't\t_\tPART\n2.1\tgo\t_\tX\n3\tNew York\t_\tPROPN\n\n# y\n1\t#\t_\tSYM\n"
)
WORD_FILES = [  # end of the name, columns of words and tags, contents, sentences as word/tag
    ("txt", 0, -1, CONLL, "river/B-PLACE light/I-PLACE", "#/O salt/B-THING"),
    ("txt", 0, -1, "-DOCSTART- O\nriver X\n-DOCSTART-\nlight Y\n", "river/X", "light/Y"),  # no blank lines
    ("tsv", 1, 2, "1\t-DOCSTART-\tO\n1\triver\tX\n \n1\tsalt \t Y\r\n", "river/X", "salt/Y"),
    ("txt", 0, -1, "river X\rlight Y\r\rsalt Z\r", "river/X light/Y", "salt/Z"),
    ("txt", 0, -1, b"\xef\xbb\xbfriver NN\n", "river/NN"),  # a byte order mark is not part of a word
    ("txt", 0, -1, b"river X\r\r\nlight Y\r\r\n\r\r\nsalt Z\r\r\n", "river/X light/Y", "salt/Z"),
    ("conllu", 1, 3, UNIVERSAL, "do/AUX n't/PART New York/PROPN", "#/SYM"),
    ("jsonl", 0, 1, '{"w": ["#", "salt"], "t": ["O", "B-THING"]}', "#/O salt/B-THING"),
    *(
        (
            "txt",
            0,
            column,
            f"10{space}000{by}CD{by}O\n{space}a{space}{by}NN{by}O",
            f"10{space}000/{t} {space}a{space}/{u}",
        )
        for space in "\u00a0\u202f\u2009\u3000\u0085\u2028\x1c\x1f\x0b\x0c"
        for by, column, t, u in ((" ", 1, "CD", "NN"), ("\t", -1, "O", "O"))
    ),
]


@pytest.mark.parametrize(("end", "text", "label", "content", "expected"), [(*row[:4], row[4:]) for row in WORD_FILES])
def test_files_of_words_and_tags(tmp_path, end, text, label, content, expected):
    path = tmp_path / f"a.{end}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    sentences, _ = task("token", str(text), label=str(label)).read(str(path))
    found = [" ".join(map("/".join, zip(words, tags, strict=True))) for words, _, tags, _ in sentences]
    assert found == list(expected)
    if content == CONLL:
        assert [sentence.place for sentence in sentences] == [f"{path}, line {line}" for line in (3, 6)]


SEQEVAL = [  # tags, predicted tags; numbers of right, predicted and true entities by the rules of seqeval, or an error
    ("B-X I-X O B-Y", "B-X I-X O B-X", 1, 2, 2),
    ("I-X I-X B-X O I-Y", "I-X I-X I-X O I-Y", 1, 2, 3),  # IOB1
    ("I-X I-Y O I-X", "I-X I-Y O O", 2, 2, 3),
    ("B-X I-X E-X S-Y O", "B-X I-X E-X O S-Y", 1, 2, 2),
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
    tags, (true, found) = task("token"), (side.split() for side in (gold, mine))
    sentence = Example(true, None, true, "a.txt, line 7")
    if isinstance(expected[0], str):
        with refuses("bad-row", says="a.txt, line 7") as caught:
            tags.learn([sentence])
        assert expected[0] in str(caught.value)
        return
    tags.learn([sentence])
    answer = torch.tensor([tags.names.index(tag) for tag in found])
    scores = tags.score([answer], ([sentence], [{i: i for i in range(len(true))}]))
    assert scores.pop("accuracy") == sum(a == b for a, b in zip(true, found, strict=True)) / len(true)
    assert (scores == {}) == (expected[0] is None) == (tags.main == "accuracy")
    if scores:
        right, predicted, num_true = expected
        precision, recall = right / max(1, predicted), right / max(1, num_true)
        f1 = 2 * right / max(1, predicted + num_true)
        assert scores == pytest.approx({"entity_f1": f1, "precision": precision, "recall": recall})


def test_columns_of_words_are_numbers_that_the_file_has(tmp_path):
    refused("token", tmp_path / "none.txt", "not-found")
    path = write(tmp_path / "a.txt", "river NN")
    refused("token", path, "not-of-format", text="word")
    refused("token", path, "bad-row", ", line 1", label="5")
    refused("token", path, "bad-row", ", line 1", other="2")
    for column in ("--1", "²"):  # neither is a number
        refused("token", path, "not-of-format", text=column)
        refused("classification", write(tmp_path / "a.tsv", "x\t1"), "no-column", option="text", text=column)


def test_a_tag_is_at_the_first_token_of_its_word_and_what_is_cut_counts_as_wrong(tokenizer, tmp_path):
    tags = task("token")
    path = write(tmp_path / "a.txt", "rivers A", "x-ray B", "\u200b A", "salt B", "stone A")
    examples, _ = tags.read(str(path))
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


def test_tags_that_are_never_trained_on_count_as_wrong_and_are_said(tokenizer, tmp_path):
    tags = task("token")
    tags.learn(tags.read(str(write(tmp_path / "a.txt", "river A", "salt B")))[0])
    data, warned = tags.encode(tokenizer, tags.read(str(write(tmp_path / "b.txt", "river A", "salt C")))[0], 64)
    assert all(part in warned[0] for part in ("b.txt, line 1", "'C'"))
    assert tags.score([torch.zeros(4, dtype=torch.int64)], data.gold) == {"accuracy": 1 / 2}


# ------------------------------------------------------------------------------------------------------------ answers


def squad(path, *questions):
    """questions: (text, context, the answer or None)."""
    entries = [
        {
            "context": context,
            "qas": [
                {
                    "id": str(i),
                    "question": question,
                    "is_impossible": answer is None,
                    "answers": [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}],
                }
            ],
        }
        for i, (question, context, answer) in enumerate(questions)
    ]
    path.write_text(json.dumps({"version": "2.0", "data": [{"title": "x", "paragraphs": entries}]}))
    return path


LONG = "the stone of the river under the light of morning " * 6 + "salt bread " + "the wind of the house " * 6


def test_the_answer_is_where_its_window_says(tokenizer, tmp_path):
    answers = task("qa")
    path = squad(tmp_path / "a.json", ("the salt " * 40, LONG, "salt bread the"), ("the house", "river light", None))
    examples, _ = answers.read(str(path))
    answers.learn(examples)
    assert answers.may_be_none
    data, _ = answers.encode(tokenizer, examples, 48)
    assert max(len(row["input_ids"]) for row in data.rows) == 48
    assert len(data.rows) > 4
    assert data.rows[0]["input_ids"].index(tokenizer.sep_token_id) == 1 + 24  # the question is cut to half a row
    _, windows = data.gold
    first, second = (window.spans[window.spans[:, 1] > 0] for window in windows[:2])
    assert first[-16:].tolist() == second[:16].tolist()  # they overlap by a third of a row
    covered = np.zeros(len(LONG), bool)
    for window in windows[:-1]:
        for begin, end in window.spans:
            covered[begin:end] = True
    assert all(covered[i] or LONG[i] == " " for i in range(len(LONG)))
    found = 0
    for row, (first, last) in zip(data.rows, data.labels.tolist(), strict=True):
        if first:
            found += 1
            assert tokenizer.decode(row["input_ids"][first : last + 1]) == "salt bread the"
    assert found >= 1
    # Logits that are sure of the labels give all answers, also that there is none.
    sure = [torch.zeros(48, 2) for _ in data.rows]
    for logits, (first, last) in zip(sure, data.labels.tolist(), strict=True):
        logits[first, 0] = logits[last, 1] = 9.0
    assert answers.score(sure, data.gold) == {"exact_match": 1.0, "f1": 1.0}
    nothing = [torch.zeros(48, 2) for _ in data.rows]
    for logits in nothing:
        logits[0] = 9.0
    assert answers.score(nothing, data.gold)["exact_match"] == 0.5
    answers.may_be_none = False  # as where all questions to train on have an answer
    assert answers.score(nothing, data.gold)["exact_match"] == 0.0


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
def test_an_answer_is_its_tokens(tokenizer, tmp_path, text, answer, in_first, in_last):
    if in_first[0] == " ":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(500, ["[CLS]", "[PAD]"]), pad_token="[PAD]")
    answers = task("qa")
    examples, _ = answers.read(str(squad(tmp_path / "a.json", ("the house", text, answer))))
    data, warnings = answers.encode(tokenizer, examples, 32)
    assert bool(warnings) == (in_first == in_last == "[CLS]")
    rows = [row["input_ids"][a : b + 1] for row, (a, b) in zip(data.rows, data.labels.tolist(), strict=True)]
    assert [tokenizer.decode(rows[0]), tokenizer.decode(rows[-1])] == [in_first, in_last]


def test_words_beyond_the_length_are_said_once(bert_run, tmp_path):
    data = write(tmp_path / "a.txt", *["river A", "salt B"] * 10)
    command = tuning(bert_run, data, tmp_path / "out", "--task", "token", "--text", 0, "--length", 8)
    said = commands.succeeds(finetune.main, *command).stderr
    assert said.count("14 of 20") == 2  # of --train and of --dev
    assert "14 of 20" not in commands.succeeds(finetune.main, *command, "--seeds", 2).stderr


@given(st.integers(0, 2**32 - 1), st.integers(1, 18))
def test_the_best_span_is_the_best_of_all(seed, length):
    draw = np.random.default_rng(seed)
    scores, inside = draw.normal(size=(length, 2)), draw.random(length) < 0.7
    tokens = np.stack([np.arange(length), np.arange(length) + 1], 1) * inside[:, None]
    allowed = [
        (scores[i, 0] + scores[j, 1], i, j) for i in range(length) for j in range(i, length) if inside[i] and inside[j]
    ]
    found = spans.best_span(scores, tokens)
    assert found == (max(allowed) if allowed else (-math.inf, 0, 0))


def test_an_answer_is_not_longer_than_it_may_be():
    tokens = np.stack([np.arange(60), np.arange(60) + 1], 1)
    for size, is_found in ((spans.LONGEST_ANSWER, True), (spans.LONGEST_ANSWER + 1, False), (60, False)):
        scores = np.zeros((60, 2))
        scores[0, 0] = scores[size - 1, 1] = 9.0
        assert (spans.best_span(scores, tokens)[1:] == (0, size - 1)) == is_found


@pytest.mark.slow
def test_answers_are_learned(bert_run, tmp_path):
    pairs = [(f"the {a}", f"{a} river {b} stone", a) for a in ("salt", "light", "bread") for b in ("wind", "house")]
    data = squad(tmp_path / "a.json", *pairs)
    result = learned(bert_run, tmp_path, data, "qa", "--epochs", 40, "--length", 32)
    assert result["dev_exact_match"]["median"] > 0.9
    AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out" / "seed-0")


def test_questions_that_do_not_fit_are_named(tokenizer, tmp_path):
    wrong = json.loads(squad(tmp_path / "a.json", ("a", "river light", "light")).read_text())
    wrong["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 7
    (tmp_path / "b.json").write_text(json.dumps(wrong))
    refused("qa", tmp_path / "b.json", "bad-row", ", question '0'")
    refused("qa", tmp_path / "b.json", "bad-row", ", question '0'", skip=True)
    refused("qa", tmp_path / "none.json", "not-found")
    examples, _ = task("qa").read(str(tmp_path / "a.json"))
    with refuses("out-of-range", "length"):
        task("qa").encode(tokenizer, examples, 16)


# ------------------------------------------------------------------------------------------------ choices and pronouns


def asked(path, *questions):
    return write(path, *(json.dumps({"text": t, "choices": c, "label": a}) for t, c, a in questions))


def test_a_choice_has_a_row_and_the_highest_score_answers(tokenizer, tmp_path):
    choices = task("choice", text="text", other="choices", label="label")
    questions = ("the river", ["salt", "light", "wind"], 1), ("the house", ["stone", "1"], "stone")
    path = asked(tmp_path / "a.jsonl", *questions)
    examples, warnings = choices.read(str(path))
    assert (warnings, [question.label for question in examples]) == ([], [1, 0])
    others, _ = choices.read(str(asked(tmp_path / "b.jsonl", ("a", ["b", "c"], 1.0), ("a", ["b", "c"], True))))
    assert [question.label for question in others] == [1, 1]
    data, _ = choices.encode(tokenizer, examples, 32)
    texts = [tokenizer.decode(row["input_ids"]) for row in data.rows]
    pairs = [(question.text, choice) for question in examples for choice in question.other]
    assert texts == [f"[CLS] {text} [SEP] {choice} [SEP]" for text, choice in pairs]
    assert data.labels.tolist() == [0, 1, 0, 1, 0]
    sure = [torch.tensor([score]) for score in data.labels]
    assert choices.score(sure, data.gold) == {"accuracy": 1.0}
    assert choices.score([*sure[:3], sure[4], sure[3]], data.gold) == {"accuracy": 0.5}
    long, _ = choices.encode(tokenizer, [examples[0]._replace(text="stone " * 90)], 16)
    assert [len(row["input_ids"]) for row in long.rows] == [16] * 3
    assert tokenizer.decode(long.rows[1]["input_ids"]).endswith("[SEP] light [SEP]")  # the longer part is cut


def test_both_files_of_c3_are_read_and_watched(bert_run, tmp_path):
    """One of them begins with a byte order mark. The second one is read alone."""
    for kind, text, answer in (("d", ["男：水", "女：light"], "salt"), ("m", ["river"], "light")):
        entry = [text, [{"question": "what", "choice": ["salt", "light"], "answer": answer}], "1"]
        encoding = "utf-8-sig" if kind == "d" else "utf-8"
        (tmp_path / f"{kind}-train.json").write_text(json.dumps([entry]), encoding)
    examples, _ = task("choice").read(str(tmp_path / "d-train.json"))
    expected = [("男：水\n女：light", ["what salt", "what light"], 0), ("river", ["what salt", "what light"], 1)]
    assert [question[:3] for question in examples] == expected
    assert [question[:3] for question in task("choice").read(str(tmp_path / "m-train.json"))[0]] == expected[1:]
    common = tuning(bert_run, tmp_path / "d-train.json", tmp_path / "out", "--task", "choice")
    tuned(*common)
    other = tmp_path / "m-train.json"
    other.write_text(other.read_text().replace("river", "wind"))
    refusal = commands.refused(finetune.main, *common, kind="other-settings", option="out")
    assert "the content of --train" in refusal.sentence


def wsc(text, noun, pronoun, label="true", **more):
    places = {"span1_text": noun, "span1_index": text.find(noun), "span2_index": text.find(pronoun)}
    return json.dumps({"text": text, "label": label, "target": places | {"span2_text": pronoun} | more})


def test_noun_and_pronoun_are_marked_where_they_stand(tmp_path):
    path = write(tmp_path / "a.json", wsc("床上有书，它很软", "床", "它"), wsc("他说老王来了", "老王", "他", "false"))
    examples, _ = task("coreference", text="text", label="label").read(str(path))
    assert [example.text for example in examples] == ["_床_上有书，[它]很软", "[他]说_老王_来了"]
    assert [example.label for example in examples] == ["true", "false"]
    of_superglue = wsc("The board met him. he left", "the board", "he", span1_index=0, span2_index=4)
    path = write(tmp_path / "b.jsonl", of_superglue)
    examples, _ = task("coreference", text="text", label="label").read(str(path))
    assert examples[0].text == "_The board_ met him. [he] left"


def copa(**more):
    row = {"premise": "salt", "choice1": "river", "choice2": "light", "question": "cause", "label": 0}
    return json.dumps(row | more)


def wic(**more):
    row = {"sentence1": "light it", "sentence2": "the light", "start1": 0, "end1": 5, "start2": 4, "end2": 9}
    return json.dumps(row | {"label": False} | more)


def multirc(*labels):
    answers = [{"text": f"salt {number}", "label": label} for number, label in enumerate(labels)]
    return json.dumps(
        {"idx": 0, "passage": {"text": "the river", "questions": [{"question": "what", "answers": answers}]}}
    )


def test_files_of_superglue_are_read(tmp_path):
    path = str(write(tmp_path / "a.jsonl", copa(), copa(question="effect", label=1)))
    (questions, _) = task("copa").read(path)
    expected = [("salt", "What was the cause? river"), ("salt", "What happened then? light")]
    assert [(question.text, question.other[question.label]) for question in questions] == expected
    examples, _ = task("wic").read(str(write(tmp_path / "b.jsonl", wic())))
    assert examples[0][:3] == ("[light] it", "the [light]", False)
    examples, _ = task("multirc").read(str(write(tmp_path / "c.jsonl", multirc(0, 1), multirc(1))))
    rows = [("the river", f"what salt {number}", label) for number, label in ((0, 0), (1, 1), (0, 1))]
    assert [example[:3] for example in examples] == rows
    assert len({example.place for example in examples}) == 2


def test_rows_that_a_table_leaves_out_and_rows_that_a_task_does_are_counted_together(tmp_path):
    unlabelled = {"label": "-"}
    choice = {"text": "a", "choices": ["b", "c"], "label": 1}
    pronoun = json.loads(wsc("床上有书，它很软", "床", "它"))
    for name, rows, columns in (
        ("copa", [copa(), copa(**unlabelled), copa(question="why")], {}),
        ("wic", [wic(), wic(**unlabelled), wic(start1=None)], {}),
        ("choice", map(json.dumps, [choice, choice | unlabelled, choice | {"choices": []}]), {"other": "choices"}),
        ("coreference", map(json.dumps, [pronoun, pronoun | unlabelled, pronoun | {"target": {}}]), {}),
    ):
        columns = {"text": "text", "label": "label", "skip": True} | columns
        read, (warning,) = task(name, **columns).read(str(write(tmp_path / f"{name}.jsonl", *rows)))
        assert "2 rows left out" in warning
        assert len(read) == 1


def test_a_question_with_several_answers_is_right_if_all_of_them_are(tmp_path, tokenizer):
    answers = task("multirc")
    examples, _ = answers.read(str(write(tmp_path / "a.jsonl", multirc(0, True), multirc(1, 1.0), multirc(0))))
    answers.learn(examples)
    data, _ = answers.encode(tokenizer, examples, 16)
    logits = [torch.eye(2)[label] for label in (0, 1, 1, 0, 0)]  # one of five is wrong
    scores = answers.score(logits, data.gold)
    assert (scores["accuracy"], scores["exact_match"]) == (pytest.approx(4 / 5), pytest.approx(2 / 3))
    assert scores["f1"] == pytest.approx(4 / 5)  # two of three right answers are found, and nothing else


# ------------------------------------------------------------------------------------------------ files that do not fit


ASKED = {"id": "q7", "question": "a", "answers": [{"answer_start": 6, "text": "light"}]}


def squad_of(context="river light", **changed):
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [ASKED | changed]}]}]}, indent=1)


LATIN = b"river NN\nna\xefve NN\n"
ASK = '{"question": %s, "choice": ["c", "d"], "answer": "c"}'
C3 = ASK % '"b"'
OF_C3 = f'[[["a"], []], ["abc", [{C3}]]]', f'[[["a"], [{ASK % 5}]]]'
ANSWERS = ({"text": ["light"]}, ["light"], [{"answer_start": 6}], [{"answer_start": "6", "text": "light"}])
LABELS = ("2", '"d"', "1e999", "0.5")
ROWS = (*(f'["b", "c"], "label": {label}' for label in LABELS), '["b"], "label": 0', '"b", "label": 0')
PLACES = [{"span1_index": 2}, *({"span2_index": place} for place in (-1, "x", math.inf))]
OF_WSC = (
    *(wsc("床上有书", "床", "书", **wrong) for wrong in PLACES),
    wsc("xab c", "ab", "c", span1_index=9, span2_index=1),
)
BAD_FILES = [  # task, end of the file's name, kind of error, place, contents
    ("token", "txt", "bad-row", ", line 2", "river NN\nlight\n"),
    ("token", "txt", "empty", "", "\n\n"),
    ("token", "txt", "not-text", ", line 2", LATIN),
    ("token", "txt.gz", "cut-short", "", "river NN\n", gzip.compress(b"river NN\n", mtime=0)[:-9]),
    ("token", "txt.gz", "not-text", ", line 2", gzip.compress(LATIN, mtime=0)),
    ("token", "jsonl.gz", "unknown-format", "", '{"w": ["a"], "t": ["X"]}\n'),  # not taken for a word a line
    ("token", "jsonl", "bad-row", ", line 1", '{"w": ["a", "b"], "t": ["X"]}\n'),
    (
        "token",
        "jsonl",
        "bad-row",
        ", line 1",
        *(f'{{"w": ["a"], "t": {t}}}' for t in ('"X"', '[""]', "[null]")),
    ),
    ("qa", "json", "empty", "", '{"data": []}'),
    ("qa", "json", "not-of-format", "", "{}", '{"data": "abc"}'),
    ("qa", "json", "not-of-format", "", '{"data": [{"title": "x"}]}'),
    ("qa", "json", "bad-row", ", question 'q7'", squad_of(5), squad_of(context=None)),
    ("qa", "json", "bad-row", ", question 'q7'", squad_of(question=None)),
    ("qa", "json", "bad-row", ", question 'q7'", *(squad_of(answers=answers) for answers in ANSWERS)),
    ("qa", "json", "bad-row", ", question 'q7'", squad_of().replace('"answers"', '"answer"'), squad_of(answers=None)),
    ("qa", "json", "bad-row", ", line 10", squad_of().replace('"a"', '"\\ud83d"')),
    ("qa", "json", "not-of-format", ", line 1", squad_of()[:-20]),
    ("qa", "json", "not-text", ", line 6", squad_of().replace("river", "na\xefve").encode("latin-1")),
    ("choice", "json", "bad-row", ", line 1", *(f'{{"text": "a", "choices": {row}}}' for row in ROWS)),
    ("choice", "json", "not-of-format", "", '[["a", 1]]', '[{"text": "a"}]', *OF_C3),
    ("choice", "json", "not-of-format", ", line 3", '[\n[["a"],\n[{"question":'),
    ("choice", "json", "not-text", ", line 2", b'[\n[["na\xefve"],[]]]'),
    ("choice", "json", "empty", "", "[]"),
    ("coreference", "json", "bad-row", ", line 1", '{"text": "a", "target": "b", "label": 1}', *OF_WSC),
    ("copa", "jsonl", "bad-row", ", line 1", copa(question="why"), copa(choice2=None), copa(label=2)),
    ("wic", "jsonl", "bad-row", ", line 1", wic(start1="0"), wic(end2=10), wic(start1=5)),
    ("multirc", "jsonl", "bad-row", ", line 1", *map(multirc, ("x", math.inf, 0.5)), '{"idx": 0, "passage": "a"}'),
]


@pytest.mark.parametrize(("name", "end", "kind", "where", "contents"), [(*row[:4], row[4:]) for row in BAD_FILES])
def test_files_that_do_not_fit_are_named_with_the_place(tmp_path, name, end, kind, where, contents):
    columns = {"choice": {"other": "choices"}, "coreference": {}}
    columns = columns[name] | {"text": "text", "label": "label"} if name in columns else {}
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.{end}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        refused(name, path, kind, where, **columns)


@pytest.mark.parametrize("label", ["1e19", -1e30, "1e39", "1e300", 10**400, "-inf", "nan", "five"])
def test_a_label_that_is_not_a_number_to_learn_is_named(label):
    """The square of one beyond 1e18 would make the loss infinite."""
    with refuses("bad-row", says="a.tsv, line 2"):
        task("regression").number(Example("x", None, label, "a.tsv, line 2"))


# ------------------------------------------------------------------------------------------------------ seeds, patience


def arguments(run, tmp_path, *more):
    return tuning(run, write_labelled(tmp_path / "a.tsv"), tmp_path / "out", "--epochs", 2, *more)


def test_a_seed_that_is_finished_is_neither_run_again_nor_replaced(bert_run, tmp_path, monkeypatch):
    trained, run = [], finetune.train_seed
    monkeypatch.setattr(finetune, "train_seed", lambda work, seed, out: trained.append(seed) or run(work, seed, out))
    common = arguments(bert_run, tmp_path)
    tuned(*common)
    result = tuned(*common, "--seeds", 2)
    assert trained == [0, 1]
    figures = result["dev_accuracy"]
    assert figures["median"] == pytest.approx((figures["min"] + figures["max"]) / 2, abs=1e-5)
    first, newest = tmp_path / "out" / "seed-0", checkpoint.resolved(str(bert_run))
    tuned(*common, "--seeds", 2, "--checkpoint", newest)  # by another path
    assert trained == [0, 1]
    files = {path: path.read_bytes() for path in first.parent.rglob("*.*") if path.is_file() and path.name != ".lock"}
    assert {first / "model.safetensors", first.parent / "result.json"} <= {*files}
    shutil.copytree(newest, tmp_path / "other")
    (tmp_path / "other" / "note.json").write_text("{}")
    (tmp_path / "b.tsv").write_bytes((tmp_path / "a.tsv").read_bytes() + b"light\t0\n")
    for more, values in (
        (["--lr", 1e-4], ["--lr", "5e-05", "0.0001"]),
        (["--test", tmp_path / "b.tsv"], ["--test"]),
        (["--from-scratch"], ["--from-scratch"]),
        (["--train", tmp_path / "b.tsv", "--epochs", 3], ["--epochs", "2", "3", "--train"]),
        (["--task", "regression"], ["--task", "classification", "regression", "accuracy", "pearson"]),
        (["--checkpoint", tmp_path / "other"], ["--checkpoint", newest, tmp_path / "other"]),
    ):
        refusal = commands.refused(finetune.main, *common, *more, kind="other-settings", option="out")
        assert all(str(value) in refusal.sentence for value in [first, *values])
    assert all(path.read_bytes() == content for path, content in files.items())
    kept, config = (json.loads((first / name).read_text()) for name in ("seed.json", "config.json"))
    del kept["of"]["the order of labels"]  # as in 0.1.0
    (first / "seed.json").write_text(json.dumps(kept))
    seeds.refuse_others(first.parent, kept["of"] | {"the order of labels": "0, 1"})
    (first / "config.json").write_text(json.dumps(config | {"id2label": {"0": "1", "1": "0"}}))
    commands.refused(finetune.main, *common, kind="other-settings", option="out")
    (first / "seed.json").write_text("{}")  # not complete
    tuned(*common)
    assert trained == [0, 1, 0]


def test_a_model_is_its_name_or_its_files(bert_run, tmp_path):
    job = Job(checkpoint=checkpoint.resolved(str(bert_run)), out=str(tmp_path))
    kind, copy = task("classification"), shutil.copytree(job.checkpoint, tmp_path / "copy")
    names = ("org/a", "org/b", job.checkpoint, str(copy))
    by_name = [seeds.settings_key(replace(job, teacher=name), kind) for name in names]
    assert by_name[0] != by_name[1]
    assert by_name[2] == by_name[3]
    (copy / "vocab.txt").write_text("x")
    assert seeds.settings_key(replace(job, teacher=str(copy)), kind) != by_name[2]


def test_a_seed_that_gets_no_better_ends(bert_run, tmp_path):
    tuned(*arguments(bert_run, tmp_path, "--epochs", 9, "--lr", 1e-9, "--patience", 2))
    (run,) = json.loads((tmp_path / "out" / "result.json").read_text())["runs"]
    assert len(run["curve"]) == run["best_epoch"] + 2 < 9


@pytest.mark.slow
def test_ranks_share_out_the_seeds_and_give_the_bits_of_one(bert_run, tmp_path):
    common = arguments(bert_run, tmp_path, "--seeds", 3, "--precision", "fp32")
    alone = tuned(*common, "--out", tmp_path / "one")
    out, _ = on_ranks(2, "bertrain", ["finetune", *common, "--json", "--out", tmp_path / "two"])
    assert json.loads(out) == alone
    for seed in range(3):
        one, same = (weights_in(tmp_path / out / f"seed-{seed}") for out in ("one", "two"))
        assert all(torch.equal(one[name], same[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [("--text", "7"), ("--separator", ""), ("--lora", "r=2,alpha=4", "--freeze", "all")])
def test_an_error_is_printed_once_by_ranks(bert_run, tmp_path, wrong):
    common = arguments(bert_run, tmp_path, "--seeds", 2, *wrong)
    _, err = on_ranks(2, "bertrain", ["finetune", *common], code=2)
    assert err.count("Error: ") == 1, err


def test_a_pair_needs_two_columns(tmp_path):
    path = write(tmp_path / "rte.tsv", "index\tsentence1\tsentence2\tlabel", "0\ta\tb\tyes", "1\tc\td\tno")
    refused("pairs", path, "conflict", option="other", text="sentence1", label="label")
    examples, _ = task("pairs", "sentence1", "sentence2", "label").read(str(path))
    assert [example.other for example in examples] == ["b", "d"]
