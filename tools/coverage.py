"""Do intervals hold what they say? Today's estimator on the stored samples of logs of mamf find.

    python tools/coverage.py results                    # every find below this folder, or single logs

Each row of the last rounds is held against the median of its candidate's other rounds, which it had no part in. Beside
it the interval of the visit alone, which is what logs before schema 4 print; and the winner's curse: how much higher
the best of one half of the rounds reads there than in the other half. The last line is the coverage of all rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mamf.ceilings.ceiling import CHOOSE, CONFIRM
from mamf.logs.legacy import read_legacy_or_none
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Measurement
from mamf.plans import FindPlan
from mamf.plugins.discovery import backend_class
from mamf.regimes import Burst, Sustained
from mamf.statistics import Repeatability

_FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Held:
    """A row of a round against the other rounds of its candidate."""

    regime: str
    dtype: str
    is_covered: bool
    is_covered_by_visit: bool
    half_width: float


def logs_below(paths: Iterable[Path]) -> Iterator[RunLog]:
    """The logs of finds among these files and below these folders."""
    for path in paths:
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            if read_legacy_or_none(file) is None and isinstance((log := read_run_log(file)).plan, FindPlan):
                yield log


def candidates(log: RunLog) -> list[list[Measurement]]:
    """The rounds of each candidate that was measured in enough of them, by today's figure and calibration."""
    found: dict[object, list[Measurement]] = {}
    for row in log.measurements:
        if row.ok and row.phase in (CHOOSE, CONFIRM):
            found.setdefault((row.regime, row.shape, row.kernel), []).append(as_today(row, log))
    return [rows for rows in found.values() if len(rows) >= _FEWEST_ROUNDS]


def as_today(row: Measurement, log: RunLog) -> Measurement:
    """A row as today's mamf would have written it: its figure, and the calibration of its backend."""
    if row.repeatability is not None:
        return row
    from mamf.statistics import summarize

    by = "mean" if row.regime == Sustained.name else row.best_by
    known = calibration(log.header["device"]["backend"], row.regime)
    return replace(row, best_by=by, summary=summarize(row.samples, by), repeatability=known)


def calibration(backend: str, regime: str) -> Repeatability:
    kind = backend_class(backend)
    return (kind.burst_traits if regime == Burst.name else kind.sustained_traits).repeatability


def held(rows: Sequence[Measurement]) -> Iterator[Held]:
    for row in rows:
        others = statistics.median(other.seconds for other in rows if other is not row)
        within = row.summary.interval if row.summary else row.interval
        yield Held(
            row.regime,
            row.problem.dtype,
            row.interval.low <= others <= row.interval.high,
            within.low <= others <= within.high,
            row.relative_half_width,
        )


def curse(log: RunLog, regime: str) -> list[float]:
    """How much higher the best of one half of the rounds reads there than in the other half, both ways round."""
    rows = [rounds for rounds in candidates(log) if rounds[0].regime == regime and len(rounds) >= 2 * _FEWEST_ROUNDS]
    if len(rows) < 2:
        return []

    def figure(rounds: Sequence[Measurement], part: int) -> float:
        return statistics.median(row.best_rate for row in rounds[part::2])

    best = [max(rows, key=lambda rounds, part=part: figure(rounds, part)) for part in (0, 1)]  # type: ignore[misc]
    return [figure(best[part], part) / figure(best[part], 1 - part) - 1 for part in (0, 1)]


def share(flags: Iterable[bool]) -> str:
    counted = list(flags)
    return f"{100 * sum(counted) / len(counted):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="LOG or FOLDER")
    logs = list(logs_below(parser.parse_args().paths))
    every = [one for log in logs for rows in candidates(log) for one in held(rows)]
    if not every:
        raise SystemExit(f"no find among these logs has {_FEWEST_ROUNDS} rounds of a candidate")
    head = ("regime", "dtype", "rows", "covered", "by visit", "half-width: median", "95th")
    print("{:<10} {:<14} {:>5} {:>8} {:>8} {:>19} {:>7}".format(*head))
    for regime, dtype in dict.fromkeys((one.regime, one.dtype) for one in every):
        own = [one for one in every if (one.regime, one.dtype) == (regime, dtype)]
        widths = sorted(one.half_width for one in own)
        print(
            f"{regime:<10} {dtype:<14} {len(own):>5} {share(one.is_covered for one in own):>8} "
            f"{share(one.is_covered_by_visit for one in own):>8} {100 * statistics.median(widths):>17.2f} % "
            f"{100 * widths[int(0.95 * len(widths))]:>5.2f} %"
        )
    for regime in (Burst.name, Sustained.name):
        biases = [bias for log in logs for bias in curse(log, regime)]
        if biases:
            print(f"the winner's curse in {regime}: {100 * statistics.fmean(biases):+.3f} % over {len(biases)} halves")
    print(f"coverage: {share(one.is_covered for one in every)}")


if __name__ == "__main__":
    main()
