"""Distillation: learn from a teacher and from the text, (1 − alpha) · text + alpha · teacher.

logits     T² · KL divergence of the predictions at the masked positions (Hinton et al., "Distilling the Knowledge in a
           Neural Network", 2015). The teacher's come from a cache of its k most probable tokens and the total of all
           others, or from a teacher that runs during training.
relations  KL divergence of the relations of queries, of keys and of values between the positions of a row, in the last
           layers (Wang et al., "MiniLMv2", 2021). Teacher and student may have any widths and numbers of heads.
hidden     Mean squared difference of hidden states, through a trained projection, and of attention scores, layer by
           layer (Jiao et al., "TinyBERT", 2020).

A teacher is not part of the student's module. Its answers are tensors of the micro-batch, from a cache or from
`Teacher`, so the student's state_dict, gradients and checkpoints do not contain it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from bertdata import IGNORE_INDEX, Batch, Loader, key
from bertdata.support import UsageError
from bertrain import checkpoint
from bertrain.config import Config
from bertrain.data import Stream
from bertrain.lab.distillation import taps
from bertrain.lab.distillation.answers import TaughtLoader, read_header
from bertrain.lab.distillation.taps import EMBEDDINGS, Taps
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.options import DistillationOptions
from bertrain.methods import BuildModel, LearnerSetting, Method
from bertrain.models.encoder import Encoder, MicroBatch
from bertrain.models.families import family_of
from bertrain.models.load import check_fits, check_length, load_model
from bertrain.objectives import Learner, LossSum, Objective, Outputs, num_targets
from bertrain.plan import longest
from bertrain.trainer import autocast_of

SMALLEST_RELATION_HEAD = 16  # dimensions of the student in one relation head
PROJECTIONS = ("teacher_queries", "teacher_keys", "teacher_values")
_HIDDEN_SCORE = -1e9  # score of a hidden position; finite, as −∞ gives NaN if all of a row are hidden


class Distil(Objective):
    """The loss from a teacher. Counts targets for logits, rows for other kinds."""

    accuracy_name = "agreement"  # share of targets with the same most probable token; 0 without logits

    def __init__(
        self,
        model: PreTrainedModel,
        setting: LearnerSetting,
        options: DistillationOptions,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        """teacher: the model; None with a cache."""
        config = setting.config
        super().__init__(model, config)
        self.method, self.weight, self.temperature = options.kind, options.alpha, options.temperature
        self.isolate = config.isolate_documents
        self.vocab_size = setting.shards.special_tokens.vocab_size  # the student's vocabulary may be padded
        self.layer_pairs: list[tuple[int, int]] = []  # (layer of the student, its layer of the teacher)
        self.compares_attention, self.num_heads = False, getattr(model.config, "num_attention_heads", 0)
        self.uses_logits = self.method == "logits"
        self.teacher: Teacher | None = None
        """Who answers each micro-batch; None where a cache has the answers. It is no torch module, so not a part."""
        if teacher and self.method != "logits":
            for tapped in (model, teacher):
                taps.check(tapped, hidden=self.method == "hidden")
            student_config, teacher_config = model.config, teacher.config
            self.layer_pairs = _layer_pairs(student_config.num_hidden_layers, teacher_config.num_hidden_layers, options)
            self._taps = Taps(model, [layer for layer, _ in self.layer_pairs], hidden=self.method == "hidden")
        if teacher and self.method == "hidden":
            both = self._taps.has_attention and taps.has_attention(teacher)
            self.compares_attention = both and self.num_heads == teacher_config.num_attention_heads
            torch.manual_seed(key(config.seed, "distil") >> 1)
            self.projection = torch.nn.Linear(student_config.hidden_size, teacher_config.hidden_size)
        if teacher:
            self.teacher = Teacher(teacher, self, setting)

    def for_submodel(self, model: PreTrainedModel) -> Distil:
        """Return an objective with taps for the smaller model: relations, or hidden states with a sliced projection."""
        if not self.layer_pairs:
            return self
        adapted, last = copy.copy(self), model.config.num_hidden_layers - 1
        adapted.layer_pairs = [(last, self.layer_pairs[0][1])]
        adapted._taps = Taps(model, [last], hidden=self.method == "hidden")  # noqa: SLF001
        adapted.compares_attention = self.compares_attention and model.config.num_attention_heads == self.num_heads
        return adapted

    def count(self, batch: Batch) -> int:
        return num_targets(batch) if self.method == "logits" else batch.sample_ids.size

    def prepare(self, piece: MicroBatch) -> MicroBatch:
        return piece | self.teacher.answers(piece) if self.teacher else piece

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        if self.method == "logits":
            assert outputs.logits is not None  # noqa: S101  (uses_logits is true)
            return self._logits(outputs.logits[..., : self.vocab_size].float(), piece)
        has_targets = (piece["targets"] != IGNORE_INDEX).any(1)  # rows without a target, such as a filler row, add 0
        seen, filled = visible(piece, isolate=self.isolate)
        if self.method == "relations":
            row_losses = self._relations(piece, seen, filled)
        else:
            row_losses = self._hidden(encoder, piece, seen, filled)
        self._taps.forget()
        loss = (row_losses * has_targets).sum()
        return LossSum(loss, torch.zeros_like(has_targets.sum()))

    def _logits(self, logits: torch.Tensor, piece: MicroBatch) -> LossSum:
        """Return T² · KL summed over the targets. logits: float32 [B, K, V]."""
        used = piece["targets"] != IGNORE_INDEX
        logprobs = piece["teacher_logprobs"].float()
        ids = piece["teacher_ids"].long() if "teacher_ids" in piece else None
        losses = divergence(logits, logprobs, self.temperature, ids, piece.get("teacher_tails"))
        best = logprobs.argmax(-1) if ids is None else ids[..., 0]
        return LossSum(self.temperature**2 * (losses * used).sum(), ((logits.argmax(-1) == best) & used).sum())

    def _relations(self, piece: MicroBatch, seen: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        """Return the mean KL over relation heads, real tokens and the three kinds of relations, [B]."""
        losses = torch.zeros(filled.shape[0], device=filled.device)
        for student, name in zip(self._taps.projections(self.layer_pairs[0][0]), PROJECTIONS, strict=True):
            teacher = piece[name]
            heads = relation_heads(student.shape[-1], teacher.shape[-1])
            scores = (attention_scores(x, x, heads).masked_fill(~seen, _HIDDEN_SCORE) for x in (student, teacher))
            log_q, log_p = (score.log_softmax(-1) for score in scores)  # [B, heads, T, T]
            kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean(1)
            losses = losses + (kl * filled).sum(-1) / (3 * filled.sum(-1))
        return losses

    def _hidden(self, encoder: Encoder, piece: MicroBatch, seen: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        """Return mean squares over dimensions, real tokens and layers, [B], plus those of scores if heads match."""
        losses = torch.zeros(filled.shape[0], device=filled.device)
        for number, (layer, _) in enumerate(self.layer_pairs):
            states, projection = self._taps.hidden[layer], self.projection
            projected = F.linear(states, projection.weight[:, : states.shape[-1]], projection.bias)
            difference = projected.float() - piece["teacher_hidden"][number].float()
            losses = losses + (difference.square().mean(-1) * filled).sum(-1) / (filled.sum(-1) * len(self.layer_pairs))
        layers = [layer for layer, _ in self.layer_pairs if layer != EMBEDDINGS]
        for number, layer in enumerate(layers if self.compares_attention else []):
            queries, keys = self._taps.projections(layer)[:2]
            scores = attention_scores(queries, keys, encoder.model.config.num_attention_heads)
            both = (seen * filled[:, None, :, None]).expand(-1, -1, -1, scores.shape[-1])
            squares = ((scores - piece["teacher_scores"][number].float()).square() * both).sum((1, 2, 3))
            losses = losses + squares / (both.sum((1, 2, 3)) * scores.shape[1] * len(layers))
        return losses


class Teacher:
    """A model that answers micro-batches: in eval mode, without gradients, and unaffected by its padding.

    logits: teacher_logprobs [B, K, V]. relations: teacher_queries, teacher_keys and teacher_values [B, T, width].
    hidden: teacher_hidden [layers, B, T, H] and, if student and teacher have the same number of heads, teacher_scores
    [layers, B, heads, T, T].
    """

    def __init__(self, model: PreTrainedModel, student: Distil, setting: LearnerSetting) -> None:
        self._encoder = Encoder(model, isolate=student.isolate).to(setting.device).eval().requires_grad_(False)
        self._autocast = autocast_of(setting.device, setting.precision if family_of(model).half else "fp32")
        self._student, self._layers = student, [layer for _, layer in student.layer_pairs]
        if student.method != "logits":
            self._taps = Taps(model, self._layers, hidden=student.method == "hidden")

    def answers(self, piece: MicroBatch) -> MicroBatch:
        with self._autocast():
            if self._student.method == "logits":
                logits = self._encoder.logits(**piece)
                return {"teacher_logprobs": logits[..., : self._student.vocab_size].float().log_softmax(-1)}
            self._encoder.encode(**piece)
            if self._student.method == "relations":
                tensors = dict(zip(PROJECTIONS, self._taps.projections(self._layers[0]), strict=True))
            else:
                tensors = {"teacher_hidden": torch.stack([self._taps.hidden[layer] for layer in self._layers])}
            if self._student.compares_attention:
                layers, heads = self._layers, self._encoder.model.config.num_attention_heads
                both = [self._taps.projections(layer)[:2] for layer in layers if layer != EMBEDDINGS]
                tensors["teacher_scores"] = torch.stack([attention_scores(q, k, heads) for q, k in both])
        self._taps.forget()
        return tensors


def divergence(
    logits: torch.Tensor,
    logprobs: torch.Tensor,
    temperature: float,
    ids: torch.Tensor | None = None,
    tails: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the KL divergence [N] of a teacher from the student's logits [N, V] at a temperature, without factor T².

    Without ids, logprobs [N, V] are the teacher's, of tokens 0, 1, …. With ids [N, k], logprobs [N, k] are of those
    tokens and tails [N] of all other tokens together. Both distributions then become k + 1 buckets, which costs O(k)
    more than the student's own softmax, and the temperature applies to the buckets. With k = V this is the plain
    divergence. For smaller k and T = 1 it is a lower bound of it: 0 only if the k tokens, and all others together, have
    equal probabilities.
    """
    if ids is None or tails is None:
        top = logits[..., : logprobs.shape[-1]]
    else:
        top = logits.gather(-1, ids)
        if ids.shape[-1] < logits.shape[-1]:  # logsumexp of the other tokens: 1 − Σ would lose a small tail
            others = logits.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
            top, logprobs = torch.cat([top, others], -1), torch.cat([logprobs, tails.unsqueeze(-1).to(logprobs)], -1)
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (top, logprobs))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def visible(piece: MicroBatch, *, isolate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which positions a position may attend to, bool [B, 1, T or 1, T], and which hold text, float [B, T]."""
    filled = piece.get("attention_mask")
    filled = torch.ones_like(piece["input_ids"]) if filled is None else filled
    seen = filled[:, None, None, :].bool()
    if isolate and "position_ids" in piece:
        documents = (piece["position_ids"] == 0).cumsum(1)
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return seen, filled.float()


def relation_heads(student_width: int, teacher_width: int) -> int:
    """Return the number of relation heads for two widths.

    It is the largest number that divides both widths and leaves at least 16 dimensions of the student per head, or 1.
    """
    common = math.gcd(student_width, teacher_width)
    most = max(1, student_width // SMALLEST_RELATION_HEAD)
    return max(heads for heads in range(1, min(common, most) + 1) if common % heads == 0)


def attention_scores(queries: torch.Tensor, keys: torch.Tensor, heads: int) -> torch.Tensor:
    """Return attention scores, float32 [B, heads, T, T], divided by √(head width). query, key: [B, T, H].

    If several heads share a key, keys are narrower than queries.
    """
    sharing = queries.shape[-1] // keys.shape[-1]
    q, k = (x.unflatten(-1, (heads // n, -1)).transpose(1, 2) for x, n in ((queries, 1), (keys, sharing)))
    k = k.repeat_interleave(sharing, 1) if sharing > 1 else k
    return (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])


def _layer_pairs(student_layers: int, teacher_layers: int, options: DistillationOptions) -> list[tuple[int, int]]:
    """Return pairs of a student's layer and the teacher's layer that it learns from."""
    if options.kind == "relations" or options.distil_layers == "last":
        return [(student_layers - 1, teacher_layers - 1)]
    if teacher_layers < student_layers:
        layers = f"the teacher has {teacher_layers} layers, and the student {student_layers}"
        sentence = f"--distil-layers uniform needs a deeper teacher: {layers}; give --distil-layers last"
        raise UsageError(sentence, "unsupported", option="distil_layers", given=options.distil_layers)
    return [
        (EMBEDDINGS, EMBEDDINGS),
        *((layer, (layer + 1) * teacher_layers // student_layers - 1) for layer in range(student_layers)),
    ]


class Distillation(Method):
    """Trains a student on a teacher's predictions and on the text."""

    options_type = DistillationOptions
    _directory: Path | None = None  # one checkpoint of the teacher for all phases, as a running one writes more

    def can_compile(self, config: Config) -> bool:
        return self.options.kind == "logits" or not config.gradient_checkpointing

    def identity(self, learner: Learner) -> Mapping[str, str]:
        return {"teacher": self._teacher}

    def loader(self, make: Callable[..., Loader]) -> Callable[..., Loader]:
        return partial(TaughtLoader, teacher_cache=self.options.teacher_cache) if self.options.teacher_cache else make

    def check_run(self, stream: Stream, learner: Learner, build_model: BuildModel) -> Sequence[str]:
        """Raise UsageError unless a cache covers all samples of the run, or all of its epochs, which then repeat."""
        if not self.options.teacher_cache:
            return ()
        loader, num_samples = stream.loader, stream.plan.samples()
        if loader.variants is not None:
            num_samples = min(num_samples, loader.variants * loader.num_samples)
        loader.read(np.array([num_samples - 1]))
        return ()

    def objectives(self, objectives: dict[str, Objective], model: PreTrainedModel, setting: LearnerSetting) -> None:
        """Add the objective. Raises UsageError for a teacher that does not fit."""
        config, options = setting.config, self.options
        for name in config.objective.split("+"):
            objectives[name].weight *= 1 - options.alpha
        if options.teacher_cache:
            teacher, sha256 = None, read_header(Path(options.teacher_cache))["teacher"]["sha256"]
        else:
            directory = self._directory = self._directory or checkpoint.find(Path(options.teacher), "teacher")
            teacher = load_model(directory)
            check_fits(directory, setting.shards, teacher)
            check_length(longest(config), teacher.config, directory)
            sha256 = fingerprint(teacher)
        self._teacher = f"{options.kind} of teacher {sha256[:16]}"
        objectives["distil"] = Distil(model, setting, options, teacher)
