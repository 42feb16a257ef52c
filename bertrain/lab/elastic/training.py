"""Train sub-networks of one model that share its weights (AutoTinyBERT, Yin et al., 2021; docs/subnetworks.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from bertdata.support import UsageError
from bertrain import state
from bertrain.config import Config
from bertrain.data import Stream
from bertrain.lab.elastic import space as elastic
from bertrain.lab.elastic.space import Sizes, Space
from bertrain.lab.options import ElasticOptions
from bertrain.methods import BuildModel, LearnerSetting, Method
from bertrain.objectives import Learner, LossSum
from bertrain.plan import Phase


class SubNetworks(Method):
    """Trains sub-networks that share the weights of the model."""

    options_type = ElasticOptions

    def identity(self, learner: Learner) -> Mapping[str, str]:
        return {"elastic": self.options.elastic}

    def learner(self, learner: Learner, setting: LearnerSetting) -> Learner:
        self._learner, self._seed = Elastic(learner, self.options.elastic), setting.config.seed
        self.begin_step(0)
        return self._learner

    def check_run(self, stream: Stream, learner: Learner, build_model: BuildModel) -> Sequence[str]:
        """Raise UsageError if --lr-scale freezes all parts of the sub-networks with the fewest layers."""
        small = elastic.skeleton(learner.model, self._learner.space[0])
        own = {f"model.{name}" for name, _ in small.named_parameters()}
        trained = [name for name, parameter in learner.named_parameters() if parameter.requires_grad]
        if not any(name in own or name.startswith("objectives.") for name in trained):
            scales = stream.config.lr_scale
            sentence = f"--lr-scale {' '.join(scales)} freezes all of the sub-networks with the fewest layers"
            raise UsageError(f"{sentence}; leave some to train", "nothing-to-train", option="lr_scale", given=scales)
        return ()

    def can_compile(self, config: Config) -> bool:
        return False

    def begin_step(self, step: int, phase: Phase | None = None, learner: Learner | None = None) -> None:
        chosen = range(self.options.sub_networks)
        self._learner.use([self._learner.space.pick(self._seed, step, index) for index in chosen])

    def facts(self, learner: Learner) -> Mapping[str, Any]:
        return {"number": len(self._learner.space), "in_a_step": self.options.sub_networks}


def trained_space(directory: Path) -> str:
    """Return --elastic of the run that wrote a checkpoint; "" without the option, or if no run wrote the checkpoint."""
    has_state = (directory / state.TRAINER).exists()
    return str(state.read(directory).made_with.get("elastic") or "") if has_state else ""


class Elastic(Learner):
    """A Learner whose loss is the mean over K sub-networks, the same in all micro-batches of a step and on all ranks.

    Callers of its logits, such as evaluation, get the complete model. Activations of all K are kept until the backward
    pass. Sub-networks are not submodules of this module: their tensors are slices of the model's.
    """

    def __init__(self, learner: Learner, space: str) -> None:
        """space: the text of --elastic."""
        super().__init__(learner.model, learner.objectives, isolate=learner.isolate)
        self.space = Space(space, learner.model.config)
        self.leaves_unused = True

    def use(self, chosen: Sequence[Sizes]) -> None:
        """Set the sub-networks of the next passes."""
        self._parts = []  # a plain list, so that they are no submodules
        for small in (elastic.skeleton(self.model, sizes) for sizes in chosen):
            own = {name: objective.for_submodel(small) for name, objective in self.objectives.items()}
            self._parts.append(Learner(small, own, isolate=self.isolate))

    def forward(self, **piece: torch.Tensor) -> dict[str, LossSum]:
        of_parts = []
        for part in self._parts:
            slices = elastic.slices(self.model, part.model)
            tensors = {f"model.{name}": tensor for name, tensor in slices.items()}
            of_parts.append(functional_call(part, tensors, kwargs=piece))
        return {name: _mean([losses[name] for losses in of_parts]) for name in self.objectives}


def _mean(losses: list[LossSum]) -> LossSum:
    """Return the mean of the losses of one objective.

    It is float32, so a run can add thousands of them in float64 without rounding, in any order, also after a restart.
    """
    sums, correct = zip(*losses, strict=True)
    num_correct = torch.stack([torch.as_tensor(number) for number in correct]).float().mean()
    return LossSum(torch.stack(sums).mean(), num_correct)
