"""Learning from a teacher beside the text: (1 − alpha) · cross entropy + alpha · what the teacher says.

logits     T² · KL of the predictions at the masked places (Hinton et al., "Distilling the Knowledge in a Neural
           Network", 2015): of a cache of the k most probable tokens and the mass of all others, or of a teacher asked.
relations  KL of the relations of queries, of keys and of values among the places of a row, in the last layers (Wang et
           al., "MiniLMv2", 2021). Widths and heads of teacher and student may be any.
hidden     squared differences of hidden states, through a projection that is trained along, and of attention scores,
           layer by layer (Jiao et al., "TinyBERT", 2020).

A teacher stands outside the student's module: its answers come as tensors of the batch, whoever gave them, so it is in
no state_dict, no gradient and no checkpoint of the student's. Every loss is a sum, as in loss.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from bertdata import IGNORE_INDEX, Dataset, key
from bertdata.errors import UsageError
from bertdata.format.answers import TeacherCache
from bertrain import checkpoint, model
from bertrain.config import Config
from bertrain.feed import MicroBatch
from bertrain.loss import MaskedLM, divergence

LEAST_RELATION = 16  # numbers of the student's in a relation head
_HIDDEN = -1e9  # in place of a score that must not be seen: no NaN where a row of them is all hidden
Pieces = Iterator[MicroBatch]


def student(
    config: Config, weights: PreTrainedModel, shards: Dataset, device: torch.device, precision: Callable[[], Any]
) -> tuple[MaskedLM, Callable[[Pieces], Pieces]]:
    """The module to train, and what adds a teacher's answers to its micro-batches.

    precision: the autocast that a teacher is asked in. Raises UsageError for a teacher that does not fit.
    """
    isolate, vocab_size = config.isolate_documents, shards.special_tokens.vocab_size
    if config.method is None:
        return MaskedLM(weights, isolate=isolate), lambda pieces: pieces
    if config.teacher_cache:
        known = TeacherCache(config.teacher_cache).header["teacher"]["sha256"]
        return Distilled(weights, config, f"logits of teacher {known[:16]}", vocab_size), lambda pieces: pieces
    directory = checkpoint.find(Path(config.teacher))
    teacher = model.load(directory)
    model.check_fits(directory, shards, teacher)
    length = max(config.length, config.long_length or 0)
    if length > teacher.config.max_position_embeddings:
        most = teacher.config.max_position_embeddings
        raise UsageError(f"rows of {length} are more than the {most} places of --teacher {config.teacher}")
    name = f"{config.method} of teacher {model.fingerprint(teacher)[:16]}"
    made = Distilled(weights, config, name, vocab_size, teacher=teacher)
    return made, Teacher(teacher, made, device, precision, vocab_size=vocab_size)


class Distilled(MaskedLM):
    """A student: MaskedLM with one loss more, the teacher's.

    Each loss has its plain value, which the log shows and which compares with runs without a teacher; its gradient is
    scaled to its share, alpha for the teacher's, 1 − alpha for the others.
    """

    def __init__(
        self,
        weights: PreTrainedModel,
        config: Config,
        name: str,
        vocab_size: int,
        *,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(weights, isolate=config.isolate_documents)
        self.teacher, self.method, self.alpha, self.temperature = name, config.method, config.alpha, config.temperature
        self.vocab_size = vocab_size  # of the text; a student's may be padded
        self.counts = (0, 1, 0) if config.method == "logits" else (0, 1, 1)
        self.pairs: list[tuple[int, int]] = []  # layers of the student and of the teacher; -1 is the embeddings
        self.maps_attention = False
        if teacher is None or config.method == "logits":
            return
        own, others = weights.config, teacher.config
        self.pairs = _pairs(own.num_hidden_layers, others.num_hidden_layers, config)
        if config.method == "relations":
            self.heads = relation_heads(own.hidden_size, others.hidden_size)
        else:
            self.maps_attention = own.num_attention_heads == others.num_attention_heads
            torch.manual_seed(key(config.seed, "distil") >> 1)
            self.projection = torch.nn.Linear(own.hidden_size, others.hidden_size)
        self._tap = Tap(weights, [layer for layer, _ in self.pairs], hidden=config.method == "hidden")

    def forward(
        self,
        input_ids: torch.Tensor,
        masked_positions: torch.Tensor,
        targets: torch.Tensor,
        next_sentence_label: torch.Tensor | None = None,
        **more: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As MaskedLM's, of three: targets, next sentences (0 where there are none), and the teacher's.

        teacher_… are the answers of a cache or a Teacher. With logits the third says how often both predict the same.
        """
        said = {name: more.pop(name) for name in list(more) if name.startswith("teacher_")}
        hidden = self.encode(input_ids, **more)
        predicted = self._vocabulary(hidden, masked_positions)
        losses, right = self._losses(hidden, predicted, targets, next_sentence_label)
        agreed = torch.zeros_like(right[0])
        if self.method == "logits":
            loss, agreed = _from_logits(predicted[..., : self.vocab_size].float(), targets, said, self.temperature)
        else:
            rows = (targets != IGNORE_INDEX).any(1)  # a rank without rows runs one that has no targets
            places = visible(input_ids, isolate=self.isolate, **more)
            learn = self._from_relations if self.method == "relations" else self._from_hidden
            loss = (learn(said, *places) * rows).sum()
        own = _shared(losses, 1 - self.alpha)
        nothing = torch.zeros(2 - own.numel(), dtype=own.dtype, device=own.device)
        all_losses = torch.cat([own, nothing, _shared(loss, self.alpha).reshape(1)])
        return all_losses, torch.cat([right, nothing.to(right.dtype), agreed.reshape(1)])

    def _from_relations(self, said: MicroBatch, seen: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        """[B]: mean of the KL over relation heads, filled places and the three kinds of relations."""
        found = torch.zeros(filled.shape[0], device=filled.device)
        for own, others in zip(self._tap.projections(self.pairs[0][0]), said["teacher_qkv"], strict=True):
            log_q, log_p = (_relations(x, self.heads, seen) for x in (own, others))
            divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean(1)
            found = found + (divergence * filled).sum(-1) / (3 * filled.sum(-1))
        return found

    def _from_hidden(self, said: MicroBatch, seen: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        """[B]: mean squares over numbers, filled places and layers; and so of attention, if there are as many heads."""
        found = torch.zeros(filled.shape[0], device=filled.device)
        for number, (layer, _) in enumerate(self.pairs):
            difference = self.projection(self._tap.hidden[layer]).float() - said["teacher_hidden"][number].float()
            found = found + (difference.square().mean(-1) * filled).sum(-1) / (filled.sum(-1) * len(self.pairs))
        layers = [layer for layer, _ in self.pairs if layer >= 0]
        for number, layer in enumerate(layers if self.maps_attention else []):
            scores = _scores(*self._tap.projections(layer)[:2], self.model.config.num_attention_heads)
            both = (seen * filled[:, None, :, None]).expand(-1, -1, -1, scores.shape[-1])
            squares = ((scores - said["teacher_scores"][number].float()).square() * both).sum((1, 2, 3))
            found = found + squares / (both.sum((1, 2, 3)) * scores.shape[1] * len(layers))
        return found


class Teacher:
    """Adds the answers of a model to micro-batches: in eval mode, without gradients, its padding inert.

    logits: teacher_logprobs [B, K, V]. relations: teacher_qkv [3, B, T, H]. hidden: teacher_hidden [layers, B, T, H]
    and, with as many heads, teacher_scores [layers, B, heads, T, T].
    """

    def __init__(
        self,
        weights: PreTrainedModel,
        taught: Distilled,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
        *,
        vocab_size: int,
    ) -> None:
        self._module = MaskedLM(weights, isolate=taught.isolate).to(device).eval().requires_grad_(False)
        self._precision, self._vocab_size, self._method = precision, vocab_size, taught.method
        self._layers, self._maps_attention = [layer for _, layer in taught.pairs], taught.maps_attention
        self._tap = Tap(weights, self._layers, hidden=taught.method == "hidden")

    def __call__(self, pieces: Pieces) -> Pieces:
        return (piece | self._answers(**piece) for piece in pieces)

    @torch.no_grad()
    def _answers(
        self,
        input_ids: torch.Tensor,
        masked_positions: torch.Tensor,
        targets: torch.Tensor,
        next_sentence_label: torch.Tensor | None = None,
        **more: torch.Tensor,
    ) -> MicroBatch:
        with self._precision():
            if self._method == "logits":
                logits = self._module.logits(input_ids, masked_positions, **more)[..., : self._vocab_size]
                return {"teacher_logprobs": logits.float().log_softmax(-1)}
            self._module.encode(input_ids, **more)
            if self._method == "relations":
                return {"teacher_qkv": torch.stack(self._tap.projections(self._layers[0]))}
            found = {"teacher_hidden": torch.stack([self._tap.hidden[layer] for layer in self._layers])}
            if self._maps_attention:
                heads = self._module.model.config.num_attention_heads
                asked = [self._tap.projections(layer)[:2] for layer in self._layers if layer >= 0]
                found["teacher_scores"] = torch.stack([_scores(*pair, heads) for pair in asked])
            return found


class Tap:
    """What passes through some layers of a BERT or ModernBERT in a forward pass, by hooks.

    hidden: layer → its output [B, T, H], -1 for the embeddings.
    """

    def __init__(self, weights: PreTrainedModel, layers: list[int], *, hidden: bool) -> None:
        self.hidden: dict[int, torch.Tensor] = {}
        self._projected: dict[tuple[int, int], torch.Tensor] = {}
        base = weights.base_model
        self._is_bert = weights.config.model_type == "bert"
        for number in layers:
            layer = base.embeddings if number < 0 else (base.encoder.layer if self._is_bert else base.layers)[number]
            if hidden:
                layer.register_forward_hook(_keeper(self.hidden, number))
            if number >= 0:
                own = layer.attention.self if self._is_bert else layer.attn
                for kind, part in enumerate(("query", "key", "value") if self._is_bert else ("Wqkv",)):
                    getattr(own, part).register_forward_hook(_keeper(self._projected, (number, kind)))

    def projections(self, layer: int) -> list[torch.Tensor]:
        """Queries, keys and values of a layer, [B, T, H] each; before ModernBERT turns them by their places."""
        if self._is_bert:
            return [self._projected[layer, kind] for kind in range(3)]
        return list(self._projected[layer, 0].chunk(3, -1))


def _keeper(kept: dict[Any, torch.Tensor], name: Any) -> Callable[..., None]:
    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        kept[name] = output[0] if isinstance(output, tuple) else output

    return keep


def _from_logits(
    predicted: torch.Tensor, targets: torch.Tensor, said: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """T² · KL summed over the targets, and how often the most probable token is the teacher's too."""
    used = targets != IGNORE_INDEX
    logprobs, ids, tails = said["teacher_logprobs"].float(), said.get("teacher_ids"), said.get("teacher_tails")
    if ids is None or tails is None:
        found = divergence(predicted, logprobs, temperature)
        best = logprobs.argmax(-1)
    else:
        ids = ids.long()
        found = divergence(predicted, logprobs, temperature, ids, tails.float())
        best = ids[..., 0]
    return temperature**2 * (found * used).sum(), ((predicted.argmax(-1) == best) & used).sum()


def _shared(loss: torch.Tensor, share: float) -> torch.Tensor:
    """The same value; the gradient is `share` of it."""
    return share * loss + (1 - share) * loss.detach()


def visible(
    input_ids: torch.Tensor,
    *,
    isolate: bool,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **_: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which places a place may look at, bool [B, 1, T or 1, T], and which places hold text, float [B, T]."""
    filled = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    seen = filled[:, None, None, :].bool()
    if isolate and position_ids is not None:
        documents = (position_ids == 0).cumsum(1)
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return seen, filled.float()


def relation_heads(own: int, others: int) -> int:
    """As many as divide both widths and leave 16 numbers of the student's to each; for coprime widths one."""
    common = math.gcd(own, others)
    most = max(1, own // LEAST_RELATION)
    return max(heads for heads in range(1, min(common, most) + 1) if common % heads == 0)


def _relations(states: torch.Tensor, heads: int, seen: torch.Tensor) -> torch.Tensor:
    """[B, T, H] → the log of how much each place is related to each other: [B, heads, T, T]."""
    return _scores(states, states, heads).masked_fill(~seen, _HIDDEN).log_softmax(-1)


def _scores(queries: torch.Tensor, keys: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, H] each → float32 [B, heads, T, T], divided by the root of a head's width."""
    q, k = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (queries, keys))
    return (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])


def _pairs(own: int, others: int, config: Config) -> list[tuple[int, int]]:
    """Layers of the student and the teacher's that they learn from."""
    if config.method == "relations" or config.distil_layers == "last":
        return [(own - 1, others - 1)]
    if others < own:
        raise UsageError(
            f"--distil-layers uniform needs a teacher with at least the student's {own} layers, and --teacher "
            f"{config.teacher} has {others}; give --distil-layers last"
        )
    return [(-1, -1), *((layer, (layer + 1) * others // own - 1) for layer in range(own))]
