"""Reads Chrome traces of torch.profiler (the events, their callers and the training steps), and traces launches."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mamf.errors import UsageError
from mamf.profiling.events import ON_DEVICE, Event, Kind, Trace

#: The mark in a trace with which ``mamf profile`` ends a training step.
STEP_MARK = "mamf: step"
_STEP_OF_PROFILER = "ProfilerStep#"
_ANNOTATION_OF_DEVICE = "gpu_user_annotation"
_KINDS: Mapping[str, Kind] = {
    "kernel": "kernel",
    **dict.fromkeys(("gpu_memcpy", "gpu_memset"), "copy"),
    "cpu_op": "operation",
    **dict.fromkeys((f"{vendor}_runtime" for vendor in ("cuda", "xpu", "privateuse1")), "runtime"),
    **dict.fromkeys((f"{vendor}_driver" for vendor in ("cuda", "xpu", "privateuse1")), "runtime"),
    "user_annotation": "annotation",
}
_GRAPH_LAUNCH = "GraphLaunch"
_BACKWARD_NODE = "autograd::engine::evaluate_function"
# Times are rounded to the nanosecond, so a call may appear to end after its caller.
_ROUNDING = 2e-9
_MICROSECOND = 1e-6
#: The largest trace that is read, unpacked: Python's objects take some ten times as much.
_MAX_BYTES = 1 << 30
_Raw = Mapping[str, Any]


def read_chrome_trace(path: Path) -> Trace:
    """Read the training steps in a Chrome trace (.json or .json.gz) of torch.profiler. Raises UsageError for any other
    file.
    """
    content = content_of(path)
    try:
        return _trace(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError):
        raise UsageError(f"{path} is not a Chrome trace of torch.profiler") from None


def content_of(path: Path) -> bytes:
    """A file of a profiler, unpacked. Raises UsageError for one that cannot be read or is too large."""
    try:
        with path.open("rb") as file, gzip.GzipFile(fileobj=file) as unpacked:
            is_packed = file.peek(2)[:2] == b"\x1f\x8b"
            data = (unpacked if is_packed else file).read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_BYTES >> 20} MiB unpacked: trace fewer steps")
    return data


def read_ranks(folder: Path) -> Iterator[Trace]:
    """Read the traces of a run's ranks (.json, .json.gz) in a folder one by one. Raises UsageError for no trace, other
    files, two traces from one rank and a trace that does not say its rank.
    """
    found: dict[int, Path] = {}
    for path in sorted(each for each in folder.glob("*.json*") if each.name.endswith((".json", ".json.gz"))):
        trace = read_chrome_trace(path)
        if trace.rank is None:
            raise UsageError(f"{path} does not say which rank it is from: profile a script that uses torch.distributed")
        if trace.rank in found:
            raise UsageError(f"{found[trace.rank]} and {path} are both from rank {trace.rank}: leave one of them out")
        found[trace.rank] = path
        yield trace
    if not found:
        raise UsageError(f"{folder} holds no trace (.json, .json.gz)")


def _trace(trace: Mapping[str, Any]) -> Trace:
    timed = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    raw = [each for each in timed if each.get("cat") in _KINDS]
    if not raw:
        raise ValueError("no events")
    origin = min(each["ts"] for each in raw)
    host, launches = _of_host([each for each in raw if _KINDS[each["cat"]] not in ON_DEVICE], origin)
    device = [each for each in raw if _KINDS[each["cat"]] in ON_DEVICE]
    replays = {key for key, event in launches.items() if _GRAPH_LAUNCH in event.name}
    events = [*host, *(_of_device(each, origin, launches, replays) for each in device)]
    begun, ended, steps = _steps(
        events,
        [
            _interval(each, origin)
            for each in timed
            if each.get("cat") == _ANNOTATION_OF_DEVICE and str(each.get("name")).startswith(_STEP_OF_PROFILER)
        ],
    )
    if not ended > begun:
        raise ValueError("no time")
    within = tuple(event for event in events if event.ended > begun and event.begun < ended)
    names = {str(each.get("id")): str(each.get("name", "")) for each in trace.get("deviceProperties", ())}
    used = sorted({str(each.get("args", {}).get("device")) for each in device})
    replayed = sum(("correlation", each.get("args", {}).get("correlation")) in replays for each in device)
    name = names.get(used[0], "") if used else ""
    replay = f"{replayed} of {len(device)} kernels and copies were replayed from graphs: known by their names alone"
    notes = (replay,) if replayed else ()
    rank = (trace.get("distributedInfo") or {}).get("rank")
    return Trace(within, begun, ended, steps, name, notes, None if rank is None else int(rank))


def _of_host(raw: Iterable[_Raw], origin: float) -> tuple[list[Event], dict[tuple[str, Any], Event]]:
    """Events of the host, and those that launch work on the device by the field and number that its events have too.

    Derive callers from nesting: an event within another on the same thread was called by it.
    """
    events: list[Event] = []
    launches: dict[tuple[str, Any], Event] = {}
    open_calls: dict[Any, list[Event]] = defaultdict(list)
    forward: dict[int, Event] = {}
    for each in sorted(raw, key=lambda each: (each["ts"], -each["dur"])):
        arguments = each.get("args", {})
        begun, ended = _interval(each, origin)
        stack = open_calls[each["pid"], each["tid"]]
        while stack and stack[-1].ended < ended - _ROUNDING:
            stack.pop()
        sequence, is_backward = arguments.get("Sequence number"), each["name"].startswith(_BACKWARD_NODE)
        event = Event(
            name=each["name"],
            kind=_KINDS[each["cat"]],
            begun=begun,
            ended=ended,
            parent=stack[-1] if stack else None,
            forward=forward.get(sequence) if is_backward else None,
            dimensions=arguments.get("Input Dims", ()),
            dtypes=arguments.get("Input type", ()),
            values=arguments.get("Concrete Inputs", ()),
        )
        stack.append(event)
        if sequence is not None and not is_backward:
            forward[sequence] = event  # the last event with a sequence number created the node
        events.append(event)
        field = {"runtime": "correlation", "operation": "External id"}.get(event.kind)
        if field and field in arguments:
            launches[field, arguments[field]] = event
    return events, launches


def _of_device(
    raw: _Raw, origin: float, launches: Mapping[tuple[str, Any], Event], replays: Container[tuple[str, Any]]
) -> Event:
    """A kernel or copy with the call that launched it; None for replayed ones, where a call launches a whole graph."""
    arguments = raw.get("args", {})
    keys = [(field, arguments.get(field)) for field in ("correlation", "External id")]
    parent = None if keys[0] in replays else launches.get(keys[0]) or launches.get(keys[1])
    return Event(str(raw["name"]), _KINDS[raw["cat"]], *_interval(raw, origin), parent=parent)


def _interval(raw: _Raw, origin: float) -> tuple[float, float]:
    begun = (raw["ts"] - origin) * _MICROSECOND
    return begun, begun + max(raw["dur"], 0) * _MICROSECOND


def _steps(events: Sequence[Event], on_device: Sequence[tuple[float, float]]) -> tuple[float, float, int | None]:
    """The begin and end of the complete training steps of a trace, and their number; without marks, the whole trace.

    ``on_device``: the steps of torch.profiler as their kernels ran, which is later than on the host.
    """
    marks = sorted(event.ended for event in events if event.name == STEP_MARK)
    if len(marks) > 1:
        return marks[0], marks[-1], len(marks) - 1
    on_host = [(event.begun, event.ended) for event in events if event.name.startswith(_STEP_OF_PROFILER)]
    if steps := on_device or on_host:
        return min(begun for begun, _ in steps), max(ended for _, ended in steps), len(steps)
    return min(event.begun for event in events), max(event.ended for event in events), None


# -- traces of launches ------------------------------------------------------------------------------------------------


# Silences the profiler's library, which otherwise prints a line on each start and stop.
_QUIET = "6"
# The variable that the library reads when a profile ends.
_TEARDOWN = "TEARDOWN_CUPTI"


def trace_launch(launch: Callable[[], object]) -> Trace:
    """Trace a launch as one step under torch.profiler, without lasting effects. Raises RuntimeError if another profiler
    is active.
    """
    with _tear_down_after(), torch_profiler() as profiler:
        synchronize()
        mark_step()
        launch()
        synchronize()
        mark_step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return read_chrome_trace(path)


@contextmanager
def _tear_down_after() -> Iterator[None]:
    """Detach CUPTI when a profile ends, if possible. By default it stays attached and slows all later launches of the
    process: on an H200 a graph's kernels of 1 us took 25 % longer (torch 2.11).
    """
    before = os.environ.get(_TEARDOWN)
    if _can_be_torn_down():
        os.environ.setdefault(_TEARDOWN, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_TEARDOWN, None)


def _can_be_torn_down() -> bool:
    """Whether CUPTI can be detached. Before CUDA 12.6, a graph replayed in a later profile would crash
    (pytorch/pytorch#150957).
    """
    import torch

    version = torch.version.cuda
    return version is not None and tuple(map(int, version.split(".")[:2])) >= (12, 6)


def list_device_kernels(launch: Callable[[], object]) -> list[str]:
    """The names of the kernels that a launch runs on the device, in order; empty on a CPU."""
    ran = [event for event in trace_launch(launch).events if event.is_on_device]
    return [event.name for event in sorted(ran, key=lambda event: event.begun)]


def torch_profiler(**options: Any) -> Any:
    """A profiler for the host and all devices that torch supports."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
    from torch.profiler import profile, supported_activities

    # Events of a single cycle are kept; without this option some releases warn about that.
    return profile(activities=supported_activities(), acc_events=True, **options)


def mark_step() -> None:
    from torch.profiler import record_function

    with record_function(STEP_MARK):
        pass


def synchronize() -> None:
    """Wait for the device, if there is one."""
    import torch

    accelerator = getattr(torch, "accelerator", torch.cuda)  # torch 2.5 has no torch.accelerator
    if accelerator.is_available():
        accelerator.synchronize()
