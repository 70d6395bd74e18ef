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
KNOWN = LogRecord(
    "known_ceiling", {"dtype": "bfloat16", "regime": "burst", "tflops": 700.0, "source": "log", "told": ""}
)


@dataclass
class Scripted:
    """A strategy that yields the values in ``given``, and raises those that are exceptions."""

    given: list
    skipped_step_count: int = 0

    def yield_results(self):
        for each in self.given:
            if isinstance(each, BaseException):
                raise each
            yield each


@pytest.fixture
def rows():
    return list(Run(PLAN, SimulatedBackend(), [("simulated.mm", SimulatedMatmul())]).yield_measurements())


def driven(path, given=None, skipped_step_count=0, **fields):
    strategy = None if given is None else lambda setup: Scripted(given, skipped_step_count)
    return Run(
        PLAN,
        SimulatedBackend(),
        [("simulated.mm", SimulatedMatmul())],
        make_run_strategy=strategy,
        log_path=path,
        **fields,
    )


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_reports_each_step_when_it_prepares_the_step_and_when_it_measures_it(tmp_path):
    events, kernel = [], SimulatedMatmul()
    run = Run(PLAN, SimulatedBackend(), [("simulated.mm", kernel)])
    run.report_step = lambda step, is_prepared: events.append((step, is_prepared))
    rows = list(run.yield_measurements())
    assert events == [(f"{row.shape} {row.kernel}", is_prepared) for row in rows for is_prepared in (False, True)]
    assert len(rows) == len(SHAPES)


def test_each_record_is_written_before_its_row_is_seen(rows, tmp_path):
    path, seen = tmp_path / "run.jsonl", 0
    for row in driven(path, [KNOWN, *rows]).yield_measurements():
        seen += 1
        assert records(path)[-1]["shape"] == {"m": row.shape.m, "n": 1024, "k": 1024}
    assert seen == 3
    assert [each["record"] for each in records(path)] == ["header", "known_ceiling", *3 * ["measurement"], "summary"]
    assert read_run_log(path).plan == PLAN


@pytest.mark.parametrize(
    ("end", "skipped_step_count", "reason", "left"),
    [
        ([], 0, "", 1),
        ([], 1, "the budget ended", 1),
        ([KeyboardInterrupt()], 0, "by the user", 1),
        ([ValueError("a broken strategy\nwith details")], 0, "a broken strategy", 1),
    ],
)
def test_the_summary_says_how_the_run_ended(rows, tmp_path, end, skipped_step_count, reason, left):
    path, run = tmp_path / "run.jsonl", None
    run = driven(path, [*rows[:2], *end], skipped_step_count)
    try:
        list(run.yield_measurements())
    except (KeyboardInterrupt, ValueError):
        assert end
    found = records(path)[-1]
    assert (found["status"], found["reason"]) == ("interrupted" if reason else "complete", reason)
    assert (found["measured"], found["left"]) == (2, left)
    assert run.is_summary_written


def test_a_log_that_cannot_be_written_is_kept_in_memory(rows, tmp_path, monkeypatch):
    written = RunLogWriter.write

    def full(self, record, fields):
        if record == "summary":
            raise RunLogWriteError("the disk is full")
        written(self, record, fields)

    monkeypatch.setattr(RunLogWriter, "write", full)
    run = driven(tmp_path / "run.jsonl", [KNOWN, *rows])
    with pytest.raises(RunLogWriteError):
        list(run.yield_measurements())
    log = run.build_log()
    assert not run.is_summary_written
    assert (log.tier, len(log.measurements), [*log.known_ceilings]) == ("complete", 3, [("bfloat16", "burst")])
