"""Attack mamf in every way that tools/attacks has, and print a table of counts.

    python tools/attack.py                                  # all of it: hours
    python tools/attack.py --share 0.02                     # a fiftieth of each
    python tools/attack.py forged=500 runs=200 --seed 7     # these only, so often

Everything is measured on the simulated device of mamf.testing, in a temporary folder; nothing touches an accelerator.
A seed and a count repeat an attack exactly, except for the times of real kills. Exit code 1: a row was lost or measured
twice, an exception escaped, a command hung, a message was not what it should be, or a process took more than 2 GB.
"""

from __future__ import annotations

import argparse
import inspect
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from attacks import faults, forgeries, inputs
from attacks.calls import Counts, table
from attacks.honest import little_work, make

#: What each does, and how often by default. Those that take logs are given honest ones.
ATTACKS: dict[str, tuple[Callable[..., Counts], int]] = {
    "logs": (inputs.attack_logs, 20_000),
    "command-lines": (inputs.attack_command_lines, 2_000),
    "resources": (inputs.attack_resources, 50),
    "forged": (forgeries.attack, 500),
    "runs": (faults.attack_runs, 2_000),
    "processes": (faults.attack_processes, 300),
}
_MOST_BYTES = 2 * 10**9
#: A process that wants more fails with an error before the machine runs out.
_LIMIT_BYTES = 3 * 10**9


def main() -> int:
    options = _options()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a log named /dev/stdin is an empty one
    resource.setrlimit(resource.RLIMIT_DATA, (_LIMIT_BYTES, _LIMIT_BYTES))
    found = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name, little_work():
        folder = Path(name, "attacked")  # what lies beside it, .. to an attack, is nothing
        folder.mkdir()
        os.chdir(folder)
        try:
            for attack in _attacks(options, folder):
                began = time.monotonic()
                found.append(attack())
                took = f"{time.monotonic() - began:.0f} s, at most {_most_bytes() / 1e6:.0f} MB so far"
                print(f"{found[-1].name}: {took}", file=sys.stderr, flush=True)
        finally:
            os.chdir(before)
    return _report(found, options.seed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ", ".join(f"{name}={count}" for name, (_, count) in ATTACKS.items())
    parser.add_argument("attacks", nargs="*", metavar="NAME[=COUNT]", help=f"which ones (default: {usual})")
    parser.add_argument("--share", type=float, default=1.0, help="of the default counts (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.counts = {name: max(1, round(count * options.share)) for name, (_, count) in ATTACKS.items()}
    if options.attacks:
        asked = [text.partition("=") for text in options.attacks]
        if wrong := next((name for name, _, _ in asked if name not in ATTACKS), None):
            parser.error(f"there is no attack {wrong!r}: {', '.join(ATTACKS)}")
        options.counts = {name: int(count) if count else options.counts[name] for name, _, count in asked}
    return options


def _attacks(options: argparse.Namespace, folder: Path) -> list[Callable[[], Counts]]:
    logs = make(folder)

    def seeded(name: str, count: int) -> Callable[[], Counts]:
        attack, own = ATTACKS[name][0], folder / name
        own.mkdir()
        given = (logs,) if "logs" in inspect.signature(attack).parameters else ()
        return lambda: attack(*given, own, Random(f"{name} {options.seed}"), count)

    return [seeded(name, count) for name, count in options.counts.items() if count]


def _report(found: list[Counts], seed: int) -> int:
    for counts in found:
        for example in counts.examples.values():
            print(f"{counts.name}: {example!a}")
        codes = ", ".join(f"{code}: {times}" for code, times in counts.codes.most_common())
        if codes:
            print(f"{counts.name}, exit codes: {codes}")
    most = _most_bytes()
    print(f"seed {seed}; the largest process took {most / 1e6:.0f} MB\n")
    print(table(found))
    return 0 if all(counts.is_clean for counts in found) and most <= _MOST_BYTES else 1


def _most_bytes() -> int:
    """Of this process or any child, so far."""
    return max(resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    sys.exit(main())
