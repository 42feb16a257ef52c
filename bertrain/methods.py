"""What a run does beside its objectives: a Method, which others may write too.

A method has options, and hooks that a run calls in a fixed order. A program adds its own to METHODS, and another
package names its own by an entry point of the group `bertrain.methods`. docs/extending.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import click

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

GROUP = "bertrain.methods"
Carry = Callable[["Learner", "Learner", "torch.optim.Optimizer", "torch.optim.Optimizer"], Mapping[str, Any]]
"""Called with the learner before and after, and the optimizer before and after.

Gives those after what those before have learned. Returns what has changed, by name: the values before and after, for
the log.
"""


class LearnerSetting(NamedTuple):
    """What a learner is made for."""

    config: Config
    shards: bertdata.Dataset  # which has the tokenizer of all datasets of the run
    device: torch.device
    precision: str  # resolved: fp32, bf16 or fp16


class Method:
    """One method of a run. Each hook does nothing unless a subclass has it.

    A hook is called on every rank unless it says otherwise. What it returns is not checked: a method is trusted code.
    """

    options_type: ClassVar[type[Options]] = Options
    """Its options: a frozen dataclass. A run has the method if one of them is not at its default."""
    frozen_by: ClassVar[str] = ""
    """The name of the option that freezes the weights of the model: others beside them are trained."""
    name = ""
    """Its name in METHODS."""

    def __init__(self, options: Any) -> None:
        self.options = options

    # ---------------------------------------------------------------------------------------- before anything is built

    def check(self, config: Config) -> None:
        """Raises UsageError for options that do not go together. The rules of the options have been checked."""

    def loader(self, make: Callable[..., bertdata.Loader]) -> Callable[..., bertdata.Loader]:
        """Return what makes the loader of the rows to train on. It is called as `make`, by default bertdata.Loader."""
        return make

    def check_batches(self, batches: Stream) -> None:
        """Raises UsageError for a stream of rows that it cannot follow to the end of the run."""

    def identity(self, learner: Learner) -> Mapping[str, str]:
        """What a resumed run must have again, by option."""
        return {}

    # ------------------------------------------------------------------------------------------------------- the model

    def source(self, config: Config, resume: Path | None) -> str | None:
        """The weights to begin with, if not those of --init or of the checkpoint to resume from."""
        return None

    def configure(self, config: PreTrainedConfig, phase: Phase) -> None:
        """Changes a configuration before the model of a phase is built from it, with random weights."""

    def change_model(self, model: PreTrainedModel, config: Config, resume: Path | None) -> None:
        """Changes a model in place; with what a checkpoint to resume from has of it."""

    def check_model(
        self,
        config: Config,
        learner: Learner,
        phases: Sequence[Phase],
        build_model: Callable[[Phase | None], PreTrainedModel],
    ) -> Sequence[str]:
        """Raises UsageError for a model that cannot follow the phases. Returns names of parameters that it gets later.

        phases: the one under way and those ahead.
        build_model: makes the model of a phase, or without one the complete one.
        """
        return ()

    # ----------------------------------------------------------------------------------------------------- the learner

    def objectives(self, objectives: dict[str, Objective], model: PreTrainedModel, setting: LearnerSetting) -> None:
        """Adds objectives to those of --objective, or changes the weights of these.

        objectives: by name, those of --objective first.
        """

    def learner(self, learner: Learner, setting: LearnerSetting) -> Learner:
        """The learner with what the method adds, or another one for the same model and objectives.

        Another one has nothing that earlier methods added, so only the first method of a run should make one.
        """
        return learner

    def optimizer(self, optimizer: torch.optim.Optimizer, learner: Learner) -> None:
        """Changes how the optimizer steps, such as by a hook."""

    def can_compile(self, config: Config) -> bool:
        """Whether --compile auto may compile the learner."""
        return True

    # ------------------------------------------------------------------------------------------------------------ a run

    def begin_step(self, step: int, phase: Phase, learner: Learner) -> None:
        """Once before the micro-batches of a step. `step` is how many were taken."""

    def remake(self, before: Phase, after: Phase) -> Carry | None:
        """If the model is built anew between two phases: the function that carries over what was learned; else None."""
        return None

    # -------------------------------------------------------------------------------------------------- what it writes

    def plain_weights(self, model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The state dict of an ordinary model, from that of the model in training.

        Called on rank 0 in a thread, while the model trains on: use `state`, not the weights in `model`.
        """
        return state

    def export(self, model: PreTrainedModel, state: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Writes further files into the directory of a checkpoint. Called after `plain_weights`, as that is.

        state: also has the tensors of objectives, by their names in beside.pt.
        """

    def facts(self, learner: Learner) -> Mapping[str, Any]:
        """For run.json, where they are under the method's name: values of JSON. Called on rank 0."""
        return {}

    def lines(self, learner: Learner) -> Sequence[str]:
        """For people, as the run begins. Called on rank 0."""
        return ()


METHODS: dict[str, type[Method]] = {}
"""Methods that a program adds, by name: docs/extending.md."""


@cache
def _installed() -> dict[str, type[Method]]:
    """Return the methods of other packages by name. One whose import fails is a warning, once."""
    methods = {}
    for entry in entry_points(group=GROUP):
        if entry.value.startswith("bertrain."):  # of an older installation of this package
            continue
        try:
            methods[entry.name] = entry.load()
        except Exception as error:  # a package of somebody else must not stop every command
            sentence = f"the method {entry.name}, {entry.value}, cannot be imported ({error}); correct its package"
            click.echo(f"warning: {sentence}", err=True)
    return methods


def options_of_methods() -> dict[str, type[Options]]:
    """Return the options of our methods and of those of installed packages by name, then of METHODS.

    A run calls its methods in this order. Imports no module of our methods.
    """
    ours = {name: resolve_name(options) for name, (options, _) in lab.METHODS.items()}
    installed = {name: method.options_type for name, method in _installed().items()}
    return dict(sorted((ours | installed).items())) | {name: method.options_type for name, method in METHODS.items()}


def methods_of(config: Config) -> list[Method]:
    """Return the methods of a run as new objects: those of which it or a phase gives an option."""
    given, methods = {type(options): options for options in config.methods}, []
    of_phases = [option for table in config.phase for option in table.items()]
    for name, options_type in options_of_methods().items():
        usual = options_type()
        if options_type in given or any(getattr(usual, key, value) != value for key, value in of_phases):
            kind = METHODS.get(name) or _installed().get(name) or resolve_name(lab.METHODS[name][1])
            method: Method = kind(given.get(options_type, usual))
            method.name = name
            methods.append(method)
    return methods
