"""Measures one device, part by part, each with a separate log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mamf.backend import MIB, Backend
from mamf.engine.runner import Named
from mamf.engine.search.grid import plan_for
from mamf.engine.strategies.studies import kernels_to_verify, verify_plan
from mamf.errors import UnavailableError
from mamf.kinds.driver import Run
from mamf.measurement import Measurement
from mamf.node.logs import ALONE, VERIFIED, log_path
from mamf.operation import plan_of
from mamf.operations.bandwidth.shapes import BandwidthShape
from mamf.operations.copies import CopyShape
from mamf.operations.matmul.operation import problem_for
from mamf.plans import NODE_BUDGET_SECONDS, Plan
from mamf.plugins.discovery import choose_kernels, operation

# Seconds per row of bandwidth and copies.
_ROW_SECONDS = 0.3
# Peer copies are measured in so many turns.
_TURNS = 3
#: Called with the current activity, at least once per row: a silent device counts as hanging.
OnProgress = Callable[[str], None]
#: The share of the budget for the search. Each part after it gets the time that is left, or at least this share.
_FIND_SHARE, _MIN_SHARE = 1 / 2, 1 / 16


class Sizes(NamedTuple):
    """Shapes: of the largest bandwidth arrays, and of copies."""

    array: BandwidthShape
    copied: CopyShape


_OF_ACCELERATORS = Sizes(BandwidthShape(1024 * MIB), CopyShape(256 * MIB))
# A CPU takes as long for these.
_OF_HOSTS = Sizes(BandwidthShape(64 * MIB), CopyShape(16 * MIB))


@dataclass
class DeviceRun:
    """One device of a node. Raises MamfError if the device cannot continue."""

    backend: Backend
    folder: Path
    dtype: str | None = None
    kernels: Sequence[str] | None = None
    seconds: float = NODE_BUDGET_SECONDS
    verify_seconds: float | None = None
    on_progress: OnProgress = lambda text: None
    #: Waits until all devices have called it. Returns whether to continue.
    meet: Callable[[], bool] = lambda: True

    def alone(self) -> None:
        """Measure the parts that need no other device."""
        self._end = self.backend.now() + self.seconds
        for part in (*ALONE, VERIFIED) if self.verify_seconds else ALONE:
            self._part(part)

    def together(self) -> None:
        """Copy to the next device, in turns."""
        for turn in range(_TURNS):
            if not self.meet():
                return
            if turn == self._turn:
                self._part("peers")

    @property
    def _turn(self) -> int:
        """Copies of two neighbours in a ring hold each other back, unevenly: even devices copy, then odd ones, then the
        last of an odd number, whose neighbours are one of each.
        """
        index, count = self.backend.index, self.backend.device_count()
        return 2 if count % 2 and index == count - 1 else index % 2

    def _part(self, part: str) -> None:
        self.on_progress(part)
        measure: Any = {"find": self._find, VERIFIED: self._verify}.get(part, self._kernels)
        try:
            with closing(measure(part)) as running:  # if interrupted, the log says so
                for row in running:
                    self.on_progress(f"{part} {row.phase or row.shape}")
        except UnavailableError as error:  # no kernel for this part: the verdict reports it as missing
            self.on_progress(f"{part}: {error}")

    @property
    def _seconds_left(self) -> float:
        return max(self._end - self.backend.now(), self.seconds * _MIN_SHARE)

    def _path(self, part: str) -> Path:
        return log_path(self.folder, self.backend.index, part)

    def _measured(self, part: str, plan: Plan, kernels: Sequence[Named]) -> Iterator[Measurement]:
        run = Run(plan, self.backend, kernels, on_phase=self.on_progress, path=self._path(part))
        return run.measurements()

    # -- the parts ---------------------------------------------------------------------------------------------------

    def _find(self, part: str) -> Iterator[Measurement]:
        problem, seconds = problem_for(self.backend, self.dtype), self.seconds * _FIND_SHARE
        plan, kernels = plan_for(self.backend, problem, self.kernels, budget_seconds=seconds, is_quick=True)
        return self._measured(part, plan, list(zip(plan.kernels, kernels, strict=True)))

    def _verify(self, part: str) -> Iterator[Measurement]:
        kernels = kernels_to_verify(self.backend, None)
        plan = verify_plan(self.backend, kernels, self.verify_seconds)
        return self._measured(part, plan, list(kernels.items()))

    def _kernels(self, part: str) -> Iterator[Measurement]:
        of = operation("bandwidth" if part == "bandwidth" else "copies")
        available = choose_kernels(of, self.backend)
        chosen = [(name, kernel) for name, kernel in available if kernel.is_default] or available
        problems = [of.problem_for(self.backend, asked) for asked in self._asked(part)]
        shapes: Iterable[Any] = [self._sizes.copied]
        if part == "bandwidth":
            shapes = [min(self._sizes.array, max(of.default_shapes(self.backend)))]
        plan = plan_of(
            of,
            dict(chosen),
            problems,
            shapes,
            seconds=_ROW_SECONDS,
            budget_seconds=self._seconds_left if part in ALONE else None,
            flush=part == "bandwidth",
        )
        return self._measured(part, plan, chosen)

    @property
    def _sizes(self) -> Sizes:
        return _OF_ACCELERATORS if self.backend.is_accelerator else _OF_HOSTS

    def _asked(self, part: str) -> list[dict[str, Any]]:
        if part == "bandwidth":
            return [{"pattern": name} for name in ("copy", "read")]
        return [{"direction": name} for name in (("to_peer",) if part == "peers" else ("to_device", "to_host"))]
