"""Minimal pairs: the scores are those of the papers, whatever the batches and the ranks; what is no pair is refused."""

import gzip
import json
import math
import shutil

import numpy as np
import pytest
import torch
from reference.pairs import score as slow_score
from support.commands import json_of, refused, succeeds
from support.data import built, byte_level_bpe, make_text
from support.disk import write, write_all
from support.families import LISTED
from support.runs import ALONE, CPU
from tokenizers import processors
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

import bertdata
from bertdata.tokenize.load import load
from bertdata.tokenize.spelling import Spelling
from bertdata.tokenize.tokenizer import TOKENIZER
from bertdata.tokenize.tokenizer import LoadedTokenizer as Tokenizer
from bertdata.tokenize.train import train_unigram
from bertrain import evaluate as evaluation
from bertrain.commands import evaluate, pairs
from bertrain.models.encoder import Encoder
from bertrain.models.load import load_model, max_length
from bertrain.ranks import World

PAIRS = [  # good, bad, field, phenomenon, paradigm
    ("The rivers are under the house.", "The rivers is under the house.", "morphology", "agreement", "number_1"),
    ("Bread and salt", "Bread salt and", "syntax", "order", "order_1"),
    ("morning light, the x火house letters", "morning light, the x火 house letter", "syntax", "order", "order_2"),
    ("wind", "x-ray windows of\nstone", "syntax", "order", "order_2"),
]
PAIRS = [dict(zip(("good", "bad", "field", "phenomenon", "paradigm"), pair, strict=True)) for pair in PAIRS]


def write_checkpoint(out, model_type, tokenizer):
    """A random model whose predictions are far from uniform, with a tokenizer."""
    special = tokenizer.special
    values = {"vocab_size": special.vocab_size, "pad_token_id": special.pad, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(model_type, **LISTED[model_type] | values))
    model.save_pretrained(out)
    return write_all(out, tokenizer.files)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, vocab):
    """Checkpoint, and which tokens continue a word, by the kind of tokenizer."""
    robertas = byte_level_bpe(290, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    robertas.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    kinds = {
        "wordpiece": ("bert", load(vocab), lambda token: token.startswith("##")),
        "byte-level": ("roberta", Tokenizer(robertas.to_str()), lambda token: token[0] not in "ĠĊ"),
        "unigram": ("modernbert", train_unigram([make_text(60)], 150), lambda token: not token.startswith("▁")),
    }
    folder = tmp_path_factory.mktemp("pairs")
    return {kind: (write_checkpoint(folder / kind, *parts), rule) for kind, (*parts, rule) in kinds.items()}


@pytest.fixture(scope="module")
def bert_like(checkpoints):
    return checkpoints["wordpiece"][0]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, PAIRS)).encode()))
    return path


def result_of(checkpoint, *arguments):
    return json_of(evaluate.main, "--checkpoint", checkpoint, *arguments)


def parts(directory, chosen):
    """What log_likelihoods takes: encoder, rows one after the other, tokenizer."""
    encoder = Encoder(load_model(directory))
    tokenizer = pairs.tokenizer_of(directory, encoder)
    rows = pairs.encode(chosen, tokenizer, path="", most=max_length(encoder.model.config))
    return encoder, [row for pair in rows for row in pair], tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level", pytest.param("unigram", marks=pytest.mark.slow)])
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
    assert np.abs(np.subtract(found["sum"], found["word-l2r"])).max() > 0.1  # the masks of words change them


def test_scores_do_not_depend_on_batches_or_ranks(bert_like, file, limit):
    encoder, rows, tokenizer = parts(bert_like, pairs.read(str(file)))

    class Part(World):
        def sum(self, tensor):
            return tensor

    def scores(ranks=ALONE):
        return pairs.log_likelihoods(encoder, rows, tokenizer, ranks, score="word-l2r")

    expected = scores()
    for world_size in (2, 3, 20):
        shares = [scores(Part(rank, world_size, CPU)) for rank in range(world_size)]
        assert [sum(share) for share in zip(*shares, strict=True)] == pytest.approx(expected, abs=1e-5)
    for places in (1, 30):
        limit(pairs_places=places)
        assert scores() == pytest.approx(expected, abs=1e-5)


def test_accuracy_over_all_and_by_group(bert_like, tmp_path, limit):
    """A pair of the same ids is a tie. Half a character is scored as a question mark."""
    model, library = AutoModelForMaskedLM.from_pretrained(bert_like).eval(), AutoTokenizer.from_pretrained(bert_like)
    rows = [("river", "salt", "x", 1), ("salt", "river", "x", 1), ("THE", "of", "x", 2), ("of \ud800", "of ?", "y", 3)]
    names = ("sentence_good", "sentence_bad", "linguistics_term", "UID")
    lines = (json.dumps(dict(zip(names, map(str, row), strict=True))) for row in rows)
    given = ["--pairs", write(tmp_path / "pairs.jsonl", *lines)]
    texts = [[text.replace("\ud800", "?") for text in row[:2]] for row in rows]
    scores = ([slow_score(model, library, text, None, name="sum") for text in pair] for pair in texts)
    right = np.array([1.0 if good > bad else 0.5 if good == bad else 0.0 for good, bad in scores])
    found = result_of(bert_like, *given)
    assert result_of(bert_like, *given, "--score", "mean")["score"] == "mean"
    assert {kind: [*groups] for kind, groups in found["by"].items()} == {"phenomenon": ["x", "y"], "paradigm": [*"123"]}
    assert found["ties"] == 1
    by_x, by_1 = found["by"]["phenomenon"]["x"], found["by"]["paradigm"]["1"]
    for part, chosen in ((found, right), (by_x, right[:3]), (by_1, right[:2])):
        assert (part["accuracy"], part["pairs"]) == (pytest.approx(chosen.mean()), len(chosen))
        assert part["standard_error"] == pytest.approx(chosen.std() / math.sqrt(len(chosen)))
    limit(pairs_shown=2)
    shown = succeeds(evaluate.main, "--checkpoint", bert_like, *given).output
    assert all(said in shown for said in (f"{right.mean():.2%}", f"{by_x['accuracy']:.2%}", "3 groups by paradigm"))


def test_a_sample_is_the_beginning_of_a_fixed_random_order(tmp_path):
    rows = ({"good": f"good {n}", "bad": f"bad {n}"} for n in range(300))
    data = str(write(tmp_path / "pairs.jsonl", *map(json.dumps, rows)))
    whole, hundred, ten = pairs.read(data), pairs.read(data, 100), pairs.read(data, 10)
    assert pairs.read(data, 300) == pairs.read(data, 999) == whole
    assert (len(hundred), len(ten)) == (100, 10)
    assert set(map(str, ten)) < set(map(str, hundred)) < set(map(str, whole))
    assert ten == sorted(ten) == pairs.read(data, 10)
    assert hundred != whole[:100]


GOOD, BAD = json.dumps(PAIRS[0]), ('" "', "3", r'"\u0000"')


def test_what_is_no_pair_is_refused(bert_like, tmp_path):
    data, long = tmp_path / "pairs.jsonl", json.dumps({"good": "the river", "bad": "the " * 79})
    for kind, where, *contents in (
        ("empty", "", "", "\n \n"),
        ("not-of-format", ", line 3", f"{GOOD}\n\n{{oops\n"),
        ("not-text", ", line 2", f"{GOOD}\n".encode() + b'{"good": "na\xefve"}\n'),
        ("bad-row", ", line 2", f"{GOOD}\n7\n"),
        ("bad-row", ", line 1", *(f'{{"good": "the river"{bad}}}\n' for bad in ("", *(f', "bad": {x}' for x in BAD)))),
        ("bad-row", ", line 2", f"{GOOD}\n{long}\n", GOOD + '\n{"good": "a", "bad": "the", "UID": "a\\ud800"}'),
    ):
        for content in contents:
            data.write_bytes(content.encode() if isinstance(content, str) else content)
            given = ["--checkpoint", bert_like, "--pairs", data]
            option = "pairs" if kind == "empty" else None
            refused(evaluate.main, *given, kind=kind, option=option, says=f"{data}{where}")


def test_a_checkpoint_needs_a_tokenizer_with_a_mask(bert_like, file, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(bert_like, other)
    content = json.loads((other / "tokenizer.json").read_text())
    arguments = ["--checkpoint", other, "--pairs", file]
    for change in ({"[MASK]": None}, {"more": 1000}):
        vocabulary = {token: n for token, n in (content["model"]["vocab"] | change).items() if n is not None}
        added = [token for token in content["added_tokens"] if token["content"] in vocabulary]
        changed = content | {"model": content["model"] | {"vocab": vocabulary}, "added_tokens": added}
        (other / "tokenizer.json").write_text(json.dumps(changed))
        refused(evaluate.main, *arguments, kind="tokenizer-differs", option="checkpoint")
    (other / "tokenizer.json").unlink()
    refused(evaluate.main, *arguments, kind="tokenizer-unreadable", option="checkpoint")


# -------------------------------------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level", "unigram"])
def test_tokens_are_shown_as_people_read_them(checkpoints, kind):
    tokenizer = load(str(checkpoints[kind][0]))
    spelling, text = Spelling(tokenizer.files[TOKENIZER]), "the rivers naïve"
    content = f"{text}\n".encode()
    ids = tokenizer.encode(content, np.array([0, len(content)]), sentences=False).ids.tolist()
    tokens = [tokenizer.spell(token) for token in ids]
    mask = tokenizer.spell(tokenizer.special.mask)
    expected = text if kind == "byte-level" else text.replace("ï", "i")
    assert spelling.text(tokens) == f"{expected} {tokens[-1]}"
    assert spelling.text([mask, *tokens], {0}) == f">{mask}< {expected} {tokens[-1]}"
    if kind == "byte-level":
        spelt = {"Ġbe": "␣be", "ultÃ¤t": "ultät", "Ã": r"\xc3", "Ċ": r"\n", "Ġ": "␣"}
        assert {token: spelling.token(token) for token in spelt} == spelt
        assert spelling.text(["Ġto", "Ġ", "Ã", "¤"], {1}) == "to >␣<ä"
    if kind == "wordpiece":
        assert spelling.token("##s") == "##s"
        assert spelling.text(["river", "##s", "the"], {1}) == "river>s< the"
    if kind == "unigram":
        assert spelling.token("▁the") == "␣the"


def test_each_sample_is_shown_with_the_best_predictions_of_its_masked_tokens(checkpoints, tmp_path):
    directory = checkpoints["byte-level"][0]
    data = built(tmp_path, make_text(12), tokenizer=str(directory), validation=0.5)
    options = {"split": "validation", "length": 24, "rows": 2}
    encoder = Encoder(load_model(directory))
    shown = evaluation.samples(encoder, data, best=1, **options)
    predicted = [(around, target, best) for row in shown for around, target, (best,) in row[1]]
    batch = next(bertdata.Loader(data, length=24, global_batch_size=2, split="validation", masking=evaluation.MASKING))
    used = batch.targets >= 0
    assert len(predicted) == used.sum()
    ids = torch.from_numpy(batch.input_ids).long()
    mask = None if batch.attention_mask is None else torch.from_numpy(batch.attention_mask)
    with torch.no_grad():
        logits = encoder.model(input_ids=ids, attention_mask=mask).logits[:, :, : data.special_tokens.vocab_size]
    places = logits[torch.arange(len(ids))[:, None], torch.from_numpy(batch.masked_positions)]
    as_read = evaluation.spelled(load(str(directory)))
    for wanted, found in ((batch.targets, 1), (places.argmax(-1).numpy(), 2)):
        assert [each[found] for each in predicted] == [as_read(int(token)) for token in wanted[used]]
    arguments = ["--checkpoint", directory, "--data", data.path, "--length", 24, "--max-samples", 2, "--show", 2]
    shown = succeeds(evaluate.main, *arguments).stdout
    assert all(f"  {'x' * (target != best):<2}{target:<16}  {best}" in shown for _, target, best in predicted)
    options["rows"] = 1000
    validation = bertdata.Loader(data, length=24, split="validation")
    assert len(evaluation.samples(encoder, data, best=1, **options)) == validation.num_samples
