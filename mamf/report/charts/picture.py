"""Lay out and draw all pictures with matplotlib: rows of panels with a title above, and a legend and notes below.

An image file is as wide as a README on GitHub, however many panels it has. A web page shows each panel as a separate
SVG. matplotlib is imported only when a picture is drawn. pyplot is never imported, because it would add figures to the
global state of the caller.
"""

from __future__ import annotations

import io
import itertools
import textwrap
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mamf.errors import UnavailableError, UsageError
from mamf.files import create_file_atomically, write_file_atomically
from mamf.report.ceilings import PHASE_NAMES
from mamf.text import escape_invisible_characters

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

IMAGE_FILE_TYPES = ("png", "svg")
DPI = 100
FILE_WIDTH_INCHES = 16.0  # width of image files in inches: 1600 pixels, which GitHub shows at about 60 % of their size
PANEL_WIDTH_INCHES = 6.4  # width of a panel on a web page in inches: narrow enough for a phone
_GAP_INCHES = 0.12  # vertical space between title, panels, legend and notes
_MARGIN_INCHES = 0.2
_TITLE_FONT_POINTS, _SUBTITLE_FONT_POINTS, TEXT_FONT_POINTS, SMALL_FONT_POINTS = 20, 14, 14, 12  # font sizes in points
GRAY = "#555555"
# Numbers of characters that fit the width of an image file: in one line of the title, the subtitle or a note, and in
# all panel titles of a row together.
_MAX_TITLE_CHARACTERS, _MAX_SUBTITLE_CHARACTERS, _MAX_NOTE_CHARACTERS, _MAX_PANEL_TITLES_CHARACTERS = 90, 145, 170, 132
_MAX_LEGEND_COLUMNS = 8
#: Entries of a legend: the name, and the keyword arguments of the matplotlib line that is drawn next to the name.
LegendEntries = list[tuple[str, dict[str, Any]]]
#: Tooltips that web pages show, by the matplotlib object of the bar or line. A line has one tooltip for each point.
TOOLTIPS_BY_ARTIST: WeakKeyDictionary[Artist, Sequence[str]] = WeakKeyDictionary()
#: Settings that make matplotlib draw dollar signs literally. By default, a dollar sign begins a formula.
PLAIN_TEXT_SETTINGS: dict[Any, Any] = {"text.parse_math": False}
#: The reason for missing pictures on a machine without matplotlib.
NO_MATPLOTLIB_REASON = "drawing needs matplotlib: pip install matplotlib"


@dataclass(frozen=True)
class DrawablePanel:
    """A panel that is ready to be drawn.

    - ``description``: a description for screen readers.
    - ``draw``: draws the panel on axes.
    - ``scale_key``: identifies the vertical scale. Neighboring panels with equal keys show the labels of the scale only
      once. A panel whose key is None keeps its labels.
    - ``size_inches``: width and height on a web page, in inches.
    - ``width_share``: the width in an image file, relative to the other panels of the row.
    - ``keeps_own_labels``: whether the labels below the panel differ from those of the panel under it.
    - ``draw_on_page``: draws the panel on a web page; None if ``draw`` does it.
    """

    description: str
    draw: Callable[[Axes], None]
    scale_key: object = None
    size_inches: tuple[float, float] = (PANEL_WIDTH_INCHES, 3.8)
    width_share: float = 1.0
    keeps_own_labels: bool = False
    draw_on_page: Callable[[Axes], None] | None = None


@dataclass(frozen=True)
class Picture(ABC):
    title: str
    subtitle: str
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def all_notes(self) -> Sequence[str]:
        """The notes below the panels. Subclasses can add notes about how the picture is drawn."""
        return self.notes

    @property
    @abstractmethod
    def height_inches(self) -> float:
        """The height of all panels together in an image file."""

    @abstractmethod
    def make_panel_rows(self) -> Sequence[Sequence[DrawablePanel | None]]:
        """Return the panels in rows of equal length, with None where there is no panel."""

    @abstractmethod
    def make_legend(self) -> LegendEntries:
        """Return the entries of the legend: each name with the style of its line or marker."""


def draw_figure(picture: Picture) -> Figure:
    """Draw a picture as a matplotlib Figure. Raises UnavailableError if matplotlib is not installed."""
    figure, picture = make_empty_figure(FILE_WIDTH_INCHES, 9), escape_invisible_texts(picture)
    from matplotlib import rc_context

    with rc_context(PLAIN_TEXT_SETTINGS):
        rows = picture.make_panel_rows()
        width_shares = [panel.width_share if panel else 1.0 for panel in rows[0]]
        grid = figure.subplots(len(rows), len(width_shares), squeeze=False, width_ratios=width_shares)
        for row_index, column_index in itertools.product(range(len(rows)), range(len(width_shares))):
            axes, panel = grid[row_index][column_index], rows[row_index][column_index]
            if panel:
                panel.draw(axes)
                _drop_repeated_labels(axes, rows, row_index, column_index)
            else:
                axes.set_visible(False)
        _arrange_figure(figure, picture)
    return figure


def _drop_repeated_labels(
    axes: Axes, rows: Sequence[Sequence[DrawablePanel | None]], row_index: int, column_index: int
) -> None:
    """Remove the axis labels of a panel that a neighbor also shows:

    - the labels of the left axis, if the panel to the left has the same scale
    - the right axis (rates in percent), if a panel further right has the same scale
    - the labels of the horizontal axis, if a panel below has the same labels
    """
    panel, left_panels, right_panels = (
        rows[row_index][column_index],
        rows[row_index][:column_index],
        rows[row_index][column_index + 1 :],
    )
    scale_key = panel and panel.scale_key
    if scale_key is not None and left_panels and left_panels[-1] and left_panels[-1].scale_key == scale_key:
        axes.set_ylabel("")
        axes.tick_params(labelleft=False)
    if scale_key is not None and any(each and each.scale_key == scale_key for each in right_panels):
        for share_axis in list(axes.child_axes):
            share_axis.remove()
    if panel and not panel.keeps_own_labels and any(row[column_index] for row in rows[row_index + 1 :]):
        axes.set_xlabel("")
        axes.tick_params(labelbottom=False)


def make_empty_figure(width: float, height: float) -> Figure:
    """Return an empty white figure with a size in inches. Raises UnavailableError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError(NO_MATPLOTLIB_REASON) from None
    return Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")


def escape_invisible_texts(part: Any) -> Any:
    """Return a copy of a picture, or of a part of one, with the invisible characters in all its strings escaped."""
    if isinstance(part, str):
        return escape_invisible_characters(part)
    if isinstance(part, tuple):
        return tuple(map(escape_invisible_texts, part))
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{each.name: escape_invisible_texts(getattr(part, each.name)) for each in fields(part)})
    return part


# -- layout of title, panels, legend and notes -------------------------------------------------------------------------


def _arrange_figure(figure: Figure, picture: Picture) -> None:
    """Place the title, the panels, the legend and the notes below one another, and make the figure high enough for all
    of them.
    """
    texts = [
        figure.text(
            0,
            0,
            textwrap.fill(picture.title, _MAX_TITLE_CHARACTERS),
            fontsize=_TITLE_FONT_POINTS,
            weight="bold",
            va="top",
        ),
        figure.text(
            0,
            0,
            textwrap.fill(picture.subtitle, _MAX_SUBTITLE_CHARACTERS),
            fontsize=_SUBTITLE_FONT_POINTS,
            color=GRAY,
            va="top",
        ),
    ]
    notes = "\n".join(textwrap.fill(note, _MAX_NOTE_CHARACTERS) for note in picture.all_notes)
    note = figure.text(0, 0, notes, fontsize=SMALL_FONT_POINTS, color=GRAY, va="bottom", linespacing=1.35)
    for text in (*texts, note):
        text.set_in_layout(False)
    named = picture.make_legend()
    legend = _draw_legend(figure, named) if named else None
    above = 2 * _GAP_INCHES + sum(_measure_height(text) + _GAP_INCHES for text in texts)
    foot = _GAP_INCHES + (_measure_height(note) + _GAP_INCHES if notes else 0)
    below = foot + (_measure_height(legend) + _GAP_INCHES if legend else 0)
    height = above + picture.height_inches + below
    figure.set_size_inches(FILE_WIDTH_INCHES, height)
    top = height - _GAP_INCHES
    for text in texts:
        text.set_position((_MARGIN_INCHES / FILE_WIDTH_INCHES, top / height))
        top -= _measure_height(text) + _GAP_INCHES
    note.set_position((_MARGIN_INCHES / FILE_WIDTH_INCHES, _GAP_INCHES / height))
    if legend:
        legend.set_bbox_to_anchor((0.5, foot / height))
    engine = figure.get_layout_engine()
    assert engine is not None, "make_empty_figure sets the layout engine"
    engine.set(rect=(0.005, below / height, 0.99, 1 - (above + below) / height), wspace=0.02, hspace=0.03)  # type: ignore[call-arg]


def _draw_legend(figure: Figure, entries: LegendEntries) -> Any:
    """Draw the legend below the panels in as many columns as fit the width."""
    from matplotlib.lines import Line2D

    handles, labels = [Line2D([], [], **style) for _, style in entries], [name for name, _ in entries]
    legend_style: dict[str, Any] = {
        "loc": "lower center",
        "fontsize": TEXT_FONT_POINTS,
        "frameon": False,
        "borderpad": 0,
    }
    for columns in range(min(len(labels), _MAX_LEGEND_COLUMNS), 0, -1):
        legend = figure.legend(handles, labels, ncols=columns, **legend_style)
        legend.set_in_layout(False)
        if columns == 1 or legend.get_window_extent().width <= (FILE_WIDTH_INCHES - 2 * _MARGIN_INCHES) * DPI:
            break
        legend.remove()
    return legend


def _measure_height(part: Text | Any) -> float:
    """Return the height of a line of text or of a legend in inches."""
    return float(part.get_window_extent().height) / DPI


def style_axes(axes: Axes, title: str = "", grid: str = "both") -> None:
    """Set the title of a panel, and give the panel the grid and colors that all charts use. ``grid``: the axis whose
    ticks get grid lines.
    """
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color="#dddddd", linewidth=0.8)  # type: ignore[arg-type]
    axes.tick_params(labelsize=SMALL_FONT_POINTS, color="#999999")
    for side in axes.spines.values():
        side.set_color("#999999")
    axes.set_title(
        textwrap.fill(title, int(_MAX_PANEL_TITLES_CHARACTERS * compute_panel_width_share(axes))),
        fontsize=TEXT_FONT_POINTS,
        loc="left",
    )


def compute_panel_width_share(axes: Axes) -> float:
    """Return the width of a panel as a share of the width of an image file."""
    spec, figure = axes.get_subplotspec(), axes.figure
    assert spec is not None, "every panel is a subplot"
    ratios: Any = spec.get_gridspec().get_width_ratios()
    return float(
        sum(ratios[spec.colspan.start : spec.colspan.stop])
        / sum(ratios)
        * figure.bbox.width
        / (FILE_WIDTH_INCHES * DPI)
    )


# -- colors and markers by name: a kernel looks the same in every picture and on every page ----------------------------

#: Colors that color-blind readers can tell apart (Okabe and Ito, extended). The contrast between each color and white
#: is at least 3 to 1.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#b8578f", "#b07c00", "#2c8ec9", "#7b3fa0"),
    *("#8c564b", "#6b6b6b", "#758200", "#aa0022", "#008f8f", "#1b2f7a", "#5a8f00"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "h", ">")
#: Known names of lines and bars, in groups. Names of the same group can appear in one picture. The position of a name
#: in its group decides its color and marker, so that these names look different. The first group (kernels) has more
#: names than there are COLORS. It lists kernels of attention, then of matmuls, then rare ones, so that two kernels in a
#: picture seldom have the same color.
_NAME_GROUPS = (
    (
        *("flash-attn-3", "flash-attn-2", "sdpa-cudnn", "flash-attn-4", "flex", "compiled-eager", "sdpa-flash"),
        *("eager", "sdpa-efficient", "sdpa-math", "sdpa", "torch.mm", "cublaslt", "triton"),
        *("scaled_mm", "gluon", "quack", "compiled", "F.scaled_mm", "int_mm", "tunableop"),
        *("dequantized", "aiter", "sage-2", "sage-1", "fused-sdpa", "torch"),
    ),
    ("burst", "sustained", "classic"),
    tuple(PHASE_NAMES.values()),
    ("forward", "backward", "optimizer step", "forward and backward", "backward and optimizer step"),
    (
        *("matmul", "attention", "elementwise", "normalization", "convolution", "optimizer", "embedding"),
        *("reduction and softmax", "idle", "memory copies", "communication", "unclassified", "other"),
    ),
    tuple(f"device {number}" for number in range(12)),
)
_STYLE_INDEX_BY_NAME = {
    **{name: index for group in _NAME_GROUPS for index, name in enumerate(group)},
    # Names in the charts of ``mamf overlap`` and ``mamf explain``. Rates that are computed from a datasheet are gray.
    "other work": 1,
    "measured": 0,
    "lost since the step before": 1,
    "computed": 8,
}
#: Keyword arguments of matplotlib for the lines of ceilings and of datasheet peaks, which are behind measured lines.
CEILING_LINE_STYLE: Mapping[str, Any] = {"color": "#222222", "linestyle": "-", "linewidth": 1.6, "zorder": 1.8}
PEAK_LINE_STYLE: Mapping[str, Any] = {"color": "#777777", "linestyle": "--", "linewidth": 1.6, "zorder": 1.8}


@dataclass(frozen=True)
class Style:
    """The color and marker of a name in all pictures.

    - ``color``: the color as #rrggbb.
    - ``marker``: a marker of matplotlib; names with the same color have different markers.
    """

    color: str
    marker: str


def choose_styles(names: Iterable[str]) -> dict[str, Style]:
    """Choose a style for each name. Names of well-known kernels, regimes and parts always get the same style.

    The color of any other name comes from a hash of the name. If another name in ``names`` already has this color, use
    the next free color.
    """
    distinct_names = sorted(set(names))
    indices = {name: _STYLE_INDEX_BY_NAME[name] for name in distinct_names if name in _STYLE_INDEX_BY_NAME}
    for name in distinct_names:
        if name not in _STYLE_INDEX_BY_NAME:
            colors = {index % len(COLORS) for index in indices.values()}
            index = zlib.crc32(name.encode()) % len(COLORS)
            while index in indices.values() or (len(colors) < len(COLORS) and index % len(COLORS) in colors):
                index += 1
            indices[name] = index
    return {name: Style(COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]) for name, index in indices.items()}


# -- writing image files -----------------------------------------------------------------------------------------------


def save_figure(figure: Figure, path: Path, overwrite: bool = False) -> None:
    """Write a figure to an image file. The suffix of the file decides the format. Raises UsageError if the file exists
    or cannot be written, and RunLogWriteError if the disk is full. An existing file stays unchanged after an error.
    """
    image, kind = io.BytesIO(), check_image_path(path, overwrite)
    with freeze_layout(figure):
        figure.savefig(image, format=kind)
    (write_file_atomically if overwrite else create_file_atomically)(path, image.getvalue())


@contextmanager
def freeze_layout(figure: Figure) -> Iterator[None]:
    """Compute the layout of a figure once, and keep it within a with-block. Otherwise matplotlib would draw everything
    twice to compute the layout.
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        # The string "none" would set a placeholder engine, for which matplotlib draws everything again.
        figure.set_layout_engine(None)
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


def make_file_exists_error(path: Path) -> UsageError:
    return UsageError(
        f"{path} is a folder: give a file"
        if path.is_dir()
        else f"{path} exists: choose another file, or replace it with --overwrite (in Python, overwrite=True)"
    )


def check_image_path(path: Path, overwrite: bool) -> str:
    """Return the type of an image file from its suffix. Raises UsageError if the suffix is neither .png nor .svg, or if
    the file exists and must not be overwritten. Raises UnavailableError if matplotlib is not installed.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in IMAGE_FILE_TYPES:
        raise UsageError(f"cannot draw {path}: its name must end with .{' or .'.join(IMAGE_FILE_TYPES)}")
    if path.exists() and not overwrite:
        raise make_file_exists_error(path)
    if find_spec("matplotlib") is None:
        raise UnavailableError(NO_MATPLOTLIB_REASON)
    return kind
