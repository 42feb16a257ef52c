"""What inspect prints: facts about a dataset, as a JSON-able object and as text."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from bertdata.errors import DatasetError, TokenizerError, counted, damaged
from bertdata.format.arrays import file_bytes
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
    """All facts about a dataset. Reads its tokenizer and the offsets of documents, 8 bytes each, and no tokens.

    samples, length, global_batch_size, world_size: for the numbers of samples, of steps, and of the rows of a step on
    the rank that has most. Samples that need an index make it.
    """
    manifest, special = dataset.manifest, dataset.special_tokens
    splits: dict[str, Any] = {}
    for name, split in dataset.splits.items():
        num_samples, shares = _samples_of(dataset, name, samples, length)
        splits[name] = {
            "shards": len(split.shards),
            "documents": split.num_documents,
            "sentences": _sum_or_none([shard.num_sentences for shard in split.shards]),
            "tokens": split.num_tokens,
            "samples_per_epoch": num_samples,
            "steps_per_epoch": num_samples / global_batch_size,
            **shares,
        }
    size = sum(
        file_bytes(entry)
        for split in dataset.splits.values()
        for shard in split.shards
        for entry in shard.arrays.values()
    )
    return {
        "path": str(dataset.path),
        "dataset_id": dataset.dataset_id,
        "documents": dataset.num_documents,
        "sentences": _sum_or_none([split["sentences"] for split in splits.values()]),
        "tokens": dataset.num_tokens,
        "token_dtype": {"<u2": "uint16", "<u4": "uint32"}[manifest.token_dtype],
        "bytes": size,
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
        "tokens_per_document": _lengths(dataset),
        "settings": dict(manifest.settings),
        "counts": dict(manifest.counts),
    }


def _samples_of(dataset: Dataset, name: str, samples: str, length: int) -> tuple[int, dict[str, float]]:
    """The samples of an epoch of a split, 0 if only other splits have pairs, and what there is to say of them."""
    split = dataset.splits[name]
    if samples == "windows":
        return -(-split.num_tokens // (length - 2)), {}
    if samples == "pairs" and not split.has_pairs and any(each.has_pairs for each in dataset.splits.values()):
        return 0, {}
    loader = Loader(dataset, split=name, length=length, samples=samples, masking=None)
    return loader.num_samples, {share: round(x, 4) for share, x in loader.facts.items()}


def _kind_and_engine(dataset: Dataset) -> dict[str, Any]:
    """What the dataset's tokenizer does to a text, and the engine for it, or why there is none.

    None: not known, because of the `fault`.
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
        "engine_refusal": tokenizer.engine_refusal,
    }


def _steps(content: dict[str, Any]) -> list[str]:
    """A tokenizer's model, normalizers and pre-tokenizers, as `tokenizers` names them. content: its JSON."""
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


def _lengths(dataset: Dataset) -> dict[str, Any]:
    """Tokens per document, without separators: min, max, mean, quantiles, and a histogram over powers of two."""
    shards = list(dataset.manifest.shards)
    has_separator = dataset.special_tokens.separator is not None
    count_of = Counter[int]()
    for shard in shards:  # one at a time, and then only different lengths
        found, counts = np.unique(np.diff(dataset.array(shard.name, "documents").astype(np.int64)), return_counts=True)
        count_of.update(dict(zip((found - has_separator).tolist(), counts.tolist(), strict=True)))
    lengths, counts = np.array(sorted(count_of.items())).T
    if lengths[0] < 1:
        raise damaged(dataset.path)
    bins, num = np.bincount(np.log2(lengths).astype(np.int64), counts).astype(np.int64), int(counts.sum())
    places = [math.floor((num - 1) * share) for share in (0.05, 0.5, 0.95)]
    quantiles = lengths[np.searchsorted(np.cumsum(counts), places, side="right")]
    return {
        "min": int(lengths[0]),
        "p5": int(quantiles[0]),
        "median": int(quantiles[1]),
        "p95": int(quantiles[2]),
        "max": int(lengths[-1]),
        "mean": round(int(lengths @ counts) / num, 2),
        "histogram": [{"from": 1 << k, "to": (2 << k) - 1, "documents": int(n)} for k, n in enumerate(bins) if n],
    }


def _engine(tokenizer: dict[str, Any]) -> str:
    if tokenizer["engine"]:
        return str(tokenizer["engine"])
    if tokenizer["engine_refusal"]:
        return f"none, because {tokenizer['engine_refusal']}; `tokenizers` encodes text"
    return f"not known: {tokenizer['fault']}"


def text(about: dict[str, Any]) -> str:
    """The facts as text for a terminal, 100 columns wide."""
    tokenizer, steps, spread = about["tokenizer"], about["steps_for"], about["tokens_per_document"]
    counts = defaultdict(int, about["counts"])  # other programs write fewer
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
    is_imported = "imported" in about["settings"]
    return "\n".join([*lines, "", *(_imported(about["settings"], counts) if is_imported else _built(counts))])


def _built(counts: dict[str, Any]) -> list[str]:
    """What was read of the text of a build, and what became of it."""
    literals = ", ".join(f"{token} {count:,} times" for token, count in counts.get("special_literals", {}).items())
    skipped, removed, duplicates = (
        counts[name] for name in ("skipped_rows", "removed_documents", "duplicate_documents")
    )
    num_read = counts["documents"] + counts["dropped_documents"]
    words = ", ".join(f"{number:,} in {split}" for split, number in counts.get("words", {}).items())
    return [
        f"  text read    {counts['text_bytes']:,} bytes in {counted(num_read, 'document')}",
        *([f"  words        {words}, by white space"] if words else []),
        f"  dropped      {counted(counts['dropped_documents'], 'document')} without a token, "
        f"{counted(skipped, 'bad row')}",
        *([f"  removed      {counted(removed, 'document')} by --map"] if removed else []),
        *([f"  duplicates   {counted(duplicates, 'document')} whose text came before, left out"] if duplicates else []),
        f"  replaced     {counted(counts['replaced_characters'], 'invalid sequence')} (by U+FFFD), "
        f"{counted(counts['special_ids_replaced'], 'special id')} (by the unknown id)",
        f"  kept as text {literals or 'no special token was spelled in the text'}",
    ]


def _imported(settings: dict[str, Any], counts: dict[str, Any]) -> list[str]:
    """What was read and found in ids that others made."""
    num_read = counts["documents"] + counts["dropped_documents"]
    return [
        f"  imported     {settings['imported']}: {counts['ids_bytes']:,} bytes of ids in "
        f"{counted(num_read, 'document')}",
        f"  dropped      {counted(counts['dropped_documents'], 'document')} and "
        f"{counted(counts['empty_sentences'], 'sentence')} without an id",
        f"  inside       {special_ids_inside(counts) or 'no special token is inside a document'}",
    ]


def special_ids_inside(counts: Mapping[str, Any]) -> str:
    """Which special tokens are inside documents of an imported dataset, and how often; "" for none."""
    inside = counts.get("special_ids_inside", {})
    return ", ".join(f"{token} {count:,} times" for token, count in inside.items())


def as_json(about: dict[str, Any]) -> str:
    return json.dumps(about, indent=1, ensure_ascii=False)
