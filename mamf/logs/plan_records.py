"""Converts plans to and from the JSON values in run logs.

A sweep of products by one kernel names its ``problem`` and leaves the kernel to the header; a find of products is a
search. All others name their ``operation``, ``problems`` and ``kernels``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any

from mamf.ceilings.search_plan import search_from_record, search_record
from mamf.operations.unknown import AnyOperation, Unknown, operation_called
from mamf.plans import (
    FIND,
    GUARD,
    MATMUL,
    REPRODUCE,
    SWEEP,
    VERIFY,
    Claim,
    GuardOptions,
    Plan,
    ReproduceOptions,
    SweepOptions,
    VerifyOptions,
)
from mamf.statistics import FigureError, Interval

#: The command of that name measures sweeps of this operation.
_ATTENTION = "attention"
_LISTS = ("kernels", "regimes", "layers")
#: Fields of the plan of a sweep of products beside its options.
_OF_PRODUCTS = ("shapes", "regimes", "precision", "seconds", "budget_seconds", "layers")
#: What earlier logs say beside the name of their kind.
_REDUNDANT = ("confirms", "explains", "falls_back", "rounds")


def plan_record(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values; shapes as their operation writes them."""
    if plan.is_search:
        return {"command": FIND, **search_record(plan.searches[0])}
    of = operation_called(plan.operation)
    fields = {name: value for name, value in vars(plan).items() if name not in ("kind", "options")}
    fields |= {
        **{name: list(fields[name]) for name in _LISTS},
        "shapes": list(map(str, plan.shapes)),
        "problems": list(map(of.problem_record, plan.problems)),
        "searches": list(map(search_record, plan.searches)),
    }
    if plan.kind == SWEEP and plan.operation == MATMUL and len(plan.problems) == len(plan.kernels) == 1:
        reference = plan.options.reference
        options = {**asdict(plan.options), "reference": reference and str(reference)}
        if not plan.is_shared:
            del options["rank"], options["ranks"]
        own = {name: fields[name] for name in _OF_PRODUCTS}
        return {"command": SWEEP, "problem": fields["problems"][0], **own, **options}
    command = _ATTENTION if plan.kind == SWEEP and plan.operation == _ATTENTION else plan.kind
    return {"command": command, **fields, **_options_record(plan, of)}


def _options_record(plan: Plan, of: AnyOperation) -> dict[str, Any]:
    if plan.is_shared:
        return {"reference": str(plan.options.reference), "rank": plan.options.rank, "ranks": plan.options.ranks}
    if plan.kind != REPRODUCE:
        return asdict(plan.options) if plan.kind in (GUARD, VERIFY) else {}
    claims = [
        {
            **vars(claim),
            "step": {"regime": regime, "problem": of.problem_record(problem), "shape": str(shape), "kernel": kernel},
            "interval": list(vars(claim.interval).values()),
            "error": claim.error and asdict(claim.error),
        }
        for claim in plan.options.claims
        for regime, problem, shape, kernel in (claim.step,)
    ]
    return {**vars(plan.options), "recorded": dict(plan.options.recorded), "claims": claims}


def _reproduce_options(fields: dict[str, Any], of: AnyOperation) -> ReproduceOptions:
    # Takes the options out of the fields of a plan.
    own = {each.name: fields.pop(each.name) for each in dataclass_fields(ReproduceOptions)}
    claims = [
        Claim(
            **{
                **each,
                "step": (
                    step["regime"],
                    of.problem_from_record(step["problem"]),
                    of.parse_shape(step["shape"]),
                    kernel,
                ),
                "interval": Interval(*each["interval"]),
                "error": each["error"] and FigureError(**each["error"]),
            }
        )
        for each in own["claims"]
        for step, kernel in ((each["step"], each["step"]["kernel"]),)
    ]
    return ReproduceOptions(**{**own, "claims": tuple(claims), "recorded": tuple(own["recorded"].items())})


def plan_from_record(record: Mapping[str, Any], kernel: str = "auto") -> Plan:
    """``kernel``: that of a sweep of products, which the header of its log names."""
    fields = dict(record)
    kind = fields.pop("command")
    if "grid" in fields:
        return search_from_record(fields).as_plan()
    kind = SWEEP if kind == _ATTENTION else kind
    of = operation_called(fields.setdefault("operation", MATMUL))
    parse = str if isinstance(of, Unknown) else of.parse_shape
    if "problem" in fields:
        fields |= {"problems": [fields.pop("problem")], "kernels": [kernel]}
    options: GuardOptions | SweepOptions | ReproduceOptions | VerifyOptions | None = None
    if kind == REPRODUCE:
        options = _reproduce_options(fields, of)
    early = {name: fields.pop(name) for name in _REDUNDANT if name in fields}
    if kind == GUARD:
        options = GuardOptions(early["rounds"])
    if kind == VERIFY:
        options = VerifyOptions(fields.pop("number"), tuple(fields.pop("operations")))
    if kind == SWEEP:
        given = {each.name: fields.pop(each.name) for each in dataclass_fields(SweepOptions) if each.name in fields}
        reference = given.get("reference")
        options = SweepOptions(**{**given, "reference": of.parse_shape(reference) if reference else None})
    fields |= {
        "shapes": tuple(map(parse, fields["shapes"])),
        "problems": tuple(map(of.problem_from_record, fields["problems"])),
        "searches": tuple(map(search_from_record, fields.get("searches", ()))),
        **{name: tuple(fields.get(name, ())) for name in _LISTS},
    }
    return Plan(kind, **fields, options=options)
