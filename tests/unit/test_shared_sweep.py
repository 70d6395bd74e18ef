"""``--devices``: a run that several devices share: rows name theirs, are compared by a reference, and none is lost."""

import csv
import io
import json
import math
import time
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import simulated_node
import virtual_pool
from contribution_logs import found
from forked import LONGEST_SECONDS, Child
from made_plans import sweep_plan

from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.share import compute_drift, mamfu
from mamf.cli.interruption import EXIT_CODE
from mamf.cli.progress import Progress
from mamf.engine.measure import measure
from mamf.engine.regimes import Burst, StoppingRule
from mamf.engine.strategies.shapes import Sweep
from mamf.errors import UnavailableError, UsageError
from mamf.kinds.registry import chart_of
from mamf.logs.compare import compare
from mamf.logs.entries import entries
from mamf.logs.plan_records import plan_record
from mamf.logs.recording import header_of
from mamf.logs.records import ceiling_record
from mamf.logs.run_log import DeviceSpeed, device_speeds, read_run_log, with_device_speeds
from mamf.logs.writer import RunLogWriter
from mamf.node.children import PHASE, WAITS, Event
from mamf.node.sharing import DEVICE, DevicePool, SharedSweep, assignment
from mamf.operations import unknown
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins import discovery
from mamf.report.devices import device_lines
from mamf.report.rows import ranked
from mamf.statistics import student_t
from mamf.testing import Physics, SimulatedAttention, SimulatedMatmul

SWEEP = ["sweep", "--backend", "simulated", "--output", "log.jsonl", "--devices", "all"]
GRID = ["--m-range", "8192", "20480", "1024", "--n", "16384", "--k", "16384", "--precision", "20%"]
GRID_SHAPES = [MatmulShape(m, 16384, 16384) for m in range(8192, 20480, 1024)]
#: How fast the devices are to the first.
SPEEDS = (1.0, 1.03, 0.98, 1.01)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    simulated_node.install(monkeypatch)
    monkeypatch.setitem(simulated_node.POINTS[discovery.BACKENDS], "simulated", "test_shared_sweep:Card")
    unknown._installed.cache_clear()
    yield
    unknown._installed.cache_clear()


class Card(simulated_node.Node):
    def __init__(self, index=0):
        super().__init__(index)
        speed = SPEEDS[index]
        self.world = replace(Physics(), flop_per_cycle_per_unit=round(4096 * speed), bandwidth=3e12 * speed)
        self.info = replace(self.info, uuid_hash=f"card{index}", driver="580.1")


@pytest.fixture
def shared(run):
    """Run a command on simulated devices that share it in virtual time; returns what it said, and its log."""

    def command(*arguments, backends=Card, gone=(), hangs=(), on_row=None):
        with pytest.MonkeyPatch.context() as patch:
            virtual_pool.install(patch, backends, gone, hangs)
            if on_row:
                patch.setattr(Progress, "add", on_row)
            said = run(*arguments)
        return said, read_run_log(run.folder / "log.jsonl")

    return command


def own(log):
    return [row for row in log.measurements if not row.is_reference]


def test_two_processes_share_a_sweep_and_its_log_is_one(run, monkeypatch):
    monkeypatch.setattr("mamf.node.children.started", Child)
    monkeypatch.setenv(simulated_node.DEVICES, "2")
    code, out, err = run(*SWEEP, *GRID)
    assert (code, err) == (0, "")
    log = read_run_log(run.folder / "log.jsonl")
    assert log.tier == "complete"
    assert len(own(log)) == len(log.plan.shapes) == 12
    assert {row.device for row in own(log)} <= {0, 1}
    assert [device.index for device in log.devices] == [0, 1]
    assert "burst bfloat16: device 1 " in out


def test_shapes_are_dealt_out_and_the_best_is_chosen_as_of_the_first(shared):
    (code, out, err), log = shared(*SWEEP, *GRID)
    assert (code, err) == (0, "")
    assert {row.shape for row in own(log)} == set(log.plan.shapes)
    assert len(own(log)) == len(log.plan.shapes)
    assert [sum(row.device == device for row in own(log)) for device in range(4)] == [3, 3, 3, 3]
    for row in log.measurements:
        assert row.device_speed == pytest.approx(SPEEDS[row.device], rel=0.002)
    best = max(own(log), key=lambda row: row.comparable_rate)
    assert log.summary["best"]["burst"]["shape"] == str(best.shape)
    assert log.summary["best"]["burst"]["device"] == best.device
    assert [device.uuid_hash for device in log.devices] == ["card0", "card1", "card2", "card3"]
    assert "device 2: Simulated H100, 132 compute units, 700 W limit, uuid card2" in out
    assert f"1980 MHz; {best.conditions.watts:.0f} W; {best.conditions.celsius:.0f} C; device {best.device}" in out


def with_common(plan):
    """A plan whose reference is what devices are compared on."""
    _, shape = plan.common(plan.problem.dtype)
    return replace(plan, options=replace(plan.options, reference=shape))


def test_four_devices_measure_at_least_3_7_times_as_many_shapes_a_second(monkeypatch):
    pools = virtual_pool.install(monkeypatch, Card)
    shapes = tuple(MatmulShape(m, 32768, 32768) for m in range(16384, 16384 + 160 * 64, 64))
    plan = sweep_plan(shapes, MatmulProblem(), precision=0.2)
    with DevicePool("simulated", range(4)) as pool:
        rows = list(SharedSweep(with_common(plan), pool, "simulated.mm").results())
    alone = Card(0)
    assert {row.shape for row in rows} == {row.shape for row in Sweep(plan, SimulatedMatmul(), alone).results()}
    assert sum(not row.is_reference for row in rows) == 160
    together = max(device.backend.now() for device in pools[0].processes.values())
    assert alone.now() / together >= 3.7


# -- devices that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [False, True], ids=["gone", "hangs"])
def test_a_device_that_fails_leaves_its_shapes_to_a_resumed_run(shared, hangs):
    (code, _, err), log = shared(*SWEEP, *GRID, **({"hangs": (1,)} if hangs else {"gone": (1,)}))
    assert code == 1
    assert len(own(log)) == 9 and 1 not in {row.device for row in own(log)}
    reason = (
        "it hangs: silent for 300 s (measuring)"
        if hangs
        else "it ended while it measured (measuring): killed by signal 9"
    )
    assert err.startswith(f"mamf: device 1 failed: {reason}\n")
    assert log.summary["reason"] == "device 1 failed; --resume measures the rest"
    (code, _, _), log = shared("sweep", "--resume", "log.jsonl", "--devices", "0", "2")
    assert (code, log.tier, len(own(log))) == (0, "complete", 12)


def test_a_device_that_cannot_be_opened_is_named_and_the_rest_share(run, monkeypatch):
    monkeypatch.setattr("mamf.node.children.started", Child)
    monkeypatch.setenv(simulated_node.DEVICES, "2")
    monkeypatch.setenv(simulated_node.FAULTS, json.dumps({"1": "closed"}))
    code, _, err = run(*SWEEP, *GRID)
    log = read_run_log(run.folder / "log.jsonl")
    assert (code, len(own(log)), [device.index for device in log.devices]) == (0, 12, [0])
    assert err == "mamf: device 1 failed: the device cannot be opened\n"


class Lost(Card):
    """Gone after a few launches, for all that is asked of it."""

    def synchronize(self):
        if self.launches > 20:
            raise RuntimeError("CUDA error: device lost")
        super().synchronize()


def test_every_device_that_can_be_is_opened_before_any_measures(monkeypatch):
    cards = [Card(0).info, replace(Card(1).info, name="another model")]
    opened = [Event(rank, {PHASE: WAITS, DEVICE: asdict(info)}) for rank, info in enumerate(cards)]
    events = iter([opened[0], Event(0, None, -9), opened[1]])
    children = Namespace(next=lambda seconds: next(events))
    monkeypatch.setattr(DevicePool, "_started", lambda pool: children)
    monkeypatch.setattr(DevicePool, "__exit__", lambda pool, *raised: None)
    with (
        pytest.raises(UsageError, match="0 is a Simulated H100, 1 is a another model"),
        DevicePool("simulated", [0, 1]),
    ):
        pass


class Missing(Card):
    """A device that cannot be opened, where it is the first."""

    def __init__(self, index=0):
        if index == 0:
            raise UnavailableError("the device cannot be opened")
        super().__init__(index)


def test_a_log_whose_first_device_cannot_be_opened_is_gone_on_with_by_the_others(run, shared, monkeypatch):
    _, before = shared(*SWEEP, *GRID, "--devices", "0", "1", "--budget", "1s")
    assert before.tier == "interrupted"
    monkeypatch.setattr("mamf.node.children.started", Child)
    monkeypatch.setitem(simulated_node.POINTS[discovery.BACKENDS], "simulated", "test_shared_sweep:Missing")
    code, _, err = run("sweep", "--resume", "log.jsonl")
    log = read_run_log(run.folder / "log.jsonl")
    assert (code, log.tier, len(own(log))) == (0, "complete", 12)
    assert err == "mamf: device 0 failed: the device cannot be opened\n"


class Stuck(Card):
    """In a launch that never ends."""

    def compute(self, cycles, operands):
        Path("stuck").touch()
        time.sleep(LONGEST_SECONDS)


def test_a_device_in_a_launch_that_never_ends_is_let_go_when_the_one_is_gone_who_leads_it(run, monkeypatch):
    monkeypatch.setattr("mamf.node.children.started", Child)
    monkeypatch.setitem(simulated_node.POINTS[discovery.BACKENDS], "simulated", "test_shared_sweep:Stuck")
    plan = sweep_plan((MatmulShape(8192, 8192, 8192),), MatmulProblem())
    with DevicePool("simulated", [0]) as pool:
        pool.send(0, assignment(plan, "simulated.mm", [0], {}))
        while not (run.folder / "stuck").exists():
            time.sleep(0.001)
        pool._children.dismiss()  # as where the leader is killed
        assert pool._children.processes[0].wait(10) == EXIT_CODE


def test_a_device_that_is_lost_in_a_row_costs_that_row(shared):
    (code, _, err), log = shared(*SWEEP, *GRID, backends=lambda index: (Lost if index == 2 else Card)(index))
    assert code == 1
    (lost,) = (row for row in own(log) if not row.ok)
    assert lost.device == 2
    assert err.startswith(f"mamf: device 2 failed: simulated.mm at {lost.shape} lost the device (RuntimeError: CUDA")


def test_if_every_device_fails_the_log_says_so_and_can_be_resumed(shared):
    (code, _, err), log = shared(*SWEEP, *GRID, "--devices", "0", "1", gone=(0, 1))
    assert code == 1
    assert log.summary["reason"] == "device 0, device 1 failed; --resume measures the rest"
    assert err.count(" failed: ") == 2
    (code, _, _), log = shared("sweep", "--resume", "log.jsonl")
    assert (code, log.tier, len(own(log))) == (0, "complete", 12)


class Crashes(Card):
    """Whose process one shape ends by a signal, or every shape from a size on."""

    least, most = GRID_SHAPES[3].m, GRID_SHAPES[3].m

    def compute(self, cycles, operands):
        if self.least <= operands[0].m <= self.most:
            raise virtual_pool.Ended(-11)
        super().compute(cycles, operands)


class CrashesOften(Crashes):
    most = 10**6


def test_a_crash_costs_its_row_and_a_resumed_run_measures_the_rest(shared):
    (code, _, err), log = shared(*SWEEP, *GRID, backends=Crashes)
    assert code == 1
    (row,) = (row for row in own(log) if not row.ok)
    assert (row.shape, row.reason) == (GRID_SHAPES[3], "crashed the process (SIGSEGV)")
    assert err.count(f"simulated.mm at {row.shape} crashed the process (SIGSEGV)") == 1
    (code, _, _), log = shared("sweep", "--resume", "log.jsonl", backends=Crashes)
    assert (code, log.tier, len(own(log))) == (0, "complete", 12)


def test_a_kernel_that_crashes_every_process_is_left_out_after_three_times(shared):
    for arguments in ([*SWEEP, *GRID], *[["sweep", "--resume", "log.jsonl"]] * 3):
        (code, _, _), log = shared(*arguments, backends=CrashesOften)
    assert (code, log.tier, len(own(log))) == (0, "complete", 12)
    assert {row.shape for row in own(log) if row.ok} <= set(GRID_SHAPES[:3])
    assert sum(row.reason == "ended the process three times: not launched" for row in own(log)) > 5


# -- as any other run --------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_every_row_and_a_resumed_run_is_whole(shared):
    def interrupt(progress, row):
        if row.shape == GRID_SHAPES[5]:
            raise KeyboardInterrupt

    (code, _, _), log = shared(*SWEEP, *GRID, on_row=interrupt)
    assert (code, log.summary["status"], log.summary["reason"]) == (130, "interrupted", "by the user")
    assert log.summary["left"] == 12 - len(own(log)) > 0
    (code, _, _), log = shared("sweep", "--resume", "log.jsonl")
    assert (code, log.tier) == (0, "complete")
    assert len(own(log)) == len(set(GRID_SHAPES)) == 12
    assert [device.index for device in log.devices] == [0, 1, 2, 3]


def test_a_budget_leaves_the_rest_for_later(shared):
    (code, _, _), log = shared(*SWEEP, *GRID, "--budget", "2s")
    assert (code, log.summary["reason"]) == (0, "the budget ended")
    assert 0 < len(own(log)) == 12 - log.summary["left"] < 12


def test_its_log_is_shown_drawn_compared_and_checked_as_any(run, shared):
    shared(*SWEEP, *GRID, "--regime", "burst", "sustained")
    path = run.folder / "log.jsonl"
    assert found(path) == {"simulated"}
    shown = run("show", "log.jsonl")[1]
    assert "sustained bfloat16: device 1 " in shown
    rows = list(csv.DictReader(io.StringIO(run("show", "log.jsonl", "--format", "csv")[1])))
    assert {row["device"] for row in rows} == {"0", "1", "2", "3"}
    assert float(rows[0]["device_speed"]) > 0.9
    chart = chart_of(read_run_log(path))
    assert "devices 0 1 2 3, figures as of the first" in chart.subtitle
    points = [
        point.y for panel in chart.panels for line in panel.lines for point in line.points if "burst" in line.name
    ]
    assert max(points) / min(points) < 1.06


def test_rows_of_two_devices_are_compared_after_the_correction_and_it_is_said(run, shared):
    shared(*SWEEP, *GRID)
    run("sweep", "--backend", "simulated", *GRID, "--output", "alone.jsonl")
    shared_log, alone = (read_run_log(run.folder / name) for name in ("log.jsonl", "alone.jsonl"))
    compared = compare(shared_log, alone)
    crossed = [pair for pair in compared.pairs if not pair.is_same_device]
    assert len(compared.pairs) == 12
    assert 0 < len(crossed) < 12
    assert all(pair.ratio == pytest.approx(1.0, abs=0.004) for pair in compared.pairs)
    code, out, _ = run("compare", "log.jsonl", "alone.jsonl")
    assert code == 0
    assert "two devices: A is corrected by the reference that both measured" in out
    one_and_the_same = compare(shared_log, shared_log)
    assert all(pair.is_same_device and pair.ratio == 1 for pair in one_and_the_same.pairs)


def test_rows_are_compared_with_the_device_that_the_header_names(shared):
    _, log = shared(*SWEEP, *GRID)
    log.header["device"] = asdict(log.devices[2])
    speeds = {entry.device: entry.device_speed for entry in entries(log)}
    of_own = {f"card{device}": speed / SPEEDS[2] for device, speed in enumerate(SPEEDS) if device != 2}
    assert speeds == pytest.approx({"": 1.0, **of_own}, rel=0.003)


def test_what_was_never_compared_is_ranked_last_and_not_paired(run, shared):
    _, log = shared(*SWEEP, *GRID)
    visits = [row for row in log.measurements if row.is_reference and row.device != 1]
    rows = with_device_speeds([*visits, *own(log)])
    last = [row.device_speed is None for row in ranked(rows)]
    assert last == sorted(last)
    assert last.count(True) == sum(row.device == 1 for row in own(log)) > 0
    assert "not compared, and ranked after the others: device 1" in device_lines(rows, log.header)
    run("sweep", "--backend", "simulated", *GRID, "--output", "alone.jsonl")
    compared = compare(replace(log, measurements=rows), read_run_log(run.folder / "alone.jsonl"))
    assert {there.status for _, there in compared.only_b} == {"of a device that was never compared"}
    assert len(compared.only_b) == last.count(True) and compared.pairs


def edited(path, change):
    """The log after a change of its records."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def without_devices(records):
    del records[0]["devices"]


def without_some_devices(records):
    for record in records:
        if record.get("regime") == "sustained":
            del record["device"]


@pytest.mark.parametrize("change", [without_devices, without_some_devices])
def test_rows_that_lost_their_device_are_shown_all_the_same(run, shared, change):
    shared(*SWEEP, *GRID, "--regime", "burst", "sustained")
    edited(run.folder / "log.jsonl", change)
    for form in ("table", "markdown", "csv", "json"):
        code, out, err = run("show", "log.jsonl", "--top", "all", "--format", form)
        assert (code, err.partition("log: ")[0]) == (0, "")
        assert "8192" in out


def test_what_the_reference_does_not_tell_is_in_every_corrected_interval(run, shared):
    (_, out, _), log = shared(*SWEEP, *GRID)
    speeds = device_speeds(log.measurements)["burst", "bfloat16"]
    visits = {row.device: row.relative_half_width for row in log.measurements if row.is_reference}
    assert speeds[0][:2] == (1.0, 0.0)
    for device in (1, 2, 3):
        assert speeds[device].half_width == pytest.approx(math.hypot(visits[device], visits[0]))
    factor, half_width, _ = speeds[1]
    assert f"device 1 {100 * factor - 100:+.2f} +-{100 * factor * half_width:.2f} %" in out
    for row in own(log):
        width = row.comparable_interval.half_width / row.comparable_seconds
        of_speed = speeds[row.device].half_width_at(row.amount)
        assert width == pytest.approx(math.hypot(row.relative_half_width, of_speed), rel=0.01)
    run("sweep", "--backend", "simulated", *GRID, "--output", "alone.jsonl")
    alone = read_run_log(run.folder / "alone.jsonl")
    uncorrected = {entry.key: entry.error.own for entry in entries(log)}
    for pair in compare(log, alone).pairs:
        error = math.hypot(uncorrected[pair.a.key], pair.b.error.own, pair.a.device_speed_half_width / 1.96)
        expected = (
            student_t(pair.a.error.degrees) * math.hypot(error, pair.design.factor * pair.a.error.common)
            + pair.by_temperature
        )
        assert math.log(pair.interval.high / pair.ratio) == pytest.approx(expected)
        assert (pair.a.device_speed_half_width > 0) == (not pair.is_same_device)


def test_how_far_apart_devices_are_on_less_work_than_the_references_is_between_that_and_nothing():
    slow = DeviceSpeed(0.975, 0.003, work=343e9)
    assert slow.half_width_at(343e9) == slow.half_width_at(700e9) == 0.003
    for work, factor in ((137e9, 0.982), (69e9, 0.987), (34e9, 1.0)):  # of two H200
        assert slow.factor * (1 + slow.half_width_at(work)) >= factor
    assert DeviceSpeed(1.0, 0.003, work=343e9).half_width_at(1e9) == 0.003


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--devices", "0", "9"], "simulated has no device 9; it has 4; use --devices 0"),
        (["--devices", "all", "0"], "--devices: 'all' or some, not both"),
        (["--devices", "one"], "'one' is not a number from 0"),
        (["--devices", "0", "1", "--device", "1"], "--device names one device, --devices several"),
        (["--devices", "0", "1", "--patience", "soon"], "'soon' is not a duration"),
    ],
)
def test_bad_devices_are_a_line(run, arguments, told):
    code, out, err = run("sweep", "--backend", "simulated", *arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_log_is_gone_on_with_by_the_devices_that_it_was_begun_by(run, shared):
    shared(*SWEEP, *GRID, "--devices", "0", "1", "--budget", "1s")
    for devices in (["--devices", "2"], ["--device", "0"]):
        code, _, err = run("sweep", "--resume", "log.jsonl", *devices)
        assert (code, err.count("was measured by devices 0 1: resume it without")) == (2, 1)
    run("sweep", "--backend", "simulated", *GRID, "--budget", "1s", "--output", "alone.jsonl")
    code, _, err = run("sweep", "--resume", "alone.jsonl", "--devices", "all")
    assert (code, err.count("was measured by one device")) == (2, 1)


def test_a_card_that_is_another_than_the_logs_goes_on_with_nothing(run, shared):
    _, before = shared(*SWEEP, *GRID, "--budget", "1s")

    def changed(index):
        backend = Card(index)
        backend.info = replace(backend.info, uuid_hash="another" if index == 3 else backend.info.uuid_hash)
        return backend

    (code, _, err), log = shared("sweep", "--resume", "log.jsonl", backends=changed)
    assert (code, err) == (
        2,
        "mamf: log.jsonl was measured with device uuid_hash card3, not another; start a new log\n",
    )
    assert log.summary == before.summary


def test_cards_of_two_models_share_no_run(run, monkeypatch):
    def other(index):
        backend = Card(index)
        backend.info = replace(backend.info, name="Simulated H200" if index == 2 else backend.info.name)
        return backend

    virtual_pool.install(monkeypatch, other)
    code, _, err = run(*SWEEP, *GRID)
    assert (code, err.count("sweep each model separately")) == (2, 1)
    assert not (run.folder / "log.jsonl").exists()


def test_one_device_is_an_ordinary_run(run):
    code, _, _ = run("sweep", "--backend", "simulated", *GRID, "--devices", "2", "--output", "log.jsonl")
    log = read_run_log(run.folder / "log.jsonl")
    assert (code, log.header["device"]["index"], log.devices) == (0, 2, [])
    assert all(row.device is None for row in log.measurements)


def test_a_dry_run_says_who_shares_it(run):
    code, out, _ = run(*SWEEP, *GRID, "--dry-run")
    assert code == 0
    assert "devices: 0 1 2 3, one process each, compared by a shared reference" in out
    assert not (run.folder / "log.jsonl").exists()


# -- kernels of an operation -------------------------------------------------------------------------------------------

SHAPES = ["--shapes", "64MiB", "256MiB", "1GiB", "2GiB", "--set", "pattern=copy,read"]
BANDWIDTH = ["sweep", "--operation", "bandwidth", "--backend", "simulated", "--output", "log.jsonl", "--devices", "all"]


def test_kernels_of_any_operation_are_compared_on_a_row_of_the_plan(run, shared):
    (code, out, err), log = shared(
        *BANDWIDTH, "--shapes", "64MiB", "256MiB", "1GiB", "2GiB", "--set", "pattern=copy,read"
    )
    assert (code, err) == (0, "")
    assert len(own(log)) == 8
    visits = [row for row in log.measurements if row.is_reference]
    assert {(row.problem.pattern, str(row.shape)) for row in visits} == {("copy", "1GiB")}
    assert {row.device for row in visits} == {row.device for row in own(log)}
    assert log.summary["measured"] == 8
    assert "by the reference 1GiB, simulated-bandwidth" in out
    assert found(run.folder / "log.jsonl") == {"simulated"}
    again = run("sweep", "--operation", "bandwidth", "--resume", "log.jsonl")
    assert again[0] == 0
    assert len(read_run_log(run.folder / "log.jsonl").measurements) == len(log.measurements)
    assert run("bandwidth", "--resume", "log.jsonl")[0] == 0


ATTENTION = [
    "attention",
    "--backend",
    "simulated",
    "--output",
    "log.jsonl",
    "--devices",
    "all",
    "--head-dims",
    "64",
    "128",
]
LENGTHS = ["--seq-lens", "1024", "2048", "4096", "8192"]


class SlowAttention(SimulatedAttention):
    name = "slow-attention"
    share = 0.35


@pytest.fixture
def attention_kernels(monkeypatch):
    kernels = {
        "simulated-attention": "mamf.testing:SimulatedAttention",
        "slow-attention": "test_shared_sweep:SlowAttention",
    }
    monkeypatch.setitem(simulated_node.POINTS, discovery.ATTENTION_KERNELS, kernels)


def by_shape(log):
    shapes = {}
    for row in own(log):
        shapes.setdefault(row.shape, []).append(row)
    return shapes


def test_links_that_devices_share_are_measured_by_one(run):
    command = ["sweep", "--operation", "copies", "--backend", "simulated", "--output", "log.jsonl"]
    code, out, err = run(*command, "--devices", "0", "2")
    assert (code, out) == (2, "")
    assert "mamf: copies use links that all devices share" in err
    assert run(*command, "--devices", "2", "--shapes", "64MiB")[0] == 0


@pytest.mark.usefixtures("attention_kernels")
def test_kernels_of_one_shape_of_attention_are_of_one_device(run, shared):
    (code, out, err), log = shared(*ATTENTION, *LENGTHS, "--no-ceiling")
    assert (code, err) == (0, "")
    assert [len({row.device for row in rows}) for rows in by_shape(log).values()] == [1] * 8
    assert {row.shape for row in log.measurements if row.is_reference} == {log.plan.common("bfloat16")[1]}
    assert log.summary["measured"] == 16
    assert out.count("speed-up over slow-attention") == 8
    assert found(run.folder / "log.jsonl") == {"simulated"}


class OtherMatmul(SimulatedMatmul):
    """A third-party kernel that is not installed."""

    name = "other.mm"


def find_log(folder, kernel):
    """A log that holds a ceiling found with a kernel."""
    backend, shape, rule = Card(0), MatmulShape(8192, 8192, 8192), StoppingRule(0.003)
    row = measure(kernel, MatmulProblem(), shape, Burst(backend), backend.operand_pool("normal", 0), rule)
    figures = {"interval": row.rate_interval, "rounds": 3, "problem": row.problem, "kernel": row.kernel}
    ceiling = Ceiling("Simulated H100", "card0", regime="burst", shape=shape, rate=row.best_rate, **figures)
    header = header_of(backend, "", row.kernel, plan_record(sweep_plan((shape,), row.problem)))
    with RunLogWriter.create(folder / "find.jsonl", header) as writer:
        writer.write("ceiling", ceiling_record(ceiling))


@pytest.mark.usefixtures("attention_kernels")
def test_a_ceilings_product_is_visited_by_the_device_of_the_row_and_shares_are_of_the_first(run, shared):
    find_log(run.folder, SimulatedMatmul())
    (code, _, err), log = shared(*ATTENTION, *LENGTHS, "--ceiling", "find.jsonl")
    assert (code, err) == (0, "")
    shares = {each.kernel: [] for each in own(log)}
    for each in own(log):
        shares[each.kernel].append(mamfu(each, log.all_ceilings))
        assert abs(compute_drift(each, log.all_ceilings)) < 0.005
    assert len({each.device for each in own(log)}) > 1
    assert all(max(each) / min(each) < 1.01 for each in shares.values())
    assert found(run.folder / "log.jsonl") == {"simulated"}


@pytest.mark.usefixtures("attention_kernels")
def test_the_kernel_of_a_ceiling_is_named_to_all_devices_or_they_are_compared_by_another_row(run, shared):
    find_log(run.folder, OtherMatmul())
    asked = [*ATTENTION, "--seq-lens", "1024", "8192", "--ceiling", "find.jsonl"]
    (code, _, err), log = shared(*asked)
    assert (code, err.count("kernel other.mm of the ceiling is not installed")) == (0, 1)
    assert {row.shape for row in log.measurements if row.is_reference} == {log.plan.common("bfloat16")[1]}
    (run.folder / "log.jsonl").unlink()
    (code, _, err), log = shared(*asked, "--ceiling-kernel", "test_shared_sweep:OtherMatmul")
    assert (code, err) == (0, "")
    assert {row.kernel for row in log.measurements if row.is_reference} == {"other.mm"}


@pytest.mark.usefixtures("attention_kernels")
def test_a_ceiling_that_is_sought_is_sought_on_the_first(run, shared, monkeypatch):
    monkeypatch.setattr("mamf.cli.attention_plans.plan_for", simulated_node.short_plan)
    (code, _, err), log = shared(*ATTENTION, "--seq-lens", "1024", "8192", "--no-flush")
    assert (code, err) == (0, "")
    assert {row.device for row in log.measurements if row.phase} == {None}
    assert {row.device for row in own(log) if not row.phase} <= {0, 1, 2, 3}
    assert found(run.folder / "log.jsonl") == {"simulated"}


@pytest.mark.usefixtures("attention_kernels")
def test_a_search_that_was_broken_off_is_gone_on_with_by_its_own_device(run, shared, monkeypatch):
    monkeypatch.setattr("mamf.cli.attention_plans.plan_for", simulated_node.short_plan)
    (code, _, _), log = shared(*ATTENTION, "--seq-lens", "1024", "--no-flush", "--budget", "0.5s")
    assert (code, log.tier) == (1, "interrupted")
    code, _, err = run("attention", "--resume", "log.jsonl", "--devices", "1")
    told = (
        "log.jsonl lacks its ceiling, which is measured on device 0: resume with that device, or start a new log with"
    )
    assert (code, err.count(told)) == (2, 1)
    (code, _, _), log = shared("attention", "--resume", "log.jsonl")
    assert (code, log.tier) == (0, "complete")
