"""Write a teacher's answers for exactly the masked samples that a student will see.

    python -m bertrain teacher --model big/ --data shards/ --out logits/ --variants 4
    torchrun --nproc-per-node 8 -m bertrain teacher --model big/ --data shards/ --out logits/ --max-samples 10000000
    torchrun --nproc-per-node 8 -m bertrain.pretrain --data shards/ --out run/ --teacher-cache logits/

Masks are a function of seed, variant and sample, so they are known before any student exists. After a stop, the same
command continues, on any number of ranks. docs/format.md specifies the files, docs/determinism.md the samples.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import dataclass
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
from bertrain.cli import flags_of, read_options
from bertrain.config import DIRECTORY, Config
from bertrain.data import build_loader, micro_batches
from bertrain.lab.distillation import answers
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.heads import is_bf16
from bertrain.lab.options import OF_ROWS, from_flags
from bertrain.models.encoder import Encoder
from bertrain.models.load import check_fits, check_length, load_model
from bertrain.options import COUNT, COUNT_OR_0, TEXT, WEIGHT, Check, Options, choice, option
from bertrain.plan import masking_of
from bertrain.ranks import LONGEST_WAIT, World, world
from bertrain.recipes import file_of
from bertrain.trainer import autocast_of

LIMIT_BYTES = 10 * 10**9  # a larger cache needs --yes
MOST_UNITS = 100_000  # limit, as a unit takes 600 bytes in cache.json; units become larger instead


@dataclass(frozen=True, kw_only=True)
class Asked(Options):
    """Options: the teacher, its rows, and the predictions to store."""

    model: str = option("", TEXT, required=True)
    """The teacher: a run directory, or any directory with a masked LM in it."""
    data: str = option("", TEXT, required=True)
    """Directory of shards that the student will learn from."""
    out: str = option("", DIRECTORY, required=True)
    """Directory for the cache."""
    top_k: int = option(64, COUNT)
    """Number of most probable tokens to store for each masked token, at most the vocabulary. For the others, only their
    total.
    """
    variants: int | None = option(None, COUNT)
    """Number of epochs after which order and masks repeat. Give this or --max-samples."""
    max_samples: int | None = option(None, COUNT)
    """Number of samples to predict, usually the student's --steps times its --global-batch-size."""
    recipe: str = option("", TEXT)
    """Recipe of the student (docs/recipes.md), for its row length and masks. Options on the command line override it.
    Default: none.
    """
    length: int | None = option(None, COUNT)
    """Row length in tokens, as the student's. Default: 128."""
    seed: int = option(0, COUNT_OR_0)
    """Random seed for order and masks: the student's --data-seed, or its --seed."""
    samples: str = option("", choice("windows", "packed", "pairs"))
    """Kind of rows: packed for --isolate-documents, pairs for --objective mlm+nsp. Default: windows."""
    mlm_probability: float | None = option(None, WEIGHT)
    """Share of a row's tokens to mask, as the student's. Default: 0.15."""
    masking: str = option("", choice(*MASKING_POLICIES))
    """Masking policy, as the student's. Default: exact."""
    shuffle: str = option("", choice(*SHUFFLES))
    """Order of an epoch, as the student's. Default: full."""
    batch_size: int = option(64, COUNT)
    """Rows in one forward pass."""
    unit_samples: int = option(4096, COUNT)
    """Samples in one unit of the cache. A killed command loses at most one unit on each rank."""
    rules = (Check("max_samples", lambda c: c.variants or c.max_samples, "it or --variants: the stream is endless"),)


def _student(options: Asked) -> Config:
    """Return the options of the student's rows. Raises UsageError if the phases of a recipe have different rows."""
    recipe = read_options(file_of(options.recipe)) if options.recipe else {}
    if any(phase.keys() & {*OF_ROWS} for phase in recipe.get("phase", ())):
        sentence = f"--recipe {options.recipe} changes its rows along the run, and a cache cannot; give a different one"
        raise UsageError(sentence, "conflict", option="recipe", given=options.recipe)
    given = vars(options)
    values = {name: recipe[name] for name in OF_ROWS if name in recipe}
    values |= {name: given[name] for name in ("data", "out", "seed", *OF_ROWS) if given.get(name) not in (None, "")}
    if options.samples:
        values["isolate_documents"] = options.samples == "packed"
        values["objective"] = "mlm+nsp" if options.samples == "pairs" else "mlm"
    return Config(**values)


class _Predictor:
    """The student's stream and the teacher on one rank, and the header of the cache."""

    def __init__(self, ranks: World, options: Asked, directory: Path) -> None:
        """directory: the directory of the teacher."""
        self.ranks, self.out = ranks, Path(options.out)
        self.shards = bertdata.open(options.data)
        self.vocab_size = self.shards.special_tokens.vocab_size
        student, masking = _student(options), None
        if begun := answers.begun(self.out):  # an incomplete cache keeps its mask rule
            masking = masking_of(student).with_rule_of(begun["stream"].get("masking") or {})
        self.loader = build_loader(student, self.shards, variants=options.variants, masking=masking)
        if self.loader.num_slots == 0:
            share = student.mlm_probability
            sentence = f"--mlm-probability {share} of {student.length} tokens is less than one; raise it, or --length"
            raise UsageError(sentence, "too-short-to-mask", option="mlm_probability", given=share)
        weights = load_model(directory)
        check_fits(directory, self.shards, weights)
        check_length(student.length, weights.config, directory)
        encoder = Encoder(weights, isolate=student.isolate_documents)
        self.encoder = encoder.to(ranks.device).eval().requires_grad_(False)
        self.header = self._header(weights, options)

    def _header(self, weights: PreTrainedModel, options: Asked) -> dict[str, Any]:
        """Return the header of the cache."""
        variants, most = options.variants, options.max_samples
        samples = min(most or sys.maxsize, variants * self.loader.num_samples if variants else sys.maxsize)
        stream, device = self.loader.state_dict(), self.ranks.device
        del stream["position"]
        return {
            "format": answers.FORMAT,
            "format_version": FORMAT_VERSION,
            "teacher": {
                "sha256": fingerprint(weights),
                "parameters": sum(parameter.numel() for parameter in weights.parameters()),
                "precision": "bf16" if is_bf16(weights, "auto", device) else "fp32",
            },
            "tokenizer": self.shards.manifest.tokenizer["tokenizer.json"],
            "stream": stream,
            "epoch_samples": self.loader.num_samples,
            "epoch_tokens": self.shards.splits["train"].num_tokens,
            "samples": samples,
            "slots": self.loader.num_slots,
            "vocab_size": self.vocab_size,
            "top_k": min(options.top_k, self.vocab_size),
            "id_dtype": "<u2" if self.vocab_size <= 1 << 16 else "<u4",
            "unit_samples": max(options.unit_samples, -(-samples // MOST_UNITS)),
            "batch_samples": options.batch_size,
        }

    def plan(self, missing: list[int], *, yes: bool) -> None:
        """Print the size in bytes. Without --yes, raises UsageError if it is above the limit or the free space."""
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
        """Compute one unit, in forward passes that depend only on its number."""
        first, stop = answers.rows_of(self.header, number)
        size = self.header["batch_samples"]
        pieces = (self._predict(np.arange(start, min(start + size, stop))) for start in range(first, stop, size))
        answers.write_unit(self.out, self.header, number, pieces)

    @torch.no_grad()
    def _predict(self, positions: np.ndarray) -> tuple[answers.Answers, dict[str, Any]]:
        """Return the teacher's answers for the samples at stream positions, and their counts."""
        batch = self.loader.read(positions)
        piece = next(micro_batches(batch, size=positions.size, count=1, device=self.ranks.device))
        used = (piece["targets"] != bertdata.IGNORE_INDEX).unsqueeze(-1)
        with autocast_of(self.ranks.device, self.header["teacher"]["precision"])():
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
        missing = self.header["slots"] - used.shape[1]  # rows with fewer masks have fewer slots
        kept = answers.Answers(*(np.pad(x, [(0, 0), (0, missing), (0, 0)][: x.ndim]) for x in arrays))
        counts = {
            "samples": positions.size,
            "targets": int(used.sum()),
            "entropy": float((entropy.double() * used).sum()),
            "tail_mass": float((tails.double().exp() * used).sum()),
        }
        return kept, counts


def _verify(context: click.Context, option: click.Parameter, path: str | None) -> None:
    """Verify the cache in --verify, and end the command."""
    if path is None:
        return
    if faults := [*answers.verify(Path(path))]:
        sentence = f"{path} is damaged: {'; '.join(faults)}; copy it, or make it again"
        raise DatasetError(sentence, "damaged", given=path)
    click.echo(f"{path}: sound")
    context.exit()


VERIFY = click.Option(
    ["--verify"],
    is_eager=True,
    expose_value=False,
    callback=_verify,
    help="Check every byte of this complete cache, and do nothing else.",
)
YES = click.Option(["--yes"], is_flag=True, help="Write more than 10 GB, or more than the disk has free.")


@click.command(
    cls=OneSentence,
    params=[VERIFY, *flags_of(Asked), YES],
    epilog="\b\nExample:\n  bertrain teacher --model teacher/ --data shards/ --variants 1 --out cache/",
)
def main(*, yes: bool, **flags: Any) -> None:
    """Store a teacher's predictions for the masked tokens that a student will see. Runs alone or under torchrun."""
    with world(LONGEST_WAIT) as ranks, contextlib.ExitStack() as stack:
        options = ranks.together(lambda: from_flags(Asked, flags))
        out = Path(options.out)

        def lock() -> None:
            if (out / "manifest.json").exists():
                sentence = f"--out {out} holds a dataset; give a different directory"
                raise UsageError(sentence, "out-exists", option="out", given=str(out))
            stack.enter_context(checkpoint.lock(out))

        ranks.on_first(lock)
        if ranks.rank == 0:
            stack.callback((out / ".lock").unlink, missing_ok=True)  # a cache has the same bytes for any writer
        # Rank 0 chooses the checkpoint, because a running one writes more.
        directory = ranks.from_first(lambda: checkpoint.find(Path(options.model)))
        predictor = ranks.together(lambda: _Predictor(ranks, options, directory))
        missing = ranks.from_first(lambda: answers.begin(out, predictor.header))  # so all ranks share the same units
        ranks.on_first(lambda: predictor.plan(missing, yes=yes) if missing else None)
        with tqdm(total=len(missing), unit="unit", leave=False, disable=None if ranks.rank == 0 else True) as bar:
            for number in range(0, len(missing), ranks.world_size):
                mine = missing[number + ranks.rank : number + ranks.rank + 1]
                ranks.together(lambda: [*map(predictor.unit, mine)])  # noqa: B023  (called at once)
                bar.update(len(missing[number : number + ranks.world_size]))
        ranks.on_first(lambda: None if (out / answers.CACHE).exists() else answers.publish(out, predictor.header))
    if ranks.rank == 0:
        click.echo(f"done: {out}")
