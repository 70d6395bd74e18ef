"""Test ``mamf overlap``, which measures how much a matmul and other work slow each other down.

The simulated device has two queues. While both are busy, it slows each of them by a known share.
"""

import itertools
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from forked import LONGEST_SECONDS
from two_queues import ASIDE, OWN, SimulatedPair, TwoQueues

from mamf.cli import main
from mamf.engine.strategies.studies import OverlapStrategy, compute_overlapping_seconds
from mamf.errors import UsageError
from mamf.kernel import Verdict
from mamf.kinds.registry import make_log_chart
from mamf.logs.run_log import read_run_log
from mamf.operations.overlap import MIN_OVERLAP_SHAPE, OverlapProblem, OverlapShape
from mamf.report.formats import format_for_terminal
from mamf.report.overlap import (
    OverlapPair,
    describe_predicted_steps,
    find_complete_pairs,
    make_overlap_chart,
    make_overlap_document,
)
from mamf.statistics import summarize_samples
from mamf.testing import SimulatedBackend, SimulatedMatmul

LARGE, DECODE = "8192x8192x8192", "16x8192x8192"


def measure_pair(other, shape, device=None, kernel=None, seconds=0.3, **options):
    problem = OverlapProblem(other, ranks=2)
    cells = [(problem, OverlapShape.parse(shape))]
    strategy = OverlapStrategy(device or TwoQueues(), kernel or SimulatedPair(), cells, seconds, **options)
    return {(row.problem.timed, row.problem.alone): row for row in strategy.yield_results()}


def compute_kept_share(rows, timed_work):
    """Return the share of its rate that a workload keeps while both run, and the half-width of its interval."""
    alone, together = rows[timed_work, True], rows[timed_work, False]
    share = together.best_rate / alone.best_rate
    return share, share * math.hypot(alone.relative_half_width, together.relative_half_width)


@pytest.mark.parametrize("shape", [f"{LARGE}+1GiB", f"{LARGE}+64MiB", f"{DECODE}+256MiB"])
@pytest.mark.parametrize("other", ["all_reduce", "to_host", "copy"])
def test_each_workload_keeps_the_planted_share_of_its_rate(other, shape):
    rows = measure_pair(other, shape)
    assert [row.status for row in rows.values()] == ["ok"] * 4
    for timed_work, planted_share in (("products", TwoQueues.kept[OWN]), ("other", TwoQueues.kept[ASIDE])):
        share, half_width = compute_kept_share(rows, timed_work)
        assert abs(share - planted_share) <= half_width < 0.02


LATE_HOST_REASON = "the host queues these launches more slowly than the device runs them"


def test_a_host_that_is_late_gives_no_figure():
    rows = measure_pair("copy", f"{DECODE}+1MiB", seconds=0.06)
    assert [row.status for row in rows.values()] == ["unsupported"] * 4
    assert LATE_HOST_REASON in rows["products", False].reason


def add_answer_of_second_rank(get_answer):
    """Return a ``gather_from_ranks`` that adds the answer of a second rank after each window, and only then.

    ``get_answer``: returns this answer: the lead of the rank's host over its device in seconds, and the index of the
    workload that ended last, or None if the workloads overlapped.
    """
    return lambda answer: [answer, get_answer()] if isinstance(answer, tuple) and len(answer) == 2 else [answer]


def test_a_window_in_which_the_host_of_another_rank_is_late_does_not_count():
    work = "all_reduce", f"{LARGE}+1GiB"
    late_once = itertools.chain([(-1e-3, None)], itertools.repeat((1e-3, None)))
    rows_late_once = measure_pair(*work, gather_from_ranks=add_answer_of_second_rank(late_once.__next__))
    assert {row.status for row in rows_late_once.values()} == {"ok"}
    sample_counts = [sum(len(row.samples) for row in rows.values()) for rows in (rows_late_once, measure_pair(*work))]
    assert sample_counts[0] <= sample_counts[1]
    rows_always_late = measure_pair(*work, gather_from_ranks=add_answer_of_second_rank(lambda: (-1e-3, None)))
    assert LATE_HOST_REASON in rows_always_late["other", True].reason
    mostly_late = itertools.cycle([(-1e-3, None)] * 4 + [(1e-3, 0)])
    rows_mostly_late = measure_pair(*work, gather_from_ranks=add_answer_of_second_rank(mostly_late.__next__))
    assert LATE_HOST_REASON in rows_mostly_late["other", True].reason


class Starving(TwoQueues):
    """A device on which the other work hardly runs while matmuls run."""

    kept: ClassVar = {OWN: 0.9, ASIDE: 0.02}


@pytest.mark.parametrize("other", ["all_reduce", "copy"])
def test_work_that_matmuls_starve_is_measured_with_fewer_launches(other):
    share, half_width = compute_kept_share(measure_pair(other, f"{LARGE}+24MiB", Starving()), "other")
    assert abs(share - 0.02) <= half_width < 0.0012


class Exclusive(TwoQueues):
    """A device that runs the other work only when no matmul runs."""

    kept: ClassVar = {OWN: 1.0, ASIDE: 1e-9}


def test_workloads_that_never_overlap_give_no_figure():
    """Check the reason, and that mamf soon gives up: it must not try longer and longer blocks."""
    device = Exclusive()
    strategy = OverlapStrategy(
        device, SimulatedPair(), [(OverlapProblem("copy"), OverlapShape.parse(f"{LARGE}+24MiB"))], 0.6
    )
    assert {row.reason for row in strategy.yield_results()} == {
        "the device does not run matmul and the other work at the same time"
    }
    assert device.now() < 4


def test_only_blocks_within_the_overlap_count():
    """Check that a workload's time per launch comes only from blocks during which the other workload ran too.

    The first workload needs 2 s per launch until 6 s, and 1 s after that. The second workload ends at 6.5 s, so these
    faster launches do not count. The mean over all blocks of the first workload would be 1.6 s.
    """
    first = [(0.0, 1), (2.0, 2), (4.0, 3), (6.0, 4), (7.0, 5), (8.0, 6)]
    other = [(1.0, 2), (3.0, 3), (6.5, 6)]
    assert compute_overlapping_seconds([first, other]) == [2.0, 1.375]
    assert compute_overlapping_seconds([[(0.0, 1), (1.0, 2)], [(0.5, 1), (3.0, 2)]]) is None
    assert compute_overlapping_seconds([[(0.0, 4), (2.0, 8), (4.0, 12)]]) == [0.5]


class WrongLater(SimulatedMatmul):
    """A matmul whose results become wrong after a while, as with a hardware fault that appears only under load."""

    def prepare(self, *arguments, **options):
        prepared = super().prepare(*arguments, **options)
        check_indices = itertools.count()

        def verify(index, result):
            return Verdict(float(next(check_indices) > 10), 0.1)

        return replace(prepared, verify=verify)


def test_a_matmul_with_wrong_results_gives_no_figure():
    rows = measure_pair("all_reduce", f"{LARGE}+1GiB", kernel=SimulatedPair(matmul=WrongLater))
    assert {row.status for row in rows.values()} == {"wrong_result"}


def test_a_device_with_one_queue_says_so():
    rows = measure_pair("to_host", f"{LARGE}+1GiB", SimulatedBackend())
    assert {row.status for row in rows.values()} == {"unsupported"}
    assert "cannot use a second queue" in rows["other", True].reason


def test_a_failure_on_another_rank_counts_for_all():
    rows = measure_pair(
        "all_reduce", f"{LARGE}+1GiB", gather_from_ranks=lambda answer: [answer, answer or answer is False]
    )
    assert {row.reason for row in rows.values()} == {"another process (rank) of this run failed"}


def test_the_budget_leaves_out_whole_pairs():
    cells = [(OverlapProblem(other), OverlapShape.parse(f"{LARGE}+64MiB")) for other in ("to_host", "to_device")]
    strategy = OverlapStrategy(TwoQueues(), SimulatedPair(), cells, 0.3, budget_seconds=0.1)
    assert len(list(strategy.yield_results())) == strategy.skipped_step_count == 4


def find_only_pair(rows):
    (pair,) = find_complete_pairs(rows.values())
    return pair


def test_a_predicted_step_ends_with_the_rest_of_the_longer_workload():
    pair = find_only_pair(measure_pair("all_reduce", f"{LARGE}+1GiB"))
    matmul_seconds, other_seconds = (pair.rows[timed_work, True].seconds for timed_work in ("products", "other"))
    flop, nbytes = pair.matmul_row.flop, 2**30
    with_overlap, without_overlap = pair.predict_step_seconds(10 * flop, 2 * nbytes, matmul_seconds)
    both_seconds = 2 * other_seconds / TwoQueues.kept[ASIDE]
    assert without_overlap == pytest.approx(10 * matmul_seconds + 2 * other_seconds)
    rest_of_matmul_seconds = 10 * matmul_seconds - both_seconds * TwoQueues.kept[OWN]
    assert with_overlap == pytest.approx(both_seconds + rest_of_matmul_seconds, rel=0.01)
    assert pair.predict_step_seconds(flop, 1e-9, matmul_seconds)[0] == pytest.approx(matmul_seconds, rel=0.01)


def test_all_predictions_use_one_rate_of_the_matmul_alone():
    results = Path(__file__).parents[2] / "results" / "nvidia-h200"
    log = read_run_log(results / "overlap-bfloat16-sustained-20261124-023603.jsonl")
    flop, nbytes = 4e15, 1.6e10
    pairs = [pair for pair in find_complete_pairs(log.measurements) if pair.work_names == (LARGE, "all_reduce")]
    (text,) = describe_predicted_steps(pairs, flop, nbytes)
    milliseconds = [float(each) for each in re.findall(r"([\d.]+) ms", text)]
    matmul_milliseconds = statistics.median(flop / pair.rows["products", True].best_rate / 1e9 for pair in pairs)
    least_transfer = min(nbytes / pair.rows["other", True].best_rate / 1e9 for pair in pairs)
    assert milliseconds[1] == pytest.approx(matmul_milliseconds + least_transfer, rel=1e-3)


def test_an_interval_above_half_of_the_share_is_unknown_and_not_drawn(monkeypatch):
    results = Path(__file__).parents[2] / "results" / "nvidia-h200"
    log = read_run_log(results / "overlap-bfloat16-sustained-20261124-023603.jsonl")
    monkeypatch.setattr(OverlapPair, "compute_relative_half_width", lambda pair, timed_work: 1.64)
    document = make_overlap_document(log.measurements, log.header, log.summary, None, (1e13, 1e9))
    text = format_for_terminal(document, 200)
    assert "  unknown  " in text and " ms (interval unknown) with overlap" in text and "164" not in text
    points = [row.points[0] for row in make_overlap_chart(log.measurements, log.header).rows]
    assert all(point.low == point.value == point.high for point in points)


def test_the_report_says_if_overlap_makes_a_step_longer(monkeypatch):
    rows = measure_pair("all_reduce", f"{LARGE}+1GiB")
    slow = {
        key: row if row.problem.alone else replace(row, summary=summarize_samples((3 * row.seconds,) * 3))
        for key, row in rows.items()
    }
    text, text_of_slow = (
        next(describe_predicted_steps([find_only_pair(pair_rows)], 1e13, 1e9)) for pair_rows in (rows, slow)
    )
    assert text.endswith("without overlap")
    monkeypatch.setattr(OverlapPair, "compute_relative_half_width", lambda pair, timed_work: 0.99)
    assert next(describe_predicted_steps([find_only_pair(slow)], 1e13, 1e9)).endswith(
        "too noisy to say whether overlap pays"
    )
    assert text_of_slow.endswith("without overlap: overlap does not pay here, so run one after the other")


def test_a_narrow_terminal_shows_how_well_the_kept_shares_are_known():
    results = Path(__file__).parents[2] / "results" / "nvidia-h200"
    log = read_run_log(results / "overlap-bfloat16-sustained-20261124-023603.jsonl")
    lines = format_for_terminal(make_overlap_document(log.measurements, log.header, log.summary), 80).splitlines()
    (heading,) = (line for line in lines if line.startswith("matmul  "))
    assert heading.split("kept %")[0].count("GB/s") == 0
    assert re.split(r"  +", heading[heading.index("kept %") :]) == ["kept %", "+-%", "other kept %", "+-%"]


def test_only_collectives_have_ranks_and_blocks():
    assert OverlapProblem("to_host", ranks=4, blocks=8) == OverlapProblem("to_host")
    assert (
        OverlapProblem("all_gather", ranks=4, blocks=8).get_timed_problem_and_shape(MIN_OVERLAP_SHAPE)[0].dtype
        == "bfloat16"
    )
    for wrong in ({"other": "all_reduce", "ranks": 1}, {"other": "all_reduce", "ranks": 2, "blocks": -1}):
        with pytest.raises(UsageError):
            OverlapProblem(**wrong)
    with pytest.raises(UsageError, match=r"8192x8192x8192\+1GiB"):
        OverlapShape.parse("8192x8192x8192")


COMMAND = ("overlap", "--backend", "cpu", "--dtype", "float32", "--time-limit", "0.01s", "--shapes", "64x64x64+64KiB")


def test_the_command_measures_shows_and_draws_a_pair(run, monkeypatch):
    """Measure a matmul with copies to the host in one process, then read, show, draw and resume the log."""
    monkeypatch.setattr("mamf.operations.overlap.WorkPairKernel", SimulatedPair)
    step = ("--flop", "1e13", "--bytes", "1e9")
    options = ("--backend", "two_queues:TwoQueues", "--shapes", f"{LARGE}+1GiB", "--beside", "to_host", *step)
    code, out, err = run("overlap", *options, "--time-limit", "0.3s", "--output", "log.jsonl")
    assert code == 0, err
    assert LARGE in out
    assert "a step of 1e+13 FLOP and 1e+09 bytes of to_host takes" in out
    log = read_run_log(run.folder / "log.jsonl")
    assert (log.plan.kind, log.tier, len(log.measurements)) == ("overlap", "complete", 4)
    (pair,) = json.loads(run("show", "log.jsonl", "--format", "json")[1])["pairs"]
    assert pair["products_kept"] == pytest.approx(TwoQueues.kept[OWN], rel=0.02)
    rows = make_log_chart(log).rows
    assert [(row.group, row.name) for row in rows] == [
        (f"{LARGE} with to_host 1GiB", name) for name in ("matmul", "to_host")
    ]
    assert rows[0].points[0].value == pytest.approx(100 * pair["products_kept"])
    code, resumed_out, err = run("overlap", "--backend", options[1], "--resume", "log.jsonl", *step)
    assert code == 0, err
    assert " %) with overlap, at the rates of " in resumed_out
    assert " ms without overlap" in resumed_out


def test_pairs_become_shorter_to_fit_into_a_budget(run, monkeypatch):
    monkeypatch.setattr("mamf.operations.overlap.WorkPairKernel", SimulatedPair)
    pairs = ("--shapes", f"{LARGE}+1GiB", f"{LARGE}+64MiB", "--beside", "to_host", "to_device")
    code, _, err = run(
        "overlap", "--backend", "two_queues:TwoQueues", *pairs, "--budget", "30s", "--output", "log.jsonl"
    )
    assert code == 0, err
    summary = read_run_log(run.folder / "log.jsonl").summary
    assert (summary["status"], summary["measured"]) == ("complete", 16)
    assert summary["elapsed_seconds"] <= 1.2 * 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--beside", "all_reduce"),
            "the collective all_reduce needs several devices, but cpu has 1: use --beside to_host copy",
        ),
        (("--beside", "to_peer"), "to_peer needs several devices, but cpu has 1: use --beside to_host copy"),
        (("--flop", "1e9"), "--flop and --bytes describe one training step: give both"),
        (("--flop", "nan", "--bytes", "1"), "'nan' is not a number above 0: write it like 1.6e10"),
        (("--flop", "1", "--bytes", "x"), "'x' is not a number above 0: write it like 1.6e10"),
        (("--blocks", "8"), "--blocks needs a collective: add a collective with --beside"),
        (("--beside", "foo"), "unknown work for --beside 'foo'; known: all_gather, all_reduce, "),
    ],
)
def test_wrong_options_are_refused_with_a_message(run, options, message):
    code, _, err = run(*COMMAND, *options)
    assert code == 2
    assert message in err.splitlines()[-1]


def test_a_complete_log_predicts_a_step_without_its_device(run):
    h200 = next((Path(__file__).parents[2] / "results" / "nvidia-h200").glob("overlap-bfloat16-sustained-*.jsonl"))
    code, out, err = run("overlap", "--resume", str(h200), "--flop", "4e15", "--bytes", "1.6e10")
    assert code == 0, err
    assert "a step of 4e+15 FLOP and 1.6e+10 bytes of" in out


def run_rank(rank, port, log):
    """Run the command as one of two ranks. The ranks communicate through Gloo, and each measures in its own virtual
    time.
    """
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pytest.MonkeyPatch().setattr("mamf.operations.overlap.WorkPairKernel", SimulatedPair)
    options = ("--backend", "two_queues:TwoQueues", "--shapes", f"{LARGE}+1GiB", "--time-limit", "0.1s")
    return main(["overlap", *options, "--beside", "all_reduce", "--output", str(log)])


@pytest.mark.emulated
def test_two_ranks_measure_matmuls_beside_a_collective(tmp_path):
    """Start the ranks as new processes, because a forked copy of a process with threads once hung in Gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log.jsonl"
    code = "import sys, test_overlap as t; sys.exit(t.run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))"
    command, folder = [sys.executable, "-c", code], Path(__file__).parent
    ranks = [subprocess.Popen([*command, str(rank), str(port), str(log)], cwd=folder) for rank in range(2)]
    assert [rank.wait(LONGEST_SECONDS) for rank in ranks] == [0, 0]
    rows = read_run_log(log).measurements
    assert [(row.status, row.problem.ranks) for row in rows] == [("ok", 2)] * 4
