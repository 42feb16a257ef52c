"""Breaks the product in drawn places, and says whether the tests notice.

    python tools/mutate.py lines --out lines.json              which fast test executes which line; takes minutes
    python tools/mutate.py run lines.json --out mutations.json --count 60 --seed 0 --fast
    python tools/mutate.py run lines.json --out mutations.json --count 60 --seed 0
    python tools/mutate.py table mutations.json                how many were found, and those that were not

Six kinds of mutation, the same number of each, at places that a seeded generator draws from executed lines: a sign, a
bound, a missing fsync, a dtype, a dropped term, and an option that is ignored; never an annotation, nor the options of
compiling. Each is tried in a copy of the project: first the fast tests that execute the line (all fast tests for a
line that only fixtures and imports execute), then the slow tests, unless --fast leaves these out. Python does not see
which lines of a compiled kernel are executed: all of them count, and KERNEL_TESTS names the tests of files that are
compiled. A mutation that changes nothing that a test could see is listed in EQUIVALENT with the reason.

Needs the package coverage, which the extra `dev` has. A run that was stopped goes on from the results in --out.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

ROOT = Path(__file__).parent.parent
FAST, SLOW = "not slow and not gpu and not dry and not outside", "slow and not gpu"
LIMIT_S = {FAST: 400, SLOW: 1500}
KERNEL_TESTS = {
    "bertdata/bits.py": ["kernels", "text", "engine", "words"],
    "bertdata/read/kernels/": ["kernels", "samples", "loader", "mix", "large", "words", "promises"],
    "bertdata/sources/kernels.py": ["text", "inputs", "formats", "split", "import", "kernels"],
    "bertdata/tokenize/kernels/": ["engine", "words", "tokens", "text", "kernels", "build"],
    "bertdata/write/kernels.py": ["kernels", "build", "import", "prepare"],
}
"""A file of kernels, or a folder of such -> the files of their tests."""
COMPILED = ("jit", "part", "inline")
"""Decorators of functions that are compiled."""
EQUIVALENT = {
    (
        "bertdata/bits.py dtype: types.int64 -> types.int32",
        "return types.int64(types.uint64), generate",
    ): "the number is at most 64, and llvmlite has made a word of 64 bits of it, which it leaves as it is",
    (
        "bertdata/bits.py dtype: types.int64 -> types.int32",
        "return types.void(array, types.int64), generate",
    ): "asking the processor to load other bytes early changes no value",
    (
        "bertdata/read/kernels/draws.py dtype: np.uint64 -> np.uint32",
        "LOW32 = np.uint64(0xFFFFFFFF)",
    ): "it has 32 bits, and meets only numbers of 64, which decide the type",
    (
        "bertdata/read/kernels/masks.py dtype: np.int64 -> np.int32",
        "starts, stops = np.empty(length, np.int64), np.empty(length, np.int64)",
    ): "they hold places of one row",
    (
        "bertdata/read/kernels/masks.py dtype: np.int64 -> np.int32",
        "m -= np.int64(kinds[uint64(row[t])] & MASKABLE) ^ 1",
    ): "it is 0 or 1",
    (
        "bertdata/read/kernels/order.py dtype: np.int64 -> np.int32",
        "last_epoch, last_group, block_key, group_key = np.int64(-1), np.int64(-1), U0, U0",
    ): "the variable has 64 bits, as it is given others later",
    (
        "bertdata/read/kernels/rows.py dtype: np.int64 -> np.int32",
        '("row", np.int64),  # row of the batch',
    ): "a batch has at most 2^24 rows",
    (
        "bertdata/tokenize/engine.py dtype: np.int64 -> np.int32",
        "ids = np.concatenate([np.zeros(0, np.int64), *(encoded[number] for number in kept)])",
    ): "it has no elements, and those of the other arrays decide the type",
    (
        "bertdata/tokenize/forms.py bound: 0x1100 -> 4353",
        "composed = any(0x1100 <= ord(c) < 0x1200 for c in form) or 0xD7B0 <= ord(point) < 0xD800",
    ): "U+1100 begins a syllable: nothing before it changes it, and the letters after it are found themselves",
    (
        "bertdata/tokenize/kernels/records.py dtype: np.uint64 -> np.uint32",
        "SILENT, LETTER, BREAK, ALONE, HARD = (np.uint64(n) for n in range(1, 6))",
    ): "the numbers are 1 to 5, and meet only numbers of 64 bits, which decide the type",
    (
        "bertdata/tokenize/kernels/added.py dtype: np.uint8 -> np.uint16",
        "hazard, after, before = hazards[point], np.uint8(1), np.uint8(1)",
    ): "they are only compared with numbers of eight bits",
    (
        "bertdata/tokenize/added.py bound: 256 -> 257",
        "self._adjacent = np.zeros((256, 256), np.bool_)",
    ): "the largest number of a character is 255",
    (
        "bertdata/tokenize/kernels/unigram.py bound: 1 -> 2",
        "unknown_stop = -1",
    ): "any negative number says that nothing is unknown",
    (
        "bertdata/tokenize/models.py dtype: np.int64 -> np.int32",
        "is_full = not add_pairs(left.astype(np.int64), right.astype(np.int64), rank.astype(np.int64), table)",
    ): "ids have at most 20 bits",
    (
        "bertdata/tokenize/models.py dtype: np.int64 -> np.int32",
        "ids = np.array([token_id for _, _, token_id in ordered], np.int64)",
    ): "ids have at most 20 bits",
    (
        "bertdata/write/importing.py sign: -1 -> (1)",
        "borders = np.append(np.append(-1, np.flatnonzero(self._number_of >= 0)), vocab_size)",
    ): "the range without special ids may lack two ids, which are then counted one by one",
    (
        "bertdata/write/kernels.py dropped term: i < half and j < out.size -> (j < out.size)",
        "if i < half and j < out.size:",
    ): "with the first half done fewer than 8 bytes of its last document are left, so the loop behind it does nothing",
    (
        "bertrain/lab/distillation/objective.py sign: -1 -> (1)",
        "losses = losses + (kl * filled).sum(-1) / (3 * filled.sum(-1))",
    ): "the arrays have two axes, so that the last is axis 1",
    (
        "bertrain/lab/distillation/objective.py sign: -2 -> (2)",
        "return (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])",
    ): "the array has four axes, so that the last but one is axis 2",
    (
        "bertrain/commands/doctor.py bound: 1 -> 2",
        "kept = 12 + 1.5 * inner / max(1, width) if is_lean else 20 + 4 * inner / max(1, width)",
    ): "no model has one dimension, and one that states none has an inner size of 0",
    (
        'bertrain/lab/elastic/search.py dropped term: result is None or result["loss"] is None -> '
        "(result['loss'] is None)",
        'if result is None or result["loss"] is None:',
    ): "only an evaluation that may be interrupted gives None; the term is for mypy",
    (
        "bertrain/run/run.py dropped term: self.training.compiles or on_gpu -> (self.training.compiles)",
        "self.clock = Clock(begun.seconds, compiles=self.training.compiles or on_gpu)",
    ): "without a GPU both are the same, and with one only what a time is called differs",
    (
        "bertdata/write/cluster.py bound: 1 -> 2",
        "@lru_cache(maxsize=1)",
    ): "it keeps what the tasks of another build share, too",
    (
        "bertdata/sources/tables.py dtype: np.int64 -> np.int32",
        "lengths = np.zeros(len(column), np.int64)",
    ): "a text has less than 2^31 bytes, and their sums are made of 64 bits",
    (
        "bertdata/tokenize/engine.py dtype: np.int64 -> np.int32",
        "bounds = np.append(0, np.cumsum([encoded[number].size for number in kept], dtype=np.int64))",
    ): "they are of some thousand runs",
    (
        "bertdata/tokenize/models.py bound: 1 -> 2",
        '"pairs": np.full(1, records.EMPTY),',
    ): "no pair is found in a table that has none, whatever its size",
    (
        "bertdata/tokenize/kernels/tries.py dtype: np.int32 -> np.int64",
        "first_child, next_sibling, last_child = np.zeros(most, np.int32), np.zeros(most, np.int32), "
        "np.zeros(most, np.int32)",
    ): "they are numbers of nodes, and 32 bits are enough",
    (
        "bertdata/sources/blocks.py bound: 12 -> 13",
        "MOST_PIECES = 1 << 12  # of files in a block: each takes 2 KB beside its text",
    ): "how many come together changes no document",
    (
        "bertdata/read/kernels/order.py sign: -1 -> (1)",
        "last_epoch, last_group, block_key, group_key = np.int64(-1), np.int64(-1), U0, U0",
    ): "the other one of the two is still less than any number there is",
    (
        "bertdata/read/kernels/order.py bound: 1 -> 2",
        "block_start = np.int64(-(1 << 62))",
    ): "that is as far from every position",
    (
        "bertdata/write/duplicates.py dtype: np.int64 -> np.int32",
        "bounds = np.append(0, np.cumsum(np.bincount(first_bytes.astype(np.int64), minlength=_FILES)))",
    ): "they are bytes",
    (
        "bertdata/tokenize/words.py dtype: np.uint8 -> np.uint16",
        "ascii_classes = (entries & np.uint64(0xFF)).astype(np.uint8)",
    ): "they have 8 bits, and the kernels take numbers of any size",
    (
        "bertdata/tokenize/added.py dropped term: blurs and b < 128 and self._hazard(b) > 0 -> (self._hazard(b) > 0)",
        "watched = np.array([b >= 0xC0 or (blurs and b < 128 and self._hazard(b) > 0) for b in range(256)])",
    ): "a byte that is watched for nothing takes time alone",
    (
        "bertdata/read/stream.py dtype: np.uint8 -> np.uint16",
        "inside_word = np.zeros(ids.shape, np.uint8) if inside_word is None else inside_word",
    ): "they are 0 and 1, and the kernels take numbers of any size",
    (
        "bertdata/read/kernels/order.py dtype: np.int64 -> np.int32",
        "other = np.int64(below32(bits, uint64(place + 1)))",
    ): "it is a place in a block",
    (
        "bertdata/tokenize/kernels/merges.py dtype: np.int32 -> np.int64",
        "return np.int32(rank << 5 | place) if rank != NO_RANK else NO_LANE",
    ): "it is stored with 32 bits",
    (
        "bertdata/read/kernels/rows.py dropped term: place + length -> (place)",
        'out = ids[span["row"], place : place + length]',
    ): "it begins at the same place, and only `make bounds` checks where an array ends",
    (
        "bertdata/sources/buffer.py sign: formats.BLOCK_BYTES + formats.BLOCK_BYTES // 4 -> "
        "(formats.BLOCK_BYTES - formats.BLOCK_BYTES // 4)",
        "size = formats.BLOCK_BYTES + formats.BLOCK_BYTES // 4",
    ): "a buffer that is too small is made larger when more is read",
}
"""Mutation without its line's number, and the text of its line → why no test can see it."""

BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
TERMS = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)
TYPES = {
    "int64": "int32",
    "int32": "int64",
    "uint16": "uint8",
    "uint32": "uint16",
    "uint64": "uint32",
    "uint8": "uint16",
    "float64": "float32",
    "float32": "float64",
}


class Mutation(NamedTuple):
    """A change of one expression or statement of one file; old and new are text, the position is in the old file."""

    kind: str
    file: str  # from the root of the project
    line: int
    text: str  # of the line, without the indentation
    begin: int  # offsets in the bytes of the file
    end: int
    new: str
    old: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self._change}"

    @property
    def key(self) -> tuple[str, str]:
        """What names it in EQUIVALENT; the same for equal changes in equal lines of a file."""
        return f"{self.file} {self._change}", self.text

    @property
    def _change(self) -> str:
        return f"{self.kind}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


# --- the mutations


def mutations_of(file: str, source: str) -> Iterator[Mutation]:
    """Every mutation of a file that this tool knows."""
    starts, content = [0], source.encode()
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(kind: str, node: ast.expr | ast.stmt, new: str) -> Mutation:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]  # ast.parse sets both
        text = content[starts[node.lineno - 1] : starts[node.lineno]].decode().strip()
        return Mutation(kind, file, node.lineno, text, begin, end, new, content[begin:end].decode())

    def text(node: ast.AST) -> str:
        return f"({ast.unparse(node)})"

    tree = ast.parse(source)
    left_out = {id(part) for node in ast.walk(tree) for part in (*_annotations(node), *_compiling(node))}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        match node:
            case ast.BinOp(left=left, op=op, right=right) if not _is_text(node):
                if type(op) in SIGNS:
                    changed = ast.BinOp(left, SIGNS[type(op)](), right)
                    yield change("sign", node, text(changed))
                if isinstance(op, TERMS):
                    yield change("dropped term", node, text(left))
                    yield change("dropped term", node, text(right))
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield change("sign", node, text(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in BOUNDS:
                yield change("bound", node, text(ast.Compare(left, [BOUNDS[type(op)]()], [right])))
            case ast.BoolOp(values=[first, *others]):
                yield change("dropped term", node, text(first))
                yield change("dropped term", node, text(others[-1]))
            case ast.Constant(value=int(value)) if not isinstance(value, bool) and value > 0:
                yield change("bound", node, str(value + 1))
            case ast.Attribute(value=owner, attr=attr) if attr in TYPES:
                yield change("dtype", node, f"{ast.unparse(owner)}.{TYPES[attr]}")
            case ast.Expr(value=ast.Call(func=function)) if "fsync" in ast.unparse(function):
                yield change("missing fsync", node, "pass")
            case ast.Call(func=function, args=args, keywords=[_, *_] as keywords):
                for at, keyword in enumerate(keywords):
                    if keyword.arg and keyword.arg not in ("help", "metavar", "short_help", "kind", "given"):
                        rest = [other for number, other in enumerate(keywords) if number != at]
                        yield change("ignored option", node, ast.unparse(ast.Call(function, args, rest)))


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
        if part is not None:
            yield from ast.walk(part)


def _compiling(node: ast.AST) -> Iterator[ast.AST]:
    """The decorators that compile, whose options change the speed alone."""
    for part in getattr(node, "decorator_list", []):
        if ast.unparse(part).partition("(")[0] in COMPILED:
            yield from ast.walk(part)


def _is_text(node: ast.BinOp) -> bool:
    texts = (ast.JoinedStr, ast.Constant)
    return any(
        isinstance(side, texts) and not isinstance(getattr(side, "value", None), int | float)
        for side in (node.left, node.right)
    )


def lines_of_kernels(source: str) -> set[int]:
    """The lines of functions that are compiled."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    compiled = [node for node in functions if any(_compiling(node))]
    return {line for node in compiled for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


def sources() -> Iterator[tuple[str, str]]:
    """The files of the product, and what they hold."""
    for path in sorted([*(ROOT / "bertdata").rglob("*.py"), *(ROOT / "bertrain").rglob("*.py")]):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def equivalent() -> set[str]:
    """The mutations that EQUIVALENT names, as `run` prints them. Refuses a name of none."""
    named = [mutation for file, source in sources() for mutation in mutations_of(file, source)]
    named = [mutation for mutation in named if mutation.key in EQUIVALENT]
    if stale := EQUIVALENT.keys() - {mutation.key for mutation in named}:
        lines = "\n".join(sorted(" in ".join(key) for key in stale))
        raise click.ClickException(f"EQUIVALENT names what is no mutation of the source; correct it:\n{lines}")
    return {str(mutation) for mutation in named}


def drawn(executed: dict[str, dict[str, list[str]]], count: int, seed: int) -> list[Mutation]:
    """`count` mutations of executed lines, as many of each kind as there are, never two in one line."""
    of_kind: dict[str, list[Mutation]] = {}
    for file, source in sources():
        lines = {int(line) for line in executed.get(file, {})} | lines_of_kernels(source)
        for mutation in mutations_of(file, source):
            if mutation.line in lines:
                of_kind.setdefault(mutation.kind, []).append(mutation)
    draw, taken, chosen = random.Random(seed), set[tuple[str, int]](), list[Mutation]()
    for kind in sorted(of_kind):
        draw.shuffle(of_kind[kind])
    while len(chosen) < count and any(of_kind.values()):
        for kind in sorted(of_kind):
            while of_kind[kind]:
                mutation = of_kind[kind].pop()
                if (mutation.file, mutation.line) not in taken:
                    taken.add((mutation.file, mutation.line))
                    chosen.append(mutation)
                    break
    return chosen[:count]


# --- the tests


def copy_of_project(folder: Path) -> Path:
    """A copy with the compiled kernels of the project's own tests, whose files keep their times."""
    copy = folder / "project"
    left_out = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", "*.egg-info", "site", "dist", ".bench")
    shutil.copytree(ROOT, copy, ignore=left_out)
    return copy


def passes(copy: Path, marks: str, tests: list[str], *, workers: int) -> bool:
    """Whether tests pass in a copy, all of those with the marks if none is named. Tests that do not end fail."""
    parallel = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    # A test of this tool compares the source with EQUIVALENT, and would fail for what it does not execute.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        marks,
        "--ignore=tests/test_mutate.py",
        *parallel,
        *tests,
    ]
    environment = os.environ | {"PYTHONPATH": str(copy), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait(LIMIT_S[marks])
        if code == 4 and subprocess.run([*command, "--collect-only"], cwd=ROOT, check=False).returncode == 4:
            raise click.ClickException(f"pytest does not take {' '.join(tests)}; run `lines` again")
        return code in (0, 5)  # 5: none of the tests was collected; 4 here: tests/conftest.py cannot be imported
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def found_by(mutation: Mutation, tests: list[str], *, with_slow: bool, workers: int) -> str:
    """The first set of tests that fails: fast, slow or none; "not fast" if the slow ones were not tried."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_project(Path(folder))
        path = copy / mutation.file
        content = path.read_bytes()
        path.write_bytes(content[: mutation.begin] + mutation.new.encode() + content[mutation.end :])
        if not passes(copy, FAST, tests, workers=workers):
            return "fast"
        if not with_slow:
            return "not fast"
        return "none" if passes(copy, SLOW, [], workers=workers) else "slow"


# --- this file as a plugin of pytest: lines that a test executes are of its name, without its parameters


def switch_context(name: str) -> None:
    import coverage

    current = coverage.Coverage.current()
    assert current is not None, "tests run under coverage"
    current.switch_context(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    switch_context(item.nodeid.partition("[")[0])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    switch_context("")


# --- the commands


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--out", required=True, help="JSON file for file -> line -> tests.")
def lines(out: str) -> None:
    """Run the fast tests once, and write which test executes which line."""
    import coverage

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "coveragerc"
        settings.write_text(f"[run]\ndata_file = {folder}/data\nsource = {ROOT}/bertdata,{ROOT}/bertrain\n")
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", "-m", FAST]
        around = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run([*command, "-p", "mutate", "-n", "0"], cwd=ROOT, env=around, check=False)
        data = coverage.CoverageData(f"{folder}/data")
        data.read()
        executed = {
            Path(file).relative_to(ROOT).as_posix(): {
                line: sorted(filter(None, names)) for line, names in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
    Path(out).write_text(json.dumps(executed))


@main.command()
@click.argument("lines_file")
@click.option("--out", required=True, help="JSON file for the results, one line each; those that it has are kept.")
@click.option("--count", default=60, help="Number of mutations.")
@click.option("--seed", default=0, help="Seed of what is drawn.")
@click.option("--workers", default=2, help="Processes that run tests together.")
@click.option("--minutes", default=600.0, help="Begin no mutation after this time.")
@click.option("--fast", is_flag=True, help="Leave the slow tests out.")
def run(lines_file: str, out: str, count: int, seed: int, workers: int, minutes: float, fast: bool) -> None:
    """Try mutations of the lines that `lines` found."""
    executed, results, begun = json.loads(Path(lines_file).read_text()), Path(out), time.monotonic()
    known, unseen = results_in(results), equivalent()
    for mutation in drawn(executed, count, seed):
        has_result = str(mutation) in known and (fast or known[str(mutation)] != "not fast")
        if has_result or str(mutation) in unseen or time.monotonic() - begun > 60 * minutes:
            continue
        of_kernel = [names for path, names in KERNEL_TESTS.items() if mutation.file.startswith(path)]
        tests = [f"tests/test_{name}.py" for names in of_kernel for name in names]
        tests = tests or executed.get(mutation.file, {}).get(str(mutation.line), [])
        by = found_by(mutation, tests, with_slow=not fast, workers=workers)
        with open(results, "a") as file:
            file.write(json.dumps({"mutation": str(mutation), "found by": by}) + "\n")
        click.echo(f"{by:8} {mutation}")


def results_in(path: Path) -> dict[str, str]:
    """Mutation → what found it; of several results for one the last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["mutation"]: result["found by"] for result in map(json.loads, lines)}


@main.command()
@click.argument("results_file")
def table(results_file: str) -> None:
    """Print how many mutations the fast tests and all tests find, and those that none finds."""
    results, unseen = results_in(Path(results_file)), equivalent()
    counted = {mutation: by for mutation, by in results.items() if mutation not in unseen}
    num_fast, num_found = (sum(by in kinds for by in counted.values()) for kinds in (["fast"], ["fast", "slow"]))
    click.echo(f"{len(counted)} mutations, and {len(unseen)} that change nothing")
    click.echo(f"fast tests find {num_fast} of {len(counted)}, all tests {num_found}")
    for mutation, by in counted.items():
        if by != "fast":
            click.echo(f"{by:8} {mutation}")


if __name__ == "__main__":
    main()
