"""The evaluation inside a run, on the validation splits of the datasets of its phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bertdata
from bertrain.run import assemble
from bertrain.run.evaluate import MASKING, evaluate, mean, samples
from bertrain.run.run import Run
from bertrain.runtime.stop import Signals

EVALUATED_SAMPLES = 2048  # of the validation split


class Validation:
    """Evaluates a run when it is due. Its methods are called on every rank."""

    def __init__(self, run: Run, *, evaluated_step: int = 0) -> None:
        """evaluated_step: of the last evaluation in the log."""
        self._run, self._evaluated_step = run, evaluated_step

    @property
    def is_due(self) -> bool:
        """After the last step, and after each --eval-every steps; not twice after the same step."""
        run = self._run
        if not self._held_out or run.step == 0 or self._evaluated_step >= run.step:
            return False
        every = run.config.eval_every
        return run.is_done or (every > 0 and run.step % every == 0)

    def evaluate(self, signals: Signals) -> bool:
        """Evaluates and shows predictions. Returns False if a signal came meanwhile; then nothing is shown."""
        run = self._run

        def interrupted() -> bool:
            return run.ranks.any(len(signals) > 0)

        run.end_of_steps()
        before = run.clock.seconds["evaluated"]
        result = self._evaluate(interrupted=interrupted)
        if result is None:
            run.clock.lap("evaluated")
            signals.stop()
            return False
        self._evaluated_step = run.step

        def show() -> None:
            shards = next(iter(self._held_out.values()))
            (row,) = samples(run.learner, shards, run.ranks.device, rows=1, best=1, **self._options)
            shown = [(around, target, best) for around, target, (best,) in row.masked]
            run.clock.lap("evaluated")
            run.watch.evaluation(
                run.step, result | self._measured, shown, seconds=run.clock.seconds["evaluated"] - before
            )

        run.ranks.on_first(show)
        run.clock.lap("evaluated")
        return True

    def loss(self) -> float | None:
        """The loss on the validation split; on the train split of the first dataset where none has another."""
        run = self._run
        run.end_of_steps()
        if self._held_out:
            result = self._evaluate()
        else:
            options = self._options | self._limits | {"split": "train"}
            result = evaluate(run.learner, run.datasets[run.phase.sources[0][0]], run.ranks, **options)
        run.clock.lap("evaluated")
        return result["loss"] if result else None

    @property
    def _held_out(self) -> dict[str, bertdata.Dataset]:
        """The datasets of the phase that have a validation split, by path."""
        found = {path: self._run.datasets[path] for path, _ in self._run.phase.sources}
        return {path: shards for path, shards in found.items() if "validation" in shards.splits}

    @property
    def _options(self) -> dict[str, Any]:
        """Which rows are evaluated, and how they are masked."""
        masking = replace(MASKING, probability=self._run.config.eval_masking)
        return {"split": "validation", "length": self._run.loader.length, "masking": masking}

    @property
    def _measured(self) -> dict[str, Any]:
        """What a card says of the rows: their length, the share that is masked, and the number format."""
        run = self._run
        return {
            "length": run.loader.length,
            "masking": run.config.eval_masking,
            "precision": run.training.eval_precision,
        }

    @property
    def _limits(self) -> dict[str, Any]:
        """How many rows are evaluated, and the context of forward passes."""
        training, device = self._run.training, self._run.ranks.device
        return {"max_samples": EVALUATED_SAMPLES, "autocast": assemble.autocast(device, training.eval_precision)}

    def _evaluate(self, **more: Any) -> dict[str, Any] | None:
        """The result of `evaluate`; in a mix the mean of each source's by weight."""
        run, options = self._run, self._options | self._limits | more
        if not run.batches.names:
            return evaluate(run.learner, run.shards, run.ranks, **options)
        results = {}
        for name, shards in self._held_out.items():
            result = evaluate(run.learner, shards, run.ranks, **options)
            if result is None:
                return None
            results[name] = result
        return mean(results, dict(run.phase.sources))
