"""Compute C = A @ B^T on Hopper in Gluon, a lower-level language of Triton.

In Gluon, a program controls memory layouts and the work of each warp. This module is imported only if the installed
Triton has Gluon.

A program has one warp that loads blocks of A and B into a ring buffer in shared memory, and two groups of four warps
that multiply these blocks. The slots of the ring buffer are called stages. A block of A has 64 rows, because a group
multiplies 64 rows with one instruction.

With P programs, program i computes the tiles i, i + P, i + 2P and so on of C. It loads the first blocks of its next
tile while it stores the results of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mamf.operations.matmul import triton_kernels

locate_tile = gluon.jit(triton_kernels.locate_tile.fn)


@gluon.jit  # type: ignore[untyped-decorator]
def load_operand_blocks(a, b, ring_buffer, tile_and_step_counts, BLOCKS_PER_TILE: gl.constexpr, GROUP_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load blocks of A and B into the ring buffer. Load a stage again as soon as both groups of warps have read it.

    A stage contains one block of B, and ``BLOCKS_PER_TILE`` blocks of A that are all multiplied by this block of B.
    ``tile_and_step_counts``: the numbers of tiles along M and along N, and the number of blocks along K. ``GROUP_M``:
    the number of rows of tiles to which programs that run at the same time are limited. Because of this limit, they
    share operands in the cache.
    """
    left, right, _, ready_barriers, free_barriers = ring_buffer
    tiles_m, tiles_n, steps = tile_and_step_counts
    BLOCK_N: gl.constexpr = b.block_shape[0]
    BLOCK_K: gl.constexpr = b.block_shape[1]
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = locate_tile(tile, tiles_m, tiles_n, GROUP_M)
        for step in range(steps):
            stage = count % right.shape[0]
            mbarrier.wait(free_barriers.index(stage), (count // right.shape[0] + 1) & 1)
            ready_barrier = ready_barriers.index(stage)
            mbarrier.expect(ready_barrier, (BLOCKS_PER_TILE * 64 + BLOCK_N) * BLOCK_K * a.dtype.primitive_bitwidth // 8)
            for block in gl.static_range(BLOCKS_PER_TILE):
                tma.async_copy_global_to_shared(
                    a,
                    [(row * BLOCKS_PER_TILE + block) * 64, step * BLOCK_K],
                    ready_barrier,
                    left.index(stage * BLOCKS_PER_TILE + block),
                )
            tma.async_copy_global_to_shared(b, [column * BLOCK_N, step * BLOCK_K], ready_barrier, right.index(stage))
            count += 1


@gluon.jit  # type: ignore[untyped-decorator]
def store_tile_part(c, store_buffer, part, row, column):  # type: ignore[no-untyped-def]
    """Write ``part`` of a tile to C at ``row`` and ``column``, through ``store_buffer`` in shared memory.

    First wait until the previous part in ``store_buffer`` has been written.
    """
    tma.store_wait(0)
    store_buffer.store(part.to(c.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c, [row, column], store_buffer)


@gluon.jit  # type: ignore[untyped-decorator]
def compute_tile_part(  # type: ignore[no-untyped-def]
    c,
    ring_buffer,
    tile_and_step_counts,
    GROUP_INDEX: gl.constexpr,
    BLOCKS_PER_TILE: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Compute the part of each tile that belongs to one group of four warps, and write the part to C.

    A tile has two or three blocks of 64 rows. Each of the two groups computes one block and, if there is a third block,
    half of its columns. Sums stay in registers. While the tensor cores multiply the blocks of one step along K, the
    group waits for the blocks of the next step.
    """
    left, right, store_buffer, ready_barriers, free_barriers = ring_buffer
    tiles_m, tiles_n, steps = tile_and_step_counts
    STAGES: gl.constexpr = right.shape[0]
    BLOCK_N: gl.constexpr = right.shape[1]
    HALF_BLOCK_N: gl.constexpr = BLOCK_N // 2
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = locate_tile(tile, tiles_m, tiles_n, GROUP_M)
        sums = gl.zeros((64, BLOCK_N), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
        third_block_sums = gl.zeros(
            (64, HALF_BLOCK_N), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_BLOCK_N, 16])
        )
        for step in range(steps):
            mbarrier.wait(ready_barriers.index(count % STAGES), (count // STAGES) & 1)
            first_block, b_block = count % STAGES * BLOCKS_PER_TILE, right.index(count % STAGES)
            sums = warpgroup_mma(left.index(first_block + GROUP_INDEX), b_block.permute((1, 0)), sums, is_async=True)
            if BLOCKS_PER_TILE == 3:
                columns = b_block.slice(GROUP_INDEX * HALF_BLOCK_N, HALF_BLOCK_N).permute((1, 0))
                third_block_sums = warpgroup_mma(left.index(first_block + 2), columns, third_block_sums, is_async=True)
                sums, third_block_sums = warpgroup_mma_wait(2, deps=(sums, third_block_sums))
            else:
                sums = warpgroup_mma_wait(1, deps=(sums,))
            mbarrier.arrive(free_barriers.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        sums, third_block_sums = warpgroup_mma_wait(0, deps=(sums, third_block_sums))
        mbarrier.arrive(free_barriers.index((count + STAGES - 1) % STAGES))
        halves = sums.reshape((64, 2, HALF_BLOCK_N)).permute((0, 2, 1)).split()
        for half in gl.static_range(2):
            store_tile_part(
                c,
                store_buffer.index(GROUP_INDEX),
                halves[half],
                (row * BLOCKS_PER_TILE + GROUP_INDEX) * 64,
                column * BLOCK_N + half * HALF_BLOCK_N,
            )
        if BLOCKS_PER_TILE == 3:
            store_tile_part(
                c,
                store_buffer.index(GROUP_INDEX),
                third_block_sums,
                (row * BLOCKS_PER_TILE + 2) * 64,
                column * BLOCK_N + GROUP_INDEX * HALF_BLOCK_N,
            )
    tma.store_wait(0)


@gluon.jit  # type: ignore[untyped-decorator]
def multiply_with_warp_groups(  # type: ignore[no-untyped-def]
    a, b, c, m, n, k, BLOCKS_PER_TILE: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr
):
    """Compute C = A @ B^T with two groups of warps that multiply and one warp that loads.

    - ``a``, ``b``, ``c``: tensor descriptors of A (M, K), B (N, K) and C (M, N).
    - ``BLOCKS_PER_TILE``: the number of blocks of 64 rows in a tile, 2 or 3.
    - ``STAGES``: the number of stages of the ring buffer.
    """
    BLOCK_N: gl.constexpr = b.block_shape[0]
    BLOCK_K: gl.constexpr = b.block_shape[1]
    left = gl.allocate_shared_memory(a.dtype, [STAGES * BLOCKS_PER_TILE, 64, BLOCK_K], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    store_buffer = gl.allocate_shared_memory(c.dtype, [2, 64, c.block_shape[1]], c.layout)
    ready_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready_barriers.index(stage), count=1)
        mbarrier.init(free_barriers.index(stage), count=2)
    ring_buffer = (left, right, store_buffer, ready_barriers, free_barriers)
    tile_and_step_counts = (gl.cdiv(m, BLOCKS_PER_TILE * 64), gl.cdiv(n, BLOCK_N), gl.cdiv(k, BLOCK_K))
    # The last two arguments are the number of warps and the registers per thread, for the second group and the loading
    # warp. The first group consists of the four warps of the kernel itself, and gets the remaining registers.
    gl.warp_specialize(
        [
            (compute_tile_part, (c, ring_buffer, tile_and_step_counts, gl.constexpr(0), BLOCKS_PER_TILE, GROUP_M)),
            (compute_tile_part, (c, ring_buffer, tile_and_step_counts, gl.constexpr(1), BLOCKS_PER_TILE, GROUP_M)),
            (load_operand_blocks, (a, b, ring_buffer, tile_and_step_counts, BLOCKS_PER_TILE, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )
