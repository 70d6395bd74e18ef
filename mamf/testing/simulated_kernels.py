"""Kernels for the simulated device, which runs in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import CELL, Compare, Kernel, Prepared, ProblemT, ShapeT, Verdict, WrongCells
from mamf.operations.attention.operation import AttentionKernel, AttentionProblem, AttentionShape
from mamf.operations.bandwidth.operation import BandwidthKernel, BandwidthProblem, BandwidthShape
from mamf.operations.collective import CollectiveKernel, CollectiveProblem, CollectiveShape
from mamf.operations.copies import CopyKernel, CopyProblem, CopyShape
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem, MatmulShape
from mamf.operations.model.operation import ModelKernel, ModelProblem, ModelShape
from mamf.testing.physics import Physics
from mamf.testing.simulated import SimulatedBackend

#: Maximum relative error of a correct result, if the problem has no tolerance.
_TOLERANCE = 1e-2


class SimulatedKernel(Kernel[ProblemT, ShapeT]):
    """A kernel that runs on simulated devices only. Derived classes define ``launch_function``.

    ``SimulatedBackend.faults`` makes it fail or return wrong results for chosen shapes.
    """

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return None if isinstance(backend, SimulatedBackend) else Unavailable("it is simulated", "use SimulatedBackend")

    def launch_function(self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT) -> Callable[[object], None]:
        """Return the function that runs one launch. It takes a key that identifies the operand set."""
        raise NotImplementedError

    def prepare(
        self,
        backend: Backend,
        problem: ProblemT,
        shape: ShapeT,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        assert isinstance(backend, SimulatedBackend)
        for name, buffer in problem.buffers(shape, sets, rewrite).items():
            pool.take(name, *buffer)
        run = self.launch_function(backend, problem, shape)
        tolerance = getattr(problem, "tolerance", _TOLERANCE)
        ready = make_prepared(
            backend, shape, sets, tolerance, lambda index: partial(run, (shape, index, problem, self.name))
        )
        return replace(ready, rewrite_output=(lambda: None) if rewrite else None)


class SimulatedUnitKernel(SimulatedKernel[ProblemT, ShapeT]):
    """A kernel that computes at the share ``share`` of the simulated device's peak."""

    share: ClassVar[float]

    def launch_function(self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT) -> Callable[[object], None]:
        world = device.world
        cycles = problem.work(shape).amount / (world.compute_units * world.flop_per_cycle_per_unit * self.share)
        return partial(device.compute, cycles)


class SimulatedLinkKernel(SimulatedKernel[ProblemT, ShapeT]):
    """A kernel that transfers data over the simulated device's link."""

    is_default = True

    def launch_function(self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT) -> Callable[[object], None]:
        return partial(device.send, problem.work(shape).nbytes)


class SimulatedAttention(SimulatedUnitKernel[AttentionProblem, AttentionShape], AttentionKernel):
    """Attention at 70 % of the peak."""

    name = "simulated-attention"
    dtypes = ("bfloat16", "float16")
    share: ClassVar[float] = 0.7


class SimulatedModel(SimulatedUnitKernel[ModelProblem, ModelShape], ModelKernel):
    """A training step of a model at 50 % of the peak."""

    name = "simulated-model"
    share: ClassVar[float] = 0.5


class SimulatedCopies(SimulatedLinkKernel[CopyProblem, CopyShape], CopyKernel):
    """Copies in any direction, at the speed of the link."""

    name = "simulated-copies"


class SimulatedCollective(SimulatedLinkKernel[CollectiveProblem, CollectiveShape], CollectiveKernel):
    """Collectives at the speed of the link, regardless of other ranks."""

    name = "simulated-collective"


class SimulatedBandwidth(SimulatedKernel[BandwidthProblem, BandwidthShape], BandwidthKernel):
    """Bandwidth patterns at the bandwidth of the simulated device's memory or cache."""

    name = "simulated-bandwidth"

    def launch_function(
        self, device: SimulatedBackend, problem: BandwidthProblem, shape: BandwidthShape
    ) -> Callable[[object], None]:
        return partial(device.move, problem.work(shape).nbytes)

    def prepare(
        self,
        backend: Backend,
        problem: BandwidthProblem,
        shape: BandwidthShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        return super().prepare(backend, problem, shape, pool, problem.limit_operand_sets(shape, sets), rewrite)


class SimulatedMatmul(SimulatedKernel[MatmulProblem, MatmulShape], MatmulKernel):
    """Matmul on a simulated device, with its clock, tiles and power."""

    name = "simulated.mm"

    def unsupported(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.dtype == "int8" or problem.out_dtype == "int32":
            return "the simulated device does not support matmuls of integers"
        return None

    def launch_function(
        self, device: SimulatedBackend, problem: MatmulProblem, shape: MatmulShape
    ) -> Callable[[object], None]:
        costs = problem.data != "zeros"
        return partial(device.compute, device.count_cycles(shape) * (1 + costs * device.world.data_cost))


def make_prepared(
    device: SimulatedBackend,
    shape: object,
    sets: int,
    tolerance: float,
    launch_function: Callable[[int], Callable[[], None]],
) -> Prepared:
    """Make launches for ``sets`` operand sets. ``launch_function``: returns the launch for an operand set's index.

    An output is correct if its launch ran after the output was last poisoned and the device has no fault for the shape.
    """
    device.begin_visit()
    written: set[int] = set()
    # Use a separate generator so that other random values do not change.
    wrong, flipped = random.Random(f"{device.fault_seed} {device.launches}"), [False]
    spoiled = _find_cells_of_unit(device.world, shape)

    def make_launch(index: int) -> Callable[[], None]:
        run = launch_function(index)

        def launch() -> None:
            run()
            written.add(index)
            flipped[0] = wrong.random() < device.world.flips

        return launch

    def verify(index: int, result: object) -> Verdict:
        fault = device.faults.get(shape)
        if isinstance(fault, Exception):
            raise fault
        device.synchronize()
        is_wrong = fault == "wrong_result" or index not in written or bool(spoiled.cells)
        return Verdict(1.0 if is_wrong else 1e-3, tolerance)

    def checksum(index: int, result: object) -> Callable[[], int]:
        is_wrong = flipped[0]
        return lambda: int(is_wrong)

    launches = [make_launch(index) for index in range(sets)]

    def remember(index: int, result: object) -> Compare:
        before = flipped[0]

        def compare(later: object) -> Callable[[], WrongCells]:
            places = frozenset({(0, 0, 0)}) if flipped[0] != before else frozenset()
            return lambda: replace(spoiled, cells=places)

        return compare

    return Prepared(
        launches,
        verify,
        lambda returned: written.clear(),
        checksum=checksum,
        remember=remember,
        repeats_bits=True,
        locate=lambda index, result: spoiled,
    )


def _find_cells_of_unit(world: Physics, shape: object) -> WrongCells:
    """Return the cells of the output that the faulty unit computes; none if no unit is faulty."""
    if not isinstance(shape, MatmulShape):
        return WrongCells(frozenset(), 1, 1, 1)
    down, across, wide = -(-shape.m // CELL), -(-shape.n // CELL), -(-shape.n // (4 * CELL))
    cells = (
        (0, row, column)
        for tile in range(-(-down // 2) * wide)[world.faulty_unit :: world.compute_units]
        for row in range(tile // wide * 2, min(tile // wide * 2 + 2, down))
        for column in range(tile % wide * 4, min(tile % wide * 4 + 4, across))
    )
    return WrongCells(
        frozenset() if world.faulty_unit is None else frozenset(cells), shape.m, shape.n, shape.m * shape.n
    )
