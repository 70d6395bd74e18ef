"""Test the report on the profiles of all ranks of a job: step times, exposed communication and stragglers."""

import json
from dataclasses import replace

import pytest

from mamf.cli import main
from mamf.errors import UsageError
from mamf.measurement import IDLE_LABEL
from mamf.profiling.classes import COMMUNICATION
from mamf.profiling.log import get_rank_log_path, make_ranks_document, read_rank_logs, write_profile
from mamf.profiling.profile import ClassRow, Profile
from mamf.report.formats import FORMATTERS


def make_class_row(name, visible, hidden=0.0):
    return ClassRow(name, visible, hidden, 1)


def make_rank_profile(matmul, exposed, idle, hidden=0.0):
    """Return the profile of a rank that ran two steps. All arguments are milliseconds per step."""
    rows = [
        make_class_row("matmul", 2e-3 * matmul),
        make_class_row(COMMUNICATION, 2e-3 * exposed, 2e-3 * hidden),
        make_class_row(IDLE_LABEL, 2e-3 * idle),
    ]
    step = 1e-3 * (matmul + exposed + idle)
    return Profile(2 * step, 2, "NVIDIA H200", True, tuple(rows), unprofiled_step_seconds=step)


#: Rank 1 computes for the longest time. The other ranks wait for it, which makes their communication longer.
RANKS = {
    0: ("train.py", make_rank_profile(80, 20, 0, 5)),
    1: ("train.py", make_rank_profile(95, 3, 2, 9)),
    2: ("train.py", make_rank_profile(79, 20.5, 0.5)),
}


def write_profiles(folder, ranks=RANKS):
    folder.mkdir(exist_ok=True)
    for number, (script, profile) in ranks.items():
        write_profile(get_rank_log_path(folder, number), "mamf profile", script, profile)
    return folder


def test_the_rank_that_computes_longest_is_the_straggler():
    report = json.loads(FORMATTERS["json"](make_ranks_document(RANKS), None))
    rows = {row["rank"]: row for row in report["ranks"]}
    milliseconds = {name: [round(1e3 * (row[f"{name}_seconds"] or 0), 6) for row in rows.values()] for name in
        ("step", "own", "behind", "exposed", "hidden", "idle")}  # fmt: skip
    assert milliseconds == {
        "step": [100, 100, 100],
        "own": [80, 97, 79.5],
        "behind": [0.5, 17.5, 0],
        "exposed": [20, 3, 20.5],
        "hidden": [5, 9, 0],
        "idle": [0, 2, 0.5],
    }
    assert rows[0]["idle_seconds"] is None, "idle time must be unknown, because rank 0 is never idle"
    text = FORMATTERS["table"](make_ranks_document(RANKS), None)
    assert "stragglers: rank 1; rank 1 takes 17.50 ms more" in text
    assert "3 x NVIDIA H200" in text


def test_profiler_overhead_on_a_cpu_makes_no_straggler():
    """Check that a rank is not a straggler if only the profiler makes its operations take 20 % longer."""
    cpu = replace(make_rank_profile(80, 20, 0), is_of_device=False)
    slowed = replace(make_rank_profile(96, 24, 0), is_of_device=False, unprofiled_step_seconds=0.1)
    report = json.loads(FORMATTERS["json"](make_ranks_document({0: ("train.py", cpu), 1: ("train.py", slowed)}), None))
    rows = {row["rank"]: row for row in report["ranks"]}
    for name, milliseconds in (("step", 100), ("own", 80), ("behind", 0), ("exposed", 20)):
        assert 1e3 * rows[1][f"{name}_seconds"] == pytest.approx(milliseconds), name


def test_a_rank_without_a_profile_is_named(tmp_path):
    folder = write_profiles(tmp_path, {0: RANKS[0], 2: RANKS[2]})
    get_rank_log_path(folder, 1).write_text('{"record": "header"}\n')
    (folder / "rank-x.jsonl").write_text("nonsense")
    text = FORMATTERS["table"](make_ranks_document(read_rank_logs(folder), 5), None)
    missing = [number for number in range(5) if f"the profile of rank {number} is missing: check that" in text]
    assert missing == [1, 3, 4]


def test_a_folder_of_ranks_is_shown_and_reported(tmp_path, capsys):
    folder = write_profiles(tmp_path / "ranks")
    assert main(["show", str(folder), "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(RANKS)
    page = tmp_path / "ranks.html"
    assert main(["report", str(folder), "--output", str(page)]) == 0
    text = page.read_text()
    assert "stragglers: rank 1" in text
    assert "rank-2.jsonl: Profile of train.py on NVIDIA H200" in text
    assert main(["show", str(tmp_path)]) == 2
    with pytest.raises(UsageError, match="has no profiles of ranks"):
        read_rank_logs(tmp_path)
