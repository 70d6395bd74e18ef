"""Provide pytest suites that authors of plugins run on their backends, kernels and operations.

The suites test whether a plugin behaves as mamf expects. To use a suite, derive a class from it and define the fixtures
that its docstring names. The class inherits all tests.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mamf.backend import Backend, Telemetry, Unavailability, add_sharing_to_name, parse_sharing_ways
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.engine.regimes.base import CheckedKernel
from mamf.errors import MamfError, UsageError
from mamf.kernel import AnyKernel
from mamf.logs.records import make_measurement_record, read_measurement_record
from mamf.measurement import Measurement
from mamf.operation import Operation
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulKernel, MatmulProblem, MatmulShape
from mamf.plugins.contracts import check_attribute, wrap_method_with_checks


class BackendContract:
    """The tests that every backend must pass. Define the fixture ``backend``, an open device."""

    #: The error that the vendor's library raises if it runs out of device memory.
    out_of_memory: BaseException = MemoryError("out of memory")

    def test_attributes_and_return_values_meet_the_contract(self, backend: Backend) -> None:
        label = f"backend {backend.name}"
        for name in ("info", "telemetry", "burst_traits", "sustained_traits", "environment_variables"):
            check_attribute(backend, Backend, name, label)
        for name in (
            "read_free_memory_bytes",
            "read_allocated_memory_bytes",
            "read_peak_memory_bytes",
            "explain_missing_counters",
            "check_machine",
            "read_settings",
        ):
            wrap_method_with_checks(backend, Backend, name, label)()
        if not isinstance(backend.telemetry, Unavailability):
            wrap_method_with_checks(backend.telemetry, Telemetry, "read", label)(energy=True)

    def test_reports_that_it_is_available(self, backend: Backend) -> None:
        assert backend.explain_unavailability() is None
        assert backend.count_devices() > backend.index >= 0

    def test_rejects_index_without_device(self, backend: Backend) -> None:
        with pytest.raises(MamfError, match=str(backend.count_devices())):
            type(backend)(backend.count_devices())

    def test_stamps_measure_a_plausible_clock_or_give_a_reason(self, backend: Backend) -> None:
        stamps = backend.clock_stamps
        if isinstance(stamps, Unavailability):
            assert stamps.reason and stamps.remedy
            return
        start = stamps.record_stamp()
        backend.flush_cache()
        end = stamps.record_stamp()
        backend.synchronize()
        elapsed = stamps.compute_elapsed(start, end)
        assert elapsed is not None and elapsed.seconds > 0
        assert 1e8 < elapsed.cycles / elapsed.seconds < 1e10

    def test_describes_the_device_in_base_units(self, backend: Backend) -> None:
        info = backend.info
        assert (info.backend, info.is_accelerator) == (backend.name, backend.is_accelerator)
        assert info.name == add_sharing_to_name(backend.read_device_name(backend.index), parse_sharing_ways(info.name))
        for size_bytes in (info.memory_bytes, info.cache_bytes):
            assert size_bytes is None or size_bytes > 1024
        assert info.max_clock_hz is None or 1e8 < info.max_clock_hz < 1e11
        assert info.power_limit_watts is None or 1 < info.power_limit_watts < 1e4
        assert info.compute_units is None or info.compute_units > 0
        assert info.uuid_hash is None or len(info.uuid_hash) <= 16

    def test_time_between_marks_is_positive_and_adds_up(self, backend: Backend) -> None:
        assert backend.timer in ("device events", "host clock")
        first = backend.record_mark()
        backend.flush_cache()
        second = backend.record_mark()
        backend.flush_cache()
        third = backend.record_mark()
        backend.synchronize()
        first_seconds, second_seconds = (
            backend.compute_seconds_between(first, second),
            backend.compute_seconds_between(second, third),
        )
        assert min(first_seconds, second_seconds) > 0
        assert math.isclose(
            backend.compute_seconds_between(first, third), first_seconds + second_seconds, rel_tol=0.01, abs_tol=1e-5
        )

    def test_waiting_for_a_mark_returns(self, backend: Backend) -> None:
        backend.flush_cache()
        mark = backend.record_mark()
        backend.submit()
        backend.wait_for_mark(mark)

    def test_profiler_window_contains_launches_and_ends_with_an_error(self, backend: Backend) -> None:
        with backend.open_profiler_window("a launch"):
            backend.flush_cache()
        with pytest.raises(ZeroDivisionError), backend.open_profiler_window("what breaks"):
            raise ZeroDivisionError

    def test_profiler_ranges_nest_and_end_with_an_error(self, backend: Backend) -> None:
        ranges = backend.open_profiler_range("a module"), backend.open_profiler_range("a nested one {0}")
        if None in ranges:
            assert ranges == (None, None)
            return
        outer, inner = ranges
        assert outer is not None and inner is not None
        with pytest.raises(ZeroDivisionError), outer, inner:
            backend.flush_cache()
            raise ZeroDivisionError

    def test_gives_reason_for_missing_counters(self, backend: Backend) -> None:
        unavailable = backend.explain_missing_counters()
        assert unavailable is None or (unavailable.reason and unavailable.remedy)

    def test_host_time_goes_forward(self, backend: Backend) -> None:
        start_seconds = backend.now()
        backend.sleep(0.001)
        assert backend.now() >= start_seconds + 0.001

    def test_takes_operands_and_releases_memory(self, backend: Backend) -> None:
        backend.reset_peak_memory()
        pool = backend.make_operand_pool("normal", 0)
        pool.take_buffer("a", 4096, "float32")
        pool.take_buffer("a", 1024, "float32")
        pool.release_buffers()
        backend.release_cached_memory()

    def test_distinguishes_exhausted_memory_from_other_errors(self, backend: Backend) -> None:
        assert backend.is_out_of_memory(self.out_of_memory)
        assert not backend.is_out_of_memory(ValueError("shape mismatch"))
        assert not backend.is_out_of_memory(RuntimeError("an illegal instruction was encountered"))

    def test_sensors_use_base_units_or_give_a_reason(self, backend: Backend) -> None:
        if isinstance(backend.telemetry, Unavailability):
            assert backend.telemetry.reason and backend.telemetry.remedy
            return
        assert backend.telemetry.read().joules is None, (
            "the sensors read the slow energy counter: read it only if energy=True"
        )
        reading = backend.telemetry.read(energy=True)
        assert reading.clock_hz is None or 1e6 < reading.clock_hz < 1e11
        assert reading.watts is None or 0 <= reading.watts < 1e5
        assert reading.celsius is None or -50 < reading.celsius < 150

    def test_warnings_have_a_cost_and_a_command(self, backend: Backend) -> None:
        for result in backend.check_machine():
            assert result.verdict in ("ok", "warning", "unknown")
            assert result.verdict != "warning" or (result.effect and result.command)

    def test_resolves_names_of_dtypes(self, backend: Backend) -> None:
        assert backend.explain_unsupported_dtype(backend.default_dtype) is None
        assert backend.resolve_dtype("fp8").startswith("float8_e4m3")
        assert backend.resolve_dtype("bfloat16") == "bfloat16"


def _measure_row(backend: Backend, kernel: AnyKernel, problem: Any, shape: Any) -> Measurement:
    return measure_row(
        kernel,
        problem,
        shape,
        BurstRegime(backend),
        backend.make_operand_pool(problem.data, problem.seed),
        StoppingRule(max_seconds=0.0),
    )


class AnyKernelContract:
    """The tests that a kernel of any operation must pass.

    Define the fixtures ``backend``, ``kernel``, ``problem`` and ``shape``. The kernel must support the problem and the
    shape, which should be small.
    """

    def test_is_available_and_supports_the_problem(
        self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any
    ) -> None:
        assert kernel.explain_unavailability(backend) is None
        assert kernel.explain_unsupported_problem(backend, problem) is None
        assert kernel.explain_unsupported_shape(problem, shape) is None

    def test_computes_correct_results_and_keeps_operands_unchanged(
        self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any
    ) -> None:
        """Fail if the kernel changes its operands, uses only one of several operand sets, or computes nothing after its
        first launch.
        """
        pool = backend.make_operand_pool(problem.data, problem.seed)
        with kernel.apply_settings(backend, problem):
            checked = CheckedKernel(kernel.prepare(backend, problem, shape, pool, sets=3))
            assert len(checked.launches) == 3
            checked.warm_up_and_verify(backend)
            checked.poison_outputs()
            for launch in (*checked.launches, *checked.launches):
                launch()
            backend.synchronize()
            checked.verify_last_outputs()
            checked.require_unchanged_operands()

    def test_verification_rejects_poisoned_output(
        self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any
    ) -> None:
        pool = backend.make_operand_pool(problem.data, problem.seed)
        with kernel.apply_settings(backend, problem):
            prepared = kernel.prepare(backend, problem, shape, pool)
            result = prepared.launches[0]()
            backend.synchronize()
            assert prepared.verify(0, result).ok
            prepared.poison_outputs((result,))
            assert not prepared.verify(0, result).ok

    def test_can_be_measured(self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any) -> None:
        row = _measure_row(backend, kernel, problem, shape)
        assert row.ok, row.reason
        assert row.launch_count >= 3


class KernelContract(AnyKernelContract):
    """The tests that every matmul kernel must pass. Define the fixtures ``backend``, ``kernel`` and ``problem``."""

    @pytest.fixture
    def shape(self) -> MatmulShape:
        return MatmulShape(96, 80, 64)

    def test_result_is_right_for_every_supported_layout_and_data(
        self, backend: Backend, kernel: MatmulKernel, problem: MatmulProblem, shape: MatmulShape
    ) -> None:
        for layout in MATMUL_LAYOUTS:
            for data in ("normal", "zeros"):
                variant = MatmulProblem(problem.dtype, problem.out_dtype, layout, data)
                if kernel.explain_unsupported_problem(backend, variant) is None:
                    with kernel.apply_settings(backend, variant):
                        pool = backend.make_operand_pool(data, 0)
                        CheckedKernel(kernel.prepare(backend, variant, shape, pool)).warm_up_and_verify(backend)

    def test_rewrites_its_output_on_request(
        self, backend: Backend, kernel: MatmulKernel, problem: MatmulProblem, shape: MatmulShape
    ) -> None:
        pool = backend.make_operand_pool("normal", 0)
        assert kernel.prepare(backend, problem, shape, pool).rewrite_output is None
        rewrite = kernel.prepare(backend, problem, shape, pool, rewrite=True).rewrite_output
        assert rewrite is not None
        rewrite()

    def test_gives_reason_for_unsupported_problem_in_one_line(self, backend: Backend, kernel: MatmulKernel) -> None:
        reason = kernel.explain_unsupported_problem(backend, MatmulProblem("bfloat16", "int32"))
        assert reason and "\n" not in reason


class AttentionKernelContract(AnyKernelContract):
    """The tests that every attention kernel must pass. Define the fixtures ``backend`` and ``kernel``.

    If the kernel does not support the default ``problem`` or ``shape``, override these fixtures.
    """

    @pytest.fixture
    def problem(self) -> AttentionProblem:
        return AttentionProblem("bfloat16")

    @pytest.fixture
    def shape(self) -> AttentionShape:
        return AttentionShape.parse("b1h2q128k128d64")

    def test_gives_reason_for_unsupported_problem_in_one_line(self, backend: Backend, kernel: AnyKernel) -> None:
        reason = kernel.explain_unsupported_problem(backend, AttentionProblem("int8"))
        assert reason and "\n" not in reason


class OperationContract:
    """The tests that every operation must pass.

    Define the fixtures ``backend``, ``operation`` and ``kernel``. The kernel must belong to the operation.
    """

    def test_shapes_stay_equal_when_formatted_and_parsed(
        self, backend: Backend, operation: Operation[Any, Any]
    ) -> None:
        shapes = [operation.parse_shape(operation.shape_example), *operation.choose_default_shapes(backend)]
        for shape in shapes:
            assert operation.parse_shape(str(shape)) == shape
            assert operation.read_shape_record(json.loads(json.dumps(operation.make_shape_record(shape)))) == shape
        assert len(set(shapes)) >= 1, "shapes must be hashable"

    def test_rejects_an_invalid_shape_in_one_line(self, operation: Operation[Any, Any]) -> None:
        with pytest.raises(UsageError) as raised:
            operation.parse_shape("what is this")
        assert "\n" not in str(raised.value)

    def test_problems_stay_equal_when_logged_and_read(self, backend: Backend, operation: Operation[Any, Any]) -> None:
        problem = operation.make_problem(backend, {})
        assert problem.operation == operation.name
        assert operation.read_problem_record(json.loads(json.dumps(operation.make_problem_record(problem)))) == problem

    def test_work_is_positive_and_has_unit_and_convention(
        self, backend: Backend, operation: Operation[Any, Any]
    ) -> None:
        work = operation.make_problem(backend, {}).compute_work(operation.parse_shape(operation.shape_example))
        assert min(work.amount, work.nbytes) > 0
        assert work.counting_convention
        assert work.unit in ("TFLOPS", "TB/s")

    def test_rows_stay_equal_when_logged_and_read(
        self, backend: Backend, operation: Operation[Any, Any], kernel: AnyKernel
    ) -> None:
        problem, shape = operation.make_problem(backend, {}), operation.parse_shape(operation.shape_example)
        row = _measure_row(backend, kernel, problem, shape)
        assert row.status in ("ok", "unsupported"), row.reason
        record = json.loads(json.dumps(make_measurement_record(row)))
        if row.ok and "problem" in record:
            assert read_measurement_record(record) == row
