"""Shapes that won on accelerators like this one before: where a search begins, never what it reports."""

from __future__ import annotations

from mamf.backend import DeviceInfo
from mamf.ceilings.contributed import contributed_ceilings
from mamf.ceilings.known import label_dtype
from mamf.errors import MamfError
from mamf.logs.found import cached_ceiling
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.regime_names import CEILINGS


def priors(info: DeviceInfo, problem: MatmulProblem) -> list[MatmulShape]:
    """Of a find on this very device, then of contributed ones of its kind; both ceilings' shapes, each once."""
    dtype = label_dtype(problem)
    shapes = [shape for regime in CEILINGS for shape in _found_here(info, dtype, regime)]
    kind = (info.name, info.compute_units, dtype)
    for ceiling in contributed_ceilings():
        if (ceiling.device, ceiling.compute_units, ceiling.dtype) == kind:
            shapes += map(MatmulShape.parse, ceiling.shapes)
    return list(dict.fromkeys(shapes))


def _found_here(info: DeviceInfo, dtype: str, regime: str) -> list[MatmulShape]:
    """A log that cannot be read is no hint."""
    try:
        left = cached_ceiling(info, dtype, regime)
    except (MamfError, OSError):
        return []
    return [] if left is None else [left.ceiling.shape]
