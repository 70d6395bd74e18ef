"""Test the kernels of batched and grouped matmuls on the CPU: right results pass, and wrong results are caught."""

import pytest
import torch
from verdicts import verified

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.batched import BatchedProblem, BatchedShape
from mamf.operations.batched_kernels import Bmm
from mamf.operations.grouped import GroupedProblem, GroupedShape
from mamf.operations.grouped_kernels import FunctionalScaledGroupedMm, GroupedMm, MatmulLoop
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS
from mamf.plugins.discovery import list_kernel_names, make_kernel, make_operation, open_backend
from mamf.testing import AnyKernelContract

BATCH, GROUPS = BatchedShape(5, 33, 17, 64), GroupedShape(6, 97, 40, 64)
CASES = {
    "batched": (BatchedProblem, BATCH, {"torch.bmm": ("bfloat16", "float64"), "torch.matmul": ("float16",)}),
    "grouped": (GroupedProblem, GROUPS, {"F.grouped_mm": ("bfloat16", "float32"), "loop": ("bfloat16", "float64")}),
}
KERNEL_CASES = [
    (operation, name, dtype)
    for operation, (_, _, kernels) in CASES.items()
    for name in kernels
    for dtype in kernels[name]
]


@pytest.fixture
def backend():
    return open_backend("cpu")


def prepare_kernel(backend, kernel, problem, shape, **options):
    return kernel.prepare(backend, problem, shape, backend.make_operand_pool(problem.data, problem.seed), **options)


@pytest.mark.parametrize("case", KERNEL_CASES, ids=" ".join)
class TestBatchedAndGroupedKernel(AnyKernelContract):
    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def kernel(self, case):
        return make_kernel(make_operation(case[0]), case[1])

    @pytest.fixture
    def problem(self, case):
        return CASES[case[0]][0](case[2], case[2])

    @pytest.fixture
    def shape(self, case):
        return CASES[case[0]][1]


@pytest.mark.parametrize("operation", CASES)
def test_every_kernel_has_a_contract_test(operation):
    assert set(list_kernel_names(make_operation(operation))) - {"F.scaled_grouped_mm"} == set(CASES[operation][2])


@pytest.mark.parametrize("layout", MATMUL_LAYOUTS)
@pytest.mark.parametrize("case", [case for case in KERNEL_CASES if case[2] != "float64"], ids=" ".join)
def test_every_layout_is_right(backend, case, layout):
    operation, name, dtype = case
    problem_class, shape, _ = CASES[operation]
    kernel, problem = make_kernel(make_operation(operation), name), problem_class(dtype, dtype, layout)
    if name == "F.grouped_mm" and layout[0] == "t":
        assert "use --layout nt or nn" in kernel.explain_unsupported_problem(backend, problem)
    else:
        assert verified(prepare_kernel(backend, kernel, problem, shape)).ok


@pytest.mark.parametrize("routing", ["balanced", "skewed"])
@pytest.mark.parametrize("kernel", [GroupedMm, MatmulLoop])
def test_experts_without_tokens_are_right(backend, kernel, routing):
    problem, shape = GroupedProblem(routing=routing), GroupedShape(16, 9, 32, 64)
    assert 0 in problem.count_tokens_by_expert(shape)
    assert verified(prepare_kernel(backend, kernel(), problem, shape)).ok


# -- wrong results -----------------------------------------------------------------------------------------------------


class AllButTheLast(Bmm):
    def bind_operands(self, a, b, c):
        return super().bind_operands(a[:-1], b[:-1], c[:-1])


class FirstWeights(MatmulLoop):
    """A grouped matmul that multiplies the tokens of every expert with the weights of the first expert."""

    def bind_operands(self, a, b, c, tokens):
        return super().bind_operands(a, b[:1].expand(b.shape), c, tokens)


class ShiftedToken(MatmulLoop):
    """A grouped matmul that gives a token of the first expert to the second."""

    def bind_operands(self, a, b, c, tokens):
        first, second, *others = tokens
        return super().bind_operands(a, b, c, [first - 1, second + 1, *others])


class LastGroupMissing(MatmulLoop):
    def bind_operands(self, a, b, c, tokens):
        token_count = sum(tokens[:-1])
        return super().bind_operands(a[:token_count], b[:-1], c[:token_count], tokens[:-1])


@pytest.mark.parametrize(
    ("kernel", "problem", "shape"),
    [
        (AllButTheLast, BatchedProblem(), BATCH),
        (FirstWeights, GroupedProblem(), GROUPS),
        (ShiftedToken, GroupedProblem(), GROUPS),
        (LastGroupMissing, GroupedProblem(), GROUPS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_matmuls_that_are_left_out_or_mixed_up_are_caught(backend, kernel, problem, shape):
    assert not verified(prepare_kernel(backend, kernel(), problem, shape)).ok


# -- fp8 with a scale for each row, which torch cannot multiply on a CPU -----------------------------------------------


def simulated_scaled_grouped_mm(
    a, b, scale_a, recipe_a, scale_b, recipe_b, offs=None, output_dtype=torch.bfloat16, use_fast_accum=False
):
    """Check the operands as torch's CUDA code does, and multiply expert by expert."""
    assert recipe_a == recipe_b == torch.nn.functional.ScalingType.RowWise
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert (scale_a.shape, scale_b.shape) == ((a.shape[0],), (b.shape[0], b.shape[2]))
    assert b.stride(-2) == 1, "B must be transposed"
    assert offs.dtype == torch.int32
    output = torch.empty(a.shape[0], b.shape[2], dtype=output_dtype)
    begin = 0
    for expert, end in enumerate(offs.tolist()):
        rows = a[begin:end].float() * scale_a[begin:end, None]
        output[begin:end] = rows @ (b[expert].float() * scale_b[expert])
        begin = end
    return output


FP8_GROUPS = GroupedShape(6, 97, 48, 64)


class TestScaledGroups(AnyKernelContract):
    @pytest.fixture(autouse=True)
    def install_simulation(self, monkeypatch):
        monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", simulated_scaled_grouped_mm)
        monkeypatch.setattr(FunctionalScaledGroupedMm, "explain_unavailability", lambda self, backend: None)

    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def kernel(self):
        return make_kernel(make_operation("grouped"), "F.scaled_grouped_mm")

    @pytest.fixture(params=["balanced", "skewed"])
    def problem(self, request):
        return GroupedProblem("fp8_rowwise", routing=request.param)

    @pytest.fixture
    def shape(self):
        return FP8_GROUPS

    def test_the_quantization_error_is_reported_separately(self, backend, kernel, problem, shape):
        verdict = verified(prepare_kernel(backend, kernel, problem, shape))
        assert verdict.error < 4e-3
        assert 0.02 < verdict.details["quantization_error"] < 0.05

    def test_weights_of_another_expert_are_wrong(self, backend, kernel, problem, shape, monkeypatch):
        multiply = torch.nn.functional.scaled_grouped_mm
        monkeypatch.setattr(
            torch.nn.functional,
            "scaled_grouped_mm",
            lambda a, b, *scales, **options: multiply(a, b.flip(0), *scales, **options),
        )
        assert not verified(prepare_kernel(backend, kernel, problem, shape)).ok


def test_a_matmul_that_torch_lacks_is_an_unsupported_row_with_its_reason(backend):
    kernel, problem = make_kernel(make_operation("grouped"), "F.scaled_grouped_mm"), GroupedProblem("fp8_rowwise")
    assert "torch has no scaled_grouped_mm for cpu" in str(kernel.explain_unavailability(backend))
    pool = backend.make_operand_pool("normal", 0)
    row = measure_row(kernel, problem, FP8_GROUPS, BurstRegime(backend), pool, StoppingRule(max_seconds=0.0))
    assert (row.status, "scaled_grouped_mm" in row.reason) == ("unsupported", True)
