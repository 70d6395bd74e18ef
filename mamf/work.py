"""What one launch does: exact FLOP and bytes, and which of them its rate counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """``flop`` and ``nbytes`` (read plus written, each operand once) of a launch, by the named ``convention``.

    ``unit``: of the rate that the operation is known by, in 1e12 a second: ``TFLOPS`` counts flop, ``TB/s`` bytes.
    """

    flop: float
    nbytes: int
    convention: str
    unit: str = "TFLOPS"

    @property
    def amount(self) -> float:
        """What the rate counts."""
        return float(self.flop if self.unit == "TFLOPS" else self.nbytes)
