"""Escape untrusted text from logs and devices, with one function per output format.

A log can come from a stranger. Its text must not control a terminal, run as a formula in a spreadsheet or act as
markup. Ordinary text stays unchanged.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata

_NON_PRINTABLE_ASCII = re.compile(r"[^ -~]")
#: The Unicode categories of characters that a reader cannot see: control and format characters, lone surrogates, and
#: separators of lines and paragraphs.
_INVISIBLE_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}

#: Matches the beginning of a cell that a spreadsheet runs as a formula, by OWASP's rule against CSV injection.
#: The pattern includes the full-width forms of =, +, - and @.
_FORMULA_START = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)

#: Matches what GitHub's markdown treats as markup anywhere in a line. It does not match plain web addresses.
_INLINE_MARKUP = re.compile(
    r"[\\`|~$]"  # escape, code, table cell, strike-through or formula
    r"|\*(?=\S)"  # emphasis; its closing asterisk needs no escape if the opening one is escaped
    r"|(?<![^\W_])_+|_+(?![^\W_])"  # an underscore within a word is not markup
    r"|!(?=\[)|\[(?=\^)|\](?=[(\[])"  # image, footnote or link
)
_HTML_ENTITY_START = re.compile(r"&(?=#?\w+;)")
#: Matches what ``strip_markup`` removes from markdown: links, escapes, and the marks of code and bold text.
_LINK_ESCAPE_OR_EMPHASIS = re.compile(r"\[([^\]]*)\]\([^)]*\)|\\(.)|`|\*\*")
#: Matches the beginning of a line that starts a heading, quotation, list, rule or link definition in markdown.
_MARKDOWN_BLOCK_START = re.compile(r"\A\s*(?:\d+(?=[.)](?:\s|\Z))|(?=[#>+=*\[:-]))")


class Markup(str):
    """A text that mamf wrote as markdown on purpose. The functions of this module do not escape it."""


class Link(str):
    """A text that a page shows as a link. ``address``: an http or https address, or a path relative to the page."""

    address: str

    def __new__(cls, text: str, address: str) -> Link:
        link = super().__new__(cls, text)
        link.address = address
        return link


def strip_markup(text: str) -> str:
    """Remove links, escapes and emphasis from a text of the class Markup. Return any other text unchanged."""
    return (
        _LINK_ESCAPE_OR_EMPHASIS.sub(lambda match: match[1] or match[2] or "", text)
        if isinstance(text, Markup)
        else text
    )


def escape_invisible_characters(text: str) -> str:
    """Escape invisible characters in a text: the Escape character as ``\\x1b``, a line end as ``\\n``. The result is
    one line.
    """
    return _NON_PRINTABLE_ASCII.sub(
        lambda match: (
            match[0].encode("unicode_escape").decode()
            if unicodedata.category(match[0]) in _INVISIBLE_CATEGORIES
            else match[0]
        ),
        text,
    )


_MIN_WRAP_COLUMNS = 8


def wrap_line(line: str, width: int | None, indent: int = 4) -> str:
    """Break a line at blanks if it has more than ``width`` characters, and indent all lines after the first.

    Return the line unchanged if ``width`` is None. ``indent``: the number of blanks.
    """
    if width is None or len(line) <= width:
        return line
    indentation = line[: len(line) - len(line.lstrip())]
    wrapped = textwrap.wrap(
        line.strip(),
        max(width - len(indentation), _MIN_WRAP_COLUMNS),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(indentation + part for part in wrapped)


def convert_to_csv_cell(value: object) -> object:
    """Convert a value for csv.writer. A number stays unchanged; a text gets an apostrophe in front if a spreadsheet
    would run the text as a formula.
    """
    if value is None or isinstance(value, (int, float)):
        return value
    text = escape_invisible_characters(str(value))
    return f"'{text}" if _FORMULA_START.match(text) and not _PLAIN_NUMBER.fullmatch(text) else text


def escape_markdown(text: str) -> str:
    """Escape a text so that markdown shows it literally within a line, such as in a table cell or in a heading."""
    if isinstance(text, Markup):
        return text
    escaped = _INLINE_MARKUP.sub(
        lambda match: "".join(f"\\{character}" for character in match[0]), escape_invisible_characters(text)
    )
    return _HTML_ENTITY_START.sub("&amp;", escaped).replace("<", "&lt;")


def escape_markdown_line(text: str) -> str:
    """Escape a text so that markdown shows it literally as a whole line, and does not read it as a heading, a list item
    or another block.
    """
    return (
        text
        if isinstance(text, Markup)
        else _MARKDOWN_BLOCK_START.sub(lambda match: f"{match[0]}\\", escape_markdown(text))
    )
