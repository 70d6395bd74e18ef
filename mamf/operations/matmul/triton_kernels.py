"""Triton kernels for matrix products; imported only if Triton is installed.

If there are P programs, each computes every P-th tile of C; with one program per tile it computes one tile. Tiles run
down a group of rows before they continue in the next column, so concurrent programs share operands in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def locate_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row and the column of a tile, both counted in tiles."""
    in_group = GROUP_M * tiles_n
    first = tile // in_group * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    return first + tile % in_group % rows, tile % in_group // rows


@triton.jit  # type: ignore[untyped-decorator]
def make_clamped_indices(first, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a block of BLOCK indices. Indices beyond ``size`` become 0, which is safe to read; the caller does not
    store their results.
    """
    indices = first * BLOCK + tl.arange(0, BLOCK)
    return tl.max_contiguous(tl.multiple_of(tl.where(indices < size, indices, 0), BLOCK), BLOCK).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def multiply_by_pointers(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    m,
    n,
    k,
    a_row,
    a_column,
    b_row,
    b_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE_K: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """Compute C = A @ B, reading operands by pointers. ``a_row`` to ``b_column``: their strides in elements.

    C is stored by rows.
    """
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    along_k = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = locate_tile(tile, tiles_m, tiles_n, GROUP_M)
        a_at = a + make_clamped_indices(row, m, BLOCK_M)[:, None] * a_row + along_k[None, :] * a_column
        b_at = b + make_clamped_indices(column, n, BLOCK_N)[None, :] * b_column + along_k[:, None] * b_row
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUMS)
        for step in range(tl.cdiv(k, BLOCK_K)):
            if WHOLE_K:
                left, right = tl.load(a_at), tl.load(b_at)
            else:
                is_within = along_k < k - step * BLOCK_K
                left = tl.load(a_at, mask=is_within[None, :], other=0.0)
                right = tl.load(b_at, mask=is_within[:, None], other=0.0)
            sums = tl.dot(left, right, sums, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=SUMS)
            a_at += BLOCK_K * a_column
            b_at += BLOCK_K * b_row
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        c_at = c + rows.to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(c_at, sums.to(c.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def multiply_by_descriptors(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    m,
    n,
    k,
    A_BY_COLUMNS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """Compute C = A @ B, reading and writing by tensor descriptors.

    If an operand is stored by columns, its descriptor describes the transposed matrix. The blocks of ``c`` have half
    the width of a tile. Beyond the border of a matrix, a descriptor reads zeros and writes nothing.
    """
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    # Use a counter separate from the loop's, so that stores do not delay the next tile's first loads.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        row, column = locate_tile(tile, tiles_m, tiles_n, GROUP_M)
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUMS)
        for step in range(tl.cdiv(k, BLOCK_K)):
            if A_BY_COLUMNS:
                left = a.load([step * BLOCK_K, row * BLOCK_M]).T
            else:
                left = a.load([row * BLOCK_M, step * BLOCK_K])
            if B_BY_COLUMNS:
                right = b.load([column * BLOCK_N, step * BLOCK_K]).T
            else:
                right = b.load([step * BLOCK_K, column * BLOCK_N])
            sums = tl.dot(left, right, sums, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=SUMS)
        stored += tl.num_programs(0)
        row, column = locate_tile(stored, tiles_m, tiles_n, GROUP_M)
        halves = tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        first, second = tl.split(halves)
        c.store([row * BLOCK_M, column * BLOCK_N], first.to(c.dtype))
        c.store([row * BLOCK_M, column * BLOCK_N + BLOCK_N // 2], second.to(c.dtype))
