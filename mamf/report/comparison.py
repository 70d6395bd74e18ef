"""Make the report of ``mamf compare`` (two runs, row by row) and of ``mamf guard`` (a run against a baseline, with a
verdict), and JUnit XML for CI systems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from xml.etree import ElementTree

from mamf.logs.compare import MIN_INTERVAL_COVERAGE, Comparison, Difference, RowPair, RowVerdict
from mamf.logs.compared_rows import (
    CYCLES_UNIT,
    FALSE_ALARM_CHANCE,
    ComparedRow,
)
from mamf.logs.judging import GuardOutcome, GuardResult, JudgedRow
from mamf.logs.pooling import POOLED_TOLERANCE_SHARE, PooledRows
from mamf.measurement import group_pairs
from mamf.report.document import (
    UNKNOWN_INTERVAL,
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    choose_unit,
    format_count,
    format_four_digits,
    list_warnings,
    make_columns_from_mappings,
)
from mamf.statistics import CONFIDENCE, Interval
from mamf.text import escape_invisible_characters

_HOST_CLOCK_TIMER = "host clock"
# Reports call the interval of a ratio unknown if its upper end is at least this many times its lower end.
_MAX_INTERVAL_RATIO = 100.0
# By default, tables leave out rows with the verdict SAME, but show at least this many rows. Shorter tables show all
# rows.
_MIN_SHOWN_ROWS = 3
_VERDICT_ORDER: tuple[RowVerdict, ...] = ("SLOWER", "FASTER", "UNDECIDED", "SAME")
# Smallest effect of a temperature difference that reports mention, as a share of the rate.
_MIN_TEMPERATURE_EFFECT_SHARE = 0.001


def make_comparison_document(comparison: Comparison, tolerance: float, top: int | None = 0) -> Document:
    """Return the report of a comparison with at least one pair of rows.

    - ``tolerance``: how much slower a row may be, as a share of its rate.
    - ``top``: the maximum number of rows in tables for people, None for all. Tables show more rows if more rows changed
      or are undecided.
    """
    verdicts = {id(pair): pair.decide_verdict(tolerance) for pair in comparison.pairs}
    different_count = sum(verdict != "SAME" for verdict in verdicts.values())
    table: Table[RowPair] = Table(
        make_pair_columns(comparison, tolerance),
        comparison.pairs,
        shown_rows=sorted(comparison.pairs, key=lambda pair: _VERDICT_ORDER.index(verdicts[id(pair)])),
        max_shown_rows=None if top is None else max(top, different_count, _MIN_SHOWN_ROWS),
        get_remarks=lambda pair: yield_pair_remarks(pair, tolerance),
        get_label=lambda pair: (
            f"{pair.pairing_fields.get('regime', '')} {format_shapes(pair)} by {pair.b.kernel}".strip()
        ),
    )
    together = [describe_overall_change(each, comparison, tolerance) for each in comparison.pooled_rows]
    is_calibrated = comparison.a.header.get("timer") != _HOST_CLOCK_TIMER
    chance = f"at most {format_as_percent(FALSE_ALARM_CHANCE)}" if is_calibrated else "unknown with a host clock"
    warnings = [
        f"{letter}: {warning}"
        for letter, side in (("A", comparison.a), ("B", comparison.b))
        for warning in list_warnings(side)
    ]
    blocks: list[Block] = [
        Lines(
            [
                *describe_runs(comparison),
                f"{describe_compared_figures(comparison)}; SAME: 90 % interval within 1 +- "
                f"{format_as_percent(tolerance)}",
            ]
        ),
        table,
        Lines(
            [
                *together,
                *(
                    []
                    if comparison.overridden_differences
                    else [f"chance of a false alarm (exit code 3) for the whole comparison: {chance}"]
                ),
            ]
        ),
        Lines(warnings),
        Answer(summarize_verdicts(comparison, tolerance)),
    ]
    return Document("Comparison", blocks, make_comparison_data(comparison, tolerance))


def make_pair_columns(comparison: Comparison, tolerance: float) -> list[Column[RowPair]]:
    """Return the columns of a comparison. Tables for people show the fields that differ between pairs, both rates and
    the verdict; CSV and JSON have the keys of ``Comparison.rows``.
    """
    pairs = comparison.pairs
    flat = {id(pair): row for pair, row in zip(pairs, comparison.rows(tolerance), strict=True)}
    units = {
        unit: choose_rate_unit(group) for unit, group in group_pairs((each.a.unit, each) for each in pairs).items()
    }

    def format_side(pair: RowPair, row: ComparedRow) -> str:
        unit, factor = units[pair.a.unit]
        return format_four_digits((row.rate or 0.0) * factor) + (f" {unit}" if len(units) > 1 else "")

    return [
        *(
            Column(
                *("", name),
                partial(lambda field, pair: pair.pairing_fields[field], name),
                lambda value: ("no", "yes")[value] if isinstance(value, bool) else str(value),
                drop_priority=1,
                is_left_aligned=True,
            )
            for name in find_varying_fields(pairs)
        ),
        Column("", "shape", format_shapes, is_left_aligned=True),
        Column("", "A", lambda pair: format_side(pair, pair.a), drop_priority=2),
        Column("", "B", lambda pair: format_side(pair, pair.b), drop_priority=2),
        Column("", "B/A", lambda pair: pair.ratio, "{:.4f}".format),
        Column(
            "",
            "95 % interval",
            lambda pair: pair.interval if pair.has_known_intervals else None,
            format_ratio_interval,
            drop_priority=3,
            is_left_aligned=True,
        ),
        Column("", "verdict", lambda pair: pair.decide_verdict(tolerance), is_left_aligned=True),
        *make_columns_from_mappings(pairs, lambda pair: flat[id(pair)], has_titles=False),
    ]


def find_varying_fields(pairs: Sequence[RowPair]) -> list[str]:
    """Return the names of the fields whose values differ between pairs, without the shape, which tables always show."""
    return [
        name
        for name in pairs[0].pairing_fields
        if name != "shape" and len({pair.pairing_fields[name] for pair in pairs}) > 1
    ]


def format_shapes(pair: RowPair) -> str:
    return pair.a.shape if pair.a.shape == pair.b.shape else f"{pair.a.shape} / {pair.b.shape}"


def format_ratio_interval(interval: Interval) -> str:
    return (
        f"{interval.low:.4f} to {interval.high:.4f}"
        if interval.high < _MAX_INTERVAL_RATIO * interval.low
        else UNKNOWN_INTERVAL
    )


def format_change_interval(pair: RowPair) -> str:
    """Format the interval of the ratio of two rates as changes in percent: ``95 % interval: -1.20 to +0.35``."""
    if pair.has_known_intervals and pair.interval.high < _MAX_INTERVAL_RATIO * pair.interval.low:
        return f"95 % interval: {100 * (pair.interval.low - 1):+.2f} to {100 * (pair.interval.high - 1):+.2f}"
    return "of unknown accuracy"


def choose_rate_unit(pairs: Sequence[RowPair]) -> tuple[str, float]:
    """Choose a unit in which the rates of all pairs are easy to read. Return this unit, and the factor that converts
    rates from TFLOPS (or TB/s) to it. If some pairs have rates in TFLOPS and others in TB/s, the unit is empty.
    """
    return (
        choose_unit(pairs[0].a.unit, [rate for pair in pairs for rate in (pair.a.rate, pair.b.rate) if rate])
        if len({pair.a.unit for pair in pairs}) == 1
        else ("", 1.0)
    )


def yield_pair_remarks(pair: RowPair, tolerance: float) -> Iterator[str]:
    percent = format_as_percent(tolerance)
    if pair.decide_verdict(tolerance) == "UNDECIDED":
        if pair.interval.coverage < MIN_INTERVAL_COVERAGE:
            yield "the row has too few samples to decide"
        elif pair.a.was_cpu_device_busy or pair.b.was_cpu_device_busy:
            yield "other work used the CPU while A or B was measured: measure again on a quiet machine"
        elif not pair.has_known_intervals:
            yield "the interval of A or of B is unknown: 'mamf show' of both logs says why"
        elif not pair.interval.low <= 1 <= pair.interval.high:
            yield (
                "the 95 % interval does not contain 1, but the "
                f"{format_as_percent(pair.strict_confidence)} interval does: more runs of each side can decide"
            )
        elif pair.was_measured_too_briefly(tolerance):
            yield f"the interval is wider than +-{percent}: longer runs, or more of them, can decide"
        else:
            yield f"the difference may be larger or smaller than {percent}: more runs of each side can decide"
    if pair.temperature_effect >= _MIN_TEMPERATURE_EFFECT_SHARE and pair.a.celsius and pair.b.celsius:
        yield f"A was at {pair.a.celsius:.0f} C and B at {pair.b.celsius:.0f} C, which makes the interval wider"
    if pair.interval.coverage < CONFIDENCE:
        yield f"there are few samples, so the interval's confidence may be only {100 * pair.interval.coverage:.0f} %"
    if not pair.is_same_device:
        yield "two devices measured A and B: mamf corrected A by the reference shape that both devices measured"


def describe_compared_figures(comparison: Comparison) -> str:
    """Return a line that says which figures are compared: rates, or shares of cycles that the kernels used."""
    cards_differ = any(each.is_card_difference for each in comparison.noted_differences)
    reason = ", because the cards differ" if cards_differ else ""
    figures = (
        f"shares of the compute units' cycles in percent instead of rates{reason}"
        if comparison.pairs[0].a.unit == CYCLES_UNIT
        else " in ".join(filter(None, ("rates", choose_rate_unit(comparison.pairs)[0])))
    )
    return f"{figures}; B/A above 1: B is faster"


def describe_runs(comparison: Comparison) -> list[str]:
    """Return the lines above the table: the two runs, their differences, and the fields that are equal in all rows."""
    first, varied = comparison.pairs[0], {*find_varying_fields(comparison.pairs), "shape"}
    shared = [f"{name} {value}" for name, value in first.pairing_fields.items() if name not in varied]
    kernels = [each for each in comparison.ignored_differences if each.name == "kernel"]
    lines = [
        f"{letter}: {name}, {side.header['device']['name']}, {side.header.get('started', 'of unknown date')}"
        + (", interrupted" if side.tier == "interrupted" else "")
        for letter, name, side in zip("AB", comparison.log_paths, (comparison.a, comparison.b), strict=True)
    ]
    shared += [] if "shape" in first.pairing_fields else ["the ceilings of two runs of 'mamf find'"]
    return [
        *lines,
        *describe_differences(
            "these runs are not comparable, but --anyway compares them: ", comparison.overridden_differences
        ),
        *describe_differences("rows are paired without the kernel, which differs: ", kernels),
        *describe_differences("the runs differ in ", comparison.noted_differences),
        f"all rows: {', '.join(shared)}",
    ]


def describe_differences(beginning: str, differences: Sequence[Difference]) -> list[str]:
    """Return a line that lists the differences after the text ``beginning``, or no line if there are none."""
    return [beginning + ", ".join(map(str, differences))] if differences else []


def format_as_percent(share: float) -> str:
    return f"{100 * share:g} %"


def describe_overall_change(pooled: PooledRows, comparison: Comparison, tolerance: float) -> str:
    """Describe the overall change of the rates in a regime, computed from all its rows together. If no change was
    found, name the smallest loss that the comparison would detect if all rows had it.
    """
    interval, threshold = pooled.interval, f"more than {format_as_percent(POOLED_TOLERANCE_SHARE * tolerance)}"
    if interval.high < 1:
        result = f"slower{'' if pooled.is_regression(tolerance) else ', but not'} by {threshold}"
    elif interval.low > 1:
        result = "faster"
    else:
        smallest = format_as_percent(round(pooled.compute_smallest_detectable_loss(tolerance), 4))
        result = f"no common change of these rows was found, but a uniform loss below {smallest} cannot be detected"
    return (
        f"{pooled.regime}, {pooled.row_count} rows together ({comparison.run_order.description}): "
        f"B/A {pooled.ratio:.4f}, {format_as_percent(round(interval.coverage, 4))} interval "
        f"{format_ratio_interval(interval)}: {result}"
    )


def summarize_verdicts(comparison: Comparison, tolerance: float) -> list[str]:
    """Return two lines: the number of rows with each verdict, and which rows are slower."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in comparison.count_verdicts(tolerance).items())
    unpaired = ", ".join(
        f"{len(rows)} only in {name}{_describe_failed_rows(rows, other)}"
        for name, other, rows in (("A", "B", comparison.rows_only_in_a), ("B", "A", comparison.rows_only_in_b))
    )
    return [
        f"{format_count(len(comparison.pairs), 'row')}: {counts}; "
        f"geometric mean B/A {comparison.geometric_mean_ratio:.4f}; {unpaired}",
        describe_slower_rows(comparison, tolerance),
    ]


def describe_slower_rows(comparison: Comparison, tolerance: float) -> str:
    """Name the row with the largest slowdown. If no single row is slower, name the regimes whose rows are slower when
    taken together. If there are none, say that there is no regression, or that every row is undecided.
    """
    if regressions := comparison.find_regressions(tolerance):
        worst = regressions[0]
        return (
            f"slower by more than {format_as_percent(tolerance)}: {format_count(len(regressions), 'row')}, above all "
            f"{worst.b.shape} by {worst.b.kernel} ({format_as_percent(round(worst.ratio - 1, 4))})"
        )
    if together := ", ".join(each.regime for each in comparison.pooled_rows if each.is_regression(tolerance)):
        return (
            f"slower by more than {format_as_percent(POOLED_TOLERANCE_SHARE * tolerance)}: "
            f"all rows together, in {together}"
        )
    undecided_count = sum(pair.decide_verdict(tolerance) == "UNDECIDED" for pair in comparison.pairs)
    if undecided_count == len(comparison.pairs):
        return "every row is undecided: the remarks below the table say why" + (
            f"; all rows together are faster in {faster_regimes}"
            if (faster_regimes := ", ".join(each.regime for each in comparison.pooled_rows if each.interval.low > 1))
            else ""
        )
    undecided = f" was found, but {format_count(undecided_count, 'row')} stayed undecided" if undecided_count else ""
    return f"no regression beyond {format_as_percent(tolerance)}{undecided}"


def _describe_failed_rows(rows: Sequence[tuple[ComparedRow, ComparedRow | None]], log_label: str) -> str:
    """Return a text that counts the rows without a rate in the log ``log_label`` by status, for example
    `` (2 unsupported in B)``. Return an empty text if there are none.
    """
    counts = Counter(failed.status for _, failed in rows if failed is not None)
    statuses = ", ".join(f"{count} {status} in {log_label}" for status, count in counts.items())
    return f" ({statuses})" if statuses else ""


def make_comparison_data(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    """Return the JSON of a comparison without the compared rows: both headers, the differences between the runs, and
    the number of rows with each verdict.
    """
    return {
        "a": {"log": comparison.log_paths[0], "tier": comparison.a.tier, "header": comparison.a.header},
        "b": {"log": comparison.log_paths[1], "tier": comparison.b.tier, "header": comparison.b.header},
        "tolerance": tolerance,
        "compared_anyway": [asdict(each) for each in comparison.overridden_differences],
        "paired_without": [asdict(each) for each in comparison.ignored_differences],
        "differences": [asdict(each) for each in comparison.noted_differences],
        "design": comparison.run_order.description,
        "chance_of_false_alarm": None if comparison.overridden_differences else FALSE_ALARM_CHANCE,
        "together": [each.make_table_row(tolerance) for each in comparison.pooled_rows],
        **{
            key: [
                {**row.pairing_fields, "tflops": row.rate, "status_in_other": other.status if other else "missing"}
                for row, other in rows
            ]
            for key, rows in (("only_in_a", comparison.rows_only_in_a), ("only_in_b", comparison.rows_only_in_b))
        },
        "summary": {
            **comparison.count_verdicts(tolerance),
            "regressions": len(comparison.find_regressions(tolerance)),
            "geometric_mean_ratio": comparison.geometric_mean_ratio,
        },
    }


# -- reports of mamf guard, which compares a run with a baseline -------------------------------------------------------


#: Name of the XML element that a JUnit test contains, by the outcome of its row. A row with any other outcome becomes a
#: passed test, which contains no element.
_JUNIT_TAG_BY_OUTCOME = {"regression": "failure", "failed": "error", "new": "skipped", "undecided": "skipped"}


def describe_guard_verdict(result: GuardResult) -> str:
    """Return a line that says whether the verdict of ``mamf guard`` is passed, failed or undecided, and why."""
    counts, rows = result.count_outcomes(), format_count(len(result.rows), "row")
    slower = f"slower by more than {format_as_percent(result.tolerance)}"
    reason_by_outcome: dict[GuardOutcome, str] = {
        "regression": f"{slower}, confirmed by new measurements",
        "failed": "without a rate in this run",
        "undecided": (
            "undecided, because other work used the CPU"
            if any(
                row.pair and (row.pair.a.was_cpu_device_busy or row.pair.b.was_cpu_device_busy)
                for row in result.rows
                if row.outcome == "undecided"
            )
            else "undecided, because samples scatter too much or are too few"
        ),
    }
    reasons = [f"{counts[name]} of {rows} {text}" for name, text in reason_by_outcome.items() if counts[name]]
    reasons += [f"not finished: {result.unfinished_reason}"] if result.unfinished_reason else []
    without_reasons = "no row was compared with the baseline"
    if result.is_finished and counts["new"]:
        compared_count = len(result.rows) - counts["new"]
        without_reasons = (
            f"0 of {format_count(compared_count, 'row')} {slower}; {counts['new']} of {rows} not in the baseline"
        )
    elif result.is_finished:
        without_reasons = f"0 of {rows} {slower}"
    verdict = "FAILED" if result.has_failed else "PASSED" if result.is_finished else "UNDECIDED"
    return f"guard {verdict}: {', '.join(reasons) or without_reasons}"


def describe_compared_row(row: ComparedRow) -> str:
    """Return the name of a row: its kernel, its shape and its other fields."""
    other_fields = [
        f"{field} {value}" for field, value in row.pairing_fields.items() if field not in ("shape", "kernel")
    ]
    return f"{row.kernel} {row.shape} ({', '.join(other_fields)})"


def describe_row_outcome(row: JudgedRow) -> str:
    """Return the rates of a row in the new run and in the baseline, or the reason why one of them is missing."""
    if row.pair is None:
        return (
            "not in the baseline" if row.outcome == "new" else f"{row.compared_row.status}: {row.compared_row.reason}"
        )
    a, b = row.pair.a, row.pair.b
    assert a.rate is not None and b.rate is not None, "only measured rows are paired"
    new_measurements = f", from {b.repetition_count} new measurements" if b.repetition_count else ""
    unit, factor = choose_rate_unit([row.pair])
    return (
        f"{format_four_digits(factor * b.rate)} {unit}, was {format_four_digits(factor * a.rate)}: "
        f"{100 * (row.pair.ratio - 1):+.2f} % ({format_change_interval(row.pair)}){new_measurements}"
    )


def make_guard_document(result: GuardResult, top: int | None = 0) -> Document:
    """Return the report of ``mamf guard``: first the comparison with the baseline, then the rows that regressed,
    failed, are new or are undecided, and last the verdict. ``top``: as for ``make_comparison_document``.
    """
    other_rows = [
        f"{row.outcome}: {describe_compared_row(row.compared_row)}: {describe_row_outcome(row)}"
        for row in result.rows
        if row.outcome != "ok"
    ]
    answer = Answer([*other_rows, describe_guard_verdict(result)])
    data = {"guard": {"verdict": describe_guard_verdict(result), "rows": result.count_outcomes()}}
    if not result.comparison.pairs:
        return Document("Guard", [answer], data)
    outcome_by_pair = {id(row.pair): row.outcome for row in result.rows}
    compared = make_comparison_document(result.comparison, result.tolerance, top)
    _, table, details, *_ = compared.blocks
    assert isinstance(table, Table)
    decided = replace(
        table,
        columns=[
            Column("", "outcome", lambda pair: outcome_by_pair[id(pair)], is_left_aligned=True)
            if column.title == "verdict"
            else column
            for column in table.columns
        ],
        # The remarks of the comparison explain its verdicts. They would contradict the outcome "ok".
        get_remarks=lambda pair: [] if outcome_by_pair[id(pair)] == "ok" else table.get_remarks(pair),
    )
    blocks: list[Block] = [
        Lines([*describe_runs(result.comparison), describe_compared_figures(result.comparison)]),
        decided,
        details,
        Lines([f"A: {warning}" for warning in list_warnings(result.comparison.a)]),
        answer,
    ]
    return Document("Guard", blocks, {**compared.json_data, **data})


def format_junit_xml(result: GuardResult, suite: str, seconds: float) -> str:
    """Return a JUnit test suite with a test for each row. Regressions are failures, rows without a rate are errors, and
    undecided or new rows are skipped tests.
    """
    counts = result.count_outcomes()
    top = ElementTree.Element(
        "testsuite",
        name=escape_invisible_characters(suite),
        tests=str(len(result.rows)),
        failures=str(counts["regression"]),
        errors=str(counts["failed"]),
        skipped=str(counts["new"] + counts["undecided"]),
        time=f"{seconds:.3f}",
    )
    for row in result.rows:
        case = ElementTree.SubElement(
            top,
            "testcase",
            classname=escape_invisible_characters(f"{suite}.{row.compared_row.kernel}"),
            name=escape_invisible_characters(describe_compared_row(row.compared_row)),
        )
        if row.outcome in _JUNIT_TAG_BY_OUTCOME:
            ElementTree.SubElement(
                case, _JUNIT_TAG_BY_OUTCOME[row.outcome], message=escape_invisible_characters(describe_row_outcome(row))
            )
    ElementTree.SubElement(top, "system-out").text = escape_invisible_characters(describe_guard_verdict(result))
    ElementTree.indent(top)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(top, encoding="unicode")}\n'
