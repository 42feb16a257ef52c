"""docs/determinism.md, "Phases of a run", in plain Python: what holds at each step of a run's schedule."""

import math
from fractions import Fraction

RATE = {"lr", "lr_end", "schedule", "decay_share", "warmup"}


def exact(number):
    return Fraction(str(number))


def amount(text):
    if str(text)[-1] in "KMBT":
        return exact(text[:-1]) * 1000 ** ("KMBT".index(text[-1]) + 1)
    return exact(text)


def ends(rows):
    first, _, last = str(rows).partition("..")
    return int(first), int(last or first)


def rows_at(rows, i, n):
    a, z = ends(rows)
    g = math.gcd(a, z)
    if z >= a:
        return a + g * (i * ((z - a) // g + 1) // n)
    return a - g * (i * ((a - z) // g + 1) // n)


def borders(run, phases, samples):
    """run: options above the phases. phases: those of each phase, with all that holds in it. samples: N."""
    means = [Fraction(sum(ends(phase["global_batch_size"])), 2) for phase in phases]
    has_shares = not phases[0].keys() & {"steps", "tokens", "epochs"}
    shares, left = [], Fraction(1)
    for phase in phases:
        shares.append(exact(phase["share"]) if "share" in phase else left)
        left -= shares[-1]
    if has_shares and "tokens" not in run:
        of_share = sum(share * mean for share, mean in zip(shares, means, strict=True))
        total = run.get("steps") or math.ceil(exact(run.get("epochs", 1)) * samples / of_share)
        return [0] + [round(total * sum(shares[: k + 1])) for k in range(len(phases))]
    found = [0]
    for phase, mean, share in zip(phases, means, shares, strict=True):
        tokens = share * amount(run["tokens"]) if has_shares else amount(phase.get("tokens", 0))
        epochs = exact(phase.get("epochs", 0))
        steps = math.ceil(tokens / (phase["length"] * mean)) + math.ceil(epochs * samples / mean)
        found.append(found[-1] + steps + phase.get("steps", 0))
    return found


def factor(schedule, i, n, w, decay_share):
    if schedule == "constant":
        return 1
    if schedule == "linear":
        return (n - i) / (n - w)
    if schedule == "cosine":
        return 0.5 * (1 - math.cos(math.pi * (n - i) / (n - w)))
    if schedule == "1-sqrt":
        return 1 - math.sqrt((i - w) / (n - w))
    d = min(n - w, max(1, math.ceil(decay_share * n)))
    return 1 if n - i > d else 1 - math.sqrt((d - (n - i)) / d)


def table(run, tables, samples=1000):
    """For each step of the schedule: the number of its phase, its rows, and its learning rate.

    run: options above the phases, all that matter here among them. tables: the phases as they are written.
    """
    phases = [run | phase for phase in tables]
    for phase, written in zip(phases, tables, strict=True):
        for unit in ("steps", "tokens", "epochs", "share"):
            if unit not in written:
                phase.pop(unit, None)
    border = borders(run, phases, samples)
    lines = []
    curve = None
    for k, phase in enumerate(phases):
        if k == 0 or RATE & tables[k].keys():
            later = [j for j in range(k + 1, len(phases)) if RATE & tables[j].keys()]
            start, stop = border[k], border[later[0] if later else -1]
            w = round(exact(phase["warmup"]) * (stop - start)) if k == 0 or "warmup" in tables[k] else 0
            curve = phase, start, stop - start, w
        for step in range(border[k], border[k + 1]):
            settings, start, n, w = curve
            i = step - start
            e = settings["lr_end"]
            rate = settings["lr"] * (i + 1) / (w + 1)
            if i >= w:
                rate = settings["lr"] * (e + (1 - e) * factor(settings["schedule"], i, n, w, settings["decay_share"]))
            rows = rows_at(phase["global_batch_size"], step - border[k], border[k + 1] - border[k])
            lines.append((k + 1, rows, rate))
    return lines
