"""Axes: from values to places, and the ticks between them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MARGIN = 0.05
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` at places from ``start`` to ``end``; by their logarithm if ``is_log``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low * 1e-3) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Round values within the scale, at most about ``most``, with their texts."""
        values = _log_ticks(self.low, self.high, most) if self.is_log else _even_ticks(self.low, self.high, most)
        return [(value, f"{value:.6g}") for value in values]


def scale_of(
    values: Iterable[float], start: float, end: float, *, is_log: bool = False, from_zero: bool = False
) -> Scale:
    """A scale that holds all values, with a margin at both ends; ``from_zero``: it begins at 0."""
    low, high = _ends(list(values))
    if is_log:
        margin = max((high / low) ** _MARGIN, 1.05)
        return Scale(low / margin, high * margin, start, end, True)
    if from_zero:
        return Scale(0.0, (high or 1.0) * (1 + _MARGIN), start, end)
    margin = _MARGIN * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - margin, high + margin, start, end)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values, default=0.0), max(values, default=1.0)


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(each for each in _STEPS if each * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, and 2 and 5 between them where there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 2, 5), (1, 3), (1,)):
        found = [part * 10.0**decade for decade in decades for part in parts]
        within = [value for value in found if low <= value <= high]
        if len(within) <= most + 2:
            return within if len(within) > 1 else _even_ticks(low, high, most)
    return within[:: -(-len(within) // most)]
