"""Contributed logs: what keeps one out of results/, how one gets in, and the table of all."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mamf import contribution
from mamf.cli import main
from mamf.contribution.collection import collect
from mamf.contribution.evidence import read_records
from mamf.contribution.placing import folder_of, legacy_name_of, slug
from mamf.contribution.privacy import private_part, without_private
from mamf.contribution.rules import RULES, review
from mamf.contribution.tables import results_page
from mamf.legacy import FinderRun, Reported, write_legacy_log
from mamf.shapes import MatmulShape

SIMULATED = ["--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedMatmul"]
RESULTS = Path(__file__).resolve().parents[2] / "results"
NORMAL = {"dtype": "bfloat16", "out_dtype": "bfloat16", "layout": "nt", "data": "normal", "seed": 0}
NORMAL["fast_accumulation"] = False
ZEROS = NORMAL | {"data": "zeros"}
# As a card of known peaks gives it.
DEVICE = {"backend": "cuda", "name": "NVIDIA H100 80GB HBM3", "vendor": "NVIDIA", "driver": "580.1", "uuid_hash": "abc"}


def measured(folder, *arguments):
    """The records of a run in virtual time, as if it had been on a card of a committed checkout."""
    path = folder / "measured.jsonl"
    assert main([*arguments, "--output", str(path)]) == 0
    records = [record for _, record in read_records(path)]
    records[0]["device"].update(DEVICE)
    records[0]["tool"]["commit"] = "0123456789ab"
    records[0]["findings"] = ["ok   sibling devices: idle or none"]
    return records


@pytest.fixture(scope="module")
def sweep_records(tmp_path_factory):
    shapes = ["512x1024x2048", "2048x1024x512", "1024x4096x4096", "4096x4096x4096"]
    regimes = ["--regime", "burst", "sustained"]
    return measured(tmp_path_factory.mktemp("sweep"), "sweep", *SIMULATED, "--shapes", *shapes, *regimes)


@pytest.fixture(scope="module")
def find_records(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("find"), "find", *SIMULATED)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def found(path):
    """Rule ids of the errors."""
    return {finding.rule for finding in review(path).findings if not finding.is_warning}


@pytest.fixture
def spoiled(tmp_path):
    """Rules that a log breaks after a change of its records."""

    def rules(records, spoil):
        records = copy.deepcopy(records)
        records = spoil(records) or records
        return found(write(tmp_path / "spoiled.jsonl", records))

    return rules


def best(records):
    """The row that the summary names in burst."""
    shape = records[-1]["best"]["burst"]["shape"]
    return next(row for row in rows(records) if "x".join(map(str, row["shape"].values())) == shape)


def rows(records):
    return [record for record in records if record["record"] == "measurement"]


def test_an_honest_log_is_accepted(sweep_records, find_records, tmp_path):
    for records in (sweep_records, find_records):
        judged = review(write(tmp_path / "log.jsonl", records))
        assert judged.findings == ()
        assert judged.tier == "complete"
        assert str(judged.place.parent) == "nvidia-h100-80gb-hbm3"


# -- ways of spoiling a log --------------------------------------------------------------------------------------------


def edit_figure(records):
    best(records)["tflops"]["median"] *= 1.05


def edit_samples(records):
    row = best(records)
    row["samples_seconds"] = [sample * 0.9 for sample in row["samples_seconds"]]


def edit_best(records):
    records[-1]["best"]["burst"]["tflops"] *= 1.1


def edit_flop(records):
    best(records)["flop"] *= 2


def lose_row(records):
    records.remove(rows(records)[1])


def lose_row_and_count(records):
    lose_row(records)
    records[-1]["measured"] -= 1


def swap_shape(records):
    row = next(row for row in rows(records) if row["shape"] == {"m": 1024, "n": 4096, "k": 4096})
    row["shape"] = {"m": 4096, "n": 4096, "k": 1024}


def swap_for_another_step(records):
    row = next(row for row in rows(records) if row["shape"] == {"m": 512, "n": 1024, "k": 2048})
    row["shape"] = {"m": 2048, "n": 1024, "k": 512}


def outrun_physics(records):
    """Consistently: samples and all that follows from them."""
    for row in rows(records):
        row["samples_seconds"] = [sample / 20 for sample in row["samples_seconds"]]
        row["seconds"] = {name: value / 20 for name, value in row["seconds"].items()}
        old = row["tflops"]
        row["tflops"] = {name: [20 * v for v in old[name]] if name == "interval" else 20 * old[name] for name in old}


def remove(*names):
    def spoil(records):
        holder = records[0]
        for name in names[:-1]:
            holder = holder[name]
        del holder[names[-1]]

    return spoil


def set_header(value, *names):
    def spoil(records):
        holder = records[0]
        for name in names[:-1]:
            holder = holder[name]
        holder[names[-1]] = value

    return spoil


def unverify(records):
    best(records)["relative_error"] = None


def fail_verification(records):
    best(records)["relative_error"] = 0.5


def pose_zeros_as_normal(records):
    for row in rows(records):
        row["relative_error"] = 0.0


def throttle(records):
    best(records).update(throttle_reasons=["power cap"], clock_mhz=1500.0)


def thin_out(records):
    """A best that rests on three samples, everything else as it follows from them."""
    from mamf.records import measurement_from_record, measurement_record
    from mamf.report import summary_record

    row = best(records)
    row["samples_seconds"] = sorted(row["samples_seconds"])[:3]
    parsed = [measurement_from_record(each, records[0]) for each in rows(records)]
    again = {id(each): measurement_record(new) for each, new in zip(rows(records), parsed, strict=True)}
    for each in rows(records):
        each.update({name: again[id(each)][name] for name in ("tflops", "seconds", "interval_coverage")})
    records[-1]["best"] = summary_record(parsed, "complete", "", 0.0, 0)["best"]


def drop_slow_samples(records):
    row = best(records)
    row["samples_seconds"] = sorted(row["samples_seconds"])[: len(row["samples_seconds"]) // 2]


def move_slow_samples_aside(records):
    row = best(records)
    ordered = sorted(row["samples_seconds"])
    row["samples_seconds"], row["implausible_samples_seconds"] = ordered[:-2], ordered[-2:]


def copy_samples(records):
    first, second = rows(records)[:2]
    second["samples_seconds"] = first["samples_seconds"]


def measure_again(records):
    again = copy.deepcopy(best(records))
    again["samples_seconds"] = [sample * 0.99 for sample in again["samples_seconds"]]
    records.insert(-1, again)


def hide_failure(records):
    best(records).update(status="out_of_memory", reason="honest")


def choose_by_fastest(records):
    best(records)["best_by"] = "fastest"


def change_row(**fields):
    return lambda records: best(records).update(fields)


def call_it_sustained(records):
    for row in rows(records):
        if row["regime"] == "burst":
            row["regime"] = "sustained"


def go_back_in_time(records):
    rows(records)[-1]["time"] = "2001-01-01T00:00:00+00:00"


def leave_some(records):
    records[-1]["left"] = 3


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
        (edit_flop, "flop-count"),
        (lose_row, "missing-row"),
        (lose_row, "best-mismatch"),
        (lose_row_and_count, "missing-row"),
        (swap_shape, "foreign-row"),
        (swap_for_another_step, "missing-row"),
        (outrun_physics, "implausible"),
        (unverify, "unverified"),
        (fail_verification, "unverified"),
        (pose_zeros_as_normal, "data"),
        (set_header("zeros", "plan", "problem", "data"), "data"),
        (throttle, "throttled"),
        (thin_out, "few-samples"),
        (drop_slow_samples, "lost-samples"),
        (move_slow_samples_aside, "lost-samples"),
        (copy_samples, "lost-samples"),
        (hide_failure, "lost-samples"),
        (call_it_sustained, "lost-samples"),
        (measure_again, "duplicate-row"),
        (choose_by_fastest, "row-mismatch"),
        (change_row(kernel="magic"), "foreign-row"),
        (change_row(problem={**ZEROS}), "foreign-row"),
        (change_row(is_reference=True, problem={**NORMAL}), "foreign-row"),
        (change_row(essay="the best card"), "unknown-field"),
        (change_row(watts=5000.0), "implausible"),
        (change_row(clock_mhz=9000.0), "implausible"),
        (change_row(clock_mhz=300.0), "implausible"),
        (change_row(timer_overhead_seconds=-1e-6), "implausible"),
        (change_row(relative_error=-1.0), "unverified"),
        (change_row(samples_seconds=["1"]), "row-mismatch"),
        (change_row(clock_mhz="fast"), "unreadable"),
        (blind_sensors, "sensors"),
        (go_back_in_time, "time-order"),
        (leave_some, "best-mismatch"),
        (set_header("NVIDIA H100\n\n# Hacked", "device", "name"), "plain-text"),
        (set_header("![x](https://evil/x.png)", "kernel"), "plain-text"),
        (set_header("H\u0410100", "device", "name"), "plain-text"),
        (set_header(5, "device", "name"), "unreadable"),
        (set_header({"jane@lab.example.com": "1"}, "environment", "variables"), "private"),
        (set_header({"hostname": {"a": "gpu17"}}, "environment", "variables"), "private"),
        (add_note("x" * 20_000), "private"),
        (add_note("a." * 4_000), None),
        (add_note("00:1b:44:11:3a:b7"), "private"),
        (add_note("S/N 1650223012345"), "private"),
        (add_note("file:///srv/jane"), "private"),
        (set_header("complete", "tier"), "unknown-field"),
        (set_header(True, "schema"), "schema"),
        (set_header(4, "schema"), "schema"),
        (remove("command"), "missing-field"),
        (remove("findings"), "missing-field"),
        (remove("device", "power_limit_watts"), "missing-field"),
        (remove("device", "compute_units"), "missing-field"),
        (remove("environment", "packages", "torch"), "missing-field"),
        (remove("plan", "problem", "seed"), "missing-field"),
        (remove("tool"), "unreadable"),
        (set_header(None, "device", "max_clock_hz"), "missing-field"),
        (set_header("unknown", "device", "driver"), "placeholder"),
        (set_header("TODO", "device", "name"), "placeholder"),
        (set_header("simulated", "device", "backend"), "simulated"),
        (set_header("gpu-node-17", "hostname"), "private"),
        (set_header("gpu-node-17", "environment", "hostname"), "private"),
        (set_header("I was here", "greeting"), "unknown-field"),
        (add_note("run on node17.cluster.local"), "private"),
        (add_note("ask jane.doe@example.com"), "private"),
        (add_note("see /home/jane/logs/out.txt"), "private"),
        (add_note("from 10.12.0.7"), "private"),
        (add_note("GPU-12345678-1234-1234-1234-123456789abc"), "private"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_spoiling_is_caught(spoil, rule, sweep_records, spoiled):
    broken = spoiled(sweep_records, spoil)
    assert rule in broken if rule else not broken


def edit_ceiling(records):
    next(record for record in records if record["record"] == "ceiling")["tflops"] *= 1.01


def move_scout(records):
    rows(records)[0]["shape"]["m"] += 8


def confirm_what_was_never_tried(records):
    for row in rows(records):
        if row["phase"] == "confirm" and row["regime"] == "burst":
            row["shape"] = {"m": row["shape"]["k"], "n": row["shape"]["n"], "k": row["shape"]["m"]}


def relabel_ceiling(records):
    for record in records:
        if record["record"] == "ceiling":
            record["problem"]["dtype"] = "float8_e4m3fn"


def cool_ceiling(records):
    next(record for record in records if record["record"] == "ceiling")["watts"] = 1.0


def untie(records):
    next(record for record in records if record["record"] == "ceiling")["tied"] = [{"shape": "1x1x1", "kernel": "k"}]


def lose_a_round(records):
    return [record for record in records if (record.get("regime"), record.get("round")) != ("burst", 2)]


def lose_a_regime(records):
    return [record for record in records if record.get("regime") != "sustained"]


def lose_scouts(records):
    return [record for record in records if record.get("phase") != "scout"]


def repeat_ceiling(records):
    ceiling = next(record for record in records if record["record"] == "ceiling")
    records.insert(-1, copy.deepcopy(ceiling))


def forget_rounds(records):
    return [record for record in records if record.get("phase") != "confirm" or record["round"] > 3]


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (edit_ceiling, "ceiling-mismatch"),
        (move_scout, "foreign-row"),
        (confirm_what_was_never_tried, "foreign-row"),
        (forget_rounds, "ceiling-mismatch"),
        (relabel_ceiling, "ceiling-mismatch"),
        (cool_ceiling, "ceiling-mismatch"),
        (untie, "ceiling-mismatch"),
        (lose_a_round, "missing-row"),
        (lose_a_regime, "ceiling-mismatch"),
        (lose_scouts, "best-mismatch"),
        (repeat_ceiling, "ceiling-mismatch"),
    ],
)
def test_spoiling_a_find_is_caught(spoil, rule, find_records, spoiled):
    assert rule in spoiled(find_records, spoil)


def test_every_finding_names_a_rule_that_is_explained():
    named = set()
    for source in Path(contribution.__file__).parent.glob("*.py"):
        named |= set(re.findall(r'Finding\(\s*"([a-z-]+)"', source.read_text()))
    assert named == set(RULES)


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_cut_line_is_caught(cut, sweep_records, tmp_path):
    path = write(tmp_path / "cut.jsonl", sweep_records)
    path.write_bytes(path.read_bytes()[:-cut])
    assert "truncated" in found(path)


def test_a_damaged_line_is_named(sweep_records, tmp_path):
    path = write(tmp_path / "damaged.jsonl", sweep_records)
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2][:50] + "\n"
    path.write_text("".join(lines))
    (finding,) = review(path).findings
    assert finding.rule == "unreadable"
    assert "line 3" in finding.message


def attention_rows(records):
    return [row for row in rows(records) if "seqlen_q" in row["shape"]]


def scale_ceiling(factor, *names):
    def spoil(records):
        for record in records:
            if record["record"] == "ceiling":
                record["tflops"] *= factor
                record["interval_tflops"] = [factor * each if names else each for each in record["interval_tflops"]]

    return spoil


def change_attention(**fields):
    return lambda records: attention_rows(records)[0].update(fields)


def stretch_attention(records):
    attention_rows(records)[0]["shape"]["seqlen_k"] *= 2


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (scale_ceiling(0.4), "ceiling-mismatch"),
        (scale_ceiling(0.4, "interval"), "ceiling-mismatch"),
        (change_attention(relative_error=3.0), "unverified"),
        (change_attention(flop=1), "flop-count"),
        (change_attention(kernel="magic"), "foreign-row"),
        (change_attention(peak_memory_bytes=10**15), "implausible"),
        (stretch_attention, "foreign-row"),
        (lambda records: records.remove(attention_rows(records)[0]), "missing-row"),
    ],
)
def test_spoiling_attention_is_caught(spoil, rule, spoiled):
    (log,) = RESULTS.rglob("attention-bfloat16-fwd-sustained-20261121-084423.jsonl")
    records = [record for _, record in read_records(log)]
    assert spoiled(records, lambda same: None) == set()
    assert rule in spoiled(records, spoil)


def test_shares_of_no_ceiling_are_told(tmp_path):
    (log,) = RESULTS.rglob("attention-bfloat16-fwd-sustained-20261121-084423.jsonl")
    records = [record for _, record in read_records(log)]
    judged = review(write(tmp_path / "log.jsonl", [each for each in records if each["record"] != "ceiling"]))
    assert "holds no ceiling" in " ".join(finding.message for finding in judged.findings)


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
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_crashes_the_review(data, value, sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    holder = data.draw(st.sampled_from(records))
    while True:
        key = data.draw(st.sampled_from(sorted(holder)))
        if not (isinstance(holder[key], dict) and holder[key]) or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = value
    review(write(tmp_path / "odd.jsonl", records))


def test_an_editors_marks_are_found(sweep_records, tmp_path):
    path = write(tmp_path / "edited.jsonl", sweep_records)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert "unreadable" in found(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"no log\n", b"{}\n", b"[]\n", b"\xff\xfe\x00\n", b'{"record": 1}\n'])
def test_what_is_no_log_is_said_to_be_none(content, tmp_path):
    path = tmp_path / "none.jsonl"
    path.write_bytes(content)
    assert found(path) & {"unreadable", "schema"}


def test_an_interrupted_run_is_accepted_as_such(sweep_records, tmp_path):
    judged = review(write(tmp_path / "log.jsonl", sweep_records[:-2]))
    assert judged.tier == "interrupted"
    assert not judged.is_rejected()
    assert judged.is_rejected(strict=True)


# -- privacy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("torch 2.11.0+cu130", "580.159.04", "Linux 6.18.44-fc-v595 x86_64", "float8_e4m3fn", "1024x2048x512", "a/b"),
        *("top -o %CPU   # see what runs", "https://github.com/stas00/ml-engineering"),
        "mamf sweep --output <path>/run.jsonl",
    ],
)
def test_what_names_nobody_stays(text):
    assert private_part(text) is None
    assert without_private({"notes": text}) == {"notes": text}


def test_private_parts_are_replaced_and_private_fields_left_out():
    record = {
        "hostname": "node",
        "notes": "run on gpu1.lab.internal by jane@lab, in /data/jane/x",
        "device": {"uuid": "1"},
    }
    assert without_private(record) == {"notes": "run on <host> by <user>@<host>, in <path>/x", "device": {}}


def test_scrubbing_twice_changes_nothing_more():
    once = without_private({"notes": "at /data/jane/x on gpu1.lab.internal"})
    assert without_private(once) == once


# -- submitting --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def results_folder(tmp_path):
    (tmp_path / "results").mkdir()


def test_a_log_is_checked_submitted_and_in_the_table(run, sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    records[0]["notes"] = "logs are in /home/jane/logs"
    write(tmp_path / "run.jsonl", records)
    assert run("results", "check", "run.jsonl")[0] == 1
    code, out, _ = run("results", "submit", "run.jsonl")
    assert code == 0
    assert "'logs are in /home/jane/logs' -> 'logs are in <path>/logs'" in out
    assert "git commit" in out
    (placed,) = (tmp_path / "results").rglob("*.jsonl")
    assert f"git add results/{placed.parent.name}/{placed.name}" in out
    assert run("results", "check", "results")[0] == 0
    assert run("results", "table", "--check")[0] == 1
    assert run("results", "table")[0] == 0
    assert run("results", "table", "--check")[0] == 0
    page = (tmp_path / "results" / "README.md").read_text()
    assert "NVIDIA H100 80GB HBM3" in page
    assert f"(nvidia-h100-80gb-hbm3/{placed.name})" in page


def test_nothing_is_written_for_a_log_that_is_rejected(run, sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    edit_figure(records)
    write(tmp_path / "run.jsonl", records)
    code, out, err = run("results", "submit", "run.jsonl")
    assert code == 1
    assert "row-mismatch" in out
    assert "not submitted" in err
    assert not list((tmp_path / "results").iterdir())


def test_a_dry_run_writes_nothing_and_a_run_is_submitted_once(run, sweep_records, tmp_path):
    write(tmp_path / "run.jsonl", sweep_records)
    assert run("results", "submit", "run.jsonl", "--dry-run")[0] == 0
    assert not list((tmp_path / "results").iterdir())
    assert run("results", "submit", "run.jsonl")[0] == 0
    code, _, err = run("results", "submit", "run.jsonl")
    assert code == 2
    assert "is there already" in err


def test_a_folder_is_checked_for_places_and_copies(run, sweep_records, tmp_path):
    (tmp_path / "results" / "elsewhere").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "results" / "elsewhere" / name, sweep_records)
    assert run("results", "check", "results")[0] == 0  # some folder of logs
    for name in ("README.md", "notes.txt"):
        (tmp_path / "results" / name).write_text("")
    code, out, _ = run("results", "check", "results", "--format", "json")
    assert code == 1
    first, second, stray = json.loads(out)
    assert stray["path"] == "results/notes.txt"
    assert [finding["rule"] for finding in first["findings"]] == ["misplaced"]
    assert [finding["rule"] for finding in second["findings"]] == ["misplaced", "duplicate"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "nothing.jsonl"], "cannot read nothing.jsonl"),
        (["check", "results"], "holds no run log"),
        (["table", "--results", "nowhere"], "there is no folder nowhere"),
        (["submit", "nothing.jsonl"], "cannot read nothing.jsonl"),
        (["sumbit", "x"], "did you mean submit"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, said, run):
    code, out, err = run("results", *arguments)
    assert code in (1, 2)
    assert said in out + err


# -- the table ---------------------------------------------------------------------------------------------------------


def test_a_confirmed_ceiling_outranks_a_higher_sweep(find_records, sweep_records, tmp_path):
    faster = copy.deepcopy(sweep_records)
    for row in rows(faster):
        row["samples_seconds"] = [sample / 2 for sample in row["samples_seconds"]]
    paths = [write(tmp_path / "find.jsonl", find_records), write(tmp_path / "sweep.jsonl", faster)]
    page = results_page(collect(tmp_path, paths))
    burst = next(line for line in page.splitlines() if line.startswith("| burst |"))
    assert "(find.jsonl)" in burst
    assert "(sweep.jsonl)" not in page


def test_tiers_are_never_ranked_together(sweep_records, tmp_path):
    paths = [write(tmp_path / "whole.jsonl", sweep_records), write(tmp_path / "cut.jsonl", sweep_records[:-2])]
    page = results_page(collect(tmp_path, paths))
    complete, interrupted = page.split("## Tier interrupted")
    assert "(whole.jsonl)" in complete and "(cut.jsonl)" not in complete
    assert "(cut.jsonl)" in interrupted


def test_an_interrupted_run_is_labelled_where_it_is_shown(run, sweep_records, tmp_path, monkeypatch):
    write(tmp_path / "whole.jsonl", sweep_records)
    write(tmp_path / "cut.jsonl", sweep_records[:-2])
    first, second, *_ = run("compare", "whole.jsonl", "cut.jsonl")[1].splitlines()
    assert "interrupted" not in first
    assert second.endswith(", interrupted")
    charts = []
    monkeypatch.setattr("mamf.cli.plot.draw", charts.append)
    monkeypatch.setattr("mamf.cli.plot.save", lambda *arguments: None)
    for name in ("whole", "cut"):
        assert run("plot", f"{name}.jsonl")[0] == 0
    assert ["interrupted" in " ".join(chart.notes) for chart in charts] == [False, True]


def legacy_run(**fields):
    shown = Reported({"MAMF": 815.5}, MatmulShape(3072, 2816, 16384))
    known = {"device": "Oldcard", "dtype": "bfloat16", "started": "2026-11-20T23:53:45", "best": {"MAMF": shown}}
    return FinderRun("v4", rows=(shown,), **known | fields)


def test_legacy_figures_stand_apart_and_as_printed(sweep_records, tmp_path):
    write_legacy_log(legacy_run(), tmp_path / "old.jsonl")
    page = results_page(collect(tmp_path, [write(tmp_path / "new.jsonl", sweep_records), tmp_path / "old.jsonl"]))
    before, after = page.split("## Legacy")
    assert "Oldcard" not in before
    assert "| Oldcard | bfloat16 | mamf-finder v4 | MAMF | 815.5 | 3072x2816x16384 |" in after


def test_what_a_legacy_log_leaves_open_stays_open(tmp_path):
    run = legacy_run(
        device=None, dtype=None, started=None, best={"stated": Reported({"stated": 100.0})}, is_complete=False
    )
    write_legacy_log(run, tmp_path / "old.jsonl")
    page = results_page(collect(tmp_path, [tmp_path / "old.jsonl"]))
    open_cells = "unknown | unknown | interrupted | unknown"
    assert f"| unknown | unknown | mamf-finder v4 | stated (of scouts) | 100.0 | {open_cells} |" in page
    assert "missing-field" in found(tmp_path / "old.jsonl")


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"best": {"MAMF": Reported({"MAMF": 1e6}, MatmulShape(1, 2, 3))}, "tried": 1}, "best-mismatch"),
        ({"device": "NVIDIA H100 80GB HBM3", "rows": (Reported({"mean": 1e5}),)}, "implausible"),
        ({"rows": (), "best": {}}, "missing-row"),
        ({"notes": ("ask jane@lab.example.com",)}, "private"),
        ({"best": {"mean": Reported({"mean": "fast"})}}, "unreadable"),
        ({"best": {"mean": Reported({})}}, "best-mismatch"),
        ({"started": "yesterday"}, "unreadable"),
    ],
)
def test_a_spoiled_legacy_log_is_caught(fields, rule, tmp_path):
    write_legacy_log(dataclasses.replace(legacy_run(), **fields), tmp_path / "old.jsonl")
    assert rule in found(tmp_path / "old.jsonl")


def test_one_bad_log_is_named_and_the_table_left_as_it_is(run, sweep_records, tmp_path):
    write(tmp_path / "run.jsonl", sweep_records)
    run("results", "submit", "run.jsonl")
    (placed,) = (tmp_path / "results").rglob("*.jsonl")
    records = copy.deepcopy(sweep_records)
    edit_figure(records)
    write(placed, records)
    code, out, err = run("results", "table")
    assert code == 2
    assert "row-mismatch" in out and placed.name in err
    assert not (tmp_path / "results" / "README.md").exists()


def test_a_legacy_log_is_shown_but_never_resumed(run, tmp_path):
    write_legacy_log(legacy_run(), tmp_path / "old.jsonl")
    code, out, _ = run("show", "old.jsonl")
    assert code == 0
    assert "tier legacy" in out and "815.5" in out
    for form in ("csv", "json", "markdown"):
        assert "815.5" in run("show", "old.jsonl", "--format", form)[1]
    code, _, err = run("sweep", *SIMULATED[:2], "--resume", "old.jsonl")
    assert code == 2
    assert "imported log of mamf-finder" in err


@pytest.mark.parametrize(
    ("name", "folder"),
    [("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("AMD Instinct MI300X / OAM", "amd-instinct-mi300x-oam")],
)
def test_a_folder_is_named_by_its_accelerator(name, folder):
    assert folder_of(name) == folder


def test_names_of_files_hold_what_is_known():
    assert legacy_name_of(legacy_run()) == "mamf-finder-v4-bfloat16-20261120-235345.jsonl"
    assert legacy_name_of(legacy_run(started=None, dtype=None)) == "mamf-finder-v4-undated.jsonl"
    assert slug(["sweep", "cublaslt[2]", "", "burst", "burst"]) == "sweep-cublaslt-2-burst"
