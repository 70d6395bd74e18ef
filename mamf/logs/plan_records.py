"""What a run log holds of plans: objects <-> JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mamf.logs.known import operation_called
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape
from mamf.operations.unknown import Unknown
from mamf.plans import CEILINGS_OF_ITS_OWN, EXPLAIN, GUARD, ROOFLINE, AnyPlan, FindPlan, KernelsPlan, Plan

#: Commands by what a plan of kernels is for; rows of an operation without a command of its own are measured by sweep.
_BY_PURPOSE = {CEILINGS_OF_ITS_OWN: "find", ROOFLINE: "roofline", EXPLAIN: "explain", GUARD: "guard"}
_BY_OPERATION = {"attention": "attention"}


def plan_record(plan: AnyPlan) -> dict[str, Any]:
    """A plan as JSON values; shapes as MxNxK."""
    if isinstance(plan, FindPlan):
        return {"command": "find", **_find_record(plan)}
    if isinstance(plan, KernelsPlan):
        of = operation_called(plan.operation)
        command = _BY_PURPOSE.get(plan.purpose) or _BY_OPERATION.get(plan.operation, "sweep")
        return {"command": command, **asdict(plan)} | {
            "shapes": [str(shape) for shape in plan.shapes],
            "problems": [of.problem_record(problem) for problem in plan.problems],
            "searches": [_find_record(search) for search in plan.searches],
            "layers": list(plan.layers),
        }
    return (
        {"command": "sweep"}
        | asdict(plan)
        | {
            "shapes": [str(shape) for shape in plan.shapes],
            "regimes": list(plan.regimes),
            "reference": plan.reference and str(plan.reference),
            "layers": list(plan.layers),
        }
    )


def _find_record(plan: FindPlan) -> dict[str, Any]:
    most_flop = plan.grid.most_flop
    return asdict(plan) | {
        "grid": {**asdict(plan.grid), "most_flop": most_flop if math.isfinite(most_flop) else None},
        "priors": [str(shape) for shape in plan.priors],
    }


def plan_from_record(record: Mapping[str, Any]) -> AnyPlan:
    fields = dict(record)
    command = fields.pop("command")
    if "operation" in fields:
        return _kernels_plan(fields)
    if command == "find":
        return _find_plan(fields)
    reference = fields["reference"]
    return Plan(
        **fields
        | {
            "shapes": tuple(MatmulShape.parse(text) for text in fields["shapes"]),
            "problem": MatmulProblem(**fields["problem"]),
            "regimes": tuple(fields["regimes"]),
            "reference": MatmulShape.parse(reference) if reference else None,
            "layers": tuple(fields.get("layers", ())),
        }
    )


def _find_plan(fields: Mapping[str, Any]) -> FindPlan:
    grid = fields["grid"]
    most_flop = math.inf if grid["most_flop"] is None else grid["most_flop"]
    return FindPlan(
        **{**fields}
        | {
            "problem": MatmulProblem(**fields["problem"]),
            "kernels": tuple(fields["kernels"]),
            "regimes": tuple(fields["regimes"]),
            "priors": tuple(map(MatmulShape.parse, fields.get("priors", ()))),
            "grid": MatmulGrid(tuple(grid["m"]), tuple(grid["n"]), tuple(grid["k"]), most_flop),
        }
    )


def _kernels_plan(fields: Mapping[str, Any]) -> KernelsPlan:
    of = operation_called(fields["operation"])
    shapes = fields["shapes"] if isinstance(of, Unknown) else map(of.parse_shape, fields["shapes"])
    return KernelsPlan(
        **{**fields}
        | {
            "shapes": tuple(shapes),
            "problems": tuple(map(of.problem_from_record, fields["problems"])),
            "kernels": tuple(fields["kernels"]),
            "regimes": tuple(fields["regimes"]),
            "layers": tuple(fields.get("layers", ())),
            "searches": tuple(map(_find_plan, fields["searches"])),
        }
    )
