"""A plan whose shapes are dealt out to devices: the same strategy runs in a process for each. Rows are collected here,
each with its device and that device's relative speed. A ``Worker`` is such a process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mamf.backend import LEADER, Backend, DeviceInfo
from mamf.ceilings.share import Ceilings
from mamf.choices import PATIENCE_SECONDS
from mamf.engine.isolation import isolation_of
from mamf.engine.runner import crashes_of
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.engine.strategies.shapes import Sweep
from mamf.errors import DeviceError, DeviceLostError, UnavailableError, UsageError
from mamf.logs.plan_records import plan_from_record, plan_record
from mamf.logs.recording import apply_traits
from mamf.logs.records import ceiling_from_record, ceiling_record, measurement_from_record, measurement_record
from mamf.logs.run_log import device_speeds, with_speed
from mamf.measurement import Measurement
from mamf.node.children import IN_FLIGHT, LABEL, PHASE, WAITS, Children, Watch
from mamf.operations.matmul.selection import kernel_for, reference_kernels
from mamf.plans import ALGORITHM, MATMUL, Plan, StepKey
from mamf.plugins.discovery import operation
from mamf.plugins.selection import choose_kernels

#: Keys of a worker's message in addition to its phase: the opened device, and a row.
DEVICE, ROW = "device", "row"


def in_flight(row: Measurement | None) -> dict[str, Any]:
    """The message with the row to be logged if the process dies now."""
    return {IN_FLIGHT: row and {**measurement_record(row), LABEL: f"{row.kernel} at {row.shape}"}}


def assignment(
    plan: Plan,
    kernel: str,
    steps: Sequence[int],
    ceilings: Ceilings,
    ceiling_kernels: Sequence[str] = (),
    fatal: Iterable[Measurement] = (),
    traits: Mapping[str, Any] = MappingProxyType({}),
    isolates: bool | None = None,
) -> dict[str, Any]:
    """The message to a worker, as JSON values. ``kernel``: of products, as it is asked for; ``steps``: by number;
    ``ceiling_kernels``: those of ceilings, likewise. ``fatal``: rows whose launches ended a process. ``traits``: as a
    log holds them. ``isolates``: as Isolation's ``everything``.
    """
    ceiling_records = [ceiling_record(ceiling) for ceiling in ceilings.values()]
    return {
        "plan": plan_record(plan),
        "kernel": kernel,
        "steps": list(steps),
        "ceilings": ceiling_records,
        "ceiling_kernels": list(ceiling_kernels),
        "fatal": list(map(measurement_record, fatal)),
        "traits": dict(traits),
        "isolates": isolates,
    }


@dataclass
class Worker:
    """``send``: sends a record; ``receive``: waits for the next line and returns it."""

    backend: Backend
    send: Callable[[Mapping[str, Any]], None]
    receive: Callable[[], str]

    def work(self) -> None:
        """Measure what the leader deals out. Raises the errors of a failed device."""
        self.send({PHASE: WAITS, DEVICE: asdict(self.backend.info)})
        crashes_of(self.backend).keep = lambda row: self.send(in_flight(row))
        try:
            for row in self._strategy(json.loads(self.receive())).results():
                self.send({ROW: measurement_record(row)})
        except DeviceLostError as error:
            self.send(in_flight(error.row))
            raise

    def _strategy(self, message: Mapping[str, Any]) -> Sweep | KernelsSweep:
        plan, backend = plan_from_record(message["plan"]), self.backend
        steps = list(plan.steps())
        queue = [steps[number] for number in message["steps"]]
        crashes_of(backend).fatal = [measurement_from_record(record, {}) for record in message["fatal"]]
        isolation_of(backend).everything = message["isolates"]
        apply_traits(backend, message["traits"])
        if plan.operation == MATMUL:
            return Sweep(plan, kernel_for(backend, plan.problem, message["kernel"]), backend, queue=queue)
        kernels = [kernel for _, kernel in choose_kernels(operation(plan.operation), backend, plan.kernels)]
        header = {DEVICE: asdict(backend.info)}
        found = [ceiling_from_record(record, header) for record in message["ceilings"]]
        ceilings = {(ceiling.problem.dtype, ceiling.regime): ceiling for ceiling in found}
        references = reference_kernels({ceiling.kernel for ceiling in found}, message["ceiling_kernels"])
        return KernelsSweep(plan, kernels, backend, ceilings, references, queue=queue)


_TICK_SECONDS = 0.5


@dataclass
class DevicePool:
    """Use as a context manager: once entered, every device was opened or has failed. ``on_failure``: called with the
    device and reason.

    Raises UnavailableError where none can be opened, UsageError where they are of several models.
    """

    backend: str
    devices: Sequence[int]
    patience: float = PATIENCE_SECONDS
    on_failure: Callable[[str], None] = lambda text: None
    #: The traits that all devices use, as a log holds them.
    traits: Mapping[str, Any] = field(default_factory=dict)
    #: Opened devices.
    infos: dict[int, DeviceInfo] = field(default_factory=dict, init=False)

    def __enter__(self) -> DevicePool:
        self.watch = Watch(self.devices, self.patience)
        self._failed: set[int] = set()
        self._children = self._started()
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._children.dismiss()
        self._children.__exit__(*raised)

    def _started(self) -> Children:
        command = [sys.executable, "-m", "mamf", "sweep", "--led", self.backend]
        commands = {device: [*command, str(device)] for device in self.devices}
        return Children(commands, {**os.environ, "PYTHONUNBUFFERED": "1", LEADER: str(os.getpid())})

    def _open(self) -> None:
        while any(device not in self.infos for device in self.able):
            device, record = self.next()
            if DEVICE in record:
                self.infos[device] = DeviceInfo(**record[DEVICE])
        if not self.able:
            failures = "; ".join(f"device {device}: {reason}" for device, reason in self.watch.failures.items())
            raise UnavailableError(f"no device could be opened: {failures}")
        names = {info.name: device for device, info in self.infos.items()}
        if len(names) > 1:
            models = ", ".join(f"{device} is a {name}" for name, device in names.items())
            raise UsageError(f"--devices share a run that compares them: {models}; sweep each model separately")

    @property
    def able(self) -> list[int]:
        """The devices that have not failed."""
        return [device for device in self.devices if device not in self._failed]

    def next(self) -> tuple[int, Mapping[str, Any]]:
        """The next message of a device; (-1, {}) if no message arrives for a moment. Ends devices that hang."""
        event = self._children.next(_TICK_SECONDS)
        if event is not None:
            self.watch.take(event)
            if event.said is None and event.code:
                self.watch.failures.setdefault(event.rank, "its process was ended")
        for device in self.watch.hanging():
            self._children.processes[device].kill()
            self.watch.running.discard(device)
        for device in self.able:
            if device in self.watch.failures:
                self._failed.add(device)
                self.on_failure(f"device {device} failed: {self.watch.failures[device]}")
        return (-1, {}) if event is None or event.said is None else (event.rank, event.said)

    def send(self, device: int, said: object, phase: str = WAITS) -> None:
        """``phase``: what the device does from now on; unless it waits, it must keep sending messages."""
        self.watch.go_on([device], phase)
        self._children.send(device, json.dumps(said))


def deal_steps(plan: Plan, held: Collection[StepKey], devices: Sequence[int]) -> dict[int, list[int]]:
    """The steps that are not held, by their number among all, for each device. Shapes are dealt out in turn; kernels of
    a shape stay together, since they are compared with one another.
    """
    wanted = set(plan.steps(held))
    steps = [(number, step) for number, step in enumerate(plan.steps()) if step in wanted]
    parts = [[number for number, _ in part] for _, part in itertools.groupby(steps, key=lambda each: each[1][:3])]
    dealt = {device: parts[place :: len(devices)] for place, device in enumerate(devices)}
    return {device: [number for part in own for number in part] for device, own in dealt.items() if own}


@dataclass
class SharedSweep:
    """One run of a plan on the devices of a pool, as Sweep and KernelsSweep are on one.

    ``kernel``: of products, as it is asked for; ``ceiling_kernels``: those of ceilings, likewise. ``fatal``: rows
    whose launches ended a process. ``isolates``: as Isolation's ``everything``. Shapes are dealt out in advance. A
    device that fails costs its row in flight: the others finish theirs, and --resume measures the rest.
    """

    plan: Plan
    pool: DevicePool
    kernel: str = ""
    ceilings: Ceilings = field(default_factory=dict)
    held: Collection[Any] = ()
    on_phase: Callable[[str], None] = lambda text: None
    ceiling_kernels: Sequence[str] = ()
    fatal: Collection[Measurement] = ()
    isolates: bool | None = None
    #: Steps without a row, at the end of the budget.
    left_out: int = field(default=0, init=False)

    def results(self) -> Iterator[Measurement]:
        """Measure every step that is not held; an interrupt loses the current shape of each device."""
        dealt = deal_steps(self.plan, self.held, self.pool.able)
        self.left_out = sum(map(len, dealt.values()))
        self._visits: list[Measurement] = []
        known = self.ceilings, self.ceiling_kernels, self.fatal, self.pool.traits
        self.on_phase(f"measuring on {len(dealt)} devices")
        for device, steps in dealt.items():
            self.pool.send(device, assignment(self.plan, self.kernel, steps, *known, self.isolates), "measuring")
        failed = set(self.pool.devices) - set(self.pool.able)
        running = set(dealt)
        while running:
            device, record = self.pool.next()
            if ROW in record:
                yield self._row(device, record[ROW])
            for ended in sorted(running - self.pool.watch.running):
                running.discard(ended)
                if row := self.pool.watch.in_flight.get(ended):
                    yield self._row(ended, row)
        if self.left_out and (lost := set(self.pool.devices) - set(self.pool.able) - failed):
            names = ", ".join(f"device {device}" for device in sorted(lost))
            raise DeviceError(f"{names} failed; --resume measures the rest")

    def _row(self, device: int, record: Mapping[str, Any]) -> Measurement:
        row = replace(measurement_from_record(record, {}), device=device)
        if row.is_reference:
            self._visits.append(row)
        elif row.phase != ALGORITHM:
            self.left_out -= 1
        return with_speed(row, device_speeds(self._visits))
