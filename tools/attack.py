"""Attack mamf in every way that tools/attacks has, and print a table of counts.

    python tools/attack.py                                  # all of it: hours
    python tools/attack.py --share 0.02                     # a fiftieth of each
    python tools/attack.py forged runs --seed 7             # these only

Everything is measured on the simulated device of mamf.testing, in a temporary folder; nothing touches an accelerator.
A seed and a share repeat an attack exactly, except for the times of real kills. Exit code 1: a row was lost or measured
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
#: A process may take the first; one that wants the second fails before the machine runs out.
_MOST_BYTES, _LIMIT_BYTES = 2 * 10**9, 3 * 10**9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ", ".join(f"{name} {count}" for name, (_, count) in ATTACKS.items())
    parser.add_argument("attacks", nargs="*", metavar="NAME", help=f"which ones (default: all; as often: {usual})")
    parser.add_argument("--share", type=float, default=1.0, help="of the default counts (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if wrong := set(options.attacks) - ATTACKS.keys():
        parser.error(f"there is no attack {min(wrong)!r}: {', '.join(ATTACKS)}")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a log named /dev/stdin is an empty one
    resource.setrlimit(resource.RLIMIT_DATA, (_LIMIT_BYTES, _LIMIT_BYTES))
    found = []
    with tempfile.TemporaryDirectory() as name, little_work():
        folder = Path(name, "attacked")  # what lies beside it, .. to an attack, is nothing
        folder.mkdir()
        os.chdir(folder)
        logs = make(folder)
        for name in options.attacks or ATTACKS:
            (attack, count), own, began = ATTACKS[name], folder / name, time.monotonic()
            own.mkdir()
            given = (logs,) if "logs" in inspect.signature(attack).parameters else ()
            random = Random(f"{name} {options.seed}")
            found.append(attack(*given, own, random, max(1, round(count * options.share))))
            took = f"{time.monotonic() - began:.0f} s, at most {_most_bytes() / 1e6:.0f} MB so far"
            print(f"{found[-1].name}: {took}", file=sys.stderr, flush=True)
    return _report(found, options.seed)


def _report(found: list[Counts], seed: int) -> int:
    for counts in found:
        for example in counts.examples.values():
            print(f"{counts.name}: {example!a}")
        if codes := ", ".join(f"{code}: {times}" for code, times in counts.codes.most_common()):
            print(f"{counts.name}, exit codes: {codes}")
    print(f"seed {seed}; the largest process took {_most_bytes() / 1e6:.0f} MB\n")
    print(table(found))
    return 0 if all(counts.is_clean for counts in found) and _most_bytes() <= _MOST_BYTES else 1


def _most_bytes() -> int:
    """Return the most bytes that this process or any child took so far."""
    return max(resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    sys.exit(main())
