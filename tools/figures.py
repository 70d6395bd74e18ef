"""Write figures from run logs into README.md and docs/, and check that they are up to date.

    python tools/figures.py                     # rewrite all generated tables and figures
    python tools/figures.py --check [PAGE...]   # print each stale or unexplained figure; exit code 1 if there are any

CONTRIBUTING.md explains how to mark tables and figures in a page, and how to explain a figure that does not come from
a log. The tool also generates the whole page docs/autoprofile-h200/SUMMARY.md, from the logs in its folder.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from figure_tables import ROOT, FigureError, make_table, single_figure

from mamf.cli.commands.autoprofile import make_summary_markdown

_AUTOPROFILE = ROOT / "docs" / "autoprofile-h200"
#: Pages that are generated as a whole, and the functions that generate them.
GENERATED_PAGES = {_AUTOPROFILE / "SUMMARY.md": lambda: make_summary_markdown(_AUTOPROFILE, {})}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^(?P<start><!-- figures:\s(?P<what>.*?)-->)$.*?^(?P<end><!-- end of figures -->)$", re.DOTALL | re.MULTILINE
)
_OPENING, _CLOSING = re.compile(r"^<!-- figures:", re.MULTILINE), "<!-- end of figures -->"
_DEFINITION = re.compile(r'^\[(?P<name>[^\]]+)\]: (?P<path>\S+\.jsonl) "(?P<what>[^"]+)"$', re.MULTILINE)
_EXCEPTION = re.compile(r"<!-- not from a log: (?P<reason>\S.*?\S) -->$", re.DOTALL)
_RATE = r"\d (?:TFLOPS|TB/s|GB/s)(?!\w)"
#: Patterns of measured figures. In tables and console output, measured figures have decimals, a percent sign or a unit;
#: other numbers there are sizes and counts. In text, only rates count as measured figures.
_FIGURE_WITH_DECIMALS = re.compile(rf"(?<![\w.])[\d,]*\d\.\d+(?![\w.])|\d ?%|{_RATE}|\d (?:ms|us)\b")
_FIGURES_BY_KIND = {"table": _FIGURE_WITH_DECIMALS, "console": _FIGURE_WITH_DECIMALS, "text": re.compile(_RATE)}
_LINK, _NO_MATCH = re.compile(r"\[([^\[\]]+)\]\[[^\[\]]+\]"), re.compile(r"(?!)")


def regenerate_page(text: str, folder: Path) -> str:
    """Return the text of a page with all tables and figures generated again. ``folder``: the folder of the page.

    Raises FigureError if a table or figure cannot be computed or is not marked correctly.
    """
    if len(_OPENING.findall(text)) != len(_BLOCK.findall(text)) or text.count(_CLOSING) != len(_BLOCK.findall(text)):
        raise FigureError(f"'<!-- figures: ... -->' and '{_CLOSING}' do not come in pairs: add the missing comment")
    text = _BLOCK.sub(lambda match: f"{match['start']}\n\n{make_table(match['what'])}\n{match['end']}", text)
    for definition in _DEFINITION.finditer(text):
        text = _update_figure(text, definition, folder)
    return text


def _update_figure(text: str, definition: re.Match[str], folder: Path) -> str:
    """Return the text with one figure updated, wherever the page shows it. ``definition``: its link definition."""
    name, expression = definition["name"], definition["what"]
    path = os.path.relpath(folder / definition["path"], ROOT)
    try:
        figure = single_figure(path, expression)
    except FigureError as error:
        raise FigureError(f"figure [{name}]: {error}") from None
    text, count = re.subn(rf"\[[^\[\]]+\]\[{re.escape(name)}\]", f"[{figure}][{name}]", text)
    if not count:
        raise FigureError(f"figure [{name}]: no text links to it: write [{figure}][{name}], or delete its definition")
    return text


# -- figures without a log ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    """A table, console output or paragraph that shows measured figures but is not generated.

    - ``line``: the number of its first line, from 1. ``text``: that line.
    - ``reason``: why it does not come from a log, according to the comment above it. None without such a comment.
    """

    line: int
    text: str
    reason: str | None


def find_unbacked_passages(text: str) -> Iterator[Passage]:
    """Yield the passages that show measured figures outside generated blocks.

    Leave out figures that link to a log, as in ``[838.4][best]``.
    """
    names = "|".join(re.escape(definition["name"]) for definition in _DEFINITION.finditer(text))
    link_to_log = re.compile(rf"\[[^\[\]]+\]\[(?:{names})\]") if names else _NO_MATCH
    lines = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text).splitlines()
    text_above, line_count = "", 0
    for kind, group in itertools.groupby(_classify_lines(lines), lambda pair: pair[0]):
        passage_lines = [line for _, line in group]
        passage_text = "\n".join(passage_lines)
        unbacked_text = _LINK.sub(r"\1", link_to_log.sub("", passage_text))
        if _FIGURES_BY_KIND.get(kind, _NO_MATCH).search(unbacked_text):
            exception = _EXCEPTION.search(text_above)
            reason = " ".join(exception["reason"].split()) if exception else None
            yield Passage(line_count + 1, passage_lines[0], reason)
        text_above = text_above if kind == "gap" else passage_text
        line_count += len(passage_lines)


def _classify_lines(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each line with its kind: comment, table, console (a code block without a language), code, text, or gap."""
    fence, is_comment = "", False
    for line in lines:
        if line.lstrip().startswith("```"):
            kind = fence or ("code" if line.strip() != "```" else "console")
            fence = "" if fence else kind
        elif fence:
            kind = fence
        elif is_comment or line.startswith("<!--"):
            kind, is_comment = "comment", not line.rstrip().endswith("-->")
        elif not line.strip() or line.startswith("#"):
            kind = "gap"
        else:
            kind = "table" if line.startswith("|") else "text"
        yield kind, line


# -- the command -------------------------------------------------------------------------------------------------------


def find_stale_lines(text: str, new_text: str, name: str) -> Iterator[str]:
    """Yield the lines in which a page differs from its regenerated text, as a diff."""
    diff_lines = difflib.unified_diff(
        text.splitlines(), new_text.splitlines(), name, f"{name}, from the logs", "", "", 0, ""
    )
    return (line for line in diff_lines if not line.startswith("@@"))


def list_unexplained_passages(text: str, name: str) -> Iterator[str]:
    """Yield a message for each passage that does not come from a log and does not say why."""
    for passage in find_unbacked_passages(text):
        if passage.reason is None:
            yield (
                f"{name}:{passage.line}: no log backs {passage.text[:60]!r}: generate the figures, or write the "
                "reason above them: <!-- not from a log: REASON -->"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages", type=Path, nargs="*", metavar="PAGE", help="path of a page (default: README.md and all pages in docs/)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a figure is stale or unexplained"
    )
    options = parser.parse_args(arguments)
    messages: list[str] = []
    for page in [page.resolve() for page in options.pages] or PAGES:
        text = page.read_text(encoding="utf-8")
        messages += [] if page in GENERATED_PAGES else list_unexplained_passages(text, page.name)
        try:
            new_text = GENERATED_PAGES[page]() if page in GENERATED_PAGES else regenerate_page(text, page.parent)
        except FigureError as error:
            messages.append(f"{page.name}: {error}")
            continue
        if options.check:
            messages += find_stale_lines(text, new_text, page.name)
        elif new_text != text:
            page.write_text(new_text, encoding="utf-8")
    print(*messages, sep="\n", end="\n" if messages else "", file=sys.stderr)
    if messages and options.check:
        print("run 'python tools/figures.py' to update stale tables and figures", file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
