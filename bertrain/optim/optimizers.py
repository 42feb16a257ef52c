"""Optimizers by name, and the groups of parameters that they treat differently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from bertdata.errors import UsageError
from bertrain.config import Config
from bertrain.optim.adam import Lamb, StableAdamW
from bertrain.optim.muon import Muon, hidden_matrices


def build(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names, for all parameters of a module that are trained, with --lr-scale.

    config: whose precision is resolved; auto counts as fp32.
    """
    optimizer = OPTIMIZERS[config.optimizer](module, config)
    if config.lr_scale:
        _scale_rates(optimizer, module, config)
    return optimizer


def _adam(kind: Any, module: torch.nn.Module, config: Config, **options: Any) -> torch.optim.Optimizer:
    """An optimizer on Adam's moments, with decoupled weight decay (Loshchilov and Hutter, 2019)."""
    groups, betas = parameter_groups(module, config.weight_decay), (config.beta1, config.beta2)
    return kind(groups, lr=0.0, betas=betas, eps=config.epsilon, **options)


def muon(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """Muon for the hidden matrices of a model, AdamW for all else. module: a Learner."""
    model: Any = module.model
    matrices = hidden_matrices(model)
    if not matrices:
        sentence = f"--optimizer muon: {model.config.model_type} has no linear maps in its layers; give adamw"
        raise UsageError(sentence, "unsupported", option="optimizer", given="muon")
    theirs = {parameter for parameter, _ in matrices}
    others = parameter_groups(module, config.weight_decay)
    for group in others:
        group["params"] = [parameter for parameter in group["params"] if parameter not in theirs]
    return Muon(
        matrices,
        others,
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
"""Optimizers by the name that --optimizer gives them. Add your own: docs/extending.md."""


def parameter_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which are decayed, then norms and biases, which are not.

    Groups are chosen by the number of dimensions of a parameter, not by its name. A group may hold "rate_scale", a
    factor on its learning rate; without it the factor is 1. It may hold "decays": it has the weight decay of the phase.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay, "decays": True},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _scale_rates(optimizer: torch.optim.Optimizer, module: torch.nn.Module, config: Config) -> None:
    """Splits every group by the factors of its parameters. Those of factor 0 stay in it, get no gradient and no step.

    module: a Learner. Raises UsageError if nothing is left to train.
    """
    named = {name.removeprefix("model."): parameter for name, parameter in module.named_parameters()}
    factors = {named[name]: config.rate_scales[index][1] for name, index in _deciding(named, config).items()}
    groups = []
    for group in optimizer.param_groups:
        parts: dict[float, list[torch.nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(factors.get(parameter, 1.0), []).append(parameter)
        scale = group.get("rate_scale", 1.0)
        groups += [group | {"params": some, "rate_scale": scale * factor} for factor, some in parts.items()]
    optimizer.param_groups[:] = groups
    for parameter, factor in factors.items():
        if factor == 0:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        sentence = f"--lr-scale {' '.join(config.lr_scale)} freezes all parameters; leave some to train"
        raise UsageError(sentence, "nothing-to-train", option="lr_scale", given=config.lr_scale)


def _deciding(names: Iterable[str], config: Config) -> dict[str, int]:
    """Name of a parameter → index of the --lr-scale that decides its factor: the last one that matches."""
    scales = [*enumerate(config.rate_scales)][::-1]
    indices = {name: next((index for index, (pattern, _) in scales if pattern.search(name)), None) for name in names}
    return {name: index for name, index in indices.items() if index is not None}


def check_scales(names: Iterable[str], config: Config) -> None:
    """Raises UsageError for a pattern of --lr-scale that matches no name of a parameter."""
    names = list(names)
    for given, (pattern, _) in zip(config.lr_scale, config.rate_scales, strict=True):
        if not any(pattern.search(name) for name in names):
            sentence = (
                f"--lr-scale {given} matches none of the {len(names)} parameters, such as {names[0]} and {names[-1]}; "
                "correct the pattern, or leave it out"
            )
            raise UsageError(sentence, "no-match", option="lr_scale", given=given)


def scaled_rates(sizes: Mapping[str, int], config: Config) -> list[dict[str, Any]]:
    """What each --lr-scale amounts to: pattern, factor, and the tensors and parameters whose factor it decides.

    sizes: number of elements by name of a tensor.
    """
    indices = _deciding(sizes, config)
    table = []
    for index, (pattern, factor) in enumerate(config.rate_scales):
        own = [sizes[name] for name, deciding in indices.items() if deciding == index]
        table.append({"pattern": pattern.pattern, "factor": factor, "tensors": len(own), "parameters": sum(own)})
    return table


def step(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Takes a step of an optimizer, or leaves parameters and state as they are. The host does not wait to know which.

    skipped: float32 [], 1 for a step that changes nothing, else 0. An optimizer says as torch's do, by
    _step_supports_amp_scaling, that it follows `found_inf` itself; for others the host waits.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped:
        optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group the learning rate `rate` times its rate_scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_scale", 1.0)


def set_weight_decay(optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
    """Gives a weight decay to every group that is decayed."""
    for group in optimizer.param_groups:
        if group.get("decays"):
            group["weight_decay"] = weight_decay
