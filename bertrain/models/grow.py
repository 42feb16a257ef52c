"""Growth along a run: a model with few layers becomes one with more, and its optimizer goes on (docs/growing.md).

The grown model is built as a run that begins with so many layers builds it. Then each of its tensors takes the weights
and the optimizer's moments of the tensor that it comes from:

    outside the layers      the tensor of the same name
    layer i < L             layer i, where L is the number of layers before
    layer i ≥ L, stack      layer i mod L (StackBERT, Gong et al., 2019; G_stack, Du et al., 2024)
    layer i ≥ L, fresh      none: random weights, and moments that begin at 0

So weights and moments always come from one tensor (as in Shen et al., 2022), and growth is a function of a checkpoint.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bertdata.errors import UsageError
from bertrain.models.encoder import Encoder
from bertrain.models.families import layers_of

_SHARES_PARTS = ("deberta", "deberta-v2", "mpnet")  # such as embeddings of distances, which stand after the layers


def shorten(config: PreTrainedConfig, layers: int) -> None:
    """Makes a configuration that of a model's first layers. Raises UsageError if it has fewer."""
    if layers > (number := getattr(config, "num_hidden_layers", 0)):
        sentence = f"--grow begins with {layers}, and the number of layers of --model is {number}; end with {number}"
        raise UsageError(sentence, "out-of-range", option="grow", given=layers)
    kinds = getattr(config, "layer_types", None)  # of attention, one for each layer
    try:
        config.num_hidden_layers = layers
    except NotImplementedError:
        sentence = f"--grow cannot give {config.model_type} another number of layers; leave it out"
        raise UsageError(sentence, "unsupported", option="grow") from None
    if kinds:
        config.layer_types = list(kinds[:layers])


def check_depth(full: PreTrainedModel, grow: str, layers: int, *, freezes: bool) -> None:
    """Raises UsageError for a model that cannot grow, or whose number of layers is not `layers`, the last of --grow.

    freezes: whether --freeze-trunk was given.
    """
    kind = full.config.model_type
    if freezes and kind in _SHARES_PARTS:
        sentence = f"--freeze-trunk cannot freeze the parts that the layers of {kind} share; leave it out"
        raise UsageError(sentence, "unsupported", option="freeze_trunk")
    if _prefix(full) is None:
        sentence = f"--grow cannot tell the layers of {kind} apart, or they share weights; leave it out"
        raise UsageError(sentence, "unsupported", option="grow", given=grow)
    number = len(layers_of(full))
    if layers != number:
        sentence = (
            f"--grow {grow} ends with {layers}, and the number of layers of --model is {number}; end with {number}"
        )
        raise UsageError(sentence, "out-of-range", option="grow", given=grow)


def check_outside(full: PreTrainedModel, first: PreTrainedModel) -> None:
    """Raises UsageError for a model that has tensors outside its layers for each of them. first: its first stage."""
    prefix = str(_prefix(full))
    shapes = [
        {name: tensor.shape for name, tensor in model.named_parameters() if not name.startswith(prefix)}
        for model in (full, first)
    ]
    if differing := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
        sentence = (
            f"--grow cannot add layers to {full.config.model_type}: {differing[0]}, which is outside its layers, "
            "depends on their number; leave it out"
        )
        raise UsageError(sentence, "unsupported", option="grow")


@torch.no_grad()
def carry(
    before: Encoder, after: Encoder, old: torch.optim.Optimizer, new: torch.optim.Optimizer, *, stack: bool
) -> None:
    """Gives a grown Learner the weights of the one before, and its optimizer the moments: see the top of this file."""
    sources = dict(before.named_parameters())
    prefix, number = str(_prefix(before.model)), len(layers_of(before.model))
    for name, parameter in after.named_parameters():
        origin = _source(name, f"model.{prefix}", number, stack=stack)
        source = sources.get(origin) if origin else None
        if source is None:
            continue
        if parameter.shape != source.shape:
            sentence = (
                f"--model has changed since the run began: {name} was {list(source.shape)} and is now "
                f"{list(parameter.shape)}; put the file back as it was"
            )
            raise UsageError(sentence, "other-settings", option="model")
        parameter.copy_(source)
        if moments := old.state.get(source):
            new.state[parameter] = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in moments.items()
            }
    buffers = dict(before.named_buffers())
    for name, buffer in after.named_buffers():
        if not name.startswith("objectives."):
            continue  # those of objectives are such as a queue of earlier rows
        if name not in buffers or buffers[name].shape != buffer.shape:
            was = list(buffers[name].shape) if name in buffers else "not there"
            sentence = (
                f"--grow cannot keep the buffer {name}, which was {was} and is {list(buffer.shape)} in the larger "
                "model; make it independent of the number of layers, or leave --grow out"
            )
            raise UsageError(sentence, "bad-entry", option="grow")
        buffer.copy_(buffers[name])


def freeze(model: PreTrainedModel, layers: int) -> None:
    """Freezes the first layers and all that lies below them, such as embeddings; what lies above is trained.

    Frozen parameters stay in the optimizer, which keeps their moments and passes them over.
    """
    first_above = next(layers_of(model)[layers].parameters())
    for parameter in model.base_model.parameters():
        if parameter is first_above:
            return
        parameter.requires_grad_(False)


def _prefix(model: PreTrainedModel) -> str | None:
    """What the names of a model's layers begin with; None where they are not one list of modules."""
    layers = layers_of(model)
    return next((f"{name}." for name, module in model.named_modules() if len(layers) and module is layers), None)


def _source(name: str, prefix: str, layers: int, *, stack: bool) -> str | None:
    """The name of the tensor that a tensor of a grown model comes from. layers: how many there were before."""
    if not name.startswith(prefix):
        return name
    number, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{int(number) % layers}.{rest}" if stack or int(number) < layers else None
