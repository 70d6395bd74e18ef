"""Test ``mamf import``: the names of the logs that it writes, and that it writes either all logs or none."""

import errno
import gzip
import io
import os
import sys
from pathlib import Path

import finder_log_samples as samples
import pytest

from mamf.cli import main
from mamf.logs import finder
from mamf.logs.legacy import read_legacy_log_or_none


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    return tmp_path / "out"


def log(name, text=samples.V2G):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


def imported(*names):
    return main(["import", *names, "--output-folder", "out"])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_logs_and_runs_of_one_name_are_numbered_and_named(folder, capsys):
    logs = [log("a/mm.out", samples.V2G + samples.V2A), log("b/mm.out", samples.V3), log("mm-2.txt", samples.V4)]
    assert imported(*logs) == 0
    assert names(folder) == ["mm-2-2.jsonl", "mm-2.jsonl", "mm-3.jsonl", "mm.jsonl"]
    out = capsys.readouterr().out
    assert "out/mm-2.jsonl (a/mm.out): mamf-finder v2" in out
    assert "out/mm-3.jsonl (b/mm.out): mamf-finder v3" in out
    assert read_legacy_log_or_none(folder / "mm-2-2.jsonl").version == "v4"


def test_a_packed_file_of_much_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(finder, "MAX_FINDER_LOG_BYTES", 1 << 20)
    Path("mm.gz").write_bytes(gzip.compress(b"a" * (64 << 20)))
    assert imported("mm.gz") == 2
    assert "has at most 1 MiB" in capsys.readouterr().err


def test_what_is_there_is_kept_and_nothing_written_beside_it(folder, capsys):
    (folder / "b.jsonl").write_text("precious")
    assert imported(log("a.out"), log("b.out")) == 2
    assert "out/b.jsonl already exists" in capsys.readouterr().err
    assert names(folder) == ["b.jsonl"]
    assert (folder / "b.jsonl").read_text() == "precious"


def on_the_second_file(monkeypatch, happens):
    synchronized, really = [], os.fsync

    def fsync(file):
        synchronized.append(file)
        if len(synchronized) == 2:
            happens()
        really(file)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_leaves_nothing_and_the_import_can_be_repeated(folder, monkeypatch, capsys):
    def is_full():
        raise OSError(errno.ENOSPC, "No space left on device")

    on_the_second_file(monkeypatch, is_full)
    logs = [log("a.out"), log("b.out"), log("c.out")]
    assert imported(*logs) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "mamf: cannot write out/b.jsonl: No space left on device\n")
    assert names(folder) == []
    assert imported(*logs) == 0
    assert names(folder) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_a_reader_that_stops_reading_stops_no_import(folder, monkeypatch):
    """Simulate ``mamf import ... | head -1``, where printing fails once ``head`` has ended."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return null

    null = os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert imported(log("a.out"), log("b.out")) == 0
    assert names(folder) == ["a.jsonl", "b.jsonl"]


def test_what_is_shown_of_an_interrupted_import_calls_no_figure_a_scout(folder, capsys):
    imported(log("mm.out", samples.V2G.split("Tried 3")[0]))
    main(["show", "out/mm.jsonl"])
    out = capsys.readouterr().out
    assert "the run was interrupted, so it has no ceilings" in out
    assert "scout" not in out
