"""How far rows exceed the peak at the clock read during them: the evidence for the headrooms in mamf.peaks.

    python tools/clock_headroom.py [RESULTS]      the distribution over all run logs of a results folder, as markdown

The ratio is rate / (peak * clock / datasheet's clock), by the statistic that a best is chosen by, for every good row
whose device has a verified peak with its clock, whose clock was read and only slowed by the power cap,
and whose FLOP were all computed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from mamf.contribution.evidence import Evidence, is_exact, records_of
from mamf.logs.legacy import read_legacy_or_none
from mamf.logs.run_log import run_log_of
from mamf.measurement import TERA
from mamf.peaks import HEADROOM_OF_READ_CLOCK, fastest_at_clock
from mamf.regime_names import CLASSIC

Group = tuple[str, str, str]


def clock_ratios(path: Path) -> Iterator[tuple[Group, float, int]]:
    """Device, dtype and regime of each row that has a ratio; the ratio; the line of the log."""
    if read_legacy_or_none(path) is not None:
        return
    records = tuple(records_of(path))
    evidence = Evidence(records, run_log_of(path, records))
    for line, row in evidence.good_rows:
        info, clock = evidence.device_of(row), row.conditions.clock_hz
        is_steady = row.regime != CLASSIC and set(row.conditions.throttle_reasons) <= {"power cap"}
        if row.work.unit != "TFLOPS" or not is_steady or not clock or not is_exact(row):
            continue
        bound = fastest_at_clock(info, row.problem.dtype, clock)
        if bound is not None:
            group = (info.name, row.problem.dtype, row.regime)
            yield group, row.best_rate * TERA / bound * HEADROOM_OF_READ_CLOCK, line


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value at a share of an ordered sequence."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=Path("results"))
    groups: dict[Group, list[float]] = defaultdict(list)
    largest = (0.0, "")
    for path in sorted(parser.parse_args().results.glob("*/*.jsonl")):
        for group, ratio, line in clock_ratios(path):
            groups[group].append(ratio)
            largest = max(largest, (ratio, f"{path.name}:{line}"))
    groups["all", "", ""] = [ratio for ratios in groups.values() for ratio in ratios]
    print("| device | dtype | regime | rows | median | 99 % | 99.9 % | highest |\n|---|---|---|--:|--:|--:|--:|--:|")
    for group, ratios in sorted(groups.items()):
        ordered = sorted(ratios)
        figures = [quantile(ordered, share) for share in (0.5, 0.99, 0.999, 1.0)]
        print(f"| {' | '.join(group)} | {len(ordered)} | {' | '.join(f'{figure:.4f}' for figure in figures)} |")
    above = [sum(ratio > limit for ratio in groups["all", "", ""]) for limit in (0.99, 1.0, HEADROOM_OF_READ_CLOCK)]
    print(f"\nabove 0.99: {above[0]}; above 1: {above[1]}; above the bound of {HEADROOM_OF_READ_CLOCK}: {above[2]}")
    print(f"the highest, {largest[0]:.4f}: {largest[1]}")


if __name__ == "__main__":
    main()
