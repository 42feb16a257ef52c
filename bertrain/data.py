"""The batches of a run: datasets, loaders, streams that continue after a checkpoint, and micro-batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
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
from bertrain.plan import Phase, Plan, masking_of, paths
from bertrain.state import TrainingError, TrainState, kept_options, require_resumable


def samples_of(config: Config) -> str:
    """The kind of rows a run reads: what --isolate-documents or an objective needs, else windows."""
    needed = {kind.samples for kind in objectives_of(config).values() if kind.samples}
    needed |= {"packed"} if config.isolate_documents else set()
    if len(needed) > 1:
        sentence = (
            f"--objective {config.objective} needs rows of {' and of '.join(sorted(needed))}"
            + " (--isolate-documents: packed)" * config.isolate_documents
            + "; leave one of them out"
        )
        raise UsageError(sentence, "conflict", option="objective", given=config.objective)
    return next(iter(needed), "windows")


def open_datasets(config: Config) -> dict[str, bertdata.Dataset]:
    """Opens the datasets of a run, by path. Raises UsageError unless all have the same tokenizer."""
    opened = {path: bertdata.open(path) for path in paths(config)}
    if len(opened) > 1:
        bertdata.Loader([(shards, 1) for shards in opened.values()], masking=None)  # which refuses others
    return opened


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
    """The batches of a run, for one rank.

    length: None for that of the config.
    variants, starts: as Loader has them.
    masking: None for that of the first rows.
    methods: which may change the kind of loader.
    """
    make: Callable[..., bertdata.Loader] = bertdata.Loader
    for method in methods:
        make = method.loader(make)
    return make(
        shards,
        length=length or config.length,
        global_batch_size=config.rows.first,
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


def micro_batches(batch: Batch, *, size: int, count: int, device: torch.device) -> Iterator[MicroBatch]:
    """Exactly `count` pieces of at most `size` rows, as arguments for Learner.

    A rank may have one row less than another. A micro-batch after its last row is one row without targets, whose
    sample_ids is −1, so that every rank runs the same number of passes. Packed rows come with cu_seqlens, int32, on
    GPUs whose attention kernel needs them, and with an attention_mask there, whether a row has padding or not.
    """
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays().items() if name != "sources"}
    for number in range(count):
        piece = {name: array[number * size : (number + 1) * size] for name, array in arrays.items()}
        if piece["input_ids"].shape[0] == 0:
            piece = {name: torch.zeros((1, *array.shape[1:]), dtype=array.dtype) for name, array in arrays.items()}
            piece["sample_ids"] -= 1
            for name in {"targets", "next_sentence_label"} & piece.keys():
                piece[name] += IGNORE_INDEX
            if "position_ids" in piece:  # one document, not as many as tokens
                piece["position_ids"] += torch.arange(batch.input_ids.shape[1])
            piece.pop("attention_mask", None)
        if "position_ids" in piece and has_kernel(device):
            piece["cu_seqlens"] = cu_seqlens_of(piece["position_ids"])
            piece.setdefault("attention_mask", torch.ones_like(piece["input_ids"]))  # with and without: two graphs
        yield {name: to_device(array, device) for name, array in piece.items()}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies through pinned memory, which torch reuses, so that the host need not wait for the copy."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


CHECKED_ROWS = 64  # before the first step


class Batches:
    """The batches of a run, for one rank.

    A phase is another loader; `loader` is the one of the next batch. A stream is a dataset in rows of one length. It
    goes on where it was, in whatever phase it is read next (docs/determinism.md, Phases of a run).
    """

    def __init__(
        self,
        config: Config,
        datasets: dict[str, bertdata.Dataset],
        *,
        methods: Sequence[Method] = (),
        rank: int = 0,
        world_size: int = 1,
        on_gpu: bool = False,
    ) -> None:
        """datasets: those of the run, by path. Raises UsageError for options that do not fit the datasets."""
        self.config, self.datasets, self._methods = config, datasets, methods
        self._samples: dict[tuple[str, int], int] = {}
        self._ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self.plan = Plan.of(config, self, world_size=world_size, on_gpu=on_gpu)
        self.read: dict[str, int] = {}
        """Samples read of each stream before the loader of this phase began."""
        self.begun = 0
        """Steps that earlier starts of the run have taken."""
        self.phase = self.plan.phases[0]
        self.loader, *_ = [self._loader(phase) for phase in self.plan.phases]  # a mix that cannot be ends a run here
        self._take_rule_of(self.loader.state_dict()["masking"])  # a teacher's cache decides it

    def _take_rule_of(self, masking: Mapping[str, Any]) -> None:
        """Mask the rows of all phases by the rule of a loader's masks."""
        phases = [replace(phase, masking=phase.masking.with_rule_of(masking)) for phase in self.plan.phases]
        self.plan = replace(self.plan, phases=tuple(phases))
        self.phase = self.plan.phases[self.phase.number - 1]

    def samples(self, paths: Sequence[str], length: int) -> int:
        """The samples of an epoch of datasets, in rows of `length`."""
        for path in paths:
            if (path, length) not in self._samples:
                loader = build_loader(self.config, self.datasets[path], length=length)
                self._samples[path, length] = loader.num_samples
        return sum(self._samples[path, length] for path in paths)

    def tokens(self, path: str) -> int:
        """The tokens of the train split of a dataset."""
        return self.datasets[path].splits["train"].num_tokens

    def words(self) -> float:
        """The white-space words read of all datasets: of each stream the share of its epoch that was read."""
        words = {path: dataset.manifest.counts["words"]["train"] for path, dataset in self.datasets.items()}
        return sum(count / self.samples([path], length) * words[path] for path, length, count in self._counts())

    def _counts(self) -> Iterator[tuple[str, int, int]]:
        """Of each stream of the run's datasets: the path, the row length, and the samples read so far."""
        paths = {dataset.dataset_id: path for path, dataset in self.datasets.items()}
        for stream, count in self.positions.items():
            dataset_id, length = stream.split(" ")
            if dataset_id in paths:  # a checkpoint of an earlier version may have others
                yield paths[dataset_id], int(length), count

    def check_words(self) -> None:
        """Raises UsageError for a dataset whose words were not counted when it was made."""
        for path, dataset in self.datasets.items():
            if "train" not in dataset.manifest.counts.get("words", {}):
                sentence = (
                    f"--save-at words: the words of {path} were not counted when it was made; build it again, or give "
                    "tokens"
                )
                raise UsageError(sentence, "missing", option="save_at", given=path)

    def _stream(self, path: str, length: int) -> str:
        """The name of a stream."""
        return f"{self.datasets[path].dataset_id} {length}"

    def _streams(self, phase: Phase) -> list[str]:
        return [self._stream(path, phase.length) for path, _ in phase.sources]

    def _loader(self, phase: Phase, *, starts: Sequence[int] = ()) -> bertdata.Loader:
        loader = build_loader(
            self.config,
            [(self.datasets[path], weight) for path, weight in phase.sources],
            length=phase.length,
            masking=phase.masking,
            methods=self._methods,
            starts=starts,
            **self._ranks,
        )
        loader.global_batch_size = phase.rows.first
        return loader

    @property
    def positions(self) -> dict[str, int]:
        """Samples read of each stream so far."""
        return self.read | dict(zip(self._streams(self.phase), self.loader.counts(), strict=True))

    def enter(self, phase: Phase) -> None:
        """Goes on with the rows of a phase."""
        before, loader = self.phase, self.loader
        self.read, self.phase = self.positions, phase
        if (before.sources, before.length) == (phase.sources, phase.length):
            self.loader = self._loader(phase, starts=loader.starts)
            self.loader.position = loader.position
        else:
            self.loader = self._begun(phase)

    def _begun(self, phase: Phase) -> bertdata.Loader:
        """The loader of a phase whose streams go on where they were."""
        begun = [self.read.get(stream, 0) for stream in self._streams(phase)]
        loader = self._loader(phase, starts=begun if len(begun) > 1 else ())
        if len(begun) == 1:
            loader.position = begun[0]
        return loader

    @property
    def sources(self) -> Sources:
        """The datasets of the run, and in which ratio it reads their rows."""
        if len(self.plan.phases) == 1:
            return [(self.datasets[path], weight) for path, weight in self.phase.sources]
        rows = dict.fromkeys(self.datasets, 0.0)
        for phase in self.plan.phases:
            total = sum(weight for _, weight in phase.sources)
            for path, weight in phase.sources:
                rows[path] += weight / total * phase.samples()
        return [(self.datasets[path], weight) for path, weight in rows.items()]

    @property
    def names(self) -> list[str]:
        """The paths of the datasets, if the run reads several."""
        return list(self.datasets) if len(self.datasets) > 1 else []

    def first_targets(self) -> int:
        """How many targets the first rows have.

        Raises TrainingError for rows too short to mask, and UsageError for rows that a method cannot follow.
        """
        loader = self.loader
        for phase in self.plan.phases[1:]:
            if phase.masking.num_slots(phase.length) == 0:
                share = phase.masking.probability
                sentence = (
                    f"[[phase]] {phase.number}: mlm_probability {share} of rows of {phase.length} tokens is less than "
                    "one token; raise it, or length"
                )
                raise UsageError(sentence, "too-short-to-mask", option="mlm_probability", given=share)
        for method in self._methods:
            method.check_batches(self)
        most = min(loader.num_samples, self.plan.samples())
        batch = loader.read(np.arange(min(most, 1024)))
        targets = num_targets(batch)
        share = self.phase.masking.probability
        if targets == 0:
            sentence = (
                f"nothing to predict: the samples of {' and '.join(path for path, _ in self.phase.sources)} are too "
                f"short to mask {share:.0%} of them (samples {loader.num_samples}, ranks {loader.world_size}, batch "
                f"{loader.global_batch_size}); build with more text, or raise --mlm-probability"
            )
            raise TrainingError(sentence, "too-short-to-mask", option="mlm_probability", given=share)
        filled = np.full(batch.sample_ids.size, loader.length)
        if batch.attention_mask is not None:
            filled = batch.attention_mask.sum(1)
        filled = filled[:CHECKED_ROWS]
        wanted = sum(map(self.phase.masking.quota, filled.tolist()))
        found = int((batch.targets[:CHECKED_ROWS] != bertdata.IGNORE_INDEX).sum())
        policy, least = self.phase.masking.policy, 200 if self.phase.masking.policy == "bernoulli" else 0
        if policy != "uniform" and not self.begun and max(2 * found, least) < wanted:
            reason = "their words are too long, or " if policy in ("whole_word", "span") else ""
            remedy = "give --masking exact, or " if reason else ""
            sentence = (
                f"the first {counted(filled.size, 'row')} have {found:,} of the {wanted:,} targets that they should "
                f"have: {reason}most tokens are [UNK]; {remedy}build with a tokenizer for this text"
            )
            raise TrainingError(sentence, "too-short-to-mask", option="masking", given=policy)
        return targets

    def resume(self, path: Path, saved: TrainState, made_with: dict[str, Any]) -> None:
        """Move to where the checkpoint `path` was taken; `saved` is its state.

        made_with: the model of this run, by its content. Raises UsageError if a resumed run must not change an option.
        """
        self._take_rule_of(saved.loader["masking"])
        saved.made_with = made_with | saved.made_with
        now: dict[str, Any] = {"made_with": saved.made_with | made_with, "options": kept_options(self.config.flat())}
        require_resumable(saved, TrainState(**now, phases=self.saved_phases()), path)
        self.phase = self.plan.phases[saved.phase - 1]
        self.read, self.begun = dict(saved.streams), saved.step
        self.loader = self._loader(self.phase, starts=saved.loader.get("starts", ()))
        self.loader.load_state_dict(saved.loader)

    def saved_phases(self) -> list[dict[str, Any]]:
        """The phases as a checkpoint has them: with the ids of datasets in place of their paths."""
        saved = json.loads(json.dumps([asdict(phase) for phase in self.plan.phases]))
        for phase in saved:
            phase["sources"] = [[self.datasets[path].dataset_id, weight] for path, weight in phase["sources"]]
        return saved

    def source_tokens(self) -> dict[str, int]:
        """The tokens read of each dataset, by its path, padding included."""
        tokens = dict.fromkeys(self.datasets, 0)
        for path, length, count in self._counts():
            tokens[path] += count * length
        return tokens

    def epochs(self) -> dict[str, float]:
        """Of each dataset that was read in rows of this length, by its path: how often."""
        length, positions = self.phase.length, self.positions
        streams = {path: self._stream(path, length) for path in self.datasets}
        read = {path: positions[stream] for path, stream in streams.items() if stream in positions}
        return {path: count / self.samples([path], length) for path, count in read.items()}

    def shares(self) -> list[str]:
        """For each dataset of a mix: its share of the rows, its size, and how often it is read. Empty for one.

        How often is not said of several phases.
        """
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
