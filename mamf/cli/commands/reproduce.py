"""``mamf reproduce``: measures a figure of a log, a table or a paper again, and says whether it is true here."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from dataclasses import replace

from mamf.cli.commands.kernels_sweep import AnyOperation, KernelsSession, asked_for, say_plan
from mamf.cli.interruption import Interruption
from mamf.cli.reading import as_file, read_log
from mamf.cli.resuming import Resumed
from mamf.cli.session import measure
from mamf.cli.terminal import warn
from mamf.dtypes import ALIASES, OPERAND_DTYPES
from mamf.engine.strategies.reproduce import ReproduceSweep
from mamf.errors import LogMismatchError, UnavailableError, UnknownNameError, UsageError
from mamf.kernel import AnyKernel
from mamf.limits import shorten
from mamf.logs.legacy import read_legacy_or_none
from mamf.logs.reproducing import (
    DEFAULT_KERNEL,
    NOT_MEASURED,
    claims_of_finder,
    claims_of_log,
    judge_claims,
)
from mamf.operations.attention.shapes import DIRECTIONS
from mamf.operations.matmul.selection import kernel_for
from mamf.plans import DEFAULT_BUDGET_SECONDS, MATMUL, REPRODUCE, Claim, Plan, ReproduceOptions
from mamf.plugins.discovery import OPERATIONS, find_registered, is_path, kernel_names, operation
from mamf.plugins.selection import choose_kernels
from mamf.regime_names import BURST, CLASSIC, NAMES, SUSTAINED
from mamf.statistics import Interval

_SLOWER, _UNFINISHED = 3, 1
#: Seconds with --explain, half a minute of them for the warm-up of classic; characters of a claim.
_EXPLAINING_SECONDS, _MOST_CHARACTERS = 120.0, 500
_MEASURED = (BURST, SUSTAINED, CLASSIC)
#: As papers write it: 1613 TFLOPS, 1,613.5 TFLOPS, 1.6 PFLOP/s, 3.9 TB/s. A separate word: neither -5 nor 5+-1.
_RATE = re.compile(r"(?<!\S)(\d{1,9}(?:\.(\d{1,9}))?)\s*([PTG])(FLOPS?|B)(?:/s)?(?![\w/])", re.ASCII | re.I)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)", re.ASCII)


def run(options: argparse.Namespace) -> int:
    if (bool(options.source) + bool(options.claim) != 1 and not options.resume) or options.top == 0:
        raise UsageError("name one thing to reproduce: a log, with a --top from 1, or figures with --claim")
    return measure(options, lambda interruption, resumed: ReproduceSession(options, interruption, resumed))


def _read_claims(options: argparse.Namespace) -> tuple[str, ReproduceOptions, Plan | None]:
    # The operation, its claims, and the plan of the run log that they are from. Problems that the device has yet to
    # complete are fields by name. Raises UsageError or RunLogError.
    if options.claim:
        found = [_claim_in_words(text) for text in options.claim]
        if len({name for name, _ in found}) > 1:
            raise UsageError("the claims are of several operations: reproduce those of one at a time")
        return found[0][0], ReproduceOptions(tuple(claim for _, claim in found), "--claim"), None
    with as_file(options.source) as file:
        if imported := read_legacy_or_none(file):
            return MATMUL, claims_of_finder(file.name, imported, options.top), None
        log = read_log(file)
        return log.plan.operation, claims_of_log(log, options.top), log.plan


def _claim_in_words(text: str) -> tuple[str, Claim]:
    # Such as 1613 TFLOPS flash-attn-4 b1h16q16384d128c fwd.
    shown, text = shorten(text), _THOUSANDS.sub("", text)
    rates = [each for each in _RATE.finditer(text[:_MOST_CHARACTERS]) if float(each[1])]
    if len(rates) != 1 or len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{shown!r} names {len(rates)} rates: write one above 0, such as 1613 TFLOPS")
    words = (text[: rates[0].start()] + text[rates[0].end() :]).split()
    fields = [
        f"direction={word}" if word in DIRECTIONS else word for word in words if "=" in word or word in DIRECTIONS
    ]
    dtypes, regimes = (
        [word for word in words if word.lower() in known] for known in ((*ALIASES, *OPERAND_DTYPES, "fp8"), _MEASURED)
    )
    shapes = {word: found for word in words if (found := _operations_of(word))}
    kernels = [word for word in words if "=" not in word and word not in (*shapes, *dtypes, *regimes, *DIRECTIONS)]
    named = {"kernel": kernels, "shape": [*shapes], "regime": regimes or [BURST], "dtype": dtypes or [""]}
    if wrong := next(((what, given) for what, given in named.items() if len(given) != 1), None):
        what, given = wrong
        others = f", not {' and '.join(map(shorten, given))}" if given else ""
        raise UsageError(f"{shown!r} names {len(given)} {what}s: write one {what}{others}")
    (kernel,), ((written, operations),) = kernels, shapes.items()
    if not (having := [of for of in operations if is_path(kernel) or _matching_kernels(of, kernel)]):
        raise UnknownNameError("kernel", kernel, {name for of in operations for name in kernel_names(of)})
    of = having[0]
    problem = {name: each[0] for name, each in asked_for(of, argparse.Namespace(dtype=dtypes, set=fields)).items()}
    (number, decimals, prefix, unit), shape = rates[0].groups(), of.parse_shape(written)
    scale, counted = {"P": 1e3, "T": 1.0, "G": 1e-3}[prefix.upper()], of.problem_type().work(shape).unit
    if (unit.upper() == "B") != (counted == "TB/s"):
        raise UsageError(f"{shown!r}: the rate of {of.name} is in {counted}")
    step = (named["regime"][0], problem, shape, kernel)
    rate, half_digit = float(number) * scale, 0.5 * 10 ** -len(decimals or "") * scale
    return of.name, Claim(step, rate, Interval(rate - half_digit, rate + half_digit, 1.0))


def _operations_of(shape: str) -> list[AnyOperation]:
    # Those that read a word as a shape.
    found = []
    for of in map(operation, find_registered(OPERATIONS)):
        with suppress(UsageError):
            found += [of] if of.parse_shape(shape) else []
    return found


def _matching_kernels(of: AnyOperation, name: str, is_whole: bool = False) -> list[str]:
    # The kernel of this name, else those whose names begin with it: flash-attn may be any of three.
    names = [each for each in kernel_names(of) if each.startswith(name.partition("[")[0]) and not is_path(name)]
    return [name] if name.partition("[")[0] in names else [] if is_whole else names


class ReproduceSession(KernelsSession):
    """Measures claims again, and compares both figures of each."""

    kind = REPRODUCE

    def __init__(self, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None) -> None:
        if resumed:  # the log holds the claims
            name = resumed.log.plan.operation
        else:
            name, self.asked, self.source_plan = _read_claims(options)
        super().__init__(operation(name), options, interruption, resumed)

    def opened_kernels(self) -> list[tuple[str, AnyKernel]]:
        # Those of the claims that can run here, and those that an ambiguous name may mean too.
        if self.before:
            return choose_kernels(self.of, self.backend, self.before.kernels)
        given = choose_kernels(self.of, self.backend, self.options.kernel) if self.options.kernel else []
        claims, meant = list[Claim](), dict[str, list[tuple[str, AnyKernel]]]()
        for claim in self.asked.claims:
            regime, problem, shape, name = claim.step
            problem = self.of.problem_for(self.backend, problem) if isinstance(problem, dict) else problem
            name = kernel_for(self.backend, problem).name if name == DEFAULT_KERNEL else name
            if name not in meant:
                meant[name] = [one for one in given if name in (one[0], one[1].name)] or self._installed(name)
            claims += [replace(claim, step=(regime, problem, shape, kernel.name)) for _, kernel in meant[name][:1]]
        if not claims:
            raise UnavailableError(f"no kernel of {self.asked.source} can run here, so nothing is reproduced")
        self.asked = replace(self.asked, claims=tuple(claims))
        return list({kernel.name: (name, kernel) for each in meant.values() for name, kernel in each}.values())

    def _installed(self, name: str) -> list[tuple[str, AnyKernel]]:
        # The kernels that a name may mean; none, with a warning, if it cannot run here. Nothing is imported because a
        # log names it: paths are given by --kernel.
        found, names = list[tuple[str, AnyKernel]](), _matching_kernels(self.of, name, not self.options.claim)
        if len(names) > 1 and not self.options.explain:
            raise UsageError(f"{name} may be {', '.join(names)}: name one, or add --explain to measure each")
        for each in names:
            try:
                found += choose_kernels(self.of, self.backend, [each])
            except (UnavailableError, UnknownNameError) as error:
                warn(f"{error}; its claims are left out")
        if not names:
            path = name if is_path(name) else "package.module:Class"
            warn(f"kernel {name} is not installed, so its claims are left out: --kernel {path} names a class you trust")
        return found

    def new_plan(self) -> Plan:
        asked, before, steps = self.options, self.source_plan, [claim.step for claim in self.asked.claims]
        return Plan(
            REPRODUCE,
            self.of.name,
            tuple(dict.fromkeys(step[1] for step in steps)),
            tuple(name for name, _ in self.kernels),
            tuple(dict.fromkeys(step[2] for step in steps)),
            tuple(name for name in NAMES if name in {step[0] for step in steps}),
            before.precision if before else Plan.precision,
            before.seconds if before else None,
            asked.budget or (_EXPLAINING_SECONDS if asked.explain else DEFAULT_BUDGET_SECONDS),
            before.flush if before else Plan.flush,
            options=replace(self.asked, tolerance=asked.tolerance or self.asked.tolerance, explains=asked.explain),
        )

    def plan_to_compare(self, before: Plan) -> Plan:
        given, held = self.options, before.options
        asked = _read_claims(given)[1] if given.source or given.claim else held
        # A log lacks claims that could not run.
        if asked.source != held.source or {each.rate for each in held.claims} - {each.rate for each in asked.claims}:
            remedy = "leave LOG and --claim out, or start a new log"
            raise LogMismatchError(f"{given.resume} holds other claims, of {held.source}: {remedy}")
        tolerance = given.tolerance or held.tolerance
        return replace(before, options=replace(held, tolerance=tolerance, explains=given.explain))

    def strategy(self) -> ReproduceSweep:
        return ReproduceSweep(self.plan, [each for _, each in self.kernels], self.backend, rows=list(self.rows))

    def dry_run(self) -> int:
        steps = [each.claim.step for each in judge_claims(self.plan.options, self.rows) if each.here is None]
        say_plan(self.plan, steps, self.backend, self.devices)
        return 0

    def count_due(self) -> int | None:
        return self.count_left() or None

    def count_left(self) -> int:
        return sum(each.here is None for each in judge_claims(self.plan.options, self.rows))

    def run(self) -> int:
        code, judged = super().run(), judge_claims(self.plan.options, self.rows)
        if code not in (0, _UNFINISHED) or not any(each.is_slower for each in judged):
            return code or any(each.verdict == NOT_MEASURED for each in judged)
        return _SLOWER
