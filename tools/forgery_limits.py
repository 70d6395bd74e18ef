"""How far a determined forger gets: a table for docs/reliability.md, of finds in results/.

    python tools/forgery_limits.py [DTYPE ...]

All samples of an honest find are made so many times as fast, every figure is computed anew, and the clock stays as it
was read. "accepted" is the largest factor that `mamf results check` lets pass, as unconfirmed; "ranked" is the largest
that reaches the tables, where a figure needs another card of its model. Both are in percent of the true figure, that of
the fastest confirmed find of a device and dtype.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from attacks import forging
from attacks.forgeries import RESULTS

from mamf.contribution.collection import CeilingEntry
from mamf.contribution.confirming import part_confirmed
from mamf.contribution.rules import Review, review

_MOST_TIMES, _STEPS = 3.0, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtypes", nargs="*", metavar="DTYPE", help="only these (default: all)")
    asked = parser.parse_args().dtypes
    print("| device | dtype | log | TFLOPS, burst | accepted up to | ranked up to |\n|---|---|---|--:|--:|--:|")
    for entry in _fastest_finds():
        if not asked or entry.dtype in asked:
            path = RESULTS / entry.place
            limits = [_largest(path, judge) for judge in (_is_accepted, _is_ranked)]
            shown = " | ".join(f"{100 * limit:.0f} %" for limit in limits)
            print(f"| {entry.device} | {entry.dtype} | {entry.place.stem} | {entry.tflops:.1f} | {shown} |", flush=True)


def _fastest_finds() -> list[CeilingEntry]:
    """Of each accelerator and dtype the fastest confirmed burst of a complete find with a sustained ceiling."""
    reviews = (review(path) for path in sorted(RESULTS.glob("nvidia*/find-*.jsonl")))
    entries = [(each, entry) for each in reviews for entry in each.entries if isinstance(entry, CeilingEntry)]
    confirmed = {id(entry) for entry in part_confirmed(entry for _, entry in entries)[0]}
    found: dict[tuple[str, str], CeilingEntry] = {}
    for of, entry in entries:
        is_candidate = id(entry) in confirmed and entry.regime == "burst" and of.tier == "complete"
        key = (entry.device, entry.dtype)
        if is_candidate and (key not in found or entry.tflops > found[key].tflops):
            found[key] = CeilingEntry(**{**vars_of(entry), "place": of.path.relative_to(RESULTS)})
    return [found[key] for key in sorted(found)]


def vars_of(entry: CeilingEntry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in CeilingEntry.__dataclass_fields__}


def _largest(path: Path, judge: Callable[[Review], bool]) -> float:
    """The largest factor, to a hundredth, that a judge lets pass."""
    low, high = 1.0, _MOST_TIMES
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(_STEPS):
            times = (low + high) / 2
            records = forging.read(path)
            forging.scale(records, times)
            forged = forging.write(Path(folder, path.name), forging.recompute(path, records))
            low, high = (times, high) if judge(review(forged)) else (low, times)
    return low


def _is_accepted(found: Review) -> bool:
    return not found.is_rejected()


def _is_ranked(found: Review) -> bool:
    return not found.is_rejected() and not found.unconfirmed


if __name__ == "__main__":
    main()
