"""Ceilings that this run did not measure: from a log given on the command line, or known for the device. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.measurement import Measurement


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
    """A label such as ``float8_e4m3fn, fast accumulation``: products with different rounding are ranked separately."""
    return str(problem.dtype) + (", fast accumulation" if getattr(problem, "fast_accumulation", False) else "")
