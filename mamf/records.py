"""What a run log holds of measurements and plans: objects <-> JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from mamf.kernel import MatmulProblem
from mamf.measure import STATUSES, Conditions, Measurement
from mamf.shapes import MatmulShape
from mamf.statistics import Summary, summarize
from mamf.sweep import Plan

_STATISTICS = ("mean", "median", "fastest", "slowest")


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def measurement_record(row: Measurement) -> dict[str, Any]:
    """A measurement as JSON values. ``tflops`` and ``seconds`` follow from ``samples_seconds`` and ``flop``."""
    record: dict[str, Any] = {
        "shape": asdict(row.shape),
        "flop": row.shape.flop,
        "kernel": row.kernel,
        "dtype": row.problem.dtype,
        "out_dtype": row.problem.out_dtype,
        "regime": row.regime,
        "best_by": row.best_by,
        "status": row.status,
        "reason": row.reason,
    }
    if row.summary is not None:
        low, high = row.tflops_interval
        record["tflops"] = {name: round(row.tflops(name), 3) for name in _STATISTICS}
        record["tflops"]["interval"] = [round(low, 3), round(high, 3)]
        record["interval_coverage"] = round(row.summary.interval.coverage, 4)
        record["seconds"] = {name: round(getattr(row.summary, name), 12) for name in (*_STATISTICS, "stdev")}
    record |= {
        "launches": row.launches,
        "timer_overhead_seconds": row.timer_overhead,
        "samples_seconds": list(row.samples),
        "implausible_samples_seconds": list(row.implausible_samples),
        # An output with NaN in it has no error to speak of; the reason says so.
        "relative_error": row.error if row.error is not None and math.isfinite(row.error) else None,
        "clock_mhz": None if row.conditions.clock_hz is None else row.conditions.clock_hz / 1e6,
        "watts": row.conditions.watts,
        "celsius": row.conditions.celsius,
        "throttle_reasons": list(row.conditions.throttle_reasons),
        "remarks": list(row.remarks),
        "is_reference": row.is_reference,
        "time": utc_now(),
    }
    return record


def measurement_from_record(record: Mapping[str, Any], header: Mapping[str, Any]) -> Measurement:
    """Raises KeyError or ValueError for a record that cannot be a measurement of this run."""
    if record["status"] not in STATUSES:
        raise ValueError(f"unknown status {record['status']!r}")
    shape = MatmulShape(**record["shape"])
    if record["best_by"] not in _STATISTICS:
        raise ValueError(f"unknown statistic {record['best_by']!r}")
    samples = tuple(map(float, record["samples_seconds"]))
    if not all(0 < sample < math.inf for sample in samples):
        raise ValueError("a sample is not a positive number of seconds")
    error = record["relative_error"]
    summary: Summary | None = None
    if record["status"] == "ok":
        summary = summarize(samples)
    clock_mhz = record["clock_mhz"]
    return Measurement(
        shape=shape,
        kernel=record["kernel"],
        problem=MatmulProblem(**header["plan"]["problem"]),
        regime=record["regime"],
        best_by=record["best_by"],
        status=record["status"],
        reason=record["reason"],
        summary=summary,
        samples=samples,
        implausible_samples=tuple(record["implausible_samples_seconds"]),
        launches=record["launches"],
        # Logs from before the timer was calibrated have none.
        timer_overhead=record.get("timer_overhead_seconds", 0.0),
        error=None if error is None else float(error),
        conditions=Conditions(
            clock_hz=None if clock_mhz is None else float(round(clock_mhz * 1e6)),
            watts=record["watts"],
            celsius=record["celsius"],
            throttle_reasons=tuple(record["throttle_reasons"]),
        ),
        remarks=tuple(record["remarks"]),
        is_reference=record["is_reference"],
    )


def plan_record(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values; shapes as MxNxK."""
    return asdict(plan) | {
        "shapes": [str(shape) for shape in plan.shapes],
        "regimes": list(plan.regimes),
        "reference": plan.reference and str(plan.reference),
    }


def plan_from_record(record: Mapping[str, Any]) -> Plan:
    fields = dict(record)
    reference = fields["reference"]
    return Plan(
        **fields
        | {
            "shapes": tuple(MatmulShape.parse(text) for text in fields["shapes"]),
            "problem": MatmulProblem(**fields["problem"]),
            "regimes": tuple(fields["regimes"]),
            "reference": MatmulShape.parse(reference) if reference else None,
        }
    )
