"""Test ``mamf verify``: which faults it finds on a simulated device, how it locates them, and what it reports after a
run without faults.
"""

import dataclasses
import math
import random
import re
import shlex
import signal

import inline_children
import pytest
from made_plans import setup_of

from mamf.cli import main
from mamf.engine.strategies.studies import VerifyStrategy, draw_problem, make_verify_plan
from mamf.kernel import CELL_SIZE, WrongCells, describe_wrong_cells
from mamf.logs.run_log import read_run_log
from mamf.logs.shared_runs import find_shared_run_logs, read_log_or_shared_run
from mamf.node.device import DeviceRun
from mamf.node.logs import NodeRun, add_logs_to_device, read_device_logs
from mamf.node.verdict import NodeDevice
from mamf.pages.report import make_report_page
from mamf.plugins.discovery import make_kernel, make_operation, open_backend
from mamf.report.verification import (
    compute_error_rate_interval,
    compute_max_wrong_share,
    count_verified_items,
    yield_verdict_lines,
)
from mamf.testing import Physics, SimulatedBackend
from mamf.testing.simulated_kernels import SimulatedMatmul

DEVICE = ["--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedMatmul", "--no-isolate"]
PLAN = [*DEVICE, "--dtype", "bfloat16"]


def verify(physics, seed=0, budget=0.2):
    device = SimulatedBackend(physics=physics, seed=seed)
    kernel = SimulatedMatmul()
    plan = make_verify_plan(device, {"mamf.testing:SimulatedMatmul": kernel}, budget, ["bfloat16"])
    return list(VerifyStrategy(setup_of(plan, [kernel], device)).yield_results())


# -- in virtual time ---------------------------------------------------------------------------------------------------


def test_rare_bit_flips_are_found_as_often_as_their_probability_says():
    launches = count_verified_items(verify(Physics(), budget=0.05))["launches"]
    probability = 1 / launches
    failed_run_count = sum(
        count_verified_items(verify(Physics(bit_flip_probability=probability), seed, budget=0.05))["wrong"] > 0
        for seed in range(30)
    )
    expected_share = 1 - (1 - probability) ** launches
    assert abs(failed_run_count / 30 - expected_share) < 3 * math.sqrt(expected_share * (1 - expected_share) / 30)


def test_a_faulty_unit_is_located_by_its_tiles():
    rows = verify(Physics(faulty_unit_index=17), budget=0.3)
    wrong_tiles = [row.details["wrong tiles"] for row in rows if row.status == "wrong_result"]
    assert any(
        "of 128x256" in each and "every 132th tile is wrong, counting along rows from tile 17" in each
        for each in wrong_tiles
    )


def test_both_states_of_the_device_are_checked():
    rows = verify(Physics(), budget=10.0)
    spaced, loaded = (
        [bool(row.conditions.throttle_reasons) for row in rows if row.regime == name] for name in ("spaced", "loaded")
    )
    assert not any(spaced)
    assert sum(loaded) > len(loaded) / 2


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, "1 problem: too few for a bound, none was wrong; a longer --budget checks more"),
        (10, "10 problems: with 95 % confidence at most 26 % are wrong"),
    ],
)
def test_the_least_tested_kernel_has_a_bound_only_if_enough_problems_were_checked(count, expected):
    rows = [row for row in verify(Physics(), budget=10.0) if row.ok][:count]
    other_rows = [dataclasses.replace(row, kernel="other") for row in rows]
    more_other_rows = [dataclasses.replace(row, round_number=1000 + row.round_number) for row in other_rows]
    *_, line = yield_verdict_lines([*rows, *other_rows, *more_other_rows])
    assert line == f"the least tested kernel is simulated.mm in bfloat16, {expected}"


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_clean_run_says_what_it_excludes(run):
    code, out, _ = run("verify", *PLAN, "--budget", "1s", "--output", "clean.jsonl")
    summary = read_run_log(run.folder / "clean.jsonl").summary
    assert (code, summary["wrong"], summary["status"]) == (0, 0, "complete")
    (bound_line,) = (line for line in out.splitlines() if "confidence" in line)
    assert bound_line.startswith(
        f"with 95 % confidence at most {100 * compute_max_wrong_share(summary['problems']):.2g} % of such"
    )
    assert f"{100 * compute_max_wrong_share(summary['values']):.2g} % of values are wrong" in bound_line
    assert summary["values"] > 1e6 * summary["launches"]
    code, show_out, _ = run("show", "clean.jsonl")
    assert (code, show_out.splitlines()[-1]) == (0, out.splitlines()[-2])
    page = make_report_page([run.folder / "clean.jsonl"])
    assert (page.facts, page.verdict_color, page.verdict in out) == ([], "good", True)
    assert page.verdict.startswith("verify PASSED: 0 of ")


def test_top_limits_the_rows_of_the_table(run):
    options = (*DEVICE, "--dtype", "bfloat16", "float16", "--budget", "0.2s")
    assert "1 more row (--top all shows all)" in run("verify", *options, "--top", "1")[1]
    assert "--top all" not in run("verify", *options)[1]


def test_a_wrong_card_exits_with_3_and_names_the_command_that_repeats_it(run, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "physics", Physics(faulty_unit_index=0))
    code, out, _ = run("verify", *PLAN, "--budget", "0.02s", "--output", "wrong.jsonl")
    assert (code, "verify FAILED" in out) == (3, True)
    page = make_report_page([run.folder / "wrong.jsonl"])
    assert (page.verdict_color, page.verdict.startswith("verify FAILED: ")) == ("bad", True)
    repeat_arguments = next(line for line in out.splitlines() if "again: mamf" in line).partition("mamf ")[2]
    first_wrong_row = next(
        row for row in read_run_log(run.folder / "wrong.jsonl").measurements if row.status == "wrong_result"
    )
    arguments = shlex.split(repeat_arguments)
    arguments[arguments.index("--backend") + 1] = DEVICE[1]
    assert main([*arguments, "--no-isolate", "--budget", "0.01s", "--output", "again.jsonl"]) == 3
    assert {row.shape for row in read_run_log(run.folder / "again.jsonl").measurements} == {first_wrong_row.shape}


def test_a_lost_nan_is_explained_in_the_report_that_shows_it(run):
    run("verify", *PLAN, "--budget", "0.1s", "--output", "log.jsonl")
    assert "lost NaN" not in run("show", "log.jsonl")[1]
    path = run.folder / "log.jsonl"
    path.write_text(path.read_text().replace('"details": {', '"details": {"lost NaN": 3, ', 1))
    lines = run("show", "log.jsonl")[1].splitlines()
    assert sum(line.startswith("lost NaN: in this many problems") for line in lines) == 1


def test_a_resumed_run_continues_with_the_next_problem(run):
    run("verify", *PLAN, "--budget", "0.1s", "--output", "log.jsonl")
    before = read_run_log(run.folder / "log.jsonl").measurements
    assert run("verify", *DEVICE[:4], "--resume", "log.jsonl", "--budget", "0.1s")[0] == 0
    after = read_run_log(run.folder / "log.jsonl").measurements
    assert after[len(before)].round_number == len(before) + 1


def test_each_device_has_a_log_and_one_wrong_result_fails_the_run(run, monkeypatch):
    class TwoDevices(SimulatedBackend):
        count_devices = classmethod(lambda cls: 2)
        faulty_indices = ()

        def __init__(self, index=0):
            super().__init__(index, Physics(faulty_unit_index=0) if index in self.faulty_indices else Physics())

    monkeypatch.setattr("mamf.testing.TwoDevices", TwoDevices, raising=False)
    inline_children.install(monkeypatch)
    command = ["verify", "--backend", "mamf.testing:TwoDevices", *PLAN[2:], "--budget", "0.1s", "--output"]
    code, out, _ = run(*command, "right")
    counts = count_verified_items(read_log_or_shared_run(run.folder / "right").measurements)
    device_logs = find_shared_run_logs(run.folder / "right")
    assert (code, "verify PASSED" in out, len(device_logs)) == (0, True, 2)
    assert counts["problems"] == sum(
        count_verified_items(read_log_or_shared_run(path).measurements)["problems"] for path in device_logs
    )
    monkeypatch.setattr(TwoDevices, "faulty_indices", (1,))
    code, out, _ = run(*command, "wrong")
    assert (code, "verify FAILED" in out) == (3, True)
    assert "--device 1 " in out and "--device 0 " not in out


def test_ctrl_c_exits_with_130_or_with_3_if_a_result_was_wrong(run, monkeypatch, on_launch):
    for physics, code in ((Physics(), 130), (Physics(faulty_unit_index=0), 3)):
        monkeypatch.setattr(SimulatedBackend, "physics", physics)
        on_launch(lambda launch_count: signal.raise_signal(signal.SIGINT) if launch_count == 50 else None)
        exit_code, out, _ = run("verify", *PLAN, "--output", f"{code}.jsonl")
        assert (exit_code, "interrupted: by the user" in out) == (code, True)
        assert ("verify UNFINISHED: 0 of " in out, "--resume verifies more" in out) == (code == 130, True)


def test_a_verification_has_no_rates_to_compare_reproduce_or_collect(run):
    for name in ("log.jsonl", "other.jsonl"):
        run("verify", *PLAN, "--budget", "0.1s", "--output", name)
    for command in (["compare", "log.jsonl", "other.jsonl"], ["reproduce", *DEVICE, "log.jsonl"]):
        code, out, err = run(*command)
        assert (code, out, "log.jsonl is a log of 'mamf verify' and has no rates" in err) == (2, "", True)
    code, out, _ = run("results", "check", "log.jsonl")
    assert (code, out.count("error: "), "this is a log of 'mamf verify', which results/ does not collect" in out) == (
        1,
        1,
        True,
    )


@pytest.mark.parametrize(
    ("physics", "messages"),
    [
        (Physics(faulty_unit_index=0), ["wrong results in verify: "]),
        (
            Physics(bit_flip_probability=0.01),
            ["launches gave an output that differs from the output of the first launch"],
        ),
        (Physics(), []),
    ],
    ids=["a faulty unit", "a launch in a hundred", "healthy"],
)
def test_a_node_that_verifies_reports_a_wrong_device(tmp_path, monkeypatch, physics, messages):
    monkeypatch.setattr(SimulatedMatmul, "dtypes", ("bfloat16",))  # its simulated error exceeds the bound of float64
    kernels = {"mamf.testing:SimulatedMatmul": SimulatedMatmul()}
    monkeypatch.setattr("mamf.node.device.choose_kernels_to_verify", lambda backend, names: kernels)
    DeviceRun(SimulatedBackend(physics=physics), tmp_path, verify_budget_seconds=0.2)._measure_part("verify")
    device = add_logs_to_device(NodeDevice(0), read_device_logs(tmp_path, 0), NodeRun([0]))
    assert len(device.failures) == len(messages)
    assert all(message in failure for message, failure in zip(messages, device.failures, strict=True))


# -- without a command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "checked", "expected"), [(0, 5, (0, 0.5218)), (3, 10, (0.0667, 0.6525)), (5, 5, (0.4782, 1))]
)
def test_the_range_of_wrong_shares_is_that_of_clopper_and_pearson(wrong, checked, expected):
    """Compare with the results of binom.test in R."""
    assert compute_error_rate_interval(wrong, checked) == pytest.approx(expected, abs=1e-4)


class AnotherMatmul(SimulatedMatmul):
    name = "another"


def test_a_requested_problem_is_verified_repeatedly_until_the_budget_ends():
    device, kernels = SimulatedBackend(), [SimulatedMatmul(), AnotherMatmul()]
    plan = make_verify_plan(device, {each.name: each for each in kernels}, 12.0, ["bfloat16"], problem_number=7)
    start = device.now()
    rows = list(VerifyStrategy(setup_of(plan, kernels, device)).yield_results())
    assert 12 <= device.now() - start < 15
    assert {(row.regime, row.kernel): row.round_number for row in rows} == {
        (regime, kernel.name): 7 for regime in ("spaced", "loaded") for kernel in kernels
    }
    assert len({row.phase for row in rows}) == len(rows) > 8, "with equal phases, one row would replace another"
    assert count_verified_items(rows)["problems"] == 4


def test_a_problem_that_was_wrong_stays_wrong_when_its_run_is_resumed(run, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "physics", Physics(faulty_unit_index=0))
    options = ("--budget", "0.1s", "--regime", "spaced")
    assert run("verify", *PLAN, *options, "--number", "3", "--output", "log.jsonl")[0] == 3
    monkeypatch.setattr(SimulatedBackend, "physics", Physics())
    code, out, _ = run("verify", *DEVICE[:4], "--resume", "log.jsonl", "--budget", "0.1s")
    assert (code, "verify FAILED: 1 of 1 problem wrong" in out) == (3, True)
    assert not re.search("no verdict|without a verdict", out)


@pytest.mark.parametrize("kernel", [SimulatedMatmul(), make_kernel(make_operation("grouped"), "loop")])
def test_the_same_number_draws_the_same_problem(kernel):
    device = SimulatedBackend() if isinstance(kernel, SimulatedMatmul) else open_backend("cpu", 0)
    plan = make_verify_plan(device, {"a": kernel})
    problems = [draw_problem(device, plan, kernel, number, "spaced") for number in range(1, 30)]
    assert problems == [draw_problem(device, plan, kernel, number, "spaced") for number in range(1, 30)]
    assert len({problem.dtype for problem, _ in problems}) > 2
    for number, (problem, shape) in enumerate(problems, 1):
        # The command after "again:" names only this dtype, and must draw the same problem.
        one_dtype_plan = make_verify_plan(device, {"a": kernel}, dtypes=[problem.dtype])
        assert draw_problem(device, one_dtype_plan, kernel, number, "spaced") == (problem, shape)


@pytest.mark.parametrize("name", ["matmul", "batched", "grouped", "attention"])
def test_each_operation_draws_problems_within_the_bound(name):
    operation, generator, term_counts = make_operation(name), random.Random(1), range(1, 256**3 + 1)
    cases = [operation.draw_random_case(generator, term_counts) for _ in range(50)]
    assert all(case["shape"].flop <= 2 * 256**3 for case in cases)
    assert len({case["shape"] for case in cases}) > 40


@pytest.mark.parametrize("name", ["matmul", "batched"])
def test_some_random_shapes_are_deep_enough_to_be_divided_along_k(name):
    operation, generator, term_counts = make_operation(name), random.Random(1), range(1, 4096**3 + 1)
    shapes = [operation.draw_random_case(generator, term_counts)["shape"] for _ in range(400)]
    deep_ks = [shape.k for shape in shapes if shape.k >= 8192 and max(shape.m, shape.n) <= 512]
    assert 60 < len(deep_ks) < 140
    assert {12680, 16648, 20488, 24584} < set(deep_ks), "each K at which cuBLAS 13.1.0 omits terms"
    assert any(k > 32768 for k in deep_ks)


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ({(0, 3, 2)}, "1 wrong tile of 64x64: row 3 column 2 of matmul 0"),
        ({(0, row, column) for row in (2, 3) for column in (4, 5)}, "1 wrong tile of 128x128: row 1 column 2"),
        ({(0, 0, 0), (0, 0, 7), (0, 1, 6)}, "every 7th tile is wrong, counting along rows from tile 0"),
        ({(0, 0, 0), (0, 5, 0), (0, 2, 1)}, "every 5th tile is wrong, counting along columns from tile 0"),
    ],
)
def test_wrong_tiles_are_named_by_size_place_and_period(cells, text):
    assert text in describe_wrong_cells(WrongCells(frozenset(cells), 8 * CELL_SIZE, 8 * CELL_SIZE))


def test_the_help_of_resume_says_that_it_checks_other_problems(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "mamf checks other problems, and the time budget starts again" in text
    assert "measures only the missing rows" not in text
