"""Traits of a device that the regimes use: when its slow power controller reacts to load, how it settles, and how much
repeated runs differ (repeatability.csv, calibrated on pairs of runs by backend, state and operation).

``tools/coverage.py results --fit`` fits the constants of repeatability.csv to logs. A backend or operation without a
row uses the row in which that field is empty.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from mamf.files import read_packaged_rows
from mamf.statistics import Repeatability

#: The remark of rows whose regime uses traits that were neither calibrated nor measured.
ASSUMED = "lengths of rests and trains are assumed, not measured on this device"


@dataclass(frozen=True)
class BurstTraits:
    """When a device's slow power controller reacts, and how it recovers. The defaults were measured on an H100
    (docs/evidence/intervals.md).

    - ``train_seconds``: device time of a train of launches, well below the reaction time of the slow power controller
      (40 ms on an H100).
    - ``rest_ratio``: idle seconds per second of work until the requested clock is back at its maximum.
    - ``longest_rest_seconds``: idle seconds that are enough after any work.
    - ``warm_in_seconds``: seconds of bursts until a device that was idle for more than ``cold_after_seconds`` reaches
      its steady speed. Until then an H100 is up to 1 % faster.
    - ``wake_seconds``: seconds of load until a rested device is as fast as before; queued ahead of each train.
    - ``repeatability``: how much repeated runs differ; None: use the backend's calibration (mamf.calibration).
    - ``remark``: why rows in burst cannot be trusted fully; empty if they can.
    """

    train_seconds: float = 0.010
    rest_ratio: float = 3.0
    longest_rest_seconds: float = 1.0
    warm_in_seconds: float = 0.4
    cold_after_seconds: float = 0.15
    wake_seconds: float = 0.0
    repeatability: Repeatability | None = None
    remark: str = ""


@dataclass(frozen=True)
class SustainedTraits:
    """How a device settles under load.

    - ``soak_seconds``: seconds of load until clock and power of a cold device stay within 0.3 % (an H200).
    - ``settle_seconds``: seconds of load until a warm device has adapted to another kernel.
    - ``cold_after_seconds``: idle seconds after which the soak is needed again.
    - ``bridge_seconds``: seconds of load to queue while the host prepares the next kernel, because even a short idle
      time makes the power controller oscillate for seconds.
    - ``rest_seconds``: idle seconds after which the power controller restarts; 0 if it never does.
      ``restart_seconds``: seconds of load until it has settled again.
    - ``swing_seconds``: the period of the damped oscillation of clock and power after a start (0.9 to 1.1 s on an H100
      and an H200, at first 13 % from peak to trough). The mean over whole periods equals that of a settled device.
    - ``repeatability``: as in BurstTraits. ``anew_repeatability``: the same for visits after such a rest.
    - ``remark``: as in BurstTraits.
    """

    soak_seconds: float = 4.0
    settle_seconds: float = 0.5
    cold_after_seconds: float = 1.0
    bridge_seconds: float = 0.25
    rest_seconds: float = 0.5
    restart_seconds: float = 2.0
    swing_seconds: float = 1.0
    repeatability: Repeatability | None = None
    anew_repeatability: Repeatability | None = None
    remark: str = ""


#: A state in addition to the regimes: a sustained visit after a rest, in which the device settles again.
ANEW = "anew"


@functools.cache
def _read_calibrations() -> dict[tuple[str, str, str], Repeatability]:
    """Calibrations by backend, state and operation. An empty string matches any. An operation can be followed by a
    dtype (``matmul int8``) or by ``backward``.
    """
    return {
        (row["backend"], row["state"], row["operation"]): Repeatability(
            run=float(row["run"]),
            launch_seconds=float(row["launch_seconds"]),
            ignores_within=bool(row["ignores_within"]),
            usual_celsius=float(row["usual_celsius"] or 0),
            per_degree=float(row["per_degree"] or 0),
        )
        for row in read_packaged_rows("repeatability.csv")
    }


def find_calibration(backend: str, state: str, problem: Any = None) -> Repeatability:
    """Return the calibration for a backend (by name), a state (a regime, or ANEW) and a problem. Raises KeyError for a
    state without a calibration.
    """
    known, operation = _read_calibrations(), "" if problem is None else problem.operation
    of_dtype = f"{operation} {getattr(problem, 'dtype', '')}"
    backward = [f"{operation} backward"] if getattr(problem, "has_backward", False) else []
    keys = itertools.product((backend, ""), (state,), (*backward, of_dtype, operation, ""))
    return known[next((key for key in keys if key in known), ("", state, ""))]
