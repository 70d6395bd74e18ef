"""The names of the regimes, for code that reads figures without measuring."""

from __future__ import annotations

from mamf.limits import require_known

BURST, SUSTAINED, CLASSIC = "burst", "sustained", "classic"
#: The warm-up of mamf-finder.
CLASSIC_WARMUP_SECONDS = 30.0
NAMES = (BURST, SUSTAINED, CLASSIC)
#: The statistic that ranks rows.
BEST_BY = {BURST: "median", SUSTAINED: "mean", CLASSIC: "fastest"}
#: The regimes in which a find confirms ceilings: burst gives MAMF, sustained gives MSMF.
CEILINGS = (BURST, SUSTAINED)


def require_regime(name: str) -> None:
    """Raises UnknownNameError unless ``name`` is a regime."""
    require_known(("regime", name, NAMES))
