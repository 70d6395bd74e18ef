"""Implement the command ``mamf results``, which maintains results/, the project's folder of logs that users
contributed: check logs, copy a log into the folder, and write the folder's tables and a website of its figures.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.cli.parser import CommandParser
from mamf.cli.reading import show_reading_progress
from mamf.cli.terminal import add_shared_options, print_document, print_line, print_lines, warn
from mamf.cli.watching import FAILURE_EXIT_CODE
from mamf.errors import UsageError
from mamf.files import create_file_atomically, make_folder, write_file_atomically
from mamf.peaks import CONTRIBUTED_FILE_NAME

if TYPE_CHECKING:
    from mamf.contribution.review import Review

EXAMPLES = """examples:
  mamf results check run.jsonl                          check a log: one line per finding, exit code 1 if it is rejected
  mamf results check results                            check that each log of a folder is in its place, and only once
  mamf results submit run.jsonl                         check, copy into results/, print the git commands
  mamf results submit run.jsonl --dry-run               print where in results/ the log belongs; needs no clone
  mamf results table                                    write results/README.md and the page of each accelerator
  mamf results site --output site                       write pages of all figures: open site/index.html
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", parser_class=CommandParser)
    check = actions.add_parser("check", help="check logs against the rules of results/")
    check.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run logs, or folders of run logs; for a folder, mamf lists only errors, and counts warnings",
    )
    add_shared_options(check, "--format", choices=("table", "json"))
    submit = actions.add_parser("submit", help="check a log, and copy it into results/")
    submit.add_argument(
        "log", type=Path, metavar="LOG", help="run log to submit, or the folder of logs that a run with --devices wrote"
    )
    add_shared_options(submit, "--dry-run")
    table = actions.add_parser("table", help="write the tables of results/ from its logs")
    table.add_argument(
        "--check", action="store_true", help="write nothing, and exit with code 1 if a table is out of date"
    )
    site = actions.add_parser("site", help="write static pages and downloads of results/ from its logs")
    site.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder to write to; it must be new, empty, or from an earlier 'mamf results site'",
    )
    site.add_argument("--logs", metavar="URL", help="URL where the logs are published (default: relative links)")
    for action in (submit, table, site):
        action.add_argument(
            "--results",
            type=Path,
            default=Path("results"),
            metavar="FOLDER",
            help="folder with the logs of all accelerators (default: results)",
        )
    for action, function in ((check, check_logs), (submit, submit_logs), (table, write_tables), (site, write_site)):
        action.set_defaults(parser=action, run_action=function)


def run_with_options(options: argparse.Namespace) -> int:
    if options.action is None:
        raise UsageError("'mamf results' needs an action: check, submit, table or site")
    return options.run_action(options)  # type: ignore[no-any-return]


def check_logs(options: argparse.Namespace) -> int:
    from mamf.contribution.review import make_reviews_document

    reviews: list[Review] = []
    for path in dict.fromkeys(options.paths):
        reviews += _review_folder(path) if path.is_dir() else [_review_file(path)]
    print_document(options, make_reviews_document(reviews, options.paths))
    return FAILURE_EXIT_CODE if any(review.is_rejected() for review in reviews) else 0


def _review_folder(folder: Path) -> list[Review]:
    """Check every run log in ``folder`` against the rules for contributed logs. If the folder has a README.md and
    subfolders with logs, as results/ does, also find logs in a wrong subfolder, duplicate logs, and files that do not
    belong there.
    """
    from mamf.contribution.review import review_log, review_results, review_stray_files

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    logs = [path for path in files if path.suffix == ".jsonl"]
    if not logs:
        raise UsageError(f"{folder} has no run log (*.jsonl): name a file, or a folder with logs")
    with show_reading_progress(logs) as count_read_bytes:
        if not (folder / "README.md").exists() or all(path.parent == folder for path in logs):
            return [review_log(path, count_read_bytes) for path in logs]
        return [*review_results(folder, logs, count_read_bytes), *review_stray_files(folder, files)]


def _review_file(path: Path) -> Review:
    """Check the run log at ``path`` against the rules for contributed logs. Raises UsageError if it is not a regular
    file.
    """
    from mamf.contribution.review import review_log

    if not path.is_file():
        raise UsageError(f"{path} does not exist or is not a regular file: save the log to a file first")
    with show_reading_progress([path]) as count_read_bytes:
        return review_log(path, count_read_bytes)


def submit_logs(options: argparse.Namespace) -> int:
    from mamf.logs.shared_runs import find_shared_run_logs

    if not options.dry_run:
        _require_results_folder(options.results, ", name it with --results, or use --dry-run, which needs no clone")
    paths = find_shared_run_logs(options.log) if options.log.is_dir() else [options.log]
    return max((_submit_log(options, path) for path in paths), default=FAILURE_EXIT_CODE)


def _submit_log(options: argparse.Namespace, path: Path) -> int:
    from mamf.contribution.review import find_free_path, format_findings

    root, review = options.results, _review_file(path)
    for line in format_findings(review):
        print_line(line)
    if review.is_rejected():
        warn(f"{path} was not submitted: fix the errors, or measure again")
        return FAILURE_EXIT_CODE
    content = path.read_bytes()
    target_path = find_free_path(review, root)
    print_line(f"tier {review.tier}, {len(content) / 1e3:.0f} kB, to be copied to {target_path}")
    if options.dry_run:
        print_line("dry run: nothing is written")
        return 0
    make_folder(target_path.parent)
    create_file_atomically(target_path, content)
    log, ceilings, folder = (
        shlex.quote(str(path)) for path in (target_path, _get_contributed_ceilings_path(root), root)
    )
    print_lines(f"""
look for private text, above all in the notes and the command, because mamf removes only known formats: {log}
then, in a clone of your fork:
    git switch -c results-{target_path.stem}
    mamf results table --results {folder}
    git add {folder} {ceilings}
    git commit -m "Results: {target_path.parent.name}, {target_path.stem}"
    git push -u origin HEAD
and open a pull request
""")
    return 0


def write_tables(options: argparse.Namespace) -> int:
    from mamf.contribution.collection import read_collection
    from mamf.contribution.review import format_findings, review_results
    from mamf.contribution.tables import make_contributed_csv, make_results_pages

    root = _require_results_folder(options.results)
    logs = sorted(root.glob("*/*.jsonl"))  # Do not search deeper: a user may name any large folder by mistake.
    if not logs:
        raise UsageError(
            f"{root} has no subfolder with run logs of a device: give the path of the folder results/ of mamf"
        )
    for review in review_results(root, logs):
        if review.is_rejected():
            for line in format_findings(review, include_warnings=False):
                print_line(line)
            raise UsageError(f"{review.path} breaks the rules of results/: fix the errors above, or remove the log")
    collection = read_collection(root, logs)
    pages = {root / path: page for path, page in make_results_pages(collection).items()}
    if (ceilings_path := _get_contributed_ceilings_path(root)).exists():
        pages[ceilings_path] = make_contributed_csv(collection)
    if options.check:
        stale_paths = {
            path for path, page in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != page
        }
        for path in pages:
            print_line(
                f"{path} is " + ("out of date: run 'mamf results table'" if path in stale_paths else "up to date")
            )
        return FAILURE_EXIT_CODE if stale_paths else 0
    for path, page in pages.items():
        write_file_atomically(path, page)
        print_line(f"written: {path}")
    return 0


def write_site(options: argparse.Namespace) -> int:
    from mamf.machine.environment import pause_garbage_collection
    from mamf.pages.site import INDEX_PAGE_NAME, build_site
    from mamf.report.document import format_count

    with pause_garbage_collection():
        site = build_site(_require_results_folder(options.results), options.output, options.logs)
    print_line(
        f"written: {options.output / INDEX_PAGE_NAME} ({format_count(len(site.logs), 'log')} "
        f"of {format_count(len({run.device for run in site.logs}), 'device')})"
    )
    return 0


def _get_contributed_ceilings_path(root: Path) -> Path:
    """Return the path of the contributed ceilings file in a clone of the project. ``root``: the folder results/ in the
    clone.
    """
    return root.parent / "mamf" / CONTRIBUTED_FILE_NAME


def _require_results_folder(path: Path, advice: str = ", or name it with --results") -> Path:
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}: run this command in a clone of the project{advice}")
    return path
