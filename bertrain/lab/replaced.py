"""Replaced token detection: a discriminator learns which tokens of a text a small generator has replaced.

The model of the run is the generator, which learns from masked tokens as in any other run. Each masked token is
replaced by a sample from its predictions, and the discriminator predicts for every token whether it is the original
(ELECTRA, Clark et al., 2020). The loss is that of the generator plus a weight times that of the discriminator. Each
checkpoint has the discriminator in `discriminator/`, which is the model to fine-tune. docs/objectives.md has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn import functional as F
from transformers import ElectraConfig, ElectraForPreTraining, PreTrainedModel
from transformers.models.electra.modeling_electra import ElectraDiscriminatorPredictions

import bertdata
from bertdata import IGNORE_INDEX, Batch
from bertdata.support import UsageError
from bertrain.lab.options import ReplacedOptions
from bertrain.methods import LearnerSetting, Method, Tensors
from bertrain.models.encoder import Encoder, MicroBatch, recompute_activations, set_rotary_bases
from bertrain.models.families import add_names_of_4, family_of
from bertrain.models.load import check_runs, max_length, model_identity, new_model, tokenizer_files
from bertrain.objectives import Learner, LossSum, Objective, Outputs
from bertrain.plan import Phase, longest

NAME = "discriminator"  # name of the objective, its tensors in beside.pt, and its directory
PLACES_OF_A_ROW = 1 << 32  # above any row length, so that each position of each sample has a unique number


class Difference(Module):
    """The embeddings of another model, without gradients, plus those of this module, which begin at 0."""

    def __init__(self, shared: Parameter, padding_idx: int | None) -> None:
        super().__init__()
        self._shared = (shared,)  # hidden from torch in a tuple, as it is a parameter of the other model
        self.weight, self._padding_idx = Parameter(torch.zeros_like(shared)), padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._shared[0].detach()) + F.embedding(ids, self.weight, self._padding_idx)


class Replaced(Objective):
    """The binary cross entropy of "was replaced" for each token of the text. Counts tokens."""

    def __init__(self, generator: PreTrainedModel, discriminator: PreTrainedModel, setting: LearnerSetting) -> None:
        super().__init__(generator, setting.config)
        self.encoder = Encoder(discriminator, isolate=setting.config.isolate_documents)
        width, activation = discriminator.config.hidden_size, getattr(discriminator.config, "hidden_act", "gelu")
        self.head = ElectraDiscriminatorPredictions(ElectraConfig(hidden_size=width, hidden_act=activation))
        self.vocab_size = setting.shards.special_tokens.vocab_size
        self.key = 0
        """Of the step: what the draws of its tokens follow from."""

    def count(self, batch: Batch) -> int:
        return batch.input_ids.size if batch.attention_mask is None else int(batch.attention_mask.sum())

    def prepare(self, piece: MicroBatch) -> MicroBatch:
        """Add draws, float32 [B, K] from [0, 1): a function of the step, the sample and the position only."""
        number = piece["sample_ids"][:, None] * PLACES_OF_A_ROW + piece["masked_positions"]
        return piece | {"draws": draws(self.key, number)}

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        assert outputs.logits is not None  # noqa: S101  (uses_logits is true)
        targets = piece["targets"]
        text = put(piece["input_ids"], piece, targets)
        replaced = put(text, piece, sampled(outputs.logits.detach()[..., : self.vocab_size], piece["draws"]))
        logits = self.head(self.encoder.encode(**piece | {"input_ids": replaced})).float()
        is_replaced, is_counted = replaced != text, (piece["sample_ids"] >= 0)[:, None].expand_as(text)
        if "attention_mask" in piece:
            is_counted = is_counted & (piece["attention_mask"] != 0)
        losses = F.binary_cross_entropy_with_logits(logits, is_replaced.float(), reduction="none")
        return LossSum((losses * is_counted).sum(), (((logits > 0) == is_replaced) & is_counted).sum())


def put(ids: torch.Tensor, piece: MicroBatch, tokens: torch.Tensor) -> torch.Tensor:
    """Return ids, int64 [B, T], with tokens, int64 [B, K], at the masked positions of a micro-batch."""
    places = piece["masked_positions"].where(piece["targets"] != IGNORE_INDEX, ids.shape[1])  # an index after the row
    return F.pad(ids, (0, 1)).scatter(1, places, tokens)[:, :-1]


def sampled(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return samples from the softmax of logits [B, K, V], int64 [B, K]. draws: float32 [B, K] from [0, 1)."""
    sums = logits.float().softmax(-1).cumsum(-1)
    return (sums <= draws[..., None] * sums[..., -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)


def draws(key: int, numbers: torch.Tensor) -> torch.Tensor:
    """Return draws `numbers`, int64, of a key (docs/determinism.md): float32 from [0, 1), from 24 highest bits."""
    x = (numbers + 1) * _signed(int(bertdata.keys.GOLDEN)) + _signed(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return _shifted(x ^ _shifted(x, 31), 40).float() * 2.0**-24


def _signed(bits: int) -> int:
    """Return 64 bits as a signed integer, as torch needs them."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Return a logical right shift of x, which ignores the sign."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


class ReplacedTokens(Method):
    """Trains a discriminator together with the model."""

    options_type = ReplacedOptions

    def objectives(self, objectives: dict[str, Objective], model: PreTrainedModel, setting: LearnerSetting) -> None:
        """Add the objective. Raises UsageError if the discriminator cannot be built or cannot share embeddings."""
        discriminator = self._built(setting)
        if setting.precision != "fp32" and not family_of(discriminator).half:
            sentence = f"{discriminator.config.model_type}, the --{NAME}, computes only in fp32; give --precision fp32"
            raise UsageError(sentence, "unsupported", option="precision", given=setting.precision)
        self._share(model, discriminator)
        objectives[NAME] = Replaced(model, discriminator, setting)
        objectives[NAME].weight = self.options.discriminator_weight
        self._seed, self._config = setting.config.seed, discriminator.config
        self._bases: tuple[float | None, float | None] = None, None  # bases set by a phase
        is_electra = self._config.model_type == "electra"
        self._kind = ElectraForPreTraining if is_electra else type(discriminator)
        self._files = tokenizer_files(setting.shards.tokenizer_file, discriminator, max_length(self._config))

    def _built(self, setting: LearnerSetting) -> PreTrainedModel:
        """Return the encoder of the discriminator, with random weights."""
        config, name = setting.config, self.options.discriminator
        seed = bertdata.key(config.seed, "discrimi") >> 1
        try:
            model, _ = new_model(name, setting.shards.special_tokens, length=longest(config), seed=seed)
        except UsageError as error:
            sentence = str(error).replace("--model", f"--{NAME}")
            raise UsageError(sentence, error.kind, option=NAME, given=name) from None
        check_runs(model, length=longest(config))
        if config.gradient_checkpointing:
            recompute_activations(model)
        encoder: Any = model.base_model
        return encoder

    def _share(self, generator: PreTrainedModel, discriminator: PreTrainedModel) -> None:
        own: Any = discriminator.get_input_embeddings()
        other: Any = generator.get_input_embeddings()
        self._embeddings = next(name for name, module in discriminator.named_modules() if module is own) + ".weight"
        self._others = next(name for name, module in generator.named_modules() if module is other) + ".weight"
        if self.options.share_embeddings == "none":
            return
        if own.weight.shape != other.weight.shape:
            widths = f"{other.weight.shape[1]} in --model and {own.weight.shape[1]} in --discriminator"
            sentence = f"token embeddings of different widths, {widths}, cannot be shared; give --share-embeddings none"
            raise UsageError(sentence, "unsupported", option="share_embeddings")
        if self.options.share_embeddings == "tied":
            own.weight = other.weight
        else:
            discriminator.set_input_embeddings(Difference(other.weight, own.padding_idx))

    def begin_step(self, step: int, phase: Phase, learner: Learner) -> None:
        objective: Any = learner.objectives[NAME]
        objective.key = bertdata.key(self._seed, "replace", step)
        if self._bases != (bases := (phase.options.rope_base, phase.options.rope_base_local)):
            self._bases = bases
            set_rotary_bases(objective.encoder.model, *bases, strict=False)  # --model may have more kinds

    def identity(self, learner: Learner) -> Mapping[str, str]:
        return {NAME: model_identity(self.options.discriminator), "share-embeddings": self.options.share_embeddings}

    def export(self, model: PreTrainedModel, weights: Tensors, beside: Tensors, directory: Path) -> Tensors:
        """Write the discriminator: an ElectraForPreTraining, or the encoder for other families."""
        encoder, head = f"objectives.{NAME}.encoder.model.", f"objectives.{NAME}.head."
        state = {name.removeprefix(encoder): each for name, each in beside.items() if name.startswith(encoder)}
        if self.options.share_embeddings == "difference":
            state[self._embeddings] = state[self._embeddings] + weights[self._others]
        if self._kind is ElectraForPreTraining:
            state = {f"electra.{name}": each for name, each in state.items()}
            of_head = {name.removeprefix(head): each for name, each in beside.items() if name.startswith(head)}
            state |= {f"discriminator_predictions.{name}": each for name, each in of_head.items()}
        with torch.device("meta"):
            plain = self._kind(self._config)
        add_names_of_4(plain.config)
        plain.save_pretrained(directory / NAME, state_dict=state)
        for name, content in self._files.items():
            (directory / NAME / name).write_bytes(content)
        return weights
