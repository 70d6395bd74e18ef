"""The summary of mamf-finder-all-gpus: a table by GPU, and the median GPU as the node's figure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mamf.logs.finder.grammars import SHAPE
from mamf.logs.finder.rows import figure, sizes_of
from mamf.logs.legacy import FinderRun, Reported
from mamf.operations.matmul.shapes import MatmulShape

TITLE = re.compile(r"^\s*\*\* Node results \((?P<how>.*)\):")
_CELL = r"(?:\d+|-)?"
_GPU = re.compile(
    rf"^\s*(?P<gpu>\d+)\s+(?:(?P<MAMF>\d+)\s+(?P<MAMF_shape>{SHAPE})|n/a)\s+(?:(?P<MSMF>\d+)\s+(?P<MSMF_shape>{SHAPE})|n/a)"
    rf"\s*(?P<watts>{_CELL})\s*(?P<mhz>{_CELL})\s*(?P<celsius>{_CELL})\s+(?P<idle>\d+)%\s*$"
)
_NODE = re.compile(
    rf"^\s*(?P<name>MAMF|MSMF) \(node(?: = (?P<which>[^)]*))?\):\s+(?P<value>\d+(?:\.\d+)?) TFLOPS @ (?P<shape>{SHAPE})"
)
_SLOWEST = re.compile(r"^\s*(?:MAMF|MSMF) slowest / spread:\s.*\d+ GPUs\s*$")
_WARNING = re.compile(r"^\s*(?:warning|note): .*")
_IDLE_PERCENT = 10


def node_run(lines: Sequence[str]) -> FinderRun | None:
    """None where the table is cut before its first figure."""
    gpus = [match for line in lines if (match := _GPU.match(line))]
    rows = [row for gpu in gpus for row in _of_gpu(gpu)]
    best = {match["name"]: _of_node(match) for line in lines if (match := _NODE.match(line))}
    if not rows and not best:
        return None
    missing = {ceiling for row in rows for ceiling in row.tflops} - set(best)
    remarks = [" ".join(line.split()) for line in lines if _SLOWEST.match(line) or _WARNING.match(line)]
    if missing or not best:
        remarks.append("the summary is cut: the node's own figures are not all there")
    measured = sum("MSMF" in row.tflops for row in rows)
    title = next(match["how"] for line in lines if (match := TITLE.match(line)))
    return FinderRun(
        version="v4-node",
        notes=(title,),
        rows=tuple(rows),
        best=best,
        is_complete=not missing and bool(best) and measured == len(gpus),
        remarks=tuple(remarks),
    )


def _of_gpu(gpu: re.Match[str]) -> list[Reported]:
    rows = []
    label = f"GPU {int(gpu['gpu'])}"
    if gpu["MAMF"]:
        rows.append(Reported({"MAMF": float(gpu["MAMF"])}, _shape(gpu["MAMF_shape"]), "confirm", label))
    if gpu["MSMF"]:
        idle = int(gpu["idle"])
        # Watts, clock and temperature of this table are the sustained ones.
        watts, mhz, celsius = (figure(gpu[name] or None) for name in ("watts", "mhz", "celsius"))
        remarks = (f"a sibling idle {idle}% of the time",) if idle >= _IDLE_PERCENT else ()
        shape = _shape(gpu["MSMF_shape"])
        rows.append(Reported({"MSMF": float(gpu["MSMF"])}, shape, "confirm", label, watts, mhz, celsius, remarks))
    return rows


def _of_node(match: re.Match[str]) -> Reported:
    name = match["name"]
    label = f"node, {match['which']}" if match["which"] else "node"
    return Reported({name: float(match["value"])}, _shape(match["shape"]), "confirm", label)


def _shape(text: str) -> MatmulShape | None:
    first, second, third = sizes_of(text) or (0, 0, 0)
    return MatmulShape(first, second, third) if min(first, second, third) else None
