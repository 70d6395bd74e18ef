"""Compute the roof of each row (a measurement), and the share of the roof that the row reaches. The roof is the highest
rate that the device allows for the FLOP and bytes of the row.

This is the roofline model, min(compute, intensity x bandwidth) (Williams, Waterman and Patterson, CACM 52(4), 2009).
Ceilings are confirmed rates of one device in one regime. There is a compute ceiling for each dtype of matmul, and a
bandwidth ceiling for each memory level. This module computes everything from rows; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mamf.ceilings.ceiling import Ceiling, find_row_ceiling
from mamf.errors import IncomparableError, UsageError
from mamf.measurement import TERA, Measurement, make_dtype_label
from mamf.operations.bandwidth.operation import SOURCE_ARRAYS_BY_PATTERN, BandwidthProblem, BandwidthShape
from mamf.operations.matmul.shapes import MatmulProblem
from mamf.plans import Plan

#: Names for what limits the rate of a row: the compute ceiling or the bandwidth ceiling.
COMPUTE_BOUND, BANDWIDTH_BOUND = "compute", "bandwidth"
#: The memory levels from which a launch reads its arrays: the last-level cache if all arrays fit in the cache, or
#: memory if the arrays are many times larger than the cache.
CACHE_LEVEL, MEMORY_LEVEL = "cache", "memory"
#: READ_PATTERN is the bandwidth pattern that only reads memory. Mappings of ceilings have the keys (dtype, regime) for
#: matmul ceilings and (READ_BANDWIDTH_KEY, regime) for bandwidth ceilings.
READ_PATTERN, READ_BANDWIDTH_KEY = "read", "read bandwidth"
MEMORY_LEVELS = (CACHE_LEVEL, MEMORY_LEVEL)
#: If a row reaches at least this share of its roof, a better kernel can gain little.
NEAR_LIMIT_SHARE = 0.8


@dataclass(frozen=True)
class Roofs:
    """All known ceilings of one device, from which the roof of each row on this device follows.

    - ``device``, ``uuid_hash``: the name of the device and a hash of its UUID, if it has one.
    - ``matmul_ceilings``: matmul ceilings by dtype and regime.
    - ``bandwidth_ceilings``: bandwidth ceilings by memory level and regime.
    - ``noisy_keys``: keys, as of the two mappings, of ceilings that are left out because their interval is unknown.
    """

    device: str
    uuid_hash: str | None
    matmul_ceilings: Mapping[tuple[str, str], Ceiling] = field(default_factory=dict)
    bandwidth_ceilings: Mapping[tuple[str, str], Ceiling] = field(default_factory=dict)
    noisy_keys: Sequence[tuple[str, str]] = ()

    @property
    def regimes(self) -> list[str]:
        return list(dict.fromkeys(regime for _, regime in (*self.matmul_ceilings, *self.bandwidth_ceilings)))

    @property
    def unconfirmed_levels(self) -> list[str]:
        """The memory levels whose bandwidth is a single measurement that no search confirmed."""
        return list(
            dict.fromkeys(level for (level, _), each in self.bandwidth_ceilings.items() if each.round_count == 1)
        )

    def select_regimes(self, regimes: Iterable[str]) -> Roofs:
        """Return a copy with only the ceilings of ``regimes``. Raises UsageError if there are no such ceilings."""
        kept_regimes = tuple(regimes)
        matmul_ceilings = {key: each for key, each in self.matmul_ceilings.items() if key[1] in kept_regimes}
        bandwidth_ceilings = {key: each for key, each in self.bandwidth_ceilings.items() if key[1] in kept_regimes}
        if not matmul_ceilings and not bandwidth_ceilings:
            raise UsageError(
                f"no ceiling is known in the regime {' or '.join(kept_regimes)}: choose from the regimes with a "
                f"ceiling, {', '.join(self.regimes)}"
            )
        return replace(self, matmul_ceilings=matmul_ceilings, bandwidth_ceilings=bandwidth_ceilings)

    def find_roof_and_bound(self, row: Measurement) -> tuple[float, str] | None:
        """Return the roof of a row, in the unit of its rate, and what limits the row: COMPUTE_BOUND or BANDWIDTH_BOUND.

        For work without matmuls, bandwidth is the only limit. Returns None if a ceiling that may limit the row is
        unknown. Also returns None for work that reads nothing, such as a fill: its rate can exceed the bandwidth
        ceiling, which was measured with reads.
        """
        work, memory_ceiling = row.work, self.bandwidth_ceilings.get((MEMORY_LEVEL, row.regime))
        matmul_ceiling = find_row_ceiling(row, self.matmul_ceilings) if work.has_matmul_flop else None
        if memory_ceiling is None or (
            matmul_ceiling is None if work.has_matmul_flop else not reads_operands(row.problem)
        ):
            return None
        seconds = {
            COMPUTE_BOUND: 0.0 if matmul_ceiling is None else work.flop / matmul_ceiling.rate / TERA,
            BANDWIDTH_BOUND: work.nbytes / memory_ceiling.rate / TERA,
        }
        bound = max(seconds, key=seconds.__getitem__)
        return work.amount / seconds[bound] / TERA, bound

    def explain_missing_roof(self, row: Measurement) -> str | None:
        """Say which ceiling is missing to compute the roof of a row, and which command measures this ceiling. Return
        None if no ceiling is missing.
        """
        if row.work.has_matmul_flop and find_row_ceiling(row, self.matmul_ceilings) is None:
            find_command = f"mamf find --dtype {row.problem.dtype} --regime {row.regime}"
            return f"no {make_dtype_label(row.problem)} {row.regime} ceiling is known: measure it with '{find_command}'"
        if (MEMORY_LEVEL, row.regime) in self.bandwidth_ceilings or not reads_operands(row.problem):
            return None
        find_command = f"mamf find --operation bandwidth --set pattern=read --regime {row.regime}"
        return f"the memory bandwidth in {row.regime} is not known: measure it with '{find_command}'"


@dataclass(frozen=True)
class RooflinePoint:
    """A measured row with its rate and the roof that limits the rate, for tables and roofline charts.

    - ``tflops``: 1e12 FLOP/s; None if the work has no FLOP.
    - ``intensity``: FLOP per byte; None if the work has no FLOP or no bytes.
    - ``roof_rate``: the highest possible rate in the unit of the row's rate; None if it is unknown.
    - ``bound``: what limits the work, ``compute`` or ``bandwidth``; None if the roof is unknown.
    - ``layer_name``: the name of a group of rows, such as a layer of a model.
    - ``has_drifted``: whether the speed of the device changed so much between the ceiling of the row's run and the row
      that the row is not comparable with others (``has_card_drifted``).
    """

    name: str
    row: Measurement
    tflops: float | None
    intensity: float | None
    roof_rate: float | None
    bound: str | None
    layer_name: str = ""
    has_drifted: bool = False

    @property
    def roof_share(self) -> float | None:
        """The measured rate divided by the roof; if compute limits the work, this share is MAMFU."""
        return None if self.roof_rate is None else self.row.comparable_rate / self.roof_rate


def make_roofline_point(row: Measurement, roofs: Roofs, name: str, layer_name: str = "") -> RooflinePoint:
    """Make the roofline point of a measured row. ``name``: the name of the point. ``layer_name``: the name of its group
    of rows.

    The point has the rate by which mamf ranks rows of this regime, such as the median. If several devices measured the
    rows of a run, this rate is divided by the speed of the row's device relative to the first device.
    """
    work, (roof, bound) = row.work, roofs.find_roof_and_bound(row) or (None, None)
    seconds = row.work_amount / row.comparable_rate / TERA
    return RooflinePoint(
        name=name,
        row=row,
        tflops=work.flop / seconds / TERA if work.flop else None,
        intensity=work.flop / work.nbytes if work.flop and work.nbytes else None,
        roof_rate=roof,
        bound=bound,
        layer_name=layer_name,
    )


def reads_operands(problem: object) -> bool:
    """Return whether launches of a problem read operands. All do, except bandwidth patterns that only write."""
    return not isinstance(problem, BandwidthProblem) or bool(SOURCE_ARRAYS_BY_PATTERN[problem.pattern])


def make_ceiling_key(ceiling: Ceiling) -> tuple[str, str]:
    """Return the key of a ceiling: (dtype, regime) for a matmul ceiling, else (READ_BANDWIDTH_KEY, regime)."""
    return READ_BANDWIDTH_KEY if isinstance(ceiling.problem, BandwidthProblem) else ceiling.dtype, ceiling.regime


def get_ceiling_name(search_plan: Plan) -> str:
    """Return the name of the ceiling that a search will find: the dtype of its matmuls, or else READ_BANDWIDTH_KEY."""
    return str(search_plan.problem.dtype) if search_plan.is_search else READ_BANDWIDTH_KEY


def find_memory_level(problem: BandwidthProblem, shape: BandwidthShape, cache_bytes: int | None) -> str | None:
    """Return the memory level from which a launch reads its arrays, CACHE_LEVEL or MEMORY_LEVEL. Return None if the
    launch reads some bytes from the cache and others from memory.

    The result is CACHE_LEVEL only if a launch makes several passes over the arrays (``problem.warm`` above 1), because
    the first pass does not find the arrays in the cache.
    """
    if problem.is_served_by_memory(shape, cache_bytes):
        return MEMORY_LEVEL
    fits = cache_bytes is not None and len(problem.array_names) * shape.nbytes <= cache_bytes
    return CACHE_LEVEL if fits and problem.warm > 1 else None


def find_roof_name(ceiling: Ceiling, cache_bytes: int | None) -> str | None:
    """Return the name of the roof that a ceiling gives: the dtype of a matmul, or the memory level of a bandwidth.

    Return None for bandwidth patterns that only write, because they are faster than kernels that also read, and for
    matmuls of zeros or patterns, because they draw less power and run faster than matmuls of normally distributed
    values.
    """
    problem = ceiling.problem
    if isinstance(problem, MatmulProblem):
        return ceiling.dtype if problem.data == "normal" else None
    return (
        find_memory_level(problem, ceiling.shape, cache_bytes)
        if isinstance(problem, BandwidthProblem) and reads_operands(problem)
        else None
    )


def build_roofs(ceilings: Iterable[Ceiling], cache_bytes: int | None, anyway: bool = False) -> Roofs:
    """Build roofs from ceilings: take the highest ceiling for each regime and each dtype or memory level, and leave out
    ceilings whose interval is unknown.

    Raises UsageError if no ceiling gives a roof. Raises IncomparableError for ceilings of several devices, unless
    ``anyway`` is True.
    """
    all_ceilings, highest = list(ceilings), dict[tuple[str, str], Ceiling]()
    for ceiling in all_ceilings:
        if not anyway:
            require_same_device(
                (all_ceilings[0].device, all_ceilings[0].uuid_hash), (ceiling.device, ceiling.uuid_hash)
            )
        if name := find_roof_name(ceiling, cache_bytes):
            key = name, ceiling.regime
            highest[key] = max(highest.get(key, ceiling), ceiling, key=lambda each: (each.interval.is_known, each.rate))
    if not highest:
        raise UsageError(
            "the logs contain no compute or bandwidth ceiling: give logs of 'mamf roofline', or of 'mamf find' and "
            "'mamf find --operation bandwidth'"
        )
    known = {key: ceiling for key, ceiling in highest.items() if ceiling.interval.is_known}
    return Roofs(
        all_ceilings[0].device,
        all_ceilings[0].uuid_hash,
        {key: each for key, each in known.items() if key[0] not in MEMORY_LEVELS},
        {key: each for key, each in known.items() if key[0] in MEMORY_LEVELS},
        tuple(key for key in highest if key not in known),
    )


def require_same_device(device: tuple[str, str | None], other_device: tuple[str, str | None]) -> None:
    """Raise IncomparableError if two devices, each given as its name and a hash of its UUID, are not the same card.
    The speed of cards of one model differs by several percent.
    """
    (name, uuid), (other_name, other_uuid) = device, other_device
    if name != other_name or (uuid and other_uuid and uuid != other_uuid):
        cards = f"two cards, both {name}" if name == other_name else f"{name} and {other_name}"
        raise IncomparableError(
            f"cannot compare {cards}: give logs of one card with --ceiling ('mamf roofline' compares two cards with "
            "--anyway)"
        )
