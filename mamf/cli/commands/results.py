"""``mamf results``: checks logs before they are shared, puts one into results/, writes the table of all."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path

from mamf.cli.printing import print_document
from mamf.cli.reading import reading
from mamf.cli.terminal import say, say_lines, warn
from mamf.contribution.collection import MAINTAINERS, SUBMITTERS, collect
from mamf.contribution.evidence import TIERS, Finding
from mamf.contribution.known_ceilings import FIGURES, NOTICE
from mamf.contribution.rules import Review, find_free_place, review, review_results
from mamf.contribution.tables import contributed_csv, results_pages
from mamf.errors import UsageError
from mamf.files import create_whole, make_folder, write_whole
from mamf.machine.garbage import no_garbage_collection
from mamf.pages.site import build_site
from mamf.pages.site_index import INDEX
from mamf.peaks import CONTRIBUTED
from mamf.report.document import Answer, Column, Document, Lines, Table
from mamf.report.text import counted

_REJECTED = 1
_MOST_FILES = 100_000


def run(options: argparse.Namespace) -> int:
    actions = {"check": run_check, "submit": run_submit, "table": run_table, "site": run_site}
    return actions[options.action](options)


def run_check(options: argparse.Namespace) -> int:
    reviews, named = [], set()
    for path in dict.fromkeys(options.paths):
        if path.is_dir():
            reviews += _reviews_of_folder(path)
        else:
            _require_file(path)
            named.add(path)
            reviews += _reviews([path])
    print_document(options, _document(reviews, named))
    return _REJECTED if any(found.is_rejected() for found in reviews) else 0


def _reviews_of_folder(folder: Path) -> list[Review]:
    """Review the logs of a folder; in results/ also places, copies and files that are not logs."""
    files = list(itertools.islice(folder.rglob("*"), _MOST_FILES + 1))
    if len(files) > _MOST_FILES:
        raise UsageError(f"{folder} has more than {_MOST_FILES} files: name the folder of the logs")
    files = sorted(path for path in files if path.is_file())
    logs = [path for path in files if path.suffix == ".jsonl"]
    if not logs:
        raise UsageError(f"{folder} has no run log (*.jsonl): name a file, or a folder with logs")
    if not (folder / "README.md").exists():
        return _reviews(logs)
    written = {folder / each for each in (FIGURES, NOTICE, SUBMITTERS, MAINTAINERS)}
    strays = [path for path in files if path not in written.union(logs) and path.name != "README.md"]
    stray = Finding("misplaced", "results/ has only run logs (*.jsonl) and what mamf and its workflows write")
    with reading(logs) as seen:
        return [*review_results(folder, logs, seen), *(Review(path, (stray,)) for path in strays)]


def _reviews(paths: Sequence[Path]) -> list[Review]:
    with reading(paths) as seen:
        return [review(path, seen) for path in paths]


def _require_file(path: Path) -> None:
    if not path.is_file():
        problem = "it is not a regular file: save the log first" if path.exists() else "there is no such file"
        raise UsageError(f"cannot read {path}: {problem}")


def _document(reviews: Sequence[Review], named: Container[Path]) -> Document:
    """``named``: logs whose warnings are printed too; the warnings of a whole folder would hide its errors."""
    lines = [line for each in reviews for line in _finding_lines(each, each.path in named)]
    columns: list[Column[Review]] = [  # for json; people read lines
        Column("path", "", lambda review: str(review.path)),
        Column("tier", "", lambda review: review.tier),
        Column("place", "", lambda review: review.place and review.place.as_posix()),
        Column("accepted", "", lambda review: not review.is_rejected()),
        Column("findings", "", lambda review: [_finding_record(each) for each in review.findings]),
    ]
    return Document("Logs", [Lines(lines), Table(columns, reviews, key="logs"), Answer([_count_line(reviews)])])


def _finding_record(finding: Finding) -> dict[str, object]:
    level = "warning" if finding.is_warning else "error"
    return {"rule": finding.rule, "level": level, "line": finding.line, "message": finding.message}


def _finding_lines(review: Review, with_warnings: bool = True) -> list[str]:
    """A line for each finding."""
    lines = []
    for finding in review.findings:
        if with_warnings or not finding.is_warning:
            place = f"{review.path}" if finding.line is None else f"{review.path}:{finding.line}"
            lines.append("{place}: {level}: {rule}: {message}".format(place=place, **_finding_record(finding)))
    return lines


def _count_line(reviews: Sequence[Review]) -> str:
    tiers = Counter(found.tier or "unreadable" for found in reviews)
    by_tier = ", ".join(f"{tiers[tier]} {tier}" for tier in (*TIERS, "unreadable") if tiers[tier])
    rejected = sum(found.is_rejected() for found in reviews)
    warnings = sum(finding.is_warning for found in reviews for finding in found.findings)
    verdict = f"{rejected} rejected" if rejected else "all accepted"
    return f"{len(reviews)} checked ({by_tier}): {verdict}" + (f", {counted(warnings, 'warning')}" if warnings else "")


def run_submit(options: argparse.Namespace) -> int:
    root = options.results
    if not options.dry_run:
        _folder(root, ", name it with --results, or use --dry-run, which needs no clone")
    _require_file(options.log)
    (found,) = _reviews([options.log])
    for line in _finding_lines(found):
        say(line)
    if found.is_rejected():
        warn(f"{options.log} is not submitted: fix the errors, or measure again")
        return _REJECTED
    content = options.log.read_bytes()
    target = find_free_place(found, root)
    say(f"tier {found.tier}; {len(content) / 1e3:.0f} kB -> {target}")
    if options.dry_run:
        say("dry run: nothing is written")
        return 0
    make_folder(target.parent)
    create_whole(target, content)
    log, ceilings, folder = (shlex.quote(str(path)) for path in (target, _contributed_file(root), root))
    say_lines(f"""
look for private texts, in the notes and the command above all: mamf removes those of known formats: {log}
then, in a clone of your fork:
    git switch -c results-{target.stem}
    mamf results table --results {folder}
    git add {folder} {ceilings}
    git commit -m "Results: {target.parent.name}, {target.stem}"
    git push -u origin HEAD
and open a pull request
""")
    return 0


def run_table(options: argparse.Namespace) -> int:
    root = _folder(options.results)
    logs = sorted(root.glob("*/*.jsonl"))  # no deeper, so that another root is not searched
    if not logs:
        raise UsageError(f"{root} has no accelerator's folder with run logs: name the folder results/ of the project")
    for found in review_results(root, logs):
        if found.is_rejected():
            for line in _finding_lines(found, with_warnings=False):
                say(line)
            raise UsageError(f"{found.path} cannot be in the table: fix or remove it")
    collection = collect(root, logs)
    pages = {root / path: page for path, page in results_pages(collection).items()}
    if (ceilings := _contributed_file(root)).exists():
        pages[ceilings] = contributed_csv(collection)
    if options.check:
        return max(_check_page(path, page) for path, page in pages.items())
    for path, page in pages.items():
        write_whole(path, page)
        say(f"written: {path}")
    return 0


def run_site(options: argparse.Namespace) -> int:
    with no_garbage_collection():
        data = build_site(_folder(options.results), options.output, options.logs)
    devices = len({run.device for run in data.runs})
    say(f"written: {options.output / INDEX} ({counted(len(data.runs), 'log')} of {counted(devices, 'device')})")
    return 0


def _contributed_file(root: Path) -> Path:
    """The file that ships with the package, in a clone of the project."""
    return root.parent / "mamf" / CONTRIBUTED


def _check_page(path: Path, page: str) -> int:
    is_fresh = path.exists() and path.read_text(encoding="utf-8") == page
    say(f"{path} is {'up to date' if is_fresh else 'stale: run mamf results table'}")
    return 0 if is_fresh else _REJECTED


def _folder(path: Path, advice: str = ", or name it with --results") -> Path:
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}: run this in a clone of the project{advice}")
    return path
