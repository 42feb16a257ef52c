"""Inputs → a trained vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import cast

from bertdata.errors import BuildError, InputError, UsageError, require
from bertdata.files import Stage, make_directory
from bertdata.format.manifest import MANIFEST
from bertdata.options import TextFormat, Vocabulary
from bertdata.sources.inputs import Input, find_inputs
from bertdata.sources.plan import find_blocks, split
from bertdata.tokenize.fixed import FIXED
from bertdata.tokenize.load import FILES, load
from bertdata.tokenize.texts import Tokenizer
from bertdata.tokenize.tokenizer import ROW_ROLES, TOKENIZER, TOKENIZER_CONFIG, LoadedTokenizer
from bertdata.tokenize.train import TRAINERS
from bertdata.types import Progress
from bertdata.urls import require_local_output
from bertdata.write.staging import file_digests

SAMPLE_BYTES = 100 << 20  # bytes of text to train a vocabulary on
_STRETCH_BYTES = 1 << 20  # bytes of text in a stretch of the sample
Say = Callable[[str], None]
"""Called with one line of progress."""


@dataclass(frozen=True)
class TokenizerChoice:
    """The tokenizer of a build: a named one, a fixed one, or one to train on the text."""

    given: str | Vocabulary
    special_tokens: bool = False  # whether to add special tokens that the named one lacks
    roles: str = ""  # "mask=TOKEN,cls=TOKEN": tokens of the named one

    @cached_property
    def loaded(self) -> LoadedTokenizer | None:
        """The tokenizer, or None if it is still to be trained."""
        if isinstance(self.given, Vocabulary):
            require(not self.roles, "roles", self.roles, "a tokenizer that has these tokens, too", "needs-option")
            return FIXED[self.given.kind]() if self.given.kind in FIXED else None
        tokenizer = load(self.given)
        if self.roles:
            tokenizer = _with_roles(tokenizer, self.roles)
        return tokenizer.with_special_tokens() if self.special_tokens else tokenizer

    @property
    def described(self) -> str:
        """The description of the tokenizer in the plan of a build."""
        if self.loaded:
            return f"SHA-256 {file_digests(self.loaded)[TOKENIZER][:16]}"
        new = cast(Vocabulary, self.given)
        return f"trained, {new.size} tokens" + (new.kind != "wordpiece") * f", {new.kind}" + new.cased * ", cased"

    def make(self, staging: Path, files: list[Input], form: TextFormat, say: Say) -> LoadedTokenizer:
        """Return the loaded tokenizer, or the one of an earlier, interrupted run, or train one now."""
        if self.loaded:
            return self.loaded
        if all((staging / name).exists() for name in (TOKENIZER, TOKENIZER_CONFIG)):
            return load(str(staging))
        return _trained(cast(Vocabulary, self.given), _sample(files, form), say)


def _with_roles(tokenizer: LoadedTokenizer, given: str) -> LoadedTokenizer:
    """Return a tokenizer whose own tokens have roles of ROW_ROLES. given: "mask=TOKEN,cls=TOKEN"."""
    pairs = [(role, token) for role, _, token in (part.partition("=") for part in given.split(","))]
    roles, vocabulary = dict(pairs), tokenizer.source.vocabulary(with_added=True)
    expected = f"one of {', '.join(ROW_ROLES)}, = and a token of the tokenizer, more after commas, each role once"
    for role, token in pairs:
        is_known = role in ROW_ROLES and token in vocabulary and roles[role] == token
        require(is_known, "roles", f"{role}={token}", expected, "unknown")
    changed = tokenizer.with_roles(roles)
    special = changed.special
    is_apart = special.mask is None or special.mask not in (special.cls, special.sep, special.pad)
    require(is_apart, "roles", given, "a token to mask that is not that of cls, sep or pad", "conflict")
    if words := [token for token in roles.values() if vocabulary[token] not in tokenizer.source.added]:
        changed.notes.append(f"warning: text may have {', '.join(words)}, which --roles makes special; give others")
    if "pad" in roles and special.pad in (special.eos, special.sep):
        changed.notes.append(
            f"warning: the padding token {roles['pad']} also has another role; transformers does not train the vector "
            "of a padding token, and may take it for padding at the end of a text; give another token to pad"
        )
    return changed


def _trained(vocabulary: Vocabulary, sample: list[str], say: Say) -> LoadedTokenizer:
    """Train a tokenizer on texts."""
    name = {"wordpiece": "WordPiece", "bpe": "byte-level BPE", "unigram": "unigram"}[vocabulary.kind]
    kind = f"{'cased' if vocabulary.cased else 'lower-casing'} {name}"
    megabytes = sum(map(len, sample)) / 1e6
    say(f"training a {kind} vocabulary of {vocabulary.size:,} tokens on {megabytes:.1f} MB of the text")
    trained = TRAINERS[vocabulary.kind](sample, vocabulary.size, cased=vocabulary.cased)
    num_tokens = trained.special.vocab_size
    is_smaller = num_tokens < vocabulary.size and not trained.notes
    has_less = f"; the text gives no more, of the {vocabulary.size:,} requested" * is_smaller
    say(f"trained a vocabulary of {num_tokens:,} tokens{has_less}")
    return trained


def train_tokenizer(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    vocabulary: Vocabulary | None = None,
    *,
    text: TextFormat | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> Tokenizer:
    """Train a tokenizer on at most 100 MiB of the text, and write tokenizer.json and its config to `out`.

    inputs: as in `build`, but no iterable; [] for a vocabulary that is the same for every text. text: by default every
    line is a document; sentences, words, dedup and shard_size have no effect. say, progress: as in
    `build`. The same inputs give the same tokenizer, with any number of threads. Raises UsageError, InputError or
    BuildError.
    """
    require_local_output(str(out))
    vocabulary, form = vocabulary or Vocabulary(), text or TextFormat(documents="line")
    names, directory = [inputs] if isinstance(inputs, str | Path) else inputs, Path(out)
    made = TokenizerChoice(vocabulary).loaded
    if made and names:
        sentence = f"the vocabulary of --type {vocabulary.kind} needs no text; leave INPUT out"
        raise UsageError(sentence, "conflict", option="inputs", given=names[0])
    _require_new(directory)
    if not made:
        selected = find_inputs(names, include=form.include, exclude=form.exclude, any_kind=form.kind is not None)
        for line in selected.notes():
            say(line)
        made = _trained(vocabulary, _sample(selected.files, form, progress), say)
        for note in made.notes:
            say(note)
    _require_new(directory, made.files[TOKENIZER_CONFIG])
    make_directory(directory)
    with Stage(directory) as stage:
        for name in (TOKENIZER_CONFIG, TOKENIZER):  # the second file makes the directory a tokenizer
            stage.write(name, made.files[name])
        stage.publish()
    return Tokenizer(made)


def _require_new(directory: Path, config: bytes | None = None) -> None:
    """Raise BuildError if a directory holds a tokenizer or a dataset.

    config: the configuration that a killed run of the same command would have left; None: any.
    """
    if directory.is_file():
        sentence = f"{directory} is a file; give an empty directory, or one that does not exist yet"
        raise BuildError(sentence, "out-exists", option="out", given=directory)
    held = [name for name in (*FILES, MANIFEST) if (directory / name).exists()]
    is_left = held == [TOKENIZER_CONFIG] and config in (None, (directory / TOKENIZER_CONFIG).read_bytes())
    if held and not is_left:
        sentence = f"{directory} already holds a tokenizer; give a different --out"
        raise BuildError(sentence, "out-exists", option="out", given=directory)


def _sample(files: list[Input], form: TextFormat, progress: Progress = lambda done, total: None) -> list[str]:
    """Return lines of about SAMPLE_BYTES of the text, or all lines of a shorter text. Deterministic.

    Reads the first SAMPLE_BYTES. If there is more text, estimates the size of the whole text from their size on disk,
    and reads a new sample in evenly spaced stretches. If an input is a pipe, which can be read only once, or if
    max_documents is given, the sample is the first SAMPLE_BYTES.
    """
    on_disk = [file.size or 0 for file in files]
    texts: list[str] = []
    sample_bytes, is_all_text, bytes_read = 0, True, 0
    for block in find_blocks(split(files, form)):
        some = block.decode()
        if sample_bytes >= SAMPLE_BYTES:
            is_all_text = False
            break
        texts += some.text[: some.num_bytes].tobytes().decode().split("\n")
        sample_bytes, bytes_read = sample_bytes + some.num_bytes, block.bytes_read
        progress(bytes_read or sample_bytes, sum(on_disk))
    if not any(texts):
        sentence = "there is no text to train a vocabulary on: all is blank or left out; give a file with text in it"
        raise InputError(sentence, "empty", option="inputs")
    if is_all_text or form.max_documents is not None or any(file.is_stream for file in files):
        return texts
    texts.clear()
    text_bytes = sample_bytes * sum(on_disk) // max(1, bytes_read)  # of all inputs, if their beginning is typical
    return _spaced_sample(files, on_disk, form, text_bytes, progress)


def _spaced_sample(
    files: list[Input], on_disk: list[int], form: TextFormat, text_bytes: int, progress: Progress
) -> list[str]:
    """Return lines from evenly spaced stretches of each input, until the inputs so far have filled their share of the
    sample.

    An input's share is proportional to its size on disk. In plain files of text and JSON lines, only the stretches are
    read. text_bytes: approximate bytes of all inputs.
    """
    text_of = replace(form, shard_size=_STRETCH_BYTES)  # a unit is a stretch; in Parquet, a row group

    def taken_before(stretch: int) -> int:
        """Return how many of the stretches 0 to stretch - 1 are in the sample."""
        return -(-stretch * SAMPLE_BYTES // max(SAMPLE_BYTES, text_bytes))

    def is_taken(stretch: int) -> bool:
        return taken_before(stretch + 1) > taken_before(stretch)

    texts: list[str] = []
    sample_bytes = bytes_before = 0
    for file, size in zip(files, on_disk, strict=True):
        share_so_far = SAMPLE_BYTES * (bytes_before + size) // sum(on_disk)
        if sample_bytes < share_so_far:
            is_parquet, place = (form.kind or file.kind) == "parquet", 0
            for block in find_blocks(split([file], text_of), (lambda unit: True) if is_parquet else is_taken):
                some = block.decode()
                offsets, chosen = some.offsets.tolist(), some.text[: some.num_bytes].tobytes()
                if is_parquet:
                    rows = [pair for pair in pairwise(offsets) if is_taken((place + pair[0]) // _STRETCH_BYTES)]
                    chosen = b"".join(chosen[start:stop] for start, stop in rows)
                    place += some.num_bytes
                texts += chosen.decode().split("\n")
                sample_bytes += len(chosen)
                progress(bytes_before + block.bytes_read, sum(on_disk))
                if sample_bytes >= share_so_far:
                    break
        bytes_before += size
        progress(bytes_before, sum(on_disk))
    return texts
