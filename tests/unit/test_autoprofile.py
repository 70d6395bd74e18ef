"""mamf autoprofile: one folder whose SUMMARY.md follows from its logs, in virtual time."""

import argparse
import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import library
import pytest
from test_counters_command import printed

from mamf.ceilings.share import KnownCeiling
from mamf.cli import main
from mamf.cli.autoprofile_steps import steps_of
from mamf.cli.options.autoprofile import VARIABLES
from mamf.errors import NothingProfiledError
from mamf.logs.run_log import read_run_log
from mamf.profiling.advice import Group, advice, groups_of, is_older
from mamf.profiling.counters import counting
from mamf.profiling.counters.running import Output
from mamf.profiling.folder import read_folder
from mamf.profiling.log import create_profile_log, write_profile
from mamf.profiling.profile import ClassRow, GapRow, KernelRow, Profile
from mamf.profiling.roofs import RoofShares, roofs
from mamf.profiling.summary import summary
from mamf.statistics import summarize
from mamf.testing import SimulatedBackend

SIZES = ["--seq-lens", "2048", "4096", "--heads", "16", "--batch", "4"]
ASKED = ["autoprofile", "--output-folder", "out", "--ceiling", "find.jsonl", *SIZES]
PROFILE = Profile(
    seconds=0.1,
    steps=2,
    device="Simulated H100",
    is_of_device=True,
    classes=(
        ClassRow("matmul", 0.5, 0.05, 0.0, 10, {"bfloat16": 10**13}, 0.05, 0.3),
        ClassRow("idle", 0.3, 0.03, 0.0, 5, {}, 0.0),
    ),
    kernels=(),
    gaps=(GapRow("aten::item", 4, 0.03),),
    unprofiled_step_seconds=0.04,
    ceilings=(KnownCeiling("bfloat16", "sustained", 666.0, "contributed", "contributed for Simulated H100"),),
)


def profile_at_once(patch):
    def run(options):
        with create_profile_log(options.output, "mamf profile", "model_step.py") as log:
            write_profile(log, PROFILE)
        return 0

    patch.setattr("mamf.cli.commands.profile.run", run)


def without_pictures(patch):
    """The names of the pictures that are asked for: they take seconds."""
    asked = []
    patch.setattr("mamf.cli.commands.plot.run", lambda options: asked.append(options.output.name) or 0)
    return asked


@pytest.fixture
def profiled(machine, monkeypatch):
    """A machine on which the steps of a model are profiled at once."""
    profile_at_once(monkeypatch)


@pytest.fixture
def undrawn(monkeypatch):
    return without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def filled(library_logs, tmp_path_factory):
    """A folder that the command filled, and the pictures that it asked for."""
    place = tmp_path_factory.mktemp("filled")
    shutil.copytree(library_logs, place, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        library.install(patch)
        patch.chdir(place)
        profile_at_once(patch)
        asked = without_pictures(patch)
        assert main(ASKED) == 0
    return place / "out", asked


@pytest.fixture
def folder(profiled, undrawn, filled):
    undrawn += filled[1]
    return shutil.copytree(filled[0], Path("out"))


def told(folder):
    return (folder / "SUMMARY.md").read_text()


def test_one_command_fills_a_folder(folder, undrawn):
    names = {"ceilings.jsonl", "bandwidth.jsonl", "kernels.jsonl", "step.jsonl"}
    assert {path.name for path in folder.iterdir()} == {*names, "kernels.md", "steps.json", "SUMMARY.md"}
    assert undrawn == ["ceilings.png", "kernels.png"]
    text = told(folder)
    for section in (
        "What the card can do",
        "What attention reaches",
        "What bounds",
        "a model's step",
        "What to try next",
    ):
        assert section in text
    for name in (*names, "kernels.md"):
        assert f"]({name})" in text
    assert "Hardware counters: none, " in text


def test_a_dtype_is_that_of_ceilings_kernels_and_model(tmp_path):
    options = argparse.Namespace(
        operation="attention",
        backend=None,
        device=1,
        dtype="float16",
        kernel=None,
        ceiling=None,
        **dict.fromkeys(VARIABLES),
    )
    steps = {step.name: step for step in steps_of(options, tmp_path, SimulatedBackend())}
    for name in ("ceilings", "kernels"):
        assert " --device 1 --dtype float16 " in " ".join(steps[name].command)
    assert steps["step"].command[1:3] == ("--device", "1")
    assert steps["step"].operands[-1] == "float16"
    options.dtype = None
    assert not any("--dtype" in step.command for step in steps_of(options, tmp_path, SimulatedBackend()))


def test_without_a_measured_kernel_no_counters_are_asked_for(profiled, undrawn, monkeypatch):
    """And the rest is measured and summed up all the same."""
    monkeypatch.setattr(SimulatedBackend, "without_counters", lambda self: None)
    monkeypatch.setattr("mamf.profiling.counters.running.shutil.which", lambda name: sys.executable)
    monkeypatch.setattr("mamf.cli.autoprofile_steps.groups_of", lambda log: [])
    assert main(ASKED) == 0
    assert not Path("out", "counters.jsonl").exists()
    assert "Hardware counters: none, no kernel was measured." in told(Path("out"))


def test_counters_of_the_fastest_kernels_say_what_bounds_them(profiled, undrawn, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "without_counters", lambda self: None)
    monkeypatch.setattr("mamf.profiling.counters.running.shutil.which", lambda name: sys.executable)
    monkeypatch.setattr(counting, "output_of", lambda command: Output(printed([0]), ""))
    assert main(ASKED) == 0
    text, log = told(Path("out")), read_run_log(Path("out", "counters.jsonl"))
    (row,) = log.measurements
    longest = max(read_run_log(Path("out", "kernels.jsonl")).measurements, key=lambda each: each.amount)
    assert (row.shape, row.problem.direction) == (longest.shape, "bwd")
    assert "By hardware counters ([counters.jsonl](counters.jsonl)):\n\n- simulated-attention" in text
    assert "bound by launch: its kernel is at work for 10% of the 1835 us that a launch takes." in text


def test_figures_are_those_of_the_logs(folder):
    text, log = told(folder), read_run_log(folder / "kernels.jsonl")
    ceiling = read_run_log("find.jsonl").ceilings["burst"]
    best = [row for row in log.measurements if row.operation == "attention"]
    assert len(best) == 4, "two lengths, forward and backward"
    for row in best:
        share = row.best_rate / ceiling.tflops
        assert f"| simulated-attention | {row.best_rate:.1f} TFLOPS | {share:.0%} | {row.seconds * 1e3:#.4g} |" in text
    assert f"| {ceiling.tflops:.1f} TFLOPS |" in text
    assert "40.00 ms a step" in text
    assert "MAMFU: of 666.0 TFLOPS, the bfloat16 sustained ceiling: contributed for Simulated H100" in text
    # 50 of 80 ms without the profiler were work: the log's 30 ms of idle time hold what the profiler added.
    assert "| idle | 37.5% | 15.00 |" in text
    assert "shares are of 40.00 ms without the profiler; idle: what 25.00 ms of work in the trace leave of it" in text
    idle = (
        "15.00 ms of a model's step (38%): the device is idle, most gaps in the trace while the host was in aten::item"
    )
    first = "1. 25.00 ms of a model's step (62%): matmul at 30% of the ceiling."
    assert text.index("## What to try next") < text.index(first) < text.index(f"2. {idle}")


TURING = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(Params)"
AMPERE = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"


def advised(folder, *kernels, architecture="sm_90", took=0.04):
    """The lines about a step whose products take 50 ms, in that many kernels."""
    held = read_folder(folder)
    for header in held.headers:
        header["device"]["architecture"] = architecture
    rows = tuple(KernelRow(name, "matmul", 2, seconds, *more) for name, seconds, *more in kernels)
    step = replace(PROFILE, kernels=rows, unprofiled_step_seconds=took)
    return advice(replace(held, step=("model_step.py", step)), groups_of(held.kernels))


def test_a_class_above_its_sustained_ceiling_stands_against_both(folder):
    burst = KnownCeiling("bfloat16", "burst", 800.0, "contributed", "contributed for Simulated H100")
    rows = (replace(PROFILE.classes[0], mamfu=1.05, flop={"bfloat16": int(0.05 * 700e12)}), PROFILE.classes[1])
    step = replace(PROFILE, classes=rows, ceilings=(*PROFILE.ceilings, burst))
    text = summary(replace(read_folder(folder), step=("model_step.py", step)))
    assert "| 105.0% (87.5% of burst) |" in text
    assert "matmul is above its sustained ceiling" in text
    assert "of 800.0 TFLOPS, the bfloat16 burst ceiling" in text


def test_products_that_a_dimension_slows_come_first(folder):
    lines = advised(folder, (TURING, 0.036), ("nvjet_sm90_tst", 0.014))
    assert lines[0] == (
        "18.00 ms of a model's step (45%): products on kernels of an older generation than the device because a "
        "dimension is not a multiple of 8: pad it to a multiple of 64 (50257 to 50304), such as the vocabulary; 72% of "
        "the time of all products"
    )
    assert "the device is idle" in lines[1], "what costs less comes later"
    assert not any("matmul at" in line for line in lines), "it is the same loss"


def test_what_costs_most_of_a_step_comes_before_all_else(folder):
    lines = advised(folder, (TURING, 0.01), (AMPERE, 0.02), took=0.05)
    assert [line.partition(":")[0] for line in lines[:3]] == [
        "25.00 ms of a model's step (50%)",
        "10.00 ms of a model's step (20%)",
        "5.000 ms of a model's step (10%)",
    ]
    assert "the device is idle" in lines[0]
    assert "products on kernels of an older generation than the device: compare libraries" in lines[1]


def test_shapes_of_a_profile_name_the_dimension(folder):
    (line, *_) = advised(folder, ("nvjet_sm90_tst", 0.05, "8192x30001x768 8192x1000x30001"), architecture=None)
    assert (
        "products because a dimension is not a multiple of 8: pad it to a multiple of 64 (30001 to 30016), such" in line
    )
    assert "older" not in line, "the device's architecture is not known"


@pytest.mark.parametrize(
    "kernel",
    ["nvjet_sm90_tst_128x256", "cutlass_80_simt_sgemm_128x64_nn", "Cijk_Ailk_Bljk_BBS_BH_MT256x256x32_MI32"],
)
def test_products_on_kernels_of_the_device_are_no_loss(folder, kernel):
    assert not any("products" in line for line in advised(folder, (kernel, 0.05)))


def test_products_of_little_time_are_not_named(folder):
    assert not any("products" in line for line in advised(folder, (TURING, 0.003)))
    assert any("matmul at 30% of the ceiling" in line for line in advised(folder, (TURING, 0.003)))


@pytest.mark.parametrize(
    ("kernel", "architecture", "older"),
    [
        (TURING, "sm_90", True),
        (TURING, "sm_80", True),
        (TURING, "sm_75", False),
        (TURING, None, False),
        (TURING, "gfx942", False),
        (AMPERE, "sm_90", True),
        (AMPERE, "sm_89", False),
        (AMPERE, "sm_120", False),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "sm_100", True),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8", "sm_90", False),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn", "sm_90", True),
        ("ampere_sgemm_128x64_nn", "sm_90", False),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::arch::Sm90>>", "sm_100", True),
        ("cutlass3x_sm100_tensorop_s256x256x16gemm_bf16", "sm_103", False),
        ("nvjet_sm90_tst_80x64_64x9", "sm_90", False),
    ],
)
def test_the_generation_of_a_kernel_is_in_its_name(kernel, architecture, older):
    assert is_older(kernel, architecture) is older


def test_the_published_step_says_what_costs_most():
    """15.4 of 21.6 ms of products are for the sake of a vocabulary of 50257; the profiler's 9 ms are no idle time."""
    text = (Path(__file__).parents[2] / "docs" / "autoprofile-h200" / "SUMMARY.md").read_text()
    held = read_folder(Path(__file__).parents[2] / "docs" / "autoprofile-h200")
    (first, *_) = advice(held, groups_of(held.kernels))
    assert f"\n1. {first}.\n" in text
    assert first.startswith("15.38 ms of a model's step (40%): products on kernels of an older generation")
    assert "| idle | 6.5% | 2.529 | " in text


def test_the_summary_follows_from_the_folder_alone(folder):
    before = told(folder)
    (folder / "SUMMARY.md").unlink()
    assert main(["autoprofile", "--from", "out"]) == 0
    assert told(folder) == before


def test_the_same_command_measures_nothing_twice(folder, on_launch):
    before = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    launches = []
    on_launch(launches.append)
    assert main(ASKED) == 0
    assert not launches
    assert {path.name: path.read_bytes() for path in folder.glob("*.jsonl")} == before


def test_other_sizes_in_the_same_folder_are_refused_and_told(folder, capsys):
    assert main([*ASKED, "--head-dims", "64"]) == 1
    assert "--shapes b4h16q2048k2048d64 b4h16q4096k4096d64 contradicts" in capsys.readouterr().err
    assert "kernels failed: --shapes b4h16q2048k2048d64 b4h16q4096k4096d64 contradicts" in told(folder)


def test_ctrl_c_leaves_what_is_done_and_the_rest_goes_on(profiled, undrawn, on_launch):
    def interrupt(launches):
        if launches == 40:
            signal.raise_signal(signal.SIGINT)

    on_launch(interrupt)
    assert main(ASKED) == 130
    assert "This is not all: " in told(Path("out"))
    assert "interrupted: by the user" in told(Path("out"))
    on_launch(None)
    assert main(ASKED) == 0
    assert "This is not all" not in told(Path("out"))


def test_a_budget_that_ends_leaves_the_rest_out(profiled, undrawn, monkeypatch):
    clock = iter([0.0, *[10.0**6] * 9])
    monkeypatch.setattr("mamf.cli.commands.autoprofile.time.monotonic", lambda: next(clock))
    assert main([*ASKED, "--budget", "5s"]) == 0
    assert "kernels left out: the budget ended before it" in told(Path("out"))


def test_a_step_that_fails_is_told_and_the_others_stand(profiled, undrawn, monkeypatch):
    def fail(options):
        raise NothingProfiledError("no optimizer of torch stepped", 0)

    monkeypatch.setattr("mamf.cli.commands.profile.run", fail)
    assert main(ASKED) == 1
    text = told(Path("out"))
    assert "step failed: nothing was profiled: no optimizer of torch stepped" in text
    assert "What attention reaches" in text


def test_sizes_of_the_environment_are_defaults_and_said(profiled, undrawn, monkeypatch, capsys):
    for name, value in {"SEQLEN": "1024,2048", "NHEADS": "8", "HEADDIM": "64/32", "BATCH": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([*ASKED[:5], "--heads", "16"]) == 0
    assert "--seq-lens 1024 2048 comes from the environment variable SEQLEN." in capsys.readouterr().out
    shapes = {row.shape for row in read_folder(Path("out")).kernels.measurements if row.operation == "attention"}
    assert set(map(str, shapes)) == {"b2h16q1024k1024d64v32", "b2h16q2048k2048d64v32"}
    assert "comes from the environment variable SEQLEN" in told(Path("out"))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--output-folder", "."], "holds after.jsonl, which is not from autoprofile"),
        (["--output-folder", "find.jsonl"], "find.jsonl is not a folder"),
        (["--from", "nowhere"], "there is no folder nowhere"),
        (["--ceiling", "sweep.jsonl"], "sweep.jsonl holds no ceiling"),
        (["--operation", "bandwith"], "unknown operation 'bandwith' (did you mean 'bandwidth'?)"),
        (["--kernel", "sdpa-flsh"], "unknown attention kernel 'sdpa-flsh'"),
        (["--operation", "model"], "model is always measured"),
        (["--seq-lens", "x"], "'x' is not a whole number"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(machine, capsys, given, line):
    try:
        code = main(["autoprofile", *given])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert line in err


def test_a_size_of_the_environment_that_is_none_is_refused(machine, capsys, monkeypatch):
    monkeypatch.setenv("SEQLEN", "long")
    assert main(["autoprofile"]) == 2
    assert "the environment variable SEQLEN: 'long' is not a whole number" in capsys.readouterr().err


def test_another_operation_takes_the_place_of_attention(profiled, undrawn):
    assert main([*ASKED[:5], "--operation", "bandwidth"]) == 0
    assert "What bandwidth reaches" in told(Path("out"))


# -- what bounds a kernel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "memory", "line"),
    [
        (0.85, 0.1, "compute (compute roof 85%, memory roof 10%)"),
        (0.1, 0.9, "memory (compute roof 10%, memory roof 90%)"),
        (0.4, 0.1, "neither roof (compute roof 40%, memory roof 10%): 60% of its time goes beyond"),
        (None, 0.02, "not memory (memory roof 2%); the other roof was not measured"),
        (1.3, None, "unknown: it is above a roof (compute roof 130%)"),
        (None, None, "no roof was measured"),
    ],
)
def test_what_bounds_a_kernel_is_said_with_its_figures(compute, memory, line):
    assert RoofShares(compute, memory).verdict.startswith(line)


def test_roofs_are_shares_of_a_rows_time(folder):
    row = next(row for row in read_run_log(folder / "kernels.jsonl").measurements if row.operation == "attention")
    found = roofs(row, {}, row.work.nbytes / row.seconds / 1e12)
    assert (found.compute, found.memory) == (None, pytest.approx(1.0))


def test_a_folder_without_ceilings_says_so(folder):
    whole = read_folder(folder)
    text = summary(replace(whole, ceilings=None, kernels=None, ends={}))
    assert "This is not all: ceilings not measured; kernels not measured." in text


def test_a_record_of_steps_that_is_broken_is_named(folder, capsys):
    (folder / "steps.json").write_text(json.dumps({"steps": [{"name": 3}], "remarks": []}))
    assert main(["autoprofile", "--from", "out"]) == 2
    assert "steps.json: field" in capsys.readouterr().err


@pytest.mark.parametrize(("slower", "is_told"), [(1.3, True), (1.04, False), (1.0, False)])
def test_a_faster_kernel_is_named_where_intervals_part_them(folder, slower, is_told):
    row = next(row for row in read_run_log(folder / "kernels.jsonl").measurements if row.operation == "attention")
    samples = tuple(slower * sample for sample in row.samples)
    usual = replace(row, kernel="sdpa", samples=samples, summary=summarize(samples))
    lines = advice(read_folder(folder), [Group("a shape", (row, usual), ())])
    assert any("Call simulated-attention by name: 1.30 times as fast as sdpa" in line for line in lines) == is_told


def test_a_kernel_without_a_figure_is_told_with_its_reason(folder):
    row = next(row for row in read_run_log(folder / "kernels.jsonl").measurements if row.operation == "attention")
    failed = replace(row, kernel="eager", status="out_of_memory", reason="no room", summary=None, samples=())
    lines = advice(read_folder(folder), [Group("a shape", (row,), (failed,))])
    assert "eager has no figure for some shapes (out_of_memory: no room)" in lines


def test_without_a_ceiling_no_kernel_is_called_near_it(folder):
    whole = read_folder(folder)
    group = groups_of(whole.kernels)[0]
    assert advice(replace(whole, kernels=None, step=None, ceilings=None, bandwidth=None), [group]) == [
        "Measure a ceiling of these kernels (mamf find): without one their distance from it is unknown"
    ]


def test_the_step_is_of_the_backend_that_was_named(profiled, undrawn, monkeypatch):
    asked = []
    monkeypatch.setattr("mamf.cli.commands.profile.run", lambda options: asked.append(options) or 0)
    main([*ASKED, "--backend", "mamf.testing:SimulatedBackend"])
    assert asked[0].script[1] == "mamf.testing:SimulatedBackend"
