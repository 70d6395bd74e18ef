"""Escapes untrusted text from logs and devices, with one function per output format.

A log can come from anyone. Its text must not control a terminal, run as a formula in a spreadsheet or act as markup.
Ordinary text stays unchanged.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata

_NON_PRINTABLE_ASCII = re.compile(r"[^ -~]")
# Control characters, invisible or direction-changing characters, lone surrogates, line separators.
_INVISIBLE_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}

# OWASP's rule against CSV injection, including full-width signs.
_FORMULA_START = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)

# GitHub markup at any position. Plain addresses stay as they are.
_INLINE_MARKUP = re.compile(
    r"[\\`|~$]"  # escape, code, cell, strike-through, formula
    r"|\*(?=\S)"  # emphasis that is not opened needs no escape at its end
    r"|(?<![^\W_])_+|_+(?![^\W_])"  # an underscore within a word is not markup
    r"|!(?=\[)|\[(?=\^)|\](?=[(\[])"  # image, footnote, link
)
_HTML_ENTITY_START = re.compile(r"&(?=#?\w+;)")
# A heading, quotation, list, rule or link definition.
_LINK_ESCAPE_OR_EMPHASIS = re.compile(r"\[([^\]]*)\]\([^)]*\)|\\(.)|`|\*\*")
_MARKDOWN_BLOCK_START = re.compile(r"\A\s*(?:\d+(?=[.)](?:\s|\Z))|(?=[#>+=*\[:-]))")


class Markup(str):
    """Text that is markup on purpose: it is not escaped in markdown."""


class Link(str):
    """Text that links to ``address``: an http or https address, or a path relative to the page."""

    address: str

    def __new__(cls, text: str, address: str) -> Link:
        made = super().__new__(cls, text)
        made.address = address
        return made


def strip_markup(text: str) -> str:
    """Remove links, escapes and emphasis from Markup. Other text is returned unchanged."""
    return (
        _LINK_ESCAPE_OR_EMPHASIS.sub(lambda found: found[1] or found[2] or "", text)
        if isinstance(text, Markup)
        else text
    )


def escape_invisible_characters(text: str) -> str:
    """Escape invisible characters in a text, which makes it one line: Escape as ``\\x1b``, a line end as ``\\n``."""
    return _NON_PRINTABLE_ASCII.sub(_escape_match_if_invisible, text)


def escape_invisible_characters_in_lines(text: str) -> str:
    """Escape the invisible characters in a text of several lines, except line ends."""
    return "\n".join(map(escape_invisible_characters, text.split("\n")))


_MIN_WRAP_COLUMNS = 8


def wrap_line(line: str, width: int | None, indent: int = 4) -> str:
    """Break a line at blanks if it is longer than ``width``, and indent the lines after the first."""
    if width is None or len(line) <= width:
        return line
    indentation = line[: len(line) - len(line.lstrip())]
    parts = textwrap.wrap(
        line.strip(),
        max(width - len(indentation), _MIN_WRAP_COLUMNS),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(indentation + part for part in parts)


def _escape_match_if_invisible(match: re.Match[str]) -> str:
    character = match[0]
    is_invisible = unicodedata.category(character) in _INVISIBLE_CATEGORIES
    return character.encode("unicode_escape").decode() if is_invisible else character


def convert_to_csv_cell(value: object) -> object:
    """Convert a value for csv.writer: numbers unchanged, an apostrophe in front of text that looks like a formula."""
    if value is None or isinstance(value, (int, float)):
        return value
    text = escape_invisible_characters(str(value))
    return f"'{text}" if _FORMULA_START.match(text) and not _PLAIN_NUMBER.fullmatch(text) else text


def escape_markdown(text: str) -> str:
    """Escape a text for use within a line of markdown, such as a cell or part of a heading."""
    if isinstance(text, Markup):
        return text
    escaped = _INLINE_MARKUP.sub(
        lambda found: "".join(f"\\{each}" for each in found[0]), escape_invisible_characters(text)
    )
    return _HTML_ENTITY_START.sub("&amp;", escaped).replace("<", "&lt;")


def escape_markdown_line(text: str) -> str:
    """Escape a text for use as a whole line of markdown, so that it starts no heading, list or other block."""
    return (
        text
        if isinstance(text, Markup)
        else _MARKDOWN_BLOCK_START.sub(lambda found: f"{found[0]}\\", escape_markdown(text))
    )
