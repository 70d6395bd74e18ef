"""A plan whose steps are shared out over devices: the same strategy runs in a process for each, over a queue of steps
that all take from. Rows are collected here, each with its device and that device's relative speed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mamf.backend import LEADER, DeviceInfo
from mamf.ceilings.share import Ceilings
from mamf.choices import PATIENCE_SECONDS
from mamf.errors import DeviceError, DeviceLostError, UnavailableError, UsageError
from mamf.logs.device_speeds import DeviceSpeeds, device_speeds, with_speed
from mamf.logs.records import measurement_from_record
from mamf.measurement import Measurement
from mamf.node.children import WAITS, Children, Watch
from mamf.node.worker import ASKS, DEVICE, ROW, STEP, assignment
from mamf.plans import Plan, StepKey

_TICK_SECONDS = 0.5


@dataclass
class DevicePool:
    """Use as a context manager: once entered, every device was opened or has failed. ``on_failure``: called with the
    device and reason, and whether other devices remain.

    Raises UnavailableError where none can be opened, UsageError where they are of several models.
    """

    backend: str
    devices: Sequence[int]
    patience: float = PATIENCE_SECONDS
    on_failure: Callable[[str, bool], None] = lambda text, are_others: None
    #: The traits that all devices use, as a log holds them.
    traits: Mapping[str, Any] = field(default_factory=dict)
    #: Opened devices.
    infos: dict[int, DeviceInfo] = field(default_factory=dict, init=False)

    def __enter__(self) -> DevicePool:
        self.watch = Watch(self.devices, self.patience)
        self._gone: set[int] = set()
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
        return [device for device in self.devices if device not in self._gone]

    def next(self) -> tuple[int, Mapping[str, Any]]:
        """The next message of a device; (-1, {}) if no message arrives for a moment. Ends devices that hang."""
        event = self._children.next(_TICK_SECONDS)
        if event is not None:
            self.watch.take(event)
        for device in self.watch.hanging():
            self._children.processes[device].kill()
        for device in self.able:
            if device in self.watch.failures or device not in self.watch.running:
                self._gone.add(device)
                reason = self.watch.failures.setdefault(device, "its process was ended")
                self.on_failure(f"device {device} failed: {reason}", bool(self.able))
        if event is None or event.said is None or event.rank in self._gone:
            return -1, {}
        return event.rank, event.said

    def send(self, device: int, said: object, phase: str = WAITS) -> None:
        """``phase``: what the device does from now on; unless it waits, it must keep sending messages."""
        self.watch.go_on([device], phase)
        self._children.send(device, json.dumps(said))


#: A step on which so many devices ended is dropped: otherwise it could end all of them.
_MOST_ENDS = 2
#: Parts that a device takes at once while many wait: it idles for a few milliseconds whenever it asks.
_MOST_AT_ONCE = 4


class Shares:
    """Steps by number, in parts that one device measures together, for so many ``devices``.

    ``left``: steps left out at the end of the budget. A step on which more than one device ended is dropped.
    """

    def __init__(self, parts: Collection[Collection[int]], devices: int) -> None:
        self.waiting = deque(map(list, parts))
        self._devices = devices
        self.taken: dict[int, list[int]] = {}
        self.left: list[int] = []
        self._ends: Counter[int] = Counter()

    @property
    def are_done(self) -> bool:
        return not self.waiting and not any(self.taken.values())

    def take(self, device: int) -> list[int]:
        """The next parts, one by one towards the end, so that all devices end together; there must be one."""
        rounds = len(self.waiting) // (self._devices * _MOST_AT_ONCE)
        parts = [self.waiting.popleft() for _ in range(min(max(rounds, 1), _MOST_AT_ONCE))]
        self.taken[device] = [step for part in parts for step in part]
        return list(self.taken[device])

    def answer(self, device: int, step: int) -> None:
        self.taken[device].remove(step)

    def finish(self, device: int) -> None:
        """A device has finished its part; unanswered steps are left out."""
        self.left += self.taken.pop(device, [])

    def give_back(self, device: int) -> int | None:
        """A device has ended: its unmeasured steps return to the queue, but for the step that this returns, if any."""
        part, dropped = self.taken.pop(device, []), None
        if part:
            self._ends[part[0]] += 1
            if self._ends[part[0]] >= _MOST_ENDS:
                dropped = part.pop(0)
        if part:
            self.waiting.appendleft(part)
        return dropped


def numbered_parts(plan: Plan, held: Collection[StepKey]) -> list[list[int]]:
    """The steps that are not held, by their number among all: one by one, and kernels of one shape together, since they
    are compared with one another.
    """
    wanted = set(plan.steps(held))
    steps = [(number, step) for number, step in enumerate(plan.steps()) if step in wanted]
    grouped = itertools.groupby(steps, key=lambda each: each[1][:3])
    return [[number for number, _ in part] for _, part in grouped]


@dataclass
class SharedSweep:
    """One run of a plan on the devices of a pool, as Sweep and KernelsSweep are on one: kernels of a shape by one
    device, other steps by whichever is free. The other devices take over the steps of a failed one.

    ``kernel``: of products, as it is asked for; ``ceiling_kernels``: those of ceilings, likewise. ``fatal``: rows
    whose launches ended a process. A step that ended the processes of two devices has such a row. ``results`` raises
    DeviceError where no device is left, or where two were killed or hung on the same step. ``isolates``: as Isolation's
    ``everything``.
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

    def results(self) -> Iterator[Measurement]:
        """Measure every step that is not held; an interrupt loses the current shape of each device."""
        self._shares = shares = Shares(numbered_parts(self.plan, self.held), len(self.pool.able))
        self._visits: list[Measurement] = []
        self._speeds: DeviceSpeeds = {}
        self._idle: deque[int] = deque()
        self._steps: list[Any] = list(self.plan.steps())
        self._deadly: list[int] = []
        known = self.ceilings, self.ceiling_kernels, self.fatal, self.pool.traits
        message = assignment(self.plan, self.kernel, *known, self.isolates)
        for device in self.pool.able if not shares.are_done else ():
            self.pool.send(device, message, "preparing")
        while not shares.are_done:
            device, record = self.pool.next()
            yield from self._take_back()
            if ROW in record:
                yield self._row(device, record)
            if ASKS in record:
                shares.finish(device)
                self._idle.append(device)
            self._hand_out()
        if self._deadly:
            count, first = len(self._deadly), " ".join(str(part) for part in self._steps[self._deadly[0]][::2])
            reason = f"{count} step{'s are' if count > 1 else ' is'} left that more than one device ended on"
            raise DeviceError(f"{reason}, the first {first}")

    @property
    def left_out(self) -> int:
        """Steps that the end of the budget left out, once ``results`` has ended."""
        return len(self._shares.left)

    def _row(self, device: int, record: Mapping[str, Any]) -> Measurement:
        row = replace(measurement_from_record(record[ROW], {}), device=device)
        if row.is_reference:
            self._visits.append(row)
            self._speeds = device_speeds(self._visits)
        elif record[STEP] is not None:
            self._shares.answer(device, record[STEP])
        return with_speed(row, self._speeds)

    def _take_back(self) -> Iterator[Measurement]:
        """Return the steps of failed devices to the queue; yields the rows that ended more than one."""
        able, row = self.pool.able, None
        for device in set(self._shares.taken) - set(able):
            dropped, record = self._shares.give_back(device), self.pool.watch.in_flight.get(device)
            row = replace(measurement_from_record(record, {}), device=device) if record else None
            if dropped is not None and (row is None or row.is_reference):
                self._deadly.append(dropped)
            elif dropped is not None and row and able:
                yield row
        self._idle = deque(device for device in self._idle if device in able)
        if not able and not self._shares.are_done:
            reason = "every device failed; --resume continues with those that can be opened"
            raise DeviceLostError(reason, row) if row else DeviceError(reason)

    def _hand_out(self) -> None:
        while self._idle and self._shares.waiting:
            device = self._idle.popleft()
            part = self._shares.take(device)
            phase = str(self._steps[part[0]][0])
            self.on_phase(f"{phase} on {len(self.pool.able)} devices")
            self.pool.send(device, part, phase)
