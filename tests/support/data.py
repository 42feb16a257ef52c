"""Text, vocabularies, datasets and batches that many tests make or compare."""

import copy
import hashlib
import json
import pickle
import random
import re
from functools import reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import bertdata
from bertdata import BertdataError, IdsFormat, Shares, SpecialTokens, TextFormat, Vocabulary
from bertdata.files import Stage
from bertdata.format.manifest import Manifest, Split
from bertdata.format.shards import ShardWriter
from bertdata.format.verify import verify
from bertdata.options import build_arguments
from support.disk import write

ROOT = Path(__file__).resolve().parents[2]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["the", "of", "and", "stone", "river", "light", "under", "morning", "bread", "letter", "wind", "house", "salt"]


def make_text(num_documents, *, seed=0):
    """Documents of one to twelve lines with a blank line between: words known, unknown, accented and foreign."""
    rng = random.Random(seed)
    words = [*WORDS, "Häuser", "naïve", "rivers", "12", "x-ray", "水"]
    documents = []
    for number in range(num_documents):
        lines = [" ".join(rng.choices(words, k=rng.randint(1, 9))) + "." for _ in range(rng.randint(1, 12))]
        documents.append(f"Document {number}.\n" + "\n".join(lines) + "\n")
    return "\n".join(documents)


SPECIAL = SpecialTokens(vocab_size=300, pad=0, unk=1, cls=2, sep=3, mask=4, special_ids=(0, 1, 2, 3, 4))


def built(folder, text, **options):
    """A dataset in folder/shards of a text, which is folder/text. options: of build."""
    (folder / "text").write_text(text, encoding="utf-8")
    return build(folder / "text", folder / "shards", **options).dataset


def byte_level_bpe(vocab_size, special):
    """A tokenizer of the library like those of GPT-2 and RoBERTa."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([make_text(60)], trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return tokenizer


def in_pairs(text):
    """A segmenter for --words support.data:in_pairs: two characters a word."""
    return [text[at : at + 2] for at in range(0, len(text), 2)]


def write_dataset(out, shards, *, special=SPECIAL, dtype="<u2", split="train", tokenizer=None, settings=None):
    """A sealed dataset of any arrays. shards: tokens, ends of documents, of sentences or None, and begins of words."""
    out.mkdir()
    entries, stage = [], Stage(out)
    for number, (tokens, documents, sentences, *words) in enumerate(shards):
        stored = sentences is not None
        writer = ShardWriter(stage, f"{split}-{number:05d}")
        ends = np.array(sentences, np.uint64) if stored else None
        writer.append(np.array(tokens, dtype), np.array(documents, np.uint64), ends, *words)
        entries.append(writer.finish(input_range=(0, 1), counts={"documents": len(documents)}))
    files = {}
    if tokenizer is not None:
        (out / "tokenizer.json").write_text(tokenizer)
        files["tokenizer.json"] = hashlib.sha256(tokenizer.encode()).hexdigest()
    splits = {split: Split.from_shards(entries)}
    Manifest(dtype, special, tokenizer=files, settings=settings or {}, splits=splits, counts={}).write(stage)
    stage.publish()
    return out


def word_list(name, encoding=None):
    """The texts that tests/word_lists.json lists under a name, as bytes of an encoding if one is given."""
    found = json.loads((ROOT / "tests" / "word_lists.json").read_text(encoding="utf-8"))[name]
    return [text.encode(encoding) for text in found] if encoding else found


def assert_same(one, other):
    """Two batches of a Loader have the same arrays."""
    assert one.arrays().keys() == other.arrays().keys()
    for name, array in one.arrays().items():
        assert np.array_equal(array, other.arrays()[name]), name


def assert_goes_on(make):
    """Check that `make()` resumes from every state, also as a pickle, and return all batches."""
    loader = make()
    states, pickled, batches = [json.dumps(loader.state_dict())], [pickle.dumps(loader)], []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.state_dict()))
        pickled.append(pickle.dumps(loader))
    assert max(map(len, pickled)) < 4096
    for step, (state, saved) in enumerate(zip(states, pickled, strict=True)):
        restored = make()
        restored.load_state_dict(json.loads(state))
        for rest in (list(restored), list(pickle.loads(saved))):  # noqa: S301
            assert len(rest) == len(batches) - step
            for expected, batch in zip(batches[step:], rest, strict=True):
                assert_same(expected, batch)
    return batches


def faults_of(path):
    """What verify finds wrong with a dataset, by whichever way it says it."""
    try:
        return verify(path)
    except BertdataError as error:
        return [str(error)]


def members(record, path=()):
    """The path of every value in a JSON record, outer ones first."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from members(value, (*path, name))


def with_member(record, path, value):
    """A copy of a JSON record with another value of the member that a path leads to."""
    record = copy.deepcopy(record)
    reduce(getitem, path[:-1], record)[path[-1]] = value
    return record


def data_of(html):
    """The data inside a page, which must be whole and small and ask for nothing.

    A browser knows no NaN, so there must be none.
    """
    (content,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert html.count("</script>") == 3
    assert len(html.encode()) < 2_000_000
    assert not re.search(r"""(src|href)\s*=\s*["']|<[^<>]*(src|href)\s*=|url\(|@import|fetch\(""", html)
    assert not re.search(r'https?://(?!www\.w3\.org/2000/svg")', html)
    return json.loads(content, parse_constant=pytest.fail)


def joined(texts):
    """A block of these documents as Tokenizer.encode takes it: bytes, and int64 offsets."""
    encoded = [text.encode() + b"\n" for text in texts]
    return b"".join(encoded), np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def ids_of(tokenizer, texts):
    """The ids of each document, without the separator that must be its last one if the tokenizer has one."""
    found, separator = tokenizer.encode(*joined(texts), sentences=False), tokenizer.special.separator
    documents = [found.ids[a:b].tolist() for a, b in pairwise(found.documents.tolist())]
    if separator is None:
        return documents
    assert all(ids[-1] == separator for ids in documents)
    return [ids[:-1] for ids in documents]


def plain(encoded):
    """All that an encoding is, as values to compare."""
    sentences = None if encoded.sentences is None else encoded.sentences.tolist()
    ids, documents = encoded.ids.tolist(), encoded.documents.tolist()
    return encoded.ids.dtype, ids, documents, sentences, encoded.special_ids_replaced


GOOD, BAD = ["river light", "the bread of morning", "light"], ["salt stone", "wind under stone", "salt"]


def write_labelled(path, *, repeat=1):
    """A table of the texts of GOOD and BAD with labels 1 and 0, between tabs."""
    return write(path, *[f"{text}\t{int(text in GOOD)}" for text in GOOD + BAD] * repeat)


def stored(dataset):
    """All ids of each document, separators included, in the order of the dataset."""
    documents = []
    for split in dataset.splits.values():
        for shard in split:
            tokens, offsets = (dataset.array(shard.name, array) for array in ("tokens", "documents"))
            documents += [tokens[a:b].tolist() for a, b in pairwise(offsets)]
    return documents


def build(inputs, out, **options):
    """bertdata.build, with options by their names on the command line."""
    return bertdata.build(inputs, out, **build_arguments(options))


def import_ids(inputs, out, **options):
    """bertdata.import_ids, with options by their names on the command line."""
    groups = {"ids": IdsFormat.pop_from(options), "shares": Shares.pop_from(options)}
    return bertdata.import_ids(inputs, out, **options, **groups)


def train_tokenizer(inputs, out, **options):
    """bertdata.train_tokenizer, with options by their names on the command line."""
    vocabulary, text = Vocabulary.pop_from(options), TextFormat.pop_from(options, documents="line")
    return bertdata.train_tokenizer(inputs, out, vocabulary, text=text, **options)
