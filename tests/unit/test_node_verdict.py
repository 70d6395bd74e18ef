"""Test the verdict on a node: its limits, how often they are right on random nodes, and other findings."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from mamf.logs.run_log import read_run_log
from mamf.node.logs import add_figures_of_log, read_baseline
from mamf.node.verdict import (
    BURST,
    COPY,
    CRITICAL,
    OK,
    READ,
    SUSTAINED,
    TO_DEVICE,
    TO_HOST,
    TO_PEER,
    UNKNOWN,
    WARN,
    Baseline,
    NodeDevice,
    judge_devices,
)

#: The figures of a healthy H200, and the relative standard deviations of some of them among healthy cards.
FIGURES = {BURST: 845.0, SUSTAINED: 698.0, COPY: 4.26, READ: 4.29, TO_DEVICE: 0.0555, TO_HOST: 0.0554, TO_PEER: 0.39}
SPREADS = {COPY: 0.003, READ: 0.003, TO_PEER: 0.003, TO_DEVICE: 0.05, TO_HOST: 0.05}
RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"


def draw_healthy_cards(generator, count, spread):
    """Return random healthy cards. Their burst and sustained rates have a correlation of 0.83, as those of H200 do."""
    cards = []
    for index in range(count):
        card_deviation, independent_deviation = generator.gauss(0, 1), generator.gauss(0, 1)
        factors = {name: generator.gauss(1, deviation) for name, deviation in SPREADS.items()}
        factors |= {
            BURST: 1 + spread * card_deviation,
            SUSTAINED: 1 + spread * (0.83 * card_deviation + 0.558 * independent_deviation),
        }
        figures = {name: value * factors[name] for name, value in FIGURES.items()}
        cards.append(NodeDevice(index, 0, "H200", f"uuid{index}", figures=figures))
    return cards


def make_equal_devices(count):
    return [NodeDevice(index, 0, "H200", f"uuid{index}", figures=FIGURES) for index in range(count)]


def slow_down(devices, index, **factors):
    figures = {name: value * factors.get(name, 1.0) for name, value in devices[index].figures.items()}
    return [*devices[:index], replace(devices[index], figures=figures), *devices[index + 1 :]]


def collect_labels(verdict):
    return {finding.label for finding in verdict.findings}


def measure_verdict_shares(card_count, spread, loss, node_count=500):
    """Return the shares of random nodes with any finding, a CRITICAL finding, and a finding about the slow device."""
    generator, verdicts = random.Random(card_count), []
    for _ in range(node_count):
        verdicts.append(
            judge_devices(
                slow_down(draw_healthy_cards(generator, card_count, spread), 0, burst=1 - loss, sustained=1 - loss)
            )
        )
    return [
        sum(test(verdict) for verdict in verdicts) / node_count
        for test in (
            lambda judged: judged.level != OK,
            lambda judged: judged.level == CRITICAL,
            lambda judged: "device 0" in collect_labels(judged),
        )
    ]


@pytest.mark.parametrize("card_count", [4, 8])
def test_false_alarms_are_rare_and_slow_devices_are_found(card_count):
    alarms, critical, _ = measure_verdict_shares(card_count, 0.012, 0.0, 1000)
    assert alarms <= 0.016  # 1 %, plus two standard errors of 1000 nodes
    assert critical == 0.0
    assert measure_verdict_shares(card_count, 0.012, 0.06)[2] >= 0.9
    for spread in (0.012, 0.02, 0.025):
        assert measure_verdict_shares(card_count, spread, 0.1)[2] >= 0.98 - 0.0125  # two standard errors of 500 nodes
    assert measure_verdict_shares(card_count, 0.03, 0.0)[1] <= 0.035, (
        "cards that differ this much must rarely be CRITICAL"
    )


@pytest.mark.parametrize(
    ("factors", "figure"),
    [
        ({BURST: 0.959, SUSTAINED: 0.959}, "burst and sustained"),
        ({BURST: 0.949}, "burst"),
        ({SUSTAINED: 0.949}, "sustained"),
        ({COPY: 0.979}, "copy"),
        ({READ: 0.979}, "read"),
        ({TO_PEER: 0.949}, "to_peer"),
        ({TO_HOST: 0.599}, "to_host"),
        ({TO_DEVICE: 0.599}, "to_device"),
    ],
)
def test_each_limit_is_a_share_of_the_median_of_the_others(factors, figure):
    (finding,) = judge_devices(slow_down(make_equal_devices(4), 2, **factors)).findings
    assert (finding.level, finding.label) == (WARN, "device 2")
    assert finding.text.startswith(f"device 2 (uuid uuid2): {figure}")
    assert f"{100 * (1 - min(factors.values())):.1f} % below the median of 3 others (limit " in finding.text
    within = {name: factor + 0.002 for name, factor in factors.items()}
    assert judge_devices(slow_down(make_equal_devices(4), 2, **within)).level == OK
    faster = {name: 2 - factor for name, factor in factors.items()}
    assert judge_devices(slow_down(make_equal_devices(4), 2, **faster)).level == OK


def test_two_slow_devices_of_eight_do_not_hide_each_other():
    devices = slow_down(slow_down(make_equal_devices(8), 1, burst=0.85, sustained=0.85), 6, burst=0.88, sustained=0.88)
    verdict = judge_devices(devices)
    assert (verdict.level, collect_labels(verdict)) == (CRITICAL, {"device 1", "device 6"})
    assert verdict.reason.endswith("; and 1 more device")


def test_devices_that_differ_by_more_than_expected_are_never_critical_and_their_spread_is_printed():
    devices = make_equal_devices(6)
    for index, factor in enumerate((1.02, 1.0, 0.98, 1.02, 0.98)):
        devices = slow_down(devices, index, burst=factor, sustained=factor)
    verdict = judge_devices(slow_down(devices, 5, burst=0.7, sustained=0.7))
    assert (verdict.level, collect_labels(verdict)) == (WARN, {"device 5"})
    assert verdict.reason.endswith("(limit 4.0 %); the other devices differ by 2.0 % (standard deviation)")


def test_of_two_devices_the_slower_one_is_named_but_not_critical():
    verdict = judge_devices(slow_down(make_equal_devices(2), 1, burst=0.6, sustained=0.6))
    assert (verdict.level, collect_labels(verdict)) == (WARN, {"device 1"})
    assert verdict.reason.endswith("; there are too few other devices to tell how much healthy ones differ")


def test_a_device_is_compared_with_its_own_earlier_run_at_half_the_limit():
    baseline = Baseline("a log", make_equal_devices(4))
    devices = slow_down(make_equal_devices(4), 3, burst=0.979, sustained=0.979)
    assert judge_devices(devices).level == OK
    verdict = judge_devices(devices, baseline)
    assert (verdict.level, collect_labels(verdict)) == (WARN, {"device 3"})
    assert "2.1 % below the same card in a log (limit 2.0 %)" in verdict.reason
    assert judge_devices(slow_down(make_equal_devices(4), 3, burst=0.95, sustained=0.95), baseline).level == CRITICAL
    other_card = replace(devices[3], uuid_hash="another")
    assert judge_devices([other_card], baseline).level == OK


@pytest.mark.parametrize("changes", [{"name": "another card"}, {"dtype": "float16"}])
def test_a_baseline_of_another_model_or_dtype_is_not_used(changes):
    devices = [replace(device, dtype="bfloat16") for device in make_equal_devices(2)]
    baseline = Baseline("the baseline x", [replace(devices[0], **changes, figures={BURST: 1e6})])
    assert judge_devices(devices, baseline).level == OK
    verdict = judge_devices(devices, baseline, must_match_baseline=True)
    assert (verdict.level, verdict.reason) == (UNKNOWN, "UNKNOWN: the baseline x has no figures for H200 in bfloat16")


def test_devices_that_are_all_slow_are_found_by_the_baseline_only():
    devices = make_equal_devices(8)
    for index in range(8):
        devices = slow_down(devices, index, burst=0.5, sustained=0.5)
    assert judge_devices(devices).level == OK
    verdict = judge_devices(devices, Baseline("results/x.jsonl", [replace(make_equal_devices(1)[0], uuid_hash=None)]))
    assert verdict.level == CRITICAL
    assert "below results/x.jsonl" in verdict.reason and verdict.reason.endswith("; and 7 more devices")


@pytest.mark.parametrize("stamp", ["20261122-094417", "20261122-101153", "20261122-101216"])
def test_four_cards_of_a_recorded_node_are_ok(stamp):
    paths = sorted(RESULTS.glob(f"find-bfloat16-burst-sustained-{stamp}*.jsonl"))
    devices = [add_figures_of_log(NodeDevice(index), "find", read_run_log(path)) for index, path in enumerate(paths)]
    assert len(devices) == 4
    assert judge_devices(devices, read_baseline(paths[1:]), must_match_baseline=True).level == OK


def test_one_device_without_a_baseline_is_unknown():
    assert (judge_devices(make_equal_devices(1)).level, judge_devices(make_equal_devices(1)).exit_code) == (UNKNOWN, 3)
    assert judge_devices(make_equal_devices(1), Baseline("a log", make_equal_devices(1))).level == OK
    assert judge_devices([]).level == UNKNOWN


def test_a_failure_is_critical_and_is_reported_instead_of_lesser_findings():
    devices = make_equal_devices(8)
    devices[0] = replace(devices[0], lacks=("no sustained ceiling: the budget ended",))
    assert judge_devices(devices).level == UNKNOWN
    devices[3] = replace(devices[3], figures={}, failures=("wrong results in verify: 1 of 8 launches gave other bits",))
    verdict = judge_devices(devices)
    assert verdict.level == CRITICAL
    assert verdict.reason.startswith(
        "CRITICAL: device 3 (uuid uuid3): wrong results in verify: 1 of 8 launches gave other bits"
    )


def test_devices_of_another_model_are_not_compared():
    half_figures = {name: value / 2 for name, value in FIGURES.items()}
    assert (
        judge_devices(
            [*make_equal_devices(8), *(NodeDevice(index, 1, "H100 PCIe", figures=half_figures) for index in range(2))]
        ).level
        == OK
    )


def test_a_figure_that_is_too_noisy_is_a_warning_and_is_not_compared():
    """Check a noisy figure. On two H200, one card reached 846 TFLOPS, and one that another process used 726 +-412 %."""
    devices = slow_down(make_equal_devices(3), 1, burst=0.6)
    noisy = [replace(device, half_widths={BURST: 4.12 if device.index == 1 else 0.003}) for device in devices]
    (finding,) = judge_devices(noisy).findings
    assert (finding.level, finding.label) == (WARN, "device 1")
    assert (
        "too noisy to compare" in finding.text
        and "burst" in finding.text
        and "with an unknown interval" in finding.text
    )


def test_noisy_figures_of_a_device_are_one_finding():
    noisy = [
        replace(device, half_widths={BURST: 0.2, SUSTAINED: 0.3} if device.index == 1 else {})
        for device in make_equal_devices(3)
    ]
    (finding,) = judge_devices(noisy).findings
    assert "+-20 %" in finding.text and "+-30 %" in finding.text
