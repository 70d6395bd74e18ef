"""What ran when: a kernel or a copy on the device, an operation or a call of the vendor's runtime on the host; and the
intervals in which something was busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kernel", "copy", "operation", "runtime", "annotation"]
#: What runs on the device.
ON_DEVICE = ("kernel", "copy")
#: Annotations of libraries that communicate on the host, in separate threads: waiting for other ranks included.
_COMMUNICATES_ON_HOST = "gloo:"
#: Disjoint intervals in seconds, in order.
Union = list[tuple[float, float]]


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """``begun``, ``ended``: seconds from the beginning of the trace.

    ``parent``: the event that called or launched it; None if nothing did or it is unknown. ``forward``: for a node of
    autograd, the operation that it differentiates. ``dimensions``, ``dtypes`` and ``values``: the arguments of an
    operation, in order, empty if they were not recorded; ``dtypes`` as torch prints them, ``values`` of arguments that
    are not tensors.
    """

    name: str
    kind: Kind
    begun: float
    ended: float
    parent: Event | None = None
    forward: Event | None = None
    dimensions: Sequence[Sequence[int]] = ()
    dtypes: Sequence[str] = ()
    values: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def is_on_device(self) -> bool:
        return self.kind in ON_DEVICE

    def lineage(self) -> Iterator[Event]:
        """The event, its caller, the caller of that, and so on."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


@dataclass(frozen=True, slots=True)
class Busy:
    """An interval in which an event, and no event that it called, was at work."""

    event: Event
    begun: float
    ended: float


@dataclass(frozen=True)
class Trace:
    """The profiled training steps: their ``events``, when they ``begun`` and ``ended`` in seconds, and how many
    ``steps`` there are (None if the trace has no marks). ``device``: its name, empty if unknown. ``notes``: remarks for
    readers of the figures. ``rank``: None if the trace is not from a distributed run.
    """

    events: tuple[Event, ...]
    begun: float
    ended: float
    steps: int | None = None
    device: str = ""
    notes: tuple[str, ...] = ()
    rank: int | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def is_of_device(self) -> bool:
        """Whether a device was at work; if not, times are those of the CPU's operations."""
        return any(event.is_on_device for event in self.events)


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
