"""What a device gave, as data: the figures that devices are compared by, and what stands beside them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mamf.measurement import Conditions
from mamf.node.places import NOWHERE
from mamf.report.text import significant

#: Figures of a device that are compared, by name: the unit that they are shown in, and what 1e12 a second are in it.
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
    """One device of a node, or with the node NOWHERE a rank of which nothing was heard.

    ``figures``: 1e12 FLOP or bytes a second, by the names of UNITS. ``half_widths``: of their intervals, as a share.
    ``failures``: why it is no good at all, a line each. ``lacks``: what was not measured, and why. ``conditions``: of
    the sustained ceiling, else of burst; ``throttled``: the largest share of time by reason. ``host``, ``address`` of
    the bus: known only to who measured just now, the host only of ranks. ``collectives``: bus bandwidth in TB/s by
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
        """How it is called among the devices of a run."""
        if self.node == NOWHERE:
            return f"rank {self.rank} (place unknown)"
        return f"device {self.index}" if self.node == 0 else f"node {self.node} device {self.index}"

    @property
    def who(self) -> str:
        """Its place, and what it is known by elsewhere."""
        uuid = self.uuid_hash and f"uuid {self.uuid_hash}"
        known = [each for each in (self.host, self.address, uuid) if each]
        return f"{self.place} ({', '.join(known)})" if known else self.place

    def record(self) -> dict[str, Any]:
        """As JSON values, from rank to rank."""
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
