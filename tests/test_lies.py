"""Pushes and pulls at the same time, with a store that lies: nothing is lost, and no half is taken for whole."""

import random
import threading
import time
from contextlib import suppress
from unittest.mock import patch

import pytest
from conftest import make_text
from helpers import published, refuses
from lies import LIES, WAIT_S, lying

from bertdata.errors import BertdataError
from bertdata.format.verify import verify
from bertdata.remote import stores
from bertdata.transfer.pulling import pull
from bertdata.transfer.pushing import CLAIM, push
from bertdata.write import build

EXPECTED = {"server-failed", "busy", "out-exists", "not-a-dataset", "changed", "not-found"}
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def datasets(once, vocab):
    """Directories of two datasets whose files have the same names."""

    def make(folder):
        for name, seed in (("one", 1), ("two", 2)):
            (folder / f"{name}.txt").write_text(make_text(8, seed=seed), encoding="utf-8")
            build(folder / f"{name}.txt", folder / name, tokenizer=vocab, shard_size=1500)

    return [once("two-datasets", make) / name for name in ("one", "two")]


@pytest.fixture
def lies(bucket, object_store, monkeypatch):
    """What the proxy in front of the server does, with which all transfers now speak."""
    with lying(object_store, seed=1) as (lies, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        stores.store_at.cache_clear()
        yield lies
    stores.store_at.cache_clear()


def under(bucket, prefix):
    return {name: content for name, content in bucket.objects(prefix).items() if name != CLAIM}


def repeated(work, draw, errors):
    """A thread that does work until it ends well, or some times; what it raises is kept."""

    def run():
        for _ in range(8):
            try:
                work()
                return
            except BertdataError as error:
                errors.append(error)
            except BaseException as error:
                errors.append(error)
                return
            time.sleep(draw.random() / 20)

    return threading.Thread(target=run)


def assert_whole_after_lies(bucket, lies, datasets, folder, seed):
    """Three pushes and two pulls at once. Then one dataset is under the URL, and each copy is one."""
    draw, errors, url = random.Random(seed), [], f"{bucket.url}/shards"
    real, contents = stores.write, [published(path) for path in datasets]

    def pausing(url, path):
        time.sleep(draw.random() / 50)
        real(url, path)

    lies.share = draw.choice([0.05, 0.2, 0.4])
    with patch.object(stores, "write", pausing):
        works = [lambda path=path: push(path, url) for path in (datasets[0], datasets[0], datasets[1])]
        works += [lambda name=name: pull(url, folder / name) for name in ("copy", "other")]
        threads = [repeated(work, random.Random(f"{seed} {number}"), errors) for number, work in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lies.share = 0.0
    for error in errors:
        assert isinstance(error, BertdataError), repr(error)
        assert error.kind in EXPECTED, error
        assert "\n" not in str(error)
    for path in datasets:  # one of them is there, or goes on
        with suppress(BertdataError):
            push(path, url)
    time.sleep(3 * WAIT_S)  # for what comes late
    assert under(bucket, "shards") in contents
    for name in ("copy", "other"):
        if (folder / name / "manifest.json").exists():
            assert verify(folder / name) == []
        pull(url, folder / name)
        assert published(folder / name) in contents
    return len(errors)


def test_pushes_and_pulls_beside_a_store_that_lies(bucket, lies, datasets, tmp_path):
    assert_whole_after_lies(bucket, lies, datasets, tmp_path, seed=0)
    assert {*LIES} <= lies.counts.keys()


@pytest.mark.slow
def test_many_pushes_and_pulls_beside_a_store_that_lies(lies, bucket, datasets, tmp_path):
    num_errors = 0
    for seed in range(1, 5):
        (tmp_path / f"{seed}").mkdir()
        num_errors += assert_whole_after_lies(bucket, lies, datasets, tmp_path / f"{seed}", seed)
        for key in bucket.objects():
            stores.remove(f"{bucket.url}/{key}")
    print(num_errors, "commands ended with an error; lies:", dict(lies.counts))  # pytest -s shows it
    assert num_errors > 3


@pytest.mark.parametrize("name", [CLAIM, "manifest.json"])
def test_a_store_that_ignores_if_none_match_mixes_no_datasets(bucket, lies, datasets, name):
    """Without it for claims the store is refused; of the manifest the claim takes care."""
    lies.unconditional, url, real, refused = name, f"{bucket.url}/shards", stores.write, []
    if name == CLAIM:
        with refuses("server-unsuitable", "url"):
            push(datasets[0], url)
        assert under(bucket, "shards") == {}
        return

    def beside_another(url_of_file, path):
        if not refused:
            with refuses("busy", "url") as caught:
                push(datasets[1], url)
            refused.append(caught.value)
        real(url_of_file, path)

    with patch("bertdata.transfer.files.THREADS", 1), patch.object(stores, "write", beside_another):
        push(datasets[0], url)
    assert refused
    assert under(bucket, "shards") == published(datasets[0])


def test_a_push_that_slept_while_its_claim_was_removed_damages_at_most_what_is_found(bucket, datasets, tmp_path):
    """It was about to put one file. It puts no second one, and a pull finds that one."""
    url, real, is_first = f"{bucket.url}/shards", stores.write, [True]

    def sleeping(url_of_file, path):
        if path.is_relative_to(datasets[1]) and path.suffix == ".npy" and is_first and is_first.pop():
            stores.remove(f"{url}/{CLAIM}")
            push(datasets[0], url)
        real(url_of_file, path)

    with patch("bertdata.transfer.files.THREADS", 1), patch.object(stores, "write", sleeping), refuses("busy", "url"):
        push(datasets[1], url)
    found, expected = under(bucket, "shards"), published(datasets[0])
    damaged = [name for name in expected if found[name] != expected[name]]
    assert len(damaged) == 1
    with refuses("damaged", given=f"{url}/{damaged[0]}"):
        pull(url, tmp_path / "copy")
    assert not (tmp_path / "copy" / "manifest.json").exists()
