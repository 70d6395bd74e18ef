"""The work of one launch: exact FLOP and bytes, and which of them the rate counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """``flop`` and ``nbytes`` (read plus written, each operand once) of a launch, counted by the named ``convention``.

    ``unit``: the unit of the rate, 1e12 per second: ``TFLOPS`` counts FLOP, ``TB/s`` counts bytes. ``has_products``:
    whether the FLOP are those of matrix products, so that the matmul ceiling limits them; always if they are counted.
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
