"""How a contributed log gets into results/: scrubbed, placed, in the table; and how runs of mamf-finder are shown."""

import contextlib
import copy
import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from contribution_logs import SIMULATED, best, found, legacy_run, rows, write
from test_compare import attention_row

from mamf.contribution import submission
from mamf.contribution.collection import AttentionEntry, best_attention, collect
from mamf.contribution.placing import folder_of, legacy_name_of, slug
from mamf.contribution.privacy import cleaned, private_findings, without_private
from mamf.contribution.tables import results_page
from mamf.errors import RunLogWriteError
from mamf.logs.legacy import Reported, write_legacy_log
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape

# -- privacy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("torch 2.11.0+cu130", "580.159.04", "Linux 6.18.44-fc-v595 x86_64", "float8_e4m3fn", "1024x2048x512", "a/b"),
        *("top -o %CPU   # see what runs", "https://github.com/stas00/ml-engineering"),
        "mamf sweep --output <path>/run.jsonl",
        *("1.2.3", "12:34:56", "2026-11-21T16:36:00+00:00", "9f86d081884c7d65", "cuda:0", "x[1::2]", "c10::Error"),
        *("std::bad::face", "serial execution took 3 s", "ran in serial, 4 times", "ratio 1:2:3"),
        *("4096 tokens: 8 experts", "tokens=4096", "cuBLAS 12.9.0.13 to 13.1.0.3", "cublaslt[3]", "the key figure"),
        *("passed 3 of 4", "token_dim x 2", "a secretary", "sk-learn", "eyJ", "10-11-12-13", "user time 3 s"),
    ],
)
def test_what_names_nobody_stays(text):
    assert not list(private_findings(1, {"notes": text}))
    assert without_private({"notes": text}) == {"notes": text}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("from fe80::1%eth0: lost", "from <address>%eth0: lost"),
        ("[2001:db8::8a2e:370:7334]:443", "[<address>]:443"),
        ("2001:0db8:85a3:0000:0000:8a2e:0370:7334", "<address>"),
        ("02:03:04:05:06:07:08:09", "<address>"),
        ("serial: ABC-123", "<serial number>"),
        ("Serial_Number = 165022301", "<serial number>"),
        ("serial no. 165022301", "<serial number>"),
        ("SN:165022301", "<serial number>"),
        ("file:///home/jane/x", "<path>/x"),
        ("/home/jane doe/x", "<path>/x"),
        ("--output ../x", "--output <path>/x"),
        ("jane@h1", "<user>@<host>"),
    ],
)
def test_what_names_somebody_is_found_and_replaced(text, clean):
    assert list(private_findings(1, {"notes": text}))
    assert without_private({"notes": text, "serialNumber": "1", "ipv6": "1"}) == {"notes": clean}
    assert not list(private_findings(1, {"notes": clean}))


def test_the_search_for_private_parts_takes_no_time():
    for text in ("2001::" + "a" * 9000 + "g", "2001:" * 2000, "/a b" * 2500, "\\ " * 5000, "'/" * 5000, "sn:" * 3000):
        cleaned(text)


def test_private_parts_are_replaced_and_private_fields_left_out():
    record = {
        "hostname": "node",
        "notes": "run on gpu1.lab.internal by jane@lab, in /data/jane/x",
        "device": {"uuid": "1"},
    }
    assert without_private(record) == {"notes": "run on <host> by <user>@<host>, in <path>/x", "device": {}}


def test_a_text_that_is_too_long_to_be_searched_is_left_out():
    assert without_private({"notes": "x" * 10_001}) == {"notes": "<long text>"}


def test_detect_secrets_is_used_where_it_is_installed(run, sweep_records, tmp_path, monkeypatch):
    """A stand-in with its interface: the package is not needed."""

    def scan_line(text):
        yield SimpleNamespace(type="Base64 High Entropy String", secret_value=text)
        if "hidden" in text:
            yield SimpleNamespace(type="Made up", secret_value="hidden")

    scan = SimpleNamespace(scan_line=scan_line)
    settings = SimpleNamespace(default_settings=contextlib.nullcontext)
    for name, module in (("core.scan", scan), ("settings", settings), ("core", None), ("", None)):
        monkeypatch.setitem(sys.modules, f"detect_secrets.{name}".rstrip("."), module or SimpleNamespace(__path__=[]))
    submission._clean.cache_clear()
    write(tmp_path / "run.jsonl", [sweep_records[0] | {"notes": "a hidden thing"}, *sweep_records[1:]])
    code, out, _ = run("results", "submit", "run.jsonl", "--dry-run")
    submission._clean.cache_clear()
    assert code == 0
    assert "scrubbed: line 1, notes: <secret> removed" in out
    assert out.count("removed") == 1


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
    assert "scrubbed: line 1, notes: <path> removed" in out
    assert "jane" not in out
    assert "read what is left" in out
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
    best(records)["tflops"]["median"] *= 1.05
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


def test_runs_that_began_in_one_second_have_a_place_each(run, sweep_records, tmp_path):
    other = copy.deepcopy(sweep_records)
    for row in rows(other):
        row["samples_seconds"] = [*row["samples_seconds"][::-1]]
    for name, records in (("one.jsonl", sweep_records), ("two.jsonl", other)):
        write(tmp_path / name, records)
        assert run("results", "submit", name)[0] == 0
    one, two = sorted((tmp_path / "results").rglob("*.jsonl"), key=lambda path: len(path.name))
    assert two.name == f"{one.stem}-2.jsonl"
    assert run("results", "check", "results")[0] == 0
    assert "-2.jsonl is there already" in run("results", "submit", "two.jsonl")[2]


def test_a_folder_is_checked_for_places_and_copies(run, sweep_records, tmp_path):
    (tmp_path / "results" / "elsewhere").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "results" / "elsewhere" / name, sweep_records)
    assert run("results", "check", "results")[0] == 0  # some folder of logs
    for name in ("README.md", "notes.txt"):
        (tmp_path / "results" / name).write_text("")
    code, out, _ = run("results", "check", "results", "--format", "json")
    assert code == 1
    first, second, stray = json.loads(out)["logs"]
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
    assert "(sweep.jsonl)" not in page.partition("## Unconfirmed")[0]


def test_a_kernel_that_was_loaded_by_path_is_labeled(sweep_records, tmp_path):
    page = results_page(collect(tmp_path, [write(tmp_path / "given.jsonl", sweep_records)]))
    named = copy.deepcopy(sweep_records)
    named[0]["kernel"] = kernel = rows(named)[0]["kernel"]
    assert f"| {kernel} (by path) |" in page
    page = results_page(collect(tmp_path, [write(tmp_path / "given.jsonl", named)]))
    assert f"| {kernel} (third-party) |" in page
    assert "(by path)" not in page


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
    monkeypatch.setattr("mamf.cli.commands.plot.draw", charts.append)
    monkeypatch.setattr("mamf.cli.commands.plot.save", lambda *arguments: None)
    for name in ("whole", "cut"):
        assert run("plot", f"{name}.jsonl")[0] == 0
    assert ["interrupted" in " ".join(chart.notes) for chart in charts] == [False, True]


@pytest.mark.parametrize(("direction", "best"), [("bwd", 0), ("fwd", 1)])
def test_a_backward_pass_that_is_counted_otherwise_is_ranked_with_none(direction, best):
    row = attention_row(problem=AttentionProblem(direction=direction))
    other = attention_row(problem=AttentionProblem(direction=direction, backward_count="model"))
    entries = [
        AttentionEntry({"device": {"name": "H100"}}, Path("log.jsonl"), "complete", each, share)
        for each, share in ((row, 0.5), (other, 0.6))
    ]
    assert [entry.row for entry in best_attention(entries)] == [(row, other)[best]]


def test_values_of_another_width_are_ranked_apart():
    rows = [attention_row(shape=AttentionShape.parse(f"b1h10q4096k4096{dims}")) for dims in ("d192", "d192v128")]
    entries = [AttentionEntry({"device": {"name": "H100"}}, Path("log.jsonl"), "complete", row, 0.5) for row in rows]
    assert [str(entry.row.shape.head_dims) for entry in best_attention(entries)] == ["192/128", "192"]


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


def test_one_bad_log_is_named_and_the_table_left_as_it_is(run, sweep_records, tmp_path):
    write(tmp_path / "run.jsonl", sweep_records)
    run("results", "submit", "run.jsonl")
    (placed,) = (tmp_path / "results").rglob("*.jsonl")
    records = copy.deepcopy(sweep_records)
    best(records)["tflops"]["median"] *= 1.05
    write(placed, records)
    code, out, err = run("results", "table")
    assert code == 2
    assert "row-mismatch" in out and placed.name in err
    assert not (tmp_path / "results" / "README.md").exists()


def test_a_full_disk_costs_nothing(run, sweep_records, tmp_path, monkeypatch):
    write(tmp_path / "run.jsonl", sweep_records)
    run("results", "submit", "run.jsonl")
    table = tmp_path / "results" / "README.md"
    table.write_text("the table of before")
    monkeypatch.setattr(Path, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run("results", "table")
    assert code == 1
    assert "No space left" in err
    assert table.read_text() == "the table of before"
    assert sorted(tmp_path.rglob("*")) == before


def test_an_import_that_fills_the_disk_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(RunLogWriteError):
        write_legacy_log(legacy_run(), tmp_path / "old.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


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
    [("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("AMD Instinct MI300X / OAM", "amd-instinct-mi300x-oam")]
    + [(name, f"{name.strip(' .').lower()}-accelerator") for name in ("CON", "nul", "Com1", "LPT9", "PRN.", "aux ")]
    + [("NUL.txt", "nul-txt"), ("..", "unknown-accelerator"), ("COM10", "com10"), ("CON 1", "con-1")],
)
def test_a_folder_is_named_by_its_accelerator(name, folder):
    assert folder_of(name) == folder


def test_names_of_files_hold_what_is_known():
    assert legacy_name_of(legacy_run()) == "mamf-finder-v4-bfloat16-20261120-235345.jsonl"
    assert legacy_name_of(legacy_run(started=None, dtype=None)) == "mamf-finder-v4-undated.jsonl"
    assert slug(["sweep", "cublaslt[2]", "", "burst", "burst"]) == "sweep-cublaslt-2-burst"


def test_a_folder_of_more_files_than_any_collection_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr("mamf.cli.commands.results._MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.jsonl").touch()
    code, _, err = run("results", "check", str(tmp_path))
    assert (code, err) == (2, f"mamf: {tmp_path} holds more than 3 files: name the folder of the logs\n")


def renamed_phase(records):
    next(record for record in records if record["record"] == "measurement")["phase"] = "text"


def renamed_regime(records):
    next(record for record in records if record["record"] == "ceiling")["regime"] = "1e5"


def without_optional_fields(records):
    for name in ("fast_accumulation", "data", "seed"):
        del records[0]["plan"]["problem"][name]


@pytest.mark.parametrize("damage", [renamed_phase, renamed_regime, without_optional_fields])
@pytest.mark.parametrize("kind", ["find", "sweep"])
def test_what_a_schema_leaves_open_is_shown_as_it_says(run, sweep_records, find_records, tmp_path, kind, damage):
    records = json.loads(json.dumps(find_records if kind == "find" else sweep_records))
    if kind == "find" or damage is not renamed_regime:
        damage(records)
    write(tmp_path / "damaged.jsonl", records)
    for form in ("table", "csv", "json", "markdown"):
        code, out, err = run("show", str(tmp_path / "damaged.jsonl"), "--format", form)
        assert (code, err) == (0, "")
        assert out
