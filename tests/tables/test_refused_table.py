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
    "out-of-range sample": ["show shards --sample 100000"],
    "no-split split": ["show shards --split dev", "export shards --out x --split dev"],
}


SPECS = ["nothing", "json:nothing", "nowhere:f", "math:pi", *(f"{PREPARE}:length({n})" for n in ("x", "", "1,"))]
VALUES = {  # kind and option of the error → values of this option of build
    "out-of-range validation": [-0.1, NAN, "half"],
    "out-of-range test": [-0.1, NAN],
    "out-of-range workers": [0, 1.5],
    "out-of-range shard_size": [0, 1e9, 1 << 62],
    "out-of-range max_documents": [0, -1],
    "out-of-range part": [(3, 3), (-1, 3), (0, 0)],
    "unknown encoding": ["latin-99", "base64", "rot13", "", "utf-8\0"],
    **{f"unknown {option}": ["page"] for option in ("sentences", "documents", "on_error", "type")},
    "bad-function map": [[spec] for spec in SPECS],
    "bad-function words": SPECS,
    "needs-option include": [["*.rst"]],
    "needs-option exclude": [["*.rst"]],
    "malformed inputs": [5, ["t.txt", ""]],
    "empty inputs": [iter([]), "empty", "no_ids.jsonl"],
    "no-match inputs": [["t.txt", wrong] for wrong in ("?", "*.bz2", "hidden")],
    "read-once inputs": [["-", "t.txt", "-"], ["pipe"] * 2],
    "bad-url inputs": ["S3://b/a", "ftp://u:secret@host/a", *map(Path, ("hdfs://n:9/d/", "file:///x", "s3://b/x"))],
    "bad-url": [*URLS.split(), "s3://bu cket/b.txt"],
}
NO_TEXT, TRAINED, ONCE = {"map": [f"{PREPARE}:length(1000)"]}, {"tokenizer": None}, ("pipe", "-", iter(TEXTS))
BUILDS = [  # options of build, kind and option of the error, and perhaps what its sentence says
    *[({error.partition(" ")[2] or "inputs": value}, error) for error, some in VALUES.items() for value in some],
    ({"validation": 0.6, "test": 0.4}, "out-of-range test"),
    ({"inputs": "no_ids.jsonl", "out": "there"}, "empty inputs"),
    *[(NO_TEXT | more, "empty inputs") for more in ({}, TRAINED, {"inputs": "no_ids.jsonl"})],
    (TRAINED | {"inputs": "no_ids.jsonl"}, "empty inputs"),
    (TRAINED | {"vocab_size": 3}, "out-of-range vocab_size"),
    (TRAINED | {"roles": "cls=[CLS]"}, "needs-option roles"),
    *[({"inputs": stream, "part": (0, 3)}, "conflict part") for stream in ONCE],
    *[({"inputs": stream, "dedup": True}, "conflict dedup") for stream in ONCE],
    *[(TRAINED | {"inputs": stream}, "needs-option tokenizer") for stream in ONCE],
    *[({"format": "parquet", "inputs": name}, "read-once inputs") for name in ("pipe", "-")],
    *[({"part": (0, 3)} | more, "conflict part") for more in ({"overwrite": True}, {"max_documents": 5})],
    *[({"dedup": True} | more, "conflict dedup") for more in ({"part": (0, 2)}, {"ray": "local"})],
    ({"inputs": iter(TEXTS), "ray": "local"}, "conflict ray"),
    ({"inputs": iter(TEXTS), "encoding": "latin-1"}, "conflict inputs"),
    *[({"inputs": iter(["a", wrong]), "strict": True}, "not-text inputs", "item 2 ") for wrong in (b"\xff", "\ud800")],
    ({"inputs": iter([b"\xff" * 9999])}, "not-text inputs", "; correct its items"),
    ({"inputs": iter(['"a"', "a"]), "map": ["json:loads"]}, "function-failed map", "item 2 of the iterable: "),
    *[({"inputs": iter(wrong)}, "bad-row inputs", " of type ") for wrong in (["a", 5], [b"a", None], b"a", [Path()])],
    ({"inputs": iter(["a" * 41]), "words": "builtins:len"}, "function-failed words", f" begins with {'a' * 40!r};"),
    ({"inputs": iter(["a" * 41]), "words": "builtins:set"}, "bad-function words", f" begins {'a' * 40!r};"),
    ({"inputs": "d", "include": ["*.rst"]}, "no-match inputs"),
]
NO_IDS = [[10], "11"], np.arange(9), [[10], [], [1.5]], [[[10]]], [[10], [[10], [11, 12]]], [np.array([2**70])]
COLUMNS = [  # of a table of ids
    (["1 2"], "wrong-column-type inputs", "string"),
    ([[1.5]], "wrong-column-type inputs", "double"),
    ([[1], None], "bad-row inputs", "row 2"),
    ([[1], [], [2, None]], "bad-row inputs", "row 3"),
    (pa.array([[], []], pa.list_(pa.int32())), "empty inputs"),
    ([[10], [], [10, 11, 999]], "id-outside-vocabulary tokenizer", "row 3: id 999"),
    ([[10], [-1, 4]], "id-outside-vocabulary tokenizer", "row 2: id -1"),
    ([[10], [2**32 + 10]], "id-outside-vocabulary tokenizer", "row 2: id 4294967306"),
    (pa.array([[2**64 - 1]], pa.list_(pa.uint64())), "id-outside-vocabulary tokenizer", f"row 1: id {2**64 - 1}"),
]
IMPORTS = [
    ({"inputs": []}, "missing inputs"),
    ({"inputs": "a.bin", "shard_size": 0}, "out-of-range shard_size"),
    ({"inputs": "a.bin", "dtype": "float32"}, "unknown dtype"),
    ({"inputs": "odd.bin", "dtype": "int32"}, "not-of-format inputs"),
    ({"inputs": iter(IDS), "end_token": "[SEP]"}, "conflict inputs"),
    ({"inputs": 5}, "malformed inputs"),
    ({"inputs": [[], []]}, "empty inputs", "the iterable"),
    *[({"inputs": iter(wrong)}, "bad-row inputs") for wrong in NO_IDS],
    ({"inputs": [[10], np.array([2**63 + 1], np.uint64)]}, "id-outside-vocabulary tokenizer", "item 2"),
    ({"inputs": [[10], [], [11, 999]]}, "id-outside-vocabulary tokenizer", "item 3: id 999"),
    *[({"inputs": pa.table({"input_ids": column})}, *error) for column, *error in COLUMNS],
    ({"inputs": pa.table({"ids": [[1]]})}, "no-column inputs", "columns: ids"),
]


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
    assert "secret" not in refused("bertdata", name, *words, kind=kind, option=option)
    assert os.listdir() == before


CALLS = [(build, *row) for row in BUILDS] + [(import_ids, *row) for row in IMPORTS]


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
