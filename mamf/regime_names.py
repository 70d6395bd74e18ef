"""The regimes by name, for those who read figures and do not take them."""

from __future__ import annotations

from mamf.limits import require_known

BURST, SUSTAINED, CLASSIC = "burst", "sustained", "classic"
#: mamf-finder's own.
CLASSIC_WARMUP_SECONDS = 30.0
NAMES = (BURST, SUSTAINED, CLASSIC)
#: The statistic that a best is chosen by.
BEST_BY = {BURST: "median", SUSTAINED: "mean", CLASSIC: "fastest"}
#: What a find confirms: burst is MAMF, sustained MSMF.
CEILINGS = (BURST, SUSTAINED)


def require_regime(name: str) -> None:
    """Raises UnknownNameError."""
    require_known(("regime", name, NAMES))
