"""The plan of a search for the ceilings of products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mamf.limits import require_some, whole_number
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape
from mamf.plans import DEFAULT_BUDGET_SECONDS, FIND, MATMUL, Plan, require_ceiling_regimes, require_regimes
from mamf.regime_names import CEILINGS


@dataclass(frozen=True)
class SearchPlan:
    """``kernels``: the first one, the default, scouts the grid; then shapes and kernels are searched together.
    ``scouts`` and ``refinements``: the most measurements on the grid and around its best shapes, for all kernels
    together. ``priors``: shapes that are measured first. ``is_quick``: whether to take fewer rounds and visits.
    """

    problem: MatmulProblem
    kernels: tuple[str, ...]
    grid: MatmulGrid
    regimes: tuple[str, ...] = CEILINGS
    budget_seconds: float = DEFAULT_BUDGET_SECONDS
    precision: float = 0.003
    scouts: int = 96
    refinements: int = 132
    priors: tuple[MatmulShape, ...] = ()
    is_quick: bool = False

    def __post_init__(self) -> None:
        require_some("kernels", self.kernels, str)
        require_regimes(self)
        whole_number("scouts", self.scouts)
        whole_number("refinements", self.refinements, 0)
        require_ceiling_regimes(self.regimes)

    def as_plan(self) -> Plan:
        """The plan of a run that does this search."""
        return Plan(
            FIND,
            MATMUL,
            (self.problem,),
            self.kernels,
            regimes=self.regimes,
            precision=self.precision,
            budget_seconds=self.budget_seconds,
            searches=(self,),
        )


def search_record(search: SearchPlan) -> dict[str, Any]:
    """A search as JSON values, with shapes as MxNxK."""
    most_flop = search.grid.most_flop
    return asdict(search) | {
        "grid": {**asdict(search.grid), "most_flop": most_flop if math.isfinite(most_flop) else None},
        "priors": [str(shape) for shape in search.priors],
    }


def search_from_record(record: Mapping[str, Any]) -> SearchPlan:
    grid = record["grid"]
    most_flop = math.inf if grid["most_flop"] is None else grid["most_flop"]
    fields = {
        "problem": MatmulProblem(**record["problem"]),
        "kernels": tuple(record["kernels"]),
        "regimes": tuple(record["regimes"]),
        "priors": tuple(map(MatmulShape.parse, record.get("priors", ()))),
        "grid": MatmulGrid(tuple(grid["m"]), tuple(grid["n"]), tuple(grid["k"]), most_flop),
    }
    return SearchPlan(**{**record, **fields})
