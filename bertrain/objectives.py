"""What a run learns from: masked tokens, next sentences, masked diffusion. Named by --objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from bertdata import IGNORE_INDEX, Batch
from bertdata.errors import UsageError
from bertrain.config import Config, pick
from bertrain.models.encoder import Encoder, MicroBatch


def num_targets(batch: Batch) -> int:
    """How many tokens of this rank's batch are predicted."""
    return int((batch.targets != IGNORE_INDEX).sum())


def objectives_of(config: Config) -> dict[str, type[Objective]]:
    """The objectives that --objective names, in its order. Raises UsageError for unknown names."""
    names = config.objective.split("+")
    if len(set(names)) < len(names):
        sentence = f"--objective {config.objective} names an objective twice; name each once"
        raise UsageError(sentence, "malformed", option="objective", given=config.objective)
    return {name: pick(OBJECTIVES, name, "--objective") for name in names}


class LossSum(NamedTuple):
    """One loss of a micro-batch."""

    sum: torch.Tensor  # float32 []: the loss summed over what Objective.count counts
    num_correct: torch.Tensor  # []: how many predictions were right, or the sum of their weights


def classification(logits: torch.Tensor, targets: torch.Tensor) -> LossSum:
    """logits [N, V], targets int64 [N] with IGNORE_INDEX for none → the sum of their cross entropies."""
    logits = logits.float()
    if torch.compiler.is_compiling():  # the compiler fuses the passes itself
        total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    else:
        total = _CrossEntropySum.apply(logits, targets)
    return LossSum(total, (logits.detach().argmax(-1) == targets).sum())


class _CrossEntropySum(torch.autograd.Function):
    """F.cross_entropy with the gradient written into the log probabilities.

    For a large vocabulary this saves two of four passes over the largest tensor of a step.
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
    """What the model computed for a micro-batch, once for all objectives."""

    hidden: torch.Tensor | None  # [B, T, H]: the last hidden states; None for some families that are not in FAMILIES
    logits: torch.Tensor | None  # [B, K, V]: at the masked positions; None if no objective uses them


class Objective(torch.nn.Module):
    """One loss that a run learns from. A subclass gives `count` and `forward`; docs/extending.md adds one.

    `--objective mlm+nsp` trains on the sum of the losses of two objectives, each divided by its own count over all
    ranks. Parameters that an objective has are trained along, and are kept in checkpoints beside the model. torch is
    seeded by step and rank, so that an objective may draw random numbers and resume.
    """

    samples: str | None = None  # the kind of rows that it needs, such as "pairs"; None: any
    accuracy_name = "accuracy"  # what its share of correct predictions is called in the log
    weight = 1.0  # factor on its gradient; the loss in the log is without it
    uses_logits = True  # False: it needs hidden states alone

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        """model: the model that is trained, for its sizes and heads; it is not a part of the objective."""
        super().__init__()

    def count(self, batch: Batch) -> int:
        """How many things of this rank's batch the loss is summed over, such as targets or rows. Called on the CPU."""
        raise NotImplementedError

    def prepare(self, piece: MicroBatch) -> MicroBatch:
        """Adds tensors to a micro-batch that `forward` needs. Called without gradients."""
        return piece

    def of(self, model: PreTrainedModel) -> Objective:
        """This objective for a smaller model whose weights are parts of the model's. It shares the parameters of this.

        An objective that keeps nothing of the model, such as its width, serves smaller ones as it is.
        """
        return self

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        """The loss of a micro-batch, summed over what `count` counts.

        encoder: the module in training; encoder.model is the model.
        piece: the tensors of the micro-batch by name. A row with sample_ids −1 is no row of the batch and must add 0.
        """
        raise NotImplementedError


class Learner(Encoder):
    """Encoder, heads and objectives as one module, so that all of it runs inside DistributedDataParallel's forward."""

    objectives: Mapping[str, Objective]

    def __init__(self, model: PreTrainedModel, objectives: Mapping[str, Objective], *, isolate: bool = False) -> None:
        super().__init__(model, isolate=isolate)
        self.objectives = cast(Any, torch.nn.ModuleDict(objectives))  # which does not say what its modules are
        self.uses_logits = any(objective.uses_logits for objective in objectives.values())
        is_tied = getattr(model.config, "tie_word_embeddings", True)
        self.sizes = {
            name.removeprefix("model."): parameter.numel()
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }
        """The elements of each tensor that is trained, or that --lr-scale may freeze."""
        self.leaves_unused = self.is_dense or not self.uses_logits or not is_tied
        """Whether a step may give parts of the model no gradient: its head, or that bias of an untied one which only
        tied ones use."""

    @property
    def encoders(self) -> list[Encoder]:
        """Those that train: its own, and those that objectives have beside it."""
        every = [module for module in self.modules() if isinstance(module, Encoder)]
        return [each for each in every if any(parameter.requires_grad for parameter in each.parameters())]

    def counts(self, batch: Batch) -> dict[str, int]:
        """By objective, what its sum over this batch will be divided by, once summed over all ranks."""
        return {name: objective.count(batch) for name, objective in self.objectives.items()}

    @torch.no_grad()
    def prepare(self, piece: MicroBatch) -> MicroBatch:
        """A micro-batch with what the objectives add to it."""
        for objective in self.objectives.values():
            piece = objective.prepare(piece)
        return piece

    def forward(self, **piece: torch.Tensor) -> dict[str, LossSum]:
        """A micro-batch of feed.micro_batches → the loss of each objective by name."""
        outputs = Outputs(*self.outputs(piece, predict=self.uses_logits))
        return {name: objective(self, outputs, piece) for name, objective in self.objectives.items()}

    def total(self, losses: Mapping[str, LossSum], scale: torch.Tensor) -> torch.Tensor:
        """The number to minimise: each loss times its factor in `scale`, float32 [N], and its objective's weight."""
        parts = [
            objective.weight * (losses[name].sum * scale[number])
            for number, (name, objective) in enumerate(self.objectives.items())
        ]
        return sum(parts[1:], parts[0])

    def log_names(self) -> dict[str, tuple[str, str]]:
        """By objective, the names of its loss and accuracy in the log: plain for the first, prefixed for the others."""
        names = {}
        for number, (name, objective) in enumerate(self.objectives.items()):
            accuracy = objective.accuracy_name
            prefix = "" if number == 0 else f"{name}_"
            names[name] = (f"{prefix}loss", accuracy if accuracy != "accuracy" else f"{prefix}accuracy")
        return names

    def objective_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the objectives, by name."""
        return {name: tensor for name, tensor in self.state_dict().items() if name.startswith("objectives.")}


class MaskedTokens(Objective):
    """Cross entropy of the masked tokens; counts targets."""

    def count(self, batch: Batch) -> int:
        return num_targets(batch)

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        assert outputs.logits is not None  # noqa: S101  (uses_logits is true)
        return classification(outputs.logits.flatten(0, 1), piece["targets"].flatten())


class NextSentences(Objective):
    """Cross entropy of next_sentence_label [B]; counts rows. The model is a BertForPreTraining."""

    samples = "pairs"
    uses_logits = False

    def count(self, batch: Batch) -> int:
        return batch.sample_ids.size

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        model: Any = encoder.model  # a BertForPreTraining
        pooled = model.bert.pooler(outputs.hidden)
        return classification(model.cls.seq_relationship(pooled), piece["next_sentence_label"])


class Diffusion(Objective):
    """Cross entropy of the masked tokens, those of a row times 1 / its masked share; counts tokens that may be masked.

    The mean is a bound of the negative log-likelihood of a token, in nats. The accuracy has the same weights. Raises
    UsageError for other masks than those of `--masking uniform`.
    """

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        super().__init__(model, config)
        for part in config.parts:
            if part.options.masking != "uniform":
                sentence = (
                    f"--objective diffusion learns from any share of masks, and --masking {part.options.masking} has "
                    "one share; give --masking uniform"
                )
                raise UsageError(sentence, "needs-option", option="masking", given=part.options.masking)

    def count(self, batch: Batch) -> int:
        assert batch.weights is not None  # noqa: S101  (of the policy "uniform")
        return int(np.rint(batch.weights * (batch.targets != IGNORE_INDEX).sum(1)).sum())

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        assert outputs.logits is not None  # noqa: S101  (uses_logits is true)
        logits, targets, weights = outputs.logits.float(), piece["targets"], piece["weights"]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        sums = losses.view_as(targets).sum(1) * weights
        right = (logits.detach().argmax(-1) == targets).sum(1) * weights
        return LossSum(sums.sum(), right.sum())


OBJECTIVES: dict[str, type[Objective]] = {"mlm": MaskedTokens, "nsp": NextSentences, "diffusion": Diffusion}
"""Objectives by the name that --objective gives them. Add your own: docs/extending.md."""
