"""Simulate the launches and results of kernels on the simulated device, which runs in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import CELL_SIZE, ComparisonFunction, Kernel, Prepared, ProblemT, ShapeT, Verdict, WrongCells
from mamf.operations.attention.operation import AttentionKernel, AttentionProblem, AttentionShape
from mamf.operations.bandwidth.operation import BandwidthKernel, BandwidthProblem, BandwidthShape
from mamf.operations.collective import CollectiveKernel, CollectiveProblem, CollectiveShape
from mamf.operations.copies import CopyKernel, CopyProblem, CopyShape
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem, MatmulShape
from mamf.operations.model.operation import ModelKernel, ModelProblem, ModelShape
from mamf.testing.simulated import Physics, SimulatedBackend

# Maximum relative error of a correct result, for a problem that defines no tolerance.
_DEFAULT_TOLERANCE = 1e-2


class SimulatedKernel(Kernel[ProblemT, ShapeT]):
    """A kernel that runs on simulated devices only, and computes at ``share`` of the device's peak rate.

    Tests set ``SimulatedBackend.faults`` to make a kernel fail or return wrong results for some shapes.
    """

    share: ClassVar[float] = 1.0

    def explain_unavailability(self, backend: Backend) -> Unavailable | None:
        return None if isinstance(backend, SimulatedBackend) else Unavailable("it is simulated", "use SimulatedBackend")

    def launch_function(self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT) -> Callable[[object], None]:
        """Return a function that simulates one launch. The function takes a key that identifies the operand set."""
        peak = device.world.compute_units * device.world.flop_per_cycle_per_unit
        return partial(device.compute, problem.compute_work(shape).amount / (peak * self.share))

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
        for name, buffer in problem.list_buffers(shape, sets, rewrite).items():
            pool.take_buffer(name, *buffer)
        run = self.launch_function(backend, problem, shape)
        prepared = make_prepared(
            backend,
            shape,
            sets,
            getattr(problem, "tolerance", _DEFAULT_TOLERANCE),
            lambda index: partial(run, (shape, index, problem, self.name)),
        )
        return replace(prepared, rewrite_output=(lambda: None) if rewrite else None)


class SimulatedLinkKernel(SimulatedKernel[ProblemT, ShapeT]):
    """A kernel that transfers data between devices, at the bandwidth of the link of the simulated device."""

    is_default = True

    def launch_function(self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT) -> Callable[[object], None]:
        return partial(device.send, problem.compute_work(shape).nbytes)


class SimulatedAttention(SimulatedKernel[AttentionProblem, AttentionShape], AttentionKernel):
    """A simulated attention kernel that runs at 70 % of the peak rate."""

    name = "simulated-attention"
    dtypes = ("bfloat16", "float16")
    share: ClassVar[float] = 0.7


class SimulatedModel(SimulatedKernel[ModelProblem, ModelShape], ModelKernel):
    """A simulated training step of a model that runs at 50 % of the peak rate."""

    name = "simulated-model"
    share: ClassVar[float] = 0.5


class SimulatedCopies(SimulatedLinkKernel[CopyProblem, CopyShape], CopyKernel):
    """A simulated kernel for copies in any direction, at the bandwidth of the link."""

    name = "simulated-copies"


class SimulatedCollective(SimulatedLinkKernel[CollectiveProblem, CollectiveShape], CollectiveKernel):
    """A simulated kernel for collectives such as all-reduce, at the bandwidth of the link. It does not wait for other
    ranks.
    """

    name = "simulated-collective"


class SimulatedBandwidth(SimulatedKernel[BandwidthProblem, BandwidthShape], BandwidthKernel):
    """A simulated kernel for bandwidth patterns such as copy, at the bandwidth of the memory or the cache of the
    device.
    """

    name = "simulated-bandwidth"

    def launch_function(
        self, device: SimulatedBackend, problem: BandwidthProblem, shape: BandwidthShape
    ) -> Callable[[object], None]:
        return partial(device.move, problem.compute_work(shape).nbytes)

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
    """A simulated matmul kernel, whose time depends on the clock, tiles and power of the device."""

    name = "simulated.mm"

    def explain_unsupported_problem(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.dtype == "int8" or problem.out_dtype == "int32":
            return "the simulated device does not support matmuls of integers"
        return None

    def launch_function(
        self, device: SimulatedBackend, problem: MatmulProblem, shape: MatmulShape
    ) -> Callable[[object], None]:
        data_cost = 0.0 if problem.data == "zeros" else device.world.data_cost
        return partial(device.compute, device.count_cycles(shape) * (1 + data_cost))


def make_prepared(
    device: SimulatedBackend,
    shape: object,
    sets: int,
    tolerance: float,
    launch_function: Callable[[int], Callable[[], None]],
) -> Prepared:
    """Make the launches of a simulated kernel for ``sets`` operand sets, with functions that verify their outputs.

    - ``tolerance``: the maximum relative error of a correct output.
    - ``launch_function``: returns the launch for the index of an operand set.

    An output is correct if its launch ran after the output was last poisoned (overwritten with invalid values) and the
    device has no fault for the shape.
    """
    device.begin_visit()
    written_outputs: set[int] = set()
    # Use a separate random generator for flipped bits, so that other random values do not depend on them.
    flip_random, is_last_output_flipped = random.Random(f"{device.fault_seed} {device.launches}"), [False]
    faulty_cells = _find_cells_of_faulty_unit(device.world, shape)

    def make_launch(index: int) -> Callable[[], None]:
        run = launch_function(index)

        def launch() -> None:
            run()
            written_outputs.add(index)
            is_last_output_flipped[0] = flip_random.random() < device.world.flips

        return launch

    def verify(index: int, result: object) -> Verdict:
        fault = device.faults.get(shape)
        if isinstance(fault, Exception):
            raise fault
        device.synchronize()
        is_wrong = fault == "wrong_result" or index not in written_outputs or bool(faulty_cells.cells)
        return Verdict(1.0 if is_wrong else 1e-3, tolerance)

    def checksum(index: int, result: object) -> Callable[[], int]:
        return partial(int, is_last_output_flipped[0])

    def remember(index: int, result: object) -> ComparisonFunction:
        was_flipped = is_last_output_flipped[0]

        def compare(later: object) -> Callable[[], WrongCells]:
            wrong_cells = frozenset({(0, 0, 0)}) if is_last_output_flipped[0] != was_flipped else frozenset()
            return lambda: replace(faulty_cells, cells=wrong_cells)

        return compare

    return Prepared(
        [make_launch(index) for index in range(sets)],
        verify,
        lambda returned: written_outputs.clear(),
        queue_checksum=checksum,
        remember_output=remember,
        is_deterministic=True,
        locate_wrong_cells=lambda index, result: faulty_cells,
    )


def _find_cells_of_faulty_unit(world: Physics, shape: object) -> WrongCells:
    """Return which cells (blocks) of the output of a matmul the faulty compute unit computes. Returns no cells if no
    unit is faulty.
    """
    if not isinstance(shape, MatmulShape):
        return WrongCells(frozenset(), 1, 1, 1)
    down, across, wide = -(-shape.m // CELL_SIZE), -(-shape.n // CELL_SIZE), -(-shape.n // (4 * CELL_SIZE))
    cells = (
        (0, row, column)
        for tile in range(-(-down // 2) * wide)[world.faulty_unit :: world.compute_units]
        for row in range(tile // wide * 2, min(tile // wide * 2 + 2, down))
        for column in range(tile % wide * 4, min(tile % wide * 4 + 4, across))
    )
    return WrongCells(
        frozenset() if world.faulty_unit is None else frozenset(cells), shape.m, shape.n, shape.m * shape.n
    )
