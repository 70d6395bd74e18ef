"""Profiles as stacked bars: one bar per run, its classes from the bottom to the top. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mamf.errors import IncomparableError
from mamf.profiling.profile import Profile
from mamf.profiling.report import milliseconds
from mamf.report.charts.stacked import LEAST_SHARE, Stack, StackedChart, StackedPanel


def profile_chart(runs: Sequence[tuple[str, Profile]]) -> StackedChart:
    """Profiles with the labels of their bars. Raises IncomparableError if the steps of only some are known."""
    if len({profile.steps is None for _, profile in runs}) > 1:
        raise IncomparableError("the steps of some of the profiles are unknown: there is no step to compare")
    devices = list(dict.fromkeys(_device(profile) for _, profile in runs))
    bars = [
        Stack(name if len(devices) == 1 else f"{name}, {_device(profile)}", tuple(_parts(profile)))
        for name, profile in runs
    ]
    what = "all that was traced" if runs[0][1].steps is None else "a step"
    notes = [
        "each instant is of one class, so a bar is as high as its step; what ran hidden beside another is left out"
    ]
    notes += [
        f"{name}: with the profiler, which adds to its idle time"
        if profile.unprofiled_step_seconds is None
        else f"{name}: without the profiler, which makes it {milliseconds(profile.step_seconds)} ms"
        for name, profile in runs
    ]
    return StackedChart(
        f"Where {what} goes, by class",
        ", ".join(devices),
        "milliseconds",
        "",
        (StackedPanel("", tuple(bars)),),
        notes=tuple(notes),
    )


def _device(profile: Profile) -> str:
    return profile.device or ("an unknown device" if profile.is_of_device else "the CPU")


def _parts(profile: Profile) -> Iterable[tuple[str, float]]:
    """Classes in their order, idle last."""
    for row in profile.classes:
        if row.share >= LEAST_SHARE:
            yield row.name, row.visible / (profile.steps or 1) * 1e3
