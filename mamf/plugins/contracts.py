"""The guard between mamf and its plugins: violations of a contract raise an error that names the plugin.

A contract is an abstract class: Backend, Kernel, Operation. Its annotations define the types of attributes and return
values; ``_REQUIREMENTS`` adds conditions that types cannot express. Methods in ``_DIRECT`` are called without the
guard: they run between two marks, where only the launch may run, or they raise the device's own errors, which become
the status of a row (mamf.engine.measure).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from mamf.backend import DeviceInfo, OperandPool, Reading, Telemetry
from mamf.calibration import BurstTraits, SustainedTraits
from mamf.dtypes import DTYPES
from mamf.errors import MamfError, PluginError, UsageError, describe_error, first_line, plugin_errors

Plugin = TypeVar("Plugin")
Errors = tuple[type[BaseException], ...]
#: A description of valid values, and a check.
Requirement = tuple[str, Callable[[Any], object]]

_GUARDED = "_is_guarded_by_mamf"
_DIRECT = ("mark", "idle_mark", "wait", "submit", "synchronize", "flush_cache", "sleep", "now", "take")
#: Errors that a method may raise: they become the status of a shape, mean that there is no axis, or that a record in a
#: log is malformed.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_MAY_RAISE: Mapping[str, Errors] = {
    "prepare": (BaseException,),
    "axis": (NotImplementedError,),
    "shape_from_record": _MALFORMED,
    "problem_from_record": _MALFORMED,
}
#: Errors by which a method rejects a request.
_REFUSES: Mapping[str, Errors] = dict.fromkeys(("problem_for", "parse_shape"), (TypeError, ValueError))
#: Records whose fields are checked too.
_RECORDS = (DeviceInfo, Reading, BurstTraits, SustainedTraits)
#: Objects from a plugin that have contracts too.
_PARTS = (OperandPool, Telemetry)
#: The operation's attributes that replace the contract's type variables.
_OPEN_TYPES = {"ProblemT": "problem_type", "ShapeT": "shape_type"}
_DESCRIPTIONS = {
    str: "text",
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    NoneType: "None",
    type: "a class",
    object: "anything",
    Callable: "a function",
}


# -- valid values ------------------------------------------------------------------------------------------------------


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _each(names: str, description: str, is_met: Callable[[Any], object]) -> dict[str, Requirement]:
    return dict.fromkeys(names.split(), (description, is_met))


#: Conditions on values in addition to their types, by attribute, field or method.
_REQUIREMENTS: Mapping[str, Requirement] = {
    **_each("name timer operation kernel_group backend vendor", "text that is not empty", lambda text: text.strip()),
    **_each(
        "free_memory allocated_memory peak_memory peak_reserved_memory rest_ratio longest_rest_seconds warm_in_seconds"
        " cold_after_seconds wake_seconds soak_seconds settle_seconds bridge_seconds rest_seconds restart_seconds",
        "a number of at least 0",
        lambda number: number >= 0,
    ),
    **_each("train_seconds swing_seconds fastest_possible peak", "a number above 0", lambda number: number > 0),
    **_each("resolve_dtype", f"one of {', '.join(DTYPES)}", DTYPES.__contains__),
    **_each("default_shapes", "a list of at least one shape", len),
    **_each(
        "columns",
        "text and finite numbers by name",
        lambda values: all(not describe_misfit(each, str | bool | int | float | None) for each in values.values()),
    ),
    **_each("shape_record problem_record", "a dictionary that JSON can hold", _is_json),
}


_PLAIN = (str, int, bool)


def describe_misfit(value: object, hint: Any) -> str:
    """The valid values for the annotation ``hint``, in words; empty if ``value`` is valid."""
    if type(value) is hint and hint in _PLAIN:  # nearly always
        return ""
    origin, parameters = _taken_apart(hint)
    if origin is ClassVar:
        return describe_misfit(value, parameters[0])
    if origin in (Union, UnionType):
        fits = any(not describe_misfit(value, each) for each in parameters)
    elif origin in (int, float):
        fits = isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
        fits = fits and math.isfinite(value)  # type: ignore[arg-type]
    elif origin in _RECORDS and isinstance(value, origin):
        return _misfit_of_fields(value, origin)
    elif _is_kind(origin, Mapping):
        fits = isinstance(value, Mapping) and _all_fit(value.keys(), parameters[0])
        fits = fits and _all_fit(value.values(), parameters[1])  # type: ignore[attr-defined]
    elif _is_pair_or_more(origin, parameters):
        fits = isinstance(value, tuple) and len(value) == len(parameters)
        fits = fits and not any(describe_misfit(*each) for each in zip(value, parameters, strict=True))  # type: ignore[call-overload]
    elif _is_kind(origin, Sequence) and origin is not str:
        fits = isinstance(value, Sequence) and _all_fit(value, parameters[0])
    else:
        fits = origin is Any or isinstance(value, origin)
    return "" if fits else _description(hint)


@functools.cache
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint) or hint, get_args(hint)


def _misfit_of_fields(value: object, kind: type) -> str:
    for name, hint in _hints(kind).items():
        if wrong := _describe_violation(getattr(value, name), hint, name):
            return f"one whose {name} is {wrong}"
    return ""


def _describe_violation(value: object, hint: Any, name: str) -> str:
    """The same for a value with a name, which may have a requirement."""
    wrong = describe_misfit(value, hint)
    if wrong or value is None or name not in _REQUIREMENTS:
        return wrong
    description, is_met = _REQUIREMENTS[name]
    return "" if is_met(value) else description


def _all_fit(values: Iterable[object], hint: Any) -> bool:
    return hint is Any or not any(describe_misfit(each, hint) for each in values)


def _is_kind(origin: Any, kind: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_pair_or_more(origin: Any, parameters: Sequence[Any]) -> bool:
    """Whether an annotation is a tuple with a type for each of its values."""
    return origin is tuple and Ellipsis not in parameters


def _description(hint: Any) -> str:
    origin, parameters = get_origin(hint) or hint, get_args(hint)
    if _is_pair_or_more(origin, parameters):
        return f"a tuple of {' and '.join(map(_description, parameters))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_description, parameters))
    if _is_kind(origin, Mapping):
        return f"a mapping of {_description(parameters[0])} to {_description(parameters[1])}"
    if _is_kind(origin, Sequence) and origin is not str:
        return f"a list of {_description(parameters[0])}"
    return _DESCRIPTIONS.get(origin) or str(origin.__name__)


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    """The annotations of a contract's attributes or of a record's fields."""
    return get_type_hints(kind)


@functools.cache
def _returns(contract: type) -> Mapping[str, Any]:
    """The return types of a contract's methods, by name."""
    calls = {name: getattr(contract, name) for name in vars(contract) if not name.startswith("_")}
    return {name: get_type_hints(call)["return"] for name, call in calls.items() if callable(call)}


def _resolve_hint(hint: Any, plugin: object) -> Any:
    """An annotation in which an operation's types replace the contract's type variables."""
    open_types = (hint,) if isinstance(hint, TypeVar) else getattr(hint, "__parameters__", ())
    own = tuple(getattr(plugin, _OPEN_TYPES[each.__name__], Any) for each in open_types)
    return own[0] if isinstance(hint, TypeVar) else hint[own] if own else hint


# -- the guard ---------------------------------------------------------------------------------------------------------


class attribute_errors_to:
    """Convert what is raised within, SystemExit too, into a PluginError that names the plugin; mamf's own errors pass.

    ``passes``: further errors that pass. ``refuses``: errors that become a UsageError. This is a class because guarded
    methods run for each row, and a generator would take longer than most of them.
    """

    def __init__(self, plugin: str, what: str, passes: Errors = (), refuses: Errors = ()) -> None:
        self._plugin, self._what, self._passes, self._refuses = plugin, what, passes, refuses

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, plugin_errors()) or isinstance(error, (MamfError, *self._passes)):
            return
        if isinstance(error, self._refuses):
            raise UsageError(f"{self._plugin}: {first_line(error)}") from error
        raise PluginError(f"{self._plugin} is broken: {self._what} raised {describe_error(error)}") from error


def enforce_contract(plugin: Plugin, contract: type, label: str) -> Plugin:
    """Guard the methods of a plugin and return it. ``label``: its name in errors. Raises PluginError for an invalid
    attribute.
    """
    if _GUARDED in vars(plugin):
        return plugin
    for name in _hints(contract):
        check_attribute(plugin, contract, name, label)
    for name in _returns(contract).keys() - _DIRECT:
        object.__setattr__(plugin, name, guard_method(plugin, contract, name, label))
    object.__setattr__(plugin, _GUARDED, True)
    return plugin


def check_attribute(plugin: object, contract: type, name: str, label: str) -> Any:
    """The value of a plugin's attribute. Raises PluginError if it is missing or violates the contract."""
    with attribute_errors_to(label, name):
        value = getattr(plugin, name)
    _require_valid(value, _hints(contract)[name], label, name, "is")
    return value


def guard_method(plugin: object, contract: type, name: str, label: str) -> Callable[..., Any]:
    """A guarded method of a plugin. It raises PluginError if the method violates the contract."""
    call, hint = getattr(plugin, name), _resolve_hint(_returns(contract)[name], plugin)
    errors = attribute_errors_to(label, name, _MAY_RAISE.get(name, ()), _REFUSES.get(name, ()))

    @functools.wraps(call)
    def guard(*arguments: Any, **keywords: Any) -> Any:
        with errors:
            value = call(*arguments, **keywords)
        if hint is not NoneType:
            _require_valid(value, hint, label, name, "returned")
        return value

    return guard


def _require_valid(value: object, hint: Any, label: str, name: str, verb: str) -> None:
    """Raises PluginError for a value that violates the contract."""
    if wrong := _describe_violation(value, hint, name):
        shown = str(value) if value is None or isinstance(value, (bool, float)) else f"a {type(value).__name__}"
        raise PluginError(f"{label} is broken: {name} {verb} {shown}, not {wrong}")
    for part in filter((hint, *_taken_apart(hint)[1]).__contains__, _PARTS):
        if isinstance(value, part):
            enforce_contract(value, part, f"{label}'s {name}")


class CheckedClock:
    """A backend's ``now``, checked: it returns finite numbers and never goes back."""

    def __init__(self, now: Callable[[], float], label: str) -> None:
        self._now, self._label, self._last = now, label, -math.inf
        self._errors = attribute_errors_to(label, "now")

    def __call__(self) -> float:
        """Host seconds. Raises PluginError for a time that is not finite or before the last one."""
        with self._errors:
            now = self._now()
        if not self._last <= now < math.inf:
            due = "a finite number" if not math.isfinite(now) else f"{self._last} or later, as before"
            raise PluginError(f"{self._label} is broken: now returned {now}, not {due}")
        self._last = now
        return now
