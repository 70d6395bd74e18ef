"""A plan whose steps are shared out over devices: the same strategy runs in a process for each, over a queue of steps
that all take from. Rows are collected here, each with its device and that device's relative speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mamf.ceilings.share import Ceilings
from mamf.errors import DeviceError, DeviceLostError
from mamf.logs.device_speeds import DeviceSpeeds, device_speeds, with_speed
from mamf.logs.records import measurement_from_record
from mamf.measurement import Measurement
from mamf.node.pool import DevicePool
from mamf.node.shares import Shares, numbered_parts
from mamf.node.worker import ASKS, ROW, STEP, assignment
from mamf.plans import Plan


@dataclass
class SharedSweep:
    """One run of a plan on the devices of a pool, as Sweep and KernelsSweep are on one: kernels of a shape by one
    device, other steps by whichever is free. The other devices take over the steps of a failed one.

    ``kernel``: of products, as it is asked for; ``ceiling_kernels``: those of ceilings, likewise. ``fatal``: rows
    whose launches ended a process. A step that ended the processes of two devices has such a row. ``results`` raises
    DeviceError where no device is left, or where two were killed or hung on the same step.
    """

    plan: Plan
    pool: DevicePool
    kernel: str = ""
    ceilings: Ceilings = field(default_factory=dict)
    held: Collection[Any] = ()
    on_phase: Callable[[str], None] = lambda text: None
    ceiling_kernels: Sequence[str] = ()
    fatal: Collection[Measurement] = ()

    def results(self) -> Iterator[Measurement]:
        """Measure every step that is not held; an interrupt loses the current shape of each device."""
        self._shares = shares = Shares(numbered_parts(self.plan, self.held), len(self.pool.able))
        self._visits: list[Measurement] = []
        self._speeds: DeviceSpeeds = {}
        self._idle: deque[int] = deque()
        self._steps: list[Any] = list(self.plan.steps())
        self._deadly: list[int] = []
        message = assignment(self.plan, self.kernel, self.ceilings, self.ceiling_kernels, self.fatal, self.pool.traits)
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
        else:
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
