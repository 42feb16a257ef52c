"""Ids that other libraries wrote, in any of choices.IDS_FORMATS → their documents."""

from __future__ import annotations

from pathlib import Path

from bertdata.errors import InputError
from bertdata.sources.flat import open_datatrove, open_nanogpt
from bertdata.sources.idfile import IdsFile, stated_dtype
from bertdata.sources.indexed import INDEX, directories_of, open_index
from bertdata.sources.inputs import ending_of
from bertdata.sources.litdata import open_litdata
from bertdata.sources.mds import open_mds
from bertdata.sources.megatron import open_megatron
from bertdata.sources.rows import open_rows


def format_of(name: str) -> str:
    """One of choices.IDS_FORMATS, by the name, or by the index.json of a directory.

    Raises InputError for a name that says nothing, and for an index.json that is no JSON.
    """
    path = Path(name)
    if ending_of(name) == ".idx" or Path(f"{str(path).removesuffix('.bin')}.idx").exists():
        return "megatron"
    if path.is_dir():
        return _format_of_directory(name)
    if ending_of(name) == ".bin" and path.with_name(INDEX).exists():
        sentence = f"{name} is beside an index.json; give the directory if litdata wrote it, else say --format nanogpt"
        raise InputError(sentence, "unknown-format", option="inputs", given=name)
    formats = {".bin": "nanogpt", ".ds": "datatrove", ".parquet": "rows", ".arrow": "rows"}
    format = formats.get(ending_of(name))
    if format is None:
        sentence = f"{name} has no known ending (.idx .bin .ds .parquet .arrow); say what it is with --format"
        raise InputError(sentence, "unknown-format", option="inputs", given=name)
    return format


def _format_of_directory(name: str) -> str:
    for directory in directories_of(name)[:1]:
        content = open_index(directory).content
        members = content.keys() if isinstance(content, dict) else set()
        if {"version", "shards"} <= members:
            return "mds"
        if {"chunks", "config"} <= members:
            return "litdata"
    return "rows"


def open_ids(name: str, format: str, end_token: int | None, dtype: str | None = None) -> IdsFile:
    """Opens an input of ids. format: one of choices.IDS_FORMATS.

    end_token: the id that ends a document of nanoGPT, and of litdata if it is given. dtype: one of choices.IDS_DTYPES,
    that of the ids where the file does not say it; None: it is guessed.

    Raises UsageError for a dtype that is missing, or that the file says itself, and InputError if a file cannot be
    read, is not of this format, or contradicts itself.
    """
    if format == "nanogpt":
        assert end_token is not None  # noqa: S101  (importing.py gives one)
        return open_nanogpt(name, end_token, dtype)
    if format == "mds":
        return open_mds(name, dtype)
    if dtype is not None:
        raise stated_dtype(name, dtype)
    if format == "litdata":
        return open_litdata(name, end_token)
    return {"megatron": open_megatron, "datatrove": open_datatrove, "rows": open_rows}[format](name)
