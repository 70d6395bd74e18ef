"""Suggestions, those with the largest gain first, each with its figure. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mamf.ceilings.share import STATE_TOLERANCE, mamfu
from mamf.measurement import IDLE
from mamf.operations.model.shapes import SIZES
from mamf.profiling.folder import Folder
from mamf.profiling.groups import Group
from mamf.profiling.products import slow_products
from mamf.profiling.profile import Profile
from mamf.profiling.report import milliseconds

_GAIN, _FAR_BELOW, _IDLE, _NOTABLE = 1.05, 0.5, 0.1, 0.05
_DEFAULT = "sdpa"


def advice(folder: Folder, groups: Sequence[Group]) -> list[str]:
    """One line per suggestion, or a line that says that nothing stands out."""
    of_kernels = [*_far_below(folder, groups), *_faster_kernels(groups), *_left_out(groups)]
    return [*_step(folder), *_machine(folder), *of_kernels] or [_nothing(_shares(folder, groups))]


def _nothing(shares: Sequence[tuple[float, Group]]) -> str:
    if not shares:
        return "Measure a ceiling of these kernels (mamf find): without one their distance from it is unknown"
    least = min(share for share, _ in shares)
    return f"Nothing stands out: the best kernel of every shape reaches {least:.0%} of its ceiling and more"


def _shares(folder: Folder, groups: Sequence[Group]) -> list[tuple[float, Group]]:
    """The share of the ceiling that the best kernel of each group reaches, if the ceiling is known."""
    ceilings = folder.kernels.all_ceilings if folder.kernels else {}
    return [(share, group) for group in groups for row in group.rows[:1] if (share := mamfu(row, ceilings))]


def _machine(folder: Folder) -> Iterator[str]:
    for line in folder.headers[0].get("findings", ()) if folder.headers else ():
        if line.startswith("WARN"):
            yield f"Fix the machine: {line.removeprefix('WARN').strip()}"


def _faster_kernels(groups: Sequence[Group]) -> Iterator[str]:
    """Shapes for which torch's own choice is surely not the fastest."""
    gains = []
    for group in groups:
        usual = next((row for row in group.rows if row.kernel == _DEFAULT), None)
        if usual and not usual.interval.overlaps(group.rows[0].interval):
            gain = usual.seconds / group.rows[0].seconds
            gains += [(gain, group)] if gain >= _GAIN else []
    if gains:
        gain, group = max(gains, key=lambda each: each[0])
        yield (
            f"Call {group.rows[0].kernel} by name: {gain:.2f} times as fast as {_DEFAULT}, torch's own choice, for "
            f"{group.title} (and faster for {len(gains)} of {len(groups)} shapes)"
        )


def _far_below(folder: Folder, groups: Sequence[Group]) -> Iterator[str]:
    shares = _shares(folder, groups)
    if any(share > 1 + STATE_TOLERANCE for share, _ in shares):
        yield "Find the ceiling anew, on a quiet card: kernels reach more than it, so no share here means anything"
        return
    if low := [each for each in shares if each[0] < _FAR_BELOW]:
        share, group = min(low, key=lambda each: each[0])
        yield (
            f"{len(low)} of {len(shares)} shapes stay below {_FAR_BELOW:.0%} of the ceiling with their best kernel, "
            f"the least {share:.0%}: {group.title}. Longer sequences or larger batches fill a card better; where "
            "they do not, a kernel is missing"
        )


def _left_out(groups: Sequence[Group]) -> Iterator[str]:
    reasons = {row.kernel: f"{row.status}: {row.reason}" for group in groups for row in group.failed}
    for kernel, reason in reasons.items():
        yield f"{kernel} has no figure for some shapes ({reason})"


def _step(folder: Folder) -> Iterator[str]:
    """Suggestions for a model's training step, by time."""
    if folder.step is None:
        return
    _, profile = folder.step
    architecture = folder.headers[0]["device"].get("architecture") if folder.headers else None
    products = [
        (seconds, text)
        for seconds, text in slow_products(profile, architecture, [SIZES["small"]["vocabulary"]])
        if seconds >= _NOTABLE * profile.whole_seconds
    ]
    for seconds, text in sorted([*products, *_classes(profile, bool(products))], reverse=True):
        yield (
            f"{milliseconds(seconds / (profile.steps or 1))} ms of a model's step "
            f"({seconds / profile.whole_seconds:.0%}): {text}"
        )


def _classes(profile: Profile, is_explained: bool) -> Iterator[tuple[float, str]]:
    """Idle time, and classes far below the ceiling; products unless a line explains them."""
    for row in profile.classes:
        if row.name == IDLE and row.share >= _IDLE:
            during = f", most gaps in the trace while the host was in {profile.gaps[0].during}" if profile.gaps else ""
            yield row.visible, f"the device is idle{during}: larger batches, or mamf model --compile"
        elif row.mamfu is not None and row.mamfu < _FAR_BELOW and not (is_explained and row.name == "matmul"):
            yield row.visible, f"{row.name} at {row.mamfu:.0%} of the ceiling"
