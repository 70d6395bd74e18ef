"""Attacks mamf: damaged logs, bad command lines, kills in virtual time and real ones, inputs that take memory or time
without end, secrets in logs; prints a table of counts.

    python tools/attack.py                                          # all of it: hours
    python tools/attack.py --logs 200 --inputs 200 --virtual-kills 50 --real-kills 3
    python tools/attack.py --logs 0 --inputs 2000 --virtual-kills 0 --real-kills 0 --seed 7

Everything is measured on the simulated device of mamf.testing, in a temporary folder; nothing touches an accelerator.
A seed and a count repeat an attack exactly, except for the times of real kills. Exit code 1: a row was lost or measured
twice, an exception escaped, a command hung, a message was not what it should be, or a process took more than 1 GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from attacks import bad_inputs, damaged_logs, kills, private_texts, real_kills, resources
from attacks.counts import Counts, table
from attacks.honest import little_work, make

_MOST_BYTES = 10**9
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
                print(f"{found[-1].name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        finally:
            os.chdir(before)
    return _report(found, options.seed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=int, default=20_000, help="damaged logs (default: 20000)")
    parser.add_argument("--inputs", type=int, default=2_000, help="bad command lines (default: 2000)")
    parser.add_argument("--virtual-kills", type=int, default=2_000, help="in this process (default: 2000)")
    parser.add_argument("--real-kills", type=int, default=300, help="of processes (default: 300)")
    parser.add_argument("--resources", type=int, default=50, help="inputs without end or bound (default: 50)")
    parser.add_argument("--secrets", type=int, default=500, help="logs with a made-up secret (default: 500)")
    return parser.parse_args()


def _attacks(options: argparse.Namespace, folder: Path) -> list[Callable[[], Counts]]:
    logs = make(folder)

    def seeded(attack: Callable[..., Counts], name: str, count: int, *given: object) -> Callable[[], Counts]:
        own = folder / name
        own.mkdir()
        return lambda: attack(*given, own, Random(f"{name} {options.seed}"), count)

    chosen = (
        (options.logs, seeded(damaged_logs.attack, "logs", options.logs, logs)),
        (options.inputs, seeded(bad_inputs.attack, "inputs", options.inputs, logs)),
        (options.virtual_kills, seeded(kills.attack, "virtual", options.virtual_kills)),
        (options.real_kills, seeded(real_kills.attack, "real", options.real_kills)),
        (options.resources, seeded(resources.attack, "resources", options.resources, logs)),
        (options.secrets, seeded(private_texts.attack, "secrets", options.secrets, logs)),
    )
    return [attack for count, attack in chosen if count]


def _report(found: list[Counts], seed: int) -> int:
    for counts in found:
        for example in counts.examples.values():
            print(f"{counts.name}: {example!a}")
        codes = ", ".join(f"{code}: {times}" for code, times in counts.codes.most_common())
        if codes:
            print(f"{counts.name}, exit codes: {codes}")
    most = max(resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"seed {seed}; the largest process took {most / 1e6:.0f} MB\n")
    print(table(found))
    return 0 if all(counts.is_clean for counts in found) and most <= _MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
