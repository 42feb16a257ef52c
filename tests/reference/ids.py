"""Files of ids that other libraries write, and what an import makes of ids, number by number."""

import struct

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def packed(ids, dtype):
    num_bytes = int(dtype.lstrip("uint")) // 8
    return b"".join(int(token).to_bytes(num_bytes, "little", signed=dtype[0] == "i") for token in ids)


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


def split_at(ids, end_token):
    """The documents of nanoGPT."""
    documents = [[]]
    for token in ids:
        documents[-1].append(token)
        if token == end_token:
            documents.append([])
    return [document for document in documents if document]


def units(documents, shard_size, itemsize):
    """The unit of each document that has ids, by the place of its first id."""
    place, found = 0, []
    for document in documents:
        if document:
            found.append(place * itemsize // shard_size)
        place += len(document)
    return found
