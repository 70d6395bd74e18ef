"""``mamf import FILE...``: converts logs of any version of mamf-finder into run logs of tier legacy."""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mamf.cli.interruption import Interruption
from mamf.cli.reading import reading
from mamf.cli.terminal import say
from mamf.errors import UsageError
from mamf.logs.finder import read_finder_logs
from mamf.logs.legacy import FinderRun, write_legacy_log
from mamf.report.text import counted


def run(options: argparse.Namespace) -> int:
    if not options.output_folder.is_dir():
        raise UsageError(f"there is no folder {options.output_folder}: make it, or name another --output-folder")
    paths = list({os.path.realpath(path): path for path in options.logs}.values())
    with Interruption():
        # All files are read before any is written, so that a bad one leaves nothing behind.
        with reading(paths) as seen:
            targets = _targets([Source(path, read_finder_logs(path, seen)) for path in paths], options.output_folder)
        _write({target: run for target, (_, run) in targets.items()})
    names = Counter(_stem(path) for path in paths)
    # All are written before the first line is printed, because the reader of a pipe may stop.
    for target, (path, run) in targets.items():
        source = f" ({path})" if names[_stem(path)] > 1 else ""
        for line in (f"{target}{source}: {describe(run)}", *(f"    {remark}" for remark in run.remarks)):
            say(line)
    return 0


@dataclass(frozen=True)
class Source:
    path: Path
    runs: list[FinderRun]


def _stem(path: Path) -> str:
    """``mm`` of ``mm.out`` and of ``mm.out.gz``."""
    return Path(path.name.removesuffix(".gz")).stem


def _targets(sources: Sequence[Source], folder: Path) -> dict[Path, tuple[Path, FinderRun]]:
    """The new file of each run, with its source: the name of the log, numbered if several runs share it. Raises
    UsageError for an existing file.
    """
    named: dict[str, list[tuple[Path, FinderRun]]] = {}
    for source in sources:
        named.setdefault(_stem(source.path), []).extend((source.path, run) for run in source.runs)
    targets: dict[Path, tuple[Path, FinderRun]] = {}
    # Those that need no number first: mm-1.out keeps its name beside two of mm.out.
    for stem, found in sorted(named.items(), key=lambda item: len(item[1]) > 1):
        numbers = itertools.count(1)
        for run in found:
            names = (f"{stem}-{number}" for number in numbers) if len(found) > 1 else (stem,)
            target = next(folder / f"{name}.jsonl" for name in names if folder / f"{name}.jsonl" not in targets)
            if target.exists():
                raise UsageError(f"{target} exists and is not overwritten: name another --output-folder")
            targets[target] = run
    return targets


def _write(runs: Mapping[Path, FinderRun]) -> None:
    """Write all runs or none."""
    written: list[Path] = []
    try:
        for target, run in runs.items():
            write_legacy_log(run, target)
            written.append(target)
    except BaseException:
        for target in written:
            target.unlink()
        raise


def describe(run: FinderRun) -> str:
    """A run in one line: version, device, rows, best figures."""
    figures = ", ".join(f"{name} {best.tflops[name]:g} @ {best.shape or 'unknown'}" for name, best in run.best.items())
    whole = "" if run.is_complete else ", interrupted: no ceilings"
    dtype = run.dtype or "unknown dtype"
    known = f"mamf-finder {run.version or 'of unknown version'}, {run.device or 'unknown device'}, {dtype}"
    return f"{known}: {counted(len(run.rows), 'row')}{whole}; {figures or 'no best'}"
