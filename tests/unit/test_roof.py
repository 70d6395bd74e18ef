"""Test rooflines: the roof of a row, tables, pictures and exports. All ceilings are defined in this file."""

import json
import re
from dataclasses import replace

import pytest
from made_rates import ceiling
from rendering import render, render_roofline

from mamf.backend import DeviceInfo
from mamf.ceilings.roof import CACHE_LEVEL, MEMORY_LEVEL, build_roofs, find_memory_level, make_roofline_point
from mamf.errors import IncomparableError, UsageError
from mamf.measurement import Measurement
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.bandwidth.operation import BandwidthOperation, BandwidthProblem, BandwidthShape
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.report.charts.logs import make_kernels_chart
from mamf.report.charts.picture import draw_figure, make_empty_figure
from mamf.report.roofline import make_roofline_chart, select_roofline_points
from mamf.report.shares import ShareCalculator
from mamf.report.tracelens import make_tracelens_architecture
from mamf.statistics import summarize_samples

MIB, GIB = 2**20, 2**30
L2 = 60 * MIB
DEVICE = {"backend": "cuda", "index": 0, "name": "H200", "vendor": "NVIDIA", "uuid_hash": None, "driver": "580"}
HEADER = {"device": DEVICE, "environment": {"packages": {"torch": "2.11"}}}
WINNER, SIDE = MatmulShape(3072, 2816, 19328), 8192


def make_bandwidth_ceiling(nbytes, rate, regime="burst", warm=1, pattern="read"):
    fields = {"problem": BandwidthProblem(pattern, warm=warm), "shape": BandwidthShape(nbytes), "regime": regime}
    return ceiling(rate, device="H200", kernel="best", **fields)


def make_matmul_ceiling(rate, regime="burst", dtype="bfloat16", data="normal"):
    fields = {"problem": MatmulProblem(dtype, data=data), "shape": WINNER, "regime": regime}
    return ceiling(rate, device="H200", kernel="best", **fields)


def make_row(problem, shape, rate, kernel="mine", regime="burst"):
    median = problem.compute_work(shape).amount / rate / 1e12
    samples = (0.99 * median, median, 1.01 * median)
    return Measurement(
        shape, kernel, problem, regime, "median", "ok", summary=summarize_samples(samples), samples=samples
    )


MEASURED = [
    make_matmul_ceiling(862.0),
    make_matmul_ceiling(707.0, "sustained"),
    make_matmul_ceiling(1693.0, dtype="float8_e4m3fn"),
    make_bandwidth_ceiling(16 * GIB, 4.39),
    make_bandwidth_ceiling(16 * GIB, 4.38, "sustained"),
    make_bandwidth_ceiling(16 * MIB, 7.6, warm=32),
]
ROOFS = build_roofs(MEASURED, L2)
DECODE = [
    make_row(MatmulProblem(), MatmulShape(m, SIDE, SIDE), rate, "torch.mm")
    for m, rate in ((1, 3.7), (64, 207.0), (512, 788.0))
]


# -- roofs -------------------------------------------------------------------------------------------------------------


def test_a_decode_row_is_bound_by_bandwidth_and_a_large_matmul_by_compute():
    decode, large = (
        make_roofline_point(each, ROOFS, "") for each in (DECODE[0], make_row(MatmulProblem(), WINNER, 840.0))
    )
    nbytes = 2 * (SIDE * SIDE + 2 * SIDE)
    assert decode.intensity == pytest.approx(2 * SIDE * SIDE / nbytes)
    assert (decode.bound, decode.roof_rate) == ("bandwidth", pytest.approx(decode.intensity * 4.39))
    assert decode.roof_share == pytest.approx(3.7 / (decode.intensity * 4.39))
    assert (large.bound, large.roof_rate, large.roof_share) == (
        "compute",
        pytest.approx(862.0),
        pytest.approx(840 / 862),
    )


def test_a_row_whose_rate_is_in_bytes_is_bound_by_bandwidth():
    copy = make_roofline_point(make_row(BandwidthProblem("copy"), BandwidthShape(GIB), 4.26), ROOFS, "")
    assert (copy.row.work.unit, copy.roof_rate, copy.bound, copy.tflops) == (
        "TB/s",
        pytest.approx(4.39),
        "bandwidth",
        None,
    )
    triad = make_roofline_point(make_row(BandwidthProblem("triad"), BandwidthShape(GIB), 4.35), ROOFS, "")
    assert triad.intensity == pytest.approx(2 / 12)


def test_a_row_has_a_share_only_of_a_roof_of_its_dtype_and_regime():
    assert make_roofline_point(make_row(MatmulProblem("float16"), WINNER, 800.0), ROOFS, "").roof_share is None
    assert make_roofline_point(make_row(MatmulProblem(), WINNER, 700.0, regime="classic"), ROOFS, "").roof_share is None
    assert make_roofline_point(
        make_row(MatmulProblem(), WINNER, 700.0, regime="sustained"), ROOFS, ""
    ).roof_rate == pytest.approx(707.0)


def test_a_write_pattern_is_not_a_roof_and_has_no_share():
    fill = make_bandwidth_ceiling(16 * GIB, 4.68, pattern="write")
    assert build_roofs([*MEASURED, fill], L2).bandwidth_ceilings == ROOFS.bandwidth_ceilings
    assert (
        make_roofline_point(make_row(BandwidthProblem("write"), BandwidthShape(GIB), 4.6), ROOFS, "").roof_share is None
    )


@pytest.mark.parametrize(
    ("pattern", "nbytes", "warm", "level"),
    [
        *(("read", 960 * MIB, 1, MEMORY_LEVEL), ("read", 960 * MIB, 8, MEMORY_LEVEL), ("read", 959 * MIB, 1, None)),
        *(("read", 32 * MIB, 1, None), ("read", 32 * MIB, 8, CACHE_LEVEL), ("read", 64 * MIB, 8, None)),
        *(("copy", 30 * MIB, 8, CACHE_LEVEL), ("copy", 32 * MIB, 8, None)),
    ],
)
def test_the_memory_level_follows_from_the_size_of_the_arrays(pattern, nbytes, warm, level):
    assert find_memory_level(BandwidthProblem(pattern, warm=warm), BandwidthShape(nbytes), L2) == level


@pytest.mark.parametrize("pattern", ["copy", "read", "triad"])
@pytest.mark.parametrize("cache_bytes", [None, L2])
def test_find_and_roofline_agree_on_which_arrays_measure_memory(pattern, cache_bytes):
    problem, info = BandwidthProblem(pattern), DeviceInfo("cuda", 0, "card", "vendor", cache_bytes=cache_bytes)
    for size in range(16 * MIB, 1024 * MIB, 16 * MIB):
        shape = BandwidthShape(size)
        assert BandwidthOperation().may_be_ceiling(info, problem, shape) == (
            find_memory_level(problem, shape, cache_bytes) == MEMORY_LEVEL
        )


def test_the_highest_confirmed_ceiling_is_the_roof():
    roofs = build_roofs(
        [
            *MEASURED,
            make_matmul_ceiling(850.0),
            make_bandwidth_ceiling(GIB, 4.3),
            make_matmul_ceiling(940.0, data="zeros"),
        ],
        L2,
    )
    assert roofs.matmul_ceilings["bfloat16", "burst"].rate == 862.0
    assert roofs.bandwidth_ceilings[MEMORY_LEVEL, "burst"].rate == 4.39


def test_ceilings_of_two_cards_make_no_roof_unless_asked_to():
    one, other = replace(MEASURED[0], uuid_hash="a"), replace(MEASURED[3], uuid_hash="b")
    with pytest.raises(IncomparableError, match="two cards, both H200"):
        build_roofs([one, other], L2)
    assert build_roofs([one, other], L2, anyway=True).matmul_ceilings
    with pytest.raises(UsageError, match="mamf roofline"):
        build_roofs([], L2)


# -- tables ------------------------------------------------------------------------------------------------------------


def test_the_table_has_balance_points_and_the_distance_of_each_row():
    text = render_roofline("table", ROOFS, select_roofline_points(DECODE, ROOFS, {}), "head")
    assert "196.4" in text and "113.4" in text  # balance points of bfloat16 with memory and with L2 cache
    assert "near the limit (80 % of the roof and more)" in text and "% of the compute roof" in text.splitlines()[-1]
    assert next(line for line in text.splitlines() if " torch.mm " in line).startswith("512x8192x8192")


@pytest.mark.parametrize(("bound", "is_ceiling_wrong"), [("compute", True), ("bandwidth", False)])
def test_a_ceiling_is_wrong_only_if_rows_are_far_above_the_compute_roof(bound, is_ceiling_wrong):
    points = [
        replace(each, roof_rate=each.row.comparable_rate / 1.2, bound=bound)
        for each in select_roofline_points(DECODE, ROOFS, {})
    ]
    assert ("so the ceiling is too low" in render_roofline("table", ROOFS, points, "head")) == is_ceiling_wrong


def test_the_table_says_how_many_rows_were_measured_while_the_device_was_slower():
    slowed = replace(DECODE[0], details={"reference_tflops": 0.85 * 862.0})
    warning = (
        "device speed drifted by more than 10 % and out of the ceiling's interval since the ceiling was measured: do "
        "not compare the rates of 1 row"
    )
    matmul_ceilings = ROOFS.matmul_ceilings
    slower_ceilings = {key: replace(roof, rate=0.85 * roof.rate) for key, roof in matmul_ceilings.items()}
    slower_text, usual_text, other_ceiling_text = (
        " ".join(render_roofline("table", ROOFS, select_roofline_points(rows, ROOFS, ceilings)).split())
        for rows, ceilings in (
            ([slowed, *DECODE[1:]], matmul_ceilings),
            (DECODE, matmul_ceilings),
            ([slowed], slower_ceilings),
        )
    )
    assert warning in slower_text and "drifted" not in usual_text + other_ceiling_text


def test_the_interval_of_a_slow_memory_has_the_unit_of_its_rate():
    slow = build_roofs([make_matmul_ceiling(0.06), make_bandwidth_ceiling(16 * GIB, 0.00838)], L2)
    line = next(line for line in render_roofline("table", slow, [], "head").splitlines() if " GB/s" in line)
    low, high = map(float, re.search(r"(\S+) to (\S+)", line).groups())
    assert low < 8.38 < high


def test_rows_at_80_columns_show_the_fields_in_which_they_differ():
    shape = AttentionShape(1, 16, 16, 1024, 1024, 128, 128)
    rows = [make_row(AttentionProblem(direction=each), shape, 300.0) for each in ("fwd", "bwd")]
    text = render_roofline("table", ROOFS, select_roofline_points(rows, ROOFS, {}), "head")
    names = [line.split("  ")[0] for line in text.splitlines() if line.startswith(str(shape))]
    assert sorted(names) == [f"{shape}, bwd", f"{shape}, fwd"]
    lines = render_roofline("table", ROOFS, select_roofline_points(rows[:1], ROOFS, {}), "head").splitlines()
    assert "fwd" in lines and any(line.startswith(f"{shape}  ") for line in lines)


def test_rows_are_written_as_csv_and_json():
    points = select_roofline_points(DECODE, ROOFS, {})
    header, first, *_ = render_roofline("csv", ROOFS, points).splitlines()
    assert header.startswith("row,kernel,regime,dtype,intensity_flop_per_byte,rate,unit")
    assert first.startswith("512x8192x8192,torch.mm")
    data = json.loads(render_roofline("json", ROOFS, points))
    assert data["rows"][0]["bound_by"] == "compute" and len(data["roofs"]) == 6
    assert data["roofs"][0]["balance_memory_flop_per_byte"] == pytest.approx(862 / 4.39)
    assert render_roofline("csv", ROOFS, []).count("\n") == 7


def test_a_table_of_kernels_has_the_share_where_roofs_are_known():
    rows = [make_row(BandwidthProblem(pattern), BandwidthShape(GIB), 4.0) for pattern in ("copy", "write")]
    header = HEADER | {"plan": {"operation": "bandwidth"}, "timer": "events"}
    header["device"] = DEVICE | {"backend": "cuda", "compute_units": 132}
    with_roofs = render("table", rows, header, None, roofs=ROOFS)
    assert "91.1  bandwidth" in " ".join(with_roofs.split("\n")).replace("   ", "  ")
    assert "roof" not in render("table", rows, header, None)
    assert "share_of_roof" in render("csv", rows, header, None, roofs=ROOFS)


def test_mamfu_is_explained_only_where_a_row_has_it():
    shares = ShareCalculator(HEADER, {("bfloat16", "burst"): make_matmul_ceiling(862.0)})
    assert shares.describe_ceilings([make_row(BandwidthProblem("read"), BandwidthShape(GIB), 4.0)]) == []
    assert shares.describe_ceilings(DECODE)[0].startswith("MAMFU: share of 862.0 TFLOPS")


# -- pictures ----------------------------------------------------------------------------------------------------------


def make_attention_rows():
    problem, lengths = AttentionProblem(), (512, 1024, 2048, 4096, 8192, 16384)
    shapes = [AttentionShape(16384 // n, 16, 16, n, n, 128, 128) for n in lengths]
    return [
        make_row(problem, shape, rate * (1 - 200 / (shape.seqlen_k + 300)), kernel)
        for shape in shapes
        for kernel, rate in (("flash", 360.0), ("cudnn", 640.0), ("fa4", 740.0))
    ]


def test_ceilings_are_lines_and_rows_are_marks():
    chart = make_roofline_chart(ROOFS, select_roofline_points(DECODE, ROOFS, {}), HEADER)
    assert sorted((line.label.partition(" ")[0], line.is_sustained) for line in chart.lines) == [
        ("", True),  # sustained memory bandwidth equals burst, so only the burst line has a label
        *(
            ("bfloat16", False),
            ("bfloat16", True),
            (CACHE_LEVEL, False),
            ("float8_e4m3fn", False),
            (MEMORY_LEVEL, False),
        ),
    ]
    rising = next(line for line in chart.lines if line.label.startswith(MEMORY_LEVEL) and not line.is_sustained)
    assert rising.end == pytest.approx((1693 / 4.39, 1693))
    assert [mark.label for mark in chart.markers] == ["1x8192x8192", "64x8192x8192", "512x8192x8192"]
    assert {mark.series for mark in chart.markers} == {"Mx8192x8192"}
    assert chart.markers[0].position == pytest.approx((make_roofline_point(DECODE[0], ROOFS, "").intensity, 3.7))


def test_labels_of_ceilings_cover_no_ceiling_and_no_other_label():
    roofs = build_roofs(
        [
            *(make_matmul_ceiling(0.08), make_matmul_ceiling(0.079, "sustained")),
            *(make_matmul_ceiling(0.3, dtype="float32"), make_matmul_ceiling(0.25, "sustained", dtype="float32")),
            *(make_bandwidth_ceiling(16 * GIB, 0.0279), make_bandwidth_ceiling(16 * GIB, 0.0263, "sustained")),
            make_bandwidth_ceiling(16 * MIB, 0.0406, warm=32),
        ],
        L2,
    )
    panel = make_roofline_chart(roofs, [], HEADER).make_panel_rows()[0][0]
    figure = make_empty_figure(*panel.size_inches)
    from matplotlib.text import Text

    axes = figure.subplots()
    panel.draw(axes)
    figure.draw_without_rendering()
    boxes = {label.get_text(): Text.get_window_extent(label) for label in axes.texts}
    assert set(boxes) == {
        *("float32 0.3000", "float32 0.2500", "bfloat16 0.08000", "bfloat16 0.07900"),
        *("cache 40.60 GB/s", "memory 27.90 GB/s", "memory 26.30 GB/s"),
    }
    for label, box in boxes.items():
        assert box.count_overlaps(boxes.values()) == 1, f"{label} covers another label"
        assert box.x0 > axes.bbox.x0, f"{label} leaves the axes"
        for line in axes.lines:
            path = line.get_transform().transform_path(line.get_path())
            assert not path.intersects_bbox(box, filled=False), f"{label} covers a line"


def test_a_mark_without_a_roof_in_its_regime_is_hollow():
    roofs = build_roofs([make_matmul_ceiling(1693.0), make_bandwidth_ceiling(16 * GIB, 4.39)], L2)
    row_without_roof = replace(DECODE[1], regime="sustained")
    chart = make_roofline_chart(roofs, select_roofline_points([DECODE[0], row_without_roof], roofs, {}), HEADER)
    assert [mark.has_roof for mark in chart.markers] == [True, False]
    assert "hollow marks" in chart.notes[0]
    marks = [line for line in draw_figure(chart).axes[0].lines if line.get_linestyle() == "None"]
    assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, True]
    chart_with_roofs = make_roofline_chart(roofs, select_roofline_points(DECODE, roofs, {}), HEADER)
    assert "hollow" not in chart_with_roofs.notes[0] and "thin" not in chart_with_roofs.notes[0]


def test_a_slow_memory_is_drawn_in_the_unit_of_its_table():
    chart = make_kernels_chart([make_row(BandwidthProblem("read"), BandwidthShape(GIB), 0.05)], HEADER)
    (panel,) = chart.panels
    assert panel.unit == "GB/s"
    assert panel.points[0].y == pytest.approx(50)


def test_labels_touch_neither_one_another_nor_a_mark():
    from matplotlib.text import Annotation, Text

    chart = make_roofline_chart(ROOFS, select_roofline_points([*DECODE, *make_attention_rows()], ROOFS, {}), HEADER)
    axes = draw_figure(chart).axes[0]
    series = {mark.series for mark in chart.markers}
    labels = [each for each in axes.texts if isinstance(each, Annotation) and each.get_text() in series]
    assert [each.get_text() for each in labels] == ["Mx8192x8192"]
    assert all(each.get_window_extent() for each in labels)  # moves each label to the place where it is drawn
    boxes = [Text.get_window_extent(each) for each in labels]  # only the text, without the line to its marker
    places = axes.transData.transform([mark.position for mark in chart.markers])
    assert not any(box.contains(*place) for box in boxes for place in places)
    assert {line.label for line in chart.lines} - {""} <= {each.get_text() for each in axes.texts}


# -- export for TraceLens ----------------------------------------------------------------------------------------------


def test_the_export_for_tracelens_has_only_measured_rates():
    architecture = make_tracelens_architecture(ROOFS, 150 * 10**9)
    assert architecture["name"] == "H200"
    assert architecture["max_achievable_tflops"] == {"matrix_bf16": 707.0, "matrix_fp8": 1693.0}
    assert (architecture["mem_bw_gbps"], architecture["memory_gb"]) == (4380.0, 140)
    assert architecture["_regimes"] == {"matrix_bf16": "sustained", "matrix_fp8": "burst", "mem_bw_gbps": "sustained"}
    architecture_without_bandwidth = make_tracelens_architecture(build_roofs([make_matmul_ceiling(862.0)], None), None)
    assert "mem_bw_gbps" not in architecture_without_bandwidth and "memory_gb" not in architecture_without_bandwidth


def test_a_matmul_with_an_unusual_output_dtype_is_not_a_roof():
    unusual = ceiling(1500.0, device="H200", problem=MatmulProblem("int8", "int8"))
    usual = ceiling(1000.0, device="H200", problem=MatmulProblem("int8", "int32"))
    assert make_tracelens_architecture(build_roofs([unusual], None), None)["max_achievable_tflops"] == {}
    roofs = build_roofs([unusual, usual, make_bandwidth_ceiling(16 * GIB, 4.39)], L2)
    assert make_tracelens_architecture(roofs, None)["max_achievable_tflops"] == {"matrix_int8": 1000.0}
    row_of_int8 = make_row(MatmulProblem("int8", "int32"), MatmulShape(SIDE, SIDE, SIDE), 500.0)
    assert make_roofline_point(row_of_int8, roofs, "").roof_share == pytest.approx(0.5)
