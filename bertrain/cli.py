"""The options of a run as a command line: flags, --recipe and --config."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from bertdata.support import OneSentence, UsageError, counted, one_sentence
from bertrain import recipes
from bertrain.config import (
    CHECKPOINTS,
    DATA,
    HARDWARE,
    MODEL,
    OF_VALUE,
    SCHEDULE,
    Config,
    all_options,
    replaced_by,
    without_removed,
)
from bertrain.methods import known_methods
from bertrain.options import Options, flag, helps

MOST_BYTES = 1 << 24  # of a file of options


class _RunCommand(OneSentence):
    """A command with the options of a run and of all methods. Its --help lists them under headings."""

    def __init__(self, *arguments: Any, own: Sequence[click.Parameter], **options: Any) -> None:
        """own: its options beside those of a run."""
        super().__init__(*arguments, **options)
        self._own = own

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Made anew each time: a program may have added methods."""
        with one_sentence():
            parameters, self.headings = _parameters()
        self.params = [*self._own, *parameters]
        return super().get_params(ctx)


def command(
    run: Callable[..., None],
    *,
    example: str | None = None,
    own: Sequence[click.Parameter] = (),
) -> click.Command:
    """A click command with a flag for every option of a run and of its methods, --recipe and --config.

    run: called with a Config, and with the values of `own`, further options. example: a command line for the end of
    its help.
    """

    def main(file: str | None, recipe: str | None, **flags: Any) -> None:
        from bertrain.plan import check  # which imports torch; --help does not need it

        is_first = os.environ.get("RANK", "0") == "0"
        values = {str(parameter.name): flags.pop(str(parameter.name)) for parameter in own}
        with one_sentence(quiet=not is_first):  # every rank would say the same
            given = {name: value for name, value in flags.items() if value not in (None, ())}
            config, line = _config(given, file, recipe)
            check(config)
        if is_first and line:
            click.echo(line)
        run(config, **values)

    settings = {"help_option_names": ["-h", "--help"]}
    epilog = f"\b\nExample:\n  {example}" if example else None
    return _RunCommand("pretrain", callback=main, help=run.__doc__, epilog=epilog, context_settings=settings, own=own)


def _config(given: dict[str, Any], file: str | None, recipe: str | None) -> tuple[Config, str]:
    """Return the options of a run, and a line with those of its recipe or "". given: on the command line."""
    if file and recipe:
        sentence = "--config and --recipe were given; both have options of a whole run, so give one of them"
        raise UsageError(sentence, "conflict", option="recipe", given=recipe)
    if not file and not recipe and not recipes.CHOICES & given.keys():
        recipe = recipes.DEFAULT
    path = recipes.file_of(recipe) if recipe else Path(file) if file else None
    read = read_options(path) if path else {}
    _require_apart(given, read)
    replaced = replaced_by(given, read)
    values = {name: value for name, value in read.items() if name not in replaced}
    line = ""
    if recipe:
        shown = [f"{flag(name)} {value}" for name, value in values.items() if name != "phase"]
        if phases := values.get("phase"):
            shown.append(f"and {counted(len(phases), 'phase')} (bertrain doctor shows them)")
        line = " ".join([f"--recipe {recipe}:", *shown])
    return Config.of(**values | given), line


def _parameters() -> tuple[list[click.Parameter], dict[str, list[str]]]:
    """A flag for every option of a run and of every method, --recipe and --config; and names of options by heading."""
    all_options()  # which refuses two of one name
    of_methods = {name.replace("_", " ").capitalize(): each.options_type for name, each in known_methods().items()}
    headings: dict[str, list[str]] = {name: [] for name in (DATA, MODEL, SCHEDULE, *of_methods, HARDWARE, CHECKPOINTS)}
    parameters: list[click.Parameter] = []
    kinds: dict[str, type[Options]] = {"": Config, **of_methods}
    for heading, kind in kinds.items():
        for option in fields(kind):
            if not option.metadata.get("in_files"):
                headings[option.metadata.get("group") or heading].append(option.name)
                parameters.append(_flag(option, kind))
    parameters += [
        click.Option(
            ["--recipe"],
            help=f"Options that belong together (docs/recipes.md): {', '.join(recipes.NAMES)}. Options on the command "
            f"line override them. Default: {recipes.DEFAULT}; none beside --config, "
            f"{', '.join(sorted(map(flag, recipes.CHOICES)))}.",
        ),
        click.Option(
            ["--config", "file"],
            help="Read options from this run.json, or from a TOML file of option = value and [[phase]] "
            "(docs/phases.md). Options on the command line override them.",
        ),
    ]
    return parameters, headings


def _flag(option: Field[Any], kind: type) -> click.Parameter:
    """The flag of an option. kind: the class that it is a field of."""
    meta, form = option.metadata, option.metadata.get("form")
    more: dict[str, Any] = {"multiple": form == "many"}
    more["type"] = meta.get("type", str if form else type(option.default))
    default = "off" if option.default is False else option.default
    help = helps(kind).get(option.name, "")
    shown = f"{help}  [default: {default}]" if option.default not in (None, "", ()) else help
    written = flag(option.name)
    if option.default is False:
        written, more = f"{written}/--no-{written[2:]}", {}
    return click.Option([written, option.name], default=None, help=shown, **more)


def _require_apart(given: dict[str, Any], read: Mapping[str, Any]) -> None:
    """Raises UsageError for an option of the command line that a phase sets or replaces: it would not hold there.

    The same for one that leaves out what a phase sets, as another optimizer does the rates of the file's own. read: the
    options of the file.
    """
    phases = read.get("phase", ())
    changed = [name for name in OF_VALUE.keys() & given.keys() if given[name] != read.get(name)]
    leaving = {each: name for name in changed for each in OF_VALUE[name]}
    for number, table in enumerate(phases if isinstance(phases, list) else (), 1):
        for name in table if isinstance(table, dict) else ():
            if other := min(given.keys() & replaced_by({name: table[name]}, {}), default=leaving.get(name)):
                sentence = (
                    f"{flag(other)} was given, and [[phase]] {number} of the file sets {name}; change it in the file"
                )
                raise UsageError(sentence, "conflict", option=other, given=given[other])


def read_options(path: Path) -> dict[str, Any]:
    """The options in a run.json, or in a TOML file. Raises UsageError if it is neither, or has unknown options."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            sentence = f"--config {path} has more than {MOST_BYTES >> 20} MiB; give the run.json of a run"
            raise UsageError(sentence, "too-large", option="config", given=str(path))
        saved = tomllib.loads(content.decode()) if path.suffix == ".toml" else dict(json.loads(content)["config"])
    except FileNotFoundError:
        sentence = f"--config {path} does not exist; give the run.json of a run"
        raise UsageError(sentence, "not-found", option="config", given=str(path)) from None
    except OSError as error:
        sentence = f"--config {path} cannot be read: {error.strerror}; give the run.json of a run"
        raise UsageError(sentence, "unreadable", option="config", given=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        sentence = f"--config {path} is not TOML: {error}; write lines such as lr = 1e-3"
        raise UsageError(sentence, "malformed", option="config", given=str(path)) from None
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        sentence = (
            f"--config {path} is not a run.json that bertrain pretrain wrote, nor a .toml file of options; give one "
            "of them"
        )
        raise UsageError(sentence, "not-a-run", option="config", given=str(path)) from None
    saved = without_removed(saved, f"--config {path}")
    if unknown := sorted(saved.keys() - all_options().keys()):
        sentence = (
            f"--config {path} has options that are unknown here: {', '.join(unknown)}; remove them from it, or install "
            "the package that adds them"
        )
        raise UsageError(sentence, "other-version", option="config", given=unknown)
    return saved
