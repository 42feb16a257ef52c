"""Hidden Markov grammars, one token a word, and the best loss that any model can reach on their masked rows.

States follow each other by chance, and each emits a word by chance. The state "end" ends a document. So how probable
each word of a masked place is can be worked out exactly, and the mean of −log P(target) is the floor of the loss.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SEP, MASK = SPECIALS.index("[SEP]"), SPECIALS.index("[MASK]")
END = "end"  # the state between two documents, which shows as [SEP]
IGNORED = -100


class Grammar:
    """A grammar whose vocabulary is the special tokens and its words in the order of the alphabet."""

    def __init__(self, move: Mapping[str, Mapping[str, float]], emit: Mapping[str, Mapping[str, float]]) -> None:
        """move: state → next state → probability; END among them. emit: state but END → word → probability."""
        self.states, self.move, self.emit = list(move), move, {**emit, END: {"[SEP]": 1.0}}
        words = sorted({word for state, some in emit.items() if state != END for word in some})
        self.vocabulary = [*SPECIALS, *words]
        self.pool = len(words)  # from which a random token is drawn
        numbers = {word: number for number, word in enumerate(self.vocabulary)}
        self.moves = np.array([[move[a].get(b, 0.0) for b in self.states] for a in self.states])  # [S, S]
        self.emits = np.zeros((len(self.states), len(self.vocabulary)))  # [S, V]
        for state, some in self.emit.items():
            self.emits[self.states.index(state), [numbers[word] for word in some]] = list(some.values())
        self.stationary = np.linalg.matrix_power(self.moves, 2000)[0]

    def text(self, num_documents: int, *, seed: int) -> str:
        """Documents, a blank line between them."""
        rng = random.Random(seed)
        moves = {state: (list(some), list(some.values())) for state, some in self.move.items()}
        emits = {state: (list(some), list(some.values())) for state, some in self.emit.items()}
        documents, words, state = list[str](), list[str](), END
        while len(documents) < num_documents:
            next_states, chances = moves[state]
            state = rng.choices(next_states, chances)[0]
            some, chances = emits[state]
            word = rng.choices(some, chances)[0]
            if state == END:
                documents.append(" ".join(words))
                words = []
            else:
                words.append(word)
        return "\n\n".join(documents) + "\n"

    def best_loss(self, input_ids: np.ndarray, masked_positions: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Sum of −log P(target | row), and the number of targets, for a row [T] masked exactly as by default.

        Without padding. Forward–backward over (state, places selected so far): of a row c places are selected, each set
        of that size equally likely, and a place that shows a word may have been selected and kept (0.1) or replaced
        (0.1). Costs about T · c · S² operations.
        """
        used = targets != IGNORED
        masked_positions, targets = masked_positions[used], targets[used]
        row = input_ids[1:-1]
        c, n, s = len(targets), len(row), len(self.states)
        plain, chosen = np.zeros((n, s)), np.zeros((n, s))  # P(shown | state) if not selected, if selected
        shown = np.zeros((n, len(self.vocabulary)))  # P(shown | word, selected)
        for i, token in enumerate(row):
            if token == MASK:
                shown[i, len(SPECIALS) :] = 0.8
            elif token != SEP:
                shown[i, len(SPECIALS) :] = 0.1 / self.pool
                shown[i, token] += 0.1
            chosen[i] = self.emits @ shown[i]
            if token != MASK:
                plain[i] = self.emits[:, token]
        forward = np.zeros((n + 1, c + 1, s))  # before place i, by number selected, over the state of place i
        forward[0, 0] = self.stationary
        for i in range(n):
            here = forward[i] * plain[i]
            here[1:] += forward[i, :-1] * chosen[i]
            forward[i + 1] = here @ self.moves
            forward[i + 1] /= forward[i + 1].sum()
        backward = np.zeros((n + 1, c + 1, s))  # of what follows place i - 1, by number still to select, over its state
        backward[n, 0] = 1.0
        for i in range(n - 1, -1, -1):
            step = backward[i + 1] * plain[i]
            step[1:] += backward[i + 1, :-1] * chosen[i]
            backward[i] = step @ self.moves.T if i else step
            backward[i] /= backward[i].sum()
        total = 0.0
        for position, target in zip(masked_positions, targets, strict=True):
            i = position - 1
            reach = np.einsum("js,js->s", forward[i, :c], backward[i + 1, c - 1 :: -1][:c])  # one selected here
            words = (reach @ self.emits) * shown[i]
            total -= math.log(words[target] / words.sum())
        return total, c
