"""Inputs → a trained vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bertdata.errors import BuildError, InputError
from bertdata.files import make_directory, write_file
from bertdata.format.manifest import MANIFEST
from bertdata.sources.blocks import read_blocks
from bertdata.sources.documents import TextFormat
from bertdata.sources.find import describe, find_inputs, is_compressed, is_stream
from bertdata.tokenize.load import load
from bertdata.tokenize.tokenizer import TOKENIZER, TOKENIZER_CONFIG, Tokenizer
from bertdata.tokenize.train import train_wordpiece

SAMPLE_BYTES = 100 << 20  # of text, for training a vocabulary


def train_tokenizer(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    vocab_size: int = 30522,
    form: TextFormat | None = None,
) -> Tokenizer:
    """Trains a WordPiece vocabulary on at most 100 MB of the text and writes tokenizer.json and its config to `out`."""
    paths, form, directory = find_inputs(inputs), form or TextFormat(documents="line"), Path(out)
    describe(paths)
    if any((directory / name).exists() for name in (TOKENIZER, MANIFEST)):
        raise BuildError(f"{directory} already holds a tokenizer; give another --out")
    trained = train_wordpiece(_sample(paths, form), vocab_size)
    make_directory(directory)
    for name, content in trained.files.items():
        write_file(directory / name, content)
    return trained


def trained_tokenizer(
    staging: Path, paths: list[Path], form: TextFormat, vocab_size: int, say: Callable[[str], None]
) -> Tokenizer:
    if all((staging / name).exists() for name in (TOKENIZER, TOKENIZER_CONFIG)):
        return load(str(staging))
    sample = _sample(paths, form)
    sampled = sum(len(text) for text in sample)
    say(f"no --tokenizer given: training a lower-casing WordPiece vocabulary on {sampled / 1e6:.1f} MB of the text")
    trained = train_wordpiece(sample, vocab_size)
    got = trained.special.vocab_size
    say(
        f"vocabulary of {got:,} tokens trained"
        + (f"; the text gives no more ({vocab_size:,} asked)" * (got < vocab_size))
    )
    return trained


def _sample(paths: list[Path], form: TextFormat) -> list[str]:
    """The lines of at most 100 MB of text, in evenly spaced blocks of about 1 MiB; of all of it, if it is less.

    Of a pipe, the first 100 MB.
    """
    if any(is_stream(path) for path in paths):  # no more than one pass: the first of it
        size = 0
    elif any(is_compressed(path) or path.suffix in (".parquet", ".arrow", ".feather") for path in paths):
        size = sum(len(block.data) for block in read_blocks(paths, form))
    else:
        size = sum(path.stat().st_size for path in paths)
    stride = max(1, -(-size // SAMPLE_BYTES))
    texts: list[str] = []
    taken = 0
    for number, block in enumerate(read_blocks(paths, form)):
        if number % stride == 0 and taken < SAMPLE_BYTES:
            texts += block.data.decode().split("\n")
            taken += len(block.data)
    if not any(texts):
        raise InputError("no document to build from: there is nothing but blank lines; give a file with text in it")
    return texts
