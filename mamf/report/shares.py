"""Express rates as shares of upper bounds: the peak of the datasheet, measured ceilings, and the roofs of a roofline.

MAMFU is the share of the highest measured matmul rate. MBU is the share of the measured read bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import (
    MAX_COMPARABLE_DRIFT_SHARE,
    MAX_DRIFT_SHARE,
    MAX_SHARE_OF_CEILING,
    Ceiling,
    Ceilings,
    compute_mamfu,
    compute_mamfu_error,
    compute_share_of_known_ceiling,
    find_row_ceiling,
    has_card_drifted,
)
from mamf.ceilings.roof import MEMORY_LEVEL, Roofs, make_roofline_point
from mamf.logs.records import round_to_six_digits
from mamf.measurement import TERA, Conditions, Measurement, Rate, RatesByDtypeAndRegime, find_rate
from mamf.operations.unknown import get_operation, sets_compute_ceiling
from mamf.peaks import find_datasheet_rate
from mamf.plans import BURST, SUSTAINED
from mamf.report.document import (
    Column,
    Table,
    choose_unit,
    format_interval,
    format_percent,
    format_rate,
    format_whole_number,
    label_kernel,
    make_clock_columns,
    make_columns_from_mappings,
    make_rate_column,
    make_rate_key,
    split_shared_parts,
)

#: What is added to the title of a matmul ceiling, by regime: the abbreviation of maximum achievable matmul FLOPS or of
#: maximum sustained matmul FLOPS.
CEILING_TITLE_SUFFIXES = {BURST: " (MAMF)", SUSTAINED: " (MSMF)"}


def make_problem_title(regime: str, problem: Any) -> str:
    """Return a title from a regime, the dtype of a problem, and the fields in which the problem differs from the
    default.
    """
    return ", ".join([regime, problem.dtype, *get_operation(problem.operation).list_identifying_fields(problem)])


def make_problem_title_in_words(regime: str, problem: Any) -> str:
    """Return a title like that of ``make_problem_title``, but describe the fields in words, for reports."""
    return ", ".join([regime, problem.dtype, *get_operation(problem.operation).describe_problem(problem)])


def make_ceiling_title(ceiling: Ceiling) -> str:
    """Return the title of a ceiling: ``burst (MAMF), bfloat16``, or ``burst ceiling, float32, copy``."""
    name = CEILING_TITLE_SUFFIXES[ceiling.regime] if sets_compute_ceiling(ceiling.problem.operation) else " ceiling"
    return make_problem_title_in_words(f"{ceiling.regime}{name}", ceiling.problem)


def summarize_ceiling(ceiling: Ceiling) -> dict[str, Any]:
    """Return the kernel, shape and rate of a ceiling for the summary record of a log."""
    return {
        "kernel": ceiling.kernel,
        "shape": str(ceiling.shape),
        "rate": round_to_six_digits(ceiling.rate),
        "unit": ceiling.unit,
    }


def divide_by_peak(rate: float, problem: Any, header: Mapping[str, Any]) -> float | None:
    """Return a rate (in TFLOPS or TB/s) as a share of the rate that the datasheet states for the problem, or None if
    the datasheet states none. ``header``: the header of the log, which describes the device.
    """
    peak = get_operation(problem.operation).find_peak_rate(DeviceInfo(**header["device"]), problem)
    return rate * TERA / peak if peak else None


def make_ceiling_table(ceilings: Sequence[Ceiling], header: Mapping[str, Any]) -> Table[Ceiling]:
    """Return a table with a row for each ceiling. The title has the parts that the names of all ceilings share."""
    # Put "(MAMF)" or "(MSMF)" into the title of the table only if all ceilings have the same regime.
    has_one_regime = len({each.regime for each in ceilings}) == 1
    names, shared = split_shared_parts(
        [
            make_ceiling_title(each) if has_one_regime else make_problem_title_in_words(each.regime, each.problem)
            for each in ceilings
        ]
    )
    name_by_id = dict(zip(map(id, ceilings), names, strict=True))
    unit = ceilings[0].unit if ceilings else "TFLOPS"
    factor = choose_unit(unit, [each.rate for each in ceilings])[1]
    columns: list[Column[Ceiling]] = [
        Column("ceiling", "", make_ceiling_title),
        Column("", "ceiling", lambda each: name_by_id[id(each)], is_left_aligned=True),
        Column("operation", "", lambda each: each.problem.operation),
        Column("regime", "", lambda each: each.regime),
        *make_columns_from_mappings(
            ceilings,
            lambda each: get_operation(each.problem.operation).make_problem_record(each.problem),
            has_titles=False,
        ),
        make_rate_column(make_rate_key("rate", unit), unit, lambda each: each.rate, ceilings),
        Column("", "interval", lambda each: each.interval, partial(format_interval, factor=factor), 1, True),
        Column(make_rate_key("rate_low", unit), "", lambda each: each.interval.known_ends[0]),
        Column(make_rate_key("rate_high", unit), "", lambda each: each.interval.known_ends[1]),
        Column("interval_coverage", "", lambda each: each.interval.coverage),
        Column("shape", "shape", lambda each: str(each.shape), drop_priority=1, is_left_aligned=True),
        *make_columns_from_mappings(
            ceilings, lambda each: get_operation(each.problem.operation).make_shape_record(each.shape), has_titles=False
        ),
        Column("kernel", "kernel", lambda each: each.kernel, lambda name: label_kernel(name, header), 1, True, 12),
        Column(
            "share_of_peak", "% peak", lambda each: divide_by_peak(each.rate, each.problem, header), format_percent, 2
        ),
        Column("rounds", "rounds", lambda each: each.round_count, drop_priority=6),
        Column("ties", "tied", lambda each: len(each.tied_candidates), drop_priority=6),
        Column("tied", "", lambda each: " ".join(f"{shape}:{kernel}" for shape, kernel in each.tied_candidates)),
        Column("gain_over_default", "", lambda each: each.gain_over_default),
        *make_clock_columns(lambda each: each.conditions, 3),
        Column("power_watts", "W", lambda each: each.conditions.watts, format_whole_number, 4),
        Column(
            "joules_per_tflop",
            "J/TFLOP",
            lambda ceiling: ceiling.joules_per_tflop if ceiling.unit == "TFLOPS" else None,
            "{:.3f}".format,
            5,
        ),
    ]
    return Table(columns, ceilings, shared, "ceilings", get_label=make_ceiling_title)


def describe_clock(conditions: Conditions) -> str:
    """Say which share of the compute units' cycles a kernel used and at which clock: ``98.0 % of the units' cycles at
    1629 MHz``. Leave out what is unknown.
    """
    requested = f"{conditions.clock_hz / 1e6:.0f} MHz" if conditions.clock_hz else ""
    if not conditions.true_clock_hz:
        return requested and f"{requested} requested"
    used = f"{100 * conditions.used_cycle_share:.1f} % of the units' cycles at " if conditions.used_cycle_share else ""
    return f"{used}{conditions.true_clock_hz / 1e6:.0f} MHz{f' (requested: {requested})' if requested else ''}"


#: Reports show this text in place of a share that is far above 1. Such a share means that the ceiling is too low.
LOW_CEILING_TEXT = (
    f"rates are above {100 * MAX_SHARE_OF_CEILING:.0f} % of the ceiling, so the ceiling is too low, and all shares "
    "of it are too high: measure it again"
)


def format_drift(limit: float = MAX_COMPARABLE_DRIFT_SHARE) -> str:
    """Return the words that begin a warning about a card for which ``has_card_drifted`` is true. ``limit``: as for
    ``has_card_drifted``.
    """
    return f"device speed drifted by more than {100 * limit:.0f} % and out of the ceiling's interval"


@dataclass(frozen=True)
class ShareCalculator:
    """Computes the rates of one log as shares of peaks, ceilings and roofs.

    - ``header``: the header of the log.
    - ``measured_ceilings``: the ceilings that were measured together with the rows.
    - ``known_ceilings``: ceilings that the user gave on the command line, or that results/ contains.
    - ``roofs``: the roofs of the device; None if the report has no roofs.
    """

    header: Mapping[str, Any]
    measured_ceilings: Ceilings = field(default_factory=dict)
    known_ceilings: RatesByDtypeAndRegime = field(default_factory=dict)
    roofs: Roofs | None = None

    def compute_share_of_peak(self, row: Measurement) -> float | None:
        return divide_by_peak(row.best_rate, row.problem, self.header) if row.ok else None

    def compute_row_mamfu(self, row: Measurement) -> float | None:
        """Return a row's rate as a share of the ceiling of its dtype and regime, or None if no ceiling is known."""
        if not row.work.has_matmul_flop:
            return None
        share = compute_mamfu(row, self.measured_ceilings)
        return (
            compute_share_of_known_ceiling(row, self.known_ceilings)
            if share is None and row.work.unit == "TFLOPS"
            else share
        )

    def compute_row_mbu(self, row: Measurement) -> float | None:
        """Return the memory traffic of a row as a share of the read bandwidth in the row's regime, or None if the
        bandwidth is unknown.
        """
        if self.roofs is None or not row.ok or not get_operation(row.operation).shows_bandwidth_shares:
            return None
        memory = self.roofs.bandwidth_ceilings.get((MEMORY_LEVEL, row.regime))
        return None if memory is None else row.work.nbytes / row.comparable_seconds / TERA / memory.rate

    def find_limiting_share(self, row: Measurement) -> tuple[str, float]:
        """Return ("MAMFU", share) or ("MBU", share), whichever share is higher. The share is 0 if neither is known."""
        shares = {"MAMFU": self.compute_row_mamfu(row) or 0.0, "MBU": self.compute_row_mbu(row) or 0.0}
        return max(shares.items(), key=lambda item: item[1])

    def describe_share(self, row: Measurement) -> str:
        """Return the MAMFU of a row in words, or its MBU if that is higher. Return an empty text if the MAMFU exceeds
        MAX_SHARE_OF_CEILING, because ``yield_share_remarks`` says this.

        If the kernel multiplies in a dtype other than the row's dtype, MAMFU may be above 1 although the ceiling is
        right. The text then names the dtype of the ceiling.
        """
        name, share = self.find_limiting_share(row)
        if name == "MBU":
            return f"{format_percent(share)} % of the read bandwidth (MBU)"
        if not share:
            return ""
        if "product_dtypes" in row.details:
            return f"{format_percent(share)} % of the {row.problem.dtype} ceiling"
        return f"{format_percent(share)} % of the ceiling (MAMFU)" if share <= MAX_SHARE_OF_CEILING else ""

    def find_ceiling_tflops(self, row: Measurement) -> float | None:
        ceiling = find_row_ceiling(row, self.measured_ceilings) or find_row_ceiling(row, self.known_ceilings)
        return ceiling.tflops if ceiling and row.work.has_matmul_flop else None

    def make_share_columns(self, rows: Sequence[Measurement]) -> list[Column[Measurement]]:
        def read_roofline_point(row: Measurement, name: str) -> object:
            point = make_roofline_point(row, self.roofs, str(row.shape)) if self.roofs is not None and row.ok else None
            return getattr(point, name, None)

        roof, share, bound = (partial(read_roofline_point, name=name) for name in ("roof_rate", "roof_share", "bound"))
        is_model = any(get_operation(row.operation).counts_model_flop for row in rows[:1])
        roof_columns: list[Column[Measurement]] = [
            Column(make_rate_key("roof", rows[0].work.unit if rows else "TFLOPS"), "", roof),
            Column("share_of_roof", "% of roof", share, format_percent, 1),
            Column("bound_by", "bound by", bound, drop_priority=3, is_left_aligned=True),
        ]
        return [
            Column("share_of_peak", "MFU" if is_model else "% peak", self.compute_share_of_peak, format_percent, 2),
            Column("ceiling_tflops", "", self.find_ceiling_tflops),
            Column("mbu", "MBU", self.compute_row_mbu, format_percent, 1),
            Column("mamfu", "MAMFU", self.compute_row_mamfu, format_percent, 1),
            Column("mamfu_accuracy", "", lambda row: compute_mamfu_error(row, self.measured_ceilings) or None),
            *(roof_columns if self.roofs is not None else ()),
        ]

    def yield_share_remarks(self, row: Measurement) -> Iterator[str]:
        """Yield remarks about the shares of a row. If the kernel multiplies in dtypes other than that of the row, give
        the rate as a share of the ceilings of these dtypes. Warn if the device has become slower or faster since the
        ceiling was measured.
        """
        for dtype in str(row.details.get("product_dtypes", "")).split():
            ceiling = find_rate(self.measured_ceilings, dtype, row.regime)
            if ceiling is not None and ceiling.interval.is_known and row.ok:
                share = ceiling.compute_utilization(flop=row.flop, seconds=row.comparable_seconds, regime=row.regime)
                yield f"{100 * share:.0f} % of the {dtype} ceiling"
        if has_card_drifted(row, self.measured_ceilings, MAX_COMPARABLE_DRIFT_SHARE):
            yield (
                f"{format_drift()} since the ceiling was measured, so do not compare this rate with others: measure "
                "again on an idle device"
            )
        elif has_card_drifted(row, self.measured_ceilings):
            yield f"{format_drift(MAX_DRIFT_SHARE)} since the ceiling was measured"
        mamfu = compute_mamfu(row, self.measured_ceilings) if row.work.has_matmul_flop else None
        if mamfu is not None and not row.is_reference and "reference_tflops" not in row.details:
            yield "the drift of the device is unknown, because the ceiling was measured after this row"
        if "product_dtypes" in row.details:
            return
        if (self.compute_row_mamfu(row) or 0.0) > MAX_SHARE_OF_CEILING:
            yield LOW_CEILING_TEXT
        # Drift of the device's speed and the error of the timer can raise MAMFU above 1.
        elif (mamfu or 0.0) > 1 + MAX_DRIFT_SHARE + compute_mamfu_error(row, self.measured_ceilings):
            yield "rates are above the ceiling: measure the ceiling again on a quiet device"

    def describe_ceilings(self, rows: Sequence[Measurement]) -> list[str]:
        """Return lines that name the ceilings to which the shares of ``rows`` refer, and that say how accurate the
        shares are.
        """
        with_share = [row for row in rows if "product_dtypes" in row.details or self.compute_row_mamfu(row) is not None]
        regimes = {row.regime for row in with_share}
        measured = [
            f"MAMFU: share of {format_rate(each.tflops, 'TFLOPS')} "
            f"({format_interval(each.interval, choose_unit('TFLOPS', [each.tflops])[1])}), "
            f"the {dtype} {regime} ceiling: {each.shape} by {each.kernel}"
            for (dtype, regime), each in self.measured_ceilings.items()
            if regime in regimes
        ]
        known_errors = sorted(
            filter(
                None, (compute_mamfu_error(row, self.measured_ceilings) for row in with_share if not row.is_reference)
            )
        )
        bounds = dict.fromkeys(f"{100 * each:.2g}" for each in (*known_errors[:1], *known_errors[-1:]))
        accuracy = [
            f"MAMFU: the timer's error is at most {' % of a share for long launches, and '.join(bounds)} % "
            f"{'for short ones' if len(bounds) > 1 else 'of a share'}"
        ]
        has_mbu = any(self.compute_row_mbu(row) for row in rows)
        measured += [
            f"MBU: share of {format_rate(each.rate, each.unit)}, the {regime} read bandwidth "
            f"({each.shape}, {each.kernel})"
            for (level, regime), each in (self.roofs.bandwidth_ceilings.items() if has_mbu and self.roofs else ())
            if level == MEMORY_LEVEL
        ]
        without_share = [
            row
            for row in rows
            if self.roofs is not None
            and (self.compute_row_mamfu(row), self.compute_row_mbu(row), self.roofs.find_roof_and_bound(row))
            == (None,) * 3
        ]
        keys = dict.fromkeys((row.problem.dtype, row.regime) for row in rows if row.ok and row.work.has_matmul_flop)
        noisy = [
            f"no MAMFU in {dtype}, {regime}: the interval of the ceiling ({format_rate(each.tflops, 'TFLOPS')}) is "
            "unknown: measure it on a quiet machine"
            for dtype, regime in keys
            if (each := find_rate(self.measured_ceilings, dtype, regime)) and not each.interval.is_known
        ]
        return [
            *measured,
            *noisy,
            *describe_known_ceilings(self.known_ceilings.values()),
            *(accuracy if bounds else []),
            *(describe_missing_roofs(without_share, self.roofs) if self.roofs is not None else ()),
        ]

    def describe_share_of_peak(self, row: Measurement) -> str:
        """Return the rate of a row as a share of the datasheet's peak, with the source of the peak. Return an empty
        string if no peak is known.
        """
        device = self.header["device"]
        peak = find_datasheet_rate(device["name"], row.problem.dtype, device["compute_units"])
        if peak is None or row.work.unit != "TFLOPS":
            return ""
        return (
            f"{format_percent(row.best_rate * TERA / peak.flops)} % of {peak.tflops:g}, the dense {peak.dtype} peak of "
            f"{peak.device_label}"
        )


def describe_missing_roofs(rows: Iterable[Measurement], roofs: Roofs) -> list[str]:
    """Return a line for each missing ceiling. The line says how many of the measured ``rows`` have no share because
    this ceiling is missing, and how to measure the ceiling.
    """
    reasons = (roofs.explain_missing_roof(row) for row in rows if row.ok and not row.is_reference)
    counts = Counter(filter(None, reasons))
    return [f"rows without a share: {count}, because {reason}" for reason, count in counts.items()]


def describe_known_ceilings(ceilings: Iterable[Rate]) -> list[str]:
    """Return a line for each ceiling from which MAMFU is computed, but which the run did not measure itself."""
    return [
        f"MAMFU: share of {format_rate(each.tflops, 'TFLOPS')}, the {each.dtype} {each.regime} ceiling: "
        f"{each.description}"
        for each in ceilings
    ]
