"""The kernels of the accelerator in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Prepared, Problem, Verdict
from mamf.operations.attention.kernel import AttentionKernel
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.operations.bandwidth.kernel import BandwidthKernel
from mamf.operations.bandwidth.shapes import BandwidthProblem, BandwidthShape
from mamf.operations.collective.kernel import CollectiveKernel
from mamf.operations.collective.shapes import CollectiveProblem, CollectiveShape
from mamf.operations.copies.kernel import CopyKernel
from mamf.operations.copies.shapes import CopyProblem, CopyShape
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.model.kernel import ModelKernel
from mamf.operations.model.shapes import ModelProblem, ModelShape
from mamf.testing.simulated import SimulatedBackend


class Simulated:
    """What runs on a simulated device alone."""

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return None if isinstance(backend, SimulatedBackend) else Unavailable("it is simulated", "use SimulatedBackend")


class SimulatedAttention(Simulated, AttentionKernel):
    """Attention at ``share`` of the peak of a simulated device's units; faults by shape, as for the product."""

    name = "simulated-attention"
    dtypes = ("bfloat16", "float16")
    share: ClassVar[float] = 0.7

    def prepare(
        self,
        backend: Backend,
        problem: AttentionProblem,
        shape: AttentionShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        assert isinstance(backend, SimulatedBackend)
        device, world = backend, backend.world
        for name, buffer in problem.buffers(shape, sets).items():
            pool.take(name, *buffer)
        cycles = problem.flop(shape) / (world.compute_units * world.flop_per_cycle_per_unit * self.share)

        return prepared(
            device, shape, sets, 1e-2, lambda index: partial(device.compute, cycles, (self.name, shape, index))
        )


class SimulatedBandwidth(Simulated, BandwidthKernel):
    """Every pattern at the bandwidth of a simulated device's memory, whatever its cache; faults by shape too."""

    name = "simulated-bandwidth"

    def prepare(
        self,
        backend: Backend,
        problem: BandwidthProblem,
        shape: BandwidthShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        assert isinstance(backend, SimulatedBackend)
        device, nbytes = backend, problem.work(shape).nbytes
        for name, buffer in problem.buffers(shape, sets, rewrite).items():
            pool.take(name, *buffer)
        launched = problem.sets(shape, sets)

        ready = prepared(
            device, shape, launched, 1e-2, lambda index: partial(device.move, nbytes, (problem, shape, index))
        )
        return replace(ready, rewrite_output=(lambda: None) if rewrite else None)


class SimulatedCopies(Simulated, CopyKernel):
    """Copies over a simulated device's link, to wherever."""

    name = "simulated-copies"
    is_default = True

    def prepare(
        self,
        backend: Backend,
        problem: CopyProblem,
        shape: CopyShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        return over_link(backend, problem, shape, sets)


class SimulatedCollective(Simulated, CollectiveKernel):
    """Collectives at the bus bandwidth of a simulated device's link, whatever the other ranks do."""

    name = "simulated-collective"
    is_default = True

    def prepare(
        self,
        backend: Backend,
        problem: CollectiveProblem,
        shape: CollectiveShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        return over_link(backend, problem, shape, sets)


def over_link(backend: Backend, problem: Problem, shape: object, sets: int) -> Prepared:
    assert isinstance(backend, SimulatedBackend)
    device, nbytes = backend, problem.work(shape).nbytes
    return prepared(device, shape, sets, 1e-2, lambda index: partial(device.send, nbytes, (problem, shape, index)))


class SimulatedModel(Simulated, ModelKernel):
    """A step at ``share`` of the peak of a simulated device's units; faults by shape too."""

    name = "simulated-model"
    share: ClassVar[float] = 0.5

    def prepare(
        self,
        backend: Backend,
        problem: ModelProblem,
        shape: ModelShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        assert isinstance(backend, SimulatedBackend)
        device, world = backend, backend.world
        cycles = problem.flop(shape) / (world.compute_units * world.flop_per_cycle_per_unit * self.share)

        return prepared(
            device, shape, sets, 1e-2, lambda index: partial(device.compute, cycles, (problem, shape, index))
        )


class SimulatedMatmul(Simulated, MatmulKernel):
    """The product of a simulated device."""

    name = "simulated.mm"

    def unsupported(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.dtype == "int8" or problem.out_dtype == "int32":
            return "the simulated device multiplies no integers"
        return None

    def prepare(
        self,
        backend: Backend,
        problem: MatmulProblem,
        shape: MatmulShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        assert isinstance(backend, SimulatedBackend)
        costs = problem.data != "zeros"
        device, cycles = backend, backend.cycles(shape) * (1 + costs * backend.world.data_cost)
        for name, buffer in problem.buffers(shape, sets, rewrite).items():
            pool.take(name, *buffer)

        ready = prepared(
            device, shape, sets, problem.tolerance, lambda index: partial(device.compute, cycles, (shape, index))
        )
        return replace(ready, rewrite_output=(lambda: None) if rewrite else None)


def prepared(
    device: SimulatedBackend, shape: object, sets: int, tolerance: float, run_of: Callable[[int], Callable[[], None]]
) -> Prepared:
    """Launches that run on the device, ``run_of`` an operand set, whose outputs are right once they ran and since they
    were poisoned last, but for the fault that the device has for the shape.
    """
    device.begin_visit()
    written: set[int] = set()

    def launch_of(index: int) -> Callable[[], None]:
        run = run_of(index)

        def launch() -> None:
            run()
            written.add(index)

        return launch

    def verify(index: int, result: object) -> Verdict:
        fault = device.faults.get(shape)
        if isinstance(fault, Exception):
            raise fault
        device.synchronize()
        is_wrong = fault == "wrong_result" or index not in written
        return Verdict(1.0 if is_wrong else 1e-3, tolerance)

    def checksum(index: int, result: object) -> Callable[[], int]:
        every = device.world.wrong_every
        is_wrong = bool(every) and device.launches % every == 0
        return lambda: int(is_wrong)

    launches = [launch_of(index) for index in range(sets)]
    return Prepared(launches, verify, lambda returned: written.clear(), checksum=checksum)
