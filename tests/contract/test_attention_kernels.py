"""Test every attention kernel: those of libraries with fake libraries, and torch's own kernels on the CPU."""

import math
import sys
from functools import partial
from types import SimpleNamespace

import attention_fakes as fakes
import pytest
import torch
from attention_fakes import LIBRARIES
from verdicts import verified

from mamf.backend import Unavailability
from mamf.dtypes import DTYPES
from mamf.engine.measure import classify_error
from mamf.errors import UnsupportedError
from mamf.operations.attention.attention_reference import compute_attended_share, compute_key_sum_error
from mamf.operations.attention.operation import (
    ATTENTION_DIRECTIONS,
    AttentionOperation,
    AttentionProblem,
    AttentionShape,
)
from mamf.operations.attention.torch_attention import PreparedAttention
from mamf.operations.operand_sets import take_pool_buffers
from mamf.plugins.discovery import (
    find_entry_points_by_name,
    load_backend_class,
    make_kernel,
    open_backend,
)

attention_kernel = partial(make_kernel, AttentionOperation())

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.usefixtures("use_one_torch_thread"),
]
# SpargeAttention needs sequences of at least 128 tokens.
FULL = "b2h4q160k160d64"
CAUSAL = "b1h4q160k160d64c"
GQA = "b1h4kv2q160k160d64c"
LONGER_KEYS = "b1h4kv2q160k176d64c"
WINDOW = "b1h4q160k176d64cw8"
TWO_SIDED_WINDOW = "b1h4q160k160d64w12"
SHAPES = (FULL, CAUSAL, GQA, LONGER_KEYS, WINDOW, TWO_SIDED_WINDOW)
BACKENDS = ("cpu", "cuda", "hpu", "mps", "rocm", "xpu")
ON_CPU = ("eager", "sdpa", "sdpa-flash", "sdpa-math", "flex", "compiled-eager")
COMMAND_STARTS = ("pip install", "git clone", "bash ", "sudo apt", "mamf attention --")


def parse_shape(text):
    return AttentionShape.parse(text)


def prepare_kernel(kernel, backend, shape, problem=None, **options):
    problem = problem or AttentionProblem()
    shape = parse_shape(shape) if isinstance(shape, str) else shape
    pool = backend.make_operand_pool(problem.data, problem.seed)
    with kernel.apply_settings(backend, problem):
        return kernel.prepare(backend, problem, shape, pool, **options)


def verify_call(kernel, backend, problem, shape, call, covers_all_heads=True):
    """Return the verdict on the result of ``call``, which replaces the kernel's own forward pass."""
    operands = kernel.view_operands(
        problem, shape, take_pool_buffers(backend.make_operand_pool(problem.data, 0), problem.list_buffers(shape))
    )
    attention = PreparedAttention(kernel, problem, shape, operands)
    return (attention.verify_whole_output if covers_all_heads else attention.verify)(attention.make_launch(call)())


def verify_kernel(kernel, backend, shape, problem=None):
    problem = problem or AttentionProblem()
    with kernel.apply_settings(backend, problem):
        return verified(prepare_kernel(kernel, backend, shape, problem))


@pytest.fixture
def recorded_calls():
    """Return the list to which fake libraries append the options of each call."""
    return []


@pytest.fixture
def set_capability(monkeypatch):
    """Return a function that sets the compute capability that torch reports for the card."""

    def set_to(major_and_minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: major_and_minor)

    return set_to


@pytest.fixture
def install_library(request, monkeypatch, recorded_calls, set_capability):
    """Return a function that installs the fake library of a kernel and simulates a device of its vendor.

    The function returns the kernel and the backend of the device. ``install_fake``: installs a different library.
    ``card``: a different compute capability. ``options``: options of the fake library.
    """

    def install(kernel_name, install_fake=None, card=None, **options):
        vendor, default_card, install_default_fake = LIBRARIES[kernel_name]
        device = request.getfixturevalue(vendor)
        set_capability(card or default_card)
        (install_fake or install_default_fake)(monkeypatch, recorded_calls, **options)
        return attention_kernel(kernel_name), device.kind(0)

    return install


@pytest.fixture
def cpu():
    return open_backend("cpu")


@pytest.fixture
def uncompiled(monkeypatch):
    """Replace torch.compile: functions run as they are, without compilation."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.fixture
def traced(monkeypatch):
    """Let torch.compile only trace functions with AOTAutograd, without generating code."""
    compile = torch.compile

    def trace(function, *, options=None, **kwargs):
        return compile(function, backend="aot_eager", **kwargs)

    monkeypatch.setattr(torch, "compile", trace)
    torch._dynamo.reset()


# -- all kernels -----------------------------------------------------------------------------------------------------


def test_every_entry_point_is_a_kernel_of_that_name():
    for name in find_entry_points_by_name("mamf.attention_kernels"):
        kernel = attention_kernel(name)
        assert kernel.name == name
        assert set(kernel.directions) <= set(ATTENTION_DIRECTIONS)
        assert set(kernel.dtypes) | set(kernel.matmul_dtypes) <= set(DTYPES)


#: The backends on which each kernel of torch runs. ``make_bare_backend`` has a compiler on all backends but mps.
TORCH_KERNEL_BACKENDS = {
    "compiled-eager": ("cpu", "cuda", "hpu", "rocm", "xpu"),
    "eager": BACKENDS,
    "flex": ("cpu", "cuda", "hpu", "rocm", "xpu"),
    "sdpa": BACKENDS,
    "sdpa-cudnn": ("cuda",),
    "sdpa-efficient": ("cuda", "rocm"),
    "sdpa-flash": ("cpu", "cuda", "rocm", "xpu"),
    "sdpa-math": ("cpu", "cuda", "mps", "rocm", "xpu"),
}


def make_bare_backend(name):
    """Return a backend that is not opened. It has only what kernels read to explain that they are unavailable."""
    backend_class = load_backend_class(name)
    reason = (
        Unavailability("Inductor makes no kernels for mps", "mamf attention --kernel sdpa") if name == "mps" else None
    )
    backend = object.__new__(backend_class)
    backend.index, backend.info = 0, SimpleNamespace(architecture="gfx942")
    backend.explain_missing_compiler = lambda: reason
    return backend


def assert_actionable(reason):
    assert reason.reason
    assert "\n" not in str(reason)
    assert reason.remedy.startswith(COMMAND_STARTS), reason.remedy


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_a_missing_library_or_an_unsupported_device_gives_a_reason_and_a_command(monkeypatch, set_capability, name):
    for module in ("aiter", "flash_attn", "flash_attn_3", "flash_attn_interface", "habana_frameworks"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("sageattention", "spas_sage_attn", "xformers"):
        monkeypatch.setitem(sys.modules, module, None)
    vendor, card, _ = LIBRARIES[name]
    set_capability(card)
    for backend in BACKENDS:
        reason = attention_kernel(name).explain_unavailability(make_bare_backend(backend))
        assert_actionable(reason)
        assert ("is not installed" in reason.reason) == (
            load_backend_class(backend).runtime in attention_kernel(name).runtimes
        )
        assert (
            backend == vendor
            or "does not support" in reason.reason
            or load_backend_class(backend).runtime in attention_kernel(name).runtimes
        )


@pytest.mark.parametrize("name", sorted(set(find_entry_points_by_name("mamf.attention_kernels")) - set(LIBRARIES)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_of_torch_say_on_which_backends_they_do_not_run(name, backend):
    reason = attention_kernel(name).explain_unavailability(make_bare_backend(backend))
    assert (reason is None) == (backend in TORCH_KERNEL_BACKENDS[name])
    if reason is not None:
        assert_actionable(reason)
        # The remedy is the kernel that runs on every device.
        assert reason.remedy == "mamf attention --kernel sdpa"


@pytest.mark.parametrize("name", sorted(LIBRARIES))
@pytest.mark.parametrize(
    "error",
    [
        OSError("libcudart.so.12: cannot open shared object file: No such file\nsecond line"),
        RuntimeError(""),
        ModuleNotFoundError("No module named 'einops'", name="einops"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_library_that_cannot_be_loaded_gives_a_reason_and_a_command(install_library, monkeypatch, name, error):
    kernel, backend = install_library(name)
    fakes.fail_to_import(monkeypatch, kernel.module_name, error)
    reason = kernel.explain_unavailability(backend)
    assert "installed but cannot be loaded" in reason.reason
    assert "second line" not in reason.reason
    assert_actionable(reason)
    # With --force-reinstall alone, pip would also reinstall the dependencies, and so replace torch.
    assert "--force-reinstall" not in reason.remedy or "--no-deps" in reason.remedy


def test_what_a_library_prints_on_import_does_not_reach_stdout(install_library, monkeypatch, capsys):
    kernel, backend = install_library("sparge-fp16-topk")
    function = kernel.import_library()
    monkeypatch.setattr(type(kernel), "import_library", lambda self: print("Warning: Sage2++ NOT enabled") or function)
    assert kernel.explain_unavailability(backend) is None
    prepare_kernel(kernel, backend, FULL)
    assert capsys.readouterr().out == ""


def yield_supported_cases(kernel, backend):
    """Yield the problems and shapes that a kernel says it supports."""
    for dtype in set(kernel.dtypes) & {"bfloat16", "float32"}:
        for direction in ATTENTION_DIRECTIONS:
            problem = AttentionProblem(dtype, direction)
            if kernel.explain_unsupported_problem(backend, problem) is None:
                for shape in map(parse_shape, SHAPES):
                    if kernel.explain_unsupported_shape(problem, shape) is None:
                        yield problem, shape


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_a_library_is_called_correctly_for_everything_that_its_kernel_supports(install_library, recorded_calls, name):
    kernel, backend = install_library(name)
    assert kernel.explain_unavailability(backend) is None
    cases = list(yield_supported_cases(kernel, backend))
    assert {problem.direction for problem, _ in cases} == set(kernel.directions)
    for problem, shape in cases:
        ready = prepare_kernel(kernel, backend, shape, problem, sets=2)
        verdict = verified(ready)
        assert verdict.ok, (problem, shape, verdict)
        # Gaudi's library reports no version.
        assert name == "fused-sdpa" or verdict.details["library"].startswith(f"{kernel.distribution_name} ")
        earlier_call_count = len(recorded_calls)
        for launch in ready.launches:
            launch()
        assert len(recorded_calls) - earlier_call_count == (0 if problem.direction == "bwd" else 2)


@pytest.mark.parametrize(
    ("name", "other_library", "explanation"),
    [
        ("flash-attn-2", "flash_attn_4", "the installed module flash_attn contains only FlashAttention 4"),
        ("flash-attn-4", "flash_attn_2", "the package flash-attn-4 is not installed"),
        ("sage-1", "sage_2", "the installed sageattention has version 2.2.0, but SageAttention 1 is needed"),
        ("sage-2", "sage_1", "the installed sageattention has version 1.0.6, but SageAttention 2 is needed"),
    ],
)
def test_another_version_of_a_library_is_not_accepted_instead_of_the_needed_one(
    install_library, name, other_library, explanation
):
    kernel, backend = install_library(name, getattr(fakes, other_library))
    reason = kernel.explain_unavailability(backend)
    assert f"is not installed: {explanation}" in reason.reason
    assert reason.remedy == kernel.install_command


@pytest.mark.parametrize(
    ("name", "card", "shape", "fields", "options", "reason"),
    [
        ("flash-attn-2", None, FULL, {"dtype": "float16"}, {"lacks": [torch.float16]}, "this build has bf16 only"),
        ("flash-attn-2", None, FULL, {"dtype": "float32"}, {}, "only support fp16 and bf16 data type"),
        ("flash-attn-3", None, FULL, {"dtype": "float16"}, {"lacks": [torch.float16]}, "does not support FP16."),
        ("flash-attn-3", None, "b1h1q32k32d192v128", {}, {}, None),
        ("flash-attn-3", None, "b1h1q32k32d64v512", {}, {}, None),
        ("flash-attn-3", None, "b1h1q32k32d64v512", {"direction": "bwd"}, {}, "head dimension at most 256"),
        ("flash-attn-3", None, "b1h1q32k32d128v256", {}, {}, "we only support Q/K headdim in (128, 192]"),
        ("flash-attn-3", None, "b1h1q32k32d512", {}, {}, "head dimension at most 256"),
        ("flash-attn-4", None, FULL, {"dtype": "float32"}, {}, "AssertionError: inputs must be float16 or bfloat16"),
        ("flash-attn-4", (8, 0), "b1h1q32k32d256", {}, {}, None),
        ("flash-attn-4", (8, 0), FULL, {"direction": "bwd"}, {}, "Unsupported compute capability"),
        ("flash-attn-4", (10, 0), "b1h1q32k32d256", {}, {}, None),
        ("flash-attn-4", (10, 0), "b1h1q32k32d256v128", {}, {}, "is not supported on SM100"),
        ("sage-2", None, FULL, {}, {"SM80_ENABLED": True, "SM90_ENABLED": False}, "SM90 kernel is not available"),
        ("sparge-fp16-topk", None, "b1h1q127k127d64", {}, {}, "seq_len should be not less than 128"),
        ("xformers", None, FULL, {}, {"is_built": False}, "`fa2F@2.8.4` is not supported because: xFormers wasn't"),
    ],
)
def test_what_a_library_or_its_build_refuses_is_unsupported(
    install_library, name, card, shape, fields, options, reason
):
    kernel, backend = install_library(name, card=card, **options)
    problem = AttentionProblem(**fields)
    assert kernel.explain_unsupported_shape(problem, parse_shape(shape)) is None
    if reason is None:
        assert verify_kernel(kernel, backend, shape, problem).ok
        return
    with pytest.raises((RuntimeError, AssertionError, UnsupportedError)) as caught:
        verify_kernel(kernel, backend, shape, problem)
    status, explanation = classify_error(caught.value, kernel, backend)
    assert status == "unsupported"
    assert reason in explanation
    assert classify_error(RuntimeError("CUDA error: misaligned address"), kernel, backend)[0] == "failed"


# -- FlashAttention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_attn_interface", "flash_attn_3.flash_attn_interface"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attn_3_is_found_under_both_names_and_may_return_a_tuple(install_library, monkeypatch, name, with_lse):
    kernel, backend = install_library("flash-attn-3", name=name, with_lse=with_lse)
    assert kernel.explain_unavailability(backend) is None
    for direction in ATTENTION_DIRECTIONS:
        assert verify_kernel(kernel, backend, CAUSAL, AttentionProblem(direction=direction)).ok


@pytest.mark.parametrize(
    ("name", "windows"),
    [("flash-attn-2", [(-1, -1), (8, 0), (12, 12)]), ("flash-attn-4", [(None, None), (8, 0), (12, 12)])],
)
def test_each_flash_attn_gets_the_arguments_that_mean_no_window_to_it(install_library, recorded_calls, name, windows):
    kernel, backend = install_library(name)
    for shape in (FULL, WINDOW, TWO_SIDED_WINDOW):
        assert verify_kernel(kernel, backend, shape).ok
    assert [options["window_size"] for options in recorded_calls] == windows
    assert {options.get("num_splits", 1) for options in recorded_calls} == {1}


@pytest.mark.parametrize(
    ("name", "card", "is_supported"),
    [
        ("flash-attn-2", (7, 5), False),
        ("flash-attn-3", (8, 0), False),
        ("flash-attn-3", (10, 0), False),
        ("flash-attn-4", (12, 1), True),
        ("sage-2", (8, 7), False),
        ("sage-2", (10, 0), False),
        ("sparge-fp16-topk", (8, 0), True),
        ("sparge-fp8-topk", (8, 6), False),
    ],
)
def test_a_card_that_a_library_does_not_support_gives_a_reason_and_another_kernel(
    install_library, name, card, is_supported
):
    kernel, backend = install_library(name, card=card)
    reason = kernel.explain_unavailability(backend)
    if is_supported:
        assert reason is None
    else:
        assert f"compute capability {card[0]}.{card[1]}" in reason.reason
        assert_actionable(reason)
        assert reason.remedy.split()[-1] in find_entry_points_by_name("mamf.attention_kernels")


# -- Sage ------------------------------------------------------------------------------------------------------------


def test_sage_1_changes_a_copy_of_k_and_never_the_operands(install_library, recorded_calls):
    kernel, backend = install_library("sage-1")
    ready = prepare_kernel(kernel, backend, CAUSAL)
    verdict = verified(ready)
    assert verdict.ok
    assert "copy of K" in verdict.details["ran"]
    for _ in range(3):
        ready.launches[0]()
    first, *later = [options["k"] for options in recorded_calls]
    assert first.mean(dim=-2).abs().max() > 0.01
    assert all(torch.equal(first, k) for k in later)


def test_a_kernel_that_changes_its_operands_is_refused(install_library, monkeypatch):
    kernel, backend = install_library("sage-1")
    module = sys.modules["sageattention"]
    original = module.sageattn
    monkeypatch.setattr(module, "sageattn", lambda q, k, v, **options: original(q.neg_(), k.neg_(), v, **options))
    verdict = verify_kernel(kernel, backend, CAUSAL)
    assert not verdict.ok
    assert verdict.details["changed operands"] == "q"


def round_to_int8(tensor, rows):
    """Round each block of ``rows`` rows to int8 values with one scale per block, and return the rounded values."""
    blocks = tensor.float().unflatten(2, (-1, rows))
    step = blocks.abs().amax((-2, -1), keepdim=True) / 127
    return ((blocks / step).round() * step).flatten(2, 3)


def round_to_fp8(tensor):
    return tensor.float().to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("name", ["sage-1", "sage-2"])
def test_tolerances_allow_the_error_of_quantization_but_not_three_times_as_much(cpu, name, sparsity):
    kernel, problem = attention_kernel(name), AttentionProblem(sparsity=sparsity)
    shape = parse_shape("b1h1q1280k1280d128")

    def quantized_attention(q, k, v):
        int8_k = round_to_int8(k - k.mean(2, keepdim=True), 64)
        scores = round_to_int8(q, 128) @ int8_k.transpose(-2, -1) / math.sqrt(128)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        products = (
            weights.half().float() @ v.float()
            if name == "sage-1"
            else round_to_fp8(448 * weights) / 448 @ round_to_fp8(v)
        )
        return (products / weights.sum(-1, keepdim=True)).to(q.dtype)

    verdict = verify_call(kernel, cpu, problem, shape, quantized_attention)
    assert verdict.ok
    assert verdict.error > verdict.tolerance / 3


# -- Sparge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparge-fp16-threshold", "sparge-fp8-topk"])
def test_sparge_says_which_shapes_it_does_not_support(install_library, name):
    kernel, _ = install_library(name)
    for shape, reason in (
        ("b1h1q256k256d96", "64, 128"),
        ("b1h4kv2q256k256d64", "fewer kv heads than query heads"),
        ("b1h1q256k256d64w16", "not support a window"),
        ("b1h1q256k256d64v128", "the same head dimension for keys and values"),
    ):
        assert reason in kernel.explain_unsupported_shape(AttentionProblem(), parse_shape(shape))


def test_fp8_kernels_of_sparge_do_not_support_a_causal_mask(install_library):
    kernel, backend = install_library("sparge-fp8-topk")
    assert "wrong with a causal mask" in kernel.explain_unsupported_shape(AttentionProblem(), parse_shape(CAUSAL))
    assert not verify_kernel(kernel, backend, CAUSAL).ok
    fp16_kernel = attention_kernel("sparge-fp16-topk")
    assert fp16_kernel.explain_unsupported_shape(AttentionProblem(), parse_shape(CAUSAL)) is None


@pytest.mark.parametrize("shape", ["b1h1q1280k1280d64", "b1h1q1024k1024d64c", "b1h1q640k896d64"])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9])
def test_topk_skips_exactly_the_blocks_that_the_inputs_make_irrelevant(
    install_library, recorded_calls, shape, sparsity
):
    kernel, backend = install_library("sparge-fp16-topk")
    problem = AttentionProblem(sparsity=sparsity)
    ready = prepare_kernel(kernel, backend, shape, problem)
    verdict = verified(ready)
    assert verdict.ok
    keys = parse_shape(shape).seqlen_k
    if "c" not in shape:
        assert verdict.details["sparsity"] == pytest.approx(1 - compute_attended_share(sparsity, keys), abs=1e-9)
    ready.launches[0]()
    # A launch that returns the sparsity has to wait for the device, so timed launches do not ask for it.
    assert [options["return_sparsity"] for options in recorded_calls] == [False, True, False]


# -- xFormers, AITER and Gaudi ---------------------------------------------------------------------------------------


def test_xformers_gets_grouped_heads_without_copies_and_only_in_the_forward_pass(install_library, recorded_calls):
    kernel, backend = install_library("xformers")
    assert verify_kernel(kernel, backend, GQA).ok
    (options,) = recorded_calls
    assert options["ndim"] == 5
    assert options["key_stride"][3] == 0
    assert "backward" in kernel.explain_unsupported_shape(AttentionProblem(direction="bwd"), parse_shape(GQA))
    longer_keys = parse_shape("b1h1q32k64d64c")
    assert "as many queries as keys" in kernel.explain_unsupported_shape(AttentionProblem(), longer_keys)


@pytest.mark.parametrize("is_old", [False, True])
def test_aiter_gets_the_arguments_that_its_backward_pass_needs(install_library, recorded_calls, is_old):
    kernel, backend = install_library("aiter", is_old=is_old)
    for direction in ATTENTION_DIRECTIONS:
        assert verify_kernel(kernel, backend, GQA, AttentionProblem(direction=direction)).ok
    assert {options["deterministic"] for options in recorded_calls} == {False}


def test_aiter_is_unavailable_on_cards_other_than_mi300_and_mi350(install_library):
    kernel, _ = install_library("aiter")
    other = SimpleNamespace(name="rocm", runtime="hip", index=0, info=SimpleNamespace(architecture="gfx1100"))
    reason = kernel.explain_unavailability(other)
    assert "gfx1100" in reason.reason
    assert_actionable(reason)


def test_gaudi_recomputes_instead_of_keeping_all_scores(install_library, recorded_calls):
    kernel, backend = install_library("fused-sdpa")
    assert verify_kernel(kernel, backend, GQA, AttentionProblem(direction="fwd+bwd")).ok
    assert {(options["recompute_mode"], options["softmax_mode"]) for options in recorded_calls} == {(True, "None")}
    assert kernel.explain_unsupported_problem(backend, AttentionProblem("float16")) is not None


# -- on the CPU ------------------------------------------------------------------------------------------------------

SMALL_SHAPES = {
    "full": "b2h4q48k48d32",
    "causal": "b1h4q48k48d32c",
    "gqa": "b1h4kv2q48k48d32c",
    "longer keys": "b1h2q32k56d32c",
    "window": "b1h2q48k56d32cw8",
    "window on both sides": "b1h2q48k48d32w8",
}


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("text", SMALL_SHAPES.values(), ids=SMALL_SHAPES)
def test_kernels_of_torch_are_right_in_each_direction(cpu, uncompiled, name, text):
    kernel, shape = attention_kernel(name), parse_shape(text)
    checked_count = 0
    for direction in ATTENTION_DIRECTIONS:
        problem = AttentionProblem("float32", direction)
        if kernel.explain_unsupported_problem(cpu, problem) or kernel.explain_unsupported_shape(problem, shape):
            continue
        checked_count += 1
        with kernel.apply_settings(cpu, problem):
            ready = prepare_kernel(kernel, cpu, shape, problem, sets=2)
            verdict = verified(ready)
            for launch in ready.launches * 2:
                launch()
        assert verdict.ok, (problem, verdict)
    assert checked_count or text not in (SMALL_SHAPES["full"], SMALL_SHAPES["causal"], SMALL_SHAPES["gqa"])


def test_a_compiled_backward_can_be_repeated(cpu, traced):
    """Check that a compiled backward pass can run twice.

    By default, it would overwrite the tensors that the forward pass saved.
    """
    kernel, problem = attention_kernel("compiled-eager"), AttentionProblem("float32", "bwd")
    with kernel.apply_settings(cpu, problem):
        ready = prepare_kernel(kernel, cpu, SMALL_SHAPES["gqa"], problem)
        for _ in range(2):
            ready.launches[0]()
        assert verified(ready).ok


@pytest.mark.parametrize("name", ["flex", "compiled-eager"])
def test_every_shape_is_compiled_despite_dynamos_limit(cpu, traced, name):
    """Check that Dynamo's limit on compilations does not limit the number of shapes.

    Dynamo counts how often it compiles a code object. Above its limit, it runs the code uncompiled, or raises an error
    if ``fullgraph`` is set.
    """
    kernel, problem = attention_kernel(name), AttentionProblem("float32")
    with torch._dynamo.config.patch(recompile_limit=1), kernel.apply_settings(cpu, problem):
        for length in (32, 48):
            assert verified(prepare_kernel(kernel, cpu, f"b1h1q{length}k{length}d32c", problem)).ok


# -- planted faults --------------------------------------------------------------------------------------------------


def forget_scale(call):
    return lambda q, k, v: call(q * math.sqrt(q.shape[-1]), k, v)


def leave_out_a_row(call):
    def fault(q, k, v):
        written_rows = torch.ones(q.shape[2], 1)
        written_rows[-1] = 0
        return call(q, k, v) * written_rows

    return fault


def align_to_the_top_left(call):
    return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def forget_mask(call):
    return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v)


class ScaledGradient(torch.autograd.Function):
    """An identity function that multiplies the gradient by a factor."""

    @staticmethod
    def forward(context, tensor, factor):
        context.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


def scale_gradient(factor, position):
    def plant(call):
        return lambda *qkv: call(
            *(ScaledGradient.apply(x, factor) if index == position else x for index, x in enumerate(qkv))
        )

    return plant


class GradientOfOnes(torch.autograd.Function):
    """An identity function that replaces the gradient by ones."""

    @staticmethod
    def forward(context, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        return torch.ones_like(gradient)


def replace_gradient_by_ones(position):
    def plant(call):
        return lambda *qkv: call(*(GradientOfOnes.apply(x) if index == position else x for index, x in enumerate(qkv)))

    return plant


FAULTS = {
    "scale forgotten": (forget_scale, "fwd", SMALL_SHAPES["full"]),
    "row not written": (leave_out_a_row, "fwd", SMALL_SHAPES["causal"]),
    "mask forgotten": (forget_mask, "fwd", SMALL_SHAPES["causal"]),
    "top left": (align_to_the_top_left, "fwd", SMALL_SHAPES["longer keys"]),
    "dq zero": (scale_gradient(0, 0), "bwd", SMALL_SHAPES["causal"]),
    "dk zero": (scale_gradient(0, 1), "fwd+bwd", SMALL_SHAPES["causal"]),
    "dv zero": (scale_gradient(0, 2), "bwd", SMALL_SHAPES["full"]),
    "dv negated": (scale_gradient(-1, 2), "bwd", SMALL_SHAPES["causal"]),
    "dq of a single key, which is 0": (replace_gradient_by_ones(0), "bwd", "b1h4q1k1d64"),
    "dk of a single key, which is 0": (replace_gradient_by_ones(1), "fwd+bwd", "b2h4q1k1d64c"),
    "dk not a number": (scale_gradient(math.nan, 1), "bwd", SMALL_SHAPES["full"]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ON_CPU)
def test_a_planted_fault_is_refused(cpu, uncompiled, name, dtype, fault):
    plant, direction, text = FAULTS[fault]
    kernel, problem, shape = attention_kernel(name), AttentionProblem(dtype, direction), parse_shape(text)
    if kernel.explain_unsupported_problem(cpu, problem) or kernel.explain_unsupported_shape(problem, shape):
        pytest.skip(f"{name} does not support this problem")
    call = kernel.bind_operands(cpu, problem, shape)
    with kernel.apply_settings(cpu, problem):
        assert verify_call(kernel, cpu, problem, shape, call).ok
        assert not verify_call(kernel, cpu, problem, shape, plant(call)).ok


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_result_in_float64_is_checked(cpu, direction):
    kernel, problem = attention_kernel("eager"), AttentionProblem("float64", direction)
    with kernel.apply_settings(cpu, problem):
        call = kernel.bind_operands(cpu, problem, parse_shape(SMALL_SHAPES["causal"]))
        assert verify_call(kernel, cpu, problem, parse_shape(SMALL_SHAPES["causal"]), call).ok


@pytest.mark.parametrize("name", sorted(set(LIBRARIES) - {"sparge-fp8-topk", "sparge-fp8-threshold"}))
def test_a_library_that_forgets_the_mask_is_refused(install_library, monkeypatch, name):
    kernel, backend = install_library(name)
    real_attention = fakes.attention
    monkeypatch.setattr(fakes, "attention", lambda q, k, v, *args, **options: real_attention(q, k, v))
    assert not verify_kernel(kernel, backend, CAUSAL).ok
    assert verify_kernel(kernel, backend, FULL).ok


@pytest.mark.parametrize(("zeroed_count", "min_error", "max_error"), [(0, 0.0, 0.02), (128, 0.2, 1.0)])
def test_rounding_errors_of_the_same_sign_for_all_keys_are_accepted(zeroed_count, min_error, max_error):
    """Check the bound for dV of a single query, where the rounding errors of all keys may have the same sign.

    dV is then each probability times dO, rounded to bfloat16. The dO of this test has few binary digits, so that
    these rounding errors do not average out. Rows that the kernel did not write must still be found.
    """
    torch.manual_seed(0)
    shape, short = AttentionShape(1, 1, 1, 1, 16384, 8, 8, False, None), 1 + 2.0**-7
    do = torch.full((1, 1, 1, 8), short, dtype=torch.bfloat16)
    dv = torch.softmax(torch.randn(1, 1, 16384, 1), 2).bfloat16() * do
    dv[:, :, 512 : 512 + zeroed_count] = 0
    error = compute_key_sum_error(shape, {"do": do}, {"dk": torch.zeros_like(dv), "dv": dv})
    assert min_error <= error <= max_error


@pytest.mark.parametrize(("softmax_error", "zeroed_count", "is_wrong"), [(3e-6, 0, False), (0.0, 1, True)])
def test_errors_of_the_softmax_that_add_up_over_all_keys_are_accepted(softmax_error, zeroed_count, is_wrong):
    """Check that an error of the softmax is accepted, although it adds up over all keys, and that a zero row is not.

    With the error, each row of P sums to slightly more or less than 1.
    """
    torch.manual_seed(0)
    shape = AttentionShape(1, 1, 1, 64, 16384, 8, 8, False, None)
    do, scores = torch.randn(1, 1, 64, 8), torch.randn(64, 16384) / 3
    sums = 1 + softmax_error * torch.randn(64, 1)
    dv = ((torch.softmax(scores, 1) * sums).T @ do[0, 0])[None, None]
    dv[:, :, 512 : 512 + zeroed_count] = 0
    error = compute_key_sum_error(shape, {"do": do}, {"dk": torch.zeros_like(dv), "dv": dv})
    assert (error > 1.6e-4) == is_wrong  # the error bound of kernels in float32


class RoundedScoreGradients(torch.autograd.Function):
    """An attention function that rounds the gradients of the scaled scores, as torch's memory-efficient kernel does.

    ``dtype``: the dtype to which it rounds them.
    """

    @staticmethod
    def forward(context, dtype, q, k, v):
        probabilities = torch.softmax(q.double() @ k.double().mT / math.sqrt(q.shape[-1]), -1)
        context.dtype = dtype
        context.save_for_backward(q, k, v, probabilities)
        return (probabilities @ v.double()).to(v.dtype)

    @staticmethod
    def backward(context, do):
        q, k, v, probabilities = (each.double() for each in context.saved_tensors)
        weight_gradients = do.double() @ v.mT
        score_gradients = probabilities * (weight_gradients - (weight_gradients * probabilities).sum(-1, keepdim=True))
        score_gradients = (score_gradients / math.sqrt(q.shape[-1])).to(context.dtype).double()
        dv = probabilities.mT @ do.double()
        return None, *(each.to(do.dtype) for each in (score_gradients @ k, score_gradients.mT @ q, dv))


@pytest.mark.parametrize(("score_dtype", "is_right"), [(torch.float16, True), (torch.float8_e5m2, False)])
def test_float16_gradients_of_scores_may_be_subnormal(cpu, score_dtype, is_right):
    """Check that rounding errors of subnormal float16 numbers are accepted, and that errors of 8-bit floats are not.

    With 60,000 keys, the gradients of the scores are about 1e-6, and float16 rounds them to multiples of 6e-8.
    """
    kernel, problem = attention_kernel("sdpa-math"), AttentionProblem("float16", "bwd", "uniform")
    call = partial(RoundedScoreGradients.apply, score_dtype)
    verdict = verify_call(kernel, cpu, problem, parse_shape("b1h1q8k60000d16"), call)
    assert verdict.ok is is_right
    assert verdict.details["gradient_error"] > 2 * verdict.tolerance


@pytest.mark.parametrize(("shape", "factor"), [("b1h1q8k40000d16", 2.83), ("b1h1q8k40000d16w64", 2.0)])
def test_only_keys_that_a_query_sees_widen_the_bound_of_gradients(cpu, shape, factor):
    kernel, problem = attention_kernel("eager"), AttentionProblem("float16", "bwd", "uniform")
    attend = kernel.bind_operands(cpu, problem, parse_shape(shape))

    def noisy(q, k, v):
        output = attend(q, k, v)
        output.register_hook(lambda do: (do * (1 + 2e-3 * torch.randn(do.shape))).half())
        return output

    verdict = verify_call(kernel, cpu, problem, parse_shape(shape), noisy, covers_all_heads=False)
    assert verdict.ok
    assert verdict.details["gradient_error"] / verdict.error == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(("name", "gigabytes"), [("eager", 206.2), ("compiled-eager", 68.7), ("sdpa-math", 68.7)])
def test_scores_that_do_not_fit_in_the_memory_of_a_cpu_raise_memory_error(name, gigabytes, monkeypatch):
    backend, kernel = open_backend("cpu"), attention_kernel(name)
    monkeypatch.setattr(backend, "read_free_memory_bytes", lambda: 64 * 10**9)
    with pytest.raises(MemoryError, match=f"out of memory: {gigabytes} GB are needed, but only 64.0 GB are free"):
        kernel.bind_operands(backend, AttentionProblem("bfloat16"), parse_shape("b1h4q65536k65536d128"))
