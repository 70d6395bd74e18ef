"""Test matmuls in Triton and Gluon: configurations, refusals, and results in Triton's interpreter.

The results of Gluon need a card, so tests/device/test_hopper_matmuls.py tests them.
"""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mamf.errors import UnsupportedError, UsageError
from mamf.operations.matmul.operation import choose_search_kernels, make_matmul_kernel
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulProblem, MatmulShape
from mamf.operations.matmul.triton_matmul import TritonMatmul, list_triton_configurations, supports_tensor_descriptors

SHAPE = MatmulShape(4096, 4096, 4096)
INT8, FLOAT8 = MatmulProblem("int8", "int32"), MatmulProblem("float8_e4m3fn", "bfloat16")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def device(cuda, monkeypatch):
    """Return the backend of a simulated Hopper card that Triton supports."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: object())
    monkeypatch.setattr("mamf.operations.compilation.get_triton_device_type", lambda: "cuda")
    return cuda.kind(0)


@pytest.mark.parametrize(
    "text",
    [
        *("3", "128x256", "128x256x64", "100x128x64/4w3s", "128x128x8/4w3s", "16x16x16/0w1s", "16x16x16/3w1s"),
        *("16x16x16/4w0s", "16x16x16/4w1s/fast", "16x16x16/4w1s/tile"),
    ],
)
def test_an_invalid_configuration_is_refused_in_one_line(text):
    with pytest.raises(UsageError) as caught:
        make_matmul_kernel(f"triton[{text}]")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_configuration_is_a_separate_kernel(device):
    names = [variant.name for variant in make_matmul_kernel("triton").list_variants(device, INT8, SHAPE)]
    assert names[0] == "triton[128x128x128/4w3s]"
    assert names == [f"triton[{each}]" for each in list_triton_configurations("cuda", "int8")]
    assert [each.name for each in make_matmul_kernel(names[0]).list_variants(device, INT8, SHAPE)] == names[:1]
    names = [variant.name for variant in make_matmul_kernel("gluon").list_variants(device, MatmulProblem(), SHAPE)]
    assert len(set(names)) == len(names) >= 2
    variants = make_matmul_kernel(names[1]).list_variants(device, MatmulProblem(), SHAPE)
    assert [variant.name for variant in variants] == [names[1]]
    assert "gluon" not in [each.name for each in choose_search_kernels(device, MatmulProblem())]
    assert [each.name for each in choose_search_kernels(device, MatmulProblem(), ["gluon"])] == ["gluon"]


@pytest.mark.parametrize("layout", [layout for layout in MATMUL_LAYOUTS if layout != "nt"])
def test_descriptors_support_only_one_layout_unless_values_have_16_bits(device, layout):
    schedules = {
        dtype: {
            each.configuration.schedule
            for each in make_matmul_kernel("triton").list_variants(device, MatmulProblem(dtype, out, layout), SHAPE)
        }
        for dtype, out in (("bfloat16", "bfloat16"), ("int8", "int32"), ("tf32", "float32"))
    }
    assert "tma" in schedules["bfloat16"]
    assert "tma" not in schedules["int8"] | schedules["tf32"]
    assert layout in make_matmul_kernel("triton[128x256x128/8w3s/tma]").explain_unsupported_problem(
        device, MatmulProblem("int8", "int32", layout)
    )


@pytest.mark.parametrize("architecture", ["sm_80", "gfx942", None])
def test_descriptors_need_a_hopper_card(device, architecture):
    assert supports_tensor_descriptors(device)
    other_device = SimpleNamespace(info=SimpleNamespace(architecture=architecture, compute_units=8), runtime="cuda")
    assert not supports_tensor_descriptors(other_device)
    tma_kernel, plain_kernel = (make_matmul_kernel(f"triton[128x256x64/8w3s{end}]") for end in ("/tma", ""))
    assert "Hopper" in tma_kernel.explain_unsupported_options(other_device, MatmulProblem())
    assert plain_kernel.explain_unsupported_options(other_device, MatmulProblem()) is None


def test_descriptors_need_aligned_rows(device):
    tma_kernel, kernel = make_matmul_kernel("triton[128x256x64/8w3s/tma]"), make_matmul_kernel("triton")
    for shape, name in ((MatmulShape(64, 64, 65), "A"), (MatmulShape(64, 65, 64), "C")):
        assert f"but the rows of {name} have 130 bytes" in tma_kernel.explain_unsupported_shape(MatmulProblem(), shape)
        assert kernel.explain_unsupported_shape(MatmulProblem(), shape) is None
        variants = kernel.list_variants(device, MatmulProblem(), shape)
        assert {variant.configuration.schedule for variant in variants} == {"tile"}


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("triton", MatmulProblem("float64", "float64"), "does not support float64"),
        ("triton", MatmulProblem("bfloat16", "float32"), "writes C in bfloat16 for bfloat16 operands, not in float32"),
        ("triton", MatmulProblem("int8", "bfloat16"), "writes C in int32"),
        ("triton", MatmulProblem("float8_e4m3fn", "float8_e4m3fn"), "not in float8_e4m3fn"),
        ("triton", MatmulProblem(fast_accumulation=True), "not support fast accumulation for bfloat16"),
        *(("gluon", MatmulProblem(layout=layout), f"not {layout}") for layout in MATMUL_LAYOUTS if layout != "nt"),
        ("gluon", MatmulProblem("float32", "float32"), "does not support float32"),
    ],
)
def test_unsupported_problems_are_refused_with_a_reason(device, name, problem, reason):
    assert reason in make_matmul_kernel(name).explain_unsupported_problem(device, problem)


def test_rows_of_gluon_must_be_aligned():
    assert make_matmul_kernel("gluon").explain_unsupported_shape(MatmulProblem(), MatmulShape(3, 8, 8)) is None
    assert make_matmul_kernel("gluon").explain_unsupported_shape(MatmulProblem(), MatmulShape(3, 8, 12))
    assert make_matmul_kernel("gluon").explain_unsupported_shape(MatmulProblem(), MatmulShape(3, 12, 8))


def test_a_triton_without_gluon_is_unsupported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    a = torch.zeros(64, 64)
    with pytest.raises(UnsupportedError, match="lacks the Gluon"):
        make_matmul_kernel("gluon").bind_operands(MatmulProblem(), a, a, a)


@pytest.mark.parametrize(
    ("is_fast", "accumulation"),
    [(False, {"accumulation": "in float32 after every 128 terms of K"}), (True, {"accumulation": "fast"})],
)
def test_details_say_how_products_of_8_bit_floats_are_summed(is_fast, accumulation):
    problem = MatmulProblem("float8_e4m3fn", "bfloat16", fast_accumulation=is_fast)
    configuration = {"configuration": "128x128x128/4w3s"}
    kernel = make_matmul_kernel("triton[128x128x128/4w3s]")
    assert kernel.make_details(problem, SHAPE) == {**configuration, **accumulation}
    assert kernel.make_details(INT8, SHAPE) == configuration


@pytest.mark.parametrize("schedule", ["", "/persistent"])
@pytest.mark.parametrize(
    ("shape", "expected_note"),
    [((1024, 512, 64), "32 programs, so at most 32 of 132 compute units are busy"), ((2048, 2048, 64), None)],
)
def test_a_row_says_how_many_units_its_tiles_can_use(device, schedule, shape, expected_note):
    text, shape = f"triton[128x128x64/4w3s{schedule}]", MatmulShape(*shape)
    assert device.info.compute_units == 132
    configured = make_matmul_kernel(text).configure_for_shape(device, MatmulProblem(), shape)
    assert configured.make_details(MatmulProblem(), shape).get("ran") == expected_note


@needs_triton
def test_what_does_not_fit_or_compile_is_unsupported():
    from triton.runtime.errors import OutOfResources

    assert make_matmul_kernel("triton").is_refusal(OutOfResources(300_000, 232_448, "shared memory"))
    assert make_matmul_kernel("triton").is_refusal(RuntimeError("PassManager::run failed"))
    assert not make_matmul_kernel("triton").is_refusal(RuntimeError("an illegal memory access was encountered"))


class LaunchRecorder:
    """A fake Triton kernel that records the grid and the arguments of each launch."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append((grid, arguments, options))


@needs_triton
@pytest.mark.parametrize(("problem", "max_imprecise_steps"), [
    (FLOAT8, 128), (MatmulProblem("float8_e4m3fn", "bfloat16", fast_accumulation=True), None), (INT8, None)
])  # fmt: skip
def test_the_compiler_gets_the_options_of_the_summation(monkeypatch, problem, max_imprecise_steps):
    recorder = LaunchRecorder()
    monkeypatch.setattr("mamf.operations.matmul.triton_kernels.multiply_with_pointers", recorder)
    a = torch.zeros(64, 64)
    TritonMatmul("128x128x128/4w3s").bind_operands(problem, a, a, a)[0]()
    options = recorder.launches[0][2]
    assert options["MAX_IMPRECISE_STEPS"] == max_imprecise_steps
    assert str(options["SUM_DTYPE"]) == ("int32" if problem is INT8 else "fp32")


INTERPRETER_CHECKS = """
import torch
from mamf.engine.regimes.base import CheckedKernel
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.matmul.operation import choose_search_kernels, make_matmul_kernel
from mamf.plugins.discovery import open_backend
torch.set_num_threads(1)
cpu = open_backend("cpu")
def check(text, shape, *dtypes_and_layout, **accumulation):
    problem = MatmulProblem(*dtypes_and_layout, **accumulation)
    pool = cpu.make_operand_pool("normal", 0)
    checked = CheckedKernel(make_matmul_kernel(f"triton[{text}]").prepare(cpu, problem, MatmulShape(*shape), pool))
    checked.warm_up_and_verify(cpu)
    return checked.verdict
odd, even = (20, 17, 33), (24, 32, 32)
for layout in MATMUL_LAYOUTS:
    check("16x16x32/4w2s", odd, "float32", "float32", layout)
    check("16x16x32/4w2s/persistent", even, "float16", "float16", layout)
    check("16x32x32/4w2s/tma", even, "float16", "float16", layout)
for schedule in ("", "/tma"):
    assert check("32x32x32/4w2s" + schedule, even, "int8", "int32").error == 0
    check("32x32x32/4w2s" + schedule, even, "tf32", "float32")
    check("32x32x32/4w2s" + schedule, even, "float8_e4m3fn", "bfloat16")
    fast = check("32x32x32/4w2s" + schedule, even, "float8_e5m2", "float32", fast_accumulation=True)
    assert fast.details["accumulation"] == "fast", fast
print("right")
"""


@needs_triton
def test_products_in_triton_are_right_when_interpreted():
    """Check the results of Triton kernels in Triton's interpreter, which runs them as Python code.

    The check needs a separate process, because Triton reads TRITON_INTERPRET when it is imported. There is no case for
    bfloat16, because the interpreter cannot multiply it.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", INTERPRETER_CHECKS], env=environment, capture_output=True, text=True
    )
    assert process.stdout.strip() == "right", process.stderr
