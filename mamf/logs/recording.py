"""Declare and make the header of a run log, and describe how a run ended. The header contains the plan of the run and
the measured traits of the device (how its clock and its power react to load).

The header is declared as msgspec structs, like the other records in records.py. The plans of all kinds of runs and of
all operations have the same fields. Each operation converts its shapes and problems to JSON and back.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from msgspec import UNSET, Struct, defstruct
from msgspec import UnsetType as Missing

from mamf.backend import Backend, DeviceInfo, Unavailability, parse_sharing_ways
from mamf.calibration import BurstTraits, SustainedTraits
from mamf.logs.records import CyclesUsed, FieldValues, Int64, ToolRecord, get_utc_time
from mamf.machine.environment import describe_environment, describe_mamf_version
from mamf.measurement import MAX_OVERHEAD_SHIFT_SECONDS, Measurement
from mamf.operations.matmul.shapes import MatmulGrid, SearchOptions
from mamf.operations.unknown import AnyOperation, UnknownOperation, get_operation
from mamf.plans import (
    FIND,
    GUARD,
    REPRODUCE,
    SWEEP,
    VERIFY,
    Claim,
    GuardOptions,
    Plan,
    Problem,
    ReproduceOptions,
    Shape,
    SweepOptions,
    VerifyOptions,
)


class EnvironmentRecord(Struct, kw_only=True):
    python: str | Missing = UNSET
    os: str | Missing = UNSET
    packages: dict[str, str | None]
    variables: dict[str, str | None] | Missing = UNSET


class TraitsRecord(Struct, kw_only=True):
    burst: BurstTraits
    sustained: SustainedTraits
    cache_bytes: Int64 | None


#: Maps a kind of run to the class of the options in its plans. Kinds that are not listed have no options.
OPTIONS_CLASS_BY_KIND: Mapping[str, type] = {
    SWEEP: SweepOptions,
    FIND: SearchOptions,
    GUARD: GuardOptions,
    REPRODUCE: ReproduceOptions,
    VERIFY: VerifyOptions,
}
#: The name of the field ``Plan.kind`` in a log.
_KIND_FIELD = "command"
#: The command in the header of a log if Python code, not the command line, started the run.
PYTHON_COMMAND = "from Python"
#: Maps the type of a value in a plan to its type in a log, for types that a log stores differently.
_LOGGED_TYPES = {Shape: str, Problem: FieldValues, int: Int64}
#: For each class: the fields that have a different type in a log, with that type. A log stores None for an infinite
#: number of FLOP, because JSON cannot store infinity, and it limits the range of used cycles.
_LOGGED_FIELD_TYPES: Mapping[type, dict[str, Any]] = {
    MatmulGrid: {"most_flop": float | None},
    Claim: {"cycles_used": CyclesUsed | None},
}


#: A cached function that returns the types of the fields of a class, by name.
_get_field_types = functools.cache(functools.partial(get_type_hints, include_extras=True))


def _get_logged_type(plan_type: Any) -> Any:
    """Return the type with which a log stores a value that has the type ``plan_type`` in a plan."""
    if plan_type in _LOGGED_TYPES:
        return _LOGGED_TYPES[plan_type]
    if get_origin(plan_type) is tuple:
        return list[_get_logged_type(get_args(plan_type)[0])]  # type: ignore[misc]
    if get_origin(plan_type) in (Union, types.UnionType):
        return Union[tuple(map(_get_logged_type, get_args(plan_type)))]  # noqa: UP007  (of types that are not known here)
    if not is_dataclass(plan_type) and not hasattr(plan_type, "_fields"):
        return plan_type
    declared = {
        name: _get_logged_type(each) for name, each in _get_field_types(plan_type).items()
    } | _LOGGED_FIELD_TYPES.get(plan_type, {})
    return (
        plan_type
        if declared == _get_field_types(plan_type)
        else _declare_struct(plan_type.__name__, _allow_missing_fields(plan_type, declared))
    )


def _allow_missing_fields(plan_class: type, field_types: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``field_types`` with Missing added to the type of each field that has a default value in ``plan_class``.

    A log may lack these fields, because older versions of mamf did not write all of them.
    """
    defaults = {name: each.default for name, each in inspect.signature(plan_class).parameters.items()}
    return {
        name: each if defaults[name] is inspect.Parameter.empty else each | Missing
        for name, each in field_types.items()
    }


def _declare_struct(name: str, field_types: Mapping[str, Any]) -> type[Struct]:
    """Declare a msgspec struct. ``field_types``: the types of its fields by name. A field whose type includes Missing
    may be missing from a log.
    """
    struct_fields = [
        (field_name, field_type, UNSET) if Missing in get_args(field_type) else (field_name, field_type)
        for field_name, field_type in field_types.items()
    ]
    return defstruct(name, struct_fields, kw_only=True, module=__name__)


#: The struct of a plan's options. It has the options of all kinds of runs; OPTIONS_CLASS_BY_KIND says which kind has
#: which options.
PlanOptions = _declare_struct(
    "PlanOptions",
    {
        name: _get_logged_type(each) | Missing
        for kind in OPTIONS_CLASS_BY_KIND.values()
        for name, each in _get_field_types(kind).items()
    },
)


#: The types of the fields of a plan in a log, by name.
_PLAN_FIELD_TYPES = {
    _KIND_FIELD: str,
    **_allow_missing_fields(
        Plan,
        {
            name: _get_logged_type(plan_type)
            for name, plan_type in _get_field_types(Plan).items()
            if name not in ("kind", "searches", "options")
        },
    ),
    "options": PlanOptions | Missing,
}
#: The plan of a search for ceilings that precedes the measurements of a run. It cannot contain further searches.
SearchRecord = _declare_struct("SearchRecord", {**_PLAN_FIELD_TYPES, "searches": list[dict[str, Any]] | Missing})
PlanRecord = _declare_struct("PlanRecord", {**_PLAN_FIELD_TYPES, "searches": list[SearchRecord] | Missing})  # type: ignore[valid-type]


class HeaderRecord(Struct, kw_only=True):
    schema: Int64
    converted_from: Int64 | Missing = UNSET
    tool: ToolRecord
    command: str | Missing = UNSET
    started: str | Missing = UNSET
    device: DeviceInfo
    devices: list[DeviceInfo] | Missing = UNSET
    timer: str
    traits: TraitsRecord | Missing = UNSET
    sensors: str | Missing = UNSET
    kernel: str
    plan: PlanRecord  # type: ignore[valid-type]
    settings: dict[str, Any] | Missing = UNSET
    environment: EnvironmentRecord
    findings: list[str] | Missing = UNSET
    notes: str | Missing = UNSET


def make_traits_record(backend: Backend) -> dict[str, Any]:
    """Convert the measured traits of an opened device (how its clock and its power react to load) to JSON values.
    Returns an empty mapping if mamf has not measured the traits, because its backend for the device uses constants.
    """
    burst, sustained = backend.burst_traits, backend.sustained_traits
    if "burst_traits" not in vars(backend) and not burst.remark:
        return {}
    return {
        **{
            regime: {name: value for name, value in vars(traits).items() if isinstance(value, (float, int, str))}
            for regime, traits in (("burst", burst), ("sustained", sustained))
        },
        "cache_bytes": backend.info.cache_bytes,
    }


def apply_logged_traits(backend: Backend, record: Mapping[str, Any]) -> None:
    """Set the traits of an opened device (how its clock and its power react to load) to those in a log. Changes nothing
    if the log has none.
    """
    if record:
        backend.burst_traits = replace(backend.burst_traits, **record["burst"])
        backend.sustained_traits = replace(backend.sustained_traits, **record["sustained"])
        backend.info = replace(backend.info, cache_bytes=record["cache_bytes"])


def make_header(
    backend: Backend,
    command: str,
    kernel: str,
    plan: Mapping[str, Any],
    findings: Sequence[str] = (),
    notes: str = "",
) -> dict[str, Any]:
    """Make the header of a log from an opened device and the texts that describe the run.

    ``plan``: JSON values from ``make_plan_record``. ``findings``: the problems that ``mamf doctor`` reports for this
    machine, one line each.
    """
    sensors = backend.telemetry
    return {
        "tool": describe_mamf_version(),
        "command": command,
        "started": get_utc_time(),
        "device": asdict(backend.info),
        "timer": backend.timer,
        **({"traits": traits} if (traits := make_traits_record(backend)) else {}),
        "sensors": f"unavailable: {sensors.reason}" if isinstance(sensors, Unavailability) else "available",
        "kernel": kernel,
        "plan": dict(plan),
        "settings": backend.read_settings(),
        "environment": describe_environment(backend.environment_variables),
        "findings": list(findings),
        "notes": notes,
    }


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, for the summary in its log.

    - ``status``: ``complete`` or ``interrupted``. ``reason``: why the run ended early; empty if it did not.
    - ``elapsed_seconds``: how long the run took.
    - ``unmeasured_count``: the number of planned rows that were not measured.
    """

    status: str
    reason: str = ""
    elapsed_seconds: float = 0.0
    unmeasured_count: int = 0

    def make_summary(self, measured_count: int) -> dict[str, Any]:
        """Make the fields of the summary that every kind of run has. ``measured_count``: the number of rows with a
        rate.
        """
        return {
            "status": self.status,
            "reason": self.reason,
            "measured": measured_count,
            "left": self.unmeasured_count,
            "elapsed_seconds": round(self.elapsed_seconds, 3),
        }


class LogRecord(NamedTuple):
    """A record of a log that is not a measurement: its name (``kind``) and its fields."""

    kind: str
    fields: Mapping[str, Any]


def check_device_after_run(backend: Backend, rows: Iterable[Measurement]) -> dict[str, Any]:
    """Estimate the overhead of the timer again, and check whether the card became shared during the run, for example
    with another process. Returns the results as fields of the summary.

    The overhead is missing if it was not subtracted from any row. The sharing is missing if nothing new shares the
    card. Both may be missing if the device has failed.
    """
    fields: dict[str, Any] = {}
    with suppress(Exception):  # A device that has failed may raise an exception here.
        if any(row.timer_overhead_seconds for row in rows) and (after := backend.estimate_timer_overhead()) is not None:
            fields["timer_overhead_after_seconds"] = round(after, 9)
        if new := [way for way in backend.find_sharing_ways() if way not in parse_sharing_ways(backend.info.name)]:
            fields["shared_after"] = new
    return fields


def describe_timer_shift(summary: dict[str, Any], rows: Sequence[Measurement]) -> str:
    """Return a warning if the overhead of the timer after the run differs from the overhead that was subtracted from
    the samples. Returns an empty string if the difference is too small to matter.
    """
    timed = [row for row in rows if row.ok and row.timer_overhead_seconds]
    after = summary.get("timer_overhead_after_seconds")
    if after is None or not timed or abs(after - timed[-1].timer_overhead_seconds) <= MAX_OVERHEAD_SHIFT_SECONDS:
        return ""
    before = timed[-1].timer_overhead_seconds
    share = abs(after - before) / min(row.seconds for row in timed)
    return (
        f"the timer's overhead changed from {before * 1e6:.1f} to {after * 1e6:.1f} us during the run, so "
        f"the times of the shortest launches may be wrong by {100 * share:.1f} %: measure these rows again"
    )


def make_plan_record(plan: Plan) -> dict[str, Any]:
    """Convert a plan to the JSON values of the header. Each shape becomes text in the format of its operation."""
    operation = get_operation(plan.operation)
    options = _convert_to_json(plan.options, operation) or {}
    return {
        _KIND_FIELD: plan.kind,
        **{
            name: _convert_to_json(each, operation)
            for name, each in vars(plan).items()
            if name not in ("kind", "options")
        },
        "options": {name: each for name, each in options.items() if plan.is_shared or name not in ("rank", "ranks")},
    }


def _convert_to_json(value: Any, operation: AnyOperation) -> Any:
    if isinstance(value, Plan):
        return make_plan_record(value)
    if isinstance(value, operation.shape_type):
        return str(value)
    if isinstance(value, operation.problem_type):
        return operation.make_problem_record(value)
    if is_dataclass(value):
        return {each.name: _convert_to_json(getattr(value, each.name), operation) for each in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _convert_to_json(each, operation) for name, each in value._asdict().items()}
    if isinstance(value, tuple):
        return [_convert_to_json(each, operation) for each in value]
    return None if value == math.inf else value


def read_plan_record(record: Mapping[str, Any]) -> Plan:
    """Convert the JSON values of a header to a plan. Raises KeyError, TypeError or ValueError if the values are not a
    plan.
    """
    operation = get_operation(record["operation"])
    converted_fields = {
        name: _convert_from_json(record[name], plan_type, operation)
        for name, plan_type in _get_field_types(Plan).items()
        if name in record
    }
    options = record.get("options") and _convert_from_json(
        record["options"], OPTIONS_CLASS_BY_KIND.get(record[_KIND_FIELD], type(None)), operation
    )
    return Plan(**{**converted_fields, "kind": record[_KIND_FIELD], "options": options or None})


def _convert_from_json(value: Any, plan_type: Any, operation: AnyOperation) -> Any:
    """Convert a JSON value to a value of the type ``plan_type``. ``operation``: the operation that converts the shapes
    and problems in the JSON value.
    """
    if plan_type == Shape:
        return value if isinstance(operation, UnknownOperation) else operation.parse_shape(value)
    if plan_type == Problem:
        return operation.read_problem_record(value)
    if plan_type is Plan:
        return read_plan_record(value)
    if plan_type is float:  # JSON has no infinity, so a log has None in its place.
        return math.inf if value is None else value
    if get_origin(plan_type) in (Union, types.UnionType):
        return None if value is None else _convert_from_json(value, get_args(plan_type)[0], operation)
    if get_origin(plan_type) is tuple:
        return tuple(_convert_from_json(each, get_args(plan_type)[0], operation) for each in value)
    if is_dataclass(plan_type) or hasattr(plan_type, "_fields"):
        return plan_type(
            **{
                name: _convert_from_json(value[name], each, operation)
                for name, each in _get_field_types(plan_type).items()
                if name in value
            }
        )
    return value
