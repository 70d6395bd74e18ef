"""Test how mamf measures the traits of a device that its backend does not know.

The simulated devices have known traits, which the measurements must find.
"""

import json
import re
from dataclasses import replace

import library
import pytest

from mamf.backend import MIB
from mamf.calibration import ASSUMED_TRAITS_REMARK, BurstTraits, SustainedTraits
from mamf.engine import traits
from mamf.engine.traits import measure_traits, replace_assumed_traits
from mamf.logs.recording import apply_logged_traits, make_traits_record
from mamf.testing import Physics, SimulatedBackend

ASSUMED_TRAITS = BurstTraits(remark=ASSUMED_TRAITS_REMARK), SustainedTraits(remark=ASSUMED_TRAITS_REMARK)
WAKING = Physics(waking_time_factor=3.0, waking_seconds=0.004)


@pytest.fixture(autouse=True)
def simulated_machine(monkeypatch):
    library.install(monkeypatch)
    monkeypatch.setattr(traits, "_TRAITS_BY_DEVICE", {})


def make_unknown_device(physics=None):
    """Return a simulated device whose backend knows neither its traits nor the size of its cache."""
    backend = SimulatedBackend(physics=physics)
    backend.burst_traits, backend.sustained_traits = ASSUMED_TRAITS
    backend.info = replace(backend.info, cache_bytes=None)
    return backend


def measure_planted_traits(**planted):
    """Measure the traits of a simulated device whose physics has the values in ``planted``."""
    return measure_traits(make_unknown_device(Physics(**planted)))


def join_findings(measured):
    return " | ".join(finding.finding for finding in measured.findings)


@pytest.mark.parametrize("seconds", [0.003, 0.02])
def test_a_wake_up_is_found(seconds):
    measured = measure_planted_traits(waking_time_factor=3.0, waking_seconds=seconds, launch_noise=0.01)
    assert seconds < measured.burst_traits.wake_seconds < seconds + 0.002
    assert re.search(r"after a rest, launches take (2\.9|3|3\.1) times as long", join_findings(measured))
    assert not measured.burst_traits.remark


@pytest.mark.parametrize("seconds", [0.01, 0.033, 0.1])
def test_a_controllers_reaction_is_found_and_bursts_end_before_it(seconds):
    measured = measure_planted_traits(power_averaging_seconds=seconds)
    # The load draws 840 W above idle, and the limit is 590 W above idle. The mean power reaches the limit after
    # log(840 / 250) = 1.21 time constants. A train of launches may take a quarter of this time.
    assert measured.burst_traits.train_seconds == pytest.approx(1.21 * seconds / 4, rel=0.2)
    assert measured.burst_traits.longest_rest_seconds < 1.0
    assert "launches take 18 % longer" in join_findings(measured)
    assert not (measured.burst_traits.remark or measured.sustained_traits.remark)


@pytest.mark.parametrize(
    ("planted", "remark"),
    [
        (
            {"waking_time_factor": 2.0, "waking_seconds": 0.07, "boost_watts": 600.0},
            "after a rest, launches take 2 times as long",
        ),
        ({"waking_time_factor": 2.0, "waking_seconds": 0.9, "boost_watts": 600.0}, "launches became 2 times as fast"),
    ],
)
def test_burst_says_that_it_cannot_be_trusted(planted, remark):
    assert remark in measure_planted_traits(**planted).burst_traits.remark


def test_a_controller_that_swings_about_its_mean_has_settled():
    measured = measure_planted_traits(clock_alternation_share=0.05)
    assert not measured.sustained_traits.remark
    assert SustainedTraits.settle_seconds < measured.sustained_traits.settle_seconds < 1.5


def test_a_device_that_goes_on_slowing_has_not_settled():
    assert "did not settle" in measure_planted_traits(hot_clock_loss_share=0.5).sustained_traits.remark


def test_only_assumed_traits_are_measured():
    known_device = SimulatedBackend()
    assert replace_assumed_traits(known_device) == ()
    assert known_device.now() == 0.0 and make_traits_record(known_device) == {}
    backend, messages = make_unknown_device(WAKING), []
    assert replace_assumed_traits(backend, messages.append)
    assert "Simulated H100" in messages[0]
    assert backend.burst_traits.wake_seconds and not replace_assumed_traits(backend)


def test_a_process_measures_a_device_once():
    first, second, messages = make_unknown_device(WAKING), make_unknown_device(WAKING), []
    assert replace_assumed_traits(first, messages.append) == replace_assumed_traits(second, messages.append)
    assert second.now() == 0.0 and len(messages) == 1
    assert second.burst_traits == first.burst_traits


def test_traits_that_cannot_be_measured_stay_assumed(monkeypatch):
    backend = make_unknown_device()
    monkeypatch.setattr(backend, "sleep", lambda seconds: 1 / 0)
    replace_assumed_traits(backend)
    for regime_traits in (backend.burst_traits, backend.sustained_traits):
        assert regime_traits.remark.startswith(
            "mamf uses default rest times between launches, because measuring them failed: ZeroDivisionError"
        )
    assert backend.burst_traits == replace(BurstTraits(), remark=backend.burst_traits.remark)


def test_a_log_gives_the_traits_back():
    measured, resumed = make_unknown_device(replace(WAKING, cache_bandwidth=9e12)), make_unknown_device()
    replace_assumed_traits(measured)
    apply_logged_traits(resumed, json.loads(json.dumps(make_traits_record(measured))))
    assert (resumed.burst_traits, resumed.sustained_traits) == (measured.burst_traits, measured.sustained_traits)
    assert resumed.info.cache_bytes == measured.info.cache_bytes == 48 * MIB


@pytest.fixture
def unknown_device(monkeypatch):
    """Make the simulated backend not know the traits of its devices, which are slow after a rest."""
    monkeypatch.setattr(SimulatedBackend, "burst_traits", ASSUMED_TRAITS[0])
    monkeypatch.setattr(SimulatedBackend, "sustained_traits", ASSUMED_TRAITS[1])
    monkeypatch.setattr(SimulatedBackend, "physics", WAKING)


COMMAND = ("sweep", "--shapes", "4096x4096x4096", "8192x8192x8192", "--output", "log.jsonl")


def read_records(run):
    return [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]


def test_a_run_measures_traits_and_a_resumed_run_uses_them(run, unknown_device, monkeypatch):
    code, _, err = run(*COMMAND, "--budget", "1s")
    assert code == 0 and "measuring for 8 s how the speed of Simulated H100 changes" in err
    header = read_records(run)[0]
    assert header["traits"]["burst"]["wake_seconds"] == pytest.approx(0.0045, rel=0.2)
    assert any("after a rest, launches take" in finding for finding in header["findings"])
    monkeypatch.setattr("mamf.engine.traits.replace_assumed_traits", None)
    code, out, err = run("sweep", "--resume", "log.jsonl")
    assert code == 0 and "measuring how" not in err
    assert "assumed" not in out


def test_a_wake_up_is_over_before_a_burst_is_timed(run, unknown_device, monkeypatch):
    run(*COMMAND)
    rates_with_wake_up = [row["tflops"]["median"] for row in read_records(run) if row["record"] == "measurement"]
    monkeypatch.setattr(SimulatedBackend, "physics", Physics())
    (run.folder / "log.jsonl").unlink()
    run(*COMMAND)
    rates = [row["tflops"]["median"] for row in read_records(run) if row["record"] == "measurement"]
    assert rates_with_wake_up == pytest.approx(rates, rel=0.01)


def test_a_row_says_that_its_traits_were_assumed(run, unknown_device, monkeypatch):
    monkeypatch.setattr("mamf.engine.traits.replace_assumed_traits", lambda backend, say: ())
    run(*COMMAND)
    remarks = [row["remarks"] for row in read_records(run) if row["record"] == "measurement"]
    assert remarks == [[ASSUMED_TRAITS_REMARK], [ASSUMED_TRAITS_REMARK]]


def test_a_device_that_is_slow_only_after_rests_gets_no_rests():
    measured = measure_planted_traits(boost_watts=600.0, waking_time_factor=2.0, waking_seconds=0.01)
    assert (measured.burst_traits.rest_ratio, measured.burst_traits.longest_rest_seconds) == (0.0, 0.0)
