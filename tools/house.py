"""Count the statements in each folder of mamf/, and check that their total does not exceed the limit in .ci/size.

    python tools/house.py            # print the files, statements (ast.stmt) and logical lines of each folder
    python tools/house.py --check    # print each folder that changed; exit with 1 if the total exceeds .ci/size
    python tools/house.py --write    # write the current numbers to .ci/size, unless the total has grown
    python tools/house.py --trips    # print how many functions and files of mamf/ each of five commands enters

Logical lines are counted in the same way as in tinygrad: lines with code, but no blank lines, comments or docstrings.
--trips counts functions with sys.setprofile. It leaves out mamf/testing, lambdas, comprehensions and class bodies.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import os
import re
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMITS_FILE = ROOT / ".ci" / "size"
TOTAL = "total"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    files: int
    statements: int
    lines: int

    def add(self, other: Size) -> Size:
        return Size(*(one + another for one, another in zip(self, other, strict=True)))


def measure_source(text: str) -> Size:
    """Return the size of one module, given its source code."""
    tree = ast.parse(text)
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return Size(1, statements, len(lines - docstrings))


def measure_package(package: Path) -> dict[str, Size]:
    """Return the size of each folder of a package, by name. The modules that are directly in the package count as one
    more folder, ``NAME/*.py``.
    """
    sizes: dict[str, Size] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        folder = f"{package.name}/{inside[0]}" if len(inside) > 1 else f"{package.name}/*.py"
        sizes[folder] = sizes.get(folder, Size(0, 0, 0)).add(measure_source(path.read_text(encoding="utf-8")))
    return sizes


def read_limits(path: Path = LIMITS_FILE) -> Counter[str]:
    """Read the number of statements of each folder from .ci/size. Each line has a name and a number."""
    pairs = (line.split() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return Counter({name: int(count) for name, count in pairs})


_DEVICE = ("--backend", "mamf.testing:SimulatedBackend")
_MATMUL = ("--kernel", "mamf.testing:SimulatedMatmul")
_ATTENTION = ("--kernel", "mamf.testing:SimulatedAttention", "--ceiling-kernel", "mamf.testing:SimulatedMatmul")
#: The commands of --trips. The order matters, because later commands read the logs of earlier ones.
TRIPS = {
    "sweep": ("sweep", *_DEVICE, *_MATMUL, "--m-range", "0", "20480", "256", "--output", "sweep.jsonl"),
    "show": ("show", "sweep.jsonl"),
    "find --quick": ("find", *_DEVICE, *_MATMUL, "--quick", "--output", "find.jsonl"),
    "attention --ceiling": ("attention", *_DEVICE, *_ATTENTION, "--ceiling", "find.jsonl", "--output", "a.jsonl"),
    "results check": ("results", "check", "sweep.jsonl"),
}


def trace_trip(command: Sequence[str]) -> tuple[int, int]:
    """Run a command in this process. Return how many functions of mamf it enters, and in how many files."""
    from mamf.cli import main as run_command

    package = f"{ROOT / 'mamf'}{os.sep}"
    entered: set[CodeType] = set()

    def record_call(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(package):
            entered.add(code)

    sys.setprofile(record_call)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = run_command(list(command))
    finally:
        sys.setprofile(None)
    if code not in (0, 1):  # `results check` exits with 1, because it does not accept logs of simulated devices.
        raise RuntimeError(f"mamf {' '.join(command)} exited with {code}: {errors.getvalue()[-500:]}")
    ours = {code for code in entered if f"{os.sep}testing{os.sep}" not in code.co_filename}
    return len(ours), len({code.co_filename for code in ours})


def print_trips() -> None:
    """Print how many functions and files each command of TRIPS enters. Run each command in a separate process, so that
    it has to import all modules and fill all caches again.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MAMF_CACHE"] = folder
        os.chdir(folder)
        print(f"{'command':<20} {'functions':>10} {'files':>6}")
        for name, command in TRIPS.items():
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                functions, files = trace_trip(command)
                print(f"{name:<20} {functions:>10} {files:>6}", flush=True)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                raise SystemExit(f"'mamf {name}' failed: see the error above")


def count_special_cases() -> tuple[int, int]:
    """Count the lines and files of mamf/ that name attention or matmul. Leave out code that needs these names: both
    operations, the search over a grid, the API, mamf/testing, and the import of mamf-finder's logs.
    """
    exempt_files = re.compile(
        r"mamf/(operations/(attention|matmul)|engine/search|api|testing|logs/(finder|legacy)|__init__)"
    )
    names = re.compile(r"[\"'](attention|matmul)[\"']|\b(MATMUL|is_attention|Attention|Matmul)\b")
    counts: Counter[str] = Counter()
    for path in sorted((ROOT / "mamf").rglob("*.py")):
        inside = path.relative_to(ROOT).as_posix()
        if not exempt_files.match(inside):
            counts[inside] = sum(bool(names.search(line)) for line in path.read_text(encoding="utf-8").splitlines())
    return counts.total(), sum(count > 0 for count in counts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with .ci/size; exit with 1 if the total grew")
    action.add_argument("--write", action="store_true", help="write the current numbers to .ci/size")
    action.add_argument("--trips", action="store_true", help="print how many functions and files commands enter")
    options = parser.parse_args()
    if options.trips:
        print_trips()
        lines, files = count_special_cases()
        print(f"lines that name attention or matmul, in code that should not depend on them: {lines} in {files} files")
        return 0
    sizes = measure_package(ROOT / "mamf")
    total = Size(0, 0, 0)
    for size in sizes.values():
        total = total.add(size)
    counts = Counter({name: size.statements for name, size in sizes.items()} | {TOTAL: total.statements})
    if not options.check:
        print(f"{'folder':<20} {'files':>6} {'statements':>11} {'lines':>7}")
        for name, size in [*sizes.items(), (TOTAL, total)]:
            print(f"{name:<20} {size.files:>6} {size.statements:>11} {size.lines:>7}")
    limits = read_limits() if LIMITS_FILE.exists() else Counter[str]()
    if options.check:
        for name in sorted(counts | limits):
            if counts[name] != limits[name]:
                print(f"{name}: {limits[name]} -> {counts[name]} statements ({counts[name] - limits[name]:+d})")
        if counts[TOTAL] > limits[TOTAL]:
            print(
                f"mamf/ has {counts[TOTAL]} statements, and .ci/size allows {limits[TOTAL]}: delete as much as you add"
            )
            return 1
    if options.write:
        if limits and counts[TOTAL] > limits[TOTAL]:
            print(
                f"not written: mamf/ has {counts[TOTAL]} statements, and .ci/size allows {limits[TOTAL]}: delete some"
            )
            return 1
        names = [*sorted(sizes), TOTAL]
        text = "".join(f"{name} {counts[name]}\n" for name in names)
        LIMITS_FILE.write_text(
            "# Statements in mamf/, by folder: python tools/house.py --write\n" + text, encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
