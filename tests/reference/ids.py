"""Files of ids that other libraries write, and what an import makes of ids, number by number."""

import hashlib
import json
import struct

from reference import keys

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
LETTERS = {
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
}
MDS_CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33, "uint64": 64, "int64": 65}


def packed(ids, dtype):
    return b"".join(struct.pack("<" + LETTERS[dtype], token) for token in ids)


def megatron(documents, dtype):
    """The .bin and the .idx of documents, which are lists of sequences of ids, as IndexedDatasetBuilder writes them."""
    data, lengths, pointers, ends = b"", [], [], [0]
    for document in documents:
        for sequence in document:
            lengths.append(len(sequence))
            pointers.append(len(data))
            data += packed(sequence, dtype)
        ends.append(len(lengths))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(ends))
    index += b"".join(struct.pack("<i", length) for length in lengths)
    index += b"".join(struct.pack("<q", pointer) for pointer in pointers)
    index += b"".join(struct.pack("<q", end) for end in ends)
    return data, index


def llm_c(ids, magic, version, dtype):
    header = [magic, version, len(ids)] + [0] * 253
    return struct.pack("<256i", *header) + packed(ids, dtype)


def datatrove(documents, dtype):
    """The .ds and the .ds.index."""
    data, ends = b"", []
    for document in documents:
        data += packed(document, dtype)
        ends.append((ends[-1] if ends else 0) + len(document))
    return data, b"".join(struct.pack("<Q", end) for end in ends)


def samples_file(samples, description=b""):
    """A shard of MDS or a chunk of litdata: the number of samples, where each begins and the last ends, the samples."""
    start = 4 + 4 * (len(samples) + 1) + len(description)
    offsets = [start + sum(map(len, samples[:number])) for number in range(len(samples) + 1)]
    return packed([len(samples), *offsets], "uint32") + description + b"".join(samples)


def array_of_mds(ids, encoding):
    """The ids as a column of this encoding of MDS."""
    _, *parts = encoding.split(":")
    if encoding == "bytes":
        return packed(ids, "int64")
    dtype = parts[0] if parts else "int32"
    head = b"" if parts else struct.pack("<B", MDS_CODES[dtype])
    if len(parts) < 2:  # the number of axes and the width of a length, then the lengths
        width = 0 if len(ids) < 1 << 8 else 1
        head += struct.pack("<B", 1 << 2 | width) + struct.pack("<H" if width else "<B", len(ids))
    return head + packed(ids, dtype)


def mds(documents, encoding, *, per_shard=3, pack=None, hashes=(), name="input_ids", others=True):
    """Name of a file → bytes, of a dataset of MDS. pack: compresses a shard as zstd. others: columns beside the ids."""
    size = None
    if encoding.count(":") == 2:
        size = int(encoding.split(":")[2]) * len(packed([0], encoding.split(":")[1]))
    columns = {"a": ("str", None), name: (encoding, size), "n": ("int", 8)} if others else {name: (encoding, size)}
    description = {
        "column_names": list(columns),
        "column_encodings": [each for each, _ in columns.values()],
        "column_sizes": [each for _, each in columns.values()],
        "format": "mds",
        "version": 2,
        "compression": "zstd:3" if pack else None,
        "hashes": list(hashes),
    }
    files, shards = {}, []
    for first in range(0, len(documents), per_shard):
        samples = []
        for ids in documents[first : first + per_shard]:
            values = {"a": b"x" * (sum(ids) % 4), name: array_of_mds(ids, encoding), "n": struct.pack("<q", len(ids))}
            sizes = [len(values[each]) for each, (_, size) in columns.items() if size is None]
            samples.append(packed(sizes, "uint32") + b"".join(values[each] for each in columns))
        raw_name = f"shard.{len(shards):05}.mds"
        contents = {raw_name: samples_file(samples, json.dumps(description).encode())}
        if pack:
            contents[f"{raw_name}.zstd"] = pack(contents[raw_name])
        stated = [
            {
                "basename": each,
                "bytes": len(content),
                "hashes": {h: hashlib.new(h, content).hexdigest() for h in hashes},
            }
            for each, content in contents.items()
        ]
        raw, packed_ = [*stated, None][:2]
        shards.append(description | {"samples": len(samples), "raw_data": raw, "zip_data": packed_})
        files[stated[-1]["basename"]] = contents[stated[-1]["basename"]]
    return files | {"index.json": json.dumps({"version": 2, "shards": shards}).encode()}


def litdata(documents, leaf, dtype, *, per_chunk=3, loader="TokensLoader", name=None):
    """Name of a file → bytes, of a dataset of litdata. leaf: their type there. name: of the ids in a dict."""
    files, chunks = {}, []
    for first in range(0, len(documents), per_chunk):
        items = []
        for ids in documents[first : first + per_chunk]:
            content = packed(ids, dtype)
            beside = struct.pack("<q", len(ids)) if name else b""
            sizes = [len(content), len(beside)] if name else [len(content)]
            items.append(content if loader == "TokensLoader" else packed(sizes, "uint32") + content + beside)
        content = samples_file(items)
        size = sum(map(len, documents[first : first + per_chunk])) if loader == "TokensLoader" else None
        chunks.append(
            {
                "filename": f"chunk-0-{len(chunks)}.bin",
                "chunk_bytes": len(content),
                "chunk_size": len(items),
                "dim": size,
            }
        )
        files[chunks[-1]["filename"]] = content
    empty = {"type": None, "context": None, "children_spec": []}
    spec = empty
    if name:
        spec = {"type": "builtins.dict", "context": json.dumps([name, "length"]), "children_spec": [empty, empty]}
    config = {
        "compression": None,
        "encryption": None,
        "data_format": [leaf, "int"] if name else [leaf],
        "data_spec": json.dumps([1, spec]),
        "item_loader": loader,
    }
    return files | {"index.json": json.dumps({"chunks": chunks, "config": config}).encode()}


def split_at(ids, end_token):
    """The documents of nanoGPT."""
    documents = [[]]
    for token in ids:
        documents[-1].append(token)
        if token == end_token:
            documents.append([])
    return [document for document in documents if document]


def found(ids, token):
    """What the kernel find_token writes."""
    return [index + 1 for index, each in enumerate(ids) if each == token]


def special_counts(ids, special, vocab_size):
    """The counts of the kernel count_special, and what it returns."""
    counts = [0] * len(special)
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            return counts, index
        if token in special:
            counts[special.index(token)] += 1
    return counts, -1


def split_of(document, validation, test):
    """The split of a document whose ids are stored as uint16."""
    return keys.split(packed(document, "uint16"), validation=validation, test=test)


def units(documents, shard_size, itemsize):
    """The unit of each document that has ids, by the place of its first id."""
    place, found = 0, []
    for document in documents:
        if document:
            found.append(place * itemsize // shard_size)
        place += len(document)
    return found
