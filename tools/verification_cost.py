"""The cost of verification in a mamf command: seconds spent in checks, or the command with and without whole checks.

    python tools/verification_cost.py sweep --m-range 0 20480 256       # seconds by check, in one run
    python tools/verification_cost.py --without find --quick            # as often without the full checks

Runs with and without take turns. Each is a process with a separate log; a run that ends by its budget shows in its
rows, so seconds a row are what is compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Set in runs whose checks are samples alone, on operands that stay.
_WITHOUT = "MAMF_COST_WITHOUT"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", action="store_true", help="compare with whole checks and changes left out")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="of mamf, with its options")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("name a command of mamf, such as: find --quick")
    if not options.without:
        return _run_here(options.command)
    ratios = []
    for pair in range(options.pairs):
        without, whole = (_seconds_of_row(options.command, each) for each in ({_WITHOUT: "1"}, {}))
        ratios.append(whole / without)
        print(f"pair {pair + 1}: {without:.4f} s a row without, {whole:.4f} s with: {ratios[-1]:.3f} times")
    print(f"median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    return 0


def _seconds_of_row(command: Sequence[str], environment: dict[str, str]) -> float:
    """Seconds of a run, without opening the device, per row of its log."""
    inside = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    opening = ["-c", "from mamf.plugins.discovery import open_backend; open_backend().synchronize()"]
    running = [str(Path(__file__).resolve()), *command, "--output", "run.jsonl"]
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for call in (opening, running):
            begun = time.perf_counter()
            subprocess.run([sys.executable, *call], cwd=folder, env=inside, capture_output=True, check=True)
            seconds.append(time.perf_counter() - begun)
        rows = (Path(folder) / "run.jsonl").read_text().count('"record": "measurement"')
    return (seconds[1] - seconds[0]) / max(rows, 1)


def _run_here(command: Sequence[str]) -> int:
    from mamf.cli import main as run
    from mamf.engine.regimes import checking

    seconds: Counter[str] = Counter()
    kinds: Any = checking.Checked
    if os.environ.get(_WITHOUT):
        _leave_out_whole_checks(kinds)
    for name in ("verify", "prepare_check", "require_unchanged_operands"):
        setattr(kinds, name, _timed(getattr(kinds, name), name, seconds))
    begun = time.perf_counter()
    code = run(list(command))
    total = time.perf_counter() - begun
    for name, spent in sorted(seconds.items()):
        print(f"{name}: {spent:.3f} s, {100 * spent / total:.1f} % of {total:.1f} s", file=sys.stderr)
    return int(code or 0)


def _timed(method: Callable[..., Any], name: str, seconds: Counter[str]) -> Callable[..., Any]:
    def timed(self: Any, *arguments: Any, **options: Any) -> Any:
        whole = ", whole" if options.get("whole") else ""
        begun = time.perf_counter()
        try:
            return method(self, *arguments, **options)
        finally:
            seconds[name + whole] += time.perf_counter() - begun

    return timed


def _leave_out_whole_checks(kinds: Any) -> None:
    from dataclasses import replace

    prepare = kinds.__init__

    def without(self: Any, prepared: Any) -> None:
        prepare(self, replace(prepared, verify_whole=None, change_operands=None))

    kinds.__init__ = without


if __name__ == "__main__":
    sys.exit(main())
