"""`push` uploads a dataset to a URL: all files but the manifest first, and the manifest last."""

from __future__ import annotations

from pathlib import Path

from bertdata.errors import BertdataError, BuildError, DatasetError, RemoteError, UsageError
from bertdata.format.dataset import stamp
from bertdata.format.manifest import MANIFEST, Manifest, read_with_content
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
    command uploads all files again. If the dataset is there already, nothing is uploaded, unless `origins` are to be
    added. public: of the hub, also upload to a repository that everybody sees. origins: also upload origins/, which
    names inputs with their paths, to the hub; an object store always gets it. progress: called with the bytes that are
    done, and all.

    Raises UsageError, DatasetError for a dataset that is damaged or replaced meanwhile, BuildError if another dataset
    is there, and RemoteError.
    """
    source, root = Path(directory), url.rstrip("/")
    is_hub = root.startswith("hf:")
    if not is_url(root) or root.startswith("http"):
        shown = without_secrets(root)
        sentence = f"{shown} cannot hold a dataset; give a URL of s3, gs, az or hf, such as s3://bucket/name"
        raise UsageError(sentence, "bad-url", option="url", given=shown)
    before = stamp(source / MANIFEST)
    manifest, content = read_with_content(source)
    require_own_id(manifest)
    parent, is_public = hub.head(root) if is_hub else (None, False)
    there = id_under(root)
    if there == manifest.dataset_id and not origins:
        return there
    if there not in (None, manifest.dataset_id):
        sentence = f"{root} holds another dataset already; give another URL, or remove that one first"
        raise BuildError(sentence, "out-exists", option="url", given=root)
    if is_public and not public:
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

    def require_same(error: Exception | None = None) -> None:
        if stamp(source / MANIFEST) != before or type(error) in (FileNotFoundError, ValueError):
            sentence = f"{source} was replaced during the push; push again"
            raise DatasetError(sentence, "replaced", given=source) from None

    try:
        for size in at_once(upload, files):
            done += size
            progress(done, total)
        if is_hub:
            paths = {name: source / name for name in files}
            contents = {name: path if path.suffix == ".npy" else path.read_bytes() for name, path in paths.items()}
            message = f"Dataset {manifest.dataset_id[:16]}"
            hub.commit(root, {**contents, MANIFEST: content}, parent, message, public=public, check=require_same)
        else:
            require_same()
            stores.write(f"{root}/{MANIFEST}", content)
    except (BertdataError, OSError, ValueError) as error:
        require_same(error)
        raise
    return manifest.dataset_id


def _origins_of(directory: Path, manifest: Manifest) -> dict[str, str | None]:
    """Return name → SHA-256 of the origins, as `files_of`; nothing if the dataset has none."""
    record = Record.read(directory, manifest)
    return {name: sha256 for name, (sha256, _) in record.files(manifest).items()} | {RECORD: None} if record else {}
