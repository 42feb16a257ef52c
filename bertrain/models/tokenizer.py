"""The tokenizer in the directory of a model, as transformers 4 and 5 and other programs read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from transformers import PreTrainedModel

from bertdata.support import ROLE_SPELLINGS, TOKENIZER, TOKENIZER_CONFIG, LoadedTokenizer, lacks_template
from bertrain.models.families import has_token_types


def plain_tokenizer(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a tokenizer as transformers 4 and 5, and other programs, read them.

    A file has other bytes only if it holds truncation or padding of an earlier use, or what transformers 5 alone knows.
    """
    written, before = dict(files), json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    config = {name: value for name, value in before.items() if name not in ("backend", "is_local", "local_files_only")}
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config != before:
        written[TOKENIZER_CONFIG] = json.dumps(config, ensure_ascii=False, indent=1).encode()
    content = json.loads(files.get(TOKENIZER, b"{}"))
    if content.get("truncation") or content.get("padding"):
        content |= {"truncation": None, "padding": None}
        written[TOKENIZER] = json.dumps(content, ensure_ascii=False, indent=1).encode()
    return written


def tokenizer_files(file_of: Callable[[str], bytes], model: PreTrainedModel, max_length: int) -> dict[str, bytes]:
    """Return the files of a tokenizer as a checkpoint has them. file_of: the content of each file by name.

    tokenizer_config.json gets the model's length, so that truncation=True cuts text to what the model takes, and the
    model's inputs: token_type_ids only if it has them. A tokenizer.json that adds no [CLS] and [SEP], as in older
    datasets, adds them here.
    """
    config = json.loads(file_of(TOKENIZER_CONFIG)) | {"model_max_length": max_length}
    config["model_input_names"] = ["input_ids", *(["token_type_ids"] * has_token_types(model)), "attention_mask"]
    content = json.dumps(config, ensure_ascii=False, indent=1).encode() + b"\n"
    tokenizer = file_of(TOKENIZER)
    roles = {role: config[f"{role}_token"] for role in ROLE_SPELLINGS if f"{role}_token" in config}
    if lacks_template(json.loads(tokenizer), roles):
        tokenizer = LoadedTokenizer(tokenizer.decode(), roles).files[TOKENIZER]
    return {TOKENIZER: tokenizer, TOKENIZER_CONFIG: content}
