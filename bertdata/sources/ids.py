"""Ids that other libraries wrote, in any of choices.IDS_FORMATS → their documents."""

from __future__ import annotations

from pathlib import Path

from bertdata.errors import InputError
from bertdata.sources.flat import open_nanogpt
from bertdata.sources.idfile import IdsFile, stated_dtype
from bertdata.sources.inputs import ending_of
from bertdata.sources.megatron import open_megatron
from bertdata.sources.rows import open_rows

_FORMAT_OF = {".bin": "nanogpt", ".parquet": "rows", ".arrow": "rows"}  # by ending


def format_of(name: str) -> str:
    """Return one of choices.IDS_FORMATS, by the name. Raises InputError for a name that says nothing."""
    path = Path(name)
    if ending_of(name) == ".idx" or Path(f"{str(path).removesuffix('.bin')}.idx").exists():
        return "megatron"
    format = "rows" if path.is_dir() else _FORMAT_OF.get(ending_of(name))
    if format is None:
        sentence = f"{name} has no known ending (.idx .bin .parquet .arrow); say what it is with --format"
        raise InputError(sentence, "unknown-format", option="inputs", given=name)
    return format


def open_ids(name: str, format: str, end_token: int | None, dtype: str | None = None) -> IdsFile:
    """Open an input of ids. format: one of choices.IDS_FORMATS.

    end_token: the id that ends a document of nanoGPT. dtype: one of choices.IDS_DTYPES, that of the ids where the file
    does not say it; None: it is guessed.

    Raises UsageError for a dtype that the file says itself, and InputError if a file cannot be read, is not of this
    format, or contradicts itself.
    """
    if format == "nanogpt":
        assert end_token is not None  # noqa: S101  (importing.py gives one)
        return open_nanogpt(name, end_token, dtype)
    if dtype is not None:
        raise stated_dtype(name, dtype)
    return open_megatron(name) if format == "megatron" else open_rows(name)
