"""Tokenizers of any parts, and the `tokenizers` library as the reference of what they give."""

import json
from bisect import bisect_left
from itertools import accumulate

import numpy as np
from tokenizers import Tokenizer, trainers

import bertdata
from bertdata.tokenize.tokenizer import LoadedTokenizer
from support.commands import refuses
from support.data import joined, plain


def load(spec):
    """A LoadedTokenizer from a file, a directory or the hub."""
    return bertdata.Tokenizer.load(spec).loaded


def loaded(tokenizer, roles=None):
    """A LoadedTokenizer of a tokenizer of the library, or of its JSON."""
    if isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer.to_str()
    return LoadedTokenizer(json.dumps(tokenizer) if isinstance(tokenizer, dict) else tokenizer, roles)


def tokenizer_json(model, pre_tokenizer, normalizer=None, *, texts=(), edit=None, **options):
    """The JSON of a tokenizer, which is trained if there are texts. options: of the trainer, edit: changes the JSON."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    if texts:
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(show_progress=False, **options))
    else:
        tokenizer.add_special_tokens(options.get("special_tokens", []))
    content = json.loads(tokenizer.to_str())
    if edit:
        edit(content)
    return content


def by_library(tokenizer, texts, *, sentences=False):
    """What `plain` gives of an encoding, from the ids of the library and their places in each text.

    None: a text spells a special token, and there is no unknown one to replace it.
    """
    special, library = tokenizer.special, tokenizer.library
    forbidden, end = {*special.special_ids} - {special.unk}, [special.separator] * (special.separator is not None)
    ids, documents, begins, replaced = [], [0], [], 0
    encode = library.encode_batch if sentences else library.encode_batch_fast
    for text, encoding in zip(texts, encode(texts, add_special_tokens=False), strict=True):
        if sentences:
            newlines = [place for place, character in enumerate(text) if character == "\n"]
            lines = [bisect_left(newlines, start) for start, _ in encoding.offsets]
            seen = accumulate(lines, max, initial=-1)  # the last line that has an id before this one
            begins += [len(ids) + k for k, (line, last) in enumerate(zip(lines, seen, strict=False)) if line > last]
        replaced += sum(token in forbidden for token in encoding.ids)
        ids += [special.unk if token in forbidden else token for token in encoding.ids] + end
        documents.append(len(ids))
    if replaced and special.unk is None:
        return None
    return np.dtype(tokenizer.token_dtype), ids, documents, begins if sentences else None, replaced


def assert_exact(tokenizer, texts, *, sentences=False):
    """A tokenizer gives what the library gives for texts."""
    wanted = by_library(tokenizer, texts, sentences=sentences)
    if wanted is None:
        with refuses("tokenizer-lacks-token", "tokenizer"):
            tokenizer.encode(*joined(texts), sentences=sentences)
    else:
        assert plain(tokenizer.encode(*joined(texts), sentences=sentences)) == wanted
