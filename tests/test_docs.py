"""Every block of code of README.md, CONTRIBUTING.md and docs/ is run.

A block without a language, or of bash, is run by bash, so that quotes, pipes and here-documents mean what they mean to
a reader. bash finds no program but a few of the system, and asks this file for all others. `bertdata`, `bertrain`,
`torchrun` and `python` are run in this process, with small values of options; NOT_RUN has what cannot be run, and why.
A block of Python is executed, or is a file if its first line names one, as is a block of TOML. Blocks in
SHOWN are not for running. A page is run from top to bottom in one directory, with those things of the fixture `world`
that it names.
"""

import contextlib
import doctest
import functools
import gzip
import importlib
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
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
import torch
from markdown_it import MarkdownIt
from reference import ids
from support.commands import succeeds
from support.data import BAD, GOOD, LETTERS, ROOT, SPECIALS, WORDS, make_text, stored
from support.disk import write, write_all
from support.families import LISTED, LONGFORMER
from torch.distributed.run import get_args_parser
from transformers import BertConfig, BertForMaskedLM

import bertdata
from bertdata.cli import main as bertdata_command
from bertrain import cli
from bertrain.__main__ import main as bertrain_command
from bertrain.models.families import PRESETS

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md"))]
PAGES.remove("docs/api.md")  # made of docstrings, whose examples are run as doctests
SHOWN = {"text", "json", "jsonl", "toml", "yaml", "tsv", "csv", "html"}
GROUPS = {"bertdata": bertdata_command, "bertrain": bertrain_command}
STEPS = 5

OTHERS = {"pip", "pipx", "venv", "hf", "aws", "curl", "pre-commit", "euroeval", "ray", "srun", "scontrol"}
"""Programs that need a network, a cluster or minutes."""
NOT_RUN = {  # page, beginning of a command or of Python → why it is only read; ours are parsed all the same
    ("docs/tutorial.md", "from pathlib import Path\n"): "reads all packages; the world has such a text",
    ("docs/tutorial.md", "from hashlib import sha256\n"): "reads all packages; the world has such tables",
    ("docs/records.md", "bertrain pretrain --data shards/ --out run/ --log-to wandb "): "an account",
    ("docs/reading.md", "python examples/lightning_loop.py "): "Lightning is not installed",
    ("docs/adapters.md", "bertrain pretrain --data shards/ --init run/ --lora r=8,alpha=16,bits=4"): "bitsandbytes",
    ("docs/import.md", "from streaming import "): "tests/test_inputs.py, outside",
    ("docs/import.md", "from litdata import "): "tests/test_inputs.py, outside",
    ("docs/finetuning.md", "python search_task.py "): "mteb; tests/test_embeddings.py",
    ("docs/recipes.md", "python benchmarks/"): "takes hours",
    ("docs/scale.md", "bertdata build hf://"): "needs the hub",
    ("docs/scale.md", "bertdata build https://"): "needs a web server",
    ("docs/scale.md", "bertdata build s3://bucket/dump/*.zst --out /shared/shards"): "a cluster; tests/test_ray.py",
    ("docs/scale.md", "bertdata push /shared/shards "): "needs what the cluster built",
    ("docs/scale.md", "torchrun --nnodes "): "needs several machines; tests/test_dist.py runs two agents",
    ("docs/training.md", "torchrun "): "has a model in its published size; the page has a small one",
    ("docs/howto/proteins.md", "bertrain doctor --recipe "): "takes steps of a large batch",
    ("docs/howto/decoder.md", "bertdata build corpus.txt --out rows/ "): "needs a decoder; the page makes one below",
    ("docs/howto/decoder.md", "bertrain pretrain --init gemma/ "): "needs a decoder; the page makes one below",
}
REWRITTEN = {  # in all pages: pattern → what stands in its place
    r"step-(?!0000000)\d{8}": f"step-{STEPS:08d}",
    r"STEPS, ROWS, RATE = 500, 32, 5e-5": "STEPS, ROWS, RATE = 2, 4, 1e-3",
}
SMALL = f"--steps {STEPS} --length 48 --global-batch-size 4 --micro-batch-size 2 --max-samples 64 --latency 100s "
SMALL += "--trials 2 --step 1 --part 1/1 --vocab-size 1000 --seeds 1 --copies 2 --save-every 2 --epochs 1"
SMALL = {words.split()[0]: words for words in re.findall(r"--\S+ \S+", SMALL)}  # option → the words in its place
DROPPED = {"pretrain": {"--epochs": ""}, "doctor": {"--out": ""}}  # where another run may be
ROWS = f"--steps {STEPS} --length 48 --global-batch-size 4"
TUNING = "--epochs 1 --seeds 1 --length 48"
ADDED = {"build": "--validation 0.1", "pretrain": ROWS, "doctor": ROWS, "teacher": "--length 48"}
ADDED |= {"finetune": TUNING, "suite": TUNING, "search": "--max-samples 64"}
"""Command → options that come before the page's."""
IN_FILES = {"steps": "20", "tokens": '"2K"', "warmup_steps": "1", "length": "48", "global_batch_size": "4"}
IN_FILES |= {"save_every": "20"}
"""Option in a file of options → its value."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # in PeftModel
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]


# ------------------------------------------------------------------------------------------------------------- blocks


class Block(NamedTuple):
    """place: page and line. file: its name, of a block that is a Python file. runs: the command that runs this file."""

    place: str
    kind: str
    text: str
    file: str = ""
    runs: str = ""


@functools.cache
def text_of(page):
    text = (ROOT / page).read_text()
    for pattern, other in REWRITTEN.items():
        text = re.sub(pattern, other, text)
    return text


@functools.cache
def blocks(page):
    found = []
    for token in MarkdownIt().parse(text_of(page)):
        if token.type not in ("code_block", "fence"):
            continue
        place, language = f"{page}, line {token.map[0] + 1}", (token.info.split() or ["bash"])[0]
        text = token.content
        if language == "python":
            name = re.match(r'(?:"""(python (\w+\.py)[^"\n]*)"""|# (\w+\.py))\n', text)
            found.append(Block(place, language, text, (name[2] or name[3]) if name else "", (name and name[1]) or ""))
        elif language == "toml" and (name := re.match(r"# (\w+\.toml)\n", text)):
            found.append(Block(place, "shown", text, name[1]))
        elif language in ("bash", "sh"):
            found.append(Block(place, "bash", text))
        else:
            assert language in SHOWN, f"{place}: no test knows what to do with a block of {language}"
            found.append(Block(place, "shown", text))
    return found


def excused(page, words, stdin=""):
    """Whether a command, or the program that Python reads from a here-document, or a block of Python, is not run."""
    code = stdin if words[1:2] == ["-"] and stdin else " ".join(words)
    return words[0] in OTHERS or any(name == page and code.startswith(start) for name, start in NOT_RUN)


# --------------------------------------------------------------------------------------------------------------- bash


HANDLER = r"""
function . { :; }      # there is no environment to activate
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
        server.settimeout(0.02)
        around = {"PATH": "/nowhere", "HOME": str(folder), "PORT": str(server.getsockname()[1]), "REAL": real}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        command = [shutil.which("bash"), "-c", f"{HANDLER}{text}\nwait\n"]
        bash = subprocess.Popen(command, cwd=folder, env=around, start_new_session=True, **streams)
        try:
            while bash.poll() is None:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    data = b""
                    while not data.endswith(b"\x1e"):
                        data += connection.recv(1 << 16)
                    where, stdin, *words, _ = data.decode().split("\x1f")
                    connection.sendall(answer(words, where, stdin).encode())
            assert bash.returncode == 0, bash.stderr.read()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGKILL)  # also what waits for an answer
            bash.communicate()


# ----------------------------------------------------------------------------------------------------------- commands


def meaning(words, stdin=""):
    """What a command line runs: the program, as its first word, and its arguments. One of GROUPS, a file, or "-c"."""
    program, *rest = words
    if program == "srun":
        return meaning(rest)
    if program == "torchrun":
        given = get_args_parser().parse_args(rest)
        return meaning(["python", *["-m"][: given.module], given.training_script, *given.training_script_args])
    if program in ("python", "python3") and rest:
        if rest[0] == "-":
            return ["-c", stdin, *rest[1:]]
        if rest[0] != "-m":
            return rest
        package, _, module = rest[1].partition(".")
        return [package, *([module] if module else []), *rest[2:]]
    return words


def smaller(words):
    """A command line with small values in place of the page's; it does not write to where something is."""
    program, *rest = words
    name = rest[0] if program in GROUPS else "pretrain" if {"--data", "--out"} <= {*rest} else ""
    small, made = SMALL | DROPPED.get(name, {}), []
    for word in rest:
        if made and made[-1] in small:
            made[-1:] = small[made[-1]].split()
        else:
            made.append("3" if program.endswith(".py") and word.isdigit() and word == rest[-1] else word)
    if "--finish" in rest:
        return [program, *made]
    for option in ("--out", "--html"):
        if option in made and (place := Path(made[made.index(option) + 1])).exists():
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    at = 1 if program in GROUPS else 0
    added = "" if any(word.endswith(".toml") for word in made) else ADDED.get(name, "")
    return [program, *made[:at], *added.split(), *made[at:]]


def smaller_file(block):
    """A block that is a file, with small values in place of those of a file of options and of its defaults."""
    text = block.text
    if block.file.endswith(".toml"):
        for name in ("length", "global_batch_size"):
            text = text if re.search(f"^{name} =", text, re.MULTILINE) else f"{name} = 1\n{text}"
        for name, value in IN_FILES.items():
            text = re.sub(rf"^{name} = (?!.*\.\.).*", f"{name} = {value}", text, flags=re.MULTILINE)
    return text


def run(words, stdin=""):
    """Runs a command line in this process; what it printed, and the names that a script left."""
    program, *rest = words
    if program in GROUPS:
        return succeeds(GROUPS[program], *rest, input=stdin).stdout, {}
    printed, names = io.StringIO(), {}
    with (
        patch.object(sys, "argv", ["-c", *rest[1:]] if program == "-c" else words),
        contextlib.redirect_stdout(printed),
    ):
        try:
            if program == "-c":
                exec(compile(rest[0], "-c", "exec"), {"__name__": "__main__"})  # noqa: S102
            else:
                names = runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(end.code) from end
    return printed.getvalue(), names


# --------------------------------------------------------------------------------------------------------------- world


CHINESE, RADICALS = "好说铁江狗邓马龠", "女言金水犬邑馬龠"
BERT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
SMALL_PRESETS = {"bert-small": (4, 64, 256), "bert-base": (12, 64, 256), "modernbert-base": (4, 64, 96)}
HUB = ("bert-base-uncased", "bert-base-chinese", "roberta-base", "xlm-roberta-base", "gpt2", "ModernBERT-base")
ANSWERS = [
    {"id": "1", "question": "what", "is_impossible": False, "answers": [{"text": "river", "answer_start": 4}]},
    {"id": "2", "question": "who", "is_impossible": True, "answers": []},
]
ANSWERS = {"version": "2.0", "data": [{"title": "x", "paragraphs": [{"context": "the river", "qas": ANSWERS}]}]}
OTHER_IDS = [[10, 11, 12, 3], [13, 3], [14, 15, 16, 3], [21, 3]]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The files and directories that pages name, under their names: small ones, and many of them the same."""
    with contextlib.chdir(tmp_path_factory.mktemp("world")):
        for name, lines in texts().items():
            write(name, *lines)
        for name in ("corpus.txt", "blimp.jsonl", "uniref50.fasta"):
            Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
        Path("dump").mkdir()
        Path("corpus.txt.gz").rename("dump/one.txt.gz")
        with pa.CompressedOutputStream("dump/one.jsonl.zst", "zstd") as file:
            file.write(Path("corpus.jsonl").read_bytes())
        make_models()
        make_ids()
        return Path.cwd()


def texts():
    """Name → lines of the files of text."""
    vocabulary = [*SPECIALS, *"-.0123456789", *LETTERS, *("##" + letter for letter in LETTERS), *WORDS]
    corpora = ["corpus", "books", "news", "domain", "general", "corpus/one"]
    files = {f"{name}.txt": [make_text(120, seed=number)] for number, name in enumerate(corpora)}
    rows = [json.dumps({"text": text, "body": text}) for text in make_text(60).split("\n\n")]
    draw = random.Random(8)
    genome = [line for n in range(40) for line in (f">{n}", "".join(draw.choices("ACGTacgtN", k=400)))]
    files |= {
        "vocab.txt": [*vocabulary, *CHINESE, "##好"],
        "zh.txt": ["".join(draw.choices(CHINESE, k=24)) + "\n" for _ in range(60)],
        "corpus.jsonl": [*rows, rows[0]],
        "more/one.jsonl": rows,
        "jieba/__init__.py": ["def cut(text):", "    return [text[at : at + 2] for at in range(0, len(text), 2)]"],
        "words.txt": ["not", "never"],
        "glove.6B.300d.txt": ["rivers 1 2", "stones 2 1"],
        "radicals.tsv": map("\t".join, zip(CHINESE, RADICALS, strict=True)),
        "train.csv": ["sentence1,sentence2,label", "river light,rivers,1", "salt,the stone,0"],
        "benchmarks/SEQ_SOLUBLE.tsv": ["entry\tsequence"]
        + [f"{n}\t{''.join(draw.choices('LAGVSERTIDPKQ', k=60))}" for n in range(60)],
        "genome.fa": genome,
        "uniref50.fasta": [line.upper() for line in genome],
        "blimp.jsonl": [json.dumps({"good": "the river", "bad": "river the", "field": "syntax"})],
        "electra/config.json": [json.dumps({"model_type": "electra"} | LISTED["electra"])],
        "longformer.json": [json.dumps(LONGFORMER)],
    }
    for part in ("train", "dev", "test"):
        labels = [(text, int(text in GOOD)) for text in GOOD + BAD]
        files |= {
            f"{part}.tsv": [f"{text}\t{text}\t{text}\t{label}" for text, label in labels * 2],
            f"{part}.txt": ["the DET", "river NOUN", "", "salt NOUN", ""] * 9,
            f"{part}.conllu": ["1\tthe\t_\tDET", "2\tsalt\t_\tNOUN"],
            f"{part}.jsonl": [json.dumps({"text": "the river", "choices": ["salt", "light"], "label": 1})] * 3,
            f"{part}-v2.0.json": [json.dumps(ANSWERS)],
            f"glue/CoLA/{part}.tsv": [f"x\t{label}\t\t{text}" for text, label in labels],
        }
    return files


def make_models():
    """Of a name on the hub, a directory with weights and a tokenizer."""
    tokenizer = bertdata.Tokenizer.load("vocab.txt").loaded
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForMaskedLM(BertConfig(vocab_size=tokenizer.special.vocab_size, **BERT)).save_pretrained("checkpoint")
    write_all("checkpoint", tokenizer.files)
    for name in ("tokenizer", "base", "teacher", *HUB):
        shutil.copytree("checkpoint", name)
    shutil.copy("checkpoint/tokenizer.json", ".")
    build = "bertdata build {0}.txt --out {1} --tokenizer bert-base-uncased --validation 0.1"
    for name, out in (("corpus", "shards"), ("books", "books"), ("news", "news")):
        run(build.format(name, out).split())
    run(f"bertrain pretrain --data shards --out run {ROWS}".split())
    shutil.copytree("run", "run2")
    shutil.copytree(f"run/step-{STEPS:08d}", "big")


def make_ids():
    """Of other programs."""
    data, index = ids.megatron([stored(bertdata.open("shards"))], "uint16")
    files = {"corpus.bin": data, "corpus.idx": index, "train.bin": ids.packed([10, 11, 3, 12, 3], "uint16")}
    files["00000_unshuffled.ds"] = ids.packed(sum(OTHER_IDS, []), "uint16")
    files["00000_unshuffled.ds.index"] = struct.pack("<4Q", 4, 6, 10, 12)
    files["saved/state.json"] = b'{"_data_files": [{"filename": "data.arrow"}]}'
    write_all(".", files)
    table = pa.table({"input_ids": OTHER_IDS})
    with pa.ipc.new_stream("saved/data.arrow", table.schema) as writer:
        writer.write_table(table)


def furnish(folder, world, text):
    """Copies into a page's directory what the page names, to where it names it."""
    for name in re.findall(r"(?<![\w:/.])[\w.+-]+(?:/[\w.+-]+)*", text):
        place, found = folder / name, world / name if (world / name).exists() else world / name.rpartition("/")[2]
        if (ROOT / name).exists() and name.partition("/")[0] in ("benchmarks", "examples", "tools"):
            found, place = ROOT / name.partition("/")[0], folder / name.partition("/")[0]
        if found.name in ("", ".", "..") or place.exists() or not found.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if found.is_dir():
            shutil.copytree(found, place)
            continue
        for each in [found, *world.glob(f"{found.name.partition('.')[0]}.*")]:  # corpus.bin needs corpus.idx
            shutil.copy(each, place.parent)


# --------------------------------------------------------------------------------------------------------------- tests


PAGES = [page for page in PAGES if any(block.kind != "shown" for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_options_that_exist(page, tmp_path, monkeypatch):
    """And values that they take. Nothing is run. A command is one of our programs, a file, or in REAL or OTHERS."""

    def look(words, where, stdin):
        program, *rest = meaning(words, stdin)
        if program in GROUPS or program.startswith("benchmarks/"):
            command = GROUPS.get(program) or runpy.run_path(str(ROOT / program), run_name="read")["main"]
            if program in GROUPS and not rest[0].startswith("-"):
                program, *rest = rest
                command = command.get_command(click.Context(command), program)
            if program == "pretrain" and "--config" not in rest:  # with its own checks, of options that exclude others
                succeeds(cli.command(lambda config: None), *rest)
            else:
                with contextlib.suppress(click.exceptions.Exit):
                    command.make_context(program, rest).close()
        elif program == "-c":
            compile(rest[0], page, "exec")
        else:
            assert program.endswith(".py") or program in {*REAL.split(), *OTHERS}, words
        return ""

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for block in blocks(page):
        if block.kind == "python":
            compile(block.text, block.place, "exec")
        in_bash(block.text if block.kind == "bash" else block.runs, tmp_path, look, real="")


@pytest.fixture
def _as_before(tmp_path, tables_as_they_were):
    """Small presets; and what a page's Python adds to the tables of bertrain, and imports, is gone after it."""
    PRESETS.update(SMALL_PRESETS)
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("_as_before")
def test_blocks_run(page, world, bucket, tmp_path, monkeypatch):
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    furnish(folder, world, "\n".join(block.text for block in blocks(page)))
    for each in (world / "dump").iterdir():
        bucket.put(f"{each.parent.name}/{each.name}", each.read_bytes())
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(smaller_file(block))
    names = {"__name__": "page"}

    def answer(words, where, stdin):
        if meaning(words, stdin)[0] in OTHERS or excused(page, words, stdin):
            return ""
        os.chdir(where)
        line = [word.replace("s3://bucket", bucket.url) for word in words]
        try:
            printed, left = run(line := smaller(meaning(line, stdin)), stdin)
        except Exception as error:
            raise AssertionError(f"{block.place}: {' '.join(words)}\nas {' '.join(line)}\n{error}") from error
        names.update(left)
        return printed

    for block in blocks(page):
        if block.kind == "bash":
            in_bash(block.text, folder, answer)
        elif block.kind == "python" and not block.file and not excused(page, [block.text]):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text.replace("s3://bucket", bucket.url), block.place, "exec"), names)  # noqa: S102
        elif block.runs and text_of(page).count(block.runs) == 1:  # no other block runs it
            in_bash(block.runs, folder, answer)
        os.chdir(folder)
    if page == "docs/import.md":  # its loop reads what another program wrote
        assert sorted(stored(bertdata.open("from-datatrove"))) == sorted(stored(bertdata.open("from-rows")))
    os.chdir(tmp_path)
    shutil.rmtree(folder)


EXAMPLES = [path for path in sorted((ROOT / "bertdata").rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_in_docstrings_give_what_they_say(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
