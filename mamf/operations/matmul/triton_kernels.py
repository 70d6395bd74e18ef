"""Compute C = A @ B in Triton. This module is imported only if Triton is installed.

A launch has at most one program per tile of C. If there are P programs, program i computes the tiles i, i + P, i + 2P
and so on. Programs that run at the same time should share operands in the cache. So tiles are numbered in groups of
GROUP_M rows of tiles, and column by column within a group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def locate_tile(tile_index, tiles_m, tiles_n, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row and the column of a tile, in units of tiles. C has ``tiles_m`` x ``tiles_n`` tiles.

    ``tile_index``: the number of the tile, in the order that the module's docstring describes.
    """
    tiles_per_group = GROUP_M * tiles_n
    first_row = tile_index // tiles_per_group * GROUP_M
    row_count = min(tiles_m - first_row, GROUP_M)
    return first_row + tile_index % tiles_per_group % row_count, tile_index % tiles_per_group // row_count


@triton.jit  # type: ignore[untyped-decorator]
def make_in_bounds_indices(block_index, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the indices of the BLOCK rows or columns in the block with number ``block_index``.

    Replace indices that are out of range (``size`` and above) by 0, because row or column 0 can always be read. The
    caller does not store results for the replaced indices.
    """
    indices = block_index * BLOCK + tl.arange(0, BLOCK)
    return tl.max_contiguous(tl.multiple_of(tl.where(indices < size, indices, 0), BLOCK), BLOCK).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def multiply_with_pointers(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    m,
    n,
    k,
    a_row_stride,
    a_column_stride,
    b_row_stride,
    b_column_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    IS_K_WHOLE_BLOCKS: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MAX_IMPRECISE_STEPS: tl.constexpr,
):
    """Compute C = A @ B. Load each element of A and B through its own pointer, and store C in row-major order.

    - ``a_row_stride`` to ``b_column_stride``: the distance between successive rows or columns of A or B, in elements.
    - ``IS_K_WHOLE_BLOCKS``: whether K is a multiple of BLOCK_K. ``SUM_DTYPE``: the dtype of the sums.
    - ``INPUT_PRECISION``, ``MAX_IMPRECISE_STEPS``: see ``tl.dot``.
    """
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = locate_tile(tile, tiles_m, tiles_n, GROUP_M)
        a_pointers = (
            a + make_in_bounds_indices(row, m, BLOCK_M)[:, None] * a_row_stride + k_offsets[None, :] * a_column_stride
        )
        b_pointers = (
            b
            + make_in_bounds_indices(column, n, BLOCK_N)[None, :] * b_column_stride
            + k_offsets[:, None] * b_row_stride
        )
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUM_DTYPE)
        for step in range(tl.cdiv(k, BLOCK_K)):
            if IS_K_WHOLE_BLOCKS:
                left, right = tl.load(a_pointers), tl.load(b_pointers)
            else:
                is_within = k_offsets < k - step * BLOCK_K
                left = tl.load(a_pointers, mask=is_within[None, :], other=0.0)
                right = tl.load(b_pointers, mask=is_within[:, None], other=0.0)
            sums = tl.dot(
                left,
                right,
                sums,
                input_precision=INPUT_PRECISION,
                max_num_imprecise_acc=MAX_IMPRECISE_STEPS,
                out_dtype=SUM_DTYPE,
            )
            a_pointers += BLOCK_K * a_column_stride
            b_pointers += BLOCK_K * b_row_stride
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        c_pointers = c + rows.to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(c_pointers, sums.to(c.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def multiply_with_descriptors(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    m,
    n,
    k,
    IS_A_BY_COLUMNS: tl.constexpr,
    IS_B_BY_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MAX_IMPRECISE_STEPS: tl.constexpr,
):
    """Compute C = A @ B, where tensor descriptors ``a``, ``b`` and ``c`` read and write blocks of the matrices.

    If an operand is column-major, its descriptor describes the transposed matrix. The blocks of ``c`` have half the
    width of a tile. Beyond the border of a matrix, a descriptor reads zeros and writes nothing.
    """
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    # The stores use their own tile number instead of the loop variable. With the loop variable, the compiler would make
    # the first loads of the next tile wait for the stores of this tile.
    tile_to_store = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        row, column = locate_tile(tile, tiles_m, tiles_n, GROUP_M)
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUM_DTYPE)
        for step in range(tl.cdiv(k, BLOCK_K)):
            if IS_A_BY_COLUMNS:
                left = a.load([step * BLOCK_K, row * BLOCK_M]).T
            else:
                left = a.load([row * BLOCK_M, step * BLOCK_K])
            if IS_B_BY_COLUMNS:
                right = b.load([column * BLOCK_N, step * BLOCK_K]).T
            else:
                right = b.load([step * BLOCK_K, column * BLOCK_N])
            sums = tl.dot(
                left,
                right,
                sums,
                input_precision=INPUT_PRECISION,
                max_num_imprecise_acc=MAX_IMPRECISE_STEPS,
                out_dtype=SUM_DTYPE,
            )
        tile_to_store += tl.num_programs(0)
        row, column = locate_tile(tile_to_store, tiles_m, tiles_n, GROUP_M)
        left_half, right_half = tl.split(tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        c.store([row * BLOCK_M, column * BLOCK_N], left_half.to(c.dtype))
        c.store([row * BLOCK_M, column * BLOCK_N + BLOCK_N // 2], right_half.to(c.dtype))
