"""The regimes: ways in which mamf rests the device, flushes its cache, launches a kernel and decides when to stop.

A power-limited accelerator has two repeatable rates: one at the start of a load, and a lower one under lasting load. A
plain loop of launches measures an uncontrolled mix of the two (docs/measuring.md has the evidence). So every figure
names the regime that measured it:

- **burst**: rest until the requested clock is back at its maximum, then launch a train (a few launches) that ends
  before the slow power controller (20 to 50 ms) reacts. A second, fast power controller lowers the true clock within
  about 10 us, even in burst.
- **sustained**: launch back to back over rotating operands until clock and power settle, then measure for at least 2 s.
- **classic**: run mamf-finder's published loop, for comparison with the tables that mamf-finder's author published.
- **spaced** and **loaded**: verify the whole output of launches instead of measuring a rate. The regime spaced rests
  before each launch. The regime loaded launches back to back.

A whole run uses the same regime object. The object remembers the earlier launches, because they determine how long the
device must rest or warm up before the next shape.
"""

from __future__ import annotations

from mamf.engine.regimes.base import Regime, Samples, StoppingRule
from mamf.engine.regimes.burst import BurstRegime
from mamf.engine.regimes.classic import ClassicRegime
from mamf.engine.regimes.sustained import SustainedRegime
from mamf.engine.regimes.verifying import LoadedRegime, SpacedRegime
from mamf.errors import require_known_names

__all__ = [
    "BurstRegime",
    "ClassicRegime",
    "Regime",
    "Samples",
    "StoppingRule",
    "SustainedRegime",
    "get_regime_class",
]

_REGIME_CLASSES: dict[str, type[Regime]] = {
    kind.name: kind for kind in (BurstRegime, SustainedRegime, ClassicRegime, SpacedRegime, LoadedRegime)
}


def get_regime_class(name: str) -> type[Regime]:
    """Return the class of the regime ``name``. Raise UnknownNameError if there is none."""
    require_known_names(("regime", name, _REGIME_CLASSES))
    return _REGIME_CLASSES[name]
