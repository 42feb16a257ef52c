"""The options of the built-in methods. This module does not import torch: help and errors of every command need it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import click

from bertrain.options import ABOVE_0, COUNT, TEXT, WEIGHT, Check, Either, Kind, Needs, Options, choice, option, texts

T = TypeVar("T", bound=Options)
JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print the result as one JSON object on the last line.")
OF_ROWS = ("length", "mlm_probability", "masking", "mask_fraction", "random_fraction", "shuffle", "isolate_documents")
"""Options of a student's run that affect its rows and masks, besides its data and seed."""


def from_flags(kind: type[T], flags: Mapping[str, Any]) -> T:
    """Return options from the flags of a command line; None means that a flag is missing. Raises UsageError."""
    given = {name: value for name, value in flags.items() if value is not None}
    options = kind(**given)
    for rule in kind.rules:
        rule.require(options, given)
    return options


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the names and both values of options that differ; "" if none do."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} → {now.get(name)}" for name in names)


class Lora(NamedTuple):
    """The parsed parts of --lora."""

    rank: int
    alpha: int
    four_bits: bool
    target: str  # a regular expression; "" for all linear maps of the layers


def parse_lora(given: str) -> Lora:
    """Return the parts of r=8,alpha=16,bits=4,target=query|value. Raises ValueError or re.error for an invalid text."""
    match = re.fullmatch(r"r=(0*[1-9]\d*),alpha=(0*[1-9]\d*)(,bits=4)?(?:,target=(.+))?", str(given))
    if not match:
        raise ValueError
    re.compile(match[4] or "")
    return Lora(int(match[1]), int(match[2]), bool(match[3]), match[4] or "")


LORA = Kind(
    "r=8,alpha=16, with integers above 0, and after them bits=4 or target=query|value, a regular expression, if needed",
    lambda given: parse_lora(given) and given,
)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Options):
    lora: str = option("", LORA)
    """Train an adapter on the weights of --init, which are frozen: r=8,alpha=16. r: rank; alpha: scale (alpha / r).
    bits=4 and target=PATTERN may follow (docs/adapters.md).
    """
    rules = (Needs(("lora",), lambda c: c.init, "--init, the weights to freeze"),)


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(Options):
    elastic: str = option("", TEXT)
    """Train sub-networks that share the model's weights, for bertrain search: their sizes, such as
    layers=2:6,width=64:256:32,heads=1:4,feed_forward=128:512:64 (first:last, or first:last:step; docs/subnetworks.md).
    """
    sub_networks: int = option(2, COUNT)
    """Number of sub-networks in a step with --elastic."""
    rules = (
        Needs(("sub_networks",), lambda c: c.elastic, "--elastic"),
        Either(("elastic", "lora", "layers", "discriminator"), "each changes which weights are trained"),
        Either(("elastic", "trains"), "sub-networks train all their weights"),
        Either(("elastic", "gradient_checkpointing"), "the weights of a sub-network exist only in the forward pass"),
        Check("compile", lambda c: not c.elastic or c.compile != "on", "auto or off with --elastic"),
    )


@dataclass(frozen=True, kw_only=True)
class GrowthOptions(Options):
    layers: int | None = option(None, COUNT, phase=True, in_files=True)
    """Number of layers: the model has its first ones alone, and grows at the next phase that has more."""
    grow_by: str = option("stack", choice("stack", "fresh"))
    """Weights of new layers where a [[phase]] has more layers. stack: copies of the layers below. fresh: random
    weights.
    """
    rules = (Either(("init", "layers"), "a model that grows begins with random weights"),)


@dataclass(frozen=True, kw_only=True)
class ReplacedOptions(Options):
    discriminator: str = option("", TEXT, resume="content")
    """Model to train to find the tokens that --model, a smaller one, has replaced (ELECTRA): a preset, a configuration
    or its directory, as for --model. It is saved in discriminator/ of each checkpoint.
    """
    discriminator_weight: float = option(50.0, ABOVE_0)
    """Weight of the discriminator's loss; the loss of the masked tokens has the weight 1."""
    share_embeddings: str = option("difference", choice("difference", "tied", "none"))
    """Token embeddings of the discriminator. difference: those of --model, which its loss does not change, plus its own
    (DeBERTaV3). tied: those of --model, which both losses change (ELECTRA). none: its own.
    """
    rules = (Needs(("discriminator_weight", "share_embeddings"), lambda c: c.discriminator, "--discriminator"),)


def _kind(c: Any) -> str:
    """Return --distil, resolved: logits, relations or hidden; "" without a teacher."""
    if not (c.teacher or c.teacher_cache):
        return ""
    return str(c.distil) if c.distil != "auto" else "logits" if c.teacher_cache else "relations"


def _same_rows(c: Any) -> bool:
    """Return whether all phases have the same options of rows and masks."""
    return all(len({texts(table.get(name, getattr(c, name))) for table in c.phase}) < 2 for name in ("data", *OF_ROWS))


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(Options):
    teacher_cache: str = option("", TEXT, resume="content")
    """Directory of stored predictions of a teacher, written by bertrain teacher."""
    teacher: str = option("", TEXT, resume="content")
    """Directory of a teacher that runs during training: a run or a checkpoint."""
    distil: str = option("auto", choice("auto", "logits", "relations", "hidden"))
    """What to learn from a teacher: its logits (Hinton, 2015), the relations of its queries, keys and values
    (MiniLMv2), or its hidden states and attention (TinyBERT). auto: logits with --teacher-cache, relations with
    --teacher.
    """
    distil_layers: str = option("uniform", choice("uniform", "last"))
    """Layers that --distil hidden compares. uniform: every layer of the student with evenly spaced layers of the
    teacher. last: only the last.
    """
    alpha: float = option(0.5, WEIGHT)
    """Weight of the teacher's loss; the loss on the text has the weight 1 - alpha."""
    temperature: float = option(1.0, ABOVE_0)
    """Temperature of the teacher's and the student's logits, for --distil logits."""
    rules = (
        Either(("teacher_cache", "teacher")),
        Needs(("distil", "alpha"), _kind, "a --teacher-cache or a --teacher"),
        Needs(("distil_layers",), lambda c: _kind(c) == "hidden", "--distil hidden and its teacher"),
        Needs(("temperature",), lambda c: _kind(c) == "logits", "--distil logits and its teacher"),
        Check(
            "distil",
            lambda c: _kind(c) in ("", "logits") or not (c.teacher_cache or c.layers),
            "logits, as a --teacher-cache has nothing else, and phases with layers change the layers to compare",
        ),
        Check(
            "distil_layers",
            lambda c: not (c.elastic and _kind(c) == "hidden" and c.distil_layers == "uniform"),
            "last, as the sub-networks of --elastic have different layers",
        ),
        Check(
            "compile",
            lambda c: c.compile != "on" or not c.gradient_checkpointing or _kind(c) in ("", "logits"),
            "auto or off, as --gradient-checkpointing computes the layers again that --distil {distil} reads",
        ),
        Check(
            "teacher_cache",
            lambda c: not c.teacher_cache or (len(c.data) < 2 and _same_rows(c)),
            "a --teacher, as a cache has answers to rows of one dataset, of one length, with one kind of masks",
        ),
    )
    kind = property(_kind)
