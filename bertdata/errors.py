"""What can go wrong, as the user is told it.

    BertdataError               one sentence: what was given, where, what was expected, what to do
    ├── UsageError (ValueError) an argument is wrong; nothing was touched        command line: exit code 2
    ├── InputError              the text given to a build cannot be used         command line: exit code 1
    ├── TokenizerError          a tokenizer cannot be found, read or used
    ├── BuildError              the output directory, or an unfinished build in it, is in the way
    ├── DatasetError            a directory is not a dataset, or its files are damaged
    └── StateError              a saved loader state belongs to something else

Everything else that escapes is a bug of ours and keeps its traceback.
"""


class BertdataError(Exception):
    """Base of every error a user can act on."""


class UsageError(BertdataError, ValueError):
    """An argument is wrong."""


class InputError(BertdataError):
    """Text given to a build cannot be used."""


class TokenizerError(BertdataError):
    """A tokenizer cannot be found, read or used."""


class BuildError(BertdataError):
    """The output directory is in the way of a build."""


class DatasetError(BertdataError):
    """A directory is not a dataset, or its files are damaged."""


class StateError(BertdataError):
    """A saved loader state does not belong to this loader."""


def damaged(path: object) -> DatasetError:
    """The error for a dataset, or a teacher's cache, whose numbers cannot be right."""
    return DatasetError(f"{path} is damaged; bertdata verify {path} says where")
