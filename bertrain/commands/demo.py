"""All steps on text that every machine has: corpus, shards, two minutes of training, predictions, a checkpoint.

    bertdata demo

Each step is a command, which is printed. Finished steps are not repeated.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
import torch

from bertdata.support import OneSentence, UsageError, make_directory, write_file
from bertdata.support import bertdata_main as bertdata
from bertrain import checkpoint, pretrain
from bertrain.commands import docstrings, evaluate
from bertrain.options import Output

CORPUS_BYTES = 10_000_000
STEPS = 1600
THREADS = 2  # the printed seconds are for this number
BUILD = ("--vocab-size", "2000")
ROWS = ("--length", "64", "--global-batch-size", "32")
TRAIN = ("--recipe", "tiny", "--steps", str(STEPS), "--eval-every", "400", "--save-every", "400")
MARK = ".demo"  # a file that marks the directory of a demo


def make_or_require(out: Path) -> None:
    """Create the directory. Raises UsageError if this fails, or if the directory has files that are not from a demo."""
    try:
        make_directory(out)
        others = sorted(os.listdir(out))
        if not others:
            write_file(out / MARK, b"")
    except OSError as error:
        sentence = f"--out {out} cannot be used ({error.strerror}); give a different directory"
        raise UsageError(sentence, "unwritable", option="out", given=str(out)) from None
    if others and MARK not in others:
        sentence = f"--out {out} has files that do not belong to a demo ({others[0]}); give a new directory"
        raise UsageError(sentence, "out-exists", option="out", given=str(out))


@click.command(cls=OneSentence)
@click.option("--out", default="demo", type=Output(), help="Directory for the text, the shards and the run.")
def main(out: str) -> None:
    """Run all steps once: text, shards, two minutes of training on two CPU cores, predictions.

    The text is the docstrings of the installed Python packages. Finished steps are not repeated, so after Ctrl-C the
    same command continues. Remove the directory to start again.
    """
    make_or_require(Path(out))
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    corpus, shards, run = (str(Path(out) / name) for name in ("corpus.txt", "shards", "run"))
    if not Path(corpus).exists():
        number, size = docstrings.write(Path(corpus), CORPUS_BYTES)
        click.echo(f"{corpus}: {number:,} docstrings of the installed packages, {size / 1e6:.1f} MB")
    if not (Path(shards) / "manifest.json").exists():
        _call("bertdata", bertdata, "build", corpus, "--out", shards, *BUILD)
    _call("bertdata", bertdata, "inspect", shards, *ROWS, "--world-size", "1")
    _call("bertdata", bertdata, "verify", shards)
    _call("bertrain pretrain", pretrain.main, "--data", shards, "--out", run, *ROWS, *TRAIN)
    newest = checkpoint.find(Path(run))
    if newest.name != f"{checkpoint.STEP}{STEPS:08d}":  # a signal ended the training, which has printed a line
        return
    _call("bertrain evaluate", evaluate.main, "--checkpoint", run, "--data", shards, "--show", "4")
    click.echo(f"\nA Hugging Face checkpoint: {newest}")
    code = f"from transformers import AutoModelForMaskedLM; AutoModelForMaskedLM.from_pretrained({str(newest)!r})"
    click.echo(f'python -c "{code}"')


def _call(name: str, command: click.Command, *words: str) -> None:
    """Print a command in the form that a user types, and run it. If it fails, the program ends."""
    click.echo(f"\n$ {name} {shlex.join(words)}")
    command.main(list(words), prog_name=name, standalone_mode=False)


if __name__ == "__main__":
    main()
