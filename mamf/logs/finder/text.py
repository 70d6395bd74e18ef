"""Decodes a log and removes the residue of terminals, mail and crashes, and what consoles add: line prefixes, lines of
other tasks, and line breaks from wrapping.
"""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Iterator

from mamf.errors import RunLogError
from mamf.logs.lines import Seen

#: Of a log, unpacked: a million rows.
MOST_BYTES = 128 << 20
#: Longer lines are of other programs, and left out.
LONGEST_LINE = 4000
_LONGER_LINE = re.compile(rf"[^\n]{{{LONGEST_LINE + 1},}}")
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
# A redirect of PowerShell writes UTF-16.
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# An erased line has ended. Titles of windows, colours and character sets are nothing.
_ERASE = re.compile(r"\x1b\[[0-9;?]*[A-K]")
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[PX^_][^\x1b\n]*(?:\x1b\\)?|[ -/]*[0-~])"
)
_WITH_BACKSPACE = re.compile(r"[^\n]*\x08[^\n]*")
_CONTROLS = "".join(map(chr, (*range(0x01, 0x08), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0))))
# What an issue or a README adds: escapes, fences, and the mark of a quotation.
_MARKDOWN_ESCAPE = re.compile(r"\\([*_|~])")
_FENCE = re.compile(r"\n[ \t]*```[^\n]*")
_QUOTATION = re.compile(r"\n(?:> ?)+")
_ECHO = re.compile(r"\n(?:\^C)+")
# The ends of a line behind which nothing is missing that would change what it says.
_WHOLE_END = re.compile(r"(?:\)|TFLOPS\w*|\(MxNxK\).*(?:W|MHz|\dC)|\d:\d\d:\d\d|Best is trial.*)$")
# And the beginnings before which nothing is.
_WHOLE_BEGINNING = re.compile(r"\s|\*\* |Benchmark |Tried |The best |Elapsed |$")
_HOLE = re.compile(r"\0+")
_BLOCK = 1 << 16


def decode(content: bytes) -> str:
    """The text of a file, unpacked. Raises RunLogError for a packed one that is damaged from its beginning, and for
    more than MOST_BYTES.
    """
    if content.startswith(_GZIP):
        content = _unpacked(content)
    if len(content) > MOST_BYTES:
        raise RunLogError(f"has more than {MOST_BYTES >> 20} MiB: no log of mamf-finder is that long")
    if content.startswith(_UTF16):
        return content.decode("utf-16", errors="replace")
    return content.decode("utf-8-sig", errors="replace")


def _unpacked(content: bytes) -> bytes:
    """What a cut archive still holds is kept; of a long one, no more than is refused."""
    found, packed, member = bytearray(), io.BytesIO(content), zlib.decompressobj(_GZIP_WINDOW)
    # In small pieces: what follows a member is copied once per member.
    while (piece := member.unused_data or packed.read(4096)) and len(found) <= MOST_BYTES:
        if member.eof and piece[0] != _GZIP[0]:
            break
        member = zlib.decompressobj(_GZIP_WINDOW) if member.eof else member
        try:
            found += member.decompress(piece, MOST_BYTES + 1 - len(found))
        except zlib.error as error:
            raise RunLogError(f"cannot be unpacked ({error}): give the log itself") from None
    return bytes(found)


def clean(text: str) -> str:
    """The text without what terminals, mail and markdown add. A carriage return ends a line, as rows end in one.

    A line that breaks off, at the end or at a hole that a crash left in the file, is left out where more may have
    followed: half a number is a wrong number. The text begins with a line's end.
    """
    text = f"\n{text}"
    if "\x1b" in text:
        text = _ESCAPE.sub("", _ERASE.sub("\n", text))
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\x08" in text:
        text = _WITH_BACKSPACE.sub(_apply_backspaces, text)
    text = _remove_holes(text)
    if any(control in text for control in _CONTROLS):
        text = text.translate(dict.fromkeys(map(ord, _CONTROLS)))
    return _LONGER_LINE.sub("", text)


def unquote(text: str) -> str:
    """Remove quotation marks and markdown from a cleaned text."""
    for mark, pattern, substitute in (
        ("\n>", _QUOTATION, "\n"),
        ("\n^C", _ECHO, "\n"),
        ("```", _FENCE, ""),
        ("\\", _MARKDOWN_ESCAPE, r"\1"),
    ):
        if mark in text:
            text = pattern.sub(substitute, text)
    return text


def _apply_backspaces(line: re.Match[str]) -> str:
    """The visible text of a line with backspaces."""
    shown: list[str] = []
    for character in line[0]:
        if character != "\x08":
            shown.append(character)
        elif shown:
            shown.pop()
    return "".join(shown)


def _remove_holes(text: str) -> str:
    pieces = _HOLE.split(text) if "\0" in text else [text]
    pieces[1:] = [piece if _WHOLE_BEGINNING.match(piece) else piece.partition("\n")[2] for piece in pieces[1:]]
    return "\n".join(map(_remove_broken_end, pieces))


def _remove_broken_end(text: str) -> str:
    before, _, last = text.rpartition("\n")
    return before if last.strip() and not _WHOLE_END.search(last.rstrip()) else text


def lines_of(text: str, seen: Seen) -> Iterator[str]:
    """Lines that are not blank, without trailing blanks; ``seen`` is called for every block."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _BLOCK)
        end = len(text) if end < 0 else end
        for line in text[start:end].split("\n"):
            if line := line.rstrip():
                yield line
        seen(end - start)
        start = end + 1


# -- what consoles add -------------------------------------------------------------------------------------------------


# Line beginnings of a log: the text before the first one found is the prefix of every line.
_LANDMARKS = (
    "Benchmark started on ",
    "** Command line:",
    "** Dtype:",
    "** Platform/Device info:",
    "** Node results (",
    "The best outcome was ",
    "Tried ",
)
_FOLLOWING = 30
_MOST_OF = 0.8
_LONGEST_PREFIX = 80
_NUMBER = re.compile(r"\d+")
# A line that is longer than any terminal is wide, and its whole end.
_LONG_LINES = ("Properties(", "| best:")
_LONG_LINE_END = re.compile(r"(?:[)@]|TFLOPS\w*|MHz|\dW|SUSPECT|\^C)\s*$")
_AROUND = 40
_TAIL = re.compile(r"\s*\| best:")
# Lines that never continue the line before.
_OWN = re.compile(
    r"\s*(?:\*\* |- |-{20}|\d+ \||(?:\d+|k)\s+\d+x|\[\w+\] |Trial |Tried |The best |(?:mean|median|max):|"
    r"(?:MAMF|MSMF|Elapsed|Legend|geomean|Across|arithmetic|geometric|Warming|accelerator|Benchmark|telemetry)\b|"
    r"\w*Properties\(|(?:torch|cuda|hip|hpu|xpu|mps|PYTORCH\w*)=)|\s{2,}\d+x\d+x\d+\s"
)


def split_streams(text: str) -> list[str]:
    """The texts of the tasks that a launcher labelled (``0: `` of srun), in the order of their first lines; one text
    where there are no labels. No line of them has a prefix.
    """
    prefix = _prefix_of(text)
    if prefix is None:
        return [text]
    labels: dict[str, list[str]] = {}
    is_label = prefix.pattern.count(r"\d+") == 1
    for line in text.split("\n"):
        found = prefix.match(line)
        label = _NUMBER.findall(found[0])[-1] if found and is_label else ""
        labels.setdefault(label, []).append(line[found.end() :] if found else line)
    return [rest for lines in labels.values() for rest in split_streams("\n" + "\n".join(lines))]


def _prefix_of(text: str) -> re.Pattern[str] | None:
    """The common prefix of the lines, with any number in it generalized; None without a prefix."""
    for landmark in _LANDMARKS:
        at = text.find(landmark)
        if at >= 0:
            start = text.rfind("\n", 0, at) + 1
            break
    else:
        return None
    before = text[start:at].strip()
    if not before or len(before) > _LONGEST_PREFIX:
        return None
    pattern = re.compile(r"\s*" + _NUMBER.sub(r"\\d+", re.escape(before)) + " ?")
    lines = [line for line in text[at : at + _FOLLOWING * 200].split("\n")[1:-1] if line.strip()][:_FOLLOWING]
    return pattern if lines and sum(map(bool, map(pattern.match, lines))) >= _MOST_OF * len(lines) else None


def unwrap_lines(text: str) -> str:
    """The text with lines joined that a narrow terminal had wrapped; unchanged if no line shows wrapping."""
    width = _width_of(text)
    if width is None:
        return text
    joined: list[str] = []
    space = width
    for line in text.split("\n"):
        # A blank may have stood at the break, and in the middle of a row many.
        continues = space < width if _TAIL.match(line) else space <= 1 and line.strip() and not _OWN.match(line)
        if continues and len(joined[-1]) < LONGEST_LINE:
            joined[-1] += " " * space + line
        else:
            joined.append(line)
        space = width - len(line) if len(line) <= width else width
    return "\n".join(joined)


def _width_of(text: str) -> int | None:
    """The width at which lines break off, from the first line that none of the versions printed so short."""
    for mark in _LONG_LINES:
        at = text.find(mark)
        if at < 0:
            continue
        start = text.rfind("\n", 0, at) + 1
        lines = text[start:].split("\n", _AROUND)[:_AROUND]
        width = max(map(len, lines))
        breaks = len(lines) > 1 and not _LONG_LINE_END.search(lines[0]) and not _OWN.match(lines[1])
        if breaks and lines[1].strip() and len(lines[0]) >= width - 1:
            return width
    return None
