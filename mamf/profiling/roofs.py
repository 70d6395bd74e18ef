"""The classes of a profile as points under measured roofs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mamf.ceilings.roof import COMPUTE, RoofPoint, Roofs
from mamf.measurement import TERA
from mamf.profiling.profile import Profile
from mamf.regime_names import SUSTAINED


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
