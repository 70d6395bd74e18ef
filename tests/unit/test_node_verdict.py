"""Whether a device is slow, wrong or gone: false alarms at the stated rate, made faults found."""

import math
import random
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamf.node.figures import BURST, COPY, READ, SUSTAINED, TO_DEVICE, TO_HOST, TO_PEER, Device, shown
from mamf.node.verdict import CRITICAL, FALSE_WARNINGS, OK, UNKNOWN, WARN, judged, lost

#: Of a healthy H200.
FIGURES = {BURST: 845.0, SUSTAINED: 698.0, COPY: 4.26, READ: 4.29, TO_DEVICE: 0.0555, TO_HOST: 0.0554}
VISITS = {BURST: 0.001, SUSTAINED: 0.005}


def healthy(chance, nodes=1, devices=8):
    """Cards 1.7 % apart in all that they do, and figures of a visit as far apart as they are measured to be."""
    found = []
    for rank in range(nodes * devices):
        card = chance.gauss(1.0, 0.017)
        figures = {name: value * card * chance.gauss(1.0, VISITS.get(name, 0.002)) for name, value in FIGURES.items()}
        found.append(Device(rank, rank // devices, rank % devices, "H200", f"uuid{rank}", figures=figures))
    return found


def spoilt(devices, rank, **factors):
    figures = {name: value * factors.get(name, 1.0) for name, value in devices[rank].figures.items()}
    return [replace(device, figures=figures) if device.rank == rank else device for device in devices]


def test_of_a_thousand_healthy_nodes_at_most_ten_are_warned_of():
    chance = random.Random(0)
    levels = [judged(healthy(chance)).level for _ in range(1000)]
    assert levels.count(OK) >= 990
    assert CRITICAL not in levels


def test_a_baseline_of_a_healthy_card_raises_no_more_alarms():
    chance = random.Random(1)
    levels = []
    for _ in range(1000):
        baseline = Baseline(healthy(chance)[0].figures, "a log")
        levels.append(judged(healthy(chance), {"H200": baseline}).level)
    assert levels.count(OK) >= 990


@pytest.mark.parametrize("seed", range(20))
def test_a_third_of_the_speed_is_critical_and_named(seed):
    devices = spoilt(healthy(random.Random(seed)), 5, burst=1 / 3, sustained=1 / 3)
    verdict = judged(devices)
    assert (verdict.level, verdict.exit_code) == (CRITICAL, 2)
    assert verdict.reason.startswith("CRITICAL: device 5 (uuid uuid5): ")
    assert {finding.rank for finding in verdict.findings} == {5}


@pytest.mark.parametrize("seed", range(20))
def test_ten_percent_slow_only_when_sustained_is_found(seed):
    verdict = judged(spoilt(healthy(random.Random(seed)), 2, sustained=0.9))
    assert verdict.level in (WARN, CRITICAL)
    assert "sustained" in verdict.findings[0].text
    assert {finding.rank for finding in verdict.findings} == {2}


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_tenth_of_the_time_throttled_is_found_and_the_power_limit_is_none(share):
    devices = healthy(random.Random(3))
    devices[1] = replace(devices[1], throttled={"power cap": 1.0, "hardware thermal slowdown": 0.09})
    assert judged(devices).level == OK
    devices[6] = replace(devices[6], throttled={"power cap": 1.0, "hardware thermal slowdown": share})
    verdict = judged(devices)
    assert verdict.level == WARN
    assert f"throttled {share:.0%} of the time by hardware thermal slowdown" in verdict.reason


def test_a_failure_is_critical_whatever_the_figures():
    devices = healthy(random.Random(4))
    devices[3] = replace(devices[3], failures=("5 of 5000 launches gave another output than the first",))
    verdict = judged(devices)
    assert verdict.level == CRITICAL
    assert verdict.reason == "CRITICAL: device 3 (uuid uuid3): 5 of 5000 launches gave another output than the first"


def test_all_devices_slow_alike_are_found_by_the_baseline_alone():
    devices = healthy(random.Random(5))
    for rank in range(8):
        devices = spoilt(devices, rank, burst=0.5, sustained=0.5)
    assert judged(devices).level == OK
    verdict = judged(devices, {"H200": Baseline(FIGURES, "results/x.jsonl")})
    assert verdict.level == CRITICAL
    assert "below results/x.jsonl" in verdict.reason
    assert verdict.reason.endswith("; and 7 more devices")


def test_one_device_without_a_baseline_is_unknown_and_with_one_is_judged():
    devices = healthy(random.Random(6), devices=1)
    assert (judged(devices).level, judged(devices).exit_code) == (UNKNOWN, 3)
    assert judged(devices, {"H200": Baseline(FIGURES, "a log")}).level == OK


def test_of_two_devices_the_slower_one_is_blamed():
    verdict = judged(spoilt(healthy(random.Random(7), devices=2), 1, burst=0.6, sustained=0.6))
    assert {finding.rank for finding in verdict.findings} == {1}


def test_devices_of_another_model_are_no_peers():
    devices = healthy(random.Random(8))
    half = {name: value / 2 for name, value in FIGURES.items()}
    others = [Device(8 + each, 1, each, "H100 PCIe", figures=half) for each in range(2)]
    assert judged([*devices, *others]).level == OK


def test_what_was_not_measured_is_unknown_but_never_hides_what_is_worse():
    devices = healthy(random.Random(9))
    devices[0] = replace(devices[0], lacks=("no sustained ceiling: the budget ended",))
    assert judged(devices).level == UNKNOWN
    assert judged(spoilt(devices, 1, burst=0.3)).level == CRITICAL
    assert judged([]).level == UNKNOWN


def test_among_64_nodes_of_8_the_slow_devices_are_named():
    devices = healthy(random.Random(10), nodes=64)
    assert judged(devices).level == OK
    for rank in (100, 333):
        devices = spoilt(devices, rank, burst=0.85, sustained=0.85)
    verdict = judged(devices)
    assert {finding.rank for finding in verdict.findings} == {100, 333}
    assert "node 12 device 4" in " ".join(finding.text for finding in verdict.findings)


def test_64_healthy_nodes_raise_no_more_alarms_than_one():
    chance = random.Random(11)
    assert [judged(healthy(chance, nodes=64)).level for _ in range(10)].count(OK) == 10


def test_a_synchronous_job_loses_what_the_slowest_lacks_to_the_mean():
    devices = [Device(rank, 0, rank, figures={SUSTAINED: value}) for rank, value in enumerate([700.0, 700.0, 640.0])]
    assert lost(devices) == pytest.approx(1 - 640 / 680)


def test_a_figure_that_nobody_knows_well_blames_nobody():
    devices = spoilt(healthy(random.Random(14)), 3, burst=0.8)
    assert judged(devices).level == CRITICAL
    unsure = [replace(device, half_widths={BURST: 0.5}) for device in devices]
    found = judged(unsure)
    assert found.level == WARN
    assert all("is known to +-50% only: something else runs on it" in finding.text for finding in found.findings)


def test_a_card_that_something_else_runs_on_is_named():
    """As seen on two H200, one of them loaded by another process: 726 against 846 TFLOPS, known to 412 %."""
    devices = spoilt(healthy(random.Random(11), devices=2), 1, burst=0.86)
    loaded = [replace(device, half_widths={BURST: 4.12 if device.rank == 1 else 0.003}) for device in devices]
    found = judged(loaded)
    assert found.level == WARN
    assert [finding.rank for finding in found.findings] == [1]


@pytest.mark.parametrize("figure", [TO_DEVICE, TO_HOST])
def test_devices_that_hold_each_other_back_on_the_way_to_the_host_are_healthy(figure):
    """As seen on four H200 whose copies of the same moment scattered by a fifth."""
    devices = healthy(random.Random(17), devices=4)
    scattered = [replace(device, half_widths={**device.half_widths, figure: 0.2}) for device in devices]
    assert judged(scattered).level == OK
    slow = judged(spoilt(scattered, 2, **{figure: 0.25}))
    assert [finding.rank for finding in slow.findings] == [2]


def test_a_limit_is_what_the_rate_says():
    chance, spread = random.Random(12), 0.02
    most = limit(0.05, 1, spread)
    assert sum(chance.gauss(0, spread) > most for _ in range(20_000)) / 20_000 == pytest.approx(0.05, abs=0.005)


def test_the_median_of_the_others_is_known_to_scatter_itself():
    devices = [Device(rank, 0, rank, "H200", figures={BURST: 845.0}) for rank in range(4)]
    most = limit(FALSE_WARNINGS, 4, math.hypot(0.017, 0.001) * math.sqrt(1 + math.pi / 2 / 3))
    assert judged(spoilt(devices, 2, burst=1 - most + 0.001)).level == OK
    assert judged(spoilt(devices, 2, burst=1 - most - 0.001)).level == WARN


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 1e3), min_size=2, max_size=9))
def test_the_median_of_the_others_leaves_one_out(values):
    expected = [median(values[:each] + values[each + 1 :]) for each in range(len(values))]
    assert others_medians(values) == pytest.approx(expected)


def test_a_device_survives_the_way_from_rank_to_rank():
    device = replace(healthy(random.Random(13))[0], failures=("a",), throttled={"power cap": 0.5})
    assert Device.from_record(device.record()) == device


@pytest.mark.parametrize(
    ("figure", "value", "told"),
    [
        *((BURST, 845.0, "845 TFLOPS"), (SUSTAINED, 698.0, "698 TFLOPS"), (COPY, 4.26, "4.26 TB/s")),
        *((READ, 4.29, "4.29 TB/s"), (TO_DEVICE, 0.0555, "55.5 GB/s"), (TO_HOST, 0.0554, "55.4 GB/s")),
        (TO_PEER, 0.3914, "391.4 GB/s"),
    ],
)
def test_a_figure_is_shown_in_its_unit(figure, value, told):
    assert shown(figure, value) == told
