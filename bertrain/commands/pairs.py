"""Minimal pairs: how often a masked language model prefers the good sentence of a pair over the bad one.

    bertrain evaluate --checkpoint run/ --pairs blimp.jsonl.gz

docs/tasks.md describes the file and the scores.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm

import bertdata
from bertdata.support import TOKENIZER, LoadedTokenizer, TokenizerError, UsageError, continuing, counted, load_tokenizer
from bertrain.commands import reading
from bertrain.models.encoder import PLACES, Encoder
from bertrain.ranks import World

SCORES = ("word-l2r", "sum", "mean")
SENTENCES = (("good", "bad"), ("sentence_good", "sentence_bad"))  # names of the two sentences in files
GROUPS = {"field": ("field",), "phenomenon": ("phenomenon", "linguistics_term"), "paradigm": ("paradigm", "UID")}
"""Kind of group in results → its possible names in files."""
MOST_SHOWN = 20  # groups of one kind in a printed table
SEED = 0


class Pair(NamedTuple):
    """A minimal pair in a file of --pairs."""

    line: int  # line number in the file, from 1
    good: str
    bad: str
    groups: dict[str, str]  # name in GROUPS → group, for the groups in the file


def read(path: str, most: int | None = None) -> list[Pair]:
    """Return the pairs in a file of JSON lines, which may be compressed. most: only the first of a fixed random order.

    Raises UsageError, which names the file and the line, for a file that cannot be read and an invalid pair.
    """
    pairs = []
    for number, line in enumerate(reading.text(path, "pairs").split("\n"), 1):
        if not line.strip():
            continue
        row = reading.parsed(line, path, number, advice="give one JSON object in each line", halves=True)
        row = row if isinstance(row, dict) else {}
        sentences = next(([row[good], row[bad]] for good, bad in SENTENCES if good in row and bad in row), [])
        if not sentences or not all(isinstance(sentence, str) and sentence.strip() for sentence in sentences):
            example = '{"good": "She sleeps.", "bad": "She sleep."}'
            sentence = f"{path}, line {number} has no good and bad sentence; give a JSON object such as {example}"
            raise UsageError(sentence, "bad-row")
        values = {kind: next((row[name] for name in names if name in row), None) for kind, names in GROUPS.items()}
        groups = {kind: str(value) for kind, value in values.items() if value is not None}
        reading.refuse_halves(json.dumps([*groups.values()]), path, number)  # groups are printed
        pairs.append(Pair(number, sentences[0], sentences[1], groups))
    if not pairs:
        sentence = f"{path} holds no pairs; give JSON lines, each with a good and a bad sentence"
        raise UsageError(sentence, "empty", option="pairs", given=path)
    if most is not None and most < len(pairs):
        order = sorted(range(len(pairs)), key=lambda number: bertdata.key(SEED, "pairs", number))
        pairs = [pairs[number] for number in sorted(order[:most])]
    return pairs


def tokenizer_of(directory: Path, encoder: Encoder) -> LoadedTokenizer:
    """Return the tokenizer of a checkpoint. Raises UsageError if it is missing, or does not fit the model."""
    try:
        tokenizer = load_tokenizer(str(directory))
    except TokenizerError as error:
        sentence = f"--pairs needs the tokenizer of the checkpoint: {error}; put its {TOKENIZER} there"
        raise UsageError(sentence, "tokenizer-unreadable", option="checkpoint", given=str(directory)) from None
    special, size = tokenizer.special, encoder.model.config.vocab_size
    if None in (special.cls, special.sep, special.mask) or special.vocab_size > size:
        sentence = (
            f"the tokenizer of {directory} has no [CLS], [SEP] or [MASK], or more than the {size:,} tokens of the "
            "model; give a checkpoint with the tokenizer that it was trained with"
        )
        raise UsageError(sentence, "tokenizer-differs", option="checkpoint", given=str(directory))
    return tokenizer


def encode(
    pairs: Sequence[Pair], tokenizer: LoadedTokenizer, *, path: str, most: int
) -> list[tuple[list[int], list[int]]]:
    """Return the ids of the good and the bad sentence of each pair: [CLS] … [SEP], as in rows of one document.

    path: the file, for messages. Raises UsageError for a sentence of more than `most` tokens, or without a token.
    """
    sentences = (sentence for pair in pairs for sentence in (pair.good, pair.bad))
    texts = [sentence.encode(errors="replace") for sentence in sentences]  # JSON may contain half of a surrogate pair
    offsets = torch.tensor([0, *(len(text) + 1 for text in texts)]).cumsum(0).numpy()
    encoded = tokenizer.encode(b"\n".join([*texts, b""]), offsets, sentences=False)
    ids, ends = encoded.ids.tolist(), encoded.documents.tolist()
    cls = tokenizer.special.cls  # ids already end in [SEP], as each document does
    rows = [[cls, *ids[start:stop]] for start, stop in itertools.pairwise(ends)]
    for number, row in enumerate(rows):
        line = pairs[number // 2].line
        if not 2 < len(row) <= most:
            sentence = f"{path}, line {line}: a sentence has {len(row) - 2} tokens; the model takes 1 to {most - 2}"
            raise UsageError(f"{sentence}, so remove the pair", "bad-row")
    return list(zip(rows[::2], rows[1::2], strict=True))


@torch.no_grad()
def log_likelihoods(
    encoder: Encoder,
    rows: Sequence[Sequence[int]],
    tokenizer: LoadedTokenizer,
    ranks: World,
    *,
    score: str,
) -> list[float]:
    """Return the pseudo-log-likelihood of each row, in nats: the sum of log p(token | row with masks) over its tokens.

    rows: ids, [CLS] first and [SEP] last, which are not scored. score "sum" (Salazar et al., 2020) masks only the
    token, and "mean" divides that by the number of tokens; "word-l2r" (Kauf and Ivanova, 2023) also masks the tokens to
    its right that belong to the same word. All ranks must call it: each scores a part, and all get the same result.

    A row of n ids uses n - 2 rows in the forward pass. Batches contain rows of one length, without padding, which is
    exact for every family of models, and the fastest.
    """
    encoder.eval()
    device, special = ranks.device, tokenizer.special
    content = json.loads(tokenizer.files[TOKENIZER])
    continues = torch.tensor(continuing(content, special.vocab_size, rule=1), device=device)
    assert special.mask is not None  # noqa: S101  (tokenizer_of refuses a tokenizer without it)
    is_special = torch.zeros_like(continues)
    is_special[list(special.special_ids)] = True
    sums = torch.zeros(len(rows), dtype=torch.float64, device=device)
    mine = sorted(range(len(rows)), key=lambda number: len(rows[number]))[ranks.rank :: ranks.world_size]
    total, hidden = sum(len(rows[number]) - 2 for number in mine), None if ranks.rank == 0 else True
    with tqdm(total=total, unit="token", unit_scale=True, leave=False, disable=hidden) as bar:
        for length, same in itertools.groupby(mine, lambda number: len(rows[number])):
            numbers = list(same)
            ids = torch.tensor([rows[number] for number in numbers], device=device)
            of_rows, positions = torch.tensor(numbers, device=device), torch.arange(length, device=device)
            words = positions.expand_as(ids)  # the word number of each token
            if score == "word-l2r":
                inside = continues[ids] & ~is_special[ids]
                inside[:, 1:] &= ~is_special[ids[:, :-1]]
                words = (~inside).cumsum(1)
            for variants in torch.arange(len(numbers) * (length - 2), device=device).split(max(1, PLACES // length)):
                row, position = variants // (length - 2), 1 + variants % (length - 2)
                masked = (words[row] == words[row, position].unsqueeze(1)) & (positions >= position.unsqueeze(1))
                logits = encoder.logits(
                    input_ids=ids[row].masked_fill(masked, special.mask), masked_positions=position.unsqueeze(1)
                )
                losses = F.cross_entropy(logits.squeeze(1).float(), ids[row, position], reduction="none")
                sums.index_add_(0, of_rows[row], -losses.double())
                bar.update(variants.numel())
    totals = ranks.sum(sums).tolist()
    sizes = [len(row) - 2 if score == "mean" else 1 for row in rows]
    return [total / size for total, size in zip(totals, sizes, strict=True)]


def evaluate(
    encoder: Encoder,
    pairs: Sequence[Pair],
    rows: Sequence[tuple[list[int], list[int]]],
    tokenizer: LoadedTokenizer,
    ranks: World,
    *,
    score: str,
) -> dict[str, Any]:
    """Return the accuracy over all pairs and over each group. A pair with equal scores counts one half.

    rows: the result of `encode`. Sentences with the same ids are scored once, so their scores are equal.
    """
    numbers: dict[tuple[int, ...], int] = {}
    numbers_of_pairs = [[numbers.setdefault(tuple(row), len(numbers)) for row in pair] for pair in rows]
    scores = log_likelihoods(encoder, list(numbers), tokenizer, ranks, score=score)
    gains = [scores[good] - scores[bad] for good, bad in numbers_of_pairs]
    right = [1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gains]
    by: dict[str, dict[str, Any]] = {}
    for kind in GROUPS:
        groups: dict[str, list[float]] = {}
        for pair, value in zip(pairs, right, strict=True):
            if kind in pair.groups:
                groups.setdefault(pair.groups[kind], []).append(value)
        if groups:
            by[kind] = {name: _accuracy(groups[name]) for name in sorted(groups)}
    return {"score": score, **_accuracy(right), "ties": right.count(0.5), "by": by}


def _accuracy(right: Sequence[float]) -> dict[str, Any]:
    mean = math.fsum(right) / len(right)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in right)) / len(right)
    return {"accuracy": mean, "standard_error": error, "pairs": len(right)}


def text(result: dict[str, Any], directory: Path, path: str) -> str:
    """Return the result as text."""
    parts = {"all": result}
    for kind, groups in result["by"].items():
        if len(groups) <= MOST_SHOWN:
            parts |= {f"{kind} {name}": part for name, part in groups.items()}
    lines = [f"{directory}: minimal pairs of {path}, score {result['score']}"]
    lines += [f"  {'':<44}{'pairs':>9}{'accuracy':>11}{'± s.e.':>9}"]
    lines += [
        f"  {name:<44}{part['pairs']:>9,}{part['accuracy']:>11.2%}{part['standard_error']:>9.2%}"
        for name, part in parts.items()
    ]
    lines += [f"  {len(by)} groups by {kind}: --json" for kind, by in result["by"].items() if len(by) > MOST_SHOWN]
    if result["ties"]:
        lines.append(f"  {counted(result['ties'], 'pair')} of equal scores, which count half")
    return "\n".join(lines)
