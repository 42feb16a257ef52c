"""Pre-train a masked language model on shards.

    torchrun --nproc-per-node 2 -m bertrain.pretrain --data shards/
    python -m bertrain.pretrain --data shards/ --out run/ --model bert-base --steps 100000
    python -m bertrain.pretrain --config run/run.json --out run2/ --seed 1

The global batch of every step is the same for any number of ranks, and so is the run, up to the order of sums. (With
dropout it is not: each rank draws its own.) Stopped and started again, a run continues from the newest checkpoint as if
nothing had happened; on CPUs bit for bit.
"""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":  # the imports below take seconds, in which Ctrl-C may come
    from bertrain.__main__ import leaving_at_interrupt

    with leaving_at_interrupt():
        imported = importlib.import_module("bertrain.pretrain")
    sys.exit(imported.main())

import contextlib
import gc
from dataclasses import replace
from pathlib import Path

import click
import torch

from bertdata.support import one_sentence
from bertrain import checkpoint
from bertrain.cli import command
from bertrain.config import Config, default_out
from bertrain.data import micro_batches, to_device
from bertrain.evaluate import Validation
from bertrain.ranks import Signals, world
from bertrain.report import Records, Watch
from bertrain.trainer import Run


def pretrain(config: Config) -> None:
    """Pre-train a masked language model on the shards that bertdata build made. Runs alone or under torchrun."""
    with one_sentence(), world() as ranks, contextlib.ExitStack() as stack:
        out = Path(ranks.from_first(lambda: config.out or default_out(config)))
        config = replace(config, out=str(out))
        lock = checkpoint.Lock(out)
        ranks.on_first(lambda: stack.enter_context(lock))
        choice = ranks.from_first(lambda: checkpoint.choose(out, lambda line: click.echo(f"warning: {line}")))
        run = ranks.together(lambda: Run(config, ranks, choice))
        ranks.require_same_on_all_ranks(run.facts())
        run.watch = Watch(config, run.plan, ranks, run.batches.sources, step=run.step)
        records = Records(run, lock)
        with run.watch, Signals(ranks) as signals:
            validation = Validation(run, evaluated_step=records.begin())
            try:
                with records.writer:
                    train(run, validation, records, signals)
                    while not (run.is_done or signals.stopped):
                        records.wait()
                        run.enter_next(validation.loss)
                        train(run, validation, records, signals)
                run.watch.finish(run.clock)
            except KeyboardInterrupt:  # the second Ctrl-C
                run.watch.say(f"Interrupted at step {run.step}. {records.describe_newest()}")
                sys.exit(130)
        if ranks.rank == 0:
            if signals.stopped:
                by = "Ctrl-C" if signals.stopped == "SIGINT" else signals.stopped
                click.echo(f"Stopped by {by} after step {run.step}. {records.describe_newest()}")
            else:
                saved = records.writer.saved
                click.echo(f"done: {saved}\nAutoModelForMaskedLM.from_pretrained({str(saved)!r})")
        if signals.stopped == "SIGINT":
            sys.exit(130)


def train(run: Run, validation: Validation, records: Records, signals: Signals) -> None:
    """Takes the steps of a phase, until they are taken or a signal comes to any rank."""
    config, ranks, training, loader = run.config, run.ranks, run.training, run.loader
    module, is_first = training.begin_phase(), True
    gc.unfreeze()  # what was of the phase before
    gc.collect()
    gc.freeze()  # the objects of the run live until its end; the garbage collector can skip them
    run.clock.start(run.learner.model, loader.length, loader.num_slots)
    while True:
        if validation.is_due:
            records.write_entry()
            if not validation.evaluate(signals):
                records.save(required=True)
                return
        if run.phase_is_done:
            records.finish()
            return
        batch, waited = run.next_batch()

        counts = to_device(torch.tensor([*run.learner.counts(batch).values()], dtype=torch.float64), ranks.device)
        run.sums.add_counts(counts)
        ranks.sum(counts)

        scale = (1 / counts.clamp(min=1)).float()  # the gradients of all ranks are summed, not averaged
        size, number = run.plan.micro_batches(loader.length, loader.global_batch_size)
        training.begin_step(run.step, run.phase)
        pieces = micro_batches(batch, size=size, count=number, device=ranks.device)
        for place, piece in enumerate(pieces, 1):
            losses = training.add_gradients(module, piece, scale, is_last=place == number)
            run.sums.add(losses)
        run.update()
        run.sums.end_step(training.skipped, ranks)
        records.write_entry()  # of the step before, on a GPU, which has work meanwhile

        run.clock.end_step(rows=loader.global_batch_size / ranks.world_size, waited=waited)
        if is_first:
            records.reserve()
            is_first = False
        is_last = signals.poll() or run.phase_is_done
        saves = is_last or bool(run.milestones) or run.step % config.save_every == 0
        if saves or run.step % config.log_every == 0:
            records.log(is_last=is_last)
        if saves:
            records.save(required=run.is_done or bool(signals.stopped))
        if signals.stopped:
            return


main = command(pretrain, example="bertrain pretrain --data shards/ --out run/ --steps 10000")
