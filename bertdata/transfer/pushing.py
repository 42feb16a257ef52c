"""`push` uploads a dataset to a URL: all files but the manifest first, and the manifest last."""

from __future__ import annotations

from pathlib import Path

from bertdata.errors import BuildError, RemoteError, UsageError
from bertdata.format.manifest import MANIFEST, Manifest, read_manifest
from bertdata.format.origins import RECORD, Record
from bertdata.remote import hub, stores
from bertdata.transfer.files import Progress, array_sizes, at_once, files_of, id_under, require_own_id, require_sound
from bertdata.urls import is_url, without_secrets


def push(
    directory: str | Path,
    url: str,
    *,
    public: bool = False,
    origins: bool = False,
    progress: Progress = lambda done, total: None,
) -> str:
    """Upload the dataset in a directory to a URL, and return its dataset_id. Checks every file before its upload.

    url: a directory of an object store, or hf://datasets/org/name[/path][@revision]. After an interruption, the same
    command uploads all files again. public: of the hub, also upload to a repository that everybody sees. origins: also
    upload origins/, which names inputs with their paths, to the hub; an object store always gets it. progress: called
    with the bytes that are done, and all.

    Raises UsageError, DatasetError for a damaged dataset, BuildError if another dataset is there, and RemoteError.
    """
    source, root = Path(directory), url.rstrip("/")
    is_hub = root.startswith("hf:")
    if not is_url(root) or root.startswith("http"):
        shown = without_secrets(root)
        sentence = f"{shown} cannot hold a dataset; give a URL of s3, gs, az or hf, such as s3://bucket/name"
        raise UsageError(sentence, "bad-url", option="url", given=shown)
    manifest, content = read_manifest(source), (source / MANIFEST).read_bytes()
    require_own_id(manifest)
    if id_under(root) not in (None, manifest.dataset_id):
        sentence = f"{root} holds another dataset already; give another URL, or remove that one first"
        raise BuildError(sentence, "out-exists", option="url", given=root)
    if is_hub and not public and hub.is_public(root):
        sentence = f"{root} exists and is public; give --public if everybody may see this dataset"
        raise RemoteError(sentence, "missing", option="public")
    files = files_of(manifest) | (_origins_of(source, manifest) if origins or not is_hub else {})
    sizes = array_sizes(manifest)
    total, done = sum(sizes.values()), 0

    def upload(name: str) -> int:
        require_sound(source / name, files[name])
        if not is_hub:
            stores.write(f"{root}/{name}", source / name)
        return sizes.get(name, 0)

    for size in at_once(upload, files):
        done += size
        progress(done, total)
    if is_hub:
        paths = {name: source / name for name in files}
        message = f"Dataset {manifest.dataset_id[:16]}"
        hub.commit(root, {**paths, MANIFEST: content}, message=message, public=public)
    else:
        stores.write(f"{root}/{MANIFEST}", content)
    return manifest.dataset_id


def _origins_of(directory: Path, manifest: Manifest) -> dict[str, str | None]:
    """Return name → SHA-256 of the origins, as `files_of`; nothing if the dataset has none."""
    record = Record.read(directory, manifest)
    return {name: sha256 for name, (sha256, _) in record.files(manifest).items()} | {RECORD: None} if record else {}
