"""The facts of `bertdata inspect`, as a JSON-serializable object and as text."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, TokenizerError, counted, damaged
from bertdata.format.dataset import Dataset
from bertdata.read.loader import Loader
from bertdata.tokenize.forms import flat
from bertdata.tokenize.load import load
from bertdata.tokenize.models import kind_of
from bertdata.tokenize.tokenizer import TOKENIZER

_BAR = 40  # columns of the longest bar of the histogram
_SHARES = {
    "pad_share": "of the places padding",
    "crop_share": "of the text cut off",
    "random_share": "of the pairs random",
}


def facts(
    dataset: Dataset, *, length: int, global_batch_size: int, world_size: int, samples: str = "windows"
) -> dict[str, Any]:
    """Return all facts about a dataset. This reads its tokenizer and the offsets of documents, but no tokens.

    samples, length, global_batch_size, world_size: decide the numbers of samples and steps, and the rows of a step on
    the rank with most rows. An index that the samples need is made.
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
        tokenizer = load(str(dataset.path))
        tokenizer.prepare()
    except (DatasetError, TokenizerError) as error:
        return {"kind": None, "engine": None, "engine_refusal": None, "fault": str(error)}
    return {
        "kind": ", ".join(_steps(json.loads(content))),
        "engine": tokenizer.engine,
        "engine_refusal": None if tokenizer.engine else tokenizer.why_slow,
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
    """Return the distinct lengths of documents or sentences in tokens, ascending, and how often each occurs.

    Separators are not counted. array: "documents" or "sentences".
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
    """Yield what a build or an import read, skipped, replaced or kept: a name and a text each."""
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
    """Return tokens and how often each occurs."""
    return ", ".join(f"{token} {counted(count, 'time')}" for token, count in tokens.items())
