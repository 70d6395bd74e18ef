"""The plan for attention kernels from the options, and the ceilings that its shares are of."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling, Ceilings, require_usable_ceiling
from mamf.ceilings.search_plan import SearchPlan
from mamf.cli.options.operations import MASKS
from mamf.cli.resuming import contradiction
from mamf.cli.terminal import warn
from mamf.engine.estimate import working_kernels
from mamf.engine.regimes import Burst, Sustained
from mamf.engine.search.finding import Find
from mamf.engine.search.grid import plan_for
from mamf.errors import DeviceError, PluginError, UsageError
from mamf.limits import require_steps
from mamf.logs.records import ceiling_from_record, ceiling_record
from mamf.logs.run_log import RunLog, read_run_log
from mamf.operations.attention.operation import attention_kernel
from mamf.operations.attention.shapes import PRESETS, AttentionProblem, AttentionShape, Preset, equal_widths
from mamf.operations.matmul.operation import problem_for
from mamf.plans import KERNEL_REGIMES, SWEEP, Plan
from mamf.rate import find_rate
from mamf.regime_names import CEILINGS, asked_regimes

_TOKENS = 16384
# A CPU takes seconds for the work of a millisecond on an accelerator.
_TOKENS_OF_CPU = 1024
_DEFAULT = Preset(equal_widths(128), (1024, 4096, 16384), causal=(False,))


def shapes_from(options: argparse.Namespace, tokens: int = _TOKENS) -> tuple[AttentionShape, ...]:
    """Every combination of the sizes, with ``tokens`` in total if no batch is given. Raises UsageError for heads that
    cannot share kv heads.
    """
    preset = preset_of(options)
    found: dict[AttentionShape, None] = {}
    sizes: tuple[Sequence[Any], ...] = (
        options.head_dims or preset.head_dims,
        options.heads or (preset.heads,),
        options.kv_heads or (preset.kv_heads,),
        MASKS[options.causal] if options.causal else preset.causal,
        options.window or (None,),
        options.seq_lens or preset.seq_lens,
        options.query_lens or preset.query_lens or (None,),
        options.batch or (preset.batch,),
    )
    require_steps(*map(len, sizes))
    for dims, heads, kv_heads, causal, window, keys, queries, batch in itertools.product(*sizes):
        heads = heads or max(1, preset.hidden // dims.keys)
        batch = batch or max(1, tokens // keys)
        lengths = (queries or keys, keys)
        found[AttentionShape(batch, heads, kv_heads or heads, *lengths, dims.keys, dims.values, causal, window)] = None
    return tuple(found)


def preset_of(options: argparse.Namespace) -> Preset:
    return PRESETS[options.preset] if options.preset else _DEFAULT


def kernels_from(options: argparse.Namespace, backend: Backend) -> Sequence[str] | None:
    """The named kernels, or those of the preset that are available, with a warning for others; None for all."""
    of_preset = preset_of(options).kernels
    if options.kernel or not of_preset:
        return options.kernel  # type: ignore[no-any-return]
    reasons = {name: attention_kernel(name).unavailable(backend) for name in of_preset}
    able = [name for name in of_preset if reasons[name] is None]
    for name in of_preset:
        if able and reasons[name]:
            warn(f"{name} is left out: {reasons[name]}")
    return able or of_preset


def problems_from(options: argparse.Namespace, backend: Backend) -> tuple[AttentionProblem, ...]:
    dtypes = [problem_for(backend, name).dtype for name in options.dtype or [None]]
    return tuple(
        AttentionProblem(dtype, direction, "normal", options.seed or 0, options.backward_count or "hardware", sparse)
        for dtype in dict.fromkeys(dtypes)
        for direction in dict.fromkeys(options.direction or preset_of(options).directions or ["fwd"])
        for sparse in dict.fromkeys(options.sparsity or [0.0])
    )


def plan_from(options: argparse.Namespace, backend: Backend, kernels: Sequence[str]) -> Plan:
    return Plan(
        SWEEP,
        "attention",
        problems_from(options, backend),
        tuple(kernels),
        shapes_from(options, tokens_of(backend)),
        asked_regimes(options.regime, KERNEL_REGIMES[:1], KERNEL_REGIMES),
        options.precision or Plan.precision,
        options.time_limit,
        options.budget,
        not options.no_flush,
    )


def tokens_of(backend: Backend) -> int:
    return _TOKENS if backend.is_accelerator else _TOKENS_OF_CPU


#: Seconds to find the ceilings of a dtype, by their number: burst alone, or with sustained.
_SECONDS = {1: 12.0, 2: 57.0}
#: The share of a budget for all searches together: kernels need time too.
_SHARE_OF_BUDGET = 0.5


def given_ceilings(
    options: argparse.Namespace, needed: Collection[tuple[str, str]], backend: Backend
) -> dict[tuple[str, str], Ceiling]:
    """The ceilings in the logs of ``--ceiling``. Raises UsageError for a log without any and for a missing one, and
    IncomparableError for another card.
    """
    found: dict[tuple[str, str], Ceiling] = {}
    for path in options.ceiling or ():
        log = read_run_log(path)
        if not log.all_ceilings:
            raise UsageError(f"{path} holds no ceiling: give a log of 'mamf find'")
        for ceiling in log.all_ceilings.values():
            require_usable_ceiling(ceiling, backend)
        found |= log.all_ceilings
    for dtype, regime in needed if options.ceiling else ():
        if find_rate(found, dtype, regime) is None:
            raise UsageError(f"no {dtype} {regime} ceiling in {', '.join(map(str, options.ceiling))}")
    return found


def require_repeated_ceilings(options: argparse.Namespace, log: RunLog, before: Plan, given: Ceilings) -> None:
    """Raises LogMismatchError for ceilings that differ from the log's."""
    held, none = log.all_ceilings, "no ceiling"
    own = "a search for its own ceiling" if before.searches else "a given ceiling" if held else none
    if options.no_ceiling and own != none:
        raise contradiction(options, "no_ceiling", own, True)
    if given and not held:
        raise contradiction(options, "ceiling", own, options.ceiling)
    for key in given.keys() & held.keys():
        if ceiling_record(given[key]) != ceiling_record(held[key]):
            own = f"a {' '.join(key)} ceiling of {held[key].tflops:.6g} TFLOPS at {held[key].shape}"
            raise contradiction(options, "ceiling", own, options.ceiling)


def add_searches(plan: Plan, backend: Backend) -> Plan:
    """Add a search for the ceilings of each dtype."""
    regimes = CEILINGS if Sustained.name in plan.regimes else (Burst.name,)
    searches = []
    for dtype in dict.fromkeys(problem.dtype for problem in plan.problems):
        problem = problem_for(backend, dtype)
        try:
            default = working_kernels(backend, problem)[0].name
        except (DeviceError, PluginError) as error:
            warn(f"no {dtype} ceiling can be measured, so its rows have no shares (MAMFU): {error}")
            continue
        search, _ = plan_for(backend, problem, [default], regimes=regimes, budget_seconds=_SECONDS[len(regimes)])
        searches.append(search)
    return replace(plan, searches=tuple(searches))


def limit_budgets(budget: float | None, searches: Sequence[SearchPlan]) -> list[SearchPlan]:
    """The searches, limited to the time that the run has for them."""
    if budget is None:
        return list(searches)
    part = _SHARE_OF_BUDGET * budget / max(1, len(searches))
    return [replace(search, budget_seconds=min(part, search.budget_seconds)) for search in searches]


def budget_warning(search: SearchPlan) -> str | None:
    """A warning if the budget shortens a search."""
    usual = _SECONDS[len(search.regimes)]
    if search.budget_seconds >= usual:
        return None
    return (
        f"--budget leaves {search.budget_seconds:.3g} of {usual:.0f} s to the search for the {search.problem.dtype} "
        "ceiling: it may be percents too low, and shares too high"
    )


def found_ceilings(find: Find, regimes: Sequence[str]) -> dict[tuple[str, str], Ceiling]:
    """The confirmed ceilings in these regimes, as the log stores them."""
    device = {"device": asdict(find.backend.info)}
    kept = [ceiling_record(each) for regime, each in find.ceilings.items() if regime in regimes]
    return {(each.dtype, each.regime): each for each in (ceiling_from_record(record, device) for record in kept)}


def missing_shares(dtype: str, regime: str, plan: SearchPlan) -> str:
    """A warning for rows whose ceiling was not confirmed."""
    return (
        f"no {dtype} {regime} ceiling was confirmed in {plan.budget_seconds:.3g} s, so its rows have no shares "
        "(MAMFU): --resume continues the search (use a longer --budget), or start a new run with --ceiling LOG"
    )
