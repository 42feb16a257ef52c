"""The trainer against a known answer: a grammar whose best possible loss can be computed."""

import itertools
import json
import math
import sys

import numpy as np
import pytest
import torch
from support.commands import python
from support.data import ROOT, built
from support.disk import write
from support.runs import last_checkpoint, train
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM

import bertdata

sys.path.insert(0, str(ROOT / "examples"))
from grammar import MASK, SEP, Grammar  # noqa: E402

# Number is agreed on in a sentence, but adjectives do not show it: the noun or verb must be looked for on either side,
# and a masked place is a real inference. A document is a run of sentences.
EMIT = {
    "adj.sg": {"the": 0.5, "big": 0.3, "old": 0.2},
    "adj.pl": {"the": 0.4, "big": 0.2, "old": 0.4},
    "noun.sg": {"dog": 0.5, "cat": 0.3, "bird": 0.2},
    "noun.pl": {"dogs": 0.2, "cats": 0.3, "birds": 0.5},
    "verb.sg": {"runs": 0.6, "sleeps": 0.4},
    "verb.pl": {"run": 0.3, "sleep": 0.7},
    "adv": {"well": 0.7, "often": 0.3},
}
MOVE = {
    "adj.sg": {"adj.sg": 0.3, "noun.sg": 0.7},
    "adj.pl": {"adj.pl": 0.3, "noun.pl": 0.7},
    "noun.sg": {"verb.sg": 1.0},
    "noun.pl": {"verb.pl": 1.0},
    "verb.sg": {"adv": 0.4, "adj.sg": 0.35, "adj.pl": 0.2, "end": 0.05},
    "verb.pl": {"adv": 0.4, "adj.sg": 0.2, "adj.pl": 0.35, "end": 0.05},
    "adv": {"adj.sg": 0.45, "adj.pl": 0.45, "end": 0.1},
    "end": {"adj.sg": 0.5, "adj.pl": 0.5},
}
GRAMMAR = Grammar(MOVE, EMIT)
LENGTH = 32


def test_floor_is_what_enumeration_gives():
    """best_loss on a short row, against a sum over all paths of states, words and selections."""
    words = {word: number for number, word in enumerate(GRAMMAR.vocabulary)}
    row, selected = [words["runs"], MASK, SEP, words["big"]], [(1, words["often"]), (3, words["old"])]

    def chance(shown, word, is_selected):
        """P(shown | word); "big" may be what was drawn instead of "old"."""
        if not is_selected or SEP in (word, shown):
            return shown == word and not is_selected
        return 0.8 if shown == MASK else 0.1 * (shown == word) + 0.1 / GRAMMAR.pool

    weights = np.zeros((len(row), len(words)))
    for path in itertools.product(range(len(GRAMMAR.states)), repeat=len(row)):
        prior = GRAMMAR.stationary[path[0]] * math.prod(GRAMMAR.moves[pair] for pair in itertools.pairwise(path))
        emitted = itertools.product(*(np.flatnonzero(GRAMMAR.emits[state]) for state in path)) if prior else ()
        for text, places in itertools.product(emitted, itertools.combinations(range(len(row)), 2)):
            mass = prior * math.prod(GRAMMAR.emits[pair] for pair in zip(path, text, strict=True))
            mass *= math.prod(chance(row[at], word, at in places) for at, word in enumerate(text))
            weights[places, [text[at] for at in places]] += mass
    expected = -sum(math.log(weights[at][word] / weights[at].sum()) for at, word in selected)
    places, targets = np.array(selected).T
    found, count = GRAMMAR.best_loss(np.array([words["[CLS]"], *row, SEP]), places + 1, targets)
    assert (count, found) == (2, pytest.approx(expected, rel=1e-9))


def near_the_floor(tmp_path, *, documents, **more):
    """The loss of a trained model on held-out rows, and the best loss there is for them."""
    vocabulary = write(tmp_path / "vocab.txt", *GRAMMAR.vocabulary)
    dataset = built(tmp_path, GRAMMAR.text(documents, seed=0), tokenizer=str(vocabulary), validation=0.1)
    options = {"length": LENGTH, "global_batch_size": 32, "log_every": 100, "eval_every": 0, "save_every": 1000}
    train(dataset.path, tmp_path / "run", **options, **more)
    model = AutoModelForMaskedLM.from_pretrained(last_checkpoint(tmp_path / "run")).eval()
    floor = loss = count = 0
    for batch in bertdata.Loader(dataset, length=LENGTH, global_batch_size=16, split="validation", epochs=1):
        if batch.attention_mask is not None:
            continue  # the floor is worked out for full rows
        ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
        with torch.no_grad():
            loss += cross_entropy(model(ids).logits.transpose(1, 2), labels, reduction="sum").item()
        for row in zip(batch.input_ids, batch.masked_positions, batch.targets, strict=True):
            least, number = GRAMMAR.best_loss(*row)
            floor += least
            count += number
    return loss / count, floor / count, count


def test_training_lowers_the_loss_and_not_below_the_best_there_is(tmp_path):
    """With few steps: below the loss by frequencies alone, under which training on wrong targets does not come."""
    loss, floor, _ = near_the_floor(tmp_path, steps=100, documents=500)
    frequencies = json.loads((tmp_path / "run" / "run.json").read_text())["resolved"]["reference_loss"]["unigram"]
    assert floor < loss < frequencies - 0.25


@pytest.mark.slow
def test_training_comes_close_to_the_best_loss_there_is(tmp_path):
    loss, floor, count = near_the_floor(tmp_path, documents=4000, steps=400, lr=2e-3)
    assert count > 2500
    assert floor - 0.02 < loss < floor + 0.12


@pytest.mark.slow
def test_the_example_of_a_million_parameters_runs(tmp_path):
    """With a hundredth of its text and steps: each way has a loss above the floor."""
    small = ["--documents", 300, "--steps", 8, "--max-samples", 64]
    lines = python(ROOT / "examples" / "one_million.py", "--out", tmp_path, *small).splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(("| complete", "| progressive"))]
    assert len(rows) == 3
    assert all(0 < float(floor) < float(loss) < 7 for _, loss, floor, *_ in rows)
