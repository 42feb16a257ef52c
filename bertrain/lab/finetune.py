"""Fine-tune a checkpoint on labelled text, over several seeds.

    bertrain finetune --checkpoint run/ --train train.tsv --dev dev.tsv --test test.tsv --out tuned/
    torchrun --nproc-per-node 8 -m bertrain finetune --seeds 8 --checkpoint run/ ...

The tasks are those of bertrain.lab.tasks: one class, a number or several labels for a text, tags of words, answers to
questions. The epoch of each seed that is best on dev is kept, as a Hugging Face directory. Several processes share out
the seeds, and a seed that is finished is not run again. --from-scratch starts from random weights, to show what
pre-training gave. With --teacher, labels to train on are those of a larger model that was fine-tuned before.
docs/finetuning.md has the files, the measures and the rules.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import operator
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tqdm import tqdm

import bertdata
from bertdata.support import OneSentence, UsageError, naming, write_file
from bertrain import card, checkpoint, optim
from bertrain.config import pick
from bertrain.lab import adapters, heads, seeds
from bertrain.lab.heads import LENGTH, Reader
from bertrain.lab.options import parse_lora
from bertrain.lab.seeds import Job, Settings
from bertrain.lab.tasks import TASKS, Columns, Data, Task
from bertrain.models.encoder import choose_attention
from bertrain.models.load import max_length
from bertrain.options import Output
from bertrain.ranks import LONGEST_WAIT, World, world
from bertrain.state import TrainingError

WARMUP = 0.1  # share of the steps
WEIGHT_DECAY = 0.01
RESULT = "result.json"
SPREAD = ("median", "min", "max")  # of a measure over seeds
Curve = list[dict[str, Any]]  # a point for each epoch


@dataclass(frozen=True)
class Work:
    """What a rank has read, and all its seeds share."""

    job: Job  # whose start and length are known
    task: Task  # which has learned its labels
    examples: dict[str, Any]  # "train", "dev", and perhaps "test"
    length: int  # of a row, in tokens
    made_of: dict[str, Any]
    ranks: World

    @functools.cached_property
    def taught(self) -> torch.Tensor | None:
        """What --teacher says of the examples to train on, as labels, on the CPU; None without a teacher."""
        if not self.job.teacher:
            return None
        return _taught(self, heads.teacher(self.job.teacher, self.task, self.job.task))


def tune(ranks: World, job: Job) -> dict[str, Any]:
    """Fine-tunes all seeds, shared out among the ranks, and writes result.json, which is returned to every rank.

    The caller is `alone` in the directory of the job. Raises UsageError if a seed there is of another one.
    """
    work, warnings = check(ranks, job)
    for warning in warnings if ranks.rank == 0 else ():
        click.echo(warning, err=True)
    runs: list[dict[str, Any]] = []
    for first in range(0, job.seeds, ranks.world_size):  # a failure of a rank is said after its seed, not after all
        mine = range(first, job.seeds)[ranks.rank : ranks.rank + 1]
        done = ranks.gather(ranks.together(lambda mine=mine: [_run(work, seed) for seed in mine]))  # type: ignore[misc]
        runs += [each for part in done for each in part]
    options = asdict(work.job.settings) | ({"teacher": job.teacher} if job.teacher else {})
    spreads = _spreads(runs, job.held_out)
    result = {"checkpoint": work.job.start, "task": job.task, "seeds": job.seeds, **options, **spreads}
    ranks.on_first(lambda: write_file(job.out / RESULT, json.dumps(result | {"runs": runs}, indent=1).encode()))
    return result


def check(ranks: World, job: Job) -> tuple[Work, list[str]]:
    """Reads all that a job names. Returns it, and what to warn of.

    Raises UsageError for what does not fit, and if a seed there is of another job.
    """
    ranks.together(lambda: _check_settings(job.settings))
    start = ranks.from_first(lambda: checkpoint.resolved(job.start))
    return ranks.together(lambda: _read(ranks, replace(job, start=start)))


def _check_settings(settings: Settings) -> None:
    """Raises UsageError for settings that do not go together."""
    if settings.lora and (settings.from_scratch or settings.freeze):
        sentence = "--lora trains an adapter on frozen weights of a checkpoint; leave out --from-scratch and --freeze"
        raise UsageError(sentence, "conflict", option="lora")
    if settings.lora:
        parse_lora(settings.lora)  # raises UsageError if it is invalid


def _check_task(job: Job) -> None:
    """Raises UsageError for a task that is unknown, or cannot have what is given."""
    if not job.columns.separator:
        sentence = "--separator is empty; give what stands between the labels of a text, such as a comma"
        raise UsageError(sentence, "missing", option="separator")
    if pick(TASKS, job.task, "--task", "docs/finetuning.md").taught is None and job.teacher:
        sentence = f"--teacher is for classes, numbers and several labels of texts; leave it out with --task {job.task}"
        raise UsageError(sentence, "conflict", option="teacher", given=job.teacher)


def _read(ranks: World, job: Job) -> tuple[Work, list[str]]:
    """As `check` says, on one rank."""
    refuse_results(job.out, suite=None)
    length = heads.length_of(job.start, job.settings.length)
    job = replace(job, settings=replace(job.settings, length=length))
    task, examples, warnings = TASKS[job.task](job.columns), {}, []
    for split, path in job.files.items():
        examples[split], more = task.read(path)
        warnings += more
    warnings += task.learn(examples["train"])  # which may choose the measure, too
    warnings += heads.take_order(job.start, task)
    warnings += heads.ends_warning(job.start)
    task.main = job.main or task.main
    made_of = seeds.made_of(job, task)
    seeds.refuse_others(job.out, made_of)
    return Work(job, task, examples, length, made_of, ranks), warnings


def _run(work: Work, seed: int) -> dict[str, Any]:
    """What a seed gave, which is trained now if it is not finished. Prints its measures."""
    run = seeds.finished(work.job.out, seed) or train_seed(work, seed)
    shown = "; ".join(
        f"{split} " + ", ".join(f"{metric} {value:.4f}" for metric, value in run[split].items())
        for split in work.job.held_out
    )
    click.echo(f"seed {seed}: best after epoch {run['best_epoch']}: {shown}", err=True)
    return run


@contextlib.contextmanager
def alone(ranks: World, out: Path) -> Iterator[None]:
    """Makes --out, and keeps a second job out of it until the context ends."""

    with contextlib.ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(checkpoint.lock(out)))
        yield


def refuse_results(out: Path, suite: str | None) -> None:
    """Raises UsageError if result.json in --out is of another command. suite: its name; None: of finetune."""
    try:
        before = json.loads((out / RESULT).read_bytes()).get("suite")
    except (FileNotFoundError, ValueError, AttributeError, RecursionError):
        return
    if before != suite:
        command = f"suite {before}" if before else "finetune"
        sentence = f"--out {out} holds results of bertrain {command}; give another --out"
        raise UsageError(sentence, "out-exists", option="out", given=str(out))


def _spreads(runs: list[dict[str, Any]], splits: list[str]) -> dict[str, dict[str, float]]:
    """The median, min and max over runs of each measure, as "dev_accuracy"."""
    spreads = {}
    for split in splits:
        for metric in runs[0][split]:
            values = [run[split][metric] for run in runs]
            spread = dict(zip(SPREAD, (statistics.median(values), min(values), max(values)), strict=True))
            spreads[f"{split}_{metric}"] = {what: round(value, 5) for what, value in spread.items()}
    return spreads


@torch.no_grad()
def _taught(work: Work, teacher: Reader) -> torch.Tensor:
    """The labels that a teacher gives the examples to train on."""
    length = min(work.length, max_length(teacher.model.config))
    rows = work.task.encode(teacher.tokenizer, work.examples["train"], length)[0].rows
    teacher.model.to(work.ranks.device).eval()
    batches, total = teacher.all_logits(rows), -(-len(rows) // heads.rows_at_once(rows))
    shown = tqdm(batches, total=total, desc="teacher", unit="batch", leave=False, disable=None)
    assert work.task.taught is not None  # noqa: S101  (main has asked)
    return work.task.taught(torch.cat([logits.cpu() for logits in shown]))


def train_seed(work: Work, seed: int) -> dict[str, Any]:
    """Trains one seed, and writes its model. Returns the curve, the best epoch, and its measures by split."""
    taught = work.taught  # the teacher first, as it may draw
    torch.manual_seed(bertdata.key(seed, "finetune") >> 1)
    reader, bf16 = _start(work, seed)
    files = heads.tokenizer_files(work.job.start, reader.tokenizer)
    sets: dict[str, Data] = {}
    for name, part in work.examples.items():
        sets[name], warnings = work.task.encode(reader.tokenizer, part, work.length)
        for warning in warnings if seed == 0 else ():
            click.echo(warning, err=True)
    data = sets.pop("train")
    data = data if taught is None else data._replace(labels=taught)
    curve, weights = _trained(work, reader, data, sets, seed=seed, bf16=bf16)
    best = _best(curve, work.task)
    scores = {name: best[name] for name in sets}
    run = {"seed": seed, "best_epoch": best["epoch"], **scores, "curve": curve}
    out = seeds.place(work.job.out, seed)
    files |= {
        card.CARD: _card(work, reader, seed, best["epoch"], rows=len(data.rows), scores=scores),
        seeds.SEED: json.dumps({"of": work.made_of, "run": run}, indent=1).encode(),
    }
    _write(out, reader, weights, files)
    return run


def _start(work: Work, seed: int) -> tuple[Reader, bool]:
    """The model of a seed before training, on its device, and whether its matrix products are in bfloat16."""
    settings, device, directory = work.job.settings, work.ranks.device, work.job.start
    model, num_loaded = heads.load(directory, work.task, from_scratch=settings.from_scratch, dropout=settings.dropout)
    bf16 = heads.is_bf16(model, settings.precision, device)
    choose_attention(model, "auto", precision="bf16" if bf16 else "fp32", device=device, length=work.length)
    num_tensors = len(model.base_model.state_dict())
    click.echo(f"seed {seed}: loaded {num_loaded} of {num_tensors} encoder tensors from {directory}", err=True)
    if settings.lora:
        adapters.add(model, parse_lora(settings.lora), seed=seed, whole=adapters.heads_of(model))
    if settings.freeze:
        model.requires_grad_(False)
        for name in adapters.heads_of(model):
            model.get_submodule(name).requires_grad_(True)
    tokenizer = heads.padding_tokenizer(directory, "checkpoint")
    model.to(device).train()  # type: ignore[arg-type]  # transformers gives `to` a wrong type
    return Reader(model, tokenizer, work.task), bf16


def _trained(
    work: Work, reader: Reader, data: Data, held_out: dict[str, Data], *, seed: int, bf16: bool
) -> tuple[Curve, dict[str, torch.Tensor]]:
    """Trains a model. Returns its curve, and the weights after the best epoch."""
    settings, task, model = work.job.settings, work.task, reader.model
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=bf16)
    optimizer = torch.optim.AdamW(optim.parameter_groups(model, WEIGHT_DECAY), lr=0.0, fused=True)
    steps = settings.epochs * -(-len(data.rows) // settings.batch_size)
    rates = optim.Curve(peak=settings.lr, steps=steps, warmup_steps=round(WARMUP * steps), schedule="linear")
    curve: Curve = []
    weights: dict[str, torch.Tensor] = {}
    hidden = None if work.ranks.rank == 0 else True
    step, bar = 0, tqdm(total=steps, desc=f"seed {seed}", unit="step", leave=False, disable=hidden)
    for epoch in range(settings.epochs):
        losses, sizes, draw = [], [], np.random.default_rng(bertdata.key(seed, "order", epoch))
        for chosen in _batches(data.rows, settings.batch_size, draw):
            with autocast:
                logits = reader.logits([data.rows[i] for i in chosen])
            loss = task.loss(logits, data.labels[chosen].to(model.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.set_learning_rate(optimizer, rates.rate(step))
            optimizer.step()
            bar.update()
            optimizer.zero_grad()
            step += 1
            losses.append(loss.detach())  # read at the end of the epoch: a GPU does not wait for each
            sizes.append(chosen.size)
        train_loss = sum(map(operator.mul, torch.stack(losses).tolist(), sizes)) / len(data.rows)
        if not math.isfinite(train_loss):
            raise _diverged(f"seed {seed}: the loss is {train_loss}", epoch, settings.lr)
        with autocast:
            scores = {name: _score(reader, part) for name, part in held_out.items()}
        if not all(scores.values()):
            raise _diverged(f"seed {seed}: predictions are not finite", epoch, settings.lr)
        curve.append({"epoch": epoch + 1, "train_loss": train_loss, **scores})
        best = _best(curve, task)
        if best is curve[-1]:
            weights = copy.deepcopy(model.state_dict())
        elif settings.patience and len(curve) - best["epoch"] >= settings.patience:
            break
    bar.close()
    return curve, weights


def _diverged(what: str, epoch: int, lr: float) -> TrainingError:
    sentence = f"{what} in epoch {epoch + 1}; lower --lr {lr} and run again"
    return TrainingError(sentence, "not-finite", option="lr", given=lr)


def _best(curve: Curve, task: Task) -> dict[str, Any]:
    """The point of the best epoch on dev, the first of equal ones."""
    return max(curve, key=lambda point: point["dev"][task.main])


def _batches(rows: list[Any], batch_size: int, draw: np.random.Generator) -> list[np.ndarray]:
    """All rows in a random order, those of a batch of about the same length: of 32 batches, the shortest together."""
    order, pool = draw.permutation(len(rows)), 32 * batch_size
    lengths = np.array([len(row["input_ids"]) for row in rows])
    pools = (order[first : first + pool] for first in range(0, len(rows), pool))
    alike = [part[np.argsort(lengths[part], kind="stable")] for part in pools]
    batches = [part[first : first + batch_size] for part in alike for first in range(0, len(part), batch_size)]
    return [batches[i] for i in draw.permutation(len(batches))]


@torch.no_grad()
def _score(reader: Reader, data: Data) -> dict[str, float]:
    """The measures of a model on held-out examples; none if it gives what is not finite."""
    reader.model.eval()
    answers: list[torch.Tensor] = []
    is_finite = True
    for logits in reader.all_logits(data.rows):
        is_finite = is_finite and bool(logits.isfinite().all())
        answers += reader.task.answer(logits).cpu()
    reader.model.train()
    return reader.task.score(answers, data.gold) if is_finite else {}


def _card(
    work: Work, reader: Reader, seed: int, epoch: int, *, rows: int, scores: dict[str, dict[str, float]]
) -> bytes:
    """The card of a seed. epoch: the best one. rows: to train on."""
    settings = work.job.settings
    facts = {
        "seed": seed,
        "epoch": epoch,
        "epochs": settings.epochs,
        "rows": rows,
        "batch size": settings.batch_size,
        "lr": settings.lr,
        "length": work.length,
        "dropout": settings.dropout,
        "adapter": settings.lora or "none",
        "frozen": "the encoder" if settings.freeze or settings.lora else "nothing",
        "start": "random weights" if settings.from_scratch else "those of the checkpoint",
    }
    measures = {f"{split} {name}": f"{value:.4f}" for split, part in scores.items() for name, value in part.items()}
    return card.content(
        seeds.place(work.job.out, seed).name,
        f"A model that bertrain fine-tuned from `{Path(work.job.start).name}`. Its measures are those of the epoch "
        "that was best on dev; so dev is no held-out text.",
        config=reader.model.config,
        head=work.task.head.__name__,
        parts={"Training": facts, "Measures": measures},
    )


def _write(out: Path, reader: Reader, weights: dict[str, torch.Tensor], files: dict[str, bytes]) -> None:
    """Writes the model of a seed, complete or not at all. files: by name, what else is in its directory."""
    # Each rank has a model of its own, and transformers would save that of rank 0 alone.
    reader.model.should_save_on_this_rank = lambda is_main_process: is_main_process
    with naming(out), checkpoint.publish(out) as temporary:
        adapters.save(reader.model, weights, temporary)
        for name, content in files.items():
            (temporary / name).write_bytes(content)


def show(what: str, seeds: int, spreads: dict[str, dict[str, float]], *, width: int) -> None:
    """Prints the median, min and max over seeds of measures by name. what: the checkpoint and what it was tuned for."""
    of_seeds = "1 seed, its best epoch" if seeds == 1 else f"{seeds} seeds, the best epoch of each"
    click.echo(f"{what}, {of_seeds} on dev")
    click.echo(f"  {'':<{width}}" + "".join(f"{kind:>10}" for kind in SPREAD))
    for name, spread in spreads.items():
        click.echo(f"  {name:<{width}}" + "".join(f"{spread[kind]:>10.4f}" for kind in SPREAD))


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that `finetune` and `suite` share."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


OPTIONS = (
    click.option("--checkpoint", "start", required=True, help="A run directory, a checkpoint, or a hub name."),
    click.option("--out", required=True, type=Output(), help="Directory for result.json and a model for each seed."),
    click.option("--seeds", default=3, type=click.IntRange(min=1), help="Number of runs, with seeds 0, 1, ..."),
    click.option("--epochs", default=3, type=click.IntRange(min=1), help="Number of epochs."),
    click.option(
        "--patience",
        type=click.IntRange(min=1),
        help="End a seed after this number of epochs without a better result on dev.",
    ),
    click.option("--batch-size", default=32, type=click.IntRange(min=1), help="Rows in one optimizer step."),
    click.option("--lr", default=5e-5, type=click.FloatRange(min=0, min_open=True), help="Peak learning rate."),
    click.option(
        "--length",
        type=click.IntRange(min=3),
        help=f"Longest row in tokens; longer texts are cut. Default: {LENGTH}, or the positions of a smaller model.",
    ),
    click.option(
        "--dropout",
        default=0.1,
        type=click.FloatRange(0, 1, max_open=True),
        help="Dropout probability, also for models that were pre-trained without dropout.",
    ),
    click.option(
        "--precision",
        type=click.Choice(["auto", "fp32", "bf16"]),
        default="auto",
        help="Number format of matrix products. auto: bf16 on GPUs since Ampere, else fp32.",
    ),
    click.option(
        "--lora",
        help="Train only an adapter and the head, such as r=8,alpha=16 (docs/methods.md).  [default: off]",
    ),
    click.option(
        "--freeze",
        type=click.Choice(["all"]),
        help="all: train only the head, on frozen weights (a linear probe); it needs a higher --lr.  [default: off]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line."),
    click.option("--from-scratch", is_flag=True, help="Start from random weights, for comparison."),
)


@click.command(
    cls=OneSentence,
    epilog="\b\nExample:\n  bertrain finetune --checkpoint run/ --train train.tsv --dev dev.tsv --out tuned/",
)
@click.option("--train", required=True, help="Examples to train on: TSV, CSV, JSON lines or Parquet.")
@click.option("--dev", required=True, help="Examples for choosing the best epoch, in the same formats.")
@click.option("--test", help="Examples for the final result, with the best epoch.")
@click.option(
    "--task",
    default="classification",
    help="What labels are. classification: classes. regression: numbers. multilabel: several labels of a text. token: "
    "tags of words. qa: answers (SQuAD). pairs: classes of pairs. choice: one of several choices. coreference: whether "
    "a pronoun means a noun. copa, multirc, wic: files of these tasks of SuperGLUE.",
)
@click.option(
    "--text",
    default="0",
    help="Column of the text: its name, or its number from 0. The first row is a header if it has one of the names, or "
    "label.",
)
@click.option(
    "--other",
    default="",
    show_default=False,
    help="Column of the second text of a pair, or of the list of choices. Default: none; 1 for pairs.",
)
@click.option("--label", default="-1", help="Column of the label: its name or number; -1 is the last.")
@click.option("--separator", default=",", help="Separator of the labels of a text, for multilabel.")
@click.option(
    "--teacher",
    help="Directory of a model that finetune made for this task, such as tuned/seed-0. Its predictions are then the "
    "labels to train on; those of --train are not used.",
)
@common
def main(*, start: str, out: str, seeds: int, task: str, teacher: str | None, as_json: bool, **given: Any) -> None:
    """Fine-tune a checkpoint for a task, over several seeds. Also under torchrun: ranks train different seeds.

    The learning rate rises over the first tenth of the steps and then falls to 0; weight decay is 0.01.
    """
    columns = Columns(*(given.pop(name) for name in ("text", "other", "label", "separator")))
    paths = {split: given.pop(split) for split in ("train", "dev", "test")}
    job = Job(
        start=start,
        task=task,
        columns=columns,
        files={split: path for split, path in paths.items() if path},
        out=Path(out),
        seeds=seeds,
        settings=Settings(**given),
        teacher=teacher,
    )
    with world(LONGEST_WAIT) as ranks:
        ranks.together(lambda: _check_task(job))
        with alone(ranks, job.out):
            result = tune(ranks, job)
    if ranks.rank:
        return
    if as_json:
        click.echo(json.dumps(result))
        return
    spreads = {name.replace("_", " "): spread for name, spread in result.items() if isinstance(spread, dict)}
    show(f"{start}: {task}", job.seeds, spreads, width=18)
    click.echo(f"models and {RESULT} are in {out}")


if __name__ == "__main__":
    main()
