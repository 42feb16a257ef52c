"""Optimizers by name, their parameter groups, and factors on the learning rate."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bertdata.support import UsageError
from bertrain.config import Config, pick
from bertrain.optim.adam import Lamb, StableAdamW
from bertrain.optim.muon import Muon, hidden_matrices


def build(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer in --optimizer for the trainable parameters of a module, with the factors of --lr-scale.

    config: with resolved precision; auto counts as fp32. Raises UsageError for an unknown optimizer.
    """
    optimizer = pick(OPTIMIZERS, config.optimizer, "--optimizer")(module, config)
    if config.lr_scale:
        _scale_rates(optimizer, module, config)
    return optimizer


def _adam(kind: Any, module: torch.nn.Module, config: Config, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer with Adam's moments and decoupled weight decay (Loshchilov and Hutter, 2019)."""
    groups, betas = parameter_groups(module, config.weight_decay), (config.beta1, config.beta2)
    return kind(groups, lr=0.0, betas=betas, eps=config.epsilon, **options)


def muon(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return Muon for the hidden matrices of a model and AdamW for the other parameters. module: a Learner."""
    model: Any = module.model
    matrices = hidden_matrices(model)
    if not matrices:
        sentence = f"--optimizer muon: {model.config.model_type} has no linear layers; give adamw"
        raise UsageError(sentence, "unsupported", option="optimizer", given="muon")
    return Muon(
        matrices,
        parameter_groups(module, config.weight_decay, without={parameter for parameter, _ in matrices}),
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
        rate_scale=config.muon_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
    )


OPTIMIZERS: dict[str, Callable[[torch.nn.Module, Config], torch.optim.Optimizer]] = {
    "adamw": partial(_adam, torch.optim.AdamW, fused=True),
    "muon": muon,
    "stableadamw": partial(_adam, StableAdamW),
    "lamb": partial(_adam, Lamb),
}
"""Optimizers by their name in --optimizer. docs/extending.md shows how to add one."""


def parameter_groups(
    module: torch.nn.Module, weight_decay: float, *, without: Collection[torch.Tensor] = ()
) -> list[dict[str, Any]]:
    """Return two groups: parameters of two or more dimensions, with weight decay, and the others, without it.

    A group may have "rate_scale", a factor on its learning rate. Phases change the weight decay of groups with
    "decays": True.
    """
    parameters = [each for each in module.parameters() if each.requires_grad and each not in without]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay, "decays": True},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _last_match(names: Collection[str], config: Config) -> dict[str, int]:
    """Return the index of the last matching --lr-scale, by parameter name, for each name with a match."""
    scales = enumerate(config.rate_scales)
    return {name: index for index, (pattern, _) in scales for name in names if pattern.search(name)}


def _scale_rates(optimizer: torch.optim.Optimizer, module: torch.nn.Module, config: Config) -> None:
    """Split every group by the factors of --lr-scale. Parameters with factor 0 stay in their group without gradients.

    module: a Learner. Raises UsageError if no parameter is left to train.
    """
    named = {name.removeprefix("model."): parameter for name, parameter in module.named_parameters()}
    factors = {named[name]: config.rate_scales[index][1] for name, index in _last_match(named, config).items()}
    groups = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[torch.nn.Parameter]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factors.get(parameter, 1.0), []).append(parameter)
        scale = group.get("rate_scale", 1.0)
        groups += [group | {"params": some, "rate_scale": scale * factor} for factor, some in by_factor.items()]
    optimizer.param_groups[:] = groups
    for parameter, factor in factors.items():
        if factor == 0:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        sentence = f"--lr-scale {' '.join(config.lr_scale)} freezes all parameters; leave some to train"
        raise UsageError(sentence, "nothing-to-train", option="lr_scale", given=config.lr_scale)


def require_match(pattern: str | re.Pattern[str], names: Sequence[str], option: str, given: str) -> None:
    """Raise UsageError if a pattern matches no parameter name. option, given: the pattern's option and its value."""
    if not any(re.search(pattern, name) for name in names):
        sentence = (
            f"{option} {given} matches none of the {len(names)} parameters, such as {names[0]} and {names[-1]}; "
            "correct the pattern, or leave it out"
        )
        raise UsageError(sentence, "no-match", option=option.strip("-").replace("-", "_"), given=given)


def scaled_rates(sizes: Mapping[str, int], config: Config) -> list[dict[str, Any]]:
    """Return a row for each --lr-scale: pattern, factor, and how many tensors and parameters get the factor.

    sizes: the number of elements of each parameter.
    """
    matches, table = _last_match(sizes, config), []
    for index, (pattern, factor) in enumerate(config.rate_scales):
        scaled = [sizes[name] for name, last in matches.items() if last == index]
        table.append({"pattern": pattern.pattern, "factor": factor, "tensors": len(scaled), "parameters": sum(scaled)})
    return table


def step(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Take a step of an optimizer, or leave parameters and state unchanged.

    skipped: float32 [], 1 for a skipped step, else 0. An optimizer with _step_supports_amp_scaling reads it from its
    attribute `found_inf` on the device; for other optimizers the host waits for the device.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped:
        optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group to `rate` times its rate_scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_scale", 1.0)
