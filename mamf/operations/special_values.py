"""Infinities, NaN and subnormal numbers among the operands: what the output must be follows from a launch without them.

Products: a NaN in column k of a row of B makes a column of C NaN. An infinity in A makes a row of C infinite, with the
signs of a column of B. A row of A with one subnormal number gives products that the host rounds alone. Attention: an
infinity in V leaves no value of its column finite, a NaN in a query makes its row of O NaN (some kernels lose it, which
is no error but a detail). All other values must have the bits that they had.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence

import torch

from mamf.kernel import Verdict
from mamf.measurement import LOST_NAN
from mamf.operations.attention.shapes import AttentionShape
from mamf.operations.matmul.kernel import ProductProblem
from mamf.operations.quantization import Quantized
from mamf.operations.whole_products import Part

_DETAIL = "subnormal operands"


def verify_special_product(
    problem: ProductProblem,
    parts: Callable[[torch.Tensor], Sequence[Part]],
    launch: Callable[[], torch.Tensor],
    scale: float,
) -> Verdict:
    """``launch``: returns the output. Operands of 8 bits and fewer are left alone: they have no infinity."""
    first = launch().clone()
    product = secrets.randbelow(len(parts(first)))
    left, right = parts(first)[product].left, parts(first)[product].right
    if isinstance(left, Quantized) or isinstance(right, Quantized) or left.dtype.itemsize == 1:
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
        details[_DETAIL] = "kept" if (own[own == own] != 0).any() else "flushed to zero"
    c[:, column] = math.nan
    return _verdict(found, expected, "an infinity, a NaN and a subnormal number", details)


def verify_special_attention(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], launch: Callable[[], torch.Tensor]
) -> Verdict:
    """Operands and what ``launch`` returns: batch, heads, sequence, width. Needs a key that all queries see."""
    if shape.window is not None or (shape.causal and shape.seqlen_q > shape.seqlen_k):
        return Verdict(0.0, 0.0)
    q, v, key = operands["q"], operands["v"], 0 if shape.causal else shape.seqlen_k - 1
    expected = launch().clone()
    batch, head, row, _ = (secrets.randbelow(size) for size in q.shape)
    group, column = q.shape[1] // v.shape[1], secrets.randbelow(v.shape[-1])
    shared = head // group
    saved = [(each, each.clone()) for each in (q[batch, head, row], v[batch, shared, key])]
    try:
        q[batch, head, row, 0] = math.nan
        v[batch, shared, key, column] = math.inf
        found = launch()
    finally:
        for memory, values in saved:
            memory.copy_(values)
    own = (batch, slice(shared * group, (shared + 1) * group), slice(None), column)
    expected[own] = torch.where(found[own].isfinite(), math.nan, found[own])
    lost = int(found[batch, head, row].isfinite().sum().item())
    expected[batch, head, row] = found[batch, head, row]
    return _verdict(found, expected, "an infinity and a NaN", {LOST_NAN: lost} if lost else {})


def _verdict(found: torch.Tensor, expected: torch.Tensor, special: str, details: Mapping[str, str | float]) -> Verdict:
    differing = int((~((found == expected) | (found.isnan() & expected.isnan()))).sum().item())
    reason = f"{differing} values are wrong beside {special} among the operands"
    return Verdict(math.inf, 0.0, details, reason=reason) if differing else Verdict(0.0, 0.0, details)
