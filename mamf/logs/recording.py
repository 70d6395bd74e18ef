"""The header of a run log with the plan and the measured traits, and the end of a run.

The header is declared here as msgspec structs, like the other records in records.py. Plans of all kinds and operations
have one form; shapes and problems in it are read and written by their operation.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from msgspec import UNSET, Struct, defstruct
from msgspec import UnsetType as Missing

from mamf.backend import Backend, DeviceInfo, Unavailable, parse_sharing
from mamf.calibration import BurstTraits, SustainedTraits
from mamf.logs.records import CyclesUsed, Fields, Tool, Whole, utc_now
from mamf.machine.environment import describe_environment, get_tool_version
from mamf.measurement import MAX_SHIFT_SECONDS, Measurement
from mamf.operations.matmul.shapes import MatmulGrid, SearchOptions
from mamf.operations.unknown import AnyOperation, Unknown, get_operation
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


class Environment(Struct, kw_only=True):
    python: str | Missing = UNSET
    os: str | Missing = UNSET
    packages: dict[str, str | None]
    variables: dict[str, str | None] | Missing = UNSET


class Traits(Struct, kw_only=True):
    burst: BurstTraits
    sustained: SustainedTraits
    cache_bytes: Whole | None


#: The class of a plan's options, for the kinds of runs that have options.
OPTIONS: Mapping[str, type] = {
    SWEEP: SweepOptions,
    FIND: SearchOptions,
    GUARD: GuardOptions,
    REPRODUCE: ReproduceOptions,
    VERIFY: VerifyOptions,
}
#: The name of ``Plan.kind`` in a log.
_KIND = "command"
#: The type of a value in a log, by its type in a plan.
_LOGGED_TYPES = {Shape: str, Problem: Fields, int: Whole}
#: Fields with another type in a log, because JSON has no infinity and cycles have a limit.
_LOGGED_OTHERWISE: Mapping[type, dict[str, Any]] = {
    MatmulGrid: {"most_flop": float | None},
    Claim: {"cycles_used": CyclesUsed | None},
}


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _logged_type(kind: Any) -> Any:
    """Return the type that a value of a plan has in a log."""
    if kind in _LOGGED_TYPES:
        return _LOGGED_TYPES[kind]
    if get_origin(kind) is tuple:
        return list[_logged_type(get_args(kind)[0])]  # type: ignore[misc]
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(map(_logged_type, get_args(kind)))]  # noqa: UP007  (of types that are not known here)
    if not is_dataclass(kind) and not hasattr(kind, "_fields"):
        return kind
    declared = {name: _logged_type(each) for name, each in _types(kind).items()} | _LOGGED_OTHERWISE.get(kind, {})
    return kind if declared == _types(kind) else _declare(kind.__name__, _allow_missing(kind, declared))


def _allow_missing(kind: type, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Allow fields with a default to be missing: logs from before such a field was added do not have it."""
    defaults = {name: each.default for name, each in inspect.signature(kind).parameters.items()}
    return {
        name: each if defaults[name] is inspect.Parameter.empty else each | Missing for name, each in declared.items()
    }


def _declare(name: str, declared: Mapping[str, Any]) -> type[Struct]:
    """Declare the struct of a record. A field whose type includes Missing may be missing from a log."""
    given = [(each, kind, UNSET) if Missing in get_args(kind) else (each, kind) for each, kind in declared.items()]
    return defstruct(name, given, kw_only=True, module=__name__)


#: The options of all kinds of runs. Which of them a plan has depends on its kind: see OPTIONS.
PlanOptions = _declare(
    "PlanOptions",
    {name: _logged_type(each) | Missing for kind in OPTIONS.values() for name, each in _types(kind).items()},
)


#: The fields of a plan, without its kind.
_PLAN = {name: _logged_type(kind) for name, kind in _types(Plan).items() if name not in ("kind", "searches", "options")}
_PLAN = {_KIND: str, **_allow_missing(Plan, _PLAN), "options": PlanOptions | Missing}
#: The plan of a search that a run begins with. It has no searches itself.
SearchRecord = _declare("SearchRecord", {**_PLAN, "searches": list[dict[str, Any]] | Missing})
PlanRecord = _declare("PlanRecord", {**_PLAN, "searches": list[SearchRecord] | Missing})  # type: ignore[valid-type]


class Header(Struct, kw_only=True):
    schema: Whole
    converted_from: Whole | Missing = UNSET
    tool: Tool
    command: str | Missing = UNSET
    started: str | Missing = UNSET
    device: DeviceInfo
    devices: list[DeviceInfo] | Missing = UNSET
    timer: str
    traits: Traits | Missing = UNSET
    sensors: str | Missing = UNSET
    kernel: str
    plan: PlanRecord  # type: ignore[valid-type]
    settings: dict[str, Any] | Missing = UNSET
    environment: Environment
    findings: list[str] | Missing = UNSET
    notes: str | Missing = UNSET


def traits_record(backend: Backend) -> dict[str, Any]:
    """Convert the traits of an opened device to JSON values; empty if they are constants of its adapter."""
    burst, sustained = backend.burst_traits, backend.sustained_traits
    if "burst_traits" not in vars(backend) and not burst.remark:
        return {}
    plain = {
        regime: {name: value for name, value in vars(traits).items() if isinstance(value, (float, int, str))}
        for regime, traits in (("burst", burst), ("sustained", sustained))
    }
    return {**plain, "cache_bytes": backend.info.cache_bytes}


def apply_traits(backend: Backend, record: Mapping[str, Any]) -> None:
    """Set the traits of an opened device to those in a log, if the log has any."""
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
    """Make the header of a log. ``plan``: from ``plan_record``. ``findings``: what the doctor found, one line each."""
    sensors = backend.telemetry
    return {
        "tool": get_tool_version(),
        "command": command,
        "started": utc_now(),
        "device": asdict(backend.info),
        "timer": backend.timer,
        **({"traits": traits} if (traits := traits_record(backend)) else {}),
        "sensors": f"unavailable: {sensors.reason}" if isinstance(sensors, Unavailable) else "available",
        "kernel": kernel,
        "plan": dict(plan),
        "settings": backend.settings(),
        "environment": describe_environment(backend.environment_variables),
        "findings": list(findings),
        "notes": notes,
    }


@dataclass(frozen=True)
class End:
    """How a run ended. ``reason``: why it ended early, if it did. ``left``: the number of steps not measured."""

    status: str
    reason: str = ""
    elapsed_seconds: float = 0.0
    left: int = 0

    def summary(self, measured: int) -> dict[str, Any]:
        """Return what the last record of every log has. ``measured``: the number of rows with a figure."""
        return {
            "status": self.status,
            "reason": self.reason,
            "measured": measured,
            "left": self.left,
            "elapsed_seconds": round(self.elapsed_seconds, 3),
        }


class Record(NamedTuple):
    """A record that is not a measurement: its name and its fields."""

    kind: str
    fields: Mapping[str, Any]


def measure_overhead_after(backend: Backend, rows: Iterable[Measurement]) -> dict[str, Any]:
    """Estimate the timer's overhead again after the last row, as a field of the summary; empty if no row used it."""
    if not any(row.timer_overhead for row in rows):
        return {}
    try:
        after = backend.timer_overhead()
    except Exception:  # the device failed, which has already ended the run with a reason
        return {}
    return {} if after is None else {"timer_overhead_after_seconds": round(after, 9)}


def find_new_sharing(backend: Backend) -> dict[str, Any]:
    """Return how the card is shared now and was not before the run, as a field of the summary; empty if unchanged."""
    try:
        now = backend.sharing()
    except Exception:  # the device failed, which has already ended the run with a reason
        return {}
    new = [way for way in now if way not in parse_sharing(backend.info.name)]
    return {"shared_after": new} if new else {}


def describe_shift(summary: dict[str, Any], rows: Sequence[Measurement]) -> str:
    """Return a warning if the timer's overhead after the run differs from the one subtracted, else an empty string."""
    timed = [row for row in rows if row.ok and row.timer_overhead]
    after = summary.get("timer_overhead_after_seconds")
    if after is None or not timed or abs(after - timed[-1].timer_overhead) <= MAX_SHIFT_SECONDS:
        return ""
    before = timed[-1].timer_overhead
    share = abs(after - before) / min(row.seconds for row in timed)
    return (
        f"the timer's overhead changed from {before * 1e6:.1f} to {after * 1e6:.1f} us during the run: "
        f"the shortest launches may be off by {share:.1%}; measure them again"
    )


def host_seconds(backend: Backend) -> float:
    """Return the backend's time for a summary; 0 if its clock fails, which has already ended the run with a reason."""
    try:
        return backend.now()
    except Exception:
        return 0.0


def plan_record(plan: Plan) -> dict[str, Any]:
    """Convert a plan to JSON values. Shapes become the text that their operation prints."""
    of = get_operation(plan.operation)
    record = {name: _to_json(value, of) for name, value in vars(plan).items() if name not in ("kind", "options")}
    options = _to_json(plan.options, of) or {}
    if not plan.is_shared:
        options = {name: value for name, value in options.items() if name not in ("rank", "ranks")}
    return {_KIND: plan.kind, **record, "options": options}


def _to_json(value: Any, of: AnyOperation) -> Any:
    if isinstance(value, Plan):
        return plan_record(value)
    if isinstance(value, of.shape_type):
        return str(value)
    if isinstance(value, of.problem_type):
        return of.problem_record(value)
    if is_dataclass(value):
        return {each.name: _to_json(getattr(value, each.name), of) for each in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _to_json(each, of) for name, each in value._asdict().items()}
    if isinstance(value, tuple):
        return [_to_json(each, of) for each in value]
    return None if value == math.inf else value


def plan_from_record(record: Mapping[str, Any]) -> Plan:
    """Convert JSON values to a plan. Raises KeyError, TypeError or ValueError if they are not one."""
    of = get_operation(record["operation"])
    given = {name: _read(record[name], kind, of) for name, kind in _types(Plan).items() if name in record}
    options = record.get("options") and _read(record["options"], OPTIONS.get(record[_KIND], type(None)), of)
    return Plan(**{**given, "kind": record[_KIND], "options": options or None})


def _read(value: Any, kind: Any, of: AnyOperation) -> Any:
    """Convert a JSON value to a value of type ``kind``."""
    if kind == Shape:
        return value if isinstance(of, Unknown) else of.parse_shape(value)
    if kind == Problem:
        return of.problem_from_record(value)
    if kind is Plan:
        return plan_from_record(value)
    if kind is float:  # JSON has no infinity
        return math.inf if value is None else value
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _read(value, get_args(kind)[0], of)
    if get_origin(kind) is tuple:
        return tuple(_read(each, get_args(kind)[0], of) for each in value)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return kind(**{name: _read(value[name], each, of) for name, each in _types(kind).items() if name in value})
    return value
