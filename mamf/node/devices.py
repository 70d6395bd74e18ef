"""The devices of a node and their figures, as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mamf.measurement import Conditions
from mamf.report.text import significant

#: Figures of a device that are compared.
BURST, SUSTAINED, COPY, READ = "burst", "sustained", "copy", "read"
TO_DEVICE, TO_HOST, TO_PEER = "to_device", "to_host", "to_peer"
#: The unit that each figure is shown in, and the value of 1e12/s in it.
UNITS = {
    BURST: ("TFLOPS", 1.0),
    SUSTAINED: ("TFLOPS", 1.0),
    COPY: ("TB/s", 1.0),
    READ: ("TB/s", 1.0),
    TO_DEVICE: ("GB/s", 1e3),
    TO_HOST: ("GB/s", 1e3),
    TO_PEER: ("GB/s", 1e3),
}


@dataclass(frozen=True)
class Device:
    """One device: its index on the node, and the number of the node among those that are judged together.

    ``dtype``: of its products. ``build``: its unit count and power limit. ``figures``: 1e12 FLOP or bytes a second, by
    the names of UNITS. ``half_widths``: of their intervals, as a share. ``failures``: why the device failed, a line
    each. ``lacks``: what was not measured, and why. ``conditions``: of the sustained ceiling, else of burst.
    ``throttled``: the largest share of time by reason. ``address``: on the bus, known only in the measuring process.
    """

    index: int
    node: int = 0
    name: str = ""
    uuid_hash: str | None = None
    address: str | None = None
    dtype: str = ""
    build: tuple[int | None, float | None] = (None, None)
    figures: Mapping[str, float] = field(default_factory=dict)
    half_widths: Mapping[str, float] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)
    throttled: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The name of the device within a run."""
        return f"node {self.node} device {self.index}" if self.node else f"device {self.index}"

    @property
    def who(self) -> str:
        """Its place, bus address and uuid, as far as they are known."""
        uuid = self.uuid_hash and f"uuid {self.uuid_hash}"
        known = [each for each in (self.address, uuid) if each]
        return f"{self.place} ({', '.join(known)})" if known else self.place

    def record(self) -> dict[str, Any]:
        """The device as JSON values."""
        return asdict(self)


def shown(figure: str, value: float) -> str:
    """A figure with its unit."""
    unit, factor = UNITS[figure]
    return f"{significant(value * factor)} {unit}"
