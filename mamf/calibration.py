"""How much repeated runs differ, calibrated on pairs of runs: repeatability.csv, by backend, state and operation.

``tools/coverage.py results --fit`` fits these constants to logs. A backend or an operation that has no row uses the
row whose field is empty.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import itertools

from mamf.statistics import Repeatability

#: A state of the device in addition to the regimes: a sustained visit after a rest, in which the device settles again.
ANEW = "anew"


@functools.cache
def _calibrations() -> dict[tuple[str, str, str], Repeatability]:
    """Calibrations by backend, state and operation; an empty string matches any."""
    text = importlib.resources.files("mamf").joinpath("repeatability.csv").read_text(encoding="utf-8")
    return {
        (row["backend"], row["state"], row["operation"]): Repeatability(
            visit=float(row["visit"]),
            run=float(row["run"]),
            degrees=int(row["degrees"]),
            is_whole=bool(row["is_whole"]),
            launch_seconds=float(row["launch_seconds"]),
            common=float(row["common"]),
        )
        for row in csv.DictReader(text.splitlines())
    }


def find_calibration(backend: str, state: str, operation: str = "") -> Repeatability:
    """The calibration for a backend (by name), a state (a regime, or ANEW) and an operation. Raises KeyError for a
    state without a calibration.
    """
    found = _calibrations()
    keys = itertools.product((backend, ""), (state,), (operation, ""))
    return found[next((key for key in keys if key in found), ("", state, ""))]
