"""What a run learns from: masked tokens, next sentences, masked diffusion. One file for each, named by --objective."""

from bertrain.objectives.base import Learner, Objective, Outputs
from bertrain.objectives.diffusion import Diffusion
from bertrain.objectives.losses import LossSum
from bertrain.objectives.mlm import MaskedTokens
from bertrain.objectives.nsp import NextSentences

OBJECTIVES: dict[str, type[Objective]] = {"mlm": MaskedTokens, "nsp": NextSentences, "diffusion": Diffusion}
"""Objectives by the name that --objective gives them. Add your own: docs/extending.md."""

__all__ = ["OBJECTIVES", "Diffusion", "Learner", "LossSum", "MaskedTokens", "NextSentences", "Objective", "Outputs"]
