"""Read text and JSON from files of users. Errors name the file and the line."""

from __future__ import annotations

import json
import re
from typing import Any

from bertdata.support import TOKENIZER, TOKENIZER_CONFIG, InputError, UsageError, local, opened

MOST_BYTES = 1 << 26  # largest decompressed size of a file
_SPELLED = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""JSON escapes: of a character above U+FFFF, of half of one, and others."""


def text(path: str, option: str | None = None) -> str:
    """Return the text of a file, decompressed by its file extension.

    option: name of the option for the file, without dashes, for errors. Raises UsageError, which names the file, if it
    cannot be read, decompressed or decoded, or has more than MOST_BYTES.
    """
    flag = f"--{option}: " if option else ""
    try:
        with opened(local(path)) as stream:
            content = stream.read(MOST_BYTES + 1)
    except InputError as error:
        raise UsageError(f"{flag}{error}", error.kind, option=option, given=path) from None
    if len(content) > MOST_BYTES:
        sentence = f"{flag}{path} has more than {MOST_BYTES >> 20} MiB, decompressed; give a smaller file"
        raise UsageError(sentence, "too-large", option=option, given=path)
    return decoded(content, path)


def decoded(content: bytes, path: object) -> str:
    """Return the bytes of a file as text, without a byte order mark. Raises UsageError, with the line, if not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {number} is not UTF-8 text; save the file as UTF-8", "not-text") from None


def parsed(
    content: str, path: object, first: int = 1, *, advice: str = "correct it", halves: bool = False, **options: Any
) -> Any:
    """Parse JSON. first: number of the first line. options: arguments of json.loads.

    halves: whether half of a surrogate pair is allowed.

    Raises UsageError for invalid JSON, with the line if it is known, and with the advice at the end.
    """
    if not halves:
        refuse_halves(content, path, first)
    line = first if "\n" not in content.rstrip() else None
    try:
        return json.loads(content, **options)
    except json.JSONDecodeError as error:
        line, reason = first + error.lineno - 1, f"{error.msg} at column {error.colno}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # a number with thousands of digits
        reason = str(error).partition(";")[0]
    row = f"{path}, line {line}" if line else path
    raise UsageError(f"{row} cannot be read as JSON ({reason}); {advice}", "not-of-format")


def refuse_halves(content: str, path: object, first: int = 1) -> None:
    """Raise UsageError, with the line, if JSON contains half of a surrogate pair: such text cannot be written again."""
    for match in _SPELLED.finditer(content):
        if half := match["half"]:
            line = first + content.count("\n", 0, match.start())
            raise UsageError(
                f"{path}, line {line} has half a character, {half}; add its other half, or remove it",
                "bad-row",
            )


def plain_tokenizer(files: dict[str, bytes]) -> dict[str, bytes]:
    """Change and return the files of a tokenizer, so that transformers 4 and 5, and other programs, can read them.

    A file changes only if it contains saved truncation or padding, or settings that only transformers 5 supports.
    """
    before = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    config = {name: value for name, value in before.items() if name not in ("backend", "is_local", "local_files_only")}
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config != before:
        files[TOKENIZER_CONFIG] = json.dumps(config, ensure_ascii=False, indent=1).encode()
    content = json.loads(files.get(TOKENIZER, b"{}"))
    if content.get("truncation") or content.get("padding"):
        content |= {"truncation": None, "padding": None}
        files[TOKENIZER] = json.dumps(content, ensure_ascii=False, indent=1).encode()
    return files
