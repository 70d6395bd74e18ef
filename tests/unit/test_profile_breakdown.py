"""A step by module and by product, what a product does alone, and what is worth changing."""

import json
from dataclasses import replace

import pytest
from test_profile_command import SHORTLY, TINY

from mamf.cli import main
from mamf.cli.profile_ceilings import given_logs, measure_products, of_device, rates_of, with_rates
from mamf.errors import RunLogError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.operations.tracing.events import Event, Trace
from mamf.profiling.advice import gains
from mamf.profiling.breakdown import MODULE, OUTSIDE, ProductRow
from mamf.profiling.folder import LOGS
from mamf.profiling.log import create_profile_log, read_profile_or_none, write_profile
from mamf.profiling.profile import profile_of
from mamf.profiling.report import profile_document
from mamf.report.formats import FORMATS
from mamf.testing import SimulatedBackend

BFLOAT16 = ["c10::BFloat16"] * 2


def product(begun, *callers, a=(64, 32), b=(32, 50), name="aten::mm", forward=None):
    """A kernel of 1 s, launched by a product within ranges of modules, the outermost first; and all of these."""
    events, parent = [], None
    for caller in callers:
        parent = Event(f"{MODULE}{caller}", "annotation", begun, begun + 1, parent=parent)
        events.append(parent)
    if forward:
        parent = Event(
            "autograd::engine::evaluate_function: MmBackward0", "operation", begun, begun + 1, forward=forward
        )
        events.append(parent)
    strides = [[a[-1], 1], [1, b[0]]]
    operation = Event(
        name, "operation", begun, begun + 1, parent=parent, dimensions=[a, b], dtypes=BFLOAT16, strides=strides
    )
    return [*events, operation, Event("nvjet", "kernel", begun, begun + 1, parent=operation)]


def unknown(dtype):
    return None


def profiled(*groups):
    events = tuple(event for group in groups for event in group)
    return profile_of(Trace(events, 0, len(groups), 1, "NVIDIA H200"), unknown)


def rows_of(profile):
    return {row.name: (row.visible, sum(row.flop.values())) for row in profile.modules}


FLOP = 2 * 64 * 32 * 50


def test_layers_that_differ_in_numbers_are_one_row_with_all_within():
    model = "LlamaForCausalLM"
    first = product(0, model, "model.layers.0.mlp: MLP", "model.layers.0.mlp.up: Linear")
    second = product(1, model, "model.layers.11.mlp: MLP", "model.layers.11.mlp.up: Linear")
    profile = profiled(first, second, product(2))
    assert rows_of(profile) == {
        model: (2, 2 * FLOP),
        "model.layers.*.mlp: MLP": (2, 2 * FLOP),
        "model.layers.*.mlp.up: Linear": (2, 2 * FLOP),
        OUTSIDE: (1, FLOP),
    }
    assert [round(row.share, 6) for row in profile.modules] == [round(2 / 3, 6)] * 3 + [round(1 / 3, 6)]


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


def test_without_ranges_there_are_no_modules():
    assert profiled(product(0)).modules == ()


def test_products_are_told_by_shape_dtype_and_layout():
    batched = product(2, name="aten::bmm", a=(8, 64, 32), b=(8, 32, 50))
    rows = profiled(product(0), product(1), batched).products
    assert rows == (
        ProductRow("64x50x32", 1, "bfloat16", "nt", 2, 2.0),
        ProductRow("64x50x32", 8, "bfloat16", "nt", 1, 1.0),
    )
    assert rows[0].tflops == pytest.approx(FLOP / 1e12)
    assert rows[1].tflops == pytest.approx(8 * FLOP / 1e12)


def test_flop_under_autocast_are_of_the_dtype_that_is_multiplied():
    operation, kernel = product(0)
    cast = {"dimensions": [(64, 32), (50, 32)], "dtypes": ["float"] * 2}
    linear = Event("aten::linear", "operation", 0, 1, **cast)
    copy = Event("copy", "kernel", 0, 1, parent=Event("aten::to", "operation", 0, 1, parent=linear))
    for of_float32 in (linear, Event("aten::linear", "operation", 0, 1, parent=linear, **cast)):
        inner = replace(operation, parent=of_float32)
        profile = profiled([linear, inner, copy, replace(kernel, parent=inner)])
        assert {row.name: row.flop for row in profile.classes if row.flop} == {"matmul": {"bfloat16": FLOP}}
        assert [row.dtype for row in profile.products] == ["bfloat16"]


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
    operation = replace(operation, dtypes=["float"] * 2)
    split = Event("void cublasLt::splitKreduce_kernel<32>", "kernel", 0, 1, parent=operation)
    profile = profiled([operation, replace(kernel, name=name, parent=operation), split])
    assert {row.name: row.flop for row in profile.classes if row.flop} == {"matmul": {dtype: FLOP}}
    assert [(row.dtype, row.calls) for row in profile.products] == [(dtype, 1)]


ODD = ProductRow("8192x50257x768", 1, "bfloat16", "nt", 1, 0.01)
RATES = {("8192x50257x768", "bfloat16", "nt"): 200.0, ("8192x50304x768", "bfloat16", "nt"): 600.0}


def test_a_padded_size_is_named_only_where_both_were_measured():
    assert ODD.padded == "8192x50304x768"
    assert ODD.saved_by_padding is None
    assert with_rates([ODD], dict([*RATES.items()][:1]))[0].saved_by_padding is None
    (row,) = with_rates([ODD, ODD][:1], RATES)
    assert row.saved_by_padding == pytest.approx(0.01 * (1 - 50304 / 50257 / 3))
    assert with_rates([replace(ODD, batch=2)], RATES)[0].alone is None
    profile = replace(profiled(product(0)), products=(row,))
    text = FORMATS["table"](profile_document("train.py", profile), None)
    assert "8192x50257x768 alone runs at 33% of what 8192x50304x768 would, both measured in burst" in text
    assert "6.664 ms less per step" in text
    assert "alone runs" not in FORMATS["table"](profile_document("train.py", profiled(product(0))), None)


def test_gains_are_ranked_by_what_they_save():
    idle = Event("cudaDeviceSynchronize", "runtime", 0, 4)
    trace = Trace((*product(0), *product(1), idle), 0, 4, 1, "NVIDIA H200")
    profile = profile_of(trace, unknown)
    (row,) = profile.products
    rates = {(row.shape, "bfloat16", "nt"): row.tflops * 2, (row.padded, "bfloat16", "nt"): row.tflops * 8}
    advised = gains(replace(profile, products=with_rates(profile.products, rates)))
    assert [round(seconds, 2) for seconds, _ in advised] == [2.0, 1.0, 0.72]
    assert [text.split(",")[0] for _, text in advised] == [
        "at most: keep the device busy",
        "at most: 64x50x32 (bfloat16",
        "pad 64x50x32 (bfloat16",
    ]
    text = FORMATS["table"](profile_document("x", profile, 10, advised), None)
    assert "ms to be gained" in text
    assert "ms to be gained" not in FORMATS["table"](profile_document("x", profile), None)


def test_a_log_holds_modules_and_products_and_the_last_profile_counts(tmp_path):
    profile = profiled(product(0, "GPT"), product(1))
    measured = replace(profile, products=with_rates(profile.products, {("64x50x32", "bfloat16", "nt"): 1.5}))
    path = tmp_path / "step.jsonl"
    with create_profile_log(path, "mamf profile", "train.py") as log:
        write_profile(log, profile)
        assert read_profile_or_none(path) == ("train.py", profile)
        write_profile(log, measured)
    assert read_profile_or_none(path) == ("train.py", measured)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))  # killed while it wrote the second one
    assert read_profile_or_none(path) == ("train.py", profile)
    for valid, invalid in (('"64x50x32"', '"64x50"'), ('"seconds": 2, "alone": null', '"seconds": 0, "alone": null')):
        path.write_text("".join(lines).replace(valid, invalid))
        with pytest.raises(RunLogError):
            read_profile_or_none(path)


def test_a_page_of_a_profile_has_its_figures_and_how_it_was_made(tmp_path):
    path, page = tmp_path / "step.jsonl", tmp_path / "page.html"
    with create_profile_log(path, "mamf profile train.py", "train.py") as log:
        write_profile(log, replace(profiled(product(0, "<b>GPT</b>"), product(1)), unprofiled_step_seconds=2.5))
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


# --- ceilings and rates


def test_rates_of_a_given_log_are_the_fastest_in_burst(library_logs):
    rates = rates_of(read_run_log(library_logs / "sweep.jsonl").measurements)
    best = max(read_run_log(library_logs / "sweep.jsonl").measurements, key=lambda row: row.best_rate)
    assert rates[str(best.shape), best.problem.dtype, "nt"] == pytest.approx(best.best_rate)
    assert given_logs([library_logs / "sweep.jsonl"])
    with pytest.raises(RunLogError, match="holds no sustained ceiling"):
        given_logs([library_logs / "find.jsonl"])


@pytest.fixture
def found(library_logs):
    return read_run_log(library_logs / "find.jsonl")


def card(log, name, uuid_hash):
    return replace(log, header={**log.header, "device": {**log.header["device"], "name": name, "uuid_hash": uuid_hash}})


def test_a_folder_of_ceilings_is_taken_for_this_device(found, capsys):
    first, second, other = (card(found, *each) for each in (("H200", "a"), ("H200", "b"), ("H100", "c")))
    assert of_device([[first]], "B200", pytest.fail) == [first]
    assert of_device([[first, second, other]], "H100", pytest.fail) == [other]
    assert of_device([[first, second, other]], "H200", lambda: "b") == [second]
    assert capsys.readouterr().err == ""
    assert of_device([[first, second]], "H200", lambda: None) == []
    assert "none surely of this one: name its log" in capsys.readouterr().err


def test_a_folder_without_ceilings_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no ceilings"):
        given_logs([tmp_path])
    with pytest.raises(RunLogError, match="cannot read"):
        given_logs([tmp_path / LOGS["ceilings"]])


def test_products_are_measured_alone_and_padded(machine):
    profile = replace(
        profiled(product(0)), products=(ODD, replace(ODD, shape="64x64x64", dtype="complex", seconds=1.0))
    )
    rates = measure_products(profile, SimulatedBackend())
    assert {shape for shape, _, _ in rates} == {"8192x50257x768", "8192x50304x768"}
    assert all(rate > 0 for rate in rates.values())


def test_a_script_is_asked_for_its_products_at_its_end(machine, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(TINY.replace("2, 2", "64, 64, dtype=torch.bfloat16"))
    log = tmp_path / "own.jsonl"
    arguments = ["--measure-products", "--advise", "--backend", "simulated", "--output", str(log), "--format", "json"]
    assert main([*SHORTLY, *arguments, str(script)]) == 0
    output = capsys.readouterr()
    told = json.loads(output.out)
    assert "mamf: measuring products of bfloat16, nn: 64x64x64\n" in output.err
    rates = [row["alone_tflops"] for row in told["products"]]
    assert any(rates)
    assert [row.alone for row in read_profile_or_none(log)[1].products] == rates
