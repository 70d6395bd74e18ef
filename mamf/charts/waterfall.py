"""Where FLOPS went, as data: a bar for each step down from the datasheet, and what operands cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """``lost``: TFLOPS to the step before, above the bar; negative where this one is higher. ``interval``: of the rate,
    where a repeat lies.
    """

    label: str
    tflops: float
    lost: float = 0.0
    told: str = ""
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class WaterfallChart:
    """``steps`` from the left to the right; ``data``: the same product on other operands, by distribution."""

    title: str
    subtitle: str
    steps: tuple[Bar, ...]
    data: tuple[Bar, ...] = ()
    notes: tuple[str, ...] = ()
