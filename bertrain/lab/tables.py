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
from typing import Any, TextIO

from bertdata.support import TEMPORARY, UsageError, fsync_directory, naming
from bertrain.commands import reading

TEXTS = ("text", "other")  # the options that name columns of text
LONGEST_ROW = 1 << 26  # characters of a line
_ROWS = 10_000  # of a row group of Parquet


@dataclass(frozen=True)
class Table:
    """The rows of a file as they stand there, and which columns are which. A role is the name of an option: "label"."""

    path: Path
    names: list[Any]  # of the columns; the number from 0 of one without a name in a TSV or CSV
    rows: list[dict[Any, Any]]  # by the names of the columns
    places: list[str]  # "file, line n" of each
    columns: dict[str, Any]  # the name of each, by its role
    num_left: int  # rows that were left out

    def values(self, role: str) -> list[Any]:
        """Return the values of the column of a role, as in the file."""
        return [row[self.columns[role]] for row in self.rows]

    def texts(self, role: str) -> list[str]:
        """Return the texts of the column of a role. A text that is a list is joined by spaces."""
        return [_text(value) for value in self.values(role)]


@dataclass(frozen=True)
class Examples:
    """The labelled texts of a file."""

    texts: list[str]
    others: list[str] | None  # the second text of each, of pairs
    labels: list[Any]  # as they stand in the file
    places: list[str] = field(default_factory=list, compare=False)  # "file, line n" of each, for messages
    num_left: int = 0  # rows that were left out


def read(path: str, *, text: str, other: str, label: str, skip: bool = False, unlabelled: bool = False) -> Examples:
    """Read the rows of a file. text, other, label: columns, by name or number from 0. other "": no second text.

    A TSV or CSV whose first row holds one of these names, or "label", has a header; else columns are numbered. A text
    that is a list is joined by spaces. skip: leaves out rows that do not fit, and those labelled "-", on which
    annotators did not agree. unlabelled: an empty label is a label. Raises UsageError, naming the file and the line,
    for what does not fit and for empty labels.
    """
    rows = table(path, {"text": text, "other": other, "label": label}, skip, unlabelled, only=True)
    others = rows.texts("other") if other else None
    return Examples(rows.texts("text"), others, rows.values("label"), rows.places, rows.num_left)


def table(
    path: str, roles: dict[str, str], skip: bool = False, unlabelled: bool = False, *, only: bool = False
) -> Table:
    """Read all rows of a file. roles: the option that names a column → the column, or "". Else as in `read`.

    only: rows of Parquet have the columns of the roles alone.
    """
    for role, column in roles.items():
        if not column and role != "other":
            raise UsageError(
                f"--{role} is empty; give a column of {path}, by its name or its number from 0", "missing", option=role
            )
    file, roles = Path(path), {role: column for role, column in roles.items() if column}
    try:
        names, rows = _rows(file, {"label", *roles.values()}, skip, only)
    except UsageError:
        raise
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; check the name", "not-found", given=path) from None
    except OSError as error:
        sentence = f"{path} cannot be read: {error.strerror or error}; give a file that can"
        raise UsageError(sentence, "unreadable", given=path) from None
    except (ValueError, csv.Error) as error:  # no Parquet, ...
        if isinstance(error, UnicodeDecodeError) and file.suffix.lower() != ".parquet":
            reading.decoded(file.read_bytes(), path)  # which names the line
        sentence = f"{path} cannot be read: {error}; correct it, or give another file"
        raise UsageError(sentence, "not-of-format", given=path) from None
    if not rows:
        raise UsageError(f"{path} holds no examples; give a row for each", "empty", given=path)
    columns = _columns(path, roles, names)
    num_rows = len(rows)
    if skip:
        rows = _fitting(path, rows, columns)
    for role, column in columns.items():
        for number, row in rows:
            value = row.get(column)
            if value is None or (role == "label" and not unlabelled and not str(value).strip()):
                raise UsageError(
                    f"{path}, line {number} has no value for column {column!r}; fill it or remove the row", "bad-row"
                )
    places = [f"{path}, line {number}" for number, _ in rows]
    return Table(file, names, [row for _, row in rows], places, columns, num_rows - len(rows))


def _columns(path: str, roles: dict[str, str], names: list[Any]) -> dict[str, Any]:
    """Return the column of each role. Raises UsageError for a missing column, or for one column of two roles."""
    columns: dict[str, Any] = {}
    for role, wanted in roles.items():
        columns[role] = _named(wanted, names)
        if columns[role] is None:
            listed = ", ".join(map(str, names))
            sentence = f"{path} has no column {wanted!r} for --{role}; give one of {listed}"
            raise UsageError(sentence, "no-column", option=role, given=wanted)
    for role, other in itertools.combinations(columns, 2):
        if columns[role] == columns[other]:
            sentence = (
                f"{path}: --{role} and --{other} name the same column, {columns[role]!r}; give different ones of "
                f"{', '.join(map(str, names))} (tabs separate the columns of a .tsv, commas those of a .csv)"
            )
            raise UsageError(sentence, "conflict", option=other, given=roles[other])
    return columns


def write(path: Path, like: Table, rows: Iterator[dict[Any, Any]]) -> None:
    """Write rows to a new file, completely or not at all, in the format of the file that `like` was read from.

    A column of texts is one of strings in Parquet. rows: with the columns of `like`, one after the other, so that they
    need not fit in memory.
    """
    temporary, kind = path.with_name(path.name + TEMPORARY), like.path.suffix.lower()
    with naming(path), open(temporary, "wb") as file:
        if kind == ".parquet":
            _write_parquet(file, like, rows)
        else:
            with io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True) as lines:
                named = {name: "" if isinstance(name, int) else name for name in like.names}
                header = [named] if any(named.values()) else []
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


def _named(wanted: str, names: list[Any]) -> Any:
    """Return the name of a column that is given by name or number; None if it is missing."""
    if wanted in names:
        return wanted
    return names[int(wanted)] if is_number(wanted) and -len(names) <= int(wanted) < len(names) else None


def is_number(column: str) -> bool:
    """Return whether a column is given by its number and not by its name."""
    return column.removeprefix("-").isdecimal()


def _fitting(
    path: str, rows: list[tuple[int, dict[Any, Any]]], columns: dict[str, Any]
) -> list[tuple[int, dict[Any, Any]]]:
    """Return the rows with a value in each column, and a label other than "-". Raises UsageError if there is none."""

    def fits(row: dict[Any, Any]) -> bool:
        is_filled = all(row.get(column) not in (None, "") for column in columns.values())
        return is_filled and row[columns["label"]] != "-"

    fitting = [(number, row) for number, row in rows if fits(row)]
    if not fitting:
        sentence = f"{path}: none of its rows has all columns, with a text and a label; give another file"
        raise UsageError(sentence, "empty", given=path)
    return fitting


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _rows(file: Path, wanted: set[str], skip: bool, only: bool) -> tuple[list[Any], list[tuple[int, dict[Any, Any]]]]:
    """Return the names of the columns, and the rows with their lines.

    wanted: names that tell a header. skip: see read. only: see table.
    """
    kind = file.suffix.lower()
    if kind == ".parquet":
        import pyarrow.parquet

        columns = pyarrow.parquet.read_schema(file).names
        _check_names(columns, str(file))
        used = {_named(name, columns) for name in wanted}
        table = pyarrow.parquet.read_table(file, columns=[name for name in columns if name in used] if only else None)
        rows = list(enumerate(table.to_pylist(), 1))
        for number, row in rows:
            for name, value in row.items():
                if isinstance(value, bytes) and name in used:
                    row[name] = reading.decoded(value, f"{file}, row {number}")
        return columns, rows
    if kind in (".jsonl", ".json"):
        rows = []
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(_lines(lines, file), 1):
                if not line.strip():
                    continue
                rows.append((number, _parsed(line, file, number)))
        return list(rows[0][1]) if rows else [], rows
    if kind not in (".tsv", ".csv", ".txt"):
        raise UsageError(
            f"{file} has an unknown ending; give .tsv, .csv, .jsonl or .parquet", "unknown-format", given=str(file)
        )
    csv.field_size_limit(LONGEST_ROW)
    with open(file, encoding="utf-8-sig", newline="") as lines:
        plain: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind != ".csv" else {}
        reader = csv.reader(_lines(lines, file), **plain)
        cells = [(reader.line_num, row) for row in reader if any(row)]
    names: list[Any] = list(range(len(cells[0][1]))) if cells else []
    if cells and any(name in cells[0][1] for name in wanted if name and not is_number(name)):
        first, header = cells.pop(0)
        names = [name or number for number, name in enumerate(header)]
        _check_names(names, f"{file}, line {first}")
    for number, row in cells:
        if len(row) != len(names) and skip:
            row.clear()
        elif len(row) != len(names):
            raise UsageError(
                f"{file}, line {number} has another number of columns, {len(row)}, than the first row, {len(names)}; "
                "correct the row",
                "bad-row",
            )
    return names, [(number, dict(zip(names, row))) for number, row in cells]  # noqa: B905


def _lines(text: TextIO, file: Path) -> Iterator[str]:
    """Yield the lines of a text with their ends. Raises UsageError for one that is too long."""
    number = 0
    while line := text.readline(LONGEST_ROW + 1):
        number += 1
        if len(line) > LONGEST_ROW:
            sentence = f"{file}, line {number} is longer than {LONGEST_ROW >> 20} Mi characters; split it"
            raise UsageError(sentence, "too-large", given=str(file))
        yield line


def _parsed(line: str, file: Path, number: int) -> dict[str, Any]:
    """Parse a line of JSON. Raises UsageError if it is not an object, or cannot be written again."""

    names: list[str] = []  # of the outermost object, whose end comes last

    def remembered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names[:] = [name for name, _ in pairs]
        return dict(pairs)

    advice = "give one JSON object in each line"
    row = reading.parsed(line.rstrip(), file, number, advice=advice, object_pairs_hook=remembered)
    if not isinstance(row, dict):
        raise UsageError(f"{file}, line {number} is not a JSON object; {advice}", "bad-row")
    _check_names(names, f"{file}, line {number}")
    reading.refuse_halves(line, file, number)
    return row


def _check_names(names: list[Any], row: str) -> None:
    """Raise UsageError if two columns have one name, because one of them would be lost."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        sentence = f"{row} has two columns {twice!r}; give one of them another name, or remove it"
        raise UsageError(sentence, "not-of-format")
