"""The commands as a user meets them: what they print, how they fail, what they exit with; and the demo."""

import contextlib
import errno
import fcntl
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
from support.commands import invoke, refused, refuses, succeeds, waited
from support.data import build, make_text, write_dataset
from support.disk import flip, full_disk, write
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForMaskedLM

import bertdata
from bertdata.cli import main
from bertrain.__main__ import COMMANDS as TRAINER
from bertrain.__main__ import main as trainer
from bertrain.commands import demo, docstrings

COMMANDS = sorted(main.commands)
GROUPS = {"bertdata": main, "bertrain": trainer}
EVERY = [*(("bertdata", name) for name in COMMANDS), *(("bertrain", name) for name in TRAINER)]


@pytest.mark.parametrize(("program", "name"), EVERY)
def test_examples_of_help_are_command_lines_whose_output_is_local(program, name):
    group = GROUPS[program]
    command, shown = group.get_command(click.Context(group), name), succeeds(group, name, "--help").stdout
    assert command.help
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


built = functools.partial(succeeds, main, "build")


def test_build_prints_what_it_did(tmp_path, corpus, vocab):
    result = built(corpus, "--out", tmp_path / "shards", "--tokenizer", vocab, "--shard-size", "8KiB")
    dataset = bertdata.open(tmp_path / "shards")
    assert f": {dataset.num_documents} documents, {dataset.num_tokens:,} tokens\n" in result.stdout
    assert result.stdout.endswith(f"{dataset.dataset_id}\n")
    assert dataset.manifest.settings["shard_size"] == 8192


def test_an_empty_split_is_warned_of(tmp_path, vocab):
    text = write(tmp_path / "one", "the stone")
    for share, *said in ((0.01, " validation ", "larger --valid"), (0.999, " train ", "smaller --valid"), (0,)):
        result = built(text, "--out", tmp_path / str(share), "--tokenizer", vocab, "--validation", share)
        assert result.stderr.count("\n") == bool(said)
        assert all(each in result.stderr for each in said)


def test_a_required_option_that_is_missing_an_unknown_command_and_a_wrong_output_are_named(corpus):
    for words, name in (("build t", "out"), ("import t", "out"), ("import t --out t", "tokenizer")):
        refused(main, *words.split(), kind="missing", option=name)
    refused(trainer, "pretain", kind="malformed", says="'pretain'")
    done = invoke(main, "build", corpus, "--out", "/proc/nowhere/out")
    assert (done.exit_code, done.stderr.rstrip().partition("; ")[2][:16]) == (1, "correct the path")


@pytest.mark.parametrize(
    ("command", "suggested"),
    [
        ("bertrain pretrain --device", None),
        ("bertdata build --vocabsize", "--vocab-size"),
        ("bertdata build --vocab", "--vocab-size"),
        ("bertdata build --output", "--out"),
        ("bertdata build --output-dir", "--out"),
        ("bertdata build --input", None),
        ("bertdata build --uncased", None),
        ("bertrain pretrain --pos", None),
        ("bertrain pretrain --warmup_steps", "--warmup-steps"),
        ("bertrain pretrain --no-gradient-checkpoint", "--no-gradient-checkpointing"),
        ("bertrain doctor --leanring-rate", "--lr"),
        ("bertrain pretrain --batch-size", "--global-batch-size"),
    ],
)
def test_a_misspelt_option_gets_the_one_that_it_probably_is(command, suggested):
    program, *words = command.split()
    done = invoke(GROUPS[program], *words, "1")
    assert done.exit_code == 2
    assert re.findall("--[a-z_-]+", done.stderr.splitlines()[-1]) == [words[-1], *([suggested] if suggested else [])]


def inspected(*arguments):
    return json.loads(succeeds(main, "inspect", *arguments, "--json").stdout)


def test_inspect_says_the_same_to_people_and_to_scripts(dataset):
    arguments = [dataset.path, "--length", 32, "--global-batch-size", 10, "--world-size", 4]
    facts, text = inspected(*arguments), succeeds(main, "inspect", *arguments).stdout
    names = "path dataset_id documents sentences tokens token_dtype bytes tokenizer splits steps_for"
    assert list(facts) == [*names.split(), "tokens_per_document", "settings", "counts"]
    assert facts["documents"] == len(dataset) == sum(split["documents"] for split in facts["splits"].values())
    assert facts["tokens"] == dataset.num_tokens == sum(split["tokens"] for split in facts["splits"].values())
    lengths, spread = sorted(map(len, dataset)), facts["tokens_per_document"]
    shares = {"min": 0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1}
    assert [spread[name] for name in shares] == [lengths[int(at * (len(lengths) - 1))] for at in shares.values()]
    assert spread["mean"] == round(sum(lengths) / len(lengths), 2)
    assert facts["bytes"] == sum(path.stat().st_size for path in dataset.path.glob("*.npy"))
    train, samples = facts["splits"]["train"], bertdata.Loader(dataset, length=32).num_samples
    assert (train["samples_per_epoch"], train["steps_per_epoch"]) == (samples, samples / 10)
    assert facts["steps_for"]["rows_of_a_rank"] == 3
    shown = (
        f"min {lengths[0]:,}, median",
        f", max {lengths[-1]:,}\n",
        dataset.dataset_id,
        f"{dataset.num_tokens:,}",
        " 3 ",
    )
    assert [each for each in shown if each not in text] == []


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


def test_inspect_says_what_the_tokenizer_is_and_whether_an_engine_takes_it(tmp_path, corpus, dataset, vocab):
    built(corpus, "--out", tmp_path / "shards", "--tokenizer", other_tokenizer(tmp_path / "words"))
    about = inspected(tmp_path / "shards")["tokenizer"]
    assert (about["name"], about["kind"]) == ("words", "WordLevel, NFC, Lowercase, UnicodeScripts")
    assert about["path"] == str(tmp_path / "shards" / "tokenizer.json")
    assert about["engine"] is None
    text = succeeds(main, "inspect", tmp_path / "shards").stdout
    assert f"words: {about['kind']}\n" in text
    assert about["engine_refusal"] in text
    about = inspected(dataset.path)["tokenizer"]
    assert (about["name"], about["kind"]) == (None, "WordPiece, lower-case")  # a vocab.txt has no name
    assert about["engine"] == "WordPiece"


def test_names_of_any_bytes_are_printed_where_output_is_strict(tmp_path, corpus, vocab):
    """As in a locale such as en_US.UTF-8; without one, Python is not strict."""
    out = os.fsdecode(os.fsencode(tmp_path) + b"/sh\xff")
    build([corpus], out, tokenizer=vocab)
    command, environment = [sys.executable, "-m", "bertdata", "inspect", out], {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True)
    assert (done.returncode, b"sh\xff" in done.stdout) == (0, True), done.stderr


def test_a_page_goes_into_a_pipe_that_stays(dataset, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 1 << 20)  # for the whole page
    succeeds(main, "inspect", dataset.path, "--html", tmp_path / "pipe")
    assert os.read(reading, 99).startswith(b"<!doctype html>")
    assert (tmp_path / "pipe").is_fifo()
    os.close(reading)


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
    succeeds(main, "verify", dataset.path)
    library = Tokenizer.from_file(str(path))
    stored = Tokenizer.from_file(str(dataset.path / "tokenizer.json"))
    assert stored.get_vocab() == library.get_vocab()
    assert dataset.special_tokens.vocab_size == max(library.get_vocab().values()) + 1


def test_a_build_without_an_engine_says_why(tmp_path, corpus, vocab):
    other, in_pairs = other_tokenizer(tmp_path / "words"), ["--words", "support.data:in_pairs"]
    for tokenizer, reason, *options in ((other, "UnicodeScripts"), (vocab, "--words", *in_pairs), (vocab, "")):
        result = built(corpus, "--out", tmp_path / "out", "--overwrite", "--tokenizer", tokenizer, *options)
        notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
        assert len(notes) == bool(reason)
        assert all(reason in note for note in notes)


def test_a_pipe_before_a_file_is_built_without_an_engine(tmp_path, corpus, vocab):
    """The pipe has the corpus four times, of whose last documents and first ones only a line end is between."""
    options = ("--out", tmp_path / "out", "--tokenizer", vocab, "--words", "support.data:in_pairs", "--workers", 1)
    built("-", corpus, *options, input=corpus.read_bytes() * 4)
    dataset = bertdata.open(tmp_path / "out")
    names = [shard.name for shard in dataset.splits["train"]]
    assert (dataset.num_documents, names) == (5 * 120 - 3, ["train-00000", "train-1048576"])


WHOLE_WORDS = ("--masking", "whole_word"), ("--policy", "whole_word")


def test_show_says_what_the_mask_did_and_what_follows(dataset):
    shown = succeeds(main, "show", dataset.path, "--masked", "--length", 24, "--count", 60).stdout
    selected = [line.split() for line in shown.splitlines() if line.endswith(("masked", "random", "kept"))]
    batch = bertdata.Loader(dataset, length=24).read(np.arange(60))
    chosen = batch.labels >= 0
    assert [int(line[0]) for line in selected] == np.nonzero(chosen)[1].tolist()
    seen, hidden = batch.input_ids[chosen], batch.labels[chosen]
    said = np.where(seen == dataset.special_tokens.mask, "masked", np.where(seen == hidden, "kept", "random")).tolist()
    assert [line[-1] for line in selected] == said
    assert {*said} == {"masked", "random", "kept"}
    words = ["show", dataset.path, "--sample", 3, "--count", 2, "--length", 24, "--masked"]
    shown, *whole = (succeeds(main, *words, *more).stdout for more in ((), *WHOLE_WORDS))
    assert shown.count("[CLS]") == 2
    assert whole[0] == whole[1] != shown
    pairs = succeeds(main, "show", dataset.path, "--samples", "pairs", "--length", 32, "--count", 20).stdout
    first_lines = [line for line in pairs.splitlines() if line.startswith("sample ")]
    batch = bertdata.Loader(dataset, length=32, samples="pairs", masking=None).read(np.arange(20))
    assert [line.endswith("another document") for line in first_lines] == batch.next_sentence_label.astype(
        bool
    ).tolist()


def test_damage_is_named_and_no_tokenizer_is_read_but_that_of_the_dataset(dataset, tmp_path):
    shutil.copytree(dataset.path, tmp_path / "shards")
    succeeds(main, "verify", tmp_path / "shards")
    flip(path := next((tmp_path / "shards").glob("train-*.tokens.npy")), 200)
    done = invoke(main, "verify", tmp_path / "shards")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"Error: {path}: ")
    path = tmp_path / "shards" / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    refused(main, "show", tmp_path / "shards", kind="damaged", given=path)
    assert f"engine       not known: {path} " in succeeds(main, "inspect", tmp_path / "shards").stdout
    path.unlink()
    path.symlink_to(dataset.path / "tokenizer.json")
    refused(main, "show", tmp_path / "shards", kind="wrong-file-type", given=path)


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
    refused(main, "inspect", tmp_path / "shards", kind="unfinished")


def test_a_closed_pipe_is_no_traceback(dataset):
    command = [sys.executable, "-m", "bertdata", "show", str(dataset.path), "--count", "150"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert errors == ""


def test_bench_measures_what_it_says(dataset, tmp_path, limit):
    """Only that every figure is there and possible: speed is no matter of tests."""
    limit(bench_s=0.01)
    kinds = {"windows", "documents", "packed", "pairs"}
    no_pairs = bertdata.open(write_dataset(tmp_path / "one", [([7, 8, 3], [3], [1, 3])]))
    for given, length, expected in (
        (dataset, 32, kinds),
        (dataset, 1 << 17, {"windows", "pairs"}),  # too long for an index
        (no_pairs, 32, kinds - {"pairs"}),
    ):
        done = succeeds(main, "bench", given.path, "--length", length, "--rows", 2)
        rates = {name: each for name, *each in map(str.split, done.stdout.splitlines()[2:])}
        assert rates.keys() == expected
        assert all(len(each) == 2 and min(map(int, each)) >= 0 for each in rates.values())


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("bertdata inspect SHARDS --html OUT/page.html", "page.html"),
        ("bertrain plot RUN --out OUT/x.png", "x.png"),
    ],
)
def test_a_full_disk_is_named_with_the_file(dataset, finished, tmp_path, command, path):
    for name, place in (("SHARDS", dataset.path), ("RUN", finished), ("OUT", tmp_path)):
        command = command.replace(name, str(place))
    program, *words = command.split()
    with full_disk(1000):
        done = invoke(GROUPS[program], *words)
    assert done.exit_code == 1
    assert f"Error: {tmp_path / path}: {os.strerror(errno.EFBIG)}" in done.output
    assert not (tmp_path / path).exists()


# ----------------------------------------------------------------------------------------------------------------- demo


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The directory of the installed packages."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    return tmp_path / "packages"


def test_the_demo_goes_the_whole_way_and_uses_again_what_is_there(packages, tmp_path, limit):
    """With two steps of training on a small text."""
    limit(demo_build=("--vocab-size", "150", "--validation", "0.2"), demo_steps=2)
    limit(demo_rows=("--length", "16", "--global-batch-size", "4"))
    limit(demo_training=("--steps", "2", "--save-every", "1", "--model", "bert-tiny"))
    for number, text in enumerate(make_text(60).split("\n\n")):
        write(packages / f"{number}.py", f'''"""{text * 9}"""''')

    def commands(result):
        return [line.split()[1:3] for line in result.stdout.splitlines() if line.startswith("$ ")]

    first = succeeds(demo.main, "--out", tmp_path / "demo")
    steps = [["bertdata", "inspect"], ["bertdata", "verify"], ["bertrain", "pretrain"], ["bertrain", "evaluate"]]
    assert commands(first) == [["bertdata", "build"], *steps]
    shutil.rmtree(packages)
    newest = tmp_path / "demo" / "run" / "step-00000002"
    assert f"done: {newest}" in first.stdout
    assert first.stdout.splitlines()[-1].startswith('python -c "from transformers import AutoModelForMaskedLM')
    assert AutoModelForMaskedLM.from_pretrained(newest).config.vocab_size == 150
    assert commands(succeeds(demo.main, "--out", tmp_path / "demo")) == steps
    next((tmp_path / "demo" / "shards").glob("train-*.tokens.npy")).write_bytes(b"damaged")
    result = invoke(demo.main, "--out", tmp_path / "demo")  # a failed step ends the demo
    assert result.exit_code == 1
    assert ["bertrain", "pretrain"] not in commands(result)


def test_a_directory_that_the_demo_cannot_use_is_one_sentence(tmp_path):
    file = write(tmp_path / "others" / "corpus.txt", "x")  # as the README names it
    for out, kind in ((file, "unwritable"), (file / "below", "unwritable"), (file.parent, "out-exists")):
        refused(demo.main, "--out", out, kind=kind, option="out")
        assert sorted(tmp_path.rglob("*")) == [file.parent, file]


def test_bertdata_becomes_the_process_that_trains(monkeypatch):
    """It does not import bertrain, and nothing of it stays in memory."""
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append((path, words)))
    succeeds(main, "demo", "--out", "x")
    assert started == [(sys.executable, [sys.executable, "-m", "bertrain", "demo", "--out", "x"])]


def test_a_corpus_is_of_docstrings_without_blank_lines_and_without_repetition(packages, tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        words = f"{text} word " * 30
        write(packages / f"{name}.py", f'"""{words}\n\n    more\n    """\n\ndef f():\n    """short"""')
    assert docstrings.write(tmp_path / "all.txt", 10**6)[0] == 2
    documents = (tmp_path / "all.txt").read_text().rstrip("\n").split("\n\n")
    assert sorted(text.split()[0] for text in documents) == ["one", "two"]
    assert all(text.endswith("\nmore") for text in documents)
    assert docstrings.write(tmp_path / "some.txt", 1)[0] == 1
    assert (tmp_path / "some.txt").read_text().rstrip("\n") == documents[0]
    shutil.rmtree(packages)
    with refuses("empty"):
        docstrings.write(tmp_path / "none.txt", 1)
    assert not (tmp_path / "none.txt").exists()
