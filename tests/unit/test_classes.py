"""Test how mamf classifies the events of a profile: by kernel name, by calling operations, and in traces."""

import csv
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


def read_csv_rows(name):
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
def test_a_kernel_name_is_split_into_function_and_arguments(name, function, arguments):
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
def test_parts_of_words_and_template_arguments_do_not_decide_the_class(name, expected):
    assert classify_kernel_name(name) == expected


# --- kernel names from public traces


def test_99_percent_of_labeled_names_are_right():
    """Check kernel names from public traces. The label of a kernel is the class of the operation that launched it."""
    rows = read_csv_rows("kernel_names.csv")
    wrong = [row["name"] for row in rows if classify_kernel_name(row["name"]) != row["class"]]
    assert len(rows) == 358
    assert sum(bool(row["held_out"]) for row in rows) == 98
    assert len(wrong) <= 0.01 * len(rows), wrong
    assert sum(row["name"] in wrong for row in rows if row["held_out"]) <= 1


# --- calling operations


def make_kernel_event(kernel, *callers):
    """Return a kernel with these callers, outermost first. Names in brackets are annotations, others are operations."""
    parent = None
    for name in callers:
        kind, name = ("annotation", name[1:-1]) if name.startswith("[") else ("operation", name)
        parent = Event(name, kind, 0, 1, caller=parent)
    return Event(kernel, "kernel", 0, 1, caller=parent)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (make_kernel_event("reduce", "fbgemm::permute_2D_sparse_data"), "embedding"),
        (make_kernel_event("gemm", "vllm::moe_forward"), "matmul"),
        (make_kernel_event("copy", "vllm::all_reduce", "aten::copy_"), COMMUNICATION),
        (make_kernel_event("elementwise", "_C::rms_norm"), "normalization"),
        (make_kernel_event("elementwise", "_C_cache_ops::reshape_and_cache_flash"), "memory copies"),
        (make_kernel_event("gemm", "[my::attention]"), "matmul"),
        (make_kernel_event("reduce_kernel", "aten::linear", "aten::addmm"), "matmul"),
        (make_kernel_event("nvjet_sm90", "MyFunctionBackward", "mine::gemm_like"), "matmul"),
        (make_kernel_event("nvjet", "aten::scaled_dot_product_attention", "aten::bmm"), "attention"),
        (make_kernel_event("elementwise", "[Optimizer.step#AdamW.step]", "aten::add_"), "optimizer"),
        # In Lightning, the optimizer's step() calls the forward and backward passes.
        (make_kernel_event("nvjet", "[Optimizer.step#AdamW.step]", "[mamf: module mlp]", "aten::addmm"), "matmul"),
        (make_kernel_event("ncclDevKernel", "[Optimizer.step#Z.step]", "c10d::allreduce_"), COMMUNICATION),
        # The annotation of a collective also encloses unrelated operations that run before the collective ends.
        (make_kernel_event("fc-dtype_Float", "[hccl:all_to_all]", "aten::addmm"), "matmul"),
        (make_kernel_event("something", "[nccl:all_reduce]"), COMMUNICATION),
    ],
)
def test_the_calling_operation_decides_the_class(event, expected):
    assert classify_event(event) == expected


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        (Event("aten::scaled_dot_product_attention", "operation", 0, 2), "attention"),
        (Event("Optimizer.step#AdamW.step", "annotation", 0, 9), "matmul"),  # as in Lightning
    ],
)
def test_a_backward_pass_has_the_class_of_its_forward_pass(caller, expected):
    matmul = Event("aten::bmm", "operation", 0, 1, caller=caller)
    node = Event("autograd::engine::evaluate_function: BmmBackward0", "operation", 3, 4, forward_operation=matmul)
    assert classify_event(Event("aten::bmm", "operation", 3, 4, caller=node)) == expected


# --- traces


def compute_seconds_by_class(trace):
    intervals_by_class = group_pairs(
        (classify_event(busy.event), (busy.start_seconds, busy.end_seconds)) for busy in find_busy_intervals(trace)
    )
    return {name: visible for name, (visible, _) in compute_visible_and_hidden_seconds(intervals_by_class).items()}


def test_waiting_by_gloo_is_communication():
    matmul = Event("aten::mm", "operation", 0, 4)
    waiting = Event("gloo:all_reduce", "annotation", 3, 9)
    step = Event("train", "annotation", 0, 10)
    assert compute_seconds_by_class(Trace((matmul, waiting, step), 0, 10)) == {"matmul": 4, COMMUNICATION: 5}
    kernel = Event("nvjet_tst", "kernel", 8, 10)
    assert compute_seconds_by_class(Trace((matmul, waiting, kernel), 0, 10)) == {"matmul": 2, COMMUNICATION: 5}
