"""A hidden Markov grammar, one token per word, and the best loss any model can reach on its masked rows.

Number is agreed on in a sentence, but "the" and the adjectives do not show it: the noun or verb must be looked for on
either side, and a masked place is a real inference. A document is a run of sentences.
"""

import math
import random

import numpy as np

STATES = ["det.sg", "det.pl", "adj.sg", "adj.pl", "noun.sg", "noun.pl", "verb.sg", "verb.pl", "adv", "end"]
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
    "end": {"[SEP]": 1.0},
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
WORDS = sorted({word for words in EMIT.values() for word in words} - {"[SEP]"})
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIALS, *WORDS]
SEP, MASK = VOCABULARY.index("[SEP]"), VOCABULARY.index("[MASK]")
POOL = len(WORDS)

_A = np.array([[MOVE[s].get(t, 0.0) for t in STATES] for s in STATES])
_B = np.array([[EMIT[s].get(word, 0.0) for word in VOCABULARY] for s in STATES])
_STATIONARY = np.linalg.matrix_power(_A, 2000)[0]


def text(num_documents, seed):
    """Documents, a blank line between them."""
    rng = random.Random(seed)
    documents, words, state = [], [], "end"
    while len(documents) < num_documents:
        state = rng.choices(list(MOVE[state]), list(MOVE[state].values()))[0]
        word = rng.choices(list(EMIT[state]), list(EMIT[state].values()))[0]
        if state == "end":
            documents.append(" ".join(words))
            words = []
        else:
            words.append(word)
    return "\n\n".join(documents) + "\n"


def best_loss(input_ids, masked_positions, targets):
    """Sum of −log P(target | row), and the number of targets, for one full row [T] masked exactly as by default.

    Forward–backward over (state, places selected so far): a row has c = K selected places, each set of that size
    equally likely, and a place that shows a word may have been selected and kept (0.1) or replaced (0.1).
    """
    row = input_ids[1:-1]
    c, n, s = len(targets), len(row), len(STATES)
    plain, chosen = np.zeros((n, s)), np.zeros((n, s))  # P(shown | state) if not selected, if selected
    shown = np.zeros((n, len(VOCABULARY)))  # P(shown | word, selected)
    for i, token in enumerate(row):
        if token == MASK:
            shown[i, len(SPECIALS) :] = 0.8
        elif token != SEP:
            shown[i, len(SPECIALS) :] = 0.1 / POOL
            shown[i, token] += 0.1
        chosen[i] = _B @ shown[i]
        if token != MASK:
            plain[i] = _B[:, token]
    forward = np.zeros((n + 1, c + 1, s))  # before place i, by number selected, over the state of place i
    forward[0, 0] = _STATIONARY
    for i in range(n):
        here = forward[i] * plain[i]
        here[1:] += forward[i, :-1] * chosen[i]
        forward[i + 1] = here @ _A
        forward[i + 1] /= forward[i + 1].sum()
    backward = np.zeros((n + 1, c + 1, s))  # of what follows place i - 1, by number still to select, over its state
    backward[n, 0] = 1.0
    for i in range(n - 1, -1, -1):
        step = backward[i + 1] * plain[i]
        step[1:] += backward[i + 1, :-1] * chosen[i]
        backward[i] = step @ _A.T if i else step
        backward[i] /= backward[i].sum()
    total = 0.0
    for position, target in zip(masked_positions, targets, strict=True):
        i = position - 1
        reach = np.einsum("js,js->s", forward[i, :c], backward[i + 1, c - 1 :: -1][:c])  # one selected here
        words = (reach @ _B) * shown[i]
        total -= math.log(words[target] / words.sum())
    return total, len(targets)
