"""Test every operation, and the attention kernels of this machine, against the contracts in ``mamf.testing``."""

import pytest

from mamf.operations.attention.operation import AttentionOperation
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.plugins.discovery import list_kernel_names, make_kernel, make_operation, open_backend
from mamf.testing import AttentionKernelContract, OperationContract, SimulatedBackend

#: For each operation: a kernel that runs on any CPU.
OF_CPU = {
    "attention": lambda: make_kernel(AttentionOperation(), "sdpa-math"),
    "bandwidth": lambda: make_kernel(make_operation("bandwidth"), "torch"),
    "batched": lambda: make_kernel(make_operation("batched"), "torch.bmm"),
    "grouped": lambda: make_kernel(make_operation("grouped"), "loop"),
    "collective": lambda: make_kernel(make_operation("collective"), "torch.distributed"),
    "copies": lambda: make_kernel(make_operation("copies"), "torch"),
    "decode": lambda: make_kernel(make_operation("decode"), "sdpa-kvcache"),
    "matmul": lambda: make_matmul_kernel("torch.mm"),
    "model": lambda: make_kernel(make_operation("model"), "torch[sdpa-math]"),
    "overlap": lambda: make_kernel(make_operation("overlap"), "pair"),
}
SMALL = {
    "attention": "b1h2q64k64d32c",
    "bandwidth": "64KiB",
    "batched": "3x48x40x32",
    "copies": "64KiB",
    "decode": "b2h4kv2q1c100d32",
    "grouped": "e4t96n40k32",
    "matmul": "96x80x64",
    "model": "b1s16",
    "overlap": "96x80x64+64KiB",
}
#: For operations whose default problem is large even with a small shape: the fields of a small problem.
FIELDS = {"model": {"d_model": 32, "d_ff": 64, "layers": 1, "heads": 2, "kv_heads": 2, "vocabulary": 97}}


@pytest.mark.parametrize("name", OF_CPU)
def test_no_kernel_of_a_real_device_is_available_in_virtual_time(name):
    of = make_operation(name)
    for each in list_kernel_names(of):
        unavailable = make_kernel(of, each).explain_unavailability(SimulatedBackend())
        assert unavailable is not None, each
        assert unavailable.reason
        assert unavailable.remedy


@pytest.mark.parametrize("name", OF_CPU)
class TestOperation(OperationContract):
    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def operation(self, name, monkeypatch):
        found = make_operation(name)
        usual = found.make_problem
        monkeypatch.setattr(
            found, "make_problem", lambda backend, asked: usual(backend, {**FIELDS.get(name, {}), **asked})
        )
        found.shape_example = SMALL.get(name, found.shape_example)
        return found

    @pytest.fixture
    def kernel(self, name):
        return OF_CPU[name]()


@pytest.mark.parametrize("name", ["sdpa", "sdpa-math", "sdpa-flash", "eager"])
class TestAttentionKernel(AttentionKernelContract):
    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def kernel(self, name):
        return make_kernel(AttentionOperation(), name)
