"""The trials of tools/capabilities.py: for each line of docs/howto/migrate.md a function, in the order of the table.

A trial runs the commands that the line names on a small text and tiny models, and asserts what they promise. Its
directory has links to the files of freeze.py and to INPUTS.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import freeze

import bertdata

ROOT = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("fork")
LIMIT_S = 120  # of a trial; one that takes longer has failed
TINY = {
    "--data": "shards",
    "--model": "tiny.json",
    "--length": "32",
    "--global-batch-size": "8",
    "--steps": "4",
    "--log-every": "1",
    "--eval-every": "0",
    "--seed": "3",
}
"""Options of every pre-training that does not give them itself."""
SIZES = {
    "model_type": "bert",
    "vocab_size": 104,
    "max_position_embeddings": 80,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
INPUTS = {
    "shards": "bertdata build english.txt --out shards --tokenizer vocab.txt --sentences line --validation 0.1 "
    "--shard-size 40000",
    "run": "bertrain pretrain --out run",
    "big": "bertrain pretrain --out big --model big.json",
}
"""What trials read, beside the files of freeze.py: a dataset, a run, and a teacher of four layers."""
Trial = Callable[[], None]
TRIALS: dict[int, Trial] = {}


def trial(number: int) -> Callable[[Trial], Trial]:
    """The function is the trial of this line of the table."""

    def keep(function: Trial) -> Trial:
        TRIALS[number] = function
        return function

    return keep


# ------------------------------------------------------------------------------------------------------ what trials use


def called(line: str) -> tuple[int, str]:
    """Runs a command line in this process, as a user would; returns its exit code and what it printed."""
    program, *words = shlex.split(line)
    command = importlib.import_module("bertdata.cli" if program == "bertdata" else "bertrain.__main__").main
    ended: Any = 0
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            command(words, prog_name=program)
        except SystemExit as end:
            ended = end.code or 0
    return (1, said.getvalue() + ended) if isinstance(ended, str) else (ended, said.getvalue())


def run(line: str, code: int = 0) -> str:
    """What a command line prints. It must end with the exit code."""
    ended, said = called(line)
    assert ended == code, f"{line} ends with {ended}: {said[-400:]}"
    return said


def answer(line: str) -> dict[str, Any]:
    """The JSON object that a command prints: all of it, or its last line."""
    text = run(f"{line} --json")
    return json.loads(text if text.startswith("{\n") else text.splitlines()[-1])


def pretraining(options: str) -> str:
    """The command line of a run with TINY options."""
    given = set(shlex.split(options)) | ({"--model"} if "--init" in options else set())
    return " ".join(["bertrain pretrain", options, *(f"{k} {v}" for k, v in TINY.items() if k not in given)])


def pretrain(options: str, code: int = 0) -> str:
    return run(pretraining(options), code)


def child(line: str, environment: dict[str, str] | None = None) -> Any:
    """A fork of this process in which a command line runs; its exit code is that of the command."""

    def target() -> None:
        os.environ.update(environment or {})
        sys.exit(called(line)[0])

    process = FORKS.Process(target=target)
    process.start()
    return process


def ranks(number: int, line: str) -> list[int]:
    """Runs a command line in so many processes, as torchrun does; returns how they end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    each = [child(line, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(number)]
    for process in each:
        process.join()
    return [process.exitcode for process in each]


def log(out: str) -> list[dict[str, Any]]:
    """The entries of a run's log about steps."""
    entries = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "lr" in entry]


def streams(out: str) -> list[dict[str, Any]]:
    """What a run's log says about the rows that it read, for each phase."""
    entries = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    return [entry["stream"] for entry in entries if "stream" in entry]


def losses(out: str) -> list[float]:
    return [entry["loss"] for entry in log(out)]


def are_near(one: list[float], two: list[float], apart: float = 1e-5) -> bool:
    return len(one) == len(two) and all(abs(a - b) <= apart * abs(a) for a, b in zip(one, two, strict=True))


def newest(out: str) -> Path:
    """The newest checkpoint of a run."""
    return max(Path(out).glob("step-*"))


def weights(path: str | Path) -> dict[str, Any]:
    """The tensors of a checkpoint by name."""
    from safetensors.torch import load_file

    return load_file(Path(path) / "model.safetensors")


def config(path: str | Path) -> dict[str, Any]:
    return json.loads((Path(path) / "config.json").read_bytes())


def ids(shards: str) -> list[list[int]]:
    """The ids of each document of a dataset."""
    return [document.tolist() for document in bertdata.open(shards)]


def same_files(one: str | Path, two: str | Path, pattern: str = "*") -> bool:
    """Whether two directories have the same files, byte by byte, and at least one."""
    both = [
        {path.name: path.read_bytes() for path in Path(place).glob(pattern) if path.is_file()} for place in (one, two)
    ]
    return both[0] == both[1] != {}


def loader(shards: str = "shards", **options: Any) -> bertdata.Loader:
    """Reads the dataset in batches of 64 rows of 32 tokens, if the options do not say otherwise."""
    return bertdata.Loader(bertdata.open(shards), **{"length": 32, "global_batch_size": 64} | options)


def masked(rows: int = 640, shards: str = "shards", length: int = 32, **masking: Any) -> tuple[Any, bertdata.Batch]:
    """The ids of rows before they are masked, and the same rows masked."""
    rules = None, bertdata.Masking(**masking)
    options = {"global_batch_size": rows, "length": length, "samples": "documents"}
    plain, batch = (next(loader(shards, masking=rule, **options)) for rule in rules)
    return plain.input_ids, batch


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def labelled(out: str, options: str = "", checkpoint: str = "run") -> dict[str, Any]:
    """The result of fine-tuning on the sentences of freeze.py, whose label is whether a word is there."""
    task = "--train train.tsv --dev dev.tsv --epochs 1 --batch-size 8 --length 32"
    return answer(f"bertrain finetune --checkpoint {checkpoint} --out {out} {task} --seeds 1 {options}")


def make_inputs(folder: Path) -> None:
    """Text, vocabularies, a dataset and two runs, in the present folder."""
    freeze.write_inputs(folder)
    write("tiny.json", json.dumps(SIZES))
    write("big.json", json.dumps(SIZES | {"num_hidden_layers": 4, "hidden_size": 48}))
    for line in INPUTS.values():
        program, _, options = line.partition(" pretrain ")
        run(pretraining(options) if options else program)


# -------------------------------------------------------------------------------------------------------- building data


@trial(1)
def sentences_and_documents() -> None:
    run("bertdata build english.txt --out new --tokenizer vocab.txt --sentences line")
    facts = answer("bertdata inspect new")
    lines = [line for line in freeze.english().splitlines() if line.strip()]
    assert (facts["documents"], facts["sentences"]) == (len(freeze.documents()), len(lines))
    write("rows.jsonl", json.dumps({"text": "The river.\n\nThe stone."}) + "\n")
    run("bertdata build rows.jsonl --out row --tokenizer vocab.txt --sentences line --validation 0")
    assert len(ids("row")) == 1


@trial(2)
def an_example_a_line() -> None:
    run(
        "bertdata build english.txt --out new --tokenizer vocab.txt --documents line --max-documents 100 --validation 0"
    )
    write("lines.txt", "\n\n".join(line for line in freeze.english().splitlines() if line) + "\n")
    run("bertdata build lines.txt --out blank --tokenizer vocab.txt --validation 0")
    assert ids("new") == ids("blank")[:100]


@trial(3)
def rows_of_tables() -> None:
    for kind in ("jsonl", "parquet", "arrow"):
        said = run(f"bertdata build english.{kind} --out {kind} --tokenizer vocab.txt --text-key body --on-error skip")
        skipped = answer(f"bertdata inspect {kind}")["counts"]["skipped_rows"]
        assert skipped == (2 if kind == "jsonl" else 0)
        assert ("line 401" in said) == (kind == "jsonl")
    assert ids("jsonl") == ids("parquet") == ids("arrow")
    run("bertdata build english.jsonl --out failed --tokenizer vocab.txt --text-key body", code=1)


@trial(4)
def files_of_tokens() -> None:
    write("train_doc_tokens.json", json.dumps({"tokens": ["the", "stone"]}) + "\n")
    run("bertdata build train_doc_tokens.json --format jsonl --out new --tokenizer vocab.txt", code=1)
    run("bertdata export shards --out ids")
    run("bertdata import ids --out imported --tokenizer vocab.txt --validation 0")
    assert ids("imported") == ids("shards")[: len(ids("imported"))] != []


def die_once(text: str) -> str:
    """Kills the build at a document, the first time."""
    if text.startswith("Document 300.") and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return text


@trial(5)
def a_part_of_a_stream() -> None:
    text = "\n".join(freeze.documents()[:150]).encode()[:60_000]  # what a pipe holds
    reads, writes = os.pipe()
    os.write(writes, text)
    os.close(writes)
    sys.stdin = os.fdopen(reads)
    run("bertdata build - --out piped --tokenizer vocab.txt --max-documents 100 --validation 0")
    run("bertdata build english.txt --out filed --tokenizer vocab.txt --max-documents 100 --validation 0")
    assert len(ids("piped")) == 100
    assert same_files("piped", "filed", "*.npy")
    line = "bertdata build english.txt --tokenizer vocab.txt --shard-size 20000 --workers 1 --map trials:die_once"
    process = child(f"{line} --out killed")
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert re.search("keeping [1-9] finished units", run(f"{line} --out killed"))
    run(f"{line} --out whole")
    assert same_files("killed", "whole", "*.npy")


@trial(6)
def cleaning() -> None:
    kept = freeze.chinese().split("\n\n")[:50]
    full_width, control = "水" * 20 + "１２", "火" * 20 + "\x07\x1f  木"
    texts = [*kept, full_width, control, kept[0], "木" * 3, "The stone of the river.", "土" * 600]
    write("zh.txt", "\n\n".join(texts) + "\n")
    rules = ("clean", "nfkc", "'length(4, 512)'", "'cjk(0.5)'")
    maps = " ".join(f"--map bertdata.prepare:{rule}" for rule in rules)
    line = "bertdata build zh.txt --tokenizer letters.txt --validation 0"
    letters = [*freeze.SPECIALS, *sorted(set("".join(kept)) | set("水火木土12"))]
    write("letters.txt", "\n".join(letters) + "\n")
    run(f"{line} --out new {maps} --dedup")
    counts = answer("bertdata inspect new")["counts"]
    assert (counts["removed_documents"], counts["duplicate_documents"]) == (3, 1)
    assert len(ids("new")) == 52
    plain = [*(text for text in texts[:50]), "水" * 20 + "12", "火" * 20 + " 木"]
    write("plain.txt", "\n\n".join(plain) + "\n")
    run(f"{line.replace('zh', 'plain')} --out plain")
    assert sorted(ids("new")) == sorted(ids("plain"))


@trial(7)
def tokenizers() -> None:
    from tokenizers import Tokenizer

    run("bertdata train-tokenizer english.txt --out trained --type wordpiece --vocab-size 120")
    assert Tokenizer.from_file("trained/tokenizer.json").get_vocab_size() == 120
    english, chinese = freeze.documents(), freeze.chinese().split("\n\n")
    for name, text in (
        ("vocab.txt", english),
        ("bpe.json", english),
        ("trained", english),
        ("characters.txt", chinese),
    ):
        write("new.txt", "\n\n".join(part.strip() for part in text[:40]) + "\n")
        run(f"bertdata build new.txt --out {name}-shards --tokenizer {name} --validation 0")
        reference = Tokenizer.from_file(f"{name}-shards/tokenizer.json")
        expected = [reference.encode(part.strip(), add_special_tokens=False).ids for part in text[:40]]
        assert ids(f"{name}-shards") == expected


@trial(8)
def the_wrong_tokenizer() -> None:
    write("other.txt", "\n".join([*freeze.SPECIALS, *reversed(vocabulary()[5:])]) + "\n")
    run("bertdata build english.txt --out other --tokenizer other.txt --validation 0.1")
    assert same_files("shards", newest("run"), "tokenizer.json")
    line = "--data other --out new --length 32"
    run("bertrain evaluate --checkpoint run --data other", code=2)
    run(f"bertrain teacher --model run {line} --max-samples 8", code=2)
    run(f"bertrain search --checkpoint run {line} --latency 5ms", code=2)
    for option in ("--init run", "--teacher big", "--teacher big --distil logits"):
        assert "tokenizer" in pretrain(f"{line} {option}", code=2)


@trial(9)
def several_files() -> None:
    run("bertdata build english.txt --out new --tokenizer vocab.txt --shard-size 20000 --validation 0")
    dataset = bertdata.open("new")
    number = len(dataset.splits["train"])
    assert number == 5
    assert all(dataset.tokens("train", shard).size for shard in range(number))
    run("bertdata build english.txt --out one --tokenizer vocab.txt --validation 0")
    assert ids("new") == ids("one")
    steps = [len(list(loader("new", epochs=1, rank=rank, world_size=3))) for rank in range(3)]
    assert len(set(steps)) == 1


@trial(10)
def rows_inside_a_document() -> None:
    special = bertdata.open("shards").special_tokens
    documents = bertdata.open("shards").splits["train"].num_documents
    known = {tuple(document) for document in ids("shards")[:documents] if len(document) <= 62}
    found: dict[str, list[tuple[int, ...]]] = {"documents": [], "packed": []}
    for samples, pieces in found.items():
        for batch in loader(samples=samples, length=64, epochs=1, masking=None):
            flat, ends = batch.input_ids.flatten(), batch.cu_seqlens
            for begin, end in itertools.pairwise(ends.tolist()):
                piece = [token for token in flat[begin:end].tolist() if token != special.pad]
                if piece:
                    assert (piece[0], piece[-1], piece.count(special.sep)) == (special.cls, special.sep, 1)
                    pieces.append(tuple(piece[1:-1]))
        assert known <= set(pieces)
    packed, alone = loader(samples="packed", length=64), loader(samples="documents", length=64)
    assert packed.num_samples < alone.num_samples


@trial(11)
def paths_are_arguments() -> None:
    shutil.copytree("shards", "read-only")
    for path in [*Path("read-only").rglob("*"), Path("read-only")]:
        path.chmod(path.stat().st_mode & ~0o222)
    before = {path: path.stat().st_mtime_ns for path in Path("read-only").rglob("*")}
    os.environ["BERTDATA_CACHE"] = str(Path("indexes").absolute())
    assert next(loader("read-only", samples="pairs")).input_ids.any()
    assert list(Path("indexes").rglob("*.npy"))
    assert {path: path.stat().st_mtime_ns for path in Path("read-only").rglob("*")} == before


@trial(12)
def looking_and_checking() -> None:
    assert "400" in run("bertdata inspect shards")
    run("bertdata inspect shards --html page.html")
    assert "<html" in Path("page.html").read_text()
    assert "[MASK]" in run("bertdata show shards --masked --length 64")
    run("bertdata verify shards")
    shutil.copytree("shards", "damaged")
    file = Path("damaged/train-00000.tokens.npy")
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    assert file.name in run("bertdata verify damaged", code=1)


@trial(13)
def how_much_is_written() -> None:
    said = run("bertrain teacher --model big --data shards --out logits --top-k 8 --length 32 --max-samples 64")
    written = sum(path.stat().st_size for path in Path("logits").rglob("*.npy"))
    assert f"{written:,} bytes" in said
    many = "--max-samples 100000000 --unit-samples 100000"
    assert "--yes" in run(f"bertrain teacher --model big --data shards --out more --length 32 {many}", code=2)
    assert not list(Path("more").rglob("*.npy"))
    dataset = bertdata.open("shards")
    stored = sum(path.stat().st_size - 128 for path in Path("shards").glob("*.tokens.npy"))
    assert stored == 2 * dataset.num_tokens


# ---------------------------------------------------------------------------------------------------------------- masks


@trial(14)
def of_the_masked() -> None:
    def shares(**masking: float) -> list[float]:
        rows, batch = masked(probability=0.5, **masking)
        chosen, mask = batch.labels != bertdata.IGNORE_INDEX, bertdata.open("shards").special_tokens.mask
        inputs, before = batch.input_ids[chosen], rows[chosen]
        return [float((inputs == mask).mean()), float(((inputs != mask) & (inputs != before)).mean())]

    assert are_near([0.8, 0.1], shares(), 0.1)
    assert are_near([0.2, 0.5], shares(mask_fraction=0.2, random_fraction=0.5), 0.1)
    pretrain("--out new --mask-fraction 0.2 --random-fraction 0.5")
    (stream,) = streams("new")
    assert (stream["masking"]["mask_fraction"], stream["masking"]["random_fraction"]) == (0.2, 0.5)


@trial(15)
def how_many_are_masked() -> None:
    def counts(**masking: Any) -> list[tuple[int, int]]:
        """Of rows the filled places, and how many are masked."""
        rows, batch = masked(length=128, **masking)
        both = ((rows != 0).sum(1), (batch.targets != bertdata.IGNORE_INDEX).sum(1))
        return [
            (filled, number)
            for filled, number in zip(*(each.tolist() for each in both), strict=True)
            if filled > 9  # a shorter row may have too few candidates
        ]

    assert all(number == math.floor(0.15 * filled + 0.5) for filled, number in counts())
    assert all(number == math.floor(0.15 * filled) for filled, number in counts(rounding="floor"))
    assert all(number == round(0.15 * filled) for filled, number in counts(rounding="even"))
    assert all(
        number == min(max(round(0.15 * filled), 6), 9) for filled, number in counts(min_targets=6, max_targets=9)
    )
    by_chance = counts(policy="bernoulli")
    assert len(set(by_chance)) > len(set(counts()))
    for masking in ("exact", "bernoulli"):
        pretrain(f"--out {masking} --mlm-probability 0.3 --masking {masking}")
        rule = streams(masking)[0]["masking"]
        assert (rule["policy"], rule["probability"]) == (masking, 0.3)


@trial(16)
def special_tokens_stay() -> None:
    write("new.txt", freeze.english().replace("river", "☃"))  # which is [UNK]
    run("bertdata build new.txt --out new --tokenizer vocab.txt --validation 0")
    rows, batch = masked(shards="new", probability=1.0)
    special = bertdata.open("new").special_tokens
    never = {*special.special_ids, special.unk}
    assert never - {special.mask} <= set(rows.flatten().tolist())
    assert not never & set(batch.targets.flatten().tolist())
    assert len(set(batch.targets.flatten().tolist())) > 50


@trial(17)
def where_random_tokens_come_from() -> None:
    special = bertdata.open("shards").special_tokens
    for pool in ("ordinary", "vocabulary"):
        _, batch = masked(probability=0.5, mask_fraction=0.0, random_fraction=1.0, random_from=pool)
        drawn = set(batch.input_ids[batch.labels != bertdata.IGNORE_INDEX].tolist())
        assert bool(drawn & set(special.special_ids)) == (pool == "vocabulary")


@trial(18)
def whole_words() -> None:
    tokens = vocabulary()
    rows, batch = masked(policy="whole_word", length=128)
    chosen = batch.labels != bertdata.IGNORE_INDEX
    inside = [
        (row, place)
        for row, place in zip(*(rows > 4).nonzero(), strict=True)
        if tokens[rows[row, place]].startswith("##") and rows[row, place - 1] > 4
    ]
    assert inside
    assert all(chosen[row, place] == chosen[row, place - 1] for row, place in inside)
    run("bertdata build chinese.txt --out new --tokenizer characters.txt --words freeze:two_characters --validation 0")
    rows, batch = masked(400, "new", policy="whole_word", length=64)
    chosen = batch.labels != bertdata.IGNORE_INDEX
    pairs = (rows[:, 1:-1:2] > 4) & (rows[:, 2::2] > 4)
    assert (chosen[:, 1:-1:2] == chosen[:, 2::2])[pairs].all()
    assert chosen[:, 1:-1:2][pairs].any()
    pretrain("--out run-of-words --masking whole_word --data new --length 64")


def vocabulary() -> list[str]:
    return Path("vocab.txt").read_text(encoding="utf-8").splitlines()


@trial(19)
def spans() -> None:
    def neighbours(policy: str) -> float:
        """The share of masked places with a masked place behind them."""
        chosen = masked(policy=policy, length=128)[1].labels != bertdata.IGNORE_INDEX
        return float((chosen[:, :-1] & chosen[:, 1:]).sum() / chosen.sum())

    assert neighbours("span") > 0.5 > 0.3 > neighbours("exact")
    pretrain("--out new --masking span")
    assert streams("new")[0]["masking"]["policy"] == "span"


@trial(20)
def new_masks_in_each_epoch() -> None:
    import numpy

    def epochs(**options: Any) -> list[dict[int, list[int]]]:
        """Of two epochs, the masked places of each sample."""
        reader = loader(**options)
        found: list[dict[int, list[int]]] = [{}, {}]
        for position in range(2 * reader.num_samples):
            batch = reader.read(numpy.array([position]))
            found[position // reader.num_samples][int(batch.sample_ids[0])] = batch.masked_positions[0].tolist()
        return found

    first, second = epochs(samples="documents", length=128)
    assert first.keys() == second.keys()
    assert sum(first[sample] != second[sample] for sample in first) > 0.9 * len(first)
    first, second = epochs(samples="documents", length=128, variants=1)
    assert first == second


@trial(21)
def a_share_that_changes() -> None:
    pretrain("--out new --config masks.toml --steps 4")
    assert [stream["masking"]["probability"] for stream in streams("new")] == [0.3, 0.15]


@trial(22)
def labels() -> None:
    rows, batch = masked()
    chosen = batch.labels != -100
    assert (batch.labels[chosen] == rows[chosen]).all()
    assert (batch.input_ids[~chosen] == rows[~chosen]).all()
    for row in range(len(rows)):
        places = batch.masked_positions[row][batch.targets[row] != -100]
        assert places.tolist() == chosen[row].nonzero()[0].tolist()


@trial(23)
def structures_beside_ids() -> None:
    sys.path.append(str(ROOT / "examples"))
    importlib.import_module("structured_embeddings")
    tokens = Path("vocab.txt").read_text(encoding="utf-8").split()[5:]
    Path("names.tsv").write_text("".join(f"{token}\t{token[-1]}\n" for token in tokens), encoding="utf-8")
    pretrain("--out new --structures names.tsv --eval-every 4")
    pretrain("--out without")
    assert losses("new")[0] == losses("without")[0]
    assert losses("new")[2:] != losses("without")[2:]
    assert weights(newest("new")).keys() == weights(newest("without")).keys()
    # A checkpoint knows ids alone, and loses the same.
    of_run = [json.loads(line) for line in Path("new/log.jsonl").read_text().splitlines()][-1]["validation_loss"]
    assert are_near([of_run], [answer("bertrain evaluate --checkpoint new --data shards")["loss"]])


# ---------------------------------------------------------------------------------------------------- pairs and batches


@trial(24)
def next_sentences() -> None:
    pretrain("--out new --objective mlm+nsp --length 64")
    assert all(0 < entry["nsp_loss"] < 2 and 0 <= entry["nsp_accuracy"] <= 1 for entry in log("new"))
    share = answer("bertdata inspect shards --samples pairs --length 64")["splits"]["train"]["random_share"]
    reader = loader(samples="pairs", length=64, epochs=1)
    random = [label for batch in reader for label in batch.next_sentence_label.tolist()]
    assert abs(sum(random) / len(random) - share) < 0.05
    run("bertdata build english.txt --out none --tokenizer vocab.txt")
    pretrain("--out refused --data none --objective mlm+nsp", code=2)


@trial(25)
def rows_of_one_segment() -> None:
    pretrain("--out new")
    assert json.loads(Path("new/run.json").read_bytes())["config"]["objective"] == "mlm"
    assert streams("new")[0]["samples"] == "windows"
    assert next(loader()).token_type_ids is None


@trial(26)
def shorter_pairs() -> None:
    def filled(share: float) -> float:
        """The mean length of the rows of an epoch."""
        batches = [*loader(samples="pairs", length=128, short_seq_prob=share, masking=None, epochs=1)]
        return sum((batch.input_ids != 0).sum() for batch in batches) / sum(len(batch.input_ids) for batch in batches)

    assert filled(1.0) < filled(0.1) < filled(0.0)
    pretrain("--out new --objective mlm+nsp")
    assert streams("new")[0]["short_seq_prob"] == 0.1


@trial(27)
def padding() -> None:
    assert all(batch.attention_mask is None for batch in itertools.islice(loader(), 12))
    shares = {
        samples: answer(f"bertdata inspect shards --samples {samples} --length 128")["splits"]["train"]["pad_share"]
        for samples in ("documents", "packed")
    }
    assert shares["packed"] < 0.1 < shares["documents"]
    pretrain("--out new --isolate-documents --length 64")
    assert streams("new")[0]["samples"] == "packed"


@trial(28)
def toy_data() -> None:
    sys.path.append(str(ROOT / "examples"))
    one_million = importlib.import_module("one_million")
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        words = ["--out", "million", "--documents", "300", "--steps", "4", "--max-samples", "64"]
        one_million.main(words, standalone_mode=False)
    parameters = int(said.getvalue().partition(" parameters")[0].replace(",", ""))
    assert 0.9e6 < parameters < 1.2e6
    rows = [line.split(" | ") for line in said.getvalue().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(one_million.WAYS)
    assert all(float(loss) > float(floor) > 0 for _, loss, floor, *_ in rows)


@trial(29)
def splits() -> None:
    write("twice.txt", freeze.english() + "\n" + freeze.english())
    run("bertdata build twice.txt --out new --tokenizer vocab.txt --validation 0.05 --test 0.05")
    sizes = {name: split["documents"] for name, split in answer("bertdata inspect new")["splits"].items()}
    assert sum(sizes.values()) == 800
    assert all(20 <= sizes[name] <= 70 for name in ("validation", "test"))
    documents, at = ids("new"), 0
    parts = []
    for name in sizes:
        parts.append({tuple(document) for document in documents[at : at + sizes[name]]})
        at += sizes[name]
    assert sum(map(len, parts)) == len(set.union(*parts))


# -------------------------------------------------------------------------------------------------------------- reading


@trial(30)
def ranks_read_different_rows() -> None:
    assert ranks(2, pretraining("--out two --global-batch-size 7")) == [0, 0]
    pretrain("--out one --global-batch-size 7")
    assert are_near(losses("one"), losses("two"), 1e-4)
    each = [[batch.sample_ids.tolist() for batch in loader(rank=rank, world_size=3, epochs=1)] for rank in range(3)]
    assert len({len(steps) for steps in each}) == 1
    read = sorted(sample for steps in each for step in steps for sample in step)
    assert read == list(range(loader().num_samples))


@trial(31)
def random_order() -> None:
    for shuffle in ("full", "blocks"):
        reader = loader(shuffle=shuffle, epochs=2)
        read = [sample for batch in reader for sample in batch.sample_ids.tolist()]
        first, second = read[: reader.num_samples], read[reader.num_samples :]
        assert sorted(first) == sorted(second) == list(range(reader.num_samples))
        assert first != second
        assert first != sorted(first)
        pretrain(f"--out {shuffle} --shuffle {shuffle}")
        assert streams(shuffle)[0]["shuffle"] == shuffle


@trial(32)
def pickling() -> None:
    reader = loader()
    assert len(pickle.dumps(reader)) < 4096
    expected = next(loader()).input_ids.tolist()
    for kind in ("fork", "spawn"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(kind)) as pool:
            assert pool.submit(next, reader).result().input_ids.tolist() == expected


@trial(33)
def memory_does_not_grow() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    reader = loader()
    sizes = []
    for _ in range(3):
        for _ in range(300):
            next(reader)
        sizes.append(resident())
    assert sizes[2] - sizes[1] < 1 << 20


@trial(34)
def speed() -> None:
    measured = answer("bertdata bench shards")["tokens_per_s"]
    assert {"windows", "documents", "packed", "pairs"} <= measured.keys()
    assert all(rate > 0 for rates in measured.values() for rate in rates.values())


@trial(35)
def going_on_inside_an_epoch() -> None:
    reader = loader()
    begin = reader.state_dict()
    expected = [next(reader).input_ids.tolist() for _ in range(4)][2:]
    reader = loader()
    next(reader), next(reader)
    state = json.loads(json.dumps(reader.state_dict()))
    assert {name: value for name, value in state.items() if begin[name] != value} == {"position": 128}
    for number in (1, 3):
        parts = [loader(rank=rank, world_size=number) for rank in range(number)]
        for part in parts:
            part.load_state_dict(state)
        assert [[row for part in parts for row in next(part).input_ids.tolist()] for _ in range(2)] == expected


@trial(36)
def bad_rows() -> None:
    line = "bertdata build english.jsonl --tokenizer vocab.txt --text-key body"
    said = run(f"{line} --out skipped --on-error skip")
    assert "2 rows" in said
    assert "english.jsonl, line 401" in said
    assert "line 401" in run(f"{line} --out failed", code=1)
    shutil.copytree("shards", "damaged")
    for file in Path("damaged").glob("*.tokens.npy"):
        content = file.read_bytes()
        file.write_bytes(content[:128] + b"\xff" * (len(content) - 128))
    pretrain("--out new --data damaged", code=1)
    assert 0 not in ranks(2, pretraining("--out new --data damaged"))


# ------------------------------------------------------------------------------------------- models and what they learn


@trial(37)
def models() -> None:
    for name, options in (
        ("BertForPreTraining", "--model bert-tiny --objective mlm+nsp"),
        ("BertForMaskedLM", "--model bert-tiny"),
        ("DistilBertForMaskedLM", "--model distilbert.json"),
    ):
        pretrain(f"--out {name} --steps 2 {options}")
        assert config(newest(name))["architectures"] == [name]
        assert math.isfinite(losses(name)[-1])
    assert config(newest("BertForMaskedLM"))["hidden_size"] == 128


@trial(38)
def given_weights() -> None:
    from safetensors.torch import save_file

    shutil.copytree(newest("run"), "given", ignore=shutil.ignore_patterns("checkpoint.json"))
    tensors = weights("given")
    lost = "cls.predictions.transform.dense.weight"
    save_file(
        {name: tensors[name] for name in tensors if name != lost} | {"more.weight": tensors[lost]},
        "given/model.safetensors",
        metadata={"format": "pt"},
    )
    said = pretrain("--out new --init given --lr 1e-12 --weight-decay 0")
    assert lost in said
    assert "more.weight" in said
    after = weights(newest("new"))
    assert all((after[name] - tensors[name]).abs().max() < 1e-9 for name in tensors if name != lost)


@trial(39)
def freezing_and_stages() -> None:
    before = weights(newest("run"))
    pretrain("--out frozen --init run --lr-scale embeddings=0")
    write("stages.toml", "[[phase]]\nshare = 0.5\ntrains = 'layer.1|cls'\n[[phase]]\n")
    pretrain("--out stages --init run --config stages.toml --save-every 2 --keep 9")
    for path, moves in (
        (newest("frozen"), lambda name: "embeddings" not in name),
        (Path("stages/step-00000002"), lambda name: "layer.1" in name or "cls" in name),
        (newest("stages"), lambda name: True),
    ):
        after = weights(path)
        changed = {name for name in before if (before[name] != after[name]).any() and "decoder" not in name}
        assert changed
        assert all(moves(name) for name in changed)
        assert any("layer.1" in name for name in changed)
    assert any("embeddings" in name for name in changed)


@trial(40)
def layers_of_a_teacher() -> None:
    seen = []
    for name, options in (
        ("uniform", "--distil hidden --distil-layers uniform"),
        ("last", "--distil hidden --distil-layers last"),
        ("relations", "--distil relations"),
    ):
        pretrain(f"--out {name} --teacher big {options} --steps 8 --lr 3e-3")
        distil = [entry["distil_loss"] for entry in log(name)]
        assert distil[-1] < distil[0]
        seen.append(distil[0])
    assert len(set(seen)) == 3


@trial(41)
def predictions_of_a_teacher() -> None:
    def first(name: str, options: str) -> dict[str, float]:
        pretrain(f"--out {name} --steps 1 {options}")
        return log(name)[0]

    # A model that is its own teacher learns from the text alone, which has the weight 1 − alpha.
    text = first("text", "--init run")["grad_norm"]
    own = [first(f"own-{alpha}", f"--init run --teacher run --distil logits --alpha {alpha}") for alpha in (0.25, 1)]
    assert are_near([0.75 * text], [own[0]["grad_norm"]], 1e-3)
    assert own[1]["grad_norm"] < 1e-3 * text
    cold, hot = (
        first(f"at-{temperature}", f"--teacher big --distil logits --alpha 1 --temperature {temperature}")
        for temperature in (1, 2)
    )
    assert cold["distil_loss"] != hot["distil_loss"] > 0
    assert cold["grad_norm"] > 1e-3 * text
    labelled("tuned", checkpoint="big")
    with_teacher = labelled("distilled", "--teacher tuned/seed-0 --lr 1e-2")
    without = labelled("alone", "--lr 1e-2")
    assert with_teacher.keys() - without.keys() == {"teacher"}
    assert any((tensor != weights("alone/seed-0")[name]).any() for name, tensor in weights("distilled/seed-0").items())


@trial(42)
def predictions_on_disk() -> None:
    line = "--model big --data shards --length 32 --seed 3 --max-samples 32"
    run(f"bertrain teacher {line} --out logits --top-k 104")
    run("bertrain teacher --verify logits")
    pretrain("--out cached --teacher-cache logits")
    pretrain("--out live --teacher big --distil logits")
    assert are_near(*([entry["distil_loss"] for entry in log(name)] for name in ("live", "cached")), 1e-2)
    run(f"bertrain teacher {line} --out few --top-k 8")
    pretrain("--out other --teacher-cache few --mlm-probability 0.3", code=2)


ELASTIC = "--elastic layers=1:2,width=16:32:16,heads=1:2,feed_forward=24:48:24"


@trial(43)
def sub_networks() -> None:
    said = pretrain(f"--out new {ELASTIC} --sub-networks 2 --steps 8 --lr 3e-3")
    assert "number 12" in said
    assert "in_a_step 2" in said
    assert losses("new")[-1] < losses("new")[0]
    pretrain(f"--out one {ELASTIC} --sub-networks 1 --steps 8 --lr 3e-3")
    assert losses("one") != losses("new")


@trial(44)
def one_taken_out() -> None:
    pretrain(f"--out elastic {ELASTIC}")
    run("bertrain extract --checkpoint elastic --layers 1 --width 16 --heads 1 --out small")
    sizes = config("small")
    assert (sizes["num_hidden_layers"], sizes["hidden_size"], sizes["intermediate_size"]) == (1, 16, 48)
    alone = answer("bertrain evaluate --checkpoint small --data shards --length 32")
    assert math.isfinite(alone["loss"])
    line = "bertrain search --checkpoint elastic --data shards --trials 4 --max-samples 16"
    found = answer(f"{line} --latency 200ms --out search")
    assert found["best"]["latency_ms"] <= 200
    assert found["best"]["loss"] == min(one["loss"] for one in found["trials"])
    measured = [json.loads(row) for row in Path("search/trials.jsonl").read_text().splitlines()]
    assert all(row["latency_ms"] > 0 for row in measured[-4:])
    assert "--latency" in run(f"{line} --latency 0.001ms --out none", code=2)


@trial(45)
def adding_layers() -> None:
    for way in ("stack", "fresh"):
        pretrain(f"--out {way} --config trunk.toml --grow-by {way} --steps 8 --save-every 2 --keep 9")
        before, after = weights(Path(way, "step-00000002")), weights(newest(way))
        assert config(newest(way))["num_hidden_layers"] == 2
        assert not any("layer.1" in name for name in before)
        assert any("layer.1" in name for name in after)
        assert all((before[name] == after[name]).all() for name in before if "layer.0" in name)
    assert losses("stack")[:2] == losses("fresh")[:2]
    assert losses("stack")[2] != losses("fresh")[2]


@trial(46)
def adapters() -> None:
    said = pretrain("--out new --init run --lora r=8,alpha=16 --lr 3e-2")
    before, after = weights(newest("run")), weights(newest("new"))
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert re.search("an adapter of [0-9,]+ parameters is trained; [0-9,]+ are frozen", said)
    assert changed
    assert not any("embeddings" in name or "LayerNorm" in name for name in changed)
    assert all(before[name].ndim == 2 for name in changed)
    pretrain("--out refused --lora r=8,alpha=16", code=2)
    assert "dev_accuracy" in labelled("tuned", "--lora r=8,alpha=16")
    is_missing = importlib.util.find_spec("bitsandbytes") is None
    said = pretrain("--out four --init run --lora r=8,alpha=16,bits=4", code=2 if is_missing else 0)
    assert not is_missing or "bitsandbytes" in said


# ------------------------------------------------------------------------------------------------------------- the loop


@trial(47)
def optimizers() -> None:
    import torch

    table = importlib.import_module("bertrain.optim").OPTIMIZERS
    table["own"] = lambda module, config: torch.optim.NAdam(module.parameters(), lr=0.0)
    last = set()
    for name, lr in {"adamw": 1e-2, "muon": 3e-3, "stableadamw": 1e-2, "lamb": 1e-2, "own": 1e-2}.items():
        pretrain(f"--out {name} --optimizer {name} --steps 12 --lr {lr} --schedule constant")
        assert sum(losses(name)[-3:]) < 3 * losses(name)[0]
        last.add(losses(name)[-1])
    assert len(last) == 5
    assert "adamw" in pretrain("--out refused --optimizer bertadam", code=2)


@trial(48)
def learning_rates() -> None:
    def rates(schedule: str) -> list[float]:
        pretrain(f"--out {schedule} --steps 20 --lr 0.01 --warmup 0.2 --schedule {schedule}")
        return [entry["lr"] / 0.01 for entry in log(schedule)]

    after = {}
    for schedule in ("linear", "constant", "cosine", "1-sqrt", "wsd"):
        rate = rates(schedule)
        assert are_near(rate[:5], [0.2, 0.4, 0.6, 0.8, 1.0])
        after[schedule] = rate[4:]
    falls = {name: [one - two for one, two in itertools.pairwise(rate)] for name, rate in after.items()}
    assert are_near(falls["linear"], [1 / 16] * 15)
    assert falls["constant"] == [0] * 15
    assert falls["cosine"].index(max(falls["cosine"])) in (7, 8)
    assert falls["1-sqrt"] == sorted(falls["1-sqrt"], reverse=True)
    assert set(after["wsd"][:12]) == {1}
    assert min(falls["wsd"][12:]) > 0


@trial(49)
def precision_and_accumulation() -> None:
    pretrain("--out whole --seed 1")
    said = pretrain("--out parts --seed 1 --micro-batch-size 3")
    assert "3 passes" in said
    assert are_near(losses("whole"), losses("parts"))
    pretrain("--out half --seed 1 --precision bf16 --micro-batch-size 4")
    assert losses("half") != losses("whole")
    assert are_near(losses("whole"), losses("half"), 2e-2)
    pretrain("--out clipped --seed 1 --clip-norm 0.001")
    assert log("clipped")[0]["grad_norm"] == log("whole")[0]["grad_norm"] > 0.001
    assert losses("clipped")[1:] != losses("whole")[1:]


@trial(50)
def one_process_or_many() -> None:
    pretrain("--out one")
    words = shlex.split(pretraining("--out two"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    subprocess.run([*command, *words], check=True, capture_output=True, timeout=LIMIT_S)
    assert are_near(losses("one"), losses("two"), 1e-4)


@trial(51)
def checkpoints() -> None:
    line = "--steps 8 --save-every 2 --keep 3 --resume auto"
    pretrain(f"--out whole {line}")
    assert sorted(path.name[-1] for path in Path("whole").glob("step-*")) == ["4", "6", "8"]
    shutil.copytree("whole", "killed")
    for step in (6, 8):
        shutil.rmtree(f"killed/step-0000000{step}")
    assert "4" in pretrain(f"--out killed {line}")
    assert same_files(newest("whole"), newest("killed"), "*.safetensors")
    assert same_files(newest("whole"), newest("killed"), "*.pt")
    assert losses("whole") == losses("killed")
    pretrain("--out whole --steps 9 --resume no", code=2)


@trial(52)
def logs() -> None:
    pretrain("--out new --log-to tensorboard")
    assert list(Path("new/tensorboard").rglob("events.*"))
    assert len(log("new")) == 4
    run("bertrain plot new --out curves.png")
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    run("bertrain plot new --html run.html")
    assert "<html" in Path("run.html").read_text()
    for name in ("wandb", "trackio"):
        if importlib.util.find_spec(name) is None:
            assert name in pretrain(f"--out refused --log-to {name}", code=2)


@trial(53)
def predictions() -> None:
    said = pretrain("--out new --eval-every 2")
    assert said.count("Target") == 2
    assert ">[MASK]<" in said
    shown = run("bertrain evaluate --checkpoint new --data shards --show 4")
    assert "sample 4 of 4" in shown
    assert "most probable predictions" in shown


@trial(54)
def measures() -> None:
    first, second = (answer("bertrain evaluate --checkpoint run --data shards") for _ in range(2))
    assert first == second
    assert are_near([math.exp(first["loss"])], [first["mlm_ppl"]])
    assert 0 <= first["accuracy"] <= 1
    other = answer("bertrain evaluate --checkpoint big --data shards")
    assert (other["targets"], other["samples"]) == (first["targets"], first["samples"])
    pretrain("--out pairs --objective mlm+nsp")
    assert all("nsp_accuracy" in entry for entry in log("pairs"))


@trial(55)
def learning_by_heart() -> None:
    assert is_test("test_grammar.py::test_training_comes_close_to_the_best_loss_there_is")
    write("one.txt", "the stone of the river and the light of the morning under the house\n")
    run("bertdata build one.txt --out one --tokenizer vocab.txt --validation 0")
    pretrain("--out new --data one --steps 120 --lr 1e-2 --length 16 --isolate-documents")
    assert losses("new")[0] > 4
    assert max(losses("new")[-5:]) < 0.1


def is_test(name: str) -> bool:
    """Whether tests/ has a test: file.py::function."""
    file, _, function = name.partition("::")
    return f"\ndef {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@trial(56)
def tasks() -> None:
    good, bad = ["the river light", "light and stone"], ["river the salt", "salt under wind"]
    for split in ("train", "dev"):
        write(f"glue/CoLA/{split}.tsv", "".join(f"x\t{int(text in good)}\t\t{text}\n" for text in good + bad))
        rows = [{"id": i, "abst": "river light", "keyword": ["salt", "水"], "label": str(i % 2)} for i in range(4)]
        write(f"clue/csl_public/{split}.json", "".join(json.dumps(row) + "\n" for row in rows))
    line = "--checkpoint run --seeds 1 --epochs 1 --length 32"
    assert "dev_mcc" in answer(f"bertrain suite glue --data glue --out glue-tuned {line}")["tasks"]["cola"]
    assert "dev_accuracy" in answer(f"bertrain suite clue --data clue --out clue-tuned {line}")["tasks"]["csl"]
    tuned = labelled("tuned", "--seeds 5")
    assert set(tuned["dev_accuracy"]) == {"median", "min", "max"}
    assert len(list(Path("tuned").glob("seed-*"))) == 5
    asked = {"id": "0", "question": "the house", "answers": [{"text": "river", "answer_start": 4}]}
    write("squad.json", json.dumps({"data": [{"paragraphs": [{"context": "the river light", "qas": [asked]}]}]}))
    files = "--task qa --train squad.json --dev squad.json"
    assert {"dev_f1", "dev_exact_match"} <= answer(f"bertrain finetune {line} {files} --out squad-tuned").keys()


@trial(57)
def more_rows() -> None:
    words = ["rivers", "zebra", "naïve", "light"]  # rivers has several tokens, and zebra is nearest
    write("glove.txt", "".join(f"{word} {angle} 1\n" for word, angle in zip(words, (1, 1.1, -3, -4), strict=True)))
    line = "bertrain augment --checkpoint big --train train.tsv --copies 3 --candidates 1"
    run(f"{line} --out augmented.tsv --vectors glove.txt")
    run(f"{line} --out without.tsv")
    rows = [line.split("\t") for line in Path("train.tsv").read_text(encoding="utf-8").splitlines()]
    more = [line.split("\t") for line in Path("augmented.tsv").read_text(encoding="utf-8").splitlines()]
    assert len(rows) < len(more) <= 4 * len(rows)
    at = 0
    for text, label in more:
        if at < len(rows) and [text, label] == rows[at]:
            at += 1
        else:
            assert label == rows[at - 1][1]
            before = rows[at - 1][0].split()
            assert len(text.split()) == len(before)
            assert all(old == "rivers" for old, new in zip(before, text.split(), strict=True) if new == "zebra")
    assert at == len(rows)
    assert any("zebra" in text for text, _ in more)
    assert "zebra" not in Path("without.tsv").read_text(encoding="utf-8")


@trial(58)
def learning_rates_by_name() -> None:
    def moved(out: str) -> float:
        name = "bert.embeddings.word_embeddings.weight"
        return float((weights(newest(out))[name] - weights(newest("run"))[name]).norm())

    pretrain("--out all --init run")
    said = pretrain("--out scaled --init run --lr-scale embeddings=0.1")
    assert re.search(r"embeddings=0.1: \d+ tensors", said)
    assert 0 < moved("scaled") < 0.2 * moved("all")


@trial(59)
def models_for_transformers() -> None:
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    path = str(newest("run"))
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    given = tokenizer("the [MASK] of the river", return_tensors="pt")
    with torch.no_grad():
        logits = model(**given).logits
    assert logits.shape[-1] == 104
    assert tokenizer.mask_token_id in given["input_ids"][0].tolist()
    run("bertdata export shards --out ids")
    run("bertdata import ids --out imported --tokenizer vocab.txt --validation 0")
    train = bertdata.open("shards").splits["train"].num_documents
    assert ids("imported") == ids("shards")[:train]


@trial(60)
def checking_the_setup() -> None:
    checks = {"phase", "shards", "samples", "batch", "model", "devices", "memory", "disk", "run", "time"}
    said = run("bertrain doctor --data shards --out new --nproc 2 --model tiny.json --length 32")
    assert checks <= set(said.split())
    assert "FAIL" not in said
    shutil.copytree("shards", "damaged")
    Path("damaged/train-00000.tokens.npy").write_bytes(b"")
    assert "FAIL  shards" in run("bertrain doctor --data damaged --out new --model tiny.json --length 32", code=1)
