"""The bytes of a dataset are what docs/format.md says, and damage to them is named and does no harm.

Headers, digests, checksums and identities are computed here from that page, not with the library.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from support.commands import invoke, refuses
from support.data import SPECIALS, build, built, faults_of, members, with_member, write_dataset
from support.disk import without_origins
from tokenizers import models, pre_tokenizers

import bertdata
from bertdata import Loader
from bertdata.cli import main
from bertdata.errors import BertdataError, DatasetError
from bertdata.format.verify import verify

SMALL = {"shard_size": 8000, "validation": 0.2, "test": 0.1, "sentences": "line"}
MIB = 1 << 20


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def crc32(content):
    return [zlib.crc32(content[start : start + MIB]) for start in range(0, len(content), MIB)]


def header(dtype, length):
    fields = "{'descr': '" + dtype + "', 'fortran_order': False, 'shape': (" + str(length) + ",), }"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + fields.encode() + b" " * (127 - 10 - len(fields)) + b"\n"


def canonical(record):
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


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


def unsealed(path):
    """A JSON record without its checksum, which is right."""
    record = json.loads(path.read_bytes())
    assert record.pop("checksum") == sha256(canonical(record))
    return record


def seal(path, record):
    path.write_bytes(json.dumps(record | {"checksum": sha256(canonical(record))}).encode())


def seal_manifest(out, manifest):
    seal(out / "manifest.json", manifest | {"dataset_id": identity(manifest)})


def put_array(out, array, content, **entry):
    """Makes `content` the file of an array of the only shard, and every digest that of it."""
    (out / f"train-00000.{array}.npy").write_bytes(content)
    record = unsealed(out / "train-00000.json")
    manifest = unsealed(out / "manifest.json")
    public = manifest["splits"]["train"][0]["arrays"]
    public[array] = public.get(array, {}) | {"sha256": sha256(content)} | entry
    record["arrays"][array] = public[array] | {"crc32": crc32(content)}
    seal(out / "train-00000.json", record)
    seal_manifest(out, manifest)


def numbers_of(fault, path):
    """The numbers in a fault, after the name of a file."""
    assert fault.startswith(str(path))
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", fault.removeprefix(str(path)))]


def use(out, refusal=DatasetError):
    """Reads every document and a few batches; False if it is refused, by no other error than `refusal`."""
    try:
        dataset = bertdata.open(out)
        for split in dataset.splits:
            dataset.token_counts(split)
            Loader(dataset, length=16, global_batch_size=40, split=split).read(np.arange(40))
        for index in range(len(dataset)):
            dataset.document(index)
    except refusal:
        return False
    return True


@pytest.fixture(scope="module")
def manifest(dataset):
    return unsealed(dataset.path / "manifest.json")


@pytest.fixture(scope="module")
def shards(manifest):
    """(split, shard as in the manifest), in order."""
    return [(split, shard) for split, shards in manifest["splits"].items() for shard in shards]


@pytest.fixture
def sound(tmp_path):
    """Two documents of two sentences each, written by hand; one shard, no tokenizer."""
    out = write_dataset(tmp_path / "out", [([10, 11, 12, 3, 1, 20, 3], [4, 7], [2, 4, 5, 7])])
    assert verify(out) == []
    assert use(out)
    return out


# -------------------------------------------------------------------------------------------------------------- files


def test_a_dataset_is_exactly_these_files(dataset, shards):
    expected = {"manifest.json", "tokenizer.json", "tokenizer_config.json"}
    for _, shard in shards:
        expected |= {f"{shard['name']}.{end}" for end in ("tokens.npy", "documents.npy", "sentences.npy", "json")}
    assert without_origins(dataset.path).keys() == expected
    assert len(shards) > 4


def test_array_files_are_a_header_of_128_bytes_and_numbers(dataset, shards):
    for _, shard in shards:
        lengths = {"tokens": shard["num_tokens"], "documents": shard["num_documents"] + 1}
        lengths["sentences"] = shard["num_sentences"] + 1
        for array, length in lengths.items():
            path = dataset.path / f"{shard['name']}.{array}.npy"
            content, dtype = path.read_bytes(), "<u2" if array == "tokens" else "<u8"
            assert content[:128] == header(dtype, length)
            assert len(content) == 128 + int(dtype[-1]) * length
            loaded = np.load(path, mmap_mode="r", allow_pickle=False)
            assert loaded.dtype.str == dtype
            assert loaded.shape == (length,)
            assert loaded.tobytes() == content[128:] == dataset.array(shard["name"], array).tobytes()


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_tokens_have_four_bytes_if_the_largest_id_needs_them(tmp_path, size, dtype):
    words = {word: number for number, word in enumerate([*SPECIALS, "first"])} | {"last": size - 1}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    dataset = built(tmp_path, "first last", tokenizer=str(tmp_path / "tokenizer.json"), validation=0.0)
    out = dataset.path
    content = (out / "train-00000.tokens.npy").read_bytes()
    assert content == header(dtype, 3) + np.array([5, size - 1, 3], dtype).tobytes()
    manifest = unsealed(out / "manifest.json")
    assert (manifest["token_dtype"], manifest["vocab_size"]) == (dtype, size)
    assert verify(out) == []
    assert (dataset.tokens("train", 0).dtype, dataset[0].tolist()) == (dtype, [5, size - 1])
    assert size - 1 in Loader(dataset, length=5, masking=None).read(np.array([0])).input_ids


def test_commit_records(dataset, shards):
    for split, shard in shards:
        record = unsealed(dataset.path / f"{shard['name']}.json")
        assert record.keys() == {"format_version", "split", "arrays", "input", "counts"}
        assert (record["format_version"], record["split"]) == (1, split)
        unit = int(shard["name"].removeprefix(f"{split}-"))
        assert shard["name"] == f"{split}-{unit:05d}"
        assert record["input"] == {"start": unit * 8000, "stop": (unit + 1) * 8000}
        counts = {"documents": shard["num_documents"], "dropped_documents": 0, "replaced_characters": 0}
        assert record["counts"] == counts
        assert record["arrays"].keys() == {"tokens", "documents", "sentences"}
        for array, entry in record["arrays"].items():
            content = (dataset.path / f"{shard['name']}.{array}.npy").read_bytes()
            length = np.frombuffer(content[128:], entry["dtype"]).size
            digests = {"sha256": sha256(content), "crc32": crc32(content)}
            assert entry == {"dtype": "<u2" if array == "tokens" else "<u8", "length": length} | digests


def test_the_manifest(dataset, manifest, shards, vocab):
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
    for _, shard in shards:
        assert shard.keys() == {"name", "num_documents", "num_tokens", "num_sentences", "arrays"}
        stated = json.loads((dataset.path / f"{shard['name']}.json").read_bytes())["arrays"]
        for array, entry in shard["arrays"].items():
            assert entry | {"crc32": stated[array]["crc32"]} == stated[array]


def test_crc32_is_of_each_mebibyte_and_damage_is_placed_by_it(tmp_path):
    """Of an array of 2.4 MiB: bytes in each block, and the length."""
    size = 1_250_000
    tokens = np.random.default_rng(0).integers(5, 300, size)
    tokens[-1] = 3
    out = write_dataset(tmp_path / "out", [(tokens, [size], None)])
    path = out / "train-00000.tokens.npy"
    content = path.read_bytes()
    entry = unsealed(out / "train-00000.json")["arrays"]["tokens"]
    assert entry["crc32"] == crc32(content)
    assert len(entry["crc32"]) == 3
    assert verify(out) == []
    bounds = [[0, MIB], [MIB, 2 * MIB], [2 * MIB, len(content)]]
    for positions, damaged in (([MIB - 1], [0]), ([MIB], [1]), ([2_500_127], [2]), ([5, 2 * MIB], [0, 2])):
        changed = bytearray(content)
        for position in positions:
            changed[position] ^= 1
        path.write_bytes(changed)
        assert [numbers_of(fault, path)[:2] for fault in verify(out)] == [bounds[block] for block in damaged]
    path.write_bytes(content[: 2 * MIB])
    (fault,) = verify(out)
    assert numbers_of(fault, path) == [2 * MIB, len(content)]


# ------------------------------------------------------------------------------------------------------------- damage


# ------------------------------------------------------------------------------------------ digests right, rules broken


NAMES = ["../x", "{parent}/x", "/etc/passwd", "sub/x", "..", "", "x\0", "x", "train-0", "train-00000\n", "test-00000"]


def test_one_damaged_shard_is_named_once_and_the_others_are_still_read(tmp_path):
    """The second of three shards is cut short, the third has a fault in what it says."""
    good = ([10, 11, 3], [3], None)
    out = write_dataset(tmp_path / "out", [good, good, ([10, 4, 3], [3], None)])
    cut = out / "train-00001.tokens.npy"
    cut.write_bytes(cut.read_bytes()[:-1])
    faults = verify(out)
    names = ["train-00001.tokens.npy"] * 2 + ["train-00002.tokens.npy"]
    assert [fault.split(" ")[0].rstrip(":") for fault in faults] == [str(out / name) for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_other_shard_names_are_refused(sound, name):
    """Where that is possible, the files stand where the name leads, so that following it would work."""
    name = name.format(parent=sound.parent)
    if name not in ("/etc/passwd", "x\0"):
        (sound / "sub").mkdir()
        for array in ("tokens.npy", "documents.npy", "sentences.npy", "json"):
            shutil.copy(sound / f"train-00000.{array}", os.path.join(sound, f"{name}.{array}"))
    manifest = unsealed(sound / "manifest.json")
    manifest["splits"]["train"][0]["name"] = name
    seal_manifest(sound, manifest)
    for read in (bertdata.open, verify):
        with refuses("damaged"):
            read(sound)


def test_no_other_name_leaves_the_directory(sound):
    secret = sound.parent / "secret.npy"
    secret.write_bytes(b"secret")
    manifest = unsealed(sound / "manifest.json")
    seal_manifest(sound, manifest | {"tokenizer": {"../secret.npy": sha256(b"secret")}})
    with refuses("damaged"):
        verify(sound)
    seal_manifest(sound, manifest)
    (sound / "train-00000.").mkdir()
    put_array(sound, "/../../secret", b"secret", dtype="<u2", length=1)
    with refuses("damaged"):
        verify(sound)


def test_arrays_of_unknown_names_are_ignored_but_verified(sound):
    put_array(sound, "languages", header("<u2", 1) + b"\1\0", dtype="<u2", length=1)
    assert verify(sound) == []
    path = sound / "train-00000.languages.npy"
    path.write_bytes(b"other")
    assert [fault for fault in verify(sound) if str(path) in fault]
    assert use(sound)
    path.unlink()
    assert use(sound)
    put_array(sound, "languages", b"", dtype="<z4", length=1)  # which numpy does not know
    for read in (bertdata.open, verify):
        with refuses("damaged", given=sound / "manifest.json"):
            read(sound)


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


@pytest.mark.parametrize("piece", [1, 2, 1 << 20])
@pytest.mark.parametrize(
    ("bits", "numbers"),  # the numbers of documents: those whose first token or separator does not begin a word
    [
        ("1001111", []),
        ("1001101", []),
        ("0001111", [[0]]),
        ("1001011", [[1]]),
        ("1000111", [[0]]),
        ("1001110", [[1]]),
        ("10011111", [[1]]),
    ],  # the last: of bits that are 1 after the last token
)
def test_words_that_break_a_rule_are_named(sound, limit, bits, numbers, piece):
    """Tokens 10 11 12 [SEP] 1 20 [SEP]; bits from the lowest on."""
    limit(verified_together=piece)
    content = header("|u1", 1) + bytes([int(bits[::-1], 2)])
    put_array(sound, "words", content, dtype="|u1", length=1)
    assert [numbers_of(fault, sound / "train-00000.words.npy") for fault in verify(sound)] == numbers


@pytest.mark.parametrize(("ends", "bad"), [([2, 2, 4], 1), ([3, 2, 4], 1), ([2**64 - 1, 4], 0), ([5, 4], 0)])
def test_documents_of_damaged_offsets_are_refused(tmp_path, ends, bad):
    dataset = bertdata.open(write_dataset(tmp_path / "out", [([10, 11, 12, 3], ends, None)]))
    with refuses("damaged", says=f"document {bad} ") as caught:
        dataset.document(bad)
    assert caught.value.given.name == "train-00000.documents.npy"


@pytest.mark.parametrize(
    ("array", "change"),
    [
        ("tokens", lambda content: content.replace(b"(7,), }", b"(7,),}", 1).replace(b" \n", b"  \n", 1)),
        ("tokens", lambda content: content.replace(b"'<u2'", b"'>u2'", 1)),
        ("tokens", lambda content: content.replace(b"False", b"True ", 1)),
        ("tokens", lambda content: content.replace(b"\x01\x00v", b"\x02\x00v", 1)),
        ("tokens", lambda content: content + b"\0"),
        ("tokens", lambda content: b""),
        *((array, lambda content: content[:128] + b"\1" + content[129:]) for array in ("documents", "sentences")),
    ],
)
def test_a_sealed_array_of_another_form_is_named_and_not_opened(sound, array, change):
    """The last two: the first offset is above zero."""
    path = sound / f"train-00000.{array}.npy"
    changed = change(path.read_bytes())
    assert changed != path.read_bytes()
    put_array(sound, array, changed)
    assert [fault for fault in verify(sound) if str(path) in fault]
    with refuses("damaged", says=str(path)):
        bertdata.open(sound)


@pytest.mark.parametrize("masking", [None, bertdata.Masking()])
@pytest.mark.parametrize(("dtype", "token"), [("<u2", 300), ("<u2", 65_535), ("<u4", 300), ("<u4", 2**32 - 1)])
def test_batches_never_hold_ids_outside_the_vocabulary(tmp_path, dtype, token, masking):
    out = write_dataset(tmp_path / "out", [([10, 11, token, 12, 13, 3], [6], None)], dtype=dtype)
    dataset = bertdata.open(out)
    loader = Loader(dataset, length=3, global_batch_size=1, masking=masking)
    refusals = []
    for position in range(6):
        try:
            assert loader.read(np.array([position])).input_ids.max() < 300
        except DatasetError as error:
            refusals.append((error.kind, error.given))
    assert refusals == [("damaged", out)]
    with refuses("damaged"):
        dataset.token_counts("train")


JUNK = [None, True, -1, 0, 1, 2**64, 1.5, "", "x", "<u8", [], [None], ["x"], {}, {"x": 1}]


def test_a_manifest_with_any_member_exchanged_is_refused_or_harmless(sound):
    manifest = unsealed(sound / "manifest.json")
    manifest["tokenizer"] = {"tokenizer.json": sha256(b"{}")}
    (sound / "tokenizer.json").write_bytes(b"{}")
    refused = tried = 0
    paths = list(members(manifest))
    assert ("splits", "train", 0, "arrays", "tokens", "dtype") in paths
    for number, path in enumerate(paths):
        for junk in JUNK[number % 3 :: 3]:
            tried += 1
            changed = with_member(manifest, path, junk)
            try:
                seal_manifest(sound, changed)
            except (TypeError, AttributeError, KeyError):  # it has no dataset_id
                seal(sound / "manifest.json", changed)
            refused += not use(sound, BertdataError)
            faults_of(sound)
    assert refused > tried // 2


SHARD = ("splits", "train", 0)
WRONG = [  # a member of a manifest of two shards, and values that contradict the rest
    ((*SHARD, "num_sentences"), [None]),
    ((*SHARD, "num_documents"), [0, 3]),
    ((*SHARD, "num_tokens"), [6]),
    (("special_tokens", "mask"), [300]),
    (("special_ids", 4), [300]),
    (("token_dtype",), ["<u4"]),
    (("separator_id",), [2, None]),
    (("splits",), [{}]),
    (("splits", "train"), [[], [1, 0], [0, 0], [0, 1, 0]]),  # numbers of shards
    (("format_version",), [3]),
]


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in WRONG for value in values])
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, path, value):
    sentences = [2, 4, 5, 7]
    out = write_dataset(tmp_path / "out", [([10, 11, 12, 3, 1, 20, 3], [4, 7], sentences)] * 2)
    manifest = unsealed(out / "manifest.json")
    if path[-1] == "train":
        value = [manifest["splits"]["train"][number] for number in value]
    changed = with_member(manifest, path, value)
    for dataset_id in (identity(changed), changed["dataset_id"]):
        seal(out / "manifest.json", changed | {"dataset_id": dataset_id})
        for read in (bertdata.open, verify):
            with refuses("other-version" if value == 3 and path == ("format_version",) else "damaged"):
                read(out)


def test_special_ids_that_are_not_those_of_the_tokenizer_are_named(dataset, manifest, tmp_path):
    """The dataset_id stays: it depends on the tokenizer's files."""
    shutil.copytree(dataset.path, tmp_path / "copy")
    roles = manifest["special_tokens"]
    for other in (roles | {"mask": 7}, {role: roles[role] for role in roles if role != "mask"}):
        seal(tmp_path / "copy" / "manifest.json", manifest | {"special_tokens": other})
        assert bertdata.open(tmp_path / "copy").dataset_id == dataset.dataset_id
        assert len(verify(tmp_path / "copy")) == 1
    for changed in ({"special_ids": [0, 1, 2, 3]}, {"vocab_size": 90}):
        seal(tmp_path / "copy" / "manifest.json", manifest | changed)
        (fault,) = verify(tmp_path / "copy")
        assert "manifest.json" in fault


@pytest.mark.parametrize("member", ["settings", "counts"])
def test_settings_and_counts_of_any_kind_give_a_sentence_or_facts(dataset, manifest, tmp_path, member):
    shutil.copytree(dataset.path, tmp_path / "copy")
    names = [*manifest[member], "map", "dtype", "imported"]
    values = [manifest[member] | {name: junk} for name in names for junk in (-5, "x", [5], {"a": "b"}, None)]
    for number, value in enumerate((5, [], {}, {"imported": "x"}, *values)):
        seal_manifest(tmp_path / "copy", manifest | {member: value})
        export = ["export", tmp_path / "copy", "--out", tmp_path / str(number)]
        for command in (["inspect", tmp_path / "copy"], export):
            assert invoke(main, *command).exit_code in (0, 1)
    seal_manifest(tmp_path / "copy", manifest | {member: 5})
    with refuses("damaged"):
        bertdata.open(tmp_path / "copy")


def test_a_commit_record_with_any_member_exchanged_is_named_or_harmless(sound):
    record = unsealed(sound / "train-00000.json")
    for number, path in enumerate(members(record)):
        junk = JUNK[number % 2 :: 2]
        named = 0
        for value in junk:
            seal(sound / "train-00000.json", with_member(record, path, value))
            named += any("train-00000" in fault for fault in verify(sound))
        assert named >= len(junk) - 1 or path[0] in ("input", "counts"), path


def test_of_many_small_shards_evenly_spaced_tokens_are_counted(tmp_path):
    """Two pieces, 8192 tokens apart: the first shard, and the rest of the ninth."""
    shards = [([10 + number] * 999 + [3], [1000], None) for number in range(12)]
    counts = bertdata.open(write_dataset(tmp_path / "out", shards)).token_counts("train", sample_tokens=8000)
    assert {token: int(counts[token]) for token in np.flatnonzero(counts).tolist()} == {3: 2, 10: 999, 18: 807}


def test_an_unknown_token_that_also_ends_documents_is_no_fault(tmp_path):
    model = models.WordLevel({"<|endoftext|>": 0, "the": 1}, unk_token="<|endoftext|>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("the zebra\n\nthe the\n")
    build(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "t.json"), validation=0)
    assert verify(tmp_path / "out") == []
