"""``mamf import FILE...``: logs of mamf-finder, of every version, as run logs of tier legacy."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.errors import UsageError
from mamf.finder_logs import read_finder_logs
from mamf.logs.legacy import FinderRun, write_legacy_log

_EXAMPLES = """examples:
  mamf import out.txt                                   out.jsonl, here
  mamf import logs/*.txt --output-folder imported
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("logs", type=Path, nargs="+", metavar="FILE", help="what mamf-finder printed or wrote")
    parser.add_argument("--output-folder", type=Path, default=Path(), metavar="DIR", help="(default: here)")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    if not options.output_folder.is_dir():
        raise UsageError(f"there is no folder {options.output_folder}: make it, or name another --output-folder")
    # All are read before any is written: one bad file leaves nothing behind.
    runs = {path: read_finder_logs(path) for path in options.logs}
    targets = _targets(runs, options.output_folder)
    for target, found in targets.items():
        write_legacy_log(found, target)
        print(f"{target}: {describe(found)}")
    return 0


def _targets(runs: dict[Path, list[FinderRun]], folder: Path) -> dict[Path, FinderRun]:
    """Each run's new file. Raises UsageError for one that is there already, or asked for twice."""
    targets: dict[Path, FinderRun] = {}
    for path, found in runs.items():
        for number, run in enumerate(found, start=1):
            target = folder / f"{path.stem}{f'-{number}' if len(found) > 1 else ''}.jsonl"
            if target.exists() or target in targets:
                raise UsageError(f"{target} exists and is not overwritten: name another --output-folder")
            targets[target] = run
    return targets


def describe(run: FinderRun) -> str:
    """A run in a line: version, device, rows, best figures, and what is not known of it."""
    figures = ", ".join(f"{name} {best.tflops[name]:g} @ {best.shape or 'unknown'}" for name, best in run.best.items())
    whole = "" if run.is_complete else ", interrupted: no ceilings"
    dtype = run.dtype or "unknown dtype"
    known = f"mamf-finder {run.version or 'of unknown version'}, {run.device or 'unknown device'}, {dtype}"
    remarks = "".join(f"\n    {remark}" for remark in run.remarks)
    return f"{known}: {len(run.rows)} rows{whole}; {figures or 'no best'}{remarks}"
