"""Distillation as a method: its checks, its loader and its objective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import bertdata
from bertdata.support import UsageError
from bertrain import checkpoint
from bertrain.config import Config
from bertrain.data import Stream
from bertrain.lab.distillation.answers import TaughtLoader, TeacherCache
from bertrain.lab.distillation.objective import Distil, Teacher
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.options import DistillationOptions
from bertrain.methods import LearnerSetting, Method
from bertrain.models.families import family_of
from bertrain.models.load import check_fits, load_model, max_length
from bertrain.objectives import Learner, Objective
from bertrain.plan import Phase, longest
from bertrain.trainer import autocast_of


class Distillation(Method):
    """Train a student on a teacher's predictions as well as on the text."""

    options_type = DistillationOptions

    def __init__(self, options: DistillationOptions) -> None:
        super().__init__(options)
        self._teacher = ""
        """What it teaches and the digest of its weights; "" until they are known."""

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
        """Add the objective. Raises UsageError for a teacher that does not fit, or that has changed."""
        before = self._teacher
        objective, self._teacher = self._objective(model, setting)
        if before not in ("", self._teacher):
            sentence = (
                f"--teacher {self.options.teacher} is {self._teacher}, and the run began with {before}; give a "
                "checkpoint that does not change"
            )
            raise UsageError(sentence, "changed", option="teacher", given=self.options.teacher)
        for name in setting.config.objective.split("+"):
            objectives[name].weight *= 1 - self.options.alpha
        objectives["distil"] = objective

    def _objective(self, model: PreTrainedModel, setting: LearnerSetting) -> tuple[Distil, str]:
        """Return the teacher's objective, and what it teaches with the digest of its weights."""
        config, shards, options = setting.config, setting.shards, self.options
        vocab_size = shards.special_tokens.vocab_size
        if options.teacher_cache:
            sha256 = TeacherCache(options.teacher_cache).header["teacher"]["sha256"]
            return Distil(model, config, options, vocab_size=vocab_size), f"logits of teacher {sha256[:16]}"
        directory = checkpoint.find(Path(options.teacher), "teacher")
        teacher = load_model(directory)
        check_fits(directory, shards, teacher)
        most = max_length(teacher.config)
        if (length := longest(config)) > most:
            sentence = (
                f"rows of {length} tokens are longer than the {most} positions of --teacher {options.teacher}; "
                "give a smaller --length, or another teacher"
            )
            raise UsageError(sentence, "too-long", option="length", given=length)
        objective = Distil(model, config, options, vocab_size=vocab_size, teacher=teacher)
        computing = autocast_of(setting.device, setting.precision)

        def in_float32() -> contextlib.AbstractContextManager[Any]:  # where the student computes in half precision
            return torch.autocast(setting.device.type, enabled=False)

        halves = family_of(teacher).half
        objective.teacher = Teacher(teacher, objective, setting.device, computing if halves else in_float32)
        return objective, f"{options.kind} of teacher {fingerprint(teacher)[:16]}"
