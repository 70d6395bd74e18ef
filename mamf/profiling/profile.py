"""A profile: the share of each class in a training step, its FLOP, the top kernels and the gaps. Pure.

Shares and idle are of a step without the profiler, if that was timed. Idle is that time less the time in which the
device worked in the trace, so what the profiler adds between two kernels is not idle time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mamf.ceilings.share import KnownCeiling
from mamf.measurement import IDLE
from mamf.operations.tracing.classes import COMMUNICATION, MODULE, class_of
from mamf.operations.tracing.events import Busy, Event, Trace
from mamf.operations.tracing.shares import Union, busy, gaps, length, shares, union
from mamf.profiling.breakdown import (
    CeilingOf,
    ClassRow,
    ProductRow,
    counted_flop,
    intervals,
    module_rows,
    product_rows,
    share_of_ceilings,
)

_OUTSIDE = "Python, outside of any operation"
_UNKNOWN = "unknown: there are no events of the host"


@dataclass(frozen=True)
class KernelRow:
    """A kernel, or an operation of a CPU: ``seconds`` in all profiled steps, by the union of its intervals."""

    name: str
    class_name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class GapRow:
    """Stretches in which nothing ran, by the host's activity, in all profiled steps."""

    during: str
    count: int
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
    unknown; ``is_of_device``: whether it worked at all, else these are a CPU's operations. Rows are in the order of
    CLASSES, idle last, and their shares and idle follow from ``whole_seconds``; kernels and gaps are in the order of
    their seconds, gaps as they are in the trace.
    """

    seconds: float
    steps: int | None
    device: str
    is_of_device: bool
    classes: tuple[ClassRow, ...]
    kernels: tuple[KernelRow, ...]
    gaps: tuple[GapRow, ...]
    unprofiled_step_seconds: float | None = None
    notes: tuple[str, ...] = ()
    #: Empty unless requested.
    memory: tuple[MemoryRow, ...] = ()
    #: The ceilings that MAMFU refers to.
    ceilings: tuple[KnownCeiling, ...] = ()
    #: Both are in the order of their seconds; calls of modules are the events that worked for them.
    modules: tuple[ClassRow, ...] = ()
    products: tuple[ProductRow, ...] = ()

    def __post_init__(self) -> None:
        whole, idle = self.whole_seconds, max(0.0, self.whole_seconds - self.busy_seconds)
        rows = [replace(row, visible=idle) if row.name == IDLE else row for row in self.classes]
        for name, found in (("classes", rows), ("modules", self.modules)):
            object.__setattr__(self, name, tuple(replace(row, share=row.visible / whole) for row in found))

    @property
    def busy_seconds(self) -> float:
        """In which something worked, in all profiled steps: the union of all intervals in the trace."""
        return sum(row.visible for row in self.classes if row.name != IDLE)

    @property
    def whole_seconds(self) -> float:
        """What shares are of: the steps without the profiler, or ``busy_seconds`` if that is longer, because the
        profiler slows what works. The steps with the profiler if nothing else was timed: then idle is an upper bound.
        """
        return max(self.usual_seconds, self.busy_seconds)

    @property
    def gap_seconds(self) -> float:
        """Of the trace, in which nothing worked: idle time, and what the profiler adds to it."""
        return max(0.0, self.seconds - self.busy_seconds)

    @property
    def step_seconds(self) -> float:
        return self.seconds / (self.steps or 1)

    @property
    def flop(self) -> int:
        """Of all profiled steps."""
        return sum(count for row in self.classes for count in row.flop.values())

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

    def without_added_waiting(self) -> Profile:
        """To compare ranks or runs. The profiler slows hosts, so ranks wait longer for one another: the time by which a
        device is busy for longer in the trace than the steps take without the profiler is left out of communication.
        """
        added = self.whole_seconds - self.usual_seconds if self.is_of_device else 0.0
        rows = (
            replace(row, visible=max(0.0, row.visible - added)) if row.name == COMMUNICATION else row
            for row in self.classes
        )
        return replace(self, classes=tuple(rows))

    @property
    def usual_seconds(self) -> float:
        """Of as many steps as were profiled, without the profiler where that was timed."""
        return (self.unprofiled_step_seconds or self.step_seconds) * (self.steps or 1)


def profile_of(
    trace: Trace, ceiling_of: CeilingOf = lambda dtype: None, unprofiled_step_seconds: float | None = None
) -> Profile:
    """``ceiling_of``: the ceilings for MAMFU."""
    at_work = busy(trace)
    by_class: dict[str, list[Busy]] = defaultdict(list)
    for each in at_work:
        by_class[class_of(each.event)].append(each)
    idle = gaps(union((each.begun, each.ended) for each in at_work), trace.begun, trace.ended)
    rows = list(_class_rows(by_class, ceiling_of))
    dtypes = dict.fromkeys(dtype for row in rows for dtype in row.flop)
    return Profile(
        seconds=trace.seconds,
        steps=trace.steps,
        device=trace.device,
        is_of_device=trace.is_of_device,
        classes=(*rows, ClassRow(IDLE, 0.0, length(idle), 0.0, len(idle), {}, 0.0)),
        kernels=tuple(_kernel_rows(at_work)),
        gaps=tuple(_gap_rows(idle, trace)),
        unprofiled_step_seconds=unprofiled_step_seconds,
        notes=trace.notes,
        ceilings=tuple(filter(None, map(ceiling_of, dtypes))),
        modules=tuple(module_rows(at_work, ceiling_of)),
        products=tuple(product_rows(at_work)),
    )


def _class_rows(by_class: Mapping[str, Sequence[Busy]], ceiling_of: CeilingOf) -> Iterable[ClassRow]:
    """Their shares follow from the step (Profile)."""
    for name, share in shares({name: intervals(found) for name, found in by_class.items()}).items():
        flop, multiplying = counted_flop(by_class[name])
        yield ClassRow(
            name=name,
            share=0.0,
            visible=share.visible,
            hidden=share.hidden,
            calls=_calls(each for each in by_class[name] if not _is_within(name, each.event)),
            flop=flop,
            multiplying=multiplying,
            mamfu=share_of_ceilings(flop, multiplying, ceiling_of),
        )


def _calls(found: Iterable[Busy]) -> int:
    """Each event once, in however many stretches it was at work."""
    return sum(event.calls for event in {each.event for each in found})


def _is_within(name: str, event: Event) -> bool:
    """Whether an operation of the CPU was called by another of its class: one call, not two. Every kernel is one."""
    caller = event.parent
    is_called = not event.is_on_device and caller is not None and caller.kind == "operation"
    return is_called and caller is not None and class_of(caller) == name


def _kernel_rows(at_work: Iterable[Busy]) -> list[KernelRow]:
    by_name: dict[tuple[str, str], list[Busy]] = defaultdict(list)
    for each in at_work:
        by_name[each.event.name, class_of(each.event)].append(each)
    rows = [
        KernelRow(name, class_name, _calls(found), length(union(intervals(found))))
        for (name, class_name), found in by_name.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, row.name))


def _gap_rows(idle: Union, trace: Trace) -> list[GapRow]:
    by_host: dict[str, list[float]] = defaultdict(list)
    for (begun, ended), host in zip(idle, _hosts(idle, trace), strict=True):
        by_host[host].append(ended - begun)
    rows = [GapRow(host, len(found), sum(found)) for host, found in by_host.items()]
    return sorted(rows, key=lambda row: (-row.seconds, row.during))


def _hosts(idle: Union, trace: Trace) -> Iterable[str]:
    """The host's activity in the middle of each gap: the innermost open call."""
    host = (event for event in trace.events if not event.is_on_device and not event.name.startswith(MODULE))
    events = sorted(host, key=lambda event: event.begun)
    open_calls: list[Event] = []
    begun = 0
    for instant in ((low + high) / 2 for low, high in idle):
        while begun < len(events) and events[begun].begun <= instant:
            open_calls.append(events[begun])
            begun += 1
        open_calls = [event for event in open_calls if event.ended > instant]
        if open_calls:
            yield open_calls[-1].name
        else:
            yield _OUTSIDE if events else _UNKNOWN
