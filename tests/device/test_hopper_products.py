"""Products of our own for Hopper on a card: ``python -m pytest tests/device/test_hopper_products.py``."""

import pytest

from mamf.engine.measure import measure
from mamf.engine.regimes import Burst, StoppingRule
from mamf.errors import MamfError
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.selection import kernel
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins.discovery import open_backend

try:
    ACCELERATOR = open_backend("auto")
except MamfError:
    ACCELERATOR = None
if ACCELERATOR is None or not ACCELERATOR.is_accelerator:
    pytest.skip("no accelerator on this machine", allow_module_level=True)

#: Whole tiles, tiles beyond every border, fewer tiles than compute units, and many per program.
SHAPES = [(768, 512, 1024), (1001, 1152, 1152), (64, 128, 8192), (8192, 8192, 8192)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_tile_is_right(dtype, shape):
    problem, shape = MatmulProblem(dtype, dtype), MatmulShape(*shape)
    found = kernel("gluon")
    if reason := found.unavailable(ACCELERATOR):
        pytest.skip(str(reason))
    pool = ACCELERATOR.operand_pool(problem.data, problem.seed)
    regime = Burst(ACCELERATOR)
    regime.start()
    for variant in found.variants(ACCELERATOR, problem, shape):
        row = measure(variant, problem, shape, regime, pool, StoppingRule(seconds=0.1))
        assert row.ok, (variant.name, row.reason)
