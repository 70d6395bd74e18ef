"""Report and draw runs that mamf-finder logged, and compare them with runs of mamf.

A log of mamf-finder contains only the figures that the program printed, without samples (mamf gives such logs the
tier "legacy"). Without samples there are no intervals, so a comparison with such a log has no verdict.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from mamf.errors import UsageError
from mamf.logs.legacy import FINDER_STATISTICS, LEGACY_TIER, FinderRun, ReportedFigures
from mamf.logs.run_log import RunLog
from mamf.measurement import group_pairs
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.unknown import sets_compute_ceiling
from mamf.plans import BURST, CLASSIC, SUSTAINED
from mamf.report.charts.lines import Axis, Chart, Line, Panel, Point, format_with_decimal_prefix, make_even_ticks
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    format_any_value,
    format_count,
    format_four_digits,
    format_whole_number,
)

#: The regime in which mamf measures a headline figure, by the name that mamf-finder gives to the figure.
_HEADLINE_REGIMES = {"MAMF": BURST, "MSMF": SUSTAINED}
#: Statistics of mamf-finder's measuring loop, as its logs name them. Reports use the statistic that most rows of a log
#: have. If several are equally frequent, reports use the one that comes first in this tuple.
_LOOP_STATISTICS = ("median", "mean", "stated", "fastest")


def make_finder_document(run: FinderRun, top: int | None = None) -> Document:
    """Return the report of a run of mamf-finder.

    Confirmed rows come first, then all other rows. Each of the two groups is sorted by the first figure of its rows. In
    a single group, short trials would come first, because their rates are higher than those of confirmed rows.
    """
    run_fields = {name: getattr(run, name) for name in FinderRun.__dataclass_fields__ if name not in ("rows", "best")}
    columns = _make_finder_columns()
    records = {name: {each.name: each.read_value(row) for each in columns} for name, row in run.best.items()}
    rows = sorted(
        run.rows, key=lambda row: (row.stage == "confirm", next(iter(row.tflops.values()), 0.0)), reverse=True
    )
    table = Table(
        columns,
        rows,
        max_shown_rows=top,
        get_remarks=lambda row: row.remarks,
        get_label=lambda row: str(row.shape or "unknown"),
    )
    blocks: list[Block] = [Lines(list(_describe_finder_run(run))), table, Answer(list(_describe_finder_end(run)))]
    return Document(f"mamf-finder on {run.device}", blocks, {"tier": LEGACY_TIER, **run_fields, "best": records})


class Headline(NamedTuple):
    """A headline figure of a run in TFLOPS with its shape: MAMF (maximum achievable matmul FLOPS, the ceiling in short
    bursts) or MSMF (the sustained ceiling).
    """

    tflops: float
    shape: str


class ComparedRun(NamedTuple):
    """The data of a run for a comparison. The run may be one of mamf or of mamf-finder.

    - ``name``: a label with the log, the program and the device.
    - ``statistic``: the statistic of ``tflops_by_shape``, such as ``median``, and for mamf also its regime.
    - ``headline_by_name``: the headline figures by their names "MAMF" and "MSMF"; a name is missing if the run does not
      have the figure.
    - ``regime``: the regime of ``tflops_by_shape``; empty for mamf-finder. ``dtype``: empty if unknown.
    """

    name: str
    statistic: str
    tflops_by_shape: Mapping[str, float]
    headline_by_name: Mapping[str, Headline]
    regime: str = ""
    dtype: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.statistic}"


def make_compared_run(name: str, log: RunLog | FinderRun) -> ComparedRun:
    """Convert a log of mamf or mamf-finder for a comparison.

    For a log of mamf-finder, compare the statistic (such as the mean) that most of its rows have. If a shape has
    several rows, use the highest rate. Raises UsageError if a log of mamf has no matmuls.

    ``name``: the name of a mamf-finder log in reports. Reports name a log of mamf by its file instead.
    """
    if isinstance(log, RunLog):
        return _convert_run_log(log)
    statistic = max(_LOOP_STATISTICS, key=lambda each: sum(each in row.tflops for row in log.rows))
    measured = ((row.shape, row.tflops[statistic]) for row in log.rows if row.shape and statistic in row.tflops)
    tflops_by_shape = {str(shape): max(rates) for shape, rates in group_pairs(measured).items()}
    headlines = {
        key: Headline(row.tflops[key], str(row.shape)) for key, row in log.best.items() if key in _HEADLINE_REGIMES
    }
    label = (
        f"{name}: mamf-finder {log.version or ''} on {log.device or 'unknown device'}, {log.dtype or 'unknown dtype'}"
    )
    return ComparedRun(label, statistic, tflops_by_shape, headlines, dtype=log.dtype or "")


def _convert_run_log(log: RunLog) -> ComparedRun:
    """Convert the matmuls and ceilings of a mamf log for a comparison with mamf-finder. Use the rates of the regime
    ``classic``, because it measures in the same way as mamf-finder. If the log does not have this regime, use its first
    regime. The rates of ``classic`` are medians, as in most logs of mamf-finder, and not its fastest launches.
    """
    rows = [row for row in log.measurements if row.ok and not row.is_reference and sets_compute_ceiling(row.operation)]
    statistic_by_regime = {row.regime: row.statistic for row in rows}
    if not statistic_by_regime:
        raise UsageError(f"{log.path} has no matmuls: give a log of 'mamf sweep' or 'mamf find'")
    regime = CLASSIC if CLASSIC in statistic_by_regime else next(iter(statistic_by_regime))
    tflops_by_shape = {str(row.shape): row.compute_rate(row.statistic) for row in rows if row.regime == regime}
    ceilings = log.ceilings if log.plan.is_search else {}
    headlines = {
        name: Headline(ceilings[headline_regime].rate, str(ceilings[headline_regime].shape))
        for name, headline_regime in _HEADLINE_REGIMES.items()
        if headline_regime in ceilings
    }
    dtypes = " ".join(dict.fromkeys(problem.dtype for problem in log.plan.problems))
    return ComparedRun(
        f"{log.path.name}: mamf on {log.header['device']['name']}, {dtypes}",
        f"{regime} {statistic_by_regime[regime]}",
        tflops_by_shape,
        headlines,
        regime,
        dtypes,
    )


def make_side_by_side_document(a: ComparedRun, b: ComparedRun, *, top: int | None = None) -> Document:
    """Return a report that compares two runs without a verdict: their MAMF and MSMF if both runs have them, or their
    common shapes. ``top``: the maximum number of rows for people; None for all rows. Raises UsageError if the runs have
    different dtypes or nothing in common.
    """
    if a.dtype and b.dtype and a.dtype != b.dtype:
        raise UsageError(f"the two logs have different dtypes, {a.dtype} and {b.dtype}: give logs of the same dtype")
    names = [name for name in a.headline_by_name if name in b.headline_by_name]
    if names:
        figures = [{name: each.headline_by_name[name].tflops for name in names} for each in (a, b)]
    else:
        figures = [dict(a.tflops_by_shape), dict(b.tflops_by_shape)]
        names = [shape for shape, rate in a.tflops_by_shape.items() if rate and b.tflops_by_shape.get(shape)]
    if not names:
        raise UsageError("the two logs have no shape in common: give logs with rates of the same shapes")
    is_headline = names[0] in _HEADLINE_REGIMES
    ratios = {name: figures[1][name] / figures[0][name] for name in names}
    columns: list[Column[str]] = [
        Column("figure" if is_headline else "shape", "figure" if is_headline else "shape", str, is_left_aligned=True),
        Column("a_tflops", "A", figures[0].__getitem__, format_four_digits),
        *(
            [Column("a_shape", "A at", lambda name: a.headline_by_name[name].shape, is_left_aligned=True)]
            if is_headline
            else []
        ),
        Column("b_tflops", "B", figures[1].__getitem__, format_four_digits),
        *(
            [Column("b_shape", "B at", lambda name: b.headline_by_name[name].shape, is_left_aligned=True)]
            if is_headline
            else []
        ),
        Column("ratio", "B/A", ratios.__getitem__, "{:.4f}".format),
    ]
    headline_ratios = ", ".join(f"{name} B/A {ratios[name]:.4f}" for name in names) if is_headline else ""
    shape_ratios = f"{format_count(len(names), 'shape')} in both logs; median B/A {median(ratios.values()):.4f}"
    blocks: list[Block] = [
        Lines(
            [
                f"A: {a.name if is_headline else a.label}",
                f"B: {b.name if is_headline else b.label}",
                "rates in TFLOPS; B/A above 1: B is faster",
            ]
        ),
        Table(columns, names, max_shown_rows=top),
        Lines([f"mamf gives no verdict: {_explain_missing_verdict([a, b], is_headline)} (docs/from-mamf-finder.md)"]),
        Answer([headline_ratios or shape_ratios]),
    ]
    return Document("mamf-finder and mamf side by side", blocks)


def _explain_missing_verdict(runs: Sequence[ComparedRun], is_headline: bool = False) -> str:
    """Explain why a comparison with mamf-finder has no verdict. ``is_headline``: whether the runs are compared by MAMF
    and MSMF instead of by shapes.
    """
    regimes = [run.regime for run in runs if run.regime]
    if is_headline and regimes:
        return "logs of mamf-finder contain no samples, and mamf-finder does not confirm ceilings as mamf does"
    difference = (
        "" if {CLASSIC}.issuperset(regimes) else ", and its measuring loop does not load the device as mamf does"
    )
    return f"logs of mamf-finder contain no samples{difference}"


def make_side_by_side_chart(runs: Sequence[ComparedRun]) -> Chart:
    """Draw the rates of each run as a line. The horizontal axis is M if all shapes have the same N and K, otherwise the
    FLOP of the shape. Raises UsageError if no run has a rate with a shape.
    """
    shapes = {text: MatmulShape.parse(text) for run in runs for text in run.tflops_by_shape}
    if not shapes:
        raise UsageError("there is nothing to draw, because no rate in the logs has a shape: give other logs")
    is_m = len({(shape.n, shape.k) for shape in shapes.values()}) == 1
    x_by_shape = {text: float(shape.m if is_m else shape.flop) for text, shape in shapes.items()}
    by_x = sorted(x_by_shape, key=x_by_shape.__getitem__)
    lines = [
        Line(
            run.label,
            tuple(
                Point(x_by_shape[text], *[run.tflops_by_shape[text]] * 3)
                for text in by_x
                if text in run.tflops_by_shape
            ),
        )
        for run in runs
        if run.tflops_by_shape
    ]
    first_shape = next(iter(shapes.values()))
    axis = Axis(
        f"M (N = {first_shape.n}, K = {first_shape.k})", ticks=make_even_ticks([shape.m for shape in shapes.values()])
    )
    if not is_m:
        first, last = (math.log10(x_by_shape[text]) for text in (by_x[0], by_x[-1]))
        ticks = [step * 10.0**power for power in range(math.floor(first), math.ceil(last) + 1) for step in (1, 2, 5)]
        axis = Axis(
            "FLOP", is_logarithmic=True, ticks=tuple((tick, format_with_decimal_prefix(tick)) for tick in ticks)
        )
    title = f"mamf-finder{' and mamf' if any(run.regime for run in runs) else ''}" + (
        f", {runs[0].statistic}" if len(runs) == 1 else ""
    )
    if len(runs) == 1 and not is_m:
        headlines = {name: each for name, each in runs[0].headline_by_name.items() if each.shape in x_by_shape}
        lines += [Line(name, (Point(x_by_shape[each.shape], *[each.tflops] * 3),)) for name, each in headlines.items()]
        title = (
            ", ".join(f"{name} {format_four_digits(each.tflops)} TFLOPS" for name, each in headlines.items()) or title
        )
    return Chart(
        title,
        "",
        axis,
        ((Panel("", tuple(lines)),),),
        is_m,
        comes_with_intervals=False,
        notes=(_explain_missing_verdict(runs),),
    )


def _make_finder_columns() -> list[Column[ReportedFigures]]:
    def make_tflops_column(name: str) -> Column[ReportedFigures]:
        return Column(f"{name.lower()}_tflops", name, lambda row: row.tflops.get(name), lambda value: f"{value:.1f}")

    return [
        Column("shape", "shape", lambda row: str(row.shape) if row.shape else None, is_left_aligned=True),
        Column("stage", "stage", lambda row: row.stage, format_any_value, 2, True),
        Column("label", "label", lambda row: row.label, format_any_value, 2, True),
        *map(make_tflops_column, FINDER_STATISTICS),
        Column("power_watts", "W", lambda row: row.watts, format_whole_number, 4),
        Column("clock_mhz", "MHz", lambda row: row.clock_mhz, format_whole_number, 4),
        Column("temperature_celsius", "C", lambda row: row.celsius, format_whole_number, 5),
        Column("remarks", "", lambda row: "; ".join(row.remarks)),
    ]


def _describe_finder_run(run: FinderRun) -> Iterator[str]:
    known = (run.device, run.dtype, *(f"{name} {version}" for name, version in run.software.items()))
    yield ", ".join(text for text in known if text) or "unknown device"
    yield (
        f"tier {LEGACY_TIER}: figures of mamf-finder {run.version or 'of an unknown version'}, in TFLOPS, without "
        "samples or checks"
    )


def _describe_finder_end(run: FinderRun) -> Iterator[str]:
    for name, best in run.best.items():
        title = f"{name} ({best.label})" if best.label else f"best {name}"
        note = (
            " (chosen by mamf-finder, which ignores rows whose rate was not steady)"
            if any(row.tflops.get(name, 0.0) > best.tflops[name] for row in run.rows)
            else ""
        )
        yield f"{title}: {best.tflops[name]:g} TFLOPS @ {best.shape or 'an unknown shape'}{note}"
    if run.means:
        yield f"mean of all: {', '.join(f'{name} {value:g}' for name, value in run.means.items())} TFLOPS"
    if run.tried is not None:
        # Print the duration as mamf-finder does: 2 days, 14:42:00.
        seconds = run.elapsed_seconds
        elapsed = "" if seconds is None else f" in {datetime.timedelta(seconds=round(seconds))}"
        yield f"tried {format_count(run.tried, 'shape')}{elapsed}"
    if not run.is_complete:
        yield "the run was interrupted, so it has no ceilings"
    yield from (f"remark: {remark}" for remark in run.remarks)
