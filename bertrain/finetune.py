"""Fine-tune a checkpoint on labelled text, over several seeds.

    bertrain finetune --checkpoint run/ --train train.tsv --dev dev.tsv --test test.tsv --out tuned/

Classification reports accuracy, F1 (of the second label if there are two, else the mean over labels) and Matthews'
correlation; regression reports Pearson's and Spearman's correlation. The epoch of each seed that is best on dev is
kept, as a Hugging Face directory. --from-scratch starts from random weights, to show what pre-training gave.
"""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import bertdata
from bertdata.cli import OneSentence
from bertdata.errors import UsageError
from bertdata.files import write_file
from bertrain import optim, tables
from bertrain.models.build import choose_attention, max_length
from bertrain.models.families import DROPOUTS, HEAD_DROPOUTS, family_of
from bertrain.runtime import checkpoint
from bertrain.runtime.rates import has_bf16

WARMUP = 0.1  # share of the steps
WEIGHT_DECAY = 0.01
MANY_LABELS = 20  # a table with more, in over half of its rows, is likely not one of classes


def finetune(
    start: str, train: tables.Examples, held_out: dict[str, tables.Examples], *, task: str, seed: int, out: Path,
    epochs: int, batch_size: int, lr: float, length: int, dropout: float, from_scratch: bool,
    precision: str,
) -> dict[str, Any]:  # fmt: skip
    """One run. held_out: "dev", and perhaps "test". Returns the curve, the best epoch, and its metrics by split."""
    names = None if task == "regression" else sorted({str(label) for label in train.labels})
    directory = checkpoint.find(Path(start)) if Path(start).is_dir() else start
    torch.manual_seed(bertdata.key(seed, "finetune") >> 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, num_loaded = _model(directory, names, from_scratch=from_scratch, dropout=dropout)
    half = family_of(model).half
    if precision == "bf16" and not half:
        raise UsageError(f"a {model.config.model_type} computes in fp32 alone; give --precision fp32")
    bf16 = precision == "bf16" or (precision == "auto" and half and device.type == "cuda" and has_bf16(device))
    choose_attention(model, bf16=bf16, on_gpu=device.type == "cuda", length=length)
    num_tensors = len(model.base_model.state_dict())
    click.echo(f"seed {seed}: loaded {num_loaded} of {num_tensors} encoder tensors from {directory}", err=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    length = min(length, max_length(model.config))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    model.to(device).train()
    sets = {name: _encode(tokenizer, part, names, length) for name, part in {"train": train, **held_out}.items()}
    optimizer = torch.optim.AdamW(optim.parameter_groups(model, WEIGHT_DECAY), lr=0.0, fused=True)
    rows, labels = sets["train"]
    steps = epochs * -(-len(rows) // batch_size)
    schedule = {"peak": lr, "steps": steps, "warmup_steps": round(WARMUP * steps), "schedule": "linear"}
    curve, best, step, kept = [], None, 0, None
    bar = tqdm(total=steps, desc=f"seed {seed}", unit="step", leave=False, disable=None)
    for epoch in range(epochs):
        total = 0.0
        for chosen in _batches(rows, batch_size, np.random.default_rng(bertdata.key(seed, "order", epoch))):
            inputs = tokenizer.pad([rows[i] for i in chosen], return_tensors="pt").to(device)
            with autocast:
                logits, wanted = model(**inputs).logits.float(), labels[chosen].to(device)
            loss = F.mse_loss(logits.squeeze(-1), wanted) if names is None else F.cross_entropy(logits, wanted)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.set_learning_rate(optimizer, optim.learning_rate(step, **schedule))
            optimizer.step()
            bar.update()
            optimizer.zero_grad()
            step, total = step + 1, total + loss.item() * chosen.size
        with autocast:
            scores = {name: _score(model, tokenizer, *sets[name], names, device) for name in held_out}
        curve.append({"epoch": epoch + 1, "train_loss": total / len(rows), **scores})
        main = scores["dev"]["pearson" if names is None else "accuracy"]
        if best is None or main > best[0]:
            best, kept = (main, epoch), copy.deepcopy(model.state_dict())
    bar.close()
    assert best is not None  # noqa: S101  (there is an epoch)
    model.load_state_dict(kept)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "seed": seed,
        "best_epoch": best[1] + 1,
        **{name: curve[best[1]][name] for name in held_out},
        "curve": curve,
    }


def _model(
    directory: Path | str, names: list[str] | None, *, from_scratch: bool, dropout: float = 0.0
) -> tuple[PreTrainedModel, int]:
    """The checkpoint with a head for the labels, and how many tensors of its encoder came from there.

    Raises UsageError if anything but heads was not in it.
    """
    labels: dict[str, Any] = {"num_labels": 1 if names is None else len(names)}
    if names:
        labels |= {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        labels |= {name: dropout for name in (*DROPOUTS, *HEAD_DROPOUTS) if hasattr(config, name)}
        model, info = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, trust_remote_code=False, **labels
        )
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--checkpoint {directory} cannot be fine-tuned: {reason}") from None
    encoder = f"{model.base_model_prefix}."
    spare = tuple(f"{encoder}{part}." for part in ("pooler", *family_of(model).untrained))
    missing = sorted(info["missing_keys"])
    lacking = [name for name in missing if name.startswith(encoder) and not name.startswith(spare)]
    if lacking:
        raise UsageError(f"--checkpoint {directory} lacks {len(lacking)} weights of the encoder, such as {lacking[0]}")
    if from_scratch:
        return AutoModelForSequenceClassification.from_config(copy.deepcopy(model.config)), 0
    return model, len({encoder + name for name in model.base_model.state_dict()} - set(missing))


def _encode(
    tokenizer: Any, part: tables.Examples, names: list[str] | None, length: int
) -> tuple[list[Any], torch.Tensor]:
    """Rows for tokenizer.pad, cut to `length`, and labels [N]."""
    encoded = tokenizer(part.texts, part.others, truncation=True, max_length=length)
    rows = [{name: encoded[name][i] for name in encoded} for i in range(len(part.texts))]
    if names is None:
        try:
            return rows, torch.tensor([float(label) for label in part.labels])
        except ValueError as error:
            raise UsageError(f"--task regression needs numbers as labels: {error}") from None
    unknown = {str(label) for label in part.labels} - set(names)
    if unknown:
        raise UsageError(f"label {sorted(unknown)[0]!r} is held out and never trained on, only {', '.join(names)}")
    return rows, torch.tensor([names.index(str(label)) for label in part.labels])


def _batches(rows: list[Any], batch_size: int, draw: np.random.Generator) -> list[np.ndarray]:
    """All rows in a random order, those of a batch of about the same length: of 32 batches, the shortest together."""
    order, pool = draw.permutation(len(rows)), 32 * batch_size
    lengths = np.array([len(row["input_ids"]) for row in rows])
    pools = (order[first : first + pool] for first in range(0, len(rows), pool))
    alike = [part[np.argsort(lengths[part], kind="stable")] for part in pools]
    batches = [part[first : first + batch_size] for part in alike for first in range(0, len(part), batch_size)]
    return [batches[i] for i in draw.permutation(len(batches))]


@torch.no_grad()
def _score(
    model: Any, tokenizer: Any, rows: list[Any], labels: torch.Tensor, names: list[str] | None, device: torch.device
) -> dict[str, float]:
    model.eval()
    batches = []
    for first in range(0, len(rows), 64):
        inputs = tokenizer.pad(rows[first : first + 64], return_tensors="pt").to(device)
        batches.append(model(**inputs).logits.float().cpu())
    model.train()
    logits = torch.cat(batches)
    if names is None:
        return regression(logits.squeeze(-1).numpy(), labels.numpy())
    return classification(logits.argmax(-1).numpy(), labels.numpy(), len(names))


def classification(predicted: np.ndarray, labels: np.ndarray, num_labels: int) -> dict[str, float]:
    """accuracy, f1, mcc. F1 of a label nobody has is 0, and so is Matthews' of a constant (Gorodkin, 2004)."""
    table = np.zeros((num_labels, num_labels))
    np.add.at(table, (labels, predicted), 1)
    right, of_label, of_prediction = np.diag(table), table.sum(1), table.sum(0)
    f1 = 2 * right / np.maximum(of_label + of_prediction, 1)
    n, trace = table.sum(), right.sum()
    covariance = trace * n - of_label @ of_prediction
    spread = (n**2 - of_label @ of_label) * (n**2 - of_prediction @ of_prediction)
    return {
        "accuracy": float(trace / n),
        "f1": float(f1[1] if num_labels == 2 else f1.mean()),
        "mcc": float(covariance / spread**0.5) if spread else 0.0,
    }


def regression(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """pearson, spearman; 0 where one side is constant."""
    return {"pearson": _correlation(predicted, labels), "spearman": _correlation(_ranks(predicted), _ranks(labels))}


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64) - a.mean(dtype=np.float64), b.astype(np.float64) - b.mean(dtype=np.float64)
    size = (a @ a) * (b @ b)
    return float(a @ b / size**0.5) if size > 0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values sharing the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[which]


@click.command(cls=OneSentence, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--checkpoint", "start", required=True, help="A run directory, a checkpoint, or a hub name.")
@click.option("--train", required=True, help="Examples to train on: TSV, CSV, JSON lines or Parquet.")
@click.option("--dev", required=True, help="Examples that choose the best epoch, in the same formats.")
@click.option("--test", help="Examples to report at the best epoch.")
@click.option("--out", required=True, help="Directory for result.json and a model for each seed.")
@click.option(
    "--task",
    type=click.Choice(["classification", "regression"]),
    default="classification",
    help="What labels are: classes, or numbers.",
)
@click.option(
    "--text",
    default="0",
    help="Column of the text: its name, or its number from 0. A first row with one of the names is a header.",
)
@click.option("--other", default="", help="Column of the second text, for pairs of texts. Default: none.")
@click.option("--label", default="-1", help="Column of the label: its name or number; -1 is the last.")
@click.option("--seeds", default=3, type=click.IntRange(min=1), help="Number of runs, with seeds 0, 1, ...")
@click.option("--epochs", default=3, type=click.IntRange(min=1), help="Passes over the examples.")
@click.option("--batch-size", default=32, type=click.IntRange(min=1), help="Rows in one optimizer step.")
@click.option("--lr", default=5e-5, type=click.FloatRange(min=0, min_open=True), help="Peak learning rate.")
@click.option("--length", default=128, type=click.IntRange(min=3), help="Longest row in tokens; longer texts are cut.")
@click.option(
    "--dropout",
    default=0.1,
    type=click.FloatRange(0, 1, max_open=True),
    help="Dropout probability, also of models that were pre-trained without.",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    help="Number format of matrix products. auto: bf16 on GPUs, fp32 on CPUs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
@click.option("--from-scratch", is_flag=True, help="Start from random weights, for comparison.")
def main(
    start: str, train: str, dev: str, test: str | None, out: str, task: str, text: str, other: str, label: str,
    seeds: int, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Fine-tune a checkpoint for classification or regression, in one process.

    The learning rate rises over the first tenth of the steps and then falls to 0; weight decay is 0.01.
    """
    transformers.utils.logging.set_verbosity_error()  # what is missing or not used is checked here
    columns = {"text": text, "other": other, "label": label}
    examples = tables.read(train, **columns)
    if task == "classification":
        num_labels = len({str(label) for label in examples.labels})
        if num_labels > MANY_LABELS and num_labels > len(examples.labels) / 2:
            click.echo(
                f"warning: {train} has {num_labels:,} different labels in {len(examples.labels):,} rows; is "
                f"--label {label} the column of the label, or --task regression meant?", err=True,
            )  # fmt: skip
    held_out = {name: tables.read(path, **columns) for name, path in (("dev", dev), ("test", test)) if path}
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in range(seeds):
        place = directory / f"seed-{seed}"
        runs.append(finetune(start, examples, held_out, task=task, seed=seed, out=place, **options))
        shown = "; ".join(
            f"{name} " + ", ".join(f"{metric} {value:.4f}" for metric, value in runs[-1][name].items())
            for name in held_out
        )
        click.echo(f"seed {seed}: best after epoch {runs[-1]['best_epoch']}: {shown}", err=True)
    summary: dict[str, Any] = {}
    for name in held_out:
        for metric in runs[0][name]:
            values = [run[name][metric] for run in runs]
            spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            summary[f"{name}_{metric}"] = {what: round(value, 5) for what, value in spread.items()}
    result = {"checkpoint": start, "task": task, "seeds": seeds, **options, **summary}
    write_file(directory / "result.json", json.dumps(result | {"runs": runs}, indent=1).encode())
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{start}: {task}, {seeds} seeds, the best epoch of each on dev")
    click.echo(f"  {'':<18}{'median':>10}{'min':>10}{'max':>10}")
    for name, spread in summary.items():
        click.echo(f"  {name.replace('_', ' '):<18}" + "".join(f"{value:>10.4f}" for value in spread.values()))
    click.echo(f"models and result.json are in {directory}")


if __name__ == "__main__":
    main()
