"""Collect the rates of all logs in results/, choose the best ones, and decide which rates are confirmed.

A rate is confirmed if a maintainer submitted it, or if another contributor measured the same rate within 5 %. Tables do
not rank unconfirmed rates, and the package does not ship them. The submitter of a log is the account that opened its
pull request, not an author named in the log, because a log could name anyone. The workflow that merges a pull request
adds the account to submitters.txt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamf.backend import parse_sharing_ways
from mamf.ceilings.ceiling import CONFIRM_PHASE, Ceiling, compute_mamfu
from mamf.contribution.rules import Finding, has_exact_kernel
from mamf.logs.legacy import FinderRun, read_legacy_log_or_none
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Conditions, Measurement, Rate, group_pairs, make_dtype_label
from mamf.operations.unknown import get_operation, sets_compute_ceiling
from mamf.peaks import DatasheetRate, find_datasheet_rate
from mamf.plans import REGIME_NAMES, SWEEP
from mamf.plugins.discovery import list_builtin_names
from mamf.report.document import label_kernel
from mamf.report.rows import rank_rows_by_regime
from mamf.report.shares import make_problem_title, make_problem_title_in_words

#: The tables of results/: the rates of matmuls, the shares of the matmul ceiling that attention reaches, and the rates
#: of other operations.
TABLES = MATMUL_TABLE, SHARES_TABLE, OTHER_OPERATIONS_TABLE = "products", "shares", "other operations"
#: The names of two files in results/. SUBMITTERS_FILE lists the path and the submitter of each log, one log per line.
#: MAINTAINERS_FILE lists the accounts of the maintainers, one account per line.
SUBMITTERS_FILE, MAINTAINERS_FILE = "submitters.txt", "maintainers.txt"
# Two rates agree if they differ by at most this share: the ceilings of 26 cards of one model differ by up to 4.4 %.
_MAX_CARD_SPREAD = 0.05


# -- collecting the rates of one log -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResultRate(Rate):
    """A rate in a log of results/, with the row and the ceiling that it comes from.

    - ``log_path``: the path of the log in results/. ``header``: the header of the log.
    - ``table_name``: the name of the table that shows the rate, one of TABLES.
    - ``ceiling``: the ceiling that has this rate, if a search found the rate and then confirmed it with new
      measurements. None if the rate is that of a single row.
    - ``row``: the row with this rate or, for a ceiling, a row that confirmed it.
    - ``interval``: the confidence interval of the rate; None if the rate is that of the fastest single launch.
    - ``mamfu``: MAMFU (the share of the matmul ceiling) as a fraction, in the table SHARES_TABLE only.
    """

    regime: str
    header: Mapping[str, Any]
    log_path: Path
    table_name: str
    row: Measurement
    ceiling: Ceiling | None = None
    mamfu: float = 0.0

    @property
    def conditions(self) -> Conditions:
        return self.row.conditions if self.ceiling is None else self.ceiling.conditions

    @property
    def confirmation_key(self) -> tuple[Any, ...]:
        """The values that two rates must share so that one can confirm the other, such as device, dtype and regime."""
        if self.table_name == MATMUL_TABLE:
            return self.device, self.dtype, self.regime
        of = (self.row.operation, make_problem_title(self.row.regime, self.row.problem), self.device)
        return of if self.ceiling else (*of, self.row.shape, self.row.kernel)

    @property
    def label(self) -> str:
        """The problem, regime, shape and kernel of the rate in words, for tables."""
        if self.table_name == MATMUL_TABLE:
            return f"{self.dtype}, {self.regime}, {self.row.shape} by {self.row.kernel}"
        return (
            f"{self.row.operation}, {make_problem_title_in_words(self.regime, self.row.problem)}, {self.row.shape} by "
            f"{self.row.kernel}"
        )

    @property
    def datasheet_peak(self) -> DatasheetRate | None:
        """The device's dense peak for the dtype of the row according to its datasheet; None if none is listed."""
        return find_datasheet_rate(self.device, self.row.problem.dtype, self.header["device"]["compute_units"])

    @property
    def joules_per_tflop(self) -> float | None:
        watts = self.conditions.watts
        return watts / self.rate if self.regime == "sustained" and watts else None


def format_kernel_title(entry: ResultRate) -> str:
    """Return the name of a kernel for tables. The name has a remark if the kernel was loaded from a file or is not part
    of mamf.
    """
    labeled, of = label_kernel(entry.row.kernel, entry.header), get_operation(entry.row.operation)
    is_known = labeled != entry.row.kernel or labeled.partition("[")[0] in list_builtin_names(of.kernel_group)
    return labeled if is_known else f"{entry.row.kernel} (third-party)"


def format_software_versions(header: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in list_software_versions(header).items())


def list_software_versions(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the known versions of torch, the vendor's libraries and the driver by name, from the header of a log."""
    device = header["device"]
    named = {"torch": header["environment"]["packages"].get("torch"), **(device.get("versions") or {})}
    named |= {"driver": device.get("driver")}
    return {name: str(version) for name, version in named.items() if version and version != "True"}


def collect_rates(log: RunLog, log_path: Path) -> list[ResultRate]:
    """Return the rates of a log that the tables of results/ may show.

    These are the ceilings of a matmul search, the best rows of a matmul sweep, the rows of attention with their share
    of the ceiling, or all rows and ceilings of another operation. Returns no rates if the card was split into parts or
    shared with other programs. ``log_path``: the path of the log in results/.
    """
    plan = log.plan
    if parse_sharing_ways(log.header["device"]["name"]):  # The tables compare whole cards only.
        return []
    if plan.is_search:
        return [
            _make_rate(log, log_path, MATMUL_TABLE, *each)
            for each in _pair_ceilings_with_rows(log, log.matmul_ceilings)
        ]
    if plan.kind == SWEEP and sets_compute_ceiling(plan.operation):
        return [
            _make_rate(log, log_path, MATMUL_TABLE, best) for best, *_ in rank_rows_by_regime(log.measurements).values()
        ]
    rows = [row for row in log.measurements if row.ok]
    of = get_operation(plan.operation)
    if of.shows_ceiling_shares and not of.shows_bandwidth_shares:
        measured = (row for row in rows if row.operation == plan.operation and not row.is_reference)
        mamfus = ((row, compute_mamfu(row, log.matmul_ceilings)) for row in measured)
        return [_make_rate(log, log_path, SHARES_TABLE, row, None, mamfu) for row, mamfu in mamfus if mamfu is not None]
    rates = [_make_rate(log, log_path, OTHER_OPERATIONS_TABLE, row) for row in rows if not row.phase]
    return rates + [
        _make_rate(log, log_path, OTHER_OPERATIONS_TABLE, *each)
        for each in _pair_ceilings_with_rows(log, log.other_ceilings)
    ]


def _make_rate(
    log: RunLog, log_path: Path, table_name: str, row: Measurement, ceiling: Ceiling | None = None, mamfu: float = 0.0
) -> ResultRate:
    device = log.header["device"]
    interval = row.rate_interval if row.ranking_statistic == row.statistic else None
    return ResultRate(
        rate=ceiling.rate if ceiling else row.best_rate,
        unit=row.work.unit,
        interval=ceiling.interval if ceiling else interval,
        dtype=make_dtype_label(row.problem),
        regime=row.regime,
        device=device["name"],
        uuid_hash=device["uuid_hash"],
        source="contributed",
        tier=log.tier,
        reference=log_path.as_posix(),
        date=log.header["started"],
        header=log.header,
        log_path=log_path,
        table_name=table_name,
        row=row,
        ceiling=ceiling,
        mamfu=mamfu,
    )


def _pair_ceilings_with_rows(log: RunLog, ceilings: Mapping[Any, Ceiling]) -> list[tuple[Measurement, Ceiling]]:
    """Pair each ceiling with a row (measurement) that confirmed it. Leave out a ceiling if the log has no such row."""
    fresh = (row for row in log.measurements if row.ok and row.phase == CONFIRM_PHASE)
    rows = {(row.problem, row.regime, row.shape, row.kernel): row for row in fresh}
    keyed = (((each.problem, each.regime, each.shape, each.kernel), each) for each in ceilings.values())
    return [(rows[key], ceiling) for key, ceiling in keyed if key in rows]


# -- deciding which rates are confirmed --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submitters:
    """Who submitted the logs in results/.

    - ``account_by_log``: the account that submitted a log, by path of the log in results/.
    - ``maintainers``: the accounts whose rates need no confirmation.
    """

    account_by_log: Mapping[Path, str]
    maintainers: frozenset[str] = frozenset()

    def is_rate_confirmed(self, entry: ResultRate, others: Iterable[ResultRate]) -> bool:
        """Return whether a rate is confirmed: a maintainer submitted it, or another account submitted a similar rate.

        ``others``: rates from complete runs that have the same ``confirmation_key``.
        """
        account = self.account_by_log.get(entry.log_path)
        if account is None or account in self.maintainers:
            return account is not None
        return any(
            self.account_by_log.get(other.log_path, account) != account
            and abs(other.rate - entry.rate) <= _MAX_CARD_SPREAD * max(other.rate, entry.rate)
            for other in others
        )


def split_by_confirmation(
    rates: Iterable[ResultRate], submitters: Submitters
) -> tuple[list[ResultRate], list[ResultRate]]:
    """Split rates into confirmed and unconfirmed ones. Only rates from complete runs can confirm other rates."""
    listed = list(rates)
    complete = group_pairs((entry.confirmation_key, entry) for entry in listed if entry.tier == "complete")
    groups = group_pairs(
        (submitters.is_rate_confirmed(entry, complete.get(entry.confirmation_key, ())), entry) for entry in listed
    )
    return groups.get(True, []), groups.get(False, [])


def read_submitters(root: Path) -> Submitters:
    """Read the submitters and maintainers from the files in a results folder. Paths and accounts are in lower case,
    because GitHub ignores the case of account names.
    """
    return Submitters(
        {Path(log_path): account for log_path, account in _read_submitter_lines(root)},
        frozenset(_read_content_lines(root / MAINTAINERS_FILE)),
    )


def _read_submitter_lines(root: Path) -> list[tuple[str, str]]:
    """Return the path of a log and the account of its submitter from each line of submitters.txt."""
    return [
        (log_path, account)
        for log_path, _, account in (line.rpartition(" ") for line in _read_content_lines(root / SUBMITTERS_FILE))
    ]


def _read_content_lines(path: Path) -> list[str]:
    """Return the lines of a text file in lower case, without comments and empty lines. A missing file has no lines."""
    return [
        line.casefold()
        for line in (path.read_text(encoding="utf-8").splitlines() if path.exists() else [])
        if line and not line.startswith("#")
    ]


def check_submitters(root: Path, log_paths: Sequence[Path]) -> list[tuple[Path, Finding]]:
    """Find errors in submitters.txt, and logs that are missing from it. Returns pairs of a path and a finding.

    ``log_paths``: the paths of all logs, relative to the results folder ``root``.
    """
    path, named = root / SUBMITTERS_FILE, _read_submitter_lines(root)
    findings = [
        (path, Finding("submitter", f"{log_path}: write the path of a log in {root.name}/, a space and one account"))
        for log_path, account in named
        if not account or Path(log_path) not in log_paths
    ]
    listed = Counter(Path(log_path) for log_path, _ in named)
    twice = sorted(log_path for log_path, count in listed.items() if count > 1)
    findings += [(path, Finding("submitter", f"{log_path} is listed twice: delete one line")) for log_path in twice]
    unnamed = f"{SUBMITTERS_FILE} does not list this log: the workflow that merges the pull request adds it"
    return findings + [
        (root / log_path, Finding("submitter", unnamed, is_warning=True))
        for log_path in sorted(set(log_paths) - set(listed))
    ]


# -- reading all logs of results/ and choosing the best rates ----------------------------------------------------------


#: The best rate for a device, dtype and regime, and all rates (including this one) that it was chosen from.
BestRate = tuple[ResultRate, Sequence[ResultRate]]


@dataclass(frozen=True)
class ResultsCollection:
    """The contents of a results folder.

    - ``rates``: the rates in its logs.
    - ``legacy_runs``: the imported runs of mamf-finder, each with the path of its log in results/.
    - ``submitters``: who submitted the logs.
    """

    rates: Sequence[ResultRate] = ()
    legacy_runs: Sequence[tuple[FinderRun, Path]] = ()
    submitters: Submitters = field(default_factory=lambda: Submitters({}))

    def select_rates_of_table(self, table_name: str) -> list[ResultRate]:
        return [entry for entry in self.rates if entry.table_name == table_name]


def read_collection(root: Path, paths: Iterable[Path]) -> ResultsCollection:
    """Read the rates of the logs ``paths``, which are in the results folder ``root``. Raises RunLogError for an
    unreadable log.
    """
    rates: list[ResultRate] = []
    legacy_runs: list[tuple[FinderRun, Path]] = []
    for path in paths:
        log_path = path.relative_to(root)
        if (run := read_legacy_log_or_none(path)) is not None:
            legacy_runs.append((run, log_path))
        else:
            rates += collect_rates(read_run_log(path), log_path)
    return ResultsCollection(rates, legacy_runs, read_submitters(root))


def find_best_rates(rates: Iterable[ResultRate]) -> list[BestRate]:
    """Find the highest rate for each accelerator, dtype and regime. Returns them sorted by dtype, regime and rate.

    The rate of a sweep is used only if no search found a ceiling. A sweep does not measure its best row again to
    confirm it, so the rate of this row is biased upward.
    """
    groups = group_pairs(((entry.dtype, entry.regime, entry.device), entry) for entry in rates)
    kinds = ([entry for entry in group if entry.ceiling] or group for group in groups.values())
    chosen = [(max(kind, key=lambda entry: entry.rate), kind) for kind in kinds]
    return sorted(chosen, key=lambda pair: (pair[0].dtype, REGIME_NAMES.index(pair[0].regime), -pair[0].rate))


def select_attention_rates(rates: Iterable[ResultRate], *, per_kernel: bool = False) -> list[ResultRate]:
    """Select the row with the highest MAMFU for each accelerator, dtype, regime, direction, head dimension and mask.

    Selects an approximate kernel only if no exact kernel was measured. ``per_kernel``: select one row for each kernel.
    """
    rates_by_key: dict[tuple[Any, ...], list[ResultRate]] = {}
    for entry in rates:
        row, problem = entry.row, entry.row.problem
        what = (entry.device, problem.dtype, row.regime, problem.direction, row.shape.head_dims)
        # There are two conventions for counting the FLOP of a backward pass. Keep only the rows that count the FLOP
        # that the hardware computes.
        if not problem.has_backward_pass or problem.backward_count == "hardware":
            key = (*what, row.shape.causal, row.shape.window or 0, row.kernel if per_kernel else "")
            rates_by_key.setdefault(key, []).append(entry)
    best = {
        key: max(each, key=lambda entry: (has_exact_kernel(entry.row), entry.mamfu))
        for key, each in rates_by_key.items()
    }
    keys = sorted(best, key=lambda key: (*key[:3], {"fwd": 0, "bwd": 1}.get(key[3], 2), *key[4:7], -best[key].mamfu))
    return [best[key] for key in keys]


def select_best_rate_per_problem(rates: Sequence[ResultRate]) -> list[ResultRate]:
    """Select one rate for each operation, regime, problem and accelerator.

    The selected rate is the highest ceiling or, if there is no ceiling, the rate of the best row.
    """
    keys = ((each.row.operation, make_problem_title(each.regime, each.row.problem), each.device) for each in rates)
    groups = group_pairs(zip(keys, rates, strict=True))
    return [max(groups[key], key=lambda entry: (entry.ceiling is not None, entry.rate)) for key in sorted(groups)]
