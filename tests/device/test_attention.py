"""The attention kernels that are installed, and a ceiling, on a real accelerator: ``python -m pytest tests/device``."""

import pytest

from mamf.api.measuring import find
from mamf.ceilings.share import mamfu
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.errors import MamfError
from mamf.operations.attention.operation import attention_kernel
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.operations.matmul.selection import kernel
from mamf.plans import SWEEP, Plan
from mamf.plugins.discovery import ATTENTION_KERNELS, find_registered, open_backend

try:
    ACCELERATOR = open_backend("auto")
except MamfError:
    ACCELERATOR = None
if ACCELERATOR is None or not ACCELERATOR.is_accelerator:
    pytest.skip("no accelerator on this machine", allow_module_level=True)

KERNELS = [
    name
    for name in sorted(find_registered(ATTENTION_KERNELS))
    if attention_kernel(name).unavailable(ACCELERATOR) is None
]
SHAPE = AttentionShape(2, 8, 8, 1024, 1024, 64, 64)


def rows_of(name, shape=SHAPE, **fields):
    problem = AttentionProblem(ACCELERATOR.default_dtype, **fields)
    plan = Plan(SWEEP, "attention", (problem,), (name,), (shape,), seconds=0.2)
    return list(KernelsSweep(plan, [attention_kernel(name)], ACCELERATOR).results())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_installed_kernel_is_right_or_says_why_not(name, direction, causal):
    shape = AttentionShape(2, 8, 8, 1024, 1024, 64, 64, causal)
    (row,) = rows_of(name, shape, direction=direction)
    assert row.status in ("ok", "unsupported"), row.reason
    assert row.ok or row.reason
    assert not row.ok or row.peak_memory_bytes is None or row.peak_memory_bytes > 0


@pytest.mark.parametrize("name", KERNELS)
def test_grouped_heads_are_right_or_refused(name):
    (row,) = rows_of(name, AttentionShape(1, 8, 2, 512, 512, 64, 64, causal=True))
    assert row.status in ("ok", "unsupported"), row.reason


def test_scores_that_do_not_fit_are_a_row():
    long = AttentionShape(16, 64, 64, 65536, 65536, 64, 64)
    (row,) = rows_of("eager", long)
    assert row.status == "out_of_memory"
    (after,) = rows_of("eager")
    assert after.ok


def test_a_ceiling_is_found_and_no_kernel_is_above_it():
    ceiling = find(backend=ACCELERATOR, budget_seconds=20.0)
    ceilings = {(ceiling.problem.dtype, "burst"): ceiling}
    problem = AttentionProblem(ceiling.problem.dtype)
    plan = Plan(SWEEP, "attention", (problem,), ("sdpa",), (AttentionShape(4, 16, 16, 4096, 4096, 128, 128),))
    references = {ceiling.kernel: kernel(ceiling.kernel)}
    rows = list(KernelsSweep(plan, [attention_kernel("sdpa")], ACCELERATOR, ceilings, references).results())
    (row,) = (row for row in rows if not row.is_reference)
    assert 0.1 < mamfu(row, ceilings) < 1.0
