"""Draw the pictures in README.md and docs/ from run logs, and check that they are up to date.

    python tools/pictures.py [PICTURE...]    # draw these pictures, such as docs/node-h200.png (default: all)
    python tools/pictures.py --check         # print each stale, missing or too large picture; exit code 1 if any

Each PNG file contains a digest of the data that it shows. The check compares only digests, so it does not need
matplotlib. Pixels could not be compared, because they depend on fonts and on the version of matplotlib. After you
change how mamf draws pictures, draw all of them again, because the check does not notice such a change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import burst_clock
from figure_tables import ROOT, read_log

from mamf.kinds.registry import make_log_chart
from mamf.logs.roofs import build_roofs_from_logs
from mamf.node.logs import make_log_path, read_node_folders
from mamf.node.report import make_node_chart
from mamf.node.verdict import judge_devices
from mamf.report.charts.clocks import make_clock_chart
from mamf.report.charts.picture import Picture, draw_figure
from mamf.report.roofline import make_roofline_chart, select_roofline_points

_H200 = "results/nvidia-h200"
_AUTOPROFILE = "docs/autoprofile-h200"
#: The maximum size of a picture in bytes, because GitHub shows pages with several pictures.
MAX_BYTES = 300_000
#: The keyword of the PNG text chunk that contains the digest.
_DIGEST_KEYWORD = b"mamf data"


def _plot_log(path: str, **choices: Any) -> Callable[[], Picture]:
    """Return a function that makes the picture that ``mamf plot`` draws for a log."""
    return lambda: make_log_chart(read_log(path), **choices)


def _plot_roofline(ceiling: str, *rows: str) -> Callable[[], Picture]:
    """Return a function that makes the picture that ``mamf roofline`` draws.

    ``ceiling``: the log with the ceilings. ``rows``: the logs of the points.
    """

    def chart() -> Picture:
        roofs = build_roofs_from_logs([read_log(ceiling)])
        points = [
            point
            for log in map(read_log, rows)
            for point in select_roofline_points(log.measurements, roofs, log.matmul_ceilings)
        ]
        return make_roofline_chart(roofs, points, read_log(ceiling).header)

    return chart


def _plot_node(*finds: str) -> Callable[[], Picture]:
    """Return a function that makes the picture that ``mamf plot`` draws for a folder of ``mamf node``.

    ``finds``: the contributed logs of the finds, one per device. They are copied into a folder, because ``mamf node``
    expects other file names.
    """

    def chart() -> Picture:
        with tempfile.TemporaryDirectory() as folder:
            for number, path in enumerate(finds):
                shutil.copy(ROOT / path, make_log_path(Path(folder), number, "find"))
            _, devices = read_node_folders([Path(folder)])
        chart_of_folder = make_node_chart(devices, judge_devices(devices))
        # Only the finds of the run were contributed. Replace the title and drop notes that describe its other parts.
        return replace(
            chart_of_folder,
            title=f"{len(devices)} devices side by side",
            notes=(chart_of_folder.notes[0], chart_of_folder.notes[-1]),
        )

    return chart


_ATTENTION = f"{_H200}/attention-bfloat16-fwd-bwd-burst-20261122-221110.jsonl"
_CLOCKED = f"{_H200}/attention-bfloat16-fwd-bwd-burst-20261124-160138.jsonl"
#: The path of each picture, and the function that makes it from its logs.
PICTURES: Mapping[str, Callable[[], Picture]] = {
    "docs/sweep-h200.png": _plot_log(f"{_H200}/sweep-torch-mm-bfloat16-burst-20261122-181526.jsonl"),
    "docs/find-h200.png": _plot_log(f"{_H200}/find-bfloat16-burst-sustained-20261121-143537.jsonl"),
    "docs/attention-h200-fwd.png": _plot_log(_ATTENTION, directions=["fwd"]),
    "docs/attention-h200-bwd.png": _plot_log(_ATTENTION, directions=["bwd"]),
    "docs/decode-h200.png": _plot_log(f"{_H200}/decode-bfloat16-burst-20261124-193736.jsonl"),
    "docs/burst-clock-h200.png": lambda: burst_clock.make_picture(ROOT / "docs/burst-clock-h200.csv"),
    "docs/cycles-h200.png": lambda: make_clock_chart(read_log(_CLOCKED)),
    "docs/roofline-h200.png": _plot_roofline(
        f"{_H200}/bandwidth-roofline-float32-burst-sustained-20261122-000415.jsonl",
        f"{_H200}/sweep-torch-mm-bfloat16-burst-20261122-000343.jsonl",
        f"{_H200}/attention-bfloat16-fwd-burst-20261122-000405.jsonl",
    ),
    "docs/explain-h200.png": _plot_log(f"{_H200}/matmul-explain-bfloat16-burst-sustained-20261124-160321.jsonl"),
    "docs/overlap-h200.png": _plot_log(f"{_H200}/overlap-bfloat16-sustained-20261124-023955.jsonl"),
    "docs/overlap-2-h200.png": _plot_log(f"{_H200}/overlap-bfloat16-sustained-20261124-023603.jsonl"),
    "docs/model-1b-h200.png": _plot_log(f"{_H200}/model-bfloat16-sustained-20261122-022917.jsonl"),
    "docs/node-h200.png": _plot_node(
        *(f"{_H200}/find-bfloat16-burst-sustained-20261122-094417{card}.jsonl" for card in ("", "-2", "-3", "-4"))
    ),
    f"{_AUTOPROFILE}/ceilings.png": _plot_log(f"{_AUTOPROFILE}/ceilings.jsonl"),
    f"{_AUTOPROFILE}/kernels.png": _plot_log(f"{_AUTOPROFILE}/kernels.jsonl"),
}


# -- digests of pictures -----------------------------------------------------------------------------------------------


def compute_digest(chart: Any) -> str:
    """Return the digest of the data of a picture. Numbers count with six digits.

    Fields with their default value do not count. So a new field changes only the digests of pictures that use it.
    """
    return hashlib.sha256(json.dumps(_make_json_value(chart)).encode()).hexdigest()[:16]


def _make_json_value(value: Any) -> Any:
    """Return the data of a picture as lists, mappings and texts that JSON can represent."""
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        set_fields = [field.name for field in fields(value) if values[field.name] != field.default]
        return [type(value).__name__, {name: _make_json_value(values[name]) for name in set_fields}]
    if isinstance(value, (list, tuple)):
        return [_make_json_value(element) for element in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def read_digest(path: Path) -> str | None:
    """Return the digest in a text chunk of a PNG file, or None if there is no digest."""
    match = re.search(rb"tEXt%b\0([0-9a-f]{16})" % _DIGEST_KEYWORD, path.read_bytes())
    return match[1].decode() if match else None


# -- the command -------------------------------------------------------------------------------------------------------


def list_linked_pictures(root: Path = ROOT) -> set[str]:
    """Return the paths of all PNG files that are in docs/, or to which README.md or a page in docs/ links."""
    paths = {path.relative_to(root).as_posix() for path in root.glob("docs/**/*.png")}
    for page in (root / "README.md", *root.glob("docs/**/*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+\.png)\)", page.read_text(encoding="utf-8")):
            paths.add((page.parent / link).resolve().relative_to(root.resolve()).as_posix())
    return paths


def find_stale_pictures(pictures: Mapping[str, Callable[[], Picture]] = PICTURES, root: Path = ROOT) -> Iterator[str]:
    """Yield a message for each picture that is unknown, missing, stale or too large."""
    for name in sorted(list_linked_pictures(root) - pictures.keys()):
        yield f"{name}: not in PICTURES of tools/pictures.py: add it there, or delete the file and the links to it"
    for name, chart in pictures.items():
        path = root / name
        if not path.exists():
            yield f"{name}: missing"
            continue
        if read_digest(path) != compute_digest(chart()):
            yield f"{name}: stale"
        if (size := path.stat().st_size) > MAX_BYTES:
            yield f"{name}: {size} bytes, but at most {MAX_BYTES} are allowed: show less in the picture"


def write_picture(path: Path, chart: Picture) -> None:
    """Draw a picture and write it as a PNG file with its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_figure(chart).savefig(
        path, format="png", metadata={_DIGEST_KEYWORD.decode(): compute_digest(chart), "Software": None}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pictures", nargs="*", metavar="PICTURE", help="path, relative to the root of the repository (default: all)"
    )
    parser.add_argument(
        "--check", action="store_true", help="draw nothing; exit code 1 if a picture is stale, missing or too large"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.pictures) - PICTURES.keys():
        parser.error(f"unknown picture {min(unknown)}: use some of {', '.join(PICTURES)}")
    if options.check:
        messages = list(find_stale_pictures())
        print(*messages, sep="\n", end="\n" if messages else "", file=sys.stderr)
        if messages:
            print("run 'python tools/pictures.py' to draw stale and missing pictures", file=sys.stderr)
        return 1 if messages else 0
    for name in options.pictures or PICTURES:
        write_picture(ROOT / name, PICTURES[name]())
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
