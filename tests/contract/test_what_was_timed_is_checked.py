"""Test kernels that compute right results at first and cheat later: they must fail in every regime."""

import gc
import weakref

import pytest
import torch

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, ClassicRegime, StoppingRule, SustainedRegime
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_kernels import SdpaMath
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.operations.matmul.torch_kernels import TorchMm
from mamf.plugins.discovery import open_backend

SHAPE = MatmulShape(96, 80, 64)
ATTENTION = AttentionShape.parse("b1h2q64k64d32c")
REGIMES = {
    "burst": BurstRegime,
    "sustained": lambda backend: SustainedRegime(backend, visit_seconds=0.02),
    "classic": lambda backend: ClassicRegime(backend, warmup_launches=2, timed_launches=6, warmup_seconds=0.0),
}


@pytest.fixture
def backend(monkeypatch):
    opened = open_backend("cpu")
    brief = opened.sustained_traits.__class__(soak_seconds=0.02, settle_seconds=0.02)
    monkeypatch.setattr(type(opened), "sustained_traits", brief)
    monkeypatch.setattr(SustainedRegime, "max_settling_seconds", 0.02)
    monkeypatch.setattr("mamf.kernel.MAX_OPERAND_SETS", 3)  # so that each set is launched often
    return opened


class Cheat(TorchMm):
    """A matmul whose launches call ``trick``.

    ``trick`` receives a function that computes the right result, the number of the launch, the index of the operand
    set, and A.
    """

    name = "cheat"

    def __init__(self, trick):
        self.trick = trick

    def bind_operands(self, problem, a, b, c):
        right, count = lambda: torch.mm(a, b, out=c), [0]
        index = self.bound = getattr(self, "bound", -1) + 1

        def launch():
            count[0] += 1
            return self.trick(right, count[0], index, a)

        return launch, 1.0


def halves_its_operand(right, count, index, a):
    a.mul_(0.5)
    return right()


def serves_the_first_set_alone(right, count, index, a):
    return right() if index == 0 else None


def stops_after_two(right, count, index, a):
    return right() if count <= 2 else None


def stops_after_the_rehearsal(right, count, index, a):
    return right() if count <= 1 else None


def zeroes_its_operand_in_the_end(right, count, index, a):
    result = right()
    if count > 1:
        a.zero_()
    return result


def swaps_two_rows_of_its_operand(right, count, index, a):
    result = right()
    if count > 1:
        a[[0, 1]] = a[[1, 0]]
    return result


def row_of(kernel, backend, regime, problem=None, shape=SHAPE):
    problem = problem or MatmulProblem("float32", "float32")
    pool = backend.make_operand_pool(problem.data, problem.seed)
    started = REGIMES[regime](backend)
    started.prepare_device()
    return measure_row(kernel, problem, shape, started, pool, StoppingRule(max_seconds=0.05))


@pytest.mark.parametrize("regime", REGIMES)
def test_an_honest_kernel_passes(backend, regime):
    row = row_of(Cheat(lambda right, count, index, a: right()), backend, regime)
    assert row.ok, row.reason


@pytest.mark.parametrize(
    ("trick", "regimes"),
    [
        (halves_its_operand, REGIMES),
        (serves_the_first_set_alone, ["sustained"]),
        (stops_after_two, ["burst", "classic"]),
        (stops_after_the_rehearsal, REGIMES),
        (zeroes_its_operand_in_the_end, REGIMES),
        (swaps_two_rows_of_its_operand, REGIMES),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_cheat_passes(backend, trick, regimes):
    for regime in regimes:
        row = row_of(Cheat(trick), backend, regime)
        assert row.status == "wrong_result", (regime, row.status, row.reason)


@pytest.mark.parametrize(("direction", "regime"), [("fwd", "sustained"), ("bwd", "burst"), ("fwd+bwd", "burst")])
def test_an_attention_that_returns_memory_as_it_finds_it_is_caught(backend, regime, direction, monkeypatch):
    """Check kernels that return uninitialized memory, which may contain the right result of an earlier launch."""
    problem = AttentionProblem("float32", direction)
    kernel, counted = SdpaMath(), [0]
    right = kernel.attend

    def attend(shape, q, k, v):
        counted[0] += 1
        return right(shape, q, k, v)

    monkeypatch.setattr(kernel, "attend", attend)
    honest = row_of(kernel, backend, regime, problem, ATTENTION)
    assert honest.ok, honest.reason
    gradients = torch.autograd.grad
    launches, rehearsed = [0], 3 if regime == "sustained" else 1

    def lazy(*arguments, **options):
        launches[0] += 1
        found = gradients(*arguments, **options)
        return found if launches[0] <= rehearsed else tuple(map(torch.empty_like, found))

    if direction == "fwd":
        monkeypatch.setattr(
            kernel, "attend", lambda s, q, k, v: attend(s, q, k, v) if counted[0] < rehearsed else torch.empty_like(q)
        )
        counted[0] = 0
    else:
        monkeypatch.setattr(torch.autograd, "grad", lazy)
    assert row_of(kernel, backend, regime, problem, ATTENTION).status == "wrong_result"


class Compiling(TorchMm):
    """A matmul that compiles in the first launch with each operand set, and then appends "compiled" to ``told``."""

    name = "compiling"

    def __init__(self, told):
        self.told = told

    def bind_operands(self, problem, a, b, c):
        compiled = []

        def launch():
            if not compiled:
                compiled.append(self.told.append("compiled"))
            return torch.mm(a, b, out=c)

        return launch, 1.0


@pytest.mark.parametrize("regime", REGIMES)
def test_nothing_compiles_in_a_timed_or_soaked_launch(backend, regime, monkeypatch):
    told = []
    sample = type(REGIMES[regime](backend)).take_samples
    monkeypatch.setattr(
        type(REGIMES[regime](backend)), "take_samples", lambda self, *all: told.append("sampling") or sample(self, *all)
    )
    assert row_of(Compiling(told), backend, regime).ok
    assert told[-1] == "sampling"
    assert told.count("compiled") == (1 if regime != "sustained" else len(told) - 1)


class Exhausting(SdpaMath):
    """Attention that runs out of memory in its launch while a local variable refers to a tensor."""

    held = None

    def attend(self, shape, q, k, v):
        tensor = torch.empty(16)
        type(self).held = weakref.ref(tensor)
        raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_row_that_ran_out_of_memory_holds_none_of_it(backend, direction):
    """Check that tensors of the failed launch are freed at once.

    A reference cycle of exceptions would keep the traceback, and the tensors in it, until the next garbage collection.
    """
    gc.disable()
    try:
        row = row_of(Exhausting(), backend, "burst", AttentionProblem("float32", direction), ATTENTION)
        assert row.status == "out_of_memory"
        assert Exhausting.held() is None
    finally:
        gc.enable()
