"""Run the attacks of tools/attacks on mamf, and print a table of the faults that they find.

    python tools/attack.py                        # all attacks; takes hours
    python tools/attack.py --share 0.02           # all attacks, each with 2 % of its default count
    python tools/attack.py logs runs --seed 7     # only these two attacks

All measurements run on the simulated device of mamf.testing and in a temporary folder. They use no accelerator. The
same seed and share repeat an attack exactly, except for the moments at which real processes are killed.

The exit code is 1 if a row was lost or measured twice, an exception escaped, a command hung, an output or an exit code
was wrong, or a process used more than 2 GB of memory.
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

from attacks import faults, inputs
from attacks.calls import Counts, format_table
from attacks.honest import make_logs, shorten_runs

#: The function of each attack, and how many inputs or faults it uses by default. A function with a parameter ``logs``
#: gets undamaged logs.
ATTACKS: dict[str, tuple[Callable[..., Counts], int]] = {
    "logs": (inputs.attack_logs, 20_000),
    "command-lines": (inputs.attack_command_lines, 2_000),
    "resources": (inputs.attack_resources, 50),
    "runs": (faults.attack_runs, 2_000),
    "processes": (faults.attack_processes, 300),
}
#: If a process uses more than the first number of bytes, the exit code is 1. The second is a limit on allocations: a
#: process that reaches it gets a MemoryError before the machine runs out of memory.
_MAX_PEAK_BYTES, _ALLOCATION_LIMIT_BYTES = 2 * 10**9, 3 * 10**9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_counts = ", ".join(f"{name} {count}" for name, (_, count) in ATTACKS.items())
    parser.add_argument(
        "attacks",
        nargs="*",
        metavar="NAME",
        help=f"attacks to run (default: all); their default counts are {default_counts}",
    )
    parser.add_argument("--share", type=float, default=1.0, help="factor for the default counts (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs and faults (default: 0)")
    options = parser.parse_args()
    if unknown_names := set(options.attacks) - ATTACKS.keys():
        parser.error(f"unknown attack {min(unknown_names)!r}: use some of {', '.join(ATTACKS)}")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # Make stdin empty, because attacks name /dev/stdin as a log.
    resource.setrlimit(resource.RLIMIT_DATA, (_ALLOCATION_LIMIT_BYTES, _ALLOCATION_LIMIT_BYTES))
    all_counts = []
    with tempfile.TemporaryDirectory() as name, shorten_runs():
        # Attacks also name the folder "..", so work in a folder whose parent contains no other files.
        folder = Path(name, "attacked")
        folder.mkdir()
        os.chdir(folder)
        logs = make_logs(folder)
        for name in options.attacks or ATTACKS:
            (attack, count), attack_folder, started_at = ATTACKS[name], folder / name, time.monotonic()
            attack_folder.mkdir()
            log_arguments = (logs,) if "logs" in inspect.signature(attack).parameters else ()
            random = Random(f"{name} {options.seed}")
            all_counts.append(attack(*log_arguments, attack_folder, random, max(1, round(count * options.share))))
            seconds = time.monotonic() - started_at
            print(f"{all_counts[-1].name}: {seconds:.0f} s, {_measure_peak_bytes() / 1e6:.0f} MB", file=sys.stderr)
    return _print_report(all_counts, options.seed)


def _print_report(all_counts: list[Counts], seed: int) -> int:
    for counts in all_counts:
        for example in counts.examples.values():
            print(f"{counts.name}: {example!a}")
        if codes := ", ".join(f"{code}: {occurrences}" for code, occurrences in counts.codes.most_common()):
            print(f"{counts.name}, exit codes: {codes}")
    print(f"seed {seed}; the largest process used {_measure_peak_bytes() / 1e6:.0f} MB\n")
    print(format_table(all_counts))
    return 0 if all(counts.is_clean for counts in all_counts) and _measure_peak_bytes() <= _MAX_PEAK_BYTES else 1


def _measure_peak_bytes() -> int:
    """Return the peak memory of this process or of its largest child so far, whichever is larger, in bytes."""
    return max(resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    sys.exit(main())
