"""Test that the pictures in README.md and docs/ are up to date, and test how tools/pictures.py draws pictures."""

import struct
import zlib

import pictures
import pytest
from figure_tables import ROOT

from mamf.report.charts.attention import _make_bar_panel
from mamf.report.charts.lines import Axis, Chart, Line, Panel, Point
from mamf.report.charts.picture import draw_figure
from mamf.report.page import make_picture_template_values

CHART = Chart("t", "s", Axis("x"), ((Panel("p", (Line("a", (Point(1, 2.0, 2.0, 2.0),)),)),),))


def make_png(*chunks):
    """Return the bytes of a PNG file that contains these chunks. A chunk is its type and its data."""
    content = b"\x89PNG\r\n\x1a\n"
    for kind, text in (("IHDR", b""), *chunks, ("IEND", b"")):
        data = kind.encode() + text
        content += struct.pack(">I", len(text)) + data + struct.pack(">I", zlib.crc32(data))
    return content


@pytest.fixture
def root(tmp_path):
    """Return the path of a repository whose README.md shows a picture of ``CHART``."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("![shown](docs/a.png) and [linked](https://elsewhere/b.png)")
    (tmp_path / "docs" / "a.png").write_bytes(
        make_png(("tEXt", b"mamf data\0" + pictures.compute_digest(CHART).encode()))
    )
    return tmp_path


@pytest.mark.docs
def test_no_picture_of_a_page_is_stale_and_each_is_drawn_by_the_tool(capsys):
    assert pictures.main(["--check"]) == 0, capsys.readouterr().err


def test_every_picture_is_shown_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    page_text = "".join(page.read_text() for page in pages)
    assert [name for name in pictures.PICTURES if name.rpartition("/")[2] not in page_text] == []


def test_a_picture_of_other_data_is_stale(root):
    assert list(pictures.find_stale_pictures({"docs/a.png": lambda: CHART}, root)) == []
    chart_with_other_axis = Chart("t", "s", Axis("y"), CHART.grid)
    assert list(pictures.find_stale_pictures({"docs/a.png": lambda: chart_with_other_axis}, root)) == [
        "docs/a.png: stale"
    ]


def test_unused_fields_and_the_seventh_digit_do_not_change_the_digest():
    def make_chart(**fields):
        point = Point(1, fields.pop("y", 2.0), 2.0, 2.0)
        return Chart("t", "s", Axis("x"), ((Panel("p", (Line("a", (point,)),)),),), **fields)

    assert pictures.compute_digest(make_chart(has_own_scales=False, y=2.0000001)) == pictures.compute_digest(CHART)
    assert pictures.compute_digest(make_chart(has_own_scales=True)) != pictures.compute_digest(CHART)
    assert pictures.compute_digest(make_chart(y=2.0001)) != pictures.compute_digest(CHART)


@pytest.mark.parametrize("has_hollow_markers", [True, False])
@pytest.mark.parametrize("high", [2.0, 2.2])
def test_points_with_an_unknown_interval_are_hollow_if_the_log_has_intervals(high, has_hollow_markers):
    points = (Point(1, 2.0, 2.0, high), Point(2, 3.0, 3.0, 3.0))
    panel = Panel("p", (Line("a", points),), best_point=points[1])
    chart = Chart("t", "s", Axis("x"), ((panel,),), comes_with_intervals=has_hollow_markers)
    assert chart.has_hollow_markers is has_hollow_markers
    assert ("hollow marker: the interval is unknown" in chart.all_notes) is has_hollow_markers
    figure = draw_figure(chart)
    texts = " ".join(text.get_text() for text in figure.texts)
    assert ("hollow marker" in texts) is has_hollow_markers
    (star,) = (line for line in figure.axes[0].lines if line.get_marker() == "*")
    assert (star.get_markerfacecolor() == "white") is has_hollow_markers


@pytest.mark.parametrize("has_intervals", [True, False])
def test_points_without_lines_have_intervals_only_if_the_chart_shows_them(has_intervals):
    points = (Point(1, 2.0, 1.9, 2.2), Point(2, 3.0, 3.0, 3.0))
    panel = Panel("p", (Line("a", points),))
    chart = Chart("t", "s", Axis("x"), ((panel,),), is_connected=False, has_intervals=has_intervals)
    assert bool(draw_figure(chart).axes[0].collections) is has_intervals


def test_a_bar_with_an_unknown_interval_has_no_error_bar():
    lines = (Line("a", (Point(1, 2.0, 1.9, 2.1),)), Line("b", (Point(1, 1.0, 1.0, 1.0),)))
    assert [bar.interval for bar in _make_bar_panel(Panel("p", lines)).bars] == [(1.9, 2.1), None]


def test_a_page_explains_hollow_markers_too():
    points = (Point(1, 2.0, 2.0, 2.2), Point(2, 3.0, 3.0, 3.0))
    chart = Chart("t", "s", Axis("x"), ((Panel("p", (Line("a", points),)),),))
    assert "hollow marker: the interval is unknown" in make_picture_template_values(chart)["notes"]
