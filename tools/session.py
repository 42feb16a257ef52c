"""A session in a terminal as a picture: python tools/session.py [docs/session.svg]

Runs the commands for real, in a new directory, and writes what they print as an SVG in which each line appears when it
was printed; waits are shortened to a second. A program that plays no CSS animations shows the end. The text is the
docstrings of the installed packages. Takes about a minute on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from bertrain.commands import docstrings

COMMANDS = (
    "bertdata build corpus.txt --out shards --vocab-size 2000",
    "bertdata inspect shards",
    "bertrain pretrain --data shards --out run --length 64 --global-batch-size 32 --steps 300 --eval-every 150",
)
ROWS, COLUMNS = 34, 116  # of the window
HEIGHT, WIDTH, MARGIN = 17, 7.25, 14  # pixels of a line, of a letter of 12 pixels, and around the text
LONGEST = 1.0  # seconds between two lines


class Line(NamedTuple):
    """A line of the session, and the second that it appears."""

    text: str
    second: float


def recorded(folder: Path) -> list[Line]:
    """What the commands print in a directory, stdout and stderr together."""
    programs = Path(sys.executable).parent
    around = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": str(COLUMNS)}
    around |= {"PYTHONUNBUFFERED": "1"}
    lines, start = [], time.monotonic()
    for command in COMMANDS:
        lines += [Line("", time.monotonic() - start)] * bool(lines) + [Line(f"$ {command}", time.monotonic() - start)]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command.split(), cwd=folder, env=around, **pipe) as done:
            lines += [Line(line.rstrip(), time.monotonic() - start) for line in done.stdout]
        if done.returncode:
            sys.exit(f"{command} failed:\n" + "\n".join(line.text for line in lines))
    return lines


def shortened(lines: list[Line]) -> list[Line]:
    """The same lines with no wait longer than LONGEST, cut into pieces of COLUMNS letters."""
    now, made = 0.0, []
    for before, line in pairwise([Line("", 0.0), *lines]):
        now += min(line.second - before.second, LONGEST)
        made += [Line(line.text[at : at + COLUMNS], now) for at in range(0, len(line.text) or 1, COLUMNS)]
    return made


def picture(lines: list[Line]) -> str:
    """An SVG of a window in which the lines appear one after the other, and move up when it is full."""
    end = lines[-1].second + LONGEST
    width, height = round(COLUMNS * WIDTH) + 2 * MARGIN, ROWS * HEIGHT + 2 * MARGIN
    moves = {0.0: 0} | {line.second: row - ROWS + 1 for row, line in enumerate(lines) if row >= ROWS}
    frames = [f"{100 * second / end:.2f}%{{transform:translateY({-HEIGHT * up}px)}}" for second, up in moves.items()]
    last = f"translateY({-HEIGHT * max(moves.values())}px)"
    texts = [
        f'<text y="{HEIGHT * row + 12}" style="animation-delay:{line.second:.2f}s">{escape(line.text)}</text>'
        for row, line in enumerate(lines)
        if line.text
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
            f"<title>{escape('; '.join(COMMANDS))}</title>",
            "<style>text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#d8dee9;white-space:pre;"
            f"animation:show .01s backwards}}g{{transform:{last};animation:up {end:.2f}s step-end}}",
            "@keyframes show{from{opacity:0}}",
            f"@keyframes up{{{''.join(frames)}}}",
            "@media(prefers-reduced-motion){text,g{animation:none}}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#20242c"/>',
            f'<svg x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN}" height="{ROWS * HEIGHT}"><g>',
            *texts,
            "</g></svg></svg>\n",
        ]
    )


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        docstrings.write(Path(folder, "corpus.txt"), 5_000_000)
        lines = recorded(Path(folder))
    out.write_text(picture(shortened(lines)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["docs/session.svg"]))
