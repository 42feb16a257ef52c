"""The text section of docs/format.md in plain Python: a file's bytes → its documents, line by line."""

import csv
import io
import json
from itertools import groupby


def decode(data):
    """The text with U+FFFD for what is invalid, as UTF-8, and how many that took."""
    text = data.decode("utf-8", "replace").encode()
    return text, text.count("\ufffd".encode()) - data.count("\ufffd".encode())


def lines(data):
    """(place of the first byte, line without its ending) of each line."""
    found, start = [], 0
    for piece in io.BytesIO(data):
        ended = piece.endswith(b"\n")
        found.append((start, piece.removesuffix(b"\n").removesuffix(b"\r") if ended else piece))
        start += len(piece)
    return found


def is_blank(line):
    return not line.strip(b" \t\r")


def documents(data, kind):
    """(place of the first byte, bytes of the text before they are made valid) of each document."""
    numbered = lines(data)
    if kind == "file":
        groups = [numbered] if any(not is_blank(line) for _, line in numbered) else []
    elif kind == "line":
        groups = [[each] for each in numbered if not is_blank(each[1])]
    else:
        runs = groupby(numbered, lambda each: is_blank(each[1]))
        groups = [[*run] for are_blank, run in runs if not are_blank]
    return [(group[0][0], b"\n".join(line for _, line in group)) for group in groups]


def first_invalid(data, start):
    """The place in `data` of the first invalid byte at or after `start`."""
    try:
        data[start:].decode()
    except UnicodeDecodeError as error:
        return start + error.start
    return None


def json_text(line, key):
    """The string of a line of JSON as UTF-8 and how much of it was replaced; None if there is none."""
    text, num_replaced = decode(line)
    try:
        row = json.loads(text, parse_int=float)
    except ValueError:
        return None
    value = row.get(key) if isinstance(row, dict) else None
    if value is None:
        value = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, str):
        return None
    valid = "".join("\ufffd" if "\ud800" <= each <= "\udfff" else each for each in value)
    return valid.encode(), num_replaced + sum("\ud800" <= each <= "\udfff" for each in value)


def delimited(data, num_fields):
    """The last field of each row of CSV that is not blank; None if a field has no end.

    It is None where the row has another number of fields, or quotation marks that are not CSV.
    """
    lines = io.StringIO(data.decode("utf-8", "surrogateescape"), newline="").readlines()
    rows = []
    while lines:
        for count in range(1, len(lines) + 1):  # the fewest lines that are a row
            try:
                row = next(csv.reader(lines[:count], strict=True))
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    continue
                row = [None]
            break
        else:
            return None
        del lines[:count]
        if row:
            rows.append(row[-1].encode("utf-8", "surrogateescape") if len(row) == num_fields else None)
    return rows


def fasta(data):
    """(place of the record, places of the bytes of its sequence) of each; None if there is text before the first."""
    records = []
    for start, line in lines(data):
        places = [place for place in range(start, start + len(line)) if data[place] not in b" \t\r"]
        if line.startswith(b">"):
            records.append((start, []))
        elif places and not line.startswith(b";"):
            if not records:
                return None
            records[-1][1].extend(places)
    return records
