"""Pictures inside pages: matplotlib's SVG with a page's colors, and without what a page's policy forbids.

A page allows no style attributes and has a dark mode, so styles become attributes whose colors are variables of its
style sheet. A bar or a point says its figures in a <title>, which the page's script shows under the pointer.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from mamf.errors import UnavailableError
from mamf.report.charts.palette import COLORS
from mamf.report.charts.picture import (
    HINTS,
    PAGE_WIDTH,
    DrawnPanel,
    Picture,
    laid_out,
    new_figure,
    texts_as_they_are,
    with_visible_texts,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
#: What a page calls the colors of pictures; others stay as they are.
_PAINTS: Mapping[str, str] = {
    **{color: f"var(--c{number})" for number, color in enumerate(COLORS)},
    **dict.fromkeys(("#000000", "#222222"), "currentColor"),
    **dict.fromkeys(("#555555", "#777777", "#999999"), "var(--faint)"),
    "#dddddd": "var(--line)",
    "#ffffff": "var(--page)",
}
_NUMBER = re.compile(r"-?\d+\.\d+")
_DROPPED = ("metadata", "style", "title")
# Of a marker in a legend.
_SIZE = 9


@dataclass(frozen=True)
class Key:
    """A name in the legend, with its paint and the outline of its marker around (0, 0)."""

    name: str
    paint: str
    outline: str
    opacity: float


@dataclass(frozen=True)
class FigureParts:
    """``pictures``: SVG elements; ``notes`` say why a picture is missing."""

    title: str
    subtitle: str
    pictures: Sequence[str]
    legend: Sequence[Key]
    notes: Sequence[str]


def figure_parts(picture: Picture) -> FigureParts:
    """The parts of a picture, with foreign texts made harmless."""
    shown = with_visible_texts(picture)
    panels = [panel for row in shown.drawn_rows() for panel in row if panel]
    try:
        pictures = [_svg_of(panel, f"{shown.title}, {number}") for number, panel in enumerate(panels)]
    except UnavailableError as error:
        return FigureParts(shown.title, shown.subtitle, [], [], [str(error)])
    legend = [
        Key(name, _paint(style["color"]), _outline(style.get("marker", "_")), style.get("alpha", 1.0))
        for name, style in shown.legend()
    ]
    return FigureParts(shown.title, shown.subtitle, pictures, legend, shown.notes)


def _svg_of(panel: DrawnPanel, salt: str) -> str:
    """``salt``: makes the ids of a page's pictures differ."""
    from matplotlib import rc_context

    figure = new_figure(*panel.size)
    figure.set_facecolor("none")
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt}
    with texts_as_they_are(), rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser has other fonts
        axes = figure.subplots()
        panel.draw(axes)
        axes.set_facecolor("none")
        hints = dict(_name_hinted(figure))
        image = io.BytesIO()
        with laid_out(figure):
            figure.savefig(image, format="svg")
    root = fromstring(image.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(_SVG) in _DROPPED:
                parent.remove(child)
    for element in list(root.iter()):
        _restyle(element)
        element.tag = element.tag.removeprefix(_SVG)
    for group in root.iter("g"):
        marks = list(group.iter("use")) or list(group.iter("path"))
        for mark, text in zip(marks, hints.get(group.attrib.pop("id", ""), ()), strict=False):
            SubElement(mark, "title").text = text
    is_wide = panel.size[0] > PAGE_WIDTH
    kept = {"viewBox": root.get("viewBox", ""), "width": f"{72 * panel.size[0]:.0f}", "fill": "currentColor"}
    root.attrib.clear()
    root.attrib.update(kept | {"role": "img", "aria-label": panel.described, "class": "wide" if is_wide else "panel"})
    return tostring(root, encoding="unicode")


def _name_hinted(figure: Figure) -> Iterator[tuple[str, Sequence[str]]]:
    """Give everything that has hints an id; yield both."""
    for number, artist in enumerate(figure.findobj(HINTS.__contains__)):
        artist.set_gid(f"hinted-{number}")
        yield f"hinted-{number}", HINTS[artist]


def _restyle(element: Element) -> None:
    """Turn the style into attributes, and links into those of html; round numbers."""
    attributes = element.attrib
    style = attributes.pop("style", "")
    for declaration in filter(None, style.split(";")):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font":  # older versions of matplotlib write all in one
            attributes["font-size"] = value.partition("px")[0].split()[-1]
            attributes["font-weight"] = "bold" if "bold" in value or "700" in value else "normal"
        elif name != "font-family":
            attributes[name] = _paint(value)
    if _LINK in attributes:
        attributes["href"] = attributes.pop(_LINK)
    for name, value in attributes.items():
        if name not in ("id", "href", "clip-path"):
            attributes[name] = _NUMBER.sub(lambda number: f"{round(float(number[0]), 2):g}", value.replace("\n", ""))


def _paint(color: Any) -> str:
    return _PAINTS.get(str(color), str(color))


def _outline(marker: str) -> str:
    """A marker of matplotlib as the data of an SVG path."""
    from matplotlib.markers import MarkerStyle
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2D

    style, letters = MarkerStyle(marker), {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
    path = style.get_path().transformed(style.get_transform() + Affine2D().scale(_SIZE, -_SIZE))
    parts = ((letters.get(code), vertices) for vertices, code in path.iter_segments())
    return "".join(
        letter + " ".join(f"{each:.1f}" for each in vertices) if letter else "z" for letter, vertices in parts
    )
