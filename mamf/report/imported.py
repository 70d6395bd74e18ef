"""Imported runs of mamf-finder: their figures as printed, labelled as legacy, also beside another run."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from mamf.errors import UsageError
from mamf.logs.legacy import STATISTICS, TIER, FinderRun, Reported
from mamf.logs.run_log import RunLog
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plans import MATMUL
from mamf.regime_names import CLASSIC
from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point, even_ticks
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.text import counted, plain, significant, whole


def finder_document(run: FinderRun, top: int | None = None) -> Document:
    best = sorted(run.rows, key=lambda row: max(row.tflops.values(), default=0.0), reverse=True)
    rest = {name: getattr(run, name) for name in FinderRun.__dataclass_fields__ if name not in ("rows", "best")}
    columns = _columns()
    records = {name: {each.name: each.read(row) for each in columns} for name, row in run.best.items()}
    table = Table(
        columns, best, top=top, remarks=lambda row: row.remarks, label=lambda row: str(row.shape or "unknown")
    )
    blocks: list[Block] = [Lines(list(_title(run))), table, Answer(list(_end(run)))]
    return Document(f"mamf-finder on {run.device}", blocks, {"tier": TIER, **rest, "best": records})


class Shown(NamedTuple):
    """A run beside another: ``figures`` in TFLOPS by shape."""

    label: str
    figures: Mapping[str, float]


def shown_run(name: str, run: FinderRun) -> Shown:
    """The statistic that most rows have; of a shape with several rows the best."""
    counts = {each: sum(each in row.tflops for row in run.rows) for each in ("median", "mean", "stated", "fastest")}
    statistic = max(counts, key=lambda each: counts[each])
    figures: dict[str, float] = {}
    for row in run.rows:
        if row.shape is not None and statistic in row.tflops:
            figures[str(row.shape)] = max(row.tflops[statistic], figures.get(str(row.shape), 0.0))
    return Shown(f"{name}: mamf-finder {run.version or ''} on {run.device or 'unknown device'}, {statistic}", figures)


def shown_log(log: RunLog) -> Shown:
    """Products in classic, which is mamf-finder's loop, or in the first regime of the log."""
    rows = [row for row in log.measurements if row.ok and not row.is_reference and row.operation == MATMUL]
    regimes = list(dict.fromkeys(row.regime for row in rows))
    if not regimes:
        raise UsageError(f"{log.path} holds no products: a log of mamf-finder is compared with a sweep of them")
    regime = CLASSIC if CLASSIC in regimes else regimes[0]
    figures = {str(row.shape): row.best_rate for row in rows if row.regime == regime}
    return Shown(f"{log.path.name}: mamf on {log.header['device']['name']}, {regime}", figures)


def beside_document(a: Shown, b: Shown) -> Document:
    """The shapes of both, without a verdict: figures of mamf-finder have no samples. Raises UsageError without any."""
    shapes = [shape for shape, rate in a.figures.items() if rate and b.figures.get(shape)]
    if not shapes:
        raise UsageError("the two logs have no shape in common")
    ratios = {shape: b.figures[shape] / a.figures[shape] for shape in shapes}
    columns: list[Column[str]] = [
        Column("shape", "shape", str, left=True),
        Column("a_tflops", "A", a.figures.__getitem__, significant),
        Column("b_tflops", "B", b.figures.__getitem__, significant),
        Column("ratio", "B/A", ratios.__getitem__, "{:.4f}".format),
    ]
    blocks: list[Block] = [
        Lines([f"A: {a.label}", f"B: {b.label}"]),
        Table(columns, shapes),
        Lines(["no verdict: a log of mamf-finder has no samples; its loop is the regime classic (docs/measuring.md)"]),
        Answer([f"{counted(len(shapes), 'shape')} of both; median B/A {median(ratios.values()):.4f}"]),
    ]
    return Document("mamf-finder and mamf side by side", blocks)


def beside_chart(runs: Sequence[Shown]) -> Chart:
    """Runs as lines: against M where only M differs, else by work. Raises UsageError without a figure."""
    shapes = {text: MatmulShape.parse(text) for run in runs for text in run.figures}
    if not shapes:
        raise UsageError("nothing to draw: no log has a figure of a known shape")
    is_m = len({(shape.n, shape.k) for shape in shapes.values()}) == 1
    place = {text: float(shape.m if is_m else shape.flop) for text, shape in shapes.items()}
    by_place = sorted(place, key=place.__getitem__)
    lines = []
    for run in runs:
        held = [(place[text], run.figures[text]) for text in by_place if text in run.figures]
        if held:
            lines.append(Line(run.label, tuple(Point(x, rate, rate, rate) for x, rate in held)))
    axis = Axis("M", ticks=even_ticks([shape.m for shape in shapes.values()])) if is_m else Axis("FLOP", is_log=True)
    notes = ("figures of mamf-finder have no samples and no intervals; its loop is the regime classic",)
    return Chart("mamf-finder beside mamf", "", axis, ((Panel("", "tflops", tuple(lines)),),), notes)


def _columns() -> list[Column[Reported]]:
    def tflops(name: str) -> Column[Reported]:
        return Column(f"{name.lower()}_tflops", name, lambda row: row.tflops.get(name), lambda value: f"{value:.1f}")

    return [
        Column("shape", "shape", lambda row: str(row.shape) if row.shape else None, left=True),
        Column("stage", "stage", lambda row: row.stage, plain, 2, True),
        Column("label", "label", lambda row: row.label, plain, 2, True),
        *map(tflops, STATISTICS),
        Column("power_watts", "W", lambda row: row.watts, whole, 4),
        Column("clock_mhz", "MHz", lambda row: row.clock_mhz, whole, 4),
        Column("temperature_celsius", "C", lambda row: row.celsius, whole, 5),
        Column("remarks", "", lambda row: "; ".join(row.remarks)),
    ]


def _title(run: FinderRun) -> Iterator[str]:
    known = (run.device, run.dtype, *(f"{name} {version}" for name, version in run.software.items()))
    yield ", ".join(text for text in known if text) or "unknown device"
    version = run.version or "of unknown version"
    yield f"tier {TIER}: figures of mamf-finder {version}, in TFLOPS, without samples or checks"


def _end(run: FinderRun) -> Iterator[str]:
    for name, best in run.best.items():
        yield f"best {name}: {best.tflops[name]:g} TFLOPS @ {best.shape or 'an unknown shape'}"
    if run.means:
        yield f"mean of all: {', '.join(f'{name} {value:g}' for name, value in run.means.items())} TFLOPS"
    if run.tried is not None:
        # As mamf-finder prints it: 2 days, 14:42:00.
        seconds = run.elapsed_seconds
        elapsed = "" if seconds is None else f" in {datetime.timedelta(seconds=round(seconds))}"
        yield f"tried {counted(run.tried, 'shape')}{elapsed}"
    if not run.is_complete:
        are_scouts = any(best.stage == "scout" for best in run.best.values())
        yield "interrupted: these are scouts, and no ceilings" if are_scouts else "interrupted: no ceilings"
    yield from (f"remark: {remark}" for remark in run.remarks)
