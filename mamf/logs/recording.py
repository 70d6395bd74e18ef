"""Writes a run log: its header with the measured traits, then each row before the caller gets it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from mamf.backend import Backend, Unavailable
from mamf.logs.records import utc_now
from mamf.machine.environment import describe_environment, tool_version
from mamf.measurement import Measurement
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
) -> dict[str, Any]:
    """``plan``: from mamf.logs.plan_records. ``findings``: the doctor's, one line each."""
    sensors = backend.telemetry
    return {
        "tool": tool_version(),
        "command": command,
        "started": utc_now(),
        "device": asdict(backend.info),
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


class Record(NamedTuple):
    """A record of a log that is not a measurement."""

    kind: str
    fields: Mapping[str, Any]


def overhead_after(backend: Backend, rows: Iterable[Measurement]) -> dict[str, Any]:
    """A field of the summary: the timer's overhead estimated again after the last row; empty if no row used it."""
    if not any(row.timer_overhead for row in rows):
        return {}
    try:
        after = backend.timer_overhead()
    except Exception:  # a device that failed has ended the run already, with a reason
        return {}
    return {} if after is None else {"timer_overhead_after_seconds": round(after, 9)}


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
