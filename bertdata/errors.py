"""The errors that a user can act on.

    BertdataError               one sentence: the wrong value, where, the expected value, what to type
    ├── UsageError (ValueError) an argument is wrong; nothing was changed        command line: exit code 2
    ├── InputError              the text for a build cannot be used              command line: exit code 1
    ├── TokenizerError          a tokenizer cannot be found, read or used
    ├── BuildError              the output directory is in the way or cannot be written, or a cluster fails
    ├── DatasetError            a directory is not a dataset, or its files are damaged
    ├── RemoteError             a file on another machine cannot be read or written
    └── StateError              a saved loader state belongs to another stream

Each error has a kind from KINDS; all errors of a kind have the same remedy. Programs and tests check the kind and the
option, never the sentence, because its words may change.

Any other exception keeps its traceback: it is a bug of the library or of the user's code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any, SupportsFloat

KINDS = {
    # options and arguments
    "missing": "Something that the command needs was not given. Give it.",
    "unknown": "A name is unknown. Give one of those that the message lists.",
    "out-of-range": "A number is too small or too large. Give one within the bounds.",
    "malformed": "A value is not written as its option expects. Write it like the example in the message.",
    "conflict": "Two options exclude each other. Leave one of them out.",
    "needs-option": "An option needs another one. Give that too, or leave the option out.",
    "unsupported": "The model, tokenizer or data cannot do what an option asks. Leave the option out, or give others.",
    "no-match": "A pattern or a name selects nothing. Correct it, or leave it out.",
    "too-long": "Rows are longer than a limit. Give a smaller --length, or a different model.",
    "not-installed": "A package is missing. Install it with the command in the message.",
    "bad-url": "A URL cannot be used here. Correct it, or give a path.",
    "bad-function": "A function of your own cannot be imported, or does not give what it must. Correct it.",
    "function-failed": "A function of your own raised an exception. Correct the function or the text.",
    "bad-entry": "An entry that you added to a table does not do what docs/extending.md asks. Correct it.",
    # outputs
    "out-exists": "The output already exists. Give a different --out, or remove it.",
    "unwritable": "A file cannot be written. Make room or correct the permissions, and run it again with that --out.",
    "busy": "Another process writes there. Wait for it, or give a different --out.",
    "unfinished": "A build there is not finished. Run its command again.",
    "other-settings": "The existing output was made with other settings. Give the same settings, or a different --out.",
    "parts-missing": "Parts of a build are missing. Make them as the message says.",
    # inputs
    "not-found": "A file or directory does not exist. Check the name.",
    "wrong-file-type": "A directory, a link or a device is where a file is needed, or the reverse. Replace it.",
    "unreadable": "The system cannot read a file. The message has its reason.",
    "empty": "The input is empty. Give files with contents.",
    "not-text": "Bytes are not text in the encoding. Name the encoding, or correct the file.",
    "cut-short": "A file is not complete. Get it again.",
    "bad-row": "A row or line is invalid. Correct the row, or leave it out.",
    "no-column": "A file has no such column or key. Name a different one.",
    "wrong-column-type": "A column has the wrong type. Name a different one.",
    "too-large": "A document or a file is larger than a limit. Split it.",
    "unknown-format": "The format of a file is not known from its name. Name it with an option.",
    "not-of-format": "A file does not follow the rules of its format. Write it again with the program that made it.",
    "id-outside-vocabulary": "An id is larger than the vocabulary. Give the tokenizer that made the ids.",
    "read-once": "A pipe can be read only once. Write its text to a file.",
    "changed": "A file changed while it was read. Run again when nobody changes it.",
    # datasets and caches
    "not-a-dataset": "A directory is not a dataset or a teacher cache. Give one, or make one.",
    "damaged": "A file is damaged or does not belong there. Copy or make it again; bertdata verify says more.",
    "no-split": "A dataset has no such split. Give one that it has, or build with a share for it.",
    "not-stored": "A dataset does not store what an option needs. Build it again with the option in the message.",
    "replaced": "A dataset was replaced while it was open. Open it again.",
    "other-version": "A different version wrote the file. Read it with that version, or make it again.",
    "other-dataset": "This belongs to a different dataset. Give the one that it was made from.",
    "other-stream": "A state or a cache belongs to other rows. Give the options that it was made with.",
    "too-many-files": "The system allows too few open files. Raise its limits, or make larger shards.",
    # tokenizers
    "tokenizer-not-found": "There is no tokenizer of this name. Give a file, a directory, or a name on the hub.",
    "tokenizer-unreadable": "A file cannot be read as a tokenizer. Give a different one.",
    "tokenizer-lacks-token": "A tokenizer has no special token that is needed. Add it, or give a different tokenizer.",
    "tokenizer-differs": "Two parts were made with different tokenizers. Give parts that fit.",
    "tokenizer-failed": "A tokenizer cannot encode a text. Change the text.",
    # servers and clusters
    "access-denied": "A server refuses access. Log in, or ask for access.",
    "server-failed": "A server does not answer, or fails. Try again later.",
    "server-unsuitable": "A server cannot do what is needed. Copy the files to this machine first.",
    "cluster-failed": "A Ray cluster cannot be used. The message says what to do on its nodes.",
    # models and runs
    "model-not-found": "There is no model of this name. Give a preset, a file, a directory, or a name on the hub.",
    "model-unreadable": "A model cannot be made or loaded. The message has the reason.",
    "weights-missing": "A checkpoint lacks weights. Give one that is complete.",
    "not-a-run": "A directory is not a run, a checkpoint or a result. Give one that a command of bertrain wrote.",
    "too-short-to-mask": "No token of a row is predicted. Give longer rows, or a larger share of masks.",
    "nothing-to-train": "All parameters are frozen. Leave some to train.",
    "not-finite": "A loss is not a finite number. Lower the learning rate, and run again.",
}
"""Kind → meaning and remedy. docs/errors.md lists the messages of each kind."""


class BertdataError(Exception):
    """Base of every error a user can act on.

    sentence: the error message, also str(error): the wrong value, its location, the expected value, and the remedy.
    kind: one of KINDS.
    option: the Python name of the wrong option or argument, such as global_batch_size; None if no option is wrong.
    given: the value of this option.
    """

    def __init__(self, sentence: str, kind: str, *, option: str | None = None, given: Any = None) -> None:
        super().__init__(sentence, kind)
        self.kind, self.option, self.given = kind, option, given

    def __str__(self) -> str:
        return str(self.args[0])


class UsageError(BertdataError, ValueError):
    """An argument is wrong."""


class InputError(BertdataError):
    """The text for a build cannot be used."""


class TokenizerError(BertdataError):
    """A tokenizer cannot be found, read or used."""


class TextError(TokenizerError):
    """A tokenizer cannot store some texts. --on-error skip leaves them out."""

    documents: tuple[int, ...] = ()  # indices of the texts in their block, ascending
    places: tuple[int, ...] = ()  # where these texts, or pieces of them, begin in the input text, if known


class LongTextError(TextError):
    """Texts have pieces that are too long for `tokenizers`, which needs much memory for each byte."""


class FailedTextError(TextError):
    """`tokenizers` fails on texts."""


class BuildError(BertdataError):
    """The output directory is in the way of a build or cannot be written, or a cluster fails."""


class DatasetError(BertdataError):
    """A directory is not a dataset, or its files are damaged."""


class NoDatasetError(DatasetError, UsageError):
    """The path of a command or call is not a dataset."""


class RemoteError(BertdataError):
    """A file on another machine cannot be read or written."""


class StateError(BertdataError):
    """A saved loader state belongs to another stream."""


def install(extra: str) -> str:
    """Return the pip command that installs an extra of pyproject.toml. pip keeps an installed or cloned bertrain."""
    return f"pip install 'bertrain[{extra}]'"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, for a message.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


_NO_MEMORY = re.compile(
    r"out of memory|n't allocate memory|not enough memory|cannot allocate memory|alloc_failed", re.I
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: for a MemoryError, or an out-of-memory error of torch on a CPU or GPU."""
    is_of_torch = isinstance(error, RuntimeError | OSError) and _NO_MEMORY.search(str(error))
    return isinstance(error, MemoryError) or bool(is_of_torch)


def require(holds: object, option: str, given: Any, expected: str, kind: str = "out-of-range") -> None:
    """Raise UsageError, with the given and the expected value in the message, unless `holds` is true."""
    if not holds:
        raise UsageError(f"{option} is {given!r}; give {expected}", kind, option=option, given=given)


def require_known(option: str, value: str | None, choices: Iterable[str | None]) -> None:
    """Raise UsageError for a value that is not one of `choices`."""
    known = [*choices]
    require(value in known, option, value, f"one of {', '.join(filter(None, known))}", "unknown")


def require_positive(option: str, value: Any, *, most: int = (1 << 62) - 1) -> int:
    """Return an int. Raise UsageError unless the value is an integer from 1 to `most`."""
    number = require_integer(option, value)
    require(1 <= number <= most, option, number, f"1 to {most:,}")
    return number


def require_integer(option: str, value: Any) -> int:
    """Convert an integer of Python or NumPy to int, because states must be JSON. Raise UsageError for other values."""
    require(hasattr(value, "__index__"), option, value, "an integer")
    return operator.index(value)


def require_share(option: str, value: Any) -> float:
    """Return a float. Raise UsageError unless the value is a number from 0 to 1."""
    is_number = isinstance(value, SupportsFloat) and not isinstance(value, str)
    require(is_number and 0 <= value <= 1, option, value, "a share from 0 to 1, such as 0.15")
    return float(value)


def damaged(path: object, why: str = "it has impossible numbers") -> DatasetError:
    """Return the error for a damaged file or dataset."""
    sentence = f"{path} is damaged: {why}; copy or make it again; bertdata verify finds all faults"
    return DatasetError(sentence, "damaged", given=path)


def refused(file: object, kind: str, what: str) -> InputError:
    """Return the error for an input. what: the rest of the message, after the name of the input."""
    return InputError(f"{file}{what}", kind, option="inputs", given=str(file))


def unreadable(path: object, error: OSError) -> DatasetError:
    """Return the error for a file of a dataset that the system cannot read."""
    sentence = f"{path} cannot be read: {error.strerror}; run the same command again when it can be read"
    return DatasetError(sentence, "unreadable", given=path)
