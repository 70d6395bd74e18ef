"""Report a verification (``mamf verify``): which kernels gave wrong results, the errors and their limits, and the
largest share of wrong results that is still possible after this many checks.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mamf.logs.run_log import RunLog
from mamf.measurement import (
    CHECKED_LAUNCHES_KEY,
    CHECKED_VALUES_KEY,
    DIFFERENT_BITS_KEY,
    ERROR_BOUND_KEY,
    LOST_NAN_KEY,
    WRONG_TILES_KEY,
    Measurement,
    group_pairs,
)
from mamf.operations.unknown import get_operation
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    describe_machine,
    describe_run_end,
    format_any_value,
    format_count,
    label_kernel,
)
from mamf.report.rows import describe_failures
from mamf.statistics import compute_median_ignoring_none

MeasuredRows = Sequence[Measurement]
#: The status of rows whose result was wrong.
WRONG_STATUS = "wrong_result"
_LOST_NAN_NOTE = (
    "lost NaN: in this many problems, outputs were numbers although an operand had a NaN; kernels may do this, so mamf "
    "does not count it as wrong"
)


def count_verified_items(rows: MeasuredRows) -> dict[str, int]:
    """Count the verified problems, the checked launches and output values, and the problems with a wrong result. The
    keys of the result are ``problems``, ``launches``, ``values`` and ``wrong``.
    """
    verified = [row for row in rows if row.ok or row.status == WRONG_STATUS]
    return {
        "problems": len(_collect_problem_ids(verified)),
        "launches": sum(int(row.details.get(CHECKED_LAUNCHES_KEY, 1)) for row in verified),
        "values": sum(int(row.details.get(CHECKED_VALUES_KEY, 0)) for row in verified),
        "wrong": len(_collect_problem_ids(row for row in verified if row.status == WRONG_STATUS)),
    }


def _collect_problem_ids(rows: Iterable[Measurement]) -> set[tuple[int | None, str, str, int]]:
    """Return the ids of the distinct problems of ``rows``. Several rows may have the same problem, because users can
    request a problem again by its number.
    """
    return {(row.device_index, row.regime, row.kernel, row.round_number) for row in rows}


def compute_max_wrong_share(checked_count: int) -> float:
    """Return the 95 % upper bound of the share of wrong results, given that all ``checked_count`` checked results were
    right. The bound is about 3 / checked_count.
    """
    return -math.expm1(math.log(0.05) / checked_count) if checked_count else 1.0


def compute_error_rate_interval(wrong_count: int, checked_count: int) -> tuple[float, float]:
    """Return the 95 % interval of the share of wrong results (Clopper & Pearson, Biometrika 26, 1934) if
    ``wrong_count`` of ``checked_count`` results were wrong.
    """

    def find_wrong_share_with_probability(probability: float, count: int) -> float:
        """Find the share of wrong results at which ``count`` or fewer results are wrong with this ``probability``."""
        low, high = 0.0, 1.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if _compute_binomial_probability(count, checked_count, middle) > probability
                else (low, middle)
            )
        return low

    return (
        find_wrong_share_with_probability(0.975, wrong_count - 1) if wrong_count else 0.0,
        find_wrong_share_with_probability(0.025, wrong_count) if wrong_count < checked_count else 1.0,
    )


def _compute_binomial_probability(count: int, checked_count: int, share: float) -> float:
    """Return the probability that at most ``count`` of ``checked_count`` results are wrong, if each is wrong with
    probability ``share``.
    """
    log_all, log_right, log_wrong = math.lgamma(checked_count + 1), math.log1p(-share), math.log(share)
    return math.fsum(
        math.exp(
            log_all
            - math.lgamma(each + 1)
            - math.lgamma(checked_count - each + 1)
            + each * log_wrong
            + (checked_count - each) * log_right
        )
        for each in range(count + 1)
    )


def _describe_wrong_share(wrong_count: int, checked_count: int) -> str:
    """Return the 95 % interval of the share of wrong problems in percent, or only its upper bound if no problem was
    wrong.
    """
    if not wrong_count:
        return f"at most {_format_percent(compute_max_wrong_share(checked_count))} %"
    return f"{' to '.join(map(_format_percent, compute_error_rate_interval(wrong_count, checked_count)))} %"


def _format_percent(share: float) -> str:
    return f"{100 * share:.2g}" if share < 0.995 else "100"


# The verdict gives an upper bound of the share of wrong problems only for a kernel with at least this many verified
# problems. With fewer problems, the bound would be above 26 %.
_MIN_PROBLEMS_FOR_BOUND = 10


def yield_verdict_lines(rows: MeasuredRows, is_interrupted: bool = False) -> Iterator[str]:
    """Yield lines with the verdict, what was checked, and the 95 % interval of the share of wrong problems. If several
    pairs of kernel and dtype were checked, the last line is about the pair with the fewest problems.
    """
    totals = count_verified_items(rows)
    wrong, problems = totals["wrong"], totals["problems"]
    verdict = "FAILED" if wrong else "UNFINISHED" if is_interrupted or not problems else "PASSED"
    yield (
        f"verify {verdict}: {wrong} of {format_count(problems, 'problem')} wrong; "
        f"checked: {totals['launches']:.4g} launches, {totals['values']:.4g} values"
    )
    if wrong:
        yield (
            "run the command after 'again:' on another device: a faulty library "
            "fails there too, a faulty device does not"
        )
    if not problems:
        return
    share = f"with 95 % confidence {_describe_wrong_share(wrong, problems)} of such problems"
    if not wrong:
        share += (
            f", {_format_percent(compute_max_wrong_share(totals['launches']))} % of launches and "
            f"{_format_percent(compute_max_wrong_share(totals['values']))} % of values"
        )
    yield f"{share} are wrong, if errors are independent"
    groups = group_pairs(((row.kernel, row.problem.dtype), row) for row in rows)
    tested = {key: each for key, group in groups.items() if (each := count_verified_items(group))["problems"]}
    if len(tested) > 1:
        (kernel, dtype), fewest = min(tested.items(), key=lambda item: item[1]["problems"])
        share = f"with 95 % confidence {_describe_wrong_share(fewest['wrong'], fewest['problems'])} are wrong"
        if fewest["problems"] < _MIN_PROBLEMS_FOR_BOUND and not fewest["wrong"]:
            share = "too few for a bound, none was wrong; a longer --budget checks more"
        yield (
            f"the least tested kernel is {kernel} in {dtype}, {format_count(fewest['problems'], 'problem')}: {share}"
        )


def make_reproduction_command(log: RunLog, row: Measurement) -> str:
    """Return the command line that verifies the problem of a row again."""
    plan, device = log.plan, log.get_device(row.device_index)
    kernels = [row.kernel] if row.kernel in plan.kernels else [name for name in plan.kernels if ":" in name]
    return shlex.join(
        [
            *("mamf", "verify", "--backend", device.backend, "--device", str(device.index)),
            *("--kernel", *kernels, "--dtype", row.problem.dtype, "--regime", row.regime),
            *("--largest", str(plan.shapes[0]), "--seed", str(plan.problem.seed), "--number", str(row.round_number)),
        ]
    )


def make_verification_document(log: RunLog, max_shown_rows: int | None) -> Document:
    """Return the report of a verification. ``max_shown_rows``: how many kernels the table for people shows at most,
    those with wrong results first; None for all.
    """
    rows, is_interrupted = log.measurements, log.tier == "interrupted"
    groups = group_pairs(((row.operation, row.kernel, row.problem.dtype), row) for row in rows)
    wrong_first = sorted(groups, key=lambda key: (all(row.status != WRONG_STATUS for row in groups[key]), key))
    rows_by_regime = group_pairs((row.regime, row) for row in rows if row.ok or row.status == WRONG_STATUS)
    operations_by_reference = group_pairs((get_operation(row.operation).reference, row.operation) for row in rows)
    blocks: list[Block] = [
        Lines([describe_machine(log.header)]),
        Table(
            _make_check_columns(log.header),
            [groups[key] for key in wrong_first],
            key="checks",
            max_shown_rows=max_shown_rows,
        ),
        Lines([_LOST_NAN_NOTE] if any(LOST_NAN_KEY in row.details for row in rows) else []),
        Table(_CONDITION_COLUMNS, list(rows_by_regime.values()), key="states"),
        Lines(
            [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in operations_by_reference.items()],
            "compared with",
        ),
        Lines(describe_failures(row for row in rows if row.status != WRONG_STATUS), "without a verdict"),
        Lines(
            [f"{describe_run_end(log.summary, has_count=False)}{'; --resume verifies more' if is_interrupted else ''}"]
        ),
        Answer([*_describe_wrong_rows(log), *yield_verdict_lines(rows, is_interrupted)]),
    ]
    return Document("Verification", blocks, {"header": log.header, "summary": log.summary})


def _describe_wrong_rows(log: RunLog) -> Iterator[str]:
    for row in (row for row in log.measurements if row.status == WRONG_STATUS):
        problem = ", ".join([row.problem.dtype, *get_operation(row.operation).describe_problem(row.problem)])
        tiles = f"; {row.details[WRONG_TILES_KEY]}" if WRONG_TILES_KEY in row.details else ""
        yield f"wrong: {row.kernel} {problem} {row.shape} ({row.regime}): {row.reason}{tiles}"
        yield f"  again: {make_reproduction_command(log, row)}"


def _describe_throttling(rows: MeasuredRows) -> str:
    reasons = Counter(reason for row in rows for reason in row.conditions.throttle_reasons)
    return ", ".join(f"{reason} in {count}" for reason, count in reasons.most_common())


def _get_error_share_of_bound(row: Measurement) -> float:
    return (row.relative_error or 0.0) / (float(row.details.get(ERROR_BOUND_KEY, 0.0)) or 1.0)


def _find_worst_row(rows: MeasuredRows) -> Measurement | None:
    """Return the row whose error is closest to its bound among the rows with a right result, or None if no row has a
    right result.
    """
    return max((row for row in rows if row.ok), key=_get_error_share_of_bound, default=None)


def _make_check_columns(header: Mapping[str, Any]) -> list[Column[MeasuredRows]]:
    return [
        Column("operation", "operation", lambda rows: rows[0].operation, format_any_value, 3, True),
        Column(
            "kernel",
            "kernel",
            lambda rows: rows[0].kernel,
            lambda name: label_kernel(name, header),
            is_left_aligned=True,
        ),
        Column("dtype", "dtype", lambda rows: rows[0].problem.dtype, is_left_aligned=True),
        Column("problems", "problems", lambda rows: count_verified_items(rows)["problems"]),
        Column("wrong", "wrong", lambda rows: count_verified_items(rows)["wrong"]),
        Column(
            *("no_verdict", "no verdict"),
            lambda rows: (
                len(_collect_problem_ids(row for row in rows if not row.ok and row.status != WRONG_STATUS)) or None
            ),
            drop_priority=6,
        ),
        Column("launches", "launches", lambda rows: count_verified_items(rows)["launches"], drop_priority=2),
        Column("values", "values", lambda rows: count_verified_items(rows)["values"], "{:.3g}".format, drop_priority=1),
        Column(
            "largest_error",
            "largest accepted error",
            lambda rows: (it := _find_worst_row(rows)) and it.relative_error,
            "{:.2g}".format,
        ),
        Column(
            "bound",
            "limit",
            lambda rows: (it := _find_worst_row(rows)) and it.details.get(ERROR_BOUND_KEY),
            "{:.2g}".format,
            1,
        ),
        Column(
            "share_of_bound",
            "% of limit",
            lambda rows: (it := _find_worst_row(rows)) and _get_error_share_of_bound(it),
            lambda share: f"{100 * share:.0f}",
            4,
        ),
        Column("other_bits", "other bits", lambda rows: sum(DIFFERENT_BITS_KEY in row.details for row in rows) or None),
        Column("lost_nan", "lost NaN", lambda rows: sum(LOST_NAN_KEY in row.details for row in rows) or None),
    ]


#: Columns of a table with a row for each regime: clock, power and throttling while mamf checked launches.
_CONDITION_COLUMNS: list[Column[MeasuredRows]] = [
    Column("regime", "regime", lambda rows: rows[0].regime, is_left_aligned=True),
    Column("problems", "problems", lambda rows: count_verified_items(rows)["problems"]),
    Column(
        "clock_hz",
        "median MHz",
        lambda rows: compute_median_ignoring_none(it.conditions.clock_hz for it in rows),
        lambda hertz: f"{hertz / 1e6:.0f}",
    ),
    Column(
        "power_watts",
        "median W",
        lambda rows: compute_median_ignoring_none(it.conditions.watts for it in rows),
        "{:.0f}".format,
    ),
    Column("throttled", "throttled in problems", _describe_throttling, is_left_aligned=True),
]
