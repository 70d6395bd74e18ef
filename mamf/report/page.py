"""Pages as data, and as one html file each: no network, no script but its own, every text escaped.

A page's first screen says what was measured on what, and the answer in large type; sections of blocks and pictures
follow. The templates in mamf/report/templates are the only files that hold markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mamf.errors import UnavailableError
from mamf.report.charts.inline import figure_parts
from mamf.report.charts.palette import COLORS
from mamf.report.charts.picture import Picture
from mamf.report.document import Answer, Block, Document, Lines, Table
from mamf.text import visible, without_markup

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Fact:
    """An answer in large type: ``value`` with its ``unit``, what it is the figure of, and its interval or share."""

    label: str
    value: str
    unit: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Command:
    """What one types to get this again."""

    text: str


Part = Block | Picture | Command


@dataclass(frozen=True)
class Section:
    """``is_open``: shown at once; others open on a click."""

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


def page_of(document: Document) -> Page:
    """A report that has no pictures."""
    return Page(document.title, sections=[Section("", document.visible_blocks)])


def render_page(page: Page) -> str:
    """The page as a whole html file."""
    style, script = _file("style.css") + _colors(), _file("script.js")
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; base-uri 'none'; "
        "form-action 'none'"
    )
    return _render("page.html", page=page, style=_as_markup(style), script=_as_markup(script), policy=policy)


def render_blocks(blocks: Sequence[Block]) -> str:
    """Blocks without a page around them, for a notebook."""
    return _render("fragment.html", blocks=blocks)


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def _as_markup(text: str) -> str:
    from markupsafe import Markup

    return Markup(text)


@functools.cache
def _file(name: str) -> str:
    return importlib.resources.files("mamf.report").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _colors() -> str:
    """A variable for each color of the palette, lighter on a dark page."""
    light = " ".join(f"--c{number}: {color};" for number, color in enumerate(COLORS))
    dark = " ".join(f"--c{number}: color-mix(in srgb, {color} 60%, white);" for number, color in enumerate(COLORS))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _source(text: str) -> str:
    """A source of a Content-Security-Policy: this text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _environment() -> Environment:
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ImportError:
        raise UnavailableError("pages need jinja2: pip install jinja2") from None
    environment = Environment(
        loader=FunctionLoader(_file),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.globals |= {"kind_of": _kind_of, "table_parts": _table_parts, "figure_parts": figure_parts}
    environment.filters["markup"] = _as_markup
    environment.filters["address"] = safe_address
    return environment


def _harmless(value: Any) -> Any:
    """What is no markup of ours, as text with invisible characters shown; the templates escape it."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return visible(without_markup(value)) if is_text else value


def _kind_of(part: Part) -> str:
    """The name of the macro that writes a part."""
    kinds = ((Table, "table"), (Answer, "answer"), (Lines, "lines"), (Command, "command"))
    return next((name for kind, name in kinds if isinstance(part, kind)), "figure")


@dataclass(frozen=True)
class _Cell:
    text: str
    is_left: bool
    address: str


def _table_parts(table: Table[Any]) -> dict[str, Any]:
    columns = table.top_columns

    def cell(column: Any, row: Any) -> _Cell:
        text = column.cell(row)
        return _Cell(without_markup(text), column.left, getattr(text, "address", ""))

    heads = [_Cell(column.title, column.left, "") for column in columns]
    return {"heads": heads, "rows": [[cell(column, row) for column in columns] for row in table.top_rows]}


def safe_address(address: str) -> str:
    """An address that runs nothing: https, http, or a place beside the page; empty for any other."""
    scheme = address.partition(":")[0] if ":" in address.partition("/")[0] else ""
    return address if scheme.lower() in ("", "http", "https") else ""
