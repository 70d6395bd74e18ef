"""Test the steps from the datasheet's FLOPS down to the measured rates, and ``mamf explain`` in virtual time."""

import json
import shutil
from dataclasses import replace

import library
import pytest

import mamf
from mamf.backend import DeviceInfo
from mamf.cli import main
from mamf.logs.run_log import read_run_log
from mamf.measurement import Conditions, Measurement
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.report.charts.picture import draw_figure
from mamf.report.explanation import (
    LOAD_NOISE_CAUSE,
    NO_LOSS_CAUSE,
    NOISE_CAUSE,
    describe_waterfall_result,
    make_explanation_document,
    make_waterfall_chart,
    make_waterfall_steps,
)
from mamf.report.formats import FORMATTERS
from mamf.statistics import summarize_samples
from mamf.testing import SimulatedBackend

SHAPE = MatmulShape(3072, 2816, 19328)
H200 = DeviceInfo("cuda", 0, "NVIDIA H200", "NVIDIA", compute_units=132, power_limit_watts=700.0)
HEADER = {"device": {"name": "NVIDIA H200"}, "environment": {"packages": {"torch": "2.11"}}}


def make_row(data, rate, regime="burst", clock=1980e6, watts=None, spread=0.001):
    problem = MatmulProblem(data=data)
    median = SHAPE.flop / rate / 1e12
    samples = tuple(median * (1 + spread * step) for step in (-3, -2, -1, 0, 1, 2, 3))
    conditions = Conditions(clock, watts)
    ranking_statistic = "mean" if regime == "sustained" else "median"
    return Measurement(
        SHAPE,
        "torch.mm",
        problem,
        regime,
        ranking_statistic,
        "ok",
        "",
        summarize_samples(samples),
        samples,
        conditions=conditions,
    )


ROWS = [
    *(make_row("normal", 862.0), make_row("uniform", 880.0), make_row("zeros", 940.0), make_row("integers", 937.0)),
    make_row("normal", 707.0, "sustained", 1470e6, 699.0),
]


def add_true_clock(row, true_clock_hz):
    used_cycle_share = row.best_rate * 1e12 / (132 * 4096 * true_clock_hz)
    return replace(
        row, conditions=replace(row.conditions, true_clock_hz=true_clock_hz, used_cycle_share=used_cycle_share)
    )


# -- steps -------------------------------------------------------------------------------------------------------------


def test_steps_lead_from_the_datasheet_of_an_h200_to_its_sustained_rate():
    steps = make_waterfall_steps(ROWS, H200)
    assert [round(step.tflops) for step in steps] == [989, 1071, 940, 862, 707]
    assert [round(100 * step.relative_change) for step in steps[1:]] == [8, -12, -8, -18]
    assert [step.cause for step in steps] == [
        "dense bf16 of H200 SXM, at 1830 MHz",
        "132 units x 4096 FLOP x 1980 MHz that the driver requests, more than the datasheet's clock",
        "the kernel's rate when data cost no energy",
        "real data cost energy, which lowers the clock",
        "power limit: 699 of 700 W, 0.989 J/TFLOP, 1470 MHz requested",
    ]


def test_with_the_true_clock_each_loss_has_one_cause():
    clocks = [1629e6, 1700e6, 1815e6, 1800e6, 1373e6]
    steps = make_waterfall_steps([add_true_clock(row, clock) for row, clock in zip(ROWS, clocks, strict=True)], H200)
    assert [(step.name, round(step.tflops)) for step in steps[2:]] == [
        ("units at the true clock, zeros", 981),
        ("units at the true clock, normal data", 881),
        ("burst, normal data", 862),
        ("units at the true clock, sustained", 742),
        ("sustained, normal data", 707),
    ]
    assert [step.cause for step in steps[2:]] == [
        "1815 MHz: the clock when data cost no energy",
        "1629 MHz: real data cost energy, which lowers the clock",
        "the kernel uses 97.9 % of the units' cycles",
        "1373 MHz: power limit: 699 of 700 W, 0.989 J/TFLOP, 1470 MHz requested",
        "the kernel uses 95.2 % of the units' cycles",
    ]


def test_a_loss_under_load_within_the_noise_is_not_the_largest_loss():
    rows = [*ROWS[:4], make_row("normal", 840.0, "sustained", 1470e6, 699.0, spread=0.1)]
    steps = make_waterfall_steps(rows, H200)
    assert steps[-1].cause == LOAD_NOISE_CAUSE
    assert "the largest loss: burst, zeros" in describe_waterfall_result(steps)[0]


@pytest.mark.parametrize(
    ("rows", "info", "index", "cause"),
    [
        (ROWS, replace(H200, name="Nobody's"), 0, "no datasheet figure of Nobody's is listed for bfloat16"),
        (ROWS, replace(H200, name="Nobody's"), 1, "the FLOP per cycle of the compute units are unknown"),
        (ROWS, replace(H200, compute_units=None), 1, "the FLOP per cycle of the compute units are unknown"),
        (ROWS, replace(H200, name="NVIDIA H200 NVL"), 1, "the FLOP per cycle of the compute units are unknown"),
        ([make_row("normal", 862.0, clock=None)], H200, 1, "no sensor reads the clock"),
        (ROWS[:1], H200, 2, "not measured"),
    ],
)
def test_a_step_without_a_rate_has_a_reason(rows, info, index, cause):
    step = make_waterfall_steps(rows, info)[index]
    assert step.tflops is None and step.cause.startswith(cause)


@pytest.mark.parametrize(
    ("zeros", "normal", "cause"),
    [
        (make_row("zeros", 864.0), make_row("normal", 862.0), "real data made the kernel no slower, within the noise"),
        (make_row("zeros", 940.0), make_row("normal", 862.0), "real data cost energy, which lowers the clock"),
        (
            make_row("zeros", 862.0),
            make_row("normal", 940.0),
            "the kernel was faster on real data than on zeros, so the device was not at rest: measure again",
        ),
        # Both intervals are known, but they overlap.
        (make_row("zeros", 864.0, spread=0.1), make_row("normal", 600.0, spread=0.1), NOISE_CAUSE),
        (make_row("zeros", 940.0), make_row("normal", 862.0, spread=0.5), NOISE_CAUSE),
        (make_row("zeros", 940.0), make_row("normal", 40.0), NOISE_CAUSE),
    ],
)
def test_the_cause_of_the_loss_to_real_data_follows_from_the_rows(zeros, normal, cause):
    assert make_waterfall_steps([zeros, normal], H200)[3].cause == cause


@pytest.mark.parametrize(
    ("rows", "changes", "changes_to_normal"),
    [
        ([*ROWS[1:], make_row("normal", 862.0, spread=0.5)], [-12, None, None], [None] * 4),
        ([*ROWS[1:], make_row("normal", 40.0)], [-12, -96, 1668], [2250, 2242, 2100, 0]),
    ],
)
def test_a_report_of_noisy_rows_asks_to_measure_again(rows, changes, changes_to_normal):
    def round_changes(entries, name):
        return [each[name] and round(100 * each[name]) for each in entries]

    documents = [
        make_explanation_document(make_waterfall_steps(document_rows, H200), document_rows, ["here"])
        for document_rows in (ROWS, rows)
    ]
    noisy_report = json.loads(FORMATTERS["json"](documents[1]))
    assert round_changes(noisy_report["steps"][2:], "change") == changes
    assert round_changes(noisy_report["burst_by_data"], "change_to_normal") == changes_to_normal
    texts = [FORMATTERS["markdown"](document) for document in documents]
    assert ["too noisy to compare these rates: measure again" in text for text in texts] == [False, True]
    assert NO_LOSS_CAUSE not in texts[1]


def test_the_picture_has_a_bar_for_each_step_and_no_label_touches_another():
    steps = make_waterfall_steps(ROWS, H200)
    chart = make_waterfall_chart(steps, ROWS, HEADER)
    (steps_panel, data_panel) = chart.panels
    assert [[round(height) for _, height in bar.parts] for bar in steps_panel.bars] == [
        *([989], [1071], [940, 131], [862, 78], [707, 155])
    ]
    assert [bar.note for bar in steps_panel.bars] == ["", "+8.2 %", "-12.2 %", "-8.3 %", "-18.0 %"]
    assert [bar.label for bar in data_panel.bars] == ["zeros", "integers", "uniform", "normal"]
    figure = draw_figure(chart)
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in (*axes.texts, *axes.get_xticklabels())]
        assert not any(a.overlaps(b) for a in boxes for b in boxes if a is not b)


# -- the command -------------------------------------------------------------------------------------------------------


EXPLAIN_COMMAND = ["explain", "--shape", "16384x16384x16384"]


def install_simulated_device(patch):
    """Install the simulated device, on which operands other than zeros make a matmul take 9 % longer."""
    library.install(patch)
    patch.setattr(SimulatedBackend, "physics", replace(SimulatedBackend.physics, nonzero_data_slowdown=0.09))


@pytest.fixture(scope="module")
def measured_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    with pytest.MonkeyPatch.context() as patch:
        install_simulated_device(patch)
        patch.chdir(folder)
        assert main([*EXPLAIN_COMMAND, "--output", "explain.jsonl", "--picture", "fall.png"]) == 0
    return folder


@pytest.fixture
def folder(run, measured_folder, monkeypatch):
    install_simulated_device(monkeypatch)
    shutil.copytree(measured_folder, run.folder, dirs_exist_ok=True)
    return run.folder


def test_explain_measures_every_kind_of_data_in_under_half_a_minute(folder):
    log = read_run_log(folder / "explain.jsonl")
    assert log.summary["status"] == "complete" and log.summary["elapsed_seconds"] < 30
    assert [(row.regime, row.problem.data) for row in log.measurements] == [
        *(("burst", data) for data in ("normal", "uniform", "zeros", "integers")),
        ("sustained", "normal"),
    ]
    normal, _, zeros, *_ = log.measurements
    assert zeros.best_rate / normal.best_rate == pytest.approx(1.09, abs=0.01)
    assert (folder / "fall.png").stat().st_size > 10_000


def test_show_prints_the_same_table_from_the_log(run, folder):
    code, out, _ = run("show", "explain.jsonl")
    assert code == 0 and "132 units x 4096 FLOP x" in out and "integers" in out and "power cap" in out
    assert run(*EXPLAIN_COMMAND, "--resume", "explain.jsonl")[1].startswith(out.rstrip("\n"))
    assert run("plot", "explain.jsonl", "--output", "again.svg")[0] == 0


def test_the_best_shape_of_a_log_or_of_the_last_find_is_explained(run, folder):
    code, _, err = run("explain")
    assert code == 2 and "'mamf find' has measured no bfloat16 ceiling of this device" in err
    shape = mamf.find("bfloat16", log="find.jsonl").shape
    code, out, _ = run("explain", "--ceiling", "find.jsonl", "--dry-run")
    assert code == 0 and "5 rows" in out
    code, out, _ = run("explain", "--ceiling", "find.jsonl")
    assert code == 0 and f"bfloat16, {shape} by simulated.mm" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ceiling", "explain.jsonl"], "explain.jsonl has no burst ceiling: give a log of 'mamf find'"),
        (["--ceiling", "explain.jsonl", "--shape", "8x8x8"], "--ceiling cannot be combined with --shape"),
        (["--resume", "explain.jsonl", "--shape", "8x8x8"], "--shapes 8x8x8 contradicts"),
        (["--shape", "8x8x8", "--picture", "fall.png"], "fall.png exists"),
    ],
)
def test_bad_input_is_refused_in_one_line(run, folder, arguments, complaint):
    code, _, err = run("explain", *arguments)
    assert code == 2 and complaint in err and err.count("\n") == 1
