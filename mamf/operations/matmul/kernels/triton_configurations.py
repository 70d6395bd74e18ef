"""How a product in Triton is cut: the few configurations of each dtype that are worth a regime's time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from mamf.errors import UsageError

#: ``tile``: a program for each tile of C. ``persistent``: as many programs as run at once, each of many tiles. ``tma``:
#: persistent, and operands are loaded by tensor descriptors.
Schedule = Literal["tile", "persistent", "tma"]
_PATTERN = re.compile(r"(\d{1,4})x(\d{1,4})x(\d{1,4})/(\d{1,2})w(\d)s(?:/(persistent|tma))?", re.ASCII)
_EXAMPLE = "128x256x64/8w3s, or 128x256x64/8w3s/tma"


@dataclass(frozen=True)
class Configuration:
    """The tile of C that a program computes at a time, the step along K, warps, stages of its pipeline."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    schedule: Schedule = "tile"

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Reads what ``str`` writes: ``128x256x64/8w3s`` or ``128x256x64/8w3s/tma``. Raises UsageError."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not a configuration of kernel triton; for example {_EXAMPLE}")
        *numbers, schedule = match.groups(default="tile")
        sizes = block_m, block_n, block_k, warps, stages = [int(number) for number in numbers]
        if any(size & (size - 1) for size in sizes[:4]) or min(sizes[:3]) < 16 or not (warps and stages):
            raise UsageError(f"{text!r}: blocks are powers of 2 from 16 on, warps a power of 2, stages at least 1")
        kinds: tuple[Schedule, ...] = get_args(Schedule)
        return cls(block_m, block_n, block_k, warps, stages, kinds[kinds.index(schedule)])  # type: ignore[arg-type]

    def tiles(self, m: int, n: int) -> int:
        """Of C, M x N."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def __str__(self) -> str:
        suffix = "" if self.schedule == "tile" else f"/{self.schedule}"
        return f"{self.block_m}x{self.block_n}x{self.block_k}/{self.warps}w{self.stages}s{suffix}"


_OF_16_BITS = (
    "128x256x64/8w3s/tma",
    "128x256x64/8w4s/tma",
    "128x256x64/8w4s",
    "256x128x64/8w3s/tma",
    "128x128x64/4w3s",
)
_OF_8_BITS_FLOAT = (
    "128x256x128/8w3s/tma",
    "128x256x128/8w4s/tma",
    "128x256x128/8w3s",
    "256x128x128/8w3s/tma",
    "128x128x128/4w3s",
)
_OF_FLOAT32 = ("128x128x16/8w3s", "64x128x16/4w3s", "64x64x16/4w3s")
#: For NVIDIA, mainly Hopper; the first configuration is the kernel's default.
_CUDA = {
    "bfloat16": _OF_16_BITS,
    "float16": _OF_16_BITS,
    "tf32": ("128x256x32/8w3s/tma", "128x256x32/8w4s", "128x128x32/4w3s"),
    "float32": _OF_FLOAT32,
    "float8_e4m3fn": _OF_8_BITS_FLOAT,
    "float8_e5m2": _OF_8_BITS_FLOAT,
    "int8": (
        "128x128x128/4w3s",
        "128x128x128/4w3s/persistent",
        "128x128x128/4w2s/tma",
        "128x256x128/8w3s",
        "128x256x128/8w3s/tma",
    ),
}
#: For other devices: shared memory is 64 KiB on AMD's CDNA 3.
_ELSEWHERE = {
    **dict.fromkeys(("bfloat16", "float16"), ("256x256x64/8w2s", "256x128x64/8w2s", "128x128x64/4w2s")),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8"),
        ("256x256x128/8w2s", "256x128x128/8w2s", "128x128x128/4w2s"),
    ),
    "tf32": ("256x128x32/8w2s", "128x128x32/4w2s"),
    "float32": _OF_FLOAT32,
}


def configurations(runtime: str, dtype: str) -> list[Configuration]:
    """The configurations worth trying for a dtype, most promising first."""
    texts = _CUDA.get(dtype) if runtime == "cuda" else None
    return [Configuration.parse(text) for text in texts or _ELSEWHERE[dtype]]
