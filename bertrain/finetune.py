"""Fine-tune a checkpoint on labelled text, over several seeds.

    python -m bertrain.finetune --checkpoint run/ --train train.tsv --dev dev.tsv --test test.tsv --out tuned/

Classification reports accuracy, F1 (of label 1 if there are two, else their mean) and Matthews' correlation, regression
Pearson's and Spearman's. Of each seed the epoch that is best on dev is kept, as a Hugging Face directory. The last line
of standard output is a JSON object. --from-scratch begins with random weights, to see what pre-training gave.
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
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import bertdata
from bertdata.cli import OneSentence
from bertdata.errors import UsageError
from bertdata.files import write_file
from bertrain import checkpoint, tables
from bertrain.metrics import has_bf16
from bertrain.model import DROPOUTS, choose_attention

WARMUP = 0.1  # of the steps
WEIGHT_DECAY = 0.01
HEADS = ("classifier", "score", "head", "pooler")


def finetune(
    start: str, train: tables.Examples, held_out: dict[str, tables.Examples], *, task: str, seed: int, out: Path,
    epochs: int, batch_size: int, lr: float, length: int, dropout: float, from_scratch: bool,
    precision: str,
) -> dict[str, Any]:  # fmt: skip
    """One run. held_out: "dev", and perhaps "test". Returns the curve, the best epoch, and its metrics by file."""
    names = None if task == "regression" else sorted({str(label) for label in train.labels})
    directory = checkpoint.find(Path(start)) if Path(start).is_dir() else start
    torch.manual_seed(bertdata.key(seed, "finetune") >> 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda" and has_bf16(device))
    model, num_loaded = _model(directory, names, from_scratch=from_scratch, dropout=dropout)
    choose_attention(model, bf16=bf16, on_gpu=device.type == "cuda", length=length)
    click.echo(f"seed {seed}: {num_loaded} tensors of the encoder are those of {directory}")
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    length = min(length, model.config.max_position_embeddings)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    model.to(device).train()
    sets = {name: _encode(tokenizer, part, names, length) for name, part in {"train": train, **held_out}.items()}
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, fused=True)
    rows, labels = sets["train"]
    steps = epochs * -(-len(rows) // batch_size)
    curve, best, step, kept = [], None, 0, None
    for epoch in range(epochs):
        total = 0.0
        for chosen in _batches(rows, batch_size, np.random.default_rng(bertdata.key(seed, "order", epoch))):
            inputs = tokenizer.pad([rows[i] for i in chosen], return_tensors="pt").to(device)
            with autocast:
                logits, wanted = model(**inputs).logits.float(), labels[chosen].to(device)
            loss = F.mse_loss(logits.squeeze(-1), wanted) if names is None else F.cross_entropy(logits, wanted)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rising, falling = (step + 1) / (WARMUP * steps + 1), (steps - step) / ((1 - WARMUP) * steps)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(rising, falling, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step, total = step + 1, total + loss.item() * chosen.size
        with autocast:
            scores = {name: _score(model, tokenizer, *sets[name], names, device) for name in held_out}
        curve.append({"epoch": epoch + 1, "train_loss": total / len(rows), **scores})
        main = scores["dev"]["pearson" if names is None else "accuracy"]
        if best is None or main > best[0]:
            best, kept = (main, epoch), copy.deepcopy(model.state_dict())
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
        labels |= {name: dropout for name in (*DROPOUTS, "classifier_dropout") if hasattr(config, name)}
        model, info = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, trust_remote_code=False, **labels
        )
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--checkpoint {directory} cannot be fine-tuned: {reason}") from None
    lacking = [name for name in info["missing_keys"] if not any(head in name for head in HEADS)]
    if lacking:
        raise UsageError(f"--checkpoint {directory} lacks {len(lacking)} weights of the encoder, such as {lacking[0]}")
    if from_scratch:
        return AutoModelForSequenceClassification.from_config(copy.deepcopy(model.config)), 0
    encoder = {f"{model.base_model_prefix}.{name}" for name in model.base_model.state_dict()}
    return model, len(encoder - set(info["missing_keys"]))


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
    found = []
    for first in range(0, len(rows), 64):
        inputs = tokenizer.pad(rows[first : first + 64], return_tensors="pt").to(device)
        found.append(model(**inputs).logits.float().cpu())
    model.train()
    logits = torch.cat(found)
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
@click.option("--train", required=True, help="TSV, CSV, JSON lines or Parquet.")
@click.option("--dev", required=True, help="To choose the best epoch by.")
@click.option("--test", help="Reported at the best epoch.")
@click.option("--out", required=True, help="Directory for result.json and a model for each seed.")
@click.option(
    "--task", type=click.Choice(["classification", "regression"]), default="classification", help="Of labels."
)
@click.option("--text", default="0", help="Column of the text, by name or number.")
@click.option("--other", default="", help="Column of the second text, if there is one.")
@click.option("--label", default="-1", help="Column of the label.")
@click.option("--seeds", default=3, type=click.IntRange(min=1), help="Runs, with seeds 0, 1, ...")
@click.option("--epochs", default=3, type=click.IntRange(min=1), help="Passes over the examples.")
@click.option("--batch-size", default=32, type=click.IntRange(min=1), help="Rows of a step.")
@click.option("--lr", default=5e-5, type=click.FloatRange(min=0, min_open=True), help="Peak learning rate.")
@click.option("--length", default=128, type=click.IntRange(min=3), help="Tokens of a row at most.")
@click.option(
    "--dropout",
    default=0.1,
    type=click.FloatRange(0, 1, max_open=True),
    help="Everywhere, also where pre-training had none.",
)
@click.option("--precision", type=click.Choice(["auto", "fp32", "bf16"]), default="auto", help="auto: bf16 on GPUs.")
@click.option("--from-scratch", is_flag=True, help="Begin with random weights, for comparison.")
def main(
    start: str, train: str, dev: str, test: str | None, out: str, task: str, text: str, other: str, label: str,
    seeds: int, **options: Any,
) -> None:  # fmt: skip
    """Fine-tune a checkpoint for classification or regression."""
    transformers.utils.logging.set_verbosity_error()  # what is missing or not used is checked here
    columns = {"text": text, "other": other, "label": label}
    examples = tables.read(train, **columns)
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
        click.echo(f"seed {seed}: best after epoch {runs[-1]['best_epoch']}: {shown}")
    summary: dict[str, Any] = {}
    for name in held_out:
        for metric in runs[0][name]:
            values = [run[name][metric] for run in runs]
            spread = {"median": statistics.median(values), "least": min(values), "most": max(values)}
            summary[f"{name}_{metric}"] = {what: round(value, 5) for what, value in spread.items()}
    result = {"checkpoint": start, "task": task, "seeds": seeds, **options, **summary}
    write_file(directory / "result.json", json.dumps(result | {"runs": runs}, indent=1).encode())
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
