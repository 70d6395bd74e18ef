"""Test that mamf writes a file completely or not at all, and does not overwrite other files by accident."""

import errno
import os

import pytest

from mamf.errors import RunLogWriteError, UsageError
from mamf.files import create_file_atomically, write_file_atomically


def list_names(folder):
    return [path.name for path in folder.iterdir()]


def make_failing_function(error_number):
    def fail(*arguments, **keywords):
        raise OSError(error_number, os.strerror(error_number))

    return fail


def test_an_existing_file_is_replaced_or_refused(tmp_path):
    path = tmp_path / "a.txt"
    create_file_atomically(path, "old")
    with pytest.raises(UsageError, match=r"a\.txt already exists"):
        create_file_atomically(path, "new")
    assert path.read_text() == "old"
    write_file_atomically(path, "new")
    assert path.read_text() == "new"
    assert list_names(tmp_path) == ["a.txt"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("a.txt")
    with pytest.raises(UsageError, match="exists"):
        create_file_atomically(tmp_path / "link", "new")
    write_file_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "new"


def test_a_full_disk_leaves_existing_files_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", make_failing_function(errno.ENOSPC))
    with pytest.raises(RunLogWriteError, match=r"cannot write .*a\.txt: No space left"):
        write_file_atomically(path, "new")
    with pytest.raises(RunLogWriteError):
        create_file_atomically(tmp_path / "b.txt", "new")
    assert path.read_text() == "old"
    assert list_names(tmp_path) == ["a.txt"]


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "a.txt"

    def pieces():
        path.write_text("somebody else's")
        yield "mine"

    with pytest.raises(UsageError, match="exists"):
        create_file_atomically(path, pieces())
    assert path.read_text() == "somebody else's"
    assert list_names(tmp_path) == ["a.txt"]


def test_a_file_is_created_on_a_file_system_without_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", make_failing_function(errno.EPERM))
    create_file_atomically(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").read_text() == "text"
    assert list_names(tmp_path) == ["a.txt"]


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file_atomically(pipe, ["a", "b"])
    assert os.read(reader, 9) == b"ab"
    os.close(reader)
    assert pipe.is_fifo()
    assert list_names(tmp_path) == ["pipe"]
