"""Find the documents of a batch of a past run, and their locations in the inputs: `bertrain trace run/ --step 1200`.

    a step of a run ──► positions ──► tokens of the split ──► documents ──► input, and byte or row
              log.jsonl          Loader.spans          offsets       origins/

The texts are decoded from the ids of the dataset; no input is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

import bertdata
from bertdata.support import TABLE_KINDS, Input, OneSentence, Origins, UsageError, load_tokenizer
from bertrain.report import entry_of


class Part(NamedTuple):
    """The tokens of one document in a row."""

    row: int  # number of the row among the requested rows
    source: int  # number of the dataset in a mix
    document: int  # number of the document in its dataset: Dataset.document(number) has its ids
    start: int  # the row contains tokens start to stop - 1 of the document
    stop: int
    num_tokens: int  # tokens in the document, without the separator


def stream_of(run: Path, step: int) -> dict[str, Any]:
    """Return the state of a run's loader before a step, counted from 1, and the step's global_batch_size.

    Raises UsageError for a directory without a log, and for a step that is not in the log.
    """
    path = run / "log.jsonl"
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        sentence = f"{path} cannot be read ({error.strerror}); give the directory of a run of bertrain"
        raise UsageError(sentence, "not-a-run", option="run", given=run) from None
    log = [entry for line in lines if (entry := entry_of(line))]
    found = [(entry["step"], entry["stream"]) for entry in log if "stream" in entry]
    streams = sorted(found, key=itemgetter(0))
    last = max((entry["step"] for entry in log), default=0)
    before = [each for each in streams if each[0] < step <= last]
    if not before:
        steps = f"steps {streams[0][0] + 1} to {last}" if streams else "no step"
        sentence = f"--step is {step}, and {path} has {steps}; give one of these steps"
        raise UsageError(sentence, "out-of-range", option="step", given=step)
    after, stream = before[-1]
    return stream | {"position": stream["position"] + (step - 1 - after) * stream["global_batch_size"]}


def _paths(run: Path) -> list[str]:
    """Return the paths of a run's datasets. Raises UsageError without a valid run.json."""
    try:
        phases = json.loads((run / "run.json").read_bytes())["resolved"]["phases"]
        return sorted({str(path) for phase in phases for path, _ in phase["sources"]})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        sentence = f"{run / 'run.json'} cannot be read ({error!r:.80}); give the datasets of the run with --data"
        raise UsageError(sentence, "not-a-run", option="data", given=run) from None


def loader_of(stream: Mapping[str, Any], paths: Sequence[str]) -> bertdata.Loader:
    """Return the loader of a stream, without masks. paths: paths of its datasets, and perhaps more.

    Raises UsageError if a dataset is missing.
    """
    datasets = {dataset.dataset_id: dataset for dataset in map(bertdata.open, paths)}
    sources = stream.get("sources") or [[stream["dataset_id"], 1]]
    if missing := [name for name, _ in sources if name not in datasets]:
        sentence = f"the run read the dataset {missing[0][:16]}, which is not {' or '.join(paths)}; give it with --data"
        raise UsageError(sentence, "other-dataset", option="data", given=missing[0])
    names = ("length", "seed", "split", "samples", "short_seq_prob", "shuffle", "variants", "starts")
    options = {name: stream[name] for name in names if stream.get(name) is not None}
    return bertdata.Loader([(datasets[name], weight) for name, weight in sources], masking=None, **options)


def parts_of(loader: bertdata.Loader, positions: np.ndarray) -> Iterator[Part]:
    """Yield the parts of documents in the samples at some positions, int64 [B], row by row."""
    which = loader.read(positions).sources
    for row, start, length in loader.spans(positions).tolist():
        source = 0 if which is None else int(which[row])
        dataset = loader.sources[source].dataset
        separators, names = int(dataset.special_tokens.separator is not None), list(dataset.splits)
        earlier = sum(dataset.splits[name].num_documents for name in names[: names.index(loader.split)])
        split = dataset.splits[loader.split]
        shard = int(np.searchsorted(split.first_tokens, start, side="right")) - 1
        begin, offsets = start - int(split.first_tokens[shard]), dataset.array(split[shard].name, "documents")
        number = int(np.searchsorted(offsets, np.uint64(begin), side="right")) - 1
        while number < split[shard].num_documents and (first := int(offsets[number])) < begin + length:
            num_tokens = int(offsets[number + 1]) - first - separators
            part = max(0, begin - first), min(num_tokens, begin + length - first)
            if part[0] < part[1]:  # otherwise the row contains only the document's separator
                document = earlier + int(split.first_documents[shard]) + number
                yield Part(row, source, document, *part, num_tokens)
            number += 1


@click.command(cls=OneSentence, epilog="\b\nExample:\n  bertrain trace run/ --step 1200 --row 3")
@click.argument("run")
@click.option("--step", required=True, type=int, help="Step of the run, from 1, as in its log.jsonl.")
@click.option("--row", type=int, help="Row of the global batch, from 0. Default: all rows.")
@click.option("--data", multiple=True, help="Where a dataset of the run is. May be repeated. Default: as in run.json.")
def main(run: str, step: int, row: int | None, data: tuple[str, ...]) -> None:
    """Print the documents of a batch of a past run: number, input, byte or row, and text.

    The text is decoded from the ids of the dataset, so it may differ from the input in case and spaces.
    """
    stream = stream_of(Path(run), step)
    size = stream["global_batch_size"]
    if row is not None and not 0 <= row < size:
        sentence = f"--row is {row}; give a row of the batch, from 0 to {size - 1}"
        raise UsageError(sentence, "out-of-range", option="row", given=row)
    loader = loader_of(stream, data or _paths(Path(run)))
    rows = np.arange(size) if row is None else np.array([row])
    datasets = [source.dataset for source in loader.sources]
    origins = [Origins.read(each.path, each.manifest) for each in datasets]
    tokenizer = load_tokenizer(str(datasets[0].path))
    for part in parts_of(loader, stream["position"] + rows):
        dataset, place = datasets[part.source], "no origins"
        if known := origins[part.source]:
            name, number = known.input_and_place(part.document)
            is_table = (known.input_format or Input(name, None, None).kind) in TABLE_KINDS
            place = f"{name}, {'row' if is_table else 'byte'} {number}"
        click.echo(
            f"row {rows[part.row]}: document {part.document} of {dataset.path} ({place}), tokens {part.start} to "
            f"{part.stop} of {part.num_tokens}\n  "
            + tokenizer.decode(dataset.document(part.document)[part.start : part.stop].tolist())
        )


if __name__ == "__main__":
    main()
