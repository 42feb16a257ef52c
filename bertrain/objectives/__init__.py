"""What a run learns from: masked tokens, next sentences. One file for each; --objective names them."""

from bertrain.objectives.base import Learner, Objective, Outputs
from bertrain.objectives.losses import LossSum
from bertrain.objectives.mlm import MaskedTokens
from bertrain.objectives.nsp import NextSentences

OBJECTIVES: dict[str, type[Objective]] = {"mlm": MaskedTokens, "nsp": NextSentences}
"""Objectives by the name that --objective gives them. Add your own: docs/extending.md."""

__all__ = ["OBJECTIVES", "Learner", "LossSum", "MaskedTokens", "NextSentences", "Objective", "Outputs"]
