"""The commands as a user meets them: what they print, how they fail, what they exit with; and the demo."""

import contextlib
import functools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig

import click
import numpy as np
import pytest
from support.commands import PROGRAMS, invoke, refused, refuses, succeeds, waited
from support.data import build, make_text
from support.disk import flip, write
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForMaskedLM

import bertdata
from bertrain.commands import docstrings

EVERY = [(program, name) for program, group in PROGRAMS.items() for name in group.list_commands(None)]
PROMISED = {  # command of the trainer → how many options and arguments must be given, and the defaults of others
    "pretrain": "0: 128 off 0.15 0.8 0.1 exact full modernbert-tiny mlm 256 0.0005 0.0 0.06 linear 0.2 adamw 4.0 0.95 "
    "0.01 0.9 0.98 1e-06 1.0 0 auto uniform 0.5 1.0 2 stack 50.0 difference auto auto auto off 1000 3 auto 0.15 auto "
    "500 10",
    "evaluate": "1: word-l2r validation 0",
    "finetune": "4: 3 classification 0 -1 , 3 32 5e-05 0.1 auto off",
    "augment": "3: classification 0 -1 30 15 0.4 0",
    "suite": "4: 3 3 32 5e-05 0.1 auto off",
    "search": "4: 60 evolution 0 1 validation 512",
    "teacher": "3: 64 0 64 4096",
    **{"transplant": "3: 0", "extract": "2: ", "merge": "2: ", "trace": "2: ", "plot": "1: "},
}


@pytest.mark.parametrize(("program", "name"), EVERY)
def test_examples_of_help_are_command_lines_whose_output_is_local(program, name):
    group = PROGRAMS[program]
    command, shown = group.get_command(click.Context(group), name), succeeds(group, name, "-h").stdout
    assert command.help
    needed, defaults = sum(param.required for param in command.params), re.findall(r"\[default:\s+([^];]*)", shown)
    assert program == "bertdata" or f"{needed}: {' '.join(defaults)}" == PROMISED.get(name, f"0: {' '.join(defaults)}")
    heading, *examples = (command.epilog or "Examples:").removeprefix("\b\n").splitlines()
    assert (heading, len(examples)) in (("Example:", 1), ("Examples:", 2)) or name == "demo"
    for example in examples:
        words = shlex.split(example, comments=True)
        assert words[:2] == [program, name]
        assert example.strip() in shown
        command.make_context(name, words[2:])
        if program == "bertrain" and "--out" in words:
            words[words.index("--out") + 1] = "s3://bucket/run"
            refused(group, *words[1:], kind="bad-url", option="out")


built = functools.partial(succeeds, "bertdata", "build")


def test_an_empty_split_is_warned_of(tmp_path, vocab):
    text = write(tmp_path / "one", "the stone")
    share_of = "its share is {} of 1 document; build with a {} --valid".format
    for share, *said in ((0.01, share_of(0.01, "larger")), (0.999, share_of(0.001, "smaller")), (0,)):
        out = tmp_path / str(share)
        result = built(text, "--out", out, "--tokenizer", vocab, "--validation", share)
        assert result.stdout == f"{out}: 1 document, 3 tokens\ndataset_id {bertdata.open(out).dataset_id}\n"
        assert result.stderr.count("\n") == bool(said)
        assert all(each in result.stderr for each in said)


def test_sizes_are_in_bytes_or_in_units_of_1000_or_1024():
    build = PROGRAMS["bertdata"].get_command(None, "build")
    sizes = {"1": 1, "2.5 kB": 2500, "3M": 3_000_000, "4gb": 4_000_000_000, "1.5KiB": 1536, "6mib": 6 << 20}
    for text, size in (sizes | {"7Gi": 7 << 30, str(2**62 - 512): 2**62 - 512}).items():
        assert build.make_context("build", ["--out", "o", "--shard-size", text]).params["shard_size"] == size


@pytest.mark.parametrize(
    "command",
    [
        "bertrain pretrain --device",
        "bertdata build --vocab → --vocab-size",
        "bertdata build --output-dir → --out",
        "bertdata build --uncased",
        "bertrain pretrain --warmup_steps → --warmup-steps",
        "bertrain doctor --leanring-rate → --lr",
    ],
)
def test_a_misspelt_option_gets_the_one_that_it_probably_is(command):
    program, name, *options = command.replace(" → ", " ").split()
    done = invoke(program, name, options[0], "1")
    assert done.exit_code == 2
    assert re.findall("--[a-z_-]+", done.stderr.splitlines()[-1]) == options


def inspected(*arguments):
    return json.loads(succeeds("bertdata", "inspect", *arguments, "--json").stdout)


def test_inspect_says_the_same_to_people_and_to_scripts(dataset):
    arguments = [dataset.path, "--length", 32, "--global-batch-size", 10, "--world-size", 4]
    facts, text = inspected(*arguments), succeeds("bertdata", "inspect", *arguments).stdout
    usual = "--length", 128, "--global-batch-size", 256, "--world-size", 1
    assert inspected(dataset.path) == inspected(dataset.path, *usual) != facts
    assert facts["documents"] == len(dataset) == sum(split["documents"] for split in facts["splits"].values())
    assert facts["tokens"] == dataset.num_tokens == sum(split["tokens"] for split in facts["splits"].values())
    lengths, spread = sorted(map(len, dataset)), facts["tokens_per_document"]
    shares = {"min": 0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1}
    assert [spread[name] for name in shares] == [lengths[int(at * (len(lengths) - 1))] for at in shares.values()]
    assert facts["bytes"] == sum(path.stat().st_size for path in dataset.path.glob("*.npy"))
    train, samples = facts["splits"]["train"], bertdata.Loader(dataset, length=32).num_samples
    assert (train["samples_per_epoch"], train["steps_per_epoch"]) == (samples, samples / 10)
    assert facts["steps_for"]["rows_of_a_rank"] == 3
    shown = (f"max {lengths[-1]:,}", dataset.dataset_id, f"{dataset.num_tokens:,}", " 3 ")
    assert [each for each in shown if each not in text] == []
    assert "rank" not in succeeds("bertdata", "inspect", dataset.path).stdout


def other_tokenizer(directory):
    """A directory with a tokenizer that has no engine."""
    directory.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "."]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.UnicodeScripts()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_build_and_inspect_say_which_tokenizer_and_engine_a_dataset_has(tmp_path, corpus, vocab):
    words = ["--words", "support.data:in_pairs"]
    for tokenizer, *options, name, engine, reason in (
        (other_tokenizer(tmp_path / "words"), "words", None, "UnicodeScripts"),
        (vocab, *words, None, "WordPiece", "--words"),
        (vocab, None, "WordPiece", None),
    ):
        result = built(corpus, "--out", tmp_path / "out", "--overwrite", "--tokenizer", tokenizer, *options)
        notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
        assert ([reason in note for note in notes]) == [True] * bool(reason)
        about = inspected(tmp_path / "out")["tokenizer"]
        assert (about["name"], about["engine"]) == (name, engine)
        text = succeeds("bertdata", "inspect", tmp_path / "out").stdout
        assert about["kind"] in text
        assert engine or about["engine_refusal"] in text


def test_names_of_any_bytes_are_printed_where_output_is_strict(tmp_path, corpus, vocab):
    """As in a locale such as en_US.UTF-8; without one, Python is not strict."""
    out = os.fsdecode(os.fsencode(tmp_path) + b"/sh\xff")
    build([corpus], out, tokenizer=vocab)
    command = [sys.executable, "-m", "bertdata", "inspect", out]
    for encoding, shown in (("utf-8", b"sh\xff"), ("latin-1", rb"sh\udcff")):
        done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}, capture_output=True)
        assert (done.returncode, shown in done.stdout) == (0, True), done.stderr


def test_the_name_of_a_tokenizer_is_kept_and_no_part_of_what_a_dataset_is(tmp_path, corpus):
    directory = other_tokenizer(tmp_path / "words")
    shutil.copytree(directory, tmp_path / "others")
    shutil.copy(directory / "tokenizer.json", tmp_path / "file.json")
    options, made = {"shard_size": 9000}, []
    for number, name in enumerate(("words", "others/tokenizer.json", "file.json")):
        made.append(build([corpus], tmp_path / str(number), tokenizer=str(tmp_path / name), **options).dataset)
    for part in ((0, 2), (1, 2)):
        build([corpus], tmp_path / "parts", tokenizer=str(directory), part=part, **options)
    made.append(bertdata.finish(tmp_path / "parts").dataset)
    assert [dataset.manifest.tokenizer_name for dataset in made] == ["words", "others", None, "words"]
    assert len({dataset.dataset_id for dataset in made}) == 1


@pytest.mark.parametrize("added", [None, [], [(7000, "<new>")], [(1, "<new>")], [(7000, "")]], ids=str)
def test_a_dataset_has_the_ids_that_the_library_gives_added_tokens(tmp_path, corpus, added):
    """A file may have none, or others: tokenizers then counts them on, or takes those of its vocabulary."""
    content = json.loads((other_tokenizer(tmp_path / "words") / "tokenizer.json").read_bytes())
    (token, *_) = there = content.pop("added_tokens")
    if added is not None:
        others = [token | {"id": number, "content": text} for number, text in added]
        content["added_tokens"] = [*there, *others] if added else []
    path = write(tmp_path / "changed.json", json.dumps(content))
    dataset = build([corpus], tmp_path / "out", tokenizer=str(path)).dataset
    succeeds("bertdata", "verify", dataset.path)
    library = Tokenizer.from_file(str(path))
    stored = Tokenizer.from_file(str(dataset.path / "tokenizer.json"))
    assert stored.get_vocab() == library.get_vocab()
    assert dataset.special_tokens.vocab_size == max(library.get_vocab().values()) + 1


def test_show_says_what_the_mask_did_and_what_follows(dataset):
    def shown(*more):
        return succeeds("bertdata", "show", dataset.path, "--length", 24, "--count", 60, *more).stdout

    selected = [line.split() for line in shown("--masked").splitlines() if line.endswith(("masked", "random", "kept"))]
    batch = bertdata.Loader(dataset, length=24).read(np.arange(60))
    chosen = batch.labels >= 0
    seen, hidden = batch.input_ids[chosen], batch.labels[chosen]
    said = np.where(seen == dataset.special_tokens.mask, "masked", np.where(seen == hidden, "kept", "random")).tolist()
    assert [[int(line[0]), line[-1]] for line in selected] == [
        *map(list, zip(np.nonzero(chosen)[1], said, strict=True))
    ]
    assert {*said} == {"masked", "random", "kept"}
    usual = "--length", 128, "--count", 1, "--sample", 0, "--seed", 0, "--split", "train"
    assert shown("--masked", *usual) == succeeds("bertdata", "show", dataset.path, "--masked").stdout
    assert (
        shown("--masked", "--masking", "whole_word") == shown("--masked", "--policy", "whole_word") != shown("--masked")
    )
    pairs = [line for line in shown("--samples", "pairs").splitlines() if line.startswith("sample ")]
    batch = bertdata.Loader(dataset, length=24, samples="pairs", masking=None).read(np.arange(60))
    assert [line.endswith("another document") for line in pairs] == [*batch.next_sentence_label.astype(bool)]


def test_damage_is_named_and_no_tokenizer_is_read_but_that_of_the_dataset(dataset, tmp_path):
    shutil.copytree(dataset.path, tmp_path / "shards")
    succeeds("bertdata", "verify", tmp_path / "shards")
    flip(path := next((tmp_path / "shards").glob("train-*.tokens.npy")), 200)
    done = invoke("bertdata", "verify", tmp_path / "shards")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"Error: {path}: ")
    path = tmp_path / "shards" / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    refused("bertdata", "show", tmp_path / "shards", kind="damaged", given=path)
    assert f"engine       not known: {path} " in succeeds("bertdata", "inspect", tmp_path / "shards").stdout
    path.unlink()
    path.symlink_to(dataset.path / "tokenizer.json")
    refused("bertdata", "show", tmp_path / "shards", kind="wrong-file-type", given=path)


def test_ctrl_c_at_a_terminal_says_what_is_kept_in_a_line_of_its_own(tmp_path, vocab):
    """After the progress bar and the ^C that the terminal shows."""
    write(tmp_path / "slow.py", "import time", "def slowly(text):", "    time.sleep(0.02)", "    return text")
    text = write(tmp_path / "corpus.txt", make_text(100))
    options = ["--tokenizer", vocab, "--shard-size", "3000", "--map", "slow:slowly", "--workers", "1"]
    command = [sys.executable, "-m", "bertdata", "build", text, "--out", tmp_path / "shards", *options]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    terminal, end = pty.openpty()
    with subprocess.Popen(command, stdout=end, stderr=end, env=os.environ | {"PYTHONPATH": path}) as process:
        os.close(end)
        waited(lambda: list(tmp_path.glob("shards/.build/unit-*.json")))
        process.send_signal(signal.SIGINT)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while piece := os.read(terminal, 4096):
                shown += piece
    os.close(terminal)
    last = shown.decode().rstrip("\r\n").rpartition("\n")[2]
    units = len([*tmp_path.glob("shards/.build/unit-*.json")])
    assert (process.returncode, "Traceback" in shown.decode()) == (130, False), shown
    assert ("\r" in last, f" {units} " in last) == (False, True), shown
    refused("bertdata", "inspect", tmp_path / "shards", kind="unfinished")


def test_a_closed_pipe_is_no_traceback(dataset):
    command = [sys.executable, "-m", "bertdata", "show", str(dataset.path), "--count", "150"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert errors == ""


def test_bench_measures_every_kind_of_samples_that_a_dataset_has(dataset, limit):
    limit(bench_s=0.01)
    for length, kinds in (32, {"windows", "documents", "packed", "pairs"}), (1 << 17, {"windows", "pairs"}):
        done = succeeds("bertdata", "bench", dataset.path, "--length", length, "--rows", 2)
        rates = {name: each for name, *each in map(str.split, done.stdout.splitlines()[2:])}
        assert rates.keys() == kinds
        assert all(len(each) == 2 and min(map(int, each)) >= 0 for each in rates.values())


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The directory of the installed packages."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    return tmp_path / "packages"


@pytest.mark.slow
def test_the_demo_goes_the_whole_way_and_uses_again_what_is_there(packages, tmp_path, limit):
    """With two steps of training on a small text."""
    limit(demo_build=("--vocab-size", "150", "--validation", "0.2"), demo_steps=2)
    limit(demo_rows=("--length", "16", "--global-batch-size", "4"))
    limit(demo_training=("--steps", "2", "--save-every", "1", "--model", "bert-tiny"))
    for number, text in enumerate(make_text(60).split("\n\n")):
        write(packages / f"{number}.py", f'''"""{text * 9}"""''')

    def commands(result):
        return [line.split()[1:3] for line in result.stdout.splitlines() if line.startswith("$ ")]

    first = succeeds("bertrain", "demo", "--out", tmp_path / "demo")
    steps = [["bertdata", "inspect"], ["bertdata", "verify"], ["bertrain", "pretrain"], ["bertrain", "evaluate"]]
    assert commands(first) == [["bertdata", "build"], *steps]
    newest = tmp_path / "demo" / "run" / "step-00000002"
    assert AutoModelForMaskedLM.from_pretrained(newest).config.vocab_size == 150
    shutil.rmtree(packages)
    assert commands(succeeds("bertrain", "demo", "--out", tmp_path / "demo")) == steps
    flip(next((tmp_path / "demo" / "shards").glob("train-*.tokens.npy")), 200)
    result = invoke("bertrain", "demo", "--out", tmp_path / "demo")  # a failed step ends the demo
    assert (result.exit_code, commands(result)) == (1, steps[:2])
    for out in (packages.parent / "demo" / "shards", write(tmp_path / "corpus.txt", "x")):
        refused("bertrain", "demo", "--out", out, kind="out-exists" if out.is_dir() else "unwritable", option="out")


def test_bertdata_becomes_the_process_that_trains(monkeypatch):
    """It does not import bertrain, and nothing of it stays in memory."""
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append((path, words)))
    succeeds("bertdata", "demo", "--out", "x")
    assert started == [(sys.executable, [sys.executable, "-m", "bertrain", "demo", "--out", "x"])]


def test_a_corpus_is_of_docstrings_without_blank_lines_and_without_repetition(packages, tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        words = f"{text} word " * 30
        write(packages / f"{name}.py", f'"""{words}\n\n    more\n    """\n\ndef f():\n    """short"""')
    assert docstrings.write(tmp_path / "all.txt", 10**6)[0] == 2
    documents = (tmp_path / "all.txt").read_text().rstrip("\n").split("\n\n")
    assert sorted((text.split()[0], text.endswith("\nmore")) for text in documents) == [("one", True), ("two", True)]
    assert docstrings.write(tmp_path / "some.txt", 1)[0] == 1
    shutil.rmtree(packages)
    with refuses("empty"):
        docstrings.write(tmp_path / "none.txt", 1)
