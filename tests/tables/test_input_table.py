"""INPUTS: files as other programs write them, and the documents or the error that a build gives for each.

A row: its name, the files (name → content), options of the build as one string, then the texts of the documents in
order, or the Refused error. After that come parts of the lines on stderr, one for each line in order; a row without
them expects that the build prints nothing there. The command gets the files in this order; of "d/a.txt" it gets the
directory "d", and "-" is standard input, whose bytes come one by one.
"""

import gzip
import io
import shlex
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from reference.documents import json_text
from support.commands import refused, succeeds
from support.disk import put
from support.sources import (
    COMPRESSED,
    ENDING,
    INVALID,
    MAKE,
    PACK,
    as_arrow,
    as_arrow_file,
    as_parquet,
    as_tables,
    saved,
    zstd_frame,
)

import bertdata


class Refused(NamedTuple):
    """An error: its kind, what its sentence says, and its option."""

    kind: str
    says: str
    option: str | None = "inputs"


EVERY = MAKE | {"parquet": as_parquet, "fasta": lambda rows: "".join(f">a\n{row}\n" for row in rows).encode()}
NAME = {kind: f"a{ENDING.get(kind, f'.{kind}')}" for kind in EVERY}
MARK = "\ufeff".encode()  # a byte order mark
SKIPPED = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"  # a frame of zstd
FRAMES = SKIPPED.join([b"", PACK[".zst"](b"a\n\n") + zstd_frame(b"b", 27), zstd_frame(b"c", 27), b""])
DICTIONARY = bytes.fromhex("28b52ffd210701090000") + b"a"  # a frame of zstd that needs dictionary 7
NAMED_SO = {"a.txt": ".xz", "a.txt.gz": ".zst", "a.txt.gzip": ".gz", "a.jsonl.bgz.txt": ".gz", "a.txt.zstd": ".zst"}
TEXTS = ["the stone", "río ﬁ水", "[MASK]\0 x"]
ABC = pa.array(["a", "b", "c"])
BYTES = ABC.cast(pa.binary())
TYPED = [ABC.cast(kind) for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))]
TYPED += [BYTES, BYTES.cast(pa.large_binary()), BYTES.cast(pa.binary_view())]
TYPED += [each.dictionary_encode() for each in (TYPED[0], BYTES)]


def of(*names, column=ABC):
    return pa.table([column] * len(names), names)


def struct(*names, column=ABC):
    return pa.StructArray.from_arrays([column] * len(names), names)


ARROW = as_tables(of("text"))["a.arrow"]
TWICE, NULL = ("not-of-format", " has 2 columns "), ("bad-row", "the text is")
PICTURE = bytes(range(256)) * 8
COLUMNS = [  # key, what is special, the table, and the error, or nothing where "a", "b" and "c" are read
    ("text", "twice", of("text", "text"), TWICE),
    ("text", "another twice", of("n", "text", "n")),
    ("text", "no column", of("n"), ("no-column", " has no column 'text', only n")),
    ("text", "numbers", of("text", column=pa.array([1, 2, 3])), ("wrong-column-type", ": column 'text' is int64, ")),
    ("text", "null type", of("text", column=pa.nulls(3)), NULL),
    *[("text", f"of {column.type}", of("text", column=column)) for column in TYPED],
    ("d.t", "struct twice", of("d", "d", column=struct("t")), TWICE),
    ("d.t", "struct and another", pa.table([ABC, struct("t")], ["d", "d"])),
    ("d.t", "field twice", of("d", column=struct("t", "t")), TWICE),
    ("d.t", "another field twice", of("d", column=struct("n", "t", "n"))),
    ("d.t", "null type in a struct", of("d", column=struct("t", column=pa.nulls(3))), NULL),
    ("d.t", "bytes in a struct", of("d", column=struct("t", column=BYTES))),
]
INNER = pa.StructArray.from_arrays([pa.array(["x", None, "z"])], ["b"], mask=pa.array([False, False, True]))
NESTED = pa.table([struct("m", column=INNER), struct("k", column=ABC), ABC], ["a", "b", "a.m.c"])
OUTSIDE = as_arrow_file(["abcd", "efgh"]).replace(b"\4\0\0\0\x08\0\0\0", b"\4\0\0\1\x08\0\0\0")
NAMED = b'\xef\xbb\xbf"body, of it",n\r\n\r\n"a\r\nb",1\r\nc,2\r\n'
LINES = [*(Path(__file__).parents[1] / "rows.jsonl").read_bytes().splitlines(), b'{"text": "n"\0}']
BAD_JSON = [*(line for line in LINES if json_text(line, "text") is None), b"[" * 200_000]
ROW_A, FACE = b'{"text": "a"}\n', "\U0001f600 \ufffd x \ufffd\ufffd"
DEEP = b'{"n": %b, "text": "deep"}\n' % (b"[" * 100_000 + b"]" * 100_000)
FAILED, NO_MAP = "function-failed", b'\n\n{"text": "\\"\\\\ud800\\""}'  # json:loads gives half of a pair
LIST = b"\n [" + b'{"text": "a"},' * 9 + b'{"text": "b"}]'
LONE = b'{"text": "\\ud83d\\ude00 \\ud83d x \\ude00\\ud83d"}'
BAD_CSV = {b"1": "the row has", b"1,b,c": "the row has", b'1,"b"c': "quotation marks"}
BAD_ROWS = {"a.jsonl": b"{\n7\n", **as_tables(of("text", column=pa.nulls(9, pa.string())))}
DAMAGED_GZIP = gzip.compress(b"a")[:-9]
DAMAGED = [b"plain text\n", b"ARROW1", b"\xff\xff\xff\xff\x10\0\0\0", bytes(500)]
TREE = {f"d/{name}": b"" for name in ("README.md", "AA/x.md", "x.xml", "y.2007.en", ".git/x", "_SUCCESS")}
TREE |= {"d/a.txt": b"a", "d/AA/wiki_00": b"b", "d/b.jsonl.gz": gzip.compress(b'{"text": "c"}')}
TREE |= {"d/c.TXT.BZ2": PACK[".bz2"](b"d\n")}
LEFT = "(d/AA/x.md, d/README.md, d/x.xml, ...); 2 hidden (d/.git/x, d/_SUCCESS)"
SAVED, SEVERAL = saved("abcd"), {"d/dataset_dict.json": b"{}"} | saved("ab", "d/train") | saved("c", "d/test")
LOST = {name: content for name, content in SAVED.items() if name != "d/data-0.arrow"}
BAD_STATES = [*({"_data_files": [{"filename": name}]} for name in ("../a", "a\0")), {"_data_files": None}]


def coded(index):
    return pa.DictionaryArray.from_arrays(pa.array([index], pa.int32()), ABC[:1], safe=False)


def rows_of_columns():
    """Rows for each of COLUMNS: as a table of each format, and with --on-error skip before another file."""
    for key, what, table, *error in COLUMNS:
        for name, content in as_tables(table).items():
            options, files = f"--text-key {key}", {name: content}
            if not error:
                yield f"{name}: {what}", files, options, ["a", "b", "c"]
                continue
            [(kind, says)] = error
            option = "inputs" if kind == "bad-row" else "text_key"
            yield f"{name}: {what}", files, options, Refused(kind, says, option)
            why = says if kind == "bad-row" else "no row of "
            skipped = f"skipped: 3 rows that cannot be used, the first: {name}, row 1: {why}"
            files = files | {"x.jsonl": b'{"text": "x", "d": {"t": "x"}}'}
            yield f"{name}: {what}, skipped", files, f"{options} --on-error skip", ["x"], skipped


def bad_rows():
    """Rows for bad rows of every format: refused, skipped, and behind the last row that is read."""
    nulls = pa.array(["a", None, "c", None])
    tables = [as_tables(of("text", column=column)) for column in (nulls, nulls.dictionary_encode())]
    tables += [{"b.arrow": as_arrow_file(nulls.dictionary_encode("encode"))}]  # the dictionary has the null
    files = [
        *(("a.jsonl", b'{"text": "a"}\n\n%b\r\n{"text": "c"}\n7\n' % bad, "line 3: ") for bad in BAD_JSON),
        *((name, content, "row 2: the text is") for each in tables for name, content in each.items()),
        *(("a.csv", b"n,text\n1,a\n\n%b\n2,c\n1\n" % bad, "row 2: " + why) for bad, why in BAD_CSV.items()),
    ]
    for number, (name, content, place) in enumerate(files):
        yield f"{name}: bad {number}", {name: content}, "", Refused("bad-row", f"{name}, {place}")
        skipped = f"skipped: 2 rows that cannot be used, the first: {name}, {place}"
        yield f"{name}: bad {number}, skipped", {name: content}, "--on-error skip", ["a", "c"], skipped
        yield f"{name}: bad {number}, not reached", {name: content}, "--max-documents 1", ["a"]


INPUTS = [
    *[(f"{kind}: no row", {NAME[kind]: make([])}, "", Refused("empty", "")) for kind, make in EVERY.items()],
    *[(f"{kind}: no byte", {NAME[kind]: b""}, "", Refused("empty", "")) for kind in EVERY],
    *[
        (f"{kind}{ending}: in two pieces, {name}", {f"{name}{ending}": content}, f"--format {kind}", TEXTS)
        for kind, make in MAKE.items()
        for ending, pack in PACK.items()
        for name, content in dict.fromkeys((NAME[kind], "a.txt"), pack(make(TEXTS)[:9]) + pack(make(TEXTS)[9:])).items()
    ],
    *[
        (f"{kind}{ending}: piped", {"-": PACK[ending](make(TEXTS))}, f"--format {kind}", TEXTS)
        for kind, make in MAKE.items()
        for ending in PACK
    ],
    ("all formats", {f"{kind}{NAME[kind][1:]}": make([kind]) for kind, make in EVERY.items()}, "", [*EVERY]),
    # ---------------------------------------------------------------------------------------- directories, save_to_disk
    ("files of text among others", TREE, "", ["b", "a", "c", "d"], "4 files: 3 text, 1 jsonl; ", LEFT),
    ("saved", SAVED | {"d/cache-1.arrow": as_arrow(["x"])}, "", ["a", "c", "b", "d"], "2 files: 2 arrow; "),
    ("saved, only", SAVED, "--include data-1.arrow", ["a", "c"], "1 file: 1 arrow; ", "left out 1 file: 1 not "),
    ("saved, lost", LOST, "", Refused("not-found", "d/data-0.arrow", None)),
    *[(f"saved: {state}", saved("ab", **state), "", Refused("not-of-format", "d")) for state in BAD_STATES],
    ("saved with an index", saved("ab", _indices_data_files=[{"filename": "i"}]), "", Refused("unsupported", "d")),
    ("saved, several", SEVERAL, "", Refused("wrong-file-type", ": d/test, d/train")),
    ("saved, one", SEVERAL, "--include 'train/*.arrow'", ["b", "a"], "2 files: 2 arrow", "left out 7 files"),
    # -------------------------------------------------------------------------------------------- tables and surrogates
    *[
        (f"{name}: {content[:9]}", {name: content}, "", Refused("not-of-format", f"{name} is not readable "))
        for name, whole in as_tables(of("text", column=ABC.dictionary_encode())).items()
        for content in (whole[:-40], whole[: len(whole) // 3], b"PAR1" + bytes(60) + b"PAR1", *DAMAGED)
    ],
    *[
        (f"{name}: invalid bytes", {name: content}, "", ["ab", "\ufffdc"], f"the first at {name}, row 2; ")
        for name, content in as_tables(of("text", column=INVALID)).items()
    ],
    *[
        (f"arrow: index {index}", {"a.arrow": as_arrow_file(coded(index))}, "", Refused("not-of-format", ""))
        for index in (-1, 1, 2**31 - 1)
    ],
    ("a bad row before damage", {"a.jsonl": b"7", "b.gz": DAMAGED_GZIP}, "", Refused("bad-row", "a.jsonl, line 1: ")),
    ("the same, 4 workers", {"a.jsonl": b"7", "b.gz": DAMAGED_GZIP}, "--workers 4", Refused("bad-row", "a.jsonl, ")),
    ("text: later", {"a": b"x\n\n" * 99, "b": b"y\xe9"}, "--shard-size 90", [*"x" * 99, "y\ufffd"], "at b, byte 1; "),
    *rows_of_columns(),
    *bad_rows(),
    *[
        (f"{name}: nothing but bad rows", {name: content}, f"--on-error skip --shard-size {size}", Refused("empty", ""))
        for name, content in BAD_ROWS.items()
        for size in (1, 1 << 30)
    ],
    *[
        (f"{name}: {key}", {name: content}, f"--text-key {key} --on-error skip", *expected)
        for name, content in as_tables(NESTED).items()
        for key, *expected in (
            ("a.m.b", ["x"], f"skipped: 2 rows that cannot be used, the first: {name}, row 2: the text is"),
            ("a.m.c", ["a", "b", "c"]),
            ("b", Refused("empty", "had no text: 3")),
        )
    ],
    ("arrow: an offset outside of its data", {"a.arrow": OUTSIDE}, "", Refused("not-of-format", "a.arrow is not ")),
    ("arrow: a compressed file", {"a.arrow.gz": gzip.compress(ARROW)}, "", Refused("not-of-format", "a.arrow.gz is ")),
    ("arrow: a file that is piped", {"-": ARROW}, "--format arrow", Refused("not-of-format", "- is ")),
    ("parquet: compressed", {"a.parquet.gz": gzip.compress(as_parquet("a"))}, "", Refused("unsupported", "compressed")),
    ("jsonl: a piped bad row", {"-": ROW_A + b"7"}, "--format jsonl --on-error skip", ["a"], "first: -, byte 14: "),
    ("csv: a long name", {"a.csv": NAMED}, "--text-key 'body, of it'", ["a\r\nb", "c"]),
    *[
        (f"csv: {content}", {"a.csv": content}, "", Refused("not-of-format", "a.csv"))
        for content in (b"\n\r\n\n", b'text,"a"b\n', b'text,"a')
    ],
    ("csv: no end", {"a.csv": b'text\na\n"b\nc'}, "--on-error skip", Refused("not-of-format", "a.csv, row 2: ")),
    ("csv: invalid bytes", {"a.csv": b"text\na\n\xe2\x82b\xff\n"}, "", ["a", "\ufffdb\ufffd"], "2 sequences of bytes "),
    ("tsv: cp1252", {"a.tsv": "n\ttext\n1\tnaïve\n".encode("cp1252")}, "--encoding cp1252", ["naïve"]),
    ("text: cp1252, strict", {"a": b"a\n\n\x81\n"}, "--encoding cp1252 --strict", Refused("not-text", "a, line 3 ")),
    *[
        (f"{name}: {encoding}", {name: PACK[name[-3:]](text.encode(encoding))}, f"--encoding {encoding}", ["naïve €5"])
        for name, text in (("a.txt.gz", "naïve €5"), ("a.ndjson.gz", '\n{"text": "naïve €5"}\n'))
        for encoding in ("cp1252", "utf-16", "gb18030", "utf-8-sig")
    ],
    ("text: one byte", {"a": b"\xff" + b"a" * 20000}, "", ["\ufffd" + "a" * 20000], "--strict fails instead\n"),
    ("text: latin-1", {"a.txt": b"H\xe4user " * 200}, "", ["H\ufffduser " * 200], "; if a text file is"),
    *[
        (f"{name}: a picture", {name: content}, "", Refused("wrong-column-type", f"{name}: the bytes in ", "text_key"))
        for name, content in as_tables(of("text", column=pa.array([PICTURE] * 3))).items()
    ],
    ("csv: twice", {"a.csv": b"text,text\na,b\n"}, "", Refused("not-of-format", "a.csv has 2 columns ", "text_key")),
    ("csv: skipped", {"a.csv": b"n\na", "b.csv": b"text\nx\n"}, "--on-error skip", ["x"], "text: a.csv has no "),
    ("csv: in .txt", {"a.txt": b'text\n"a\nb"', "b.txt": b"text\nc"}, "--format csv --shard-size 4", ["a\nb", "c"]),
    ("csv: another twice", {"a.csv": b"n,text,n\n1,a,2\n"}, "", ["a"]),
    ("tsv: no header", {"a.tsv": b"it 's\t0\nb\t1\n"}, "--text-key 0", ["it 's", "b"]),
    ("tsv: no header, last column", {"a.tsv": b"0\ta\n0\tb\n"}, "--text-key=-1", ["a", "b"]),
    ("csv: a header of numbers", {"a.csv": b"1,0\na,b\n"}, "--text-key 0", ["b"]),
    ("csv: a header of numbers, index", {"a.csv": b",0\n0,b\n"}, "--text-key 0", ["b"]),
    ("csv: a name that is a number", {"a.csv": b"2024,n\na,b\n"}, "--text-key 2024", ["a"]),
    ("csv: no such number", {"a.csv": b"a,b\n"}, "--text-key 2", Refused("no-column", "only a, b; name ", "text_key")),
    ("surrogate", {"a.jsonl.gz": gzip.compress(ROW_A + LONE)}, "", ["a", FACE], "gz, line 2; --strict fails instead\n"),
    ("jsonl: lone, --map", {"a.jsonl": LONE}, "--map bertdata.prepare:nfc", [FACE], "3 lone surrogates or "),
    *[
        (name, {"a.jsonl": NO_MAP}, f"--map {name} --on-error skip", Refused(kind, ", line 3: ", "map"))
        for name, kind in (("builtins:len", "bad-function"), ("json:loads", FAILED), ("math:sqrt", FAILED))
    ],
    ("jsonl: lone, strict", {"a.jsonl": ROW_A + LONE}, "--strict", Refused("not-text", "; correct it, or build ")),
    ("jsonl: byte first, bad row", {"a.jsonl": b'{"text": "\xff"}\n7'}, "--strict", Refused("not-text", "line 1 has ")),
    ("jsonl: bad row, byte", {"a.jsonl": b'7\n{"text": "\xff"}'}, "--strict", Refused("bad-row", "line 1: ")),
    ("jsonl: another key", {"a.jsonl": b'{"text": "a", "b": "\\ud83d"}\n'}, "--strict", ["a"]),
    ("jsonl: any depth", {"a.jsonl": ROW_A + DEEP}, "", ["a", "deep"]),
    *[
        (f"json: an array, {name}{options}", {name: content}, options, Refused("not-of-format", f"{name} "))
        for name, content in {"a.json": LIST, "a.json.gz": gzip.compress(LIST.replace(b"[", b"[\r\n"))}.items()
        for options in ("", "--on-error skip")
    ],
    # ------------------------------------------------------------- compression, byte order marks, keys and file names
    *[
        (f"{name}: its first bytes tell how it is compressed", {name: PACK[ending](b"a\n\nb")}, "", ["a", "b"])
        for name, ending in [*product(("a", "-"), COMPRESSED), *NAMED_SO.items()]
    ],
    ("zstd with windows of 2^27, among frames with none", {"a.zst": FRAMES}, "", ["a", "bc"]),
    ("zstd with a large window", {"a.zst": zstd_frame(b"a", 28)}, "", Refused("unsupported", "a larger window", None)),
    ("xz: padding", {"a.xz": PACK[".xz"](b"a\n") + bytes(8) + PACK[".xz"](b"\nb") + bytes(8)}, "", ["a", "b"]),
    ("zeros behind gzip", {"a.gz": PACK[".gz"](b"a") + bytes(9)}, "", Refused("cut-short", "other bytes", None)),
    ("a zstd dictionary", {"a.zst": DICTIONARY}, "", Refused("unsupported", "needs a dictionary", None)),
    *[
        (f"{what}, not compressed text", {"a": content}, "", Refused("not-text", what))
        for what, content in (
            ("zip", b"PK\3\4" + bytes(26)),
            ("tar", b"a.txt" + bytes(252) + b"ustar\0" + bytes(250) + b"text"),
            ("Parquet", as_parquet(TEXTS)),
            ("UTF-16; give --encoding utf-16", "text\n".encode("utf-16")),
            ("UTF-16", "река".encode("utf-16")),
            ("lz4", b"\x04\x22\x4d\x18" + bytes(9)),
            ("gzip", PACK[".gz"](PACK[".gz"](b"twice"))),
        )
    ],
    *[
        (f"{kind}{ending}: a mark", {NAME[kind] + ending: PACK[ending](MARK + EVERY[kind](["a"]))}, how, ["a"])
        for kind in ("text", "jsonl", "csv", "tsv", "fasta")
        for ending in ("", ".gz")
        for how in (["", "--documents line", "--documents file"] if kind == "text" else [""])
    ],
    ("text: two marks", {"a.txt": MARK + b"a", "b.txt": MARK + b"\n\nb"}, "", ["a", "b"]),
    ("text: a mark and UTF-16", {"a.txt": "\ufeffa".encode("utf-16-le")}, "--encoding utf-16-le", ["a"]),
    ("text: CR", {"a.txt": b"a\r\rb"}, "", ["a\r\rb"], "a.txt: lines end with CR alone"),
]


class OneByOne(io.BytesIO):
    """Bytes that come one by one, as through a pipe of a slow program."""

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:1])


@pytest.mark.parametrize(
    ("files", "options", "expected", "said"), [pytest.param(f, o, e, w, id=i) for i, f, o, e, *w in INPUTS]
)
def test_files_give_these_documents(tmp_path, monkeypatch, files, options, expected, said):
    monkeypatch.chdir(tmp_path)
    for name in files.keys() - {"-"}:
        put(tmp_path / name, files[name])
    inputs = dict.fromkeys(name.partition("/")[0] for name in files)
    options = ["--type", "bytes", "--validation", 0, "--workers", 1, *shlex.split(options)]
    arguments = ["build", *inputs, "--out", "out", *options]
    piped = {"input": io.BufferedReader(OneByOne(files.get("-")))}
    if isinstance(expected, Refused):
        refused("bertdata", *arguments, kind=expected.kind, option=expected.option, says=expected.says, **piped)
        assert not Path("out").exists()
        return
    lines = succeeds("bertdata", *arguments, **piped).stderr.splitlines()
    assert len(lines) == len(said), lines
    assert all(part in f"{line}\n" for part, line in zip(said, lines, strict=True)), lines
    dataset = bertdata.open("out")
    assert [bytes(id - 5 for id in dataset.document(n)).decode() for n in range(len(dataset))] == expected
