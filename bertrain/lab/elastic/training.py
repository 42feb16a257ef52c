"""Training sub-networks of one model, which share its weights (AutoTinyBERT, Yin et al., 2021; docs/methods.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from transformers import PreTrainedModel

from bertdata.support import UsageError
from bertrain import state
from bertrain.config import Config
from bertrain.data import Stream
from bertrain.lab.elastic import space as elastic
from bertrain.lab.elastic.space import Sizes, Space
from bertrain.lab.options import ElasticOptions
from bertrain.methods import LearnerSetting, Method
from bertrain.objectives import Learner, LossSum, Objective
from bertrain.plan import Phase


class SubNetworks(Method):
    """Sub-networks that share the weights of the model are trained together."""

    options_type = ElasticOptions

    def identity(self, learner: Learner) -> Mapping[str, str]:
        return {"elastic": self.options.elastic}

    def learner(self, learner: Learner, setting: LearnerSetting) -> Learner:
        space, number = Space(self.options.elastic, learner.model.config), self.options.sub_networks
        options: dict[str, Any] = {"isolate": learner.isolate, "seed": setting.config.seed}
        return Elastic(learner.model, learner.objectives, space=space, number=number, **options)

    def check_run(
        self, stream: Stream, learner: Learner, build_model: Callable[[Phase | None], PreTrainedModel]
    ) -> Sequence[str]:
        _elastic(learner).check_trained(stream.config.lr_scale)
        return ()

    def can_compile(self, config: Config) -> bool:
        return False

    def begin_step(self, step: int, phase: Phase, learner: Learner) -> None:
        _elastic(learner).begin_step(step)

    def facts(self, learner: Learner) -> Mapping[str, Any]:
        return _elastic(learner).facts()


def _elastic(learner: Learner) -> Elastic:
    assert isinstance(learner, Elastic)  # noqa: S101  (SubNetworks.learner made it)
    return learner


def trained_space(directory: Path) -> str:
    """--elastic of the run that wrote a checkpoint; an empty text without it, or where no run of ours wrote it."""
    has_state = (directory / state.TRAINER).exists()
    return str(state.read(directory).made_with.get("elastic") or "") if has_state else ""


class Elastic(Learner):
    """A Learner whose loss is the mean over K sub-networks: the same in all micro-batches of a step, on all ranks.

    Whoever calls it for logits, as evaluation does, sees the complete model. Activations of all K are kept until the
    backward pass. No part of a sub-network is a part of this module: its tensors are slices of the model's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        objectives: Mapping[str, Objective],
        *,
        space: Space,
        number: int,
        seed: int,
        isolate: bool = False,
    ) -> None:
        """number: K. seed: of the choice of sub-networks."""
        super().__init__(model, objectives, isolate=isolate)
        self.space, self._number, self._seed = space, number, seed
        self.leaves_unused = True
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self.use([self.space.pick(self._seed, step, index) for index in range(self._number)])

    def use(self, chosen: Sequence[Sizes]) -> None:
        """Chooses the sub-networks of the next passes."""
        self._parts = [self._part(sizes) for sizes in chosen]  # a plain list, so they are no modules of this one

    def _part(self, sizes: Sizes) -> Learner:
        small = elastic.skeleton(self.model, sizes)
        own = {name: objective.for_submodel(small) for name, objective in self.objectives.items()}
        return Learner(small, own, isolate=self.isolate)

    def forward(self, **piece: torch.Tensor) -> dict[str, LossSum]:
        of_parts = []
        for part in self._parts:
            slices = elastic.slices(self.model, part.model)
            tensors = {f"model.{name}": tensor for name, tensor in slices.items()}
            of_parts.append(functional_call(part, tensors, kwargs=piece))
        return {name: _mean([losses[name] for losses in of_parts]) for name in self.objectives}

    def check_trained(self, scales: Sequence[str]) -> None:
        """Raises UsageError if `scales`, those of --lr-scale, freeze all of the sub-network of the fewest layers."""
        small = elastic.skeleton(self.model, self.space[0])
        own = {f"model.{name}" for name, _ in small.named_parameters()}
        trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        if not any(name in own or name.startswith("objectives.") for name in trained):
            sentence = (
                f"--lr-scale {' '.join(scales)} freezes all parameters of the sub-networks with the fewest layers, "
                f"{self.space[0].layers}; leave some to train, or begin the layers of --elastic with more"
            )
            raise UsageError(sentence, "nothing-to-train", option="lr_scale", given=list(scales))

    def facts(self) -> dict[str, Any]:
        """How many sub-networks there are, and how many parameters the smallest and the largest of them have."""
        ends = [elastic.skeleton(self.model, self.space[number]) for number in (0, len(self.space) - 1)]
        least, most = (sum(parameter.numel() for parameter in small.parameters()) for small in ends)
        return {
            "number": len(self.space),
            "in_a_step": self._number,
            "least_parameters": least,
            "most_parameters": most,
        }


def _mean(losses: list[LossSum]) -> LossSum:
    """The mean of the losses of one objective.

    In float32, of which a run adds thousands in float64 without rounding: so in any order, also after a restart.
    """
    sums, correct = zip(*losses, strict=True)
    num_correct = torch.stack([torch.as_tensor(number) for number in correct]).float().mean()
    return LossSum(torch.stack(sums).mean(), num_correct)
