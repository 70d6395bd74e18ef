"""Read, compare, draw, import and check run logs, for programs and notebooks. No call here loads code that measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.ceilings.ceiling import Ceiling
from mamf.contribution.review import Review, review_log
from mamf.errors import RunLogError
from mamf.kinds.registry import make_log_chart
from mamf.logs.compare import Comparison, compare_logs
from mamf.logs.finder import read_finder_logs
from mamf.logs.legacy import FinderRun, read_legacy_log_or_none, write_legacy_log
from mamf.logs.run_log import RunLog, read_run_log
from mamf.logs.shared_runs import read_log_or_shared_run
from mamf.report.charts.picture import draw_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A log, or the path of its file.
LogOrPath = RunLog | str | Path


def read_log(path: str | Path) -> RunLog | FinderRun:
    """Read a log of any kind and schema. An imported run of mamf-finder, the predecessor of mamf, is a FinderRun, which
    has no measurements.

    If ``path`` is the folder of logs that a run with ``--devices`` wrote, read these logs as one run. The log of a
    killed run is read up to its last whole line, and ``is_truncated`` is then true. Raises RunLogError, which names the
    first wrong line and says what is wrong with it.

    >>> log = mamf.read_log("sweep.jsonl")
    >>> log
    RunLog(sweep.jsonl: 2 rows, complete)
    >>> best = max(log.measurements, key=lambda row: row.best_rate)
    >>> str(best.shape), best.regime
    ('8192x8192x8192', 'burst')
    >>> [row["shape.m"] for row in log.rows() if row["tflops.median"] > 1]  # pandas.DataFrame(log.rows()) works too
    [4096, 8192]
    """
    path = Path(path)
    return (None if path.is_dir() else read_legacy_log_or_none(path)) or read_log_or_shared_run(path)


def load_ceiling(path: str | Path, regime: str = "burst") -> Ceiling:
    """Read the burst or sustained ceiling from a log of ``mamf find``.

    Raises RunLogError if the log cannot be read or has no such ceiling.

    >>> ceiling = mamf.load_ceiling("find.jsonl")
    >>> ceiling.regime, ceiling.problem.dtype, ceiling.round_count >= 3
    ('burst', 'bfloat16', True)
    """
    log = read_run_log(path)
    if regime not in log.ceilings:
        raise RunLogError(
            f"{path} has no {regime} ceiling (its ceilings: {', '.join(log.ceilings) or 'none'}): measure one with "
            "'mamf find'"
        )
    return log.ceilings[regime]


def compare(
    a: LogOrPath | Sequence[LogOrPath], b: LogOrPath | Sequence[LogOrPath], *, anyway: bool = False
) -> Comparison:
    """Compare two logs row by row: say which rows of ``b`` are faster or slower than in ``a``, and which are undecided.

    ``a`` and ``b`` may each be the logs of several runs of one plan. If all are logs of ``mamf find``, their ceilings
    are compared. Raises RunLogError for a file that is not a log, and IncomparableError if the logs have no row in
    common, or if they are from different devices, dtypes or regimes (unless ``anyway``).

    >>> comparison = mamf.compare("before.jsonl", "after.jsonl")
    >>> comparison.find_regressions(tolerance=0.01)
    []
    >>> [pair.decide_verdict() for pair in comparison.pairs]
    ['SAME', 'SAME']
    >>> comparison.rows()[0]["verdict"]
    'SAME'
    >>> comparison.is_b_slower()  # True if one row, or all rows together, are slower; wrong in at most 1 % of cases
    False
    """
    sides = ([side] if isinstance(side, LogOrPath) else side for side in (a, b))
    runs_a, runs_b = ([_read_log_if_path(log) for log in side] for side in sides)
    return compare_logs(runs_a, runs_b, anyway)


def plot(
    log: LogOrPath,
    path: str | Path | None = None,
    *,
    regime: str | None = None,
    directions: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Figure:
    """Draw a log as a matplotlib figure, and save it if ``path`` is given. The chart depends on the kind of log.

    - ``path``: a ``.png`` or ``.svg`` file; an existing file is replaced only with ``overwrite``.
    - ``regime``: the regime of the rows to draw; by default all regimes, or the first regime of an attention log.
    - ``directions``: ``fwd``, ``bwd`` or ``fwd+bwd`` (attention only); by default all.

    Raises UnavailableError if matplotlib is not installed, and UsageError if the log has no row to draw or the file
    exists.

    >>> figure = mamf.plot("sweep.jsonl", "sweep.svg", regime="burst")
    >>> figure.texts[0].get_text()
    'matmul MxNxK by simulated.mm, bfloat16'
    """
    figure = draw_figure(make_log_chart(_read_log_if_path(log), regime, directions))
    if path is not None:
        save_figure(figure, Path(path), overwrite)
    return figure


def import_logs(path: str | Path) -> list[FinderRun]:
    """Read the runs in a file that has the printed output of mamf-finder, versions 2 to 4. Rates are in TFLOPS.

    ``write_imported`` saves a run. Raises RunLogError if the file has no run.

    >>> run = mamf.import_logs("finder.txt")[0]
    >>> run.version, run.dtype, run.is_complete
    ('v2', 'bfloat16', True)
    """
    return read_finder_logs(Path(path))


def write_imported(run: FinderRun, path: str | Path) -> None:
    """Write an imported run as a run log, which ``read_log`` reads. The log has the tier
    ``legacy`` (the tier says how far figures can be trusted), because mamf did not measure the run.

    Raises UsageError if the file exists or cannot be created, RunLogWriteError if the disk is full.

    >>> run = mamf.import_logs("finder.txt")[0]
    >>> mamf.write_imported(run, "finder.jsonl")
    >>> mamf.read_log("finder.jsonl") == run
    True
    """
    write_legacy_log(run, Path(path))


def check(path: str | Path) -> Review:
    """Check a log against the rules for the logs in results/, to which users contribute. Each finding names the broken
    rule and the line, and says what to do.

    If the file cannot be read as a log, a finding says why, and no error is raised.

    >>> review = mamf.check("sweep.jsonl")
    >>> review.is_rejected()
    True
    >>> "simulated" in {finding.rule for finding in review.findings}
    True
    """
    return review_log(Path(path))


def _read_log_if_path(log: LogOrPath) -> RunLog:
    return log if isinstance(log, RunLog) else read_log_or_shared_run(Path(log))
