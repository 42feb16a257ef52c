"""Samples of documents, packed and pairs, on lists: what each row holds."""

from reference.keys import below, draw, key


def best_fit(sizes, capacity):
    """Rows as lists of piece numbers. The largest piece comes first; each goes into the fullest row with room.

    Of several such rows it takes the one that was changed last.
    """
    rows, room, changed = [], [], []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        fitting = [row for row in changed if room[row] >= sizes[number]]
        if fitting:
            row = min(reversed(fitting), key=room.__getitem__)
            changed.remove(row)
        else:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(number)
        room[row] -= sizes[number]
        changed.append(row)
    return rows


def packed(documents, *, length, together, separators=1):
    """Rows of pieces. Pieces can share a row if they begin in the same `together` tokens of the stream."""
    areas, at = {}, 0
    for document in documents:
        for start in range(0, len(document), length - 2):
            areas.setdefault((at + start) // together, []).append(document[start : start + length - 2])
        at += len(document) + separators
    rows = []
    for area in areas.values():
        rows += [[area[n] for n in row] for row in best_fit([len(piece) + 2 for piece in area], length)]
    return rows


def packed_row(row, *, length, cls, sep):
    """The tokens of a row without its padding, and all its position_ids."""
    tokens = [token for piece in row for token in (cls, *piece, sep)]
    positions = [place for piece in row for place in range(len(piece) + 2)]
    return tokens, positions + list(range(length - len(tokens)))


def segment(documents, *, length, short_seq_prob, seed):
    """BERT's create_instances_from_document with keyed draws. documents: lists of sentences, which are lists of tokens.

    Returns pairs (document number, sentences of A, sentences of B or the number of tokens that a random B should have).
    """
    most, pairs = length - 3, []
    for number, document in enumerate(documents):
        k = key(seed, "pairs", 0, number)
        target = most
        if draw(k, 0) >> 32 < round(short_seq_prob * 2**32):
            target = 2 + below(draw(k, 1), most - 1)
        drawn, chunk, i = 2, [], 0
        while i < len(document):
            chunk.append(i)
            if i == len(document) - 1 or sum(len(document[s]) for s in chunk) >= target:
                a_end = 1 if len(chunk) == 1 else 1 + below(draw(k, drawn), len(chunk) - 1)
                a, b = chunk[:a_end], chunk[a_end:]
                if not b or draw(k, drawn + 1) >> 63 == 0:
                    pairs.append((number, a, max(1, target - sum(len(document[s]) for s in a))))
                    i -= len(b)
                else:
                    pairs.append((number, a, b))
                drawn, chunk = drawn + 2, []
            i += 1
    return pairs


def pair_row(pair, documents, *, sample_id, epoch, length, seed):
    """Returns A, B and whether B is random."""
    number, a, b = pair
    k = key(seed, "pairs", epoch + 1, sample_id)
    first = [token for s in a for token in documents[number][s]]
    if isinstance(b, list):
        second = [token for s in b for token in documents[number][s]]
    else:
        others = [(d, s) for d, document in enumerate(documents) if d != number for s in range(len(document))]
        d, s = others[below(draw(k, 0), len(others))]
        second = []
        for sentence in documents[d][s:]:
            second += sentence
            if len(second) >= b:
                break
    lost_a = lost_b = 0
    while len(first) + len(second) > length - 3:
        if len(first) > len(second):
            bit, lost_a = draw(k, 2**32 + lost_a // 64) >> lost_a % 64 & 1, lost_a + 1
            del first[0 if bit else -1]
        else:
            bit, lost_b = draw(k, 2 * 2**32 + lost_b // 64) >> lost_b % 64 & 1, lost_b + 1
            del second[0 if bit else -1]
    return first, second, not isinstance(b, list)
