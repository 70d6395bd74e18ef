"""``mamf results``: check logs before they are shared, put one into results/, write the table of all."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mamf.cli.options import Parser
from mamf.contribution.collection import collect
from mamf.contribution.evidence import TIERS, Finding
from mamf.contribution.rules import RULES, Review, review, review_results
from mamf.contribution.submission import Submission, prepare, write
from mamf.contribution.tables import results_page
from mamf.errors import UsageError

_EXAMPLES = """examples:
  mamf results check run.jsonl                          a line a finding, exit code 1 if the log cannot be accepted
  mamf results check results                            a whole folder: each log at its place, each once
  mamf results submit run.jsonl                         check, scrub, put into results/, print what to do in git
  mamf results table                                    write results/README.md
"""
_REJECTED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=Parser)
    check = actions.add_parser("check", help="judge logs by the rules of results/", epilog=_rules())
    check.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="run logs, or a folder of them")
    check.add_argument("--strict", action="store_true", help="warnings count as errors")
    check.add_argument("--format", choices=("text", "json"), default="text")
    check.set_defaults(run=run_check, parser=check)
    submit = actions.add_parser("submit", help="check and scrub a log and put it into results/")
    submit.add_argument("log", type=Path, metavar="LOG")
    submit.add_argument("--dry-run", action="store_true", help="show what would be written, and write nothing")
    submit.set_defaults(run=run_submit, parser=submit)
    table = actions.add_parser("table", help="write README.md of results/ from its logs")
    table.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the table is stale")
    table.set_defaults(run=run_table, parser=table)
    for action in (submit, table):
        action.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="(default: results)")


def _rules() -> str:
    width = max(map(len, RULES))
    return "rules:\n" + "".join(f"  {name.ljust(width)}  {text}\n" for name, text in RULES.items())


def run_check(options: argparse.Namespace) -> int:
    reviews = list(_reviews(options.paths))
    if options.format == "json":
        print(json.dumps([_as_json(found, options.strict) for found in reviews], indent=1))
    else:
        for found in reviews:
            _print_findings(found, options.strict)
        print(_count_line(reviews, options.strict))
    return _REJECTED if any(found.is_rejected(options.strict) for found in reviews) else 0


def _reviews(paths: Sequence[Path]) -> Iterator[Review]:
    for path in paths:
        if path.is_dir():
            yield from review_results(path, logs_in(path))
        else:
            yield review(path)


def logs_in(folder: Path) -> list[Path]:
    """Raises UsageError for a folder without logs."""
    found = sorted(folder.rglob("*.jsonl"))
    if not found:
        raise UsageError(f"{folder} holds no run log (*.jsonl): name a file, or a folder that does")
    return found


def _print_findings(found: Review, strict: bool) -> None:
    for finding in found.findings:
        print(_line(found.path, finding, strict))


def _line(path: Path, finding: Finding, strict: bool) -> str:
    place = str(path) if finding.line is None else f"{path}:{finding.line}"
    return f"{place}: {'warning' if finding.is_warning and not strict else 'error'}: {finding.rule}: {finding.message}"


def _as_json(found: Review, strict: bool) -> dict[str, object]:
    return {
        "path": str(found.path),
        "tier": found.tier,
        "place": None if found.place is None else found.place.as_posix(),
        "accepted": not found.is_rejected(strict),
        "findings": [
            {
                "rule": finding.rule,
                "level": "warning" if finding.is_warning and not strict else "error",
                "line": finding.line,
                "message": finding.message,
            }
            for finding in found.findings
        ],
    }


def _count_line(reviews: Sequence[Review], strict: bool) -> str:
    tiers = Counter(found.tier for found in reviews)
    held = ", ".join(f"{tiers[tier]} {tier}" for tier in (*TIERS, None) if tiers[tier]).replace("None", "unreadable")
    rejected = sum(found.is_rejected(strict) for found in reviews)
    return f"{len(reviews)} checked ({held}): {f'{rejected} rejected' if rejected else 'all accepted'}"


def run_submit(options: argparse.Namespace) -> int:
    root = _folder(options.results)
    submission = prepare(options.log)
    _print_findings(submission.review, strict=False)
    for change in submission.changes:
        print(f"scrubbed: {change}")
    if submission.review.is_rejected():
        print(f"mamf: {options.log} is not submitted: mend what is called an error, or measure again", file=sys.stderr)
        return _REJECTED
    target = root / submission.place
    print(f"tier {submission.review.tier}; {len(submission.text.encode()) / 1e3:.0f} kB -> {target}")
    if options.dry_run:
        print("dry run: nothing is written")
        return 0
    write(submission, root)
    print(_git_commands(submission, root))
    return 0


def _git_commands(submission: Submission, root: Path) -> str:
    place = submission.place
    return f"""
now, in a clone of your fork:
    git switch -c results-{place.stem}
    mamf results table --results {root}
    git add {root / place} {root / "README.md"}
    git commit -m "Results: {place.parent}, {place.stem}"
    git push -u origin HEAD
and open a pull request"""


def run_table(options: argparse.Namespace) -> int:
    root = _folder(options.results)
    page, path = results_page(collect(root, logs_in(root))), root / "README.md"
    if options.check:
        is_fresh = path.exists() and path.read_text(encoding="utf-8") == page
        print(f"{path} is {'up to date' if is_fresh else 'stale: run mamf results table'}")
        return 0 if is_fresh else _REJECTED
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    print(f"written: {path}")
    return 0


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}: run this in a clone of the project, or name it by --results")
    return path
