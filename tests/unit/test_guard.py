"""Test ``mamf guard``: its file, when it measures a row again, how it judges rows, and how often it is wrong."""

import csv
import io
import json
import re
import shutil
import signal
import statistics
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import rates
from contribution_logs import found
from refusals import assert_refused

from mamf.calibration import BurstTraits
from mamf.ceilings.ceiling import CONFIRM_PHASE
from mamf.cli import main
from mamf.cli.commands.guard import read_guard_file
from mamf.errors import UsageError
from mamf.kinds.registry import make_log_chart
from mamf.logs.compare import Comparison, RowPair
from mamf.logs.compared_rows import combine_measurements, group_by_key
from mamf.logs.judging import GuardResult, JudgedRow, judge_pair, needs_repetition
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Measurement
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.report.comparison import describe_guard_verdict
from mamf.statistics import Repeatability, summarize_samples
from mamf.testing import Physics, SimulatedAttention, SimulatedBackend
from mamf.testing.simulated import TimeVariation

DEVICE = ["--backend", "mamf.testing:SimulatedBackend"]
FILE = """
operation = "attention"
kernels = ["mamf.testing:SimulatedAttention"]
shapes = ["b4h16q2048k2048d128", "b4h16q4096k4096d128"]
baseline = "baseline.jsonl"

[problem]
direction = ["fwd", "bwd"]
"""
#: A device with launch times that vary between visits and between runs. The deviations were chosen for these tests.
#: They are similar to those of real cards in repeatability.csv, but not equal.
RESTLESS = replace(
    Physics(), boost_variation=TimeVariation(0.0008, 0.0008), capped_variation=TimeVariation(0.0025, 0.0040)
)
SHAPE = AttentionShape(1, 8, 8, 512, 512, 64, 64)
#: The repeatability of the rows that ``make_visit`` returns. It is about that of RESTLESS in burst: the deviations
#: between visits and between runs together are sqrt(2) * 0.0008.
VISIT_REPEATABILITY = Repeatability(0.0011)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """Return a folder with FILE and the baseline that ``mamf guard --update`` measured for it."""
    folder = tmp_path_factory.mktemp("baseline")
    (folder / "guard.toml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedBackend, "physics", RESTLESS)
        patch.chdir(folder)
        assert main(["guard", "guard.toml", *DEVICE, "--update", "--output", "first.jsonl"]) == 0
    return folder


@pytest.fixture
def guard(run, baseline, monkeypatch):
    """Return a function that runs ``mamf guard`` with FILE, in a folder that contains a measured baseline."""
    monkeypatch.setattr(SimulatedBackend, "physics", RESTLESS)
    shutil.copytree(baseline, run.folder, dirs_exist_ok=True)

    def command(*options):
        return run("guard", "guard.toml", *DEVICE, *options)

    command.folder = run.folder
    return command


def slow_down_kernel(monkeypatch, share=0.03):
    monkeypatch.setattr(SimulatedAttention, "peak_share", SimulatedAttention.peak_share * (1 - share))


# -- complete runs in virtual time -------------------------------------------------------------------------------------


def test_a_dry_run_counts_the_repetitions(guard):
    (guard.folder / "guard.toml").write_text(f'time_limit = "0.7s"\n{FILE}')
    code, out, _ = guard("--update", "--dry-run")
    visit_count = len(read_run_log(guard.folder / "first.jsonl").measurements)
    assert (code, visit_count) == (0, 4 * (1 + 9))
    assert float(re.search(r"time: at most ([\d.]+) s", out)[1]) == pytest.approx(0.7 * visit_count)


def test_an_unchanged_kernel_passes(guard):
    code, out, _ = guard("--junit", "guard.xml", "--output", "again.jsonl")
    assert code == 0
    assert "\nguard PASSED: 0 of 4 rows slower by more than 2 %\n" in out
    assert re.findall(r"  (ok|SAME|UNDECIDED)\n", out) == ["ok"] * 4
    suite = ElementTree.parse(guard.folder / "guard.xml").getroot()
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "0", "errors": "0", "skipped": "0",
    }  # fmt: skip


def test_a_slower_kernel_fails_once_fresh_visits_confirm_it(guard, monkeypatch):
    slow_down_kernel(monkeypatch, share=0.05)
    code, out, _ = guard("--junit", "guard.xml", "--markdown", "guard.md", "--output", "slower.jsonl")
    assert code == 3
    assert "guard FAILED: 4 of 4 rows slower by more than 2 %, confirmed by new measurements" in out
    suite = ElementTree.parse(guard.folder / "guard.xml").getroot()
    failures = suite.findall("testcase/failure")
    assert (suite.get("tests"), suite.get("failures"), len(failures)) == ("4", "4", 4)
    assert all("-4.9" in failure.get("message") or "-5." in failure.get("message") for failure in failures)
    assert (guard.folder / "guard.md").read_text().splitlines()[-1].startswith("- guard FAILED: 4 of 4 rows")
    confirming_rows = [
        row for row in read_run_log(guard.folder / "slower.jsonl").measurements if row.phase == CONFIRM_PHASE
    ]
    assert len(confirming_rows) >= 3 * 4


def test_a_kernel_that_gives_wrong_results_fails(guard, monkeypatch):
    faults = {AttentionShape.parse("b4h16q2048k2048d128"): "wrong_result"}
    original_init = SimulatedBackend.__init__

    def init_with_faults(self, *arguments, **keywords):
        original_init(self, *arguments, **keywords)
        self.faults = faults

    monkeypatch.setattr(SimulatedBackend, "__init__", init_with_faults)
    code, out, _ = guard("--junit", "guard.xml")
    assert (code, "guard FAILED: 2 of 4 rows without a rate in this run" in out) == (3, True)
    errors = ElementTree.parse(guard.folder / "guard.xml").findall("testcase/error")
    assert [error.get("message").partition(":")[0] for error in errors] == ["wrong_result"] * 2


def test_an_update_that_the_budget_ends_writes_no_baseline_and_exits_with_1(guard):
    before = (guard.folder / "baseline.jsonl").read_bytes()
    code, _, err = guard("--update", "--budget", "1s")
    assert (code, "no baseline was written: the run is not complete" in err) == (1, True)
    assert (guard.folder / "baseline.jsonl").read_bytes() == before


def test_a_guard_that_the_budget_ended_does_not_pass_and_is_resumed(guard, monkeypatch):
    slow_down_kernel(monkeypatch)
    code, out, _ = guard("--budget", "1.5s", "--output", "cut.jsonl")
    assert (code, "not finished: the budget ended" in out) == (1, True)
    samples_before = [row.samples for row in read_run_log(guard.folder / "cut.jsonl").measurements]
    assert guard("--resume", "cut.jsonl")[0] == 3
    rows = read_run_log(guard.folder / "cut.jsonl").measurements
    assert [row.samples for row in rows][: len(samples_before)] == samples_before, (
        "the resumed run must not replace or repeat earlier rows"
    )
    assert len({(row.shape, row.problem, row.phase, row.round_number) for row in rows}) == len(rows)


def test_any_log_of_the_operation_can_be_a_baseline(guard, run, monkeypatch):
    kernel = ["--kernel", "mamf.testing:SimulatedAttention", "--shapes", "b4h16q2048k2048d128", "b4h16q4096k4096d128"]
    run("sweep", "--operation", "attention", *DEVICE, *kernel, "--set", "direction=fwd,bwd", "--output", "sweep.jsonl")
    (guard.folder / "guard.toml").write_text(FILE.replace('baseline = "baseline.jsonl"\n', ""))
    assert guard("--baseline", "sweep.jsonl")[0] == 0
    slow_down_kernel(monkeypatch)
    assert guard("--baseline", "sweep.jsonl")[0] == 3


def test_ctrl_c_leaves_a_log_and_no_new_baseline(guard, on_launch):
    def interrupt(launches):
        if launches == 500:
            signal.raise_signal(signal.SIGINT)

    before = (guard.folder / "baseline.jsonl").read_bytes()
    on_launch(interrupt)
    assert guard("--update", "--output", "cut.jsonl")[0] == 130
    assert read_run_log(guard.folder / "cut.jsonl").tier == "interrupted"
    assert (guard.folder / "baseline.jsonl").read_bytes() == before


def test_guard_logs_are_shown_drawn_and_checked(guard, run):
    assert "simulated-attention" in run("show", "baseline.jsonl")[1]
    assert make_log_chart(read_run_log("baseline.jsonl")).grid
    assert found(Path("baseline.jsonl")) <= {"simulated", "missing-field", "implausible", "changed-code"}
    code, _, err = run("sweep", "--operation", "attention", "--resume", "baseline.jsonl")
    assert (code, "resume it with 'mamf guard FILE.toml --resume baseline.jsonl'" in err) == (2, True)


# -- the guard file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('kernel = ["eager"]', "unknown key 'kernel' (did you mean 'kernels'?)"),
        pytest.param(f"problem = {'[' * 50_000}", "are nested too deeply", id="deep"),
        ("rounds = 2", "rounds must be at least 3, not 2"),
        ('regimes = ["bursts"]', "unknown regime 'bursts' (did you mean 'burst'?)"),
        ("problem = 3", "field problem: expected `object`, got `int`"),
        ("nonsense", "Expected '=' after a key"),
    ],
)
def test_an_invalid_file_is_refused_in_a_line(tmp_path, line, message):
    path = tmp_path / "guard.toml"
    path.write_text(f"{line}\n{FILE.partition('[problem]')[0]}")
    with pytest.raises(UsageError) as error:
        read_guard_file(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[problem]", "[problem]\nseqlen = 3"), "unknown field of attention 'seqlen'"),
        (("baseline.jsonl", "none.jsonl"), "there is no baseline none.jsonl: measure one with"),
        (("b4h16q2048k2048d128", "b1h16q512k512d64"), "has none of the rows"),
        (('baseline = "baseline.jsonl"\n', ""), "guard.toml names no baseline: add the key baseline to it"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(guard, change, message):
    text = FILE.replace(*change)
    if "rows" in message:
        text = text.replace(', "b4h16q4096k4096d128"', "")
    (guard.folder / "guard.toml").write_text(text)
    assert_refused(guard(), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--update", "--junit", "guard.xml"], "--update cannot be combined with --junit"),
        (["--junit", "nowhere/guard.xml"], "cannot write nowhere/guard.xml: there is no folder nowhere"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_is_measured(guard, options, message):
    assert_refused(guard(*options), message)


def test_a_baseline_of_another_card_is_refused(guard):
    path = guard.folder / "baseline.jsonl"
    path.write_text(path.read_text().replace("Simulated H100", "Simulated H200"))
    code, _, err = guard("--output", "new.jsonl")
    assert (code, "is not comparable with this run: device Simulated H200 against Simulated H100" in err) == (2, True)
    assert not (guard.folder / "new.jsonl").exists()


def test_a_baseline_in_cycles_is_valid_for_another_card(guard, run, monkeypatch):
    """Check that the guard passes on a card with a 10 % lower clock, and fails if the kernel itself is 10 % slower.

    A lower clock does not change the number of cycles that a kernel needs.
    """
    path = guard.folder / "guard.toml"
    path.write_text(f'by = "cycles"\ntolerance = 0.05\n{FILE}')
    baseline = guard.folder / "baseline.jsonl"
    baseline.write_text(baseline.read_text().replace("Simulated H100", "Simulated H200"))
    slower_physics = replace(RESTLESS, boost_clock_hz=0.9 * RESTLESS.boost_clock_hz)
    monkeypatch.setattr(SimulatedBackend, "physics", slower_physics)
    code, out, _ = guard()
    assert code == 0 and "cycles in percent" in out
    monkeypatch.setattr(SimulatedAttention, "peak_share", 0.9 * SimulatedAttention.peak_share)
    assert guard("--output", "wasteful.jsonl")[0] == 3


# -- when a row is measured again --------------------------------------------------------------------------------------


def make_visit(seconds=1.0, phase="", status="ok", round_number=1):
    samples = tuple(seconds * (1 + 0.0005 * position) for position in (-2, -1, -1, 0, 0, 1, 1, 2))
    return Measurement(
        SHAPE, "eager", AttentionProblem(), "burst", "median", status, samples=samples, phase=phase,
        round_number=round_number, summary=summarize_samples(samples) if status == "ok" else None,
        repeatability=VISIT_REPEATABILITY,
    )  # fmt: skip


def make_confirming_visits(*seconds):
    return [make_visit(each, CONFIRM_PHASE, round_number=number) for number, each in enumerate(seconds, start=1)]


BASELINE = combine_measurements(make_confirming_visits(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("visits", "is_repeated"),
    [
        ([make_visit(1.0)], False),
        ([make_visit(1.012)], True),  # a loss of half the tolerance is enough to measure again
        ([make_visit(0.8)], False),
        # More visits may narrow the interval enough.
        ([replace(make_visit(1.0), repeatability=Repeatability(0.073))], True),
        ([make_visit(1.05), *make_confirming_visits(1.0)], True),  # too few confirming visits
        ([make_visit(1.05), *make_confirming_visits(1.0, 1.0, 1.0)], False),
        ([make_visit(1.05), *make_confirming_visits(1.05, 1.05, 1.05)], False),
        ([make_visit(1.05), *make_confirming_visits(1.02, 1.02, 1.02)], True),  # the interval contains the tolerance
        ([make_visit(status="failed")], True),
        ([make_visit(status="failed"), make_visit(phase=CONFIRM_PHASE, status="failed")], False),
        ([make_visit(status="wrong_result")], False),
    ],
)
def test_a_row_is_repeated_until_confirming_visits_decide(visits, is_repeated):
    assert needs_repetition(BASELINE, visits, 0.02) == is_repeated


def test_the_visit_that_raised_a_doubt_does_not_confirm_it():
    now = combine_measurements([make_visit(1.3), *make_confirming_visits(1.0, 1.0, 1.0)])
    assert (now.repetition_count, now.rate) == (3, pytest.approx(BASELINE.rate))
    assert judge_pair(RowPair({}, BASELINE, now), 0.02) == "ok"
    assert judge_pair(RowPair({}, BASELINE, combine_measurements([make_visit(1.3)])), 0.02) == "undecided"
    assert (
        judge_pair(
            RowPair({}, BASELINE, combine_measurements([make_visit(1.3), *make_confirming_visits(1.3, 1.3, 1.3)])), 0.02
        )
        == "regression"
    )


def make_guard_result(*outcomes, is_cpu_busy=False):
    log = RunLog(Path("a.jsonl"), {})
    comparison = Comparison(log, log, ("a.jsonl", "a.jsonl"), (), (), ())
    pair = RowPair({}, BASELINE, replace(BASELINE, was_cpu_device_busy=is_cpu_busy))
    rows = (JudgedRow(BASELINE, outcome, None if outcome == "new" else pair) for outcome in outcomes)
    return GuardResult(comparison, tuple(rows), 0.02, "")


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["ok", "ok"], "guard PASSED: 0 of 2 rows slower by more than 2 %"),
        (
            ["ok", "undecided"],
            "guard UNDECIDED: 1 of 2 rows undecided, because samples scatter too much or are too few",
        ),
        (["ok", "new"], "guard PASSED: 0 of 1 row slower by more than 2 %; 1 of 2 rows not in the baseline"),
        (["new"], "guard UNDECIDED: no row was compared with the baseline"),
        ([], "guard UNDECIDED: no row was compared with the baseline"),
    ],
)
def test_a_guard_passes_only_what_it_compared(outcomes, verdict):
    result = make_guard_result(*outcomes)
    assert describe_guard_verdict(result) == verdict
    assert result.is_finished == verdict.startswith("guard PASSED")


def test_a_guard_on_a_busy_cpu_names_the_other_work():
    verdict = describe_guard_verdict(make_guard_result("ok", "undecided", is_cpu_busy=True))
    assert verdict == "guard UNDECIDED: 1 of 2 rows undecided, because other work used the CPU"


NOISY_TRAITS = replace(BurstTraits(), repeatability=Repeatability(0.073))


def test_rows_that_scatter_too_much_are_undecided_and_skipped(guard, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "burst_traits", NOISY_TRAITS)
    code, out, _ = guard("--junit", "guard.xml")
    assert (code, "\nguard UNDECIDED: " in out) == (1, True)
    suite = ElementTree.parse(guard.folder / "guard.xml").getroot()
    assert (suite.get("skipped"), suite.get("failures"), len(suite.findall("testcase/skipped"))) == ("4", "0", 4)
    assert guard("--strict")[0] == 3


def test_a_noisy_row_that_passes_has_no_remark_that_it_is_undecided(guard, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "burst_traits", NOISY_TRAITS)
    (guard.folder / "guard.toml").write_text(f"tolerance = 0.27\n{FILE}")
    assert guard("--update")[0] == 0
    code, out, _ = guard()
    assert (code, "guard PASSED: 0 of 4 rows" in out) == (0, True)
    assert "decide" not in out


def test_a_baseline_that_scatters_more_than_the_tolerance_is_refused(guard, monkeypatch):
    before = (guard.folder / "baseline.jsonl").read_bytes()
    monkeypatch.setattr(SimulatedBackend, "burst_traits", NOISY_TRAITS)
    code, _, err = guard("--update")
    assert code == 1
    (line,) = [line for line in err.splitlines() if "no baseline was written" in line]
    assert "4 of 4 rows vary by more than the tolerance of 2 %, most of all" in line
    assert (guard.folder / "baseline.jsonl").read_bytes() == before


def test_a_baseline_whose_interval_is_unknown_is_refused_with_any_tolerance(guard, monkeypatch):
    before = (guard.folder / "baseline.jsonl").read_bytes()
    (guard.folder / "guard.toml").write_text(f"tolerance = 0.27\n{FILE}")
    # This repeatability is below the tolerance, but the intervals that follow from it exceed 50 %.
    unknown = replace(NOISY_TRAITS, repeatability=Repeatability(0.2))
    monkeypatch.setattr(SimulatedBackend, "burst_traits", unknown)
    code, _, err = guard("--update")
    assert code == 1
    (line,) = [line for line in err.splitlines() if "no baseline was written: the rounds of " in line]
    assert "so much that the interval of their combined rate is unknown; measure while nothing else runs" in line
    assert (guard.folder / "baseline.jsonl").read_bytes() == before


def test_a_baseline_of_a_cpu_that_other_work_used_is_refused(guard, monkeypatch):
    before = (guard.folder / "baseline.jsonl").read_bytes()
    monkeypatch.setattr("mamf.machine.environment.was_cpu_device_busy", lambda header: True)
    code, _, err = guard("--update")
    assert (code, "no baseline was written: other work used the CPU: repeat the command while" in err) == (1, True)
    assert (guard.folder / "baseline.jsonl").read_bytes() == before


def test_a_run_without_a_rate_does_not_replace_the_baseline(guard, monkeypatch):
    before = (guard.folder / "baseline.jsonl").read_bytes()
    monkeypatch.setattr(SimulatedAttention, "prepare", lambda *arguments, **keywords: 1 / 0)
    code, _, err = guard("--update")
    assert (code, "no baseline was written: no row has a rate" in err) == (1, True)
    assert (guard.folder / "baseline.jsonl").read_bytes() == before


def test_the_table_and_the_picture_of_an_update_show_the_median_round(guard):
    out = guard("--update", "--output", "rounds.jsonl", "--format", "csv")[1]
    table_rates = [float(row["rate_tflops"]) for row in csv.DictReader(io.StringIO(out))]
    rounds_by_key = group_by_key(row for row in read_run_log(guard.folder / "rounds.jsonl").all_rows if row.phase)
    assert sorted(table_rates) == sorted(
        statistics.median_low(row.best_rate for row in rounds) for rounds in rounds_by_key.values()
    )
    chart = make_log_chart(read_run_log(guard.folder / "rounds.jsonl"))
    chart_rates = [point.y for panel in chart.panels for point in panel.points]
    assert sorted(chart_rates) == pytest.approx(sorted(table_rates))


def test_a_wrong_round_is_shown_even_if_other_rounds_are_right(guard, run):
    assert guard("--update", "--output", "rounds.jsonl")[0] == 0
    lines = [json.loads(line) for line in (guard.folder / "rounds.jsonl").read_text().splitlines()]
    wrong_round = next(record for record in lines if record.get("phase") == CONFIRM_PHASE)
    wrong_round |= {"status": "wrong_result", "reason": "0.5 off"}
    (guard.folder / "rounds.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in lines))
    assert "wrong_result: 0.5 off" in run("show", "rounds.jsonl")[1]


def test_an_update_says_what_it_stored(guard):
    code, out, _ = guard("--update", "--baseline", "new/baseline.jsonl")  # its folder does not exist yet
    assert code == 0 and (guard.folder / "new" / "baseline.jsonl").exists()
    (line,) = [line for line in out.splitlines() if line.startswith("baseline: ")]
    assert line.startswith(
        "baseline: new/baseline.jsonl has 4 rows: each rate combines up to 9 rounds (the table shows"
    )


@pytest.mark.parametrize("exit_code", [0, None, 7])
def test_a_guard_of_a_kernel_that_exits_does_not_pass(guard, on_launch, exit_code):
    def exit_process(launches):
        raise SystemExit(exit_code)

    on_launch(exit_process)
    code, out, err = guard("--output", "new.jsonl")
    assert (code, "PASSED" in out + err) == (3, False)
    rows = read_run_log(guard.folder / "new.jsonl").measurements
    assert {(row.status, row.reason) for row in rows} == {("failed", f"SystemExit: {exit_code}")}


# -- error rates: tools/rates.py draws ten thousand guards of each kind, and docs/guard.md has the results -------------


def test_the_guard_is_silent_on_unchanged_kernels_and_sees_a_slower_one():
    for card in ("burst", "sustained"):
        assert rates.count_false_alarms(card, 10)[0] == 0
        assert rates.count_caught_regressions(card, 10) == 10


def test_the_guard_file_in_the_docs_is_valid(tmp_path):
    docs = Path(__file__).resolve().parents[2] / "docs" / "guard.md"
    (tmp_path / "guard.toml").write_text(docs.read_text().partition("```toml\n")[2].partition("```")[0])
    file = read_guard_file(tmp_path / "guard.toml")
    assert (file["tolerance"], file["rounds"], file["regime"]) == (0.02, 9, ("burst",))
    assert file["set"] == ["direction=fwd,bwd"]


def test_sustained_visits_start_after_a_rest(guard):
    """Check that the device rests between visits: under continuous load, a power controller stays in one state."""
    text = FILE.partition("[problem]")[0].replace("b4h16q2048k2048", "b16h16q16384k16384")
    text = text.replace("b4h16q4096k4096", "b16h16q8192k8192")
    (guard.folder / "guard.toml").write_text(f'{text}regimes = ["sustained"]\nrounds = 3\n')
    rest_seconds = []
    original_sleep = SimulatedBackend.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SimulatedBackend,
            "sleep",
            lambda self, seconds: rest_seconds.append(seconds) or original_sleep(self, seconds),
        )
        assert guard("--update", "--output", "new.jsonl")[0] == 0
    assert rest_seconds.count(SimulatedBackend.sustained_traits.rest_seconds) == 2 * 3
