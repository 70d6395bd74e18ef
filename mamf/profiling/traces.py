"""Read start and end times of kernels and operations from a trace of torch.profiler, nsys or rocprofv3."""

from __future__ import annotations

import csv
import gzip
import json
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mamf.errors import UsageError

EventKind = Literal["kernel", "copy", "operation", "runtime", "annotation"]
#: Kinds of events that run on the device. Events of all other kinds run on the host.
DEVICE_EVENT_KINDS = ("kernel", "copy")
#: Prefix of the annotations of Gloo, a library that communicates in threads of the host. Their time includes waiting
#: for other ranks.
_HOST_COMMUNICATION_PREFIX = "gloo:"
#: Disjoint intervals in order of time, as (start, end) in seconds.
Intervals = list[tuple[float, float]]
#: Name of the annotation that ``mamf profile`` puts in a trace at the end of each training step.
STEP_MARK = "mamf: step"
#: Prefixes of the annotations that torch adds to a trace around each step of its profiler, and around each step of an
#: optimizer.
_PROFILER_STEP_PREFIX, _OPTIMIZER_STEP_PREFIX = "ProfilerStep#", "Optimizer.step#"
#: Category of the annotations whose times are those of the device, not of the host.
_DEVICE_ANNOTATION_CATEGORY = "gpu_user_annotation"
#: Text in the names of all runtime calls that launch a graph, such as cudaGraphLaunch.
_GRAPH_LAUNCH_NAME = "GraphLaunch"
_KIND_BY_CATEGORY: Mapping[str, EventKind] = {
    "kernel": "kernel",
    **dict.fromkeys(("gpu_memcpy", "gpu_memset"), "copy"),
    "cpu_op": "operation",
    **{f"{vendor}_{call}": "runtime" for vendor in ("cuda", "xpu", "privateuse1") for call in ("runtime", "driver")},
    "user_annotation": "annotation",
}
_BACKWARD_NODE_PREFIX = "autograd::engine::evaluate_function"
# Tolerance for comparing two times. The trace rounds times to nanoseconds, so a call may seem to end after its caller.
_MAX_ROUNDING_ERROR_SECONDS = 2e-9
_SECONDS_PER_MICROSECOND, _SECONDS_PER_NANOSECOND = 1e-6, 1e-9
#: Maximum size of a trace after decompression. The Python objects that json makes from a trace need about ten times as
#: much memory.
_MAX_TRACE_BYTES = 1 << 30
# Maximum ratio of the size of a trace to the size of its gzip file. Without this limit, a small forged file could fill
# the memory. Real traces have ratios of 10 to 30. For a gzip file that is smaller than _MIN_ASSUMED_GZIP_BYTES, the
# limit is computed from _MIN_ASSUMED_GZIP_BYTES.
_MAX_GZIP_RATIO, _MIN_ASSUMED_GZIP_BYTES = 64, 1 << 18
_RawEvent = Mapping[str, Any]
#: Names of three columns in the tables of nsys and of rocprofv3: the kernel's name, its start in ns, and its duration
#: (nsys) or end (rocprofv3) in ns.
_KERNEL_TABLE_COLUMNS = (("Name", "Start (ns)", "Duration (ns)"), ("Kernel_Name", "Start_Timestamp", "End_Timestamp"))


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """An event in a trace: a kernel or copy on the device, or an operation, runtime call or annotation on the host.

    - ``start_seconds``, ``end_seconds``: times in seconds since the beginning of the trace.
    - ``caller``: the event that called or launched this event; None if no event called it, or if the caller is unknown.
    - ``forward_operation``: for an event of the backward pass, the operation of the forward pass whose gradient the
      event computes.
    - ``argument_shapes``, ``argument_dtypes``: shape and dtype of each argument of an operation, in order; empty if the
      trace lacks them. A dtype has the name that torch.profiler records.
    - ``argument_values``: the text of each argument that is not a tensor, and an empty text for each tensor.
    """

    name: str
    kind: EventKind
    start_seconds: float
    end_seconds: float
    caller: Event | None = None
    forward_operation: Event | None = None
    argument_shapes: Sequence[Sequence[int]] = ()
    argument_dtypes: Sequence[str] = ()
    argument_values: Sequence[str] = ()

    @property
    def is_on_device(self) -> bool:
        return self.kind in DEVICE_EVENT_KINDS

    def yield_event_and_callers(self) -> Iterator[Event]:
        """Yield this event, its caller, the caller's caller, and so on up to the outermost event."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.caller


@dataclass(frozen=True, slots=True)
class BusyInterval:
    """An interval in which an event ran, but none of its child events (the events that it called) ran."""

    event: Event
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Trace:
    """The trace of the profiled training steps. Raises ValueError if its duration is not positive.

    - ``events``: all events that overlap with the steps.
    - ``start_seconds``, ``end_seconds``: start of the first step and end of the last step.
    - ``step_count``: the number of steps; None if the trace does not mark them.
    - ``device``: the device's name; empty if unknown.
    - ``notes``: remarks for the readers of the report.
    """

    events: tuple[Event, ...]
    start_seconds: float
    end_seconds: float
    step_count: int | None = None
    device: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.end_seconds > self.start_seconds:
            raise ValueError("the trace has a duration of 0: record at least one complete step")

    @property
    def has_device_events(self) -> bool:
        """Whether a device ran kernels or copies. If none did, profiles show operations on the CPU."""
        return any(event.is_on_device for event in self.events)


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> Intervals:
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def sum_interval_seconds(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def find_gaps(covered_intervals: Intervals, start_seconds: float, end_seconds: float) -> Intervals:
    """Return the gaps between the covered intervals, from ``start_seconds`` to ``end_seconds``."""
    edges = [start_seconds, *(edge for interval in covered_intervals for edge in interval), end_seconds]
    return [
        (gap_start, gap_end) for gap_start, gap_end in zip(edges[::2], edges[1::2], strict=True) if gap_end > gap_start
    ]


def find_busy_intervals(trace: Trace) -> list[BusyInterval]:
    """Return the intervals within the training steps in which the device was busy or, if no device was used, those in
    which the CPU was busy.

    A device is busy while a kernel or copy runs. A CPU is busy while an operation runs; the time of an operation
    excludes the operations that it calls. Communication of Gloo runs on the host, but always counts as busy time, even
    if a device was used.
    """
    if trace.has_device_events:
        intervals = [
            BusyInterval(event, event.start_seconds, event.end_seconds) for event in trace.events if event.is_on_device
        ]
    else:
        intervals = list(_yield_self_intervals([event for event in trace.events if event.kind == "operation"]))
    intervals += [
        BusyInterval(event, event.start_seconds, event.end_seconds)
        for event in trace.events
        if event.kind == "annotation" and event.name.startswith(_HOST_COMMUNICATION_PREFIX)
    ]
    clipped = (
        BusyInterval(each.event, max(each.start_seconds, trace.start_seconds), min(each.end_seconds, trace.end_seconds))
        for each in intervals
    )
    return [each for each in clipped if each.end_seconds > each.start_seconds]


def _yield_self_intervals(operations: Sequence[Event]) -> Iterable[BusyInterval]:
    called_intervals_by_caller: dict[Event | None, list[tuple[float, float]]] = defaultdict(list)
    for event in operations:
        caller = next((each for each in list(event.yield_event_and_callers())[1:] if each.kind == "operation"), None)
        called_intervals_by_caller[caller].append((event.start_seconds, event.end_seconds))
    for event in operations:
        for start, end in find_gaps(
            merge_intervals(called_intervals_by_caller[event]), event.start_seconds, event.end_seconds
        ):
            yield BusyInterval(event, start, end)


def read_trace(path: Path) -> Trace:
    """Read a Chrome trace of torch.profiler (.json, .json.gz), or a table of kernels from nsys or rocprofv3 (.csv).

    A table does not mark training steps, so the trace has no ``step_count``. Raises UsageError for any other file.
    """
    content = _read_and_unpack_file(path)
    is_table = path.suffix == ".csv" and not content.startswith(b"{")
    try:
        return _parse_kernel_table(content.decode()) if is_table else _parse_chrome_trace(json.loads(content))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, csv.Error):
        raise UsageError(
            f"{path} is not a list of kernels from 'nsys stats -r cuda_gpu_trace' or 'rocprofv3 --kernel-trace'"
            if is_table
            else f"{path} is not a Chrome trace of torch.profiler: write one with its method export_chrome_trace"
        ) from None


def _read_and_unpack_file(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is a gzip file.

    Raises UsageError if the file cannot be read, if its content is larger than _MAX_TRACE_BYTES, or if the compression
    ratio of a gzip file is above _MAX_GZIP_RATIO.
    """
    try:
        with path.open("rb") as file, gzip.GzipFile(fileobj=file) as unpacked:
            file_status = os.fstat(file.fileno())
            if not stat.S_ISREG(file_status.st_mode):
                raise UsageError(f"{path} is not a regular file: save the trace to a file first")
            is_packed = file.peek(2)[:2] == b"\x1f\x8b"
            max_unpacked_bytes = _MAX_GZIP_RATIO * max(file_status.st_size, _MIN_ASSUMED_GZIP_BYTES)
            max_bytes = min(_MAX_TRACE_BYTES, max_unpacked_bytes) if is_packed else _MAX_TRACE_BYTES
            content = (unpacked if is_packed else file).read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > max_bytes:
        raise UsageError(f"{path} is larger than {max_bytes >> 20} MiB after decompression: trace fewer steps")
    return content


def _parse_chrome_trace(trace: Mapping[str, Any]) -> Trace:
    complete_events = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    raw_events = [each for each in complete_events if each.get("cat") in _KIND_BY_CATEGORY]
    if not raw_events:
        raise ValueError("the trace has no events")
    origin_microseconds = min(each["ts"] for each in raw_events)
    host_events, launches_by_link = _make_host_events(
        [each for each in raw_events if _KIND_BY_CATEGORY[each["cat"]] not in DEVICE_EVENT_KINDS], origin_microseconds
    )
    raw_device_events = [each for each in raw_events if _KIND_BY_CATEGORY[each["cat"]] in DEVICE_EVENT_KINDS]
    graph_launch_links = {link for link, event in launches_by_link.items() if _GRAPH_LAUNCH_NAME in event.name}
    events = [
        *host_events,
        *(
            _make_device_event(each, origin_microseconds, launches_by_link, graph_launch_links)
            for each in raw_device_events
        ),
    ]
    annotations = [
        (str(each.get("name")), *_compute_start_and_end(each, origin_microseconds))
        for each in complete_events
        if each.get("cat") == _DEVICE_ANNOTATION_CATEGORY
    ]
    start, end, step_count, ending_optimizer = _find_step_bounds(events, annotations)
    names = {str(each.get("id")): str(each.get("name", "")) for each in trace.get("deviceProperties", ())}
    used_device_id = min((str(each.get("args", {}).get("device")) for each in raw_device_events), default="")
    replayed_count = sum(
        ("correlation", each.get("args", {}).get("correlation")) in graph_launch_links for each in raw_device_events
    )
    note = (
        f"{replayed_count} of {len(raw_device_events)} kernels and copies were replayed from graphs, "
        "so only their names are known"
    )
    return Trace(
        tuple(event for event in events if event.end_seconds > start and event.start_seconds < end),
        start,
        end,
        step_count,
        names.get(used_device_id, ""),
        (
            *((note,) if replayed_count else ()),
            *((f"a step ends with {ending_optimizer}",) if ending_optimizer else ()),
        ),
    )


def _make_host_events(
    raw_events: Iterable[_RawEvent], origin_microseconds: float
) -> tuple[list[Event], dict[tuple[str, Any], Event]]:
    """Make the events on the host. Return all events, and a mapping from links to the events that may have launched
    work on the device.

    A trace gives a launch the same number as the kernel or copy that it launched, in a field such as ``correlation``. A
    link is the pair of the field's name and this number.

    If the interval of an event is within the interval of another event of the same thread, the outer event called the
    inner event.
    """
    events: list[Event] = []
    launches_by_link: dict[tuple[str, Any], Event] = {}
    open_calls: dict[Any, list[Event]] = defaultdict(list)
    forward_operations_by_number: dict[int, Event] = {}
    for each in sorted(raw_events, key=lambda each: (each["ts"], -each["dur"])):
        raw_arguments = each.get("args", {})
        start, end = _compute_start_and_end(each, origin_microseconds)
        open_calls_of_thread = open_calls[each["pid"], each["tid"]]
        while open_calls_of_thread and open_calls_of_thread[-1].end_seconds < end - _MAX_ROUNDING_ERROR_SECONDS:
            open_calls_of_thread.pop()
        sequence_number, is_backward = (
            raw_arguments.get("Sequence number"),
            each["name"].startswith(_BACKWARD_NODE_PREFIX),
        )
        event = Event(
            name=each["name"],
            kind=_KIND_BY_CATEGORY[each["cat"]],
            start_seconds=start,
            end_seconds=end,
            caller=open_calls_of_thread[-1] if open_calls_of_thread else None,
            forward_operation=forward_operations_by_number.get(sequence_number) if is_backward else None,
            argument_shapes=raw_arguments.get("Input Dims", ()),
            argument_dtypes=raw_arguments.get("Input type", ()),
            argument_values=raw_arguments.get("Concrete Inputs", ()),
        )
        open_calls_of_thread.append(event)
        if sequence_number is not None and not is_backward:
            # If several events of the forward pass have the same sequence number, the last of them created the autograd
            # node.
            forward_operations_by_number[sequence_number] = event
        events.append(event)
        link_field = {"runtime": "correlation", "operation": "External id"}.get(event.kind)
        if link_field and link_field in raw_arguments:
            launches_by_link[link_field, raw_arguments[link_field]] = event
    return events, launches_by_link


def _make_device_event(
    raw: _RawEvent,
    origin_microseconds: float,
    launches_by_link: Mapping[tuple[str, Any], Event],
    graph_launch_links: Container[tuple[str, Any]],
) -> Event:
    """Make the event of a kernel or copy on the device. Its caller is the event that launched it.

    - ``launches_by_link``: the host events that may have launched work, by link, as in ``_make_host_events``.
    - ``graph_launch_links``: the links of host events that launched a graph. A kernel or copy in a graph has no caller,
      because the trace does not say which operation it belongs to.
    """
    links = [(field, raw.get("args", {}).get(field)) for field in ("correlation", "External id")]
    caller = (
        None if links[0] in graph_launch_links else launches_by_link.get(links[0]) or launches_by_link.get(links[1])
    )
    return Event(
        str(raw["name"]),
        _KIND_BY_CATEGORY[raw["cat"]],
        *_compute_start_and_end(raw, origin_microseconds),
        caller=caller,
    )


def _compute_start_and_end(raw: _RawEvent, origin_microseconds: float) -> tuple[float, float]:
    start = (raw["ts"] - origin_microseconds) * _SECONDS_PER_MICROSECOND
    return start, start + max(raw["dur"], 0) * _SECONDS_PER_MICROSECOND


def _find_step_bounds(
    events: Sequence[Event], device_annotations: Sequence[tuple[str, float, float]]
) -> tuple[float, float, int | None, str]:
    """Find the complete training steps, and return four values:

    - the start of the first step, and the end of the last step
    - the number of steps
    - the name of the optimizer that marks the ends of steps; empty if mamf or torch.profiler has marked the steps

    If the trace does not mark steps, return the start and the end of the whole trace, None and "".

    ``device_annotations``: for each annotation, its name, the start of its first kernel and the end of its last kernel
    on the device. The device runs these kernels later than the host runs the annotation.
    """
    step_ends = sorted(event.end_seconds for event in events if event.name == STEP_MARK)
    if len(step_ends) > 1:
        return step_ends[0], step_ends[-1], len(step_ends) - 1, ""
    host_ranges = [(event.name, event.start_seconds, event.end_seconds) for event in events]
    for ranges in (device_annotations, host_ranges):
        if steps := [each for each in ranges if each[0].startswith(_PROFILER_STEP_PREFIX)]:
            return min(start for _, start, _ in steps), max(end for *_, end in steps), len(steps), ""
    # Ignore optimizers that step in hooks of the backward pass, because they step several times per training step.
    optimizers = [
        event.name
        for event in events
        if event.name.startswith(_OPTIMIZER_STEP_PREFIX)
        and not any(each.name.startswith(_BACKWARD_NODE_PREFIX) for each in event.yield_event_and_callers())
    ]
    for ranges in (device_annotations, host_ranges):
        optimizer_step_ends = sorted(end for name, _, end in ranges if name in optimizers[:1])
        if len(optimizer_step_ends) > 1:
            return optimizer_step_ends[0], optimizer_step_ends[-1], len(optimizer_step_ends) - 1, optimizers[0]
    return *_find_first_start_and_last_end(events), None, ""


def _parse_kernel_table(text: str) -> Trace:
    """Make a trace from a table of kernels. Skip lines before the table's header, such as progress that nsys prints."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        names = next(csv.reader([line]), [])
        for columns in _KERNEL_TABLE_COLUMNS:
            if set(columns) <= set(names):
                rows = csv.DictReader(line for line in lines[number:] if line.strip())
                events = tuple(_parse_kernel_row(row, *columns) for row in rows)
                return Trace(events, *_find_first_start_and_last_end(events))
    raise ValueError("the table has no header with the columns of nsys or rocprofv3")


def _parse_kernel_row(row: Mapping[str, str], name: str, start_column: str, end_column: str) -> Event:
    start, end = (
        float(row[column].replace(",", "")) * _SECONDS_PER_NANOSECOND for column in (start_column, end_column)
    )
    return Event(row[name], "kernel", start, start + end if end_column == "Duration (ns)" else end)


def _find_first_start_and_last_end(events: Sequence[Event]) -> tuple[float, float]:
    return min(event.start_seconds for event in events), max(event.end_seconds for event in events)
