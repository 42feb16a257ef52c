"""The commands as a user meets them: what they print, how they fail, what they exit with."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import make_text, write_dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import bertdata
from bertdata.cli import main
from bertdata.look import bench
from bertdata.write import build

COMMANDS = (
    "build",
    "import",
    "export",
    "inspect",
    "show",
    "verify",
    "train-tokenizer",
    "bench",
    "push",
    "pull",
    "trace",
    "demo",
)


def invoke(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments, code=1):
    """The one sentence a failing command ends with."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("Error: ")
    return lines[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_option_has_help(command):
    assert invoke(command, "--help").exit_code == 0
    for option in main.commands[command].params:
        if option.param_type_name == "option":
            assert option.help, option.name
    assert main.commands[command].help


def test_the_list_of_commands_fits_a_terminal():
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).stdout
    assert max(map(len, shown.splitlines())) <= 80
    lines = shown.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == sorted(COMMANDS)
    assert not [line for line in lines if line.endswith("...")]


def test_readme_shows_every_command():
    with open(os.path.join(os.path.dirname(__file__), "..", "README.md")) as file:
        readme = file.read()
    for command in COMMANDS:
        assert f"bertdata {command} " in readme


def test_build_tells_what_it_did(tmp_path, corpus, vocab):
    result = invoke("build", corpus, "--out", tmp_path / "shards", "--tokenizer", vocab, "--shard-size", "8KiB")
    assert result.exit_code == 0, result.output
    dataset = bertdata.open(tmp_path / "shards")
    assert f"{dataset.num_documents} documents" in result.stdout
    assert dataset.dataset_id in result.stdout
    assert dataset.manifest.settings["shard_size"] == 8192


def test_without_a_tokenizer_one_is_trained_and_said_so(tmp_path, corpus):
    result = invoke("build", corpus, "--out", tmp_path / "shards", "--vocab-size", 150)
    assert result.exit_code == 0, result.output
    assert "training a lower-casing WordPiece vocabulary" in result.stderr
    assert bertdata.open(tmp_path / "shards").special_tokens.vocab_size == 150
    again = invoke("train-tokenizer", corpus, "--vocab-size", 150, "--out", tmp_path / "tokenizer")
    assert again.exit_code == 0, again.output
    trained, published = (tmp_path / name / "tokenizer.json" for name in ("tokenizer", "shards"))
    assert trained.read_bytes() == published.read_bytes()
    assert "already holds a tokenizer" in refused("train-tokenizer", corpus, "--out", tmp_path / "tokenizer")


def test_invalid_utf8_is_replaced_counted_and_named_or_refused(tmp_path, vocab):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"the stone\n\nriver \xff\xfe and wind\n")
    result = invoke("build", path, "--out", tmp_path / "shards", "--tokenizer", vocab, "--validation", 0)
    assert result.exit_code == 0, result.output
    assert f"2 invalid UTF-8 sequences were replaced by U+FFFD, the first at {path}, byte 17" in result.stderr
    said = refused("build", path, "--out", tmp_path / "strict", "--tokenizer", vocab, "--strict")
    assert f"{path}, byte 17 is not valid UTF-8" in said
    assert not (tmp_path / "strict").exists()


def test_a_split_that_is_empty_is_told(tmp_path, vocab):
    (tmp_path / "one").write_text("the stone")
    result = invoke("build", tmp_path / "one", "--out", tmp_path / "shards", "--tokenizer", vocab)
    assert result.exit_code == 0, result.output
    assert result.stderr == (
        "warning: the validation split is empty: with a share of 0.01 none of the 1 document has fallen into it; build "
        "with a larger --validation, or from more documents (--documents line makes each line one)\n"
    )
    result = invoke("build", tmp_path / "one", "--out", tmp_path / "held", "--tokenizer", vocab, "--validation", 0.999)
    assert "warning: the train split is empty: with a share of 0.001 none" in result.stderr
    assert "build with a smaller --validation" in result.stderr
    result = invoke("build", tmp_path / "one", "--out", tmp_path / "none", "--tokenizer", vocab, "--validation", 0)
    assert result.stderr == ""


def test_training_a_vocabulary_says_what_it_does(tmp_path, corpus):
    result = invoke("train-tokenizer", corpus, "--vocab-size", 150, "--out", tmp_path / "tokenizer")
    assert result.stderr == "training a lower-casing WordPiece vocabulary of 150 tokens on 0.0 MB of text\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"", "empty file"),
        (b" \n\t\r\n\n", "no document"),
        (b"\x01\n\n\x02\n", "2 documents gave no token"),
        (bytes(range(256)) * 40, "is not UTF-8 text"),
        ("directory", "is a directory"),
    ],
)
def test_input_that_cannot_be_used(tmp_path, vocab, content, said):
    path = tmp_path / "corpus.txt"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert said in refused("build", path, "--out", tmp_path / "shards", "--tokenizer", vocab)
    assert not (tmp_path / "shards").exists()


def test_an_output_directory_that_is_in_the_way(tmp_path, corpus, vocab, dataset):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    for out, said in (
        (dataset.path, "already holds a dataset; use --overwrite"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "full", "holds other files"),
    ):
        assert said in refused("build", corpus, "--out", out, "--tokenizer", vocab)
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]
    refusal = refused("train-tokenizer", corpus, "--out", tmp_path / "file")
    assert "is a file; give an empty directory" in refusal
    assert "training" not in refusal  # it is said before the work


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--tokenizer", "./nowhere.json"], 1, "nowhere.json does not exist"),
        (["--shard-size", "many"], 2, "'many' is not a size"),
        (["--validation", "0.7", "--test", "0.3"], 2, "must be shares"),
        (["--workers", "0"], 2, "workers is 0"),
        (["--documents", "page"], 2, "page"),
        (["--max-documents", "0"], 2, "at least 1"),
    ],
)
def test_options_that_make_no_sense(tmp_path, corpus, options, code, said):
    assert said in refused("build", corpus, "--out", tmp_path / "shards", *options, code=code)
    assert not (tmp_path / "shards").exists()


def test_a_path_that_is_no_dataset(tmp_path):
    for command in ("inspect", "show", "verify"):
        assert "does not exist" in refused(command, tmp_path / "nowhere")
        assert "is not a dataset" in refused(command, tmp_path)


def test_inspect_says_the_same_to_people_and_to_scripts(dataset):
    facts = json.loads(invoke("inspect", dataset.path, "--json", "--length", 32, "--global-batch-size", 10).stdout)
    assert list(facts) == [
        "path", "dataset_id", "documents", "sentences", "tokens", "token_dtype", "bytes", "tokenizer", "splits",
        "steps_for", "tokens_per_document", "settings", "counts",
    ]  # fmt: skip
    assert facts["documents"] == len(dataset) == sum(split["documents"] for split in facts["splits"].values())
    assert facts["tokens"] == dataset.num_tokens == sum(split["tokens"] for split in facts["splits"].values())
    lengths = [len(document) for document in dataset]
    spread = facts["tokens_per_document"]
    assert (spread["min"], spread["max"]) == (min(lengths), max(lengths))
    assert sum(bar["documents"] for bar in spread["histogram"]) == len(lengths)
    for bar in spread["histogram"]:
        assert bar["documents"] == sum(bar["from"] <= length <= bar["to"] for length in lengths)
    assert facts["bytes"] == sum(path.stat().st_size for path in dataset.path.glob("*.npy"))
    samples = bertdata.Loader(dataset, length=32).num_samples
    assert facts["splits"]["train"]["samples_per_epoch"] == samples
    assert facts["splits"]["train"]["steps_per_epoch"] == samples / 10
    assert facts["steps_for"]["rows_of_a_rank"] == 10
    shared = invoke("inspect", dataset.path, "--global-batch-size", 10, "--world-size", 4).stdout
    assert "(batch 10: at most 3 on one of 4 ranks)" in shared
    text = invoke("inspect", dataset.path).stdout
    assert f"tokens per document: min {min(lengths):,}, median" in text
    assert f", max {max(lengths):,}\n" in text
    assert dataset.dataset_id in text
    assert f"{dataset.num_tokens:,}" in text
    assert refused("inspect", dataset.path, "--length", 2, code=2)


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
    invoke("build", corpus, "--out", tmp_path / "shards", "--tokenizer", other_tokenizer(tmp_path / "words"))
    about = json.loads(invoke("inspect", tmp_path / "shards", "--json").stdout)["tokenizer"]
    assert (about["name"], about["kind"]) == ("words", "WordLevel, NFC, Lowercase, UnicodeScripts")
    assert about["path"] == str(tmp_path / "shards" / "tokenizer.json")
    assert about["engine"] is None
    text = invoke("inspect", tmp_path / "shards").stdout
    assert "  tokenizer    words: WordLevel, NFC, Lowercase, UnicodeScripts\n" in text
    assert f"  engine       none, because {about['engine_refusal']}; `tokenizers` encodes text\n" in text
    text = invoke("inspect", dataset.path).stdout  # of a vocab.txt, which has no name
    assert "  tokenizer    WordPiece, lower-case\n" in text
    assert "  engine       WordPiece\n" in text


def test_the_name_of_a_tokenizer_is_no_part_of_what_a_dataset_is(tmp_path, corpus):
    directory = other_tokenizer(tmp_path / "words")
    shutil.copytree(directory, tmp_path / "others")
    (tmp_path / "file.json").write_bytes((directory / "tokenizer.json").read_bytes())
    found = {}
    for given in ("words", "others/tokenizer.json", "file.json"):
        out = tmp_path / given.replace("/", "-")[::-1]
        dataset = build([corpus], out, tokenizer=str(tmp_path / given)).dataset
        found[dataset.manifest.tokenizer_name] = dataset.dataset_id
    assert list(found) == ["words", "others", None]
    assert len(set(found.values())) == 1


def test_the_parts_of_a_dataset_keep_the_name_of_their_tokenizer(tmp_path, corpus):
    directory = other_tokenizer(tmp_path / "words")
    for part in ("1/2", "2/2"):
        invoke(
            "build", corpus, "--out", tmp_path / "out", "--tokenizer", directory, "--shard-size", 9000, "--part", part
        )
    assert invoke("build", "--finish", "--out", tmp_path / "out").exit_code == 0
    assert bertdata.open(tmp_path / "out").manifest.tokenizer_name == "words"


def test_inspect_of_a_dataset_without_a_tokenizer_that_can_be_read(tmp_path):
    out = write_dataset(tmp_path / "shards", [([5, 3], [2], None)], tokenizer="{}")
    manifest = bertdata.open(out).manifest
    dataclasses.replace(manifest, counts=dict.fromkeys(("documents", "dropped_documents", "replaced_characters",
        "special_ids_replaced", "text_bytes"), 0) | {"special_literals": {}}).write(out)  # fmt: skip
    done = invoke("inspect", out)
    assert done.exit_code == 0
    assert "  engine       not known, because the tokenizer cannot be read\n" in done.stdout


def test_a_build_without_an_engine_says_why_and_how_fast_it_goes(tmp_path, corpus, vocab):
    directory = other_tokenizer(tmp_path / "words")
    done = invoke("build", corpus, "--out", tmp_path / "small", "--tokenizer", directory)
    (note,) = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert note.startswith(
        "note: there is no engine for this tokenizer, because its pre-tokenizer has a UnicodeScripts"
    )
    assert note.endswith(", so `tokenizers` encodes the text, at 1 to 3 MB/s a thread")
    (tmp_path / "large").write_text(corpus.read_text() * 400)
    done = invoke("build", tmp_path / "large", "--out", tmp_path / "out", "--tokenizer", directory, "--workers", 1)
    assert re.search(r", at about \d+\.\d MB/s a thread: expect \d+ s with 1 thread\n", done.stderr)
    done = invoke("build", corpus, "--out", tmp_path / "words2", "--tokenizer", vocab, "--words", "conftest:in_pairs")
    assert "note: --words needs the places of tokens in the text, so `tokenizers` encodes" in done.stderr
    done = invoke("build", corpus, "--out", tmp_path / "fast", "--tokenizer", vocab, "--sentences", "line")
    assert "note" not in done.stderr


def test_show_prints_samples_as_a_trainer_gets_them(dataset):
    plain = invoke("show", dataset.path, "--sample", 3, "--count", 2, "--length", 24).stdout
    assert plain.count("[CLS]") == 2
    masked = invoke("show", dataset.path, "--masked", "--length", 24, "--sample", 3).stdout.splitlines()
    batch = bertdata.Loader(dataset, length=24).read(np.array([3]))
    selected = [line for line in masked if line.endswith(("masked", "random", "kept"))]
    assert [int(line.split()[0]) for line in selected] == batch.masked_positions[0].tolist()
    whole_words = [
        invoke("show", dataset.path, "--masked", option, "whole_word").stdout for option in ("--masking", "--policy")
    ]
    assert whole_words[0] == whole_words[1] != invoke("show", dataset.path, "--masked").stdout
    assert "--sample is 100000; give a position from 0 to" in refused("show", dataset.path, "--sample", 100_000, code=2)
    assert "no split 'dev'" in refused("show", dataset.path, "--split", "dev", code=2)


def test_verify_names_the_damage(dataset, tmp_path):
    assert "sound" in invoke("verify", dataset.path).stdout
    shutil.copytree(dataset.path, tmp_path / "shards")
    path = next((tmp_path / "shards").glob("train-*.tokens.npy"))
    content = bytearray(path.read_bytes())
    content[200] ^= 4
    path.write_bytes(content)
    said = refused("verify", tmp_path / "shards")
    assert f"{path}: bytes 0 to {len(content):,} are damaged" in said


def start(*arguments):
    """A command that heeds Ctrl-C, also where these tests were started in the background, which ignores it."""
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{begin}; from bertdata.cli import main; main({[str(item) for item in arguments]!r})"
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_interrupted_a_build_says_so_publishes_nothing_and_goes_on(tmp_path, bert):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(make_text(20_000), encoding="utf-8")
    arguments = ["build", corpus, "--out", tmp_path / "shards", "--tokenizer", bert, "--shard-size", "32KiB"]
    with start(*arguments) as process:
        end = time.monotonic() + 100
        while not list(tmp_path.glob("shards/.build/unit-*.json")):
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("interrupted; what is finished is kept")
    assert not (tmp_path / "shards" / "manifest.json").exists()
    assert "unfinished build" in refused("inspect", tmp_path / "shards")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert "continuing: " in result.stderr


def test_a_closed_pipe_is_no_traceback(dataset):
    with start("show", dataset.path, "--count", 150) as process:
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_the_version_is_that_of_the_package():
    assert bertdata.__version__ in invoke("--version").output


@pytest.mark.slow
def test_bench_measures_what_it_says(dataset):
    """Only that every figure is there and possible: speed is no matter of tests."""
    command = [sys.executable, "-m", "bertdata", "bench", str(dataset.path), "--seconds", "0.01", "--processes", "2"]
    done = subprocess.run([*command, "--cold", "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["dataset_id"] == dataset.dataset_id
    assert measured["warm"].keys() == {"windows", "documents", "packed", "pairs"}
    for rates in measured["warm"].values():
        assert rates.keys() == {"exact", "bernoulli", "whole_word", "span"}
        assert min(rates.values()) > 0
    assert min(measured["opening"].values()) > 0
    assert measured["processes"]["number"] == 2
    assert measured["processes"]["pss"] > measured["processes"]["private"] > 0
    assert measured["cold"].keys() == {"blocks", "full"}
    text = bench.text(measured)
    assert "2 processes together" in text
    assert "cold, shuffle blocks" in text


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("inspect SHARDS --html OUT/page.html", "page.html"),
        ("train-tokenizer TEXT --vocab-size 120 --out OUT/vocabulary", "vocabulary/tokenizer.json"),
        ("export SHARDS --format megatron --out OUT/ids", "ids.bin"),
        ("export SHARDS --format parquet --out OUT/ids", "ids/train-00000.parquet"),
        ("build TEXT --vocab-size 120 --out OUT/shards", "shards/.build/tokenizer.json"),
    ],
)
def test_a_full_disk_is_named_with_the_file(dataset, corpus, tmp_path, full_disk, command, path):
    names = {"SHARDS": dataset.path, "TEXT": corpus, "OUT": tmp_path}
    words = [re.sub("SHARDS|TEXT|OUT", lambda found: str(names[found[0]]), word) for word in command.split()]
    with full_disk(1000):
        done = invoke(*words)
    assert done.exit_code == 1
    advice = "make room and run the same command again: what is finished is kept"
    assert f"Error: {tmp_path / path}: File too large; {advice}" in done.output
