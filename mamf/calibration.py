"""Define the traits of a device by which the regimes time their rests and launches: when its slow power controller
reacts to load, and how long clock and power take to settle. Look up how much repeated runs differ (repeatability.csv).

The constants in repeatability.csv are calibrated on pairs of runs, by backend, state (a regime, or a visit after a
rest) and operation; ``tools/coverage.py results --fit`` fits them to logs. If no row names a backend or an operation,
the row in which that field is empty counts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from mamf.files import read_packaged_csv_rows
from mamf.statistics import Repeatability

#: The remark in rows of a device whose traits (see BurstTraits) are assumptions of its backend, not measurements.
ASSUMED_TRAITS_REMARK = (
    "mamf assumed how long to rest between series of launches, instead of measuring it on this device"
)


@dataclass(frozen=True)
class BurstTraits:
    """The traits of a device that the burst regime needs. Burst alternates trains (a few launches, one after another)
    with rests. The defaults were measured on an H100 (docs/evidence/intervals.md).

    - ``train_seconds``: the longest device time of a train, well below the time after which the slow power controller
      reacts to load (40 ms on an H100).
    - ``rest_ratio``: idle seconds per second of work until the requested clock is back at its maximum.
    - ``longest_rest_seconds``: idle seconds after which the requested clock is back at its maximum after any work.
    - ``warm_in_seconds``: seconds of trains and rests until a device that was idle for more than ``cold_after_seconds``
      reaches its steady speed. Until then an H100 is up to 1 % faster than later.
    - ``wake_seconds``: seconds of load until a rested device is as fast as before the rest. Burst queues this load
      ahead of each train.
    - ``repeatability``: how much repeated runs differ; None: as repeatability.csv says for the backend.
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
    """The traits of a device that the sustained regime needs: how clock and power settle under load.

    - ``soak_seconds``: seconds of load until clock and power of a cold device stay within 0.3 % (measured on an H200).
    - ``settle_seconds``: seconds of load until a warm device has adapted to another kernel.
    - ``cold_after_seconds``: idle seconds after which a device counts as cold.
    - ``bridge_seconds``: seconds of load to queue while the host prepares the next kernel, because even a short idle
      time makes the power controller oscillate for seconds.
    - ``rest_seconds``: idle seconds after which the power controller restarts; 0 if it never does.
      ``restart_seconds``: seconds of load until the restarted power controller has settled.
    - ``swing_seconds``: the period of the damped oscillation of clock and power when load begins (0.9 to 1.1 s on an
      H100 and an H200, at first 13 % from peak to trough). The mean rate over whole periods equals the rate of a device
      that has settled.
    - ``repeatability``: how much repeated runs differ; None: as repeatability.csv says for the backend.
      ``anew_repeatability``: how much they differ if each visit (one measurement of one kernel) follows a rest of
      ``rest_seconds``.
    - ``remark``: why rows in sustained cannot be trusted fully; empty if they can.
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


#: The state of repeatability.csv that is not a regime: a sustained measurement that follows a rest, after which the
#: power controller restarts and settles again.
AFTER_REST = "anew"


@functools.cache
def _read_repeatability_rows() -> dict[tuple[str, str, str], Repeatability]:
    """Read repeatability.csv: how much repeated runs differ, by backend, state and operation. An empty string as
    backend or operation means all backends or operations that have no entry. An operation can be followed by a dtype
    (``matmul int8``) or by ``backward``.
    """
    return {
        (row["backend"], row["state"], row["operation"]): Repeatability(
            run=float(row["run"]),
            launch_seconds=float(row["launch_seconds"]),
            ignores_within=bool(row["ignores_within"]),
            usual_celsius=float(row["usual_celsius"] or 0),
            per_degree=float(row["per_degree"] or 0),
        )
        for row in read_packaged_csv_rows("repeatability.csv")
    }


def look_up_repeatability(backend: str, state: str, problem: Any = None) -> Repeatability:
    """Return how much repeated runs of a problem differ, from repeatability.csv. ``backend``: the name of a backend.
    ``state``: a regime, or AFTER_REST. Raises KeyError for a state that repeatability.csv does not contain.
    """
    known, operation = _read_repeatability_rows(), "" if problem is None else problem.operation
    of_dtype = f"{operation} {getattr(problem, 'dtype', '')}"
    backward = [f"{operation} backward"] if getattr(problem, "has_backward", False) else []
    keys = itertools.product((backend, ""), (state,), (*backward, of_dtype, operation, ""))
    return known[next((key for key in keys if key in known), ("", state, ""))]
