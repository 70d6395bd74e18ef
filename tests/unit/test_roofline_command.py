"""Test the command ``mamf roofline`` in virtual time: the searches that it runs and continues, its table, picture and
export, and how it compares rows of other logs with given ceilings.
"""

import json
import shutil
import sys

import library
import pytest

from mamf.cli import main
from mamf.cli.commands import roofline
from mamf.engine.search import grid
from mamf.logs.run_log import read_run_log
from mamf.pages.report import make_report_page
from mamf.report.roofline import RooflineChart

LOG_NAMES = ("bfloat16.jsonl", "memory.jsonl", "cache.jsonl")
CEILING_LOGS = tuple(f"roofs/{name}" for name in LOG_NAMES)


@pytest.fixture(scope="module")
def measured_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roofline")
    with pytest.MonkeyPatch.context() as patch:
        install_short_searches(patch)
        patch.chdir(folder)
        assert main(["roofline", "--output-folder", "roofs", "--picture", "roof.png", "--export", "tracelens"]) == 0
    return folder


def install_short_searches(patch):
    """Install the simulated device, and make the searches of ``mamf roofline`` short."""
    library.install(patch)
    patch.setattr(grid, "plan_search", library.short(grid.plan_search, (8192, 16384)))
    patch.setattr(roofline, "_PASSES_OVER_CACHE", 256)  # more passes per launch, so fewer launches to simulate
    patch.setattr(roofline, "_CACHE_SIZE_MULTIPLES", (64, 128))


@pytest.fixture
def folder(run, measured_folder, monkeypatch):
    install_short_searches(monkeypatch)
    shutil.copytree(measured_folder, run.folder, dirs_exist_ok=True)
    return run.folder


def test_each_roof_is_measured_by_a_find_with_its_own_log(folder):
    logs = [read_run_log(folder / path) for path in CEILING_LOGS]
    assert [log.plan.kind for log in logs] == ["find"] * 3
    assert all(log.summary["status"] == "complete" for log in logs)
    ceiling_keys = [
        {(getattr(problem, "warm", 0) > 1, regime) for problem, regime in log.other_ceilings} for log in logs[1:]
    ]
    assert ceiling_keys == [{(is_warm, regime) for regime in ("burst", "sustained")} for is_warm in (False, True)]
    assert set(logs[0].ceilings) == {"burst", "sustained"}
    assert (folder / "roof.png").stat().st_size > 10_000
    exported = json.loads((folder / "tracelens.json").read_text())
    assert exported["name"] == "Simulated H100" and set(exported["max_achievable_tflops"]) == {"matrix_bf16"}


def test_existing_finds_are_continued_and_print_to_stderr(run, folder):
    lines_by_log = {path: (folder / path).read_text().splitlines(keepends=True) for path in CEILING_LOGS}
    (folder / CEILING_LOGS[1]).write_text("".join(lines_by_log[CEILING_LOGS[1]][:4]))
    (folder / CEILING_LOGS[2]).unlink()
    code, out, err = run("roofline", "--output-folder", "roofs", "--format", "json")
    assert code == 0 and json.loads(out)["device"] == "Simulated H100" and "-- mamf find --dtype bfloat16" in err
    for path in CEILING_LOGS:
        log = read_run_log(folder / path)
        assert log.summary["status"] == "complete"
        row_keys = [
            (row.problem, row.regime, row.shape, row.kernel, row.phase, row.round_number) for row in log.measurements
        ]
        assert len(row_keys) == len(set(row_keys)) == (folder / path).read_text().count('"record": "measurement"')
    assert (folder / CEILING_LOGS[0]).read_text().startswith("".join(lines_by_log[CEILING_LOGS[0]]))


def test_the_page_of_the_folder_begins_with_the_roofline(folder):
    section = make_report_page([folder / "roofs"]).sections[0]
    chart, *blocks = section.parts
    assert section.heading == "Roofline" and isinstance(chart, RooflineChart)
    assert "bound by memory below" in blocks[-1].texts[0]
    assert make_report_page([folder / path for path in CEILING_LOGS[:1]]).sections[0].heading == "Pictures"


def test_a_missing_memory_roof_has_a_reason(run, folder):
    code, out, _ = run("roofline", "--ceiling", CEILING_LOGS[0])
    assert code == 0 and "no memory bandwidth is known in burst and sustained: measure it with" in out
    assert "'mamf find --operation bandwidth --set pattern=read --regime burst sustained'" in out
    assert "no memory bandwidth" not in run("roofline", "--ceiling", *CEILING_LOGS)[1]
    assert run("bandwidth", "--pattern", "read", "--size", "1MiB", "--output", "small.jsonl")[0] == 0
    code, _, err = run("roofline", "--ceiling", "small.jsonl")
    assert code == 2 and "its arrays are so small that a cache may serve them: measure with 'mamf bandwidth" in err


def test_rows_are_placed_under_the_roofline(run, folder):
    shape = "64x8192x8192"
    assert run("sweep", "--shapes", shape, "8192x8192x8192", "--output", "decode.jsonl")[0] == 0
    code, out, _ = run("roofline", "decode.jsonl", "--ceiling", *CEILING_LOGS, "--picture", "rows.svg")
    assert code == 0
    code, _, err = run("roofline", "--ceiling", *CEILING_LOGS, "decode.jsonl")
    assert code == 2 and "decode.jsonl has no ceiling: put logs of" in err
    line = next(line for line in out.splitlines() if line.startswith(shape))
    assert line.endswith(("  compute", "  bandwidth"))
    assert "Mx8192x8192" in (folder / "rows.svg").read_text()
    code, out, _ = run("show", "decode.jsonl", "--ceiling", *CEILING_LOGS)
    assert code == 0 and "% of roof" in out
    code, out, _ = run("sweep", "--shapes", shape, "--ceiling", *CEILING_LOGS)
    assert code == 0 and "bound by" in out


def test_without_a_memory_roof_show_gives_shares_of_the_ceiling(run, folder):
    assert run("sweep", "--shapes", "8192x8192x8192", "--output", "sweep.jsonl")[0] == 0
    code, out, _ = run("show", "sweep.jsonl", "--ceiling", CEILING_LOGS[0])
    assert code == 0 and "MAMFU: share of" in out and "from --ceiling" in out and "% of the ceiling (MAMFU)" in out
    assert "rows without a share" not in out and "sustained ceiling" not in out
    code, out, _ = run("roofline", "sweep.jsonl", "--ceiling", CEILING_LOGS[0])
    assert "rows without a share: 1, because the memory bandwidth in burst is not known: measure it with" in out


def test_a_missing_ceiling_is_named_with_the_command_that_measures_it(run, folder):
    assert run("sweep", "--shapes", "64x64x64", "--dtype", "float16", "--output", "half.jsonl")[0] == 0
    for command in ("show", "roofline"):
        code, out, _ = run(command, "half.jsonl", "--ceiling", CEILING_LOGS[0])
        assert code == 0 and "rows without a share: 1, because no float16 burst ceiling is known" in out
        assert "'mamf find --dtype float16 --regime burst'" in out


def test_attention_is_placed_under_the_roofline(run, folder):
    heads = ["--head-dims", "128", "--seq-lens", "4096", "--no-ceiling"]
    assert run("attention", *heads, "--output", "attention.jsonl")[0] == 0
    code, out, _ = run("roofline", "attention.jsonl", "--ceiling", *CEILING_LOGS)
    assert code == 0 and "simulated-attention" in out
    code, _, err = run("show", "attention.jsonl", "--ceiling", *CEILING_LOGS)
    assert code == 2 and "mamf roofline LOG --ceiling LOG" in err


def test_a_bandwidth_log_gives_a_memory_roof(run, folder):
    arguments = ["--pattern", "read", "--shapes", "4GiB", "--output", "bandwidth.jsonl"]
    assert run("bandwidth", *arguments)[0] == 0
    code, out, err = run("roofline", "--ceiling", CEILING_LOGS[0], "bandwidth.jsonl")
    assert code == 0, err
    assert any(line.startswith("memory ") and "4GiB, read" in line for line in out.splitlines())
    assert "was interrupted" not in out


def test_ctrl_c_ends_all_finds_and_shows_what_is_known(run, folder, monkeypatch):
    commands = []
    monkeypatch.setattr(roofline, "run_command", lambda command: commands.append(command) or 130)
    code, out, _ = run("roofline", "--output-folder", "roofs")
    assert (code, len(commands)) == (130, 1) and "bfloat16" in out


def test_a_budget_that_ends_too_soon_says_how_to_continue(run, folder, monkeypatch):
    advice = "ceilings are missing; to continue, repeat the command with --output-folder short"
    code, out, err = run("roofline", "--budget", "0.01s", "--output-folder", "short")
    assert (
        code == 0
        and f"short/bfloat16.jsonl and short/memory.jsonl and short/cache.jsonl: {advice}" in err
        and "memory" in out
    )
    for name in LOG_NAMES[1:]:
        (folder / "short" / name).unlink()
    monkeypatch.setattr(roofline, "run_command", lambda command: 130)
    code, _, err = run("roofline", "--output-folder", "short")
    assert code == 2 and f"short/bfloat16.jsonl: {advice}" in err


@pytest.mark.parametrize(("first", "second"), [("12s", "3m"), ("10m", "30s")])
def test_another_budget_continues_an_existing_search(run, folder, first, second):
    for budget in (first, second):
        code, _, err = run("roofline", "--budget", budget, "--output-folder", "again")
        assert code == 0 and "contradicts" not in err, err
        assert ("--quick" in err) == (first == "12s")


def test_rows_that_read_memory_give_a_roof_even_if_no_ceiling_is_confirmed(run, folder):
    (folder / "half").mkdir()
    shutil.copy(folder / CEILING_LOGS[0], folder / "half")
    lines = (folder / CEILING_LOGS[1]).read_text().splitlines(keepends=True)
    row_lines = [line for line in lines if json.loads(line)["record"] not in ("ceiling", "summary")]
    (folder / "half" / "memory.jsonl").write_text("".join(row_lines[:4]))
    code, out, _ = run("roofline", "--output-folder", "half", "--budget", "0.01s")
    assert code == 0 and any(line.startswith("memory ") for line in out.splitlines()), out
    assert "memory: the highest of the first measurements, not a ceiling that a search confirmed" in out
    assert "memory.jsonl: the run was interrupted, so its ceilings may be too low" in out


def test_a_log_of_another_card_is_refused_before_anything_is_measured(run, folder):
    assert run("sweep", "--shapes", "64x64x64", "--output", "sweep.jsonl")[0] == 0
    text = (folder / "sweep.jsonl").read_text()
    (folder / "sweep.jsonl").write_text(text.replace("Simulated H100", "Simulated H200"))
    code, _, err = run("roofline", "sweep.jsonl", "--output-folder", "fresh")
    assert code == 2 and "cannot compare Simulated H100 and Simulated H200: give logs of one card" in err
    assert not (folder / "fresh").exists()
    assert run("roofline", "sweep.jsonl", "--output-folder", "roofs", "--anyway")[0] == 0


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (["roofline", "--output-folder", "fresh"], ["explain", "--shape", "8x8x8", "--output", "fresh"]):
        code, _, err = run(*command, "--picture", "fresh.png")
        assert code == 2 and "drawing needs matplotlib: pip install matplotlib" in err and err.count("\n") == 1
        assert not (folder / "fresh").exists()


def test_a_dry_run_names_each_find(run, folder):
    code, _, err = run("roofline", "--dry-run", "--dtype", "bfloat16", "float16", "--output-folder", "none")
    assert code == 0 and not (folder / "none").exists()
    assert [err.count(text) for text in ("--dtype float16", "warm=1 ", "warm=256 ")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ceiling", *CEILING_LOGS, "--budget", "5s"], "--ceiling cannot be combined with --budget"),
        (["--ceiling", *CEILING_LOGS, "--picture", "roof.png"], "roof.png exists"),
        (["--ceiling", *CEILING_LOGS, "--export", "tracelens"], "tracelens.json exists"),
        (["--export-file", "x.json"], "--export tracelens"),
    ],
)
def test_bad_input_is_refused_in_one_line(run, folder, arguments, complaint):
    code, _, err = run("roofline", *arguments)
    assert code == 2 and complaint in err and err.count("\n") == 1


def test_a_ceiling_of_another_card_is_refused_without_anyway(run, folder):
    header, *other_lines = (folder / CEILING_LOGS[0]).read_text().splitlines()
    record = json.loads(header)
    record["device"]["name"] = "Simulated H200"
    (folder / "other.jsonl").write_text("\n".join([json.dumps(record), *other_lines]) + "\n")
    code, _, err = run("roofline", "--ceiling", *CEILING_LOGS, "other.jsonl")
    assert code == 2 and "Simulated H100 and Simulated H200" in err
    assert run("roofline", "--ceiling", *CEILING_LOGS, "other.jsonl", "--anyway")[0] == 0
    assert run("sweep", "--shapes", "64x64x64", "--output", "sweep.jsonl")[0] == 0
    for command in (["show", "sweep.jsonl"], ["sweep", "--shapes", "64x64x64"]):
        code, _, err = run(*command, "--ceiling", "other.jsonl")
        assert code == 2 and "give logs of one card with --ceiling ('mamf roofline'" in err


def test_a_ceiling_with_an_unknown_interval_gives_no_roof_and_other_commands_refuse_it(run, folder):
    records = [json.loads(line) for line in (folder / CEILING_LOGS[0]).read_text().splitlines()]
    for record in records:
        if record["record"] == "ceiling":
            record["interval_tflops"][0] = 0.0
    (folder / "noisy.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run("sweep", "--shapes", "64x64x64", "--output", "sweep.jsonl")[0] == 0
    for command in (["show", "sweep.jsonl"], ["sweep", "--shapes", "64x64x64"]):
        code, _, err = run(*command, "--ceiling", "noisy.jsonl", *CEILING_LOGS[1:])
        assert code == 2 and "ceiling is too noisy to compare rates with it" in err
    code, out, _ = run("roofline", "sweep.jsonl", "--ceiling", "noisy.jsonl", *CEILING_LOGS[1:])
    assert code == 0 and "because its ceiling is too noisy: measure it again" in out
    assert "near the limit" not in out
    assert run("roofline", "--ceiling", "noisy.jsonl", "--picture", "noisy.png")[0] == 0
    assert (folder / "noisy.png").exists(), "mamf must draw the picture even without roofs and rows"


def test_a_search_that_ends_without_a_ceiling_is_named(run, folder, monkeypatch):
    for name in LOG_NAMES:
        records = [json.loads(line) for line in (folder / "roofs" / name).read_text().splitlines()]
        remaining_records = [record for record in records if record["record"] in ("header", "summary")]
        (folder / "roofs" / name).write_text("".join(f"{json.dumps(record)}\n" for record in remaining_records))
    monkeypatch.setattr(roofline, "run_command", lambda command: 0)
    code, _, err = run("roofline", "--output-folder", "roofs")
    assert (code, "roofs/cache.jsonl: ceilings are missing; to continue" in err) == (2, True)
