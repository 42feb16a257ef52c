"""The tasks of a fine-tuning: classes, numbers, tags, answers, choices. --task names them."""

from bertrain.lab.tasks import choices, spans, texts, words
from bertrain.lab.tasks.base import Columns, Data, Example, Task

TASKS: dict[str, type[Task]] = {
    "classification": texts.Classification,
    "regression": texts.Regression,
    "multilabel": texts.Multilabel,
    "token": words.Words,
    "qa": spans.Spans,
    "pairs": texts.Pairs,
    "choice": choices.Choices,
    "coreference": choices.Coreference,
    "copa": choices.Causes,
    "multirc": choices.Answers,
    "wic": choices.Senses,
}
"""Tasks by their name in --task."""

__all__ = ["TASKS", "Columns", "Data", "Example", "Task"]
