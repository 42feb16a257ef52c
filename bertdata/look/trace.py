"""What trace prints: the documents that a batch of a past run was made of, and where their text is.

    a step of a run ──► positions ──► tokens of the split ──► documents ──► input and place ──► text
              log.jsonl          Loader.spans          offsets       origins/         the input

The text of a document is given only if it still has the ids that are stored. So an input may be moved back, copied or
grow, and a text is never a wrong one.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from bertdata import prepare
from bertdata.errors import BertdataError, DatasetError, StateError, UsageError, damaged
from bertdata.format.arrays import open_array
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import Shard
from bertdata.format.origins import DTYPE, Record, array_name
from bertdata.look.entries import entry_of
from bertdata.read.loader import Loader
from bertdata.read.mix import Mix
from bertdata.sources.blocks import source_of
from bertdata.sources.find import find_inputs
from bertdata.sources.formats import TextFormat
from bertdata.sources.inputs import STANDARD_INPUT, Input, local
from bertdata.sources.kernels import PADDING
from bertdata.sources.maps import mapped
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS
from bertdata.tokenize.load import load
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertdata.urls import is_remote

_SHOWN = 2000  # characters of a text that are printed
_OUR_MAPS = {f"{prepare.__name__}:{name}" for name in prepare.__all__}
Progress = Callable[[int, int], None]
"""Called with the inputs that are read, and all that will be."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A document of which a row has tokens."""

    row: int  # number of the row among those that were asked for
    document: int  # number of the document in the dataset: Dataset.document(number) has its ids
    start: int  # the row has the tokens start to stop - 1 of the document
    stop: int
    num_tokens: int  # of the document, without the separator
    input: str  # name as the build was given it
    unit: str  # what `place` counts: "byte", from 0, or "row", from 1
    place: int  # where the document begins in the input, decompressed and in UTF-8
    text: str | None = None  # all of it; None: it could not be read
    no_text: str | None = None  # why, as a clause


def trace(
    dataset: Dataset,
    run: str | Path,
    step: int,
    *,
    row: int | None = None,
    inputs: Sequence[str | Path] = (),
    maps: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> list[Traced]:
    """The documents of the batch of a step of a run of bertrain, in the order of the rows, with their texts.

    run: its directory. step: counted from 1, as in its log. row: of the global batch, from 0; None: all rows, of a mix
    those that are from this dataset. inputs, maps: as `with_texts` takes them. Raises UsageError for a step or row that
    the run does not have, StateError for a run of another dataset, and DatasetError for a dataset without origins.
    """
    state = stream_of(run, step)
    first, rows = state["position"], state["global_batch_size"]
    if row is not None and not 0 <= row < rows:
        raise UsageError(
            f"--row is {row}; give a row of the batch, from 0 to {rows - 1}", "out-of-range", option="row", given=row
        )
    ids = [name for name, _ in state["sources"]] if "sources" in state else [state["dataset_id"]]
    if dataset.dataset_id not in ids:
        raise StateError(
            f"{run} was trained on dataset {' and '.join(name[:16] for name in ids)}, and {dataset.path} is "
            f"{dataset.dataset_id[:16]}; give the dataset of the run",
            "other-dataset",
            option="shards",
            given=dataset.path,
        )
    names = ("length", "seed", "split", "samples", "shuffle")
    loader = Loader(
        dataset,
        masking=None,
        variants=state.get("variants"),
        **{name: state[name] for name in names},
        **({} if state["short_seq_prob"] is None else {"short_seq_prob": state["short_seq_prob"]}),
    )
    wanted = np.arange(rows) if row is None else np.array([row])
    positions = first + wanted
    if "sources" in state:  # a source of a mix is read as it is read alone
        weights, starts = tuple(weight for _, weight in state["sources"]), tuple(state.get("starts", ()))
        places = Mix(weights, seed=state["seed"], starts=starts).places(positions)
        mine = places.rows()[ids.index(dataset.dataset_id)]
        if row is not None and not mine.size:
            raise UsageError(
                f"--row {row} is from another dataset of the mix than {dataset.path}; give that one",
                "other-dataset",
                option="row",
                given=row,
            )
        wanted, positions = wanted[mine], places.positions[mine]
    found = documents_of(loader, positions)
    found = [replace(each, row=int(wanted[each.row])) for each in found]
    return with_texts(dataset, found, inputs=inputs, maps=maps, progress=progress)


def _saved(run: Path) -> list[str]:
    """What the newest checkpoint of a run says of its streams, as lines of a log; nothing if it has none."""
    try:
        newest = max(path for path in run.glob("step-*") if (path / "trainer.json").is_file())
        state = json.loads((newest / "trainer.json").read_bytes())
        return [json.dumps(entry) for entry in [*state["read"], {"step": state["step"]}]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def stream_of(run: str | Path, step: int) -> dict[str, Any]:
    """The state of the loader of a run before a step, with the global_batch_size of this step.

    Raises UsageError for a directory without a log, and for a step that the log does not have.
    """
    path, last, streams = Path(run) / "log.jsonl", 0, list[tuple[int, dict[str, Any]]]()
    saved = _saved(Path(run))
    try:
        lines = path.read_text(errors="replace").splitlines() if path.exists() or not saved else []
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); give the directory of a run of bertrain",
            "not-a-run",
            option="run",
            given=run,
        ) from None
    for line in [*saved, *lines]:
        entry = entry_of(line)
        if entry is None:
            continue
        last = max(last, entry["step"])
        stream = entry.get("stream")
        if isinstance(stream, dict) and all(
            type(stream.get(name)) is int for name in ("position", "global_batch_size")
        ):
            streams.append((entry["step"], stream))
    streams.sort(key=lambda each: each[0])
    if not streams:
        raise UsageError(
            f"{path} does not say what the run read: no entry of it has the stream",
            "other-version",
            option="run",
            given=run,
        )
    if not 1 <= step <= last:
        raise UsageError(
            f"--step is {step}; give a step from 1 to {last}, the last one in {path}",
            "out-of-range",
            option="step",
            given=step,
        )
    before = [each for each in streams if each[0] < step]
    if not before:
        raise UsageError(
            f"{path} says what the run read only from step {streams[0][0] + 1} on; give a later step",
            "other-version",
            option="step",
            given=step,
        )
    after, stream = before[-1]
    return stream | {"position": stream["position"] + (step - 1 - after) * stream["global_batch_size"]}


def documents_of(loader: Loader, positions: NDArray[np.int64]) -> list[Traced]:
    """The documents of the samples at any positions, int64 [B], of a loader, without their texts.

    Traced.row is an index of `positions`. Raises DatasetError for a dataset without origins.
    """
    dataset = loader.sources[0].dataset
    origins = _Origins(dataset)
    shards = dataset.splits[loader.split].shards
    names = list(dataset.splits)
    before = sum(dataset.splits[name].num_documents for name in names[: names.index(loader.split)])
    first_tokens = dataset.splits[loader.split].first_tokens
    first_documents = before + dataset.splits[loader.split].first_documents
    separators, found = int(dataset.special_tokens.separator is not None), list[Traced]()
    for row, start, length in loader.spans(positions).tolist():
        number = int(np.searchsorted(first_tokens, start, side="right")) - 1
        shard, begin = shards[number], start - int(first_tokens[number])
        offsets = dataset.array(shard.name, "documents")
        document = int(np.searchsorted(offsets, np.uint64(begin), side="right")) - 1
        while document < shard.num_documents and (first := int(offsets[document])) < begin + length:
            num_tokens = int(offsets[document + 1]) - first - separators
            part = max(0, begin - first), min(num_tokens, begin + length - first)
            if part[0] < part[1]:  # else the row has nothing but the separator of this document
                found.append(
                    Traced(
                        row=row,
                        document=int(first_documents[number]) + document,
                        start=part[0],
                        stop=part[1],
                        num_tokens=num_tokens,
                        **origins.of(shard, document),
                    )
                )
            document += 1
    return found


def numbered(dataset: Dataset, documents: Sequence[int]) -> list[Traced]:
    """Documents by their numbers in the dataset, ascending, whole and without their texts; Traced.row is an index.

    Raises DatasetError for a dataset without origins.
    """
    origins, found, before = _Origins(dataset), list[Traced](), 0
    for shard in dataset.manifest.shards:
        while len(found) < len(documents) and (number := documents[len(found)] - before) < shard.num_documents:
            num_tokens = dataset.document(before + number).size
            found.append(
                Traced(
                    row=len(found),
                    document=before + number,
                    start=0,
                    stop=num_tokens,
                    num_tokens=num_tokens,
                    **origins.of(shard, number),
                )
            )
        before += shard.num_documents
    return found


class _Origins:
    """Where the documents of a dataset came from. Raises DatasetError for a dataset without origins."""

    def __init__(self, dataset: Dataset) -> None:
        record = Record.read(dataset.path, dataset.manifest)
        if record is None:
            raise DatasetError(
                f"{dataset.path} has no origins ({dataset.path}/origins), so nothing says where its documents came "
                "from; an import stores none",
                "not-stored",
                option="shards",
                given=dataset.path,
            )
        self._dataset, self._record = dataset, record
        self._inputs = record.named_inputs(dataset.path)
        self._arrays: dict[str, NDArray[np.uint64]] = {}

    def of(self, shard: Shard, document: int) -> dict[str, Any]:
        """The members `input`, `unit` and `place` of Traced for a document of a shard, counted from its first."""
        path, name = self._dataset.path, shard.name
        if name not in self._arrays:
            self._arrays[name] = open_array(path / array_name(name), DTYPE, shard.num_documents)
        number, place = self._record.input_and_place(self._arrays[name][document])
        if number >= len(self._inputs):
            raise damaged(path)
        origin = self._inputs[number].name
        unit = "row" if (self._record.input_format or _kind(origin)) in TABLE_KINDS else "byte"
        return {"input": origin, "unit": unit, "place": place}


def with_texts(
    dataset: Dataset,
    traced: Sequence[Traced],
    *,
    inputs: Sequence[str | Path] = (),
    maps: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> list[Traced]:
    """The same with the texts of the documents, as far as the inputs still have them.

    inputs: directories or URLs below which inputs are read. A dataset may name any file or URL that its user can read,
    also of a stranger's choice, so no other input is opened. maps: functions of the build's --map that may be run,
    besides those of bertdata.prepare. A dataset may name any function, so the others are not run, and then there are no
    texts.
    """
    record = Record.read(dataset.path, dataset.manifest)
    assert record  # noqa: S101  (from which `traced` was made)
    settings = dataset.manifest.settings
    for spec in settings.get("map", ()):
        if spec.partition("(")[0] not in _OUR_MAPS and spec not in maps:
            why = f"the build changed the texts by --map {spec}; give the same --map to run this function here"
            return [replace(each, no_text=why) for each in traced]
    form = TextFormat(
        documents=settings.get("documents", "blank"),
        kind=record.input_format,
        text_key=record.text_key,
        encoding=settings.get("encoding", UTF_8),
        maps=tuple(settings.get("map", ())),
    )
    by_input: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # input → place → documents
    for each in traced:
        by_input[each.input][each.place].add(each.document)  # several, if the input was named twice
    tokenizer, answers = load(str(dataset.path)), dict[int, tuple[str | None, str | None]]()
    for number, (name, places) in enumerate(by_input.items()):
        progress(number, len(by_input))
        every = [document for documents in places.values() for document in documents]
        answers |= dict.fromkeys(every, (None, "the input has no document at this place any more"))
        if not _is_below(name, inputs):
            answers |= dict.fromkeys(every, (None, "the input is not below a directory of --inputs, so it is not read"))
            continue
        try:
            source = source_of(_now(name), form)
            for found in source.at(list(places)):
                made = mapped(found, form.maps, source.place) if form.maps else found
                text = made.text[: made.num_bytes].tobytes()
                for document in places[int(found.starts[0])]:
                    if text and _has_ids(text, dataset.document(document), tokenizer):
                        answers[document] = text[:-1].decode(), None
                    else:
                        answers[document] = None, "the text at this place is another one now"
        except BertdataError as error:
            unread = [document for document in every if answers[document][0] is None]
            answers |= dict.fromkeys(unread, (None, str(error)))
    progress(len(by_input), len(by_input))
    return [replace(each, text=answers[each.document][0], no_text=answers[each.document][1]) for each in traced]


def _kind(name: str) -> str:
    return Input(name, None, None).kind


def _is_below(name: str, directories: Sequence[str | Path]) -> bool:
    """Whether an input is one of some directories or URLs, or below one of them, after links are followed."""
    if is_remote(name):
        return ".." not in unquote(name).split("/") and any(
            f"{name}/".startswith(f"{str(each).rstrip('/')}/") for each in directories
        )
    return any(Path(os.path.realpath(name)).is_relative_to(os.path.realpath(each)) for each in directories)


def _now(name: str) -> Input:
    """An input by its name. Raises InputError, DatasetError or RemoteError if it cannot be read."""
    found = find_inputs([name]).files[0] if is_remote(name) else local(name)
    if name == STANDARD_INPUT or found.is_stream:
        raise DatasetError(f"{name} was a pipe, which can be read only once", "read-once", given=name)
    return found


def _has_ids(text: bytes, ids: NDArray[Any], tokenizer: LoadedTokenizer) -> bool:
    """Whether a text, with a newline after it, has the ids of a document."""
    encoded = tokenizer.encode(text + bytes(PADDING), np.array([0, len(text)]), sentences=False)
    return np.array_equal(encoded.ids[: encoded.ids.size - (tokenizer.special.separator is not None)], ids)


def as_text(dataset: Dataset, traced: Sequence[Traced]) -> str:
    """What trace prints: for each document of each row its place, and the part of the text that the row has."""
    tokenizer, blocks = load(str(dataset.path)), []
    for each in traced:
        line = (
            f"row {each.row}: {each.input}, {each.unit} {each.place}: tokens {each.start} to {each.stop} of "
            f"{each.num_tokens} of document {each.document}"
        )
        if each.text is None:
            blocks.append(f"{line}\n  (no text: {each.no_text})")
            continue
        part = tokenizer.part_of(each.text, each.start, each.stop)
        more = f" ... ({len(part) - _SHOWN:,} more characters)" if len(part) > _SHOWN else ""
        blocks.append("\n  ".join([line, *f"{part[:_SHOWN]}{more}".splitlines()]))
    return "\n".join(blocks)


def as_json(traced: Sequence[Traced]) -> str:
    """One JSON object a line."""
    return "\n".join(json.dumps(asdict(each), ensure_ascii=False) for each in traced)
