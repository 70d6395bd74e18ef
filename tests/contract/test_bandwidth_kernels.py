"""Test the bandwidth kernels: torch's on the CPU, and Triton's in Triton's interpreter if Triton is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
from verdicts import verified

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.bandwidth.operation import ACCESS_PATTERNS, BandwidthProblem, BandwidthShape
from mamf.operations.bandwidth.torch_kernels import TorchFunctions
from mamf.plugins.discovery import make_kernel, make_operation, open_backend

pytestmark = pytest.mark.usefixtures("use_one_torch_thread")
SHAPE = BandwidthShape(2**18)
#: Not a multiple of the size of a block, of 16 bytes or of the alignment.
UNALIGNED_SHAPE = BandwidthShape(2**18 + 8)
DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def cpu():
    return open_backend("cpu")


def prepare_kernel(kernel, backend, problem, shape=SHAPE, **options):
    return kernel.prepare(backend, problem, shape, backend.make_operand_pool(problem.data, problem.seed), **options)


class AllButOne(TorchFunctions):
    """A kernel that leaves out the last element of each array."""

    def bind_operands(self, backend, problem, arrays):
        launch, output, times = super().bind_operands(
            backend, problem, {name: array[:-1] for name, array in arrays.items()}
        )
        return launch, arrays.get("a", output), times


class FirstLaunchOnly(TorchFunctions):
    """A kernel that works only in the first launch with each operand set."""

    def bind_operands(self, backend, problem, arrays):
        launch, *output_and_times = super().bind_operands(backend, problem, arrays)
        launches = [launch]

        def launch_once():
            if launches:
                launches.pop()()

        return launch_once, *output_and_times


class ChangesOperand(TorchFunctions):
    """A kernel that changes an operand after reading it."""

    def bind_operands(self, backend, problem, arrays):
        launch, *output_and_times = super().bind_operands(backend, problem, arrays)

        def launch_and_change_operand():
            launch()
            arrays["b"][7] = 5.0

        return launch_and_change_operand, *output_and_times


class OneSet(TorchFunctions):
    """A kernel that uses the first operand set in every launch."""

    def bind_operands(self, backend, problem, arrays):
        if not hasattr(self, "first_binding"):
            self.first_binding = super().bind_operands(backend, problem, arrays)
        return self.first_binding


@pytest.mark.parametrize("shape", [SHAPE, UNALIGNED_SHAPE], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("pattern", ACCESS_PATTERNS)
def test_every_pattern_is_right(cpu, pattern, dtype, shape):
    problem = BandwidthProblem(pattern, dtype)
    kernel = TorchFunctions()
    assert kernel.explain_unavailability(cpu) is None
    assert kernel.explain_unsupported_problem(cpu, problem) is None
    assert kernel.explain_unsupported_shape(problem, shape) is None
    prepared = prepare_kernel(kernel, cpu, problem, shape, sets=3)
    assert len(prepared.launches) == 3
    verdict = verified(prepared)
    assert verdict.ok, verdict
    if pattern in ("copy", "write"):
        assert verdict.error == verdict.tolerance == 0.0


@pytest.mark.parametrize(
    ("kernel", "pattern"),
    [
        *((AllButOne, pattern) for pattern in ACCESS_PATTERNS),
        *((ChangesOperand, pattern) for pattern in ACCESS_PATTERNS if pattern != "write"),
        (OneSet, "copy"),
    ],
)
def test_wrong_results_are_found(cpu, kernel, pattern):
    assert not verified(prepare_kernel(kernel(), cpu, BandwidthProblem(pattern), sets=3)).ok


def test_arrays_with_a_partial_element_are_unsupported(cpu):
    reason = TorchFunctions().explain_unsupported_shape(BandwidthProblem(), BandwidthShape(1001))
    assert reason == "1001 bytes are not a whole number of float32 elements: choose another --size"


def test_a_sum_that_may_not_fit_is_unsupported(cpu, monkeypatch):
    monkeypatch.setattr("mamf.operations.bandwidth.torch_kernels._MAX_SUM_DEVIATIONS", 1e5)
    row = measure(TorchFunctions(), cpu, BandwidthProblem("read", "float16"))
    assert row.status == "unsupported"
    assert "float16" in row.reason


# -- measured rows -----------------------------------------------------------------------------------------------------


def measure(kernel, backend, problem, regime=BurstRegime, shape=SHAPE):
    opened_regime = regime(backend)
    opened_regime.prepare_device()
    pool = backend.make_operand_pool(problem.data, problem.seed)
    return measure_row(kernel, problem, shape, opened_regime, pool, StoppingRule(max_seconds=0.0))


@pytest.mark.parametrize("kernel", [FirstLaunchOnly, ChangesOperand, AllButOne])
def test_a_kernel_that_cheats_is_a_wrong_result(cpu, kernel):
    assert measure(kernel(), cpu, BandwidthProblem("copy")).status == "wrong_result"


# -- Triton ------------------------------------------------------------------------------------------------------------


def test_triton_is_unavailable_without_a_driver_for_the_device(cuda, monkeypatch):
    def get_triton_device_type():
        raise RuntimeError("0 active drivers")

    module = "mamf.operations.compilation"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: object())
    monkeypatch.setattr(f"{module}.get_triton_device_type", get_triton_device_type)
    kernel = make_kernel(make_operation("bandwidth"), "triton")
    assert "0 active drivers" in kernel.explain_unavailability(cuda.kind(0)).reason
    monkeypatch.setattr(f"{module}.get_triton_device_type", lambda: "xpu")
    assert "runs on xpu" in kernel.explain_unavailability(cuda.kind(0)).reason
    monkeypatch.setattr(f"{module}.get_triton_device_type", lambda: "cuda")
    assert kernel.explain_unavailability(cuda.kind(0)) is None


INTERPRETED_SCRIPT = """
from mamf.engine.regimes.base import CheckedKernel
from mamf.plugins.discovery import open_backend
from mamf.operations.bandwidth.torch_kernels import TritonPasses
from mamf.operations.bandwidth.operation import ACCESS_PATTERNS, BandwidthProblem, BandwidthShape
cpu = open_backend("cpu")
for pattern in ACCESS_PATTERNS:
    for dtype, warm in (("float32", 1), ("float32", 3), ("bfloat16", 1)):
        problem = BandwidthProblem(pattern, dtype, warm=warm)
        pool = cpu.make_operand_pool("normal", 0)
        prepared = TritonPasses().prepare(cpu, problem, BandwidthShape(2**16 + 8), pool, sets=2)
        CheckedKernel(prepared).warm_up_and_verify(cpu)
print("right")
"""


def test_passes_in_triton_are_right_when_interpreted():
    """Run the Triton kernels as Python in a separate process, because Triton reads TRITON_INTERPRET on import."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", INTERPRETED_SCRIPT], env=environment, capture_output=True, text=True
    )
    assert process.stdout.strip() == "right", process.stderr
