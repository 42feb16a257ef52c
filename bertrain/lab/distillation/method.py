"""Distillation as a method: its checks, its loader and its objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

import bertdata
from bertrain import checkpoint
from bertrain.config import Config
from bertrain.data import Stream
from bertrain.lab.distillation.answers import TaughtLoader, TeacherCache
from bertrain.lab.distillation.objective import Distil, Teacher
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.options import DistillationOptions
from bertrain.methods import LearnerSetting, Method
from bertrain.models.families import family_of
from bertrain.models.load import check_fits, check_length, load_model
from bertrain.objectives import Learner, Objective
from bertrain.plan import Phase, longest
from bertrain.trainer import autocast_of


class Distillation(Method):
    """Train a student on a teacher's predictions as well as on the text."""

    options_type = DistillationOptions

    def __init__(self, options: DistillationOptions) -> None:
        super().__init__(options)
        self._directory: Path | None = None  # of the teacher, for all phases, as a run under way writes newer ones

    def can_compile(self, config: Config) -> bool:
        return self.options.kind == "logits" or not config.gradient_checkpointing

    def identity(self, learner: Learner) -> Mapping[str, str]:
        return {"teacher": self._teacher}

    def loader(self, make: Callable[..., bertdata.Loader]) -> Callable[..., bertdata.Loader]:
        return partial(TaughtLoader, teacher_cache=self.options.teacher_cache) if self.options.teacher_cache else make

    def check_run(
        self, stream: Stream, learner: Learner, build_model: Callable[[Phase | None], PreTrainedModel]
    ) -> Sequence[str]:
        """A cache must have all samples of the run, or all of its epochs, after which they repeat."""
        if not self.options.teacher_cache:
            return ()
        loader, num_samples = stream.loader, stream.plan.samples()
        if loader.variants is not None:
            num_samples = min(num_samples, loader.variants * loader.num_samples)
        loader.read(np.array([num_samples - 1]))
        return ()

    def objectives(self, objectives: dict[str, Objective], model: PreTrainedModel, setting: LearnerSetting) -> None:
        """Add the objective. Raises UsageError for a teacher that does not fit."""
        config, shards, options = setting.config, setting.shards, self.options
        for name in config.objective.split("+"):
            objectives[name].weight *= 1 - options.alpha
        if options.teacher_cache:
            teacher, sha256 = None, TeacherCache(options.teacher_cache).header["teacher"]["sha256"]
        else:
            directory = self._directory = self._directory or checkpoint.find(Path(options.teacher), "teacher")
            teacher = load_model(directory)
            check_fits(directory, shards, teacher)
            check_length(longest(config), teacher.config, directory)
            sha256 = fingerprint(teacher)
        self._teacher = f"{options.kind} of teacher {sha256[:16]}"
        vocab_size = shards.special_tokens.vocab_size
        objective = objectives["distil"] = Distil(model, config, options, vocab_size=vocab_size, teacher=teacher)
        if teacher:
            precision = setting.precision if family_of(teacher).half else "fp32"
            objective.teacher = Teacher(teacher, objective, setting.device, autocast_of(setting.device, precision))
