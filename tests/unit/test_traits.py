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

UNKNOWN = BurstTraits(remark=ASSUMED_TRAITS_REMARK), SustainedTraits(remark=ASSUMED_TRAITS_REMARK)
WAKING = Physics(waking_time_factor=3.0, waking_seconds=0.004)


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    library.install(monkeypatch)
    monkeypatch.setattr(traits, "_TRAITS_BY_DEVICE", {})


def unknown(physics=None):
    """Return a simulated device whose backend knows neither its traits nor the size of its cache."""
    backend = SimulatedBackend(physics=physics)
    backend.burst_traits, backend.sustained_traits = UNKNOWN
    backend.info = replace(backend.info, cache_bytes=None)
    return backend


def found(**planted):
    """Measure the traits of a simulated device whose physics has the values in ``planted``."""
    return measure_traits(unknown(Physics(**planted)))


def texts(found):
    return " | ".join(finding.finding for finding in found.findings)


@pytest.mark.parametrize("seconds", [0.003, 0.02])
def test_a_wake_up_is_found(seconds):
    measured = found(waking_time_factor=3.0, waking_seconds=seconds, launch_noise=0.01)
    assert seconds < measured.burst_traits.wake_seconds < seconds + 0.002
    assert re.search(r"after a rest, launches take (2\.9|3|3\.1) times as long", texts(measured))
    assert not measured.burst_traits.remark


@pytest.mark.parametrize("seconds", [0.01, 0.033, 0.1])
def test_a_controllers_reaction_is_found_and_bursts_end_before_it(seconds):
    measured = found(power_averaging_seconds=seconds)
    # The load draws 840 W above idle, and the limit is 590 W above idle. The mean power reaches the limit after
    # log(840 / 250) = 1.21 time constants. A train of launches may take a quarter of this time.
    assert measured.burst_traits.train_seconds == pytest.approx(1.21 * seconds / 4, rel=0.2)
    assert measured.burst_traits.longest_rest_seconds < 1.0
    assert "launches take 18% longer" in texts(measured)
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
    assert remark in found(**planted).burst_traits.remark


def test_a_controller_that_swings_about_its_mean_has_settled():
    measured = found(clock_alternation_share=0.05)
    assert not measured.sustained_traits.remark
    assert SustainedTraits.settle_seconds < measured.sustained_traits.settle_seconds < 1.5


def test_a_device_that_goes_on_slowing_has_not_settled():
    assert "did not settle" in found(hot_clock_loss_share=0.5).sustained_traits.remark


def test_only_assumed_traits_are_measured():
    known = SimulatedBackend()
    assert replace_assumed_traits(known) == ()
    assert known.now() == 0.0 and make_traits_record(known) == {}
    backend, said = unknown(WAKING), []
    assert replace_assumed_traits(backend, said.append)
    assert "Simulated H100" in said[0]
    assert backend.burst_traits.wake_seconds and not replace_assumed_traits(backend)


def test_a_process_measures_a_device_once():
    first, again, said = unknown(WAKING), unknown(WAKING), []
    assert replace_assumed_traits(first, said.append) == replace_assumed_traits(again, said.append)
    assert again.now() == 0.0 and len(said) == 1
    assert again.burst_traits == first.burst_traits


def test_traits_that_cannot_be_measured_stay_assumed(monkeypatch):
    backend = unknown()
    monkeypatch.setattr(backend, "sleep", lambda seconds: 1 / 0)
    replace_assumed_traits(backend)
    for each in (backend.burst_traits, backend.sustained_traits):
        assert each.remark.startswith(
            "mamf uses default rest times between launches, because measuring them failed: ZeroDivisionError"
        )
    assert backend.burst_traits == replace(BurstTraits(), remark=backend.burst_traits.remark)


def test_a_log_gives_the_traits_back():
    measured, resumed = unknown(replace(WAKING, cache_bandwidth=9e12)), unknown()
    replace_assumed_traits(measured)
    apply_logged_traits(resumed, json.loads(json.dumps(make_traits_record(measured))))
    assert (resumed.burst_traits, resumed.sustained_traits) == (measured.burst_traits, measured.sustained_traits)
    assert resumed.info.cache_bytes == measured.info.cache_bytes == 48 * MIB


@pytest.fixture
def unknown_device(monkeypatch):
    """Make the simulated backend not know the traits of its devices, which are slow after a rest."""
    monkeypatch.setattr(SimulatedBackend, "burst_traits", UNKNOWN[0])
    monkeypatch.setattr(SimulatedBackend, "sustained_traits", UNKNOWN[1])
    monkeypatch.setattr(SimulatedBackend, "physics", WAKING)


COMMAND = ("sweep", "--shapes", "4096x4096x4096", "8192x8192x8192", "--output", "log.jsonl")


def records(run):
    return [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]


def test_a_run_measures_them_and_a_resumed_run_uses_the_same(run, unknown_device, monkeypatch):
    code, _out, err = run(*COMMAND, "--budget", "1s")
    assert code == 0 and "measuring for 8 s how the speed of Simulated H100 changes" in err
    header = records(run)[0]
    assert header["traits"]["burst"]["wake_seconds"] == pytest.approx(0.0045, rel=0.2)
    assert any("after a rest, launches take" in finding for finding in header["findings"])
    monkeypatch.setattr("mamf.engine.traits.replace_assumed_traits", None)
    code, out, err = run("sweep", "--resume", "log.jsonl")
    assert code == 0 and "measuring how" not in err
    assert "assumed" not in out


def test_a_wake_up_is_over_before_a_burst_is_timed(run, unknown_device, monkeypatch):
    run(*COMMAND)
    with_it = [row["tflops"]["median"] for row in records(run) if row["record"] == "measurement"]
    monkeypatch.setattr(SimulatedBackend, "physics", Physics())
    (run.folder / "log.jsonl").unlink()
    run(*COMMAND)
    assert with_it == pytest.approx(
        [row["tflops"]["median"] for row in records(run) if row["record"] == "measurement"], rel=0.01
    )


def test_a_row_says_that_its_regime_was_assumed(run, unknown_device, monkeypatch):
    monkeypatch.setattr("mamf.engine.traits.replace_assumed_traits", lambda backend, say: ())
    run(*COMMAND)
    remarks = [row["remarks"] for row in records(run) if row["record"] == "measurement"]
    assert remarks == [[ASSUMED_TRAITS_REMARK], [ASSUMED_TRAITS_REMARK]]


def test_a_device_that_no_load_slows_but_rests_do_is_not_rested():
    measured = found(boost_watts=600.0, waking_time_factor=2.0, waking_seconds=0.01)
    assert (measured.burst_traits.rest_ratio, measured.burst_traits.longest_rest_seconds) == (0.0, 0.0)
