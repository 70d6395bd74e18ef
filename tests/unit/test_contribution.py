"""Test how contributed logs are checked, submitted to results/ and listed in its tables, including mamf-finder logs."""

import copy
import json
from pathlib import Path

import pytest
from contribution_logs import SIMULATED, best, legacy_run, rows, write
from refusals import assert_refused
from test_compare import make_attention_row

from mamf.contribution.collection import SHARES_TABLE, ResultRate, read_collection, select_attention_rates
from mamf.contribution.review import make_folder_name
from mamf.contribution.tables import make_results_pages
from mamf.logs.legacy import write_legacy_log
from mamf.operations.attention.operation import AttentionProblem

# -- checks and submission ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def results_folder(tmp_path):
    (tmp_path / "results").mkdir()


def test_a_log_is_checked_submitted_and_listed_in_the_tables(run, sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    records[0]["notes"] = "logs are in /home/jane/logs"
    write(tmp_path / "run.jsonl", records)
    assert run("results", "submit", "run.jsonl")[0] == 1, "submit must reject a path that mamf would not have written"
    write(tmp_path / "run.jsonl", sweep_records)
    assert run("results", "check", "run.jsonl")[0] == 0
    code, out, _ = run("results", "submit", "run.jsonl")
    assert code == 0
    assert "look for private text, above all in the notes" in out
    assert "git commit" in out
    (submitted_log,) = (tmp_path / "results").rglob("*.jsonl")
    assert run("results", "check", "results")[0] == 0
    assert run("results", "table", "--check")[0] == 1
    assert run("results", "table")[0] == 0
    assert run("results", "table", "--check")[0] == 0
    assert run("results", "check", str(submitted_log.parent))[0] == 0
    page = (submitted_log.parent / "README.md").read_text()
    assert f"({submitted_log.name})" in page.partition("## Unconfirmed")[2]
    assert (
        "| [NVIDIA H100 80GB HBM3](nvidia-h100-80gb-hbm3/README.md) |" in (tmp_path / "results/README.md").read_text()
    )


def test_a_dry_run_writes_nothing_and_a_run_is_submitted_once(run, sweep_records, tmp_path):
    write(tmp_path / "run.jsonl", sweep_records)
    assert run("results", "submit", "run.jsonl", "--dry-run")[0] == 0
    assert not list((tmp_path / "results").iterdir())
    assert run("results", "submit", "run.jsonl")[0] == 0
    code, _, err = run("results", "submit", "run.jsonl")
    assert code == 2
    assert "this run is already in" in err


def test_runs_that_began_in_the_same_second_get_different_file_names(run, sweep_records, tmp_path):
    other = copy.deepcopy(sweep_records)
    for row in rows(other):
        row["samples_seconds"] = [*row["samples_seconds"][::-1]]
    for name, records in (("one.jsonl", sweep_records), ("two.jsonl", other)):
        write(tmp_path / name, records)
        assert run("results", "submit", name)[0] == 0
    one, two = sorted((tmp_path / "results").rglob("*.jsonl"), key=lambda path: len(path.name))
    assert two.name == f"{one.stem}-2.jsonl"
    assert run("results", "check", "results")[0] == 0
    assert "-2.jsonl, and each run can be submitted only once" in run("results", "submit", "two.jsonl")[2]


def test_misplaced_and_duplicate_logs_are_reported(run, sweep_records, tmp_path):
    (tmp_path / "results" / "elsewhere").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "results" / "elsewhere" / name, sweep_records)
    assert run("results", "check", "results")[0] == 0  # without README.md, it does not count as the results folder
    for name in ("README.md", "notes.txt"):
        (tmp_path / "results" / name).write_text("")
    code, out, _ = run("results", "check", "results", "--format", "json")
    assert code == 1
    first, second, stray = json.loads(out)["logs"]
    assert stray["path"] == "results/notes.txt"
    assert [finding["rule"] for finding in first["findings"]] == ["misplaced", "submitter"]
    assert [finding["rule"] for finding in second["findings"]] == ["misplaced", "duplicate", "submitter"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "nothing.jsonl"], "nothing.jsonl does not exist or is not a regular file"),
        (["check", "results"], "has no run log"),
        (["table", "--results", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, run):
    assert_refused(run("results", *arguments), message)


# -- tables of results -------------------------------------------------------------------------------------------------


def make_device_page(folder, paths):
    """Return the page of the accelerator of these logs, as if a maintainer had submitted all of them."""
    (folder / "maintainers.txt").write_text("me\n")
    (folder / "submitters.txt").write_text("".join(f"{path.name} me\n" for path in paths))
    (page,) = (page for path, page in make_results_pages(read_collection(folder, paths)).items() if path.parent.name)
    return page


def test_a_confirmed_ceiling_outranks_a_higher_sweep(find_records, sweep_records, tmp_path):
    faster = copy.deepcopy(sweep_records)
    for row in rows(faster):
        row["samples_seconds"] = [sample / 2 for sample in row["samples_seconds"]]
    paths = [write(tmp_path / "find.jsonl", find_records), write(tmp_path / "sweep.jsonl", faster)]
    page = make_device_page(tmp_path, paths)
    burst = next(line for line in page.splitlines() if line.startswith("| bfloat16 | burst |"))
    assert "(find.jsonl)" in burst
    assert "(sweep.jsonl)" not in page.partition("## Unconfirmed")[0]


def test_a_kernel_that_was_loaded_by_path_is_labeled(sweep_records, tmp_path):
    page = make_device_page(tmp_path, [write(tmp_path / "given.jsonl", sweep_records)])
    named = copy.deepcopy(sweep_records)
    kernel = rows(named)[0]["kernel"]
    named[0]["plan"]["kernels"] = [kernel]
    assert f"| {kernel} (by path) |" in page
    page = make_device_page(tmp_path, [write(tmp_path / "given.jsonl", named)])
    assert f"| {kernel} (third-party) |" in page
    assert "(by path)" not in page


def test_tiers_are_never_ranked_together(sweep_records, tmp_path):
    paths = [write(tmp_path / "whole.jsonl", sweep_records), write(tmp_path / "cut.jsonl", sweep_records[:-2])]
    page = make_device_page(tmp_path, paths)
    complete, interrupted = page.split("## Interrupted")
    assert "(whole.jsonl)" in complete and "(cut.jsonl)" not in complete
    assert "(cut.jsonl)" in interrupted


def test_a_comparison_says_which_run_was_interrupted(run, sweep_records, tmp_path):
    write(tmp_path / "whole.jsonl", sweep_records)
    write(tmp_path / "cut.jsonl", sweep_records[:-2])
    first, second, *_ = run("compare", "whole.jsonl", "cut.jsonl")[1].splitlines()
    assert "interrupted" not in first
    assert second.endswith(", interrupted")


def make_attention_rate(row, share):
    fields = {"dtype": "bfloat16", "device": "H100", "source": "contributed", "regime": row.regime, "header": {}}
    return ResultRate(
        rate=row.best_rate, log_path=Path("log.jsonl"), table_name=SHARES_TABLE, row=row, mamfu=share, **fields
    )


@pytest.mark.parametrize(("direction", "best_index"), [("bwd", 0), ("fwd", 1)])
def test_a_backward_pass_with_another_flop_count_is_not_ranked(direction, best_index):
    row = make_attention_row(problem=AttentionProblem(direction=direction))
    other = make_attention_row(problem=AttentionProblem(direction=direction, backward_count="model"))
    rates = [make_attention_rate(row, 0.5), make_attention_rate(other, 0.6)]
    assert [rate.row for rate in select_attention_rates(rates)] == [(row, other)[best_index]]


def test_legacy_figures_are_listed_separately_and_as_printed(tmp_path):
    write_legacy_log(legacy_run(), tmp_path / "old.jsonl")
    page = make_device_page(tmp_path, [tmp_path / "old.jsonl"])
    before, after = page.split("## Legacy")
    assert before.startswith("# Oldcard\n") and "815.5" not in before
    assert "| bfloat16 | mamf-finder v4 | MAMF | 815.5 | 3072x2816x16384 |" in after


def test_a_bad_log_is_named_and_no_table_is_written(run, sweep_records, tmp_path):
    write(tmp_path / "run.jsonl", sweep_records)
    run("results", "submit", "run.jsonl")
    (submitted_log,) = (tmp_path / "results").rglob("*.jsonl")
    records = copy.deepcopy(sweep_records)
    best(records)["tflops"]["median"] *= 1.05
    write(submitted_log, records)
    code, out, err = run("results", "table")
    assert code == 2
    assert "row-mismatch" in out and submitted_log.name in err
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
    [("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("AMD Instinct MI300X / OAM", "amd-instinct-mi300x-oam")]
    + [(name, f"{name.strip(' .').lower()}-accelerator") for name in ("CON", "nul", "Com1", "LPT9", "PRN.", "aux ")]
    + [("NUL.txt", "nul-txt"), ("..", "unknown-accelerator"), ("COM10", "com10"), ("CON 1", "con-1")],
)
def test_a_folder_is_named_by_its_accelerator(name, folder):
    assert make_folder_name(name) == folder
