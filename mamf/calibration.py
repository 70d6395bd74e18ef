"""Define the traits of a device: how its clock and power react to load. mamf uses the traits to decide how long to load
a device and how long to let it rest. This module also looks up how much repeated runs differ.

A device under load lowers its clock after some tens of milliseconds, to stay within its power limit. The traits say
when this slow power controller reacts, and how long clock and power take to settle.

repeatability.csv lists how much repeated runs differ, by backend, operation and state. The state is a regime (a way of
loading the device, such as ``burst``), ``anew`` for sustained measurements after a rest, or a regime followed by
``cycles`` for the clock cycles that a kernel uses. A row without a backend or operation applies to all backends or
operations that have no separate row. ``tools/coverage.py results --fit`` fits the values to pairs of runs.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from mamf.files import read_packaged_csv_rows
from mamf.statistics import Repeatability

#: The remark that rows of a log get if the traits of the device were assumed, not measured (see BurstTraits).
ASSUMED_TRAITS_REMARK = (
    "mamf assumed how long to rest between series of launches, instead of measuring it on this device"
)


@dataclass(frozen=True)
class BurstTraits:
    """The traits of a device that the burst regime needs. Burst alternates trains (a few launches, one after another)
    with rests. The defaults were measured on an H100 (docs/evidence/intervals.md).

    - ``train_seconds``: the maximum device time of a train. It must be well below the time after which the slow power
      controller reacts to load (40 ms on an H100).
    - ``rest_ratio``: how long the device must idle until the driver requests the maximum clock again, in seconds per
      second of earlier work.
    - ``longest_rest_seconds``: the longest rest. After this many idle seconds, the driver requests the maximum clock
      again even if the device worked for a long time.
    - ``warm_in_seconds``: how many seconds of trains and rests a cold device needs to reach its steady speed. An H100
      is up to 1 % faster while it is cold.
    - ``cold_after_seconds``: the device counts as cold if it stays idle for longer than this after the end of a rest.
    - ``wake_seconds``: how many seconds of load the device needs after a rest to become as fast as before. Burst queues
      this load ahead of each train.
    - ``repeatability``: how much repeated runs differ; None: use the values of repeatability.csv.
    - ``remark``: why rows of the burst regime cannot be trusted fully; empty if they can.
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
    """The traits of a device that the sustained regime needs. This regime keeps the device busy, and begins to measure
    when clock and power have settled.

    - ``soak_seconds``: how many seconds of load a cold device needs until its clock and power stay within 0.3 % of
      their final values. The default was measured on an H200.
    - ``settle_seconds``: how many seconds of load it takes after a change of kernel until clock and power of a warm
      device have settled.
    - ``cold_after_seconds``: a device that was idle for more seconds than this counts as cold.
    - ``bridge_seconds``: how many seconds of launches mamf queues to keep the device busy while the host prepares the
      next kernel. After even a short idle time, the power controller would oscillate for seconds.
    - ``rest_seconds``: after this many idle seconds, the power controller restarts and must settle again; 0 if it never
      restarts.
    - ``restart_seconds``: how many seconds of load the power controller needs to settle after it has restarted.
    - ``swing_seconds``: the period with which clock and power oscillate when load begins, until the oscillation fades.
      On an H100 and an H200 it is 0.9 to 1.1 s, and the first swing is 13 % from peak to trough. The mean rate over
      whole periods equals the rate after the device has settled.
    - ``repeatability``: how much repeated runs differ; None: use the values of repeatability.csv.
    - ``repeatability_after_rest``: how much repeated runs differ if the device rests for ``rest_seconds`` before each
      measurement; None: use the values of repeatability.csv.
    - ``remark``: why rows of the sustained regime cannot be trusted fully; empty if they can.
    """

    soak_seconds: float = 4.0
    settle_seconds: float = 0.5
    cold_after_seconds: float = 1.0
    bridge_seconds: float = 0.25
    rest_seconds: float = 0.5
    restart_seconds: float = 2.0
    swing_seconds: float = 1.0
    repeatability: Repeatability | None = None
    repeatability_after_rest: Repeatability | None = None
    remark: str = ""


#: The state in repeatability.csv for sustained measurements that follow a rest. After a rest, the power controller
#: restarts and settles again. The other states have the names of regimes.
AFTER_REST_STATE = "anew"


@functools.cache
def _read_repeatability_rows() -> dict[tuple[str, str, str], Repeatability]:
    """Read repeatability.csv, which says how much repeated runs differ. Return its values by backend, state and
    operation.

    The backend or the operation is empty in rows that apply to all others. The operation is a name, a name with a dtype
    (``matmul int8``), or a name with the word ``backward``.
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
    ``state``: a regime, or AFTER_REST_STATE. Raises KeyError for a state that repeatability.csv does not contain.
    """
    rows_by_key, operation = _read_repeatability_rows(), "" if problem is None else problem.operation
    operation_with_dtype = f"{operation} {getattr(problem, 'dtype', '')}"
    backward = [f"{operation} backward"] if getattr(problem, "has_backward_pass", False) else []
    keys = itertools.product((backend, ""), (state,), (*backward, operation_with_dtype, operation, ""))
    return rows_by_key[next((key for key in keys if key in rows_by_key), ("", state, ""))]
