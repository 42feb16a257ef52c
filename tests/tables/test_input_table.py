"""INPUTS: files as other programs write them, and the documents or the error that a build gives for each.

A row: its name, the files (name → content), options of the build as one string, then the texts of the documents in
order, or the Refused error. After that come parts of the lines on stderr, one for each line in order; a row without
them expects that the build prints nothing there. The command gets the files in this order; of "d/a.txt" it gets the
directory "d", and "-" is standard input.
"""

import shlex
from typing import NamedTuple

import pytest
from helpers import refused, succeeds
from sources import COMPRESSED, ENDING, MAKE, PACK, as_parquet, write

import bertdata
from bertdata.cli import main


class Refused(NamedTuple):
    """An error: its kind, what its sentence says, and its option."""

    kind: str
    says: str
    option: str | None = "inputs"


EVERY = MAKE | {"parquet": as_parquet, "fasta": lambda rows: "".join(f">a\n{row}\n" for row in rows).encode()}
NAME = {kind: f"a{ENDING.get(kind, f'.{kind}')}" for kind in EVERY}
TEXTS = ["the stone", "río ﬁ水", "[MASK]\0 x"]
INPUTS = [
    *[(f"{kind}: one row", {NAME[kind]: make(["stone"])}, "", ["stone"]) for kind, make in EVERY.items()],
    *[(f"{kind}: some rows", {NAME[kind]: make(TEXTS)}, "", TEXTS) for kind, make in EVERY.items() if kind != "fasta"],
    *[(f"{kind}: no row", {NAME[kind]: make([])}, "", Refused("empty", "")) for kind, make in EVERY.items()],
    *[(f"{kind}: no byte", {NAME[kind]: b""}, "", Refused("empty", "")) for kind in EVERY],
    *[
        (f"{kind}: no newline at the end", {NAME[kind]: EVERY[kind](TEXTS).rstrip(b"\r\n")}, "", TEXTS)
        for kind in ("text", "jsonl", "csv", "tsv")
    ],
    *[
        (f"{kind}: a shorter second file", {NAME[kind]: make(TEXTS), f"b{NAME[kind]}": make(["x"])}, "", [*TEXTS, "x"])
        for kind, make in EVERY.items()
        if kind != "fasta"
    ],
    *[
        (f"{kind}{ending}: read", {NAME[kind] + ending: PACK[ending](EVERY[kind](TEXTS))}, "", TEXTS)
        for kind in MAKE
        for ending in COMPRESSED
    ],
    # ---------------------------------------------------------------------------------------------- text of any format
    ("text: CR LF", {"a.txt": b"a\r\n\r\nb\r\nc\r\n"}, "", ["a", "b\nc"]),
    ("csv: CR LF", {"a.csv": b'text,n\r\n"a\r\nb",1\r\nc,2\r\n'}, "", ["a\r\nb", "c"]),
    (
        "text: invalid bytes",
        {"a.txt": b"a\xff\xe2\x82b"},
        "",
        ["a\ufffd\ufffdb"],
        "2 sequences of bytes that are not UTF-8, the first at a.txt, byte 1; --strict fails instead",
    ),
    ("text: invalid bytes, strict", {"a.txt": b"a\xff"}, "--strict", Refused("not-text", "a.txt, byte 1 ")),
    ("text: standard input", {"-": b"a\n\nb"}, "", ["a", "b"]),
    ("text: a directory", {"d/b.txt": b"b", "d/a.txt": b"a"}, "", ["a", "b"], "2 files: 2 text; 2 bytes"),
    # -------------------------------------------------------------------------------------------- tables and surrogates
    # ------------------------------------------------------------- compression, byte order marks, keys and file names
]


@pytest.mark.parametrize(
    ("files", "options", "expected", "said"), [pytest.param(f, o, e, w, id=i) for i, f, o, e, *w in INPUTS]
)
def test_files_give_these_documents(tmp_path, monkeypatch, files, options, expected, said):
    monkeypatch.chdir(tmp_path)
    for name in files.keys() - {"-"}:
        write(tmp_path / name, files[name])
    inputs = dict.fromkeys(name.partition("/")[0] for name in files)
    options = ["--type", "bytes", "--validation", 0, "--workers", 1, *shlex.split(options)]
    arguments, piped = ["build", *inputs, "--out", "out", *options], {"input": files.get("-")}
    if isinstance(expected, Refused):
        refused(main, *arguments, kind=expected.kind, option=expected.option, says=expected.says, **piped)
        return
    lines = succeeds(main, *arguments, **piped).stderr.splitlines()
    assert len(lines) == len(said), lines
    assert all(part in line for part, line in zip(said, lines, strict=True)), lines
    dataset = bertdata.open("out")
    assert [bytes(id - 5 for id in dataset.document(n)).decode() for n in range(len(dataset))] == expected
