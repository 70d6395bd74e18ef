"""Test ``mamf reproduce`` in virtual time: claims from logs and from texts, and verdicts on cards of known speed."""

import io
import json
import re
import signal
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from mamf.engine.regimes import ClassicRegime
from mamf.errors import RunLogError
from mamf.logs.judging import judge_claims, make_reproduce_options
from mamf.logs.run_log import read_run_log
from mamf.statistics import Interval
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

DEVICE = ["--backend", "mamf.testing:SimulatedBackend"]
SHAPE = "8192x8192x8192"

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch):
    """Provide a short warm-up for the classic regime, because simulating the usual 30 s takes seconds."""
    monkeypatch.setattr(ClassicRegime.__init__, "__defaults__", (50, 100, 0.5))


@pytest.fixture
def change_card(monkeypatch):
    """Return a function that changes properties of the simulated card."""

    def change(**properties):
        monkeypatch.setattr(SimulatedBackend, "physics", replace(Physics(), **properties))

    return change


@pytest.fixture
def sweep(run):
    """Return a function that sweeps matmuls and returns the name of the log."""

    def run_sweep(*options, name="sweep.jsonl", shapes=(SHAPE,)):
        assert (
            run("sweep", *DEVICE, "--kernel", "simulated.mm", "--shapes", *shapes, *options, "--output", name)[0] == 0
        )
        return name

    return run_sweep


def reproduce(run, *options):
    code, out, err = run("reproduce", *options, *DEVICE, "--output", "here.jsonl")
    return code, out, err


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_an_equal_card_reproduces_a_log_and_show_says_the_same(run, sweep):
    code, out, _ = reproduce(run, sweep())
    assert code == 0
    assert "\nreproduced: burst, bfloat16, 8192x8192x8192 by simulated.mm: 806.0 TFLOPS claimed, " in out
    verdicts = [line for line in run("show", "here.jsonl")[1].splitlines() if " claimed, " in line]
    assert verdicts and verdicts[0] in out
    plan = read_run_log("here.jsonl").plan
    assert (plan.kind, plan.options.source) == ("reproduce", "sweep.jsonl")
    assert plan.options.claims[0].step == read_run_log("sweep.jsonl").measurements[0].key


def test_a_page_shows_the_judged_rate_and_not_the_fastest_round(run, sweep):
    reproduce(run, sweep())
    assert run("report", "here.jsonl", "--output", "page.html")[0] == 0
    page = Path("page.html").read_text()
    assert "reproduced: burst, bfloat16, 8192x8192x8192 by simulated.mm" in page
    assert "best matmul" not in page and "<svg" not in page
    code, _, err = run("plot", "here.jsonl")
    assert (code, "which has no picture" in err) == (2, True)


@pytest.mark.parametrize(("share", "code", "verdict"), [(0.97, 3, "slower by more than 2 %"), (1.03, 0, "faster")])
def test_a_card_that_is_3_percent_off_is_found(run, sweep, change_card, share, code, verdict):
    sweep()
    change_card(boost_clock_hz=Physics.boost_clock_hz * share)
    exit_code, out, _ = reproduce(run, "sweep.jsonl")
    assert (exit_code, f"\n{verdict}: burst" in out) == (code, True)
    assert f"clock in burst 1980 MHz against {1980 * share:.0f} MHz" in out
    assert f"highest clock 1980 MHz against {1980 * share:.0f} MHz" in out


def test_a_claim_that_was_rounded_too_far_cannot_be_decided(run):
    code, out, _ = reproduce(run, "--claim", f"806 TFLOPS simulated.mm {SHAPE}", "--tolerance", "0.1%")
    assert (code, "\nundecided: burst" in out) == (0, True)
    assert "mamf uses its rounding error" in out
    assert "the claims name no device or software" in out


def test_a_claim_may_be_in_any_common_unit(run):
    for claim in ("806000 GFLOPS", "0.806 PFLOPS"):
        code, out, _ = reproduce(run, "--claim", f"{claim} simulated.mm {SHAPE}", "--tolerance", "1%")
        assert (code, "806.0 TFLOPS" in out or " 806.0 " in out) == (0, True)
        Path("here.jsonl").unlink()


def test_a_claim_of_a_missing_kernel_is_not_checked_with_a_kernel_of_similar_name(run, sweep):
    path = Path(sweep())
    path.write_text(path.read_text().replace('"kernel": "simulated.mm"', '"kernel": "simulated"'))
    code, _, err = reproduce(run, "sweep.jsonl")
    assert (code, "kernel simulated is not installed, so mamf leaves out its claims" in err) == (2, True)


def test_a_claim_whose_kernel_is_missing_ends_with_1(run):
    claims = (f"806 TFLOPS simulated.mm {SHAPE}", f"800 TFLOPS cublaslt {SHAPE}")
    code, out, err = reproduce(run, "--claim", *claims, "--tolerance", "1%")
    assert (code, "\nreproduced: burst" in out) == (1, True)
    assert "mamf leaves out the claims about kernel cublaslt" in err


def test_a_classic_log_is_reproduced_and_its_dry_run_counts_the_warm_up(run, sweep):
    log = sweep("--regime", "classic", "--num-iterations", "5")
    code, out, _ = reproduce(run, log, "--dry-run")
    assert (code, "time: about 31.0 s" in out) == (0, True)
    code, out, _ = reproduce(run, log)
    assert (code, "\nundecided: classic, bfloat16" in out) == (0, True), "classic scatters by more than the tolerance"


def test_another_device_is_named_first_and_in_the_verdict(run, sweep):
    path = Path(sweep())
    path.write_text(path.read_text().replace("Simulated H100", "Imagined H900"))
    code, out, _ = reproduce(run, "sweep.jsonl")
    assert code == 0
    assert "the claims were measured under other conditions: device Imagined H900 against Simulated H100" in out
    assert "\nreproduced, on another device: burst" in out


def test_another_card_with_a_slower_clock_reproduces_a_claim_if_it_uses_as_many_cycles(run, sweep, change_card):
    path = Path(sweep("--clock", "all"))
    text = path.read_text().replace("Simulated H100", "Simulated H200")
    path.write_text(text)
    change_card(boost_clock_hz=Physics.boost_clock_hz * 0.9)
    code, out, _ = reproduce(run, "sweep.jsonl")
    assert code == 0
    assert "\nreproduced, on another device: burst" in out
    assert re.search(r"7\d\d.\d TFLOPS here; (\d\d.\d) % of the units' cycles claimed, (\d\d.\d) % here: ", out)
    assert "here/claimed compares the shares of cycles that" in out
    change_card(boost_clock_hz=Physics.boost_clock_hz * 0.9, matmul_peak_share=Physics.matmul_peak_share * 0.9)
    code, out, _ = run("reproduce", "sweep.jsonl", *DEVICE, "--output", "wasteful.jsonl")
    assert (code, "\nslower by more than 2 %, on another device: burst" in out) == (3, True)
    assert out.splitlines()[-2] in run("show", "wasteful.jsonl")[1]


def test_a_kernel_that_fails_now_does_not_pass(run, sweep, monkeypatch):
    sweep()
    monkeypatch.setattr(SimulatedMatmul, "explain_unsupported_problem", lambda *_: "it was removed")
    code, out, _ = reproduce(run, "sweep.jsonl")
    assert (code, "\nnot measured: burst" in out, "unsupported: it was removed" in out) == (1, True, True)


# -- the rows that are claimed -----------------------------------------------------------------------------------------


def test_the_best_rows_of_each_regime_are_claimed(sweep):
    shapes = ["4096x4096x4096", SHAPE, "8192x4096x4096"]
    log = read_run_log(sweep("--regime", "burst", "sustained", shapes=shapes))
    best = make_reproduce_options(log)
    assert [(claim.step[0], str(claim.step[2])) for claim in best.claims] == [("burst", SHAPE), ("sustained", SHAPE)]
    assert best.chosen_from == 6, "the verdict must know that the claim is the best of six rows, which is partly luck"
    assert [len(make_reproduce_options(log, top).claims) for top in (2, None)] == [4, 6]


def test_the_ceilings_of_a_find_are_claimed(find_records, tmp_path):
    path = tmp_path / "find.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in find_records))
    log = read_run_log(path)
    options = make_reproduce_options(log)
    assert {claim.step[0]: claim.step[2] for claim in options.claims} == {
        regime: ceiling.shape for regime, ceiling in log.ceilings.items()
    }
    assert options.chosen_from == 1, "confirming rounds gave the ceilings, so luck played no part"


def test_the_best_of_many_rows_needs_a_larger_loss_to_be_called_slower(run, sweep, change_card):
    sweep()
    change_card(boost_clock_hz=Physics.boost_clock_hz * 0.988)
    reproduce(run, "sweep.jsonl")
    log = read_run_log("here.jsonl")
    verdicts = [
        judge_claims(replace(log.plan.options, chosen_from=number, tolerance=0.001), log.measurements)[0].verdict
        for number in (1, 1000)
    ]
    assert verdicts == ["slower", "undecided"]


def test_the_interval_of_a_printed_figure_includes_run_scatter_and_rounding(run):
    reproduce(run, "--claim", f"806 TFLOPS simulated.mm {SHAPE}", f"806.0 TFLOPS simulated.mm {SHAPE}")
    log = read_run_log("here.jsonl")
    coarse, fine = judge_claims(log.plan.options, log.measurements)
    assert (fine.claim.interval, coarse.claim.interval) == (Interval(805.95, 806.05, 1.0), Interval(805.5, 806.5, 1.0))
    assert fine.pair.a.error.own > fine.pair.b.error.own
    assert coarse.pair.interval.half_width > fine.pair.interval.half_width


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_ctrl_c_gives_the_best_so_far_and_resume_does_the_rest(run, sweep, on_launch):
    sweep("--regime", "burst", "sustained")
    on_launch(lambda launches: signal.raise_signal(signal.SIGINT) if launches == 3000 else None)
    code, out, _ = reproduce(run, "sweep.jsonl")
    assert code == 130
    samples_before = [row.samples for row in read_run_log("here.jsonl").measurements]
    assert "by the user" in out
    on_launch(None)
    code, out, _ = run("reproduce", "--resume", "here.jsonl", *DEVICE)
    assert (code, out.count("\nreproduced: ")) == (0, 2)
    assert [row.samples for row in read_run_log("here.jsonl").measurements][: len(samples_before)] == samples_before
    assert run("reproduce", "--resume", "here.jsonl", *DEVICE)[1].count("\nreproduced: ") == 2


def test_a_resumed_run_has_the_claims_and_the_tolerance_of_its_log(run, sweep):
    reproduce(run, sweep())
    code, _, err = run("reproduce", "--resume", "here.jsonl", "--tolerance", "1%", *DEVICE)
    assert (code, "contradicts here.jsonl" in err) == (2, True)
    for other in (["--claim", "1 TFLOPS simulated.mm 8x8x8"], ["sweep.jsonl"]):
        code, _, err = run("reproduce", "--resume", "here.jsonl", *other, *DEVICE)
        assert (code, "give exactly one of LOG, --claim and --resume" in err) == (2, True)


# -- bad claims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("simulated.mm 8x8x8", "is not a claim: write RATE TFLOPS KERNEL SHAPE FIELDS, such as 1613 TFLOPS"),
        ("0 TFLOPS simulated.mm 8x8x8", "is not a claim, because '0' is not a rate above 0"),
        ("fast TFLOPS simulated.mm 8x8x8", "is not a claim, because 'fast' is not a rate above 0"),
        ("1 TOPS simulated.mm 8x8x8", "unknown unit 'TOPS'"),
        ("1 GB/s simulated.mm 8x8x8", "must be in TFLOPS, the unit of matmul"),
        ("1 TFLOPS simulated.mm 8x8", "'8x8' is not a shape of any operation"),
        ("1 TFLOPS simulated.mm 8x8x8 burst sustained", "unknown field of matmul 'regime'"),
        ("1 TB/s simulated.mm 8x8x8", "must be in TFLOPS, the unit of matmul"),
        ("1 TFLOPS os:system 8x8x8", "add --kernel os:system if you trust it"),
        (f"1 TFLOPS simulated.mm 8x8x8 {'x' * 600}", "is not a claim"),
        ("1 TFLOPS \x1b[31m 8x8x8", "unknown kernel '\\x1b[31m'"),
    ],
)
def test_a_bad_claim_is_refused_in_one_line(run, claim, message):
    code, out, err = reproduce(run, "--claim", claim)
    assert (code, out) == (2, "")
    assert message in err
    assert "\x1b" not in err
    assert not Path("here.jsonl").exists()


def test_no_claim_and_two_sources_of_claims_are_refused(run, sweep):
    sweep()
    code, _, err = reproduce(run, "sweep.jsonl", "--top", "0")
    assert (code, "--top 0 checks no row" in err) == (2, True)
    for options in ([], ["sweep.jsonl", "--claim", "1 TFLOPS simulated.mm 8x8x8"]):
        code, _, err = reproduce(run, *options)
        assert (code, "give exactly one of LOG, --claim and --resume" in err) == (2, True)


def test_a_kernel_by_path_is_named_on_the_command_line(run):
    by_path = ["--kernel", "mamf.testing:SimulatedAttention"]
    shape = ["--shapes", "b4h16q2048k2048d128"]
    assert run("sweep", "--operation", "attention", *DEVICE, *by_path, *shape, "--output", "path.jsonl")[0] == 0
    assert reproduce(run, "path.jsonl")[0] == 2
    assert reproduce(run, "path.jsonl", *by_path)[0] == 0
    code, _, err = run("reproduce", "--resume", "here.jsonl", *DEVICE)
    assert (code, "if you trust its code, add --kernel mamf.testing:SimulatedAttention" in err) == (2, True)
    assert run("reproduce", "--resume", "here.jsonl", *DEVICE, *by_path)[0] == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"degrees": 8', '"degrees": 9223372036854775806'),
        ('"rate": 8', '"rate": -8'),
    ],
)
def test_a_log_with_an_impossible_number_is_refused_with_its_line(run, sweep, old, new):
    reproduce(run, sweep())
    text = Path("here.jsonl").read_text()
    assert old in text
    Path("here.jsonl").write_text(text.replace(old, new))
    with pytest.raises(RunLogError, match=r"here\.jsonl, line 1: "):
        read_run_log("here.jsonl")


def test_a_log_at_an_https_address_is_read_and_its_size_is_limited(run, sweep, monkeypatch):
    log_bytes = Path(sweep()).read_bytes()
    requests = []

    def open_address(address, timeout):
        requests.append((address, timeout))
        return io.BytesIO(log_bytes)

    monkeypatch.setattr(urllib.request, "urlopen", open_address)
    assert reproduce(run, "https://example.org/logs/sweep.jsonl?raw=1")[0] == 0
    assert requests == [("https://example.org/logs/sweep.jsonl?raw=1", 30.0)]
    assert read_run_log("here.jsonl").plan.options.source == "sweep.jsonl"
    monkeypatch.setattr("mamf.cli.reading.MAX_LOG_BYTES", 100)
    code, _, err = run("reproduce", "https://example.org/sweep.jsonl", *DEVICE)
    assert (code, "the maximum of a run log" in err) == (2, True)
    code, _, err = run("reproduce", "http://example.org/sweep.jsonl", *DEVICE)
    assert (code, "use an https:// address" in err) == (2, True)


def test_an_address_that_does_not_answer_is_one_line(run, monkeypatch):
    def refuse(address, timeout):
        raise urllib.error.URLError("refused")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    code, _, err = run("reproduce", "https://example.org/sweep.jsonl", *DEVICE)
    assert (code, err) == (2, "mamf: cannot read https://example.org/sweep.jsonl: <urlopen error refused>\n")


def test_a_claim_whose_interval_is_unknown_is_undecided(run, sweep):
    sweep()
    reproduce(run, "sweep.jsonl")
    log = read_run_log("here.jsonl")
    (claim, *_) = log.plan.options.claims
    doubled = replace(claim, rate=2 * claim.rate, interval=Interval(1e-3, 3 * claim.rate, 0.95))
    (verdict,) = judge_claims(replace(log.plan.options, claims=(doubled,)), log.measurements)
    assert (verdict.verdict, verdict.is_slower) == ("undecided", False)
