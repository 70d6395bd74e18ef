"""Test every operation, and the attention kernels of this machine, against the contracts in ``mamf.testing``."""

import pytest

from mamf.operations.attention.operation import AttentionOperation
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.plugins.discovery import list_kernel_names, make_kernel, make_operation, open_backend
from mamf.testing import AttentionKernelContract, OperationContract, SimulatedBackend

#: For each operation: a kernel that runs on any CPU.
CPU_KERNELS = {
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
SMALL_SHAPES = {
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
SMALL_PROBLEM_FIELDS = {"model": {"d_model": 32, "d_ff": 64, "layers": 1, "heads": 2, "kv_heads": 2, "vocabulary": 97}}


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_no_kernel_of_a_real_device_is_available_in_virtual_time(name):
    operation = make_operation(name)
    for kernel_name in list_kernel_names(operation):
        unavailable = make_kernel(operation, kernel_name).explain_unavailability(SimulatedBackend())
        assert unavailable is not None, kernel_name
        assert unavailable.reason
        assert unavailable.remedy


@pytest.mark.parametrize("name", CPU_KERNELS)
class TestOperation(OperationContract):
    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def operation(self, name, monkeypatch):
        operation = make_operation(name)
        make_problem = operation.make_problem
        monkeypatch.setattr(
            operation,
            "make_problem",
            lambda backend, fields: make_problem(backend, {**SMALL_PROBLEM_FIELDS.get(name, {}), **fields}),
        )
        operation.shape_example = SMALL_SHAPES.get(name, operation.shape_example)
        return operation

    @pytest.fixture
    def kernel(self, name):
        return CPU_KERNELS[name]()


@pytest.mark.parametrize("name", ["sdpa", "sdpa-math", "sdpa-flash", "eager"])
class TestAttentionKernel(AttentionKernelContract):
    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def kernel(self, name):
        return make_kernel(AttentionOperation(), name)


def test_a_dry_run_names_the_dtypes_that_a_kernel_does_not_support(run):
    command = ["find", "--operation", "grouped", "--backend", "cpu", "--kernel", "loop", "--dry-run", "--dtype"]
    code, out, _ = run(*command, "fp8_rowwise", "float16")
    assert code == 0
    assert "kernel loop does not support fp8_rowwise, so these rows will have no result" in out.splitlines()
    code, out, _ = run(*command, "float16")
    assert (code, "does not support" in out) == (0, False)
