"""Checks what plugins return. If a plugin violates its contract, the error names the plugin.

A contract is an abstract class: Backend, Kernel or Operation. Its annotations define the types of attributes and return
values; ``_REQUIREMENTS`` adds conditions that types cannot express. Methods in ``_UNCHECKED`` are not checked: some run
while a launch is timed, and the errors of others become the status of a row (mamf.engine.measure).
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
from mamf.errors import (
    MamfError,
    PluginError,
    UsageError,
    describe_error,
    get_catchable_plugin_errors,
    get_first_message_line,
)

Plugin = TypeVar("Plugin")
Errors = tuple[type[BaseException], ...]
#: A description of valid values, and a function that returns whether a value is valid.
Requirement = tuple[str, Callable[[Any], object]]

_GUARDED_ATTRIBUTE = "_is_guarded_by_mamf"
_UNCHECKED = ("mark", "idle_mark", "wait", "submit", "synchronize", "flush_cache", "sleep", "now", "take")
#: Errors that a method may raise. An error of ``prepare`` becomes the status of a row, an error of ``axis`` means that
#: there is no axis, and an error of a ``..._from_record`` method means that the record in the log is malformed.
_MALFORMED_RECORD_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_ALLOWED_ERRORS: Mapping[str, Errors] = {
    "prepare": (BaseException,),
    "axis": (NotImplementedError,),
    "shape_from_record": _MALFORMED_RECORD_ERRORS,
    "problem_from_record": _MALFORMED_RECORD_ERRORS,
}
#: Errors by which a method rejects a user's request. They become a UsageError.
_REFUSAL_ERRORS: Mapping[str, Errors] = dict.fromkeys(("problem_for", "parse_shape"), (TypeError, ValueError))
#: Dataclasses with fields that are also checked.
_CHECKED_DATACLASSES = (DeviceInfo, Reading, BurstTraits, SustainedTraits)
#: Types of objects that a plugin returns and that also have a contract.
_GUARDED_TYPES = (OperandPool, Telemetry)
#: For each type variable of the contract, the operation's attribute that has the actual type.
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


def _are_plain(values: Mapping[str, object]) -> bool:
    return all(not describe_misfit(each, str | bool | int | float | None) for each in values.values())


def _make_requirements(names: str, description: str, is_met: Callable[[Any], object]) -> dict[str, Requirement]:
    return dict.fromkeys(names.split(), (description, is_met))


#: Conditions that values must meet in addition to their type, by attribute, field or method.
_REQUIREMENTS: Mapping[str, Requirement] = {
    **_make_requirements(
        "name timer operation kernel_group backend vendor", "a text that is not empty", lambda text: text.strip()
    ),
    **_make_requirements(
        "free_memory allocated_memory peak_memory peak_reserved_memory rest_ratio longest_rest_seconds warm_in_seconds"
        " cold_after_seconds wake_seconds soak_seconds settle_seconds bridge_seconds rest_seconds restart_seconds",
        "a number of at least 0",
        lambda number: number >= 0,
    ),
    **_make_requirements(
        "train_seconds swing_seconds fastest_possible peak", "a number above 0", lambda number: number > 0
    ),
    **_make_requirements("resolve_dtype", f"one of {', '.join(DTYPES)}", DTYPES.__contains__),
    **_make_requirements("default_shapes", "a list of at least one shape", len),
    **_make_requirements("columns", "text and finite numbers by name", _are_plain),
    **_make_requirements("shape_record problem_record", "a dictionary that can be written as JSON", _is_json),
}


_PLAIN = (str, int, bool)


def describe_misfit(value: object, hint: Any) -> str:
    """Return a description of the values that the annotation ``hint`` allows, or "" if ``value`` is one of them."""
    if type(value) is hint and hint in _PLAIN:  # a shortcut for almost all values
        return ""
    origin, parameters = _split_hint(hint)
    if origin is ClassVar:
        return describe_misfit(value, parameters[0])
    if origin in (Union, UnionType):
        fits = any(not describe_misfit(value, each) for each in parameters)
    elif origin in (int, float):
        fits = isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
        fits = fits and math.isfinite(value)  # type: ignore[arg-type]
    elif origin in _CHECKED_DATACLASSES and isinstance(value, origin):
        return _describe_field_misfit(value, origin)
    elif _is_subclass(origin, Mapping):
        fits = isinstance(value, Mapping) and _all_fit(value.keys(), parameters[0])
        fits = fits and _all_fit(value.values(), parameters[1])  # type: ignore[attr-defined]
    elif _is_fixed_tuple(origin, parameters):
        fits = isinstance(value, tuple) and len(value) == len(parameters)
        fits = fits and not any(describe_misfit(*each) for each in zip(value, parameters, strict=True))  # type: ignore[call-overload]
    elif _is_subclass(origin, Sequence) and origin is not str:
        fits = isinstance(value, Sequence) and _all_fit(value, parameters[0])
    else:
        fits = origin is Any or isinstance(value, origin)
    return "" if fits else _describe_hint(hint)


@functools.cache
def _split_hint(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint) or hint, get_args(hint)


def _describe_field_misfit(value: object, kind: type) -> str:
    for name, hint in _get_attribute_hints(kind).items():
        if wrong := _describe_violation(getattr(value, name), hint, name):
            return f"one whose {name} is {wrong}"
    return ""


def _describe_violation(value: object, hint: Any, name: str) -> str:
    """Return a description of valid values if the value of an attribute or method has the wrong type or does not meet
    its requirement, else "".
    """
    wrong = describe_misfit(value, hint)
    if wrong or value is None or name not in _REQUIREMENTS:
        return wrong
    description, is_met = _REQUIREMENTS[name]
    return "" if is_met(value) else description


def _all_fit(values: Iterable[object], hint: Any) -> bool:
    return hint is Any or not any(describe_misfit(each, hint) for each in values)


def _is_subclass(origin: Any, kind: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_fixed_tuple(origin: Any, parameters: Sequence[Any]) -> bool:
    """Return whether an annotation is a tuple with a type for each position, unlike ``tuple[int, ...]``."""
    return origin is tuple and Ellipsis not in parameters


def _describe_hint(hint: Any) -> str:
    origin, parameters = get_origin(hint) or hint, get_args(hint)
    if _is_fixed_tuple(origin, parameters):
        return f"a tuple of {' and '.join(map(_describe_hint, parameters))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_describe_hint, parameters))
    if _is_subclass(origin, Mapping):
        return f"a mapping of {_describe_hint(parameters[0])} to {_describe_hint(parameters[1])}"
    if _is_subclass(origin, Sequence) and origin is not str:
        return f"a list of {_describe_hint(parameters[0])}"
    return _DESCRIPTIONS.get(origin) or str(origin.__name__)


@functools.cache
def _get_attribute_hints(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a contract's attributes or of a dataclass's fields."""
    return get_type_hints(kind)


@functools.cache
def _get_return_hints(contract: type) -> Mapping[str, Any]:
    """Return the annotated return types of a contract's methods, by method name."""
    calls = {name: getattr(contract, name) for name in vars(contract) if not name.startswith("_")}
    return {name: get_type_hints(call)["return"] for name, call in calls.items() if callable(call)}


def _resolve_hint(hint: Any, plugin: object) -> Any:
    """Replace the contract's type variables in an annotation by the operation's actual types."""
    open_types = (hint,) if isinstance(hint, TypeVar) else getattr(hint, "__parameters__", ())
    types = tuple(getattr(plugin, _OPEN_TYPES[each.__name__], Any) for each in open_types)
    return types[0] if isinstance(hint, TypeVar) else hint[types] if types else hint


# -- the guard ---------------------------------------------------------------------------------------------------------


class wrap_errors_of:
    """A context manager that converts errors, even SystemExit, into a PluginError with the plugin's name.

    mamf's own errors are not converted. ``passes``: other errors that are not converted. ``refuses``: errors that
    become a UsageError. This is a class because a generator would take longer than most methods that it guards.
    """

    def __init__(self, plugin: str, what: str, passes: Errors = (), refuses: Errors = ()) -> None:
        self._plugin, self._what, self._passes, self._refuses = plugin, what, passes, refuses

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if (
            error is None
            or not isinstance(error, get_catchable_plugin_errors())
            or isinstance(error, (MamfError, *self._passes))
        ):
            return
        if isinstance(error, self._refuses):
            raise UsageError(f"{self._plugin}: {get_first_message_line(error)}") from error
        raise PluginError(f"{self._plugin} is broken: {self._what} raised {describe_error(error)}") from error


def enforce_contract(plugin: Plugin, contract: type, label: str) -> Plugin:
    """Check a plugin's attributes and guard its methods. Returns the plugin.

    ``label``: the plugin's name in errors. Raises PluginError for an invalid attribute.
    """
    if _GUARDED_ATTRIBUTE in vars(plugin):
        return plugin
    for name in _get_attribute_hints(contract):
        check_attribute(plugin, contract, name, label)
    for name in _get_return_hints(contract).keys() - _UNCHECKED:
        object.__setattr__(plugin, name, guard_method(plugin, contract, name, label))
    object.__setattr__(plugin, _GUARDED_ATTRIBUTE, True)
    return plugin


def check_attribute(plugin: object, contract: type, name: str, label: str) -> Any:
    """Return the value of a plugin's attribute. Raises PluginError if it is missing or violates the contract."""
    with wrap_errors_of(label, name):
        value = getattr(plugin, name)
    _require_contract(value, _get_attribute_hints(contract)[name], label, name, "is")
    return value


def guard_method(plugin: object, contract: type, name: str, label: str) -> Callable[..., Any]:
    """Wrap a plugin's method so that it raises PluginError if it fails or returns an invalid value."""
    call, hint = getattr(plugin, name), _resolve_hint(_get_return_hints(contract)[name], plugin)
    errors = wrap_errors_of(label, name, _ALLOWED_ERRORS.get(name, ()), _REFUSAL_ERRORS.get(name, ()))

    @functools.wraps(call)
    def guard(*arguments: Any, **keywords: Any) -> Any:
        with errors:
            value = call(*arguments, **keywords)
        if hint is not NoneType:
            _require_contract(value, hint, label, name, "returned")
        return value

    return guard


def _require_contract(value: object, hint: Any, label: str, name: str, verb: str) -> None:
    """Raise PluginError if a value violates the contract. Guards the value if it has a contract itself."""
    if wrong := _describe_violation(value, hint, name):
        shown = str(value) if value is None or isinstance(value, (bool, float)) else f"a {type(value).__name__}"
        raise PluginError(f"{label} is broken: {name} {verb} {shown}, not {wrong}")
    for part in filter((hint, *_split_hint(hint)[1]).__contains__, _GUARDED_TYPES):
        if isinstance(value, part):
            enforce_contract(value, part, f"{label}'s {name}")


class CheckedClock:
    """Wraps a backend's ``now`` and checks that it returns finite numbers and never goes back."""

    def __init__(self, now: Callable[[], float], label: str) -> None:
        self._now, self._label, self._last = now, label, -math.inf
        self._errors = wrap_errors_of(label, "now")

    def __call__(self) -> float:
        """Return the host time in seconds. Raises PluginError if it is not finite or earlier than the last one."""
        with self._errors:
            now = self._now()
        if not self._last <= now < math.inf:
            due = "a finite number" if not math.isfinite(now) else f"at least {self._last}, its last value"
            raise PluginError(f"{self._label} is broken: now returned {now}, not {due}")
        self._last = now
        return now
