"""One rank of several: measures its device alone, then with all others. The leader collects the results of all."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mamf.errors import LogChangedWarning, RunLogWriteError, UnsupportedError, UsageError, describe_error, plugin_errors
from mamf.node.device import DeviceRun
from mamf.node.figures import Device, Launched, Place, places_of_all
from mamf.node.gathering import UNMEASURABLE, UNWRITTEN, Run, device_of, is_complete, logs_of
from mamf.node.group import Meeting, agreed, met
from mamf.plugins.discovery import backend_class

#: The leader's decisions; any other text is the reason why the ranks do not measure together.
GO, COMPLETE = "go", "what is measured together is complete"
# Prefix of failures during the joint measurement: another rank may have caused them.
_SUFFERED = "together with the others: "


def visible_index(backend: str, index: int) -> int:
    """The number of a node's device within this process: a launcher may hide the other ranks' devices."""
    count = backend_class(backend).device_count()
    return index if count > index else index % max(count, 1)


@dataclass
class Rank:
    """This process's part. ``meeting``: None for a single rank. ``patience``: seconds that the others are waited
    for. ``opens``: opens the device. ``on_wait``: called before the others are waited for; ``on_failure``:
    as soon as the device failed.
    """

    launched: Launched
    meeting: Meeting | None
    folder: Path
    patience: float
    opens: Callable[[], DeviceRun]
    on_wait: Callable[[], None] = lambda: None
    on_failure: Callable[[str], None] = lambda reason: None
    #: Set by the leader: ranks that did not report before the joint measurement.
    missing: frozenset[int] = frozenset()

    def measure(self) -> Device:
        """Measure alone, and with the others if all are well; failures are part of the returned device."""
        run, failure, address = None, None, None
        try:
            run = self.opens()
            address = run.backend.bus_address()
            run.alone()
        except plugin_errors() as error:  # whatever a vendor's library throws
            failure = _reason(error)
            self.on_failure(failure)
        apart = ""
        if self.meeting is not None:
            apart = self._decided(failure)
            if run is not None and apart == GO:
                failure = self._together(run)
        place = self.launched.place
        known = Run(self.launched.ranks, apart="" if apart in (GO, COMPLETE) else apart or "alone")
        known.failures = {} if failure is None else {place.rank: failure}
        # Earlier logs do not describe a device that could not be opened.
        logs = {} if run is None else logs_of(self.folder, place)
        device = replace(device_of(place, logs, known), address=address)
        if self.meeting is not None:
            self.meeting.publish(f"done/{place.rank}", device.record())
        return device

    def _decided(self, failure: str | None) -> str:
        """The leader's decision, made after all ranks have reported or are late."""
        assert self.meeting is not None
        place = self.launched.place
        self.meeting.publish(f"alone/{place.rank}", {"failure": failure, "complete": is_complete(self.folder, place)})
        if self.launched.leads:
            came = received(self.meeting, "alone", range(self.launched.ranks), self.patience)
            self.missing = frozenset(rank for rank, report in came.items() if report is None)
            self.meeting.publish("together", joint_decision(came))
        self.on_wait()
        return str(self.meeting.receive("together", 2 * self.patience) or "nothing was heard of the leader")

    def _together(self, run: DeviceRun) -> str | None:
        assert self.meeting is not None
        failure = None
        try:
            with self.meeting.group(self.launched, run.backend, self.patience):
                run.agree, run.meet = agreed, met
                try:
                    run.together()
                except plugin_errors() as error:
                    failure = self._failed(error)  # reported before the group ends, which makes the others fail too
        except plugin_errors() as error:
            failure = failure or self._failed(error)
        return failure

    def _failed(self, error: BaseException) -> str:
        failure = _reason(error, _SUFFERED)
        self.on_failure(failure)
        return failure


def _reason(error: BaseException, when: str = "") -> str:
    """Why a rank ended; a full disk, a log changed by others or a wrong request is not a fault of the device."""
    if isinstance(error, (LogChangedWarning, RunLogWriteError)):
        return f"{UNWRITTEN}: {error}"
    is_asked_wrong = isinstance(error, (UsageError, UnsupportedError))
    return f"{UNMEASURABLE}: {error}" if is_asked_wrong else f"{when}{describe_error(error)}"


def received(meeting: Meeting, key: str, ranks: Iterable[int], patience: float) -> dict[int, Any]:
    """The message of each rank, None if it is late or gone; all share one deadline."""
    deadline = time.monotonic() + patience
    return {rank: meeting.receive(f"{key}/{rank}", deadline - time.monotonic()) for rank in ranks}


def arrive(meeting: Meeting, place: Place) -> None:
    """Report this rank's place and host to the leader, in case it fails later. No log names the host."""
    meeting.publish(f"place/{place.rank}", {"place": [place.node, place.index], "host": socket.gethostname()})


def _places(came: Mapping[int, Any]) -> dict[int, Place]:
    """``came``: what each rank reported on arrival."""
    known = {rank: Place(rank, *report["place"]) for rank, report in came.items() if report is not None}
    return places_of_all(known, len(came))


def joint_decision(reports: Mapping[int, Any]) -> str:
    """Whether all measure together: GO, or why not. ``reports``: what each rank sent when it had measured alone."""
    if bad := [rank for rank, each in reports.items() if each is None or each["failure"]]:
        return f"rank {', '.join(map(str, bad))} did not come so far"
    return COMPLETE if all(each["complete"] for each in reports.values()) else GO


def gathered(
    meeting: Meeting, launched: Launched, patience: float, missing: frozenset[int] = frozenset()
) -> tuple[Run, list[Device]]:
    """The run and every rank's device, as reported to the leader; a rank that did not report has failed."""
    came = received(meeting, "place", range(launched.ranks), 0.0)
    run, devices = Run(launched.ranks, is_over=True, places=_places(came)), list[Device]()
    run.apart = str(meeting.receive("together", 1.0) or "")
    run.apart = "" if run.apart in (GO, COMPLETE) else run.apart
    done = received(meeting, "done", sorted(set(range(launched.ranks)) - missing), patience)
    silent = [rank for rank, report in done.items() if report is None]
    if silent and not run.apart:
        run.apart = f"rank {', '.join(map(str, silent))} ended while all measured together"
    for rank, place in run.places.items():
        if (record := done.get(rank)) is None:
            failure = f"nothing was heard of rank {rank} for {patience:.0f} s"
            device = Device(rank, place.node, place.index, failures=(failure,))
        else:
            device = Device.from_record(record)
            if silent:  # the ranks that reported only suffered from it
                own = [failure for failure in device.failures if not failure.startswith(_SUFFERED)]
                device = replace(device, failures=tuple(own))
        devices.append(replace(device, host=(came[rank] or {}).get("host")))
        no_faults = [reason for reason in device.lacks if reason.startswith((UNWRITTEN, UNMEASURABLE))]
        if ends := [*device.failures, *no_faults]:
            run.failures[rank] = ends[0]
    return run, devices
