"""README.md of a checkpoint: a model card as the Hugging Face hub reads it, of facts that a run knows.

The license and the language of the texts are the user's to say. A card ends with a digest of its text, so that one that
somebody has changed, or written, is known and never replaced. checkpoint.json does not list it: it may be edited.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedConfig

import bertdata
from bertdata.support import write_file
from bertrain.models.families import add_names_of_4

CARD = "README.md"
PIPELINES = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
"""The class of transformers that loads a model → what the hub calls its use. Other classes have no name there."""
_MARK = "\n<!-- bertrain wrote the text above, and replaces it only while its digest is "
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

The license is `other` until you name one above, and the language is not stated. Both depend on the texts, which this \
card does not know.

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


def is_changed(directory: Path) -> bool:
    """Whether a directory has a README.md that is not as bertrain wrote it."""
    try:
        text, _, digest = (directory / CARD).read_text(encoding="utf-8", errors="replace").rpartition(_MARK)
    except FileNotFoundError:
        return False
    return not digest.startswith(_digest(text))


def renew(directory: Path, content: bytes) -> None:
    """Writes the card of a directory that is there, unless somebody has changed it."""
    if directory.is_dir() and not is_changed(directory):
        write_file(directory / CARD, content)


def content(
    name: str,
    about: str,
    *,
    config: PreTrainedConfig,
    title: str | None = None,
    head: str = "AutoModelForMaskedLM",
    parts: Mapping[str, str | Mapping[str, Any]] | None = None,
) -> bytes:
    """The card of a directory with a model.

    name: of the directory. about: what the model is. config: of the model. title: the name, if there is no other. head:
    the class of transformers that loads it. parts: what to tell beside, by heading: a text, or rows of a table.
    """
    pipeline = f"pipeline_tag: {PIPELINES[head]}\n" if head in PIPELINES else ""
    told = "".join(f"## {heading}\n\n{_told(part)}\n\n" for heading, part in (parts or {}).items())
    names = {"name": name, "quoted": shlex.quote(name), "title": title or name, "head": head}
    version = "4.57" if add_names_of_4(config) else ".".join(transformers.__version__.split(".")[:2])
    names |= {"model_type": config.model_type, "version": version}
    text = _TEXT.format(about=about, parts=told, pipeline=pipeline, **names)
    return f"{text}{_MARK}{_digest(text)} -->\n".encode()


def _told(part: str | Mapping[str, Any]) -> str:
    if isinstance(part, str):
        return part
    rows = ((name, str(value).replace("|", "\\|")) for name, value in part.items())  # a plain | would end its cell
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """What a run was made with."""
    return {
        "bertdata": bertdata.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
    }
