"""documents, packed and pairs: every row is that of the reference implementation, and the index is only a cache."""

import json
import os
import shutil

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import keys, rows
from support.commands import refuses
from support.data import (
    SPECIAL,
    assert_goes_on,
    assert_joined,
    build,
    of_vocabulary,
    shard_of,
    stream_of,
    write_dataset,
)
from support.limits import limits
from support.runs import FORKS

import bertdata
from bertdata import Loader, Masking, files
from bertdata.errors import BuildError, DatasetError
from bertdata.format.arrays import array_path, digest
from bertdata.format.records import read_record, write_record
from bertdata.format.verify import verify
from bertdata.read import index, order
from bertdata.read.kernels import pieces as piece_kernels
from bertdata.read.stream import Samples, Wanted, rows_of
from bertdata.read.words import tables
from bertdata.remote import stores
from bertdata.types import SpecialTokens

DERIVED = ["documents", "packed", "pairs"]
KINDS = ["corpus", "tiny shards", "no separators", "uint32"]


def documents_of(dataset, split="train"):
    """Documents as lists of sentences, lists of ids, without separators."""
    documents = []
    for number, shard in enumerate(dataset.splits[split]):
        tokens = dataset.tokens(split, number).tolist()
        ends = dataset.array(shard.name, "documents").tolist()
        cuts = dataset.array(shard.name, "sentences").tolist()
        has_separator = dataset.special_tokens.separator is not None
        for start, stop in zip(ends, ends[1:], strict=False):
            inner = [cut for cut in cuts if start <= cut < stop] + [stop]
            sentences = [tokens[a:b] for a, b in zip(inner, inner[1:], strict=False)]
            sentences[-1] = sentences[-1][: len(sentences[-1]) - has_separator]
            documents.append(sentences)
    return documents


def flat(documents):
    return [[token for sentence in document for token in sentence] for document in documents]


def all_rows(loader, epoch=0):
    """The batch of an epoch, its rows in order of their samples."""
    batch = loader.read(epoch * loader.num_samples + np.arange(loader.num_samples))
    order_of = np.argsort(batch.sample_ids)
    assert np.array_equal(batch.sample_ids[order_of], np.arange(loader.num_samples))
    return {name: array[order_of] for name, array in batch.arrays().items()}


def made_of_sentences(kind, folder):
    random, shards = np.random.default_rng(0), []
    separator = [] if kind == "no separators" else [3]
    for _ in range(7):
        documents = [
            [random.integers(5, 300, random.integers(1, 30)).tolist() for _ in range(random.geometric(0.3))]
            for _ in range(random.integers(1, 9))
        ]
        shards.append(shard_of(documents, separator))
    special = SPECIAL
    if not separator:  # a vocabulary whose rows have ends that documents lack is not built; readers take it
        special = SpecialTokens(vocab_size=300, cls=2, sep=3, mask=4, special_ids=(2, 3, 4))
    dtype = "<u4" if kind == "uint32" else "<u2"
    return bertdata.open(write_dataset(folder / "shards", shards, special=special, dtype=dtype))


@pytest.mark.parametrize("length", [3, 4, 17, 64, 5000])
def test_documents_are_never_two_in_a_row(dataset, length):
    loader = Loader(dataset, length=length, samples="documents", masking=None)
    batch, pieces = all_rows(loader), rows.pieces(flat(documents_of(dataset)), length - 2)
    assert loader.num_samples == len(pieces)
    for row, piece in zip(batch["input_ids"].tolist(), pieces, strict=True):
        assert row == [2, *piece, 3] + [0] * (length - 2 - len(piece))
    used = sum(len(piece) + 2 for piece in pieces)
    assert loader.facts["pad_share"] == pytest.approx(1 - used / (length * len(pieces)))
    mask = batch.get("attention_mask", np.ones_like(batch["input_ids"]))
    assert mask.sum() == used
    assert "position_ids" not in batch


@pytest.mark.parametrize(
    ("length", "together"), [(3, 50), (4, 1 << 19), (17, 1), (17, 1 << 19), (64, 50), (64, 1 << 19), (5000, 1)]
)
def test_packed_rows_equal_their_reference(dataset, limit, length, together):
    limit(packed_together=together)
    loader = Loader(dataset, length=length, samples="packed", masking=None)
    batch = all_rows(loader)
    packed = rows.packed(flat(documents_of(dataset)), length=length, together=together)
    assert loader.num_samples == len(packed)
    used = 0
    for ids, positions, row in zip(batch["input_ids"], batch["position_ids"], packed, strict=True):
        expected = rows.packed_row(row, length=length, cls=2, sep=3, pad=0)
        assert (ids.tolist(), positions.tolist()) == expected
        used += sum(len(piece) + 2 for piece in row)
    assert loader.facts["pad_share"] == pytest.approx(1 - used / (length * len(packed)))


@settings(max_examples=100)
@given(st.lists(st.integers(3, 40), max_size=60), st.integers(0, 3))
@example([6, 6, 4, 4], 4)  # two rows have room for 4, and the first is under the second
def test_pack_equals_its_reference(sizes, more):
    capacity = max(sizes, default=3) + more
    sizes = np.array(sizes, np.int64)
    row_of = np.empty(sizes.size, np.int64)
    order_of = np.argsort(-sizes, kind="stable")
    count = piece_kernels.pack(sizes, order_of, capacity, row_of)
    expected = rows.best_fit(sizes.tolist(), capacity)
    assert count == len(expected)
    assert [sorted(row) for row in expected] == [np.flatnonzero(row_of == row).tolist() for row in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [5, 6, 16, 64, 700])
def test_pairs_equal_their_reference(dataset, tmp_path, length, kind):
    short_seq_prob = [0.0, 0.1, 1.0][(KINDS.index(kind) + length) % 3]  # of each two of the three, every pair
    data, seed = dataset if kind == "corpus" else made_of_sentences(kind, tmp_path), 2**64 - 3
    documents, options = documents_of(data), {"short_seq_prob": short_seq_prob, "seed": seed}
    loader = Loader(data, length=length, samples="pairs", masking=None, **options)
    pairs = rows.segment(documents, length=length, **options)
    assert loader.num_samples == len(pairs)
    for epoch in (0, 2):
        batch = all_rows(loader, epoch)
        for sample_id, pair in enumerate(pairs):
            named = {"sample_id": sample_id, "epoch": epoch, "seed": seed}
            a, b, is_random = rows.pair_row(pair, documents, length=length, **named)
            rest = [0] * (length - len(a) - len(b) - 3)
            assert batch["input_ids"][sample_id].tolist() == [2, *a, 3, *b, 3] + rest
            assert batch["token_type_ids"][sample_id].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + rest
            assert batch["next_sentence_label"][sample_id] == is_random
    facts, n = loader.facts, len(pairs)
    batch, named = all_rows(loader), {"epoch": 0, "length": 10**6, "seed": seed}
    places = batch.get("attention_mask", np.ones_like(batch["input_ids"])).sum()
    if n <= 4096:
        assert facts["pad_share"] == pytest.approx(1 - places / (n * length))
    uncut = [rows.pair_row(pair, documents, sample_id=number, **named) for number, pair in enumerate(pairs)]
    text = sum(len(a) + len(b) for a, b, _ in uncut)
    assert facts["crop_share"] == pytest.approx((text - (places - 3 * n)) / text)
    assert facts["random_share"] == pytest.approx(sum(isinstance(b, int) for _, _, b in pairs) / len(pairs))


@pytest.mark.parametrize("how", DERIVED)
def test_masks_and_invariance(dataset, how):
    """Masks are those of the row; ranks, batches and restarts change nothing."""
    options = {"length": 32, "samples": how, "seed": 5, "global_batch_size": 11, "epochs": 2}
    plain = Loader(dataset, **options | {"masking": None})
    whole = Loader(dataset, **options)
    n = whole.num_samples
    everything = whole.read(np.arange(2 * n))
    rows_ = plain.read(np.arange(2 * n))
    for b in range(0, 2 * n, 7):
        filled = 32 if rows_.attention_mask is None else int(rows_.attention_mask[b].sum())
        named = {"length": 32, "seed": 5, "variant": b // n, "sample_id": int(rows_.sample_ids[b])}
        row = rows_.input_ids[b, :filled].tolist()
        changed, places, targets = keys.mask(row, **named, **of_vocabulary(dataset.special_tokens))
        assert everything.input_ids[b, :filled].tolist() == changed
        assert everything.masked_positions[b, : len(places)].tolist() == places
        assert everything.targets[b, : len(places)].tolist() == targets
    for world_size in (1, 3, 8):
        ranks = [Loader(dataset, **options, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert_joined(everything, [part for batches in zip(*ranks, strict=True) for part in batches])
    assert_goes_on(lambda: Loader(dataset, **options | {"global_batch_size": n // 4}))


@pytest.mark.parametrize("how", ["windows", *DERIVED])
def test_what_is_read_ahead_is_what_is_read(dataset, monkeypatch, limit, how):
    """In blocks: the ranges asked for hold every token of the group's rows, but for segments from elsewhere."""
    limit(block_tokens=30)
    asked = []
    monkeypatch.setattr(Samples, "_request", lambda self, ranges: asked.append(ranges))
    loader = Loader(dataset, length=17, samples=how, shuffle="blocks", masking=None, global_batch_size=8)
    stream = stream_of(dataset)
    n, block = loader.num_samples, 2
    groups = {order.group_of(p, num_samples=n, block=block) for p in range(2 * n)}
    assert len(groups) >= 4
    for epoch, group in groups:
        positions = [
            p
            for p in range(epoch * n, epoch * n + n)
            if order.group_of(p, num_samples=n, block=block) == (epoch, group)
        ]
        ids = order.sample_ids(np.array(positions), num_samples=n, seed=0, block=block)[1]
        blocks = order.blocks_of(epoch, group, num_samples=n, seed=0, block=block)
        assert sorted(ids.tolist()) == sorted(s for first, stop in blocks for s in range(first, stop))
        for first, stop in blocks:
            at = [p for p, s in zip(positions, ids, strict=True) if first <= s < stop]
            ranges = loader.sources[0].ranges(epoch, first, stop)
            text = [token for a, b in ranges for token in stream[a:b]]
            batch = loader.read(np.array(at))
            for b, row in enumerate(batch.input_ids):
                if batch.next_sentence_label is None or not batch.next_sentence_label[b]:
                    kept = row[row >= 5]
                    assert np.isin(kept, text).all()
            if how == "windows":
                assert sum(b - a for a, b in ranges) == sum(
                    (batch.attention_mask.sum(1) if batch.attention_mask is not None else np.full(len(at), 17)) - 2
                )
    next(loader)
    assert asked


# ------------------------------------------------------------------------------------------------------------- index


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def seal(cache):
    """Writes the digests of changed arrays into the records of their indexes."""
    for path in cache.glob("*.json"):
        record = read_record(path)
        record["sha256"] = {array: digest(array_path(cache, path.stem, array))[0] for array in record["sha256"]}
        write_record(path, record)


@pytest.mark.parametrize("how", DERIVED)
def test_an_index_is_made_once_and_again_when_it_is_gone(dataset, cache, how, monkeypatch, limit):
    first = Loader(dataset, length=16, samples=how).read(np.arange(9))
    files = names(cache)
    contents = {name: (cache / name).read_bytes() for name in files}
    assert len(files) == {"documents": 2, "packed": 3, "pairs": 3}[how]
    with monkeypatch.context() as patched:
        for name in ("ArrayWriter", "digest"):  # an index is neither made again nor hashed
            patched.setattr(index, name, None)
        again = Loader(dataset, length=16, samples=how)
        assert np.array_equal(again.read(np.arange(9)).input_ids, first.input_ids)
    limit(documents_at_once=3)  # which changes no byte of an index
    for name in files:
        flipped = contents[name][:140] + bytes([contents[name][140] ^ 1]) + contents[name][141:]
        for damage in (b"", contents[name][:-9], flipped):
            (cache / name).write_bytes(damage)
            again = Loader(dataset, length=16, samples=how)
            assert np.array_equal(again.read(np.arange(9)).input_ids, first.input_ids)
            assert {name: (cache / name).read_bytes() for name in names(cache)} == contents
        (cache / name).unlink()
        Loader(dataset, length=16, samples=how)
        assert names(cache) == files
    assert not any(path.name.startswith(files[0][:32]) for path in dataset.path.iterdir())


@pytest.mark.parametrize("how", DERIVED)
def test_a_damaged_copy_makes_no_index_for_the_sound_dataset(dataset, tmp_path, cache, how):
    """The index has the dataset_id in its name, and both have it."""
    array = "sentences" if how == "pairs" else "documents"
    shutil.copytree(dataset.path, tmp_path / "copy")
    path = tmp_path / "copy" / f"train-00000.{array}.npy"
    offsets = np.load(path)
    offsets[3] -= 1
    path.write_bytes(path.read_bytes()[:128] + offsets.tobytes())
    with refuses("damaged"):
        Loader(bertdata.open(tmp_path / "copy"), length=16, samples=how)
    assert names(cache) == []
    assert Loader(dataset, length=16, samples=how).num_samples > 0


def test_other_settings_have_another_index(dataset, cache):
    changes = [{}, {"length": 17}, {"split": "validation"}, {"samples": "documents"}, {"samples": "pairs"}]
    changes += [{"samples": "pairs", **more} for more in ({"seed": 1}, {"short_seq_prob": 0.2})]
    for number, change in enumerate(changes, 1):
        Loader(dataset, **{"length": 16, "samples": "packed"} | change)
        assert sum(name.endswith(".json") for name in names(cache)) == number


def test_an_index_of_values_that_point_nowhere_is_refused(dataset, cache):
    for how in DERIVED:
        Loader(dataset, length=16, samples=how)
    total = dataset.splits["train"].num_tokens
    for path in cache.glob("*.npy"):
        good = path.read_bytes()
        values = [2**64 - 1, 2**63, 2**40, 0, 2**40 | 3]  # the last: three tokens that are behind the end
        values += [(total - 1) << 16 | 2] * path.name.endswith(".pieces.npy")  # the second of two is
        for value in values:
            numbers = np.full((len(good) - 128) // 8, value, np.uint64)
            path.write_bytes(good[:128] + numbers.tobytes())
            seal(cache)
            kinds = set()
            for how in DERIVED:
                try:
                    Loader(dataset, length=16, samples=how).read(np.arange(50))
                except DatasetError as error:
                    kinds.add(error.kind)
            assert kinds == {"damaged"}, (path.name, value)
        path.write_bytes(good)
        seal(cache)


def test_a_row_of_more_pieces_than_the_index_states_is_refused(dataset, cache):
    """The room for spans comes from the record of the index, and its arrays may be damaged."""
    room = Loader(dataset, length=1000, samples="packed").sources[0].spans_per_row
    for path in cache.glob("*.npy"):
        content = path.read_bytes()
        numbers = np.frombuffer(content[128:], np.uint64).copy()
        if path.name.endswith(".pieces.npy"):
            numbers = numbers >> np.uint64(16) << np.uint64(16) | np.uint64(1)  # one token each
        else:
            numbers[1] = room + 1  # sample 0 is the first so many pieces
        path.write_bytes(content[:128] + numbers.tobytes())
    seal(cache)
    samples, zero = Loader(dataset, length=1000, samples="packed").sources[0], np.zeros(1, np.int64)
    assert 3 * (room + 1) < 1000
    with refuses("damaged"):
        rows_of([(samples, Wanted(zero, zero, zero))])


def test_a_cache_that_cannot_be_written_is_named(dataset, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BERTDATA_CACHE", str(tmp_path / "file" / "cache"))
    with refuses("unwritable", error=BuildError) as refused:
        Loader(dataset, length=16, samples="packed")
    assert "file/cache" in str(refused.value.given)


def test_processes_that_make_an_index_together_end_in_one(dataset, cache):
    def read(answers):
        batch = Loader(dataset, length=16, samples="packed").read(np.arange(40))
        answers.put(batch.input_ids.tobytes())

    answers = FORKS.SimpleQueue()
    running = [FORKS.Process(target=read, args=(answers,), daemon=True) for _ in range(3)]
    for process in running:
        process.start()
    assert len({answers.get() for _ in running}) == 1
    for process in running:
        process.join()
    assert len(names(cache)) == 3


def test_where_the_cache_is(monkeypatch):
    for name in ("BERTDATA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = {
        "HOME": ("/h", "/h/.cache/bertdata"),
        "XDG_CACHE_HOME": ("/x", "/x/bertdata"),
        "BERTDATA_CACHE": ("/y", "/y"),
    }
    for name, (value, expected) in places.items():
        monkeypatch.setenv(name, value)
        assert str(files.cache_directory()) == expected


def test_a_user_without_a_home_gets_a_sentence_and_may_use_a_store(monkeypatch):
    for name in ("BERTDATA_CACHE", "XDG_CACHE_HOME", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with refuses("missing"):
        files.cache_directory()
    stores.s3_config()


# ------------------------------------------------------------------------------------------------------------- usage


def test_pairs_need_sentences_and_two_documents(tmp_path):
    without = bertdata.open(write_dataset(tmp_path / "a", [([7, 3, 8, 3], [2, 4], None)]))
    with refuses("not-stored", "samples"):
        Loader(without, length=8, samples="pairs")
    alone = bertdata.open(write_dataset(tmp_path / "b", [([7, 8, 3], [3], [1, 3])]))
    with refuses("empty", "split"):
        Loader(alone, length=8, samples="pairs")
    two = bertdata.open(write_dataset(tmp_path / "c", [([7, 3, 8, 3], [2, 4], [2, 4])]))
    assert Loader(two, length=8, samples="pairs").num_samples == 2


def test_pieces_share_rows_only_within_2_to_the_19_tokens(tmp_path):
    """15 tokens are left of the first document, and the other begins an area."""
    tokens = [9] * (2**19 - 1) + [3, 9, 3]
    dataset = bertdata.open(write_dataset(tmp_path / "shards", [(tokens, [2**19, 2**19 + 2], None)]))
    assert Loader(dataset, length=2**16, samples="packed", masking=None).num_samples == 10


def test_a_block_has_2_to_the_19_tokens(tmp_path):
    total = 5 << 18
    dataset = bertdata.open(write_dataset(tmp_path / "shards", [(np.full(total, 9), [total], None)]))
    for seed in range(8):
        loader = Loader(dataset, length=(1 << 18) + 2, shuffle="blocks", masking=None, seed=seed)
        expected = [keys.permute_blocks(x, num_samples=5, block=2, seed=seed, epoch=0) for x in range(5)]
        assert loader.read(np.arange(5)).sample_ids.tolist() == expected


def test_damage_in_the_dataset_is_found_while_an_index_is_made(tmp_path, cache):
    damaged = bertdata.open(write_dataset(tmp_path / "a", [([7, 3, 8, 3, 9, 3], [4, 2, 6], [4, 2, 6])]))
    for how in DERIVED:
        with refuses("damaged"):
            Loader(damaged, length=8, samples=how)
    assert names(cache) == []
    empty = bertdata.open(write_dataset(tmp_path / "b", [([3, 3], [1, 2], None)]))
    for how in ("documents", "packed"):
        with refuses("damaged", given=empty.path):
            Loader(empty, length=8, samples=how)


GPT_2 = {"decoder": {"type": "ByteLevel"}}
CHINESE = {letters: n for n, letters in enumerate(["Ġb", "a", "ä½ł", "ä½", "ł", "ï¼Į", "Ġä½ł", "à¸ģ", "á", "ê°Ģ"])}
"""In bytes: b after a space, a, 你, two bytes of it, the third one, a comma, 你 after a space, ก, a first byte, 가."""


@pytest.mark.parametrize(
    ("model", "rule_1", "rule_2"),
    [
        ({"vocab": {"a": 0, "Ġb": 1, "Ċ": 2, "c": 3, "ĉĉ": 4, "aĠ": 5}}, [0, 3, 5], [0, 3, 5]),
        ({"vocab": [["a", 0.0], ["▁b", -1.0], ["c", -2.0]]}, [0, 2], [0, 2]),
        ({"vocab": {"a": 0, "b": 1}}, [], []),
        ({"vocab": {"a": 0, "@@a": 1, "a@@": 2, "@@カ": 4}, "continuing_subword_prefix": "@@"}, [1, 4], [1]),
        ({"vocab": {"Ġ": 0, "Ċ": 1, "A": 2, "C": 3}}, [2, 3], []),  # bytes: the marks are alone
        ({"vocab": {"a": 0, "a</w>": 1, "Ġb": 2, "b</w>": 3}, "end_of_word_suffix": "</w>"}, [0, 1, 3], []),
        ({"vocab": CHINESE}, [1, 2, 3, 4, 5, 7, 8, 9], [1, 4, 8, 9]),
        (
            {"vocab": {"▁a": 0, "b": 1, "水b": 2, "ー": 3, "<0xE4>": 4, "<0xBD>": 5, "가": 6}},
            [1, 2, 3, 4, 5, 6],
            [1, 5, 6],
        ),
    ],
)
def test_marks_of_words(tmp_path, model, rule_1, rule_2):
    spelled = json.dumps({"model": model} | (GPT_2 if model["vocab"] == CHINESE else {}))
    dataset = bertdata.open(write_dataset(tmp_path / "shards", [([7, 3], [2], None)], tokenizer=spelled))
    for rule, expected in ((1, rule_1), (2, rule_2)):
        found = tables(dataset, Masking(policy="span", rule=rule))
        assert np.flatnonzero(found["continuing_ids"]).tolist() == expected


def test_random_ids_are_those_of_tokens(tmp_path):
    """Neither special ones, nor unknown, nor unused, nor ids that no token has."""
    vocabulary = {"[unused1]": 5, "<unused2>": 6, "unused3": 7, "a": 11, "b": 12, "[UNK]": 1}
    added = [{"content": "<new>", "id": 14}, {"content": "[unused9]", "id": 15}]
    spelled = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added})
    dataset = bertdata.open(write_dataset(tmp_path / "shards", [([11] * 900, [900], None)], tokenizer=spelled))
    drawn = {}
    for random_from in ("tokens", "ordinary"):
        masking = Masking(probability=1.0, mask_fraction=0.0, random_fraction=1.0, random_from=random_from)
        batch = next(Loader(dataset, masking=masking))
        drawn[random_from] = {*batch.input_ids[batch.labels >= 0].tolist()}
    assert drawn["tokens"] == {7, 11, 12, 14}
    assert drawn["ordinary"] == {*range(5, dataset.special_tokens.vocab_size)}


VOCABULARIES = ["5", "[5]", '{"a":300}', '{"a":"0"}']


@pytest.mark.parametrize("tokenizer", ["{}", "[]", "", *(f'{{"model": {{"vocab": {each}}}}}' for each in VOCABULARIES)])
def test_a_tokenizer_that_tells_no_words_is_named(tmp_path, tokenizer):
    dataset = bertdata.open(write_dataset(tmp_path / "shards", [([7, 3], [2], None)], tokenizer=tokenizer))
    with refuses("damaged"):
        Loader(dataset, length=8, masking=Masking(policy="whole_word"))


# ------------------------------------------------------------------------------------------------------------- words


@pytest.fixture(scope="module")
def chinese(tmp_path_factory):
    """Documents of a few characters of which each is a token, in words of two characters, over several shards."""
    directory = tmp_path_factory.mktemp("chinese")
    characters = [chr(0x4E00 + n) for n in range(200)]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab", "##c", "a", "b", *characters]
    (directory / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    random = np.random.default_rng(4)
    texts = ["".join(random.choice([*characters, "abc", " "], random.integers(1, 60))) for _ in range(150)]
    (directory / "corpus.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    options = {"tokenizer": str(directory / "vocab.txt"), "words": "support.data:in_pairs", "shard_size": 3000}
    with limits(block_bytes=400):  # blocks end inside a byte of the array of words
        build([directory / "corpus.txt"], directory / "shards", validation=0.1, **options)
    return bertdata.open(directory / "shards"), [" ".join(text.split("\n")) for text in texts if text.strip()]


def begins(dataset, split="train"):
    """Of each token of a split, whether it begins a word."""
    bits_of_tokens = []
    for number, shard in enumerate(dataset.splits[split]):
        bits = np.unpackbits(dataset.array(shard.name, "words"), bitorder="little")
        bits_of_tokens += bits[: dataset.tokens(split, number).size].tolist()
        assert not bits[dataset.tokens(split, number).size :].any()
    return bits_of_tokens


def test_where_words_begin_is_stored(chinese):
    dataset, texts = chinese
    library = tokenizers.Tokenizer.from_file(str(dataset.path / "tokenizer.json"))
    expected = {}
    for text in texts:
        encoding = library.encode(text, add_special_tokens=False)
        word = [start // 2 for start, _ in encoding.offsets]
        expected[tuple(encoding.ids)] = [1] + [int(a != b) for a, b in zip(word, word[1:], strict=False)] + [1]
    assert len(dataset.splits["train"]) > 2
    for split in dataset.splits:
        bits, at = begins(dataset, split), 0
        for number, shard in enumerate(dataset.splits[split]):
            ends = dataset.array(shard.name, "documents").tolist()
            for start, stop in zip(ends, ends[1:], strict=False):
                ids = dataset.tokens(split, number)[start : stop - 1].tolist()
                assert bits[at : at + len(ids) + 1] == expected[tuple(ids)]
                at += len(ids) + 1
    assert verify(dataset.path) == []
    assert dataset.manifest.settings["words"] == "support.data:in_pairs"


@pytest.mark.parametrize(("how", "policy"), [("windows", "span"), ("documents", "whole_word"), ("packed", "span")])
def test_stored_words_are_masked_whole(chinese, how, policy):
    """Rows are masked as the reference implementation does it, given which places continue a word."""
    dataset, _ = chinese
    options, masking = {"length": 19, "samples": how, "seed": 8}, Masking(policy=policy, probability=0.3)
    plain, masked = Loader(dataset, **options, masking=None), Loader(dataset, **options, masking=masking)
    positions = np.arange(plain.num_samples // 2)
    unmasked, batch, bits = plain.read(positions), masked.read(positions), begins(dataset)
    inside, at = [[] for _ in positions], np.ones(positions.size, int)
    for b, start, size in plain.spans(positions).tolist():
        inside[b] += [at[b] + t for t in range(size) if not bits[start + t]]
        at[b] += size + 2 * (how != "windows")
    for b, row in enumerate(unmasked.input_ids.tolist()):
        row = row[: row.index(0)] if 0 in row else row
        named = {"length": 19, "seed": 8, "variant": 0, "sample_id": int(unmasked.sample_ids[b]), "p": 0.3, "rule": 2}
        named |= of_vocabulary(dataset.special_tokens)
        changed, chosen, _ = keys.mask(row, **named, policy=policy, inside=inside[b])
        assert batch.input_ids[b, : len(row)].tolist() == changed
        assert batch.masked_positions[b, : len(chosen)].tolist() == chosen
    assert sum(map(len, inside)) > 250
