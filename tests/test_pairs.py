"""Minimal pairs: the scores are those of the papers, whatever the batches and the ranks; what is no pair is refused."""

import bz2
import gzip
import json
import math
import shutil

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from conftest import make_text
from families import SMALL
from reference.pairs import score as slow_score
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from training import on_ranks
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from bertdata.tokenize.load import load
from bertdata.tokenize.tokenizer import Tokenizer
from bertdata.tokenize.train import train_unigram
from bertrain import evaluate, pairs
from bertrain.models import build
from bertrain.models.encoder import Encoder
from bertrain.runtime.dist import World

ALONE = World(0, 1, torch.device("cpu"))
PAIRS = [
    {"good": "The rivers are under the house.", "bad": "The rivers is under the house.",
     "field": "morphology", "phenomenon": "agreement", "paradigm": "number_1"},
    {"good": "Bread and salt", "bad": "Bread salt and",
     "field": "syntax", "phenomenon": "order", "paradigm": "order_1"},
    {"good": "the morning light, the x火house letters", "bad": "the morning light, the x火house letter",
     "field": "syntax", "phenomenon": "order", "paradigm": "order_2"},
    {"good": "wind", "bad": "x-ray windows of\nstone", "field": "syntax", "phenomenon": "order", "paradigm": "order_2"},
]  # fmt: skip


def byte_level():
    """A tokenizer like RoBERTa's."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([make_text(60)], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return Tokenizer(tokenizer.to_str())


def write_checkpoint(out, model_type, tokenizer):
    """A random model whose predictions are far from uniform, with a tokenizer."""
    special = tokenizer.special
    values = {"vocab_size": special.vocab_size, "pad_token_id": special.pad, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(model_type, **SMALL[model_type] | values))
    model.save_pretrained(out)
    for name, content in tokenizer.files.items():
        (out / name).write_bytes(content)
    return out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, vocab):
    """Checkpoint, and which tokens continue a word, by the kind of tokenizer."""
    kinds = {
        "wordpiece": ("bert", load(vocab), lambda token: token.startswith("##")),
        "byte-level": ("roberta", byte_level(), lambda token: token[0] not in "ĠĊ"),
        "unigram": ("modernbert", train_unigram([make_text(60)], 150), lambda token: not token.startswith("▁")),
    }
    folder = tmp_path_factory.mktemp("pairs")
    return {kind: (write_checkpoint(folder / kind, *parts), rule) for kind, (*parts, rule) in kinds.items()}


@pytest.fixture(scope="module")
def bert_like(checkpoints):
    return checkpoints["wordpiece"][0]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("file") / "pairs.jsonl", PAIRS)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def parts(directory, chosen):
    """What log_likelihoods takes: encoder, rows one after the other, tokenizer."""
    encoder = Encoder(build.load(directory))
    tokenizer = pairs.tokenizer_of(directory, encoder)
    rows = pairs.encode(chosen, tokenizer, path="", most=build.max_length(encoder.model.config))
    return encoder, [row for pair in rows for row in pair], tokenizer


def invoke(*arguments):
    result = CliRunner().invoke(evaluate.main, ["--checkpoint", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def result_of(*arguments):
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level", "unigram"])
def test_scores_are_those_of_the_papers(checkpoints, file, kind):
    directory, continues = checkpoints[kind]
    model, library = AutoModelForMaskedLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    texts = [row[name] for row in PAIRS for name in ("good", "bad")]
    found = {}
    for name in pairs.SCORES:
        encoder, rows, tokenizer = parts(directory, pairs.read(str(file)))
        found[name] = pairs.log_likelihoods(encoder, rows, tokenizer, ALONE, score=name)
        expected = [slow_score(model, library, text, continues, name=name) for text in texts]
        assert found[name] == pytest.approx(expected, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(*found.values(), strict=True)) > 0.1  # the masks of words change them


def test_scores_do_not_depend_on_batches_or_ranks(bert_like, file, monkeypatch):
    encoder, rows, tokenizer = parts(bert_like, pairs.read(str(file)))

    def scores(ranks=ALONE):
        return pairs.log_likelihoods(encoder, rows, tokenizer, ranks, score="word-l2r")

    expected = scores()
    for world_size in (2, 3, 20):
        monkeypatch.setattr(World, "sum", lambda _, tensor: tensor)
        shares = [scores(World(rank, world_size, torch.device("cpu"))) for rank in range(world_size)]
        assert [sum(share) for share in zip(*shares, strict=True)] == pytest.approx(expected, abs=1e-5)
    for places in (1, 30):
        monkeypatch.setattr(pairs, "PLACES", places)
        assert scores() == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_give_the_result_of_one(bert_like, file):
    arguments = ["--checkpoint", str(bert_like), "--pairs", str(file), "--json"]
    code, said, err = on_ranks(2, "bertrain.evaluate", arguments)
    assert code == 0, err
    assert json.loads(said.splitlines()[-1]) == result_of(bert_like, "--pairs", file)
    assert said.count("\n") == 1
    code, _, err = on_ranks(2, "bertrain.evaluate", [*arguments, "--length", "9"])
    assert (code, err.count("--length is for --data")) == (2, 1)


def test_accuracy_over_all_and_by_group(bert_like, tmp_path, monkeypatch):
    """With a model that likes short sentences. A pair of the same ids is a tie."""
    rows = [
        ("a", "a b", "x", "1"),
        ("a b", "a", "x", "1"),
        ("c", "c d", "x", "2"),
        ("THE stone", "the stone", "y", "3"),
    ]
    names = ("sentence_good", "sentence_bad", "linguistics_term", "UID")
    write(tmp_path / "pairs.jsonl", [dict(zip(names, row, strict=True)) for row in rows])
    monkeypatch.setattr(pairs, "log_likelihoods", lambda _, rows, *__, **___: [-len(row) for row in rows])
    found = result_of(bert_like, "--pairs", tmp_path / "pairs.jsonl")
    assert (found["accuracy"], found["pairs"], found["ties"]) == (2.5 / 4, 4, 1)
    assert found["standard_error"] == pytest.approx(math.sqrt((2 * 0.375**2 + 0.625**2 + 0.125**2) / 4 / 4))
    assert {name: part["accuracy"] for name, part in found["by"]["phenomenon"].items()} == {"x": 2 / 3, "y": 0.5}
    assert {name: part["pairs"] for name, part in found["by"]["paradigm"].items()} == {"1": 2, "2": 1, "3": 1}
    assert found["by"]["phenomenon"]["x"]["standard_error"] == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 3))
    assert "field" not in found["by"]
    said = invoke(bert_like, "--pairs", tmp_path / "pairs.jsonl").output
    assert "62.50%" in said
    assert "66.67%" in said
    assert "1 pair has equal scores" in said


def test_many_groups_are_left_to_json(bert_like, tmp_path):
    rows = [PAIRS[3] | {"paradigm": f"paradigm_{number}"} for number in range(21)]
    data = write(tmp_path / "pairs.jsonl", rows)
    said = invoke(bert_like, "--pairs", data).output
    assert "21 groups by paradigm: --json gives them" in said
    assert "paradigm_1" not in said
    assert len(result_of(bert_like, "--pairs", data)["by"]["paradigm"]) == 21


def test_compressed_files_are_read(bert_like, file, tmp_path):
    content = file.read_bytes()
    with pa.CompressedOutputStream(str(tmp_path / "pairs.jsonl.zst"), "zstd") as out:
        out.write(content)
    (tmp_path / "pairs.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "pairs.jsonl.bz2").write_bytes(bz2.compress(content))
    expected = result_of(bert_like, "--pairs", file, "--score", "pll")
    assert (expected["score"], expected["pairs"]) == ("pll", len(PAIRS))
    for ending in ("gz", "zst", "bz2"):
        found = result_of(bert_like, "--pairs", tmp_path / f"pairs.jsonl.{ending}", "--score", "pll")
        assert found | {"file": str(file)} == expected


def test_a_sample_is_the_beginning_of_a_fixed_random_order(tmp_path):
    data = str(write(tmp_path / "pairs.jsonl", [{"good": f"good {n}", "bad": f"bad {n}"} for n in range(300)]))
    whole, hundred, ten = pairs.read(data), pairs.read(data, 100), pairs.read(data, 10)
    assert pairs.read(data, 300) == pairs.read(data, 999) == whole
    assert (len(hundred), len(ten)) == (100, 10)
    assert set(map(str, ten)) < set(map(str, hundred)) < set(map(str, whole))
    assert ten == sorted(ten) == pairs.read(data, 10)
    assert hundred != whole[:100]


GOOD = json.dumps(PAIRS[0])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no pairs"),
        ("\n \n", "holds no pairs"),
        (f"{GOOD}\n\n{{oops\n", "line 3 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        (f"{GOOD}\n".encode() + b'{"good": "na\xefve"}\n', "line 2 is not UTF-8 text; save the file as UTF-8"),
        (f"{GOOD}\n7\n", "line 2 has no two sentences"),
        ('{"good": "the river"}\n', "line 1 has no two sentences"),
        ('{"good": "the river", "bad": " "}\n', "line 1 has no two sentences"),
        ('{"good": "the river", "bad": 3}\n', "line 1 has no two sentences"),
        ('{"good": "the river", "bad": "\\u0000"}\n', "line 1: a sentence has no token"),
        (f"{GOOD}\n" + '{"good": "the river", "bad": "' + "the " * 79 + '"}\n',
         "line 2: a sentence is 81 tokens long, and the model has 80 positions"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused(bert_like, tmp_path, content, said):
    (tmp_path / "pairs.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    done = invoke(bert_like, "--pairs", tmp_path / "pairs.jsonl")
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert str(tmp_path / "pairs.jsonl") in done.output
    assert len(done.output.splitlines()) == 1


def test_half_a_character_is_scored_as_a_question_mark(bert_like, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"good": "the river \\ud800", "bad": "the river ?"}\n')
    assert result_of(bert_like, "--pairs", tmp_path / "pairs.jsonl")["ties"] == 1


def test_files_that_cannot_be_read_are_refused(bert_like, tmp_path):
    (tmp_path / "pairs.jsonl.gz").write_bytes(b"not gzip")
    for name, said in (
        ("none.jsonl", "cannot be read"),
        ("pairs.jsonl.gz", "not a complete gzip file"),
        ("", "cannot"),
    ):
        done = invoke(bert_like, "--pairs", tmp_path / name)
        assert (done.exit_code, said in done.output) == (2, True), done.output


def test_a_checkpoint_needs_a_tokenizer_with_a_mask(bert_like, file, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(bert_like, other)
    content = json.loads((other / "tokenizer.json").read_text())
    for change, said in (
        (lambda vocabulary: vocabulary | {"[MASK]": None}, "has no [MASK], which --pairs needs"),
        (lambda vocabulary: vocabulary | {"more": 1000}, "has a vocabulary of 1001, and the model there one of"),
    ):
        vocabulary = {token: n for token, n in change(content["model"]["vocab"]).items() if n is not None}
        added = [token for token in content["added_tokens"] if token["content"] in vocabulary]
        changed = content | {"model": content["model"] | {"vocab": vocabulary}, "added_tokens": added}
        (other / "tokenizer.json").write_text(json.dumps(changed))
        done = invoke(other, "--pairs", file)
        assert (done.exit_code, said in done.output) == (2, True), done.output
    (other / "tokenizer.json").unlink()
    done = invoke(other, "--pairs", file)
    assert (done.exit_code, "needs the tokenizer of the checkpoint" in done.output) == (2, True), done.output


def test_it_is_pairs_or_shards(bert_like, file, dataset):
    data, given = ["--data", dataset.path], ["--pairs", file]
    for arguments, said in (
        ([], "give --data"),
        (data + given, "and not both"),
        ([*given, "--length", 8], "--length is for --data; leave it out with --pairs"),
        ([*given, "--split", "test"], "--split is for --data"),
        ([*given, "--show", 3], "--show is for --data"),
        ([*data, "--score", "pll"], "--score is for --pairs"),
    ):
        done = invoke(bert_like, *arguments)
        assert (done.exit_code, said in done.output) == (2, True), done.output
