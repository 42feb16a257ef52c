"""The batches of a run: datasets, loaders, streams that continue after a checkpoint, and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bertdata
from bertdata import IGNORE_INDEX, Batch, Dataset
from bertdata.support import UsageError, counted
from bertrain.config import Config
from bertrain.methods import Method
from bertrain.models.encoder import MicroBatch, cu_seqlens_of, has_kernel
from bertrain.objectives import num_targets, objectives_of
from bertrain.plan import Phase, Plan, masking_of, paths, ramp
from bertrain.ranks import World
from bertrain.state import TrainingError, TrainState, kept_options, require_same

CHECKED_ROWS = 64  # before the first step


def samples_of(config: Config) -> str:
    """Return the kind of rows that --isolate-documents or the run's objectives need; windows by default."""
    needed = {kind.samples for kind in objectives_of(config).values() if kind.samples}
    needed |= {"packed"} if config.isolate_documents else set()
    if len(needed) > 1:
        sentence = f"rows cannot be {' and '.join(sorted(needed))}: change --objective or --isolate-documents"
        raise UsageError(sentence, "conflict", option="objective", given=config.objective)
    return next(iter(needed), "windows")


def build_loader(
    config: Config,
    shards: bertdata.Dataset | Sources,
    *,
    length: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    variants: int | None = None,
    masking: bertdata.Masking | None = None,
    methods: Sequence[Method] = (),
    starts: Sequence[int] = (),
) -> bertdata.Loader:
    """Return the loader of a run for one rank.

    length: row length in tokens; by default that of the config.
    variants, starts: as in bertdata.Loader.
    masking: by default that of the first phase.
    methods: the methods of the run, which may return a different loader.
    """
    make: Callable[..., bertdata.Loader] = bertdata.Loader
    for method in methods:
        make = method.loader(make)
    return make(
        shards,
        length=length or config.length,
        global_batch_size=ramp(config.global_batch_size)[0],
        seed=config.seed if config.data_seed is None else config.data_seed,
        rank=rank,
        world_size=world_size,
        samples=samples_of(config),
        shuffle=config.shuffle,
        masking=masking or masking_of(config),
        variants=variants,
        starts=starts,
    )


Sources = Sequence[tuple[Dataset, float]]
"""The datasets of --data, with their weights."""


def micro_batches(
    batch: Batch, *, size: int, count: int, device: torch.device, flat: bool = False
) -> Iterator[MicroBatch]:
    """Yield exactly `count` micro-batches of at most `size` rows, as arguments of Learner.

    Ranks may differ by one row. After the last row of a rank, micro-batches have one filler row, without targets and
    with sample_ids −1, so that every rank runs the same number of passes. On GPUs whose attention kernel needs it,
    packed rows have cu_seqlens, int32, and always an attention_mask. flat: give the targets of all rows as one row
    [1, N] without unused slots, and count masked_positions from the first row.
    """
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays().items() if name != "sources"}
    for number in range(count):
        rows = slice(number * size, (number + 1) * size)
        piece = {name: array[rows] for name, array in arrays.items()}
        if piece["input_ids"].shape[0] == 0:
            piece = {name: torch.zeros((1, *array.shape[1:]), dtype=array.dtype) for name, array in arrays.items()}
            piece["sample_ids"] -= 1
            for name in {"targets", "next_sentence_label"} & piece.keys():
                piece[name] += IGNORE_INDEX
            if "position_ids" in piece:  # a row of one document
                piece["position_ids"] += torch.arange(batch.input_ids.shape[1])
            piece.pop("attention_mask", None)
        if "position_ids" in piece and has_kernel(device):
            piece["cu_seqlens"] = cu_seqlens_of(piece["position_ids"])
            piece.setdefault("attention_mask", torch.ones_like(piece["input_ids"]))  # else torch compiles two graphs
        positions, targets = batch.masked_positions[rows], batch.targets[rows]
        if flat and (used := targets != IGNORE_INDEX).any():
            first = np.arange(len(used))[:, None] * batch.input_ids.shape[1]  # of each row
            piece["masked_positions"] = torch.from_numpy((positions + first)[used][None])
            piece["targets"] = torch.from_numpy(targets[used][None])
        yield {name: to_device(array, device) for name, array in piece.items()}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on a device. The copy uses pinned memory, so the host does not wait for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Stream:
    """The batches of a run on one rank.

    Each phase has its own loader; `loader` makes the next batch. The samples of a dataset in rows of one length are a
    stream of positions. The next phase that reads this stream continues it (docs/determinism.md, Phases of a run).
    """

    def __init__(self, config: Config, ranks: World, methods: Sequence[Method] = ()) -> None:
        """Open the datasets. Raises UsageError for options that do not fit them, and if their tokenizers differ."""
        self.config, self._ranks, self._methods = config, ranks, methods
        self.datasets = {path: bertdata.open(path) for path in paths(config)}
        if len(self.datasets) > 1:
            bertdata.Loader([(shards, 1) for shards in self.datasets.values()], masking=None)  # compares tokenizers
        self._num_samples = cache(lambda path, n: build_loader(config, self.datasets[path], length=n).num_samples)
        self.plan = Plan.make(config, self, world_size=ranks.world_size, on_gpu=ranks.device.type == "cuda")
        self.phase = self.plan.phases[0]
        self._before: dict[str, int] = {}  # samples read from each stream before this phase
        self.step = 0  # step of the next batch
        self.loader = [self._loader(phase) for phase in self.plan.phases][0]  # raises an error if the mix is invalid
        self._take_mask_rule(self.loader.state_dict()["masking"])  # a teacher's cache determines it

    def _take_mask_rule(self, masking: Mapping[str, Any]) -> None:
        """Use the mask rule of a loader for all phases."""
        phases = [replace(phase, masking=phase.masking.with_rule_of(masking)) for phase in self.plan.phases]
        self.plan = replace(self.plan, phases=tuple(phases))
        self.phase = self.plan.phases[self.phase.number - 1]

    # ------------------------------------------------------------------------------------------------- sizes, for plans

    def samples(self, paths: Sequence[str], length: int) -> int:
        """Return the number of samples in one epoch of some datasets, in rows of `length` tokens."""
        return sum(self._num_samples(path, length) for path in paths)

    def tokens(self, path: str) -> int:
        """Return the number of tokens in the train split of a dataset."""
        return self.datasets[path].splits["train"].num_tokens

    # ------------------------------------------------------------------------------------------------------ the batches

    def next_batch(self) -> bertdata.Batch:
        """Return this rank's rows of the next step."""
        self.loader.global_batch_size = self.phase.rows_at(self.step)
        self.step += 1
        return next(self.loader)

    def enter(self, phase: Phase) -> None:
        """Switch to the rows of a phase."""
        before, loader = self.phase, self.loader
        self._before, self.phase = self.positions, phase
        starts = [self._before.get(stream, 0) for stream in self._streams(phase)]
        is_same = (before.sources, before.options.length) == (phase.sources, phase.options.length)
        self.loader = self._loader(phase, starts=loader.starts if is_same else starts * (len(starts) > 1))
        self.loader.position = loader.position if is_same else starts[0] * (len(starts) == 1)

    def resume(self, path: Path, saved: TrainState, made_with: dict[str, Any]) -> None:
        """Resume after the checkpoint `path`. saved: the state in this checkpoint.

        made_with: the run's model and other inputs, by content. Raises UsageError if an option changed that must not.
        """
        self._take_mask_rule(saved.loader["masking"])
        phases, options = self.saved_phases(), kept_options(self.config.flat(), of_phases=not saved.phases)
        saved.made_with, saved.phases = made_with | saved.made_with, saved.phases or phases
        saved.options = options | saved.options  # options that the checkpoint lacks are not compared
        for before, after in zip(saved.phases, phases, strict=False):
            before["rate"].setdefault("warmup", after["rate"]["warmup"])  # version 0.1.0 did not save it
        now = TrainState(made_with=saved.made_with | made_with, options=options, phases=phases)
        require_same(saved, now, path)
        self.step, self.phase, self._before = saved.step, self.plan.phases[saved.phase - 1], dict(saved.streams)
        self.loader = self._loader(self.phase, starts=saved.loader.get("starts", ()))
        self.loader.load_state_dict(saved.loader)

    def _loader(self, phase: Phase, *, starts: Sequence[int] = ()) -> bertdata.Loader:
        loader = build_loader(
            self.config,
            [(self.datasets[path], weight) for path, weight in phase.sources],
            length=phase.options.length,
            masking=phase.masking,
            methods=self._methods,
            starts=starts,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )
        loader.global_batch_size = phase.rows[0]
        return loader

    def _streams(self, phase: Phase) -> list[str]:
        return [f"{self.datasets[path].dataset_id} {phase.options.length}" for path, _ in phase.sources]

    # ----------------------------------------------------------------------------------------------------- amounts read

    @property
    def positions(self) -> dict[str, int]:
        """The number of samples read from each stream, by "dataset_id length"."""
        return self._before | dict(zip(self._streams(self.phase), self.loader.counts(), strict=True))

    def saved_phases(self) -> list[dict[str, Any]]:
        """Return the phases in the form of checkpoints: with dataset ids instead of paths."""
        saved = [phase.saved() for phase in self.plan.phases]
        for phase in saved:
            phase["sources"] = [[self.datasets[path].dataset_id, weight] for path, weight in phase["sources"]]
        return saved

    def _counts(self) -> Iterator[tuple[str, int, int]]:
        """Yield the path, the row length and the number of samples read for each stream of the run's datasets."""
        paths = {dataset.dataset_id: path for path, dataset in self.datasets.items()}
        for stream, count in self.positions.items():
            dataset_id, length = stream.split(" ")
            if dataset_id in paths:  # a checkpoint of an earlier version may have other streams
                yield paths[dataset_id], int(length), count

    def words(self) -> float:
        """Return the number of white-space words read: the sum over streams of words in the dataset × epochs read."""
        counts = {path: dataset.manifest.counts["words"]["train"] for path, dataset in self.datasets.items()}
        return sum(count / self.samples([path], length) * counts[path] for path, length, count in self._counts())

    def read_by_source(self) -> dict[str, dict[str, float]]:
        """Return the tokens and epochs read from each dataset of a mix, by path. Empty if there is only one dataset.

        Tokens include padding. Epochs are counted in rows of the current length.
        """
        if len(self.datasets) == 1:
            return {}
        read: dict[str, dict[str, float]] = {path: {"tokens": 0, "epochs": 0.0} for path in self.datasets}
        for path, length, count in self._counts():
            read[path]["tokens"] += count * length
            if length == self.phase.options.length:
                read[path]["epochs"] = round(count / self.samples([path], length), 4)
        return read

    @property
    def sources(self) -> Sources:
        """The datasets, each with its share of the run's rows as its weight."""
        if len(self.plan.phases) == 1:
            return [(self.datasets[path], weight) for path, weight in self.phase.sources]
        rows = dict.fromkeys(self.datasets, 0.0)
        for phase in self.plan.phases:
            total = sum(weight for _, weight in phase.sources)
            for path, weight in phase.sources:
                rows[path] += weight / total * phase.samples()
        return [(self.datasets[path], weight) for path, weight in rows.items()]

    def describe_mix(self) -> list[str]:
        """Return a line for each dataset of a mix: its share of the rows, and its size. Empty for a single dataset."""
        if len(self.phase.sources) == 1:
            return []
        counts, total = self.loader.counts(self.phase.samples()), sum(self.loader.weights)
        parts = zip(self.phase.sources, self.loader.sources, self.loader.weights, counts, strict=True)
        lines = []
        for (path, _), source, weight, count in parts:
            often = f", read {count / source.num_samples:.2g} times" if len(self.plan.phases) == 1 else ""
            samples = counted(source.num_samples, "sample")
            lines.append(f"{path}: {weight / total:.4g} of the rows, {samples} an epoch{often}")
        return lines

    # ------------------------------------------------------------------------------------------- before the first step

    def check(self) -> None:
        """Raise TrainingError unless the first rows have targets and all later phases mask tokens."""
        for path, dataset in self.datasets.items():
            if self.config.milestones["words"] and "train" not in dataset.manifest.counts.get("words", {}):
                sentence = f"--save-at words: {path} has no count of words; build it again, or give tokens"
                raise UsageError(sentence, "missing", option="save_at", given=path)
        rows = self.loader.read(np.arange(min(self.loader.num_samples, self.plan.samples(), 1024)))
        for phase in self.plan.phases:
            share, length = phase.masking.probability, phase.options.length
            if phase.masking.num_slots(length) == 0 or (phase is self.phase and num_targets(rows) == 0):
                sentence = (
                    f"phase {phase.number} has no token to predict (--mlm-probability {share}, --length {length}); "
                    "raise --mlm-probability or --length, or build with a tokenizer that knows the text"
                )
                raise TrainingError(sentence, "too-short-to-mask", option="mlm_probability", given=share)
        masking, targets = self.phase.masking, rows.targets[:CHECKED_ROWS]
        lengths = np.full(len(targets), self.loader.length)
        if rows.attention_mask is not None:
            lengths = rows.attention_mask.sum(1)[:CHECKED_ROWS]
        wanted, masked = sum(map(masking.quota, lengths.tolist())), int((targets != IGNORE_INDEX).sum())
        least = 200 if masking.policy == "bernoulli" else 0
        if masking.policy != "uniform" and self.step == 0 and max(2 * masked, least) < wanted:
            sentence = (
                f"the first {len(targets)} rows have only {masked:,} of {wanted:,} expected targets: most tokens "
                "are [UNK], or words are too long to mask; give --masking exact, or build with a tokenizer for "
                "this text"
            )
            raise TrainingError(sentence, "too-short-to-mask", option="masking", given=masking.policy)
