"""Runs the state machine of tests/test_states.py for longer: `python tools/states.py --steps 100000`.

Commands, kills, damage and two writers at once in any order; what is there after each must be what a model says. It
prints a JSON object of how many steps came to what, after each thousand. Exit code 1, and the order of steps, if one is
not.
"""

import json
import sys
import time
from pathlib import Path

import click

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import conftest  # noqa: E402, F401  (before numba, for its environment)
import hypothesis  # noqa: E402
from test_states import STEPS, campaign  # noqa: E402


@click.command()
@click.option("--steps", type=click.IntRange(1), default=100_000, show_default=True, help="How many steps, about.")
@click.option("--seconds", type=click.IntRange(1), default=1 << 30, help="Begins no machine after this time.")
@click.option("--seed", default=0, show_default=True, help="Another seed draws other steps.")
def main(steps: int, seconds: int, seed: int) -> None:
    hypothesis.settings.load_profile("long")
    began, counts = time.monotonic(), dict[str, int]()
    while sum(counts.values()) < steps and time.monotonic() - began < seconds:
        for what, number in campaign(1000 // STEPS, seed).items():
            counts[what] = counts.get(what, 0) + number
        seed += 1
        num_steps, duration = sum(counts.values()), round(time.monotonic() - began)
        line = {"steps": num_steps, "seconds": duration, "next_seed": seed, "of_these": counts}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
