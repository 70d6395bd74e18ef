"""Measures one device, part by part, each with a separate log that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mamf.backend import MIB, Backend, DeviceInfo
from mamf.ceilings.search_plan import SearchPlan
from mamf.engine.repeating import Repeating
from mamf.engine.search.finding import Find
from mamf.engine.search.grid import plan_for
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.engine.strategies.verify import VerifySweep, kernels_to_verify, verify_plan
from mamf.errors import UnavailableError
from mamf.kinds.registry import kind_of
from mamf.logs.comparability import require_device_of_log
from mamf.logs.recording import Recording, apply_traits
from mamf.logs.records import ceiling_record
from mamf.logs.run_log import RunLog, read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Measurement
from mamf.node.logs import ALONE, TOGETHER, VERIFIED, has_begun, log_path
from mamf.operations.bandwidth.shapes import BandwidthShape
from mamf.operations.collective.operation import COLLECTIVES
from mamf.operations.copies.operation import CopyShape
from mamf.operations.matmul.kernel import MatmulKernel
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.selection import kernels_for
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plans import MATMUL, NODE_BUDGET_SECONDS, SWEEP, Plan
from mamf.plugins.discovery import operation
from mamf.plugins.selection import choose_kernels
from mamf.report.ceilings import find_summary_record

# Seconds per row of bandwidth, copies and collectives.
_ROW_SECONDS = 0.3
# Peer copies are measured in so many turns.
_TURNS = 3
#: Called with the current activity, at least once per row: a silent device counts as hanging.
OnProgress = Callable[[str], None]
#: The log to resume and its writer, if any.
Before = tuple[RunLog, RunLogWriter] | None


class Sizes(NamedTuple):
    """Shapes: of the repeated product, of the largest bandwidth arrays, and of copies."""

    repeated: MatmulShape
    array: BandwidthShape
    copied: CopyShape


_OF_ACCELERATORS = Sizes(MatmulShape(4096, 4096, 4096), BandwidthShape(1024 * MIB), CopyShape(256 * MIB))
# A CPU takes as long for these.
_OF_HOSTS = Sizes(MatmulShape(256, 256, 256), BandwidthShape(64 * MIB), CopyShape(16 * MIB))


@dataclass
class DeviceRun:
    """One device of a node. ``devices``: how many measure together. ``agree``: makes a decision common to all of them.
    Raises MamfError if the device cannot continue.
    """

    backend: Backend
    folder: Path
    devices: int = 1
    dtype: str | None = None
    kernels: Sequence[str] | None = None
    find_seconds: float | None = None
    verify_seconds: float | None = None
    on_progress: OnProgress = lambda text: None
    agree: Callable[[float], float] = lambda own: own
    #: Returns when all devices have called it.
    meet: Callable[[], None] = lambda: None

    def alone(self) -> None:
        """Measure the parts that need no other device."""
        for part in (*ALONE, VERIFIED) if self.verify_seconds else ALONE:
            path = log_path(self.folder, self.backend.index, part)
            log = read_run_log(path) if path.is_file() and has_begun(path) else None
            if log is None or log.tier != "complete":
                self._part(part)
            else:
                self._require_own(log)

    def together(self) -> None:
        """Measure the parts that all devices run at the same time; always anew, since their logs may differ."""
        for turn in range(_TURNS):
            if turn == self._turn:
                self._part("peers")
            self.meet()
        self._part("collective")

    @property
    def _turn(self) -> int:
        """Copies of two neighbours in a ring hold each other back, unevenly: even devices copy, then odd ones, then the
        last of an odd number, whose neighbours are one of each.
        """
        index, count = self.backend.index, self.backend.device_count()
        return 2 if count % 2 and index == count - 1 else index % 2

    def _part(self, part: str) -> None:
        self.on_progress(part)
        path = log_path(self.folder, self.backend.index, part)
        try:
            if not has_begun(path):
                path.unlink(missing_ok=True)
                self._measured(part, path, None)
                return
            log, writer = RunLogWriter.resume(path)
            with writer:
                self._require_own(log)
                apply_traits(self.backend, log.header.get("traits", {}))
                self._measured(part, path, (log, writer))
        except UnavailableError as error:  # no kernel for this part: the verdict reports it as missing
            self.on_progress(f"{part}: {error}")

    def _require_own(self, log: RunLog) -> None:
        require_device_of_log(log, DeviceInfo(**log.header["device"]), self.backend.info)

    def _measured(self, part: str, path: Path, before: Before) -> None:
        with closing(self._rows_of(part, path, before)) as running:  # if interrupted, the log says so
            for row in running:
                self.on_progress(f"{part} {row.phase or row.shape}")

    def _rows_of(self, part: str, path: Path, before: Before) -> Any:
        products = {"find": self._find, "repeated": self._repeated, VERIFIED: self._verify}
        if part in products:
            return products[part](path, before)
        return self._kernels(part if part in ("bandwidth", "collective") else "copies", part, path, before)

    # -- the parts ---------------------------------------------------------------------------------------------------

    def _find(self, path: Path, before: Before) -> Iterator[Measurement]:
        plan, kernels = self._find_plan(before and before[0])
        find = Find(plan, kernels, self.backend, before[0].lasting if before else (), self._phase)
        return Recording(path, self.backend, kernels[0].name, plan.as_plan(), before).record(
            find.results(),
            lambda rows, end: find_summary_record(rows, find.confirmed_by(rows), end),
            lambda: [("ceiling", ceiling_record(each)) for each in find.ceilings.values()],
            left=lambda: len(set(plan.regimes) - find.ceilings.keys()),
        )

    def _find_plan(self, log: RunLog | None) -> tuple[SearchPlan, list[MatmulKernel]]:
        if log is not None:
            search = log.plan.searches[0]
            return search, kernels_for(self.backend, search.problem, search.kernels)
        problem = problem_for(self.backend, self.dtype)
        seconds = self.find_seconds or NODE_BUDGET_SECONDS
        return plan_for(self.backend, problem, self.kernels, budget_seconds=seconds, is_quick=True)

    def _repeated(self, path: Path, before: Before) -> Iterator[Measurement]:
        problem = problem_for(self.backend, self.dtype)
        kernel = kernels_for(self.backend, problem, self.kernels)[0]
        shape = self._sizes.repeated
        plan = Plan(SWEEP, MATMUL, (problem,), (kernel.name,), (shape,), ("sustained",))

        def rows() -> Iterator[Measurement]:
            pool = self.backend.operand_pool(problem.data, problem.seed)
            yield Repeating(
                kernel,
                problem,
                shape,
                self.backend,
                on_progress=lambda _: self._phase("repeated"),
                most_seconds=self.find_seconds or NODE_BUDGET_SECONDS,
            ).row(pool)
            pool.release()

        recording = Recording(path, self.backend, kernel.name, plan, before)
        return recording.record(rows(), lambda taken, end: kind_of(plan).summary(plan, taken, {}, end))

    def _verify(self, path: Path, before: Before) -> Iterator[Measurement]:
        log = before and before[0]
        kernels = kernels_to_verify(self.backend, log.plan.kernels if log else None)
        plan = log.plan if log else verify_plan(self.backend, kernels, self.verify_seconds)
        sweep = VerifySweep(plan, [*kernels.values()], self.backend, log.lasting if log else (), self._phase)
        recording = Recording(path, self.backend, " ".join(plan.kernels), plan, before)
        return recording.record(sweep.results(), lambda rows, end: kind_of(plan).summary(plan, rows, {}, end))

    def _kernels(self, of: str, part: str, path: Path, before: Before) -> Iterator[Measurement]:
        kernels, plan = self._kernels_plan(of, part)
        kept = before[0].lasting if before and part not in TOGETHER else []
        held = {(row.regime, row.problem, row.shape, row.kernel) for row in kept}
        agree = self.agree if part == "collective" else lambda own: own
        sweep = KernelsSweep(plan, kernels, self.backend, held=held, on_phase=self._phase, agree=agree)
        return Recording(path, self.backend, " ".join(plan.kernels), plan, before).record(
            sweep.results(),
            lambda rows, end: kind_of(plan).summary(plan, rows, {}, end),
            left=lambda: sweep.left_out,
        )

    def _kernels_plan(self, of: str, part: str) -> tuple[list[MatmulKernel], Plan]:
        found = operation(of)
        available = choose_kernels(found, self.backend)
        chosen = [(name, kernel) for name, kernel in available if kernel.is_default] or available
        problems = [found.problem_for(self.backend, asked) for asked in self._asked(part)]
        shapes: Iterable[Any] = [self._sizes.copied]
        if part == "bandwidth":
            shapes = [min(self._sizes.array, max(found.default_shapes(self.backend)))]
        elif part == "collective":
            shapes = found.default_shapes(self.backend)
        names, kernels = zip(*chosen, strict=True)
        # Ranks begin together, and NCCL's own tests flush no cache.
        return list(kernels), Plan(
            SWEEP, of, tuple(problems), tuple(names), tuple(shapes), seconds=_ROW_SECONDS, flush=part == "bandwidth"
        )

    @property
    def _sizes(self) -> Sizes:
        return _OF_ACCELERATORS if self.backend.is_accelerator else _OF_HOSTS

    def _asked(self, part: str) -> list[dict[str, Any]]:
        if part == "bandwidth":
            return [{"pattern": name} for name in ("copy", "read")]
        if part == "collective":
            return [{"collective": name, "ranks": self.devices} for name in COLLECTIVES]
        return [{"direction": name} for name in (("to_peer",) if part == "peers" else ("to_device", "to_host"))]

    def _phase(self, text: str) -> None:
        self.on_progress(text)
