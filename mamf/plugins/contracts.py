"""What mamf asks of backends, kernels and operations, and what they may give; mamf.plugins.holding holds them to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields, replace
from numbers import Real
from typing import Any

from mamf.backend import Advice, DeviceInfo, OperandPool, Reading, Unavailable
from mamf.dtypes import DTYPES
from mamf.kernel import Kernel, Prepared
from mamf.operation import Operation
from mamf.plugins.holding import Check, Contract, Method
from mamf.regimes.traits import BurstTraits, SustainedTraits
from mamf.statistics import Repeatability

# What reading a record of the wrong kind raises: the fault of who wrote it.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# -- what values may be ------------------------------------------------------------------------------------------------


def anything(value: Any) -> None:
    """Whatever it returns is not looked at."""


def instance(kind: type, told: str) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, kind):
            raise ValueError(told)

    return check


def optional(check: Check) -> Check:
    def unless_none(value: Any) -> None:
        if value is not None:
            check(value)

    return unless_none


def list_of(check: Check, told: str, least: int = 0) -> Check:
    def check_all(values: Any) -> None:
        try:
            instance(Sequence, told)(values)
            for value in values:
                check(value)
        except ValueError:
            raise ValueError(told) from None
        if len(values) < least:
            raise ValueError(told)

    return check_all


def number(value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("a finite number")


def at_least_zero(value: Any) -> None:
    number(value)
    if value < 0:
        raise ValueError("a number of at least 0")


def above_zero(value: Any) -> None:
    number(value)
    if value <= 0:
        raise ValueError("a number above 0")


def filled(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")


def json_object(value: Any) -> None:
    try:
        instance(dict, "a mapping")(value)
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("a dictionary of what JSON holds") from None


def texts_by_name(value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for item in value.items() for part in item):
        raise ValueError("a mapping of texts to texts")


def plain_values(value: Any) -> None:
    instance(Mapping, "a mapping")(value)
    for name, each in value.items():
        if not isinstance(name, str) or not isinstance(each, (str, bool, int, float, type(None))):
            raise ValueError("a mapping of texts to texts and numbers")
        if isinstance(each, float):
            number(each)


def layers_by_preset(value: Any) -> None:
    instance(Mapping, "a mapping")(value)
    for name, layers in value.items():
        if not isinstance(name, str) or not isinstance(layers, Mapping):
            raise ValueError("a mapping of texts to shapes with their layers")
        texts_by_name({str(shape): layer for shape, layer in layers.items()})


def dtype(value: Any) -> None:
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"one of {', '.join(DTYPES)}")


def sensors(value: Any) -> None:
    if not isinstance(value, Unavailable) and not callable(getattr(value, "read", None)):
        raise ValueError("sensors with a method read, or Unavailable")


def reading(value: Any) -> None:
    instance(Reading, "a Reading")(value)
    for figure in (value.clock_hz, value.watts, value.joules, value.celsius):
        optional(number)(figure)
    list_of(text, "a Reading whose reasons are texts")(value.throttle_reasons)


def device_info(value: Any) -> None:
    instance(DeviceInfo, "a DeviceInfo")(value)
    json_object(asdict(value))
    for each in (value.backend, value.name, value.vendor):
        filled(each)
    for figure in (value.memory_bytes, value.cache_bytes, value.compute_units, value.max_clock_hz):
        optional(number)(figure)


def traits(kind: type, *above: str) -> Check:
    """Times and shares of at least 0, and ``above`` it where something is divided by them."""

    def check(value: Any) -> None:
        instance(kind, kind.__name__)(value)
        for name in (each.name for each in fields(value)):
            may_be: Check = above_zero if name in above else at_least_zero
            if name.endswith("repeatability"):
                may_be = optional(instance(Repeatability, "a Repeatability or None"))
            try:
                may_be(getattr(value, name))
            except ValueError as error:
                raise ValueError(f"one whose {name} is {error}") from None

    return check


text = instance(str, "a text")

# -- the contracts -----------------------------------------------------------------------------------------------------

_REASON = Method(optional(text))
_BYTES = Method(optional(at_least_zero))
_UNAVAILABLE = Method(optional(instance(Unavailable, "Unavailable or None")))
_FIGURE = Method(optional(above_zero))
_YES_OR_NO = Method(instance(bool, "True or False"))

POOL = Contract(methods={"release": Method(anything)})
SENSORS = Contract(methods={"read": Method(reading)})
BACKEND = Contract(
    attributes={
        "name": filled,
        "timer": filled,
        "info": device_info,
        "telemetry": sensors,
        "default_dtype": text,
        "burst_traits": traits(BurstTraits, "train_seconds"),
        "sustained_traits": traits(SustainedTraits, "swing_seconds"),
        "environment_variables": list_of(text, "a tuple of texts"),
    },
    methods={
        "seconds_between": Method(number),
        "timer_overhead": Method(optional(number)),
        "profiler_window": Method(instance(AbstractContextManager, "a context manager")),
        "profiler_range": Method(optional(instance(AbstractContextManager, "a context manager or None"))),
        "operand_pool": Method(instance(OperandPool, "an OperandPool"), part=POOL),
        "free_memory": _BYTES,
        "allocated_memory": _BYTES,
        "peak_memory": _BYTES,
        "peak_reserved_memory": _BYTES,
        "reset_peak_memory": Method(anything),
        "release_memory": Method(anything),
        "is_out_of_memory": _YES_OR_NO,
        "resolve_dtype": Method(dtype),
        "unsupported_dtype": _REASON,
        "without_compiler": _UNAVAILABLE,
        "bus_address": Method(optional(text)),
        "digest": Method(optional(text)),
        "without_counters": _UNAVAILABLE,
        "advice": Method(list_of(instance(Advice, ""), "a list of Advice")),
        "settings": Method(texts_by_name),
    },
    parts={"telemetry": SENSORS},
)
KERNEL = Contract(
    attributes={"name": filled, "operation": filled, "product_dtypes": list_of(text, "a tuple of texts")},
    methods={
        "unavailable": _UNAVAILABLE,
        "unsupported": _REASON,
        "unsupported_shape": _REASON,
        "variants": Method(list_of(instance(Kernel, ""), "a list of kernels")),
        "settings": Method(instance(AbstractContextManager, "a context manager")),
        "refuses": _YES_OR_NO,
        # What a library throws is a status of the shape.
        "prepare": Method(instance(Prepared, "Prepared"), passes=(Exception,)),
    },
)


def operation_contract(of: Operation[Any, Any]) -> Contract:
    """What is asked of an operation, whose shapes and problems are of its own types."""
    shape = Method(instance(of.shape_type, "a shape of its type"))
    problem = Method(instance(of.problem_type, "a problem of its type"))
    return Contract(
        attributes={
            "name": filled,
            "kernel_group": filled,
            "kernel_type": instance(type, "a class"),
            "shape_type": instance(type, "a class"),
            "problem_type": instance(type, "a class"),
        },
        methods={
            "default_shapes": Method(list_of(shape.check, "a list of at least one shape", least=1)),
            "presets": Method(layers_by_preset),
            "problem_for": replace(problem, refuses=(TypeError, ValueError)),
            "fastest_possible": _FIGURE,
            "peak": _FIGURE,
            "may_be_ceiling": _YES_OR_NO,
            "columns": Method(plain_values),
            "words": Method(list_of(text, "a list of texts")),
            "describe_problem": Method(list_of(text, "a list of texts")),
            "describe_shape": Method(text),
            "axis": Method(number, passes=(NotImplementedError,)),
            "parse_shape": replace(shape, refuses=(TypeError, ValueError)),
            "shape_record": Method(json_object),
            "problem_record": Method(json_object),
            "shape_from_record": replace(shape, passes=_MALFORMED),
            "problem_from_record": replace(problem, passes=_MALFORMED),
        },
    )
