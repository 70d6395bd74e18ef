"""Implement the command ``mamf reproduce``: measure a published figure (from a log, a table or a paper) on this
machine, and say whether the result agrees with it. A figure to check is called a claim.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from mamf.cli.planning import AnyOperation, parse_field_texts
from mamf.cli.session import Session, print_plan, run_session
from mamf.cli.terminal import add_device_options, add_run_options, add_shared_options, warn
from mamf.cli.watching import FAILURE_EXIT_CODE, REGRESSION_EXIT_CODE, SignalHandler
from mamf.errors import (
    UnavailableError,
    UnknownNameError,
    UsageError,
    parse_share,
    require_known_names,
    shorten_value,
)
from mamf.kernel import AnyKernel
from mamf.operation import MeasurementRequest, get_parameters, make_operation_plan
from mamf.plans import (
    BURST,
    CLASSIC,
    DEFAULT_BUDGET_SECONDS,
    REGIME_NAMES,
    REPRODUCE,
    SUSTAINED,
    Claim,
    Plan,
    ReproduceOptions,
    RowKey,
)
from mamf.plugins.discovery import (
    OPERATION_GROUP,
    choose_kernels,
    find_entry_points_by_name,
    is_class_path,
    list_kernel_names,
    make_operation,
)
from mamf.statistics import Interval

if TYPE_CHECKING:
    from mamf.kinds.driver import ResumedLog
    from mamf.logs.run_log import RunLog

EXAMPLES = """examples:
  mamf reproduce results/nvidia-h200/LOG.jsonl                 the best row of each problem and regime
  mamf reproduce --claim "1613 TFLOPS flash-attn-4 b1h16q16384d128c fwd"
  mamf reproduce https://example.org/LOG.jsonl --top 5         a log on the web: five rows of each problem and regime
  mamf reproduce LOG.jsonl --kernel my_package.kernels:Mine    name a kernel that is not part of mamf
docs/reproducing.md says how mamf decides whether a figure holds.
"""
_MAX_CLAIM_CHARACTERS = 500
_CLAIM_FORM = "RATE TFLOPS KERNEL SHAPE FIELDS, such as 1613 TFLOPS flash-attn-4 b1h16q16384d128c fwd"
_CLAIMED_RATE_PATTERN = re.compile(r"\d{1,9}(?:\.(\d{1,9}))?", re.ASCII)
#: For each unit that a claim may use: the unit in which mamf stores the rate, and the factor that converts the claimed
#: rate to the stored unit.
_STORED_UNITS: Mapping[str, tuple[str, float]] = {
    f"{prefix}{unit}": (f"T{unit}", factor)
    for unit in ("FLOPS", "B/s")
    for prefix, factor in {"G": 1e-3, "T": 1.0, "P": 1e3}.items()
}
_CLAIM_REGIMES = (BURST, SUSTAINED, CLASSIC)


def add_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument(
        "source",
        nargs="?",
        metavar="LOG",
        help="run log with the figures to reproduce, or its https URL",
    )
    source.alternatives = ("--claim", "--requeue", "--resume")  # type: ignore[attr-defined]
    parser.add_argument(
        "--claim",
        nargs="+",
        metavar="TEXT",
        help="figures to check, each as 'RATE UNIT KERNEL SHAPE FIELDS' (dtype, direction, regime), such as "
        "'800 TFLOPS torch.mm 4096x4096x4096 bf16'",
    )
    add_shared_options(
        parser,
        "--top",
        default=1,
        help="number of best rows to check per problem and regime of LOG, or 'all' (default: 1)",
    )
    parser.add_argument(
        "--tolerance",
        type=parse_share,
        metavar="SHARE",
        help="relative difference up to which a figure counts as reproduced (default: 2%%)",
    )
    add_shared_options(parser, "--kernel", default_text="the kernels of the log that are installed here")
    add_device_options(parser)
    add_run_options(parser, budget_default="57s")
    add_shared_options(parser, "--format", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    has_one_source = bool(options.source) + bool(options.claim) == (options.resume is None)
    if not (has_one_source or options.crashed_run) or options.top == 0:
        raise UsageError(
            "give exactly one of LOG, --claim and --resume"
            if not (has_one_source or options.crashed_run)
            else "--top 0 checks no row: give a number of at least 1"
        )
    return run_session(options, ReproduceSession)


def _read_claims(options: argparse.Namespace) -> tuple[str, ReproduceOptions, RunLog | None]:
    """Read the claims (figures to check) from --claim or from a run log. Return the name of their operation, the claims
    with the options to measure them, and the run log, which is None for --claim.

    The problem of a claim from --claim is a dict with only the fields that the claim names. ``open_kernels`` completes
    the problem when the device is known. Raises UsageError for an invalid claim, and RunLogError for an unreadable log.
    """
    from mamf.cli.reading import open_as_local_path, read_log
    from mamf.logs.judging import make_reproduce_options

    if options.claim:
        claims = [_parse_claim(text) for text in options.claim]
        if len(operations := {name for name, _ in claims}) > 1:
            raise UsageError(
                f"--claim has claims about several operations ({', '.join(sorted(operations))}): give claims "
                "about one operation only"
            )
        return claims[0][0], ReproduceOptions(tuple(claim for _, claim in claims), "--claim"), None
    with open_as_local_path(options.source) as file:
        log = read_log(file)
        return log.plan.operation, make_reproduce_options(log, options.top), log


def _parse_claim(text: str) -> tuple[str, Claim]:
    """Parse one claim, such as "1613 TFLOPS flash-attn-4 b1h16q16384d128c fwd", and return the name of its operation
    and the claim. Raises UsageError if ``text`` is not a claim.
    """
    words, shown = text.split(), f"--claim {shorten_value(text)!r}"
    if len(text) > _MAX_CLAIM_CHARACTERS or len(words) < 4:
        raise UsageError(f"{shown} is not a claim: write {_CLAIM_FORM}")
    rate_text, claimed_unit, kernel, shape_text, *field_texts = words
    match = _CLAIMED_RATE_PATTERN.fullmatch(rate_text)
    if match is None or not float(rate_text):
        raise UsageError(f"{shown} is not a claim, because {shorten_value(rate_text)!r} is not a rate above 0")
    require_known_names(("unit", claimed_unit, _STORED_UNITS))
    unit, factor = _STORED_UNITS[claimed_unit]
    operation = _find_operation_of_claim(kernel, shape_text)
    if (
        unit_of_operation := operation.problem_type().compute_work(shape := operation.parse_shape(shape_text)).unit
    ) != unit:
        raise UsageError(f"{shown} must be in {unit_of_operation}, the unit of {operation.name}")
    fields = [word if "=" in word else f"{_find_field_with_value(word, operation)}={word}" for word in field_texts]
    regime = next((each for each in _CLAIM_REGIMES if f"regime={each}" in fields), BURST)
    values_by_field = parse_field_texts(operation, [each for each in fields if each != f"regime={regime}"])
    rate, rounding_error = float(rate_text) * factor, 0.5 * factor * 10 ** -len(match[1] or "")
    key = RowKey(regime, {name: values[0] for name, values in values_by_field.items()}, shape, kernel)
    return operation.name, Claim(key, rate, Interval(rate - rounding_error, rate + rounding_error, 1.0))


def _find_field_with_value(word: str, operation: AnyOperation) -> str:
    """Find the field of the operation's problem that has ``word`` among its allowed values, and return the field's
    name, such as "direction" for "fwd".

    Return "regime" if ``word`` is the name of a regime. If no field lists ``word``, it must be a dtype: return "dtype".
    """
    if word in _CLAIM_REGIMES:
        return "regime"
    return next(
        (each.name for each in get_parameters(operation.problem_type).values() if word in each.choices), "dtype"
    )


def _find_operation_of_claim(kernel_name: str, shape_text: str) -> AnyOperation:
    """Return the operation that can parse ``shape_text`` as a shape and that has a kernel called ``kernel_name``. For a
    kernel that is given as package.module:Class, return the first operation that can parse ``shape_text``.

    Raises UsageError if no operation can parse the shape, and UnknownNameError if no such operation has the kernel.
    """
    operations, kernel_names = list[AnyOperation](), set[str]()
    for operation in map(make_operation, find_entry_points_by_name(OPERATION_GROUP)):
        with suppress(UsageError):
            operation.parse_shape(shape_text)
            operations.append(operation)
    for operation in operations:
        if is_class_path(kernel_name) or kernel_name.partition("[")[0] in list_kernel_names(operation):
            return operation
        kernel_names |= {*list_kernel_names(operation)}
    if not operations:
        raise UsageError(
            f"{shorten_value(shape_text)!r} is not a shape of any operation: write 4096x4096x4096 for matmul"
        )
    raise UnknownNameError("kernel", kernel_name, kernel_names)


class ReproduceSession(Session):
    """A run of ``mamf reproduce``: it measures the kernels of claims (published figures) here, and compares each claim
    with the new figure.

    ``requested_claims``: the claims, and the options to measure them. ``source_log``: the log with the claims, or None.
    ``has_omitted_claims``: whether mamf left out claims whose kernels cannot run here.
    """

    kind = REPRODUCE
    has_omitted_claims = False

    def __init__(self, options: argparse.Namespace, signal_handler: SignalHandler, resumed: ResumedLog | None) -> None:
        if resumed:  # Read no claims from the options, because the resumed log contains them.
            operation_name = resumed.log.plan.operation
        else:
            operation_name, self.requested_claims, self.source_log = _read_claims(options)
        super().__init__(MeasurementRequest(make_operation(operation_name)), options, signal_handler, resumed)

    def open_kernels(self) -> list[tuple[str, AnyKernel]]:
        """Return the kernels of the claims that can run here, each with its name on the command line.

        Remove the claims of kernels that cannot run here from ``requested_claims``. Raises UnavailableError if no claim
        is left.
        """
        from mamf.logs.compare import find_blocking_differences

        if self.resumed_plan:
            return choose_kernels(self.operation, self.backend, self.resumed_plan.kernels)
        given_kernels = choose_kernels(self.operation, self.backend, self.options.kernel) if self.options.kernel else []
        kernels_by_name = {
            name: next((each for each in given_kernels if name in (each[0], each[1].name)), None)
            or self._open_installed_kernel(name)
            for name in dict.fromkeys(claim.step[3] for claim in self.requested_claims.claims)
        }
        header = self.source_log.header if self.source_log else {}
        has_cycles = bool(header) and any(
            difference.is_card_difference
            for difference in find_blocking_differences(header, {**header, "device": asdict(self.backend.info)})
        )
        claims = list[Claim]()
        for claim in self.requested_claims.claims:
            regime, problem, shape, name = claim.step
            problem = self.operation.make_problem(self.backend, problem) if isinstance(problem, dict) else problem
            if kernel := kernels_by_name[name]:
                key, cycles = (
                    RowKey(regime, problem, shape, kernel[1].name),
                    claim.cycles_used if has_cycles else None,
                )
                claims.append(replace(claim, step=key, cycles_used=cycles))
        if not claims:
            raise UnavailableError(
                f"cannot reproduce {self.requested_claims.source}, because none of its kernels can run here: name "
                "another kernel with --kernel"
            )
        self.has_omitted_claims = len(claims) < len(self.requested_claims.claims)
        self.requested_claims = replace(self.requested_claims, claims=tuple(claims))
        return list({each[1].name: each for each in kernels_by_name.values() if each}.values())

    def _open_installed_kernel(self, name: str) -> tuple[str, AnyKernel] | None:
        """Return ``name`` and the kernel with this name. If the kernel is not installed or cannot run here, warn and
        return None.

        mamf never imports a package.module:Class just because a log names this class, because a stranger may have
        written the log. Users who trust the class can select it with --kernel.
        """
        if is_class_path(name) or name.partition("[")[0] not in list_kernel_names(self.operation):
            path = name if is_class_path(name) else "package.module:Class"
            warn(f"kernel {name} is not installed, so mamf leaves out its claims: add --kernel {path} if you trust it")
            return None
        try:
            return choose_kernels(self.operation, self.backend, [name])[0]
        except (UnavailableError, UnknownNameError) as error:
            warn(f"{error}; mamf leaves out the claims about kernel {name}")
            return None

    def make_new_plan(self) -> Plan:
        options, source_plan, keys = (
            self.options,
            self.source_log and self.source_log.plan,
            [each.step for each in self.requested_claims.claims],
        )
        return make_operation_plan(
            self.operation,
            (name for name, _ in self.kernels),
            dict.fromkeys(key.problem for key in keys),
            dict.fromkeys(key.shape for key in keys),
            (name for name in REGIME_NAMES if name in {key.regime for key in keys}),
            REPRODUCE,
            precision=source_plan.precision if source_plan else Plan.precision,
            seconds=source_plan.seconds if source_plan else None,
            budget_seconds=options.budget or DEFAULT_BUDGET_SECONDS,
            flush=source_plan.flush if source_plan else Plan.flush,
            options=replace(self.requested_claims, tolerance=options.tolerance or self.requested_claims.tolerance),
        )

    def make_plan_to_compare(self, logged_plan: Plan) -> Plan:
        return replace(
            logged_plan,
            options=replace(logged_plan.options, tolerance=self.options.tolerance or logged_plan.options.tolerance),
        )

    def print_plan(self) -> None:
        from mamf.logs.judging import judge_claims

        print_plan(
            self.plan,
            self.kernels,
            [
                each.claim.step
                for each in judge_claims(self.plan.options, self.measured_run.rows)
                if each.measured_row is None
            ],
            self.backend,
        )

    def choose_exit_code(self, run_exit_code: int) -> int:
        from mamf.logs.judging import NOT_MEASURED, judge_claims

        judged_claims = judge_claims(self.plan.options, self.measured_run.rows, self.measured_run.header)
        if run_exit_code not in (0, FAILURE_EXIT_CODE) or not any(each.is_slower for each in judged_claims):
            return run_exit_code or (
                self.has_omitted_claims or any(each.verdict == NOT_MEASURED for each in judged_claims)
            )
        return REGRESSION_EXIT_CODE
