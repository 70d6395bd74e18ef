"""What a run log holds of measurements, plans and ceilings: objects <-> JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.grid import FindPlan
from mamf.kernel import MatmulProblem
from mamf.measure import STATUSES, Conditions, Measurement
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.operations.attention.sweep import AttentionPlan
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape
from mamf.operations.matmul.sweep import Plan
from mamf.statistics import Interval, Repeatability, Summary, summarize

_STATISTICS = ("mean", "median", "fastest", "slowest")


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def measurement_record(row: Measurement) -> dict[str, Any]:
    """A measurement as JSON values. ``tflops`` and ``seconds`` follow from ``samples_seconds`` and ``flop``."""
    record: dict[str, Any] = {
        "shape": asdict(row.shape),
        "flop": round(row.flop),
        "kernel": row.kernel,
        "dtype": row.problem.dtype,
        "out_dtype": row.problem.out_dtype,
        **({"problem": asdict(row.problem)} if _names_its_problem(row) else {}),
        "regime": row.regime,
        "best_by": row.best_by,
        "status": row.status,
        "reason": row.reason,
    }
    if row.summary is not None:
        interval = row.tflops_interval
        record["tflops"] = {name: round(row.tflops(name), 3) for name in _STATISTICS}
        record["tflops"]["interval"] = [round(interval.low, 3), round(interval.high, 3)]
        record["interval_coverage"] = round(interval.coverage, 4)
        record["seconds"] = {name: round(getattr(row.summary, name), 12) for name in (*_STATISTICS, "stdev")}
    record |= {
        "launches": row.launches,
        "timer_overhead_seconds": row.timer_overhead,
        "samples_seconds": list(row.samples),
        "implausible_samples_seconds": list(row.implausible_samples),
        # An output with NaN in it has no error to speak of; the reason says so.
        "relative_error": row.error if row.error is not None and math.isfinite(row.error) else None,
        **conditions_record(row.conditions),
        "remarks": list(row.remarks),
        "is_reference": row.is_reference,
        "details": dict(row.details),
        "peak_memory_bytes": row.peak_memory_bytes,
        "repeatability": None if row.repeatability is None else asdict(row.repeatability),
        "phase": row.phase,
        "round": row.round,
        "time": utc_now(),
    }
    return record


def _names_its_problem(row: Measurement) -> bool:
    """In an attention log none is the header's."""
    return isinstance(row.problem, AttentionProblem) or row.is_reference or bool(row.phase)


def measurement_from_record(record: Mapping[str, Any], header: Mapping[str, Any]) -> Measurement:
    """Raises KeyError or ValueError for a record that cannot be a measurement of this run."""
    if record["status"] not in STATUSES:
        raise ValueError(f"unknown status {record['status']!r}")
    is_attention = "seqlen_q" in record["shape"]
    shape = AttentionShape(**record["shape"]) if is_attention else MatmulShape(**record["shape"])
    problem: AttentionProblem | MatmulProblem
    if is_attention:
        problem = AttentionProblem(**record["problem"])
    else:
        problem = MatmulProblem(**record["problem"]) if "problem" in record else matmul_problem(header)
    if record["best_by"] not in _STATISTICS:
        raise ValueError(f"unknown statistic {record['best_by']!r}")
    samples = tuple(map(float, record["samples_seconds"]))
    if not all(0 < sample < math.inf for sample in samples):
        raise ValueError("a sample is not a positive number of seconds")
    error = record["relative_error"]
    summary: Summary | None = None
    if record["status"] == "ok":
        summary = summarize(samples, record["best_by"])
    return Measurement(
        shape=shape,
        kernel=record["kernel"],
        problem=problem,
        regime=record["regime"],
        best_by=record["best_by"],
        status=record["status"],
        reason=record["reason"],
        summary=summary,
        samples=samples,
        implausible_samples=tuple(record["implausible_samples_seconds"]),
        launches=record["launches"],
        # Schema 1 knew neither a timer's share nor phases.
        timer_overhead=record.get("timer_overhead_seconds", 0.0),
        error=None if error is None else float(error),
        conditions=conditions_from_record(record),
        remarks=tuple(record["remarks"]),
        is_reference=record["is_reference"],
        details=record.get("details", {}),
        peak_memory_bytes=record.get("peak_memory_bytes"),
        repeatability=repeatability_from_record(record),
        phase=record.get("phase", ""),
        round=record.get("round", 0),
    )


def matmul_problem(header: Mapping[str, Any]) -> MatmulProblem:
    """The product that a sweep or find is of; rows of an attention's log name their own."""
    plan = header["plan"]
    return MatmulProblem(**plan["problem"])


def significant_digits(value: float) -> float:
    """Six of them: a CPU's TFLOPS begin behind the point."""
    return float(f"{value:.6g}")


def ceiling_record(ceiling: Ceiling) -> dict[str, Any]:
    """A ceiling as JSON values. It follows from the measurements of phase ``confirm`` before it."""
    return {
        "regime": ceiling.regime,
        "problem": asdict(ceiling.problem),
        "shape": str(ceiling.shape),
        "kernel": ceiling.kernel,
        "tflops": significant_digits(ceiling.tflops),
        "interval_tflops": [significant_digits(ceiling.interval.low), significant_digits(ceiling.interval.high)],
        "interval_coverage": round(ceiling.interval.coverage, 4),
        "rounds": ceiling.rounds,
        "tied": [{"shape": str(shape), "kernel": kernel} for shape, kernel in ceiling.tied],
        "gain_over_default": None if ceiling.gain_over_default is None else round(ceiling.gain_over_default, 4),
        "repeatability": None if ceiling.repeatability is None else asdict(ceiling.repeatability),
        "joules_per_tflop": ceiling.joules_per_tflop and round(ceiling.joules_per_tflop, 4),
        **conditions_record(ceiling.conditions),
    }


def ceiling_from_record(record: Mapping[str, Any], header: Mapping[str, Any]) -> Ceiling:
    low, high = map(float, record["interval_tflops"])
    return Ceiling(
        device=header["device"]["name"],
        uuid_hash=header["device"]["uuid_hash"],
        problem=MatmulProblem(**record["problem"]) if "problem" in record else matmul_problem(header),
        regime=record["regime"],
        kernel=record["kernel"],
        shape=MatmulShape.parse(record["shape"]),
        tflops=float(record["tflops"]),
        interval=Interval(low, high, record["interval_coverage"]),
        rounds=record["rounds"],
        tied=tuple((MatmulShape.parse(each["shape"]), each["kernel"]) for each in record["tied"]),
        conditions=conditions_from_record(record),
        gain_over_default=record["gain_over_default"],
        repeatability=repeatability_from_record(record),
    )


def repeatability_from_record(record: Mapping[str, Any]) -> Repeatability | None:
    """None before schema 4, whose intervals tell of what was seen alone."""
    known = record.get("repeatability")
    return None if known is None else Repeatability(**known)


def conditions_record(conditions: Conditions) -> dict[str, Any]:
    return {
        "clock_mhz": None if conditions.clock_hz is None else conditions.clock_hz / 1e6,
        "watts": conditions.watts,
        "celsius": conditions.celsius,
        "throttle_reasons": list(conditions.throttle_reasons),
    }


def conditions_from_record(record: Mapping[str, Any]) -> Conditions:
    clock_mhz = record["clock_mhz"]
    return Conditions(
        clock_hz=None if clock_mhz is None else float(round(clock_mhz * 1e6)),
        watts=record["watts"],
        celsius=record["celsius"],
        throttle_reasons=tuple(record["throttle_reasons"]),
    )


def plan_record(plan: Plan | FindPlan | AttentionPlan) -> dict[str, Any]:
    """A plan as JSON values; shapes as MxNxK."""
    if isinstance(plan, FindPlan):
        return {"command": "find", **_find_record(plan)}
    if isinstance(plan, AttentionPlan):
        return {"command": "attention", **asdict(plan)} | {
            "shapes": [str(shape) for shape in plan.shapes],
            "searches": [_find_record(search) for search in plan.searches],
        }
    return (
        {"command": "sweep"}
        | asdict(plan)
        | {
            "shapes": [str(shape) for shape in plan.shapes],
            "regimes": list(plan.regimes),
            "reference": plan.reference and str(plan.reference),
        }
    )


def _find_record(plan: FindPlan) -> dict[str, Any]:
    most_flop = plan.grid.most_flop
    return asdict(plan) | {"grid": {**asdict(plan.grid), "most_flop": most_flop if math.isfinite(most_flop) else None}}


def plan_from_record(record: Mapping[str, Any]) -> Plan | FindPlan | AttentionPlan:
    fields = dict(record)
    command = fields.pop("command", "sweep")
    if command == "find":
        return _find_plan(fields)
    if command == "attention":
        return _attention_plan(fields)
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


def _find_plan(fields: Mapping[str, Any]) -> FindPlan:
    grid = fields["grid"]
    most_flop = math.inf if grid["most_flop"] is None else grid["most_flop"]
    return FindPlan(
        **{**fields}
        | {
            "problem": MatmulProblem(**fields["problem"]),
            "kernels": tuple(fields["kernels"]),
            "regimes": tuple(fields["regimes"]),
            "grid": MatmulGrid(tuple(grid["m"]), tuple(grid["n"]), tuple(grid["k"]), most_flop),
        }
    )


def _attention_plan(fields: Mapping[str, Any]) -> AttentionPlan:
    return AttentionPlan(
        **{**fields}
        | {
            "shapes": tuple(AttentionShape.parse(text) for text in fields["shapes"]),
            "problems": tuple(AttentionProblem(**problem) for problem in fields["problems"]),
            "kernels": tuple(fields["kernels"]),
            "regimes": tuple(fields["regimes"]),
            # Early logs kept no search.
            "searches": tuple(map(_find_plan, fields.get("searches", ()))),
        }
    )
