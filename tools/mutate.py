"""Put mistakes into the product, one at a time, and report whether the tests find them.

    python tools/mutate.py lines lines.json                              record which fast tests execute which line
    python tools/mutate.py run lines.json gate.jsonl --count 60 --seed 0    try 60 random mutations
    python tools/mutate.py table gate.jsonl                              print how many were found, and which were not
    python tools/mutate.py faults gpu                                    inject the faults of injected.py: gpu or crash

There are six kinds of mutation, in equal numbers, at random executed lines: a sign, a bound, a missing fsync, a dtype,
a dropped term, and an ignored option; never in an annotation or in the options of the compiler. Each is tried in a copy
of the project, by the fast tests that execute its line, the quickest first, in one process. The tests stop at the first
failure, and no test starts after BUDGET_S seconds of CPU time. A line outside of functions, which an import executes,
and one that only fixtures execute are tested by the tests that execute their file. Coverage does not see inside
compiled kernels: all their lines count as executed, by the files of tests in KERNEL_TESTS. --slow tries the slow tests
as well.

The file of results has one JSON object per mutation. A mutation that no test can detect is marked by hand: "found_by":
"equivalent", with the reason as "why". Its name and the text of its line identify it in later runs, so it is not tried
again. A stopped run continues from its file of results. `lines` needs the package coverage.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import click
import pytest
from injected import CRASH, GPU

ROOT = Path(__file__).parent.parent
FAST, SLOW, CPU = "not slow and not gpu and not dry and not outside", "slow and not gpu", "not gpu"
BUDGET_S = 100  # CPU time of the fast tests of one mutation
LIMIT_S = {FAST: 9 * BUDGET_S, SLOW: 1500, CPU: 900}  # a run of tests that takes longer hangs
KERNEL_TESTS = {
    "bertdata/bits.py": "test_kernels test_text test_words",
    "bertdata/read/kernels/": "test_kernels test_samples test_loader test_mix test_format test_words test_promises",
    "bertdata/sources/kernels.py": "tables/test_input_table test_text test_inputs test_formats test_import "
    "test_kernels",
    "bertdata/tokenize/kernels/": "tables/test_tokenizer_table test_words test_tokens test_text test_kernels "
    "test_build",
    "bertdata/write/kernels.py": "test_kernels test_build test_import test_prepare",
}
"""A file of kernels, or a folder of such → its files of tests."""
KERNELS_IN_TREE = {"NUMBA_CACHE_DIR": ""}
"""For the environment: compiled kernels lie beside their source, so that a copy of the project has them."""
COMPILED = ("jit", "part", "inline")
"""Decorators of functions that are compiled."""

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
    file: str  # relative to the root of the project
    line: int
    text: str  # of the line, without the indentation
    start: int  # offsets in the bytes of the file
    stop: int
    new: str
    old: str

    @property
    def name(self) -> str:
        """Return the file and the change, without the line number, which other changes of the file would change."""
        return f"{self.file} {self.kind}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    @property
    def key(self) -> tuple[str, str]:
        """Return what identifies it in a file of results; the same for equal changes in equal lines of a file."""
        return self.name, self.text


# --- the mutations


def mutations_in(file: str, source: str) -> Iterator[Mutation]:
    """Yield every mutation of a file that this tool knows."""
    starts, content = [0], source.encode()
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(kind: str, node: ast.expr | ast.stmt, new: str) -> Mutation:
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]  # ast.parse sets both
        text = content[starts[node.lineno - 1] : starts[node.lineno]].decode().strip()
        return Mutation(kind, file, node.lineno, text, start, stop, new, content[start:stop].decode())

    def text(node: ast.AST) -> str:
        return f"({ast.unparse(node)})"

    tree = ast.parse(source)
    excluded = {id(part) for node in ast.walk(tree) for part in (*_annotations(node), *_compiling(node))}
    for node in ast.walk(tree):
        if id(node) in excluded:
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
                for number, keyword in enumerate(keywords):
                    if keyword.arg and keyword.arg not in ("help", "metavar", "short_help", "kind", "given"):
                        rest = [*keywords[:number], *keywords[number + 1 :]]
                        yield change("ignored option", node, ast.unparse(ast.Call(function, args, rest)))


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
        if part is not None:
            yield from ast.walk(part)


def _compiling(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the decorators that compile, whose options change only the speed."""
    for part in getattr(node, "decorator_list", []):
        if ast.unparse(part).partition("(")[0] in COMPILED:
            yield from ast.walk(part)


def _is_text(node: ast.BinOp) -> bool:
    sides = [side for side in (node.left, node.right) if isinstance(side, ast.JoinedStr | ast.Constant)]
    return any(not isinstance(getattr(side, "value", None), int | float) for side in sides)


def lines_of_kernels(source: str) -> set[int]:
    """Return the lines of functions that are compiled."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    compiled = [node for node in functions if any(_compiling(node))]
    return {line for node in compiled for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


def sample(executed: dict[str, dict[str, list[str]]], count: int, seed: int) -> list[Mutation]:
    """Return `count` random mutations of executed lines, equally many of each kind, never two in one line."""
    by_kind: dict[str, list[Mutation]] = {}
    for path in sorted([*(ROOT / "bertdata").rglob("*.py"), *(ROOT / "bertrain").rglob("*.py")]):
        file, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        lines = {int(line) for line in executed.get(file, {})} | lines_of_kernels(source)
        for mutation in mutations_in(file, source):
            if mutation.line in lines:
                by_kind.setdefault(mutation.kind, []).append(mutation)
    generator, taken, chosen = random.Random(seed), set[tuple[str, int]](), list[Mutation]()
    for kind in sorted(by_kind):
        generator.shuffle(by_kind[kind])
    while len(chosen) < count and any(by_kind.values()):
        for kind in sorted(by_kind):
            while by_kind[kind]:
                mutation = by_kind[kind].pop()
                if (mutation.file, mutation.line) not in taken:
                    taken.add((mutation.file, mutation.line))
                    chosen.append(mutation)
                    break
    return chosen[:count]


# --- the tests


def copy_project(folder: Path) -> Path:
    """Copy the project without its history, with the compiled kernels of its own tests. Files keep their times."""
    copy = folder / "project"
    ignored = shutil.ignore_patterns(".git", ".venv*", ".mypy_cache", "*.egg-info", "site", "dist", ".bench")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def passes(copy: Path, marks: str, tests: list[str]) -> bool:
    """Return whether tests pass in a copy, all of those with the marks if none is named. Tests that hang fail."""
    # A test of the sizes would fail for a longer line.
    options = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider", "--deselect=tests/test_arrows.py"]
    environment = os.environ | KERNELS_IN_TREE | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"PYTHONPATH": f"{copy}:{copy}/tools", "MUTATE_BUDGET_S": str(BUDGET_S if marks == FAST else 1e9)}
    command = [sys.executable, "-m", "pytest", *options, "-p", "mutate", *tests]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **quiet) as process:
        try:
            return process.wait(LIMIT_S[marks]) in (0, 5)  # 5: no test was collected; 4: conftest.py fails to import
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def found_by(mutation: Mutation, tests: list[str], copy: Path, *, with_slow: bool) -> str:
    """Return the first set of tests that fails: "fast", "slow" or "none"; "not fast" without the slow ones."""
    path = copy / mutation.file
    content, times = path.read_bytes(), path.stat()
    path.write_bytes(content[: mutation.start] + mutation.new.encode() + content[mutation.stop :])
    try:
        if not passes(copy, FAST, tests):
            return "fast"
        if not with_slow:
            return "not fast"
        return "none" if passes(copy, SLOW, []) else "slow"
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if any(mutation.file.startswith(kernels) for kernels in KERNEL_TESTS):  # get the compiled kernels back
            shutil.copytree(ROOT / "bertdata", copy / "bertdata", dirs_exist_ok=True)


def tests_for(mutation: Mutation, recorded: dict[str, Any]) -> list[str]:
    """Return the tests of a mutation: by file, files and tests with the shortest times first."""
    for folder, names in KERNEL_TESTS.items():
        if mutation.file.startswith(folder):
            return [f"tests/{name}.py" for name in names.split()]
    executed, seconds = recorded["executed"].get(mutation.file, {}), recorded["seconds"]
    nodes = ast.walk(ast.parse((ROOT / mutation.file).read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    is_in_function = any(node.body[0].lineno <= mutation.line <= (node.end_lineno or 0) for node in functions)
    of_line = executed.get(str(mutation.line)) if is_in_function else None
    tests = of_line or sorted({test for tests in executed.values() for test in tests})
    files: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: seconds.get(test, 0.0)):
        files.setdefault(test.partition("::")[0], []).append(test)
    ordered = sorted(files.values(), key=lambda tests: sum(seconds.get(test, 0.0) for test in tests))
    return [test for tests in ordered for test in tests]


# --- this file as a plugin of pytest: `lines` records the tests of each line, and `run` stops at the end of a budget

_SECONDS: dict[str, float] = {}


def _switch(name: str) -> None:
    if "MUTATE_SECONDS" in os.environ:
        import coverage

        current = coverage.Coverage.current()
        assert current is not None, "tests run under coverage"
        current.switch_context(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    if sum(os.times()[:4]) > float(os.environ.get("MUTATE_BUDGET_S", "inf")):
        pytest.exit("the time is up", returncode=0)
    _switch(item.nodeid.partition("[")[0])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _switch(item.nodeid.partition("::")[0])  # fixtures count for all tests of a file


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    _switch("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.partition("[")[0]
    _SECONDS[name] = _SECONDS.get(name, 0.0) + report.duration


def pytest_sessionfinish() -> None:
    if path := os.environ.get("MUTATE_SECONDS"):
        Path(path).write_text(json.dumps(_SECONDS), encoding="utf-8")


# --- the commands


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("out")
def lines(out: str) -> None:
    """Run the fast tests in two processes, and write which test executes which line and how long it takes."""
    import coverage

    recorded: dict[str, Any] = {"executed": {}, "seconds": {}}
    paths = (ROOT / "tests").rglob("test_*.py")
    files = sorted((path.stat().st_size, path.relative_to(ROOT).as_posix()) for path in paths)
    with tempfile.TemporaryDirectory() as folder:

        def record(half: int) -> None:
            settings = Path(folder) / f"settings{half}"
            settings.write_text(f"[run]\ndata_file = {folder}/data{half}\nsource = {ROOT}/bertdata,{ROOT}/bertrain\n")
            tests = [name for number, (_, name) in enumerate(files) if number % 2 == half]
            command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
            around = os.environ | KERNELS_IN_TREE | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT}/tools"}
            around |= {"MUTATE_SECONDS": f"{folder}/seconds{half}"}
            subprocess.run([*command, "-m", FAST, "-p", "mutate", "-n", "0", *tests], cwd=ROOT, env=around, check=False)

        with ThreadPoolExecutor(2) as pool:
            [*pool.map(record, (0, 1))]
        for half in (0, 1):
            data = coverage.CoverageData(f"{folder}/data{half}")
            data.read()
            for path in data.measured_files():
                executed = recorded["executed"].setdefault(Path(path).relative_to(ROOT).as_posix(), {})
                for line, names in data.contexts_by_lineno(path).items():
                    executed[str(line)] = sorted({*executed.get(str(line), []), *filter(None, names)})
            recorded["seconds"] |= json.loads(Path(f"{folder}/seconds{half}").read_text(encoding="utf-8"))
    Path(out).write_text(json.dumps(recorded), encoding="utf-8")


def results_in(path: Path) -> list[dict[str, Any]]:
    """Return the results of a file; of several for one mutation the last."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [*{(result["mutation"], result["line"]): result for result in map(json.loads, lines)}.values()]


@main.command()
@click.argument("lines_file")
@click.argument("results_file")
@click.option("--count", default=60, help="Number of mutations.")
@click.option("--seed", default=0, help="Random seed.")
@click.option("--workers", default=2, help="Number of mutations to try at the same time.")
@click.option("--slow", is_flag=True, help="Run the slow tests as well where the fast ones pass.")
def run(lines_file: str, results_file: str, count: int, seed: int, workers: int, slow: bool) -> None:
    """Try random mutations of the lines that `lines` found, and append the results to a file."""
    recorded, results, lock = json.loads(Path(lines_file).read_text(encoding="utf-8")), Path(results_file), Lock()
    known = {(each["mutation"], each["line"]): each["found_by"] for each in results_in(results)}
    waiting = [each for each in sample(recorded["executed"], count, seed) if known.get(each.key) in (None, "not fast")]

    def work(folder: str) -> None:
        copy = copy_project(Path(folder))
        while True:
            with lock:
                if not waiting:
                    return
                mutation = waiting.pop(0)
            if known.get(mutation.key) == "not fast" and not slow:
                continue
            found = found_by(mutation, tests_for(mutation, recorded), copy, with_slow=slow)
            result = {"seed": seed, "mutation": mutation.name, "line": mutation.text, "found_by": found}
            with lock, open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
                click.echo(f"{found:8} {mutation.name}")

    with ThreadPoolExecutor(workers) as pool, tempfile.TemporaryDirectory() as folder:
        [*pool.map(work, [f"{folder}/{number}" for number in range(workers)])]


@main.command()
@click.argument("results_file")
@click.option("--seed", "seeds", multiple=True, type=int, help="Count the mutations of this seed; may be repeated.")
def table(results_file: str, seeds: tuple[int, ...]) -> None:
    """Print how many mutations the fast tests and all tests find, and those that none finds."""
    results = [each for each in results_in(Path(results_file)) if not seeds or each["seed"] in seeds]
    counted = [each for each in results if each["found_by"] != "equivalent"]
    num_fast, num_found = (sum(each["found_by"] in kinds for each in counted) for kinds in (["fast"], ["fast", "slow"]))
    click.echo(f"{len(counted)} mutations, and {len(results) - len(counted)} that no test can detect")
    click.echo(f"fast tests find {num_fast} of {len(counted)}, all tests {num_found}")
    for each in counted:
        if each["found_by"] != "fast":
            click.echo(f"{each['found_by']:8} {each['mutation']}\n             {each['line']}")


CAMPAIGNS = {"states": ["--most", "30", "--replays", "1500"], "calls": ["--errors", "EIO", "--every", "3"]}
"""A campaign of crash.py → its options where a fault is injected."""


def finds(finder: str, copy: Path) -> bool:
    """Return whether a test fails in a copy, or a campaign of crash.py on one of its commands."""
    if "::" in finder:
        return not passes(copy, CPU, [finder])
    campaign, name = finder.split()
    command = [sys.executable, "tools/crash.py", campaign, "--only", name, "--first", *CAMPAIGNS[campaign]]
    environment = os.environ | KERNELS_IN_TREE | {"PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True).returncode != 0


@main.command()
@click.argument("group", type=click.Choice(["gpu", "crash"]))
@click.option("--only", default="", help="Faults with this in their description.")
def faults(group: str, only: str) -> None:
    """Inject one fault after the other, and report whether what should find it does."""
    chosen = [fault for fault in {"gpu": GPU, "crash": CRASH}[group] if only in fault.what]
    with tempfile.TemporaryDirectory() as folder:
        copy, missed = copy_project(Path(folder)), 0
        if group == "gpu" and not passes(copy, CPU, sorted({fault.finder for fault in chosen})):
            raise click.ClickException("these tests fail without a fault; correct that first")
        for fault in chosen:
            path = copy / fault.file
            plain = path.read_text(encoding="utf-8")
            path.write_text(fault.inject(plain), encoding="utf-8")
            is_found = finds(fault.finder, copy)
            path.write_text(plain, encoding="utf-8")
            missed += not is_found
            click.echo(f"{'found' if is_found else 'NOT FOUND':10}{fault.what}")
    click.echo(f"{len(chosen) - missed} of {len(chosen)} faults are found")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
