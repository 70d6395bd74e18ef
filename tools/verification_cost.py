"""The cost of verification in a mamf command: seconds spent in checks, or the command before and after a change.

    python tools/verification_cost.py sweep --m-range 0 20480 256       # seconds by check, in one run
    python tools/verification_cost.py --without find --quick            # as often without the full checks
    python tools/verification_cost.py --before CHECKOUT --pairs 3 sweep --m-range 0 20480 256

``--before``: another checkout of mamf, whose runs take turns with this one's. Each run is a process with a separate
log; a run that ends by its budget shows in its rows, so seconds a row are what is compared.
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
    parser.add_argument("--before", type=Path, help="checkout of mamf to compare with")
    parser.add_argument("--without", action="store_true", help="compare with whole checks and changes left out")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="of mamf, with its options")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("name a command of mamf, such as: find --quick")
    if not (options.before or options.without):
        return _run_here(options.command)
    ratios, environment = [], {_WITHOUT: "1"} if options.without else {}
    for pair in range(options.pairs):
        other = _seconds_of_row(options.before or ROOT, options.command, environment)
        own = _seconds_of_row(ROOT, options.command, {})
        ratios.append(own / other)
        print(f"pair {pair + 1}: {other:.4f} s a row, now {own:.4f} s: {ratios[-1]:.3f} times")
    print(f"median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    return 0


def _seconds_of_row(checkout: Path, command: Sequence[str], environment: dict[str, str]) -> float:
    """Seconds from the first row to the last in a run's log, a row."""
    with tempfile.TemporaryDirectory() as folder:
        inside = {**os.environ, **environment, "PYTHONPATH": str(checkout.resolve())}
        own = [str(Path(__file__).resolve()), *command, "--output", "run.jsonl"]
        # A checkout before this tool has no wrappers to run under.
        call = own if checkout == ROOT else ["-m", "mamf", *command, "--output", "run.jsonl"]
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, *call], cwd=folder, env=inside, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise SystemExit(f"{checkout}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        rows = (Path(folder) / "run.jsonl").read_text().count('"record": "measurement"')
        return (seconds - _seconds_to_start(checkout, inside, folder)) / max(rows, 1)


def _seconds_to_start(checkout: Path, environment: dict[str, str], folder: str) -> float:
    """Seconds that a process takes to open the device: not of any row."""
    begun = time.perf_counter()
    code = "from mamf.plugins.discovery import open_backend; open_backend().synchronize()"
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)
    return time.perf_counter() - begun


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
