"""``mamf node``: a process a device, ranks of several nodes, what fails and hangs, and what a gate is told."""

import csv
import io
import json
import os
import re
import shutil
import signal
import socket
import threading
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import simulated_node
from forked import Child, forked

from mamf.cli import main
from mamf.cli.node_measuring import _follow_leader
from mamf.cli.progress import Phases
from mamf.errors import RunLogWriteError, UnavailableError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.node.children import FAILURE, PHASE, WAITS, Children, Event, Watch, parsed, watched
from mamf.node.device import DeviceRun
from mamf.node.figures import Device, Launched, Place, first_host, launched, nowhere, places_of_all
from mamf.node.gathering import Run, devices_of
from mamf.node.group import Meeting
from mamf.node.ranks import COMPLETE, GO, Rank, arrive, gathered, joint_decision
from mamf.node.report import node_document
from mamf.node.verdict import judged
from mamf.operations import unknown

NODE = ["node", "--backend", "simulated", "--budget", "60s", "--output-folder", "logs"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    simulated_node.install(monkeypatch, launches=200)
    monkeypatch.setattr("mamf.node.children.started", Child)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    unknown._installed.cache_clear()
    yield
    unknown._installed.cache_clear()


def faulty(monkeypatch, devices, **faults):
    monkeypatch.setenv(simulated_node.DEVICES, str(devices))
    monkeypatch.setenv(
        simulated_node.FAULTS, json.dumps({name.removeprefix("_"): each for name, each in faults.items()})
    )


# -- a process a device ------------------------------------------------------------------------------------------------


@pytest.fixture
def healthy(run, monkeypatch):
    """The command ran on two healthy devices: its exit code and what it said."""
    faulty(monkeypatch, 2)
    return run(*NODE)


def test_a_healthy_node_is_ok_and_its_logs_alone_say_so_again(run, healthy):
    code, out, _ = healthy
    assert code == 0, out
    assert out.startswith("OK: 2 devices, the slowest is device ")
    assert "0000:01:00.0" in out
    assert "all_reduce" in out
    assert "nccl-tests" in out
    for log in (run.folder / "logs").iterdir():
        assert "0000:01:00.0" not in log.read_text(), "an address is in no log"
    again = run("node", "--from", "logs")
    assert again[0] == 0
    assert again[1].splitlines()[0] == out.splitlines()[0]

    code, out, err = run("node", "--from", "logs", "--format", "json")
    record = json.loads(out)
    assert (record["level"], record["exit_code"], err) == ("OK", 0, "")
    assert [device["rank"] for device in record["devices"]] == [0, 1]
    buses = {row["collective"]: row["bus_1gib_gb_per_s"] for row in record["collectives"]}
    assert buses["all_reduce"] == pytest.approx(400, rel=0.05)

    rows = list(csv.DictReader(io.StringIO(run("node", "--from", "logs", "--format", "csv")[1])))
    assert float(rows[1]["burst_tflops"]) == pytest.approx(record["devices"][1]["figures"]["burst"])
    told = run("node", "--from", "logs", "--format", "prometheus")[1]
    assert told.startswith("# OK: ")
    assert "\nmamf_node_verdict 0\n" in told
    rates = {name: float(rate) for name, rate in re.findall(r'device="1",.*figure="(.*)"} (.*)', told)}
    assert rates == pytest.approx({name: 1e12 * value for name, value in record["devices"][1]["figures"].items()})
    assert run("node", "--from", "logs", "--format", "markdown")[1].startswith("- OK: ")

    before = {path.name: path.read_bytes() for path in (run.folder / "logs").glob("*.jsonl")}
    assert run("node", "--backend", "simulated", "--resume", "logs")[0] == 0
    assert {path.name: path.read_bytes() for path in (run.folder / "logs").glob("*.jsonl")} == before


def test_devices_that_cannot_be_opened_or_vanish_are_critical_and_the_rest_is_measured(run, monkeypatch):
    faulty(monkeypatch, 3, _0="closed", _1="gone")
    code, out, _ = run(*NODE, "--format", "json")
    record = json.loads(out)
    assert (code, record["level"]) == (2, "CRITICAL")
    failures = [device["failures"] for device in record["devices"]]
    assert failures[0] == ["the device cannot be opened"]
    assert failures[1] == ["it ended while it measured (opening the device): exit code 9"]
    assert failures[2] == []
    assert record["devices"][2]["figures"]["burst"] > 0
    assert record["not_together"] == "rank 0, 1 did not come so far"
    again = json.loads(run("node", "--from", "logs", "--format", "json")[1])
    assert again["findings"] == [
        {**finding, "text": finding["text"].replace(" (0000:02:00.0)", "")} for finding in record["findings"]
    ]


def findings_of_unknown(run, monkeypatch, write):
    """The texts of a node whose logs are written by ``write``: UNKNOWN, and no device has failed."""
    monkeypatch.setattr(RunLogWriter, "write", write)
    code, out, _ = run(*NODE, "--format", "json")
    record = json.loads(out)
    assert (code, record["level"]) == (3, "UNKNOWN")
    assert [device["failures"] for device in record["devices"]] == [[], []]
    return [finding["text"] for finding in record["findings"]]


@pytest.mark.parametrize("part", ["find", "bandwidth", "peers"])
def test_a_full_disk_is_unknown_and_drains_no_node(run, monkeypatch, part):
    faulty(monkeypatch, 2)
    write = RunLogWriter.write

    def written(self, record, fields):
        if self.path.name.endswith(f"0-{part}.jsonl"):
            raise RunLogWriteError(f"cannot write {self.path}: No space left on device")
        write(self, record, fields)

    findings = findings_of_unknown(run, monkeypatch, written)
    told = [text for text in findings if "No space left on device" in text]
    assert len(told) == 1
    assert "device 0" in told[0]
    assert ": its log could not be written: cannot write" in told[0]
    assert run("node", "--from", "logs")[0] == 3


@pytest.mark.parametrize(
    ("change", "number"), [(os.unlink, ""), (lambda log: os.truncate(log, 300), "-2")], ids=["deleted", "truncated"]
)
def test_a_log_that_another_program_changes_is_unknown_and_drains_no_node(run, monkeypatch, change, number):
    faulty(monkeypatch, 2)
    write = RunLogWriter.write

    def written(self, record, fields):
        if self.path.name.endswith("0-bandwidth.jsonl") and record == "summary":
            change(self.path)
        write(self, record, fields)

    findings = findings_of_unknown(run, monkeypatch, written)
    assert "bandwidth.jsonl was changed by another program: the whole log is now" in findings[0]
    assert read_run_log(run.folder / "logs" / f"rank0-node0-device0-bandwidth{number}.jsonl").measurements
    assert run("node", "--from", "logs")[0] == 3


def test_ctrl_c_leaves_the_log_of_each_device_to_go_on_with(run, monkeypatch):
    faulty(monkeypatch, 2)

    def show(self, phases):
        if any("find " in phase for phase in phases.values()):
            raise KeyboardInterrupt

    monkeypatch.setattr(Phases, "show", show)
    code, out, _ = run(*NODE)
    assert code == 130
    assert out.startswith("UNKNOWN: device ")
    logs = [read_run_log(log) for log in (run.folder / "logs").glob("*.jsonl")]
    assert logs
    assert all(log.summary is not None or not log.measurements for log in logs), "each says how it ended"
    monkeypatch.setattr(Phases, "show", lambda self, phases: None)
    code, out, _ = run("node", "--backend", "simulated", "--resume", "logs", "--format", "json")
    assert (code, json.loads(out)["level"]) == (0, "OK"), out


def test_some_devices_of_a_node_are_gone_on_with(run, monkeypatch):
    faulty(monkeypatch, 3)
    assert run(*NODE, "--devices", "2", "0")[0] == 0
    names = sorted(path.name for path in (run.folder / "logs").iterdir())
    code, _, err = run("node", "--backend", "simulated", "--resume", "logs", "--devices", "0", "1")
    assert (code, err) == (3, "mamf: logs was measured by devices 2 0: resume it without --devices\n")
    code, out, _ = run("node", "--backend", "simulated", "--resume", "logs")
    assert (code, out.startswith("OK: 2 devices")) == (0, True)
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == names


class Killed:
    """A process that ends when it is killed, as its watch hears next."""

    def __init__(self, rank, script):
        self.rank, self.script, self.was_killed = rank, script, False

    def kill(self):
        self.was_killed = True
        self.script.insert(0, (0.0, Event(self.rank, None, -9)))


def watch_of(script, ranks=3, patience=60.0):
    """The watch after a script of (seconds later, what comes): with its processes, and how often all went on."""
    now, went_on = [0.0], []
    processes = {rank: Killed(rank, script) for rank in range(ranks)}
    watch = Watch(range(ranks), patience, now=lambda: now[0])

    def events(seconds):
        later, event = script.pop(0) if script else (patience, None)
        now[0] += later
        return event

    watched(watch, processes, events, lambda: went_on.append(now[0]))
    return watch, [rank for rank, process in processes.items() if process.was_killed], len(went_on)


def says(rank, text, kind=PHASE, later=1.0):
    return later, Event(rank, {kind: text})


def ends(rank, code=0, words="", later=1.0):
    return later, Event(rank, None, code, words)


def test_who_is_silent_hangs_and_is_killed_but_not_who_waits_for_it():
    script = [says(0, WAITS), says(1, "find scout"), says(2, WAITS), (61.0, None), ends(0), ends(2)]
    watch, killed, went_on = watch_of(script)
    assert watch.failures == {1: "it hangs: silent for 60 s (find scout)"}
    assert (killed, went_on, watch.was_left) == ([1], 1, False)


def test_who_ends_early_failed_with_its_last_words_or_its_signal():
    script = [ends(0, 1, "CUDA error: device lost"), ends(1, -11), says(2, WAITS), ends(2)]
    watch, killed, went_on = watch_of(script)
    assert watch.failures[0] == "it ended while it measured (start): CUDA error: device lost"
    assert watch.failures[1] == "it ended while it measured (start): killed by signal 11"
    assert (killed, went_on) == ([], 1)


def test_where_one_fails_together_the_others_are_ended_and_not_blamed():
    waiting = [says(rank, WAITS) for rank in range(3)]
    watch, killed, went_on = watch_of([*waiting, says(1, "NCCL error", FAILURE), ends(1, 1)])
    assert watch.failures == {1: "NCCL error"}
    assert (killed, went_on, watch.was_left) == ([0, 2], 1, True)


def test_who_ended_without_a_word_is_blamed_and_not_who_told_of_it_before():
    waiting = [says(rank, WAITS) for rank in range(3)]
    reset = says(0, "together with the others: connection reset by peer", FAILURE, later=0.1)
    watch, killed, _ = watch_of([*waiting, reset, ends(0, 1, later=0.1), ends(1, -9, later=0.1), (0.5, None)])
    assert watch.failures == {1: "it ended while it measured (together): killed by signal 9"}
    assert (killed, watch.was_left) == ([2], True)


def test_of_those_that_fall_silent_together_nobody_knows_who_hangs():
    watch, _, _ = watch_of([says(0, WAITS), says(1, WAITS), (61.0, None)], ranks=2)
    told = "it hangs, or waits for one that does: silent for 60 s (together)"
    assert watch.failures == {0: told, 1: told}


def test_who_hangs_and_cannot_be_killed_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(Killed, "kill", lambda process: None)
    watch, _, went_on = watch_of([says(0, WAITS), says(1, "find"), (61.0, None), ends(0)], ranks=2)
    assert (list(watch.failures), went_on) == ([1], 1)


def test_where_one_process_cannot_be_started_the_others_are_ended(monkeypatch):
    ended = []

    def started(command, environment):
        if command == ["no such program"]:
            raise FileNotFoundError(command[0])
        return Namespace(terminate=lambda: ended.append(command), wait=lambda timeout: 0)

    monkeypatch.setattr("mamf.node.children.started", started)
    with pytest.raises(FileNotFoundError):
        Children({0: ["first"], 1: ["no such program"]}, {})
    assert ended == [["first"]]


def test_what_is_no_line_of_ours_is_no_matter():
    noise = [
        (0.1, Event(0, parsed("Warning: something\n"))),
        (0.1, Event(0, parsed("[1, 2]"))),
        says(0, WAITS),
        ends(0),
    ]
    assert watch_of(noise, ranks=1)[0].failures == {}


# -- ranks of several nodes --------------------------------------------------------------------------------------------


HOST = "host-of-ranks"
RUN = '{"schema": 1, "ranks": 2, "is_over": true, "apart": "", "failures": {}, "places": []}'


def free_port():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


def as_rank(folder, *arguments, node=NODE):
    """What a rank's command returns and says, complaints and all, in a process of its own."""

    def of_rank(rank):
        os.chdir(folder)
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            code = main([*node, *arguments])
        return code, out.getvalue()

    return of_rank


def test_two_nodes_of_three_ranks_by_torchrun_are_one_verdict(tmp_path, monkeypatch):
    faulty(monkeypatch, 3, _2={"physics": {"efficiency": 0.26}})
    port = str(free_port())
    ranks = [
        {"RANK": str(rank), "WORLD_SIZE": "6", "LOCAL_RANK": str(rank % 3), "GROUP_RANK": str(rank // 3)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(6)
    ]
    answers = forked(as_rank(tmp_path, "--format", "json"), ranks)
    (code, out), *others = answers
    assert others == [[0, ""]] * 5
    record = json.loads(out)
    assert (code, record["level"]) == (2, "CRITICAL")
    assert {finding["rank"] for finding in record["findings"]} == {2, 5}
    assert [device["node"] for device in record["devices"]] == [0] * 3 + [1] * 3
    assert all("all_reduce 1GiB" in device["collectives"] for device in record["devices"])
    assert f"node 1 device 2 ({HOST}, " in json.dumps(record["findings"])


def tasks_of_srun(count, port):
    """What srun tells each task of a step: a node each."""
    common = {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "127.0.0.1"}
    common |= {"SLURM_LOCALID": "0", "MASTER_PORT": str(port)}
    return [common | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} for rank in range(count)]


def test_two_tasks_by_srun_meet_at_the_first_host_and_are_one_verdict(tmp_path, monkeypatch):
    faulty(monkeypatch, 1)
    (code, out), other = forked(as_rank(tmp_path, "--format", "json"), tasks_of_srun(2, free_port()))
    record = json.loads(out)
    assert (code, record["level"], record["not_together"]) == (0, "OK", ""), out
    assert other == [0, ""]
    assert [(device["rank"], device["node"]) for device in record["devices"]] == [(0, 0), (1, 1)]
    assert all("all_reduce 1GiB" in device["collectives"] for device in record["devices"])
    assert {log.name.partition("-device")[0] for log in (tmp_path / "logs").glob("*.jsonl")} == {
        "rank0-node0",
        "rank1-node1",
    }
    assert not any(HOST in log.read_text() for log in (tmp_path / "logs").iterdir()), "a host is in no log"


def test_tasks_by_srun_that_die_or_come_late_are_named_and_hold_nobody(tmp_path, monkeypatch):
    faulty(monkeypatch, 1)
    tasks = tasks_of_srun(3, free_port())
    tasks[1][simulated_node.FAULTS] = json.dumps({"0": "gone"})
    tasks[2][simulated_node.FAULTS] = json.dumps({"0": "late"})
    (code, out), dead, late = forked(as_rank(tmp_path, "--format", "json", "--patience", "2s"), tasks)
    record = json.loads(out)
    assert (code, record["level"], record["not_together"]) == (2, "CRITICAL", "rank 1, 2 did not come so far")
    assert (
        record["reason"]
        == f"CRITICAL: node 1 device 0 ({HOST}): nothing was heard of rank 1 for 2 s; and 1 more device"
    )
    assert [bool(device["figures"]) for device in record["devices"]] == [True, False, False]
    assert dead is None, "it ended without an answer"
    assert late[0] in (0, 3), "who comes after the verdict ends by himself"


def test_ranks_measure_into_no_folder_that_holds_the_logs_of_another_run(tmp_path, monkeypatch):
    faulty(monkeypatch, 1)
    for name in ("run.json", "rank7-node7-device0-find.jsonl"):
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / name).write_text(RUN if name == "run.json" else "")
        answers = forked(as_rank(tmp_path), tasks_of_srun(2, free_port()))
        told = "mamf: logs holds the logs of another run: name another --output-folder, or --resume it\n"
        assert answers == [[3, told], [3, ""]]
        assert [path.name for path in (tmp_path / "logs").iterdir()] == [name]
        shutil.rmtree(tmp_path / "logs")


def test_a_rank_whose_own_folder_holds_other_logs_is_no_bad_device(tmp_path, monkeypatch):
    faulty(monkeypatch, 1)
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        (folder / "logs").mkdir(parents=True)
    (folders[1] / "logs" / "rank1-node1-device0-find.jsonl").touch()
    tasks = tasks_of_srun(2, free_port())
    (code, out), other = forked(lambda rank: as_rank(folders[rank], "--format", "json")(rank), tasks)
    record = json.loads(out)
    assert (code, record["level"], other) == (3, "UNKNOWN", [0, ""])
    assert "find.jsonl belongs to another run: name another --output-folder, or --resume it" in record["reason"]
    assert record["devices"][1]["figures"] == {}
    again = devices_of([folder / "logs" for folder in folders])[1]
    assert record["reason"].endswith(again[1].lacks[0])


RESUMED = ["node", "--backend", "simulated", "--resume", "logs"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ([*NODE, "--devices", "7"], "leave --devices out"),
        (RESUMED, "logs is not a folder"),
        (["node", "--backend", "simulated", "--resume", "."], "no logs of 'mamf node' in ."),
        (["node", "--backend", "simulated", "--resume", "four"], "four was measured by 4 ranks, not 2"),
    ],
)
def test_bad_options_of_ranks_are_3_and_measure_nothing(tmp_path, monkeypatch, command, told):
    faulty(monkeypatch, 1)
    (tmp_path / "four").mkdir()
    (tmp_path / "four" / "run.json").write_text(RUN.replace('"ranks": 2', '"ranks": 4'))
    (code, out), (other, _) = forked(as_rank(tmp_path, node=command), tasks_of_srun(2, free_port()))
    assert (code, other) == (3, 3)
    assert told in out
    assert len(out.splitlines()) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["four", "run.json"]


def test_a_dry_run_of_ranks_is_said_once_and_measures_nothing(tmp_path, monkeypatch):
    faulty(monkeypatch, 1)
    (code, out), other = forked(as_rank(tmp_path, "--dry-run"), tasks_of_srun(2, free_port()))
    assert (code, other) == (0, [0, ""])
    assert "devices: 2 of simulated, one rank each" in out
    assert not list(tmp_path.iterdir())


def test_ranks_go_on_with_their_logs_at_their_own_places_only(tmp_path, monkeypatch):
    faulty(monkeypatch, 2)
    tasks = tasks_of_srun(2, free_port())
    assert forked(as_rank(tmp_path), tasks)[0][0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "logs").glob("*.jsonl")}
    elsewhere = [tasks[0], tasks[1] | {"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}]
    code, out = forked(as_rank(tmp_path, "--format", "json", node=RESUMED), elsewhere)[0]
    assert (code, json.loads(out)["level"]) == (3, "UNKNOWN")
    assert "rank 1 is now device 1 of node 0: resume with the same ranks" in json.loads(out)["reason"]
    code, out = forked(as_rank(tmp_path, node=RESUMED), tasks)[0]
    assert (code, out.startswith("OK: 2 devices on 2 nodes")) == (0, True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "logs").glob("*.jsonl")} == before
    code, out = forked(as_rank(tmp_path, node=RESUMED), [{}])[0]
    assert (code, out) == (3, "mamf: logs was measured by 2 ranks: resume it with as many\n")


@pytest.mark.parametrize("measure", [lambda: None, Mock(side_effect=UnavailableError("the meeting place is gone"))])
def test_where_rank_0_is_gone_the_others_say_how_to_go_on(measure):
    rank = SimpleNamespace(measure=measure, folder="logs", patience=1.0)
    with pytest.raises(UnavailableError, match="no answer from rank 0: 'mamf node --from logs' reports"):
        _follow_leader(rank, InstantMeeting())


class Frozen:
    """A store whose host hangs; ``on_wait``: called first. Deaf to Ctrl-C, as calls into torch are."""

    def __init__(self, on_wait):
        self.on_wait, self.thawed = on_wait, threading.Event()

    def wait(self, *asked):
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("nobody hears Ctrl-C now")
        self.on_wait()
        self.thawed.wait()

    set = wait


@pytest.fixture
def frozen():
    meeting = Meeting("127.0.0.1", 0, True, 60.0)
    meeting._values = Frozen(lambda: None)
    yield meeting
    meeting._values.thawed.set()


def test_ctrl_c_is_heard_while_others_are_waited_for(frozen):
    frozen._values.on_wait = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        frozen.receive("word", 60.0)


def test_nobody_waits_for_a_meeting_place_that_hangs(frozen, monkeypatch):
    monkeypatch.setattr("mamf.node.group._ANSWER_SECONDS", 0.0)
    assert frozen.receive("word", 0.0) is None
    with pytest.raises(UnavailableError, match="the meeting place of the ranks is gone: no answer for 0 s"):
        frozen.publish("word", 1)


class InstantMeeting(dict):
    """A meeting of ranks that all came before, or never will."""

    publish = dict.__setitem__

    def receive(self, key, seconds):
        return self.get(key)


def test_a_rank_that_never_comes_is_named_and_holds_nobody(tmp_path):
    own = Launched(Place(0, 0, 0), 3, "host", 1)
    came = Device(1, 0, 1, "Simulated H100", figures={"burst": 800.0, "sustained": 690.0})
    meeting = InstantMeeting(
        {"alone/1": {"failure": None, "complete": False}, "done/1": json.loads(json.dumps(came.record()))}
    )
    run = DeviceRun(simulated_node.Node(0), own.place, tmp_path, 3, find_seconds=60.0)
    rank = Rank(own, meeting, tmp_path, 6.0, lambda: run)
    arrive(meeting, own.place)
    arrive(meeting, Place(1, 0, 1))
    rank.measure()
    found, devices = gathered(meeting, own, 6.0, rank.missing)
    assert found.apart == meeting["together"] == "rank 2 did not come so far"
    assert devices[2].failures == ("nothing was heard of rank 2 for 6 s",)
    assert devices[1] == replace(came, host=HOST)
    assert devices[0].figures["burst"] > 0
    assert judged(devices).reason == "CRITICAL: device 2: nothing was heard of rank 2 for 6 s"


def test_of_ranks_that_measure_together_the_one_that_ended_is_blamed_and_not_who_suffers_from_it():
    meeting = InstantMeeting({"together": GO})
    for rank in range(3):
        arrive(meeting, Place(rank, 0, rank))
    reset = "together with the others: RuntimeError: connection reset by peer"
    for rank, failures in ((0, (reset,)), (2, (reset, "wrong results in find"))):
        meeting.publish(f"done/{rank}", Device(rank, 0, rank, failures=failures).record())
    run, devices = gathered(meeting, Launched(Place(0, 0, 0), 3, "host", 1), 6.0)
    assert run.apart == "rank 1 ended while all measured together"
    told = [(), ("nothing was heard of rank 1 for 6 s",), ("wrong results in find",)]
    assert [device.failures for device in devices] == told
    assert list(run.failures) == [1, 2]


def places(*told):
    return [Place(rank, *each) for rank, each in enumerate(told)]


@pytest.mark.parametrize(
    ("rank", "ranks", "others", "place"),
    [
        (3, 4, places((0, 0), (0, 1), (1, 0)), Place(3, 1, 1)),
        (2, 3, places((0, 0), (1, 0)), Place(2, 2, 0)),
        (2, 4, places((0, 0), (0, 1)), nowhere(2)),  # of two nodes, or of one
        (3, 4, places((0, 0), (1, 0), (0, 1)), nowhere(3)),  # in turns
        (3, 4, places((0, 0), (0, 1), (0, 2)), Place(3, 0, 3)),
        (3, 4, places((0, 0), (1, 0), (1, 1)), nowhere(3)),
    ],
)
def test_the_place_of_a_rank_that_told_none_follows_from_the_others_or_is_unknown(rank, ranks, others, place):
    assert places_of_all({each.rank: each for each in others}, ranks)[rank] == place


def test_ranks_of_unknown_place_are_called_so_and_their_run_is_read_again(tmp_path):
    own = Launched(Place(0, 0, 0), 4, "host", 1)
    meeting = InstantMeeting()
    for index in (0, 1):
        arrive(meeting, Place(index, 0, index))
    run, devices = gathered(meeting, own, 6.0)
    assert [device.who for device in devices[:2]] == [f"device 0 ({HOST})", f"device 1 ({HOST})"]
    told = ["device 0", "device 1", "rank 2 (place unknown)", "rank 3 (place unknown)"]
    run.write(tmp_path)
    for each in (devices, devices_of([tmp_path])[1]):
        assert [device.place for device in each] == told
    nodes = node_document(run, devices, judged(devices)).tables()["nodes"]
    assert [(row["node"], row["host"]) for row in nodes] == [("unknown", ""), (0, HOST)]


def test_all_go_on_together_only_when_all_are_well():
    well, complete = {"failure": None, "complete": False}, {"failure": None, "complete": True}
    assert joint_decision({0: well, 1: complete}) == GO
    assert joint_decision({0: complete, 1: complete}) == COMPLETE
    assert (
        joint_decision({0: well, 1: {"failure": "lost", "complete": False}, 2: None}) == "rank 1, 2 did not come so far"
    )


def test_launchers_tell_a_rank_its_place():
    by_torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "h"}
    by_torchrun |= {"MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert launched(by_torchrun) == Launched(Place(5, 1, 1), 8, "h", 1234, meets_agent=True)
    by_srun = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    by_srun |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "4711"}
    assert launched(by_srun) == Launched(Place(9, 1, 1), 16, "gpu07", 29400 + 711)
    told = by_srun | {"MASTER_ADDR": "gpu08", "MASTER_PORT": "1234"}
    assert launched(told) == Launched(Place(9, 1, 1), 16, "gpu08", 1234)
    assert launched({}) is None
    assert launched(by_torchrun | {"WORLD_SIZE": "1"}) is None
    assert launched(by_srun | {"SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_JOB_ID", "MASTER_PORT"])
def test_a_launcher_that_tells_no_number_is_quoted(name):
    told = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NODELIST": "gpu07", name: "12x"}
    with pytest.raises(UsageError, match=f"{name}='12x' in the environment"):
        launched(told)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu01", "gpu01"), ("gpu[01-03,07],cpu1", "gpu01"), ("a,b", "a"), ("rack[2,5]-n1", "rack2-n1"), ("", "")],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--formt", "json"], "did you mean --format"),
        (["--from", "nowhere"], "nowhere is not a folder"),
        (["--from", "."], "no logs of 'mamf node' in ."),
        (["--resume", "nowhere"], "nowhere is not a folder"),
        (["--backend", "simulated", "--resume", "full"], "no logs of 'mamf node' in full"),
        (["--resume", "a", "--output-folder", "b"], "leave --output-folder out"),
        (["--baseline", "nothing.jsonl"], "cannot read nothing.jsonl"),
        (["--kernel", "torch.mn"], "unknown kernel 'torch.mn'"),
        (["--backend", "simulatd"], "did you mean 'simulated'"),
        (["--backend", "simulated", "--devices", "7"], "simulated has no device 7; it has 4"),
        (["--backend", "simulated", "--output-folder", "full"], "full is not empty"),
    ],
)
def test_bad_options_are_3_since_2_is_a_bad_device(run, arguments, told):
    (run.folder / "full").mkdir()
    (run.folder / "full" / "log.txt").touch()
    code, out, err = run("node", *arguments)
    assert (code, out) == (3, "")
    assert told in err
    assert len(err.splitlines()) == 1


def test_what_cannot_be_measured_is_no_fault_of_a_device(run, monkeypatch):
    faulty(monkeypatch, 2)
    code, out, _ = run(*NODE, "--dtype", "fp99")
    assert code == 3
    assert "what was asked for cannot be measured: unknown dtype 'fp99'" in out.splitlines()[0]


def test_a_disk_that_is_full_in_the_end_costs_no_verdict(run, monkeypatch):
    faulty(monkeypatch, 2)
    write = Run.write

    def written(run, folder):
        if run.is_over:
            raise RunLogWriteError(f"cannot write {folder}/run.json: No space left on device")
        write(run, folder)

    monkeypatch.setattr(Run, "write", written)
    code, out, err = run(*NODE, "--format", "json")
    assert (code, json.loads(out)["level"]) == (0, "OK")
    assert "mamf: cannot write logs/run.json: No space left on device" in err


def test_a_dry_run_says_what_it_would_do(run, tmp_path):
    code, out, _ = run("node", "--backend", "simulated", "--output-folder", "logs", "--dry-run", "--quick")
    assert code == 0
    assert "devices: 4 of simulated (0, 1, 2, 3), one process each" in out
    plan, _ = DeviceRun(simulated_node.Node(0), Place(0, 0, 0), tmp_path)._find_plan(None)
    assert f"each: find ({plan.budget_seconds:.0f} s)" in out
    assert not (run.folder / "logs").exists()


@pytest.mark.parametrize(("option", "begun"), [((), 0), (("--overlap",), 1), (("--overlap", "--dry-run"), 0)])
def test_overlap_follows_the_verdict(run, monkeypatch, option, begun):
    faulty(monkeypatch, 1)
    commands = []
    monkeypatch.setattr("mamf.cli.commands.node.call", commands.append)
    monkeypatch.setattr("mamf.cli.commands.node.node_measuring.run", lambda options: 1)
    assert run("node", "--backend", "simulated", *option)[0] == 1
    assert commands == [["overlap", "--backend", "simulated"]] * begun
