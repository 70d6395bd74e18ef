"""What bounds a kernel, by the measured roofs: the compute ceiling and the memory bandwidth. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mamf.ceilings.roof import COMPUTE, RoofPoint, Roofs
from mamf.ceilings.share import STATE_TOLERANCE, Ceilings
from mamf.logs.run_log import RunLog
from mamf.measurement import TERA, Measurement
from mamf.profiling.profile import Profile
from mamf.regime_names import SUSTAINED

# From this share on, a roof bounds a kernel; below it on both, neither explains the kernel's time.
_AT_A_ROOF = 0.7


@dataclass(frozen=True)
class RoofShares:
    """Shares of a row's time that its FLOP at the ceiling, and its bytes at the bandwidth, would take; None if that
    roof was not measured.
    """

    compute: float | None
    memory: float | None

    @property
    def verdict(self) -> str:
        """What bounds the row, with the figures that say so."""
        known = {"compute": self.compute, "memory": self.memory}
        shares = {name: share for name, share in known.items() if share is not None}
        if not shares:
            return "no roof was measured"
        figures = ", ".join(f"{name} roof {share:.0%}" for name, share in shares.items())
        name, highest = max(shares.items(), key=lambda each: each[1])
        if highest > 1 + STATE_TOLERANCE:
            return f"unknown: it is above a roof ({figures}), which was measured on a busier card"
        if highest >= _AT_A_ROOF:
            return f"{name} ({figures})"
        if len(shares) == 1:
            return f"not {name} ({figures}); the other roof was not measured"
        return f"neither roof ({figures}): {1 - highest:.0%} of its time goes beyond what the nearer one asks for"


def roofs(row: Measurement, ceilings: Ceilings, bandwidth: float | None) -> RoofShares:
    """``bandwidth``: TB/s, as measured."""
    ceiling = ceilings.get((row.problem.dtype, row.regime))
    compute = None if ceiling is None else row.work.flop / (ceiling.tflops * TERA) / row.seconds
    return RoofShares(compute, None if bandwidth is None else row.work.nbytes / (bandwidth * TERA) / row.seconds)


def best_bandwidth(log: RunLog | None) -> Measurement | None:
    """The fastest row of a log of bandwidth."""
    rows = [row for row in log.measurements if row.ok and not row.phase] if log else []
    return max(rows, key=lambda row: row.best_rate, default=None)


def profile_points(profile: Profile, roofs: Roofs, kernel: str) -> Iterator[RoofPoint]:
    """A point for each class that computes: a script at work is held to the sustained compute ceilings of its dtypes.

    ``kernel``: what the points are called by, such as the script.
    """
    for row in profile.classes:
        if row.tflops is None:
            continue
        ceilings = [roofs.compute.get((dtype, SUSTAINED)) for dtype in row.flop]
        known = [ceiling.rate * TERA for ceiling in ceilings if ceiling is not None]
        # Seconds that the products would take at the ceilings of their dtypes.
        least = sum(flop / rate for flop, rate in zip(row.flop.values(), known, strict=False))
        is_known = len(known) == len(ceilings)
        yield RoofPoint(
            name=row.name,
            kernel=kernel,
            dtype="+".join(row.flop),
            regime=SUSTAINED,
            rate=row.tflops,
            unit="TFLOPS",
            tflops=row.tflops,
            intensity=None,
            roof=sum(row.flop.values()) / least / TERA if is_known else None,
            bound=COMPUTE if is_known else None,
        )
