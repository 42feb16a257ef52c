"""The options of a run as a command line: flags, --recipe and --config."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from bertdata.cli import OneSentence, one_sentence
from bertdata.errors import UsageError, counted
from bertrain import recipes
from bertrain.options.config import (
    CHECKPOINTS,
    DATA,
    DISTILLATION,
    HARDWARE,
    IN_FILES,
    MODEL,
    SCHEDULE,
    Config,
    default_out,
    flag,
    helps,
    replaced_by,
)


class _GroupedOption(click.Option):
    def __init__(self, *arguments: Any, group: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group = group


class _GroupedCommand(OneSentence):
    """A command whose --help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {
            name: [] for name in (DATA, MODEL, SCHEDULE, DISTILLATION, HARDWARE, CHECKPOINTS, "Other")
        }
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                groups[getattr(parameter, "group", "Other")].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def command(run: Callable[[Config], None], *, names_out: bool = True) -> click.Command:
    """A click command with a flag for every option of Config, --recipe and --config.

    names_out: print the directory of a run that --out does not name.
    """

    def main(file: str | None, recipe: str | None, **flags: Any) -> None:
        with one_sentence(quiet=os.environ.get("RANK", "0") != "0"):  # every rank would say the same
            given = {name: value for name, value in flags.items() if value not in (None, ())}
            if file and recipe:
                sentence = "--config and --recipe were given; both have options of a whole run, so give one of them"
                raise UsageError(sentence, "conflict", option="recipe", given=recipe)
            if not file and not recipe and not recipes.CHOICES & given.keys():
                recipe = recipes.DEFAULT
            path = recipes.file_of(recipe) if recipe else Path(file) if file else None
            read = read_options(path) if path else {}
            _require_apart(given, read.get("phase", ()))
            replaced = replaced_by(given, read)
            values = {name: value for name, value in read.items() if name not in replaced}
            config = Config(**values | given)
        if os.environ.get("RANK", "0") == "0":
            if not config.out:
                config = replace(config, out=default_out(config))
                if names_out:
                    click.echo(f"--out {config.out}")
            if recipe:
                shown = [f"{flag(name)} {value}" for name, value in values.items() if name != "phase"]
                if phases := values.get("phase"):
                    shown.append(f"and {counted(len(phases), 'phase')} (bertrain plan shows them)")
                click.echo(" ".join([f"--recipe {recipe}:", *shown]))
        run(config)

    parameters: list[click.Parameter] = []
    for option in fields(Config):
        meta = option.metadata
        if meta["group"] == IN_FILES:
            continue
        form = meta.get("form")
        more: dict[str, Any] = {"multiple": form == "many"}
        more["type"] = meta.get("type", str if form else type(option.default))
        default = "off" if option.default is False else option.default
        help = helps()[option.name]
        shown = f"{help}  [default: {default}]" if option.default not in (None, "", ()) else help
        written = flag(option.name)
        if option.default is False:
            written, more = f"{written}/--no-{written[2:]}", {}
        parameters.append(_GroupedOption([written, option.name], group=meta["group"], default=None, help=shown, **more))
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
    settings = {"help_option_names": ["-h", "--help"]}
    return _GroupedCommand("pretrain", callback=main, params=parameters, help=run.__doc__, context_settings=settings)


def _require_apart(given: dict[str, Any], phases: Any) -> None:
    """Raises UsageError for an option of the command line that a phase sets: it would not hold there."""
    for number, table in enumerate(phases if isinstance(phases, list) else (), 1):
        if isinstance(table, dict) and (both := sorted(given.keys() & table.keys())):
            sentence = (
                f"{flag(both[0])} was given, and [[phase]] {number} of the file sets {both[0]}; change it in the file"
            )
            raise UsageError(sentence, "conflict", option=both[0], given=given[both[0]])


def read_options(path: Path) -> dict[str, Any]:
    """The options in a run.json, or in a TOML file. Raises UsageError if it is neither, or has unknown options."""
    try:
        content = path.read_bytes()
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
    except (ValueError, KeyError, TypeError, RecursionError):
        sentence = (
            f"--config {path} is not a run.json that bertrain pretrain wrote, nor a .toml file of options; give one "
            "of them"
        )
        raise UsageError(sentence, "not-a-run", option="config", given=str(path)) from None
    if unknown := sorted(saved.keys() - {option.name for option in fields(Config)}):
        sentence = (
            f"--config {path} has options that this version does not have: {', '.join(unknown)}; remove them from it"
        )
        raise UsageError(sentence, "other-version", option="config", given=unknown)
    return saved
