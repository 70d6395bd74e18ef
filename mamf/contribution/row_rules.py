"""Rules about single rows: each figure follows from its samples, and the samples from physics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mamf.backend import DeviceInfo
from mamf.contribution.evidence import Evidence, Finding
from mamf.dtypes import DTYPES
from mamf.measure import Measurement
from mamf.peaks import fastest_possible_flops
from mamf.records import measurement_record
from mamf.sweeping import Plan

# What follows from the samples. TFLOPS are written with three decimals, coverage with four, seconds with twelve.
_DERIVED = {"tflops": 2e-3, "seconds": 2e-12, "interval_coverage": 2e-4}
# Products whose rounding shows: float64 may agree with the float64 reference to the last bit, integers must.
_ROUNDED = ("bfloat16", "float16", "tf32", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


def rows_recompute(evidence: Evidence) -> Iterator[Finding]:
    """FLOP from the shape, figures from samples and FLOP."""
    for line, record, row in evidence.rows:
        again = measurement_record(row)
        if record["flop"] != again["flop"]:
            formula = "the masked-out pairs left out" if evidence.is_attention else "2*M*N*K"
            yield Finding("flop-count", f"{row.shape}: {record['flop']} FLOP, but {again['flop']} by {formula}", line)
        for name in _DERIVED:
            if not agree(record.get(name), again.get(name), _DERIVED[name]):
                yield Finding("row-mismatch", f"{row.shape}: {name} does not follow from samples_seconds", line)
        for name in ("dtype", "out_dtype"):
            if record[name] != again[name]:
                yield Finding(
                    "row-mismatch", f"{row.shape}: {name} {record[name]}, but the run is of {again[name]}", line
                )


def agree(written: Any, again: Any, tolerance: float) -> bool:
    """Whether two JSON values are the same up to rounding of their numbers."""
    if isinstance(again, Mapping):
        return (
            isinstance(written, Mapping)
            and written.keys() == again.keys()
            and all(agree(written[key], again[key], tolerance) for key in again)
        )
    if isinstance(again, list):
        return (
            isinstance(written, list)
            and len(written) == len(again)
            and all(agree(one, other, tolerance) for one, other in zip(written, again, strict=True))
        )
    if isinstance(again, float) and isinstance(written, (int, float)):
        return math.isclose(written, again, rel_tol=1e-6, abs_tol=tolerance)
    return bool(written == again)


def possible(evidence: Evidence) -> Iterator[Finding]:
    """No sample of a good row is faster than the device can multiply at its highest clock."""
    info = DeviceInfo(**evidence.header["device"])
    for line, row in _good_rows(evidence):
        if not _is_exact(row):
            continue
        limit = fastest_possible_flops(info, row.problem.dtype)
        fastest = row.flop / min(row.samples)
        if limit is not None and fastest > limit:
            told = f"{row.shape}: {fastest / 1e12:.4g} TFLOPS, more than the {limit / 1e12:.4g} that {info.name} can do"
            yield Finding("implausible", told, line)


def _is_exact(row: Measurement) -> bool:
    """Whether FLOP were all done, and in the row's dtype: approximate attention skips work or does it in int8."""
    return not any(name in row.details for name in ("product_dtypes", "sparsity", "cosine_similarity"))


def verified(evidence: Evidence) -> Iterator[Finding]:
    """Every good row's result was checked, and rounding shows that its operands were no zeros."""
    for line, row in _good_rows(evidence):
        if row.error is None:
            yield Finding("unverified", f"{row.shape} by {row.kernel}: its result was not checked", line)
        elif not evidence.is_attention and not row.error <= row.problem.tolerance:
            told = f"{row.shape}: relative error {row.error:.2g}, beyond {row.problem.tolerance:.2g}"
            yield Finding("unverified", told, line)
        elif row.error == 0.0 and row.problem.dtype in _ROUNDED:
            told = f"{row.shape}: no rounding error at all: the operands were no normal data"
            yield Finding("data", told, line)


def rows_of_plan(evidence: Evidence) -> Iterator[Finding]:
    """A sweep's rows are its plan's steps; a find's scouts are points of its grid, and it confirms what it tried."""
    plan = evidence.plan
    if evidence.is_search:
        yield from _scouts_of_grid(evidence)
        return
    planned = Counter(_planned(evidence))
    for line, _, row in evidence.rows:
        if not row.is_reference and _key(evidence, row) not in planned:
            yield Finding("foreign-row", f"{row.shape} by {row.kernel} in {row.regime} is not of this run's plan", line)
    held = {_key(evidence, row) for row in evidence.log.measurements if not row.is_reference}
    lost = [key for key in planned if key not in held]
    if evidence.tier == "complete" and lost:
        told = f"{len(lost)} steps of a complete run are missing, the first {' '.join(map(str, lost[0][-2:]))}"
        yield Finding("missing-row", told)
    if (
        isinstance(plan, Plan)
        and plan.reference is not None
        and not any(row.is_reference for row in evidence.log.measurements)
    ):
        yield Finding("missing-row", f"no visit of the reference {plan.reference} is there")


def _planned(evidence: Evidence) -> list[tuple[Any, ...]]:
    plan: Any = evidence.plan
    if evidence.is_attention:
        return list(plan.steps())
    return [(regime, shape) for regime in plan.regimes for shape in plan.shapes]


def _key(evidence: Evidence, row: Measurement) -> tuple[Any, ...]:
    return (row.regime, row.problem, row.shape, row.kernel) if evidence.is_attention else (row.regime, row.shape)


def _scouts_of_grid(evidence: Evidence) -> Iterator[Finding]:
    plan: Any = evidence.plan
    on_grid = {axis: set(getattr(plan.grid, axis)) for axis in "mnk"}
    tried: set[tuple[int, int, int]] = set()
    for line, record in evidence.of_kind("measurement"):
        shape = record["shape"]
        text = "x".join(str(shape[axis]) for axis in "mnk")
        if record.get("phase") == "scout" and any(shape[axis] not in on_grid[axis] for axis in "mnk"):
            yield Finding("foreign-row", f"the scout {text} is not of the grid", line)
        if (record["regime"], record.get("phase")) == ("burst", "confirm") and not tried & _turned(shape):
            yield Finding("foreign-row", f"{text} is confirmed, but was never tried", line)
        tried.add((shape["m"], shape["n"], shape["k"]))


def _turned(shape: Mapping[str, int]) -> set[tuple[int, int, int]]:
    """A shape and its transpose: a search visits the other orientation of its leaders too."""
    return {(shape["m"], shape["n"], shape["k"]), (shape["n"], shape["m"], shape["k"])}


def _good_rows(evidence: Evidence) -> Iterator[tuple[int, Measurement]]:
    for line, _, row in evidence.rows:
        if row.ok and row.problem.dtype in DTYPES:
            yield line, row
