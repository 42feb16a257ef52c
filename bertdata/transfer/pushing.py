"""`push` puts a dataset under a URL.

All files but the manifest come first, and the manifest comes last, only if there is none. So what has a manifest is
complete. Files are a function of the text, the tokenizer and the settings, so a push that was killed goes on when it is
run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bertdata.errors import BuildError, DatasetError, RemoteError, UsageError
from bertdata.format.dataset import stamp
from bertdata.format.manifest import MANIFEST, Manifest, read_manifest
from bertdata.format.origins import RECORD, Record
from bertdata.format.records import MAX_RECORD_BYTES
from bertdata.remote import hub, stores
from bertdata.transfer.files import Progress, at_once, files_of, id_under, require_own_id, require_sound
from bertdata.urls import is_url, without_secrets

CLAIM = ".bertdata-push"  # beside a manifest that is to come: whose files are put there, and which are there
_CLAIMED_EVERY = 1 << 28  # bytes that a push puts at least between two notes of what is there


def push(
    directory: str | Path,
    url: str,
    *,
    public: bool = False,
    origins: bool = False,
    progress: Progress = lambda done, total: None,
) -> str:
    """Puts the dataset of a directory under a URL, and returns its dataset_id. Checks every file before it goes.

    url: a directory of an object store, or hf://datasets/org/name[/path][@revision]. Run again after a kill, it goes on
    with the files that are not there. A dataset that is there already stays: the same one is what was asked for, and
    another one is refused. public: of the hub, also put it where everybody sees it. origins: also put origins/, which
    names inputs with their paths, on the hub; an object store always gets it. progress: called with the bytes that are
    done, and all.

    Raises UsageError, DatasetError for a damaged dataset, BuildError for another dataset, and RemoteError.
    """
    source, root = Path(directory), url.rstrip("/")
    require_writable(root, option="url")
    before, manifest = stamp(source / MANIFEST), read_manifest(source)
    require_own_id(manifest)
    there = id_under(root)
    if there is None and root.startswith("hf:"):
        if not public and hub.is_public(root):
            sentence = f"{root} exists and is public; give --public if everybody may see this dataset"
            raise RemoteError(sentence, "missing", option="public")
        files = files_of(manifest) | (_origins_of(source, manifest) if origins else {})
        for name, sha256 in files.items():
            require_sound(source / name, sha256)
        names, message = [*files, MANIFEST], f"Dataset {manifest.dataset_id[:16]}"
        with _kept(source, root, before):
            hub.commit_folder(root, source, names, unless=MANIFEST, message=message, public=public)
        there = id_under(root)
    elif there is None:
        there = _put_all(source, root, manifest, before, progress)
    elif there == manifest.dataset_id and not root.startswith("hf:"):
        stores.remove(f"{root}/{CLAIM}")  # of a push that was killed after its manifest was there
    if there is None:
        sentence = f"{root}: the server did not keep {MANIFEST}; run the same command again"
        raise RemoteError(sentence, "server-failed", given=root)
    if there != manifest.dataset_id:
        sentence = f"{root} holds another dataset already; give another URL, or remove that one first"
        raise BuildError(sentence, "out-exists", option="url", given=root)
    return manifest.dataset_id


def require_writable(url: str, *, option: str) -> None:
    """Raises UsageError for a URL that no dataset can be put under. option: which has it."""
    if not is_url(url) or url.startswith("http"):
        shown = without_secrets(url)
        sentence = f"{shown} cannot hold a dataset; give a URL of s3, gs, az or hf, such as s3://bucket/name"
        raise UsageError(sentence, "bad-url", option=option, given=shown)


def require_free(url: str) -> None:
    """Raises BuildError if a dataset is under the URL of a build's --out, or if everybody would see it there."""
    if id_under(url.rstrip("/")) is not None:
        sentence = f"{url} already holds a dataset; give another URL, or remove that one first"
        raise BuildError(sentence, "out-exists", option="out", given=url)
    if url.startswith("hf:") and hub.is_public(url):
        sentence = f"{url} exists and is public; build into a directory, and give it to bertdata push --public"
        raise BuildError(sentence, "out-exists", option="out", given=url)


def _put_all(source: Path, root: str, manifest: Manifest, before: object, progress: Progress) -> str | None:
    """Puts all files, the manifest last. Returns the dataset_id that is there in the end, which may be another one.

    before: the stamp of manifest.json. A build that replaces the dataset removes it before it touches another file.
    """
    done = _claim(root, manifest)
    there = id_under(root)  # again: who had the claim before may have finished
    if there is None:
        with _kept(source, root, before):
            _put_files(source, root, manifest, done, progress)
            content = (source / MANIFEST).read_bytes()
        is_mine = stores.create(f"{root}/{MANIFEST}", content)
        there = manifest.dataset_id if is_mine else id_under(root)
    if there is not None:
        stores.remove(f"{root}/{CLAIM}")
    return there


@contextmanager
def _kept(source: Path, root: str, before: object) -> Iterator[None]:
    """A context that ends in DatasetError if a build has replaced the dataset, whatever error came of that."""
    try:
        yield
    finally:
        if stamp(source / MANIFEST) != before:
            sentence = f"{source} was replaced by a build while it was copied to {root}; push it again"
            raise DatasetError(sentence, "replaced", given=source) from None


def _claim(root: str, manifest: Manifest) -> set[str]:
    """Keeps two programs from putting different datasets under one URL. Returns the files that are there already.

    Raises BuildError if another dataset is being put there, and RemoteError for a store that cannot keep them apart.
    """
    while not stores.create(f"{root}/{CLAIM}", _claimed(manifest, set())):
        if (claim := _read_claim(root)) is None:
            continue  # whoever it was is done meanwhile
        if claim[0] == manifest.dataset_id:
            return claim[1]
        sentence = (
            f"{root} is being filled with another dataset ({claim[0][:16]}); give another URL, or remove {CLAIM} there "
            "if nobody does that any more"
        )
        raise BuildError(sentence, "busy", option="url", given=root)
    if stores.create(f"{root}/{CLAIM}", _claimed(manifest, set())) and id_under(root) is None:  # else one has ended
        stores.remove(f"{root}/{CLAIM}")
        sentence = f"{root}: the server ignores If-None-Match, so two pushes could mix; push to another store"
        raise RemoteError(sentence, "server-unsuitable", option="url", given=root)
    return set()


def _read_claim(root: str) -> tuple[str, set[str]] | None:
    """The dataset_id of the claim under a URL, and the files that are there as it says; None: there is no claim."""
    try:
        claim = json.loads(stores.read(f"{root}/{CLAIM}", MAX_RECORD_BYTES))
        return str(claim["dataset_id"]), set(map(str, claim["files"]))
    except RemoteError as error:
        if error.kind != "not-found":
            raise
        return None
    except (ValueError, TypeError, KeyError):
        return "unknown", set()


def _require_claim(root: str, manifest: Manifest) -> None:
    """Raises BuildError if this push has lost its claim, as what it puts could replace files of another dataset."""
    claim = _read_claim(root)
    if (claim[0] if claim else id_under(root)) != manifest.dataset_id:
        sentence = (
            f"{CLAIM} of this push was removed from {root}; run the same command again if nobody else pushes there"
        )
        raise BuildError(sentence, "busy", option="url", given=root)


def _claimed(manifest: Manifest, done: set[str]) -> bytes:
    return json.dumps({"dataset_id": manifest.dataset_id, "files": sorted(done)}).encode()


def _put_files(source: Path, root: str, manifest: Manifest, done: set[str], progress: Progress) -> None:
    """Puts all files but the manifest and those of `done`. The claim says now and then which are there."""
    origins = _origins_of(source, manifest)  # which another push of this dataset may have of other inputs: all go anew
    digests = files_of(manifest) | origins
    size_of = {name: _size_of(source / name) for name in digests}
    there = _sizes_under(root) if done else {}
    done = {name for name in done & size_of.keys() - origins.keys() if there.get(name) == size_of[name]}
    total, num_bytes, unclaimed = sum(size_of.values()), sum(size_of[name] for name in done), 0

    def put(name: str) -> str:
        require_sound(source / name, digests[name])
        _require_claim(root, manifest)
        stores.write(f"{root}/{name}", source / name)
        return name

    progress(num_bytes, total)
    for name in at_once(put, [name for name in digests if name not in done]):
        done.add(name)
        num_bytes, unclaimed = num_bytes + size_of[name], unclaimed + size_of[name]
        progress(num_bytes, total)
        if unclaimed >= max(_CLAIMED_EVERY, total // 100):
            _require_claim(root, manifest)
            stores.overwrite(f"{root}/{CLAIM}", _claimed(manifest, done))
            unclaimed = 0
    there = _sizes_under(root)
    if lost := [name for name, size in size_of.items() if there.get(name) != size]:
        sentence = f"{root}/{lost[0]}: the server did not keep this file as it was put; run the same command again"
        raise RemoteError(sentence, "server-failed", given=root)
    _require_claim(root, manifest)


def _origins_of(directory: Path, manifest: Manifest) -> dict[str, str | None]:
    """The same of the origins that a dataset here has, the record last; nothing if it has none."""
    record = Record.read(directory, manifest)
    return {name: sha256 for name, (sha256, _) in record.files(manifest).items()} | {RECORD: None} if record else {}


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        sentence = f"{path}, which {MANIFEST} names, is missing; bertdata verify {path.parent} says more"
        raise DatasetError(sentence, "damaged", given=path) from None


def _sizes_under(root: str) -> dict[str, int]:
    """Name → bytes of every file that is under a URL."""
    folder = f"{root.partition('://')[2].partition('/')[2]}/".removeprefix("/")
    return {path.removeprefix(folder): file.size for path, file in stores.files_below(root, folder).items()}
