"""Recipes: files of options that belong together. tiny.toml is what `--recipe tiny` takes."""

from __future__ import annotations

from pathlib import Path

from bertdata.support import UsageError

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.toml")))
DEFAULT = "tiny"
CHOICES = {"model", "init", "optimizer"}
"""Options beside which DEFAULT is not taken: it is for its model and optimizer."""


def file_of(name: str) -> Path:
    """The file of a recipe. Raises UsageError if there is none of this name."""
    if name not in NAMES:
        sentence = f"--recipe {name} is unknown; give one of {', '.join(NAMES)}, or a file of your own by --config"
        raise UsageError(sentence, "unknown", option="recipe", given=name)
    return Path(__file__).with_name(f"{name}.toml")
