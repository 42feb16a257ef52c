"""Recipes: files of options that belong together. `--recipe tiny` reads tiny.toml."""

from __future__ import annotations

from pathlib import Path

from bertdata.support import UsageError

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.toml")))


def file_of(name: str) -> Path:
    """Return the file of a recipe. Raises UsageError if there is no recipe with this name."""
    if name not in NAMES:
        sentence = f"--recipe {name} is unknown; give one of {', '.join(NAMES)}, or a file of options with --config"
        raise UsageError(sentence, "unknown", option="recipe", given=name)
    return Path(__file__).with_name(f"{name}.toml")
