"""Compute a profile of training steps from a trace: seconds and FLOP of each class of work, module and kernel.

If the run timed steps without the profiler, shares and idle time refer to the duration of these steps. Idle time is
this duration minus the busy time in the trace, so gaps that the profiler adds between kernels do not count as idle. The
functions in this file have no side effects.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mamf.measurement import IDLE_LABEL, TERA, Rate, group_pairs
from mamf.profiling.classes import MODULE_PREFIX, OPTIMIZER, classify_event, compute_visible_and_hidden_seconds
from mamf.profiling.flops import TF32_KERNEL_PATTERN, count_operation_flop, find_operand_dtype
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
#: Name of the row with the peak of allocated memory. All other rows of memory are parts of this peak.
PEAK_MEMORY = "peak"
#: If at most this share of the FLOP is in dtypes without a known ceiling, MAMFU ignores these FLOP. For example, a
#: model may compute its rotary tables in float32 and everything else in bfloat16.
_MAX_SHARE_WITHOUT_CEILING = 0.01
#: Steps are uneven if they take more than this many times as long without the profiler as with it.
_MAX_UNPROFILED_TIME_RATIO = 1.05
#: Matches the parts of a module's path that replace_layer_numbers changes. The function replaces the number of a layer,
#: and removes the attribute in which a wrapper of torch stores the wrapped module.
_REPLACED_NAME_PART_PATTERN = re.compile(
    r"(?<![^.])(?:\d+(?![^.])|(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$))"
)
#: A function that takes mamf's name of a dtype, and returns the highest known matmul rate in this dtype, or None.
CeilingLookup = Callable[[str], Rate | None]


@dataclass(frozen=True)
class ClassRow:
    """The time and FLOP of a class of work, or of modules whose names differ only in numbers, over all profiled steps.

    The row of a module includes its backward pass and its inner modules.

    - ``visible``: the seconds that are attributed to this class. Each instant is attributed to only one class.
    - ``hidden``: the seconds in which events of this class ran, but which are attributed to another class.
    - ``calls``: for a class, the number of its calls; for idle time, the number of gaps in the trace; for a module, the
      number of events in it.
    - ``flop``: FLOP by dtype.
    - ``multiplying``: the time, in seconds, in which at least one operation with counted FLOP ran.
    - ``mamfu``: the FLOP rate as a share of the matmul ceilings of the dtypes; None if more than 1 % of the FLOP is in
      dtypes without a known ceiling.
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
    """The calls of one kernel on a device, or of one operation on a CPU, over all profiled steps.

    ``seconds``: the length of the union of the intervals in which the kernel or operation ran.
    """

    name: str
    class_name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class MemoryRow:
    """The peak memory of the profiled steps, or a part of the peak, such as gradients.

    ``nbytes``: the size in bytes; None if the device does not report its peak memory.
    """

    name: str
    nbytes: int | None


@dataclass(frozen=True)
class DtypeRow:
    """The number of tensors of one kind that have one dtype.

    ``name``: the kind of tensors, such as parameters, outputs of a type of layer, or the loss.
    """

    name: str
    dtype: str
    count: int


@dataclass(frozen=True)
class Profile:
    """A profile of several training steps.

    - ``seconds``: the total duration of the profiled steps, with the profiler.
    - ``steps``: the number of profiled steps; None if the trace does not mark steps.
    - ``unprofiled_step_seconds``: the duration of one step without the profiler; None if no such step was timed.
    - ``device``: the device's name; empty if unknown.
    - ``is_of_device``: whether a device ran kernels. If no device did, all times are those of operations on the CPU.
    - ``classes``: one row per class of work, in the order of WORK_CLASSES, and a last row for idle time.
    - ``kernels``, ``modules``: rows sorted by time, longest first.
    - ``ceilings``: the matmul ceilings that MAMFU is computed from.
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
        # Compute the idle time again, because logs of early versions of mamf contain the sum of all gaps in the trace.
        # Leave out the row of idle time if this time is unknown, because the device was busy for longer than a step
        # takes without the profiler.
        idle_seconds = self.whole_seconds - self.busy_seconds
        rows = tuple(
            replace(row, visible=idle_seconds) if row.name == IDLE_LABEL else row
            for row in self.classes
            if row.name != IDLE_LABEL or idle_seconds > 0
        )
        object.__setattr__(self, "classes", rows)

    def get_visible_seconds(self, name: str) -> float:
        """Return the time in all profiled steps that is attributed to a class, in seconds; 0 if the profile
        has no such class.
        """
        return sum(row.visible for row in self.classes if row.name == name)

    @property
    def busy_seconds(self) -> float:
        """Seconds of all profiled steps in which at least one event ran."""
        return sum(row.visible for row in self.classes if row.name != IDLE_LABEL)

    @property
    def seconds_without_profiler(self) -> float:
        """Seconds that the profiled steps would take without the profiler.

        If no step was timed without the profiler, this is the time that the steps took with the profiler.
        """
        return (self.unprofiled_step_seconds or self.step_seconds) * (self.steps or 1)

    @property
    def whole_seconds(self) -> float:
        """The duration that is 100 % in the shares, in seconds: the larger of ``seconds_without_profiler`` and
        ``busy_seconds``.

        Busy time may be longer than the steps without the profiler, because the profiler slows kernels and operations.
        If only steps with the profiler were timed, idle time is an upper bound.
        """
        return max(self.seconds_without_profiler, self.busy_seconds)

    @property
    def step_factor(self) -> float:
        """The factor that converts times of the trace to seconds per step without the profiler. The profiler hardly
        slows kernels of a device, but it slows operations on a CPU.
        """
        seconds = self.whole_seconds if self.is_of_device else self.seconds_without_profiler
        return seconds / (self.whole_seconds or 1.0) / (self.steps or 1)

    @property
    def step_seconds(self) -> float:
        return self.seconds / (self.steps or 1)

    @property
    def is_uneven(self) -> bool:
        """Whether steps took clearly longer without the profiler than with it. The speed of the device then changed
        between them, and the idle time is probably too high.
        """
        return (self.unprofiled_step_seconds or 0.0) > _MAX_UNPROFILED_TIME_RATIO * self.step_seconds

    @property
    def flop(self) -> int:
        """Counted FLOP of all profiled steps together."""
        return sum(row.total_flop for row in self.classes)

    @property
    def tflops(self) -> float | None:
        """TFLOPS of whole steps: total FLOP divided by ``seconds_without_profiler``; None if no FLOP was counted."""
        return self.flop / self.seconds_without_profiler / TERA if self.flop else None

    @property
    def dtypes_without_ceiling(self) -> list[str]:
        """The dtypes in which FLOP were counted, but whose ceiling is unknown."""
        known = {ceiling.dtype for ceiling in self.ceilings}
        return list(dict.fromkeys(dtype for row in self.classes for dtype in row.flop if dtype not in known))

    @property
    def mamfu(self) -> float | None:
        """MAMFU of whole steps: the seconds that the total FLOP would take at the ceilings, divided by
        ``seconds_without_profiler``. None if no FLOP was counted, or if any class has FLOP but no MAMFU.
        """
        seconds_at_ceilings = [
            None if row.mamfu is None else row.mamfu * row.multiplying for row in self.classes if row.flop
        ]
        if not seconds_at_ceilings or None in seconds_at_ceilings:
            return None
        return sum(filter(None, seconds_at_ceilings)) / self.seconds_without_profiler


def make_profile(
    trace: Trace, find_ceiling: CeilingLookup = lambda dtype: None, unprofiled_step_seconds: float | None = None
) -> Profile:
    """Make the profile of a trace. Memory and dtypes are empty, because a trace does not contain them.

    ``find_ceiling``: returns the ceiling of a dtype, for MAMFU. ``unprofiled_step_seconds``: see Profile.
    """
    busy_intervals = find_busy_intervals(trace)
    gaps = find_gaps(_merge_busy_intervals(busy_intervals), trace.start_seconds, trace.end_seconds)
    rows = list(_make_class_rows(busy_intervals, find_ceiling))
    dtypes = dict.fromkeys(dtype for row in rows for dtype in row.flop)
    return Profile(
        seconds=trace.end_seconds - trace.start_seconds,
        steps=trace.step_count,
        device=trace.device,
        is_of_device=trace.has_device_events,
        classes=(*rows, ClassRow(IDLE_LABEL, 0.0, 0.0, len(gaps))),
        kernels=tuple(_make_kernel_rows(busy_intervals)),
        unprofiled_step_seconds=unprofiled_step_seconds,
        notes=trace.notes,
        ceilings=tuple(filter(None, map(find_ceiling, dtypes))),
        modules=tuple(_make_module_rows(busy_intervals, find_ceiling)),
    )


def _merge_busy_intervals(busy_intervals: Iterable[BusyInterval]) -> Intervals:
    return merge_intervals((each.start_seconds, each.end_seconds) for each in busy_intervals)


def _make_class_rows(busy_intervals: Iterable[BusyInterval], find_ceiling: CeilingLookup) -> Iterator[ClassRow]:
    intervals_by_class = group_pairs((classify_event(each.event), each) for each in busy_intervals)
    for name, visible_and_hidden in compute_visible_and_hidden_seconds(
        {name: _merge_busy_intervals(class_intervals) for name, class_intervals in intervals_by_class.items()}
    ).items():
        events = {each.event for each in intervals_by_class[name]}
        # If an operation on the CPU calls other operations of the same class, count all of them as one call.
        inner_events = {
            event
            for event in events
            if event.caller and event.kind == event.caller.kind == "operation" and classify_event(event.caller) == name
        }
        yield _make_class_row(
            name, *visible_and_hidden, len(events - inner_events), intervals_by_class[name], find_ceiling
        )


def _make_kernel_rows(busy_intervals: Iterable[BusyInterval]) -> list[KernelRow]:
    intervals_by_name = group_pairs(((each.event.name, classify_event(each.event)), each) for each in busy_intervals)
    rows = (
        KernelRow(
            *names,
            len({each.event for each in kernel_intervals}),
            sum_interval_seconds(_merge_busy_intervals(kernel_intervals)),
        )
        for names, kernel_intervals in intervals_by_name.items()
    )
    return sorted(rows, key=lambda row: (-row.seconds, row.name))


def _make_module_rows(busy_intervals: Iterable[BusyInterval], find_ceiling: CeilingLookup) -> list[ClassRow]:
    """Make the rows of modules, longest first. The list is empty if the trace has no ranges of modules."""
    intervals_by_module: dict[tuple[str, str], list[BusyInterval]] = defaultdict(list)
    for each in busy_intervals:
        names = [replace_layer_numbers(name) for name in _list_module_names(each.event)] or [OUTSIDE_MODULES]
        for name in dict.fromkeys(names):
            intervals_by_module[names[0], name].append(each)
    roots, rows = {root for root, name in intervals_by_module if root != name}, []
    for (root, name), module_intervals in intervals_by_module.items():
        rows.append(
            _make_class_row(
                # With several models, put the model's name first, because two models may have modules of the same name.
                f"{root}.{name}" if len(roots) > 1 and root != name else name,
                sum_interval_seconds(_merge_busy_intervals(module_intervals)),
                0.0,
                len(module_intervals),
                module_intervals,
                find_ceiling,
            )
        )
    if {root for root, _ in intervals_by_module} - {OUTSIDE_MODULES}:
        return sorted(rows, key=lambda row: -row.visible)
    return []


# List the modules in which an event ran, from the outermost to the innermost. Events of the backward pass do not
# run in any module. For such an event, use the modules of the forward operation whose gradient it computes.
def _list_module_names(event: Event) -> list[str]:
    event_and_callers = list(event.yield_event_and_callers())
    forward_operation = next((each.forward_operation for each in event_and_callers if each.forward_operation), event)
    for events in (event_and_callers, list(forward_operation.yield_event_and_callers())):
        if names := [
            each.name.removeprefix(MODULE_PREFIX) for each in reversed(events) if each.name.startswith(MODULE_PREFIX)
        ]:
            return names
    return []


# Give all layers of a model the same name: ``model.layers.0.mlp: LlamaMLP`` becomes ``model.layers.*.mlp: LlamaMLP``.
def replace_layer_numbers(name: str) -> str:
    path, colon, module_type = name.rpartition(": ")
    return f"{_REPLACED_NAME_PART_PATTERN.sub(lambda part: '' if part[1] else '*', path)}{colon}{module_type}"


def _make_class_row(
    name: str,
    visible: float,
    hidden: float,
    calls: int,
    busy_intervals: Sequence[BusyInterval],
    find_ceiling: CeilingLookup,
) -> ClassRow:
    """Make the row of a class or module from the intervals of its events, and count their FLOP.

    If an operation calls other operations, count the FLOP only once, in the class of the outer operation. For example,
    if a matmul calls a copy, the copy gets none of the matmul's FLOP.

    The dtype of the FLOP is the dtype of the innermost operation with a FLOP formula. Outer operations may have other
    dtypes, because autocast converts the operands.
    """
    operations_by_event: dict[Event, list[Event]] = {}
    for event in dict.fromkeys(each.event for each in busy_intervals):
        operations = [each for each in event.yield_event_and_callers() if count_operation_flop(each) is not None]
        # Do not count matmuls of an optimizer, such as those of Muon, because they are not a part of the model.
        if operations and classify_event(operations[-1]) == classify_event(event) != OPTIMIZER:
            operations_by_event[event] = operations
    innermost_by_outermost = {each[-1]: each[0] for each in sorted(operations_by_event.values(), key=len)}
    flop: Counter[str] = Counter()
    # torch records matmuls in TF32 as float32, so only the names of their kernels show that they ran in TF32.
    tf32_events = {
        caller
        for each in busy_intervals
        if each.event.is_on_device and TF32_KERNEL_PATTERN.search(each.event.name)
        for caller in each.event.yield_event_and_callers()
    }
    for operation, innermost in innermost_by_outermost.items():
        dtype = find_operand_dtype(innermost)
        flop["tf32" if dtype == "float32" and innermost in tf32_events else dtype] += (
            count_operation_flop(operation) or 0
        )
    seconds = sum_interval_seconds(
        _merge_busy_intervals(each for each in busy_intervals if each.event in operations_by_event)
    )
    return ClassRow(name, visible, hidden, calls, dict(flop), seconds, _compute_mamfu(flop, seconds, find_ceiling))


def _compute_mamfu(flop: Mapping[str, int], seconds: float, find_ceiling: CeilingLookup) -> float | None:
    """Return the time that the FLOP would take at the ceilings of their dtypes, as a share of ``seconds``.

    Return None if there are no FLOP or no seconds, or if more than 1 % of the FLOP is in dtypes without a ceiling.
    """
    rates_by_dtype = {dtype: ceiling.tflops * TERA for dtype in flop if (ceiling := find_ceiling(dtype))}
    flop_without_ceiling = sum(count for dtype, count in flop.items() if dtype not in rates_by_dtype)
    if not seconds or not flop or flop_without_ceiling > _MAX_SHARE_WITHOUT_CEILING * sum(flop.values()):
        return None
    return sum(flop[dtype] / rate for dtype, rate in rates_by_dtype.items()) / seconds
