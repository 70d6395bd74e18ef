"""Test how mamf classifies the events of a profile: by kernel name, by calling operations, and in traces."""

import csv
import json
from pathlib import Path

import pytest

from mamf.measurement import group_pairs
from mamf.profiling.classes import (
    COMMUNICATION,
    classify_event,
    classify_kernel_name,
    compute_visible_and_hidden_seconds,
    split_kernel_name,
)
from mamf.profiling.traces import Event, Trace, find_busy_intervals

DATA = Path(__file__).parent / "data"


def rows_of(name):
    return list(csv.DictReader((DATA / name).read_text().splitlines()))


# --- parts of kernel names


@pytest.mark.parametrize(
    ("name", "function", "arguments"),
    [
        ("sage_fwd", "sage_fwd", ()),
        ("void ns::f<int, g<a, b> >(int, h<c>)", "ns::f", ("int", "g<a, b>")),
        ("std::enable_if<(((8)>(0)))&&x<y>::z, void>::type ns::f<8>(t)", "ns::f", ("8",)),
        ("void (anonymous namespace)::f(int)", "anonymous::f", ()),
        ("void at::f<decltype(nullptr)>(decltype(nullptr))", "at::f", ("decltype(nullptr)",)),
        ("at::copy(at::It&)::{lambda()#3}::operator()() const::{lambda(float)#1}", "at::copy", ()),
        ("void ns::f<g<(x)1, h", "ns::f", ("g<(x)1, h",)),
        ("void f(int) [clone .kd]", "f", ()),
        ("Cijk_Ailk.kd", "Cijk_Ailk", ()),
        (
            "_ZN7ck_tile6kentryILi2ENS_12Rmsnorm2dFwdINS_4PipeIDF16bEEEEEvT_",
            "ck_tile::kentry",
            ("Rmsnorm2dFwd", "Pipe"),
        ),
        ("_ZN2ck12_GLOBAL__N_14gemmILi256ELb0EEEvPT0_", "ck::anonymous::gemm", ()),
        ("_Z4gemmPf", "gemm", ()),
        ("_ZN99short", "short", ()),
        ("", "", ()),
    ],
)
def test_a_name_is_read(name, function, arguments):
    assert split_kernel_name(name) == (function, arguments)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void fbgemm_gpu::permute_indices_weights_kernel<false, int>(int)", "embedding"),
        ("void fbgemm_gpu::something_new<int>(int)", None),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32", "convolution"),
        ("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_sm100f", "matmul"),
        ("void moe::dev::finalize::finalizeKernel<cutlass::bfloat16_t>(int)", "embedding"),
        ("void mine::thing<cutlass::gemm::GemmShape<1, 2, 3>, flash::attention>(int)", None),
        ("void cutlass::device_kernel<mine::Thing<cutlass::gemm::GemmShape<1, 2, 3> > >(int)", None),
        ("void thing(cutlass::gemm::Params, ncclDevKernelArgs)", None),
        ("premixed_softmaxing", None),
        ("triton_poi_fused_addmm_gelu_view_15", "elementwise"),
        ("triton__0d1d2d3d", None),
    ],
)
def test_no_part_of_a_word_and_no_argument_of_a_template_decides(name, expected):
    assert classify_kernel_name(name) == expected


# --- kernel names from public traces


def test_99_percent_of_labeled_names_are_right():
    """Check kernel names from public traces. The label of a kernel is the class of the operation that launched it."""
    rows = rows_of("kernel_names.csv")
    wrong = [row["name"] for row in rows if classify_kernel_name(row["name"]) != row["class"]]
    assert len(rows) == 358
    assert sum(bool(row["held_out"]) for row in rows) == 98
    assert len(wrong) <= 0.01 * len(rows), wrong
    assert sum(row["name"] in wrong for row in rows if row["held_out"]) <= 1


# --- calling operations


def under(kernel, *callers):
    """Return a kernel with these callers, outermost first. Names in brackets are annotations, others are operations."""
    parent = None
    for name in callers:
        kind, name = ("annotation", name[1:-1]) if name.startswith("[") else ("operation", name)
        parent = Event(name, kind, 0, 1, caller=parent)
    return Event(kernel, "kernel", 0, 1, caller=parent)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (under("reduce", "fbgemm::permute_2D_sparse_data"), "embedding"),
        (under("gemm", "vllm::moe_forward"), "matmul"),
        (under("copy", "vllm::all_reduce", "aten::copy_"), COMMUNICATION),
        (under("elementwise", "_C::rms_norm"), "normalization"),
        (under("elementwise", "_C_cache_ops::reshape_and_cache_flash"), "memory copies"),
        (under("gemm", "[my::attention]"), "matmul"),
        (under("reduce_kernel", "aten::linear", "aten::addmm"), "matmul"),
        (under("nvjet_sm90", "MyFunctionBackward", "mine::gemm_like"), "matmul"),
        (under("nvjet", "aten::scaled_dot_product_attention", "aten::bmm"), "attention"),
        (under("elementwise", "[Optimizer.step#AdamW.step]", "aten::add_"), "optimizer"),
        # In Lightning, the optimizer's step() calls the forward and backward passes.
        (under("nvjet", "[Optimizer.step#AdamW.step]", "[mamf: module mlp]", "aten::addmm"), "matmul"),
        (under("ncclDevKernel", "[Optimizer.step#Z.step]", "c10d::allreduce_"), COMMUNICATION),
        # The annotation of a collective also encloses unrelated operations that run before the collective ends.
        (under("fc-dtype_Float", "[hccl:all_to_all]", "aten::addmm"), "matmul"),
        (under("something", "[nccl:all_reduce]"), COMMUNICATION),
    ],
)
def test_the_operation_decides(event, expected):
    assert classify_event(event) == expected


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        (Event("aten::scaled_dot_product_attention", "operation", 0, 2), "attention"),
        (Event("Optimizer.step#AdamW.step", "annotation", 0, 9), "matmul"),  # as in Lightning
    ],
)
def test_the_backward_is_of_the_class_of_the_forward(caller, expected):
    product = Event("aten::bmm", "operation", 0, 1, caller=caller)
    node = Event("autograd::engine::evaluate_function: BmmBackward0", "operation", 3, 4, forward_operation=product)
    assert classify_event(Event("aten::bmm", "operation", 3, 4, caller=node)) == expected


# --- traces


def written(path, *events, **head):
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


def seconds(trace):
    by_class = group_pairs(
        (classify_event(each.event), (each.start_seconds, each.end_seconds)) for each in find_busy_intervals(trace)
    )
    return {name: visible for name, (visible, _) in compute_visible_and_hidden_seconds(by_class).items()}


def test_waiting_by_gloo_is_communication():
    product = Event("aten::mm", "operation", 0, 4)
    waiting = Event("gloo:all_reduce", "annotation", 3, 9)
    step = Event("train", "annotation", 0, 10)
    assert seconds(Trace((product, waiting, step), 0, 10)) == {"matmul": 4, COMMUNICATION: 5}
    kernel = Event("nvjet_tst", "kernel", 8, 10)
    assert seconds(Trace((product, waiting, kernel), 0, 10)) == {"matmul": 2, COMMUNICATION: 5}
