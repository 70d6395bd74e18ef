"""Reads Chrome traces of torch.profiler: the events, their callers and the training steps."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mamf.errors import UsageError
from mamf.operations.tracing.events import Event, Kind, Trace

#: The mark in a trace with which ``mamf profile`` ends a training step.
STEP_MARK = "mamf: step"
_STEP_OF_PROFILER = "ProfilerStep#"
_ANNOTATION_OF_DEVICE = "gpu_user_annotation"
_KINDS: Mapping[str, Kind] = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "cpu_op": "operation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "xpu_runtime": "runtime",
    "user_annotation": "annotation",
}
_GRAPH_LAUNCH = "GraphLaunch"
_BACKWARD_NODE = "autograd::engine::evaluate_function"
# Times are rounded to the nanosecond, so a call may appear to end after its caller.
_ROUNDING = 2e-9
_MICROSECOND = 1e-6
_Raw = Mapping[str, Any]


def read_chrome_trace(path: Path) -> Trace:
    """Read the training steps in a Chrome trace (.json or .json.gz) of torch.profiler. Raises UsageError for any other
    file.
    """
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        return _trace(trace)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError):
        raise UsageError(f"{path} is not a Chrome trace of torch.profiler") from None


def _trace(trace: Mapping[str, Any]) -> Trace:
    timed = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    raw = [each for each in timed if each.get("cat") in _KINDS]
    if not raw:
        raise ValueError("no events")
    origin = min(each["ts"] for each in raw)
    host = _of_host([each for each in raw if _KINDS[each["cat"]] not in ("kernel", "copy")], origin)
    device = [each for each in raw if _KINDS[each["cat"]] in ("kernel", "copy")]
    replays = {number for number, event in host.by_correlation.items() if _GRAPH_LAUNCH in event.name}
    events = [*host.events, *(_of_device(each, origin, host, replays) for each in device)]
    on_device = [_interval(each, origin) for each in timed if _is_step_on_device(each)]
    begun, ended, steps = _steps(events, on_device)
    if not ended > begun:
        raise ValueError("no time")
    within = tuple(event for event in events if event.ended > begun and event.begun < ended)
    names = {str(each.get("id")): str(each.get("name", "")) for each in trace.get("deviceProperties", ())}
    used = sorted({str(each.get("args", {}).get("device")) for each in device})
    replayed = sum(each.get("args", {}).get("correlation") in replays for each in device)
    return Trace(within, begun, ended, steps, names.get(used[0], "") if used else "", _notes(replayed, len(device)))


def _notes(replayed: int, kernels: int) -> tuple[str, ...]:
    if not replayed:
        return ()
    return (f"{replayed} of {kernels} kernels and copies were replayed from graphs: known by their names alone",)


class _Host:
    """Events of the host, with indices to find them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.by_correlation: dict[Any, Event] = {}
        self.by_external_id: dict[Any, Event] = {}


def _of_host(raw: Iterable[_Raw], origin: float) -> _Host:
    """Derive callers from nesting: an event within another on the same thread was called by it."""
    host = _Host()
    open_calls: dict[str, list[Event]] = defaultdict(list)
    forward: dict[int, Event] = {}
    for each in sorted(raw, key=lambda each: (each["ts"], -each["dur"])):
        arguments = each.get("args", {})
        lane = f"{each['pid']}/{each['tid']}"
        begun, ended = _interval(each, origin)
        stack = open_calls[lane]
        while stack and stack[-1].ended < ended - _ROUNDING:
            stack.pop()
        sequence, is_backward = arguments.get("Sequence number"), each["name"].startswith(_BACKWARD_NODE)
        event = Event(
            name=each["name"],
            kind=_KINDS[each["cat"]],
            begun=begun,
            ended=ended,
            lane=lane,
            parent=stack[-1] if stack else None,
            forward=forward.get(sequence) if is_backward else None,
            dimensions=arguments.get("Input Dims", ()),
            strides=arguments.get("Input Strides", ()),
            dtypes=arguments.get("Input type", ()),
            values=arguments.get("Concrete Inputs", ()),
        )
        stack.append(event)
        if sequence is not None and not is_backward:
            forward[sequence] = event  # the last event with a sequence number created the node
        host.events.append(event)
        if event.kind == "runtime":
            host.by_correlation[arguments.get("correlation")] = event
        elif event.kind == "operation":
            host.by_external_id[arguments.get("External id")] = event
    return host


def _of_device(raw: _Raw, origin: float, host: _Host, replays: set[Any]) -> Event:
    """A kernel or copy with the call that launched it; None for replayed ones, where a call launches a whole graph."""
    arguments = raw.get("args", {})
    correlation = arguments.get("correlation")
    parent = host.by_correlation.get(correlation) or host.by_external_id.get(arguments.get("External id"))
    return Event(
        name=str(raw["name"]),
        kind=_KINDS[raw["cat"]],
        begun=_interval(raw, origin)[0],
        ended=_interval(raw, origin)[1],
        lane=f"{arguments.get('device')}/{arguments.get('stream')}",
        parent=None if correlation in replays else parent,
    )


def _interval(raw: _Raw, origin: float) -> tuple[float, float]:
    begun = (raw["ts"] - origin) * _MICROSECOND
    return begun, begun + max(raw["dur"], 0) * _MICROSECOND


def _is_step_on_device(raw: _Raw) -> bool:
    return raw.get("cat") == _ANNOTATION_OF_DEVICE and str(raw.get("name")).startswith(_STEP_OF_PROFILER)


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
