"""Colors and markers by name: a kernel looks the same in every picture and on every page. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Told apart by color-blind readers too (Okabe and Ito, extended); each has a contrast of 3 to 1 on white.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#b8578f", "#b07c00", "#2c8ec9", "#7b3fa0"),
    *("#8c564b", "#6b6b6b", "#758200", "#aa0022", "#008f8f", "#1b2f7a", "#5a8f00"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "h", ">")
#: Names in groups: a place in a group is a color with a marker. Kernels are one group, longer than COLORS: attention
#: first, then products, then rare ones, so that kernels that share a color seldom share a picture.
_GROUPS = (
    (
        *("flash-attn-3", "flash-attn-2", "sdpa-cudnn", "flash-attn-4", "flex", "compiled-eager", "sdpa-flash"),
        *("eager", "sdpa-efficient", "sdpa-math", "sdpa", "torch.mm", "cublaslt", "triton"),
        *("scaled_mm", "gluon", "quack", "compiled", "F.scaled_mm", "int_mm", "tunableop"),
        *("dequantized", "aiter", "sage-2", "sage-1", "fused-sdpa", "torch"),
    ),
    ("burst", "sustained", "classic"),
    ("scout", "refine", "algorithm", "choose", "confirm", "visit"),
    ("forward", "backward", "optimizer step", "forward and backward", "backward and optimizer step"),
    (
        *("matmul", "attention", "elementwise", "normalization", "convolution", "optimizer", "embedding"),
        *("reduction and softmax", "idle", "memory copies", "communication", "unclassified", "other"),
    ),
    tuple(f"device {number}" for number in range(12)),
)
_PLACES = {name: place for group in _GROUPS for place, name in enumerate(group)}
# Works that overlap, and the way down from a datasheet: what is only computed is grey.
_PLACES |= {"products": 0, "other work": 1}
_PLACES |= {"measured": 0, "lost since the step before": 1, "on other operands": 2, "from the datasheet": 8}
#: How lines of ceilings and of datasheets look, as matplotlib says it: behind what was measured.
CEILING: Mapping[str, Any] = {"color": "#222222", "linestyle": "-", "linewidth": 1.6, "zorder": 1.8}
PEAK: Mapping[str, Any] = {"color": "#777777", "linestyle": "--", "linewidth": 1.6, "zorder": 1.8}


@dataclass(frozen=True)
class Style:
    """``color``: #rrggbb. ``marker``: as matplotlib names it, also of names that share a color."""

    color: str
    marker: str


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name. A known name always has the same; another one has the place that its text gives, or the
    next whose color no name beside it has; if all colors are taken, the next place.
    """
    wanted = sorted(set(names))
    places = {name: _PLACES[name] for name in wanted if name in _PLACES}
    for name in wanted:
        if name not in _PLACES:
            colors = {place % len(COLORS) for place in places.values()}
            place = zlib.crc32(name.encode()) % len(COLORS)
            while place in places.values() or (len(colors) < len(COLORS) and place % len(COLORS) in colors):
                place += 1
            places[name] = place
    return {name: Style(COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]) for name, place in places.items()}
