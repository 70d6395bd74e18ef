"""Writes a run log: its header with the measured traits, then each row before the caller gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mamf.backend import Backend, DeviceInfo, Unavailable, shared_ways
from mamf.errors import DeviceLostError, first_line
from mamf.logs.plan_records import plan_record
from mamf.logs.records import measurement_record, utc_now
from mamf.logs.run_log import RunLog
from mamf.logs.writer import RunLogWriter
from mamf.machine.doctor import diagnose, format_finding
from mamf.machine.environment import describe_environment, tool_version
from mamf.measurement import Measurement
from mamf.plans import Plan
from mamf.regime_traits import BurstTraits, SustainedTraits
from mamf.timers import LARGEST_SHIFT_SECONDS


def traits_record(backend: Backend) -> dict[str, Any]:
    """The traits of an opened device as JSON values; empty if they are its adapter's own."""
    burst, sustained = backend.burst_traits, backend.sustained_traits
    if "burst_traits" not in vars(backend) and not burst.remark:
        return {}
    plain = {name: _plain(traits) for name, traits in (("burst", burst), ("sustained", sustained))}
    return {**plain, "cache_bytes": backend.info.cache_bytes}


def _plain(traits: BurstTraits | SustainedTraits) -> dict[str, Any]:
    return {name: value for name, value in vars(traits).items() if isinstance(value, (float, int, str))}


def apply_traits(backend: Backend, record: Mapping[str, Any]) -> None:
    """Give an opened device the traits of a log, if the log has any."""
    if record:
        backend.burst_traits = replace(backend.burst_traits, **record["burst"])
        backend.sustained_traits = replace(backend.sustained_traits, **record["sustained"])
        backend.info = replace(backend.info, cache_bytes=record["cache_bytes"])


def header_of(
    backend: Backend,
    command: str,
    kernel: str,
    plan: Mapping[str, Any],
    findings: Sequence[str] = (),
    notes: str = "",
    devices: Sequence[DeviceInfo] = (),
) -> dict[str, Any]:
    """``plan``: from mamf.logs.plan_records. ``findings``: the doctor's, one line each. ``devices``: those that share
    the run; empty for a run on one device.
    """
    sensors = backend.telemetry
    return {
        "tool": tool_version(),
        "command": command,
        "started": utc_now(),
        "device": asdict(backend.info),
        **({"devices": [asdict(device) for device in devices]} if devices else {}),
        "timer": backend.timer,
        **({"traits": traits} if (traits := traits_record(backend)) else {}),
        "sensors": f"unavailable: {sensors.reason}" if isinstance(sensors, Unavailable) else "available",
        "kernel": kernel,
        "plan": dict(plan),
        "settings": backend.settings(),
        "environment": describe_environment(backend.environment_variables),
        "findings": list(findings),
        "notes": notes,
    }


@dataclass(frozen=True)
class End:
    """How a run ended: its status, why it ended early, after how many seconds, and how many steps are left."""

    status: str
    reason: str = ""
    elapsed_seconds: float = 0.0
    left: int = 0

    def summary(self, measured: int) -> dict[str, Any]:
        """What the last record of every log says. ``measured``: rows with a figure."""
        return {
            "status": self.status,
            "reason": self.reason,
            "measured": measured,
            "left": self.left,
            "elapsed_seconds": round(self.elapsed_seconds, 3),
        }


#: Makes the last record of a log from its rows.
Summary = Callable[[list[Measurement], End], dict[str, Any]]
#: Records between the last row and the summary, each with its kind.
Records = Callable[[], Iterable[tuple[str, dict[str, Any]]]]


@dataclass
class Recording:
    """``path``: None to keep no log. Closing the iterator ends the log properly.

    ``before``: the locked log to resume, in place of a new one.
    """

    path: str | Path | None
    backend: Backend
    kernel: str
    plan: Plan
    before: tuple[RunLog, RunLogWriter] | None = None

    def record(
        self,
        rows: Iterator[Measurement],
        summary: Summary,
        after: Records = tuple,
        left: Callable[[], int] = lambda: 0,
    ) -> Iterator[Measurement]:
        """The same rows. ``left``: counts the steps that the budget left out.

        Raises UsageError if the log cannot be created.
        """
        if self.path is None:
            return rows
        written = self._written(self._writer(Path(self.path)), rows, summary, after, left)
        next(written)  # enters its ``with``: the log is closed with the iterator, even if no row was read
        return written

    def _writer(self, path: Path) -> RunLogWriter:
        if self.before is not None:
            log, writer = self.before
            writer.write_resume(
                log, {"tool": tool_version(), "command": "from Python", "started": utc_now(), "notes": ""}
            )
            return writer
        findings = [format_finding(finding).strip() for finding in diagnose(self.backend)]
        header = header_of(self.backend, "from Python", self.kernel, plan_record(self.plan), findings)
        return RunLogWriter.create(path, header)

    def _written(
        self,
        writer: RunLogWriter,
        rows: Iterator[Measurement],
        summary: Summary,
        after: Records,
        left: Callable[[], int],
    ) -> Iterator[Any]:
        """None, before anything is measured; then the rows."""
        taken: list[Measurement] = [] if self.before is None else list(self.before[0].lasting)
        status, reason, after_rows = "interrupted", "by the caller", dict[str, Any]()
        with writer:
            yield None
            begun = host_seconds(self.backend)
            try:
                for row in rows:
                    writer.write("measurement", measurement_record(row))
                    taken.append(row)
                    yield row
                after_rows = overhead_after(self.backend, taken) | sharing_after(self.backend)
                status, reason = ("interrupted", "the budget ended") if left() else ("complete", "")
            except KeyboardInterrupt:
                reason = "by the user"
                raise
            except Exception as error:
                reason = first_line(error)
                if isinstance(error, DeviceLostError):
                    writer.write("measurement", measurement_record(error.row))
                raise
            finally:
                for kind, record in after():
                    writer.write(kind, record)
                end = End(status, reason, max(0.0, host_seconds(self.backend) - begun), left())
                writer.write("summary", {**summary(taken, end), **after_rows, "time": utc_now()})


def overhead_after(backend: Backend, rows: Iterable[Measurement]) -> dict[str, Any]:
    """A field of the summary: the timer's overhead estimated again after the last row; empty if no row used it."""
    if not any(row.timer_overhead for row in rows):
        return {}
    try:
        after = backend.timer_overhead()
    except Exception:  # a device that failed has ended the run already, with a reason
        return {}
    return {} if after is None else {"timer_overhead_after_seconds": round(after, 9)}


def sharing_after(backend: Backend) -> dict[str, Any]:
    """A field of the summary: the ways in which the card is shared after the run and was not before; empty if none."""
    try:
        now = backend.sharing()
    except Exception:  # a device that failed has ended the run already, with a reason
        return {}
    new = [way for way in now if way not in shared_ways(backend.info.name)]
    return {"shared_after": new} if new else {}


def describe_shift(summary: dict[str, Any], rows: Sequence[Measurement]) -> str:
    """A warning if the overhead after the run is not the one subtracted in it, else an empty text."""
    timed = [row for row in rows if row.ok and row.timer_overhead]
    after = summary.get("timer_overhead_after_seconds")
    if after is None or not timed or abs(after - timed[-1].timer_overhead) <= LARGEST_SHIFT_SECONDS:
        return ""
    before = timed[-1].timer_overhead
    share = abs(after - before) / min(row.seconds for row in timed)
    return (
        f"the timer's overhead moved from {before * 1e6:.1f} to {after * 1e6:.1f} us during the run: "
        f"the shortest launches may be off by {share:.1%}; measure them again"
    )


def host_seconds(backend: Backend) -> float:
    """Backend time for a summary; 0 if the clock fails, which has already ended the run with a reason."""
    try:
        return backend.now()
    except Exception:
        return 0.0
