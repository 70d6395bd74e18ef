"""Logs whose rows are placed under roofs, pictures and exports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mamf.ceilings.roof import RoofPoint, Roofs
from mamf.choices import EXPORTS
from mamf.cli.printing import note_stream
from mamf.cli.terminal import say, warn
from mamf.errors import UsageError
from mamf.files import create_whole, write_whole
from mamf.logs.comparability import require_same_card
from mamf.logs.run_log import RunLog
from mamf.report.charts.plotting import draw, exists, file_type, save
from mamf.report.charts.roofline import roofline_chart
from mamf.report.roofline import points_of, tracelens_arch


def place_rows(logs: Iterable[RunLog], roofs: Roofs, anyway: bool) -> list[RoofPoint]:
    """A point for each row of the logs. Raises IncomparableError for a log from another card."""
    points: list[RoofPoint] = []
    for log in logs:
        if not anyway:
            require_same_card(log, roofs)
        found = points_of(log.measurements, roofs)
        if not found:
            warn(f"{log.path} holds no row to place: rows of a search are not drawn")
        points += found
    return points


def require_files(options: argparse.Namespace) -> None:
    """Check the files to write before anything is measured. Raises UsageError."""
    if options.picture:
        file_type(options.picture)
    if options.export_file and not options.export:
        raise UsageError(f"--export-file {options.export_file}: name the format too (--export {EXPORTS[0]})")
    for path in filter(None, (options.picture, export_path(options))):
        if path.exists() and not options.overwrite:
            raise exists(path)


def export_path(options: argparse.Namespace) -> Path | None:
    return (options.export_file or Path(f"{options.export}.json")) if options.export else None


def write_files(
    options: argparse.Namespace, roofs: Roofs, points: Sequence[RoofPoint], header: Mapping[str, Any]
) -> None:
    """Write the picture and the export, if any."""
    path = export_path(options)
    if path is not None:
        content = json.dumps(tracelens_arch(roofs, header["device"]["memory_bytes"]), indent=4) + "\n"
        write = write_whole if options.overwrite else create_whole
        write(path, content.encode())
        say(f"{options.export}: {path}", note_stream(options))
    if options.picture:
        save(draw(roofline_chart(roofs, points, header)), options.picture, options.overwrite)
        say(f"figure: {options.picture}", note_stream(options))
