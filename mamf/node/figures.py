"""The results of a device as data: the figures that devices are compared by, and their conditions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mamf.measurement import Conditions
from mamf.node.places import NOWHERE
from mamf.report.text import significant

#: Figures of a device that are compared, by name: the unit that they are shown in, and the value of 1e12/s in it.
BURST, SUSTAINED, COPY, READ = "burst", "sustained", "copy", "read"
TO_DEVICE, TO_HOST, TO_PEER = "to_device", "to_host", "to_peer"
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
    """One device of a node, or with the node NOWHERE a rank that never reported.

    ``figures``: 1e12 FLOP or bytes a second, by the names of UNITS. ``half_widths``: of their intervals, as a share.
    ``failures``: why the device failed, a line each. ``lacks``: what was not measured, and why. ``conditions``: of
    the sustained ceiling, else of burst; ``throttled``: the largest share of time by reason. ``host``, ``address`` of
    the bus: known only in the measuring process, the host only for ranks. ``collectives``: bus bandwidth in TB/s by
    ``collective size``.
    """

    rank: int
    node: int
    index: int
    name: str = ""
    uuid_hash: str | None = None
    host: str | None = None
    address: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    half_widths: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)
    throttled: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The name of the device within a run."""
        if self.node == NOWHERE:
            return f"rank {self.rank} (place unknown)"
        return f"device {self.index}" if self.node == 0 else f"node {self.node} device {self.index}"

    @property
    def who(self) -> str:
        """Its place, host, bus address and uuid, as far as they are known."""
        uuid = self.uuid_hash and f"uuid {self.uuid_hash}"
        known = [each for each in (self.host, self.address, uuid) if each]
        return f"{self.place} ({', '.join(known)})" if known else self.place

    def record(self) -> dict[str, Any]:
        """JSON values, to send from rank to rank."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Device:
        reasons = tuple(record["conditions"]["throttle_reasons"])
        conditions = Conditions(**{**record["conditions"], "throttle_reasons": reasons})
        lines = {name: tuple(record[name]) for name in ("failures", "lacks")}
        return cls(**{**record, **lines, "conditions": conditions})


def shown(figure: str, value: float) -> str:
    """A figure with its unit."""
    unit, factor = UNITS[figure]
    return f"{significant(value * factor)} {unit}"
