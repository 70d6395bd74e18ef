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

from figure_tables import ROOT, FigureError, single_figure, table

from mamf.cli.commands.autoprofile import make_summary_markdown

_AUTOPROFILE = ROOT / "docs" / "autoprofile-h200"
#: Pages that are generated as a whole, and the functions that generate them.
WHOLE = {_AUTOPROFILE / "SUMMARY.md": lambda: make_summary_markdown(_AUTOPROFILE, {})}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^(?P<start><!-- figures:\s(?P<what>.*?)-->)$.*?^(?P<end><!-- end of figures -->)$", re.DOTALL | re.MULTILINE
)
_OPENING, _CLOSING = re.compile(r"^<!-- figures:", re.MULTILINE), "<!-- end of figures -->"
_DEFINITION = re.compile(r'^\[(?P<name>[^\]]+)\]: (?P<path>\S+\.jsonl) "(?P<what>[^"]+)"$', re.MULTILINE)
_EXCEPTION = re.compile(r"<!-- not from a log: (?P<reason>\S.*?\S) -->$", re.DOTALL)
_RATES = r"\d (?:TFLOPS|TB/s|GB/s)(?!\w)"
#: Patterns of measured figures. In tables and console output, measured figures have decimals, a percent sign or a unit;
#: other numbers there are sizes and counts. In text, only rates count as measured figures.
_SHOWN = re.compile(rf"(?<![\w.])[\d,]*\d\.\d+(?![\w.])|\d ?%|{_RATES}|\d (?:ms|us)\b")
_MEASURED = {"table": _SHOWN, "console": _SHOWN, "text": re.compile(_RATES)}
_NEVER, _LINKED = re.compile(r"(?!)"), re.compile(r"\]\[")


def rewritten(text: str, folder: Path) -> str:
    """Return the text of a page with all tables and figures generated again. ``folder``: the folder of the page.

    Raises FigureError if a table or figure cannot be computed or is not marked correctly.
    """
    if len(_OPENING.findall(text)) != len(_BLOCK.findall(text)) or text.count(_CLOSING) != len(_BLOCK.findall(text)):
        raise FigureError(f"a '<!-- figures: ... -->' and its '{_CLOSING}' do not come in pairs")
    text = _BLOCK.sub(lambda found: f"{found['start']}\n\n{table(found['what'])}\n{found['end']}", text)
    for definition in _DEFINITION.finditer(text):
        text = _with_figure(text, definition, folder)
    return text


def _with_figure(text: str, definition: re.Match[str], folder: Path) -> str:
    """Return the text with one figure updated, wherever the page shows it. ``definition``: its link definition."""
    name, what = definition["name"], definition["what"]
    path = os.path.relpath(folder / definition["path"], ROOT)
    try:
        figure = single_figure(path, what)
    except FigureError as error:
        raise FigureError(f"figure [{name}]: {error}") from None
    text, count = re.subn(rf"\[[^\[\]]+\]\[{re.escape(name)}\]", f"[{figure}][{name}]", text)
    if not count:
        raise FigureError(f"figure [{name}]: nothing on the page refers to it")
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


def unbacked(text: str) -> Iterator[Passage]:
    """Yield the passages that show measured figures outside generated blocks.

    Leave out paragraphs that contain reference links (``[838.4][best]``), because these may link to logs.
    """
    lines = _BLOCK.sub(lambda found: "\n" * found[0].count("\n"), text).splitlines()
    above, number = "", 0
    for kind, group in itertools.groupby(_kinds(lines), lambda pair: pair[0]):
        passage = [line for _, line in group]
        shown = "\n".join(passage)
        if _MEASURED.get(kind, _NEVER).search(shown) and not (kind == "text" and _LINKED.search(shown)):
            found = _EXCEPTION.search(above)
            yield Passage(number + 1, passage[0], " ".join(found["reason"].split()) if found else None)
        above = above if kind == "gap" else shown
        number += len(passage)


def _kinds(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
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


def stale(text: str, fresh: str, name: str) -> Iterator[str]:
    """Yield the lines in which a page differs from its regenerated text, as a diff."""
    found = difflib.unified_diff(text.splitlines(), fresh.splitlines(), name, f"{name}, from the logs", "", "", 0, "")
    return (line for line in found if not line.startswith("@@"))


def unexplained(text: str, name: str) -> Iterator[str]:
    """Yield a message for each passage that does not come from a log and does not say why."""
    for passage in unbacked(text):
        if passage.reason is None:
            yield (
                f"{name}:{passage.line}: no log backs {passage.text[:60]!r}; generate it, or say why not above it: "
                "<!-- not from a log: REASON -->"
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
    found: list[str] = []
    for page in [page.resolve() for page in options.pages] or PAGES:
        text = page.read_text(encoding="utf-8")
        found += [] if page in WHOLE else unexplained(text, page.name)
        try:
            fresh = WHOLE[page]() if page in WHOLE else rewritten(text, page.parent)
        except FigureError as error:
            found.append(f"{page.name}: {error}")
            continue
        if options.check:
            found += stale(text, fresh, page.name)
        elif fresh != text:
            page.write_text(fresh, encoding="utf-8")
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    if found and options.check:
        print("run 'python tools/figures.py' to write what is stale", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
