"""The losses that --objective names: masked tokens, next sentences and masked diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from bertdata import IGNORE_INDEX, Batch
from bertrain.config import Config, pick
from bertrain.models.encoder import Encoder, MicroBatch


def num_targets(batch: Batch) -> int:
    """Return the number of targets in a batch."""
    return int((batch.targets != IGNORE_INDEX).sum())


def objectives_of(config: Config) -> dict[str, type[Objective]]:
    """Return the objectives in --objective, in order. Raises UsageError for an unknown name."""
    return {name: pick(OBJECTIVES, name, "--objective") for name in config.objective.split("+")}


class LossSum(NamedTuple):
    """The loss of one objective on a micro-batch."""

    sum: torch.Tensor  # float32 []: the sum of the terms that Objective.count counts
    num_correct: torch.Tensor  # []: the number of correct predictions, or the sum of their weights


def classification(logits: torch.Tensor, targets: torch.Tensor) -> LossSum:
    """Return the sum of cross entropies. logits [N, V]; targets int64 [N], IGNORE_INDEX for rows without a target."""
    logits = logits.float()
    if torch.compiler.is_compiling():  # torch.compile fuses these passes
        total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    else:
        total = _CrossEntropySum.apply(logits, targets)
    return LossSum(total, (logits.detach().argmax(-1) == targets).sum())


class _CrossEntropySum(torch.autograd.Function):
    """F.cross_entropy whose gradient overwrites the log probabilities.

    With a large vocabulary, this saves two of four passes over the largest tensor of a step.
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        used, columns = targets != IGNORE_INDEX, targets.clamp(min=0).unsqueeze(-1)
        losses = -(logprobs.gather(-1, columns).squeeze(-1) * used)
        gradient = logprobs.exp_().scatter_add_(-1, columns, torch.full_like(columns, -1, dtype=logprobs.dtype))
        context.save_for_backward(gradient, used)
        return losses.sum()

    @staticmethod
    def backward(context: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient, used = context.saved_tensors
        return gradient.mul_((used * outer).unsqueeze(-1)), None


class Outputs(NamedTuple):
    """The model's outputs for a micro-batch, shared by all objectives."""

    hidden: torch.Tensor | None  # [B, T, H]: the last hidden states; outside FAMILIES None if there are logits
    logits: torch.Tensor | None  # [B, K, V] at the masked positions; None if no objective uses them


class Objective(torch.nn.Module):
    """A loss. A subclass implements `count` and `forward`; docs/extending.md has an example.

    `--objective mlm+nsp` trains on the sum of two losses, each divided by its own count over all ranks. The parameters
    of an objective train with the model, and checkpoints contain them. torch is seeded by step and rank, so random
    numbers in `forward` are the same after a resume.
    """

    samples: str | None = None  # kind of rows that the objective needs, such as "pairs"; None: any
    accuracy_name = "accuracy"  # name of the share of correct predictions in the log
    weight = 1.0  # factor on the gradient; the log has the loss without this factor
    uses_logits = True  # False: the objective needs only hidden states

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        """model: the model to train, for its sizes and heads; it does not become a submodule."""
        super().__init__()

    def count(self, batch: Batch) -> int:
        """Return the number of terms in the loss of this rank's batch, such as targets or rows. Called on the CPU."""
        raise NotImplementedError

    def prepare(self, piece: MicroBatch) -> MicroBatch:
        """Return a micro-batch with more tensors that `forward` needs. Called without gradients."""
        return piece

    def for_submodel(self, model: PreTrainedModel) -> Objective:
        """Return this objective, with the same parameters, for a smaller model with slices of the model's weights.

        An objective that stores nothing from the model, such as its width, can return itself.
        """
        return self

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        """Return the loss of a micro-batch, summed over the terms that `count` counts.

        encoder: the module to train; encoder.model is the model. piece: the tensors of the micro-batch by name. A row
        with sample_ids −1 is a filler and must add 0.
        """
        raise NotImplementedError


class Learner(Encoder):
    """The model and its objectives as one module, which DistributedDataParallel can wrap."""

    objectives: Mapping[str, Objective]

    def __init__(self, model: PreTrainedModel, objectives: Mapping[str, Objective], *, isolate: bool = False) -> None:
        super().__init__(model, isolate=isolate)
        self.objectives = cast(Any, torch.nn.ModuleDict(objectives))
        self.uses_logits = any(objective.uses_logits for objective in objectives.values())
        self.takes_flat = {MaskedTokens, NextSentences}.issuperset(map(type, objectives.values()))
        """Whether the targets of a micro-batch may be one row, as `micro_batches` makes them with `flat`."""
        is_tied = getattr(model.config, "tie_word_embeddings", True)
        trained = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        self.sizes = {name.removeprefix("model."): parameter.numel() for name, parameter in trained}
        """Number of elements of each parameter that trains, or that --lr-scale may freeze."""
        self.leaves_unused = self.is_dense or not self.uses_logits or not is_tied
        """Whether parameters may get no gradient: the head, or a bias that only heads with tied weights use."""

    @property
    def encoders(self) -> list[Encoder]:
        """The encoders to train: this learner's first, then those of objectives."""
        every = [module for module in self.modules() if isinstance(module, Encoder)]
        return [each for each in every if any(parameter.requires_grad for parameter in each.parameters())]

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return the number of terms in the loss of each objective on this rank's batch."""
        return {name: objective.count(batch) for name, objective in self.objectives.items()}

    @torch.no_grad()
    def prepare(self, piece: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the tensors that the objectives add."""
        for objective in self.objectives.values():
            piece = objective.prepare(piece)
        return piece

    def forward(self, **piece: torch.Tensor) -> dict[str, LossSum]:
        """Return the loss of each objective on a micro-batch, by name."""
        outputs = Outputs(*self.outputs(piece, predict=self.uses_logits))
        return {name: objective(self, outputs, piece) for name, objective in self.objectives.items()}

    def total(self, losses: Mapping[str, LossSum], scale: torch.Tensor) -> torch.Tensor:
        """Return the sum of all losses, each times its factor in `scale`, float32 [N], and its objective's weight."""
        objectives = zip(self.objectives.items(), scale, strict=True)
        parts = [objective.weight * (losses[name].sum * factor) for (name, objective), factor in objectives]
        return sum(parts[1:], parts[0])

    def log_names(self) -> dict[str, tuple[str, str]]:
        """Return the names of each objective's loss and accuracy in the log; those of the first have no prefix."""
        names = {}
        for number, (name, objective) in enumerate(self.objectives.items()):
            prefix, accuracy = f"{name}_" if number else "", objective.accuracy_name
            names[name] = (f"{prefix}loss", accuracy if accuracy != "accuracy" else f"{prefix}accuracy")
        return names


class MaskedTokens(Objective):
    """The cross entropy of the masked tokens. Counts targets."""

    def count(self, batch: Batch) -> int:
        return num_targets(batch)

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        assert outputs.logits is not None  # noqa: S101  (uses_logits is true)
        return classification(outputs.logits.flatten(0, 1), piece["targets"].flatten())


class NextSentences(Objective):
    """The cross entropy of next_sentence_label [B]. Counts rows. Needs a BertForPreTraining."""

    samples = "pairs"
    uses_logits = False

    def count(self, batch: Batch) -> int:
        return batch.sample_ids.size

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        model: Any = encoder.model  # a BertForPreTraining
        pooled = model.bert.pooler(outputs.hidden)
        return classification(model.cls.seq_relationship(pooled), piece["next_sentence_label"])


class Diffusion(Objective):
    """The cross entropy of the masked tokens, divided by the masked share of the row. Counts tokens that may be masked.

    The mean is an upper bound of the negative log-likelihood of a token, in nats. The accuracy has the same weights.
    Rows need `--masking uniform`.
    """

    def count(self, batch: Batch) -> int:
        assert batch.weights is not None  # noqa: S101  (--masking uniform gives weights)
        return int(np.rint(batch.weights * (batch.targets != IGNORE_INDEX).sum(1)).sum())

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        assert outputs.logits is not None  # noqa: S101  (uses_logits is true)
        logits, targets, weights = outputs.logits.float(), piece["targets"], piece["weights"]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        sums = losses.view_as(targets).sum(1) * weights
        correct = (logits.detach().argmax(-1) == targets).sum(1) * weights
        return LossSum(sums.sum(), correct.sum())


OBJECTIVES: dict[str, type[Objective]] = {"mlm": MaskedTokens, "nsp": NextSentences, "diffusion": Diffusion}
"""Objectives by their name in --objective. docs/extending.md shows how to add one."""
