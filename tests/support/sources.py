"""What the tests of inputs share: rows of text in every format and compression, and what is read of files."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from reference import documents as reference

from bertdata import TextFormat
from bertdata.sources import text as text_module
from bertdata.sources.inputs import local
from bertdata.sources.kernels import TEXT_PADDING
from bertdata.sources.plan import find_blocks, split
from support.data import build, make_text, word_list
from support.disk import put

FEW = settings(max_examples=settings().max_examples // 3)
"""For tests whose examples write files."""
ROWS = [raw.decode() for _, raw in reference.documents(make_text(40, seed=5).encode(), "blank")]
PIECES = word_list("text", "latin-1")
BYTES = st.one_of(st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join), st.binary(max_size=30))
CONTENTS = st.lists(BYTES.map(lambda content: content.lstrip(b"\xef\xbb\xbf")), min_size=1, max_size=3)  # without mark
GROUP = 3  # rows of a row group of `made`


def zstd_frame(data, window_log):
    """A frame of zstd with one block that is not compressed, which asks for a window of 2^window_log bytes."""
    return b"\x28\xb5\x2f\xfd\0" + bytes([(window_log - 10) << 3]) + (len(data) << 3 | 1).to_bytes(3, "little") + data


zstd = partial(pa.compress, codec="zstd", asbytes=True)
PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": partial(lzma.compress, preset=0), ".zst": zstd}
COMPRESSED = [ending for ending in PACK if ending]


def as_text(rows):
    return "\n\n".join(rows).encode() + b"\n"


def as_jsonl(rows):
    return "".join(json.dumps({"n": number, "text": row}) + "\n" for number, row in enumerate(rows)).encode()


def as_csv(rows, **form):
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, **form)
    writer.writerow(["n", "text"])
    writer.writerows(enumerate(rows))
    return sink.getvalue().encode("utf-8", "surrogateescape")


def table(rows):
    """The table of texts, or of a column of them; a table stays what it is."""
    if isinstance(rows, pa.Table):
        return rows
    column = rows if isinstance(rows, pa.Array) else pa.array(rows, pa.string())
    return pa.table({"n": range(len(rows)), "text": column})


def as_arrow(rows, new=pa.ipc.new_stream):
    sink, rows = pa.BufferOutputStream(), table(rows)
    with new(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def as_parquet(rows, group=9):
    sink = pa.BufferOutputStream()
    pq.write_table(table(rows), sink, row_group_size=group)
    return sink.getvalue().to_pybytes()


def saved(rows, folder="d", **state):
    """What save_to_disk of the library datasets writes, with two files in the reverse order of their names."""
    files = {f"{folder}/data-{number}.arrow": as_arrow(rows[1 - number :: 2]) for number in (1, 0)}
    state = {"_data_files": [{"filename": Path(name).name} for name in files], "_indices_data_files": None} | state
    return files | {f"{folder}/dataset_info.json": b"{}", f"{folder}/state.json": json.dumps(state).encode()}


def as_tables(rows):
    """A table as a file of Parquet, as a file of Arrow, and as a stream of Arrow: name → content."""
    return {"a.parquet": as_parquet(rows, 2), "a.arrow": as_arrow_file(rows), "stream.arrow": as_arrow(rows)}


as_arrow_file = partial(as_arrow, new=pa.ipc.new_file)
as_tsv = partial(as_csv, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_ALL)
INVALID = pa.array([b"ab", b"\xffc"]).view(pa.string())  # a column of strings; the second is invalid UTF-8
MAKE = {"text": as_text, "jsonl": as_jsonl, "csv": as_csv, "tsv": as_tsv, "arrow": as_arrow}
ENDING = {kind: f".{kind}" for kind in (*MAKE, "parquet")} | {"text": ".txt"}


def made(folder, number, kind, rows):
    """An input of these rows, and its documents with the byte or row of each."""
    raw, place = [row.encode() for row in rows], folder / f"{number}{ENDING.get(kind, '.txt.gz')}"
    starts = [0, *itertools.accumulate(len(each) + 1 for each in raw)]
    if kind in ("text", "gzip"):
        lines = b"\n".join(each.replace(b"\n", b" ") for each in raw)
        return put(place, gzip.compress(lines) if kind == "gzip" else lines), reference.documents(lines, "line")
    if kind == "jsonl":
        lines = [json.dumps({"text": row}).encode() + b"\n" for row in rows]
        starts = [0, *itertools.accumulate(map(len, lines))]
        return put(place, b"".join(lines)), list(zip(starts, raw, strict=False))
    if kind == "parquet":
        return put(place, as_parquet(rows, group=GROUP)), list(enumerate(raw))
    make = as_arrow_file if kind == "arrow" else MAKE[kind]
    return put(place, make(rows)), list(zip(starts, raw, strict=False))


def plan_of(paths, **form):
    return split([local(path) for path in paths], TextFormat(**form))


def blocks_of(paths, *wanted, **form):
    """Each block and its documents. wanted: of `find_blocks`."""
    return ((block, block.decode()) for block in find_blocks(plan_of(paths, **form), *wanted))


def read(paths, *wanted, **form):
    """(unit, text, replaced) of each document, after checking that the blocks themselves are well made."""
    documents = []
    for block, some in blocks_of(paths, *wanted, **form):
        assert some.starts.size > 0 or some.bad
        assert some.offsets[0] == 0
        assert some.offsets[-1] == some.num_bytes <= len(some.text) - TEXT_PADDING
        assert some.replaced.size == some.inputs.size == some.starts.size
        assert bool(some.first_replaced) == some.replaced.any()
        text = some.text[: some.num_bytes].tobytes()
        text.decode()
        for (start, stop), replaced in zip(itertools.pairwise(some.offsets.tolist()), some.replaced, strict=True):
            assert text[stop - 1 : stop] == b"\n"
            documents.append((block.unit, text[start : stop - 1], int(replaced)))
    return documents


def stopped(inputs, out, num_units, **options):
    """A build by one thread that ends with Ctrl-C once it has finished some units. Returns those in the directory."""
    with pytest.raises(KeyboardInterrupt):
        build(inputs, out, progress=stop_after_units(out, num_units), **{"workers": 1} | options)
    return units_in(out)


def stop_after_units(out, num_units):
    """A callback for the progress of a build that is a Ctrl-C once it has finished some units."""
    before = units_in(out)

    def progress(done, total):
        if len(units_in(out) - before) >= num_units:
            raise KeyboardInterrupt

    return progress


def units_in(out):
    return {int(path.stem[5:]) for path in (out / ".build").glob("unit-*.json")}


@contextmanager
def counting_reads():
    """A list of the bytes of each read of an input within the context."""
    sizes, read_into = [], text_module.TextFile._read

    def counted(self, stream, buffer, **options):
        sizes.append(read_into(self, stream, buffer, **options))
        return sizes[-1]

    with patch.object(text_module.TextFile, "_read", counted):
        yield sizes
