"""Test that commands print third-party logs safely: all texts contain terminal escapes, formulas and markup."""

import copy
import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from browsing.hostile import INTERPRETED_FIELDS, rewrite_texts
from contribution_logs import legacy_run, measured, write

from mamf.cli.terminal import print_line, warn
from mamf.contribution.collection import Submitters, read_collection
from mamf.contribution.tables import make_results_pages
from mamf.logs.legacy import ReportedFigures, write_legacy_log
from mamf.report.charts.picture import escape_invisible_texts

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\u202e\u2066\u200b\u2028\ud800\nforged: line ![i](http://evil) <b>|`$a$"
FORMATS = ("table", "csv", "json", "markdown", "html")


def add_hostile_text(text):
    """Put ``=`` and HOSTILE before a text, and HOSTILE after it. A spreadsheet takes such a text as a formula."""
    return f"={HOSTILE}{text}{HOSTILE}"


def make_hostile_records(records, read_fields=("operation",)):
    records = [
        rewrite_texts(record, add_hostile_text, {*INTERPRETED_FIELDS, *read_fields})
        for record in copy.deepcopy(records)
    ]
    records[0]["notes"] = HOSTILE
    for row in records:
        if row["record"] == "measurement":
            row.update(remarks=[HOSTILE], throttle_reasons=[HOSTILE], details={"ran": HOSTILE})
    return records


@pytest.fixture(scope="module")
def kernel_records(tmp_path_factory):
    device = ["--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedAttention"]
    shapes = ["--shapes", "b1h16q512k512d64", "b1h16q1024k1024d64"]
    return measured(tmp_path_factory.mktemp("kernels"), "sweep", "--operation", "attention", *device, *shapes)


@pytest.fixture(scope="module")
def logs(sweep_records, find_records, kernel_records, tmp_path_factory):
    """Return the paths of logs by kind. File names, and all texts that mamf only prints, are hostile."""
    short_find_records = [record for record in find_records if record["record"] != "measurement"]
    short_find_records[1:1] = [record for record in find_records if record["record"] == "measurement"][-8:]
    failed_records = copy.deepcopy(sweep_records)
    for row in failed_records[1:-1]:
        row.update(status="failed")
    unknown_records = json.loads(json.dumps(kernel_records).replace('"attention"', '"strange"'))
    records_by_kind = {
        "sweep": make_hostile_records(sweep_records),
        "find": make_hostile_records(short_find_records),
        "attention": make_hostile_records(kernel_records),
        "unknown": make_hostile_records(unknown_records, read_fields=()),
        "interrupted": make_hostile_records(sweep_records[:-1]),
        "failed": make_hostile_records(failed_records),
    }
    folder = tmp_path_factory.mktemp("logs")
    paths = {kind: write(folder / f"{kind}\x1b[2J\n.jsonl", records) for kind, records in records_by_kind.items()}
    hostile_row = ReportedFigures({"MAMF": 815.5}, "3072x2816x16384", HOSTILE, HOSTILE, remarks=(HOSTILE,))
    texts = dict.fromkeys(("version", "command", "device", "dtype"), HOSTILE)
    fields = {"best": {"MAMF": hostile_row}, "remarks": (HOSTILE,), "software": {HOSTILE: HOSTILE}}
    paths["legacy"] = folder / "legacy\x1b.jsonl"
    write_legacy_log(dataclasses.replace(legacy_run(), rows=(hostile_row,), **texts | fields), paths["legacy"])
    return paths


KINDS = ("sweep", "find", "attention", "unknown", "interrupted", "failed", "legacy")


def assert_harmless(*texts):
    for text in texts:
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", text)
        assert not re.search("^forged", text, re.MULTILINE)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_log_is_shown(kind, form, logs, run):
    code, out, err = run("show", str(logs[kind]), "--format", form)
    assert (code, err) == (0, "")
    assert_harmless(out)
    assert "owned" in out
    if form == "csv":
        assert not [cell for row in csv.reader(io.StringIO(out)) for cell in row if cell.startswith(("=", "@"))]
    if form in ("markdown", "html"):
        assert "<b>" not in out
    if form == "markdown":
        assert not re.search(r"(?<!\\)(?:[`$]|\]\()", out)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["sweep", "find", "attention", "unknown"])
def test_logs_are_compared(kind, form, logs, run, sweep_records, tmp_path):
    code, out, err = run("compare", str(logs[kind]), str(logs[kind]), "--format", form)
    assert code == 0
    assert "owned" in out
    assert_harmless(out, err)
    honest = write(tmp_path / "honest.jsonl", sweep_records)
    for arguments in ([str(honest)], [str(honest), "--anyway"]):
        code, out, err = run("compare", str(logs[kind]), *arguments)
        assert out + err
        assert_harmless(out, err)


@pytest.mark.parametrize("kind", KINDS)
def test_logs_are_checked_submitted_and_refused(kind, logs, run, tmp_path):
    (tmp_path / "results").mkdir()
    for arguments in (["check"], ["check", "--format", "json"], ["submit", "--dry-run"]):
        code, out, err = run("results", *arguments, str(logs[kind]))
        assert code in (1, 2) or kind == "legacy"
        assert "owned" in out + err or kind == "legacy"
        assert_harmless(out, err)


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_is_drawn_or_refused_with_a_reason(kind, logs, run, monkeypatch):
    charts = []
    monkeypatch.setattr("mamf.report.charts.picture.draw_figure", charts.append)
    monkeypatch.setattr("mamf.report.charts.picture.save_figure", lambda *arguments: None)
    code, out, err = run("plot", str(logs[kind]), "--output", "x\x1b.png")
    assert code == (0 if charts else 2)
    assert bool(charts) == (kind not in ("legacy", "failed"))
    assert_harmless(out, err, *(str(escape_invisible_texts(chart)) for chart in charts))


def test_a_hostile_name_is_harmless_in_messages(run):
    assert_harmless(*run("show", HOSTILE.replace("\ud800", ""))[1:])
    assert_harmless(*run("show", "x", f"--{HOSTILE}")[1:])


def test_the_tables_of_results_contain_no_markup_from_logs(logs):
    paths = [logs[kind] for kind in KINDS if kind not in ("attention", "failed")]
    submitters = Submitters(dict.fromkeys((Path(path.name) for path in paths), "me"), frozenset(["me"]))
    collection = dataclasses.replace(read_collection(logs["sweep"].parent, paths), submitters=submitters)
    page = "".join(make_results_pages(collection).values())
    assert "owned" in page
    assert_harmless(page)
    assert "<b>" not in page
    assert not re.search(r"(?<!\\)\]\(http", page)
    assert len({line.count(" | ") for line in page.splitlines() if "| burst |" in line}) == 1


def test_characters_outside_the_encoding_of_a_terminal_are_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stderr", stream)
    warn("Gerät\x1b")
    print_line("a", stream)
    stream.flush()
    assert stream.buffer.getvalue() == b"mamf: Ger\\xe4t\\x1b\na\n"
