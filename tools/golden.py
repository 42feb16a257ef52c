"""Keeps the bytes of the format for ever: a tiny dataset in each form of the manifest, and what is read from it.

    python tools/golden.py          writes tests/golden/v1/ and v2/, and what is read from them to v1.json and v2.json

What is there is never written again, because tests/test_golden.py holds every later library to it. Version 2 is for
datasets with many shards; this one has three.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from bertdata import Dataset, Loader
from bertdata.format import manifest
from bertdata.format.origins import Origins
from bertdata.options import build_arguments
from bertdata.write import build

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden"
VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] . , a an and at by in of on the to bread house letter light morning river "
VOCABULARY += "salt stone under wind went she he is was ##s ##ing ##ed read walk carry sing word"
TEXT = """\
The river went by the house in the morning.
She walked to the stone house and he carried bread.

He is reading a letter, and she is singing.

An unknown zebra at the river?
Salt and bread, bread and salt.
The wind was on the stones.

Words of light.

In the morning the wind went to the river.
By the river the light was on the stone.

She carried the letter under the bread.
He was singing words of an unknown language.

A house of salt, a house of stone, a house of wind.

The light and the wind went under the house.
He walked.
She walked.
"""


def described(dataset: Dataset) -> dict[str, object]:
    """What is read from the golden dataset, as JSON."""
    arguments = {"length": 16, "global_batch_size": 6, "seed": 7}
    batch, origins = next(Loader(dataset, **arguments)), Origins.read(dataset.path, dataset.manifest)
    return {
        "dataset_id": dataset.dataset_id,
        "splits": {name: [split.num_documents, split.num_tokens] for name, split in dataset.splits.items()},
        "documents": {str(index): dataset[index].tolist() for index in (0, 1, len(dataset) - 1)},
        "origins": [[*origins.input_and_place(number), number] for number in range(len(dataset))],
        "loader": arguments,
        "batch": {name: array.tolist() for name, array in batch.arrays().items()},
    }


def main() -> None:
    versions = [version for version in manifest.VERSIONS if not (FOLDER / f"v{version}.json").exists()]
    if not versions:
        sys.exit(f"Error: {FOLDER} has every version, and golden files never change; a new format version has new ones")
    for version in versions:
        write(FOLDER / f"v{version}", most_listed=2 if version == manifest.MANY_SHARDS_VERSION else 1024)


def write(out: Path, *, most_listed: int) -> None:
    """Builds the dataset, with a manifest that lists its shards up to so many, and notes what is read from it."""
    with tempfile.TemporaryDirectory() as scratch:
        text, vocabulary = Path(scratch) / "text", Path(scratch) / "vocab.txt"
        text.write_text(TEXT, encoding="utf-8")
        os.utime(text, (1, 1))
        vocabulary.write_text("\n".join(VOCABULARY.split()), encoding="utf-8")
        manifest.MOST_LISTED = most_listed
        settings = {"sentences": "line", "validation": 0.3, "shard_size": 300}
        with contextlib.chdir(scratch):
            dataset = build(["text"], out, **build_arguments({"tokenizer": str(vocabulary)} | settings)).dataset
    rows = json.dumps(described(dataset), indent=1)
    out.with_suffix(".json").write_text(rows + "\n", encoding="utf-8")
    print(f"{out}: {dataset.num_documents} documents, {sum(file.stat().st_size for file in out.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
