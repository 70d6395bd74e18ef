"""Test the memory column: it counts the memory that one launch needs, and no other memory of the process."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mamf.backend import MIB
from mamf.engine.measure import measure_launch_memory_bytes
from mamf.engine.regimes.base import CheckedKernel
from mamf.kernel import Buffer
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_kernels import SdpaMath
from mamf.operations.model.operation import ModelProblem, ModelShape
from mamf.operations.model.torch_model import TorchModel

SHAPE = AttentionShape.parse("b2h4q128k128d64")
SCORES = 2 * 4 * 128 * 128 * 4  # bytes in float32
OUTPUT = OPERAND = 2 * 4 * 128 * 64 * 4
WORKSPACE = 3 * MIB


class Allocator(TorchDispatchMode):
    """A dispatch mode that counts the requested and allocated bytes of all live storages, as torch.cuda does.

    A caching allocator allocates whole blocks, and reuses free blocks that are larger than requested. So each storage
    has ``spare_bytes`` more bytes than requested.
    """

    def __init__(self):
        super().__init__()
        self.live_storages = {}
        self.spare_bytes = 512
        self.peak = {"requested": 0, "allocated": 0}

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        if storages.keys() - self.live_storages.keys():  # otherwise no count rises
            new_storages = {
                key: (StorageWeakRef(storage), storage.nbytes(), self.spare_bytes) for key, storage in storages.items()
            }
            self.live_storages = new_storages | self.live_storages
            self.peak = {name: max(self.peak[name], count) for name, count in self.count_bytes().items()}
        return result

    def count_bytes(self):
        self.live_storages = {key: entry for key, entry in self.live_storages.items() if not entry[0].expired()}
        requested = sum(nbytes for _, nbytes, _ in self.live_storages.values())
        return {
            "requested": requested,
            "allocated": requested + sum(spare for _, _, spare in self.live_storages.values()),
        }

    def install(self, module):
        module.memory_stats = self.memory_stats
        module.memory_allocated = lambda device: self.count_bytes()["allocated"]
        module.max_memory_allocated = lambda device: self.peak["allocated"]
        module.reset_peak_memory_stats = self.reset_peak

    def memory_stats(self, device):
        current = self.count_bytes()
        return {
            f"{name}_bytes.all.{moment}": count
            for name in self.peak
            for moment, count in (("current", current[name]), ("peak", self.peak[name]))
        }

    def reset_peak(self, device):
        self.peak = self.count_bytes()


class WithWorkspace(SdpaMath):
    """Attention that allocates a workspace in its first call and keeps it, as vendors' libraries do."""

    def __init__(self, workspace=None):
        self.workspace = workspace

    def attend(self, shape, q, k, v):
        if self.workspace is None:
            self.workspace = torch.zeros(WORKSPACE, dtype=torch.uint8)
        return super().attend(shape, q, k, v)


@pytest.fixture
def allocator(cuda):
    with Allocator() as counting_allocator:
        counting_allocator.install(cuda.torch.cuda)
        yield counting_allocator


def measure_bytes(backend, kernel, direction, sets=1):
    problem = AttentionProblem("float32", direction)
    pool = backend.make_operand_pool("normal", 0)
    with kernel.apply_settings(backend, problem):
        checked = CheckedKernel(kernel.prepare(backend, problem, SHAPE, pool, sets))
        checked.warm_up_and_verify(backend)
        return measure_launch_memory_bytes(backend, checked, problem, SHAPE)


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_memory_does_not_depend_on_other_memory_of_the_process(cuda, allocator, direction):
    backend = cuda.kind(0)
    expected = measure_bytes(backend, SdpaMath(), direction)
    other_pool = backend.make_operand_pool("normal", 1)
    other_pool.take_buffer("a", *Buffer(4 * MIB, "bfloat16"))
    other_tensors = [torch.randn(SHAPE.batch, SHAPE.heads, 128, 64) for _ in range(20)]
    backend.flush_cache()
    allocator.spare_bytes = 2 * MIB  # as if all free blocks were large
    assert measure_bytes(backend, SdpaMath(), direction) == pytest.approx(expected, rel=0.01)
    assert measure_bytes(backend, WithWorkspace(), direction) == pytest.approx(expected, rel=0.01)
    assert measure_bytes(backend, WithWorkspace(torch.zeros(WORKSPACE)), direction) == pytest.approx(expected, rel=0.01)
    assert measure_bytes(backend, SdpaMath(), direction, sets=3) == pytest.approx(expected, rel=0.01)
    del other_tensors  # they stay allocated until here


def test_memory_includes_operands_output_and_what_the_kernel_allocates(cuda, allocator):
    nbytes = measure_bytes(cuda.kind(0), SdpaMath(), "fwd")
    assert 3 * OPERAND + OUTPUT + SCORES <= nbytes <= 3 * OPERAND + 4 * OUTPUT + 4 * SCORES


def test_memory_of_a_backward_pass_includes_what_its_forward_pass_saved(cuda, allocator):
    """Check that the saved probabilities and output count, although they are allocated before the measured launch."""
    kernel, backend, problem = SdpaMath(), cuda.kind(0), AttentionProblem("float32", "bwd")
    with kernel.apply_settings(backend, problem):
        prepared = kernel.prepare(backend, problem, SHAPE, backend.make_operand_pool("normal", 0))
    assert prepared.extra_bytes_per_set >= SCORES + OUTPUT
    gradients = 3 * OPERAND
    assert measure_bytes(backend, kernel, "bwd") >= 4 * OPERAND + prepared.extra_bytes_per_set + gradients


def test_memory_of_a_models_step_includes_parameters_gradients_and_moments(cuda, allocator):
    backend, kernel, shape = cuda.kind(0), TorchModel("sdpa-math"), ModelShape(1, 16)
    sizes = {"d_model": 64, "d_ff": 256, "layers": 1, "heads": 2, "kv_heads": 2, "vocabulary": 997, "dtype": "float32"}

    def measure_phase_bytes(phase, sets=1):
        problem = ModelProblem(**sizes, phase=phase)
        checked = CheckedKernel(kernel.prepare(backend, problem, shape, backend.make_operand_pool("normal", 0), sets))
        checked.warm_up_and_verify(backend)
        return measure_launch_memory_bytes(backend, checked, problem, shape)

    parameters = 4 * ModelProblem(**sizes).count_parameters(shape)
    backward, step = measure_phase_bytes("forward-backward"), measure_phase_bytes("step")
    assert parameters < measure_phase_bytes("forward") < 2 * parameters
    assert backward > 2 * parameters
    assert step - backward == pytest.approx(2 * parameters, rel=0.1)
    assert measure_phase_bytes("step", sets=3) == pytest.approx(step, rel=0.01)


@pytest.mark.parametrize("reserved_bytes", [None, 7 * MIB])
def test_peak_reserved_memory_is_none_if_torch_does_not_report_it(cuda, allocator, reserved_bytes):
    backend = cuda.kind(0)
    stats = {} if reserved_bytes is None else {"reserved_bytes.all.peak": reserved_bytes}
    cuda.torch.cuda.memory_stats = lambda device: allocator.memory_stats(device) | stats
    assert backend.read_peak_reserved_memory_bytes() == reserved_bytes
