"""Test the Gluon matmul kernel for Hopper: ``python -m pytest tests/device/test_hopper_matmuls.py``."""

import pytest
from this_accelerator import ACCELERATOR

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape

#: Only whole tiles; partial tiles at every border; fewer tiles than compute units; many tiles per program.
SHAPES = [(768, 512, 1024), (1001, 1152, 1152), (64, 128, 8192), (8192, 8192, 8192)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_tile_is_right(dtype, shape):
    problem, shape = MatmulProblem(dtype, dtype), MatmulShape(*shape)
    kernel = make_matmul_kernel("gluon")
    if reason := kernel.explain_unavailability(ACCELERATOR):
        pytest.skip(str(reason))
    pool = ACCELERATOR.make_operand_pool(problem.data, problem.seed)
    regime = BurstRegime(ACCELERATOR)
    regime.prepare_device()
    for variant in kernel.list_variants(ACCELERATOR, problem, shape):
        row = measure_row(variant, problem, shape, regime, pool, StoppingRule(max_seconds=0.1))
        assert row.ok, (variant.name, row.reason)
