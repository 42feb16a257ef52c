"""README.md of a checkpoint: a model card as the Hugging Face hub reads it, with the facts that a run knows.

The user adds the license and the language of the texts. A card is written once, with its checkpoint, and
checkpoint.json does not list it, so it may be edited.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedConfig

import bertdata
from bertrain.models.families import add_names_of_4

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


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a run uses."""
    packages = (bertdata, torch, transformers, tokenizers)
    return {each.__name__: str(each.__version__) for each in packages} | {"python": platform.python_version()}
