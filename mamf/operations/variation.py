"""Operands that change between launches: random sign flips along K make a remembered result wrong.

A flip is exact in every dtype, and a second flip undoes it. Signs come from fresh entropy, which no kernel can predict,
and are drawn on the operand's device, so nothing waits for the host.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

_SIGN_BIT, _SIGN_BIT_OF_LOWER = 0x80, 0x08
_PATTERNS = 16


def fresh_integers(
    below: int, size: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Unpredictable integers from 0; drawn on the host for a device without a random number generator."""
    try:
        generator = torch.Generator(device=device)
    except RuntimeError:
        return fresh_integers(below, size, torch.device("cpu"), dtype).to(device)
    generator.manual_seed(secrets.randbits(63))
    return torch.randint(below, tuple(size), generator=generator, device=device, dtype=dtype)


def fresh_choices(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Random booleans."""
    return fresh_integers(2, size, device, torch.int8) == 1


def fresh_signs(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Random signs, 1 and -1, as int8."""
    return torch.where(fresh_choices(size, device), -1, 1).to(torch.int8)


class Signs:
    """Sign flips of an operand whose last dimension is K: 8-bit floats, two e2m1 values per byte (uint8), or numbers.

    Patterns are drawn once, so a change is a single pass over the operand.
    """

    def __init__(self, operand: torch.Tensor) -> None:
        self._operand = operand
        self._patterns: torch.Tensor | None = None
        #: Patterns that have been applied an odd number of times.
        self._present: set[int] = set()
        self._last: int | None = None

    def change(self) -> None:
        """Queue a pattern of flips that differs from the last one."""
        if self._patterns is None:
            self._patterns = self._draw_patterns()
        index = self._last = secrets.choice([index for index in range(_PATTERNS) if index != self._last])
        self._present ^= {index}
        self._apply(self._patterns[index])

    def restore(self) -> None:
        """Queue flips that restore the original operand."""
        for index in self._present:
            assert self._patterns is not None
            self._apply(self._patterns[index])
        self._present = set()

    def _draw_patterns(self) -> torch.Tensor:
        """Patterns with at least one flip each, as factors for numbers or as bits to flip."""
        operand, count = self._operand, self._operand.shape[-1] * (2 if self._operand.dtype == torch.uint8 else 1)
        flips = fresh_choices((_PATTERNS, count), operand.device)
        flips[:, secrets.randbelow(count)] = True
        if operand.dtype.itemsize > 1 or operand.dtype == torch.int8:
            return torch.where(flips, -1, 1).to(operand.dtype)
        bits = flips.to(torch.uint8) * _SIGN_BIT
        if operand.dtype == torch.uint8:
            bits = bits[:, 1::2] + flips[:, ::2].to(torch.uint8) * _SIGN_BIT_OF_LOWER
        return bits

    @torch.no_grad()
    def _apply(self, pattern: torch.Tensor) -> None:
        operand = self._operand
        if operand.dtype.itemsize > 1 or operand.dtype == torch.int8:
            operand.mul_(pattern)
            return
        bits = operand.view(torch.uint8)
        # float8 dtypes without a negative zero have NaN in its place.
        bits.bitwise_xor_(pattern * (bits != 0) if "fnuz" in str(operand.dtype) else pattern)
