"""The lines of log.jsonl of a run of bertrain, one JSON object with a step in each."""

from __future__ import annotations

import json
from typing import Any


def entry_of(line: str) -> dict[str, Any] | None:
    """The entry in a line; None if there is none, as in a line that was cut off or damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None
