"""What each record of a run log holds, as data, and the one validator: a parsed log is well-typed, or names the field.

A schema is a type (``str``, ``bool``, ``int``, ``float``; a float is finite and may be written as a whole number), a
list of one schema, or a mapping of fields to schemas. ``name?`` may be missing, ``Nullable`` may be null, ``ANY_NAME``
stands for fields of any name. Fields that a schema does not name are left to ``mamf results check``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY_NAME = "*"
# JSON writes whole numbers of any length; what nothing here can be is refused before it is computed with.
_LARGEST = 2**63


@dataclass(frozen=True)
class Nullable:
    schema: Any


#: What a field of a shape or of a problem may be: anything but an object, or a list of such.
PLAIN = object()
_NUMBER, _TEXTS = Nullable(float), [str]
_CONDITIONS = {"clock_mhz": _NUMBER, "watts": _NUMBER, "celsius": _NUMBER, "throttle_reasons": _TEXTS}
_REPEATABILITY = Nullable({"visit": float, "run": float, "degrees": int, "is_whole?": bool})
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
_PROBLEM = {"dtype": str, "data?": str, "seed?": int}
_PRODUCT = _PROBLEM | {"out_dtype": str, "layout": str, "fast_accumulation?": bool}
_FIND_PLAN = {
    "problem": _PRODUCT,
    "kernels": _TEXTS,
    "regimes": _TEXTS,
    "grid": {"m": [int], "n": [int], "k": [int], "most_flop": _NUMBER},
    "budget_seconds": float,
    "precision": float,
    "scouts": int,
    "refinements": int,
    "priors?": _TEXTS,
    "is_quick?": bool,
}
_KERNELS_PLAN = {
    "operation?": str,
    "shapes": _TEXTS,
    "problems": [_PROBLEM],
    "kernels": _TEXTS,
    "regimes": _TEXTS,
    "precision": float,
    "seconds": _NUMBER,
    "budget_seconds": _NUMBER,
    "flush": bool,
    "searches?": [_FIND_PLAN],
    "confirms?": bool,
    "explains?": bool,
    "layers?": _TEXTS,
    "rounds?": int,
}
_SWEEP_PLAN = {
    "shapes": _TEXTS,
    "problem": _PRODUCT,
    "regimes": _TEXTS,
    "order": str,
    "precision": float,
    "seconds": _NUMBER,
    "budget_seconds": _NUMBER,
    "warmup_launches": int,
    "timed_launches": int,
    "reference": Nullable(str),
    "reference_every": int,
    "layers?": _TEXTS,
}
HEADER = {
    "schema": int,
    "tool": _TOOL,
    "command?": str,
    "started?": str,
    "device": _DEVICE,
    "timer": str,
    "sensors?": str,
    "kernel": str,
    "plan": {"command?": str},
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
    "operation?": str,
    "shape": {ANY_NAME: PLAIN},
    "problem?": {ANY_NAME: PLAIN},
    "kernel": str,
    "regime": str,
    "best_by": str,
    "status": str,
    "reason": str,
    "launches": int,
    "timer_overhead_seconds?": float,
    "samples_seconds": [float],
    "implausible_samples_seconds": [float],
    "relative_error": _NUMBER,
    "remarks": _TEXTS,
    "is_reference": bool,
    "details?": {},
    "peak_memory_bytes?": Nullable(int),
    "peak_reserved_bytes?": Nullable(int),
    "throttle_shares?": {ANY_NAME: float},
    "repeatability?": _REPEATABILITY,
    "phase?": str,
    "round?": int,
    "time?": str,
} | _CONDITIONS
_PRODUCT_MEASUREMENT = MEASUREMENT | {"problem?": _PRODUCT}
_ANY_CEILING = {
    "regime": str,
    "shape": str,
    "kernel": str,
    "interval_coverage": float,
    "rounds": int,
    "tied": [{"shape": str, "kernel": str}],
    "gain_over_default": _NUMBER,
    "repeatability?": _REPEATABILITY,
} | _CONDITIONS
_PRODUCTS_CEILING = _ANY_CEILING | {
    "problem?": _PRODUCT,
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
    "phases?": {ANY_NAME: int},
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
    "notes": _TEXTS,
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
#: Of the kernels of a device (mamf.counters): what they counted beside a measurement, and what no kernel exceeds.
COUNTERS = {
    "operation": str,
    "shape": {ANY_NAME: PLAIN},
    "problem": {ANY_NAME: PLAIN},
    "kernel": str,
    "kernels": [{"name": str, "grid": str, "block": str, "metrics": {ANY_NAME: _NUMBER}}],
    "cycles": [float],
    "reason": str,
    "preparing_seconds": _NUMBER,
    "is_deterministic": Nullable(bool),
    "time?": str,
}
#: What the shares of rows are of, where the run did not measure it (mamf.ceilings.known).
KNOWN_CEILING = {"dtype": str, "regime": str, "tflops": float, "source": str, "told": str}
ROOF = {"of": str, "rate": float, "source": str, "told": str, "dtype": str}
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "measurement": MEASUREMENT,
    "summary": SUMMARY,
    "resume": RESUME,
    "counters": COUNTERS,
    "roof": ROOF,
    "known_ceiling": KNOWN_CEILING,
}
KINDS = (*_SCHEMAS, "ceiling")


def record_schema(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record after the header, by its kind: one of KINDS."""
    if record["record"] == "ceiling":
        return _OPERATIONS_CEILING if "operation" in record else _PRODUCTS_CEILING
    if record["record"] == "measurement" and record.get("operation") == "matmul":
        return _PRODUCT_MEASUREMENT
    return _SCHEMAS[record["record"]]


def plan_schema(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Of the plan of a command: what a sweep of products, a search, or a sweep of kernels holds."""
    command = plan.get("command", "sweep")
    if command == "attention" or "operation" in plan:
        return _KERNELS_PLAN
    return _FIND_PLAN if command == "find" else _SWEEP_PLAN


def require(value: object, schema: Any, name: str = "") -> None:
    """Raises ValueError naming the first field that is missing or not of its type."""
    if isinstance(schema, Nullable):
        if value is not None:
            require(value, schema.schema, name)
    elif isinstance(schema, list):
        items: list[object] = _of_type(value, list, name)
        # Samples are most of a log: no names are made for what is right.
        if schema != [float] or not all(map(_is_number, items)):
            for number, each in enumerate(items):
                require(each, schema[0], f"{name}[{number}]")
    elif isinstance(schema, dict):
        _require_fields(_of_type(value, dict, name), schema, f"{name}." if name else "")
    elif schema is PLAIN:
        if any(isinstance(each, (dict, list)) for each in (value if isinstance(value, list) else [value])):
            raise ValueError(f"field {name}: one value or a list of them is due, not {_told(value)}")
    elif schema is float:
        if not _is_number(value):
            raise ValueError(f"field {name}: a finite number is due, not {_told(value)}")
    else:
        found = _of_type(value, schema, name)
        if schema is int and not -_LARGEST < found < _LARGEST:
            raise ValueError(f"field {name}: {_told(value)} is beyond what anything counts")


def _require_fields(record: Mapping[str, object], schema: Mapping[str, Any], prefix: str) -> None:
    for name, of in schema.items():
        key = name.removesuffix("?")
        if name == ANY_NAME:
            for each, value in record.items():
                require(value, of, prefix + each)
        elif key in record:
            require(record[key], of, prefix + key)
        elif key == name:
            raise ValueError(f"field {prefix}{name} is missing")


_KINDS = {str: "text", bool: "true or false", int: "a whole number", list: "a list", dict: "an object"}


def _of_type(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:  # a bool is no int here
        raise ValueError(f"field {name}: {_KINDS[kind]} is due, not {_told(value)}")
    return value


def _is_number(value: object) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and -_LARGEST < value < _LARGEST)


def _told(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
