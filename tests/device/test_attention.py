"""Test the installed attention kernels, and their share of a measured ceiling, on a real accelerator.

Run these tests with ``python -m pytest tests/device``.
"""

import functools

import pytest
from this_accelerator import ACCELERATOR

from mamf.api.measuring import find
from mamf.ceilings.ceiling import compute_mamfu
from mamf.engine.runner import RunSetup
from mamf.engine.strategies.rows import RowsStrategy
from mamf.operations.attention.operation import AttentionOperation, AttentionProblem, AttentionShape
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.plans import SWEEP, Plan
from mamf.plugins.discovery import find_entry_points_by_name, make_kernel

attention_kernel = functools.partial(make_kernel, AttentionOperation())

KERNELS = [
    name
    for name in sorted(find_entry_points_by_name("mamf.attention_kernels"))
    if attention_kernel(name).explain_unavailability(ACCELERATOR) is None
]
SHAPE = AttentionShape(2, 8, 8, 1024, 1024, 64, 64)


def measure_rows(name, shape=SHAPE, **fields):
    problem = AttentionProblem(ACCELERATOR.default_dtype, **fields)
    plan = Plan(SWEEP, "attention", (problem,), (name,), (shape,), seconds=0.2)
    return list(RowsStrategy(RunSetup(plan, ACCELERATOR, [(name, attention_kernel(name))])).yield_results())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_installed_kernel_is_right_or_says_why_not(name, direction, causal):
    shape = AttentionShape(2, 8, 8, 1024, 1024, 64, 64, causal)
    (row,) = measure_rows(name, shape, direction=direction)
    assert row.status in ("ok", "unsupported"), row.reason
    assert row.ok or row.reason
    assert not row.ok or row.peak_memory_bytes is None or row.peak_memory_bytes > 0


@pytest.mark.parametrize("name", KERNELS)
def test_grouped_heads_are_right_or_refused(name):
    (row,) = measure_rows(name, AttentionShape(1, 8, 2, 512, 512, 64, 64, causal=True))
    assert row.status in ("ok", "unsupported"), row.reason


# -- FlashAttention --------------------------------------------------------------------------------------------------

#: The head dimensions that each kernel does not support. All others in FLASH_SHAPES are right on Hopper, forward and
#: backward.
UNSUPPORTED_HEAD_DIMS_BY_KERNEL = {"flash-attn-2": ("192/128",), "flash-attn-3": (), "flash-attn-4": ()}
FLASH_SHAPES = {
    "64": "b2h8q1024k1024d64",
    "64, causal": "b2h8q1024k1024d64c",
    "128": "b2h8q1024k1024d128",
    "128, longer keys": "b1h8q300k1000d128c",
    "192/128": "b2h8q1024k1024d192v128",
    "192/128, causal": "b2h8q1024k1024d192v128c",
    "256": "b2h8q1024k1024d256",
    "256, causal": "b2h8q1024k1024d256c",
    "GQA": "b2h8kv2q1024k1024d128c",
    "window": "b2h8q1024k1024d128w100",
    "window, causal": "b2h8q1024k1024d128cw100",
}


@functools.cache
def measure_flash_shapes(name):
    """Measure a kernel on all FLASH_SHAPES, forward and backward, and on the first one also in float16.

    Return the rows by shape, direction and dtype.
    """
    shapes = tuple(map(AttentionShape.parse, FLASH_SHAPES.values()))
    problems = tuple(AttentionProblem("bfloat16", direction) for direction in ("fwd", "bwd"))
    plans = (
        Plan(SWEEP, "attention", problems, (name,), shapes, seconds=0.1),
        Plan(SWEEP, "attention", (AttentionProblem("float16"),), (name,), shapes[:1], seconds=0.1),
    )
    setups = [RunSetup(plan, ACCELERATOR, [(name, attention_kernel(name))]) for plan in plans]
    rows = [row for setup in setups for row in RowsStrategy(setup).yield_results()]
    return {(str(row.shape), row.problem.direction, row.problem.dtype): row for row in rows}


@pytest.fixture
def flash_kernel(request):
    """Return the name of a FlashAttention kernel. Skip the test if it is unavailable, or the device is not a Hopper."""
    name = request.param
    if reason := attention_kernel(name).explain_unavailability(ACCELERATOR):
        pytest.skip(str(reason))
    if ACCELERATOR.info.architecture != "sm_90":
        pytest.skip(f"the head dimensions of {name} are known for sm_90, not for {ACCELERATOR.info.architecture}")
    return name


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("shape", FLASH_SHAPES)
@pytest.mark.parametrize("flash_kernel", UNSUPPORTED_HEAD_DIMS_BY_KERNEL, indirect=True)
def test_flash_attention_is_right_and_supports_the_known_head_dimensions(flash_kernel, shape, direction):
    row = measure_flash_shapes(flash_kernel)[FLASH_SHAPES[shape], direction, "bfloat16"]
    expected = "unsupported" if shape.partition(",")[0] in UNSUPPORTED_HEAD_DIMS_BY_KERNEL[flash_kernel] else "ok"
    assert row.status == expected, row.reason


@pytest.mark.parametrize("flash_kernel", UNSUPPORTED_HEAD_DIMS_BY_KERNEL, indirect=True)
def test_a_flash_attention_that_was_built_without_float16_says_so(flash_kernel):
    row = measure_flash_shapes(flash_kernel)[FLASH_SHAPES["64"], "fwd", "float16"]
    assert row.ok or (row.status == "unsupported" and "build" in row.reason), row.reason


def test_scores_that_do_not_fit_in_memory_are_reported_in_a_row():
    long_shape = AttentionShape(16, 64, 64, 65536, 65536, 64, 64)
    (row,) = measure_rows("eager", long_shape)
    assert row.status == "out_of_memory"
    (next_row,) = measure_rows("eager")
    assert next_row.ok


def test_a_ceiling_is_found_and_no_kernel_is_above_it():
    ceiling = find(backend=ACCELERATOR, budget_seconds=20.0)
    ceilings = {(ceiling.problem.dtype, "burst"): ceiling}
    problem = AttentionProblem(ceiling.problem.dtype)
    plan = Plan(SWEEP, "attention", (problem,), ("sdpa",), (AttentionShape(4, 16, 16, 4096, 4096, 128, 128),))
    references = {ceiling.kernel: make_matmul_kernel(ceiling.kernel)}
    setup = RunSetup(plan, ACCELERATOR, [("sdpa", attention_kernel("sdpa"))])
    rows = list(RowsStrategy(setup, ceilings, references).yield_results())
    (row,) = (row for row in rows if not row.is_reference)
    assert 0.1 < compute_mamfu(row, ceilings) < 1.0
