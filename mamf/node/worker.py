"""A device's part of a shared run: it measures the steps that were dealt to it, and sends its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from mamf.plans import MATMUL, Plan
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
