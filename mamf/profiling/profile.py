"""A profile: the seconds of each class and module in a training step, its FLOP and the top kernels. Pure.

Shares and idle are of a step without the profiler, if that was timed. Idle is that time less the time in which the
device worked in the trace, so what the profiler adds between two kernels is not idle time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mamf.measurement import IDLE
from mamf.operations.tracing.classes import class_of
from mamf.operations.tracing.events import Busy, Event, Trace
from mamf.operations.tracing.shares import busy, gaps, length, shares, union
from mamf.profiling.breakdown import CeilingOf, ClassRow, counted_flop, intervals, module_rows, share_of_ceilings
from mamf.rate import Rate


@dataclass(frozen=True)
class KernelRow:
    """A kernel, or an operation of a CPU: ``seconds`` in all profiled steps, by the union of its intervals."""

    name: str
    class_name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class MemoryRow:
    """A part of the peak of the profiled steps: ``nbytes``, None if the device does not report its peak."""

    name: str
    nbytes: int | None


@dataclass(frozen=True)
class Profile:
    """``steps``: None if the trace does not mark them; ``seconds``: of all of them, with the profiler.
    ``unprofiled_step_seconds``: the time of a step without it, if that was measured. ``device``: empty if
    unknown; ``is_of_device``: whether it worked at all, else these are a CPU's operations. Classes are in the order of
    CLASSES, idle last; kernels and modules are in the order of their seconds.
    """

    seconds: float
    steps: int | None
    device: str
    is_of_device: bool
    classes: tuple[ClassRow, ...]
    kernels: tuple[KernelRow, ...] = ()
    unprofiled_step_seconds: float | None = None
    notes: tuple[str, ...] = ()
    #: Empty unless requested.
    memory: tuple[MemoryRow, ...] = ()
    #: The ceilings that MAMFU refers to.
    ceilings: tuple[Rate, ...] = ()
    #: Calls of modules are the events that worked for them.
    modules: tuple[ClassRow, ...] = ()

    def __post_init__(self) -> None:
        idle = self.whole_seconds - self.busy_seconds
        rows = tuple(replace(row, visible=idle) if row.name == IDLE else row for row in self.classes)
        object.__setattr__(self, "classes", rows)

    def seconds_of(self, name: str) -> float:
        """The visible seconds of a class in all profiled steps."""
        return sum(row.visible for row in self.classes if row.name == name)

    @property
    def busy_seconds(self) -> float:
        """In which something worked, in all profiled steps: the union of all intervals in the trace."""
        return sum(row.visible for row in self.classes if row.name != IDLE)

    @property
    def usual_seconds(self) -> float:
        """Of as many steps as were profiled, without the profiler where that was timed."""
        return (self.unprofiled_step_seconds or self.step_seconds) * (self.steps or 1)

    @property
    def whole_seconds(self) -> float:
        """What shares are of: the steps without the profiler, or ``busy_seconds`` if that is longer, because the
        profiler slows what works. The steps with the profiler if nothing else was timed: then idle is an upper bound.
        """
        return max(self.usual_seconds, self.busy_seconds)

    @property
    def step_seconds(self) -> float:
        return self.seconds / (self.steps or 1)

    @property
    def flop(self) -> int:
        """Of all profiled steps."""
        return sum(row.total_flop for row in self.classes)

    @property
    def tflops(self) -> float | None:
        """Of whole steps, in their time without the profiler where that was measured."""
        return self.flop / self.usual_seconds / 1e12 if self.flop else None

    @property
    def mamfu(self) -> float | None:
        """The time that the ceilings would take, as a share of that of whole steps; None if a ceiling is unknown."""
        at_ceilings = [None if row.mamfu is None else row.mamfu * row.multiplying for row in self.classes if row.flop]
        if not at_ceilings or None in at_ceilings:
            return None
        return sum(filter(None, at_ceilings)) / self.usual_seconds


def profile_of(
    trace: Trace, ceiling_of: CeilingOf = lambda dtype: None, unprofiled_step_seconds: float | None = None
) -> Profile:
    """``ceiling_of``: the ceilings for MAMFU."""
    at_work = busy(trace)
    by_class: dict[str, list[Busy]] = defaultdict(list)
    for each in at_work:
        by_class[class_of(each.event)].append(each)
    idle = gaps(union(intervals(at_work)), trace.begun, trace.ended)
    rows = list(_class_rows(by_class, ceiling_of))
    dtypes = dict.fromkeys(dtype for row in rows for dtype in row.flop)
    return Profile(
        seconds=trace.seconds,
        steps=trace.steps,
        device=trace.device,
        is_of_device=trace.is_of_device,
        classes=(*rows, ClassRow(IDLE, length(idle), 0.0, len(idle))),
        kernels=tuple(_kernel_rows(at_work)),
        unprofiled_step_seconds=unprofiled_step_seconds,
        notes=trace.notes,
        ceilings=tuple(filter(None, map(ceiling_of, dtypes))),
        modules=tuple(module_rows(at_work, ceiling_of)),
    )


def _class_rows(by_class: Mapping[str, Sequence[Busy]], ceiling_of: CeilingOf) -> Iterable[ClassRow]:
    for name, share in shares({name: intervals(found) for name, found in by_class.items()}).items():
        flop, multiplying = counted_flop(by_class[name])
        yield ClassRow(
            name,
            share.visible,
            share.hidden,
            calls=len({each.event for each in by_class[name] if not _is_within(name, each.event)}),
            flop=flop,
            multiplying=multiplying,
            mamfu=share_of_ceilings(flop, multiplying, ceiling_of),
        )


def _is_within(name: str, event: Event) -> bool:
    """Whether an operation of the CPU was called by another of its class: one call, not two. Every kernel is one."""
    caller = event.parent
    return caller is not None and event.kind == caller.kind == "operation" and class_of(caller) == name


def _kernel_rows(at_work: Iterable[Busy]) -> list[KernelRow]:
    by_name: dict[tuple[str, str], list[Busy]] = defaultdict(list)
    for each in at_work:
        by_name[each.event.name, class_of(each.event)].append(each)
    rows = [
        KernelRow(*names, len({each.event for each in found}), length(union(intervals(found))))
        for names, found in by_name.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, row.name))
