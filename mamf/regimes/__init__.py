"""burst, sustained, classic: when to idle, flush, launch and stop.

An accelerator at its power limit has two repeatable states, and a plain loop measures an uncontrolled mix of both
(docs/measuring.md has the evidence). Every figure therefore names its regime:

- **burst**: rest until the clock is back at boost, then a train of launches shorter than the power controller's
  reaction.
- **sustained**: back to back over rotating operands until clock and power have settled, then at least 2 s.
- **classic**: mamf-finder's published loop, for figures that line up with its tables.

A regime object lives for a whole run, because what ran before a shape decides how long to rest or soak.
"""

from __future__ import annotations

from mamf.errors import UnknownNameError
from mamf.regimes.base import Regime, Samples, StoppingRule
from mamf.regimes.burst import Burst
from mamf.regimes.classic import Classic
from mamf.regimes.sustained import Sustained

__all__ = ["REGIMES", "Burst", "Classic", "Regime", "Samples", "StoppingRule", "Sustained", "regime_class"]

REGIMES: dict[str, type[Regime]] = {regime.name: regime for regime in (Burst, Sustained, Classic)}


def regime_class(name: str) -> type[Regime]:
    """Raises UnknownNameError."""
    if name not in REGIMES:
        raise UnknownNameError("regime", name, REGIMES)
    return REGIMES[name]
