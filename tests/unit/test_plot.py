"""Test the data of charts and, if matplotlib is installed, that their pictures are legible."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_plans import kernels_plan, sweep_plan
from made_rates import ceiling
from refusals import assert_refused

from mamf.errors import UsageError
from mamf.kinds.registry import make_log_chart
from mamf.logs.recording import make_plan_record
from mamf.logs.records import make_ceiling_record, make_measurement_record
from mamf.logs.run_log import read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Measurement
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.report.charts.attention import make_attention_chart
from mamf.report.charts.clocks import ClockChart, ClockPoint, make_clock_chart
from mamf.report.charts.logs import make_find_chart, make_kernels_chart, make_sweep_chart
from mamf.report.charts.picture import draw_figure
from mamf.statistics import Interval, summarize_samples

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"
DEVICE = {"backend": "cuda", "index": 0, "name": "H100", "vendor": "NVIDIA", "uuid_hash": None, "driver": "580"}
H200 = {"device": DEVICE | {"name": "NVIDIA H200", "compute_units": 132}, "environment": {}}
HEADER = {"device": DEVICE, "environment": {"packages": {"torch": "2.11"}}}
CEILING = ceiling(800.0, interval=Interval(799, 801, 0.96))
CEILINGS = {("bfloat16", "burst"): CEILING}
PLAN = kernels_plan("attention", (AttentionShape(1, 1, 1, 1, 1, 1, 1),), (AttentionProblem(),), ("eager",))


def make_shape(length=1024, dim=128, causal=False, **sizes):
    all_sizes = {"batch": max(1, 16384 // length), "heads": 2048 // dim, "queries": length, "window": None} | sizes
    heads = all_sizes["heads"]
    return AttentionShape(
        all_sizes["batch"], heads, heads, all_sizes["queries"], length, dim, dim, causal, all_sizes["window"]
    )


def make_row(
    shape, tflops=400.0, kernel="eager", regime="burst", details=None, ranking_statistic="median", **problem_fields
):
    """Return a row with a median rate of ``tflops``, and with samples up to 1 % shorter and longer than the median."""
    problem = MatmulProblem(**problem_fields) if isinstance(shape, MatmulShape) else AttentionProblem(**problem_fields)
    median = problem.compute_work(shape).flop / tflops / 1e12
    samples = tuple(median * (1 + share) for share in (-0.01, -0.005, -0.001, 0, 0.001, 0.005, 0.01))
    return Measurement(
        shape,
        kernel,
        problem,
        regime,
        ranking_statistic,
        "ok",
        summary=summarize_samples(samples),
        samples=samples,
        details=details or {},
    )


def make_failed_row(shape, kernel="eager", status="out_of_memory"):
    return Measurement(shape, kernel, AttentionProblem(), "burst", "median", status, "because")


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
KERNELS = ("eager", "flex", "sdpa-flash")
PRESET = [
    make_row(make_shape(length, dim, causal), 100 + dim + length / 100 + 50 * number, kernel, direction=direction)
    for length, dim, causal, direction in itertools.product(LENGTHS, (64, 128, 256), (False, True), ("fwd", "bwd"))
    for number, kernel in enumerate(KERNELS)
]


# -- data of attention charts ------------------------------------------------------------------------------------------


def test_sizes_that_would_overlap_get_separate_panels():
    rows = [make_row(make_shape(length, batch=batch)) for length in LENGTHS for batch in (1, 64)]
    chart = make_attention_chart(rows, {}, HEADER)
    assert [panel.title for panel in chart.panels] == ["batch 1", "batch 64"]


def test_references_and_other_regimes_are_left_out_and_gaps_are_noted():
    rows = [
        make_row(make_shape(512)),
        make_row(make_shape(512), 90.0, regime="sustained"),
        make_failed_row(make_shape(1024)),
    ]
    rows += [
        make_row(MatmulShape(8, 8, 8), 800.0),
        make_failed_row(make_shape(512), "sage-1", "unsupported"),
        make_row(make_shape(2048)),
    ]
    rows[3] = Measurement(**{**vars(rows[3]), "is_reference": True})
    chart = make_attention_chart(rows, CEILINGS, HEADER)
    assert [len(line.points) for panel in chart.panels for line in panel.lines] == [2]
    assert chart.notes[-1] == "no figure: 1 x eager (out_of_memory)"
    (bar,) = make_attention_chart(rows, {}, HEADER, "sustained").panels[0].bars
    assert bar.height == pytest.approx(90.0)


def test_one_length_is_drawn_as_bars_the_fastest_first():
    rows = [
        make_row(make_shape(512), 100.0),
        make_row(make_shape(512), 400.0, "sdpa"),
        make_row(make_shape(512, causal=True), 90.0),
    ]
    full, causal = make_attention_chart(rows, CEILINGS, HEADER).panels
    assert [bar.label for bar in full.bars] == ["sdpa (50.0 % MAMFU)", "eager (12.5 % MAMFU)"]
    assert [bar.height for bar in causal.bars] == pytest.approx([90.0])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(("classic",), "only in burst"), (("burst", ["bwd"]), "no rate in burst for bwd to draw, only for fwd")],
)
def test_rows_that_the_log_does_not_have_are_refused(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        make_attention_chart([make_row(make_shape())], {}, HEADER, *arguments)


# -- data of matmul charts ---------------------------------------------------------------------------------------------


def test_a_sweep_is_drawn_against_the_size_that_varies():
    rows = [make_row(MatmulShape(m, 4096, 4096), 100.0 + m, "torch.mm") for m in (768, 256, 512)]
    rows += [make_row(MatmulShape(256, 4096, 4096), 90.0, "torch.mm", regime="sustained")]
    chart = make_sweep_chart(rows, HEADER)
    assert chart.axis.label == "M" and not chart.axis.is_logarithmic
    assert chart.title == "matmul Mx4096x4096 by torch.mm, bfloat16"
    burst, sustained = chart.panels[0].lines
    assert [point.x for point in burst.points] == [256, 512, 768]
    assert (burst.name, sustained.name) == ("burst", "sustained")
    assert chart.notes[0] == "burst: best 868.0 TFLOPS (median) at 768x4096x4096"
    assert chart.panels[0].best_point == burst.points[-1]
    assert chart.panels[0].peak == 989.0
    unlisted = {**HEADER, "device": DEVICE | {"name": "unlisted"}}
    assert make_sweep_chart(rows, unlisted).panels[0].peak is None
    assert len(sustained.points) == 1
    assert len(make_sweep_chart(rows, HEADER, "burst").panels[0].lines) == 1


def test_a_sweep_of_several_dimensions_is_drawn_by_rank():
    shapes = [MatmulShape(512, 512, 1024), MatmulShape(1024, 512, 512), MatmulShape(256, 1024, 512)]
    chart = make_sweep_chart([make_row(each, 100.0 + each.m, "torch.mm") for each in shapes], HEADER)
    assert chart.axis.label == "rank, best first"
    assert [round(point.y) for point in chart.panels[0].lines[0].points] == [1124, 612, 356]


def test_a_find_is_drawn_in_the_order_of_its_measurements():
    shapes = [MatmulShape(512 * n, 512, 512) for n in (1, 2, 3)]
    rows = [
        Measurement(**{**vars(make_row(each, 700.0 + each.m / 100, "torch.mm")), "phase": phase})
        for each, phase in zip(shapes, ("scout", "refine", "scout"), strict=True)
    ]
    chart = make_find_chart(rows, {"burst": CEILING}, HEADER)
    (panel,) = chart.panels
    assert chart.names == ["first measurement", "refining measurement"]
    assert [[point.x for point in line.points] for line in panel.lines] == [[1, 3], [2]]
    assert panel.ceiling == 800.0 and not chart.is_connected
    assert not chart.has_own_scales
    assert chart.title == "The ceiling of bfloat16: 800.0 TFLOPS burst"
    assert make_find_chart(rows, {}, HEADER).title == "The ceiling of bfloat16 was not confirmed"
    assert make_find_chart(rows, {}, H200).panels[0].peak == 989.0
    noisy = make_find_chart(rows, {"burst": replace(CEILING, interval=Interval(1.0, math.inf, 0.95))}, HEADER)
    assert noisy.title == "The ceiling of bfloat16: 800.0 TFLOPS burst (interval unknown)"
    assert "its interval is unknown, so run 'mamf find' again" in noisy.notes[0]


def test_a_search_of_kernels_is_drawn_from_its_first_measurements():
    log = read_run_log(RESULTS / "bandwidth-find-float32-burst-sustained-20261121-203429.jsonl")
    chart = make_kernels_chart(log.measurements, log.header)
    assert chart.title == "bandwidth, burst, float32"
    assert chart.notes[0] == "sustained is not drawn, because only its ceilings were measured"
    (read_panel,) = (panel for panel in chart.panels if panel.title == "pattern read")
    drawn = {(line.name, point.x): point.y for line in read_panel.lines for point in line.points}
    first = {
        (row.kernel, float(row.shape.nbytes)): row.best_rate
        for row in log.measurements
        if (row.problem.pattern, row.phase) == ("read", "")
    }
    assert drawn == pytest.approx(first)


def test_the_labels_of_cycles_name_what_differs_and_a_note_counts_rows_without_a_clock():
    chart = make_clock_chart(read_run_log(RESULTS.parents[1] / "docs" / "autoprofile-h200" / "kernels.jsonl"))
    points = [(point.kernel, point.label) for point in chart.points]
    assert len(points) == len(set(points)) and ("flash-attn-3", "16k d128 fwd") in points
    assert chart.notes[1] == "45 more rows without a measured clock (--clock all measures it)."
    log = read_run_log(RESULTS / "decode-bfloat16-burst-20261129-101202.jsonl")
    conditions = replace(log.measurements[0].conditions, used_cycle_share=0.5, true_clock_hz=1.5e9)
    row = replace(next(row for row in log.measurements if row.operation == "decode" and row.ok), conditions=conditions)
    (point,) = make_clock_chart(replace(log, measurements=[row])).points
    assert point.label == str(row.shape)


def test_another_statistic_has_no_interval_of_the_median():
    chart = make_sweep_chart([make_row(MatmulShape(8, 8, 8), regime="classic", ranking_statistic="fastest")], HEADER)
    (point,) = chart.panels[0].lines[0].points
    assert point.low == point.y == point.high


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def draw_texts(monkeypatch):
    """Return a function that draws a figure and returns each text in it with its bounding box."""

    def draw(figure):
        from matplotlib.text import Text

        texts, draw_text = [], Text.draw

        def record_and_draw_text(text, renderer):
            if text.get_visible() and text.get_text().strip():
                texts.append(text)
            return draw_text(text, renderer)

        monkeypatch.setattr(Text, "draw", record_and_draw_text)
        figure.draw_without_rendering()
        return [(text.get_text(), text.get_window_extent()) for text in texts]

    return draw


KERNEL_NAMES = [f"kernel-number-{number}" for number in range(21)]
CHARTS = {
    "preset": make_attention_chart(PRESET, CEILINGS, HEADER, directions=["bwd"]),
    "one panel": make_attention_chart([make_row(make_shape())], CEILINGS, HEADER),
    "faster than its ceiling": make_attention_chart(
        [make_row(make_shape(length), 900.0) for length in LENGTHS], CEILINGS, HEADER
    ),
    "many kernels": make_attention_chart(
        [
            make_row(make_shape(2**n, d), 30.0 * k + n, KERNEL_NAMES[k])
            for n in range(7, 18)
            for d in (64, 128)
            for k in range(21)
        ],
        CEILINGS,
        HEADER,
    ),
    "windows": make_attention_chart(
        [
            make_row(make_shape(length, dim, causal, window=window), direction="fwd+bwd")
            for length, dim, causal, window in itertools.product(LENGTHS, (64,), (False, True), (None, 1024))
        ]
        + [make_row(make_shape())],
        CEILINGS,
        HEADER,
    ),
    "sweep": make_sweep_chart(
        [make_row(MatmulShape(m, 4096, 4096), 300.0 + m / 99) for m in range(256, 20480, 256)], HEADER
    ),
    "kernels that nearly coincide": ClockChart(
        "Cycles used and clock",
        "NVIDIA H200",
        tuple(
            ClockPoint(kernel, f"d{64 * n} {direction}", 1780.0 + 3 * n, 50.0 + n + shift, 500.0)
            for kernel, shift in (("flash-attn-2", -20.0), ("flash-attn-3", 0.0))
            for n in (1, 2, 3)
            for direction in ("fwd", "bwd")
        ),
        0.5,
    ),
}


@pytest.mark.parametrize("chart", CHARTS.values(), ids=list(CHARTS))
def test_figures_are_as_wide_as_a_readme_and_no_texts_overlap(draw_texts, chart):
    pytest.importorskip("matplotlib")
    figure = draw_figure(chart)
    boxes = draw_texts(figure)
    width, height = figure.bbox.width, figure.bbox.height
    assert width == 1600
    assert len(boxes) > sum(map(len, chart.make_panel_rows()))
    pairs = itertools.combinations(boxes, 2)
    assert [(one, other) for (one, first), (other, second) in pairs if first.overlaps(second)] == []
    assert [text for text, box in boxes if min(box.x0, box.y0, width - box.x1, height - box.y1) < 0] == []


def test_a_find_draws_ceiling_and_datasheet_on_one_scale():
    pytest.importorskip("matplotlib")
    rows = [
        Measurement(**{**vars(make_row(MatmulShape(512 * n, 512, 512), rate + n, regime=regime)), "phase": "scout"})
        for n in range(1, 9)
        for regime, rate in (("burst", 780.0), ("sustained", 700.0))
    ]
    figure = draw_figure(make_find_chart(rows, {"burst": CEILING}, H200))
    burst, sustained = (axes for axes in figure.axes if axes.get_title(loc="left"))
    assert {text.get_text() for text in burst.texts} == {"datasheet 989", "ceiling 800.0, 81 % of the datasheet"}
    assert {text.get_text() for text in sustained.texts} == {"datasheet 989"}
    assert burst.get_ylim() == sustained.get_ylim()
    assert 600 < burst.get_ylim()[0] < 701
    assert burst.get_ylim()[1] > 989
    assert all(len(axes.get_xticks()) > 2 and len(axes.get_yticks()) > 2 for axes in (burst, sustained))


def test_a_datasheet_far_above_the_figures_does_not_flatten_them():
    pytest.importorskip("matplotlib")
    (axes,) = draw_figure(
        make_sweep_chart([make_row(MatmulShape(m, 64, 64), 100.0 + m / 64) for m in range(64, 640, 64)], H200)
    ).axes
    assert axes.get_ylim()[1] < 200
    assert "datasheet 989" not in {text.get_text() for text in axes.texts}


# -- the command mamf plot ---------------------------------------------------------------------------------------------


@pytest.fixture
def plot(run):
    """Return a function that runs ``mamf plot`` in a folder with an attention log and a sweep log.

    The function returns exit code, stdout and stderr.
    """
    matmul = sweep_plan((MatmulShape(8, 8, 8),), MatmulProblem())
    sweep = [make_row(MatmulShape(m, 8, 8), kernel="torch.mm") for m in (8, 16)]
    attention = [*PRESET[:6], make_row(make_shape(), 90.0, regime="sustained")]
    for name, plan, rows in (("attention", PLAN, attention), ("sweep", matmul, sweep)):
        header_fields = {
            "tool": {"name": "mamf", "version": "0"},
            "timer": "device events",
            "kernel": "torch.mm",
            "plan": make_plan_record(plan),
        }
        with RunLogWriter.create(Path(f"{name}.jsonl"), HEADER | header_fields) as writer:
            if name == "attention":
                writer.write("ceiling", make_ceiling_record(CEILING))
            for row in rows:
                writer.write("measurement", make_measurement_record(row))

    return lambda *arguments: run("plot", *arguments)


@pytest.mark.parametrize("arguments", [["attention.jsonl"], ["sweep.jsonl"]])
def test_a_log_becomes_a_png_of_its_name(plot, tmp_path, arguments):
    pytest.importorskip("matplotlib")
    code, out, _ = plot(*arguments)
    picture = tmp_path / Path(arguments[0]).with_suffix(".png").name
    assert (code, out) == (0, f"figure: {picture.name}\n")
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 1600


def test_an_svg_file_contains_svg(plot, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = plot("attention.jsonl", "--output", "x.svg", "--direction", "fwd", "--regime", "burst")
    assert (code, err) == (0, "")
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_a_picture_is_overwritten_only_when_asked(plot, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "sweep.png").write_text("precious")
    code, _, err = plot("sweep.jsonl")
    assert code == 2
    assert "sweep.png exists: choose another file, or replace it with --overwrite" in err
    assert (tmp_path / "sweep.png").read_text() == "precious"
    assert plot("sweep.jsonl", "--overwrite")[0] == 0


def test_without_matplotlib_one_line_says_what_to_install(plot, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = plot("sweep.jsonl")
    assert (code, out) == (2, "")
    assert err == "mamf: drawing needs matplotlib: pip install matplotlib\n"
    assert not (tmp_path / "sweep.png").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.jsonl"], "cannot read nothing.jsonl"),
        (["sweep.jsonl", "--output", "x.jpg"], "must end with .png or .svg"),
        (["sweep.jsonl", "--direction", "fwd"], "no direction"),
        (["sweep.jsonl", "--regime", "sustained"], "only in burst"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(plot, tmp_path, arguments, complaint):
    assert_refused(plot(*arguments), complaint)
    assert not list(tmp_path.glob("*.png"))


def test_a_sweep_marks_its_best_and_its_share():
    pytest.importorskip("matplotlib")
    rows = [make_row(MatmulShape(m, 4096, 4096), 700.0 + m / 256, "torch.mm") for m in range(256, 20480, 64)]
    (axes,) = draw_figure(make_sweep_chart(rows, H200)).axes
    assert {text.get_text() for text in axes.texts} == {"datasheet 989", "best 779.8\n79 % of the datasheet"}
    (line,) = [axes_line for axes_line in axes.get_lines() if len(axes_line.get_xdata()) > 2]
    assert line.get_marker() == "." and line.get_linewidth() < 1


def test_the_picture_of_a_device_that_drifted_far_says_so():
    log = read_run_log(
        Path(__file__).parents[2] / "results/nvidia-h200/attention-bfloat16-fwd-bwd-burst-20261122-221110.jsonl"
    )
    advice = (
        "device speed drifted by more than 10 % and out of the ceiling's interval in some rows: do not compare their "
        "rates with others"
    )
    assert advice not in make_log_chart(log).notes
    last_row = log.measurements[-1]
    log.measurements[-1] = replace(last_row, details={**last_row.details, "reference_tflops": 100.0})
    assert advice in make_log_chart(log).notes
