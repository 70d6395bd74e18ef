"""Draws a chart with matplotlib: as wide as a README, however many panels and lines it has.

matplotlib is imported when something is drawn, and pyplot never: a separate Figure leaves the caller's figures alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamf.errors import UnavailableError, UsageError
from mamf.files import create_whole, write_whole
from mamf.report.charts.chart import Chart, with_visible_texts
from mamf.report.charts.drawing import chart_panels, draw_chart, named_of_chart
from mamf.report.charts.figures import DPI, WIDTH, Named, PagePanel, arrange
from mamf.report.charts.ranges import RangeChart, named_of_ranges, range_panels
from mamf.report.charts.roofline import RooflineChart
from mamf.report.charts.roofline_drawing import named_of_roofline, roofline_panels
from mamf.report.charts.stacked import StackedChart
from mamf.report.charts.stacked_drawing import (
    draw_stacked,
    named_of_stacked,
    named_of_waterfall,
    stacked_panels,
    waterfall_panels,
)
from mamf.report.charts.waterfall import WaterfallChart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Chart | RangeChart | RooflineChart | StackedChart | WaterfallChart
FILE_TYPES = ("png", "svg")


@dataclass(frozen=True)
class _Drawing:
    """``panels``: for pages. ``named``: entries of the legend. A file is drawn by ``draw``, else it has the panels side
    by side, ``inches`` high.
    """

    panels: Callable[[Any], Iterable[PagePanel]]
    named: Callable[[Any], Named]
    draw: Callable[[Figure, Any], None] | None = None
    inches: float = 0.0


def draw(chart: Picture) -> Figure:
    """The picture as a Figure. Raises UnavailableError without matplotlib."""
    figure, chart, drawing = new_figure(WIDTH, 9), with_visible_texts(chart), _DRAWINGS[type(chart)]
    with texts_as_they_are():
        if drawing.draw is not None:
            drawing.draw(figure, chart)
            return figure
        panels = list(drawing.panels(chart))
        shares = [panel.share for panel in panels]
        axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=shares)[0]
        for panel, place in zip(panels, axes, strict=True):
            panel.draw(place)
        for place in axes[1:]:
            place.tick_params(labelleft=False)
            place.set_ylabel("")
        arrange(figure, chart, drawing.inches, drawing.named(chart))
    return figure


def new_figure(width: float, height: float) -> Figure:
    """A white figure of so many inches. Raises UnavailableError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError("drawing needs matplotlib: pip install 'mamf[plot]'") from None
    return Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")


def texts_as_they_are() -> AbstractContextManager[None]:
    """In which a dollar in a name begins no formula."""
    from matplotlib import rc_context

    return rc_context({"text.parse_math": False})


_DRAWINGS: Mapping[type, _Drawing] = {
    Chart: _Drawing(chart_panels, named_of_chart, draw_chart),
    RangeChart: _Drawing(range_panels, named_of_ranges, inches=8.0),
    RooflineChart: _Drawing(roofline_panels, named_of_roofline, inches=8.0),
    StackedChart: _Drawing(stacked_panels, named_of_stacked, draw_stacked),
    WaterfallChart: _Drawing(waterfall_panels, named_of_waterfall, inches=6.5),
}


def page_panels(chart: Picture) -> tuple[list[PagePanel], Named]:
    """The panels of a picture that a page shows, and its legend."""
    drawing = _DRAWINGS[type(chart)]
    return list(drawing.panels(chart)), drawing.named(chart)


def save(figure: Figure, path: Path, overwrite: bool = False) -> None:
    """Write the figure; its type is the file's ending. Raises UsageError when the file exists or cannot be written,
    RunLogWriteError when the disk is full; then an older figure is still there.
    """
    image = io.BytesIO()
    kind = file_type(path)
    if path.exists() and not overwrite:
        raise exists(path)
    with laid_out(figure):
        figure.savefig(image, format=kind)
    write = write_whole if overwrite else create_whole
    write(path, image.getvalue())


@contextmanager
def laid_out(figure: Figure) -> Iterator[None]:
    """Laid out once: matplotlib would do so again, and draw everything for it, before it draws."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)  # "none" leaves one in its place, for which all would be drawn once more
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


def exists(path: Path) -> UsageError:
    return UsageError(f"{path} exists: name another, or replace it (--overwrite, overwrite=True)")


def file_type(path: Path) -> str:
    """Raises UsageError for an ending that is no known type."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FILE_TYPES:
        raise UsageError(f"cannot draw {path.name}: its name must end with .{' or .'.join(FILE_TYPES)}")
    return kind
