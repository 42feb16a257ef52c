"""The trainer against a known answer: a grammar whose best possible loss can be computed."""

import itertools
import json
import math
import sys

import click
import numpy as np
import pytest
import torch
from support.data import ROOT, build
from support.runs import learner, train

import bertdata
from bertrain import checkpoint
from bertrain.data import micro_batches
from bertrain.models.load import load_model

sys.path.insert(0, str(ROOT / "examples"))
from grammar import MASK, Grammar  # noqa: E402

# Number is agreed on in a sentence, but "the" and the adjectives do not show it: the noun or verb must be looked for on
# either side, and a masked place is a real inference. A document is a run of sentences.
EMIT = {
    "det.sg": {"the": 0.5, "a": 0.3, "this": 0.2},
    "det.pl": {"the": 0.5, "many": 0.2, "these": 0.3},
    "adj.sg": {"big": 0.4, "red": 0.3, "old": 0.3},
    "adj.pl": {"big": 0.2, "red": 0.5, "old": 0.3},
    "noun.sg": {"dog": 0.5, "cat": 0.3, "bird": 0.2},
    "noun.pl": {"dogs": 0.2, "cats": 0.3, "birds": 0.5},
    "verb.sg": {"runs": 0.6, "sleeps": 0.4},
    "verb.pl": {"run": 0.3, "sleep": 0.7},
    "adv": {"well": 0.7, "often": 0.3},
}
MOVE = {
    "det.sg": {"adj.sg": 0.5, "noun.sg": 0.5},
    "det.pl": {"adj.pl": 0.5, "noun.pl": 0.5},
    "adj.sg": {"adj.sg": 0.2, "noun.sg": 0.8},
    "adj.pl": {"adj.pl": 0.2, "noun.pl": 0.8},
    "noun.sg": {"verb.sg": 1.0},
    "noun.pl": {"verb.pl": 1.0},
    "verb.sg": {"adv": 0.4, "det.sg": 0.35, "det.pl": 0.2, "end": 0.05},
    "verb.pl": {"adv": 0.4, "det.sg": 0.2, "det.pl": 0.35, "end": 0.05},
    "adv": {"det.sg": 0.45, "det.pl": 0.45, "end": 0.1},
    "end": {"det.sg": 0.5, "det.pl": 0.5},
}
GRAMMAR = Grammar(MOVE, EMIT)
LENGTH = 32
DISTANCE = 0.12  # nats above the floor that training has to come within
SMALL = {
    "model_type": "modernbert",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": len(GRAMMAR.vocabulary),
    "pad_token_id": 0,
    "cls_token_id": 2,
    "bos_token_id": 2,
    "sep_token_id": 3,
    "eos_token_id": 3,
}


def test_floor_is_what_enumeration_gives():
    """best_loss on a short row, against a sum over all state paths, words and selections."""
    words = {word: number for number, word in enumerate(GRAMMAR.vocabulary)}
    row = [words[w] for w in ("[CLS]", "the", "[MASK]", "runs", "[SEP]", "a", "[SEP]")]
    positions, targets = [2, 5], [words["dog"], words["this"]]  # "a" may be what was drawn instead of "this"
    weight = {target: dict.fromkeys(range(len(words)), 0.0) for target in positions}
    candidates = [1, 2, 3, 5]
    for path in itertools.product(range(len(GRAMMAR.states)), repeat=5):
        prior = GRAMMAR.stationary[path[0]] * math.prod(GRAMMAR.moves[a, b] for a, b in itertools.pairwise(path))
        if prior == 0:
            continue
        for chosen in itertools.combinations(candidates, 2):
            seen = [{} for _ in range(5)]  # word → P(word | state) * P(shown | word), by place
            for place in range(1, 6):
                for word, share in GRAMMAR.emit[GRAMMAR.states[path[place - 1]]].items():
                    shown = row[place]
                    same = float(shown == words[word])
                    if place not in chosen:
                        factor = same
                    elif shown == MASK:
                        factor = 0.8
                    else:
                        factor = 0.1 * same + 0.1 / GRAMMAR.pool
                    if word == "[SEP]" and place in chosen:
                        factor = 0.0
                    seen[place - 1][words[word]] = share * factor
            mass = prior * math.prod(sum(words_here.values()) for words_here in seen)
            for place in positions:
                if place in chosen and mass:
                    here = seen[place - 1]
                    for word, part in here.items():
                        weight[place][word] += mass * part / sum(here.values())
    expected = -sum(math.log(weight[p][t] / sum(weight[p].values())) for p, t in zip(positions, targets, strict=True))
    found, count = GRAMMAR.best_loss(np.array(row), np.array(positions), np.array(targets))
    assert count == 2
    assert found == pytest.approx(expected, rel=1e-9)


def near_the_floor(tmp_path, *, steps, documents, lr):
    """The loss of a trained model on held-out rows, and the best loss there is for them."""
    (tmp_path / "corpus.txt").write_text(GRAMMAR.text(documents, seed=0))
    (tmp_path / "vocab.txt").write_text("\n".join(GRAMMAR.vocabulary) + "\n")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    shards = tmp_path / "shards"
    build([tmp_path / "corpus.txt"], shards, tokenizer=str(tmp_path / "vocab.txt"), validation=0.1)
    train(
        shards,
        tmp_path / "run",
        steps=steps,
        length=LENGTH,
        global_batch_size=32,
        lr=lr,
        log_every=100,
        eval_every=0,
        save_every=1000,
        model=str(tmp_path / "config.json"),
    )
    module = learner(load_model(checkpoint.find(tmp_path / "run"))).eval()
    floor = loss = count = 0
    dataset, cpu = bertdata.open(shards), torch.device("cpu")
    for batch in bertdata.Loader(dataset, length=LENGTH, global_batch_size=64, split="validation", epochs=1):
        if batch.attention_mask is not None:
            continue  # the floor is worked out for full rows
        with torch.no_grad():
            loss += module(**next(micro_batches(batch, size=64, count=1, device=cpu)))["mlm"].sum.item()
        for row in zip(batch.input_ids, batch.masked_positions, batch.targets, strict=True):
            least, number = GRAMMAR.best_loss(*row)
            floor += least
            count += number
    return loss / count, floor / count, count


def test_training_lowers_the_loss_and_not_below_the_best_there_is(tmp_path):
    """With few steps: below the loss by frequencies alone, under which training on wrong targets does not come."""
    loss, floor, _ = near_the_floor(tmp_path, steps=80, documents=500, lr=1e-2)
    frequencies = json.loads((tmp_path / "run" / "run.json").read_text())["resolved"]["reference_loss"]["unigram"]
    assert floor < loss < frequencies - 0.25


@pytest.mark.slow
def test_training_comes_close_to_the_best_loss_there_is(tmp_path):
    loss, floor, count = near_the_floor(tmp_path, steps=600, documents=5000, lr=6e-3)
    assert count > 3000
    assert floor - 0.02 < loss < floor + DISTANCE


@pytest.mark.slow
def test_the_example_of_a_million_parameters_runs(tmp_path, monkeypatch, capsys):
    """At a hundredth of its size: each way has a loss above the floor, and the grown runs take fewer operations."""
    import one_million

    assert len(one_million.grammar().vocabulary) == 1000
    monkeypatch.setattr(one_million, "MODEL", one_million.MODEL | {"hidden_size": 32, "intermediate_size": 64})
    arguments = ["--out", str(tmp_path), "--documents", "300", "--steps", "8", "--max-samples", "64"]
    one_million.main(arguments, standalone_mode=False)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line[:5] in ("| com", "| pro")]
    assert [row[0].removeprefix("| ") for row in rows] == list(one_million.WAYS)
    for _, loss, floor, *_ in rows:
        assert 0 < float(floor) < float(loss) < 7
    with pytest.raises(click.UsageError, match="301"):
        one_million.main(["--out", str(tmp_path), "--documents", "301"], standalone_mode=False)
    operations = [
        one_million.cost(tmp_path / name)[1]
        for name in ("complete-0", "progressive-2-then-4-layers-0", "progressive-1-2-then-4-layers-0")
    ]
    assert operations[0] > operations[1] > operations[2] > 0
