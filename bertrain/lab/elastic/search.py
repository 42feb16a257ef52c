"""Find the sub-network of an elastic run with the lowest validation loss among those that are fast enough.

    bertrain search --checkpoint run/ --data shards/ --latency 5ms --trials 60 --out search/

A trial measures the loss of one sub-network on fixed samples with fixed masks. Its latency is measured before: the
median time of the encoder's forward pass on this machine. OUT/trials.jsonl has a line for every sub-network that was
measured. What stands there is not measured again, so a search may be stopped at any time. OUT/search.png shows loss
against latency. docs/methods.md has the rules.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tqdm import tqdm

import bertdata
from bertdata.support import DatasetError, OneSentence, UsageError, naming, write_file
from bertrain import checkpoint
from bertrain.commands.evaluate import opened
from bertrain.commands.plot import drawing
from bertrain.evaluate import evaluate
from bertrain.lab.elastic import space as elastic
from bertrain.lab.elastic.space import Sizes, Space
from bertrain.lab.elastic.training import trained_space
from bertrain.lab.fingerprint import fingerprint
from bertrain.models.encoder import Encoder
from bertrain.options import Output, flag
from bertrain.ranks import World, world

FIRST = 10  # random trials before evolution begins; Yin et al. (2021) have 25, of many more
EXPLORE, MUTATION = 0.5, 0.25  # as they have them
CHILDREN = 100  # in a row without a new trial are enough
DRAWS = 1000  # in a row without a new trial end a search
WARMUP, REPEATS = 3, 15  # passes before a latency is measured, and passes that are measured
SHOWN = 10  # trials that are printed
ONE = click.IntRange(min=1)
METHODS = ("evolution", "random")
TRIALS, SETTINGS, PICTURE = "trials.jsonl", "search.json", "search.png"


def candidate(space: Space, number: int, *, seed: int, best: Sizes | None) -> Sizes:
    """Return draw `number` of a search, a function of the arguments alone.

    best: the sub-network that it is a child of: each of its sizes goes to the next smaller or larger value of the space
    with probability 1/4. None: any of the space.
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


def search(
    space: Space, known: Measurements, *, method: str, trials: int, seed: int, limit: float
) -> dict[Sizes, float]:
    """Return the sub-networks that were tried, in their order, with their losses.

    Sub-networks are sampled until `trials` have a latency of at most `limit` ms; only of these the loss is measured.
    All samples of `random` are from the complete space. So are the first 10 trials of `evolution`; each later trial is,
    with probability 1/2, from the complete space, else a child of the best so far (or from the complete space where 100
    children give no new trial). So the first trials of a longer search are those of a shorter one. Fewer trials come
    back where 1,000 samples in a row give no new one.
    """
    losses: dict[Sizes, float] = {}
    number, last = 0, 0  # of the next sample, and of that which gave the last trial
    with tqdm(total=trials, unit="trial", leave=False, disable=None) as bar:
        while len(losses) < trials and number - last < DRAWS:
            evolves = method == "evolution" and len(losses) >= FIRST and number - last < CHILDREN
            if evolves:
                evolves = np.random.default_rng(bertdata.key(seed, "explore", len(losses))).random() >= EXPLORE
            best = min(losses, key=lambda sizes: losses[sizes]) if evolves else None
            sizes = candidate(space, number, seed=seed, best=best)
            number += 1
            if sizes not in losses and known.latency(sizes) <= limit:
                losses[sizes], last = known.loss(sizes), number
                bar.update()
    return losses


@torch.no_grad()
def cost(encoder: Encoder, *, rows: int, length: int) -> dict[str, Any]:
    """Return the parameters, and the median time in ms of a forward pass for `rows` rows of `length` tokens."""
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
    """Numbers of sub-networks. Each is measured once, and kept in trials.jsonl.

    settings: what the numbers depend on. make: a sub-network. cost: its "parameters" and "latency_ms". judge: its
    "loss" and "accuracy". Raises UsageError if the numbers in the directory were measured with other settings.
    """

    def __init__(
        self,
        out: Path,
        settings: Mapping[str, Any],
        make: Callable[[Sizes], Encoder],
        cost: Callable[[Encoder], Mapping[str, Any]],
        judge: Callable[[Encoder], Mapping[str, Any]],
    ) -> None:
        self._path, self._make, self._cost, self._judge = out / TRIALS, make, cost, judge
        self.entries: dict[Sizes, dict[str, Any]] = {}
        if self._path.exists():
            _require_same(out, settings)
            for line in self._path.read_text(errors="replace").splitlines():
                # a line may be cut off as the process died, or damaged as the power failed
                with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    entry = json.loads(line)
                    sizes = Sizes(*(entry[name] for name in Sizes._fields))
                    measured = ("parameters", "latency_ms", *(("loss", "accuracy") if "loss" in entry else ()))
                    if all(type(number) in (int, float) for number in (*sizes, *map(entry.get, measured))):
                        self.entries[sizes] = entry
        write_file(out / SETTINGS, json.dumps(settings, indent=1).encode())
        write_file(self._path, "".join(json.dumps(entry) + "\n" for entry in self.entries.values()).encode())

    def latency(self, sizes: Sizes) -> float:
        return self._measured(sizes, "latency_ms", self._cost)

    def loss(self, sizes: Sizes) -> float:
        return self._measured(sizes, "loss", self._judge)

    def _measured(self, sizes: Sizes, name: str, measure: Callable[[Encoder], Mapping[str, Any]]) -> float:
        known = self.entries.get(sizes, sizes._asdict())
        if name not in known:
            known = self.entries[sizes] = {**known, **measure(self._make(sizes))}
            with naming(self._path), open(self._path, "a") as file:
                file.write(json.dumps(known) + "\n")
        return float(known[name])


def _require_same(out: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = dict(json.loads((out / SETTINGS).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        sentence = f"{out / SETTINGS} is missing or damaged, so nobody knows what {TRIALS} holds; give another --out"
        raise DatasetError(sentence, "damaged", option="out", given=str(out)) from None
    if names := [name for name in {**settings, **before} if before.get(name) != settings.get(name)]:
        listed = ", ".join(f"{name} {before.get(name)} → {settings.get(name)}" for name in names)
        sentence = f"--out {out} holds a search of other settings (old → new): {listed}; give another --out"
        raise UsageError(sentence, "other-settings", option="out", given=str(out))


def _milliseconds(given: str) -> float:
    """Return --latency in ms. Raises UsageError for an invalid time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", given)
    if not match or float(match[1]) <= 0:
        sentence = f"--latency {given} is not a time above 0; write it like 5ms or 0.2s"
        raise UsageError(sentence, "malformed", option="latency", given=given)
    return float(match[1]) * (1e3 if match[2] == "s" else 1)


def _draw(pyplot: Any, path: Path, entries: list[dict[str, Any]], limit: float) -> None:
    """Draw loss against latency of the trials, the best first."""
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
    epilog="\b\nExample:\n  bertrain search --checkpoint run/ --data shards/ --latency 5ms --out search/",
)
@click.option("--checkpoint", "path", required=True, help="A run that was trained with --elastic.")
@click.option("--data", required=True, help="Directory of shards.")
@click.option("--latency", "limit", required=True, help="Longest latency of a sub-network, such as 5ms or 0.2s.")
@click.option("--trials", default=60, type=ONE, help="Number of sub-networks to evaluate.")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="evolution",
    help="evolution: children of the best sub-network so far, and random ones. random: only random ones.",
)
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Random seed of the choice of sub-networks.")
@click.option("--batch-size", default=1, type=ONE, help="Rows of the forward pass whose latency is measured.")
@click.option("--length", type=click.IntRange(min=3), help="Row length in tokens. Default: the length of the run.")
@click.option("--split", default="validation", help="Split to evaluate on.")
@click.option("--max-samples", default=512, type=ONE, help="Number of samples to evaluate on.")
@click.option("--out", required=True, type=Output(), help="Directory for trials.jsonl and search.png.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
def main(path: str, data: str, limit: str, batch_size: int, out: str, as_json: bool, **options: Any) -> None:
    """Find the sub-network of an elastic run with the lowest validation loss within a latency limit.

    The latency is the median of 15 forward passes of the encoder on this machine, without the head. Run it alone: other
    work on the machine makes it longer.
    """
    most, pyplot = _milliseconds(limit), drawing()
    choice = {name: options.pop(name) for name in ("method", "trials", "seed")}
    with world() as ranks:
        if ranks.world_size > 1:
            raise UsageError("bertrain search measures on one process; start it without torchrun", "unsupported")
        encoder, shards, directory, length = opened(path, data, options["split"], options["length"], ranks)
        if not (trained := trained_space(directory)):
            sentence = f"{directory} was not trained with --elastic, so it has no sub-networks; give a run that was"
            raise UsageError(sentence, "unsupported", option="checkpoint", given=path)
        space, samples = Space(trained, encoder.model.config), options | {"length": length}
        settings = {
            "weights": fingerprint(encoder.model),
            "dataset_id": shards.dataset_id,
            "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            **samples,
            "batch_size": batch_size,
        }
        complete = encoder.model.cpu().eval()

        def make(sizes: Sizes) -> Encoder:
            return Encoder(elastic.cut(complete, sizes), isolate=encoder.isolate).to(ranks.device).eval()

        with checkpoint.lock(Path(out)):
            judge = partial(_judge, shards=shards, ranks=ranks, **samples)
            known = Measurements(Path(out), settings, make, partial(cost, rows=batch_size, length=length), judge)
            smallest = known.latency(space[0])
            result = search(space, known, limit=most, **choice)
            if not result:
                sentence = f"no sub-network was as fast as {limit}; the smallest has {smallest:.3g} ms: give more"
                raise UsageError(sentence, "out-of-range", option="latency", given=limit)
            entries = [known.entries[sizes] for sizes in result]
            best = sorted(entries, key=lambda entry: entry["loss"])
            _draw(pyplot, Path(out, PICTURE), best, most)
    facts = {"checkpoint": str(directory), "method": choice["method"], "seed": choice["seed"], "limit_ms": most}
    facts |= {"threads": torch.get_num_threads(), "space": len(space), "rows": batch_size, "length": length}
    if as_json:
        click.echo(json.dumps(facts | {"best": best[0], "trials": entries}))
    else:
        _say(facts, best, out)


def _judge(small: Encoder, *, shards: bertdata.Dataset, ranks: World, split: str, **samples: Any) -> dict[str, Any]:
    """Return the loss and the accuracy of a sub-network."""
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
