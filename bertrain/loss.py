"""The losses of pre-training, as sums: whoever knows the counts of all ranks divides by them, once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import Module
from torch.nn import functional as F
from transformers import PreTrainedModel

from bertdata import IGNORE_INDEX
from bertrain import isolation


class _SumOfCrossEntropies(torch.autograd.Function):
    """logits float32 [N, V], targets [N], IGNORE_INDEX for none → the sum of their cross entropies.

    As F.cross_entropy, but the gradient is made where the log probabilities were, which for a large vocabulary saves
    two of four walks through the largest tensor there is.
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = logits.log_softmax(-1)
        used, places = targets != IGNORE_INDEX, targets.clamp(min=0).unsqueeze(-1)
        loss = -(found.gather(-1, places).squeeze(-1) * used).sum()
        found.exp_().scatter_add_(-1, places, torch.full_like(places, -1, dtype=found.dtype))
        context.save_for_backward(found, used)
        return loss

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        found, used = context.saved_tensors
        return found.mul_((used * gradient).unsqueeze(-1)), None


def _sum_of_cross_entropies(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():  # which sees to the walks itself
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return _SumOfCrossEntropies.apply(logits, targets)


def divergence(
    predicted: torch.Tensor,
    logprobs: torch.Tensor,
    temperature: float,
    ids: torch.Tensor | None = None,
    tails: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL of a teacher's predictions from the student's logits [N, V], at a temperature: [N], without the factor T².

    Without ids, logprobs are of tokens 0, 1, …, [N, V]. With ids [N, k], logprobs [N, k] are of these, and tails [N] of
    all other tokens together: both distributions become k + 1 buckets, in O(k) beside the student's own softmax, and
    the temperature is applied to the buckets. With k = V that is the plain divergence; with less a lower bound of it,
    for T = 1, that is 0 only where the student gives each of the k and all others together what the teacher does.
    """
    if ids is None or tails is None:
        top = predicted[..., : logprobs.shape[-1]]
    else:
        top = predicted.gather(-1, ids)
        if ids.shape[-1] < predicted.shape[-1]:  # a logsumexp of just the others: 1 − Σ would lose a small tail
            others = predicted.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
            top, logprobs = torch.cat([top, others], -1), torch.cat([logprobs, tails.unsqueeze(-1)], -1)
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (top, logprobs))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


class MaskedLM(Module):
    """Encoder, heads and losses as one module, so that all of it runs inside DistributedDataParallel's forward.

    Only the K masked places of a row reach the vocabulary projection: exact, since the head works place by place, and
    it saves 85 % of the largest matrix product of a small model. With `isolate` rows are packed and no token sees
    another document's.
    """

    counts = (0, 1)
    """What the sum of each loss is divided by: 0 all targets, 1 all rows."""
    teacher: str | None = None
    """Who teaches besides the text, and what: a run goes on only with the same."""

    def __init__(self, model: PreTrainedModel, *, isolate: bool = False) -> None:
        super().__init__()
        self.model, self.isolate = model, isolate
        if isolate:
            model.set_attn_implementation(isolation.NAME)

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, T] each → [B, T, H]. position_ids are those of packed rows, cu_seqlens where their pieces begin."""
        if self.isolate:
            assert position_ids is not None  # noqa: S101  (packed samples have them)
            known = {"position_ids": position_ids, **isolation.documents(position_ids, cu_seqlens)}
        else:  # without a mask where all rows are full, for then attention takes its fastest way
            known = {"attention_mask": attention_mask}
        if token_type_ids is not None:
            known["token_type_ids"] = token_type_ids
        return self.model.base_model(input_ids=input_ids, **known).last_hidden_state

    def logits(self, input_ids: torch.Tensor, masked_positions: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """[B, T], [B, K] → [B, K, V]."""
        return self._vocabulary(self.encode(input_ids, **more), masked_positions)

    def _vocabulary(self, hidden: torch.Tensor, masked_positions: torch.Tensor) -> torch.Tensor:
        places = masked_positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        picked = hidden.gather(1, places)
        if self.model.config.model_type == "bert":
            return getattr(self.model.cls, "predictions", self.model.cls)(picked)
        return self.model.decoder(self.model.head(picked))

    def forward(
        self,
        input_ids: torch.Tensor,
        masked_positions: torch.Tensor,
        targets: torch.Tensor,
        next_sentence_label: torch.Tensor | None = None,
        **more: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses of all targets, and with next_sentence_label [B] that of all rows: float32 [1] or [2].

        And how many of each were predicted right: int64, of the same shape.
        """
        hidden = self.encode(input_ids, **more)
        return self._losses(hidden, self._vocabulary(hidden, masked_positions), targets, next_sentence_label)

    def _losses(
        self,
        hidden: torch.Tensor,
        predicted: torch.Tensor,
        targets: torch.Tensor,
        next_sentence_label: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = [(predicted.flatten(0, 1), targets.flatten())]
        if next_sentence_label is not None:
            pooled = self.model.bert.pooler(hidden)
            found.append((self.model.cls.seq_relationship(pooled), next_sentence_label))
        losses = [_sum_of_cross_entropies(x.float(), y) for x, y in found]
        right = [(x.detach().argmax(-1) == y).sum() for x, y in found]
        return torch.stack(losses), torch.stack(right)
