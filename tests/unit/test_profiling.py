"""Test profiles of training steps: the shares of classes, FLOP from shapes, traces, logs and reports."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering import render_profile

from mamf.errors import RunLogError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.measurement import IDLE_LABEL, Rate
from mamf.profiling.classes import COMMUNICATION, WORK_CLASSES, compute_visible_and_hidden_seconds
from mamf.profiling.flops import count_operation_flop
from mamf.profiling.log import read_profile_or_none, write_profile
from mamf.profiling.profile import make_profile
from mamf.profiling.traces import Event, Trace, find_gaps, merge_intervals, read_trace, sum_interval_seconds

STEP = 60
TICKS = st.integers(0, STEP)
EVENTS = st.lists(st.tuples(st.sampled_from(WORK_CLASSES), TICKS, TICKS), max_size=10)


def grouped(events):
    """Return the intervals of events by class. The two ends of an event may be in any order."""
    by_class = {}
    for name, *ends in events:
        by_class.setdefault(name, []).append((min(ends), max(ends)))
    return by_class


# --- shares


@given(EVENTS.map(grouped))
def test_each_instant_counts_for_one_class_and_for_communication_last(by_class):
    found = compute_visible_and_hidden_seconds(by_class)
    covered = merge_intervals(interval for intervals in by_class.values() for interval in intervals)
    assert sum(visible for visible, _ in found.values()) + sum_interval_seconds(find_gaps(covered, 0, STEP)) == STEP
    ticks = {name: {tick for low, high in each for tick in range(low, high)} for name, each in by_class.items()}
    for name, visible_and_hidden in found.items():
        assert sum(visible_and_hidden) == len(ticks[name])
        assert min(visible_and_hidden) >= 0
    others = set().union(*(each for name, each in ticks.items() if name != COMMUNICATION))
    exposed = found[COMMUNICATION][0] if COMMUNICATION in found else 0
    assert exposed == len(ticks.get(COMMUNICATION, set()) - others)


# --- FLOP


def operation(name, *dimensions, dtypes=(), values=()):
    return Event(name, "operation", 0, 1, argument_shapes=dimensions, argument_dtypes=dtypes, argument_values=values)


ATTENTION = ([2, 4, 128, 64], [2, 2, 128, 64], [2, 2, 128, 64])
PRODUCT, CONVOLUTION, SQUARE = 2 * 3 * 5 * 7, 2 * 2 * 4 * 4 * 8 * 27, 2 * 2 * 4 * 128 * 128 * 64
STRIDES = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
MASK = ["", "", "", "[8]", "", "", "", "False", "[0, 0]", "1", "[False, True, True]"]
ON_CPU_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


@pytest.mark.parametrize(
    ("name", "dimensions", "values", "expected"),
    [
        ("mm", ([3, 5], [5, 7]), (), PRODUCT),
        ("addmm", ([7], [3, 5], [5, 7]), (), PRODUCT),
        ("bmm", ([2, 3, 5], [2, 5, 7]), (), 2 * PRODUCT),
        ("baddbmm", ([2, 3, 7], [2, 3, 5], [2, 5, 7]), (), 2 * PRODUCT),
        ("_grouped_mm", ([3, 5], [2, 5, 7]), (), PRODUCT),
        ("_grouped_mm", ([2, 3, 5], [5, 7]), (), PRODUCT),
        ("_grouped_mm", ([3, 5], [5, 7]), (), PRODUCT),
        ("_scaled_grouped_mm", ([2, 3, 5], [2, 5, 7]), (), 2 * PRODUCT),
        ("linear", ([2, 3, 5], [7, 5], [7]), (), 2 * PRODUCT),
        ("convolution", ([2, 3, 8, 8], [8, 3, 3, 3]), STRIDES, CONVOLUTION),
        ("convolution_backward", ([2, 8, 4, 4], [2, 3, 8, 8], [8, 3, 3, 3]), MASK, CONVOLUTION),
        ("scaled_dot_product_attention", ATTENTION, [*[""] * 4, "0.", "False"], 2 * SQUARE),
        ("scaled_dot_product_attention", ATTENTION, [*[""] * 4, "0.", "True"], SQUARE * 129 // 128),
        (ON_CPU_BACKWARD, ([], *ATTENTION), [*[""] * 6, "0.", "False"], 5 * SQUARE),
        ("mm", (), (), None),
        ("gelu", ([3, 5],), (), None),
    ],
)
def test_flop_follow_from_the_recorded_shapes(name, dimensions, values, expected):
    assert count_operation_flop(operation(f"aten::{name}", *dimensions, values=values)) == expected


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
    """Return a lookup function that gives a ceiling of ``flops`` FLOP/s for every dtype."""
    return lambda dtype: Rate(
        rate=flops / 1e12,
        dtype=dtype,
        device="",
        source="contributed",
        regime="sustained",
        description="contributed for a CPU",
    )


def profile_from(tmp_path, trace, find_ceiling=unknown, unprofiled_step_seconds=None):
    return make_profile(read_trace(written(tmp_path / "trace.json", trace)), find_ceiling, unprofiled_step_seconds)


def test_a_trace_of_a_device(tmp_path):
    profile = profile_from(tmp_path, GPU_TRACE, at(1e9))
    rows = {row.name: row for row in profile.classes}
    assert (profile.steps, profile.device) == (1, "NVIDIA H200")
    assert profile.seconds == pytest.approx(400e-6)
    assert {name: round(row.visible / profile.whole_seconds, 6) for name, row in rows.items()} == {
        "attention": 0.075,
        "matmul": 0.25,
        COMMUNICATION: 0.25,
        IDLE_LABEL: 0.425,
    }
    assert rows[COMMUNICATION].hidden == pytest.approx(50e-6)
    assert rows["matmul"].flop == {"float32": 210}
    assert rows["matmul"].mamfu == pytest.approx(210 / 1e9 / 100e-6)
    assert rows["attention"].tflops is None
    assert profile.notes == ("1 of 4 kernels and copies were replayed from graphs, so only their names are known",)


def test_steps_of_torch_profiler_are_found_as_the_device_had_them(tmp_path):
    events = [
        raw("user_annotation", "ProfilerStep#3", 0, 100),
        raw("cpu_op", "aten::mm", 10, 20),
        raw("gpu_user_annotation", "ProfilerStep#3", 50, 100),
        raw("kernel", "nvjet", 50, 100, device=0),
    ]
    profile = profile_from(tmp_path, {"traceEvents": events})
    assert (profile.steps, [row.name for row in profile.classes]) == (1, ["unclassified"])  # no idle time
    profile = profile_from(tmp_path, {"traceEvents": [raw("cpu_op", "aten::mm", 10, 20)]})
    assert profile.steps is None
    assert "the trace does not mark its steps" in render_profile("table", "x", profile)


def test_a_trace_without_steps_is_split_by_the_steps_of_its_optimizer(tmp_path):
    name = "Optimizer.step#AdamW.step"
    on_host = [raw("user_annotation", name, at, 10) for at in (0, 100, 200)]
    work = [raw("cpu_op", "aten::mm", 150, 20)]
    profile = profile_from(tmp_path, {"traceEvents": [*on_host, *work]})
    assert (profile.steps, profile.seconds) == (2, pytest.approx(200e-6))
    assert f"a step ends with {name}" in profile.notes
    on_device = [raw("gpu_user_annotation", name, at, 10) for at in (50, 170, 290)]
    kernel = raw("kernel", "nvjet", 180, 100, device=0)
    profile = profile_from(tmp_path, {"traceEvents": [*on_host, *work, *on_device, kernel]})
    assert (profile.steps, profile.seconds) == (2, pytest.approx(240e-6))
    in_hooks = [raw("cpu_op", "autograd::engine::evaluate_function: AddBackward0", at, 30) for at in (0, 100, 200)]
    assert profile_from(tmp_path, {"traceEvents": [*in_hooks, *on_host, *work]}).steps is None


def test_a_trace_is_read_up_to_a_size_packed_or_not(tmp_path, monkeypatch):
    small, packed, plain = (tmp_path / name for name in ("trace.json.gz", "zeros.json.gz", "zeros.json"))
    small.write_bytes(gzip.compress(json.dumps(GPU_TRACE).encode()))
    assert read_trace(small).step_count == 1
    monkeypatch.setattr("mamf.profiling.traces._MAX_TRACE_BYTES", 1 << 20)
    packed.write_bytes(gzip.compress(bytes(1 << 21)))
    plain.write_bytes(bytes(1 << 21))
    for path in (packed, plain):
        with pytest.raises(UsageError, match="larger than 1 MiB after decompression"):
            read_trace(path)
    with pytest.raises(UsageError, match="/dev/zero is not a regular file"):
        read_trace(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": 1, "dur": 0}]}',
        "",
        "[]",
        '{"traceEvents": []}',
        '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}',
        json.dumps({"traceEvents": [raw("kernel", "x", ts, ts + 1) for ts in (0, 10**400)]}),
        '{"traceEvents": 1}',
        "Name,Other\nx,1\n",
        "Start (ns),Duration (ns),Name\n1,a,x\n",
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, text):
    for name, what in (("trace.json", "a Chrome trace of torch.profiler"), ("kernels.csv", "")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UsageError, match=f"{name} is not {what}"):
            read_trace(path)


def test_the_cpu_counts_each_operation_without_those_it_calls():
    outer = Event("aten::scaled_dot_product_attention", "operation", 0, 10)
    copy = Event("aten::copy_", "operation", 12, 16)
    inner = Event("aten::bmm", "operation", 2, 5, caller=outer)
    profile = make_profile(Trace((outer, inner, copy), 0, 20, 2), unknown)
    assert [(row.name, row.visible, row.calls) for row in profile.classes] == [
        ("attention", 10, 1),
        ("memory copies", 4, 1),
        (IDLE_LABEL, 6, 2),
    ]


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
        (NSYS_TRACE, {"matmul": 0.25, "memory copies": 0.25, COMMUNICATION: 0.25, IDLE_LABEL: 0.25}),
        (ROCPROF_TRACE, {"attention": 0.25, "matmul": 0.75}),
    ],
    ids=["nsys", "rocprofv3"],
)
def test_tables_of_other_profilers_are_told_by_class(tmp_path, text, expected):
    path = tmp_path / "kernels.csv"
    path.write_text(text)
    profile = make_profile(read_trace(path), unknown)
    assert {row.name: round(row.visible / profile.seconds, 6) for row in profile.classes} == expected


# --- logs and reports


@pytest.fixture
def profile(tmp_path):
    return profile_from(tmp_path, GPU_TRACE, at(1e9), unprofiled_step_seconds=320e-6)


def test_a_log_gives_back_what_was_written(tmp_path, profile):
    path = tmp_path / "step.jsonl"
    write_profile(path, "mamf profile train.py", "train.py", profile)
    assert read_profile_or_none(path) == ("train.py", profile)
    with pytest.raises(RunLogError, match="a profile of a script: only 'mamf show' and 'mamf report' read it"):
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
        with pytest.raises(RunLogError, match="steps and seconds must be above 0"):
            read_profile_or_none(path)


def test_a_table_tells_shares_flop_and_the_profilers_cost(profile):
    text = render_profile("table", "train.py", profile)
    assert "train.py on NVIDIA H200: 1 step of 0.4000 ms with the profiler" in text
    assert "0.3200 ms without the profiler, in the steps right before: the profiler makes a step 25% longer" in text
    # 2 x 3 x 5 x 7 FLOP in 320 us, compared with a ceiling of 1e9 FLOP/s.
    assert "a step needs 0.2100 kFLOP: 0.6562 MFLOPS, 0.1% MAMFU, from the step time without the profiler" in text
    found = json.loads(render_profile("json", "train.py", profile))
    assert "MAMFU: share of 1.000 GFLOPS, the float32 sustained ceiling: contributed for a CPU" in text
    assert (found["flop"], found["mamfu"]) == (210, pytest.approx(210 / 1e9 / 320e-6))
    lines = list(map(str.split, text.splitlines()))
    # The matmul runs for 100 of 320 us. The trace has gaps of 170 us, but the profiler makes the step 80 us longer, so
    # 90 us are idle.
    assert ["matmul", "31.2%", "0.1000", "-", "1", "0.2100", "2.100", "0.2%"] in lines
    assert [IDLE_LABEL, "28.1%", "0.09000", "-", "-", "-", "-", "-"] in lines
    assert ["nvjet_sm90", "matmul", "1", "0.1000", "31.2%"] in lines
    told = (
        "shares are relative to the step time without the profiler (0.3200 ms); idle is "
        "this time minus the busy time in the trace (0.2300 ms)"
    )
    assert told in text
    assert "replayed from graphs" in text


@pytest.mark.parametrize(
    ("took", "said"),
    [
        (
            2e-4,
            "the device was busy for 0.2300 ms of a step in the trace, longer than a step without the profiler",
        ),
        (None, "mamf timed no step without the profiler: idle time is an upper bound"),
    ],
)
def test_how_certain_idle_is(tmp_path, took, said):
    timed = profile_from(tmp_path, GPU_TRACE, unprofiled_step_seconds=took)
    assert said in render_profile("table", "x", timed)
    assert timed.get_visible_seconds(IDLE_LABEL) == pytest.approx(0 if took else 1.7e-4)


def test_idle_is_an_upper_bound_if_steps_were_faster_with_the_profiler(tmp_path):
    slowed = profile_from(tmp_path, GPU_TRACE, unprofiled_step_seconds=1e-3)
    assert "largest parts of a step: idle at most 77.0%" in render_profile("table", "x", slowed)
    even = profile_from(tmp_path, GPU_TRACE, unprofiled_step_seconds=3e-4)
    assert "at most" not in render_profile("table", "x", even)


def test_a_class_above_its_sustained_ceiling_says_why(tmp_path):
    trace = read_trace(written(tmp_path / "trace.json", GPU_TRACE))
    text = render_profile("table", "x", make_profile(trace, at(2e6)))
    assert "105.0%" in text
    assert text.count("matmul is above its sustained ceiling, which matmuls back to back reach: between other") == 1
