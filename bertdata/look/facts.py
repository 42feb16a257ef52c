"""The facts of `bertdata inspect`, as a JSON-serializable object, as text, and as one page of HTML.

The page needs no network and no other file. All its data is in its JSON: report.html has its sections, page.html the
style and the drawing functions.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import MASKING_POLICIES
from bertdata.errors import DatasetError, TokenizerError, counted, damaged
from bertdata.format.dataset import Dataset
from bertdata.look.page import assemble_page
from bertdata.read.loader import Loader
from bertdata.read.pieces import borders, packed, pieces_of
from bertdata.tokenize.forms import flat
from bertdata.tokenize.load import load
from bertdata.tokenize.models import kind_of
from bertdata.tokenize.spelling import spelled
from bertdata.tokenize.tokenizer import TOKENIZER, LoadedTokenizer
from bertdata.types import Masking

_BAR = 40  # columns of the longest bar of the histogram
_SHARES = {
    "pad_share": "of the positions padding",
    "crop_share": "of the text cut off",
    "random_share": "of the pairs random",
}
_COUNTED_TOKENS = 1 << 30  # in larger datasets, count about this many evenly spaced tokens
_PACKED_TOKENS = 1 << 22  # tokens of documents for the estimates of padding and packing
_ROW_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FREQUENT, _RANKS = 100, 60  # tokens in the list, points of the curve of ranks
_SAMPLES, _EPOCHS, _SEEDS = 8, 3, 2  # numbers of choices on the page
_PLACES = 512  # tokens shown of a row, to limit the size of the page
_WORD = 100  # characters shown of a word or a token
_FEW_STEPS = 1000
_TOKENIZER = ("name", "kind", "vocab_size", "special_tokens")  # facts about the tokenizer on the page


def facts(
    dataset: Dataset, *, length: int, global_batch_size: int, world_size: int, samples: str = "windows"
) -> dict[str, Any]:
    """Return all facts about a dataset. Reads its tokenizer and the offsets of documents, but no tokens.

    samples, length, global_batch_size, world_size: determine the numbers of samples and steps, and the rows of a step
    on the rank with most rows. Makes the index of the samples, if needed.
    """
    manifest, special = dataset.manifest, dataset.special_tokens
    splits: dict[str, Any] = {}
    for name, split in dataset.splits.items():
        num_samples, shares = _samples_of(dataset, name, samples, length)
        splits[name] = {
            "shards": len(split),
            "documents": split.num_documents,
            "sentences": _sum_or_none([shard.num_sentences for shard in split]),
            "tokens": split.num_tokens,
            "samples_per_epoch": num_samples,
            "steps_per_epoch": num_samples / global_batch_size,
            **shares,
        }
    return {
        "path": str(dataset.path),
        "dataset_id": dataset.dataset_id,
        "documents": dataset.num_documents,
        "sentences": _sum_or_none([split["sentences"] for split in splits.values()]),
        "tokens": dataset.num_tokens,
        "token_dtype": {"<u2": "uint16", "<u4": "uint32"}[manifest.token_dtype],
        "bytes": manifest.num_bytes,
        "tokenizer": {
            "name": manifest.tokenizer_name,
            "path": str(dataset.path / TOKENIZER),
            **_kind_and_engine(dataset),
            "vocab_size": special.vocab_size,
            "special_tokens": special.roles(),
            "separator_id": special.separator,
            "files": dict(manifest.tokenizer),
        },
        "splits": splits,
        "steps_for": {
            "samples": samples,
            "length": length,
            "global_batch_size": global_batch_size,
            "world_size": world_size,
            "rows_of_a_rank": -(-global_batch_size // world_size),
        },
        "tokens_per_document": _tokens_per_document(dataset),
        "settings": dict(manifest.settings),
        "counts": dict(manifest.counts),
    }


def _samples_of(dataset: Dataset, name: str, samples: str, length: int) -> tuple[int, dict[str, float]]:
    """Return the samples of an epoch of a split, 0 if only other splits have pairs, and `Loader.facts`, rounded."""
    split = dataset.splits[name]
    if samples == "windows":
        return -(-split.num_tokens // (length - 2)), {}
    if samples == "pairs" and not split.has_pairs and any(each.has_pairs for each in dataset.splits.values()):
        return 0, {}
    loader = Loader(dataset, split=name, length=length, samples=samples, masking=None)
    return loader.num_samples, {share: round(x, 4) for share, x in loader.facts.items()}


def _kind_and_engine(dataset: Dataset) -> dict[str, Any]:
    """Return the parts of the dataset's tokenizer, and its engine or the reason why there is none.

    Values are None if the tokenizer cannot be loaded; `fault` is the reason.
    """
    try:
        content = dataset.tokenizer_file(TOKENIZER)
        engine = load(str(dataset.path)).engine
    except (DatasetError, TokenizerError) as error:
        return {"kind": None, "engine": None, "engine_refusal": None, "fault": str(error)}
    return {
        "kind": ", ".join(_steps(json.loads(content))),
        "engine": engine.name,
        "engine_refusal": engine.refusal,
    }


def _steps(content: dict[str, Any]) -> list[str]:
    """Return the model, normalizers and pre-tokenizers of a tokenizer, by their names. content: its JSON."""
    steps = flat(content.get("normalizer"), "normalizers") + flat(content.get("pre_tokenizer"), "pretokenizers")
    names = {"ByteLevel": "byte-level", "BertPreTokenizer": ""}
    named = [kind_of(content["model"])]
    for step in steps:
        name = step["type"]
        if name == "BertNormalizer":
            name = "lower-case" if step.get("lowercase") else "cased"
        named.append(names.get(name, name))
    return [name for name in dict.fromkeys(named) if name]


def _sum_or_none(values: list[Any]) -> int | None:
    return None if any(value is None for value in values) else sum(values)


def lengths_of(dataset: Dataset, array: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct lengths of documents or sentences in tokens, ascending, and the count of each.

    Lengths exclude separators. array: "documents" or "sentences".
    """
    has_separator, count_of = dataset.special_tokens.separator is not None, Counter[int]()
    for shard in dataset.manifest.shards:  # one at a time, to keep only distinct lengths in memory
        starts = dataset.array(shard.name, array)
        ends_document = array == "documents" or np.isin(starts[1:], dataset.array(shard.name, "documents"))
        found = np.unique(np.diff(starts.astype(np.int64)) - (has_separator & ends_document), return_counts=True)
        count_of.update(dict(zip(*(each.tolist() for each in found), strict=True)))
    lengths, counts = np.array(sorted(count_of.items())).T
    return lengths, counts


def histogram(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> list[dict[str, int]]:
    """Return a histogram whose bins are powers of two."""
    bins = np.bincount(np.log2(np.maximum(lengths, 1)).astype(np.int64), counts).astype(np.int64)
    return [{"from": 1 << k, "to": (2 << k) - 1, "documents": int(n)} for k, n in enumerate(bins) if n]


def _tokens_per_document(dataset: Dataset) -> dict[str, Any]:
    lengths, counts = lengths_of(dataset, "documents")
    if lengths[0] < 1:
        raise damaged(dataset.path)
    num = int(counts.sum())
    places = [math.floor((num - 1) * share) for share in (0.05, 0.5, 0.95)]
    p5, median, p95 = lengths[np.searchsorted(np.cumsum(counts), places, side="right")].tolist()
    mean = round(int(lengths @ counts) / num, 2)
    spread = {"min": int(lengths[0]), "p5": p5, "median": median, "p95": p95, "max": int(lengths[-1]), "mean": mean}
    return {**spread, "histogram": histogram(lengths, counts)}


def _engine(tokenizer: dict[str, Any]) -> str:
    if tokenizer["engine"]:
        return str(tokenizer["engine"])
    if tokenizer["engine_refusal"]:
        return f"none, because {tokenizer['engine_refusal']}; `tokenizers` encodes text"
    return f"not known: {tokenizer['fault']}"


def text(about: dict[str, Any]) -> str:
    """Return the facts as text for a terminal, 100 columns wide."""
    tokenizer, steps, spread = about["tokenizer"], about["steps_for"], about["tokens_per_document"]
    specials = " ".join(f"{role}={token}" for role, token in tokenizer["special_tokens"].items())
    ranks = f": at most {steps['rows_of_a_rank']} on one of {steps['world_size']} ranks" * (steps["world_size"] > 1)
    lines = [
        f"{about['path']}",
        f"  dataset_id   {about['dataset_id']}",
        f"  documents    {about['documents']:,}",
        f"  sentences    {'not stored' if about['sentences'] is None else format(about['sentences'], ',')}",
        f"  tokens       {about['tokens']:,} {about['token_dtype']}, separators included",
        f"  size         {about['bytes']:,} bytes, {about['bytes'] / about['tokens']:.2f} a token",
        f"  tokenizer    {': '.join(filter(None, (tokenizer['name'], tokenizer['kind'] or 'of an unknown kind')))}",
        f"               {tokenizer['vocab_size']:,} ids, {specials or 'no special tokens'}",
        f"               {tokenizer['path']}, SHA-256 {tokenizer['files'].get(TOKENIZER, '?')}",
        f"  engine       {_engine(tokenizer)}",
        "",
        f"  split        shards    documents        tokens   samples of {steps['length']}   steps an epoch "
        f"(batch {steps['global_batch_size']}{ranks})",
    ]
    for name, split in about["splits"].items():
        lines.append(
            f"  {name:<12}{split['shards']:>7}{split['documents']:>13,}{split['tokens']:>14,}"
            f"{split['samples_per_epoch']:>15,}{split['steps_per_epoch']:>17,.1f}"
        )
    for name, split in about["splits"].items():
        shares = [f"{split[share]:.2%} {what}" for share, what in _SHARES.items() if share in split]
        if shares:
            lines.append(f"  {name}: {steps['samples']}, {', '.join(shares)}")
    lines += [
        "",
        f"  tokens per document: min {spread['min']:,}, median {spread['median']:,}, mean {spread['mean']:,}, "
        f"max {spread['max']:,}",
    ]
    largest = max(entry["documents"] for entry in spread["histogram"])
    for entry in spread["histogram"]:
        bar = "█" * math.ceil(_BAR * entry["documents"] / largest)
        lines.append(f"  {entry['from']:>12,} to {entry['to']:<12,}{entry['documents']:>12,}  {bar}")
    events = (f"  {name:<13}{sentence}" for name, sentence in text_events(about))
    return "\n".join([*lines, "", *events])


_EVENTS = (  # name, count of the manifest, noun, description
    ("dropped", "dropped_documents", "document", "without a token"),
    ("dropped", "empty_sentences", "sentence", "without an id"),
    ("dropped", "skipped_rows", "bad row", "that cannot be used"),
    ("removed", "removed_documents", "document", "by --map"),
    ("duplicates", "duplicate_documents", "document", "whose text came before, left out"),
    ("replaced", "replaced_characters", "invalid sequence", "by U+FFFD"),
    ("replaced", "special_ids_replaced", "special id", "by the unknown id"),
)


def text_events(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each kind of item that a build or an import read, skipped, replaced or kept."""
    counts, source = about["counts"], about["settings"].get("imported")  # other programs may write fewer counts
    num_read = counted(about["documents"] + counts.get("dropped_documents", 0), "document")
    if source:
        yield "imported", f"{source}: {counts.get('ids_bytes', 0):,} bytes of ids in {num_read}"
    else:
        yield "text read", f"{counts.get('text_bytes', 0):,} bytes in {num_read}"
    if words := counts.get("words"):
        yield "words", f"{', '.join(f'{number:,} in {split}' for split, number in words.items())}, by white space"
    for name, key, noun, what in _EVENTS:
        if number := counts.get(key):
            yield name, f"{counted(number, noun)} {what}"
    for name, key in (("kept as text", "special_literals"), ("inside", "special_ids_inside")):
        if tokens := counts.get(key):
            yield name, times(tokens)


def times(tokens: Mapping[str, int]) -> str:
    """Return the text of tokens with their counts."""
    return ", ".join(f"{token} {counted(count, 'time')}" for token, count in tokens.items())


# ---------------------------------------------------------------------------------------------------------- the page


def report(dataset: Dataset, *, length: int, samples: str = "windows", **steps: int) -> str:
    """Return the page as HTML of less than 2 MB. Reads at most about 2**30 tokens.

    The arguments are the same as for `facts`. The samples on the page have this length, too.
    """
    about = facts(dataset, length=length, samples=samples, **steps)
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
            "sentences": histogram(*lengths_of(dataset, "sentences")) if has_sentences else None,
        },
        "tokens": _tokens(dataset, tokenizer, counts),
        "rows": [_rows(sizes, each) for each in _ROW_LENGTHS],
        "unknown": 0 if unk in (None, dataset.special_tokens.separator) else int(counts[unk]),
        "samples": _samples(dataset, tokenizer, length=length, samples=samples) if has_rows else None,
    }
    data["warnings"] = _warnings(data)
    about["tokenizer"] = {name: about["tokenizer"][name] for name in _TOKENIZER}
    body = resources.files("bertdata.look").joinpath("report.html").read_text(encoding="utf-8")
    return assemble_page(f"{dataset.path}: dataset", body, data)


def _flow(about: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of documents read, left out and stored in each split.

    text: the events from `text_events`.
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
        "text": [f"{name}: {sentence}" for name, sentence in text_events(about)],
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
    """Return the shares of padding in rows of a length, with one document per row and with packed documents.

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
    """Return rows for some positions, epochs and seeds, and the masks of each policy.

    spellings: id → token. rows[seed][epoch][position]: ids; for each policy a list of (token position, masked id). Only
    the first 512 tokens of each row.
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
    """Return warnings to read before training, one sentence each."""
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
