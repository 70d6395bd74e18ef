"""Add the options of an operation to a command, and make a plan from their values.

This module knows no particular operation. The fields of an operation's shapes and problems declare the name, the help
and the allowed values of each option (``mamf.operation``).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from mamf.backend import Backend
from mamf.cli.parser import Parser, find_option_value, parse_nonempty_text
from mamf.cli.terminal import SHARED_OPTIONS, add_shared_options
from mamf.errors import UnknownNameError, UsageError, count_values, require_known_names, require_rows_within_limit
from mamf.operation import (
    Operation,
    Parameter,
    Preset,
    Request,
    get_parameters,
    make_operation_plan,
    parse_range,
)
from mamf.operations.matmul.operation import Matmul
from mamf.plans import Plan, choose_regimes
from mamf.plugins.discovery import find_operation_of_kernel, make_operation

AnyOperation = Operation[Any, Any]
#: The values of a bool field that each value of its option means, such as (False, True) for ``--causal both``.
_BOOLS_BY_SWITCH_VALUE: Mapping[str, tuple[bool, ...]] = {"yes": (True,), "no": (False,), "both": (False, True)}


# -- the operation -----------------------------------------------------------------------------------------------------


def make_requested_operation(command_words: Sequence[str] = ()) -> AnyOperation:
    """Make the operation that --operation names in the unparsed words, or matmul without it. Raises
    UnknownNameError.
    """
    if name := find_option_value("--operation", command_words):
        return make_operation(name)
    return Matmul()


def find_launched_operation(command_words: Sequence[str]) -> AnyOperation | None:
    """Find the operation of --operation, or else of the first unparsed word that names a kernel. Return None if the
    words ask only for help.

    Raises UnknownNameError if no word names a kernel.
    """
    if find_option_value("--operation", command_words):
        return make_requested_operation(command_words)
    if {"-h", "--help", "--help-all"}.intersection(command_words[1:2]):
        return None

    # Try words that follow an option last, because such a word is usually the value of the option.
    kernels = [
        word
        for before, word in itertools.pairwise(command_words)
        if not (before.startswith("-") or word.startswith("-"))
    ]
    for word in (*kernels, *(word for word in command_words[1:] if ":" not in word)):
        with suppress(UnknownNameError):
            return find_operation_of_kernel(word)
    return find_operation_of_kernel(kernels[0]) if kernels else None


# -- options -----------------------------------------------------------------------------------------------------------


def add_operation_options(
    parser: argparse.ArgumentParser,
    operation: AnyOperation,
    has_shape_options: bool = True,
    takes_several_values: bool = True,
    defaults: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> None:
    """Add the options of an operation: its sizes, whole shapes and presets, then the fields of its problem.

    ``has_shape_options``: whether to add the options for sizes and shapes. ``takes_several_values``: whether a field of
    the problem takes several values. ``defaults``: default values that replace those of the operation, by parameter.
    """
    parser.set_defaults(usual=defaults)
    # Let a command's own option replace a parameter's option of the same name. --set can still set the parameter.
    parser.conflict_handler = "resolve"
    if has_shape_options:
        group = parser.add_argument_group(
            f"shapes of {operation.name}", "If options have several values, mamf measures every combination."
        )
        for size in get_parameters(operation.shape_type).values():
            _add_parameter_option(group, size, "size", True, defaults.get(size.name))
        add_shared_options(group, "--shapes", help=f"shapes with all their sizes, such as {operation.shape_example}")
        if presets := operation.list_presets():
            help = f"{operation.preset_parameter.help}; names: {', '.join(presets)}"
            group.add_argument(operation.preset_parameter.option, dest="preset", metavar="NAME", help=help)
        for further in operation.preset_parameters:
            _add_parameter_option(group, further, "field")
        for action in group._group_actions:
            action.is_parameter = True  # type: ignore[attr-defined]
    group = parser.add_argument_group(f"problem of {operation.name}")
    for each in get_parameters(operation.problem_type).values():
        if each.name == "dtype":
            usual = SHARED_OPTIONS["--dtype"].default_text if each.default == "bfloat16" else each.default
            add_shared_options(group, "--dtype", default_text=usual, nargs="+" if takes_several_values else None)
        elif each.is_readable:
            _add_parameter_option(group, each, "field", takes_several_values, defaults.get(each.name))
    if takes_several_values:
        add_shared_options(group, "--set")


def _add_parameter_option(
    group: argparse._ArgumentGroup,
    parameter: Parameter,
    dest_prefix: str,
    takes_several_values: bool = False,
    default: Sequence[Any] | None = None,
) -> None:
    """Add the option of one parameter of an operation. ``dest_prefix``: ``size`` or ``field``, with which the option's
    dest begins.
    """
    option, dest = parameter.option, f"{dest_prefix}_{parameter.name}"
    usual = " ".join(map(str, default)) if default else parameter.default
    help = parameter.help or parameter.name.replace("_", " ")
    keywords: dict[str, Any] = {"dest": dest, "default": default}
    keywords["help"] = (f"{help} (default: {usual})" if usual else help).replace("%", "%%")
    # Do not group rare options: argparse cannot print the usage of a mutually exclusive group whose options are hidden.
    is_either = (parameter.value_type is bool or parameter.has_range) and not parameter.is_rare
    where = group.add_mutually_exclusive_group() if is_either else group
    if parameter.value_type is bool:
        no = where.add_argument(
            f"--no-{option[2:]}", dest=dest, action="store_const", const="no", help=f"same as {option} no"
        )
        keywords |= {
            "choices": [*_BOOLS_BY_SWITCH_VALUE] if takes_several_values else ["yes", "no"],
            "nargs": "?",
            "const": "yes",
        }
        added = [where.add_argument(option, **keywords), no]
    else:
        metavar = parameter.metavar or (None if parameter.choices else option[2:].upper())
        keywords |= {
            "metavar": metavar,
            "choices": list(parameter.choices) or None,
            "nargs": "+" if takes_several_values else None,
        }
        added = [where.add_argument(option, type=lambda text: parameter.convert(parse_nonempty_text(text)), **keywords)]
    if parameter.has_range:
        # Read a bound as a plain number, because START may be 0, which no size is.
        convert_bound = replace(parameter, parse_text=None).convert
        bounds: dict[str, Any] = {"type": convert_bound, "nargs": 3, "metavar": ("START", "STOP", "STEP")}
        text = f"sizes of {parameter.name.upper()} from START (STEP if START is 0) up to, but not including, STOP"
        added.append(where.add_argument(f"{option}-range", dest=f"{dest}_range", help=text, **bounds))
    for action in added:
        vars(action).update(is_rare=parameter.is_rare, is_parameter=True)


def add_launch_options(parser: Parser, shapes: str) -> None:
    """Add the options of a command that launches kernels of any operation.

    ``shapes``: the option for whole shapes that help shows, --shape or --shapes. The command accepts both.
    """
    note = "'mamf COMMAND KERNEL --help' lists the options of the kernel's operation."
    if of := find_launched_operation(parser.command_words):
        add_operation_options(parser, of)
    group = parser.add_argument_group("what", None if of else note)
    add_shared_options(group, "--operation", default_text="the operation of the kernel")
    add_shared_options(group, shapes, dest="shapes", nargs="+")
    other = {"--shape": "--shapes", "--shapes": "--shape"}[shapes]
    group.add_argument(other, dest="shapes", nargs="+", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


# -- values of the options ---------------------------------------------------------------------------------------------


def make_request(operation: AnyOperation, options: argparse.Namespace) -> Request:
    """Make the request that the options describe: shapes, sizes and fields of the operation, before a device is opened.
    Raises UsageError for options that contradict each other.
    """
    sizes = dict(_yield_set_parameters(options, get_parameters(operation.shape_type).values(), "size"))
    shapes = tuple(dict.fromkeys(map(operation.parse_shape, getattr(options, "shapes", None) or ())))
    preset = _make_preset(operation, options, sizes)
    for parameter in get_parameters(operation.shape_type).values():
        if parameter.name in sizes and parameter.name not in preset.adjustable_sizes and (shapes or preset.shapes):
            named = "--shapes" if shapes else f"{operation.preset_parameter.option} {options.preset}"
            raise UsageError(
                f"{named} cannot be combined with {parameter.option}, because {named.split()[0]} gives whole shapes"
            )
    if shapes and preset.shapes:
        raise UsageError(f"{operation.preset_parameter.option} cannot be combined with --shapes: use one of them")
    require_rows_within_limit(*map(count_values, sizes.values()))
    dtypes = [options.dtype] if isinstance(options.dtype, str) else options.dtype
    fields = {
        **({"dtype": dtypes} if dtypes else {}),
        **dict(_yield_set_parameters(options, get_parameters(operation.problem_type).values(), "field")),
    }
    texts = getattr(options, "set", None) or ()
    for name in {text.partition("=")[0] for text in texts} & fields.keys():
        if getattr(options, f"field_{name}", None) == getattr(options, "usual", {}).get(name):
            del fields[name]  # drop the command's default, because --set replaces it
    return Request(operation, shapes, sizes, parse_field_texts(operation, texts, fields), preset)


def _yield_set_parameters(
    options: argparse.Namespace, parameters: Iterable[Parameter], dest_prefix: str
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the name and the values of each parameter that the options set. Raises UsageError for an empty range.

    ``dest_prefix``: ``size`` or ``field``, with which the dest of the parameters' options begins.
    """
    for parameter in parameters:
        dest = f"{dest_prefix}_{parameter.name}"
        bounds = getattr(options, f"{dest}_range", None)
        values = parse_range(*bounds) if bounds else getattr(options, dest, None)
        if parameter.value_type is bool and isinstance(values, str):
            values = _BOOLS_BY_SWITCH_VALUE[values]
        if values is not None:
            yield parameter.name, values if isinstance(values, (list, tuple, range)) else (values,)


def parse_field_texts(
    operation: AnyOperation,
    field_texts: Iterable[str],
    given_values: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> dict[str, Sequence[Any]]:
    """Parse texts such as ``direction=fwd,bwd``, and return their values together with ``given_values``, by field.
    Raises UsageError for an unknown field, a wrong value or a field that is set twice.
    """
    known, found = get_parameters(operation.problem_type), dict(given_values)
    for text in field_texts:
        name, equals, values = text.partition("=")
        require_known_names((f"field of {operation.name}", name, known))
        if not equals or name in found:
            raise UsageError(f"--set {text}: " + (f"{name} is set twice" if equals else f"write {name}=VALUE"))
        try:
            found[name] = [known[name].parse(value) for value in values.split(",")]
        except UsageError as error:
            raise UsageError(f"field {name} of {operation.name}: {error}") from None
    return found


def _make_preset(
    operation: AnyOperation, options: argparse.Namespace, sizes: Mapping[str, Sequence[Any]]
) -> Preset[Any]:
    name, further = (
        getattr(options, "preset", None),
        dict(_yield_set_parameters(options, operation.preset_parameters, "field")),
    )
    if name is None:
        for parameter in operation.preset_parameters:
            if parameter.name in further:
                raise UsageError(f"{parameter.option} needs {operation.preset_parameter.option}")
        return Preset()
    return operation.build_preset(name, {**sizes, **further})


def make_plan(
    request: Request,
    options: argparse.Namespace,
    backend: Backend,
    kernel_names: Sequence[str],
    sweep_options: Any = None,
) -> Plan:
    """Make the plan of a request. An option whose dest is the name of a field of Plan sets that field.

    ``kernel_names``: the names of the kernels as the options give them. ``sweep_options``: SweepOptions, or None.
    """
    labels = request.make_labeled_shapes(backend)
    named = {
        each.name: value
        for each in fields(Plan)
        if each.name not in ("operation", "shapes") and (value := getattr(options, each.name, None)) is not None
    }
    return make_operation_plan(
        request.operation,
        kernel_names,
        request.make_problems(backend),
        labels,
        choose_regimes(options.regime, (request.operation.default_regime,), request.operation.regimes),
        budget_seconds=options.budget,
        layers=tuple(labels.values()) if any(labels.values()) else (),
        options=sweep_options,
        **named,
    )
