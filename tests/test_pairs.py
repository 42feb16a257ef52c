"""Minimal pairs: the scores are those of the papers, whatever the batches and the ranks; what is no pair is refused."""

import gzip
import itertools
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from reference.pairs import score as slow_score
from support.commands import json_of, refused, succeeds
from support.data import built, byte_level_bpe, ids_of, make_text
from support.disk import write, write_all
from support.encoding import load, loaded
from support.families import LISTED, fast
from support.runs import CPU, learner
from tokenizers import processors
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

import bertdata
from bertdata.tokenize.spelling import Spelling, spelled
from bertdata.tokenize.train import train_unigram
from bertrain import evaluate
from bertrain.commands import pairs
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
        "byte-level": ("roberta", loaded(robertas), lambda token: token[0] not in "ĠĊ"),
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


@pytest.mark.parametrize("kind", fast(["byte-level", "wordpiece", "unigram"], among=["byte-level"]))
def test_scores_are_those_of_the_papers_whatever_the_batches_and_the_ranks(checkpoints, file, kind, limit):
    directory, continues = checkpoints[kind]
    model, library = AutoModelForMaskedLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    encoder = learner(AutoModelForMaskedLM.from_pretrained(directory))
    tokenizer = pairs.tokenizer_of(directory, encoder)
    rows = [*itertools.chain(*pairs.encode(pairs.read(str(file)), tokenizer, path="", most=80))]
    texts = [row[name] for row in PAIRS for name in ("good", "bad")]

    class Part(World):
        def sum(self, tensor):
            return tensor

    for score in pairs.SCORES:
        expected = [slow_score(model, library, text, continues, name=score) for text in texts]
        for places, world_size in ((10_000, 1), (1, 2), (30, 20)):
            limit(pairs_places=places)
            ranks = [Part(rank, world_size, CPU) for rank in range(world_size)]
            with torch.device("meta"):  # where a tensor would be that is not put on the device of the rank
                shares = [pairs.log_likelihoods(encoder, rows, tokenizer, rank, score=score) for rank in ranks]
            assert np.sum(shares, axis=0) == pytest.approx(expected, abs=1e-4)


def test_accuracy_over_all_and_by_group(bert_like, tmp_path):
    """A pair of the same ids is a tie. Half a character is scored as a question mark."""
    model, library = AutoModelForMaskedLM.from_pretrained(bert_like).eval(), AutoTokenizer.from_pretrained(bert_like)
    rows = [("river", "salt", "x", 1), ("salt", "river", "x", 1), ("THE", "of", "x", 2), ("of \ud800", "of ?", "y", 3)]
    names = ("sentence_good", "sentence_bad", "linguistics_term", "UID")
    lines = (json.dumps(dict(zip(names, map(str, row), strict=True))) for row in rows)
    given = ["--checkpoint", bert_like, "--pairs", write(tmp_path / "pairs.jsonl", *lines)]
    texts = [[text.replace("\ud800", "?") for text in row[:2]] for row in rows]
    scores = ([slow_score(model, library, text, None, name="sum") for text in pair] for pair in texts)
    right = np.array([1.0 if good > bad else 0.5 if good == bad else 0.0 for good, bad in scores])
    found = json_of("bertrain", "evaluate", *given)
    assert {kind: [*groups] for kind, groups in found["by"].items()} == {"phenomenon": ["x", "y"], "paradigm": [*"123"]}
    assert found["ties"] == 1
    by_x, by_1 = found["by"]["phenomenon"]["x"], found["by"]["paradigm"]["1"]
    for part, chosen in ((found, right), (by_x, right[:3]), (by_1, right[:2])):
        assert (part["accuracy"], part["pairs"]) == (pytest.approx(chosen.mean()), len(chosen))
        assert part["standard_error"] == pytest.approx(chosen.std() / math.sqrt(len(chosen)))
    assert f"{by_x['accuracy']:.2%}" in succeeds("bertrain", "evaluate", *given).output


def test_a_sample_is_the_beginning_of_a_fixed_random_order(tmp_path):
    rows = ({"good": f"good {n}", "bad": f"bad {n}"} for n in range(300))
    data = str(write(tmp_path / "pairs.jsonl", *map(json.dumps, rows)))
    whole, hundred, ten = pairs.read(data, 999), pairs.read(data, 100), pairs.read(data, 10)
    assert (len(whole), len(hundred), len(ten)) == (300, 100, 10)
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
            refused("bertrain", "evaluate", *given, kind=kind, option=option, says=f"{data}{where}")


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
        refused("bertrain", "evaluate", *arguments, kind="tokenizer-differs", option="checkpoint")
    (other / "tokenizer.json").unlink()
    refused("bertrain", "evaluate", *arguments, kind="tokenizer-unreadable", option="checkpoint")


SPELT = {  # token → as it is shown alone; tokens, and as they are shown in a text if the second is masked
    "wordpiece": ({"##s": "##s"}, ["river", "##s", "the"], "river>s< the"),
    "byte-level": (
        {"Ġbe": "␣be", "ultÃ¤t": "ultät", "Ã": r"\xc3", "Ċ": r"\n", "Ġ": "␣"},
        ["Ġto", "Ġ", "Ã", "¤", "Ã"],
        "to >␣<ä\ufffd",
    ),
    "unigram": ({"▁the": "␣the"}, ["▁the", "▁ri", "ver"], "the >ri<ver"),
}


@pytest.mark.parametrize("kind", SPELT)
def test_tokens_are_shown_as_people_read_them(checkpoints, kind):
    tokenizer, (alone, tokens, text) = load(str(checkpoints[kind][0])), SPELT[kind]
    spelling = Spelling(tokenizer.files["tokenizer.json"])
    assert {token: spelling.token(token) for token in alone} == alone
    assert spelling.text(tokens, {1}) == text
    mask, content = tokenizer.spell(tokenizer.special.mask), "the rivers naïve"
    tokens = [tokenizer.spell(token) for token in ids_of(tokenizer, [content])[0]]
    expected = content if kind == "byte-level" else content.replace("ï", "i")
    assert spelling.text([mask, *tokens, mask], {0}) == f">{mask}< {expected} {mask}"


def test_each_sample_is_shown_with_the_best_predictions_of_its_masked_tokens(checkpoints, tmp_path):
    directory = checkpoints["byte-level"][0]
    data = built(tmp_path, make_text(12), tokenizer=str(directory), validation=0.5)
    arguments = ["--checkpoint", directory, "--data", data.path, "--length", 24, "--max-samples", 2, "--show", 2]
    lines = re.findall(r"^  ([x ]) (\S+) +(\S+)", succeeds("bertrain", "evaluate", *arguments).stdout, re.MULTILINE)
    masking = bertdata.Masking(probability=0.15, rule=1)
    batch = next(bertdata.Loader(data, length=24, global_batch_size=2, split="validation", masking=masking))
    mask = None if batch.attention_mask is None else torch.from_numpy(batch.attention_mask)
    with torch.no_grad():
        model = AutoModelForMaskedLM.from_pretrained(directory).eval()
        logits = model(input_ids=torch.from_numpy(batch.input_ids).long(), attention_mask=mask).logits
    best = logits[torch.arange(2)[:, None], torch.from_numpy(batch.masked_positions)].argmax(-1).numpy()
    used, as_read = batch.targets >= 0, spelled(load(str(directory)))
    expected = [
        (as_read(target), as_read(token)) for target, token in zip(batch.targets[used], best[used], strict=True)
    ]
    found = evaluate.samples(learner(model), data, rows=2, best=1, split="validation", length=24)
    spelling = Spelling(load(str(directory)).files["tokenizer.json"])
    for ids, places, (_, masked) in zip(batch.input_ids, batch.masked_positions, found, strict=True):
        tokens = [load(str(directory)).spell(token) for token in ids.tolist()]
        around = [spelling.text(tokens[max(0, at - 5) : at + 6], {min(at, 5)}) for at in places.tolist()]
        assert [text for text, *_ in masked] == around[: len(masked)]
    shown = [line for line in lines if line[1:] != ("target", "the")]
    assert shown == [("x" if target != token else " ", target, token) for target, token in expected]
