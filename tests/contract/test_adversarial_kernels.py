"""Test verification on the CPU: broken and cheating kernels fail, and honest kernels of all dtypes pass."""

import contextlib
import functools
import random
import secrets

import pytest
import torch

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule, SustainedRegime
from mamf.engine.regimes.base import CheckedKernel, WrongResultError, explain_skipped_work
from mamf.errors import UsageError
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_kernels import SdpaMath
from mamf.operations.batched import BatchedProblem, BatchedShape
from mamf.operations.batched_kernels import Bmm
from mamf.operations.grouped import GroupedProblem, GroupedShape
from mamf.operations.grouped_kernels import MatmulLoop
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.operations.matmul.scaled_formats import DequantizedMatmul
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.operations.matmul.torch_kernels import IntMm, TorchMm
from mamf.operations.operand_sets import SignFlipper
from mamf.plugins.discovery import open_backend

pytestmark = pytest.mark.usefixtures("use_one_torch_thread")
SHAPE = MatmulShape(512, 384, 256)
OUTPUT_DTYPES = {
    "tf32": "float32",
    "int8": "int32",
    "mxfp8": "bfloat16",
    "fp8_rowwise": "bfloat16",
    "nvfp4": "bfloat16",
}
RANDOM = random.Random(0)


@pytest.fixture(autouse=True)
def seed_randomness(monkeypatch):
    """Seed the faults, and the choices that verification draws from fresh entropy, so that every run is the same."""
    RANDOM.seed(0)
    monkeypatch.setattr(secrets, "randbits", RANDOM.getrandbits)
    monkeypatch.setattr(secrets, "randbelow", RANDOM.randrange)
    monkeypatch.setattr(secrets, "choice", RANDOM.choice)


@pytest.fixture(scope="module")
def cpu():
    return open_backend("cpu")


def make_problem(dtype):
    return MatmulProblem(dtype, OUTPUT_DTYPES.get(dtype, dtype))


def prepare_and_verify(kernel, backend, problem, shape, sets=1):
    pool = backend.make_operand_pool(problem.data, problem.seed)
    with kernel.apply_settings(backend, problem):
        checked = CheckedKernel(kernel.prepare(backend, problem, shape, pool, sets))
        checked.warm_up_and_verify(backend)
    return checked


class Adversary(TorchMm):
    """A matmul kernel whose launches call ``multiply(a, b, c)``."""

    name = "adversary"

    def __init__(self, multiply):
        self.multiply = multiply

    def bind_operands(self, problem, a, b, c):
        return lambda: self.multiply(a, b, c), 1.0


def multiply_then(spoil):
    """Return a function that computes an honest matmul, and then calls ``spoil(c)``."""
    return lambda a, b, c: spoil(torch.mm(a, b, out=c))


def zero_a_tile(c):
    row, column = (RANDOM.randrange(0, size, 128) for size in c.shape)
    c[row : row + 128, column : column + 128] = 0


def zero_sixteen_of_a_row(c):
    row, column = RANDOM.randrange(c.shape[0]), RANDOM.randrange(c.shape[1] - 16)
    c[row, column : column + 16] = 0


def zero_sixteen_anywhere(c):
    c.view(-1)[torch.tensor(RANDOM.sample(range(c.numel()), 16))] = 0


def multiply_and_scale(a, b, c):
    c.copy_(a.to(torch.float64) @ b.to(torch.float64) * 1.002)


def drop_the_last_of_k(a, b, c):
    torch.mm(a[:, :-1], b[:-1], out=c)


def multiply_half_of_k(a, b, c):
    torch.mm(a[:, ::2] * 2**0.5, b[::2], out=c)


def round_operands(dtype):
    return lambda a, b, c: c.copy_(a.to(dtype).to(torch.float64) @ b.to(dtype).to(torch.float64))


def compute_a_sample(a, b, c):
    """Compute only a sample of rows and columns. Verification used to choose this sample with the seed of the run."""
    chooser = random.Random(0)
    rows, columns = (sorted({0, size - 1, *chooser.sample(range(size), 14)}) for size in c.shape)
    c.zero_()
    c[torch.tensor(rows)[:, None], torch.tensor(columns)] = (a[rows] @ b[:, columns]).to(c.dtype)


class Lazy(torch.Tensor):
    """A tensor that computes its matmul only when someone reads it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [each.compute() if isinstance(each, Lazy) else each for each in args]
        return function(*plain, **(kwargs or {}))


def return_lazy_tensor(a, b, c):
    lazy = torch.empty_like(c).as_subclass(Lazy)
    lazy.compute = lambda: torch.mm(a, b)
    return lazy


FAULTS = {
    "a zeroed tile": (multiply_then(zero_a_tile), ("bfloat16", "float16", "tf32", "float32", "float64")),
    "16 zeros in a row": (multiply_then(zero_sixteen_of_a_row), ("float16", "float32", "float64")),
    "16 zeros anywhere": (multiply_then(zero_sixteen_anywhere), ("bfloat16", "float16", "float32", "float64")),
    "times 1.002": (multiply_and_scale, ("bfloat16", "float16", "tf32", "float32", "float64")),
    "the last k dropped": (drop_the_last_of_k, ("bfloat16", "float16", "tf32", "float32", "float64")),
    "half of k": (multiply_half_of_k, ("bfloat16", "float16", "tf32", "float32", "float64")),
    "operands in bfloat16": (round_operands(torch.bfloat16), ("float16", "tf32", "float32", "float64")),
    "operands in float32": (round_operands(torch.float32), ("float64",)),
    "only the old sample": (compute_a_sample, ("bfloat16", "float32")),
    "a lazy tensor": (return_lazy_tensor, ("bfloat16", "float32")),
}


@pytest.mark.parametrize(
    ("fault", "dtype"), [(name, dtype) for name, (_, dtypes) in FAULTS.items() for dtype in dtypes]
)
def test_a_fault_is_found_in_the_first_verification(cpu, fault, dtype):
    # A verification misses a factor of 1.002, half a rounding step of bfloat16, with a probability of 2.7 %.
    verifications = 4 if (fault, dtype) == ("times 1.002", "bfloat16") else 1
    with pytest.raises(WrongResultError):
        for _ in range(verifications):
            prepare_and_verify(Adversary(FAULTS[fault][0]), cpu, make_problem(dtype), SHAPE)


def test_a_fault_near_the_rounding_of_bfloat16_seldom_escapes(cpu):
    """Check that at most 2 of 60 verifications miss 16 zeros in a row.

    In a longer test, 18 of 5,364 verifications (0.3 %) missed them.
    """
    escaped = 0
    for _ in range(60):
        with contextlib.suppress(WrongResultError):
            prepare_and_verify(Adversary(FAULTS["16 zeros in a row"][0]), cpu, make_problem("bfloat16"), SHAPE)
            escaped += 1
    assert escaped <= 2


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda c: c.to(torch.float64), "torch.float64 (512, 384) on cpu, not torch.float32"),
        (lambda c: c.mT, "torch.float32 (384, 512) on cpu, not torch.float32 (512, 384)"),
        (lambda c: torch._neg_view(-c), "a Tensor (torch.strided, negated on read): it must return an ordinary"),
        (lambda c: c.to_sparse(), "a Tensor (torch.sparse_coo)"),
    ],
)
def test_a_result_of_another_kind_is_refused(cpu, result, message):
    with pytest.raises(WrongResultError) as refused:
        prepare_and_verify(Adversary(lambda a, b, c: result(torch.mm(a, b))), cpu, make_problem("float32"), SHAPE)
    assert message in str(refused.value)


class Remembering:
    """A matmul that remembers its first ``result_count`` results, and then copies them in turn to poisoned outputs."""

    def __init__(self, result_count):
        self.result_count, self.results, self.copy_count = result_count, [], 0

    def __call__(self, a, b, c):
        if len(self.results) < self.result_count:
            self.results.append(torch.mm(a, b, out=c).clone())
        elif c.isnan().any():
            c.copy_(self.results[self.copy_count % self.result_count])
            self.copy_count += 1


class Idling:
    """A matmul that multiplies only if its output is poisoned.

    Its results are always right, and between checks it is faster than any honest kernel.
    """

    def __call__(self, a, b, c):
        if c[0, 0].isnan():
            torch.mm(a, b, out=c)


REGIMES = {"burst": BurstRegime, "sustained": lambda backend: SustainedRegime(backend, visit_seconds=0.02)}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("cheat", "message"),
    [
        (lambda: Remembering(1), "relative error"),
        (lambda: Remembering(2), "relative error"),
        (Idling, "the kernel probably skips work"),
    ],
    ids=["remembers a result", "remembers two", "idles"],
)
def test_a_kernel_that_skips_work_is_refused(cpu, monkeypatch, regime, cheat, message):
    if cheat is Idling and regime == "sustained":
        pytest.skip("the sustained regime catches such a kernel only if its rate is higher than the device allows")
    short_traits = cpu.sustained_traits.__class__(soak_seconds=0.02, settle_seconds=0.02)
    monkeypatch.setattr(type(cpu), "sustained_traits", short_traits)
    monkeypatch.setattr(SustainedRegime, "max_settling_seconds", 0.02)
    opened_regime, problem = REGIMES[regime](cpu), make_problem("float32")
    opened_regime.prepare_device()
    # Use one operand set. If launches rotated over several, the cheats would have to remember results for each.
    monkeypatch.setattr(opened_regime, "choose_operand_set_count", lambda *arguments: 1)
    pool = cpu.make_operand_pool("normal", 0)
    row = measure_row(
        Adversary(cheat()), problem, MatmulShape(512, 512, 512), opened_regime, pool, StoppingRule(max_seconds=0.2)
    )
    assert (row.status, message in row.reason) == ("wrong_result", True), row.reason


@pytest.mark.parametrize(
    ("checked", "others"),
    [
        ([1.0] * 4, [0.6] * 20),
        ([1.0, 1.0, 1.0, 0.1], [0.1] * 20),  # a busy host slows some launches
        ([1.0] * 3, [0.1] * 20),
        ([1.0] * 9, []),
        ([1.0] * 9, [0.1] * 2),  # most launches are checked ones
    ],
)
def test_work_is_skipped_only_if_every_checked_launch_is_slow(checked, others):
    assert explain_skipped_work(checked, others) is None
    reason = explain_skipped_work([1.0] * 4, [0.1] * 20)
    assert reason is not None and reason.startswith("launches take 10 times as long if their operands have changed")


class KernelWithTakenName(TorchMm):
    """A different kernel with the name of the registered kernel ``torch.mm``."""


def test_a_class_by_path_cannot_take_a_registered_name():
    with pytest.raises(UsageError, match=r"has the name of a registered kernel, torch.mm: give its class another"):
        make_matmul_kernel(f"{__name__}:KernelWithTakenName")
    assert make_matmul_kernel("mamf.operations.matmul.torch_kernels:TorchMm").name == "torch.mm"


# -- matmuls of other kinds --------------------------------------------------------------------------------------------


def make_spoiled_kernel(kernel_class, spoil):
    """Return a kernel of the class ``kernel_class`` that calls ``spoil(c)`` after each launch."""

    class Spoiled(kernel_class):
        name = "spoiled"

        def bind_operands(self, *arguments):
            launch = super().bind_operands(*arguments)
            c = [each for each in arguments if isinstance(each, torch.Tensor)][-1]
            return lambda: (launch(), spoil(c))[0]

    return Spoiled()


@pytest.mark.parametrize(
    ("kernel_class", "problem", "shape"),
    [
        (Bmm, BatchedProblem("bfloat16", "bfloat16"), BatchedShape(6, 128, 160, 64)),
        (MatmulLoop, GroupedProblem("bfloat16", "bfloat16"), GroupedShape(7, 700, 128, 64)),
        *(
            (DequantizedMatmul, make_problem(dtype), MatmulShape(256, 256, 128))
            for dtype in ("mxfp8", "fp8_rowwise", "nvfp4")
        ),
    ],
    ids=["batched", "grouped", "mxfp8", "fp8_rowwise", "nvfp4"],
)
def test_zeros_in_one_of_many_matmuls_are_found(cpu, kernel_class, problem, shape):
    def zero_some(c):
        rows = c.view(-1, c.shape[-1])
        start = RANDOM.randrange(len(rows) - 64)
        rows[start : start + 64, 32:96] = 0

    assert prepare_and_verify(make_spoiled_kernel(kernel_class, lambda c: None), cpu, problem, shape).verdict.ok
    with pytest.raises(WrongResultError):
        prepare_and_verify(make_spoiled_kernel(kernel_class, zero_some), cpu, problem, shape)


def test_an_int8_result_that_is_off_by_one_is_found(cpu):
    def off_by_one(c):
        c[RANDOM.randrange(c.shape[0]), RANDOM.randrange(c.shape[1])] += 1

    class OffByOne(IntMm):
        def bind_operands(self, problem, a, b, c):
            return lambda: off_by_one(torch._int_mm(a, b, out=c)), 1.0

    assert prepare_and_verify(IntMm(), cpu, make_problem("int8"), SHAPE).verdict.error == 0
    with pytest.raises(WrongResultError):
        prepare_and_verify(OffByOne(), cpu, make_problem("int8"), SHAPE)


# -- honest kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32", "float32", "float64", "int8", "mxfp8"])
def test_honest_kernels_pass_on_random_shapes(cpu, dtype):
    """Check mostly small and thin shapes.

    For them, verification compares few entries, and rounding errors are least like a normal distribution.
    """
    generator = random.Random(dtype)
    kernel = {"int8": IntMm(), "mxfp8": DequantizedMatmul()}.get(dtype, TorchMm())
    for number in range(30):
        m, n, k = (int(2 ** generator.uniform(0, 8.5)) for _ in range(3))
        if dtype in ("int8", "mxfp8"):
            m, n, k = m + 16, (n + 31) // 32 * 32, (k + 31) // 32 * 32
        data = ("normal", "uniform", "integers", "zeros")[number % 4] if dtype != "mxfp8" else "normal"
        layout = "nt" if dtype == "mxfp8" else generator.choice(["nt", "nn", "tn", "tt"])
        problem = MatmulProblem(dtype, OUTPUT_DTYPES.get(dtype, dtype), layout, data)
        prepare_and_verify(kernel, cpu, problem, MatmulShape(m, n, k))


def test_the_smallest_matmuls_give_no_false_alarms(cpu):
    """Check a shape for which the vector A (B x) may be short by chance.

    When its length was the only scale of the error, 1 in 300 tests of this shape gave a false alarm.
    """
    problem, shape = MatmulProblem("bfloat16", "bfloat16"), MatmulShape(2, 2, 64)
    for seed in range(200):
        prepared = TorchMm().prepare(cpu, problem, shape, cpu.make_operand_pool("normal", seed))
        prepared.launches[0]()
        assert all(prepared.verify_whole_output(0, None).ok for _ in range(10))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "uint8"])
def test_signs_change_and_are_restored_exactly(dtype):
    torch_dtype = getattr(torch, dtype)
    values = (
        torch.randn(8, 64).to(torch_dtype)
        if torch_dtype.is_floating_point
        else torch.randint(-127, 128, (8, 64)).to(torch_dtype)
    )
    before, signs = values.view(torch.uint8).clone(), SignFlipper(values)
    for _ in range(3):
        signs.flip_random_signs()
        assert not torch.equal(before, values.view(torch.uint8))
        if torch_dtype.is_floating_point:
            assert torch.equal(before.view(torch_dtype).float().abs(), values.float().abs())
    signs.restore_signs()
    assert torch.equal(before, values.view(torch.uint8))


def test_sign_flips_change_every_column_of_an_operand():
    """Check that a kernel cannot update its last result cheaply.

    When all rows had the same signs, a kernel could correct its last result with half of K.
    """
    values = torch.ones(64, 256)
    signs = SignFlipper(values)
    for _ in range(8):
        before = values.clone()
        signs.flip_random_signs()
        assert (values != before).any(0).all()


@pytest.mark.parametrize(
    ("kernel_class", "dtype", "message"),
    [
        (TorchMm, "float32", "a launch changed its operands: a$"),
        (DequantizedMatmul, "mxfp8", "a launch changed its operands: a_quantized$"),
    ],
)
def test_operands_that_change_before_the_first_launch_are_noticed(cpu, kernel_class, dtype, message):
    class Zeroing(kernel_class):
        name = "zeroing"

        def bind_operands(self, *arguments):
            a = next(each for each in arguments if hasattr(each, "shape"))
            getattr(a, "elements", a).zero_()
            return super().bind_operands(*arguments)

    with pytest.raises(WrongResultError, match=message):
        prepare_and_verify(Zeroing(), cpu, make_problem(dtype), SHAPE, sets=3)


def test_sign_flips_do_not_alternate_between_two_patterns():
    values = torch.randn(4, 64)
    signs, patterns = SignFlipper(values), set()
    for _ in range(100):
        signs.flip_random_signs()
        patterns.add(tuple((values < 0).flatten().tolist()))
    assert len(patterns) > 50


# -- attention ---------------------------------------------------------------------------------------------------------

ATTENTION = AttentionShape.parse("b2h4kv2q256k256d32c")


class Spoiling(SdpaMath):
    """Attention that replaces each result by ``spoil(name, tensor)``, with tensors (batch, heads, sequence, width)."""

    name = "spoiling"

    def __init__(self, spoil):
        self.spoil = spoil

    def prepare(self, *arguments, **options):
        ready = super().prepare(*arguments, **options)

        def launch_and_spoil(launch):
            result = launch()
            tensors = result if isinstance(result, tuple) else (result,)
            names = {1: ("o",), 3: ("dq", "dk", "dv"), 4: ("o", "dq", "dk", "dv")}[len(tensors)]
            spoiled = tuple(self.spoil(name, each) for name, each in zip(names, tensors, strict=True))
            return spoiled if isinstance(result, tuple) else spoiled[0]

        launches = [functools.partial(launch_and_spoil, launch) for launch in ready.launches]
        return type(ready)(**{**ready.__dict__, "launches": launches})


def make_zeroing(name):
    """Return a ``spoil`` that zeroes 128 rows of one result, in one head that is neither the first nor the last."""

    def spoil(result_name, tensor):
        if result_name == name:
            tensor = tensor.clone()
            start = RANDOM.randrange(128)
            tensor[1, 1 if name in ("o", "dq") else 0, start : start + 128] = 0
        return tensor

    return spoil


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("direction", "name"),
    # A launch of the backward pass does not compute o.
    [("bwd", name) for name in ("dq", "dk", "dv")] + [("fwd+bwd", name) for name in ("o", "dq", "dk", "dv")],
)
def test_zeroed_rows_of_one_head_are_found(cpu, direction, name, dtype):
    problem = AttentionProblem(dtype, direction)
    assert prepare_and_verify(Spoiling(lambda name, tensor: tensor), cpu, problem, ATTENTION).verdict.ok
    with pytest.raises(WrongResultError):
        prepare_and_verify(Spoiling(make_zeroing(name)), cpu, problem, ATTENTION)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_scaled_attention_is_found(cpu, dtype):
    problem = AttentionProblem(dtype)
    with pytest.raises(WrongResultError):
        prepare_and_verify(Spoiling(lambda name, tensor: tensor * 1.002), cpu, problem, ATTENTION)


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_an_attention_that_remembers_its_results_is_refused(cpu, direction):
    results = {}
    remembering = Spoiling(lambda name, tensor: results.setdefault(name, tensor.clone()).clone())
    checked = prepare_and_verify(remembering, cpu, AttentionProblem("float32", direction), ATTENTION)
    checked.change_operands_and_poison_outputs()
    checked.launches[0]()
    with pytest.raises(WrongResultError):
        checked.verify_last_outputs()


class Copying(SdpaMath):
    """Attention that remembers its first output, and later only applies the sign changes of the columns of V to it."""

    name = "copying"

    def attend(self, shape, q, k, v):
        if not hasattr(self, "first_output"):
            self.first_output, self.first_v = super().attend(shape, q, k, v).clone(), v.clone()
        signs = (v * self.first_v).sum(2, keepdim=True).sign().repeat_interleave(q.shape[1] // v.shape[1], 1)
        return self.first_output * signs


def test_an_attention_that_copies_signs_to_a_remembered_output_is_refused_in_burst(cpu):
    problem, shape = AttentionProblem("float32"), AttentionShape.parse("b1h2q256k256d32")
    regime = BurstRegime(cpu)
    regime.prepare_device()
    row = measure_row(
        Copying(), problem, shape, regime, cpu.make_operand_pool("normal", 0), StoppingRule(max_seconds=0.2)
    )
    assert (row.status, "relative error" in row.reason) == ("wrong_result", True), row.reason


def test_an_attention_in_float16_that_computes_in_bfloat16_is_refused(cpu):
    class Rounding(SdpaMath):
        def attend(self, shape, q, k, v):
            return super().attend(shape, *(each.bfloat16() for each in (q, k, v))).to(q.dtype)

    with pytest.raises(WrongResultError):
        prepare_and_verify(Rounding(), cpu, AttentionProblem("float16"), ATTENTION)


def test_an_honest_gradient_passes_whichever_rows_are_compared(cpu):
    """Check that verification never compares only the first row of dQ.

    With a causal mask, this row is 0 except for rounding errors.
    """
    shape, problem = AttentionShape.parse("b1h2q64k64d32c"), AttentionProblem("float32", "bwd")
    ready = SdpaMath().prepare(cpu, problem, shape, cpu.make_operand_pool("normal", 0))
    for _ in range(200):
        assert ready.verify_whole_output(0, ready.launches[0]()).ok
