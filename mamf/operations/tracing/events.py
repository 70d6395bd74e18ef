"""What ran when: a kernel or a copy on the device, an operation or a call of the vendor's runtime on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kernel", "copy", "operation", "runtime", "annotation"]
#: What runs on the device.
ON_DEVICE = ("kernel", "copy")


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """``begun``, ``ended``: seconds from the beginning of the trace. ``lane``: the stream or the thread.

    ``parent``: what called it, or launched it; None: nobody, or it is not known. ``forward``: the operation that a node
    of autograd is the backward of. ``dimensions``, ``strides``, ``dtypes`` and
    ``values``: of the arguments of an operation, in their order, empty where they were not recorded; ``dtypes`` as
    torch prints them, ``values`` of what is no tensor. ``calls``: more than one for a sum over a kernel's launches.
    """

    name: str
    kind: Kind
    begun: float
    ended: float
    lane: str = ""
    parent: Event | None = None
    forward: Event | None = None
    dimensions: Sequence[Sequence[int]] = ()
    dtypes: Sequence[str] = ()
    values: Sequence[str] = ()
    calls: int = 1
    strides: Sequence[Sequence[int]] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def is_on_device(self) -> bool:
        return self.kind in ON_DEVICE

    def lineage(self) -> Iterator[Event]:
        """The event, what called it, what called that, and so on."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


@dataclass(frozen=True, slots=True)
class Busy:
    """A stretch of time in which an event, and nothing that it called, was at work."""

    event: Event
    begun: float
    ended: float


@dataclass(frozen=True)
class Trace:
    """``events``: those of the profiled steps. ``begun``, ``ended``: of these steps, in seconds. ``steps``: how many;
    None where the trace does not tell its steps. ``device``: its name, empty where it is not known. ``notes``: what a
    reader of figures must know.
    """

    events: tuple[Event, ...]
    begun: float
    ended: float
    steps: int | None = None
    device: str = ""
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def is_of_device(self) -> bool:
        """Whether a device worked; else the time is that of the CPU's operations."""
        return any(event.is_on_device for event in self.events)
