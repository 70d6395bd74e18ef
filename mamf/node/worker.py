"""A device's part of a shared run: it requests steps whenever it is free, and sends its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.share import Ceilings
from mamf.engine.isolation import isolation_of
from mamf.engine.runner import crashes_of
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.engine.strategies.shapes import Sweep
from mamf.errors import DeviceLostError
from mamf.logs.plan_records import plan_from_record, plan_record
from mamf.logs.recording import apply_traits
from mamf.logs.records import ceiling_from_record, ceiling_record, measurement_from_record, measurement_record
from mamf.measurement import Measurement
from mamf.node.children import IN_FLIGHT, LABEL, PHASE, WAITS
from mamf.operations.matmul.selection import kernel_for, reference_kernels
from mamf.plans import ALGORITHM, MATMUL, Plan
from mamf.plugins.discovery import operation
from mamf.plugins.selection import choose_kernels

#: Keys of a worker's message in addition to its phase: the opened device, a row and its step, and a request for more.
DEVICE, ROW, STEP, ASKS = "device", "row", "step", "asks"


def in_flight(row: Measurement | None) -> dict[str, Any]:
    """The message with the row to be logged if the process dies now."""
    return {IN_FLIGHT: row and {**measurement_record(row), LABEL: f"{row.kernel} at {row.shape}"}}


def assignment(
    plan: Plan,
    kernel: str,
    ceilings: Ceilings,
    ceiling_kernels: Sequence[str] = (),
    fatal: Iterable[Measurement] = (),
    traits: Mapping[str, Any] = MappingProxyType({}),
    isolates: bool | None = None,
) -> dict[str, Any]:
    """The first message to all workers of a run, as JSON values. ``kernel``: of products, as it is asked for;
    ``ceiling_kernels``: those of ceilings, likewise. ``fatal``: rows whose launches ended a process. ``traits``: as a
    log holds them. ``isolates``: as Isolation's ``everything``.
    """
    ceiling_records = [ceiling_record(ceiling) for ceiling in ceilings.values()]
    return {
        "plan": plan_record(plan),
        "kernel": kernel,
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
    _current: int = field(default=0, init=False)

    def work(self) -> None:
        """Measure until the leader ends the process. Raises the errors of a failed device."""
        self.send({PHASE: WAITS, DEVICE: asdict(self.backend.info)})
        crashes_of(self.backend).keep = lambda row: self.send(in_flight(row))
        try:
            for row in self._strategy(json.loads(self.receive())).results():
                is_answer = not row.is_reference and row.phase != ALGORITHM
                self.send({ROW: measurement_record(row), STEP: self._current if is_answer else None})
        except DeviceLostError as error:  # another device takes the step
            self.send(in_flight(error.row))
            raise

    def _strategy(self, message: Mapping[str, Any]) -> Sweep | KernelsSweep:
        plan, backend = plan_from_record(message["plan"]), self.backend
        crashes_of(backend).fatal = [measurement_from_record(record, {}) for record in message["fatal"]]
        isolation_of(backend).everything = message["isolates"]
        apply_traits(backend, message["traits"])
        if plan.operation == MATMUL:
            return Sweep(
                plan, kernel_for(backend, plan.problem, message["kernel"]), backend, queue=self._steps(plan.steps())
            )
        kernels = [kernel for _, kernel in choose_kernels(operation(plan.operation), backend, plan.kernels)]
        header = {DEVICE: asdict(backend.info)}
        found = [ceiling_from_record(record, header) for record in message["ceilings"]]
        ceilings = {(ceiling.problem.dtype, ceiling.regime): ceiling for ceiling in found}
        references = reference_kernels({ceiling.kernel for ceiling in found}, message["ceiling_kernels"])
        return KernelsSweep(plan, kernels, backend, ceilings, references, queue=self._steps(plan.steps()))

    def _steps(self, steps: Collection[Any]) -> Iterator[Any]:
        """The steps whose numbers the leader sends."""
        steps = list(steps)
        while True:
            self.send({PHASE: WAITS, ASKS: True})
            part = json.loads(self.receive())
            for self._current in part:
                yield steps[self._current]
