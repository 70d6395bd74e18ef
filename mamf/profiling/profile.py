"""A profile of training steps: the seconds and FLOP of each class and module, and the top kernels. Pure.

Shares and idle time refer to a step without the profiler, if that was timed. Idle time is the duration of that step
minus the busy time in the trace, so gaps that the profiler adds between kernels do not count as idle.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mamf.measurement import IDLE, TERA, Rate, group_pairs
from mamf.profiling.classes import MODULE_PREFIX, OPTIMIZER, classify_event, compute_class_seconds
from mamf.profiling.flops import TF32_KERNEL_NAME, count_operation_flop, find_multiplied_dtype
from mamf.profiling.traces import (
    BusyInterval,
    Event,
    Intervals,
    Trace,
    find_busy_intervals,
    find_gaps,
    merge_intervals,
    sum_interval_seconds,
)

OUTSIDE_MODULES = "outside of any module"
#: The name of the memory row for the peak; the other rows are parts of it.
PEAK_MEMORY = "peak"
#: MAMFU ignores up to this share of FLOP in dtypes without a ceiling, such as float32 rotary tables next to bfloat16
#: matmuls.
_MAX_SHARE_WITHOUT_CEILING = 0.01
#: Parts of a module's name that are folded: a number, and the names of wrappers.
_FOLDED_NAME_PARTS = re.compile(
    r"(?<![^.])(?:\d+(?![^.])|(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$))"
)
#: Returns the ceiling of a dtype (by mamf's name), or None if it is unknown.
FindCeiling = Callable[[str], Rate | None]


@dataclass(frozen=True)
class ClassRow:
    """A class of work, or all modules with names that differ only in numbers, over all profiled steps.

    A module includes its backward pass and the modules within it.

    - ``visible``, ``hidden``: seconds (see classes.Share).
    - ``calls``: of a class, its calls; of idle, the gaps in the trace; of a module, the events in it.
    - ``flop``: FLOP by dtype. ``multiplying``: the seconds in which they were computed.
    - ``mamfu``: the share of the ceilings of these dtypes; None if more than 1 % of the FLOP has no known ceiling.
    """

    name: str
    visible: float
    hidden: float
    calls: int
    flop: Mapping[str, int] = field(default_factory=dict)
    multiplying: float = 0.0
    mamfu: float | None = None

    @property
    def total_flop(self) -> int:
        return sum(self.flop.values())

    @property
    def tflops(self) -> float | None:
        return self.total_flop / self.multiplying / TERA if self.flop and self.multiplying else None


@dataclass(frozen=True)
class KernelRow:
    """A kernel, or an operation on a CPU. ``seconds``: the union of its intervals over all profiled steps."""

    name: str
    class_name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class MemoryRow:
    """The peak memory of the profiled steps, or a part of it. ``nbytes``: None if the device does not report a peak."""

    name: str
    nbytes: int | None


@dataclass(frozen=True)
class DtypeRow:
    """How many tensors have a dtype, in a part of the script: parameters, outputs of a type of layer, the loss."""

    name: str
    dtype: str
    count: int


@dataclass(frozen=True)
class Profile:
    """A profile of several training steps.

    - ``seconds``: the duration of all steps, with the profiler. ``steps``: their number; None if the trace does not
      mark them. ``unprofiled_step_seconds``: the duration of a step without the profiler, if it was timed.
    - ``device``: its name, empty if unknown. ``is_of_device``: whether a device ran kernels; if not, times are those of
      operations on the CPU.
    - ``classes``: in the order of CLASSES, idle last. ``kernels``, ``modules``: longest first.
    - ``ceilings``: the ceilings that MAMFU refers to.
    """

    seconds: float
    steps: int | None
    device: str
    is_of_device: bool
    classes: tuple[ClassRow, ...]
    kernels: tuple[KernelRow, ...] = ()
    unprofiled_step_seconds: float | None = None
    notes: tuple[str, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    ceilings: tuple[Rate, ...] = ()
    modules: tuple[ClassRow, ...] = ()
    dtypes: tuple[DtypeRow, ...] = ()

    def __post_init__(self) -> None:
        idle = self.whole_seconds - self.busy_seconds
        rows = tuple(replace(row, visible=idle) if row.name == IDLE else row for row in self.classes)
        object.__setattr__(self, "classes", rows)

    def get_visible_seconds(self, name: str) -> float:
        """Return the visible seconds of a class over all profiled steps."""
        return sum(row.visible for row in self.classes if row.name == name)

    @property
    def busy_seconds(self) -> float:
        """The seconds in which anything ran, over all profiled steps: the union of all intervals in the trace."""
        return sum(row.visible for row in self.classes if row.name != IDLE)

    @property
    def seconds_without_profiler(self) -> float:
        """The profiled steps times the duration of a step without the profiler or, if that was not timed, with it."""
        return (self.unprofiled_step_seconds or self.step_seconds) * (self.steps or 1)

    @property
    def whole_seconds(self) -> float:
        """The seconds that shares refer to: ``usual_seconds``, or ``busy_seconds`` if that is longer.

        Busy time may be longer because the profiler slows what runs. If only steps with the profiler were timed, idle
        time is an upper bound.
        """
        return max(self.seconds_without_profiler, self.busy_seconds)

    @property
    def step_seconds(self) -> float:
        return self.seconds / (self.steps or 1)

    @property
    def flop(self) -> int:
        """The FLOP of all profiled steps."""
        return sum(row.total_flop for row in self.classes)

    @property
    def tflops(self) -> float | None:
        """The rate of whole steps, by their duration without the profiler if that was timed."""
        return self.flop / self.seconds_without_profiler / TERA if self.flop else None

    @property
    def mamfu(self) -> float | None:
        """MAMFU of whole steps: the time of their FLOP at the ceilings over ``usual_seconds``; None if unknown."""
        at_ceilings = [None if row.mamfu is None else row.mamfu * row.multiplying for row in self.classes if row.flop]
        if not at_ceilings or None in at_ceilings:
            return None
        return sum(filter(None, at_ceilings)) / self.seconds_without_profiler


def make_profile(
    trace: Trace, find_ceiling: FindCeiling = lambda dtype: None, unprofiled_step_seconds: float | None = None
) -> Profile:
    """Make the profile of a trace. ``ceiling_of``: the ceilings that MAMFU refers to."""
    busy = find_busy_intervals(trace)
    idle = find_gaps(_merge_busy_intervals(busy), trace.start, trace.end)
    rows = list(_make_class_rows(busy, find_ceiling))
    dtypes = dict.fromkeys(dtype for row in rows for dtype in row.flop)
    return Profile(
        seconds=trace.seconds,
        steps=trace.steps,
        device=trace.device,
        is_of_device=trace.is_of_device,
        classes=(*rows, ClassRow(IDLE, sum_interval_seconds(idle), 0.0, len(idle))),
        kernels=tuple(_make_kernel_rows(busy)),
        unprofiled_step_seconds=unprofiled_step_seconds,
        notes=trace.notes,
        ceilings=tuple(filter(None, map(find_ceiling, dtypes))),
        modules=tuple(_make_module_rows(busy, find_ceiling)),
    )


def _merge_busy_intervals(work: Iterable[BusyInterval]) -> Intervals:
    return merge_intervals((each.start, each.end) for each in work)


def _make_class_rows(busy: Iterable[BusyInterval], find_ceiling: FindCeiling) -> Iterator[ClassRow]:
    by_class = group_pairs((classify_event(each.event), each) for each in busy)
    for name, share in compute_class_seconds(
        {name: _merge_busy_intervals(work) for name, work in by_class.items()}
    ).items():
        calls = {each.event for each in by_class[name] if not _is_called_by_class(name, each.event)}
        yield _make_class_row(name, *share, len(calls), by_class[name], find_ceiling)


def _is_called_by_class(name: str, event: Event) -> bool:
    """Return whether an operation on the CPU was called by another of the same class, so that both are one call."""
    caller = event.caller
    return caller is not None and event.kind == caller.kind == "operation" and classify_event(caller) == name


def _make_kernel_rows(busy: Iterable[BusyInterval]) -> list[KernelRow]:
    by_name = group_pairs(((each.event.name, classify_event(each.event)), each) for each in busy)
    rows = [
        KernelRow(*names, len({each.event for each in work}), sum_interval_seconds(_merge_busy_intervals(work)))
        for names, work in by_name.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, row.name))


def _make_module_rows(busy: Iterable[BusyInterval], find_ceiling: FindCeiling) -> list[ClassRow]:
    """Make the rows of modules, longest first; none if the trace has no ranges of modules."""
    by_module: dict[tuple[str, str], list[BusyInterval]] = defaultdict(list)
    for each in busy:
        names = [fold_module_name(name) for name in _list_module_names(each.event)] or [OUTSIDE_MODULES]
        for name in dict.fromkeys(names):
            by_module[names[0], name].append(each)
    roots, rows = {root for root, name in by_module if root != name}, []
    for (root, name), work in by_module.items():
        # With several models, modules in them could have the same name.
        title = f"{root}.{name}" if len(roots) > 1 and root != name else name
        rows.append(
            _make_class_row(
                title, sum_interval_seconds(_merge_busy_intervals(work)), 0.0, len(work), work, find_ceiling
            )
        )
    return sorted(rows, key=lambda row: -row.visible) if {root for root, _ in by_module} - {OUTSIDE_MODULES} else []


# Modules are listed outermost first. A backward event belongs to the modules of its forward pass.
def _list_module_names(event: Event) -> list[str]:
    lineage = list(event.yield_callers())
    forward = next((each.forward_operation for each in lineage if each.forward_operation), event)
    for events in (lineage, list(forward.yield_callers())):
        if names := [
            each.name.removeprefix(MODULE_PREFIX) for each in reversed(events) if each.name.startswith(MODULE_PREFIX)
        ]:
            return names
    return []


# ``model.layers.0.mlp: LlamaMLP`` becomes ``model.layers.*.mlp: LlamaMLP``.
def fold_module_name(name: str) -> str:
    path, colon, kind = name.rpartition(": ")
    return f"{_FOLDED_NAME_PARTS.sub(lambda part: '' if part[1] else '*', path)}{colon}{kind}"


def _make_class_row(
    name: str, visible: float, hidden: float, calls: int, work: Sequence[BusyInterval], find_ceiling: FindCeiling
) -> ClassRow:
    """Make a row with the FLOP of its work.

    An operation and those that it calls count once, in the class of the operation: a copy that a matmul calls has none
    of its FLOP. The dtype is that of the innermost operation, which gets the operands that autocast converted.
    """
    counting = {each.event: operations for each in work if (operations := _list_operations_with_formula(each.event))}
    counting = {event: each for event, each in counting.items() if classify_event(each[-1]) == classify_event(event)}
    innermost = {each[-1]: each[0] for each in sorted(counting.values(), key=len)}
    flop: Counter[str] = Counter()
    kernels = (each.event for each in work if each.event.is_on_device and TF32_KERNEL_NAME.search(each.event.name))
    tf32 = {operation for kernel in kernels for operation in kernel.yield_callers()}  # torch records TF32 as float32
    for operation, multiplying in innermost.items():
        dtype = find_multiplied_dtype(multiplying)
        flop["tf32" if dtype == "float32" and multiplying in tf32 else dtype] += count_operation_flop(operation) or 0
    seconds = sum_interval_seconds(_merge_busy_intervals(each for each in work if each.event in counting))
    return ClassRow(name, visible, hidden, calls, dict(flop), seconds, _compute_mamfu(flop, seconds, find_ceiling))


def _list_operations_with_formula(event: Event) -> list[Event]:
    """Return the operations with a formula that an event belongs to, innermost first. It computes FLOP of the last one.

    Matmuls of an optimizer (Muon) are left out, because they are not work of the model.
    """
    operations = [each for each in event.yield_callers() if count_operation_flop(each) is not None]
    return operations if operations and classify_event(event) != OPTIMIZER else []


def _compute_mamfu(flop: Mapping[str, int], seconds: float, find_ceiling: FindCeiling) -> float | None:
    """Return the time that the FLOP would take at the ceilings of their dtypes, as a share of ``seconds``."""
    known = {dtype: ceiling.tflops * TERA for dtype in flop if (ceiling := find_ceiling(dtype))}
    unknown = sum(count for dtype, count in flop.items() if dtype not in known)
    if not seconds or not flop or unknown > _MAX_SHARE_WITHOUT_CEILING * sum(flop.values()):
        return None
    return sum(flop[dtype] / rate for dtype, rate in known.items()) / seconds
