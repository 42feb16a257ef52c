"""Labelled examples from TSV, CSV, JSON lines or Parquet → texts and labels; and rows back to such a file."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertdata.errors import UsageError
from bertdata.files import TEMPORARY, fsync_directory, naming
from bertrain import reading

TEXTS = ("--text", "--other")  # the options that name columns of text
_ROWS = 10_000  # of a row group of Parquet


@dataclass(frozen=True)
class Table:
    """The rows of a file as they stand there, and which columns are which."""

    path: Path
    names: list[Any]  # of the columns; their numbers from 0 where a TSV or CSV has no header
    rows: list[dict[Any, Any]]  # by the names of the columns
    places: list[str]  # "file, line n" of each
    columns: dict[str, Any]  # by the option that names each
    num_left: int  # rows that were left out

    def texts(self, role: str) -> list[str]:
        """The texts of the column that an option names. A text that is a list is joined by spaces."""
        return [_text(row[self.columns[role]]) for row in self.rows]


@dataclass(frozen=True)
class Examples:
    """The labelled texts of a file."""

    texts: list[str]
    others: list[str] | None  # the second text of each, of pairs
    labels: list[Any]  # as they stand in the file
    places: list[str] = field(default_factory=list, compare=False)  # "file, line n" of each, for messages
    num_left: int = 0  # rows that were left out


def read(path: str, *, text: str, other: str, label: str, skip: bool = False, unlabelled: bool = False) -> Examples:
    """The rows of a file. text, other and label name columns, or number them from 0. other "": there is no second text.

    A TSV or CSV whose first row holds one of these names, or "label", has a header; else columns are numbered. A text
    that is a list is joined by spaces. skip: leaves out rows that do not fit, and those labelled "-", on which
    annotators did not agree. unlabelled: an empty label is a label. Raises UsageError, naming the file and the line,
    for what does not fit and for empty labels.
    """
    found = table(path, {"--text": text, "--other": other, "--label": label}, skip, unlabelled)
    labels = [row[found.columns["--label"]] for row in found.rows]
    others = found.texts("--other") if other else None
    return Examples(found.texts("--text"), others, labels, found.places, found.num_left)


def columns(
    path: str, roles: dict[str, str], skip: bool = False, unlabelled: bool = False
) -> tuple[dict[str, list[Any]], list[str], int]:
    """The values of columns by the option that names each, as they stand in the file; the place of each row; how many
    rows were left out. skip, unlabelled: see `read`.
    """
    found = table(path, roles, skip, unlabelled)
    values = {role: [row[column] for row in found.rows] for role, column in found.columns.items()}
    return values, found.places, found.num_left


def table(path: str, roles: dict[str, str], skip: bool = False, unlabelled: bool = False) -> Table:
    """A whole file. roles: the column by the option that names it; "" where there is none. For the rest see `read`."""
    for role, column in roles.items():
        if not column and role != "--other":
            raise UsageError(f"{role} is empty; give a column of {path}, by its name or its number from 0")
    file, roles = Path(path), {role: column for role, column in roles.items() if column}
    try:
        names, rows = _rows(file, {"label", *roles.values()}, skip)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:  # no Parquet, ...
        if isinstance(error, UnicodeDecodeError) and file.suffix.lower() != ".parquet":
            reading.decoded(file.read_bytes(), path)  # which names the line
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise UsageError(f"{path} holds no examples")
    found: dict[str, Any] = {}
    for role, wanted in roles.items():
        if wanted in names:
            found[role] = wanted
        elif is_number(wanted) and -len(names) <= int(wanted) < len(names):
            found[role] = names[int(wanted)]
        else:
            raise UsageError(f"{path} has no column {wanted!r}, only {', '.join(map(str, names))}")
    for role in found.keys() - {"--label"}:
        if found[role] == found["--label"]:
            raise UsageError(
                f"{path}: {role} and --label are the same column, {found[role]!r}; give the column of the label, of "
                f"{', '.join(map(str, names))}"
            )
    num_rows = len(rows)
    if skip:
        rows = [(number, row) for number, row in rows if _fits(row, found)]
    for role, column in found.items():
        for number, row in rows:
            value = row.get(column)
            if value is None or (role == "--label" and not unlabelled and not str(value).strip()):
                raise UsageError(f"{path}, line {number} has no value for column {column!r}; fill it or remove the row")
    places = [f"{path}, line {number}" for number, _ in rows]
    return Table(file, names, [row for _, row in rows], places, found, num_rows - len(rows))


def write(path: Path, like: Table, rows: Iterator[dict[Any, Any]]) -> None:
    """Writes rows to a new file, whole or not at all, in the format of the file that `like` was read from.

    A column of texts is one of strings in Parquet. rows: with the columns of `like`, one after the other, so that they
    need not fit in memory.
    """
    temporary, kind = path.with_name(path.name + TEMPORARY), like.path.suffix.lower()
    with naming(path), open(temporary, "wb") as file:
        if kind == ".parquet":
            _write_parquet(file, like, rows)
        else:
            with io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True) as lines:
                header = [] if like.names == list(range(len(like.names))) else [{name: name for name in like.names}]
                if kind in (".jsonl", ".json"):
                    lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                elif kind == ".csv":
                    cells = ([row[name] for name in like.names] for row in itertools.chain(header, rows))
                    csv.writer(lines, lineterminator="\n").writerows(cells)
                else:
                    joined = ("\t".join(row[name] for name in like.names) for row in itertools.chain(header, rows))
                    lines.writelines(f"{line}\n" for line in joined)
                lines.flush()
                os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


def _write_parquet(file: Any, like: Table, rows: Iterator[dict[Any, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(like.path)
    for role in like.columns.keys() & set(TEXTS):
        name = like.columns[role]
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
    with pq.ParquetWriter(file, schema) as writer:
        while some := list(itertools.islice(rows, _ROWS)):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))
    file.flush()
    os.fsync(file.fileno())


def is_number(column: str) -> bool:
    """Whether a column is given by its number and not by its name."""
    return column.removeprefix("-").isdecimal()


def _fits(row: dict[Any, Any], found: dict[str, Any]) -> bool:
    return row.get(found["--label"]) != "-" and all(row.get(column) not in (None, "") for column in found.values())


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _rows(file: Path, wanted: set[str], skip: bool) -> tuple[list[Any], list[tuple[int, dict[Any, Any]]]]:
    """Names of the columns, and rows with the line each is on. wanted: names that tell a header. skip: see read."""
    kind = file.suffix.lower()
    if kind == ".parquet":
        import pyarrow.parquet

        _check_names(pyarrow.parquet.read_schema(file).names, str(file))
        table = pyarrow.parquet.read_table(file)
        return table.column_names, list(enumerate(table.to_pylist(), 1))
    if kind in (".jsonl", ".json"):
        rows = []
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                rows.append((number, _parsed(line, file, number)))
        return list(rows[0][1]) if rows else [], rows
    if kind not in (".tsv", ".csv", ".txt"):
        raise UsageError(f"{file} has an unknown ending; give .tsv, .csv, .jsonl or .parquet")
    csv.field_size_limit(1 << 30)
    with open(file, encoding="utf-8-sig", newline="") as lines:
        plain: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind != ".csv" else {}
        reader = csv.reader(lines, **plain)
        cells = [(reader.line_num, row) for row in reader if any(row)]
    names: list[Any] = list(range(len(cells[0][1]))) if cells else []
    if cells and any(name in cells[0][1] for name in wanted if name and not is_number(name)):
        first, names = cells.pop(0)
        _check_names(names, f"{file}, line {first}")
    for number, row in cells:
        if len(row) != len(names) and skip:
            row.clear()
        elif len(row) != len(names):
            raise UsageError(f"{file}, line {number} has {len(row)} columns and should have {len(names)}")
    return names, [(number, dict(zip(names, row))) for number, row in cells]  # noqa: B905


def _parsed(line: str, file: Path, number: int) -> dict[str, Any]:
    """A line of JSON. Raises UsageError for what is no object, or no text that can be written again."""

    names: list[str] = []  # of the outermost object, whose end comes last

    def named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names[:] = [name for name, _ in pairs]
        return dict(pairs)

    advice = "give one JSON object in each line"
    row = reading.parsed(line.rstrip(), file, number, advice=advice, object_pairs_hook=named)
    if not isinstance(row, dict):
        raise UsageError(f"{file}, line {number} is not a JSON object; {advice}")
    _check_names(names, f"{file}, line {number}")
    reading.refuse_halves(line, file, number)
    return row


def _check_names(names: list[Any], place: str) -> None:
    """Raises UsageError if two columns have one name, because one of them would be lost; columns may have none."""
    twice = next((name for number, name in enumerate(names) if name and name in names[:number]), None)
    if twice is not None:
        raise UsageError(f"{place} has two columns {twice!r}; give one of them another name, or remove it")
