"""What a checkpoint is fine-tuned for: classes, numbers, tags, answers, choices. --task names them."""

from bertrain.lab.tasks.base import Columns, Data, Task
from bertrain.lab.tasks.choices import Choices
from bertrain.lab.tasks.spans import Spans
from bertrain.lab.tasks.superglue import Answers, Causes, Senses
from bertrain.lab.tasks.texts import Classification, Coreference, Multilabel, Pairs, Regression
from bertrain.lab.tasks.words import Words

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "regression": Regression,
    "multilabel": Multilabel,
    "token": Words,
    "qa": Spans,
    "pairs": Pairs,
    "choice": Choices,
    "coreference": Coreference,
    "copa": Causes,
    "multirc": Answers,
    "wic": Senses,
}
"""Tasks by the name that --task gives them."""

__all__ = ["TASKS", "Columns", "Data", "Task"]
