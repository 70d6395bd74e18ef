"""Any chart as the parts of a page's figure: pictures, legend, title and notes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mamf.report.charts.chart import Chart, with_visible_texts
from mamf.report.charts.palette import styles_of
from mamf.report.charts.plotting import Picture
from mamf.report.charts.ranges import RangeChart
from mamf.report.charts.roofline import RooflineChart
from mamf.report.charts.stacked import StackedChart
from mamf.report.charts.waterfall import WaterfallChart
from mamf.report.svg.bars import draw_ranges, draw_stacked, draw_waterfall
from mamf.report.svg.canvas import Drawn, color_class, outline
from mamf.report.svg.panels import draw_chart
from mamf.report.svg.roofs import draw_roofline


@dataclass(frozen=True)
class Key:
    """A name in the legend, with the class of its color and the outline of its marker around (0, 0)."""

    name: str
    color: str
    outline: str


@dataclass(frozen=True)
class FigureParts:
    title: str
    subtitle: str
    pictures: Sequence[Drawn]
    legend: Sequence[Key]
    notes: Sequence[str]


def figure_parts(picture: Picture | RangeChart) -> FigureParts:
    """The parts of a picture, with foreign texts made harmless."""
    chart = with_visible_texts(picture)
    names = [] if isinstance(chart, WaterfallChart) else list(chart.names)
    styles = styles_of([*names, *getattr(chart, "palette", ())])
    if isinstance(chart, RooflineChart):
        levels = ("memory", "cache")
        styles |= styles_of([*names, *(line.of for line in chart.lines if line.of not in levels)])
        pictures = draw_roofline(chart, styles)
    elif isinstance(chart, StackedChart):
        names += [line.name for line in chart.lines.lines] if chart.lines else []
        styles = styles_of(names)
        pictures = draw_stacked(chart, styles)
    elif isinstance(chart, WaterfallChart):
        pictures = draw_waterfall(chart)
    elif isinstance(chart, RangeChart):
        pictures = draw_ranges(chart, styles)
    else:
        assert isinstance(chart, Chart), "no other picture exists"
        pictures = draw_chart(chart, styles)
    labels = chart.labels if isinstance(chart, Chart) else {}
    legend = [
        Key(labels.get(name, name), color_class(styles[name].color), outline(styles[name].marker)) for name in names
    ]
    return FigureParts(chart.title, chart.subtitle, pictures, legend, chart.notes)
