"""Test every matmul kernel on a real device, the CPU: right results pass, and wrong results of every kind are found."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verdicts import verified

from mamf.dtypes import DTYPES, OPERAND_DTYPES, SCALED_DTYPES
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulProblem, MatmulShape
from mamf.plugins.discovery import MATMUL_KERNEL_GROUP, find_entry_points_by_name, open_backend
from mamf.testing import KernelContract, SimulatedBackend, SimulatedMatmul

SHAPE = MatmulShape(96, 80, 64)
ALL_CASES = [
    ("torch.mm", "bfloat16", "bfloat16"),
    ("torch.mm", "float16", "float16"),
    ("torch.mm", "float32", "float32"),
    ("torch.mm", "float64", "float64"),
    ("scaled_mm", "float8_e4m3fn", "bfloat16"),
    ("scaled_mm", "float8_e4m3fn", "float32"),
    ("scaled_mm", "float8_e4m3fn", "float8_e4m3fn"),
    ("scaled_mm", "float8_e4m3fnuz", "bfloat16"),
    ("scaled_mm", "float8_e5m2", "bfloat16"),
    ("int_mm", "int8", "int32"),
]


def prepare_kernel(backend, name, problem, shape=SHAPE, **options):
    pool = backend.make_operand_pool(problem.data, problem.seed)
    return make_matmul_kernel(name).prepare(backend, problem, shape, pool, **options)


def is_refused(name, dtype, out_dtype):
    """Return whether torch refuses this case on this CPU.

    Before torch 2.8, CPUs have no 8-bit floats. A CPU with AMX has no float8_e4m3fnuz.
    """
    try:
        prepare_kernel(open_backend("cpu"), name, MatmulProblem(dtype, out_dtype)).launches[0]()
    except Exception as error:
        return make_matmul_kernel(name).is_refusal(error)
    return False


REFUSED = [case for case in ALL_CASES if "float8" in case[1] and is_refused(*case)]
CASES = [case for case in ALL_CASES if case not in REFUSED]
# Compiling takes long, so test only two dtypes. The kernel derives from torch.mm, which is tested with all four.
COMPILED = [("compiled", "bfloat16", "bfloat16"), ("compiled", "float32", "float32")]
if make_matmul_kernel("compiled").explain_unavailability(open_backend("cpu")):
    COMPILED.clear()
LIBRARY_CALLS = {"torch.mm": "mm", "scaled_mm": "_scaled_mm", "int_mm": "_int_mm"}
each_case = pytest.mark.parametrize(("name", "dtype", "out_dtype"), CASES, ids=" ".join)


@pytest.fixture
def backend():
    return open_backend("cpu")


class TestOnCpu(KernelContract):
    @pytest.fixture
    def shape(self):
        return SHAPE

    @pytest.fixture(params=[*CASES, *COMPILED], ids=" ".join)
    def case(self, request):
        return request.param

    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def kernel(self, case):
        return make_matmul_kernel(case[0])

    @pytest.fixture
    def problem(self, case):
        return MatmulProblem(*case[1:])


class TestSimulated(KernelContract):
    @pytest.fixture
    def backend(self):
        return SimulatedBackend()

    @pytest.fixture
    def kernel(self):
        return SimulatedMatmul()

    @pytest.fixture
    def problem(self):
        return MatmulProblem()


def test_every_kernel_is_tested_with_every_dtype_that_it_supports_here(backend):
    supported_cases = {
        (name, dtype)
        for name in find_entry_points_by_name(MATMUL_KERNEL_GROUP)
        if make_matmul_kernel(name).explain_unavailability(backend) is None
        for dtype in OPERAND_DTYPES
        if dtype not in SCALED_DTYPES  # test_scaled_formats.py tests them
        if make_matmul_kernel(name).explain_unsupported_problem(
            backend, MatmulProblem(dtype, DTYPES[dtype].default_output_dtype)
        )
        is None
    }
    tested_cases = {(name, dtype) for name, dtype, _ in ALL_CASES}
    assert {case for case in supported_cases if case[0] != "compiled"} == tested_cases
    assert {name for name, _ in supported_cases} == {name for name, *_ in (*ALL_CASES, *COMPILED)}


@pytest.mark.parametrize("case", ALL_CASES, ids=" ".join)
def test_what_torch_cannot_do_on_this_cpu_is_unsupported(backend, case):
    problem = MatmulProblem(*case[1:])
    pool = backend.make_operand_pool(problem.data, problem.seed)
    row = measure_row(
        make_matmul_kernel(case[0]), problem, SHAPE, BurstRegime(backend), pool, StoppingRule(max_seconds=0.0)
    )
    assert row.status == ("unsupported" if case in REFUSED else "ok"), row.reason
    assert row.reason.strip() if case in REFUSED else not row.reason


# -- what a launch does ----------------------------------------------------------------------------------------------


class DispatchRecorder(TorchDispatchMode):
    """A dispatch mode that records every call to torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        self.calls.append((str(function), arguments))
        return function(*arguments, **(options or {}))


def record_dispatched_calls(launch):
    with DispatchRecorder() as recorder:
        launch()
    return recorder.calls


@each_case
def test_a_timed_launch_is_one_call_of_the_library_and_allocates_nothing(backend, name, dtype, out_dtype):
    calls = record_dispatched_calls(prepare_kernel(backend, name, MatmulProblem(dtype, out_dtype)).launches[0])
    assert [function for function, _ in calls] == [f"aten.{LIBRARY_CALLS[name]}.out"]


@pytest.mark.parametrize("layout", MATMUL_LAYOUTS)
def test_operands_have_the_strides_of_their_layout(backend, layout):
    launch = prepare_kernel(backend, "torch.mm", MatmulProblem("float32", "float32", layout)).launches[0]
    ((_, (a, b)),) = record_dispatched_calls(launch)
    m, n, k = SHAPE.m, SHAPE.n, SHAPE.k
    assert (a.shape, b.shape) == ((m, k), (k, n))
    assert a.stride() == {"n": (k, 1), "t": (1, m)}[layout[0]]
    assert b.stride() == {"n": (n, 1), "t": (1, k)}[layout[1]]


def test_operand_sets_do_not_share_memory(backend):
    launches = prepare_kernel(backend, "torch.mm", MatmulProblem(), sets=3).launches
    operands = [record_dispatched_calls(launch)[0][1] for launch in launches]
    for position in (0, 1):
        addresses = sorted(pair[position].data_ptr() for pair in operands)
        size = operands[0][position].nbytes
        assert all(later - earlier >= size for earlier, later in itertools.pairwise(addresses))


# -- wrong results ---------------------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("data", ["normal", "zeros"])
def test_a_launch_that_does_nothing_is_caught(backend, monkeypatch, name, dtype, out_dtype, data):
    problem = MatmulProblem(dtype, out_dtype, data=data)
    ready = prepare_kernel(backend, name, problem)
    ready.launches[0]()  # now the memory of C contains a right result
    monkeypatch.setattr(torch, LIBRARY_CALLS[name], lambda *operands, out, **options: out)
    assert not verified(ready).ok


def round_to_tf32(values):
    """Round float32 values to tf32, which keeps 10 of the 23 bits of mantissa."""
    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("shape", [SHAPE, MatmulShape(256, 128, 2048)])
def test_a_result_computed_in_tf32_is_wrong_for_float32_and_right_for_tf32(backend, monkeypatch, shape):
    real_mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: real_mm(round_to_tf32(a), round_to_tf32(b), out=out))
    verdicts = {
        dtype: verified(prepare_kernel(backend, "torch.mm", MatmulProblem(dtype, "float32"), shape)).ok
        for dtype in ("float32", "tf32")
    }
    assert verdicts == {"float32": False, "tf32": True}


# Without a scale, one in twelve results of the larger K would exceed 448, the largest number of float8_e4m3fn.
@pytest.mark.parametrize("k", [16, 65536])
@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.skipif(
    ("scaled_mm", "float8_e4m3fn", "bfloat16") in REFUSED, reason="this torch has no 8-bit floats on a CPU"
)
def test_8_bit_outputs_do_not_saturate_whatever_k_is(backend, k, out_dtype):
    problem = MatmulProblem("float8_e4m3fn", out_dtype)
    assert verified(prepare_kernel(backend, "scaled_mm", problem, MatmulShape(4, 16, k))).ok


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.fixture
def high_global_precision():
    earlier_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(earlier_precision)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "highest"), ("tf32", "high"), ("bfloat16", "highest")])
def test_a_users_global_precision_does_not_turn_float32_into_tf32(backend, high_global_precision, dtype, precision):
    problem = MatmulProblem(dtype, DTYPES[dtype].default_output_dtype)
    with make_matmul_kernel("torch.mm").apply_settings(backend, problem):
        assert torch.get_float32_matmul_precision() == precision
    assert torch.get_float32_matmul_precision() == "high"


# -- operands --------------------------------------------------------------------------------------------------------

COUNT = 2**16


def make_operand(backend, data, dtype, seed=0, name="a", count=COUNT):
    return backend.make_operand_pool(data, seed).take_buffer(name, count, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "tf32", "float64", "float8_e4m3fn"])
def test_float_operands_have_the_distribution_that_data_names(backend, dtype):
    normal, uniform, zeros, integers = (
        make_operand(backend, data, dtype).to(torch.float64) for data in ("normal", "uniform", "zeros", "integers")
    )
    assert abs(normal.mean()) < 0.02
    assert normal.std() == pytest.approx(1, abs=0.02)
    assert -1 <= uniform.min() < -0.95
    assert 0.95 < uniform.max() <= 1
    assert uniform.std() == pytest.approx(3**-0.5, abs=0.01)
    assert not zeros.any()
    assert set(integers.tolist()) == {-2, -1, 0, 1, 2}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e5m2"])
def test_a_seed_determines_the_operands_and_a_differs_from_b(backend, dtype):
    first, again, other, b = (
        make_operand(backend, "normal", dtype, seed, name).to(torch.float32)
        for seed, name in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, b)


# -- unsupported problems and shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("torch.mm", MatmulProblem("int8", "int32"), "does not support int8"),
        ("torch.mm", MatmulProblem("bfloat16", "float32"), "in bfloat16 for bfloat16 operands, not in float32"),
        ("torch.mm", MatmulProblem("tf32", "float32"), "CPUs have no tf32"),
        ("torch.mm", MatmulProblem("bfloat16", "bfloat16", fast_accumulation=True), "not support fast accumulation"),
        *(("scaled_mm", MatmulProblem("float8_e4m3fn", "bfloat16", layout), f"nt, not {layout}")
          for layout in ("nn", "tn", "tt")),
        ("scaled_mm", MatmulProblem("float8_e5m2", "float8_e5m2"), "not in float8_e5m2"),
        ("int_mm", MatmulProblem("int8", "bfloat16"), "writes C in int32 for int8 operands, not in bfloat16"),
    ],
)  # fmt: skip
def test_unsupported_problems_are_refused_in_one_line_before_anything_is_allocated(backend, name, problem, reason):
    reasons = []
    kernel = make_matmul_kernel(name)
    assert not record_dispatched_calls(lambda: reasons.append(kernel.explain_unsupported_problem(backend, problem)))
    assert reason in reasons[0]
    assert "\n" not in reasons[0]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "reason"),
    [
        ("scaled_mm", "float8_e4m3fn", MatmulShape(64, 64, 72), "multiples of 16"),
        ("scaled_mm", "float8_e4m3fn", MatmulShape(64, 72, 64), "multiples of 16"),
        ("scaled_mm", "float8_e4m3fn", MatmulShape(7, 64, 64), None),
        ("int_mm", "int8", MatmulShape(16, 64, 64), "M above 16"),
        ("int_mm", "int8", MatmulShape(64, 64, 60), "multiples of 8"),
        ("int_mm", "int8", MatmulShape(17, 8, 8), None),
        ("torch.mm", "bfloat16", MatmulShape(1, 3, 7), None),
    ],
)
def test_kernels_say_which_shapes_their_library_does_not_support(name, dtype, shape, reason):
    explanation = make_matmul_kernel(name).explain_unsupported_shape(
        MatmulProblem(dtype, DTYPES[dtype].default_output_dtype), shape
    )
    assert explanation is None if reason is None else reason in explanation
