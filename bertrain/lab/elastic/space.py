"""Sub-networks: smaller models whose weights are slices of a larger one's (AutoTinyBERT, Yin et al., 2021).

A sub-network has the first `layers` layers of the model and the first `width` dimensions of its hidden states. It has
the first `heads` attention heads, and of each head the first width / heads dimensions. Inside a layer it has the first
`feed_forward` dimensions. So its configuration is the model's with four other numbers. transformers can build
it, and its tensors are slices of the model's: docs/subnetworks.md.

    tensor                              part in a sub-network
    queries, keys, values               rows: the first of each of its heads; columns: the first
    the output of attention             columns: the indices of those rows
    Wqkv, Wi (fused)                    rows: the first of each stacked matrix; columns: the first
    all others                          the first of each dimension
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bertdata import key
from bertdata.support import UsageError, counted
from bertrain.lab import growth as grow
from bertrain.models.families import FUSED

HEADS = {"bert": "any", "modernbert": "same"}  # rotary positions turn pairs of a head's dimensions
"""How wide heads of a sub-network are, by type of model: at most the model's, or the same. Others have none."""
RULE = "a head has width / heads dimensions, an integer, at most as many as a head of the model (modernbert: as many)"
EXAMPLE = "layers=2:6,width=64:256:32,heads=1:4,feed_forward=128:512:64"


class Sizes(NamedTuple):
    """The four sizes that define a sub-network."""

    layers: int
    width: int  # width of hidden states
    heads: int
    feed_forward: int  # width inside a layer

    def __str__(self) -> str:
        layers, heads = counted(self.layers, "layer"), counted(self.heads, "head")
        return f"{layers}, width {self.width}, {heads}, feed-forward {self.feed_forward}"


def sizes_of(config: PreTrainedConfig) -> Sizes:
    """Return the sizes of a complete model. Raises UsageError for a family without sub-networks."""
    if (kind := config.model_type) not in HEADS:
        raise UsageError(f"{kind} has no sub-networks; give a {' or '.join(HEADS)}", "unsupported", given=kind)
    return Sizes(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size)


def check(config: PreTrainedConfig, sizes: Sizes) -> None:
    """Raise UsageError for sizes that no sub-network of a model can have."""
    full = sizes_of(config)
    too_large = [name for name, size, most in zip(Sizes._fields, sizes, full, strict=True) if not 1 <= size <= most]
    if too_large or not _heads_fit(config, sizes.width, sizes.heads):
        sentence = f"a model of {full} has no sub-network of {sizes}; give sizes from 1 to the model's, where {RULE}"
        raise UsageError(sentence, "out-of-range", option=(too_large or ["heads"])[0], given=str(sizes))


def _heads_fit(config: PreTrainedConfig, width: int, heads: int) -> bool:
    """Return whether a sub-network may combine a width and a number of heads."""
    each, rest = divmod(width, heads)
    most = config.hidden_size // config.num_attention_heads
    return rest == 0 and (each <= most if HEADS[config.model_type] == "any" else each == most)


# --------------------------------------------------------------------------------------------------------------- space


class Space:
    """The sub-networks that a run trains, numbered from 0: all sizes in --elastic for which width and heads fit.

    text: ranges FIRST:LAST or FIRST:LAST:STEP by the names of Sizes, with commas between; each last value is the
    model's. Sizes without a range are the model's. config: the model's configuration. Raises UsageError if invalid.
    """

    def __init__(self, text: str, config: PreTrainedConfig) -> None:
        full = sizes_of(config)
        ranges = _ranges(text)
        self.values = [ranges.get(name, range(size, size + 1)) for name, size in full._asdict().items()]
        """The numbers of each of the four sizes, ascending."""
        if tuple(values[-1] for values in self.values) != full:
            sentence = f"--elastic {text}: each range must end at the size of the model, {full}; write it that way"
            raise UsageError(sentence, "out-of-range", option="elastic", given=text)
        self._layers, widths, heads, self._inner = self.values
        self._pairs = [(width, number) for width in widths for number in heads if _heads_fit(config, width, number)]
        if missing := set(widths) - {width for width, _ in self._pairs}:
            sentence = f"--elastic {text}: width {min(missing)} fits none of the heads, as {RULE}; give other sizes"
            raise UsageError(sentence, "conflict", option="elastic", given=text)

    def __len__(self) -> int:
        return len(self._layers) * len(self._pairs) * len(self._inner)

    def __getitem__(self, number: int) -> Sizes:
        number, inner = divmod(number, len(self._inner))
        layer, pair = divmod(number, len(self._pairs))
        return Sizes(self._layers[layer], *self._pairs[pair], self._inner[inner])

    def __contains__(self, sizes: Sizes) -> bool:
        fits = (sizes.width, sizes.heads) in self._pairs
        return fits and sizes.layers in self._layers and sizes.feed_forward in self._inner

    def pick(self, seed: int, step: int, index: int) -> Sizes:
        """Return the sub-network `index` of a step: a function of these numbers only, and uniform over the space."""
        return self[key(seed, "subnet", step, index) % len(self)]


def _ranges(text: str) -> dict[str, range]:
    """Return the ranges in --elastic by name. Raises UsageError for an invalid text."""
    ranges: dict[str, range] = {}
    for part in map(str.strip, text.split(",")):
        match = re.fullmatch(r"(\w+)=(\d+)(?::(\d+)(?::(\d+))?)?", part)
        name, first, last, step = match.groups() if match else ("", 0, 0, 0)
        first, last, step = int(first), int(last or first), int(step or 1)
        if name not in {*Sizes._fields} - {*ranges} or not 1 <= first <= last or step < 1 or (last - first) % step:
            sentence = (
                f"--elastic {text}: {part or 'an empty part'} is not one of {', '.join(Sizes._fields)}, each once "
                f"with first:last or first:last:step, whose steps lead from first to last; write it like {EXAMPLE}"
            )
            raise UsageError(sentence, "malformed", option="elastic", given=text)
        ranges[name] = range(first, last + 1, step)
    return ranges


# ------------------------------------------------------------------------------------------------------------- slicing


def _configuration(config: PreTrainedConfig, sizes: Sizes) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    grow.shorten(small, sizes.layers)
    small.hidden_size, small.num_attention_heads, small.intermediate_size = sizes[1:]
    return small


def skeleton(model: PreTrainedModel, sizes: Sizes) -> PreTrainedModel:
    """Return a sub-network whose tensors have shapes but no data. To call it, replace them by `slices`."""
    with torch.device("meta"):
        return type(model)(_configuration(model.config, sizes))


def slices(model: PreTrainedModel, small: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a sub-network by name: views of the model's, or copies if its heads are narrower.

    Gradients reach the model's parameters through them. small: the sub-network, or its `skeleton`.
    """
    heads = model.config.num_attention_heads, small.config.num_attention_heads
    full = dict(_tensors(model))
    return {name: _first(full[name], tensor.shape, _groups(name, heads)) for name, tensor in _tensors(small)}


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _groups(name: str, heads: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """Return dimension of a tensor → (number of consecutive groups in it, number of groups to use)."""
    module = name.split(".")[-2]
    if module in FUSED:
        return {0: (FUSED[module], FUSED[module])}
    if module in ("query", "key", "value"):
        return {0: heads}
    return {1: heads} if name.endswith("attention.output.dense.weight") else {}


def _first(tensor: torch.Tensor, shape: torch.Size, groups: dict[int, tuple[int, int]]) -> torch.Tensor:
    """Return the part of a tensor with a given shape: the first entries of each dimension, or of each used group."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] == size:
            continue
        number, taken = groups.get(dim, (1, 1))
        parts = tensor.unflatten(dim, (number, -1)).narrow(dim, 0, taken).narrow(dim + 1, 0, size // taken)
        tensor = parts.flatten(dim, dim + 1)
    return tensor


@torch.no_grad()
def cut(model: PreTrainedModel, sizes: Sizes) -> PreTrainedModel:
    """Return a sub-network as a separate model, with copies of its weights, on the CPU. Call `check` first."""
    with torch.random.fork_rng(devices=[]):  # its random initial weights are replaced
        small = type(model)(_configuration(model.config, sizes))
    own = dict(_tensors(small))
    for name, part in slices(model, small).items():
        own[name].copy_(part)
    return small.train(model.training)
