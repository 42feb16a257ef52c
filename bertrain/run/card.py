"""README.md of a checkpoint: a model card as the Hugging Face hub reads it, of facts that a run knows.

The license and the language of the texts are the user's to say. A card ends with a digest of its text, so that one that
somebody has changed, or written, is known and never replaced. checkpoint.json does not list it: it may be edited.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bertdata
from bertdata.files import write_file
from bertrain.options.config import CHECKPOINTS, Config, all_options
from bertrain.options.fields import flag
from bertrain.run.log import Sources

CARD = "README.md"
PIPELINES = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
"""The class of transformers that loads a fine-tuned model → what the hub calls its use. Other classes are not named."""
_MARK = "\n<!-- bertrain wrote the text above, and replaces it only while its digest is "
_OPEN = (
    "The license is `other` until you name one above, and the language is not stated. Both depend on the texts, which "
    "this card does not know."
)


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


def on_hub(path: Path, repository: str) -> bytes:
    """The text of a card for a repository of the hub, which its title and the lines that load the model name."""
    text, name = path.read_text(encoding="utf-8", errors="replace"), path.parent.name
    text = re.sub("^# .*$", lambda title: f"# {repository}", text, count=1, flags=re.MULTILINE)
    for line in ('from_pretrained("{}")', "--init {} ", "--checkpoint {} "):
        shown = shlex.quote(name) if line.startswith("--") else name
        text = text.replace(line.format(shown), line.format(repository))
    return text.encode()


def of_run(
    config: Config,
    name: str,
    sources: Sources,
    *,
    model_type: str,
    parameters: int | None,
    facts: Mapping[str, Any],
    phases: Sequence[str],
    evaluation: Mapping[str, Any],
    regime: str,
    unigram: float,
) -> bytes:
    """The card of a checkpoint of a run.

    name: of its directory. parameters: None if they are not to be counted. facts: `step`, `steps` (planned, or None),
    `tokens`, `seconds`, `ranks`, `device` and `precision`. phases: a line for each, if there are several. evaluation:
    the newest one in the log, or nothing. regime: a sentence that says what it was on. unigram: the loss of guessing
    by frequency alone, in nats.
    """
    is_mean = name.startswith("average-")
    title = f"{Path(config.out).resolve().name} after step {facts['step']:,}{' (mean)' * is_mean}"
    size = f" with {parameters:,} parameters" if parameters else ""
    what = "; the weights are the mean of the last ones of the run" if is_mean else ""
    total, weights = sum(weight for _, weight in sources), [weight for _, weight in sources]
    tokenizer, vocab_size = sources[0][0].manifest.tokenizer_name, sources[0][0].special_tokens.vocab_size
    data = [
        (f"`{shards.dataset_id}`", f"{shards.num_documents:,}", f"{shards.num_tokens:,}", f"{weight / total:.4g}")
        for (shards, _), weight in zip(sources, weights, strict=True)
    ]
    planned = f" of {facts['steps']:,}" if facts["steps"] else ""
    rows = [
        ("steps", f"{facts['step']:,}{planned}"),
        ("tokens read, with padding", f"{facts['tokens']:,}"),
        ("seconds of training", f"{facts['seconds']:.1f}"),
        ("processes", f"{facts['ranks']} on {facts['device']}, {facts['precision']}"),
        *([] if phases else [("masked share", f"{config.mlm_probability}, {config.masking}")]),
        ("bertrain", bertdata.__version__),
    ]
    return _sealed(
        _front("fill-mask", model_type),
        f"# {title}\n\nA masked language model of type `{model_type}`{size}, trained with bertrain{what}.\n\n{_OPEN}",
        _usage("AutoModelForMaskedLM", name),
        f"## Data\n\nThe tokenizer{f', `{tokenizer}`,' if tokenizer else ''} is in this directory; it has "
        f"{vocab_size:,} ids.\n\n{_table(('dataset_id', 'documents', 'tokens', 'share of the rows'), data)}",
        f"## Training\n\n{_table(('', ''), rows)}\n\n"
        + "".join(f"- {line}\n" for line in phases)
        + "\n" * bool(phases)
        + "Options that differ from the defaults:\n\n    bertrain pretrain "
        + _options(config),
        "## Loss\n\n" + _losses(evaluation, "average_" if is_mean else "validation_", regime, unigram),
        _further(name) + "\n\nIts run goes on where it stopped with the command that began it, and the same --out.",
    )


def of_derived(name: str, about: str, *, model_type: str) -> bytes:
    """The card of a model that was made from checkpoints without training. about: says from which, and how."""
    return _sealed(
        _front("fill-mask", model_type),
        f"# {name}\n\nA masked language model of type `{model_type}`. {about}\n\n{_OPEN}",
        _usage("AutoModelForMaskedLM", name),
        _further(name),
    )


def of_task(
    name: str,
    start: str,
    head: str,
    *,
    model_type: str,
    facts: Mapping[str, Any],
    scores: Mapping[str, dict[str, float]],
) -> bytes:
    """The card of a fine-tuned model.

    start: the checkpoint that it was made of. head: the class of transformers that loads it. facts: what to state of
    the training, by name. scores: by split, the measures of the weights.
    """
    measures = [(split, metric, f"{value:.4f}") for split, part in scores.items() for metric, value in part.items()]
    return _sealed(
        _front(PIPELINES.get(head), model_type),
        f"# {name}\n\nA model of type `{model_type}`, which bertrain fine-tuned from `{Path(start).name}`.\n\n{_OPEN}",
        _usage(head, name),
        f"## Training\n\n{_table(('', ''), [(key.replace('_', ' '), str(value)) for key, value in facts.items()])}",
        "## Measures\n\nThey are those of the epoch that was best on dev; so dev is no held-out text.\n\n"
        + _table(("split", "measure", "value"), measures),
    )


def _front(pipeline: str | None, model_type: str) -> str:
    use = [f"pipeline_tag: {pipeline}"] if pipeline else []
    lines = ["library_name: transformers", *use, "tags:", "- bertrain", f"- {model_type}"]
    return "\n".join(["---", *lines, "license: other", "---"])


def _usage(head: str, name: str) -> str:
    return (
        f"## Use\n\n```python\nfrom transformers import {head}, AutoTokenizer\n"
        f'model = {head}.from_pretrained("{name}")\ntokenizer = AutoTokenizer.from_pretrained("{name}")\n```'
    )


def _further(name: str) -> str:
    return (
        "## Train it further\n\n"
        f"    bertrain pretrain --init {shlex.quote(name)} --data shards/ --out run/\n"
        f"    bertrain finetune --checkpoint {shlex.quote(name)} --train train.tsv --dev dev.tsv --out tuned/"
    )


def _losses(evaluation: Mapping[str, Any], kind: str, regime: str, unigram: float) -> str:
    loss, accuracy = evaluation.get(f"{kind}loss"), evaluation.get(f"{kind}accuracy")
    if loss is None:
        return "No validation loss had been measured when this checkpoint was written."
    rows = [
        ("validation loss", f"{loss:.4f} nats a token"),
        ("guessing by frequency alone, on the train split", f"{unigram:.4f} nats a token"),
        ("right", f"{accuracy:.2%}"),
        ("after step", f"{evaluation['step']:,}"),
    ]
    return f"{_table(('', ''), rows)}\n\n{regime}"


def _options(config: Config) -> str:
    """The options of a run that differ from the defaults, without those that say where and how often it writes."""
    words = [] if config.init else ["--model", _shared(config.model)]
    for name, value in config.flat().items():
        option = all_options()[name]
        is_left_out = option.metadata.get("group") == CHECKPOINTS or name in ("data", "weights", "model", "phase")
        if value == option.default or is_left_out:
            continue
        for part in value if isinstance(value, tuple) else (value,):
            words += [flag(name)] if part is True else [flag(name), _shared(str(part))]
    return shlex.join(words)


def _shared(text: str) -> str:
    """A path of a machine without its directories, which are nobody else's business."""
    return Path(text).name if Path(text).is_absolute() else text


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sealed(*parts: str) -> bytes:
    text = "\n\n".join(parts) + "\n"
    return f"{text}{_MARK}{_digest(text)} -->\n".encode()
