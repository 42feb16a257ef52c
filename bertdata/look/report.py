"""The page of `bertdata inspect --html`: one file about a dataset, which needs no network.

    dataset ──► numbers (facts, tokens, rows, samples) ──► JSON inside a page ──► a browser draws it

The JSON has all that the page shows. report.html has its sections, page.html the style and the functions that draw.
"""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import MASKING_POLICIES
from bertdata.errors import counted
from bertdata.format.dataset import Dataset
from bertdata.look import facts, page
from bertdata.read.loader import Loader
from bertdata.read.pieces import borders, packed, pieces_of
from bertdata.tokenize.load import load
from bertdata.tokenize.spelling import spelled
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertdata.types import Masking

_COUNTED_TOKENS = 1 << 30  # in larger datasets, about this many evenly spaced tokens are counted
_PACKED_TOKENS = 1 << 22  # to compute the shares of padding
_ROW_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FREQUENT, _RANKS = 100, 60  # tokens that are listed, points of the curve of ranks
_SAMPLES, _EPOCHS, _SEEDS = 8, 3, 2  # that the page shows
_PLACES = 512  # shown of a row, to limit the size of the page
_WORD = 100  # characters shown of a word or a token
_FEW_STEPS = 1000
_TOKENIZER = ("name", "kind", "vocab_size", "special_tokens")  # facts that the page shows


def report(
    dataset: Dataset,
    *,
    length: int,
    global_batch_size: int,
    world_size: int,
    samples: str = "windows",
) -> str:
    """Return the page as HTML of less than 2 MB. This reads at most about 2**30 tokens.

    The arguments are those of `facts.facts`. The samples on the page also have this length.
    """
    about = facts.facts(
        dataset, length=length, global_batch_size=global_batch_size, world_size=world_size, samples=samples
    )
    tokenizer, sizes = load(str(dataset.path)), _sizes(dataset)
    share = min(1.0, _COUNTED_TOKENS / dataset.num_tokens)
    most = {name: int(share * split.num_tokens) + 1 for name, split in dataset.splits.items()}
    counts = np.sum([dataset.token_counts(name, sample_tokens=number) for name, number in most.items()], axis=0)
    unk = dataset.special_tokens.unk
    has_rows = dataset.special_tokens.cls is not None and dataset.special_tokens.sep is not None
    has_sentences = all(split.stores("sentences") for split in dataset.splits.values())
    data: dict[str, Any] = {
        "about": about,
        "flow": _flow(about),
        "lengths": {
            "documents": about["tokens_per_document"]["histogram"],
            "sentences": facts.histogram(*facts.lengths_of(dataset, "sentences")) if has_sentences else None,
        },
        "tokens": _tokens(dataset, tokenizer, counts),
        "rows": [_rows(sizes, each) for each in _ROW_LENGTHS],
        "unknown": 0 if unk in (None, dataset.special_tokens.separator) else int(counts[unk]),
        "samples": _samples(dataset, tokenizer, length=length, samples=samples) if has_rows else None,
    }
    data["warnings"] = _warnings(data)
    about["tokenizer"] = {name: about["tokenizer"][name] for name in _TOKENIZER}
    body = resources.files("bertdata.look").joinpath("report.html").read_text(encoding="utf-8")
    return page.assemble_page(f"{dataset.path}: dataset", body, data)


def _flow(about: dict[str, Any]) -> dict[str, Any]:
    """Return how many documents were read, left out and stored in each split.

    text: what was read, skipped, replaced or kept.
    """
    counts = about["counts"]
    left_out = {
        "removed by --map": counts.get("removed_documents", 0),
        "duplicates": counts.get("duplicate_documents", 0),
        "without a token": counts.get("dropped_documents", 0),
    }
    splits = {name: split["documents"] for name, split in about["splits"].items()}
    return {
        "read": sum(splits.values()) + sum(left_out.values()),
        "left_out": left_out,
        "splits": splits,
        "text": [f"{name}: {sentence}" for name, sentence in facts.text_events(about)],
    }


def _tokens(dataset: Dataset, tokenizer: LoadedTokenizer, counts: NDArray[np.int64]) -> dict[str, Any]:
    """Return the most frequent tokens, the frequency by rank, and the used share of the vocabulary."""
    special = set(dataset.special_tokens.special_ids)
    order = np.argsort(-counts, kind="stable")
    used = int((counts > 0).sum())
    token_of = spelled(tokenizer)
    ranks = np.unique(np.geomspace(1, max(1, used), _RANKS).astype(np.int64))
    return {
        "counted": int(counts.sum()),
        "vocab_size": counts.size,
        "used": used,
        "once": int((counts == 1).sum()),
        "frequent": [
            {"token": token_of(token)[:_WORD], "count": int(counts[token]), "special": token in special}
            for token in order[: min(_FREQUENT, used)].tolist()
        ],
        "ranks": [[rank, int(counts[order[rank - 1]])] for rank in ranks.tolist()],
    }


def _rows(sizes: NDArray[np.int64], length: int) -> dict[str, float]:
    """Return the shares of padding in rows of a length, with one document a row and with packed documents.

    sizes int64 [n]: tokens of documents.
    """
    document, before, lengths = pieces_of(sizes, length - 2)
    places, starts = lengths + 2, (np.cumsum(sizes) - sizes)[document] + before
    num_rows = sum(packed(some, length)[0] for some in np.split(places, borders(starts)))
    filled = float(places.sum()) / length
    return {"length": length, "documents": 1 - filled / places.size, "packed": 1 - filled / num_rows}


def _sizes(dataset: Dataset) -> NDArray[np.int64]:
    """Return the tokens of the first documents of a split, int64 [n], without separators."""
    split, sizes = next(iter(dataset.splits.values())), list[NDArray[Any]]()
    for shard, first in zip(split, split.first_tokens.tolist(), strict=False):
        if first < _PACKED_TOKENS:
            offsets = dataset.array(shard.name, "documents")
            last = max(1, int(np.searchsorted(offsets, _PACKED_TOKENS - first)))
            sizes.append(np.diff(offsets[: last + 1].astype(np.int64)))
    return np.concatenate(sizes) - int(dataset.special_tokens.separator is not None)


def _samples(dataset: Dataset, tokenizer: LoadedTokenizer, *, length: int, samples: str) -> dict[str, Any]:
    """Return rows of some positions, epochs and seeds, and the masks of each policy.

    spellings: id → token. rows[seed][epoch][position]: ids; for each policy a list of (token position, masked id). Only
    the first 512 tokens of a row.
    """
    has_masks = dataset.special_tokens.mask is not None
    split = next(name for name, each in dataset.splits.items() if samples != "pairs" or each.has_pairs)
    rows: list[Any] = []
    tokens = set[int]()
    for seed in range(_SEEDS):
        common: dict[str, Any] = {"split": split, "length": length, "seed": seed, "samples": samples}
        plain = Loader(dataset, masking=None, **common)
        masked = {
            policy: Loader(dataset, masking=Masking(policy=policy), **common) for policy in MASKING_POLICIES * has_masks
        }
        rows.append([])
        for epoch in range(_EPOCHS):
            positions = epoch * plain.num_samples + np.arange(min(_SAMPLES, plain.num_samples))
            batch, rows_of_epoch = plain.read(positions), []
            hidden = {policy: loader.read(positions) for policy, loader in masked.items()}
            chosen = {policy: seen.labels[:, :_PLACES] >= 0 for policy, seen in hidden.items()}
            filled = np.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
            for row, size in enumerate(filled[:, :_PLACES].sum(1).tolist()):
                ids, masks = batch.input_ids[row, :size].tolist(), {}
                for policy, seen in hidden.items():
                    places = np.flatnonzero(chosen[policy][row])
                    masks[policy] = np.stack([places, seen.input_ids[row, places]], 1).tolist()
                    tokens.update(seen.input_ids[row, places].tolist())
                tokens.update(ids)
                rows_of_epoch.append({"ids": ids, "masks": masks})
            rows[seed].append(rows_of_epoch)
    token_of = spelled(tokenizer)
    return {
        "split": split,
        "kind": samples,
        "length": length,
        "shown": min(length, _PLACES),
        "mask": dataset.special_tokens.mask,
        "special": list(dataset.special_tokens.special_ids),
        "policies": list(MASKING_POLICIES) if has_masks else [],
        "spellings": {token: token_of(token)[:_WORD] for token in sorted(tokens)},
        "rows": rows,
    }


def _warnings(data: dict[str, Any]) -> list[str]:
    """Return warnings for a user before training, one sentence each."""
    about, tokens, unknown, flow = data["about"], data["tokens"], data["unknown"], data["flow"]
    splits, counts = about["splits"], about["counts"]
    counted_tokens, num_steps = tokens["counted"], math.ceil(splits.get("train", {}).get("steps_per_epoch", _FEW_STEPS))
    held_out = splits.get("validation", {}).get("documents", 0)
    replaced, skipped = counts.get("replaced_characters", 0), counts.get("skipped_rows", 0)
    literals = sum(counts.get("special_literals", {}).values())
    warnings = [
        (
            data["samples"] is None,
            "The tokenizer has no [CLS] or no [SEP], so a model cannot be trained on rows of this dataset; make it "
            "again with --special-tokens, which adds them.",
        ),
        (
            unknown > 0.001 * counted_tokens,
            f"{unknown / counted_tokens:.2%} of the tokens counted are the unknown token; a tokenizer that fits the "
            "text loses less.",
        ),
        (
            tokens["used"] < 0.5 * tokens["vocab_size"],
            f"Only {tokens['used']:,} of {tokens['vocab_size']:,} ids occur in the {counted_tokens:,} tokens counted; "
            "a smaller vocabulary makes a smaller model.",
        ),
        (held_out == 0, "There is no validation split, so a run is not evaluated; build with --validation 0.01."),
        (0 < held_out < 20, f"The validation split has {counted(held_out, 'document')}, so its loss says little."),
        (replaced, f"{replaced:,} invalid sequences were replaced; if the text is not UTF-8, give its --encoding."),
        (skipped, f"The build skipped {counted(skipped, 'row')} that cannot be used."),
        (literals, f"The text spells special tokens {counted(literals, 'time')}; they were kept as ordinary text."),
        (
            num_steps < _FEW_STEPS,
            f"An epoch has {counted(num_steps, 'step')} of {about['steps_for']['global_batch_size']} rows, so a long "
            "run reads the text many times.",
        ),
    ]
    warnings += [
        (number > 0.1 * flow["read"], f"{number / flow['read']:.0%} of the documents were left out: {name}.")
        for name, number in flow["left_out"].items()
    ]
    return [sentence for holds, sentence in warnings if holds]
