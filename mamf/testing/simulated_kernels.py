"""The kernels of the accelerator in virtual time."""

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

#: Relative error up to which a result is correct, if the problem has no tolerance.
_TOLERANCE = 1e-2


class Simulated(Kernel[ProblemT, ShapeT]):
    """A kernel for simulated devices only. Derived kernels supply ``run_of``; faults are by shape."""

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return None if isinstance(backend, SimulatedBackend) else Unavailable("it is simulated", "use SimulatedBackend")

    def run_of(self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT) -> Callable[[object], None]:
        """A launch, given a key that identifies the operand set."""
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
        run = self.run_of(backend, problem, shape)
        tolerance = getattr(problem, "tolerance", _TOLERANCE)
        ready = prepared(
            backend, shape, sets, tolerance, lambda index: partial(run, (shape, index, problem, self.name))
        )
        return replace(ready, rewrite_output=(lambda: None) if rewrite else None)


class SimulatedUnits(Simulated[ProblemT, ShapeT]):
    """Work at ``share`` of the peak of a simulated device's units."""

    share: ClassVar[float]

    def run_of(self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT) -> Callable[[object], None]:
        world = device.world
        cycles = problem.work(shape).amount / (world.compute_units * world.flop_per_cycle_per_unit * self.share)
        return partial(device.compute, cycles)


class SimulatedLink(Simulated[ProblemT, ShapeT]):
    """Transfers over a simulated device's link."""

    is_default = True

    def run_of(self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT) -> Callable[[object], None]:
        return partial(device.send, problem.work(shape).nbytes)


class SimulatedAttention(SimulatedUnits[AttentionProblem, AttentionShape], AttentionKernel):
    """Attention in virtual time."""

    name = "simulated-attention"
    dtypes = ("bfloat16", "float16")
    share: ClassVar[float] = 0.7


class SimulatedModel(SimulatedUnits[ModelProblem, ModelShape], ModelKernel):
    """A training step of a model in virtual time."""

    name = "simulated-model"
    share: ClassVar[float] = 0.5


class SimulatedCopies(SimulatedLink[CopyProblem, CopyShape], CopyKernel):
    """Copies in any direction."""

    name = "simulated-copies"


class SimulatedCollective(SimulatedLink[CollectiveProblem, CollectiveShape], CollectiveKernel):
    """At the bus bandwidth, whatever the other ranks do."""

    name = "simulated-collective"


class SimulatedBandwidth(Simulated[BandwidthProblem, BandwidthShape], BandwidthKernel):
    """Every pattern at the bandwidth of a simulated device's memory, whatever its cache."""

    name = "simulated-bandwidth"

    def run_of(
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
        return super().prepare(backend, problem, shape, pool, problem.sets(shape, sets), rewrite)


class SimulatedMatmul(Simulated[MatmulProblem, MatmulShape], MatmulKernel):
    """The product of a simulated device."""

    name = "simulated.mm"

    def unsupported(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.dtype == "int8" or problem.out_dtype == "int32":
            return "the simulated device multiplies no integers"
        return None

    def run_of(self, device: SimulatedBackend, problem: MatmulProblem, shape: MatmulShape) -> Callable[[object], None]:
        costs = problem.data != "zeros"
        return partial(device.compute, device.cycles(shape) * (1 + costs * device.world.data_cost))


def prepared(
    device: SimulatedBackend, shape: object, sets: int, tolerance: float, run_of: Callable[[int], Callable[[], None]]
) -> Prepared:
    """Launches that run on the device, ``run_of`` an operand set, whose outputs are correct if they ran after the last
    poisoning, unless the device has a fault for the shape.
    """
    device.begin_visit()
    written: set[int] = set()
    # A separate generator: what else is random stays as it is without it.
    wrong, flipped = random.Random(f"{device.fault_seed} {device.launches}"), [False]
    spoiled = _tiles_of_unit(device.world, shape)

    def launch_of(index: int) -> Callable[[], None]:
        run = run_of(index)

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

    launches = [launch_of(index) for index in range(sets)]

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


def _tiles_of_unit(world: Physics, shape: object) -> WrongCells:
    # The cells that the faulty unit computes; none without one.
    if not isinstance(shape, MatmulShape):
        return WrongCells(frozenset(), 1, 1, 1)
    down, across, wide = -(-shape.m // CELL), -(-shape.n // CELL), -(-shape.n // (4 * CELL))
    own = (
        (0, row, column)
        for tile in range(-(-down // 2) * wide)[world.faulty_unit :: world.compute_units]
        for row in range(tile // wide * 2, min(tile // wide * 2 + 2, down))
        for column in range(tile % wide * 4, min(tile % wide * 4 + 4, across))
    )
    return WrongCells(frozenset() if world.faulty_unit is None else frozenset(own), shape.m, shape.n, shape.m * shape.n)
