"""The operation ``bandwidth``: array sizes, access patterns and their exact byte counts. Pure.

Bytes are counted as in STREAM: reads plus writes, each array once per pass. Cache lines that are fetched before a write
(write allocate) are not counted. Compared with other tools, on the same arrays and device:

- ``copy`` (a = b) is STREAM's and BabelStream's Copy, and twice the figure of nvbandwidth's ``device_local_copy``,
  which counts the size of the copy once (memcpy.cpp; 1519 GB/s there on an H100 is 3.04 TB/s here).
- ``triad`` (a = b + s*c) is STREAM's and BabelStream's Triad: two arrays read, one written.
- ``read`` (the sum of b) is in neither: BabelStream's Dot also only reads, but two arrays.
- ``write`` (a = s) is in neither: BabelStream times its Init separately.

Units: an array's size is written in powers of two (MiB), rates are in powers of ten (TB/s).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from mamf.backend import MIB, Backend, DeviceInfo
from mamf.dtypes import DTYPES
from mamf.errors import UsageError, parse_digits, parse_size, require_whole_number
from mamf.kernel import Buffer, Kernel, Work, aligned
from mamf.measurement import TERA, Measurement
from mamf.operation import DeclaredProblem, Operation, describe
from mamf.peaks import find_bandwidth

Pattern = Literal["copy", "read", "write", "triad"]
PATTERNS: tuple[str, ...] = get_args(Pattern)
#: The arrays that a pattern reads and writes, by STREAM's names.
READ_ARRAYS: Mapping[str, tuple[str, ...]] = {"copy": ("b",), "read": ("b",), "write": (), "triad": ("b", "c")}
WRITTEN_ARRAYS: Mapping[str, tuple[str, ...]] = {"copy": ("a",), "read": (), "write": ("a",), "triad": ("a",)}
_FORMULA_BY_PATTERN = {"copy": "a = b", "read": "sum of b", "write": "a = s", "triad": "a = b + s*c"}
#: The maximum number of arrays of a pattern.
MAX_ARRAYS = 3
#: Arrays of this many bytes need only one operand set: after a launch, even the largest cache (1.1 GB on an EPYC 9684X)
#: contains almost no data that the next launch can use.
_MIN_SINGLE_SET_BYTES = 4 * 2**30
#: The assumed last-level cache of a device that does not report it.
DEFAULT_CACHE_BYTES = 32 * 2**20
#: A pass over at least this many times the cache size measures memory. The cache can then save at most a sixteenth of
#: the traffic; it saved 1 % on an H200 (1 GiB written).
MEMORY_CACHE_MULTIPLE = 16
_BYTES_BY_UNIT = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SIZE_PATTERN = re.compile(r"(\d+)(GiB|MiB|KiB)?", re.ASCII)


def parse_byte_size(text: str) -> int:
    """Read a size such as ``256MiB``, ``1GiB``, ``4096KiB`` or bytes without a unit. Raises UsageError otherwise."""
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not the size of an array; write KiB, MiB, GiB or bytes, for example 256MiB")
    count, unit = match.groups()
    return parse_digits(count) * _BYTES_BY_UNIT.get(unit, 1)


@dataclass(frozen=True, order=True)
class BandwidthShape:
    """The size of each array, ``nbytes``. A copy at 1 GiB has two arrays and moves 2 GiB.

    Printed in the largest unit that divides it: ``256MiB``, ``1GiB``, ``1000`` (bytes).
    """

    nbytes: int = field(
        metadata=describe(
            "size of each array, such as 1GiB",
            default="powers of two, from the cache to half the memory",
            keyword="size",
            read=parse_byte_size,
            metavar="SIZE",
        )
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", require_whole_number("bytes of an array", self.nbytes))

    def __str__(self) -> str:
        for unit, size in _BYTES_BY_UNIT.items():
            if self.nbytes % size == 0:
                return f"{self.nbytes // size}{unit}"
        return str(self.nbytes)

    @classmethod
    def parse(cls, text: str) -> BandwidthShape:
        """Read ``256MiB``, ``1GiB``, ``4096KiB`` or bytes. Raises UsageError for anything else."""
        return cls(parse_byte_size(text))


@dataclass(frozen=True)
class BandwidthProblem(DeclaredProblem):
    """All parameters of a pass over arrays except their size.

    ``warm``: the number of passes over the same arrays within one launch, all of them counted. Several passes measure
    the caches: arrays that fit in a cache come from memory in the first pass only.
    """

    operation: ClassVar[str] = "bandwidth"

    pattern: str = field(default="copy", metadata=describe("what a pass does with the arrays", choices=PATTERNS))
    dtype: str = "float32"
    data: str = "normal"
    seed: int = 0
    warm: int = field(
        default=1,
        metadata=describe("number of passes per launch; more than one measures a cache", read=parse_size, is_rare=True),
    )

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays of the pattern, the written one first."""
        return (*WRITTEN_ARRAYS[self.pattern], *READ_ARRAYS[self.pattern])

    def elements(self, shape: BandwidthShape) -> int:
        """Return the number of elements of each array."""
        return shape.nbytes // DTYPES[self.dtype].itemsize

    def is_served_by_memory(self, shape: BandwidthShape, cache_bytes: int | None) -> bool:
        """Return whether memory, not a cache, serves passes over such arrays. ``cache_bytes``: the last-level cache."""
        return len(self.arrays) * shape.nbytes >= MEMORY_CACHE_MULTIPLE * (cache_bytes or DEFAULT_CACHE_BYTES)

    def unsupported_shape(self, shape: BandwidthShape) -> str | None:
        """Return why arrays of this size are invalid, or None."""
        if shape.nbytes % DTYPES[self.dtype].itemsize:
            return f"{shape.nbytes} bytes are not a whole number of {self.dtype} elements"
        return None

    def work(self, shape: BandwidthShape) -> Work:
        passes = "" if self.warm == 1 else f", {self.warm} passes a launch"
        convention = f"bytes of each array once a pass; {_FORMULA_BY_PATTERN[self.pattern]}{passes}"
        return Work(self.flop(shape), self.warm * len(self.arrays) * shape.nbytes, convention, "TB/s")

    def flop(self, shape: BandwidthShape) -> float:
        """Return the FLOP of one launch: one add per element for a sum, one add and one multiply for a triad."""
        per_element = {"copy": 0, "read": 1, "write": 0, "triad": 2}[self.pattern]
        return float(self.warm * per_element * self.elements(shape))

    def limit_operand_sets(self, shape: BandwidthShape, asked: int) -> int:
        """Return the number of operand sets: ``asked``, or 1 if one set is many times larger than any cache."""
        return 1 if len(self.arrays) * shape.nbytes >= _MIN_SINGLE_SET_BYTES else asked

    def buffers(self, shape: BandwidthShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return the device buffers of the arrays, ``sets`` of each."""
        elements = aligned(self.elements(shape)) * self.limit_operand_sets(shape, sets)
        return {name: Buffer(elements, self.dtype, name in READ_ARRAYS[self.pattern]) for name in self.arrays}

    def nbytes(self, shape: BandwidthShape, sets: int = 1, rewrite: bool = False) -> int:
        """Return the bytes of all arrays."""
        return sum(buffer.nbytes for buffer in self.buffers(shape, sets, rewrite).values())


class BandwidthKernel(Kernel[BandwidthProblem, BandwidthShape]):
    """One implementation. ``dtypes`` and ``patterns``: those that it supports."""

    operation = "bandwidth"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    patterns: ClassVar[tuple[str, ...]] = PATTERNS

    def unsupported(self, backend: Backend, problem: BandwidthProblem) -> str | None:
        if problem.pattern not in self.patterns:
            return f"kernel {self.name} has no pattern {problem.pattern}, only {', '.join(self.patterns)}"
        return self._unsupported_dtype(problem) or backend.unsupported_dtype(problem.dtype)

    def unsupported_shape(self, problem: BandwidthProblem, shape: BandwidthShape) -> str | None:
        return problem.unsupported_shape(shape)


# The allowed excess over the datasheet's bandwidth is small: by default no board raises its memory clock.
_DATASHEET_HEADROOM = 1.02
# If all arrays together are this many times as large as the cache, memory serves at least half of their bytes.
_MIN_CACHE_MULTIPLE = 2
# The memory of a device that does not report it.
_DEFAULT_MEMORY_BYTES = 8 * 1024 * MIB


class Bandwidth(Operation[BandwidthProblem, BandwidthShape]):
    name = "bandwidth"
    kernel_group = "mamf.bandwidth_kernels"
    kernel_type = BandwidthKernel
    shape_type = BandwidthShape
    problem_type = BandwidthProblem
    shape_example = "256MiB"
    own_command = "bandwidth"

    def default_shapes(self, backend: Backend) -> Sequence[BandwidthShape]:
        """Return powers of two: from a size at which all arrays of any pattern fit in the cache, to half the memory."""
        info = backend.info
        memory = min(info.memory_bytes or _DEFAULT_MEMORY_BYTES, backend.free_memory() or _DEFAULT_MEMORY_BYTES)
        smallest = floor_to_power_of_two((info.cache_bytes or DEFAULT_CACHE_BYTES) // MAX_ARRAYS)
        largest = floor_to_power_of_two(memory // 2 // MAX_ARRAYS)
        sizes = [smallest << step for step in range(max(largest // smallest, 1).bit_length())]
        return [BandwidthShape(size) for size in sizes]

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> BandwidthProblem:
        """Return the problem, as in Operation. The dtype defaults to float32, which every device supports."""
        return super().problem_for(backend, {**asked, "dtype": asked.get("dtype") or "float32"})

    def fastest_possible(
        self, info: DeviceInfo, problem: BandwidthProblem, shape: BandwidthShape | None = None
    ) -> float | None:
        """Return the datasheet's bytes per second if memory must serve most bytes of a launch, or else None.

        The limit allows for operands that are in the cache when the launch begins and writes that are still in it when
        the launch ends, because these bytes need not be moved within the launch.
        """
        return None if shape is None or problem.warm > 1 else get_max_memory_rate(info, problem.work(shape).nbytes)

    def peak(self, info: DeviceInfo, problem: BandwidthProblem) -> float | None:
        """Return the datasheet's bytes per second, reads plus writes."""
        return find_bandwidth(info.name, info.compute_units)

    def may_be_ceiling(self, info: DeviceInfo, problem: BandwidthProblem, shape: BandwidthShape) -> bool:
        """Return whether memory serves a single pass. Several passes measure a cache, so any shape may be a ceiling."""
        return problem.warm > 1 or problem.is_served_by_memory(shape, info.cache_bytes)

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return the number of passes if there are several, and the share of the datasheet's bandwidth."""
        columns: dict[str, object] = {"passes": row.problem.warm} if row.problem.warm > 1 else {}
        peak = None if info is None else self.peak(info, row.problem)
        if peak and row.ok:
            columns["of theoretical"] = f"{row.best_rate * TERA / peak:.1%}"
        return columns

    def axis(self, shape: BandwidthShape) -> float:
        """Return the bytes of each array."""
        return float(shape.nbytes)


def get_max_memory_rate(info: DeviceInfo, nbytes: int) -> float | None:
    """Return the highest rate of a launch that moves ``nbytes``, from the datasheet; None if a cache may serve most."""
    peak = find_bandwidth(info.name, info.compute_units, is_verified_only=True)
    if peak is None or not info.cache_bytes or nbytes < _MIN_CACHE_MULTIPLE * info.cache_bytes:
        return None
    return _DATASHEET_HEADROOM * peak * nbytes / (nbytes - info.cache_bytes)


def floor_to_power_of_two(limit: int) -> int:
    """Return the largest power of two up to ``limit``, but at least 1 KiB."""
    return 1 << max(limit.bit_length() - 1, 10)
