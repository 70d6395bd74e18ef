"""Test the breakdown of a profiled step: the time and FLOP of each module, and the FLOP of each class of kernels."""

from dataclasses import replace

import pytest

from mamf.cli import main
from mamf.profiling.log import read_profile_or_none, write_profile
from mamf.profiling.profile import MODULE_PREFIX, make_profile
from mamf.profiling.traces import Event, Trace

BFLOAT16 = ["c10::BFloat16"] * 2


def make_matmul_events(start, *callers, forward=None):
    """Return the events of one matmul: the module ranges around it, the operation, and its kernel. Each takes 1 s.

    - ``callers``: the names of the modules, with the outermost module first.
    - ``forward``: for a matmul of the backward pass, the operation of the forward pass.
    """
    events, parent = [], None
    for caller in callers:
        parent = Event(f"{MODULE_PREFIX}{caller}", "annotation", start, start + 1, caller=parent)
        events.append(parent)
    if forward:
        parent = Event(
            "autograd::engine::evaluate_function: MmBackward0", "operation", start, start + 1, forward_operation=forward
        )
        events.append(parent)
    shapes = [(64, 32), (32, 50)]
    operation = Event(
        "aten::mm", "operation", start, start + 1, caller=parent, argument_shapes=shapes, argument_dtypes=BFLOAT16
    )
    return [*events, operation, Event("nvjet", "kernel", start, start + 1, caller=operation)]


def find_no_ceiling(dtype):
    return None


def make_profile_of(*groups):
    events = tuple(event for group in groups for event in group)
    return make_profile(Trace(events, 0, len(groups), 1, "NVIDIA H200"), find_no_ceiling)


def summarize_modules(profile):
    return {row.name: (row.visible, sum(row.flop.values())) for row in profile.modules}


FLOP = 2 * 64 * 32 * 50


def test_the_backward_pass_counts_for_the_module_of_the_forward_pass():
    forward = make_matmul_events(0, "GPT", "h.3.attn: Attention")
    backward = make_matmul_events(1, forward=forward[-2])
    assert summarize_modules(make_profile_of(forward, backward)) == {
        "GPT": (2, 2 * FLOP),
        "h.*.attn: Attention": (2, 2 * FLOP),
    }


def test_modules_of_several_models_stay_separate_and_wrappers_are_left_out():
    generator = make_matmul_events(0, "Generator", "main.0: Linear")
    discriminator = make_matmul_events(1, "Discriminator", "_orig_mod.main.0: Linear")
    rows = summarize_modules(make_profile_of(generator, discriminator))
    assert rows == dict.fromkeys(
        ["Generator", "Generator.main.*: Linear", "Discriminator", "Discriminator.main.*: Linear"], (1, FLOP)
    )


def test_flop_under_autocast_have_the_dtype_that_is_multiplied():
    operation, kernel = make_matmul_events(0)
    float32_arguments = {"argument_shapes": [(64, 32), (50, 32)], "argument_dtypes": ["float"] * 2}
    linear = Event("aten::linear", "operation", 0, 1, **float32_arguments)
    cast_kernel = Event("copy", "kernel", 0, 1, caller=Event("aten::to", "operation", 0, 1, caller=linear))
    for caller in (linear, Event("aten::linear", "operation", 0, 1, caller=linear, **float32_arguments)):
        inner_operation = replace(operation, caller=caller)
        profile = make_profile_of([linear, inner_operation, cast_kernel, replace(kernel, caller=inner_operation)])
        assert {row.name: row.flop for row in profile.classes if row.flop} == {"matmul": {"bfloat16": FLOP}}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x256x32_warpgroupsize2x1x1__5x_cublas", "tf32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_nt_align4>(Params)", "tf32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma__5x_cublas", "float32"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x128_8x5_nt_align1>(Params)", "float32"),
    ],
)
def test_kernels_say_whether_float32_is_multiplied_in_tf32(name, dtype):
    operation, kernel = make_matmul_events(0)
    operation = replace(operation, argument_dtypes=["float"] * 2)
    split_k_kernel = Event("void cublasLt::splitKreduce_kernel<32>", "kernel", 0, 1, caller=operation)
    profile = make_profile_of([operation, replace(kernel, name=name, caller=operation), split_k_kernel])
    assert {row.name: row.flop for row in profile.classes if row.flop} == {"matmul": {dtype: FLOP}}


def test_a_page_of_a_profile_has_its_figures_and_how_it_was_made(tmp_path):
    path, page = tmp_path / "step.jsonl", tmp_path / "page.html"
    profile = replace(
        make_profile_of(make_matmul_events(0, "<b>GPT</b>"), make_matmul_events(1)), unprofiled_step_seconds=2.5
    )
    write_profile(path, "mamf profile train.py", "train.py", profile)
    assert len(read_profile_or_none(path)[1].modules) == len(profile.modules) == 2
    assert main(["report", str(path), "--output", str(page)]) == 0
    text = page.read_text()
    for part in (
        "Profile of train.py on NVIDIA H200",
        "2500",
        "without the profiler",
        "mamf profile train.py",
        "torch",
    ):
        assert part in text
    assert "<b>GPT" not in text
    assert "&lt;b&gt;GPT" in text
