"""The charts of the site of results/, as data: figures of many cards in rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from mamf.contribution.collection import AttentionEntry, CeilingEntry
from mamf.contribution.tables import mask_name
from mamf.measurement import TERA
from mamf.pages.site_data import CeilingLine
from mamf.report.charts.ranges import RangeChart, RangePoint, RangeRow
from mamf.report.text import counted, percent, shortened

#: Pages stay small: the most devices of a picture, and the most points of a row and of a picture.
_MOST_DEVICES, _MOST_POINTS, _MOST_IN_PICTURE = 40, 30, 600
_UNIT = "TFLOPS"
ItemT = TypeVar("ItemT")


def card_name(entry: CeilingEntry) -> str:
    card = entry.header["device"]["uuid_hash"]
    return f"card {card}" if card else "unknown card"


def ceilings_chart(dtype: str, lines: Sequence[CeilingLine]) -> RangeChart:
    """The cards of each device in a row per regime, the fastest device first."""
    devices = list(dict.fromkeys(line.device for line in lines))
    kept = [line for device in devices[:_MOST_DEVICES] for line in lines if line.device == device]
    most = max(3, min(_MOST_POINTS, _MOST_IN_PICTURE // len(kept)))
    rows = [
        RangeRow(
            shortened(line.device),
            line.regime,
            tuple(_point(entry) for entry in _spread(line.cards, most)),
            line.peak.flops / TERA if line.peak else None,
        )
        for line in kept
    ]
    left_out = len(devices) - len({line.device for line in kept})
    return RangeChart(
        dtype,
        "One point per card, with its 95 % repeat interval. The dashed tick is the datasheet's dense peak.",
        _UNIT,
        tuple(rows),
        (f"{counted(left_out, 'more device')} in the table",) if left_out else (),
    )


def _point(entry: CeilingEntry) -> RangePoint:
    interval = entry.interval
    is_known = interval is not None and interval.is_known
    low, high = (interval.low, interval.high) if interval and is_known else (entry.tflops, entry.tflops)
    return RangePoint(entry.tflops, low, high, f"{card_name(entry)}, {entry.header['started'][:10]}")


def _spread(items: Sequence[ItemT], most: int) -> list[ItemT]:
    """At most so many of them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def cards_chart(line: CeilingLine) -> RangeChart:
    """A row per card of one device."""
    rows = tuple(
        RangeRow("", card_name(entry), (_point(entry),), None, line.regime)
        for entry in _spread(line.cards, _MOST_DEVICES)
    )
    spread = line.cards[0].tflops / line.cards[-1].tflops - 1
    subtitle = f"The fastest of {len(line.cards)} cards is {percent(spread)} % above the slowest."
    return RangeChart(f"{line.dtype}, {line.regime}", subtitle, _UNIT, rows)


def history_chart(best: Iterable[tuple[str, CeilingLine]]) -> RangeChart:
    """``best``: by software, oldest first."""
    rows = tuple(
        RangeRow(f"{line.dtype}, {line.regime}", software, tuple(map(_point, _spread(line.cards, _MOST_POINTS))))
        for software, line in best
    )
    return RangeChart("By software", "One point per card, with its 95 % repeat interval.", _UNIT, rows)


def attention_charts(entries: Sequence[AttentionEntry]) -> list[RangeChart]:
    """A chart for each dtype and regime: the best row of each kernel as a share of the measured ceiling."""
    groups: dict[str, list[RangeRow]] = {}
    for entry in entries:
        groups.setdefault(attention_problem(entry)[0], []).append(_attention_row(entry))
    text = "Each kernel's best shape, as a share of the device's measured matmul ceiling (MAMFU)"
    return [RangeChart(name, text, "% of the measured ceiling", tuple(rows)) for name, rows in groups.items()]


def attention_problem(entry: AttentionEntry) -> tuple[str, str]:
    """Dtype and regime; direction, head dimension and mask."""
    row = entry.row
    problem = f"{row.problem.direction}, d {row.shape.head_dims}, {mask_name(row.shape)}"
    return f"{row.problem.dtype}, {row.regime}", problem


def _attention_row(entry: AttentionEntry) -> RangeRow:
    row, share = entry.row, 100 * entry.share
    interval = row.rate_interval
    has_interval = row.best_by == row.figure and interval.is_known
    ends = [share * end / row.best_rate for end in (interval.low, interval.high)] if has_interval else [share, share]
    return RangeRow(attention_problem(entry)[1], row.kernel, (RangePoint(share, ends[0], ends[1], f"at {row.shape}"),))
