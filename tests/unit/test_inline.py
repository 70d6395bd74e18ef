"""Test the charts in pages: hints, colors, and that they contain nothing that the page's security policy forbids."""

import re
import sys
from dataclasses import replace
from xml.etree.ElementTree import fromstring

import pytest

from mamf.report.charts.bars import RangeChart, RangePoint, RangeRow, StackedBar, StackedChart, StackedPanel
from mamf.report.charts.lines import Axis, Chart, Line, Panel, Point
from mamf.report.charts.picture import draw_figure
from mamf.report.page import make_picture_template_values
from mamf.report.roofline import CeilingLine, RooflineChart, RooflineMarker

LINE = Line("torch.mm", (Point(1, 800, 790, 810), Point(2, 850, 840, 860)))
LINES = Chart(
    "t", "s", Axis("size"), ((Panel("burst", (LINE,), ceiling=853.0, peak=989.0, best_point=LINE.points[1]),),)
)
RANGES = RangeChart(
    "t",
    "",
    "TFLOPS",
    (
        RangeRow("H200", "burst", (RangePoint(850, 840, 860, "card a"), RangePoint(840, 830, 850, "card b")), 989),
        RangeRow("H200", "sustained", (RangePoint(710, 700, 720),)),
    ),
)
STEP = StackedBar("4k", (("forward", 3.0), ("backward", 1.0)))
BARS = StackedChart("t", "", "ms", "context", (StackedPanel("mm", (STEP,)),))
STEPS = StackedChart(
    *("t", "", "TFLOPS", ""),
    (StackedPanel("", (StackedBar("measured", (("rate", 850.0), ("lost", 139.0)), "-14 %", (840.0, 860.0)),)),),
    ("lost",),
)
ROOFS = RooflineChart(
    "t",
    "",
    (CeilingLine("bfloat16 800 TFLOPS", (100, 800), (1000, 800), False),),
    (RooflineMarker("8x8x8", "torch.mm", (200, 700)), RooflineMarker("k", "flex", (900, 90))),
    (10, 1000),
)


@pytest.mark.parametrize(
    ("chart", "hints"),
    [
        (LINES, ["torch.mm: 800.0 TFLOPS, 790.0 to 810.0 (size 1)", "torch.mm: 850.0 TFLOPS, 840.0 to 860.0 (size 2)"]),
        (RANGES, ["burst: 850.0 TFLOPS card a", "burst: 840.0 TFLOPS card b", "sustained: 710.0 TFLOPS "]),
        (
            BARS,
            [
                *("4k, forward: 3.000 ms (75.0 %)", "4k, backward: 1.000 ms (25.0 %)"),
            ],
        ),
        (STEPS, ["measured, rate: 850.0 TFLOPS (85.9 %)", "measured, lost: 139.0 TFLOPS (14.1 %)"]),
        (
            ROOFS,
            [
                "torch.mm, 8x8x8: 700.0 TFLOPS at 200 FLOP per byte",
                "flex, k: 90.00 TFLOPS at 900 FLOP per byte",
            ],
        ),
    ],
)
def test_points_and_bars_say_their_figures(chart, hints):
    pytest.importorskip("matplotlib")
    pictures = [fromstring(picture) for picture in make_picture_template_values(chart)["pictures"]]
    assert sorted(title.text for picture in pictures for title in picture.iter("title")) == sorted(hints)
    assert all(picture.get("aria-label") and picture.get("role") == "img" for picture in pictures)


@pytest.mark.parametrize("chart", [LINES, RANGES, BARS, STEPS, ROOFS])
def test_pictures_have_no_styles_and_the_colors_of_the_page(chart):
    pytest.importorskip("matplotlib")
    values = make_picture_template_values(chart)
    text = "".join(values["pictures"])
    assert not re.search("<style|style=|<metadata|xmlns|font-family", text)
    assert "#000000" not in text and "#ffffff" not in text and "var(--c" in text
    ids = re.findall(' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) == set(ids)
    assert make_picture_template_values(chart)["pictures"] == values["pictures"], "equal charts must give equal bytes"
    assert all(key["outline"].startswith("M") for key in values["legend"])


def test_a_long_heading_of_rows_is_wrapped_and_the_chart_is_higher():
    pytest.importorskip("matplotlib")
    heading = "best sustained, float32, gpt2 256/1024/2/4, forward"
    rows = (RangeRow(heading, "cpu-of-the-second-log", (RangePoint(850, 840, 860),)),)
    chart = RangeChart("t", "", "TFLOPS", rows)
    assert chart.height_inches > RangeChart("t", "", "TFLOPS", (replace(rows[0], group="short"),)).height_inches
    texts = [text for text in fromstring(make_picture_template_values(chart)["pictures"][0]).itertext() if text.strip()]
    assert all(line in texts for line in chart.wrap_heading(heading))
    assert max(map(len, texts)) < len(heading)


def test_foreign_text_is_escaped():
    pytest.importorskip("matplotlib")
    line = Line("<script>&\x1b", (Point(1, 1, 1, 1),))
    values = make_picture_template_values(Chart("<b>", "", Axis("<i>$x$"), ((Panel("$\\frac", (line,)),),)))
    assert "<script>" not in values["pictures"][0]
    assert "&lt;script&gt;&amp;\\x1b" in values["pictures"][0]
    assert "&lt;i&gt;$x$" in values["pictures"][0]


def test_no_band_of_an_interval_is_cut_off():
    pytest.importorskip("matplotlib")
    line = Line("k", (Point(1, 1, 0.6, 1.4), Point(2, 1.1, 1, 1.2)))
    (axes,) = draw_figure(Chart("t", "", Axis("x"), ((Panel("", (line,)),),))).axes
    assert axes.get_ylim()[0] < 0.6 and axes.get_ylim()[1] > 1.4


def test_a_single_point_has_its_interval_as_a_line():
    pytest.importorskip("matplotlib")
    line = Line("k", (Point(1, 1, 0.9, 1.4),))
    (axes,) = draw_figure(Chart("t", "", Axis("x"), ((Panel("", (line,)),),))).axes
    segments = [
        segment for lines in axes.collections if hasattr(lines, "get_segments") for segment in lines.get_segments()
    ]
    assert [[y for _, y in segment] for segment in segments] == [[0.9, 1.4]]


def test_without_matplotlib_a_page_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    values = make_picture_template_values(LINES)
    assert values["title"] == "t" and not values["pictures"]
    assert values["notes"] == ["drawing needs matplotlib: pip install matplotlib"]
