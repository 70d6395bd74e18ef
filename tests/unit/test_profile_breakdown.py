"""Test the breakdown of a profiled step: the time and FLOP of each module, and the FLOP of each class of kernels."""

from dataclasses import replace

import pytest

from mamf.cli import main
from mamf.profiling.log import read_profile_or_none, write_profile
from mamf.profiling.profile import MODULE_PREFIX, make_profile
from mamf.profiling.traces import Event, Trace

BFLOAT16 = ["c10::BFloat16"] * 2


def product(begun, *callers, a=(64, 32), b=(32, 50), name="aten::mm", forward=None):
    """Return the events of one matmul: the module ranges around it, the operation, and its kernel. Each takes 1 s.

    - ``callers``: the names of the modules, with the outermost module first.
    - ``forward``: for a matmul of the backward pass, the operation of the forward pass.
    """
    events, parent = [], None
    for caller in callers:
        parent = Event(f"{MODULE_PREFIX}{caller}", "annotation", begun, begun + 1, caller=parent)
        events.append(parent)
    if forward:
        parent = Event(
            "autograd::engine::evaluate_function: MmBackward0", "operation", begun, begun + 1, forward_operation=forward
        )
        events.append(parent)
    operation = Event(
        name, "operation", begun, begun + 1, caller=parent, argument_shapes=[a, b], argument_dtypes=BFLOAT16
    )
    return [*events, operation, Event("nvjet", "kernel", begun, begun + 1, caller=operation)]


def unknown(dtype):
    return None


def profiled(*groups):
    events = tuple(event for group in groups for event in group)
    return make_profile(Trace(events, 0, len(groups), 1, "NVIDIA H200"), unknown)


def rows_of(profile):
    return {row.name: (row.visible, sum(row.flop.values())) for row in profile.modules}


FLOP = 2 * 64 * 32 * 50


def test_the_backward_pass_is_of_the_module_that_ran_forward():
    forward = product(0, "GPT", "h.3.attn: Attention")
    backward = product(1, forward=forward[-2])
    assert rows_of(profiled(forward, backward)) == {"GPT": (2, 2 * FLOP), "h.*.attn: Attention": (2, 2 * FLOP)}


def test_modules_of_several_models_keep_apart_and_wrappers_have_no_name():
    generator = product(0, "Generator", "main.0: Linear")
    discriminator = product(1, "Discriminator", "_orig_mod.main.0: Linear")
    rows = rows_of(profiled(generator, discriminator))
    assert rows == dict.fromkeys(
        ["Generator", "Generator.main.*: Linear", "Discriminator", "Discriminator.main.*: Linear"], (1, FLOP)
    )


def test_flop_under_autocast_are_of_the_dtype_that_is_multiplied():
    operation, kernel = product(0)
    cast = {"argument_shapes": [(64, 32), (50, 32)], "argument_dtypes": ["float"] * 2}
    linear = Event("aten::linear", "operation", 0, 1, **cast)
    copy = Event("copy", "kernel", 0, 1, caller=Event("aten::to", "operation", 0, 1, caller=linear))
    for of_float32 in (linear, Event("aten::linear", "operation", 0, 1, caller=linear, **cast)):
        inner = replace(operation, caller=of_float32)
        profile = profiled([linear, inner, copy, replace(kernel, caller=inner)])
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
    operation, kernel = product(0)
    operation = replace(operation, argument_dtypes=["float"] * 2)
    split = Event("void cublasLt::splitKreduce_kernel<32>", "kernel", 0, 1, caller=operation)
    profile = profiled([operation, replace(kernel, name=name, caller=operation), split])
    assert {row.name: row.flop for row in profile.classes if row.flop} == {"matmul": {dtype: FLOP}}


def test_a_page_of_a_profile_has_its_figures_and_how_it_was_made(tmp_path):
    path, page = tmp_path / "step.jsonl", tmp_path / "page.html"
    profile = replace(profiled(product(0, "<b>GPT</b>"), product(1)), unprofiled_step_seconds=2.5)
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
