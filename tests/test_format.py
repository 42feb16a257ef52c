"""The bytes of a dataset are what docs/format.md says, and damage to them is named and does no harm.

Headers, digests, checksums and identities are computed from that page, not with the library.
"""

import json
import os
import pickle
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import invoke, refuses, succeeds
from support.data import SPECIAL, SPECIALS, assert_same, build, built, faults_of, members, with_member, write_dataset
from support.disk import canonical, flip, published, put, reseal, sha256, unsealed, without_origins, write
from support.limits import limits
from support.servers import directory_as_store

import bertdata
from bertdata import BertdataError, Loader, SpecialTokens
from bertdata.format.verify import verify
from bertdata.remote.copies import pull, push

SMALL = {"shard_size": 8000, "validation": 0.2, "test": 0.1, "sentences": "line"}
MIB = 1 << 20


def crc32(content):
    return [zlib.crc32(content[start : start + MIB]) for start in range(0, len(content), MIB)]


def header(dtype, length):
    fields = "{'descr': '" + dtype + "', 'fortran_order': False, 'shape': (" + str(length) + ",), }"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + fields.encode() + b" " * (127 - 10 - len(fields)) + b"\n"


def identity(manifest):
    """The dataset_id of a manifest."""
    names = ("format_version", "token_dtype", "separator_id", "tokenizer", "settings")
    arrays = [
        [split, array, entry["dtype"], entry["length"], entry["sha256"]]
        for split, shards in manifest["splits"].items()
        for shard in shards
        for array, entry in sorted(shard["arrays"].items())
    ]
    return sha256(canonical({name: manifest[name] for name in names} | {"arrays": arrays}))


def seal_manifest(out, manifest):
    reseal(out / "manifest.json", manifest | {"dataset_id": identity(manifest)})


def put_array(out, array, content, **entry):
    """Makes `content` the file of an array of the only shard, and every digest that of it."""
    (out / f"train-00000.{array}.npy").write_bytes(content)
    record = unsealed(out / "train-00000.json")
    manifest = unsealed(out / "manifest.json")
    public = manifest["splits"]["train"][0]["arrays"]
    public[array] = public.get(array, {}) | {"sha256": sha256(content)} | entry
    record["arrays"][array] = public[array] | {"crc32": crc32(content)}
    reseal(out / "train-00000.json", record)
    seal_manifest(out, manifest)


def numbers_of(fault, path):
    """The numbers in a fault, after the name of a file."""
    assert fault.startswith(str(path))
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", fault.removeprefix(str(path)))]


def use(out):
    """Reads every document and a few batches; False if it is refused, by no other error than ours."""
    try:
        dataset = bertdata.open(out)
        for split in dataset.splits:
            dataset.token_counts(split)
            Loader(dataset, length=16, global_batch_size=40, split=split).read(np.arange(40))
        for index in range(len(dataset)):
            dataset.document(index)
    except BertdataError:
        return False
    return True


@pytest.fixture(scope="module")
def manifest(dataset):
    return unsealed(dataset.path / "manifest.json")


@pytest.fixture
def sound(tmp_path):
    """Two documents of two sentences each, written by hand; one shard, no tokenizer."""
    out = write_dataset(tmp_path / "out", [([10, 11, 12, 3, 1, 20, 3], [4, 7], [2, 4, 5, 7])])
    assert verify(out) == []
    assert use(out)
    return out


# -------------------------------------------------------------------------------------------------------------- files


def test_a_dataset_is_the_files_that_the_page_describes(dataset, manifest):
    names = {"manifest.json", "tokenizer.json", "tokenizer_config.json"}
    for split, shard in ((split, shard) for split, shards in manifest["splits"].items() for shard in shards):
        unit = int(shard["name"].removeprefix(f"{split}-"))
        documents, tokens, sentences = (shard[f"num_{what}"] for what in ("documents", "tokens", "sentences"))
        arrays = {}
        for array, length in {"tokens": tokens, "documents": documents + 1, "sentences": sentences + 1}.items():
            path = dataset.path / f"{shard['name']}.{array}.npy"
            content, dtype = path.read_bytes(), "<u2" if array == "tokens" else "<u8"
            assert content[:128] == header(dtype, length)
            assert len(content) == 128 + int(dtype[-1]) * length
            assert np.load(path).tobytes() == content[128:] == dataset.array(shard["name"], array).tobytes()
            arrays[array] = {"dtype": dtype, "length": length, "sha256": sha256(content), "crc32": crc32(content)}
            names.add(path.name)
        names.add(f"{split}-{unit:05d}.json")
        counts = {"documents": documents, "dropped_documents": 0, "replaced_characters": 0}
        place = {"start": unit * 8000, "stop": (unit + 1) * 8000}
        record = {"format_version": 1, "split": split, "arrays": arrays, "input": place, "counts": counts}
        assert unsealed(dataset.path / f"{split}-{unit:05d}.json") == record
        assert shard.keys() == {"name", "num_documents", "num_tokens", "num_sentences", "arrays"}
        assert {name: entry | {"crc32": arrays[name]["crc32"]} for name, entry in shard["arrays"].items()} == arrays
    assert without_origins(dataset.path).keys() == names
    assert len(names) > 20


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_tokens_have_four_bytes_if_the_largest_id_needs_them(tmp_path, size, dtype):
    vocab = write(tmp_path / "vocab.txt", *SPECIALS, *range(5, size))
    dataset = built(tmp_path, f"5 {size - 1}", tokenizer=str(vocab), validation=0.0)
    content = (dataset.path / "train-00000.tokens.npy").read_bytes()
    assert content == header(dtype, 3) + np.array([5, size - 1, 3], dtype).tobytes()
    assert unsealed(dataset.path / "manifest.json")["token_dtype"] == dtype
    assert verify(dataset.path) == []
    assert (dataset.tokens("train", 0).dtype, dataset[0].tolist()) == (dtype, [5, size - 1])
    assert size - 1 in Loader(dataset, length=5, masking=None).read(np.array([0])).input_ids


def test_the_manifest(dataset, manifest, vocab):
    names = "format format_version dataset_id token_dtype vocab_size special_tokens special_ids separator_id tokenizer"
    assert manifest.keys() == {*names.split(), "settings", "splits", "counts"}
    assert (manifest["format"], manifest["format_version"]) == ("bertdata", 1)
    assert manifest["dataset_id"] == identity(manifest) == dataset.dataset_id
    assert manifest["special_tokens"] == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert (manifest["special_ids"], manifest["separator_id"]) == ([0, 1, 2, 3, 4], 3)
    assert manifest["vocab_size"] == len(Path(vocab).read_text(encoding="utf-8").splitlines())
    files = ("tokenizer.json", "tokenizer_config.json")
    assert manifest["tokenizer"] == {name: sha256((dataset.path / name).read_bytes()) for name in files}
    assert manifest["settings"] == SMALL | {"documents": "blank", "max_documents": None}
    assert list(manifest["splits"]) == ["train", "validation", "test"]
    counted = "documents dropped_documents replaced_characters special_literals special_ids_replaced skipped_rows"
    assert manifest["counts"].keys() == {*counted.split(), "text_bytes", "words"}


def test_crc32_is_of_each_mebibyte_and_damage_is_placed_by_it(tmp_path):
    """Of an array of 2.4 MiB: bytes in each block, and the length."""
    tokens = np.arange(1_250_000) % 290 + 5
    tokens[-1] = 3
    out = write_dataset(tmp_path / "out", [(tokens, [tokens.size], None)])
    path = out / "train-00000.tokens.npy"
    content = path.read_bytes()
    assert unsealed(out / "train-00000.json")["arrays"]["tokens"]["crc32"] == crc32(content)
    bounds = [[0, MIB], [MIB, 2 * MIB], [2 * MIB, len(content)]]
    for positions, damaged in (([MIB - 1], [0]), ([MIB], [1]), ([2_500_127], [2]), ([5, 2 * MIB], [0, 2])):
        for position in positions:
            flip(path, position)
        assert [numbers_of(fault, path)[:2] for fault in verify(out)] == [bounds[block] for block in damaged]
        path.write_bytes(content)
    path.write_bytes(content[: 2 * MIB])
    assert [numbers_of(fault, path) for fault in verify(out)] == [[2 * MIB, len(content)]]


# ------------------------------------------------------------------------------------------ digests right, rules broken


def test_arrays_of_unknown_names_are_ignored_but_verified(sound):
    put_array(sound, "languages", header("<u2", 1) + b"\1\0", dtype="<u2", length=1)
    assert verify(sound) == []
    path = sound / "train-00000.languages.npy"
    path.write_bytes(b"other")
    assert [fault for fault in verify(sound) if str(path) in fault]
    assert use(sound)
    path.unlink()
    assert use(sound)


CONTENT_FAULTS = {  # what is wrong → tokens, document ends, sentence ends; the array and the numbers that are named
    "id outside": ([10, 300, 3], [3], None, "tokens", [1, 300, 300]),  # token, id, vocabulary
    "no separator": ([10, 3, 11, 12], [2, 4], None, "tokens", [1]),  # document
    "too few": ([10, 3, 11, 12], [2, 4], None, "tokens", [1, 2]),  # separators, documents
    "inside": ([10, 3, 11, 3], [4], None, "tokens", [2, 1]),
    "misplaced": ([3, 10, 11, 3], [2, 4], None, "tokens", [0]),
    "special id": ([10, 11, 4, 3], [4], None, "tokens", [2, 4]),  # token, id
    "no id": ([10, 3, 3], [2, 3], None, "documents", [1]),  # document
    "equal": ([10, 3, 11, 3], [2, 2, 4], None, "documents", [2, 1]),  # numbers of offsets
    "falling": ([10, 11, 12, 3], [3, 2, 4], None, "documents", [2, 1]),
    "huge": ([10, 11, 12, 3], [2**64 - 1, 4], None, "documents", [2, 1]),
    "beyond": ([10, 11, 12, 3], [5, 4], None, "documents", [2, 1]),
    "last": ([10, 11, 3], [2], None, "documents", [0, 2, 0, 3]),  # first and last offset, as they are and should be
    "equal sentences": ([10, 11, 3], [3], [1, 1, 3], "sentences", [2, 1]),
    "last sentence": ([10, 11, 3], [3], [1, 4], "sentences", [0, 4, 0, 3]),
    "no sentence": ([10, 3, 11, 12, 3], [2, 5], [3, 5], "sentences", []),
}


@pytest.mark.parametrize("case", CONTENT_FAULTS)
@pytest.mark.parametrize("piece", [1, 2, 1 << 20])
def test_what_is_sealed_but_breaks_a_rule_is_named(tmp_path, limit, case, piece):
    limit(verified_together=piece)
    *shard, array, numbers = CONTENT_FAULTS[case]
    sentences = shard[2] and [2]
    out = write_dataset(tmp_path / "out", [([10, 3], [2], sentences), shard, ([1, 3], [2], sentences)])
    faults = verify(out)
    path = out / f"train-00001.{array}.npy"
    assert numbers in [numbers_of(fault, path) for fault in faults if str(path) in fault]
    assert all("train-00001" in fault for fault in faults)
    use(out)
    if array == "documents" and numbers == [2, 1]:
        with refuses("damaged", given=path):
            bertdata.open(out).document(1 if case in ("huge", "beyond") else 2)


@pytest.mark.parametrize("piece", [1, 2, 1 << 20])
def test_words_that_break_a_rule_are_named(sound, limit, piece):
    """Tokens 10 11 12 [SEP] 1 20 [SEP]; bits from the lowest on; documents whose first token or separator is wrong."""
    limit(verified_together=piece)
    rows = {"1001111": [], "1001101": [], "0001111": [0], "1001011": [1], "1000111": [0], "1001110": [1]}
    for bits, numbers in (rows | {"10011111": [1]}).items():  # the last: of bits that are 1 after the last token
        put_array(sound, "words", header("|u1", 1) + bytes([int(bits[::-1], 2)]), dtype="|u1", length=1)
        faults = [numbers_of(fault, sound / "train-00000.words.npy") for fault in verify(sound)]
        assert faults == [[number] for number in numbers], bits


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_places_of_empty_documents_that_break_a_rule_are_named(sound, limit, piece):
    limit(verified_together=piece)
    for places, num_faults in (([0, 0, 2], 0), ([2, 1], 1), ([1, 3], 1)):  # of two documents
        content = header("<u8", len(places)) + np.array(places, "<u8").tobytes()
        put_array(sound, "empty", content, dtype="<u8", length=len(places))
        assert [numbers_of(each, sound / "train-00000.empty.npy") for each in verify(sound)] == [[2]] * num_faults


FORMS = {  # array → bytes of its file, and others in their place
    "tokens": [(b"(7,), }", b"(7,),} "), (b"'<u2'", b"'>u2'"), (b"False", b"True "), (b"\x01\x00v", b"\x02\x00v")],
    "documents": [(b"\n\0", b"\n\1"), (b"\7\0\0\0", b"\7\0\0\0\0")],  # the first offset; a byte behind the last
    "sentences": [(b"\n\0", b"\n\1")],
}


@pytest.mark.parametrize(("array", "old", "new"), [(array, *form) for array in FORMS for form in FORMS[array]])
def test_a_sealed_array_of_another_form_is_named_and_not_opened(sound, array, old, new):
    path = sound / f"train-00000.{array}.npy"
    assert old in path.read_bytes()
    put_array(sound, array, path.read_bytes().replace(old, new, 1))
    assert [fault for fault in verify(sound) if str(path) in fault]
    with refuses("damaged", says=str(path)):
        bertdata.open(sound)


@pytest.mark.parametrize(("dtype", "token"), [("<u2", 300), ("<u2", 65_535), ("<u4", 300), ("<u4", 2**32 - 1)])
def test_batches_never_hold_ids_outside_the_vocabulary(tmp_path, dtype, token):
    dataset = bertdata.open(write_dataset(tmp_path / "out", [([10, 11, token, 12, 13, 3], [6], None)], dtype=dtype))
    for masking in (None, bertdata.Masking()):
        loader, refused = Loader(dataset, length=3, global_batch_size=1, masking=masking), 0
        for position in range(6):
            try:
                assert loader.read(np.array([position])).input_ids.max() < 300
            except BertdataError as error:
                refused += (error.kind, error.given) == ("damaged", dataset.path)
        assert refused == 1
    with refuses("damaged"):
        dataset.token_counts("train")


JUNK = [None, True, -1, 0, 1, 2**64, 1.5, "", "x", "<u8", [], [None], ["x"], {}, {"x": 1}]


def test_records_with_any_member_exchanged_are_refused_or_harmless(sound):
    """One value may be the right one, and nothing compares the inputs and the counts of a shard."""
    manifest = unsealed(sound / "manifest.json")
    manifest["tokenizer"] = {"tokenizer.json": sha256(b"{}")}
    put(sound / "tokenizer.json", "{}")
    refused = []
    for number, path in enumerate(members(manifest)):
        for junk in JUNK[number % 3 :: 3]:
            changed = with_member(manifest, path, junk)
            try:
                seal_manifest(sound, changed)
            except (TypeError, AttributeError, KeyError):  # it has no dataset_id
                reseal(sound / "manifest.json", changed)
            refused.append(not use(sound))
            faults_of(sound)
    assert sum(refused) > len(refused) // 2
    seal_manifest(sound, manifest)
    record = unsealed(sound / "train-00000.json")
    for number, path in enumerate(members(record)):
        accepted = 0
        for junk in JUNK[number % 2 :: 2]:
            reseal(sound / "train-00000.json", with_member(record, path, junk))
            accepted += not any("train-00000" in fault for fault in verify(sound))
        assert accepted <= 1 or path[0] in ("input", "counts"), path


NAMES = ["../x", "{parent}/x", "/etc/passwd", "sub/x", "..", "", "x\0", "x", "train-0", "train-00000\n", "test-00000"]
SHARD, ARRAY = ("splits", "train", 0), {"dtype": "<u2", "length": 1, "sha256": "0" * 64}
WRONG = [  # a member of a manifest that lists two shards, and values that contradict the rest
    ((*SHARD, "name"), NAMES),
    ((*SHARD, "num_sentences"), [None]),
    ((*SHARD, "num_documents"), [0, 3]),
    ((*SHARD, "num_tokens"), [6]),
    ((*SHARD, "arrays", "languages"), [ARRAY | {"dtype": "<z4"}]),  # which numpy does not know
    ((*SHARD, "arrays", "/../../x"), [ARRAY]),
    (("tokenizer",), [{"../x": ARRAY["sha256"]}]),
    (("special_tokens", "mask"), [300]),
    (("special_ids", 4), [300]),
    (("token_dtype",), ["<u4"]),
    (("separator_id",), [2, None]),
    (("splits",), [{}]),
    (("splits", "train"), [[], [1, 0], [0, 0], [0, 1, 0]]),  # numbers of shards
    (("format_version",), [3]),
]
ARRAYS = ["documents", "sentences", "tokens"]
WRONG_TABLES = [  # the same of a manifest that has tables in place of the list
    (("arrays",), [ARRAYS[:2], ARRAYS[::-1], ["../x", *ARRAYS], 3]),
    (("tables",), [{}, None]),
    (("splits",), [*({"train": n} for n in (3, -1, True, 1 << 80, "2")), {"other": 2}, {"train": 2, "test": 0}, []]),
    (("token_dtype",), ["<u8"]),
    (("tokenizer",), [["a"], "abc", {"tokenizer.json": 5}]),
]


@pytest.mark.parametrize(
    ("most_listed", "path", "value"),
    [(n, path, value) for n, rows in ((2, WRONG), (1, WRONG_TABLES)) for path, values in rows for value in values],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, limit, most_listed, path, value):
    limit(most_listed=most_listed)
    out = write_dataset(tmp_path / "out", [([10, 11, 12, 3, 1, 20, 3], [4, 7], [2, 4, 5, 7])] * 2)
    manifest = unsealed(out / "manifest.json")
    assert ("tables" in manifest) == (most_listed == 1)
    if path[-1] == "train":
        value = [manifest["splits"]["train"][number] for number in value]
    if path[-1] == "name":
        value = value.format(parent=tmp_path)
        (out / "sub").mkdir()
        for array in ("tokens.npy", "documents.npy", "sentences.npy", "json"):
            if value not in ("/etc/passwd", "x\0"):  # the files stand where the name leads, so following it would work
                shutil.copy(out / f"train-00000.{array}", os.path.join(out, f"{value}.{array}"))
    changed = with_member(manifest, path, value)
    ids = [changed["dataset_id"]]
    if most_listed > 1:  # of tables it depends on the digests
        ids.append(identity(changed))
    for dataset_id in ids:
        reseal(out / "manifest.json", changed | {"dataset_id": dataset_id})
        for read in (bertdata.open, verify):
            with refuses("other-version" if value == 3 and path == ("format_version",) else "damaged"):
                read(out)


@pytest.mark.parametrize("member", ["settings", "counts"])
def test_settings_and_counts_of_any_kind_give_a_sentence_or_facts(dataset, manifest, tmp_path, member):
    copy = shutil.copytree(dataset.path, tmp_path / "copy")
    names = [*manifest[member], "map", "dtype", "imported"]
    for value in (*JUNK, *(manifest[member] | {name: junk} for name in names for junk in JUNK[::3])):
        seal_manifest(copy, manifest | {member: value})
        assert invoke("bertdata", "inspect", copy).exit_code in (0, 1)


def test_of_many_small_shards_evenly_spaced_tokens_are_counted(tmp_path):
    """Two pieces, 8192 tokens apart: the first shard, and the rest of the ninth."""
    shards = [([10 + number] * 999 + [3], [1000], None) for number in range(12)]
    counts = bertdata.open(write_dataset(tmp_path / "out", shards)).token_counts("train", sample_tokens=8000)
    assert {token: int(counts[token]) for token in np.flatnonzero(counts).tolist()} == {3: 2, 10: 999, 18: 807}
    assert (counts.dtype, counts.size) == (np.int64, 300)


def test_a_shard_beyond_32_bits_is_read_like_a_small_one(tmp_path):
    """Two datasets differ only in the size of their first sentence, whose tokens take no room on the disk."""
    random, found = np.random.default_rng(1), []
    sizes = [1000, 5, *random.integers(2, 30, 60).tolist()]
    ends, tokens = np.cumsum(sizes), random.integers(5, 300, sum(sizes), np.uint16)
    tokens[ends[1::2] - 1] = 3
    for more in (0, 3 << 31):
        out = write_dataset(tmp_path / f"{more}", [(tokens, ends[1::2], ends)])
        for array, stops in {"documents": ends[1::2], "sentences": ends}.items():
            put_array(out, array, header("<u8", stops.size + 1) + np.append(0, stops + more).tobytes())
        with open(out / "train-00000.tokens.npy", "wb") as file:
            file.write(header("<u2", tokens.size + more))
            file.seek(2 * more, os.SEEK_CUR)
            file.write(tokens.tobytes())
        manifest = unsealed(out / "manifest.json")
        shard = manifest["splits"]["train"][0]
        shard["num_tokens"] = shard["arrays"]["tokens"]["length"] = tokens.size + more
        seal_manifest(out, manifest)
        dataset, inspected = bertdata.open(out), json.loads(succeeds("bertdata", "inspect", out, "--json").stdout)
        about = inspected["tokens_per_document"]
        assert Loader(dataset, samples="documents", length=1 << 16).num_samples == 31 + more // (2**16 - 2)
        loader = Loader(dataset, samples="pairs", length=16, seed=4)
        arrays = [*loader.read(np.arange(20)).arrays().values(), loader.spans(np.arange(20)) - [0, more, 0]]
        arrays += [dataset.document(number) for number in range(1, len(dataset))]
        found.append([about["median"], about["max"] - more, *(array.tolist() for array in arrays)])
    assert found[0] == found[1]


def test_an_unknown_token_that_also_ends_documents_is_no_fault(tmp_path):
    special = SpecialTokens(**vars(SPECIAL) | {"unk": 3})
    assert verify(write_dataset(tmp_path / "out", [([10, 3, 11, 3], [4], None)], special=special)) == []


# ------------------------------------------------------------------------------------------------------- many shards


@pytest.fixture(scope="module")
def kept(once, corpus, vocab):
    """The shared dataset with two tables in place of the list of its shards, which are opened when they are used."""

    def make(folder):
        with limits(most_listed=3):
            build(corpus, folder / "out", tokenizer=vocab, **SMALL)

    return bertdata.open(once("large", make) / "out")


@pytest.fixture
def large(kept, tmp_path):
    return bertdata.open(shutil.copytree(kept.path, tmp_path / "large"))


def put_table(out, name, content):
    (out / name).write_bytes(content)
    reseal(out / "manifest.json", with_member(unsealed(out / "manifest.json"), ("tables", name), sha256(content)))


def test_tables_say_what_the_list_says(dataset, manifest, kept):
    assert [unsealed(kept.path / "manifest.json")["format_version"], manifest["format_version"]] == [2, 1]
    assert kept.dataset_id == dataset.dataset_id == kept.manifest.computed_id()
    for name, split in dataset.splits.items():
        ours = kept.splits[name]
        assert (*ours, ours[1:3], ours[-1]) == (*split, split[1:3], split[-1])
        assert (ours.num_documents, ours.num_tokens) == (split.num_documents, split.num_tokens)
        assert [ours.stores(array) for array in ("tokens", "words")] == [True, False]
    every = [each for split in dataset.splits.values() for each in split]
    numbers = np.load(kept.path / "shards.npy").reshape(-1, 4)
    assert numbers[:, 1:].tolist() == [[each.num_documents, each.num_tokens, each.num_sentences] for each in every]
    digests = np.load(kept.path / "digests.npy").reshape(len(every), 3, 32)
    assert digests[3, 0].tobytes().hex() == every[3].arrays["documents"]["sha256"]
    names = {path.name for path in dataset.path.iterdir()}
    assert {path.name for path in kept.path.iterdir()} == names | {"shards.npy", "digests.npy"}
    assert faults_of(kept.path) == []


def test_what_is_read_of_tables_is_what_is_read_of_the_list(dataset, kept, tmp_path, monkeypatch):
    """Also where the path is relative to a directory that the process has left."""
    monkeypatch.chdir(kept.path.parent)
    opened = bertdata.open(kept.path.name)
    monkeypatch.chdir(tmp_path)
    assert [each.tolist() for each in opened] == [each.tolist() for each in dataset]
    for sample in (100, 10_000_000):
        ours, theirs = (each.token_counts("train", sample_tokens=sample) for each in (opened, dataset))
        assert ours.tolist() == theirs.tolist()
    assert all((opened.array("train-00002", name) == dataset.array("train-00002", name)).all() for name in ARRAYS)
    for shard, name in (("train-99999", "tokens"), ("one", "tokens"), ("train-00000", "empty")):
        for each in (opened, dataset):
            with refuses("unknown", "name", given=name):
                each.array(shard, name)
    options = {"length": 40, "samples": "packed", "shuffle": "blocks", "global_batch_size": 5}
    reopened = pickle.loads(pickle.dumps(opened))  # noqa: S301
    ours, theirs = Loader(reopened, **options), Loader(dataset, **options)
    for _ in range(2 * theirs.num_samples // 5):
        assert_same(next(ours), next(theirs))
    ours.load_state_dict(theirs.state_dict())


def test_a_shard_is_opened_when_it_is_used_and_named_if_it_is_wrong(large):
    def opened():
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {Path(line.split()[-1]).name for line in maps if f"{large.path}/train" in line}

    names = [f"{each.name}.tokens.npy" for each in large.splits["train"]]
    loader = Loader(large, length=12, global_batch_size=2)
    assert opened() == set()
    next(loader)
    assert 1 <= len(opened()) <= 5
    loader.read(np.arange(loader.num_samples))
    assert opened() == {*names}
    for break_it in (lambda path: os.truncate(path, 150), os.unlink):
        break_it(large.path / names[2])
        with refuses("damaged", says=names[2]):
            Loader(large, length=20).read(np.arange(loader.num_samples))
        assert any(names[2] in fault for fault in faults_of(large.path))


def test_a_dataset_that_is_replaced_while_it_is_read_is_never_mixed(large, corpus, vocab):
    pickled = pickle.dumps(Loader(large, length=20))
    with limits(most_listed=3):
        build(corpus, large.path, tokenizer=vocab, overwrite=True, **SMALL | {"test": 0.3})
    reads = [lambda: Loader(large, length=20).read(np.arange(999)), lambda: large.document(0)]
    for read in (*reads, lambda: pickle.loads(pickled)):
        with refuses("replaced"):
            read()
    assert faults_of(large.path) == []
    build(corpus, large.path, tokenizer=vocab, overwrite=True, **SMALL)
    assert not (large.path / "shards.npy").exists()
    assert faults_of(large.path) == []


def test_damaged_tables_are_found(large):
    """Opening a dataset does not read the digests."""
    for path in (large.path / "shards.npy", large.path / "digests.npy"):
        content = path.read_bytes()
        for spoil in (lambda path: flip(path, -1), Path.unlink):
            spoil(path)
            assert any(path.name in fault for fault in faults_of(large.path))
            if not path.exists() or path.name == "shards.npy":
                with refuses("damaged", says=path.name):
                    bertdata.open(large.path).splits["train"][0]  # noqa: B018
        path.write_bytes(content)


def test_tables_are_copied_and_a_dataset_with_the_id_of_another_is_not_taken_for_it(large, cache, tmp_path):
    """A copy in the cache and an index have the id in their names."""
    with directory_as_store(tmp_path / "store") as path_of:
        url = "s3://bucket/large"
        assert push(large.path, url) == pull(url, tmp_path / "copy") == large.dataset_id
        assert published(tmp_path / "copy") == published(large.path)
        put(path_of(url) / "shards.npy", "no")
        with refuses("damaged", says="large/shards.npy"):
            pull(url, tmp_path / "other")
        manifest = unsealed(large.path / "manifest.json") | {"dataset_id": "0" * 64}
        reseal(large.path / "manifest.json", manifest)
        assert any("dataset_id" in fault for fault in faults_of(large.path))
        shutil.copytree(large.path, path_of(url), dirs_exist_ok=True)
        for take in (
            lambda: push(large.path, "s3://bucket/b"),
            lambda: pull(url, tmp_path / "b"),
            lambda: Loader(bertdata.open(large.path), length=16, samples="packed"),
        ):
            with refuses("damaged"):
                take()
    assert not [*cache.glob("*.json")]


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.sampled_from([0, 1, 2**61, 2**62, 2**64 - 1]))))
def test_tables_of_any_numbers_give_a_sentence_or_a_dataset(kept, folder, changes):
    numbers = np.load(kept.path / "shards.npy")
    for row, column, value in changes:
        numbers[4 * (row % (numbers.size // 4)) + column] = value
    shutil.copytree(kept.path, folder, dirs_exist_ok=True)
    put_table(folder, "shards.npy", header("<u8", numbers.size) + numbers.tobytes())
    try:
        splits = bertdata.open(folder).splits
    except BertdataError:
        return
    for split in splits.values():
        units = [int(each.name.rpartition("-")[2]) for each in split]
        assert units == sorted(set(units))
        assert split.num_tokens == sum(each.num_tokens for each in split)
