"""How far repeats lie apart, from pairs of runs: data in repeatability.csv, by backend, state and operation.

``tools/coverage.py results --fit`` prints the constants that follow from logs. A backend or an operation without a row
of its own borrows the row whose field is empty.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import itertools

from mamf.statistics import Repeatability

#: States of a device beside the regimes ``burst`` and ``sustained``: a visit that follows a rest and settles.
ANEW = "anew"


@functools.cache
def _calibrations() -> dict[tuple[str, str, str], Repeatability]:
    """By backend, state and operation; empty: of any."""
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
    """The calibration of a backend by name in a state (a regime, or ANEW) for an operation. Raises KeyError for a state
    without a calibration.
    """
    found = _calibrations()
    keys = itertools.product((backend, ""), (state,), (operation, ""))
    return found[next((key for key in keys if key in found), ("", state, ""))]
