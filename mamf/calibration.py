"""Define the traits of a device from which mamf computes how long to load the device and how long to let it rest. This
module also looks up how much repeated runs differ.

A device under load lowers its clock after some tens of milliseconds, to stay within its power limit. The traits say
when this slow power controller reacts, and how long clock and power take to settle.

repeatability.csv lists how much repeated runs differ, by backend, operation and state. A state is a regime (a way of
loading the device, such as ``burst``) or a sustained measurement after a rest. ``tools/coverage.py results --fit`` fits
the values to pairs of runs. A row with an empty backend or operation is the default for backends or operations that
have no separate row.
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
    - ``rest_ratio``: how many seconds the device must idle per second of earlier work, until the driver requests the
      maximum clock again.
    - ``longest_rest_seconds``: after this many idle seconds the driver requests the maximum clock again, no matter how
      long the device worked before. No rest is longer.
    - ``warm_in_seconds``: how many seconds of trains and rests a cold device needs to reach its steady speed. An H100
      is up to 1 % faster while it is cold.
    - ``cold_after_seconds``: a device that idles for this many seconds longer than its rest counts as cold.
    - ``wake_seconds``: how many seconds of load it takes after a rest until the device is as fast as before. Burst
      queues this load ahead of each train.
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
    - ``bridge_seconds``: seconds of load that mamf queues before the host prepares the next kernel, so that the device
      does not idle. Even a short idle time makes the power controller oscillate for seconds.
    - ``rest_seconds``: the power controller restarts after this many idle seconds; 0 if it never does.
      ``restart_seconds``: how many seconds of load it takes until the restarted power controller has settled.
    - ``swing_seconds``: the period of the damped oscillation of clock and power when load begins (0.9 to 1.1 s on an
      H100 and an H200, at first 13 % from peak to trough). The mean rate over whole periods equals the rate of a device
      that has settled.
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
    """Read repeatability.csv: how much repeated runs differ, by backend, state and operation. A row with an empty
    backend or operation is the default for backends or operations that have no separate row. A dtype (``matmul int8``)
    or ``backward`` can follow the name of the operation.
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
