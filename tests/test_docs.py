"""Every block of code of README.md, CONTRIBUTING.md and docs/ is run.

A block without a language, or of bash, is run by bash, so that quotes, pipes and here-documents mean what they mean to
a reader. bash finds no program but a few of the system, and asks this file for all others. `bertdata`, `bertrain`,
`torchrun` and `python` are run in this process, with small values in place of the page's; NOT_RUN has what cannot be
run, and why. A block of Python is executed, or is a file if its first line names one, as is a block of TOML. Blocks in
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
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from markdown_it import MarkdownIt
from reference import ids
from support.data import BAD, GOOD, LETTERS, ROOT, SPECIALS, WORDS, make_text, stored
from support.disk import write, write_all
from support.families import LONGFORMER
from support.families import SMALL as FAMILIES_HERE
from torch.distributed.run import get_args_parser
from transformers import BertConfig, BertForMaskedLM

import bertdata
from bertdata.cli import main as bertdata_command
from bertdata.tokenize.load import load
from bertrain import cli
from bertrain.__main__ import main as bertrain_command
from bertrain.models import families

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md"))]
PAGES.remove("docs/api.md")  # made of docstrings, whose examples are run as doctests
SHOWN = {"text", "json", "jsonl", "toml", "yaml", "tsv", "csv", "html"}
GROUPS = {"bertdata": bertdata_command, "bertrain": bertrain_command}
STEPS = 5

NOT_RUN = {  # page ("*": any), beginning of a command or of Python → why it is only read; ours are parsed all the same
    ("*", "pip install "): "needs a package index",
    ("*", "pipx install "): "needs a package index",
    ("*", "python3 -m venv "): "takes minutes, with the installation that follows",
    ("*", "hf download "): "needs the hub",
    ("*", "hf upload "): "needs the hub; tests/test_card.py",
    ("*", "aws "): "needs the command line of AWS",
    ("docs/tutorial.md", "from pathlib import Path\n"): "reads all packages; the world has such a text",
    ("docs/tutorial.md", "from hashlib import sha256\n"): "reads all packages; the world has such tables",
    ("docs/records.md", "bertrain pretrain --data shards/ --out run/ --log-to wandb "): "tests/test_trackers.py",
    ("docs/reading.md", "python examples/lightning_loop.py "): "Lightning is not installed",
    ("CONTRIBUTING.md", "pre-commit "): "is not installed",
    ("CONTRIBUTING.md", "moto_server "): "does not end; the fixture `bucket` starts one",
    ("CONTRIBUTING.md", "curl "): "needs that server; the fixture `bucket` makes a bucket",
    ("docs/adapters.md", "bertrain pretrain --data shards/ --init run/ --lora r=8,alpha=16,bits=4"): "bitsandbytes",
    ("docs/import.md", "from streaming import "): "tests/test_iterables.py, outside",
    ("docs/import.md", "from litdata import "): "tests/test_iterables.py, outside",
    ("docs/finetuning.md", "python search_task.py "): "mteb; tests/test_embeddings.py",
    ("docs/finetuning.md", "euroeval "): "is not installed; tests/test_embeddings.py",
    ("docs/recipes.md", "python benchmarks/"): "takes hours",
    ("*", "bertdata build hf://"): "needs the hub",
    ("*", "bertdata build https://"): "needs a web server",
    ("*", "ray start "): "tests/test_ray.py starts a cluster",
    ("docs/scale.md", "bertdata build s3://bucket/dump/*.zst --out shared/shards"): "a cluster; tests/test_ray.py",
    ("*", "torchrun --nnodes "): "needs several machines; tests/test_dist.py runs two agents",
    ("*", "srun "): "needs Slurm",
    ("docs/howto/proteins.md", "bertrain doctor --recipe "): "takes steps of a large batch",
    ("docs/howto/decoder.md", "bertdata build corpus.txt --out rows/ "): "needs a decoder; the page makes one below",
    ("docs/howto/decoder.md", "bertrain pretrain --init gemma/ "): "needs a decoder; the page makes one below",
    ("*", "scontrol "): "needs Slurm",
}
REWRITTEN = {  # in all pages: pattern → what stands in its place
    r"\.venv/bin/(?!activate)": "",
    r"(?<!\w)/shared/": "shared/",
    r"jieba:cut": "support.data:in_pairs",
    r"trained/ 200": "trained/ 3",
    r"decoder.py train 1500": "decoder.py train 3",
    r"step-(?!0000000)\d{8}": f"step-{STEPS:08d}",
    r'"roberta", "type_vocab_size": 1': '"roberta", "hidden_size": 48, "intermediate_size": 64',
    r"STEPS, ROWS, RATE = 500, 32, 5e-5": "STEPS, ROWS, RATE = 2, 4, 1e-3",
}
SMALLER = f"--steps {STEPS} --length 48 --global-batch-size 4 --max-samples 64 --latency 100s "
SMALLER += "--trials 2 --step 1 --part 1/1 --vocab-size 1000 --seeds 1 --copies 2"
REPLACED = {words.split()[0]: words for words in re.findall(r"--\S+ \S+", SMALLER)}  # option → the words in its place
REPLACED |= {"--micro-batch-size": "", "--save-every": "--save-every 2"}
REPLACED_IN_TOML = {  # pattern → what stands in its place in a file of options
    r"^steps = .*": "steps = 20",
    r"^tokens = .*": 'tokens = "2K"',
    r"^warmup_steps = .*": "warmup_steps = 1",
    r"^length = (?=\d{1,3}$).*": "length = 48",
    r"^global_batch_size = \d+": "global_batch_size = 4",
    r"^save_every = .*": "",
}
REPLACED_OF = {
    "pretrain": {"--epochs": f"--steps {STEPS}"},
    "doctor": {"--out": "--out new/"},  # where no other run is
    "finetune": {"--epochs": "--epochs 1"},
}
ADDED = {  # command → options that come before the page's
    "build": "--validation 0.1",
    "pretrain": f"--steps {STEPS} --length 48 --global-batch-size 4",
    "doctor": f"--steps {STEPS} --length 48 --global-batch-size 4",
    "teacher": "--length 48",
    "finetune": "--epochs 1 --seeds 1 --length 48",
    "suite": "--epochs 1 --seeds 1 --length 48",
    "search": "--max-samples 64",
}
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


def code_of(words, stdin):
    """What NOT_RUN knows a command by: the line, or the program that Python reads from a here-document."""
    return stdin.decode() if words[1:2] == ("-",) and stdin else " ".join(words)


def excused(page, code):
    """The entry of NOT_RUN for a command or a block of Python, or None."""
    return next((entry for entry in NOT_RUN if entry[0] in ("*", page) and code.startswith(entry[1])), None)


# --------------------------------------------------------------------------------------------------------------- bash


HANDLER = r"""
function . { :; }      # there is no environment to activate
command_not_found_handle() {
    if [[ $REAL == *" $1 "* ]]; then command -p "$@"; return; fi
    local request room=$ROOM/$BASHPID
    command -p mkfifo "$room"
    printf -v request '%s\x1f' "$BASHPID" "$PWD" "$@"
    printf '%s\x1e' "$request" >&"$ASK"
    read -r < "$room"
    command -p cat "$room.said"
}
set -e
"""
REAL = " cat cp head ls mkdir mv rm sort tail wc "


class Bash:
    """Runs a block. answer(words, where, stdin): is called for every program that is asked for; what it printed."""

    def __init__(self, folder, room, answer, *, real):
        self.folder, self.room, self.answer, self.real = folder, room, answer, real

    def run(self, text):
        self.asked, ask = os.pipe()
        self.requests = []
        around = {"PATH": "/nowhere", "HOME": str(self.folder), "ASK": str(ask), "ROOM": str(self.room)}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        command = [shutil.which("bash"), "-c", f"{HANDLER}{text}\nwait\n"]
        more = {"cwd": self.folder, "env": around | {"REAL": self.real}, "pass_fds": [ask], "start_new_session": True}
        bash = subprocess.Popen(command, **streams, **more)
        os.close(ask)
        try:
            while self.requests or self._listen():
                self._serve(*self.requests.pop(0))
            error = bash.stderr.read()
            assert bash.wait() == 0, error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGKILL)  # also what waits for an answer
            bash.communicate()
            os.close(self.asked)

    def _listen(self):
        """Waits for one or more requests; False at the end of the block."""
        data = os.read(self.asked, 1 << 16)
        while data and not data.endswith(b"\x1e"):
            data += os.read(self.asked, 1 << 16)
        self.requests += [request.split("\x1f")[:-1] for request in data.decode().split("\x1e")[:-1]]
        return bool(data)

    def _serve(self, pid, where, *words):
        printed = self.answer(words, where, self._stdin(pid) if "-" in words else b"")
        (self.room / f"{pid}.said").write_text(printed)
        (self.room / pid).write_text("\n")  # when it is read
        (self.room / pid).unlink()

    def _stdin(self, pid):
        """All of a here-document or a pipe. The program at its other end may wait for an answer, too."""
        data = b""
        with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as stream:
            while True:
                ready = [] if self.requests else select.select([stream, self.asked], [], [])[0]
                if stream in ready:
                    if not (part := stream.read(1 << 16)):
                        return data
                    data += part
                elif self.requests or self._listen():
                    self._serve(*self.requests.pop(0))


# ----------------------------------------------------------------------------------------------------------- commands


def meaning(words, stdin=b""):
    """What a command line runs: the program, as its first word, and its arguments. One of GROUPS, a file, or "-c"."""
    program, *rest = words
    if program == "srun":
        return meaning(rest)
    if program == "torchrun":
        given = get_args_parser().parse_args(rest)
        return meaning(["python", *["-m"][: given.module], given.training_script, *given.training_script_args])
    if program in ("python", "python3") and rest:
        if rest[0] == "-":
            return ["-c", stdin.decode(), *rest[1:]]
        if rest[0] != "-m":
            return rest
        package, _, module = rest[1].partition(".")
        return [package, *([module] if module else []), *rest[2:]]
    return words


def parse(words):
    """Raises click's errors for options that do not exist, and values of a wrong kind."""
    program, *rest = words
    if program == "-c":
        compile(rest[0], "-c", "exec")
        return
    command = GROUPS.get(program)
    if (ROOT / program).is_file() and program.startswith("benchmarks/"):
        command = runpy.run_path(str(ROOT / program), run_name="read")["main"]
    if not isinstance(command, click.Command):
        return
    if isinstance(command, click.Group) and rest and rest[0] not in ("--help", "--version"):
        name, *rest = rest
        command = command.get_command(click.Context(command), name)
        assert command, f"{program} has no command {name}"
        if name == "pretrain" and "--config" not in rest:  # with its own checks, such as of options that exclude others
            done = CliRunner().invoke(cli.command(lambda config: None), rest)
            assert done.exit_code == 0, done.output
            return
    with contextlib.suppress(click.exceptions.Exit):
        command.make_context(command.name, list(rest)).close()


def smaller(words):
    """A command line with small values in place of the page's; it does not write to where something is."""
    program, *rest = words
    name = rest[0] if program in GROUPS else "pretrain" if {"--data", "--out"} <= {*rest} else ""
    taken, made = REPLACED | REPLACED_OF.get(name, {}), []
    for word in rest:
        if made and made[-1] in taken:
            made[-1:] = taken[made[-1]].split()
        else:
            made.append(word)
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
    if not block.file.endswith(".toml"):
        return text
    for name, small in (("length", 48), ("global_batch_size", 4)):
        if not re.search(f"^{name} =", text, flags=re.MULTILINE):
            text = f"{name} = {small}\n{text}"
    for pattern, other in REPLACED_IN_TOML.items():
        text = re.sub(pattern, other, text, flags=re.MULTILINE)
    return text


def run(words, stdin=b""):
    """Runs a command line in this process; what it printed, and the names that a script left."""
    program, *rest = words
    if program in GROUPS:
        done = CliRunner().invoke(GROUPS[program], rest, input=stdin)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout, {}
    printed, names, before = io.StringIO(), {}, sys.argv
    sys.argv = ["-c", *rest[1:]] if program == "-c" else words
    try:
        with contextlib.redirect_stdout(printed):
            if program == "-c":
                exec(compile(rest[0], "-c", "exec"), {"__name__": "__main__"})  # noqa: S102
            else:
                names = runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"ended with {end.code}") from end
    finally:
        sys.argv = before
    return printed.getvalue(), names


# -------------------------------------------------------------------------------------------------------------- world


CHINESE = [*zip("好说铁江狗邓马龠", "女言金水犬邑馬龠", strict=True)]  # characters, and a radical of each
BERT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
SMALL_PRESETS = {
    "bert-small": (4, 64, 256),
    "bert-base": (12, 64, 256),
    "modernbert-base": (4, 64, 96),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The files and directories that pages name, under their names: small ones, and many of them the same."""
    with contextlib.chdir(tmp_path_factory.mktemp("world")):
        _texts()
        _tables()
        _models()
        _ids_of_others()
        return Path.cwd()


def _also(name, *others):
    for other in others:
        shutil.copytree(name, other) if Path(name).is_dir() else shutil.copy(name, other)


def _texts():
    characters = "".join(character for character, _ in CHINESE)
    vocabulary = [*SPECIALS, *"-.0123456789", *LETTERS, *("##" + letter for letter in LETTERS), *WORDS]
    write("vocab.txt", *vocabulary, *characters, "##好")
    for number, name in enumerate(["corpus", "books", "news", "domain", "general", "corpus/one"]):
        write(f"{name}.txt", make_text(120, seed=number))
    write("zh.txt", *("".join(random.Random(number).choices(characters, k=24)) + "\n" for number in range(60)))
    rows = [json.dumps({"text": text, "body": text}) for text in make_text(60).split("\n\n")]
    for name in ("corpus.jsonl", "more/one.jsonl"):
        write(name, *rows, rows[0])
    Path("dump").mkdir()
    with pa.CompressedOutputStream("dump/one.jsonl.zst", "zstd") as file:
        file.write("\n".join(rows).encode())
    Path("dump/one.txt.gz").write_bytes(gzip.compress(Path("corpus.txt").read_bytes()))
    write("words.txt", "not", "never")
    write("glove.6B.300d.txt", "rivers 1 2", "stones 2 1")
    write("radicals.tsv", *("\t".join(pair) for pair in CHINESE))


def _tables():
    for part in ("train", "dev", "test"):
        write(f"{part}.tsv", *(f"{text}\t{text}\t{text}\t{int(text in GOOD)}" for text in (GOOD + BAD) * 2))
    write("train.csv", "sentence1,sentence2,label", "river light,rivers,1", "salt,the stone,0")
    for part in ("train", "dev"):
        write(f"{part}.txt", *["the DET", "river NOUN", "", "salt NOUN", ""] * 9)
        write(f"{part}.conllu", "1\tthe\t_\tDET", "2\tsalt\t_\tNOUN")
        choices = {"text": "the river", "choices": ["salt", "light"], "label": 1}
        write(f"{part}.jsonl", *[json.dumps(choices)] * 3)
        answers = [{"text": "river", "answer_start": 4}]
        asked = [
            {"id": "1", "question": "what", "is_impossible": False, "answers": answers},
            {"id": "2", "question": "who", "is_impossible": True, "answers": []},
        ]
        texts = [{"title": "x", "paragraphs": [{"context": "the river", "qas": asked}]}]
        write(f"{part}-v2.0.json", json.dumps({"version": "2.0", "data": texts}))
        (Path("glue") / "CoLA").mkdir(parents=True, exist_ok=True)
        write(f"glue/CoLA/{part}.tsv", *(f"x\t{int(text in GOOD)}\t\t{text}" for text in GOOD + BAD))
    pair = {"good": "the river", "bad": "river the", "field": "syntax"}
    draw = random.Random(8)
    proteins = ["entry\tsequence", *(f"{n}\t{''.join(draw.choices('LAGVSERTIDPKQ', k=60))}" for n in range(60))]
    write("benchmarks/SEQ_SOLUBLE.tsv", *proteins)
    genome = [line for n in range(40) for line in (f">{n}", "".join(draw.choices("ACGTacgtN", k=400)))]
    write("genome.fa", *genome)
    Path("uniref50.fasta.gz").write_bytes(gzip.compress("\n".join(genome).upper().encode()))
    Path("blimp.jsonl.gz").write_bytes(gzip.compress(json.dumps(pair).encode()))


def _models():
    """Of a name on the hub, a directory with weights and a tokenizer."""
    tokenizer = load("vocab.txt")
    Path("checkpoint").mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForMaskedLM(BertConfig(vocab_size=tokenizer.special.vocab_size, **BERT)).save_pretrained("checkpoint")
    write_all("checkpoint", tokenizer.files)
    hub = ("bert-base-uncased", "bert-base-chinese", "roberta-base", "xlm-roberta-base", "gpt2", "ModernBERT-base")
    _also("checkpoint", "tokenizer", "base", "teacher", *hub)
    shutil.copy("checkpoint/tokenizer.json", ".")
    write("electra/config.json", json.dumps({"model_type": "electra"} | FAMILIES_HERE["electra"]))
    write("longformer.json", json.dumps(LONGFORMER))
    run(shlex.split("bertdata build corpus.txt --out shards --tokenizer bert-base-uncased --validation 0.1"))
    for name in ("books", "news"):
        run(shlex.split(f"bertdata build {name}.txt --out {name} --tokenizer bert-base-uncased --validation 0.1"))
    shutil.copy("books.txt", "books/one.txt")  # a page has texts in books/, another one a dataset
    run(shlex.split(f"bertrain pretrain --data shards --out run {ADDED['pretrain']}"))
    _also("run", "run2")
    _also(f"run/step-{STEPS:08d}", "big")


def _ids_of_others():
    for ending, content in zip(
        (".bin", ".idx"), ids.megatron([stored(bertdata.open("shards"))], "uint16"), strict=True
    ):
        Path(f"corpus{ending}").write_bytes(content)
    documents = [[10, 11, 12, 3], [13, 3], [14, 15, 16, 3], [21, 3]]
    Path("train.bin").write_bytes(ids.packed([10, 11, 3, 12, 3], "uint16"))
    Path("00000_unshuffled.ds").write_bytes(ids.packed(sum(documents, []), "uint16"))
    Path("00000_unshuffled.ds.index").write_bytes(struct.pack("<4Q", 4, 6, 10, 12))
    Path("saved").mkdir()
    table = pa.table({"input_ids": documents})
    with pa.ipc.new_stream("saved/data.arrow", table.schema) as writer:
        writer.write_table(table)
    write("saved/state.json", json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


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


@functools.cache
def listed(page):
    """The command lines of a page and its blocks of Python, with their places; nothing is run."""
    found = []
    for block in blocks(page):
        if block.kind == "python":
            found.append((block.place, None, block.text))
        code = {"python": block.runs, "bash": block.text, "shown": ""}[block.kind]

        def note(words, where, stdin, place=block.place):
            found.append((place, meaning(words, stdin), code_of(words, stdin)))
            return ""

        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as room:
            Bash(Path(folder), Path(room), note, real="").run(code)
    return found


PAGES = [page for page in PAGES if any(block.kind != "shown" for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_options_that_exist(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for place, words, code in listed(page):
        try:
            if words is None:
                compile(code, place, "exec")
                continue
            is_known = words[0] in GROUPS or words[0] == "-c" or words[0].endswith(".py")
            assert is_known or words[0] in REAL.split() or excused(page, code), "is not in NOT_RUN and cannot be run"
            parse(words)
        except (AssertionError, click.ClickException, SyntaxError) as error:
            message = error.format_message() if isinstance(error, click.ClickException) else error
            pytest.fail(f"{place}: {code}\n{message}")


@pytest.fixture
def _as_before(monkeypatch, tmp_path, tables_as_they_were):
    """Small presets; and what a page's Python adds to the tables of bertrain, and imports, is gone after it."""
    for name, sizes in SMALL_PRESETS.items():
        monkeypatch.setitem(families.PRESETS, name, sizes)
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("_as_before")
def test_blocks_run(page, world, bucket, tmp_path, monkeypatch):
    folder, room = tmp_path / "page", tmp_path / "room"
    folder.mkdir()
    room.mkdir()
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
        if excused(page, code_of(words, stdin)):
            return ""
        os.chdir(where)
        line = [word.replace("s3://bucket", bucket.url) for word in words]
        try:
            printed, left = run(line := smaller(meaning(line, stdin)), stdin)
        except Exception as error:
            raise AssertionError(f"{block.place}: {' '.join(words)}\nas {' '.join(line)}\n{error}") from error
        names.update(left)
        return printed

    bash = Bash(folder, room, answer, real=REAL)
    for block in blocks(page):
        if block.kind == "bash":
            bash.run(block.text)
        elif block.kind == "python" and not block.file and not excused(page, block.text):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text.replace("s3://bucket", bucket.url), block.place, "exec"), names)  # noqa: S102
        elif block.runs and text_of(page).count(block.runs) == 1:  # no other block runs it
            bash.run(block.runs)
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
