"""Make the README.md pages of results/ (one for all accelerators, and one for each) and the file of ceilings that the
package ships.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mamf.contribution.collection import (
    MATMUL_TABLE,
    OTHER_OPERATIONS_TABLE,
    SHARES_TABLE,
    TABLES,
    BestRate,
    ResultRate,
    ResultsCollection,
    find_best_rates,
    format_kernel_title,
    format_software_versions,
    select_attention_rates,
    select_best_rate_per_problem,
    split_by_confirmation,
)
from mamf.contribution.review import make_folder_name
from mamf.logs.legacy import FinderRun
from mamf.logs.records import round_to_six_digits
from mamf.measurement import group_pairs
from mamf.plans import CEILING_REGIMES
from mamf.report.document import (
    Column,
    RowT,
    Table,
    describe_counted_work,
    format_csv,
    format_four_digits,
    format_interval,
    format_rate,
    make_sensor_columns,
)
from mamf.report.formats import format_visible_rows_as_markdown
from mamf.report.shares import divide_by_peak, make_problem_title_in_words
from mamf.text import Markup, escape_markdown, escape_markdown_line

_GENERATED_NOTE = "`mamf results table` writes this page from the logs; do not edit it."
_MATRIX_INTRODUCTION = f"""# Results

This page shows the highest ceilings of each accelerator in TFLOPS (1e12 FLOP/s): **burst** / sustained. A ceiling is a
matmul rate that `mamf find` confirmed. The burst ceiling (MAMF) is the rate in short bursts, before the power
controller reacts. The sustained ceiling (MSMF) is the rate at the power limit ([how mamf
measures](../docs/measuring.md)). If no search was contributed, the page shows the best row of a sweep. Each accelerator
has a page with intervals, kernels, software, logs and other operations. A maintainer or two contributors measured all
figures on this page.

{_GENERATED_NOTE} [CONTRIBUTING.md](../CONTRIBUTING.md) says how to add an accelerator.
"""
_TABLE_LEGEND = """\
`by`: a `find` confirms its figure with fresh samples. A `sweep` selects its best row by the samples that
it reports, so it counts only if there is no find. `all`: number of logs and their range. Cards of one model differ, and
some searches did not try the best kernel.
Dense peaks are from datasheets; [peaks.csv](../../mamf/peaks.csv) has their sources.
"""
_UNCONFIRMED_TITLE = "Unconfirmed: not ranked until a second contributor confirms it"
_LEGACY_TITLE = "Legacy: figures that mamf-finder printed, without samples and without checks of results"
_INTERRUPTED_TITLE = "Interrupted: the search may have missed the best shape"
_PUBLISHED_NOTE = """\
[published/](published/NOTICE.md) has figures that other people published. This project has not checked
them, and never ranks them with measured figures.
"""


def make_results_pages(collection: ResultsCollection) -> dict[Path, str]:
    """Make all pages of results/. Returns their Markdown by path in results/."""
    rates = group_pairs((make_folder_name(each.device), each) for each in collection.rates)
    legacy = group_pairs(
        (make_folder_name(run.device or ""), (run, log_path)) for run, log_path in collection.legacy_runs
    )
    parts = {
        folder: ResultsCollection(rates.get(folder, ()), legacy.get(folder, ()), collection.submitters)
        for folder in sorted({*rates, *legacy})
    }
    pages = {Path(folder, "README.md"): _make_device_page(part) for folder, part in parts.items()}
    return {Path("README.md"): _make_matrix_page(parts), **pages}


def _make_matrix_page(parts: Mapping[str, ResultsCollection]) -> str:
    """Return the page with one table of ceilings: a row per accelerator, a column per dtype.

    ``parts``: the contents of each folder of results/, by its name. Dtypes with the most logs come first.
    """
    rates: dict[tuple[str, str], dict[str, float]] = {}
    rate_count_by_dtype: Counter[str] = Counter()
    for folder, part in parts.items():
        confirmed = split_by_confirmation(part.select_rates_of_table(MATMUL_TABLE), part.submitters)[0]
        kept = [each for each in confirmed if each.tier == "complete" and each.regime in CEILING_REGIMES]
        rate_count_by_dtype.update(each.dtype for each in kept)
        for best, _ in find_best_rates(kept):
            rates.setdefault((folder, best.dtype), {})[best.regime] = best.rate

    def make_rates_column(dtype: str) -> Column[str]:
        return Column(
            "",
            escape_markdown(dtype),
            lambda folder: rates.get((folder, dtype)),
            _format_burst_and_sustained_rates,
        )

    dtypes = sorted(rate_count_by_dtype, key=lambda dtype: (-rate_count_by_dtype[dtype], dtype))
    ranked_folders = sorted(
        parts, key=lambda folder: [-max(rates.get((folder, dtype), {"": 0.0}).values()) for dtype in dtypes]
    )
    links = {
        folder: f"[{escape_markdown(_get_device_name(part))}]({quote(folder)}/README.md)"
        for folder, part in parts.items()
    }
    table: Table[str] = Table(
        [Column("", "accelerator", links.get, Markup, is_left_aligned=True), *map(make_rates_column, dtypes)],
        ranked_folders,
    )
    return "\n".join([_MATRIX_INTRODUCTION, format_visible_rows_as_markdown(table), _PUBLISHED_NOTE])


def _get_device_name(part: ResultsCollection) -> str:
    return ([each.device for each in part.rates] or [run.device or "" for run, _ in part.legacy_runs])[0] or "unknown"


def _format_burst_and_sustained_rates(rates: Mapping[str, float]) -> str:
    burst, sustained = (format_four_digits(rates[regime]) if regime in rates else "-" for regime in CEILING_REGIMES)
    return Markup(f"**{burst}** / {sustained}")


def _make_device_page(part: ResultsCollection) -> str:
    ranked_rates: dict[str, list[ResultRate]] = {}
    unconfirmed, interrupted = [], []
    for table_name in TABLES:
        confirmed, others = split_by_confirmation(part.select_rates_of_table(table_name), part.submitters)
        ranked_rates[table_name] = [entry for entry in confirmed if entry.tier == "complete"]
        interrupted += [entry for entry in confirmed if entry.tier != "complete"]
        unconfirmed += others
    best = group_pairs(
        (entry.row.operation, entry) for entry in select_best_rate_per_problem(ranked_rates[OTHER_OPERATIONS_TABLE])
    )
    legacy = sorted(part.legacy_runs, key=lambda each: (each[0].device or "", each[0].dtype or "", str(each[1])))
    sections = [
        f"# {escape_markdown(_get_device_name(part))}\n\n{_GENERATED_NOTE} [All accelerators](../README.md)\n",
        _format_section(
            "Ceilings", make_ceiling_columns(), find_best_rates(ranked_rates[MATMUL_TABLE]), f"{_TABLE_LEGEND}\n"
        ),
        _format_section(
            "Attention: the best kernel by share of the measured ceiling (MAMFU)",
            [*make_attention_columns(), _LOG_COLUMN],
            select_attention_rates(ranked_rates[SHARES_TABLE]),
        ),
        *(_format_operation_section(operation, rates) for operation, rates in best.items()),
        _format_section(
            _INTERRUPTED_TITLE, [*make_rate_columns(), _LOG_COLUMN], _select_best_rate_per_log(interrupted)
        ),
        _format_section(
            _UNCONFIRMED_TITLE, [*make_rate_columns(), _LOG_COLUMN], _select_best_rate_per_log(unconfirmed)
        ),
        _format_section(
            _LEGACY_TITLE, _LEGACY_COLUMNS, [(run, log_path, name) for run, log_path in legacy for name in run.best]
        ),
    ]
    return "\n".join(filter(None, sections))


def _select_best_rate_per_log(rates: Iterable[ResultRate]) -> list[ResultRate]:
    """Select the highest ceiling of each log or, if it has no ceiling, the highest rate. Returns them sorted by path of
    the log.
    """
    groups = group_pairs((entry.log_path, entry) for entry in rates)
    return [max(groups[path], key=lambda entry: (entry.ceiling is not None, entry.rate)) for path in sorted(groups)]


def make_rate_columns() -> list[Column[ResultRate]]:
    """Return the columns of a table of unranked rates: what was measured, the rate and the date."""
    return [
        make_text_column("what", lambda entry: entry.label),
        Column("", "rate", lambda entry: format_rate(entry.rate, entry.row.work.unit)),
        make_date_column(),
    ]


def _format_section(title: str, columns: Sequence[Column[RowT]], rows: Sequence[RowT], text_above: str = "") -> str:
    """Return a Markdown section with a title and a table, or empty text if there are no rows.

    ``text_above``: text between title and table.
    """
    return f"## {title}\n\n{text_above}{format_visible_rows_as_markdown(Table(columns, rows))}" if rows else ""


def make_text_column(title: str, get_text: Callable[[RowT], object]) -> Column[RowT]:
    return Column("", title, get_text, str, is_left_aligned=True)


def make_date_column() -> Column[ResultRate]:
    """Return the column with the day on which the run started."""
    return Column("", "date", lambda entry: entry.date[:10])


def make_log_column(get_log_path: Callable[[RowT], Path]) -> Column[RowT]:
    """Return the column with a link to the log of each row. ``get_log_path``: returns the path of a row's log."""
    return Column("", "log", lambda row: Markup(f"[log]({quote(get_log_path(row).name)})"), Markup)


_LOG_COLUMN: Column[ResultRate] = make_log_column(lambda entry: entry.log_path)


def make_ceiling_columns() -> list[Column[BestRate]]:
    """Return the columns of an accelerator's table of best ceilings.

    The column ``all`` shows the number and the range of all rates from which the best one was chosen.
    """
    return [
        make_text_column("dtype", lambda row: row[0].dtype),
        make_text_column("regime", lambda row: row[0].regime),
        Column("", "TFLOPS", lambda row: row[0].rate, lambda rate: Markup(f"**{format_four_digits(rate)}**")),
        Column("", "interval", lambda row: row[0].interval, format_interval),
        Column("", "MxNxK", lambda row: row[0].row.shape),
        make_text_column("kernel", lambda row: format_kernel_title(row[0])),
        Column(
            "",
            "of the dense peak",
            lambda row: row[0].datasheet_peak and (row[0].rate, row[0].datasheet_peak.rate),
            lambda rates: f"{100 * rates[0] / rates[1]:.1f} % of {rates[1]:g}",
        ),
        *make_sensor_columns(lambda row: row[0].conditions),
        Column("", "J/TFLOP", lambda row: row[0].joules_per_tflop, "{:#.3g}".format),
        make_text_column("by", lambda row: "find" if row[0].ceiling else "sweep"),
        Column(
            "",
            "all",
            lambda row: sorted(each.rate for each in row[1]),
            lambda rates: (
                f"{len(rates)}"
                + (f": {format_four_digits(rates[0])} to {format_four_digits(rates[-1])}" if len(rates) > 1 else "")
            ),
        ),
        make_text_column("software", lambda row: format_software_versions(row[0].header)),
        Column("", "date", lambda row: row[0].date[:10]),
        make_log_column(lambda row: row[0].log_path),
    ]


def make_attention_columns() -> list[Column[ResultRate]]:
    return [
        make_text_column("dtype", lambda entry: entry.row.problem.dtype),
        make_text_column("regime", lambda entry: entry.row.regime),
        make_text_column("pass", lambda entry: entry.row.problem.direction),
        Column("", "d", lambda entry: entry.row.shape.head_dims),
        make_text_column("mask", lambda entry: entry.row.shape.mask_description),
        make_text_column("kernel", format_kernel_title),
        Column("", "MAMFU", lambda entry: entry.mamfu, lambda share: Markup(f"**{100 * share:.1f} %**")),
        Column("", "TFLOPS", lambda entry: entry.row.compute_rate(entry.row.statistic), format_four_digits),
        Column("", "shape", lambda entry: entry.row.shape),
        make_date_column(),
    ]


def _format_operation_section(title: str, rates: Sequence[ResultRate]) -> str:
    counts = escape_markdown_line(f"{describe_counted_work(entry.row.work for entry in rates)}.")
    return _format_section(
        escape_markdown(title[:1].upper() + title[1:]), [*make_kernel_columns(), _LOG_COLUMN], rates, f"{counts}\n\n"
    )


def make_kernel_columns() -> list[Column[ResultRate]]:
    return [
        make_text_column("problem", lambda entry: make_problem_title_in_words(entry.row.regime, entry.row.problem)),
        Column(
            "",
            "rate",
            lambda entry: f"**{format_four_digits(entry.rate)}** {escape_markdown(entry.row.work.unit)}",
            Markup,
        ),
        Column("", "interval", lambda entry: entry.interval, format_interval),
        Column(
            "",
            "of the peak",
            lambda entry: divide_by_peak(entry.rate, entry.row.problem, entry.header),
            lambda share: f"{100 * share:.1f} %",
        ),
        Column("", "shape", lambda entry: entry.row.shape),
        make_text_column("kernel", format_kernel_title),
        make_date_column(),
    ]


#: The columns of the table of rates from logs of mamf-finder, the tool that preceded mamf. A row of the table is a
#: tuple: the run, the path of its log, and the name of the statistic.
_LEGACY_COLUMNS: list[Column[tuple[FinderRun, Path, str]]] = [
    make_text_column("dtype", lambda row: row[0].dtype or "unknown"),
    make_text_column("version", lambda row: f"mamf-finder {row[0].version or 'of unknown version'}"),
    make_text_column("figure", lambda row: row[2] if row[0].is_complete else f"{row[2]} (of scouts)"),
    Column("", "TFLOPS", lambda row: row[0].best[row[2]].tflops[row[2]], format_four_digits),
    Column("", "MxNxK", lambda row: row[0].best[row[2]].shape or "unknown"),
    Column("", "shapes", lambda row: "unknown" if row[0].tried is None else row[0].tried),
    make_text_column("run", lambda row: "complete" if row[0].is_complete else "interrupted"),
    Column("", "date", lambda row: row[0].started[:10] if row[0].started else "unknown"),
    make_log_column(lambda row: row[1]),
]


# -- the file of ceilings that the package ships -----------------------------------------------------------------------


_MAX_SHIPPED_SHAPES = 6
#: The least gain of the best kernel over the default kernel, as a share, for which other cards must have tried it too.
_MIN_COMPARED_GAIN = 0.05


def make_contributed_csv(collection: ResultsCollection) -> str:
    """Return the text of the CSV file of contributed ceilings. The file has the best ceiling for each combination of
    device, number of compute units, power limit, dtype and regime.

    The file has only confirmed ceilings of accelerators, from complete searches with normally distributed data.
    """
    rates = split_by_confirmation(collection.select_rates_of_table(MATMUL_TABLE), collection.submitters)[0]
    # Leave out CPUs. In virtual machines, CPUs of different speeds have the same name, so the rate of one CPU says
    # nothing about another.
    kept = [
        entry
        for entry in rates
        if entry.ceiling and entry.interval is not None and entry.tier == "complete" and entry.regime in CEILING_REGIMES
        if entry.header["device"]["is_accelerator"] and entry.header["plan"]["problems"][0]["data"] == "normal"
    ]
    groups = group_pairs(((entry.device, *_get_build_key(entry), entry.dtype, entry.regime), entry) for entry in kept)
    rows = []
    for (device, units, watts, dtype, regime), group in sorted(groups.items()):
        fastest = sorted(group, key=lambda entry: entry.rate, reverse=True)
        best, shapes = fastest[0], list(dict.fromkeys(str(entry.row.shape) for entry in fastest))[:_MAX_SHIPPED_SHAPES]
        assert best.interval is not None, "rates without an interval were dropped above"
        # If another kernel gains much over the default kernel, only searches that tried the best kernel are comparable.
        gain = max(
            each.ceiling.gain_over_default or 0.0
            for each in kept
            if each.ceiling and (each.device, each.dtype) == (device, dtype)
        )
        cards = {
            entry.uuid_hash: entry.rate
            for entry in reversed(fastest)
            if gain < _MIN_COMPARED_GAIN or any(map(best.row.kernel.startswith, entry.header["plan"]["kernels"]))
        }
        clock_hz = max(each.header["device"]["max_clock_hz"] or 0 for each in group)
        rows.append(
            {
                "device": device,
                "compute_units": units,
                "power_limit_watts": watts,
                "clock_mhz": f"{clock_hz / 1e6:g}" if clock_hz else "",
                "dtype": dtype,
                "regime": regime,
                "tflops": round_to_six_digits(best.rate),
                "low": round_to_six_digits(best.interval.low),
                "high": round_to_six_digits(best.interval.high),
                "log": best.log_path.as_posix(),
                "shapes": " ".join(shapes),
                "kernel": next((each.row.kernel for each in fastest if len(each.header["plan"]["kernels"]) > 1), ""),
                "cards": len(cards),
                "lowest": round_to_six_digits(min(cards.values())),
                "date": best.date[:10],
                "software": format_software_versions(best.header),
            }
        )
    return format_csv(rows)


def _get_build_key(entry: ResultRate) -> tuple[str, ...]:
    """Return the number of compute units and the power limit as text. Devices that have the same name may differ in
    these two values.
    """
    device: dict[str, Any] = entry.header["device"]
    return tuple("" if each is None else f"{each:g}" for each in (device["compute_units"], device["power_limit_watts"]))
