"""The contracts of kernels and operations as pytest suites: derive, supply the fixtures, inherit every test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mamf.backend import Backend
from mamf.engine.measure import measure
from mamf.engine.regimes import Burst, StoppingRule
from mamf.engine.regimes.checking import Checked
from mamf.errors import UsageError
from mamf.kernel import AnyKernel
from mamf.logs.records import measurement_from_record, measurement_record
from mamf.operation import Operation
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.operations.matmul.kernel import LAYOUTS, MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape


class AnyKernelContract:
    """What a kernel of any operation must do. Supply the fixtures ``backend``, ``kernel``, ``problem`` and ``shape``
    (which it supports).
    """

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("supply a fixture that opens a backend")

    @pytest.fixture
    def kernel(self) -> AnyKernel:
        raise NotImplementedError("supply the kernel")

    @pytest.fixture
    def problem(self) -> Any:
        raise NotImplementedError("supply a problem that the kernel supports")

    @pytest.fixture
    def shape(self) -> Any:
        raise NotImplementedError("supply a small shape that the kernel supports")

    def test_is_available_and_supports_the_problem(
        self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any
    ) -> None:
        assert kernel.unavailable(backend) is None
        assert kernel.unsupported(backend, problem) is None
        assert kernel.unsupported_shape(problem, shape) is None

    def test_every_operand_set_is_right_and_stays_as_it_was(
        self, backend: Backend, kernel: AnyKernel, problem: Any, shape: Any
    ) -> None:
        """Fails for a kernel that changes its operands, uses only one set, or does nothing in later launches."""
        pool = backend.operand_pool(problem.data, problem.seed)
        with kernel.settings(backend, problem):
            checked = Checked(kernel.prepare(backend, problem, shape, pool, sets=3))
            assert len(checked.launches) == 3
            checked.rehearse(backend)
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
        regime = Burst(backend)
        pool = backend.operand_pool(problem.data, problem.seed)
        row = measure(kernel, problem, shape, regime, pool, StoppingRule(seconds=0.0))
        assert row.ok, row.reason
        assert row.launches >= 3


class KernelContract(AnyKernelContract):
    """What every matmul kernel must do. Supply the fixtures ``backend``, ``kernel`` and ``problem``."""

    @pytest.fixture
    def shape(self) -> MatmulShape:
        return MatmulShape(96, 80, 64)

    def test_result_is_right_for_every_supported_layout_and_data(
        self, backend: Backend, kernel: MatmulKernel, problem: MatmulProblem, shape: MatmulShape
    ) -> None:
        for layout in LAYOUTS:
            for data in ("normal", "zeros"):
                variant = MatmulProblem(problem.dtype, problem.out_dtype, layout, data)
                if kernel.unsupported(backend, variant) is None:
                    with kernel.settings(backend, variant):
                        pool = backend.operand_pool(data, 0)
                        Checked(kernel.prepare(backend, variant, shape, pool)).rehearse(backend)

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
        assert reason
        assert "\n" not in reason


class AttentionKernelContract(AnyKernelContract):
    """What every attention kernel must do. Supply the fixtures ``backend`` and ``kernel``; others are optional."""

    @pytest.fixture
    def problem(self) -> AttentionProblem:
        return AttentionProblem("bfloat16")

    @pytest.fixture
    def shape(self) -> AttentionShape:
        return AttentionShape.parse("b1h2q128k128d64")

    def test_says_in_a_line_what_it_does_not_support(self, backend: Backend, kernel: AnyKernel) -> None:
        reason = kernel.unsupported(backend, AttentionProblem("int8"))
        assert reason
        assert "\n" not in reason


class OperationContract:
    """What every operation must do. Supply the fixtures ``backend``, ``operation`` and its ``kernel``."""

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("supply a fixture that opens a backend")

    @pytest.fixture
    def operation(self) -> Operation[Any, Any]:
        raise NotImplementedError("supply the operation")

    @pytest.fixture
    def kernel(self) -> AnyKernel:
        raise NotImplementedError("supply a kernel of the operation")

    def test_shapes_are_read_as_they_are_written(self, backend: Backend, operation: Operation[Any, Any]) -> None:
        shapes = [operation.parse_shape(operation.shape_example), *operation.default_shapes(backend)]
        for shape in shapes:
            assert operation.parse_shape(str(shape)) == shape
            assert operation.shape_from_record(json.loads(json.dumps(operation.shape_record(shape)))) == shape
        assert len(set(shapes)) >= 1, "shapes are hashable"

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
        regime = Burst(backend)
        pool = backend.operand_pool(problem.data, problem.seed)
        row = measure(kernel, problem, shape, regime, pool, StoppingRule(seconds=0.0))
        assert row.status in ("ok", "unsupported"), row.reason
        record = json.loads(json.dumps(measurement_record(row)))
        if row.ok and "problem" in record:
            assert measurement_from_record(record, {}) == row
