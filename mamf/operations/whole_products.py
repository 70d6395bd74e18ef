"""Verifies all of C = scale * A @ B without computing A @ B: Freivalds' test (1977) with random vectors x of 1 and -1.

If C = scale * A @ B + E, then r = C x - scale * A (B x) = E x, and r gives three facts about E:

- The mean of r^2 over all rows and vectors is the square of ||E||, so it gives the relative error of all of C.
- In row i, |r| exceeds t ||E_i|| with a probability of at most 2 exp(-t^2 / 2) (Hoeffding). So a large |r| shows an
  error in that row, even one that is too small to show in the norm of C.
- The slope of C x against A (B x) is that of C against A @ B.

x is drawn from fresh entropy after the launch. The test uses only elementwise multiplication and torch's sums, not a
matmul library, and takes O(MK + KN + MN), memory-bound. It is exact for int8 (modulo 2^32, like int32). It uses float32
for operands of 8 and 16 bits and tf32 (its error is 1e-6, their bounds are 1e-3), and float64 otherwise.

If C is rounded to int8, rounding would hide small errors from this test. Then a library computes the exact int32
result, the test verifies that result, and every entry of C is compared with it.

``verify_special_product`` verifies a launch with infinities, NaN and subnormal numbers among the operands.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mamf.dtypes import compute_slope_tolerance
from mamf.kernel import CELL, Verdict, WrongCells
from mamf.operations.matmul.shapes import ProductProblem
from mamf.operations.operand_sets import draw_signs, use_one_torch_thread, verify_special_values
from mamf.operations.quantization import QuantizedOperand

#: The number of random vectors in a test.
VECTORS_PER_TEST = 2
# Elements to multiply at once: 64 MiB in float32, or fewer if that much is not free. On a host they fit in its cache.
_CHUNKS = (2**24, 2**16)
_HOST_CHUNK = 2**17
# The probability of a false alarm is e^-20 = 2e-9 for each figure of a test.
_FALSE_ALARM_EXPONENT = 20.0
# The number of terms that float32 sums exactly: the sum of 1024 products of two int8 values is at most 2^24.
_MAX_EXACT_TERMS = 1024
# A value may be rounded to an integer that is less than this away. The limit is above 0.5 because sums are scaled in
# float32.
_MAX_ROUNDING_DISTANCE = 0.5 + 2.0**-16
_WIDE = {"int8": torch.int32, "float32": torch.float64, "float64": torch.float64}

#: An operand (batch, rows, K), or quantized (rows, K).
Operand = torch.Tensor | QuantizedOperand


@dataclass(frozen=True)
class MatmulPart:
    """Matmuls of one shape: ``c`` (batch, M, N) = ``left`` (batch, M, K) @ the transpose of ``right`` (batch, N, K)."""

    left: Operand
    right: Operand
    c: torch.Tensor

    def orient_for_short_rows(self) -> MatmulPart:
        """Return the part or its transpose, whichever has shorter rows: then fewer rounding errors add up in a sum."""
        return MatmulPart(self.right, self.left, self.c.mT) if self.c.shape[2] > self.c.shape[1] else self


def verify_all_entries(problem: ProductProblem, parts: Sequence[MatmulPart], scale: float = 1.0) -> Verdict:
    """Return the verdict on all entries of all parts. Its error is a low estimate of C's relative error."""
    if parts[0].c.is_cpu:
        with use_one_torch_thread():
            return _verify_entries_in_chunks(problem, parts, scale, _HOST_CHUNK)
    try:
        return _verify_entries_in_chunks(problem, parts, scale, _CHUNKS[0])
    except torch.OutOfMemoryError:
        pass  # retry outside the handler, whose traceback keeps memory alive
    return _verify_entries_in_chunks(problem, parts, scale, _CHUNKS[1])


def _verify_entries_in_chunks(
    problem: ProductProblem, parts: Sequence[MatmulPart], scale: float, elements: int
) -> Verdict:
    if problem.has_int8_output:
        return _verify_rounded_entries(parts, scale, elements)
    wide = _choose_sum_dtype(problem.dtype, parts[0].c.device)
    oriented = [part.orient_for_short_rows() for part in parts]
    figures = torch.stack([_compute_residual_statistics(part, scale, wide, elements) for part in oriented]).tolist()
    squares, of_c, of_worst, along, of_expected = (list(each) for each in zip(*figures, strict=True))
    error = _divide_or_inf(math.sqrt(sum(squares)), math.sqrt(sum(of_c)))
    tolerance = problem.tolerance
    if not tolerance or not math.isfinite(error):
        return Verdict(error, tolerance, reference=_REFERENCE)
    sums = sum(part.c.shape[0] * part.c.shape[1] for part in oriented) * VECTORS_PER_TEST
    worst, most = (
        max(of_worst),
        math.sqrt(2 * (math.log(2 * sums) + _FALSE_ALARM_EXPONENT)) * max(problem.rounding, error),
    )
    # The norm of A (B x) of a small matmul may be small by chance. On average it equals the norm of C.
    slope = _divide_or_inf(sum(along), max(sum(of_expected), VECTORS_PER_TEST * sum(of_c)))
    steepest = compute_slope_tolerance(problem.dtype, problem.fast_accumulation)
    # With a short K the errors of rows are correlated, because they depend on few numbers.
    freedom = VECTORS_PER_TEST * sum(part.c.shape[0] * min(part.c.shape[1], part.left.shape[-1]) for part in oriented)
    steepest += math.sqrt(2 * _FALSE_ALARM_EXPONENT / freedom) * max(problem.rounding, error)
    reason = ""
    if worst > most:
        reason = (
            f"part of the output is wrong: row sums differ by {worst:.2g}, but rounding explains at most {most:.2g}"
        )
    elif abs(slope) > steepest:
        reason = f"the output is {1 + slope:.6g} times the expected one; rounding changes it by at most {steepest:.1g}"
    return Verdict(error / _compute_chance_factor(freedom), tolerance, reference=_REFERENCE, reason=reason)


_REFERENCE = "A (B x) for random x"


def _verify_rounded_entries(parts: Sequence[MatmulPart], scale: float, elements: int) -> Verdict:
    """Return the verdict on int8 outputs: their relative distance from the expected values."""
    distance = size = 0.0
    for part in parts:
        step = max(1, elements // (part.c.shape[0] * part.c.shape[2]))
        for start in range(0, part.c.shape[1], step):
            rows = slice(start, start + step)
            block = MatmulPart(part.left[:, rows], part.right, part.c[:, rows])  # type: ignore[index]
            exact = _compute_exact_int32(block)
            if _compute_residual_statistics(MatmulPart(block.left, block.right, exact), 1.0, torch.int32, elements)[
                0
            ].item():
                return Verdict(math.inf, 0.0, reason="the exact product that C is compared with is wrong")
            found = block.c.float()
            expected = round_like_result(found, exact.float() * scale)
            distance += (found - expected).square().sum().item()
            size += expected.square().sum().item()
    return Verdict(_divide_or_inf(math.sqrt(distance), math.sqrt(size)), 0.0, reference=_REFERENCE)


def _compute_exact_int32(part: MatmulPart) -> torch.Tensor:
    """Compute the exact int32 result of int8 operands, from float32 matmuls over few terms of K each."""
    sums = torch.zeros(part.c.shape, dtype=torch.int32, device=part.c.device)
    terms = zip(part.left.split(_MAX_EXACT_TERMS, -1), part.right.split(_MAX_EXACT_TERMS, -1), strict=True)  # type: ignore[union-attr]
    for left, right in terms:
        sums += torch.bmm(left.float(), right.float().mT).int()
    return sums


def round_like_result(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the expected int8 outputs for these exact values. Where ``found`` is a nearest integer, it is the expected
    output.
    """
    limited = exact.clamp(-128, 127)
    return torch.where((found - limited).abs() <= _MAX_ROUNDING_DISTANCE, found, limited.round())


def find_wrong_cells(problem: ProductProblem, parts: Sequence[MatmulPart], scale: float = 1.0) -> WrongCells:
    """Find the wrong cells, testing CELL columns of C at a time, or all columns of B's block that share a scale."""
    found, products = set[tuple[int, int, int]](), 0
    for part in parts:
        right, n = part.right, part.c.shape[2]
        step = max(CELL, right.scaling.rows) if isinstance(right, QuantizedOperand) else CELL
        for start in range(0, n, step):
            stop = min(start + step, n)
            rows = right.slice_rows(start, stop) if isinstance(right, QuantizedOperand) else right[:, start:stop]
            flags = _find_wrong_rows(problem, MatmulPart(part.left, rows, part.c[:, :, start:stop]), scale)
            columns = range(start // CELL, -(-stop // CELL))
            found |= {(products + b, row // CELL, column) for b, row in flags.nonzero().tolist() for column in columns}
        products += len(part.c)
    return WrongCells(frozenset(found), *parts[0].c.shape[1:])


def _find_wrong_rows(problem: ProductProblem, part: MatmulPart, scale: float) -> torch.Tensor:
    """Return for each row of each matmul whether its error is larger than rounding explains."""
    if problem.has_int8_output:
        found = part.c.float()
        return (found != round_like_result(found, _compute_exact_int32(part).float() * scale)).any(2)
    wide, c, elements = _choose_sum_dtype(problem.dtype, part.c.device), part.c, _CHUNKS[1]
    x = draw_signs((c.shape[0], c.shape[2], VECTORS_PER_TEST), c.device)
    products = _multiply(part.left, _multiply_transposed(part.right, x, wide, elements), wide, elements)
    off = (_multiply(c, x, wide, elements) - products * (1 if scale == 1 else scale)).abs()
    squares = c.to(torch.float32 if wide == torch.int32 else wide).square().sum(-1).nan_to_num()
    most = math.sqrt(2 * (math.log(2 * off.numel()) + _FALSE_ALARM_EXPONENT)) * problem.rounding
    return (~(off <= most * torch.maximum(squares, squares.mean()).sqrt()[..., None])).any(2)


def _divide_or_inf(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


def _compute_chance_factor(freedom: int) -> float:
    """Return the factor by which the root of a mean of ``freedom`` squares may exceed the true value by chance (Laurent
    and Massart, 2000).
    """
    share = _FALSE_ALARM_EXPONENT / freedom
    return math.sqrt(1 + 2 * math.sqrt(share) + 2 * share)


def _compute_residual_statistics(part: MatmulPart, scale: float, wide: torch.dtype, elements: int) -> torch.Tensor:
    """Compute five figures on the device: ||r||^2 / VECTORS, ||C||^2, the largest |r| in units of its row's norm,
    <r, A (B x)> and <A (B x), A (B x)>.
    """
    c = part.c
    x = draw_signs((c.shape[0], c.shape[2], VECTORS_PER_TEST), c.device)
    expected = _multiply(part.left, _multiply_transposed(part.right, x, wide, elements), wide, elements)
    expected = expected if scale == 1 else expected * scale
    found = _multiply(c, x, wide, elements)
    if wide == torch.int32:
        wrong = (found != expected).sum().float()
        return torch.stack([wrong, wrong * 0, wrong, wrong, wrong])
    # torch converts while it reads, except for 8-bit floats. Converting all of C first would move five times the bytes.
    read = c if c.dtype.itemsize > 1 else c.to(wide)
    sizes = [torch.linalg.vector_norm(chunk, dim=-1, dtype=wide) for chunk in _split_into_chunks(read, elements)]
    squares = torch.cat(sizes, dim=1).square()
    r = found - expected
    # A row with a small norm is compared with the mean of all rows, because its rounding errors may be as large.
    norms = torch.maximum(squares, squares.mean()).sqrt()[..., None]
    worst = torch.where(r == 0, r, r.abs() / norms).max()
    along, of_expected = (r * expected).sum(), expected.square().sum()
    return torch.stack([r.square().sum() / VECTORS_PER_TEST, squares.sum(), worst, along, of_expected])


def _choose_sum_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype to sum in; float32 if the device has no float64."""
    wide = _WIDE.get(dtype, torch.float32)
    try:
        torch.empty(0, dtype=wide, device=device)
    except TypeError:
        return torch.float32
    return wide


def _multiply(operand: Operand, vectors: torch.Tensor, wide: torch.dtype, elements: int) -> torch.Tensor:
    """Multiply rows (batch, rows, K) by vectors (batch, K, count)."""
    if isinstance(operand, QuantizedOperand):
        values = (part.values()[None] for part in operand.split_rows(elements))
        return torch.cat([_multiply(each, vectors, wide, elements) for each in values], dim=1)
    batch = len(operand)
    if batch > 1 and batch * max(operand.shape[1:]) * VECTORS_PER_TEST > elements:
        pairs = zip(operand.split(1), vectors.split(1), strict=True)
        return torch.cat([_multiply(*pair, wide, elements) for pair in pairs])
    # Multiplying by signs is exact in the operand's dtype, which moves fewer bytes. But torch cannot multiply 8-bit
    # floats elementwise, and a host is slow with 16 bits.
    is_widened = operand.is_cpu or (operand.dtype.itemsize == 1 and operand.dtype != torch.int8)
    own = wide if is_widened else operand.dtype
    factors = vectors.to(own) if vectors.dtype == torch.int8 else vectors
    lies_by_rows = operand.stride(-1) <= operand.stride(-2)
    chunks = _split_into_chunks(operand if lies_by_rows else operand.mT, elements // VECTORS_PER_TEST)
    if lies_by_rows:
        along = factors.mT[:, None]
        return torch.cat([(chunk.to(own)[:, :, None] * along).sum(-1, dtype=wide) for chunk in chunks], dim=1)
    found, start = torch.zeros(batch, VECTORS_PER_TEST, operand.shape[1], dtype=wide, device=operand.device), 0
    for chunk in chunks:
        along = factors[:, start : start + chunk.shape[1], :, None]
        found += (chunk.to(own)[:, :, None] * along).sum(1, dtype=wide)
        start += chunk.shape[1]
    return found.mT


def _multiply_transposed(operand: Operand, vectors: torch.Tensor, wide: torch.dtype, elements: int) -> torch.Tensor:
    """Multiply the transpose of rows (batch, rows, K) by vectors (batch, rows, count)."""
    if not isinstance(operand, QuantizedOperand):
        return _multiply(operand.mT, vectors, wide, elements)
    found, start = torch.zeros(1, operand.shape[1], vectors.shape[-1], dtype=wide, device=vectors.device), 0
    for part in operand.split_rows(elements):
        values = part.values()
        found += _multiply(values.mT[None], vectors[:, start : start + len(values)], wide, elements)
        start += len(values)
    return found


def _split_into_chunks(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """Split a tensor (batch, rows, columns) into chunks of rows with about ``elements`` elements each."""
    yield from tensor.split(max(1, elements // (tensor.shape[0] * tensor.shape[2])), dim=1)


def verify_special_product(
    problem: ProductProblem,
    parts: Callable[[torch.Tensor], Sequence[MatmulPart]],
    launch: Callable[[], torch.Tensor],
    scale: float,
) -> Verdict:
    """Verify a launch with an infinity, a NaN and a subnormal number among the operands. ``launch`` returns the output.

    The expected output follows from a launch without them. A NaN in B makes a column of C NaN. An infinity in A makes a
    row of C infinite, with the signs of a column of B. A row of A with only one subnormal number gives values that the
    host can compute. All other values must keep their bits. Operands of 8 bits and fewer, which have no infinity, are
    not checked.
    """
    first = launch().clone()
    product = secrets.randbelow(len(parts(first)))
    left, right = parts(first)[product].left, parts(first)[product].right
    if isinstance(left, QuantizedOperand) or isinstance(right, QuantizedOperand) or left.dtype.itemsize == 1:
        return Verdict(0.0, 0.0)
    a, b = left[-1], right[-1]
    (m, k), n = a.shape, len(b)
    at, column, row = secrets.randbelow(k), secrets.randbelow(n), secrets.randbelow(m)
    small, tiny = (row + 1) % m, torch.finfo(a.dtype).tiny / 4
    factors, expected = b[:, at].clone(), first.clone()
    c = parts(expected)[product].c[-1]
    c[row] = (torch.where(factors == 0, math.nan, factors.sign()) * math.inf).to(c.dtype)
    saved = [(each, each.clone()) for each in (a[small], a[row], b[column])]
    try:
        a[small] = 0.0
        a[small, at] = tiny
        a[row, at] = math.inf
        b[column, secrets.randbelow(k)] = math.nan
        found = launch()
    finally:
        for memory, values in reversed(saved):
            memory.copy_(values)
    details: dict[str, str | float] = {}
    if small != row:
        own, exact = parts(found)[product].c[-1][small], factors.cpu().double() * (tiny * scale)
        spacing = torch.finfo(own.dtype).tiny * torch.finfo(own.dtype).eps
        near = ((own.cpu().double() - exact).abs() <= problem.tolerance * exact.abs() + spacing).to(c.device)
        # A kernel may flush subnormal numbers to zero, but not compute anything else.
        c[small] = torch.where(near | (own == 0), own, math.nan)
        details["subnormal operands"] = "kept" if (own[own == own] != 0).any() else "flushed to zero"
    c[:, column] = math.nan
    return verify_special_values(found, expected, "an infinity, a NaN and a subnormal number", details)
