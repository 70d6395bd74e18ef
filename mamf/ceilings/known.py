"""Ceilings that were not measured beside the rows: of a log that was named, or what is known of the device. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.measurement import Measurement


@dataclass(frozen=True)
class KnownCeiling:
    """``tflops``: of products of a dtype in a regime (1e12 FLOP/s). ``source``: ``given``, ``measured`` or
    ``contributed``; ``told``: where it is from, a line.
    """

    dtype: str
    regime: str
    tflops: float
    source: str
    told: str


#: By dtype and regime.
KnownCeilings = Mapping[tuple[str, str], KnownCeiling]


def given_ceiling(ceiling: Ceiling) -> KnownCeiling:
    """That of a log which the command line names."""
    told = f"{ceiling.shape} by {ceiling.kernel}, of --ceiling"
    return KnownCeiling(ceiling.problem.dtype, ceiling.regime, ceiling.tflops, "given", told)


def known_share(row: Measurement, known: KnownCeilings) -> float | None:
    """A row as a share of the known ceiling of its dtype and regime: MAMFU. None where there is none, or no figure."""
    ceiling = known.get((row.problem.dtype, row.regime))
    return row.comparable_rate / ceiling.tflops if ceiling is not None and row.ok else None


def label_dtype(problem: Any) -> str:
    """``float8_e4m3fn, fast accumulation``: products that round otherwise are not ranked with one another."""
    return str(problem.dtype) + (", fast accumulation" if getattr(problem, "fast_accumulation", False) else "")
