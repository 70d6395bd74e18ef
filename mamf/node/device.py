"""Measure one device of a machine in parts (fastest matmul, bandwidth, copies) for ``mamf node``.

Each part writes a separate run log. The names of the parts are in ``mamf.node.logs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mamf.backend import MIB, Backend
from mamf.engine.runner import NamedKernel
from mamf.engine.search.grid import plan_search
from mamf.engine.strategies.studies import choose_kernels_to_verify, make_verify_plan
from mamf.errors import UnavailableError
from mamf.kinds.driver import Run
from mamf.measurement import Measurement
from mamf.node.logs import SINGLE_DEVICE_PARTS, VERIFY_PART, make_log_path
from mamf.operation import make_operation_plan
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.copies import CopyShape
from mamf.operations.matmul.operation import problem_for
from mamf.plans import NODE_BUDGET_SECONDS, Plan
from mamf.plugins.discovery import choose_kernels, make_operation

# Time for which one bandwidth pattern or one direction of copies is measured.
_SECONDS_PER_ROW = 0.3
# Number of turns in which the devices of a ring copy to their neighbors, so that a device and its neighbor never copy
# in the same turn.
_COPY_TURN_COUNT = 3
#: A function that is called with a text that says what the device does now. Call it at least once per measured row,
#: because ``mamf node`` assumes that a device hangs if it reports nothing.
ProgressCallback = Callable[[str], None]
# The share of the time budget for the search for the fastest matmul, and the minimum share for each later part. A later
# part gets all of the time that the earlier parts left over.
_FIND_BUDGET_SHARE, _MIN_BUDGET_SHARE = 1 / 2, 1 / 16


class PartShapes(NamedTuple):
    """The sizes to measure with on one kind of device.

    - ``largest_array``: the maximum size of the arrays whose bandwidth is measured.
    - ``copy``: the size of each copy between the host and a device, or between two devices.
    """

    largest_array: BandwidthShape
    copy: CopyShape


_ACCELERATOR_SHAPES = PartShapes(BandwidthShape(1024 * MIB), CopyShape(256 * MIB))
# Use smaller arrays on a CPU, so that a CPU takes about as long as an accelerator.
_HOST_SHAPES = PartShapes(BandwidthShape(64 * MIB), CopyShape(16 * MIB))


@dataclass
class DeviceRun:
    """The measurement of one device of a machine. Its methods raise MamfError if the device cannot continue.

    - ``folder``: the folder for the logs, one per part.
    - ``dtype``, ``kernels``: the data type of the matmuls and the names of their kernels; None for the defaults of the
      device.
    - ``budget_seconds``: the time for all parts together, except verification and copies between devices.
    - ``verify_budget_seconds``: the time for verifying results, or None to skip verification.
    - ``on_progress``: called with a text that says what the device does now.
    """

    backend: Backend
    folder: Path
    dtype: str | None = None
    kernels: Sequence[str] | None = None
    budget_seconds: float = NODE_BUDGET_SECONDS
    verify_budget_seconds: float | None = None
    on_progress: ProgressCallback = lambda text: None
    #: A function that blocks until all devices of the machine have called it, and returns whether to continue.
    wait_for_others: Callable[[], bool] = lambda: True

    def measure_single_device_parts(self) -> None:
        """Measure the parts that need only this device: its ceilings, bandwidth and copies to and from the host, and
        verify results if ``verify_budget_seconds`` is set.
        """
        self._budget_end_time = self.backend.now() + self.budget_seconds
        for part in (*SINGLE_DEVICE_PARTS, VERIFY_PART) if self.verify_budget_seconds else SINGLE_DEVICE_PARTS:
            self._measure_part(part)

    def measure_copies_to_next_device(self) -> None:
        """Measure copies to the next device in the ring of all devices. Wait for the other devices before each turn."""
        for turn in range(_COPY_TURN_COUNT):
            if not self.wait_for_others():
                return
            if turn == self._copy_turn:
                self._measure_part("peers")

    @property
    def _copy_turn(self) -> int:
        """The turn in which this device copies to the next device: 0 for an even device index, 1 for an odd one.

        All devices form a ring, and copies of two neighbors at the same time would slow each other down. If the number
        of devices is odd, the last device gets turn 2, because its neighbors have turns 0 and 1.
        """
        index, count = self.backend.index, self.backend.device_count()
        return 2 if count % 2 and index == count - 1 else index % 2

    def _measure_part(self, part: str) -> None:
        self.on_progress(part)
        measure: Any = {"find": self._measure_ceilings, VERIFY_PART: self._verify_kernels}.get(
            part, self._measure_bandwidth_or_copies
        )
        try:
            with closing(measure(part)) as rows:  # closing the generator completes the log if the run is interrupted
                for row in rows:
                    self.on_progress(f"{part} {row.phase or row.shape}")
        except (
            UnavailableError
        ) as error:  # no kernel can run this part, and the verdict will report the part as missing
            self.on_progress(f"{part}: {error}")

    def _run_with_log(self, part: str, plan: Plan, kernels: Sequence[NamedKernel]) -> Iterator[Measurement]:
        path = make_log_path(self.folder, self.backend.index, part)
        run = Run(plan, self.backend, kernels, on_phase=self.on_progress, path=path)
        return run.measurements()

    # -- the parts of a run ------------------------------------------------------------------------------------------

    def _measure_ceilings(self, part: str) -> Iterator[Measurement]:
        problem, seconds = problem_for(self.backend, self.dtype), self.budget_seconds * _FIND_BUDGET_SHARE
        plan, kernels = plan_search(self.backend, problem, self.kernels, budget_seconds=seconds, is_quick=True)
        return self._run_with_log(part, plan, list(zip(plan.kernels, kernels, strict=True)))

    def _verify_kernels(self, part: str) -> Iterator[Measurement]:
        kernels = choose_kernels_to_verify(self.backend, None)
        plan = make_verify_plan(self.backend, kernels, self.verify_budget_seconds)
        return self._run_with_log(part, plan, list(kernels.items()))

    def _measure_bandwidth_or_copies(self, part: str) -> Iterator[Measurement]:
        operation = make_operation("bandwidth" if part == "bandwidth" else "copies")
        available = choose_kernels(operation, self.backend)
        chosen = [(name, kernel) for name, kernel in available if kernel.is_default] or available
        problems = [operation.problem_for(self.backend, fields) for fields in self._list_problem_fields(part)]
        shapes: Iterable[Any] = [self._part_shapes.copy]
        if part == "bandwidth":
            shapes = [min(self._part_shapes.largest_array, max(operation.default_shapes(self.backend)))]
        plan = make_operation_plan(
            operation,
            dict(chosen),
            problems,
            shapes,
            seconds=_SECONDS_PER_ROW,
            budget_seconds=max(self._budget_end_time - self.backend.now(), self.budget_seconds * _MIN_BUDGET_SHARE)
            if part in SINGLE_DEVICE_PARTS
            else None,
            flush=part == "bandwidth",
        )
        return self._run_with_log(part, plan, chosen)

    @property
    def _part_shapes(self) -> PartShapes:
        return _ACCELERATOR_SHAPES if self.backend.is_accelerator else _HOST_SHAPES

    def _list_problem_fields(self, part: str) -> list[dict[str, Any]]:
        if part == "bandwidth":
            return [{"pattern": name} for name in ("copy", "read")]
        return [{"direction": name} for name in (("to_peer",) if part == "peers" else ("to_device", "to_host"))]
