"""Every block of code of README.md, CONTRIBUTING.md and docs/ is run.

A block without a language, or of bash, is run by bash, so that quotes, pipes and here-documents mean what they mean to
a reader. bash finds no program but a few of the system, and asks this file for all others. `bertdata`, `bertrain`,
`torchrun` and `python` are run in this process, with small values of options, but for what is in NOT_RUN. A block of
Python is executed, or is a file if its first line names one, as is a block of TOML. Blocks in SHOWN are not for
running. A page is run from top to bottom in a copy of the fixture `world`.
"""

import contextlib
import doctest
import functools
import importlib
import io
import json
import os
import random
import re
import runpy
import select
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import click
import pyarrow as pa
import pytest
from markdown_it import MarkdownIt
from reference import ids
from support.commands import PROGRAMS, succeeds
from support.data import BAD, GOOD, ROOT, make_text, stored
from support.disk import put, write_all
from support.families import LISTED, LONGFORMER
from support.sources import PACK
from torch.distributed.run import get_args_parser

import bertdata
from bertrain import cli
from bertrain.models.families import PRESETS

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md"))]
PAGES.remove("docs/api.md")  # made of docstrings, whose examples are run as doctests
SHOWN = {"text", "json", "jsonl", "toml", "yaml", "tsv", "csv", "html"}

OTHERS = {"pip", "pipx", "venv", "hf", "aws", "curl", "pre-commit", "euroeval", "ray", "scontrol"}
"""Programs that need a network, a cluster or minutes."""
NOT_RUN = re.compile(  # what a command or a program in Python has that is only read; options of ours are checked
    "hf://|https://|/shared/|--nnodes"  # a network or a cluster
    "|wandb|lightning_loop|bits=4|search_task|from streaming|from litdata"  # libraries that are not installed
    "|gemma/"  # a decoder; the page makes one below
    "|bertrain.commands.* docstrings"  # reads all packages; the world has such files
    "|benchmarks/(recipes|speedrun)|--recipe (esm2|dnabert2)|roberta-base.json"  # takes hours
)
REWRITTEN = {  # in all pages: pattern → what stands in its place
    r"step-(?!0000000)\d{8}": "step-00000005",
    r"^STEPS, ROWS, RATE = .*": "STEPS, ROWS, RATE = 2, 4, 1e-3",
    r"^steps = \w+": "steps = 20",  # from here on in files of options
    r"^warmup_steps = \w+": "warmup_steps = 1",
    r'^tokens = "\w+"': 'tokens = "2K"',
    r"^length = \w+": "length = 48",
    r"^global_batch_size = \w+": "global_batch_size = 4",
}
ROWS, TUNING = "--length 48 --global-batch-size 4", "--epochs 1 --seeds 1 --length 48"
ALWAYS = {"pretrain": ROWS, "doctor": f"{ROWS} --out unused", "teacher": "--length 48"}
ALWAYS |= {"finetune": TUNING, "suite": TUNING, "search": "--max-samples 64"}
"""Command → options that come after those of the page, and so win over them."""
SMALL = "--steps 5 --epochs 0.1 --micro-batch-size 2 --max-samples 64 --latency 100s --trials 2 --step 1 --part 1/1"
SMALL += f" --vocab-size 1000 --copies 2 --save-every 2 {ROWS}"
SMALL = dict(re.findall(r"(--\S+) (\S+)", SMALL))
"""Option → the value that comes after the page's, where a command has one."""
SMALL_PRESETS = {"bert-small": (4, 64, 256), "bert-base": (12, 64, 256), "modernbert-base": (4, 64, 96)}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # in PeftModel
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]


# ------------------------------------------------------------------------------------------------------------- blocks


class Block(NamedTuple):
    """place: page and line. file: its name, of a block that is a file. runs: the command that runs this file."""

    place: str
    kind: str
    text: str
    file: str | None
    runs: str | None


@functools.cache
def blocks(page):
    text, found = (ROOT / page).read_text(), []
    for pattern, other in REWRITTEN.items():
        text = re.sub(pattern, other, text, flags=re.MULTILINE)
    for token in MarkdownIt().parse(text):
        if token.type in ("code_block", "fence"):
            place, kind = f"{page}, line {token.map[0] + 1}", (token.info.split() or ["bash"])[0]
            assert kind in {"bash", "python", *SHOWN}, f"{place}: no test knows what to do with a block of {kind}"
            name = re.match(r'(?:"""(python (\w+\.py)[^"\n]*)"""\n|# (\w+\.(?:py|toml))\n|)', token.content)
            found.append(Block(place, kind, token.content, name[2] or name[3], name[1]))
    return found


PAGES = [page for page in PAGES if any(block.kind not in SHOWN for block in blocks(page))]

# --------------------------------------------------------------------------------------------------------------- bash


HANDLER = r"""
function . { :; }      # there is no environment to activate
function srun { "$@"; }
command_not_found_handle() {
    if [[ $REAL == *" $1 "* ]]; then command -p "$@"; return; fi
    local input=""
    if [[ " $* " == *" - "* ]]; then input=$(command -p cat); fi
    exec 9<> "/dev/tcp/127.0.0.1/$PORT"
    printf '%s\x1f' "$PWD" "$input" "$@" >&9
    printf '\x1e' >&9
    command -p cat <&9
}
set -e
"""
REAL = " cat cp head ls mkdir mv rm sort tail wc "


def in_bash(text, folder, answer, *, real=REAL):
    """Runs a block. answer(words, where, stdin): is called for every program that is asked for; what it printed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        around = {"PATH": "/nowhere", "HOME": str(folder), "PORT": str(server.getsockname()[1]), "REAL": real}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        command = [shutil.which("bash"), "-c", f"{HANDLER}{text}\nwait\n"]
        with subprocess.Popen(command, cwd=folder, env=around, text=True, **streams) as bash:
            try:
                while bash.poll() is None:
                    if not select.select([server], [], [], 0.02)[0]:
                        continue
                    with server.accept()[0] as connection:
                        data = b"".join(iter(lambda: connection.recv(1), b"\x1e"))
                        where, stdin, *words, _ = data.decode().split("\x1f")
                        connection.sendall(answer(words, where, stdin).encode())
            finally:
                bash.kill()  # where an answer failed
            assert bash.returncode == 0, bash.stderr.read()


# ----------------------------------------------------------------------------------------------------------- commands


def meaning(words, stdin=""):
    """What a command line runs: the program, as its first word, and its arguments. One of PROGRAMS, a file, or "-c"."""
    program, *rest = words
    if program == "torchrun":
        given = get_args_parser().parse_args(rest)
        return meaning(["python", *["-m"][: given.module], given.training_script, *given.training_script_args])
    if program in ("python", "python3"):
        if rest[0] == "-":
            return ["-c", stdin, *rest[1:]]
        if rest[0] != "-m":
            return rest
        return [*rest[1].split("."), *rest[2:]]
    return words


def smaller(words):
    """A command line with small values after the page's; it does not write to where something is."""
    program, *rest = words
    name = rest[0] if program in PROGRAMS else "pretrain" if {"--data", "--out"} <= {*rest} else ""
    if program.endswith(".py") and rest[-1].isdigit():
        rest[-1] = "3"  # steps
    for option in SMALL.keys() & {*rest}:
        rest += [option, SMALL[option]]
    if not any(word.endswith(".toml") for word in rest):
        rest += ALWAYS.get(name, "").split()
        rest += ["--steps", "5"] if name in ("pretrain", "doctor") and "--epochs" not in rest else []
    out = dict(zip(rest, rest[1:], strict=False)).get("--out", "none")
    if Path(out).is_dir() and "--finish" not in rest:
        shutil.rmtree(out)
    return [program, *rest]


def run(words, stdin=""):
    """Runs a command line in this process; what it printed."""
    program, *rest = words
    if program in PROGRAMS:
        return succeeds(program, *rest, input=stdin).stdout
    arguments = ["-c", *rest[1:]] if program == "-c" else words
    with patch.object(sys, "argv", arguments), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            if program == "-c":
                exec(compile(rest[0], "-c", "exec"), {"__name__": "__main__"})  # noqa: S102
            else:
                runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(end.code) from end
    return printed.getvalue()


# --------------------------------------------------------------------------------------------------------------- world


ANSWERS = [
    {"id": "1", "question": "what", "is_impossible": False, "answers": [{"text": "river", "answer_start": 4}]},
    {"id": "2", "question": "who", "is_impossible": True, "answers": []},
]
ANSWERS = {"version": "2.0", "data": [{"title": "x", "paragraphs": [{"context": "the river", "qas": ANSWERS}]}]}
OTHER_IDS = [[10, 11, 12, 3], [13, 3], [14, 15, 16, 3], [21, 3]]


def texts():
    """Name → lines of the files of text."""
    corpora = ["corpus", "books", "news", "domain", "general", "train", "corpus/one", "tutorial/corpus"]
    files = {f"{name}.txt": [make_text(600, seed=number)] for number, name in enumerate(corpora)}
    draw, rows = random.Random(8), [json.dumps({"text": text, "body": text}) for text in make_text(60).split("\n\n")]
    genome = [line for n in range(40) for line in (f">{n}", "".join(draw.choices("ACGTacgtN", k=400)))]
    proteins = [f"{n}\t{''.join(draw.choices('LAGVSERTIDPKQ', k=60))}" for n in range(60)]
    files |= {
        "dump/one.txt.gz": files["corpus.txt"],
        "dump/one.jsonl.zst": rows,
        "corpus.jsonl": [*rows, rows[0]],
        "more/one.jsonl": rows,
        "zh.txt": ["".join(draw.choices("好说铁江狗邓马龠", k=24)) + "\n" for _ in range(600)],
        "jieba/__init__.py": ["def cut(text):", "    return [text[at : at + 2] for at in range(0, len(text), 2)]"],
        "words.txt": ["not", "never"],
        "glove.6B.300d.txt": ["rivers 1 2", "stones 2 1"],
        "train.csv": ["sentence1,sentence2,label", "river light,rivers,1", "salt,the stone,0"],
        "data/aaanalysis/_data/benchmarks/SEQ_SOLUBLE.tsv": ["entry\tsequence", *proteins],
        "genome.fa": genome,
        "uniref50.fasta.gz": [line.upper() for line in genome],
        "blimp.jsonl.gz": [json.dumps({"good": "the river", "bad": "river the", "field": "syntax"})],
        "electra/config.json": [json.dumps({"model_type": "electra"} | LISTED["electra"])],
        "longformer.json": [json.dumps(LONGFORMER)],
    }
    labels = [(text, int(text in GOOD)) for text in GOOD + BAD]
    for part in ("train", "dev", "test"):
        files |= {
            f"{part}.tsv": [f"{text}\t{text}\t{text}\t{label}" for text, label in labels * 2],
            f"tutorial/{part}.tsv": [f"{text}\t{label}" for text, label in labels * 2],
            f"{part}.conllu": ["1\tthe\t_\tDET", "2\tsalt\t_\tNOUN"],
            f"{part}.jsonl": [json.dumps({"text": "the river", "choices": ["salt", "light"], "label": 1})] * 3,
            f"{part}-v2.0.json": [json.dumps(ANSWERS)],
            f"glue/CoLA/{part}.tsv": [f"x\t{label}\t\t{text}" for text, label in labels],
        }
    return files


@pytest.fixture(scope="module")
def world(tmp_path_factory, vocab, dataset, finished, bert_run):
    """A directory with the files and directories that pages name: small ones, and many of them the same."""
    with contextlib.chdir(tmp_path_factory.mktemp("world")):
        for name, lines in texts().items():
            put(Path(name), PACK.get(Path(name).suffix, bytes)("".join(f"{line}\n" for line in lines).encode()))
        shutil.copy(vocab, "vocab.txt")
        there = {"examples": ROOT / "examples", "shards": dataset.path, "run": finished, "run2": finished}
        there["big"] = finished / "step-00000005"
        hub = ("bert-base-uncased", "roberta-base", "xlm-roberta-base", "gpt2", "tokenizer", "base", "teacher")
        for name, path in (there | dict.fromkeys(hub, bert_run / "step-00000002")).items():
            shutil.copytree(path, name)
        for line in (
            "bertdata build news.txt --out news --tokenizer shards",
            "bertdata train-tokenizer zh.txt --out zh --vocab-size 60",
            "bertrain transplant --checkpoint base --tokenizer zh --out bert-base-chinese",
        ):
            run(line.split())
        make_ids(stored(dataset))
        return Path.cwd()


def make_ids(documents):
    """Files of other programs."""
    data, index = ids.megatron([documents], "uint16")
    files = {"corpus.bin": data, "corpus.idx": index, "train.bin": ids.packed([10, 11, 3, 12, 3], "uint16")}
    files["00000_unshuffled.ds"] = ids.packed(sum(OTHER_IDS, []), "uint16")
    files["00000_unshuffled.ds.index"] = struct.pack("<4Q", 4, 6, 10, 12)
    files["saved/state.json"] = b'{"_data_files": [{"filename": "data.arrow"}]}'
    write_all(".", files)
    table = pa.table({"input_ids": OTHER_IDS})
    with pa.ipc.new_stream("saved/data.arrow", table.schema) as writer:
        writer.write_table(table)


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_options_that_exist(page, tmp_path):
    """And values that they take. Nothing is run. A command is one of our programs, a file, or in REAL or OTHERS."""

    def look(words, where, stdin):
        program, *rest = meaning(words, stdin)
        if (
            program in PROGRAMS and rest[0] == "pretrain" and "--config" not in rest
        ):  # also which options exclude others
            succeeds(cli.command(lambda config: None), *rest[1:])
        elif program in PROGRAMS:
            command = PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), rest[0])
            command.make_context(rest[0], rest[1:]).close()
        elif program == "-c":
            compile(rest[0], page, "exec")
        else:
            assert program.endswith(".py") or program in {*REAL.split(), *OTHERS}, words
        return ""

    for block in blocks(page):
        if block.kind == "python":
            compile(block.text, block.place, "exec")
        in_bash(block.text if block.kind == "bash" else block.runs or "", tmp_path, look, real="")


@pytest.fixture
def directory(tmp_path, world, monkeypatch, tables_as_they_were):
    """A copy of the world, with small presets. What a page's Python adds to tables, and imports, is gone after it."""
    PRESETS.update(SMALL_PRESETS)
    monkeypatch.chdir(shutil.copytree(world, tmp_path / "page"))
    monkeypatch.syspath_prepend(Path.cwd())
    yield Path.cwd()
    shutil.rmtree(tmp_path / "page")
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, directory, bucket):
    for each in (directory / "dump").iterdir():
        bucket.put(f"dump/{each.name}", each.read_bytes())
    for block in blocks(page):
        if block.file:
            (directory / block.file).write_text(block.text)

    def answer(words, where, stdin):
        command = meaning(words, stdin)
        if command[0] in OTHERS or NOT_RUN.search(" ".join([*words, stdin])):
            return ""
        os.chdir(where)
        try:
            return run(smaller([word.replace("s3://bucket", bucket.url) for word in command]), stdin)
        except Exception as error:
            raise AssertionError(f"{block.place}: {' '.join(words)}\n{error}") from error

    names = {"__name__": "page"}
    for block in blocks(page):
        if block.kind == "bash" or block.runs:
            in_bash(block.runs or block.text, directory, answer)
        elif block.kind == "python" and not block.file and not NOT_RUN.search(block.text):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text.replace("s3://bucket", bucket.url), block.place, "exec"), names)  # noqa: S102
        os.chdir(directory)
    if page == "docs/import.md":  # its loop reads what another program wrote
        assert sorted(stored(bertdata.open("from-datatrove"))) == sorted(stored(bertdata.open("from-rows")))


EXAMPLES = [path for path in sorted((ROOT / "bertdata").rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_in_docstrings_give_what_they_say(path):
    found = doctest.testmod(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)))
    assert found.attempted
    assert not found.failed
