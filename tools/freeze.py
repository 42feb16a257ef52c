"""Shows that a change of structure changes no result: digests of three builds and the losses of seven short runs.

    python tools/freeze.py --out before.json      on the commit before
    python tools/freeze.py --against before.json  on the commit after: exit code 1 if anything differs, to the bit

Builds give the same bytes on every machine, so tests/golden/frozen.json holds their digests for ever. Losses give the
same bits only on one kind of machine with one version of torch; the tests compare them with a tolerance. Everything
runs in this process on one thread and takes about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

WORDS = [
    "the", "of", "and", "stone", "river", "light", "under", "morning", "bread", "letter", "wind", "house", "salt",
    "Häuser", "naïve", "rivers", "12", "x-ray", "水",
]  # fmt: skip
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
RUN = {"model": "bert-tiny", "optimizer": "adamw", "length": 32, "global-batch-size": 8, "steps": 30, "lr": 3e-3,
       "log-every": 1, "eval-every": 0, "save-every": 15, "keep": 9, "seed": 3}  # fmt: skip
TEACHING = {"alpha": 0.5, "temperature": 2.0}
RUNS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {"model": "modernbert-tiny", "masking": "whole_word", "schedule": "wsd"},
    "mlm+nsp": {"objective": "mlm+nsp", "schedule": "cosine"},
    "isolated": {"model": "modernbert-tiny", "isolate-documents": True, "masking": "span", "micro-batch-size": 3},
    "cached": {"teacher-cache": "answers", **TEACHING},
    "relations": {"model": "modernbert-tiny", "teacher": "bert", "distil": "relations"},
}


def english() -> str:
    """Documents of a few lines with a blank line between, the same on every machine."""
    draw = random.Random(7)
    documents = []
    for number in range(400):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 12))) + "." for _ in range(draw.randint(1, 9))]
        documents.append(f"Document {number}.\n" + "\n".join(lines) + "\n")
    return "\n".join(documents)


def chinese() -> str:
    draw = random.Random(8)
    letters = [chr(0x4E00 + number) for number in range(300)]
    lines = ["".join(draw.choices(letters, k=draw.randint(3, 40))) + "。" for _ in range(600)]
    return "\n\n".join(lines) + "\n"


def two_characters(text: str) -> list[str]:
    """The segmenter of the Chinese build."""
    return [text[at : at + 2] for at in range(0, len(text), 2)]


def byte_level_bpe() -> str:
    """A tokenizer.json with all merges that the words of the English text need, in a fixed order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [list(word) for word, _ in split.pre_tokenize_str(english()[:20_000])]
    vocabulary = ["<|endoftext|>", "[CLS]", "[SEP]", "[MASK]", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    while True:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        vocabulary.append("".join(best))
        for word in words:
            for at in range(len(word) - 2, -1, -1):
                if at + 1 < len(word) and (word[at], word[at + 1]) == best:
                    word[at : at + 2] = ["".join(best)]
    ids = {token: number for number, token in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.BPE(ids, [pair for pair in merges if "".join(pair) in ids]))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(vocabulary[:4])
    return tokenizer.to_str()


def call(module: str, *arguments: str) -> None:
    """Runs a command line in this process and drops what it prints."""
    command = importlib.import_module(module).main
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            command([str(argument) for argument in arguments], standalone_mode=False)
        except SystemExit as error:
            if error.code:
                sys.__stderr__.write(said.getvalue())
                raise


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def builds(folder: Path) -> dict[str, dict[str, str]]:
    """Three datasets in `folder`: wordpiece, bpe and chinese; file name → SHA-256."""
    letters = sorted(set(english() + "abcdefghijklmnopqrstuvwxyz") - set(" \n"))
    vocabulary = [*SPECIALS, *letters, *("##" + letter for letter in letters), *sorted({w.lower() for w in WORDS[:13]})]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    characters = [*SPECIALS, *sorted(set(chinese()) - {"\n"})]
    (folder / "characters.txt").write_text("\n".join(characters) + "\n", encoding="utf-8")
    (folder / "bpe.json").write_text(byte_level_bpe(), encoding="utf-8")
    (folder / "english.txt").write_text(english(), encoding="utf-8")
    (folder / "chinese.txt").write_text(chinese(), encoding="utf-8")
    shared = ["--shard-size", "40000", "--validation", "0.05", "--workers", "1"]
    for name, text, tokenizer, more in (
        ("wordpiece", "english.txt", "vocab.txt", ["--sentences", "line"]),
        ("bpe", "english.txt", "bpe.json", ["--test", "0.05"]),
        ("chinese", "chinese.txt", "characters.txt", ["--words", f"{Path(__file__).stem}:two_characters"]),
    ):
        call("bertdata.cli", "build", folder / text, "--out", folder / name, "--tokenizer", folder / tokenizer, *shared,
             *more)  # fmt: skip
    return {name: digests(folder / name) for name in ("wordpiece", "bpe", "chinese")}


def flags(options: dict[str, Any]) -> list[str]:
    pairs = [[f"--{name}"] if value is True else [f"--{name}", value] for name, value in options.items()]
    return [item for pair in pairs for item in pair]


def train(folder: Path, name: str, out: str, **changes: Any) -> list[list[float | None]]:
    """The losses of one run, a row a step: loss, gradient norm, and those of next sentences and of a teacher."""
    options = RUN | RUNS[name] | changes
    for place in ("teacher-cache", "teacher"):
        if place in options:
            options[place] = folder / options[place]
    call("bertrain.pretrain", "--data", folder / "wordpiece", "--out", folder / out, *flags(options))
    entries = [json.loads(line) for line in (folder / out / "log.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "nsp_loss", "distil_loss")
    return [[entry.get(kind) for kind in names] for entry in entries if "loss" in entry]


def losses(folder: Path) -> dict[str, list[list[float | None]]]:
    """Of six runs, and of one that is stopped after 15 of its steps and goes on. Needs `builds` in `folder`."""
    found = {"bert": train(folder, "bert", "bert")}
    like_student = ["--length", RUN["length"], "--seed", RUN["seed"]]
    call("bertrain.teacher", "--model", folder / "bert", "--data", folder / "wordpiece", "--out", folder / "answers",
         "--top-k", "8", "--max-samples", "400", "--yes", *like_student)  # fmt: skip
    for name in list(RUNS)[1:]:
        found[name] = train(folder, name, name)
    last = folder / "relations" / "step-00000030"
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    found["resumed"] = train(folder, "relations", "relations")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to write the results to.")
    parser.add_argument("--against", help="JSON file of an earlier run to compare with.")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        os.environ["BERTDATA_CACHE"] = f"{name}/cache"
        found = {"builds": builds(Path(name)), "losses": losses(Path(name))}
    found = json.loads(json.dumps(found))
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1) + "\n")
    if given.against:
        before = json.loads(Path(given.against).read_bytes())
        differing = [f"{part}: {key}" for part in found for key in found[part] if found[part][key] != before[part][key]]
        print("\n".join(f"differs: {what}" for what in differing) or "the same to the bit")
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
