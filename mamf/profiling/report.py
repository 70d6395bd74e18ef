"""A profile as table, csv, json and markdown: its classes, its top kernels, its gaps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mamf.profiling.classes import UNCLASSIFIED
from mamf.profiling.profile import ClassRow, Profile
from mamf.report.shares import known_ceiling_lines
from mamf.report.text import DASH, csv_text, drawing, prose, significant

_LEFT = {"class", "kernel", "operation", "while the host was in"}


def render_profile(form: str, script: str, profile: Profile, top: int | None = 10, width: int | None = None) -> str:
    """``form``: of mamf.report.FORMATS. ``top``: how many kernels and gaps; None for all. ``width``: of the terminal,
    None for all columns. Csv holds the classes alone, json all that there is.
    """
    if form == "csv":
        return csv_text([_class_record(row, profile) for row in profile.classes])
    if form == "json":
        return json.dumps({"script": script, **_record(profile)}, indent=1) + "\n"
    draw = drawing(form, width)
    longest = _LONGEST_NAME if width is None else max(width - _BESIDE_NAME, _SHORTEST_NAME)
    head = [*_title(script, profile), *known_ceiling_lines(profile.ceilings)]
    parts = [prose(head, form), draw(_CLASS_COLUMNS, _class_cells(profile), _LEFT)]
    what, whole = "kernel" if profile.is_of_device else "operation", profile.whole_seconds
    kernels = [
        [row.name[:longest], row.class_name, _per_step(row.calls, profile), *_time(row.seconds, profile, whole)]
        for row in profile.kernels[:top]
    ]
    gaps = [
        [row.during[:longest], _per_step(row.count, profile), *_time(row.seconds, profile, profile.gap_seconds)]
        for row in profile.gaps[:top]
    ]
    if kernels:
        parts.append(draw([what, "class", "calls", "ms", "share"], kernels, _LEFT))
    if gaps:
        parts.append(draw(["while the host was in", "gaps in the trace", "ms", "of all gaps"], gaps, _LEFT))
    if profile.memory:
        parts.append(draw(["memory", "MB", "of the peak"], _memory_cells(profile), {"memory"}))
    return "\n".join([*parts, prose(_end(profile), form)])


_CLASS_COLUMNS = ["class", "share", "ms", "hidden ms", "calls", "TFLOP", "TFLOPS", "MAMFU"]
# Kernels of templates have names of a thousand characters.
_LONGEST_NAME, _SHORTEST_NAME = 70, 24
# What the columns beside a name take.
_BESIDE_NAME = 50


def _title(script: str, profile: Profile) -> Iterator[str]:
    where = profile.device or ("an unknown device" if profile.is_of_device else "the CPU")
    if profile.steps is None:
        yield f"{script} on {where}: {milliseconds(profile.seconds)} ms in all; its steps are not known"
        return
    yield f"{script} on {where}: {profile.steps} steps of {milliseconds(profile.step_seconds)} ms with the profiler"
    if profile.unprofiled_step_seconds is not None:
        yield (
            f"{milliseconds(profile.unprofiled_step_seconds)} ms without it, in the steps right before: "
            f"the profiler makes {profile.step_seconds / profile.unprofiled_step_seconds - 1:+.0%}"
        )
    if profile.tflops is not None:
        share = "" if profile.mamfu is None else f", {profile.mamfu:.1%} MAMFU"
        time = "" if profile.unprofiled_step_seconds is None else " in the time without it"
        work = significant(profile.flop / profile.steps / 1e12)
        yield f"a step multiplies {work} TFLOP: {significant(profile.tflops)} TFLOPS{share}{time}"


def _class_cells(profile: Profile) -> list[list[str]]:
    return [
        [
            row.name,
            f"{row.share:.1%}",
            milliseconds(row.visible / (profile.steps or 1)),
            milliseconds(row.hidden / (profile.steps or 1)) if row.hidden > _NOTHING else DASH,
            _per_step(row.calls, profile),
            significant(sum(row.flop.values()) / (profile.steps or 1) / 1e12) if row.flop else DASH,
            DASH if row.tflops is None else significant(row.tflops),
            mamfu_cell(row, profile),
        ]
        for row in profile.classes
    ]


def mamfu_cell(row: ClassRow, profile: Profile) -> str:
    """The share of the sustained ceiling, and above it that of the burst ceiling too, where it is known."""
    burst = profile.burst_mamfu(row) if row.mamfu is not None and row.mamfu > 1 else None
    return DASH if row.mamfu is None else f"{row.mamfu:.1%}" + (f" ({burst:.1%} of burst)" if burst else "")


def time_lines(profile: Profile) -> Iterator[str]:
    """How sure idle is, and which classes are above the sustained ceiling."""
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


def _memory_cells(profile: Profile) -> list[list[str]]:
    """The parts of the peak and the peak itself, in MiB."""
    parts = [row.nbytes for row in profile.memory]
    known = [each for each in parts if each is not None]
    peak = sum(known) if len(known) == len(parts) else None
    rows = [(row.name, row.nbytes) for row in profile.memory] + [("peak", peak)]
    return [
        [
            name,
            DASH if nbytes is None else f"{nbytes / 2**20:.4g}",
            DASH if nbytes is None or not peak else f"{nbytes / peak:.1%}",
        ]
        for name, nbytes in rows
    ]


# Seconds: what rounding leaves.
_NOTHING = 1e-12
# Of a class's time, what no formula covers is told from here on.
_TOLD = 0.01


def _end(profile: Profile) -> Iterator[str]:
    per = "calls, ms and TFLOP are per step; " if profile.steps else ""
    yield f"{per}each instant is told in one class: hidden ran beside another"
    if not profile.is_of_device:
        yield "no device worked: these are operations of the CPU, each without those that it calls"
    yield from time_lines(profile)
    for row in profile.classes:
        if row.flop and row.multiplying < (1 - _TOLD) * row.total:
            known = row.multiplying / row.total
            yield f"{row.name}: FLOP and TFLOPS are of {known:.0%} of its time; what ran else has no known FLOP"
        if row.name == UNCLASSIFIED:
            yield f"{row.share:.1%} is unclassified: neither its operation nor its kernel is known by name"
    yield from profile.notes


def _record(profile: Profile) -> dict[str, Any]:
    derived = ("flop", "tflops", "mamfu", "whole_seconds", "busy_seconds", "gap_seconds")
    return {
        **asdict(profile),
        **{name: getattr(profile, name) for name in derived},
        "classes": [_class_record(row, profile) for row in profile.classes],
    }


def _class_record(row: ClassRow, profile: Profile) -> Mapping[str, Any]:
    return {
        "class": row.name,
        "share": row.share,
        "step_seconds": row.visible / (profile.steps or 1),
        "visible_seconds": row.visible,
        "hidden_seconds": row.hidden,
        "calls": row.calls,
        "flop": sum(row.flop.values()),
        "dtypes": " ".join(row.flop),
        "multiplying_seconds": row.multiplying,
        "tflops": row.tflops,
        "mamfu": row.mamfu,
        "burst_mamfu": profile.burst_mamfu(row),
    }


def _time(seconds: float, profile: Profile, whole: float) -> tuple[str, str]:
    return milliseconds(seconds / (profile.steps or 1)), f"{seconds / whole:.1%}"


def _per_step(count: int, profile: Profile) -> str:
    return f"{count / (profile.steps or 1):.4g}"


def milliseconds(seconds: float) -> str:
    return significant(seconds * 1e3) if seconds else "0"
