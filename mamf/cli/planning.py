"""From options to a plan: the fields of an operation's problems, its shapes, and the plan."""

from __future__ import annotations

import argparse
import itertools
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mamf.backend import Backend
from mamf.cli import attention_plans
from mamf.cli.resuming import flag
from mamf.errors import UsageError
from mamf.kernel import AnyKernel
from mamf.limits import require_known, require_steps
from mamf.operation import Operation
from mamf.operations.attention.operation import Attention
from mamf.plans import KERNEL_REGIMES, SWEEP, Plan
from mamf.plugins.discovery import operation
from mamf.plugins.selection import find_operation
from mamf.regime_names import asked_regimes

AnyOperation = Operation[Any, Any]
_WORDS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def fields_of(of: AnyOperation) -> dict[str, Any]:
    """The fields of an operation's problem that can be set, with their types."""
    types = get_type_hints(of.problem_type)
    return {field.name: types[field.name] for field in fields(of.problem_type) if field.init}


def asked_for(of: AnyOperation, options: argparse.Namespace) -> dict[str, list[Any]]:
    """The values of fields, converted to their types. Raises UsageError for unknown fields and values."""
    known = fields_of(of)
    found: dict[str, list[Any]] = {"dtype": list(options.dtype)} if options.dtype else {}
    for text in set_fields(options):
        name, equals, values = text.partition("=")
        require_known((f"field of {of.name}", name, known))
        if not equals or name in found:
            raise UsageError(f"--set {text}: " + ("it is set twice" if equals else f"write {name}=VALUE"))
        found[name] = [_convert(f"{of.name}'s {name}", known[name], value) for value in values.split(",")]
    return found


def set_fields(options: argparse.Namespace) -> list[str]:
    """The fields from --set and --layout."""
    layouts = getattr(options, "layout", None)
    return [*(options.set or ()), *([f"layout={','.join(layouts)}"] if layouts else ())]


def _convert(what: str, kind: Any, text: str) -> Any:
    """A text as a value of the field's type: Literal, optional or plain."""
    if get_origin(kind) in (Union, types.UnionType):
        if text.lower() == "none" and type(None) in get_args(kind):
            return None
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Literal:
        by_text = {str(value): value for value in get_args(kind)}
        require_known((what, text, by_text))
        return by_text[text]
    if kind is bool:
        if text.lower() not in _WORDS:
            raise UsageError(f"{what} is yes or no, not {text!r}")
        return _WORDS[text.lower()]
    if kind not in (str, int, float):
        raise UsageError(f"{what} cannot be given as text")
    try:
        return kind(text)
    except ValueError:
        number = "a whole number" if kind is int else "a number"
        raise UsageError(f"{what} is {number}, not {text!r}") from None


def problems_from(of: AnyOperation, options: argparse.Namespace, backend: Backend) -> tuple[Any, ...]:
    """Every combination of the values."""
    asked = asked_for(of, options)
    require_steps(*map(len, asked.values()))
    combinations = (dict(zip(asked, values, strict=True)) for values in itertools.product(*asked.values()))
    return tuple(dict.fromkeys(of.problem_for(backend, each) for each in combinations))


def named_shapes(of: AnyOperation, options: argparse.Namespace) -> Mapping[Any, str]:
    """The shapes of the preset, with their names. Raises UsageError."""
    name = getattr(options, "preset", None)
    if name is None:
        return {}
    if options.shapes:
        raise UsageError("--preset names whole shapes: leave --shapes out")
    presets = of.presets()
    require_known((f"preset of {of.name}", name, presets))
    return presets[name]


def shapes_from(of: AnyOperation, options: argparse.Namespace) -> tuple[Any, ...]:
    """The shapes to measure; empty for the operation's default shapes. Raises UsageError for invalid shapes."""
    if named := named_shapes(of, options):
        return tuple(named)
    return tuple(dict.fromkeys(map(of.parse_shape, options.shapes or ())))


def plan_from(
    of: AnyOperation, options: argparse.Namespace, backend: Backend, kernels: Sequence[tuple[str, AnyKernel]]
) -> Plan:
    """``kernels``: with their names in the options."""
    return Plan(
        SWEEP,
        of.name,
        problems_from(of, options, backend),
        tuple(name for name, _ in kernels),
        shapes_from(of, options) or tuple(of.default_shapes(backend)),
        asked_regimes(options.regime, (of.default_regime,), KERNEL_REGIMES),
        options.precision or Plan.precision,
        options.time_limit,
        options.budget,
        not options.no_flush,
        layers=tuple(named_shapes(of, options).values()),
    )


_SIZES = ("preset", "seq_lens", "query_lens", "head_dims", "heads", "kv_heads", "batch", "causal", "window")


def operation_asked_for(options: argparse.Namespace, kernels: Sequence[str]) -> AnyOperation:
    """The named operation, else the operation of the kernel. Raises UsageError for sizes of another operation."""
    if options.direction:
        options.set = [*(options.set or ()), f"direction={','.join(options.direction)}"]
    sizes = [flag(name) for name in _SIZES if getattr(options, name) is not None]
    of = operation(options.operation) if options.operation else find_operation(kernels[0])
    if sizes and of.name != Attention.name:
        raise UsageError(
            f"{sizes[0]} belongs to attention: name a shape of {of.name}, such as --shape {of.shape_example}"
        )
    if sizes and options.shapes:
        raise UsageError(f"--shape names whole shapes: leave {sizes[0]} out")
    return of


def with_shapes_of_sizes(of: AnyOperation, options: argparse.Namespace, backend: Backend) -> None:
    """Replace sizes of attention with shapes."""
    if of.name == Attention.name and any(getattr(options, name) is not None for name in _SIZES):
        tokens = attention_plans.tokens_of(backend)
        options.shapes = [str(shape) for shape in attention_plans.shapes_from(options, tokens)]


def wanted_ceilings(plan: Plan) -> list[tuple[str, str]]:
    """The ceilings that rows of a plan are shares of, by dtype and regime."""
    dtypes = dict.fromkeys(problem.dtype for problem in plan.problems)
    return [(dtype, regime) for dtype in dtypes for regime in plan.regimes]
