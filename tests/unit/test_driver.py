"""Test the driver of runs: what it writes to the log for all results of a strategy, and however a run ends."""

import json
from dataclasses import dataclass

import pytest
from made_plans import sweep_plan

from mamf.errors import RunLogWriteError
from mamf.kinds.driver import Run
from mamf.logs.recording import LogRecord
from mamf.logs.run_log import read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.testing import SimulatedBackend, SimulatedMatmul

SHAPES = tuple(MatmulShape(size, 1024, 1024) for size in (1024, 2048, 3072))
PLAN = sweep_plan(SHAPES, MatmulProblem(), kernel="simulated.mm")
KNOWN_CEILING = LogRecord(
    "known_ceiling", {"dtype": "bfloat16", "regime": "burst", "tflops": 700.0, "source": "log", "told": ""}
)


@dataclass
class Scripted:
    """A strategy that yields the values in ``results``, and raises those that are exceptions."""

    results: list
    skipped_step_count: int = 0

    def yield_results(self):
        for result in self.results:
            if isinstance(result, BaseException):
                raise result
            yield result


@pytest.fixture
def rows():
    return list(Run(PLAN, SimulatedBackend(), [("simulated.mm", SimulatedMatmul())]).yield_measurements())


def make_run(path, results, skipped_step_count=0):
    """Return a run whose strategy yields ``results``, and whose log is written to ``path``."""
    return Run(
        PLAN,
        SimulatedBackend(),
        [("simulated.mm", SimulatedMatmul())],
        make_run_strategy=lambda setup: Scripted(results, skipped_step_count),
        log_path=path,
    )


def read_records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_reports_each_step_when_it_prepares_the_step_and_when_it_measures_it():
    events, kernel = [], SimulatedMatmul()
    run = Run(PLAN, SimulatedBackend(), [("simulated.mm", kernel)])
    run.report_step = lambda step, is_prepared: events.append((step, is_prepared))
    rows = list(run.yield_measurements())
    assert events == [(f"{row.shape} {row.kernel}", is_prepared) for row in rows for is_prepared in (False, True)]
    assert len(rows) == len(SHAPES)


def test_each_record_is_written_before_its_row_is_seen(rows, tmp_path):
    path, seen_row_count = tmp_path / "run.jsonl", 0
    for row in make_run(path, [KNOWN_CEILING, *rows]).yield_measurements():
        seen_row_count += 1
        assert read_records(path)[-1]["shape"] == {"m": row.shape.m, "n": 1024, "k": 1024}
    assert seen_row_count == 3
    names = [record["record"] for record in read_records(path)]
    assert names == ["header", "known_ceiling", *3 * ["measurement"], "summary"]
    assert read_run_log(path).plan == PLAN


@pytest.mark.parametrize(
    ("end", "skipped_step_count", "reason", "left_count"),
    [
        ([], 0, "", 1),
        ([], 1, "the budget ended", 1),
        ([KeyboardInterrupt()], 0, "by the user", 1),
        ([ValueError("a broken strategy\nwith details")], 0, "a broken strategy", 1),
    ],
)
def test_the_summary_says_how_the_run_ended(rows, tmp_path, end, skipped_step_count, reason, left_count):
    path = tmp_path / "run.jsonl"
    run = make_run(path, [*rows[:2], *end], skipped_step_count)
    try:
        list(run.yield_measurements())
    except (KeyboardInterrupt, ValueError):
        assert end
    summary = read_records(path)[-1]
    assert (summary["status"], summary["reason"]) == ("interrupted" if reason else "complete", reason)
    assert (summary["measured"], summary["left"]) == (2, left_count)
    assert run.is_summary_written


def test_a_log_that_cannot_be_written_is_kept_in_memory(rows, tmp_path, monkeypatch):
    write = RunLogWriter.write

    def fail_at_summary(self, record, fields):
        if record == "summary":
            raise RunLogWriteError("the disk is full")
        write(self, record, fields)

    monkeypatch.setattr(RunLogWriter, "write", fail_at_summary)
    run = make_run(tmp_path / "run.jsonl", [KNOWN_CEILING, *rows])
    with pytest.raises(RunLogWriteError):
        list(run.yield_measurements())
    log = run.build_log()
    assert not run.is_summary_written
    assert (log.tier, len(log.measurements), [*log.known_ceilings]) == ("complete", 3, [("bfloat16", "burst")])
