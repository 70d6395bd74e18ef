"""Which shapes a run set out to try, from its command line or its summary; and the repair of logs that print the wrong
shape.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mamf.logs.finder.rows import Row, Sizes

_PRINTED_RANGES = re.compile(r"m=\[([\d, ]+)\] \| n=\[([\d, ]+)\] \| k=\[([\d, ]+)\]")
_OPTION = re.compile(r"^--?([mnk])(_range)?(?:=(.*))?$")
_MOST_SHAPES = 10_000_000
# More rows than this are held to a range by three of them.
_FEW = 100


@dataclass(frozen=True)
class Requested:
    """The sizes of the three printed numbers in the order of the loops: the first is the outermost."""

    sizes: tuple[Sequence[int], Sequence[int], Sequence[int]]

    def __len__(self) -> int:
        first, second, third = self.sizes
        return len(first) * len(second) * len(third)

    def number(self, number: int) -> Sizes:
        """The shape tried as the NUMBERth, from 1: the third loop is the innermost."""
        first, second, third = self.sizes
        outer, inner = divmod(number - 1, len(third))
        outermost, middle = divmod(outer, len(second))
        return first[outermost], second[middle], third[inner]


def requested(command: str | None) -> Requested | None:
    """None where the command line is cut off or does not say all three."""
    values: dict[str, list[int]] = {}
    current = None
    for word in (command or "").split():
        option = _OPTION.match(word)
        if option:
            current = option[1] + (option[2] or "")
            values[current] = []
            word = option[3] or ""
        if current and word.isdecimal():
            values[current].append(int(word))
        elif not option:
            current = None
    first, second, third = (_sizes(values.get(name), values.get(f"{name}_range")) for name in "mnk")
    return _requested(first, second, third)


def requested_by(ranges: str | None, rows: Sequence[Row]) -> Requested | None:
    """The shapes requested by the summary. Three numbers may be a range or a list: the rows decide, if they can."""
    printed = _PRINTED_RANGES.fullmatch(ranges or "")
    if printed is None:
        return None
    listed = [[int(number) for number in text.split(",") if number.strip()] for text in printed.groups()]
    meanings = [[numbers] if min(numbers) else [] for numbers in listed]
    for numbers, possible in zip(listed, meanings, strict=True):
        limits = _sizes(None, numbers)
        if limits and list(limits) not in possible:
            possible.append(list(limits))
    found = [_requested(*sizes) for sizes in itertools.product(*meanings)]
    fitting = [wanted for wanted in found if wanted is not None and _fits(wanted, rows)]
    return fitting[0] if len({len(wanted) for wanted in fitting}) == 1 else None


def _fits(wanted: Requested, rows: Sequence[Row]) -> bool:
    counted = [row for row in rows if row.number and row.sizes]
    ends = counted if len(counted) < _FEW else [counted[0], counted[len(counted) // 2], counted[-1]]
    return all(row.number <= len(wanted) and wanted.number(row.number) == row.sizes for row in ends if row.number)


def _requested(
    first: Sequence[int] | None, second: Sequence[int] | None, third: Sequence[int] | None
) -> Requested | None:
    if not first or not second or not third or len(first) * len(second) * len(third) > _MOST_SHAPES:
        return None
    return Requested((first, second, third))


def _sizes(listed: list[int] | None, limits: list[int] | None) -> Sequence[int] | None:
    if listed:
        return listed
    if not limits or len(limits) != 3 or limits[2] < 1:
        return None
    start, stop, step = limits
    return range(start or step, stop, step)


def names_the_best(rows: Sequence[Row]) -> bool:
    """Whether these rows print the shape of the best so far instead of their own, as for five days of August 2024."""
    stated = [row for row in rows if row.best and "stated" in row.figures]
    is_behind = any(row.figures["stated"] < row.best[0] for row in stated)
    return is_behind and all(row.sizes == row.best_sizes for row in rows)


def repaired(rows: Sequence[Row], wanted: Requested | None) -> tuple[list[Row], bool]:
    """The rows with the shapes they tried, and whether those could be known.

    A row that set a new best prints its own shape: each of them must be where the command line puts it.
    """
    known = wanted is not None and all(row.number and row.number <= len(wanted) for row in rows)
    shapes = [wanted.number(row.number) if known and wanted and row.number else None for row in rows]
    is_own = [_is_new_best(row, rows[index - 1] if index else None) for index, row in enumerate(rows)]
    known = known and all(shape == row.sizes for shape, row, own in zip(shapes, rows, is_own, strict=True) if own)
    if known:
        return [row._replace(sizes=shape) for row, shape in zip(rows, shapes, strict=True)], True
    return [row if own else row._replace(sizes=None) for row, own in zip(rows, is_own, strict=True)], False


def _is_new_best(row: Row, before: Row | None) -> bool:
    if (row.figures.get("stated"),) != row.best:
        return False
    # The first row of a cut log may be as good as a best that was cut off.
    return row.number == 1 if before is None else row.best_sizes != before.best_sizes
