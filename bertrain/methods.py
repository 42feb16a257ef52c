"""Methods: extensions of a run besides objectives. External programs can add their own.

A method has options, and hooks that a run calls in a fixed order. A program adds its own method to METHODS:
docs/extending.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from bertrain import lab
from bertrain.options import Options

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    import bertdata
    from bertrain.config import Config
    from bertrain.data import Stream
    from bertrain.objectives import Learner, Objective
    from bertrain.plan import Phase

BuildModel = Callable[["Phase | None"], "PreTrainedModel"]
Tensors = Mapping[str, "torch.Tensor"]
Carry = Callable[["Learner", "Learner", "torch.optim.Optimizer", "torch.optim.Optimizer"], Mapping[str, Any]]
"""A function that copies the learned state from a learner and its optimizer to new ones.

It returns the changes for the log: name → the values before and after.
"""


class LearnerSetting(NamedTuple):
    """The arguments of `Method.learner` that describe the run."""

    config: Config
    shards: bertdata.Dataset  # its tokenizer is that of all datasets of the run
    device: torch.device
    precision: str  # resolved: fp32, bf16 or fp16


class Method:
    """A method of a run. A subclass overrides some of these hooks. All ranks call them unless stated otherwise.

    Return values of hooks are not checked: a method is trusted code.
    """

    options_type: ClassVar[type[Options]] = Options
    """Its options: a frozen dataclass. A run has the method if one of them is not at its default."""
    frozen_by: ClassVar[str] = ""
    """The option that freezes the weights of the model, so that only added weights are trained; "" for none."""
    name = ""
    """Its name in METHODS."""

    def __init__(self, options: Any) -> None:
        self.options = options

    # ------------------------------------------------------------------------------------------- options and rows

    def loader(self, make: Callable[..., bertdata.Loader]) -> Callable[..., bertdata.Loader]:
        """Return the function that creates the loader of the training rows. make: the default, bertdata.Loader."""
        return make

    # ------------------------------------------------------------------------------------------------------ the model

    def base_model(self, config: Config, resume: Path | None) -> str | None:
        """Return the path of the initial weights if it is neither --init nor the checkpoint `resume`, else None."""
        return None

    def configure(self, config: PreTrainedConfig, phase: Phase) -> None:
        """Change the configuration of a phase's model before the model is built with random weights."""

    def change_model(self, model: PreTrainedModel, config: Config, resume: Path | None) -> None:
        """Change a model in place. resume: the checkpoint, which may have more files of the model."""

    def check_run(self, stream: Stream, learner: Learner, build_model: BuildModel) -> Sequence[str]:
        """Raise UsageError if the rows or the model do not fit the phases.

        build_model: builds the model of a phase, or the complete model for None. Returns the names of parameters that
        the model gets in a later phase.
        """
        return ()

    # ---------------------------------------------------------------------------------------------------- the learner

    def objectives(self, objectives: dict[str, Objective], model: PreTrainedModel, setting: LearnerSetting) -> None:
        """Add objectives to those of --objective, by name, or change their weights."""

    def learner(self, learner: Learner, setting: LearnerSetting) -> Learner:
        """Return a learner with the same model and objectives. Only one method of a run may return a new learner."""
        return learner

    def optimizer(self, optimizer: torch.optim.Optimizer, learner: Learner) -> None:
        """Change the steps of the optimizer, for example with a hook of torch."""

    def can_compile(self, config: Config) -> bool:
        """Return whether --compile auto may compile the learner."""
        return True

    # --------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int, phase: Phase, learner: Learner) -> None:
        """Prepare a step before its micro-batches. step: number of steps before it."""

    def remake(self, before: Phase, after: Phase) -> Carry | None:
        """Return a function that fills the model of the phase `after`, or None if `before` has the same model."""
        return None

    # --------------------------------------------------------------------------------------------------- a checkpoint

    def identity(self, learner: Learner) -> Mapping[str, str]:
        """Return values that must not change when a run resumes: option → value."""
        return {}

    def facts(self, learner: Learner) -> Mapping[str, Any]:
        """Return values for run.json and for the first lines of the run. Called on rank 0."""
        return {}

    def export(self, model: PreTrainedModel, weights: Tensors, beside: Tensors, directory: Path) -> Tensors:
        """Return the state dict of an ordinary model, and write more files to the directory of a checkpoint.

        weights: the state dict of the model. beside: the tensors of objectives. Use these and not the tensors in
        `model`: the hook is called on rank 0 in a thread while the model trains.
        """
        return weights


METHODS: dict[str, type[Method]] = {}
"""Methods that a program adds, by name: docs/extending.md."""


def options_of_methods() -> dict[str, type[Options]]:
    """Return the options of the built-in methods by name, then those of METHODS. A run calls its methods in this order.

    Does not import the built-in methods.
    """
    ours = {name: resolve_name(options) for name, (options, _) in lab.METHODS.items()}
    return ours | {name: method.options_type for name, method in METHODS.items()}


def methods_of(config: Config) -> list[Method]:
    """Return new objects for the methods of a run: those with an option that the run or a phase sets."""
    given, methods = {type(options): options for options in config.methods}, []
    of_phases = [option for table in config.phase for option in table.items()]
    for name, options_type in options_of_methods().items():
        usual = options_type()
        if options_type in given or any(getattr(usual, key, value) != value for key, value in of_phases):
            kind = METHODS.get(name) or resolve_name(lab.METHODS[name][1])
            method: Method = kind(given.get(options_type, usual))
            method.name = name
            methods.append(method)
    return methods
