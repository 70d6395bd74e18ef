"""Make columns for tables of measured rows of any operation, and group and rank the rows. Describe rows in words:
remarks, failures, the best row, and the devices that shared a run.

A reference is a row that a run measures again and again, to see how the speed of the device drifts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import fmean, geometric_mean, median
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import CONFIRM_PHASE, compute_card_drift
from mamf.logs.recording import RunEnd
from mamf.logs.records import round_to_six_digits
from mamf.logs.run_log import compute_device_speeds
from mamf.measurement import MAX_SHORT_LAUNCH_SECONDS, Measurement, group_pairs
from mamf.operations.unknown import get_operation
from mamf.plans import ALGORITHM_PHASE
from mamf.report.document import (
    UNKNOWN_INTERVAL_REASON,
    Column,
    choose_unit,
    format_any_value,
    format_count,
    format_four_digits,
    format_interval,
    format_rate,
    format_whole_number,
    label_kernel,
    make_clock_columns,
    make_columns_from_mappings,
    make_rate_column,
    make_rate_key,
    shorten_line,
)
from mamf.report.shares import ShareCalculator, describe_clock, make_problem_title_in_words
from mamf.statistics import Interval

#: A function that returns the rate of a row divided by the rate of its baseline, or None if there is no baseline.
GetSpeedUp = Callable[[Measurement], float | None]


def make_row_columns(
    rows: Sequence[Measurement], shares: ShareCalculator, get_speed_up: GetSpeedUp, has_one_shape: bool = False
) -> list[Column[Measurement]]:
    """Return the columns of a table of measured rows.

    - ``rows``: all rows of the table; their rates decide the unit.
    - ``get_speed_up``: returns the rate of a row divided by the rate of its baseline.
    - ``has_one_shape``: whether all rows have the same shape. Then the table compares kernels.
    """
    plan = shares.header.get("plan", {})
    layers = dict(zip(plan.get("shapes", ()), plan.get("layers", ()), strict=False))
    rate, statistics = make_rate_columns(rows)
    return [
        Column("operation", "", lambda row: row.operation),
        Column("regime", "", lambda row: row.regime),
        *make_columns_from_mappings(
            rows, lambda row: get_operation(row.operation).make_problem_record(row.problem), has_titles=False
        ),
        Column(
            "kernel",
            "kernel",
            lambda row: row.kernel,
            lambda name: label_kernel(name, shares.header),
            is_left_aligned=True,
        ),
        Column("shape", "" if has_one_shape else "shape", lambda row: str(row.shape), format_any_value, 1, True),
        *make_columns_from_mappings(
            rows, lambda row: get_operation(row.operation).make_shape_record(row.shape), has_titles=False
        ),
        *(
            [Column("layer", "layer", lambda row: layers.get(str(row.shape)), is_left_aligned=True, drop_priority=3)]
            if layers
            else ()
        ),
        Column("status", "", lambda row: row.status),
        Column("reason", "", lambda row: row.reason),
        *rate,
        Column("half_width_percent", "", get_half_width_percent),
        Column(  # The interval of the median says nothing about the fastest launch.
            "",
            "+-%",
            lambda row: get_half_width_percent(row) if row.ranking_statistic == row.statistic else None,
            lambda value: f"{value:.2f}",
            2,
        ),
        *statistics,
        *(make_device_columns(rows) if any(row.device_index is not None for row in rows) else ()),
        *shares.make_share_columns(rows),
        Column("speed_up", "speed-up" if has_one_shape else "", get_speed_up, lambda gain: f"{gain:.2f}x", 2),
        *make_time_columns(),
        *make_columns_from_mappings(
            rows, lambda row: get_operation(row.operation).make_columns(row) if row.ok else {}, 4
        ),
        Column("reference_tflops", "", lambda row: row.details.get("reference_tflops")),
        Column(
            "state",
            "drift %",
            lambda row: compute_card_drift(row, shares.measured_ceilings),
            lambda drift: f"{100 * drift:+.1f}",
            5,
        ),
        Column("launches", "launches", lambda row: row.launch_count, drop_priority=7),
        *make_clock_columns(lambda row: row.conditions, 3),
        Column("power_watts", "W", lambda row: row.conditions.watts, format_whole_number, 5),
        Column("temperature_celsius", "C", lambda row: row.conditions.celsius, format_whole_number, 6),
        Column("relative_error", "error", lambda row: row.relative_error, lambda error: f"{error:.1e}", 6),
        Column("throttle_reasons", "", lambda row: " ".join(row.conditions.throttle_reasons)),
        Column("implausible_samples", "", lambda row: len(row.implausible_samples)),
        Column("flop", "", lambda row: row.flop),
        Column("bytes", "", lambda row: row.work.nbytes),
        Column("is_reference", "", lambda row: row.is_reference),
        Column("phase", "", lambda row: row.phase),
        Column("round", "", lambda row: row.round_number),
    ]


def make_rate_columns(rows: Sequence[Measurement]) -> tuple[list[Column[Measurement]], list[Column[Measurement]]]:
    """Return the column of the rate, and columns of its interval and of other statistics. All columns have the same
    unit, which makes the rates of ``rows`` easy to read.
    """
    unit = rows[0].work.unit if rows else "TFLOPS"
    factor = choose_unit(unit, [row.best_rate for row in rows if row.ok])[1]

    def make_statistic_column(name: str, title: str, drop_priority: int = 7) -> Column[Measurement]:
        return Column(
            make_rate_key(f"rate_{name}", unit),
            title,
            lambda row: row.compute_rate(name) if row.summary else None,
            lambda rate: format_four_digits(rate * factor),
            drop_priority,
        )

    has_other_statistic = any(row.ranking_statistic not in ("mean", "median") for row in rows)
    rate = make_rate_column(make_rate_key("rate", unit), unit, lambda row: row.best_rate if row.ok else None, rows)
    return [rate], [
        Column(
            make_rate_key("rate_low", unit), "", lambda row: row.rate_interval.known_ends[0] if row.summary else None
        ),
        Column(
            make_rate_key("rate_high", unit), "", lambda row: row.rate_interval.known_ends[1] if row.summary else None
        ),
        make_statistic_column("median", "median" if has_other_statistic else "", 1),
        make_statistic_column("mean", "mean"),
        make_statistic_column("fastest", "fastest"),
    ]


def get_half_width_percent(row: Measurement) -> float | None:
    """Return half the width of the 95 % interval of a row's time, in percent of this time, or None if the interval is
    unknown.
    """
    return 100 * row.relative_half_width if row.ok and row.interval.is_known else None


def make_time_columns() -> list[Column[Measurement]]:
    """Return columns for the time of a launch in milliseconds: the time from which the rate is computed, other
    statistics, and the interval.
    """

    def make_time_column(
        name: str, read_seconds: Callable[[Measurement], float | None], title: str = ""
    ) -> Column[Measurement]:
        return Column(
            f"{name}_ms",
            title,
            lambda row: 1e3 * seconds if row.summary and (seconds := read_seconds(row)) is not None else None,
            format_four_digits,
            3,
        )

    return [
        make_time_column("time", lambda row: row.seconds, "ms"),
        *(make_time_column(name, attrgetter(f"summary.{name}")) for name in ("mean", "median", "fastest", "slowest")),
        make_time_column("stdev", lambda row: row.stdev),
        make_time_column("low", lambda row: row.interval.known_ends[0]),
        make_time_column("high", lambda row: row.interval.known_ends[1]),
    ]


#: Identifies rows that are ranked together: regime, problem, and shape (None to rank the rows of all shapes together).
RowGroupKey = tuple[str, Any, Any]


def rank_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the rows with the best first and rows without a rate last."""
    return sorted(rows, key=lambda row: (row.ok, row.rate_sort_key if row.ok else ()), reverse=True)


def group_rows(rows: Iterable[Measurement], has_group_per_shape: bool = False) -> dict[RowGroupKey, list[Measurement]]:
    """Group the rows that are ranked together, each group with its best row first. References and rows of a search for
    ceilings are left out. ``has_group_per_shape``: whether each shape is a separate group.
    """
    ranked = (row for row in rows if not row.is_reference and not row.phase)
    groups = group_pairs(((row.regime, row.problem, row.shape if has_group_per_shape else None), row) for row in ranked)
    return {key: rank_rows(group) for key, group in groups.items()}


def make_group_title(row: Measurement, header: Mapping[str, Any]) -> str:
    """Return the title of the group that a row belongs to, from its regime and problem.

    Titles omit settings that have their default, but name these settings if the run also measures other values of them.
    ``header``: the header of the log.
    """
    operation = get_operation(row.operation)
    texts, record = operation.describe_problem(row.problem), operation.make_problem_record(row.problem)
    # The texts that name a field begin with the name of the field.
    omitted_names = {
        text.partition(" ")[0]
        for each in header.get("plan", {}).get("problems", ())
        for text in operation.describe_problem(operation.read_problem_record(each))
    } - {text.partition(" ")[0] for text in texts}
    defaults = [f"{name} {value}" for name, value in record.items() if name in omitted_names]
    return ", ".join([make_problem_title_in_words(row.regime, row.problem), *defaults])


def describe_cache_doubt(row: Measurement, header: Mapping[str, Any]) -> str:
    """Say that a cache may serve some of the bytes of a row. Return an empty string if the row measures memory."""
    info, may_be_ceiling = DeviceInfo(**header["device"]), get_operation(row.operation).may_be_ceiling
    return "" if may_be_ceiling(info, row.problem, row.shape) else "the cache may serve some of its bytes"


def format_row_label(row: Measurement) -> str:
    return f"{row.kernel} {row.shape}"


def select_ranked_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the rows that have a rate, best first, without references and without trials of a library's algorithms."""
    return rank_rows(row for row in rows if row.ok and not row.is_reference and row.phase != ALGORITHM_PHASE)


def rank_rows_by_regime(rows: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Return the rows of each regime that have a rate, best first. The regimes are in the order in which the run
    measured them.
    """
    ranked_by_regime = {
        regime: select_ranked_rows(group) for regime, group in group_pairs((row.regime, row) for row in rows).items()
    }
    return {regime: ranked for regime, ranked in ranked_by_regime.items() if ranked}


def make_summary_record(rows: Sequence[Measurement], end: RunEnd) -> dict[str, Any]:
    """Return the last record of the log of a sweep: how it ended, the best row of each regime, and the means of the
    rates of all shapes. Rates of several devices are scaled to the first device of the run.
    """
    ranked_by_regime = rank_rows_by_regime(rows)
    rates = {regime: [row.comparable_rate for row in ranked] for regime, ranked in ranked_by_regime.items()}
    return {
        **end.make_summary(len(select_ranked_rows(rows))),
        "best": {
            regime: {
                "shape": str(best.shape),
                "tflops": round_to_six_digits(best.best_rate),
                **make_device_record(best),
                "best_by": best.ranking_statistic,
                "arithmetic_mean_tflops": round_to_six_digits(fmean(rates[regime])),
                "geometric_mean_tflops": round_to_six_digits(geometric_mean(rates[regime])),
                "shapes": len(rates[regime]),
            }
            for regime, (best, *_) in ranked_by_regime.items()
        },
    }


# -- describing rows in words ------------------------------------------------------------------------------------------


def summarize_failure(row: Measurement) -> str:
    """Say in one short line why a row has no rate. The log has the full text."""
    return "out of memory" if row.status == "out_of_memory" else f"{row.status}: {shorten_line(row.reason)}"


def describe_failures(rows: Iterable[Measurement]) -> list[str]:
    """Explain why rows have no rate, with one line for each kernel and reason: the first such row, the number of
    others, and why the first row failed. Reasons that differ only in numbers share one line.
    """
    failures = group_pairs(
        ((row.kernel, re.sub(r"\d+", "", summarize_failure(row))), row) for row in rows if not row.ok
    )
    return [
        f"{format_row_label(first)}{f' and {len(others)} more' if others else ''}: {summarize_failure(first)}"
        for first, *others in failures.values()
    ]


def list_row_remarks(row: Measurement, shares: ShareCalculator) -> list[str]:
    """Return remarks about a row that its figures do not show, such as throttling, a timer that is too coarse, or an
    unknown interval.
    """
    is_short = row.ok and row.seconds < MAX_SHORT_LAUNCH_SECONDS
    implausible_count = len(row.implausible_samples)
    parts = [
        "" if row.ok else summarize_failure(row),
        f"ran {row.details['ran']}" if "ran" in row.details else "",
        *shares.yield_share_remarks(row),
        *row.conditions.throttle_reasons,
        *row.remarks,
        f"timer error up to {row.timer_error_seconds * 1e6:.1f} us" if is_short and row.timer_error_seconds else "",
        UNKNOWN_INTERVAL_REASON if row.ok and not row.interval.is_known else "",
        f"{format_count(implausible_count, 'implausible sample')} left out" if implausible_count else "",
    ]
    return [part for part in parts if part]


def describe_best_rows(rows: Sequence[Measurement], shares: ShareCalculator) -> Iterator[str]:
    """Yield lines about the best row of a group: its rate, shares, clock and power, and the mean rates over all shapes
    if the group has only one kernel. ``rows``: the rows of the group, best first.
    """
    best, *_ = measured = [row for row in rows if row.ok]
    title = make_group_title(best, shares.header)
    figure = f"{format_rate(best.best_rate, best.work.unit)} ({best.ranking_statistic}) @ {best.shape} by {best.kernel}"
    yield f"best {title}: {figure}, {describe_row_interval(best)}"
    details = [
        shares.describe_share_of_peak(best),
        shares.describe_share(best),
        describe_clock(best.conditions),
        f"{format_whole_number(best.conditions.watts)} W" if best.conditions.watts else "",
        f"{format_whole_number(best.conditions.celsius)} C" if best.conditions.celsius else "",
        "" if best.device_index is None else describe_row_device(best),
        describe_cache_doubt(best, shares.header),
        # Leave out the remark about an unknown interval, because the line about the figure already says this.
        *(text for text in list_row_remarks(best, shares) if text != UNKNOWN_INTERVAL_REASON),
    ]
    if any(details):
        yield f"    {'; '.join(filter(None, details))}"
    if len(measured) > 1 and len({row.kernel for row in measured}) == 1:
        rates = [row.comparable_rate for row in measured]
        unit, factor = choose_unit(best.work.unit, [best.best_rate])  # both means in the unit of the best row
        means = [f"{format_four_digits(factor * mean(rates))} {unit}" for mean in (fmean, geometric_mean)]
        yield f"mean {title} over {len(rates)} shapes: arithmetic {means[0]}, geometric {means[1]}"


def describe_row_interval(row: Measurement) -> str:
    """Describe the interval of a row's rate, and say whether the interval also predicts new runs (a repeat interval) or
    covers only this measurement. In the regime classic, the interval is that of the median, not of the fastest launch.
    """
    interval = row.rate_interval
    factor = choose_unit(row.work.unit, [row.best_rate])[1]
    bounds, coverage = format_interval(interval, factor), f"{100 * interval.coverage:.0f} %"
    if row.repeatability is None:
        figure = f"{row.statistic} {format_four_digits(factor * row.compute_rate(row.statistic))} with its "
        return (
            f"{figure if row.ranking_statistic != row.statistic else ''}{coverage} interval {bounds}, within this "
            "measurement"
        )
    return f"{coverage} repeat interval: {bounds}" if interval.is_known else UNKNOWN_INTERVAL_REASON


# -- devices that measured one run together ----------------------------------------------------------------------------

#: The title of the column with rates that are scaled to the first device of the run.
COMPARABLE_RATE_TITLE = "comparable"


def make_device_record(row: Measurement) -> dict[str, Any]:
    """Return the fields of the summary that name the device of a row, if several devices shared the run.
    ``device_speed`` is the speed of this device divided by the speed of the first device (see compute_device_speeds).
    It is None if this ratio is unknown.
    """
    return (
        {}
        if row.device_index is None
        else {"device": row.device_index, "device_speed": row.device_speed and round_to_six_digits(row.device_speed)}
    )


def make_device_columns(rows: Sequence[Measurement]) -> list[Column[Measurement]]:
    """Return columns of the device of a row and of its rate scaled to the first device of the run."""
    unit = rows[0].work.unit
    factor = choose_unit(unit, [row.best_rate for row in rows if row.ok])[1]
    return [
        Column("device", "device", lambda row: row.device_index, drop_priority=1),
        Column("device_speed", "", lambda row: row.device_speed and round_to_six_digits(row.device_speed)),
        Column(
            make_rate_key("comparable_rate", unit),
            COMPARABLE_RATE_TITLE,
            lambda row: row.comparable_rate if row.ok and row.device_speed is not None else None,
            lambda rate: format_four_digits(rate * factor),
            1,
        ),
    ]


def describe_row_device(row: Measurement) -> str:
    """Name the device of a row, with its rate scaled to the first device of the run."""
    if row.device_speed in (None, 1.0):
        return f"device {row.device_index}" + ("" if row.device_speed else ", not compared")
    return (
        f"device {row.device_index}, {format_four_digits(row.comparable_rate)} "
        + (
            f"+-{100 * row.comparable_interval.half_width / row.comparable_seconds:.2f} %"
            if row.comparable_interval.is_known
            else "(interval unknown)"
        )
        + " if scaled to the first device"
    )


def describe_devices(rows: Sequence[Measurement], header: Mapping[str, Any]) -> list[str]:
    """Return lines that list the devices that shared a run and compare their speeds."""
    lines = []
    for device in header["devices"]:
        known = [
            device["name"],
            format_count(device["compute_units"], "compute unit") if device["compute_units"] else "",
            f"{device['power_limit_watts']:.0f} W limit" if device["power_limit_watts"] else "",
            f"uuid {device['uuid_hash']}" if device["uuid_hash"] else "",
        ]
        lines.append(f"device {device['index']}: {', '.join(filter(None, known))}")
    for (regime, dtype), speeds in compute_device_speeds(rows).items():
        first = min(speeds)
        others = [
            f"device {index} {100 * (speed.relative_speed - 1):+.2f} "
            + (
                f"+-{100 * speed.relative_speed * speed.half_width:.2f} %"
                if Interval(1 - speed.half_width, 1 + speed.half_width, 1.0).is_known
                else "% (interval unknown)"
            )
            for index, speed in sorted(speeds.items())
            if index != first
        ]
        group = [row for row in rows if (row.regime, row.problem.dtype) == (regime, dtype)]
        reference = next(row for row in group if row.is_reference and row.ok)
        is_by_ceilings = any(row.phase == CONFIRM_PHASE and row.device_index is not None for row in group)
        measure = "their ceilings" if is_by_ceilings else f"the reference {reference.shape}, {reference.kernel}"
        relative = f"{', '.join(others)} relative to device {first}, by {measure}"
        lines.append(f"{regime} {dtype}: {relative if others else f'device {first} alone'}")
    if uncompared := sorted(
        {row.device_index for row in rows if row.device_index is not None and row.device_speed is None}
    ):
        lines.append(f"not compared, and ranked after the others: device {', '.join(map(str, uncompared))}")
    return [
        *lines,
        f"ranks and averages use rates scaled to the first device ({COMPARABLE_RATE_TITLE}); "
        "other figures are as measured",
    ]


def describe_drift(references: Sequence[Measurement]) -> Iterator[str]:
    """Yield a line for each reference that was measured more than once on the same device: its median rate, and how far
    the lowest and the highest rate are from the median.
    """
    groups = group_pairs(((row.device_index, row.problem, row.shape, row.kernel), row) for row in references if row.ok)
    for (device, _, shape, _), rows in groups.items():
        if len(rows) > 1:
            rates = [row.best_rate for row in rows]
            middle = median(rates)
            lowest, highest = 100 * (min(rates) / middle - 1), 100 * (max(rates) / middle - 1)
            on_device = "" if device is None else f" on device {device}"
            yield (
                f"reference {shape}{on_device}, measured {len(rows)} times: "
                f"median {format_rate(middle, rows[0].work.unit)}; the lowest rate differs from it by {lowest:+.2f} %, "
                f"the highest by {highest:+.2f} %"
            )
