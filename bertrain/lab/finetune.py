"""Fine-tune a checkpoint on labelled text, over several seeds.

    bertrain finetune --checkpoint run/ --train train.tsv --dev dev.tsv --test test.tsv --out tuned/
    torchrun --nproc-per-node 8 -m bertrain finetune --seeds 8 --checkpoint run/ ...

The tasks are those of bertrain.lab.tasks: one class, a number or several labels for a text, tags of words, answers to
questions. The best epoch of each seed on dev is saved as a Hugging Face directory. Several processes divide the seeds,
and a finished seed is not run again. --from-scratch starts from random weights, to measure the gain of pre-training.
With --teacher, training labels are the predictions of a larger model that was fine-tuned before. docs/tasks.md
describes the files, the measures and the rules.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tqdm import tqdm

import bertdata
from bertdata.support import OneSentence, UsageError, write_file
from bertrain import card, checkpoint, optim
from bertrain.cli import flags_of
from bertrain.config import pick
from bertrain.lab import adapters, heads, seeds
from bertrain.lab.heads import Reader
from bertrain.lab.options import JSON, from_flags, parse_lora
from bertrain.lab.seeds import Job
from bertrain.lab.tasks import TASKS, Columns, Data, Example, Task
from bertrain.models.encoder import choose_attention
from bertrain.models.load import max_length
from bertrain.ranks import LONGEST_WAIT, World, world
from bertrain.state import TrainingError

WARMUP = 0.1  # share of the steps
WEIGHT_DECAY = 0.01
RESULT = "result.json"
SPREAD: dict[str, Any] = {"median": statistics.median, "min": min, "max": max}  # summaries of a measure over seeds
Curve = list[dict[str, Any]]  # one point per epoch


@dataclass(frozen=True)
class Inputs:
    """The data that a rank has read, which all its seeds share."""

    job: Job  # with a resolved checkpoint and length
    task: Task  # after `learn`
    examples: dict[str, list[Example]]  # "train", "dev", and perhaps "test"
    warnings: list[str]
    settings_key: dict[str, Any]
    ranks: World

    @functools.cached_property
    @torch.no_grad()
    def taught(self) -> torch.Tensor | None:
        """The labels that --teacher predicts for the training examples, on the CPU; None without a teacher."""
        if not self.job.teacher or not self.task.taught:
            return None
        teacher = heads.teacher(self.job.teacher, self.task, self.job.task)
        length = min(self.job.length or 0, max_length(teacher.model.config))
        rows = self.task.encode(teacher.tokenizer, self.examples["train"], length)[0].rows
        teacher.model.to(self.ranks.device).eval()
        batches = tqdm(teacher.all_logits(rows), desc="teacher", unit="batch", leave=False, disable=None)
        return self.task.taught(torch.cat([logits.cpu() for logits in batches]))


def read(ranks: World, job: Job) -> Inputs:
    """Read all files of a job. Raises UsageError if they do not fit, or if a seed belongs to a different job."""
    start = ranks.from_first(lambda: checkpoint.resolved(job.checkpoint))

    def read_files() -> Inputs:
        kind = pick(TASKS, job.task, "--task", "docs/tasks.md")
        task = kind(Columns(job.text, job.other, job.label, job.separator, job.skip))
        if job.teacher and not task.taught:
            sentence = f"--teacher gives no labels for --task {job.task}; leave it out"
            raise UsageError(sentence, "conflict", option="teacher", given=job.teacher)
        known = replace(job, checkpoint=start, length=heads.length_of(start, job.length))
        parts = {split: task.read(path) for split, path in job.files.items()}
        task.learn(parts["train"][0])
        of_files = [line for _, lines in parts.values() for line in lines]
        warnings = [*of_files, *heads.take_order(start, task), *heads.ends_warning(start)]
        task.main = job.measure or task.main
        settings_key = seeds.settings_key(known, task)
        seeds.refuse_others(Path(job.out), settings_key)
        return Inputs(known, task, {split: part for split, (part, _) in parts.items()}, warnings, settings_key, ranks)

    return ranks.together(read_files)


def tune(ranks: World, job: Job) -> dict[str, Any]:
    """Fine-tune all seeds, divided among the ranks, and write result.json, which is returned on every rank.

    The caller holds `alone` for the directory of the job. Raises UsageError if a seed there belongs to a different job.
    """
    inputs = read(ranks, job)
    for warning in inputs.warnings if ranks.rank == 0 else ():
        click.echo(warning, err=True)
    runs: list[dict[str, Any]] = []
    for first in range(0, job.seeds, ranks.world_size):  # report an error of a rank after its seed, not after all seeds
        mine = range(first, job.seeds)[ranks.rank : ranks.rank + 1]
        done = ranks.gather(ranks.together(lambda mine=mine: [_run(inputs, seed) for seed in mine]))  # type: ignore[misc]
        runs += [each for part in done for each in part]
    result = {"checkpoint": inputs.job.checkpoint, "task": job.task, "seeds": job.seeds, **inputs.job.settings}
    result |= {"teacher": job.teacher} if job.teacher else {}
    for split in [*job.files][1:]:
        for metric in runs[0][split]:
            values = [run[split][metric] for run in runs]
            result[f"{split}_{metric}"] = {name: spread(values) for name, spread in SPREAD.items()}
    content = json.dumps(result | {"runs": runs}, indent=1).encode()
    ranks.on_first(lambda: write_file(Path(job.out, RESULT), content))
    return result


def _run(inputs: Inputs, seed: int) -> dict[str, Any]:
    """Return the result of a seed, after training it if it is not finished. Prints its measures."""
    directory = Path(inputs.job.out, f"seed-{seed}")
    run = seeds.finished(directory) or train_seed(inputs, seed, directory)
    splits = [*inputs.job.files][1:]
    measures = (f"{split} {metric} {value:.4f}" for split in splits for metric, value in run[split].items())
    click.echo(f"seed {seed}: best after epoch {run['best_epoch']}: {', '.join(measures)}", err=True)
    return run


@contextlib.contextmanager
def alone(ranks: World, out: str, suite: str | None = None) -> Iterator[None]:
    """Create --out, and keep other jobs out of it until the context ends.

    suite: the name of the suite that writes results there. Raises UsageError if it has results of a different command.
    """

    def enter() -> None:
        stack.enter_context(checkpoint.lock(Path(out)))
        before = suite
        with contextlib.suppress(FileNotFoundError, ValueError, AttributeError, RecursionError):
            before = json.loads(Path(out, RESULT).read_bytes()).get("suite")
        if before != suite:
            sentence = f"--out {out} holds results of bertrain {f'suite {before}' if before else 'finetune'}"
            raise UsageError(f"{sentence}; give a different --out", "out-exists", option="out", given=out)

    with contextlib.ExitStack() as stack:
        ranks.on_first(enter)
        yield


def train_seed(inputs: Inputs, seed: int, out: Path) -> dict[str, Any]:
    """Train one seed, and write its model to `out`. Return the curve, the best epoch, and its measures by split."""
    job, taught = inputs.job, inputs.taught  # the teacher first, as it may use random numbers
    torch.manual_seed(bertdata.key(seed, "finetune") >> 1)
    reader, bf16 = _start(inputs, seed)
    files = heads.tokenizer_files(job.checkpoint, reader.tokenizer)
    sets: dict[str, Data] = {}
    for name, part in inputs.examples.items():
        sets[name], warnings = inputs.task.encode(reader.tokenizer, part, job.length or 0)
        for warning in warnings if seed == 0 else ():
            click.echo(warning, err=True)
    data = sets.pop("train")
    data = data if taught is None else data._replace(labels=taught)
    curve, best, weights = _trained(inputs, reader, data, sets, seed=seed, bf16=bf16)
    scores = {name: best[name] for name in sets}
    run = {"seed": seed, "best_epoch": best["epoch"], **scores, "curve": curve}
    facts = {"seed": seed, "epoch": best["epoch"], "rows": len(data.rows)}
    given = {name: value for name, value in job.settings.items() if value is not None and value is not False}
    facts |= {name.replace("_", " "): value for name, value in given.items()}
    measures = {f"{split} {name}": f"{value:.4f}" for split, part in scores.items() for name, value in part.items()}
    files[card.CARD] = card.content(
        out.name,
        f"A model that bertrain fine-tuned from `{Path(job.checkpoint).name}`. Its measures are those of the epoch "
        "that was best on dev; so dev is no held-out text.",
        config=reader.model.config,
        head=inputs.task.head.__name__,
        parts={"Training": facts, "Measures": measures},
    )
    files[seeds.SEED] = json.dumps({"of": inputs.settings_key, "run": run}, indent=1).encode()
    # Each rank has its own model, but transformers would only save that of rank 0.
    reader.model.should_save_on_this_rank = lambda is_main_process: is_main_process
    with checkpoint.publish(out) as temporary:
        adapters.save(reader.model, weights, temporary)
        for name, content in files.items():
            (temporary / name).write_bytes(content)
    return run


def _start(inputs: Inputs, seed: int) -> tuple[Reader, bool]:
    """Return the model of a seed before training, on its device, and whether its matrix products are in bfloat16."""
    job, device = inputs.job, inputs.ranks.device
    model = heads.load(job.checkpoint, inputs.task, from_scratch=job.from_scratch, dropout=job.dropout)
    bf16 = heads.is_bf16(model, job.precision, device)
    choose_attention(model, "auto", precision="bf16" if bf16 else "fp32", device=device, length=job.length or 0)
    if job.lora:
        adapters.add(model, parse_lora(job.lora), seed=seed, in_full=adapters.heads_of(model))
    if job.freeze:
        model.requires_grad_(False)
        for name in adapters.heads_of(model):
            model.get_submodule(name).requires_grad_(True)
    tokenizer = heads.tokenizer_of(job.checkpoint)
    if getattr(model.config, "pad_token_id", None) is None:  # heads of decoders need the id
        model.config.pad_token_id = tokenizer.pad_token_id
    model.to(device).train()  # type: ignore[arg-type]  # transformers gives `to` a wrong type
    return Reader(model, tokenizer, inputs.task), bf16


def _trained(
    inputs: Inputs, reader: Reader, data: Data, held_out: dict[str, Data], *, seed: int, bf16: bool
) -> tuple[Curve, dict[str, Any], dict[str, torch.Tensor]]:
    """Train a model. Return its curve, and the point and the weights of the best epoch on dev, on the CPU."""
    job, task, model, device = inputs.job, inputs.task, reader.model, inputs.ranks.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    optimizer = torch.optim.AdamW(optim.parameter_groups(model, WEIGHT_DECAY), lr=0.0, fused=True)
    steps = job.epochs * -(-len(data.rows) // job.batch_size)
    rates = optim.Curve(peak=job.lr, steps=steps, warmup_steps=round(WARMUP * steps), schedule="linear")
    curve: Curve = []
    best: dict[str, Any] = {}
    weights: dict[str, torch.Tensor] = {}
    step = 0
    for epoch in range(1, job.epochs + 1):
        total = torch.zeros((), dtype=torch.float64, device=device)  # no step waits for the GPU
        draw, shown = np.random.default_rng(bertdata.key(seed, "order", epoch - 1)), f"seed {seed}, epoch {epoch}"
        batches = _batches(data.rows, job.batch_size, draw)
        for chosen in tqdm(batches, desc=shown, unit="step", leave=False, disable=inputs.ranks.rank > 0 or None):
            with autocast:
                logits = reader.logits([data.rows[i] for i in chosen])
            loss = task.loss(logits, data.labels[chosen].to(device, non_blocking=True))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.set_learning_rate(optimizer, rates.rate(step))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            total += loss.detach().double() * chosen.size
        train_loss = total.item() / len(data.rows)
        with autocast:
            scores = {name: _score(reader, part) for name, part in held_out.items()}
        if not math.isfinite(train_loss) or not all(scores.values()):
            sentence = f"seed {seed}, epoch {epoch}: the loss ({train_loss}) or a prediction is not finite; lower --lr"
            raise TrainingError(f"{sentence} {job.lr} and run again", "not-finite", option="lr", given=job.lr)
        curve.append({"epoch": epoch, "train_loss": train_loss, **scores})
        if not best or scores["dev"][task.main] > best["dev"][task.main]:
            best = curve[-1]
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
        elif job.patience and epoch - best["epoch"] >= job.patience:
            break
    return curve, best, weights


def _batches(rows: list[Any], batch_size: int, draw: np.random.Generator) -> list[np.ndarray]:
    """Return all rows in random order, in batches of similar length: each group of 32 batches is sorted by length."""
    order, pool = draw.permutation(len(rows)), 32 * batch_size
    lengths = np.array([len(row["input_ids"]) for row in rows])
    pools = (order[first : first + pool] for first in range(0, len(rows), pool))
    alike = [part[np.argsort(lengths[part], kind="stable")] for part in pools]
    batches = [part[first : first + batch_size] for part in alike for first in range(0, len(part), batch_size)]
    return [batches[i] for i in draw.permutation(len(batches))]


@torch.no_grad()
def _score(reader: Reader, data: Data) -> dict[str, float]:
    """Return the measures of a model on held-out examples; empty if some logits are not finite."""
    reader.model.eval()
    answers: list[torch.Tensor] = []
    is_finite = True
    for logits in reader.all_logits(data.rows):
        is_finite = is_finite and bool(logits.isfinite().all())
        answers += reader.task.answer(logits).cpu()
    reader.model.train()
    return reader.task.score(answers, data.gold) if is_finite else {}


def show(what: str, num_seeds: int, spreads: dict[str, dict[str, float]], files: str) -> None:
    """Print median, min and max over seeds of each measure. what: names of the checkpoint and the task."""
    width = max(map(len, spreads))
    click.echo(f"{what}: seeds: {num_seeds}, the best epoch of each on dev")
    click.echo(f"  {'':<{width}}" + "".join(f"{kind:>10}" for kind in SPREAD))
    for name, spread in spreads.items():
        click.echo(f"  {name.replace('_', ' '):<{width}}" + "".join(f"{value:>10.4f}" for value in spread.values()))
    click.echo(files)


@click.command(
    cls=OneSentence,
    params=[*flags_of(Job), JSON],
    epilog="\b\nExample:\n  bertrain finetune --checkpoint run/ --train train.tsv --dev dev.tsv --out tuned/",
)
def main(*, as_json: bool, **flags: Any) -> None:
    """Fine-tune a checkpoint for a task, over several seeds. Also under torchrun: ranks train different seeds.

    The learning rate rises over the first tenth of the steps and then falls to 0; weight decay is 0.01.
    """
    with world(LONGEST_WAIT) as ranks:
        job = ranks.together(lambda: from_flags(Job, flags))
        with alone(ranks, job.out):
            result = tune(ranks, job)
    if ranks.rank == 0 and as_json:
        click.echo(json.dumps(result))
    elif ranks.rank == 0:
        spreads = {name: spread for name, spread in result.items() if isinstance(spread, dict)}
        show(f"{job.checkpoint}, {job.task}", job.seeds, spreads, f"models and {RESULT} are in {job.out}")
