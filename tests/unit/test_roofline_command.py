"""``mamf roofline`` as a command: measured in virtual time, resumed, shown, drawn, checked."""

import json
import shutil

import library
import pytest
from contribution_logs import found

from mamf.cli import main
from mamf.cli.commands import roofline as session
from mamf.logs.run_log import read_run_log
from mamf.profiling.log import create_profile_log, write_profile
from mamf.profiling.profile import ClassRow, Profile

ROOFS = ("bfloat16", "cache", "memory")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roofline")
    with pytest.MonkeyPatch.context() as patch:
        little(patch)
        patch.chdir(folder)
        assert main(["roofline", "--output", "roofline.jsonl", "--picture", "roof.png", "--export", "tracelens"]) == 0
    return folder


def little(patch):
    """The simulated device, and a search of few shapes."""
    library.install(patch)
    patch.setattr(session, "plan_for", library.short(session.plan_for, (8192, 16384)))
    patch.setattr(session, "_PASSES", 256)  # long launches are few
    patch.setattr(session, "_CACHES", (64, 128))


@pytest.fixture
def here(run, measured, monkeypatch):
    little(monkeypatch)
    shutil.copytree(measured, run.folder, dirs_exist_ok=True)
    return run.folder


def test_it_measures_every_roof_and_keeps_one_log_of_them(here):
    log = read_run_log(here / "roofline.jsonl")
    assert log.summary["status"] == "complete" and log.header["plan"]["command"] == "roofline"
    assert set(log.all_ceilings) == {("bfloat16", "burst"), ("bfloat16", "sustained")}
    assert {(problem.warm > 1, regime) for problem, regime in log.own_ceilings} == {
        (warm, regime) for warm in (False, True) for regime in ("burst", "sustained")
    }
    assert (here / "roof.png").stat().st_size > 10_000
    arch = json.loads((here / "tracelens.json").read_text())
    assert arch["name"] == "Simulated H100" and set(arch["max_achievable_tflops"]) == {"matrix_bf16"}


def test_its_log_is_accepted_but_for_virtual_time(here):
    rules = found(here / "roofline.jsonl")
    assert rules <= {"simulated", "missing-field", "sensors", "implausible", "changed-code"}


def test_a_figure_that_is_edited_is_caught(here):
    path = here / "roofline.jsonl"
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if '"record": "ceiling"' in line:
            record = json.loads(line)
            name = "tflops" if "tflops" in record else "rate"
            edited = [*lines[:number], json.dumps(record | {name: 1.01 * record[name]}), *lines[number + 1 :]]
            path.write_text("\n".join(edited) + "\n")
            assert "ceiling-mismatch" in found(path)


@pytest.mark.parametrize("form", ["table", "csv", "json", "markdown"])
def test_it_is_shown_and_taken_as_ceilings(run, here, form):
    code, shown, _ = run("show", "roofline.jsonl", "--format", form)
    assert code == 0 and all(name in shown for name in ROOFS)
    code, taken, _ = run("roofline", "--ceiling", "roofline.jsonl", "--format", form)
    assert code == 0 and all(name in taken for name in ROOFS)


def test_rows_are_placed_under_it(run, here):
    shape = "64x8192x8192"
    assert run("sweep", "--shapes", shape, "8192x8192x8192", "--output", "decode.jsonl")[0] == 0
    code, out, _ = run("roofline", "decode.jsonl", "--ceiling", "roofline.jsonl", "--picture", "rows.svg")
    assert code == 0
    code, _, err = run("roofline", "--ceiling", "roofline.jsonl", "decode.jsonl")
    assert code == 2 and "decode.jsonl holds no ceiling" in err and "stand before --ceiling" in err
    line = next(line for line in out.splitlines() if line.startswith(shape))
    assert line.endswith(("  compute", "  bandwidth"))
    assert "Mx8192x8192" in (here / "rows.svg").read_text()
    code, out, _ = run("show", "decode.jsonl", "--ceiling", "roofline.jsonl")
    assert code == 0 and "% of roof" in out
    code, out, _ = run("sweep", "--shapes", shape, "--ceiling", "roofline.jsonl")
    assert code == 0 and "bound by" in out


def test_attention_and_a_profile_are_placed_too(run, here):
    heads = ["--head-dims", "128", "--seq-lens", "4096", "--no-ceiling"]
    assert run("attention", *heads, "--output", "attention.jsonl")[0] == 0
    with create_profile_log(here / "profile.jsonl", "mamf profile", "train.py") as writer:
        matmul = ClassRow("matmul", 0.7, 0.7, 0.0, 9, {"bfloat16": 3 * 10**14}, 0.7)
        write_profile(writer, Profile(1.0, 1, "Simulated H100", True, (matmul,), (), ()))
    code, out, _ = run("roofline", "attention.jsonl", "profile.jsonl", "--ceiling", "roofline.jsonl")
    assert code == 0 and "simulated-attention" in out
    line = next(line for line in out.splitlines() if "train.py" in line)
    assert line.startswith("matmul") and line.endswith("  compute")
    code, _, err = run("show", "attention.jsonl", "--ceiling", "roofline.jsonl")
    assert code == 2 and "mamf roofline LOG --ceiling LOG" in err


def test_what_programs_read_holds_no_line_about_files(run, here):
    code, out, err = run("roofline", "--ceiling", "roofline.jsonl", "--format", "json", "--picture", "new.png")
    assert code == 0 and json.loads(out)["device"] == "Simulated H100" and "figure: new.png" in err


def test_what_was_cut_off_goes_on_and_measures_nothing_twice(run, here):
    whole = (here / "roofline.jsonl").read_text().splitlines()
    rows = [number for number, line in enumerate(whole) if '"record": "measurement"' in line]
    of_bandwidth = next(number for number in rows if '"operation": "bandwidth"' in whole[number])
    for cut in (rows[3], of_bandwidth, rows[-1]):
        path = here / f"cut{cut}.jsonl"
        path.write_text("\n".join(whole[: cut + 1]) + "\n")
        assert run("roofline", "--resume", path.name)[0] == 0
        again = read_run_log(path)
        steps = [(row.problem, row.regime, row.shape, row.kernel, row.phase, row.round) for row in again.measurements]
        assert len(steps) == len(set(steps)) == path.read_text().count('"record": "measurement"')
        assert (len(again.all_ceilings), len(again.own_ceilings)) == (2, 4)
        assert not found(path) & {"ceiling-mismatch", "best-mismatch", "duplicate-row", "foreign-row", "missing-row"}


def test_a_budget_is_kept_and_says_what_is_lacking(run, here):
    code, out, _ = run("roofline", "--budget", "1s", "--output", "short.jsonl")
    log = read_run_log(here / "short.jsonl")
    assert code == 0 and (log.summary["status"], log.summary["reason"]) == ("interrupted", "the budget ended")
    assert log.summary["left"] == 6 - len(log.all_ceilings) - len(log.own_ceilings) > 0
    assert "left, --resume continues" in out


def test_it_is_drawn_compared_and_planned(run, here):
    assert run("plot", "roofline.jsonl", "--output", "again.png")[0] == 0
    assert run("compare", "roofline.jsonl", "roofline.jsonl")[0] == 0
    code, out, _ = run("roofline", "--dry-run", "--dtype", "bfloat16", "float16")
    assert code == 0 and "float16: burst and sustained by simulated.mm" in out and "arrays of" in out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--ceiling", "roofline.jsonl", "--budget", "5s"], "--ceiling measures nothing: leave --budget out"),
        (["--ceiling", "roofline.jsonl", "--output", "x"], "--ceiling measures nothing: leave --output out"),
        (["--ceiling", "missing.jsonl"], "missing.jsonl"),
        (["--ceiling", "roofline.jsonl", "--picture", "roof.png"], "roof.png exists"),
        (["--ceiling", "roofline.jsonl", "--picture", "roof.pdf"], "must end with .png or .svg"),
        (["--ceiling", "roofline.jsonl", "--export", "tracelens"], "tracelens.json exists"),
        (["--export-file", "x.json"], "--export tracelens"),
        (["--resume", "roofline.jsonl", "--dtype", "float16"], "--dtype float16 contradicts"),
        (["--resume", "roofline.jsonl", "--output", "x"], "leave --output out"),
    ],
)
def test_bad_input_is_a_line(run, here, given, told):
    code, _, err = run("roofline", *given)
    assert code == 2 and told in err and err.count("\n") == 1


def test_other_commands_do_not_go_on_with_it(run, here):
    code, _, err = run("find", "--operation", "bandwidth", "--resume", "roofline.jsonl")
    assert code == 2 and "resume it with 'mamf roofline --resume roofline.jsonl'" in err
    assert run("find", "--operation", "bandwidth", "--shapes", "1GiB", "--output", "find.jsonl")[0] == 0
    code, _, err = run("roofline", "--resume", "find.jsonl")
    assert code == 2 and "mamf find --operation bandwidth --resume find.jsonl" in err


def test_another_card_is_refused_unless_asked_for(run, here):
    path = here / "other.jsonl"
    header, *rest = (here / "roofline.jsonl").read_text().splitlines()
    record = json.loads(header)
    record["device"]["name"] = "Simulated H200"
    path.write_text("\n".join([json.dumps(record), *rest]) + "\n")
    code, _, err = run("roofline", "--ceiling", "roofline.jsonl", "other.jsonl")
    assert code == 2 and "Simulated H100 and Simulated H200" in err
    code, out, _ = run("roofline", "--ceiling", "roofline.jsonl", "other.jsonl", "--anyway")
    assert code == 0 and "accepted with --anyway: logs of Simulated H100, Simulated H200" in out
