"""Whether a device is slow, wrong or gone: false alarms at the stated rate, made faults found."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamf.logs.run_log import read_run_log
from mamf.node.comparing import EXPECTED, Baseline, Spread, others_medians, own_spread
from mamf.node.figures import BURST, COPY, READ, SUSTAINED, TO_DEVICE, TO_HOST, TO_PEER, Device, shown
from mamf.node.gathering import Run, with_figures
from mamf.node.report import render_node
from mamf.node.verdict import CRITICAL, FALSE_WARNINGS, OK, UNKNOWN, WARN, judged, lost

#: Of a healthy H200.
FIGURES = {BURST: 845.0, SUSTAINED: 698.0, COPY: 4.26, READ: 4.29, TO_DEVICE: 0.0555, TO_HOST: 0.0554, TO_PEER: 0.39}
APART = {COPY: 0.003, READ: 0.003, TO_PEER: 0.003, TO_DEVICE: 0.05, TO_HOST: 0.05}
REPEATS = {BURST: 0.003, SUSTAINED: 0.0035}
RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"


def healthy(chance, nodes=1, devices=8, burst=0.012, sustained=0.010):
    """Cards as far apart as 18 H200 are, burst and sustained with their correlation."""
    found = []
    for rank in range(nodes * devices):
        own, other = chance.gauss(0, 1), chance.gauss(0, 1)
        factors = {name: chance.gauss(1, spread) for name, spread in APART.items()}
        factors |= {BURST: 1 + burst * own, SUSTAINED: 1 + sustained * (0.83 * own + 0.558 * other)}
        figures = {name: value * factors[name] for name, value in FIGURES.items()}
        found.append(Device(rank, rank // devices, rank % devices, "H200", f"uuid{rank}", figures=figures))
    return found


def wide(spread, chance, devices=8):
    """Cards that are faster or slower in all that they do."""
    found = []
    for rank in range(devices):
        card = chance.gauss(1, spread)
        figures = {name: value * card * chance.gauss(1, 0.002) for name, value in FIGURES.items()}
        found.append(Device(rank, 0, rank, "H200", f"uuid{rank}", figures=figures))
    return found


def again(chance, devices):
    """Another run of the same cards."""
    return [
        replace(
            each,
            figures={name: rate * chance.gauss(1, REPEATS.get(name, 0.002)) for name, rate in each.figures.items()},
        )
        for each in devices
    ]


def spoilt(devices, rank, **factors):
    figures = {name: value * factors.get(name, 1.0) for name, value in devices[rank].figures.items()}
    return [replace(device, figures=figures) if device.rank == rank else device for device in devices]


def named(verdict):
    return {finding.rank for finding in verdict.findings}


def improbable(rate, count):
    """The number of hits that so many trials exceed in one case of a thousand."""
    left, hits = 1.0, -1
    while left > 1e-3:
        hits += 1
        left -= math.comb(count, hits) * rate**hits * (1 - rate) ** (count - hits)
    return hits


@pytest.mark.parametrize(("devices", "count"), [(2, 150), (4, 150), (8, 200), (16, 60)])
def test_healthy_nodes_are_warned_of_at_the_stated_rate(devices, count):
    chance = random.Random(0)
    levels = [judged(healthy(chance, devices=devices)).level for _ in range(count)]
    assert count - levels.count(OK) <= improbable(FALSE_WARNINGS, count)
    assert CRITICAL not in levels


def test_a_baseline_of_a_healthy_card_raises_no_more_alarms():
    chance, count = random.Random(1), 100
    levels = []
    for _ in range(count):
        baseline = Baseline(healthy(chance)[0].figures, "a log")
        levels.append(judged(healthy(chance), {"H200": baseline}).level)
    assert count - levels.count(OK) <= improbable(FALSE_WARNINGS, count)


@pytest.mark.parametrize("slow", [{BURST: 0.94, SUSTAINED: 0.94}, {COPY: 0.97, READ: 0.97}])
def test_six_percent_in_products_and_three_in_memory_are_found(slow):
    chance, count, promised = random.Random(2), 120, 0.95 if BURST in slow else 0.99
    missed = sum(0 not in named(judged(spoilt(healthy(chance), 0, **slow))) for _ in range(count))
    assert missed <= improbable(1 - promised, count)


@pytest.mark.parametrize("spread", [0.02, 0.03, 0.04])
def test_cards_farther_apart_than_expected_raise_no_more_alarms_and_it_is_said(spread):
    chance, count = random.Random(3), 100
    verdicts = [judged(wide(spread, chance)) for _ in range(count)]
    assert sum(each.level != OK for each in verdicts) <= improbable(FALSE_WARNINGS, count)
    assert sum(bool(each.notes) for each in verdicts) >= 0.9 * count


def test_products_alone_farther_apart_than_expected_raise_the_alarms_that_the_docs_say():
    chance, count = random.Random(20), 100
    for spread in (0.02, 0.04):
        levels = [judged(healthy(chance, burst=spread, sustained=spread)).level for _ in range(count)]
        assert count - levels.count(OK) <= improbable(0.12, count)


def test_what_could_go_unnoticed_among_cards_far_apart_is_printed_and_more_is_found():
    chance, found = random.Random(4), []
    for _ in range(60):
        devices = wide(0.03, chance)
        (note,) = judged(devices).notes or ("",)
        told = re.fullmatch(
            r"H200: the cards lie .*burst \d\.\d% \(expected 1\.2%\).*; "
            r"a card up to (\d+)% slow in burst and sustained could go unnoticed",
            note,
        )
        if told:
            middle = {name: median(each.figures[name] for each in devices) for name in FIGURES}
            slow = replace(devices[0], figures=middle)
            factor = 1 - int(told[1]) / 100
            found.append(0 in named(judged(spoilt([slow, *devices[1:]], 0, burst=factor, sustained=factor))))
    assert len(found) > 20
    assert fmean(found) > 0.9


def test_slow_cards_do_not_widen_the_limits_that_they_are_held_to():
    chance, found = random.Random(19), []
    for _ in range(50):
        devices = healthy(chance)
        for slow in ({1}, {1, 6}):
            devices = spoilt(devices, max(slow), burst=0.88, sustained=0.88)
            verdict = judged(devices)
            found.append(named(verdict) == slow and not verdict.notes)
    assert found.count(False) <= improbable(0.05, len(found))


def test_the_spread_of_drawn_cards_is_estimated_without_bias_whatever_the_slowest_does():
    chance = random.Random(5)
    for count in (3, 4, 8, 16):
        drawn = [[math.exp(chance.gauss(0, 0.02)) for _ in range(count)] for _ in range(600)]
        assert fmean(own_spread(values).value for values in drawn) == pytest.approx(0.02, rel=0.08)
    values = sorted(drawn[0])
    assert own_spread([values[0] / 2, *values[1:]]) == own_spread(values)
    assert own_spread(values[:2]) is None


def test_a_device_is_held_to_its_own_earlier_run_if_the_baseline_has_it():
    chance, counts = random.Random(6), {0.0: 0, 0.02: 0}
    for _ in range(60):
        before = healthy(chance)
        baseline = {"H200": Baseline({}, "a log", cards=again(chance, before))}
        for slower in counts:
            factor = 1 - slower
            verdict = judged(spoilt(again(chance, before), 3, burst=factor, sustained=factor), baseline)
            counts[slower] += 3 in named(verdict)
    assert counts[0.0] <= 1
    assert 60 - counts[0.02] <= improbable(0.05, 60)
    (device,) = spoilt(before[:1], 0, burst=0.98, sustained=0.98)
    verdict = judged([device], {"H200": Baseline({}, "a log", cards=before)})
    assert verdict.level == WARN
    assert "2.0% below the same card in a log" in verdict.reason
    stranger = replace(device, uuid_hash="another")
    assert judged([stranger], {"H200": Baseline({}, "a log", cards=before)}).level == OK


def test_a_device_that_is_not_in_a_baseline_is_held_to_the_median_of_its_cards():
    cards = [
        Device(0, 0, 0, "H200", f"known{each}", figures={BURST: rate}) for each, rate in enumerate((800, 845, 850))
    ]
    device = Device(0, 0, 0, "H200", "new", figures={BURST: 700.0})
    assert f"{1 - 700 / 845:.1%} below a log" in judged([device], {"H200": Baseline({}, "a log", cards=cards)}).reason


def test_the_fastest_card_of_many_is_no_typical_one():
    device = Device(0, 0, 0, "H200", figures={BURST: 845.0 * 0.945})
    baseline = Baseline({BURST: 845.0}, "the fastest")
    assert judged([device], {"H200": baseline}).level == WARN
    assert judged([device], {"H200": replace(baseline, is_fastest=True)}).level == OK


@pytest.mark.parametrize("stamp", ["20261122-094417", "20261122-101153", "20261122-101216"])
def test_four_cards_of_a_recorded_node_are_ok(stamp):
    logs = [read_run_log(path) for path in sorted(RESULTS.glob(f"find-bfloat16-burst-sustained-{stamp}*.jsonl"))]
    devices = [with_figures(Device(rank, 0, rank), "find", log) for rank, log in enumerate(logs)]
    assert len(devices) == 4
    assert judged(devices).level == OK
    assert judged(devices, {devices[0].name: Baseline({}, "a log", cards=devices[1:])}).level == OK


@pytest.mark.parametrize("seed", range(20))
def test_a_third_of_the_speed_is_critical_and_named(seed):
    devices = spoilt(healthy(random.Random(seed)), 5, burst=1 / 3, sustained=1 / 3)
    verdict = judged(devices)
    assert (verdict.level, verdict.exit_code) == (CRITICAL, 2)
    assert verdict.reason.startswith("CRITICAL: device 5 (uuid uuid5): ")
    assert named(verdict) == {5}


@pytest.mark.parametrize("seed", range(20))
def test_ten_percent_slow_only_when_sustained_is_found(seed):
    verdict = judged(spoilt(healthy(random.Random(seed)), 2, sustained=0.9))
    assert verdict.level in (WARN, CRITICAL)
    assert "sustained" in verdict.findings[0].text
    assert named(verdict) == {2}


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
    assert named(verdict) == {1}


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
    assert named(verdict) == {100, 333}
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


@pytest.mark.parametrize("degrees", [0, 3])
def test_a_limit_is_what_the_rate_says(degrees):
    chance, count = random.Random(12), 20_000
    most = Spread(1.0, degrees).quantile(0.05)

    def drawn():
        scale = math.sqrt(fmean(chance.gauss(0, 1) ** 2 for _ in range(degrees))) if degrees else 1.0
        return chance.gauss(0, 1) / scale

    assert sum(drawn() > most for _ in range(count)) / count == pytest.approx(0.05, abs=0.005)


def test_the_median_of_the_others_is_known_to_scatter_itself():
    devices = [Device(rank, 0, rank, "H200", figures={BURST: 845.0}) for rank in range(4)]
    most = Spread(1.0).quantile(FALSE_WARNINGS / 4) * EXPECTED[BURST] * math.sqrt(1 + math.pi / 2 / 3)
    assert judged(spoilt(devices, 2, burst=1 - most + 0.001)).level == OK
    assert judged(spoilt(devices, 2, burst=1 - most - 0.001)).level == WARN


def test_what_is_slow_in_burst_and_sustained_is_found_though_neither_would_be():
    devices = [Device(rank, 0, rank, "H200", figures=FIGURES) for rank in range(8)]
    for slow in ({BURST: 0.958}, {SUSTAINED: 0.958}):
        assert judged(spoilt(devices, 3, **slow)).level == OK
    (finding,) = judged(spoilt(devices, 3, burst=0.958, sustained=0.958)).findings
    assert finding.text.startswith("device 3: burst and sustained, 4.2% below the median of 7 others")


def test_what_too_few_cards_to_tell_their_spread_say_is_critical_only_if_it_is_far_slower():
    for count, level in ((2, WARN), (4, CRITICAL)):
        devices = [Device(rank, 0, rank, "H200", figures=FIGURES) for rank in range(count)]
        assert judged(spoilt(devices, 1, burst=0.85, sustained=0.85)).level == level
        assert judged(spoilt(devices, 1, burst=0.6, sustained=0.6)).level == CRITICAL


def test_cards_far_apart_are_mentioned_in_what_is_printed():
    devices = wide(0.04, random.Random(3))
    verdict = judged(devices)
    (note,) = verdict.notes
    assert note in render_node("table", Run(8), devices, verdict)
    assert json.loads(render_node("json", Run(8), devices, verdict))["notes"] == [note]


def test_a_card_that_is_slow_under_load_alone_is_found_among_cards_far_apart():
    devices = spoilt(wide(0.03, random.Random(18)), 4, sustained=0.9)
    assert named(judged(devices)) == {4}


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
        *((BURST, 845.0, "845.0 TFLOPS"), (SUSTAINED, 698.0, "698.0 TFLOPS"), (COPY, 4.26, "4.260 TB/s")),
        *((READ, 4.29, "4.290 TB/s"), (TO_DEVICE, 0.0555, "55.50 GB/s"), (TO_HOST, 0.0554, "55.40 GB/s")),
        (TO_PEER, 0.3914, "391.4 GB/s"),
    ],
)
def test_a_figure_is_shown_in_its_unit(figure, value, told):
    assert shown(figure, value) == told
