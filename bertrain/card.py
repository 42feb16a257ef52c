"""The model card of a checkpoint: a README.md in the format of the Hugging Face hub, with the facts of its run.

The user adds the license and the language of the texts. A card is written once, with its checkpoint, and
checkpoint.json does not list it, so it may be edited.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedConfig

import bertdata
from bertrain.models.families import add_names_of_4, auto_class, family_of

CARD = "README.md"
READS_IS_CAUSAL = "5.2"  # the first transformers in which a setting lets a decoder attend to both sides
_TEXT = """\
---
library_name: transformers
tags:
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

transformers {version} and newer versions read it{older}.

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
    head: str | None = None,
    parts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> bytes:
    """Return the model card of a directory with a model.

    name: the name of the directory, and the title if no title is given. about: a description of the model. config: the
    configuration of the model. head: the class of transformers that loads it, if it has no head that predicts tokens.
    parts: more facts, as heading → rows of a table.
    """
    tables = ""
    for heading, part in parts.items():
        rows = ((row, str(value).replace("|", "\\|")) for row, value in part.items())  # a plain | would end its cell
        lines = [f"## {heading}", "", "| | |", "|---|---|", *(f"| {row} | {value} |" for row, value in rows), "", ""]
        tables += "\n".join(lines) if part else ""
    version = "4.57" if add_names_of_4(config) else ".".join(transformers.__version__.split(".")[:2])
    names = {"name": name, "quoted": shlex.quote(name), "title": title or name, "version": version, "older": ""}
    if family_of(config).decoder:
        names |= {"version": READS_IS_CAUSAL, "older": "; in older ones it attends to the left only, without a message"}
    names |= {"about": about, "parts": tables, "model_type": config.model_type}
    names["head"] = head or auto_class(config).__name__
    return _TEXT.format(**names).encode()


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a run uses."""
    packages = (bertdata, torch, transformers, tokenizers)
    return {each.__name__: str(each.__version__) for each in packages} | {"python": platform.python_version()}
