"""Describes where an output is wrong, and the pattern: a faulty compute unit spoils only its own tiles. Pure.

Outputs are compared in cells of CELL by CELL values. Kernels compute tiles of one or more cells and assign them to the
compute units in turn, so the period of one faulty unit's tiles is the number of units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product

#: Rows and columns of a cell.
CELL = 64
# Cells along a side of a tile, the fewest tiles that show a period, and how many tiles are named.
_SIDES, _MIN_FOR_PERIOD, _MAX_NAMED = (4, 2, 1), 3, 4


@dataclass(frozen=True)
class WrongCells:
    """The cells of an output that have a wrong value.

    - ``cells``: the number in the batch, row and column of each, from 0.
    - ``rows``, ``columns``: the size of one matrix, in values. ``values``: the number of values in the whole output.
    """

    cells: frozenset[tuple[int, int, int]]
    rows: int
    columns: int
    values: int = 0


def describe(wrong: WrongCells) -> str:
    """Describe the wrong tiles in one line: their size, their place in the grid of tiles, and their period."""
    down, across = -(-wrong.rows // CELL), -(-wrong.columns // CELL)
    sides = sorted(product(_SIDES, _SIDES), key=lambda side: -side[0] * side[1])
    fitting = (side for side in sides if side == (1, 1) or (side[0] <= down and side[1] <= across))
    height, width = next(side for side in fitting if _is_made_of(wrong, *side, down, across))
    tiles = sorted({(b, row // height, column // width) for b, row, column in wrong.cells})
    down, across = -(-down // height), -(-across // width)
    numbers = {
        "rows": sorted((b * down + row) * across + column for b, row, column in tiles),
        "columns": sorted((b * across + column) * down + row for b, row, column in tiles),
    }
    period, order = max((math.gcd(*(b - a for a, b in pairwise(each))), order) for order, each in numbers.items())
    has_period = len(tiles) >= _MIN_FOR_PERIOD and period > 1
    rule = f"; every {period}th tile by {order}, from number {numbers[order][0]}" if has_period else ""
    named = ", ".join(f"row {row} column {column} of product {b}" for b, row, column in tiles[:_MAX_NAMED])
    more = ", ..." if len(tiles) > _MAX_NAMED else ""
    return f"{len(tiles)} wrong tile{'s'[: len(tiles) - 1]} of {height * CELL}x{width * CELL}: {named}{more}{rule}"


def _is_made_of(wrong: WrongCells, height: int, width: int, down: int, across: int) -> bool:
    """Whether wrong cells form whole tiles of ``height`` x ``width`` cells; the output has ``down`` x ``across``."""
    tiles = {(b, row // height * height, column // width * width) for b, row, column in wrong.cells}
    return all(
        (b, row, column) in wrong.cells
        for b, top, left in tiles
        for row in range(top, min(top + height, down))
        for column in range(left, min(left + width, across))
    )
