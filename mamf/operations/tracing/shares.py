"""Shares of a training step from unions of intervals: each instant counts once, so the shares add up to 1.

Sums of durations would count concurrent work twice. Here, an instant in which several classes are at work counts for
the first of them in CLASSES. Communication is last: only communication that is not hidden by computation is a cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mamf.operations.tracing.classes import CLASSES
from mamf.operations.tracing.events import Busy, Event, Trace

#: Annotations of libraries that communicate on the host, in separate threads: waiting for other ranks included.
_COMMUNICATES_ON_HOST = "gloo:"
#: Disjoint intervals in seconds, in order.
Union = list[tuple[float, float]]


class Share(NamedTuple):
    """The seconds of one class: ``visible``, those that count for it, and ``hidden``, those that count for another."""

    visible: float
    hidden: float


def union(intervals: Iterable[tuple[float, float]]) -> Union:
    merged: Union = []
    for begun, ended in sorted(intervals):
        if merged and begun <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        elif ended > begun:
            merged.append((begun, ended))
    return merged


def length(intervals: Union) -> float:
    return sum(ended - begun for begun, ended in intervals)


def shares(by_class: Mapping[str, Iterable[tuple[float, float]]]) -> dict[str, Share]:
    """The share of each class that was at work, in the order of CLASSES, from the intervals of its events."""
    found: dict[str, Share] = {}
    taken: Union = []
    for name in CLASSES:
        own = union(by_class.get(name, ()))
        if not own:
            continue
        with_own = union([*taken, *own])
        visible = length(with_own) - length(taken)
        found[name] = Share(visible, max(0.0, length(own) - visible))
        taken = with_own
    return found


def gaps(covered: Union, begun: float, ended: float) -> Union:
    """The parts of a training step that no interval covers."""
    edges = [begun, *(edge for interval in covered for edge in interval), ended]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]


def busy(trace: Trace) -> list[Busy]:
    """The busy intervals of events within the training steps: events on the device if there is one, else the CPU's
    operations, each without the operations that it calls; and communication on the host.
    """
    if trace.is_of_device:
        found = [Busy(event, event.begun, event.ended) for event in trace.events if event.is_on_device]
    else:
        found = list(_own_time([event for event in trace.events if event.kind == "operation"]))
    on_host = (event for event in trace.events if event.name.startswith(_COMMUNICATES_ON_HOST))
    found += [Busy(event, event.begun, event.ended) for event in on_host if event.kind == "annotation"]
    clipped = (Busy(each.event, max(each.begun, trace.begun), min(each.ended, trace.ended)) for each in found)
    return [each for each in clipped if each.ended > each.begun]


def _own_time(operations: Sequence[Event]) -> Iterable[Busy]:
    called: dict[Event, list[tuple[float, float]]] = defaultdict(list)
    for event in operations:
        caller = next((each for each in list(event.lineage())[1:] if each.kind == "operation"), None)
        if caller is not None:
            called[caller].append((event.begun, event.ended))
    for event in operations:
        for begun, ended in gaps(union(called[event]), event.begun, event.ended):
            yield Busy(event, begun, ended)
