import pytest
from mamf_layer_norm import LayerNorm, TorchLayerNorm

import mamf
from mamf.testing import OperationContract


class TestLayerNorm(OperationContract):
    @pytest.fixture
    def backend(self):
        return mamf.open_backend("cpu")

    @pytest.fixture
    def operation(self):
        return LayerNorm()

    @pytest.fixture
    def kernel(self):
        return TorchLayerNorm()
