"""Models on the Hugging Face hub, as far as they must be asked for."""

from __future__ import annotations

from collections.abc import Iterable

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

from bertdata.errors import UsageError

HUB_TIMEOUT_S = 10


def may_be_on_hub(name: str) -> bool:
    """Whether a model can have this name: not nothere/, ./nothere or nothere.json."""
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.endswith(".json")


def must_download(name: str, option: str, instead: str, files: Iterable[str]) -> bool:
    """Whether this machine has none of these files of a model of the hub yet. Asks the hub once, and not for long.

    Raises UsageError, which ends in `instead`, if there is no such model, or nobody can say so.
    """
    hub = huggingface_hub.constants.ENDPOINT
    if not may_be_on_hub(name):
        sentence = f"--{option} {name} does not exist; {instead}, or a name on the hub"
        raise UsageError(sentence, "model-not-found", option=option, given=name)
    if any(isinstance(huggingface_hub.try_to_load_from_cache(name, file), str) for file in files):
        return False
    try:
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        sentence = f"{hub} gives --{option} {name} only to users who were granted access; set HF_TOKEN, or {instead}"
        raise UsageError(sentence, "access-denied", option=option, given=name) from None
    except RepositoryNotFoundError:
        sentence = (
            f"--{option} {name} exists neither here nor on {hub}, or is private there; {instead}, or set HF_TOKEN"
        )
        raise UsageError(sentence, "model-not-found", option=option, given=name) from None
    except Exception as error:  # of the network
        reason = str(error).partition("\n")[0] or type(error).__name__
        sentence = (
            f"--{option} {name} does not exist here, and {hub} cannot be asked ({reason}); {instead}, or connect to "
            "the hub"
        )
        raise UsageError(sentence, "server-failed", option=option, given=name) from None
    return True
