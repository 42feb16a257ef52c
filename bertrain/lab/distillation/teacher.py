"""Write a teacher's answers to exactly the masked samples that a student will see.

    python -m bertrain teacher --model big/ --data shards/ --out logits/ --variants 4
    torchrun --nproc-per-node 8 -m bertrain teacher --model big/ --data shards/ --out logits/ --max-samples 10000000
    torchrun --nproc-per-node 8 -m bertrain.pretrain --data shards/ --out run/ --teacher-cache logits/

Masks are a function of seed, variant and sample, so they are known before any student exists. Interrupted, the same
command continues, on any number of ranks. docs/format.md says what is written, docs/determinism.md which samples.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import bertdata
from bertdata.support import FORMAT_VERSION, MASKING_POLICIES, SHUFFLES, DatasetError, OneSentence, UsageError, counted
from bertrain import checkpoint
from bertrain.cli import read_options
from bertrain.config import Config
from bertrain.data import build_loader, micro_batches
from bertrain.lab.distillation import answers
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.options import OF_ROWS
from bertrain.models.encoder import Encoder
from bertrain.models.families import family_of
from bertrain.models.load import check_fits, check_length, load_model
from bertrain.options import Output
from bertrain.plan import masking_of
from bertrain.ranks import LONGEST_WAIT, World, world
from bertrain.recipes import file_of
from bertrain.speed import has_bf16

LIMIT_BYTES = 10 * 10**9  # more needs --yes
MOST_UNITS = 100_000  # a unit takes 600 bytes in cache.json, which must stay readable; else units are larger


def _student(options: dict[str, Any]) -> Config:
    """Return the options of the student's rows. Raises UsageError for a recipe with phases of different rows."""
    recipe = read_options(file_of(options["recipe"])) if options["recipe"] else {}
    if any(phase.keys() & {*OF_ROWS} for phase in recipe.get("phase", ())):
        sentence = f"--recipe {options['recipe']} changes its rows along the run, and a cache cannot; give another"
        raise UsageError(sentence, "conflict", option="recipe", given=options["recipe"])
    values = {name: recipe[name] for name in OF_ROWS if name in recipe}
    values |= {name: options[name] for name in ("data", "out", "seed", *OF_ROWS) if options.get(name) is not None}
    if samples := options["samples"]:
        values |= {"isolate_documents": samples == "packed", "objective": "mlm+nsp" if samples == "pairs" else "mlm"}
    return Config(**values)


class _Work:
    """The student's stream, the teacher, and the header that names both, on one rank."""

    def __init__(self, ranks: World, options: dict[str, Any]) -> None:
        self.ranks, self.out = ranks, Path(options["out"])
        self.shards = bertdata.open(options["data"])
        self.vocab_size = self.shards.special_tokens.vocab_size
        student, masking = _student(options), None
        if begun := answers.begun(self.out):  # it is continued by the rule of its masks
            masking = masking_of(student).with_rule_of(begun["stream"].get("masking") or {})
        self.loader = build_loader(student, self.shards, variants=options["variants"], masking=masking)
        if options["variants"] is None and options["max_samples"] is None:
            sentence = "neither --max-samples nor --variants was given, and the stream is endless; give one of them"
            raise UsageError(sentence, "missing", option="max_samples")
        if self.loader.num_slots == 0:
            share = student.mlm_probability
            sentence = f"--mlm-probability {share} of {student.length} tokens is less than one; raise it, or --length"
            raise UsageError(sentence, "too-short-to-mask", option="mlm_probability", given=share)
        directory = checkpoint.find(Path(options["model"]))
        weights = load_model(directory)
        check_fits(directory, self.shards, weights)
        check_length(student.length, weights.config, directory)
        encoder = Encoder(weights, isolate=student.isolate_documents)
        self.encoder = encoder.to(ranks.device).eval().requires_grad_(False)
        self.header = self._header(weights, options)

    def _header(self, weights: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
        """Return the header of the cache."""
        variants, most = options["variants"], options["max_samples"]
        samples = most if variants is None else min(variants * self.loader.num_samples, most or sys.maxsize)
        stream, device = self.loader.state_dict(), self.ranks.device
        del stream["position"]
        on_gpu = device.type == "cuda"
        return {
            "format": answers.FORMAT,
            "format_version": FORMAT_VERSION,
            "teacher": {
                "sha256": fingerprint(weights),
                "parameters": sum(parameter.numel() for parameter in weights.parameters()),
                "precision": "bf16" if on_gpu and has_bf16(device) and family_of(weights).half else "fp32",
            },
            "tokenizer": self.shards.manifest.tokenizer["tokenizer.json"],
            "stream": stream,
            "epoch_samples": self.loader.num_samples,
            "epoch_tokens": self.shards.splits["train"].num_tokens,
            "samples": samples,
            "slots": self.loader.num_slots,
            "vocab_size": self.vocab_size,
            "top_k": min(options["top_k"], self.vocab_size),
            "id_dtype": "<u2" if self.vocab_size <= 1 << 16 else "<u4",
            "unit_samples": max(options["unit_samples"], -(-samples // MOST_UNITS)),
            "batch_samples": options["batch_size"],
        }

    def plan(self, missing: list[int], *, yes: bool) -> None:
        """Print the number of bytes. Raises UsageError past the limit or the free space, without --yes."""
        header, size, left = self.header, answers.num_bytes(self.header), answers.num_bytes(self.header, missing)
        units = answers.num_units(header)
        click.echo(
            f"{self.out}: {counted(header['samples'], 'sample')} of {self.loader.length} tokens, {header['slots']} "
            f"masked tokens each, {header['top_k']} of {self.vocab_size:,} predictions kept\n"
            f"{size:,} bytes; {units - len(missing)} of {units} units are complete"
        )
        free = shutil.disk_usage(self.out).free
        if left > min(free, LIMIT_BYTES) and not yes:
            sentence = f"{left:,} bytes would be written to {self.out}, and {free:,} are free; give --yes to do so"
            raise UsageError(sentence, "missing", option="yes", given=str(self.out))

    def unit(self, number: int) -> None:
        """Make one unit, in forward passes that depend on its number alone."""
        first, stop = answers.rows_of(self.header, number)
        size = self.header["batch_samples"]
        pieces = (self._predict(np.arange(start, min(start + size, stop))) for start in range(first, stop, size))
        answers.write_unit(self.out, self.header, number, pieces)

    @torch.no_grad()
    def _predict(self, positions: np.ndarray) -> tuple[answers.Answers, dict[str, Any]]:
        """Return the teacher's answers to the samples at stream positions, and their counts."""
        batch = self.loader.read(positions)
        piece = next(micro_batches(batch, size=positions.size, count=1, device=self.ranks.device))
        used = (piece["targets"] != bertdata.IGNORE_INDEX).unsqueeze(-1)
        bf16 = self.header["teacher"]["precision"] == "bf16"
        with torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext():
            logits = self.encoder.logits(**piece)
        logprobs = logits[..., : self.vocab_size].float().log_softmax(-1)
        top, ids = logprobs.topk(self.header["top_k"], dim=-1)
        tails = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        entropy = -(logprobs.exp() * logprobs.clamp(min=answers.LEAST)).sum(-1, keepdim=True)
        if not torch.isfinite(entropy).all():
            sentence = f"the teacher predicts NaN for samples from {positions[0]:,} on; give a teacher that works"
            raise DatasetError(sentence, "unsupported", option="model")
        arrays = (
            (ids * used).cpu().numpy().astype(self.header["id_dtype"]),
            top.clamp(min=answers.LEAST).where(used, 0.0).half().cpu().numpy(),
            tails.clamp(answers.LEAST, 0.0).where(used, 0.0).half().squeeze(-1).cpu().numpy(),
        )
        missing = self.header["slots"] - used.shape[1]  # rows in which less is masked have fewer slots
        kept = answers.Answers(*(np.pad(x, [(0, 0), (0, missing), (0, 0)][: x.ndim]) for x in arrays))
        counts = {
            "samples": positions.size,
            "targets": int(used.sum()),
            "entropy": float((entropy.double() * used).sum()),
            "tail_mass": float((tails.double().exp() * used).sum()),
        }
        return kept, counts


def answer(ranks: World, options: dict[str, Any]) -> None:
    """Make the missing units, the j-th on rank j mod W, and publish the cache."""
    # Rank 0 chooses the checkpoint, because a run under way writes newer ones.
    options = options | {"model": ranks.from_first(lambda: checkpoint.resolved(options["model"]))}
    work = ranks.together(lambda: _Work(ranks, options))
    missing = ranks.from_first(lambda: answers.begin(work.out, work.header))  # so all ranks share the same units
    ranks.on_first(lambda: work.plan(missing, yes=options["yes"]) if missing else None)
    with tqdm(total=len(missing), unit="unit", leave=False, disable=None if ranks.rank == 0 else True) as bar:
        for number in range(0, len(missing), ranks.world_size):
            mine = missing[number + ranks.rank : number + ranks.rank + 1]
            ranks.together(lambda: [*map(work.unit, mine)])  # noqa: B023  (called at once)
            bar.update(len(missing[number : number + ranks.world_size]))
    ranks.on_first(lambda: None if (work.out / answers.CACHE).exists() else answers.publish(work.out, work.header))
    if ranks.rank == 0:
        click.echo(f"done: {work.out}")


def _verify(context: click.Context, option: click.Parameter, path: str | None) -> None:
    """Check the cache that --verify names, and end the command."""
    if path is None:
        return
    if faults := [*answers.verify(Path(path))]:
        raise DatasetError("; ".join(faults), "damaged", given=path)
    click.echo(f"{path}: sound")
    context.exit()


_ONE = click.IntRange(min=1)


@click.command(
    cls=OneSentence,
    epilog="\b\nExample:\n  bertrain teacher --model teacher/ --data shards/ --variants 1 --out cache/",
)
@click.option("--model", required=True, help="The teacher: a run directory, or any directory with a masked LM in it.")
@click.option(
    "--verify",
    is_eager=True,
    expose_value=False,
    callback=_verify,
    help="Check every byte of this complete cache, and do nothing else.",
)
@click.option("--data", required=True, help="Directory of shards that the student will learn from.")
@click.option("--out", required=True, type=Output(), help="Directory for the cache.")
@click.option("--top-k", default=64, type=_ONE, help="Number of most probable tokens to store for each masked token.")
@click.option(
    "--variants", type=_ONE, help="Number of epochs after which order and masks repeat. Give this or --max-samples."
)
@click.option(
    "--max-samples", type=_ONE, help="Number of samples to predict: --steps times --global-batch-size of the student."
)
@click.option("--recipe", help="Recipe of the student (docs/recipes.md), for its row length and masks.")
@click.option("--length", type=int, help="Row length in tokens, as the student's. Default: 128.")
@click.option("--seed", default=0, help="Random seed for order and masks: the student's --data-seed, or its --seed.")
@click.option(
    "--samples",
    type=click.Choice(["windows", "packed", "pairs"]),
    help="Kind of rows: packed for --isolate-documents, pairs for --objective mlm+nsp. Default: windows.",
)
@click.option("--mlm-probability", type=float, help="Share of a row's tokens to mask. Default: 0.15.")
@click.option("--masking", type=click.Choice(MASKING_POLICIES), help="Masking policy. Default: exact.")
@click.option("--shuffle", type=click.Choice(SHUFFLES), help="Order of an epoch. Default: full.")
@click.option("--batch-size", default=64, type=_ONE, help="Rows in one forward pass.")
@click.option(
    "--unit-samples",
    default=4096,
    type=_ONE,
    help="Samples in one unit of the cache. A killed command loses at most one unit on each rank.",
)
@click.option(
    "--yes",
    is_flag=True,
    help=f"Do not refuse to write more than {LIMIT_BYTES // 10**9} GB, or more than the disk has free.",
)
def main(**options: Any) -> None:
    """Store a teacher's predictions for the masked tokens that a student will see. Runs alone or under torchrun.

    Options of rows, masks and order are the student's. On the command line they override those of --recipe.
    """
    with world(LONGEST_WAIT) as ranks, contextlib.ExitStack() as stack:

        def lock() -> None:
            out = Path(options["out"])
            stack.enter_context(checkpoint.lock(out))
            stack.callback((out / ".lock").unlink, missing_ok=True)  # a cache has the same bytes whoever wrote it

        ranks.on_first(lock)
        answer(ranks, options)


if __name__ == "__main__":
    main()
