"""A profile: its classes, its top kernels and its gaps; several side by side as stacked bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from operator import attrgetter, itemgetter
from typing import TypeVar

from mamf.errors import IncomparableError
from mamf.operations.tracing.classes import UNCLASSIFIED
from mamf.profiling.breakdown import ClassRow, ProductRow
from mamf.profiling.profile import GapRow, KernelRow, MemoryRow, Profile
from mamf.report.charts.stacked import LEAST_SHARE, Stack, StackedChart, StackedPanel
from mamf.report.columns import rate_column
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.shares import known_ceiling_lines
from mamf.report.text import counted, rate_text, significant

RowT = TypeVar("RowT")

# Kernels that are instances of templates have names of a thousand characters.
_LONGEST_NAME, _SHORTEST_NAME = 70, 24
_SHORTENED = itemgetter(slice(_LONGEST_NAME))
_MOST_CLASSES = 3
# In seconds, what rounding leaves.
_NOTHING = 1e-12
# The share of a class's time without a known FLOP formula that is worth a line.
_NOTABLE = 0.01
_DERIVED = ("flop", "tflops", "mamfu", "whole_seconds", "busy_seconds", "gap_seconds")


def profile_document(script: str, profile: Profile, top: int | None = 10) -> Document:
    """Csv holds the classes."""
    tables = ("classes", "kernels", "gaps", "memory", "modules", "products")
    whole = {name: value for name, value in asdict(profile).items() if name not in tables}
    blocks: list[Block] = [
        Lines([*_title(script, profile), *known_ceiling_lines(profile.ceilings)]),
        Table(class_columns(profile), profile.classes, key="classes"),
        Table(class_columns(profile, "module"), profile.modules, key="modules", top=top),
        Table(product_columns(profile), profile.products, key="products", top=top),
        Table(kernel_columns(profile), profile.kernels, key="kernels", top=top),
        Table(gap_columns(profile), profile.gaps, key="gaps", top=top),
        Table(memory_columns(profile.memory), with_peak(profile.memory), key="memory"),
        Lines(list(_end(profile))),
        Answer([conclusion(profile)]),
    ]
    data = {"script": script, **whole, **{name: getattr(profile, name) for name in _DERIVED}}
    return Document(f"Profile of {script}", blocks, data)


def _title(script: str, profile: Profile) -> Iterator[str]:
    where = device_of(profile)
    took = milliseconds(profile.step_seconds)
    if profile.steps is None:
        yield f"{script} on {where}: {milliseconds(profile.seconds)} ms in all; its steps are unknown"
        return
    yield f"{script} on {where}: {counted(profile.steps, 'step')} of {took} ms with the profiler"
    if profile.unprofiled_step_seconds is not None:
        slower = profile.step_seconds / profile.unprofiled_step_seconds - 1
        yield (
            f"{milliseconds(profile.unprofiled_step_seconds)} ms without it, in the steps right before: "
            f"with the profiler a step is {abs(slower):.0%} {'longer' if slower >= 0 else 'shorter'}"
        )
    if profile.tflops is not None:
        share = "" if profile.mamfu is None else f", {profile.mamfu:.1%} MAMFU"
        time = "" if profile.unprofiled_step_seconds is None else " in the time without it"
        work = rate_text(profile.flop / profile.steps / 1e12, "TFLOP")
        yield f"a step multiplies {work}: {rate_text(profile.tflops, 'TFLOPS')}{share}{time}"


def class_columns(profile: Profile, what: str = "class") -> list[Column[ClassRow]]:
    """Times, calls and FLOP are per step for people, and of all steps in csv and json. ``what``: class or module."""
    steps = profile.steps or 1
    rows = profile.classes if what == "class" else profile.modules
    return [
        Column(what, what, lambda row: row.name, _SHORTENED, left=True, shortest=_SHORTEST_NAME),
        Column("share", "share", lambda row: row.share, "{:.1%}".format),
        Column("step_seconds", "ms", lambda row: row.visible / steps, milliseconds),
        Column("", "hidden ms", lambda row: row.hidden / steps if row.hidden > _NOTHING else None, milliseconds, 3),
        Column("", "calls" if what == "class" else "", lambda row: row.calls / steps, importance=3),
        Column("calls", "", lambda row: row.calls),
        Column("visible_seconds", "", lambda row: row.visible),
        Column("hidden_seconds", "", lambda row: row.hidden),
        Column("flop", "", lambda row: sum(row.flop.values())),
        Column("dtypes", "", lambda row: " ".join(row.flop)),
        Column("multiplying_seconds", "", lambda row: row.multiplying),
        rate_column("", "TFLOP", lambda row: sum(row.flop.values()) / steps / 1e12 or None, rows, importance=4),
        rate_column("rate_tflops", "TFLOPS", lambda row: row.tflops, rows, importance=2),
        Column("mamfu", "MAMFU", lambda row: row.mamfu, "{:.1%}".format, 1),
    ]


def kernel_columns(profile: Profile) -> list[Column[KernelRow]]:
    what = "kernel" if profile.is_of_device else "operation"
    return [
        Column("kernel", what, lambda row: row.name, _SHORTENED, left=True, shortest=_SHORTEST_NAME),
        Column("class", "class", lambda row: row.class_name, importance=2, left=True),
        *step_columns(profile, "calls", lambda row: row.calls, lambda row: row.seconds),
        Column("share", "share", lambda row: row.seconds / profile.whole_seconds, "{:.1%}".format),
    ]


def product_columns(profile: Profile) -> list[Column[ProductRow]]:
    ceilings = {each.dtype: each.tflops for each in reversed(profile.ceilings)}
    return [
        Column("product", "product MxNxK", lambda row: row.shape, left=True),
        Column("batch", "batch", lambda row: row.batch if row.batch > 1 else None, importance=4),
        Column("dtype", "dtype", lambda row: row.dtype, importance=2, left=True),
        Column("layout", "layout", lambda row: row.layout, importance=2, left=True),
        *step_columns(profile, "calls", lambda row: row.calls, lambda row: row.seconds),
        Column("share", "share", lambda row: row.seconds / profile.whole_seconds, "{:.1%}".format),
        rate_column("rate_tflops", "TFLOPS", lambda row: row.tflops, profile.products, importance=1),
        Column("mamfu", "MAMFU", lambda row: (it := ceilings.get(row.dtype)) and row.tflops / it, "{:.1%}".format),
    ]


def gap_columns(profile: Profile) -> list[Column[GapRow]]:
    return [
        Column("during", "while the host was in", attrgetter("during"), _SHORTENED, left=True, shortest=_SHORTEST_NAME),
        *step_columns(profile, "gaps in the trace", lambda row: row.count, lambda row: row.seconds),
        Column("share_of_gaps", "of all gaps", lambda row: row.seconds / profile.gap_seconds, "{:.1%}".format),
    ]


def step_columns(
    profile: Profile, title: str, count: Callable[[RowT], int], seconds: Callable[[RowT], float]
) -> list[Column[RowT]]:
    """Per step for people, of all steps in csv and json."""
    steps = profile.steps or 1
    return [
        Column("", title, lambda row: count(row) / steps, importance=3),
        Column("", "ms", lambda row: seconds(row) / steps, milliseconds),
        Column("count", "", count),
        Column("seconds", "", seconds),
    ]


def with_peak(parts: Sequence[MemoryRow]) -> list[MemoryRow]:
    """The parts of the peak, and the peak, which is unknown if a part is."""
    known = [row.nbytes for row in parts if row.nbytes is not None]
    peak = MemoryRow("peak", sum(known) if len(known) == len(parts) else None)
    return [*parts, peak] if parts else []


def memory_columns(parts: Sequence[MemoryRow]) -> list[Column[MemoryRow]]:
    peak = with_peak(parts)[-1].nbytes if parts else None
    return [
        Column("part", "memory", lambda row: row.name, left=True),
        Column("bytes", "MiB", lambda row: row.nbytes, lambda nbytes: f"{nbytes / 2**20:.4g}"),
        Column("share_of_peak", "of the peak", lambda row: peak and row.nbytes and row.nbytes / peak, "{:.1%}".format),
    ]


def milliseconds(seconds: float) -> str:
    return significant(seconds * 1e3) if seconds else "0"


def conclusion(profile: Profile) -> str:
    """The classes that take most of a step."""
    most = sorted(profile.classes, key=lambda row: -row.share)[:_MOST_CLASSES]
    shares = [f"{row.name} {row.share:.1%}" + (f" (MAMFU {row.mamfu:.1%})" if row.mamfu else "") for row in most]
    return f"most of {'a step' if profile.steps else 'the time'}: {', '.join(shares)}"


def time_lines(profile: Profile) -> Iterator[str]:
    """How certain idle is, and which classes are above the sustained ceiling."""
    took, busy = profile.unprofiled_step_seconds, profile.busy_seconds / (profile.steps or 1)
    work = f"{milliseconds(busy)} ms of work in the trace"
    seen = (
        f"gaps in the trace: {milliseconds(profile.gap_seconds / (profile.steps or 1))} ms, with what the profiler adds"
    )
    if took is None and profile.gap_seconds:
        yield "a step without the profiler was not timed: idle is an upper bound, all other shares are lower bounds"
    elif took is not None and busy > took:
        yield f"{work}, slowed by the profiler, exceed the step without it: shares are of it; idle is unknown ({seen})"
    elif took is not None:
        yield f"shares are of {milliseconds(took)} ms without the profiler; idle: what {work} leave of it ({seen})"
        yield f"if the profiler slows the work by 1 %, idle is {milliseconds(busy / 100)} ms more than this"
    for row in profile.classes:
        if row.mamfu is not None and row.mamfu > 1:
            yield (
                f"{row.name} is above its sustained ceiling, which is of products back to back: beside other work the "
                f"clock recovers, so the burst ceiling (mamf find) is the limit"
            )


def _end(profile: Profile) -> Iterator[str]:
    per = "calls, ms and TFLOP are per step; " if profile.steps else ""
    hidden = ": hidden ran beside another" if any(row.hidden > _NOTHING for row in profile.classes) else ""
    yield f"{per}each instant counts for one class{hidden}"
    if not profile.is_of_device:
        yield "no device worked: these are operations of the CPU, each without those that it calls"
    yield from time_lines(profile)
    for row in profile.classes:
        if row.flop and row.multiplying < (1 - _NOTABLE) * row.total:
            known = row.multiplying / row.total
            yield f"{row.name}: FLOP and TFLOPS are of {known:.0%} of its time; the rest has no known FLOP"
        if row.name == UNCLASSIFIED:
            yield f"{row.share:.1%} is unclassified: neither its operation nor its kernel is known by name"
    if profile.modules:
        yield "modules: forward and backward, with those within; names that differ in numbers alone are summed up"
    yield from profile.notes


def profile_chart(runs: Sequence[tuple[str, Profile]]) -> StackedChart:
    """Profiles with the labels of their bars. Raises IncomparableError if the steps of only some are known."""
    if len({profile.steps is None for _, profile in runs}) > 1:
        raise IncomparableError("the steps of some of the profiles are unknown: there is no step to compare")
    devices = list(dict.fromkeys(device_of(profile) for _, profile in runs))
    bars = [
        Stack(name if len(devices) == 1 else f"{name}, {device_of(profile)}", tuple(_parts(profile)))
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


def device_of(profile: Profile) -> str:
    return profile.device or ("an unknown device" if profile.is_of_device else "the CPU")


def _parts(profile: Profile) -> Iterable[tuple[str, float]]:
    """Classes in their order, idle last."""
    for row in profile.classes:
        if row.share >= LEAST_SHARE:
            yield row.name, row.visible / (profile.steps or 1) * 1e3
