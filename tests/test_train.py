"""Tokenizers of each type that can be trained: exact, read by transformers, and the same every time."""

import hashlib
import json
import os
import random
import sys

import pytest
from support.commands import python, refused, refuses, succeeds
from support.data import LETTERS, ids_of, make_text, train_tokenizer
from support.disk import put, write
from support.encoding import load

import bertdata

ROLES = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def texts():
    """Words of all lengths, many of them equally often: where trainers have to break ties."""
    draw = random.Random(3)
    words = ["".join(draw.choices(LETTERS[:9], k=draw.randint(2, 7))) for _ in range(150)]
    others = ["Häuser", "NAÏVE", "水", "12", "The River"]
    lines = [" ".join([*draw.choices(words, k=4), draw.choice(others)]) for _ in range(120)]
    return [*make_text(20).split("\n"), *lines, *(f"{a} {b}" for a, b in zip(words, reversed(words), strict=True))]


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_trained_tokenizer_is_exact_and_transformers_reads_it(kind, cased, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "text").write_text("\n".join(texts()))
    usable, again = (
        train_tokenizer(tmp_path / "text", tmp_path / name, type=kind, cased=cased, vocab_size=450) for name in "tu"
    )
    trained = usable.loaded
    assert trained.files == again.loaded.files  # though tables of hashes in trainers have another order each time
    takes_space = [token.content for token in trained.source.added.values() if token.lstrip]
    assert takes_space == ["[MASK]"] * (kind != "wordpiece")
    assert 200 < trained.special.vocab_size <= 450
    assert (trained.special.roles(), trained.special.special_ids) == (ROLES, (0, 1, 2, 3, 4))
    content = json.loads(file := trained.files["tokenizer.json"].decode())
    assert file == json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    if kind == "unigram":  # the scores of words have three decimals
        pieces = content["model"]["vocab"][5:]
        assert all(abs(score - round(score, 3)) < 1e-9 for piece, score in pieces if piece[1:])
        assert pieces == sorted(pieces, key=lambda piece: (-piece[1], piece[0].encode()))
    again = load(str(tmp_path / "t"))
    assert (again.files, again.special) == (trained.files, trained.special)
    assert again.decode([2, 4]).replace(" ", "") == "[CLS][MASK]"
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "t"))
    assert {role: getattr(theirs, f"{role}_token_id") for role in ROLES} == ROLES
    assert theirs("the river").input_ids == [2, *usable.encode_batch(["the river"])[0].tolist(), 3]
    assert theirs("a", "b").token_type_ids[-1] == 1
    spelled = again.decode(ids_of(again, ["The River by the Häuser"])[0]).split()
    assert spelled[:2] == (["The", "River"] if cased else ["the", "river"])
    assert spelled[-1] == {False: {"bpe": "häuser"}.get(kind, "hauser"), True: "Häuser"}[cased]


@pytest.mark.slow
def test_the_same_text_gives_the_same_tokenizer_with_any_number_of_threads():
    program = (
        "import test_train; from bertdata.tokenize.train import TRAINERS\n"
        "for kind, train in TRAINERS.items():\n"
        "    for cased in (False, True):\n"
        "        print(train(test_train.texts(), 400, cased=cased).files)"
    )
    found = set()
    for threads in ("1", "4", "4"):
        parallel = {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true", "PYTHONHASHSEED": threads}
        environment = parallel | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        found.add(python("-c", program, environment=environment))
    assert len(found) == 1


@pytest.mark.parametrize(("kind", "least"), [("wordpiece", 10), ("bpe", 262), ("unigram", 10)])
def test_a_vocabulary_without_room_is_refused(kind, least, tmp_path):
    path = write(tmp_path / "text", *texts())
    with refuses("out-of-range", "vocab_size"):
        train_tokenizer(path, tmp_path / "t", type=kind, vocab_size=least - 1)
    assert not (tmp_path / "t").exists()
    assert train_tokenizer(path, tmp_path / "t", type=kind, vocab_size=least).loaded.special.roles() == ROLES


LACKING = "warning: {:,} of the 2,011 different characters of the text have no token ({} of all characters)"
SINGLE = "warning: single characters take 995 of 1,000 tokens"


@pytest.mark.parametrize(
    ("kind", "size", "left_out", "warnings"),
    [
        ("wordpiece", 2500, 0, []),
        ("wordpiece", 1000, 1026, [LACKING.format(1026, "47.65%"), SINGLE]),
        ("unigram", 300, 1865, [LACKING.format(1865, "86.62%")]),
    ],
)
def test_characters_get_tokens_as_long_as_they_fit(tmp_path, kind, size, left_out, warnings):
    """Frequent ones first. A letter takes two tokens of a WordPiece vocabulary. The command says what is left out."""
    chinese = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
    (tmp_path / "text").write_text("the stone of 水 rivers " * 9 + " ".join(chinese))
    words = [tmp_path / "text", "--out", tmp_path / "t", "--vocab-size", size, "--type", kind]
    done = succeeds("bertdata", "build", *words, "--validation", 0)
    trained = load(str(tmp_path / "t"))
    assert trained.special.vocab_size <= size
    known = {trained.spell(number).lstrip("#▁") for number in range(trained.special.vocab_size)}
    assert {*"thesonfriv水"} <= known
    assert len({*chinese} - known) == left_out
    if kind == "unigram":  # its characters that training removes get scores in their own order
        scores = [score for token, score in sorted(trained.source.content["model"]["vocab"]) if token in chinese]
        assert scores == sorted(scores) != sorted(scores, reverse=True)
    assert [line.partition(";")[0] for line in done.stderr.splitlines() if "warning" in line] == warnings


@pytest.mark.parametrize(("kind", "size"), [((), 130), (("--type", "bpe", "--cased"), 300)])
def test_a_build_trains_what_it_is_asked_for(corpus, tmp_path, kind, size):
    """No warning: half of the 130 tokens are single characters, and not more."""
    trained = (*kind, "--vocab-size", size)
    for command, out in (("build", "out"), ("train-tokenizer", "t")):
        done = succeeds("bertdata", command, corpus, "--out", tmp_path / out, *trained)
        assert "single characters" not in done.stderr
    dataset = bertdata.open(tmp_path / "out")
    assert (dataset.special_tokens.roles(), dataset.special_tokens.vocab_size) == (ROLES, size)
    digest = hashlib.sha256((tmp_path / "t" / "tokenizer.json").read_bytes()).hexdigest()
    assert dataset.manifest.tokenizer["tokenizer.json"] == digest
    refused("bertdata", "train-tokenizer", corpus, "--out", tmp_path / "t", *trained, kind="out-exists", option="out")


def test_the_command_trains_on_the_text_that_its_options_name(tmp_path):
    rows = [{"body": "der Stöne im Flüß"}, {"body": "zz"}, {"text": 1}] * 30
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    put(tmp_path / "rows" / "rows.data", lines.encode("latin-1"))
    put(tmp_path / "rows" / "other.data", '{"body": "qqqq"}\n' * 90)
    write(tmp_path / "plain", *["der Stöne im Flüß"] * 30)
    options = ["--format", "jsonl", "--text-key", "body", "--encoding", "latin-1", "--on-error", "skip"]
    options += ["--map", "bertdata.prepare:length(3)", "--exclude", "other.*"]
    for path, out, more in ((tmp_path / "rows", "t", options), (tmp_path, "u", ["--include", "plain"])):
        succeeds("bertdata", "train-tokenizer", path, "--out", tmp_path / out, "--cased", "--vocab-size", 60, *more)
    one, other = ((tmp_path / out / "tokenizer.json").read_bytes() for out in "tu")
    assert one == other


RESIDUES = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]


def sequences():
    """Proteins, DNA in both cases, and what is neither."""
    draw = random.Random(5)
    alphabets = ["".join(RESIDUES[4:-2]), "ACGTN", "acgtnACGTN", "ACx *\t\r\n1", "AC\u0301\u6c34\U0001f600\u2028\u00ad"]
    return ["".join(draw.choices(letters, k=draw.randint(0, 300))) for letters in alphabets for _ in range(20)]


def test_residues_are_tokens_as_in_esm(tmp_path):
    from transformers import EsmTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(RESIDUES))
    theirs, fast = EsmTokenizer(str(tmp_path / "vocab.txt")), train_tokenizer([], tmp_path / "made", type="residues")
    made = fast.loaded
    theirs.save_pretrained(tmp_path / "published")  # as its authors publish it, without a tokenizer.json
    published = load(str(tmp_path / "published"))
    assert (published.files["tokenizer.json"], published.special) == (made.files["tokenizer.json"], made.special)
    assert load(str(tmp_path / "vocab.txt")).special == made.special
    assert [made.spell(number) for number in range(made.special.vocab_size)] == RESIDUES
    assert made.special.roles() == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 32, "eos": 2}
    known = [text for text in sequences() if set(text) <= {*RESIDUES, *" \t\r\n"}]
    assert len(known) > 20
    assert ids_of(made, known) == [theirs(text, add_special_tokens=False).input_ids for text in known]
    assert fast.encode_batch(["MKV"], add_special_tokens=True)[0].tolist() == theirs("MKV").input_ids
    assert theirs("MKV").input_ids == [0, 20, 15, 7, 2]
    assert ids_of(made, ["mM J<mask>"]) == [[3, 20, 3, 3, *ids_of(made, ["mask"])[0], 3]]


def test_a_byte_is_a_token_and_nothing_is_lost(tmp_path):
    made = train_tokenizer([], tmp_path / "t", type="bytes").loaded
    assert (made.special.vocab_size, made.special.roles()) == (261, ROLES)
    for text in [*sequences(), bytes(range(128)).decode(), "".join(map(chr, range(128, 3000))), "[MASK] "]:
        ids = ids_of(made, [text])[0]
        assert ids == [5 + byte for byte in text.encode()]
        assert made.decode(ids) == text


def test_a_fixed_tokenizer_reads_no_text_and_gives_the_ids_of_proteins(tmp_path):
    fasta, proteins = ">sp|P1|ONE first\nMKTAYIAKQR\nQISFVKSHFS\n>two\nMGL*\n", ["MKTAYIAKQRQISFVKSHFS", "MGL*"]
    path, common = write(tmp_path / "proteins.fasta", fasta), ["--validation", 0]
    succeeds("bertdata", "train-tokenizer", "--type", "residues", "--out", tmp_path / "t")
    succeeds("bertdata", "build", path, "--tokenizer", tmp_path / "t", "--out", tmp_path / "s", *common)
    common += ["--type", "residues", "--vocab-size", 9]
    done = succeeds("bertdata", "build", path, "--out", tmp_path / "o", *common)
    assert "note: --vocab-size " in done.stderr  # an option that has no effect is said
    one, other = (bertdata.open(tmp_path / name) for name in "so")
    assert one.dataset_id == other.dataset_id
    expected = [[RESIDUES.index(letter) if letter in RESIDUES else 3 for letter in text] for text in proteins]
    assert [document.tolist() for document in one] == expected


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer_config.json", "spiece.model"])
def test_a_directory_of_another_tokenizer_is_left_alone(tmp_path, name):
    text, file = write(tmp_path / "text", "the stone"), write(tmp_path / "out" / name, "mine")
    with refuses("out-exists", "out"):
        train_tokenizer(text, tmp_path / "out", vocab_size=40)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert file.read_text() == "mine\n"
