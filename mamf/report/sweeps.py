"""Sweeps of matrix products: the best of each regime, the last record of a log, and the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.logs.recording import End
from mamf.logs.records import significant_digits
from mamf.measurement import Measurement
from mamf.report.devices import flat_device
from mamf.statistics import arithmetic_mean, geometric_mean


@dataclass(frozen=True)
class Best:
    """The best row of a regime and means over its shapes; of several devices, as the first gives them."""

    row: Measurement
    arithmetic_mean: float
    geometric_mean: float
    shapes: int


def ranked(rows: Iterable[Measurement]) -> list[Measurement]:
    """Measured rows, best first, without visits of a reference."""
    return sorted((row for row in rows if row.ok and not row.is_reference), key=lambda row: row.rank, reverse=True)


def bests(rows: Sequence[Measurement]) -> dict[str, Best]:
    """The best of each regime, in the order the regimes were measured."""
    found: dict[str, Best] = {}
    for regime in dict.fromkeys(row.regime for row in rows):
        if best_first := ranked(row for row in rows if row.regime == regime):
            figures = [row.comparable_rate for row in best_first]
            found[regime] = Best(best_first[0], arithmetic_mean(figures), geometric_mean(figures), len(figures))
    return found


def summary_record(rows: Sequence[Measurement], end: End) -> dict[str, Any]:
    """The last record of a run log: everything in it can be recomputed from the measurements before it."""
    return {
        **end.summary(sum(row.ok and not row.is_reference for row in rows)),
        "best": {
            regime: {
                "shape": str(best.row.shape),
                "tflops": significant_digits(best.row.best_rate),
                **flat_device(best.row),
                "best_by": best.row.best_by,
                "arithmetic_mean_tflops": significant_digits(best.arithmetic_mean),
                "geometric_mean_tflops": significant_digits(best.geometric_mean),
                "shapes": best.shapes,
            }
            for regime, best in bests(rows).items()
        },
    }
