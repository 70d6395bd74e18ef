"""Colors and markers by name: a kernel looks the same in every picture and on every page. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

#: Told apart by color-blind readers too (Okabe and Ito, extended); each has a contrast of 3 to 1 on white.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#b8578f", "#b07c00", "#2c8ec9", "#7b3fa0"),
    *("#8c564b", "#6b6b6b", "#758200", "#aa0022", "#008f8f", "#1b2f7a", "#5a8f00"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "h", ">")
#: Names in groups that share pictures; a place in a group is a color.
_GROUPS = (
    ("flash-attn-3", "flash-attn-2", "sdpa-cudnn", "flash-attn-4", "flex", "sdpa-flash", "aiter"),
    ("eager", "sdpa-efficient", "compiled-eager", "sdpa", "sage-2", "sage-1", "sdpa-math", "fused-sdpa"),
    ("torch.mm", "triton", "cublaslt", "gluon", "quack", "compiled", "scaled_mm", "F.scaled_mm"),
    ("int_mm", "tunableop", "dequantized"),
    ("burst", "sustained", "classic"),
    ("scout", "refine", "algorithm", "choose", "confirm", "visit"),
)
_PLACES = {name: place for group in (sum(_GROUPS[:2], ()), *_GROUPS[2:]) for place, name in enumerate(group)}


@dataclass(frozen=True)
class Style:
    """``color``: #rrggbb. ``marker``: as matplotlib names it, also of names that share a color."""

    color: str
    marker: str


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name. A known name always has the same; another one has the place that its text gives, or the
    next that no name beside it has.
    """
    places: dict[str, int] = {}
    for name in sorted(dict.fromkeys(names), key=lambda name: (name not in _PLACES, name)):
        place = _PLACES.get(name, zlib.crc32(name.encode()) % len(COLORS))
        while place in places.values() and len(places) < len(COLORS):
            place = (place + 1) % len(COLORS)
        places[name] = place
    return {name: Style(COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]) for name, place in places.items()}
