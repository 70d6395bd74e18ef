"""Operands that change between launches: signs along K are flipped at random, so that a remembered answer is wrong.

A flip is exact in every dtype and undoes itself. Signs come from fresh entropy, which no kernel can foresee, and are
drawn on the operand's device: nothing waits for the host.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

_SIGN_BIT, _SIGN_BIT_OF_LOWER = 0x80, 0x08


def fresh_generator(device: torch.device) -> torch.Generator:
    """Random numbers that cannot be foreseen."""
    return torch.Generator(device=device).manual_seed(secrets.randbits(63))


def fresh_choices(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Random True and False."""
    return torch.randint(0, 2, tuple(size), generator=fresh_generator(device), device=device, dtype=torch.int8) == 1


def fresh_signs(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Random 1 and -1, as int8."""
    return torch.where(fresh_choices(size, device), -1, 1).to(torch.int8)


class Signs:
    """The signs of an operand whose last dimension is K: of 8-bit floats, of two e2m1 a byte (uint8), or of numbers."""

    def __init__(self, operand: torch.Tensor) -> None:
        self._operand = operand
        self._count = operand.shape[-1] * (2 if operand.dtype == torch.uint8 else 1)
        self._negative: torch.Tensor | None = None

    def change(self) -> None:
        """Queue random flips, at least one."""
        flips = fresh_choices((self._count,), self._operand.device)
        flips[secrets.randbelow(self._count)] = True
        self._flip(flips)
        self._negative = flips if self._negative is None else self._negative ^ flips

    def restore(self) -> None:
        """Queue what makes the operand as it was in the beginning."""
        if self._negative is not None:
            self._flip(self._negative)
        self._negative = None

    @torch.no_grad()
    def _flip(self, negative: torch.Tensor) -> None:
        operand = self._operand
        if operand.dtype.itemsize > 1 or operand.dtype == torch.int8:
            operand.mul_(torch.where(negative, -1, 1).to(operand.dtype))
            return
        bits = operand.view(torch.uint8)
        mask = negative.to(torch.uint8) * _SIGN_BIT
        if operand.dtype == torch.uint8:
            mask = mask[1::2] + negative[::2].to(torch.uint8) * _SIGN_BIT_OF_LOWER
        # The kinds of float8 without a negative zero have NaN in its place.
        bits.bitwise_xor_(mask * (bits != 0) if "fnuz" in str(operand.dtype) else mask)
