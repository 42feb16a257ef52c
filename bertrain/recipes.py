"""Defaults of presets: the options that reached the lowest loss in given minutes of CPUs (docs/recipes.md)."""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "modernbert-tiny": {
        "optimizer": "muon", "lr": 4e-3, "muon_rate": 2.0, "mlm_probability": 0.3, "global_batch_size": 64,
    },
    "modernbert-small": {
        "optimizer": "muon", "lr": 3e-3, "muon_rate": 3.0, "mlm_probability": 0.3, "global_batch_size": 32,
        "weight_decay": 0.1,
    },
}  # fmt: skip
"""Values of Config by the name of a preset."""


def recipe(given: dict[str, Any]) -> dict[str, Any]:
    """The defaults of the model of the options `given`.

    There are none for weights that are trained already, for students, whose teacher's cache fixes the masks, and where
    another optimizer is given: rates are of an optimizer.
    """
    values = RECIPES.get(given["model"], {})
    has_other_rates = given.get("optimizer") not in (None, values.get("optimizer"))
    is_trained_or_taught = any(given.get(name) for name in ("init", "teacher", "teacher_cache"))
    return {} if has_other_rates or is_trained_or_taught else values
