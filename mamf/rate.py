"""A rate of a device: the common type of ceilings, contributed and published figures, and peaks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from mamf.choices import PeakSource
from mamf.dtypes import DTYPES
from mamf.measurement import TERA
from mamf.statistics import Interval

#: The source of a rate: ``measured`` on this device, ``contributed`` for its model, ``published`` by other people,
#: listed in a ``datasheet``, or ``given`` on the command line.
RateSource = Literal[PeakSource, "given"]
#: Tiers of rates without a log.
PUBLISHED, DATASHEET = "published, not checked", "datasheet"
_FAST = "fast accumulation"


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The FLOP or bytes per second of a device, and the source of that figure.

    - ``rate``: in ``unit``, which is TFLOPS (1e12 FLOP/s; int8: operations) or TB/s.
    - ``interval``: the 95 % repeat interval in the same unit; None for a datasheet or a published figure.
    - ``dtype``: as named by ``label_dtype``, which includes an unusual output dtype.
    - ``regime``: ``burst`` or ``sustained``; None for a datasheet or a published figure.
    - ``device``, ``uuid_hash``: the name, and the hashed identifier of the card if known.
    - ``source``: ``measured``, ``contributed``, ``published``, ``datasheet`` or ``given``. ``reference``: the log,
      address or datasheet. ``description``: both in one line.
    - ``tier``: that of the log in results/, else ``published, not checked`` or ``datasheet``.
    - ``date``: when it was measured (UTC); empty if unknown.
    """

    rate: float
    dtype: str
    device: str
    source: RateSource
    regime: str | None = None
    interval: Interval | None = None
    unit: str = "TFLOPS"
    uuid_hash: str | None = None
    description: str = ""
    tier: str = "complete"
    reference: str = ""
    date: str = ""

    @property
    def tflops(self) -> float:
        """The same as ``rate``, if it counts FLOP."""
        return self.rate

    @property
    def flops(self) -> float:
        """FLOP per second."""
        return self.rate * TERA


RateT = TypeVar("RateT", bound=Rate)
#: Rates by dtype (as named by ``label_dtype``) and regime.
Rates = Mapping[tuple[str, str], Rate]


def find_rate(rates: Mapping[tuple[str, str], RateT], dtype: str, regime: str) -> RateT | None:
    """The rate of a dtype in a regime, or None. A rate with fast accumulation is used only if there is no other; a rate
    with an unusual output dtype is never used.
    """
    return rates.get((dtype, regime)) or rates.get((f"{dtype}, {_FAST}", regime))


def label_dtype(problem: Any) -> str:
    """The dtype of a problem and, for matmul, what else its ceiling depends on: ``int8, int8 output`` or
    ``float8_e4m3fn, fast accumulation``. Every look-up of a rate uses this label.
    """
    dtype, is_fast = str(problem.dtype), getattr(problem, "fast_accumulation", None)
    if is_fast is None:  # not a matmul: its ceiling does not depend on the output dtype
        return dtype
    is_usual = dtype not in DTYPES or problem.out_dtype == DTYPES[dtype].default_output
    return ", ".join([dtype, *([] if is_usual else [f"{problem.out_dtype} output"]), *([_FAST] if is_fast else [])])
