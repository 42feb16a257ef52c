"""The commands as a user meets them: what they print, how they fail, what they exit with; and the demo."""

import errno
import functools
import json
import os
import pty
import re
import shlex
import shutil
import stat
import subprocess
import sys
from unittest.mock import patch

import click
import numpy as np
import pytest
from support.commands import invoke, refused, succeeds, waited
from support.data import build, make_text, write_dataset
from support.disk import flip, write
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForMaskedLM

import bertdata
from bertdata import cli
from bertdata.cli import main
from bertdata.format.verify import verify
from bertdata.look import facts
from bertrain.__main__ import COMMANDS as TRAINER
from bertrain.__main__ import main as trainer
from bertrain.commands import demo, docstrings

COMMANDS = sorted(main.commands)
GROUPS = {"bertdata": main, "bertrain": trainer}
EVERY = [*(("bertdata", name) for name in COMMANDS), *(("bertrain", name) for name in TRAINER)]


@pytest.mark.parametrize(("program", "name"), EVERY)
def test_every_command_and_every_option_has_help_and_its_examples_are_command_lines(program, name):
    group = GROUPS[program]
    command, shown = group.get_command(click.Context(group), name), succeeds(group, name, "--help").stdout
    for option in command.params:
        if option.param_type_name == "option" and not option.hidden:
            assert option.help, option.name
            assert re.search(rf"^  (-h, )?{option.opts[0]}\b", shown, re.MULTILINE), option.name
    assert command.help
    heading, *examples = (command.epilog or "Examples:").removeprefix("\b\n").splitlines()
    assert (heading, len(examples)) in (("Example:", 1), ("Examples:", 2)) or name == "demo"
    for example in examples:
        words = shlex.split(example, comments=True)
        assert words[:2] == [program, name]
        assert example.strip() in shown
        command.make_context(name, words[2:])
    listed = [option for options in getattr(command, "headings", {}).values() for option in options]
    assert len(listed) == len(set(listed))
    assert {*listed} <= {option.name for option in command.params}


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


def test_a_required_option_that_is_missing_is_named():
    for words, name in (("build t", "out"), ("import t", "out"), ("import t --out t", "tokenizer")):
        refused(main, *words.split(), kind="missing", option=name)


def test_an_output_that_cannot_be_made_is_named(corpus):
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
        ("bertrain pretrain --dataset", "--data"),
        ("bertrain pretrain --warmup-step", "--warmup-steps"),
        ("bertrain pretrain --warmup_steps", "--warmup-steps"),
        ("bertrain pretrain --no-gradient-checkpoint", "--no-gradient-checkpointing"),
        ("bertrain doctor --leanring-rate", "--lr"),
        ("bertrain finetune --learning-rate", "--lr"),
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
    facts = inspected(dataset.path, "--length", 32, "--global-batch-size", 10)
    names = "path dataset_id documents sentences tokens token_dtype bytes tokenizer splits steps_for"
    assert list(facts) == [*names.split(), "tokens_per_document", "settings", "counts"]
    assert facts["documents"] == len(dataset) == sum(split["documents"] for split in facts["splits"].values())
    assert facts["tokens"] == dataset.num_tokens == sum(split["tokens"] for split in facts["splits"].values())
    lengths = sorted(len(document) for document in dataset)
    spread = facts["tokens_per_document"]
    shares = {"min": 0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1}
    assert [spread[name] for name in shares] == [lengths[int(at * (len(lengths) - 1))] for at in shares.values()]
    assert spread["mean"] == round(sum(lengths) / len(lengths), 2)
    assert sum(bar["documents"] for bar in spread["histogram"]) == len(lengths)
    for bar in spread["histogram"]:
        assert bar["documents"] == sum(bar["from"] <= length <= bar["to"] for length in lengths)
    assert facts["bytes"] == sum(path.stat().st_size for path in dataset.path.glob("*.npy"))
    samples = bertdata.Loader(dataset, length=32).num_samples
    assert facts["splits"]["train"]["samples_per_epoch"] == samples
    assert facts["splits"]["train"]["steps_per_epoch"] == samples / 10
    assert facts["steps_for"]["rows_of_a_rank"] == 10
    arguments = [dataset.path, "--global-batch-size", 10, "--world-size", 4]
    assert inspected(*arguments)["steps_for"]["rows_of_a_rank"] == 3
    assert inspected(dataset.path, "--samples", "documents")["steps_for"]["samples"] == "documents"
    text = succeeds(main, "inspect", *arguments).stdout
    assert f"min {min(lengths):,}, median" in text
    assert f", max {max(lengths):,}\n" in text
    for number in (dataset.dataset_id, f"{dataset.num_tokens:,}", " 3 "):
        assert number in text


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
    command = ["build", corpus, "--out", out, "--tokenizer", vocab]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    for arguments in (command, ["inspect", out], ["verify", out]):
        done = subprocess.run(
            [sys.executable, "-m", "bertdata", *map(str, arguments)], env=environment, capture_output=True
        )
        assert (done.returncode, b"sh\xff" in done.stdout) == (0, True), done.stderr


def test_a_page_goes_into_a_pipe_that_stays(dataset, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with patch.object(facts, "report", lambda *given, **options: "<html>"):
        succeeds(main, "inspect", dataset.path, "--html", tmp_path / "pipe")
    assert os.read(reading, 99) == b"<html>"
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    os.close(reading)


def test_the_name_of_a_tokenizer_is_kept_and_no_part_of_what_a_dataset_is(tmp_path, corpus):
    directory = other_tokenizer(tmp_path / "words")
    shutil.copytree(directory, tmp_path / "others")
    (tmp_path / "file.json").write_bytes((directory / "tokenizer.json").read_bytes())
    ids = {}
    for name in ("words", "others/tokenizer.json", "file.json"):
        out = tmp_path / name.replace("/", "-")[::-1]
        dataset = build([corpus], out, tokenizer=str(tmp_path / name)).dataset
        ids[dataset.manifest.tokenizer_name] = dataset.dataset_id
    assert list(ids) == ["words", "others", None]
    assert len(set(ids.values())) == 1
    out = ["--out", tmp_path / "out"]
    for part in ("1/2", "2/2"):
        built(corpus, *out, "--tokenizer", directory, "--shard-size", 9000, "--part", part)
    built("--finish", *out)
    assert bertdata.open(tmp_path / "out").manifest.tokenizer_name == "words"


@pytest.mark.parametrize("added", [None, [], [(7000, "<new>")], [(1, "<new>")], [(7000, "")]], ids=str)
def test_a_dataset_has_the_ids_that_the_library_gives_added_tokens(tmp_path, corpus, added):
    """A file may have none, or others: tokenizers then counts them on, or takes those of its vocabulary."""
    directory = other_tokenizer(tmp_path / "words")
    content = json.loads((directory / "tokenizer.json").read_bytes())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    there = content.pop("added_tokens")
    if added is not None:
        others = [token | {"id": number, "content": text} for number, text in added]
        content["added_tokens"] = [*there, *others] if added else []
    path = write(tmp_path / "changed.json", json.dumps(content))
    dataset = build([corpus], tmp_path / "out", tokenizer=str(path)).dataset
    assert verify(dataset.path) == []
    library = Tokenizer.from_file(str(path))
    stored = Tokenizer.from_file(str(dataset.path / "tokenizer.json"))
    assert stored.get_vocab() == library.get_vocab()
    assert dataset.special_tokens.vocab_size == max(library.get_vocab().values()) + 1


@pytest.mark.parametrize("name", TRAINER)
def test_a_url_is_no_output_of_the_trainer(name):
    command = trainer.get_command(click.Context(trainer), name)
    options = {option for parameter in command.params for option in parameter.opts}
    if "--out" in options:
        needed = {"finetune": "--checkpoint x --train x --dev x", "augment": "--checkpoint x --train x"}
        needed |= {"suite": "glue --data x --checkpoint x", "teacher": "--data x --model x"}
        needed["search"] = "--checkpoint x --data x --latency 5ms"
        more = needed.get(name, "--data x" if "--data" in options else "").split()
        refused(trainer, name, *more, "--out", "s3://bucket/run", kind="bad-url", option="out")


def test_a_build_without_an_engine_says_why(tmp_path, corpus, vocab):
    other, in_pairs = other_tokenizer(tmp_path / "words"), ["--words", "support.data:in_pairs"]
    for tokenizer, reason, *options in ((other, "UnicodeScripts"), (vocab, "--words", *in_pairs), (vocab, "")):
        result = built(corpus, "--out", tmp_path / "out", "--overwrite", "--tokenizer", tokenizer, *options)
        notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
        assert len(notes) == bool(reason)
        assert all(reason in note for note in notes)


def test_a_pipe_before_a_file_is_built_without_an_engine(tmp_path, corpus, vocab):
    options = ("--out", tmp_path / "out", "--tokenizer", vocab, "--words", "support.data:in_pairs", "--workers", 1)
    result = built("-", corpus, *options, input=corpus.read_bytes() * 4)
    assert "so `tokenizers` encodes the text, at 1 to 3 MB/s a core" in result.stderr
    # the pipe has the corpus four times, of whose last documents and first ones nothing but a line end is between
    assert bertdata.open(tmp_path / "out").num_documents == 5 * 120 - 3
    names = [shard.name for shard in bertdata.open(tmp_path / "out").splits["train"]]
    assert names == ["train-00000", "train-1048576"]


def test_show_says_what_the_mask_did_and_what_follows(dataset):
    shown = succeeds(main, "show", dataset.path, "--masked", "--length", 24, "--count", 60).stdout
    selected = [line.split() for line in shown.splitlines() if line.endswith(("masked", "random", "kept"))]
    said = [line[-1] for line in selected]
    loader = bertdata.Loader(dataset, length=24)
    batch = loader.read(np.arange(60))
    chosen = batch.labels >= 0
    assert [int(line[0]) for line in selected] == np.nonzero(chosen)[1].tolist()
    seen, hidden = batch.input_ids[chosen], batch.labels[chosen]
    is_mask = seen == dataset.special_tokens.mask
    assert said == np.where(is_mask, "masked", np.where(seen == hidden, "kept", "random")).tolist()
    assert {*said} == {"masked", "random", "kept"}
    pairs = succeeds(main, "show", dataset.path, "--samples", "pairs", "--length", 32, "--count", 20).stdout
    first_lines = [line for line in pairs.splitlines() if line.startswith("sample ")]
    batch = bertdata.Loader(dataset, length=32, samples="pairs", masking=None).read(np.arange(20))
    is_random = batch.next_sentence_label.astype(bool).tolist()
    assert [line.endswith("another document") for line in first_lines] == is_random


def test_show_prints_samples_as_a_trainer_gets_them(dataset):
    plain = succeeds(main, "show", dataset.path, "--sample", 3, "--count", 2, "--length", 24).stdout
    assert plain.count("[CLS]") == 2
    show = ["show", dataset.path, "--masked"]
    words, words_too = (succeeds(main, *show, name, "whole_word").stdout for name in ("--masking", "--policy"))
    assert words == words_too != succeeds(main, *show).stdout


def test_show_reads_no_tokenizer_but_that_of_the_dataset(dataset, tmp_path):
    shutil.copytree(dataset.path, tmp_path / "shards")
    path = tmp_path / "shards" / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    refused(main, "show", tmp_path / "shards", kind="damaged", given=path)
    assert f"engine       not known: {path} " in succeeds(main, "inspect", tmp_path / "shards").stdout
    path.unlink()
    path.symlink_to(dataset.path / "tokenizer.json")
    refused(main, "show", tmp_path / "shards", kind="wrong-file-type", given=path)


def test_verify_names_the_damage(dataset, tmp_path):
    succeeds(main, "verify", dataset.path)
    shutil.copytree(dataset.path, tmp_path / "shards")
    path = next((tmp_path / "shards").glob("train-*.tokens.npy"))
    flip(path, 200)
    result = invoke(main, "verify", tmp_path / "shards")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {path}: ")
    assert result.stderr.count("\n") == 1


SLOWLY = "import time\ndef slowly(text):\n    time.sleep(0.02)\n    return text\n"


def read_terminal(descriptor):
    """All that a terminal gets, until its programs have ended."""
    shown = b""
    while True:
        try:
            piece = os.read(descriptor, 4096)
        except OSError as error:  # Linux says so of a terminal that nobody has open
            assert error.errno == errno.EIO  # noqa: PT017
            piece = b""
        if not piece:
            return shown.decode()
        shown += piece


def test_ctrl_c_at_a_terminal_says_what_is_kept_and_the_same_command_continues(tmp_path, vocab):
    """The last line is ours alone: the terminal shows ^C, and there is a progress bar."""
    (tmp_path / "slow.py").write_text(SLOWLY)
    (tmp_path / "corpus.txt").write_text(make_text(100), encoding="utf-8")
    arguments = ["build", "corpus.txt", "--out", "shards", "--tokenizer", vocab, "--shard-size", "3000"]
    arguments += ["--map", "slow:slowly", "--workers", "1"]
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.chdir(tmp_path)
            path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "bertdata", *arguments]
            os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
        finally:
            os._exit(1)
    waited(lambda: list(tmp_path.glob("shards/.build/unit-*.json")))
    os.write(terminal, b"\x03")  # Ctrl-C
    shown = read_terminal(terminal)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130, shown
    assert "Traceback" not in shown
    units = [json.loads(path.read_bytes()) for path in tmp_path.glob("shards/.build/unit-*.json")]
    last = shown.rstrip("\r\n").rpartition("\n")[2]
    assert "^C" not in last
    assert "\r" not in last
    assert f" {len(units)} " in last
    assert not (tmp_path / "shards" / "manifest.json").exists()
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
        ("bertrain plot RUN --html OUT/x.html", "x.html"),
        ("bertrain plot RUN --out OUT/x.png", "x.png"),
    ],
)
def test_a_full_disk_is_named_with_the_file(dataset, finished, tmp_path, full_disk, command, path):
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
def quick(corpus, monkeypatch):
    """The demo with two steps of training on a small text. Gives how often the text was made."""
    sizes = []

    def write(path, num_bytes):
        sizes.append(num_bytes)
        path.write_bytes(corpus.read_bytes())
        return 1, path.stat().st_size

    monkeypatch.setattr(docstrings, "write", write)
    monkeypatch.setattr(demo, "BUILD", ("--vocab-size", "150", "--validation", "0.2"))
    monkeypatch.setattr(demo, "ROWS", ("--length", "16", "--global-batch-size", "4"))
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "TRAIN", ("--steps", "2", "--save-every", "1", "--model", "bert-tiny"))
    return sizes


def commands(result):
    return [line.split()[1:3] for line in result.stdout.splitlines() if line.startswith("$ ")]


def test_the_demo_goes_the_whole_way_and_uses_again_what_is_there(quick, tmp_path):
    first = succeeds(demo.main, "--out", tmp_path / "demo")
    steps = [["bertdata", "inspect"], ["bertdata", "verify"], ["bertrain", "pretrain"], ["bertrain", "evaluate"]]
    assert commands(first) == [["bertdata", "build"], *steps]
    newest = tmp_path / "demo" / "run" / "step-00000002"
    assert f"done: {newest}" in first.stdout
    assert first.stdout.splitlines()[-1].startswith('python -c "from transformers import AutoModelForMaskedLM')
    model = AutoModelForMaskedLM.from_pretrained(newest)
    assert model.config.vocab_size == bertdata.open(tmp_path / "demo" / "shards").special_tokens.vocab_size == 150
    assert commands(succeeds(demo.main, "--out", tmp_path / "demo")) == steps
    assert quick == [demo.CORPUS_BYTES]
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
    succeeds(cli.main, "demo", "--out", "x")
    assert started == [(sys.executable, [sys.executable, "-m", "bertrain", "demo", "--out", "x"])]


def test_a_corpus_is_of_docstrings_without_blank_lines_and_without_repetition(tmp_path, monkeypatch):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        words = f"{text} word " * 30
        (tmp_path / f"{name}.py").write_text(f'"""{words}\n\n    more\n    """\n\ndef f():\n    """short"""\n')
    monkeypatch.setattr(docstrings, "sources", lambda: sorted(tmp_path.glob("*.py")))
    assert docstrings.write(tmp_path / "all.txt", 10**6)[0] == 2
    documents = (tmp_path / "all.txt").read_text().rstrip("\n").split("\n\n")
    assert sorted(text.split()[0] for text in documents) == ["one", "two"]
    assert all(text.endswith("\nmore") for text in documents)
    assert docstrings.write(tmp_path / "some.txt", 1)[0] == 1
    assert (tmp_path / "some.txt").read_text().rstrip("\n") == documents[0]
    monkeypatch.setattr(docstrings, "sources", list)
    with pytest.raises(bertdata.BertdataError):
        docstrings.write(tmp_path / "none.txt", 1)
    assert not (tmp_path / "none.txt").exists()
