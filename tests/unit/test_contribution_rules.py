"""Test the rules that keep bad logs out of results/: an honest log breaks no rule, and each way to spoil a log breaks
the expected rule.
"""

import copy
import dataclasses

import pytest
from contribution_logs import RESULTS, best, found, legacy_run, rows, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mamf.cli import main
from mamf.contribution.review import review_log
from mamf.logs.legacy import ReportedFigures, write_legacy_log
from mamf.logs.run_log import parse_records, read_lines


@pytest.fixture
def spoil_and_review(tmp_path):
    """Return a function that changes a copy of a log's records and returns the rules that the changed log breaks."""

    def find_broken_rules(records, spoil):
        records = copy.deepcopy(records)
        records = spoil(records) or records
        return found(write(tmp_path / "spoiled.jsonl", records))

    return find_broken_rules


def test_an_honest_log_is_accepted(sweep_records, find_records, tmp_path):
    for records in (sweep_records, find_records):
        review = review_log(write(tmp_path / "log.jsonl", records))
        assert review.findings == ()
        assert review.tier == "complete"
        assert str(review.results_path.parent) == "nvidia-h100-80gb-hbm3"


def test_every_unknown_and_every_repeated_field_is_reported(sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    records[0]["tool"]["color"], records[1]["mood"], records[1]["essay"] = "red", "good", "long"
    path = write(tmp_path / "log.jsonl", records)
    lines = path.read_text().splitlines()
    lines[0] = lines[0].replace('"tool": {', '"tool": {"name": "a", "name": "b", ')
    lines[2] = '{"launches": 1, "kernel": "a", ' + lines[2][1:]
    path.write_text("\n".join([*lines, ""]))
    findings = [(each.line, each.message) for each in review_log(path).findings if each.rule.endswith("-field")]
    unknown = "mamf writes no field {!r} in this record: remove it"
    repeated = "an object has the field {!r} more than once: keep only one of them"
    assert findings == [
        (1, repeated.format("name")),
        (3, repeated.format("launches")),
        (3, repeated.format("kernel")),
        (1, unknown.format("tool.color")),
        (2, unknown.format("mood")),
        (2, unknown.format("essay")),
    ]


# -- ways to spoil a log -----------------------------------------------------------------------------------------------


def edit_figure(records):
    best(records)["tflops"]["median"] *= 1.05


def edit_samples(records):
    row = best(records)
    row["samples_seconds"] = [sample * 0.9 for sample in row["samples_seconds"]]


def edit_best(records):
    records[-1]["best"]["burst"]["tflops"] *= 1.1


def edit_flop(records):
    best(records)["flop"] *= 2


def outrun_physics(records):
    """Make every row 20 times as fast, including all figures that follow from the samples."""
    for row in rows(records):
        row["samples_seconds"] = [sample / 20 for sample in row["samples_seconds"]]
        row["seconds"] = {name: value / 20 for name, value in row["seconds"].items()}
        rate_field = "tflops" if "tflops" in row else "rate"
        old_rates = row[rate_field]
        row[rate_field] = {
            name: [20 * end for end in old_rates[name]] if name == "interval" else 20 * old_rates[name]
            for name in old_rates
        }


def remove(*names):
    def spoil(records):
        parent = records[0]
        for name in names[:-1]:
            parent = parent[name]
        del parent[names[-1]]

    return spoil


def set_header(value, *names):
    def spoil(records):
        parent = records[0]
        for name in names[:-1]:
            parent = parent[name]
        parent[names[-1]] = value

    return spoil


def remove_verification(records):
    best(records)["relative_error"] = None


def fail_verification(records):
    best(records)["relative_error"] = 0.5


def copy_samples(records):
    first, second = rows(records)[:2]
    second["samples_seconds"] = first["samples_seconds"]


def choose_by_fastest(records):
    best(records)["best_by"] = "fastest"


def change_row(**fields):
    return lambda records: best(records).update(fields)


def date_in_the_future(records):
    rows(records)[-1]["time"] = "2101-01-01T00:00:00+00:00"


def equal_samples(records):
    row = best(records)
    row["samples_seconds"] = row["samples_seconds"][:1] * len(row["samples_seconds"])


def blind_sensors(records):
    for row in rows(records):
        row.update(clock_mhz=None, watts=None)


def add_note(text):
    return set_header(text, "notes")


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (edit_figure, "row-mismatch"),
        (edit_samples, "row-mismatch"),
        (edit_best, "best-mismatch"),
        (edit_flop, "row-mismatch"),
        (outrun_physics, "implausible"),
        (remove_verification, "unverified"),
        (fail_verification, "unverified"),
        (set_header("zeros", "plan", "problems", 0, "data"), "data"),
        (copy_samples, "equal-samples"),
        (choose_by_fastest, "row-mismatch"),
        (change_row(true_clock_mhz=1700.0, cycles_used=0.5), "row-mismatch"),
        (change_row(cycles_used=0.9), "row-mismatch"),
        (change_row(true_clock_mhz=5000.0), "sensors"),
        (change_row(watts=5000.0), "sensors"),
        (change_row(watts=1.0), "sensors"),
        (change_row(clock_mhz=300.0), "implausible"),
        (change_row(timer_overhead_seconds=-1e-6), "unreadable"),
        (change_row(timer_overhead_seconds=17.3e-6), "timer"),
        (change_row(relative_error=-1.0), "unverified"),
        (blind_sensors, "sensors"),
        (set_header("NVIDIA H100\n\n# Hacked", "device", "name"), "device"),
        (set_header("![x](https://evil/x.png)", "kernel"), "device"),
        (set_header("H\u0410100", "device", "name"), "device"),
        (set_header({"jane@lab.example.com": "1"}, "environment", "variables"), "private"),
        (add_note("a." * 4_000), None),
        (set_header("nvidia h100 80gb hbm3", "device", "name"), "device"),
        (set_header("NVIDIA H100 PCIe", "device", "name"), None),
        (set_header("NVIDIA H200", "device", "name"), "device"),  # but the log has the memory size of an H100
        (set_header("AMD", "device", "vendor"), "device"),
        (set_header("rocm", "device", "backend"), "device"),
        (date_in_the_future, "future"),
        (equal_samples, "equal-samples"),
        (set_header(6, "schema"), "schema"),
        (remove("tool"), "unreadable"),
        (set_header(None, "device", "max_clock_hz"), "sensors"),
        (set_header("simulated", "device", "backend"), "simulated"),
        (add_note("see /home/jane/logs/out.txt"), "private"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_spoiling_is_caught(spoil, rule, sweep_records, spoil_and_review):
    broken_rules = spoil_and_review(sweep_records, spoil)
    assert rule in broken_rules if rule else not broken_rules


def edit_ceiling(records):
    next(record for record in records if record["record"] == "ceiling")["tflops"] *= 1.01


def relabel_ceiling(records):
    for record in records:
        if record["record"] == "ceiling":
            record["problem"]["dtype"] = "float8_e4m3fn"


def cool_ceiling(records):
    next(record for record in records if record["record"] == "ceiling")["watts"] = 1.0


def invent_a_tie(records):
    next(record for record in records if record["record"] == "ceiling")["tied"] = [{"shape": "1x1x1", "kernel": "k"}]


def lose_a_regime(records):
    return [record for record in records if record.get("regime") != "sustained"]


def forget_the_calibration(records):
    """Give the ceilings the interval of a single run, as old versions of mamf did."""
    ceilings = [record for record in records if record["record"] == "ceiling"]
    for ceiling in ceilings:
        ceiling |= {"repeatability": None, "interval_tflops": [ceiling["tflops"]] * 2}
    return records


def lose_scouts(records):
    return [record for record in records if record.get("phase") != "scout"]


def forget_rounds(records):
    return [record for record in records if record.get("phase") != "confirm" or record["round"] > 3]


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (edit_ceiling, "ceiling-mismatch"),
        (forget_rounds, "ceiling-mismatch"),
        (relabel_ceiling, "ceiling-mismatch"),
        (cool_ceiling, "ceiling-mismatch"),
        (invent_a_tie, "ceiling-mismatch"),
        (forget_the_calibration, "ceiling-mismatch"),
        (lose_a_regime, "best-mismatch"),
        (lose_scouts, "best-mismatch"),
    ],
)
def test_spoiling_a_find_is_caught(spoil, rule, find_records, spoil_and_review):
    assert rule in spoil_and_review(find_records, spoil)


def test_a_find_without_a_ceiling_is_rejected_with_advice_to_resume_it(find_records, tmp_path):
    late_phases = ("choose", "confirm")
    unfinished_records = [
        each for each in find_records[:-1] if each["record"] != "ceiling" and each.get("phase") not in late_phases
    ]
    errors = [
        each for each in review_log(write(tmp_path / "log.jsonl", unfinished_records)).findings if not each.is_warning
    ]
    assert [each.rule for each in errors] == ["missing-row"]
    assert "complete it with 'mamf find --resume LOG'" in errors[0].message


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_cut_line_is_caught(cut, sweep_records, tmp_path):
    path = write(tmp_path / "cut.jsonl", sweep_records)
    path.write_bytes(path.read_bytes()[:-cut])
    assert "truncated" in found(path)


def attention_rows(records):
    return [row for row in rows(records) if "seqlen_q" in row["shape"]]


def change_attention(**fields):
    return lambda records: attention_rows(records)[0].update(fields)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (change_attention(relative_error=3.0), "unverified"),
        (change_attention(flop=1), "row-mismatch"),
        (lambda records: records.remove(attention_rows(records)[0]), "best-mismatch"),
    ],
)
def test_spoiling_attention_is_caught(spoil, rule, spoil_and_review):
    (log,) = RESULTS.rglob("attention-bfloat16-fwd-sustained-20261121-084423.jsonl")
    records = [record for _, record in parse_records(log, read_lines(log))]
    assert spoil_and_review(records, lambda unchanged_records: None) == set()
    assert rule in spoil_and_review(records, spoil)


@pytest.mark.parametrize(
    "line",
    [
        *('{"record": "measurement"', "[" * 100_000, '{"record": "summary", "best": NaN}', '{"record": "summary"}'),
        *('{"record": "ceiling", "shape": {}}', '{"record": "resume", "a": 1, "a": 2}', '{"record": ["x"]}'),
    ],
)
def test_no_line_crashes_the_review(line, sweep_records, tmp_path):
    path = write(tmp_path / "odd.jsonl", sweep_records)
    path.write_text(path.read_text() + line + "\n")
    assert found(path)


@given(data=st.data(), value=st.sampled_from([None, [], {}, "", "x", -1, 10**400, 0.5, True]))
@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_crashes_the_review(data, value, sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    parent = data.draw(st.sampled_from(records))
    while True:
        key = data.draw(st.sampled_from(sorted(parent)))
        if not (isinstance(parent[key], dict) and parent[key]) or data.draw(st.booleans()):
            break
        parent = parent[key]
    parent[key] = value
    review_log(write(tmp_path / "odd.jsonl", records))


def test_a_busy_cpu_is_a_warning(sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    records[-1]["findings"] = ["WARN host load: other processes used 60 % of the CPU during the run; rates are lower"]
    review = review_log(write(tmp_path / "busy.jsonl", records))
    assert not review.is_rejected()
    (finding,) = review.findings
    assert finding.rule == "busy-machine" and "60 % of the CPU" in finding.message


def test_changed_line_ends_are_rejected(sweep_records, tmp_path):
    path = write(tmp_path / "edited.jsonl", sweep_records)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert "unreadable" in found(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"no log\n", b"{}\n", b"[]\n", b"\xff\xfe\x00\n", b'{"record": 1}\n'])
def test_a_file_that_is_not_a_log_is_rejected(content, tmp_path):
    path = tmp_path / "none.jsonl"
    path.write_bytes(content)
    assert found(path) & {"unreadable", "schema"}


def test_an_interrupted_run_is_accepted_as_such(sweep_records, tmp_path):
    review = review_log(write(tmp_path / "log.jsonl", sweep_records[:-2]))
    assert review.tier == "interrupted"
    assert not review.is_rejected()
    assert [finding.rule for finding in review.findings] == ["interrupted"]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"device": "NVIDIA H100 80GB HBM3", "rows": (ReportedFigures({"mean": 1e5}),)}, "implausible"),
        ({"rows": (), "best": {}}, "missing-row"),
        ({"best": {"mean": ReportedFigures({"mean": "fast"})}}, "unreadable"),
        ({"best": {"mean": ReportedFigures({})}}, "unreadable"),
        ({"started": "yesterday"}, "unreadable"),
    ],
)
def test_a_spoiled_legacy_log_is_caught(fields, rule, tmp_path):
    write_legacy_log(dataclasses.replace(legacy_run(), **fields), tmp_path / "old.jsonl")
    assert rule in found(tmp_path / "old.jsonl")


def test_a_resumed_find_supersedes_its_ceilings(tmp_path):
    """Check the log of a search that was interrupted and resumed. It contains a burst ceiling from each part, and each
    ceiling must follow from the rounds before it.
    """
    path = tmp_path / "find.jsonl"
    find_command = ["find", "--backend", "mamf.testing:SimulatedBackend"]
    main([*find_command, "--kernel", "mamf.testing:SimulatedMatmul", "--budget", "9s", "--output", str(path)])
    main([*find_command, "--kernel", "mamf.testing:SimulatedMatmul", "--budget", "40s", "--resume", str(path)])
    records = [record for _, record in parse_records(path, read_lines(path))]
    burst_ceilings = [
        number for number, each in enumerate(records) if each["record"] == "ceiling" and each["regime"] == "burst"
    ]
    assert len(burst_ceilings) == 2
    assert not found(path) & {"ceiling-mismatch", "best-mismatch"}
    records[burst_ceilings[1]]["tflops"] *= 1.01
    assert "ceiling-mismatch" in found(write(path, records))
