"""The share of a ceiling that a row reaches, the drift of the card since the ceiling run, and known ceilings. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling
from mamf.dtypes import DTYPES
from mamf.errors import IncomparableError
from mamf.measurement import Measurement
from mamf.timers import relative_accuracy

#: Ceilings by dtype and regime.
Ceilings = Mapping[tuple[str, str], Ceiling]
#: The largest share of a ceiling that measuring it later can explain.
MAX_SHARE = 1.1
#: The largest drift of the card's speed, as a share, that reports do not mention.
STATE_TOLERANCE = 0.01


def mamfu(row: Measurement, ceilings: Ceilings) -> float | None:
    """MAMFU: a row as a share of the ceiling of its dtype and regime; None if there is no such ceiling or its interval
    is unknown. Rows are normalized to the run's first device, which the ceiling belongs to.
    """
    ceiling = ceilings.get((row.problem.dtype, row.regime))
    if ceiling is None or row.summary is None or not ceiling.interval.is_known:
        return None
    return ceiling.utilization(flop=row.flop, seconds=row.comparable_seconds, regime=row.regime)


def share_accuracy(row: Measurement, ceilings: Ceilings) -> float:
    """The relative error of ``mamfu`` that the timer may cause: the accuracies of row and ceiling in quadrature. 0 if
    they are unknown or there is no ceiling.
    """
    ceiling = ceilings.get((row.problem.dtype, row.regime))
    if ceiling is None or row.summary is None or not row.timer_accuracy:
        return 0.0
    return math.hypot(row.accuracy, relative_accuracy(row.timer_accuracy, ceiling.seconds))


def is_beyond(share: float, row: Measurement, ceilings: Ceilings) -> bool:
    """Whether a share exceeds 1 by more than drift and the timer explain."""
    return share > 1 + STATE_TOLERANCE + share_accuracy(row, ceilings)


def has_drifted(row: Measurement, ceilings: Ceilings) -> bool:
    """Whether the reference product around a row differs from its ceiling by more than a steady card and the timer
    explain. Both are the same product, so only the accuracy of the ceiling counts.
    """
    drift, ceiling = compute_drift(row, ceilings), ceilings.get((row.problem.dtype, row.regime))
    if drift is None or ceiling is None:
        return False
    return abs(drift) > STATE_TOLERANCE + relative_accuracy(row.timer_accuracy, ceiling.seconds)


def compute_drift(row: Measurement, ceilings: Ceilings) -> float | None:
    """The drift of the card around a row: the rate of the reference product relative to its ceiling, minus 1."""
    ceiling, seen = ceilings.get((row.problem.dtype, row.regime)), row.details.get("reference_tflops")
    return None if ceiling is None or seen is None else float(seen) / (row.device_speed or 1.0) / ceiling.tflops - 1


def require_usable_ceiling(ceiling: Ceiling, backend: Backend) -> None:
    """Raises IncomparableError if the interval of a ceiling is unknown, or if it is from another device: cards of one
    model differ by percents.
    """
    if not ceiling.interval.is_known:
        raise IncomparableError(
            f"the {ceiling.regime} ceiling is too noisy to take a share of it: find it again with 'mamf find'"
        )
    info = backend.info
    same = ceiling.device == info.name and (
        ceiling.uuid_hash is None or info.uuid_hash is None or ceiling.uuid_hash == info.uuid_hash
    )
    if not same:
        other = "another card with that name" if ceiling.device == info.name else ceiling.device
        raise IncomparableError(f"the ceiling is from {other}, not this {info.name}: measure it here with 'mamf find'")


@dataclass(frozen=True)
class KnownCeiling:
    """The ceiling of products of a dtype in a regime: ``tflops`` (1e12 FLOP/s). ``source``: ``given``, ``measured`` or
    ``contributed``. ``told``: one line on its origin; logs have a field of this name.
    """

    dtype: str
    regime: str
    tflops: float
    source: str
    told: str


#: Known ceilings by dtype and regime.
KnownCeilings = Mapping[tuple[str, str], KnownCeiling]


def given_ceiling(ceiling: Ceiling) -> KnownCeiling:
    """The known ceiling for a log given on the command line."""
    told = f"{ceiling.shape} by {ceiling.kernel}, from --ceiling"
    return KnownCeiling(ceiling.problem.dtype, ceiling.regime, ceiling.tflops, "given", told)


def known_share(row: Measurement, known: KnownCeilings) -> float | None:
    """MAMFU: a row as a share of the known ceiling of its dtype and regime. None without a ceiling or a valid row."""
    ceiling = known.get((row.problem.dtype, row.regime))
    return row.comparable_rate / ceiling.tflops if ceiling is not None and row.ok else None


def label_dtype(problem: Any) -> str:
    """A label such as ``float8_e4m3fn, fast accumulation``: products with other rounding or an unusual output are
    ranked separately.
    """
    dtype, known = str(problem.dtype), DTYPES.get(problem.dtype)
    output = getattr(problem, "out_dtype", None)
    is_usual = output is None or known is None or output == known.default_output
    others = ["" if is_usual else f"{output} output"]
    others += ["fast accumulation"] if getattr(problem, "fast_accumulation", False) else []
    return ", ".join(filter(None, (dtype, *others)))
