"""Slow and obvious: the merges of BPE (Sennrich et al., 2016)."""


def merged(ids, merges):
    """ids after all merges. merges: rank → (left, right, id). The lowest rank goes first, the leftmost of equals."""
    ids = list(ids)
    ranks = {(left, right): rank for rank, (left, right, _) in merges.items()}
    while True:
        found = [(ranks[pair], place) for place, pair in enumerate(zip(ids, ids[1:], strict=False)) if pair in ranks]
        if not found:
            return ids
        rank, place = min(found)
        ids[place : place + 2] = [merges[rank][2]]
