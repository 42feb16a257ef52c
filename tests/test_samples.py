"""Every row and its mask are those of the reference implementation, and the index is only a cache."""

import json
import os
import shutil
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import keys, rows
from support.commands import refuses
from support.data import SPECIAL, SPECIALS, built, faults_of, write_dataset
from support.disk import contents, flip, put, reseal, sha256, unsealed, write
from support.families import fast
from support.limits import limits
from support.runs import FORKS

import bertdata
from bertdata import IGNORE_INDEX, Loader, Masking, SpecialTokens
from bertdata.read import order
from bertdata.read.kernels import pieces as piece_kernels
from bertdata.read.words import tables

DERIVED = ["documents", "packed", "pairs"]
KINDS = ["tiny shards", "no separators", "uint32", "words"]
CLS, SEP = (2, 1), (3, 1)  # a token, and whether it is stored as one that begins a word
CONTINUING = {number for number in range(300) if number % 3}
VOCABULARY = {f"##{number}" if number in CONTINUING else str(number): number for number in range(300)}
MASKINGS = [None, Masking(), *(Masking(policy=name, probability=0.3) for name in ("bernoulli", "span", "whole_word"))]


def made_of_sentences(kind, folder):
    """A dataset of small shards, and its documents: lists of sentences, which are lists of tokens like CLS."""
    random, shards, documents = np.random.default_rng(0), [], []
    for _ in range(7):
        tokens, ends, sentences = [], [], []
        for _ in range(random.integers(1, 9)):
            sizes = random.integers(1, 30, random.geometric(0.3))
            documents.append([random.integers([5, 0], [300, 2], (size, 2)).tolist() for size in sizes])
            for sentence in documents[-1]:
                tokens += sentence
                sentences.append(len(tokens))
            tokens += [] if kind == "no separators" else [SEP]
            sentences[-1] = len(tokens)
            ends.append(len(tokens))
        ids, begins = np.array(tokens).T
        shards.append((ids, ends, sentences, *[begins == 1] * (kind == "words")))
    more = {"dtype": "<u4" if kind == "uint32" else "<u2"}
    more["tokenizer"] = json.dumps({"model": {"vocab": VOCABULARY, "continuing_subword_prefix": "##"}})
    if kind == "no separators":
        more |= {"special": SpecialTokens(**vars(SPECIAL) | {"separator": None}), "settings": {"imported": "parquet"}}
    return bertdata.open(write_dataset(folder / "shards", shards, **more)), documents


def rows_by_reference(how, documents, *, separators, together, short_seq_prob, epoch, **options):
    """Of each row of an epoch, by its sample: the tokens, and the arrays that only this kind has. options: of rows."""
    length, texts = options["length"], [sum(document, []) for document in documents]
    if how == "windows":
        stream = [token for text in texts for token in text + [SEP] * separators]
        windows = keys.windows(stream, text_length=length - 2, seed=options["seed"], variant=epoch)
        return [([CLS, *text, SEP], {}) for text in windows]
    found = []
    if how == "pairs":
        for number, pair in enumerate(rows.segment(documents, short_seq_prob=short_seq_prob, **options)):
            a, b, is_random = rows.pair_row(pair, documents, sample_id=number, epoch=epoch, **options)
            types = [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (length - 3 - len(a) - len(b))
            found.append(([CLS, *a, SEP, *b, SEP], {"token_type_ids": types, "next_sentence_label": is_random}))
        return found
    packed = [[text[at : at + length - 2]] for text in texts for at in range(0, len(text), length - 2)]
    if how == "packed":
        packed = rows.packed(texts, length=length, together=together, separators=separators)
    for pieces in packed:
        tokens, positions = rows.packed_row(pieces, length=length, cls=CLS, sep=SEP)
        found.append((tokens, {"position_ids": positions} if how == "packed" else {}))
    return found


@pytest.mark.parametrize("how", ["windows", *DERIVED])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", fast([5, 6, 16, 64, 700, 5000], among=[5, 16, 700]))
def test_rows_and_masks_equal_their_reference(tmp_path, limit, how, kind, length):
    limit(most_listed=1 if kind == "uint32" else 9)  # so shards are in a table, and are opened when they are used
    data, documents = made_of_sentences(kind, tmp_path)
    number, length = KINDS.index(kind) + length, length - 2 * (how != "pairs")
    together, share, masking = [1 << 19, 50, 1][number % 3], [0.0, 0.1, 1.0][number % 3], MASKINGS[number % 5]
    limit(packed_together=together)
    options = {"length": length, "seed": 2**64 - 3}
    loader = Loader(data, samples=how, masking=masking, short_seq_prob=share, **options)
    masks = options | {"special": {0, 1, 2, 3, 4}, "mask_id": 4, "vocab_size": 300, "continues": CONTINUING, "rule": 2}
    masks |= {"p": masking.probability, "policy": masking.policy} if masking else {"p": 0}
    n, by_epoch = loader.num_samples, {}
    positions = [*range(n), n + n // 2, 5 * n - 1, 2**40, 1]
    batch = loader.read(np.array(positions))
    arrays = {"attention_mask": np.ones_like(batch.input_ids), "labels": batch.labels} | batch.arrays()
    for b, position in enumerate(positions):
        epoch, sample_id = keys.sample(position, num_samples=n, seed=options["seed"])
        if epoch not in by_epoch:
            named = {"separators": int(kind != "no separators"), "together": together, "short_seq_prob": share}
            by_epoch[epoch] = rows_by_reference(how, documents, epoch=epoch, **named, **options)
            assert len(by_epoch[epoch]) == n
        tokens, expected = by_epoch[epoch][sample_id]
        ids, stored = [token for token, _ in tokens], {}
        if kind == "words":
            stored["inside"] = [t for t, (_, begins) in enumerate(tokens) if not begins]
            stored["begins"] = [t for t, (_, begins) in enumerate(tokens) if begins]
        row, places, targets = keys.mask(ids, variant=epoch, sample_id=sample_id, **stored, **masks)
        labels, unused = dict(zip(places, targets, strict=True)), loader.num_slots - len(places)
        rest = [0] * (length - len(row))
        assert {name: array[b].tolist() for name, array in arrays.items()} == expected | {
            "input_ids": row + rest,
            "attention_mask": [1] * len(row) + rest,
            "sample_ids": sample_id,
            "masked_positions": places + [0] * unused,
            "targets": targets + [IGNORE_INDEX] * unused,
            "labels": [labels.get(t, IGNORE_INDEX) for t in range(length)],
        }
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
    capacity, row_of = max(sizes, default=3) + more, np.empty(len(sizes), np.int64)
    order_of = np.argsort(-np.array(sizes, np.int64), kind="stable")
    count = piece_kernels.pack(np.array(sizes, np.int64), order_of, capacity, row_of)
    expected = rows.best_fit(sizes, capacity)
    assert [sorted(row) for row in expected] == [np.flatnonzero(row_of == row).tolist() for row in range(count)]


@pytest.mark.parametrize("how", ["windows", *DERIVED])
def test_what_is_read_ahead_is_what_is_read(dataset, limit, how):
    """In blocks: the ranges of a block hold every token of its rows, but for segments from elsewhere."""
    limit(block_tokens=30)
    loader = Loader(dataset, length=17, samples=how, shuffle="blocks", masking=None)
    n, block, groups = loader.num_samples, 2, {}
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


# ------------------------------------------------------------------------------------------------------------- index


def seal(cache):
    """Writes the digests of changed arrays into the records of their indexes."""
    for path in cache.glob("*.json"):
        record = unsealed(path)
        arrays = {array: (cache / f"{path.stem}.{array}.npy").read_bytes() for array in record["sha256"]}
        reseal(path, record | {"sha256": {array: sha256(content) for array, content in arrays.items()}})


@pytest.mark.parametrize("how", DERIVED)
def test_an_index_is_made_once_and_again_when_it_is_gone(dataset, cache, how, limit):
    def ids():
        return Loader(dataset, length=16, samples=how).read(np.arange(9)).input_ids.tolist()

    first, made = ids(), contents(cache)
    assert len(made) == {"documents": 2, "packed": 3, "pairs": 3}[how]
    limit(documents_at_once=3)  # which changes no byte of an index
    for name in made:
        for damage in (os.unlink, lambda path: os.truncate(path, 0), lambda path: flip(path, 140)):
            damage(cache / name)
            assert ids() == first
            assert contents(cache) == made


def test_a_damaged_dataset_makes_no_index(dataset, tmp_path, cache):
    """An index has the dataset_id in its name, which a damaged copy shares with the sound dataset."""
    falling = write_dataset(tmp_path / "falling", [([7, 3, 8, 3, 9, 3], [4, 2, 6], [4, 2, 6])])
    without_ids = write_dataset(tmp_path / "without ids", [([3, 3], [1, 2], None)])
    for how in DERIVED:
        copy = shutil.copytree(dataset.path, tmp_path / how)
        flip(copy / f"train-00000.{'sentences' if how == 'pairs' else 'documents'}.npy", 128 + 3 * 8)
        for damaged in (copy, falling):
            with refuses("damaged"):
                Loader(bertdata.open(damaged), length=16, samples=how)
    assert contents(cache) == {}
    for how in ("documents", "packed"):
        with refuses("damaged", given=without_ids):
            Loader(bertdata.open(without_ids), length=8, samples=how)


def test_other_settings_have_another_index(dataset, cache):
    """What samples are decides it, and so does the area of packed rows: 2**19 tokens, as in a block of an order."""
    changes = [{}, {"length": 17}, {"split": "validation"}, {"samples": "documents"}, {"samples": "pairs"}]
    changes += [{"samples": "pairs", **more} for more in ({"seed": 1}, {"short_seq_prob": 0.2})]
    for number, change in enumerate(changes, 1):
        Loader(dataset, **{"length": 16, "samples": "packed"} | change)
        assert len([*cache.glob("*.json")]) == number
    identities = [unsealed(path)["identity"] for path in cache.glob("*.json")]
    assert {each.get("packed_together", 2**19) for each in identities} == {order.BLOCK_TOKENS} == {2**19}


@pytest.mark.parametrize("how", DERIVED)
def test_an_index_of_values_that_point_nowhere_is_refused(dataset, cache, how):
    """Also where a row has more pieces than the record states, from which the room for spans comes."""

    def read():
        return Loader(dataset, length=16, samples=how).read(np.arange(50))

    read()
    for path in cache.glob("*.npy"):
        good, size = path.read_bytes(), path.stat().st_size // 8 - 16
        values = [2**64 - 1, 2**63, 2**40 + np.arange(size), 0, 2**40 | 3]  # the last: three tokens behind the end
        if path.name.endswith(".pieces.npy"):  # the second of two is
            values.append((dataset.splits["train"].num_tokens - 1) << 16 | 2)
        for value in values:
            path.write_bytes(good[:128] + np.full(size, value, np.uint64).tobytes())
            seal(cache)
            with refuses("damaged"):
                read()
        path.write_bytes(good)
        seal(cache)
    if how == "packed":
        (path,) = cache.glob("*.json")
        record = unsealed(path)
        reseal(path, record | {"facts": record["facts"] | {"max_pieces": 1}})
        with refuses("damaged"):
            read()


def read_packed(path):
    return Loader(bertdata.open(path), length=16, samples="packed").read(np.arange(40)).input_ids.tobytes()


def test_processes_that_make_an_index_together_end_in_one(dataset, cache):
    with FORKS.Pool(3) as pool:
        assert len({*pool.map(read_packed, [dataset.path] * 3, chunksize=1)}) == 1
    assert len(contents(cache)) == 3


def test_where_the_cache_is(dataset, tmp_path, monkeypatch):
    """A cache that cannot be written is an error, and so is a user without a home."""
    for name in ("BERTDATA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "expanduser", lambda path: path)
        with refuses("missing"):
            read_packed(dataset.path)
    for name, inside in (("HOME", ".cache/bertdata"), ("XDG_CACHE_HOME", "bertdata"), ("BERTDATA_CACHE", "")):
        monkeypatch.setenv(name, str(tmp_path / name))
        read_packed(dataset.path)
        assert len([*(tmp_path / name / inside).iterdir()]) == 3
    monkeypatch.setenv("BERTDATA_CACHE", str(put(tmp_path / "file", "") / "cache"))
    with refuses("unwritable", given=tmp_path / "file" / "cache"):
        read_packed(dataset.path)


# ------------------------------------------------------------------------------------------------------------- words


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
    for random_from, expected in (("tokens", {7, 11, 12, 14}), ("ordinary", {*range(5, SPECIAL.vocab_size)})):
        masking = Masking(probability=1.0, mask_fraction=0.0, random_fraction=1.0, random_from=random_from)
        batch = next(Loader(dataset, masking=masking))
        assert {*batch.input_ids[batch.labels >= 0].tolist()} == expected


VOCABULARIES = ["5", "[5]", '{"a":300}', '{"a":"0"}']


@pytest.mark.parametrize("tokenizer", ["{}", "[]", "", *(f'{{"model": {{"vocab": {each}}}}}' for each in VOCABULARIES)])
def test_a_tokenizer_that_tells_no_words_is_named(tmp_path, tokenizer):
    dataset = bertdata.open(write_dataset(tmp_path / "shards", [([7, 3], [2], None)], tokenizer=tokenizer))
    with refuses("damaged"):
        Loader(dataset, length=8, masking=Masking(policy="whole_word"))


def test_where_words_begin_is_stored(tmp_path):
    """Of documents of a few characters of which each is a token, in words of two, over several shards."""
    random, characters = np.random.default_rng(4), [chr(0x4E00 + n) for n in range(200)]
    vocab = write(tmp_path / "vocab.txt", *SPECIALS, "ab", "##c", "a", "b", *characters)
    texts = ["".join(random.choice([*characters, "abc", " "], random.integers(1, 60))) for _ in range(150)]
    options = {"tokenizer": str(vocab), "words": "support.data:in_pairs", "shard_size": 3000, "validation": 0.1}
    with limits(block_bytes=400, most_listed=1):  # blocks end inside a byte of the array of words
        dataset = built(tmp_path, "\n\n".join(texts) + "\n", **options)
    library, expected = tokenizers.Tokenizer.from_file(str(dataset.path / "tokenizer.json")), {}
    for encoding in library.encode_batch(texts, add_special_tokens=False):
        word = [-1, *(start // 2 for start, _ in encoding.offsets), -1]
        expected[tuple(encoding.ids)] = [int(a != b) for a, b in pairwise(word)]
    assert len(dataset.splits["train"]) > 2
    for split in dataset.splits:
        for number, shard in enumerate(dataset.splits[split]):
            tokens = dataset.tokens(split, number)
            bits = np.unpackbits(dataset.array(shard.name, "words"), bitorder="little")
            for start, stop in pairwise(dataset.array(shard.name, "documents").tolist()):
                assert bits[start:stop].tolist() == expected[tuple(tokens[start : stop - 1].tolist())]
            assert not bits[tokens.size :].any()
    assert faults_of(dataset.path) == []
    assert dataset.manifest.settings["words"] == "support.data:in_pairs"
