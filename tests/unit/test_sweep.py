"""Test sweeps: the order of shapes, failures, implausible rows, budgets, reference visits and time estimates."""

import dataclasses

import pytest
from made_plans import setup_of, sweep_plan

from mamf.engine.estimate import estimate_run_seconds, measure_matmul_flops
from mamf.engine.strategies.rows import OneKernelStrategy, RowsStrategy, compute_largest_buffers
from mamf.errors import UnsupportedError
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape, matmul_grid
from mamf.plugins.discovery import open_backend
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul
from mamf.testing.simulated import SimulatedSensors

GRID = tuple(matmul_grid([1024, 2048, 4096], [2048], [1024, 4096]))


def make_plan(shapes=GRID, **fields):
    return sweep_plan(tuple(shapes), MatmulProblem(), **fields)


def make_strategy(backend, plan, rows=()):
    return OneKernelStrategy(setup_of(plan, [SimulatedMatmul()], backend, rows))


def run_sweep(backend, plan, rows=()):
    return list(make_strategy(backend, plan, rows).yield_results())


def list_shapes(plan):
    return [shape for _, _, shape, _ in plan.list_row_keys()]


def test_the_order_is_shuffled_by_the_seed_and_repeats():
    orders = [list_shapes(sweep_plan(GRID, MatmulProblem(seed=seed))) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(GRID)
    assert list_shapes(make_plan(order="given")) == list(GRID)


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("wrong_result", "wrong_result", "relative error"),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED\nlong trace"), "failed", "CUBLAS_STATUS_EXECUTION_FAILED"),
        (UnsupportedError("needs K to be a multiple of 16"), "unsupported", "multiple of 16"),
        (MemoryError("workspace"), "failed", "workspace"),
    ],
)
def test_a_fault_is_the_status_of_its_shape_and_the_run_goes_on(backend, fault, status, reason):
    backend.faults[GRID[2]] = fault
    rows = {row.shape: row for row in run_sweep(backend, make_plan())}
    assert rows[GRID[2]].status == status
    assert reason in rows[GRID[2]].reason
    assert "\n" not in rows[GRID[2]].reason
    assert all(row.ok for shape, row in rows.items() if shape != GRID[2])


def test_operands_are_reserved_for_the_largest_shape_that_fits():
    plan = make_plan([MatmulShape(1024, 1024, 1024), MatmulShape(2048, 512, 512), MatmulShape(65536, 65536, 65536)])
    buffers = compute_largest_buffers(plan, 50 * 2**20, 10**9)
    assert buffers["a"].element_count == 2048 * 512
    assert buffers["b"].element_count == 1024 * 1024
    assert sum(buffer.nbytes for buffer in buffers.values()) < 10**9


def test_impossible_samples_are_left_out_and_counted():
    backend = SimulatedBackend(physics=dataclasses.replace(Physics(), intervals_per_glitch=12))
    rows = run_sweep(backend, make_plan())
    assert sum(len(row.implausible_samples) for row in rows) >= len(rows)
    for row in rows:
        assert row.ok
        assert row.compute_rate("fastest") < 1070


class UnderreportingSensors(SimulatedSensors):
    """Sensors that report only ``share`` of the actual clock. Rates then look too high for the clock, as they do with a
    timer that reports too short times.
    """

    share = 1.0

    def read(self, energy=False):
        reading = super().read(energy)
        return dataclasses.replace(reading, clock_hz=reading.clock_hz * self.share)


@pytest.mark.parametrize(("share", "status"), [(1.0, "ok"), (0.8, "ok"), (0.6, "implausible")])
def test_a_row_is_bounded_by_the_clock_that_was_read_during_it(share, status):
    backend = SimulatedBackend()
    backend.telemetry = UnderreportingSensors(backend)
    backend.telemetry.share = share
    rows = run_sweep(backend, make_plan([MatmulShape(8192, 8192, 8192)]))
    assert {row.status for row in rows} == {status}
    assert status == "ok" or "that the measured clock of" in rows[0].reason


def test_a_budget_that_ends_while_the_run_prepares_still_gives_a_row(backend):
    strategy = make_strategy(backend, make_plan(GRID[:2], budget_seconds=1e-9))
    (row,) = strategy.yield_results()
    assert (row.ok, strategy.skipped_step_count) == (True, 1)


class SlowToPrepare(SimulatedMatmul):
    """A kernel whose operands take 1 s per 100 MB to prepare."""

    def prepare(self, backend, problem, shape, *arguments, **keywords):
        backend.sleep(problem.compute_work(shape).nbytes / 1e8)
        return super().prepare(backend, problem, shape, *arguments, **keywords)


@pytest.mark.parametrize("is_accelerator", [False, True])
def test_a_row_on_a_cpu_that_takes_too_long_to_prepare_is_not_begun(monkeypatch, is_accelerator):
    monkeypatch.setattr(SimulatedBackend, "is_accelerator", is_accelerator)
    shapes = [MatmulShape(4096, 4096, size) for size in (4096, 8192, 131072)]  # 1, 1.7 and 22 s to prepare
    plan = make_plan(shapes, order="given", budget_seconds=15.0)
    backend = SimulatedBackend()
    strategy = OneKernelStrategy(setup_of(plan, [SlowToPrepare()], backend, ()))
    assert [row.shape for row in strategy.yield_results()] == shapes[:2]
    assert (strategy.skipped_step_count, backend.now() > 18.0) == (1, is_accelerator)


class SecondMatmul(SimulatedMatmul):
    name = "second"


def test_a_run_with_a_budget_measures_a_kernel_for_all_problems_before_the_next_kernel(backend):
    plan = make_plan(GRID[:2], budget_seconds=100.0)
    kernels = [SimulatedMatmul(), SecondMatmul()]
    problems = (MatmulProblem("bfloat16"), MatmulProblem("float16"))
    plan = dataclasses.replace(plan, problems=problems, kernels=tuple(kernel.name for kernel in kernels))
    rows = list(RowsStrategy(setup_of(plan, kernels, backend, ())).yield_results())
    assert [row.problem.dtype for row in rows] == ["bfloat16", "float16"] * 4
    assert [row.kernel for row in rows] == [kernel.name for kernel in kernels for _ in problems] * 2


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_the_first_row_is_kept_even_if_it_exceeds_the_budget(regime):
    """Check that the first row is kept, because otherwise each resumed run would measure it again in vain."""
    slow = SimulatedBackend(physics=dataclasses.replace(Physics(), matmul_peak_share=1e-4))
    shapes = [MatmulShape(8192, 8192, 8192), MatmulShape(8192, 8192, 4096)]
    plan = make_plan(shapes, regimes=(regime,), budget_seconds=1.5, kernel="simulated.mm")
    strategy = make_strategy(slow, plan)
    (row,) = strategy.yield_results()
    assert row.ok and len(row.samples) >= 3
    assert strategy.skipped_step_count == 1
    (row_of_resumed_run,) = run_sweep(slow, plan, [row])
    assert row_of_resumed_run.ok and row_of_resumed_run.shape != row.shape


def test_a_reference_is_visited_again_and_again(backend):
    reference = MatmulShape(8192, 8192, 8192)
    rows = run_sweep(backend, make_plan(reference=reference, reference_every=2))
    assert [row.is_reference for row in rows] == [True, False, False] * 3
    rates = [row.compute_rate("median") for row in rows if row.is_reference]
    assert max(rates) / min(rates) < 1.005


def test_a_sweep_on_a_cpu_is_expected_to_use_the_time_limit_of_each_row():
    plan = make_plan([MatmulShape(size, 64, 64) for size in range(64, 704, 64)])
    cpu = open_backend("cpu")
    assert 10.0 <= estimate_run_seconds(plan, plan.list_row_keys(), cpu, flops=1e11) < 20.0
    limited_plan = dataclasses.replace(plan, seconds=0.1)
    assert 1.0 <= estimate_run_seconds(limited_plan, plan.list_row_keys(), cpu, flops=1e11) < 10.0


@pytest.mark.parametrize("regime", ["burst", "sustained", "classic"])
def test_the_estimate_is_near_the_truth(regime):
    backend = SimulatedBackend()
    shapes = matmul_grid(range(1024, 8192, 1024), [16384], [16384])
    plan = make_plan(shapes, regimes=(regime,))
    estimate = estimate_run_seconds(
        plan, plan.list_row_keys(), backend, measure_matmul_flops(SimulatedMatmul(), plan.problem, backend)
    )
    start = backend.now()
    run_sweep(backend, plan)
    assert 0.3 < estimate / (backend.now() - start) < 3
