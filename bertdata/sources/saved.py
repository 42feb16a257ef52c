"""The directory of a dataset that `save_to_disk` of the library datasets wrote → its files."""

from __future__ import annotations

import json
from pathlib import Path

from bertdata.errors import InputError

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def files_of_saved(directory: Path) -> list[Path]:
    """The Arrow files of a dataset in their order. Raises InputError if there are several datasets, or none."""
    given = str(directory)
    if (directory / SPLITS).is_file():
        below = ", ".join(sorted(str(state.parent) for state in directory.glob(f"*/{STATE}")))
        sentence = f"{directory} holds several datasets of save_to_disk; name one of them: {below}"
        raise InputError(sentence, "wrong-file-type", option="inputs", given=given)
    try:
        state = json.loads((directory / STATE).read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        if not all(name == Path(name).name and "\0" not in name for name in names):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        sentence = f"{directory / STATE} is not what save_to_disk writes, as it names no data files; save it again"
        raise InputError(sentence, "not-of-format", option="inputs", given=given) from None
    if state.get("_indices_data_files"):
        sentence = f"{directory} selects rows by an index; call flatten_indices() and save_to_disk again"
        raise InputError(sentence, "unsupported", option="inputs", given=given)
    return [directory / name for name in names]
