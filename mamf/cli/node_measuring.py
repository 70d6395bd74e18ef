"""Measures for ``mamf node``: as the parent of one process per device, as such a process, or as a rank."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from mamf.backend import LEADER
from mamf.choices import UNKNOWN, VERDICT_EXIT_CODES
from mamf.cli.commands.node_reading import existing, print_verdict
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.progress import Phases
from mamf.cli.terminal import say, warn
from mamf.engine.runner import crashes_of
from mamf.engine.traits import fit_traits
from mamf.errors import LogChangedWarning, LogMismatchError, MamfError, RunLogWriteError, UnavailableError, UsageError
from mamf.node.children import ADDRESS, FAILURE, IN_FLIGHT, PHASE, WAITS, Children, Watch, watched
from mamf.node.device import DeviceRun
from mamf.node.figures import Launched, Place, launched, nowhere, place_of
from mamf.node.gathering import Run, devices_of, read_run
from mamf.node.group import Meeting
from mamf.node.ranks import COMPLETE, GO, Rank, arrive, gathered, joint_decision, received, visible_index
from mamf.node.worker import in_flight
from mamf.plans import NODE_BUDGET_SECONDS
from mamf.plugins.discovery import backend_class, first_backend, open_backend

# Time to reach rank 0, which imports torch from a file system that all ranks read at once.
_MEETING_SECONDS = 300.0
_FAREWELL_SECONDS = 10.0


def run(options: argparse.Namespace) -> int:
    options.backend = options.backend or first_backend()
    if options.led:
        return _run_child(options)
    one_of_many = launched(os.environ)
    return _run_children(options) if one_of_many is None else _run_rank(options, one_of_many)


def _make_folder(folder: Path, is_shared: bool = False) -> Path:
    """Make the folder for new logs. Raises UsageError if it is not empty or cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_shared and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty: name another --output-folder, or --resume it")
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}; name another --output-folder") from None
    return folder


def _dated_name() -> Path:
    return Path(f"mamf-node-{datetime.now():%Y%m%d-%H%M%S}")


# -- all devices of this machine, a process each -----------------------------------------------------------------------


def _run_children(options: argparse.Namespace) -> int:
    count = backend_class(options.backend).device_count()
    held = _held_devices(options.resume) if options.resume else []
    indices = list(dict.fromkeys(options.devices or held or range(count)))
    if held and indices != held:
        names_held = " ".join(map(str, held))
        raise LogMismatchError(f"{options.resume} was measured by devices {names_held}: resume it without --devices")
    if missing := [each for each in indices if each >= count]:
        raise UnavailableError(f"{options.backend} has no device {missing[0]}; it has {count}")
    if options.dry_run:
        which = f"{len(indices)} of {options.backend} ({', '.join(map(str, indices))}), one process each"
        return _dry_run(options, which, len(indices) > 1)
    folder = options.resume or _make_folder(options.output_folder or _dated_name())
    places = {rank: Place(rank, 0, each) for rank, each in enumerate(indices)}
    run = Run(len(places), places=places)
    run.write(folder)
    watch = Watch(list(places), options.patience)
    is_interrupted = False
    with Interruption():
        try:
            _measured_by_children(options, folder, run, watch)
        except KeyboardInterrupt:
            is_interrupted = True
    run.failures, run.is_over, run.is_cut = watch.failures, not is_interrupted, is_interrupted
    if watch.was_left:
        failed = ", ".join(names(run)[rank] for rank in watch.failures)
        run.apart = f"{failed} failed during the measurements of all devices together"
    _write_run(run, folder)
    _, devices = devices_of([folder], run)
    devices = [replace(device, address=watch.addresses.get(device.rank)) for device in devices]
    code = print_verdict(options, run, devices, [folder])
    say(f"logs: {folder}", sys.stderr)
    return EXIT_CODE if is_interrupted else code


def _write_run(run: Run, folder: Path) -> None:
    """Write the run; an error is only a warning, so that the verdict is still printed."""
    try:
        run.write(folder)
    except (RunLogWriteError, UsageError) as error:
        warn(str(error))


def _dry_run(options: argparse.Namespace, devices: str, are_several: bool) -> int:
    say(f"devices: {devices}")
    verify = f", verify ({options.verify:.0f} s)" if options.verify else ""
    say(f"each: find ({options.budget or NODE_BUDGET_SECONDS:.0f} s), bandwidth, copies, 5000 equal launches{verify}")
    say("together: peer copies, collectives" if are_several else "together: nothing, there is only one device")
    return 0


def _held_devices(folder: Path) -> list[int]:
    """The devices of the run to resume, in the order of their ranks. Raises UsageError if there is no run, and
    LogMismatchError for a run on several nodes.
    """
    run = _held_run(folder)
    if any(place.node for place in run.places.values()):
        raise LogMismatchError(f"{folder} was measured by {run.ranks} ranks: resume it with as many")
    return [run.places[rank].index for rank in sorted(run.places)]


def _held_run(folder: Path) -> Run:
    """The run to resume, empty if its leader wrote nothing here. Raises UsageError without any log."""
    run = read_run(existing(folder))
    if run is None and not any(map(place_of, folder.iterdir())):
        raise UsageError(f"no logs of 'mamf node' in {folder}")
    return run or Run()


def _measured_by_children(options: argparse.Namespace, folder: Path, run: Run, watch: Watch) -> None:
    meeting = Meeting("127.0.0.1", 0, True, _MEETING_SECONDS) if run.ranks > 1 else None
    port = meeting.port if meeting else 0
    commands = {rank: _command(options, folder, place, run.ranks, port) for rank, place in run.places.items()}

    def together() -> None:
        if meeting is None:
            return
        came = {rank: meeting.receive(f"alone/{rank}", 1.0) if rank in watch.running else None for rank in run.places}
        decided = joint_decision(came)
        run.apart = "" if decided in (GO, COMPLETE) else decided
        meeting.publish("together", decided)

    environment = {**os.environ, "PYTHONUNBUFFERED": "1", LEADER: str(os.getpid())}
    with Children(commands, environment) as children, Phases(names(run)) as phases:
        watched(watch, children.processes, children.next, together, lambda: phases.show(watch.phases))


def names(run: Run) -> dict[int, str]:
    return {rank: f"device {place.index}" for rank, place in run.places.items()}


def _command(options: argparse.Namespace, folder: Path, place: Place, ranks: int, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "mamf", "node", "--led", *map(str, (place.rank, ranks, place.index, port))),
        *("--output-folder", str(folder), "--patience", f"{options.patience:g}s", "--backend", options.backend),
        *(("--dtype", options.dtype) if options.dtype else ()),
        *(("--budget", f"{options.budget:g}s") if options.budget else ()),
        *(("--verify", f"{options.verify:g}s") if options.verify else ()),
        *(("--kernel", *options.kernel) if options.kernel else ()),
    ]


def _run_child(options: argparse.Namespace) -> int:
    """Run as a child, which prints records; its log is kept whatever ends it."""
    rank, ranks, device, port = options.led
    own = Launched(Place(rank, 0, device), ranks, "127.0.0.1", port, is_led=True)

    def record(kind: str, value: object) -> None:
        try:
            say(json.dumps({kind: value}))
        except BrokenPipeError:  # the parent is gone: an interruption, not a fault of the device
            raise KeyboardInterrupt from None

    def opens() -> DeviceRun:
        record(PHASE, "opening the device")
        run = _device_run(options, own, options.output_folder, device)
        run.on_progress = lambda text: record(PHASE, text)
        crashes_of(run.backend).keep = lambda row: record(IN_FLIGHT, in_flight(row)[IN_FLIGHT])
        record(ADDRESS, run.backend.bus_address())
        return run

    with Interruption():
        try:
            Rank(
                own,
                Meeting.of(own, _MEETING_SECONDS) if ranks > 1 else None,
                options.output_folder,
                options.patience,
                opens,
                on_wait=lambda: record(PHASE, WAITS),
                on_failure=lambda reason: record(FAILURE, reason),
            ).measure()
        except KeyboardInterrupt:
            return EXIT_CODE
    return 0


def _device_run(options: argparse.Namespace, own: Launched, folder: Path, device: int) -> DeviceRun:
    warnings.simplefilter("error", LogChangedWarning)  # the verdict needs each log at its place
    backend = open_backend(options.backend, device)
    fit_traits(backend)
    asked = (options.dtype, options.kernel, options.budget, options.verify)
    return DeviceRun(backend, own.place, folder, own.ranks, *asked)


# -- one rank of many --------------------------------------------------------------------------------------------------


def _run_rank(options: argparse.Namespace, own: Launched) -> int:
    with Interruption():
        try:
            return _measure_as_rank(options, own)
        except KeyboardInterrupt:
            return EXIT_CODE


def _measure_as_rank(options: argparse.Namespace, own: Launched) -> int:
    if options.devices:
        raise UsageError("the launcher chooses the device of a rank: leave --devices out")
    if options.dry_run:
        return _dry_run(options, f"{own.ranks} of {options.backend}, one rank each", True) if own.leads else 0
    meeting = Meeting.of(own, _MEETING_SECONDS)
    arrive(meeting, own.place)
    folder = _choose_folder(options, own, meeting) if own.leads else _receive_folder(options, own, meeting)
    if folder is None:
        return VERDICT_EXIT_CODES[UNKNOWN]

    def opens() -> DeviceRun:
        _require_own_logs(folder, own.place, options.resume is not None)
        return _device_run(options, own, folder, visible_index(options.backend, own.place.index))

    rank = Rank(own, meeting, folder, options.patience, opens)
    if not own.leads:
        return _follow_leader(rank, meeting)
    rank.measure()
    run, devices = gathered(meeting, own, options.patience, rank.missing)
    _write_run(run, folder)
    code = print_verdict(options, run, devices, [folder])
    _dismiss(meeting, "over", code, set(range(1, own.ranks)) - rank.missing)
    return code


def _follow_leader(rank: Rank, meeting: Meeting) -> int:
    """Measure, and wait until the leader has printed the verdict."""
    with suppress(UnavailableError):  # the meeting place is gone
        rank.measure()
        if meeting.receive("over", rank.patience * 2) is not None:
            meeting.publish(f"heard/{rank.launched.place.rank}", True)
            return 0
    raise UnavailableError(f"no answer from rank 0: 'mamf node --from {rank.folder}' reports on the logs")


def _choose_folder(options: argparse.Namespace, own: Launched, meeting: Meeting) -> Path:
    """The leader's folder, which all other ranks get. If it is unusable, dismisses them and raises UsageError."""
    try:
        folder = (
            _require_same_ranks(options.resume, own)
            if options.resume
            else _make_new_folder(options.output_folder or _dated_name())
        )
        Run(own.ranks, places={rank: nowhere(rank) for rank in range(own.ranks)}).write(folder)
    except MamfError:
        _dismiss(meeting, "folder", "", range(1, own.ranks))
        raise
    meeting.publish("folder", str(folder))
    return folder


def _receive_folder(options: argparse.Namespace, own: Launched, meeting: Meeting) -> Path | None:
    """This rank's folder, which may be local to its node; None if the leader reports an unusable folder."""
    name = meeting.receive("folder", _MEETING_SECONDS)
    if name is None:
        raise UnavailableError("no answer from rank 0")
    if not name:
        meeting.publish(f"heard/{own.place.rank}", True)
        return None
    return _make_folder(options.resume or options.output_folder or Path(name), is_shared=True)


def _dismiss(meeting: Meeting, key: str, value: object, ranks: Iterable[int]) -> None:
    """Send the last message that the other ranks wait for. The meeting place ends with this process."""
    meeting.publish(key, value)
    received(meeting, "heard", sorted(ranks), _FAREWELL_SECONDS)


def _require_same_ranks(folder: Path, own: Launched) -> Path:
    if (ranks := _held_run(folder).ranks) not in (0, own.ranks):
        raise LogMismatchError(f"{folder} was measured by {ranks} ranks, not {own.ranks}: resume it with as many")
    return folder


def _make_new_folder(folder: Path) -> Path:
    _make_folder(folder, is_shared=True)
    if read_run(folder) is not None or any(map(place_of, folder.iterdir())):
        raise UsageError(f"{folder} holds the logs of another run: name another --output-folder, or --resume it")
    return folder


def _require_own_logs(folder: Path, own: Place, is_resumed: bool) -> None:
    """Raises LogMismatchError for logs that this rank cannot resume: the leader cannot see local folders."""
    for log in sorted(folder.glob(f"rank{own.rank}-*.jsonl")):
        found = place_of(log)
        if found is not None and not is_resumed:
            raise LogMismatchError(f"{log} belongs to another run: name another --output-folder, or --resume it")
        if found is not None and found[0] != own:
            place = f"rank {own.rank} is now device {own.index} of node {own.node}: resume with the same ranks"
            raise LogMismatchError(f"{log} belongs to another place, {place}")
