"""Define the interface between mamf and an operation such as matmul: what it computes, how users write its shapes, and
whether its rate counts FLOP or bytes.

An operation is one folder (or one third-party module) and one entry point in the group ``mamf.operations``. It defines
shapes, the work of a launch, and the columns of reports. Its kernels run the launches.

A shape and a problem together define the work of a launch: the shape contains the sizes, and the problem contains
everything else, such as the dtype. The parameters of an operation are the fields of its shapes and problems, which are
dataclasses. mamf makes command-line options, keywords of the Python API and their help from the type of each field, its
default and the metadata that ``describe`` adds.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Literal, Union, get_args, get_origin, get_type_hints

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES, canonicalize_dtype_name
from mamf.errors import (
    MAX_SEED,
    MAX_SIZE,
    UsageError,
    count_values,
    parse_digits,
    require_known_names,
    require_rows_within_limit,
    require_whole_number,
    shorten_value,
)
from mamf.kernel import DATA_CHOICES, AnyKernel, ProblemT, ShapeT
from mamf.measurement import Measurement
from mamf.peaks import compute_max_flops, find_datasheet_rate
from mamf.plans import BURST, CLASSIC, COMMON_REGIMES, SWEEP, Plan

_METADATA_KEY = "mamf"
_BOOL_BY_WORD = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def _parse_signed_digits(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(text)
    return parse_digits(digits) * (-1 if text.startswith("-") else 1)


#: For each type of parameter: a description of valid text for error messages, and the function that parses the text.
_TEXT_PARSERS: Mapping[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("yes or no", lambda text: _BOOL_BY_WORD[text.lower()]),
    int: ("a whole number", _parse_signed_digits),
    float: ("a number", float),
    str: ("text", str),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operation (one field of its shapes or of its problems), described for users.

    - ``name``, ``value_type``: the dataclass field and its type.
    - ``help``, ``default``: texts for the help; ``default`` may be empty.
    - ``choices``: the allowed values; empty for any. ``minimum``, ``maximum``: bounds of a whole number.
    - ``keyword``: the name of the parameter for users, in its option and as a keyword in the API; empty if it is
      ``name``. If users give several values, this name is a plural.
    - ``metavar``: the placeholder of a value in help.
    - ``parse_text``: the function that converts text to a value; None: convert the text according to ``value_type``.
    - ``has_range``: whether the parameter also has an option ``--NAME-range START STOP STEP``.
    - ``is_rare``: whether only --help-all shows the parameter's option.
    """

    name: str
    value_type: Any
    help: str = ""
    default: str = ""
    choices: Collection[Any] = ()
    minimum: int = 1
    maximum: int = MAX_SIZE
    keyword: str = ""
    metavar: str = ""
    parse_text: Callable[[str], Any] | None = None
    has_range: bool = False
    is_rare: bool = False

    @property
    def option_name(self) -> str:
        return f"--{(self.keyword or self.name).replace('_', '-')}"

    @property
    def accepts_text(self) -> bool:
        """Whether mamf can convert text to values of this parameter, so that it can be a command-line option."""
        return self.parse_text is not None or _drop_none_type(self.value_type) in _TEXT_PARSERS or bool(self.choices)

    def parse_unchecked(self, text: str) -> Any:
        """Convert text to a value, which need not be one of the choices. Raises UsageError for invalid text."""
        return self.parse_text(text) if self.parse_text else _convert_text(self.value_type, text)

    def parse(self, text: str) -> Any:
        """Convert text to an allowed value. Raises UsageError for any other text."""
        value = self.parse_unchecked(text)
        if self.choices:
            require_known_names((self.name.replace("_", " "), value, self.choices))
        return value

    def parse_values(self, values: Any) -> tuple[Any, ...]:
        """Return one or several values as a tuple. Convert those that are text. Raises UsageError for invalid text."""
        values = values if isinstance(values, Iterable) and not isinstance(values, str) else (values,)
        return tuple(self.parse(str(value)) if self.parse_text or isinstance(value, str) else value for value in values)


def describe(help: str = "", **parameter_fields: Any) -> Mapping[str, Any]:
    """Make the ``metadata`` of a dataclass field from its help text and from values for other fields of Parameter."""
    return {_METADATA_KEY: {"help": help, **parameter_fields}}


#: Metadata of the fields ``data`` and ``seed``, which every problem has.
_COMMON_METADATA: Mapping[str, Mapping[str, Any]] = {
    "data": {"help": "distribution of the operands' random values, or zeros", "choices": DATA_CHOICES, "is_rare": True},
    "seed": {
        "help": "seed of all random choices",
        "metavar": "N",
        "minimum": 0,
        "maximum": MAX_SEED,
        "is_rare": True,
    },
}
#: Metadata of a dataclass field whose value follows from other fields, so that users cannot set it.
DERIVED_METADATA: Mapping[str, Any] = {_METADATA_KEY: None}


def _read_parameters(dataclass_type: Any) -> Mapping[str, Parameter]:
    """Return the parameters of a dataclass of shapes or problems, by the name of the field."""
    hints, parameters = get_type_hints(dataclass_type), dict[str, Parameter]()
    for member in fields(dataclass_type):
        metadata = member.metadata.get(_METADATA_KEY, _COMMON_METADATA.get(member.name, {}))
        if not member.init or metadata is None:
            continue
        if get_origin(hints[member.name]) is Literal:
            metadata = {"choices": get_args(hints[member.name]), **metadata}
        default_text = "" if member.default in (MISSING, None) else str(member.default)
        default = {"True": "yes", "False": "no"}.get(default_text, default_text)
        parameters[member.name] = Parameter(member.name, hints[member.name], **{"default": default, **metadata})
    return parameters


#: A function that returns the parameters of a dataclass by the name of the field. It caches its results, because mamf
#: checks the problem of each row of a log.
get_parameters: Callable[[Any], Mapping[str, Parameter]] = functools.cache(_read_parameters)


class CheckedProblem:
    """The base class of problems, which are dataclasses. It checks that the values of all fields are allowed."""

    dtype: str

    def __post_init__(self) -> None:
        """Raise UsageError for a value that is not allowed."""
        require_known_names(("dtype", self.dtype, DTYPES))
        for name, parameter in get_parameters(type(self)).items():
            if parameter.choices:
                require_known_names((name.replace("_", " "), getattr(self, name), parameter.choices))
            elif parameter.value_type is int:
                require_whole_number(name, getattr(self, name), parameter.minimum, parameter.maximum)
            elif parameter.value_type is bool and not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {shorten_value(getattr(self, name))}")

    @property
    def out_dtype(self) -> str:
        return self.dtype


def yield_combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of values, by name. Raises UsageError for more combinations than a run can measure."""
    require_rows_within_limit(*map(count_values, values.values()))
    return (dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values()))


def parse_range(start: int, stop: int, step: int) -> range:
    """Return the sizes from ``start`` up to, but not including, ``stop``. If ``start`` is 0, begin at ``step``.

    Raises UsageError if the step is less than 1, the start is negative or the range is empty.

    >>> list(mamf.parse_range(0, 20480, 4096))
    [4096, 8192, 12288, 16384]
    """
    if step < 1 or start < 0:
        raise UsageError(
            f"the range {start} {stop} {step} is invalid, because START must be at least 0 and STEP at least 1"
        )
    sizes = range(start or step, stop, step)
    if not sizes:
        raise UsageError(f"the range {start} {stop} {step} is empty: choose a STOP above {start or step}")
    return sizes


def _drop_none_type(value_type: Any) -> Any:
    """Return the type of a parameter without its ``| None``."""
    alternatives = get_args(value_type) if get_origin(value_type) in (Union, types.UnionType) else (value_type,)
    return next(alternative for alternative in alternatives if alternative is not type(None))


def _convert_text(value_type: Any, text: str) -> Any:
    """Convert text to a value of the type ``value_type``, which may be a Literal, optional or plain. Raises UsageError
    for invalid text.
    """
    plain_type = _drop_none_type(value_type)
    if text.lower() == "none" and plain_type is not value_type:
        return None
    if get_origin(plain_type) is Literal:
        return next((choice for choice in get_args(plain_type) if str(choice) == text), text)
    if plain_type not in _TEXT_PARSERS:
        raise UsageError(f"{shorten_value(text)!r}: this parameter takes no text: set it in Python")
    description, parse_text = _TEXT_PARSERS[plain_type]
    try:
        return parse_text(text)
    except UsageError:
        raise
    except (KeyError, ValueError):
        raise UsageError(f"{shorten_value(text)!r} is not {description}") from None


@dataclass(frozen=True)
class Preset(Generic[ShapeT]):
    """A named selection of well-known shapes and problems, such as the layers of a model.

    - ``shapes``: whole shapes, each with a label, such as the layer of a model.
    - ``sizes``: the values of each size, by name, if the preset has no ``shapes``. mamf measures every combination. If
      the user gives values for a size, they replace the values of the preset.
    - ``fields``: a list of values for each field of the problem, by name. mamf measures every combination.
    - ``kernels``: names of kernels to measure, if they are available. Empty: the operation's default kernels.
    - ``adjustable_sizes``: names of the sizes that the user may set if the preset has ``shapes``, because the preset
      computes its shapes from these sizes.
    """

    shapes: Mapping[ShapeT, str] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    adjustable_sizes: tuple[str, ...] = ()


class Operation(ABC, Generic[ProblemT, ShapeT]):
    """A computation that mamf measures, such as matmul or attention.

    - ``kernel_group``: the group of entry points that name the operation's kernels. ``kernel_type``: their base class.
    - ``shape_type``, ``problem_type``: frozen dataclasses of plain values, because logs store their fields. The fields
      are options of the command line and keywords of the API; ``mamf.operation.describe`` gives them a help text.
    - ``shape_example``: a shape as text. ``shape_type.parse`` reads what ``str`` writes.
    """

    name: ClassVar[str]
    kernel_group: ClassVar[str]
    kernel_type: ClassVar[type[AnyKernel]]
    shape_type: ClassVar[type[Any]]
    problem_type: ClassVar[type[Any]]
    shape_example: ClassVar[str]
    #: The label of a chart axis for shapes. ``find_axis_position`` returns the position of a shape on this axis.
    axis_label: ClassVar[str] = "size"
    #: The command that measures many shapes of the operation, if that is not ``mamf sweep --operation NAME``.
    command_name: ClassVar[str] = ""
    #: What the chart of a sweep (measurements of many shapes) shows: rates by kernel (``kernels``), by matmul shape
    #: (``shapes``), by sequence length (``lengths``) or cache length (``caches``), or parts of training steps
    #: (``phases``).
    chart_kind: ClassVar[str] = "kernels"
    #: Whether a sweep measures all kernels on each shape. If not, it measures one kernel, by default the usual kernel
    #: for the dtype, and uses the kernel's fastest algorithm for each shape.
    compares_kernels: ClassVar[bool] = True
    #: Whether rooflines use the highest measured rate of this operation as the compute limit of the device. Reports
    #: then show the rates of other operations as shares of this limit.
    sets_compute_ceiling: ClassVar[bool] = False
    #: Whether a run first searches for the highest matmul rate of the device. Reports then show the operation's rates
    #: as shares of that rate.
    shows_ceiling_shares: ClassVar[bool] = False
    #: Whether a run also measures the read bandwidth of memory, because the operation may be limited by this bandwidth
    #: and not by the matmul rate.
    shows_bandwidth_shares: ClassVar[bool] = False
    #: The dtype of the operands if the user names none. Empty: the default dtype of the device.
    default_dtype: ClassVar[str] = ""
    #: The regimes (ways of measuring, such as ``burst``) in which mamf can measure the operation, and the default one.
    regimes: ClassVar[tuple[str, ...]] = COMMON_REGIMES
    default_regime: ClassVar[str] = BURST
    #: Whether the rate counts the FLOP of a whole model. Reports then show MFU (model FLOPs utilization, the rate
    #: divided by the datasheet's peak) and MAMFU (the rate divided by the highest measured matmul rate).
    counts_model_flop: ClassVar[bool] = False
    #: Whether reports rank the operation's kernels separately for each shape, not over all shapes of a problem.
    ranks_by_shape: ClassVar[bool] = False
    #: Whether launches use links that the devices of a machine share. If so, only one device may measure at a time.
    uses_shared_links: ClassVar[bool] = False
    #: Parameters, in addition to sizes, that change which shapes a preset has.
    preset_parameters: ClassVar[Sequence[Parameter]] = ()
    #: The parameter that names a preset.
    preset_parameter: ClassVar[Parameter] = Parameter(
        "preset", str, "predefined set of shapes to measure; other options replace its sizes"
    )
    #: The reference that verification compares outputs with, as the report of ``mamf verify`` names it.
    reference: ClassVar[str] = "the kernel's own check"
    #: Whether a launch returns or writes tensors, which another process can check.
    returns_tensors: ClassVar[bool] = False
    #: The names of the kernels with approximate results. Code that reads logs needs them, but must not import kernels.
    approximate_kernels: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def choose_default_shapes(self, backend: Backend) -> Sequence[ShapeT]:
        """Return the shapes that mamf measures if the user names none."""

    def list_presets(self) -> Mapping[str, Preset[ShapeT]]:
        """Return the presets by name: well-known shapes and problems."""
        return {}

    def build_preset(self, name: str, values: Mapping[str, Sequence[Any]]) -> Preset[ShapeT]:
        """Return a preset for given sizes and ``preset_parameters``. Raises UnknownNameError for an unknown name."""
        presets = self.list_presets()
        require_known_names((f"{self.preset_parameter.keyword or 'preset'} of {self.name}", name, presets))
        return presets[name]

    def build_shapes(self, sizes: Mapping[str, Sequence[Any]], backend: Backend) -> Sequence[ShapeT]:
        """Return shapes with every combination of the given sizes. Take their other sizes from the default shapes."""
        default_shapes: Sequence[Any] = self.choose_default_shapes(backend)
        return [replace(shape, **chosen) for shape in default_shapes for chosen in yield_combinations(sizes)]

    def complete_fields(self, preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a preset. If the user gave a value for a field (``given``), return that value instead.
        An operation may override this method, for example to scale the other sizes in proportion.
        """
        return {**preset, **given}

    def make_problem(self, backend: Backend, requested_fields: Mapping[str, Any]) -> ProblemT:
        """Return a problem with the fields in ``requested_fields`` and the defaults of the operation and the device.
        Raises UsageError for invalid fields.
        """
        name = requested_fields.get("dtype") or self.default_dtype or backend.default_dtype
        dtype = backend.resolve_dtype(canonicalize_dtype_name(name))
        return self.problem_type(**{**requested_fields, "dtype": dtype})  # type: ignore[no-any-return]

    def draw_random_case(self, chooser: random.Random, terms: range) -> dict[str, Any] | None:
        """Draw a random problem for ``mamf verify``. Return its fields by name, and its shape as ``shape``; None if the
        operation has no random problems. ``terms``: the allowed numbers of multiply-adds in a launch.
        """
        return None

    def find_max_possible_rate(self, info: DeviceInfo, problem: ProblemT, shape: ShapeT | None = None) -> float | None:
        """Return the rate that the device cannot physically exceed, in FLOP or bytes per second; None if unknown.
        The limit may depend on ``shape``, because the operands of a small shape may fit in a cache.
        """
        return None

    def find_peak_rate(self, info: DeviceInfo, problem: ProblemT) -> float | None:
        """Return the peak rate from the device's datasheet in FLOP or bytes per second, or None if it is unknown."""
        return None

    def may_be_ceiling(self, info: DeviceInfo, problem: ProblemT, shape: ShapeT) -> bool:
        """Return whether a measurement of this shape may become a ceiling, the highest confirmed rate of the device."""
        return True

    def make_columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return additional columns that reports show for a measurement of this operation, most important first.

        ``info``: the device that measured the row, if known.
        """
        return {}

    def list_identifying_fields(self, problem: ProblemT) -> Sequence[str]:
        """Return ``name value`` for each field of a problem. Omit the dtype, ``data`` if normal, and ``seed`` if 0."""
        omitted = {"data": "normal", "seed": 0, "dtype": problem.dtype}
        record = self.make_problem_record(problem)
        return [f"{name} {value}" for name, value in record.items() if name not in omitted or omitted[name] != value]

    def describe_problem(self, problem: ProblemT) -> Sequence[str]:
        """Return the identifying fields of a problem for reports, by default those of ``list_identifying_fields``."""
        return self.list_identifying_fields(problem)

    def describe_shape(self, shape: ShapeT) -> str:
        """Return the text that reports show for a shape."""
        return str(shape)

    def find_axis_position(self, shape: ShapeT) -> float:
        """Return the position of a shape on a chart's axis. Raises NotImplementedError if the operation has no axis."""
        raise NotImplementedError(f"operation {self.name} defines no axis for a chart")

    # -- log records -------------------------------------------------------------------------------------------------

    def parse_shape(self, text: str) -> ShapeT:
        """Read the text that ``str`` writes for a shape. Raises UsageError for any other text."""
        return self.shape_type.parse(text)  # type: ignore[no-any-return]

    def make_shape_record(self, shape: ShapeT) -> dict[str, Any]:
        """Convert a shape to JSON fields for the log."""
        return convert_to_plain_dict(shape)

    def read_shape_record(self, record: Mapping[str, Any]) -> ShapeT:
        """Read a shape from the fields that ``make_shape_record`` returns."""
        return self.shape_type(**record)  # type: ignore[no-any-return]

    def make_problem_record(self, problem: ProblemT) -> dict[str, Any]:
        """Convert a problem to JSON fields for the log."""
        return convert_to_plain_dict(problem)

    def read_problem_record(self, record: Mapping[str, Any]) -> ProblemT:
        """Read a problem from the fields that ``make_problem_record`` returns."""
        return self.problem_type(**record)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MeasurementRequest:
    """A user's request to measure an operation: whole ``shapes``, values of ``sizes`` by name, and values of problem
    ``fields`` by name. The values in ``sizes`` and ``fields`` replace those of ``preset``.
    """

    operation: Operation[Any, Any]
    shapes: Sequence[Any] = ()
    sizes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    preset: Preset[Any] = field(default_factory=Preset)

    def make_problems(self, backend: Backend) -> tuple[Any, ...]:
        """Make a problem for each combination of the fields. Raises UsageError for a value that is not allowed."""
        preset_fields = {
            name: values[:1] if name in self.fields else values for name, values in self.preset.fields.items()
        }
        fields_of_problems = (
            self.operation.complete_fields(preset, given)
            for preset in yield_combinations(preset_fields)
            for given in yield_combinations(self.fields)
        )
        return tuple(dict.fromkeys(self.operation.make_problem(backend, fields) for fields in fields_of_problems))

    def make_labeled_shapes(self, backend: Backend) -> dict[Any, str]:
        """Return the requested or default shapes with labels. Raises UsageError for a size that is not allowed."""
        if labeled_shapes := self.preset.shapes or dict.fromkeys(self.shapes, ""):
            return dict(labeled_shapes)
        sizes = {**self.preset.sizes, **self.sizes}
        return dict.fromkeys(
            self.operation.build_shapes(sizes, backend) if sizes else self.operation.choose_default_shapes(backend), ""
        )


def make_operation_plan(
    operation: Operation[Any, Any],
    kernels: Iterable[str],
    problems: Iterable[Any],
    shapes: Iterable[Any],
    regimes: Iterable[str] = (),
    kind: str = SWEEP,
    **plan_fields: Any,
) -> Plan:
    """Return the plan of a run that measures given shapes. ``kernels``: the names that the user wrote. ``regimes``: if
    empty, use the default regime of the operation. ``plan_fields``: further fields of the plan. Raises UsageError if
    mamf cannot measure the operation in one of the regimes.
    """
    names = tuple(dict.fromkeys(regimes)) or (operation.default_regime,)
    if CLASSIC in names and CLASSIC not in operation.regimes:
        known = " or ".join(operation.regimes)
        raise UsageError(f"{operation.name} cannot be measured in the regime {CLASSIC}: use {known}")
    return Plan(kind, operation.name, tuple(problems), tuple(kernels), tuple(shapes), names, **plan_fields)


# Consider the shape with the maximum number of multiply-adds whose sizes are all equal. A random size is at most
# _MAX_SIZE_RATIO times these sizes, and a multiple of one of _SIZE_MULTIPLES. Drawing stops after _MAX_DRAW_ATTEMPTS
# failed attempts.
_MAX_SIZE_RATIO, _SIZE_MULTIPLES, _MAX_DRAW_ATTEMPTS = 4, (1, 1, 8, 16, 64, 128), 1000


def draw_sizes(chooser: random.Random, count: int, multiply_adds: range, fixed_product: int = 1) -> list[int]:
    """Draw ``count`` random sizes of a shape. Their product times ``fixed_product`` is the number of multiply-adds of a
    launch, which must be in the range ``multiply_adds``. If no attempt succeeds, return sizes of 1.
    """
    max_exponent = math.log2(max(2.0, _MAX_SIZE_RATIO * (multiply_adds[-1] / fixed_product) ** (1 / count)))
    for _ in range(_MAX_DRAW_ATTEMPTS):
        multiples = [chooser.choice(_SIZE_MULTIPLES) for _ in range(count)]
        sizes = [max(step, round(2 ** chooser.uniform(0, max_exponent)) // step * step) for step in multiples]
        if math.prod(sizes) * fixed_product in multiply_adds:
            return sizes
    return [1] * count


class FlopOperation(Operation[ProblemT, ShapeT]):
    """An operation whose rate counts FLOP. The device's peak for the dtype limits this rate."""

    def find_max_possible_rate(self, info: DeviceInfo, problem: ProblemT, shape: ShapeT | None = None) -> float | None:
        return compute_max_flops(info, problem.dtype)

    def find_peak_rate(self, info: DeviceInfo, problem: ProblemT) -> float | None:
        """Return the peak from the device's datasheet in FLOP per second; None if unknown. The measured rate divided by
        this peak is the MFU (model FLOPs utilization).
        """
        peak = find_datasheet_rate(info.name, problem.dtype, info.compute_units)
        return None if peak is None else peak.flops


def convert_to_plain_dict(record: Any) -> dict[str, Any]:
    """Convert a dataclass of plain values to a dictionary. This function runs for each row of a log, so it must be
    fast: ``dataclasses.asdict`` takes five times as long.
    """
    return {field.name: getattr(record, field.name) for field in fields(record)}
