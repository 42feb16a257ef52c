"""README.md of a checkpoint: a model card as the Hugging Face hub reads it, with the facts that a run knows.

The user adds the license and the language of the texts. A card is written once, with its checkpoint, and
checkpoint.json does not list it, so it may be edited.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedConfig

import bertdata
from bertdata.support import counted
from bertrain.models.families import add_names_of_4

if TYPE_CHECKING:
    from bertrain.data import Stream
    from bertrain.state import TrainState
    from bertrain.trainer import Trainer

CARD = "README.md"
PIPELINES = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
"""The class of transformers that loads a model → its pipeline on the hub. Other classes have none."""
_TEXT = """\
---
library_name: transformers
{pipeline}tags:
- bertrain
- {model_type}
license: other
---

# {title}

{about}

The license is `other` until you name one above, and the language is not stated: both depend on the texts.

## Use

```python
from transformers import {head}, AutoTokenizer
model = {head}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

transformers {version} and newer versions read it.

{parts}## Train it further

    bertrain pretrain --init {quoted} --data shards/ --out run/
    bertrain finetune --checkpoint {quoted} --train train.tsv --dev dev.tsv --out tuned/
"""


def content(
    name: str,
    about: str,
    *,
    config: PreTrainedConfig,
    title: str | None = None,
    head: str = "AutoModelForMaskedLM",
    parts: Mapping[str, str | Mapping[str, Any]] | None = None,
) -> bytes:
    """Return the card of a directory with a model.

    name: of the directory, and the title if no title is given. about: what the model is. config: of the model.
    head: the class of transformers that loads it. parts: further facts by heading, a text or the rows of a table.
    """
    pipeline = f"pipeline_tag: {PIPELINES[head]}\n" if head in PIPELINES else ""
    told = "".join(f"## {heading}\n\n{_told(part)}\n\n" for heading, part in (parts or {}).items())
    version = "4.57" if add_names_of_4(config) else ".".join(transformers.__version__.split(".")[:2])
    names = {"name": name, "quoted": shlex.quote(name), "title": title or name, "head": head, "version": version}
    names |= {"about": about, "parts": told, "pipeline": pipeline, "model_type": config.model_type}
    return _TEXT.format(**names).encode()


def _told(part: str | Mapping[str, Any]) -> str:
    if isinstance(part, str):
        return part
    rows = ((name, str(value).replace("|", "\\|")) for name, value in part.items())  # a plain | would end its cell
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def about_run(stream: Stream) -> dict[str, Any]:
    """Return the parts of the card of a run that do not change: data, phases and options."""
    sources = stream.sources
    total = sum(weight for _, weight in sources)
    data = {
        f"`{shards.dataset_id}`": f"{counted(shards.num_documents, 'document')}, "
        f"{counted(shards.num_tokens, 'token')}, "
        + ("all rows" if weight == total else f"{weight / total:.4g} of the rows")
        for shards, weight in sources
    }
    phases = stream.plan.describe({path: f"`{shards.dataset_id}`" for path, shards in stream.datasets.items()})
    lines = {"Phases": "\n".join(f"- {line}" for line in phases)} if phases else {}
    return {"Data": data, **lines, "Options that differ from the defaults": stream.config.differing()}


def of_run(
    trainer: Trainer,
    state: TrainState,
    about: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    *,
    seconds: float,
    unigram: float,
) -> bytes:
    """Return the card of a checkpoint of a run.

    about: of `about_run`. evaluation: the last one, an entry of the log. seconds: of training. unigram: the loss of
    guesses by token frequency.
    """
    is_frozen = any(method.frozen_by for method in trainer.methods)  # then an export has other parameters
    size = "" if is_frozen else f" with {trainer.num_parameters:,} parameters"
    ranks = trainer.ranks
    training = {
        "steps": f"{state.step:,} of {trainer.plan.steps:,}",
        "tokens read, with padding": f"{state.tokens:,}",
        "seconds of training": f"{seconds:.1f}",
        "processes": f"{ranks.world_size} on {ranks.device.type}, {trainer.precision}",
        "bertrain": bertdata.__version__,
    }
    losses: str | dict[str, str] = "No validation loss had been measured when this checkpoint was written."
    if evaluation.get("validation_loss") is not None:
        losses = {
            "validation loss": f"{evaluation['validation_loss']:.4f} nats a token",
            "guessing by frequency alone, on the train split": f"{unigram:.4f} nats a token",
            "right": f"{evaluation['validation_accuracy']:.2%}",
            "after step": f"{evaluation['step']:,}",
            "measured on": f"at most 2,048 rows of {evaluation['validation_length']} tokens of the validation split, "
            f"{evaluation['validation_masking']:.0%} of them masked, whatever the share in training, in "
            f"{evaluation['validation_precision']}",
        }
    return content(
        f"step-{state.step:08d}",
        f"A masked language model{size}, trained with bertrain.",
        title=f"{Path(trainer.config.out).resolve().name} after step {state.step:,}",
        config=trainer.learner.model.config,
        parts={"Training": training, "Loss": losses, **about},
    )


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a run uses."""
    packages = (bertdata, torch, transformers, tokenizers)
    return {each.__name__: str(each.__version__) for each in packages} | {"python": platform.python_version()}
