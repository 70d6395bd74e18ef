"""Suggestions, those with the largest gain first, each with its figure. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mamf.ceilings.share import STATE_TOLERANCE, mamfu
from mamf.logs.run_log import RunLog
from mamf.measurement import IDLE, Measurement
from mamf.operations.model.shapes import SIZES
from mamf.operations.tracing.classes import COMMUNICATION
from mamf.profiling.folder import Folder
from mamf.profiling.profile import Profile
from mamf.profiling.report import Gain, milliseconds
from mamf.report.rows import shape_title

#: Generations by the architectures that have their matrix instructions, and by what names of kernels say, the newest
#: first. 8.6, 8.9 and 12.x have those of 8.0.
DEVICES = ((100, r"^sm_1[01]\d"), (90, r"^sm_90"), (80, r"^sm_(8\d|12\d)"), (75, r"^sm_75"), (70, r"^sm_7[02]"))
KERNELS = (
    (100, r"(sm|cutlass)_?1[01]\d(?!\d)"),
    (90, r"(sm|cutlass)_?90(?!\d)"),
    (80, r"(sm|cutlass)_?8\d(?!\d)|ampere_"),
    (75, r"(sm|cutlass)_?75(?!\d)|turing_"),
    (70, r"(sm|cutlass)_?7[02](?!\d)|volta_"),
)
#: Kernels without matrix instructions, or with those that did not change: an older generation is no loss.
UNCHANGED = r"sgemm|dgemm|simt|d884|gemv|f32f32_f32f32|f64f64|splitkreduce"
#: Rows of the operands begin off multiples of 16 bytes, as a kernel's name says it.
UNALIGNED = r"align[12](?!\d)"


def is_older(kernel: str, architecture: str | None) -> bool:
    """Whether a kernel is of an older generation than the device; False if one of the two is unknown."""
    device = next((number for number, pattern in DEVICES if re.search(pattern, architecture or "")), 0)
    own = next((number for number, pattern in KERNELS if re.search(pattern, kernel, re.IGNORECASE)), device)
    return own < device and not re.search(UNCHANGED, kernel, re.IGNORECASE)


def slow_products(profile: Profile, architecture: str | None, usual: Iterable[int]) -> Iterator[tuple[float, str]]:
    """Seconds in all profiled steps and their cause: products with a dimension that is not a multiple of 8, then
    others on kernels of an older generation. ``architecture``: the device's. ``usual``: sizes of the model, used
    if the profile holds no shapes.
    """
    products = [row for row in profile.kernels if row.class_name == "matmul"]
    unaligned = [row for row in products if row.unaligned or re.search(UNALIGNED, row.name)]
    older = [row for row in products if is_older(row.name, architecture)]
    recorded = [int(size) for row in unaligned for shape in row.unaligned.split() for size in shape.split("x")]
    padded = ", ".join(f"{size} to {-(-size // 64) * 64}" for size in sorted({*(recorded or usual)}) if size % 8)
    old, total = " on kernels of an older generation than the device", sum(row.seconds for row in products) or 1.0
    for rows, why in (
        (
            unaligned,
            f"{old if set(older) & set(unaligned) else ''} because a dimension is not a multiple of 8: pad it to a "
            f"multiple of 64{f' ({padded})' if padded else ''}, such as the vocabulary",
        ),
        ([row for row in older if row not in unaligned], f"{old}: compare libraries and versions with mamf explain"),
    ):
        seconds = sum(row.seconds for row in rows)
        yield seconds, f"products{why}; {seconds / total:.0%} of the time of all products"


@dataclass(frozen=True)
class Group:
    """Rows that can be compared with one another, the best first. ``failed``: without a figure."""

    title: str
    rows: tuple[Measurement, ...]
    failed: tuple[Measurement, ...]

    @property
    def leanest(self) -> Measurement | None:
        """The row of the least memory, if that is known for all."""
        if any(row.peak_memory_bytes is None for row in self.rows):
            return None
        return min(self.rows, key=lambda row: row.peak_memory_bytes or 0, default=None)


def groups_of(log: RunLog | None) -> list[Group]:
    """The rows of a log by regime, problem and shape."""
    found: dict[tuple[object, ...], list[Measurement]] = {}
    operation = log.header["plan"].get("operation") if log else None
    for row in log.measurements if log else ():
        if row.operation == operation and not row.is_reference and not row.phase:
            found.setdefault((row.regime, row.problem, row.shape), []).append(row)
    return [_group(rows) for rows in found.values()]


def _group(rows: Sequence[Measurement]) -> Group:
    measured = sorted((row for row in rows if row.ok), key=lambda row: -row.best_rate)
    return Group(shape_title(rows[0]), tuple(measured), tuple(row for row in rows if not row.ok))


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


#: Shares of the time of the steps, and of a product's time, below which there is nothing to gain.
_LEAST_GAIN, _FASTER = 0.005, 0.05


def gains(profile: Profile) -> list[Gain]:
    """What to change in a script, by the seconds to be gained in all profiled steps, the largest first.

    Each follows from the profile, or from what was measured beside it.
    """
    return sorted(
        (
            gain
            for gain in (*_of_products(profile), *_of_classes(profile))
            if gain[0] >= _LEAST_GAIN * profile.whole_seconds
        ),
        reverse=True,
    )


def _of_products(profile: Profile) -> Iterator[Gain]:
    for row in profile.products:
        name, saved = f"{row.shape} ({row.dtype}, {row.layout})", row.saved_by_padding or 0.0
        if saved >= _FASTER * row.seconds:
            yield saved, f"pad {name} to {row.padded}: both were measured alone"
        share = row.tflops / row.alone if row.alone else 1.0
        if share < 1 - _FASTER:
            yield row.seconds * (1 - share), f"at most: {name} reaches {share:.0%} of its rate alone, in burst"


# Bounds: of idle time and communication all that is visible, of other classes what they lack to the ceiling.
def _of_classes(profile: Profile) -> Iterator[Gain]:
    for row in profile.classes:
        if row.name == IDLE:
            during = f"; most gaps while the host was in {profile.gaps[0].during}" if profile.gaps else ""
            yield row.visible, f"at most: keep the device busy, it is idle{during}"
        elif row.name == COMMUNICATION:
            yield row.visible, "at most: overlap communication with computation, nothing hides this part"
        elif row.mamfu is not None and row.mamfu < 1:
            share = f"{row.name} runs at {row.mamfu:.0%} of the ceiling"
            yield row.multiplying * (1 - row.mamfu), f"at most: {share}; see its products and kernels"
