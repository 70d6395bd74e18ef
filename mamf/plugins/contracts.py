"""Check what plugins (third-party backends, kernels and operations) return. If a plugin violates its contract, the
error names the plugin.

A contract is an abstract class: Backend, Kernel or Operation. Its type annotations define the types of attributes and
return values; ``_REQUIREMENTS`` adds conditions that types cannot express.

mamf does not check the methods in ``_UNCHECKED_METHODS``. Some of them run while a launch is timed, so a check would
distort the time. If one of the others, such as ``take_buffer``, fails, the status of the measurement shows the error.
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

from mamf.backend import DeviceInfo, OperandPool, SensorReading, Telemetry
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

PluginT = TypeVar("PluginT")
ErrorTypes = tuple[type[BaseException], ...]
#: A condition for a value: a description of valid values, and a function that returns whether a value is valid.
Requirement = tuple[str, Callable[[Any], object]]

# Name of the attribute that mamf sets on a plugin after it has wrapped the plugin's methods with checks.
_CHECKED_FLAG_NAME = "_is_guarded_by_mamf"
# Names of methods whose return values are not checked, for the reasons in the docstring of this file.
_UNCHECKED_METHODS = (
    "record_mark",
    "record_idle_mark",
    "wait_for_mark",
    "is_mark_reached",
    "submit",
    "synchronize",
    "flush_cache",
    "sleep",
    "now",
    "take_buffer",
)
# Types of errors that a plugin may raise without violating its contract, by method. An error of ``prepare`` is recorded
# as the status of the measurement. An error of ``find_axis_position`` means that there is no axis. An error of
# ``read_shape_record`` or ``read_problem_record`` means that the record in the log is malformed.
_MALFORMED_RECORD_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_ALLOWED_ERRORS: Mapping[str, ErrorTypes] = {
    "prepare": (BaseException,),
    "find_axis_position": (NotImplementedError,),
    "read_shape_record": _MALFORMED_RECORD_ERRORS,
    "read_problem_record": _MALFORMED_RECORD_ERRORS,
}
# Types of errors that a method raises if the user's input is invalid, by method. mamf turns them into a UsageError.
_USER_ERRORS_BY_METHOD: Mapping[str, ErrorTypes] = dict.fromkeys(
    ("make_problem", "parse_shape"), (TypeError, ValueError)
)
# If a plugin returns an object of one of these dataclasses, mamf also checks the object's fields.
_CHECKED_DATACLASSES = (DeviceInfo, SensorReading, BurstTraits, SustainedTraits)
# If a plugin returns an object of one of these abstract classes, mamf also checks what the object's methods return.
_TYPES_WITH_CONTRACT = (OperandPool, Telemetry)
# Contracts use type variables for the types of problems and shapes. This maps each type variable to the attribute of an
# operation or kernel that contains the actual type.
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


# Conditions that a value must meet in addition to having the right type, by the name of the attribute, field or method.
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
        lambda values: _all_have_type(values.values(), str | bool | int | float | None),
    ),
    **_make_requirements(
        "make_shape_record make_problem_record", "a dictionary that can be written as JSON", _is_json_value
    ),
}


# Types whose values contain no other values, so a check only has to compare the type of the value.
_SCALAR_TYPES = (str, int, bool)


def describe_type_violation(value: object, annotation: Any) -> str:
    """Return "" if a value has the annotated type, else the text of the annotation for an error message."""
    if type(value) is annotation and annotation in _SCALAR_TYPES:  # Most values need only this fast check.
        return ""
    origin, type_arguments = _split_annotation(annotation)
    if origin is ClassVar:
        return describe_type_violation(value, type_arguments[0])
    if origin in (Union, UnionType):
        is_valid = any(not describe_type_violation(value, each) for each in type_arguments)
    elif origin in (int, float):
        is_valid = isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
        is_valid = is_valid and math.isfinite(value)  # type: ignore[arg-type]
    elif origin in _CHECKED_DATACLASSES and isinstance(value, origin):
        fields = _get_attribute_annotations(origin).items()
        violations = ((name, _describe_contract_violation(getattr(value, name), each, name)) for name, each in fields)
        return next((f"one whose {name} is {valid_values}" for name, valid_values in violations if valid_values), "")
    elif _is_subclass(origin, Mapping):
        is_valid = isinstance(value, Mapping) and _all_have_type(value.keys(), type_arguments[0])
        is_valid = is_valid and _all_have_type(value.values(), type_arguments[1])  # type: ignore[attr-defined]
    elif origin is tuple and Ellipsis not in type_arguments:  # The tuple has a fixed length, as in tuple[int, str].
        is_valid = isinstance(value, tuple) and len(value) == len(type_arguments)
        is_valid = is_valid and not any(
            describe_type_violation(*each)
            for each in zip(value, type_arguments, strict=True)  # type: ignore[call-overload]
        )
    elif _is_subclass(origin, Sequence) and origin is not str:
        is_valid = isinstance(value, Sequence) and _all_have_type(value, type_arguments[0])
    else:
        is_valid = origin is Any or isinstance(value, origin)
    # Write "finite float" instead of "float", because NaN and infinity are not allowed.
    return "" if is_valid else inspect.formatannotation(annotation).replace("float", "finite float")


@functools.cache
def _split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(annotation) or annotation, get_args(annotation)


def _describe_contract_violation(value: object, annotation: Any, name: str) -> str:
    """Return a description of valid values, or an empty text if ``value`` is valid.

    A value is valid if it has the right type and meets its requirement. ``annotation``: the type that the contract
    demands. ``name``: the attribute, field or method from which the value comes.
    """
    valid_description = describe_type_violation(value, annotation)
    if valid_description or value is None or name not in _REQUIREMENTS:
        return valid_description
    description, is_met = _REQUIREMENTS[name]
    return "" if is_met(value) else description


def _all_have_type(values: Iterable[object], annotation: Any) -> bool:
    return annotation is Any or not any(describe_type_violation(each, annotation) for each in values)


def _is_subclass(origin: Any, base: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, base)


#: Return the type annotations of the attributes of a contract, or of the fields of a dataclass, by name.
_get_attribute_annotations = functools.cache(get_type_hints)


@functools.cache
def _get_return_annotations(contract: type) -> Mapping[str, Any]:
    """Return the annotation of the return type of each public method of a contract, by method name."""
    methods = {name: getattr(contract, name) for name in vars(contract) if not name.startswith("_")}
    return {name: get_type_hints(method)["return"] for name, method in methods.items() if callable(method)}


def _resolve_type_variables(annotation: Any, plugin: object) -> Any:
    """Replace type variables in an annotation, such as ShapeT, by the types that the plugin uses."""
    type_variables = (annotation,) if isinstance(annotation, TypeVar) else getattr(annotation, "__parameters__", ())
    types = tuple(getattr(plugin, _ATTRIBUTE_BY_TYPE_VARIABLE[each.__name__], Any) for each in type_variables)
    return types[0] if isinstance(annotation, TypeVar) else annotation[types] if types else annotation


# -- the checks --------------------------------------------------------------------------------------------------------


class convert_plugin_errors(AbstractContextManager[object]):
    """A context manager that converts errors of a plugin, even SystemExit, into a PluginError that names the plugin.

    - ``label``: the name of the plugin in messages.
    - ``activity``: what happens in the ``with`` block, such as the name of the method that is called, for messages.
    - ``unconverted_errors``: types of errors that are not converted, in addition to mamf's own errors.
    - ``user_mistake_errors``: types of errors that are converted into a UsageError, because they mean that the user's
      input is invalid.

    This is a class, because a @contextmanager function would take longer than most of the plugin methods that mamf
    calls within the context.
    """

    def __init__(
        self, label: str, activity: str, unconverted_errors: ErrorTypes = (), user_mistake_errors: ErrorTypes = ()
    ) -> None:
        self._label, self._activity, self._user_mistake_errors, self._unconverted_errors = (
            label,
            activity,
            user_mistake_errors,
            unconverted_errors,
        )

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if (
            error is None
            or not isinstance(error, get_catchable_plugin_errors())
            or isinstance(error, (MamfError, *self._unconverted_errors))
        ):
            return
        if isinstance(error, self._user_mistake_errors):
            raise UsageError(f"{self._label}: {get_first_message_line(error)}") from error
        raise PluginError(f"{self._label} is broken: {self._activity} raised {describe_error(error)}") from error


def enforce_contract(plugin: PluginT, contract: type, label: str) -> PluginT:
    """Check the attributes of a plugin, wrap its methods so that their return values are checked, and return the
    plugin.

    ``label``: the name of the plugin in messages. Raises PluginError for an invalid attribute.
    """
    if _CHECKED_FLAG_NAME in vars(plugin):
        return plugin
    for name in _get_attribute_annotations(contract):
        check_attribute(plugin, contract, name, label)
    for name in _get_return_annotations(contract).keys() - _UNCHECKED_METHODS:
        object.__setattr__(plugin, name, wrap_method_with_checks(plugin, contract, name, label))
    object.__setattr__(plugin, _CHECKED_FLAG_NAME, True)
    return plugin


def check_attribute(plugin: object, contract: type, name: str, label: str) -> Any:
    """Return the value of the attribute ``name`` of a plugin. Raises PluginError if it is missing or violates the
    contract.
    """
    with convert_plugin_errors(label, name):
        value = getattr(plugin, name)
    _require_valid_value(value, _get_attribute_annotations(contract)[name], label, name, "is")
    return value


def wrap_method_with_checks(plugin: object, contract: type, name: str, label: str) -> Callable[..., Any]:
    """Return the method ``name`` of a plugin, wrapped so that it raises PluginError if it fails or returns an invalid
    value.
    """
    method, annotation = getattr(plugin, name), _resolve_type_variables(_get_return_annotations(contract)[name], plugin)
    errors = convert_plugin_errors(label, name, _ALLOWED_ERRORS.get(name, ()), _USER_ERRORS_BY_METHOD.get(name, ()))

    @functools.wraps(method)
    def call_and_check_result(*arguments: Any, **keywords: Any) -> Any:
        with errors:
            value = method(*arguments, **keywords)
        if annotation is not NoneType:
            _require_valid_value(value, annotation, label, name, "returned")
        return value

    return call_and_check_result


def _require_valid_value(value: object, annotation: Any, label: str, name: str, verb: str) -> None:
    """Raise PluginError if a value from a plugin violates the contract. If the value is an operand pool or a telemetry
    object, which have contracts too, also wrap its methods with checks.

    ``verb``: "is" for an attribute, "returned" for a method.
    """
    if valid_description := _describe_contract_violation(value, annotation, name):
        actual = str(value) if value is None or isinstance(value, (bool, float)) else f"a {type(value).__name__}"
        raise PluginError(f"{label} is broken: {name} {verb} {actual}, not {valid_description}")
    for contract_type in filter((annotation, *_split_annotation(annotation)[1]).__contains__, _TYPES_WITH_CONTRACT):
        if isinstance(value, contract_type):
            enforce_contract(value, contract_type, f"{label}'s {name}")


class CheckedClock:
    """Wraps the method ``now`` of a backend to check that the time is finite and never decreases."""

    def __init__(self, now: Callable[[], float], label: str) -> None:
        self._now, self._label, self._last_seconds = now, label, -math.inf
        self._errors = convert_plugin_errors(label, "now")

    def __call__(self) -> float:
        """Return the host's time in seconds. Raises PluginError if the time is not finite, or earlier than before."""
        with self._errors:
            now = self._now()
        if not self._last_seconds <= now < math.inf:
            expected = "a finite number" if not math.isfinite(now) else f"at least {self._last_seconds}, its last value"
            raise PluginError(f"{self._label} is broken: now returned {now}, not {expected}")
        self._last_seconds = now
        return now
