"""Measure from programs and notebooks. Each function here does the same as one mamf command.

A row is the measurement of one combination of kernel, problem, shape and regime. The caller gets each row as soon as
mamf has measured it. Every call can be interrupted at any moment, and writes a run log if ``log`` names a file. All
calls share these options; the first four take one value or several:

- ``dtype``: the dtype of the operands. The default is the device's default dtype (bfloat16 on accelerators).
- ``problem``: a whole problem in place of a dtype, such as MatmulProblem or AttentionProblem.
- ``kernel``: a name that ``mamf kernels`` lists, or ``package.module:Class``.
- ``regime``: the kind of load on the device: ``burst`` (the default), ``sustained`` or, for matmul only, ``classic``.
- ``backend``: a name that ``mamf backends`` lists, ``auto`` for the first accelerator, or an open backend. ``device``:
  the index of the device.
- ``precision``: mamf measures a row until half the width of its 95 % interval is at most this share of its time.
- ``clock``: the rows for which mamf also measures the clock of the compute units: ``best`` (the default) for each row
  that is faster than all earlier rows, ``all`` or ``none``. Measuring the clock takes additional launches.
- ``budget_seconds``: the time limit of the whole call. The first row is always measured. The summary in the log says
  how many rows were not measured.
- ``log``: the path of a new log. mamf writes each row to the log before the caller gets the row, and at the end a
  summary of the run. If another program changes the file during the run, mamf writes the whole log to another file, and
  gives a LogChangedWarning with the path of that file.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling, Ceilings, explain_missing_ceiling
from mamf.engine.search.grid import plan_search
from mamf.engine.strategies.rows import RowsStrategy
from mamf.engine.traits import replace_assumed_traits
from mamf.errors import DeviceError, MamfWarning, UsageError, require_nonempty_list
from mamf.kinds.driver import Run
from mamf.logs.ceiling_cache import cache_ceilings
from mamf.machine.environment import format_check_result, select_warnings
from mamf.measurement import Measurement
from mamf.operation import MeasurementRequest, Operation, Parameter, get_parameters, make_operation_plan
from mamf.operations.attention.operation import AttentionShape
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.matmul.operation import MatmulOperation, choose_matmul_kernel, get_ceiling_kernels
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.plans import BEST_CLOCK, BURST, SHUFFLED_ORDER, SweepOptions
from mamf.plugins.discovery import choose_kernels, make_operation, open_backend
from mamf.report.document import format_count

_Value = TypeVar("_Value")
_Parameters = ParamSpec("_Parameters")
#: The type of an argument that takes one value or several.
OneOrSeveral: TypeAlias = _Value | Iterable[_Value]
#: A callback that receives each row as soon as mamf has measured it.
RowCallback = Callable[[Measurement], object]


class Rows(Iterator[Measurement]):
    """An iterator that measures each row when the caller asks for it. Leaving the loop or calling ``close`` ends the
    run.
    """

    def __init__(self, description: str, rows: Generator[Measurement, None, None]) -> None:
        self._description, self._rows = description, rows

    def __next__(self) -> Measurement:
        return next(self._rows)

    def close(self) -> None:
        self._rows.close()

    def __repr__(self) -> str:
        return f"<{self._description}: iterate over this object to measure the rows>"


def _suggest_nearest_keyword(call: Callable[_Parameters, _Value]) -> Callable[_Parameters, _Value]:
    """Wrap a function so that its error for an unknown keyword suggests the nearest valid keyword."""
    known_parameters = inspect.signature(call).parameters

    @functools.wraps(call)
    def call_with_known_keywords(*arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Value:
        for name in keywords.keys() - known_parameters.keys():
            raise _make_unknown_keyword_error(call.__name__, name, known_parameters)
        return call(*arguments, **keywords)

    return call_with_known_keywords


def _make_unknown_keyword_error(function_name: str, name: str, known_names: Iterable[str]) -> TypeError:
    similar = difflib.get_close_matches(name, known_names, n=1)
    suggestion = f"; did you mean {similar[0]!r}?" if similar else f"; {function_name}() takes {', '.join(known_names)}"
    return TypeError(f"{function_name}() got an unexpected keyword argument {name!r}{suggestion}")


@_suggest_nearest_keyword
def find(
    dtype: str | None = None,
    *,
    problem: MatmulProblem | None = None,
    kernel: OneOrSeveral[str] | None = None,
    regime: OneOrSeveral[str] = BURST,
    backend: str | Backend = "auto",
    device: int = 0,
    precision: float = 0.003,
    budget_seconds: float | None = None,
    quick: bool = False,
    on_row: RowCallback | None = None,
    log: str | Path | None = None,
) -> Ceiling:
    """Find the ceiling of the device: the highest rate that it reaches with any shape. The default regime is burst.

    mamf measures the fastest shape again to confirm its rate. It also stores the ceiling, so that ``mamf.peak`` can
    return it later. ``on_row``: a function that mamf calls with each row. ``search`` describes the other keywords.
    If you give several regimes, the result is the ceiling of the last one; the attribute ``ceilings`` of ``search`` has
    all.

    Raises DeviceError if no ceiling is confirmed within ``budget_seconds``, and the errors of ``search``.

    >>> mamf.find("bfloat16")
    Ceiling(Simulated H100, bfloat16, burst: ... TFLOPS, 95 % repeat interval: ..., at ... by simulated.mm)
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(log or Path(folder, "find.jsonl"))
        ceiling_search = search(
            dtype,
            problem=problem,
            kernel=kernel,
            regime=regime,
            backend=backend,
            device=device,
            precision=precision,
            budget_seconds=budget_seconds,
            quick=quick,
            log=path,
        )
        with closing(iter(ceiling_search)) as rows:
            for row in rows:
                if on_row is not None:
                    on_row(row)
        cache_ceilings(path, _warn_caller)
    return ceiling_search.ceiling


@_suggest_nearest_keyword
def search(
    dtype: str | None = None,
    *,
    problem: MatmulProblem | None = None,
    kernel: OneOrSeveral[str] | None = None,
    regime: OneOrSeveral[str] = BURST,
    backend: str | Backend = "auto",
    device: int = 0,
    precision: float = 0.003,
    budget_seconds: float | None = None,
    quick: bool = False,
    log: str | Path | None = None,
) -> CeilingSearch:
    """Return a search for the ceiling. The search measures while you iterate over it. Afterwards its attribute
    ``ceiling`` has the result.

    - ``dtype`` or ``problem``: a single value, because a search finds the ceiling of one problem.
    - ``kernel``: the kernels to try. mamf looks for fast shapes with the first of them. The default is all kernels
      except those that take minutes to compile.
    - ``regime``: the regime of the ceiling. A search for the sustained ceiling first finds the burst ceiling, and
      ``ceilings`` contains both.
    - ``budget_seconds``: 57 s by default. With ``quick``, 13.2 s plus 4 s for each kernel that compiles. On a CPU,
      the default is 114 s, or 66 s with ``quick``.
    - ``quick``: measure each shape fewer times, and only with the kernel that is fastest in a short trial.

    Raises UnavailableError, UnknownNameError or UnsupportedError before the first measurement, if the requested device,
    kernel or dtype cannot be measured.

    The attribute ``phase`` of a row says what the search was doing: trying shapes (``scout``), comparing the fastest
    candidates (``choose``) or measuring the winner again (``confirm``).

    >>> search = mamf.search("bfloat16", log="search.jsonl")
    >>> sorted({row.phase for row in search})
    ['choose', 'confirm', 'scout']
    >>> search.ceiling.shape == mamf.load_ceiling("search.jsonl").shape
    True
    """
    opened_backend = open_backend_with_measured_traits(backend, device)
    requested_regimes, kernel_names = convert_to_tuple("regime", regime) or (BURST,), convert_to_tuple("kernel", kernel)
    (search_problem,), _ = make_problems_and_shapes(
        opened_backend, MatmulOperation(), None, problem, {"dtype": dtype}, "search", max_values=1
    )
    plan, opened_kernels = plan_search(
        opened_backend,
        search_problem,
        kernel_names,
        regimes=tuple(dict.fromkeys((BURST, *requested_regimes))),
        budget_seconds=budget_seconds,
        precision=precision,
        is_quick=quick,
    )
    return CeilingSearch(
        Run(
            plan,
            opened_backend,
            list(zip(plan.kernels, opened_kernels, strict=True)),
            log_path=None if log is None else Path(log),
        ),
        requested_regimes[-1],
    )


def _start_run(run: Run) -> Generator[Measurement, None, None]:
    """Return an iterator that measures the rows of a run. Warn about each problem that mamf found with the machine."""
    rows = run.yield_measurements()
    for finding in select_warnings(run.findings):
        _warn_caller(format_check_result(finding))
    return rows


def _warn_caller(text: str) -> None:
    """Warn with a MamfWarning that names the line outside of mamf whose call led here."""
    is_in_mamf = (str(each.frame.f_globals.get("__name__")).startswith("mamf.") for each in inspect.stack(context=0))
    warnings.warn(text, MamfWarning, stacklevel=[*is_in_mamf, False].index(False) + 1)


class CeilingSearch:
    """A search for ceilings. It measures while you iterate over this object. If you leave the loop (``break``, Ctrl-C),
    the search ends and its log is closed.

    >>> search = mamf.search("bfloat16")
    >>> for row in search:
    ...     if search.ceilings:
    ...         break
    >>> search.ceiling.round_count
    3
    """

    def __init__(self, run: Run, regime: str) -> None:
        self._run, self.regime = run, regime
        #: The rows that remain to be measured. mamf writes each row to the log before it returns the row.
        self.rows = _start_run(run)

    def __iter__(self) -> Generator[Measurement, None, None]:
        """Yield each row as soon as it is measured."""
        yield from self.rows  # closing this generator closes the rows too, which ends the run

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        """The ceilings that have been confirmed so far, by regime."""
        return {regime: ceiling for (_, regime), ceiling in self._run.confirmed_ceilings.items()}

    @property
    def ceiling(self) -> Ceiling:
        """The ceiling of the requested regime. Raises DeviceError until it is confirmed."""
        ceilings = self.ceilings
        if self.regime not in ceilings:
            if reason := explain_missing_ceiling(self._run.rows):
                raise DeviceError(f"no {self.regime} ceiling can be found: {reason}")
            rates = [row.best_rate for row in self._run.rows if row.ok and row.regime == self.regime]
            raise DeviceError(
                f"no {self.regime} ceiling was confirmed in {self._run.plan.budget_seconds:.0f} s (best measurement so "
                f"far: {max(rates, default=0.0):.4g} TFLOPS): raise budget_seconds, or measure on a quiet device"
            )
        return ceilings[self.regime]


def measure_kernels(
    of: str,
    shapes: Iterable[Any] | str | None = None,
    *,
    dtype: OneOrSeveral[str] | None = None,
    problem: OneOrSeveral[Any] | None = None,
    kernel: OneOrSeveral[str] | None = None,
    regime: OneOrSeveral[str] | None = None,
    ceilings: Ceilings | None = None,
    ceiling_kernel: OneOrSeveral[str] | None = None,
    backend: str | Backend = "auto",
    device: int = 0,
    precision: float = 0.003,
    clock: str = BEST_CLOCK,
    budget_seconds: float | None = None,
    log: str | Path | None = None,
    **parameters: Any,
) -> Rows:
    """Measure several kernels of an operation, or one kernel of matmul, on every shape.

    - ``of``: the name of the operation, such as ``bandwidth``.
    - ``shapes``: shapes of this operation, as objects or as text. By default, the operation chooses the shapes.
    - ``problem``: one or several problems of this operation; by default, its default problem.
    - ``parameters``: sizes of the shapes and fields of the problem, such as ``seq_lens=[1024, 4096]`` and
      ``direction=["fwd", "bwd"]``. Keywords and command-line options have the same names. mamf measures every
      combination.
    - ``kernel``: names of kernels; by default, all available kernels.
    - ``regime``: burst by default, but sustained for models.
    - ``ceilings``: a mapping from (dtype, regime) to a ceiling, such as ``matmul_ceilings`` of a log of ``mamf find``.
      Rows show their rates as shares of these ceilings. Between the rows, mamf measures the matmul of each ceiling
      again, to detect whether the speed of the card has changed. If the kernel of this matmul is not installed, mamf
      skips the matmul and gives a MamfWarning.
    - ``ceiling_kernel``: if a ceiling was measured with a kernel that is not installed, name this kernel here as
      ``package.module:Class``.

    Raises UnavailableError, UnknownNameError or UnsupportedError before it allocates memory. A later error is not
    raised: the row that failed has the error as its status.

    >>> rows = mamf.measure_kernels("bandwidth", ["64MiB", "1GiB"], problem=mamf.BandwidthProblem("triad"))
    >>> [(str(row.shape), f"{row.best_rate:.1f} {row.work.unit}") for row in rows]
    [('64MiB', '3.0 TB/s'), ('1GiB', '3.0 TB/s')]
    """
    opened_backend, operation, sweep_options = (
        open_backend_with_measured_traits(backend, device),
        make_operation(of),
        SweepOptions(),
    )
    given_parameters, max_values, function_name = {"dtype": dtype, **parameters}, None, of
    if not operation.compares_kernels:
        max_values, function_name = 1, operation.command_name
    problems, planned_shapes = make_problems_and_shapes(
        opened_backend, operation, shapes, problem, given_parameters, function_name, max_values
    )
    kernel_names = convert_to_tuple("kernel", kernel, max_values=max_values)
    if operation.compares_kernels:
        opened_kernels = choose_kernels(operation, opened_backend, kernel_names)
    else:
        matmul_kernel = choose_matmul_kernel(opened_backend, problems[0], *kernel_names or ())
        opened_kernels, sweep_options = [(matmul_kernel.name, matmul_kernel)], SweepOptions(SHUFFLED_ORDER)
    plan = make_operation_plan(
        operation,
        dict(opened_kernels),
        problems,
        planned_shapes,
        convert_to_tuple("regime", regime) or (),
        precision=precision,
        clock=clock,
        budget_seconds=budget_seconds,
        options=sweep_options,
    )
    run = Run(plan, opened_backend, opened_kernels, log_path=None if log is None else Path(log))
    if ceilings or ceiling_kernel:
        ceilings_by_key = dict(ceilings or {})
        references = get_ceiling_kernels(
            {ceiling.kernel for ceiling in ceilings_by_key.values()},
            convert_to_tuple("ceiling_kernel", ceiling_kernel) or (),
            _warn_caller,
        )
        run.make_run_strategy, run.known_ceilings = (
            lambda setup: RowsStrategy(setup, ceilings_by_key, references),
            ceilings_by_key,
        )
    return Rows(f"{of}, {format_count(len(plan.list_row_keys()), 'row')}", _start_run(run))


def sweep(shapes: Iterable[MatmulShape | str] | str | None = None, **options: Any) -> Rows:
    """Measure matmuls of several shapes with one kernel. The shapes are measured in random order, which depends on the
    ``seed`` of the problem.

    - ``shapes``: shapes MxNxK, as MatmulShape or text such as ``4096x4096x4096``. ``mamf.matmul_grid`` makes a grid.
    - ``options``: keyword arguments of ``measure_kernels``. ``dtype``, ``problem`` and ``kernel`` take only one value.
      By default, mamf uses the default dtype and the default kernel of the device.

    >>> for row in mamf.sweep(["4096x4096x4096", "8192x8192x8192"], dtype="bfloat16"):
    ...     print(row)
    Measurement(matmul 4096x4096x4096 by simulated.mm, burst: ... TFLOPS)
    Measurement(matmul 8192x8192x8192 by simulated.mm, burst: ... TFLOPS)
    """
    return measure_kernels("matmul", shapes, **options)


def attention(shapes: Iterable[AttentionShape | str] | str | None = None, **options: Any) -> Rows:
    """Measure attention kernels, in TFLOPS. ``options``: keyword arguments of ``measure_kernels``.

    ``shapes``: AttentionShape or text such as ``b1h16q4096k4096d128c`` (batch, heads, queries, keys, head dimension,
    causal). The default shapes have 16384 tokens in total, in sequences of 512 or more. ``problem``: one or several
    AttentionProblems; the default is the forward pass.

    >>> for row in mamf.attention(["b1h16q4096k4096d128"], kernel="simulated-attention"):
    ...     print(row, f"{row.seconds * 1e3:.1f} ms")
    Measurement(attention b1h16q4096k4096d128 by simulated-attention, burst: ... TFLOPS) 0.2 ms
    """
    return measure_kernels("attention", shapes, **options)


def bandwidth(sizes: Iterable[BandwidthShape | str] | str | None = None, **options: Any) -> Rows:
    """Measure the bandwidth of memory, in TB/s (1e12 bytes read plus written per second). ``options``: keyword
    arguments of ``measure_kernels``.

    ``sizes``: sizes of each array, as BandwidthShape or text such as ``256MiB``. The default sizes range from arrays
    that fit in the cache to arrays that fill half of the memory. ``problem``: BandwidthProblem with the pattern copy
    (default), read, write or triad.

    >>> for row in mamf.bandwidth(["1GiB"], problem=[mamf.BandwidthProblem("copy"), mamf.BandwidthProblem("read")]):
    ...     print(row.problem.pattern, row.shape, f"{row.best_rate:.1f} {row.work.unit}")
    copy 1GiB 3.0 TB/s
    read 1GiB 3.0 TB/s
    """
    return measure_kernels("bandwidth", sizes, **options)


def open_backend_with_measured_traits(backend: str | Backend, device: int) -> Backend:
    opened_backend = open_backend(backend, device) if isinstance(backend, str) else backend
    replace_assumed_traits(opened_backend)
    return opened_backend


# -- arguments of the calls --------------------------------------------------------------------------------------------


def convert_to_tuple(
    name: str, value: Any, value_type: type = str, max_values: int | None = None
) -> tuple[Any, ...] | None:
    """Return one or several values as a tuple, and None for None. ``name``: the name of the argument, for errors.

    Raises UsageError for a value that is not a ``value_type``, an empty list, or more than ``max_values`` values.
    """
    if value is None:
        return None
    values = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else (value,)
    require_nonempty_list(name, values, value_type)
    if max_values is not None and len(values) > max_values:
        raise UsageError(
            f"{name} has {len(values)} values ({', '.join(map(str, values))}), but this call takes one value: call it "
            "once for each value"
        )
    return values


def make_problems_and_shapes(
    backend: Backend,
    operation: Operation[Any, Any],
    shapes: object,
    problem: Any,
    parameters: Mapping[str, Any],
    function_name: str,
    max_values: int | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the problems and the shapes to measure. Make those that the caller did not give from ``parameters`` and,
    for sizes and fields that are not in ``parameters``, from default values.

    - ``shapes``: shapes as objects or texts, or one text with several shapes, separated by blanks.
    - ``parameters``: sizes of the shapes and fields of the problems.
    - ``function_name``: the name of the API's function, for errors.
    - ``max_values``: the maximum number of problems, and of values of one field of a problem; None for any number.

    Raises UsageError for values that are invalid or contradict each other, and TypeError for an unknown parameter.
    """
    sizes, fields = (
        _parse_parameters(get_parameters(operation.shape_type), parameters),
        _parse_parameters(get_parameters(operation.problem_type), parameters),
    )
    keywords = {
        each.keyword or each.name
        for each in (*get_parameters(operation.shape_type).values(), *get_parameters(operation.problem_type).values())
    }
    for name in parameters.keys() - keywords:
        option_names = inspect.signature(measure_kernels).parameters.keys() - {"of", "parameters"}
        raise _make_unknown_keyword_error(function_name, name, sorted(keywords | option_names))
    whole_shapes = convert_to_tuple("shapes", shapes.split() if isinstance(shapes, str) else shapes, object) or ()
    whole_shapes = tuple(operation.parse_shape(each) if isinstance(each, str) else each for each in whole_shapes)
    problems = convert_to_tuple("problem", problem, operation.problem_type, max_values) or ()
    for name, values in fields.items():
        convert_to_tuple(name, values, object, max_values)
    if whole_shapes:
        require_nonempty_list("shapes", whole_shapes, operation.shape_type)
    if (whole_shapes and sizes) or (problems and fields):
        conflict = ("shapes", sizes) if whole_shapes and sizes else ("problem", fields)
        raise UsageError(f"{conflict[0]} cannot be combined with {', '.join(conflict[1])}: give one or the other")
    request = MeasurementRequest(operation, whole_shapes, sizes, fields)
    return problems or request.make_problems(backend), tuple(request.make_labeled_shapes(backend))


def _parse_parameters(
    parameters: Mapping[str, Parameter], values_by_keyword: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Parse the values of those ``parameters`` that have a value in ``values_by_keyword``. Return them by the name of
    the parameter.
    """
    values = {each.name: values_by_keyword.get(each.keyword or each.name) for each in parameters.values()}
    return {name: parameters[name].parse_values(value) for name, value in values.items() if value is not None}
