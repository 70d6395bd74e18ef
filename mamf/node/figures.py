"""Devices of a run: which rank of which node a process is, the names of its logs, and its results as data. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mamf.errors import UsageError
from mamf.measurement import Conditions
from mamf.report.text import significant

#: Each launcher's variables for rank, ranks, the rank within the node and the node.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
_FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?")
_LOG = re.compile(r"rank(\d+)-node(\d+)-device(\d+)-([a-z]+)\.jsonl")
_DEFAULT_PORT, _PORTS = 29400, 1000
#: The node of a rank whose place is unknown.
NOWHERE = -1


@dataclass(frozen=True, order=True)
class Place:
    """``index``: of the device within its node; the rank if the node is NOWHERE."""

    rank: int
    node: int
    index: int

    def log(self, folder: Path, part: str) -> Path:
        return folder / f"rank{self.rank}-node{self.node}-device{self.index}-{part}.jsonl"


def place_of(log: Path) -> tuple[Place, str] | None:
    """The place and the part of a rank's log; None for any other file."""
    found = _LOG.fullmatch(log.name)
    return found and (Place(*map(int, found.groups()[:3])), found[4])


def nowhere(rank: int) -> Place:
    return Place(rank, NOWHERE, rank)


def places_of_all(known: Mapping[int, Place], ranks: int) -> dict[int, Place]:
    """By rank. The place of a rank that reported none is inferred if all nodes have the same number of devices and only
    one place fits."""
    sizes = [
        size
        for size in range(1, ranks + 1)
        if ranks % size == 0 and all(divmod(each.rank, size) == (each.node, each.index) for each in known.values())
    ]

    def place(rank: int) -> Place:
        fitting = {Place(rank, *divmod(rank, size)) for size in sizes}
        return fitting.pop() if len(fitting) == 1 else nowhere(rank)

    return {rank: known.get(rank) or place(rank) for rank in range(ranks)}


@dataclass(frozen=True)
class Launched:
    """This process as one rank. ``host``, ``port``: where they meet. ``meets_agent``: torchrun's agent keeps the
    meeting place, and not rank 0. ``is_led``: the process that started this one does, and judges.
    """

    place: Place
    ranks: int
    host: str
    port: int
    meets_agent: bool = False
    is_led: bool = False

    @property
    def leads(self) -> bool:
        return self.place.rank == 0 and not self.is_led


def launched(environment: Mapping[str, str]) -> Launched | None:
    """This process as a launcher started it; None if it is the only one. Raises UsageError for incomplete variables."""
    for names in (_TORCHRUN, _SRUN):
        ranks = environment.get(names[1], "")
        if names[0] not in environment or not ranks.isdecimal() or int(ranks) < 2:
            continue
        numbers = [_number(name, environment.get(name, "0")) for name in names]
        place = Place(numbers[0], numbers[3], numbers[2])
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Launched(place, numbers[1], _host(environment), _port(environment), agent)
    return None


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} in the environment: it must be a number from 0")
    return int(text)


def _host(environment: Mapping[str, str]) -> str:
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise UsageError("several ranks, and nothing says where they meet: set MASTER_ADDR to the host of rank 0")
    return host


def _port(environment: Mapping[str, str]) -> int:
    if port := environment.get("MASTER_PORT"):
        return _number("MASTER_PORT", port)
    # Jobs on one host must not share a port.
    return _DEFAULT_PORT + _number("SLURM_JOB_ID", environment.get("SLURM_JOB_ID") or "0") % _PORTS


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu01`` of ``gpu[01-03,07],cpu1``."""
    found = _FIRST_HOST.match(nodes)
    return "" if found is None else found[1] + (found[2] or "") + (found[3] or "")


# -- results -----------------------------------------------------------------------------------------------------------


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
