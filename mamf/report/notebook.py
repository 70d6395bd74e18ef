"""Rows, ceilings, logs and comparisons for a notebook: HTML tables of the columns that the command line prints."""

from __future__ import annotations

import functools
import html
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.charts.chart import machine
from mamf.logs.compare import DEFAULT_TOLERANCE, Comparison
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.attention import report as attention
from mamf.operations.attention.operation import Attention
from mamf.operations.matmul.operation import Matmul
from mamf.plans import FindPlan, KernelsPlan
from mamf.report import ceilings, kernels, own_ceilings, sweeps
from mamf.report.comparison import comparison_document
from mamf.report.formats.html import fragment
from mamf.report.text import by_column, end_line
from mamf.text import visible

#: Rows of a table, best first.
_MOST_ROWS = 10
_ALIGNED = ' style="text-align: {}"'
#: A row by itself does not say what it was measured on.
_UNKNOWN_DEVICE = {"device": asdict(DeviceInfo("", 0, "unknown", ""))}


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> str:
    """A table in which every text, a stranger's too, is text and never markup."""
    styles = [_ALIGNED.format("left" if name in left_aligned else "right") for name in columns]

    def line(tag: str, texts: Sequence[str]) -> str:
        cells = (f"<{tag}{style}>{plain(text)}</{tag}>" for style, text in zip(styles, texts, strict=True))
        return f"<tr>{''.join(cells)}</tr>\n"

    body = "".join(line("td", row) for row in rows)
    return f"<table>\n<thead>\n{line('th', columns)}</thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def html_lines(lines: Iterable[str]) -> str:
    """Lines above or below a table."""
    return f"<p>{'<br>'.join(map(plain, lines))}</p>\n"


def plain(text: str) -> str:
    """Text that is no markup, in which everything is seen."""
    return html.escape(visible(text))


@functools.singledispatch
def html_of(shown: object) -> str:
    raise TypeError(f"a {type(shown).__name__} has no table")


@html_of.register
def _(row: Measurement) -> str:
    return _of_products([row]) if row.operation == Matmul.name else _of_kernels([row], _UNKNOWN_DEVICE)


@html_of.register
def _(ceiling: Ceiling) -> str:
    device = asdict(DeviceInfo("", 0, ceiling.device, ""))
    shown = _of_ceilings if ceiling.problem.operation == Matmul.name else _of_own_ceilings
    return html_lines([ceiling.device]) + shown([ceiling], {"device": device})


@html_of.register
def _(found: Comparison) -> str:
    return fragment(comparison_document(found, DEFAULT_TOLERANCE))


@html_of.register
def _(log: RunLog) -> str:
    told = [f"{log.path}: {machine(log.header)}"]
    return html_lines(told) + "".join(_tables(log)) + html_lines([end_line(log.summary)])


def _tables(log: RunLog) -> Iterator[str]:
    """The ceilings of a find, the best rows of each regime of a sweep, else the rows that are ranked together."""
    plan, rows = log.plan, log.measurements
    if isinstance(plan, FindPlan):
        yield _of_ceilings(log.ceilings.values(), log.header)
    elif not isinstance(plan, KernelsPlan):
        yield _of_products(sweeps.chosen(rows, _MOST_ROWS))
    elif plan.operation == Attention.name:
        yield html_lines(attention.ceiling_lines(log.all_ceilings))
        for group, same in attention.grouped(rows).items():
            base = attention.baseline_of(same, None)
            lines = [attention.cells(row, same, base, log.header, log.all_ceilings) for row in same]
            yield html_lines([attention.title(group)]) + html_table(attention.COLUMNS, lines, attention.LEFT_ALIGNED)
    else:
        if log.own_ceilings:
            yield _of_own_ceilings(log.own_ceilings.values(), log.header)
        for same in kernels.grouped(rows).values():
            yield html_lines([kernels.title(same[0])]) + _of_kernels(same[:_MOST_ROWS], log.header)


def _of_products(rows: Iterable[Measurement]) -> str:
    return html_table(sweeps.COLUMNS, [sweeps.cells(row) for row in rows], sweeps.LEFT_ALIGNED)


def _of_ceilings(found: Iterable[Ceiling], header: Mapping[str, Any]) -> str:
    return html_table(ceilings.COLUMNS, [ceilings.cells(each, header) for each in found], ceilings.LEFT_ALIGNED)


def _of_own_ceilings(found: Iterable[Ceiling], header: Mapping[str, Any]) -> str:
    return html_table(*by_column(own_ceilings.cells(each, header) for each in found), own_ceilings.LEFT_ALIGNED)


def _of_kernels(rows: Iterable[Measurement], header: Mapping[str, Any]) -> str:
    return html_table(*by_column(_kernel(row, header) for row in rows), ("kernel", "shape", "remarks"))


def _kernel(row: Measurement, header: Mapping[str, Any]) -> dict[str, str]:
    """A row by column; without a figure, why."""
    if row.ok:
        return {**kernels.cells(row, header), "remarks": kernels.remarks(row)}
    return {"kernel": row.kernel, "shape": str(row.shape), "remarks": f"{row.status}: {row.reason}"}
