"""Test what each device of a node measures, in virtual time, and what mamf finds out from the logs of a node."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import simulated_node
from simulated_node import Node

from mamf.cli import main
from mamf.errors import RunLogError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.node import children
from mamf.node.children import ChildProcesses
from mamf.node.device import DeviceRun
from mamf.node.logs import (
    MULTI_DEVICE_PARTS,
    SINGLE_DEVICE_PARTS,
    NodeRun,
    make_contributed_baseline,
    make_log_path,
    read_node_folder,
    read_node_folders,
)
from mamf.node.report import make_node_chart
from mamf.node.verdict import BURST, CRITICAL, FIGURE_UNITS, OK, SUSTAINED, NodeDevice, judge_devices
from mamf.operations import unknown
from mamf.testing import Physics

#: The physics of healthy cards, which differ by 1 %.
HEALTHY = [{"matmul_peak_share": 0.795 * factor} for factor in (1.0, 0.99, 1.01)]
#: By fault: the physics of the faulty card, the level of the verdict, and a text in one of the findings.
FAULTY = {
    "a third of the speed": ({"matmul_peak_share": 0.265}, CRITICAL, "burst and sustained, 6"),
    "slow only when sustained": ({"capped_clock_hz": 1690e6 * 0.9}, CRITICAL, SUSTAINED),
    "throttled half of the time": ({"throttled_time_share": 0.5}, CRITICAL, "by hardware thermal slowdown"),
}


@pytest.fixture(scope="module", autouse=True)
def simulated_plugins():
    with pytest.MonkeyPatch.context() as patch:
        simulated_node.install(patch)
        unknown._get_installed_operation.cache_clear()
        yield
    unknown._get_installed_operation.cache_clear()


def measure_device(folder, index, physics, with_copies=True):
    backend = type("SimulatedCard", (Node,), {"physics": Physics(**physics)})(index)
    device_run = DeviceRun(backend, folder, budget_seconds=120.0)
    device_run.measure_single_device_parts()
    if with_copies:
        device_run.measure_copies_to_next_device()


@pytest.fixture(scope="module")
def healthy_folder(tmp_path_factory):
    """Return a folder with the logs of healthy devices."""
    folder = tmp_path_factory.mktemp("healthy")
    for index, physics in enumerate(HEALTHY):
        measure_device(folder, index, physics)
    NodeRun(range(len(HEALTHY)), is_over=True).write_run_file(folder)
    return folder


def test_healthy_devices_are_ok_and_each_part_has_its_log(healthy_folder):
    run, devices = read_node_folder(healthy_folder)
    verdict = judge_devices(devices)
    assert verdict.level == OK, verdict
    assert len(devices) == len(run.devices) == len(HEALTHY)
    for device in devices:
        assert {BURST, SUSTAINED, "copy", "read", "to_device", "to_host", "to_peer"} <= set(device.figures)
        assert device.conditions.clock_hz == pytest.approx(Physics().capped_clock_hz, rel=0.01), (
            "the conditions must be those of sustained, not of burst"
        )
        logs = [
            make_log_path(healthy_folder, device.index, part) for part in (*SINGLE_DEVICE_PARTS, *MULTI_DEVICE_PARTS)
        ]
        assert all(read_run_log(log).tier == "complete" for log in logs)


@pytest.mark.parametrize("fault", FAULTY)
def test_a_simulated_fault_is_found_and_blamed_on_its_device(healthy_folder, tmp_path, fault):
    physics, level, text = FAULTY[fault]
    shutil.copytree(healthy_folder, tmp_path, dirs_exist_ok=True)
    measure_device(tmp_path, 3, physics, with_copies=False)
    devices = read_node_folder(tmp_path)[1]
    devices[-1] = replace(devices[-1], lacks=())  # it did not measure the copies to its neighbor
    verdict = judge_devices(devices)
    assert verdict.level == level, verdict
    assert {finding.label for finding in verdict.findings} == {"device 3"}
    assert any(text in finding.text for finding in verdict.findings)


@pytest.mark.parametrize("budget", [4.0, 12.0, 40.0])
def test_single_device_parts_keep_to_the_budget(tmp_path, budget):
    device = Node(0)
    start = device.now()
    DeviceRun(device, tmp_path, budget_seconds=budget).measure_single_device_parts()
    assert device.now() - start < 1.1 * budget + 2.0, "only the first row of each part may exceed the budget"
    (node_device,) = read_node_folder(tmp_path)[1]
    assert not node_device.failures
    assert {"copy", "to_device"} <= set(node_device.figures)
    assert (node_device.lacks == ()) == (budget == 40.0)


def copy_log_with_failures(log, folder, must_fail):
    """Copy a log to a folder. In the copy, the rows that ``must_fail`` selects ran out of memory."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        if record["record"] == "measurement" and must_fail(record):
            record |= {"status": "out_of_memory", "reason": "2 GiB are free", "samples_seconds": []}
    (folder / log.name).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("part", "must_fail", "message"),
    [
        ("bandwidth", lambda row: row["problem"]["pattern"] == "copy", "copy: out of memory, 2 GiB are free"),
        ("peers", lambda row: True, "to_peer: out of memory"),
    ],
)
def test_a_row_that_ran_out_of_memory_is_a_failure_even_if_all_else_was_measured(
    healthy_folder, tmp_path, part, must_fail, message
):
    for log in healthy_folder.glob("device0-*"):
        copy_log_with_failures(log, tmp_path, must_fail if log.name.endswith(f"{part}.jsonl") else lambda row: False)
    NodeRun([0, 1]).write_run_file(tmp_path)
    device, _ = read_node_folder(tmp_path)[1]
    assert [failure.startswith(message) for failure in device.failures] == [True]


def test_an_interrupted_run_blames_no_device_for_an_unfinished_log(healthy_folder, tmp_path):
    first, second = (make_log_path(healthy_folder, rank, "find") for rank in (0, 1))
    (tmp_path / first.name).write_bytes(first.read_bytes().splitlines(keepends=True)[0])
    *lines, summary = second.read_text().splitlines()
    interrupted_summary = json.loads(summary) | {"status": "interrupted", "reason": "by the user"}
    (tmp_path / second.name).write_text("\n".join([*lines, json.dumps(interrupted_summary)]) + "\n")
    NodeRun([0, 1]).write_run_file(tmp_path)
    assert [device.failures for device in read_node_folder(tmp_path)[1]] == [(), ()]
    failure = "its process disappeared or was killed during find"
    NodeRun([0, 1], is_over=True).write_run_file(tmp_path)
    assert [device.failures for device in read_node_folder(tmp_path)[1]] == [(failure,), ()]
    NodeRun([0, 1], failures={0: "its process ended early (phase: find): killed by signal 11"}).write_run_file(tmp_path)
    assert [len(device.failures) for device in read_node_folder(tmp_path)[1]] == [1, 0]


def test_the_run_file_of_a_node_names_no_machine(tmp_path):
    reason = "connection to 10.0.0.7:29500 lost, /home/alice/run, card 0000:3b:00.0"
    NodeRun([0, 1], separate_measurement_reason=reason, failures={0: reason}).write_run_file(tmp_path)
    text = (tmp_path / "run.json").read_text()
    assert not [name for name in ("10.0.0.7", "alice", "3b:00") if name in text]


def test_contributed_ceilings_are_a_baseline_of_devices_of_their_build():
    device = NodeDevice(0, name="NVIDIA H200", dtype="bfloat16", build=(132, 700.0), figures={BURST: 700.0})
    verdict = judge_devices([device], make_contributed_baseline([device]))
    assert "below the contributed ceilings of this model (limit 7.5 %)" in verdict.reason
    assert not make_contributed_baseline([replace(device, build=(132, 350.0))]).cards


def test_devices_are_drawn_side_by_side_with_a_panel_and_a_scale_per_figure(healthy_folder):
    _, devices = read_node_folder(healthy_folder)
    chart = make_node_chart(devices, judge_devices(devices))
    assert chart.has_own_scales
    assert [panel.title.split(",")[0] for panel in chart.panels] == [
        name for name in FIGURE_UNITS if name in devices[0].figures
    ]
    burst = chart.panels[0]
    assert [line.name for line in burst.lines] == ["device 0", "device 1", "device 2"]
    assert [line.points[0].y for line in burst.lines] == [device.figures[BURST] for device in devices]
    assert [text for _, text in chart.axis.ticks] == ["0", "1", "2"]
    assert burst.title == "burst, spread 2.0 %" and burst.unit == "TFLOPS"
    assert all(line.points[0].low < line.points[0].y < line.points[0].high for line in burst.lines)
    assert "OK" in chart.title
    two_node_chart = make_node_chart(
        [replace(devices[0], index=rank % 8, node=rank // 8) for rank in range(16)], judge_devices(devices)
    )
    assert [line.name for line in two_node_chart.panels[0].lines] == ["node 0", "node 1"]
    with pytest.raises(UsageError, match="nothing to draw"):
        make_node_chart([replace(devices[0], figures={})], judge_devices(devices))


def test_a_folder_is_drawn_by_the_command_line(healthy_folder, tmp_path):
    assert main(["plot", str(healthy_folder), "--output", str(tmp_path / "node.png")]) == 0
    assert (tmp_path / "node.png").stat().st_size > 10_000
    assert main(["plot", str(healthy_folder), "--regime", "burst", "--output", str(tmp_path / "other.png")]) == 2


def test_folders_of_several_machines_are_judged_together(healthy_folder, tmp_path, capsys):
    slow_folder = tmp_path / "slow"
    shutil.copytree(healthy_folder, slow_folder)
    for part in (*SINGLE_DEVICE_PARTS, *MULTI_DEVICE_PARTS):
        make_log_path(slow_folder, 1, part).unlink()
    measure_device(slow_folder, 1, FAULTY["a third of the speed"][0], with_copies=False)
    NodeRun(range(3), is_over=True, separate_measurement_reason="device 9 failed before").write_run_file(slow_folder)
    reason, devices = read_node_folders([healthy_folder, slow_folder])
    assert (reason, len(devices)) == ("device 9 failed before", 6)
    assert main(["node", "--from", str(healthy_folder), str(slow_folder)]) == 2
    assert capsys.readouterr().out.startswith("CRITICAL: node 1 device 1: ")


def test_a_folder_is_shown_as_its_verdict(healthy_folder, capsys):
    assert main(["node", "--from", str(healthy_folder), "--format", "markdown"]) == 0
    expected = capsys.readouterr().out
    assert main(["show", str(healthy_folder), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == expected


def test_the_report_names_the_baseline(healthy_folder, capsys):
    baseline = min(healthy_folder.rglob("*find*.jsonl"))
    main(["node", "--from", str(healthy_folder), "--baseline", str(baseline)])
    assert f"also compared with the baseline {baseline.name}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("text", ["x", "{}", "[1]", '{"places": [[]]}', "[" * 100_000], ids=range(5))
def test_an_invalid_run_file_is_refused_with_what_to_do(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunLogError, match=r"Error: .*\): delete it to read only the logs$"):
        read_node_folder(tmp_path)


@pytest.mark.parametrize("data", [b"", b'{"record": "hea'])
def test_a_log_without_a_whole_header_counts_as_missing(healthy_folder, tmp_path, data):
    shutil.copytree(healthy_folder, tmp_path, dirs_exist_ok=True)
    log = make_log_path(tmp_path, 1, "find")
    log.write_bytes(data)
    device = read_node_folder(tmp_path)[1][1]
    assert (device.failures, device.lacks) == ((), ("there is no log of find",))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_with_the_name_of_a_log_is_refused_without_waiting(tmp_path):
    log = make_log_path(tmp_path, 0, "find")
    for path in (log, tmp_path / "run.json"):
        os.mkfifo(path)
    _, (device,) = read_node_folder(tmp_path)
    assert any(f"cannot read {log}: it is not a regular file" in reason for reason in device.failures)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_copies_to_the_next_device_are_measured_while_neither_neighbor_copies(tmp_path, count):
    ring_device = type("Ring", (Node,), {"count_devices": classmethod(lambda cls: count)})
    turn_by_device = []
    for index in range(count):
        events = []
        run = DeviceRun(
            ring_device(index), tmp_path, wait_for_other_devices=lambda events=events: events.append("meet") or True
        )
        run._measure_part = events.append
        run.measure_copies_to_next_device()
        assert events.count("peers") == 1
        turn_by_device.append(events.index("peers"))
    assert all(turn_by_device[index] != turn_by_device[(index + 1) % count] for index in range(count))


@pytest.mark.parametrize(
    ("processes", "user_count", "expected"), [(1, None, None), (3, None, "4"), (99, None, "1"), (3, "7", "7")]
)
def test_processes_share_the_cores_unless_the_user_says_how_many(monkeypatch, processes, user_count, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    environment_by_command = {}
    monkeypatch.setattr(
        children, "start_child", lambda command, environment: environment_by_command.setdefault(command[0], environment)
    )
    monkeypatch.setattr(ChildProcesses, "_read_messages", lambda *arguments: None)
    ChildProcesses(
        {rank: [rank] for rank in range(processes)}, {} if user_count is None else {"OMP_NUM_THREADS": user_count}
    )
    assert {environment.get("OMP_NUM_THREADS") for environment in environment_by_command.values()} == {expected}
