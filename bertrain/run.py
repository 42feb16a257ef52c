"""The state of a pre-training run: made from a Config, saved in checkpoints, changed by each step."""

from __future__ import annotations

import math
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import bertdata
from bertdata.errors import UsageError
from bertrain import assemble, optim, phases
from bertrain.batches import Batches
from bertrain.config import Config
from bertrain.evaluate import MASKING, evaluate, mean, predictions
from bertrain.models import adapters, grow, rotary
from bertrain.models.build import has_dropout, max_length, recompute_activations
from bertrain.models.families import layers_of
from bertrain.objectives.elastic import Elastic
from bertrain.optim.average import EVERY, Average
from bertrain.phases import Phase
from bertrain.runtime import card, checkpoint, state, trackers
from bertrain.runtime.clock import Clock
from bertrain.runtime.dist import World
from bertrain.runtime.log import Sources, Sums
from bertrain.runtime.rates import Rates
from bertrain.runtime.state import TrainState
from bertrain.runtime.stop import Signals
from bertrain.runtime.watch import Watch
from bertrain.runtime.writer import Writer

EVALUATED_SAMPLES = 2048  # of the validation split, during a run


class Run:
    """Everything a run needs, on this rank. Making it fails on all ranks if it fails on one."""

    def __init__(self, config: Config, ranks: World, choice: checkpoint.Choice, lock: checkpoint.Lock) -> None:
        """choice: the checkpoint to resume from, as rank 0 chose it. lock: of --out, which rank 0 holds."""
        self._lock = lock
        self.config, self.out, self.ranks = config, Path(config.out), ranks
        self.resumed_from, self.warnings = choice.path, list(choice.warnings)
        branch = checkpoint.find(Path(config.branch), "branch") if config.branch and not choice.path else None
        self.begun_from = self.resumed_from or branch
        """The checkpoint whose state is taken."""
        choice.check()
        assemble.check_names(config)
        if ranks.rank == 0:
            trackers.require(config.log_to)
        self.datasets = assemble.datasets(config)
        self.shards = next(iter(self.datasets.values()))  # which has the tokenizer of all
        self.batches = Batches(config, self.datasets, rank=ranks.rank, world_size=ranks.world_size)
        self.batches.first_targets()  # which fails where there are none
        self.plan = self.batches.plan
        self.made_with = checkpoint.made_with(config)
        begun = self._resume()
        weights, warnings = assemble.model(config, self.shards, self.phase, resume=self.begun_from)
        self.warnings += warnings
        self.step, self.tokens = begun.step, begun.tokens
        self.spent = begun.seconds.get("trained", 0.0)
        on_gpu = ranks.device.type == "cuda"
        self.clock = Clock(begun.seconds, compiles=on_gpu or config.compiles(on_gpu=on_gpu))
        self.precision = assemble.precision(config, ranks.device, weights)
        self.autocast = assemble.autocast(ranks.device, self.precision)
        self._prepare(weights)
        self.made_with |= {"teacher": self.learner.teacher, "init": self.learner.base}
        if self.begun_from:
            begun.require_made_with(self.begun_from, self.made_with)
        else:
            assemble.check_parts(config, self.shards, self.learner, self.plan.phases)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.precision == "fp16")
        if self.begun_from:
            checkpoint.read_optimizer(self.begun_from, self.optimizer, self.learner)
        self._apply(self.phase)
        if self.begun_from and self.scaler.is_enabled() and begun.scaler:
            self.scaler.load_state_dict(dict(begun.scaler))
        if self.average and self.resumed_from and self.progress > 1 - config.average:
            checkpoint.read_average(self.resumed_from, self.average)
        self.names = list(self.datasets) if len(self.datasets) > 1 else []  # of the datasets of a mix
        self.sums = Sums(list(self.learner.objectives), self.names, ranks.device)
        if ranks.rank == 0:
            self.sums.load(begun.since_entry)
        self.rate, self.norm = 0.0, torch.zeros(())
        self.tokenizer = checkpoint.tokenizer_files(self.shards, weights, max_length(weights.config))
        self.watch = Watch(config, self.plan, ranks, self.sources, step=self.step, read=begun.read)
        self.writer = Writer(self.out, keep=config.keep, saved=self.resumed_from, warn=self.watch.warn)
        self.evaluated_step = 0  # `begin` reads it from the log
        if config.milestones["words"]:
            self.batches.check_words()
        self.passed: list[str] = []
        """The milestones of --save-at that the last step has passed."""
        self._done = self._amounts()

    def _prepare(self, weights: PreTrainedModel) -> None:
        """Makes what trains a model: the learner, its optimizer, and the mean of its weights."""
        config = self.config
        if config.gradient_checkpointing:
            recompute_activations(weights)
        self.learner = assemble.learner(config, weights, self.shards, self.ranks, self.precision)
        if config.compiles(on_gpu=self.ranks.device.type == "cuda"):
            torch._dynamo.config.recompile_limit = 64  # there are more shapes and modes than the 8 it would stop at
            self.learner.compile(fullgraph=not self.learner.is_dense, dynamic=False)
        self.optimizer = optim.build(self.learner, config)
        self.trained = {name: p for name, p in self.learner.model.named_parameters() if p.requires_grad}
        """The parameters that train in a phase that trains all."""
        self.average = Average(self.learner) if config.average else None

    def _apply(self, phase: Phase) -> None:
        """Gives the model and the optimizer what a phase says about them, beside the number of layers."""
        rotary.set_bases(self.learner.model, phase.rope_base, phase.rope_base_local)
        for name, parameter in self.trained.items():
            parameter.requires_grad_(re.search(phase.trains, name) is not None)
        optim.set_weight_decay(self.optimizer, phase.weight_decay)

    @property
    def phase(self) -> Phase:
        """The phase of the next step, or of the last one if its border comes next."""
        return self.batches.phase

    @property
    def sources(self) -> Sources:
        """The datasets of the run, and in which ratio it reads their rows, or steps where it is by time."""
        if len(self.plan.phases) == 1:
            return [(self.datasets[path], weight) for path, weight in self.phase.sources]
        rows = dict.fromkeys(self.datasets, 0.0)
        for phase in self.plan.phases:
            total = sum(weight for _, weight in phase.sources)
            for path, weight in phase.sources:
                rows[path] += weight / total * (phase.steps if self.plan.seconds else phase.samples())
        return [(self.datasets[path], weight) for path, weight in rows.items()]

    @property
    def loader(self) -> bertdata.Loader:
        """The loader of the next batch."""
        return self.batches.loader

    def _resume(self) -> TrainState:
        """Moves the batches to where the checkpoint was taken. Returns the state to begin with.

        Raises UsageError if the checkpoint belongs to another model, optimizer or stream of rows.
        """
        if self.begun_from is None:
            return TrainState()
        saved, given = state.read(self.begun_from), dict(self.made_with)
        if self.resumed_from is None:
            del given["model"]  # that of the branch
            saved.require_made_with(self.begun_from, given)
            self.batches.branch(self.begun_from, saved)
            return replace(saved.branch(), made_with={**saved.made_with, "model": self.made_with["model"]})
        if self.config.resume == "no":
            sentence = f"{self.out} already holds checkpoints; give another --out, or --resume auto to continue"
            raise UsageError(sentence, "out-exists", option="out", given=str(self.out))
        saved.require_made_with(self.resumed_from, given)
        if saved.phases or self.config.phase:  # else more may change: run.json keeps what
            phases.check_begun(self.out, saved.phases, saved.phase, self.plan.phases if self.config.phase else ())
        self.batches.resume(self.resumed_from, saved)
        return saved

    # ------------------------------------------------------------------------------------------------------- a step

    @property
    def progress(self) -> float:
        """Share of the run that is done: of its time if it is by time, else of its steps."""
        return self.spent / self.plan.seconds if self.plan.seconds else self.step / self.plan.steps

    @property
    def scheduled(self) -> int:
        """The step of the schedule that comes next."""
        return self.plan.scheduled(self.step, self.progress)

    @property
    def is_done(self) -> bool:
        return self.progress >= 1

    @property
    def phase_is_done(self) -> bool:
        """Whether the run is done, or another phase begins with the next step."""
        return self.is_done or self.plan.phase_at(self.scheduled).number > self.phase.number

    def enter_next(self) -> None:
        """Goes on with the next phase. Called on every rank, once the phase before is done."""
        before, phase = self.phase, self.plan.phases[self.phase.number]
        if before.model != phase.model:  # the checkpoint that is being written has the model as it is
            self.ranks.on_first(self.writer.wait)
            self.clock.lap("waited")
        if before.layers != phase.layers:
            self._grow(phase)
        self.batches.enter(phase)
        self._apply(phase)
        self.watch.phase(self.step, phase)

    def _grow(self, phase: Phase) -> None:
        """Makes the model of a phase, if it has more layers than that of the phase before it."""
        before, old = self.learner, self.optimizer
        weights, _ = self.ranks.together(lambda: assemble.model(self.config, self.shards, phase))
        layers = [len(layers_of(model)) for model in (before.model, weights)]
        if layers[0] == layers[1]:
            return
        loss_before = self._loss()

        def renew() -> None:
            self._prepare(weights)
            if self.learner.teacher != before.teacher:
                sentence = (
                    f"--teacher {self.config.teacher} is {self.learner.teacher}, and the run began with "
                    f"{before.teacher}; give a checkpoint that does not change"
                )
                raise UsageError(sentence, "changed", option="teacher", given=self.config.teacher)
            grow.carry(before, self.learner, old, self.optimizer, stack=self.config.grow_by == "stack")

        self.ranks.together(renew)
        self.clock.lap("compiled")
        growth = {"layers_before": layers[0], "layers": layers[1], "loss_before": loss_before}
        growth |= {"loss_after": self._loss(), "parameters": sum(p.numel() for p in self.learner.parameters())}
        self.watch.growth({"step": self.step} | growth, optim.scaled_rates(assemble.sizes(self.learner), self.config))

    def _loss(self) -> float | None:
        """The loss on the validation split; on the train split of shards that have no other."""
        self._end_of_steps()
        options: dict[str, Any] = {"split": "train", "length": self.loader.length, "max_samples": EVALUATED_SAMPLES}
        held_out = self._evaluate() if self._held_out else None
        result = held_out or evaluate(self.learner, self.shards, self.ranks, **options)
        self.clock.lap("evaluated")
        return result["loss"] if result else None

    def next_batch(self) -> tuple[bertdata.Batch, float]:
        """This rank's rows of the next step, and the seconds that it took to make them."""
        self.loader.global_batch_size = self.phase.rows_at(self.scheduled)
        self.watch.stream(self.step, self.loader)
        started = time.perf_counter()
        return self.batches.next(), time.perf_counter() - started

    def begin_step(self) -> None:
        """Seeds torch by step and rank, so that dropout in a resumed run draws what the undisturbed run would have."""
        self.learner.begin_step(self.step)
        torch.manual_seed(bertdata.key(self.config.seed, "dropout", self.step, self.ranks.rank) >> 1)

    def update(self) -> None:
        """Clips the gradients and takes an optimizer step."""
        self.scaler.unscale_(self.optimizer)
        self.norm = torch.nn.utils.clip_grad_norm_(self.learner.parameters(), self.config.clip_norm)
        self.rate = self.phase.rate.at(self.scheduled)
        optim.set_learning_rate(self.optimizer, self.rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens += self.loader.global_batch_size * self.loader.length
        before, self._done = self._done, self._amounts()
        self.passed = [
            f"{unit}={number}"
            for unit, numbers in self.config.milestones.items()
            for number in numbers
            if before[unit] < number <= self._done[unit]
        ]
        if self.average and self.step % EVERY == 0 and self.progress > 1 - self.config.average:
            self.average.add()
        self.watch.advance()

    def _amounts(self) -> dict[str, float]:
        """What the run has read so far, in the units of --save-at."""
        return {"tokens": self.tokens, "words": self.batches.words() if self.config.milestones["words"] else 0.0}

    def _norm_or_none(self) -> float | None:
        """The gradient's norm; None where fp16 has overflowed, for then the scaler skips the step."""
        norm = float(self.norm)
        return None if self.scaler.is_enabled() and not math.isfinite(norm) else norm

    # ------------------------------------------------------------------------------------------ showing and keeping

    def begin(self) -> None:
        """Prints what the run is. Called on every rank."""
        self.evaluated_step = self.ranks.from_first(self._announce)

    def _announce(self) -> int:
        """Returns the step of the last evaluation in the log."""
        facts: dict[str, Any] = {
            "step": self.step,
            "resumed_from": str(self.resumed_from) if self.resumed_from else None,
            "precision": self.precision,
        }
        if self.config.lr_scale:
            facts["lr_scale"] = optim.scaled_rates(assemble.sizes(self.learner), self.config)
        if isinstance(self.learner, Elastic):
            facts["sub_networks"] = self.learner.facts()
        if self.learner.side_channel:
            facts["side_channel"] = self.learner.side_channel.facts
        for path, shards in self.datasets.items():
            if "validation" not in shards.splits and self.config.eval_every:
                where = " on it" if self.names else ""
                self.warnings.append(
                    f"{path} has no validation split, so nothing is evaluated{where}; build it with a larger "
                    "--validation"
                )
        if has_dropout(self.learner.model) and self.ranks.world_size > 1:
            self.warnings.append("the model has dropout, so another number of ranks would give another run")
        self.watch.announce(
            facts,
            parameters=sum(parameter.numel() for parameter in self.learner.parameters()),
            num_samples=self.loader.num_samples,
            lines=[*adapters.facts(self.learner.model), *self.batches.shares()],
            warnings=[*self.warnings, *self.plan.warnings],
        )
        return self.watch.last_evaluation.get("step", 0)

    def log(self, rates: Rates, *, is_last: bool) -> None:
        """Writes an entry of the log. Called on every rank; all stop together if a loss is not finite."""
        means = self.sums.take(self.ranks, self.learner.log_names())
        tokens, epochs = self.batches.source_tokens(), self.batches.epochs()
        for name in self.names:
            means["sources"][name] |= {"tokens": tokens[name], "epochs": round(epochs.get(name, 0.0), 4)}
        entry = {
            "step": self.step,
            **means,
            "lr": self.rate,
            "grad_norm": self._norm_or_none(),
            "tokens": self.tokens,
            **rates.take(self.ranks.world_size),  # after the sums, for which the host waits for the GPU
            "seconds": round(time.perf_counter() - self.watch.started, 3),
            **self.clock.entry(),
        }

        def show() -> None:
            if self.ranks.rank == 0:
                self._lock.require()
            self.watch.entry(entry, done=is_last)
            self.writer.poll()

        self.ranks.together(show)

    @property
    def evaluation_is_due(self) -> bool:
        """After the last step, and after each --eval-every steps; not twice after the same step."""
        if not self._held_out or self.step == 0 or self.evaluated_step >= self.step:
            return False
        every = self.config.eval_every
        return self.is_done or (every > 0 and self.step % every == 0)

    def evaluate(self, signals: Signals) -> bool:
        """Evaluates and shows predictions. Returns False if a signal came meanwhile; then nothing is shown."""

        def interrupted() -> bool:
            return self.ranks.any(len(signals) > 0)

        self._end_of_steps()
        before = self.clock.seconds["evaluated"]
        result = self._evaluate(interrupted=interrupted)
        if result is None:
            self.clock.lap("evaluated")
            signals.stop()
            return False
        self.evaluated_step = self.step
        if self.average and self.is_done:
            self._take_last()
            with self.average.applied():
                averaged = self._evaluate()
            assert averaged is not None  # noqa: S101  (it was not interrupted)
            result |= {f"average_{name}": averaged[name] for name in ("loss", "accuracy")}

        def show() -> None:
            shards, length = next(iter(self._held_out.values())), self.loader.length
            shown = predictions(
                self.learner, shards, self.ranks.device, split="validation", length=length, rows=1,
                masking=self._eval_masking,
            )  # fmt: skip
            self.clock.lap("evaluated")
            self.watch.evaluation(self.step, result, shown, seconds=self.clock.seconds["evaluated"] - before)

        self.ranks.on_first(show)
        self.clock.lap("evaluated")
        return True

    @property
    def _held_out(self) -> dict[str, bertdata.Dataset]:
        """The datasets of the phase that have a validation split, by path."""
        found = {path: self.datasets[path] for path, _ in self.phase.sources}
        return {path: shards for path, shards in found.items() if "validation" in shards.splits}

    @property
    def _eval_masking(self) -> bertdata.Masking:
        return replace(MASKING, probability=self.config.eval_masking)

    def _evaluate(self, **options: Any) -> dict[str, Any] | None:
        """The result of `evaluate`; in a mix the mean of each source's by weight."""
        options |= {"split": "validation", "length": self.loader.length, "max_samples": EVALUATED_SAMPLES}
        options["masking"] = self._eval_masking
        if not self.names:
            return evaluate(self.learner, self.shards, self.ranks, **options)
        results = {}
        for name, shards in self._held_out.items():
            result = evaluate(self.learner, shards, self.ranks, **options)
            if result is None:
                return None
            results[name] = result
        return mean(results, dict(self.phase.sources))

    def _end_of_steps(self) -> None:
        """Waits for the GPU, and counts the time since the last step as training; what follows is not."""
        float(self.norm)
        self.clock.lap("trained")

    def reserve(self) -> None:
        """Gets the memory for checkpoints, beside training. Called after the first step, which makes the moments."""
        if self.ranks.rank == 0:
            self.writer.reserve(self._contents())

    def save(self, *, required: bool) -> None:
        """Copies the state, and writes a checkpoint beside training, unless there is one of this step.

        Called on every rank. Waits until the checkpoint before this one is written; required: until this one is, too. A
        full disk ends no run that has steps to go: its newest checkpoint stays, and the next one may fit.
        """
        self.ranks.together(lambda: self.watch.require_finite(self.step, None, self._norm_or_none()))
        self._end_of_steps()
        self.sums.gather(self.ranks)
        self._take_last()

        def write() -> None:
            self._lock.require()
            self.writer.wait()
            if self.saved_step != self.step:
                self.writer.save(self.learner.model, self._contents(), required=required)

        self.ranks.on_first(write)
        self.clock.lap("waited")

    def _contents(self) -> dict[str, checkpoint.Content]:
        """What is saved, by the name of its directory."""
        saved = TrainState(
            step=self.step,
            tokens=self.tokens,
            seconds=self.clock.seconds,
            phase=self.phase.number,
            phases=[asdict(phase) for phase in self.plan.phases] if self.config.phase else [],
            loader=self.loader.state_dict(),
            streams=self.batches.positions,
            read=self.watch.read,
            since_entry=self.sums.state(),
            scaler=self.scaler.state_dict(),
            milestones=self.passed,
            made_with=self.made_with,
            world_size=self.ranks.world_size,
            versions=checkpoint.versions(),
        )
        content = checkpoint.content(
            learner=self.learner, optimizer=self.optimizer, saved=saved, tokenizer=self.tokenizer,
            average=self.average, about=self._card(f"{checkpoint.STEP}{self.step:08d}"),
        )  # fmt: skip
        contents = {f"{checkpoint.STEP}{self.step:08d}": content}
        if self.average and self.is_done and self.average.count:  # the mean first: without the other it is made again
            name = f"{checkpoint.AVERAGE}{self.step:08d}"
            mean = checkpoint.mean(content, self.average.weights(self.learner.model), self._card(name))
            contents = {name: mean} | contents
        return contents

    def _card(self, name: str) -> bytes:
        """The model card of a directory, with the newest evaluation. On rank 0."""
        model = self.learner.model
        facts = {
            "step": self.step, "steps": None if self.plan.seconds else self.plan.steps, "tokens": self.tokens,
            "seconds": self.clock.seconds["trained"], "ranks": self.ranks.world_size,
            "device": self.ranks.device.type, "precision": self.precision,
        }  # fmt: skip
        return card.of_run(
            self.config, name, self.sources, model_type=model.config.model_type,
            parameters=None if adapters.has_adapter(model) else sum(p.numel() for p in model.parameters()),
            facts=facts, phases=self.plan.describe(), evaluation=self.watch.last_evaluation,
            unigram=self.watch.reference["unigram"],
            regime=f"The loss is the mean over the masked tokens of at most {EVALUATED_SAMPLES:,} rows of "
            f"{self.loader.length} tokens of the validation split. {self.config.eval_masking:.0%} of their tokens are "
            "masked, whatever the masked share of the training.",
        )  # fmt: skip

    def _renew_cards(self) -> None:
        """The cards of the last step get the evaluation that came after its checkpoint. A full disk ends no run."""
        try:
            for kind in (checkpoint.STEP, checkpoint.AVERAGE):
                name = f"{kind}{self.step:08d}"
                card.renew(self.out / name, self._card(name))
        except OSError as error:
            self.watch.warn(f"the model card of step {self.step} lacks its validation loss: {error.strerror}")

    def _take_last(self) -> None:
        """At the end of a run that is too short for a mean, the mean is that of the last weights."""
        if self.average and self.is_done and not self.average.count:
            self.average.add()

    def finish(self) -> None:
        """Writes the mean of the weights, if the run had ended before it was asked for. Called on every rank.

        Warns of phases that were left out, as the last step went past the end of the time.
        """
        if self.is_done and self.ranks.rank == 0 and self.phase.number < (wanted := len(self.plan.phases)):
            self.watch.warn(
                f"the time was up in [[phase]] {self.phase.number} of {wanted}, as its last step took long; give the "
                "run more time"
            )
        if self.is_done:
            self.ranks.on_first(self._renew_cards)
        name = f"{checkpoint.AVERAGE}{self.step:08d}"
        if not (self.average and self.is_done) or self.ranks.from_first(lambda: (self.out / name).exists()):
            return
        self._take_last()

        def write() -> None:
            self.writer.save(self.learner.model, {name: self._contents()[name]}, required=True)

        self.ranks.on_first(write)

    @property
    def saved(self) -> Path | None:
        """The newest checkpoint that is on disk, on rank 0."""
        return self.writer.saved

    @property
    def saved_step(self) -> int | None:
        return int(self.saved.name.removeprefix(checkpoint.STEP)) if self.saved else None

    def describe_newest(self) -> str:
        """What a stopped run has saved: a sentence."""
        saved = f"Step {self.saved_step} is saved" if self.saved else "Nothing is saved yet"
        return f"{saved}; run the same command to continue."
