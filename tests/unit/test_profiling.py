"""Profiles: classes of events, shares of a step, FLOP from shapes, traces, and how they are told."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rendering import render_profile

from mamf.ceilings.share import KnownCeiling
from mamf.cli import main
from mamf.errors import RunLogError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.measurement import IDLE
from mamf.operations.tracing.classes import CLASSES, COMMUNICATION, UNCLASSIFIED, class_of
from mamf.operations.tracing.events import Event, Trace
from mamf.operations.tracing.shares import gaps, length, shares, union
from mamf.operations.tracing.torch_traces import trace_launch
from mamf.operations.tracing.traces import read_chrome_trace
from mamf.profiling.flops import dtype_of, flop_of
from mamf.profiling.kernel_tables import read_kernel_table
from mamf.profiling.log import read_profile_or_none, write_profile
from mamf.profiling.profile import profile_of
from mamf.report.formats import FORMATS

STEP = 60
TICKS = st.integers(0, STEP)
EVENTS = st.lists(st.tuples(st.sampled_from(CLASSES), TICKS, TICKS), max_size=10)


def grouped(events):
    """Intervals by class."""
    by_class = {}
    for name, *ends in events:
        by_class.setdefault(name, []).append((min(ends), max(ends)))
    return by_class


BY_CLASS = EVENTS.map(grouped)


# --- shares


@given(BY_CLASS)
def test_shares_and_idle_add_up_to_the_step(by_class):
    covered = union(interval for intervals in by_class.values() for interval in intervals)
    idle = length(gaps(covered, 0, STEP))
    assert sum(share.visible for share in shares(by_class).values()) + idle == STEP


@given(EVENTS)
def test_the_order_of_events_does_not_matter(events):
    assert shares(grouped(events)) == shares(grouped(reversed(events))) == shares(grouped(sorted(events)))


@given(BY_CLASS)
def test_visible_and_hidden_are_the_whole_time_of_a_class(by_class):
    for name, share in shares(by_class).items():
        assert share.visible + share.hidden == len({tick for low, high in by_class[name] for tick in range(low, high)})
        assert share.visible >= 0
        assert share.hidden >= 0


@given(BY_CLASS)
def test_of_communication_only_what_nothing_hides_is_told(by_class):
    told = shares(by_class).get(COMMUNICATION)
    others = union(each for name, found in by_class.items() if name != COMMUNICATION for each in found)
    at_work = {tick for low, high in others for tick in range(low, high)}
    alone = {tick for low, high in by_class.get(COMMUNICATION, ()) for tick in range(low, high)} - at_work
    assert (told.visible if told else 0) == len(alone)


# --- classes

LAUNCHED_BY_NAME = [
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(...)", "matmul"),
    ("Cijk_Alik_Bljk_BBS_BH_MT256x256x64_MI16x16x1", "matmul"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(...)", "attention"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
    ("Memcpy HtoD (Pinned -> Device)", "memory copies"),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "memory copies"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "elementwise"),
    ("triton_poi_fused_add_mul_3", "elementwise"),
    ("triton_per_fused_native_layer_norm_1", "normalization"),
    ("triton_red_fused__softmax_2", "reduction and softmax"),
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false>", "reduction and softmax"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction and softmax"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
    ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
    ("void at::native::indexSelectLargeIndex<float, long>", "embedding"),
    ("my_own_thing", UNCLASSIFIED),
]


@pytest.mark.parametrize(("name", "expected"), LAUNCHED_BY_NAME, ids=[name[:40] for name, _ in LAUNCHED_BY_NAME])
def test_a_kernel_without_an_operation_is_known_by_its_name(name, expected):
    assert class_of(Event(name, "copy" if name.startswith("Memcpy") else "kernel", 0, 1)) == expected


OPERATIONS = [
    ("aten::addmm", "matmul"),
    ("aten::_scaled_mm", "matmul"),
    ("aten::convolution_backward", "convolution"),
    ("aten::native_layer_norm_backward", "normalization"),
    ("aten::_fused_rms_norm", "normalization"),
    ("aten::gelu_backward", "elementwise"),
    ("aten::add_", "elementwise"),
    ("aten::_softmax_backward_data", "reduction and softmax"),
    ("aten::nll_loss_forward", "reduction and softmax"),
    ("aten::embedding_dense_backward", "embedding"),
    ("aten::_fused_adamw_", "optimizer"),
    ("aten::copy_", "memory copies"),
    ("aten::_flash_attention_forward", "attention"),
    ("flash_attn::_flash_attn_backward", "attention"),
    ("autograd::engine::evaluate_function: AddmmBackward0", "other"),
    ("aten::view", "other"),
    ("nccl:all_reduce", COMMUNICATION),
    ("somebodys::thing", UNCLASSIFIED),
]


@pytest.mark.parametrize(("name", "expected"), OPERATIONS)
def test_an_operation_has_a_class(name, expected):
    assert class_of(Event(name, "operation", 0, 1)) == expected


def launched(kernel, *callers):
    """A kernel below calls, the outermost first."""
    parent = None
    for name in callers:
        parent = Event(name, "annotation" if "#" in name else "operation", 0, 1, parent=parent)
    return Event(kernel, "kernel", 0, 1, parent=parent)


def test_the_operation_counts_before_the_kernels_name():
    assert class_of(launched("reduce_kernel", "aten::linear", "aten::addmm")) == "matmul"
    assert class_of(launched("elementwise_kernel", "aten::to", "aten::copy_")) == "memory copies"
    assert class_of(launched("nvjet_sm90", "MyFunctionBackward", "mine::gemm_like")) == "matmul"


def test_what_an_attention_an_optimizer_or_a_collective_calls_is_theirs():
    assert class_of(launched("nvjet", "aten::scaled_dot_product_attention", "aten::bmm")) == "attention"
    assert class_of(launched("elementwise", "Optimizer.step#AdamW.step", "aten::add_")) == "optimizer"
    in_closure = ("Optimizer.step#AdamW.step", "mamf: module model.mlp", "aten::linear", "aten::addmm")
    assert class_of(launched("nvjet", *in_closure)) == "matmul"
    assert class_of(launched("ncclDevKernel", "Optimizer.step#Z.step", "c10d::allreduce_")) == COMMUNICATION


def test_the_backward_of_what_an_attention_calls_is_attention():
    attention = Event("aten::scaled_dot_product_attention", "operation", 0, 2)
    product = Event("aten::bmm", "operation", 0, 1, parent=attention)
    node = Event("autograd::engine::evaluate_function: BmmBackward0", "operation", 3, 4, forward=product)
    assert class_of(Event("aten::bmm", "operation", 3, 4, parent=node)) == "attention"


def test_the_backward_of_a_forward_within_an_optimizer_is_not_the_optimizers():
    """As of Lightning, whose optimizers call a closure."""
    product = Event("aten::mm", "operation", 0, 1, parent=Event("Optimizer.step#AdamW.step", "annotation", 0, 9))
    node = Event("autograd::engine::evaluate_function: MmBackward0", "operation", 3, 4, forward=product)
    assert class_of(Event("aten::mm", "operation", 3, 4, parent=node)) == "matmul"


# --- FLOP


def operation(name, *dimensions, dtypes=(), values=()):
    return Event(name, "operation", 0, 1, dimensions=dimensions, dtypes=dtypes, values=values)


ATTENTION = ([2, 4, 128, 64], [2, 2, 128, 64], [2, 2, 128, 64])


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (operation("aten::mm", [3, 5], [5, 7]), 2 * 3 * 5 * 7),
        (operation("aten::addmm", [7], [3, 5], [5, 7]), 2 * 3 * 5 * 7),
        (operation("aten::bmm", [2, 3, 5], [2, 5, 7]), 2 * 2 * 3 * 5 * 7),
        (operation("aten::baddbmm", [2, 3, 7], [2, 3, 5], [2, 5, 7]), 2 * 2 * 3 * 5 * 7),
        (operation("aten::_grouped_mm", [3, 5], [2, 5, 7]), 2 * 3 * 5 * 7),
        (operation("aten::_grouped_mm", [2, 3, 5], [5, 7]), 2 * 3 * 5 * 7),
        (operation("aten::_grouped_mm", [3, 5], [5, 7]), 2 * 3 * 5 * 7),
        (operation("aten::_scaled_grouped_mm", [2, 3, 5], [2, 5, 7]), 2 * 2 * 3 * 5 * 7),
        (operation("aten::linear", [2, 3, 5], [7, 5], [7]), 2 * 2 * 3 * 5 * 7),
        (
            operation(
                "aten::convolution",
                *([2, 3, 8, 8], [8, 3, 3, 3]),
                values=["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"],
            ),
            2 * 2 * 4 * 4 * 8 * 27,
        ),
        (
            operation(
                "aten::convolution_backward",
                *([2, 8, 4, 4], [2, 3, 8, 8], [8, 3, 3, 3]),
                values=["", "", "", "[8]", "", "", "", "False", "[0, 0]", "1", "[False, True, True]"],
            ),
            2 * 2 * 4 * 4 * 8 * 27,
        ),
        (
            operation("aten::scaled_dot_product_attention", *ATTENTION, values=["", "", "", "", "0.", "False"]),
            4 * 2 * 4 * 128 * 128 * 64,
        ),
        (
            operation("aten::scaled_dot_product_attention", *ATTENTION, values=["", "", "", "", "0.", "True"]),
            4 * 2 * 4 * 128 * 129 // 2 * 64,
        ),
        (
            operation(
                "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                *([], *ATTENTION),
                values=["", "", "", "", "", "", "0.", "False"],
            ),
            5 * 2 * 2 * 4 * 128 * 128 * 64,
        ),
        (operation("aten::mm"), None),
        (operation("aten::gelu", [3, 5]), None),
    ],
    ids=lambda each: each.name if isinstance(each, Event) else "",
)
def test_flop_follow_from_the_recorded_shapes(event, expected):
    assert flop_of(event) == expected


def test_the_dtype_is_of_what_is_multiplied():
    assert dtype_of(operation("aten::addmm", dtypes=["float", "c10::BFloat16", "c10::BFloat16"])) == "bfloat16"
    assert dtype_of(operation("aten::mm", dtypes=["c10::Float8_e4m3fn"])) == "float8_e4m3fn"


# --- traces


def raw(category, name, begun, duration, **arguments):
    ids = {"pid": 1, "tid": 1}
    return {"ph": "X", "cat": category, "name": name, "ts": begun, "dur": duration, **ids, "args": arguments}


GPU_TRACE = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
    "traceEvents": [
        raw("user_annotation", "mamf: step", 90, 10),
        raw("cpu_op", "aten::linear", 100, 50),
        raw("cpu_op", "aten::addmm", 110, 30, **{"Input Dims": [[7], [3, 5], [5, 7]]}, **{"Input type": ["float"] * 3}),
        raw("cuda_runtime", "cudaLaunchKernel", 120, 5, correlation=1),
        raw("kernel", "nvjet_sm90", 200, 100, correlation=1, device=0, stream=7),
        raw("cpu_op", "nccl:all_reduce", 160, 10),
        raw("cuda_runtime", "cudaLaunchKernelExC", 162, 5, correlation=2),
        raw("kernel", "ncclDevKernel_AllReduce", 250, 150, correlation=2, device=0, stream=9),
        raw("cuda_runtime", "cudaGraphLaunch", 180, 5, correlation=3),
        raw("kernel", "flash_fwd_kernel", 420, 30, correlation=3, device=0, stream=7),
        raw("cuda_runtime", "cudaDeviceSynchronize", 190, 280),
        raw("user_annotation", "mamf: step", 480, 20),
        raw("kernel", "of the next step", 600, 100, correlation=9, device=0, stream=7),
    ],
}


def written(path, trace):
    path.write_text(json.dumps(trace))
    return path


def unknown(dtype):
    return None


def at(flops):
    """A ceiling of so many FLOP/s, whatever the dtype."""
    return lambda dtype: KnownCeiling(dtype, "sustained", flops / 1e12, "contributed", "contributed for a CPU")


def profile_from(tmp_path, trace, ceiling_of=unknown):
    return profile_of(read_chrome_trace(written(tmp_path / "trace.json", trace)), ceiling_of)


def test_a_trace_of_a_device(tmp_path):
    profile = profile_from(tmp_path, GPU_TRACE, at(1e9))
    rows = {row.name: row for row in profile.classes}
    assert (profile.steps, profile.device) == (1, "NVIDIA H200")
    assert profile.seconds == pytest.approx(400e-6)
    assert {name: round(row.visible / profile.whole_seconds, 6) for name, row in rows.items()} == {
        "attention": 0.075,
        "matmul": 0.25,
        COMMUNICATION: 0.25,
        IDLE: 0.425,
    }
    assert rows[COMMUNICATION].hidden == pytest.approx(50e-6)
    assert rows["matmul"].flop == {"float32": 210}
    assert rows["matmul"].mamfu == pytest.approx(210 / 1e9 / 100e-6)
    assert rows["attention"].tflops is None
    assert profile.notes == ("1 of 4 kernels and copies were replayed from graphs: known by their names alone",)


@pytest.mark.parametrize(
    ("cuda", "own", "told"),
    [("13.0", None, "1"), ("12.6", None, "1"), ("12.6", "0", "0"), ("12.4", None, None), (None, None, None)],
)
def test_a_profile_of_a_launch_leaves_nothing_attached_that_slows_later_ones(monkeypatch, cuda, own, told):
    """But before CUDA 12.6, where graphs crash by that."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("TEARDOWN_CUPTI", own or "")
    if own is None:
        monkeypatch.delenv("TEARDOWN_CUPTI")
    during = []
    trace_launch(lambda: during.append(os.environ.get("TEARDOWN_CUPTI")))
    assert during == [told]
    assert os.environ.get("TEARDOWN_CUPTI") == own


def test_steps_of_torch_profiler_are_found_as_the_device_had_them(tmp_path):
    events = [
        raw("user_annotation", "ProfilerStep#3", 0, 100),
        raw("cpu_op", "aten::mm", 10, 20),
        raw("gpu_user_annotation", "ProfilerStep#3", 50, 100),
        raw("kernel", "nvjet", 50, 100, device=0),
    ]
    profile = profile_from(tmp_path, {"traceEvents": events})
    assert (profile.steps, profile.classes[-1].visible) == (1, 0)


def test_a_trace_without_steps_is_told_as_a_whole(tmp_path):
    profile = profile_from(tmp_path, {"traceEvents": [raw("cpu_op", "aten::mm", 10, 20)]})
    assert profile.steps is None
    assert "its steps are unknown" in render_profile("table", "x", profile)


def test_a_packed_trace_is_read(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(GPU_TRACE).encode()))
    assert read_chrome_trace(path).steps == 1


def test_a_trace_is_read_up_to_a_size_packed_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr("mamf.operations.tracing.traces._MAX_BYTES", 1 << 20)
    packed = tmp_path / "zeros.json.gz"
    packed.write_bytes(gzip.compress(bytes(1 << 21)))
    for path in (packed, Path("/dev/zero")):
        with pytest.raises(UsageError, match="larger than 1 MiB unpacked"):
            read_chrome_trace(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": 1, "dur": 0}]}',
        "",
        "[]",
        "{}",
        '{"traceEvents": []}',
        '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}',
        '{"traceEvents": 1}',
    ],
)
def test_what_is_no_trace_is_refused_in_a_line(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is not a Chrome trace of torch.profiler"):
        read_chrome_trace(path)


def test_the_cpu_counts_each_operation_without_those_it_calls():
    outer = Event("aten::scaled_dot_product_attention", "operation", 0, 10)
    copy = Event("aten::copy_", "operation", 12, 16)
    inner = Event("aten::bmm", "operation", 2, 5, parent=outer)
    profile = profile_of(Trace((outer, inner, copy), 0, 20, 2), unknown)
    assert [(row.name, row.visible, row.calls) for row in profile.classes] == [
        ("attention", 10, 1),
        ("memory copies", 4, 1),
        (IDLE, 6, 2),
    ]


@pytest.mark.parametrize(("small", "is_known"), [(2, True), (5, False)])
def test_a_hundredth_of_the_flop_may_be_of_a_dtype_without_a_ceiling(small, is_known):
    main = Event("aten::mm", "operation", 0, 8, dimensions=[[30, 5], [5, 7]], dtypes=["c10::BFloat16"])
    table = Event("aten::mm", "operation", 8, 10, dimensions=[[small, 1], [1, 5]], dtypes=["float"])
    ceilings = {"bfloat16": at(700)("bfloat16")}
    rows = {row.name: row for row in profile_of(Trace((main, table), 0, 10, 1), ceilings.get).classes}
    assert rows["matmul"].flop == {"bfloat16": 2100, "float32": 10 * small}
    assert rows["matmul"].mamfu == (pytest.approx(2100 / 700 / 10) if is_known else None)


def test_what_a_product_calls_computes_its_flop_once():
    linear = Event("aten::linear", "operation", 0, 10, dimensions=[[3, 5], [7, 5]], dtypes=["float"])
    copy = Event("aten::copy_", "operation", 1, 2, parent=linear)
    product = Event("aten::mm", "operation", 2, 9, parent=linear, dimensions=[[3, 5], [5, 7]], dtypes=["float"])
    rows = {row.name: row for row in profile_of(Trace((linear, copy, product), 0, 10, 1), at(70)).classes}
    assert rows["matmul"].flop == {"float32": 210}
    assert rows["matmul"].mamfu == pytest.approx(210 / 70 / 9)
    assert rows["memory copies"].flop == {}


# --- tables of other profilers

NSYS_TRACE = """Processing [report.sqlite] with [cuda_gpu_trace.py]...

Start (ns),Duration (ns),CorrId,Device,Ctx,GreenCtx,Strm,Name
"1,000",100,1,NVIDIA H200 (0),1,,7,nvjet_sm90
1050,150,2,NVIDIA H200 (0),1,,9,ncclDevKernel_AllReduce
1300,100,3,NVIDIA H200 (0),1,,7,[CUDA memcpy Device-to-Device]
"""
ROCPROF_TRACE = """"Kind","Agent_Id","Queue_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"
"KERNEL_DISPATCH",1,2,"Cijk_Alik_Bljk_BBS",1,1000,1300
"KERNEL_DISPATCH",1,2,"attn_fwd",2,1300,1400
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NSYS_TRACE, {"matmul": 0.25, "memory copies": 0.25, COMMUNICATION: 0.25, IDLE: 0.25}),
        (ROCPROF_TRACE, {"attention": 0.25, "matmul": 0.75, IDLE: 0}),
    ],
    ids=["nsys", "rocprofv3"],
)
def test_tables_of_other_profilers_are_told_by_class(tmp_path, text, expected):
    path = tmp_path / "kernels.csv"
    path.write_text(text)
    profile = profile_of(read_kernel_table(path), unknown)
    assert {row.name: round(row.visible / profile.seconds, 6) for row in profile.classes} == expected


@pytest.mark.parametrize("text", ["", "Name,Other\nx,1\n", NSYS_TRACE.splitlines()[2] + "\n1,x,1,1,1,1,1,a\n"])
def test_what_is_no_such_table_is_refused_in_a_line(tmp_path, text):
    path = tmp_path / "kernels.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match="is not a list of launches from"):
        read_kernel_table(path)


# --- how it is told


@pytest.fixture
def profile(tmp_path):
    found = profile_from(tmp_path, GPU_TRACE, at(1e9))
    return replace(found, unprofiled_step_seconds=found.step_seconds / 1.25)


def test_a_log_gives_back_what_was_written(tmp_path, profile):
    path = tmp_path / "step.jsonl"
    write_profile(path, "mamf profile train.py", "train.py", profile)
    assert read_profile_or_none(path) == ("train.py", profile)
    with pytest.raises(RunLogError, match="a profile of a script"):
        read_run_log(path)


def test_a_log_that_is_damaged_names_the_line(tmp_path, profile):
    path = tmp_path / "step.jsonl"
    write_profile(path, "mamf profile train.py", "train.py", profile)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2].replace('"calls": 1', '"calls": "one"'), *lines[3:], ""]))
    with pytest.raises(RunLogError, match=r"line 3: field calls: expected `int`, got `str`"):
        read_profile_or_none(path)
    path.write_text("\n".join([*lines[:-1], ""]))
    with pytest.raises(RunLogError, match="no summary"):
        read_profile_or_none(path)
    summary = json.loads(lines[-1])
    for wrong in ({"seconds": 0.0}, {"steps": 0}, {"unprofiled_step_seconds": 0.0}, {"unprofiled_step_seconds": -1.0}):
        path.write_text("\n".join([*lines[:-1], json.dumps({**summary, **wrong}), ""]))
        with pytest.raises(RunLogError, match="a profile of no step"):
            read_profile_or_none(path)


def test_a_table_tells_shares_flop_and_the_profilers_cost(profile):
    text = render_profile("table", "train.py", profile)
    assert "train.py on NVIDIA H200: 1 step of 0.4000 ms with the profiler" in text
    assert "0.3200 ms without it, in the steps right before: with the profiler a step is 25% longer" in text
    # 2 x 3 x 5 x 7 FLOP in 320 us, of a ceiling of 1e9 a second.
    assert "a step multiplies 0.2100 kFLOP: 0.6562 MFLOPS, 0.1% MAMFU in the time without it" in text
    found = json.loads(render_profile("json", "train.py", profile))
    assert "MAMFU: of 1.000 GFLOPS, the float32 sustained ceiling: contributed for a CPU" in text
    assert (found["flop"], found["mamfu"]) == (210, pytest.approx(210 / 1e9 / 320e-6))
    shareless = replace(profile, classes=tuple(replace(row, mamfu=None) for row in profile.classes))
    assert "0.6562 MFLOPS in the time" in render_profile("table", "train.py", shareless)
    lines = list(map(str.split, text.splitlines()))
    # 100 of 320 us; 170 us of gaps in the trace less the 80 that the profiler adds.
    assert ["matmul", "31.2%", "0.1000", "-", "1", "0.2100", "2.100", "0.2%"] in lines
    assert [IDLE, "28.1%", "0.09000", "-", "3", "-", "-", "-"] in lines
    assert ["nvjet_sm90", "matmul", "1", "0.1000", "31.2%"] in lines
    told = "shares are of 0.3200 ms without the profiler; idle is what 0.2300 ms of work in the trace leave of it"
    assert told in text
    assert "replayed from graphs" in text


def idle_of(profile):
    return next(row for row in profile.classes if row.name == IDLE)


def test_what_the_profiler_adds_is_no_idle_time(profile):
    """For any time without it, shares add up, and idle is at most what the work leaves of that time."""
    busy = profile.busy_seconds
    for took in (0.9 * busy, busy, 1.1 * busy, profile.seconds, 2 * profile.seconds):
        timed = replace(profile, unprofiled_step_seconds=took)
        assert idle_of(timed).visible == pytest.approx(max(0.0, took - busy), abs=1e-18)
        assert sum(row.visible for row in timed.classes) == pytest.approx(timed.whole_seconds)


def test_work_that_the_profiler_slows_beyond_the_step_leaves_idle_unknown(profile):
    text = render_profile("table", "x", replace(profile, unprofiled_step_seconds=2e-4))
    told = "0.2300 ms of work in the trace, slowed by the profiler, exceed the step without it: shares are of this work"
    assert told in text


def test_without_a_timed_step_idle_is_an_upper_bound(profile):
    text = render_profile("table", "x", replace(profile, unprofiled_step_seconds=None))
    assert [IDLE, "42.5%", "0.1700", "-", "3", "-", "-", "-"] in map(str.split, text.splitlines())
    assert "a step without the profiler was not timed: idle is an upper bound" in text


def test_a_class_above_its_sustained_ceiling_says_why(tmp_path):
    trace = read_chrome_trace(written(tmp_path / "trace.json", GPU_TRACE))
    text = render_profile("table", "x", profile_of(trace, at(2e6)))
    assert "105.0%" in text
    assert text.count("matmul is above its sustained ceiling, which is of matmuls back to back: between other") == 1


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_holds_the_classes(profile, form):
    assert "matmul" in render_profile(form, "train.py", profile)
    if form == "json":
        assert sum(row["share"] for row in json.loads(render_profile(form, "x", profile))["classes"]) == pytest.approx(
            1
        )


@pytest.mark.parametrize("command", ["compare", "plot", "roofline"])
def test_a_profile_has_no_samples_for_other_commands(profile, tmp_path, capsys, command):
    path = tmp_path / "step.jsonl"
    write_profile(path, "mamf profile train.py", "train.py", profile)
    assert main([command, *[str(path)] * (1 + (command == "compare"))]) == 2
    assert "only 'mamf show' and 'mamf report' read it" in capsys.readouterr().err
