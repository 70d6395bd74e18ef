"""What the regimes must know of a device: how it holds its boost clock, and how it settles under load."""

from __future__ import annotations

from dataclasses import dataclass

from mamf.statistics import Repeatability


@dataclass(frozen=True)
class BurstTraits:
    """How a device holds its boost clock. The defaults are an H100's, measured in docs/verification.md.

    ``train_seconds``: device time of one train of launches, well below the power controller's reaction (40 ms there).
    ``rest_ratio``: idle time owed per second of work before the clock is back at boost.
    ``longest_rest_seconds``: idle time that is enough whatever ran before.
    ``warm_in_seconds``: bursts after which a device that was idle for more than ``cold_after_seconds`` runs as it will
    go on to run; until then an H100 is up to 1 % faster.
    ``repeatability``: how far repeats lie apart; None: as calibrated for the backend (mamf.calibration).
    """

    train_seconds: float = 0.010
    rest_ratio: float = 3.0
    longest_rest_seconds: float = 1.0
    warm_in_seconds: float = 0.4
    cold_after_seconds: float = 0.15
    repeatability: Repeatability | None = None


@dataclass(frozen=True)
class SustainedTraits:
    """How a device settles under load.

    ``soak_seconds``: load from cold after which clock and power stay within 0.3 % (an H200).
    ``settle_seconds``: load after which a warm device has adapted to another kernel.
    ``cold_after_seconds``: an idle time after which the soak is owed again. ``bridge_seconds``: load queued while the
    host prepares the next kernel, because even a short idle time sets the power controller swinging for seconds.
    ``rest_seconds``: an idle time after which the power controller starts anew, 0 where nothing does; and
    ``restart_seconds``: load after which it has settled then. ``repeatability``, and ``anew_repeatability`` of
    visits after such a rest: None as in BurstTraits.
    ``swing_seconds``: the period of the damped swing of clock and power that a start sets off (0.9 to 1.1 s on an H100
    and an H200, 13 % from top to bottom at first): the mean over whole ones is the settled device's.
    """

    soak_seconds: float = 4.0
    settle_seconds: float = 0.5
    cold_after_seconds: float = 1.0
    bridge_seconds: float = 0.25
    rest_seconds: float = 0.5
    restart_seconds: float = 2.0
    swing_seconds: float = 1.0
    repeatability: Repeatability | None = None
    anew_repeatability: Repeatability | None = None
