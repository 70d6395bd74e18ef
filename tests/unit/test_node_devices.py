"""What each device of a node does, in virtual time, and what its logs alone tell of it."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import simulated_node
from simulated_node import Node

from mamf.backend import Reading
from mamf.cli import main
from mamf.engine.measure import conditions
from mamf.errors import LogMismatchError, RunLogError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.measurement import Conditions
from mamf.node import children
from mamf.node.baselines import baseline_of, contributed_baselines
from mamf.node.children import Children
from mamf.node.device import DeviceRun
from mamf.node.figures import BURST, SUSTAINED, UNITS, Device, Place
from mamf.node.gathering import ALONE, TOGETHER, Run, device_of, devices_of
from mamf.node.report import node_chart
from mamf.node.verdict import CRITICAL, OK, UNKNOWN, judged
from mamf.operations import unknown
from mamf.statistics import summarize
from mamf.testing import Physics

#: Healthy cards, a little apart; then the made faults, each on its own device.
HEALTHY = [{"efficiency": 0.795 * factor} for factor in (1.0, 0.99, 1.01)]
FAULTY = {
    "a third of the speed": ({"efficiency": 0.265, "bandwidth": 1e12}, CRITICAL, BURST),
    "slow only when sustained": ({"capped_hz": 1690e6 * 0.9}, CRITICAL, SUSTAINED),
    "throttled half of the time": ({"throttled": 0.5}, CRITICAL, "by hardware thermal slowdown"),
    "wrong every thousandth launch": ({"wrong_every": 1000}, CRITICAL, "5 of 5000 equal launches gave different bits"),
}


@pytest.fixture(scope="module", autouse=True)
def installed():
    with pytest.MonkeyPatch.context() as patch:
        simulated_node.install(patch)
        unknown._installed.cache_clear()
        yield
    unknown._installed.cache_clear()


def measured(folder, rank, physics, together=True, ranks=4):
    backend = type("Made", (Node,), {"physics": Physics(**physics)})(rank % 4)
    run = DeviceRun(backend, Place(rank, 0, rank), folder, ranks, find_seconds=60.0)
    run.alone()
    if together:
        run.together()
    return run


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The logs of healthy devices."""
    folder = tmp_path_factory.mktemp("healthy")
    for rank, physics in enumerate(HEALTHY):
        measured(folder, rank, physics)
    return folder


def test_healthy_devices_are_ok_and_each_part_has_its_log(healthy):
    run, devices = devices_of([healthy])
    verdict = judged(devices)
    assert verdict.level == OK, verdict
    assert len(devices) == run.ranks == len(HEALTHY)
    for device in devices:
        assert {BURST, SUSTAINED, "copy", "read", "to_device", "to_host", "to_peer"} <= set(device.figures)
        assert device.collectives["all_reduce 1GiB"] == pytest.approx(0.4, rel=0.05)
        assert device.conditions.clock_hz == pytest.approx(Physics().capped_hz, rel=0.01), "of sustained, not of burst"
        logs = [Place(device.rank, 0, device.index).log(healthy, part) for part in (*ALONE, *TOGETHER)]
        assert all(read_run_log(log).tier == "complete" for log in logs)


@pytest.mark.parametrize("order", [1, -1])
def test_the_fastest_kernel_and_the_regime_that_is_throttled_most_count_whichever_came_last(healthy, order):
    place = Place(0, 0, 0)
    log = read_run_log(place.log(healthy, "bandwidth"))
    fast = replace(log.measurements[0], conditions=Conditions(throttle_shares={"thermal": 0.1}))
    slow = replace(fast, kernel="slow", regime="sustained", summary=summarize([2 * each for each in fast.samples]))
    slow = replace(slow, conditions=Conditions(throttle_shares={"thermal": 0.6}))
    found = device_of(place, {"bandwidth": replace(log, measurements=[fast, slow][::order])}, Run())
    assert found.figures == {fast.problem.pattern: fast.best_rate}
    assert found.throttled == {"thermal": 0.6}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_made_fault_is_found_and_blamed_on_its_device(healthy, tmp_path, fault):
    physics, level, told = FAULTY[fault]
    measured(tmp_path, 3, physics, together=False)
    _, devices = devices_of([healthy, tmp_path])
    devices[-1] = replace(devices[-1], lacks=())  # it took no part in what is measured together
    verdict = judged(devices)
    assert verdict.level == level, verdict
    assert {finding.rank for finding in verdict.findings} == {3}
    assert any(told in finding.text for finding in verdict.findings)


def test_a_part_that_was_broken_off_is_gone_on_with(healthy, tmp_path):
    whole = {part: Place(0, 0, 0).log(healthy, part) for part in ALONE}
    for part in ("find", "bandwidth"):
        lines = whole[part].read_bytes().splitlines(keepends=True)
        (tmp_path / whole[part].name).write_bytes(b"".join(lines[: len(lines) // 2]))
    (before,) = devices_of([tmp_path])[1]
    told = "it was gone or killed while find was measured"
    assert (before.failures, told in before.lacks) == ((), True), "nobody says that it was the device"
    Run(1, is_over=True).write(tmp_path)
    (before,) = devices_of([tmp_path])[1]
    assert told in before.failures
    (tmp_path / "run.json").unlink()
    held = len(read_run_log(tmp_path / whole["find"].name).measurements)
    measured(tmp_path, 0, HEALTHY[0], together=False, ranks=1)
    (after,) = devices_of([tmp_path])[1]
    assert (after.failures, after.lacks) == ((), ())
    log = read_run_log(tmp_path / whole["find"].name)
    assert len(log.measurements) > held
    assert log.tier == "complete"


def spoilt(log, folder, spoil):
    """A copy of a log whose rows that ``spoil`` says are out of memory."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for record in lines:
        if record["record"] == "measurement" and spoil(record):
            record |= {"status": "out_of_memory", "reason": "2 GiB are free", "samples_seconds": []}
    (folder / log.name).write_text("".join(json.dumps(record) + "\n" for record in lines))


@pytest.mark.parametrize(
    ("part", "spoil", "told"),
    [
        ("bandwidth", lambda row: row["problem"]["pattern"] == "copy", "copy: out of memory, 2 GiB are free"),
        ("collective", lambda row: row["problem"]["collective"] == "all_to_all", "all_to_all 1GiB: out of memory"),
    ],
)
def test_what_a_device_has_no_memory_for_is_its_fault_though_all_else_was_measured(
    healthy, tmp_path, part, spoil, told
):
    for log in healthy.glob("rank0-*"):
        spoilt(log, tmp_path, spoil if log.name.endswith(f"{part}.jsonl") else lambda row: False)
    Run(2).write(tmp_path)
    device, _ = devices_of([tmp_path])[1]
    assert [failure.startswith(told) for failure in device.failures] == [True]


def test_a_run_that_was_killed_whole_blames_no_device_and_one_that_died_in_it_is_named(healthy, tmp_path):
    for log in (path for rank in (0, 1) for path in healthy.glob(f"rank{rank}-*")):
        (tmp_path / log.name).write_bytes(log.read_bytes())
    for rank in (0, 1):
        log = Place(rank, 0, rank).log(tmp_path, "collective")
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
        Run(2).write(tmp_path)
        devices = devices_of([tmp_path])[1]
        died = "it was gone or killed while collective was measured"
        assert [device.failures for device in devices] == [() if rank else (died,), ()]
    assert [device.lacks for device in devices] == [(died,), (died,)]
    assert judged(devices).level == UNKNOWN


def test_an_interrupted_run_blames_no_device_that_had_no_time_to_end_its_log(healthy, tmp_path):
    first, second = (Place(rank, 0, rank).log(healthy, "find") for rank in (0, 1))
    (tmp_path / first.name).write_bytes(first.read_bytes().splitlines(keepends=True)[0])
    *lines, summary = second.read_text().splitlines()
    ended = json.loads(summary) | {"status": "interrupted", "reason": "by the user"}
    (tmp_path / second.name).write_text("\n".join([*lines, json.dumps(ended)]) + "\n")
    Run(2, is_cut=True).write(tmp_path)
    assert [device.failures for device in devices_of([tmp_path])[1]] == [(), ()]
    cut = "it was gone or killed while find was measured"
    for run in (Run(2, is_over=True), Run(2)):  # torchrun ends all ranks by a signal because one died
        run.write(tmp_path)
        assert [device.failures for device in devices_of([tmp_path])[1]] == [(cut,), ()]
    Run(2, failures={0: "it ended while it measured (find): killed by signal 11"}, is_cut=True).write(tmp_path)
    assert [len(device.failures) for device in devices_of([tmp_path])[1]] == [1, 0]


def test_what_stands_beside_the_logs_names_no_machine(tmp_path):
    told = "connection to 10.0.0.7:29500 lost, /home/alice/run, card 0000:3b:00.0"
    Run(2, apart=told, failures={0: told}).write(tmp_path)
    text = (tmp_path / "run.json").read_text()
    assert not [name for name in ("10.0.0.7", "alice", "3b:00") if name in text]


@pytest.mark.parametrize(
    ("its", "other", "told"),
    [
        ('"bfloat16"', '"float16"', "is of float16, and the devices were measured in bfloat16"),
        ('"Simulated H100"', '"another card"', "is of another card, and no device here is one"),
    ],
)
def test_a_baseline_that_tells_nothing_of_these_devices_is_named(healthy, tmp_path, capsys, its, other, told):
    baseline = tmp_path / "good.jsonl"
    baseline.write_text(Place(0, 0, 0).log(healthy, "find").read_text().replace(its, other))
    assert main(["node", "--from", str(healthy), "--baseline", str(baseline)]) == 3
    assert capsys.readouterr().out.startswith(f"UNKNOWN: the baseline good.jsonl {told}\n")


def test_a_baseline_holds_each_card_of_its_logs_with_all_its_figures(healthy, tmp_path):
    for rank in (0, 1):
        for part in ("find", "bandwidth"):
            log = Place(rank, 0, rank).log(healthy, part)
            text = re.sub(r'"uuid_hash": ?(null|"\w*")', f'"uuid_hash":"card{rank}"', log.read_text())
            (tmp_path / log.name).write_text(text)
    (baseline,) = baseline_of(sorted(tmp_path.iterdir())).values()
    devices = devices_of([tmp_path])[1]
    assert [card.uuid_hash for card in baseline.cards] == [device.uuid_hash for device in devices]
    for card, device in zip(baseline.cards, devices, strict=True):
        assert {**card.figures, **device.figures} == device.figures
        assert {BURST, SUSTAINED, "copy", "read"} <= set(card.figures) & set(card.half_widths)
    slow = replace(devices[1], figures={name: 0.93 * rate for name, rate in devices[1].figures.items()})
    assert "below the same card in the baseline" in judged([slow], {slow.name: baseline}).reason


def test_contributed_ceilings_are_those_of_the_fastest_card():
    device = Device(0, 0, 0, "NVIDIA H200", figures={BURST: 800.0})
    headers = {device.name: {"dtype": "bfloat16", "build": (132, 700.0)}}
    assert contributed_baselines([device], headers)[device.name].is_fastest


def test_a_log_without_a_figure_of_a_device_is_no_baseline(healthy, capsys):
    collective = str(Place(0, 0, 0).log(healthy, "collective"))
    assert main(["node", "--from", str(healthy), "--baseline", collective]) == 3
    assert "holds no figure that devices are compared by" in capsys.readouterr().err


def test_devices_are_drawn_side_by_side_with_a_panel_and_a_scale_per_figure(healthy):
    _, devices = devices_of([healthy])
    chart = node_chart(devices, judged(devices))
    assert chart.has_own_scales
    assert [panel.title.split(",")[0] for panel in chart.panels] == [
        name for name in UNITS if name in devices[0].figures
    ]
    burst = chart.panels[0]
    assert [line.name for line in burst.lines] == ["device 0", "device 1", "device 2"]
    assert [line.points[0].y for line in burst.lines] == [device.figures[BURST] for device in devices]
    assert [text for _, text in chart.axis.ticks] == ["0", "1", "2"]
    assert burst.title == "burst, spread 2.0%" and burst.unit == "TFLOPS"
    assert all(line.points[0].low < line.points[0].y < line.points[0].high for line in burst.lines)
    assert "OK" in chart.title
    named = node_chart([replace(devices[0], rank=rank, node=rank // 8) for rank in range(16)], judged(devices))
    assert [line.name for line in named.panels[0].lines] == ["node 0", "node 1"]
    with pytest.raises(UsageError, match="nothing to draw"):
        node_chart([replace(devices[0], figures={})], judged(devices))


def test_a_folder_is_drawn_by_the_command_line(healthy, tmp_path):
    assert main(["plot", str(healthy), "--output", str(tmp_path / "node.png")]) == 0
    assert (tmp_path / "node.png").stat().st_size > 10_000
    assert main(["plot", str(healthy), "--regime", "burst", "--output", str(tmp_path / "other.png")]) == 2


def test_a_folder_and_a_log_are_no_picture(healthy, tmp_path, capsys):
    log = Place(0, 0, 0).log(healthy, "find")
    assert main(["plot", str(log), str(healthy), "--output", str(tmp_path / "both.png")]) == 2
    assert f"{healthy} is a folder of 'mamf node': draw folders and logs separately" in capsys.readouterr().err


def test_folders_of_two_runs_hide_no_device_of_either(healthy, tmp_path):
    other = Place(0, 0, 3).log(tmp_path, "bandwidth")
    other.write_bytes(Place(0, 0, 0).log(healthy, "bandwidth").read_bytes())
    with pytest.raises(UsageError, match="rank 0 is device 0 and device 3: give the folders of one run"):
        devices_of([healthy, tmp_path])


def test_more_ranks_than_any_cluster_has_are_not_listed(tmp_path):
    Run(10**12).write(tmp_path)
    with pytest.raises(RunLogError, match=r"\(ranks 1000000000000: it must be at most 250000\): without it"):
        devices_of([tmp_path])


@pytest.mark.parametrize("text", ["x", "{}", "[1]", '{"places": [[]]}'])
def test_what_is_no_run_is_told_with_what_to_do(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunLogError, match=r"Error: .*\): without it the logs alone are read$"):
        devices_of([tmp_path])


@pytest.mark.parametrize("data", [b"", b'{"record": "hea'])
def test_a_log_that_was_killed_before_it_began_is_none_and_is_begun_anew(healthy, tmp_path, data):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    log = Place(1, 0, 1).log(tmp_path, "find")
    log.write_bytes(data)
    device = devices_of([tmp_path])[1][1]
    assert (device.failures, device.lacks) == ((), ("find was not measured",))
    measured(tmp_path, 1, HEALTHY[1], together=False)
    assert read_run_log(log).tier == "complete"
    device = devices_of([tmp_path])[1][1]
    assert (device.failures, device.lacks) == ((), ())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_nobody_waits_for_a_pipe_that_bears_a_logs_name(tmp_path):
    log = Place(0, 0, 0).log(tmp_path, "find")
    for path in (log, tmp_path / "run.json"):
        os.mkfifo(path)
    _, (device,) = devices_of([tmp_path])
    assert any(f"cannot read {log}: it is no regular file" in reason for reason in device.failures)
    with pytest.raises(UsageError, match="it is no regular file"):
        measured(tmp_path, 0, HEALTHY[0], together=False)
    assert log.is_fifo()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_copies_to_the_next_device_are_measured_while_neither_neighbour_copies(tmp_path, count):
    ring = type("Ring", (Node,), {"device_count": classmethod(lambda cls: count)})
    turns = []
    for index in range(count):
        told = []
        run = DeviceRun(ring(0), Place(index, 0, index), tmp_path, count, meet=lambda told=told: told.append("meet"))
        run._part = told.append
        run.together()
        assert told.count("peers") == told.count("collective") == 1
        turns.append(told.index("peers"))
    assert all(turns[index] != turns[(index + 1) % count] for index in range(count))


def test_time_is_shared_out_by_reason_whatever_is_read_with_it():
    seen = [("power cap", "thermal"), ("power cap",), (), ()]
    found = conditions([Reading(throttle_reasons=reasons) for reasons in seen], None)
    assert found.throttle_shares == {"power cap": 0.5, "thermal": 0.25}


@pytest.mark.parametrize(("readings", "reasons"), [(10, ("thermal",)), (11, ())])
def test_what_throttled_a_tenth_of_the_time_is_a_reason(readings, reasons):
    seen = [Reading(throttle_reasons=("thermal",)), *[Reading()] * (readings - 1)]
    assert conditions(seen, None).throttle_reasons == reasons


def test_what_is_complete_is_not_measured_again(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    measured(tmp_path, 0, HEALTHY[0], together=False, ranks=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_complete_is_gone_on_with_by_its_own_device_only(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    other = Node(0)
    other.info = replace(other.info, name="Simulated B200")
    with pytest.raises(LogMismatchError, match="was measured with device name Simulated H100, not Simulated B200"):
        DeviceRun(other, Place(0, 0, 0), tmp_path).alone()


@pytest.mark.parametrize(
    ("processes", "own", "told"), [(1, None, None), (3, None, "4"), (99, None, "1"), (3, "7", "7")]
)
def test_processes_share_the_cores_unless_the_user_says_how_many(monkeypatch, processes, own, told):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    begun = {}
    monkeypatch.setattr(children, "started", lambda command, environment: begun.setdefault(command[0], environment))
    monkeypatch.setattr(Children, "_read", lambda *of: None)
    Children({rank: [rank] for rank in range(processes)}, {} if own is None else {"OMP_NUM_THREADS": own})
    assert {environment.get("OMP_NUM_THREADS") for environment in begun.values()} == {told}
