"""Implement the passes over arrays as Triton kernels. mamf imports this file only if Triton is installed.

In each pass, a program reads or writes different blocks of the arrays than in the previous pass. Otherwise blocks would
come from the first-level cache of a compute unit, which these kernels should not measure, and the compiler could merge
equal passes into one.
"""

from __future__ import annotations

import triton
import triton.language as tl

# In each pass, program i processes the blocks that program i + _PROGRAM_SHIFT processed in the previous pass.
_PROGRAM_SHIFT = tl.constexpr(37)


@triton.jit  # type: ignore[untyped-decorator]
def run_copy_passes(a, b, element_count, passes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for pass_number in range(passes):
        first_block = (tl.program_id(0) + pass_number * _PROGRAM_SHIFT) % tl.num_programs(0)
        for block in range(first_block, tl.cdiv(element_count, BLOCK), tl.num_programs(0)):
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(a + offsets, tl.load(b + offsets, mask=offsets < element_count), mask=offsets < element_count)


@triton.jit  # type: ignore[untyped-decorator]
def run_read_passes(b, sums, element_count, passes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    for pass_number in range(passes):
        first_block = (tl.program_id(0) + pass_number * _PROGRAM_SHIFT) % tl.num_programs(0)
        for block in range(first_block, tl.cdiv(element_count, BLOCK), tl.num_programs(0)):
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(b + offsets, mask=offsets < element_count, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def run_write_passes(a, scalar, element_count, passes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for pass_number in range(passes):
        first_block = (tl.program_id(0) + pass_number * _PROGRAM_SHIFT) % tl.num_programs(0)
        for block in range(first_block, tl.cdiv(element_count, BLOCK), tl.num_programs(0)):
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(a + offsets, tl.full([BLOCK], 0.0, tl.float32) + scalar, mask=offsets < element_count)


@triton.jit  # type: ignore[untyped-decorator]
def run_triad_passes(a, b, c, scalar, element_count, passes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for pass_number in range(passes):
        first_block = (tl.program_id(0) + pass_number * _PROGRAM_SHIFT) % tl.num_programs(0)
        for block in range(first_block, tl.cdiv(element_count, BLOCK), tl.num_programs(0)):
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            left = tl.load(b + offsets, mask=offsets < element_count).to(tl.float32)
            right = tl.load(c + offsets, mask=offsets < element_count).to(tl.float32)
            tl.store(a + offsets, left + scalar * right, mask=offsets < element_count)
