"""Convert the contents of a log to rows that can be compared with the rows of another log. Decide whether two sets of
runs differ by more than repeated runs of the same kernels do.

Two runs of the same kernels differ in two ways: all rows of a run are shifted by a common factor, and each row has a
separate error. Both were estimated from pairs of equal runs in results/; ``tools/rates.py compare`` prints the
estimates. More rows do not reduce the common shift. More runs do, but only if the runs of the two sides alternate.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from statistics import geometric_mean
from typing import Any, NamedTuple

from mamf.calibration import look_up_repeatability
from mamf.ceilings.ceiling import (
    CONFIRM_PHASE,
    MIN_CONFIRMING_ROUNDS,
    Ceiling,
    choose_repeatability,
    combine_rounds,
    compute_combined_rate_error,
    find_confirmed_ceiling,
)
from mamf.errors import UsageError
from mamf.logs.run_log import RunLog, compute_device_speeds, get_speed_context
from mamf.machine.environment import was_cpu_device_busy
from mamf.measurement import Measurement, group_pairs
from mamf.operations.attention.operation import AttentionProblem
from mamf.operations.unknown import get_operation
from mamf.plans import COMMON_REGIMES, FIND, GUARD, REPRODUCE, ROOFLINE, SUSTAINED, VERIFY, RowKey
from mamf.statistics import (
    CONFIDENCE,
    FigureUncertainty,
    Interval,
    compute_median_ignoring_none,
    compute_run_error,
)

#: The probability that a comparison of equal runs reports a regression. Half of it is for the tests of single rows, and
#: half for the tests of pooled rows (all rows of a regime together).
FALSE_ALARM_CHANCE = 0.01
#: The largest exponent for math.exp, which overflows above 709. A manipulated log can lead to larger exponents.
MAX_EXPONENT = 700.0
_UNKNOWN_TIME = datetime.min.replace(tzinfo=timezone.utc)
# Runs before and after a pause longer than _MAX_SHORT_PAUSE differ more than runs without such a pause: their common
# shift is _LONG_PAUSE_SHIFT_FACTOR times as large.
_LONG_PAUSE_SHIFT_FACTOR, _MAX_SHORT_PAUSE = 1.5, timedelta(minutes=10)
# Degrees of freedom of the t distribution that fits row errors. True: in the sustained regime. False: in all others.
_ROW_DEGREES_OF_FREEDOM = {True: 16, False: 8}
# A card's power controller has two states, in which sustained rates differ by 1.1 %. A rate may be off by half of this.
_POWER_STATE_ERROR_SHARE = 0.0055
_SUSTAINED_RUN_SHIFT_SHARE = 0.0012  # the shift that all rows of a sustained run have in common, relative to the rate


def compute_error_between_runs(error: FigureUncertainty, regime: str, measurement_count: int) -> FigureUncertainty:
    """Compute the error of a rate for a comparison with another run.

    The result allows for larger differences than the calibrated ``error``, because errors between runs have heavier
    tails than a normal distribution. ``measurement_count``: the number of measurements that gave the rate.
    """
    is_sustained = regime == SUSTAINED
    smallest = _POWER_STATE_ERROR_SHARE / math.sqrt(measurement_count) if is_sustained else 1e-6
    return FigureUncertainty(
        common=max(error.common, _SUSTAINED_RUN_SHIFT_SHARE) if is_sustained else error.common,
        own=min(max(error.own, smallest), 10.0),  # A manipulated log may contain any error.
        degrees=_ROW_DEGREES_OF_FREEDOM[is_sustained],
    )


class RunOrder(NamedTuple):
    """The order in which the runs of two sides were measured, and how much equal runs in this order may differ.

    - ``description``: the order in words, for reports.
    - ``shift_factor``: the common shift between the two sides, as a multiple of the shift of a single run.
    - ``extra_run_count``: the number of runs beyond the first run of each side.
    """

    description: str
    shift_factor: float
    extra_run_count: int


#: The order of two single runs with a long pause between them, which is the default.
SEPARATE_RUNS = RunOrder("more than 10 minutes between runs", math.sqrt(2) * _LONG_PAUSE_SHIFT_FACTOR, 0)


def find_run_order(a: Sequence[RunLog], b: Sequence[RunLog]) -> RunOrder:
    """Find the order in which the runs of A and B were measured, from their start times and durations."""
    runs = sorted((_read_start_and_end(log), side) for side, logs in enumerate((a, b)) for log in logs)
    if any(after[0] - before[1] > _MAX_SHORT_PAUSE for (before, _), (after, _) in pairwise(runs)):
        return SEPARATE_RUNS._replace(extra_run_count=len(runs) - 2)
    sides = [side for _, side in runs]
    if len(a) == len(b) and all(one != two for one, two in zip(sides[::2], sides[1::2], strict=True)):
        return RunOrder(f"{len(a)} + {len(b)} alternating runs", math.sqrt(2 / len(a)), len(runs) - 2)
    return RunOrder(f"{len(a)} + {len(b)} runs without a long pause", math.sqrt(2), len(runs) - 2)


def _read_start_and_end(log: RunLog) -> tuple[datetime, datetime]:
    """Return when a run started and ended. If its log does not say this, return the earliest possible time for both."""
    try:
        begun = datetime.fromisoformat(log.header["started"]).astimezone(timezone.utc)
        return begun, begun + timedelta(seconds=float((log.summary or {})["elapsed_seconds"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return _UNKNOWN_TIME, _UNKNOWN_TIME


_NORMAL_95_HALF_WIDTH = 1.96  # half the width of a 95 % interval of a normal distribution, in standard deviations
#: The unit of rows that are compared by used cycles, which are a percentage of all cycles of the compute units.
CYCLES_UNIT = "% of cycles"
#: The values that identify a row in both logs, by field: regime, fields of the problem, shape and kernel.
PairingFields = dict[str, object]


@dataclass(frozen=True)
class ComparedRow:
    """A row of a log in the form in which it is compared with a row of another log.

    - ``pairing_fields``: the values by which the row is paired with a row of the other log.
    - ``rate``: the rate in ``unit``; None if the row has no rate. ``status`` and ``reason`` then say why.
    - ``interval``: the interval in which the rate of another run is expected.
    - ``repetition_count``: in a log of ``mamf guard``, the number of repeated measurements that gave the rate.
    - ``error``: the error of the rate between runs, if it is known. ``seconds_per_launch``: inf if unknown.
    - ``run_rates``: the rate in each run, if several runs were averaged.
    - ``celsius``, ``speed_loss_per_degree``: the temperature, if known, and the relative loss of speed per degree.
    - ``used_cycle_share``, ``cycles_error``: the share of the compute units' cycles that the kernel used
      (mamf.plausibility), and how much this share differs between cards; None if unknown.
    - ``device``: UUID or index of the device; empty for the first device of the run.
    - ``device_speed``: the speed of this device relative to the first device; None if it is unknown.
    - ``device_speed_half_width``: half the width of the interval of this speed, as a share.
    - ``was_cpu_device_busy``: whether the device was a CPU that other work used too.
    """

    pairing_fields: PairingFields
    shape: str
    kernel: str
    rate: float | None = None
    interval: Interval | None = None
    status: str = "ok"
    unit: str = "TFLOPS"
    repetition_count: int = 0
    reason: str = ""
    device: str = ""
    device_speed: float | None = 1.0
    device_speed_half_width: float = 0.0
    error: FigureUncertainty | None = None
    seconds_per_launch: float = math.inf
    run_rates: tuple[float, ...] = ()
    celsius: float | None = None
    speed_loss_per_degree: float = 0.0
    used_cycle_share: float | None = None
    cycles_error: FigureUncertainty | None = None
    was_cpu_device_busy: bool = False

    @property
    def has_known_interval(self) -> bool:
        """Whether the interval is narrow enough to be useful, and the machine was quiet enough to trust it."""
        return self.interval is not None and self.interval.is_known and not self.was_cpu_device_busy

    @property
    def pairing_key(self) -> object:
        """The pairing fields of the row as a hashable key."""
        return frozenset(self.pairing_fields.items())

    def copy_without_fields(self, names: Collection[str]) -> ComparedRow:
        """Return a copy without the fields that have these names, so that pairing ignores them."""
        return replace(
            self, pairing_fields={key: each for key, each in self.pairing_fields.items() if key not in names}
        )

    def convert_to_cycle_share(self) -> ComparedRow:
        """Return a copy whose rate is the percentage of the compute units' cycles that the kernel used.

        This share is the same on all cards of one architecture, so the result does not depend on the speed of the card.
        If the clock was not measured, the copy has no rate.
        """
        if self.rate is None or self.used_cycle_share is None or self.cycles_error is None:
            return self if self.rate is None else replace(self, rate=None, status="the true clock was not measured")
        percent, half = 100 * self.used_cycle_share, _NORMAL_95_HALF_WIDTH * self.cycles_error.own
        return replace(
            self,
            rate=percent,
            unit=CYCLES_UNIT,
            interval=Interval(percent * (1 - half), percent * (1 + half), CONFIDENCE),
            error=self.cycles_error,
            run_rates=(),
            speed_loss_per_degree=0.0,
            device="",
            device_speed=1.0,
            device_speed_half_width=0.0,
        )

    def scale_to_device_of(self, other: ComparedRow) -> ComparedRow:
        """Return a copy whose rate is scaled to the speed of the device of the row ``other``.

        The relative speed of the two devices comes from a reference shape that both measured. If one device did not
        measure it, the copy has no rate.
        """
        if self.device == other.device or self.rate is None:
            return self
        if not (self.device_speed and other.device_speed):
            return replace(self, rate=None, status="the device did not measure the reference shape")
        assert self.interval is not None and self.error is not None, "a figure has both"
        factor = other.device_speed / self.device_speed
        half_width = math.hypot(self.device_speed_half_width, other.device_speed_half_width)
        return replace(
            self,
            rate=self.rate * factor,
            interval=self.interval.scale(factor),
            error=replace(self.error, own=math.hypot(self.error.own, half_width / _NORMAL_95_HALF_WIDTH)),
        )


def is_search_log(log: RunLog) -> bool:
    return log.plan.kind in (FIND, ROOFLINE)


def list_compared_rows(log: RunLog, as_ceilings: bool = False) -> list[ComparedRow]:
    """Return the rows of a log that a comparison uses. Raises UsageError for a log that has nothing to compare.

    ``as_ceilings``: whether to return the ceilings in a log of ``mamf find`` instead of its confirmed candidates. Two
    logs of ``mamf find`` are compared by their ceilings.
    """
    rows = _list_rows_of_log(log, as_ceilings)
    return [replace(row, was_cpu_device_busy=True) for row in rows] if was_cpu_device_busy(log.header) else rows


def _list_rows_of_log(log: RunLog, as_ceilings: bool) -> list[ComparedRow]:
    rows = [row for row in log.measurements if not row.is_reference]
    plan = log.plan
    if log.part_logs and is_search_log(log):
        raise UsageError(f"{log.path} has a separate search for each device: compare the log of one device")
    if plan.kind == VERIFY:
        raise UsageError(f"{log.path} is a log of 'mamf verify' and has no rates to compare: give another log")
    if plan.kind in (GUARD, REPRODUCE):
        return [combine_measurements(same) for same in group_by_key(rows).values()]
    if not is_search_log(log) or (plan.confirms_best_rows and not as_ceilings):
        return _make_compared_rows_of_devices(log, [row for row in rows if not row.phase])
    if plan.confirms_best_rows:
        return [_make_row_of_ceiling(ceiling) for ceiling in log.other_ceilings.values()]
    if not as_ceilings:
        return list(_yield_confirmed_candidates(rows))
    by_regime = group_pairs((row.regime, row) for row in rows)
    ceilings = (find_confirmed_ceiling(same, log.header["device"]["name"]) for same in by_regime.values())
    return [_make_row_of_ceiling(ceiling) for ceiling in ceilings if ceiling is not None]


@functools.lru_cache(1024)  # A log has many rows but only a few problems.
def get_problem_fields(problem: Any) -> PairingFields:
    """Return the fields of a problem by which rows are paired: all fields except the seed of the data. For a forward
    pass of attention, ``backward_count`` has its default value, because this field concerns backward passes only.
    """
    if isinstance(problem, AttentionProblem) and not problem.has_backward_pass:
        problem = replace(problem, backward_count=AttentionProblem.backward_count)
    record = get_operation(problem.operation).make_problem_record(problem)
    return {name: value for name, value in record.items() if name != "seed"}


def make_pairing_fields(key: RowKey) -> PairingFields:
    """Return the fields by which rows with this key are paired: its regime, problem fields, shape and kernel."""
    return {"regime": key.regime, **get_problem_fields(key.problem), "shape": str(key.shape), "kernel": key.kernel}


def _make_compared_row(row: Measurement) -> ComparedRow:
    fields, shape = make_pairing_fields(row.key), str(row.shape)
    if row.summary is None:
        return ComparedRow(fields, shape, row.kernel, status=row.status, reason=row.reason)
    return _add_error_and_conditions(
        ComparedRow(fields, shape, row.kernel, row.compute_rate(row.statistic), row.rate_interval, unit=row.work.unit),
        [row],
    )


def _add_error_and_conditions(compared_row: ComparedRow, measurements: Sequence[Measurement]) -> ComparedRow:
    """Return a copy of a row, with the error, temperature and used cycles from the measurements that gave its rate."""
    return replace(
        compared_row,
        error=compute_error_between_runs(
            compute_combined_rate_error(measurements), measurements[0].regime, len(measurements)
        ),
        seconds_per_launch=measurements[0].seconds,
        celsius=compute_median_ignoring_none(row.conditions.celsius for row in measurements),
        speed_loss_per_degree=choose_repeatability(measurements).per_degree,
        used_cycle_share=compute_median_ignoring_none(row.conditions.used_cycle_share for row in measurements),
        cycles_error=_compute_cycles_error(measurements[0].regime, measurements[0].problem),
    )


def _compute_cycles_error(regime: str, problem: Any) -> FigureUncertainty | None:
    """Return the calibrated error of used cycles between different cards; None for a regime without calibration."""
    if regime not in COMMON_REGIMES:
        return None
    return compute_run_error([1.0], 1.0, [0.0], look_up_repeatability("", f"{regime} cycles", problem))


def _make_compared_rows_of_devices(log: RunLog, rows: Sequence[Measurement]) -> list[ComparedRow]:
    """Convert rows to compared rows.

    If several devices shared the run, add the device and its relative speed to each row that the first device did not
    measure.
    """
    found = [_make_compared_row(row) for row in rows]
    own, speeds = log.header["device"]["index"], compute_device_speeds(log.measurements)
    cards = {device.index: device.uuid_hash or str(device.index) for device in log.devices}
    for number, row in enumerate(rows):
        if row.device_index not in (None, own):
            of_own = speeds.get(get_speed_context(row), {}).get(own)
            found[number] = replace(
                found[number],
                device=cards.get(row.device_index, ""),
                device_speed=row.device_speed / of_own.relative_speed if of_own and row.device_speed else None,
                device_speed_half_width=row.device_speed_half_width,
            )
    return found


def group_by_key(rows: Iterable[Measurement]) -> dict[RowKey, list[Measurement]]:
    """Group rows by key (regime, problem, shape and kernel), because a row may be measured several times."""
    return group_pairs((row.key, row) for row in rows)


def select_counted_measurements(measurements: Sequence[Measurement]) -> Sequence[Measurement]:
    """Return the measurements of one row that count. If any result was wrong, only the last wrong one counts. If the
    row was measured again (phase ``confirm``), the first measurement does not count. Of the others, those with a rate
    count or, if there are none, the last one.
    """
    wrong = [row for row in measurements if row.status == "wrong_result"]
    repeated = [row for row in measurements if row.phase == CONFIRM_PHASE] or measurements
    return wrong[-1:] or [row for row in repeated if row.ok] or repeated[-1:]


def combine_measurements(measurements: Sequence[Measurement]) -> ComparedRow:
    """Combine the measurements of one row that count into one compared row (``select_counted_measurements``)."""
    counted = select_counted_measurements(measurements)
    combined = _make_compared_row(counted[-1])
    if not counted[-1].ok or counted[-1].phase != CONFIRM_PHASE:
        return combined
    rate, interval = combine_rounds(counted)
    return _add_error_and_conditions(
        replace(combined, rate=rate, interval=interval, repetition_count=len(counted)), counted
    )


def _yield_confirmed_candidates(rows: Sequence[Measurement]) -> Iterable[ComparedRow]:
    """Yield a compared row for each candidate shape that ``mamf find`` measured repeatedly to confirm its rate."""
    for measurements in group_by_key(row for row in rows if row.phase == CONFIRM_PHASE and row.ok).values():
        if len(measurements) >= MIN_CONFIRMING_ROUNDS:
            rate, interval = combine_rounds(measurements)
            row = replace(_make_compared_row(measurements[0]), rate=rate, interval=interval)
            yield _add_error_and_conditions(row, measurements)


def _make_row_of_ceiling(ceiling: Ceiling) -> ComparedRow:
    repeatability = ceiling.repeatability or look_up_repeatability("", ceiling.regime, ceiling.problem)
    error = compute_run_error([ceiling.seconds], ceiling.seconds, [0.0], repeatability)
    return ComparedRow(
        {"regime": ceiling.regime, **get_problem_fields(ceiling.problem)},
        str(ceiling.shape),
        ceiling.kernel,
        ceiling.rate,
        ceiling.interval,
        unit=ceiling.unit,
        error=compute_error_between_runs(error, ceiling.regime, ceiling.round_count),
        seconds_per_launch=ceiling.seconds,
        celsius=ceiling.conditions.celsius,
        speed_loss_per_degree=repeatability.per_degree,
        used_cycle_share=ceiling.conditions.used_cycle_share,
        cycles_error=_compute_cycles_error(ceiling.regime, ceiling.problem),
    )


def average_compared_rows(runs: Sequence[Sequence[ComparedRow]]) -> list[ComparedRow]:
    """Average several equal runs row by row. The average of rates is their geometric mean."""
    if len(runs) == 1:
        return list(runs[0])
    rows_by_key = group_pairs((row.pairing_key, row) for row in itertools.chain(*runs))
    return [_average_compared_row(rows, len(runs)) for rows in rows_by_key.values()]


def _average_compared_row(rows: Sequence[ComparedRow], count: int) -> ComparedRow:
    """Average one row over ``count`` runs. The result has no rate if the row has no rate in one of the runs."""
    rates = tuple(row.rate for row in rows if row.rate is not None)
    if len(rates) < count:
        status = next((row.status for row in rows if row.rate is None), "not measured in one of the runs")
        return replace(rows[0], rate=None, interval=None, status=status)
    intervals, errors = [row.interval for row in rows if row.interval], [row.error for row in rows if row.error]
    return replace(
        rows[0],
        rate=geometric_mean(rates),
        interval=Interval(
            geometric_mean(each.low for each in intervals),
            geometric_mean(each.high for each in intervals),
            min(each.coverage for each in intervals),
        ),
        error=replace(errors[0], own=math.hypot(*(error.own for error in errors)) / count),
        run_rates=rates,
        was_cpu_device_busy=any(row.was_cpu_device_busy for row in rows),
        celsius=compute_median_ignoring_none(row.celsius for row in rows),
        used_cycle_share=compute_median_ignoring_none(row.used_cycle_share for row in rows),
    )
