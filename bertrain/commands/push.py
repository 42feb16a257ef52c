"""Send a checkpoint with its model card to the Hugging Face hub.

    bertrain push run/ org/name

What only a run needs to go on stays here: the optimizer's moments, the state of the loader, the checkpoint's index.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import huggingface_hub
from huggingface_hub.errors import OfflineModeIsEnabled

from bertdata.cli import OneSentence
from bertdata.errors import RemoteError, UsageError
from bertdata.remote.requests import as_remote_error, expected
from bertrain.models.build import may_be_on_hub
from bertrain.run import card, checkpoint

STATE = {checkpoint.INDEX, checkpoint.TRAINER, checkpoint.OPTIMIZER, checkpoint.BESIDE, checkpoint.AVERAGE_FILE}
STATE |= {"seed.json"}  # of bertrain finetune: with paths of this machine
WEIGHTS = "*.safetensors"
PATTERNS = (WEIGHTS, "*.json", "vocab.txt", "merges.txt", "*.model", card.CARD)
"""The files of a directory that no run of bertrain wrote."""


def files_of(directory: Path) -> tuple[list[str], list[str]]:
    """The files to send of a directory with a model, and those of a run that stay here: names, sorted.

    Of a checkpoint those that its checkpoint.json names, and its card; so nothing that somebody has put beside them.
    Raises UsageError if there are no weights, or if a name leads out of the directory.
    """
    if (directory / checkpoint.INDEX).exists():
        names = {checkpoint.INDEX, *json.loads((directory / checkpoint.INDEX).read_bytes())["files"]}
        names |= {card.CARD} if (directory / card.CARD).is_file() else set()
    else:
        names = {path.name for pattern in PATTERNS for path in directory.glob(pattern) if path.is_file()}
    if not any(Path(name).match(WEIGHTS) for name in names):
        sentence = f"{directory} has no weights as safetensors; give a run or a checkpoint"
        raise UsageError(sentence, "weights-missing", option="checkpoint", given=str(directory))
    for name in sorted(names):
        if not (directory / name).resolve().is_relative_to(directory.resolve()):
            sentence = f"{directory / name} leads out of the directory; replace the link by the file itself"
            raise UsageError(sentence, "wrong-file-type", option="checkpoint", given=str(directory / name))
    return sorted(names - STATE), sorted(names & STATE)


def push(directory: Path, repository: str, names: list[str], *, public: bool) -> str:
    """Sends files of a directory in one commit. Returns its URL. A repository that this makes is private, or `public`.

    Raises RemoteError for a repository that everybody sees where `public` is not given, and where the hub fails. An
    error never has the token.
    """
    token = huggingface_hub.get_token()
    if token is None:
        sentence = "there is no access token for the Hugging Face hub; log in with hf auth login, or set HF_TOKEN"
        raise RemoteError(sentence, "access-denied")
    files = {
        name: card.on_hub(directory / name, repository) if name == card.CARD else directory / name for name in names
    }
    try:
        api = huggingface_hub.HfApi(token=token)
        api.create_repo(repository, private=not public, exist_ok=True)
        if not public and not api.model_info(repository).private:
            sentence = f"{repository} exists and is public; give --public if everybody may see this model"
            raise RemoteError(sentence, "missing", option="public")
        add = [huggingface_hub.CommitOperationAdd(name, file) for name, file in files.items()]
        return api.create_commit(repository, add, commit_message=f"{directory.name} of bertrain").commit_url
    except FileNotFoundError:  # of this machine
        raise
    except OfflineModeIsEnabled:
        raise RemoteError("HF_HUB_OFFLINE forbids to ask the Hugging Face hub; unset it", "access-denied") from None
    except expected() as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 403:
            sentence = f"your access token may not write to {repository}; use one that may, or another name"
            raise RemoteError(sentence, "access-denied", option="repository", given=repository) from None
        if status in (400, 409, 422):  # such as a license that the hub does not know
            reason = " ".join(str(getattr(error, "server_message", None) or error).replace(token, "...").split())
            sentence = f"the hub refuses {repository} ({reason}); correct that, and run the same command again"
            raise RemoteError(sentence, "server-unsuitable", option="repository", given=repository) from None
        raise as_remote_error(f"hf://{repository}", error) from None


def _refuse_several(path: Path) -> None:
    """Raises UsageError for the directory of a fine-tuning or a suite, which holds a model for each seed."""
    models = sorted(file.parent for file in (*path.glob("seed-*/seed.json"), *path.glob("*/seed-*/seed.json")))
    if models and not (path / "config.json").exists():
        sentence = f"{path} holds a fine-tuned model for each seed; give one, such as {models[0]}"
        raise UsageError(sentence, "not-a-run", option="checkpoint", given=str(path))


@click.command(cls=OneSentence)
@click.argument("path", metavar="CHECKPOINT")
@click.argument("repository", metavar="ORG/NAME")
@click.option("--public", is_flag=True, help="Let everybody see the repository. Default: a new one is private.")
@click.option("--dry-run", is_flag=True, help="Only list the files that would be sent. Contacts no server.")
def main(path: str, repository: str, public: bool, dry_run: bool) -> None:
    """Send a checkpoint with its model card to the Hugging Face hub.

    CHECKPOINT is a checkpoint, a fine-tuned model, or a run, whose newest complete checkpoint is sent. The files
    replace files with the same names in the repository ORG/NAME. If it does not exist, the command creates it.
    """
    if repository.count("/") != 1 or not may_be_on_hub(repository):
        sentence = f"{repository} is no name of a repository; give org/name"
        raise UsageError(sentence, "malformed", option="repository", given=repository)
    _refuse_several(Path(path))
    directory = checkpoint.find(Path(path)).resolve()
    names, left = files_of(directory)
    click.echo(f"{path}: {directory.name}, for {repository}{'' if public else ', private'}")
    for name in names:
        click.echo(f"  {(directory / name).stat().st_size:>15,} bytes  {name}")
    if left:
        click.echo(f"  stays here: {', '.join(left)}")
    if card.CARD not in names:
        click.echo(f"warning: there is no {card.CARD}, so the hub will show nothing about the model", err=True)
    elif "\nlicense: other\n" in (directory / card.CARD).read_text(encoding="utf-8", errors="replace"):
        click.echo(f"warning: the license is `other`; name one in {directory / card.CARD}", err=True)
    if dry_run:
        click.echo("nothing was sent")
        return
    click.echo(push(directory, repository, names, public=public))


if __name__ == "__main__":
    main()
