import pytest
from mamf_layer_norm import LayerNorm, LayerNormProblem, Rows, TorchLayerNorm

import mamf
from mamf.testing import AnyKernelContract, OperationContract


class TestKernel(AnyKernelContract):
    backend = pytest.fixture(lambda self: mamf.open_backend("cpu"))
    kernel = pytest.fixture(lambda self: TorchLayerNorm())
    problem = pytest.fixture(lambda self: LayerNormProblem())
    shape = pytest.fixture(lambda self: Rows(64, 256))


class TestOperation(OperationContract):
    backend, kernel = TestKernel.backend, TestKernel.kernel
    operation = pytest.fixture(lambda self: LayerNorm())
