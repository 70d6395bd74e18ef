"""Simulate kernels of all operations on the simulated device, which runs in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.kernel import CELL_SIZE, ComparisonFunction, Kernel, PreparedKernel, ProblemT, ShapeT, Verdict, WrongCells
from mamf.operations.attention.operation import AttentionKernel, AttentionProblem, AttentionShape
from mamf.operations.bandwidth.operation import BandwidthKernel, BandwidthProblem, BandwidthShape
from mamf.operations.collective import CollectiveKernel, CollectiveProblem, CollectiveShape
from mamf.operations.copies import CopyKernel, CopyProblem, CopyShape
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem, MatmulShape
from mamf.operations.model.operation import ModelKernel, ModelProblem, ModelShape
from mamf.testing.simulated import Physics, SimulatedBackend

# Maximum relative error of a correct result for problems that do not define a tolerance.
_DEFAULT_TOLERANCE = 1e-2


class SimulatedKernel(Kernel[ProblemT, ShapeT]):
    """A kernel that runs only on simulated devices.

    ``peak_share``: the rate of the kernel as a share of the device's peak rate. To simulate errors or wrong results for
    some shapes, set ``SimulatedBackend.faults``.
    """

    peak_share: ClassVar[float] = 1.0

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return (
            None
            if isinstance(backend, SimulatedBackend)
            else Unavailability("this kernel runs only on simulated devices", "use SimulatedBackend")
        )

    def make_launch_function(
        self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT
    ) -> Callable[[object], None]:
        """Return a function that simulates one launch. Its argument is a key that identifies the operand set."""
        peak_flop_per_cycle = device.device_physics.compute_units * device.device_physics.flop_per_cycle_per_unit
        return partial(
            device.launch_compute, problem.compute_work(shape).amount / (peak_flop_per_cycle * self.peak_share)
        )

    def prepare(
        self,
        backend: Backend,
        problem: ProblemT,
        shape: ShapeT,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        assert isinstance(backend, SimulatedBackend)
        for name, buffer in problem.list_buffers(shape, sets, rewrite).items():
            pool.take_buffer(name, *buffer)
        simulate_launch = self.make_launch_function(backend, problem, shape)
        prepared = prepare_simulated_launches(
            backend,
            shape,
            sets,
            getattr(problem, "tolerance", _DEFAULT_TOLERANCE),
            lambda index: partial(simulate_launch, (shape, index, problem, self.name)),
        )
        return replace(prepared, rewrite_output=(lambda: None) if rewrite else None)


class SimulatedLinkKernel(SimulatedKernel[ProblemT, ShapeT]):
    """A kernel that transfers data between devices, at the bandwidth of the link of the simulated device."""

    is_default = True

    def make_launch_function(
        self, device: SimulatedBackend, problem: ProblemT, shape: ShapeT
    ) -> Callable[[object], None]:
        return partial(device.launch_link_transfer, problem.compute_work(shape).nbytes)


class SimulatedAttention(SimulatedKernel[AttentionProblem, AttentionShape], AttentionKernel):
    """A simulated attention kernel that runs at 70 % of the peak rate."""

    name = "simulated-attention"
    dtypes = ("bfloat16", "float16")
    peak_share: ClassVar[float] = 0.7


class SimulatedModel(SimulatedKernel[ModelProblem, ModelShape], ModelKernel):
    """A simulated training step of a model that runs at 50 % of the peak rate."""

    name = "simulated-model"
    peak_share: ClassVar[float] = 0.5


class SimulatedCopies(SimulatedLinkKernel[CopyProblem, CopyShape], CopyKernel):
    """A simulated kernel for copies in any direction, at the bandwidth of the link."""

    name = "simulated-copies"


class SimulatedCollective(SimulatedLinkKernel[CollectiveProblem, CollectiveShape], CollectiveKernel):
    """A simulated kernel for collectives such as all-reduce, at the bandwidth of the link. It does not wait for other
    ranks.
    """

    name = "simulated-collective"


class SimulatedBandwidth(SimulatedKernel[BandwidthProblem, BandwidthShape], BandwidthKernel):
    """A simulated kernel that copies or reads at the bandwidth of the device's memory or cache."""

    name = "simulated-bandwidth"

    def make_launch_function(
        self, device: SimulatedBackend, problem: BandwidthProblem, shape: BandwidthShape
    ) -> Callable[[object], None]:
        return partial(device.launch_memory_transfer, problem.compute_work(shape).nbytes)

    def prepare(
        self,
        backend: Backend,
        problem: BandwidthProblem,
        shape: BandwidthShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        return super().prepare(backend, problem, shape, pool, problem.limit_operand_set_count(shape, sets), rewrite)


class SimulatedMatmul(SimulatedKernel[MatmulProblem, MatmulShape], MatmulKernel):
    """A simulated matmul kernel, whose time depends on the clock, tiles and power of the device."""

    name = "simulated.mm"

    def explain_unsupported_problem(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.dtype == "int8" or problem.out_dtype == "int32":
            return "the simulated device does not support matmuls of integers; use bfloat16"
        return None

    def make_launch_function(
        self, device: SimulatedBackend, problem: MatmulProblem, shape: MatmulShape
    ) -> Callable[[object], None]:
        slowdown = 0.0 if problem.data == "zeros" else device.device_physics.nonzero_data_slowdown
        return partial(device.launch_compute, device.compute_matmul_cycles(shape) * (1 + slowdown))


def prepare_simulated_launches(
    device: SimulatedBackend,
    shape: object,
    sets: int,
    tolerance: float,
    make_launch: Callable[[int], Callable[[], None]],
) -> PreparedKernel:
    """Make the launches of a simulated kernel for ``sets`` operand sets, and the functions that verify their outputs.

    - ``tolerance``: the maximum relative error of a correct output.
    - ``make_launch``: makes the function that simulates a launch, from the index of its operand set.

    An output is correct if the device has neither a fault for the shape nor a faulty compute unit, and if a launch has
    written the output since mamf last filled it with invalid values.
    """
    device.draw_visit_variation()
    written_outputs: set[int] = set()
    # Use a separate random generator for flipped bits, so that other random values do not change if bits flip.
    flip_random, is_last_output_flipped = random.Random(f"{device.fault_seed} {device.launch_count}"), [False]
    faulty_cells = _find_cells_of_faulty_unit(device.device_physics, shape)

    def make_recorded_launch(index: int) -> Callable[[], None]:
        simulate_launch = make_launch(index)

        def launch() -> None:
            simulate_launch()
            written_outputs.add(index)
            is_last_output_flipped[0] = flip_random.random() < device.device_physics.bit_flip_probability

        return launch

    def verify(index: int, result: object) -> Verdict:
        fault = device.faults.get(shape)
        if isinstance(fault, Exception):
            raise fault
        device.synchronize()
        is_wrong = fault == "wrong_result" or index not in written_outputs or bool(faulty_cells.cells)
        return Verdict(1.0 if is_wrong else 1e-3, tolerance)

    def queue_checksum(index: int, result: object) -> Callable[[], int]:
        return partial(int, is_last_output_flipped[0])

    def remember_output(index: int, result: object) -> ComparisonFunction:
        was_flipped = is_last_output_flipped[0]

        def compare_with_output(later_result: object) -> Callable[[], WrongCells]:
            wrong_cells = frozenset({(0, 0, 0)}) if is_last_output_flipped[0] != was_flipped else frozenset()
            return lambda: replace(faulty_cells, cells=wrong_cells)

        return compare_with_output

    return PreparedKernel(
        [make_recorded_launch(index) for index in range(sets)],
        verify,
        lambda returned: written_outputs.clear(),
        queue_checksum=queue_checksum,
        remember_output=remember_output,
        is_deterministic=True,
        locate_wrong_cells=lambda index, result: faulty_cells,
    )


def _find_cells_of_faulty_unit(physics: Physics, shape: object) -> WrongCells:
    """Return the cells (square blocks) of a matmul's output that the faulty compute unit computes, or no cells if no
    unit is faulty.
    """
    if not isinstance(shape, MatmulShape):
        return WrongCells(frozenset(), 1, 1, 1)
    cell_rows, cell_columns, tile_columns = (
        -(-shape.m // CELL_SIZE),
        -(-shape.n // CELL_SIZE),
        -(-shape.n // (4 * CELL_SIZE)),
    )
    cells = (
        (0, row, column)
        for tile in range(-(-cell_rows // 2) * tile_columns)[physics.faulty_unit_index :: physics.compute_units]
        for row in range(tile // tile_columns * 2, min(tile // tile_columns * 2 + 2, cell_rows))
        for column in range(tile % tile_columns * 4, min(tile % tile_columns * 4 + 4, cell_columns))
    )
    return WrongCells(
        frozenset() if physics.faulty_unit_index is None else frozenset(cells), shape.m, shape.n, shape.m * shape.n
    )
