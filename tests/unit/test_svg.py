"""SVG pictures: scales, ticks, colors by name."""

import pytest

from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point
from mamf.report.charts.palette import COLORS, styles_of
from mamf.report.charts.ranges import RangeChart, RangePoint, RangeRow
from mamf.report.svg.canvas import Scale, scale_of
from mamf.report.svg.figure import figure_parts


@pytest.mark.parametrize(
    ("low", "high", "is_log", "ticks"),
    [
        (0, 900, False, ["0", "200", "400", "600", "800"]),
        (705.2, 717.9, False, ["710", "715"]),
        (0.2, 120, True, ["0.3", "1", "3", "10", "30", "100"]),
        (900, 1100, True, ["900", "950", "1000", "1050", "1100"]),
        (1e-6, 1e6, True, None),
    ],
)
def test_ticks_are_round_and_few(low, high, is_log, ticks):
    found = Scale(low, high, 0, 100, is_log).ticks()
    assert 2 <= len(found) <= 8
    assert all(low <= value <= high for value, _ in found)
    if ticks is not None:
        assert [text for _, text in found] == ticks


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [1e-9, 1e9], [3.0, 4.0]])
def test_a_scale_holds_its_values(values, is_log):
    scale = scale_of(values, 10, 90, is_log=is_log)
    assert all(10 < scale(value) < 90 for value in values)
    assert scale.ticks()


def test_a_known_name_has_one_color_whatever_stands_beside_it():
    alone = styles_of(["flash-attn-3"])["flash-attn-3"]
    beside = styles_of(["a stranger", "sdpa-cudnn", "flash-attn-3", "eager"])
    assert beside["flash-attn-3"] == alone
    assert len({style.color for style in beside.values()}) == 4


def test_every_name_of_a_small_picture_has_its_own_color():
    names = [f"stranger {number}" for number in range(len(COLORS))]
    assert len({style.color for style in styles_of(names).values()}) == len(COLORS)
    assert set(styles_of([*names, "one more"])) == {*names, "one more"}


def chart(**changes):
    line = Line("torch.mm", (Point(1, 800, 790, 810), Point(2, 850, 840, 860), Point(2, 850, 840, 860)))
    panel = Panel("burst", "tflops", (line,), ceiling=853.0, peak=989.0, best=line.points[1])
    return Chart("t", "s", Axis("size"), ((panel,),), **changes)


def test_points_say_what_they_are_once():
    (picture,) = figure_parts(chart(is_connected=False)).pictures
    assert picture.svg.count("<title>torch.mm: 850 TFLOPS, 840 to 860 (size 2)</title>") == 1
    assert "ceiling 853 (86.2 % of the datasheet)" in picture.svg
    assert "datasheet 989" in picture.svg
    assert "best 850" in picture.svg
    assert 'aria-label="burst, TFLOPS: torch.mm up to 850; datasheet 989; ceiling 853"' in picture.svg


def test_ranges_name_every_row():
    rows = (
        RangeRow("H200", "burst", (RangePoint(850, 840, 860, "card a"), RangePoint(840, 830, 850, "card b")), 989),
        RangeRow("H200", "sustained", (RangePoint(710, 700, 720),)),
    )
    (picture,) = figure_parts(RangeChart("t", "", "TFLOPS", rows)).pictures
    assert picture.svg.count(">H200<") == 1
    assert picture.svg.count("burst: 8") == 2
    assert 'class="peak"' in picture.svg


def test_foreign_text_is_escaped():
    line = Line("<script>&\x1b", (Point(1, 1, 1, 1),))
    parts = figure_parts(Chart("<b>", "", Axis("<i>"), ((Panel("", "tflops", (line,)),),)))
    assert "<script>" not in parts.pictures[0].svg
    assert "&lt;script&gt;&amp;\\x1b" in parts.pictures[0].svg
