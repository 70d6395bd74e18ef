"""Foreign text, as a log or a device gives it, made harmless where it is shown: one rendering for each format.

A log comes from anybody. In a terminal its text moves no cursor, in a spreadsheet it computes nothing, in markdown it
is no markup. What is seen of honest text is the text itself.
"""

from __future__ import annotations

import re
import unicodedata

_NOT_PLAIN = re.compile(r"[^ -~]")
# Control characters, what is invisible or turns the direction of writing, lone surrogates, separators of lines.
_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}

# By OWASP's rule against CSV injection, full-width signs too.
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)

# What would be markup of GitHub's wherever it stands. An address that hides behind no text stays.
_INLINE = re.compile(
    r"[\\`|~$]"  # escape, code, cell, strike-through, formula
    r"|\*(?=\S)"  # what opens no emphasis closes none
    r"|(?<![^\W_])_+|_+(?![^\W_])"  # inside of a word it is none
    r"|!(?=\[)|\[(?=\^)|\](?=[(\[])"  # picture, footnote, link
)
_ENTITY = re.compile(r"&(?=#?\w+;)")
# A heading, quotation, list, rule, definition of a link.
_BEGINS_BLOCK = re.compile(r"\A\s*(?:\d+(?=[.)](?:\s|\Z))|(?=[#>+=*\[:-]))")


class Markup(str):
    """Text of our own that is markup on purpose: markdown holds it as it is."""


def visible(text: str) -> str:
    """One line in which everything is seen: ``\\x1b`` for an escape, ``\\n`` for the end of a line."""
    return _NOT_PLAIN.sub(_escaped_if_unseen, text)


def visible_lines(text: str) -> str:
    """The same for a text of several lines, which stay."""
    return "\n".join(map(visible, text.split("\n")))


def _escaped_if_unseen(found: re.Match[str]) -> str:
    character = found[0]
    is_unseen = unicodedata.category(character) in _UNSEEN
    return character.encode("unicode_escape").decode() if is_unseen else character


def csv_cell(value: object) -> object:
    """A value for csv.writer: numbers as they are, text that a spreadsheet would compute behind an apostrophe."""
    if value is None or isinstance(value, (int, float)):
        return value
    text = visible(str(value))
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def markdown_text(text: str) -> str:
    """``text`` inside a line of markdown: a cell, a part of a heading."""
    if isinstance(text, Markup):
        return text
    escaped = _INLINE.sub(lambda found: "".join(f"\\{each}" for each in found[0]), visible(text))
    return _ENTITY.sub("&amp;", escaped).replace("<", "&lt;")


def markdown_line(text: str) -> str:
    """``text`` as a whole line of markdown, which begins no block."""
    if isinstance(text, Markup):
        return text
    return _BEGINS_BLOCK.sub(lambda found: f"{found[0]}\\", markdown_text(text))
