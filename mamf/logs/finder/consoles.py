"""Removes what consoles add to a log: line prefixes, lines of other tasks, and line breaks from wrapping."""

from __future__ import annotations

import re

from mamf.logs.finder.text import LONGEST_LINE

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
