"""What a run does beside its objectives, such as to learn from a teacher: a Method, which others may write too.

A method brings options, and hooks that a run calls in a fixed order. METHODS lists those that are known: a program adds
its own, and a package names its own by an entry point of the group `bertrain.methods`. docs/extending.md has an
example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from bertdata.errors import UsageError
from bertrain.options.fields import Excludes, Options

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    import bertdata
    from bertrain.objectives import Learner, Objective
    from bertrain.options.config import Config
    from bertrain.run.batches import Batches
    from bertrain.run.phases import Phase

GROUP = "bertrain.methods"


class Setting(NamedTuple):
    """What a learner is made for."""

    config: Config
    shards: bertdata.Dataset  # which has the tokenizer of all datasets of the run
    device: torch.device
    precision: str  # resolved: fp32, bf16 or fp16


class Method:
    """One method of a run. Each hook does nothing unless a subclass has it; all are called on every rank."""

    options_type: ClassVar[type[Options]] = Options
    """Its options: a frozen dataclass. A run has the method if one of them is given. Their names are their own."""
    excludes: ClassVar[Sequence[Excludes]] = ()
    """What does not go together with its options."""
    freezes_model: ClassVar[bool] = False
    """Whether the weights of the model stand still, and others beside them are trained."""
    name = ""
    """Its name in METHODS."""

    def __init__(self, options: Any) -> None:
        self.options = options

    # ---------------------------------------------------------------------------------------- before anything is built

    def check(self, config: Config) -> None:
        """Raises UsageError for options that do not go together. `excludes` has been checked."""

    def settles(self, config: Config) -> Mapping[str, Any]:
        """Options that follow from its own: they take the place of a recipe's and of defaults."""
        return {}

    def loader_options(self) -> Mapping[str, Any]:
        """Arguments of bertdata.Loader for the rows that are trained on."""
        return {}

    def check_batches(self, batches: Batches) -> None:
        """Raises UsageError for a stream of rows that it cannot follow to the end of the run."""

    def identity(self, learner: Learner | None) -> Mapping[str, str | None]:
        """What a resumed run must have again, by option. Without a learner: what is known before one is built."""
        return {}

    # ------------------------------------------------------------------------------------------------------- the model

    def source(self, config: Config, resume: Path | None) -> str | None:
        """The weights to begin with, if not those of --init or of the checkpoint to resume from."""
        return None

    def configure(self, config: PreTrainedConfig, phase: Phase) -> None:
        """Changes a configuration before the model of a phase is built from it, with random weights."""

    def change(self, model: PreTrainedModel, config: Config, resume: Path | None) -> None:
        """Changes a model in place; with what a checkpoint to resume from has of it."""

    def check_model(
        self,
        config: Config,
        learner: Learner,
        phases: Sequence[Phase],
        make: Callable[[Phase | None], PreTrainedModel],
    ) -> Sequence[str]:
        """Raises UsageError for a model that cannot follow the phases. Returns names of parameters that it gets later.

        phases: the one under way and those ahead. make: builds the model of a phase, or without one the complete one.
        """
        return ()

    # ----------------------------------------------------------------------------------------------------- the learner

    def objectives(self, objectives: dict[str, Objective], model: PreTrainedModel, setting: Setting) -> None:
        """Adds objectives to those of --objective, or changes the weights of these."""

    def learner(self, learner: Learner, setting: Setting) -> Learner:
        """The learner with what the method adds, or another one for the same model and objectives."""
        return learner

    def optimizer(self, optimizer: torch.optim.Optimizer, learner: Learner) -> None:
        """Changes how the optimizer steps, such as by a hook."""

    def can_compile(self, config: Config) -> bool:
        """Whether --compile auto may compile the learner."""
        return True

    def passes(self) -> int:
        """How many forward passes of a micro-batch keep their activations for one backward pass."""
        return 1

    # ------------------------------------------------------------------------------------------------------------ a run

    def begin_step(self, step: int, learner: Learner) -> None:
        """Once before the micro-batches of a step."""

    def remakes(self, before: Phase, after: Phase) -> bool:
        """Whether the model is built anew between two phases."""
        return False

    def carry(
        self, before: Learner, after: Learner, old: torch.optim.Optimizer, new: torch.optim.Optimizer
    ) -> Mapping[str, Any]:
        """Gives a learner and its optimizer what those before have learned. Returns what has changed, for the log.

        Each value of it is a pair: before, after.
        """
        return {}

    def state(self) -> Mapping[str, Any]:
        """What a killed run needs to go on: values of JSON, kept in the checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint."""

    # -------------------------------------------------------------------------------------------------- what it writes

    def weights(self, model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The state dict of an ordinary model, from that of the model in training."""
        return state

    def export(self, model: PreTrainedModel, state: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Writes further files into the directory of a checkpoint. state: that of the model in training."""

    def facts(self, learner: Learner) -> Mapping[str, Any]:
        """For run.json, where they are under the method's name."""
        return {}

    def lines(self, learner: Learner) -> Sequence[str]:
        """For people, as the run begins."""
        return ()


METHODS: dict[str, type[Method]] = {}
"""Methods by name, in the order in which a run calls them. Add your own: docs/extending.md."""
_loaded: list[bool] = []


def known_methods() -> dict[str, type[Method]]:
    """METHODS, with those of installed packages. Raises UsageError for an entry that is no method."""
    if not _loaded:
        # Not entry_points(), which asks only one of two distributions of a name, and may find an old one in a checkout.
        for entry in (entry for one in distributions() for entry in one.entry_points if entry.group == GROUP):
            try:
                METHODS.setdefault(entry.name, entry.load())
            except Exception as error:  # of a package of others
                sentence = f"the method {entry.name}, {entry.value}, cannot be imported ({error}); correct its package"
                raise UsageError(sentence, "bad-entry", given=entry.name) from None
        _loaded.append(True)
    for name, method in METHODS.items():
        if not (isinstance(method, type) and issubclass(method, Method) and issubclass(method.options_type, Options)):
            sentence = f"METHODS has {name!r}, which is no subclass of Method whose options_type is one of Options"
            raise UsageError(f"{sentence}; correct it (docs/extending.md)", "bad-entry", given=name)
    return METHODS


def methods_of(config: Config) -> list[Method]:
    """The methods of a run, anew: those that its options name, or those of a phase."""
    of_phases = (options for part in config.parts for options in part.options.methods)
    given = {type(options): options for options in (*of_phases, *config.methods)}
    methods = []
    for name, kind in known_methods().items():
        if kind.options_type in given:
            method = kind(given[kind.options_type])
            method.name = name
            methods.append(method)
    return methods
