"""Test memory bandwidth on a real accelerator: ``python -m pytest tests/device/test_bandwidth.py``."""

import pytest
from this_accelerator import ACCELERATOR

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.bandwidth.operation import ACCESS_PATTERNS, BandwidthShape
from mamf.plugins.discovery import make_kernel, make_operation

BANDWIDTH = make_operation("bandwidth")
# The arrays of a pattern with the shape SMALL (at most three, 16 MiB each) fit in a cache of 60 MiB. A pass over them
# still takes longer than the launch of a kernel.
LARGE, SMALL = BandwidthShape(2**30), BandwidthShape(2**24)


@pytest.fixture
def burst():
    regime = BurstRegime(ACCELERATOR)
    regime.prepare_device()
    return regime


@pytest.fixture(params=["torch", "triton"])
def kernel(request):
    kernel = make_kernel(BANDWIDTH, request.param)
    reason = kernel.explain_unavailability(ACCELERATOR)
    if reason:
        pytest.skip(str(reason))
    return kernel


def measure_kernel(kernel, regime, shape, **fields):
    problem = BANDWIDTH.make_problem(ACCELERATOR, fields)
    limit = BANDWIDTH.find_max_possible_rate(ACCELERATOR.info, problem, shape)
    pool = ACCELERATOR.make_operand_pool(problem.data, problem.seed)
    row = measure_row(kernel, problem, shape, regime, pool, StoppingRule(max_seconds=0.3), limit)
    print(kernel.name, problem.pattern, problem.dtype, shape, row.status, row.ok and f"{row.best_rate:.3f} TB/s")
    return row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("pattern", ACCESS_PATTERNS)
def test_every_pattern_is_right_and_below_the_peak_of_the_memory(kernel, burst, pattern, dtype):
    row = measure_kernel(kernel, burst, LARGE, pattern=pattern, dtype=dtype)
    assert row.ok, row.reason
    peak = BANDWIDTH.find_peak_rate(ACCELERATOR.info, row.problem)
    assert peak is None or 0.3 * peak < row.best_rate * 1e12 < 1.02 * peak * 1.1


# Leave out ``write``: even the first pass writes to the cache, so more passes are not faster.
@pytest.mark.parametrize("pattern", [each for each in ACCESS_PATTERNS if each != "write"])
def test_many_passes_show_the_cache(kernel, burst, pattern):
    one_pass = measure_kernel(kernel, burst, SMALL, pattern=pattern)
    many_passes = measure_kernel(kernel, burst, SMALL, pattern=pattern, warm=64)
    assert one_pass.ok, one_pass.reason
    assert many_passes.ok, many_passes.reason
    assert many_passes.best_rate > one_pass.best_rate
