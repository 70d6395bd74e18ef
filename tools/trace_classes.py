"""Are kernels of other people's traces put into the right classes? On public traces, which are not kept.

    python tools/trace_classes.py                        # fetches tools/trace_sources.csv from GitHub, by https
    python tools/trace_classes.py --folder DIR           # reads DIR/OWNER/NAME/PATH where it exists, fetches nothing
    python tools/trace_classes.py TRACE...               # these traces

A row per trace: busy seconds (the union of all intervals), the share that is unclassified (the bar is 3 %), the share
of kernel time that names alone would leave unclassified, the share that they put into the class that the operation
gives (by intent, products of a convolution and elementwise kernels of an optimizer differ), and the largest classes.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

from mamf.errors import UsageError
from mamf.measurement import group_pairs
from mamf.profiling.classes import UNCLASSIFIED, class_of, class_of_name, shares
from mamf.profiling.traces import Trace, busy, read_trace

_SOURCES = Path(__file__).with_name("trace_sources.csv")
_BAR, _MOST_BYTES, _SECONDS = 0.03, 2**31, 60


def names_alone(trace: Trace) -> tuple[float, float]:
    """Of the seconds of all kernels: what their names alone leave unclassified, and what they put into the class that
    the operation gives.
    """
    total = unknown = same = 0.0
    for event in trace.events:
        if event.kind == "kernel":
            by_name, seconds = class_of_name(event.name), event.ended - event.begun
            total += seconds
            unknown += seconds * (by_name is None)
            same += seconds * (by_name == class_of(event))
    return (unknown / total, same / total) if total else (0.0, 1.0)


def print_row(name: str, trace: Trace) -> bool:
    """Print a trace's row, and return whether it is within the bar."""
    by_class = group_pairs((class_of(each.event), (each.begun, each.ended)) for each in busy(trace))
    seconds = {name: share.visible for name, share in shares(by_class).items()}
    total = sum(seconds.values())
    unclassified = seconds.get(UNCLASSIFIED, 0.0) / total
    largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:3]
    text = ", ".join(f"{each} {seconds[each] / total:.0%}" for each in largest)
    unknown, same = names_alone(trace)
    print(f"{total:9.5f} s  {unclassified:7.2%} {unknown:7.2%} {same:7.1%}  {text:62}  {name}", flush=True)
    return unclassified < _BAR


def fetch(repository: str, commit: str, path: str, folder: Path) -> Path:
    """Fetch a file of a public repository. Raises OSError if that fails."""
    url = f"https://raw.githubusercontent.com/{repository}/{commit}/{urllib.request.quote(path)}"
    target = folder / Path(path).name
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
        target.write_bytes(answer.read(_MOST_BYTES))
    return target


def traces(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """The name and the file of each trace; names of those that cannot be had are printed."""
    if options.trace:
        yield from ((str(path), path) for path in options.trace)
        return
    for row in csv.DictReader(_SOURCES.read_text().splitlines()):
        name = f"{row['repository']}/{row['path']}"
        try:
            path = options.folder / name if options.folder else fetch(**row, folder=folder)
        except OSError as error:
            print(f"not fetched ({error}): {name}")
            continue
        if path.exists():
            yield name, path
            path.unlink() if not options.folder else None
        else:
            print(f"not in the folder: {name}")


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="*", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments if arguments is None else list(arguments))
    within = []
    print("     busy    unclassified, by names alone, same class by names")
    with tempfile.TemporaryDirectory() as folder:
        for name, path in traces(options, Path(folder)):
            try:
                trace = read_trace(path)
            except UsageError as error:
                print(f"not read: {error}")
                continue
            within.append(print_row(name, trace))
    print(f"{sum(within)} of {len(within)} traces have less than {_BAR:.0%} unclassified")
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
