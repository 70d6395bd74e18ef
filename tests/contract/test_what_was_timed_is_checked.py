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
    cpu = open_backend("cpu")
    short_traits = cpu.sustained_traits.__class__(soak_seconds=0.02, settle_seconds=0.02)
    monkeypatch.setattr(type(cpu), "sustained_traits", short_traits)
    monkeypatch.setattr(SustainedRegime, "max_settling_seconds", 0.02)
    monkeypatch.setattr("mamf.kernel.MAX_OPERAND_SETS", 3)  # so that each set is launched often
    return cpu


class Cheat(TorchMm):
    """A matmul whose launches call ``trick``.

    ``trick`` receives a function that computes the right result, the number of the launch, the index of the operand
    set, and A.
    """

    name = "cheat"

    def __init__(self, trick):
        self.trick = trick

    def bind_operands(self, problem, a, b, c):
        compute_right, count = lambda: torch.mm(a, b, out=c), [0]
        index = self.last_index = getattr(self, "last_index", -1) + 1

        def launch():
            count[0] += 1
            return self.trick(compute_right, count[0], index, a)

        return launch, 1.0


def halves_its_operand(compute_right, count, index, a):
    a.mul_(0.5)
    return compute_right()


def serves_only_the_first_set(compute_right, count, index, a):
    return compute_right() if index == 0 else None


def stops_after_two(compute_right, count, index, a):
    return compute_right() if count <= 2 else None


def stops_after_the_first_launch(compute_right, count, index, a):
    return compute_right() if count <= 1 else None


def zeroes_its_operand_afterwards(compute_right, count, index, a):
    result = compute_right()
    if count > 1:
        a.zero_()
    return result


def swaps_two_rows_of_its_operand(compute_right, count, index, a):
    result = compute_right()
    if count > 1:
        a[[0, 1]] = a[[1, 0]]
    return result


def measure_one_row(kernel, backend, regime, problem=None, shape=SHAPE):
    problem = problem or MatmulProblem("float32", "float32")
    pool = backend.make_operand_pool(problem.data, problem.seed)
    opened_regime = REGIMES[regime](backend)
    opened_regime.prepare_device()
    return measure_row(kernel, problem, shape, opened_regime, pool, StoppingRule(max_seconds=0.05))


@pytest.mark.parametrize("regime", REGIMES)
def test_an_honest_kernel_passes(backend, regime):
    row = measure_one_row(Cheat(lambda compute_right, count, index, a: compute_right()), backend, regime)
    assert row.ok, row.reason


@pytest.mark.parametrize(
    ("trick", "regimes"),
    [
        (halves_its_operand, REGIMES),
        (serves_only_the_first_set, ["sustained"]),
        (stops_after_two, ["burst", "classic"]),
        (stops_after_the_first_launch, REGIMES),
        (zeroes_its_operand_afterwards, REGIMES),
        (swaps_two_rows_of_its_operand, REGIMES),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_cheat_passes(backend, trick, regimes):
    for regime in regimes:
        row = measure_one_row(Cheat(trick), backend, regime)
        assert row.status == "wrong_result", (regime, row.status, row.reason)


@pytest.mark.parametrize(("direction", "regime"), [("fwd", "sustained"), ("bwd", "burst"), ("fwd+bwd", "burst")])
def test_an_attention_that_returns_uninitialized_memory_is_caught(backend, regime, direction, monkeypatch):
    """Check kernels that return uninitialized memory, which may contain the right result of an earlier launch."""
    problem = AttentionProblem("float32", direction)
    kernel, attend_count = SdpaMath(), [0]
    real_attend = kernel.attend

    def attend(shape, q, k, v):
        attend_count[0] += 1
        return real_attend(shape, q, k, v)

    monkeypatch.setattr(kernel, "attend", attend)
    honest = measure_one_row(kernel, backend, regime, problem, ATTENTION)
    assert honest.ok, honest.reason
    real_grad = torch.autograd.grad
    grad_count, honest_count = [0], 3 if regime == "sustained" else 1

    def lazy_grad(*arguments, **options):
        grad_count[0] += 1
        gradients = real_grad(*arguments, **options)
        return gradients if grad_count[0] <= honest_count else tuple(map(torch.empty_like, gradients))

    if direction == "fwd":
        monkeypatch.setattr(
            kernel,
            "attend",
            lambda shape, q, k, v: attend(shape, q, k, v) if attend_count[0] < honest_count else torch.empty_like(q),
        )
        attend_count[0] = 0
    else:
        monkeypatch.setattr(torch.autograd, "grad", lazy_grad)
    assert measure_one_row(kernel, backend, regime, problem, ATTENTION).status == "wrong_result"


class Compiling(TorchMm):
    """A matmul that compiles in the first launch with each operand set, and then appends "compiled" to ``events``."""

    name = "compiling"

    def __init__(self, events):
        self.events = events

    def bind_operands(self, problem, a, b, c):
        compiled = []

        def launch():
            if not compiled:
                compiled.append(self.events.append("compiled"))
            return torch.mm(a, b, out=c)

        return launch, 1.0


@pytest.mark.parametrize("regime", REGIMES)
def test_nothing_compiles_in_a_timed_or_soaked_launch(backend, regime, monkeypatch):
    events = []
    regime_class = type(REGIMES[regime](backend))
    take_samples = regime_class.take_samples
    monkeypatch.setattr(
        regime_class,
        "take_samples",
        lambda self, *arguments: events.append("sampling") or take_samples(self, *arguments),
    )
    assert measure_one_row(Compiling(events), backend, regime).ok
    assert events[-1] == "sampling"
    assert events.count("compiled") == (1 if regime != "sustained" else len(events) - 1)


class Exhausting(SdpaMath):
    """Attention that runs out of memory in its launch while a local variable refers to a tensor."""

    tensor_reference = None

    def attend(self, shape, q, k, v):
        tensor = torch.empty(16)
        type(self).tensor_reference = weakref.ref(tensor)
        raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_tensors_of_a_launch_that_runs_out_of_memory_are_freed_at_once(backend, direction):
    """Check that tensors of the failed launch are freed at once.

    A reference cycle of exceptions would keep the traceback, and the tensors in it, until the next garbage collection.
    """
    gc.disable()
    try:
        row = measure_one_row(Exhausting(), backend, "burst", AttentionProblem("float32", direction), ATTENTION)
        assert row.status == "out_of_memory"
        assert Exhausting.tensor_reference() is None
    finally:
        gc.enable()
