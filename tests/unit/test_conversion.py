"""mamf results convert: early logs become logs that every command reads, and nothing that they held is lost."""

import errno
import json
from pathlib import Path

import pytest

from mamf.api.reading import read_log
from mamf.cli import main
from mamf.errors import RunLogError
from mamf.files import write_whole
from mamf.logs import conversion
from mamf.logs.comparability import noted_differences
from mamf.logs.writer import lock

RESULTS = Path(__file__).resolve().parents[2] / "results"
SWEEP = "nvidia-h100-80gb-hbm3/sweep-torch-mm-bfloat16-sustained-20261121-031610.jsonl"
FIND = "nvidia-h100-80gb-hbm3/find-bfloat16-burst-20261121-052800.jsonl"
ATTENTION = "nvidia-h100-80gb-hbm3/attention-bfloat16-fwd-sustained-20261121-074504.jsonl"
FINDER = "nvidia-h100-80gb-hbm3/mamf-finder-v2g-bfloat16-20261120-235345.jsonl"
FIRST_OF_SCHEMA_4 = "nvidia-h200/sweep-torch-mm-bfloat16-burst-sustained-20261121-143639.jsonl"
#: Fields that no row of schema 1 has.
LATER = ("operation", "problem", "details", "peak_memory_bytes", "repeatability", "phase", "round")


def records_in(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture
def early(tmp_path):
    """run.jsonl, a sweep as schema 1 had it, and what it is converted to."""
    header, *rest = converted = records_in(RESULTS / SWEEP)
    header = {name: value for name, value in header.items() if name != "converted_from"} | {"schema": 1}
    header["plan"] = {name: value for name, value in header["plan"].items() if name != "command"}
    rest = [{name: value for name, value in record.items() if name not in LATER} for record in rest]
    return write(tmp_path / "run.jsonl", [header, *rest]), converted


def convert(*arguments):
    return main(["results", "convert", *map(str, arguments)])


def test_a_converted_log_takes_the_place_of_its_original(early, tmp_path, capsys):
    path, converted = early
    before = path.read_bytes()
    assert convert(path) == 0
    assert capsys.readouterr().out == f"{path}: schema 1, converted; the original is {path}.schema1\n"
    assert (records_in(path), Path(f"{path}.schema1").read_bytes()) == (converted, before)
    assert convert(path) == 0
    assert capsys.readouterr().out == f"{path}: schema 4, unchanged\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.jsonl", "run.jsonl.schema1"]
    assert main(["show", str(path)]) == 0
    assert "719.5" in capsys.readouterr().out


def test_with_an_output_the_original_stays(early, tmp_path, capsys):
    path, converted = early
    before, folder = path.read_bytes(), tmp_path / "new"
    assert convert(path, "--output", folder) == 1
    assert "there is no folder" in capsys.readouterr().err
    folder.mkdir()
    assert convert(path, "--output", folder) == 0
    assert (path.read_bytes(), records_in(folder / "run.jsonl")) == (before, converted)
    assert convert(path, "--output", folder) == 1
    assert "exists and is not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("name", [FIND, ATTENTION, FINDER, FIRST_OF_SCHEMA_4])
def test_each_kind_of_log_is_converted(name, tmp_path):
    """Each without the fields that its schema did not have."""
    header, *rest = converted = records_in(RESULTS / name)
    if name == FINDER:
        records = [header | {"schema": 3}, *rest]
    else:
        header = header | {"schema": header.get("converted_from", 4)}
        header.pop("converted_from", None)
        header["plan"] = {key: value for key, value in header["plan"].items() if key not in ("operation", "searches")}
        missing = ("operation",) if name == ATTENTION else ("operation", "problem")
        rest = [{key: value for key, value in record.items() if key not in missing} for record in rest]
        if header["schema"] < 4:
            rest = [{key: value for key, value in record.items() if key != "repeatability"} for record in rest]
        records = [header, *rest]
    path = write(tmp_path / "run.jsonl", records)
    assert records != converted
    assert convert(path) == 0
    assert records_in(path) == converted


@pytest.mark.parametrize("command", ["show", "plot", "compare", "results check", "results submit", "sweep --resume"])
def test_other_commands_name_the_conversion_in_one_line(command, early, capsys):
    path, _ = early
    before = path.read_bytes()
    arguments = [*command.split(), str(path), *([str(path)] if command == "compare" else [])]
    assert main(arguments) in (1, 2)
    said = "".join(capsys.readouterr())
    assert said.count(f"{path} has schema 1: convert it with 'mamf results convert {path}'") == 1
    assert path.read_bytes() == before


def test_an_imported_log_and_the_library_name_it_too(early, tmp_path):
    header, *rest = records_in(RESULTS / FINDER)
    for path in (early[0], write(tmp_path / "my run.jsonl", [header | {"schema": 3}, *rest])):
        with pytest.raises(RunLogError, match=r"schema [13]: convert it with 'mamf results convert "):
            read_log(path)


def test_a_first_log_of_schema_4_names_it_where_a_field_is_missing(tmp_path):
    header, *rest = records_in(RESULTS / FIRST_OF_SCHEMA_4)
    del rest[0]["operation"]
    with pytest.raises(RunLogError, match="line 2: field operation is missing; 'mamf results convert' completes"):
        read_log(write(tmp_path / "run.jsonl", [header, *rest]))


def test_a_guards_baseline_and_a_folder_such_as_the_cache(early, tmp_path, capsys):
    path, _ = early
    (tmp_path / "guard.toml").write_text('operation = "matmul"\nkernels = "a"\nshapes = "b"\nbaseline = "run.jsonl"\n')
    assert convert(tmp_path / "guard.toml") == 0
    assert f"{path}: schema 1, converted" in capsys.readouterr().out
    Path(f"{path}.schema1").rename(tmp_path / "second.jsonl")
    assert convert(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: schema 4, unchanged",
        f"{tmp_path / 'second.jsonl'}: schema 1, converted; the original is {tmp_path / 'second.jsonl'}.schema1",
    ]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text.replace('"shape": {', '"shape": 3, "was": {', 1), "malformed"),
        (lambda text: text.replace('"status": "ok", ', "", 1), "line 2: field status is missing"),
        (lambda text: text.replace('"plan": {', '"plans": {', 1), "field 'plan' is missing"),
        (lambda text: text.replace('"schema": 1', '"schema": 9'), "line 1: schema 9 is not known"),
        (lambda text: text.replace('"schema": 1', '"schema": [1]'), "line 1: schema [1] is not known"),
        (lambda text: text.replace('"schema": 1', '"schema": true'), "converted_from: a whole number is due"),
        (lambda text: text.replace('{"record": "m', "{", 1), "line 2: not a JSON object"),
        (lambda text: text[:100], "holds no whole line"),
    ],
)
def test_a_damaged_log_gets_one_line_and_stays(damage, complaint, early, tmp_path, capsys):
    path, _ = early
    path.write_text(damaged := damage(path.read_text()))
    assert convert(path, tmp_path / "none.jsonl") == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert complaint in told[0]
    assert str(path) in told[0]
    assert "there is no such file" in told[1]
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == (damaged, ["run.jsonl"])


def test_a_killed_runs_last_line_stays_in_the_original(early):
    path, converted = early
    path.write_bytes(before := path.read_bytes()[:-20])
    assert convert(path) == 0
    assert (records_in(path), Path(f"{path}.schema1").read_bytes()) == (converted[:-1], before)


def test_a_full_disk_changes_nothing(early, tmp_path, monkeypatch, capsys):
    path, _ = early
    before = path.read_bytes()

    def full(target, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(conversion, "write_whole", full)
    assert convert(path) == 1
    assert "No space left" in capsys.readouterr().err
    assert (path.read_bytes(), [each.name for each in tmp_path.iterdir()]) == (before, ["run.jsonl"])
    monkeypatch.setattr(conversion, "write_whole", write_whole)
    assert convert(path) == 0


def test_neither_a_kept_original_nor_a_run_in_progress_is_overwritten(early, capsys):
    path, _ = early
    before = path.read_bytes()
    with path.open("rb") as held:
        lock(held.fileno(), path)
        assert convert(path) == 1
        assert "is being written by" in capsys.readouterr().err
    kept = Path(f"{path}.schema1")
    kept.write_text("mine")
    assert convert(path) == 1
    assert f"{kept} exists and is not overwritten" in capsys.readouterr().err
    assert (path.read_bytes(), kept.read_text()) == (before, "mine")


def test_a_comparison_with_a_converted_log_says_how_its_figures_were_made():
    converted, other = (read_log(RESULTS / name).header for name in (SWEEP, FIRST_OF_SCHEMA_4))
    told = "figures and intervals as before schema 4 against as of schema 4"
    assert told in map(str, noted_differences(converted, other))
    assert "figures" not in " ".join(map(str, noted_differences(converted, converted)))


def test_only_the_command_loads_the_conversion():
    holders = [
        path for path in Path(conversion.__file__).parents[1].rglob("*.py") if "logs.conversion" in path.read_text()
    ]
    assert [path.name for path in holders] == ["results.py"]
