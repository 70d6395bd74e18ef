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
