"""The roof over a piece of work: the lowest ceiling that it runs into. Pure.

min(compute, intensity x bandwidth), the roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009), of
ceilings that were confirmed on one device, in one regime: matmul's by dtype, bandwidth's by level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mamf.ceilings.ceiling import Ceiling
from mamf.errors import IncomparableError, UsageError
from mamf.measurement import TERA, Measurement
from mamf.operations.bandwidth.shapes import READS, BandwidthProblem, BandwidthShape
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.work import Work

COMPUTE, BANDWIDTH = "compute", "bandwidth"
#: Where bytes come from: arrays that the last-level cache holds, and passes that move many times its size.
CACHE, MEMORY = "cache", "memory"
LEVELS = (CACHE, MEMORY)
#: From this share on a row is near its limit: what is left is less than most changes to a kernel gain.
NEAR = 0.8


@dataclass(frozen=True)
class Roof:
    """Of one dtype and regime. ``compute``: None for work that is counted in bytes alone."""

    compute: Ceiling | None
    bandwidth: Ceiling

    def rate(self, work: Work) -> float:
        """The most that such work can reach, in its own unit: TFLOPS, or TB/s where its rate counts bytes."""
        return work.amount / max(self._compute_seconds(work), self._memory_seconds(work)) / TERA

    def bound(self, work: Work) -> str:
        """Which ceiling such work runs into: ``compute`` or ``bandwidth``."""
        return COMPUTE if self._compute_seconds(work) >= self._memory_seconds(work) else BANDWIDTH

    def _compute_seconds(self, work: Work) -> float:
        """Seconds at the compute ceiling."""
        return 0.0 if self.compute is None else work.flop / self.compute.rate / TERA

    def _memory_seconds(self, work: Work) -> float:
        """Seconds at the bandwidth ceiling."""
        return work.nbytes / self.bandwidth.rate / TERA


@dataclass(frozen=True)
class Roofs:
    """All that is known of one device. ``compute``: by dtype and regime; ``bandwidth``: by level and regime.

    ``cache_bytes``: of its last-level cache.
    """

    device: str
    uuid_hash: str | None
    cache_bytes: int | None
    compute: Mapping[tuple[str, str], Ceiling] = field(default_factory=dict)
    bandwidth: Mapping[tuple[str, str], Ceiling] = field(default_factory=dict)

    @property
    def regimes(self) -> list[str]:
        return list(dict.fromkeys(regime for _, regime in (*self.compute, *self.bandwidth)))

    def only(self, regimes: Iterable[str]) -> Roofs:
        """Those of some regimes. Raises UsageError where none is known."""
        kept = tuple(regimes)
        compute = {key: each for key, each in self.compute.items() if key[1] in kept}
        bandwidth = {key: each for key, each in self.bandwidth.items() if key[1] in kept}
        if not compute and not bandwidth:
            raise UsageError(f"no ceiling is of {' or '.join(kept)}: these are of {', '.join(self.regimes)}")
        return replace(self, compute=compute, bandwidth=bandwidth)

    def roof(self, dtype: str, regime: str) -> Roof | None:
        """The roof of memory and of a dtype's compute ceiling; None where one of them is not known."""
        compute, memory = self.compute.get((dtype, regime)), self.bandwidth.get((MEMORY, regime))
        return None if compute is None or memory is None else Roof(compute, memory)

    def over(self, row: Measurement) -> Roof | None:
        """The roof of a row: of its own dtype and regime. What counts bytes runs into bandwidth alone.

        None where a ceiling is not known, and for what reads nothing: no computing is as fast as a fill.
        """
        if row.work.unit == "TFLOPS":
            return self.roof(row.problem.dtype, row.regime)
        memory = self.bandwidth.get((MEMORY, row.regime))
        return None if memory is None or not reads(row.problem) else Roof(None, memory)


@dataclass(frozen=True)
class RoofPoint:
    """A figure under its roof. ``tflops``: FLOP a second in 1e12, None where it does none; ``intensity``: FLOP per
    byte, None where nobody counted its bytes; ``roof``: of the rate, in its unit, with what ``bound`` it.
    """

    name: str
    kernel: str
    dtype: str
    regime: str
    rate: float
    unit: str
    tflops: float | None
    intensity: float | None
    roof: float | None
    bound: str | None

    @property
    def share(self) -> float | None:
        """Achieved / roof: MAMFU where the roof is the compute ceiling."""
        return None if self.roof is None else self.rate / self.roof


def make_roof_point(row: Measurement, roofs: Roofs, name: str) -> RoofPoint:
    """A measured row, by the statistic that its regime is judged by; of several devices as the run's first gives it."""
    work, roof = row.work, roofs.over(row)
    seconds = row.amount / row.comparable_rate / TERA
    return RoofPoint(
        name=name,
        kernel=row.kernel,
        dtype=row.problem.dtype,
        regime=row.regime,
        rate=row.comparable_rate,
        unit=work.unit,
        tflops=work.flop / seconds / TERA if work.flop else None,
        intensity=work.flop / work.nbytes if work.flop and work.nbytes else None,
        roof=None if roof is None else roof.rate(work),
        bound=None if roof is None else roof.bound(work),
    )


def reads(problem: object) -> bool:
    """Whether work of this problem reads what it computes with."""
    return not isinstance(problem, BandwidthProblem) or bool(READS[problem.pattern])


def level_of(problem: BandwidthProblem, shape: BandwidthShape, cache_bytes: int | None) -> str | None:
    """Where the bytes of arrays come from; None between the levels, where both have a part in it.

    Arrays that fit the cache come from it from the second pass of a launch on (``warm``).
    """
    if problem.is_of_memory(shape, cache_bytes):
        return MEMORY
    fits = cache_bytes is not None and len(problem.arrays) * shape.nbytes <= cache_bytes
    return CACHE if fits and problem.warm > 1 else None


def build_roofs(ceilings: Iterable[Ceiling], cache_bytes: int | None, anyway: bool = False) -> Roofs:
    """The highest of what was confirmed, by dtype, level and regime.

    Of bandwidth what reads: work that computes does, and a fill alone is faster. Ceilings of products of other data
    than a model's are left out. Raises UsageError where there is none, IncomparableError for those of several devices,
    unless ``anyway``.
    """
    compute: dict[tuple[str, str], Ceiling] = {}
    bandwidth: dict[tuple[str, str], Ceiling] = {}
    found = list(ceilings)
    for ceiling in found:
        problem = ceiling.problem
        if not anyway:
            require_same_device((found[0].device, found[0].uuid_hash), (ceiling.device, ceiling.uuid_hash))
        if isinstance(problem, MatmulProblem):
            if problem.data == "normal":
                _keep_higher(compute, (problem.dtype, ceiling.regime), ceiling)
        elif isinstance(problem, BandwidthProblem) and reads(problem):
            level = level_of(problem, ceiling.shape, cache_bytes)
            if level is not None:
                _keep_higher(bandwidth, (level, ceiling.regime), ceiling)
    if not compute and not bandwidth:
        raise UsageError(
            "no ceiling of a roof is known: give logs of 'mamf find' and of 'mamf find --operation bandwidth', or of "
            "'mamf roofline'"
        )
    return Roofs(found[0].device, found[0].uuid_hash, cache_bytes, compute, bandwidth)


def _keep_higher(kept: dict[tuple[str, str], Ceiling], key: tuple[str, str], ceiling: Ceiling) -> None:
    if key not in kept or ceiling.rate > kept[key].rate:
        kept[key] = ceiling


def require_same_device(one: tuple[str, str | None], other: tuple[str, str | None]) -> None:
    """Name and hashed uuid of two devices. Raises IncomparableError: cards of one model differ by percents."""
    (name, uuid), (other_name, other_uuid) = one, other
    if name != other_name or (uuid and other_uuid and uuid != other_uuid):
        what = f"two cards, both {name}" if name == other_name else f"{name} and {other_name}"
        raise IncomparableError(f"the logs are of {what}: a share is of one card's own roof (--anyway takes them)")
