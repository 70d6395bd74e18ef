"""Compares whole outputs of repeated launches bit by bit, on their device and without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mamf.wrong_tiles import CELL, WrongCells

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def remember_outputs(
    outputs_of: Callable[[object], Sequence[torch.Tensor]], result: object
) -> Callable[[object], Callable[[], WrongCells]]:
    """``Prepared.remember`` for one set; ``outputs_of``: the outputs of a launch, given its result."""
    first = [_bits_of(each).clone() for each in outputs_of(result)]
    values = sum(each.numel() for each in first)

    def compare(later: object) -> Callable[[], WrongCells]:
        pairs = zip(outputs_of(later), first, strict=True)
        found = [_wrong_cells(_bits_of(now) != before) for now, before in pairs]

        def read() -> WrongCells:
            """Of several outputs, the cells of the first that differs."""
            number = next((number for number, cells in enumerate(found) if cells.any()), 0)
            places = frozenset((b, row, column) for b, row, column in found[number].nonzero().tolist())
            rows, columns = first[number].shape[1:]
            return WrongCells(places, rows, columns, values)

        return read

    return compare


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers, as a batch of matrices."""
    bits = tensor.detach().view(_INTEGERS[tensor.dtype.itemsize])
    return bits.reshape(-1, *(bits.shape[-2:] if bits.dim() > 1 else (1, bits.shape[-1])))


def _wrong_cells(flags: torch.Tensor) -> torch.Tensor:
    """The cells that contain a flag, given flags by product, row and column."""
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[2] % CELL, 0, -flags.shape[1] % CELL))
    cells: torch.Tensor = padded.unflatten(2, (-1, CELL)).any(3).unflatten(1, (-1, CELL)).any(2)
    return cells
