"""The contracts as pytest suites: derive a class from one, define its fixtures, and inherit all of its tests."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mamf.backend import Backend, Telemetry, Unavailable, add_sharing_to_name, parse_sharing
from mamf.engine.measure import measure
from mamf.engine.regimes import Burst, StoppingRule
from mamf.engine.regimes.base import CheckedKernel
from mamf.errors import MamfError, UsageError
from mamf.kernel import AnyKernel
from mamf.logs.records import make_measurement_record, read_measurement_record
from mamf.measurement import Measurement
from mamf.operation import Operation
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulKernel, MatmulProblem, MatmulShape
from mamf.plugins.contracts import check_attribute, guard_method


class _BackendFixture:
    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("define a fixture that opens the backend")


class BackendContract(_BackendFixture):
    """Tests what every backend must do. Define the fixture ``backend``, an open device."""

    #: The error that the vendor's library raises when memory is exhausted.
    out_of_memory: BaseException = MemoryError("out of memory")

    def test_attributes_and_answers_are_what_the_contract_says(self, backend: Backend) -> None:
        label = f"backend {backend.name}"
        for name in ("info", "telemetry", "burst_traits", "sustained_traits", "environment_variables"):
            check_attribute(backend, Backend, name, label)
        for name in ("free_memory", "allocated_memory", "peak_memory", "without_counters", "advice", "settings"):
            guard_method(backend, Backend, name, label)()
        if not isinstance(backend.telemetry, Unavailable):
            guard_method(backend.telemetry, Telemetry, "read", label)(energy=True)

    def test_says_whether_it_is_available(self, backend: Backend) -> None:
        assert backend.unavailable() is None
        assert backend.device_count() > backend.index >= 0

    def test_refuses_a_device_that_is_not_there(self, backend: Backend) -> None:
        with pytest.raises(MamfError, match=str(backend.device_count())):
            type(backend)(backend.device_count())

    def test_stamps_show_a_clock_or_say_why_not(self, backend: Backend) -> None:
        stamps = backend.stamps
        if isinstance(stamps, Unavailable):
            assert stamps.reason and stamps.remedy
            return
        start = stamps.stamp()
        backend.flush_cache()
        end = stamps.stamp()
        backend.synchronize()
        passed = stamps.between(start, end)
        assert passed is not None and passed.seconds > 0
        assert 1e8 < passed.cycles / passed.seconds < 1e10

    def test_describes_the_device_in_core_units(self, backend: Backend) -> None:
        info = backend.info
        assert (info.backend, info.is_accelerator) == (backend.name, backend.is_accelerator)
        assert info.name == add_sharing_to_name(backend.device_name(backend.index), parse_sharing(info.name))
        for bytes_ in (info.memory_bytes, info.cache_bytes):
            assert bytes_ is None or bytes_ > 1024
        assert info.max_clock_hz is None or 1e8 < info.max_clock_hz < 1e11
        assert info.power_limit_watts is None or 1 < info.power_limit_watts < 1e4
        assert info.compute_units is None or info.compute_units > 0
        assert info.uuid_hash is None or len(info.uuid_hash) <= 16

    def test_names_its_timer(self, backend: Backend) -> None:
        assert backend.timer in ("device events", "host clock")

    def test_time_between_marks_is_positive_and_adds_up(self, backend: Backend) -> None:
        first = backend.mark()
        backend.flush_cache()
        second = backend.mark()
        backend.flush_cache()
        third = backend.mark()
        backend.synchronize()
        one, two = backend.seconds_between(first, second), backend.seconds_between(second, third)
        assert one > 0
        assert two > 0
        assert math.isclose(backend.seconds_between(first, third), one + two, rel_tol=0.01, abs_tol=1e-5)

    def test_waiting_for_a_mark_returns(self, backend: Backend) -> None:
        backend.flush_cache()
        mark = backend.mark()
        backend.submit()
        backend.wait(mark)

    def test_a_profilers_window_holds_what_is_launched(self, backend: Backend) -> None:
        with backend.profiler_window("a launch"):
            backend.flush_cache()
        with pytest.raises(ZeroDivisionError), backend.profiler_window("what breaks"):
            raise ZeroDivisionError

    def test_profiler_ranges_nest_and_end_with_an_error(self, backend: Backend) -> None:
        ranges = backend.profiler_range("a module"), backend.profiler_range("a nested one {0}")
        if None in ranges:
            assert ranges == (None, None)
            return
        outer, inner = ranges
        assert outer is not None and inner is not None
        with pytest.raises(ZeroDivisionError), outer, inner:
            backend.flush_cache()
            raise ZeroDivisionError

    def test_says_why_it_has_no_counters(self, backend: Backend) -> None:
        unavailable = backend.without_counters()
        assert unavailable is None or (unavailable.reason and unavailable.remedy)

    def test_host_time_goes_forward(self, backend: Backend) -> None:
        before = backend.now()
        backend.sleep(0.001)
        assert backend.now() >= before + 0.001

    def test_memory_can_be_released(self, backend: Backend) -> None:
        backend.reset_peak_memory()
        backend.release_memory()

    def test_operands_are_views_of_one_buffer(self, backend: Backend) -> None:
        pool = backend.operand_pool("normal", 0)
        pool.take("a", 4096, "float32")
        pool.take("a", 1024, "float32")
        pool.release()

    def test_tells_exhausted_memory_from_other_errors(self, backend: Backend) -> None:
        assert backend.is_out_of_memory(self.out_of_memory)
        assert not backend.is_out_of_memory(ValueError("shape mismatch"))
        assert not backend.is_out_of_memory(RuntimeError("an illegal instruction was encountered"))

    def test_sensors_read_in_core_units_or_say_why_not(self, backend: Backend) -> None:
        if isinstance(backend.telemetry, Unavailable):
            assert backend.telemetry.reason
            assert backend.telemetry.remedy
            return
        assert backend.telemetry.read().joules is None, "read the slow energy counter only if energy=True"
        reading = backend.telemetry.read(energy=True)
        assert reading.clock_hz is None or 1e6 < reading.clock_hz < 1e11
        assert reading.watts is None or 0 <= reading.watts < 1e5
        assert reading.celsius is None or -50 < reading.celsius < 150

    def test_advice_comes_with_a_command(self, backend: Backend) -> None:
        for advice in backend.advice():
            assert advice.verdict in ("ok", "warning", "unknown")
            assert advice.verdict != "warning" or (advice.cost and advice.command)

    def test_knows_its_dtypes(self, backend: Backend) -> None:
        assert backend.unsupported_dtype(backend.default_dtype) is None
        assert backend.resolve_dtype("fp8").startswith("float8_e4m3")
        assert backend.resolve_dtype("bfloat16") == "bfloat16"


class _KernelFixture(_BackendFixture):
    @pytest.fixture
    def kernel(self) -> AnyKernel:
        raise NotImplementedError("define a fixture that returns the kernel, or a kernel of the operation")

    def measure_row(self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any) -> Measurement:
        pool = backend.operand_pool(problem.data, problem.seed)
        return measure(kernel, problem, shape, Burst(backend), pool, StoppingRule(seconds=0.0))


class AnyKernelContract(_KernelFixture):
    """Tests what a kernel of any operation must do.

    Define the fixtures ``backend``, ``kernel``, and a ``problem`` and a ``shape`` that the kernel supports.
    """

    @pytest.fixture
    def problem(self) -> Any:
        raise NotImplementedError("define a fixture that returns a problem that the kernel supports")

    @pytest.fixture
    def shape(self) -> Any:
        raise NotImplementedError("define a fixture that returns a small shape that the kernel supports")

    def test_is_available_and_supports_the_problem(
        self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any
    ) -> None:
        assert kernel.unavailable(backend) is None
        assert kernel.unsupported(backend, problem) is None
        assert kernel.unsupported_shape(problem, shape) is None

    def test_every_operand_set_is_right_and_stays_as_it_was(
        self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any
    ) -> None:
        """Fail if the kernel changes its operands, uses only one operand set, or does no work in later launches."""
        pool = backend.operand_pool(problem.data, problem.seed)
        with kernel.settings(backend, problem):
            checked = CheckedKernel(kernel.prepare(backend, problem, shape, pool, sets=3))
            assert len(checked.launches) == 3
            checked.warm_up_and_verify(backend)
            checked.poison()
            for launch in (*checked.launches, *checked.launches):
                launch()
            backend.synchronize()
            checked.verify()
            checked.require_unchanged_operands()

    def test_a_poisoned_output_is_wrong(self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any) -> None:
        pool = backend.operand_pool(problem.data, problem.seed)
        with kernel.settings(backend, problem):
            prepared = kernel.prepare(backend, problem, shape, pool)
            result = prepared.launches[0]()
            backend.synchronize()
            assert prepared.verify(0, result).ok
            prepared.poison((result,))
            assert not prepared.verify(0, result).ok

    def test_can_be_measured(self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any) -> None:
        row = self.measure_row(backend, kernel, problem, shape)
        assert row.ok, row.reason
        assert row.launches >= 3


class KernelContract(AnyKernelContract):
    """Tests what every matmul kernel must do. Define the fixtures ``backend``, ``kernel`` and ``problem``."""

    @pytest.fixture
    def shape(self) -> MatmulShape:
        return MatmulShape(96, 80, 64)

    def test_result_is_right_for_every_supported_layout_and_data(
        self, backend: Backend, kernel: MatmulKernel, problem: MatmulProblem, shape: MatmulShape
    ) -> None:
        for layout in MATMUL_LAYOUTS:
            for data in ("normal", "zeros"):
                variant = MatmulProblem(problem.dtype, problem.out_dtype, layout, data)
                if kernel.unsupported(backend, variant) is None:
                    with kernel.settings(backend, variant):
                        pool = backend.operand_pool(data, 0)
                        CheckedKernel(kernel.prepare(backend, variant, shape, pool)).warm_up_and_verify(backend)

    def test_rewrites_its_output_when_asked(
        self, backend: Backend, kernel: MatmulKernel, problem: MatmulProblem, shape: MatmulShape
    ) -> None:
        pool = backend.operand_pool("normal", 0)
        assert kernel.prepare(backend, problem, shape, pool).rewrite_output is None
        rewrite = kernel.prepare(backend, problem, shape, pool, rewrite=True).rewrite_output
        assert rewrite is not None
        rewrite()

    def test_says_in_a_line_what_it_does_not_support(self, backend: Backend, kernel: MatmulKernel) -> None:
        reason = kernel.unsupported(backend, MatmulProblem("bfloat16", "int32"))
        assert reason and "\n" not in reason


class AttentionKernelContract(AnyKernelContract):
    """Tests what every attention kernel must do. Define the fixtures ``backend`` and ``kernel``.

    Override ``problem`` and ``shape`` if the kernel does not support the defaults.
    """

    @pytest.fixture
    def problem(self) -> AttentionProblem:
        return AttentionProblem("bfloat16")

    @pytest.fixture
    def shape(self) -> AttentionShape:
        return AttentionShape.parse("b1h2q128k128d64")

    def test_says_in_a_line_what_it_does_not_support(self, backend: Backend, kernel: AnyKernel) -> None:
        reason = kernel.unsupported(backend, AttentionProblem("int8"))
        assert reason and "\n" not in reason


class OperationContract(_KernelFixture):
    """Tests what every operation must do. Define the fixtures ``backend``, ``operation`` and one ``kernel`` of it."""

    @pytest.fixture
    def operation(self) -> Operation[Any, Any]:
        raise NotImplementedError("define a fixture that returns the operation")

    def test_shapes_are_read_as_they_are_written(self, backend: Backend, operation: Operation[Any, Any]) -> None:
        shapes = [operation.parse_shape(operation.shape_example), *operation.default_shapes(backend)]
        for shape in shapes:
            assert operation.parse_shape(str(shape)) == shape
            assert operation.shape_from_record(json.loads(json.dumps(operation.shape_record(shape)))) == shape
        assert len(set(shapes)) >= 1, "shapes must be hashable"

    def test_what_is_no_shape_is_said_in_a_line(self, operation: Operation[Any, Any]) -> None:
        with pytest.raises(UsageError) as refused:
            operation.parse_shape("what is this")
        assert "\n" not in str(refused.value)

    def test_problems_survive_the_log(self, backend: Backend, operation: Operation[Any, Any]) -> None:
        problem = operation.problem_for(backend, {})
        assert problem.operation == operation.name
        assert operation.problem_from_record(json.loads(json.dumps(operation.problem_record(problem)))) == problem

    def test_work_is_counted_and_its_convention_named(self, backend: Backend, operation: Operation[Any, Any]) -> None:
        work = operation.problem_for(backend, {}).work(operation.parse_shape(operation.shape_example))
        assert work.amount > 0
        assert work.nbytes > 0
        assert work.convention
        assert work.unit in ("TFLOPS", "TB/s")

    def test_a_row_survives_the_log(self, backend: Backend, operation: Operation[Any, Any], kernel: AnyKernel) -> None:
        problem, shape = operation.problem_for(backend, {}), operation.parse_shape(operation.shape_example)
        row = self.measure_row(backend, kernel, problem, shape)
        assert row.status in ("ok", "unsupported"), row.reason
        record = json.loads(json.dumps(make_measurement_record(row)))
        if row.ok and "problem" in record:
            assert read_measurement_record(record, {}) == row
