"""Test every kernel of decode attention against the float64 reference.

Kernels of libraries run on fake libraries, and torch's own kernels run on the CPU.
"""

import sys
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from decode_fakes import LIBRARIES
from verdicts import verified

from mamf.backend import Backend
from mamf.engine.measure import classify_error
from mamf.engine.regimes.base import CheckedKernel, WrongResultError
from mamf.errors import PluginError
from mamf.operations.decode.operation import DecodeOperation, DecodeProblem, DecodeShape
from mamf.operations.decode.torch_decode import PlannedKernel, compute_sequence_attention
from mamf.operations.decode.torch_kernels import SdpaKvcache
from mamf.plugins.contracts import enforce_contract
from mamf.plugins.discovery import load_backend_class, make_kernel, open_backend

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.usefixtures("use_one_torch_thread"),
]
make_decode_kernel = partial(make_kernel, DecodeOperation())
ONE_TOKEN, RAGGED = "b2h8kv2q1c300d64", "b3h8kv2q1c300ud64"
PAGED, PAGED_RAGGED = "b2h8kv2q1c300d64p16", "b3h8kv2q1c300td64p16"
FEW_TOKENS, FEW_TOKENS_RAGGED = "b2h8kv2q4c300d64p256", "b3h8kv2q5c300ud64p256"
PROMPTS, PAGED_PROMPTS = "b3h8kv2q90c90ud64", "b3h8kv2q90c90ud64p16"
LATENT, FEW_TOKENS_LATENT = "b2h16kv1q1c200d576v512lp64", "b2h16kv1q3c200td576v512lp64"
#: For each kernel and some shapes that it supports: the name that the fake library records when it is called.
CALLS = {
    "flash-attn-2-kvcache": {
        ONE_TOKEN: "kvcache",
        RAGGED: "varlen",
        FEW_TOKENS: "kvcache",
        FEW_TOKENS_RAGGED: "varlen",
        PROMPTS: "varlen",
    },
    "flash-attn-3-kvcache": {
        ONE_TOKEN: "kvcache",
        RAGGED: "varlen",
        PAGED: "kvcache",
        PAGED_RAGGED: "kvcache",
        FEW_TOKENS_RAGGED: "kvcache",
        PROMPTS: "varlen",
        PAGED_PROMPTS: "kvcache",
        LATENT: "kvcache with qv",
        FEW_TOKENS_LATENT: "kvcache with qv",
    },
    "flashinfer-decode": {PAGED: "plan", PAGED_RAGGED: "plan"},
    "flashinfer-prefill": {PAGED: "plan", FEW_TOKENS: "plan", FEW_TOKENS_RAGGED: "plan", PAGED_PROMPTS: "plan"},
    "flashinfer-mla": {LATENT: "plan", FEW_TOKENS_LATENT: "plan"},
    "aiter-kvcache": {
        PAGED: "prefill",
        PAGED_RAGGED: "prefill",
        FEW_TOKENS_RAGGED: "prefill",
        PAGED_PROMPTS: "prefill",
    },
    "aiter-mla": {LATENT: "mla", FEW_TOKENS_LATENT: "mla"},
}
#: For each kernel and some shapes that it does not support: a part of the reason that it gives.
REFUSALS = {
    "flash-attn-2-kvcache": {
        PAGED: "does not support pages of 16 tokens: use a multiple of 256",
        "b2h16kv1q1c200d576v512l": "does not support a latent",
    },
    "flash-attn-3-kvcache": {"b2h16kv1q1c200td576v512l": "needs a paged latent cache if sequences differ in length"},
    "flashinfer-decode": {ONE_TOKEN: "needs a paged cache", FEW_TOKENS: "supports at most 1 new tokens"},
    "flashinfer-prefill": {"b2h8kv2q1c300d80p16": "does not support head dimension 80"},
    "flashinfer-mla": {
        PAGED: "needs a latent cache: use --latent",
        "b2h8kv1q1c200d96v64lp64": "does not support a latent cache with head dimensions 96/64",
    },
    "aiter-kvcache": {ONE_TOKEN: "needs a paged cache"},
    "aiter-mla": {PAGED: "needs a latent cache: use --latent"},
    "sdpa-kvcache": {
        FEW_TOKENS: "aligns causal masks to the top left: use --query-lens 1, or as many as --cache-lens",
        PAGED: "needs a contiguous cache: use --page-sizes none",
        RAGGED: "needs sequences of equal length: use --lengths equal",
    },
}


def parse_shape(text):
    return DecodeShape.parse(text)


@pytest.fixture
def recorded_calls():
    return []


@pytest.fixture
def library(request, monkeypatch, recorded_calls):
    """Return a function that installs a kernel's fake library and the vendor's fake device.

    The function returns the kernel and the device.
    """

    def open_with(kernel):
        vendor, capability, fake = LIBRARIES[kernel]
        device = request.getfixturevalue(vendor)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        fake(monkeypatch, recorded_calls)
        return make_decode_kernel(kernel), device.kind(0)

    return open_with


@pytest.fixture
def cpu():
    return open_backend("cpu")


def prepare_kernel(kernel, backend, shape, problem=None, sets=1):
    problem, shape = problem or DecodeProblem(), parse_shape(shape) if isinstance(shape, str) else shape
    assert (
        kernel.explain_unsupported_problem(backend, problem) or kernel.explain_unsupported_shape(problem, shape)
    ) is None
    return kernel.prepare(backend, problem, shape, backend.make_operand_pool(problem.data, problem.seed), sets)


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, calls in CALLS.items() for shape in calls])
def test_the_right_function_of_a_library_is_called_and_its_result_is_right(name, shape, library, recorded_calls):
    kernel, backend = library(name)
    assert kernel.explain_unavailability(backend) is None
    verdict = verified(prepare_kernel(kernel, backend, shape, sets=2))
    assert verdict.ok, verdict
    assert CALLS[name][shape] in recorded_calls
    assert verdict.details["library"].startswith(kernel.distribution_name)


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, reasons in REFUSALS.items() for shape in reasons])
def test_an_unsupported_shape_is_explained_in_one_line(name, shape):
    reason = make_decode_kernel(name).explain_unsupported_shape(DecodeProblem(), parse_shape(shape))
    assert REFUSALS[name][shape] in reason
    assert "\n" not in reason


def test_a_build_without_pages_is_unsupported(library, monkeypatch):
    kernel, backend = library("flash-attn-3-kvcache")

    def refuse(*arguments, **options):
        raise RuntimeError("This flash attention build does not support paged KV.\nat flash_api.cpp:700")

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_with_kvcache", refuse)
    with pytest.raises(RuntimeError) as refused:
        prepare_kernel(kernel, backend, PAGED).launches[0]()
    assert classify_error(refused.value, kernel, backend)[0] == "unsupported"


def test_a_card_that_flash_attn_3_does_not_support_gets_another_decode_kernel_as_remedy(library, monkeypatch):
    kernel, backend = library("flash-attn-3-kvcache")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert (
        kernel.explain_unavailability(backend).remedy
        == "mamf attention --operation decode --kernel flash-attn-2-kvcache"
    )
    assert "; use mamf attention --operation decode" in str(kernel.explain_unavailability(backend))


def test_planning_is_not_part_of_a_launch_and_its_time_is_reported_separately(library, recorded_calls):
    kernel, backend = library("flashinfer-decode")
    prepared = prepare_kernel(kernel, backend, PAGED, sets=3)
    plan_count = recorded_calls.count("plan")
    verdict = verified(prepared)
    assert recorded_calls.count("plan") == plan_count == 2, (
        "plan once to compile and once to time it, and never in a launch"
    )
    assert verdict.details["planning_us"] >= 0
    assert {"tensor cores": True, "graph": False} in recorded_calls


@pytest.mark.parametrize("name", ["flashinfer-decode", "flashinfer-prefill"])
def test_a_cache_of_8_bits_is_verified_as_it_is_stored(name, library):
    kernel, backend = library(name)
    verdict = verified(prepare_kernel(kernel, backend, PAGED, DecodeProblem(cache_dtype="float8_e4m3fn"), sets=2))
    assert verdict.ok, verdict


# -- torch's own -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("sdpa-kvcache", ONE_TOKEN),
        ("sdpa-kvcache", "b2h8kv2q32c32d64"),
        ("sdpa-kvcache", "b2h8kv1q1c100d96v64l"),
        ("flex-kvcache", "b2h8kv2q1c300d64p128"),
        ("flex-kvcache", "b3h8kv2q1c700td64p128"),
        ("flex-kvcache", "b2h4q5c300d64p256"),
    ],
)
def test_a_kernel_of_torch_is_right_on_the_cpu(name, shape, dtype, cpu):
    verdict = verified(prepare_kernel(make_decode_kernel(name), cpu, shape, DecodeProblem(dtype), sets=2))
    assert verdict.ok, verdict


def test_flex_attention_says_on_a_cpu_that_it_is_uncompiled_and_torch_does_not(cpu, recwarn):
    prepared = prepare_kernel(make_decode_kernel("flex-kvcache"), cpu, "b2h8kv2q1c300d64p128")
    assert verified(prepared).details["ran"] == "uncompiled, as always on a CPU"
    warnings.warn("flex_attention called without torch.compile() is slow", stacklevel=1)  # torch itself warns only once
    assert not [warning for warning in recwarn if "flex_attention" in str(warning.message)]


def test_a_cache_that_does_not_fit_is_out_of_memory(cpu):
    kernel, shape = SdpaKvcache(), parse_shape("b64000h32kv8q1c262144d128")
    with pytest.raises(MemoryError, match="GB are needed") as failure:
        prepare_kernel(kernel, cpu, shape)
    assert classify_error(failure.value, kernel, cpu)[0] == "out_of_memory"


# -- wrong kernels -----------------------------------------------------------------------------------------------------


class SequentialDecode(SdpaKvcache):
    """A kernel of decode attention that computes one sequence after another, and has a fault if one is given."""

    name = "sequential"
    supports_pages = supports_ragged_lengths = True

    def __init__(self, fault=""):
        self.fault, self.first_q = fault, None

    def explain_unsupported_shape(self, problem, shape):
        return None

    def bind_operands(self, backend, problem, shape, tables):
        if self.fault == "unshuffled":
            pages, start = [], 0
            for count in tables.sequence_sizes.page_counts:
                pages.append(range(start, start + count))
                start += count
            tables = replace(tables, pages_by_sequence=pages)
        earlier_launches = []

        def launch(q, k, v):
            outputs = []
            for sequence, rows in tables.yield_query_slices():
                positions = tables.locate_tokens(sequence)
                positions = positions[:-1] if self.fault == "last token" else positions
                output = compute_sequence_attention(shape, q[rows], k[positions], v[positions])
                outputs.append(output.to(q.dtype))
            output = torch.cat(outputs)
            if self.fault == "one row":
                output[-1, -1] = 0
            self.first_q = q if self.first_q is None else self.first_q
            if self.fault == "other sets" and q is not self.first_q:
                output[-1, -1] = 0
            if self.fault == "scale":
                output *= 1.02
            if self.fault in ("remembers", "copies signs"):
                earlier_launches.append((output.clone(), v.clone()))
                output, first_v = earlier_launches[0]
                signs = (v * first_v).sum(0).sign() if self.fault == "copies signs" else torch.ones_like(first_v[0])
                output = output * signs.repeat_interleave(shape.heads_per_kv_head, 0)
            if self.fault == "table":
                tables.page_table[0, 0] = 0
                tables.concatenated_pages[0] += 1
            if self.fault == "cache":
                k[0] = 0
            return output

        return PlannedKernel(launch)


def test_the_reference_is_right_on_honest_launches(cpu):
    for shape in (ONE_TOKEN, PAGED_RAGGED, FEW_TOKENS_RAGGED, PAGED_PROMPTS):
        assert verified(prepare_kernel(SequentialDecode(), cpu, shape, sets=2)).ok


FAULTS = ["unshuffled", "last token", "one row", "scale", "remembers", "copies signs", "table", "cache"]


@pytest.mark.parametrize(
    ("fault", "sets"), [*((fault, sets) for fault in FAULTS for sets in (1, 3)), ("other sets", 3)]
)
def test_a_wrong_launch_is_found(fault, sets, cpu):
    prepared = prepare_kernel(SequentialDecode(fault), cpu, "b4h8kv2q2c40ud64p16", DecodeProblem("float32"), sets)
    assert len(prepared.launches) == sets
    checked = CheckedKernel(prepared)
    with pytest.raises(WrongResultError):
        for _ in range(3):
            checked.warm_up_and_verify(cpu)


# -- graphs ------------------------------------------------------------------------------------------------------------


def make_backend_with_graphs(skipped_launches=()):
    """Return a CPU backend with graphs, guarded as in a run.

    A replay repeats the launches in order, and writes their results to the same memory. It leaves out the launches with
    the numbers in ``skipped_launches``.
    """

    class CpuWithGraphs(load_backend_class("cpu")):
        has_graphs = True
        captured_launch_count = 0

        def capture_graph(self, launches):
            self.captured_launch_count, results = len(launches), [launch() for launch in launches]

            def replay():
                for number, (launch, result) in enumerate(zip(launches, results, strict=True)):
                    if number not in skipped_launches:
                        result.copy_(launch())

            return replay, results

    return enforce_contract(CpuWithGraphs(0), Backend, "backend graphs")


@pytest.mark.parametrize("result", [[print, []], (print,), ([], print)])
def test_a_wrong_return_type_of_capture_graph_is_an_error(result):
    backend = make_backend_with_graphs()
    type(backend).capture_graph = lambda self, launches: result
    guarded_backend = enforce_contract(type(backend)(0), Backend, "backend graphs")
    with pytest.raises(
        PluginError, match=r"capture_graph returned a \w+, not tuple\[.*Callable\[\[\], object\], list\[object\]\]"
    ):
        guarded_backend.capture_graph([])


def test_a_graph_of_several_launches_is_one_launch_and_all_its_outputs_are_verified():
    problem, shape, backend = DecodeProblem(graph=True), "b2h8kv2q1c300d64", make_backend_with_graphs()
    problem_of_three_launches = replace(problem)
    object.__setattr__(problem_of_three_launches, "count_kernel_launches", lambda shape: 3)
    prepared = prepare_kernel(SdpaKvcache(), backend, shape, problem_of_three_launches, sets=3)
    assert (len(prepared.launches), backend.captured_launch_count) == (1, 3)
    assert verified(prepared).ok
    skipping_backend = make_backend_with_graphs(skipped_launches=[1])
    prepared = prepare_kernel(SdpaKvcache(), skipping_backend, shape, problem_of_three_launches)
    with pytest.raises(WrongResultError):
        CheckedKernel(prepared).warm_up_and_verify(skipping_backend)


def test_a_device_without_graphs_says_so(cpu):
    assert (
        SdpaKvcache().explain_unsupported_problem(cpu, DecodeProblem(graph=True))
        == "cpu cannot capture launches in a graph: remove --graph"
    )


def test_cuda_captures_launches_that_ran_before_on_another_stream(cuda, monkeypatch):
    events, fake_stream = [], SimpleNamespace(wait_stream=lambda other: events.append("wait"))

    @contextmanager
    def graph(cuda_graph):
        events.append("begin")
        yield
        events.append("end")

    fakes = {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: events.append("replay")),
        "graph": graph,
        "Stream": lambda: fake_stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda: fake_stream,
    }
    backend = enforce_contract(cuda.kind(0), Backend, "backend cuda")
    vendor = sys.modules[type(backend).__module__].torch.cuda
    for name, fake in fakes.items():
        monkeypatch.setattr(vendor, name, fake, raising=False)
    assert backend.has_graphs
    replay, results = backend.capture_graph([lambda: events.append("one") or 1, lambda: events.append("two") or 2])
    replay()
    assert results == [1, 2]
    assert events == ["wait", "one", "two", "wait", "begin", "one", "two", "end", "replay"]
