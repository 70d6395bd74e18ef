"""The names of the regimes, for code that does not measure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mamf.limits import require_known

BURST, SUSTAINED, CLASSIC = "burst", "sustained", "classic"
#: The warm-up of mamf-finder.
CLASSIC_WARMUP_SECONDS = 30.0
#: Regimes that check results instead of measuring: with a rest before each launch, or back to back at the power limit.
SPACED, LOADED = CHECKING = ("spaced", "loaded")
NAMES = (BURST, SUSTAINED, CLASSIC, *CHECKING)
#: The statistic that ranks rows.
BEST_BY = {BURST: "median", SUSTAINED: "mean", CLASSIC: "fastest", SPACED: "median", LOADED: "median"}
#: The regimes of ceilings: burst gives MAMF, sustained gives MSMF.
CEILINGS = (BURST, SUSTAINED)


def asked_regimes(asked: Collection[str] | None, default: Sequence[str], known: Sequence[str] = ()) -> tuple[str, ...]:
    """The requested regimes, else ``default``, in the order of ``known`` (if empty: of ``default``)."""
    return tuple(name for name in known or default if name in (asked or default))


def require_regime(name: str) -> None:
    """Raises UnknownNameError unless ``name`` is a regime."""
    require_known(("regime", name, NAMES))
