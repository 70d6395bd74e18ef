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


def group_by_class(events):
    """Return the intervals of events by class. The two ends of an event may be in any order."""
    by_class = {}
    for name, *ends in events:
        by_class.setdefault(name, []).append((min(ends), max(ends)))
    return by_class


# --- shares


@given(EVENTS.map(group_by_class))
def test_each_instant_counts_for_one_class_and_for_communication_last(by_class):
    seconds_by_class = compute_visible_and_hidden_seconds(by_class)
    covered = merge_intervals(interval for intervals in by_class.values() for interval in intervals)
    visible_seconds = sum(visible for visible, _ in seconds_by_class.values())
    assert visible_seconds + sum_interval_seconds(find_gaps(covered, 0, STEP)) == STEP
    ticks = {
        name: {tick for low, high in intervals for tick in range(low, high)} for name, intervals in by_class.items()
    }
    for name, visible_and_hidden in seconds_by_class.items():
        assert sum(visible_and_hidden) == len(ticks[name])
        assert min(visible_and_hidden) >= 0
    ticks_of_others = set().union(*(class_ticks for name, class_ticks in ticks.items() if name != COMMUNICATION))
    exposed_seconds = seconds_by_class[COMMUNICATION][0] if COMMUNICATION in seconds_by_class else 0
    assert exposed_seconds == len(ticks.get(COMMUNICATION, set()) - ticks_of_others)


# --- FLOP


def make_operation_event(name, *dimensions, dtypes=(), values=()):
    return Event(name, "operation", 0, 1, argument_shapes=dimensions, argument_dtypes=dtypes, argument_values=values)


ATTENTION = ([2, 4, 128, 64], [2, 2, 128, 64], [2, 2, 128, 64])
MATMUL_FLOP, CONVOLUTION_FLOP, ATTENTION_MATMUL_FLOP = 2 * 3 * 5 * 7, 2 * 2 * 4 * 4 * 8 * 27, 2 * 2 * 4 * 128 * 128 * 64
CONVOLUTION_VALUES = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
CONVOLUTION_BACKWARD_VALUES = ["", "", "", "[8]", "", "", "", "False", "[0, 0]", "1", "[False, True, True]"]
CPU_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


@pytest.mark.parametrize(
    ("name", "dimensions", "values", "expected"),
    [
        ("mm", ([3, 5], [5, 7]), (), MATMUL_FLOP),
        ("addmm", ([7], [3, 5], [5, 7]), (), MATMUL_FLOP),
        ("bmm", ([2, 3, 5], [2, 5, 7]), (), 2 * MATMUL_FLOP),
        ("baddbmm", ([2, 3, 7], [2, 3, 5], [2, 5, 7]), (), 2 * MATMUL_FLOP),
        ("_grouped_mm", ([3, 5], [2, 5, 7]), (), MATMUL_FLOP),
        ("_grouped_mm", ([2, 3, 5], [5, 7]), (), MATMUL_FLOP),
        ("_grouped_mm", ([3, 5], [5, 7]), (), MATMUL_FLOP),
        ("_scaled_grouped_mm", ([2, 3, 5], [2, 5, 7]), (), 2 * MATMUL_FLOP),
        ("linear", ([2, 3, 5], [7, 5], [7]), (), 2 * MATMUL_FLOP),
        ("convolution", ([2, 3, 8, 8], [8, 3, 3, 3]), CONVOLUTION_VALUES, CONVOLUTION_FLOP),
        (
            "convolution_backward",
            ([2, 8, 4, 4], [2, 3, 8, 8], [8, 3, 3, 3]),
            CONVOLUTION_BACKWARD_VALUES,
            CONVOLUTION_FLOP,
        ),
        ("scaled_dot_product_attention", ATTENTION, [*[""] * 4, "0.", "False"], 2 * ATTENTION_MATMUL_FLOP),
        ("scaled_dot_product_attention", ATTENTION, [*[""] * 4, "0.", "True"], ATTENTION_MATMUL_FLOP * 129 // 128),
        (CPU_ATTENTION_BACKWARD, ([], *ATTENTION), [*[""] * 6, "0.", "False"], 5 * ATTENTION_MATMUL_FLOP),
        ("mm", (), (), None),
        ("gelu", ([3, 5],), (), None),
    ],
)
def test_flop_follow_from_the_recorded_shapes(name, dimensions, values, expected):
    assert count_operation_flop(make_operation_event(f"aten::{name}", *dimensions, values=values)) == expected


# --- traces


def make_trace_event(category, name, start, duration, **arguments):
    ids = {"pid": 1, "tid": 1}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, **ids, "args": arguments}


GPU_TRACE = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
    "traceEvents": [
        make_trace_event("user_annotation", "mamf: step", 90, 10),
        make_trace_event("cpu_op", "aten::linear", 100, 50),
        make_trace_event(
            "cpu_op", "aten::addmm", 110, 30, **{"Input Dims": [[7], [3, 5], [5, 7]]}, **{"Input type": ["float"] * 3}
        ),
        make_trace_event("cuda_runtime", "cudaLaunchKernel", 120, 5, correlation=1),
        make_trace_event("kernel", "nvjet_sm90", 200, 100, correlation=1, device=0, stream=7),
        make_trace_event("cpu_op", "nccl:all_reduce", 160, 10),
        make_trace_event("cuda_runtime", "cudaLaunchKernelExC", 162, 5, correlation=2),
        make_trace_event("kernel", "ncclDevKernel_AllReduce", 250, 150, correlation=2, device=0, stream=9),
        make_trace_event("cuda_runtime", "cudaGraphLaunch", 180, 5, correlation=3),
        make_trace_event("kernel", "flash_fwd_kernel", 420, 30, correlation=3, device=0, stream=7),
        make_trace_event("cuda_runtime", "cudaDeviceSynchronize", 190, 280),
        make_trace_event("user_annotation", "mamf: step", 480, 20),
        make_trace_event("kernel", "of the next step", 600, 100, correlation=9, device=0, stream=7),
    ],
}


def write_trace(path, trace):
    path.write_text(json.dumps(trace))
    return path


def find_no_ceiling(dtype):
    return None


def make_ceiling_lookup(flops):
    """Return a lookup function that gives a ceiling of ``flops`` FLOP/s for every dtype."""
    return lambda dtype: Rate(
        rate=flops / 1e12,
        dtype=dtype,
        device="",
        source="contributed",
        regime="sustained",
        description="contributed for a CPU",
    )


def make_profile_of_trace(tmp_path, trace, find_ceiling=find_no_ceiling, unprofiled_step_seconds=None):
    return make_profile(read_trace(write_trace(tmp_path / "trace.json", trace)), find_ceiling, unprofiled_step_seconds)


def test_the_step_of_a_trace_of_a_device_is_divided_into_classes(tmp_path):
    profile = make_profile_of_trace(tmp_path, GPU_TRACE, make_ceiling_lookup(1e9))
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


def test_steps_of_torch_profiler_begin_and_end_when_the_device_ran_them(tmp_path):
    events = [
        make_trace_event("user_annotation", "ProfilerStep#3", 0, 100),
        make_trace_event("cpu_op", "aten::mm", 10, 20),
        make_trace_event("gpu_user_annotation", "ProfilerStep#3", 50, 100),
        make_trace_event("kernel", "nvjet", 50, 100, device=0),
    ]
    profile = make_profile_of_trace(tmp_path, {"traceEvents": events})
    assert (profile.steps, [row.name for row in profile.classes]) == (1, ["unclassified"])  # no idle time
    profile = make_profile_of_trace(tmp_path, {"traceEvents": [make_trace_event("cpu_op", "aten::mm", 10, 20)]})
    assert profile.steps is None
    assert "the trace does not mark its steps" in render_profile("table", "x", profile)


def test_a_trace_without_steps_is_split_by_the_steps_of_its_optimizer(tmp_path):
    name = "Optimizer.step#AdamW.step"
    on_host = [make_trace_event("user_annotation", name, start, 10) for start in (0, 100, 200)]
    work = [make_trace_event("cpu_op", "aten::mm", 150, 20)]
    profile = make_profile_of_trace(tmp_path, {"traceEvents": [*on_host, *work]})
    assert (profile.steps, profile.seconds) == (2, pytest.approx(200e-6))
    assert f"a step ends with {name}" in profile.notes
    on_device = [make_trace_event("gpu_user_annotation", name, start, 10) for start in (50, 170, 290)]
    kernel = make_trace_event("kernel", "nvjet", 180, 100, device=0)
    profile = make_profile_of_trace(tmp_path, {"traceEvents": [*on_host, *work, *on_device, kernel]})
    assert (profile.steps, profile.seconds) == (2, pytest.approx(240e-6))
    in_hooks = [
        make_trace_event("cpu_op", "autograd::engine::evaluate_function: AddBackward0", start, 30)
        for start in (0, 100, 200)
    ]
    assert make_profile_of_trace(tmp_path, {"traceEvents": [*in_hooks, *on_host, *work]}).steps is None


def test_a_trace_above_the_size_limit_is_refused_compressed_or_not(tmp_path, monkeypatch):
    small, compressed, uncompressed = (tmp_path / name for name in ("trace.json.gz", "zeros.json.gz", "zeros.json"))
    small.write_bytes(gzip.compress(json.dumps(GPU_TRACE).encode()))
    assert read_trace(small).step_count == 1
    monkeypatch.setattr("mamf.profiling.traces._MAX_TRACE_BYTES", 1 << 20)
    compressed.write_bytes(gzip.compress(bytes(1 << 21)))
    uncompressed.write_bytes(bytes(1 << 21))
    for path in (compressed, uncompressed):
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
        json.dumps({"traceEvents": [make_trace_event("kernel", "x", ts, ts + 1) for ts in (0, 10**400)]}),
        '{"traceEvents": 1}',
        "Name,Other\nx,1\n",
        "Start (ns),Duration (ns),Name\n1,a,x\n",
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, text):
    for name, description in (("trace.json", "a Chrome trace of torch.profiler"), ("kernels.csv", "")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UsageError, match=f"{name} is not {description}"):
            read_trace(path)


def test_the_cpu_counts_each_operation_without_those_it_calls():
    outer = Event("aten::scaled_dot_product_attention", "operation", 0, 10)
    copy = Event("aten::copy_", "operation", 12, 16)
    inner = Event("aten::bmm", "operation", 2, 5, caller=outer)
    profile = make_profile(Trace((outer, inner, copy), 0, 20, 2), find_no_ceiling)
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
def test_tables_of_other_profilers_are_divided_into_classes(tmp_path, text, expected):
    path = tmp_path / "kernels.csv"
    path.write_text(text)
    profile = make_profile(read_trace(path), find_no_ceiling)
    assert {row.name: round(row.visible / profile.seconds, 6) for row in profile.classes} == expected


# --- logs and reports


@pytest.fixture
def profile(tmp_path):
    return make_profile_of_trace(tmp_path, GPU_TRACE, make_ceiling_lookup(1e9), unprofiled_step_seconds=320e-6)


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


def test_a_table_shows_shares_flop_and_the_cost_of_the_profiler(profile):
    text = render_profile("table", "train.py", profile)
    assert "train.py on NVIDIA H200: 1 step of 0.4000 ms with the profiler" in text
    assert "0.3200 ms without the profiler, in the steps right before: the profiler makes a step 25 % longer" in text
    # 2 x 3 x 5 x 7 FLOP in 320 us, compared with a ceiling of 1e9 FLOP/s.
    assert "a step needs 0.2100 kFLOP: 0.6562 MFLOPS, 0.1 % MAMFU, from the step time without the profiler" in text
    report = json.loads(render_profile("json", "train.py", profile))
    assert "MAMFU: share of 1.000 GFLOPS, the float32 sustained ceiling: contributed for a CPU" in text
    assert (report["flop"], report["mamfu"]) == (210, pytest.approx(210 / 1e9 / 320e-6))
    lines = list(map(str.split, text.splitlines()))
    # The matmul runs for 100 of 320 us. The trace has gaps of 170 us, but the profiler makes the step 80 us longer, so
    # 90 us are idle.
    assert ["matmul", "31.2", "0.1000", "-", "1", "0.2100", "2.100", "0.2"] in lines
    assert [IDLE_LABEL, "28.1", "0.09000", "-", "-", "-", "-", "-"] in lines
    assert ["nvjet_sm90", "matmul", "1", "0.1000", "31.2"] in lines
    note = (
        "shares are relative to the step time without the profiler (0.3200 ms); idle is "
        "this time minus the busy time in the trace (0.2300 ms)"
    )
    assert note in text
    assert "replayed from graphs" in text


@pytest.mark.parametrize(
    ("unprofiled_step_seconds", "message"),
    [
        (
            2e-4,
            "the device was busy for 0.2300 ms of a step in the trace, longer than a step without the profiler",
        ),
        (None, "mamf timed no step without the profiler: idle time is an upper bound"),
    ],
)
def test_the_report_says_how_certain_the_idle_time_is(tmp_path, unprofiled_step_seconds, message):
    profile = make_profile_of_trace(tmp_path, GPU_TRACE, unprofiled_step_seconds=unprofiled_step_seconds)
    assert message in render_profile("table", "x", profile)
    assert profile.get_visible_seconds(IDLE_LABEL) == pytest.approx(0 if unprofiled_step_seconds else 1.7e-4)


def test_idle_is_an_upper_bound_if_steps_were_faster_with_the_profiler(tmp_path):
    profile = make_profile_of_trace(tmp_path, GPU_TRACE, unprofiled_step_seconds=1e-3)
    assert "largest parts of a step: idle at most 77.0 %" in render_profile("table", "x", profile)
    profile = make_profile_of_trace(tmp_path, GPU_TRACE, unprofiled_step_seconds=3e-4)
    assert "at most" not in render_profile("table", "x", profile)


def test_a_class_above_its_sustained_ceiling_says_why(tmp_path):
    trace = read_trace(write_trace(tmp_path / "trace.json", GPU_TRACE))
    text = render_profile("table", "x", make_profile(trace, make_ceiling_lookup(2e6)))
    assert "105.0 %" in text
    assert text.count("matmul is above its sustained ceiling, which matmuls back to back reach: between other") == 1
