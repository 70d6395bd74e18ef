"""Check what plugins (third-party backends, kernels and operations) return. If a plugin violates its contract, the
error names the plugin.

A contract is an abstract class: Backend, Kernel or Operation. Its type annotations define the types of attributes and
return values; ``_REQUIREMENTS`` adds conditions that types cannot express. The methods in ``_UNCHECKED_METHODS`` are
not checked: some run while a launch is timed, and errors of the others become the status of a measured row
(mamf.engine.measure).
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
ErrorTypes = tuple[type[BaseException], ...]
#: A condition for a value: a description of valid values, and a function that returns whether a value is valid.
Requirement = tuple[str, Callable[[Any], object]]

# Name of the attribute that marks a plugin whose methods are already checked.
_GUARD_FLAG_NAME = "_is_guarded_by_mamf"
# Names of the methods that are not checked. The docstring of this file gives the reasons.
_UNCHECKED_METHODS = (
    "record_mark",
    "record_idle_mark",
    "wait_for_mark",
    "submit",
    "synchronize",
    "flush_cache",
    "sleep",
    "now",
    "take_buffer",
)
# Types of errors that a method may raise without being broken, by method. An error of ``prepare`` becomes the status of
# a row, an error of ``find_axis_position`` means that there is no axis, and an error of ``read_shape_record`` or
# ``read_problem_record`` means that the record in the log is malformed.
_MALFORMED_RECORD_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_ALLOWED_ERRORS: Mapping[str, ErrorTypes] = {
    "prepare": (BaseException,),
    "find_axis_position": (NotImplementedError,),
    "read_shape_record": _MALFORMED_RECORD_ERRORS,
    "read_problem_record": _MALFORMED_RECORD_ERRORS,
}
# Types of errors by which a method rejects what the user asked for, by method. These errors become a UsageError.
_REFUSAL_ERRORS: Mapping[str, ErrorTypes] = dict.fromkeys(("make_problem", "parse_shape"), (TypeError, ValueError))
# Dataclasses whose fields are checked too if a plugin returns an object of them.
_CHECKED_DATACLASSES = (DeviceInfo, Reading, BurstTraits, SustainedTraits)
# Types that also have a contract. If a plugin returns an object of such a type, its methods are checked too.
_GUARDED_TYPES = (OperandPool, Telemetry)
# For each type variable in a contract, the name of the attribute of an operation or kernel that has the actual type.
_ATTRIBUTE_BY_TYPE_VARIABLE = {"ProblemT": "problem_type", "ShapeT": "shape_type"}

# -- valid values ------------------------------------------------------------------------------------------------------


def _is_json_value(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _make_requirements(names: str, description: str, is_met: Callable[[Any], object]) -> dict[str, Requirement]:
    return dict.fromkeys(names.split(), (description, is_met))


# Conditions that values must meet in addition to having the right type, by the name of the attribute, field or method.
_REQUIREMENTS: Mapping[str, Requirement] = {
    **_make_requirements(
        "name timer operation kernel_group backend vendor", "a text that is not empty", lambda text: text.strip()
    ),
    **_make_requirements(
        "read_free_memory_bytes read_allocated_memory_bytes read_peak_memory_bytes read_peak_reserved_memory_bytes"
        " rest_ratio longest_rest_seconds warm_in_seconds cold_after_seconds wake_seconds soak_seconds"
        " settle_seconds bridge_seconds rest_seconds restart_seconds",
        "a number of at least 0",
        lambda number: number >= 0,
    ),
    **_make_requirements(
        "train_seconds swing_seconds find_max_possible_rate find_peak_rate",
        "a number above 0",
        lambda number: number > 0,
    ),
    **_make_requirements("resolve_dtype", f"one of {', '.join(DTYPES)}", DTYPES.__contains__),
    **_make_requirements("choose_default_shapes", "a list of at least one shape", len),
    **_make_requirements(
        "make_columns",
        "a mapping of names to texts and finite numbers",
        lambda values: _have_type(values.values(), str | bool | int | float | None),
    ),
    **_make_requirements(
        "make_shape_record make_problem_record", "a dictionary that can be written as JSON", _is_json_value
    ),
}


# Types whose values have no parts to check.
_SIMPLE_TYPES = (str, int, bool)


def describe_type_violation(value: object, annotation: Any) -> str:
    """Check a value against a type annotation. Returns "" if the value has this type, else the annotation as text."""
    if type(value) is annotation and annotation in _SIMPLE_TYPES:  # a quick check that suffices for almost all values
        return ""
    origin, parameters = _split_annotation(annotation)
    if origin is ClassVar:
        return describe_type_violation(value, parameters[0])
    if origin in (Union, UnionType):
        is_valid = any(not describe_type_violation(value, each) for each in parameters)
    elif origin in (int, float):
        is_valid = isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
        is_valid = is_valid and math.isfinite(value)  # type: ignore[arg-type]
    elif origin in _CHECKED_DATACLASSES and isinstance(value, origin):
        fields = _get_attribute_annotations(origin).items()
        violations = ((name, _describe_contract_violation(getattr(value, name), each, name)) for name, each in fields)
        return next((f"one whose {name} is {valid_values}" for name, valid_values in violations if valid_values), "")
    elif _is_subclass(origin, Mapping):
        is_valid = isinstance(value, Mapping) and _have_type(value.keys(), parameters[0])
        is_valid = is_valid and _have_type(value.values(), parameters[1])  # type: ignore[attr-defined]
    elif origin is tuple and Ellipsis not in parameters:  # such as tuple[int, str]
        is_valid = isinstance(value, tuple) and len(value) == len(parameters)
        is_valid = is_valid and not any(describe_type_violation(*each) for each in zip(value, parameters, strict=True))  # type: ignore[call-overload]
    elif _is_subclass(origin, Sequence) and origin is not str:
        is_valid = isinstance(value, Sequence) and _have_type(value, parameters[0])
    else:
        is_valid = origin is Any or isinstance(value, origin)
    # Say "finite float", because NaN and infinity are not allowed.
    return "" if is_valid else inspect.formatannotation(annotation).replace("float", "finite float")


@functools.cache
def _split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(annotation) or annotation, get_args(annotation)


def _describe_contract_violation(value: object, annotation: Any, name: str) -> str:
    """Check the value of an attribute, field or method named ``name`` against its type annotation and its entry in
    ``_REQUIREMENTS``. Returns "" if the value is valid, else a description of valid values.
    """
    valid_description = describe_type_violation(value, annotation)
    if valid_description or value is None or name not in _REQUIREMENTS:
        return valid_description
    description, is_met = _REQUIREMENTS[name]
    return "" if is_met(value) else description


def _have_type(values: Iterable[object], annotation: Any) -> bool:
    return annotation is Any or not any(describe_type_violation(each, annotation) for each in values)


def _is_subclass(origin: Any, kind: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


#: Returns the type annotations of the attributes of a contract, or of the fields of a dataclass, by name.
_get_attribute_annotations = functools.cache(get_type_hints)


@functools.cache
def _get_return_annotations(contract: type) -> Mapping[str, Any]:
    """Return the annotation of the return type of each public method of a contract, by method name."""
    methods = {name: getattr(contract, name) for name in vars(contract) if not name.startswith("_")}
    return {name: get_type_hints(method)["return"] for name, method in methods.items() if callable(method)}


def _resolve_type_variables(annotation: Any, plugin: object) -> Any:
    """Return an annotation in which the type variables of the contract are replaced by the actual types of a plugin."""
    type_variables = (annotation,) if isinstance(annotation, TypeVar) else getattr(annotation, "__parameters__", ())
    types = tuple(getattr(plugin, _ATTRIBUTE_BY_TYPE_VARIABLE[each.__name__], Any) for each in type_variables)
    return types[0] if isinstance(annotation, TypeVar) else annotation[types] if types else annotation


# -- the checks --------------------------------------------------------------------------------------------------------


class convert_plugin_errors(AbstractContextManager[object]):
    """A context manager that converts errors of a plugin, even SystemExit, into a PluginError with the name of the
    plugin.

    - ``label``: the name of the plugin in messages.
    - ``activity``: what the plugin does within the ``with`` block, such as the name of its method.
    - ``unconverted_errors``: errors that are not converted. Errors of mamf never are.
    - ``refusal_errors``: errors that become a UsageError, because the plugin rejects what the user asked for.

    This is a class because a generator-based context manager would take longer than most of the methods that it guards.
    """

    def __init__(
        self, label: str, activity: str, unconverted_errors: ErrorTypes = (), refusal_errors: ErrorTypes = ()
    ) -> None:
        self._label, self._activity, self._refusal_errors, self._unconverted_errors = (
            label,
            activity,
            refusal_errors,
            unconverted_errors,
        )

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if (
            error is None
            or not isinstance(error, get_catchable_plugin_errors())
            or isinstance(error, (MamfError, *self._unconverted_errors))
        ):
            return
        if isinstance(error, self._refusal_errors):
            raise UsageError(f"{self._label}: {get_first_message_line(error)}") from error
        raise PluginError(f"{self._label} is broken: {self._activity} raised {describe_error(error)}") from error


def enforce_contract(plugin: Plugin, contract: type, label: str) -> Plugin:
    """Check the attributes of a plugin, replace its methods by methods that check what they return, and return the
    plugin.

    ``label``: the name of the plugin in messages. Raises PluginError for an invalid attribute.
    """
    if _GUARD_FLAG_NAME in vars(plugin):
        return plugin
    for name in _get_attribute_annotations(contract):
        check_attribute(plugin, contract, name, label)
    for name in _get_return_annotations(contract).keys() - _UNCHECKED_METHODS:
        object.__setattr__(plugin, name, guard_method(plugin, contract, name, label))
    object.__setattr__(plugin, _GUARD_FLAG_NAME, True)
    return plugin


def check_attribute(plugin: object, contract: type, name: str, label: str) -> Any:
    """Return the value of the attribute ``name`` of a plugin. Raises PluginError if it is missing or violates the
    contract.
    """
    with convert_plugin_errors(label, name):
        value = getattr(plugin, name)
    _require_valid_value(value, _get_attribute_annotations(contract)[name], label, name, "is")
    return value


def guard_method(plugin: object, contract: type, name: str, label: str) -> Callable[..., Any]:
    """Return the method ``name`` of a plugin, wrapped so that it raises PluginError if it fails or returns an invalid
    value.
    """
    method, annotation = getattr(plugin, name), _resolve_type_variables(_get_return_annotations(contract)[name], plugin)
    errors = convert_plugin_errors(label, name, _ALLOWED_ERRORS.get(name, ()), _REFUSAL_ERRORS.get(name, ()))

    @functools.wraps(method)
    def guard(*arguments: Any, **keywords: Any) -> Any:
        with errors:
            value = method(*arguments, **keywords)
        if annotation is not NoneType:
            _require_valid_value(value, annotation, label, name, "returned")
        return value

    return guard


def _require_valid_value(value: object, annotation: Any, label: str, name: str, verb: str) -> None:
    """Raise PluginError if a value that a plugin gave violates the contract. If the value has a contract itself, also
    make its methods check what they return. ``verb``: "is" for an attribute, "returned" for a method.
    """
    if valid_description := _describe_contract_violation(value, annotation, name):
        actual = str(value) if value is None or isinstance(value, (bool, float)) else f"a {type(value).__name__}"
        raise PluginError(f"{label} is broken: {name} {verb} {actual}, not {valid_description}")
    for guarded_type in filter((annotation, *_split_annotation(annotation)[1]).__contains__, _GUARDED_TYPES):
        if isinstance(value, guarded_type):
            enforce_contract(value, guarded_type, f"{label}'s {name}")


class CheckedClock:
    """A replacement for the clock ``now`` of a backend that checks that the time is finite and never goes back."""

    def __init__(self, now: Callable[[], float], label: str) -> None:
        self._now, self._label, self._last_seconds = now, label, -math.inf
        self._errors = convert_plugin_errors(label, "now")

    def __call__(self) -> float:
        """Return the time of the host in seconds. Raises PluginError if it is not finite or is earlier than the last
        time.
        """
        with self._errors:
            now = self._now()
        if not self._last_seconds <= now < math.inf:
            expected = "a finite number" if not math.isfinite(now) else f"at least {self._last_seconds}, its last value"
            raise PluginError(f"{self._label} is broken: now returned {now}, not {expected}")
        self._last_seconds = now
        return now
