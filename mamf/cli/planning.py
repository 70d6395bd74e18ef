"""Add the options of an operation to a command, and make a plan from their values.

This module works for every operation. The fields of an operation's shapes and problems declare the name, the help and
the allowed values of each option (``mamf.operation``).
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
from mamf.cli.parser import CommandParser, find_option_value, parse_nonempty_text
from mamf.cli.terminal import SHARED_OPTIONS, add_shared_options
from mamf.errors import (
    MamfError,
    UnknownNameError,
    UsageError,
    count_values,
    require_known_names,
    require_rows_within_limit,
)
from mamf.operation import (
    MeasurementRequest,
    Operation,
    Parameter,
    Preset,
    get_parameters,
    make_operation_plan,
    parse_range,
)
from mamf.operations.matmul.operation import MatmulOperation
from mamf.plans import Plan, choose_regimes
from mamf.plugins.discovery import find_operation_of_kernel, make_operation

AnyOperation = Operation[Any, Any]
#: The bools that each value of a yes-or-no option stands for. For example, ``--causal both`` measures False and True.
_BOOLS_BY_SWITCH_VALUE: Mapping[str, tuple[bool, ...]] = {"yes": (True,), "no": (False,), "both": (False, True)}


# -- the operation -----------------------------------------------------------------------------------------------------


def make_requested_operation(command_words: Sequence[str] = ()) -> AnyOperation:
    """Make the operation that the option --operation in ``command_words`` names, or matmul without this option. Raises
    UnknownNameError if no operation has the name.
    """
    if name := find_option_value("--operation", command_words):
        return make_operation(name)
    return MatmulOperation()


def find_logged_operation(command_words: Sequence[str]) -> AnyOperation | None:
    """Find the operation of the log that the option --resume or --requeue in ``command_words`` names. Return None
    without these options, or if mamf cannot read the log or does not know its operation: the command then says so.
    """
    if path := find_option_value("--resume", command_words) or find_option_value("--requeue", command_words):
        from mamf.logs.run_log import read_run_log

        with suppress(MamfError):
            return make_operation(read_run_log(path).plan.operation)
    return None


def find_operation_to_launch(command_words: Sequence[str]) -> AnyOperation | None:
    """Find the operation to launch in ``command_words``: the operation that the option --operation names or, without
    this option, the operation of the first word that names a kernel or, without such a word, of the log to resume.

    Return None if the words only ask for help, or name neither. Raises UnknownNameError for the name of a kernel that
    does not exist.
    """
    if find_option_value("--operation", command_words):
        return make_requested_operation(command_words)
    if {"-h", "--help", "--help-all"}.intersection(command_words[1:2]):
        return None

    # Any word can be the name of a kernel. First try the words that do not follow an option, because a word that
    # follows an option is usually its value.
    possible_kernels = [
        word
        for previous_word, word in itertools.pairwise(command_words)
        if not (previous_word.startswith("-") or word.startswith("-"))
    ]
    for word in (*possible_kernels, *(word for word in command_words[1:] if ":" not in word)):
        with suppress(UnknownNameError):
            return find_operation_of_kernel(word)
    return find_operation_of_kernel(possible_kernels[0]) if possible_kernels else find_logged_operation(command_words)


# -- options -----------------------------------------------------------------------------------------------------------


def add_operation_options(
    parser: argparse.ArgumentParser,
    operation: AnyOperation,
    has_shape_options: bool = True,
    takes_several_values: bool = True,
    defaults: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    other_presets: Iterable[str] = (),
) -> None:
    """Add the options of an operation: its sizes, whole shapes and presets, then the fields of its problem.

    ``has_shape_options``: whether to add the options for sizes and shapes. ``takes_several_values``: whether a field of
    the problem takes several values. ``defaults``: default values that replace those of the operation, by parameter.
    ``other_presets``: presets of another operation that the command accepts too.
    """
    parser.set_defaults(usual_defaults=defaults)
    # Let a command's own option replace a parameter's option of the same name. --set can still set the parameter.
    parser.conflict_handler = "resolve"
    if has_shape_options:
        group = parser.add_argument_group(
            f"shapes of {operation.name}", "If options have several values, mamf measures every combination."
        )
        for size in get_parameters(operation.shape_type).values():
            _add_parameter_option(group, size, "size", True, defaults.get(size.name))
        add_shared_options(group, "--shapes", help=f"shapes to measure, such as {operation.shape_example}")
        if presets := operation.list_presets():
            help = f"{operation.preset_parameter.help}; names: {', '.join([*presets, *other_presets])}"
            group.add_argument(
                operation.preset_parameter.option_name, dest="preset", metavar="NAME", help=help
            ).completer = lambda **_: [*presets, *other_presets]  # type: ignore[attr-defined]
        for preset_parameter in operation.preset_parameters:
            _add_parameter_option(group, preset_parameter, "field")
        for action in group._group_actions:
            action.is_parameter = True  # type: ignore[attr-defined]
    group = parser.add_argument_group(f"problem of {operation.name}")
    for parameter in get_parameters(operation.problem_type).values():
        if parameter.name == "dtype":
            text = SHARED_OPTIONS["--dtype"].default_text if parameter.default == "bfloat16" else parameter.default
            add_shared_options(
                group,
                "--dtype",
                default_text=text,
                nargs="+" if takes_several_values else None,
                **({"help": f"{parameter.help} (default: {parameter.default})"} if parameter.help else {}),
            )
        elif parameter.accepts_text:
            _add_parameter_option(group, parameter, "field", takes_several_values, defaults.get(parameter.name))
    if takes_several_values:
        add_shared_options(group, "--set")


def _add_parameter_option(
    group: argparse._ArgumentGroup,
    parameter: Parameter,
    dest_prefix: str,
    takes_several_values: bool = False,
    default: Sequence[Any] | None = None,
) -> None:
    """Add the option of one parameter of an operation. ``dest_prefix``: ``size`` or ``field``, the prefix of the name
    (``dest``) under which argparse stores the value of the option.
    """
    option, dest = parameter.option_name, f"{dest_prefix}_{parameter.name}"
    default_text = " ".join(map(str, default)) if default else parameter.default
    help = parameter.help or parameter.name.replace("_", " ")
    keywords: dict[str, Any] = {"dest": dest, "default": default}
    keywords["help"] = (f"{help} (default: {default_text})" if default_text else help).replace("%", "%%")
    # Do not group rare options: argparse cannot print the usage of a mutually exclusive group whose options are hidden.
    is_exclusive = (parameter.value_type is bool or parameter.has_range) and not parameter.is_rare
    target_group = group.add_mutually_exclusive_group() if is_exclusive else group
    if parameter.value_type is bool:
        no_action = target_group.add_argument(
            f"--no-{option[2:]}", dest=dest, action="store_const", const="no", help=f"same as {option} no"
        )
        keywords |= {
            "choices": [*_BOOLS_BY_SWITCH_VALUE] if takes_several_values else ["yes", "no"],
            "nargs": "?",
            "const": "yes",
        }
        actions = [target_group.add_argument(option, **keywords), no_action]
    else:
        metavar = parameter.metavar or ("N" if parameter.value_type is int and len(parameter.name) > 1 else None)
        keywords |= {
            "type": lambda text: parameter.parse_unchecked(parse_nonempty_text(text)),
            "metavar": metavar or (None if parameter.choices else option[2:].upper()),
            "choices": list(parameter.choices) or None,
            "nargs": "+" if takes_several_values else None,
        }
        actions = [target_group.add_argument(option, **keywords)]
    if parameter.has_range:
        # Read a bound as a plain number, because START may be 0, which is not a valid size.
        convert_bound = replace(parameter, parse_text=None).parse_unchecked
        range_keywords: dict[str, Any] = {"type": convert_bound, "nargs": 3, "metavar": ("START", "STOP", "STEP")}
        range_help = (
            f"sizes of {parameter.name.upper()} from START up to, but not including, STOP, in steps of "
            "STEP; if START is 0, the first size is STEP"
        )
        actions.append(
            target_group.add_argument(f"{option}-range", dest=f"{dest}_range", help=range_help, **range_keywords)
        )
    for action in actions:
        vars(action).update(is_rare=parameter.is_rare, is_parameter=True)


def add_launch_options(parser: CommandParser, shapes_option: str) -> None:
    """Add the options of a command that launches kernels of any operation.

    ``shapes_option``: --shape or --shapes. The command accepts both options for whole shapes, but its help shows only
    this one.
    """
    note = f"'{parser.prog} KERNEL --help' lists the options of the kernel's operation."
    if operation := find_operation_to_launch(parser.command_words):
        add_operation_options(parser, operation)
    parser.set_defaults(requested_operation=operation)
    group = parser.add_argument_group("what to launch", None if operation else note)
    add_shared_options(group, "--operation", default_text="the operation of the kernel")
    add_shared_options(group, shapes_option, dest="shapes", nargs="+")
    synonym = {"--shape": "--shapes", "--shapes": "--shape"}[shapes_option]
    group.add_argument(synonym, dest="shapes", nargs="+", help=argparse.SUPPRESS)


# -- values of the options ---------------------------------------------------------------------------------------------


def make_measurement_request(operation: AnyOperation, options: argparse.Namespace) -> MeasurementRequest:
    """Make the request that the options describe: the shapes, sizes and fields of the operation that the user gives.

    This opens no device. Raises UsageError for options that contradict each other.
    """
    sizes = dict(_yield_given_parameters(options, get_parameters(operation.shape_type).values(), "size"))
    shapes = tuple(dict.fromkeys(map(operation.parse_shape, getattr(options, "shapes", None) or ())))
    preset = _make_preset(operation, options, sizes)
    for parameter in get_parameters(operation.shape_type).values():
        if parameter.name in sizes and parameter.name not in preset.adjustable_sizes and (shapes or preset.shapes):
            given_shapes = "--shapes" if shapes else f"{operation.preset_parameter.option_name} {options.preset}"
            raise UsageError(
                f"{given_shapes} cannot be combined with {parameter.option_name}, because {given_shapes.split()[0]} "
                "gives whole shapes: leave one of them out"
            )
    if shapes and preset.shapes:
        raise UsageError(f"{operation.preset_parameter.option_name} cannot be combined with --shapes: use one of them")
    require_rows_within_limit(*map(count_values, sizes.values()))
    dtypes = [options.dtype] if isinstance(options.dtype, str) else options.dtype
    fields = {
        **({"dtype": dtypes} if dtypes else {}),
        **dict(_yield_given_parameters(options, get_parameters(operation.problem_type).values(), "field")),
    }
    field_texts = getattr(options, "set", None) or ()
    for name in {text.partition("=")[0] for text in field_texts} & fields.keys():
        if getattr(options, f"field_{name}", None) == getattr(options, "usual_defaults", {}).get(name):
            del fields[name]  # drop the command's default, because --set replaces it
    return MeasurementRequest(operation, shapes, sizes, parse_field_texts(operation, field_texts, fields), preset)


def _yield_given_parameters(
    options: argparse.Namespace, parameters: Iterable[Parameter], dest_prefix: str
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the name and the values of each parameter that the options set. Raises UsageError for an empty range.

    ``dest_prefix``: ``size`` or ``field``, the prefix of the name (``dest``) under which argparse stores the value of
    each parameter.
    """
    for parameter in parameters:
        dest = f"{dest_prefix}_{parameter.name}"
        bounds = getattr(options, f"{dest}_range", None)
        try:
            values = parse_range(*bounds) if bounds else getattr(options, dest, None)
        except UsageError as error:
            raise UsageError(f"{parameter.option_name}-range: {error}") from None
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
    parameters_by_name, values_by_field = get_parameters(operation.problem_type), dict(given_values)
    for text in field_texts:
        name, equals, values = text.partition("=")
        require_known_names((f"field of {operation.name}", name, parameters_by_name))
        if not equals or name in values_by_field:
            raise UsageError(
                f"--set {text}: "
                + (
                    f"{name} is set twice; leave one value out"
                    if equals
                    else f"{name} has no value; write {name}=VALUE"
                )
            )
        try:
            values_by_field[name] = [parameters_by_name[name].parse(value) for value in values.split(",")]
        except UsageError as error:
            raise UsageError(f"cannot set field {name} of {operation.name}: {error}") from None
    return values_by_field


def _make_preset(
    operation: AnyOperation, options: argparse.Namespace, sizes: Mapping[str, Sequence[Any]]
) -> Preset[Any]:
    name, preset_values = (
        getattr(options, "preset", None),
        dict(_yield_given_parameters(options, operation.preset_parameters, "field")),
    )
    if name is None:
        for parameter in operation.preset_parameters:
            if parameter.name in preset_values:
                raise UsageError(
                    f"{parameter.option_name} needs {operation.preset_parameter.option_name}: add this option, or "
                    f"leave {parameter.option_name} out"
                )
        return Preset()
    return operation.build_preset(name, {**sizes, **preset_values})


def make_plan(
    request: MeasurementRequest,
    options: argparse.Namespace,
    backend: Backend,
    kernel_names: Sequence[str],
    sweep_options: Any = None,
) -> Plan:
    """Make the plan of a request. If argparse stores an option under the name of a field of Plan, the option sets this
    field.

    ``kernel_names``: the names of the kernels as the options give them. ``sweep_options``: the SweepOptions of a sweep
    with one matmul kernel, or None for any other plan.
    """
    labels = request.make_labeled_shapes(backend)
    plan_fields = {
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
        **plan_fields,
    )
