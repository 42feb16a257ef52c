"""Print what a run would do in each phase, before it starts: steps, tokens, epochs, learning rate, masks, disk.

python -m bertrain plan --config run.toml --data shards/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click
import torch

from bertdata.cli import one_sentence
from bertdata.errors import BertdataError, counted
from bertrain.methods import methods_of, not_counted
from bertrain.models import build
from bertrain.optim import optimizers
from bertrain.options.config import Config
from bertrain.options.flags import command
from bertrain.run import assemble, rundir
from bertrain.run.batches import Batches
from bertrain.run.phases import Phase
from bertrain.run.schedule import Plan

HEAD = ("phase", "begins at", "steps", "tokens", "rows", "length", "masked", "rate", "schedule", "epochs")


def plan(config: Config) -> None:
    """Print the phases of a run: steps, tokens, epochs of each dataset, learning rate, masks, and disk space."""
    with one_sentence():
        assemble.check_names(config)
        batches = Batches(config, assemble.datasets(config), methods=methods_of(config))
        rows = list(_rows(batches))
        widths = [max(len(row[column]) for row in (HEAD, *rows)) for column in range(len(HEAD))]
        for row in (HEAD, *rows):
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        click.echo(_total(batches.plan))
        click.echo(_disk(config, batches))
        for warning in batches.plan.warnings:
            click.echo(f"warning: {warning}")


def _rows(batches: Batches) -> Iterator[Sequence[str]]:
    """A row of the table for each phase. Moves the streams of `batches` to the end of the run."""
    plan = batches.plan
    for phase in plan.phases:
        if phase.number > 1:
            batches.enter(phase)
        if plan.seconds is None:
            batches.loader.position += phase.samples()
        epochs = batches.epochs()
        yield _row(plan, phase, {path: epochs[path] for path, _ in phase.sources})


def _row(plan: Plan, phase: Phase, epochs: dict[str, float]) -> Sequence[str]:
    begin, end = phase.rate.at(phase.start), phase.rate.at(phase.stop - 1)
    samples = phase.samples()
    if plan.seconds is None:
        known = f"step {phase.start:,}", f"{phase.steps:,}", f"{samples * phase.length:,}"
        read = ", ".join(f"{path} {number:.3g}" for path, number in epochs.items())
    else:
        known, read = (f"{phase.start / plan.steps * plan.seconds:,.0f} s", "-", "-"), "-"
    share = "" if phase.masking.policy == "uniform" else f"{phase.masking.probability:.0%} "  # which draws its own
    masks = f"{share}{phase.masking.policy}"
    return (
        str(phase.number),
        *known,
        str(phase.rows),
        str(phase.length),
        masks,
        f"{begin:.2e} to {end:.2e}",
        phase.rate.schedule,
        read,
    )


def _total(plan: Plan) -> str:
    if plan.seconds is not None:
        return f"{plan.seconds:,.0f} seconds in all"
    tokens = sum(phase.samples() * phase.length for phase in plan.phases)
    return f"{counted(plan.steps, 'step')} and {counted(tokens, 'token')} in all"


def _disk(config: Config, batches: Batches) -> str:
    """The size of the checkpoints that stay."""
    shards, methods = next(iter(batches.datasets.values())), methods_of(config)
    try:
        with torch.device("meta"):  # no memory, and no weights
            start = rundir.resolved(config.branch or config.init, "branch" if config.branch else "init")
            name, nsp = start or config.model, "nsp" in assemble.objectives(config)
            weights, _ = build.build(name, shards.special_tokens, length=config.longest, seed=0, nsp=nsp)
            for method in methods:
                method.change_model(weights, config, None)
    except (BertdataError, RuntimeError) as error:  # torch's own, of a method that computes with weights
        return f"disk: not known, as the model cannot be made here ({error})"
    sizes = {name: tensor.numel() for name, tensor in weights.named_parameters() if tensor.requires_grad}
    frozen = sum(row["parameters"] for row in optimizers.scaled_rates(sizes, config) if row["factor"] == 0)
    parameters = sum(tensor.numel() for tensor in weights.parameters())
    names, needed = rundir.needed_space(config, parameters, sum(sizes.values()) - frozen)
    return f"disk: {parameters:,} parameters; {names} take {needed / 1e9:.1f} GB{not_counted(methods, saved=True)}"


main = command(plan, example="bertrain plan --config run.toml", names_out=False)

if __name__ == "__main__":
    main()
