"""The batches of a run: datasets, loaders, streams that continue after a checkpoint, and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from bertrain.state import TrainingError, TrainState, kept_options, require_same


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


class Stream:
    """The batches of a run on one rank, from its datasets.

    Each phase has its own loader; `loader` makes the next batch. The samples of a dataset in rows of one length are a
    stream of positions, which continues in whatever phase reads it next (docs/determinism.md, Phases of a run).
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
        """datasets: by path. Raises UsageError for options that do not fit the datasets."""
        self.config, self.datasets, self._methods = config, datasets, methods
        self._num_samples: dict[tuple[str, int], int] = {}
        self._ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self.plan = Plan.of(config, self, world_size=world_size, on_gpu=on_gpu)
        self.phase = self.plan.phases[0]
        self._before: dict[str, int] = {}  # samples read of each stream before the loader of this phase
        self.step = 0  # of the next batch
        for phase in {(each.sources, each.masking.policy): each for each in self.plan.phases}.values():
            self._loader(phase)  # an invalid mix ends a run here
        self.loader = self._loader(self.phase)
        self._take_mask_rule(self.loader.state_dict()["masking"])  # the cache of a teacher decides it

    def _take_mask_rule(self, masking: Mapping[str, Any]) -> None:
        """Mask the rows of all phases by the rule of a loader's masks."""
        phases = [replace(phase, masking=phase.masking.with_rule_of(masking)) for phase in self.plan.phases]
        self.plan = replace(self.plan, phases=tuple(phases))
        self.phase = self.plan.phases[self.phase.number - 1]

    # ------------------------------------------------------------------------------------------------- sizes, for plans

    def samples(self, paths: Sequence[str], length: int) -> int:
        """Return the number of samples in an epoch of some datasets, in rows of `length` tokens."""
        for path in paths:
            if (path, length) not in self._num_samples:
                loader = build_loader(self.config, self.datasets[path], length=length)
                self._num_samples[path, length] = loader.num_samples
        return sum(self._num_samples[path, length] for path in paths)

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
        """Continue with the rows of a phase."""
        before, loader = self.phase, self.loader
        self._before, self.phase = self.positions, phase
        if (before.sources, before.options.length) == (phase.sources, phase.options.length):
            self.loader = self._loader(phase, starts=loader.starts)
            self.loader.position = loader.position
            return
        starts = [self._before.get(stream, 0) for stream in self._streams(phase)]
        self.loader = self._loader(phase, starts=starts if len(starts) > 1 else ())
        if len(starts) == 1:
            self.loader.position = starts[0]

    def resume(self, path: Path, saved: TrainState, made_with: dict[str, Any]) -> None:
        """Continue after the checkpoint `path`; `saved` is its state.

        made_with: the model of this run, by its content. Raises UsageError if a resumed run must not change an option.
        """
        self._take_mask_rule(saved.loader["masking"])
        saved.made_with = made_with | saved.made_with
        now: dict[str, Any] = {"made_with": saved.made_with | made_with, "options": kept_options(self.config.flat())}
        require_same(saved, TrainState(**now, phases=self.saved_phases()), path)
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
            **self._ranks,
        )
        loader.global_batch_size = phase.rows[0]
        return loader

    def _stream(self, path: str, length: int) -> str:
        return f"{self.datasets[path].dataset_id} {length}"

    def _streams(self, phase: Phase) -> list[str]:
        return [self._stream(path, phase.options.length) for path, _ in phase.sources]

    # ---------------------------------------------------------------------------------------------------- what was read

    @property
    def positions(self) -> dict[str, int]:
        """The number of samples read of each stream, "dataset_id length"."""
        return self._before | dict(zip(self._streams(self.phase), self.loader.counts(), strict=True))

    def saved_phases(self) -> list[dict[str, Any]]:
        """Return the phases as a checkpoint has them: with the ids of datasets instead of their paths."""
        saved = [phase.saved() for phase in self.plan.phases]
        for phase in saved:
            phase["sources"] = [[self.datasets[path].dataset_id, weight] for path, weight in phase["sources"]]
        return saved

    def _counts(self) -> Iterator[tuple[str, int, int]]:
        """Yield the path, the row length and the number of samples read of each stream of the run's datasets."""
        paths = {dataset.dataset_id: path for path, dataset in self.datasets.items()}
        for stream, count in self.positions.items():
            dataset_id, length = stream.split(" ")
            if dataset_id in paths:  # a checkpoint of an earlier version may have others
                yield paths[dataset_id], int(length), count

    def words(self) -> float:
        """Return the number of white-space words read: of each stream, the words of its dataset times its epochs."""
        counts = {path: dataset.manifest.counts["words"]["train"] for path, dataset in self.datasets.items()}
        return sum(count / self.samples([path], length) * counts[path] for path, length, count in self._counts())

    def read_by_source(self) -> dict[str, dict[str, float]]:
        """Return the tokens and epochs read of each dataset of a mix, by path; nothing for one dataset.

        Tokens include padding. Epochs are those in rows of the present length.
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
        """The datasets, each with its share of the rows of the run, as a weight."""
        if len(self.plan.phases) == 1:
            return [(self.datasets[path], weight) for path, weight in self.phase.sources]
        rows = dict.fromkeys(self.datasets, 0.0)
        for phase in self.plan.phases:
            total = sum(weight for _, weight in phase.sources)
            for path, weight in phase.sources:
                rows[path] += weight / total * phase.samples()
        return [(self.datasets[path], weight) for path, weight in rows.items()]

    def describe_mix(self) -> list[str]:
        """Return a line for each dataset of a mix: its share of the rows and its size; nothing for one dataset."""
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

    def check(self) -> int:
        """Return the number of targets in the first rows. `phase` must be the phase of the first step.

        Raises TrainingError for rows with too few targets.
        """
        for path, dataset in self.datasets.items():
            if self.config.milestones["words"] and "train" not in dataset.manifest.counts.get("words", {}):
                sentence = f"--save-at words: {path} has no count of words; build it again, or give tokens"
                raise UsageError(sentence, "missing", option="save_at", given=path)
        for phase in self.plan.phases[1:]:
            if phase.masking.num_slots(phase.options.length) == 0:
                raise self._too_few_targets(f"[[phase]] {phase.number}", phase, "it masks less than one token of a row")
        most = min(self.loader.num_samples, self.plan.samples(), 1024)
        batch = self.loader.read(np.arange(most))
        if (targets := num_targets(batch)) == 0:
            raise self._too_few_targets("the first rows", self.phase, "their samples are too short to mask")
        lengths = np.full(most, self.loader.length) if batch.attention_mask is None else batch.attention_mask.sum(1)
        wanted = sum(map(self.phase.masking.quota, lengths[:CHECKED_ROWS].tolist()))
        masked = int((batch.targets[:CHECKED_ROWS] != bertdata.IGNORE_INDEX).sum())
        policy = self.phase.masking.policy
        least = 200 if policy == "bernoulli" else 0
        if policy != "uniform" and self.step == 0 and max(2 * masked, least) < wanted:
            reason = f"they have {masked:,} of {wanted:,} targets, because most tokens are [UNK]"
            reason += ", or words are too long for --masking" * (policy in ("whole_word", "span"))
            raise self._too_few_targets("the first rows", self.phase, reason)
        return targets

    @staticmethod
    def _too_few_targets(where: str, phase: Phase, reason: str) -> TrainingError:
        sentence = (
            f"{where} of {' and '.join(path for path, _ in phase.sources)} cannot be trained on: {reason} (--masking "
            f"{phase.masking.policy}, --mlm-probability {phase.masking.probability}, rows of {phase.options.length} "
            "tokens); raise --mlm-probability or --length, give --masking exact, or build with a tokenizer for such "
            "text"
        )
        return TrainingError(sentence, "too-short-to-mask", option="mlm_probability", given=phase.masking.probability)
