"""Represent web pages as data, and render each page as one HTML file. The file needs no network and runs only its own
script. All texts in the file are escaped.

The top of a page says what was measured on which device, with the answer in large type. Sections with blocks and
pictures follow. All markup is in the templates in mamf/report/templates.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from mamf.errors import UnavailableError
from mamf.report.charts.picture import (
    COLORS,
    PLAIN_TEXT_SETTINGS,
    TOOLTIPS_BY_ARTIST,
    DrawablePanel,
    Picture,
    escape_invisible_texts,
    freeze_layout,
    make_empty_figure,
)
from mamf.report.document import Answer, Block, Document, Lines, Table
from mamf.text import escape_invisible_characters, strip_markup

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Fact:
    """A headline figure in large type.

    - ``label``: what the figure measures.
    - ``value``: the figure as text, without its ``unit``.
    - ``notes``: lines below the figure, such as its interval or its share of the datasheet.
    """

    label: str
    value: str
    unit: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class CopyableCommand:
    """A command line that the page shows for the reader to copy, such as the one that repeats the measurement."""

    text: str


PagePart = Block | Picture | CopyableCommand


@dataclass(frozen=True)
class Section:
    """A section of a page. A page does not show sections without parts. ``is_open``: whether readers see the parts at
    once, or only after a click.
    """

    heading: str
    parts: Sequence[PagePart]
    is_open: bool = True


@dataclass(frozen=True)
class Page:
    """A web page.

    - ``intro_lines``: lines that say what was measured on which device.
    - ``facts``: the headline figures.
    - ``verdict``: the answer in words, if there is one.
    - ``verdict_color``: the color of the verdict: "good", "bad", or "" for neutral.
    - ``links``: links to other pages, as (text, address).
    """

    title: str
    intro_lines: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    verdict: str = ""
    verdict_color: str = ""
    sections: Sequence[Section] = ()
    links: Sequence[tuple[str, str]] = ()


def render_page(page: Page, track_sections: Callable[[list[Section]], Iterable[Section]] = iter) -> str:
    """Return a page as a complete HTML file. ``track_sections``: a function that wraps the iteration over the sections,
    for example to show a progress bar. Drawing the pictures of many sections takes long.
    """
    style, script = _read_template_file("style.css") + _make_color_variables(), _read_template_file("script.js")
    policy = (
        f"default-src 'none'; style-src {_make_csp_hash(style)}; script-src {_make_csp_hash(script)}; base-uri 'none'; "
        "form-action 'none'"
    )
    values = {"page": page, "style": style, "script": script, "policy": policy, "track_sections": track_sections}
    return _load_template("page.html").render(values)


def render_fragment(document: Document) -> str:
    """Return the blocks of a report as HTML for a notebook, without the head and body of a page."""
    return _load_template("fragment.html").render(blocks=document.visible_blocks)


@functools.cache
def _read_template_file(name: str) -> str:
    return importlib.resources.files("mamf.report").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _make_color_variables() -> str:
    """Return CSS that defines a variable for each color of the palette, with a lighter color in dark mode."""
    light = " ".join(f"--c{number}: {color};" for number, color in enumerate(COLORS))
    dark = " ".join(f"--c{number}: color-mix(in srgb, {color} 60%, white);" for number, color in enumerate(COLORS))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _make_csp_hash(text: str) -> str:
    """Return the hash expression that makes a Content-Security-Policy allow the style sheet or script ``text``."""
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
        finalize=_escape_invisible_text,
    )
    environment.globals |= {
        "choose_macro": _choose_macro,
        "make_picture_template_values": make_picture_template_values,
    }
    environment.filters["markup"] = Markup
    environment.filters["address"] = sanitize_address
    return environment.get_template(name)


def _escape_invisible_text(value: Any) -> Any:
    """Escape the invisible characters of a value that a template prints, if the value is a plain string and not markup
    of a template. Jinja then escapes the markup characters in the string.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return escape_invisible_characters(strip_markup(value))


def _choose_macro(part: PagePart) -> str:
    """Return the name of the template macro that renders a part of a section."""
    kinds = ((Table, "table"), (Answer, "answer"), (Lines, "lines"), (CopyableCommand, "command"))
    return next((name for kind, name in kinds if isinstance(part, kind)), "figure")


def sanitize_address(address: str) -> str:
    """Return an address if it is relative or begins with http or https. Return an empty string for any other address,
    which might run a script.
    """
    scheme = address.partition(":")[0] if ":" in address.partition("/")[0] else ""
    return address if scheme.lower() in ("", "http", "https") else ""


# -- turning pictures into SVG elements --------------------------------------------------------------------------------

# The Content-Security-Policy of a page forbids style attributes, and colors depend on dark mode. Therefore this code
# turns the styles of an SVG into plain attributes whose colors are variables of the style sheet. Each bar and point
# gets a <title> with its figures. The script of the page shows this title next to the pointer.
_SVG_NAMESPACE, _LINK_ATTRIBUTE = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
#: CSS value of each color of pictures. Colors that are missing here stay unchanged.
_CSS_VALUE_BY_COLOR: Mapping[str, str] = {
    **{color: f"var(--c{number})" for number, color in enumerate(COLORS)},
    **dict.fromkeys(("#000000", "#222222"), "currentColor"),
    **dict.fromkeys(("#555555", "#777777", "#999999"), "var(--faint)"),
    "#dddddd": "var(--line)",
    "#ffffff": "var(--page)",
}
_DECIMAL_NUMBER = re.compile(r"-?\d+\.\d+")
_DROPPED_SVG_ELEMENTS = ("metadata", "style", "title")
# Width of a marker in a legend, in units of its SVG.
_LEGEND_MARKER_SIZE = 9


def make_picture_template_values(picture: Picture) -> dict[str, Any]:
    """Return the values for the template of a picture: its title and notes, an SVG for each panel, and the color and
    marker outline of each name in the legend. If matplotlib is not installed, return a note that says so instead of the
    SVGs.
    """
    shown = escape_invisible_texts(picture)
    texts = {"title": shown.title, "subtitle": shown.subtitle}
    panels = [panel for row in shown.make_panel_rows() for panel in row if panel]
    try:
        pictures = [_draw_svg(panel, f"{shown.title}, {number}") for number, panel in enumerate(panels)]
    except UnavailableError as error:
        return {**texts, "pictures": [], "legend": [], "notes": [str(error)]}
    legend = [
        {
            "name": name,
            "paint": _choose_css_color(style["color"]),
            "outline": _make_marker_path(style.get("marker", "_")),
            "opacity": style.get("alpha", 1.0),
        }
        for name, style in shown.make_legend()
    ]
    return {**texts, "pictures": pictures, "legend": legend, "notes": shown.all_notes}


def _draw_svg(panel: DrawablePanel, id_salt: str) -> str:
    """Draw a panel as an SVG element. ``id_salt``: a string that makes the ids in this SVG differ from those of other
    pictures on the page.
    """
    # Make the figure before other imports of matplotlib, because this checks that matplotlib is installed.
    figure = make_empty_figure(*panel.size_inches)
    from matplotlib import rc_context

    figure.set_facecolor("none")
    settings = {"svg.fonttype": "none", "svg.hashsalt": id_salt, **PLAIN_TEXT_SETTINGS}
    with rc_context(settings), warnings.catch_warnings():
        # Ignore warnings of characters that matplotlib's font lacks, because the browser has other fonts.
        warnings.filterwarnings("ignore", "Glyph")
        axes = figure.subplots()
        (panel.draw_on_page or panel.draw)(axes)
        axes.set_facecolor("none")
        tooltips_by_id = dict(_assign_tooltip_ids(figure))
        image = io.BytesIO()
        with freeze_layout(figure):
            figure.savefig(image, format="svg")
    root = fromstring(image.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(_SVG_NAMESPACE) in _DROPPED_SVG_ELEMENTS:
                parent.remove(child)
    for element in list(root.iter()):
        _restyle_element(element)
        element.tag = element.tag.removeprefix(_SVG_NAMESPACE)
    for group in root.iter("g"):
        drawn = list(group.iter("use")) or list(group.iter("path"))
        for element, text in zip(drawn, tooltips_by_id.get(group.attrib.pop("id", ""), ()), strict=False):
            SubElement(element, "title").text = text
    attributes = {
        "viewBox": root.get("viewBox", ""),
        "width": f"{72 * panel.size_inches[0]:.0f}",
        "fill": "currentColor",
    }
    root.attrib.clear()
    root.attrib.update(attributes | {"role": "img", "aria-label": panel.description, "class": "panel"})
    return tostring(root, encoding="unicode")


def _assign_tooltip_ids(figure: Figure) -> Iterator[tuple[str, Sequence[str]]]:
    """Give an id to each drawn bar and line that has tooltips, and yield the id with the tooltips."""
    # Figure.findobj would also visit the axes' ticks, which takes long because matplotlib first has to make them.
    drawn = [artist for axes in figure.axes for artist in axes.get_children() if artist in TOOLTIPS_BY_ARTIST]
    for number, artist in enumerate(drawn):
        artist.set_gid(f"hinted-{number}")
        yield f"hinted-{number}", TOOLTIPS_BY_ARTIST[artist]


def _restyle_element(element: Element) -> None:
    """Turn the style of an SVG element into attributes, replace its xlink:href by href, and round its numbers to two
    decimals.
    """
    attributes = element.attrib
    style = attributes.pop("style", "")
    for declaration in filter(None, style.split(";")):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        # Older versions of matplotlib write one "font" declaration that contains both the size and the weight.
        if name == "font":
            attributes["font-size"] = value.partition("px")[0].split()[-1]
            attributes["font-weight"] = "bold" if "bold" in value or "700" in value else "normal"
        elif name != "font-family":
            attributes[name] = _choose_css_color(value)
    if _LINK_ATTRIBUTE in attributes:
        attributes["href"] = attributes.pop(_LINK_ATTRIBUTE)
    for name, value in attributes.items():
        if name not in ("id", "href", "clip-path"):
            attributes[name] = _DECIMAL_NUMBER.sub(
                lambda number: f"{round(float(number[0]), 2):g}", value.replace("\n", "")
            )


def _choose_css_color(color: Any) -> str:
    return _CSS_VALUE_BY_COLOR.get(str(color), str(color))


def _make_marker_path(marker: str) -> str:
    """Convert a marker of matplotlib, which is drawn around (0, 0), to the data of an SVG path."""
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
