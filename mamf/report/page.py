"""Pages as data, and as one html file each: no network, no script but its own, every text escaped.

A page's first screen says what was measured on what, and the answer in large type; sections of blocks and pictures
follow. The templates in mamf/report/templates are the only files that hold markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from mamf.errors import UnavailableError
from mamf.report.charts.picture import (
    COLORS,
    HINTS,
    PAGE_WIDTH,
    DrawnPanel,
    Picture,
    disable_math_text,
    escape_invisible_texts,
    freeze_layout,
    new_figure,
)
from mamf.report.document import Answer, Block, Document, Lines, Table
from mamf.text import escape_invisible, strip_markup

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Fact:
    """An answer in large type: ``value`` with its ``unit``, what it is the figure of, and its interval or share."""

    label: str
    value: str
    unit: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Command:
    """A command that makes the same again."""

    text: str


Part = Block | Picture | Command
_MAX_SECTIONS_WITHOUT_CONTENTS = 3


@dataclass(frozen=True)
class Section:
    """``is_open``: shown at once; others open on a click. One without parts is not shown."""

    heading: str
    parts: Sequence[Part]
    is_open: bool = True


@dataclass(frozen=True)
class Page:
    """``lead``: what was measured on what. ``verdict``: its ``level`` ("good", "bad" or "") decides the color.
    ``links``: to other pages, as (text, address).
    """

    title: str
    lead: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    verdict: str = ""
    level: str = ""
    sections: Sequence[Section] = ()
    links: Sequence[tuple[str, str]] = ()

    @property
    def contents(self) -> list[tuple[int, str]]:
        """The number and the heading of each section, if they are many and some open on a click."""
        shown = [section for section in self.sections if section.parts]
        numbered = [(number, each.heading) for number, each in enumerate(shown, start=1) if each.heading]
        return (
            numbered if len(shown) > _MAX_SECTIONS_WITHOUT_CONTENTS and not all(each.is_open for each in shown) else []
        )


def render_page(page: Page) -> str:
    """Write the page as a whole html file."""
    style, script = _read_template_file("style.css") + _make_color_variables(), _read_template_file("script.js")
    policy = (
        f"default-src 'none'; style-src {_hash_source(style)}; script-src {_hash_source(script)}; base-uri 'none'; "
        "form-action 'none'"
    )
    return _load_template("page.html").render(page=page, style=style, script=script, policy=policy)


def render_fragment(document: Document) -> str:
    """Write the blocks of a report without a page around them, for a notebook."""
    return _load_template("fragment.html").render(blocks=document.visible_blocks)


@functools.cache
def _read_template_file(name: str) -> str:
    return importlib.resources.files("mamf.report").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _make_color_variables() -> str:
    """Define a variable for each color of the palette, lighter on a dark page."""
    light = " ".join(f"--c{number}: {color};" for number, color in enumerate(COLORS))
    dark = " ".join(f"--c{number}: color-mix(in srgb, {color} 60%, white);" for number, color in enumerate(COLORS))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _hash_source(text: str) -> str:
    """Give the source for a Content-Security-Policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _load_template(name: str) -> Template:
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise UnavailableError("pages need jinja2: pip install jinja2") from None
    environment = Environment(
        loader=FunctionLoader(_read_template_file),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_show_invisible,
    )
    environment.globals |= {
        "choose_macro": _choose_macro,
        "make_table_context": _make_table_context,
        "make_picture_context": make_picture_context,
    }
    environment.filters["markup"] = Markup
    environment.filters["address"] = safe_address
    return environment.get_template(name)


def _show_invisible(value: Any) -> Any:
    """Show the invisible characters of texts that are not our markup; the templates escape them."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return escape_invisible(strip_markup(value)) if is_text else value


def _choose_macro(part: Part) -> str:
    """Name the macro that writes a part."""
    kinds = ((Table, "table"), (Answer, "answer"), (Lines, "lines"), (Command, "command"))
    return next((name for kind, name in kinds if isinstance(part, kind)), "figure")


def _make_table_context(table: Table[Any]) -> dict[str, Any]:
    """Prepare a table for the template."""
    columns = table.visible_columns

    def cell(text: str, column: Any) -> dict[str, Any]:
        return {"text": strip_markup(text), "is_left": column.left, "address": getattr(text, "address", "")}

    heads = [cell(column.title, column) for column in columns]
    return {
        "heads": heads,
        "rows": [[cell(column.format_cell(row), column) for column in columns] for row in table.visible_rows],
    }


def safe_address(address: str) -> str:
    """Return an address that runs nothing (https, http or relative), or an empty string for any other."""
    scheme = address.partition(":")[0] if ":" in address.partition("/")[0] else ""
    return address if scheme.lower() in ("", "http", "https") else ""


# -- pictures: matplotlib's SVG with a page's colors, and without what a page's policy forbids -------------------------

# A page allows no style attributes and has a dark mode, so styles become attributes whose colors are variables of its
# style sheet. A bar or a point says its figures in a <title>, which the page's script shows under the pointer.
_SVG_NAMESPACE, _LINK_ATTRIBUTE = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
#: What a page calls the colors of pictures; others stay as they are.
_PAGE_COLORS: Mapping[str, str] = {
    **{color: f"var(--c{number})" for number, color in enumerate(COLORS)},
    **dict.fromkeys(("#000000", "#222222"), "currentColor"),
    **dict.fromkeys(("#555555", "#777777", "#999999"), "var(--faint)"),
    "#dddddd": "var(--line)",
    "#ffffff": "var(--page)",
}
_DECIMAL_NUMBER = re.compile(r"-?\d+\.\d+")
_DROPPED_ELEMENTS = ("metadata", "style", "title")
# The size of a marker in a legend.
_LEGEND_MARKER_SIZE = 9


def make_picture_context(picture: Picture) -> dict[str, Any]:
    """Prepare a picture for the template: SVG elements, and the names of the legend with paint and the outline of their
    marker around (0, 0). Without matplotlib a note says what to install.
    """
    shown = escape_invisible_texts(picture)
    parts: dict[str, Any] = {
        "title": shown.title,
        "subtitle": shown.subtitle,
        "pictures": [],
        "legend": [],
        "notes": shown.notes,
    }
    panels = [panel for row in shown.make_panel_rows() for panel in row if panel]
    try:
        parts["pictures"] = [_draw_svg(panel, f"{shown.title}, {number}") for number, panel in enumerate(panels)]
    except UnavailableError as error:
        return {**parts, "notes": [str(error)]}
    parts["legend"] = [
        {
            "name": name,
            "paint": _choose_paint(style["color"]),
            "outline": _make_marker_path(style.get("marker", "_")),
            "opacity": style.get("alpha", 1.0),
        }
        for name, style in shown.make_legend()
    ]
    return parts


def _draw_svg(panel: DrawnPanel, salt: str) -> str:
    """Draw a panel as SVG. ``salt``: makes its ids differ from those of other pictures on the page."""
    from matplotlib import rc_context

    figure = new_figure(*panel.size)
    figure.set_facecolor("none")
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt}
    with disable_math_text(), rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser has other fonts
        axes = figure.subplots()
        panel.draw(axes)
        axes.set_facecolor("none")
        hints = dict(_assign_hint_ids(figure))
        image = io.BytesIO()
        with freeze_layout(figure):
            figure.savefig(image, format="svg")
    root = fromstring(image.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(_SVG_NAMESPACE) in _DROPPED_ELEMENTS:
                parent.remove(child)
    for element in list(root.iter()):
        _restyle_element(element)
        element.tag = element.tag.removeprefix(_SVG_NAMESPACE)
    for group in root.iter("g"):
        marks = list(group.iter("use")) or list(group.iter("path"))
        for mark, text in zip(marks, hints.get(group.attrib.pop("id", ""), ()), strict=False):
            SubElement(mark, "title").text = text
    is_wide = panel.size[0] > PAGE_WIDTH
    kept = {"viewBox": root.get("viewBox", ""), "width": f"{72 * panel.size[0]:.0f}", "fill": "currentColor"}
    root.attrib.clear()
    root.attrib.update(kept | {"role": "img", "aria-label": panel.described, "class": "wide" if is_wide else "panel"})
    return tostring(root, encoding="unicode")


def _assign_hint_ids(figure: Figure) -> Iterator[tuple[str, Sequence[str]]]:
    """Give an id to all that has hints, and yield both."""
    for number, artist in enumerate(figure.findobj(HINTS.__contains__)):
        artist.set_gid(f"hinted-{number}")
        yield f"hinted-{number}", HINTS[artist]


def _restyle_element(element: Element) -> None:
    """Turn the style into attributes, and links into those of html; round numbers."""
    attributes = element.attrib
    style = attributes.pop("style", "")
    for declaration in filter(None, style.split(";")):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font":  # older versions of matplotlib write all in one
            attributes["font-size"] = value.partition("px")[0].split()[-1]
            attributes["font-weight"] = "bold" if "bold" in value or "700" in value else "normal"
        elif name != "font-family":
            attributes[name] = _choose_paint(value)
    if _LINK_ATTRIBUTE in attributes:
        attributes["href"] = attributes.pop(_LINK_ATTRIBUTE)
    for name, value in attributes.items():
        if name not in ("id", "href", "clip-path"):
            attributes[name] = _DECIMAL_NUMBER.sub(
                lambda number: f"{round(float(number[0]), 2):g}", value.replace("\n", "")
            )


def _choose_paint(color: Any) -> str:
    return _PAGE_COLORS.get(str(color), str(color))


def _make_marker_path(marker: str) -> str:
    """Convert a marker of matplotlib to the data of an SVG path."""
    from matplotlib.markers import MarkerStyle
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2D

    style, letters = MarkerStyle(marker), {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
    path = style.get_path().transformed(
        style.get_transform() + Affine2D().scale(_LEGEND_MARKER_SIZE, -_LEGEND_MARKER_SIZE)
    )
    parts = ((letters.get(code), vertices) for vertices, code in path.iter_segments())
    return "".join(
        letter + " ".join(f"{each:.1f}" for each in vertices) if letter else "z" for letter, vertices in parts
    )
