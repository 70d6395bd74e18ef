"""The work of one launch: its exact FLOP and bytes, and which of the two its rate counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """The work of one launch.

    - ``flop``, ``nbytes``: FLOP, and bytes read plus written (each operand once), by the named ``convention``.
    - ``unit``: the unit of the rate: ``TFLOPS`` counts FLOP, ``TB/s`` counts bytes, both 1e12 per second.
    - ``has_products``: whether the FLOP are those of matmul, so that the matmul ceiling limits them. Always True if the
      rate counts FLOP.
    """

    flop: float
    nbytes: int
    convention: str
    unit: str = "TFLOPS"
    has_products: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_products", self.has_products or self.unit == "TFLOPS")

    @property
    def amount(self) -> float:
        """The FLOP or bytes that the rate counts."""
        return float(self.flop if self.unit == "TFLOPS" else self.nbytes)
