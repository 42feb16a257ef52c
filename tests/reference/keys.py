"""docs/determinism.md in plain Python: a function for each of its definitions, on ints and lists."""

import math
from fractions import Fraction

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def absorb(h, word):
    return mix(((h ^ word) + GOLDEN) % WORD)


def purpose(name):
    return int.from_bytes(name.encode().ljust(8, b"\0"), "little")


def key(*words):
    """A purpose is given by its name."""
    h = 0
    for word in words:
        h = absorb(h, purpose(word) if isinstance(word, str) else word)
    return h


def draw(k, i):
    return mix((k + (i + 1) * GOLDEN) % WORD)


def below(x, n):
    return x * n // WORD


def below32(x, n):
    return (x >> 32) * n // 2**32


# --------------------------------------------------------------------------------------------------------------- mixes


def shares_before(block, weights):
    """How many of the positions before a block of a mix are of each source, with exact fractions."""
    left, counts = 100 * block, []
    for number, weight in enumerate(weights):
        counts.append(math.floor(left * Fraction(weight, sum(weights[number:])) + Fraction(1, 2)))
        left -= counts[-1]
    return counts


def mixed(position, *, weights, seed):
    """The source of a position, and the position in the source's own stream."""
    block, place = divmod(position, 100)
    before, after = shares_before(block, weights), shares_before(block + 1, weights)
    entries = [source for source in range(len(weights)) for _ in range(after[source] - before[source])]
    k = key(seed, "mix", block)
    for t in range(99, 0, -1):
        drawn = draw(k, t // 2)
        other = (drawn >> 32 if t % 2 else drawn % 2**32) * (t + 1) // 2**32
        entries[t], entries[other] = entries[other], entries[t]
    source = entries[place]
    return source, before[source] + entries[:place].count(source)


# ------------------------------------------------------------------------------------------------------------- order


def permute(x, *, num_samples, seed, epoch):
    return permuted(key(seed, "order", epoch), num_samples, x)


def permute_blocks(x, *, num_samples, block, seed, epoch):
    """Blocks are permuted; then the samples of each group of 64 blocks. The last group has all that is left."""
    num_blocks = num_samples // block
    num_groups = max(1, num_blocks // 64)
    group = min(x // (64 * block), num_groups - 1)
    start = group * 64 * block
    stop = num_samples if group == num_groups - 1 else start + 64 * block
    y = permuted(key(seed, "window", epoch, group), stop - start, x - start)
    if start + y >= num_blocks * block:
        return start + y
    return permuted(key(seed, "blocks", epoch), num_blocks, group * 64 + y // block) * block + y % block


def permuted(k, num_samples, x):
    b = max(6, (num_samples - 1).bit_length())
    lo = b // 2
    hi = b - lo
    while True:
        left, right = divmod(x, 2**lo)
        for r in range(8):
            if r % 2 == 0:
                left ^= draw(k, r * 2**32 + right) >> (64 - hi)
            else:
                right ^= draw(k, r * 2**32 + left) >> (64 - lo)
        x = left * 2**lo + right
        if x < num_samples:
            return x


def sample(position, *, num_samples, seed):
    """The epoch and the sample id of a position."""
    epoch, x = divmod(position, num_samples)
    return epoch, permute(x, num_samples=num_samples, seed=seed, epoch=epoch)


# ----------------------------------------------------------------------------------------------------------- samples


def phase(*, seed, variant, num_tokens):
    return below(key(seed, "phase", variant), num_tokens)


def windows(stream, *, text_length, seed, variant):
    """All samples of an epoch: turn the stream until the phase is in front, then cut it."""
    first = phase(seed=seed, variant=variant, num_tokens=len(stream))
    turned = stream[first:] + stream[:first]
    return [turned[at : at + text_length] for at in range(0, len(turned), text_length)]


# ------------------------------------------------------------------------------------------------------------- masks


def quota(*, n, p, rounding="nearest", min_targets=0, max_targets=None):
    """Places to select in a row with n filled places."""
    c = {"nearest": math.floor(p * n + 0.5), "even": round(p * n), "floor": math.floor(p * n)}[rounding]
    c = max(c, min_targets)
    return max(0, min(c, n - 2) if max_targets is None else min(c, n - 2, max_targets))


def num_slots(*, length, p, policy, **rule):
    n = length - 2
    if policy == "uniform":
        return quota(n=length, p=1, **rule)
    if policy != "bernoulli":
        return quota(n=length, p=p, **rule)
    if p == 0:
        return 0
    room = min(n, math.ceil(p * n + 6 * math.sqrt(p * (1 - p) * n)) + 1)
    return room if rule.get("max_targets") is None else min(room, rule["max_targets"])


def select_exact(k, candidates, c):
    m = len(candidates)
    selected = set()
    for j in range(c):
        t = below32(draw(k, 2**32 + j), m - c + j + 1)
        selected.add(m - c + j if t in selected else t)
    return [candidates[t] for t in sorted(selected)]


def amount(k, most):
    """How many places the policy "uniform" selects."""
    return 1 + below32(draw(k, 2**33), most) if most else 0


def select_bernoulli(k, candidates, p):
    return [t for t in candidates if draw(k, t) >> 32 < round(p * 2**32)]


def words_of(row, special, continues, inside, begins, most):
    """Words as lists of places: candidates side by side, split before each place that does not continue a word.

    continues: ids that continue a word. inside, begins: places that are stored as continuing, or beginning, a word.
    most: places of a word; None: any number, by rule 1.
    """
    words = []
    for t, token in enumerate(row):
        if token in special:
            continue
        is_inside = t in inside or (token in continues and (most is None or t not in begins))
        if is_inside and t > 0 and row[t - 1] not in special:
            words[-1].append(t)
        else:
            words.append([t])
    if most is None:
        return words
    return [part for word in words for part in ([word] if len(word) <= most else [[t] for t in word])]


def select_words(k, words, c, rule):
    words, selected, left_out = list(words), [], []
    for j in range(len(words)):
        r = j + below32(draw(k, 2**32 + j), len(words) - j)
        words[j], words[r] = words[r], words[j]
        if len(selected) + len(words[j]) <= c:
            selected += words[j]
        else:
            left_out.append(words[j])
    if rule == 2 and len(selected) < c / 2 and left_out:
        word, first = left_out[0], below32(draw(k, 2**33), len(left_out[0]))
        selected += (word[first:] + word[:first])[: c - len(selected)]
    return sorted(selected)


def span_bounds():
    """Bounds of 32 bits: below the first a span has one word, below the second at most two, ..., at most nine."""
    weights = [0.2 * 0.8**words for words in range(10)]
    return [round(sum(weights[:words]) / sum(weights) * 2**32) for words in range(1, 10)]


def select_spans(k, words, c):
    selected = []
    for attempt in range(64 + 16 * c):
        if len(selected) == c:
            break
        u = draw(k, 2**32 + 2 * attempt) >> 32
        first = below32(draw(k, 2**32 + 2 * attempt + 1), len(words))
        last = None
        for word in words[first : first + 1 + sum(u >= bound for bound in span_bounds())]:
            if word[0] in selected or len(selected) == c or last not in (None, word[0] - 1):
                break
            last = word[-1]
            selected += word[: c - len(selected)]
    return sorted(selected)


def mask(
    row,
    *,
    length,
    seed,
    variant,
    sample_id,
    special,
    mask_id,
    vocab_size,
    p=0.15,
    policy="exact",
    shares=(0.8, 0.1),
    continues=(),
    inside=(),
    begins=(),
    pool=None,
    rule=1,
    **amounts,
):
    """row: the filled places, [CLS] and [SEP] included. Returns the masked row, the selected places, and their ids.

    pool: ids that replace others at random; None: all that are not special.
    """
    k = key(seed, "mask", variant, sample_id)
    candidates = [t for t, token in enumerate(row) if token not in special]
    c = min(len(candidates), quota(n=len(row), p=1 if policy == "uniform" else p, **amounts))
    if policy == "uniform":
        places, shares = select_exact(k, candidates, amount(k, c)), (1, 0)
    elif policy == "exact":
        places = select_exact(k, candidates, c)
    elif policy == "bernoulli":
        places = select_bernoulli(k, candidates, p)[: num_slots(length=length, p=p, policy=policy, **amounts)]
    else:
        most = None if rule == 1 else min(16, c) if policy == "span" else 16
        words = words_of(row, special, continues, inside, begins, most)
        places = select_words(k, words, c, rule) if policy == "whole_word" else select_spans(k, words, c)
    pool = sorted(set(range(vocab_size)) - set(special) if pool is None else pool)
    masked_below, random_below = round(2**32 * shares[0]), round(2**32 * (shares[0] + shares[1]))
    changed = list(row)
    for t in places:
        first = t
        while policy == "span" and first - 1 in places:
            first -= 1
        low_bits = draw(k, first) % 2**32
        if low_bits < masked_below:
            changed[t] = mask_id
        elif low_bits < random_below:
            if policy == "span":
                changed[t] = pool[below32(draw(k, t), len(pool))]
            else:
                changed[t] = pool[(low_bits - masked_below) * len(pool) // (random_below - masked_below)]
    return changed, places, [row[t] for t in places]


# -------------------------------------------------------------------------------------------------------------- text


def text_hash(data):
    h = key("split")
    for place in range(0, len(data), 8):
        word = int.from_bytes(data[place : place + 8].ljust(8, b"\0"), "little")
        h = (h ^ word) * GOLDEN % WORD
        h ^= h >> 32
    return mix(h ^ len(data))


def split(data, *, validation, test):
    u = text_hash(data) >> 32
    if u < round(validation * 2**32):
        return "validation"
    return "test" if u < round((validation + test) * 2**32) else "train"
