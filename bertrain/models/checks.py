"""What a run needs of a model: an encoder with a masked language model, positions enough, logits from ids alone."""

from __future__ import annotations

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from bertdata.errors import UsageError, is_out_of_memory
from bertrain.models.encoder import Encoder
from bertrain.models.families import family_of, first_position

COMPARED = 8  # tokens of a row for which the head of a family is compared with the model's own
TRIED = 64  # tokens of the row that a model is tried with, if its attention takes any number of them
UNBOUNDED = 1 << 20  # tokens of a row, where a configuration does not say how many positions there are


def check_is_encoder(config: PreTrainedConfig, name: str, option: str | None) -> None:
    """Raises UsageError for a configuration of anything but an encoder with a masked language model.

    name: of the model, as it was given; option: for what, if it is known.
    """
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder and a decoder"
    elif getattr(config, "is_decoder", False) or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        is_decoder = getattr(config, "is_decoder", False) or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind = "a decoder" if is_decoder else "no masked language model"
    else:
        return
    sentence = (
        f"{spelled(name, option)} is {kind} ({config.model_type}); give an encoder that predicts masked tokens, such "
        "as a bert, a modernbert or a roberta"
    )
    raise UsageError(sentence, "unsupported", option=option, given=name)


def spelled(name: str, option: str | None) -> str:
    """A model with the option that it was given for, if it is known."""
    return f"--{option} {name}" if option else name


def max_length(config: PreTrainedConfig) -> int:
    """The longest row, in tokens, that a model has positions for."""
    return getattr(config, "max_position_embeddings", UNBOUNDED) - first_position(config)


def check_length(length: int, config: PreTrainedConfig, named: object) -> None:
    """Raises UsageError for rows of more tokens than a model has positions. named: the model, in the sentence."""
    if length > (most := max_length(config)):
        sentence = f"--length {length} is more than the {most} positions of {named}; give at most {most}"
        raise UsageError(sentence, "too-long", option="length", given=length)


def check_runs(model: PreTrainedModel, *, length: int) -> None:
    """Calls a model on one row. Raises UsageError if it does not turn ids alone into logits of the vocabulary.

    Or if the head that its family has in FAMILIES gives other logits at the first positions. The row has `length`
    tokens. It is shorter for families that keep packed documents apart, whose attention takes any number of tokens.
    """
    length = min(length, TRIED) if family_of(model).isolation else length
    was_training, ids = model.training, torch.arange(length)[None] % model.config.vocab_size
    try:
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits
        if logits.shape != (1, length, model.config.vocab_size):
            raise ValueError(f"{length} ids give logits of shape {list(logits.shape)}")
    except Exception as error:  # of any code
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        sentence = f"{model.config.model_type} cannot predict tokens from tokens alone ({reason}); give another model"
        raise UsageError(sentence, "unsupported", option="model", given=model.config.model_type) from None
    if not family_of(model).dense:
        _check_head(model, ids, logits[:, :COMPARED])
    model.train(was_training)


def _check_head(model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor) -> None:
    """expected: the model's own logits [1, K, V] at the first K positions."""
    try:
        with torch.no_grad():
            logits = Encoder(model).logits(input_ids=ids, masked_positions=torch.arange(expected.shape[1])[None])
        if logits.shape != expected.shape:
            raise ValueError(f"it gives logits of shape {list(logits.shape)} instead of {list(expected.shape)}")
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ValueError("it gives other logits")
    except Exception as error:  # of any code
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        sentence = (
            f"the head that FAMILIES has for {model.config.model_type} is not that of the model's own forward pass "
            f"({reason}); correct the entry, or leave it out (docs/extending.md)"
        )
        raise UsageError(sentence, "bad-entry", given=model.config.model_type) from None


def slower(model: PreTrainedModel) -> list[str]:
    """A warning for a model of a family that is not in FAMILIES, else nothing."""
    if not family_of(model).dense:
        return []
    return [
        f"{model.config.model_type} is not in the table of families (docs/models.md), so training is slower: every "
        "token of a row goes through the vocabulary projection, not the masked ones alone; and the operations a second "
        "are estimated from the number of parameters"
    ]
