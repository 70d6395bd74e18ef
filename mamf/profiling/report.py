"""The report of a profile: its classes, modules, top kernels and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from operator import attrgetter, itemgetter

from mamf.profiling.breakdown import ClassRow
from mamf.profiling.classes import UNCLASSIFIED
from mamf.profiling.profile import KernelRow, MemoryRow, Profile
from mamf.report.columns import rate_column
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.shares import known_ceiling_lines
from mamf.report.text import counted, rate_text, significant

# Kernels that are instances of templates have names of a thousand characters.
_LONGEST_NAME, _SHORTEST_NAME = 70, 24
_SHORTENED = itemgetter(slice(_LONGEST_NAME))
_MOST_CLASSES = 3
# In seconds, what rounding leaves.
_NOTHING = 1e-12
# The share of a class's time without a known FLOP formula that is worth a line.
_NOTABLE = 0.01
_PERCENT = "{:.1%}".format
_DERIVED = ("flop", "tflops", "mamfu", "whole_seconds", "busy_seconds")


def profile_document(script: str, profile: Profile, top: int | None = 10) -> Document:
    """Csv holds the classes."""
    tables = ("classes", "kernels", "memory", "modules")
    whole = {name: value for name, value in asdict(profile).items() if name not in tables}
    blocks: list[Block] = [
        Lines([*_title(script, profile), *known_ceiling_lines(profile.ceilings)]),
        Table(_class_columns(profile), profile.classes, key="classes"),
        Table(_class_columns(profile, "module"), profile.modules, key="modules", top=top),
        Table(_kernel_columns(profile), profile.kernels, key="kernels", top=top),
        Table(_memory_columns(profile.memory), _with_peak(profile.memory), key="memory"),
        Lines(list(_end(profile))),
        Answer([conclusion(profile)]),
    ]
    data = {"script": script, **whole, **{name: getattr(profile, name) for name in _DERIVED}}
    return Document(f"Profile of {script}", blocks, data)


def _title(script: str, profile: Profile) -> Iterator[str]:
    where = device_of(profile)
    if profile.steps is None:
        yield f"{script} on {where}: {milliseconds(profile.seconds)} ms in all; its steps are unknown"
        return
    took = milliseconds(profile.step_seconds)
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


def _class_columns(profile: Profile, what: str = "class") -> list[Column[ClassRow]]:
    """Times, calls and FLOP are per step for people, and of all steps in csv and json. ``what``: class or module."""
    steps = profile.steps or 1
    rows = profile.classes if what == "class" else profile.modules
    return [
        Column(what, what, lambda row: row.name, _SHORTENED, left=True, shortest=_SHORTEST_NAME),
        Column("share", "share", lambda row: row.visible / profile.whole_seconds, _PERCENT),
        Column("step_seconds", "ms", lambda row: row.visible / steps, milliseconds),
        Column("", "hidden ms", lambda row: row.hidden / steps if row.hidden > _NOTHING else None, milliseconds, 3),
        Column("", "calls" if what == "class" else "", lambda row: row.calls / steps, importance=3),
        Column("calls", "", lambda row: row.calls),
        Column("visible_seconds", "", lambda row: row.visible),
        Column("hidden_seconds", "", lambda row: row.hidden),
        Column("flop", "", lambda row: row.total_flop),
        Column("dtypes", "", lambda row: " ".join(row.flop)),
        Column("multiplying_seconds", "", lambda row: row.multiplying),
        rate_column("", "TFLOP", lambda row: row.total_flop / steps / 1e12 or None, rows, importance=4),
        rate_column("rate_tflops", "TFLOPS", lambda row: row.tflops, rows, importance=2),
        Column("mamfu", "MAMFU", lambda row: row.mamfu, _PERCENT, 1),
    ]


def _kernel_columns(profile: Profile) -> list[Column[KernelRow]]:
    what, steps = "kernel" if profile.is_of_device else "operation", profile.steps or 1
    return [
        Column("kernel", what, lambda row: row.name, _SHORTENED, left=True, shortest=_SHORTEST_NAME),
        Column("class", "class", lambda row: row.class_name, importance=2, left=True),
        Column("", "calls", lambda row: row.calls / steps, importance=3),
        Column("", "ms", lambda row: row.seconds / steps, milliseconds),
        Column("count", "", attrgetter("calls")),
        Column("seconds", "", attrgetter("seconds")),
        Column("share", "share", lambda row: row.seconds / profile.whole_seconds, _PERCENT),
    ]


def _with_peak(parts: Sequence[MemoryRow]) -> list[MemoryRow]:
    """The parts of the peak, and the peak, which is unknown if a part is."""
    known = [row.nbytes for row in parts if row.nbytes is not None]
    return [*parts, MemoryRow("peak", sum(known) if len(known) == len(parts) else None)] if parts else []


def _memory_columns(parts: Sequence[MemoryRow]) -> list[Column[MemoryRow]]:
    peak = _with_peak(parts)[-1].nbytes if parts else None
    return [
        Column("part", "memory", lambda row: row.name, left=True),
        Column("bytes", "MiB", lambda row: row.nbytes, lambda nbytes: f"{nbytes / 2**20:.4g}"),
        Column("share_of_peak", "of the peak", lambda row: peak and row.nbytes and row.nbytes / peak, _PERCENT),
    ]


def milliseconds(seconds: float) -> str:
    return significant(seconds * 1e3) if seconds else "0"


def device_of(profile: Profile) -> str:
    return profile.device or ("an unknown device" if profile.is_of_device else "the CPU")


def conclusion(profile: Profile) -> str:
    """The classes that take most of a step."""
    most = sorted(profile.classes, key=lambda row: -row.visible)[:_MOST_CLASSES]
    shares = [
        f"{row.name} {row.visible / profile.whole_seconds:.1%}" + (f" (MAMFU {row.mamfu:.1%})" if row.mamfu else "")
        for row in most
    ]
    return f"most of {'a step' if profile.steps else 'the time'}: {', '.join(shares)}"


def _end(profile: Profile) -> Iterator[str]:
    per = "calls, ms and TFLOP are per step; " if profile.steps else ""
    hidden = ": hidden ran beside another" if any(row.hidden > _NOTHING for row in profile.classes) else ""
    yield f"{per}each instant counts for one class{hidden}"
    if not profile.is_of_device:
        yield "no device worked: these are operations of the CPU, each without those that it calls"
    yield _about_idle(profile)
    for row in profile.classes:
        if row.mamfu is not None and row.mamfu > 1:
            yield (
                f"{row.name} is above its sustained ceiling, which is of matmuls back to back: between other work the "
                f"clock recovers, so the burst ceiling (mamf find) is the limit"
            )
        total = row.visible + row.hidden
        if row.flop and row.multiplying < (1 - _NOTABLE) * total:
            known = row.multiplying / total
            yield f"{row.name}: FLOP and TFLOPS are of {known:.0%} of its time; the rest has no known FLOP"
        if row.name == UNCLASSIFIED:
            share = row.visible / profile.whole_seconds
            yield f"{share:.1%} is unclassified: neither its operation nor its kernel is known by name"
    if profile.modules:
        yield "modules: forward and backward, with those within; names that differ in numbers alone are summed up"
    yield from profile.notes


def _about_idle(profile: Profile) -> str:
    """How certain idle is."""
    took, busy = profile.unprofiled_step_seconds, profile.busy_seconds / (profile.steps or 1)
    if took is None:
        return "a step without the profiler was not timed: idle is an upper bound, all other shares are lower bounds"
    work = f"{milliseconds(busy)} ms of work in the trace"
    if busy > took + _NOTHING:
        return f"{work}, slowed by the profiler, exceed the step without it: shares are of this work; idle is unknown"
    return f"shares are of {milliseconds(took)} ms without the profiler; idle is what {work} leave of it"
