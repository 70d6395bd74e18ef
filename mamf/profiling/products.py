"""Products on slower kernels than the device has, by the names of the kernels and the shapes of the products. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mamf.profiling.profile import Profile

#: Generations by the architectures that have their matrix instructions, and by what names of kernels say, the newest
#: first. 8.6, 8.9 and 12.x have those of 8.0.
DEVICES = ((100, r"^sm_1[01]\d"), (90, r"^sm_90"), (80, r"^sm_(8\d|12\d)"), (75, r"^sm_75"), (70, r"^sm_7[02]"))
KERNELS = (
    (100, r"(sm|cutlass)_?1[01]\d(?!\d)"),
    (90, r"(sm|cutlass)_?90(?!\d)"),
    (80, r"(sm|cutlass)_?8\d(?!\d)|ampere_"),
    (75, r"(sm|cutlass)_?75(?!\d)|turing_"),
    (70, r"(sm|cutlass)_?7[02](?!\d)|volta_"),
)
#: Kernels without matrix instructions, or with those that did not change: an older generation is no loss.
UNCHANGED = r"sgemm|dgemm|simt|d884|gemv|f32f32_f32f32|f64f64|splitkreduce"
#: Rows of the operands begin off multiples of 16 bytes, as a kernel's name says it.
UNALIGNED = r"align[12](?!\d)"


def is_older(kernel: str, architecture: str | None) -> bool:
    """Whether a kernel is of an older generation than the device; False if one of the two is unknown."""
    device = next((number for number, pattern in DEVICES if re.search(pattern, architecture or "")), 0)
    own = next((number for number, pattern in KERNELS if re.search(pattern, kernel, re.IGNORECASE)), device)
    return own < device and not re.search(UNCHANGED, kernel, re.IGNORECASE)


def slow_products(profile: Profile, architecture: str | None, usual: Iterable[int]) -> Iterator[tuple[float, str]]:
    """Seconds in all profiled steps and their cause: products with a dimension that is not a multiple of 8, then
    others on kernels of an older generation. ``architecture``: the device's. ``usual``: sizes of the model, used
    if the profile holds no shapes.
    """
    products = [row for row in profile.kernels if row.class_name == "matmul"]
    unaligned = [row for row in products if row.unaligned or re.search(UNALIGNED, row.name)]
    older = [row for row in products if is_older(row.name, architecture)]
    recorded = [int(size) for row in unaligned for shape in row.unaligned.split() for size in shape.split("x")]
    padded = ", ".join(f"{size} to {-(-size // 64) * 64}" for size in sorted({*(recorded or usual)}) if size % 8)
    old, total = " on kernels of an older generation than the device", sum(row.seconds for row in products) or 1.0
    for rows, why in (
        (
            unaligned,
            f"{old if set(older) & set(unaligned) else ''} because a dimension is not a multiple of 8: pad it to a "
            f"multiple of 64{f' ({padded})' if padded else ''}, such as the vocabulary",
        ),
        ([row for row in older if row not in unaligned], f"{old}: compare libraries and versions with mamf explain"),
    ):
        seconds = sum(row.seconds for row in rows)
        yield seconds, f"products{why}; {seconds / total:.0%} of the time of all products"
