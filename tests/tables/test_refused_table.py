"""REFUSED: options and inputs that a command or a function of bertdata does not take. Nothing is written."""

import gzip
import os
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reference import ids
from support.commands import refused, refuses
from support.data import build, import_ids
from support.disk import write_all

from bertdata.cli import main

NAN, TEXTS, IDS = float("nan"), ["salt", "river"], [[10, 11, 3], [12]]
PREPARE, SECRET = "bertdata.prepare", "s3://key:secret@bucket/a.txt"
URLS = f"{SECRET} az://container/a.txt?sig=secret http://[::1/secret s3:// hf://datasets/one https://host:port/a.txt "
URLS += f"https://u:sec\u2100ret@host/a s3://bucket/a//b.txt https://{'a' * 64}.org/a.txt https://a..org/a.txt"

COMMANDS = {  # kind and option of the error → command lines. build and import also get --out out --tokenizer
    "malformed part": [f"build t.txt --part={part}" for part in ("0/3", "4/3", "1", "1/0", "a/b", "-1/3", "''")],
    "malformed shard_size": [f"build t.txt --shard-size {size}" for size in ("many", "9" * 20, "9" * 400, "0.5")],
    "out-of-range shard_size": ["build big.txt --shard-size 1"],  # which would be a unit for each byte
    "malformed documents": ["build t.txt --documents page"],
    "malformed type": [f"{command} t.txt --type char" for command in ("build", "train-tokenizer")],
    "malformed ray": ["build t.txt --ray t.txt", "build t.txt --ray ray://host:10001"],
    "malformed format": ["import a.bin --format csv"],
    "tokenizer-not-found tokenizer": ["build t.txt --tokenizer ./nowhere.json"],
    "out-exists out": [f"{words} --out t.txt" for words in ("build t.txt", "train-tokenizer t.txt")]
    + [f"build t.txt --out {out}{more}" for out in ("d", "t.txt") for more in ("", " --overwrite")],
    "bad-url out": [
        *(f"build t.txt --out {url}" for url in ("hdfs://n:9/d/", "s3://bucket/x", "https://u:secret@h/x?y=secret")),
        *(f"{words} --out s3://bucket/x" for words in ("build --finish", "train-tokenizer t.txt", "export shards")),
    ],
    "bad-url url": ["push shards https://u:secret@host/x", "push shards x", "pull x copy"],
    "bad-url": [f"inspect https://{rest}" for rest in ("u:secret@host/x", "host/x?token=secret", "host/x?secret")],
    "bad-url inputs": ["build hdfs://n:9/d/", "import s3://bucket/a.bin"],
    "missing out": [f"{words} --out ''" for words in ("build t.txt", "build --finish", "train-tokenizer t.txt")],
    "missing inputs": ["build", "train-tokenizer --out x"],
    "parts-missing out": ["build --finish"],
    "unknown --seed": ["build --finish --seed 1"],
    "unknown roles": [f"build t.txt --roles {r}" for r in ("mask=[M]", "bos=[CLS]", "mask", "sep=", "pad=a,pad=[SEP]")],
    "conflict roles": ["build t.txt --roles cls=[CLS],mask=[CLS]"],
    "conflict inputs": ["build t.txt --finish", "import a.bin r.parquet", "train-tokenizer t.txt --type bytes --out x"],
    "conflict part": ["build --finish --part 1/2", "build t.txt --ray auto --part 1/2"],
    "conflict overwrite": ["build --finish --overwrite"],
    "conflict max_documents": ["build --finish --max-documents 3"],
    "conflict tokenizer": ["build --finish --tokenizer t.json"],
    "conflict ray": ["build t.txt --ray local --max-documents 5", "build - --ray"],
    "conflict end_token": ["import r.parquet --end-token [SEP]", "import m.bin --end-token [SEP]"],
    "conflict dtype": [f"import {name} --dtype uint16" for name in ("m.bin", "l.bin")],
    "conflict html": ["inspect shards --json --html x"],
    "unknown-format inputs": ["import t.txt"],
    "unsupported inputs": [f"import z.bin.gz --format {name}" for name in ("auto", "nanogpt")],
    "unknown end_token": ["import a.bin --end-token </s>"],
    "empty inputs": ["import /"],
    "read-once inputs": [
        *(f"import {name}" for name in ("p.bin --format nanogpt", "q.idx --format megatron", "p.parquet")),
        "import o.bin --format megatron",  # the other file of two is none
    ],
    "not-found": ["import nowhere.bin", *(f"{command} nowhere" for command in ("build", "inspect", "show", "verify"))],
    "wrong-file-type": ["build /dev/null"],
    "not-a-dataset": [f"{command} ." for command in ("inspect", "show", "verify")],
    "out-of-range length": ["inspect shards --length 2"],
    "out-of-range global_batch_size": ["inspect shards --global-batch-size 0"],
    "out-of-range world_size": ["inspect shards --world-size 0"],
    "out-of-range sample": ["show shards --sample 100000"],
    "no-split split": ["show shards --split dev", "export shards --out x --split dev"],
}


def nothing(text):
    """For --map: leaves out every document."""


def shortened(text):
    """For --map: fails for an empty text."""
    return text[1:] + text[0]


def builds():
    """Inputs and options of build that are wrong, kind and option of the error, and what its sentence says."""
    for option, values in {
        "validation": (-0.1, NAN, "half"),
        "test": (-0.1, NAN),
        "workers": (0, 1.5),
        "shard_size": (0, 1e9, 1 << 62),
        "max_documents": (0, -1),
        "part": ((3, 3), (-1, 3), (0, 0)),
    }.items():
        yield from (({option: value}, f"out-of-range {option}") for value in values)
    yield {"validation": 0.6, "test": 0.4}, "out-of-range test"
    yield from (({option: "page"}, f"unknown {option}") for option in ("sentences", "documents", "on_error", "type"))
    yield from (({"encoding": name}, "unknown encoding") for name in ("latin-99", "base64", "rot13", "", "utf-8\0"))
    for spec in (
        "nothing",
        "json:nothing",
        "nowhere:f",
        "math:pi",
        *(f"{PREPARE}:length({n})" for n in ("x", "", "1,")),
    ):
        yield {"map": [spec]}, "bad-function map"
        yield {"words": spec}, "bad-function words"
    yield {"words": "builtins:len"}, "function-failed words"
    yield from (({"inputs": "no_ids.jsonl", "out": out}, "empty inputs") for out in ("out", "there"))
    yield {"inputs": "no_ids.jsonl", "map": ["test_refused_table:nothing"]}, "empty inputs"
    yield {"inputs": "no_ids.jsonl", "tokenizer": None}, "empty inputs"
    yield {"inputs": "no_ids.jsonl", "tokenizer": None, "map": ["test_refused_table:nothing"]}, "empty inputs"
    yield {"tokenizer": None, "vocab_size": 3}, "out-of-range vocab_size"
    yield {"tokenizer": None, "roles": "cls=[CLS]"}, "needs-option roles"
    for tokenizer in ({}, {"tokenizer": None}):
        yield {"map": [f"{PREPARE}:cjk(0.5)"]} | tokenizer, "empty inputs"
    for stream in ("pipe", "-", iter(TEXTS)):
        yield {"part": (0, 3), "inputs": stream}, "conflict part"
        yield {"dedup": True, "inputs": stream}, "conflict dedup"
        yield {"tokenizer": None, "inputs": stream}, "needs-option tokenizer"
    yield from (({"format": "parquet", "inputs": name}, "read-once inputs") for name in ("pipe", "-"))
    yield from (({"inputs": names}, "read-once inputs") for names in (["-", "t.txt", "-"], ["pipe"] * 2))
    yield from (({"part": (0, 3)} | more, "conflict part") for more in ({"overwrite": True}, {"max_documents": 5}))
    yield from (({"dedup": True} | more, "conflict dedup") for more in ({"part": (0, 2)}, {"ray": "local"}))
    yield {"inputs": iter(TEXTS), "ray": "local"}, "conflict ray"
    for more in ({"format": "text"}, {"text_key": "body"}, {"encoding": "latin-1"}, {"include": ["*"]}):
        yield {"inputs": iter(TEXTS)} | more, "conflict inputs"
    yield from (({"inputs": wrong}, "malformed inputs") for wrong in (5, ["t.txt", ""]))
    yield from (({"inputs": wrong}, "empty inputs") for wrong in (iter([]), "empty"))
    for wrong in (b"a\xffb", "x\ud800y"):
        yield {"inputs": iter(["salt", wrong]), "strict": True}, "not-text inputs", "item 2 of the iterable"
    yield {"inputs": iter([b"\xff" * 9999])}, "not-text inputs", "; correct its items"
    failing = {"map": ["test_refused_table:shortened"]}
    yield {"inputs": iter(["salt", ""])} | failing, "function-failed map", "item 2 of the iterable: "
    for wrong, says in ((("salt", 5), " int, "), ([b"salt", None], " NoneType, "), (b"salt", " int, "), ([Path()], "")):
        yield {"inputs": iter(wrong)}, "bad-row inputs", says
    yield from (({"inputs": ["t.txt", wrong]}, "no-match inputs") for wrong in ("?", "*.bz2", "hidden"))
    yield {"inputs": "d", "include": ["*.rst"]}, "no-match inputs"
    yield from (({option: ["*.rst"]}, f"needs-option {option}") for option in ("include", "exclude"))
    yield from (({"inputs": url}, "bad-url") for url in (*URLS.split(), "s3://bu cket/b.txt"))
    yield from (({"inputs": url}, "bad-url inputs") for url in ("S3://bucket/a.txt", "ftp://user:secret@host/a.txt"))
    yield from (({"inputs": Path(url)}, "bad-url inputs") for url in ("hdfs://n:9/d/", "file:///x", "s3://bucket/x"))


def imports():
    yield {"inputs": []}, "missing inputs"
    yield {"inputs": "a.bin", "shard_size": 0}, "out-of-range shard_size"
    yield {"inputs": "a.bin", "dtype": "float32"}, "unknown dtype"
    yield {"inputs": "odd.bin", "dtype": "int32"}, "not-of-format inputs"
    for more in ({"format": "nanogpt"}, {"end_token": "[SEP]"}, {"dtype": "int64"}):
        yield {"inputs": iter(IDS)} | more, "conflict inputs"
    yield {"inputs": 5}, "malformed inputs"
    yield {"inputs": [[], []]}, "empty inputs", "the iterable"
    for wrong in (
        [[10], "11"],
        np.arange(9),
        [[10], [], [1.5]],
        [[[10]]],
        [[10], [[10], [11, 12]]],
        [np.array([2**70])],
    ):
        yield {"inputs": iter(wrong)}, "bad-row inputs"
    for wrong, says in (
        ([[10], np.array([2**63 + 1], np.uint64)], "item 2"),
        ([[10], [], [11, 999]], "item 3: id 999"),
    ):
        yield {"inputs": wrong}, "id-outside-vocabulary tokenizer", says
    for column, kind, says in (
        (["1 2"], "wrong-column-type inputs", "string"),
        ([[1.5]], "wrong-column-type inputs", "double"),
        ([[1], None], "bad-row inputs", "row 2"),
        ([[1], [], [2, None]], "bad-row inputs", "row 3"),
        (pa.array([[], []], pa.list_(pa.int32())), "empty inputs", ""),
        ([[10], [], [10, 11, 999]], "id-outside-vocabulary tokenizer", "row 3: id 999"),
        ([[10], [-1, 4]], "id-outside-vocabulary tokenizer", "row 2: id -1"),
        ([[10], [2**32 + 10]], "id-outside-vocabulary tokenizer", "row 2: id 4294967306"),
        (pa.array([[2**64 - 1]], pa.list_(pa.uint64())), "id-outside-vocabulary tokenizer", f"row 1: id {2**64 - 1}"),
    ):
        yield {"inputs": pa.table({"input_ids": column})}, kind, says
    yield {"inputs": pa.table({"ids": [[1]]})}, "no-column inputs", "columns: ids"


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch, dataset):
    """The files that rows name, in the working directory."""
    monkeypatch.chdir(tmp_path)
    data, index = ids.megatron([[document] for document in IDS], "uint16")
    contents = {"t.txt": b"the stone", "empty": b"", "d/t.txt": b"a", "hidden/.x": b"a", "m.bin": data, "m.idx": index}
    contents |= {"o.idx": index, "big.txt": b"a", "no_ids.jsonl": b'{"text": ""}\n{"text": " "}\n'}
    contents |= {"a.bin": ids.packed(sum(IDS, []), "uint16"), "odd.bin": bytes(6), "z.bin.gz": gzip.compress(bytes(40))}
    write_all(tmp_path, contents | {"l.bin": ids.llm_c([10] * 600, 20240520, 1, "uint16")})
    pq.write_table(pa.table({"input_ids": IDS}), "r.parquet")
    os.symlink(dataset.path, "shards")
    os.truncate("big.txt", (1 << 20) + 1)
    os.mkdir("there")
    for name in ("pipe", "p.bin", "p.parquet", "q.idx", "o.bin"):
        os.mkfifo(name)


LINES = [(line, *kind.split(), None)[:3] for kind, lines in COMMANDS.items() for line in lines]


@pytest.mark.parametrize(("line", "kind", "option"), LINES)
def test_a_command_that_makes_no_sense_is_refused(vocab, line, kind, option):
    before, (name, *words) = os.listdir(), shlex.split(line)
    for more, value in (("--out", "out"), ("--tokenizer", vocab)):
        if name in ("build", "import") and more not in words and (more == "--out" or "--finish" not in words):
            words += [more, value]
    assert "secret" not in refused(main, name, *words, kind=kind, option=option)
    assert os.listdir() == before


CALLS = [(build, *row) for row in builds()] + [(import_ids, *row) for row in imports()]


@pytest.mark.parametrize("row", CALLS, ids=[f"{row[2]} {number}" for number, row in enumerate(CALLS)])
def test_a_call_that_makes_no_sense_is_refused(vocab, row):
    function, wrong, error, says = (*row, "")[:4]
    before = sorted(os.walk("."))
    if isinstance(table := wrong.get("inputs"), pa.Table):
        pq.write_table(table, "r.parquet")
        wrong = {"inputs": "r.parquet"}
    with refuses(*error.split(), says=says) as caught:
        function(**{"inputs": "t.txt", "out": "out", "tokenizer": vocab} | wrong)
    assert "secret" not in str(caught.value)
    assert sorted(os.walk(".")) == before
