"""Measures one device of a node in parts (find, bandwidth, copies, ...), each with a separate log."""

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
from mamf.node.logs import ALONE, VERIFIED, log_path
from mamf.operation import make_operation_plan
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.copies import CopyShape
from mamf.operations.matmul.operation import problem_for
from mamf.plans import NODE_BUDGET_SECONDS, Plan
from mamf.plugins.discovery import choose_kernels, make_operation

# Seconds per row of bandwidth and copies.
_ROW_SECONDS = 0.3
# Number of turns for copies between devices: neighbors never copy in the same turn.
_TURNS = 3
#: Called with the current activity, at least once per row, because a device that sends nothing counts as hanging.
OnProgress = Callable[[str], None]
#: The share of the budget for the search, and the minimum share for each later part, which gets the time left over.
_FIND_SHARE, _MIN_SHARE = 1 / 2, 1 / 16


class PartShapes(NamedTuple):
    """The maximum size of bandwidth arrays, and the size of copies."""

    array: BandwidthShape
    copy: CopyShape


_ACCELERATOR_SHAPES = PartShapes(BandwidthShape(1024 * MIB), CopyShape(256 * MIB))
# Smaller, so that a CPU takes about as long as an accelerator.
_HOST_SHAPES = PartShapes(BandwidthShape(64 * MIB), CopyShape(16 * MIB))


@dataclass
class DeviceRun:
    """Measures one device of a node. Its methods raise MamfError if the device cannot continue.

    ``seconds``: the budget of all parts together, except verification and copies between devices. ``verify_seconds``:
    the budget of verification, or None to skip it.
    """

    backend: Backend
    folder: Path
    dtype: str | None = None
    kernels: Sequence[str] | None = None
    seconds: float = NODE_BUDGET_SECONDS
    verify_seconds: float | None = None
    on_progress: OnProgress = lambda text: None
    #: Waits until all devices have called it, and returns whether to continue.
    wait_for_others: Callable[[], bool] = lambda: True

    def measure_alone(self) -> None:
        """Measure the parts that do not involve other devices."""
        self._end = self.backend.now() + self.seconds
        for part in (*ALONE, VERIFIED) if self.verify_seconds else ALONE:
            self._run_part(part)

    def measure_together(self) -> None:
        """Measure copies to the next device, in turns with the other devices."""
        for turn in range(_TURNS):
            if not self.wait_for_others():
                return
            if turn == self._turn:
                self._run_part("peers")

    @property
    def _turn(self) -> int:
        """The turn in which this device copies: 0 for even indices, 1 for odd ones.

        Each device copies to the next one in a ring, and copies of neighbors would slow each other down. If the number
        of devices is odd, the last one has turn 2, because its neighbors have turns 0 and 1.
        """
        index, count = self.backend.index, self.backend.device_count()
        return 2 if count % 2 and index == count - 1 else index % 2

    def _run_part(self, part: str) -> None:
        self.on_progress(part)
        measure: Any = {"find": self._find_ceilings, VERIFIED: self._verify_kernels}.get(part, self._measure_kernels)
        try:
            with closing(measure(part)) as running:  # closing it completes the log if the run is interrupted
                for row in running:
                    self.on_progress(f"{part} {row.phase or row.shape}")
        except UnavailableError as error:  # no kernel can run this part; the verdict reports it as missing
            self.on_progress(f"{part}: {error}")

    def _measure(self, part: str, plan: Plan, kernels: Sequence[NamedKernel]) -> Iterator[Measurement]:
        path = log_path(self.folder, self.backend.index, part)
        run = Run(plan, self.backend, kernels, on_phase=self.on_progress, path=path)
        return run.measurements()

    # -- the parts ---------------------------------------------------------------------------------------------------

    def _find_ceilings(self, part: str) -> Iterator[Measurement]:
        problem, seconds = problem_for(self.backend, self.dtype), self.seconds * _FIND_SHARE
        plan, kernels = plan_search(self.backend, problem, self.kernels, budget_seconds=seconds, is_quick=True)
        return self._measure(part, plan, list(zip(plan.kernels, kernels, strict=True)))

    def _verify_kernels(self, part: str) -> Iterator[Measurement]:
        kernels = choose_kernels_to_verify(self.backend, None)
        plan = make_verify_plan(self.backend, kernels, self.verify_seconds)
        return self._measure(part, plan, list(kernels.items()))

    def _measure_kernels(self, part: str) -> Iterator[Measurement]:
        of = make_operation("bandwidth" if part == "bandwidth" else "copies")
        available = choose_kernels(of, self.backend)
        chosen = [(name, kernel) for name, kernel in available if kernel.is_default] or available
        problems = [of.problem_for(self.backend, fields) for fields in self._requested_fields(part)]
        shapes: Iterable[Any] = [self._sizes.copy]
        if part == "bandwidth":
            shapes = [min(self._sizes.array, max(of.default_shapes(self.backend)))]
        plan = make_operation_plan(
            of,
            dict(chosen),
            problems,
            shapes,
            seconds=_ROW_SECONDS,
            budget_seconds=max(self._end - self.backend.now(), self.seconds * _MIN_SHARE) if part in ALONE else None,
            flush=part == "bandwidth",
        )
        return self._measure(part, plan, chosen)

    @property
    def _sizes(self) -> PartShapes:
        return _ACCELERATOR_SHAPES if self.backend.is_accelerator else _HOST_SHAPES

    def _requested_fields(self, part: str) -> list[dict[str, Any]]:
        if part == "bandwidth":
            return [{"pattern": name} for name in ("copy", "read")]
        return [{"direction": name} for name in (("to_peer",) if part == "peers" else ("to_device", "to_host"))]
