"""The schema of each record of a run log, as data for validator.py. ``mamf results check`` reports fields that a schema
does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mamf.logs.validator import ANY_NAME, PLAIN, Nullable
from mamf.regime_traits import BurstTraits, SustainedTraits

_NUMBER, _TEXTS = Nullable(float), [str]
_CONDITIONS = {"clock_mhz": _NUMBER, "watts": _NUMBER, "celsius": _NUMBER, "throttle_reasons": _TEXTS}
_REPEATABILITY = Nullable(
    {
        "run": float,
        "launch_seconds?": float,
        "ignores_within?": bool,
        "usual_celsius?": float,
        "per_degree?": float,
        # Earlier logs.
        "visit?": float,
        "degrees?": int,
        "is_whole?": bool,
        "common?": float,
    }
)
_TOOL = {"name": str, "version": Nullable(str), "commit?": Nullable(str)}
_DEVICE = {
    "backend": str,
    "index": int,
    "name": str,
    "vendor": str,
    "architecture?": Nullable(str),
    "compute_units?": Nullable(int),
    "memory_bytes?": Nullable(int),
    "cache_bytes?": Nullable(int),
    "max_clock_hz?": _NUMBER,
    "power_limit_watts?": _NUMBER,
    "driver?": Nullable(str),
    "uuid_hash?": Nullable(str),
    "versions?": {ANY_NAME: Nullable(str)},
    "is_accelerator?": bool,
}


def _traits(kind: type) -> dict[str, Any]:
    return {
        f"{each.name}?": str if each.name == "remark" else float for each in fields(kind) if each.default is not None
    }


_PROBLEM = {"dtype": str, "data?": str, "seed?": int}
_PRODUCT = _PROBLEM | {"out_dtype": str, "layout": str, "fast_accumulation?": bool}
_CLAIM = {
    "step": {"regime": str, "problem": _PROBLEM, "shape": str, "kernel": str},
    "rate": float,
    "interval": {"low": float, "high": float, "coverage": float},
    "error": Nullable({"common": float, "own": float, "degrees": int}),
    "clock_hz": _NUMBER,
}
#: Each kind of run has some of them.
OPTIONS = {
    "order?": str,
    "reference?": Nullable(str),
    "reference_every?": int,
    "rank?": int,
    "ranks?": int,
    "warmup_launches?": int,
    "timed_launches?": int,
    "grid?": {"m": [int], "n": [int], "k": [int], "most_flop": _NUMBER},
    "scouts?": int,
    "refinements?": int,
    "priors?": _TEXTS,
    "is_quick?": bool,
    "rounds?": int,
    "claims?": [_CLAIM],
    "source?": str,
    "recorded?": [_TEXTS],
    "chosen_from?": int,
    "tolerance?": float,
    "number?": int,
    "operations?": _TEXTS,
}
SEARCH = {
    "command": str,
    "operation": str,
    "problems": [_PROBLEM],
    "kernels": _TEXTS,
    "shapes": _TEXTS,
    "regimes": _TEXTS,
    "precision": float,
    "seconds": _NUMBER,
    "budget_seconds": _NUMBER,
    "flush": bool,
    "layers": _TEXTS,
    "searches?": [{}],
    "options": OPTIONS,
}
PLAN = {**{name: each for name, each in SEARCH.items() if name != "searches?"}, "searches": [SEARCH]}
HEADER = {
    "schema": int,
    "converted_from?": int,
    "tool": _TOOL,
    "command?": str,
    "started?": str,
    "device": _DEVICE,
    "devices?": [_DEVICE],
    "timer": str,
    "traits?": {"burst": _traits(BurstTraits), "sustained": _traits(SustainedTraits), "cache_bytes": Nullable(int)},
    "sensors?": str,
    "kernel": str,
    "plan": PLAN,
    "settings?": {},
    "environment": {
        "python?": str,
        "os?": str,
        "packages": {ANY_NAME: Nullable(str)},
        "variables?": {ANY_NAME: Nullable(str)},
    },
    "findings?": _TEXTS,
    "notes?": str,
}
MEASUREMENT = {
    "operation": str,
    "shape": {ANY_NAME: PLAIN},
    "problem": {ANY_NAME: PLAIN},
    "kernel": str,
    "regime": str,
    "best_by": str,
    "status": str,
    "reason": str,
    "launches": int,
    "timer_overhead_seconds": float,
    "timer_accuracy_seconds": float,
    "samples_seconds": [float],
    "implausible_samples_seconds": [float],
    "relative_error": _NUMBER,
    "remarks": _TEXTS,
    "is_reference": bool,
    "details": {},
    "peak_memory_bytes": Nullable(int),
    "peak_reserved_bytes?": Nullable(int),
    "throttle_shares?": {ANY_NAME: float},
    "repeatability": _REPEATABILITY,
    "phase": str,
    "round": int,
    "device?": int,
    "time?": str,
} | _CONDITIONS
_PRODUCT_MEASUREMENT = MEASUREMENT | {"problem": _PRODUCT}
_ANY_CEILING = {
    "regime": str,
    "shape": str,
    "kernel": str,
    "interval_coverage": float,
    "rounds": int,
    "tied": [{"shape": str, "kernel": str}],
    "gain_over_default": _NUMBER,
    "repeatability": _REPEATABILITY,
} | _CONDITIONS
_PRODUCTS_CEILING = _ANY_CEILING | {
    "problem": _PRODUCT,
    "tflops": float,
    "interval_tflops": [float],
    "joules_per_tflop?": _NUMBER,
}
_OPERATIONS_CEILING = _ANY_CEILING | {
    "operation": str,
    "problem": _PROBLEM,
    "rate": float,
    "interval": [float],
    "unit": str,
}
SUMMARY = {
    "status": str,
    "reason": str,
    "measured": int,
    "left?": int,
    "elapsed_seconds": float,
    "best": {ANY_NAME: {}},
    "ceilings?": {ANY_NAME: {}},
    "phases?": {ANY_NAME: int},
    "problems?": int,
    "launches?": int,
    "values?": int,
    "wrong?": int,
    "timer_overhead_after_seconds?": float,
    "shared_after?": _TEXTS,
    "time?": str,
}
#: Of a run of mamf-finder (legacy.py): what it printed, and nothing that has samples.
_FIGURES = {ANY_NAME: float}
REPORTED = {
    "tflops": _FIGURES,
    "shape": Nullable(str),
    "stage": str,
    "label": str,
    "watts": _NUMBER,
    "clock_mhz": _NUMBER,
    "celsius": _NUMBER,
    "remarks": _TEXTS,
}
LEGACY_HEADER = {
    "tool": {"version": Nullable(str)},
    "device_properties?": {ANY_NAME: str},
    "software?": {ANY_NAME: str},
    "variables?": {ANY_NAME: str},
    "notes?": _TEXTS,
    "remarks": _TEXTS,
    **{f"{name}?": Nullable(str) for name in ("started", "command", "dtype", "platform", "device", "ranges")},
}
LEGACY_SUMMARY = {
    "status": str,
    "tried": Nullable(int),
    "elapsed_seconds": _NUMBER,
    "means": _FIGURES,
    "best": {ANY_NAME: REPORTED},
}
RESUME = {"tool?": _TOOL, "command?": str, "started?": str, "notes?": str}
#: What the kernels of a device counted beside a measurement (mamf.profiling.counters).
COUNTERS = {
    "operation": str,
    "shape": {ANY_NAME: PLAIN},
    "problem": {ANY_NAME: PLAIN},
    "kernel": str,
    "kernels": [{"name": str, "grid": str, "block": str, "metrics": {ANY_NAME: _NUMBER}}],
    "cycles": [float],
    "reason": str,
    "time?": str,
}
#: What the shares of rows are of, where the run did not measure it (a mamf.rate.Rate).
KNOWN_CEILING = {"dtype": str, "regime": str, "tflops": float, "source": str, "told": str}
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "measurement": MEASUREMENT,
    "summary": SUMMARY,
    "resume": RESUME,
    "counters": COUNTERS,
    "known_ceiling": KNOWN_CEILING,
}
KINDS = (*_SCHEMAS, "ceiling")


def record_schema(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record after the header, by its kind: one of KINDS."""
    if record["record"] == "ceiling":
        return _OPERATIONS_CEILING if "operation" in record else _PRODUCTS_CEILING
    if (record["record"], record.get("operation")) == ("measurement", "matmul"):
        return _PRODUCT_MEASUREMENT
    return _SCHEMAS[record["record"]]
