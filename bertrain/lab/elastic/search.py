"""Find the sub-network of an elastic run with the lowest validation loss among those that are fast enough.

    bertrain search --checkpoint run/ --data shards/ --latency 5ms --trials 60 --out search/

The latency of a sub-network is the median time of the encoder's forward pass on this machine. If it is low enough, a
trial measures the loss on fixed samples with fixed masks. OUT/trials.jsonl has a line for every measured sub-network,
which is not measured again, so a search may be stopped at any time. OUT/search.png shows loss against latency.
docs/subnetworks.md has the rules.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tqdm import tqdm

import bertdata
from bertdata.support import DatasetError, OneSentence, UsageError, naming, write_file
from bertrain import checkpoint
from bertrain.cli import flags_of
from bertrain.commands.evaluate import opened
from bertrain.commands.plot import drawing
from bertrain.config import DIRECTORY
from bertrain.evaluate import evaluate
from bertrain.lab.elastic import space as elastic
from bertrain.lab.elastic.space import Sizes, Space
from bertrain.lab.elastic.training import trained_space
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.options import JSON, differences, from_flags
from bertrain.models.encoder import Encoder
from bertrain.options import COUNT, COUNT_OR_0, TEXT, Check, Kind, Options, choice, flag, option
from bertrain.ranks import World, world

FIRST = 10  # random trials before evolution begins; Yin et al. (2021) have 25 in longer searches
EXPLORE, MUTATION = 0.5, 0.25  # as in Yin et al. (2021)
CHILDREN = 100  # after this number of children in a row without a new trial, sample at random
DRAWS = 1000  # after this number of samples in a row without a new trial, end the search
WARMUP, REPEATS = 3, 15  # forward passes before the measurement, and measured ones
SHOWN = 10  # trials to print
METHODS = ("evolution", "random")
Measure = Callable[[Sizes], float]
TRIALS, SETTINGS, PICTURE = "trials.jsonl", "search.json", "search.png"


def _milliseconds(given: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", given)
    if not match or float(match[1]) <= 0:
        raise ValueError
    return float(match[1]) * (1e3 if match[2] == "s" else 1)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Options):
    """Options: the search space, the latency limit, and the evaluation."""

    checkpoint: str = option("", TEXT, required=True)
    """A run that was trained with --elastic."""
    data: str = option("", TEXT, required=True)
    """Directory of shards."""
    latency: float | None = option(None, Kind("a time above 0, such as 5ms or 0.2s", _milliseconds), required=True)
    """Longest latency of a sub-network, such as 5ms or 0.2s."""
    trials: int = option(60, COUNT)
    """Number of sub-networks to evaluate."""
    method: str = option("evolution", choice(*METHODS))
    """evolution: children of the best sub-network so far, and random ones. random: only random ones."""
    seed: int = option(0, COUNT_OR_0)
    """Random seed of the choice of sub-networks."""
    batch_size: int = option(1, COUNT)
    """Rows of the forward pass whose latency is measured."""
    length: int | None = option(None, COUNT)
    """Row length in tokens. Default: the length of the run."""
    split: str = option("validation", TEXT)
    """Split to evaluate on."""
    max_samples: int = option(512, COUNT)
    """Number of samples to evaluate on."""
    out: str = option("", DIRECTORY, required=True)
    """Directory for trials.jsonl and search.png."""
    rules = (Check("length", lambda c: c.length is None or c.length > 2, "at least 3"),)


def candidate(space: Space, number: int, *, seed: int, best: Sizes | None) -> Sizes:
    """Return sample `number` of a search, a pure function of the arguments.

    best: the parent sub-network: each size moves to the next smaller or larger value of the space with probability 1/4.
    None: sample from the complete space.
    """
    draw = np.random.default_rng(bertdata.key(seed, "search", number))
    if best is None:
        return space[int(draw.integers(len(space)))]
    while True:
        child = list(best)
        for place, values in enumerate(space.values):
            if draw.random() < MUTATION:
                index = values.index(best[place]) + (1 if draw.random() < 0.5 else -1)
                child[place] = values[min(max(index, 0), len(values) - 1)]
        if Sizes(*child) in space:
            return Sizes(*child)


def search(space: Space, latency: Measure, loss: Measure, options: SearchOptions, limit: float) -> dict[Sizes, float]:
    """Return the tried sub-networks, in order, with their losses.

    Sub-networks are sampled until --trials have a latency of at most `limit` ms; the loss is measured only for these.
    All samples of `random` are from the complete space, and so are the first 10 trials of `evolution`. Each later trial
    is, with probability 1/2, from the complete space, else a child of the best so far (or from the complete space if
    100 children in a row are not new). So a longer search begins with the trials of a shorter one. A search ends early
    after 1,000 samples in a row that are not new.
    """
    losses: dict[Sizes, float] = {}
    trials, seed = options.trials, options.seed
    number, last = 0, 0  # number of the next sample, and that after the last trial
    with tqdm(total=trials, unit="trial", leave=False, disable=None) as bar:
        while len(losses) < trials and number - last < DRAWS:
            evolves = options.method == "evolution" and len(losses) >= FIRST and number - last < CHILDREN
            if evolves:
                evolves = np.random.default_rng(bertdata.key(seed, "explore", len(losses))).random() >= EXPLORE
            best = min(losses, key=lambda sizes: losses[sizes]) if evolves else None
            sizes = candidate(space, number, seed=seed, best=best)
            number += 1
            if sizes not in losses and latency(sizes) <= limit:
                losses[sizes], last = loss(sizes), number
                bar.update()
    return losses


@torch.no_grad()
def cost(encoder: Encoder, *, rows: int, length: int) -> dict[str, Any]:
    """Return the number of parameters, and the median time in ms of a forward pass of `rows` × `length` tokens."""
    device = encoder.model.device
    places = torch.arange(length, device=device).expand(rows, -1)
    ids = places % encoder.model.config.vocab_size
    times, synchronize = [], getattr(torch, device.type).synchronize
    for _ in range(WARMUP + REPEATS):
        synchronize()
        started = time.perf_counter()
        encoder.encode(ids, position_ids=places)
        synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    return {"parameters": parameters, "latency_ms": statistics.median(times[WARMUP:])}


class Measurements:
    """Measured values of sub-networks, each measured once and stored in trials.jsonl.

    settings: all settings that affect them. Raises UsageError if the directory has values from other settings.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self._path = out / TRIALS
        self.entries: dict[Sizes, dict[str, Any]] = {}
        if self._path.exists():
            try:
                before = dict(json.loads((out / SETTINGS).read_bytes()))
            except (FileNotFoundError, ValueError, TypeError, RecursionError):
                raise DatasetError(f"{out / SETTINGS} is damaged; give a new --out", "damaged", option="out") from None
            if listed := differences(before, settings):
                sentence = f"--out {out} holds a search of other settings (old → new): {listed}; give a different --out"
                raise UsageError(sentence, "other-settings", option="out", given=str(out))
            for line in self._path.read_text(errors="replace").splitlines():
                # a crash may cut off a line, and a power cut may damage it
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    entry = json.loads(line)
                    self.entries[Sizes(*(entry[name] for name in Sizes._fields))] = entry
        write_file(out / SETTINGS, json.dumps(settings, indent=1).encode())
        write_file(self._path, "".join(json.dumps(entry) + "\n" for entry in self.entries.values()).encode())

    def get(self, sizes: Sizes, name: str, measure: Callable[[], Mapping[str, Any]]) -> float:
        """Return a value of a sub-network. measure: measures it and others, by name."""
        known = self.entries.get(sizes, sizes._asdict())
        if name not in known:
            known = self.entries[sizes] = {**known, **measure()}
            with naming(self._path), open(self._path, "a") as file:
                file.write(json.dumps(known) + "\n")
        return float(known[name])


def _draw(pyplot: Any, path: Path, entries: list[dict[str, Any]], limit: float) -> None:
    """Plot loss against latency of the trials, best first."""
    figure, axis = pyplot.subplots(figsize=(7, 5), layout="constrained")
    axis.scatter(*zip(*((e["latency_ms"], e["loss"]) for e in entries), strict=True), s=12, label="trials")
    axis.scatter(entries[0]["latency_ms"], entries[0]["loss"], s=60, marker="*", color="C3", label="best")
    axis.axvline(limit, color="gray", linestyle="--", linewidth=1, label="limit")
    axis.set(xlabel="latency (ms)", ylabel="validation loss (nats a token)")
    axis.legend(fontsize=8)
    with naming(path):
        figure.savefig(path, dpi=100)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------------------- command


@click.command(
    cls=OneSentence,
    params=[*flags_of(SearchOptions), JSON],
    epilog="\b\nExample:\n  bertrain search --checkpoint run/ --data shards/ --latency 5ms --out search/",
)
def main(*, as_json: bool, **flags: Any) -> None:
    """Find the sub-network of an elastic run with the lowest validation loss within a latency limit.

    The latency is the median of 15 forward passes of the encoder on this machine, without the head. Run it alone: other
    work on the machine makes it longer.
    """
    options, pyplot = from_flags(SearchOptions, flags), drawing()
    limit, out, rows = float(options.latency or 0), Path(options.out), options.batch_size
    with world() as ranks:
        if ranks.world_size > 1:
            raise UsageError("bertrain search measures on one process; start it without torchrun", "unsupported")
        path, data, split = options.checkpoint, options.data, options.split
        encoder, shards, directory, length = opened(path, data, split, options.length, ranks)
        if not (trained := trained_space(directory)):
            sentence = f"{directory} was not trained with --elastic, so it has no sub-networks; give a run that was"
            raise UsageError(sentence, "unsupported", option="checkpoint", given=path)
        space = Space(trained, encoder.model.config)
        samples: dict[str, Any] = {"split": split, "max_samples": options.max_samples, "length": length}
        settings = {
            "weights": fingerprint(encoder.model),
            "dataset_id": shards.dataset_id,
            "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            **samples,
            "batch_size": rows,
        }
        complete = encoder.model.cpu().eval()

        def make(sizes: Sizes) -> Encoder:
            return Encoder(elastic.cut(complete, sizes), isolate=encoder.isolate).to(ranks.device).eval()

        def latency(sizes: Sizes) -> float:
            return known.get(sizes, "latency_ms", lambda: cost(make(sizes), rows=rows, length=length))

        def loss(sizes: Sizes) -> float:
            return known.get(sizes, "loss", lambda: _judge(make(sizes), shards=shards, ranks=ranks, **samples))

        with checkpoint.lock(out):
            known = Measurements(out, settings)
            smallest = latency(space[0])
            result = search(space, latency, loss, options, limit)
            if not result:
                sentence = f"no sub-network was as fast as {limit:g} ms; the smallest takes {smallest:.3g}; give more"
                raise UsageError(sentence, "out-of-range", option="latency", given=limit)
            entries = [known.entries[sizes] for sizes in result]
            best = sorted(entries, key=lambda entry: entry["loss"])
            _draw(pyplot, out / PICTURE, best, limit)
    facts = {"checkpoint": str(directory), "method": options.method, "seed": options.seed, "limit_ms": limit}
    facts |= {"threads": torch.get_num_threads(), "space": len(space), "rows": rows, "length": length}
    if as_json:
        click.echo(json.dumps(facts | {"best": best[0], "trials": entries}))
    else:
        _say(facts, best, options.out)


def _judge(small: Encoder, *, shards: bertdata.Dataset, ranks: World, split: str, **samples: Any) -> dict[str, Any]:
    """Return the loss and accuracy of a sub-network."""
    result = evaluate(small, shards, ranks, split=split, **samples)
    if result is None or result["loss"] is None:
        sentence = f"the split {split} of {shards.path} is too short to mask; choose another with --split"
        raise UsageError(sentence, "too-short-to-mask", option="split", given=split)
    return {name: result[name] for name in ("loss", "accuracy")}


def _say(facts: dict[str, Any], best: list[dict[str, Any]], out: str) -> None:
    """Print the best trials, and the command that writes the first of them."""
    click.echo(
        f"{facts['checkpoint']}: {len(best)} of {facts['space']:,} sub-networks tried ({facts['method']}), latency at "
        f"most {facts['limit_ms']:g} ms for {facts['rows']} × {facts['length']} tokens, threads: {facts['threads']}"
    )
    for entry in best[:SHOWN]:
        sizes = ", ".join(f"{name} {entry[name]:,}" for name in (*Sizes._fields, "parameters"))
        click.echo(f"loss {entry['loss']:.4f}, accuracy {entry['accuracy']:.2%}, {entry['latency_ms']:.2f} ms: {sizes}")
    sizes = " ".join(f"{flag(name)} {best[0][name]}" for name in Sizes._fields)
    click.echo(f"{TRIALS} and {PICTURE} are in {out}; the best as a checkpoint:")
    click.echo(f"bertrain extract --checkpoint {facts['checkpoint']} {sizes} --out small/")
