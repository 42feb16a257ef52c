"""documents, packed and pairs: every row is that of the reference implementation, and the index is only a cache."""

import json
import os
import shutil
from pkgutil import resolve_name

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import keys, rows
from support.commands import refuses
from support.data import SPECIAL, SPECIALS, built, faults_of, stored, write_dataset
from support.disk import contents, write
from support.limits import CONSTANTS, limits
from support.runs import FORKS

import bertdata
from bertdata import IGNORE_INDEX, BertdataError, Loader, Masking, SpecialTokens, files
from bertdata.format.arrays import array_path, digest
from bertdata.format.records import read_record, write_record
from bertdata.read import order
from bertdata.read.kernels import pieces as piece_kernels
from bertdata.read.words import tables
from bertdata.remote import stores

DERIVED = ["documents", "packed", "pairs"]
KINDS = ["tiny shards", "no separators", "uint32"]


def made_of_sentences(kind, folder):
    """A dataset of small shards, and its documents: lists of sentences, which are lists of ids."""
    random, shards, documents = np.random.default_rng(0), [], []
    for _ in range(7):
        tokens, ends, sentences = [], [], []
        for _ in range(random.integers(1, 9)):
            sizes = random.integers(1, 30, random.geometric(0.3))
            documents.append([random.integers(5, 300, size).tolist() for size in sizes])
            for sentence in documents[-1]:
                tokens += sentence
                sentences.append(len(tokens))
            tokens += [] if kind == "no separators" else [3]
            sentences[-1] = len(tokens)
            ends.append(len(tokens))
        shards.append((tokens, ends, sentences))
    more = {"dtype": "<u4" if kind == "uint32" else "<u2"}
    if kind == "no separators":
        more |= {"special": SpecialTokens(**vars(SPECIAL) | {"separator": None}), "settings": {"imported": "parquet"}}
    return bertdata.open(write_dataset(folder / "shards", shards, **more)), documents


def rows_by_reference(how, data, documents, *, together, short_seq_prob, epoch, **options):
    """The rows of an epoch, by their samples: name of an array → its values. options: length and seed."""
    length, separators = options["length"], int(data.special_tokens.separator is not None)

    def row(ids, filled, **more):
        named = {"input_ids": ids, "attention_mask": [1] * filled} | more
        return {name: values + [0] * (length - len(values)) for name, values in named.items()}

    if how == "windows":
        texts = keys.windows(sum(stored(data), []), text_length=length - 2, seed=options["seed"], variant=epoch)
        return [row([2, *text, 3], len(text) + 2) for text in texts]
    found = []
    if how == "pairs":
        for number, pair in enumerate(rows.segment(documents, short_seq_prob=short_seq_prob, **options)):
            a, b, is_random = rows.pair_row(pair, documents, sample_id=number, epoch=epoch, **options)
            types = [0] * (len(a) + 2) + [1] * (len(b) + 1)
            found.append(row([2, *a, 3, *b, 3], len(types), token_type_ids=types) | {"next_sentence_label": is_random})
        return found
    texts = [[token for sentence in document for token in sentence] for document in documents]
    packed = [[text[at : at + length - 2]] for text in texts for at in range(0, len(text), length - 2)]
    if how == "packed":
        packed = rows.packed(texts, length=length, together=together, separators=separators)
    for pieces in packed:
        ids, positions = rows.packed_row(pieces, length=length, cls=2, sep=3, pad=0)
        more = {"position_ids": positions} if how == "packed" else {}
        found.append(row(ids, sum(len(piece) + 2 for piece in pieces), **more))
    return found


@pytest.mark.parametrize("how", ["windows", *DERIVED])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [5, 6, 16, 64, 700, 5000])
def test_rows_equal_their_reference(tmp_path, limit, how, kind, length):
    limit(most_listed=1 if kind == "uint32" else 9)  # so shards are in a table, and are opened when they are used
    data, documents = made_of_sentences(kind, tmp_path)
    number, options = KINDS.index(kind) + length, {"length": length - 2 * (how != "pairs"), "seed": 2**64 - 3}
    together, share = [1 << 19, 50, 1][number % 3], [0.0, 0.1, 1.0][number % 3]
    limit(packed_together=together)
    loader = Loader(data, samples=how, masking=None, short_seq_prob=share, **options)
    n, by_epoch = loader.num_samples, {}
    positions = [*range(n), n + n // 2, 5 * n - 1, 2**40, 1]
    batch = loader.read(np.array(positions))
    arrays = {"attention_mask": np.ones_like(batch.input_ids)} | batch.arrays()
    for b, position in enumerate(positions):
        epoch, sample_id = keys.sample(position, num_samples=n, seed=options["seed"])
        if epoch not in by_epoch:
            named = {"together": together, "short_seq_prob": share, "epoch": epoch}
            by_epoch[epoch] = rows_by_reference(how, data, documents, **named, **options)
            assert len(by_epoch[epoch]) == n
        expected = by_epoch[epoch][sample_id] | {"sample_ids": sample_id, "masked_positions": [], "targets": []}
        assert {name: array[b].tolist() for name, array in arrays.items()} == expected
    assert (batch.attention_mask is None) == arrays["attention_mask"].all()
    mask, facts = arrays["attention_mask"][:n], loader.facts
    assert facts["pad_share"] == pytest.approx(1 - mask.sum() / mask.size)
    if how == "pairs":
        pairs, options["length"] = rows.segment(documents, short_seq_prob=share, **options), 10**6
        uncut = [rows.pair_row(pair, documents, sample_id=s, epoch=0, **options) for s, pair in enumerate(pairs)]
        text = sum(len(a) + len(b) for a, b, _ in uncut)
        assert facts["crop_share"] == pytest.approx((text - (mask.sum() - 3 * n)) / text)
        assert facts["random_share"] == pytest.approx(sum(is_random for *_, is_random in uncut) / n)


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


@pytest.mark.parametrize("how", ["windows", *DERIVED])
def test_what_is_read_ahead_is_what_is_read(dataset, monkeypatch, limit, how):
    """In blocks: the ranges of a block hold every token of its rows, but for segments from elsewhere."""
    limit(block_tokens=30)
    asked, groups = [], {}
    monkeypatch.setattr("bertdata.read.stream.Samples._request", lambda self, ranges: asked.append(ranges))
    loader = Loader(dataset, length=17, samples=how, shuffle="blocks", masking=None, global_batch_size=8)
    n, block = loader.num_samples, 2
    for position in range(2 * n):
        groups.setdefault(order.group_of(position, num_samples=n, block=block), []).append(position)
    assert len(groups) >= 4
    for (epoch, group), positions in groups.items():
        ids = loader.read(np.array(positions)).sample_ids
        blocks = order.blocks_of(epoch, group, num_samples=n, seed=0, block=block)
        assert sorted(ids.tolist()) == sorted(s for first, stop in blocks for s in range(first, stop))
        for first, stop in blocks:
            at = np.array(positions)[(first <= ids) & (ids < stop)]
            ranges, spans = loader.sources[0].ranges(epoch, first, stop), loader.spans(at).tolist()
            labels = loader.read(at).next_sentence_label
            for row, start, size in spans:
                is_inside = any(a <= start and start + size <= b for a, b in ranges)
                assert is_inside or labels[row]
            assert how != "windows" or sum(b - a for a, b in ranges) == sum(size for *_, size in spans)
    next(loader)
    assert asked


# ------------------------------------------------------------------------------------------------------------- index


def seal(cache):
    """Writes the digests of changed arrays into the records of their indexes."""
    for path in cache.glob("*.json"):
        record = read_record(path)
        record["sha256"] = {array: digest(array_path(cache, path.stem, array))[0] for array in record["sha256"]}
        write_record(path, record)


@pytest.mark.parametrize("how", DERIVED)
def test_an_index_is_made_once_and_again_when_it_is_gone(dataset, cache, how, limit):
    def ids():
        return Loader(dataset, length=16, samples=how).read(np.arange(9)).input_ids.tolist()

    first, made = ids(), contents(cache)
    assert len(made) == {"documents": 2, "packed": 3, "pairs": 3}[how]
    limit(documents_at_once=3)  # which changes no byte of an index
    for name, content in made.items():
        flipped = content[:140] + bytes([content[140] ^ 1]) + content[141:]
        for damage in (None, b"", content[:-9], flipped):
            (cache / name).unlink()
            if damage is not None:
                (cache / name).write_bytes(damage)
            assert ids() == first
            assert contents(cache) == made
    (record,) = cache.glob("*.json")  # newer than its arrays, so they are neither hashed nor made again
    write_record(record, read_record(record) | {"sha256": dict.fromkeys(read_record(record)["sha256"], "0" * 64)})
    made = contents(cache)
    assert ids() == first
    assert contents(cache) == made


def test_a_damaged_dataset_makes_no_index(dataset, tmp_path, cache):
    """An index has the dataset_id in its name, which a damaged copy shares with the sound dataset."""
    falling = write_dataset(tmp_path / "falling", [([7, 3, 8, 3, 9, 3], [4, 2, 6], [4, 2, 6])])
    without_ids = write_dataset(tmp_path / "without ids", [([3, 3], [1, 2], None)])
    for how in DERIVED:
        copy = shutil.copytree(dataset.path, tmp_path / how)
        path = copy / f"train-00000.{'sentences' if how == 'pairs' else 'documents'}.npy"
        offsets = np.load(path)
        offsets[3] -= 1
        path.write_bytes(path.read_bytes()[:128] + offsets.tobytes())
        for damaged in (copy, falling):
            with refuses("damaged"):
                Loader(bertdata.open(damaged), length=16, samples=how)
    assert contents(cache) == {}
    for how in ("documents", "packed"):
        with refuses("damaged", given=without_ids):
            Loader(bertdata.open(without_ids), length=8, samples=how)


def test_other_settings_have_another_index(dataset, cache):
    changes = [{}, {"length": 17}, {"split": "validation"}, {"samples": "documents"}, {"samples": "pairs"}]
    changes += [{"samples": "pairs", **more} for more in ({"seed": 1}, {"short_seq_prob": 0.2})]
    for number, change in enumerate(changes, 1):
        Loader(dataset, **{"length": 16, "samples": "packed"} | change)
        assert len([*cache.glob("*.json")]) == number


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
                except BertdataError as error:
                    kinds.add(error.kind)
            assert kinds == {"damaged"}, (path.name, value)
        path.write_bytes(good)
        seal(cache)


def test_a_row_of_more_pieces_than_the_index_states_is_refused(dataset, cache):
    """The room for spans comes from the record of the index, and its arrays may be damaged."""
    options = {"length": 1000, "samples": "packed", "masking": None}
    loader = Loader(dataset, **options)
    room, position = loader.sources[0].spans_per_row, loader.read(np.arange(loader.num_samples)).sample_ids.argmin()
    for path in cache.glob("*.npy"):
        content = path.read_bytes()
        numbers = np.frombuffer(content[128:], np.uint64).copy()
        if path.name.endswith(".pieces.npy"):
            numbers = numbers >> np.uint64(16) << np.uint64(16) | np.uint64(1)  # one token each
        else:
            numbers[1] = room + 1  # sample 0 is the first so many pieces
        path.write_bytes(content[:128] + numbers.tobytes())
    seal(cache)
    assert 3 * (room + 1) < 1000
    with refuses("damaged"):
        Loader(dataset, **options).read(np.array([position]))


def test_a_cache_that_cannot_be_written_is_named(dataset, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BERTDATA_CACHE", str(tmp_path / "file" / "cache"))
    with refuses("unwritable", given=tmp_path / "file" / "cache"):
        Loader(dataset, length=16, samples="packed")


def read_packed(path):
    return Loader(bertdata.open(path), length=16, samples="packed").read(np.arange(40)).input_ids.tobytes()


def test_processes_that_make_an_index_together_end_in_one(dataset, cache):
    with FORKS.Pool(3) as pool:
        assert len({*pool.map(read_packed, [dataset.path] * 3, chunksize=1)}) == 1
    assert len(contents(cache)) == 3


def test_where_the_cache_is(monkeypatch):
    """A user without a home gets a sentence, and may use a store."""
    for name in ("BERTDATA_CACHE", "XDG_CACHE_HOME", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "expanduser", lambda path: path)
        with refuses("missing"):
            files.cache_directory()
        stores.s3_config()
    for name, value, expected in (
        ("HOME", "/h", "/h/.cache/bertdata"),
        ("XDG_CACHE_HOME", "/x", "/x/bertdata"),
        ("BERTDATA_CACHE", "/y", "/y"),
    ):
        monkeypatch.setenv(name, value)
        assert str(files.cache_directory()) == expected


# ------------------------------------------------------------------------------------------------------------- usage


def test_blocks_and_areas_of_packed_rows_have_2_to_the_19_tokens():
    assert [resolve_name(CONSTANTS[name]) for name in ("block_tokens", "packed_together")] == [2**19, 2**19]


GPT_2 = {"decoder": {"type": "ByteLevel"}}
SPACED = {"▁a": 0, "b": 1, "水b": 2, "ー": 3, "<0xE4>": 4, "<0xBD>": 5, "가": 6}
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
        ({"vocab": SPACED}, [1, 2, 3, 4, 5, 6], [1, 5, 6]),
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
    directory, random = tmp_path_factory.mktemp("chinese"), np.random.default_rng(4)
    characters = [chr(0x4E00 + n) for n in range(200)]
    vocab = write(directory / "vocab.txt", *SPECIALS, "ab", "##c", "a", "b", *characters)
    texts = ["".join(random.choice([*characters, "abc", " "], random.integers(1, 60))) for _ in range(150)]
    options = {"tokenizer": str(vocab), "words": "support.data:in_pairs", "shard_size": 3000, "validation": 0.1}
    with limits(block_bytes=400, most_listed=1):  # blocks end inside a byte of the array of words
        dataset = built(directory, "\n\n".join(texts) + "\n", **options)
    return dataset, [" ".join(text.split("\n")) for text in texts if text.strip()]


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
    assert faults_of(dataset.path) == []
    assert dataset.manifest.settings["words"] == "support.data:in_pairs"


@pytest.mark.parametrize(
    ("stores_words", "how", "masking"),
    [
        *((False, how, Masking()) for how in ("windows", *DERIVED)),
        (False, "windows", Masking(policy="bernoulli", probability=0.3)),
        *((True, how, Masking(policy="span", probability=0.3)) for how in ("windows", "packed")),
        (True, "documents", Masking(policy="whole_word", probability=0.3)),
    ],
)
def test_masks_are_those_of_the_row(dataset, chinese, stores_words, how, masking):
    """As the reference implementation masks it, given which tokens continue a word."""
    data, options = chinese[0] if stores_words else dataset, {"length": 19, "samples": how, "seed": 8}
    common = {"length": 19, "seed": 8, "p": masking.probability, "policy": masking.policy, "rule": 2}
    common |= {"special": {0, 1, 2, 3, 4}, "mask_id": 4, "vocab_size": data.special_tokens.vocab_size}
    plain, masked = Loader(data, **options, masking=None), Loader(data, **options, masking=masking)
    positions = np.arange(0, 2 * plain.num_samples, 4)
    unmasked, batch, inside = plain.read(positions), masked.read(positions), [[] for _ in positions]
    if stores_words:
        bits, at = begins(data), np.ones(positions.size, int)
        for b, start, size in plain.spans(positions).tolist():
            inside[b] += [at[b] + t for t in range(size) if not bits[start + t]]
            at[b] += size + 2 * (how != "windows")
        assert sum(map(len, inside)) > 250
    for b, row in enumerate(unmasked.input_ids.tolist()):
        row = row[: row.index(0)] if 0 in row else row
        named = {"variant": b * 4 // plain.num_samples, "sample_id": int(unmasked.sample_ids[b]), "inside": inside[b]}
        changed, places, targets = keys.mask(row, **named, **common)
        unused = batch.targets.shape[1] - len(places)
        assert batch.input_ids[b, : len(row)].tolist() == changed
        assert batch.masked_positions[b].tolist() == places + [0] * unused
        assert batch.targets[b].tolist() == targets + [IGNORE_INDEX] * unused
        labels = dict(zip(places, targets, strict=True))
        assert batch.labels[b].tolist() == [labels.get(place, IGNORE_INDEX) for place in range(19)]
