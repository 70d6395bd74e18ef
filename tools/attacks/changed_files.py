"""Runs in virtual time whose log another program deletes, renames, replaces, truncates or extends, once or repeatedly.

Each ends with exit code 1, or 130 if it is interrupted too, and names a log that lacks nothing. What the other program
left is not touched, and a damaged log is resumed, or after the advice of ``--resume`` the lines that can be saved.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest import mock

from attacks.calls import call
from attacks.counts import Counts
from attacks.honest import RUNS, Run
from attacks.kills import Whole, at_a_write, is_complete, judge, undisturbed, whole_lines
from mamf.testing import SimulatedBackend

_MOST_CHANGES = 3
_FOREIGN = b"not a record\n"
_ADVICE = re.compile(r"head -n (\d+) ")


def _replace(path: Path, content: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(content)
    other.replace(path)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.jsonl")


def _rename_folder(path: Path) -> None:
    path.parent.rename(Path(tempfile.mkdtemp(dir=path.parent.parent), "moved"))


def _replace_folder(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_bytes(_FOREIGN)


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(_FOREIGN)


CHANGES: dict[str, Callable[[Path, Random], None]] = {
    "delete": lambda path, random: path.unlink(),
    "rename": lambda path, random: path.rename(path.with_name("renamed")),
    "replace": lambda path, random: _replace(path, _FOREIGN),
    "replace by an equal file": lambda path, random: _replace(path, path.read_bytes()),
    "replace by a folder": lambda path, random: _replace_by_folder(path),
    "replace by a link": lambda path, random: _replace_by_link(path),
    "empty": lambda path, random: _truncate(path, 0),
    "truncate": lambda path, random: _truncate(path, int(random.random() * path.stat().st_size)),
    "extend": lambda path, random: _extend(path),
    "delete the folder": lambda path, random: shutil.rmtree(path.parent),
    "rename the folder": lambda path, random: _rename_folder(path),
    "replace the folder": lambda path, random: _replace_folder(path),
}


@dataclass
class _Changes:
    """The changes of one run: each meets the log where it is by then."""

    folder: Path
    random: Random
    is_interrupted: bool
    made: list[str] = field(default_factory=list)
    #: What another program left, by path; its content must stay.
    foreign: dict[Path, bytes] = field(default_factory=dict)
    damaged: set[Path] = field(default_factory=set)

    def make(self) -> None:
        logs = sorted(self.folder.rglob("*.jsonl"), key=lambda path: path.lstat().st_mtime_ns)
        logs = [path for path in logs if path.is_file() and path not in self.foreign]
        if not logs:
            return
        path, names = logs[-1], list(CHANGES)
        if path.parent.name != "logs":  # the folder for temporary files, which the system needs too
            names = [name for name in names if "the folder" not in name]
        name = self.random.choice(names)
        CHANGES[name](path, self.random)
        self.made.append(name)
        if path.is_file() and name.startswith("replace"):
            self.foreign[path] = path.read_bytes()
        elif path.is_file():
            self.damaged.add(path)
        if self.is_interrupted:
            signal.raise_signal(signal.SIGHUP)


def attack(folder: Path, random: Random, count: int) -> Counts:
    counts = Counts("files changed under a run")
    whole = {run.name: undisturbed(run, folder / f"{run.name}-whole.jsonl", counts) for run in RUNS}
    while counts.of["inputs"] < count:
        run = random.choice(RUNS)
        counts.of["inputs"] += 1
        with tempfile.TemporaryDirectory(dir=folder) as name, mock.patch("tempfile.tempdir", f"{name}/temporary"):
            _change(run, Path(name), whole[run.name], random, counts)
    return counts


def _change(run: Run, folder: Path, whole: Whole, random: Random, counts: Counts) -> None:
    path, changes = folder / "logs" / "log.jsonl", _Changes(folder, random, random.random() < 0.25)
    path.parent.mkdir()
    command = run.new(path)
    if random.random() < 0.25:  # the log of a run that is resumed
        with _at_launches([random.randint(1, whole.launches)], lambda: signal.raise_signal(signal.SIGTERM)):
            call(command, counts)
        if whole_lines(path):
            command = run.resumed(path)
    if random.random() < 0.5:
        due = [random.randint(1, whole.launches) for _ in range(random.randint(1, _MOST_CHANGES))]
        fate: contextlib.AbstractContextManager[None] = _at_launches(due, changes.make)
    else:
        fate = at_a_write(random.randrange(len(whole_lines(whole.path)) - 1), random, changes.make)
    with fate, _scattered(random):
        ended = call(command, counts)
    where = f"{run.name} after {', '.join(changes.made) or 'nothing'}"
    allowed = (130, 1 if changes.made else 0) if changes.is_interrupted else (1,) if changes.made else (0,)
    if ended.code not in allowed:
        counts.fault("other", where, f"ended with {ended.code}: {ended.err}")
    if "before the first measurement" in ended.err:  # of this run, which wrote no row
        return
    log = Path((re.findall(r"^log: (.*)$", ended.out + ended.err, re.MULTILINE) or [""])[-1])
    if not log.is_file():
        counts.fault("lost", where, f"names no log: {ended.out[-200:]} {ended.err}", len(whole_lines(whole.path)) - 1)
        return
    _finish(run, log, whole, random, counts)
    for left, content in changes.foreign.items():
        if left.exists() and left.read_bytes() != content:
            counts.fault("other", where, "changed a file that another program left")
    for left in sorted(path for path in changes.damaged if path.is_file() and path != log):
        _save(run, left, whole, random, counts)


def _finish(run: Run, log: Path, whole: Whole, random: Random, counts: Counts) -> None:
    """Resume a log if it is not complete, then compare it with an undisturbed one."""
    if broken := sum(not _is_record(line) for line in whole_lines(log)):
        counts.fault("lost", run.name, f"{broken} lines of its log cannot be read", broken)
        return
    if not is_complete(log):
        with _scattered(random):
            if (ended := call(run.resumed(log), counts)).code != 0:
                counts.fault("other", run.name, f"cannot be resumed: {ended.err}")
                return
    judge(run, log, whole.path, counts)


def _save(run: Run, log: Path, whole: Whole, random: Random, counts: Counts) -> None:
    """Resume what a change left of a log: as it is, or its first lines if ``--resume`` says so."""
    lines = whole_lines(log)
    with _scattered(random):
        ended = call(run.resumed(log), counts)
    if ended.code == 2 and (advice := _ADVICE.search(ended.err)):
        saved = log.with_name("saved.jsonl")
        saved.write_bytes(b"".join(lines[: int(advice[1])]))
        _finish(run, saved, whole, random, counts)
    elif ended.code == 0:
        judge(run, log, whole.path, counts)
    elif ended.code != 2 or (lines and _is_record(lines[0], "header")):
        counts.fault("other", run.name, f"--resume of a damaged log says nothing that helps: {ended.err}")


def _is_record(line: bytes, kind: str = "") -> bool:
    try:
        return str(json.loads(line)["record"]).startswith(kind)
    except ValueError:
        return False


def _scattered(random: Random) -> contextlib.AbstractContextManager[object]:
    """A device does not scatter the same way twice: equal samples would be a copy."""
    return mock.patch.object(SimulatedBackend.__init__, "__defaults__", (0, None, random.getrandbits(32)))


@contextlib.contextmanager
def _at_launches(due: list[int], met: Callable[[], None]) -> Iterator[None]:
    def on_launch(number: int) -> None:
        for _ in range(due.count(number)):
            met()

    with mock.patch.object(SimulatedBackend, "on_launch", staticmethod(on_launch)):
        yield
