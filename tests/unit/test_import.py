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


def write_log(name, text=samples.V2G):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


def import_logs(*paths):
    return main(["import", *paths, "--output-folder", "out"])


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_logs_with_the_same_name_get_numbers(folder, capsys):
    logs = [
        write_log("a/mm.out", samples.V2G + samples.V2A),
        write_log("b/mm.out", samples.V3),
        write_log("mm-2.txt", samples.V4),
    ]
    assert import_logs(*logs) == 0
    assert list_names(folder) == ["mm-2-2.jsonl", "mm-2.jsonl", "mm-3.jsonl", "mm.jsonl"]
    out = capsys.readouterr().out
    assert "out/mm-2.jsonl (a/mm.out): mamf-finder v2" in out
    assert "out/mm-3.jsonl (b/mm.out): mamf-finder v3" in out
    assert read_legacy_log_or_none(folder / "mm-2-2.jsonl").version == "v4"


def test_a_compressed_file_that_expands_too_much_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(finder, "MAX_FINDER_LOG_BYTES", 1 << 20)
    Path("mm.gz").write_bytes(gzip.compress(b"a" * (64 << 20)))
    assert import_logs("mm.gz") == 2
    assert "has at most 1 MiB" in capsys.readouterr().err


def test_an_existing_file_is_kept_and_no_other_is_written(folder, capsys):
    (folder / "b.jsonl").write_text("precious")
    assert import_logs(write_log("a.out"), write_log("b.out")) == 2
    assert "out/b.jsonl already exists" in capsys.readouterr().err
    assert list_names(folder) == ["b.jsonl"]
    assert (folder / "b.jsonl").read_text() == "precious"


def call_at_the_second_file(monkeypatch, action):
    synchronized_files, original_fsync = [], os.fsync

    def fsync(file):
        synchronized_files.append(file)
        if len(synchronized_files) == 2:
            action()
        original_fsync(file)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_leaves_nothing_and_the_import_can_be_repeated(folder, monkeypatch, capsys):
    def raise_disk_full():
        raise OSError(errno.ENOSPC, "No space left on device")

    call_at_the_second_file(monkeypatch, raise_disk_full)
    logs = [write_log("a.out"), write_log("b.out"), write_log("c.out")]
    assert import_logs(*logs) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "mamf: cannot write out/b.jsonl: No space left on device\n")
    assert list_names(folder) == []
    assert import_logs(*logs) == 0
    assert list_names(folder) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_an_import_completes_although_its_output_is_no_longer_read(folder, monkeypatch):
    """Simulate ``mamf import ... | head -1``, where printing fails once ``head`` has ended."""

    class ClosedStream(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return devnull

    devnull = os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr(sys, "stdout", ClosedStream())
    assert import_logs(write_log("a.out"), write_log("b.out")) == 0
    assert list_names(folder) == ["a.jsonl", "b.jsonl"]


def test_the_imported_log_of_an_interrupted_run_is_shown_without_scouts(folder, capsys):
    import_logs(write_log("mm.out", samples.V2G.split("Tried 3")[0]))
    main(["show", "out/mm.jsonl"])
    out = capsys.readouterr().out
    assert "the run was interrupted, so it has no ceilings" in out
    assert "scout" not in out
