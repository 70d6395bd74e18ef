"""How much repeated runs differ: repeatability.csv, calibrated on pairs of runs by backend, state and operation.

``tools/coverage.py results --fit`` fits these constants to logs. A backend or operation without a row uses the row in
which that field is empty.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from mamf.files import packaged_rows
from mamf.statistics import Repeatability

#: A state in addition to the regimes: a sustained visit after a rest, in which the device settles again.
ANEW = "anew"


@functools.cache
def _calibrations() -> dict[tuple[str, str, str], Repeatability]:
    """Calibrations by backend, state and operation; an empty string matches any."""
    return {
        (row["backend"], row["state"], row["operation"]): Repeatability(
            run=float(row["run"]),
            launch_seconds=float(row["launch_seconds"]),
            ignores_within=bool(row["ignores_within"]),
            usual_celsius=float(row["usual_celsius"] or 0),
            per_degree=float(row["per_degree"] or 0),
        )
        for row in packaged_rows("repeatability.csv")
    }


def find_calibration(backend: str, state: str, problem: Any = None) -> Repeatability:
    """The calibration for a backend (by name), a state (a regime, or ANEW) and a problem. Raises KeyError for a state
    without a calibration.
    """
    known, operation = _calibrations(), "" if problem is None else problem.operation
    backward = [f"{operation} backward"] if getattr(problem, "has_backward", False) else []
    keys = itertools.product((backend, ""), (state,), (*backward, operation, ""))
    return known[next((key for key in keys if key in known), ("", state, ""))]
