"""Measure one device of a machine in parts (fastest matmul, bandwidth, copies) for ``mamf node``.

Each part writes a separate run log. The names of the parts are in ``mamf.node.logs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.backend import MIB, SIBLING_CHECK, Backend
from mamf.engine.runner import NamedKernel
from mamf.engine.search.grid import plan_search
from mamf.engine.strategies.studies import choose_kernels_to_verify, make_verify_plan
from mamf.errors import UnavailableError, UsageError
from mamf.kinds.driver import Run
from mamf.node.logs import SINGLE_DEVICE_PARTS, VERIFY_PART, make_log_path
from mamf.operation import make_operation_plan
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.copies import CopyShape
from mamf.operations.matmul.operation import make_problem
from mamf.plans import NODE_BUDGET_SECONDS, Plan
from mamf.plugins.discovery import choose_kernels, make_operation

# Time in seconds for which each bandwidth pattern and each direction of copies is measured.
_SECONDS_PER_ROW = 0.3
# The search for the fastest matmul gets the share _FIND_BUDGET_SHARE of the time budget. Each later part may use all of
# the remaining time, and at least the share _MIN_BUDGET_SHARE of the budget.
_FIND_BUDGET_SHARE, _MIN_BUDGET_SHARE = 1 / 2, 1 / 16
# Maximum size of the arrays in bandwidth measurements, and size of each copy, in MiB. Both are smaller for a CPU, so
# that a run on a CPU takes about as long as on an accelerator.
_ACCELERATOR_SIZES_MIB, _HOST_SIZES_MIB = (1024, 256), (64, 16)
#: The problems that each part of a run measures. Each dict contains fields of one problem. All other fields have their
#: default values.
_PROBLEM_FIELDS_BY_PART = {
    "bandwidth": [{"pattern": "copy"}, {"pattern": "read"}],
    "copies": [{"direction": "to_device"}, {"direction": "to_host"}],
    "peers": [{"direction": "to_peer"}],
}


@dataclass
class DeviceRun:
    """The measurement of one device of a machine. Its methods raise MamfError if the device cannot continue.

    - ``folder``: the folder for the logs, one per part.
    - ``dtype``, ``kernels``: the data type of the matmuls and the names of their kernels; None for the defaults of the
      device.
    - ``budget_seconds``: the time for all parts together, except verification and copies between devices.
    - ``verify_budget_seconds``: the time for verifying results, or None to skip verification.
    - ``on_progress``: called at least once per measured row, with a text that says what the device is doing. A device
      that reports nothing for too long counts as hanging.
    """

    backend: Backend
    folder: Path
    dtype: str | None = None
    kernels: Sequence[str] | None = None
    budget_seconds: float = NODE_BUDGET_SECONDS
    verify_budget_seconds: float | None = None
    on_progress: Callable[[str], None] = lambda text: None
    #: A function that blocks until all devices of the machine have called it, and returns whether to continue.
    wait_for_other_devices: Callable[[], bool] = lambda: True

    def measure_single_device_parts(self) -> None:
        """Measure the parts that need only this device: its ceilings (highest matmul rates), bandwidth and copies to
        and from the host. Verify results if ``verify_budget_seconds`` is set.
        """
        self._budget_end_time = self.backend.now() + self.budget_seconds
        for part in (*SINGLE_DEVICE_PARTS, VERIFY_PART) if self.verify_budget_seconds else SINGLE_DEVICE_PARTS:
            self._measure_part(part)

    def measure_copies_to_next_device(self) -> None:
        """Measure copies to the next device in the ring of all devices. Wait for the other devices before each turn.

        If two neighbors copied at the same time, their copies would slow each other down. So devices with an even index
        copy in turn 0, and devices with an odd index in turn 1. If the number of devices is odd, the last device copies
        in turn 2, because its neighbors copy in turns 0 and 1.
        """
        index, count = self.backend.index, self.backend.count_devices()
        turn_of_device = 2 if count % 2 and index == count - 1 else index % 2
        for turn in range(3):
            if not self.wait_for_other_devices():
                return
            if turn == turn_of_device:
                self._measure_part("peers")

    def _measure_part(self, part: str) -> None:
        self.on_progress(part)
        try:
            plan, kernels = self._make_plan(part)
            run = Run(
                plan,
                self.backend,
                kernels,
                report_phase=self.on_progress,
                report_step=lambda step, is_prepared: self.on_progress(
                    f"{'measuring' if is_prepared else 'preparing'} {step}"
                ),
                skipped_checks=[SIBLING_CHECK],
                log_path=make_log_path(self.folder, self.backend.index, part),
            )
            with closing(run.yield_measurements()) as rows:  # Closing the generator completes the log after Ctrl-C.
                for row in rows:
                    self.on_progress(f"{part} {row.phase or row.shape}")
        except UnavailableError as error:
            if part == "find":  # There is no verdict without ceilings, so say what the user can do.
                raise UsageError(str(error)) from None
            # No kernel can run this part. The verdict will report the part as missing.
            self.on_progress(f"{part}: {error}")

    def _make_plan(self, part: str) -> tuple[Plan, Sequence[NamedKernel]]:
        """Return the plan for a part of the run, and the kernels to measure, each with its name."""
        if part == "find":
            problem, seconds = make_problem(self.backend, self.dtype), self.budget_seconds * _FIND_BUDGET_SHARE
            plan, kernels = plan_search(self.backend, problem, self.kernels, budget_seconds=seconds, is_quick=True)
            return plan, list(zip(plan.kernels, kernels, strict=True))
        if part == VERIFY_PART:
            verified = choose_kernels_to_verify(self.backend, None)
            return make_verify_plan(self.backend, verified, self.verify_budget_seconds), list(verified.items())
        operation = make_operation("bandwidth" if part == "bandwidth" else "copies")
        available = choose_kernels(operation, self.backend)
        chosen = [(name, kernel) for name, kernel in available if kernel.is_default] or available
        array_mib, copy_mib = _ACCELERATOR_SIZES_MIB if self.backend.is_accelerator else _HOST_SIZES_MIB
        shapes: list[Any] = [CopyShape(copy_mib * MIB)]
        if part == "bandwidth":
            shapes = [min(BandwidthShape(array_mib * MIB), max(operation.choose_default_shapes(self.backend)))]
        plan = make_operation_plan(
            operation,
            dict(chosen),
            [operation.make_problem(self.backend, fields) for fields in _PROBLEM_FIELDS_BY_PART[part]],
            shapes,
            seconds=_SECONDS_PER_ROW,
            budget_seconds=max(self._budget_end_time - self.backend.now(), self.budget_seconds * _MIN_BUDGET_SHARE)
            if part in SINGLE_DEVICE_PARTS
            else None,
            flush=part == "bandwidth",
        )
        return plan, chosen
