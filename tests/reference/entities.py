"""Entities of a sentence's tags by the rules of conlleval, one rule a line: where an entity ends, where one begins."""


def ends(before, now):
    (last, kind), (letter, other) = before, now
    if last == "O":
        return False
    if last in "ES":
        return True
    return letter in "BSO" or kind != other


def begins(before, now):
    (last, kind), (letter, other) = before, now
    if letter == "O":
        return False
    if letter in "BS":
        return True
    return last in "OES" or kind != other


def entities(tags):
    split = [(tag[0], tag[2:]) for tag in tags] + [("O", "")]
    found, first, before = set(), None, ("O", "")
    for place, now in enumerate(split):
        if ends(before, now):
            found.add((first, place, before[1]))
        if begins(before, now):
            first = place
        before = now
    return found
