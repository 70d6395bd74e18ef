"""A step by class and by module: the time of each, its FLOP, and what is reached. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mamf.measurement import TERA
from mamf.operations.tracing.classes import MODULE, class_of
from mamf.operations.tracing.events import Busy, Event
from mamf.operations.tracing.shares import length, union
from mamf.profiling.flops import TF32_KERNEL, dtype_of, flop_of
from mamf.rate import Rate

OUTSIDE = "outside of any module"
#: Share of a class's FLOP that may be of dtypes without a ceiling, and is left out: a rotary table of float32 beside
#: all products of bfloat16.
_MOST_UNKNOWN = 0.01
#: In the name of a module: its number among others, or what wraps it.
_FOLDED = re.compile(r"(?<![^.])(?:\d+(?![^.])|(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$))")
#: The ceiling of a dtype (mamf's name), or None if it is unknown.
CeilingOf = Callable[[str], Rate | None]


@dataclass(frozen=True)
class ClassRow:
    """A class in all profiled steps, or modules whose names differ in numbers alone, forward and backward, with the
    modules within them.

    ``visible`` and ``hidden``: seconds (tracing.shares.Share). Calls of idle are the gaps in the trace. ``flop`` by
    dtype, and ``multiplying``, the seconds in which they were computed. ``mamfu``: the share of the ceilings of these
    dtypes, None if more than a hundredth of the FLOP has no known ceiling.
    """

    name: str
    visible: float
    hidden: float
    calls: int
    flop: Mapping[str, int] = field(default_factory=dict)
    multiplying: float = 0.0
    mamfu: float | None = None

    @property
    def total_flop(self) -> int:
        return sum(self.flop.values())

    @property
    def tflops(self) -> float | None:
        return self.total_flop / self.multiplying / TERA if self.flop and self.multiplying else None


def module_rows(at_work: Sequence[Busy], ceiling_of: CeilingOf) -> list[ClassRow]:
    """The longest first; none if the trace has no ranges of modules."""
    found: dict[tuple[str, str], list[Busy]] = defaultdict(list)
    for each in at_work:
        names = [_folded(name) for name in _modules(each.event)] or [OUTSIDE]
        for name in dict.fromkeys(names):
            found[names[0], name].append(each)
    roots, rows = {root for root, name in found if root != name}, []
    for (root, name), work in found.items():
        # Modules within several models would otherwise have one name.
        title, flop = f"{root}.{name}" if len(roots) > 1 and root != name else name, counted_flop(work)
        seconds = length(union(intervals(work)))
        rows.append(ClassRow(title, seconds, 0.0, len(work), *flop, share_of_ceilings(*flop, ceiling_of)))
    return sorted(rows, key=lambda row: -row.visible) if {root for root, _ in found} - {OUTSIDE} else []


# The modules that an event is of, the outermost first: of the backward pass those of the forward pass.
def _modules(event: Event) -> list[str]:
    lineage = list(event.lineage())
    forward = next((each.forward for each in lineage if each.forward), event)
    for events in (lineage, list(forward.lineage())):
        if names := [each.name.removeprefix(MODULE) for each in reversed(events) if each.name.startswith(MODULE)]:
            return names
    return []


# ``model.layers.0.mlp: LlamaMLP`` as ``model.layers.*.mlp: LlamaMLP``.
def _folded(name: str) -> str:
    path, colon, kind = name.rpartition(": ")
    return f"{_FOLDED.sub(lambda part: '' if part[1] else '*', path)}{colon}{kind}"


def intervals(found: Iterable[Busy]) -> list[tuple[float, float]]:
    return [(each.begun, each.ended) for each in found]


def counted_flop(found: Sequence[Busy]) -> tuple[dict[str, int], float]:
    """FLOP by dtype, and the seconds of what they were computed by. An operation and those that it calls count once, in
    the class of the operation: a copy that a product calls computes none of it. The dtype is that of the innermost one,
    to which autocast has converted the operands.
    """
    counting = {each.event: operations for each in found if (operations := _counted(each.event))}
    counting = {event: each for event, each in counting.items() if class_of(each[-1]) == class_of(event)}
    innermost = {each[-1]: each[0] for each in sorted(counting.values(), key=len)}
    flop: Counter[str] = Counter()
    kernels = (each.event for each in found if each.event.is_on_device and TF32_KERNEL.search(each.event.name))
    tf32 = {operation for kernel in kernels for operation in kernel.lineage()}  # torch records float32
    for operation, multiplying in innermost.items():
        dtype = dtype_of(multiplying)
        flop["tf32" if dtype == "float32" and multiplying in tf32 else dtype] += flop_of(operation) or 0
    return dict(flop), length(union(intervals(each for each in found if each.event in counting)))


def _counted(event: Event) -> list[Event]:
    """The operations with a formula that an event belongs to, innermost first: it computes the FLOP of the last."""
    return [each for each in event.lineage() if flop_of(each) is not None]


def share_of_ceilings(flop: Mapping[str, int], seconds: float, ceiling_of: CeilingOf) -> float | None:
    """The time that the ceilings of the dtypes would take, as a share of the time that was taken."""
    known = {dtype: ceiling.flops for dtype in flop if (ceiling := ceiling_of(dtype))}
    unknown = sum(count for dtype, count in flop.items() if dtype not in known)
    if not seconds or not flop or unknown > _MOST_UNKNOWN * sum(flop.values()):
        return None
    return sum(flop[dtype] / rate for dtype, rate in known.items()) / seconds
