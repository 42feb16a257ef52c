"""Copies of labelled rows: the right words are replaced by the right ones, and nothing else changes."""

import gzip
import re
import tracemalloc
from itertools import groupby
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.commands import invoke, refused, refuses, succeeds
from support.data import write_labelled
from support.disk import before_rename, contents, write
from support.runs import on_ranks
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bertrain.commands import reading
from bertrain.lab import augment, tables


@pytest.fixture(scope="module")
def checkpoint(bert_run):
    return str(bert_run / "step-00000002")


def augmented(checkpoint, data, out, *more):
    succeeds("bertrain", "augment", "--checkpoint", checkpoint, "--train", data, "--out", out, *more)
    assert not out.with_name(out.name + ".parts").exists()
    return out.read_text()


def proposer(checkpoint, *, most=5, kept=(), vectors=None):
    return augment.Proposer(checkpoint, torch.device("cpu"), most=most, kept=frozenset(kept), vectors=vectors)


def proposed(made, text):
    """The words of a text with their proposals."""
    rows = made.propose([text])
    assert rows.dtype == np.int32
    return {
        word: [made.words[i] for i in row if i != -1]
        for word, row in zip(augment.WORD.findall(text), rows, strict=True)
    }


# --------------------------------------------------------------------------------------------------------------- copies


def test_words_are_letters_that_touch_no_digit_and_no_apostrophe():
    words = augment.WORD.findall("Don't re-run x2 the naïve 水河 test's end, (ok) it ’s हिन्दी नि2 cafe\u0301")
    assert " ".join(words) == "re run the naïve 水 河 end ok it हिन्दी cafe\u0301"


def test_copies_change_words_alone_and_keep_the_rest(checkpoint, tmp_path):
    data = write(tmp_path / "a.tsv", "The river, light & 12 stones!\tx\t1", "don't stop\ty\t0", "12\tz\t0")

    def copies(name, *more):
        rows = [line.split("\t") for line in augmented(checkpoint, data, tmp_path / f"{name}.tsv", *more).splitlines()]
        return [(rest, [text for text, *_ in same]) for rest, same in groupby(rows, key=lambda row: row[1:])]

    found = copies("many", "--copies", 8)
    assert [rest for rest, _ in found] == [["x", "1"], ["y", "0"], ["z", "0"]]
    texts, others, (number,) = (same for _, same in found)
    assert (texts[0], others[0], number) == ("The river, light & 12 stones!", "don't stop", "12")
    assert 4 < len(texts) == len(set(texts)) <= 9
    assert all(re.fullmatch(r"\w+ \w+, \w+ & 12 \w+!", text) for text in texts)
    assert all(re.fullmatch(r"don't \w+", text) for text in others)
    choices = proposed(proposer(checkpoint, most=15), texts[0])
    for place, word in enumerate(("The", "river", "light", "stones")):
        assert {augment.WORD.findall(text)[place] for text in texts} <= {word, *choices[word]}
    (_, few), *_ = copies("few", "--copies", 2)
    assert few == texts[: len(few)]  # fewer copies are the first ones
    assert copies("seed", "--copies", 2, "--seed", 1)[0][1] != few


def test_both_texts_of_a_pair_change_and_words_are_kept(checkpoint, tmp_path):
    data = write(tmp_path / "a.csv", "one,two,label", '"the river, light","say ""not"" salt",1')
    keep = write(tmp_path / "keep.txt", "Not the", "say")
    columns = ["--task", "pairs", "--text", "one", "--other", "two", "--label", "label"]
    augmented(checkpoint, data, tmp_path / "b.csv", *columns, "--keep", keep, "--share", 1)
    _, *rows = tables.read(str(tmp_path / "b.csv"), {"text": "one", "other": "two", "label": "label"}).rows
    assert len(rows) > 10
    for one, two in ((row["one"], row["two"]) for _, row in rows):
        assert re.fullmatch(r"the (?!river)\w+, (?!light)\w+", one)
        assert re.fullmatch(r'say "not" (?!salt)\w+', two)


# ------------------------------------------------------------------------------------------------------------ proposals


def test_proposals_are_the_most_probable_complete_words_in_the_place(checkpoint, limit):
    limit(augmented_places=20)  # a few rows go through the model together
    model, tokenizer = (kind.from_pretrained(checkpoint) for kind in (AutoModelForMaskedLM, AutoTokenizer))
    text = "the wind under stone, river light"
    words = proposed(proposer(checkpoint), text)
    assert [*words] == ["the", "wind", "under", "stone", "river", "light"]
    for word, place in (("wind", 2), ("light", 7)):
        ids = tokenizer(text, return_tensors="pt").input_ids
        ids[0, place] = tokenizer.mask_token_id
        order = model(ids).logits[0, place].argsort(descending=True).tolist()
        tokens = tokenizer.convert_ids_to_tokens(order)
        assert words[word] == [token for token in tokens if token.isalpha() and token != word][:5]


def test_a_word_of_several_tokens_gets_its_nearest_neighbours(checkpoint, tmp_path, limit):
    limit(most_vectors=9)
    draw, words = np.random.default_rng(0), ["stones", "rivers", "salty", "x2", "breads", "the", "Stones"]
    table = draw.normal(size=(len(words), 4))
    lines = (" ".join(map(str, [word, *row])) for word, row in zip(words, table, strict=True))
    file = write(tmp_path / "glove.txt", "7 4", *lines, "at name@domain.com 1 2 3 4", "beyond 1 2 3 4")
    vectors = augment.read_vectors(str(file))
    assert vectors[0] == ["stones", "rivers", "salty", "breads", "the", "Stones"]
    near = proposed(proposer(checkpoint, most=3, vectors=vectors), "Rivers winds the")
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    order = [words[i] for i in (-units @ units[1]).argsort()]
    assert near["Rivers"] == [word for word in order if word not in ("rivers", "x2")][:3]
    assert near["winds"] == []  # is not in the file
    assert len(near["the"]) == 3  # one token: the model proposes
    without = proposed(proposer(checkpoint, most=3), "Rivers")["Rivers"]
    assert len(without) == 3
    assert all(word.isalpha() for word in without)


def test_proposals_do_not_depend_on_other_texts_and_none_are_beyond_the_longest_row(checkpoint, tmp_path):
    file = write(tmp_path / "glove.txt", "rivers 1 2", "stones 2 1", "salty 1 1")
    for vectors in (None, augment.read_vectors(str(file))):
        made = proposer(checkpoint, most=2, kept=["the"], vectors=vectors)
        long = f"rivers {'the ' * 600}rivers"
        rows = made.propose([long, "rivers salt"])
        assert np.array_equal(rows[-2:], made.propose(["rivers salt"]))
        assert (rows[[0, -2, -1]] != -1).all()
        assert (rows[1:-2] == -1).all()


def test_vectors_that_cannot_be_read_are_refused(tmp_path):
    with refuses("not-found"):
        augment.read_vectors(str(tmp_path / "none.txt"))
    wrong = [["the 1 2", "of 1"], ["the 1 x"], ["the 1 nan"], ["the 1 1e39"]]  # the last is too large for float32
    for lines in wrong:
        with refuses("bad-row", "vectors"):
            augment.read_vectors(str(write(tmp_path / "v.txt", *lines)))
    with refuses("empty", "vectors"):
        augment.read_vectors(str(write(tmp_path / "v.txt", "12 1 2")))
    path = tmp_path / "v.txt.gz"
    path.write_bytes(gzip.compress(b"a 1 2\n") + gzip.compress(b"a" * (1 << 20)) * 65)
    tracemalloc.start()  # what a line has is looked at a piece at a time, and never all of it
    with refuses("too-large", "vectors", given=str(path)):
        augment.read_vectors(str(path))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    with refuses("too-large", "keep", given=str(path), says=" 64 MiB"):
        reading.text(str(path), "keep")


# -------------------------------------------------------------------------------------------------- files, interruption


def test_a_stopped_command_uses_the_parts_of_its_options_alone_and_no_other_does(checkpoint, tmp_path, limit):
    def another():
        before = contents(parts)
        refused("bertrain", "augment", *common, "--candidates", 4, kind="busy")
        assert contents(parts) == before
        times.append((parts / "000000.npy").stat().st_mtime_ns)

    data, out, parts = write_labelled(tmp_path / "a.tsv"), tmp_path / "b.tsv", tmp_path / "b.tsv.parts"
    common = ["--checkpoint", checkpoint, "--train", data, "--out", out]
    ways = [], ["--candidates", 3]
    complete = [augmented(checkpoint, data, tmp_path / f"{len(more)}.tsv", *more) for more in ways]  # of one part each
    limit(augmented_together=2)
    for more, expected in zip(ways, complete, strict=True):
        with before_rename("000002.npy", Mock(side_effect=KeyboardInterrupt)):
            assert invoke("bertrain", "augment", *common).exit_code == 130
        times = [(parts / "000000.npy").stat().st_mtime_ns]
        with before_rename("b.tsv", another):
            assert augmented(checkpoint, data, out, *more) == expected
        assert (times[0] == times[1]) == (not more)  # parts that were there are used, but none of other options
        out.unlink()


@pytest.mark.slow
def test_ranks_share_out_the_texts_and_write_the_bytes_of_one(checkpoint, tmp_path, limit):
    limit(augmented_together=32)
    data = write(tmp_path / "a.tsv", *(f"light {'salt ' * (n % 7)}wind {n} stone\t{n % 2}" for n in range(100)))
    given = ["augment", "--checkpoint", checkpoint, "--train", data, "--copies", 2]
    said, _ = on_ranks(2, "bertrain", [*given, "--out", tmp_path / "two.tsv"])
    assert said.count("100 rows and") == 1
    assert (tmp_path / "two.tsv").read_text() == augmented(checkpoint, data, tmp_path / "one.tsv", "--copies", 2)
