"""Define the operation ``bandwidth``, which reads and writes whole arrays: its array sizes, access patterns and exact
byte counts.

mamf counts bytes like STREAM: the bytes that a pass reads plus the bytes that it writes, each array once. It does not
count cache lines that are fetched before a write (write allocate). Compared with other tools on the same device:

- ``copy`` (a = b) is Copy in STREAM and BabelStream. Its rate is twice the rate of ``device_local_copy`` in
  nvbandwidth, which counts each copied byte once (see its memcpy.cpp). If nvbandwidth reports 1519 GB/s on an H100,
  mamf reports 3.04 TB/s.
- ``triad`` (a = b + s*c) is STREAM's and BabelStream's Triad. It reads two arrays and writes one.
- STREAM and BabelStream do not have ``read`` (the sum of b). BabelStream's Dot also only reads, but two arrays.
- STREAM and BabelStream do not have ``write`` (a = s). BabelStream's Init writes arrays, but is timed separately.

Units: an array's size is written in powers of two (MiB), rates are in powers of ten (TB/s).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mamf.backend import MIB, Backend, DeviceInfo
from mamf.dtypes import DTYPES
from mamf.errors import UsageError, parse_digits, parse_size, require_whole_number
from mamf.kernel import Buffer, Kernel, ProblemT, ShapeT, Work, round_up_to_alignment
from mamf.measurement import TERA, Measurement
from mamf.operation import CheckedProblem, Operation, describe
from mamf.peaks import find_datasheet_bandwidth

#: The arrays that a pass reads, by access pattern. The names are those in STREAM. All patterns except ``read`` write
#: the array ``a``.
SOURCE_ARRAYS_BY_PATTERN: Mapping[str, tuple[str, ...]] = {
    "copy": ("b",),
    "read": ("b",),
    "write": (),
    "triad": ("b", "c"),
}
ACCESS_PATTERNS = tuple(SOURCE_ARRAYS_BY_PATTERN)
_FORMULA_BY_PATTERN = {"copy": "a = b", "read": "sum of b", "write": "a = s", "triad": "a = b + s*c"}
_FLOP_PER_ELEMENT_BY_PATTERN = {"copy": 0, "read": 1, "write": 0, "triad": 2}
#: The number of arrays of ``triad``, the access pattern with the most arrays.
MAX_ARRAY_COUNT = 3
#: If the arrays together have at least this number of bytes, all launches use the same operand set. Even the largest
#: cache (1.1 GB on an EPYC 9684X) is then too small to keep much data for the next launch.
_MIN_SINGLE_SET_BYTES = 4 * 2**30
#: The size in bytes that mamf assumes for the last-level cache of a device that does not report the size.
DEFAULT_CACHE_BYTES = 32 * 2**20
#: A pass measures memory, not a cache, if its arrays together are at least this many times as large as the last-level
#: cache. The cache can then save at most a sixteenth of the traffic. On an H200, it saved 1 % of 1 GiB of writes.
MIN_ARRAYS_TO_CACHE_RATIO = 16
_BYTES_BY_UNIT = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_BYTE_SIZE_PATTERN = re.compile(r"(\d+)(GiB|MiB|KiB)?", re.ASCII)


def parse_byte_size(text: str) -> int:
    """Convert a text such as ``256MiB``, ``1GiB``, ``4096KiB`` or ``1000`` (bytes) to a number of bytes.

    Raises UsageError for any other text.
    """
    match = _BYTE_SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not the size of an array: write a number of bytes, KiB, MiB or GiB, for example 256MiB"
        )
    count, unit = match.groups()
    return parse_digits(count) * _BYTES_BY_UNIT.get(unit, 1)


def make_byte_size_metadata(help: str, default_sizes: str) -> Mapping[str, Any]:
    return describe(help, default=default_sizes, keyword="size", parse_text=parse_byte_size, metavar="SIZE")


@dataclass(frozen=True, order=True)
class BandwidthShape:
    """The size of each array of a pass, in bytes. A copy with the size 1 GiB has two arrays, so it moves 2 GiB.

    A shape is written in the largest unit that divides it: ``256MiB``, ``1GiB``, ``1000`` (bytes).
    """

    nbytes: int = field(
        metadata=make_byte_size_metadata(
            "size of each array, such as 1GiB",
            "powers of two: from arrays that fit in the cache to arrays that together fill half of the memory; if the "
            "cache is large, also a size that reading alone needs",
        )
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", require_whole_number("bytes of an array", self.nbytes))

    def __str__(self) -> str:
        sizes = (f"{self.nbytes // size}{unit}" for unit, size in _BYTES_BY_UNIT.items() if self.nbytes % size == 0)
        return next(sizes, str(self.nbytes))

    @classmethod
    def parse(cls, text: str) -> BandwidthShape:
        """Convert a text such as ``256MiB`` or ``1000`` (bytes) to a shape. Raises UsageError for any other text."""
        return cls(parse_byte_size(text))


@dataclass(frozen=True)
class BandwidthProblem(CheckedProblem):
    """All parameters of a bandwidth launch except the size of the arrays.

    ``warm``: the number of passes over the same arrays within one launch. The rate counts the bytes of all passes.
    Several passes measure a cache: arrays that fit in the cache come from memory in the first pass only.
    """

    operation: ClassVar[str] = "bandwidth"

    pattern: str = field(
        default="copy",
        metadata=describe(
            "what each pass over the arrays a, b and c computes: a = b (copy), the sum of b (read), a = s (write) or "
            "a = b + s*c (triad)",
            choices=ACCESS_PATTERNS,
        ),
    )
    dtype: str = "float32"
    data: str = "normal"
    seed: int = 0
    warm: int = field(
        default=1,
        metadata=describe(
            "number of passes over the arrays per launch; with several passes over arrays that fit in a cache, "
            "mamf measures the cache",
            parse_text=parse_size,
            is_rare=True,
        ),
    )

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of the pattern's arrays: first the array that a pass writes, if any, then the arrays it reads."""
        return (*(() if self.pattern == "read" else ("a",)), *SOURCE_ARRAYS_BY_PATTERN[self.pattern])

    def count_elements(self, shape: BandwidthShape) -> int:
        """Return the number of elements in each array."""
        return shape.nbytes // DTYPES[self.dtype].itemsize

    def is_served_by_memory(self, shape: BandwidthShape, cache_bytes: int | None) -> bool:
        """Return whether arrays of this size are so large that memory, not a cache, serves passes over them.

        ``cache_bytes``: the size of the device's last-level cache; None if unknown.
        """
        return len(self.array_names) * shape.nbytes >= MIN_ARRAYS_TO_CACHE_RATIO * (cache_bytes or DEFAULT_CACHE_BYTES)

    def compute_work(self, shape: BandwidthShape) -> Work:
        passes_note = "" if self.warm == 1 else f", {self.warm} passes a launch"
        convention = f"bytes of each array once a pass; {_FORMULA_BY_PATTERN[self.pattern]}{passes_note}"
        flop = float(self.warm * _FLOP_PER_ELEMENT_BY_PATTERN[self.pattern] * self.count_elements(shape))
        return Work(flop, self.warm * len(self.array_names) * shape.nbytes, convention, "TB/s")

    def limit_operand_set_count(self, shape: BandwidthShape, sets: int) -> int:
        """Return how many operand sets to use: 1 if the arrays of one set are several times larger than any cache,
        otherwise ``sets``.
        """
        return 1 if len(self.array_names) * shape.nbytes >= _MIN_SINGLE_SET_BYTES else sets

    def list_buffers(self, shape: BandwidthShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return one device buffer per array. A buffer contains the arrays of all operand sets, one after another."""
        elements = round_up_to_alignment(self.count_elements(shape)) * self.limit_operand_set_count(shape, sets)
        return {
            name: Buffer(elements, self.dtype, name in SOURCE_ARRAYS_BY_PATTERN[self.pattern])
            for name in self.array_names
        }

    def count_bytes(self, shape: BandwidthShape, sets: int = 1, rewrite: bool = False) -> int:
        """Return the total size of the arrays in all operand sets, in bytes."""
        return sum(buffer.nbytes for buffer in self.list_buffers(shape, sets, rewrite).values())


class BandwidthKernel(Kernel[BandwidthProblem, BandwidthShape]):
    """A kernel that passes over arrays. ``dtypes``, ``access_patterns``: those that the kernel supports."""

    operation = "bandwidth"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    access_patterns: ClassVar[tuple[str, ...]] = ACCESS_PATTERNS

    def explain_unsupported_problem(self, backend: Backend, problem: BandwidthProblem) -> str | None:
        if problem.pattern not in self.access_patterns:
            return f"{self.name} does not support --pattern {problem.pattern}: use {' or '.join(self.access_patterns)}"
        return self._explain_unsupported_dtype(problem) or backend.explain_unsupported_dtype(problem.dtype)

    def explain_unsupported_shape(self, problem: BandwidthProblem, shape: BandwidthShape) -> str | None:
        if shape.nbytes % DTYPES[problem.dtype].itemsize:
            return f"{shape.nbytes} bytes are not a whole number of {problem.dtype} elements: choose another --size"
        return None


# mamf rejects a measured rate as impossible if it is above this many times the datasheet's bandwidth. The margin is
# small, because no card raises its memory clock by default.
_MAX_DATASHEET_RATIO = 1.02
# If the bytes that a launch moves are at least this many times the size of the cache, at least half of these bytes are
# read from memory or written to memory.
_MIN_TRAFFIC_TO_CACHE_RATIO = 2
# The size in bytes that mamf assumes for the memory of a device that does not report the size.
_DEFAULT_MEMORY_BYTES = 8 * 1024 * MIB


class ByteSizedOperation(Operation[ProblemT, ShapeT]):
    """An operation whose shapes have a size in bytes, ``nbytes``, which charts show on their horizontal axis."""

    def find_axis_position(self, shape: ShapeT) -> float:
        return float(shape.nbytes)  # type: ignore[attr-defined]


class BandwidthOperation(ByteSizedOperation[BandwidthProblem, BandwidthShape]):
    name = "bandwidth"
    kernel_group = "mamf.bandwidth_kernels"
    kernel_type = BandwidthKernel
    shape_type = BandwidthShape
    problem_type = BandwidthProblem
    shape_example = "256MiB"
    command_name = "bandwidth"
    default_dtype = "float32"  # Every device supports float32.

    def choose_default_shapes(self, backend: Backend) -> Sequence[BandwidthShape]:
        """Return sizes that are powers of two. At the smallest size, the arrays of a pass fit in the cache. At the
        largest size, they fill half of the memory. If the cache is so large that even then memory may not serve the
        pattern ``read``, which has a single array, add a size that is large enough for it.
        """
        info = backend.info
        memory = min(
            info.memory_bytes or _DEFAULT_MEMORY_BYTES, backend.read_free_memory_bytes() or _DEFAULT_MEMORY_BYTES
        )
        smallest = floor_to_power_of_two((info.cache_bytes or DEFAULT_CACHE_BYTES) // MAX_ARRAY_COUNT)
        largest = floor_to_power_of_two(memory // 2 // MAX_ARRAY_COUNT)
        sizes = [smallest << step for step in range(max(largest // smallest, 1).bit_length())]
        needed = 2 * floor_to_power_of_two(MIN_ARRAYS_TO_CACHE_RATIO * (info.cache_bytes or DEFAULT_CACHE_BYTES) - 1)
        return [BandwidthShape(size) for size in (*sizes, *([needed] if sizes[-1] < needed <= memory // 2 else ()))]

    def find_max_possible_rate(
        self, info: DeviceInfo, problem: BandwidthProblem, shape: BandwidthShape | None = None
    ) -> float | None:
        """Return the highest possible rate in bytes per second, or None if a cache may serve most of the bytes.

        The limit is above the datasheet's bandwidth, because some bytes are not moved within the launch: operands that
        are in the cache when the launch begins, and results that are still in the cache when it ends.
        """
        return (
            None if shape is None or problem.warm > 1 else get_max_memory_rate(info, problem.compute_work(shape).nbytes)
        )

    def find_peak_rate(self, info: DeviceInfo, problem: BandwidthProblem) -> float | None:
        """Return the memory bandwidth in the datasheet, reads plus writes, in bytes per second; None if unknown."""
        return find_datasheet_bandwidth(info.name, info.compute_units)

    def may_be_ceiling(self, info: DeviceInfo, problem: BandwidthProblem, shape: BandwidthShape) -> bool:
        """Return whether a measurement of this shape may become a ceiling, the highest confirmed rate of the device.

        A launch with several passes is meant to measure a cache, so any shape may become the ceiling. A launch with one
        pass measures memory, so its arrays must be much larger than the cache.
        """
        return problem.warm > 1 or problem.is_served_by_memory(shape, info.cache_bytes)

    def describe_problem(self, problem: BandwidthProblem) -> Sequence[str]:
        """Return the pattern and, if a launch makes several passes over its arrays, their number."""
        return [problem.pattern, *([f"{problem.warm} passes per launch"] if problem.warm > 1 else [])]

    def make_columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return columns of a report: the number of passes, if above 1, and the share of the datasheet's bandwidth."""
        columns: dict[str, object] = {"passes": row.problem.warm} if row.problem.warm > 1 else {}
        peak = None if info is None else self.find_peak_rate(info, row.problem)
        if peak and row.ok:
            columns["of theoretical"] = f"{100 * row.best_rate * TERA / peak:.1f} %"
        return columns


def get_max_memory_rate(info: DeviceInfo, nbytes: int) -> float | None:
    """Return the highest rate, in bytes per second, that the datasheet allows for a launch that moves ``nbytes`` bytes.

    Return None if the datasheet or the size of the cache is unknown, or if a cache may serve most of the bytes.
    """
    peak = find_datasheet_bandwidth(info.name, info.compute_units, must_be_verified=True)
    if peak is None or not info.cache_bytes or nbytes < _MIN_TRAFFIC_TO_CACHE_RATIO * info.cache_bytes:
        return None
    return _MAX_DATASHEET_RATIO * peak * nbytes / (nbytes - info.cache_bytes)


def floor_to_power_of_two(limit: int) -> int:
    """Return the largest power of two up to ``limit``, or 1024 if ``limit`` is smaller than 1024."""
    return 1 << max(limit.bit_length() - 1, 10)
