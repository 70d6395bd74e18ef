"""Limits that no kernel of a device exceeds, and where they are found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.share import require_usable_ceiling
from mamf.contribution.known_ceilings import measured_peak
from mamf.errors import MamfError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.measurement import TERA
from mamf.operations.bandwidth.shapes import BandwidthProblem
from mamf.peaks import find_bandwidth
from mamf.regime_names import BURST

COMPUTE, BANDWIDTH = "compute", "bandwidth"


@dataclass(frozen=True)
class Roof:
    """``of``: compute (``rate`` in FLOP/s of a ``dtype``) or bandwidth (bytes/s). ``source``: measured, contributed or
    datasheet; ``told``: where it comes from, one line (a log field).
    """

    of: str
    rate: float
    source: str
    told: str
    dtype: str = ""


def given_compute_roof(ceiling: Ceiling) -> Roof:
    """The roof from the log of --ceiling."""
    dtype = ceiling.problem.dtype
    description = f"measured: {dtype} at {ceiling.shape} by {ceiling.kernel}"
    return Roof(COMPUTE, ceiling.rate * TERA, "measured", description, dtype)


def known_compute_roof(backend: Backend, dtype: str) -> Roof | None:
    """What ``mamf peak`` knows of burst; a datasheet's figure is not a ceiling."""
    try:
        known = measured_peak(backend, dtype, BURST)
    except MamfError:
        return None
    return Roof(COMPUTE, known.flops, known.source, known.description, dtype)


def given_bandwidth_roof(path: Path, backend: Backend) -> Roof:
    """The highest of the bandwidths that a find confirmed. Raises UsageError for a log without any, RunLogError for one
    that cannot be read, IncomparableError for another card's.
    """
    ceilings = read_run_log(path).own_ceilings
    in_burst = [each for (_, regime), each in ceilings.items() if regime == BURST]
    confirmed = [each for each in in_burst if isinstance(each.problem, BandwidthProblem)]
    if not confirmed:
        raise UsageError(f"{path} holds no bandwidth in burst: give a log of 'mamf find --operation bandwidth'")
    highest = max(confirmed, key=lambda each: each.rate)
    require_usable_ceiling(highest, backend)
    description = f"measured: {highest.problem.pattern} of {highest.shape} by {highest.kernel}"
    return Roof(BANDWIDTH, highest.rate * TERA, "measured", description)


def known_bandwidth_roof(backend: Backend) -> Roof | None:
    """The datasheet's, which no kernel reaches."""
    rate = find_bandwidth(backend.info.name, backend.info.compute_units)
    description = "datasheet; no kernel reaches it: mamf find --operation bandwidth, and --bandwidth-ceiling LOG"
    return None if rate is None else Roof(BANDWIDTH, rate, "datasheet", description)
