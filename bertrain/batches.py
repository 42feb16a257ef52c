"""The stream of batches of a run: what it reads at each step, and how it goes on after a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import bertdata
from bertdata.errors import StateError, UsageError
from bertrain import assemble, feed
from bertrain.config import Config
from bertrain.plan import Plan
from bertrain.runtime.log import Sources
from bertrain.runtime.watch import TrainingError


class Batches:
    """The batches of a run, for one rank.

    Along the run the rows may become longer, more in a step, and masked by another share. A change of length or masking
    is another loader; `loader` is the one of the next batch.
    """

    def __init__(self, config: Config, sources: Sources, *, rank: int = 0, world_size: int = 1) -> None:
        """Raises UsageError for options that do not fit the datasets, and for a teacher's cache of another stream."""
        self.config, self.sources = config, sources
        self._ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
        num_samples = assemble.loader(config, sources, **self._ranks, with_answers=False).num_samples
        self.plan = Plan.of(config, num_samples=num_samples, world_size=world_size)
        self.loader = self._loader(config.length, self.plan.masking(config))
        self.earlier_tokens = [0] * len(sources)
        """The tokens read from each source in rows of --length, once they are of --long-length."""

    def _loader(self, length: int, masking: bertdata.Masking) -> bertdata.Loader:
        return assemble.loader(self.config, self.sources, length=length, masking=masking, **self._ranks)

    def first_targets(self) -> int:
        """How many targets the first rows have.

        Raises TrainingError for rows too short to mask, and UsageError for a teacher's cache that ends before the run.
        """
        config, loader = self.config, self.loader
        for _, share in config.mask_shares[1:]:
            if bertdata.Masking(probability=share, policy=config.masking).num_slots(config.length) == 0:
                sentence = (
                    f"--mlm-probability {config.mlm_probability}: {share} of rows of {config.length} tokens is less "
                    "than one token; raise it, or --length"
                )
                raise UsageError(sentence, "too-short-to-mask", option="mlm_probability", given=config.mlm_probability)
        num_samples = loader.num_samples
        if loader.teacher_cache is not None:
            num_samples = self._answered()
        targets = feed.num_targets(loader.read(np.arange(min(num_samples, 1024))))
        if targets == 0:
            assert loader.masking is not None  # noqa: S101  (a run always masks)
            sentence = (
                f"nothing to predict: the samples of {' and '.join(path for path, _ in config.sources)} are too short "
                f"to mask {loader.masking.probability:.0%} of them (samples {loader.num_samples}, ranks "
                f"{loader.world_size}, batch {loader.global_batch_size}); build with more text, or raise "
                "--mlm-probability"
            )
            raise TrainingError(sentence, "too-short-to-mask", option="mlm_probability", given=config.mlm_probability)
        return targets

    def _answered(self) -> int:
        """The samples of the run, all of which the teacher's cache must have."""
        num_samples = self.plan.samples(self.plan.steps)
        if self.loader.variants is not None:  # after which the samples repeat
            num_samples = min(num_samples, self.loader.variants * self.loader.num_samples)
        try:
            self.loader.read(np.array([num_samples - 1]))
        except UsageError:
            if self.config.budget:
                sentence = (
                    f"how many samples --budget {self.config.budget} will read is not known, and --teacher-cache "
                    f"{self.config.teacher_cache} has a last one; give --steps, or a cache of all samples of its "
                    "--variants"
                )
                raise UsageError(sentence, "conflict", option="budget", given=self.config.budget) from None
            raise
        return num_samples

    def resume(self, directory: Path, saved: dict[str, Any]) -> None:
        """Moves the stream to where a checkpoint was taken. saved: what its trainer.json says.

        Raises UsageError if the options give another stream.
        """
        state = saved["loader"]
        is_long = self.config.long_length is not None and state["length"] == self.config.long_length
        planned = self.plan.masking(self.config, is_long=is_long)
        masking = self._masking_after(state, planned)
        self.loader = self._loader(self.config.longest if is_long else self.config.length, masking)
        try:
            self.loader.load_state_dict(state if masking is planned else state | {"masking": masking.state()})
        except StateError as error:
            seed = "seed" if self.config.data_seed is None else "data_seed"
            for option, name in (("length", "length"), (seed, "seed"), ("shuffle", "shuffle")):
                if state[name] != (given := self.loader.state_dict()[name]):
                    flag = option.replace("_", "-")
                    sentence = (
                        f"{directory.parent} was begun with --{flag} {state[name]}; use {state[name]} again, or "
                        "another --out"
                    )
                    raise UsageError(sentence, "other-settings", option=option, given=given) from None
            sentence = f"{directory.parent} was begun with other options: {error}; give the same, or another --out"
            raise UsageError(sentence, "other-settings", option="out", given=str(directory.parent)) from None
        self.earlier_tokens = saved["earlier_tokens"]

    def _masking_after(self, state: dict[str, Any], planned: bertdata.Masking) -> bertdata.Masking:
        """How a stream goes on: as its state says up to its position, and from there as is planned.

        The two differ where time decided when the share changed, or where the run has become longer. `planned` where
        the state has other rules, which the loader then refuses.
        """
        position, then = state["position"], bertdata.Masking(**state["masking"])
        read = tuple(pair for pair in then.later if pair[0] < position)
        shares = {then.probability, *(share for _, share in read)}
        known = {share for _, share in self.config.mask_shares}
        if replace(then, probability=0.0, later=()) != replace(planned, probability=0.0, later=()) or shares - known:
            return planned
        if self.config.budget:
            return replace(planned, probability=then.probability, later=read)
        share = [part for part in ((0, planned.probability), *planned.later) if part[0] <= position][-1][1]
        last = read[-1][1] if read else then.probability
        changed = ((position, share),) if position and share != last else ()
        ahead = tuple(pair for pair in planned.later if pair[0] > position)
        return replace(planned, probability=then.probability, later=(*read, *changed, *ahead))

    def prepare(self, scheduled: int) -> None:
        """Gives the next batch the length, the rows and the share of masked tokens of a step of the schedule."""
        config, plan = self.config, self.plan
        if config.long_length and scheduled >= plan.long_from and self.loader.length != config.long_length:
            self.earlier_tokens = self.source_tokens
            self.loader = self._loader(config.long_length, plan.masking(config, is_long=True))
        if config.budget:
            self._change_masking(scheduled)
        self.loader.global_batch_size = plan.rows(scheduled)

    def _change_masking(self, scheduled: int) -> None:
        """With a budget the time decides when the share of masked tokens changes; the stream then says where it did."""
        share = [share for begin, share in self.config.mask_shares if begin * self.plan.steps <= scheduled][-1]
        masking, position = self.loader.masking, self.loader.position
        assert masking  # noqa: S101  (rows of a run are masked)
        if share == masking.parts[-1].probability:
            return
        later = (*masking.later, (position, share))
        masking = replace(masking, later=later) if position else replace(masking, probability=share)
        self.loader = self._loader(self.loader.length, masking)
        self.loader.position = position

    @property
    def source_tokens(self) -> list[int]:
        """The tokens read from each source, padding included."""
        tokens = (count * self.loader.length for count in self.loader.counts())
        return [earlier + later for earlier, later in zip(self.earlier_tokens, tokens, strict=True)]

    def shares(self) -> list[str]:
        """For each dataset of a mix: its share of the rows, its size, and how often the run reads it. Empty for one."""
        if len(self.sources) == 1:
            return []
        counts, total = self.loader.counts(self.plan.samples(self.plan.steps)), sum(self.loader.weights)
        parts = zip(self.config.sources, self.loader.sources, self.loader.weights, counts, strict=True)
        lines = []
        for (path, _), source, weight, count in parts:
            often = "" if self.config.budget else f", read {count / source.num_samples:.2g} times"
            lines.append(f"{path}: {weight / total:.4g} of the rows, {source.num_samples:,} samples an epoch{often}")
        return lines
