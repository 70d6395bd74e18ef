"""Test faulty backends, kernels and operations: mamf names the plugin and its fault, and skips only this plugin."""

import dataclasses
import inspect
import math
import signal
import sys
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

import mamf
from mamf.backend import Backend
from mamf.errors import MamfWarning, PluginError, describe_error
from mamf.kernel import Kernel, Verdict, Work
from mamf.logs.run_log import read_run_log
from mamf.operation import Operation
from mamf.operations import unknown
from mamf.operations.bandwidth.operation import BandwidthOperation, BandwidthProblem
from mamf.plugins import discovery
from mamf.testing import SimulatedAttention, SimulatedBackend, SimulatedMatmul
from mamf.testing.simulated_kernels import SimulatedBandwidth
from mamf.text import escape_invisible_characters

HERE = "test_faulty_plugins"


class FaultyBackend(SimulatedBackend):
    name = "faulty"


class FaultyMatmul(SimulatedMatmul):
    name = "faulty"


class DefaultMatmul(SimulatedMatmul):
    """A correct kernel that mamf chooses if the user names none."""

    is_default = True


class FaultyAttention(SimulatedAttention):
    name = "faulty"


@dataclasses.dataclass(frozen=True)
class FaultyProblem(BandwidthProblem):
    operation: ClassVar[str] = "faulty"


class FaultyKernel(SimulatedBandwidth):
    """A correct kernel of the faulty operation."""

    name = "right"
    operation = "faulty"


class FaultyOperation(BandwidthOperation):
    name = "faulty"
    kernel_group = "faulty.kernels"
    kernel_type = FaultyKernel
    problem_type = FaultyProblem


ENTRY_POINTS = {
    discovery.BACKEND_GROUP: {"faulty": "FaultyBackend"},
    discovery.MATMUL_KERNEL_GROUP: {"faulty": "FaultyMatmul", "right": "DefaultMatmul"},
    "mamf.attention_kernels": {"faulty": "FaultyAttention"},
    discovery.OPERATION_GROUP: {"faulty": "FaultyOperation"},
    "faulty.kernels": {"right": "FaultyKernel"},
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Register the plugins in POINTS, as an installed distribution would, in addition to mamf's own operations.

    Also shorten every run.
    """
    find_real_entry_points = discovery.find_entry_points

    def find_entry_points(group):
        plugins = [EntryPoint(name, f"{HERE}:{value}", group) for name, value in ENTRY_POINTS.get(group, {}).items()]
        return [*plugins, *(find_real_entry_points(group=group) if group == discovery.OPERATION_GROUP else [])]

    monkeypatch.setattr(discovery, "find_entry_points", find_entry_points)
    # Replace steps that take a tenth of a second in every run and do not matter here.
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 0.0)
    monkeypatch.setattr("mamf.machine.environment._read_checkout_commit", lambda: None)
    monkeypatch.setattr("mamf.engine.search.grid._SIZES_PER_DIMENSION", 8)
    traits_without_warm_in = dataclasses.replace(SimulatedBackend.burst_traits, warm_in_seconds=0.0)
    monkeypatch.setattr(SimulatedBackend, "burst_traits", traits_without_warm_in)
    unknown._get_installed_operation.cache_clear()
    yield
    unknown._get_installed_operation.cache_clear()


def raise_error(*arguments, **keywords):
    raise RuntimeError("it broke\nand on a second line says so")


def interrupt_first(kind, method):
    """Return the method of ``kind``, changed so that it raises SIGINT (Ctrl-C) first."""
    real_method = inspect.getattr_static(kind, method)

    def interrupted_method(*arguments, **keywords):
        signal.raise_signal(signal.SIGINT)
        return getattr(real_method, "__func__", real_method)(*arguments, **keywords)

    return interrupted_method


def exit_process(*arguments, **keywords):
    raise SystemExit(0)


def make_constant_method(value):
    return lambda *arguments, **keywords: value


FAULTS = {
    "raises": raise_error,
    "leaves": exit_process,
    "None": make_constant_method(None),
    "NaN": make_constant_method(math.nan),
}
#: Methods with a return value that mamf ignores.
METHODS_WITHOUT_RESULT = (
    "synchronize",
    "submit",
    "wait_for_mark",
    "flush_cache",
    "sleep",
    "reset_peak_memory",
    "release_cached_memory",
    "__init__",
)
SMALL = ["--m", "1024", "--n", "1024", "--k", "1024", "--time-limit", "0.01s"]
SWEEP = ["sweep", "--backend", "faulty", *SMALL, "--output", "run.jsonl"]
MATMUL = ["sweep", "--backend", f"{HERE}:FaultyBackend", *SMALL, "--output", "run.jsonl", "--kernel"]
ATTENTION = ["attention", "--backend", "faulty", "--seq-lens", "512", "--no-ceiling", "--output", "run.jsonl"]
OPERATION = ["sweep", "--operation", "faulty", "--backend", "faulty", "--time-limit", "0.01s", "--output", "run.jsonl"]
FIND = ["find", "--backend", "faulty", "--dry-run"]
KERNELS = ["kernels", "--backend", "faulty"]
RUN = ["run", f"{HERE}:FaultyMatmul", "--backend", "faulty", "--shape", "1024x1024x1024"]

BACKEND_METHODS = [
    *(
        "explain_unavailability",
        "count_devices",
        "read_device_name",
        "find_current_index",
        "synchronize",
        "submit",
        "record_mark",
        "wait_for_mark",
        "is_mark_reached",
        "compute_seconds_between",
    ),
    *(
        "record_idle_mark",
        "get_second_queue",
        "estimate_timer_overhead",
        "flush_cache",
        "make_operand_pool",
        "read_free_memory_bytes",
        "read_allocated_memory_bytes",
        "read_peak_memory_bytes",
    ),
    "read_peak_reserved_memory_bytes",
    *("open_profiler_window", "open_profiler_range", "explain_missing_counters", "compute_digest", "capture_graph"),
    *("reset_peak_memory", "is_out_of_memory", "release_cached_memory", "resolve_dtype", "explain_unsupported_dtype"),
    *(
        "explain_missing_compiler",
        "read_bus_address",
        "check_machine",
        "find_sharing_ways",
        "read_settings",
        "now",
        "sleep",
        "__init__",
    ),
]
KERNEL_METHODS = [
    "explain_unavailability",
    "explain_unsupported_problem",
    "explain_unsupported_shape",
    "list_variants",
    "apply_settings",
    "is_refusal",
    "prepare",
]
KERNEL_METHODS.append("__init__")
OPERATION_METHODS = [
    *(
        "choose_default_shapes",
        "make_problem",
        "find_max_possible_rate",
        "find_peak_rate",
        "may_be_ceiling",
        "make_columns",
        "find_axis_position",
        "parse_shape",
    ),
    *(
        "make_shape_record",
        "read_shape_record",
        "make_problem_record",
        "read_problem_record",
        "list_identifying_fields",
        "list_presets",
        "__init__",
    ),
    *("describe_problem", "describe_shape", "draw_random_case", "build_preset", "build_shapes", "complete_fields"),
]
TABLE = [
    *(
        (FaultyBackend, method, [SWEEP, ["doctor", "--backend", "faulty"], ["backends"], FIND])
        for method in BACKEND_METHODS
    ),
    (FaultyBackend, "find_current_index", [["peak", "--backend", "faulty"]]),
    (FaultyBackend, "open_profiler_window", [RUN]),
    (FaultyBackend, "compute_digest", [[*RUN, "--determinism"]]),
    (
        FaultyBackend,
        "explain_missing_counters",
        [["counters", *RUN[1:], "--ncu", sys.executable, "--output", "run.jsonl"]],
    ),
    *((FaultyMatmul, method, [[*MATMUL, "faulty"], KERNELS, FIND]) for method in KERNEL_METHODS),
    *((FaultyAttention, method, [ATTENTION]) for method in KERNEL_METHODS),
    *((FaultyOperation, method, [OPERATION, ["show", "run.jsonl"]]) for method in OPERATION_METHODS),
    *((FaultyProblem, method, [OPERATION]) for method in ("compute_work", "list_buffers", "count_bytes")),
]


def name_case(case):
    kind, method, commands = case
    return f"{kind.__name__}.{method}-{commands[0][0]}"


CASES = [pytest.param(*case, id=name_case(case)) for case in TABLE]
FAULTY_CASES = [
    pytest.param(*case, fault, id=f"{name_case(case)}-{name}")
    for case in TABLE
    for name, fault in FAULTS.items()
    if name in ("raises", "leaves") or case[1] not in METHODS_WITHOUT_RESULT
]


def plant_fault(monkeypatch, kind, method, fault):
    is_class_method = method in (
        "explain_unavailability",
        "count_devices",
        "read_device_name",
        "find_current_index",
    ) and issubclass(kind, SimulatedBackend)
    monkeypatch.setattr(kind, method, classmethod(fault) if is_class_method else fault)


@pytest.mark.parametrize(("kind", "method", "commands", "fault"), FAULTY_CASES)
def test_a_fault_is_reported_in_a_line_that_names_the_plugin(run, monkeypatch, tmp_path, kind, method, commands, fault):
    plant_fault(monkeypatch, kind, method, fault)
    for command in commands:
        if command[0] == "show" and not (tmp_path / "run.jsonl").exists():
            continue
        code, out, err = run(*command)
        assert code in (0, 1, 2)
        assert "Traceback" not in out + err
        if code:
            assert "faulty" in out + err
        assert len(err.splitlines()) <= 2, err
    assert all(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "method", "commands"), CASES)
def test_ctrl_c_from_within_a_plugin_ends_the_run_with_its_log(run, monkeypatch, tmp_path, kind, method, commands):
    with monkeypatch.context() as patch:
        plant_fault(patch, kind, method, interrupt_first(kind, method))
        code, out, err = run(*commands[0])
    unknown._get_installed_operation.cache_clear()
    assert code in (0, 130)
    assert "Traceback" not in out + err
    for path in tmp_path.iterdir():
        assert read_run_log(path).is_truncated is False


# -- exact messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method", "fault", "command", "message"),
    [
        (
            FaultyBackend,
            "read_settings",
            raise_error,
            SWEEP,
            "backend faulty is broken: read_settings raised RuntimeError: it broke",
        ),
        (
            FaultyBackend,
            "__init__",
            raise_error,
            SWEEP,
            "backend faulty is broken: opening it raised RuntimeError: it broke",
        ),
        (
            FaultyMatmul,
            "__init__",
            raise_error,
            [*MATMUL, "faulty"],
            "kernel faulty is broken: creating it raised RuntimeError",
        ),
        (
            FaultyMatmul,
            "explain_unsupported_problem",
            raise_error,
            [*MATMUL, "faulty"],
            "kernel faulty is broken: explain_unsupported_problem raised",
        ),
        (
            FaultyProblem,
            "compute_work",
            make_constant_method(Work(0, 0, "")),
            OPERATION,
            "it reports 0 as the work of a launch",
        ),
        (
            FaultyOperation,
            "make_columns",
            make_constant_method({"a": object()}),
            OPERATION,
            "returned a dict, not a mapping of names to texts and finite numbers",
        ),
        (
            FaultyOperation,
            "name",
            "other",
            OPERATION,
            "its class has the name 'other', but its entry point has the name 'faulty'",
        ),
        (FaultyMatmul, "operation", None, RUN, f"kernel {HERE}:FaultyMatmul is broken: operation is None, not str"),
    ],
)
def test_the_message_names_the_plugin_and_its_fault(run, monkeypatch, kind, method, fault, command, message):
    monkeypatch.setattr(kind, method, fault)
    code, out, err = run(*command)
    assert code == 2
    assert message in out + err


def make_clock(right_count, make_time):
    """Return a method ``now`` that is right ``right_count`` times, and then returns ``make_time(last right time)``."""
    real_now, right_times = SimulatedBackend.now, []

    def now(self):
        if len(right_times) < right_count:
            right_times.append(real_now(self))
            return right_times[-1]
        return make_time(right_times[-1])

    return now


@pytest.mark.parametrize("regime", ["burst", "sustained", "classic"])
@pytest.mark.parametrize(
    ("make_time", "message"),
    [
        (lambda last: math.nan, "backend faulty is broken: now returned nan, not a finite number"),
        (lambda last: last - 1, "its last value"),
        (
            lambda last: last,
            "backend faulty is broken: its method now returned the same time during 20 rounds of launches",
        ),
    ],
    ids=["NaN", "goes back", "stands still"],
)
def test_a_clock_that_fails_within_a_visit_is_reported_and_ends_it(
    run, monkeypatch, tmp_path, regime, make_time, message
):
    monkeypatch.setattr(FaultyBackend, "now", make_clock(30, make_time))
    monkeypatch.setattr(FaultyBackend, "burst_traits", Backend.burst_traits)  # these traits include a warm-in
    large = [word.replace("1024", "8192") for word in SWEEP[1:]]
    code, out, err = run("sweep", "--regime", regime, *large)
    log = read_run_log(tmp_path / "run.jsonl")
    assert message in out + err + "".join(row.reason for row in log.measurements)
    assert (code, log.tier) in ((1, "complete"), (2, "interrupted"))
    assert log.summary is not None


# -- exceptions of unusual classes -------------------------------------------------------------------------------------


class UnknownException(BaseException):
    """An exception that does not derive from Exception and that no library knows."""


class UnreadableError(Exception):
    def __str__(self):
        raise SystemExit(0)


ERROR_BY_REASON = {
    "SystemExit: 0": SystemExit(0),
    "KeyboardInterrupt: by itself": KeyboardInterrupt("by itself"),
    "UnknownException: \x1b[2Jit broke": UnknownException("\x1b[2Jit broke\nsecond line"),
    "UnreadableError: its message cannot be read": UnreadableError(),
    f"RuntimeError: {1000 * 'x'}": RuntimeError(10**6 * "x"),
}
SWEEP_OF_TWO_SHAPES = [*MATMUL[:3], "--m", "1024", "512", *MATMUL[5:], "faulty"]


def break_kernel(monkeypatch, place, error):
    """Let the faulty kernel raise ``error`` for the shape with M = 1024, and work for other shapes.

    ``place``: where it raises the error: in ``prepare``, or in this attribute of the prepared kernel.
    """
    real_prepare = SimulatedMatmul.prepare

    def raise_given_error(*arguments):
        raise error

    def prepare_faulty(self, backend, problem, shape, *arguments):
        if shape.m != 1024:
            return real_prepare(self, backend, problem, shape, *arguments)
        if place == "prepare":
            raise error
        ready = real_prepare(self, backend, problem, shape, *arguments)
        broken = [raise_given_error for _ in ready.launches] if place == "launches" else raise_given_error
        return dataclasses.replace(ready, **{place: broken})

    monkeypatch.setattr(FaultyMatmul, "prepare", prepare_faulty)


@pytest.mark.parametrize("place", ["prepare", "launches", "verify", "poison_outputs", "list_changed_operands"])
@pytest.mark.parametrize("reason", ERROR_BY_REASON, ids=[type(error).__name__ for error in ERROR_BY_REASON.values()])
def test_an_exception_of_any_class_in_a_kernel_fails_only_its_row(run, monkeypatch, tmp_path, place, reason):
    break_kernel(monkeypatch, place, ERROR_BY_REASON[reason])
    code, out, err = run(*SWEEP_OF_TWO_SHAPES)
    log = read_run_log(tmp_path / "run.jsonl")
    assert (code, err, log.tier) == (0, "", "complete")
    assert {row.shape.m: (row.status, row.reason) for row in log.measurements} == {
        1024: ("failed", reason),
        512: ("ok", ""),
    }
    assert "\x1b" not in out
    code, out, err = run(*RUN[:-1], "1024x1024x1024")
    if "KeyboardInterrupt" not in reason:  # 'mamf run' leaves signals to the debugger that runs it
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert escape_invisible_characters(reason) in err


@pytest.mark.parametrize("error", ERROR_BY_REASON.values(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "method", ["explain_unsupported_problem", "apply_settings", "explain_unsupported_shape", "is_refusal"]
)
def test_a_method_of_a_kernel_that_raises_any_exception_breaks_its_contract(run, monkeypatch, tmp_path, method, error):
    def raise_given_error(*arguments):
        raise error

    monkeypatch.setattr(FaultyMatmul, method, raise_given_error)
    if method == "is_refusal":
        break_kernel(monkeypatch, "prepare", RuntimeError())
    code, _, err = run(*SWEEP_OF_TWO_SHAPES)
    message = f" is broken: {method} raised {describe_error(error)}"
    if method == "explain_unsupported_problem":  # mamf calls it before there is a log
        assert (code, err.count("\n")) == (2, 1)
        assert escape_invisible_characters(message[:900]) in err
    else:
        rows = {row.shape.m: row for row in read_run_log(tmp_path / "run.jsonl").measurements}
        assert (code, err, rows[512].ok) == ((0, "", True) if method == "is_refusal" else (1, "", False))
        assert message[:900] in rows[1024].reason


@pytest.mark.parametrize(
    ("code", "error_text"),
    [
        ("raise SystemExit(0)", "SystemExit"),
        ("raise KeyboardInterrupt('it')", "KeyboardInterrupt"),
        ("raise GeneratorExit()", "GeneratorExit"),
        ("raise BaseException('it')", "BaseException"),
        ("import os; os._exit(0)", r"SystemExit: the import called os._exit(0)"),
    ],
)
def test_a_module_that_exits_while_it_is_imported_is_named(run, monkeypatch, tmp_path, code, error_text):
    (tmp_path / "leaving.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = run(*MATMUL, "leaving:Kernel")
    assert (code, out) == (2, "")
    assert err.startswith(f"mamf: kernel 'leaving:Kernel' cannot be loaded: {error_text}")
    assert err.count("\n") == 1


def test_a_command_fails_if_code_outside_of_every_guard_exits(run, monkeypatch):
    monkeypatch.setattr("mamf.cli.commands.backends.run_with_options", exit_process)
    message = "mamf: a plugin or a library is broken: it raised SystemExit: 0\n"
    assert run("backends") == (2, "", message)


def test_details_that_json_cannot_represent_fail_only_their_row(run, monkeypatch, tmp_path):
    real_prepare = SimulatedMatmul.prepare

    def prepare_faulty(self, *arguments):
        ready = real_prepare(self, *arguments)
        return dataclasses.replace(ready, verify=lambda index, result: Verdict(0.0, 1.0, {"kind": object()}))

    monkeypatch.setattr(FaultyMatmul, "prepare", prepare_faulty)
    assert run(*MATMUL, "faulty")[0] == 1
    (row,) = read_run_log(tmp_path / "run.jsonl").measurements
    assert row.status == "failed"
    assert "detail 'kind' must be a number or text, not of the type object" in row.reason


def test_a_search_works_if_a_larger_first_matmul_does_not_fit_in_memory(run, monkeypatch):
    small_physics = dataclasses.replace(FaultyBackend.physics, memory_bytes=8 * 2**20)
    monkeypatch.setattr(FaultyBackend, "physics", small_physics)
    assert run("find", "--backend", "faulty", "--dry-run")[0] == 0


def test_a_sensor_that_returns_nan_fails_its_row_but_not_the_log(run, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "mamf.testing.simulated.SimulatedSensors.read",
        lambda self, energy=False: mamf.backend.SensorReading(watts=math.nan),
    )
    assert run(*SWEEP)[0] == 1
    (row,) = read_run_log(tmp_path / "run.jsonl").measurements
    expected = "read returned a SensorReading, not one whose watts is finite float | None"
    assert f"backend faulty's telemetry is broken: {expected}" in row.reason


def test_a_first_matmul_that_does_not_fit_in_memory_is_reported(run, monkeypatch):
    monkeypatch.setattr(FaultyBackend, "physics", dataclasses.replace(FaultyBackend.physics, memory_bytes=1000))
    code, _, err = run("find", "--backend", "faulty", "--dry-run")
    assert code == 1
    assert "the first matmul failed (1024x1024x1024, kernel simulated.mm, backend faulty)" in err


# -- only the faulty plugin is skipped ---------------------------------------------------------------------------------

BROKEN_MODULES = {
    "a missing library": "raise OSError('libmissing.so.1: cannot open shared object file')",
    "a bug": "1 / 0",
    "an exit": "import sys; sys.exit(7)",
    "nothing": "",
}


@pytest.fixture(params=BROKEN_MODULES)
def broken(request, tmp_path, monkeypatch):
    """Register matmul and attention kernels, a backend and an operation from a module that cannot be loaded."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "mamf_broken.py").write_text(BROKEN_MODULES[request.param])
    monkeypatch.syspath_prepend(folder)
    for group in (
        discovery.MATMUL_KERNEL_GROUP,
        "mamf.attention_kernels",
        discovery.BACKEND_GROUP,
        discovery.OPERATION_GROUP,
    ):
        monkeypatch.setitem(ENTRY_POINTS, group, ENTRY_POINTS[group] | {"aaa": "x"})
    find_real_entry_points = discovery.find_entry_points

    def find_entry_points(group):
        return [
            EntryPoint("aaa", "mamf_broken:Broken", group) if point.name == "aaa" else point
            for point in find_real_entry_points(group=group)
        ]

    monkeypatch.setattr(discovery, "find_entry_points", find_entry_points)


def test_a_broken_plugin_that_is_registered_is_reported_and_skipped(broken, run):
    for command in (["find", "--dry-run"], ["attention", "--no-ceiling", "--dry-run"], ["sweep", "--dry-run", *SMALL]):
        code, _, err = run(*command)
        assert code == 0
        assert "mamf: backend aaa: mamf_broken:Broken cannot be loaded" in err
        assert "kernel aaa: mamf_broken:Broken cannot be loaded" in err
        assert all(line.endswith("; mamf skips this plugin") for line in err.splitlines())
    for command in (["kernels"], ["backends"]):
        code, out, _ = run(*command)
        assert code == 0
        assert "mamf_broken:Broken cannot be loaded" in out


def test_a_broken_plugin_that_the_user_names_is_an_error(broken, run):
    for options in (["--kernel", "aaa", "--backend", "faulty"], ["--backend", "aaa"]):
        for command in (["find"], ["attention", "--no-ceiling"], ["sweep"]):
            code, out, err = run(*command, *options)
            assert (code, out) == (2, "")
            assert len(err.splitlines()) == 1
            assert "mamf_broken:Broken cannot be loaded" in err
            assert "output" not in err


FIRST_MATMUL_FAILED = "mamf: the first matmul failed (1024x1024x1024, kernel faulty, backend faulty): "


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("prepare", f"{FIRST_MATMUL_FAILED}RuntimeError: it broke"),
        ("apply_settings", "mamf: kernel faulty is broken: apply_settings raised RuntimeError: it broke"),
    ],
)
@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_a_default_kernel_that_does_not_work_is_reported_and_the_others_are_searched(
    run, monkeypatch, method, message, quick
):
    monkeypatch.setattr(FaultyMatmul, "is_default", True)
    monkeypatch.setattr(FaultyMatmul, method, raise_error)
    code, out, err = run(*FIND, *quick)
    assert (code, err) == (0, f"{message}; mamf skips this plugin\n")
    assert "\nkernels: simulated.mm\n" in out


def test_a_kernel_that_does_not_work_is_an_error_if_no_other_works_or_the_user_names_it(run, monkeypatch):
    monkeypatch.setattr(FaultyMatmul, "prepare", raise_error)
    for kernel_names in (["faulty"], ["faulty", "right"]):
        code, out, err = run(*FIND, "--kernel", *kernel_names)
        assert (code, out, err) == (1, "", f"{FIRST_MATMUL_FAILED}RuntimeError: it broke\n")
    monkeypatch.setattr(FaultyMatmul, "is_default", True)
    monkeypatch.setattr(SimulatedMatmul, "prepare", raise_error)
    assert run(*FIND) == (1, "", f"{FIRST_MATMUL_FAILED}RuntimeError: it broke\n")


def test_the_python_api_warns_about_a_broken_plugin(broken):
    with pytest.warns(MamfWarning, match="mamf_broken:Broken cannot be loaded"):
        rows = mamf.attention("b1h16q512k512d64", backend=SimulatedBackend())
    assert [row.kernel for row in rows] == ["faulty"]
    with pytest.raises(PluginError, match="cannot be loaded"):
        mamf.attention("b1h16q512k512d64", backend=SimulatedBackend(), kernel=["aaa"])


@pytest.mark.parametrize(
    ("traits", "changed_fields", "message"),
    [
        ("sustained_traits", {"swing_seconds": 0.0}, "swing_seconds is a number above 0"),
        (
            "sustained_traits",
            {"repeatability_after_rest": 0.01},
            "repeatability_after_rest is mamf.statistics.Repeatability | None",
        ),
        ("burst_traits", {"train_seconds": "0.01"}, "train_seconds is finite float"),
    ],
)
def test_invalid_traits_of_a_device_break_its_contract(run, monkeypatch, traits, changed_fields, message):
    monkeypatch.setattr(FaultyBackend, traits, dataclasses.replace(getattr(FaultyBackend, traits), **changed_fields))
    code, _, err = run(*SWEEP)
    assert (code, err.count("\n")) == (2, 1)
    assert f"backend faulty is broken: {traits} is a " in err
    assert err.endswith(f", not one whose {message}\n")


def list_public_methods(kind):
    return {name for name, value in vars(kind).items() if callable(getattr(kind, name)) and not name.startswith("_")}


@pytest.mark.parametrize(
    ("contract", "methods"), [(Backend, BACKEND_METHODS), (Kernel, KERNEL_METHODS), (Operation, OPERATION_METHODS)]
)
def test_every_method_of_a_contract_is_in_the_table(contract, methods):
    """Check that the lists of methods above are complete, so that new methods get tested too."""
    assert list_public_methods(contract) <= {*methods, "burst_traits", "sustained_traits"}
