"""Test the search for a matmul ceiling that ``mamf attention`` runs before it measures its own rows.

The tests cover the time budget of the search, its rows in the log, and the resuming of an interrupted search.
"""

import copy
import json
import os
import signal
from collections import Counter

import pytest
from contribution_logs import DEVICE, found, in_virtual_time, rows, write

from mamf.contribution.collection import read_collection
from mamf.contribution.review import review_log
from mamf.engine.search.strategy import GridSearchStrategy
from mamf.logs.compare import compare_logs
from mamf.logs.run_log import read_run_log
from mamf.operations.matmul.shapes import SearchOptions
from mamf.testing import SimulatedAttention, SimulatedMatmul

SIMULATED = ["--backend", "mamf.testing:SimulatedBackend"]
KERNEL = ["--kernel", "mamf.testing:SimulatedAttention"]
OPTIONS = [*SIMULATED, *KERNEL, "--seq-lens", "1024", "2048", "--causal", "both"]
ROW_COUNT = 4


@pytest.fixture(autouse=True)
def default_kernel(monkeypatch, registered):
    """Provide the simulated matmul as the default kernel, so that the search measures it."""
    monkeypatch.setattr(SimulatedMatmul, "is_default", True)


@pytest.fixture
def attention(run):
    return lambda *options: run("attention", *OPTIONS, "--output", "run.jsonl", *options)


@pytest.fixture
def resume(run):
    return lambda *options: run("attention", *SIMULATED, *KERNEL, "--resume", "run.jsonl", *options)


@pytest.fixture
def whole(attention, tmp_path):
    """Provide a complete log, ``run.jsonl``. Return the exit code and output of its run, and the bytes of the log."""
    path = tmp_path / "run.jsonl"
    if not WHOLE:
        code, out, _ = attention("--format", "csv")
        WHOLE.extend((code, out, path.read_bytes()))
    path.write_bytes(WHOLE[2])
    return WHOLE


WHOLE = []  # shared by all tests, because a search takes a second


def read_log(tmp_path):
    return read_run_log(tmp_path / "run.jsonl")


def assert_complete_without_ceilings(tmp_path):
    """Check that the run measured every row but confirmed no ceiling."""
    log = read_log(tmp_path)
    assert (log.tier, log.matmul_ceilings, len(select_attention_rows(log))) == ("complete", {}, ROW_COUNT)


def select_search_rows(log):
    return [row for row in log.measurements if row.phase]


def select_attention_rows(log):
    return [row for row in log.measurements if row.operation == "attention"]


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [["--no-ceiling"], ["--ceiling", "run.jsonl"]])
def test_a_log_with_a_ceiling_search_is_not_resumed_with_another_ceiling_option(whole, resume, tmp_path, option):
    (tmp_path / "run.jsonl").write_bytes(b"".join(whole[2].splitlines(keepends=True)[:5]))
    (tmp_path / "ceiling.jsonl").write_bytes(whole[2])
    code, out, err = resume(*(each.replace("run", "ceiling") for each in option))
    assert (code, out) == (2, "")
    assert "contradicts run.jsonl, which was measured with a search for its own ceiling" in err


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [6.0, 9.0])
def test_the_search_counts_toward_the_budget(attention, tmp_path, monkeypatch, budget):
    # Use the default counts. A search divides its time among its measurements, so with the small counts of the other
    # tests, each measurement would take a larger part of a short budget.
    monkeypatch.setattr(SearchOptions, "scouts", 96)
    monkeypatch.setattr(SearchOptions, "refinements", 132)
    monkeypatch.setattr(GridSearchStrategy, "max_refinement_reach", 4)
    code, _, err = attention("--budget", f"{budget}s", "--seq-lens", *map(str, range(512, 16385, 512)))
    assert code == 0
    assert f"--budget leaves only {budget / 2:g} of the usual 12 s for the bfloat16 ceiling" in err
    log = read_log(tmp_path)
    assert [text for text in log.header["findings"] if f"search time: --budget leaves only {budget / 2:g} of" in text]
    assert log.summary["reason"] == "the budget ended"
    assert budget - 0.5 < log.summary["elapsed_seconds"] < budget + 0.5
    assert log.summary["measured"] + log.summary["left"] == 2 * 32


def test_without_a_confirmed_ceiling_kernels_are_measured_and_shares_missing(attention, resume, tmp_path):
    code, out, err = attention("--budget", "2s")
    assert code == 0
    message = "no bfloat16 burst ceiling was confirmed in 1 s, so rows show no share of it: search again with --resume"
    assert f"mamf: {message}" in err
    assert f"interrupted: the budget ended; {message}" in out
    log = read_log(tmp_path)
    before = select_attention_rows(log)
    assert before and all(row.ok for row in before)
    assert log.matmul_ceilings == {}
    assert {best["mamfu"] for best in log.summary["best"].values()} == {None}
    assert found(tmp_path / "run.jsonl") <= {"simulated", "missing-field"}
    code, out, err = resume("--budget", "20s")
    assert code == 0
    assert "complete; 3 measurements" in out
    assert "show no share" not in err
    after = read_log(tmp_path)
    assert set(after.matmul_ceilings) == {("bfloat16", "burst")}
    assert select_attention_rows(after)[: len(before)] == before, "a resumed run must not measure them again"
    assert len(select_attention_rows(after)) == ROW_COUNT
    assert all(0.1 < best["mamfu"] < 1 for best in after.summary["best"].values())
    assert found(tmp_path / "run.jsonl") <= {"simulated", "missing-field"}


def test_without_a_working_matmul_kernels_are_measured_and_shares_missing(attention, monkeypatch, tmp_path):
    monkeypatch.setattr(SimulatedMatmul, "prepare", lambda *arguments: 1 / 0)
    code, _, err = attention()
    assert code == 0
    assert "cannot measure a bfloat16 ceiling, so rows in this dtype show no share (MAMFU): " in err
    assert_complete_without_ceilings(tmp_path)
    assert found(tmp_path / "run.jsonl") <= {"simulated", "missing-field"}


def test_a_search_without_a_budget_has_its_usual_time(attention, tmp_path):
    code, out, err = attention("--dry-run")
    assert code == 0
    assert "ceilings: first the search for matmul, bfloat16 burst, at most 12 s" in out
    time = f"{12 + ROW_COUNT:.1f} s"
    assert f"time: about {time} for the timed launches, plus the time to prepare and verify the rows" in out
    assert "leaves" not in err
    assert list(tmp_path.iterdir()) == []


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_an_interrupted_search_resumes_with_the_rows_it_has(whole, attention, resume, on_launch, tmp_path, share):
    complete = read_log(tmp_path)
    launches = int(share * sum(row.launch_count for row in select_search_rows(complete)))
    (tmp_path / "run.jsonl").unlink()
    on_launch(lambda count: os.kill(os.getpid(), signal.SIGINT) if count == launches else None)
    code, out, _ = attention()
    assert code == 130
    assert "interrupted: by the user; 0 measurements in " in out
    best_so_far = max(row.best_rate for row in read_log(tmp_path).measurements if row.ok)
    assert f"the best rate so far is {best_so_far:.1f} TFLOPS @ " in out
    assert "4 measurements left: continue with --resume" in out
    before = read_log(tmp_path)
    assert {row.phase for row in before.measurements} <= {"scout", "refine", "choose", "confirm"}
    assert before.matmul_ceilings == {}
    on_launch(lambda count: None)
    assert resume()[0] == 0
    after = read_log(tmp_path)
    assert after.measurements[: len(before.measurements)] == before.measurements
    row_records = rows(map(json.loads, (tmp_path / "run.jsonl").open()))
    search_records = (row for row in row_records if row["phase"])
    assert max(Counter((row["phase"], row["round"], str(row["shape"])) for row in search_records).values()) == 1
    assert len(select_attention_rows(after)) == ROW_COUNT
    (ceiling,), (expected,) = after.matmul_ceilings.values(), complete.matmul_ceilings.values()
    assert ceiling.tflops == pytest.approx(expected.tflops, rel=0.01)
    assert found(tmp_path / "run.jsonl") <= {"simulated", "missing-field"}


# -- commands that read the log ----------------------------------------------------------------------------------------


@pytest.fixture
def records(whole):
    """Return the records of the log, changed as if a committed checkout had measured a real card."""
    records = [json.loads(line) for line in whole[2].splitlines()]
    records[0]["device"].update(DEVICE)
    records[0]["tool"]["commit"] = "0123456789ab"
    records[0]["findings"] = ["ok   sibling devices: idle or none"]
    return in_virtual_time(records)


def test_an_honest_log_is_accepted(records, tmp_path):
    """Check that the review finds no error. It may warn of wide intervals: launches of 50 us repeat only within 2 %."""
    findings = review_log(write(tmp_path / "log.jsonl", records)).findings
    assert {finding.rule for finding in findings} <= {"wide-interval"}
    assert all(finding.is_warning for finding in findings)


def test_rows_of_the_search_are_not_entries_of_the_collection(whole, tmp_path):
    collection = read_collection(tmp_path, [tmp_path / "run.jsonl"])
    assert [entry.table_name for entry in collection.rates] == ["shares"] * ROW_COUNT


def test_rows_of_the_search_are_not_compared(whole, tmp_path):
    log = read_log(tmp_path)
    assert len(compare_logs(log, log).pairs) == ROW_COUNT


@pytest.mark.parametrize(("regime", "code"), [("burst", 0), ("sustained", 2)])
def test_only_a_needed_ceiling_must_have_a_known_interval(run, find_records, tmp_path, regime, code):
    records = copy.deepcopy(find_records)
    records[0]["device"] |= {"name": "Simulated H100", "uuid_hash": None}
    for record in records:
        if record["record"] == "ceiling" and record["regime"] == "sustained":
            record["interval_tflops"][0] = 0.0
    write(tmp_path / "find.jsonl", records)
    result = run("attention", *SIMULATED, *KERNEL, "--seq-lens", "1024", "--regime", regime, "--ceiling", "find.jsonl")
    assert (result[0], "the sustained ceiling is too noisy" in result[2]) == (code, code == 2)
    assert ("or give --no-ceiling instead of --ceiling" in result[2]) == (code == 2)


def test_a_complete_run_without_a_rate_does_not_say_that_its_search_was_interrupted(attention, monkeypatch):
    monkeypatch.setattr(SimulatedAttention, "explain_unsupported_shape", lambda *arguments: "no shape is supported")
    out = attention()[1]
    assert "no row of attention was measured\n" in out and "no shape is supported" in out
    assert "searched for the ceiling" not in out
