"""Growth along a run: a model with few layers becomes one with more, and its optimizer continues (docs/growth.md).

The grown model is built as in a run that begins with its number of layers. Then the weights and moments of
each tensor are copied from a source tensor:

    outside the layers      the tensor of the same name
    layer i < L             layer i, where L is the number of layers before
    layer i ≥ L, stack      layer i mod L (StackBERT, Gong et al., 2019; G_stack, Du et al., 2024)
    layer i ≥ L, fresh      none: random weights, and moments that begin at 0

So weights and moments always come from one tensor (as in Shen et al., 2022), and growth is a function of a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bertdata.support import UsageError
from bertrain.data import Stream
from bertrain.lab.options import GrowthOptions
from bertrain.methods import BuildModel, Carry, Method
from bertrain.models.families import layers_of
from bertrain.objectives import Learner
from bertrain.plan import Phase


class Growth(Method):
    """Begins with the first layers of the model, and adds layers in later phases."""

    options_type = GrowthOptions
    _all_layers = 0  # number of layers of the complete model

    def configure(self, config: PreTrainedConfig, phase: Phase) -> None:
        if layers := _layers(phase):
            shorten(config, layers)

    def check_run(self, stream: Stream, learner: Learner, build_model: BuildModel) -> Sequence[str]:
        """Raise UsageError for a model that cannot grow, and if a phase has fewer layers than the one before."""
        deepest = build_model(None)
        depths = [_layers(phase) for phase in stream.plan.phases]
        if not any(depths):
            sentence = f"--grow-by {self.options.grow_by} needs a [[phase]] with layers; give that too, or leave it out"
            raise UsageError(sentence, "needs-option", option="grow_by", given=self.options.grow_by)
        check_depths(deepest, depths, build_model(stream.plan.phases[stream.phase.number - 1]))
        self._all_layers = len(layers_of(deepest))
        return [name for name, _ in deepest.named_parameters()]

    def remake(self, before: Phase, after: Phase) -> Carry | None:
        numbers = {_layers(phase) or self._all_layers for phase in (before, after)}
        return partial(carry, stack=self.options.grow_by == "stack") if len(numbers) > 1 else None


def _layers(phase: Phase) -> int | None:
    """Return the number of layers in a phase."""
    return phase.options.method_options(GrowthOptions).layers


def shorten(config: PreTrainedConfig, layers: int) -> None:
    """Change a configuration to a model with only its first layers. Raises UsageError if it has fewer."""
    if layers > (number := getattr(config, "num_hidden_layers", 0)):
        sentence = f"a phase has {layers} layers, and --model has {number}; give at most {number}"
        raise UsageError(sentence, "out-of-range", option="layers", given=layers)
    kinds = getattr(config, "layer_types", None)  # kinds of attention, one for each layer
    try:
        config.num_hidden_layers = layers
    except NotImplementedError:
        sentence = f"{config.model_type} cannot have a different number of layers; leave layers out of the phases"
        raise UsageError(sentence, "unsupported", option="layers") from None
    if kinds:
        config.layer_types = list(kinds[:layers])


def check_depths(full: PreTrainedModel, depths: Sequence[int | None], first: PreTrainedModel) -> None:
    """Raise UsageError for a model that cannot grow, or cannot have these numbers of layers in this order.

    first: the model of the first phase, whose tensors outside the layers must have the names and shapes of the last.
    """
    prefix = _prefix(full)
    outside = [
        {(name, weight.shape) for name, weight in model.named_parameters() if not name.startswith(str(prefix))}
        for model in (full, first)
    ]
    if prefix is None or outside[0] != outside[1]:
        sentence = (
            f"the layers of {full.config.model_type} cannot be told apart, share weights, or other weights depend on "
            "their number; leave layers out of the phases"
        )
        raise UsageError(sentence, "unsupported", option="layers")
    for depth in filter(None, depths):
        shorten(copy.deepcopy(full.config), depth)
    number = len(layers_of(full))
    numbers = [depth or number for depth in depths]
    if numbers != sorted(numbers) or numbers[-1] != number:
        sentence = f"the phases have {numbers} layers, --model {number}; give rising numbers, none in the last phase"
        raise UsageError(sentence, "out-of-range", option="layers", given=numbers)


@torch.no_grad()
def carry(
    before: Learner, after: Learner, old: torch.optim.Optimizer, new: torch.optim.Optimizer, *, stack: bool
) -> Mapping[str, Any]:
    """Copy the weights and moments of a Learner to a grown one and its optimizer, by the rules at the top of this file.

    Return the old and the new number of layers.
    """
    sources = dict(before.named_parameters())
    prefix, number = str(_prefix(before.model)), len(layers_of(before.model))
    for name, parameter in after.named_parameters():
        origin = _source(name, f"model.{prefix}", number, stack=stack)
        source = sources.get(origin) if origin else None
        if source is None:
            continue
        parameter.copy_(source)
        if moments := old.state.get(source):
            new.state[parameter] = copy.deepcopy(moments)
    buffers = dict(before.get_submodule("objectives").named_buffers())
    for name, buffer in after.get_submodule("objectives").named_buffers():  # such as a queue of earlier rows
        if name not in buffers or buffers[name].shape != buffer.shape:
            sentence = f"the buffer objectives.{name} changes its shape in a model of more layers; give it one shape"
            raise UsageError(f"{sentence}, or leave layers out of the phases", "bad-entry", option="layers")
        buffer.copy_(buffers[name])
    return {"layers": [len(layers_of(learner.model)) for learner in (before, after)]}


def _prefix(model: PreTrainedModel) -> str | None:
    """Return the prefix of the names of a model's layers; None if they are not one list of modules."""
    layers = layers_of(model)
    return next((f"{name}." for name, module in model.named_modules() if len(layers) and module is layers), None)


def _source(name: str, prefix: str, layers: int, *, stack: bool) -> str | None:
    """Return the name of the source of a grown model's tensor. layers: number of layers before the growth."""
    if not name.startswith(prefix):
        return name
    number, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{int(number) % layers}.{rest}" if stack or int(number) < layers else None
