"""The command line of a run: flags, --recipe and --config. torch is not imported before they are parsed."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from bertdata.support import OneSentence, UsageError, counted, helps, one_sentence
from bertrain import recipes
from bertrain.__main__ import imported
from bertrain.config import HEADINGS, Config, all_options, known_options, layered, replaced
from bertrain.methods import options_of_methods
from bertrain.options import Options, flag, named

MOST_BYTES = 1 << 24  # the largest file of options


class _RunCommand(OneSentence):
    """A command with --recipe, --config, and a flag for each option of the run and of all methods."""

    def __init__(self, name: str = "", own: Sequence[click.Parameter] = (), **options: Any) -> None:
        """own: additional options of this command."""
        super().__init__(name, context_settings={"help_option_names": ["-h", "--help"]}, **options)
        self._own = own

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return new parameters each time, because a program may have added methods. Sets the headings of --help."""
        with one_sentence():
            all_options()  # raises if two have the same name
        self.params = [*self._own]
        methods = {name.replace("_", " ").capitalize(): kind for name, kind in options_of_methods().items()}
        headings: dict[str, list[str]] = {name: [] for name in (*HEADINGS[:3], *methods, *HEADINGS[3:])}
        for heading, kind in [("", Config), *methods.items()]:
            for option in (each for each in fields(kind) if not each.metadata["in_files"]):
                headings[option.metadata["group"] or heading].append(option.name)
            self.params += flags_of(kind)
        self.headings = headings
        recipe = f"Options that belong together (docs/recipes.md): {', '.join(recipes.NAMES)}."
        file = "Read options from this run.json, or from a TOML file of option = value and [[phase]] (docs/phases.md)."
        for names, text in ((["--recipe"], recipe), (["--config", "file"], file)):
            self.params.append(click.Option(names, help=f"{text} Options on the command line override them."))
        return super().get_params(ctx)


def flags_of(kind: type[Options], without: str | None = None) -> list[click.Parameter]:
    """Return a flag for each option that the command line accepts. without: a group of options without flags."""
    texts, options = helps(kind), (each for each in fields(kind) if not each.metadata["in_files"])
    return [_flag(each, texts.get(each.name, "")) for each in options if each.metadata["group"] != without]


def _flag(option: Field[Any], help: str) -> click.Parameter:
    kind, name = option.metadata["kind"], flag(option.name)
    if option.default is False:
        return click.Option([f"{name}/--no-{name[2:]}", option.name], default=None, help=f"{help}  [default: off]")
    shown = f"{help}  [default: {option.default}]" if option.default not in (None, "", ()) else help
    more: dict[str, Any] = {"metavar": kind.metavar, "multiple": kind.many, "required": option.metadata["required"]}
    if kind.choices:
        more["shell_complete"] = lambda ctx, param, text: [name for name in kind.choices if name.startswith(text)]
    return click.Option([name, option.name], help=shown, **more)


def command(run: Callable[..., None], **options: Any) -> click.Command:
    """Return a command that calls `run` with a Config and with the values of `own`.

    options: `own`, which are additional options of the command, and the arguments of click.Command.
    """

    def main(file: str | None, recipe: str | None, **flags: Any) -> None:
        is_first = os.environ.get("RANK", "0") == "0"
        with one_sentence(quiet=not is_first):  # once, and not on every rank
            given = {name: value for name in all_options() if (value := flags.pop(name, None)) not in (None, ())}
            config, lines = _config(given, file, recipe)
            imported("plan").options_of(config)  # raises an error that names the invalid phase
        for line in lines if is_first else ():
            click.echo(line)
        run(config, **flags)

    return _RunCommand(callback=main, **options)


def _config(given: dict[str, Any], file: str | None, recipe: str | None) -> tuple[Config, list[str]]:
    """Return the options of a run, and a line with the options of its recipe. given: the flags on the command line."""
    if file and recipe:
        sentence = "--config and --recipe were given; both have options of a whole run, so give one of them"
        raise UsageError(sentence, "conflict", option="recipe", given=recipe)
    read = read_options(recipes.file_of(recipe) if recipe else Path(str(file))) if recipe or file else {}
    _require_apart(given, read)
    values, shown = layered(read, given), []
    if recipe:
        shown = [f"{named(name)} {value}" for name, value in values.items() if name not in {"phase", *given}]
        if phases := values.get("phase"):
            shown.append(f"and {counted(len(phases), 'phase')} (bertrain doctor shows them)")
    return Config.make(**values), [" ".join([f"--recipe {recipe}:", *shown])] * bool(recipe)


def _require_apart(given: dict[str, Any], read: Mapping[str, Any]) -> None:
    """Raise UsageError for an option on the command line that conflicts with a phase of the file."""
    phases = read.get("phase", ())
    for number, table in enumerate(phases if isinstance(phases, list) else (), 1):
        for name, value in given.items() if isinstance(table, dict) else ():
            if table.keys() & replaced(read, {name: value}) or name in replaced(given, table):
                sentence = f"{flag(name)} was given, but [[phase]] {number} of the file sets it too; change the file"
                raise UsageError(sentence, "conflict", option=name, given=value)


def read_options(path: Path) -> dict[str, Any]:
    """Return the options in a run.json or a TOML file. Raises UsageError for other files and for unknown options."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
        saved = tomllib.loads(content.decode()) if path.suffix == ".toml" else dict(json.loads(content)["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or (error if isinstance(error, ValueError) else "no options of a run")
        sentence = f"--config {path} cannot be read ({reason}); give the run.json of a run, or a .toml file of options"
        missing = isinstance(error, FileNotFoundError)
        raise UsageError(sentence, "not-found" if missing else "malformed", option="config", given=str(path)) from None
    if saved.get("init"):
        saved.pop("model", None)  # version 0.1.0 ignored it
    return known_options(saved, f"--config {path}")


pretrain = command(
    lambda config: imported("pretrain").pretrain(config),
    name="pretrain",
    help="Pre-train a masked language model on the shards that bertdata build made. Runs alone or under torchrun.",
    epilog="\b\nExample:\n  bertrain pretrain --data shards/ --out run/ --steps 10000",
)
doctor = command(
    lambda config, **own: imported("commands.doctor").doctor(config, **own),
    name="doctor",
    help="Print the phases of a run, check what it needs, and take a few steps to measure its time, memory and disk "
    "space.\n\nUnder torchrun the steps are those of all ranks.",
    epilog="\b\nExample:\n  bertrain doctor --data shards/ --model bert-base --nproc 8",
    own=[
        click.Option(["--nproc"], default=1, show_default=True, help="Number of ranks.", type=click.IntRange(min=1)),
        click.Option(
            ["--hours"],
            help="Print how many steps fit into 95 % of this number of hours.",
            type=click.FloatRange(0, None, True),
        ),
    ],
)
