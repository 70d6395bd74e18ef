"""What all pictures share: the parts around their panels (title, legend and notes), panels of pages, hints of points.

The size of title, legend and notes is measured and the panels get the remaining space, so nothing overlaps.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

DPI = 100
WIDTH = 16.0  # inches: 1600 pixels, which GitHub shows at about 60 %
PAGE_WIDTH = 6.4  # of a panel on a page, in inches: narrow enough for a phone
_GAP = 0.12  # inches between the parts of the figure
_MARGIN = 0.2
_TITLE, _SUBTITLE, TEXT, SMALL = 20, 14, 14, 12  # points
GREY = "#555555"
# Characters that fit the width at these sizes.
_TITLE_LENGTH, _SUBTITLE_LENGTH, _NOTE_LENGTH = 90, 145, 170
_MOST_COLUMNS = 8
# Characters of labels that fit a horizontal axis as wide as a file.
_AXIS_LETTERS = 140
#: Entries of a legend: what they say, and how the line beside it is drawn.
Named = list[tuple[str, dict[str, Any]]]
#: What pages show while the pointer is on a bar, or on the points of a line: by what is drawn, a text for each.
HINTS: WeakKeyDictionary[Artist, Sequence[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class PagePanel:
    """A panel that a page shows as a separate picture. ``described``: for a screen reader; ``size``: on a page, in
    inches; ``share``: of the width of a file that has all panels side by side.
    """

    described: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = (PAGE_WIDTH, 3.8)
    share: float = 1.0


class Described(Protocol):
    """What every picture says beside its panels."""

    @property
    def title(self) -> str: ...
    @property
    def subtitle(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


def arrange(figure: Figure, picture: Described, panels: float, named: Named) -> None:
    """Title above, legend and notes below, each as high as it is; ``panels``: inches for what is drawn."""
    notes = "\n".join(textwrap.fill(note, _NOTE_LENGTH) for note in picture.notes)
    texts = [
        figure.text(0, 0, textwrap.fill(picture.title, _TITLE_LENGTH), fontsize=_TITLE, weight="bold", va="top"),
        figure.text(0, 0, textwrap.fill(picture.subtitle, _SUBTITLE_LENGTH), fontsize=_SUBTITLE, color=GREY, va="top"),
    ]
    note = figure.text(0, 0, notes, fontsize=SMALL, color=GREY, va="bottom", linespacing=1.35)
    for text in (*texts, note):
        text.set_in_layout(False)
    legend = _legend(figure, named) if named else None
    above = 2 * _GAP + sum(_height(text) + _GAP for text in texts)
    foot = _GAP + (_height(note) + _GAP if notes else 0)
    below = foot + (_height(legend) + _GAP if legend else 0)
    height = above + panels + below
    figure.set_size_inches(WIDTH, height)
    top = height - _GAP
    for text in texts:
        text.set_position((_MARGIN / WIDTH, top / height))
        top -= _height(text) + _GAP
    note.set_position((_MARGIN / WIDTH, _GAP / height))
    if legend:
        legend.set_bbox_to_anchor((0.5, foot / height))
    engine = figure.get_layout_engine()
    assert engine is not None, "asked for when the figure was made"
    engine.set(rect=(0.005, below / height, 0.99, 1 - (above + below) / height), wspace=0.02, hspace=0.03)  # type: ignore[call-arg]


def _legend(figure: Figure, named: Named) -> Any:
    """The names in as many columns as fit."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **style) for _, style in named]
    labels = [name for name, _ in named]
    for columns in range(min(len(labels), _MOST_COLUMNS), 0, -1):
        legend = figure.legend(
            handles, labels, loc="lower center", ncols=columns, fontsize=TEXT, frameon=False, borderpad=0
        )
        legend.set_in_layout(False)
        if columns == 1 or legend.get_window_extent().width <= (WIDTH - 2 * _MARGIN) * DPI:
            break
        legend.remove()
    return legend


def _height(part: Text | Any) -> float:
    """Inches."""
    return float(part.get_window_extent().height) / DPI


def width_share(axes: Axes) -> float:
    """How much of a file's width the axes have."""
    spec, figure = axes.get_subplotspec(), axes.figure
    assert spec is not None, "every panel is a subplot"
    ratios: Any = spec.get_gridspec().get_width_ratios()
    return float(sum(ratios[spec.colspan.start : spec.colspan.stop]) / sum(ratios) * figure.bbox.width / (WIDTH * DPI))


def spaced_labels(axes: Axes, ticks: Sequence[tuple[float, str]], is_log: bool) -> list[str]:
    """The labels of a horizontal axis; those that would touch the one before are empty."""
    places = [math.log(place) if is_log else place for place, _ in ticks]
    letter = (places[-1] - places[0]) / (_AXIS_LETTERS * width_share(axes))
    labels, end = [], -math.inf
    for place, (_, text) in zip(places, ticks, strict=True):
        half = letter * (len(text) + 1) / 2
        labels.append(text if place - half >= end else "")
        end = place + half if labels[-1] else end
    return labels
