"""The regimes: when to rest, flush, launch and stop.

Under matmul a power-limited accelerator has two repeatable states, and a plain loop measures an uncontrolled mix of
both (docs/measuring.md has the evidence). So every figure names its regime:

- **burst**: rest until the requested clock is back at its maximum, then launch a train that ends before the slow power
  controller (20 to 50 ms) reacts. A fast controller lowers the true clock within some 10 us, in bursts too.
- **sustained**: launch back to back over rotating operands until clock and power settle, then measure for at least 2 s.
- **classic**: run mamf-finder's published loop, for comparison with its tables.
- **spaced** and **loaded**: check the whole output of each launch instead of measuring a rate.

One regime object serves a whole run, because earlier launches decide how long the next shape must rest or soak.
"""

from __future__ import annotations

from mamf.engine.regimes.base import Regime, Samples, StoppingRule
from mamf.engine.regimes.burst import Burst
from mamf.engine.regimes.classic import Classic
from mamf.engine.regimes.sustained import Sustained
from mamf.engine.regimes.verifying import Loaded, Spaced
from mamf.plans import require_regime

__all__ = ["Burst", "Classic", "Regime", "Samples", "StoppingRule", "Sustained", "get_regime_class"]

_CLASSES: dict[str, type[Regime]] = {kind.name: kind for kind in (Burst, Sustained, Classic, Spaced, Loaded)}


def get_regime_class(name: str) -> type[Regime]:
    """Return the class of a regime. Raises UnknownNameError."""
    require_regime(name)
    return _CLASSES[name]
