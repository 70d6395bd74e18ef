"""Gluon's language for Hopper as Python: warps are threads, and all that is asynchronous happens as late as it may.

A product reads its operands when it is waited for, a store reads its block when it is waited for. So a stage that is
filled before it has been read gives a wrong result, and a barrier that nobody completes ends the test.
"""

import math
import sys
import threading
import types
from types import SimpleNamespace

import torch

_PATIENCE = 20.0  # seconds until a barrier counts as deadlocked


def dtype_of(tensor):
    return SimpleNamespace(torch=tensor.dtype, primitive_bitwidth=8 * tensor.element_size())


class Block:
    """A tensor in registers; ``pending``: a product under way writes it."""

    def __init__(self, values):
        self._values, self.pending = values, False

    @property
    def values(self):
        assert not self.pending, "a product is read before it is waited for"
        return self._values

    @property
    def shape(self):
        return self._values.shape

    def reshape(self, shape):
        return Block(self.values.reshape(shape))

    def permute(self, order):
        return Block(self.values.permute(order))

    def split(self):
        return [Block(half) for half in self.values.unbind(-1)]

    def to(self, dtype):
        return Block(self.values.to(dtype.torch))


class Shared:
    """Shared memory; values beyond what was ever stored are not numbers."""

    def __init__(self, values, dtype=None):
        self.values, self.dtype = values, dtype

    @property
    def shape(self):
        return tuple(self.values.shape)

    def index(self, at):
        assert 0 <= at < len(self.values)
        return Shared(self.values[at], self.dtype) if isinstance(self.values, torch.Tensor) else self.values[at]

    def slice(self, start, length):
        return Shared(self.values[start : start + length], self.dtype)

    def permute(self, order):
        return Shared(self.values.permute(order), self.dtype)

    def store(self, block):
        assert block.values.dtype == self.dtype.torch
        self.values.copy_(block.values)
        here().is_fenced = False


class Barrier:
    def __init__(self):
        self.changed = threading.Condition()
        self.count = self.phase = self.arrived = self.nbytes = 0

    def update(self, arrived=0, nbytes=0):
        with self.changed:
            self.arrived, self.nbytes = self.arrived + arrived, self.nbytes + nbytes
            assert self.arrived <= self.count, "more arrivals than the barrier has"
            if self.arrived == self.count and self.nbytes == 0:
                self.phase, self.arrived = self.phase + 1, 0
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, _PATIENCE), "deadlock"


class Barriers:
    def __init__(self, count):
        self.values = [Barrier() for _ in range(count)]

    def index(self, at):
        return self.values[at]


class Descriptor:
    def __init__(self, base, block_shape, layout):
        assert base.data_ptr() % 16 == 0
        assert base.stride(1) == 1
        assert base.stride(0) * base.element_size() % 16 == 0
        assert all(0 < size <= 256 for size in block_shape)
        self.base, self.block_shape, self.layout, self.dtype = base, block_shape, layout, dtype_of(base)

    def inside(self, at):
        """The part of a block that lies in the tensor."""
        return self.base[tuple(slice(start, start + size) for start, size in zip(at, self.block_shape, strict=True))]


_local = threading.local()


def here():
    """What a group of warps has under way."""
    if not hasattr(_local, "group"):
        _local.group = SimpleNamespace(products=[], stores=[], is_fenced=True)
    return _local.group


def warpgroup_mma(a, b, acc, is_async=False):
    assert is_async
    result = Block(torch.full(tuple(acc.shape), math.nan))

    def finish():
        result._values = a.values.float() @ b.values.float() + acc._values
        result.pending = False

    result.pending = True
    here().products.append(finish)
    return result


def warpgroup_mma_wait(outstanding, deps):
    while len(here().products) > outstanding:
        here().products.pop(0)()
    return deps if len(deps) > 1 else deps[0]


def load_block(descriptor, at, barrier, result):
    part = descriptor.inside(at)
    result.values.zero_()
    result.values[: part.shape[0], : part.shape[1]] = part
    barrier.update(nbytes=-result.values.numel() * result.values.element_size())


def expect(barrier, nbytes):
    with barrier.changed:
        barrier.nbytes += nbytes
    barrier.update(arrived=1)


def store_block(descriptor, at, source):
    assert here().is_fenced, "the copy engine does not see what was stored before a fence"

    def finish():
        part = descriptor.inside(at)
        part.copy_(source.values[: part.shape[0], : part.shape[1]])

    here().stores.append(finish)


def wait_for_stores(outstanding):
    while len(here().stores) > outstanding:
        here().stores.pop(0)()


def allocate(dtype, shape, layout):
    if dtype == "int64":
        return Barriers(shape[0])
    return Shared(torch.full(shape, math.nan, dtype=torch.float32).to(dtype.torch), dtype)


class Program:
    """A program of the grid: its groups of warps run as threads."""

    number, count = 0, 1

    def specialize(self, groups, warps, registers):
        assert len(warps) == len(registers) == len(groups) - 1
        assert all(each % 8 == 0 for each in registers)
        failures = []

        def run(function, arguments):
            _local.__dict__.clear()
            try:
                function(*arguments)
                assert not here().products
                assert not here().stores
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=group) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class Function:
    """A function of Gluon or Triton: called from another one, or launched on a grid."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *arguments):
        return self.fn(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **options):
            PROGRAM.count = grid[0]
            for PROGRAM.number in range(grid[0]):
                self.fn(*arguments, **options)

        return launch


PROGRAM = Program()


def install(monkeypatch):
    """Make ``import triton`` and Gluon's modules this simulation, for modules of kernels that are imported anew."""
    package = sys.modules["mamf.operations.matmul"]
    for name in ("triton_kernels", "gluon_kernels"):
        # Set first, so that what is imported during the test is gone after it.
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", None)
        monkeypatch.setattr(package, name, None, raising=False)
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}")
        monkeypatch.delattr(package, name)
    language = {
        "constexpr": lambda value: value,
        "static_range": range,
        "program_id": lambda axis: PROGRAM.number,
        "num_programs": lambda axis: PROGRAM.count,
        "cdiv": lambda a, b: -(-a // b),
        "zeros": lambda shape, dtype, layout: Block(torch.zeros(shape)),
        "allocate_shared_memory": allocate,
        "warp_specialize": PROGRAM.specialize,
        "float32": "float32",
        "int64": "int64",
        **dict.fromkeys(("NVMMADistributedLayout", "NVMMASharedLayout"), lambda *a, **options: a),
    }
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: setattr(barrier, "count", count),
        expect=expect,
        wait=lambda barrier, parity: barrier.wait(parity),
        arrive=lambda barrier, pred=True: barrier.update(arrived=1) if pred else None,
    )
    copies = SimpleNamespace(
        async_copy_global_to_shared=load_block, async_copy_shared_to_global=store_block, store_wait=wait_for_stores
    )
    hopper = {
        "fence_async_shared": lambda: setattr(here(), "is_fenced", True),
        "mbarrier": barriers,
        "tma": copies,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
    }
    contents = {
        "triton": {"jit": Function},
        "triton.language": {"constexpr": object},
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": Function},
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia": {},
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": SimpleNamespace(from_tensor=Descriptor)},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
