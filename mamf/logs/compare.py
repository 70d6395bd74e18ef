"""Compare the logs of two sides, A and B, row by row, and decide which rows are faster, slower or undecided in B. The
code reads logs only; it measures nothing.

Which rows are compared:

- Sweeps, including attention: every measured row, except those of the reference matmul (which shows drift) and of the
  search for a ceiling.
- Two logs of ``mamf find``: their ceilings, one row per regime, because chance decides which of several equally fast
  shapes ``mamf find`` reports.
- A log of ``mamf find`` and a log of another kind of run: the candidate shapes that ``mamf find`` measured again to
  confirm them. The measurements by which it chose the candidates are never compared, because the best of many noisy
  rates is biased upward (the winner's curse).
- Logs of ``mamf guard``: the repeated measurements of a row if its first one looked slow or noisy, otherwise the first.

How mamf computes a verdict:

- The error of the ratio B/A has two parts: one that all rows of a run share, and one that is separate for each row
  (mamf.logs.compared_rows).
- The interval of a row has 95 % confidence. If the temperatures of A and B are known, the interval is wider by the
  change in rate that the temperature difference could cause.
- SAME is an equivalence test, two one-sided tests at 5 %: the 90 % interval must be within the tolerance.
- A row is UNDECIDED if the interval of A or of B is so wide that reports call it unknown.
- The intervals that decide FASTER, SLOWER and regressions are widened for the number of rows (Bonferroni). If nothing
  changed, the chance that at least one row gets the verdict SLOWER is at most 0.5 %. The chance that the pooled rows of
  any regime count as slower is also at most 0.5 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any, Literal, get_args

from mamf.backend import DeviceInfo, parse_sharing_ways
from mamf.ceilings.roof import (
    Roofs,
    require_same_device,
)
from mamf.errors import DEFAULT_COMPARISON_TOLERANCE, IncomparableError, LogMismatchError
from mamf.logs.compared_rows import (
    FALSE_ALARM_CHANCE,
    MAX_EXPONENT,
    SEPARATE_RUNS,
    ComparedRow,
    PairingFields,
    RunOrder,
    average_compared_rows,
    find_run_order,
    is_search_log,
    list_compared_rows,
)
from mamf.logs.pooling import PooledRows, RowChange, pool_rows
from mamf.logs.run_log import RunLog
from mamf.machine.environment import describe_environment
from mamf.measurement import NotebookTable, group_pairs
from mamf.operations.unknown import sets_compute_ceiling
from mamf.statistics import CONFIDENCE, Interval, compute_student_t_quantile

RowVerdict = Literal["SAME", "FASTER", "SLOWER", "UNDECIDED"]
ROW_VERDICTS: tuple[RowVerdict, ...] = get_args(RowVerdict)
# The verdict is UNDECIDED if the probability that both intervals contain the true rates may be below this value. With
# three samples, an interval contains the true rate with a probability of 0.75. Both do with at least 0.75 + 0.75 - 1.
MIN_INTERVAL_COVERAGE = 0.5
# A comparison of two rows uses a 95 % interval of each rate. The probability that both intervals contain the true rates
# is at least 1 - 0.05 - 0.05 = 0.9. Subtract a small number to allow for rounding errors.
_NOMINAL_COVERAGE = 0.9 - 1e-9
# The confidence of the interval that must be within the tolerance for the verdict SAME. At 90 %, this is equivalent to
# two one-sided tests at 5 % each.
_EQUIVALENCE_CONFIDENCE = 0.90


@dataclass(frozen=True)
class RowPair:
    """A row that both sides measured: ``a`` is from side A, ``b`` from side B.

    - ``pairing_fields``: the values by which the two rows were paired.
    - ``run_order``: the order in which the runs of the two sides were measured.
    - ``row_count``: the number of rows in the comparison.
    """

    pairing_fields: PairingFields
    a: ComparedRow
    b: ComparedRow
    run_order: RunOrder = SEPARATE_RUNS
    row_count: int = 1

    @property
    def is_same_device(self) -> bool:
        return self.a.device == self.b.device

    #: The rate in B divided by the rate in A: above 1 if B is faster.
    @property
    def ratio(self) -> float:
        assert self.a.rate is not None and self.b.rate is not None, "only measured rows are paired"
        return self.b.rate / self.a.rate

    @property
    def has_known_intervals(self) -> bool:
        """Whether the intervals of A and of B are known (``ComparedRow.has_known_interval``)."""
        return self.a.has_known_interval and self.b.has_known_interval

    @property
    def change(self) -> RowChange:
        """The change of the rate from A to B, as input for ``pool_rows``, which tests all rows together."""
        a, b = self.a.error, self.b.error
        assert a is not None and b is not None, "only measured rows are paired"
        return RowChange(
            log_ratio=math.log(min(max(self.ratio, 1e-300), 1e300)),  # A manipulated log may have any ratio.
            common_deviation=max(a.common, b.common),
            row_deviation=math.hypot(a.own, b.own),
            degrees_of_freedom=min(a.degrees, b.degrees),
            seconds_per_launch=self.a.seconds_per_launch,
            run_rates=(self.a.run_rates, self.b.run_rates),
            temperature_effect=self.temperature_effect,
        )

    @property
    def temperature_effect(self) -> float:
        """The largest relative difference between the rates of A and B that their different temperatures can explain; 0
        if either temperature is unknown.
        """
        if self.a.celsius is None or self.b.celsius is None:
            return 0.0
        return max(self.a.speed_loss_per_degree, self.b.speed_loss_per_degree) * abs(self.a.celsius - self.b.celsius)

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the ratio B/A."""
        return self._compute_ratio_interval(CONFIDENCE)

    @property
    def strict_confidence(self) -> float:
        """The confidence of the interval that must not contain 1 for the verdicts FASTER and SLOWER. It increases with
        the number of rows, so that the chance of at least one false verdict is at most FALSE_ALARM_CHANCE.
        """
        return 1 - FALSE_ALARM_CHANCE / self.row_count

    def _compute_ratio_interval(self, confidence: float) -> Interval:
        a, b = self.a.interval, self.b.interval
        assert a is not None and b is not None, "only measured rows are paired"
        coverage = max(0.0, a.coverage + b.coverage - 1)
        change = self.change
        deviation = math.hypot(self.run_order.shift_factor * change.common_deviation, change.row_deviation)
        half_width = (
            compute_student_t_quantile(change.degrees_of_freedom, confidence) * deviation + change.temperature_effect
        )
        factor = math.exp(min(half_width, MAX_EXPONENT))
        return Interval(
            self.ratio / factor, self.ratio * factor, confidence if coverage >= _NOMINAL_COVERAGE else coverage
        )

    def decide_verdict(self, tolerance: float = DEFAULT_COMPARISON_TOLERANCE) -> RowVerdict:
        """Decide whether B is faster than A: return SAME if the 90 % interval of the ratio is within the tolerance,
        FASTER or SLOWER if a difference of any size is certain, otherwise UNDECIDED. Also return UNDECIDED if the
        interval of A or of B is unknown.
        """
        interval = self._compute_ratio_interval(_EQUIVALENCE_CONFIDENCE)
        strict_interval = self._compute_ratio_interval(self.strict_confidence)
        if interval.coverage < MIN_INTERVAL_COVERAGE or not self.has_known_intervals:
            return "UNDECIDED"
        if 1 - tolerance <= interval.low and interval.high <= 1 + tolerance:
            return "SAME"
        if strict_interval.low > 1:
            return "FASTER"
        return "SLOWER" if strict_interval.high < 1 else "UNDECIDED"

    def was_measured_too_briefly(self, tolerance: float = DEFAULT_COMPARISON_TOLERANCE) -> bool:
        """Return whether the row was measured for too short a time: its interval is wider than the tolerance, so its
        verdict cannot be SAME.
        """
        return self._compute_ratio_interval(_EQUIVALENCE_CONFIDENCE).half_width > tolerance * self.ratio

    def is_regression(self, tolerance: float = DEFAULT_COMPARISON_TOLERANCE) -> bool:
        """Return whether B is certainly slower than A (SLOWER), and by more than the tolerance."""
        return self.decide_verdict(tolerance) == "SLOWER" and self.ratio < 1 - tolerance

    def make_table_row(self, tolerance: float = DEFAULT_COMPARISON_TOLERANCE) -> dict[str, Any]:
        """Return the pair as one row of a table: its values by column. Rates are in TFLOPS unless there is a column
        ``unit``, which names their unit.
        """
        a, b, interval = self.a, self.b, self.interval
        assert a.interval is not None and b.interval is not None, "only measured rows are paired"
        rate = "tflops" if a.unit == "TFLOPS" else "rate"
        return {
            **self.pairing_fields,
            "shape_a": a.shape,
            "shape_b": b.shape,
            "kernel_a": a.kernel,
            "kernel_b": b.kernel,
            **({} if rate == "tflops" else {"unit": a.unit}),
            f"{rate}_a": a.rate,
            "interval_low_a": a.interval.known_ends[0],
            "interval_high_a": a.interval.known_ends[1],
            f"{rate}_b": b.rate,
            "interval_low_b": b.interval.known_ends[0],
            "interval_high_b": b.interval.known_ends[1],
            "ratio": self.ratio,
            "ratio_interval_low": interval.low,
            "ratio_interval_high": interval.high,
            "coverage_at_least": interval.coverage,
            "verdict": self.decide_verdict(tolerance),
            "is_too_short": self.was_measured_too_briefly(tolerance),
            "is_regression": self.is_regression(tolerance),
        }


@dataclass(frozen=True)
class Comparison(NotebookTable):
    """The logs of two sides, A and B, compared row by row.

    - ``a``, ``b``: the first log of each side.
    - ``log_paths``: the paths of all logs of each side, as the user gave them, because logs in different folders often
      have the same file name.
    - ``pairs``: the rows that both sides measured, from the slowest to the fastest in B.
    - ``rows_only_in_a``, ``rows_only_in_b``: the rows that have a rate on one side only, each with the failed row of
      the other side, or None if the other side did not measure the row.
    - ``ignored_differences``: the fields that pairing ignored, because their values differ between the logs.
    - ``noted_differences``: the differences in software and settings, which do not prevent a comparison.
    - ``overridden_differences``: the differences that make the logs incomparable, if the user asked to compare the logs
      anyway.
    - ``run_order``: the order in which the runs of the two sides were measured.
    - ``pooled_rows``: for each regime, one ratio from all its rows.
    """

    a: RunLog
    b: RunLog
    log_paths: tuple[str, str]
    pairs: tuple[RowPair, ...]
    rows_only_in_a: tuple[tuple[ComparedRow, ComparedRow | None], ...]
    rows_only_in_b: tuple[tuple[ComparedRow, ComparedRow | None], ...]
    ignored_differences: tuple[Difference, ...] = ()
    noted_differences: tuple[Difference, ...] = ()
    overridden_differences: tuple[Difference, ...] = ()
    run_order: RunOrder = SEPARATE_RUNS
    pooled_rows: tuple[PooledRows, ...] = ()

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.count_verdicts().items() if count)
        return f"Comparison({self.log_paths[0]} against {self.log_paths[1]}: {counts})"

    def rows(self, tolerance: float = DEFAULT_COMPARISON_TOLERANCE) -> list[dict[str, Any]]:
        """Return a dict for each pair of rows, which maps the names of columns to values. Pass the list to
        ``pandas.DataFrame``.
        """
        return [pair.make_table_row(tolerance) for pair in self.pairs]

    def count_verdicts(self, tolerance: float = DEFAULT_COMPARISON_TOLERANCE) -> dict[str, int]:
        """Return the number of rows for each verdict, including verdicts that no row has."""
        counts = Counter(pair.decide_verdict(tolerance) for pair in self.pairs)
        return {verdict: counts[verdict] for verdict in ROW_VERDICTS}

    @property
    def geometric_mean_ratio(self) -> float:
        """The geometric mean of the ratio B/A over all pairs."""
        return geometric_mean(pair.ratio for pair in self.pairs)

    def find_regressions(self, tolerance: float = DEFAULT_COMPARISON_TOLERANCE) -> list[RowPair]:
        """Return the pairs that are certainly slower in B and by more than the tolerance, slowest first."""
        return [pair for pair in self.pairs if pair.is_regression(tolerance)]

    def is_b_slower(self, tolerance: float = DEFAULT_COMPARISON_TOLERANCE) -> bool:
        """Return whether B is slower than A, which is true if any single row, or the pooled rows of any regime, is a
        regression.
        """
        return bool(self.find_regressions(tolerance)) or any(each.is_regression(tolerance) for each in self.pooled_rows)


def compare_logs(a: RunLog | Sequence[RunLog], b: RunLog | Sequence[RunLog], anyway: bool = False) -> Comparison:
    """Compare two logs, or several equal runs on each side, row by row.

    If the runs are from different cards, and the logs of both sides contain the measured clock of the compute units,
    compare the share of the compute units' cycles that each kernel used, instead of its rate.

    Raises IncomparableError if the devices, dtypes, regimes or cache states of the two sides differ, or if the runs of
    one side had different software. ``anyway``: compare the rates in spite of these differences. Logs without a common
    row always raise IncomparableError.
    """
    side_a, side_b = ([each] if isinstance(each, RunLog) else list(each) for each in (a, b))
    first, other = side_a[0], side_b[0]
    are_finds = all(map(is_search_log, (*side_a, *side_b)))
    rows_a, rows_b = (
        average_compared_rows([list_compared_rows(log, are_finds) for log in side]) for side in (side_a, side_b)
    )
    differences = [
        *(each for log in (*side_a[1:], *side_b) for each in find_blocking_differences(first.header, log.header)),
        *find_field_differences(rows_a, rows_b),
        *(
            each
            for side in (side_a, side_b)
            for log in side[1:]
            for each in find_setting_differences(side[0].header, log.header)
        ),
    ]
    cards = [each for each in differences if each.is_card_difference]
    in_cycles = (
        bool(cards)
        and not anyway
        and all(any(row.used_cycle_share is not None for row in rows) for rows in (rows_a, rows_b))
    )
    if in_cycles:
        rows_a, rows_b = ([row.convert_to_cycle_share() for row in rows] for rows in (rows_a, rows_b))
    forced = [each for each in differences if not (in_cycles and each.is_card_difference)]
    if forced and not anyway:
        reasons = ", ".join(map(str, dict.fromkeys(forced)))
        raise IncomparableError(
            f"{first.path} and {other.path} are not comparable: {reasons}; add --anyway to compare them"
        )
    comparison = pair_rows(first, other, rows_a, rows_b)
    if not comparison.pairs:
        raise IncomparableError(
            f"the two logs have no measured row in common: {_describe_measured_rows(first, rows_a)}; "
            f"{_describe_measured_rows(other, rows_b)}; compare logs that measured the same shapes"
        )
    paths_a, paths_b = (", ".join(str(log.path) for log in side) for side in (side_a, side_b))
    noted = (*dict.fromkeys(cards), *comparison.noted_differences) if in_cycles else comparison.noted_differences
    comparison = replace(
        comparison,
        log_paths=(paths_a, paths_b),
        overridden_differences=tuple(dict.fromkeys(forced)),
        noted_differences=noted,
    )
    return add_run_order_and_pooled_rows(comparison, find_run_order(side_a, side_b))


def add_run_order_and_pooled_rows(comparison: Comparison, run_order: RunOrder) -> Comparison:
    """Return a copy of a comparison with the order in which its runs were measured, and with the pooled rows of each
    regime.
    """
    pairs = tuple(replace(pair, run_order=run_order, row_count=len(comparison.pairs)) for pair in comparison.pairs)
    regimes = group_pairs((pair.pairing_fields.get("regime", "all regimes"), pair) for pair in pairs)
    # Pool only rows with known intervals that both sides measured on the same device, and only if a regime has several
    # of them.
    changes_by_regime = {
        regime: [pair.change for pair in rows if pair.is_same_device and pair.has_known_intervals]
        for regime, rows in regimes.items()
    }
    changes = {regime: rows for regime, rows in changes_by_regime.items() if len(rows) > 1}
    chance = FALSE_ALARM_CHANCE / 2 / max(1, len(changes))
    pooled_rows = tuple(pool_rows(str(regime), rows, run_order, chance) for regime, rows in changes.items())
    return replace(comparison, pairs=pairs, run_order=run_order, pooled_rows=pooled_rows)


def pair_rows(a: RunLog, b: RunLog, rows_a: Sequence[ComparedRow], rows_b: Sequence[ComparedRow]) -> Comparison:
    """Pair the rows of two comparable logs by their fields, and return the comparison, which may have no pairs."""
    # Ignore each field that has one value in all rows of A and another value in all rows of B. Otherwise no row of A
    # could be paired with a row of B.
    ignored_differences = [
        each
        for each in find_field_differences(rows_a, rows_b, ignored_fields=("shape",))
        if len(list_distinct_values(rows_a, each.name)) == len(list_distinct_values(rows_b, each.name)) == 1
    ]
    ignored_names = {difference.name for difference in ignored_differences}
    by_a, by_b = (
        {row.pairing_key: row for row in (row.copy_without_fields(ignored_names) for row in rows)}
        for rows in (rows_a, rows_b)
    )
    by_a = {key: row.scale_to_device_of(by_b[key]) if key in by_b else row for key, row in by_a.items()}
    measured_a, measured_b = ({key: row for key, row in rows.items() if row.rate is not None} for rows in (by_a, by_b))
    pairs = [RowPair(row.pairing_fields, row, measured_b[key]) for key, row in measured_a.items() if key in measured_b]
    return Comparison(
        a,
        b,
        (str(a.path), str(b.path)),
        tuple(sorted(pairs, key=lambda pair: pair.ratio)),
        tuple((row, by_b.get(key)) for key, row in measured_a.items() if key not in measured_b),
        tuple((row, by_a.get(key)) for key, row in measured_b.items() if key not in measured_a),
        tuple(ignored_differences),
        tuple(find_setting_differences(a.header, b.header)),
    )


def _describe_measured_rows(log: RunLog, rows: Sequence[ComparedRow]) -> str:
    measured = [row for row in rows if row.rate is not None]
    if not measured:
        return f"{log.path} has no measured row"
    return f"{log.path} has, for example, a row of shape {measured[0].shape} with kernel {measured[0].kernel}"


# -- which logs can be compared, and by which fields their rows are paired ---------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A difference between sides A and B.

    - ``name``: the name of the setting or field that differs. ``a``, ``b``: its values on the two sides.
    - ``is_card_difference``: True if only the card differs, so that the cycles that kernels used can be compared.
    """

    name: str
    a: str
    b: str
    is_card_difference: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return f"{self.name} {self.a} against {self.b}"


def find_blocking_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Find the differences between two log headers that make the logs incomparable: different devices, cards or cache
    states.

    Raises IncomparableError if the operations differ.
    """
    kinds = a["plan"]["operation"], b["plan"]["operation"]
    if kinds[0] != kinds[1]:
        raise IncomparableError(f"A measured {kinds[0]}, but B measured {kinds[1]}: compare logs of one operation")
    names = a["device"]["name"], b["device"]["name"]
    differences = [Difference("device", *names, is_card_difference=not any(map(parse_sharing_ways, names)))]
    cards = a["device"].get("uuid_hash"), b["device"].get("uuid_hash")
    if names[0] == names[1] and all(cards):
        # Report two different cards of the same model as a difference, because their speeds can differ by several
        # percent.
        differences.append(Difference(f"card {names[0]}", *map(str, cards), is_card_difference=True))
    if not sets_compute_ceiling(kinds[0]):
        # In the burst regime, a kernel can be several times as fast with warm caches as with flushed caches.
        states = ("flushed" if each["plan"].get("flush", True) else "warm" for each in (a, b))
        differences.append(Difference("caches", *states))
    return [each for each in differences if each.a != each.b]


def find_setting_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Find the differences between the software and the settings of two runs, from the headers of their logs.

    These differences do not prevent a comparison, because users often compare runs to see the effect of a difference.
    """
    return find_value_differences(list_run_settings(a), list_run_settings(b))


def find_value_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    """Find the values that differ between two mappings by name. A missing value counts as ``unknown``."""
    pairs = (Difference(name, a.get(name, "unknown"), b.get(name, "unknown")) for name in dict.fromkeys([*a, *b]))
    return [each for each in pairs if each.a != each.b]


def list_run_settings(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the software versions, settings and power limit of a run as text by name, from the header of its log."""
    device, environment = header["device"], header["environment"]
    watts = device.get("power_limit_watts")
    tool = header["tool"]
    named = {
        "backend": device["backend"],
        "driver": device.get("driver"),
        **(device.get("versions") or {}),
        **environment.get("packages", {}),
        "power limit": watts and f"{watts:.0f} W",
        "timer": header["timer"],
        # Do not change the name or the values of this setting, because logs of ``mamf reproduce`` contain them.
        "figures and intervals": "as before schema 4" if "converted_from" in header else "as of schema 4",
        **header.get("settings", {}),
        **environment.get("variables", {}),
        "mamf": " ".join(str(tool[key]) for key in ("version", "commit") if tool.get(key)),
    }
    return {name: str(value) for name, value in named.items() if value not in (None, "")}


def list_distinct_values(rows: Iterable[ComparedRow], name: str) -> list[object]:
    """Return the distinct values of a field of ``rows``, in the order of the log."""
    return list({row.pairing_fields[name]: None for row in rows if name in row.pairing_fields})


def find_field_differences(
    a: Sequence[ComparedRow], b: Sequence[ComparedRow], ignored_fields: Collection[str] = ("shape", "kernel")
) -> list[Difference]:
    """Find the fields, except those named in ``ignored_fields``, that have no value in common in A and B."""
    if not a or not b:
        return []
    names = [name for name in a[0].pairing_fields if name in b[0].pairing_fields and name not in ignored_fields]
    found = ((name, list_distinct_values(a, name), list_distinct_values(b, name)) for name in names)
    return [
        Difference(name, ", ".join(map(str, of_a)), ", ".join(map(str, of_b)))
        for name, of_a, of_b in found
        if not set(of_a) & set(of_b)
    ]


def require_same_card(log: RunLog, roofs: Roofs) -> None:
    """Raise IncomparableError if a log and the roofs (the highest rates of a device) are from different cards."""
    device = log.header["device"]
    require_same_device((roofs.device, roofs.uuid_hash), (device["name"], device["uuid_hash"]))


def require_logged_device(log: RunLog, logged_device: DeviceInfo, open_device: DeviceInfo) -> None:
    """Raise LogMismatchError unless the open device and its software are those of a log, because a log must not mix
    rows of different devices.

    ``logged_device``: the device in the log. ``open_device``: the device that is open now.
    """
    values = [
        (f"device {name}", getattr(logged_device, name), getattr(open_device, name))
        for name in ("backend", "name", "uuid_hash", "compute_units", "driver", "versions")
    ]
    torch = log.header["environment"].get("packages", {}).get("torch")
    for name, before, after in [*values, ("torch", torch, describe_environment()["packages"].get("torch"))]:
        if before != after:
            raise LogMismatchError(f"{log.path} was measured with {name} {before}, not {after}: start a new log")
