"""Tokenizers of each type that can be trained: exact, read by transformers, and the same every time."""

import hashlib
import json
import os
import random
import sys

import pytest
from conftest import LETTERS, make_text
from helpers import ids_of, python, refused, refuses, stop_after, succeeds

import bertdata
from bertdata.choices import TOKENIZER_TYPES
from bertdata.cli import main
from bertdata.errors import BuildError
from bertdata.tokenize.load import load
from bertdata.tokenize.train import TRAINERS
from bertdata.write import build, train_tokenizer

ROLES = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
TEXT = [
    "The River went by the Häuser.", "Don't stop: 1984 naïve façades", "  two  spaces\tand a tab ", "水 and 川 दी 😀",
    "e\u0301 and é, ﬁne", "[MASK] is text here", "", "line\nends\r\nhere",
]  # fmt: skip


def texts():
    """Words of all lengths, many of them equally often: where trainers have to break ties."""
    draw = random.Random(3)
    words = ["".join(draw.choices(LETTERS[:9], k=draw.randint(2, 7))) for _ in range(150)]
    lines = [
        " ".join([*draw.choices(words, k=4), draw.choice(["Häuser", "NAÏVE", "水", "12", "The River"])])
        for _ in range(120)
    ]
    return [*make_text(20).split("\n"), *lines, *(f"{a} {b}" for a, b in zip(words, reversed(words), strict=True))]


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_a_trained_tokenizer_is_exact_and_transformers_reads_it(kind, cased, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "text").write_text("\n".join(texts()))
    trained = train_tokenizer([tmp_path / "text"], tmp_path / "t", type=kind, cased=cased, vocab_size=450)
    assert 200 < trained.special.vocab_size <= 450
    assert trained.special.roles() == ROLES
    assert trained.special.special_ids == (0, 1, 2, 3, 4)
    again = load(str(tmp_path / "t"))
    assert (again.files, again.special) == (trained.files, trained.special)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "t"))
    assert {role: getattr(theirs, f"{role}_token_id") for role in ROLES} == ROLES
    assert theirs("the river").input_ids[0::100] == [2]
    assert theirs("the river").input_ids[-1] == 3
    assert theirs("a", "b").token_type_ids[-1] == 1
    documents = [*TEXT, *texts()[:100]]
    mine = ids_of(again, documents)
    backend = theirs.backend_tokenizer
    backend.encode_special_tokens = True
    expected = [backend.encode(document, add_special_tokens=False).ids for document in documents]
    assert mine == [[1 if token in (0, 2, 3, 4) else token for token in ids] for ids in expected]
    spelled = again.decode(ids_of(again, ["The River by the Häuser"])[0]).split()
    assert spelled[:2] == (["The", "River"] if cased else ["the", "river"])
    assert spelled[-1] == {False: {"bpe": "häuser"}.get(kind, "hauser"), True: "Häuser"}[cased]


def test_a_mask_takes_the_space_before_it_where_spaces_are_in_tokens(tmp_path):
    for kind, takes in (("wordpiece", False), ("bpe", True), ("unigram", True)):
        trained = TRAINERS[kind](texts(), 400)
        added = json.loads(trained.files["tokenizer.json"])["added_tokens"]
        assert {token["content"]: token["lstrip"] for token in added} == {
            "[PAD]": False, "[UNK]": False, "[CLS]": False, "[SEP]": False, "[MASK]": takes
        }  # fmt: skip


TIES = [f"{a}{b}{c} {c}{b}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvéß"]  # every pair equally often


@pytest.mark.slow
def test_the_same_text_gives_the_same_tokenizer_with_any_number_of_threads():
    program = (
        "import hashlib, test_train; from bertdata.tokenize.train import TRAINERS\n"
        "for kind, train in TRAINERS.items():\n"
        "    for cased in (False, True):\n"
        "        trained = train(test_train.texts(), 400, cased=cased).files['tokenizer.json']\n"
        "        print(kind, cased, hashlib.sha256(trained).hexdigest())\n"
        "print(hashlib.sha256(TRAINERS['wordpiece'](test_train.TIES, 300).files['tokenizer.json']).hexdigest())"
    )
    found = set()
    for threads in ("1", "4", "4"):
        parallel = {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true", "PYTHONHASHSEED": threads}
        environment = parallel | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        found.add(python("-c", program, environment=environment))
    assert len(found) == 1
    assert len(set(found.pop().split("\n"))) == 2 * len(TRAINERS) + 2


def test_one_name_is_an_input(tmp_path, corpus):
    given = [str(corpus), corpus, [corpus]]
    first, *others = [bertdata.train_tokenizer(each, tmp_path / str(n), vocab_size=100) for n, each in enumerate(given)]
    assert all(each.files == first.files for each in others)


@pytest.mark.parametrize(("kind", "least"), [("wordpiece", 10), ("bpe", 262), ("unigram", 10)])
def test_a_vocabulary_without_room_is_refused(kind, least, tmp_path, corpus):
    with refuses("out-of-range", "vocab_size"):
        TRAINERS[kind](texts(), least - 1)
    assert len(TRAINERS[kind](texts(), least).spellings) == 5
    arguments = ("train-tokenizer", corpus, "--out", tmp_path / "t", "--type", kind, "--vocab-size", least - 1)
    refused(main, *arguments, kind="out-of-range", option="vocab_size")
    assert not (tmp_path / "t").exists()


def test_rare_characters_are_left_out_where_there_is_no_room_for_them():
    """The trainer for unigrams would keep all of them, and give a larger vocabulary than was asked for."""
    many = ["".join(chr(0x4E00 + number + k) for k in range(40)) for number in range(0, 4000, 40)]
    trained = TRAINERS["unigram"]([*texts(), *many], 300)
    assert trained.special.vocab_size <= 300
    assert any(trained.spell(number) == "▁the" for number in range(300))


def test_a_text_that_gives_few_tokens_gives_a_smaller_vocabulary():
    for kind in TOKENIZER_TYPES:
        assert TRAINERS[kind](["some words"], 5000).special.vocab_size < 300


def test_a_build_trains_what_it_is_asked_for(corpus, tmp_path):
    trained = ("--type", "bpe", "--cased", "--vocab-size", 300)
    succeeds(main, "build", corpus, "--out", tmp_path / "out", *trained)
    dataset = bertdata.open(tmp_path / "out")
    assert dataset.special_tokens.roles() == ROLES
    succeeds(main, "train-tokenizer", corpus, "--out", tmp_path / "t", *trained)
    digest = hashlib.sha256((tmp_path / "t" / "tokenizer.json").read_bytes()).hexdigest()
    assert dataset.manifest.tokenizer["tokenizer.json"] == digest
    done = succeeds(main, "build", corpus, "--out", tmp_path / "o", "--tokenizer", tmp_path / "t", *trained[:3])
    for option in ("--type", "--cased"):
        assert f"note: {option} " in done.stderr
    refused(main, "build", corpus, "--out", tmp_path / "x", "--type", "char", kind="malformed", option="type")
    with refuses("unknown", "type"):
        build([corpus], tmp_path / "x", type="char")
    with refuses("unknown", "type"):
        train_tokenizer([corpus], tmp_path / "x", type="char")


def test_an_unfinished_build_is_continued_only_with_the_same_kind_of_vocabulary(corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build([corpus], tmp_path / "out", vocab_size=300, shard_size=9000, progress=stop_after(0))
    with refuses("other-settings", "out", error=BuildError):
        build([corpus], tmp_path / "out", vocab_size=300, shard_size=9000, type="bpe")
