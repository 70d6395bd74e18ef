"""The one way from options to a plan: an operation's parameters are options, and their values make problems and shapes.

Nothing here knows an operation: what its options are called, mean and allow is declared with the fields of its shapes
and problems (``mamf.parameters``).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from mamf.backend import Backend
from mamf.cli.options import OPTIONS, add, bound
from mamf.cli.parser import Parser, value_of
from mamf.cli.terminal import warn
from mamf.errors import UnknownNameError, UsageError
from mamf.limits import count_values, require_known, require_steps
from mamf.operation import Operation, Preset, Request, fields_of, sizes_of
from mamf.parameters import Parameter, parse_range
from mamf.plans import KERNEL_REGIMES, SWEEP, Plan
from mamf.regime_names import asked_regimes

AnyOperation = Operation[Any, Any]
#: The values of a switch, each with the values of its field.
_SWITCH: Mapping[str, tuple[bool, ...]] = {"yes": (True,), "no": (False,), "both": (False, True)}
#: The groups of options that commands share, which help shows last.
_SHARED_GROUPS = ("counting", "measuring", "search", "device", "several devices", "run")
#: Values by parameter that replace its default.
Defaults = Mapping[str, Sequence[Any]]


# -- the operation -----------------------------------------------------------------------------------------------------


def named_operation(words: Sequence[str]) -> AnyOperation | None:
    """The operation that --operation names, before the command line is parsed. Raises UnknownNameError."""
    if name := value_of("--operation", words):
        from mamf.plugins.discovery import operation

        return operation(name)
    return None


def launched_operation(words: Sequence[str]) -> AnyOperation | None:
    """The operation that --operation names, else that of the first word that is a kernel. Raises UsageError for a word
    that is none.
    """
    if (of := named_operation(words)) or {"-h", "--help", "--help-all"}.intersection(words[1:2]):
        return of
    from mamf.plugins.selection import find_operation

    # A word behind an option is most often its value.
    pairs = itertools.pairwise(words)
    kernels = [word for before, word in pairs if not (before.startswith("-") or word.startswith("-"))]
    for word in (*kernels, *(word for word in words[1:] if ":" not in word)):
        with suppress(UnknownNameError):
            return find_operation(word)
    return find_operation(kernels[0]) if kernels else None


# -- options -----------------------------------------------------------------------------------------------------------


def add_parameters(
    parser: argparse.ArgumentParser,
    of: AnyOperation,
    has_shapes: bool = True,
    several: bool = True,
    defaults: Defaults = MappingProxyType({}),
) -> None:
    """Add the options of an operation: shapes, their sizes and presets, then fields of the problem.

    Called after the options that do not depend on the operation, because a parameter gives way to an option of the same
    name. ``several``: whether a field takes several values.
    """
    if has_shapes:
        group = _add_group(parser, f"shapes of {of.name}", "several values are measured in every combination")
        for size in sizes_of(of).values():
            _add_parameter(group, size, _size, several=True, default=defaults.get(size.name))
        if "--shapes" not in group._option_string_actions:
            add(group, "--shapes", help=f"whole shapes, such as {of.shape_example}")
        if presets := of.presets():
            option, help = of.preset_parameter.option, f"{of.preset_parameter.help}: {', '.join(presets)}"
            group.add_argument(option, dest="preset", metavar="NAME", help=help)
        for action in group._group_actions:
            action.is_parameter = True  # type: ignore[attr-defined]
            for further in of.preset_parameters:
                _add_parameter(group, further, _field)
    group = _add_group(parser, f"problem of {of.name}")
    for each in fields_of(of).values():
        if each.name != "dtype":
            _add_parameter(group, each, _field, several, defaults.get(each.name))
        elif "--dtype" not in group._option_string_actions:
            usual = OPTIONS["--dtype"].default if each.default == "bfloat16" else each.default
            add(group, "--dtype", default_text=usual, nargs="+" if several else None)
    if several:
        add(group, "--set")


def _add_group(parser: argparse.ArgumentParser, title: str, description: str = "") -> argparse._ArgumentGroup:
    """A group that help shows before the groups of options that all operations share."""
    group = parser.add_argument_group(title, description or None)
    shared = [each for each in parser._action_groups if each.title in _SHARED_GROUPS]
    parser._action_groups[:] = [each for each in parser._action_groups if each not in shared] + shared
    return group


def _add_parameter(
    group: argparse._ArgumentGroup,
    parameter: Parameter,
    name: Callable[[Parameter], str],
    several: bool = False,
    default: Sequence[Any] | None = None,
) -> None:
    """Add the option of a parameter. A parameter that has the name of another option, or a type that text cannot give,
    has none. ``name``: of its value among the options.
    """
    option = parameter.option
    if option in group._option_string_actions or not parameter.is_readable:
        return
    usual = " ".join(map(str, default)) if default else parameter.default
    help = parameter.help or parameter.name.replace("_", " ")
    keywords: dict[str, Any] = {"dest": name(parameter), "default": default}
    keywords["help"] = (f"{help} (default: {usual})" if usual else help).replace("%", "%%")
    if parameter.is_switch:
        choices = [*_SWITCH] if several else [*_SWITCH][:2]
        keywords |= {"choices": choices, "nargs": "?", "const": "yes"}
    else:
        keywords |= {"type": _reader(parameter), "nargs": "+" if several else None}
        metavar = parameter.metavar or (None if parameter.choices else option[2:].upper())
        keywords |= {"metavar": metavar, "choices": list(parameter.choices) or None}
    # argparse cannot print the usage of a group whose options are all hidden.
    is_either = (parameter.is_switch or parameter.has_range) and not parameter.is_rare
    where = group.add_mutually_exclusive_group() if is_either else group
    added = [where.add_argument(option, **keywords)]
    if parameter.is_switch:
        keywords = {"dest": name(parameter), "action": "store_const", "const": "no", "default": default}
        added.append(where.add_argument(f"--no-{option[2:]}", help=f"the same as {option} no", **keywords))
    if parameter.has_range:
        bounds: dict[str, Any] = {"type": bound, "nargs": 3, "metavar": ("START", "STOP", "STEP")}
        text = f"values of {parameter.name.upper()} from START up to, but not including, STOP; a START of 0 means STEP"
        added.append(where.add_argument(f"{option}-range", dest=f"{name(parameter)}_range", help=text, **bounds))
    for action in added:
        action.is_rare = parameter.is_rare  # type: ignore[attr-defined]
        action.is_parameter = True  # type: ignore[attr-defined]


def _size(parameter: Parameter) -> str:
    """The name of a size among the options, which no other option has."""
    return f"size_{parameter.name}"


def _field(parameter: Parameter) -> str:
    return f"field_{parameter.name}"


def _reader(parameter: Parameter) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if not text.strip():
            raise argparse.ArgumentTypeError("it is empty")
        try:
            return parameter.convert(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def add_named_operation(parser: Parser) -> None:
    """The options of a command for any operation: which one, its kernels, and its parameters if it is named."""
    group = parser.add_argument_group("what")
    add(group, "--operation", required=True)
    add(group, "--kernel")
    if of := named_operation(parser.words):
        add_parameters(parser, of)


def add_launch_options(parser: Parser, shapes: str) -> None:
    """The options of a command for a kernel of any operation. ``shapes``: the option of whole shapes, which may also be
    written --shape or --shapes.
    """
    group = parser.add_argument_group("what")
    add(group, "--operation", default_text="the operation of the kernel")
    add(group, shapes, dest="shapes", nargs="+")
    other = {"--shape": "--shapes", "--shapes": "--shape"}[shapes]
    group.add_argument(other, dest="shapes", nargs="+", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if of := launched_operation(parser.words):
        add_parameters(parser, of)
    else:
        group.description = "sizes and fields are options of the operation: mamf COMMAND KERNEL --help lists them"


# -- what they ask for -------------------------------------------------------------------------------------------------


def request_of(of: AnyOperation, options: argparse.Namespace) -> Request:
    """What the options ask for. Raises UsageError for what needs no device to be seen as wrong."""
    sizes = dict(_given(options, sizes_of(of).values(), _size))
    shapes = tuple(dict.fromkeys(map(of.parse_shape, getattr(options, "shapes", None) or ())))
    preset = _preset_of(of, options, sizes)
    for parameter in sizes_of(of).values():
        if parameter.name in sizes and parameter.name not in preset.taken and (shapes or preset.shapes):
            named = "--shapes" if shapes else f"{of.preset_parameter.option} {options.preset}"
            raise UsageError(f"{named} names whole shapes: leave {parameter.option} out")
    if shapes and preset.shapes:
        raise UsageError(f"{of.preset_parameter.option} names whole shapes: leave --shapes out")
    require_steps(*map(count_values, sizes.values()))
    return Request(of, shapes, sizes, values_of_fields(of, options), preset)


def _given(
    options: argparse.Namespace, parameters: Iterable[Parameter], name: Callable[[Parameter], str]
) -> Iterator[tuple[str, Sequence[Any]]]:
    """The values of the parameters that are given, by name. Raises UsageError for an empty range."""
    for parameter in parameters:
        bounds = getattr(options, f"{name(parameter)}_range", None)
        values = parse_range(*bounds) if bounds else getattr(options, name(parameter), None)
        if values is None:
            continue
        if parameter.is_switch and isinstance(values, str):
            values = _SWITCH[values]
        yield parameter.name, values if isinstance(values, (list, tuple, range)) else (values,)


def values_of_fields(of: AnyOperation, options: argparse.Namespace) -> dict[str, Sequence[Any]]:
    """The values of fields from their options and --set. Raises UsageError for unknown fields and values."""
    dtypes = [options.dtype] if isinstance(options.dtype, str) else options.dtype
    found: dict[str, Sequence[Any]] = {"dtype": dtypes} if dtypes else {}
    given = dict(_given(options, fields_of(of).values(), _field))
    return read_fields(of, getattr(options, "set", None) or (), found | given)


def read_fields(
    of: AnyOperation, texts: Iterable[str], given: Defaults = MappingProxyType({})
) -> dict[str, Sequence[Any]]:
    """The values in texts such as ``direction=fwd,bwd``, beside those that are given. Raises UsageError."""
    known, found = fields_of(of), dict(given)
    for text in texts:
        name, equals, values = text.partition("=")
        require_known((f"field of {of.name}", name, known))
        if not equals or name in found:
            raise UsageError(f"--set {text}: " + ("it is set twice" if equals else f"write {name}=VALUE"))
        try:
            found[name] = [known[name].parse(value) for value in values.split(",")]
        except UsageError as error:
            raise UsageError(f"{of.name}'s {name}: {error}") from None
    return found


def _preset_of(of: AnyOperation, options: argparse.Namespace, sizes: Mapping[str, Sequence[Any]]) -> Preset[Any]:
    name, further = getattr(options, "preset", None), dict(_given(options, of.preset_parameters, _field))
    if name is None:
        for parameter in of.preset_parameters:
            if parameter.name in further:
                raise UsageError(f"{parameter.option} is of a preset: name one with {of.preset_parameter.option}")
        return Preset()
    return of.preset(name, {**sizes, **further})


def kernels_of(request: Request, options: argparse.Namespace, backend: Backend) -> Sequence[str] | None:
    """The named kernels, or those of the preset that are available, with a warning for others; None for all."""
    of_preset = request.preset.kernels
    if options.kernel or not of_preset:
        return options.kernel  # type: ignore[no-any-return]
    from mamf.plugins.discovery import kernel_of

    reasons = {name: kernel_of(request.of, name).unavailable(backend) for name in of_preset}
    able = [name for name, reason in reasons.items() if reason is None]
    for name, reason in reasons.items():
        if able and reason:
            warn(f"{name} is left out: {reason}")
    return able or of_preset


def make_plan(
    request: Request,
    options: argparse.Namespace,
    backend: Backend,
    kernels: Sequence[str],
    known_regimes: Sequence[str] = KERNEL_REGIMES,
    how: Any = None,
) -> Plan:
    """``kernels``: their names in the options. ``how``: the SweepOptions, if not the usual ones."""
    labels = request.labeled_shapes(backend)
    return Plan(
        SWEEP,
        request.of.name,
        request.problems(backend),
        tuple(kernels),
        tuple(labels),
        asked_regimes(options.regime, (request.of.default_regime,), known_regimes),
        options.precision or Plan.precision,
        options.time_limit,
        options.budget,
        not getattr(options, "no_flush", None),
        layers=tuple(labels.values()) if any(labels.values()) else (),
        options=how,
    )
