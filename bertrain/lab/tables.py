"""Labelled examples in TSV, CSV, JSON lines or Parquet: read rows and columns, and write rows in the same format."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertdata.support import Stage, UsageError
from bertrain.commands import reading

LONGEST_CELL = 1 << 26  # characters in a CSV cell
_ROWS = 10_000  # rows in a row group of Parquet


@dataclass(frozen=True)
class Table:
    """The rows of a file, and the columns of each role. A role is the name of an option, such as "label"."""

    path: Path
    names: list[Any]  # names of columns; a TSV or CSV without a header has numbers from 0
    columns: dict[str, Any]  # role → name of its column
    rows: list[tuple[int, dict[Any, Any]]]  # (line number from 1, column name → value)

    def parts(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the values of each row by role, and its location: "file, line n"."""
        for line, row in self.rows:
            yield {role: row.get(name) for role, name in self.columns.items()}, f"{self.path}, line {line}"


def text_of(value: Any) -> str:
    """Return a value as text. The items of a list are joined by spaces."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def read(path: str, roles: dict[str, str], *, only: bool = False) -> Table:
    """Read all rows of a file. roles: name of an option → name of its column, or number from 0.

    A TSV or CSV has a header if its first row contains one of these names, or "label"; otherwise columns are numbered.
    A row with a different number of columns has no values. only: rows of Parquet contain only the columns of roles.
    Raises UsageError for a file that cannot be read, and for missing or equal columns.
    """
    file = Path(path)
    try:
        names, rows = _rows(file, roles, only)
    except UsageError:
        raise
    except (ValueError, csv.Error, OSError) as error:  # from csv, pyarrow, or the system
        sentence = f"{path} cannot be read: {error}; correct it, or give another file"
        kind = "not-found" if isinstance(error, FileNotFoundError) else "not-of-format"
        raise UsageError(sentence, kind, given=path) from None
    if not rows:
        raise UsageError(f"{path} holds no examples; give a row for each", "empty", given=path)
    columns: dict[str, Any] = {}
    for role, wanted in roles.items():
        column = _named(wanted, names)
        if column is None or column in columns.values():
            fault, kind = ("is no column", "no-column") if column is None else ("is another option's", "conflict")
            sentence = f"{path}: --{role} {wanted} {fault}; give one of {', '.join(map(str, names))}"
            raise UsageError(sentence, kind, option=role, given=wanted)
        columns[role] = column
    return Table(file, names, columns, rows)


def write(path: Path, like: Table, rows: Iterator[dict[Any, Any]]) -> None:
    """Write rows to a new file, completely or not at all, in the format of the file of `like`.

    A column of texts is a string column in Parquet. rows: an iterator of rows with the columns of `like`, so that they
    need not fit in memory.
    """
    kind = like.path.suffix.lower()
    with Stage(path.parent) as stage:
        file = stage.open(path.name)
        lines = codecs.getwriter("utf-8")(file)
        if kind == ".parquet":
            _write_parquet(file, like, rows)
        elif kind in (".jsonl", ".json"):
            for row in rows:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            writer = csv.writer(lines, lineterminator="\n", **_form(kind))
            header = ["" if isinstance(name, int) else name for name in like.names]
            writer.writerows([header] if any(header) else [])
            writer.writerows([row[name] for name in like.names] for row in rows)
        stage.publish()


def _write_parquet(file: Any, like: Table, rows: Iterator[dict[Any, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(like.path)
    for name in (like.columns[role] for role in like.columns if role != "label"):
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
    with pq.ParquetWriter(file, schema) as writer:
        while some := list(itertools.islice(rows, _ROWS)):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))


def _named(wanted: str, names: list[Any]) -> Any:
    """Return the name of a column from its name or number; None if it is missing."""
    if wanted in names:
        return wanted
    return names[int(wanted)] if is_number(wanted) and -len(names) <= int(wanted) < len(names) else None


def is_number(column: str) -> bool:
    """Return whether a column is identified by its number and not by its name."""
    return column.removeprefix("-").isdecimal()


def _rows(file: Path, roles: dict[str, str], only: bool) -> tuple[list[Any], list[tuple[int, dict[Any, Any]]]]:
    """Return the names of columns, and rows with their line numbers. roles, only: as in `read`."""
    kind = file.suffix.lower()
    if kind == ".parquet":
        import pyarrow.parquet

        names = _unique(pyarrow.parquet.read_schema(file).names)
        used = {_named(name, names) for name in roles.values()}
        columns = [name for name in names if name in used or not only]
        parts = pyarrow.parquet.read_table(file, columns=columns).to_pylist()
        for row in parts:
            row |= {name: row[name].decode() for name in used & row.keys() if isinstance(row[name], bytes)}
        return names, list(enumerate(parts, 1))
    if kind not in (".tsv", ".csv", ".txt", ".jsonl", ".json"):
        sentence = f"{file} has an unknown file extension; give .tsv, .csv, .jsonl or .parquet"
        raise UsageError(sentence, "unknown-format", given=str(file))
    lines = io.StringIO(reading.decoded(file.read_bytes(), file), newline="")
    if kind in (".jsonl", ".json"):
        rows = [(number, _parsed(line, file, number)) for number, line in enumerate(lines, 1) if line.strip()]
        return [*rows[0][1]] if rows else [], rows
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(lines, **_form(kind))
    cells = [(reader.line_num, row) for row in reader if any(row)]
    names = list(range(len(cells[0][1]))) if cells else []
    if cells and any(name in cells[0][1] for name in ("label", *roles.values()) if not is_number(name)):
        names = _unique([name or number for number, name in enumerate(cells.pop(0)[1])])
    return names, [(line, dict(zip(names, row, strict=True)) if len(row) == len(names) else {}) for line, row in cells]


def _form(kind: str) -> dict[str, Any]:
    """Return the arguments of csv for a file."""
    return {} if kind == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}


def _parsed(line: str, file: Path, number: int) -> dict[str, Any]:
    """Parse a line of JSON. Raises UsageError if it is not an object, or cannot be written again."""
    advice = "give one JSON object in each line, and each name once"
    row = reading.parsed(line.rstrip(), file, number, advice=advice, object_pairs_hook=_object)
    if not isinstance(row, dict):
        raise UsageError(f"{file}, line {number} is not a JSON object; {advice}", "bad-row")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _unique([name for name, _ in pairs])
    return dict(pairs)


def _unique(names: list[Any]) -> list[Any]:
    """Return the names of columns. Raises ValueError if two are equal, because one of them would be lost."""
    if len({*names}) < len(names):
        raise ValueError(f"it has {max(names, key=names.count)!r} twice")
    return names
