"""The errors that a user can act on.

    BertdataError               one sentence: what was given, where, what was expected, what to type
    ├── UsageError (ValueError) an argument is wrong; nothing was changed        command line: exit code 2
    ├── InputError              the text for a build cannot be used              command line: exit code 1
    ├── TokenizerError          a tokenizer cannot be found, read or used
    ├── BuildError              the output directory is in the way or cannot be written, or a cluster fails
    ├── DatasetError            a directory is not a dataset, or its files are damaged
    ├── RemoteError             a file on another machine cannot be read or written
    └── StateError              a saved loader state belongs to another stream

Any other exception keeps its traceback: it is a bug of the library, or of code of the user's own.
"""


class BertdataError(Exception):
    """Base of every error a user can act on."""


class UsageError(BertdataError, ValueError):
    """An argument is wrong."""


class InputError(BertdataError):
    """The text for a build cannot be used."""


class TokenizerError(BertdataError):
    """A tokenizer cannot be found, read or used."""


class BuildError(BertdataError):
    """The output directory is in the way of a build or cannot be written, or a cluster fails."""


class DatasetError(BertdataError):
    """A directory is not a dataset, or its files are damaged."""


class RemoteError(BertdataError):
    """A file on another machine cannot be read or written."""

    may_pass = False  # whether the same request may succeed later
    is_absent = False  # whether there is no such file
    is_refused = False  # whether access is refused, which some stores also say of a file that is not there


class StateError(BertdataError):
    """A saved loader state belongs to another stream."""


def damaged(path: object) -> DatasetError:
    """The error for a dataset, or a teacher's cache, that holds impossible numbers."""
    return DatasetError(f"{path} is damaged; bertdata verify {path} says where")
