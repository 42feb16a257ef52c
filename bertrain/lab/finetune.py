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
import hashlib
import json
import math
import statistics
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

import bertdata
from bertdata.cli import OneSentence
from bertdata.errors import UsageError
from bertdata.files import fsync_directory, naming, write_file
from bertrain import optim
from bertrain.lab import adapters
from bertrain.lab.tasks import TASKS, Columns, Data, Task
from bertrain.models.build import choose_attention, max_length, may_be_on_hub, needed
from bertrain.models.families import DROPOUTS, HEAD_DROPOUTS, family_of
from bertrain.options.config import pick
from bertrain.run import card, checkpoint
from bertrain.run.rates import has_bf16
from bertrain.run.watch import TrainingError
from bertrain.runtime.dist import World, world

WARMUP = 0.1  # share of the steps
WEIGHT_DECAY = 0.01
PATIENCE = timedelta(days=30)  # a rank waits so long for the seeds of the others
RESULT, SEED_RESULT = "result.json", "seed.json"
SPREAD = ("median", "min", "max")  # of a measure over seeds
ROWS = 64  # of a batch that is scored
LENGTH = 128  # tokens of a row, if neither the user nor the model wants another number


def tune(
    ranks: World,
    start: str,
    name: str,
    columns: Columns,
    files: dict[str, str],
    out: Path,
    *,
    seeds: int,
    main: str | None = None,
    teacher: str | None = None,
    lora: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Fine-tunes all seeds, shared out among the ranks, and writes result.json, which is returned to every rank.

    name: of the task. files: the paths of "train" and "dev", and perhaps "test". main: the measure that chooses the
    epoch, if not the task's own. teacher: the directory of a fine-tuned model that gives the labels to train on.
    options: the others of `common`. The caller is `alone` in `out`. Raises UsageError if a seed there is of other
    options, files or weights.
    """
    if lora and options["from_scratch"]:
        sentence = "--from-scratch and --lora were given; --lora trains beside the checkpoint's weights, so give one"
        raise UsageError(sentence, "conflict", option="from_scratch")
    if lora:
        adapters.parse(lora)  # refuses what is none
        options["lora"] = lora
    task, directory = TASKS[name](columns), ranks.from_first(lambda: resolved(start))

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        refuse_results(out, suite=None)
        options["length"] = _length(directory, options["length"])
        parts = _examples(task, files, quiet=ranks.rank != 0)
        task.main = main or task.main
        made_of = {"checkpoint": directory, "task": name, **_contents(task, files, directory, teacher), **options}
        _refuse_seeds(out, made_of)
        return parts, made_of

    parts, made_of = ranks.together(read)
    train = parts.pop("train")
    # Once for all seeds of this rank.
    answers = functools.cache(lambda: _answers(str(teacher), task, train, options["length"], ranks.device))

    def run(seed: int) -> dict[str, Any]:
        finished = _finished(out, seed)
        if finished is None:
            taught = answers() if teacher else None  # first, as it may draw
            finished = finetune(made_of, task, train, parts, taught, seed=seed, out=_place(out, seed), ranks=ranks)
        _say(finished, list(parts))
        return finished

    runs: list[dict[str, Any]] = []
    for first in range(0, seeds, ranks.world_size):  # a failure of a rank is said after its seed, not after all seeds
        mine = range(first, seeds)[ranks.rank : ranks.rank + 1]
        done = ranks.gather(ranks.together(lambda mine=mine: [run(seed) for seed in mine]))  # type: ignore[misc]
        runs += [each for part in done for each in part]
    options |= {"teacher": teacher} if teacher else {}
    result = {"checkpoint": directory, "task": name, "seeds": seeds, **options, **_spreads(runs, list(parts))}
    ranks.on_first(lambda: write_file(out / RESULT, json.dumps(result | {"runs": runs}, indent=1).encode()))
    return result


def _examples(task: Task, files: dict[str, str], *, quiet: bool) -> dict[str, Any]:
    """Split → its examples, from which the task has learned its labels. quiet: prints no warnings."""
    parts, warnings = {}, []
    for split, path in files.items():
        parts[split], more = task.read(path)
        warnings += more
    warnings += task.learn(parts["train"])
    for warning in () if quiet else warnings:
        click.echo(warning, err=True)
    return parts


def _contents(task: Task, files: dict[str, str], directory: str, teacher: str | None) -> dict[str, Any]:
    """What seed.json says of the files: their columns, the measure, and the digests of all that is read."""
    digests = {split: _digest([Path(file) for file in task.files(path)]) for split, path in files.items()}
    known = {
        "columns": list(task.columns),
        "main": task.main,
        "files": digests,
        "weights": _digest(_weights(directory)),
    }
    return known | ({"teacher": _digest(_weights(teacher))} if teacher else {})


def _say(run: dict[str, Any], splits: list[str]) -> None:
    """Prints the measures of a seed."""
    shown = "; ".join(
        f"{split} " + ", ".join(f"{metric} {value:.4f}" for metric, value in run[split].items()) for split in splits
    )
    click.echo(f"seed {run['seed']}: best after epoch {run['best_epoch']}: {shown}", err=True)


@contextlib.contextmanager
def alone(ranks: World, out: Path) -> Iterator[None]:
    """Makes --out, and keeps a second job out of it until the context ends."""

    with contextlib.ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(checkpoint.Lock(out)))
        yield


def refuse_results(out: Path, suite: str | None) -> None:
    """Raises UsageError if result.json in --out is of another command. suite: its name; None: of finetune."""
    try:
        before = json.loads((out / RESULT).read_bytes()).get("suite")
    except (FileNotFoundError, ValueError, AttributeError):
        return
    if before != suite:
        command = f"suite {before}" if before else "finetune"
        sentence = f"--out {out} holds results of bertrain {command}; give another --out"
        raise UsageError(sentence, "out-exists", option="out", given=str(out))


def resolved(start: str) -> str:
    """The directory of a checkpoint, the newest one of a run; a name on the hub as it is."""
    return str(checkpoint.find(Path(start))) if Path(start).is_dir() else start


def _spreads(runs: list[dict[str, Any]], splits: list[str]) -> dict[str, dict[str, float]]:
    """The median, min and max over runs of each measure, as "dev_accuracy"."""
    spreads = {}
    for split in splits:
        for metric in runs[0][split]:
            values = [run[split][metric] for run in runs]
            spread = dict(zip(SPREAD, (statistics.median(values), min(values), max(values)), strict=True))
            spreads[f"{split}_{metric}"] = {what: round(value, 5) for what, value in spread.items()}
    return spreads


def _weights(directory: str) -> list[Path]:
    """The files of a model: its weights, configuration and tokenizer."""
    return sorted(path for path in Path(directory).glob("*") if path.suffix in (".safetensors", ".bin", ".json"))


def _digest(files: list[Path]) -> str:
    """SHA-256 of the bytes of files, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _place(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}"


def _finished(out: Path, seed: int) -> dict[str, Any] | None:
    """What an earlier start wrote of a seed, if it finished it. A damaged one gets another name, and a line says so.

    Raises DatasetError or OSError for an error of reading that may pass, and changes nothing then.
    """
    directory = _place(out, seed)
    if not directory.exists():
        return None
    fault, kept = checkpoint.fault_of(directory), _kept(directory)
    if kept and not fault:
        click.echo(f"seed {seed}: finished before, in {directory}", err=True)
        return kept["run"]
    aside, what = checkpoint.set_aside(directory), fault or f"{SEED_RESULT} is not readable"
    fsync_directory(out)
    click.echo(f"seed {seed}: {directory} is damaged: {what}; it is now {aside}, and is trained again", err=True)
    return None


def _kept(directory: Path) -> dict[str, Any] | None:
    """What seed.json says of a seed; None if that is damaged, or not there. Raises OSError if it cannot be read now."""
    damaged = ValueError, KeyError, TypeError, AttributeError
    try:
        kept = json.loads((directory / SEED_RESULT).read_bytes())
        is_whole = kept["of"].keys() >= {"checkpoint", "columns", "files", "weights", "main"} and kept["run"]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, *damaged):
        return None
    return kept if is_whole else None


def _refuse_seeds(out: Path, made_of: dict[str, Any]) -> None:
    """Raises UsageError, which names what differs, if a seed is of other options, files or weights."""
    wanted = _named(made_of)
    for directory in sorted(out.glob("seed-*")):
        kept = _kept(directory)
        before = _named(kept["of"]) if kept else wanted
        differ = [name for name in before | wanted if before.get(name) != wanted.get(name)]
        if Path(made_of["checkpoint"]).is_dir() and "the content of --checkpoint" not in differ:
            differ = [name for name in differ if name != "--checkpoint"]  # the same one by another path
        if differ:
            words = "; ".join(_difference(name, before.get(name), wanted.get(name)) for name in differ)
            sentence = (
                f"{directory} was trained with other options or files: {words}; give the same again, or another --out"
            )
            raise UsageError(sentence, "other-settings", option="out", given=str(out))


def _named(made_of: dict[str, Any]) -> dict[str, Any]:
    """What a seed is made of, by names for messages. Digests are bytes."""
    apart = ("columns", "files", "weights", "teacher", "main")
    values = {f"--{name.replace('_', '-')}": value for name, value in made_of.items() if name not in apart}
    values |= {f"--{name}": value for name, value in zip(Columns._fields[:-1], made_of["columns"], strict=False)}
    values |= {"the measure": made_of["main"], "skipping of damaged rows": str(made_of["columns"][-1])}
    digests = {**made_of["files"], "checkpoint": made_of["weights"], "teacher": made_of.get("teacher")}
    return values | {f"the content of --{name}": bytes.fromhex(digest) for name, digest in digests.items() if digest}


def _difference(name: str, before: Any, wanted: Any) -> str:
    """One difference in words. None, False, "": not given."""
    was_given, is_given = (value is not None and value is not False and value != "" for value in (before, wanted))
    if not was_given:
        return f"{name} is new"
    if not is_given:
        return f"{name} is missing"
    return f"{name} changed" if isinstance(wanted, bytes) else f"{name} was {before} and is {wanted}"


def finetune(
    made_of: dict[str, Any],
    task: Task,
    train: Any,
    held_out: dict[str, Any],
    taught: torch.Tensor | None = None,
    *,
    seed: int,
    out: Path,
    ranks: World,
) -> dict[str, Any]:
    """One run, whose model is written to `out`. Returns the curve, the best epoch, and its metrics by split.

    made_of: the checkpoint and the options, and what else seed.json is to say. held_out: "dev", and perhaps "test".
    taught: the labels to train on instead of those of `train`.
    """
    directory, device, lora = made_of["checkpoint"], ranks.device, made_of.get("lora", "")
    torch.manual_seed(bertdata.key(seed, "finetune") >> 1)
    model, num_loaded = _model(directory, task, from_scratch=made_of["from_scratch"], dropout=made_of["dropout"])
    bf16 = _is_bf16(model, made_of["precision"], device)
    choose_attention(model, bf16=bf16, on_gpu=device.type == "cuda", length=made_of["length"])
    num_tensors = len(model.base_model.state_dict())
    click.echo(f"seed {seed}: loaded {num_loaded} of {num_tensors} encoder tensors from {directory}", err=True)
    if lora:
        adapters.add(model, adapters.parse(lora), seed=seed, whole=adapters.heads_of(model))
    tokenizer = _tokenizer(directory)
    model.to(device).train()  # type: ignore[arg-type]  # transformers gives `to` a wrong type
    sets: dict[str, Data] = {}
    for name, part in {"train": train, **held_out}.items():
        sets[name], warnings = task.encode(tokenizer, part, made_of["length"])
        for warning in warnings if seed == 0 else ():
            click.echo(warning, err=True)
    data = sets.pop("train")
    data = data if taught is None else data._replace(labels=taught)
    options = {name: made_of[name] for name in ("epochs", "batch_size", "lr", "patience")}
    hidden = None if ranks.rank == 0 else True
    curve, weights = _trained(model, tokenizer, task, data, sets, seed=seed, bf16=bf16, hidden=hidden, **options)
    best = _best(curve, task)
    scores = {name: best[name] for name in held_out}
    facts = {
        "seed": seed,
        "epoch": best["epoch"],
        "epochs": made_of["epochs"],
        "rows": len(data.rows),
        **{name: made_of[name] for name in ("batch_size", "lr", "length", "dropout")},
        "adapter": lora or "none",
        "start": "random weights" if made_of["from_scratch"] else "those of the checkpoint",
    }
    head, model_type = task.head.__name__, model.config.model_type
    about = card.of_task(out.name, directory, head, model_type=model_type, facts=facts, scores=scores)
    run = {"seed": seed, "best_epoch": best["epoch"], **scores, "curve": curve}
    record = json.dumps({"of": made_of, "run": run}, indent=1).encode()
    _write(out, model, weights, tokenizer, {card.CARD: about, SEED_RESULT: record})
    return run


def _is_bf16(model: PreTrainedModel, precision: str, device: torch.device) -> bool:
    """Whether matrix products are in bfloat16. Raises UsageError for a model that cannot compute in it."""
    half = family_of(model).half
    if precision == "bf16" and not half:
        sentence = f"{model.config.model_type} computes in fp32 alone; give --precision fp32"
        raise UsageError(sentence, "unsupported", option="precision", given=precision)
    return precision == "bf16" or (precision == "auto" and half and device.type == "cuda" and has_bf16(device))


def _trained(
    model: Any,
    tokenizer: Any,
    task: Task,
    data: Data,
    held_out: dict[str, Data],
    *,
    seed: int,
    bf16: bool,
    hidden: bool | None,
    epochs: int,
    batch_size: int,
    lr: float,
    patience: int | None,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Trains a model. Returns a point of the curve for each epoch, and the weights after the best one."""
    device, (rows, labels, _) = model.device, data
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    optimizer = torch.optim.AdamW(optim.parameter_groups(model, WEIGHT_DECAY), lr=0.0, fused=True)
    steps = epochs * -(-len(rows) // batch_size)
    schedule: dict[str, Any] = {"peak": lr, "steps": steps, "warmup_steps": round(WARMUP * steps), "schedule": "linear"}
    curve: list[dict[str, Any]] = []
    weights: dict[str, torch.Tensor] = {}
    step, bar = 0, tqdm(total=steps, desc=f"seed {seed}", unit="step", leave=False, disable=hidden)
    for epoch in range(epochs):
        total = 0.0
        for chosen in _batches(rows, batch_size, np.random.default_rng(bertdata.key(seed, "order", epoch))):
            inputs = tokenizer.pad([rows[i] for i in chosen], return_tensors="pt").to(device)
            with autocast:
                logits, wanted = task.logits(model(**inputs)), labels[chosen].to(device)
            loss = task.loss(logits, wanted)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.set_learning_rate(optimizer, optim.learning_rate(step, **schedule))
            optimizer.step()
            bar.update()
            optimizer.zero_grad()
            step, total = step + 1, total + loss.item() * chosen.size
        train_loss = total / len(rows)
        if not math.isfinite(total):
            sentence = f"seed {seed}: the loss is {train_loss} in epoch {epoch + 1}; lower --lr {lr} and run again"
            raise TrainingError(sentence, "not-finite", option="lr", given=lr)
        with autocast:
            scores = {name: _score(model, tokenizer, task, part, device) for name, part in held_out.items()}
        curve.append({"epoch": epoch + 1, "train_loss": train_loss, **scores})
        best = _best(curve, task)
        if best is curve[-1]:
            weights = copy.deepcopy(model.state_dict())
        elif patience and len(curve) - best["epoch"] >= patience:
            break
    bar.close()
    return curve, weights


def _best(curve: list[dict[str, Any]], task: Task) -> dict[str, Any]:
    """The point of the best epoch on dev, the first of equal ones."""
    return max(curve, key=lambda point: point["dev"][task.main])


def _write(out: Path, model: Any, weights: dict[str, torch.Tensor], tokenizer: Any, files: dict[str, bytes]) -> None:
    """Writes the model of a seed, complete or not at all. files: by name, what else is in its directory."""
    # Each rank has a model of its own, and transformers would save that of rank 0 alone.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    with naming(out), checkpoint.whole(out, leaving=threading.Event()) as temporary:
        adapters.save(model, weights, temporary)
        tokenizer.save_pretrained(temporary)
        for name, content in files.items():
            (temporary / name).write_bytes(content)


def _model(
    directory: Path | str, task: Task, *, from_scratch: bool, dropout: float = 0.0
) -> tuple[PreTrainedModel, int]:
    """The checkpoint with a head for the task, and how many tensors of its encoder came from there.

    A head that was trained for another number of labels is replaced by a new one. Raises UsageError if anything but
    heads was not in it.
    """
    labels, config = task.config(), _config(directory)
    labels |= {name: dropout for name in (*DROPOUTS, *HEAD_DROPOUTS) if hasattr(config, name)}
    try:
        model, info = task.head.from_pretrained(
            directory,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            **labels,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unloadable(directory, error) from None
    encoder = f"{model.base_model_prefix}."
    missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    lacking = [name for name in needed(model, missing) if name.startswith(encoder)]
    if lacking:
        sentence = (
            f"--checkpoint {directory} lacks {len(lacking)} weights of the encoder, such as {lacking[0]}; give one "
            "that is complete"
        )
        raise UsageError(sentence, "weights-missing", option="checkpoint", given=str(directory))
    if from_scratch:
        return task.head.from_config(copy.deepcopy(model.config)), 0
    return model, len({encoder + name for name in model.base_model.state_dict()} - set(missing))


def _config(directory: Path | str) -> Any:
    """The configuration of a checkpoint. Raises UsageError if there is none that can be read."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unloadable(directory, error) from None


def _unloadable(directory: Path | str, error: Exception) -> UsageError:
    """The error for a checkpoint that transformers cannot load."""
    reason = str(error).partition("\n")[0]
    if not (Path(directory).exists() or may_be_on_hub(str(directory))):
        return UsageError(
            f"--checkpoint {directory} does not exist; give a run, a checkpoint or a name on the hub",
            "model-not-found",
            option="checkpoint",
            given=str(directory),
        )
    if not Path(directory).exists():
        return UsageError(
            f"--checkpoint {directory} is no directory here, and the hub does not give it ({reason}); check the name",
            "model-not-found",
            option="checkpoint",
            given=str(directory),
        )
    return UsageError(
        f"--checkpoint {directory} cannot be fine-tuned ({reason}); give another",
        "model-unreadable",
        option="checkpoint",
        given=str(directory),
    )


def _length(directory: str, length: int | None) -> int:
    """The row length: the one that is given, else LENGTH, or the positions of the model where these are fewer.

    Raises UsageError for one of more tokens than the model has positions.
    """
    most = max_length(_config(directory))
    if length is not None and length > most:
        sentence = f"--length {length} is more than the {most} positions of {directory}; give at most {most}"
        raise UsageError(sentence, "too-long", option="length", given=length)
    return length or min(LENGTH, most)


def _tokenizer(directory: Path | str) -> Any:
    """The tokenizer of a checkpoint. Raises UsageError if there is none that can be read."""
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(": ")
        raise UsageError(
            f"{directory} has no tokenizer that can be read ({reason}); put the tokenizer.json and "
            "tokenizer_config.json of the pre-training there",
            "tokenizer-unreadable",
            given=str(directory),
        ) from None


@torch.no_grad()
def _answers(directory: str, task: Task, train: Any, length: int, device: torch.device) -> torch.Tensor:
    """What a fine-tuned teacher says of the examples to train on, as labels, on the CPU. It reads by its own tokenizer.

    Raises UsageError if it was fine-tuned for something else.
    """
    try:
        model, info = task.head.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        sentence = (
            f"--teacher {directory} cannot be loaded ({reason}); give the directory of a seed of bertrain finetune"
        )
        raise UsageError(sentence, "model-unreadable", option="teacher", given=directory) from None
    known, wanted = [*model.config.id2label.values()], task.names or ["LABEL_0"]
    if info["missing_keys"] or known != wanted:
        what = "has no head" if info["missing_keys"] else f"was fine-tuned for the labels {', '.join(known)}"
        sentence = (
            f"--teacher {directory} {what}, and --train has {', '.join(wanted) if task.names else 'numbers'}; give the "
            "directory of a seed that bertrain finetune trained on the same labels"
        )
        raise UsageError(sentence, "unsupported", option="teacher", given=directory)
    tokenizer = _tokenizer(directory)
    data, _ = task.encode(tokenizer, train, min(length, max_length(model.config)))
    model.to(device).eval()
    parts = []
    for first in tqdm(range(0, len(data.rows), ROWS), desc="teacher", unit="batch", leave=False, disable=None):
        inputs = tokenizer.pad(data.rows[first : first + ROWS], return_tensors="pt").to(device)
        parts.append(task.logits(model(**inputs)).cpu())
    assert task.taught is not None  # noqa: S101  (main has asked)
    return task.taught(torch.cat(parts))


def _batches(rows: list[Any], batch_size: int, draw: np.random.Generator) -> list[np.ndarray]:
    """All rows in a random order, those of a batch of about the same length: of 32 batches, the shortest together."""
    order, pool = draw.permutation(len(rows)), 32 * batch_size
    lengths = np.array([len(row["input_ids"]) for row in rows])
    pools = (order[first : first + pool] for first in range(0, len(rows), pool))
    alike = [part[np.argsort(lengths[part], kind="stable")] for part in pools]
    batches = [part[first : first + batch_size] for part in alike for first in range(0, len(part), batch_size)]
    return [batches[i] for i in draw.permutation(len(batches))]


@torch.no_grad()
def _score(model: Any, tokenizer: Any, task: Task, data: Data, device: torch.device) -> dict[str, float]:
    model.eval()
    answers: list[torch.Tensor] = []
    for first in range(0, len(data.rows), ROWS):
        inputs = tokenizer.pad(data.rows[first : first + ROWS], return_tensors="pt").to(device)
        answers += task.answer(task.logits(model(**inputs))).cpu()
    model.train()
    return task.score(answers, data.gold)


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
    click.option("--out", required=True, help="Directory for result.json and a model for each seed."),
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
        help="Number format of matrix products. auto: bf16 on GPUs, fp32 on CPUs.",
    ),
    click.option(
        "--lora",
        default="",
        show_default=False,
        help="Train only an adapter and the head, such as r=8,alpha=16 (docs/adapters.md).  [default: off]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line."),
    click.option("--from-scratch", is_flag=True, help="Start from random weights, for comparison."),
)


@click.command(cls=OneSentence)
@click.option("--train", required=True, help="Examples to train on: TSV, CSV, JSON lines or Parquet.")
@click.option("--dev", required=True, help="Examples for choosing the best epoch, in the same formats.")
@click.option("--test", help="Examples for the final result, with the best epoch.")
@click.option(
    "--task",
    default="classification",
    help="What labels are. classification: classes. regression: numbers. multilabel: several labels of a text. token: "
    "tags of words. qa: answers (SQuAD). pairs: classes of pairs. choice: one of several choices. coreference: whether "
    "a pronoun means a noun.",
)
@click.option(
    "--text",
    default="0",
    help="Column of the text: its name, or its number from 0. The first row is a header if it has one of the names.",
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
def main(
    start: str,
    train: str,
    dev: str,
    test: str | None,
    out: str,
    task: str,
    text: str,
    other: str,
    label: str,
    separator: str,
    teacher: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Fine-tune a checkpoint for a task, over several seeds. Also under torchrun: ranks train different seeds.

    The learning rate rises over the first tenth of the steps and then falls to 0; weight decay is 0.01.
    """
    transformers.utils.logging.set_verbosity_error()  # what is missing or not used is checked here
    if not separator:
        sentence = "--separator is empty; give what stands between the labels of a text, such as a comma"
        raise UsageError(sentence, "missing", option="separator")
    if pick(TASKS, task, "--task", "docs/finetuning.md").taught is None and teacher:
        sentence = f"--teacher is for classes, numbers and several labels of texts; leave it out with --task {task}"
        raise UsageError(sentence, "conflict", option="teacher", given=teacher)
    files = {name: path for name, path in (("train", train), ("dev", dev), ("test", test)) if path}
    columns = Columns(text, other, label, separator)
    with world(PATIENCE) as ranks, alone(ranks, Path(out)):
        result = tune(ranks, start, task, columns, files, Path(out), teacher=teacher, **options)
    if ranks.rank:
        return
    if as_json:
        click.echo(json.dumps(result))
        return
    spreads = {name.replace("_", " "): spread for name, spread in result.items() if isinstance(spread, dict)}
    show(f"{start}: {task}", result["seeds"], spreads, width=18)
    click.echo(f"models and {RESULT} are in {out}")


if __name__ == "__main__":
    main()
