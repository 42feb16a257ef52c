"""The measures of tasks, from 0 to 1 (correlations from −1), computed as in the standard programs."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]|[^\s\u3400-\u9fff\uf900-\ufaff]+")


def classification(predicted: np.ndarray, labels: np.ndarray, num_labels: int, positive: int = 1) -> dict[str, float]:
    """Return accuracy, f1 and mcc. f1: of the positive label if there are two, else the mean over labels that occur.

    F1 of a label that never occurs is 0, and so is Matthews' correlation of a constant (Gorodkin, 2004).
    """
    table = np.zeros((num_labels, num_labels))
    np.add.at(table, (labels, predicted), 1)
    right, of_label, of_prediction = np.diag(table), table.sum(1), table.sum(0)
    either = of_label + of_prediction
    f1 = 2 * right / np.maximum(either, 1)
    n, trace = table.sum(), right.sum()
    covariance = trace * n - of_label @ of_prediction
    spread = (n**2 - of_label @ of_label) * (n**2 - of_prediction @ of_prediction)
    return {
        "accuracy": float(trace / n),
        "f1": float(f1[positive] if num_labels == 2 else f1[either > 0].mean()),
        "mcc": float(covariance / spread**0.5) if spread else 0.0,
    }


def multilabel(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return micro_f1, macro_f1 (0 for labels that never occur) and accuracy of complete rows. Bool [N, L] each."""
    both, either = (predicted & labels).sum(0), predicted.sum(0) + labels.sum(0)
    return {
        "micro_f1": float(2 * both.sum() / max(1, either.sum())),
        "macro_f1": float((2 * both / np.maximum(either, 1)).mean()),
        "accuracy": float((predicted == labels).all(1).mean()),
    }


def regression(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return pearson and spearman; 0 if one side is constant."""
    return {"pearson": _correlation(predicted, labels), "spearman": _correlation(_ranks(predicted), _ranks(labels))}


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64) - a.mean(dtype=np.float64), b.astype(np.float64) - b.mean(dtype=np.float64)
    size = (a @ a) * (b @ b)
    return float(a @ b / size**0.5) if size > 0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values get the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[which]


# ----------------------------------------------------------------------------------------------------------- entities


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return the entities (first word, word after the last, kind) in the tags of a sentence, as in conlleval.

    Tags are O, or a letter of B I E S and a kind: "B-PER". An I or E that continues no entity of its kind begins one.
    """
    complete, first, before = set(), 0, ("O", "")
    for place, tag in enumerate([*tags, "O"]):
        letter, _, kind = tag.partition("-")
        goes_on = letter in ("I", "E") and before[0] in ("B", "I") and before[1] == kind
        if before[0] != "O" and not goes_on:
            complete.add((first, place, before[1]))
        if not goes_on:
            first = place
        before = (letter, kind)
    return complete


def entity_f1(predicted: Sequence[Sequence[str]], tags: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return entity_f1, precision and recall over all entities (Tjong Kim Sang and De Meulder, 2003)."""
    num_right = num_predicted = num_gold = 0
    for mine, theirs in zip(map(entities, predicted), map(entities, tags), strict=True):
        num_right += len(mine & theirs)
        num_predicted, num_gold = num_predicted + len(mine), num_gold + len(theirs)
    return {
        "entity_f1": 2 * num_right / max(1, num_predicted + num_gold),
        "precision": num_right / max(1, num_predicted),
        "recall": num_right / max(1, num_gold),
    }


# ------------------------------------------------------------------------------------------------------------ answers


def _words(answer: str) -> list[str]:
    """Return the words of an answer as in SQuAD: lower case, no punctuation or articles; each Han character is one."""
    return _WORD.findall(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)))


def answer(predicted: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1 of an answer, the best over the references; without any, "" is right (SQuAD v2)."""
    mine, best = _words(predicted), (0.0, 0.0)
    for theirs in map(_words, answers or [""]):
        same = sum((collections.Counter(mine) & collections.Counter(theirs)).values())
        f1 = 2 * same / (len(mine) + len(theirs)) if mine and theirs else float(mine == theirs)
        best = max(best[0], float(mine == theirs)), max(best[1], f1)
    return best
