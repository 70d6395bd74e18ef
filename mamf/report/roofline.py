"""Compare the rates of rows with their roofs in reports and charts. The roof of a row is the highest rate that the
compute ceiling and the bandwidth ceiling of the device allow for the row's FLOP per byte.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mamf.ceilings.ceiling import (
    MAX_COMPARABLE_DRIFT_SHARE,
    MAX_SHARE_OF_CEILING,
    Ceiling,
    Ceilings,
    has_card_drifted,
)
from mamf.ceilings.roof import (
    COMPUTE_BOUND,
    MEMORY_LEVEL,
    MEMORY_LEVELS,
    NEAR_LIMIT_SHARE,
    RooflinePoint,
    Roofs,
    make_roofline_point,
)
from mamf.measurement import Measurement, group_pairs
from mamf.operations.matmul.shapes import MatmulShape, name_layer_weights
from mamf.operations.unknown import get_operation
from mamf.plans import CHECKING_REGIMES, SUSTAINED
from mamf.report.charts.logs import describe_machine_briefly
from mamf.report.charts.picture import (
    CEILING_LINE_STYLE,
    FILE_WIDTH_INCHES,
    PANEL_WIDTH_INCHES,
    SMALL_FONT_POINTS,
    TEXT_FONT_POINTS,
    TOOLTIPS_BY_ARTIST,
    DrawablePanel,
    LegendEntries,
    Picture,
    choose_styles,
    style_axes,
)
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    choose_unit,
    format_count,
    format_four_digits,
    format_percent,
    format_rate,
    make_interval_columns,
    split_shared_parts,
)
from mamf.report.shares import LOW_CEILING_TEXT, describe_missing_roofs, format_drift

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class NamedCeiling(NamedTuple):
    """A ceiling with its name in reports: the dtype of a compute ceiling, or the memory level (such as memory or cache)
    of a bandwidth ceiling.

    ``unit``, ``factor``: the unit in which the report shows the rate, and the factor that converts the rate to it.
    """

    name: str
    ceiling: Ceiling
    unit: str
    factor: float


def select_roofline_points(rows: Iterable[Measurement], roofs: Roofs, ceilings: Ceilings) -> list[RooflinePoint]:
    """Return a point of the roofline chart for each measured row of a run. Skip reference rows, which a run repeats to
    see drift, rows of a search for ceilings, rows of a verification, and rows that a link between devices limits.

    ``ceilings``: the matmul ceilings in the log of this run. The run measured the matmuls of these ceilings before and
    after its rows, so they, and not ``roofs``, show whether the speed of the device drifted.
    """
    selected = [
        row
        for row in rows
        if row.ok and not row.is_reference and not row.phase and row.regime not in CHECKING_REGIMES
        if not get_operation(row.operation).uses_shared_links
    ]
    layers = name_layer_weights(row.shape for row in selected if isinstance(row.shape, MatmulShape))
    return [
        replace(
            make_roofline_point(row, roofs, format_row_name(row), layers.get(row.shape, "")),
            has_drifted=has_card_drifted(row, ceilings, MAX_COMPARABLE_DRIFT_SHARE),
        )
        for row in selected
    ]


def format_row_name(row: Measurement | Ceiling) -> str:
    """Return a name for a row: its shape, and the fields that identify its problem."""
    return ", ".join([str(row.shape), *get_operation(row.problem.operation).describe_problem(row.problem)])


def drop_shared_fields(points: Sequence[RooflinePoint]) -> tuple[list[RooflinePoint], str]:
    """Return the points with new names, and a text with the fields of a problem that all points share. The name of a
    point consists of its shape and the other fields of its problem.
    """
    problems = [point.row.problem for point in points]
    fields, shared = split_shared_parts(
        [", ".join(get_operation(each.operation).describe_problem(each)) for each in problems]
    )
    names = [", ".join(filter(None, (str(point.row.shape), rest))) for point, rest in zip(points, fields, strict=True)]
    return [replace(point, name=name) for point, name in zip(points, names, strict=True)], shared


def make_roofline_document(
    roofs: Roofs, points: Sequence[RooflinePoint], first_lines: Sequence[str], top: int | None = None
) -> Document:
    """Return the report of a roofline: the ceilings, the rows as shares of their roofs, and a conclusion. CSV contains
    the rows, or the ceilings if there are no rows.

    - ``first_lines``: the lines above the tables.
    - ``top``: the maximum number of rows for people; None for all. Rows that are nearest to their roof come first.

    Columns ``balance_*`` contain balance points: the FLOP per byte at which a compute ceiling and the bandwidth of a
    memory level limit a kernel equally.
    """
    points, shared_fields = drop_shared_fields(points)
    best_first = sorted(points, key=lambda point: -1.0 if point.roof_share is None else point.roof_share, reverse=True)
    ceilings = [
        NamedCeiling(name, each, *choose_unit(each.unit, [other.rate for other in kind.values()]))
        for kind in (roofs.matmul_ceilings, roofs.bandwidth_ceilings)
        for (name, _), each in kind.items()
    ]
    columns: list[Column[NamedCeiling]] = [
        Column("roof", "roof", lambda named: named.name, is_left_aligned=True),
        Column("regime", "regime", lambda named: named.ceiling.regime, is_left_aligned=True),
        Column("", "rate", lambda named: f"{format_four_digits(named.factor * named.ceiling.rate)} {named.unit}"),
        Column("rate", "", lambda named: named.ceiling.rate),
        Column("unit", "", lambda named: named.ceiling.unit),
        *(
            Column(
                f"balance_{level}_flop_per_byte",
                f"FLOP/byte of {level}",
                functools.partial(compute_balance_point, roofs=roofs, level=level),
                format_four_digits,
                drop_priority=1,
            )
            for level in MEMORY_LEVELS
        ),
        *make_interval_columns(
            lambda named: named.ceiling.interval,
            "rate_{}",
            read_shown_interval=lambda named: named.ceiling.interval.scale(named.factor),
        ),
        Column("at", "at", lambda named: format_row_name(named.ceiling), drop_priority=3, is_left_aligned=True),
        Column("kernel", "kernel", lambda named: named.ceiling.kernel, drop_priority=2, is_left_aligned=True),
    ]
    blocks: list[Block] = [
        Lines(first_lines),
        Table(columns, ceilings, key="roofs"),
        Table(POINT_COLUMNS, best_first, shared_fields, max_shown_rows=top),
        Answer(list(describe_roofline_result(roofs, best_first))),
    ]
    return Document(
        f"Roofs of {roofs.device}", blocks, {"device": roofs.device}, main_table_key="rows" if points else "roofs"
    )


def compute_balance_point(named: NamedCeiling, roofs: Roofs, level: str) -> float | None:
    bandwidth, ceiling = roofs.bandwidth_ceilings.get((level, named.ceiling.regime)), named.ceiling
    return ceiling.rate / bandwidth.rate if bandwidth and ceiling.unit == "TFLOPS" else None


POINT_COLUMNS: list[Column[RooflinePoint]] = [
    Column("row", "", lambda point: format_row_name(point.row)),
    Column("", "row", lambda point: point.name, is_left_aligned=True, min_characters=40),
    Column("kernel", "kernel", lambda point: point.row.kernel, is_left_aligned=True),
    Column("regime", "regime", lambda point: point.row.regime, drop_priority=3, is_left_aligned=True),
    Column("dtype", "dtype", lambda point: point.row.problem.dtype, drop_priority=3, is_left_aligned=True),
    Column("intensity_flop_per_byte", "FLOP/byte", lambda point: point.intensity, format_four_digits, drop_priority=2),
    Column("", "rate", lambda point: format_rate(point.row.comparable_rate, point.row.work.unit), drop_priority=1),
    Column("rate", "", lambda point: point.row.comparable_rate),
    Column("unit", "", lambda point: point.row.work.unit),
    Column("compute_rate_tflops", "", lambda point: point.tflops),
    Column(
        "", "roof", lambda point: point.roof_rate and format_rate(point.roof_rate, point.row.work.unit), drop_priority=2
    ),
    Column("roof", "", lambda point: point.roof_rate),
    Column("share_of_roof", "% of roof", lambda point: point.roof_share, format_percent),
    Column("bound_by", "bound by", lambda point: point.bound, drop_priority=1, is_left_aligned=True),
]


def describe_roofline_result(roofs: Roofs, best_first: Sequence[RooflinePoint]) -> Iterable[str]:
    """Yield lines that say how many rows are near their roof, which row is nearest, how many rows are not comparable
    because the speed of the device drifted, and which ceilings are missing or too noisy. Without rows, name the regimes
    without a memory bandwidth, and yield lines with the balance point of each dtype: the FLOP per byte below which
    memory bandwidth limits the rate.

    ``best_first``: the rows by share of roof, the highest first.
    """
    known = [point for point in best_first if point.roof_share is not None]
    if known:
        near_count, nearest = sum((point.roof_share or 0.0) >= NEAR_LIMIT_SHARE for point in known), known[0]
        yield (
            f"near the limit ({100 * NEAR_LIMIT_SHARE:.0f} % of the roof and more): "
            f"{near_count} of {format_count(len(known), 'row')}; "
            f"nearest: {nearest.name} by {nearest.row.kernel}, "
            f"{format_percent(nearest.roof_share or 0.0)} % of the {nearest.bound} roof"
        )
    # Rows whose arrays are in a cache can exceed the memory roof, but no row can be this far above the compute roof.
    if any(point.bound == COMPUTE_BOUND and (point.roof_share or 0.0) > MAX_SHARE_OF_CEILING for point in known):
        yield f"compute roof: {LOW_CEILING_TEXT}"
    if drifted_count := sum(point.has_drifted for point in known):
        yield (
            f"{format_drift()} since the ceiling was measured: do not compare the rates of "
            f"{format_count(drifted_count, 'row')} with others"
        )
    for name, regime in roofs.noisy_keys:
        yield f"no {name} roof in {regime}, because its ceiling is too noisy: measure it again while nothing else runs"
    for level in roofs.unconfirmed_levels:
        yield f"{level}: the highest of the first measurements, not a ceiling that a search confirmed"
    yield from describe_missing_roofs((point.row for point in best_first), roofs)
    if best_first:
        return
    if regimes := [each for each in roofs.regimes if (MEMORY_LEVEL, each) not in roofs.bandwidth_ceilings]:
        find_command = f"mamf find --operation bandwidth --set pattern=read --regime {' '.join(regimes)}"
        yield f"no memory bandwidth is known in {' and '.join(regimes)}: measure it with '{find_command}'"
    for (dtype, regime), ceiling in roofs.matmul_ceilings.items():
        balance = compute_balance_point(NamedCeiling(dtype, ceiling, ceiling.unit, 1.0), roofs, MEMORY_LEVEL)
        if balance is not None:
            yield (
                f"{dtype} in {regime} is bound by memory below {format_four_digits(balance)} FLOP/byte, "
                "and by computing above that"
            )


#: A place in the chart: (FLOP per byte, TFLOPS).
DataPoint = tuple[float, float]
#: Factors by which the axes extend beyond the outermost data: to the left, to the right, and both up and down.
_LEFT_MARGIN_FACTOR, _RIGHT_MARGIN_FACTOR, _VERTICAL_MARGIN_FACTOR = 14.0, 4.0, 2.0
#: Two rising ceilings both get a label only if their rates differ by at least this share. Otherwise readers could not
#: tell which of the two lines a label belongs to.
_MIN_LABELED_DIFFERENCE_SHARE = 0.05
#: If a chart has at most this many series (markers that are joined by a line), each series gets a label. Otherwise only
#: the highest and the lowest series get one.
_MAX_LABELED_SERIES = 3
_MARKER_SIZE_POINTS = 9  # diameter of a marker in points
_BURST_LINE_WIDTH_POINTS, _SUSTAINED_LINE_WIDTH_POINTS = 2.4, 1.0  # line widths of ceilings by regime, in points
#: The height of the chart on a web page, in inches.
_PAGE_HEIGHT_INCHES = 4.8
# As shares of the axes in an image file: the height of a label, the width of a letter (with a reserve, because labels
# to the right of the axes make the axes narrower), and the distance between a label and its marker or line.
_LABEL_HEIGHT_SHARE, _LETTER_WIDTH_SHARE, _LABEL_DISTANCE_SHARE = 0.028, 0.0105, 0.015


@dataclass(frozen=True)
class CeilingLine:
    """The line of a ceiling in the chart: flat for the compute ceiling of a dtype, rising for the bandwidth of a memory
    level. Lines with an empty ``label`` get no label.
    """

    label: str
    start: DataPoint
    end: DataPoint
    is_sustained: bool

    @property
    def is_flat(self) -> bool:
        return self.start[1] == self.end[1]


@dataclass(frozen=True)
class RooflineMarker:
    """The marker of a row in the chart.

    - ``label``: identifies the row.
    - ``kernel``: the name of the kernel, which decides the color and shape of the marker.
    - ``series``: a line joins all markers with the same kernel and series; empty if no line leads to this marker.
    - ``has_roof``: whether the roof of the row is known. If not, the marker is hollow.
    """

    label: str
    kernel: str
    position: DataPoint
    series: str = ""
    has_roof: bool = True


@dataclass(frozen=True)
class RooflineChart(Picture):
    lines: tuple[CeilingLine, ...]
    markers: tuple[RooflineMarker, ...]
    x_limits: tuple[float, float]

    height_inches = 8.0

    def make_panel_rows(self) -> list[list[DrawablePanel]]:
        described = "; ".join(
            [
                self.title,
                *(line.label + (", sustained" if line.is_sustained else "") for line in self.lines if line.label),
            ]
        )
        return [
            [
                DrawablePanel(
                    described,
                    functools.partial(_draw_roofline, chart=self),
                    size_inches=(PANEL_WIDTH_INCHES, _PAGE_HEIGHT_INCHES),
                )
            ]
        ]

    def make_legend(self) -> LegendEntries:
        styles = choose_styles(marker.kernel for marker in self.markers)
        return [
            (name, {"linewidth": 0, "markersize": _MARKER_SIZE_POINTS, **vars(styles[name])})
            for name in dict.fromkeys(marker.kernel for marker in self.markers)
        ]


def make_roofline_chart(roofs: Roofs, points: Sequence[RooflinePoint], header: Mapping[str, Any]) -> RooflineChart:
    """Make a roofline chart of the rows that have FLOP. ``header``: the header of any log from the device."""
    markers = []
    for point in drop_shared_fields(points)[0]:
        if point.tflops is not None and point.intensity is not None:
            regime = ", sustained" if point.row.regime == SUSTAINED else ""
            series = f"{point.layer_name}{regime}" if point.layer_name else ""
            markers.append(
                RooflineMarker(
                    f"{point.name}{regime}",
                    point.row.kernel,
                    (point.intensity, point.tflops),
                    series,
                    point.roof_share is not None,
                )
            )
    # The FLOP per byte at which each flat ceiling meets each rising ceiling.
    balance_points = [
        flat.rate / rising.rate
        for flat in roofs.matmul_ceilings.values()
        for rising in roofs.bandwidth_ceilings.values()
    ]
    shown = [marker.position[0] for marker in markers if marker.position[0]] + balance_points
    x_limits = min(shown, default=1.0) / _LEFT_MARGIN_FACTOR, max(shown, default=1.0) * _RIGHT_MARGIN_FACTOR
    notes = [
        "thick lines: burst ceilings; thin lines: sustained ones"
        if len(roofs.regimes) > 1
        else f"lines: {', '.join(roofs.regimes)} ceilings",
        "bytes count each operand read once and each result written once",
        *(f"{level}: not confirmed by a search" for level in roofs.unconfirmed_levels),
        "joined marks: a layer with more tokens from left to right" if any(each.series for each in markers) else "",
        "" if all(each.has_roof for each in markers) else "hollow marks: no ceiling in the regime of the mark is known",
    ]
    return RooflineChart(
        f"Roofline, {', '.join(dict.fromkeys(dtype for dtype, _ in roofs.matmul_ceilings)) or 'only bandwidth'}",
        describe_machine_briefly(header),
        tuple(_yield_roof_lines(roofs, x_limits)),
        tuple(markers),
        x_limits,
        notes=("; ".join(filter(None, notes)),),
    )


def _yield_roof_lines(roofs: Roofs, x_limits: tuple[float, float]) -> Iterable[CeilingLine]:
    left, right = x_limits
    # The rates of the rising ceilings that were added so far. A new ceiling gets no label if its rate is close to one
    # of them.
    earlier_rates: list[float] = []
    for regime in roofs.regimes:
        compute = {
            dtype: each.rate
            for (dtype, ceiling_regime), each in roofs.matmul_ceilings.items()
            if ceiling_regime == regime
        }
        bandwidth = {
            level: each.rate
            for (level, ceiling_regime), each in roofs.bandwidth_ceilings.items()
            if ceiling_regime == regime
        }
        for level, rate in bandwidth.items():
            is_close = any(abs(rate / other - 1) < _MIN_LABELED_DIFFERENCE_SHARE for other in earlier_rates)
            earlier_rates.append(rate)
            label = "" if is_close else f"{level} {format_rate(rate, 'TB/s')}"
            ends_at = max(compute.values()) / rate if compute else right
            yield CeilingLine(label, (left, left * rate), (ends_at, ends_at * rate), regime == SUSTAINED)
        for dtype, rate in compute.items():
            begins_at = rate / max(bandwidth.values()) if bandwidth else left
            yield CeilingLine(
                f"{dtype} {format_four_digits(rate)}", (begins_at, rate), (right, rate), regime == SUSTAINED
            )


# -- drawing with matplotlib -------------------------------------------------------------------------------------------


def _draw_roofline(axes: Axes, chart: RooflineChart) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    style_axes(axes)
    heights = [y for line in chart.lines for _, y in (line.start, line.end)] + [
        marker.position[1] for marker in chart.markers
    ]
    axes.set_xlim(*chart.x_limits)
    # If all ceilings are too noisy, there is no roof, and perhaps no marker either.
    axes.set_ylim(
        min(heights, default=1.0) / _VERTICAL_MARGIN_FACTOR, max(heights, default=1.0) * _VERTICAL_MARGIN_FACTOR
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOP per byte", fontsize=TEXT_FONT_POINTS)
    axes.set_ylabel("TFLOPS", fontsize=TEXT_FONT_POINTS)
    for line in chart.lines:
        width = _SUSTAINED_LINE_WIDTH_POINTS if line.is_sustained else _BURST_LINE_WIDTH_POINTS
        axes.plot(*zip(line.start, line.end, strict=True), **{**CEILING_LINE_STYLE, "linewidth": width})
    styles = choose_styles(marker.kernel for marker in chart.markers)
    for group in group_markers_by_series(chart.markers):
        positions = zip(*(marker.position for marker in group), strict=True)
        axes.plot(*positions, color=styles[group[0].kernel].color, linewidth=1, alpha=0.6, zorder=3)
    for marker in chart.markers:
        x, y = marker.position
        marker_style: dict[str, Any] = {
            "markersize": _MARKER_SIZE_POINTS,
            "markeredgecolor": "white" if marker.has_roof else styles[marker.kernel].color,
            "markerfacecolor": styles[marker.kernel].color if marker.has_roof else "white",
            "linestyle": "none",
            "zorder": 4,
        }
        (drawn,) = axes.plot(x, y, **vars(styles[marker.kernel]), **marker_style)
        TOOLTIPS_BY_ARTIST[drawn] = [
            f"{marker.kernel}, {marker.label}: {format_four_digits(y)} TFLOPS at {x:.3g} FLOP per byte"
        ]
    _draw_labels(axes, chart)


def _draw_labels(axes: Axes, chart: RooflineChart) -> None:
    """Label flat ceilings to the right of the axes, rising ceilings in the upper left corner of the axes, and each
    series at its first marker. If there are more than three series, label only the highest and the lowest of them. Move
    a label down until it covers no other label and no marker. Join the labels of ceilings to their lines.
    """
    width_factor = FILE_WIDTH_INCHES * axes.figure.dpi / axes.figure.bbox.width
    label_height = _LABEL_HEIGHT_SHARE * chart.height_inches * axes.figure.dpi / axes.figure.bbox.height
    distance, letter_width = _LABEL_DISTANCE_SHARE * width_factor, _LETTER_WIDTH_SHARE * width_factor
    to_shares = axes.transData + axes.transAxes.inverted()

    def write_label(text: str, place: DataPoint, target: DataPoint | None = None) -> None:
        style: dict[str, Any] = {
            "arrowprops": {"arrowstyle": "-", "color": "#999999", "linewidth": 0.7} if target else None,
            "bbox": {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
            "fontsize": SMALL_FONT_POINTS,
            "va": "center",
            "zorder": 5,
        }
        axes.annotate(text, target or place, place, "axes fraction", "axes fraction", **style)

    def find_x(line: CeilingLine, y: float) -> float:
        """Return the place of a rising line at the height ``y``, both as shares of the axes."""
        (left, bottom), (right, top) = to_shares.transform((line.start, line.end))
        return float(left + (right - left) * (y - bottom) / (top - bottom))

    next_y = {True: math.inf, False: math.inf}  # the highest free place for labels of flat and of rising ceilings
    for line in sorted(chart.lines, key=lambda each: (-each.end[1], each.end[0])):
        if line.label:
            end_y = to_shares.transform(line.end)[1]
            y = min(end_y if line.is_flat else end_y - label_height, next_y[line.is_flat])
            next_y[line.is_flat] = y - label_height
            if line.is_flat:
                write_label(line.label, (1 + distance, y), (1, end_y))
            else:
                first_x = min(find_x(each, y) for each in chart.lines if not each.is_flat)
                x = max(distance, first_x - 2 * distance - letter_width * len(line.label))
                write_label(line.label, (x, y), (find_x(line, y), y))
    occupied = [(x, x, y) for x, y in (to_shares.transform(marker.position) for marker in chart.markers)]
    firsts = sorted((group[0] for group in group_markers_by_series(chart.markers)), key=lambda each: -each.position[1])
    for marker in firsts if len(firsts) <= _MAX_LABELED_SERIES else (firsts[0], firsts[-1]):
        x, y = to_shares.transform(marker.position)
        left, right = x + distance, x + distance + letter_width * len(marker.series)
        while any(left < end and start < right and abs(y - other) < label_height for start, end, other in occupied):
            y -= label_height / 4
        occupied.append((left, right, y))
        write_label(marker.series, (left, y))


def group_markers_by_series(markers: Iterable[RooflineMarker]) -> list[list[RooflineMarker]]:
    """Group the markers that a line joins: those of one kernel and series. Sort each group from left to right."""
    groups = group_pairs(((marker.kernel, marker.series), marker) for marker in markers if marker.series)
    return [sorted(group, key=lambda marker: marker.position) for group in groups.values()]
