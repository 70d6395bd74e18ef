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

from typing import TYPE_CHECKING, Any

from mamf.regime_names import BURST, CLASSIC, NAMES, SUSTAINED, require_regime

if TYPE_CHECKING:
    from mamf.engine.regimes.base import Regime, Samples, StoppingRule
    from mamf.engine.regimes.burst import Burst
    from mamf.engine.regimes.classic import Classic
    from mamf.engine.regimes.sustained import Sustained

__all__ = ["NAMES", "Burst", "Classic", "Regime", "Samples", "StoppingRule", "Sustained", "regime_class"]

_HOMES = {
    **dict.fromkeys(("Regime", "Samples", "StoppingRule"), "base"),
    "Burst": BURST,
    "Sustained": SUSTAINED,
    "Classic": CLASSIC,
    **dict.fromkeys(("Spaced", "Loaded"), "verifying"),
}


def __getattr__(name: str) -> Any:
    """Load a regime when it is first used: readers of logs need only the names."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mamf.engine.regimes' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"mamf.engine.regimes.{_HOMES[name]}"), name)


def regime_class(name: str) -> type[Regime]:
    """Raises UnknownNameError."""
    require_regime(name)
    kind: type[Regime] = __getattr__(name.capitalize())
    return kind
