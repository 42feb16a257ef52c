"""Commands that run in this process or in a fresh interpreter, and errors by their kind."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner

from bertdata import BertdataError
from bertdata.cli import main as bertdata
from bertdata.errors import UsageError
from bertrain.__main__ import main as bertrain

PROGRAMS = {"bertdata": bertdata, "bertrain": bertrain}
CLICK_KINDS = {click.MissingParameter: "missing", click.NoSuchOption: "unknown", click.UsageError: "malformed"}
"""click's own errors by the nearest kind of ours; the first class that fits is taken."""


def invoke(command, *arguments, **options):
    """Runs a program by its name, or a command of click, in this process, to its end.

    Any other exception is raised.
    """
    result = CliRunner().invoke(PROGRAMS.get(command, command), [str(argument) for argument in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeeds(command, *arguments, **options):
    """Runs a command that must end well; returns click's result."""
    result = invoke(command, *arguments, **options)
    assert result.exit_code == 0, result.output
    return result


def refused(command, *arguments, kind, option=None, given=..., says="", **options):
    """Runs a command that must end in one sentence, with an error of this kind about this option; returns the sentence.

    The exit code is 2 for an error of usage and else 1, and the last line of stderr is the sentence. given, says: as
    those of `refuses`.
    """
    errors, show = [], click.UsageError.show
    with patch.object(click.UsageError, "show", lambda error, file=None: errors.append(error) or show(error, file)):
        result = invoke(command, *arguments, **options)
    error = errors[0] if errors else result.exception
    while error is not None and not isinstance(error, (BertdataError, click.ClickException)):
        error = error.__context__
    assert error is not None, result.output
    sentence = checked(error, kind, option, given, says)
    assert result.exit_code == (2 if isinstance(error, (UsageError, click.UsageError)) else 1)
    assert result.stderr.splitlines()[-1] == f"Error: {sentence}"
    return sentence


def checked(error, kind, option, given, says):
    """The sentence of an error, which must be of this kind, about this option."""
    if isinstance(error, BertdataError):
        found, value, sentence = (error.kind, error.option), error.given, str(error)
    else:
        nearest = next(kind for fits, kind in CLICK_KINDS.items() if isinstance(error, fits))
        name = error.param.name if getattr(error, "param", None) else getattr(error, "option_name", None)
        found, value, sentence = (nearest, name), None, error.format_message()
    assert found == (kind, option), sentence
    assert given is ... or value == given, sentence
    assert says in sentence
    return sentence


@contextmanager
def refuses(kind, option=None, *, given=..., says="", error=BertdataError):
    """The block must raise an error of this class and kind about this option. Gives pytest's information about it.

    given: the value that the error names, says: a part of its sentence; each is checked if there is one.
    """
    with pytest.raises(error) as caught:
        yield caught
    checked(caught.value, kind, option, given, says)


def python(*arguments, environment=None, **more):
    """What a fresh interpreter prints, which must end well. environment: variables beside those of this process."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def json_of(command, *arguments, **options):
    """The object that a command prints in its last line with --json."""
    return json.loads(succeeds(command, *arguments, "--json", **options).stdout.splitlines()[-1])


def waited(condition, seconds=120):
    """Waits until something holds; returns what it then gives."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return value


def tuning(run, data, out, *more):
    """The arguments of a fine-tuning on a table, of one seed and one epoch. more: others, which win over these."""
    return ["--checkpoint", run, "--train", data, "--dev", data, "--out", out, "--seeds", 1, "--epochs", 1, *more]
