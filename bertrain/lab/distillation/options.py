"""The options of distillation."""

from __future__ import annotations

from dataclasses import dataclass

import click

from bertrain.options import ABOVE_0, WEIGHT, Needs, Options, option

KINDS, LAYERS = ("auto", "logits", "relations", "hidden"), ("uniform", "last")
TEACHER = Needs("a --teacher-cache or a --teacher", lambda options: bool(options.teacher or options.teacher_cache))


def _of_kind(kind: str) -> Needs:
    """What an option needs that only one kind of teaching has."""
    return Needs(f"--distil {kind} and its teacher", lambda options: TEACHER.is_given(options) and options.kind == kind)


OF_ROWS = ("length", "mlm_probability", "masking", "mask_fraction", "random_fraction", "shuffle", "isolate_documents")
"""Options of a student's run on which its rows and their masks depend, beside its data and seed."""


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(Options):
    teacher_cache: str = option("", resume="content")
    """Directory of stored predictions of a teacher, written by bertrain teacher."""
    teacher: str = option("", resume="content")
    """Directory of a teacher that runs during training: a run or a checkpoint."""
    distil: str = option("auto", type=click.Choice(KINDS), needs=TEACHER)
    """What to learn from a teacher: its logits (Hinton, 2015), the relations of its queries, keys and values
    (MiniLMv2), or its hidden states and attention (TinyBERT). auto: logits with --teacher-cache, relations with
    --teacher.
    """
    distil_layers: str = option("uniform", type=click.Choice(LAYERS), needs=_of_kind("hidden"))
    """Layers that --distil hidden compares. uniform: every layer of the student with evenly spaced layers of the
    teacher. last: only the last.
    """
    alpha: float = option(0.5, bounds=WEIGHT, needs=TEACHER)
    """Weight of the teacher's loss; the loss on the text has the weight 1 - alpha."""
    temperature: float = option(1.0, bounds=ABOVE_0, needs=_of_kind("logits"))
    """Temperature of the teacher's and the student's logits, for --distil logits."""

    @property
    def kind(self) -> str:
        """--distil, resolved: logits, relations or hidden."""
        return self.distil if self.distil != "auto" else "logits" if self.teacher_cache else "relations"
