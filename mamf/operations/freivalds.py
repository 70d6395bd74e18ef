"""Verify every entry of C = scale * A @ B without computing A @ B, with Freivalds' test (1977).

The test multiplies by random vectors x of 1 and -1. Let E be the error of C, so that C = scale * A @ B + E. The
residual r = C x - scale * A (B x) is equal to E x, so r shows three things:

- The error of C: the sum of r^2 over all rows, averaged over the vectors, estimates ||E||^2.
- Wrong rows: let E_i be row i of E. Then |r_i| exceeds t ||E_i|| with a probability of at most 2 exp(-t^2 / 2)
  (Hoeffding). So a large |r_i| shows an error in row i, even an error that is too small to show in the norm of C.
- A wrong scale of C: the slope of a linear fit of C x to scale * A (B x) differs from 1.

x is drawn with a random seed after the launch, so no kernel can predict it. The test uses only elementwise
multiplication and torch's sums, not a matmul library. It takes O(MK + KN + MN) operations, so its speed is limited by
memory bandwidth. It is exact for int8 (modulo 2^32, like int32). It sums in float32 for operands of 8 and 16 bits and
for tf32: the error of these sums is 1e-6, while the results may have errors of 1e-3. It sums in float64 for all other
dtypes.

If C is rounded to int8, the rounding would hide small errors from this test. So mamf computes the exact int32 result
with torch's matmul, verifies this result with the test, rounds it, and compares every entry of C with it.

``verify_matmul_with_special_values`` verifies a launch with infinities, NaN and subnormal numbers among the operands.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mamf.dtypes import compute_slope_tolerance
from mamf.kernel import CELL_SIZE, Verdict, WrongCells
from mamf.operations.matmul.shapes import BaseMatmulProblem
from mamf.operations.operand_sets import draw_signs, use_one_torch_thread, verify_special_value_output
from mamf.operations.quantization import QuantizedOperand

#: The number of random vectors x that a test multiplies by.
VECTORS_PER_TEST = 2
# The number of elements that are multiplied at once on a device: 64 MiB in float32. If memory is insufficient, mamf
# tries again with the second number, _RETRY_CHUNK_ELEMENTS.
_CHUNK_ELEMENTS, _RETRY_CHUNK_ELEMENTS = 2**24, 2**16
# The number of elements that are multiplied at once on a CPU, so that they fit in its cache.
_HOST_CHUNK_ELEMENTS = 2**17
# The probability that a test rejects a correct result is at most e^-20 = 2e-9 for each of the test's criteria.
_FALSE_ALARM_EXPONENT = 20.0
# A sum of this many products of two int8 values is exact in float32, because it is at most 2^24, and float32 represents
# every integer up to 2^24.
_MAX_EXACT_TERMS = 1024
# The largest allowed difference between an exact value and the integer to which it is rounded. It is slightly above
# 0.5, because mamf scales the exact sums in float32, which causes small errors.
_MAX_ROUNDING_DISTANCE = 0.5 + 2.0**-16
# The dtype in which products of operands are summed, by operand dtype; float32 for all other dtypes.
_SUM_DTYPE_BY_OPERAND_DTYPE = {"int8": torch.int32, "float32": torch.float64, "float64": torch.float64}

#: A matmul operand: a tensor (batch, rows, K), or a quantized operand (rows, K).
MatmulOperand = torch.Tensor | QuantizedOperand


def slice_rows(operand: MatmulOperand, start: int, stop: int) -> MatmulOperand:
    """Return the rows of an operand from ``start`` up to, but not including, ``stop``. The result is a view."""
    return operand.slice_rows(start, stop) if isinstance(operand, QuantizedOperand) else operand[:, start:stop]


@dataclass(frozen=True)
class MatmulPart:
    """A batch of matmuls of the same shape. It is all or part of the work of a launch.

    ``c`` (batch, M, N) is the output of ``left`` (batch, M, K) @ the transpose of ``right`` (batch, N, K).
    """

    left: MatmulOperand
    right: MatmulOperand
    c: torch.Tensor


def verify_all_entries(problem: BaseMatmulProblem, parts: Sequence[MatmulPart], scale: float = 1.0) -> Verdict:
    """Verify every entry of C, and return the verdict.

    The error in the verdict is an estimate of C's relative error, divided by a safety factor so that a correct C
    practically never fails. ``parts``: the matmuls of the launch. ``scale``: the factor in C = scale * A @ B.
    """
    if parts[0].c.is_cpu:
        with use_one_torch_thread():
            return _verify_entries_in_chunks(problem, parts, scale, _HOST_CHUNK_ELEMENTS)
    try:
        return _verify_entries_in_chunks(problem, parts, scale, _CHUNK_ELEMENTS)
    except torch.OutOfMemoryError:
        pass  # Retry outside of this handler, because its traceback keeps memory alive.
    return _verify_entries_in_chunks(problem, parts, scale, _RETRY_CHUNK_ELEMENTS)


def _verify_entries_in_chunks(
    problem: BaseMatmulProblem, parts: Sequence[MatmulPart], scale: float, chunk_elements: int
) -> Verdict:
    if problem.has_int8_output:
        return _verify_rounded_entries(parts, scale, chunk_elements)
    sum_dtype = _choose_sum_dtype(problem.dtype, parts[0].c.device)
    # If C has more columns than rows, test its transpose. The test sums over each row, and the sum over a short row has
    # a smaller rounding error.
    tall_parts = [
        MatmulPart(part.right, part.left, part.c.mT) if part.c.shape[2] > part.c.shape[1] else part for part in parts
    ]
    statistics = [_compute_residual_statistics(part, scale, sum_dtype, chunk_elements) for part in tall_parts]
    residual_squares, c_squares, worst_ratios, projections, expected_squares = torch.stack(statistics).T.tolist()
    error = divide_or_return_inf(math.sqrt(sum(residual_squares)), math.sqrt(sum(c_squares)))
    if not problem.tolerance or not math.isfinite(error):
        return Verdict(error, problem.tolerance, reference_arithmetic=_REFERENCE_ARITHMETIC)
    sum_count = sum(part.c.shape[0] * part.c.shape[1] for part in tall_parts) * VECTORS_PER_TEST
    worst_ratio = max(worst_ratios)
    rounding_error = max(problem.max_rounding_error, error)
    max_ratio = math.sqrt(2 * (math.log(2 * sum_count) + _FALSE_ALARM_EXPONENT)) * rounding_error
    # For a correct C, the sum of ``expected_squares`` is about VECTORS_PER_TEST * sum(c_squares). In a small matmul, it
    # may be much smaller by chance, which would make the slope too large. So divide at least by the expected value.
    slope = divide_or_return_inf(sum(projections), max(sum(expected_squares), VECTORS_PER_TEST * sum(c_squares)))
    # If a matmul has more rows than K, the errors of its rows are not independent. So count at most K of them.
    degrees_of_freedom = VECTORS_PER_TEST * sum(
        part.c.shape[0] * min(part.c.shape[1], part.left.shape[-1]) for part in tall_parts
    )
    chance_share = _FALSE_ALARM_EXPONENT / degrees_of_freedom
    max_slope = (
        compute_slope_tolerance(problem.dtype, problem.fast_accumulation) + math.sqrt(2 * chance_share) * rounding_error
    )
    reason = ""
    if worst_ratio > max_ratio:
        reason = (
            f"part of the output is wrong: row sums are off by {worst_ratio:.2g}, but rounding explains at most "
            f"{max_ratio:.2g}"
        )
    elif abs(slope) > max_slope:
        reason = (
            f"the output is {1 + slope:.6g} times the expected output; rounding changes it by at most {max_slope:.1g}"
        )
    # The estimated error is random and may exceed the true error by up to this factor, so divide by the factor. It is a
    # bound for sums of squares of normal random numbers (Laurent and Massart, 2000).
    chance_factor = math.sqrt(1 + 2 * math.sqrt(chance_share) + 2 * chance_share)
    return Verdict(error / chance_factor, problem.tolerance, reference_arithmetic=_REFERENCE_ARITHMETIC, reason=reason)


#: How verdicts describe the reference, that is, the computation with which mamf compares C.
_REFERENCE_ARITHMETIC = "A (B x) for random x"


def _verify_rounded_entries(parts: Sequence[MatmulPart], scale: float, chunk_elements: int) -> Verdict:
    """Verify every entry of outputs that are rounded to int8.

    The error of the verdict is ||C - expected|| / ||expected|| and must be 0. ``expected`` is computed exactly.
    """
    squared_error = squared_norm = 0.0
    for part in parts:
        step = max(1, chunk_elements // (part.c.shape[0] * part.c.shape[2]))
        for start in range(0, part.c.shape[1], step):
            rows = slice(start, start + step)
            block = MatmulPart(part.left[:, rows], part.right, part.c[:, rows])  # type: ignore[index]
            exact = _compute_exact_int32_matmul(block)
            if _compute_residual_statistics(
                MatmulPart(block.left, block.right, exact), 1.0, torch.int32, chunk_elements
            )[0].item():
                return Verdict(math.inf, 0.0, reason="the exact matmul that mamf compares C with is itself wrong")
            output = block.c.float()
            expected = round_exact_values_to_int8(output, exact.float() * scale)
            squared_error += (output - expected).square().sum().item()
            squared_norm += expected.square().sum().item()
    return Verdict(
        divide_or_return_inf(math.sqrt(squared_error), math.sqrt(squared_norm)),
        0.0,
        reference_arithmetic=_REFERENCE_ARITHMETIC,
    )


def _compute_exact_int32_matmul(part: MatmulPart) -> torch.Tensor:
    """Compute the exact int32 result of int8 operands, by adding float32 matmuls over slices of K that are short enough
    for exact float32 results.
    """
    sums = torch.zeros(part.c.shape, dtype=torch.int32, device=part.c.device)
    terms = zip(part.left.split(_MAX_EXACT_TERMS, -1), part.right.split(_MAX_EXACT_TERMS, -1), strict=True)  # type: ignore[union-attr]
    for left, right in terms:
        sums += torch.bmm(left.float(), right.float().mT).int()
    return sums


def round_exact_values_to_int8(output: torch.Tensor, exact_values: torch.Tensor) -> torch.Tensor:
    """Round exact values to int8, so that mamf can compare ``output`` with them, and return the rounded values.

    A kernel may round a value halfway between two integers up or down. So if ``output`` has one of the two integers,
    return this integer.
    """
    clamped = exact_values.clamp(-128, 127)
    return torch.where((output - clamped).abs() <= _MAX_ROUNDING_DISTANCE, output, clamped.round())


def find_wrong_cells(problem: BaseMatmulProblem, parts: Sequence[MatmulPart], scale: float = 1.0) -> WrongCells:
    """Divide C into cells of CELL_SIZE x CELL_SIZE entries, and return the cells that have a wrong entry.

    Run Freivalds' test on CELL_SIZE columns of C at a time, to find the wrong rows in these columns. If B is quantized
    in blocks that have more than CELL_SIZE columns, test all columns of a block at once. ``scale``: the factor in
    C = scale * A @ B.
    """
    wrong_cells, matmul_count = set[tuple[int, int, int]](), 0
    for part in parts:
        right, n = part.right, part.c.shape[2]
        step = max(CELL_SIZE, right.scaling.block_rows) if isinstance(right, QuantizedOperand) else CELL_SIZE
        for start in range(0, n, step):
            stop = min(start + step, n)
            columns_of_c = MatmulPart(part.left, slice_rows(right, start, stop), part.c[:, :, start:stop])
            flags = _find_wrong_rows(problem, columns_of_c, scale)
            columns = range(start // CELL_SIZE, -(-stop // CELL_SIZE))
            wrong_cells |= {
                (matmul_count + b, row // CELL_SIZE, column)
                for b, row in flags.nonzero().tolist()
                for column in columns
            }
        matmul_count += len(part.c)
    return WrongCells(frozenset(wrong_cells), *parts[0].c.shape[1:])


def _find_wrong_rows(problem: BaseMatmulProblem, part: MatmulPart, scale: float) -> torch.Tensor:
    """Return booleans (batch, M): True for each row of C whose error is larger than rounding explains."""
    if problem.has_int8_output:
        output = part.c.float()
        return (output != round_exact_values_to_int8(output, _compute_exact_int32_matmul(part).float() * scale)).any(2)
    sum_dtype, c, chunk_elements = _choose_sum_dtype(problem.dtype, part.c.device), part.c, _RETRY_CHUNK_ELEMENTS
    x = draw_signs((c.shape[0], c.shape[2], VECTORS_PER_TEST), c.device)
    expected_products = _multiply_by_vectors(
        part.left, _multiply_transpose_by_vectors(part.right, x, sum_dtype, chunk_elements), sum_dtype, chunk_elements
    )
    residuals = (
        _multiply_by_vectors(c, x, sum_dtype, chunk_elements) - expected_products * (1 if scale == 1 else scale)
    ).abs()
    squares = c.to(torch.float32 if sum_dtype == torch.int32 else sum_dtype).square().sum(-1).nan_to_num()
    max_ratio = math.sqrt(2 * (math.log(2 * residuals.numel()) + _FALSE_ALARM_EXPONENT)) * problem.max_rounding_error
    return (~(residuals <= max_ratio * torch.maximum(squares, squares.mean()).sqrt()[..., None])).any(2)


def divide_or_return_inf(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else (math.inf if numerator else 0.0)


def _compute_residual_statistics(
    part: MatmulPart, scale: float, sum_dtype: torch.dtype, chunk_elements: int
) -> torch.Tensor:
    """Compute five numbers that describe r = C x - scale * A (B x), and return them as a tensor on the device.

    Let y = scale * A (B x). The numbers are ||r||^2 / VECTORS_PER_TEST, ||C||^2, the largest |r_i| / ||C_i|| of a row
    i, the inner product of r and y, and ||y||^2. If int8 operands are summed in int32, the first number is the number
    of wrong entries of C x instead.
    """
    c = part.c
    x = draw_signs((c.shape[0], c.shape[2], VECTORS_PER_TEST), c.device)
    expected = _multiply_by_vectors(
        part.left, _multiply_transpose_by_vectors(part.right, x, sum_dtype, chunk_elements), sum_dtype, chunk_elements
    )
    expected = expected if scale == 1 else expected * scale
    computed = _multiply_by_vectors(c, x, sum_dtype, chunk_elements)
    if sum_dtype == torch.int32:
        wrong_count = (computed != expected).sum().float()
        return torch.stack([wrong_count, wrong_count * 0, wrong_count, wrong_count, wrong_count])
    # torch can convert a 16-bit C while it reads C. Converting C in advance would move five times as many bytes. But
    # torch cannot convert 8-bit floats in this way, so convert an 8-bit C in advance.
    chunks = _split_into_chunks(c if c.dtype.itemsize > 1 else c.to(sum_dtype), chunk_elements)
    norms_by_chunk = [torch.linalg.vector_norm(chunk, dim=-1, dtype=sum_dtype) for chunk in chunks]
    row_squares = torch.cat(norms_by_chunk, dim=1).square()
    r = computed - expected
    # If the norm of a row is below average, use the average instead, because rounding errors in the row may be as large
    # as in other rows.
    norms = torch.maximum(row_squares, row_squares.mean()).sqrt()[..., None]
    worst = torch.where(r == 0, r, r.abs() / norms).max()
    projection = (r * expected).sum()
    return torch.stack(
        [r.square().sum() / VECTORS_PER_TEST, row_squares.sum(), worst, projection, expected.square().sum()]
    )


def _choose_sum_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype in which to sum products of operands of ``dtype``; float32 if the device has no float64."""
    sum_dtype = _SUM_DTYPE_BY_OPERAND_DTYPE.get(dtype, torch.float32)
    try:
        torch.empty(0, dtype=sum_dtype, device=device)
    except TypeError:
        return torch.float32
    return sum_dtype


def _multiply_by_vectors(
    operand: MatmulOperand, vectors: torch.Tensor, sum_dtype: torch.dtype, chunk_elements: int
) -> torch.Tensor:
    """Multiply an operand (batch, rows, K) by vectors (batch, K, count), and return (batch, rows, count).

    ``sum_dtype``: the dtype of the sums. ``chunk_elements``: the number of elements to multiply at once.
    """
    if isinstance(operand, QuantizedOperand):
        values = (part.dequantize()[None] for part in operand.split_into_row_chunks(chunk_elements))
        return torch.cat([_multiply_by_vectors(each, vectors, sum_dtype, chunk_elements) for each in values], dim=1)
    batch = len(operand)
    if batch > 1 and batch * max(operand.shape[1:]) * VECTORS_PER_TEST > chunk_elements:
        return torch.cat(
            [
                _multiply_by_vectors(*pair, sum_dtype, chunk_elements)
                for pair in zip(operand.split(1), vectors.split(1), strict=True)
            ]
        )
    # Multiply by signs in the operand's dtype, because this is exact and moves fewer bytes than a wider dtype. Use a
    # wider dtype for 8-bit floats, which torch cannot multiply elementwise, and on CPUs, which are slow with 16-bit
    # floats.
    is_widened = operand.is_cpu or (operand.dtype.itemsize == 1 and operand.dtype != torch.int8)
    factor_dtype = sum_dtype if is_widened else operand.dtype
    factors = vectors.to(factor_dtype) if vectors.dtype == torch.int8 else vectors
    is_stored_by_rows = operand.stride(-1) <= operand.stride(-2)
    chunks = _split_into_chunks(operand if is_stored_by_rows else operand.mT, chunk_elements // VECTORS_PER_TEST)
    if is_stored_by_rows:
        signs = factors.mT[:, None]
        return torch.cat(
            [(chunk.to(factor_dtype)[:, :, None] * signs).sum(-1, dtype=sum_dtype) for chunk in chunks],
            dim=1,
        )
    sums, start = torch.zeros(batch, VECTORS_PER_TEST, operand.shape[1], dtype=sum_dtype, device=operand.device), 0
    for chunk in chunks:
        signs = factors[:, start : start + chunk.shape[1], :, None]
        sums += (chunk.to(factor_dtype)[:, :, None] * signs).sum(1, dtype=sum_dtype)
        start += chunk.shape[1]
    return sums.mT


def _multiply_transpose_by_vectors(
    operand: MatmulOperand, vectors: torch.Tensor, sum_dtype: torch.dtype, chunk_elements: int
) -> torch.Tensor:
    """Multiply the transpose of an operand (batch, rows, K) by vectors (batch, rows, count); return (batch, K, count).

    ``sum_dtype`` and ``chunk_elements`` are as in ``_multiply_by_vectors``.
    """
    if not isinstance(operand, QuantizedOperand):
        return _multiply_by_vectors(operand.mT, vectors, sum_dtype, chunk_elements)
    sums, start = torch.zeros(1, operand.shape[1], vectors.shape[-1], dtype=sum_dtype, device=vectors.device), 0
    for part in operand.split_into_row_chunks(chunk_elements):
        values = part.dequantize()
        sums += _multiply_by_vectors(
            values.mT[None], vectors[:, start : start + len(values)], sum_dtype, chunk_elements
        )
        start += len(values)
    return sums


def _split_into_chunks(tensor: torch.Tensor, chunk_elements: int) -> Iterator[torch.Tensor]:
    """Split a tensor (batch, rows, columns) into chunks of rows with about ``chunk_elements`` elements each."""
    yield from tensor.split(max(1, chunk_elements // (tensor.shape[0] * tensor.shape[2])), dim=1)


def verify_matmul_with_special_values(
    problem: BaseMatmulProblem,
    split_into_parts: Callable[[torch.Tensor], Sequence[MatmulPart]],
    launch: Callable[[], torch.Tensor],
    scale: float,
) -> Verdict:
    """Verify a launch with an infinity, a NaN and a subnormal number among the operands.

    Change the operands, launch, restore the operands, and compare the output with the output of a launch before the
    changes. The NaN in B must make a column of C NaN. The infinity in A must make a row of C infinite. Each value in
    this row must have the sign of the element of B by which the infinity was multiplied, or be NaN if that element is
    0. Another row of A contains only the subnormal number and zeros, and the host computes this row of C. All other
    values of C must have the same bits as before. Do not check operands with 8 bits or fewer, because their dtypes have
    no infinity.

    ``split_into_parts``: splits an output into matmuls. ``launch``: runs the kernel and returns the output. ``scale``:
    the factor in C = scale * A @ B.
    """
    output_before = launch().clone()
    matmul_index = secrets.randbelow(len(split_into_parts(output_before)))
    part = split_into_parts(output_before)[matmul_index]
    if any(isinstance(each, QuantizedOperand) or each.dtype.itemsize == 1 for each in (part.left, part.right)):
        return Verdict(0.0, 0.0)
    a, b = part.left[-1], part.right[-1]  # type: ignore[index]
    (m, k), n = a.shape, len(b)
    k_index, column, row = secrets.randbelow(k), secrets.randbelow(n), secrets.randbelow(m)
    subnormal_row, subnormal = (row + 1) % m, torch.finfo(a.dtype).tiny / 4
    factors, expected = b[:, k_index].clone(), output_before.clone()
    c = split_into_parts(expected)[matmul_index].c[-1]
    c[row] = (torch.where(factors == 0, math.nan, factors.sign()) * math.inf).to(c.dtype)
    saved_rows = [(each, each.clone()) for each in (a[subnormal_row], a[row], b[column])]
    try:
        a[subnormal_row] = 0.0
        a[subnormal_row, k_index] = subnormal
        a[row, k_index] = math.inf
        b[column, secrets.randbelow(k)] = math.nan
        output = launch()
    finally:
        for memory, values in reversed(saved_rows):
            memory.copy_(values)
    details: dict[str, str | float] = {}
    if subnormal_row != row:
        c_row, exact = (
            split_into_parts(output)[matmul_index].c[-1][subnormal_row],
            factors.cpu().double() * (subnormal * scale),
        )
        spacing = torch.finfo(c_row.dtype).tiny * torch.finfo(c_row.dtype).eps
        is_close = ((c_row.cpu().double() - exact).abs() <= problem.tolerance * exact.abs() + spacing).to(c.device)
        # A kernel may treat subnormal numbers as zero. So expect the value that the kernel computed if this value is
        # correct or 0. Expect the exact value in place of any other value, so that the comparison below fails.
        c[subnormal_row] = torch.where(is_close | (c_row == 0), c_row, exact.to(c_row))
        details["subnormal operands"] = "kept" if (c_row[c_row == c_row] != 0).any() else "flushed to zero"
    c[:, column] = math.nan
    return verify_special_value_output(output, expected, "an infinity, a NaN and a subnormal number", details)
