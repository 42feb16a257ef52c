"""Datasets under URLs: what is there is complete, after any kill, and what comes back is what went."""

import multiprocessing
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch
from urllib.error import HTTPError

import huggingface_hub.errors
import obstore
import pytest
from support.commands import refused, refuses, succeeds
from support.data import build, faults_of
from support.disk import before_rename, contents, flip, published, put, reseal, unsealed, without_origins, write
from support.servers import serving

import bertdata
from bertdata.remote import stores
from bertdata.remote.copies import LOCK, pull, push

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def dataset(other):
    """A dataset of few files: each is a request."""
    return other


@pytest.fixture
def pushed(bucket, dataset):
    """The URL of `dataset` in a bucket."""
    push(dataset.path, f"{bucket.url}/shards")
    return f"{bucket.url}/shards"


def before_put(name, action):
    """A context that calls an action before an object whose key ends with a name is put."""
    real = obstore.put

    def put(store, key, *content, **how):
        if key.endswith(name):
            action()
        return real(store, key, *content, **how)

    return patch.object(obstore, "put", put)


def test_what_comes_back_is_what_went_and_nothing_is_copied_twice(bucket, dataset, roberta_dataset, tmp_path, cache):
    seen, url, lock = [], f"{bucket.url}/shards", tmp_path / "copy" / LOCK
    bucket.put("shards/train-00000.json", b"of another dataset")  # whose push was interrupted
    assert push(dataset.path, f"{url}/", progress=lambda *at: seen.append(at)) == dataset.dataset_id
    assert bucket.objects("shards") == published(dataset.path)
    assert seen[-1][0] == seen[-1][1] > 0
    with before_put("", pytest.fail):  # it is there
        assert push(dataset.path, url) == dataset.dataset_id
        with refuses("out-exists", "url"):
            push(roberta_dataset.path, url)
    assert pull(url, tmp_path / "copy", progress=lambda *at: lock.unlink(missing_ok=True)) == dataset.dataset_id
    assert published(tmp_path / "copy") == published(dataset.path)
    assert faults_of(tmp_path / "copy") == []
    with ThreadPoolExecutor(3) as pool:  # the first one copies, others wait
        opened, *others = pool.map(bertdata.open, [url] * 3)
    assert {(each.path, each.dataset_id) for each in others} == {(opened.path, dataset.dataset_id)}
    assert opened.path.is_relative_to(cache)
    obstore.delete(stores.store_of(url), "shards/train-00000.tokens.npy")  # which nothing copies again
    assert pull(url, tmp_path / "copy") == dataset.dataset_id
    assert bertdata.open(f"{url}/").path == opened.path
    path = tmp_path / "copy" / "train-00000.tokens.npy"
    flip(path, 200)
    with refuses("damaged", given=path):
        pull(url, tmp_path / "copy")


def test_a_dataset_of_other_special_ids_is_no_copy_of_the_sound_one(bucket, pushed, dataset, tmp_path):
    """Both have one dataset_id, as it depends on the files of the tokenizer."""
    copy = shutil.copytree(dataset.path, tmp_path / "other")
    record = unsealed(copy / "manifest.json")
    roles = record["special_tokens"] | {"mask": 7}
    for change in ({"special_ids": [0, 1, 2, 3]}, {"vocab_size": 90}, {"special_tokens": roles}):
        reseal(copy / "manifest.json", record | change)
        (fault,) = faults_of(copy)
        assert "manifest.json" in fault
    for name, content in published(copy).items():
        bucket.put(f"other/{name}", content)
    for _ in range(2):  # also where the cache has the sound one
        for read in (bertdata.open, lambda url: pull(url, tmp_path / "copy")):
            with refuses("damaged"):
                read(f"{bucket.url}/other")
        assert bertdata.open(pushed).special_tokens == dataset.special_tokens


def test_a_pull_leaves_other_files_also_those_of_an_interrupted_pull(
    bucket, pushed, dataset, roberta_dataset, tmp_path
):
    push(roberta_dataset.path, f"{bucket.url}/b")
    with before_rename("origins.json", Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        pull(f"{bucket.url}/b", tmp_path / "copy")
    stray = write(tmp_path / "copy" / "train-00077.json", "of another dataset")
    for directory in (write(tmp_path / "mine" / "notes.txt", "keep").parent, roberta_dataset.path, tmp_path / "copy"):
        before = contents(directory)
        with refuses("out-exists", "directory"):
            pull(pushed, directory)
        assert contents(directory) == before
    stray.unlink()
    pull(pushed, tmp_path / "copy")
    assert published(tmp_path / "copy") == published(dataset.path)


def test_a_copy_that_failed_writes_into_no_later_copy(pushed, dataset, tmp_path):
    """Its thread, which waited for the server, still has the file open that it began."""
    copy, name = put(tmp_path / "copy" / LOCK, "").parent, "train-00000.tokens.npy"
    with open(copy / f"{name}.tmp", "wb", buffering=0) as late, before_rename(name, partial(late.write, b"another")):
        assert pull(pushed, copy) == dataset.dataset_id
    assert published(copy) == published(dataset.path)


def test_a_pull_that_fails_names_the_file(bucket, pushed, dataset, tmp_path):
    """A dataset is complete without origins, but damaged ones are not ignored."""
    files = published(dataset.path)
    for name in ("train-00000.tokens.npy", "train-00000.json", "origins/inputs.jsonl"):
        bucket.put(f"shards/{name}", files[name][:-1] + b"?")
        with refuses("damaged", given=f"{pushed}/{name}"):
            pull(pushed, tmp_path / "copy")
        assert not (tmp_path / "copy" / "manifest.json").exists()
        bucket.put(f"shards/{name}", files[name])
    obstore.delete(stores.store_of(pushed), "shards/origins/origins.json")
    assert pull(pushed, tmp_path / "copy") == dataset.dataset_id
    assert published(tmp_path / "copy") == without_origins(dataset.path)


@pytest.mark.parametrize("content", [b"{}", None])
@pytest.mark.parametrize("name", ["tokenizer.json", "train-00000.tokens.npy", "train-00000.json"])
def test_a_damaged_file_is_not_put_there(bucket, dataset, tmp_path, name, content):
    shutil.copytree(dataset.path, tmp_path / "damaged")
    damaged = tmp_path / "damaged" / name
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with refuses("damaged", given=damaged):
        push(tmp_path / "damaged", f"{bucket.url}/shards")
    assert "manifest.json" not in bucket.objects("shards")


def test_a_process_that_was_forked_gets_an_error(pushed):
    def child():
        with refuses("unsupported"):
            bertdata.open(pushed)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0


class FakeHub:
    """A repository in memory, with what is used of huggingface_hub. Each upload is one commit."""

    errors = huggingface_hub.errors
    utils = SimpleNamespace(build_hf_headers=lambda: {"authorization": "Bearer secret"})

    def __init__(self):
        self.commits = {}  # sha → name → bytes
        self.private = True
        self.before = {}  # "add" or "upload" → what then happens once: at the first file, or ahead of the commit

    def HfApi(self):  # noqa: N802
        return self

    def create_repo(self, repository, *, repo_type, exist_ok, private):
        assert (repository, repo_type, exist_ok) == ("org/name", "dataset", True)
        if not self.commits:
            self.private, self.commits["sha0"] = private, {".gitattributes": b"x"}

    def CommitOperationAdd(self, path_in_repo, path_or_fileobj):  # noqa: N802
        self.before.pop("add", lambda: None)()
        if isinstance(path_or_fileobj, bytes):
            return path_in_repo, path_or_fileobj
        if not path_or_fileobj.is_file():
            raise ValueError(path_or_fileobj)  # as huggingface_hub does
        return path_in_repo, path_or_fileobj.read_bytes()

    def preupload_lfs_files(self, repository, additions, *, repo_type, revision):
        self.before.pop("upload", lambda: None)()

    def list_repo_commits(self, repository, *, repo_type, revision):
        return [SimpleNamespace(commit_id=sha) for sha in reversed(self.commits)]

    def create_commit(self, repository, operations, *, repo_type, revision, commit_message, parent_commit):
        assert (repository, repo_type, revision, bool(commit_message)) == ("org/name", "dataset", None, True)
        if parent_commit != [*self.commits][-1]:
            raise HTTPError("https://hub", 412, "A commit has happened since", None, None)
        before = [*self.commits.values()][-1]
        if (after := {**before, **dict(operations)}) != before:  # the hub makes no empty commit
            self.commits[f"sha{len(self.commits)}"] = after

    def dataset_info(self, repository, *, revision, files_metadata=False):
        assert repository == "org/name"
        if not self.commits:
            raise FileNotFoundError(repository)
        sha = revision or list(self.commits)[-1]
        siblings = [
            SimpleNamespace(rfilename=name, size=len(content) if files_metadata else None, lfs=None, blob_id=None)
            for name, content in self.commits[sha].items()
        ]
        return SimpleNamespace(sha=sha, siblings=siblings, private=self.private)

    def hf_hub_url(self, repository, path, *, repo_type, revision):
        assert (repository, repo_type) == ("org/name", "dataset")
        return f"{self.address}/{revision}/{path}"


@pytest.fixture
def hub(monkeypatch):
    fake = FakeHub()

    def get(request):
        assert request.headers["Authorization"] == "Bearer secret"
        sha, _, name = request.path[1:].partition("/")
        start, stop = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        request.answer(206, fake.commits[sha][name][start : stop + 1])

    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    with serving(get) as address:
        fake.address = f"http://{address}"
        yield fake


def test_the_hub_gets_one_commit_and_gives_it_back(hub, dataset, tmp_path):
    root = "hf://datasets/org/name"
    with refuses("not-a-dataset"):
        pull(root, tmp_path / "copy")
    for number, url in enumerate((root, f"{root}/a/shards"), 1):
        assert push(dataset.path, url) == push(dataset.path, url) == dataset.dataset_id
        assert len(hub.commits) == number + 1
        assert pull(url, tmp_path / f"copy{number}") == dataset.dataset_id
        assert published(tmp_path / f"copy{number}") == without_origins(dataset.path)
        assert bertdata.open(f"{url}@sha{number}").dataset_id == dataset.dataset_id
    succeeds("bertdata", "push", dataset.path, f"{root}/b", "--origins")
    pull(f"{root}/b", tmp_path / "all")
    assert published(tmp_path / "all") == published(dataset.path)
    assert hub.private


def test_everybody_sees_a_dataset_only_if_that_is_said(hub, dataset):
    root = "hf://datasets/org/name"
    hub.create_repo("org/name", repo_type="dataset", exist_ok=True, private=False)
    refused("bertdata", "push", dataset.path, root, kind="missing", option="public")
    assert list(hub.commits) == ["sha0"]
    succeeds("bertdata", "push", dataset.path, root, "--public")
    succeeds("bertdata", "push", dataset.path, root)  # it is there
    refused("bertdata", "push", dataset.path, root, "--origins", kind="missing", option="public")
    names = hub.commits["sha1"].keys() - {".gitattributes"}
    assert names == without_origins(dataset.path).keys()
    hub.__init__()
    push(dataset.path, root, public=True)
    assert not hub.private


@pytest.mark.parametrize(
    ("when", "is_gone"),
    [("tokenizer.json", False), ("origins.json", False), ("add", False), ("add", True), ("upload", False)],
)
def test_a_dataset_that_is_replaced_during_a_push_is_not_published(
    bucket, hub, dataset, roberta_dataset, limit, tmp_path, when, is_gone
):
    """By a build, or it loses a file: before a file is put into a bucket, or at a step of a commit to the hub."""
    folder = shutil.copytree(dataset.path, tmp_path / "changing")

    def change():
        (folder / ("train-00000.tokens.npy" if is_gone else "manifest.json")).unlink()
        if not is_gone:
            shutil.copytree(roberta_dataset.path, folder, dirs_exist_ok=True)

    limit(threads_of_copies=1)  # nothing is read after the record of the origins
    hub.before[when] = change
    with before_put(when, change), refuses("replaced", given=folder):
        push(folder, f"{bucket.url}/shards" if when.endswith("json") else "hf://datasets/org/name")
    assert "manifest.json" not in bucket.objects("shards")
    assert list(hub.commits) in ([], ["sha0"])


@pytest.mark.parametrize("is_made", [False, True])
def test_of_two_pushes_to_the_hub_at_the_same_time_one_fails(hub, dataset, roberta_dataset, is_made):
    root = "hf://datasets/org/name"
    if is_made:
        hub.create_repo("org/name", repo_type="dataset", exist_ok=True, private=True)
    hub.before["upload"] = lambda: push(roberta_dataset.path, root)
    with refuses("changed"):
        push(dataset.path, root)
    assert list(hub.commits) == ["sha0", "sha1"]
    assert hub.commits["sha1"].items() >= without_origins(roberta_dataset.path).items()


def test_text_of_the_hub_is_that_of_one_commit(hub, corpus, vocab, tmp_path):
    hub.commits["sha0"] = {"data/a.txt": corpus.read_bytes(), "data/b.md": b"no", "c.txt": b"no"}
    hub.commits["sha1"] = {"data/a.txt": b"another text"}
    build(corpus, tmp_path / "here", tokenizer=vocab)
    for number, url in enumerate(["/data/a.txt@sha0", "/data@sha0", "/data/*.txt@sha0", "@sha0/data/a.txt"]):
        build(f"hf://datasets/org/name{url}", tmp_path / str(number), tokenizer=vocab)
        assert without_origins(tmp_path / str(number)) == without_origins(tmp_path / "here")
    assert build("hf://datasets/org/name", tmp_path / "new", tokenizer=vocab).dataset.num_documents == 1
