"""burst, sustained, classic: when to idle, flush, launch and stop.

An accelerator at its power limit has two repeatable states, and a plain loop measures an uncontrolled mix of both
(docs/measuring.md has the evidence). Every figure therefore names its regime:

- **burst**: rest until the clock is back at boost, then a train of launches shorter than the power controller's
  reaction.
- **sustained**: back to back over rotating operands until clock and power have settled, then at least 2 s.
- **classic**: mamf-finder's published loop, for figures that line up with its tables.
- **spaced** and **loaded** verify: each launch's whole output is checked, and no figure is a rate.

A regime object lives for a whole run, because what ran before a shape decides how long to rest or soak.
"""

from __future__ import annotations

from mamf.engine.regimes.base import Regime, Samples, StoppingRule
from mamf.engine.regimes.burst import Burst
from mamf.engine.regimes.classic import Classic
from mamf.engine.regimes.sustained import Sustained
from mamf.engine.regimes.verifying import Loaded, Spaced
from mamf.regime_names import require_regime

__all__ = ["Burst", "Classic", "Regime", "Samples", "StoppingRule", "Sustained", "regime_class"]

_CLASSES: dict[str, type[Regime]] = {kind.name: kind for kind in (Burst, Sustained, Classic, Spaced, Loaded)}


def regime_class(name: str) -> type[Regime]:
    """Raises UnknownNameError."""
    require_regime(name)
    return _CLASSES[name]
