"""``mamf sweep --operation NAME``: kernels of any operation over shapes. Other commands build on its session
and on its plan.
"""

from __future__ import annotations

import argparse
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mamf.backend import Backend
from mamf.ceilings.search_plan import SearchPlan
from mamf.cli import attention_plans
from mamf.cli.interruption import Interruption
from mamf.cli.resuming import Resumed, asked_budget, flag, require_same_kernels
from mamf.cli.session import Session, measure
from mamf.cli.terminal import say
from mamf.engine.estimate import kernels_seconds
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.engine.strategies.shapes import Sweep
from mamf.errors import UsageError
from mamf.kernel import AnyKernel
from mamf.limits import require_known, require_steps
from mamf.measurement import Measurement
from mamf.operation import Operation
from mamf.operations.attention.operation import Attention
from mamf.plans import KERNEL_REGIMES, SWEEP, Plan, StepKey
from mamf.plugins.discovery import kernel_of, operation
from mamf.plugins.selection import choose_kernels, find_operation
from mamf.regime_names import asked_regimes
from mamf.report.text import counted

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


def say_plan(plan: Plan, steps: Sequence[StepKey], backend: Backend, searches: Sequence[SearchPlan] = ()) -> None:
    """Print a plan, for a dry run. ``steps``, ``searches``: those that are not done."""
    say(f"device: {backend.info.name} ({backend.name}:{backend.index})")
    say(f"kernels: {', '.join(plan.kernels)}")
    say(f"shapes: {len(plan.shapes)}, {counted(len(steps), 'row')} in {', '.join(plan.regimes)}")
    for search in searches:
        names = " and ".join(search.regimes)
        say(f"ceilings: {search.problem.dtype} {names}, found first in at most {search.budget_seconds:.0f} s")
    seconds = kernels_seconds(plan, steps, backend)
    seconds += sum(search.budget_seconds for search in searches)
    if plan.budget_seconds is not None and (plan.confirms or seconds >= plan.budget_seconds):
        say(f"time: at most {plan.budget_seconds:.0f} s, the budget")
    else:
        say(f"time: about {seconds:.0f} s, and more to prepare and verify the rows")


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


def run(options: argparse.Namespace) -> int:
    return run_session(options, KernelsSession)


def run_session(options: argparse.Namespace, session: Callable[..., KernelsSession]) -> int:
    """Measure kernels of ``options.operation``. Reports wrong options before a device is opened."""
    of = operation(options.operation)
    asked_for(of, options)
    shapes_from(of, options)
    return measure(options, partial(session, of, options))


class KernelsSession(Session):
    """Measures kernels of one operation."""

    kind = SWEEP

    def __init__(
        self, of: AnyOperation, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None
    ) -> None:
        self.command = options.command
        self.of, self.operation = of, of.name
        super().__init__(options, interruption, resumed)
        if getattr(options, "share", None) and of.is_of_links:
            raise UsageError(
                f"{of.name} use links that all devices share, so that they would slow each other down: leave --devices "
                "out, or use 'mamf node'"
            )
        self.read_options()
        self.kernels = self.opened_kernels()
        self.plan = self.make_plan()
        self.rows = list(self.log.lasting) if self.log else []
        self.known_ceilings = dict(self.log.known_ceilings) if self.log else {}
        self.held = {self.step_of(row) for row in self.rows if self.is_of_step(row)}
        self.sweep = self.strategy()
        # A library may have swallowed the exception during its import.
        interruption.check()

    def read_options(self) -> None:
        """Read options that depend on the device."""

    def opened_kernels(self) -> list[tuple[str, AnyKernel]]:
        """The kernels, with their names in the options."""
        if self.before is None:
            return choose_kernels(self.of, self.backend, self.asked_kernels())
        if self.options.kernel:
            asked = (kernel_of(self.of, name).name for name in self.options.kernel)
            require_same_kernels(self.options, [kernel_of(self.of, name).name for name in self.before.kernels], asked)
        return choose_kernels(self.of, self.backend, self.before.kernels)

    def asked_kernels(self) -> Sequence[str] | None:
        """The names in the options; None for all kernels."""
        return self.options.kernel  # type: ignore[no-any-return]

    def make_plan(self) -> Plan:
        plan = super().make_plan()
        if self.before is None:
            share = getattr(self.options, "share", None)
            return plan.dealt(*share) if share else plan
        budget = asked_budget(self.options) or (plan.budget_seconds if plan.confirms else None)
        return replace(plan, kernels=tuple(name for name, _ in self.kernels), budget_seconds=budget)

    def new_plan(self) -> Plan:
        return plan_from(self.of, self.options, self.backend, self.kernels)

    def strategy(self) -> Sweep | KernelsSweep:
        return KernelsSweep(self.plan, [each for _, each in self.kernels], self.backend, held=self.held)

    def wanted_ceilings(self) -> list[tuple[str, str]]:
        """The ceilings for the shares of the rows, by dtype and regime."""
        dtypes = dict.fromkeys(problem.dtype for problem in self.plan.problems)
        return [(dtype, regime) for dtype in dtypes for regime in self.plan.regimes]

    def is_of_step(self, row: Measurement) -> bool:
        return not row.phase and not row.is_reference

    def step_of(self, row: Measurement) -> StepKey:
        """The step of the plan of a row; the plan names kernels as in the options."""
        asked = {each.name: name for name, each in self.kernels}
        library = row.kernel.partition("[")[0]  # of an algorithm
        name = asked.get(row.kernel) or asked.get(library, row.kernel)
        return self.plan.step(row.regime, row.problem, row.shape, name)

    def dry_run(self) -> int:
        say_plan(self.plan, self.plan.steps(self.held), self.backend)
        return 0

    def kernel_name(self) -> str:
        return " ".join(self.plan.kernels)

    def label(self) -> str:
        dtypes = dict.fromkeys(problem.dtype for problem in self.plan.problems)
        return "-".join([*([] if self.command == self.of.name else [self.of.name]), *dtypes, *self.plan.regimes])

    def count_due(self) -> int | None:
        return len(self.plan.steps(self.held))

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        self.sweep.on_phase = on_phase
        return self.sweep.results()

    def left_out(self) -> bool:
        return bool(self.sweep.left_out)

    def count_left(self) -> int:
        return len(self.plan.steps({self.step_of(row) for row in self.rows if self.is_of_step(row)}))
