"""Test run logs: writing, reading and resuming them, refusing damaged logs, and removing private texts."""

import errno
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_plans import setup_of, sweep_plan
from rendering import render

from mamf.engine.strategies.rows import OneKernelStrategy
from mamf.errors import MAX_LOG_BYTES, MAX_LOG_LINE_BYTES, RunLogError, RunLogWriteError, UsageError
from mamf.logs.recording import RunEnd, make_plan_record
from mamf.logs.records import make_measurement_record
from mamf.logs.run_log import SCHEMA_VERSION, add_findings_to_header, read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.machine.privacy import _compile_private_name_rules, scrub_text
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape, matmul_grid
from mamf.report.rows import make_summary_record
from mamf.testing import SimulatedBackend, SimulatedMatmul

PLAN = sweep_plan(
    tuple(matmul_grid([1024, 2048], [2048], [1024, 4096])),
    MatmulProblem(),
    kernel="simulated.mm",
    reference=MatmulShape(512, 512, 512),
)

SUMMARY = {"status": "complete", "reason": "", "measured": 0, "left": 0, "elapsed_seconds": 1.0, "best": {}}


def make_header():
    return {
        "tool": {"name": "mamf", "version": "0", "commit": None},
        "device": {"backend": "simulated", "index": 0, "name": "x", "vendor": "y"},
        "timer": "device events",
        "environment": {"packages": {}},
        "kernel": "simulated.mm",
        "plan": make_plan_record(PLAN),
    }


@pytest.fixture(scope="module")
def rows():
    backend = SimulatedBackend()
    backend.faults[PLAN.shapes[1]] = "wrong_result"
    return list(OneKernelStrategy(setup_of(PLAN, [SimulatedMatmul()], backend)).yield_results())


@pytest.fixture
def log_path(tmp_path, rows):
    path = tmp_path / "run.jsonl"
    with RunLogWriter.create(path, make_header()) as writer:
        for row in rows:
            writer.write("measurement", make_measurement_record(row))
        writer.write("summary", make_summary_record(rows, RunEnd("complete", "", 1.0)))
    return path


def test_a_log_reads_back_as_it_was_written(log_path, rows):
    log = read_run_log(log_path)
    assert log.measurements == rows
    assert log.plan == PLAN
    assert log.summary["status"] == "complete"
    assert not log.is_truncated


def test_a_log_stores_counts_with_more_than_64_bits(tmp_path):
    plan = sweep_plan([MatmulShape(2 * 10**6, 2 * 10**6, 2 * 10**6)], MatmulProblem(), kernel="simulated.mm")
    [row] = OneKernelStrategy(setup_of(plan, [SimulatedMatmul()], SimulatedBackend())).yield_results()
    with RunLogWriter.create(tmp_path / "run.jsonl", make_header()) as writer:
        writer.write("measurement", make_measurement_record(row))
    assert read_run_log(tmp_path / "run.jsonl").measurements == [row]


def test_a_log_with_a_row_after_its_summary_is_interrupted(log_path, rows):
    log, writer = RunLogWriter.resume(log_path)
    assert log.tier == "complete"
    with writer:
        writer.write_resume_record(log, {})
        writer.write("measurement", make_measurement_record(rows[0]))
    assert read_run_log(log_path).tier == "interrupted"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_a_log_cut_anywhere_reads_up_to_its_last_whole_line(log_path, cut):
    data = log_path.read_bytes()
    end = cut % (len(data) + 1)
    part = log_path.with_name("cut.jsonl")
    part.write_bytes(data[:end])
    whole_line_count = data[:end].count(b"\n")
    if whole_line_count == 0:
        with pytest.raises(RunLogError, match="no complete line"):
            read_run_log(part)
        return
    log = read_run_log(part)
    assert len(log.measurements) == min(whole_line_count - 1, len(read_run_log(log_path).measurements))
    resumed, writer = RunLogWriter.resume(part)
    assert resumed.measurements == log.measurements
    assert part.read_bytes() == data[:end]
    with writer:
        writer.write_resume_record(log, {"notes": "once more"})
        writer.write("summary", SUMMARY)
    assert read_run_log(part).summary == {"record": "summary", **SUMMARY}
    assert part.read_bytes().startswith(data[: log.valid_bytes])


def test_a_full_disk_is_one_clear_error_and_leaves_the_log_unchanged(log_path, rows, monkeypatch):
    before = log_path.read_bytes()
    real_write = os.write

    def write_most(descriptor, data):
        if len(data) < 50:  # the rest of a line after the first call, which wrote all but 10 bytes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data[: len(data) - 10])

    with RunLogWriter.resume(log_path)[1] as writer:
        monkeypatch.setattr(os, "write", write_most)
        with pytest.raises(RunLogWriteError, match="No space left"):
            writer.write("measurement", make_measurement_record(rows[1]))
    assert log_path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"record": "header", "schema": 99}', "the log has schema 99, but this mamf reads schema 5"),
        ('{"record": "measurement"}', "the first record of a run log must be a header"),
        ("plain text", "not a JSON object"),
        ("[1]", "not a record"),
        ('{"record": "header", "schema": 5}', "missing field `tool`"),
        (
            '{"record": "header", "schema": 3}',
            "schema 3, not 5: read or convert it with mamf 0.2",
        ),
    ],
)
def test_a_bad_header_is_named(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RunLogError, match=complaint):
        read_run_log(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"record": "nonsense"}', "line 2: unknown type of record 'nonsense'"),
        ('{"record": "measurement"}', "line 2: missing field `operation`$"),
        ("{", "line 2: the line is not a JSON object"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    RunLogWriter.create(path, make_header()).close()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunLogError, match=complaint):
        read_run_log(path)


@pytest.mark.parametrize("depth", [2000, 100_000])
@pytest.mark.parametrize("begin", ["[", '{"a": '])
def test_a_record_nested_deeply_is_refused(tmp_path, depth, begin):
    end = "]" if begin == "[" else "}"
    (tmp_path / "deep").write_text(f'{{"record": "header", "a": {begin * depth}1{end * depth}}}\n')
    with pytest.raises(RunLogError, match="line 1: the values of this line are nested too deeply"):
        read_run_log(tmp_path / "deep")


def test_a_long_line_or_file_is_refused_before_it_is_in_memory(tmp_path):
    line = tmp_path / "line"
    with line.open("wb") as file:
        file.truncate(MAX_LOG_LINE_BYTES + 1)
    with pytest.raises(RunLogError, match="a line of more than 16 MiB"):
        read_run_log(line)
    with line.open("wb") as file:
        file.truncate(MAX_LOG_BYTES + 1)
    with pytest.raises(RunLogError, match="more than 512 MiB"):
        read_run_log(line)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(RunLogError, match="not a regular file"):
            read_run_log(path)


@pytest.fixture
def set_names(monkeypatch, request):
    """Return a function that makes mamf see these names of the host and of the user."""

    def set_host_and_user(host, user):
        _compile_private_name_rules.cache_clear()
        scrub_text.cache_clear()
        monkeypatch.setattr("socket.gethostname", lambda: host)
        monkeypatch.setattr("getpass.getuser", lambda: user)

    request.addfinalizer(_compile_private_name_rules.cache_clear)
    request.addfinalizer(scrub_text.cache_clear)
    return set_host_and_user


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("run by Alice, ALICE and alice", "run by <user>, <user> and <user>"),
        ("on h1, H1 and h1:8000, not h100", "on <host>, <host> and <host>:8000, not h100"),
        ("/home/jane doe/my logs/x.txt", "<path>/x.txt"),
        ("C:\\Users\\Jane Doe\\runs\\x.txt", "<path>/x.txt"),
        ("--output '/home/jane doe/x y.txt' -v", "--output '<path>/x y.txt' -v"),
        ("'--output=/data/jane doe'", "'--output=<path>/jane doe'"),
        ("/home/jane\\ doe/x", "<path>/x"),
        ("in /home/jane and /Users/jane", "in <path>/<user> and <path>/<user>"),
        ("file:///home/jane/x.txt", "<path>/x.txt"),
        ("file://gpu1/home/jane%20doe/x.txt", "<path>/x.txt"),
        ("--output ../x --resume ./../jane/x", "--output <path>/x --resume <path>/x"),
        ("~jane/x", "<path>/x"),
        ("\\\\server\\share\\x", "<path>/x"),
        ("no /opt/lib.so and 3 TB/s, no /dev/x and a/b", "no <path>/lib.so and 3 TB/s, no <path>/x and a/b"),
    ],
)
def test_private_parts_of_every_spelling_are_scrubbed(text, clean, set_names):
    set_names("h1", "alice")
    assert scrub_text(text) == clean
    assert scrub_text(clean) == clean


def test_a_log_cannot_be_resumed_while_another_process_writes_it(log_path):
    with RunLogWriter.resume(log_path)[1], pytest.raises(UsageError, match="another process is writing"):
        RunLogWriter.resume(log_path)


def test_resuming_keeps_records_that_another_process_writes_just_before_the_log_is_locked(log_path, monkeypatch):
    """Let another process write its last record and close the log just before mamf locks it.

    mamf cuts a resumed log at the end of the last line that it has read. If it read the log before it locked the log,
    it would cut off this record.
    """
    fcntl = pytest.importorskip("fcntl")
    _, first = RunLogWriter.resume(log_path)
    lock, contents = fcntl.flock, []

    def finish_first_and_lock(*arguments):
        if first.is_open:
            first.write("summary", SUMMARY | {"reason": "of the first"})
            first.close()
            contents.append(log_path.read_bytes())
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", finish_first_and_lock)
    log, second = RunLogWriter.resume(log_path)
    with second:
        second.write_resume_record(log, {})
    assert log.summary["reason"] == "of the first"
    assert log_path.read_bytes().startswith(contents[0])


def test_a_header_that_json_cannot_store_leaves_no_file(tmp_path):
    with pytest.raises(RunLogWriteError, match="cannot be written as JSON"):
        RunLogWriter.create(tmp_path / "run.jsonl", make_header() | {"settings": {"tuned": object()}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["open", "fsync", "link"])
def test_an_interrupted_process_leaves_no_log_without_a_header(tmp_path, monkeypatch, call):
    """Interrupt the process right after each system call that creates a log. Either the file must not exist, or it must
    contain the whole header.
    """
    system_call, path = getattr(os, call), tmp_path / "run.jsonl"

    def call_and_interrupt(*arguments, **options):
        system_call(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, call_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        RunLogWriter.create(path, make_header())
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ([] if call == "fsync" else ["run.jsonl"])
    assert call == "fsync" or read_run_log(path).measurements == []


def test_a_full_disk_leaves_no_empty_log(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunLogWriteError, match="No space left"):
        RunLogWriter.create(tmp_path / "run.jsonl", make_header())
    assert not list(tmp_path.iterdir())


def test_a_command_line_that_is_not_utf8_is_read_back(tmp_path):
    path = tmp_path / "run.jsonl"
    RunLogWriter.create(path, make_header() | {"notes": "t\udce9st"}).close()
    assert read_run_log(path).header["notes"] == "t\udce9st"


def yield_paths(value, path=()):
    """Yield the path to each value in a record, as keys and indices. Of a list, use only the first item."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from yield_paths(item, (*path, name))
    elif isinstance(value, list) and value:
        yield from yield_paths(value[0], (*path, 0))
    else:
        yield path


ODD_VALUES = [None, True, "text", -1, 0, 1.5, 1e308, 10**30, [], {}, ["a"], {"a": 1}]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_log_with_an_odd_value_can_be_shown_or_is_refused_with_its_line(log_path, data):
    """Replace a random value in a log by an odd one. mamf must either refuse the log and name the line, or be able to
    show the log in every format.
    """
    lines = log_path.read_text().splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    record = json.loads(lines[number])
    *keys, name = data.draw(st.sampled_from(list(yield_paths(record))))
    container = record
    for key in keys:
        container = container[key]
    container[name] = data.draw(st.sampled_from(ODD_VALUES))
    lines[number] = json.dumps(record)
    changed_log = log_path.with_name("changed.jsonl")
    changed_log.write_text("\n".join(lines) + "\n")
    try:
        log = read_run_log(changed_log)
    except RunLogError as error:
        assert f"line {number + 1}: " in str(error)
        return
    for form in ("table", "csv", "json", "markdown"):
        assert render(form, log.measurements, log.header, log.summary)


def add_sample(log_path, field, seconds):
    """Add a sample to the first row of a log, and return the path of the log."""
    lines = log_path.read_text().splitlines()
    record = json.loads(lines[1])
    lines[1] = json.dumps(record | {field: [seconds, *record[field]]})
    log_path.write_text("\n".join(lines) + "\n")
    return log_path


@pytest.mark.parametrize(
    ("field", "seconds"),
    [
        *(("samples_seconds", seconds) for seconds in (1e200, -1.0, 0.0, 1e-302)),
        *(("implausible_samples_seconds", seconds) for seconds in (1e200, -1e200)),
    ],
)
def test_a_sample_that_no_launch_takes_is_refused(log_path, field, seconds):
    with pytest.raises(RunLogError, match=rf"line 2: field {field}\[0\]: expected `float` [<>]"):
        read_run_log(add_sample(log_path, field, seconds))


@pytest.mark.parametrize("name", ["reference_tflops", "checked launches", "held_bytes"])
@pytest.mark.parametrize(
    ("value", "complaint"),
    [("x", "in the field details must be a number"), ([1.0], "got `array`"), (True, "got `bool`")],
)
def test_a_detail_that_mamf_computes_with_must_be_a_number(log_path, name, value, complaint):
    with pytest.raises(RunLogError, match=f"line 2: .*{complaint}"):
        read_run_log(set_details(log_path, {name: value}))


def test_a_detail_without_a_value_is_missing(log_path):
    assert read_run_log(set_details(log_path, {"bound": None, "note": "x"})).measurements[0].details == {"note": "x"}


def set_details(log_path, details):
    """Set the details of the first row of a log, and return the path of the log."""
    lines = log_path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"details": details})
    log_path.write_text("\n".join(lines) + "\n")
    return log_path


def test_a_log_of_an_earlier_schema_is_never_appended_to(log_path):
    """Check that such a log cannot be resumed, because its new rows would be read as if the timer of an early release
    had measured them.
    """
    before = log_path.read_bytes().replace(f'"schema": {SCHEMA_VERSION}'.encode(), b'"schema": 4', 1)
    log_path.write_bytes(before)
    with pytest.raises(RunLogError, match="has schema 4"):
        RunLogWriter.resume(log_path)
    assert log_path.read_bytes() == before


@pytest.mark.parametrize("name", ["attention", "text"])
def test_a_row_of_another_operation_is_refused(log_path, name):
    lines = log_path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"operation": name})
    log_path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunLogError, match=f"line 2: a row of {name} does not belong in a log of matmul"):
        read_run_log(log_path)


def test_a_number_of_the_device_with_more_than_64_bits_is_refused(log_path):
    header_line, *other_lines = log_path.read_text().splitlines(keepends=True)
    record = json.loads(header_line)
    record["device"]["memory_bytes"] = 10**400
    log_path.write_text(json.dumps(record) + "\n" + "".join(other_lines))
    with pytest.raises(RunLogError, match="a number in the device's record has more than 64 bits"):
        read_run_log(log_path)


@pytest.mark.parametrize("is_first_ok", [True, False])
def test_a_check_that_found_a_problem_before_or_after_resuming_is_not_also_ok(is_first_ok):
    ok, warning = "ok   cpu load: the CPU is 0 % busy", "WARN cpu load: the CPU is 80 % busy; times vary"
    clock = "ok   clocks: not limited"
    first_finding, later_finding = (ok, warning) if is_first_ok else (warning, ok)
    header = {"findings": [first_finding, clock]}
    add_findings_to_header(header, [later_finding, clock])
    assert sorted(header["findings"]) == [warning, clock]
